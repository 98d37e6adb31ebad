"""Time latent attention on Hopper: the sm90 kernel compared with the sm80 decode kernel.

    python benchmarks/latent.py [--rounds 7] [--save]

Both kernels run every cell, in turns in one process: medians over the rounds in µs, with the
fastest and slowest round, TFLOP/s and TB/s of the cache. ``plan`` is the kernel that pyfa chooses,
``differs`` the largest difference between the two outputs. One query token a sequence, v_dim 512
of 576 elements, bfloat16, contiguous caches unless ``page_size`` is given. Then the sm90 kernel
runs with up to 128 splits: ``splits`` has its times in µs and pyfa's choice. Last come Nsight
Compute's counters of 64 and 128 heads, if there is ncu. ``--save`` writes
``results/latent_<gpu>.json``.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import machine
import ncu
import torch

import pyfa
from pyfa import binding, bound, device, dispatch
from pyfa.backends.cuda import latent_sm90
from pyfa.bound import Table

_DIM, _DIM_V, _SCALE = 576, 512, 192**-0.5
# batch, keys, tokens
_SHAPES = ((128, 8192, 1), (128, 1024, 1), (32, 8192, 1), (16, 65536, 1))
_HEADS = (16, 32, 64, 128)
# Heads, batch, keys, tokens, page size: where the two are about as fast, several tokens, pages.
_MORE = (
    (48, 128, 8192, 1, 0), (16, 128, 8192, 2, 0), (16, 128, 8192, 4, 0), (128, 128, 8192, 2, 0),
    (64, 1, 8192, 1, 0), (128, 1, 8192, 1, 0), (128, 1, 65536, 1, 0), (128, 128, 8192, 1, 64),
    (128, 128, 8192, 1, 16), (128, 128, 4096, 1, 0),
)  # fmt: skip
_KERNELS = ("sm90", "sm80")
# Batch and keys of what is split.
_SPLIT = (
    (1, 1024), (1, 8192), (1, 65536), (4, 8192), (8, 2048), (16, 4096), (32, 8192), (64, 1024),
    (100, 4096), (128, 512), (128, 8192), (16, 65536),
)  # fmt: skip
_PARTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
_PROFILED = ((64, 128, 8192, 1, 0), (128, 128, 8192, 1, 0))
_METRICS = {
    "ns": "gpu__time_duration.sum",
    "hz": "sm__cycles_elapsed.avg.per_second",
    "active_of_elapsed": "sm__cycles_active.avg.pct_of_peak_sustained_elapsed",
    "tensor_of_elapsed": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed",
    "tensor_of_active": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
    "shared_of_elapsed":
        "l1tex__data_pipe_lsu_wavefronts_mem_shared.avg.pct_of_peak_sustained_elapsed",
    "l2_of_elapsed": "lts__throughput.avg.pct_of_peak_sustained_elapsed",
    "dram_of_elapsed": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "dram_read_bytes": "dram__bytes_read.sum",
}  # fmt: skip


_LEAST = {"sm90": lambda _: 1, "sm80": lambda _: 1 << 30, "": latent_sm90.least_lines}


def only(kernel: str) -> None:
    """Makes ``kernel`` take every call that it can; "" leaves the choice to pyfa."""
    latent_sm90.least_lines = _LEAST[kernel]
    dispatch._prepared.clear()
    binding.calls, bound.calls = Table(), Table()


def call_of(
    heads: int, batch: int, keys: int, tokens: int = 1, page_size: int = 0, parts: int = 0
) -> tuple[Callable[[], Any], tuple[Any, ...]]:
    torch.manual_seed(0)
    q = torch.randn(batch, tokens, heads, _DIM, device="cuda", dtype=torch.bfloat16)
    cache = torch.randn(batch, keys, 1, _DIM, device="cuda", dtype=torch.bfloat16)
    table = None
    if page_size:
        cache = cache.view(-1, page_size, 1, _DIM)
        table = torch.randperm(len(cache), device="cuda").int().view(batch, -1)
    asked: dict[str, Any] = {"page_table": table, "causal": tokens > 1}

    def attend() -> Any:
        return pyfa.attention_latent(
            q, cache, scale=_SCALE, num_splits=parts, backend="cuda", **asked
        )

    return attend, (q, cache, asked)


def chosen(q: torch.Tensor, cache: torch.Tensor, asked: dict[str, Any]) -> str:
    only("")
    found = pyfa.explain(q, cache, cache[..., :_DIM_V], latent=True, scale=_SCALE, **asked)
    plan = next(one.plan for one in found.answers if one.backend == "cuda")
    assert plan is not None
    return "sm90" if plan.kernel == latent_sm90.KERNEL else "sm80"


def microseconds(attend: Callable[[], Any], calls: int) -> float:
    begin, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(calls):
        attend()
    stop.record()
    torch.cuda.synchronize()
    milliseconds: float = begin.elapsed_time(stop)
    return milliseconds * 1e3 / calls


def measured(cell: tuple[int, int, int, int, int], rounds: int) -> dict[str, Any]:
    heads, batch, keys, tokens, page_size = cell
    attend, inputs = call_of(*cell)
    times: dict[str, list[float]] = {kernel: [] for kernel in _KERNELS}
    outs = {}
    for _ in range(rounds + 1):
        for kernel in _KERNELS:
            only(kernel)
            outs[kernel] = attend()
            calls = max(1, min(20, int(2000 / microseconds(attend, 1))))
            times[kernel].append(microseconds(attend, calls))
    row: dict[str, Any] = {
        "heads": heads, "batch": batch, "keys": keys, "tokens": tokens, "page_size": page_size,
        "plan": chosen(*inputs),
        "differs": round((outs["sm90"] - outs["sm80"]).abs().max().item(), 5),
    }  # fmt: skip
    for kernel in _KERNELS:
        found = times[kernel][1:]
        us = statistics.median(found)
        row[kernel] = {
            "us": round(us, 1),
            "fastest_us": round(min(found), 1),
            "slowest_us": round(max(found), 1),
            "tflops": round(2e-6 * batch * tokens * heads * keys * (_DIM + _DIM_V) / us, 1),
            "tb_per_s": round(2e-6 * batch * keys * _DIM / us, 3),
        }
    return row


def split(heads: int, batch: int, keys: int) -> dict[str, Any]:
    """Times of the sm90 kernel by the number of splits."""
    only("sm90")
    blocks, units = batch * -(-heads // 64), device.of(torch.device("cuda", 0)).units
    row: dict[str, Any] = {"heads": heads, "batch": batch, "keys": keys}
    row["chosen"] = latent_sm90.splits_for(blocks, keys, units, 2 * _DIM)
    found = {}
    for parts in sorted({*_PARTS, row["chosen"]}):
        if parts > row["chosen"] and (parts * blocks > 4 * units or parts * 64 > keys):
            continue
        attend, _ = call_of(heads, batch, keys, parts=parts)
        attend()
        found[parts] = round(min(microseconds(attend, 4) for _ in range(3)), 1)
    return row | {"us": found, "over_best": round(found[row["chosen"]] / min(found.values()), 3)}


def profiled(cell: tuple[int, int, int, int, int]) -> dict[str, Any]:
    """Nsight Compute's counters of the sm90 kernel, of a process of its own."""
    program = [sys.executable, __file__, "--profiled", *(str(x) for x in cell)]
    command = ncu.command(program, list(_METRICS.values()))
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    row: dict[str, Any] = {"heads": cell[0], "batch": cell[1], "keys": cell[2]}
    try:
        (kernel,) = (
            one for one in ncu.parse(ended.stdout, ()) if "attn_latent" in str(one["kernel"])
        )
    except ValueError as error:
        return row | {"failed": str(error)}
    return row | {name: kernel[metric] for name, metric in _METRICS.items()}


def run_profiled(cell: list[int]) -> None:
    only("sm90")
    attend, _ = call_of(*cell)
    for _ in range(3):
        attend()
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStart()
    attend()
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStop()


def _compile(cell: tuple[int, int, int, int, int]) -> None:
    """Builds a cell's kernels in a process of its own: they stay in the cache."""
    heads, _, _, tokens, page_size = cell
    for kernel in _KERNELS:
        only(kernel)
        call_of(heads, 1, max(page_size, 64), tokens, page_size)[0]()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--profiled", type=int, nargs=5, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.profiled:
        run_profiled(options.profiled)
        return
    cells = [
        *((heads, batch, keys, tokens, 0) for batch, keys, tokens in _SHAPES for heads in _HEADS),
        *_MORE,
    ]
    with multiprocessing.get_context("spawn").Pool(8) as pool:
        pool.map(_compile, cells, 1)
    rows = []
    for cell in cells:
        rows.append(measured(cell, options.rounds))
        print(rows[-1], flush=True)
    results: dict[str, Any] = {"rounds": options.rounds, "rows": rows, "splits": []}
    for batch, keys in _SPLIT:
        for heads in (32, 64, 128):
            results["splits"].append(split(heads, batch, keys))
            print(results["splits"][-1], flush=True)
    results["ncu"] = ncu.why_unavailable() or [profiled(cell) for cell in _PROFILED]
    print(results["ncu"], flush=True)
    if options.save:
        gpu = machine.gpu()
        print(machine.save(f"latent_{gpu}", results))


if __name__ == "__main__":
    main()
