"""Kernels that are built once per process, also by threads before a call needs them.

A first forward and backward need two to ten kernels, of 0.1 to 6 s each. Compilers run without
Python's lock, in a process of their own (HIP) or in C++ (NVRTC), so kernels are built at the same
time. A call that needs a kernel waits for the thread that builds it, or builds it itself if no
thread has begun: it never waits for another kernel, and errors reach it as if it had built it.
"""

from __future__ import annotations

import functools
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from ...errors import CodeObjectError
from ...plan import Plan

if TYPE_CHECKING:
    from concurrent.futures import Future

_Code = TypeVar("_Code")
_Key = tuple[Plan, str]


class Builds(Generic[_Code]):
    """The results of ``make(plan, arch)``, each made once. Safe to use from several threads."""

    def __init__(self, make: Callable[[Plan, str], _Code]) -> None:
        self._make = make
        self._done: dict[_Key, _Code] = {}
        self._refused: dict[_Key, CodeObjectError] = {}
        self._begun: dict[_Key, Future[_Code]] = {}
        if hasattr(os, "register_at_fork"):
            # The threads that would finish these do not exist in the child.
            os.register_at_fork(after_in_child=self._begun.clear)

    def __call__(self, plan: Plan, arch: str) -> _Code:
        """Return ``make(plan, arch)``, or raise what it raises."""
        key = plan, arch
        if key in self._done:
            return self._done[key]
        if key in self._refused:
            raise self._refused[key].with_traceback(None)
        begun = self._begun.pop(key, None)
        try:
            waits = begun is not None and not begun.cancel()
            found = begun.result() if begun is not None and waits else self._make(plan, arch)
        except CodeObjectError as error:  # the same source gives it again
            self._refused[key] = error
            raise
        self._done[key] = found
        return found

    def begin(self, wanted: Iterable[tuple[Plan, str]]) -> None:
        """Begin to make ``wanted``, in this order, unless there is only one to make: the caller
        makes that one as early as a thread would."""
        new = [key for key in dict.fromkeys(wanted) if not self._is_known(key)]
        if len(new) > 1:
            for key in new:
                self._begun[key] = _queue.add(functools.partial(self._make, *key))

    def _is_known(self, key: _Key) -> bool:
        return key in self._done or key in self._refused or key in self._begun

    def cache_clear(self) -> None:
        """Forget what was made, as if the process had just begun."""
        settle()
        self._begun.clear()
        self._done.clear()
        self._refused.clear()


class _Queue:
    """Jobs for at most as many threads as there are cores. A thread ends when no job is left.

    The threads are not daemons: an interpreter that exits waits for the kernels that are being
    compiled, not for those that are not begun, because it may not unload a compiler that runs.
    """

    def __init__(self) -> None:
        self._jobs: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._lock = threading.Lock()
        self._threads: set[threading.Thread] = set()

    def add(self, make: Callable[[], _Code]) -> Future[_Code]:
        from concurrent.futures import Future  # 4 ms, and not needed if all code is bundled

        job: Future[_Code] = Future()
        with self._lock:
            self._jobs.append((job, make))
            if len(self._threads) < _cores():
                thread = threading.Thread(target=self._work, name="pyfa builds kernels")
                self._threads.add(thread)
                try:
                    thread.start()
                except RuntimeError:  # no more threads, or none while the interpreter exits
                    self._threads.discard(thread)
        return job

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._jobs or not threading.main_thread().is_alive():
                    self._threads.discard(threading.current_thread())
                    return
                job, make = self._jobs.popleft()
            if job.set_running_or_notify_cancel():
                try:
                    job.set_result(make())
                except BaseException as error:
                    job.set_exception(error)

    def settle(self) -> None:
        with self._lock:
            for job, _ in self._jobs:
                job.cancel()
            self._jobs.clear()
            threads = list(self._threads)
        for thread in threads:
            thread.join()


def _cores() -> int:
    of_process = getattr(os, "sched_getaffinity", None)
    return len(of_process(0)) if of_process else os.cpu_count() or 1


_queue = _Queue()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_queue.__init__)  # type: ignore[misc]


def settle() -> None:
    """Wait for the kernels that are being built; those that no thread has begun stay unbuilt."""
    _queue.settle()
