"""Bits, transfers, seeds, modes of PyTorch, and cutting and putting together."""

import pytest
import scenarios
import turns

pytestmark = pytest.mark.xdist_group("distributed")


@pytest.mark.parametrize("kind", ["ring", "ulysses"])
@pytest.mark.parametrize("options", [{"causal": True}, {"dropout_p": 0.5, "seed": 3}], ids=str)
def test_every_run_gives_the_same_bits(pool, kind, options):
    first = pool.run(3, scenarios.attend, 3, options, True, kind)
    for _ in range(3):
        assert pool.run(3, scenarios.attend, 3, options, True, kind) == first


# Of 3 · 2 tensors of (2, 16, 6, 8) that the other three ranks hold.
RECEIVED = {
    "all": ({}, [6] * 4),
    # Half of what earlier ranks hold, all of what later ones do.
    "causal": ({"causal": True}, [6, 5, 4, 3]),
    "contiguous": ({"causal": True, "sharding": "contiguous"}, [0, 2, 4, 6]),
    "window": ({"causal": True, "sharding": "contiguous", "window": (9, 0)}, [0, 2, 2, 2]),
    "itself": ({"sharding": "contiguous", "window": (0, 0)}, [0] * 4),
}


@pytest.mark.parametrize("name", RECEIVED)
def test_only_keys_that_are_seen_are_sent(pool, name):
    options, expected = RECEIVED[name]
    found = pool.run(4, scenarios.elements_received, 4, options)
    assert [count / (2 * 16 * 6 * 8) for count in found] == expected


def test_without_a_seed_the_first_rank_draws(pool):
    assert max(pool.run(3, scenarios.drawn_seed, 3)) < 1e-5


def test_modes_of_pytorch(pool):
    for errors in pool.run(2, scenarios.modes, 2):
        assert errors == dict.fromkeys(errors, 0.0)


@pytest.mark.parametrize("size", turns.cases((1, 2), night=(2,)))
def test_torch_compile(pool, size):
    """On two ranks each takes half a minute to trace its steps."""
    assert pool.run(size, scenarios.compiled, size) == [0.0] * size


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("sharding", ["zigzag", "contiguous"])
def test_there_and_back(pool, sharding, packed):
    for size, length in ((1, 9), (2, 32), (3, 61), (4, 3), (4, 128)):
        found = pool.run(size, scenarios.there_and_back, size, sharding, length, packed)
        assert found == [(True,) * 3] * size
