"""The kernel that readies a KV cache, run in the emulator, against the operators' torch code."""

import itertools
from dataclasses import dataclass, replace

import pytest
import torch

import pyfa
from pyfa import codeobject, request
from pyfa.backends.common.program import Program, run_of
from pyfa.backends.hip import code, plans
from pyfa.backends.hip.launcher import Launcher
from pyfa.backends.hip.runtime_emulator import EmulatorRuntime
from pyfa.backends.native import append
from pyfa.backends.torch import append as operators
from pyfa.emulator import EmulatorError
from pyfa.problem import Append, Call, form_of, tensors_of

KERNEL = "hip/append.hip"


@dataclass(frozen=True)
class Case:
    """Three sequences of a cache for 30 keys; ``half`` is what rotary's tables have of columns."""

    new: int | None = 2
    dims: tuple[int, int] = (64, 64)
    half: int | None = None
    interleaved: bool = True
    moving: bool = True
    own_start: bool = False
    table: torch.dtype | None = None
    page_size: int = 0
    batch_idx: bool = False
    packed: bool = False
    gap: int = 8
    dtype: torch.dtype = torch.bfloat16
    begin: tuple[int, ...] = (0, 7, 28)


# Heads of every kind of tail; pairs that fill pieces, leave a rest, or end in the middle of one.
DIMS = (((64, 64), 32), ((128, 96), 32), ((40, 24), 20), ((33, 17), 5), ((2, 1), 1), ((56, 64), 12))
WHERE = ({}, {"batch_idx": True}, {"page_size": 5}, {"page_size": 6, "packed": True})
CASES = [
    Case(dims=dims, half=turned, interleaved=bool(index % 2), **where)
    for (dims, half), where in itertools.product(DIMS, WHERE)
    for index, turned in enumerate((None, half, half))
]
# What rotary may be asked for besides, rows that are dropped, bases at no multiple of 16 bytes.
CASES += [
    replace(case, interleaved=interleaved)
    for interleaved in (False, True)
    for case in (
        Case(half=16, moving=False, packed=True),
        Case(half=16, own_start=True, table=torch.float32),
        Case(half=16, own_start=True, table=torch.float64, dtype=torch.float16),
        Case(half=16, new=None),
        Case(half=16, new=5, begin=(29, 28, 3)),
        Case(half=16, gap=3, dtype=torch.float16),
        Case(half=16, new=0),
        Case(dims=(256, 256), half=128, table=torch.float16),
        Case(dims=(256, 256), half=8),
    )
]
# What has to catch the faults. Each format is compiled anew; only float16 tells fused products.
SAMPLE = [case for case in CASES[-18:] + CASES[::7] if case.dtype == torch.bfloat16]
SAMPLE += [Case(dims=(128, 128), half=64, table=torch.float32, dtype=torch.float16)]


def spaced(shape, gap, dtype, generator):
    """Random, with ``gap`` elements between rows that are not the tensor's."""
    wide = torch.randn(*shape[:-1], shape[-1] + gap, generator=generator).to(dtype)
    return wide[..., : shape[-1]]


def storage(x):
    return torch.empty(0, dtype=torch.uint8).set_(x.untyped_storage())


def copied(x):
    """The same view of a copy of all that lies around it."""
    whole = torch.empty(0, dtype=x.dtype).set_(x.untyped_storage().clone())
    return whole.as_strided(x.shape, x.stride(), x.storage_offset())


def poisoned(shape, strides, dtype):
    """A buffer as a program makes it, with values that none of its elements is to have."""
    return torch.full(shape, -77 if dtype == torch.int32 else torch.nan, dtype=dtype)


def run(call: Call, new: Append) -> dict[str, torch.Tensor]:
    """The kernel alone: what it makes, by name."""
    call, new = append.readable(call, new)
    inputs = tensors_of(call, new)
    launcher, program = Launcher(EmulatorRuntime()), Program(form_of(call, new).names, call.q)
    written = append.add(launcher, program, call, new)
    assert sorted(written.values()) == sorted(program.made)
    launch, totals = launcher.launch_of(program, inputs), (call.q.shape[0], call.k.shape[0])
    made = run_of(program, launch, poisoned)(totals)(*inputs)
    return dict(zip(program.made, made, strict=True))


def errors_of(case: Case) -> list[str]:
    """What the kernel leaves that the operators do not, bit by bit."""
    generator = torch.Generator().manual_seed(7)

    def random(*shape, gap=case.gap):
        return spaced(shape, gap, case.dtype, generator)

    heads, heads_k, rows, batch, capacity = 10, 2, 3, 3, 30
    dim, dim_v = case.dims
    offsets = torch.tensor([0, 3, 3, 4], dtype=torch.int32) if case.packed else None
    q = random(4, heads, dim) if case.packed else random(batch, rows, heads, dim)
    room = (5, capacity)
    options, page_table = {}, None
    if case.page_size:
        pages = capacity // case.page_size
        order = torch.randperm(batch * pages + 2, generator=generator)[: batch * pages]
        page_table = order.reshape(batch, pages).int()
        room = (batch * pages + 2, case.page_size)
        options["page_table"] = page_table
    elif case.batch_idx:
        options["cache_batch_idx"] = torch.tensor([4, 0, 2], dtype=torch.int32)
    else:
        room = (batch, capacity)
    caches = [random(*room, heads_k, each, gap=2 * case.gap) for each in case.dims]
    k = v = None
    if case.new is not None:
        k, v = random(batch, case.new, heads_k, dim), random(batch, case.new, heads_k, dim_v)
    begin = torch.tensor(case.begin, dtype=torch.int32)
    cos = sin = start = None
    if case.half is not None:
        angle = torch.randn(64, case.half, generator=generator)
        cos, sin = (x.to(case.table or case.dtype) for x in (angle.cos(), angle.sin()))
        start = torch.tensor([5, 0, 40], dtype=torch.int32) if case.own_start else None

    length = {"max_seqlen_q": rows, "max_seqlen_k": capacity}
    call = Call(q, *caches, cu_seqlens_q=offsets, seqused_k=begin, **options, **length)
    new = Append(k, v, cos, sin, start, None, case.interleaved, case.moving)
    want, want_q, turned = [copied(x) for x in caches], q, k
    if cos is not None:
        first = begin if start is None else start
        positions = request._query_positions(q, first, offsets, case.moving)
        want_q = operators.rotary(q, cos, sin, positions, case.interleaved)
        if k is not None:
            positions = first[:, None] + torch.arange(case.new)
            turned = operators.rotary(k, cos, sin, positions, case.interleaved)
    if k is not None:
        operators.append_kv(*want, turned, v, begin, page_table, call.cache_batch_idx)
    read = [x for x in (q, k, v, begin, cos, sin, start) if x is not None]
    untouched = [storage(x).clone() for x in read]

    made = run(call, new)
    found = []
    if sorted(made) != ["rotated_q"] * (cos is not None) + ["used"] * bool(case.new):
        found.append(f"made {sorted(made)}")
    if case.new and not torch.equal(made["used"], begin + case.new):
        found.append(f"keys held: {made['used']}")
    for name, have, expected in (("k", caches[0], want[0]), ("v", caches[1], want[1])):
        if not torch.equal(storage(have), storage(expected)):
            found.append(f"{name}_cache differs")
    have_q = made.get("rotated_q", q)
    if not torch.equal(have_q.view(torch.int16), want_q.view(torch.int16)):
        found.append("q differs")
    if not all(map(torch.equal, untouched, map(storage, read))):
        found.append("what is only read was written")
    return found


@pytest.mark.parametrize("case", CASES, ids=str)
def test_as_the_operators(case):
    assert not errors_of(case)


# Each: what it is, the exact snippet, what it becomes.
FAULTS = {
    "fused products": ("#pragma clang fp contract(off)", ""),
    "truncated": (
        "Format<DTYPE>::nearest(x[2 * w], x[2 * w + 1])",
        "(__builtin_bit_cast(unsigned, x[2 * w]) >> 16 | "
        "__builtin_bit_cast(unsigned, x[2 * w + 1]) & 0xffff0000)",
    ),
    "rotated the other way": ("first, c) - product(second, s)", "first, c) + product(second, s)"),
    "pairs of the wrong kind": ("p.rotary_flags & kInterleaved", "~p.rotary_flags & kInterleaved"),
    "values rotated": ("p.v_head, p.heads_k, p.head_dim_v, 0, 0", "p.v_head, p.heads_k, "
                      "p.head_dim_v, p.rotary_dim, 0"),
    "rest of the head forgotten": ("row.columns - row.rotated + kPiece - 1", "0"),
    "one piece a thread": ("i += kThreads", "i += 1 << 20"),
    "tail not guarded": ("min(row.columns - column, kPiece)", "kPiece"),
    "pairs not guarded": ("min(half - pair, kPiece)", "kPiece"),
    "rows beyond the end": ("(unsigned)place >= (unsigned)p.seqlen_k", "false"),
    "written behind the new keys": ("int_at(p.seqused_q, s.batch) + index;",
                                    "int_at(p.seqused_q, s.batch) + p.new_rows + index;"),
    "keys counted without the new": ("int_at(p.seqused_q, batch) + p.new_rows;",
                                     "int_at(p.seqused_q, batch);"),
    "keys counted where sequences begin": ("((int *)p.seqused_k)[batch] =",
                                           "((int *)p.seqused_k)[0] ="),
    "keys counted by the first sequence alone": ("if (id < p.batch * p.new_rows &&",
                                                 "if (id < p.new_rows &&"),
    "keys counted by each new row": (
        "((int *)p.seqused_k)[batch] = int_at(p.seqused_q, batch) + p.new_rows;",
        "((int *)p.seqused_k)[batch] += p.new_rows;",
    ),
    "keys held as attention will see them": ("int place = int_at(p.seqused_q",
                                             "int place = int_at(p.seqused_k"),
    "all new keys at one position": ("int_at(p.rotary_seqlens, s.batch) + index : 0",
                                     "int_at(p.rotary_seqlens, s.batch) : 0"),
    "queries always move": ("(p.rotary_flags & kMoving ? index : 0)", "index"),
    "rows of other sequences": ("if (index >= s.stored_rows) return false;", ""),
    "tables of float32 only": ("if (p.rotary_flags & kFloat32Tables)", "if (true)"),
    "heads of the cache at new_k's stride": ("p.k_head, p.heads_k", "p.new_k_head, p.heads_k"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_caught(fault, plant):
    plant(KERNEL, *FAULTS[fault])
    assert any(map(finds, SAMPLE))


def finds(case: Case) -> bool:
    try:
        return bool(errors_of(case))
    except EmulatorError:
        return True


@pytest.mark.parametrize("plan", [plans.plan_of("hip", "append", i) for i in (0, 1)], ids=str)
def test_resources(plan):
    """No spill, no scratch, and as many wavefronts as a compute unit holds."""
    kernel = codeobject.parse(code.load(plan, "gfx942").data).kernel("append")
    assert (kernel.vgpr_spills, kernel.sgpr_spills, kernel.scratch_bytes) == (0, 0, 0)
    assert kernel.vgprs + kernel.agprs <= 64
    assert kernel.lds_bytes == 0


NUMBERS = {"global_load_dword", "global_store_dword"}


def test_aligned_rows_move_in_16_bytes(monkeypatch):
    counters, original = [], EmulatorRuntime.run

    def run(self, *rest):
        original(self, *rest)
        counters.append(self.counters)

    monkeypatch.setattr(EmulatorRuntime, "run", run)
    for interleaved in (False, True):
        case = Case(dims=(128, 128), half=32, table=torch.float32, interleaved=interleaved)
        assert not errors_of(case)
    for each in counters:
        names = {name for name in each.mnemonics if name.startswith("global_")}
        wide, lone = {"global_load_dwordx4", "global_store_dwordx4"}, names & NUMBERS
        assert names == wide | lone
        # The keys held by each of three sequences, and a position for each of four wavefronts of
        # the six new keys' rows: what is behind a store is no scalar load.
        assert each.mnemonics["global_store_dword"] == 3
        assert each.mnemonics.get("global_load_dword", 0) <= 4 * 6


def arguments(dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(2, 2, 2, 64, generator=generator).to(dtype) for _ in range(3))
    caches = [torch.randn(2, 24, 2, 64, generator=generator).to(dtype) for _ in range(2)]
    table = torch.randn(24, 16, generator=generator)
    options = {"k": k, "v": v, "cache_seqlens": torch.tensor([3, 20], dtype=torch.int32)}
    return q, caches, options, {"rotary_cos": table, "rotary_sin": table}


def test_the_backend_of_the_attention_appends(kernels_run):
    q, caches, options, tables = arguments()
    copies = [x.clone() for x in caches]
    version = caches[0]._version
    pyfa.attention_kvcache(q, *caches, **options, **tables, causal=True, backend="emulator")
    assert kernels_run == ["append", "attn_decode"]
    assert caches[0]._version > version
    pyfa.attention_kvcache(q, *copies, **options, **tables, causal=True, backend="torch")
    assert all(map(torch.equal, caches, copies))


@pytest.mark.parametrize(
    ("left_out", "kernels"),
    [("k v", ["append", "attn_decode"]), ("rotary", ["append", "attn_decode"]),
     ("k v rotary", ["attn_decode"])],
)  # fmt: skip
def test_one_launch_where_there_is_work(left_out, kernels, kernels_run):
    q, caches, options, tables = arguments()
    options |= {} if "rotary" in left_out else tables
    options = {name: x for name, x in options.items() if name not in left_out.split()}
    pyfa.attention_kvcache(q, *caches, **options, backend="emulator")
    assert kernels_run == kernels


def test_a_cache_it_cannot_write_is_the_operators(kernels_run):
    q, caches, options, tables = arguments()
    caches = [x.transpose(1, 3).contiguous().transpose(1, 3) for x in caches]
    copies = [x.clone() for x in caches]
    pyfa.attention_kvcache(q, *caches, **options, **tables, backend="emulator")
    assert "append" not in kernels_run
    pyfa.attention_kvcache(q, *copies, **options, **tables, backend="torch")
    assert all(map(torch.equal, caches, copies))


@pytest.mark.parametrize("more", [{}, {"batch_invariant": True}, {"causal": True}])
def test_queries_whose_elements_are_apart(more, kernels_run):
    """Attention reads a copy of such queries, and rotary must, too: before it were others' elements
    that were rotated."""
    q, caches, options, tables = arguments()
    grouped = torch.randn(2, 1, 4, 64).to(q.dtype)  # batch-invariant, its heads are rows
    for one in (q, q[:, :1], grouped):
        apart = one.transpose(1, 3).contiguous().transpose(1, 3)
        assert apart.stride(-1) != 1
        copies = [[x.clone() for x in caches] for _ in range(2)]
        results = [
            pyfa.attention_kvcache(x, *each, **options, **tables, **more, backend="emulator")
            for x, each in zip((one, apart), copies, strict=True)
        ]
        assert torch.equal(*results)
        assert all(map(torch.equal, *copies))
    assert "append" in kernels_run


def test_positions_without_a_row_give_nan():
    """What a CPU refuses and nobody sees on a GPU: the tables' neighbors are not read."""
    q, (k_cache, v_cache), _, tables = arguments()
    table = tables["rotary_cos"]
    start = torch.tensor([23, -1], dtype=torch.int32)
    call = Call(q, k_cache, v_cache, max_seqlen_q=2, max_seqlen_k=24)
    rotated = run(call, Append(None, None, table, table, start, None, True, True))["rotated_q"]
    unknown = rotated.isnan().all(-1).all(-1)
    turned = rotated[..., :32].isnan().all(-1).all(-1)
    assert turned.tolist() == [[False, True], [True, False]]
    assert not unknown.any()
