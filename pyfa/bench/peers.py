"""The peers: the libraries that are compared. These are pyfa and the other libraries in this
environment that compute attention.

Each peer gets its inputs in its preferred layout. The time to make the inputs is not measured.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import math
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import pyfa
from pyfa.backends import NAMES
from pyfa.problem import NARROW

from . import float8, gpt, packed
from .ready import Attend, Ready
from .suites import Cell

# q, k and v, then the sinks where the cell has them.
Inputs = tuple[torch.Tensor, ...]
Prepare = Callable[[Cell, torch.device], Ready]


class Peer(NamedTuple):
    """A library to compare with. ``prepare`` returns a ``Ready``, or raises if the library cannot
    run the cell; ``why_not`` returns what the environment lacks to run the library on a device of
    the given type, or None. ``packed`` and ``float8`` are the same as ``prepare`` for packed and
    float8 cells. ``attend`` makes the attention function for a model. ``packed``, ``float8`` or
    ``attend`` is None if the library takes no part in cells of this kind. ``within`` makes the
    context in which packed cells and models run."""

    name: str
    meaning: str
    why_not: Callable[[str], str | None]
    prepare: Prepare
    packed: Prepare | None = None
    attend: Callable[[Cell, torch.device], Attend] | None = None
    within: Callable[[], Any] = nullcontext
    float8: Prepare | None = None

    def ready(self, cell: Cell, device: torch.device) -> Ready:
        """Prepare the peer for the kind of cell. Raises if the peer cannot run it."""
        if cell.layers:
            if self.attend is None:
                raise ValueError("the benchmark does not build a model with it")
            return gpt.step(cell, device, self.attend(cell, device))._replace(within=self.within)
        if cell.fp8:
            if self.float8 is None:
                raise ValueError("the benchmark does not run it with float8")
            return self.float8(cell, device)
        if cell.lengths:
            if self.packed is None:
                raise ValueError("the benchmark does not run it on packed sequences")
            return self.packed(cell, device)._replace(within=self.within)
        return self.prepare(cell, device)


def inputs(cell: Cell, device: torch.device) -> tuple[Inputs, torch.Tensor]:
    """Return q, k, v as (batch, seqlen, heads, head_dim), then (heads,) sinks if the cell has them,
    and the gradient of the output."""
    generator = torch.Generator(device).manual_seed(0)
    dtype = getattr(torch, cell.dtype)

    def normal(length: int, heads: int, dim: int = cell.head_dim) -> torch.Tensor:
        shape = (cell.batch, length, heads, dim)
        x = torch.randn(shape, generator=generator, device=device, dtype=dtype)
        return x.requires_grad_(cell.grad)

    q = normal(cell.seqlen_q, cell.heads_q)
    k, v = normal(cell.seqlen_k, cell.heads_k), normal(cell.seqlen_k, cell.heads_k, cell.dim_v)
    dout = torch.randn((*q.shape[:3], cell.dim_v), device=device, dtype=dtype)
    if not cell.sinks:
        return (q, k, v), dout
    sinks = torch.randn(cell.heads_q, generator=generator, device=device, dtype=dtype)
    return (q, k, v, sinks.requires_grad_(cell.grad)), dout


def _heads_first(cell: Cell, device: torch.device, *, copied: bool) -> tuple[Inputs, torch.Tensor]:
    """Return ``inputs`` as (batch, heads, seqlen, head_dim): views, or tensors in that order."""
    (q, k, v, *sinks), dout = inputs(cell, device)
    turned = [x.detach().transpose(1, 2) for x in (q, k, v, dout)]
    if copied:
        turned = [x.contiguous() for x in turned]
    for x in turned[:3]:
        x.requires_grad_(cell.grad)
    return (*turned[:3], *sinks), turned[3]


def _pyfa_attend(
    backend: str | None, cell: Cell, device: torch.device, *, deterministic: bool = False
) -> Attend:
    window = None if cell.window < 0 else (cell.window, 0)

    def attend(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        result = pyfa.attention(
            q, k, v, causal=cell.causal, window=window, softcap=cell.softcap, sinks=sinks,
            deterministic=deterministic or cell.deterministic, backend=backend,
        )  # fmt: skip
        assert isinstance(result, torch.Tensor)
        return result

    return attend


def _pyfa(
    backend: str | None, cell: Cell, device: torch.device, *, deterministic: bool = False
) -> Ready:
    leaves, dout = inputs(cell, device)
    if not cell.cache:
        attend = _pyfa_attend(backend, cell, device, deterministic=deterministic)
        return Ready(lambda: attend(*leaves), leaves, dout)

    def forward() -> torch.Tensor:
        result = pyfa.attention_kvcache(*leaves, causal=cell.causal, backend=backend)
        assert isinstance(result, torch.Tensor)
        return result

    return Ready(forward, leaves, dout)


def _visible(cell: Cell, rows: int, keys: int, device: torch.device) -> torch.Tensor | None:
    """Return the mask of a causal cell as a matrix; None if nothing is masked."""
    if not cell.causal or rows <= 1:
        return None
    visible = torch.ones(rows, keys, dtype=torch.bool, device=device).tril(keys - rows)
    return visible.triu(keys - rows - cell.window) if cell.window >= 0 else visible


def _sdpa(kind: SDPBackend | None, cell: Cell, device: torch.device) -> Ready:
    for term in ("softcap", "sinks"):
        if getattr(cell, term):
            raise ValueError(f"it takes no {term}")
    leaves, dout = _heads_first(cell, device, copied=False)
    q, k, v = leaves
    # One query sees all keys. With PyTorch's causal mask it would see only the first.
    causal = cell.causal and cell.seqlen_q > 1
    mask = None
    if cell.window >= 0:
        causal, mask = False, _visible(cell, cell.seqlen_q, cell.seqlen_k, device)
    call = functools.partial(
        F.scaled_dot_product_attention,
        q,
        k,
        v,
        attn_mask=mask,
        is_causal=causal,
        enable_gqa=cell.heads_q != cell.heads_k,
    )
    return Ready(call, leaves, dout, _choosing(kind))


def _choosing(kind: SDPBackend | None) -> Callable[[], Any]:
    return nullcontext if kind is None else lambda: sdpa_kernel(kind)


def _sdpa_attend(cell: Cell, device: torch.device) -> Attend:
    gqa = cell.heads_q != cell.heads_k

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=cell.causal, enable_gqa=gqa)
        return out.transpose(1, 2)

    return attend


@functools.cache
def _compiled_flex() -> Callable[..., torch.Tensor]:
    from torch.nn.attention.flex_attention import flex_attention

    return _compiled(flex_attention)


@functools.cache
def _compiled_flex_with_sinks() -> Callable[..., torch.Tensor]:
    return _compiled(_flex_with_sinks)


def _compiled(function: Callable[..., Any]) -> Callable[..., torch.Tensor]:
    # Every cell has shapes of its own: dynamic ones would be slower.
    torch._dynamo.config.recompile_limit = 256
    compiled: Callable[..., torch.Tensor] = torch.compile(function, dynamic=False)
    return compiled


def _flex_with_sinks(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor, **options: Any
) -> torch.Tensor:
    """Compute FlexAttention without sinks, then scale each row by the share of its keys in the
    softmax that has the sink too: exp(lse) / (exp(lse) + exp(sink))."""
    from torch.nn.attention.flex_attention import AuxRequest, flex_attention

    out, aux = flex_attention(q, k, v, return_aux=AuxRequest(lse=True), **options)
    share = torch.sigmoid(aux.lse - sinks[:, None].float())
    scaled: torch.Tensor = out * share[..., None].to(out.dtype)
    return scaled


def _capped(cap: float, score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    return cap * torch.tanh(score / cap)


def _earlier(b: Any, h: Any, i: Any, j: Any) -> Any:
    return i >= j


def _near(window: int, b: Any, h: Any, i: Any, j: Any) -> Any:
    return (i >= j) & (i - j <= window)


_WIDE_TILES = tuple(
    {"BLOCK_M": rows, "BLOCK_N": keys, "num_warps": warps, "num_stages": stages}
    for rows, keys, warps, stages in ((64, 32, 8, 2), (64, 64, 8, 1), (32, 32, 4, 2))
)


def _fastest(call: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return ``call`` with the fastest of ``_WIDE_TILES``. On an H200, FlexAttention's default
    tiles do not fit at head_dim 512 ("No valid triton configs")."""

    def seconds(one: Callable[..., torch.Tensor]) -> float:
        try:
            one()
        except RuntimeError:  # tiles that do not fit either
            return math.inf
        torch.cuda.synchronize()
        begin = time.perf_counter()
        one()
        torch.cuda.synchronize()
        return time.perf_counter() - begin

    calls = [functools.partial(call, kernel_options=tiles) for tiles in _WIDE_TILES]
    return min(calls, key=seconds)


def _flex(cell: Cell, device: torch.device) -> Ready:
    from torch.nn.attention.flex_attention import create_block_mask

    leaves, dout = _heads_first(cell, device, copied=True)
    mask = None
    if cell.causal and cell.seqlen_q > 1:
        seen = _earlier if cell.window < 0 else functools.partial(_near, cell.window)
        mask = create_block_mask(seen, None, None, cell.seqlen_q, cell.seqlen_k, device=device)
    call: Callable[..., torch.Tensor] = functools.partial(
        _compiled_flex_with_sinks() if cell.sinks else _compiled_flex(),
        *leaves,
        score_mod=functools.partial(_capped, cell.softcap) if cell.softcap else None,
        block_mask=mask,
        enable_gqa=cell.heads_q != cell.heads_k,
    )
    if device.type == "cuda" and max(cell.head_dim, cell.dim_v) > NARROW:
        call = _fastest(call)
    return Ready(call, leaves, dout)


# Scores, masked scores, probabilities; then their gradients.
_NAIVE_COPIES = {"forward": 3, "backward": 6, "both": 6}


def _naive(cell: Cell, device: torch.device) -> Ready:
    scores = cell.batch * cell.heads_q * cell.seqlen_q * cell.seqlen_k
    width = 4 if cell.dtype == "float32" else 2
    if device.type == "cuda":
        room = torch.cuda.mem_get_info(device)[0]
        if scores * width * _NAIVE_COPIES[cell.passes] > room:
            raise ValueError(f"the scores do not fit in {room / 1e9:.0f} GB")
    leaves, dout = _heads_first(cell, device, copied=True)
    return Ready(lambda: _eager(cell, *leaves), leaves, dout)


def _eager(
    cell: Cell, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None = None
) -> torch.Tensor:
    """Compute attention of (batch, heads, seqlen, head_dim) without copying the heads of a
    group."""
    grouped = q.unflatten(1, (cell.heads_k, -1))
    score = grouped @ k[:, :, None].transpose(-1, -2) * cell.head_dim**-0.5
    if cell.softcap:
        score = cell.softcap * torch.tanh(score / cell.softcap)
    visible = _visible(cell, q.shape[2], k.shape[2], q.device)
    if visible is not None:
        score = score.masked_fill(~visible, -torch.inf)
    if sinks is None:
        weights = score.softmax(-1)
    else:  # one more key per row, without a value
        sink = sinks.view(cell.heads_k, -1, 1, 1).expand(*score.shape[:-1], 1)
        weights = torch.cat([score, sink], -1).softmax(-1)[..., :-1]
    out: torch.Tensor = weights @ v[:, :, None]
    return out.flatten(1, 2)


def _naive_attend(cell: Cell, device: torch.device) -> Attend:
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return _eager(cell, q, k, v).transpose(1, 2)

    return attend


def _package(name: str, cell: Cell, device: torch.device) -> Ready:
    """Prepare one of flash-attention's own packages: ``flash_attn`` (2), ``flash_attn_interface``
    (3) or ``flash_attn.cute`` (4), which has no function for a cache."""
    leaves, dout = inputs(cell, device)
    module = importlib.import_module(name)
    if not cell.cache or not hasattr(module, "flash_attn_with_kvcache"):
        attend = _package_attend(name, cell, device)
        return Ready(lambda: attend(*leaves), leaves, dout)
    function = module.flash_attn_with_kvcache

    def forward() -> torch.Tensor:
        return packed.out_of(function(*leaves, causal=cell.causal))

    return Ready(forward, leaves, dout)


def _package_attend(name: str, cell: Cell, device: torch.device) -> Attend:
    function = importlib.import_module(name).flash_attn_func
    taken = inspect.signature(function).parameters
    options: dict[str, Any] = {} if cell.window < 0 else {"window_size": (cell.window, 0)}
    if cell.softcap:
        if "softcap" not in taken:
            raise ValueError("it takes no softcap")
        options["softcap"] = cell.softcap
    if cell.cache:
        options["num_splits"] = 0  # as many parts as it thinks best
    # Version 4's name.
    if cell.sinks and "learnable_sink" not in taken:
        raise ValueError("it takes no sinks")

    def attend(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        given = options if sinks is None else {**options, "learnable_sink": sinks}
        return packed.out_of(function(q, k, v, causal=cell.causal, **given))

    return attend


def _anywhere(device: str) -> str | None:
    return None


def _on_gpu(device: str) -> str | None:
    return None if device == "cuda" else "it needs a GPU"


def _on_nvidia(device: str) -> str | None:
    return _on_gpu(device) or ("it needs an NVIDIA GPU" if torch.version.hip else None)


def _flex_lacks(device: str) -> str | None:
    missing = None if importlib.util.find_spec("triton") else "the package triton is not installed"
    return _on_gpu(device) or missing


def _package_lacks(name: str, device: str) -> str | None:
    try:
        found = importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # of the package around it
        found = False
    return _on_gpu(device) or (None if found else f"the package {name} is not installed")


def _of_pyfa(name: str, meaning: str, why_not: Callable[[str], str | None],
             backend: str | None, deterministic: bool = False) -> Peer:  # fmt: skip
    return Peer(
        name, meaning, why_not, functools.partial(_pyfa, backend, deterministic=deterministic),
        functools.partial(packed.by_pyfa, backend, deterministic=deterministic),
        functools.partial(_pyfa_attend, backend, deterministic=deterministic),
        float8=functools.partial(float8.by_pyfa, backend),
    )  # fmt: skip


def _of_sdpa(name: str, meaning: str, why_not: Callable[[str], str | None],
             kind: SDPBackend | None, float8: Prepare | None = None) -> Peer:  # fmt: skip
    return Peer(
        name, meaning, why_not, functools.partial(_sdpa, kind),
        functools.partial(packed.one_by_one, _sdpa_attend), _sdpa_attend, _choosing(kind), float8,
    )  # fmt: skip


def _of_package(name: str, package: str) -> Peer:
    return Peer(
        name, package, functools.partial(_package_lacks, package),
        functools.partial(_package, package), functools.partial(packed.by_package, package),
        functools.partial(_package_attend, package),
        float8=float8.by_flash_attention_3 if package == "flash_attn_interface" else None,
    )  # fmt: skip


_ALL = (
    _of_pyfa("pyfa", "the backend that pyfa chooses", _anywhere, None),
    _of_sdpa("sdpa", "PyTorch's own choice", _anywhere, None),
    _of_sdpa("flash", "PyTorch's FlashAttention-2", _on_gpu, SDPBackend.FLASH_ATTENTION),
    _of_sdpa("cudnn", "PyTorch's cuDNN attention; of float8 cuDNN's own, which writes float8",
             _on_nvidia, SDPBackend.CUDNN_ATTENTION, float8.by_cudnn),
    _of_sdpa("efficient", "PyTorch's memory-efficient attention", _on_gpu,
             SDPBackend.EFFICIENT_ATTENTION),
    Peer("flex", "FlexAttention, compiled", _flex_lacks, _flex),
    _of_package("fa2", "flash_attn"),
    _of_package("fa3", "flash_attn_interface"),
    _of_package("fa4", "flash_attn.cute"),
    Peer("naive", "all scores, then softmax, then the values", _anywhere, _naive,
         functools.partial(packed.one_by_one, _naive_attend), _naive_attend),
)  # fmt: skip
PEERS: dict[str, Peer] = {peer.name: peer for peer in _ALL}


# Follows "pyfa:" in place of a backend's name.
_DETERMINISTIC = "deterministic"


def _forced(backend: str) -> Peer:
    if backend == _DETERMINISTIC:
        meaning = "the backend that pyfa chooses, with deterministic gradients"
        return _of_pyfa(f"pyfa:{backend}", meaning, _anywhere, None, True)

    def why_not(device: str) -> str | None:
        from pyfa.backends import BACKENDS

        return BACKENDS[backend].why_unavailable()

    return _of_pyfa(f"pyfa:{backend}", f"pyfa's {backend}", why_not, backend)


def chosen(wanted: list[str] | None, device: str) -> tuple[list[Peer], dict[str, str]]:
    """Return the peers that take part, pyfa first, and the reasons why the others do not.

    By default, every peer that the environment has takes part, except ``sdpa`` on a GPU: on a GPU,
    the kernel that SDPA would choose is already one of the other peers. If requested, pyfa takes
    part a second time, with deterministic gradients or with a named backend. Raises ``ValueError``
    for an unknown name, or for a peer that cannot take part on this machine.
    """
    if wanted is None:
        lacking = {name: peer.why_not(device) for name, peer in PEERS.items()}
        absent = {name: why for name, why in lacking.items() if why is not None}
        found = [peer for name, peer in PEERS.items() if name not in absent]
        return [peer for peer in found if peer.name != "sdpa" or device == "cpu"], absent
    found = []
    for name in ["pyfa", *wanted]:
        head, _, backend = name.partition(":")
        if name not in PEERS and not (head == "pyfa" and backend in (*NAMES, _DETERMINISTIC)):
            expected = f"{', '.join(PEERS)}, pyfa:{_DETERMINISTIC} or pyfa:BACKEND"
            raise ValueError(f"--peers: expected {expected}; got {name!r}")
        peer = PEERS.get(name) or _forced(backend)
        why = peer.why_not(device)
        if why is not None:
            raise ValueError(f"--peers: {name} cannot run here: {why}")
        if peer.name not in [other.name for other in found]:
            found.append(peer)
    return found, {}
