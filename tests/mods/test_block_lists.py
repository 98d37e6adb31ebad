"""Block lists and block_mask: right lists, right results, and never a stale one."""

import gc
import types

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

import pyfa
from pyfa import blocks, mods
from pyfa.backends.torch import tiled
from pyfa.blocks import build, kept
from pyfa.blocks.build import EMPTY, PARTIAL, WHOLE, Tiles
from pyfa.conformance.cases import Case
from pyfa.conformance.modifiers import MASKS, OF_LENGTHS, _Tables
from pyfa.problem import Call


@pytest.fixture(autouse=True)
def nothing_kept():
    kept.clear()


def _call(mask_mod, rows, keys, batch=2, heads=4, **fields):
    q, k = torch.zeros(batch, rows, heads, 8), torch.zeros(batch, keys, 2, 8)
    digest, captured = mods.resolve(None, mask_mod, q.device)
    slots = {f"captured{n}": x for n, x in enumerate(captured)}
    return Call(q, k, k, max_seqlen_q=rows, max_seqlen_k=keys, mods=digest, **slots, **fields)


def _dense(mask_mod, batch, heads, rows, keys, starts=(0, 0, 0, 0)):
    """By plain PyTorch: the user's function on every index."""
    b, h, i, j = torch.meshgrid(
        *(torch.arange(n) + s for n, s in zip((batch, heads, rows, keys), starts, strict=True)),
        indexing="ij",
    )
    seen = torch.zeros(batch, heads, rows, keys, dtype=torch.bool)
    for at in range(batch):
        for head in range(heads):
            seen[at, head] = torch.vmap(torch.vmap(mask_mod))(
                b[at, head], h[at, head], i[at, head], j[at, head]
            )
    return seen


def _expected(seen, tiles):
    """Entries by (b, h, owned), from the mask itself."""
    if tiles.owned == "keys":
        seen = seen.transpose(2, 3)
        tiles = Tiles(tiles.keys, tiles.rows)
    batch, heads, rows, keys = seen.shape
    found = {}
    for b in range(batch):
        for h in range(heads):
            for row in range(-(-rows // tiles.rows)):
                own = slice(row * tiles.rows, (row + 1) * tiles.rows)
                entries = []
                for key in range(-(-keys // tiles.keys)):
                    part = seen[b, h, own, key * tiles.keys :][:, : tiles.keys]
                    if part.any():
                        entries.append(key + (blocks.FULL if part.all() else 0))
                found[b, h, row] = entries
    return found


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("tiles", [Tiles(16, 8), Tiles(32, 24), Tiles(16, 8, "keys")])
def test_lists_are_those_of_the_mask(name, tiles):
    rows, keys = (200, 110) if name == "patches" else (45, 70)
    case = Case(lengths_q=(rows,) * 2, lengths_k=(keys,) * 2, heads_q=4)
    mask = MASKS[name](_Tables(case, "cpu"))
    starts = (0, 0, 0, 0) if name in OF_LENGTHS else (0, 2, 7, 3)
    places = dict(zip(("batch_start", "head_start", "q_start", "k_start"), starts, strict=True))
    counts, entries = blocks.lists_of(_call(mask, rows, keys, **places), tiles)
    assert counts.dtype == entries.dtype == torch.int32
    assert counts.shape[0] in (1, 2)
    want = _expected(_dense(mask, 2, 4, rows, keys, starts), tiles)
    for (b, h, row), expected in want.items():
        at = b % counts.shape[0], h % counts.shape[1], row
        count = int(counts[at])
        assert entries[at][:count].tolist() == expected
        assert set(entries[at][count:].tolist()) <= {entries.shape[-1]}


def test_a_mask_that_asks_for_neither_b_nor_h_has_one_list():
    counts, _ = blocks.lists_of(_call(lambda b, h, i, j: i >= j, 64, 64), Tiles(16, 16))
    assert counts.shape == (1, 1, 4)
    counts, _ = blocks.lists_of(_call(lambda b, h, i, j: i >= j + h, 64, 64), Tiles(16, 16))
    assert counts.shape == (1, 4, 4)


def test_no_rows_times_keys_in_memory(monkeypatch):
    most = []
    real = build.evaluate

    def watched(function, inputs, captured):
        (seen,) = real(function, inputs, captured)
        most.append(seen.numel())
        return [seen]

    monkeypatch.setattr(build, "evaluate", watched)
    monkeypatch.setitem(build._AT_ONCE, "cpu", 1 << 14)
    call = _call(lambda b, h, i, j: (i - j).abs() < 100, 1000, 1500)
    small = blocks.lists_of(call, Tiles(64, 32))
    assert max(most) <= 1 << 14
    monkeypatch.setitem(build._AT_ONCE, "cpu", 1 << 30)
    kept.clear()
    for x, y in zip(small, blocks.lists_of(call, Tiles(64, 32)), strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize(
    ("mask_mod", "rows", "keys", "expected"),
    [
        (lambda b, h, i, j: i >= j, 300, 300, 300),
        (lambda b, h, i, j: i >= j, 64, 5000, 64),
        (lambda b, h, i, j: (i >= j) & (i - j < 256), 50_000, 50_000, 320),
        (lambda b, h, i, j: (i >= j) & (i - j < 2048) & (j % 4 == 0), 4096, 4096, 2112),
        (lambda b, h, i, j: j < 0 * i, 100, 100, 0),
        (lambda b, h, i, j: h >= 1, 100, 100, 0),  # of the first head
        (lambda b, h, i, j: i >= j, 0, 100, 0),
    ],
)
def test_about_how_many_keys_a_row_visits(mask_mod, rows, keys, expected):
    digest, _ = mods.resolve(None, mask_mod, torch.device("cpu"))
    assert abs(blocks.keys_visited(digest, rows, keys) - expected) <= 64
    build.keys_visited.cache_clear()
    with FakeTensorMode():
        assert abs(blocks.keys_visited(digest, rows, keys) - expected) <= 64


def test_what_a_mask_loads_is_not_looked_at():
    """Its values may be on a device, and another call may have others."""
    shown = torch.zeros(100, dtype=torch.bool)
    digest, _ = mods.resolve(None, lambda b, h, i, j: shown[j], torch.device("cpu"))
    assert blocks.keys_visited(digest, 100, 100) == 100


def test_a_mask_of_inexact_arithmetic_visits_everything():
    call = _call(lambda b, h, i, j: torch.exp(-0.1 * (i - j).abs()) > 0.5, 64, 64)
    counts, entries = blocks.lists_of(call, Tiles(16, 16))
    assert counts.tolist() == [[[4] * 4]]
    assert entries[0, 0].tolist() == [[0, 1, 2, 3]] * 4


# ---- never a stale list --------------------------------------------------------------------------


def _counted(document, monkeypatch):
    made = []
    real = build.states_of

    def watched(*given):
        made.append(1)
        return real(*given)

    monkeypatch.setattr(build, "states_of", watched)
    q = torch.randn(1, 512, 1, 8)

    def attend(document):
        mask_mod = lambda b, h, i, j: document[i] == document[j]  # noqa: E731
        out = pyfa.attention(q, q, q, mask_mod=mask_mod, backend="torch")
        bias = document[:, None] == document
        torch.testing.assert_close(out, pyfa.attention(q, q, q, bias=bias, backend="torch"))
        return len(made)

    return attend


def test_a_change_in_place_makes_new_lists(monkeypatch):
    document = torch.arange(512) // 256
    attend = _counted(document, monkeypatch)
    assert attend(document) == 1
    assert attend(document) == 1
    document[:300] = 0
    assert attend(document) == 2
    view = document[100:]
    view.add_(1)
    assert attend(document) == 3
    assert attend(document) == 3


def test_memory_that_is_used_again_makes_new_lists(monkeypatch):
    attend = _counted(None, monkeypatch)
    addresses = set()
    for turn in range(40):
        document = torch.arange(512) // (100 + turn)
        addresses.add(document.data_ptr())
        assert attend(document) == turn + 1
        del document
        gc.collect()
    assert len(addresses) < 40  # or this would show nothing


def test_what_is_gone_is_not_held():
    held = [torch.arange(512) // 256]

    def same(document):
        return _call(lambda b, h, i, j: document[i] == document[j], 512, 512)

    blocks.lists_of(same(held[0]), Tiles(64, 64))
    assert len(kept._entries) == 1
    held.clear()
    gc.collect()
    blocks.lists_of(_call(lambda b, h, i, j: i >= j, 512, 512), Tiles(64, 64))
    assert len(kept._entries) == 1


def test_lists_of_older_values_are_not_held():
    document = torch.arange(512) // 256
    call = _call(lambda b, h, i, j: document[i] == 0, 512, 512)
    for _ in range(3):
        blocks.lists_of(call, Tiles(64, 64))
        document.add_(1)
    assert len(kept._entries) == 1
    (entry,) = kept._entries.values()
    assert kept._bytes == entry.size > 0


def test_tensors_of_inference_mode_are_never_kept():
    with torch.inference_mode():
        document = torch.arange(512) // 256
        call = _call(lambda b, h, i, j: document[i] == document[j], 512, 512)
        first = blocks.lists_of(call, Tiles(64, 64))
        document.zero_()
        second = blocks.lists_of(call, Tiles(64, 64))
    assert first.counts.sum() * 2 == second.counts.sum()


def test_a_key_without_the_version_is_caught(monkeypatch):
    real = kept._states_of
    stale = lambda device, used: (0, (tuple(x.data_ptr() for x in used), ()))  # noqa: E731
    monkeypatch.setattr(kept, "_states_of", stale)
    # An entry must not be dropped before its address is used again.
    monkeypatch.setattr(kept, "_LOOKED_AT", 0)
    with pytest.raises(AssertionError):
        test_a_change_in_place_makes_new_lists(monkeypatch)
    kept.clear()
    with pytest.raises(AssertionError):
        test_memory_that_is_used_again_makes_new_lists(monkeypatch)
    monkeypatch.setattr(kept, "_states_of", real)


# ---- the torch backend ---------------------------------------------------------------------------


def _tiles_computed(monkeypatch):
    seen = []
    real = tiled._Grid.scores

    def scores(self, q, k, tile):
        seen.append(tile)
        return real(self, q, k, tile)

    monkeypatch.setattr(tiled._Grid, "scores", scores)
    return seen


def test_torch_skips_what_the_mask_hides(monkeypatch):
    monkeypatch.setitem(tiled._TILE_SCORES, "cpu", 1 << 15)
    q, k, v = (torch.randn(1, 1024, 1, 8).requires_grad_() for _ in range(3))
    seen = _tiles_computed(monkeypatch)

    def run(**given):
        seen.clear()
        out, lse = pyfa.attention(q, k, v, return_lse=True, backend="torch", **given)
        grads = torch.autograd.grad(out.square().sum() + lse.sum(), (q, k, v))
        return (out, lse, *grads), len(seen)

    found, tiles = run(mask_mod=lambda b, h, i, j: i >= j)
    run_tiles = list(seen)
    expected, of_causal = run(causal=True, softcap=1e6)
    assert tiles == of_causal < run(mask_mod=lambda b, h, i, j: j >= 0)[1]
    assert sum(not tile.is_full for tile in run_tiles) < tiles
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y, atol=1e-4, rtol=1e-4)


def test_a_full_tile_taken_for_a_partial_one_costs_and_the_other_way_is_wrong(monkeypatch):
    # The planted fault: everything that is visited counts as full.
    real = blocks.states_across

    def wrong(*given):
        return [[WHOLE if state else EMPTY for state in row] for row in real(*given)]

    q = torch.randn(1, 300, 1, 8)
    causal = pyfa.attention(q, q, q, causal=True)
    mask_mod = lambda b, h, i, j: i >= j  # noqa: E731
    torch.testing.assert_close(pyfa.attention(q, q, q, mask_mod=mask_mod, backend="torch"), causal)
    monkeypatch.setattr(blocks, "states_across", wrong)
    out = pyfa.attention(q, q, q, mask_mod=mask_mod, backend="torch")
    assert not torch.allclose(out, causal)


def test_explain_says_what_is_left():
    q = torch.zeros(1, 1024, 2, 64, dtype=torch.bfloat16)

    def notes(mask_mod, backend, **given):
        answers = pyfa.explain(q, q, q, mask_mod=mask_mod, **given).answers
        plan = next(answer.plan for answer in answers if answer.backend == backend)
        return " ".join(plan.notes)

    band = lambda b, h, i, j: (i - j).abs() < 100  # noqa: E731
    # 4 tiles of 256 rows: keys 0 to 354, 157 to 610, 413 to 866, 669 to the end.
    by_list = (
        "mask_mod: tiles of 256 x 64 by block list: 28 of 64 are visited, 28 of them are partial"
    )
    assert by_list in notes(band, "emulator")
    assert "are visited" in notes(band, "torch")
    inexact = lambda b, h, i, j: torch.exp(-0.1 * (i - j).abs()) > 0.5  # noqa: E731
    assert "every tile is visited, because its arithmetic is not exact" in notes(
        inexact, "emulator"
    )
    assert "mask_mod" not in notes(None, "emulator")


# ---- block_mask ----------------------------------------------------------------------------------


def _flex(q, k, v, block_mask, **given):
    turned = [x.transpose(1, 2) for x in (q, k, v)]
    out, lse = flex_attention(*turned, block_mask=block_mask, return_lse=True, **given)
    return out.transpose(1, 2), lse


@pytest.mark.parametrize(("rows", "keys"), [(130, 130), (100, 210)])
@pytest.mark.parametrize("name", ["documents", "dilated", "prefix"])
@pytest.mark.parametrize("size", [32, (64, 32)])
@pytest.mark.filterwarnings("ignore")
def test_as_flex_attention(rows, keys, name, size):
    torch.manual_seed(2)
    q, k, v = (torch.randn(2, n, 2, 16) for n in (rows, keys, keys))
    case = Case(lengths_q=(rows,) * 2, lengths_k=(keys,) * 2, heads_q=4)
    mask = MASKS[name](_Tables(case, "cpu"))
    block_mask = create_block_mask(mask, 2, 2, rows, keys, device="cpu", BLOCK_SIZE=size)
    found = pyfa.attention(q, k, v, block_mask=block_mask, return_lse=True)
    for x, y in zip(found, _flex(q, k, v, block_mask), strict=True):
        torch.testing.assert_close(x, y)


def _blocks(states, block=16, mask_mod=None, lengths=None):
    """A BlockMask from EMPTY, PARTIAL and WHOLE of each block."""
    states = torch.tensor(states)[None, None]
    lists = []
    for state in (PARTIAL, WHOLE):
        there = states == state
        order = torch.sort((~there).int(), dim=-1, stable=True).indices.int()
        lists += [there.sum(-1, dtype=torch.int32), order]
    made = BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=block, mask_mod=mask_mod)
    if lengths:
        made.seq_lengths = lengths
    return made


STATES = [[0, 1, 2, 0], [2, 0, 1, 0], [0, 0, 0, 0], [1, 2, 0, 2]]


def test_what_is_not_listed_is_hidden_and_what_is_full_is_seen_whatever_the_mask_says():
    q, k, v = (torch.randn(1, 64, 2, 16) for _ in range(3))
    odd = lambda b, h, i, j: (i + j) % 2 == 1  # noqa: E731
    out, lse = pyfa.attention(q, k, v, block_mask=_blocks(STATES, 16, odd), return_lse=True)
    state = torch.tensor(STATES).repeat_interleave(16, 0).repeat_interleave(16, 1)
    i, j = torch.arange(64)[:, None], torch.arange(64)
    bias = (state == WHOLE) | ((state == PARTIAL) & ((i + j) % 2 == 1))
    expected = pyfa.attention(q, k, v, bias=bias, return_lse=True)
    for x, y in zip((out, lse), expected, strict=True):
        torch.testing.assert_close(x, y)
    assert (lse[..., 32:48] == -torch.inf).all()  # a row of blocks without any
    # Lists of other tiles than the blocks': full only where all blocks below are.
    call = _call(_as_mod(_blocks(STATES, 16, odd)), 64, 64)
    for tiles in (Tiles(16, 16), Tiles(32, 16), Tiles(16, 32), Tiles(24, 40), Tiles(64, 64)):
        counts, entries = blocks.lists_of(call, tiles)
        want = _expected(bias[None, None], tiles)
        for (b, h, row), expected in want.items():
            assert entries[b, h, row][: counts[b, h, row]].tolist() == expected


def _as_mod(block_mask):
    from pyfa.blocks import given

    return given.as_mask_mod(block_mask, None, torch.device("cpu"))


def test_without_a_mask_listed_blocks_are_seen_whole():
    q = torch.randn(1, 64, 1, 16)
    found = pyfa.attention(q, q, q, block_mask=_blocks(STATES))
    state = torch.tensor(STATES).repeat_interleave(16, 0).repeat_interleave(16, 1)
    torch.testing.assert_close(found, pyfa.attention(q, q, q, bias=state > 0))
    # A mask_mod beside it decides in partial blocks.
    mask_mod = lambda b, h, i, j: j % 3 != 0  # noqa: E731
    found = pyfa.attention(q, q, q, block_mask=_blocks(STATES), mask_mod=mask_mod)
    bias = (state == WHOLE) | ((state == PARTIAL) & (torch.arange(64) % 3 != 0))
    torch.testing.assert_close(found, pyfa.attention(q, q, q, bias=bias))


def test_a_block_mask_changed_in_place():
    q = torch.randn(1, 64, 1, 16)
    block_mask = _blocks(STATES)
    for _ in range(2):
        state = torch.tensor(STATES)
        for row, count in enumerate(block_mask.full_kv_num_blocks[0, 0].tolist()):
            if count == 0:
                state[row][state[row] == WHOLE] = EMPTY
        bias = (state > 0).repeat_interleave(16, 0).repeat_interleave(16, 1)
        found = pyfa.attention(q, q, q, block_mask=block_mask)
        torch.testing.assert_close(found, pyfa.attention(q, q, q, bias=bias))
        block_mask.full_kv_num_blocks.zero_()


def test_gradients_as_flex_attention():
    torch.manual_seed(3)
    q, k, v = (torch.randn(1, n, 2, 16).requires_grad_() for n in (100, 140, 140))
    odd = lambda b, h, i, j: (i + j) % 2 == 1  # noqa: E731
    block_mask = create_block_mask(odd, 1, 1, 100, 140, device="cpu", BLOCK_SIZE=32)
    bias = odd(0, 0, torch.arange(100)[:, None], torch.arange(140))
    grads = [
        torch.autograd.grad(pyfa.attention(q, k, v, **given).square().sum(), (q, k, v))
        for given in ({"block_mask": block_mask}, {"bias": bias})
    ]
    for x, y in zip(*grads, strict=True):
        torch.testing.assert_close(x, y, atol=1e-5, rtol=1e-5)


def test_packed_blocks_count_inside_a_sequence():
    q = torch.randn(90, 1, 16)
    starts = torch.tensor([0, 30, 90], dtype=torch.int32)
    mask = lambda b, h, i, j: i >= j  # noqa: E731
    block_mask = create_block_mask(mask, 1, 1, 60, 60, device="cpu", BLOCK_SIZE=16)
    found = pyfa.attention_varlen(q, q, q, starts, starts, 60, 60, block_mask=block_mask)
    causal = pyfa.attention_varlen(q, q, q, starts, starts, 60, 60, causal=True)
    torch.testing.assert_close(found, causal)


# ---- what is refused -----------------------------------------------------------------------------


class _Like:
    """Attributes of a BlockMask, one of them another."""

    def __init__(self, **changed):
        made = _blocks(STATES)
        names = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")
        for name in (*names, "BLOCK_SIZE", "mask_mod"):
            setattr(self, name, changed.get(name, getattr(made, name)))


COUNTS = torch.zeros(1, 1, 4, dtype=torch.int32)
WRONG = {
    "no BlockMask": (torch.ones(64, 64), TypeError, "expected a BlockMask .*got Tensor"),
    "another length": (_blocks(STATES, lengths=(64, 60)), ValueError, r"seq_lengths \(64, 64\)"),
    "fewer rows": (_Like(
        kv_num_blocks=COUNTS[..., :3], kv_indices=torch.zeros(1, 1, 3, 4, dtype=torch.int32),
        full_kv_num_blocks=None, full_kv_indices=None), ValueError, "expected 4 x 4 blocks"),
    "other blocks": (_Like(BLOCK_SIZE=(32, 16)), ValueError, "expected 2 x 4 blocks"),
    "no size": (_Like(BLOCK_SIZE=0), ValueError, "BLOCK_SIZE: expected two positive integers"),
    "dtype": (_Like(kv_num_blocks=COUNTS.float()), ValueError, "kv_num_blocks: expected dtype"),
    "dimensions": (_Like(kv_num_blocks=COUNTS[0]), ValueError, r"3 dimensions \(B \| 1"),
    "shapes apart": (_Like(full_kv_num_blocks=COUNTS[..., :2]), ValueError, "full_kv_num_blocks"),
    "full ones alone": (_Like(full_kv_indices=None), ValueError, "or neither"),
    "batch": (_Like(
        kv_num_blocks=COUNTS.expand(3, 1, 4), kv_indices=COUNTS[..., None].expand(3, 1, 4, 4),
        full_kv_num_blocks=None, full_kv_indices=None), ValueError, "B of 1 or 2"),
    "heads": (_Like(
        kv_num_blocks=COUNTS.expand(1, 3, 4), kv_indices=COUNTS[..., None].expand(1, 3, 4, 4),
        full_kv_num_blocks=None, full_kv_indices=None), ValueError, "H of 1 or 2"),
    "device": (_Like(kv_indices=torch.zeros(1, 1, 4, 4, dtype=torch.int32, device="meta")),
               ValueError, "q's device cpu"),
    "count": (_Like(kv_num_blocks=COUNTS + 5), ValueError, "counts from 0 to 4; got 5"),
    "index": (_Like(kv_num_blocks=COUNTS + 1,
                    kv_indices=torch.full((1, 1, 4, 4), 4, dtype=torch.int32)),
              ValueError, "blocks from 0 to 3; got 4"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_refused(name):
    block_mask, kind, message = WRONG[name]
    q = torch.zeros(2, 64, 2, 16)
    for _ in range(2):
        with pytest.raises(kind, match=message):
            pyfa.attention(q, q, q, block_mask=block_mask)


def test_two_masks_are_refused():
    q = torch.zeros(1, 64, 2, 16)
    other = lambda b, h, i, j: j < 3  # noqa: E731
    block_mask = _blocks(STATES, 16, lambda b, h, i, j: i >= j)
    with pytest.raises(ValueError, match="mask_mod: expected None, as block_mask has"):
        pyfa.attention(q, q, q, block_mask=block_mask, mask_mod=other)
    pyfa.attention(q, q, q, block_mask=block_mask, mask_mod=block_mask.mask_mod)


def test_a_bound_call_is_not_found_by_a_block_mask_of_another_length():
    q = torch.zeros(1, 64, 1, 16)
    pyfa.attention(q, q, q, block_mask=_blocks(STATES, lengths=(64, 64)))
    with pytest.raises(ValueError, match="seq_lengths"):
        pyfa.attention(q, q, q, block_mask=_blocks(STATES, lengths=(64, 63)))


@pytest.mark.parametrize("name", ["kv_indices", "kv_num_blocks"])
@pytest.mark.parametrize("value", [9, -1])
def test_values_of_a_repeated_block_mask_are_checked(name, value):
    q = torch.randn(1, 60, 2, 16)

    def attend(wrong):
        block_mask = create_block_mask(
            lambda b, h, i, j: i >= j, 1, 1, 60, 60, device="cpu", BLOCK_SIZE=16
        )
        if wrong:
            getattr(block_mask, name)[0, 0, 1] = value
        return pyfa.attention(q, q, q, block_mask=block_mask)

    for _ in range(3):
        attend(False)
    with pytest.raises(ValueError, match="block_mask"):
        attend(True)


def test_lists_that_are_too_narrow_for_the_keys_are_refused():
    """Without seq_lengths their width is the number of blocks; the last block would be lost."""
    q = torch.randn(1, 32, 2, 16)
    lists = types.SimpleNamespace(
        kv_num_blocks=torch.ones(1, 1, 2, dtype=torch.int32),
        kv_indices=torch.tensor([[[[1], [0]]]], dtype=torch.int32),
        full_kv_num_blocks=None, full_kv_indices=None, BLOCK_SIZE=16, mask_mod=None,
    )  # fmt: skip
    with pytest.raises(ValueError, match="block_mask"):
        pyfa.attention(q, q, q, block_mask=lists)
    lists.kv_indices.zero_()
    with pytest.raises(ValueError, match=r"^block_mask: expected 2 x 2 blocks"):
        pyfa.attention(q, q, q, block_mask=lists)
