"""Time decode, chunked prefill and merging on a GPU, compared with FlashAttention-3.

    python benchmarks/serving.py [--fa3 LIBRARY] [--only decode,prefill,merge] [--save]

``decode``: a step over caches, in a CUDA graph and eagerly: groups, pages, windows, rows of drafted
tokens, head dims, and lengths far below the cache's. ``prefill``: rows over pages, beside the same
rows over a dense cache on the same kernel. ``merge``: two parts by one launch and by PyTorch's
operators. ``--fa3`` loads FlashAttention-3's operators from a library; without it, or a package
flash_attn_interface that brings them, pyfa is measured alone. Calls take turns; medians.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import machine
import torch

import pyfa
from pyfa import merging
from pyfa.bench.timing import captured

Call = Callable[[], object]


class Cell(NamedTuple):
    """``capacity``: of the cache, 0 for ``keys``."""

    batch: int
    rows: int
    keys: int
    heads: int
    heads_k: int
    dim: int
    page: int = 0
    window: int = -1
    capacity: int = 0
    dtype: str = "bfloat16"

    def __str__(self) -> str:
        text = f"B={self.batch} rows={self.rows} keys={self.keys} H={self.heads},{self.heads_k} "
        text += f"D={self.dim}"
        for name in ("page", "capacity"):
            value = getattr(self, name)
            text += f" {name}={value}" if value else ""
        text += f" window={self.window}" if self.window >= 0 else ""
        return text + (f" {self.dtype}" if self.dtype != "bfloat16" else "")


_DECODE = (
    # Of the issue: a step of 32/8 heads, and one that shares a key head among all.
    Cell(1, 1, 65536, 32, 8, 128), Cell(8, 1, 32768, 32, 8, 128), Cell(64, 1, 8192, 32, 8, 128),
    Cell(8, 1, 8192, 32, 8, 128), Cell(32, 1, 4096, 16, 1, 128), Cell(64, 1, 2048, 16, 1, 128, 256),
    # Groups of 4 to 16, pages of 16 to 256, windows of 64 to 4,096, rows of 1 to 8, heads of 64 to
    # 256.
    Cell(16, 1, 8192, 16, 1, 128), Cell(16, 1, 8192, 64, 8, 128), Cell(16, 1, 8192, 64, 4, 128),
    Cell(32, 1, 4096, 32, 8, 64), Cell(8, 1, 8192, 32, 8, 64), Cell(8, 1, 8192, 16, 2, 256),
    Cell(16, 1, 8192, 32, 8, 128, 16), Cell(16, 1, 8192, 32, 8, 128, 64),
    Cell(16, 1, 8192, 32, 8, 128, 256), Cell(32, 1, 4096, 16, 1, 128, 256),
    Cell(8, 1, 32768, 32, 8, 128, 0, 64), Cell(8, 1, 32768, 32, 8, 128, 0, 512),
    Cell(8, 1, 32768, 32, 8, 128, 64, 4096), Cell(8, 2, 8192, 32, 8, 128),
    Cell(8, 4, 8192, 32, 8, 128), Cell(8, 8, 8192, 32, 8, 128), Cell(8, 8, 8192, 64, 8, 128, 64),
    Cell(32, 4, 4096, 16, 1, 128), Cell(8, 16, 8192, 64, 8, 128),
    Cell(8, 1, 2048, 32, 8, 128), Cell(8, 1, 2048, 32, 8, 128, 0, -1, 32768),
)  # fmt: skip
_PREFILL = (
    Cell(8, 512, 8192, 32, 8, 128, 64), Cell(8, 512, 8192, 32, 8, 128, 16),
    Cell(8, 512, 8192, 32, 8, 128, 256), Cell(1, 4096, 32768, 32, 8, 128, 64),
    Cell(1, 512, 32768, 32, 8, 128, 64), Cell(1, 512, 32768, 32, 8, 128, 16),
    Cell(8, 2048, 2048, 32, 8, 128, 64), Cell(8, 512, 8192, 32, 8, 64, 64),
    Cell(8, 512, 8192, 32, 8, 64, 16), Cell(4, 512, 8192, 16, 4, 256, 64),
    Cell(8, 512, 8192, 32, 8, 128, 64, dtype="float8_e4m3fn"),
    Cell(8, 512, 8192, 32, 8, 128, 16, dtype="float8_e4m3fn"),
)  # fmt: skip
# batch, rows, heads, head_dim
_MERGE = ((64, 1, 32, 128), (8, 16, 32, 128), (8, 512, 32, 128), (64, 1, 8, 64))


def bytes_read(cell: Cell) -> int:
    """K and V that some row of a step sees."""
    seen = min(cell.keys, cell.window + cell.rows) if cell.window >= 0 else cell.keys
    return cell.batch * seen * cell.heads_k * cell.dim * 2 * getattr(torch, cell.dtype).itemsize


class Inputs:
    """A cell's tensors, paged where it has pages, and dense."""

    def __init__(self, cell: Cell) -> None:
        dtype = getattr(torch, cell.dtype)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, device="cuda", dtype=torch.bfloat16).to(dtype)

        room = cell.capacity or cell.keys
        self.q = normal(cell.batch, cell.rows, cell.heads, cell.dim)
        self.k, self.v = (normal(cell.batch, room, cell.heads_k, cell.dim) for _ in range(2))
        self.used = torch.full((cell.batch,), cell.keys, dtype=torch.int32, device="cuda")
        self.table = None
        self.paged = self.k, self.v
        if cell.page:
            pages = cell.batch * room // cell.page
            order = torch.randperm(pages, device="cuda")
            self.table = order.int().view(cell.batch, -1)
            shape = (pages, cell.page, cell.heads_k, cell.dim)
            whole = torch.empty(2, *shape, device="cuda", dtype=dtype)
            for to, x in zip(whole, (self.k, self.v), strict=True):
                to.view(torch.uint8)[order] = x.view(shape).view(torch.uint8)
            self.paged = whole[0], whole[1]


def by_pyfa(cell: Cell, x: Inputs, paged: bool = True) -> Call:
    window = None if cell.window < 0 else (cell.window, 0)
    k, v = x.paged if paged else (x.k, x.v)
    return lambda: pyfa.attention_kvcache(
        x.q, k, v, cache_seqlens=x.used, page_table=x.table if paged else None, causal=True,
        window=window,
    )  # fmt: skip


_NONE = dict.fromkeys((
    "k_new", "v_new", "q_v", "out", "cu_seqlens_q", "cu_seqlens_k", "cu_seqlens_k_new", "seqused_q",
    "seqused_k", "max_seqlen_q", "max_seqlen_k", "page_table", "kv_batch_idx", "leftpad_k",
    "rotary_cos", "rotary_sin", "seqlens_rotary", "q_descale", "k_descale", "v_descale",
))  # fmt: skip


def by_fa3(cell: Cell, x: Inputs) -> Call:
    """Its operator, as its ``flash_attn_with_kvcache`` calls it."""
    given = _NONE | {"seqused_k": x.used, "page_table": x.table}
    rest = (cell.dim**-0.5, True, cell.window, 0 if cell.window >= 0 else -1, 0, 0.0, True, None, 0)
    k, v = x.paged
    return lambda: torch.ops.flash_attn_3.fwd(x.q, k, v, *given.values(), *rest, None, 0)


def seconds(calls: dict[str, Call], rounds: int, times: int = 1, eager: bool = False) -> Any:
    """Medians of calls that take turns. ``eager``: with the host's time, 20 calls at once."""
    found: dict[str, list[float]] = {name: [] for name in calls}
    count = 20 if eager else 1
    for call in calls.values():
        call()
    for _ in range(rounds):
        for name, call in calls.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            if not eager:
                torch.cuda._sleep(200_000)  # the host is ahead: no gaps between launches
            begin.record()
            for _ in range(count):
                call()
            end.record()
            end.synchronize()
            found[name].append(begin.elapsed_time(end) * 1e-3 / count / times)
    return {name: statistics.median(each) for name, each in found.items()}


def copy_speed() -> float:
    """Bytes per second, read and written, of a copy of 2 GiB."""
    a = torch.empty(1 << 31, dtype=torch.uint8, device="cuda")
    b = torch.empty_like(a)
    return 2 * a.numel() / seconds({"copy": lambda: b.copy_(a)}, 11)["copy"]


def decode(peers: dict[str, Any], rounds: int) -> list[dict[str, Any]]:
    lines: list[dict[str, Any]] = []
    copy = copy_speed()
    print(f"a copy moves {copy * 1e-9:.0f} GB/s", flush=True)
    for cell in _DECODE:
        x = Inputs(cell)
        calls = {name: make(cell, x) for name, make in peers.items()}
        outs = [call() for call in calls.values()]
        outs = [out[0] if isinstance(out, list | tuple) else out for out in outs]
        if not all(torch.allclose(out, outs[0], rtol=2e-2, atol=2e-3) for out in outs):
            print(f"{cell}: not the same output")
            continue
        replays = {name: captured(call, 10)[0].replay for name, call in calls.items()}
        graphs = seconds(replays, rounds, 10)
        eager = seconds(calls, rounds, eager=True)
        speed = bytes_read(cell) / graphs["pyfa"]
        lines.append({
            "cell": str(cell), "graph_seconds": graphs, "eager_seconds": eager,
            "bytes_per_second": round(speed), "of_a_copy": round(speed / copy, 3),
        })  # fmt: skip
        ratios = {
            name: f"{graphs[name] / graphs['pyfa']:.2f} / {eager[name] / eager['pyfa']:.2f}"
            for name in peers
            if name != "pyfa"
        }
        print(f"{cell}: {told(graphs)}, eagerly {told(eager)}, {speed * 1e-9:.0f} GB/s, "
              f"{speed / copy:.2f} of a copy {ratios or ''}", flush=True)  # fmt: skip
        del x, calls, replays
    for name in peers:
        if name != "pyfa":
            for kind in ("graph_seconds", "eager_seconds"):
                each = [line[kind][name] / line[kind]["pyfa"] for line in lines]
                print(f"{name}, {kind}: geometric mean {statistics.geometric_mean(each):.3f}, "
                      f"least {min(each):.3f}")  # fmt: skip
    return lines


def prefill(peers: dict[str, Any], rounds: int) -> list[dict[str, Any]]:
    lines = []
    for cell in _PREFILL:
        x = Inputs(cell)
        calls = {name: make(cell, x) for name, make in peers.items() if x.q.itemsize > 1
                 or name == "pyfa"}  # fmt: skip
        calls["dense"] = by_pyfa(cell, x, paged=False)
        same = torch.equal(calls["pyfa"](), calls["dense"]())
        took = seconds(calls, rounds)
        lines.append({"cell": str(cell), "seconds": took, "equal_bits": same})
        share = took["dense"] / took["pyfa"]
        print(f"{cell}: {told(took)}, {share:.3f} of dense, equal {same}", flush=True)
    return lines


def merges(rounds: int) -> list[dict[str, Any]]:
    lines = []
    for batch, rows, heads, dim in _MERGE:
        outs = torch.randn(2, batch, rows, heads, dim, device="cuda", dtype=torch.bfloat16)
        lses = torch.randn(2, batch, heads, rows, device="cuda")
        calls: dict[str, Call] = {
            "one launch": functools.partial(pyfa.merge, outs, lses, return_lse=True),
            "operators": lambda: merging.merged(list(outs), torch.stack([x.mT for x in lses])),  # noqa: B023
        }
        device, eager = seconds(calls, rounds), seconds(calls, rounds, eager=True)
        cell = f"B={batch} rows={rows} H={heads} D={dim}"
        lines.append({"cell": cell, "seconds": device, "eager_seconds": eager})
        print(f"merge {cell}: {told(device)}, eagerly {told(eager)}", flush=True)
    return lines


def told(took: dict[str, float]) -> str:
    return ", ".join(f"{name} {each * 1e6:.1f} µs" for name, each in took.items())


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--fa3", help="a library with FlashAttention-3's operators")
    parser.add_argument("--only", default="decode,prefill,merge")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    peers: dict[str, Any] = {"pyfa": by_pyfa}
    if options.fa3:
        torch.ops.load_library(options.fa3)
        peers["fa3"] = by_fa3
    torch.manual_seed(0)
    wanted, found = options.only.split(","), {}
    if "decode" in wanted:
        found["decode"] = decode(peers, options.rounds)
    if "prefill" in wanted:
        found["prefill"] = prefill(peers, options.rounds)
    if "merge" in wanted:
        found["merge"] = merges(options.rounds)
    if options.save:
        how = f"Medians of {options.rounds} calls in turn, warm caches: benchmarks/serving.py."
        title = "Decode, prefill over pages and merging"
        name = "serving_fa3" if options.fa3 else "serving"
        print(machine.save(name, {"title": title, "how": how, "compared": [*peers], **found}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
