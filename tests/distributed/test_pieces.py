"""What each rank computes of another's keys, without any process: every score once, masks exact."""

import itertools
import random

import pytest
import torch

from pyfa.distributed.layout import UNIT, Layout, positions
from pyfa.distributed.pieces import Mask, plan


def everywhere(lengths: tuple[int, ...], ranks: int, zigzag: bool) -> list[list[int]]:
    """The rows of the whole that each rank holds."""
    layout = Layout(lengths, ranks, zigzag)
    return [
        [row for start, stop in positions(layout, rank) for row in range(start, stop)]
        for rank in range(ranks)
    ]


def visible(rows: int, keys: int, left: int, right: int, shift: int) -> torch.Tensor:
    """What the mask of one call lets its rows see."""
    distance = torch.arange(keys) - torch.arange(rows)[:, None] - shift
    seen = torch.ones(rows, keys, dtype=torch.bool)
    if right >= 0:
        seen &= distance <= right
    if left >= 0:
        seen &= -distance <= left
    return seen


def assembled(queries: Layout, keys: Layout, mask: Mask, packed: bool) -> torch.Tensor:
    """How often each (row, key) of the whole is computed by the pieces of all ranks."""
    rows_of = everywhere(*queries)
    total = torch.zeros(sum(queries.lengths), sum(keys.lengths), dtype=torch.int)
    for rank in range(queries.ranks):
        for source in range(queries.ranks):
            needed, pieces = plan(queries, keys, rank, source, mask, packed)
            own = positions(keys, source)
            count = len(keys.lengths)
            held = [
                key
                for number in needed
                for start, stop in own[number * count : (number + 1) * count]
                for key in range(start, stop)
            ]
            for piece in pieces:
                rows, columns = rows_of[rank][slice(*piece.rows)], held[slice(*piece.keys)]
                seen = torch.zeros(len(rows), len(columns), dtype=torch.bool)
                offsets_q = piece.offsets_q or (0, len(rows))
                offsets_k = piece.offsets_k or (0, len(columns))
                for b in range(len(offsets_q) - 1):
                    one, two = slice(*offsets_q[b : b + 2]), slice(*offsets_k[b : b + 2])
                    n, m = one.stop - one.start, two.stop - two.start
                    shift = m - n + piece.q_start - piece.k_start
                    seen[one, two] = visible(n, m, piece.left, piece.right, shift)
                total[torch.tensor(rows)[:, None], torch.tensor(columns)] += seen
    return total


def expected(lengths_q, lengths_k, mask: Mask) -> torch.Tensor:
    blocks = [
        visible(n, m, mask.left, mask.right, m - n)
        for n, m in zip(lengths_q, lengths_k, strict=True)
    ]
    return torch.block_diag(*(block.int() for block in blocks))


def test_every_score_is_computed_once_and_no_other():
    choose = random.Random(0)
    refused = 0
    for _ in range(600):
        ranks, zigzag = choose.randint(1, 5), choose.random() < 0.6
        packed = choose.random() < 0.5
        count = choose.randint(1, 3) if packed else 1
        lengths_q = tuple(choose.randint(0, 60) for _ in range(count))
        same = choose.random() < 0.6
        lengths_k = lengths_q if same else tuple(choose.randint(0, 60) for _ in range(count))
        edges = choose.choice([(-1, -1), (-1, 0), (choose.randint(0, 20), 0), (5, 9), (-1, 3)])
        alibi, dropout = choose.random() < 0.3, choose.random() < 0.3
        mask = Mask(*edges, alibi, dropout)
        queries, keys = Layout(lengths_q, ranks, zigzag), Layout(lengths_k, ranks, zigzag)
        try:
            found = assembled(queries, keys, mask, packed)
        except ValueError:
            # Only where dropout and mask want a block's corner in two places.
            assert dropout
            assert alibi or edges != (-1, -1)
            refused += 1
            continue
        said = (lengths_q, lengths_k, ranks, zigzag, mask, packed)
        assert torch.equal(found, expected(lengths_q, lengths_k, mask)), said
    assert refused < 100


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_a_causal_mask_gives_all_ranks_equal_work_and_few_calls(ranks):
    layout = Layout((64 * ranks,), ranks, True)
    work, calls = [], []
    for rank in range(ranks):
        scores = 0
        for source in range(ranks):
            pieces = plan(layout, layout, rank, source, Mask(-1, 0), False).pieces
            calls.append(len(pieces))
            for piece in pieces:
                n, m = piece.rows[1] - piece.rows[0], piece.keys[1] - piece.keys[0]
                scores += n * m if piece.right < 0 else n * (n + 1) // 2
        work.append(scores)
    assert len(set(work)) == 1
    assert set(calls) == {1}


def test_a_block_before_the_diagonal_is_plain_attention_on_half_of_the_keys():
    layout = Layout((64,), 2, True)
    needed, (piece,) = plan(layout, layout, 1, 0, Mask(-1, 0), False)
    assert needed == (0,)
    assert (piece.rows, piece.keys, piece.left, piece.right) == ((0, 32), (0, 16), -1, -1)


def test_a_window_needs_keys_of_neighbors_alone():
    layout = Layout((128,), 8, False)
    mask = Mask(10, 0)
    for rank in range(8):
        plans = [plan(layout, layout, rank, source, mask, False) for source in range(8)]
        needed = [source for source in range(8) if plans[source].needed]
        assert needed == ([rank - 1, rank] if rank else [0])


@pytest.mark.parametrize("length", [0, 3, 77, 101, 4096])
@pytest.mark.parametrize("zigzag", [True, False])
def test_chunks_begin_where_dropout_draws(length, zigzag):
    layout = Layout((length,), 3, zigzag)
    for rank in range(3):
        for chunk in layout.chunks(rank):
            ((start, stop),) = chunk.parts
            assert start % UNIT == 0 or start == length
            assert chunk.rows[1] - chunk.rows[0] == stop - start
    rows = itertools.chain.from_iterable(everywhere((length,), 3, zigzag))
    assert sorted(rows) == list(range(length))
