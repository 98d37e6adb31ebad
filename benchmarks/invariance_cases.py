"""Compare rows alone with the same rows in a batch, for ``batch_invariance.py`` and the tests.

A row is one query of one sequence, with the keys up to its own. Alone it is a call of one row. In
company it is part of a batch, of a chunk of a prefill, of a packed batch; its keys lie in a cache
of some capacity or in pages; some of them are appended by the call. Bits are compared, not values.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

import pyfa

Tensors = tuple[torch.Tensor, ...]


class Model(NamedTuple):
    """The attention of a model, and what of it is drawn: sequences of up to ``longest`` tokens."""

    heads: int = 4
    heads_k: int = 2
    dim: int = 64
    dim_v: int = 64
    dtype: torch.dtype = torch.bfloat16
    window: int | None = None
    softcap: float = 0.0
    alibi: bool = False
    sinks: bool = False
    longest: int = 700
    gradient: bool = True

    def __str__(self) -> str:
        terms = [f"{name}={value}" for name, value in self._asdict().items()
                 if name in ("window", "softcap", "alibi", "sinks") and value]  # fmt: skip
        size = f"{self.heads}/{self.heads_k} heads of {self.dim}"
        size += f" and {self.dim_v}" if self.dim_v != self.dim else ""
        return ", ".join([size, str(self.dtype).removeprefix("torch."), *terms])


class Sizes(NamedTuple):
    """Of the companies."""

    batches: tuple[int, ...] = (2, 7, 64)
    chunks: tuple[int, ...] = (16, 100, 10_000)
    pages: tuple[int, ...] = (16, 48, 64, 256)
    appended: tuple[int, ...] = (1, 5)
    speculative: tuple[int, ...] = (2, 5)


class Row(NamedTuple):
    """Query ``index`` of a sequence, which sees the keys up to it."""

    sequence: int
    index: int


class Failure(NamedTuple):
    model: str
    company: str
    what: str
    row: str
    apart: float


class Tally:
    """What was compared, and what differed."""

    def __init__(self) -> None:
        self.compared: dict[str, int] = {}
        self.differed: dict[str, int] = {}
        self.failures: list[Failure] = []
        self.rows = 0

    def compare(
        self, model: Model, company: str, what: str, row: object, a: torch.Tensor, b: torch.Tensor
    ) -> None:
        kind = f"{company}: {what}"
        self.compared[kind] = self.compared.get(kind, 0) + 1
        if same_bits(a, b):
            return
        self.differed[kind] = self.differed.get(kind, 0) + 1
        apart = (a.float() - b.float()).abs().max().item()
        self.failures.append(Failure(str(model), company, what, str(row), apart))

    def add(self, other: Tally) -> None:
        for mine, theirs in ((self.compared, other.compared), (self.differed, other.differed)):
            for kind, count in theirs.items():
                mine[kind] = mine.get(kind, 0) + count
        self.failures += other.failures
        self.rows += other.rows


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors are equal, a 0 and a −0 apart, and all of their numbers finite."""
    if a.shape != b.shape or a.dtype != b.dtype or not bool(a.isfinite().all()):
        return False
    kind = {2: torch.int16, 4: torch.int32}[a.element_size()]
    return torch.equal(a.contiguous().view(kind), b.contiguous().view(kind))


class Pool:
    """Sequences of one model, and the public functions on parts of them."""

    def __init__(
        self, model: Model, lengths: Sequence[int], device: str, backend: str | None,
        invariant: bool, seed: int, plant: bool = False,
    ) -> None:  # fmt: skip
        self.plant = plant  # a dependence on the batch
        self.model, self.lengths, self.device = model, list(lengths), torch.device(device)
        self.draw = random.Random(seed)
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
            return (torch.randn(shape, generator=generator) * scale).to(self.device, model.dtype)

        # Scores grow along the keys, so that maxima outgrow a lagging base in some rows of a tile
        # and not in others.
        self.q = [normal(n, model.heads, model.dim, scale=2.0) for n in lengths]
        self.k = [
            normal(n, model.heads_k, model.dim)
            * torch.linspace(1, 4, n, device=self.device).to(model.dtype)[:, None, None]
            for n in lengths
        ]
        self.v = [normal(n, model.heads_k, model.dim_v) for n in lengths]
        self.dout = [normal(n, model.heads, model.dim_v) for n in lengths]
        heads = torch.linspace(0.02, 0.5, model.heads, device=self.device)
        self.options: dict[str, Any] = {
            "causal": True, "return_lse": True, "backend": backend, "batch_invariant": invariant,
            "softcap": model.softcap,
            "window": None if model.window is None else (model.window, 0),
            "alibi_slopes": heads if model.alibi else None,
            "sinks": heads * 8 if model.sinks else None,
        }  # fmt: skip

    def integers(self, *values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def offsets(self, lengths: Sequence[int]) -> torch.Tensor:
        return self.integers(0, *torch.tensor(lengths).cumsum(0).tolist())

    # ---- alone

    def alone(self, row: Row) -> Tensors:
        """(H, Dv) and (H,) of one row in a call of its own."""
        s, i = row
        out, lse = pyfa.attention(
            self.q[s][None, i : i + 1], self.k[s][None, : i + 1], self.v[s][None, : i + 1],
            **self.options,
        )  # fmt: skip
        return out[0, 0], lse[0, :, 0]

    # ---- companies, each a list of the rows' results

    def chunk(self, row: Row, size: int) -> Tensors:
        """In the chunk of a prefill that it belongs to."""
        s, i = row
        begin = i // size * size
        end = min(begin + size, self.lengths[s])
        out, lse = pyfa.attention(
            self.q[s][None, begin:end], self.k[s][None, :end], self.v[s][None, :end], **self.options
        )
        return out[0, i - begin], lse[0, :, i - begin]

    def packed(self, rows: Sequence[Row], size: int, pages: int = 0) -> list[Tensors]:
        """In chunks of up to ``size`` rows that end at the row or behind it, packed; with ``pages``
        over pages of so many keys."""
        spans = []
        for s, i in rows:
            begin = max(0, i - self.draw.randrange(size))
            spans.append((s, begin, min(begin + size, self.lengths[s])))
        q = torch.cat([self.q[s][a:b] for s, a, b in spans])
        counts, ends = [b - a for _, a, b in spans], [b for _, _, b in spans]
        where: dict[str, Any] = {"cu_seqlens_k": self.offsets(ends)}
        keys = [torch.cat([x[s][:b] for s, _, b in spans]) for x in (self.k, self.v)]
        if pages:
            *keys, table = self._pages([s for s, _, _ in spans], ends, pages, max(ends))
            where = {"cu_seqlens_k": None, "page_table": table, "seqused_k": self.integers(*ends)}
        out, lse = pyfa.attention_varlen(
            q, *keys, self.offsets(counts), max_seqlen_q=max(counts), max_seqlen_k=max(ends),
            **where, **self.options,
        )  # fmt: skip
        first = [0, *torch.tensor(counts).cumsum(0).tolist()]
        at = [first[n] + i - spans[n][1] for n, (_, i) in enumerate(rows)]
        return [(out[place], lse[:, place]) for place in at]

    def padded(self, rows: Sequence[Row], size: int) -> list[Tensors]:
        """The same with more rows and keys stored than are used, NaN in those."""
        spans = [(s, max(0, i - self.draw.randrange(size)), i + 1) for s, i in rows]
        more = [self.draw.randrange(1, 9) for _ in spans]

        def stored(x: list[torch.Tensor], of_keys: bool) -> torch.Tensor:
            parts = []
            for (s, a, b), n in zip(spans, more, strict=True):
                used = x[s][0 if of_keys else a : b]
                parts += [used, used.new_full((n, *used.shape[1:]), torch.nan)]
            return torch.cat(parts)

        counts, ends = [b - a for _, a, b in spans], [b for _, _, b in spans]
        out, lse = pyfa.attention_varlen(
            stored(self.q, False), stored(self.k, True), stored(self.v, True),
            self.offsets([n + m for n, m in zip(counts, more, strict=True)]),
            self.offsets([n + m for n, m in zip(ends, more, strict=True)]),
            max(n + m for n, m in zip(counts, more, strict=True)) + 3,
            max(n + m for n, m in zip(ends, more, strict=True)) + 70,
            seqused_q=self.integers(*counts), seqused_k=self.integers(*ends), **self.options,
        )  # fmt: skip
        found, place = [], 0
        for count, n in zip(counts, more, strict=True):
            found.append((out[place + count - 1], lse[:, place + count - 1]))
            place += count + n
        return found

    def cached(
        self, rows: Sequence[Row], *, speculative: int = 1, more: int = 0, pages: int = 0,
        appended: int = 0, leftpad: bool = False, batch_idx: bool = False,
    ) -> list[Tensors]:  # fmt: skip
        """As a decode step of a batch with a cache: the row is the last of ``speculative`` ones,
        ``more`` keys fit behind the longest, ``appended`` are new."""
        options = dict(self.options)
        if self.plant and len(rows) > 2:
            options["batch_invariant"] = False
        # Nobody has fewer rows than the batch: rows before the first see nothing and count for
        # nobody.
        q = self.q[0].new_zeros(len(rows), speculative, *self.q[0].shape[1:])
        for n, (s, i) in enumerate(rows):
            begin = max(0, i + 1 - speculative)
            q[n, speculative - (i + 1 - begin) :] = self.q[s][begin : i + 1]
        pad = [self.draw.randrange(9) if leftpad else 0 for _ in rows]
        ends = [i + 1 + n for (_, i), n in zip(rows, pad, strict=True)]
        new = [min(appended, i + 1) for _, i in rows]
        assert len(set(new)) == 1, "as many new keys in every sequence"
        capacity = max(ends) + more
        where: dict[str, Any] = {"cache_seqlens": self.integers(*ends) - new[0]}
        if pages:
            *caches, table = self._pages([s for s, _ in rows], ends, pages, capacity)
            where["page_table"] = table
        else:
            places = list(range(len(rows)))
            if batch_idx:
                self.draw.shuffle(places)
                where["cache_batch_idx"] = self.integers(*places)
            if leftpad:
                where["cache_leftpad"] = self.integers(*pad)
            caches = []
            for x in (self.k, self.v):
                cache = x[0].new_full((len(rows), capacity, *x[0].shape[1:]), torch.nan)
                for place, (s, i), n in zip(places, rows, pad, strict=True):
                    cache[place, n : n + i + 1] = x[s][: i + 1]
                caches.append(cache)
        if appended:
            for name, x in (("k", self.k), ("v", self.v)):
                where[name] = torch.stack([x[s][i + 1 - new[0] : i + 1] for s, i in rows])
        out, lse = pyfa.attention_kvcache(q, *caches, **where, **options)
        return [(out[n, -1], lse[n, :, -1]) for n in range(len(rows))]

    def _pages(
        self, sequences: Sequence[int], ends: Sequence[int], size: int, capacity: int
    ) -> list[torch.Tensor]:
        """k and v in pages in any order, NaN where nothing lies, and the table of pages."""
        each = -(-capacity // size)
        order = list(range(len(sequences) * each))
        self.draw.shuffle(order)
        table = torch.tensor(order, dtype=torch.int32).view(len(sequences), each)
        found = []
        for x in (self.k, self.v):
            pages = x[0].new_full((len(order), size, *x[0].shape[1:]), torch.nan)
            for n, (s, end) in enumerate(zip(sequences, ends, strict=True)):
                for page in range(-(-end // size)):
                    part = x[s][page * size : min(end, (page + 1) * size)]
                    pages[table[n, page], : len(part)] = part
            found.append(pages)
        return [*found, table.to(self.device)]

    # ---- gradients of whole sequences: (dq, dk, dv) of each

    def gradients(self, parts: Sequence[tuple[int, int, int]], how: str) -> list[Tensors]:
        """Of rows begin … end of some sequences with the keys up to ``end``: packed ("packed"), or
        in one dense batch ("dense"), which wants them alike."""
        lists = (self.q, self.k, self.v, self.dout)
        of_rows = (True, False, False, True)
        cut = [
            [x[s][begin if rows else 0 : end] for s, begin, end in parts]
            for x, rows in zip(lists, of_rows, strict=True)
        ]
        counts, ends = [b - a for _, a, b in parts], [b for _, _, b in parts]
        join = torch.stack if how == "dense" else torch.cat
        q, k, v, dout = (join(x) for x in cut)
        inputs = [x.requires_grad_() for x in (q, k, v)]
        if how == "dense":
            out, lse = pyfa.attention(*inputs, **self.options)
            dlse = dout.float().sum(-1).transpose(1, 2)
        else:
            out, lse = pyfa.attention_varlen(
                *inputs,
                self.offsets(counts),
                self.offsets(ends),
                max(counts),
                max(ends),
                **self.options,
            )
            dlse = dout.float().sum(-1).T
        grads = torch.autograd.grad((out, lse), inputs, (dout, dlse))
        if how == "dense":
            return [tuple(x[n] for x in grads) for n in range(len(parts))]
        split = [x.split(counts if n == 0 else ends) for n, x in enumerate(grads)]
        return list(zip(*split, strict=True))


def check(tally: Tally, pool: Pool, rows: Sequence[Row], sizes: Sizes) -> None:
    """Each of ``rows`` alone against its companies."""
    model = pool.model
    expected = [pool.alone(row) for row in rows]
    tally.rows += len(rows)

    def compare(company: str, which: Sequence[int], found: Sequence[Tensors]) -> None:
        for n, (out, lse) in zip(which, found, strict=True):
            row = rows[n]
            where = f"row {row.index} of {pool.lengths[row.sequence]}"
            tally.compare(model, company, "out", where, expected[n][0], out)
            tally.compare(model, company, "LSE", where, expected[n][1], lse)

    for size in sizes.chunks:
        for n, row in enumerate(rows):
            compare(f"chunks of {size}", [n], [pool.chunk(row, size)])
    everyone = list(range(len(rows)))
    for size in sizes.batches:
        # All rows in batches of this size, filled up with others.
        for which in _batches(everyone, size):
            others = [pool.draw.choice(everyone) for _ in range(size - len(which))]
            batch = which + others
            members = [rows[n] for n in batch]
            compare(f"batch of {size}", batch, pool.cached(members))
            order = pool.draw.sample(batch, len(batch))
            compare(f"batch of {size}, permuted", order, pool.cached([rows[n] for n in order]))
    batch = everyone[: max(sizes.batches)]
    members = [rows[n] for n in batch]
    companies: dict[str, Callable[[], list[Tensors]]] = {
        "another capacity": lambda: pool.cached(members, more=1 + pool.draw.randrange(3000)),
        "left padding": lambda: pool.cached(members, leftpad=True),
        "cache_batch_idx": lambda: pool.cached(members, batch_idx=True),
        "packed": lambda: pool.packed(members, 40),
        "padded": lambda: pool.padded(members, 40),
    }
    for size in sizes.speculative:
        companies[f"last of {size} rows"] = lambda n=size: pool.cached(members, speculative=n)
    for size in sizes.pages:
        companies[f"pages of {size}"] = lambda n=size: pool.cached(members, pages=n)
        companies[f"packed, pages of {size}"] = lambda n=size: pool.packed(members, 40, pages=n)
    for name, run in companies.items():
        compare(name, batch, run())
    for size in sizes.appended:
        fits = [n for n in batch if rows[n].index + 1 >= size]
        if fits:
            members_of = [rows[n] for n in fits]
            compare(f"{size} appended", fits, pool.cached(members_of, appended=size))
            found = pool.cached(members_of, appended=size, pages=sizes.pages[0])
            compare(f"{size} appended to pages", fits, found)


def check_gradients(tally: Tally, pool: Pool, rows: Sequence[Row], sizes: Sizes) -> None:
    """dq, dk and dv of whole sequences alone against packed and dense batches, and dq of rows in
    chunks."""
    model = pool.model
    sequences = sorted({row.sequence for row in rows})
    whole = [(s, 0, pool.lengths[s]) for s in sequences]
    alone = {part[0]: pool.gradients([part], "dense")[0] for part in whole}

    def compare(company: str, s: int, found: Tensors) -> None:
        for name, a, b in zip(("dq", "dk", "dv"), alone[s], found, strict=True):
            tally.compare(model, company, name, f"sequence of {pool.lengths[s]}", a, b)

    for (s, _, _), found in zip(whole, pool.gradients(whole, "packed"), strict=True):
        compare("packed", s, found)
    turned = whole[::-1]
    for (s, _, _), found in zip(turned, pool.gradients(turned, "packed"), strict=True):
        compare("packed, permuted", s, found)
    for s in sequences[:2]:
        copies = [(s, 0, pool.lengths[s])] * max(2, min(sizes.batches[-1], 8))
        compare(f"dense batch of {len(copies)}", s, pool.gradients(copies, "dense")[-1])
    for size in sizes.chunks:
        for row in rows:
            s, i = row
            begin = i // size * size
            part = (s, begin, min(begin + size, pool.lengths[s]))
            dq = pool.gradients([part], "dense")[0][0][i - begin]
            where = f"row {i} of {pool.lengths[s]}"
            tally.compare(model, f"chunks of {size}", "dq", where, alone[s][0][i], dq)


def _batches(members: list[int], size: int) -> Iterator[list[int]]:
    for begin in range(0, len(members), size):
        yield members[begin : begin + size]


def run(
    models: Sequence[Model], *, rows: int, device: str, backend: str | None, sizes: Sizes,
    seed: int = 0, invariant: bool = True, at_once: int = 20, with_gradients: int = 4,
    share: tuple[int, int] = (0, 1), plant: bool = False,
) -> Tally:  # fmt: skip
    """``rows`` random rows in all, ``at_once`` of each pool of sequences; the gradients of
    ``with_gradients`` of them. ``share`` (n, of): only every ``of``-th pool, from the n-th on;
    what a pool is does not depend on it. ``plant``: caches of more than 2 sequences are not
    batch-invariant."""
    tally = Tally()
    for number, begin in enumerate(range(0, rows, at_once)):
        if number % share[1] != share[0]:
            continue
        model, draw = models[number % len(models)], random.Random(seed + number)
        count = min(at_once, rows - begin)
        lengths = [draw.randint(1, model.longest) for _ in range(max(3, count // 2))]
        pool = Pool(model, lengths, device, backend, invariant, seed + number, plant)
        members = [draw.randrange(len(lengths)) for _ in range(count)]
        chosen = [Row(s, draw.randrange(lengths[s])) for s in members]
        check(tally, pool, chosen, sizes)
        if model.gradient and with_gradients:
            check_gradients(tally, pool, chosen[:with_gradients], sizes)
    return tally
