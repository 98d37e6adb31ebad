"""Runs PyTorch's own numeric tests of FlexAttention with pyfa in place of what they compile.

    python tests/integrations/flex_suite.py FILE --cases 300 [--shard 0/8] [--out FILE.json]

FILE is test/inductor/test_flex_attention.py of a PyTorch checkout, unchanged. Its tests compare
three results: eager FlexAttention in float64, in the test's dtype, and ``torch.compile`` of
it. The first two stay PyTorch's. Where the file calls ``torch.compile``, the function runs as it is
with ``pyfa.integrations.flex`` active, so what is compared with PyTorch is pyfa. Counted are tests
that compare numbers and do not ask what dynamo compiled. They are sampled by the SHA-256 of their
names. A test in which no call reached pyfa counts as "theirs". One that fails also where PyTorch's
own eager function takes pyfa's place, as some of a file for another version do, counts as "broken".
None of the file is in this repository.

Exit status: 0 when at least nine tenths of those that ran pass.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import functools
import hashlib
import importlib.util
import inspect
import json
import platform
import re
import sys
import unittest
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

import pyfa
from pyfa import api
from pyfa.integrations import flex

_NUMERIC = re.compile(r"self\.run_test|_check_equal|_check_out|assert_close")
# Helpers and tests that ask how often dynamo compiled, or for what it generated.
_OF_COMPILING = re.compile(
    r"run_dynamic_test|run_automatic_dynamic_test|counters\[|run_and_get_code|CompileCounter|"
    r"normalize_gm|FileCheck|metrics\.|make_fx|export\("
)


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("theirs", path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["theirs"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
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


def run(test: unittest.TestCase, calls: list[int]) -> tuple[str, str]:
    result = unittest.TestResult()
    before = calls[0]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        test.run(result)
    if result.skipped:
        return "skipped", result.skipped[0][1]
    wrong = [*result.errors, *result.failures]
    if wrong and on_pyfa[0]:
        on_pyfa[0] = False
        try:
            alone, _ = run(test, calls)
        finally:
            on_pyfa[0] = True
        return ("broken" if alone == "failed" else "failed"), wrong[0][1]
    if wrong:
        return "failed", wrong[0][1]
    return ("passed" if calls[0] > before else "theirs"), ""


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--cases", type=int, default=300)
    parser.add_argument("--shard", default="0/1", metavar="I/N")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    path = options.file.resolve()
    calls = [0]
    attention = api.attention

    def counted(*args: Any, **given: Any) -> Any:
        result = attention(*args, **given)
        calls[0] += 1
        return result

    api.attention = counted  # type: ignore[assignment]
    module = load(path)
    compiled_by_pyfa(path)
    which, of = map(int, options.shard.split("/"))
    drawn = tests_of(module)[: options.cases][which::of]
    counts: collections.Counter[str] = collections.Counter()
    found = []
    for test in drawn:
        status, message = run(test, calls)
        counts[status] += 1
        found.append({"test": _name(test), "status": status, "message": message[-600:]})
        print(f"{status:8} {_name(test)}", flush=True)
        if status == "failed":
            print("    " + message.strip().replace("\n", "\n    ")[-1500:], flush=True)
        if options.out:
            device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
            environment = {
                "file": hashlib.sha256(path.read_bytes()).hexdigest(), "torch": torch.__version__,
                "python": platform.python_version(), "device": device, "pyfa": pyfa.__version__,
            }  # fmt: skip
            text = json.dumps(
                {"environment": environment, "counts": counts, "tests": found}, indent=1
            )
            options.out.write_text(text)
    print(dict(counts))
    ran = counts["passed"] + counts["failed"] + counts["theirs"]
    return 0 if ran and counts["passed"] >= 0.9 * ran else 1


if __name__ == "__main__":
    sys.exit(main())
