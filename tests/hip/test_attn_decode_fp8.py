"""The HIP decode kernel over float8 keys and values: right as it is, caught when it is broken."""

import math

import pytest
import torch
import turns
from planted import faults_found

from pyfa import api, codeobject, emulator
from pyfa.backends.hip import code, decode
from pyfa.backends.hip.target import TARGET
from pyfa.backends.native import decode as native_decode
from pyfa.conformance.cases import Case
from pyfa.problem import FEATURES

FNUZ = "float8_e4m3fnuz"


def cache(lengths_q, lengths_k, **fields):
    dim = fields.get("head_dim", 64)
    return Case(
        **{
            "kind": "kvcache", "lengths_q": lengths_q, "lengths_k": lengths_k, "head_dim_v": dim,
            "cache_dtype": "" if fields.get("dtype") == FNUZ else FNUZ, "num_splits": 1,
        }
        | fields
    )  # fmt: skip


# All but the last few on one plan (bfloat16, 64, 16 lines): rounds of the main loop of 8 stages and
# what is left of them, every kind of scale, and every place where one can lie.
CASES = {
    "head": cache((1, 1), (1300, 515), heads_q=4, scales="head"),
    "blocks": cache((1, 1), (1300, 577), slack=3, batch_idx=True, scales=16, recipe="offset"),
    "pages": cache((3, 3), (130, 61), page_size=16, leftpad=True, slack=3, causal=True, scales=16),
    "queries": cache((2, 2), (90, 90), dtype=FNUZ, scales="head", softcap=3.0, bias="full"),
    "no scales": cache((1, 1), (90, 9), sinks=True, alibi="batch", num_splits=2),
    "narrow": cache((2, 2), (90, 90), head_dim=40, head_dim_v=24, window=(70, 3), scales=32),
    "rows": cache((33,), (130,), dtype="float16", heads_q=4, causal=True, scales=64),
    "96": cache((1,), (260,), head_dim=80, head_dim_v=96, heads_q=8, scales=32, used_k=True),
    "192": cache((2,), (150,), dtype="float16", head_dim=192, head_dim_v=128, heads_q=8, scales=16),
    "256": cache((1,), (260,), dtype=FNUZ, head_dim=256, heads_q=4, out_dtype="float16", scales=16),
}

NIGHT = ("rows", "192", "256")

# Each: the case that shows it, the exact snippet, what it becomes.
FAULTS = {
    "keys' scales forgotten": ("head", "factors.k * lines.scale[t]", "lines.scale[t]"),
    "row's scale forgotten": ("queries", "factors.k * lines.scale[t]", "factors.k"),
    "values' scales forgotten": ("blocks", "if (kFloat8) w *= factors.v;", ""),
    "unit forgotten": ("head", "if (kFloat8) own *= state.unit;", ""),
    "accumulator in the old unit": ("blocks", "state.o[t][e] *= change;", ";"),
    "scales of the next round": (
        "blocks", "begin_round();\n      write();", "write();\n      begin_round();",
    ),
    "scales of the first round": (
        "blocks", "  }\n  begin_round();\n", "  }\n",
    ),
    "scales of another group": ("blocks", "int at = n * kGroup + M::part() * 4;",
                                "int at = M::part() * 4;"),
    "scales of another four": ("pages", "n * kGroup + M::part() * 4;", "n * kGroup;"),
    "scales of 64 keys only": ("blocks", "f(1, lane_index() + kLanes);", ";"),
    "scale of the first block": ("blocks", "place.row >> p.k_block_log2", "0"),
    "scales of no page": ("pages", "s.batch : p.page_table ? place.page : s.key_batch",
                          "s.batch : s.key_batch"),
    "scale of another sequence": ("head", "descale_type == 1 ? s.batch", "descale_type == 1 ? 0"),
    "scale of another head": ("head", "+ head * p.k_descale_head", "+ 0"),
    "K's halves exchanged": ("head", "a = two_of(group.k[i], false), b = two_of(group.k[i], true)",
                             "b = two_of(group.k[i], false), a = two_of(group.k[i], true)"),
    "V's neighbors exchanged": ("head", "e / 2 % 2)[e % 2]", "e / 2 % 2)[1 - e % 2]"),
    "V's pairs exchanged": ("head", "group.v[i][e / 4], e / 2 % 2)",
                            "group.v[i][e / 4], e / 2 % 2 == 0)"),
    "queries as over 16 bits": ("head", "return kFloat8 && c < kPaired ?", "return false ?"),
    "last elements dropped": ("96", "if (kHalfPieces)", "if (false)"),
    "read beyond the head": ("narrow", "source.head_dim / (bytes / kSize) - 1", "1 << 20"),
}  # fmt: skip
PLANS = [
    plan
    for plan in native_decode.all_plans(TARGET, "hip", "gfx942")
    if "KEY_DTYPE" in dict(plan.constants)
]


@pytest.mark.parametrize("case", turns.cases(CASES, NIGHT))
def test_sound(case):
    assert not CASES[case].flaws()
    assert not faults_found([CASES[case]])


@pytest.mark.parametrize("fault", turns.faults(FAULTS, NIGHT))
def test_fault_is_caught(fault, plant):
    case, snippet, other = FAULTS[fault]
    plant(decode.KERNEL, snippet, other)
    assert faults_found([CASES[case]])


def small_scales():
    """P is 1 and 1/3: times a scale of 2^-19 float16 would have 11 and not 10.67 units of 2^-24."""
    q, k, v = (torch.zeros(1, rows, 1, 64) for rows in (1, 16, 16))
    q[..., 0] = k[0, 0, 0, 0] = 1.0
    v[0, 1:] = 192.0
    k, v = (x.to(getattr(torch, FNUZ)) for x in (k, v))
    found = api.attention_kvcache(
        q.half(), k, v, scale=math.log(3), backend="emulator",
        descale=(None, torch.ones(1, 1), torch.full((1, 1), 2.0**-19)),
    )  # fmt: skip
    return found.float() * 2**19


def test_small_scales_keep_the_bits_of_p():
    assert (small_scales() - 160.0).abs().max() < 0.1


def test_lost_bits_of_p_are_found(plant):
    plant(decode.KERNEL, "|| !any_lane(largest * 64.0f > state.unit)", "")
    assert (small_scales() - 160.0).abs().max() > 2.0


@pytest.mark.parametrize("plan", PLANS[1::4], ids=str)
def test_resources(plan):
    """The occupancy that is asked for. ``code.build`` refuses spills and scratch."""
    data = code.load(plan, "gfx942").data
    kernel = codeobject.parse(data).kernel("attn_decode")
    occupancy = dict(plan.constants)["OCCUPANCY"]
    assert (kernel.vgprs + 7) // 8 * 8 <= 512 // occupancy
    assert kernel.lds_bytes * occupancy <= 65536
    names = set(emulator.load(data).code.names)
    assert any(name.startswith("v_cvt_pk_f32_fp8") for name in names)
    assert not {name for name in names if name.startswith(("flat_", "scratch_"))}


def test_what_it_takes():
    """A plan for each 16-bit one, those of latent attention among them, and no feature less."""
    assert len(PLANS) == 32
    assert {"fp8"} == decode.FEATURES - native_decode.FEATURES <= set(FEATURES)
