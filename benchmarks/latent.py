"""Time latent attention on Hopper: the sm90 kernel compared with the sm80 decode kernel.

    python benchmarks/latent.py [--rounds 7] [--save]

Both kernels run every cell, in turns in one process, from CUDA graphs of five calls: medians over
the rounds in µs, with the fastest and slowest round, TFLOP/s and TB/s of the cache. ``plan`` is the
kernel that pyfa chooses, ``differs`` the largest difference between the two outputs. One query
token a sequence, v_dim 512 of 576 elements, bfloat16, contiguous caches unless ``page_size`` is
given. Then each kernel runs with up to 128 splits: ``splits`` has its times in µs and pyfa's
choice. Last come Nsight Compute's counters of 64 and 128 heads, if there is ncu. ``--save`` writes
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
from pyfa.backends.cuda import decode, latent_sm90
from pyfa.bench.timing import captured
from pyfa.bound import Table
from pyfa.plan import Plan

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
# Batch and keys of what is split, with so many heads.
_SPLIT = (
    (1, 512), (1, 1024), (1, 4096), (1, 16384), (1, 65536), (2, 4096), (2, 16384), (2, 65536),
    (4, 2048), (4, 8192), (4, 32768), (8, 1024), (8, 4096), (8, 8192), (16, 512), (16, 2048),
    (16, 8192), (16, 65536), (32, 512), (32, 2048), (32, 8192), (64, 1024), (64, 4096),
    (100, 4096), (128, 512), (128, 8192),
)  # fmt: skip
_SPLIT_HEADS = {"sm80": (8, 16), "sm90": (32, 64, 128)}
_PARTS = (1, 2, 3, 4, 6, 8, 11, 16, 22, 32, 44, 64, 88, 128)
_CALLS = 5  # of a graph
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


def chosen(q: torch.Tensor, cache: torch.Tensor, asked: dict[str, Any]) -> Plan:
    found = pyfa.explain(q, cache, cache[..., :_DIM_V], latent=True, scale=_SCALE, **asked)
    plan = next(one.plan for one in found.answers if one.backend == "cuda")
    assert plan is not None
    return plan


def microseconds(replay: Callable[[], None]) -> float:
    begin, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(200_000)  # the host is ahead: no gap before the graph
    begin.record()
    replay()
    stop.record()
    stop.synchronize()
    milliseconds: float = begin.elapsed_time(stop)
    return milliseconds * 1e3 / _CALLS


def measured(cell: tuple[int, int, int, int, int], rounds: int) -> dict[str, Any]:
    heads, batch, keys, tokens, page_size = cell
    attend, inputs = call_of(*cell)
    times: dict[str, list[float]] = {kernel: [] for kernel in _KERNELS}
    outs, replays = {}, {}
    for kernel in _KERNELS:
        only(kernel)
        outs[kernel] = attend()
        replays[kernel] = captured(attend, _CALLS)[0].replay
        replays[kernel]()
    for _ in range(rounds):
        for kernel, replay in replays.items():
            times[kernel].append(microseconds(replay))
    only("")
    row: dict[str, Any] = {
        "heads": heads, "batch": batch, "keys": keys, "tokens": tokens, "page_size": page_size,
        "plan": "sm90" if chosen(*inputs).kernel == latent_sm90.KERNEL else "sm80",
        "differs": round((outs["sm90"] - outs["sm80"]).abs().max().item(), 5),
    }  # fmt: skip
    for kernel, found in times.items():
        us = statistics.median(found)
        row[kernel] = {
            "us": round(us, 1),
            "fastest_us": round(min(found), 1),
            "slowest_us": round(max(found), 1),
            "tflops": round(2e-6 * batch * tokens * heads * keys * (_DIM + _DIM_V) / us, 1),
            "tb_per_s": round(2e-6 * batch * keys * _DIM / us, 3),
        }
    return row


def split(kernel: str, heads: int, batch: int, keys: int) -> dict[str, Any]:
    """Times of a kernel by the number of splits."""
    only(kernel)
    blocks, units = batch * -(-heads // 64), device.of(torch.device("cuda", 0)).units
    _, inputs = call_of(heads, batch, keys)
    ours = decode.splits_for(chosen(*inputs), blocks, keys, units, 2 * _DIM)
    found = {}
    for parts in sorted({*_PARTS, ours}):
        if parts > ours and (parts * blocks > 4 * units or parts * 16 > keys):
            continue
        attend, _ = call_of(heads, batch, keys, parts=parts)
        replay = captured(attend, _CALLS)[0].replay
        replay()
        found[parts] = round(statistics.median(microseconds(replay) for _ in range(7)), 1)
    row = {"kernel": kernel, "heads": heads, "batch": batch, "keys": keys, "chosen": ours}
    return row | {"us": found, "over_best": round(found[ours] / min(found.values()), 3)}


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
    for kernel, some in _SPLIT_HEADS.items():
        for heads in some:
            for batch, keys in _SPLIT:
                results["splits"].append(split(kernel, heads, batch, keys))
                print(results["splits"][-1], flush=True)
    results["ncu"] = ncu.why_unavailable() or [profiled(cell) for cell in _PROFILED]
    print(results["ncu"], flush=True)
    if options.save:
        gpu = machine.gpu()
        print(machine.save(f"latent_{gpu}", results))


if __name__ == "__main__":
    main()
