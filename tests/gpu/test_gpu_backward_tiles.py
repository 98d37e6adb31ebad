"""Each tile of Hopper's backward that sizes may choose, the general ones too, with every mask.

Cases of the conformance suite are small, and so have few of them, and mostly fewer work tiles than
a GPU has SMs. On two SMs persistent blocks take many."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pyfa.backends import BACKENDS
from pyfa.backends.cuda import backward, backward_grid
from pyfa.backends.native.tiles import Pair, sm90
from pyfa.conformance import runner
from pyfa.conformance.cases import Case

FEW_SMS = Path(__file__).parents[2] / "benchmarks" / "few_sms.py"
TILES = [
    pytest.param(pair, tiles, id=f"{pair[0]}-{tiles.groups}x{tiles.block_q}-{tiles.block_k}")
    for pair in sm90.BACKWARD_OF_GRID
    for tiles in (sm90.BACKWARD[pair], *backward_grid.all_tiles(pair))
]


def cases(pair: Pair) -> list[Case]:
    """Rows and keys around the edges of tiles; few keys, so that blocks end beyond a sequence."""
    base: dict[str, Any] = {"heads_q": 4, "heads_k": 4, "backward": True}
    base |= {"head_dim": pair[0], "head_dim_v": pair[1]}
    lengths = [(1, 1), (50, 50), (64, 65), (197, 197), (257, 130), (300, 300), (391, 77)]
    dense = [
        Case(lengths_q=(rows,) * 2, lengths_k=(keys,) * 2, dtype=dtype, **base, **more)
        for rows, keys in lengths
        for dtype in ("float16", "bfloat16")
        for more in ({}, {"causal": True}, {"window": (64, 0)}, {"sinks": True, "dlse": "both"})
    ]
    packed: dict[str, Any] = {"kind": "varlen", "used_q": True, "used_k": True, "slack": 3}
    of_groups = {**base, "heads_q": 8, "heads_k": 2}
    return [
        *dense,
        Case(lengths_q=(70, 0, 133, 16), lengths_k=(70, 5, 239, 16), **packed, **base),
        Case(lengths_q=(70, 0, 133), lengths_k=(70, 5, 39), causal=True, **packed, **of_groups),
        Case(lengths_q=(260,), lengths_k=(260,), causal=True, sinks=True, **of_groups),
    ]


@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize("two_sms", [False, True], ids=["all SMs", "two SMs"])
@pytest.mark.parametrize(("pair", "tiles"), TILES)
def test_every_tile_has_the_gradients_of_all_masks(
    pair: Pair,
    tiles: sm90.OwnBackward,
    two_sms: bool,
    monkeypatch: pytest.MonkeyPatch,
    nothing_bound: Callable[[], None],
) -> None:
    chosen = None if tiles == sm90.BACKWARD[pair] else tiles
    monkeypatch.setattr(backward_grid, "tiles_for", lambda *_: chosen)
    made, asked = backward.sm90_plans_of, set()

    def noted(*args: Any, **more: Any) -> Any:
        found = made(*args, **more)
        constants = dict(found[1].constants)
        asked.add((constants["GROUPS"], constants["BLOCK_Q"]))
        return found

    monkeypatch.setattr(backward, "sm90_plans_of", noted)
    if two_sms:
        runpy.run_path(str(FEW_SMS))["run_on"](2, monkeypatch.setattr)
    where = runner.device_of("cuda")
    found = [runner.run_case(BACKENDS["cuda"], case, where) for case in cases(pair)]
    assert {each.name: each.messages for each in found if each.status != "passed"} == {}
    # Masks over as many rows as keys; others have the general tiles.
    assert (tiles.groups, tiles.block_q) in asked
