"""score_mod and mask_mod in HIP, run in the emulator: right as they are, caught when broken."""

import logging
from dataclasses import replace

import pytest
import torch
import turns
from planted import faults_found

import pyfa
from pyfa import mods
from pyfa.backends.hip import backward, code, forward
from pyfa.backends.native.plans import source_of
from pyfa.conformance.cases import Case

CASES = {
    "all terms": Case(
        lengths_q=(40,), lengths_k=(97,), heads_q=4, backward=True, dlse="both", softcap=4.0,
        alibi="heads", bias="full", bias_grad=True, sinks=True, score_mod="relative",
        mask_mod="documents",
    ),
    "packed": Case(
        kind="varlen", dtype="float16", lengths_q=(33, 0, 65), lengths_k=(65, 7, 40), used_q=True,
        used_k=True, slack=3, causal=True, backward=True, score_mod="gated", mask_mod="strided",
    ),
    "pages": Case(
        kind="kvcache", lengths_q=(3, 3), lengths_k=(70, 33), page_size=16, leftpad=True,
        heads_q=4, score_mod="alibi", mask_mod="tree",
    ),
    "dropout": Case(
        lengths_q=(40,), lengths_k=(70,), dropout_p=0.2, score_mod="bounded", mask_mod="natten",
    ),
    "alone": Case(
        lengths_q=(40,), lengths_k=(200,), score_mod="alibi", mask_mod="strided", scale=-0.2,
    ),
    "alone, 256": Case(lengths_q=(40,), lengths_k=(100,), head_dim=256, score_mod="softcap"),
}  # fmt: skip
ALONE = replace(CASES["alone"], mask_mod="", causal=True)
SMALL = Case(lengths_q=(33,), lengths_k=(40,), heads_q=4, score_mod="relative", mask_mod="strided")
DOCUMENTS = Case(lengths_q=(33,), lengths_k=(40,), mask_mod="documents")
FORWARD, BACKWARD = forward.KERNEL, backward.KERNEL
# Each: the kernel, the case that shows it, the exact snippet, what it becomes.
FAULTS = {
    "index not clamped": (FORWARD, DOCUMENTS, "index = index < size ? index : size - 1;", ""),
    "negative index as it is": (FORWARD, SMALL, "index < 0 ? index + size : index;", "index;"),
    "rows for keys": (
        FORWARD, DOCUMENTS, "mod_mask(at.captured, at.b, at.h, row + at.q, key + at.kv)",
        "mod_mask(at.captured, at.b, at.h, key + at.kv, row + at.q)",
    ),
    "a score_mod of scores that are not scaled": (
        FORWARD, ALONE, "each(s, n, 0, [&](float x, int) { return x * scale; });", "",
    ),
    "a score_mod of the largest products": (
        FORWARD, replace(ALONE, recipe="big"), "SCORE == SCORE_MOD || cut", "cut",
    ),
    "a score_mod of half of the scores": (FORWARD, ALONE, "j < kAtOnce; ++j) x[j] = f(",
                                          "j < kAtOnce / 2; ++j) x[j] = f("),
    "scaled twice": (FORWARD, ALONE, "kPlain && SCORE != SCORE_MOD ?", "kPlain ?"),
    "slope of the other sign": (BACKWARD, CASES["packed"], "slope = slope * mine;",
                                "slope = slope * -mine;"),
    "bias of a neighbor": (
        BACKWARD, CASES["all terms"], "kKeys ? place : other);\n",
        "(kKeys ? place : other) ^ 1);\n",
    ),
    "hidden in forward alone": (
        BACKWARD, CASES["packed"], "seen = is_seen(place, kKeys ? at : own, kKeys ? own : at) ?",
        "seen = true ?",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", turns.cases(CASES, night=("dropout", "alone, 256", "packed")))
def test_sound(name):
    assert not faults_found([CASES[name]])


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_caught(fault, plant):
    kernel, case, snippet, other = FAULTS[fault]
    plant(kernel, snippet, other)
    assert faults_found([case])


SLOPES = replace(
    CASES["packed"], lengths_q=(33,), lengths_k=(65,), slack=0, used_q=False, used_k=False,
    score_mod="alibi", mask_mod="",
)  # fmt: skip
FROM_A_BASE = {
    FORWARD: (
        "modified(place, x, row, key0, 0, dk);",
        "modified(place, x, row - 2, key0 - 5, 2, dk + %d);",
    ),
    BACKWARD: (
        "kKeys ? other : own, kKeys ? own : other, kKeys ? step : 0, kKeys ? 0 : step,",
        "(kKeys ? other : own) - 2, (kKeys ? own : other) - 5, (kKeys ? step : 0) + 2,"
        " (kKeys ? 0 : step) + %d,",
    ),
}


@pytest.mark.parametrize("kernel", FROM_A_BASE)
@pytest.mark.parametrize(("key", "wrong"), [(5, False), (6, True)])
def test_scores_from_a_lane_s_first_one(kernel, key, wrong, plant):
    """``steps``: scores do not depend on which one of a lane is the first."""
    snippet, other = FROM_A_BASE[kernel]
    plant(kernel, snippet, other % key)
    assert bool(faults_found([SLOPES])) == wrong


@pytest.mark.parametrize("name", turns.cases(("window", "documents", "ALiBi"), night=("window",)))
def test_a_short_mod_fits_at_head_dim_128(name, nothing_bound):
    """In the first plan that is tried."""
    document, slopes = torch.zeros(300, dtype=torch.int32), torch.ones(2)
    options = {
        "window": {"mask_mod": lambda b, h, i, j: i - j < 5},
        "documents": {"mask_mod": lambda b, h, i, j: document[i] == document[j]},
        "ALiBi": {"score_mod": lambda s, b, h, i, j: s + slopes[h] * (j - i)},
    }[name]
    q = torch.zeros(1, 300, 2, 128, dtype=torch.bfloat16)
    plan = pyfa.explain(q, q, q, backend="emulator", **options).answers[-1].plan
    assert plan is not None
    code.load(replace(plan, backend="hip", notes=()), "gfx942")


def test_without_registers_for_its_own_plan_a_score_mod_has_the_general_one(
    caplog, without_registers
):
    without_registers("SCORE", forward.SCORE_MOD)
    with caplog.at_level(logging.INFO, "pyfa"):
        assert not faults_found([ALONE])
    assert sum("has a general plan" in each.message for each in caplog.records) == 1


def test_a_plan_is_that_of_its_mods():
    """The digest is in the plan, the functions are in its source; other plans know of neither."""
    q = torch.zeros(1, 40, 1, 64, dtype=torch.bfloat16)

    def plan(**given):
        found = pyfa.explain(q, q, q, backend="emulator", **given).answers[-1].plan
        assert found is not None
        return found

    plain = plan(softcap=3.0)
    masked = [
        plan(mask_mod=lambda b, h, i, j: i - j < 5), plan(mask_mod=lambda b, h, i, j: i - j < 6),
    ]  # fmt: skip
    assert len({plain, *masked}) == 3
    texts = [source_of(each) for each in (plain, *masked)]
    assert "mod_mask" not in texts[0].replace("HAS_MASK_MOD", "")
    assert len(set(texts)) == 3


def test_a_new_tensor_is_not_compiled_again(monkeypatch):
    def attend(length, table):
        q = torch.ones(1, length, 1, 64, dtype=torch.bfloat16)
        mask_mod = lambda b, h, i, j: table[i] == table[j]  # noqa: E731
        return pyfa.attention(q, q, q, backend="emulator", mask_mod=mask_mod, return_lse=True)[1]

    def refuse(*given):
        raise AssertionError("again")

    attend(40, torch.arange(40, dtype=torch.int32) // 9)
    monkeypatch.setattr(code, "build", refuse)
    monkeypatch.setattr(mods, "trace", refuse)
    table = torch.arange(70, dtype=torch.int32) // 11
    lse = attend(70, table)
    expected = (table == table[:, None]).sum(-1).log() + 8.0  # equal scores
    torch.testing.assert_close(lse[0, 0], expected.float())


def test_float8_is_declined():
    q = torch.zeros(1, 40, 1, 64).to(torch.float8_e4m3fnuz)
    answers = pyfa.explain(q, q, q, mask_mod=lambda b, h, i, j: i >= j).answers
    reasons = next(answer.reasons for answer in answers if answer.backend == "emulator")
    assert "score_mod and mask_mod with float8 are not implemented" in reasons
