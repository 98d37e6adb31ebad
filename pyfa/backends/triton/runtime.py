"""Forward on the host: a call as the kernels' parameters, allocation, grids."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ...plan import Plan
from ...problem import Call, are_on_16, scales_of
from ..base import Gradients, OtherAlignment, Repeat, RepeatBackward
from ..common.calls import with_rows
from ..common.ready import ready_forward
from . import plans, runtime_backward, specs
from .common import NO_LSE
from .kernel import Kernel, address, no_float, no_int, no_seed
from .plans import BYTES, KINDS
from .specs import INTERPRETED, Spec, Variant

# Unlimited, for a window: beyond any length, and sums of two still fit 32 bits.
_FAR = 1 << 30
# (row, head) pairs up to which the combination gives each a program of its own.
_FEW_LINES = 4096
# Where a call's q_start, k_start, head_start and batch_start are, the last of its fields.
_STARTS = Call._fields.index("q_start")
# Shapes whose launches are kept, so that serving does not grow the table without end.
_MOST_READY = 1024
_lock = threading.Lock()

# bias, slopes, sinks, seed, cu_q, cu_k, used_q, used_k, pages, batch_idx, leftpad, present
_NO_OPTIONS = (no_float, no_float, no_float, no_seed, *(no_int,) * 7, 0)


class Given(NamedTuple):
    """A call as the kernels' parameters, in their order; ``kept`` holds what must outlive them."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    options: tuple[Any, ...]
    strides: tuple[int, ...]
    more_strides: tuple[int, ...]
    page_size: int
    numbers: tuple[Any, ...]
    kept: tuple[Any, ...] = ()
    scales: tuple[Any, ...] = ()
    scaled: int = 0


def _ready(
    kernel: Kernel, programs: int, rest: tuple[Any, ...], call: Call, out: torch.Tensor,
    lse: torch.Tensor,
) -> tuple[Repeat, Repeat]:  # fmt: skip
    """A forward of known shapes, without its LSE and with it."""
    aligned = are_on_16(*call[:3])
    last = len(_NO_OPTIONS) - 1  # the options' flags of what is present
    silent = (*rest[:last], NO_LSE.value, *rest[last + 1 :])
    return (
        ready_forward(kernel.prepared(5, silent), programs, out, None, aligned),
        ready_forward(kernel.prepared(5, rest), programs, out, lse, aligned),
    )


def _tf32_allowed() -> bool:
    """Torch's switch. Where the newer one exists, asking the older one can raise."""
    matmul = torch.backends.cuda.matmul
    if hasattr(matmul, "fp32_precision"):
        return bool(matmul.fp32_precision == "tf32")
    return bool(matmul.allow_tf32)


def _scales(call: Call, block_n: int) -> tuple[tuple[torch.Tensor, ...], tuple[Any, ...], int]:
    """Float8 scales, the kernel's last parameters made of them, and ``forward.SCALED``."""
    of_q, of_k, of_v = call.q_descale, call.k_descale, call.v_descale
    if of_k is None or of_v is None:
        return (), (), 0
    per_block = of_k.dim() == 3
    if per_block or of_v.stride() != of_k.stride():
        of_k, of_v = of_k.contiguous(), of_v.contiguous()
    size = max(1, scales_of(of_k, call.k))
    batch, head = of_k.stride()[:2]
    if per_block and call.cu_seqlens_k is not None:
        batch = 0
    scales: tuple[Any, ...] = (address(of_k), address(of_v), batch, head, size)
    kept: tuple[torch.Tensor, ...] = (of_k, of_v)
    if of_q is not None:
        of_q = of_q.contiguous() if per_block else of_q
        batch, head = of_q.stride()[:2]
        if per_block and call.cu_seqlens_q is not None:
            batch = 0
        scales += (address(of_q), batch, head, max(1, scales_of(of_q, call.q)))
        kept += (of_q,)
    if not per_block:
        return kept, scales, 1
    # A tile lies in one block where both start together, in a sequence or in a page.
    apart = call.cu_seqlens_k is not None or call.cache_leftpad is not None
    if call.page_table is not None:
        apart = apart or call.k.shape[1] % block_n != 0
    return kept, scales, 3 if apart or size % block_n else 2


class Runner:
    """Runs every call of one plan. Kernels are compiled at their first use on a device."""

    def __init__(self, plan: Plan) -> None:
        self.constants: dict[str, Any] = dict(plan.constants)
        get = self.constants.__getitem__
        self.general: bool = get("general")
        self.plain: bool = get("plain")
        self.pack: bool = get("pack")
        self.reversed: bool = get("reversed")
        self.block_m: int = get("fwd_block_m")
        self.block_n: int = get("fwd_block_n")
        self.slots: int = get("slots")
        self.part_tiles: int = get("part_tiles")
        self.streams: bool = get("streams")
        self.near: int = get("near_bytes")
        self.half = get("dtype") != "fp32"
        self.bytes_of_key = BYTES[get("dtype_k")]
        self.tf32: bool = get("tf32")
        self.keys_roles = specs.keys_roles(self.constants)
        self._kernels: dict[tuple[Any, ...], Kernel] = {}
        # Launches of plain calls with everything but the addresses filled in, by shape: without
        # the LSE and with it. A third of the host time of `_forward`.
        self._ready: dict[tuple[Any, ...], tuple[Repeat, Repeat]] = {}

    def kernel(self, key: tuple[Any, ...], make: Callable[[], Spec]) -> Kernel:
        """The kernel ``key``, which ends in the device's index; made by ``make`` if missing."""
        with _lock:
            found = self._kernels.get(key)
            if found is None:
                found = self._kernels[key] = Kernel(make(), key[-1])
        return found

    def given(self, call: Call) -> Given:
        q, k, v = call.q, call.k, call.v
        qs, ks, vs = q.stride(), k.stride(), v.stride()
        if qs[-1] != 1 or ks[-1] != 1 or vs[-1] != 1:
            q, k, v = with_rows(q), with_rows(k), with_rows(v)
            qs, ks, vs = q.stride(), k.stride(), v.stride()
        left, right = call.window_left, call.window_right
        if left < 0 or left > _FAR:
            left = _FAR
        if right < 0 or right > _FAR:
            right = _FAR
        if self.plain:
            strides = (*qs[:3], *ks[:3], *vs[:3])
            numbers = (left, right, call.scale, 0.0, 0, 1.0, *call[_STARTS:])
            return Given(q, k, v, _NO_OPTIONS, strides, (0,) * 6, 0, numbers)
        return self._given(call, q, k, v, left, right)

    def _given(
        self, call: Call, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, left: int, right: int
    ) -> Given:
        """``given`` with everything that a call may have."""
        strides_q: tuple[int, ...]
        strides_q, strides_k, strides_v = q.stride()[:3], k.stride()[:3], v.stride()[:3]
        if call.cu_seqlens_q is not None:
            strides_q = (0, *q.stride()[:2])
        if call.cu_seqlens_k is not None:
            strides_k, strides_v = (0, *k.stride()[:2]), (0, *v.stride()[:2])
        bias, slopes, sinks = call.bias, call.alibi_slopes, call.sinks
        if bias is not None:
            if bias.dtype == torch.bool:
                bias = bias.view(torch.uint8)
            elif bias.dtype == torch.float64:
                bias = bias.float()
        slopes = slopes.contiguous() if slopes is not None else None
        sinks = sinks.contiguous() if sinks is not None else None
        integers = (call.cu_seqlens_q, call.cu_seqlens_k, call.seqused_q, call.seqused_k,
                    call.page_table, call.cache_batch_idx, call.cache_leftpad)  # fmt: skip
        flags = (1, 2, 4, 8, 0, 16, 32)
        present = (
            sum(flag for x, flag in zip(integers, flags, strict=True) if x is not None)
            + 64 * (slopes is not None)
            + 128 * (sinks is not None)
        )
        options = (
            *(no_float if x is None else address(x) for x in (bias, slopes, sinks)),
            no_seed if call.seed is None else address(call.seed),
            *(no_int if x is None else address(x) for x in integers),
            present,
        )
        more: tuple[int, ...] = (0,) * 4
        if bias is not None:
            more = tuple(
                0 if size == 1 else stride
                for size, stride in zip(bias.shape, bias.stride(), strict=True)
            )
        more += (
            slopes.stride(0) if slopes is not None and slopes.dim() == 2 else 0,
            call.page_table.stride(0) if call.page_table is not None else 0,
        )
        kept, scales, scaled = _scales(call, self.block_n)
        p = call.dropout_p
        threshold = min(int((1.0 - p) * 2**32), 2**32 - 1)
        numbers = (
            left, right, call.scale, call.softcap, threshold, 1.0 / (1.0 - p), *call[_STARTS:],
        )  # fmt: skip
        return Given(
            q, k, v, options, strides_q + strides_k + strides_v, more,
            k.shape[1] if call.page_table is not None else 0, numbers,
            (bias, slopes, sinks, *kept), scales, scaled,
        )  # fmt: skip

    def variant(self, call: Call, given: Given, block: int) -> Variant:
        kind, rows = "", False
        bias = given.kept[0] if given.kept else None
        if bias is not None:
            kind = KINDS[str(bias.dtype).removeprefix("torch.")]
            b, h, i, j = given.more_strides[:4]
            rows = j == 1 and not (b | h | i) % 8 and (INTERPRETED or bias.data_ptr() % 16 == 0)
        strides = given.strides
        return Variant(
            self.general or call.scale <= 0.0,
            kind,
            rows,
            max(strides[1], strides[4], strides[7]) * block >= 1 << 31,
            self.tf32 and _tf32_allowed(),
            given.scaled,
        )

    def forward(self, call: Call) -> tuple[torch.Tensor, torch.Tensor]:
        q, k, v = call.q, call.k, call.v
        device = q.device
        if device.type != "cuda":
            return self._forward(call, None)
        key = self._ready_key(call)
        ready = self._ready.get(key) if key is not None else None
        if ready is not None:
            try:
                out, lse = ready[True](q, k, v)
            except OtherAlignment:
                pass
            else:
                assert lse is not None
                return out, lse
        if torch._C._cuda_getDevice() != device.index:
            with torch.cuda.device(device):
                return self._forward(call, key)
        return self._forward(call, key)

    def _ready_key(self, call: Call) -> tuple[Any, ...] | None:
        """What a launch with everything filled in depends on; None where also on more than that, as
        in float32 on torch's switch for tf32."""
        if not (self.plain and self.half):
            return None
        q, k, v = call.q, call.k, call.v
        return (q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(), call.window_left,
                call.window_right, call.scale, call.num_splits, call.q_start, call.k_start,
                q.device)  # fmt: skip

    def repeat(self, call: Call, with_lse: bool) -> Repeat | None:
        """``forward`` of calls like this one, which has run, as a function of q, k and v."""
        key = self._ready_key(call)
        ready = self._ready.get(key) if key is not None else None
        return ready[with_lse] if ready is not None else None

    def repeat_backward(
        self, call: Call, out: torch.Tensor, lse: torch.Tensor, dout: torch.Tensor
    ) -> RepeatBackward | None:
        """``backward`` of calls like this one as a function of q, k, v, out, lse and dout."""
        if self._ready_key(call) is None or call.q.device.type != "cuda":
            return None
        with torch.cuda.device(call.q.device):
            return runtime_backward.repeat(self, call, out, lse, dout)

    def backward(
        self,
        call: Call,
        out: torch.Tensor,
        lse: torch.Tensor,
        dout: torch.Tensor,
        dlse: torch.Tensor | None,
        bias_grad: bool,
    ) -> Gradients:
        device = call.q.device
        if device.type == "cuda" and torch._C._cuda_getDevice() != device.index:
            with torch.cuda.device(device):
                return runtime_backward.backward(self, call, out, lse, dout, dlse, bias_grad)
        return runtime_backward.backward(self, call, out, lse, dout, dlse, bias_grad)

    def _forward(
        self, call: Call, ready_key: tuple[Any, ...] | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        given = self.given(call)
        q, k, v = given.q, given.k, given.v
        packed = call.cu_seqlens_q is not None
        heads, heads_k = q.shape[-2], k.shape[-2]
        dim, dim_v = q.shape[-1], v.shape[-1]
        rows = call.max_seqlen_q
        longest = call.max_seqlen_k
        group = heads // heads_k
        if packed:
            batch, total = call.batch, q.shape[0]
            lse_strides = (0, total)
            out_strides = (0, heads * dim_v, dim_v)
        else:
            batch, total = q.shape[0], q.shape[1]
            lse_strides = (heads * total, total)
            out_strides = (total * heads * dim_v, heads * dim_v, dim_v)
        units, lines = (heads_k, rows * group) if self.pack else (heads, rows)
        blocks = -(-lines // self.block_m)
        programs = blocks * units * batch
        parts = self._splits(call, programs)
        # Rows that no program writes: beyond seqused_q, or of no sequence.
        partial = packed or call.seqused_q is not None
        out_shape, lse_shape = call.out_shape(), call.lse_shape()
        if programs == 0 or (partial and parts == 1):
            out = torch.zeros(out_shape, dtype=call.dtype_of_out(), device=q.device)
            lse = torch.full(lse_shape, -torch.inf, device=q.device)
            if programs == 0:
                return out, lse
        else:
            out = torch.empty(out_shape, dtype=call.dtype_of_out(), device=q.device)
            lse = torch.empty(lse_shape, dtype=torch.float32, device=q.device)
        to, to_lse, part_strides = out, lse, (0, 0)
        if parts > 1:
            to = torch.empty((parts, *out_shape), dtype=torch.float32, device=q.device)
            to_lse = torch.empty((parts, *lse_shape), dtype=torch.float32, device=q.device)
            if partial:
                to_lse.fill_(-torch.inf)
            part_strides = (out.numel(), lse.numel())
        section = self.section(longest * (dim + dim_v), 1 if self.pack else group, units * batch)
        variant = self.variant(call, given, self.block_n)
        key = ("forward", parts > 1, variant, q.device.index)
        kernel = self._kernels.get(key) or self.kernel(
            key, lambda: specs.forward_spec(self.constants, variant, parts > 1)
        )
        rest = (
            *given.options, *given.strides, *out_strides, *lse_strides, *given.more_strides,
            *part_strides, batch, units, group, dim, dim_v, rows, longest, given.page_size, blocks,
            section, int(self.reversed), parts, *given.numbers, *given.scales,
        )  # fmt: skip
        kernel(
            programs * parts, address(q), address(k), address(v), address(to), address(to_lse),
            *rest,
        )  # fmt: skip
        if ready_key is not None and parts == 1 and q is call.q and k is call.k and v is call.v:
            if len(self._ready) >= _MOST_READY:
                self._ready.clear()
            self._ready[ready_key] = _ready(kernel, programs, rest, call, out, lse)
        if parts > 1:
            self._combine(to, to_lse, out, lse, heads, total, parts, lse_strides, part_strides)
        return out, lse

    def _combine(
        self, parts_out: torch.Tensor, parts_lse: torch.Tensor, out: torch.Tensor,
        lse: torch.Tensor, heads: int, rows_per_batch: int, parts: int,
        lse_strides: tuple[int, int], part_strides: tuple[int, int],
    ) -> None:  # fmt: skip
        lines = lse.numel()
        each = 1 if lines <= _FEW_LINES else 16
        key = ("combine", each, out.device.index)
        kernel = self._kernels.get(key) or self.kernel(
            key, lambda: specs.combine_spec(self.constants, each)
        )
        kernel(
            -(-lines // each), address(parts_out), address(parts_lse), address(out), address(lse),
            lines, heads, rows_per_batch, out.shape[-1], parts, *lse_strides, *part_strides,
        )  # fmt: skip

    def _splits(self, call: Call, programs: int) -> int:
        """Into how many parts the keys go."""
        if call.num_splits == 1 or programs == 0:
            return 1
        seen = call.max_seqlen_k
        if call.window_left >= 0 and call.window_right >= 0:
            seen = min(seen, call.window_left + call.window_right + self.block_m)
        tiles = -(-seen // self.block_n)
        if call.num_splits > 1:
            return max(1, min(call.num_splits, tiles))
        return plans.splits_for(programs, tiles, self.slots, self.part_tiles, self.streams)

    def section(self, elements: int, group: int, pairs: int) -> int:
        """How many of ``pairs`` (sequence, head) go together; those of one key head never part.

        No more than there are: the kernels multiply it by the blocks of a pair in 32 bits.
        """
        if not self.reversed:
            return group
        bytes_of = elements * self.bytes_of_key
        return min(max(1, self.near // max(1, bytes_of)) * group, pairs)
