"""Processes that stay: each a rank of torch.distributed, waiting for what to run."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

_context = multiprocessing.get_context("forkserver")
# Imported once, in the process that the workers are forked from.
_context.set_forkserver_preload(["torch", "torch.distributed", "numpy", "pyfa.conformance"])


class Failed(Exception):
    """What a worker raised, as text: ``kind`` and ``message`` by rank."""

    def __init__(self, errors: dict[int, tuple[str, str, str]]) -> None:
        self.kind = {rank: kind for rank, (kind, _, _) in errors.items()}
        self.message = {rank: message for rank, (_, message, _) in errors.items()}
        super().__init__("\n".join(text for *_, text in errors.values()))


class Pool:
    """``size`` ranks over gloo, or over NCCL with a GPU each where ``device`` is "cuda".

    ``group(n)`` in a worker is the group of the first n, ``device()`` what it computes on.
    """

    def __init__(self, size: int, timeout_s: float = 60.0, device: str = "cpu") -> None:
        self._folder = tempfile.TemporaryDirectory()
        store = str(Path(self._folder.name) / "store")
        self._pipes, self.processes = [], []
        for rank in range(size):
            here, there = _context.Pipe()
            process = _context.Process(
                target=_work, args=(rank, size, store, timeout_s, device, there), daemon=True
            )
            process.start()
            there.close()
            self._pipes.append(here)
            self.processes.append(process)

        # Not in the first test's time, and not once for each test where it fails.
        self.run(size, torch.get_num_threads)

    def start(
        self, function: Callable[..., Any], ranks: Sequence[int], *args: Any, **options: Any
    ) -> None:
        """``function(*args, **options)`` on ``ranks``; its module must be importable."""
        for rank in ranks:
            self._pipes[rank].send((function, args, options))

    def results(self, ranks: Sequence[int], timeout_s: float = 60.0) -> list[Any]:
        """What they returned, in order. ``Failed`` where one raised."""
        found = []
        for rank in ranks:
            pipe, process = self._pipes[rank], self.processes[rank]
            if not wait([pipe, process.sentinel], timeout_s):
                raise TimeoutError(f"rank {rank} said nothing for {timeout_s} s")
            if not pipe.poll():
                raise RuntimeError(f"the process of rank {rank} ended, {process.exitcode}")
            found.append(pipe.recv())
        errors = {
            rank: error for rank, (_, error) in zip(ranks, found, strict=True) if error is not None
        }
        if errors:
            raise Failed(errors)
        return [result for result, _ in found]

    def run(self, size: int, function: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
        """``start`` and ``results`` on the first ``size`` ranks."""
        self.start(function, range(size), *args, **options)
        return self.results(range(size))

    def close(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
        self._folder.cleanup()


_groups: dict[int, dist.ProcessGroup] = {}


def group(size: int) -> dist.ProcessGroup:
    """In a worker: the group of ranks 0 … size − 1."""
    return _groups[size]


def device() -> torch.device:
    """In a worker: its GPU, or the CPU."""
    if dist.get_backend() == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _work(rank: int, size: int, store: str, timeout_s: float, device: str, pipe: Any) -> None:
    # More threads would only take the cores from one another. Machines with GPUs have some more.
    torch.set_num_threads(4 if device == "cuda" else 1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    os.environ["NCCL_NVLS_ENABLE"] = "0"
    if device == "cuda":
        torch.cuda.set_device(rank)
    timeout = timedelta(seconds=timeout_s)
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(
        backend, init_method=f"file://{store}", rank=rank, world_size=size, timeout=timeout
    )
    for count in range(1, size + 1):
        _groups[count] = dist.new_group(list(range(count)), timeout=timeout)
    for _ in itertools.count():
        try:
            function, args, options = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((function(*args, **options), None))
        except Exception as error:
            pipe.send((None, (type(error).__name__, str(error), traceback.format_exc())))
