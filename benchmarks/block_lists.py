"""Time block lists on a GPU: by pyfa's kernel, by PyTorch's operators, and FlexAttention's.

    python benchmarks/block_lists.py [--backend cuda] [--save]

First compares the kernel's lists with those of PyTorch's operators, for 20 masks, four kinds of
tiles and odd sizes. Then measures these times, in ms: making the lists and the forward with that
mask, both at 4k, 16k and 64k rows of (1, rows, 16, 128) in bfloat16, and eager
``create_block_mask`` at 4k and 16k. ``share`` is the time of the lists over that of the forward.
``--save`` writes ``results/block_lists_<gpu>.json``.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import time
from collections.abc import Callable
from typing import Any

import machine
import torch
from torch.nn.attention.flex_attention import create_block_mask

import pyfa
from pyfa import blocks, mods
from pyfa.backends import BACKENDS
from pyfa.backends.native import lists
from pyfa.backends.native.block_lists import Maker
from pyfa.blocks import Tiles
from pyfa.problem import Call

_HEADS, _DIM = 16, 128
_SIZES = (4096, 16384, 65536)
_PAIRS = ((1, 1), (127, 260), (333, 200), (1025, 777), (640, 2049))
_TILES = (Tiles(128, 128), Tiles(64, 48), Tiles(64, 128, "keys"), Tiles(32, 16, "keys"))
Mask = Callable[..., Any]


def timed(rows: int) -> dict[str, Mask]:
    """The masks that are timed. Bounds decide the first four; of a shuffled document map and of
    strides they decide nothing, and of the last every point has to be asked."""
    i = torch.arange(rows, device="cuda", dtype=torch.int32)
    generator = torch.Generator("cuda").manual_seed(0)
    shuffled = torch.randint(0, 16, (rows,), device="cuda", dtype=torch.int32, generator=generator)
    return {
        "causal": pyfa.masks.causal(),
        "sliding 1024": pyfa.masks.sliding(1024),
        "16 documents": pyfa.masks.documents(i // (rows // 16)),
        "documents of 1024": pyfa.masks.documents(i // 1024),
        "shuffled documents": lambda b, h, i, j: shuffled[i] == shuffled[j],
        "every third key": lambda b, h, i, j: (i - j) % 3 == 0,
        "no bounds": lambda b, h, i, j: (i ^ j) >= 0,
    }


def compared() -> dict[str, Mask]:
    """The masks whose lists are compared: 20, for up to 2,049 places, 2 sequences and 4 heads."""
    i = torch.arange(2200, device="cuda")
    document, seen = i // 300, i % 7 != 0
    lengths = torch.tensor([100, 1000], device="cuda")
    heads = torch.tensor([3, 50, 200, 900], device="cuda", dtype=torch.int16)
    table = ((i[:300, None] * i[:300]) % 97 > 40).contiguous()
    return {
        **{name: mask for name, mask in timed(2304).items() if name != "no bounds"},
        "no bounds": lambda b, h, i, j: (i ^ j) < 300,
        "prefix": pyfa.masks.prefix(512),
        "streaming": pyfa.masks.streaming(4, 100),
        "padding": pyfa.masks.padding(lengths),
        "by head": lambda b, h, i, j: (i - j).abs() <= heads[h],
        "int64": lambda b, h, i, j: document[i] * 2 >= document[j] + b,
        "natten": pyfa.masks.natten((40, 55), 7),
        "dilated": pyfa.masks.dilated(200, step=5),
        "two-dimensional table": lambda b, h, i, j: table[i // 8, j // 8],
        "bool table": lambda b, h, i, j: seen[j] | (i < 50),
        "all": lambda b, h, i, j: j >= 0,
        "none": lambda b, h, i, j: i < 0,
        "not": pyfa.masks.not_(pyfa.masks.sliding(300)),
        "wraps around": lambda b, h, i, j: i * 3_000_000 - j * 2_000_000 > 5,
    }


def call_of(mask: Mask, rows: int, keys: int, batch: int = 1, heads: int = _HEADS) -> Call:
    q = torch.empty(1, device="cuda", dtype=torch.bfloat16).expand(batch, rows, heads, _DIM)
    k = q[:, :1].expand(batch, keys, heads, _DIM)
    digest, captured = mods.resolve(None, mask, q.device)
    slots: dict[str, Any] = {f"captured{slot}": x for slot, x in enumerate(captured)}
    return Call(q, k, k, max_seqlen_q=rows, max_seqlen_k=keys, mods=digest, **slots)


def compare(backend: str) -> dict[str, Any]:
    """How many lists the kernel makes as PyTorch's operators do, and the masks of others."""
    tried, wrong = 0, []
    for number, (name, mask) in enumerate(compared().items()):
        for rows, keys in _PAIRS:
            for tiles in (_TILES[number % 4], _TILES[0]):
                call = call_of(mask, rows, keys, 2, 4)
                found = Maker(BACKENDS[backend].launch)(call, tiles)
                expected = blocks.make_lists(call, tiles)
                tried += 1
                if not all(torch.equal(x, y) for x, y in zip(found, expected, strict=True)):
                    wrong.append(f"{name} {rows} x {keys} {tuple(tiles)}")
    return {"masks": len(compared()), "lists": tried, "differ": wrong}


def median_ms(function: Callable[[], Any], calls: int = 1) -> float:
    """Of ``calls`` in sequence, per call."""
    function()
    found: list[float] = []
    end = time.monotonic() + 0.05
    while time.monotonic() < end or len(found) < 3:
        begin, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(calls):
            function()
        stop.record()
        torch.cuda.synchronize()
        found.append(begin.elapsed_time(stop) / calls)
    return statistics.median(found)


def tiles_of(mask: Mask, backend: str) -> tuple[Tiles, bool]:
    """The tiles of the forward's lists, and whether the forward visits by them."""
    q = torch.empty(1, 256, _HEADS, _DIM, device="cuda", dtype=torch.bfloat16)
    answers = pyfa.explain(q, q, q, backend=backend, mask_mod=mask).answers
    plan = next(answer.plan for answer in answers if answer.backend == backend)
    assert plan is not None
    return BACKENDS[backend].target.list_tiles(plan), lists.is_listed(plan)


def measured(name: str, rows: int, backend: str) -> dict[str, Any]:
    mask = timed(rows)[name]
    call = call_of(mask, rows, rows)
    tiles, listed = tiles_of(mask, backend)
    make = Maker(BACKENDS[backend].launch)
    made = make(call, tiles)
    exact = blocks.make_lists(call, tiles)
    assert all(torch.equal(x, y) for x, y in zip(made, exact, strict=True)), (name, rows)
    by_kernel = median_ms(lambda: make(call, tiles), 10)
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(100):
        make(call, tiles)
    host = (time.perf_counter() - begin) / 100
    torch.manual_seed(0)
    shape = (1, rows, _HEADS, _DIM)
    q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    forward = median_ms(lambda: pyfa.attention(q, k, v, mask_mod=mask, backend=backend))
    visited = int(made.counts.sum())
    row: dict[str, Any] = {
        "mask": name,
        "rows": rows,
        "tiles": list(tiles[:2]),
        "visited": round(visited / made.entries.numel(), 4),
        "forward_visits_by_list": listed,
        "kernel_ms": round(by_kernel, 4),
        "kernel_host_us": round(host * 1e6, 1),
        "torch_ms": round(median_ms(lambda: blocks.make_lists(call, tiles)), 4),
        "forward_ms": round(forward, 4),
        "share": round(by_kernel / forward, 4),
        "list_bytes_per_16384_scores": round(sum(x.nbytes for x in made) / rows**2 * 16384, 2),
    }
    if rows <= 16384:

        def flex() -> Any:
            return create_block_mask(mask, None, None, rows, rows, device="cuda")

        row["create_block_mask_ms"] = round(median_ms(flex), 4)
    return row


def _compile(job: tuple[str, str]) -> None:
    """Builds the forward of a mask in a process of its own: it stays in the cache."""
    name, backend = job
    q = torch.zeros(1, 256, _HEADS, _DIM, device="cuda", dtype=torch.bfloat16)
    pyfa.attention(q, q, q, mask_mod=timed(4096)[name], backend=backend)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="cuda")
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    names = list(timed(4096))
    with multiprocessing.get_context("spawn").Pool(len(names)) as pool:
        waiting = pool.map_async(_compile, [(name, options.backend) for name in names], 1)
        compared_lists = compare(options.backend)
        print(compared_lists, flush=True)
        waiting.get()
    rows = []
    for size in _SIZES:
        for name in names:
            rows.append(measured(name, size, options.backend))
            print(rows[-1], flush=True)
        if options.save:
            gpu = machine.gpu()
            results = {"backend": options.backend, "compared": compared_lists, "rows": rows}
            print(machine.save(f"block_lists_{gpu}", results))


if __name__ == "__main__":
    main()
