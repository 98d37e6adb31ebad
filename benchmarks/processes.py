"""Run jobs in worker processes that keep their state, or in a fork per job."""

from __future__ import annotations

import concurrent.futures
import json
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, TypeVar

Job = TypeVar("Job")
Verdict = tuple[str, str]  # what caught the fault, "" if nothing did, and in which case
NO_ANSWER = "no answer"


def judged(
    jobs: Iterator[Job],
    judge: Callable[[Job], Verdict],
    *,
    at_once: int,
    stuck: float,
    end: float,
) -> Iterator[tuple[Job, Verdict]]:
    """Yield each job with what ``judge`` returns for it in a forked process of its own.

    The process may crash, or not answer in ``stuck`` seconds: then that is what caught the fault.
    A job is taken from ``jobs`` when its process can start. Nothing is yielded after ``end``.
    """
    context = multiprocessing.get_context("fork")
    running: dict[Any, Any] = {}
    try:
        while time.monotonic() < end:
            while len(running) < at_once:
                try:
                    job = next(jobs)
                except StopIteration:
                    break
                receiver, sender = context.Pipe(duplex=False)
                process = context.Process(target=_tell, args=(sender, judge, job), daemon=True)
                process.start()
                sender.close()
                running[receiver] = process, job, time.monotonic() + stuck
            if not running:
                return
            ready = wait(list(running), timeout=0.1)
            for receiver in [*running]:
                process, job, until = running[receiver]
                if receiver in ready:
                    try:
                        verdict = receiver.recv()
                    except EOFError:
                        process.join()
                        verdict = f"the process ended with {process.exitcode}", ""
                elif time.monotonic() > until:
                    verdict = NO_ANSWER, ""
                else:
                    continue
                del running[receiver]
                process.kill()
                process.join()
                yield job, verdict
    finally:
        for process, _, _ in running.values():
            process.kill()


def note(file: Path, job: Sequence[Any], verdict: Verdict) -> None:
    """Append a line to ``file``: a JSON list of the fields of ``job`` and what caught its fault."""
    with file.open("a") as lines:
        lines.write(json.dumps([*job, *verdict]) + "\n")


def _tell(sender: Connection, judge: Callable[[Job], Verdict], job: Job) -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    sender.send(judge(job))


class Processes:
    """Processes that each do one thing at a time and keep what they have run."""

    def __init__(self, count: int, end: float, start: Callable[[], None]) -> None:
        context = multiprocessing.get_context("spawn")
        self.each = [
            concurrent.futures.ProcessPoolExecutor(1, context, start) for _ in range(count)
        ]
        self.end = end

    def run(self, work: list[tuple[Callable[..., Any], tuple[Any, ...]]]) -> Iterator[Any]:
        """Results, as they come, of what any process may do: (number of the process, result)."""
        left, running = work[::-1], {}
        while left or running:
            for number, process in enumerate(self.each):
                if left and number not in running.values():
                    what, arguments = left.pop()
                    running[process.submit(what, *arguments)] = number
            for future in self.done(running):
                yield running.pop(future), future.result()

    def run_at(
        self, work: list[tuple[list[int], Callable[..., Any], tuple[Any, ...]]]
    ) -> Iterator[tuple[int, int, Any]]:
        """Each piece of work in one process after another, in the order of its list, until it is
        told to ``stop``: (number of the work, of the process, result)."""
        self.stopped: set[int] = set()
        queues: list[list[tuple[int, int]]] = [[] for _ in self.each]
        for number, (processes, _, _) in enumerate(work):
            for turn, process in enumerate(processes):
                queues[process].append((turn, number))
        for queue in queues:
            queue.sort(reverse=True)  # every work's first turn before any second one
        running: dict[Any, tuple[int, int]] = {}
        while running or any(queues):
            busy = {process for _, process in running.values()}
            for process, queue in enumerate(queues):
                while queue and process not in busy:
                    _, number = queue.pop()
                    if number not in self.stopped:
                        _, what, arguments = work[number]
                        future = self.each[process].submit(what, *arguments)
                        running[future] = number, process
                        busy.add(process)
            for future in self.done(running) if running else ():
                number, process = running.pop(future)
                yield number, process, future.result()

    def stop(self, number: int) -> None:
        self.stopped.add(number)

    def done(self, running: Any) -> Any:
        left = max(0.0, self.end - time.monotonic())
        first = concurrent.futures.FIRST_COMPLETED
        found = concurrent.futures.wait(running, timeout=left, return_when=first).done
        if not found:
            raise TimeoutError
        return found

    def close(self) -> None:
        for executor in self.each:
            for process in list((executor._processes or {}).values()):
                process.kill()
            executor.shutdown(wait=False, cancel_futures=True)
