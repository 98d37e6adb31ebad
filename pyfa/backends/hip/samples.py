"""Pairs of launches that differ only in the number of iterations of a kernel's hot loop.

Their difference is the cost of these iterations; masks, edges, prologue and epilogue cancel. All
inputs are 0, so the running maximum never changes, and no rescale (rare on any input) is counted.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch

from ...plan import Plan
from ...problem import Call, tensors_of
from ..base import Saved
from ..common import calls
from ..common.calls import DROPOUT, GENERAL, PLAIN
from ..native import backward as native_backward
from ..native import decode as native_decode
from ..native import forward as native_forward
from ..native.launch import Launcher
from ..native.tiles import GROUP, gfx942
from ..native.tiles.gfx942 import LINES
from . import backward, decode, forward, latent

LANES = forward.LANES
_DTYPES = {code: getattr(torch, name) for name, code in calls.DTYPE_CODES.items()}
_DTYPES[forward.FLOAT8_CODE] = getattr(torch, forward.FLOAT8)
_SHORT = {torch.float16: "fp16", torch.bfloat16: "bf16", _DTYPES[forward.FLOAT8_CODE]: "fp8"}
_SCORES = {
    PLAIN: "plain", GENERAL: "softcap", DROPOUT: "dropout", forward.BIAS: "bias",
    forward.ALIBI: "ALiBi", forward.SOFTCAP: "softcap alone", forward.FLOAT32_BIAS: "float32 bias",
    forward.BOOL_BIAS: "bool bias",
}  # fmt: skip
# The dtype of a bias alone; None for q's.
_BIASES = {
    forward.BIAS: None, forward.FLOAT32_BIAS: torch.float32, forward.BOOL_BIAS: torch.bool,
}  # fmt: skip
_PAGING = {
    forward.UNPAGED: "",
    forward.ANY_PAGES: ", paged",
    forward.WHOLE_GROUPS: ", paged in groups",
}
_PAGE = 64
_ALIGNED = 512  # bytes, of PyTorch's allocator on a GPU


class Sample(NamedTuple):
    """``run`` runs one workgroup of full rows with ``short`` or ``long`` keys.

    A tile is ``rows`` × ``keys``, which one wavefront multiplies per iteration; the two runs differ
    by ``tiles`` such tiles. If a workgroup owns keys (dK, dV), rows and keys are exchanged.
    ``masked`` is ``run`` under a causal mask, whose diagonal lies in the last of the tiles.
    """

    title: str
    run: Callable[[Launcher, int], object]
    short: int
    long: int
    rows: int
    keys: int
    tiles: int
    masked: Callable[[Launcher, int], object] | None = None


def of(plan: Plan) -> Sample | None:
    """Return the sample of ``plan``; None for a kernel without a loop over tiles or without a
    sample."""
    make = SAMPLES.get(plan.kernel)
    return make(plan) if make else None


def is_plain(plan: Plan) -> bool:
    """Return whether ``plan`` is for attention without score terms, dropout or pages."""
    constants = dict(plan.constants)
    return not any(constants.get(name) for name in ("SCORE", "GENERAL", "PAGED"))


def _forward(plan: Plan) -> Sample:
    constants = _constants(plan)
    rows, keys, waves = forward.ROWS, constants["BLOCK_K"], constants["WAVES"]
    score, paged = constants["SCORE"], constants["PAGED"]

    def run(launch: Launcher, length: int, causal: bool = False) -> None:
        call = _call(constants, waves * rows, length)
        if causal:
            call = call._replace(window_right=0)
        if score in (GENERAL, forward.SOFTCAP):
            call = call._replace(softcap=30.0)
        if score == DROPOUT:
            call = call._replace(dropout_p=0.1, seed=torch.zeros(1, dtype=torch.int64))
        if score in _BIASES:
            dtype = _BIASES[score] or call.q.dtype
            call = call._replace(bias=_zeros(1, 1, waves * rows, length, dtype=dtype))
        if score == forward.ALIBI:
            call = call._replace(alibi_slopes=_zeros(1, 1))
        if paged:
            call = call._replace(
                k=call.k[:, :_PAGE],
                v=call.v[:, :_PAGE],
                page_table=_zeros(1, length // _PAGE, dtype=torch.int32),
                seqused_k=torch.tensor([length], dtype=torch.int32),
            )
        native_forward.bind(launch, plan, call)(*tensors_of(call))

    # The loop may be unrolled by two tiles: an even number of them in between.
    short, long = 8 * keys, 16 * keys
    kind = _SCORES[score] + _PAGING[paged]
    if waves != gfx942.FORWARD[constants["HEAD_DIM"], constants["HEAD_DIM_V"]].waves:
        kind += f", {waves} wavefronts"
    tiles = (long - short) // keys * waves
    masked = functools.partial(run, causal=True)
    return Sample(f"{_title(constants)} {kind}", run, short, long, rows, keys, tiles, masked)


def _decode(plan: Plan) -> Sample:
    constants = _constants(plan)
    lines, keys = constants["TILES"] * LINES, GROUP

    def run(launch: Launcher, length: int) -> None:
        call = _call(constants, lines, length)
        native_decode.bind(launch, plan, call)(*tensors_of(call))

    # Wavefronts take groups in turn; each repeats itself after its stages, 2 to 4 of its own or 8:
    # all come round after 24.
    turn = decode.THREADS // LANES * 24 * keys
    short, long = turn, 2 * turn
    return Sample(_title(constants), run, short, long, lines, keys, (long - short) // keys)


def _latent(plan: Plan) -> Sample:
    constants = _constants(plan)
    lines, keys = latent.rows_of(plan), GROUP

    def run(launch: Launcher, length: int) -> None:
        call = _call(constants, lines, length)._replace(latent=True)
        native_decode.bind(launch, plan, call)(*tensors_of(call))

    # Slots come round after three tiles, addresses after four.
    short, long = 12 * keys, 36 * keys
    return Sample(_title(constants), run, short, long, lines, keys, (long - short) // keys)


def _backward(plan: Plan) -> Sample:
    constants = _constants(plan)
    rows, keys = backward.owned(plan)
    all_owned = rows or keys
    one_pass = plan.kernel == backward.ONE_PASS
    owned, streamed = all_owned // backward.WAVES, backward.SUM_ROWS if one_pass else 32
    alone = {code: name for name, code in backward.TERMS.items()}.get(constants.get("TERM", 0))
    terms = {alone} if alone else set()
    if constants.get("GENERAL"):
        # A softcap alone may have a plan of its own.
        pair = constants["HEAD_DIM"], constants["HEAD_DIM_V"]
        apart = one_pass or pair in gfx942.TILES.two_pass_terms["softcap"]
        terms = {"softcap", "alibi"} if apart else {"softcap"}

    def run(launch: Launcher, length: int) -> None:
        call = _call(constants, *((length, keys) if keys else (rows, length)))
        of_heads = _zeros(call.q.shape[-2], dtype=torch.float32)
        call = call._replace(
            softcap=30.0 if "softcap" in terms else 0.0,
            alibi_slopes=of_heads if "alibi" in terms else None,
            sinks=of_heads if "sinks" in terms else None,
            dropout_p=0.1 if "dropout" in terms else 0.0,
            seed=torch.zeros(1, dtype=torch.int64) if "dropout" in terms else None,
            bias=_bias(alone, call),
            deterministic=not one_pass,
        )
        _run_backward(launch, call)

    short, long = 8 * streamed, 16 * streamed
    kind = "one pass" if one_pass else "dK, dV" if keys else "dQ"
    if terms:
        kind += f" {' and '.join(sorted(terms, reverse=True))}{' alone' if alone else ''}"
    tiles = (long - short) // streamed * backward.WAVES
    return Sample(f"{_title(constants)} {kind}", run, short, long, owned, streamed, tiles)


def _bias(alone: str | None, call: Call) -> torch.Tensor | None:
    dtypes = {"bias": call.q.dtype, "float32_bias": torch.float32, "bool_bias": torch.bool}
    dtype = dtypes.get(alone or "")
    shape = 1, 1, call.max_seqlen_q, call.max_seqlen_k
    return None if dtype is None else _zeros(*shape, dtype=dtype)


def _run_backward(launch: Launcher, call: Call, bias_grad: bool = False) -> None:
    out, dout = (_zeros(*call.out_shape(), dtype=call.q.dtype) for _ in range(2))
    given = Saved(call, out, _zeros(*call.lse_shape()), dout)
    native_backward.bind(launch, given, bias_grad)(*given.tensors())


def _bias_grad(plan: Plan) -> Sample:
    """Run the gradient of a bias that is broadcast over rows, so that a tile of rows is the loop
    iteration."""
    constants = _constants(plan)
    _, keys = backward.bias_tile(plan)
    softcap = 0.0 if "TERM" in constants else 30.0

    def run(launch: Launcher, length: int) -> None:
        call = _call(constants, length, keys)
        call = call._replace(bias=_zeros(1, 1, 1, keys, dtype=call.q.dtype), softcap=softcap)
        _run_backward(launch, call, bias_grad=True)

    owned, streamed = keys // backward.WAVES, 32
    short, long = 8 * streamed, 16 * streamed
    tiles = (long - short) // streamed * backward.WAVES
    title = f"{_title(constants)} gradient of bias{'' if softcap else ' alone'}"
    return Sample(title, run, short, long, owned, streamed, tiles)


SAMPLES: Mapping[str, Callable[[Plan], Sample]] = {
    forward.KERNEL: _forward,
    decode.KERNEL: _decode,
    latent.KERNEL: _latent,
    backward.KERNEL: _backward,
    backward.ONE_PASS: _backward,
    backward.BIAS_GRAD: _bias_grad,
}


def _constants(plan: Plan) -> dict[str, int]:
    return {name: int(value) for name, value in plan.constants}


def _title(constants: Mapping[str, int]) -> str:
    dtype = _SHORT[_DTYPES[constants["DTYPE"]]]
    for name, word in (("OUT_DTYPE", "to"), ("KEY_DTYPE", "over")):
        if name in constants:
            dtype += f" {word} {_SHORT[_DTYPES[constants[name]]]}"
    return f"{constants['HEAD_DIM']}/{constants['HEAD_DIM_V']} {dtype}"


def empty(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Allocate memory with the alignment of PyTorch's allocator on a GPU.

    The CPU's allocator aligns to 64 bytes only. Rows would then cross cache lines of L1 in one
    process and not in the next, which changed the timing model's shares by up to 0.1.
    """
    last = sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
    nbytes = (last + 1) * dtype.itemsize if all(shape) else 0
    room = torch.zeros(nbytes + _ALIGNED, dtype=torch.uint8)
    begin = -room.data_ptr() % _ALIGNED
    return room[begin : begin + nbytes].view(dtype).as_strided(shape, strides)


def _zeros(*shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    like = torch.empty(shape, dtype=dtype, device="meta")
    return empty(shape, like.stride(), like.dtype)


def _call(constants: Mapping[str, int], rows: int, keys: int) -> Call:
    """Return a call with one head, whose keys are not split."""
    dtype, out = _DTYPES[constants["DTYPE"]], _DTYPES.get(constants.get("OUT_DTYPE", -1))
    of_keys = _DTYPES[constants.get("KEY_DTYPE", constants["DTYPE"])]
    q = _zeros(1, rows, 1, constants["HEAD_DIM"], dtype=dtype)
    k, v = (_zeros(1, keys, 1, constants[dim], dtype=of_keys) for dim in ("HEAD_DIM", "HEAD_DIM_V"))
    return Call(q, k, v, max_seqlen_q=rows, max_seqlen_k=keys, num_splits=1, out_dtype=out)
