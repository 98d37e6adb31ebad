"""The gradient of a bias in HIP, run in the emulator: right as it is, caught when it is broken."""

import itertools
from typing import Any

import pytest
import torch
import turns
from planted import faults_found

import pyfa
from pyfa import codeobject
from pyfa.backends.hip import backward, code
from pyfa.backends.native.tiles.gfx942 import TILES
from pyfa.conformance.cases import Case


def case(bias: str, **fields: Any) -> Case:
    """Rows and keys past the edges of a workgroup's, but for what ``fields`` say."""
    given = {"lengths_q": (70,), "lengths_k": (150,), **fields}
    return Case(bias=bias, bias_grad=True, backward=True, **given)


# Between them: every way that a bias is broadcast, score terms, groups of heads, either backward
# before it, lengths that differ, the three formats.
CASES = {
    "full": case("full", lengths_q=(70, 70), lengths_k=(150, 150), dlse="both"),
    "rows and keys": case("full", lengths_q=(165,), lengths_k=(150,)),
    "heads": case("heads", dtype="float16", lengths_q=(70, 70), lengths_k=(150, 150), heads_q=4,
                  causal=True),
    "keys": case("keys", softcap=5.0, dropout_p=0.2, lengths_q=(65,)),
    "rows": case("rows", lengths_q=(33,), lengths_k=(270,), sinks=True, dlse="both"),
    "one": case("one", sinks=True, softcap=5.0, lengths_k=(130,)),
    "sequences": case("sequences", lengths_q=(40, 40), lengths_k=(40, 40), alibi="heads"),
    "window": case("full", dtype="float16", lengths_q=(150,), lengths_k=(200,), window=(40, 3),
                   heads_q=1, heads_k=1),
    "hidden": case("hidden", dtype="float16", sinks=True, lengths_k=(70,)),
    "varlen": case("heads", kind="varlen", lengths_q=(70, 0, 133), lengths_k=(70, 5, 39),
                   used_q=True, used_k=True, slack=3, head_dim=56, head_dim_v=40, heads_q=3,
                   heads_k=1, layout="strided"),
    "96": case("heads", head_dim=80, head_dim_v=72),
    "128": case("full", dtype="float16", head_dim=128, head_dim_v=128, window=(40, 3)),
    "deterministic": case("heads", lengths_q=(33,), lengths_k=(40,), deterministic=True),
    "256": case("heads", head_dim=256, head_dim_v=256, lengths_q=(33,), lengths_k=(40,),
                deterministic=True),
}  # fmt: skip

# Each: the case that shows it, the exact snippet, what it becomes.
FAULTS = {
    "delta forgotten": ("one", "(g + minus_delta[r]) * w.p[r]", "g * w.p[r]"),
    "P after the score's slope": ("one", "minus_delta[r]) * w.p[r]", "minus_delta[r]) * s[0][r]"),
    "dropout forgotten": (
        "keys", "where(w.keep, r, dp[0][r] * w.keep_scale)", "dp[0][r] * w.keep_scale",
    ),
    "barrier before rows dropped": ("full", "barrier();  // its rows are there", "//"),
    "barrier between heads dropped": ("one", "barrier();  // the tiles of the head", "//"),
    "barrier before sums dropped": ("one", "barrier();  // the last tile has been read", ""),
    "one buffer": ("full", "lds + t % 2 * kBufferBytes", "lds"),
    "heads of a group": (
        "heads", "quotient(head, quotient(p.heads_q, p.heads_k))", "head % p.heads_k",
    ),
    "one head of many": ("keys", "!params_again().bias_head && ++head", "false && ++head"),
    "one sequence of many": ("heads", "!params_again().bias_batch && ++batch", "false && ++batch"),
    "first keys alone": ("rows", "!params_again().bias_key && key", "false && key"),
    "first rows alone": ("keys", "p.bias_row ? min(", "true ? min("),
    "rows that all see": ("window", "max(seen.low - first_row", "max(seen.all_low - first_row"),
    "half of the columns": ("rows", "bit < kTile;", "bit < kTile / 2;"),
    "half of the rows": ("keys", "all = M::column_sum(all);", ""),
    "three wavefronts": ("rows", "i < kWaves; ++i)\n    x +=", "i < kWaves - 1; ++i)\n    x +="),
    "sums of the first rows": ("rows", "(t * kTile + M::row(r)) * 4", "M::row(r) * 4"),
    "other format": (
        "full", "p.bias_type == kBfloat16Bias ? Format", "p.bias_type != kBfloat16Bias ? Format",
    ),
    "rows beyond the end": ("full", "if (row < p.seqlen_q)", ""),
    "keys beyond the end": ("full", "if (key >= p.seqlen_k) return;", ""),
    "another head's place": ("heads", "+ work.head * q.out_head", "+ work.head"),
    "bias alone: delta forgotten": ("full", "dp = ahead.minus_delta", "dp = Acc{0}"),
    "bias alone: mask forgotten": (
        "window", "if (at < mine.all_low ||", "if (at < mine.all_low &&",
    ),
    "bias alone: keys beyond the end seen": (
        "varlen", "if (c.first + kTile > c.s.keys) mine.all_low = 0x7fffffff;", "",
    ),
    "bias alone: of the same rows again": (
        "full", "biases.base += kTile * (long long)biases.step;", "",
    ),
    "bias alone: of a neighboring row": ("full", "M::row(i) * step +", "M::row(i ^ 1) * step +"),
    "bias alone: of rows far away": ("full", "more[j] = j * 8 * step", "more[j] = j * step"),
    "bias alone: states of the rows before": (
        "full", "states_at(states.minus_lse, first)", "states_at(states.minus_lse, first & ~63)",
    ),
    "bias alone: rows of the tile before": (
        "full", "    a.base += kTile * a.row_bytes;\n", "",
    ),
    "bias alone: a product without its P": (
        "full", "r < (product + 1) * M::kRegisters / kProducts; ++r)",
        "r < product * M::kRegisters / kProducts; ++r)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", turns.cases(CASES, night=("96", "128", "256")))
def test_sound(name, kernels_run):
    assert not faults_found([CASES[name]])
    assert "bias_grad" in kernels_run


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_caught(fault, plant):
    name, snippet, other = FAULTS[fault]
    plant(backward.BIAS_GRAD, snippet, other)
    assert faults_found([CASES[name]])


def gradient(bias: torch.Tensor, **more: Any) -> torch.Tensor:
    """Of ``bias``, for queries, keys and values that are always the same."""
    torch.manual_seed(0)
    batch, heads, rows, keys = 2, 2, 40, 70
    q = torch.randn(batch, rows, heads, 64).to(torch.bfloat16)
    k, v = torch.randn(2, batch, keys, heads, 64).to(torch.bfloat16).unbind()
    dout = torch.randn(batch, rows, heads, 64).to(torch.bfloat16)
    leaf = bias.detach().requires_grad_()
    pyfa.attention(q, k, v, bias=leaf, backend="emulator", **more).backward(dout)
    return leaf.grad


def test_what_is_expanded_is_not_broadcast():
    """Its gradient has an element for each of the bias's: autograd does the sum."""
    expanded = torch.randn(1, 2, 40, 1).expand(2, 2, 40, 70)
    found = gradient(expanded)
    assert torch.equal(found, gradient(expanded.contiguous()))
    assert not torch.equal(found[0], found[1])


def test_a_bias_in_another_order():
    bias = torch.randn(70, 40, 2, 2).permute(3, 2, 1, 0)
    assert torch.equal(gradient(bias), gradient(bias.contiguous()))


def test_the_same_bits_on_every_run_and_with_either_backward():
    """What adds dQ by atomics or not has no part in it."""
    bias = torch.randn(1, 1, 1, 70)
    first = gradient(bias)
    assert torch.equal(first, gradient(bias))
    assert torch.equal(first, gradient(bias, deterministic=True))


def test_a_nan_of_one_sequence_stays_out_of_what_it_has_not():
    """Keys beyond a sequence's end belong to others, whose gradient is theirs alone."""
    q, k, v = torch.randn(3, 60, 1, 64).to(torch.bfloat16).unbind()
    q[0] = torch.nan  # of the first sequence, 20 rows and keys
    bias = torch.zeros(1, 40, 40, requires_grad=True)
    offsets = torch.tensor([0, 20, 60], dtype=torch.int32)
    out = pyfa.attention_varlen(
        q.requires_grad_(), k, v, offsets, offsets, 40, 40, bias=bias, backend="emulator"
    )
    out.sum().backward()
    assert bias.grad[0, 0, :20].isnan().all()
    assert not bias.grad[0, 0, 20:].isnan().any()


@pytest.mark.parametrize(
    "pair",
    turns.cases(TILES.two_passes, TILES.two_passes.keys() - {(64, 64)}),
    ids=lambda pair: f"{pair[0]}x{pair[1]}",
)
def test_resources(pair):
    """No spill, no scratch: ``code.build`` refuses both, and any wait state that is missing."""
    for dtype, terms in itertools.product((0, 1), (frozenset(), frozenset({"bias"}))):
        plan = backward.bias_plan("hip", pair, dtype, terms=terms)
        data = code.load(plan, "gfx942").data
        kernel = codeobject.parse(data).kernel("bias_grad")
        assert (kernel.vgpr_spills, kernel.sgpr_spills, kernel.scratch_bytes) == (0, 0, 0)
        assert kernel.lds_bytes == 2 * 32 * sum(pair) * 2
