"""The positions of the rows of each sequence: dense, packed, paged or padded, behind one
interface."""

from __future__ import annotations

import torch

from ...problem import Call, scales_of

Index = tuple[torch.Tensor | slice, ...]


class Rows:
    """Rows 0 … ``longest``−1 of every sequence in a tensor (…, heads, dim), read in tiles.

    ``lengths`` is (B,), or None if every sequence has ``longest`` rows. ``start`` is the storage
    position of row 0: the packed offset, or the left padding. ``whole``: tiles may extend beyond
    the last row, so that all have one size.
    """

    def __init__(
        self,
        longest: int,
        storage: torch.Tensor,
        packed: bool,
        lengths: torch.Tensor | None = None,
        start: torch.Tensor | None = None,
        page_table: torch.Tensor | None = None,
        batch_idx: torch.Tensor | None = None,
        whole: bool = False,
    ) -> None:
        self.lengths = lengths
        self.packed = packed
        self.start = start
        self.page_table = page_table
        self.batch_idx = batch_idx
        self.page_size = storage.shape[1] if page_table is not None else 0
        self.capacity = (
            page_table.shape[1] * self.page_size
            if page_table is not None
            else storage.shape[0 if packed else 1]
        )
        self.device = storage.device
        if storage.shape[0] == 0:
            self.capacity = 0
        if self.capacity == 0:
            longest = 0
        elif lengths is not None and lengths.is_cpu:
            # A generous max_seqlen must not cost a tile for each of its rows.
            longest = min(longest, max([0, *lengths.tolist()]))
        self.longest = longest
        # Whether all sequences have as many rows, none of which lies beyond the end.
        self.uniform = lengths is None
        if whole and lengths is None:
            batch = storage.shape[0] if batch_idx is None else batch_idx.shape[0]
            if page_table is not None:
                batch = page_table.shape[0]
            self.lengths = torch.full((batch,), longest, device=self.device)
        if whole and start is None:
            assert self.lengths is not None
            self.start = torch.zeros_like(self.lengths)

    def valid(self, begin: int, end: int) -> torch.Tensor | None:
        """Return (B, end−begin): which of these rows exist; None if all do."""
        if self.lengths is None:
            return None
        return torch.arange(begin, end, device=self.device) < self.lengths[:, None]

    def index(self, begin: int, end: int) -> Index:
        """Return the index into the storage that gives (B, end−begin, heads, dim).

        Rows that do not exist point to some row that does; ``tile`` and ``add`` zero them.
        """
        plain = self.start is None and self.page_table is None and self.batch_idx is None
        if plain and not self.packed:
            return (slice(None), slice(begin, end))
        position = torch.arange(begin, end, device=self.device)[None, :]
        if self.start is not None:
            position = position + self.start[:, None].long()
        position = position.clamp(0, self.capacity - 1)
        if self.packed:
            return (position,)
        if self.page_table is not None:
            sequence = torch.arange(self.page_table.shape[0], device=self.device)[:, None]
            page = self.page_table[sequence, position // self.page_size].long()
            exists = self.valid(begin, end)
            if exists is not None:
                # Entries beyond the used pages may hold anything.
                page = torch.where(exists, page, 0)
            return (page, (position % self.page_size).expand(page.shape))
        if self.batch_idx is not None:
            sequence = self.batch_idx.long()[:, None]
        else:
            assert self.start is not None
            sequence = torch.arange(self.start.shape[0], device=self.device)[:, None]
        return (sequence, position)

    def tile(
        self, storage: torch.Tensor, begin: int, end: int, descale: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return rows ``begin`` to ``end`` as float32 (B, rows, heads, dim), zero if a row does not
        exist.

        ``descale``: the scales of the storage, as in ``Call``. If there are fewer scales than
        heads, equal groups of consecutive heads share one.
        """
        rows = storage[self.index(begin, end)].float()
        if descale is not None:
            scales = self._scales(descale, storage, begin, end)
            rows = (rows.unflatten(2, (scales.shape[2], -1)) * scales[..., None]).flatten(2, 3)
        exists = self.valid(begin, end)
        if exists is not None:
            # where, not a product: what lies beyond a sequence's end may be NaN.
            rows = torch.where(exists[:, :, None, None], rows, 0.0)
        return rows

    def _scales(
        self, descale: torch.Tensor, storage: torch.Tensor, begin: int, end: int
    ) -> torch.Tensor:
        """Return the scales of rows ``begin`` to ``end``: (B, rows, Hk, 1)."""
        if descale.dim() == 2:
            return descale[:, None, :, None]
        size = scales_of(descale, storage)
        *place, position = self.index(begin, end)
        if isinstance(position, slice):
            block = torch.arange(begin, end, device=self.device) // size
            return descale.transpose(1, 2)[:, block][..., None]
        # A packed tensor's scales count as those of one sequence.
        first = place[0] if place else torch.zeros_like(position)
        return descale.transpose(1, 2)[first, position // size][..., None]

    def add(self, total: torch.Tensor, rows: torch.Tensor, begin: int, end: int) -> None:
        """Add ``rows`` (as ``tile`` returns them) to their positions in ``total``."""
        exists = self.valid(begin, end)
        if exists is not None:
            rows = torch.where(exists[:, :, None, None], rows, 0.0)
        index = self.index(begin, end)
        tensors: list[torch.Tensor | None] = [x for x in index if isinstance(x, torch.Tensor)]
        if tensors:
            # Sums duplicates (pages that sequences share) by sorting: the same bits on every run.
            total.index_put_(tensors, rows, accumulate=True)
        else:
            total[:, begin:end] += rows

    def put(self, total: torch.Tensor, rows: torch.Tensor, begin: int, end: int) -> None:
        """Write the rows that exist; ``total`` keeps its value elsewhere.

        A packed ``total`` has one row more than the storage, to which rows that do not exist are
        written.
        """
        exists = self.valid(begin, end)
        if not self.packed:
            part = total[:, begin:end]
            stored = part.shape[1]
            if exists is not None:
                rows = torch.where(exists[:, :stored, None, None], rows[:, :stored], part)
            part.copy_(rows)
            return
        (position,) = self.index(begin, end)
        assert isinstance(position, torch.Tensor)
        if exists is not None:
            position = torch.where(exists, position, self.capacity)
        total[position] = rows.to(total.dtype)


def query_rows(call: Call) -> Rows:
    lengths, start = call.seqused_q, None
    packed = call.cu_seqlens_q is not None
    if call.cu_seqlens_q is not None:
        start = call.cu_seqlens_q[:-1]
        if lengths is None:
            lengths = call.cu_seqlens_q[1:] - start
    return Rows(call.max_seqlen_q, call.q, packed, lengths, start, whole=call.batch_invariant)


def key_rows(call: Call) -> Rows:
    lengths, start = call.seqused_k, call.cache_leftpad
    packed = call.cu_seqlens_k is not None
    if call.cu_seqlens_k is not None:
        start = call.cu_seqlens_k[:-1]
        if lengths is None:
            lengths = call.cu_seqlens_k[1:] - start
    elif call.cache_leftpad is not None:
        stored = lengths if lengths is not None else call.max_seqlen_k
        lengths = stored - call.cache_leftpad
    return Rows(
        call.max_seqlen_k,
        call.k,
        packed,
        lengths,
        start,
        call.page_table,
        call.cache_batch_idx,
        call.batch_invariant,
    )
