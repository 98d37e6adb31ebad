"""Forward on the host: the kernels' arguments for a call, allocation, grids."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch

from ... import _torch, sizes
from ...blocks import Tiles
from ...mods.emit_triton import INFO
from ...plan import Plan
from ...problem import Call, Form, are_on_16, band_of, form_of, scales_of, tensors_of
from ...sizes import Extent, Shape, Totals
from ..base import OtherAlignment, Run
from ..common.calls import with_rows
from ..common.program import Launch as PassLaunch
from ..common.program import Program, count, for_any_total, like, run_of
from . import plans, specs
from .common import FAR, NO_LSE
from .kernel import Kernel, Launch, Slot, no_float, no_int, no_seed
from .plans import BYTES, KINDS
from .runtime_lists import ByLists
from .specs import INTERPRETED, Spec, Variant

_FAR: int = FAR.value
# (row, head) pairs up to which the combination gives each a program of its own.
_FEW_LINES = 4096
_lock = threading.Lock()


class Given(NamedTuple):
    """The kernel arguments of a call, in the order of the kernel's parameters."""

    options: tuple[Any, ...]
    strides: tuple[int, ...]
    more_strides: tuple[int, ...]
    page_size: int
    numbers: tuple[Any, ...]
    scales: tuple[Any, ...]
    scaled: int
    captured: tuple[Any, ...]


def _tf32_allowed() -> bool:
    """Return whether PyTorch allows TF32. Reads ``fp32_precision`` if it exists, because reading
    ``allow_tf32`` can then raise."""
    matmul = torch.backends.cuda.matmul
    if hasattr(matmul, "fp32_precision"):
        return bool(matmul.fp32_precision == "tf32")
    return bool(matmul.allow_tf32)


def _scales(call: Call, block_n: int) -> tuple[tuple[Any, ...], int]:
    """Return the kernel's last arguments, made of the float8 scales, and ``forward.SCALED``."""
    of_q, of_k = call.q_descale, call.k_descale
    if of_k is None:
        return (), 0
    per_block = of_k.dim() == 3
    size = max(1, scales_of(of_k, call.k))
    batch, head = of_k.stride()[:2]
    if per_block and call.cu_seqlens_k is not None:
        batch = 0
    scales: tuple[Any, ...] = (Slot("k_descale"), Slot("v_descale"), batch, head, size)
    if of_q is not None:
        batch, head = of_q.stride()[:2]
        if per_block and call.cu_seqlens_q is not None:
            batch = 0
        scales += (Slot("q_descale"), batch, head, max(1, scales_of(of_q, call.q)))
    if not per_block:
        return scales, 1
    # A tile lies in one block where both start together, in a sequence or in a page.
    apart = call.cu_seqlens_k is not None or call.cache_leftpad is not None
    if call.page_table is not None:
        apart = apart or call.k.shape[1] % block_n != 0
    # The two round differently.
    return scales, 3 if apart or size % block_n or call.batch_invariant else 2


def _captured(call: Call) -> tuple[Any, ...]:
    """Return the table of sizes and strides of the tensors that mods read, and the tensors."""
    tensors = call.captured
    if not tensors:
        return ()
    info = []
    for x in tensors:
        filler = (1,) * (INFO // 2 - x.dim())
        info += [*x.shape, *filler, *x.stride(), *filler]
    table = torch.tensor(info, dtype=torch.int32, device=call.q.device)
    return table, *(Slot(f"captured{slot}") for slot in range(len(tensors)))


def readable(call: Call) -> Call:
    """Return ``call`` as the kernels read it."""
    if INTERPRETED:
        bools: dict[str, Any] = {
            f"captured{slot}": x.view(torch.uint8)
            for slot, x in enumerate(call.captured)
            if x.dtype == torch.bool
        }
        call = call._replace(**bools)
    bias, of_k, of_v = call.bias, call.k_descale, call.v_descale
    if bias is not None and bias.dtype == torch.bool:
        bias = bias.view(torch.uint8)
    of_q = call.q_descale
    if of_k is not None and of_v is not None:
        per_block = of_k.dim() == 3
        if per_block or of_v.stride() != of_k.stride():
            of_k, of_v = of_k.contiguous(), of_v.contiguous()
        if of_q is not None and per_block:
            of_q = of_q.contiguous()
    q, k, v = (with_rows(x) for x in call[:3])
    return call._replace(q=q, k=k, v=v, bias=bias, q_descale=of_q, k_descale=of_k, v_descale=of_v)


EMPTY = {"cuda": _torch.empty_cuda, "cpu": _torch.empty_cpu}


def numbers_of(program: Program, form: Form) -> dict[str, int]:
    """Return the indices of names among addresses; offsets of keys may be those of queries."""
    numbers = {name: number for number, name in enumerate(program.names)}
    if form.shared_offsets:
        numbers["cu_seqlens_k"] = numbers["cu_seqlens_q"]
    return numbers


def launching(steps: Sequence[Launch]) -> PassLaunch:
    """Return a function that runs kernels in sequence. It takes addresses, or tensors if kernels
    are interpreted."""

    def launch(
        addresses: Sequence[int], tensors: Sequence[torch.Tensor],
        made: Sequence[torch.Tensor], totals: Totals | None,
    ) -> None:  # fmt: skip
        given = (*tensors, *made) if INTERPRETED else addresses
        for step in steps:
            step(given, totals)

    return launch


def on(x: torch.Tensor) -> AbstractContextManager[object]:
    """Return the place where kernels for ``x``'s device are compiled and loaded."""
    return torch.cuda.device(x.device) if x.device.type == "cuda" else nullcontext()


class Runner:
    """Runs every call of one plan. Kernels are compiled at their first use on a device."""

    def __init__(self, plan: Plan) -> None:
        self.constants: dict[str, Any] = dict(plan.constants)
        get = self.constants.__getitem__
        self.general: bool = get("general")
        self.pack: bool = get("pack")
        self.banded: bool = get("banded")
        self.reversed: bool = get("reversed")
        self.block_m: int = get("fwd_block_m")
        self.block_n: int = get("fwd_block_n")
        self.slots: int = get("slots")
        self.part_tiles: int = get("part_tiles")
        self.streams: bool = get("streams")
        self.near: int = get("near_bytes")
        self.bytes_of_key = BYTES[get("dtype_k")]
        self.tf32: bool = get("tf32")
        self.keys_roles = specs.keys_roles(self.constants)
        self._kernels: dict[tuple[Any, ...], Kernel] = {}

    def kernel(self, key: tuple[Any, ...], make: Callable[[], Spec]) -> Kernel:
        """Return the kernel ``key``, which ends in the device's index; ``make`` makes it if it is
        missing."""
        with _lock:
            found = self._kernels.get(key)
            if found is None:
                found = self._kernels[key] = Kernel(make(), key[-1])
        return found

    def given(self, call: Call) -> Given:
        """Return the kernel arguments of ``call``, which is readable."""
        left, right = call.window_left, call.window_right
        if left < 0 or left > _FAR:
            left = _FAR
        if right < 0 or right > _FAR:
            right = _FAR
        strides_q: tuple[int, ...]
        strides_q, strides_k, strides_v = (x.stride()[:3] for x in call[:3])
        if call.cu_seqlens_q is not None:
            strides_q = (0, *call.q.stride()[:2])
        if call.cu_seqlens_k is not None:
            strides_k, strides_v = (0, *call.k.stride()[:2]), (0, *call.v.stride()[:2])
        bias, slopes = call.bias, call.alibi_slopes
        flags = {
            "cu_seqlens_q": 1, "cu_seqlens_k": 2, "seqused_q": 4, "seqused_k": 8, "page_table": 0,
            "cache_batch_idx": 16, "cache_leftpad": 32, "alibi_slopes": 64, "sinks": 128,
        }  # fmt: skip
        present = sum(flag for name, flag in flags.items() if getattr(call, name) is not None)

        def pointer(name: str, nothing: Any) -> Any:
            return nothing if getattr(call, name) is None else Slot(name)

        options = (
            *(pointer(name, no_float) for name in ("bias", "alibi_slopes", "sinks")),
            pointer("seed", no_seed),
            *(pointer(name, no_int) for name in list(flags)[:7]),
            present,
        )
        more: tuple[int, ...] = (0,) * 4
        if bias is not None:
            more = tuple(
                0 if size == 1 else stride
                for size, stride in zip(bias.shape, bias.stride(), strict=True)
            )
            if call.tree:
                more = (more[0], 0, *more[1:])
        more += (
            slopes.stride(0) if slopes is not None and slopes.dim() == 2 else 0,
            call.page_table.stride(0) if call.page_table is not None else 0,
        )
        scales, scaled = _scales(call, self.block_n)
        p = call.dropout_p
        threshold = min(int((1.0 - p) * 2**32), 2**32 - 1) if p else 0
        band = band_of(call)
        numbers: tuple[Any, ...] = (
            left, right, call.scale, call.softcap, threshold, 1.0 / (1.0 - p), band.q_start,
            call.k_start, call.head_start, call.batch_start,
        )  # fmt: skip
        if self.banded:
            numbers += (band.window_shift, band.attention_chunk)
        page_size = call.k.shape[1] if call.page_table is not None else 0
        strides = strides_q + strides_k + strides_v
        captured = _captured(call)
        return Given(options, strides, more, page_size, numbers, scales, scaled, captured)

    def variant(self, call: Call, given: Given, block: int) -> Variant:
        kind, rows, bias = "", False, call.bias
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

    def moods(self, call: Call) -> tuple[bool, bool]:
        """Return the two conditions that ``variant`` depends on and that may differ between calls
        of one binding: whether TF32 is allowed, and whether the bias is 16-byte aligned."""
        aligned = call.bias is None or call.bias.data_ptr() % 16 == 0
        return self.tf32 and _tf32_allowed(), aligned

    def bind(self, call: Call, with_lse: bool) -> Run:
        """Implement ``Backend.bind``."""
        run = self._bind(call, with_lse)
        if call.bias is None and not self.tf32:
            return run
        form, moods = form_of(call), self.moods(call)

        def run_in_mood(*tensors: torch.Tensor) -> list[torch.Tensor]:
            given, _ = form.fill(tensors)
            return (run if self.moods(given) == moods else self._bind(given, with_lse))(*tensors)

        return run_in_mood

    def _bind(self, call: Call, with_lse: bool) -> Run:
        direct = readable(call)
        run = self._bind_readable(direct, with_lse)
        if all(x is y for x, y in zip(tensors_of(call), tensors_of(direct), strict=True)):
            return run
        form = form_of(call)

        def run_on_copies(*tensors: torch.Tensor) -> list[torch.Tensor]:
            given = readable(form.fill(tensors)[0])
            try:
                return run(*tensors_of(given))
            except OtherAlignment:  # of what was copied, or now is not
                return self._bind_readable(given, with_lse)(*tensors_of(given))

        return run_on_copies

    def _bind_readable(self, call: Call, with_lse: bool) -> Run:
        form, on_16, heads = form_of(call), are_on_16(*call[:3]), call.q.shape[-2]

        def bind_kind(*tensors: torch.Tensor) -> Callable[[Totals | None], Run]:
            given, _ = form.fill(tensors)
            with on(given.q):
                return self._bind_kind(given, with_lse, on_16)

        def combines_few(q: int, k: int) -> bool:
            return q * heads <= _FEW_LINES

        return for_any_total(call, tensors_of(call), bind_kind, 0, combines_few)

    def _bind_kind(self, call: Call, with_lse: bool, on_16: bool) -> Callable[[Totals | None], Run]:
        given, form = self.given(call), form_of(call)
        q, k, v = call[:3]
        packed = call.cu_seqlens_q is not None
        heads, heads_k = q.shape[-2], k.shape[-2]
        dim, dim_v = q.shape[-1], v.shape[-1]
        rows = call.max_seqlen_q
        longest = call.max_seqlen_k
        group = heads // heads_k
        if packed:
            batch, total = call.batch, sizes.shape_of(call, "q")[0]
            lse_strides: Shape = (0, total)
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
        partial = call.has_spare_q or not programs
        out, lse = sizes.out_shape(call), sizes.lse_shape(call)
        by_lists = ByLists(self, call, ("fwd",) if programs else ())
        program = Program((*form.names, *by_lists.names), q)
        alone = partial and parts == 1
        program.make("out", like(out, call.dtype_of_out()), 0.0 if alone else None)
        silent = not (with_lse or INTERPRETED or parts > 1)
        if not silent:
            program.make("lse", like(lse, torch.float32), -torch.inf if alone else None)
        to, to_lse = Slot("out"), no_float if silent else Slot("lse")
        part_strides: Shape = (0, 0)
        if parts > 1:
            program.make("parts", like((parts, *out), torch.float32))
            fill = -torch.inf if partial else None
            program.make("part_lses", like((parts, *lse), torch.float32), fill)
            to, to_lse = Slot("parts"), Slot("part_lses")
            part_strides = (count(out), count(lse))
        options = given.options
        if silent:
            options = (*options[:-1], options[-1] | NO_LSE.value)
        section = self.section(longest * (dim + dim_v), 1 if self.pack else group, units * batch)
        variant = self.variant(call, given, self.block_n)
        listed = "fwd" in by_lists
        key = ("forward", parts > 1, variant, listed, q.device.index)
        steps = []
        numbers = numbers_of(program, form)
        if programs:
            kernel = self.kernel(
                key, lambda: specs.forward_spec(self.constants, variant, parts > 1, listed)
            )
            arguments = (
                Slot("q"), Slot("k"), Slot("v"), to, to_lse, *options, *given.strides, *out_strides,
                *lse_strides, *given.more_strides, *part_strides, batch, units, group, dim, dim_v,
                rows, longest, given.page_size, blocks, section, int(self.reversed), parts,
                *given.numbers, *given.scales, *by_lists.arguments("fwd", call), *given.captured,
            )  # fmt: skip
            steps.append(kernel.bind(programs * parts, arguments, numbers))
            if parts > 1:
                few = math.prod(call.lse_shape()) <= _FEW_LINES
                steps.append(self._combine(program, parts, heads, total, lse_strides, numbers, few))
        runs = run_of(program, launching(steps), EMPTY[q.device.type], 3, on_16)
        if not by_lists.names:
            return runs
        lists_of = by_lists.bound(call, form)

        def sized(totals: Totals | None) -> Run:
            run = runs(totals)
            return lambda *tensors: run(*tensors, *lists_of(tensors))

        return sized

    def list_tiles(self, role: str, call: Call) -> Tiles | None:
        """Return the tiles by whose lists the kernel ``role`` visits, if it does."""
        return plans.list_tiles(self.constants, role, call)

    def _combine(
        self, program: Program, parts: int, heads: int, rows_per_batch: Extent,
        lse_strides: Shape, numbers: dict[str, int], few: bool,
    ) -> Launch:  # fmt: skip
        shapes = dict(zip(program.made, program.likes, strict=True))
        out, lse = shapes["out"][0], shapes["lse"][0]
        lines = count(lse)
        each = 1 if few else 16
        key = ("combine", each, program.device.index)
        kernel = self.kernel(key, lambda: specs.combine_spec(self.constants, each))
        arguments = (
            Slot("parts"), Slot("part_lses"), Slot("out"), Slot("lse"), lines, heads,
            rows_per_batch, out[-1], parts, *lse_strides, count(out), lines,
        )  # fmt: skip
        return kernel.bind(-(-lines // each), arguments, numbers)

    def _splits(self, call: Call, programs: int) -> int:
        """Return the number of splits of the keys."""
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
        """Return how many of ``pairs`` (sequence, head) are processed together; pairs of one KV
        head stay together.

        It is at most the number of pairs, because the kernels multiply it by the blocks of a pair
        in 32 bits.
        """
        if not self.reversed:
            return group
        bytes_of = elements * self.bytes_of_key
        return min(max(1, self.near // max(1, bytes_of)) * group, pairs)
