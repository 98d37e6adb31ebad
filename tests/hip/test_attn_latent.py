"""Latent attention of many lines: 128 a workgroup, which asks for each byte of the cache once."""

import pytest
import torch
from planted import faults_found
from test_attn_decode import Recording

from pyfa import codeobject
from pyfa.backends.hip import code, latent
from pyfa.backends.hip.launcher import Launcher
from pyfa.backends.hip.runtime_emulator import faults
from pyfa.backends.hip.target import TARGET
from pyfa.backends.native import decode
from pyfa.conformance import cases, grid_latent
from pyfa.conformance.grid_axes import HALF
from pyfa.device import DEVICES
from pyfa.problem import Call, problem_of, tensors_of


def packed(lengths_q, lengths_k, **fields):
    dims = {"head_dim": 576, "head_dim_v": 512, "heads_q": 128, "heads_k": 1, "scale": 192**-0.5}
    return cases.packed((lengths_q, lengths_k), "latent", **dims | fields)


# Sequences of less than a tile and of several rounds of slots and addresses, without keys, pages,
# lists, lines beyond the last, scores that grow.
CASES = (
    packed((1, 1), (150, 0), num_splits=1, slack=3),
    packed((2,), (90,), heads_q=61, page_size=5, causal=True, sinks=True, num_splits=3),
    packed((1,), (100,), topk=70, recipe="offset"),
    packed((1,), (140,), dtype="float16", recipe="growing", num_splits=1),
    packed((1, 1), (1, 33), recipe="huge"),
)
# Of the quick level, those that the kernel takes by its number of lines.
QUICK = [
    case for case in grid_latent.quick()
    if case.dtype in HALF and not case.cache_dtype and case.head_dim == 576
    and max(case.lengths_q) * case.heads_q > 80
]  # fmt: skip
FAULTS = {
    "units read where they were not written": (
        "turned(tile + places.value, swizzle(i))", "tile + places.value"),
    "units of another key": ("places.from ^ swizzle(i * kWaves) * 16", "places.from"),
    "the rest of the first key": ("(int)tile + kValues - kValueBytes + key * kRestBytes",
                                  "(int)tile + kValues - kValueBytes"),
    "values of the next tile": ("Lds tile = slot(at);", "Lds tile = slot(after);"),
    "scores of this tile again": ("scores(score, slot(after),", "scores(score, slot(at),"),
    "no slot is freed": ("    last = free;\n", ""),
    "keys not awaited": ("    loaded();\n    barrier();\n    Lds tile",
                         "    barrier();\n    Lds tile"),
    "no barrier in the loop": ("    loaded();\n    barrier();\n    Lds tile",
                               "    loaded();\n    Lds tile"),
    "keys beyond the last seen": (" || key + r >= b.stop", ""),
    "rows see later keys": ("distance + r > right", "false"),
    "addresses of the tiles before": ("if (n % 4 == 0) finder.advance(n);",
                                      "if (n == 0) finder.advance(n);"),
    "pages of the tiles before": ("look(n + 4);", "look(n);"),
    "products of the wrong P": ("add_product(state.o[t][c * 8 + e], a, w[t]);",
                                "add_product(state.o[t][c * 8 + e], a, w[0]);"),
    "output not scaled": ("scale(state.o[t][e], change);", "scale(state.o[t][e], 1.0f);"),
    "sum not scaled": ("state.total[t] *= change;", ""),
    "P not scaled": ("now[t] = scaled(now[t], change);", ""),
    "maxima of a part of the keys": ("M::column_max(highest[t])", "highest[t]"),
    "sink in every split": ("p.use_sinks && part == 0", "p.use_sinks"),
    "lines of the first tile": ("(wave_index() * TILES + t) * 16 + M::column();",
                                "wave_index() * TILES * 16 + M::column();"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_sound(case, kernels_run):
    assert not case.flaws()
    assert not faults_found([case])
    assert kernels_run[0] == "attn_latent"


def test_the_quick_level_runs_it_in_every_dtype(kernels_run):
    assert {case.dtype for case in QUICK} == set(HALF)
    assert not faults_found(QUICK)
    assert kernels_run.count("attn_latent") == len(QUICK)


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_caught(fault, plant):
    plant(latent.KERNEL, *FAULTS[fault])
    assert faults_found(CASES)
    assert faults_found(QUICK)


def test_products_too_soon_after_their_operands_are_found(plant):
    """The compiler counts no wait states around inline assembly; results do not show them here."""
    (plan, _) = latent.all_plans("hip")
    assert faults(code.load(plan, "gfx942").data) == []
    plant(latent.KERNEL, "      pin(operand);\n", "")
    assert faults(code.load(plan, "gfx942").data)


def problem(heads=128, rows=1, dim=576, dtype=torch.bfloat16):
    q = torch.zeros(1, rows, heads, dim, dtype=torch.bfloat16)
    k = torch.zeros(1, 4096, 1, dim, dtype=dtype)
    call = Call(q, k, k[..., :512], max_seqlen_q=rows, max_seqlen_k=4096, latent=True)
    return problem_of(call, False, False, DEVICES["MI300X"], True), call


@pytest.mark.parametrize("plan", latent.all_plans("hip"), ids=str)
def test_resources(plan):
    data = code.load(plan, "gfx942").data
    kernel = codeobject.parse(data).kernel("attn_latent")
    assert (kernel.vgpr_spills, kernel.sgpr_spills, kernel.scratch_bytes) == (0, 0, 0)
    assert kernel.vgprs <= 512
    assert kernel.lds_bytes == 55296
    assert faults(data) == []


def test_each_byte_is_asked_for_once_a_workgroup():
    wanted, call = problem()
    plan = decode.plan(TARGET, "hip", wanted)
    runtime = Recording()
    call = call._replace(num_splits=1)
    decode.bind(Launcher(runtime), plan, call)(*tensors_of(call))
    name, _, counters = runtime.launches[0]
    assert name == "attn_latent"
    once = 4096 * 576 * 2
    assert once <= counters.load_bytes <= 1.04 * once
    assert counters.lds_conflict_clocks == 0


@pytest.mark.parametrize(
    ("fields", "taken"),
    [
        ({"heads": 128}, True),
        ({"heads": 64}, False),
        ({"heads": 64, "rows": 2}, True),
        ({"heads": 16, "rows": 6}, True),
        ({"heads": 16, "rows": 5}, False),
        ({"heads": 16, "rows": 9}, False),
        ({"dim": 568}, False),
        ({"dtype": torch.float8_e4m3fnuz}, False),
    ],
)
def test_taken_where_it_is_faster(fields, taken):
    assert latent.takes(problem(**fields)[0]) == taken


@pytest.mark.parametrize(("blocks", "keys"), [(1, 64), (16, 65536), (128, 8192), (1000, 8192)])
def test_splits_of_least_time(blocks, keys):
    def time(parts):
        share = -(-tiles // parts)
        rounds = -(-blocks * -(-tiles // share) // 304)
        return rounds * (6 + share) + (2.5 + 0.064 * blocks * parts if parts > 1 else 0)

    tiles = -(-keys // 16)
    chosen = latent.splits_for(blocks, keys, 304)
    assert time(chosen) == min(time(parts) for parts in range(1, max(2, min(512, tiles // 4) + 1)))
