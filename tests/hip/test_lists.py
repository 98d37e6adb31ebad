"""HIP kernels that visit by block list, run in the emulator: right as they are, caught when broken,
and the tiles that a mask hides are not computed."""

import logging

import pytest
import torch
import turns
from planted import faults_found

import pyfa
from pyfa import blocks
from pyfa.backends import BACKENDS
from pyfa.backends.hip import backward, forward
from pyfa.backends.native import lists
from pyfa.backends.native.plans import name_of
from pyfa.conformance.cases import Case

DENSE = Case(
    lengths_q=(300,), lengths_k=(330,), heads_q=4, backward=True, mask_mod="patches", sinks=True
)
FORWARD_ONLY = Case(lengths_q=(300,), lengths_k=(330,), heads_q=4, mask_mod="patches")
# Rows of one tile see other keys than those of another.
SLIDING = Case(lengths_q=(300,), lengths_k=(330,), mask_mod="sliding", backward=True)
CASES = {
    "dense": DENSE,
    "packed": Case(
        kind="varlen", dtype="float16", lengths_q=(150, 0, 65), lengths_k=(200, 7, 140),
        causal=True, backward=True, block_mask=64,
    ),
    "parts and pages": Case(
        kind="kvcache", lengths_q=(3,), lengths_k=(513,), page_size=16, heads_q=4,
        mask_mod="patches", num_splits=3,
    ),
    "dropout, and a window": Case(
        lengths_q=(140,), lengths_k=(330,), dropout_p=0.2, window=(120, 30), mask_mod="patches",
    ),
}  # fmt: skip
FORWARD, BACKWARD = forward.KERNEL, backward.KERNEL
# Each: the kernel, the case that shows it, the exact snippet, what it becomes.
FAULTS = {
    "partial taken for full": (FORWARD, FORWARD_ONLY, "{ return entry < 0; }", "{ return true; }"),
    "the list of another head": (FORWARD, FORWARD_ONLY, " + head * counts.stride[1]", ""),
    "the list of another tile": (FORWARD, SLIDING, "counts.stride[1] + tile;",
                                 "counts.stride[1];"),
    "one entry too few": (FORWARD, FORWARD_ONLY, "last > first ? last - first : 0",
                          "last > first ? last - first - 1 : 0"),
    "the sign taken for a number": (FORWARD, FORWARD_ONLY, "return entry & 0x7fffffff;",
                                    "return entry & 0x3fffffff | entry >> 31 & 1;"),
    "values of the tile before": (FORWARD, FORWARD_ONLY, "walk.keys(walk.next, walk.after)",
                                  "walk.keys(walk.now, walk.next)"),
    "a part begins where another does": (FORWARD, CASES["parts and pages"],
                                         "List{list.entries + before,", "List{list.entries,"),
    "hidden in forward alone": (BACKWARD, DENSE, "if (is_full) return;", "return;"),
    "every head by the first one's": (BACKWARD, DENSE, "list_of(p, c.s.batch, head, block)",
                                      "list_of(p, c.s.batch, 0, block)"),
    "rows of another block": (BACKWARD, SLIDING, "int block = c.first / kBlock,",
                              "int block = (c.first + kBlock) / kBlock % 2,"),
}  # fmt: skip


@pytest.mark.parametrize("name", turns.cases(CASES, night=("dropout, and a window",)))
def test_sound(name):
    assert not faults_found([CASES[name]])


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_caught(fault, plant):
    kernel, case, snippet, other = FAULTS[fault]
    plant(kernel, snippet, other)
    assert faults_found([case])


def _products(kernels, **given):
    """Matrix products that each kernel of ``kernels`` ran."""
    torch.manual_seed(0)
    shape = (1, 1024, 1, 64)
    q, k, v = (torch.randn(shape, dtype=torch.bfloat16).requires_grad_() for _ in range(3))
    kernels.clear()
    out = pyfa.attention(q, k, v, backend="emulator", **given)
    grads = torch.autograd.grad(out.float().square().sum(), (q, k, v))
    return (out, *grads), dict(kernels)


@pytest.fixture
def products(monkeypatch):
    found = {}
    runtime = BACKENDS["emulator"].runtime
    real = type(runtime).run

    def run(self, step, kernel, params, tensors):
        real(self, step, kernel, params, tensors)
        name = f"{name_of(step.plan)} {dict(step.plan.constants).get('OWNS', '')}".strip()
        counted = self.counters.mnemonics
        found[name] = sum(n for each, n in counted.items() if each.startswith("v_mfma"))

    monkeypatch.setattr(type(runtime), "run", run)
    return found


def test_a_causal_mask_costs_what_causal_does(products):
    """Both leave out the same tiles, in forward and in both passes of backward."""
    found, by_list = _products(products, mask_mod=lambda b, h, i, j: i >= j)
    causal, by_range = _products(products, causal=True, softcap=1e4, deterministic=True)
    _, whole = _products(products, softcap=1e4, deterministic=True)
    names = ["attn_fwd", "attn_bwd 0", "attn_bwd 1"]
    for name in names:
        assert by_list[name] == by_range[name] < 0.65 * whole[name], name
    for x, y in zip(found, causal, strict=True):
        torch.testing.assert_close(x, y, atol=0.02, rtol=0.02)


def test_a_changed_table_is_seen_by_the_kernels():
    document = torch.arange(256, dtype=torch.int32) // 128
    q = torch.randn(1, 256, 1, 64, dtype=torch.float16)
    for _ in range(3):
        mask_mod = lambda b, h, i, j: document[i] == document[j]  # noqa: E731
        found = pyfa.attention(q, q, q, mask_mod=mask_mod, backend="emulator")
        bias = document[:, None] == document
        expected = pyfa.attention(q, q, q, bias=bias, backend="emulator")
        torch.testing.assert_close(found, expected, atol=0.02, rtol=0.02)
        document[:200] += 1


@pytest.mark.parametrize(
    ("case", "kernels"),
    [(FORWARD_ONLY, 1), pytest.param(DENSE, 3, marks=pytest.mark.night)],
    ids=["forward", "with backward"],
)
def test_without_registers_for_a_list_every_tile_is_visited(
    case, kernels, caplog, without_registers
):
    without_registers("LISTS", 1)
    with caplog.at_level(logging.INFO, "pyfa"):
        assert not faults_found([case])
    assert sum("visits every tile" in each.message for each in caplog.records) == kernels


def test_only_plans_with_a_mask_know_of_lists():
    q = torch.zeros(1, 40, 1, 64, dtype=torch.bfloat16)

    def plan(**given):
        return pyfa.explain(q, q, q, backend="emulator", **given).answers[-1].plan

    masked = plan(mask_mod=lambda b, h, i, j: i >= j)
    assert lists.is_listed(masked)
    for other in (plan(), plan(softcap=3.0), plan(score_mod=lambda s, b, h, i, j: s + i)):
        assert not lists.is_listed(other)
    assert BACKENDS["emulator"].target.list_tiles(masked) == blocks.Tiles(256, 64)
