"""Runs the cases of a level on one backend, through the public API."""

from __future__ import annotations

import contextlib
import platform
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from .. import __version__, device, env
from ..backends import AUTOMATIC, BACKENDS, NAMES
from ..backends.base import Backend
from ..errors import UnsupportedProblem
from ..problem import FEATURES
from . import grid
from .build import build
from .cases import Case
from .examine import Expected, Findings, examine
from .report import CRASHED, FAILED, PASSED, REFUSED, CaseResult, Report
from .tolerances import Check

Progress = Callable[[int, int, str], None]


def run(
    backend: str | None = None,
    level: str = "quick",
    features: Sequence[str] | None = None,
    max_seqlen: int | None = None,
    on_progress: Progress | None = None,
    orders: int = 1,
) -> Report:
    """Run the conformance cases on ``backend``, on its own device, and return the report.

    By default, ``backend`` is the first backend in the automatic order that can run on this
    machine. ``level`` is "quick" or "full". ``features`` keeps only the cases that need one of
    these features; ``max_seqlen`` shortens longer sequences to this length, for slow backends.
    ``orders`` (emulator only): a case whose kernels add floats by atomics runs this many times,
    each time with a different order of the atomics. ``on_progress(done, total, case_name)`` is
    called before each case.

    Raises ``ValueError`` for names that do not exist, and ``RuntimeError`` if the backend cannot
    run on this machine. Errors in a case are recorded in the report.
    """
    if level not in grid.LEVELS:
        raise ValueError(f"level: expected one of {', '.join(grid.LEVELS)}; got {level!r}")
    for name in features or ():
        if name not in FEATURES:
            raise ValueError(f"features: expected some of {', '.join(FEATURES)}; got {name!r}")
    if max_seqlen is not None and max_seqlen < 1:
        raise ValueError(f"max_seqlen: expected 1 or more; got {max_seqlen}")
    name = backend if backend is not None else _first()
    if name not in NAMES:
        raise ValueError(f"backend: expected one of {', '.join(NAMES)}; got {name!r}")
    implementation = BACKENDS[name]
    why = implementation.why_unavailable()
    if why:
        raise RuntimeError(f"{name}: {why}")
    if orders < 1:
        raise ValueError(f"orders: expected 1 or more; got {orders}")
    if orders > 1 and getattr(implementation, "orders", None) is None:
        raise ValueError(f"orders: {name} cannot choose the order of its atomics; emulator can")
    cases = grid.cases(level, implementation.FEATURES, implementation.DTYPES, features, max_seqlen)
    return run_cases(implementation, cases, level, features, on_progress, orders)


def run_cases(
    implementation: Backend,
    cases: Iterable[Case],
    level: str = "cases",
    features: Sequence[str] | None = None,
    on_progress: Progress | None = None,
    orders: int = 1,
) -> Report:
    """Run the given cases, as ``run`` runs the cases of a level."""
    where = device_of(implementation.NAME)
    cases = list(cases)
    results = []
    with _one_thread():
        for done, case in enumerate(cases):
            if on_progress is not None:
                on_progress(done, len(cases), case.name)
            results.append(run_case(implementation, case, where, orders=orders))
    return Report(
        implementation.NAME,
        level,
        tuple(features or ()),
        environment(implementation, where),
        tuple(results),
        coverage_of(implementation),
    )


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Run PyTorch's CPU work on one thread: cases are small, and threads would wait for each
    other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def run_case(
    implementation: Backend,
    case: Case,
    where: torch.device,
    expected: Expected | None = None,
    orders: int = 1,
) -> CaseResult:
    """Run one case, and catch every error. ``expected``: the case's expected results, if they are
    known already.

    With ``orders`` (as in ``run``), the result has, for each check, the worst error over all
    orders.
    """
    begin = time.perf_counter()
    undeclared = sorted(case.features - implementation.FEATURES)
    undeclared += sorted(set(case.dtypes) - set(implementation.DTYPES))
    status, found = PASSED, None
    reasons: tuple[str, ...] = ()
    messages: tuple[str, ...] = ()
    try:
        expected = expected or Expected(build(case))
        found, messages = _in_orders(implementation, expected, where, orders)
        if undeclared:
            messages = (f"computed, though it does not declare {', '.join(undeclared)}", *messages)
        status = FAILED if messages else PASSED
    except UnsupportedProblem as refusal:
        reasons = refusal.reasons.get(implementation.NAME, ())
        status = REFUSED
        if not reasons:
            status, messages = FAILED, ("refused without a reason",)
    except Exception:
        status, messages = CRASHED, (traceback.format_exc(),)
    return CaseResult(
        case.name,
        case.dtype,
        tuple(name for name in FEATURES if name in case.features),
        status,
        tuple(found.checks) if found else (),
        found.digests if found else {},
        reasons,
        messages,
        time.perf_counter() - begin,
    )


def _in_orders(
    implementation: Backend, expected: Expected, where: torch.device, orders: int
) -> tuple[Findings, tuple[str, ...]]:
    """Return the findings of the worst order, and the messages of all."""
    chosen: Any = getattr(implementation, "orders", None) if orders > 1 else None
    if chosen is None:
        found = examine(expected, implementation.NAME, where)
        return found, tuple(check.message for check in found.checks if check.message)
    first = env.get("PYFA_EMULATOR_SEED")
    worst: dict[str, Check] = {}
    messages: list[str] = []
    digests: dict[str, str] = {}
    try:
        for seed in range(first, first + orders):
            chosen.choose(seed)
            try:
                found = examine(expected, implementation.NAME, where)
            except UnsupportedProblem:
                raise
            except Exception as error:
                raise RuntimeError(f"in the order of PYFA_EMULATOR_SEED={seed}") from error
            digests = digests or found.digests
            for check in found.checks:
                if check.message:
                    messages.append(f"{check.message} (PYFA_EMULATOR_SEED={seed})")
                old = worst.get(check.name)
                if old is None or (bool(check.message), check.ratio) > (
                    bool(old.message), old.ratio
                ):  # fmt: skip
                    worst[check.name] = check
            if not chosen.mattered:
                break
    finally:
        chosen.choose(None)
    return Findings(list(worst.values()), digests), tuple(messages)


def device_of(backend: str) -> torch.device:
    """Return the device on which ``backend`` runs: the GPU if there is one, except for the
    emulator."""
    if backend != "emulator" and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def environment(implementation: Backend, where: torch.device) -> dict[str, Any]:
    """Return the versions, the device and the driver, and the digests of the backend's kernels if
    the backend reports them."""
    facts = device.of(where)
    found: dict[str, Any] = {
        "pyfa": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "platform": platform.platform(),
        "device": facts.name,
        "arch": facts.arch,
        "rocm": torch.version.hip,
        "cuda": torch.version.cuda,
    }
    kernel_digests = getattr(implementation, "kernel_digests", None)
    if kernel_digests is not None:
        found["kernels"] = dict(kernel_digests())
    return found


def coverage_of(implementation: Backend) -> dict[str, dict[str, int]]:
    """Return, for each kernel, how many code objects ran in this process, how many instructions
    they have, and how many of these were executed. The mapping is empty for a backend without this
    data."""
    coverage: Any = getattr(implementation, "coverage", None)
    if coverage is None:
        return {}
    names = ("objects", "instructions", "executed")
    return {
        kernel: dict(zip(names, counts, strict=True))
        for kernel, counts in coverage.by_kernel().items()
    }


def _first() -> str:
    """Return the first backend of this machine's automatic order that can run here."""
    order = AUTOMATIC[device.of(device_of("torch")).vendor]
    able = (n for n in order if n in BACKENDS and BACKENDS[n].why_unavailable() is None)
    return next(able, "torch")
