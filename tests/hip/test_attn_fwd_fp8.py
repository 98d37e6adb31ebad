"""The HIP forward kernel of float8: right as it is, and caught when it is broken."""

import pytest
import turns
from planted import faults_found

from pyfa import codeobject, emulator
from pyfa.backends.hip import code, forward
from pyfa.conformance.cases import Case

FNUZ = forward.FLOAT8
# Tiles of keys are 32 or 64. Between them: every kind of scale, scales that change inside a tile
# and between tiles, more tiles than lanes have scales of, keys that dominate, every way to lie.
CASES = {
    "plain": Case(dtype=FNUZ, lengths_q=(130,), lengths_k=(200,), heads_q=4, heads_k=2),
    "head": Case(dtype=FNUZ, lengths_q=(70, 70), lengths_k=(97, 97), scales="head", causal=True),
    "blocks": Case(dtype=FNUZ, lengths_q=(70,), lengths_k=(300,), scales=64, head_dim=128),
    "many tiles": Case(
        kind="kvcache", dtype=FNUZ, lengths_q=(33,), lengths_k=(4500,), scales=64, num_splits=1,
        recipe="offset",
    ),
    "small blocks": Case(
        dtype=FNUZ, lengths_q=(70,), lengths_k=(150,), scales=16, softcap=3.0, out_dtype="float16"
    ),
    "sink": Case(dtype=FNUZ, lengths_q=(33,), lengths_k=(513,), recipe="sink"),
    "sink of the head": Case(
        dtype=FNUZ, lengths_q=(80,), lengths_k=(513,), recipe="sink", sinks=True
    ),
    "needle": Case(dtype=FNUZ, lengths_q=(33,), lengths_k=(513,), recipe="needle"),
    "growing": Case(dtype=FNUZ, lengths_q=(129,), lengths_k=(193,), recipe="growing"),
    "window": Case(dtype=FNUZ, lengths_q=(140,), lengths_k=(260,), window=(70, 20)),
    "256": Case(dtype=FNUZ, lengths_q=(140,), lengths_k=(260,), window=(70, 20), head_dim=256),
    "192": Case(dtype=FNUZ, lengths_q=(70,), lengths_k=(150,), head_dim=180, scales=32),
    "varlen": Case(
        kind="varlen", dtype=FNUZ, lengths_q=(70, 0, 130), lengths_k=(70, 5, 99), used_q=True,
        used_k=True, slack=3, head_dim=56, head_dim_v=48, heads_q=3, heads_k=1, scales=32,
        layout="strided",
    ),
    "varlen 96": Case(
        kind="varlen", dtype=FNUZ, lengths_q=(70, 0, 130), lengths_k=(70, 5, 99), used_q=True,
        used_k=True, slack=3, head_dim=80, head_dim_v=72, heads_q=3, heads_k=1, scales=32,
        layout="strided",
    ),
    "paged": Case(
        kind="kvcache", dtype=FNUZ, lengths_q=(70, 70), lengths_k=(150, 99), page_size=16,
        leftpad=True, slack=2, causal=True, head_dim=128, scales=16,
    ),
    "split": Case(dtype=FNUZ, lengths_q=(80,), lengths_k=(600,), scales=128, recipe="offset"),
}  # fmt: skip

NIGHT = ("varlen 96", "192", "256")

# Each: the case that shows it, the exact snippet, what it becomes.
FAULTS = {
    "keys from first to last": ("sink", "DTYPE == FLOAT8 ? -1 : 1", "1"),
    "the head's sink first": (
        "sink of the head", "float base = kLowest;", "float base = kFloat8 ? 20.0f : kLowest;",
    ),
    "P not scaled": ("needle", "kPeak = kFloat8 ? 7.0f : 0.0f", "kPeak = 0.0f"),
    "P scaled beyond its format": ("plain", "kPeak = kFloat8 ? 7.0f", "kPeak = kFloat8 ? 8.0f"),
    "P that lags beyond its format": ("growing", "kLag = kFloat8 ? 0.9f", "kLag = kFloat8 ? 8.0f"),
    "P's elements exchanged": ("plain", "c, d, low, true", "d, c, low, true"),
    "row's scale forgotten": ("head", "c.to_base_2[n] *= query_scale", "1.0f * query_scale"),
    "scale of another head": ("head", "+ head * p.k_descale_head", "+ p.k_descale_head"),
    "scale of the first sequence": (
        "head", "stored * p.k_descale_batch", "0 * p.k_descale_batch",
    ),
    "scale of the tile before": ("blocks", "from_any_lane(tiles.k, tile %",
                                 "from_any_lane(tiles.k, (tile + 1) %"),
    "values' scale of the tile before": ("blocks", "from_any_lane(tiles.v, tile %",
                                         "from_any_lane(tiles.v, (tile + 1) %"),
    "accumulator in the old scale": ("blocks", "factor *= scales.v / next.v;", ";"),
    "accumulator rescaled with the maximum only": ("split", " || scales.v != next.v", ""),
    "lanes' scales not looked up again": ("many tiles", "tile % kLanes == 0", "tile == 0"),
    "values' scale forgotten": ("blocks", "if (kFloat8) inverse *= scale;", ""),
    "keys' scales of other keys": ("small blocks", "scales.key, key - first", "scales.key, 0"),
    "row's scale under a softcap": ("small blocks", "terms.inverse *= scale;", ";"),
    "values' scales of other keys": (
        "small blocks", "scales.value, t * MMA +", "scales.value, 0 *",
    ),
    "key's scales where it is not stored": ("varlen", "row = s.key0 + key;", "row = key;"),
    "row's scale where it is not stored": ("varlen", "(s.row0 + row) >>", "row >>"),
    "page's scales confused": ("paged", "row = slot % p.page_size;", "row = slot;"),
    "scales of no page": (
        "paged", "stored = int_at(p.page_table", "stored = 0; int_at(p.page_table",
    ),
    "tile before the first key": ("window", "kTurn < 0 && left > wanted ? 0 : ", ""),
    "V's words exchanged": ("plain", "+ 4 * word(lane)", "+ 4 * (word(lane) ^ 1)"),
    "V's rows exchanged": ("plain", "high, low, 0x05040100);\n        unsigned odd",
                           "high, low, 0x07060302);\n        unsigned odd"),
    "swizzle of half lines on one side": ("plain", "^ (key / 2 & 7)) * 16", ") * 16"),
    "swizzle that four rows do not share": ("plain", "kSize == 1 ? d / 4 ^ turn(d) : line", "line"),
    "turn of the second line on one side": ("plain", "kUnits ^ turn(n)", "kUnits"),
    "read beyond the head": ("varlen", "width(head.head_dim * kSize)", "width(256)"),
    "rows beyond the sequence stored": ("varlen", "if (row >= c.s.rows) continue;", ""),
    "barrier after a tile dropped": (
        "blocks", "  loads_arrived();\n  barrier();\n}", "  loads_arrived();\n}",
    ),
    # Elsewhere a wait of the compiler's own covers it, as yet.
    "keys not awaited": ("plain", "  loads_arrived();\n  barrier();\n}", "  barrier();\n}"),
}  # fmt: skip
PLANS = [
    plan
    for plan in forward.all_plans("hip")
    if dict(plan.constants)["DTYPE"] == forward.FLOAT8_CODE
]


@pytest.mark.parametrize("case", turns.cases(CASES, NIGHT))
def test_sound(case):
    assert not faults_found([CASES[case]])


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_caught(fault, plant):
    case, snippet, other = FAULTS[fault]
    plant(forward.KERNEL, snippet, other)
    assert faults_found([CASES[case]])


@pytest.mark.parametrize("plan", PLANS[1::2], ids=str)
def test_resources(plan):
    """Every plan that leaves bfloat16: registers by name, nothing in memory but what was asked for.
    ``code.build`` refuses spills, scratch and LDS beyond 64 KB."""
    data = code.load(plan, "gfx942").data
    kernel = codeobject.parse(data).kernel("attn_fwd")
    assert kernel.vgprs + kernel.agprs <= 512 // (dict(plan.constants)["WAVES"] // 4)
    names = set(emulator.load(data).code.names)
    assert {"v_cvt_pk_fp8_f32", "v_mfma_f32_32x32x16_fp8_fp8"} <= names
    slow = ("ldexp", "cmpswap", "gpr_idx", "scratch_", "movrel", "unknown")
    assert not [name for name in names if any(part in name for part in slow)]


def test_some_thirty_plans():
    assert len(PLANS) == 30
