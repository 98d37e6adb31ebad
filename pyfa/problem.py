"""The request: ``Call`` holds the tensors of one attention, ``Problem`` only its properties.

Everything after the public functions works on a ``Call`` whose arguments were checked and brought
into one form (see ``request.py``): the window as two integers, ``causal`` as a right bound of 0,
the bias with four dimensions, slopes and sinks in float32, the seed on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from . import mods
from .device import Device


class Call(NamedTuple):
    """One checked attention: tensors and run-time scalars, in the form that backends take.

    Dense: q (B, Sq, H, D), k (B, Sk, Hk, D), v (B, Sk, Hk, Dv). With ``cu_seqlens_q`` q is
    (total_q, H, D); with ``cu_seqlens_k`` k and v are (total_k, Hk, D). With ``page_table`` (B,
    pages) k and v are (num_pages, page_size, Hk, D). ``cache_batch_idx`` (B,) is the row of k and v
    that each sequence uses, ``cache_leftpad`` (B,) its first valid key. ``bias`` is (B | 1, H | 1,
    Sq | 1, Sk | 1), ``alibi_slopes`` (H,) or (B, H) and ``sinks`` (H,) are float32, ``seed`` is one
    int64 on the device. ``window_left`` and ``window_right`` are −1 for unlimited, and count from
    ``window_shift`` keys to the right of the query's own position: a window with a negative bound
    is represented as a shifted one (``validate.window``). ``attention_chunk`` is 0 for no chunks;
    chunks are counted in the larger problem (see ``k_start``).

    ``q_descale``, ``k_descale`` and ``v_descale`` are float32 factors of float8 q, k and v, all of
    one kind. They are (B, Hk), per sequence and KV head, with any strides. Or they are per block of
    stored rows: (B, Hk, blocks), where a packed tensor counts as one sequence, or (num_pages, Hk,
    blocks) for pages. ``scales_of`` returns the size of a block. Those of k and v have the same
    shape; q has none unless it is float8. ``out_dtype`` is the output dtype of float8 queries, and
    otherwise None (q's).

    ``mods`` is the digest of a score_mod and mask_mod (``mods.of``), "" without them. ``captured0``
    … are the tensors that they read, of any shape and strides.

    For a block of a larger problem, ``q_start`` … ``batch_start`` are the indices in the larger
    problem of the block's row 0, key 0, query head 0 and sequence 0. Dropout counts from them;
    ``k_start`` must then be a multiple of 4. For masks and ALiBi query i is at key position i + Sk
    − Sq + q_start − k_start, where Sq and Sk are the block's own lengths. The tensors are those of
    the block.

    With ``tree``, ``bias`` is boolean, (B | 1, Sq, Sq), and applies only to the last Sq keys of
    each sequence: key j has column j − (Sk − Sq). All earlier keys are visible.

    With ``latent``, v is a view of k's first elements. With ``topk``, in addition, each sequence is
    one row of queries, and its pages, which hold one key each, are the keys that it sees.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    bias: torch.Tensor | None = None
    alibi_slopes: torch.Tensor | None = None
    sinks: torch.Tensor | None = None
    seed: torch.Tensor | None = None
    cu_seqlens_q: torch.Tensor | None = None
    cu_seqlens_k: torch.Tensor | None = None
    seqused_q: torch.Tensor | None = None
    seqused_k: torch.Tensor | None = None
    page_table: torch.Tensor | None = None
    cache_batch_idx: torch.Tensor | None = None
    cache_leftpad: torch.Tensor | None = None
    q_descale: torch.Tensor | None = None
    k_descale: torch.Tensor | None = None
    v_descale: torch.Tensor | None = None
    captured0: torch.Tensor | None = None
    captured1: torch.Tensor | None = None
    captured2: torch.Tensor | None = None
    captured3: torch.Tensor | None = None
    captured4: torch.Tensor | None = None
    captured5: torch.Tensor | None = None
    captured6: torch.Tensor | None = None
    captured7: torch.Tensor | None = None
    max_seqlen_q: int = 0
    max_seqlen_k: int = 0
    scale: float = 1.0
    window_left: int = -1
    window_right: int = -1
    softcap: float = 0.0
    dropout_p: float = 0.0
    deterministic: bool = False
    return_lse: bool = False
    num_splits: int = 0
    batch_invariant: bool = False
    out_dtype: torch.dtype | None = None
    q_start: int = 0
    k_start: int = 0
    head_start: int = 0
    batch_start: int = 0
    latent: bool = False
    topk: bool = False
    window_shift: int = 0
    attention_chunk: int = 0
    mods: str = ""
    tree: bool = False

    @property
    def captured(self) -> tuple[torch.Tensor, ...]:
        """Return the tensors that ``mods`` read, by slot."""
        found: tuple[Any, ...] = self[_CAPTURED:TENSORS]
        return tuple(x for x in found if x is not None)

    @property
    def window(self) -> tuple[int | None, int | None]:
        """Return the bounds as requested, relative to the query's own position; None for
        unlimited."""
        left, right, shift = self.window_left, self.window_right, self.window_shift
        return None if left < 0 else left - shift, None if right < 0 else right + shift

    @property
    def batch(self) -> int:
        """Return the number of sequences."""
        if self.cu_seqlens_q is not None:
            return self.cu_seqlens_q.shape[0] - 1
        return self.q.shape[0]

    @property
    def has_spare_q(self) -> bool:
        """Return whether rows of q may belong to no sequence."""
        return self.cu_seqlens_q is not None or self.seqused_q is not None

    @property
    def has_spare_k(self) -> bool:
        """Return whether rows of k and v may belong to no sequence, if k and v are not paged."""
        return self.cu_seqlens_k is not None or self.seqused_k is not None

    def lse_shape(self) -> tuple[int, ...]:
        """Return (B, H, Sq), or (H, total_q) if q is packed."""
        if self.cu_seqlens_q is not None:
            return (self.q.shape[1], self.q.shape[0])
        return (self.q.shape[0], self.q.shape[2], self.q.shape[1])

    def out_shape(self) -> tuple[int, ...]:
        """Return q's shape with V's head_dim."""
        return (*self.q.shape[:-1], self.v.shape[-1])

    def dtype_of_out(self) -> torch.dtype:
        """Return ``out_dtype``, or q's dtype."""
        return self.out_dtype or self.q.dtype


TENSORS = Call._fields.index("max_seqlen_q")
"""Call's leading fields, which are tensors or None."""
_CAPTURED = Call._fields.index("captured0")
_CU_Q, _CU_K = Call._fields.index("cu_seqlens_q"), Call._fields.index("cu_seqlens_k")


class Append(NamedTuple):
    """The changes to a KV cache, and to the queries, before attention.

    ``k`` and ``v`` (B, new, Hk, D), or (total_new, Hk, D) with ``cu_seqlens`` (B+1,), are appended
    after the ``seqused_k`` keys of each sequence of the call, and its queries see them. Rotary
    rotates the new keys and ``Call.q``: ``cos`` and ``sin`` are (max_position, R). The new keys of
    sequence b have positions from ``start[b]`` on. So do its queries if ``moving``; otherwise all
    are at ``start[b]``. ``start`` is int32 (B,); None for ``seqused_k``.
    """

    k: torch.Tensor | None = None
    v: torch.Tensor | None = None
    cos: torch.Tensor | None = None
    sin: torch.Tensor | None = None
    start: torch.Tensor | None = None
    cu_seqlens: torch.Tensor | None = None
    interleaved: bool = True
    moving: bool = False


def counted(call: Call, append: Append) -> Call:
    """Return ``call`` with lengths that include the keys of ``append``."""
    if append.k is None or call.seqused_k is None:
        return call
    new = append.k.shape[1] if append.cu_seqlens is None else append.cu_seqlens.diff()
    return call._replace(seqused_k=call.seqused_k + new)


_APPENDED = 6  # Append's leading fields, which are tensors or None
APPEND_NAMES = (
    "new_k", "new_v", "rotary_cos", "rotary_sin", "rotary_seqlens", "cu_seqlens_new",
)  # fmt: skip


class Form(NamedTuple):
    """A call and its append without the tensors; ``names`` lists which tensors they have.

    Packed queries and keys may share one tensor of offsets, which is then listed once.
    """

    names: tuple[str, ...]
    places: tuple[int, ...]
    numbers: tuple[Any, ...]
    shared_offsets: bool
    append: Append | None

    def fill(self, tensors: Sequence[torch.Tensor]) -> tuple[Call, Append | None]:
        """Return the call and its append with these tensors."""
        fields: list[Any] = [None] * (TENSORS + _APPENDED)
        for place, x in zip(self.places, tensors, strict=True):
            fields[place] = x
        if self.shared_offsets:
            fields[_CU_K] = fields[_CU_Q]
        append = self.append
        if append is not None:
            append = Append(*fields[TENSORS:], *append[_APPENDED:])
        return Call(*fields[:TENSORS], *self.numbers), append


_ALL_NAMES = (*Call._fields[:TENSORS], *APPEND_NAMES)


def tensors_of(call: Call, append: Append | None = None) -> tuple[torch.Tensor, ...]:
    """Return the tensors of a call and its append, in the order of ``Form.names``."""
    fields: tuple[Any, ...] = call[:TENSORS]
    if fields[_CU_K] is fields[_CU_Q]:
        fields = (*fields[:_CU_K], None, *fields[_CU_K + 1 :])
    if append is not None:
        fields += append[:_APPENDED]
    return tuple(x for x in fields if x is not None)


def form_of(call: Call, append: Append | None = None) -> Form:
    """Return the part of a call that stays the same when the call is repeated with other
    tensors."""
    fields: list[Any] = [*call[:TENSORS], *(append[:_APPENDED] if append is not None else ())]
    shared = fields[_CU_Q] is not None and fields[_CU_K] is fields[_CU_Q]
    if shared:
        fields[_CU_K] = None
    places = tuple(i for i, x in enumerate(fields) if x is not None)
    return Form(
        tuple(_ALL_NAMES[i] for i in places),
        places,
        tuple(call[TENSORS:]),
        shared,
        None if append is None else Append(interleaved=append.interleaved, moving=append.moving),
    )


STEPS = 8  # from one power of two to the next, where the grid follows from sizes


def bucket(size: int, steps: int = 1) -> int:
    """Return ``size`` rounded up to a power of two or, with ``steps``, to one of this number of
    equal steps between two powers of two. 0 stays 0. The rounding limits the number of plans."""
    if size <= 0:
        return 0
    power = 1 << (size - 1).bit_length()
    step = max(1, power // 2 // steps)
    return -(-size // step) * step


def rows_per_scale(blocks: int, rows: int) -> int:
    """Return how many rows share one scale if ``rows`` rows are divided into ``blocks`` blocks with
    one scale each: a power of two, or 0 if no power of two gives that number of blocks.

    The answer is unique if there are several blocks, because no two powers of two give the same
    number of them, ⌈rows / power⌉. With one block any power that holds all rows will do.
    """
    size = bucket(-(-rows // blocks)) if rows and blocks else 1
    return size if -(-rows // size) == blocks else 0


def scales_of(descale: torch.Tensor | None, x: torch.Tensor) -> int:
    """Return how many rows of x, (…, rows, heads, head_dim), share one of its scales; 0 if all rows
    share one."""
    if descale is None or descale.dim() == 2:
        return 0
    return rows_per_scale(descale.shape[2], x.shape[-3])


class Asked(NamedTuple):
    """The arguments that determine which features a call needs."""

    call: Call
    needs_grad: bool = False
    bias_grad: bool = False


_KERNELS = frozenset({"hip", "cuda", "triton", "torch"})
NARROW = 256  # the widest head that every kernel takes


class Feature(NamedTuple):
    """A capability that a problem needs, with everything that the code outside of kernels knows
    about it.

    ``phrase``: its name in messages. ``is_needed``: whether a call needs it. ``by``: the backends
    that support it (the emulator counts as hip). All other backends refuse the feature, so a new
    feature is refused everywhere. ``shown``: a description with the call's fields in braces, if the
    name says too little; "" if shapes and dtypes show it. ``is_term``: it changes a score between
    product and softmax, or the softmax sum. ``has_values``: it comes with offsets, lengths, page
    numbers or scales, which are checked before a run. ``may_have_bools``: it comes with a tensor
    that may be boolean. This is read in every element, so only ``PYFA_CHECK=1`` checks it.
    ``flag``: its option in ``pyfa explain``; "" for ``--features``.
    """

    name: str
    phrase: str
    is_needed: Callable[[Asked], bool]
    by: frozenset[str] = frozenset()
    shown: str | None = None
    is_term: bool = False
    has_values: bool = False
    may_have_bools: bool = False
    flag: str = ""


FEATURES: dict[str, Feature] = {
    feature.name: feature
    for feature in (
        Feature("causal", "causal masking",
                lambda asked: asked.call.window_right == 0 and not asked.call.window_shift,
                _KERNELS, flag="--causal"),
        Feature("window", "a sliding window", lambda asked: _has_window(asked.call), _KERNELS,
                shown="window={window}", flag="--window L,R"),
        Feature("negative_edge", "a window with a negative bound",
                lambda asked: asked.call.window_shift != 0, _KERNELS, shown="",
                flag="--window L,R"),
        Feature("chunk", "attention_chunk", lambda asked: asked.call.attention_chunk > 0,
                _KERNELS, shown="attention_chunk={attention_chunk}"),
        Feature("softcap", "softcap", lambda asked: asked.call.softcap != 0.0, _KERNELS,
                shown="softcap={softcap}", is_term=True),
        Feature("alibi", "ALiBi", lambda asked: asked.call.alibi_slopes is not None, _KERNELS,
                is_term=True),
        Feature("bias", "bias",
                lambda asked: asked.call.bias is not None and not asked.call.tree, _KERNELS,
                is_term=True, may_have_bools=True),
        Feature("tree", "a mask over the new rows (tree_mask)", lambda asked: asked.call.tree,
                _KERNELS, may_have_bools=True),
        Feature("bias_grad", "the gradient of bias", lambda asked: asked.bias_grad,
                frozenset({"hip", "triton", "torch"})),
        Feature("sinks", "attention sinks", lambda asked: asked.call.sinks is not None, _KERNELS,
                is_term=True),
        Feature("dropout", "dropout", lambda asked: asked.call.dropout_p > 0.0, _KERNELS,
                shown="dropout_p={dropout_p}", is_term=True),
        Feature("score_mod", "a score_mod",
                lambda asked: bool(asked.call.mods) and mods.of(asked.call.mods).score is not None,
                _KERNELS, is_term=True),
        Feature("captured_grad", "the gradient of tensors captured by a score_mod",
                lambda asked: asked.needs_grad and bool(asked.call.mods)
                and bool(mods.of(asked.call.mods).wanted),
                frozenset({"torch"})),
        Feature("mask_mod", "a mask_mod",
                lambda asked: bool(asked.call.mods) and mods.of(asked.call.mods).mask is not None,
                _KERNELS, is_term=True),
        Feature("varlen", "a packed batch (cu_seqlens)",
                lambda asked: _any(asked.call.cu_seqlens_q, asked.call.cu_seqlens_k), _KERNELS,
                has_values=True),
        Feature("seqused", "a length per sequence (seqused, cache_seqlens)",
                lambda asked: _any(asked.call.seqused_q, asked.call.seqused_k), _KERNELS,
                has_values=True),
        Feature("paged", "a paged cache (page_table)",
                lambda asked: asked.call.page_table is not None, _KERNELS, has_values=True),
        Feature("leftpad", "cache_leftpad", lambda asked: asked.call.cache_leftpad is not None,
                _KERNELS, has_values=True),
        Feature("batch_idx", "cache_batch_idx",
                lambda asked: asked.call.cache_batch_idx is not None, _KERNELS, has_values=True),
        Feature("gqa", "grouped-query attention",
                lambda asked: asked.call.q.shape[-2] != asked.call.k.shape[-2], _KERNELS,
                shown="", flag="--heads H,Hk"),
        Feature("dv", "a different head_dim for V",
                lambda asked: asked.call.q.shape[-1] != asked.call.v.shape[-1], _KERNELS,
                shown="", flag="--head-dim D,Dv"),
        Feature("wide", f"a head_dim above {NARROW}",
                lambda asked: not asked.call.latent
                and max(asked.call.q.shape[-1], asked.call.v.shape[-1]) > NARROW,
                _KERNELS, shown="", flag="--head-dim D,Dv"),
        Feature("latent", "latent attention", lambda asked: asked.call.latent, _KERNELS),
        Feature("topk", "a list of keys for each row", lambda asked: asked.call.topk, _KERNELS),
        Feature("backward", "backward", lambda asked: asked.needs_grad, _KERNELS),
        Feature("dlse", "the gradient through the returned LSE",
                lambda asked: asked.needs_grad and asked.call.return_lse, _KERNELS),
        Feature("deterministic", "a deterministic backward",
                lambda asked: asked.needs_grad and asked.call.deterministic, _KERNELS),
        Feature("batch_invariant", "batch invariance (batch_invariant)",
                lambda asked: asked.call.batch_invariant, _KERNELS),
        Feature("fp8", "float8", lambda asked: asked.call.k.dtype.itemsize == 1, _KERNELS,
                shown="", has_values=True, flag="--dtype float8_e4m3fn"),
    )
}  # fmt: skip
TERMS = frozenset(name for name, feature in FEATURES.items() if feature.is_term)
WITH_VALUES = frozenset(name for name, feature in FEATURES.items() if feature.has_values)
MAY_HAVE_BOOLS = frozenset(name for name, feature in FEATURES.items() if feature.may_have_bools)
# With these, how much a block does depends on the values of tensors.
_UNEVEN = ("varlen", "seqused", "paged", "leftpad", "topk")


def _any(*tensors: torch.Tensor | None) -> bool:
    return any(x is not None for x in tensors)


class Band(NamedTuple):
    """The position of a call's first query row, the shift of its window and the length of its
    chunks, as a kernel gets them from ``band_of``."""

    q_start: int
    window_shift: int
    attention_chunk: int


def band_of(call: Call) -> Band:
    """Return ``call``'s chunks and shifted window in 32 bits.

    A shifted window by itself is implemented by shifting the rows, in any kernel. If chunks, ALiBi,
    dropout, mods or a tree mask need the true row indices, a banded plan is required.
    """
    # Beyond this no key and no chunk of the lengths is another.
    far = call.max_seqlen_q + call.max_seqlen_k + abs(call.q_start) + abs(call.k_start) + 1
    far = min(far, 1 << 30)
    shift = max(-far, min(call.window_shift, far))
    own = call.alibi_slopes is not None or call.dropout_p or call.mods or call.tree
    if call.attention_chunk or own:
        return Band(call.q_start, shift, min(call.attention_chunk, far))
    return Band(call.q_start + shift, 0, 0)


def is_banded(features: frozenset[str]) -> bool:
    """Return whether the plan needs a ``Band`` beyond the rows' positions."""
    moved = "negative_edge" in features and not features.isdisjoint(
        ("alibi", "dropout", "score_mod", "mask_mod", "tree")
    )
    return moved or "chunk" in features


def is_uneven(call: Call) -> bool:
    """Return whether the amount of work of a thread block depends on values of tensors, such as
    lengths."""
    asked = Asked(call)
    return any(FEATURES[name].is_needed(asked) for name in _UNEVEN)


def _has_window(call: Call) -> bool:
    return call.window_left >= 0 or call.window_right > 0 or call.window_shift != 0


def features_by(backend: str) -> frozenset[str]:
    """Return the names of the features that ``backend`` supports."""
    return frozenset(name for name, feature in FEATURES.items() if backend in feature.by)


def features_of(call: Call, needs_grad: bool, bias_grad: bool) -> frozenset[str]:
    """Return the names in ``FEATURES`` that this call needs from a backend."""
    asked = Asked(call, needs_grad, bias_grad)
    return frozenset(name for name, feature in FEATURES.items() if feature.is_needed(asked))


def steps_of(features: frozenset[str]) -> int:
    """Return the steps of ``bucket`` for the batch and the lengths of problems with these
    features."""
    return STEPS if features.isdisjoint(_UNEVEN) else 1


def is_square(call: Call) -> bool:
    """Return whether there are as many queries as keys, and both begin at the same position."""
    return call.max_seqlen_q == call.max_seqlen_k and call.q_start == call.k_start


def window_of(call: Call) -> int:
    """Return how many keys the window shows to a row; 0 if the window has no bound on one side."""
    bounded = call.window_left >= 0 and call.window_right >= 0
    return call.window_left + call.window_right + 1 if bounded else 0


def is_aligned(call: Call) -> bool:
    """Return whether q, k and v have bases and strides in multiples of 16 bytes and contiguous
    rows."""
    for tensor in (call.q, call.k, call.v):
        unit = 16 // tensor.itemsize
        strides = tensor.stride()
        if strides[-1] != 1 or tensor.data_ptr() % 16:
            return False
        if any(stride % unit for stride in strides[:-1]):
            return False
    return True


def _bias_row_step(call: Call, unit: int) -> int | None:
    """Return the row stride of the bias, 0 if query rows share a row; None if its rows cannot be
    read in units of ``unit`` elements from 16 bytes on."""
    bias = call.bias
    if bias is None or call.tree or bias.data_ptr() % 16:
        return None
    *steps, last = (step if n > 1 else 0 for step, n in zip(bias.stride(), bias.shape, strict=True))
    return steps[-1] if last == 1 and not any(step % unit for step in steps) else None


def has_bias_tiles(call: Call) -> bool:
    """Return whether tiles of rows and keys of the bias can be copied in units of 16 bytes, and the
    bias has the dtype of q."""
    if call.bias is None or call.bias.dtype != call.q.dtype:
        return False
    step = _bias_row_step(call, 8)
    # Offsets inside a tile of rows are 32-bit.
    return step is not None and 0 < step < 1 << 24


def bias_fours(call: Call) -> str:
    """Return the dtype of the bias if four neighboring keys of any of its rows, which query rows
    may share, can be loaded at once; "" otherwise. The keys are then whole groups of four."""
    if call.bias is None or call.bias.shape[-1] % 4:
        return ""
    step = _bias_row_step(call, 4)
    # Offsets inside 32 rows are 32-bit.
    return _name(call.bias.dtype) if step is not None and step < 1 << 23 else ""


def are_on_16(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *more: torch.Tensor) -> bool:
    """Return whether all addresses are multiples of 16 bytes."""
    bits = q.data_ptr() | k.data_ptr() | v.data_ptr()
    for x in more:
        bits |= x.data_ptr()
    return bits & 15 == 0


def is_positive(scale: float) -> bool:
    """Return whether ``scale`` is a normal positive float32."""
    return scale >= 2.0**-126


def is_low(softcap: float) -> bool:
    """Return whether ``softcap`` is at most 256, or 0 for none. Then 2⁻²² of it, the error of a
    tanh without extra work for small scores, changes no probability by more than 2⁻¹⁴ of itself."""
    return softcap <= 256.0


@dataclass(frozen=True)
class Problem:
    """The properties of a call by which a backend decides whether it can run the call, and with
    which plan. Frozen, hashable, no tensors.

    Sizes may be rounded up to buckets (see ``bucketed``); in a packed batch ``seqlen_q`` and
    ``seqlen_k`` are the longest. ``square``: before rounding there are as many queries as keys, and
    both begin at the same position (if this is a block of a larger problem). ``positive``: the
    scale is above 0 in float32, as kernels that scale after masking require. ``low_softcap``: the
    result of ``is_low``. ``dtype`` is q's; ``dtype_k`` (of k and v) and ``dtype_out`` are "" if
    they are the same. ``scales``: how many rows of k share one float8 scale, or 0 if all rows of a
    head of a sequence share one.
    ``bias_tiles`` and ``bias_fours``: the results of ``has_bias_tiles`` and ``bias_fours``.
    ``window``: the number of keys in a row's window, 0 if the window has no bound on one side.
    ``mods``: the digest of its score_mod and mask_mod, "" without them. ``described`` is a text for
    messages and is not compared.
    """

    batch: int
    seqlen_q: int
    seqlen_k: int
    heads_q: int
    heads_k: int
    head_dim: int
    head_dim_v: int
    dtype: str
    features: frozenset[str]
    device: Device
    square: bool
    aligned: bool = True
    positive: bool = True
    low_softcap: bool = True
    page_size: int = 0
    dtype_k: str = ""
    dtype_out: str = ""
    scales: int = 0
    bias_tiles: bool = False
    bias_fours: str = ""
    window: int = 0
    mods: str = ""
    described: str = field(default="", compare=False)

    @property
    def arch(self) -> str:
        return self.device.arch

    @property
    def unit(self) -> int:
        """Return how many elements of the narrowest of q, k and v fit into 16 bytes: 16 with float8
        keys, else 8. Kernels read rows in units of 16 bytes."""
        return 16 if "fp8" in self.features else 8

    def bucketed(self) -> Problem:
        """Return the problem with rounded batch and lengths, from which plans are made.

        They are rounded up to powers of two. If they determine the grid, there are 8 steps from one
        power of two to the next, because the tiles may then depend on how well the grid fills the
        device.
        """
        steps = steps_of(self.features)
        return replace(
            self,
            batch=bucket(self.batch, steps),
            seqlen_q=bucket(self.seqlen_q, steps),
            seqlen_k=bucket(self.seqlen_k, steps),
            window=bucket(self.window, STEPS),
        )


def problem_of(
    call: Call, needs_grad: bool, bias_grad: bool, device: Device, aligned: bool
) -> Problem:
    """Return the problem of ``call`` on ``device``."""
    return Problem(
        batch=call.batch,
        seqlen_q=call.max_seqlen_q,
        seqlen_k=call.max_seqlen_k,
        heads_q=call.q.shape[-2],
        heads_k=call.k.shape[-2],
        head_dim=call.q.shape[-1],
        head_dim_v=call.v.shape[-1],
        dtype=_name(call.q.dtype),
        features=features_of(call, needs_grad, bias_grad),
        device=device,
        square=is_square(call),
        aligned=aligned,
        positive=is_positive(call.scale),
        low_softcap=is_low(call.softcap),
        page_size=call.k.shape[1] if call.page_table is not None else 0,
        dtype_k=_name(call.k.dtype) if call.k.dtype != call.q.dtype else "",
        dtype_out=_name(call.dtype_of_out()) if call.dtype_of_out() != call.q.dtype else "",
        scales=scales_of(call.k_descale, call.k),
        bias_tiles=has_bias_tiles(call),
        bias_fours=bias_fours(call),
        window=window_of(call),
        mods=call.mods,
        described=describe(call, needs_grad, bias_grad, device),
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def describe(call: Call, needs_grad: bool, bias_grad: bool, device: Device) -> str:
    """Return one line: shapes, dtype, features with their values, arch."""
    dtype = _name(call.q.dtype)
    k_shape, v_shape = tuple(call.k.shape), tuple(call.v.shape)
    keys = f"k, v {k_shape}" if k_shape == v_shape else f"k {k_shape}, v {v_shape}"
    if call.k.dtype != call.q.dtype:
        keys += f" {_name(call.k.dtype)}"
    parts = [f"q {tuple(call.q.shape)} {dtype}", keys]
    needed = features_of(call, needs_grad, bias_grad)
    fields = {**call._asdict(), "window": call.window}
    for name, feature in FEATURES.items():
        shown = name if feature.shown is None else feature.shown.format_map(fields)
        if name in needed and shown:
            parts.append(shown)
    return f"{', '.join(parts)}, on {device.arch}"
