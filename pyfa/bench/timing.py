"""Three ways to time a call: on the device with a cold cache, by graph replay, and on the host.

All of them return seconds per call, one number per sample. None of them sets a clock or a power
limit.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Mapping
from typing import TypeVar

import torch

Call = Callable[[], object]
Result = TypeVar("Result")

# More than any cache holds: 512 MB on a GPU (an H200's L2 is 60 MB), on a CPU 64 MB.
_FLUSHED = {"cuda": 512 << 20, "cpu": 64 << 20}
_REPLAYED = 20  # calls in a graph, so that its launch is divided by as many
_HOST_CALLS = 50  # in a sample of host time: a millisecond, which is rarely interrupted
_MOST_SAMPLES = 100
_FEWEST_SAMPLES = 3


class Clock:
    """Times calls on one device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._buffer = torch.empty(_FLUSHED[device.type], dtype=torch.uint8, device=device)
        self._flush = self._seconds_of_a_flush() if device.type == "cuda" else 0.0

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def timer(self, timed: str, call: Call) -> Callable[[float], list[float]]:
        """Return a function that samples ``call`` for a given number of seconds and returns the
        samples. ``call`` must have run before."""
        if timed == "host":
            return lambda seconds: self._host(call, seconds)
        if self.device.type == "cpu":
            return lambda seconds: self._cpu(call, seconds)
        if timed == "replay":
            graph = self._captured(call)
            if graph is not None:
                return lambda seconds: [
                    sample / _REPLAYED for sample in self._events(graph.replay, seconds, cold=False)
                ]
        return lambda seconds: self._events(call, seconds, cold=timed == "device")

    def _events(self, call: Call, seconds: float, *, cold: bool) -> list[float]:
        self.wait()
        begin, end = self._event(), self._event()
        began = time.perf_counter()
        begin.record()
        call()
        end.record()
        host = time.perf_counter() - began
        end.synchronize()
        count = _samples(seconds, begin.elapsed_time(end) * 1e-3)
        self._get_ahead(count, host, cold=cold)
        pairs = []
        for _ in range(count):
            if cold:
                self._buffer.zero_()
            begin, end = self._event(), self._event()
            begin.record()
            call()
            end.record()
            pairs.append((begin, end))
        self.wait()
        return [begin.elapsed_time(end) * 1e-3 for begin, end in pairs]

    def _get_ahead(self, count: int, host: float, *, cold: bool) -> None:
        """Queue work that lasts until the host has launched ``count`` samples of ``host`` seconds.

        An event that an idle GPU meets is recorded at once. Its sample would contain the host's
        time to launch the call, which exceeds that of a short kernel. The work lasts twice as long,
        because the host's times vary.
        """
        each = max(0.0, 2 * host - (self._flush if cold else 0.0))
        for _ in range(math.ceil((2 * host + count * each) / self._flush)):
            self._buffer.zero_()

    def _seconds_of_a_flush(self) -> float:
        count = 8  # so that launching the first one does not count
        self._buffer.zero_()
        begin, end = self._event(), self._event()
        begin.record()
        for _ in range(count):
            self._buffer.zero_()
        end.record()
        end.synchronize()
        milliseconds: float = begin.elapsed_time(end)
        return milliseconds * 1e-3 / count

    @staticmethod
    def _event() -> torch.cuda.Event:
        return torch.cuda.Event(enable_timing=True)

    def _captured(self, call: Call) -> torch.cuda.CUDAGraph | None:
        """Return a graph of ``_REPLAYED`` calls, or None if the call cannot be captured."""
        try:
            with torch.cuda.device(self.device):
                graph, _ = captured(call, _REPLAYED)
        except RuntimeError:
            self.wait()
            return None
        graph.replay()
        return graph

    def _cpu(self, call: Call, seconds: float) -> list[float]:
        begin = time.perf_counter()
        call()
        count = _samples(seconds, time.perf_counter() - begin)
        samples: list[float] = []
        for _ in range(count):
            self._buffer.fill_(len(samples) & 1)
            begin = time.perf_counter()
            call()
            samples.append(time.perf_counter() - begin)
        return samples

    def _host(self, call: Call, seconds: float) -> list[float]:
        """Time calls without waiting for the device; a pause between samples lets it catch up."""
        samples = []
        collects = gc.isenabled()
        gc.disable()
        try:
            for _ in range(_samples(seconds, _HOST_CALLS * 20e-6)):
                self.wait()
                begin = time.perf_counter()
                for _ in range(_HOST_CALLS):
                    call()
                samples.append((time.perf_counter() - begin) / _HOST_CALLS)
        finally:
            if collects:
                gc.enable()
        self.wait()
        return samples


def in_turns(
    clock: Clock, timed: str, calls: Mapping[str, Call], rounds: int, seconds: float
) -> dict[str, list[list[float]]]:
    """Return the samples of each call, grouped by round.

    In each round, each call is sampled for about ``seconds``. In a round, the calls take turns, so
    load and clock rates affect all of them alike. Every call runs once before the first round.
    """
    timers = {}
    for name, call in calls.items():
        call()
        timers[name] = clock.timer(timed, call)
    found: dict[str, list[list[float]]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, timer in timers.items():
            found[name].append(timer(seconds))
    return found


def captured(call: Callable[[], Result], times: int = 1) -> tuple[torch.cuda.CUDAGraph, Result]:
    """Return a CUDA graph of ``times`` calls, and the results that each replay writes again.

    The first call is not part of the graph. It runs on a side stream and loads kernels, which a
    capture forbids.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(times):
            result = call()
    return graph, result


def _samples(seconds: float, each: float) -> int:
    return max(_FEWEST_SAMPLES, min(_MOST_SAMPLES, int(seconds / max(each, 1e-9))))
