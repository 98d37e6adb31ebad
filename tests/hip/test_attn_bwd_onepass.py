"""One-pass backward in HIP, run in the emulator: right as it is, caught when it is broken."""

from __future__ import annotations

import pytest
import torch
import turns
from planted import faults_found
from test_traffic import Counting

from pyfa import codeobject
from pyfa.backends.base import Saved
from pyfa.backends.common import calls
from pyfa.backends.common.program import Step
from pyfa.backends.hip import backward, code
from pyfa.backends.hip.launcher import Launcher
from pyfa.backends.hip.target import TARGET
from pyfa.backends.native import backward as native_backward
from pyfa.backends.native.tiling import kernels_of
from pyfa.conformance.cases import Case
from pyfa.device import DEVICES
from pyfa.dispatch import prepare
from pyfa.emulator import hazards
from pyfa.problem import Call, Problem, tensors_of
from pyfa.sizes import value_at
from pyfa.traffic import Shape
from pyfa.traffic.requested import requested_of

# Between them: rows and keys past the edges of steps, of wavefronts and of workgroups, groups of
# heads, masks, gradients of the LSE, every way that rows and keys can lie, every tile; every score
# term. Heads of 64 and bfloat16 where any would do: those of 64 compile in a third of the time of
# 128, and each plan once.
CASES = {
    "plain": Case(lengths_q=(70,), lengths_k=(270,), heads_q=4, backward=True),
    "128": Case(
        lengths_q=(70,), lengths_k=(270,), heads_q=4, head_dim=128, head_dim_v=128, backward=True
    ),
    "causal": Case(lengths_q=(161,), lengths_k=(145,), causal=True, backward=True),
    "causal, float16": Case(
        dtype="float16", lengths_q=(161,), lengths_k=(145,), causal=True, backward=True,
    ),
    "window": Case(lengths_q=(140,), lengths_k=(260,), window=(70, 20), backward=True),
    "window 128": Case(
        lengths_q=(140,), lengths_k=(260,), window=(70, 20), dlse="both", head_dim=128,
        head_dim_v=128, backward=True,
    ),
    "192 and 128": Case(
        lengths_q=(70,), lengths_k=(150,), heads_q=4, heads_k=1, head_dim=192, head_dim_v=128,
        causal=True, backward=True,
    ),
    "192": Case(
        dtype="float16", lengths_q=(70,), lengths_k=(150,), heads_q=4, head_dim=184,
        head_dim_v=192, backward=True,
    ),
    "varlen": Case(
        kind="varlen", lengths_q=(70, 0, 133), lengths_k=(70, 5, 39), used_q=True, used_k=True,
        slack=3, head_dim=56, head_dim_v=48, heads_q=3, heads_k=1, layout="strided",
        backward=True,
    ),
    "varlen 96": Case(
        kind="varlen", lengths_q=(70, 0, 133), lengths_k=(70, 5, 39), used_q=True, used_k=True,
        slack=3, head_dim=80, head_dim_v=72, heads_q=3, heads_k=1, layout="strided",
        backward=True,
    ),
    "float16": Case(
        dtype="float16", lengths_q=(50,), lengths_k=(33,), head_dim=128, head_dim_v=120,
        backward=True,
    ),
    "nothing": Case(lengths_q=(0,), lengths_k=(40,), backward=True),
    "offset": Case(lengths_q=(70,), lengths_k=(33,), recipe="offset", backward=True),
    "terms": Case(
        lengths_q=(70,), lengths_k=(150,), softcap=3.0, alibi="batch", bias="hidden", sinks=True,
        heads_q=4, dlse="both", backward=True,
    ),
    "window, terms": Case(
        lengths_q=(140,), lengths_k=(260,), window=(70, 20), softcap=3.0, sinks=True,
        backward=True,
    ),
    "bool": Case(lengths_q=(70,), lengths_k=(150,), bias="bool", backward=True),
    "float16 bias": Case(
        dtype="float16", lengths_q=(40,), lengths_k=(70,), bias="hidden", backward=True
    ),
    "bool, softcap": Case(
        lengths_q=(70,), lengths_k=(150,), bias="bool", softcap=3.0, backward=True
    ),
    "float16 bias, softcap": Case(
        dtype="float16", lengths_q=(40,), lengths_k=(70,), bias="hidden", softcap=3.0,
        backward=True,
    ),
    "sinks": Case(
        lengths_q=(70,), lengths_k=(150,), heads_q=4, sinks=True, dlse="both", backward=True
    ),
    "sinks, causal": Case(
        lengths_q=(161,), lengths_k=(145,), causal=True, heads_q=6, heads_k=2, sinks=True,
        backward=True,
    ),
    "alibi": Case(
        lengths_q=(140,), lengths_k=(260,), window=(70, 20), alibi="batch", heads_q=4,
        backward=True,
    ),
    "softcap": Case(
        lengths_q=(140,), lengths_k=(260,), window=(70, 20), softcap=3.0, backward=True
    ),
    "sinks 128": Case(
        dtype="float16", lengths_q=(40,), lengths_k=(200,), head_dim=128, head_dim_v=128,
        sinks=True, dlse="both", backward=True,
    ),
    "varlen, sinks": Case(
        kind="varlen", lengths_q=(70, 0, 133), lengths_k=(70, 5, 39), used_q=True, used_k=True,
        slack=3, heads_q=6, heads_k=2, layout="strided", sinks=True, backward=True,
    ),
    "dropout": Case(
        lengths_q=(66,), lengths_k=(130,), dropout_p=0.2, heads_q=4, sinks=True, recipe="offset",
        backward=True,
    ),
    "alibi 192": Case(
        dtype="float16", lengths_q=(70,), lengths_k=(150,), head_dim=192, head_dim_v=184,
        window=(50, 20), alibi="heads", heads_q=4, heads_k=2, backward=True,
    ),
    "softcap 96": Case(
        lengths_q=(70,), lengths_k=(270,), head_dim=96, head_dim_v=88, softcap=3.0, causal=True,
        heads_q=4, heads_k=2, backward=True,
    ),
    "dropout alone": Case(
        lengths_q=(140,), lengths_k=(260,), window=(70, 20), dropout_p=0.2, heads_q=6, heads_k=2,
        recipe="offset", dlse="both", backward=True,
    ),
    "dropout alone 128": Case(
        dtype="float16", lengths_q=(70,), lengths_k=(200,), head_dim=128, head_dim_v=120,
        dropout_p=0.5, backward=True,
    ),
    "varlen, dropout": Case(
        kind="varlen", lengths_q=(70, 0, 133), lengths_k=(70, 5, 39), used_q=True, used_k=True,
        slack=3, heads_q=6, heads_k=2, layout="strided", dropout_p=0.1, backward=True,
    ),
    "bias alone": Case(
        lengths_q=(140,), lengths_k=(260,), window=(70, 20), bias="full", heads_q=6, heads_k=2,
        dlse="both", backward=True,
    ),
    "bias alone 128": Case(
        dtype="float16", lengths_q=(70,), lengths_k=(200,), head_dim=128, head_dim_v=120,
        bias="hidden", causal=True, backward=True,
    ),
    "varlen, float32 bias": Case(
        kind="varlen", lengths_q=(70, 0, 133), lengths_k=(70, 5, 39), used_q=True, used_k=True,
        slack=3, heads_q=6, heads_k=2, layout="strided", bias="heads", backward=True,
    ),
    "bias of keys": Case(
        lengths_q=(33,), lengths_k=(290,), bias="keys", heads_q=4, heads_k=2, backward=True
    ),
    "varlen, terms": Case(
        kind="varlen", lengths_q=(70, 0, 133), lengths_k=(70, 5, 39), used_q=True, used_k=True,
        slack=3, heads_q=6, heads_k=2, layout="strided", sinks=True, alibi="heads", bias="heads",
        dropout_p=0.1, backward=True,
    ),
    "terms 128": Case(
        dtype="float16", lengths_q=(40,), lengths_k=(200,), head_dim=128, head_dim_v=128,
        causal=True, softcap=3.0, alibi="heads", bias="full", sinks=True, dropout_p=0.1,
        backward=True,
    ),
}  # fmt: skip

NIGHT = (
    "192 and 128", "192", "causal, float16", "varlen 96", "float16", "terms 128", "sinks 128",
    "dropout alone 128", "alibi 192", "softcap 96", "bias alone 128", "float16 bias",
)  # fmt: skip

# Each: the case that shows it, the exact snippet, what it becomes.
FAULTS = {
    "an addition lost": (
        "plain",
        "if (m == kDeal.added[i]) add(",
        "if (i && m == kDeal.added[i]) add(",
    ),
    "additions of the last step lost": (
        "plain",
        "i < 4 * kShares; ++i) add(at, walk, scored.dq, i);",
        "i < 0; ++i) add(at, walk, scored.dq, i);",
    ),
    "additions before there is a dQ": (
        "plain", "walk.sums_bytes = 0;", "walk.sums_bytes = kSumRows * HEAD_DIM * 4;",
    ),
    "additions a step further": ("plain", "    walk.sums -= walk.sums_step;\n", ""),
    "additions to the first head": (
        "plain", "if (++added_head < group_end) seek_sums(c);", "++added_head;",
    ),
    "barrier of a turn dropped": ("plain", "if (m == kAtBarrier) barrier();", ""),
    "barrier before the loop dropped": (
        "plain", "lds.turn_rows();\n    barrier();", "lds.turn_rows();",
    ),
    "barrier behind the first loads dropped": (
        "plain", "    barrier();\n    Places at;", "    Places at;",
    ),
    "mask off by one": (
        "window", "min(seen.high - first, kStepRows)", "min(seen.high + 1 - first, kStepRows)",
    ),
    "mask of the first step forgotten": (
        "causal",
        "unsigned seen = seen_bits(c, c.own(n), first);\n    for",
        "unsigned seen = ~0u;\n    for",
    ),
    "cut steps misjudged": ("window", "(walk.row - c.mine.all_low) | ", ""),
    "steps at the end skipped": (
        "plain", "block.high - start + kStepRows - 1", "block.high - start",
    ),
    "columns without their swizzle on one side": (
        "plain", "columns = (part * 16 + (row ^ (row >> 3 & 1)))", "columns = (part * 16 + row)",
    ),
    "rows of a neighbor": (
        "plain", "rows_q = RowsQ::Tile::place(row, part, 0);",
        "rows_q = RowsQ::Tile::place(row ^ 1, part, 0);",
    ),
    "fours of rows not shifted on one side": (
        "window", "swap = Swap::Tile::place(row, part, 0);",
        "swap = Swap::Tile::place(row, part, 0) - row / 4 * Swap::Tile::kShift;",
    ),
    "dS of a neighboring key": ("plain", "+ row % 4 * 4;", "+ (row % 4 ^ 1) * 4;"),
    "dS of a neighboring row": (
        "plain",
        "*(LdsHalves)to = (unsigned short)two;",
        "*(LdsHalves)to = (unsigned short)(two >> 16);",
    ),
    "odd tiles of two wavefronts in one place": (
        "128", " + Swap::half(wave_index(), TILES - 1) * 2;", ";",
    ),
    "K's elements of the other product": (
        "plain", "+ t) % 2 ? 0x07060302 : 0x05040100;", "+ t) % 2 ? 0x05040100 : 0x07060302;",
    ),
    "high halves for low ones": (
        "plain", "half ? 0x07060302 : 0x05040100", "half ? 0x05040100 : 0x07060302",
    ),
    "columns overwritten while they are read": (
        "plain",
        "columns_stored = kLate ? all_columns - columns_stored : columns_next();",
        "columns_stored = columns;",
    ),
    "dS overwritten while it is read": (
        "plain", "swap_next = all_swaps - swap_next;", "swap_next = swap;",
    ),
    "rows beyond the end read": (
        "varlen", "step_bytes(rows, piece[n].row_bytes", "step_bytes(kStepRows, piece[n].row_bytes",
    ),
    "columns beyond the width read": ("varlen", "+ (beyond << 29)", ""),
    "heads of a group forgotten": ("plain", "walk.turns = group * steps;", "walk.turns = steps;"),
    "columns of the step before again": ("plain", "lds.turn_columns();", ""),
    "states of the last head": (
        "plain", "states_of(p, s, fed_head)", "states_of(p, s, group_end - 1)",
    ),
    "delta forgotten": (
        "offset",
        "v.minus_delta = read_four(lds.rows + at.state + kStepRows * 4);",
        "v.minus_delta = Acc{0};",
    ),
    "scale forgotten": ("plain", "grad.k, q.scale);", "grad.k, 1.0f);"),
    "more stored than owned": (
        "varlen",
        "auto to = step_buffer(m, first, c.s.keys - first);",
        "auto to = step_buffer(m, first, kStepRows);",
    ),
}  # fmt: skip

# The same with score terms, sinks and dropout.
FAULTS |= {
    "slope of softcap forgotten": (
        "terms", "x[r] = dp[n][r] * derivative[n][r]", "x[r] = dp[n][r]",
    ),
    "softcap of an unscaled score": (
        "terms", "? p.scale / p.softcap : p.scale;", "? 1.0f / p.softcap : p.scale;",
    ),
    "ALiBi of another row": ("terms", "place + n * 16 - r - row", "place + n * 16 - row"),
    "ALiBi of the first head": ("terms", "      general.seek(c.sequence(), head);\n", ""),
    "bias of a neighboring row": (
        "terms", "n * 16 * key_step + r * row_step", "n * 16 * key_step + (r ^ 1) * row_step",
    ),
    "bias of the same rows again": (
        "terms", "general.load_bias(c.sequence(), walk.head, walk.row)",
        "general.load_bias(c.sequence(), walk.head, walk.start)",
    ),
    "boolean bias taken for its contrary": (
        "bool, softcap", "bits ? 0.0f : -INFINITY_F", "bits ? -INFINITY_F : 0.0f",
    ),
    "float16 taken for bfloat16": (
        "float16 bias, softcap", "add_bias<kFloat16Bias, 2>(s)", "add_bias<kBfloat16Bias, 2>(s)",
    ),
    "mask with score terms forgotten": (
        "window, terms", "if (v.cut >= 0) return;", "return;",
    ),
    "delta with score terms forgotten": (
        "dropout", "(dp[n][r] + minus_delta[r]) * s", "dp[n][r] * s",
    ),
    "dropped P in dS": (
        "dropout", "where(kept[n], r, dp[n][r] * keep_scale)", "dp[n][r] * keep_scale",
    ),
    "dropout's scale forgotten in dS": (
        "dropout", "where(kept[n], r, dp[n][r] * keep_scale)", "where(kept[n], r, dp[n][r])",
    ),
    "dropout's scale forgotten in dV": (
        "dropout", "where(kept[n], r, s[n][r] * keep_scale)", "where(kept[n], r, s[n][r])",
    ),
    "kept bits of another row": (
        "dropout", "of_four<1>(bits) >> lane & first) << 1",
        "of_four<1>(bits) >> lane & first) << 2",
    ),
    "draws of the same head again": (
        "dropout", "M::column()), mine, head)", "M::column()), mine, 0)",
    ),
    "sinks of half of the lanes": (
        "terms", "bit < kLanes; bit *= 2) all", "bit < 32; bit *= 2) all",
    ),
    "sinks weighed by a neighboring row": (
        "terms", "sinks.weight(again[r])", "sinks.weight(again[r ^ 1])",
    ),
    "sinks' sum of the steps before again": ("terms", "      sinks.sum = 0.0f;\n", ""),
    "columns of the step after": ("192", "(j - 4 + (late ? 2 : 0)) % 3", "(j - 4) % 3"),
}  # fmt: skip

# The same with one term alone.
_SUM = "if (kSinksAlone) general.sinks.sum +="
_FAR = "__builtin_fabsf(distance + (float)(n * 16 - r))"
FAULTS |= {
    "sinks of the last head alone": (
        "sinks, causal", "if (kSinksAlone) general.sinks.add(", "if (0) general.sinks.add(",
    ),
    "sinks of the first step forgotten": ("sinks", _SUM, _SUM.replace("kSinksAlone", "0")),
    "sinks of a head added to the next": ("sinks, causal", "    sum = 0.0f;\n", ""),
    "the next head's sink": (
        "sinks, causal", "    look_up(head);\n    sum", "    look_up(head ^ 1);\n    sum",
    ),
    "sinks weighed by the row before": (
        "sinks", "sinks.weight(v.minus_lse[r])", "sinks.weight(v.minus_lse[r & 2])",
    ),
    "sinks of keys that are not there": (
        "varlen, sinks", "|| first_key >= s.keys) return;", ") return;",
    ),
    "ALiBi alone: one side": ("alibi", _FAR, "(distance + (float)(n * 16 - r))"),
    "ALiBi alone: of another row": ("alibi", _FAR, _FAR.replace(" - r", "")),
    "ALiBi alone: of the step before": (
        "alibi", "distance_of(walk.row)", "distance_of(walk.row - 16)",
    ),
    "ALiBi alone: first step": ("alibi", "general.distance_of(first)", "0.0f"),
    "softcap alone: slope forgotten": ("softcap", "if (kSoftcapAlone) x *= v.steep[n][j];", ""),
    "softcap alone: slope of the first step forgotten": (
        "softcap", "scored.p[n][r] * slope;", "scored.p[n][r];",
    ),
    "softcap alone: half of it": ("softcap", "(x, -2.0f * general.cap_out", "(x, -general.cap_out"),
    "softcap alone: LSE of another row": (
        "softcap", "v.highest[r] = v.minus_lse[r]", "v.highest[r] = v.minus_lse[r ^ 1]",
    ),
    "bias alone: of a neighboring row": (
        "bias alone", "= general.lines.load(n, 3 - r)", "= general.lines.load(n, (3 - r) ^ 1)",
    ),
    "bias alone: of the same step again": (
        "bias alone", "if (m == kAtLines + part) general.lines.go_on(part);", "",
    ),
    "bias alone: of the same head again": (
        "bias alone", "min(lined_head + 1, group_end - 1)", "lined_head",
    ),
    "bias alone: heads do not end": (
        "bias alone", "if (__builtin_expect(--lined != 0, 1)) return;", "return;",
    ),
    "bias alone: first step forgotten": (
        "bias alone", "      if (kBiasAlone) x = general.biased(n, r, minus_lse[r]);\n", "",
    ),
    "bias alone: of the first tile": (
        "bias alone", "offset[r] + n * 16 * kBiasSize", "offset[r]",
    ),
    "bias alone: rows beyond the end read": (
        "bias alone", "bytes = rows * row_step - beyond", "bytes = 16 * row_step - beyond",
    ),
    "bias alone: keys beyond the end read": (
        "bias alone", "keys = max(keys, 0);", "keys = tiles * 16;",
    ),
    "bias alone: in units of the natural logarithm": (
        "bias alone", "bias[n][r]), kLog2E, minus_lse)", "bias[n][r]), 1.0f, minus_lse)",
    ),
    "bias alone: boolean taken for its contrary": (
        "bool", "bias[n][r] ? minus_lse : -INFINITY_F", "bias[n][r] ? -INFINITY_F : minus_lse",
    ),
    "bias alone: float32 by half of its bits": (
        "varlen, float32 bias", "kBiasSize = TERM == 6 ? 4", "kBiasSize = TERM == 6 ? 2",
    ),
    "dropout alone: draws of the same head again": (
        "dropout alone", "wide_product(kPhiloxB, head + dropout.head_start)",
        "wide_product(kPhiloxB, dropout.head_start)",
    ),
    "dropout alone: draws of the first sequence": (
        "varlen, dropout", "high_of(x) ^ dropout.batch ^ key_b", "high_of(x) ^ key_b",
    ),
    "dropout alone: draws of the step before": (
        "dropout alone", "begin(general.draws, walk.row)", "begin(general.draws, walk.row - 16)",
    ),
    "dropout alone: draws of the first tile": (
        "dropout alone", "dropout.group_of(key + n * 16)", "dropout.group_of(key)",
    ),
    "dropout alone: a round's key again": (
        "dropout alone", "c1 ^ keys.a[round]", "c1 ^ keys.a[round / 2]",
    ),
    "dropout alone: a round's word lost": (
        "dropout alone", "c3 = (unsigned)last;", "c3 = 0;",
    ),
    "dropout alone: two words exchanged": (
        "dropout alone", "compare(c0, (unsigned)y, c2, (unsigned)x, keys",
        "compare(c0, (unsigned)y, (unsigned)x, c2, keys",
    ),
    "dropout alone: kept of a neighboring key": (
        "dropout alone", "key = lane_index() % 4;", "key = lane_index() % 4 ^ 1;",
    ),
    "dropout alone: kept of another row": (
        "dropout alone", "of_four<2>(kept) :", "of_four<3>(kept) :",
    ),
    "dropout alone: delta unscaled": (
        "dropout alone", "v.minus_delta[r] * general.keep", "v.minus_delta[r]",
    ),
    "dropout alone: P unscaled": (
        "dropout alone", "v.minus_lse[r] + general.log_scale", "v.minus_lse[r]",
    ),
    "dropout alone: dropped P in dV": (
        "dropout alone", "        p = either(v.mask[n][r], p, 0.0f);\n", "",
    ),
    "dropout alone: dropped P in dS": (
        "dropout alone", "either(v.mask[n][r], v.dp[n][r], v.minus_delta[r]) * p", "v.dp[n][r] * p",
    ),
    "dropout alone: first step": (
        "dropout alone", "either(bits_of(kept[n], r), dp[n][r], minus_delta[r])", "dp[n][r]",
    ),
}  # fmt: skip

# Of the kernels around it.
OTHER_FAULTS = {
    "dQ without its scale": ("dq_convert", "two[0] * p.scale", "two[0]"),
    "elements of a neighbor": ("dq_convert", "two[4 * kLanes]", "two[kLanes]"),
    "rows that are not there": ("dq_convert", "if (row >= s.rows) return;", ""),
    "sinks' sums left as they are": (
        "dq_convert",
        "if (p.dsinks && !M::part()) store_sink_share(p, s, head, row);",
        "",
    ),
    "sums that do not begin with 0": ("row_sums", "sums[i] = Quad{0, 0, 0, 0};", ";"),
}


@pytest.mark.parametrize("case", turns.cases(CASES, NIGHT))
def test_sound(case):
    assert not faults_found([CASES[case]])


@pytest.mark.parametrize("fault", turns.faults(FAULTS, (*NIGHT, "128")))
def test_fault_is_caught(fault, plant):
    case, snippet, other = FAULTS[fault]
    plant(backward.ONE_PASS, snippet, other)
    assert faults_found([CASES[case]])


@pytest.mark.parametrize("fault", OTHER_FAULTS)
def test_fault_around_it_is_caught(fault, plant):
    kernel, snippet, other = OTHER_FAULTS[fault]
    plant(f"hip/{kernel}.hip", snippet, other)
    assert faults_found([CASES["varlen, terms"]])


@pytest.mark.parametrize(
    "pair",
    turns.cases([(64, 64), (96, 96), (128, 128), (192, 192)], night=[(96, 96), (192, 192)]),
    ids=lambda pair: f"{pair[0]}",
)
@pytest.mark.parametrize(
    "terms", [(), ("softcap", "bias"), *((term,) for term in backward.TERMS)], ids="-".join
)
def test_resources(pair, terms):
    """No spill, no scratch, LDS for a workgroup on a compute unit, no wait state missing.

    ``code.build`` refuses spills and LDS beyond 64 KB of every plan that is compiled.
    """
    plan = backward.plans_of("hip", pair, 1, bool(terms), False, terms=frozenset(terms))[1]
    data = code.load(plan, "gfx942").data
    kernel = codeobject.parse(data).kernel("attn_bwd_onepass")
    assert (kernel.vgpr_spills, kernel.sgpr_spills, kernel.scratch_bytes) == (0, 0, 0)
    assert kernel.vgprs <= 512
    assert kernel.lds_bytes <= 65536
    assert hazards.check(data) == []


def problem(*features: str, head_dim: int = 128) -> Problem:
    return Problem(
        1, 512, 512, 2, 2, head_dim, head_dim, "bfloat16", frozenset({"backward", *features}),
        DEVICES["MI300X"], False,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("asked", "kernel", "why"),
    [
        (problem(), backward.ONE_PASS, "in one pass"),
        (problem("deterministic"), backward.KERNEL, "deterministic"),
        (problem("softcap"), backward.ONE_PASS, "in one pass"),
        (problem(head_dim=192), backward.ONE_PASS, "in one pass"),
        (problem(head_dim=256), backward.KERNEL, "64 KB"),
    ],
    ids=["plain", "deterministic", "softcap", "192", "256"],
)
def test_which_one_runs_is_said(asked: Problem, kernel: str, why: str) -> None:
    from pyfa.backends import BACKENDS

    (note,) = [x for x in BACKENDS["hip"].plan(asked).notes if "backward" in x]
    assert why in note
    pair = (asked.head_dim, asked.head_dim_v)
    general = "softcap" in asked.features
    chain = backward.plans_of("hip", pair, 1, general, "deterministic" in asked.features)
    assert chain[1].kernel == kernel


def sums_of(call: Call) -> int:
    """Of dQ in float32, all heads and rows that have any."""
    launch, pair = Launcher(CountingEach()), (call.q.shape[-1], call.v.shape[-1])
    chain = backward.plans_of("hip", pair, 1, False, False)
    (size,), *_ = native_backward.sums_of(launch, call, chain)["dq_accum"]
    return value_at(size, (call.q.shape[0], call.k.shape[0]))


class CountingEach(Counting):
    """Keeps the stores of each kernel, by its name."""

    def __init__(self) -> None:
        super().__init__()
        self.stored: dict[str, int] = {}

    def run(self, step: Step, *rest) -> None:
        before = self.stores
        super().run(step, *rest)
        self.stored[step.plan.kernel] = self.stores - before


@pytest.mark.parametrize(
    "shape",
    [
        Shape(1, 64, 400, 1, 1, 128, 128),
        Shape(2, 48, 200, 4, 2, 64, 64),
        Shape(1, 320, 320, 2, 1, 128, 128, window_right=0),
        Shape(1, 320, 320, 1, 1, 64, 64, window_left=50, window_right=10),
        pytest.param(
            Shape(1, 320, 320, 1, 1, 96, 96, window_left=50, window_right=10),
            marks=pytest.mark.night,
        ),
    ],
    ids=["whole", "groups", "causal", "window", "window 96"],
)
def test_the_emulator_counts_what_was_computed(shape: Shape) -> None:
    """Bytes that are added to dQ, and those of dK and dV, to the byte; so is the workspace."""

    def zeros(length: int, heads: int) -> torch.Tensor:
        return torch.zeros(shape.batch, length, heads, shape.head_dim, dtype=torch.bfloat16)

    q, k, out = (
        zeros(shape.seqlen_q, shape.heads_q), zeros(shape.seqlen_k, shape.heads_k),
        zeros(shape.seqlen_q, shape.heads_q),
    )  # fmt: skip
    call = Call(
        q, k, k.clone(), max_seqlen_q=shape.seqlen_q, max_seqlen_k=shape.seqlen_k,
        window_left=shape.window_left, window_right=shape.window_right,
    )  # fmt: skip
    runtime, lse, dout = CountingEach(), torch.zeros(call.lse_shape()), torch.zeros_like(out)
    run = native_backward.bind(Launcher(runtime), Saved(call, out, lse, dout))
    run(dout, out, lse, *tensors_of(call))
    asked = Problem(
        shape.batch, shape.seqlen_q, shape.seqlen_k, shape.heads_q, shape.heads_k, shape.head_dim,
        shape.head_dim_v, "bfloat16", frozenset({"backward"}), DEVICES["MI300X"], False,
    )  # fmt: skip
    from pyfa.backends import BACKENDS

    plan = BACKENDS["hip"].plan(asked)
    (kernel,) = [x for x in kernels_of(TARGET, plan, asked, shape, False) if x.role == "gradients"]
    _, writes = requested_of(shape, kernel)
    assert runtime.stored[backward.ONE_PASS] == sum(writes.values())
    sums = sums_of(call) * 4
    states = 2 * 4 * shape.batch_heads * shape.seqlen_q
    assert runtime.stored["hip/row_sums.hip"] == sums + states
    assert runtime.stored["hip/dq_convert.hip"] == q.numel() * 2


def test_packed_rows_begin_at_a_tile_of_their_own() -> None:
    """The same gradients whatever lies before a sequence, but for the order of additions."""
    q, k, dout = torch.randn(3, 120, 1, 64).to(torch.bfloat16).unbind()
    rows = torch.tensor([0, 37, 120], dtype=torch.int32)
    call = Call(
        q, k, k, max_seqlen_q=83, max_seqlen_k=83, scale=0.125, cu_seqlens_q=rows, cu_seqlens_k=rows
    )
    assert sums_of(call) == (120 // 16 + 2) * 16 * 64
    prepared = prepare(call, "emulator", True, False)
    out, lse = prepared.forward(call)
    packed = prepared.backward(call, out, lse, dout)
    alone = Call(
        q[None, 37:], k[None, 37:], k[None, 37:], max_seqlen_q=83, max_seqlen_k=83, scale=0.125
    )
    other = prepare(alone, "emulator", True, False)
    out, lse = other.forward(alone)
    single = other.backward(alone, out, lse, dout[None, 37:])
    assert torch.equal(packed.dq[37:], single.dq[0])
    assert torch.equal(packed.dk[37:], single.dk[0])


@pytest.mark.parametrize("apart", [40, calls.MAX_ROW_STRIDE])
def test_a_bias_whose_rows_are_too_far_apart_is_copied(apart: int) -> None:
    """Offsets inside a tile are 32-bit."""
    q = torch.zeros(1, 3, 1, 64, dtype=torch.bfloat16)
    k = torch.zeros(1, 40, 1, 64, dtype=torch.bfloat16)
    whole = torch.zeros(2 * apart + 40, dtype=torch.bool)
    bias = whole.as_strided((1, 1, 3, 40), (0, 0, apart, 1))
    bias[...] = torch.rand(3, 40) < 0.5
    call = Call(q, k, k, max_seqlen_q=3, max_seqlen_k=40, bias=bias)
    lse = torch.zeros(call.lse_shape())
    found = native_backward._readable(Saved(call, q, lse, q), bias_grad=False).call.bias
    assert found is not None
    assert (found is bias) == (apart == 40)
    assert torch.equal(found, bias)
    assert max(found.stride()[-2:]) == 40
