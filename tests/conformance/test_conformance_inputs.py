"""Inputs are the same bytes everywhere, surrounded by NaN; Philox is the published one."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import torch

from pyfa import reference
from pyfa.conformance import grid, grid_axes
from pyfa.conformance.build import build
from pyfa.conformance.cases import LAYOUTS, Case
from pyfa.conformance.inputs import integers, near_normal, permutation, place
from pyfa.problem import FEATURES, features_of

ALL = frozenset(FEATURES)
DTYPES = ("bfloat16", "float16", "float32", "float8_e4m3fn", "float8_e4m3fnuz")


def test_philox_with_7_rounds_is_that_of_random123() -> None:
    """Random123's kat_vectors, the rows of ``philox4x32 7``."""
    pi = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0)
    vectors = (
        ((0,) * 4, (0,) * 2, (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662)),
        (*pi, (0x4DFCCABA, 0x190A87F0, 0xC47362BA, 0xB6B5242A)),
    )
    for counter, key, expected in vectors:
        drawn = reference.philox4x32(np.array(counter, np.uint64), key[0] | key[1] << 32)
        assert tuple(int(x) for x in drawn) == expected


def test_values_are_frozen() -> None:
    values = near_normal("frozen", (3, 5))
    assert values.dtype == torch.float64
    assert hashlib.sha256(values.numpy().tobytes()).hexdigest() == (
        "7d9b43e21a1f7e139122805c57785b1db617e09d3ea74edcb772206906a7254d"
    )
    assert integers("frozen", 6, 1000) == [805, 765, 247, 553, 277, 137]
    assert permutation("frozen", 6) == [5, 3, 4, 0, 1, 2]


@pytest.mark.parametrize(
    ("case", "digest"),
    [
        (Case(), "207e8f995ab5099451ad30ebd234ae86d84358a3c52c5851b351e451c92fab33"),
        (
            Case(kind="varlen", backward=True, dlse="both", dtype="float16", bias="heads",
                 lengths_q=(5, 0, 17), lengths_k=(9, 3, 0), used_q=True, layout="strided"),
            "88fd115a9370b13649e92107eea22d184986eed85644c0db4c387724292081bd",
        ),
        (
            Case(kind="kvcache", dtype="float32", lengths_q=(2, 2), lengths_k=(9, 20), new_keys=2,
                 page_size=4, rotary="halves_part", leftpad=True, sinks=True, causal=True),
            "9be52ee48eb120fd97e7033367282f43c9f3dfa9bc7dfcd915cf5a3237a8ed79",
        ),
    ],
    ids=["dense", "varlen", "kvcache"],
)  # fmt: skip
def test_inputs_of_a_case_are_frozen(case: Case, digest: str) -> None:
    assert build(case).digest() == digest


def test_values_are_nearly_normal() -> None:
    values = near_normal("moments", (100_000,))
    assert float(values.mean()) == pytest.approx(0.0, abs=0.01)
    assert float(values.var()) == pytest.approx(1.0, abs=0.02)
    assert float(values.abs().max()) <= 2 * 3**0.5


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_everything_around_a_tensor_is_nan(layout: str, dtype: torch.dtype) -> None:
    values = near_normal("place", (2, 3, 4, 5))
    placed = place(values, dtype, layout)
    assert torch.equal(placed.view(), values.to(dtype))
    flat = placed.buffer.view(dtype)
    assert int((~flat.isnan()).sum()) == values.numel()
    assert bool(flat[:8].isnan().all())
    assert bool(flat[-1:].isnan().all())
    aligned = placed.offset * dtype.itemsize % 16 == 0
    assert aligned is (layout != "unaligned")
    assert (placed.strides[-1] == 1) is (layout != "gapped")


def test_rows_that_take_no_part_are_nan() -> None:
    case = Case(
        kind="varlen", lengths_q=(3, 4), lengths_k=(5, 6), used_q=True, used_k=True, slack=2
    )
    inputs = build(case)
    for name, rows in (("q", 7), ("k", 11), ("v", 11)):
        kept = ~inputs.placed[name].view().isnan().all(-1).all(-1)
        assert int(kept.sum()) == rows
    cache = Case(kind="kvcache", lengths_q=(1, 1), lengths_k=(9, 3), leftpad=True, page_size=4)
    kept = ~build(cache).placed["k_cache"].view().isnan().all(-1).all(-1)
    assert int(kept.sum()) == 12


@pytest.mark.parametrize("level", grid.LEVELS)
def test_names_are_unique_and_cases_have_meaning(level: str) -> None:
    cases = grid.cases(level, ALL, DTYPES)
    assert len({case.name for case in cases}) == len(cases)
    assert [case.name for case in cases if case.flaws()] == []


def test_levels_have_the_size_they_promise() -> None:
    quick, full = (grid.cases(level, ALL, DTYPES) for level in grid.LEVELS)
    # 162 of them execute the code objects of other head dims, in 57 s, and 88 are for planted
    # faults: see grid_cover.py.
    assert 200 <= len(quick) <= 896
    # A tenth of them is for code objects of which other cases execute little: see grid_objects.py.
    assert 3000 <= len(full) <= 8200
    assert {case.name for case in quick} <= {case.name for case in full}


def test_no_case_chosen_by_hand_falls_away() -> None:
    assert [(case.name, case.flaws()) for case in grid._quick() if case.flaws()] == []


def test_every_feature_has_cases() -> None:
    quick = grid.cases("quick", ALL, DTYPES)
    for name in FEATURES:
        assert sum(name in case.features for case in quick) >= 4, name


def test_features_of_a_case_are_those_of_its_problem() -> None:
    """The grid's idea of what a case needs is the dispatcher's."""
    for case in grid.cases("quick", ALL, ("bfloat16",), max_seqlen=9):
        if case.topk or case.tree:
            # The reference has no lists, and a bias in place of a tree_mask: see
            # tests/test_latent.py and tests/test_tree_mask.py.
            continue
        call = build(case).spec._replace(
            return_lse=bool(case.dlse), deterministic=case.deterministic
        )
        assert features_of(call, case.backward, case.bias_grad) == case.features, case.name


def test_undeclared_features_are_asked_once_each() -> None:
    declared = ALL - {"softcap", "paged", "fp8"}
    cases = grid.cases("quick", declared, ("bfloat16",))
    beyond = [case for case in cases if not case.features <= declared or case.dtype != "bfloat16"]
    names = set().union(*(case.features - declared for case in beyond))
    assert names == {"softcap", "paged", "fp8"}
    assert {case.dtype for case in beyond} >= {"float16", "float32"}
    assert len(beyond) <= 6


def test_max_seqlen_shortens_every_case() -> None:
    cases = grid.cases("full", ALL, DTYPES, max_seqlen=16)
    assert max(max(case.lengths_q + case.lengths_k, default=0) for case in cases) == 16


def test_draws_depend_on_nothing_but_their_name() -> None:
    first = next(grid_axes.draws("windows", 1, {"rows": range(1000), "keys": range(1000)}))
    assert first == {"rows": 656, "keys": 87}
