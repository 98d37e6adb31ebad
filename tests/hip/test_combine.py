"""The kernel that combines the parts of split keys, run in the emulator."""

import struct

import pytest
import torch

from pyfa import codeobject, emulator
from pyfa.backends.common.program import Program, run_of
from pyfa.backends.hip import code, plans, runtime_emulator
from pyfa.backends.hip.launcher import Launcher
from pyfa.backends.hip.runtime_emulator import EmulatorRuntime
from pyfa.backends.native import combine
from pyfa.emulator import EmulatorError, load
from pyfa.emulator import Program as Loaded
from pyfa.problem import Call

# batch (None: packed), rows, heads, parts, head_dim_v: one part, a workgroup of one line and of
# many with some left over, more parts than it has slots, parts that are no multiple of what is
# loaded at once, dims that leave threads without work and that are no multiple of a thread's.
SHAPES = (
    (2, 3, 2, 1, 64),
    (1, 9, 3, 2, 128),
    (1, 1, 4, 35, 128),
    (None, 5, 3, 7, 40),
    (3, 2, 1, 17, 256),
    (None, 2, 2, 300, 111),
    (2, 1, 2, 16, 192),
)

# The same where sequences leave rows out: lengths of packed ones, rows of each in memory if they
# are not packed, how many of them are in use, rows behind the last sequence.
GAPS = (
    ((3, 0, 2), None, None, 2),
    ((5, 1, 4), None, (2, 1, 0), 1),
    ((0, 0), None, None, 3),
    ((), 3, (2, 0, 3), 0),
)

# Each: what it is, the exact snippet, what it becomes.
FAULTS = {
    "a split that saw nothing is read": (
        "if (lse[i] != -INFINITY_F && columns > 0) out[i] = *",
        "if (columns > 0) out[i] = *",
    ),
    "the same of odd dims": (
        "if (lse[i] != -INFINITY_F && columns > j)",
        "if (columns > j)",
    ),
    "sums not rescaled": ("sum.total *= rescale;", ""),
    "outputs not rescaled": ("sum.out.x[j] *= rescale;", ""),
    "barrier dropped": ("  barrier();\n", ""),
    "maxima of slots ignored": ("power(meeting.top[other] - finite(all.top))", "1.0f"),
    "second of two slots ignored": (
        "    for (int i = 0; i < 2; ++i) {",
        "    for (int i = 0; i < 1; ++i) {",
    ),
    "sums of one slot not met": ("if (place.slot == 0) sum = met", "if (false) sum = met"),
    "slots of eight splits": ("(unsigned)(x - 1) / 4", "(unsigned)(x - 1) / 8"),
    "sums of slots ignored": ("weight * meeting.total[other]", "weight"),
    "last split dropped": ("if (split < p.num_splits)", "if (split < p.num_splits - 1)"),
    "splits beyond the last": ("if (split < p.num_splits)", ""),
    "packed rows beyond the last": ("if (exists && place.slot == 0)", "if (place.slot == 0)"),
    "last packed row dropped": (
        "bool exists = place.packed_row <",
        "bool exists = place.packed_row + 1 <",
    ),
    "packed rows of other workgroups": ("workgroup_index() << (kThreadBits", "0 << (kThreadBits"),
    "LSE in base 2": ("log2(sum.total) * kLn2", "log2(sum.total)"),
    "columns beyond head_dim_v": ("&& columns > 0) out[i] = *", ") out[i] = *"),
    "columns beyond odd dims": ("&& columns > j", ""),
    "columns stored beyond it": ("      if (place.column + j < p.head_dim_v)\n        to", "to"),
    "rows of no sequence": ("if (used)", "if (exists)"),
    "rows of the first entry": ("is_used(p, (int)stand.batch", "is_used(p, 0"),
    "rows not counted from their entry": ("(int)stand.row);", "(int)place.packed_row);"),
    "rows behind the last sequence": ("if (row >= int_at(p.cu_seqlens_q, p.batch))", "if (false)"),
    "lengths of the first sequence": (
        "row < int_at(p.seqused_q, batch)",
        "row < int_at(p.seqused_q, 0)",
    ),
    "rows of the next sequence": ("batch * p.out_batch +", ""),
    "wrong head": ("head * p.lse_head", "(p.heads_q - 1 - head) * p.lse_head"),
    "truncated": (
        "Stored{Format<DTYPE>::nearest(x[0], x[1])",
        "Stored{Format<DTYPE>::nearest(x[0], x[1]) - 1",
    ),
    "truncated by itself": (
        "Format<DTYPE>::nearest(x[j], 0.0f)",
        "(__builtin_bit_cast(unsigned, x[j]) >> 16)",
    ),
}


def run(call: Call, tensors: dict[str, torch.Tensor]) -> None:
    """The kernel alone, on ``tensors`` by name."""
    likes = {name: (x.shape, x.stride(), x.dtype) for name, x in tensors.items()}
    launcher, program = Launcher(EmulatorRuntime()), Program(tensors, call.q)
    parts = tensors["partial_lse"].shape[-1]
    combine.add(launcher, program, call, likes["out"], likes["lse"], parts)
    given = tuple(tensors.values())
    run_of(program, launcher.launch_of(program, given), launcher.empty)(None)(*given)


def test_a_wait_dropped_before_the_barrier_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its only trace: the bits are the same where LDS happens to be fast enough."""
    dropped = []

    def without_wait(data: bytes) -> Loaded:
        loaded = load(data)
        names, pcs = loaded.code.names, loaded.code.instructions["pc"]
        barrier = names.index("s_barrier")
        wait = max(n for n in range(barrier) if names[n] == "s_waitcnt")
        assert "ds_write" in "".join(names[:wait])
        assert "ds_write" not in "".join(names[wait:barrier])
        pc = int(pcs[wait])
        at = data.index(loaded.object.image[pc : pc + 64])
        dropped.append(pc)
        return load(data[:at] + struct.pack("<I", 0xBF800000) + data[at + 4 :])  # s_nop 0

    runtime_emulator.program.cache_clear()
    monkeypatch.setattr(emulator, "load", without_wait)
    with pytest.raises(EmulatorError, match="has not waited") as error:
        errors_of((1, 1, 4, 35, 128), torch.bfloat16)
    runtime_emulator.program.cache_clear()
    assert dropped
    assert error.value.check == "waits"


def errors_of(shape: tuple, dtype: torch.dtype) -> list[str]:
    """What differs from the same sum in float64, beyond what float32 and one rounding can."""
    batch, rows, *_ = shape
    offsets = torch.tensor([0, rows], dtype=torch.int32) if batch is None else None
    unused = torch.zeros((batch or 1) * rows, dtype=torch.bool)
    return _errors_of(shape, dtype, {"cu_seqlens_q": offsets}, unused)


def errors_of_gaps(gaps: tuple) -> list[str]:
    """The same where rows of no sequence have parts that hold anything."""
    lengths, stored, used, behind = gaps
    sizes = lengths or (stored,) * len(used)
    in_use = zip(sizes, used or sizes, strict=True)
    unused = [torch.arange(size) >= n for size, n in in_use]
    unused = torch.cat([*unused, torch.ones(behind, dtype=torch.bool)])
    fields = {}
    if stored is None:
        fields["cu_seqlens_q"] = torch.tensor([0, *lengths]).cumsum(0).int()
    if used is not None:
        fields["seqused_q"] = torch.tensor(used, dtype=torch.int32)
    shape = (None, len(unused), 2, 3, 64) if stored is None else (len(used), stored, 2, 3, 64)
    return _errors_of(shape, torch.bfloat16, fields, unused)


def _errors_of(shape: tuple, dtype: torch.dtype, fields: dict, unused: torch.Tensor) -> list[str]:
    batch, rows, heads, parts, dim = shape
    generator = torch.Generator().manual_seed(parts * 1000 + dim)
    lines = (batch or 1) * rows
    partial_out = torch.randn(lines, heads, parts, dim, generator=generator)
    partial_lse = 8 * torch.randn(lines, heads, parts, generator=generator)
    partial_lse[torch.rand(partial_lse.shape, generator=generator) < 0.2] = -torch.inf
    partial_lse[0, 0] = -torch.inf
    unseen = partial_lse == -torch.inf
    partial_out[unseen] = torch.nan

    packed = batch is None
    shaped = (rows, heads) if packed else (batch, rows, heads)
    # Wider rows than needed, so that strides count.
    out = torch.full((*shaped, dim + 8), torch.nan, dtype=dtype)[..., :dim]
    lse = torch.full((heads, rows) if packed else (batch, heads, rows), torch.nan)
    fields = {name: x for name, x in fields.items() if x is not None}
    tensors = {"out": out, "lse": lse, "partial_out": partial_out, "partial_lse": partial_lse}
    run(Call(out, out, out, **fields), tensors | fields)
    partial_lse[unused] = -torch.inf
    unseen = partial_lse == -torch.inf

    want_lse = partial_lse.double().logsumexp(-1)
    weight = (partial_lse.double() - want_lse.nan_to_num(neginf=0.0)[..., None]).exp()
    values = partial_out.double().masked_fill(unseen[..., None], 0.0)
    want = (weight[..., None] * values).sum(-2)
    size = (weight[..., None] * values.abs()).sum(-2)
    have = out.reshape(lines, heads, dim).double()
    have_lse = lse.reshape(-1, heads, rows).transpose(1, 2).reshape(lines, heads).double()
    # Half a unit of the last place (2^-9 or 2^-12 of the value), and float32's own roundings.
    half_ulp = torch.finfo(dtype).eps / 2
    bound = want.abs() * half_ulp + size * 2.0**-20 + torch.finfo(dtype).smallest_normal * half_ulp
    found = []
    if not ((have - want).abs() <= bound).all():
        found.append(f"out: {(have - want).abs().max()}")
    same = have_lse == want_lse
    if not (same | ((have_lse - want_lse).abs() <= 2.0**-21 * (1 + want_lse.abs()))).all():
        found.append(f"lse: {have_lse} instead of {want_lse}")
    return found


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_sound(shape, dtype):
    assert not errors_of(shape, dtype)


def test_nothing_to_do(kernels_run):
    out, lse = torch.empty(2, 0, 4, 64, dtype=torch.float16), torch.empty(2, 4, 0)
    call = Call(out, out, out)
    parts = {
        name: torch.empty_strided(shape, strides, dtype=dtype)
        for name, (shape, strides, dtype) in combine.partials(call, 3).items()
    }
    assert parts["partial_out"].shape == (0, 4, 3, 64)
    assert parts["partial_lse"].shape == (0, 4, 3)
    run(call, {"out": out, "lse": lse, **parts})
    assert not kernels_run


@pytest.mark.parametrize("gaps", GAPS, ids=str)
def test_rows_of_no_sequence(gaps):
    assert not errors_of_gaps(gaps)


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_caught(fault, plant):
    plant("hip/combine.hip", *FAULTS[fault])
    bf16 = torch.bfloat16
    assert any(finds(lambda x: errors_of(x, bf16), x) for x in SHAPES) or any(
        finds(errors_of_gaps, x) for x in GAPS
    )


def finds(errors, case):
    try:
        return bool(errors(case))
    except EmulatorError:
        return True


@pytest.mark.parametrize("plan", [plans.plan_of("hip", "combine", i) for i in (0, 1)], ids=str)
def test_resources(plan):
    """No spill, no scratch, and eight workgroups on a compute unit."""
    kernel = codeobject.parse(code.load(plan, "gfx942").data).kernel("combine")
    assert (kernel.vgpr_spills, kernel.sgpr_spills, kernel.scratch_bytes) == (0, 0, 0)
    assert kernel.vgprs + kernel.agprs <= 64
    assert kernel.lds_bytes * 8 <= 65536
