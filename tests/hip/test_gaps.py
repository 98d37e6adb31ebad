"""The kernel that clears rows of no sequence, run in the emulator: every byte that it leaves."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

import pyfa
from pyfa import codeobject
from pyfa.backends.common.program import Program, like, run_of
from pyfa.backends.hip import code, plans
from pyfa.backends.hip.launcher import Launcher
from pyfa.backends.hip.runtime_emulator import EmulatorRuntime
from pyfa.backends.native import gaps
from pyfa.emulator import EmulatorError
from pyfa.problem import Call, form_of, tensors_of

KERNEL = "hip/gaps.hip"


@dataclass(frozen=True)
class Case:
    """``lengths`` of sequences that are packed, with ``behind`` rows after the last one; or that
    are ``rows`` each. ``used``: how many of them are in use. ``apart``: keys lie in another way."""

    lengths: tuple[int, ...]
    used: tuple[int, ...] | None = None
    behind: int = 0
    rows: int = 0
    heads: tuple[int, int] = (2, 2)
    dims: tuple[int, int] = (64, 64)
    has_lse: bool = True
    wide: int = 0
    shared: bool = False
    dtype: torch.dtype = torch.bfloat16

    @property
    def packed(self) -> bool:
        return not self.rows


# Sixteen rows a workgroup: fewer, more, and a last one that is not full. Rows of no sequence behind
# the last, in the middle where lengths are not used up, before a sequence where empty ones lie.
CASES = {
    "packed": Case((5, 9), behind=7),
    "packed and full": Case((16, 16)),
    "packed, used": Case((5, 9, 20), used=(3, 0, 20), behind=2, heads=(6, 2), dims=(128, 64)),
    "packed, empty between": Case((0, 3, 0, 0, 4, 0), used=(0, 1, 5, 0, 4, 2), behind=1),
    "packed, used beyond": Case((4, 4), used=(9, 2)),
    "all empty": Case((0, 0), behind=5, dims=(8, 16)),
    "no sequence": Case((), behind=35, heads=(3, 1)),
    "many sequences": Case(tuple(range(23)), used=tuple(x // 2 for x in range(23)), behind=3),
    "dense, used": Case((), used=(3, 0, 9), rows=9, heads=(4, 1), dims=(64, 128)),
    "dense, one row": Case((), used=(0, 1), rows=1, dims=(256, 256), heads=(5, 5)),
    "wide heads": Case((3,), used=(1,), behind=2, dims=(256, 192), heads=(16, 2)),
    "without an LSE": Case((5, 2), used=(1, 2), behind=2, has_lse=False),
    "strided": Case((5, 2), used=(1, 2), behind=2, wide=24, dims=(40, 24), dtype=torch.float16),
    "strided, dense": Case((), used=(2, 4), rows=6, wide=8, dims=(72, 40)),
    "one tensor of offsets": Case((5, 9), behind=7, shared=True),
}  # fmt: skip


def unused(case: Case) -> torch.Tensor:
    """Of every row in memory, in order, whether no sequence uses it."""
    if not case.packed:
        assert case.used is not None
        return torch.cat([torch.arange(case.rows) >= used for used in case.used])
    used = case.used or case.lengths
    rows = [torch.arange(n) >= m for n, m in zip(case.lengths, used, strict=True)]
    return torch.cat([*rows, torch.ones(case.behind, dtype=torch.bool)])


def call_of(case: Case) -> Call:
    """With queries and keys alike, so that forward, dq, dk and dv have the same rows to clear."""
    heads, heads_k = case.heads
    total = len(unused(case))
    batch = len(case.lengths) if case.packed else len(case.used or ())
    shape = (total,) if case.packed else (batch, case.rows)
    q, k, v = (
        torch.zeros(*shape, n, dim, dtype=case.dtype)
        for n, dim in zip((heads, heads_k, heads_k), (*case.dims[:1], *case.dims), strict=True)
    )
    fields: dict[str, torch.Tensor] = {}
    if case.packed:
        offsets = torch.tensor([0, *case.lengths]).cumsum(0).int()
        fields["cu_seqlens_q"] = offsets
        fields["cu_seqlens_k"] = offsets if case.shared else offsets.clone()
    if case.used is not None:
        fields["seqused_q"] = torch.tensor(case.used, dtype=torch.int32)
        fields["seqused_k"] = fields["seqused_q"].clone()
    longest = case.rows or max(case.lengths, default=0)
    return Call(q, k, v, max_seqlen_q=longest, max_seqlen_k=longest, **fields)


class Buffers:
    """What a program makes, with random bytes; ``wide`` elements lie between heads."""

    def __init__(self, wide: int) -> None:
        self.wide, self.before = wide, []
        self.generator = torch.Generator().manual_seed(5)

    def like(self, shape, dtype):
        sizes, strides, _ = like((*shape[:-1], shape[-1] + self.wide), dtype)
        return (*sizes[:-1], shape[-1]), strides, dtype

    def empty(self, shape, strides, dtype):
        whole = 1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
        size = (whole if 0 not in shape else 0) * dtype.itemsize
        data = torch.randint(256, (size,), generator=self.generator, dtype=torch.uint8)
        self.before.append(data.clone())
        return data.view(dtype).as_strided(shape, strides)


def storage(x: torch.Tensor) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(x.untyped_storage())


def errors_of(case: Case, backward: bool) -> list[str]:
    """What memory holds other than it should, of out and LSE, or of dq, dk, dv.

    Out of gaps, and between heads, that is what was there before, whatever it was.
    """
    call, empty, buffers = call_of(case), unused(case), Buffers(case.wide)
    launcher = Launcher(EmulatorRuntime())
    program = Program(form_of(call).names, call.q)
    if backward:
        likes = [buffers.like(x.shape, x.dtype) for x in call[:3]]
        for name, each in zip(("dq", "dk", "dv"), likes, strict=True):
            program.make(name, each)
        gaps.add_backward(launcher, program, call, *likes)
    else:
        out, lse = buffers.like(call.out_shape(), case.dtype), like(call.lse_shape(), torch.float32)
        program.make("out", out)
        if case.has_lse:
            program.make("lse", lse)
        gaps.add_forward(launcher, program, call, out, lse if case.has_lse else None)
    inputs = tensors_of(call)
    read = [storage(x).clone() for x in inputs]
    run = run_of(program, launcher.launch_of(program, inputs), buffers.empty)(None)
    made = run(*inputs)
    found = [] if all(map(torch.equal, read, map(storage, inputs))) else ["an input was written"]
    for name, have, before in zip(program.made, made, buffers.before, strict=True):
        want = before.view(have.dtype).as_strided(have.shape, have.stride())
        clear(name, want, empty, case)
        if not torch.equal(storage(have), before):
            found.append(f"{name} is not what it should be")
    return found


def clear(name: str, x: torch.Tensor, empty: torch.Tensor, case: Case) -> None:
    """What the kernel is to do to ``x``, whose rows are first, or behind the batch, or last."""
    if name == "lse":
        x = x.movedim(-1, 0 if case.packed else 1)
    if not case.packed:
        empty = empty.view(x.shape[:2])
    x[empty] = -torch.inf if name == "lse" else 0.0


@pytest.mark.parametrize("name", CASES)
def test_every_byte(name: str) -> None:
    case = CASES[name]
    assert not errors_of(case, backward=False)
    if case.has_lse:
        assert not errors_of(case, backward=True)


# Each: what it is, the exact snippet, what it becomes.
FAULTS = {
    "rows behind the last sequence kept": ("if (row >= int_at(p.cu_seqlens_q, p.batch))",
                                           "if (false)"),
    "row of the sequence before": ("<= row ? low : high", "< row ? low : high"),
    "rows not counted from their sequence": ("row -= int_at(p.cu_seqlens_q, batch);", ""),
    "lengths of the first sequence": ("row < int_at(p.seqused_q, batch);",
                                      "row < int_at(p.seqused_q, 0);"),
    "one row more in use": ("row < int_at(p.seqused_q, batch);",
                            "row <= int_at(p.seqused_q, batch);"),
    "one row less in use": ("row < int_at(p.seqused_q, batch);",
                            "row + 1 < int_at(p.seqused_q, batch);"),
    "used rows cleared": ("if (is_used(p, batch, row)) return;", ""),
    "first head alone": ("i / units * head_stride", "0"),
    "part of a head": ("i += kThreads / kRows", "i += 1 << 20"),
    "heads beyond the last": ("i < heads * units;", "i < (heads + 1) * units;"),
    "beyond the last row": ("* (p.cu_seqlens_q ? 1 : p.batch)) return;", "+ kRows) return;"),
    "rows of the first entry": ("p.out + batch * p.out_batch", "p.out"),
    "LSE of the first entry": ("batch * p.lse_batch +", "0 +"),
    "LSE of the first head": ("head * p.lse_head", "0"),
    "LSE is not -inf": ("p.lse_head + row] = -INFINITY_F", "p.lse_head + row] = 0.0f"),
    "dv with the heads of dk's dims": ("p.dv_head, p.heads_k,\n          p.head_dim, thread",
                                       "p.dv_head, p.heads_k,\n          p.head_dim_v, thread"),
    "dv kept": ("if (p.dv)", "if (false)"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_caught(fault: str, plant) -> None:
    plant(KERNEL, *FAULTS[fault])
    assert any(finds(case, backward) for case in CASES.values() for backward in (False, True))


def finds(case: Case, backward: bool) -> bool:
    if backward and not case.has_lse:
        return False
    try:
        return bool(errors_of(case, backward))
    except EmulatorError:
        return True


def test_resources() -> None:
    """No spill, no scratch, and as many wavefronts as a compute unit holds."""
    kernel = codeobject.parse(code.load(plans.plan_of("hip", "gaps"), "gfx942").data).kernel("gaps")
    assert (kernel.vgpr_spills, kernel.sgpr_spills, kernel.scratch_bytes) == (0, 0, 0)
    assert kernel.vgprs + kernel.agprs <= 64
    assert kernel.lds_bytes == 0


@pytest.mark.parametrize(
    ("options", "kernels"),
    [
        ({}, ["gaps", "attn_fwd"]),
        ({"max_seqlen_q": 0}, ["gaps"]),
    ],
    ids=("packed", "no rows"),
)
def test_one_launch_before_the_kernel(options, kernels, kernels_run, nothing_bound) -> None:
    """Of a packed call, whose last row is nobody's; and of one that has no other."""
    used = min(40, options.get("max_seqlen_q", 40))
    q = torch.ones(41, 2, 64, dtype=torch.bfloat16)
    offsets = torch.tensor([0, used], dtype=torch.int32)
    lengths = {"max_seqlen_q": 40, "max_seqlen_k": 40} | options
    out, lse = pyfa.attention_varlen(
        q, q, q, offsets, offsets.clone(), **lengths, return_lse=True, backend="emulator"
    )
    assert kernels_run == kernels
    assert not out[used:].any()
    assert (lse[:, used:] == -torch.inf).all()
    assert (out[:used] == 1).all()


def test_a_dense_call_needs_none(kernels_run, nothing_bound) -> None:
    q = torch.ones(1, 40, 1, 64, dtype=torch.bfloat16, requires_grad=True)
    pyfa.attention(q, q, q, backend="emulator").sum().backward()
    assert kernels_run == ["attn_fwd", "row_sums", "attn_bwd_onepass", "dq_convert"]
