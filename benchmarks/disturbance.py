"""Disturb launches for ``random_launches.py``: delays, other work, NaN in free memory."""

from __future__ import annotations

import contextlib
import functools
import random
from collections.abc import Iterator

import torch

# NaN in front of each launch: more than its results and workspace, then blocks that are small.
_ROOM, _SMALL_ROOMS, _SMALL_ROOM = 1 << 28, 8, 1 << 19


class Disturbance:
    """What makes launches differ: their stream, time that passes in front of a kernel, and other
    work on the SMs. On a CPU nothing does."""

    def __init__(self, where: torch.device) -> None:
        self.where, self.on_gpu = where, where.type == "cuda"
        self.random = random.Random()
        if self.on_gpu:
            self.streams = [torch.cuda.Stream(where) for _ in range(3)]
            self.aside = torch.cuda.Stream(where)
            self.matrix = torch.ones(4096, 4096, dtype=torch.bfloat16, device=where)
            torch.cuda.synchronize(where)

    def wait(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize(self.where)

    @contextlib.contextmanager
    def around(self) -> Iterator[None]:
        """A launch is under way in here."""
        if not self.on_gpu:
            yield
            return
        with torch.cuda.stream(self.random.choice(self.streams)):
            self._poison()
            with torch.cuda.stream(self.aside):
                self._compete()
            self.pause()
            yield

    def pause(self) -> None:
        """In half of all cases a kernel that waits, 50 ns to 0.2 ms."""
        if self.on_gpu and self.random.random() < 0.5:
            torch.cuda._sleep(int(10 ** self.random.uniform(2.0, 5.6)))

    def _compete(self) -> None:
        what = self.random.randrange(4)
        if what == 0:  # holds one SM's place
            torch.cuda._sleep(int(10 ** self.random.uniform(3.0, 5.6)))
        elif what == 1:  # all SMs, for 10 to 250 µs
            size = self.random.randrange(512, 4097, 128)
            torch.mm(self.matrix[:size, :size], self.matrix[:size, :size])
        elif what == 2:  # many small ones
            for _ in range(self.random.randrange(1, 12)):
                self.matrix[: self.random.randrange(1, 2048)].add(1.0)

    def _poison(self) -> None:
        """What this stream allocates next holds NaN."""
        sizes = (_ROOM, *(_SMALL_ROOM,) * _SMALL_ROOMS)
        _ = [torch.full((n,), 0xFF, dtype=torch.uint8, device=self.where) for n in sizes]


@functools.cache
def disturbance(where: torch.device) -> Disturbance:
    """One a process: its streams and their memory serve all cases."""
    return Disturbance(where)
