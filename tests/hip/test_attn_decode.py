"""The HIP decode kernel, run in the emulator: right as it is, caught when it is broken, frugal."""

import dataclasses

import pytest
import torch
import turns
from planted import faults_found

from pyfa import api, codeobject, device, emulator
from pyfa.backends.hip import code, decode
from pyfa.backends.hip.launcher import Launcher
from pyfa.backends.hip.runtime_emulator import EmulatorRuntime
from pyfa.backends.hip.target import TARGET
from pyfa.backends.native import decode as native_decode
from pyfa.backends.native.decode import takes
from pyfa.backends.native.plans import masking
from pyfa.backends.native.tiles import GROUP
from pyfa.conformance import cases
from pyfa.problem import Call, Problem, tensors_of


def cache(lengths_q, lengths_k, **fields):
    dim = fields.get("head_dim", 64)
    return cases.Case(
        **{"kind": "kvcache", "lengths_q": lengths_q, "lengths_k": lengths_k, "head_dim_v": dim}
        | fields
    )


# All on one plan (bfloat16, 64, 16 lines), so that a fault is one compilation: rounds of the main
# loop and what is left of them, pages that no tile is a multiple of, grouped heads, masks that cut
# groups, heads narrower than the bucket, infinite last elements of a key, lengths of 0
# and shorter than a group.
CASES = (
    cache((1, 1), (700, 515), heads_q=4, num_splits=1, slack=3, recipe="growing"),
    cache((1, 1), (600, 577), heads_q=2, num_splits=1, page_size=7, recipe="offset"),
    cache(
        (3, 3), (130, 61), heads_q=4, num_splits=3, page_size=5, leftpad=True, slack=3, causal=True
    ),
    cache((5, 5), (300, 97), heads_q=4, batch_idx=True, window=(170, 3), sinks=True, num_splits=2),
    cache((1, 1, 1), (0, 9, 65), heads_q=16, sinks=True, alibi="batch"),
    cache((2, 2), (90, 90), head_dim=40, head_dim_v=24, softcap=3.0, bias="full", num_splits=2),
    cache((1, 1), (90, 33), heads_q=4, head_dim=40, hostile="k=-inf"),
    cache((4, 0, 1), (129, 5, 64), heads_q=6, packed_q=True, causal=True, slack=2, num_splits=4),
)
# Each of these is a plan of its own: every bucket of head dims, and one, two and four products.
MORE_CASES = (
    cache((3, 3), (410, 33), head_dim=128, heads_q=16, causal=True, num_splits=1, page_size=16),
    cache((7, 7), (300, 290), head_dim=128, heads_q=8, heads_k=1, bias="bool", num_splits=1),
    cache((1, 1), (150, 150), head_dim=192, head_dim_v=128, heads_q=8, leftpad=True),
    cache((1, 1), (66, 131), dtype="float16", head_dim=72, head_dim_v=88, heads_q=4, page_size=3),
)
NIGHT = (
    cache((1, 1), (520, 300), dtype="float16", heads_q=16, head_dim=128, num_splits=1),
    cache((8, 8), (70, 40), head_dim=192, heads_q=8, heads_k=1, causal=True, softcap=9.0),
    cache((1, 1), (260, 40), dtype="float16", head_dim=256, heads_q=2, used_k=True),
    cache((2, 2), (400, 66), dtype="float16", head_dim=96, heads_q=16, heads_k=1, num_splits=1),
)

# Each: what it is, the exact snippet, what it becomes.
FAULTS = {
    "mask off by one": ("distance + r > right", "distance + r > right + 1"),
    "window off by one": ("distance + r < left", "distance + r < left + 1"),
    "keys beyond the part": ("|| key + r >= b.stop)", ")"),
    "masks skipped": ("if (first >= b.all_low &&", "if (first + kGroup > b.all_low &&"),
    "accumulator not rescaled": ("state.o[t][e] *= rescale;", ";"),
    "sum not rescaled": ("state.total[t] *= rescale;", ""),
    "maximum of a quarter of the keys": ("M::column_max(highest)", "highest"),
    "sum of a quarter of the keys": ("M::column_sum(state.total[t])", "state.total[t]"),
    "rows of the round before": ("      write();\n      look(n", "      look(n"),
    "rows of a round too early": ("      look(n + 2 * kStages);\n", ""),
    "last group dropped": ("if (n + i < groups) advance", "if (n + i < groups - 1) advance"),
    "quotient by the page size 1 less": ("if (row >= size) {", "if (row > size) {"),
    "padding forgotten": ("inverse, key + s.padding)", "inverse, key)"),
    "batch index forgotten": ("place[i].page : s.key_batch", "place[i].page : s.batch"),
    "sink in every part": ("if (!with_sinks || part > 0)", "if (!with_sinks)"),
    "keys of V in another order": (
        "perm(group.v[1][e / 2], group.v[0]",
        "perm(group.v[0][e / 2], group.v[1]",
    ),
    "wavefronts' sums not waited for": (
        "    barrier();\n    for (int e = first, f", "    for (int e = first, f",
    ),
    "sums overwritten while read": ("    if (t > 0 || first > 0) barrier();\n", ""),
    "empty part that says nothing": (
        "    store_empty(s, b, work.part);\n    return;", "    return;",
    ),
    "empty part of the wrong head": (
        "b.head_k * b.group + line - row * b.group, -INFINITY_F",
        "b.head_k * b.group, -INFINITY_F",
    ),
    "parts cut short": ("max(share, kLeastGroups)", "min(share, kLeastGroups)"),
    "part twice": ("part = parts - 1 - round;", "part = max(parts - 1, round + 1) - round - 1;"),
    "last parts of nobody": ("share = whole + id -", "share = id -"),
    "wrong key head": ("p.k + b.head_k * p.k_head", "p.k + (p.heads_k - 1 - b.head_k) * p.k_head"),
    "wrong query head": ("multiply_add(head, p.q_head,", "multiply_add(0, p.q_head,"),
    "queries not waited for": (
        "  barrier();\n  for (int t = 0; t < TILES; ++t)\n    for (int c",
        "  for (int t = 0; t < TILES; ++t)\n    for (int c",
    ),
    "part of the head not masked": ("&& eight * 8 < p.head_dim;", ";"),
    "part of the key not cleared": ("    bool inside =", "    bool inside = M::part() == 2 ||"),
    "last piece of the key cleared": ("M::part() < head_dim / 8;", "M::part() < head_dim / 8 - 1;"),
    "columns beyond head_dim_v stored": ("wanted && dim < to.head_dim_v", "wanted"),
    "lines beyond the last stored": ("bool exists = (int)line < b.lines;", "bool exists = true;"),
    "wavefronts' maxima not waited for": (
        "  barrier();\n  for (int t = 0; t < TILES; ++t) finish_tile",
        "  for (int t = 0; t < TILES; ++t) finish_tile",
    ),
    "weight of the first wavefront for all": (
        "float own = exp2(state.maximum[t] - base)",
        "float own = exp2(shared.maximum[0][t][column] - base)",
    ),
    "partial sums of the first part": ("* heads * splits + part;", "* heads * splits;"),
    "quotients by other than powers of two": ("if ((by & (by - 1)) == 0) return", "return"),
    "quotients by the next power of two": ("__builtin_ctz(by)", "bits_of(by)"),
    "P truncated": ("perm(b + 0x8000, a + 0x8000, 0x07060302)", "perm(b, a, 0x07060302)"),
    "LSE in base 2": ("(top + log2(total)) * kLn2", "(top + log2(total))"),
}  # fmt: skip


@pytest.mark.parametrize(
    "case", turns.cases([*CASES, *MORE_CASES, *NIGHT], NIGHT), ids=lambda case: case.name
)
def test_sound(case, kernels_run):
    assert not case.flaws()
    assert not faults_found([case])
    # Rows may belong to no sequence where queries are packed. Of split keys, combine clears them.
    splits = "combine" in kernels_run
    before = ["gaps"] if case.packed_q and not splits else []
    assert kernels_run[: len(before) + 1] == [*before, "attn_decode"]


# Two blocks of rows of each of eight heads, as many as there are dies.
BLOCKS = cache((16, 16), (90, 70), dtype="float16", head_dim=256, heads_q=16, heads_k=4)


@pytest.mark.night
def test_blocks_of_rows():
    assert not faults_found([BLOCKS])


def test_one_block_for_all_rows_is_found(plant):
    plant(decode.KERNEL, "block = place - first * blocks;", "block = 0;")
    assert faults_found([BLOCKS])


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_caught(fault, plant):
    plant(decode.KERNEL, *FAULTS[fault])
    assert faults_found(CASES)


def plans_of(*wanted):
    return [
        plan
        for plan in native_decode.all_plans(TARGET, "hip", "gfx942")
        if dict(plan.constants)["DTYPE"] in wanted
    ]


@pytest.mark.parametrize("plan", plans_of(1)[::4], ids=str)
def test_resources(plan):
    """No spill, no scratch, the occupancy that is asked for. All plans: ``pyfa compile --all``."""
    data = code.load(plan, "gfx942").data
    kernel = codeobject.parse(data).kernel("attn_decode")
    occupancy = dict(plan.constants)["OCCUPANCY"]
    assert (kernel.vgpr_spills, kernel.sgpr_spills, kernel.scratch_bytes) == (0, 0, 0)
    assert (kernel.vgprs + 7) // 8 * 8 <= 512 // occupancy
    assert kernel.lds_bytes * occupancy <= 65536
    names = set(emulator.load(data).code.names)
    assert not {name for name in names if name.startswith(("flat_", "scratch_"))}


def test_number_of_plans():
    assert len(native_decode.all_plans(TARGET, "hip", "gfx942")) == 68


class Recording(EmulatorRuntime):
    """Keeps the counters of every launch."""

    def __init__(self):
        super().__init__()
        self.launches = []

    def run(self, step, code, params, tensors):
        super().run(step, code, params, tensors)
        self.launches.append((code.kernel.name, step.blocks, self.counters))


def call_of(keys, heads, heads_k, dim, used=None, page_size=0):
    """One row of each head over a cache."""
    q = torch.zeros(1, 1, heads, dim, dtype=torch.bfloat16)
    if not page_size:
        k = torch.zeros(1, keys, heads_k, dim, dtype=torch.bfloat16)
        return Call(q, k, k.clone(), max_seqlen_q=1, max_seqlen_k=keys)
    pages = -(-keys // page_size)
    k = torch.zeros(pages, page_size, heads_k, dim, dtype=torch.bfloat16)
    return Call(
        q,
        k,
        k.clone(),
        max_seqlen_q=1,
        max_seqlen_k=pages * page_size,
        page_table=torch.arange(pages, dtype=torch.int32)[None],
        seqused_k=torch.tensor([used], dtype=torch.int32),
    )


def plan_of(call):
    problem = problem_of(call)
    assert takes(problem)
    return native_decode.plan(TARGET, "hip", problem)


def problem_of(call, **changes):
    needs = {"gqa"} if call.q.shape[2] != call.k.shape[2] else set()
    problem = Problem(
        1, 1, call.max_seqlen_k, call.q.shape[2], call.k.shape[2], call.q.shape[3],
        call.v.shape[3], "bfloat16", frozenset(needs), device.DEVICES["MI300X"], False,
    )  # fmt: skip
    return dataclasses.replace(problem, **changes)


@pytest.mark.parametrize(
    ("call", "keys"),
    [
        (call_of(8192, 32, 8, 64), 8192),
        (call_of(8192, 64, 8, 128), 8192),
        (call_of(8192, 32, 8, 128, used=8000, page_size=48), 8000),
    ],
    ids=("8 heads of 64", "8 heads of 128", "pages"),
)
def test_bytes_and_grid(call, keys):
    """K and V are asked for once, within 3 %, and MI300X's 304 CUs have work at 8,192 keys."""
    runtime = Recording()
    native_decode.bind(Launcher(runtime), plan_of(call), call)(*tensors_of(call))
    name, blocks, counters = runtime.launches[0]
    assert name == "attn_decode"
    once = keys * call.k.shape[2] * (call.k.shape[3] + call.v.shape[3]) * 2
    assert once <= counters.load_bytes <= 1.03 * once
    assert blocks >= 0.85 * 304
    assert counters.lds_conflict_clocks == 0


def busy(workgroups, keys, units):
    """Workgroups that have keys, and whether they are all there could be of 128 keys."""
    groups = -(-keys // GROUP)
    share = -(-groups // decode.splits_for(workgroups, keys, units))
    return workgroups * -(-groups // share), share <= 8


@pytest.mark.parametrize("units", [304, 80, 38])
def test_splits_fill_the_device(units):
    assert busy(8, 8192, units)[0] >= 0.85 * units
    for workgroups in (1, 2, 5, 8, 16, 32, 64, 128, 300, 1000):
        for keys in (64, 1000, 8192, 32768, 131072):
            total, all_there_are = busy(workgroups, keys, units)
            assert total >= 0.8 * units or all_there_are
            assert total == workgroups or total <= 2 * units


def test_splits_of_lengths():
    """A long sequence among short ones is split, in a batch that fills the device without."""
    splits = decode.splits_of_lengths
    assert splits(1, 512, 32768, 304) == 9
    assert splits(1, 2048, 32768, 304) == 2
    assert splits(1, 512, 2048, 304) == 1  # too short
    assert splits(9, 64, 131072, 304) == 19  # the device is full: no more empty ones than needed
    assert splits(35, 8, 8192, 304) == 35
    for workgroups in (1, 7, 64, 300, 512, 5000):
        for keys in (1, 4096, 131072):
            assert 1 <= splits(1, workgroups, keys, 304) <= 512


def test_lengths_unknown_to_the_host(kernels_run):
    """Only lengths on the device, of more than one sequence, add splits."""
    calls = []
    for batch, lengths in ((320, True), (320, False), (1, True)):
        q = torch.zeros(batch, 1, 1, 64, dtype=torch.bfloat16)
        k = torch.zeros(1, 1, 1, 64, dtype=torch.bfloat16).expand(batch, 4096, 1, 64)
        call = Call(q, k, k, max_seqlen_q=1, max_seqlen_k=4096)
        if lengths:
            call = call._replace(seqused_k=torch.ones(batch, dtype=torch.int32))
        runtime = Recording()
        native_decode.bind(Launcher(runtime), plan_of(call), call)(*tensors_of(call))
        calls.append(runtime.launches[0][1])
    assert calls == [640, 320, 29]


def test_num_splits_is_honored(kernels_run):
    q = torch.randn(1, 1, 2, 64, dtype=torch.bfloat16)
    k = torch.randn(1, 256, 2, 64, dtype=torch.bfloat16)
    for splits, kernels in ((1, ["attn_decode"]), (5, ["attn_decode", "combine"])):
        kernels_run.clear()
        api.attention_kvcache(q, k, k, num_splits=splits, backend="emulator")
        assert kernels_run == kernels


def test_same_bits_twice():
    q = torch.randn(2, 1, 8, 64, dtype=torch.bfloat16)
    k, v = torch.randn(2, 2, 300, 2, 64, dtype=torch.bfloat16)
    first, second = (
        api.attention_kvcache(q, k, v, num_splits=3, return_lse=True, backend="emulator")
        for _ in range(2)
    )
    assert all(map(torch.equal, first, second))


def test_offsets_beyond_4_gib():
    """Two sequences or pages 6 GiB apart, of which only the rows are ever touched."""
    near = torch.randn(2, 100, 1, 64, dtype=torch.bfloat16)
    apart = 3 * 2**30
    store = torch.empty(apart + near[0].numel(), dtype=torch.bfloat16)
    far = store.as_strided(near.shape, (apart, 64, 64, 1)).copy_(near)
    q = torch.randn(2, 1, 4, 64, dtype=torch.bfloat16)
    pages = {"page_table": torch.tensor([[1, 0]], dtype=torch.int32), "cache_seqlens": 150}
    for rows, options in ((q, {}), (q[:1], pages)):
        a, b = (
            api.attention_kvcache(rows, x, x, **options, backend="emulator") for x in (near, far)
        )
        assert torch.equal(a, b)


def test_nothing_to_do():
    k = torch.randn(2, 16, 2, 64, dtype=torch.bfloat16)
    for rows in (0, 3):
        q = torch.randn(2, rows, 4, 64, dtype=torch.bfloat16)
        used = torch.zeros(2, dtype=torch.int32)
        out, lse = api.attention_kvcache(
            q, k, k, cache_seqlens=used, return_lse=True, backend="emulator"
        )
        assert torch.equal(out, torch.zeros(2, rows, 4, 64, dtype=torch.bfloat16))
        assert torch.equal(lse, torch.full((2, 4, rows), -torch.inf))


def test_what_it_takes():
    """Few rows whose cache can be read where it lies; the rest is the forward's."""
    problem = problem_of(call_of(64, 8, 2, 128))
    replace = dataclasses.replace
    assert takes(problem)
    assert takes(replace(problem, seqlen_q=16))
    assert takes(replace(problem, heads_q=256, heads_k=1))
    for change in (
        {"seqlen_q": 32},
        {"seqlen_q": 64, "heads_k": 8},
        {"head_dim": 59},
        {"head_dim_v": 100},
        {"aligned": False},
        {"features": frozenset({"dropout"})},
        {"features": frozenset({"backward"})},
    ):
        assert not takes(replace(problem, **change))


BOTH = frozenset({"chunk", "tree"})
# The plans of calls with a chunk, with a tree_mask and with both.
MASKED = [
    masking(plan, features)
    for features in (BOTH, BOTH - {"tree"}, BOTH - {"chunk"})
    for plan in native_decode.all_plans(TARGET, "hip", "gfx942")
]


def is_tight(plan):
    """Whether the plan has few free registers, or much code for each of four products."""
    constants = dict(plan.constants)
    sizes = constants["HEAD_DIM"], constants["TILES"]
    both = "BANDED" in constants and "TREE" in constants
    return both and constants["DTYPE"] == 1 and sizes in ((96, 2), (128, 4))


@pytest.mark.parametrize(
    "plan", turns.cases(MASKED, [plan for plan in MASKED if not is_tight(plan)]), ids=str
)
def test_nothing_spills_beside_masks(plan):
    """A wheel does not have these plans: they are compiled when they are needed."""
    code.build(plan, "gfx942")
