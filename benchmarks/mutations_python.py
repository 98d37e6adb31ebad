"""Count the faults in the torch backend's source that the suite finds.

``python benchmarks/mutations_python.py [--faults 200] [--jobs N] [--seed S] [--save]`` plants
faults drawn from the seed, one at a time, in ``pyfa/backends/torch``: a comparison with its edge on
the other side, ``and`` for ``or``, + for -, * for +, min for max, a number that is one more, a call
in a line of its own left out, a ``not`` left out. Files and kinds take turns. A fault is caught by
the first case of the quick level that fails or crashes, or does not end within ``--stuck`` seconds.
``--level full`` tries survivors on that level too. What conformance cannot ask for (a call that is
refused on a CPU, a choice of GPUs, tiles that cost time and change nothing) is asked for by
``TESTS``, the last that a fault is tried on. What ``equivalent_faults.py`` has a reason for does
not run. Survivors are listed with their line: they are equivalent, or a case is missing. ``--save``
writes ``results/mutations_torch.json``. ``--again`` tries the survivors of that file, after cases
were added, and notes in the file what came of them. ``--noted FILE`` keeps what came of each fault
of the quick level; faults that the file has are not tried again, as long as their line is the same.
"""

from __future__ import annotations

import argparse
import ast
import collections
import contextlib
import hashlib
import importlib.machinery
import io
import itertools
import json
import os
import random
import sys
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import equivalent_faults
import processes
import pytest
import torch  # before the processes are forked; pyfa is imported in them, and in none before

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "pyfa" / "backends" / "torch"
RESULT = ROOT / "benchmarks" / "results" / "mutations_torch.json"
TESTS = (
    "tests/test_append_reasons.py", "tests/test_torch_reasons.py", "tests/test_torch_on_gpus.py",
    "tests/test_edges.py", "tests/mods/test_block_lists.py",
)  # fmt: skip
_COMPARISONS: dict[type, type] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
}  # fmt: skip
_OPERATORS: dict[type, type] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.FloorDiv: ast.Mult,
    ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd,
}  # fmt: skip
_CALLS = {"min": "max", "max": "min", "minimum": "maximum", "maximum": "minimum",
          "amax": "amin", "exp": "exp2", "logical_and": "logical_or"}  # fmt: skip


NEVER_RAN = "the changed file was not imported"
SURVIVED = "survived"


class Fault(NamedTuple):
    """The ``number``-th change that a file can have."""

    file: str
    number: int
    kind: str
    line: int
    old: str
    new: str


class Verdict(NamedTuple):
    fault: Fault
    by: str
    case: str


def changes(tree: ast.Module) -> Iterator[tuple[str, ast.AST]]:
    """Makes each change in turn, yields its kind and place, and takes it back."""
    skipped = {
        id(inner) for node in ast.walk(tree) for name in ("annotation", "returns")
        for part in [getattr(node, name, None)] if part is not None for inner in ast.walk(part)
    }  # fmt: skip
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Compare) and type(node.ops[0]) in _COMPARISONS:
            yield from _one(node.ops, 0, _COMPARISONS[type(node.ops[0])](), "comparison", node)
        elif isinstance(node, ast.BoolOp):
            other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
            yield from _attribute(node, "op", other, "logic")
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            yield from _attribute(node, "op", ast.UAdd(), "not left out")
        elif isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
            yield from _attribute(node, "op", _OPERATORS[type(node.op)](), "arithmetic")
        elif isinstance(node, ast.Constant) and type(node.value) is int:
            yield from _attribute(node, "value", node.value + 1, "number")
        elif isinstance(node, ast.Name) and node.id in _CALLS:
            yield from _attribute(node, "id", _CALLS[node.id], "call")
        elif isinstance(node, ast.Attribute) and node.attr in _CALLS:
            yield from _attribute(node, "attr", _CALLS[node.attr], "call")
        for name in ("body", "orelse"):
            lines = getattr(node, name, None)
            for place, line in enumerate(lines if isinstance(lines, list) else ()):
                if isinstance(line, ast.AugAssign) or (
                    isinstance(line, ast.Expr) and isinstance(line.value, ast.Call)
                ):
                    gone = ast.copy_location(ast.Pass(), line)
                    yield from _one(lines, place, gone, "left out", line)


def _one(
    values: list[Any], place: int, new: Any, kind: str, node: ast.AST
) -> Iterator[tuple[str, ast.AST]]:
    old, values[place] = values[place], new
    yield kind, node
    values[place] = old


def _attribute(node: Any, name: str, new: Any, kind: str) -> Iterator[tuple[str, ast.AST]]:
    old = getattr(node, name)
    setattr(node, name, new)
    yield kind, node
    setattr(node, name, old)


def all_faults() -> list[Fault]:
    found = []
    for path in sorted(FOLDER.glob("*.py")):
        tree = ast.parse(path.read_text())
        lines = ast.unparse(tree).splitlines()
        for number, (kind, node) in enumerate(changes(tree)):
            changed = ast.unparse(tree).splitlines()
            differ = [
                (old, new) for old, new in itertools.zip_longest(lines, changed, fillvalue="")
                if old != new
            ]  # fmt: skip
            if differ:
                old, new = differ[0]
                place = getattr(node, "lineno", 0)
                found.append(Fault(path.name, number, kind, place, old.strip(), new.strip()))
    return found


def drawn(faults: list[Fault], count: int, seed: int) -> list[Fault]:
    pools: dict[tuple[str, str], list[Fault]] = collections.defaultdict(list)
    for fault in faults:
        pools[fault.file, fault.kind].append(fault)
    draw = random.Random(seed)
    for pool in pools.values():
        draw.shuffle(pool)
    found: list[Fault] = []
    while len(found) < count and any(pools.values()):
        found += [pool.pop() for _, pool in sorted(pools.items()) if pool]
    return found[:count]


def planted(fault: Fault) -> types.CodeType:
    path = FOLDER / fault.file
    tree = ast.parse(path.read_text())
    for number, _ in enumerate(changes(tree)):
        if number == fault.number:
            return compile(ast.fix_missing_locations(tree), str(path), "exec")
    raise AssertionError(fault)


def judge(fault: Fault | None, level: str) -> tuple[str, str]:
    """In a process of its own, which has not imported pyfa: the fault is there when it does."""
    torch.set_num_threads(1)
    changed = []
    if fault is not None:
        code = planted(fault)
        true = importlib.machinery.SourceFileLoader.get_code

        def get_code(self: Any, name: str) -> Any:
            if Path(self.path) != FOLDER / fault.file:
                return true(self, name)
            changed.append(name)
            return code

        importlib.machinery.SourceFileLoader.get_code = get_code  # type: ignore[method-assign]
    found = _caught(level)
    if fault is None or found[0]:
        return found
    return _caught_by_tests() if changed else ("", NEVER_RAN)


def _caught(level: str) -> tuple[str, str]:
    """What finds that the torch backend is wrong, "" if nothing does, and the case."""
    try:
        from pyfa.backends import BACKENDS
        from pyfa.conformance import grid, runner
        from pyfa.conformance.report import CRASHED, FAILED
    except Exception:
        return "an error at import", ""
    backend = BACKENDS["torch"]
    cases = grid.cases(level, backend.FEATURES, backend.DTYPES)
    # In an order that mixes features: what fails at all fails early.
    for case in sorted(cases, key=lambda case: hashlib.sha256(case.name.encode()).digest()):
        result = runner.run_case(backend, case, torch.device("cpu"))
        if result.status in (FAILED, CRASHED):
            by = "wrong numbers" if result.status == FAILED else "an error"
            return by, case.name
    return "", ""


def _caught_by_tests() -> tuple[str, str]:
    for tests in TESTS:
        with contextlib.redirect_stdout(io.StringIO()):
            if pytest.main([str(ROOT / tests), "-q", "-x", "-p", "no:cacheprovider"]):
                return "a test", tests
    return "", ""


def judge_all(
    faults: list[Fault | None],
    level: str,
    options: argparse.Namespace,
    end: float,
    kept: Path | None = None,
) -> list[Verdict]:
    if "pyfa" in sys.modules:
        # The forked processes would have its modules as well, and import no changed ones.
        raise RuntimeError("pyfa was imported before the processes are forked")
    every = processes.judged(
        iter(faults),
        lambda fault: judge(fault, level),
        at_once=options.jobs,
        stuck=options.stuck,
        end=end,
    )
    found = []
    for fault, (by, case) in every:
        if case == NEVER_RAN:
            raise RuntimeError(f"{fault}: {NEVER_RAN}")
        print(by or SURVIVED, case, fault, flush=True)
        found.append(Verdict(fault, by, case))
        if kept and fault is not None:
            processes.note(kept, fault, (by, case))
    return found


def noted(file: Path | None) -> dict[Fault, Verdict]:
    """What came of faults in earlier runs."""
    lines = file.read_text().splitlines() if file and file.exists() else []
    rows = map(json.loads, lines)
    return {Fault(*row[:6]): Verdict(Fault(*row[:6]), *row[6:]) for row in rows}


def run(options: argparse.Namespace, end: float) -> dict[str, Any]:
    faults = drawn(all_faults(), options.faults, options.seed)
    reasons = {x: equivalent_faults.of_python(x.file, x.old, x.new) for x in faults}
    tried = [fault for fault in faults if not reasons[fault]]
    known = noted(options.noted)
    found = [known[fault] for fault in tried if fault in known]
    new = [fault for fault in tried if fault not in known]
    found += judge_all([*new], "quick", options, end, options.noted)
    if options.level == "full":
        again = judge_all([v.fault for v in found if not v.by], "full", options, end)
        at_full = {v.fault: v._replace(by=v.by and f"{v.by}, full level") for v in again}
        found = [at_full.get(v.fault, v) for v in found]
    by = collections.Counter((v.fault.kind, v.by or SURVIVED) for v in found)
    return {
        "what": "faults in the source of the torch backend, found by conformance and by tests",
        "level": options.level, "seed": options.seed, "planted": len(faults),
        "equivalent": [fault._asdict() | {"why": why} for fault, why in reasons.items() if why],
        "ran": len(found), "not_run": len(tried) - len(found),
        "caught": sum(bool(v.by) for v in found),
        "rows": [{"kind": kind, "by": whom, "count": count}
                 for (kind, whom), count in sorted(by.items())],
        "survivors": [v.fault._asdict() for v in found if not v.by],
    }  # fmt: skip


def run_again(options: argparse.Namespace, end: float) -> dict[str, Any]:
    """What survived in the saved file, each with what came of it ``again``."""
    saved: dict[str, Any] = json.loads(RESULT.read_text())
    now = {(fault.file, fault.old, fault.new): fault for fault in all_faults()}
    lines = {}
    for line in saved["survivors"]:
        fault = now.get((line["file"], line["old"], line["new"]))
        line["again"] = "not run" if fault else "the line is gone"
        if fault:
            lines[fault] = line
    for verdict in judge_all([*lines], options.level, options, end):
        lines[verdict.fault] |= {"again": verdict.by or SURVIVED, "again_by": verdict.case}
    return saved


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--level", choices=("quick", "full"), default="quick")
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--stuck", type=float, default=300.0)
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--noted", type=Path, help="what came of each fault is kept there")
    parser.add_argument("--again", action="store_true", help="what survived in the saved file")
    options = parser.parse_args()
    begin = time.monotonic()
    end = begin + options.minutes * 60
    (plain,) = judge_all([None], "quick", options, end)
    if plain.by:
        raise SystemExit(f"without a fault: {plain}")
    results = run_again(options, end) if options.again else run(options, end)
    seconds = round(time.monotonic() - begin)
    left = collections.Counter[str]()
    for line in results["survivors"]:
        why = equivalent_faults.of_python(line["file"], line["old"], line["new"])
        if why:
            line["why"] = why
        left["equivalent" if why else line.get("again", SURVIVED)] += 1
        print(line)
    print(f"{results['caught']} of {results['ran']} caught; of the others: {dict(left)}; "
          f"{len(results['equivalent'])} known as equivalent, {results['not_run']} not run, "
          f"{seconds} s")  # fmt: skip
    if options.save:
        from pyfa import bench

        part = {"left": dict(left), "seconds": seconds}
        if options.again:
            results["again"] = {"environment": bench.environment(), **part}
        bench.write(RESULT, results if options.again else {**results, **part})


if __name__ == "__main__":
    main()
