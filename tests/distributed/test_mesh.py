"""DTensors: what the ranks of a mesh give together is what one process gives."""

from __future__ import annotations

import mesh_cases
import pytest

pytestmark = pytest.mark.xdist_group("distributed")

TERMS: dict[str, tuple[str, ...]] = {
    "plain": (),
    "of sequences": ("sinks", "bias", "alibi_slopes"),
    "of heads": ("bias of heads", "alibi of heads"),
}
BATCH, HEADS, ALL = "placed S(0)", "placed S(2)", "placed R"


@pytest.mark.parametrize("terms", TERMS)
@pytest.mark.parametrize("placed", mesh_cases.PLACEMENTS)
def test_dtensors(pool, placed, terms):
    ranks = 2 ** len(mesh_cases.PLACEMENTS[placed])
    expected = {
        "batch": BATCH,
        "heads": HEADS,
        "batch, heads": "placed S(0), S(2)",
        "heads, heads": "placed S(2), S(2)",
    }.get(placed, ALL)
    found = pool.run(4, mesh_cases.differing, placed, 2, 8, 4, TERMS[terms], False)
    assert found == [[expected]] * ranks + [[]] * (4 - ranks)


@pytest.mark.parametrize("placed", ["batch", "heads"])
def test_plain_tensors_beside_dtensors_are_replicated(pool, placed):
    expected = BATCH if placed == "batch" else HEADS
    found = pool.run(4, mesh_cases.differing, placed, 2, 4, 2, TERMS["of sequences"], True)
    assert found == [[expected]] * 2 + [[]] * 2


@pytest.mark.parametrize(
    ("batch", "heads", "heads_k", "placed", "expected"),
    [
        (3, 4, 4, "batch", BATCH),  # two sequences and one
        (2, 4, 1, "heads", HEADS),  # one key head, whole on each rank
        (2, 6, 3, "heads", ALL),  # half of a group on each rank: not split
        (1, 4, 2, "batch", ALL),
    ],
    ids=str,
)
def test_uneven_shares(pool, batch, heads, heads_k, placed, expected):
    found = pool.run(4, mesh_cases.differing, placed, batch, heads, heads_k, ("sinks",), False)
    assert found == [[expected]] * 2 + [[]] * 2


@pytest.mark.parametrize("term", ["dropout", "mod"])
def test_what_counts_heads_and_sequences_of_the_whole_is_not_split(pool, term):
    found = pool.run(4, mesh_cases.differing, "heads", 2, 4, 2, (term,), False)
    assert found == [[ALL]] * 2 + [[]] * 2


@pytest.mark.parametrize(("placed", "expected"), [("heads", "S(1)"), ("rows", "R")])
def test_packed(pool, placed, expected):
    assert pool.run(4, mesh_cases.packed, placed) == [["True", expected]] * 2 + [[]] * 2


@pytest.mark.parametrize(("placed", "expected"), [("heads", "S(2)"), ("batch", "S(0)")])
def test_pages(pool, placed, expected):
    assert pool.run(4, mesh_cases.decode, placed) == [["True", expected]] * 2 + [[]] * 2
