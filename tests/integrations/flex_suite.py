"""Runs PyTorch's own numeric tests of FlexAttention with pyfa in place of what they compile.

    python tests/integrations/flex_suite.py FILE --cases 300 [--part PART.json] [--limit 60]
    python tests/integrations/flex_suite.py FILE --cases 300 --part PART.json --save

FILE is test/inductor/test_flex_attention.py of a PyTorch checkout, unchanged. Its tests compare
three results: eager FlexAttention in float64, in the test's dtype, and ``torch.compile`` of
it. The first two stay PyTorch's. Where the file calls ``torch.compile``, the function runs as it is
with ``pyfa.integrations.flex`` active, so what is compared with PyTorch is pyfa. Counted are tests
that compare numbers and do not ask what dynamo compiled. They are sampled by the SHA-256 of their
names. A test in which no call reached pyfa counts as "theirs". One that fails also where PyTorch's
own eager function takes pyfa's place, as some of a file for another version do, counts as "broken".
One that takes more than ``--limit`` seconds counts as "late". None of the file is in this
repository.

A run with ``--part`` keeps each result, and one with the same file goes on where it ended.
``--stop`` ends a run after so many seconds. ``--length`` replaces the file's sequence length of
2,048, with which a test takes most of a minute on a CPU. On a CPU the file leaves out gradients,
most of its dtypes and the tests that it marks for GPUs; with ``--as-cuda`` the CPU stands for an
A100, and they run. ``--save`` writes benchmarks/results/flex_suite.json.

Exit status: 0 when at least nine tenths of those that ran pass.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import functools
import hashlib
import importlib
import importlib.util
import inspect
import json
import re
import signal
import sys
import time
import unittest
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from pyfa import api, bench
from pyfa.integrations import flex

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "flex_suite.json"

_NUMERIC = re.compile(r"self\.run_test|_check_equal|_check_out|assert_close")
# Helpers and tests that ask how often dynamo compiled, or for what it generated.
_OF_COMPILING = re.compile(
    r"run_dynamic_test|run_automatic_dynamic_test|counters\[|run_and_get_code|CompileCounter|"
    r"normalize_gm|FileCheck|metrics\.|make_fx|export\("
)


def load(path: Path, length: int, as_cuda: bool) -> ModuleType:
    """The file as a module; with a ``length``, its constant S, a line of the file, is that. With
    ``as_cuda`` its device "cuda" is the CPU."""
    spec = importlib.util.spec_from_file_location("theirs", path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["theirs"] = importlib.util.module_from_spec(spec)
    text = path.read_text()
    if length:
        text, found = re.subn(r"(?m)^S = \d+$", f"S = {length}", text)
        assert found == 1, "the file has no one constant S"
    posing: Any = contextlib.nullcontext
    if as_cuda:
        sys.path.insert(0, str(Path(__file__).parents[1]))
        cuda_on_cpu = importlib.import_module("cuda_on_cpu")
        cuda_on_cpu.install((8, 0))
        posing = cuda_on_cpu.posing
    with posing():
        exec(compile(text, path, "exec"), vars(module))
    return module


def tests_of(module: ModuleType) -> list[unittest.TestCase]:
    """Those that compare numbers, in the order of the SHA-256 of their names."""
    found = []
    for suite in unittest.defaultTestLoader.loadTestsFromModule(module):
        for test in suite:  # type: ignore[union-attr]
            method = getattr(test, test._testMethodName)  # type: ignore[union-attr]
            source = inspect.getsource(inspect.unwrap(method))
            if _NUMERIC.search(source) and not _OF_COMPILING.search(source):
                found.append(test)
    return sorted(found, key=lambda test: hashlib.sha256(_name(test).encode()).hexdigest())


def _name(test: Any) -> str:
    return f"{type(test).__name__}.{test._testMethodName}"


def accept_one_row_of_positions() -> None:
    """``PagedAttention.assign`` takes positions of each sequence; in PyTorch 2.6, whose file may be
    the one that runs, it took one row of them for all."""
    from torch.nn.attention.experimental._paged_attention import PagedAttention

    real: Any = PagedAttention.assign

    def assign(self: Any, batch: Any, positions: Any, *others: Any) -> Any:
        rows = positions if positions.dim() == 2 else positions.expand(len(batch), -1)
        return real(self, batch, rows, *others)

    PagedAttention.assign = assign  # type: ignore[method-assign]


on_pyfa = [True]  # or on PyTorch's own eager function


def compiled_by_pyfa(path: Path) -> None:
    """``torch.compile``, called from the file at ``path``, gives the function with pyfa active."""
    real = torch.compile

    def compile(model: Any = None, *args: Any, **options: Any) -> Any:
        if sys._getframe(1).f_code.co_filename != str(path):
            return real(model, *args, **options)
        if model is None:
            return lambda function: compile_here(function)
        return compile_here(model)

    def compile_here(function: Any) -> Any:
        def run(*args: Any, **options: Any) -> Any:
            with flex.activated() if on_pyfa[0] else contextlib.nullcontext():
                return function(*args, **options)

        return functools.wraps(function)(run) if hasattr(function, "__name__") else run

    torch.compile = compile


class Late(KeyboardInterrupt):  # unittest lets no other exception pass
    """A test takes longer than it may."""


def run(test: unittest.TestCase, calls: list[int], limit: int) -> tuple[str, str]:
    """Return how ``test`` ended, and its message."""

    def late(*_: object) -> None:
        raise Late

    signal.signal(signal.SIGALRM, late)
    signal.alarm(limit)
    try:
        return _run(test, calls)
    except Late:
        return "late", f"more than {limit} s"
    finally:
        signal.alarm(0)


def _run(test: unittest.TestCase, calls: list[int]) -> tuple[str, str]:
    result = unittest.TestResult()
    before = calls[0]
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        test.run(result)
    if result.skipped:
        return "skipped", result.skipped[0][1]
    wrong = [*result.errors, *result.failures]
    if wrong and on_pyfa[0]:
        on_pyfa[0] = False
        try:
            alone, _ = _run(test, calls)
        finally:
            on_pyfa[0] = True
        return ("broken" if alone == "failed" else "failed"), wrong[0][1]
    if wrong:
        return "failed", wrong[0][1]
    if calls[0] > before:
        return "passed", ""
    return "theirs", "; ".join(str(x.message) for x in said if "pyfa" in str(x.message))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--cases", type=int, default=300)
    parser.add_argument("--part", type=Path, metavar="FILE.json", help="results so far")
    parser.add_argument("--limit", type=int, default=600, help="seconds for a test")
    parser.add_argument("--stop", type=float, default=1e9, help="seconds, then none begins")
    parser.add_argument("--length", type=int, default=0, help="in place of the file's S")
    parser.add_argument("--as-cuda", action="store_true", help="the file as it is on an A100")
    parser.add_argument("--save", action="store_true", help=f"write {RESULTS.name}")
    options = parser.parse_args()
    path = options.file.resolve()
    calls = [0]
    attention = api.attention

    def counted(*args: Any, **given: Any) -> Any:
        result = attention(*args, **given)
        calls[0] += 1
        return result

    api.attention = counted  # type: ignore[assignment]
    module = load(path, options.length, options.as_cuda)
    compiled_by_pyfa(path)
    accept_one_row_of_positions()
    tests = tests_of(module)
    drawn = tests[: options.cases]
    found: dict[str, tuple[str, str, int]] = {}
    if options.part and options.part.exists():
        found = {name: tuple(x) for name, x in json.loads(options.part.read_text()).items()}
    begin = time.monotonic()
    for test in drawn:
        name = _name(test)
        if name in found or time.monotonic() - begin > options.stop:
            continue
        status, message = run(test, calls, options.limit)
        found[name] = status, message, options.length
        print(f"{status:8} {name}", flush=True)
        if status == "failed":
            print("    " + message.strip().replace("\n", "\n    ")[-1500:], flush=True)
        if options.part:
            options.part.write_text(json.dumps(found, indent=1))
    ends = {_name(test): found.get(_name(test), ("not run", "", 0)) for test in drawn}
    counts = collections.Counter(status for status, _, _ in ends.values())
    lengths = collections.Counter(
        length or "as in the file" for status, _, length in ends.values() if status != "not run"
    )
    print(dict(counts))
    if options.save:
        device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
        if options.as_cuda:
            device = "cpu that stands for cuda"
        what = {
            "what": "PyTorch's numeric tests of FlexAttention with pyfa in place of torch.compile; "
                    "tests chosen by hash",
            "file": hashlib.sha256(path.read_bytes()).hexdigest(), "device": device,
            "tests": len(tests), "cases": len(drawn), "tests_by_length": dict(lengths),
            "limit": options.limit, "counts_by_kind": dict(counts),
            "others": [
                [name, status, message.strip()[-300:]]
                for name, (status, message, _) in ends.items()
                if status not in ("passed", "not run")
            ],
        }  # fmt: skip
        bench.write(RESULTS, what)
    ran = sum(counts[status] for status in ("passed", "failed", "theirs", "late"))
    return 0 if ran and counts["passed"] >= 0.9 * ran else 1


if __name__ == "__main__":
    sys.exit(main())
