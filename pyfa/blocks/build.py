"""Evaluates a mask_mod tile by tile, without a rows × keys matrix in memory."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from .. import _torch, mods
from ..mods import Function
from ..mods.evaluate import evaluate
from ..problem import Call

EMPTY, PARTIAL, WHOLE = 0, 1, 2

# Scores looked at together: 4 MB of truth values on a CPU, 64 MB on a GPU.
_AT_ONCE = {"cpu": 1 << 22, "cuda": 1 << 26}


class Tiles(NamedTuple):
    """The size of a tile, ``rows`` × ``keys``. A list belongs to a tile of rows and names tiles of
    keys; with ``owned`` = "keys" it is the other way round."""

    rows: int
    keys: int
    owned: str = "rows"


def counts_of(call: Call, tiles: Tiles) -> tuple[int, int]:
    """Return the number of owned tiles, and of the tiles that lists name."""
    rows, keys = -(-call.max_seqlen_q // tiles.rows), -(-call.max_seqlen_k // tiles.keys)
    return (rows, keys) if tiles.owned == "rows" else (keys, rows)


_SPAN = 64  # keys whose tile is visited if one of them is seen
_SAMPLED_ROWS, _SAMPLED_KEYS = 8, 1024  # PyTorch looks at these on one thread


@functools.lru_cache(1024)
def keys_visited(digest: str, rows: int, keys: int) -> int:
    """Return about how many keys a row visits, in tiles of 64 keys, at most over all rows.

    This is an estimate from a sample of rows and keys, of the first sequence and head, for choosing
    tiles. It is ``keys`` if the mask_mod of ``digest`` reads captured tensors.
    """
    mask = mods.of(digest).mask
    if mask is None or any(op.name == "load" for op in mask.ops):
        return keys
    if not rows or not keys:
        return 0
    step = 1
    while step < _SPAN and keys > _SAMPLED_KEYS * step:
        step *= 2
    with _torch.outside_modes():
        zero = torch.zeros((), dtype=torch.int32)
        at_rows = torch.linspace(0, rows - 1, min(rows, _SAMPLED_ROWS)).to(torch.int32)[:, None]
        at_keys = torch.arange(0, keys, step, dtype=torch.int32)
        inputs = {"score": zero.float(), "b": zero, "h": zero, "q": at_rows, "kv": at_keys}
        (seen,) = evaluate(mask, inputs, ())
        seen = seen.expand(len(at_rows), len(at_keys))
        seen = torch.nn.functional.pad(seen, (0, -len(at_keys) % (_SPAN // step)))
        visited = seen.unflatten(1, (-1, _SPAN // step)).any(2).sum(1).max()
        return min(keys, _SPAN * int(visited))


def asks_for(function: Function, name: str) -> bool:
    """Return whether the function depends on its input ``name``."""
    return any(op.name == "input" and op.value == name for op in function.ops)


def lines_of(call: Call, function: Function) -> tuple[int, int]:
    """Return the number of sequences, and of heads, for which the function differs; otherwise 1."""
    batch = call.batch if asks_for(function, "b") else 1
    return batch, call.q.shape[-2] if asks_for(function, "h") else 1


def states_of(call: Call, mask: Function, tiles: Tiles) -> torch.Tensor:
    """Return EMPTY, PARTIAL or WHOLE of each tile, uint8 (B', H', owned, streamed)."""
    batch, heads = lines_of(call, mask)
    rows, keys = -(-call.max_seqlen_q // tiles.rows), -(-call.max_seqlen_k // tiles.keys)
    device = call.q.device
    found = torch.zeros(batch, heads, rows, keys, dtype=torch.uint8, device=device)
    budget = max(1, _AT_ONCE.get(device.type, 1 << 22) // (tiles.rows * tiles.keys))
    across = min(keys, budget)
    down = min(rows, max(1, budget // max(across, 1)))
    for b in range(batch):
        for h in range(heads):
            for row in range(0, rows, max(down, 1)):
                for key in range(0, keys, max(across, 1)):
                    part = found[b, h, row : row + down, key : key + across]
                    part.copy_(_states(call, mask, tiles, (b, h, row, key), part.shape))
    return found if tiles.owned == "rows" else found.transpose(2, 3)


def _states(
    call: Call, mask: Function, tiles: Tiles, at: tuple[int, int, int, int], size: torch.Size
) -> torch.Tensor:
    """Return the states of the tiles that begin at ``at``."""
    b, h, row, key = at
    device = call.q.device

    def places(first: int, count: int, end: int, start: int) -> torch.Tensor:
        # Beyond the end the last one again, which adds nothing to "any" and "all".
        inside = torch.arange(first, first + count, dtype=torch.int32, device=device)
        return inside.clamp(max=end - 1) + start

    down, across = size
    inputs = {
        "score": torch.zeros((), device=device),
        "b": torch.full((), b + call.batch_start, dtype=torch.int32, device=device),
        "h": torch.full((), h + call.head_start, dtype=torch.int32, device=device),
        "q": places(row * tiles.rows, down * tiles.rows, call.max_seqlen_q, call.q_start)[:, None],
        "kv": places(key * tiles.keys, across * tiles.keys, call.max_seqlen_k, call.k_start),
    }
    (seen,) = evaluate(mask, inputs, call.captured)
    seen = seen.expand(down * tiles.rows, across * tiles.keys)
    split: torch.Tensor = seen.unflatten(1, (across, tiles.keys)).unflatten(0, (down, tiles.rows))
    found: torch.Tensor = split.any(3).any(1).to(torch.uint8)
    return found + split.all(3).all(1).to(torch.uint8)


def listed(states: torch.Tensor, full: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``Lists.counts`` and ``Lists.entries`` for ``states``."""
    empty = states == EMPTY
    counts = (~empty).sum(-1, dtype=torch.int32)
    most = states.shape[-1]
    # Tiles that are visited come first, in ascending order.
    order = torch.sort(empty.to(torch.uint8), dim=-1, stable=True).indices
    entries = order.int()
    entries = torch.where(states.gather(-1, order) == WHOLE, entries + full, entries)
    place = torch.arange(most, device=states.device)
    entries = torch.where(place < counts[..., None], entries, most)
    return counts.contiguous(), entries.int().contiguous()
