"""Time the host side of a repeated call by layer: torch on a CPU, cuda with a fake driver.

``python benchmarks/host_time.py [--save]``. The problem is so small that the kernel's own work is
its launch. All layers are called on the same tensors in short rounds that take turns, so that load
and clock strike all alike; each figure is the median over the rounds, in µs a call. Our share on
the CPU is the public call less the kernel's operator called directly. Of the cuda backend (see
no_gpu.py) all is ours but "autograd", a function of three tensors that does nothing, forward and
backward; what the driver and allocations on a GPU take comes on top.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable
from typing import Any

import machine
import no_gpu
import torch

import pyfa
from pyfa import dispatch, request
from pyfa.backends.torch import sdpa
from pyfa.problem import tensors_of

_CALLS = 25  # in a round: half a millisecond, so that most rounds are not interrupted
_ROUNDS = 1500
_WARM_UP = 500
_GOAL = 8.0


def layers() -> dict[str, Callable[[], Any]]:
    """From the public call down to the operator that the torch backend runs."""
    q, k, v = (torch.randn(1, 16, 2, 64) for _ in range(3))
    asked = request.dense(q, k, v, request.Shared())
    prepared = dispatch.prepare(asked.call, *asked.who)
    plan, backend = prepared.plan, prepared.backend
    if (backend.NAME, plan.kernel) != ("torch", "sdpa"):
        raise SystemExit(f"expected the torch backend's sdpa, got {backend.NAME} {plan}")
    run, tensors = prepared.bind(asked.call, None, False), tensors_of(asked.call)
    turned = [x.transpose(1, 2) for x in (q, k, v)]
    shared = request.Shared()
    return {
        "pyfa.attention": lambda: pyfa.attention(q, k, v),
        "request": lambda: request.dense(q, k, v, shared),
        "prepare": lambda: dispatch.prepare(asked.call, *asked.who),
        "bound": lambda: run(*tensors),
        "operator": lambda: sdpa._CPU_FORWARD(*turned, 0.0, False, scale=0.125),
        "empty": lambda: None,
    }


class _Nothing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(q, k, v)
        return torch.empty_like(q)

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[torch.Tensor, ...]:
        q, k, v = ctx.saved_tensors
        return q, k, v


def cuda_layers() -> dict[str, Callable[[], Any]]:
    """To be called within ``no_gpu.nvidia``."""
    plain = [torch.randn(1, 128, 8, 64).bfloat16() for _ in range(3)]
    leaves = [x.clone().requires_grad_() for x in plain]
    dout = torch.randn(1, 128, 8, 64).bfloat16()
    offsets = torch.tensor([0, 50, 128], dtype=torch.int32)
    # Of one head: what an idle driver cannot do is to fill memory with 0 while the host goes on.
    plain_packed = [x[0, :, :1].contiguous() for x in plain]
    dout_packed = dout[0, :, :1].contiguous()
    leaves_packed = [x.clone().requires_grad_() for x in plain_packed]

    def step(attend: Callable[..., Any]) -> Any:
        return torch.autograd.grad(attend(*leaves), leaves, dout)

    def packed(tensors: list[torch.Tensor]) -> Any:
        return pyfa.attention_varlen(*tensors, offsets, offsets, 78, 78)

    return {
        "cuda, inference": lambda: pyfa.attention(*plain),
        "cuda, forward": lambda: pyfa.attention(*leaves),
        "cuda, forward and backward": lambda: step(pyfa.attention),
        "cuda, packed inference": lambda: packed(plain_packed),
        "cuda, packed forward": lambda: packed(leaves_packed),
        "cuda, packed forward and backward": lambda: torch.autograd.grad(
            packed(leaves_packed), leaves_packed, dout_packed
        ),
        "autograd": lambda: step(_Nothing.apply),
    }


def measure(functions: dict[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """Seconds per call of every layer in every round."""
    for function in functions.values():
        for _ in range(_WARM_UP):
            function()
    times: dict[str, list[float]] = {name: [] for name in functions}
    gc.disable()
    order = list(functions.items())
    for _ in range(rounds):
        order.append(order.pop(0))
        for name, function in order:
            begin = time.perf_counter()
            for _ in range(_CALLS):
                function()
            times[name].append((time.perf_counter() - begin) / _CALLS)
    gc.enable()
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=_ROUNDS)
    parser.add_argument("--save", action="store_true", help="write results/host_time.json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with torch.inference_mode():
        times = measure(layers(), options.rounds)
    with no_gpu.nvidia():
        cuda = measure(cuda_layers(), options.rounds)
    share = [
        whole - kernel
        for whole, kernel in zip(times["pyfa.attention"], times["operator"], strict=True)
    ]
    figures = {}
    for name, seconds in {**times, "our share": share, **cuda}.items():
        low, middle, high = (x * 1e6 for x in statistics.quantiles(seconds, n=4))
        figures[name] = {
            "median_us": round(middle, 2),
            "quartiles_us": [round(low, 2), round(high, 2)],
        }
        print(f"{name:<33} {middle:6.2f} us  ({low:.2f} … {high:.2f})")
    print(f"goal: our share at most {_GOAL} us")
    if options.save:
        results = {"goal_us": _GOAL, "rounds": options.rounds, "calls": _CALLS, "layers": figures}
        print(machine.save("host_time", results))


if __name__ == "__main__":
    main()
