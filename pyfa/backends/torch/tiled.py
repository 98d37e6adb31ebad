"""Attention in tiles of eager PyTorch: every feature, any device, memory linear in the lengths.

Forward is FlashAttention-2's loop (Dao 2023, algorithm 1) and backward its algorithm 2: the row
maximum and sum are carried along the keys, and backward recomputes P from the LSE. Tiles are
computed in float32, so P is not rounded before the second product.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from ... import blocks, mods
from ...blocks import Tiles, Visits
from ...blocks.build import EMPTY, PARTIAL, WHOLE
from ...mods.evaluate import evaluate, inside
from ...mods.ir import Function
from ...problem import Call
from ..base import Gradients, Saved
from . import philox
from .rows import Rows, key_rows, query_rows

# Scores in flight. On 2 CPU cores 2^18 is 1.2 times slower than 2^19 … 2^23, all alike (causal
# 2048 x 8 x 64 with softcap, forward and backward): 4 MB of float32. A GPU wants more per launch.
_TILE_SCORES = {"cpu": 1 << 20, "cuda": 1 << 25}
# Rows and keys of every tile, the last ones too, where nothing may hang on the batch: a BLAS
# chooses its order of sums by the sizes of a product.
WHOLE_TILE = 32, 256


@dataclass(frozen=True)
class _Tile:
    """One block of scores: rows begin_q … end_q against keys begin_k … end_k. ``is_full``: the
    mask_mod masks nothing there."""

    begin_q: int
    end_q: int
    begin_k: int
    end_k: int
    is_full: bool = False


class _Grid:
    """Tile sizes, what each tile can see, and the score function of one call."""

    def __init__(self, call: Call, lists: bool = True) -> None:
        self.call = call
        self.rows, self.keys = query_rows(call), key_rows(call)
        self.heads = call.q.shape[-2]
        self.heads_k = call.k.shape[-2]
        self.device = call.q.device
        budget = _TILE_SCORES.get(self.device.type, 1 << 20) // max(1, call.batch * self.heads)
        self.step_q = min(256, max(32, budget >> 9))
        self.step_k = min(512, max(64, budget // self.step_q))
        self.whole = call.batch_invariant
        if self.whole:
            self.step_q, self.step_k = WHOLE_TILE
        # Query i sits at key i + shift. One number where all sequences agree, else (B, 1, 1, 1).
        self.mods = mods.of(call.mods) if call.mods else None
        self.visits = self._visits() if lists else None
        offset = call.q_start - call.k_start
        self.shift: int | torch.Tensor = self.keys.longest - self.rows.longest + offset
        if not (self.rows.uniform and self.keys.uniform):
            keys = self.keys.lengths if self.keys.lengths is not None else self.keys.longest
            rows = self.rows.lengths if self.rows.lengths is not None else self.rows.longest
            self.shift = (keys - rows + offset).reshape(-1, 1, 1, 1)  # type: ignore[union-attr]

    def row_blocks(self) -> list[tuple[int, int]]:
        return self._blocks(self.rows.longest, self.step_q)

    def _blocks(self, length: int, step: int) -> list[tuple[int, int]]:
        last = length + step if self.whole else length
        return [(begin, min(begin + step, last)) for begin in range(0, length, step)]

    def tiles(self, begin_q: int, end_q: int) -> list[_Tile]:
        """Return the tiles of these rows that are not fully masked."""
        first, last = 0, self.keys.longest
        if isinstance(self.shift, int):
            middle = self.shift + self.call.window_shift
            if self.call.window_right >= 0:
                last = min(last, end_q + middle + self.call.window_right)
            if self.call.window_left >= 0:
                first = max(first, begin_q + middle - self.call.window_left)
            if self.call.attention_chunk:
                first = max(first, self._chunk_of(begin_q + self.shift))
                end = self._chunk_of(end_q - 1 + self.shift) + self.call.attention_chunk
                last = min(last, end)
        spans = self._blocks(last, self.step_k)
        tiles = [_Tile(begin_q, end_q, a, b) for a, b in spans if b > first]
        if self.visits is None:
            return tiles
        row = self.visits[begin_q // self.step_q]
        states = [row[tile.begin_k // self.step_k] for tile in tiles]
        return [
            replace(tile, is_full=state == WHOLE)
            for tile, state in zip(tiles, states, strict=True)
            if state != EMPTY
        ]

    def _visits(self) -> list[list[int]] | None:
        """Return the state of each tile under the mask_mod, by tiles of rows and keys; None if
        every tile is visited. All sequences and heads share one tile here. On a GPU the result is
        None, because reading it would wait for the device."""
        mask = None if self.mods is None else self.mods.mask
        if mask is None or not blocks.is_exact(mask) or self.device.type != "cpu":
            return None
        return blocks.states_across(self.call, self.step_q, self.step_k)

    def _chunk_of(self, key: Any) -> Any:
        """Return the first key of the chunk that ``key`` is in, in chunks of the larger problem."""
        key = key + self.call.k_start
        return key - key % self.call.attention_chunk - self.call.k_start

    def queries(
        self, x: torch.Tensor, begin: int, end: int, descale: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return (B, Hk, group·rows, dim) float32: the query heads that share a KV head are
        adjacent."""
        rows = self.rows.tile(x, begin, end, descale)
        grouped: torch.Tensor = rows.unflatten(2, (self.heads_k, -1))
        return self._laid_out(grouped.permute(0, 2, 3, 1, 4).flatten(2, 3))

    def keys_of(
        self, x: torch.Tensor, tile: _Tile, descale: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return k or v as (B, Hk, keys, dim) float32."""
        rows = self.keys.tile(x, tile.begin_k, tile.end_k, descale)
        return self._laid_out(rows.transpose(1, 2))

    def _laid_out(self, x: torch.Tensor) -> torch.Tensor:
        """Return the tensor in one fixed layout, because results of a BLAS may depend on the
        layout."""
        return x.contiguous() if self.whole else x

    def from_queries(self, x: torch.Tensor, rows: int) -> torch.Tensor:
        """Return the inverse of ``queries``: (B, rows, H, dim)."""
        split: torch.Tensor = x.unflatten(2, (-1, rows))
        return split.permute(0, 3, 1, 2, 4).flatten(2, 3)

    def by_head(self, x: torch.Tensor, rows: int) -> torch.Tensor:
        """Reshape (B, Hk, group·rows, n) to (B, H, rows, n)."""
        split: torch.Tensor = x.unflatten(2, (-1, rows))
        return split.flatten(1, 2)

    def grouped(self, x: torch.Tensor) -> torch.Tensor:
        """Reshape (B, H, rows, n) to (B, Hk, group·rows, n)."""
        split: torch.Tensor = x.unflatten(1, (self.heads_k, -1))
        return split.flatten(2, 3)

    def scores(
        self, q: torch.Tensor, k: torch.Tensor, tile: _Tile
    ) -> tuple[torch.Tensor, torch.Tensor | None, dict[str, torch.Tensor]]:
        """Compute everything between q·k and softmax: (B, H, rows, keys), −inf where masked. Also
        return d score / d (scale · q·k), None if it is 1, and the arguments of the score_mod."""
        call = self.call
        score = self.by_head(q @ k.transpose(-1, -2), tile.end_q - tile.begin_q)
        score = score * call.scale
        slope = None
        inputs: dict[str, torch.Tensor] = {}
        if call.softcap:
            capped = torch.tanh(score / call.softcap)
            score, slope = call.softcap * capped, 1.0 - capped.square()
        if self.mods is not None and self.mods.slope is not None:
            inputs = {"score": score, **self._places(tile)}
            given, of_mod = evaluate(self.mods.slope, inputs, call.captured)
            score = given.expand(score.shape)
            slope = of_mod if slope is None else slope * of_mod
        row = torch.arange(tile.begin_q, tile.end_q, device=self.device)[:, None]
        key = torch.arange(tile.begin_k, tile.end_k, device=self.device)
        distance = key - row - self.shift
        if call.alibi_slopes is not None:
            score = score - call.alibi_slopes[..., None, None] * distance.abs()
        hidden = self._hidden(distance - call.window_shift, tile)
        if call.attention_chunk:
            other = self._chunk_of(key) != self._chunk_of(key - distance)
            hidden = other if hidden is None else hidden | other
        tree, bias = call.tree, None if call.tree else self.bias_tile(tile)
        if tree:
            pruned = self._pruned(distance, tile)
            hidden = pruned if hidden is None else hidden | pruned
        if bias is not None:
            if bias.dtype == torch.bool:
                hidden = ~bias if hidden is None else hidden | ~bias
            else:
                score = score + bias.float()
        if self.mods is not None and self.mods.mask is not None and not tile.is_full:
            places = {"score": score, **self._places(tile)}
            (seen,) = evaluate(self.mods.mask, places, call.captured)
            hidden = ~seen if hidden is None else hidden | ~seen
        score = score if hidden is None else score.masked_fill(hidden, -torch.inf)
        return score, slope, inputs

    def _places(self, tile: _Tile) -> dict[str, torch.Tensor]:
        """Return the indices that mods receive: sequence, head, row and key, relative to the whole
        problem."""
        call = self.call
        return {
            "b": self._from(call.batch_start, call.batch).int()[:, None, None, None],
            "h": self._from(call.head_start, self.heads).int()[:, None, None],
            "q": self._from(call.q_start + tile.begin_q, tile.end_q - tile.begin_q).int()[:, None],
            "kv": self._from(call.k_start + tile.begin_k, tile.end_k - tile.begin_k).int(),
        }

    def bias_tile(self, tile: _Tile) -> torch.Tensor | None:
        """Return the part of the bias for this tile; broadcast dimensions stay 1."""
        bias = self.call.bias
        if bias is None:
            return None
        if bias.shape[2] > 1:
            bias = bias[:, :, tile.begin_q : tile.end_q]
        if bias.shape[3] > 1:
            bias = bias[..., tile.begin_k : tile.end_k]
        if self.whole:
            sizes = tile.end_q - tile.begin_q, tile.end_k - tile.begin_k
            rows, keys = (
                0 if stored == 1 else size - stored
                for stored, size in zip(bias.shape[2:], sizes, strict=True)
            )
            bias = torch.nn.functional.pad(bias, (0, keys, 0, rows))
        return bias

    def _pruned(self, distance: torch.Tensor, tile: _Tile) -> torch.Tensor:
        """Return what ``tree_mask`` masks. ``distance`` counts from each row's own key."""
        mask, batch = self.call.bias, self.call.batch
        assert mask is not None
        row = torch.arange(tile.begin_q, tile.end_q, device=self.device)
        column, last = (distance + row[:, None]).expand(batch, 1, -1, -1), mask.shape[-1] - 1
        rows = mask.expand(batch, -1, -1)[:, None, row.clamp(max=last)]
        return ~rows.gather(-1, column.clamp(0, last)) & (column >= 0)

    def _hidden(self, distance: torch.Tensor, tile: _Tile) -> torch.Tensor | None:
        call, hidden = self.call, None
        if call.window_right >= 0 and self._cuts_right(tile):
            hidden = distance > call.window_right
        if call.window_left >= 0:
            left = distance < -call.window_left
            hidden = left if hidden is None else hidden | left
        exists = self.keys.valid(tile.begin_k, tile.end_k)
        if exists is not None:
            missing = ~exists[:, None, None, :]
            hidden = missing if hidden is None else hidden | missing
        return hidden

    def _cuts_right(self, tile: _Tile) -> bool:
        if not isinstance(self.shift, int):
            return True
        right = self.call.window_shift + self.call.window_right
        return tile.end_k - 1 > tile.begin_q + self.shift + right

    def dropout(self, tile: _Tile) -> torch.Tensor | None:
        """Return 1/(1−p) where kept and 0 where dropped, (B, H, rows, keys); None without
        dropout."""
        call = self.call
        if call.seed is None:
            return None
        kept = philox.keep(
            call.seed,
            call.dropout_p,
            self._from(call.k_start + tile.begin_k, tile.end_k - tile.begin_k),
            self._from(call.q_start + tile.begin_q, tile.end_q - tile.begin_q)[:, None],
            self._from(call.head_start, self.heads)[:, None, None],
            self._from(call.batch_start, call.batch)[:, None, None, None],
        )
        return kept.float() / (1.0 - call.dropout_p)

    def _from(self, start: int, count: int) -> torch.Tensor:
        return torch.arange(start, start + count, device=self.device)


def visits(call: Call) -> tuple[Tiles, Visits | None] | None:
    """Implement ``base.Listing.visits``."""
    if call.q.device.type != "cpu" or not blocks.is_exact(blocks.mask_of(call)):
        return None
    grid = _Grid(call, lists=blocks.is_quick(call))
    tiles = Tiles(grid.step_q, grid.step_k)
    if grid.visits is None:
        return tiles, None
    states = [state for row in grid.visits for state in row]
    return tiles, Visits(len(states), states.count(PARTIAL), states.count(WHOLE))


def forward(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    grid = _Grid(call)
    out, lse = _empty_results(call, grid.rows)
    for begin_q, end_q in grid.row_blocks():
        block_out, block_lse = _forward_rows(grid, begin_q, end_q)
        grid.rows.put(out, block_out, begin_q, end_q)
        grid.rows.put(lse, block_lse, begin_q, end_q)
    if grid.rows.packed:
        return out[:-1], lse[:-1, :, 0].T.contiguous()
    return out, lse[..., 0].transpose(1, 2).contiguous()


def _empty_results(call: Call, rows: Rows) -> tuple[torch.Tensor, torch.Tensor]:
    """Return out and LSE (…, heads, 1) as for fully masked rows; with one more row if packed."""
    first, *rest = call.out_shape()
    shape = (first + 1, *rest) if rows.packed else (first, *rest)
    out = call.q.new_zeros(shape, dtype=call.dtype_of_out())
    return out, call.q.new_full((*shape[:-1], 1), -torch.inf, dtype=torch.float32)


def _forward_rows(grid: _Grid, begin_q: int, end_q: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return out (B, rows, H, Dv) and LSE (B, rows, H, 1) of one block of rows."""
    call, rows = grid.call, end_q - begin_q
    q = grid.queries(call.q, begin_q, end_q, call.q_descale)
    maximum = q.new_full((call.batch, grid.heads, rows, 1), -torch.inf)
    if call.sinks is not None:
        # A sink is one more logit that has no value row: the state after having seen it.
        maximum = maximum.maximum(call.sinks[:, None, None])
    total = (maximum > -torch.inf).float()
    acc = q.new_zeros((*q.shape[:-1], call.v.shape[-1]))
    for tile in grid.tiles(begin_q, end_q):
        k, v = (
            grid.keys_of(call.k, tile, call.k_descale),
            grid.keys_of(call.v, tile, call.v_descale),
        )
        score, _, _ = grid.scores(q, k, tile)
        raised = torch.maximum(maximum, score.amax(-1, keepdim=True))
        # While a row has seen nothing its maximum is −inf, and −inf − −inf would be NaN.
        base = raised.masked_fill(raised == -torch.inf, 0.0)
        rescale = torch.exp(maximum - base)
        p = torch.exp(score - base)
        total = total * rescale + p.sum(-1, keepdim=True)
        drop = grid.dropout(tile)
        if drop is not None:
            p = p * drop
        acc = acc * grid.grouped(rescale) + grid.grouped(p) @ v
        maximum = raised
    seen = total != 0  # NaN has to come through
    total = torch.where(seen, total, 1.0)
    lse = torch.where(seen, maximum + torch.log(total), -torch.inf)
    out = acc / grid.grouped(total)
    return grid.from_queries(out, rows), lse.transpose(1, 2)


def backward(saved: Saved, bias_grad: bool) -> Gradients:
    call, out, lse, dout, dlse = saved
    grid = _Grid(call)
    dq, dk, dv = (torch.zeros_like(x, dtype=torch.float32) for x in (call.q, call.k, call.v))
    dbias = None
    if bias_grad:
        assert call.bias is not None
        dbias = torch.zeros_like(call.bias, dtype=torch.float32)
    dsinks = torch.zeros_like(call.sinks) if call.sinks is not None else None
    of_loads = grid.mods.of_loads if grid.mods is not None else ()
    wanted = grid.mods.wanted if grid.mods is not None else frozenset()
    sums = {slot: _zeros_of(call.captured[slot]) for slot in wanted}
    for begin_q, end_q in grid.row_blocks():
        rows = end_q - begin_q
        q = grid.queries(call.q, begin_q, end_q)
        do = grid.queries(dout, begin_q, end_q)
        row_lse = _row_values(grid, lse, begin_q, end_q)
        # delta = rowsum(dO∘O) − dLSE: what every dP of the row is measured against.
        delta = (do * grid.queries(out, begin_q, end_q)).sum(-1, keepdim=True)
        delta = grid.by_head(delta, rows)
        if dlse is not None:
            delta = delta - _row_values(grid, dlse, begin_q, end_q)
        saw = row_lse != -torch.inf
        exists = grid.rows.valid(begin_q, end_q)
        if exists is not None:
            # The bias of a row that does not exist may be NaN, and 0 · NaN would reach dK and dV.
            saw = saw & exists[:, None, :, None]
        base = torch.where(saw, row_lse, 0.0)
        if dsinks is not None and call.sinks is not None:
            p_sink = torch.exp(call.sinks[:, None, None] - base)
            dsinks -= torch.where(saw, p_sink * delta, 0.0).sum((0, 2, 3))
        dq_rows = torch.zeros_like(q)
        for tile in grid.tiles(begin_q, end_q):
            k, v = grid.keys_of(call.k, tile), grid.keys_of(call.v, tile)
            score, slope, given = grid.scores(q, k, tile)
            p = torch.where(saw, torch.exp(score - base), 0.0)
            dp = grid.by_head(do @ v.transpose(-1, -2), rows)
            p_dropped = p
            drop = grid.dropout(tile)
            if drop is not None:
                p_dropped, dp = p * drop, dp * drop
            ds = p * (dp - delta)
            if dbias is not None:
                part = _bias_part(dbias, tile)
                stored = (
                    size if alike == 1 else alike
                    for alike, size in zip(part.shape[2:], ds.shape[2:], strict=True)
                )
                rows_of, keys_of = stored
                part += ds[:, :, :rows_of, :keys_of].sum_to_size(part.shape)
            for slot, derivative in of_loads:
                _add_captured(sums[slot], slot, derivative, given, call.captured, p, ds)
            if slope is not None:
                # Where P is 0, the slope may be infinite or NaN, for example if a score_mod masks
                # with -inf.
                ds = torch.where(p == 0.0, 0.0, ds * slope)
            ds = grid.grouped(ds) * call.scale
            dq_rows += ds @ k
            for storage, part in ((dk, ds.mT @ q), (dv, grid.grouped(p_dropped).mT @ do)):
                grid.keys.add(storage, part.transpose(1, 2), tile.begin_k, tile.end_k)
        grid.rows.add(dq, grid.from_queries(dq_rows, rows), begin_q, end_q)
    return Gradients(
        dq.to(call.q.dtype),
        dk.to(call.k.dtype),
        dv.to(call.v.dtype),
        dbias.to(call.bias.dtype) if dbias is not None and call.bias is not None else None,
        dsinks,
        [
            sums[slot].view(x.shape).to(x.dtype) if slot in wanted else None
            for slot, x in enumerate(call.captured if wanted else ())
        ],
    )


def _zeros_of(x: torch.Tensor) -> torch.Tensor:
    """Return a flat accumulator for the gradient of a captured tensor, to which every score may
    contribute. It is float64 on a CPU, and float32 on a GPU, where sorting float64 is slow."""
    dtype = torch.float64 if x.is_cpu else torch.float32
    return torch.zeros(x.numel(), dtype=dtype, device=x.device)


def _add_captured(
    total: torch.Tensor,
    slot: int,
    derivative: Function,
    given: dict[str, torch.Tensor],
    captured: tuple[torch.Tensor, ...],
    p: torch.Tensor,
    ds: torch.Tensor,
) -> None:
    """Add the gradient of one load of a captured tensor in one tile to ``total``, always in the
    same order. ``derivative`` is the derivative of the score_mod with respect to that load."""
    slope, *indices = evaluate(derivative, given, captured)
    part = torch.where(p == 0.0, 0.0, ds * slope).to(total.dtype)
    place = torch.zeros((), dtype=torch.int64, device=p.device)
    for index, size in zip(indices, captured[slot].shape, strict=True):
        place = place * size + inside(index, size)
    # Summed first over what does not choose the element.
    place = place.reshape((1,) * (4 - place.dim()) + place.shape)
    where, what = place.flatten(), part.sum_to_size(place.shape).flatten()
    if total.is_cpu:
        total.index_add_(0, where, what)
    else:
        total.index_put_((where,), what, accumulate=True)  # sorts, where index_add_ has atomics


def _row_values(grid: _Grid, x: torch.Tensor, begin: int, end: int) -> torch.Tensor:
    """Return (B, H, rows, 1) of a tensor shaped like the LSE."""
    heads_last = x.T if grid.rows.packed else x.transpose(1, 2)
    return grid.rows.tile(heads_last[..., None], begin, end).transpose(1, 2)


def _bias_part(dbias: torch.Tensor, tile: _Tile) -> torch.Tensor:
    rows = slice(tile.begin_q, tile.end_q) if dbias.shape[2] > 1 else slice(None)
    keys = slice(tile.begin_k, tile.end_k) if dbias.shape[3] > 1 else slice(None)
    return dbias[:, :, rows, keys]
