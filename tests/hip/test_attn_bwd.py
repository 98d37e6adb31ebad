"""Two-pass backward in HIP, run in the emulator: right as it is, caught when it is broken."""

from dataclasses import replace

import pytest
import torch
import turns
from planted import faults_found

import pyfa
from pyfa import codeobject, emulator, mods
from pyfa.backends.common.calls import DTYPE_CODES
from pyfa.backends.hip import backward, code
from pyfa.backends.native.lists import unlisted
from pyfa.conformance import modifiers
from pyfa.conformance.cases import Case
from pyfa.dispatch import prepare
from pyfa.emulator import hazards
from pyfa.problem import Call

# Between them: rows and keys past the edges of tiles, of wavefronts and of workgroups, groups of
# heads, every score term, every way that rows and keys can lie, both score classes.
CASES = {
    "plain": Case(lengths_q=(70,), lengths_k=(270,), heads_q=4, backward=True),
    "128": Case(
        lengths_q=(70,), lengths_k=(150,), heads_q=4, head_dim=128, head_dim_v=128, backward=True,
    ),
    "causal": Case(
        dtype="float16", lengths_q=(161,), lengths_k=(145,), causal=True, backward=True,
    ),
    "causal 96": Case(
        dtype="float16", lengths_q=(161,), lengths_k=(145,), causal=True, backward=True,
        head_dim=96, head_dim_v=96,
    ),
    "window": Case(lengths_q=(140,), lengths_k=(260,), window=(70, 20), backward=True),
    "terms": Case(
        lengths_q=(70,), lengths_k=(150,), softcap=3.0, alibi="batch", bias="hidden", sinks=True,
        dlse="both", backward=True, heads_q=4,
    ),
    "dropout": Case(
        lengths_q=(66,), lengths_k=(130,), dropout_p=0.2, heads_q=4,
        backward=True, deterministic=True,
    ),
    "varlen": Case(
        kind="varlen", dtype="float16", lengths_q=(70, 0, 133), lengths_k=(70, 5, 39),
        used_q=True, used_k=True, slack=3, head_dim=56, head_dim_v=48, heads_q=3, heads_k=1,
        layout="strided", backward=True,
    ),
    "varlen 96": Case(
        kind="varlen", dtype="float16", lengths_q=(70, 0, 133), lengths_k=(70, 5, 39),
        used_q=True, used_k=True, slack=3, head_dim=80, head_dim_v=72, heads_q=3, heads_k=1,
        layout="strided", backward=True,
    ),
    "wide": Case(lengths_q=(33,), lengths_k=(65,), head_dim=192, head_dim_v=128, backward=True),
    "widest": Case(
        lengths_q=(65,), lengths_k=(80,), head_dim=256, head_dim_v=256, window=(20, 3),
        backward=True,
    ),
    # A softcap alone, whose plan is of this width.
    "softcap": Case(
        lengths_q=(65,), lengths_k=(80,), head_dim=256, head_dim_v=256, softcap=3.0,
        window=(20, 3), backward=True,
    ),
    "hidden": Case(dtype="float16", lengths_q=(40,), lengths_k=(70,), bias="hidden", backward=True),
    "nothing": Case(lengths_q=(0,), lengths_k=(40,), backward=True),
    "offset": Case(lengths_q=(70,), lengths_k=(33,), recipe="offset", backward=True),
}  # fmt: skip
CASES = {name: replace(case, deterministic=True) for name, case in CASES.items()}

NIGHT = ("128", "causal 96", "varlen 96", "wide", "widest", "softcap")

# Each: the case that shows it, the exact snippet, what it becomes.
FAULTS = {
    "mask off by one": (
        "causal", "min(seen.high - first, kTile)", "min(seen.high + 1 - first, kTile)",
    ),
    "full tiles misjudged": ("window", "cut = (first - pass.mine.all_low) | ", "cut = "),
    "P of the masked": ("causal", "r += 2) round_two(p_rounded[n][r / 4], s[n], r);", "r += 2);"),
    "tiles at the end skipped": ("plain", "block.high - start + kTile - 1", "block.high - start"),
    "barrier before columns dropped": ("plain", "if (reading == 0) barrier();", ""),
    "barrier before rows dropped": ("plain", "if (reading == kEndP) barrier();", ""),
    "first barrier dropped": ("plain", "barrier();  // the first rows are there", ""),
    "general: barrier before columns dropped": ("terms", "barrier();  // its rows are there", "//"),
    "general: barrier before rows dropped": ("terms", "barrier();  // its columns are there", "//"),
    "rows stored before the barrier": ("plain", "kMoves, kFirstG - kPerSlot,", "kMoves, kFirstP,"),
    "loads before columns are stored": (
        "plain", "turn_of_column(move / 4 * 4 + 3) + 1", "turn_of_column(move / 4 * 4)",
    ),
    "swizzle of rows on one side": (
        "plain", "a = Tiles::RowsA::place(row, part)", "a = Tiles::RowsA::place(row ^ 1, part)",
    ),
    "general: swizzle of rows on one side": (
        "terms",
        "RowTile<dim>::place(row, 2 * i + part)",
        "RowTile<dim>::place(row ^ 1, 2 * i + part)",
    ),
    "units of another step": (
        "plain", "base ^ n % 4 * 2 * kUnitBytes", "base ^ n % 4 * kUnitBytes",
    ),
    "rows in memory's order": (
        "plain",
        "unit = four / 4 * 2 + four % 2, half = four / 2 % 2",
        "unit = four / 2, half = four % 2",
    ),
    "high halves for low ones": (
        "plain", "i % 2 ? 0x07060302 : 0x05040100", "i % 2 ? 0x05040100 : 0x07060302",
    ),
    # In the kernel for heads of 64, clang 22.1 crashes on it.
    "rows beyond the end read": (
        "varlen 96", "bytes_of(pass.a, rows);", "bytes_of(pass.a, kTile);",
    ),
    "owned beyond the end read": (
        "varlen", "(min(rows, kTile) - 1) * m.row_bytes", "(kTile - 1) * m.row_bytes",
    ),
    "columns beyond the width read": ("varlen", "+ (beyond << 29)", ""),
    "heads of a group forgotten": ("plain", "kKeys ? group : 1,\n", "1,\n"),
    "states of the first head": ("plain", "    states = states_of(p, s, head);\n", ""),
    "rows of the first head": ("plain", "a = q_of(p, s, head);", "a = q_of(p, s, head & ~1);"),
    "rows left of the first head": ("plain", "      next.left = c.streamed() - pass.start;\n", ""),
    "general: rows of the first head": ("terms", "    a = q_of(p, s, head);\n", ""),
    "states of the tile before": ("plain", "after, i % kFours);", "first, i % kFours);"),
    "LSE for delta": (
        "offset", "of_lse ? pass.states.minus_lse :", "true ? pass.states.minus_lse :",
    ),
    "delta forgotten": (
        "offset",
        "start_dp[n] = load_states(c, pass.states.minus_delta, at);",
        "start_dp[n] = Acc{0};",
    ),
    "scale forgotten": (
        "plain",
        "          q.scale);\n    store(c, keys_of(q.dv",
        "          1.0f);\n    store(c, keys_of(q.dv",
    ),
    "slope of softcap forgotten": ("terms", "w.p[r] * slope[r]", "w.p[r]"),
    "bias of a neighbor": (
        "terms", "offset[i] = M::row(i) * step + M::column()",
        "offset[i] = M::row(i ^ 1) * step + M::column()",
    ),
    "kept bits of another row": (
        "dropout",
        "of_four<1>(bits) >> lane & first) << 1",
        "of_four<1>(bits) >> lane & first) << 2",
    ),
    "dropped P in dS": (
        "dropout",
        "float g = where(w.keep, r, dp[r] * w.keep_scale);",
        "float g = dp[r] * w.keep_scale;",
    ),
    "softcap alone: slope forgotten where keys are owned": (
        "softcap", "    dp[r] *= cap.slope(t);\n", "",
    ),
    "softcap alone: slope forgotten where rows are owned": (
        "softcap", "      if (kSoftcapAlone) dp[n][r] *= steep[n][r];\n", "",
    ),
    "softcap alone: half of it": (
        "softcap", "out = p.softcap * kLog2E", "out = 0.5f * p.softcap * kLog2E",
    ),
    "softcap alone: tanh of half": (
        "softcap", "2.0f * kLog2E * p.scale / p.softcap", "kLog2E * p.scale / p.softcap",
    ),
    "softcap alone: LSE of another row": (
        "softcap", "cap.weight(t, minus_lse[r]);", "cap.weight(t, minus_lse[r ^ 1]);",
    ),
    "reads ahead: rows of a neighbor": (
        "softcap",
        "RowTile<dim>::place(row, 2 * i + part)",
        "RowTile<dim>::place(row ^ 1, 2 * i + part)",
    ),
    "reads ahead: the first half of the rows again": (
        "softcap", "element, i % kHalves * 2 + part)", "element, part)",
    ),
    "reads ahead: a step late": (
        "softcap", "work(i, x[i]);", "work(i, x[i ? i - 1 : 0]);",
    ),
    "general: reads ahead, a step late": (
        "terms", "work(i, x[i]);", "work(i, x[i ? i - 1 : 0]);",
    ),
    "general: reads ahead, the first half of the rows again": (
        "terms", "element, i % kHalves * 2 + part)", "element, part)",
    ),
    "softcap alone: P before the reciprocal": (
        "softcap", "kStages = kSoftcapAlone ? 2 : 0", "kStages = 0",
    ),
    "sinks of half a row": ("terms", "dots = M::column_sum(dots);", ""),
    "more stored than owned": (
        "varlen",
        "buffer_of(m, first, c.owned() - first);\n    for (int t",
        "buffer_of(m, first, kTile);\n    for (int t",
    ),
}  # fmt: skip

SUM_FAULTS = {
    "sum of half a row": ("128", "bit < lanes", "bit < lanes / 2"),
    "dLSE forgotten": ("terms", "saw ? dlse - sums[i] : 0.0f", "saw ? -sums[i] : 0.0f"),
    "LSE of empty rows": ("hidden", "saw ? -lse * kLog2E : -INFINITY_F", "-lse * kLog2E"),
}


@pytest.mark.parametrize("case", turns.cases(CASES, NIGHT))
def test_sound(case):
    assert not faults_found([CASES[case]])


@pytest.mark.parametrize("fault", turns.faults(FAULTS, NIGHT))
def test_fault_is_caught(fault, plant):
    case, snippet, other = FAULTS[fault]
    plant("hip/attn_bwd.hip", snippet, other)
    assert faults_found([CASES[case]])


@pytest.mark.parametrize("fault", SUM_FAULTS)
def test_fault_in_row_sums_is_caught(fault, plant):
    case, snippet, other = SUM_FAULTS[fault]
    plant("hip/row_sums.hip", snippet, other)
    assert faults_found([CASES[case]])


def test_keys_without_rows_have_zero_gradients():
    q = torch.ones(1, 0, 2, 64, dtype=torch.bfloat16, requires_grad=True)
    k, v = (torch.ones(1, 40, 2, 64, dtype=torch.bfloat16, requires_grad=True) for _ in "kv")
    pyfa.attention(q, k, v, backend="emulator").sum().backward()
    assert not k.grad.any()
    assert not v.grad.any()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    ("pair", "term"),
    [
        ((64, 64), ""),
        ((96, 96), ""),
        ((192, 128), ""),
        ((256, 256), ""),
        ((256, 256), "softcap"),
    ],
    ids=lambda given: given if isinstance(given, str) else f"{given[0]}x{given[1]}",
)
def test_resources(pair, term, dtype):
    """No spill, no scratch, room for every wavefront of the plan, no wait state missing.

    ``code.build`` refuses spills and LDS beyond 64 KB of every plan that is compiled.
    """
    terms = frozenset({term} - {""})
    for plan in backward.plans_of("hip", pair, DTYPE_CODES[dtype], True, True, terms=terms)[1:]:
        assert ("TERM" in dict(plan.constants)) == bool(term)
        data = code.load(plan, "gfx942").data
        kernel = codeobject.parse(data).kernel("attn_bwd")
        assert (kernel.vgpr_spills, kernel.sgpr_spills, kernel.scratch_bytes) == (0, 0, 0)
        assert kernel.vgprs <= 512 // dict(plan.constants)["PER_SIMD"]
        assert kernel.lds_bytes <= 65536
        # Registers are addressed by name, and nothing goes to scratch.
        names = set(emulator.load(data).code.names)
        assert not {name for name in names if name.startswith(("scratch_", "s_set_gpr_idx"))}
        assert hazards.check(data) == []


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    ("dim", "owner", "masked"),
    [(64, backward.KEYS, True), (128, backward.ROWS, True), (128, backward.ROWS, False)],
)
def test_two_workgroups_fit_on_a_compute_unit(dim, owner, masked, dtype):
    """Plans that compute the lane's number again for that."""
    documents = torch.zeros(64, dtype=torch.int32)
    digest = mods.resolve(
        None, lambda b, h, i, j: documents[i] == documents[j], torch.device("cpu")
    )[0]
    plan = backward.plans_of(
        "hip", (dim, dim), DTYPE_CODES[dtype], True, True, mods=digest if masked else ""
    )[1 + owner]
    assert code.load(plan, "gfx942").kernel.vgprs <= 256


@pytest.mark.parametrize("mask", ["tree", "vision", "strided"])
def test_masks_fit_where_registers_are_fewest(mask):
    """Without lists, which spill here."""
    case = Case(lengths_q=(129,), lengths_k=(257,), mask_mod=mask)
    made = modifiers.mods_of(case, torch.device("cpu"))["mask_mod"]
    digest = mods.resolve(None, made, torch.device("cpu"))[0]
    plans = backward.plans_of("hip", (256, 256), DTYPE_CODES["float16"], True, True, mods=digest)
    code.load(unlisted(plans[1]), "gfx942")


def test_at_most_forty_plans_a_pass():
    found = [dict(plan.constants) for plan in backward.all_plans("hip")]
    for owner in (backward.KEYS, backward.ROWS):
        assert sum(constants.get("OWNS") == owner for constants in found) <= 40


@pytest.mark.parametrize(("heads", "rows"), [(1, 70), (2, 70), (1, 1)])
def test_an_lse_that_is_a_slice_of_a_larger_one(heads, rows):
    """The stride of a lone sequence, head or row is nothing to PyTorch."""
    q, k, v, dout = torch.randn(4, 1, rows, heads, 64).to(torch.bfloat16).unbind()
    call = Call(q, k, v, max_seqlen_q=rows, max_seqlen_k=rows, scale=0.125, window_right=0)
    prepared = prepare(call, "emulator", True, False)
    out, lse = prepared.forward(call)
    larger = torch.zeros(1, 5, 70)
    larger[:, 2 : 2 + heads, :: 71 - rows] = lse
    sliced = larger[:, 2 : 2 + heads, :: 71 - rows]
    assert sliced.is_contiguous()
    assert sliced.stride() != lse.stride()
    given, own = (prepared.backward(call, out, x, dout) for x in (sliced, lse))
    assert all(torch.equal(x, y) for x, y in zip(given[:3], own[:3], strict=True))
