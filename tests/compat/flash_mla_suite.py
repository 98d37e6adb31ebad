"""Runs FlashMLA's own cases with its own reference functions against pyfa.compat.flash_mla.

    python tests/compat/flash_mla_suite.py CHECKOUT --cases 300 [--small 1500000]

CHECKOUT is a clone of https://github.com/deepseek-ai/FlashMLA. Its tests' cases (dense decoding,
sparse decoding over float8, sparse prefill; not those that only measure) are sampled by the SHA-256
of their parameters, so that a sample is the same everywhere and a larger one contains it. Inputs,
reference and tolerances are FlashMLA's; ``flash_mla`` is pyfa's. ``--small`` draws from cases of no
more rows times keys than that, which a CPU can compute. No case begins after ``--limit`` seconds.
``--save`` writes benchmarks/results/flash_mla_suite.json. Needs triton, which its helpers import.

Exit status: 0 when all pass or are refused, 1 when one fails or was not run.
"""

from __future__ import annotations

import argparse
import ast
import collections
import contextlib
import hashlib
import io
import sys
import time
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from pyfa import bench
from pyfa.compat import flash_mla

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "flash_mla_suite.json"
FILES = {
    "dense": "test_flash_mla_dense_decoding",
    "sparse": "test_flash_mla_sparse_decoding",
    "prefill": "test_flash_mla_sparse_prefill",
}


def load(checkout: Path, name: str) -> ModuleType:
    import importlib

    sys.modules["flash_mla"] = flash_mla
    sys.path.insert(0, str(checkout / "tests"))
    return importlib.import_module(name)


def cases_of(module: ModuleType, kind: str) -> list[Any]:
    """Its cases of correctness. Two of the files build them where they run: those statements are
    run here, up to the first that is no assignment of cases."""
    if kind == "sparse":
        return [case.to_test_param() for case in module.gen_testcase() if case.num_runs == 0]
    tree = ast.parse(Path(module.__file__ or "").read_text())
    wanted: list[ast.stmt] = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and node.targets[0].id in ("correctness_cases", "correctness_cases_with_features",
                                   "corner_cases")
    ]  # fmt: skip
    found: dict[str, Any] = {}
    exec(compile(ast.Module(wanted, []), module.__name__, "exec"), vars(module), found)
    cases = [case for part in found.values() for case in part]
    return [case for case in cases if getattr(case, "check_correctness", True)]


def size(kind: str, case: Any) -> int:
    if kind == "dense":
        return int(case.b * case.s_q * case.h_q * case.s_k)
    rows = case.s_q * (case.decode.b if kind == "sparse" else 1)
    extra = (case.decode.extra_topk or 0) if kind == "sparse" else 0
    return int(rows * case.h_q * (case.topk + extra))


def run(module: ModuleType, kind: str, case: Any) -> tuple[str, str]:
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said):
            if kind == "prefill":
                good = module.run_test(case)
            elif kind == "sparse":
                good = module.test_flash_mla(case).is_correct
            else:
                module.test_flash_mla(case)
                good = True
    except NotImplementedError as error:
        return "refused", str(error)
    except Exception:
        return "failed", traceback.format_exc() + said.getvalue()[-400:]
    return ("passed", "") if good else ("failed", said.getvalue()[-800:])


def on_a_cpu() -> None:
    """What their tests ask of CUDA, where there is none."""
    torch.Tensor.cuda = lambda self, *_: self  # type: ignore[method-assign]
    for name in ("synchronize", "empty_cache", "manual_seed", "set_device"):
        setattr(torch.cuda, name, lambda *_: None)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--cases", type=int, default=300)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--small", type=int, default=0, metavar="N")
    parser.add_argument("--only", choices=tuple(FILES))
    parser.add_argument("--limit", type=float, default=3600.0, help="seconds, then it stops")
    parser.add_argument("--save", action="store_true", help=f"write {RESULTS.name}")
    options = parser.parse_args()
    if options.device == "cpu":
        on_a_cpu()
    drawn = []
    modules = {}
    for kind, name in FILES.items():
        if options.only in (None, kind):
            modules[kind] = load(options.checkout, name)
            for case in cases_of(modules[kind], kind):
                if not options.small or size(kind, case) <= options.small:
                    key = hashlib.sha256(f"{kind} {case}".encode()).hexdigest()
                    drawn.append((key, kind, case))
    drawn.sort(key=lambda item: item[0])
    torch.set_default_dtype(torch.bfloat16)
    torch.set_default_device(options.device)
    counts: dict[str, collections.Counter[str]] = {kind: collections.Counter() for kind in modules}
    others = []
    begin = time.monotonic()
    for key, kind, case in drawn[: options.cases]:
        if time.monotonic() - begin > options.limit:
            counts[kind]["not run"] += 1
            continue
        if getattr(case, "seed", 0) == -1:
            case.seed = int(key[:6], 16)
        status, message = run(modules[kind], kind, case)
        counts[kind][status] += 1
        if status != "passed":
            others.append([kind, str(case), status, message.strip()[-300:]])
            print(f"{status} {kind} {case}\n    {message.strip()}")
    for kind, count in counts.items():
        print(f"{kind:8} {dict(count)}")
    if options.save:
        what = {
            "what": "FlashMLA's own tests, references and tolerances, unchanged, against "
                    "pyfa.compat.flash_mla; cases chosen by hash",
            "device": options.device, "cases": len(drawn[: options.cases]), "small": options.small,
            "seconds": round(time.monotonic() - begin),
            "counts_by_kind": {kind: dict(count) for kind, count in counts.items()},
            "others": others,
        }  # fmt: skip
        bench.write(RESULTS, what)
    return 1 if any(count["failed"] or count["not run"] for count in counts.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
