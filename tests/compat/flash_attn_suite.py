"""Runs flash-attention's own tests/test_flash_attn.py, unchanged, against pyfa on a GPU.

    python tests/compat/flash_attn_suite.py CHECKOUT --cases 1000 --workers 8 --out report.json

CHECKOUT is a clone of https://github.com/Dao-AILab/flash-attention, or one of its test files:
tests/test_flash_attn.py, hopper/test_flash_attn.py (beside its helpers),
tests/cute/test_flash_attn_varlen.py and, in a clone with its helper flash_attn/cute/testing.py,
tests/cute/test_flash_attn.py. tests/cute/test_score_mod.py, test_mask_mod.py and
test_block_sparsity.py run beside their files of definitions: ``cute_stand_in`` takes the place of
NVIDIA's language, in which those mods are written, and FlexAttention as it is that of a compiled
one, the reference. The file is imported with what ``pyfa compat install`` writes
in place of the packages. Its cases, 508,777 of the first, are sampled by hash: of each test the
``--each`` whose ids have the smallest SHA-256, and then the smallest of all up to ``--cases``, so
that a sample is the same everywhere and a larger one contains it. Cases that the tests skip
themselves are drawn in addition. What pyfa says that it does not do counts as refused. Hopper's
file leaves parts out by its own variables: FLASH_ATTENTION_DISABLE_LOCAL=TRUE also drops
attention_chunk, FLASH_ATTENTION_DISABLE_HDIM64=TRUE heads of V of 512. ``--latent`` draws only
cases that have these: with ``qv``, and without it where the test takes V of 256 and 512.

Not pytest: collecting as many takes minutes in every process. A case here is a test
function called with one choice from each of its ``parametrize`` marks. Workers are processes that
share the GPU; cases that compile the same kernels go to the same one, and so do those of a test
that takes half of the GPU's memory. None begins a case after
``--limit`` seconds. ``--save`` appends a summary to benchmarks/results/flash_attn_suite.json.

    python tests/compat/flash_attn_suite.py CHECKOUT --as-cuda 9 --longest 256 --part part.json

``--as-cuda 9`` runs the files, unchanged, on a CPU that stands for a GPU of compute capability 9.0.
``--longest`` halves the sequence lengths of a case until none is longer; a page's length still
divides a paged cache's. A test that asks for a GPU after all counts as "needs a GPU", one that
takes more than ``--late`` seconds as late. ``--part`` keeps each result, and a run with the same
file goes on where it ended.

Exit status: 0 when all pass, 1 when one fails or was not run.
"""

from __future__ import annotations

import argparse
import atexit
import collections
import contextlib
import datetime
import hashlib
import heapq
import importlib
import importlib.util
import io
import itertools
import json
import multiprocessing
import re
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from queue import Empty
from types import ModuleType
from typing import Any

from pyfa import bench
from pyfa.compat import shim

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "flash_attn_suite.json"
KEPT = ("counts_by_kind", "shortened", "not_run", "passed_by_test", "others")
# Seconds that a case which has begun may take when the limit is over.
LAST_CASE = 30.0
# What decides which kernels a case compiles. Of latent cases d says nothing.
COMPILED = ("d", "D", "dtype", "softcap", "dropout_p", "alibi", "has_qv", "causal", "local")
# Tests of which a case takes 70 GB: all go to one worker.
LARGE = ("test_flash_attn_race_condition",)
SAID = 20  # lines that a failed test printed last, which are kept
# What PyTorch on a CPU says of a test that asks for a GPU, or for the memory of one.
OF_A_GPU = ("Torch not compiled with CUDA enabled", "DefaultCPUAllocator: can't allocate memory")
_OF_MODS = ("test_score_mod.py", "test_mask_mod.py", "test_block_sparsity.py")

Parameters = dict[str, Any]


def file_of(path: Path) -> Path:
    """The test file: the first of a clone, or the one that is named."""
    return path / "tests" / "test_flash_attn.py" if path.is_dir() else path


class Late(BaseException):
    """A case takes longer than it may."""


def load(path: Path, capability: int) -> ModuleType:
    """The test file as a module, with the shim in place of flash_attn; with a ``capability``, on a
    CPU that stands for a GPU of it."""
    if capability:
        sys.path.insert(0, str(Path(__file__).parents[1]))
        importlib.import_module("cuda_on_cpu").install((capability, 0))
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    shim.install(folder)
    sys.path.insert(0, str(folder))
    file = file_of(path)
    sys.path.insert(1, str(file.parent))
    _add_internals(file)
    if file.name in _OF_MODS:
        sys.path.insert(0, str(Path(__file__).parent))
        importlib.import_module("cute_stand_in").install()
        import torch

        torch.compile = lambda function, **_: function  # type: ignore[assignment]
    return _module("test_flash_attn", file)


def _module(name: str, file: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _add_internals(file: Path) -> None:
    """What version 4's dense file imports beside the interface: the clone's own helpers, and names
    that only the tests of its compile cache and of its sparse backward use, which are refused."""
    found = (folder / "flash_attn" / "cute" / "testing.py" for folder in file.resolve().parents)
    helpers = next((path for path in found if path.is_file()), None)
    if helpers is None:
        return
    interface = importlib.import_module("flash_attn.cute.interface")
    cache = ModuleType("flash_attn.cute.cache_utils")
    for module, name in ((cache, "JITCache"), (interface, "_flash_attn_bwd_sparse_mla")):
        setattr(module, name, _refusing(name))
    sys.modules[cache.__name__] = cache
    sys.modules["flash_attn.cute.testing"] = _module("flash_attn.cute.testing", helpers)


def _refusing(name: str) -> Any:
    def refuse(*_: object, **__: object) -> None:
        raise NotImplementedError(f"{name}: there is none here")

    return refuse


def choices(test: Any) -> Iterator[Parameters]:
    """Every combination of a test's ``parametrize`` marks."""
    axes = []
    for mark in getattr(test, "pytestmark", ()):
        if mark.name == "parametrize":
            names = [name.strip() for name in mark.args[0].split(",")]
            values = [(v,) if len(names) == 1 else v for v in mark.args[1]]
            axes.append([dict(zip(names, value, strict=True)) for value in values])
    for parts in itertools.product(*axes):
        yield {name: value for part in parts for name, value in part.items()}


def marked_skip(test: Any) -> str:
    """The reason of a ``skipif`` mark that holds, else ""."""
    for mark in getattr(test, "pytestmark", ()):
        if mark.name == "skipif" and mark.args[0]:
            return str(mark.kwargs.get("reason", "skipif"))
    return ""


def name_of(test: str, parameters: Parameters) -> str:
    shown = ",".join(f"{key}={_shown(parameters[key])}" for key in sorted(parameters))
    return f"{test}[{shown}]"


def _shown(x: Any) -> str:
    """A parameter, the same in every process: a function has its name, not where it lies."""
    if isinstance(x, tuple) and any(map(callable, x)):
        return f"({','.join(map(_shown, x))})"
    return str(getattr(x, "__name__", x))


def digest(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()


def skips_itself(name: str, p: Parameters) -> bool:
    """Combinations that the tests leave by ``pytest.skip``: not worth a place in the sample."""
    if p.get("softcap") and p.get("dropout_p"):
        return True
    if p.get("has_qv") and p["d"] != 64:
        return True
    if p.get("max_seq_len", 1) < p.get("min_seq_len", 1):
        return True
    if "kvcache" not in name or "new_kv" not in p:
        return False
    paged = p.get("paged_kv_block_size") is not None
    return (
        p["seqlen_k"] % (p.get("page_size") or 1) != 0
        or (p["seqlen_q"] > p["seqlen_k"] and p["new_kv"])
        or (not p["new_kv"] and p["rotary_fraction"] > 0.0)
        or (paged and (p["has_batch_idx"] or p["has_leftpad"]))
    )


def shortened(parameters: Parameters, longest: int) -> Parameters:
    """The case with its sequence lengths halved until none is above ``longest``: each alone, or
    both of two by the same factor if their order would change."""
    names = [x for x in ("seqlen_q", "seqlen_k", "seqlen_kv", "max_seq_len", "seqlen")
             if isinstance(parameters.get(x), int)]  # fmt: skip
    lengths = [parameters[name] for name in names]
    shifts = [max(0, ((length - 1) // longest).bit_length()) for length in lengths]
    cut = [max(1, length >> shift) for length, shift in zip(lengths, shifts, strict=True)]
    if _order(cut) != _order(lengths):
        cut = [max(1, length >> max(shifts)) for length in lengths]
    found = parameters | dict(zip(names, cut, strict=True))
    page = parameters.get("page_size") or parameters.get("paged_kv_block_size")
    if page and "seqlen_k" in found and found["seqlen_k"] != parameters["seqlen_k"]:
        found["seqlen_k"] = -(-found["seqlen_k"] // page) * page
    if "min_seq_len" in found:
        found["min_seq_len"] = min(found["min_seq_len"], found["max_seq_len"])
    return found


def _order(lengths: list[int]) -> list[int]:
    return [(x > y) - (x < y) for x, y in itertools.pairwise(lengths)]


def is_latent(p: Parameters) -> bool:
    """Of Hopper's file: a case with qv, or with values of 512 elements."""
    return "has_qv" in p and p["d"] == 64 and "float8" not in str(p["dtype"])


def sample(
    module: ModuleType, each: int, cases: int, only: str, latent: bool = False
) -> list[tuple[str, Parameters]]:
    """(test, parameters) of the sample, in the order of their digests."""
    tests = {name: x for name, x in vars(module).items() if name.startswith("test_")}
    tests = {name: x for name, x in tests.items() if only in name}
    ranked = []
    for test, function in tests.items():
        mine = [
            (digest(name_of(test, p)), test, p)
            for p in choices(function)
            if not skips_itself(test, p) and (is_latent(p) or not latent)
        ]
        ranked.append(heapq.nsmallest(cases, mine, key=lambda item: item[0]))
    chosen = {item[0]: item[1:] for mine in ranked for item in mine[:each]}
    for item in heapq.merge(*ranked, key=lambda item: item[0]):
        if len(chosen) >= cases:
            break
        chosen[item[0]] = item[1:]
    return [chosen[key] for key in sorted(chosen)]


def shares(drawn: list[tuple[str, Parameters]], workers: int) -> list[list[int]]:
    """Indices into ``drawn`` for each worker: groups that compile the same, largest first, each
    given to the worker that has least."""
    groups = collections.defaultdict(list)
    for index, (test, p) in enumerate(drawn):
        alike = (test,) if test in LARGE else tuple(str(p.get(name)) for name in COMPILED)
        groups[alike].append(index)
    found: list[list[int]] = [[] for _ in range(workers)]
    for key in sorted(groups, key=lambda key: (-len(groups[key]), key)):
        min(found, key=len).extend(groups[key])
    return found


def _trace() -> str:
    """The traceback of the error at hand, with files by their names: folders are the machine's."""
    return re.sub(r'File "[^"]*/([^"/]+)"', r'File "\1"', traceback.format_exc())


def run_one(function: Any, parameters: Parameters, limit: int) -> tuple[str, str]:
    """(status, message) of one case, which may take ``limit`` seconds; 0 for no limit."""

    def late(*_: object) -> None:
        raise Late

    signal.signal(signal.SIGALRM, late)
    signal.alarm(limit)
    try:
        return _run_one(function, parameters)
    except Late:
        return "late", f"more than {limit} s"
    finally:
        signal.alarm(0)


def _run_one(function: Any, parameters: Parameters) -> tuple[str, str]:
    import pytest
    import torch

    for attempt in range(6):
        said = io.StringIO()
        try:
            with contextlib.redirect_stdout(said):
                function(**parameters)
            return "passed", ""
        except (pytest.skip.Exception, pytest.xfail.Exception) as skipped:
            return "skipped", str(skipped)
        except NotImplementedError as refusal:  # UnsupportedProblem is one
            return "refused", str(refusal)
        except torch.OutOfMemoryError:
            # The workers share the memory, and the tests' own reference takes gigabytes.
            error = _trace()
            torch.cuda.empty_cache()
            time.sleep(3.0 * (attempt + 1))
        except (Exception, pytest.fail.Exception):
            trace = _trace()
            if any(x in trace for x in OF_A_GPU):
                return "needs a GPU", trace
            last = said.getvalue().splitlines()[-SAID:]
            return "failed", "".join(f"{line}\n" for line in last) + trace
    return "failed", error


def work(options: argparse.Namespace, done: set[str], index: int, until: float, queue: Any) -> None:
    """One worker: its share of the sample, less what is done, results into ``queue``."""
    import torch

    import pyfa

    torch.set_num_threads(1)
    module = load(options.checkout, options.as_cuda)
    drawn = _drawn(module, options)
    with pyfa.use_backend(*options.backend.split(",")):
        for position in shares(drawn, options.workers)[index]:
            if time.monotonic() > until:
                break
            test, parameters = drawn[position]
            name = name_of(test, parameters)
            if name in done:
                continue
            given = parameters
            if options.longest:
                parameters = shortened(given, options.longest)
            longest = options.longest if parameters != given else 0
            function = getattr(module, test)
            begin = time.perf_counter()
            why = marked_skip(function)
            status, message = (
                ("skipped", why) if why else run_one(function, parameters, options.late)
            )
            seconds = time.perf_counter() - begin
            queue.put((name, status, message[-3000:], seconds, longest))
            torch.cuda.empty_cache()


def _drawn(module: ModuleType, options: argparse.Namespace) -> list[tuple[str, Parameters]]:
    return sample(module, options.each, options.cases, options.only, options.latent)


def save(options: argparse.Namespace, report: dict[str, Any], seconds: float) -> None:
    """Append the run to the results that are kept."""
    from pyfa import bench

    kept = json.loads(RESULTS.read_text())
    where = bench.environment()
    kept["runs"].append({
        "file": file_of(options.checkout).as_posix().rpartition("flash-attention/")[2],
        "backend": options.backend,
        "date": datetime.date.today().isoformat(),
        "gpu": where["gpu"],
        "pyfa_commit": where["commit"],
        **({"cpu": where["cpu"], "as_cuda": options.as_cuda} if options.as_cuda else {}),
        "cases": options.cases,
        **({"only": options.only} if options.only else {}),
        "latent": options.latent,
        "workers": options.workers,
        "seconds of the cases" if options.part else "seconds": round(seconds),
        **{name: report[name] for name in KEPT if name in report},
    })  # fmt: skip
    RESULTS.write_text(bench.to_text(kept) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--each", type=int, default=10, help="of each test at least (default 10)")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--only", default="", help="of tests whose name holds this")
    parser.add_argument("--latent", action="store_true", help="of cases with qv or V of 512")
    parser.add_argument("--backend", default="triton", help="or several, in order: cuda,triton")
    parser.add_argument("--limit", type=float, default=3600.0, help="seconds, then it stops")
    parser.add_argument("--as-cuda", type=int, default=0, metavar="9", help="on a CPU")
    parser.add_argument("--longest", type=int, default=0, help="of the sequences; 0: as they are")
    parser.add_argument("--late", type=int, default=0, help="seconds for a case; 0: any")
    parser.add_argument("--part", type=Path, metavar="FILE.json", help="results so far")
    parser.add_argument("--out", type=Path, help="a report in JSON")
    parser.add_argument("--save", action="store_true", help=f"append to {RESULTS.name}")
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    results: list[tuple[str, str, str, float, int]] = []
    if options.part and options.part.exists():
        results = [tuple(result) for result in json.loads(options.part.read_text())]
    done = {name for name, *_ in results}
    begin = time.monotonic()
    until = begin + options.limit
    processes = [
        context.Process(target=work, args=(options, done, index, until, queue))
        for index in range(options.workers)
    ]
    for process in processes:
        process.start()
    # Meanwhile: what they draw, to know what they did not get to.
    chosen = _drawn(load(options.checkout, options.as_cuda), options)
    drawn = {name_of(*item) for item in chosen}
    results = [result for result in results if result[0] in drawn]
    alive, told = True, begin
    while alive or not queue.empty():
        alive = any(process.is_alive() for process in processes)
        with contextlib.suppress(Empty):
            results.append(queue.get(timeout=0.5))
        if time.monotonic() > told + 10.0:
            told = time.monotonic()
            print(f"{told - begin:4.0f} s {len(results)} of {len(drawn)}", file=sys.stderr)
            if options.part:
                options.part.write_text(json.dumps(results, indent=1))
        if time.monotonic() > until + LAST_CASE:
            for process in processes:
                process.terminate()
    lost = {index: process.exitcode for index, process in enumerate(processes) if process.exitcode}
    if options.part:
        options.part.write_text(json.dumps(results, indent=1))
    counts = collections.Counter(status for _, status, _, _, _ in results)
    by_test = collections.Counter(name.split("[")[0] for name, status, _, _, _ in results
                                  if status == "passed")  # fmt: skip
    for name, status, message, _, _ in sorted(results):
        if status != "passed":
            print(f"{status} {name}\n    {message.strip().splitlines()[-1] if message else ''}")
    left, seconds = len(drawn) - len(results), time.monotonic() - begin
    if options.part:  # what earlier runs took, too
        seconds = sum(took for _, _, _, took, _ in results)
    print(f"{dict(counts)} of {len(drawn)}, {left} not run, in {seconds:.0f} s")
    if lost:
        print(f"workers that ended with a status: {lost}")
    report = {
        "backend": options.backend,
        "counts_by_kind": dict(counts),
        "not_run": left,
        "passed_by_test": dict(sorted(by_test.items())),
        "others": [
            (name, status, message.strip()[-1500 if status == "failed" else -300 :])
            for name, status, message, _, _ in sorted(results)
            if status != "passed"
        ],
    }
    shorter = collections.Counter(longest for *_, longest in results if longest)
    if shorter:
        report["shortened"] = {f"to {length}": count for length, count in sorted(shorter.items())}
    if options.out:
        times = {name: round(seconds, 2) for name, _, _, seconds, _ in sorted(results)}
        options.out.write_text(bench.to_text(report | {"seconds": times}) + "\n")
    if options.save:
        save(options, report, seconds)
    return 1 if left or counts["failed"] or counts["late"] or not counts["passed"] else 0


if __name__ == "__main__":
    sys.exit(main())
