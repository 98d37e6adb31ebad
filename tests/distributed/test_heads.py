"""Ulysses on 1 to 4 processes, and rings of groups that share the heads: what one process gives."""

import dataclasses

import pytest
import whole

from pyfa.conformance import Case

pytestmark = pytest.mark.xdist_group("distributed")

CASES = {
    "causal": {"causal": True},
    "bf16": {"dtype": "bfloat16", "causal": True},
    "uneven": {"lengths": (77, 77), "window": (20, 3)},
    "cross": {"lengths_q": (40, 40), "lengths_k": (72, 72), "causal": True},
    "gqa": {"heads_q": 24, "causal": True},
    "one key head": {"heads_k": 1, "causal": True},
    "terms": {"alibi": "batch", "softcap": 3.0, "causal": True},
    "sinks, dlse": {"sinks": True, "dlse": "both", "window": (20, 20)},
    "dropout": {"dropout_p": 0.4, "causal": True},
    "dropout bits": {"dropout_p": 0.4, "recipe": "identity", "head_dim_v": 64, "backward": False},
    "packed": {"kind": "varlen", "lengths": (64, 33, 0, 12), "causal": True, "dropout_p": 0.2},
    "packed bf16": {"kind": "varlen", "lengths": (60, 33), "dtype": "bfloat16", "sinks": True},
}


def case(name: str) -> Case:
    return whole.case_of(
        CASES[name],
        lengths=(64, 64),
        dtype="float32",
        heads_q=12,
        heads_k=12,
        head_dim=16,
        head_dim_v=16,
    )


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("way", [("ulysses", 3), ("mesh", 2, 2)], ids=str)
def test_ranks_together_give_what_one_gives(pool, way, name):
    # All four make the mesh; those outside it have nothing to do with it.
    assert pool.run(4, whole.examined, case(name), *way)[0] == []


@pytest.mark.parametrize("name", ["uneven", "dropout", "packed"])
@pytest.mark.parametrize("way", [("ulysses", 2), ("mesh", 1, 4), ("mesh", 2, 1)], ids=str)
def test_other_shapes_of_the_mesh(pool, way, name):
    assert pool.run(4, whole.examined, case(name), *way)[0] == []


def test_fewer_key_heads_than_ranks_are_sent_to_several(pool):
    few = dataclasses.replace(case("causal"), heads_q=8, heads_k=2)
    assert pool.run(4, whole.examined, few, "ulysses", 4)[0] == []


def test_one_rank(pool):
    assert pool.run(4, whole.examined, case("sinks, dlse"), "ulysses", 1)[0] == []
