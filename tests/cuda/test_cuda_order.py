"""The order of work tiles: inverses divide exactly, and each block finds a work tile of its own."""

import random

import pytest

from pyfa import abi
from pyfa.backends.cuda import backward, forward_sm90, plans
from pyfa.backends.native.plans import plan_with, values_of


def divide(x: int, inverse: int) -> int:
    """``divide`` of kernels/cuda/order.h, in its 32-bit halves."""
    low = x * (inverse & 0xFFFFFFFF) >> 32
    high = x * (inverse >> 32)
    assert low < 2**64
    assert high + low < 2**64
    return high + low >> 32 if inverse else x


def place(members: dict[str, int], number: int, tiles: int, pairs: int) -> tuple[int, int]:
    """``place_in_section``: a tile of a head, and the number of the head and sequence."""
    first = divide(number, members["section_tiles_inverse"]) * members["section"]
    heads, at = min(members["section"], pairs - first), number - first * tiles
    full = heads == members["section"]
    tile = divide(at, members["section_inverse" if full else "last_section_inverse"])
    return tile, first + at - tile * heads


@pytest.mark.parametrize("divisor", [1, 2, 3, 5, 7, 8, 127, 128, 132, 641, 65537, 2**30, 2**31 - 1])
def test_an_inverse_divides_exactly(divisor: int) -> None:
    inverse = abi.inverse_of(divisor)
    assert 0 <= inverse < 2**64
    numbers = {0, 1, divisor - 1, divisor, divisor + 1, 2**31 - 1}
    numbers |= {n * divisor + d for n in range(40) for d in (-1, 0)}
    numbers |= {(2**31 - 1) // divisor * divisor + d for d in (-1, 0)}
    numbers |= {random.Random(divisor).randrange(2**31) for _ in range(2000)}
    for x in numbers:
        if 0 <= x < 2**31:
            assert divide(x, inverse) == x // divisor, (x, divisor)


def members_of(**given: int) -> dict[str, int]:
    named = {"window_left": -1, "window_right": -1, "num_splits": 1, "head_dim": 64}
    return {**named, "head_dim_v": 64, **given}


def test_every_block_of_a_forward_finds_its_own_work_tile() -> None:
    draw = random.Random(0)
    plan = next(iter(forward_sm90.all_plans()))
    for _ in range(60):
        group, heads_k, batch = draw.choice((1, 2, 3, 8)), draw.randint(1, 9), draw.randint(1, 7)
        splits, tiles = draw.choice((1, 1, 2, 5)), draw.randint(1, 9)
        given = members_of(
            heads_q=heads_k * group, heads_k=heads_k, batch=batch, num_splits=splits,
            seqlen_q=tiles * 128, seqlen_k=draw.choice((1, 300, 30_000, 10_000_000)),
        )  # fmt: skip
        heads = heads_k if "PACKED" in values_of(plan) else heads_k * group
        found = plans.order_of(plan, given, tiles * heads * batch)
        pairs = heads * batch
        places = [
            place(found, n, tiles * splits, pairs) for n in range(tiles * splits * heads * batch)
        ]
        assert sorted(places) == [(t, h) for t in range(tiles * splits) for h in range(pairs)]
        # The heads of a section have 16 to 32 MB of K and V, whole groups, and run side by side.
        side = found["section"]
        assert side == pairs or side % (heads // heads_k) == 0
        assert [head for _, head in places[:side]] == list(range(side))
        assert found["group"] == group
        assert divide(7 * group, found["group_inverse"]) == 7


def test_sections_of_a_forward_are_equal() -> None:
    def together(heads_q: int, heads_k: int, keys: int, dims: tuple[int, int], batch: int) -> int:
        plan = next(iter(forward_sm90.all_plans()))
        given = members_of(
            heads_q=heads_q, heads_k=heads_k, batch=batch, seqlen_q=keys, seqlen_k=keys,
            head_dim=dims[0], head_dim_v=dims[1],
        )  # fmt: skip
        return plans.order_of(plan, given, heads_q * batch)["section"]

    # 16 MB hold 26,214 keys of head_dim 192/128 with their values: 3 heads of 8,192, 25 of 1,024.
    assert together(16, 16, 8192, (192, 128), 1) == 4
    assert together(128, 128, 8192, (192, 128), 1) == 4
    assert together(16, 16, 4096, (192, 128), 4) == 8
    assert together(16, 16, 1024, (192, 128), 16) == 32
    assert together(32, 8, 8192, (192, 128), 2) == 4 * 4  # whole groups
    assert together(13, 13, 8192, (192, 128), 1) == 5  # the last one has 3
    assert together(16, 16, 8192, (128, 128), 1) == 4  # that many fit
    assert together(2, 2, 8192, (192, 128), 1) == 2  # all of them
    assert together(100, 100, 1, (64, 64), 1000) == 65536


def test_every_block_of_a_backward_finds_its_own_keys() -> None:
    draw = random.Random(1)
    for turn in range(60):
        plain = backward.sm90_plans_of((64, 64), 1, bool(turn % 2))[1]
        batch, heads_k, blocks = draw.randint(1, 9), draw.randint(1, 9), draw.randint(1, 9)
        masked = draw.random() < 0.6
        given = members_of(
            heads_q=heads_k * draw.choice((1, 4)), heads_k=heads_k, batch=batch,
            seqlen_q=draw.choice((100, 1024, 5000, 100_000)), seqlen_k=blocks * 128,
            window_right=0 if masked else -1,
        )  # fmt: skip
        found = plans.order_of(plain, given, blocks * heads_k * batch)
        pairs = heads_k * batch
        places = [place(found, n, blocks, pairs) for n in range(blocks * pairs)]
        assert sorted(places) == [(b, h) for b in range(blocks) for h in range(pairs)]
        if not masked and not turn % 2:
            assert found["section"] == 1  # heads one by one
        assert [head for _, head in places[: found["section"]]] == list(range(found["section"]))


def test_heads_run_together_as_their_rows_fit_the_l2() -> None:
    def together(
        heads_q: int, rows: int, in_turn: bool, masked: bool = True, batch: int = 8
    ) -> int:
        plan = backward.sm90_plans_of((128, 128), 1, in_turn)[1]
        given = members_of(
            heads_q=heads_q, heads_k=8, batch=batch, seqlen_q=rows, seqlen_k=rows,
            window_right=0 if masked else -1,
        )  # fmt: skip
        return plans.heads_together(plan, given)

    # Of a row of head_dim 128, q, dout and dq_accum take 1 KB: 24 MB hold 24,576 rows.
    assert together(8, 1024, False) == 4
    assert together(8, 8192, False) == 4
    assert together(8, 16384, False) == 1
    assert together(64, 1024, False) == 16
    assert together(64, 16384, False) == 2
    assert together(64, 1024, False, masked=False) == 1
    assert together(8, 1024, True, masked=False) == 16
    assert together(8, 8192, True, masked=False) == 4
    # Equal sections: of 3 heads in all, not 2 and 1.
    assert together(64, 16384, False, batch=1) == 2


def test_no_order_without_work_or_for_other_kernels() -> None:
    plan = next(iter(forward_sm90.all_plans()))
    given = members_of(heads_q=0, heads_k=0, batch=0, seqlen_q=1, seqlen_k=1)
    assert plans.order_of(plan, given, 0) == {}
    other = plan_with("cuda", "cuda/combine.cu", {"DTYPE": 1})
    assert plans.order_of(other, members_of(heads_q=1, heads_k=1, batch=1), 1) == {}
