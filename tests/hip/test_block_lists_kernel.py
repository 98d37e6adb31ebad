"""The kernel that makes block lists, run in the emulator: its lists are those of PyTorch's
operators."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import turns

import pyfa
from pyfa import blocks, mods
from pyfa.backends import BACKENDS
from pyfa.backends.hip import code
from pyfa.backends.native import block_lists
from pyfa.backends.native.block_lists import Maker, plan_of
from pyfa.blocks import Tiles, kept
from pyfa.conformance import modifiers_more
from pyfa.conformance.cases import Case
from pyfa.conformance.modifiers import MASKS, OF_LENGTHS, _Tables
from pyfa.emulator import EmulatorError
from pyfa.errors import CodeObjectError
from pyfa.mods import emit_ranges
from pyfa.problem import Call

KERNEL, BOUNDS = "hip/block_lists.hip", "hip/tile_bounds.hip"
LAUNCHER = BACKENDS["emulator"].launch
Mask = Callable[..., Any]
PLACES = {"batch_start": 1, "head_start": 2, "q_start": 33, "k_start": 12}


def call_of(mask_mod: Mask, rows: int, keys: int, heads: int = 4, **fields: int) -> Call:
    q, k = torch.zeros(2, rows, heads, 8), torch.zeros(2, keys, 2, 8)
    digest, captured = mods.resolve(None, mask_mod, q.device)
    slots: Any = {f"captured{slot}": x for slot, x in enumerate(captured)}
    return Call(q, k, k, max_seqlen_q=rows, max_seqlen_k=keys, mods=digest, **slots, **fields)


def work_of(mask_mod: Mask, size: int, tiles: Tiles) -> int:
    """How many vector instructions it takes to make lists of a square mask."""
    call = call_of(mask_mod, size, size)
    Maker(LAUNCHER)(call, tiles)
    counters = BACKENDS["emulator"].runtime.counters
    return sum(n for name, n in counters.mnemonics.items() if name.startswith("v_"))


def differs(mask_mod: Mask, rows: int, keys: int, tiles: Tiles, **fields: int) -> bool:
    call = call_of(mask_mod, rows, keys, **fields)
    try:
        found = Maker(LAUNCHER)(call, tiles)
    except EmulatorError:
        return True
    expected = blocks.make_lists(call, tiles)
    assert found.counts.is_contiguous()
    assert found.entries.is_contiguous()
    return not all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))


@pytest.fixture(autouse=True)
def by_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """No list was made before, and nothing but the kernel makes one."""
    kept.clear()
    monkeypatch.setattr(block_lists, "_refused", set())

    def refuse(error: str, *_: Any) -> None:
        raise AssertionError(error)

    monkeypatch.setattr("pyfa.backends.native.block_lists._log.info", refuse)


# Each mask with both kinds of tiles, or with one in turn: a kernel takes 3 s to compile.
KINDS = (Tiles(32, 24), Tiles(8, 64, "keys"))
OF_EACH = [
    (name, tiles)
    for number, name in enumerate(MASKS)
    for turn, tiles in enumerate(KINDS)
    if name not in modifiers_more.MASKS or number % 2 == turn
]
OF_EACH = turns.some(OF_EACH, 2, kind=lambda each: each[1], name=str)


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bounds of captured tensors come from a table, as those of long lists do."""
    monkeypatch.setattr(block_lists, "MOST_OWN", 0)


def agrees(name: str, tiles: Tiles) -> bool:
    rows, keys = (200, 310) if name == "patches" else (145, 70)
    case = Case(lengths_q=(rows,) * 2, lengths_k=(keys,) * 2, heads_q=4)
    mask = MASKS[name](_Tables(case, "cpu"))
    places = [{}] if name in OF_LENGTHS else [{}, PLACES]
    return not any(differs(mask, rows, keys, tiles, **each) for each in places)


@pytest.mark.parametrize(("name", "tiles"), OF_EACH, ids=str)
def test_the_conformance_masks(name: str, tiles: Tiles, kernels_run: list[str]) -> None:
    assert agrees(name, tiles)
    assert "tile_bounds" not in kernels_run  # or the kernel with bounds of its own spills


@pytest.mark.usefixtures("table")
@pytest.mark.parametrize(("name", "tiles"), OF_EACH, ids=str)
def test_the_conformance_masks_with_a_table(
    name: str, tiles: Tiles, kernels_run: list[str]
) -> None:
    case = Case(lengths_q=(8,) * 2, lengths_k=(8,) * 2, heads_q=4)
    digest, _ = mods.resolve(None, MASKS[name](_Tables(case, "cpu")), torch.device("cpu"))
    if not emit_ranges.most_tabled(mods.of(digest)):
        pytest.skip("the same kernel as without a table")
    assert agrees(name, tiles)
    assert "tile_bounds" in kernels_run


@pytest.mark.parametrize("rows", [1, 64, 65])
@pytest.mark.parametrize("keys", [0, 1, 63, 128])
def test_edges(rows: int, keys: int) -> None:
    for tiles in (Tiles(64, 32), Tiles(64, 32, "keys")):
        assert not differs(lambda b, h, i, j: (i ^ j) < 50, rows, keys, tiles)


def test_a_list_longer_than_a_workgroup_has_threads() -> None:
    shuffled = torch.tensor(random.Random(0).choices(range(8), k=1300 * 8))
    masks: list[Mask] = [
        lambda b, h, i, j: j // 8 % 3 != 1,
        lambda b, h, i, j: shuffled[j] < 6,
        lambda b, h, i, j: i < 0,
    ]
    for mask in masks:
        assert not differs(mask, 20, 1300 * 8, Tiles(16, 8))


# ---- any arithmetic ------------------------------------------------------------------------------

TABLES = (
    torch.arange(400) // 37,
    torch.arange(400, dtype=torch.int32).sub(200).abs().neg(),
    torch.arange(400) % 11 != 3,
    (torch.arange(1600).reshape(4, 400) % 7 - 3).to(torch.int16),
    torch.arange(800).reshape(400, 2)[:, 1].to(torch.uint8),
)
NUMBERS = (0, 1, 3, 64, 100, -1, -5, 1 << 20, (1 << 31) - 1, -(1 << 31))
BINARY = {
    "add": torch.add, "sub": torch.sub, "mul": torch.mul, "min": torch.minimum,
    "max": torch.maximum, "and": torch.bitwise_and, "or": torch.bitwise_or,
    "xor": torch.bitwise_xor,
}  # fmt: skip
UNARY: tuple[Callable[[Any, int], Any], ...] = (
    lambda x, n: -x,
    lambda x, n: x.abs(),
    lambda x, n: ~x,
    lambda x, n: x >> n % 7,
    lambda x, n: x << n % 7,
    lambda x, n: x.to(torch.int64),
    lambda x, n: x // n,
    lambda x, n: x % n,
    lambda x, n: torch.div(x, n, rounding_mode="trunc"),
    lambda x, n: TABLES[n % 3][x].to(torch.int32),
    lambda x, n: TABLES[4][x].to(torch.int32) + n,
)
COMPARE = (torch.lt, torch.le, torch.gt, torch.ge, torch.eq, torch.ne)


def number(draw: random.Random, depth: int) -> Mask:
    """A random expression of b, h, i and j."""
    if depth == 0 or draw.random() < 0.15:
        place = draw.choice((0, 1, 2, 2, 2, 3, 3, 3, 4))
        constant = draw.choice(NUMBERS)
        return lambda *at: at[2] * 0 + constant if place == 4 else at[place]
    x, n = number(draw, depth - 1), draw.choice((1, 2, 3, 5, 16, 37, 64))
    if draw.random() < 0.5:
        apply = draw.choice(UNARY)
        return lambda *at: apply(x(*at), n)
    y, kind = number(draw, depth - 1), draw.choice((*BINARY, "sub", "where", "table"))
    if kind == "table":
        return lambda *at: TABLES[3][x(*at), y(*at)].to(torch.int32)
    if kind == "where":
        condition = truth(draw, 1)
        return lambda *at: torch.where(condition(*at), x(*at), y(*at))
    return lambda *at: BINARY[kind](x(*at), y(*at))


def truth(draw: random.Random, depth: int) -> Mask:
    """A random condition."""
    if depth and draw.random() < 0.45:
        x, y = truth(draw, depth - 1), truth(draw, depth - 1)
        kinds: list[Callable[[Any, Any], Any]] = [
            lambda x, y: x & y, lambda x, y: x | y, lambda x, y: x ^ y, lambda x, y: ~x,
            lambda x, y: x == y,
        ]  # fmt: skip
        both = draw.choice(kinds)
        return lambda *at: both(x(*at), y(*at))
    left, right = number(draw, draw.choice((1, 2))), number(draw, draw.choice((0, 1, 2)))
    compare = draw.choice(COMPARE)
    return lambda *at: compare(left(*at), right(*at))


def of_seed(seed: int) -> bool:
    """Whether lists of a random mask, for random sizes, tiles and places, are wrong."""
    draw = random.Random(seed)
    mask = truth(draw, 2)
    rows, keys = draw.choice(((45, 170), (200, 110), (64, 1), (129, 257)))
    tiles = draw.choice((Tiles(16, 8), Tiles(32, 24), Tiles(64, 64, "keys"), Tiles(8, 16, "keys")))
    places = draw.choice(({}, PLACES))
    f: Mask = lambda b, h, i, j: mask(b, h, i, j)  # noqa: E731
    if not mods.resolve(None, f, torch.device("cpu"))[0]:
        return False  # all is seen
    return differs(f, rows, keys, tiles, **places)


# PyTorch makes the lists of number 18, whose kernel would spill 2 scalar registers.
@pytest.mark.parametrize("seed", [seed for seed in range(25) if seed != 18])
def test_random_masks(seed: int) -> None:
    assert not of_seed(seed)


# ---- what bounds are worth -----------------------------------------------------------------------


def test_bounds_leave_few_points() -> None:
    """Few tiles are on an edge; of the first mask every point has to be asked."""
    tiles, ids = Tiles(128, 128), torch.arange(2048) // 512
    every = work_of(lambda b, h, i, j: (i ^ j) >= 0, 2048, tiles)
    masks: tuple[Mask, ...] = (
        lambda b, h, i, j: i >= j,
        lambda b, h, i, j: (i >= j) & (i - j < 300),
        lambda b, h, i, j: (ids[i] == ids[j]) & (i >= j),
    )
    for mask in masks:
        assert work_of(mask, 2048, tiles) < every / 10


def test_a_mixed_tile_is_left_early() -> None:
    tiles = Tiles(128, 128)
    every = work_of(lambda b, h, i, j: (i ^ j) >= 0, 512, tiles)
    assert work_of(lambda b, h, i, j: (i ^ j) % 3 > 0, 512, tiles) < every / 3


# ---- in use --------------------------------------------------------------------------------------


@pytest.mark.parametrize("most", [8, 7])
def test_new_values_are_seen_without_a_new_kernel(
    most: int, kernels_run: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In lists of 8 tiles. Where these are too many, another kernel computes bounds first."""
    monkeypatch.setattr(block_lists, "MOST_OWN", most)
    ids, make = torch.arange(256) // 64, Maker(LAUNCHER)
    for _ in range(3):
        call = call_of(lambda b, h, i, j, ids=ids: ids[i] == ids[j], 256, 256)
        expected = blocks.make_lists(call, Tiles(32, 32))
        for x, y in zip(make(call, Tiles(32, 32)), expected, strict=True):
            assert torch.equal(x, y)
        ids = torch.flip(ids, (0,)) + ids
    assert kernels_run == (["block_lists"] if most == 8 else ["tile_bounds", "block_lists"]) * 3


def test_the_most_tiles_and_the_most_loads_that_a_workgroup_bounds_itself() -> None:
    tables = [torch.arange(block_lists.MOST_OWN * 8) // (50 + n) for n in range(4)]
    digest, _ = mods.resolve(None, every_table_agrees(tables), torch.device("cpu"))
    assert emit_ranges.most_tabled(mods.of(digest)) == block_lists._MOST_LOADS
    assert not differs(every_table_agrees(tables), 40, block_lists.MOST_OWN * 8, Tiles(16, 8))


def every_table_agrees(tables: list[torch.Tensor]) -> Mask:
    def agree(b: Any, h: Any, i: Any, j: Any) -> Any:
        found = i >= j - 400
        for table in tables:
            found = found & (table[i] == table[j])
        return found

    return agree


def test_a_kernel_with_bounds_that_cannot_be_built_gets_a_table(
    monkeypatch: pytest.MonkeyPatch, kernels_run: list[str]
) -> None:
    load = code.load

    def refused(plan: Any, arch: str) -> Any:
        if "OWN_BOUNDS" in dict(plan.constants):
            raise CodeObjectError(f"{plan.kernel} spills")
        return load(plan, arch)

    monkeypatch.setattr(code, "load", refused)
    assert not differs(documents, *ROWS)
    assert kernels_run == ["tile_bounds", "block_lists"]


def test_what_cannot_be_built_is_made_by_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    tries: list[str] = []

    def spills(plan: Any, arch: str) -> None:
        tries.append(plan.kernel)
        raise CodeObjectError(f"{plan.kernel} spills")

    monkeypatch.setattr(code, "load", spills)
    logged = lambda text, *given: said.append(text % given)  # noqa: E731
    monkeypatch.setattr("pyfa.backends.native.block_lists._log.info", logged)
    for rows in (100, 130):  # of other lengths: a binding of its own, and no second try
        assert not differs(lambda b, h, i, j: i >= j, rows, 100, Tiles(16, 16))
    assert tries == [KERNEL]
    assert said == [f"PyTorch's operators make the block lists: {KERNEL} spills"]


def test_kept_lists_do_not_hide_a_kernel_that_was_never_loaded() -> None:
    """``explain`` makes the lists by PyTorch's operators. A graph captured later cannot load
    the kernel, so a first call does, although it finds the lists."""
    q, k = torch.randn(1, 300, 2, 64).bfloat16(), torch.randn(1, 300, 2, 64).bfloat16()
    mask: Mask = lambda b, h, i, j: i >= j  # noqa: E731
    made: list[Any] = []
    original = block_lists.bind

    def bind(*given: Any) -> Any:
        made.append(given[2])
        return original(*given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(block_lists, "bind", bind)
        pyfa.explain(q, k, k, mask_mod=mask, backend="emulator")
        assert not made
        pyfa.attention(q, k, k, mask_mod=mask, backend="emulator")
        assert len(made) == 1


def test_one_kernel_for_all_that_is_counted() -> None:
    """Lengths, places and strides are no part of the code; tiles and captured dtypes are."""
    ids = torch.arange(300)
    mask: Mask = lambda b, h, i, j: ids[i] <= ids[j]  # noqa: E731
    plan = plan_of(LAUNCHER, call_of(mask, 100, 100), Tiles(64, 32))
    ids = torch.arange(900)[::3]
    assert plan_of(LAUNCHER, call_of(mask, 300, 20, **PLACES), Tiles(64, 32)) == plan
    assert plan_of(LAUNCHER, call_of(mask, 100, 100), Tiles(64, 64)) != plan
    ids = ids.int()
    assert plan_of(LAUNCHER, call_of(mask, 100, 100), Tiles(64, 32)) != plan


# ---- planted -------------------------------------------------------------------------------------

_ids = torch.arange(300) // 60
_odd = (torch.arange(300) % 97 == 90).int()
_by_head = torch.arange(1200).reshape(4, 300) % 331 // 50


def documents(b: Any, h: Any, i: Any, j: Any) -> Any:
    return _ids[i] == _ids[j]


def by_head(b: Any, h: Any, i: Any, j: Any) -> Any:
    return (i - j).abs() <= 200 - h * 40 - b


def open_to_bounds(b: Any, h: Any, i: Any, j: Any) -> Any:
    return ((i ^ j) >= 0) & (j < 200)


def last_point(b: Any, h: Any, i: Any, j: Any) -> Any:
    return (i ^ j) + 1000 * i != 31_000 + (31 ^ 23)


def runs_on(b: Any, h: Any, i: Any, j: Any) -> Any:
    return j // 8 % 3 != 1


ROWS = (290, 270, Tiles(32, 24))
KEYS = (290, 270, Tiles(16, 32, "keys"))
Fault = tuple[Mask, tuple[int, int, Tiles], str, str]
# Each: a mask and a shape that show it, the exact snippet, what it becomes.
FAULTS: dict[str, Fault] = {
    "partial taken for full": (
        by_head, ROWS,
        "return seen.low != 0 ? kWhole",
        "return seen.high != 0 ? kWhole",
    ),
    "what bounds leave open taken for partial": (
        open_to_bounds, ROWS,
        "seen.high != 0 ? kUndecided : kEmpty",
        "seen.high != 0 ? kPartial : kEmpty",
    ),
    "a seen key is enough": (
        open_to_bounds, ROWS,
        "if (lanes_where(any) && lanes_where(!all)) return",
        "if (lanes_where(any)) return",
    ),
    "the last points left out": (
        last_point, (32, 24, Tiles(32, 24)),
        "first < kPoints + lane_index()",
        "first < kPoints - 256 + lane_index()",
    ),
    "the first sequence for all": (
        lambda b, h, i, j: j < 100 + b * 60, ROWS,
        "batch = id / lists / heads;",
        "batch = 0;",
    ),
    "a tile longer than the rows": (
        lambda b, h, i, j: i < 289 + j, ROWS,
        "min(first + size, end) - 1}",
        "first + size - 1}",
    ),
    "counts of tiles before lost": (
        runs_on, (9, 700 * 8, Tiles(16, 8)),
        "int place = count +",
        "int place =",
    ),
    "counts of other wavefronts lost": (
        runs_on, (9, 200 * 8, Tiles(16, 8)),
        "if (i < wave) place +=",
        "if (i < 0) place +=",
    ),
    "an entry too far": (
        documents, ROWS,
        "1ull << lane_index()) - 1",
        "2ull << lane_index()) - 1",
    ),
    "no mark of full": (
        documents, ROWS,
        "state == kWhole ? (int)",
        "state == kPartial ? (int)",
    ),
    "places from 0": (
        by_head, ROWS,
        "ROWS, p.seqlen_q, at.q)",
        "ROWS, p.seqlen_q, 0)",
    ),
    "the rows' table for keys": (
        documents, ROWS,
        "of_rows + key_of(tile)",
        "key_of(tile)",
    ),
    "the first head's table": (
        lambda b, h, i, j: _by_head[h, i] == _by_head[h, j], ROWS,
        "table_of(tables, batch, head, of_rows",
        "table_of(tables, batch, 0, of_rows",
    ),
    "the first element of a pair": (
        lambda b, h, i, j: _by_head[(i + j) // 300, j] < 4, ROWS,
        "k <= high(1); ++k)",
        "k <= low(1); ++k)",
    ),
    "bounds of a difference": (
        by_head, ROWS,
        "Range{x.low - y.high, x.high - y.low}",
        "Range{x.low - y.low, x.high - y.high}",
    ),
    "equal where they touch": (
        documents, ROWS,
        "is_exact(x) && is_exact(y) && x.low == y.low",
        "x.low == y.low",
    ),
    "no wrapping": (
        lambda b, h, i, j: i * 20_000_000 + j > 5, ROWS,
        "return fits ? x : anything<T>();",
        "return x;",
    ),
    "a rest that grows with the dividend": (
        lambda b, h, i, j: i % 50 < 20, ROWS,
        "if (!is_exact(times)) return Range{0, y.low - 1};",
        "",
    ),
}  # fmt: skip


# The same of the kernel that bounds what is captured.
FAULTS_OF_BOUNDS: dict[str, Fault] = {
    "an index not clamped": (
        lambda b, h, i, j: _ids[i + 40] == 3, ROWS,
        "place = Range{min(max(place.low, 0ll), size - 1ll), min(max(place.high, 0ll), size - 1ll)};",  # noqa: E501
        "",
    ),
    "an index below 0 from the begin": (
        lambda b, h, i, j: _ids[i - 300] > 2, ROWS,
        "place = Range{place.low + size, place.high + size};",
        "place = Range{place.low, place.high};",
    ),
    "the first element for all": (
        documents, ROWS,
        "l <= high(0); l +=",
        "l <= low(0); l +=",
    ),
    "every other element": (
        lambda b, h, i, j: (_ids[i] == 2) & (_odd[j] == 0), (290, 270, Tiles(32, 128)),
        "l += together ? kLanes : 1",
        "l += together ? 2 * kLanes : 1",
    ),
    "a lane's share for that of all": (
        documents, ROWS,
        "for (int bit = 1; bit < kLanes; bit *= 2)",
        "for (int bit = 1; bit < 8; bit *= 2)",
    ),
    "keys where rows are": (
        documents, ROWS,
        "if (behind < 0)",
        "if (behind < 1)",
    ),
    "another tile of keys": (
        documents, ROWS,
        "places_of(behind, KEYS",
        "places_of(tile, KEYS",
    ),
    "keys from 0": (
        lambda b, h, i, j: _ids[j] == 1, ROWS,
        "KEYS, p.seqlen_k, at.kv)",
        "KEYS, p.seqlen_k, 0)",
    ),
    "the last tile left out": (
        documents, ROWS,
        "i < min(first + kTiles, end)",
        "i < min(first + kTiles, end - 1)",
    ),
    "tiles of a wavefront left out": (
        documents, ROWS,
        "i += kWaves) bound_tile",
        "i += kTiles) bound_tile",
    ),
    "the first sequence's captured row for all": (
        lambda b, h, i, j: _by_head[b, j] < 4, ROWS,
        "batch = number / tiles / heads;",
        "batch = 0;",
    ),
}  # fmt: skip
# And of bounds that a workgroup computes itself.
FAULTS_OF_OWN: dict[str, Fault] = {
    "own tile left out": (
        documents, ROWS,
        "i <= most; i += kWaves",
        "i < most; i += kWaves",
    ),
    "own tiles of a wavefront left out": (
        documents, (290, 400, Tiles(32, 8)),
        "i <= most; i += kWaves",
        "i <= most; i += 2 * kWaves",
    ),
    "own rows where keys are": (
        documents, ROWS,
        "if ((i < most) == OWNS_KEYS)",
        "if ((i < most) != OWNS_KEYS)",
    ),
    "own tile's bounds are the first tile's": (
        documents, ROWS,
        "meeting.bounds[OWNS_KEYS ? tile : most]",
        "meeting.bounds[OWNS_KEYS ? tile : 0]",
    ),
    "own bounds from another head": (
        lambda b, h, i, j: _by_head[h, j] < 4, ROWS,
        "h{at.h, at.h}, found[kTabled]",
        "h{0, 0}, found[kTabled]",
    ),
    "own least for the largest": (
        documents, ROWS,
        "meeting.bounds[i][2 * j + 1] = found[j].high;",
        "meeting.bounds[i][2 * j + 1] = found[j].low;",
    ),
}  # fmt: skip
OF_A_TABLE = ("the rows' table for keys", "the first head's table")
SHIFTED = ("places from 0", "keys from 0")
BY_FAULT = {
    **{name: (KERNEL, fault) for name, fault in (FAULTS | FAULTS_OF_OWN).items()},
    **{name: (BOUNDS, fault) for name, fault in FAULTS_OF_BOUNDS.items()},
}


@pytest.mark.parametrize("fault", BY_FAULT)
def test_fault_is_caught(fault: str, plant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, (mask, (rows, keys, tiles), snippet, other) = BY_FAULT[fault]
    if fault in FAULTS_OF_BOUNDS or fault in OF_A_TABLE:
        monkeypatch.setattr(block_lists, "MOST_OWN", 0)
    places = PLACES if fault in SHIFTED else {}
    assert not differs(mask, rows, keys, tiles, **places)
    plant(kernel, snippet, other)
    assert differs(mask, rows, keys, tiles, **places)
