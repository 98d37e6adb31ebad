"""Time the host side of repeated calls on a GPU, compared with PyTorch's attention.

``python benchmarks/host_calls.py [--parts calls documents totals] [--save]``. A figure is
the median over rounds of 60 calls that do not wait for the device, in µs a call; the rounds of all
rows take turns, so that load and clock strike all alike. "autograd alone" is a function of three
tensors that does nothing, forward and backward: what of a training step's host time is PyTorch's
engine; in "one thread" the engine runs on the thread that asks for gradients, by
``torch.autograd.set_multithreading_enabled(False)``. "new total" are packed calls whose total of
rows never came before. "documents" are calls with a mask_mod that reads a document map, without
what makes the map: the same map at each call, the map changed in place before each call, or a map
that never came before, with the earlier ones freed or alive. "decode" is on the device, by events,
as a fraction of the same call in a CUDA graph.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable
from typing import Any

import machine
import torch
from torch.nn.functional import scaled_dot_product_attention

import pyfa
from pyfa.bench.timing import captured
from pyfa.compat import fa2

_CALLS, _ROUNDS, _WARM_UP = 60, 40, 60
_BATCH, _CAPACITY, _PAGE = 4, 512, 64


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def lengths(*values: int) -> torch.Tensor:
    return torch.tensor(values, device="cuda", dtype=torch.int32)


class _Nothing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(q, k, v)
        return torch.empty_like(q)

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor) -> Any:
        return ctx.saved_tensors


def calls() -> dict[str, Callable[[], Any]]:
    """Every kind of call, on problems whose time is the host's."""
    q, k, v = random(1, 128, 8, 64), random(1, 128, 8, 64), random(1, 128, 8, 64)
    turned = [x.transpose(1, 2) for x in (q, k, v)]
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    dout, sinks, row = torch.randn_like(q), torch.randn(8, device="cuda"), random(1, 1, 8, 64)
    k_cache, v_cache = (random(_BATCH, _CAPACITY, 2, 64) for _ in range(2))
    k_pages, v_pages = (random(64, _PAGE, 2, 64) for _ in range(2))
    new_k, new_v = random(_BATCH, 1, 2, 64), random(_BATCH, 1, 2, 64)
    queries, packed = random(_BATCH, 1, 8, 64), random(_BATCH, 8, 64)
    used, offsets = lengths(*[300] * _BATCH), lengths(*range(_BATCH + 1))
    pages = torch.arange(32, device="cuda", dtype=torch.int32).view(_BATCH, -1)

    def training(attend: Callable[..., Any]) -> Any:
        return torch.autograd.grad(attend(*leaves), leaves, dout)

    def torchs(*tensors: torch.Tensor) -> torch.Tensor:
        given = [x.transpose(1, 2) for x in tensors]
        return scaled_dot_product_attention(*given, is_causal=True).transpose(1, 2)

    def causal(*tensors: torch.Tensor) -> Any:
        return pyfa.attention(*tensors, causal=True)

    return {
        "sdpa": lambda: scaled_dot_product_attention(*turned, is_causal=True),
        "plain": lambda: causal(q, k, v),
        "return_lse": lambda: pyfa.attention(q, k, v, causal=True, return_lse=True),
        "sinks and window": lambda: pyfa.attention(
            q, k, v, causal=True, window=(64, 0), sinks=sinks
        ),
        "one query row": lambda: pyfa.attention(row, k, v),
        "cache": lambda: pyfa.attention_kvcache(queries, k_cache, v_cache),
        "cache with lengths": lambda: pyfa.attention_kvcache(
            queries, k_cache, v_cache, cache_seqlens=used
        ),
        "cache in pages": lambda: pyfa.attention_kvcache(
            queries, k_pages, v_pages, cache_seqlens=used, page_table=pages
        ),
        "append": lambda: pyfa.attention_kvcache(
            queries, k_cache, v_cache, k=new_k, v=new_v, cache_seqlens=used
        ),
        "packed rows over pages": lambda: pyfa.attention_varlen(
            packed, k_pages, v_pages, offsets, None, 1, _CAPACITY, seqused_k=used,
            page_table=pages, causal=True,
        ),
        "compat.fa2": lambda: fa2.flash_attn_func(q, k, v, causal=True),
        "autograd forward": lambda: causal(*leaves),
        "forward and backward": lambda: training(causal),
        "sdpa forward and backward": lambda: training(torchs),
        "autograd alone": lambda: training(_Nothing.apply),
    }  # fmt: skip


def measure(functions: dict[str, Callable[[], Any]]) -> dict[str, list[float]]:
    """Seconds a call, of every function in every round."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for function in functions.values():
        for _ in range(_WARM_UP):
            function()
    for _ in range(_ROUNDS):
        for name, function in functions.items():
            torch.cuda.synchronize()
            begin = time.perf_counter()
            for _ in range(_CALLS):
                function()
            times[name].append((time.perf_counter() - begin) / _CALLS)
    torch.cuda.synchronize()
    return times


def new_totals(training: bool, alone: bool = False) -> list[float]:
    """Seconds of packed calls with another total each; ``alone``: of a function that does
    nothing."""
    times = []
    for step in range(100):
        ends = (100 + 3 * step, 300 + 4 * step, 357 + 4 * step)
        offsets = lengths(0, *ends)
        tensors = [random(ends[-1], 8, 64).requires_grad_(training) for _ in range(3)]
        dout = random(ends[-1], 8, 64)
        torch.cuda.synchronize()
        begin = time.perf_counter()
        if alone:
            out = _Nothing.apply(*tensors)
        else:
            out = pyfa.attention_varlen(*tensors, offsets, offsets, 512, 512, causal=True)
        if training:
            torch.autograd.grad(out, tensors, dout)
        times.append(time.perf_counter() - begin)
    return times[20:]


def documents() -> dict[str, list[float]]:
    """Seconds of calls with a document map as a mask_mod captures it, of every kind in every
    round."""
    rows, heads = 512, 4
    q, k, v, dout = (random(2, rows, heads, 64) for _ in range(4))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    own = torch.arange(rows, device="cuda", dtype=torch.int32) // 64

    def forward(at: torch.Tensor) -> None:
        pyfa.attention(q, k, v, mask_mod=lambda b, h, i, j: (at[i] == at[j]) & (i >= j))

    def training(at: torch.Tensor) -> None:
        out = pyfa.attention(*leaves, mask_mod=lambda b, h, i, j: (at[i] == at[j]) & (i >= j))
        torch.autograd.grad(out, leaves, dout)

    alive: list[torch.Tensor] = []

    def changed() -> torch.Tensor:
        return own.add_(0)  # of which nobody knows that it changes nothing

    def kept() -> torch.Tensor:
        alive.append(own.clone())
        return alive[-1]

    makers: dict[str, Callable[[], torch.Tensor]] = {
        "the same": lambda: own,
        "changed in place": changed,
        "new": own.clone,
        "new, all alive": kept,
    }
    times: dict[str, list[float]] = {}
    for turn in range(_ROUNDS + 3):
        for way, attend in (("forward", forward), ("forward and backward", training)):
            for name, make in makers.items():
                torch.cuda.synchronize()
                total = 0.0
                for _ in range(_CALLS // 2):
                    at = make()
                    begin = time.perf_counter()
                    attend(at)
                    total += time.perf_counter() - begin
                if turn >= 3:
                    times.setdefault(f"documents, {name}, {way}", []).append(total / (_CALLS // 2))
                alive.clear()
    torch.cuda.synchronize()
    return times


def decode_beside_a_graph() -> float:
    """Time of decode of one sequence of 65,536 keys called eagerly, over that in a CUDA graph."""
    q, k, v = random(1, 1, 32, 128), random(1, 65536, 8, 128), random(1, 65536, 8, 128)

    def many() -> None:
        for _ in range(20):
            pyfa.attention(q, k, v)

    def seconds(run: Callable[[], Any]) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        begin.record()
        for _ in range(10):
            run()
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end)

    graph, _ = captured(many)
    seconds(many)
    return statistics.median(seconds(many) / seconds(graph.replay) for _ in range(9))


PARTS = ("calls", "documents", "totals")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--save", action="store_true", help="write results/host_calls_<gpu>.json")
    parser.add_argument(
        "--parts", nargs="+", default=PARTS, choices=PARTS,
        help="not all of them are saved as results/host_<parts>_<gpu>.json",
    )  # fmt: skip
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []

    def note(name: str, times: list[float]) -> None:
        low, middle, high = (x * 1e6 for x in statistics.quantiles(times, n=4))
        rows.append(
            {"call": name, "us": round(middle, 2), "quartiles": [round(low, 2), round(high, 2)]}
        )
        print(f"{name:<50} {middle:8.2f} us  ({low:.2f} … {high:.2f})")

    def note_all(found: dict[str, list[float]]) -> None:
        for name, times in found.items():
            note(name, times)

    gc.disable()
    results: dict[str, Any] = {"calls": _CALLS, "rounds": _ROUNDS}
    if "calls" in options.parts:
        functions = calls()
        with torch.inference_mode():
            plain = measure({x: functions[x] for x in ("sdpa", "plain")})
            note_all({f"{name}, inference mode": times for name, times in plain.items()})
        note_all(measure(functions))
        with torch.autograd.set_multithreading_enabled(False):
            names = ("forward and backward", "autograd alone")
            one = measure({name: functions[name] for name in names})
            note_all({f"{name}, one thread": times for name, times in one.items()})
        ratio = results["decode_over_graph"] = round(decode_beside_a_graph(), 4)
        print(f"decode of 65,536 keys, eagerly over in a graph: {ratio}")
    if "documents" in options.parts:
        note_all(documents())
    if "totals" in options.parts:
        note("new total, forward", new_totals(training=False))
        note("new total, forward and backward", new_totals(training=True))
        note("new total, autograd alone", new_totals(training=True, alone=True))
        with torch.autograd.set_multithreading_enabled(False):
            note("new total, forward and backward, one thread", new_totals(training=True))
    if options.save:
        whole = tuple(options.parts) == PARTS
        name = "host_calls" if whole else f"host_{'_'.join(options.parts)}"
        print(machine.save(f"{name}_{machine.gpu()}", {**results, "rows": rows}))


if __name__ == "__main__":
    main()
