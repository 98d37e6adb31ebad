"""Compare pyfa with standard attention by sequence length: time and peak memory.

    python benchmarks/naive_vs_pyfa.py [--save] [--longest 262144] [--seconds 600]

Forward without gradients, and training (forward and backward), from N = 128 to 262,144, each side
as far as its memory goes. Peak memory is what the allocator handed out beyond the inputs; on a CPU
it is not measured. No length is begun when ``--seconds`` are over; what is there is saved after
each.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import machine
import torch
from peaks import beyond_inputs

import pyfa
from pyfa.bench.timing import Clock
from pyfa.cli.console import print_table
from pyfa.cli.measure import naive

HOW = (
    "Three rounds in which the sides take turns, 0.1 s of samples each, but one round of three "
    "samples where a call takes 0.2 s or more; a 512 MB buffer "
    "overwritten between samples; medians. Memory: the allocator's peak beyond inputs and dO in a "
    "call of its own. Standard attention is eager PyTorch: scores, scale, mask, softmax, values."
)
SIDES, KINDS = ("naive", "pyfa"), ("forward", "training")
ROUNDS, SECONDS, LONG_CALL = 3, 0.1, 0.2


def lengths(longest: int) -> list[int]:
    """Powers of two from 128 (or from ``longest``, if that is less)."""
    first = min(128, longest)
    return [first << n for n in range(32) if first << n <= longest]


def calls(side: str, kind: str, x: list[torch.Tensor], causal: bool) -> Callable[[], object]:
    """What is timed, on q, k, v and dO."""
    q, k, v, dout = x
    leaves = (q, k, v)

    def forward() -> torch.Tensor:
        if side == "naive":
            return naive(*leaves, causal=causal)
        out = pyfa.attention(*leaves, causal=causal)
        assert isinstance(out, torch.Tensor)
        return out

    if kind == "forward":
        return torch.no_grad()(forward)
    return lambda: torch.autograd.grad(forward(), leaves, dout)


def peak(call: Callable[[], object], device: torch.device) -> int | None:
    """Bytes beyond what was allocated before; None on a CPU."""
    if device.type == "cpu":
        return None
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    call()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def room(device: torch.device) -> float:
    """Bytes that may be taken: on a CPU 2 GB, since more would be swapped."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 2e9


def measure(
    seqlen: int, heads: int, head_dim: int, causal: bool, clock: Clock
) -> list[dict[str, Any]]:
    device = clock.device
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    name = str(dtype).removeprefix("torch.")
    rows = []
    for kind in KINDS:
        size = (1, seqlen, heads, head_dim)
        x = [torch.randn(size, device=device, dtype=dtype) for _ in range(4)]
        for one in x[:3]:
            one.requires_grad_(kind == "training")
        timers: dict[str, Callable[[float], list[float]]] = {}
        found: dict[str, dict[str, Any]] = {}
        for side in SIDES:
            row = {"kind": kind, "side": side, "seqlen": seqlen, "heads": heads,
                   "head_dim": head_dim, "causal": causal,
                   "computed_bytes": beyond_inputs(side, kind, seqlen, heads, head_dim, causal,
                                                   name)}  # fmt: skip
            found[side] = row
            if row["computed_bytes"] > room(device):
                row["why_not"] = f"would need {row['computed_bytes'] / 1e9:.0f} GB"
                continue
            call = calls(side, kind, x, causal)
            try:
                call()
                row["extra_bytes"] = peak(call, device)
                timers[side] = clock.timer("device", call)
            except torch.OutOfMemoryError:
                row["why_not"] = "out of memory"
        samples: dict[str, list[float]] = {side: [] for side in timers}
        for number in range(ROUNDS):
            for side, timer in timers.items():
                if number == 0 or samples[side][0] < LONG_CALL:
                    samples[side] += timer(SECONDS)
        for side, seconds in samples.items():
            found[side]["seconds"] = statistics.median(seconds)
            low, _, high = statistics.quantiles(seconds, n=4, method="inclusive")
            found[side]["quartiles"] = [low, high]
        rows += found.values()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--save", action="store_true", help="write results/naive_vs_pyfa.json")
    parser.add_argument("--longest", type=int, default=0, help="by default 262144, on a CPU 2048")
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--seconds", type=float, default=600.0, help="then no length is begun")
    options = parser.parse_args()
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    longest = options.longest or (262_144 if device.type == "cuda" else 2048)
    clock, rows = Clock(device), []
    begin, left = time.monotonic(), []
    for seqlen in lengths(longest):
        if time.monotonic() - begin > options.seconds:
            left.append(seqlen)
            continue
        rows += measure(seqlen, options.heads, options.head_dim, options.causal, clock)
        print(f"{time.monotonic() - begin:4.0f} s N = {seqlen}", file=sys.stderr)
        if options.save:
            machine.save("naive_vs_pyfa", {"how": HOW, "lengths": rows})
    print_table(
        ["N", "kind", "side", "ms", "MB", "MB computed"],
        [
            [
                str(row["seqlen"]), row["kind"], row["side"],
                f"{row['seconds'] * 1e3:.4g}" if "seconds" in row else row["why_not"],
                f"{row['extra_bytes'] / 1e6:.1f}" if row.get("extra_bytes") else "–",
                f"{row['computed_bytes'] / 1e6:.1f}",
            ]
            for row in rows
        ],
    )  # fmt: skip
    if left:
        print(f"not run, {options.seconds:.0f} s were over: N = {left}")
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main())
