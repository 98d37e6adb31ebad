"""Compare one backend with float64 on random problems, until time is up or an error is found.

``python benchmarks/fuzz.py [--backend B] [--minutes M] [--jobs N] [--seed S] [--save]``. A problem
is a case of the conformance suite with every field drawn at random: the function, dtypes, lengths
around the edges of tiles, heads, head dims, masks, score terms, gradients, packing, caches, pages,
hostile values. It runs twice: as drawn, then with other values and with its sequences in another
order, in memory that the first has freed, so that the second call is one that pyfa has bound. What
is wrong (numbers, an error that is no refusal, a crash of the process, no answer within ``--stuck``
seconds) is made smaller as long as it stays wrong, and printed as a call to paste; the status is 1.
Nine of ten problems are short, so that many can be tried.
A mean error of fewer than 64 independent roundings is chance: where that of an output is all that
is wrong, the case is counted as "few" and is not wrong. Outputs of rows that are equal are one.
A call that a fault of another program would make wrong (``left_out``) does not run. It is counted
as "left out", with the reason. So is a call for which eager attention overflows in float16: there
is no yardstick for it.

``--families N``: the fields that decide which kernels are compiled are those of N cases, in turn.
On a GPU, float64 and the yardstick of 16-bit cases are computed there.

``--problems N`` ends after that many. ``--plant numbers``, ``crash`` or ``stuck`` is a fault that
has to be found. ``--save`` writes ``results/fuzz_<backend>_<arch>.json``, with the commit of each
part. ``--again`` runs what that file calls wrong once more, and notes there what came of it.
"""

from __future__ import annotations

import argparse
import collections
import faulthandler
import json
import os
import queue
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

import machine
import torch
from random_cases import expected_on

from pyfa import bench, binding, bound
from pyfa.backends import BACKENDS
from pyfa.backends.base import Backend
from pyfa.bound import Table
from pyfa.conformance import build, examine, modifiers, runner
from pyfa.conformance.cases import (
    BIASES,
    FLOAT8_RECIPES,
    FLOAT32_ROTARIES,
    HOSTILE,
    KINDS,
    LAYOUTS,
    RECIPES,
    ROTARIES,
    Case,
)
from pyfa.conformance.report import CRASHED, FAILED, CaseResult
from pyfa.conformance.tolerances import OVERFLOWS

_LENGTHS = (0, 1, 2, 7, 15, 16, 17, 31, 32, 33, 47, 48, 49, 63, 64, 65, 95, 96, 97, 112, 113, 127,
            128, 129, 176, 177, 191, 192, 193, 255, 256, 257)  # fmt: skip
_SHORT = 80  # rows or keys
_LEARNED = ("relative", "alibi", "gated")
_DIMS = (1, 3, 8, 16, 24, 40, 59, 64, 64, 64, 72, 80, 96, 104, 111, 128, 128, 128, 160, 192, 256)
_ROTARIES = (*ROTARIES, *FLOAT32_ROTARIES)
_BAD = (FAILED, CRASHED)
# What decides which kernels a case compiles, with whether there is a window.
_COMPILED = (
    "kind", "dtype", "head_dim", "head_dim_v", "heads_q", "heads_k", "backward", "dlse", "softcap",
    "bias", "bias_grad", "alibi", "sinks", "dropout_p", "deterministic", "page_size", "cache_dtype",
    "scales", "batch_invariant", "score_mod", "mask_mod", "captured_grad", "tree",
)  # fmt: skip


def drawn(key: str, backend: Backend, longest: int, family: str = "") -> Case:
    """A case that means something, and whose features the backend has; with ``family``, one that
    compiles what all cases of this family do."""
    draw, first = random.Random(key), drawn(family, backend, longest) if family else None
    while True:
        case = _any(draw, backend, longest)
        if first is not None:
            if (case.window is None) != (first.window is None) or case.kind != first.kind:
                continue
            case = replace(case, **{name: getattr(first, name) for name in _COMPILED})
        if not case.flaws() and case.features <= backend.FEATURES:
            return case


def numbered(number: int, options: argparse.Namespace) -> Case:
    """The case of a problem's number."""
    seed, families = options.seed, options.families
    family = f"{seed}/family/{number % families}" if families else ""
    return drawn(f"{seed}/{number}", BACKENDS[options.backend], options.longest, family)


def _any(draw: random.Random, backend: Backend, longest: int) -> Case:
    def often(share: float) -> bool:
        return draw.random() < share

    if often(0.9):
        longest = min(longest, _SHORT)
    kind, batch = draw.choice(KINDS), draw.choice((1, 1, 2, 2, 3, 5))
    few = kind == "kvcache" and often(0.6)

    def length(least: int = 0, most: int = longest) -> int:
        number = draw.choice(_LENGTHS) if often(0.6) else draw.randint(least, most)
        return min(max(number, least), most)

    same = kind == "dense"
    rows = [length(most=4 if few else longest) for _ in range(batch)]
    keys = [length() for _ in range(batch)]
    packed_q = kind == "kvcache" and often(0.2)
    if same or (kind == "kvcache" and not packed_q):
        rows = rows[:1] * batch
    if same:
        keys = keys[:1] * batch
    if often(0.3):
        keys = list(rows)
    heads_k = draw.choice((1, 1, 2, 3))
    dim = draw.choice(_DIMS)
    dtype = draw.choice(backend.DTYPES)
    float8 = dtype.startswith("float8")
    cache_dtype = ""
    if not float8 and kind == "kvcache" and often(0.15):
        cache_dtype = next((name for name in backend.DTYPES if name.startswith("float8")), "")
    any8 = float8 or bool(cache_dtype)
    recipe = draw.choice((*RECIPES, *FLOAT8_RECIPES)) if often(0.4) else "plain"
    scale = draw.choice((0.0, -0.3, 0.5)) if often(0.1) else None
    if recipe == "growing" and dim < 8:
        recipe = "plain"
    chunk = draw.choice((1, 16, 40, 64, 100, 128)) if often(0.15) else 0
    backward = kind != "kvcache" and not any8 and often(0.5)
    causal = often(0.4)
    page_size = draw.choice((16, 32, 64, 128, 48)) if kind != "dense" and often(0.3) else 0
    bias = draw.choice(BIASES) if often(0.15) else ""
    modified = often(0.06)  # few: a kernel is compiled for each
    # Of all scores, three have gradients of captured tensors: too few in a night's problems.
    scores = _LEARNED if backward and often(0.5) else [*modifiers.SCORES]
    score_mod = draw.choice(scores) if modified and often(0.6) else ""
    learned = backward and score_mod in _LEARNED
    return Case(
        kind=kind,
        dtype=dtype,
        lengths_q=tuple(rows),
        lengths_k=tuple(keys),
        heads_q=heads_k * draw.choice((1, 1, 2, 4, 8)),
        heads_k=heads_k,
        head_dim=dim,
        head_dim_v=dim if often(0.8) else draw.choice(_DIMS),
        backward=backward,
        dlse=draw.choice(("both", "only")) if backward and often(0.2) else "",
        causal=causal,
        window=_window(draw, causal, longest) if often(0.3) else None,
        attention_chunk=chunk,
        scale=scale,
        softcap=draw.choice((2.0, 30.0)) if often(0.15) else 0.0,
        bias=bias,
        bias_grad=backward and bias not in ("", "bool") and often(0.5),
        alibi=draw.choice(("heads", "batch")) if often(0.15) else "",
        sinks=often(0.15),
        dropout_p=draw.choice((0.1, 0.5)) if often(0.1) else 0.0,
        deterministic=backward and often(0.3),
        used_q=kind == "varlen" and often(0.2),
        used_k=kind != "dense" and often(0.3),
        slack=draw.choice((0, 0, 1, 5)) if kind != "dense" else 0,
        page_size=page_size,
        shared=bool(page_size) and kind == "varlen" and often(0.2),
        leftpad=kind == "kvcache" and often(0.15),
        batch_idx=kind == "kvcache" and not page_size and often(0.2),
        packed_q=packed_q,
        new_keys=draw.choice((1, 1, 2, 5)) if kind == "kvcache" and often(0.3) else 0,
        rotary=draw.choice(_ROTARIES) if kind == "kvcache" and often(0.2) else "",
        num_splits=draw.choice((1, 2, 3, 8)) if kind == "kvcache" and often(0.2) else 0,
        recipe=recipe,
        layout=draw.choice(LAYOUTS) if often(0.4) else "contiguous",
        cache_dtype=cache_dtype,
        scales=draw.choice(("tensor", "head", 16, 64)) if any8 and often(0.6) else "",
        hostile=draw.choice(HOSTILE) if often(0.1) else "",
        batch_invariant=often(0.06),
        score_mod=score_mod,
        mask_mod=draw.choice([*modifiers.MASKS]) if modified and often(0.6) else "",
        captured_grad=learned and often(0.8),
        tree=kind == "kvcache" and not bias and often(0.1),
    )


def _window(draw: random.Random, causal: bool, longest: int) -> tuple[int, int]:
    def edge() -> int:
        near = draw.randint(0, longest)
        return draw.choice((-1, 0, 1, 15, 16, 63, 64, near, -2, -17, min(-2, -near // 2)))

    return edge(), draw.choice((0, -1, -1, -5)) if causal else edge()


def again(case: Case) -> Case:
    """The same shapes with other values, the sequences in another order."""
    recipe = "offset" if case.head_dim < 8 else "growing"
    recipe = "plain" if case.recipe != "plain" else recipe
    order = [*range(1, case.batch), 0] if case.batch and case.kind != "dense" else []
    moved = {name: tuple(getattr(case, name)[i] for i in order)
             for name in ("lengths_q", "lengths_k") if order}  # fmt: skip
    other = replace(case, recipe=recipe, **moved)
    return other if not other.flaws() else replace(case, recipe=recipe)


def left_out(case: Case, backend: Backend) -> str:
    """Why a wrong result of the case would not be the backend's fault; "" if it would."""
    tensor, _, value = case.hostile.partition("=")
    if value == "nan" and is_interpreted(backend.NAME):
        dtype = case.dtypes["qkv".index(tensor)]
        if dtype.startswith("float8"):
            return "Triton's interpreter reads a NaN of float8 as a number"
    return ""


def is_interpreted(backend: str) -> bool:
    return backend == "triton" and os.environ.get("TRITON_INTERPRET") == "1"


def wrong(cases: list[Case], backend: Backend) -> tuple[str, list[str]]:
    """What the last of these calls does wrong in a process that has bound none, or "" and the
    statuses of all."""
    binding.calls, bound.calls = Table(), Table()
    where, statuses = runner.device_of(backend.NAME), []
    for case in cases:
        if reason := left_out(case, backend):
            statuses.append(f"left out: {reason}")
            continue
        result = runner.run_case(backend, case, where, expected_on(case, where))
        failed = {check.message for check in result.checks if check.message}
        if failed == {OVERFLOWS}:
            statuses.append("left out: eager attention overflows")
            continue
        few = result.status == FAILED and is_chance(case, result)
        statuses.append("few" if few else result.status)
        if result.status in _BAD and not few:
            return f"{result.status}: {' '.join(result.messages).strip()[-1500:]}", statuses
    return "", statuses


_FEW = 64  # the ratio of two means of so many errors strays by 13 %


def is_chance(case: Case, result: CaseResult) -> bool:
    """Whether all that is wrong is the mean error of an output of few roundings."""
    failed = [check for check in result.checks if check.message]
    names = {check.name for check in failed}
    means = all(check.message.startswith(f"{check.name}: mean error") for check in failed)
    if not failed or not means or not names <= {"out", "inference_out"}:
        return False
    expected = examine.Expected(build.build(case))
    error = (expected.naive["out"].double() - expected.ref["out"]).abs()
    error = error[error.isfinite()].unique()  # rows that are equal share theirs
    return float(error.sum().square()) < _FEW * float(error.square().sum())


def smaller(case: Case) -> Iterator[Case]:
    """Simpler cases, the boldest first."""
    for item in fields(Case):
        value = getattr(case, item.name)
        # Heads go to one below. From there back to their default, it would never end.
        if item.name.startswith(("lengths_", "heads_")) or value == item.default:
            continue
        if item.name == "head_dim":
            yield replace(case, head_dim=64, head_dim_v=64)
        else:
            yield replace(case, **{item.name: item.default})
    yield replace(case, heads_q=1, heads_k=1)
    for b in range(case.batch):
        kept = [i for i in range(case.batch) if i != b]
        yield replace(case, lengths_q=tuple(case.lengths_q[i] for i in kept),
                      lengths_k=tuple(case.lengths_k[i] for i in kept))  # fmt: skip
    for name in ("lengths_q", "lengths_k"):
        given = getattr(case, name)
        for least in (lambda n: n // 2, lambda n: n - 1):
            changed = tuple(max(least(n), 0) for n in given)
            yield replace(case, **{name: changed})
            for b in range(case.batch):
                yield replace(case, **{name: (*given[:b], changed[b], *given[b + 1 :])})


def shrunk(cases: list[Case], backend: Backend, seconds: float) -> list[Case]:
    """Calls that are wrong as well, as small as could be found in the time."""
    end = time.monotonic() + seconds
    if len(cases) > 1 and wrong(cases[-1:], backend)[0]:
        cases = cases[-1:]
    found = True
    while found and time.monotonic() < end:
        found = False
        for simpler in smaller(cases[0]):
            if simpler == cases[0] or simpler.flaws() or not simpler.features <= backend.FEATURES:
                continue
            tried = [simpler, again(simpler)][: len(cases)]
            if time.monotonic() < end and wrong(tried, backend)[0]:
                cases, found = tried, True
                break
    return cases


def to_paste(cases: list[Case], backend: str) -> str:
    """Python that makes these calls again."""
    lines = ["from pyfa.backends import BACKENDS", "from pyfa.conformance import Case, run_cases"]
    lines.append("cases = [")
    for case in cases:
        given = {item.name: getattr(case, item.name) for item in fields(Case)
                 if getattr(case, item.name) != item.default}  # fmt: skip
        lines.append(
            f"    Case({', '.join(f'{name}={value!r}' for name, value in given.items())}),"
        )
    return "\n".join([*lines, "]", f"run_cases(BACKENDS[{backend!r}], cases).print()"])


def work(options: argparse.Namespace) -> None:
    """A process: takes numbers of problems on stdin, answers each with a line of JSON."""
    torch.set_num_threads(1)
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    if hasattr(os, "sched_setaffinity") and options.backend == "emulator":
        os.sched_setaffinity(0, {random.choice(sorted(os.sched_getaffinity(0)))})
    backend = BACKENDS[options.backend]
    if options.plant:
        plant(backend, options.plant)
    for line in sys.stdin:
        # No answer: the process ends with a traceback, and whoever listens says which problem.
        faulthandler.dump_traceback_later(options.stuck, exit=True)
        case = numbered(int(line), options)
        cases = [case, again(case)]
        message, statuses = wrong(cases, backend)
        answer: dict[str, Any] = {"statuses": statuses}
        if message:
            cases = cases[: len(statuses)]
            faulthandler.cancel_dump_traceback_later()
            small = shrunk(cases, backend, options.shrink)
            message = wrong(small, backend)[0] or message
            answer["wrong"] = {"message": message, "paste": to_paste(small, options.backend)}
        faulthandler.cancel_dump_traceback_later()
        print(json.dumps(answer), flush=True)


def plant(backend: Backend, what: str) -> None:
    """A fault of calls with more than 40 keys."""
    true = type(backend).bind

    def bind(self: Any, plan: Any, call: Any, append: Any, with_lse: bool) -> Any:
        run = true(self, plan, call, append, with_lse)

        def broken(*tensors: torch.Tensor) -> list[torch.Tensor]:
            if what == "crash":
                os._exit(3)
            if what == "stuck":
                time.sleep(1e6)
            out, *rest = run(*tensors)
            return [out + 1.0, *rest]

        return broken if call.max_seqlen_k > 40 else run

    type(backend).bind = bind  # type: ignore[method-assign]


class Found:
    """What came of all problems."""

    def __init__(self) -> None:
        self.statuses: collections.Counter[str] = collections.Counter()
        self.problems = 0
        self.wrong: list[dict[str, Any]] = []


def drive(
    numbers: queue.SimpleQueue[int], end: float, found: Found, options: argparse.Namespace
) -> None:
    """Hands problems to a process, and to another where that one ends."""
    command = [sys.executable, __file__, "--worker", *sys.argv[1:]]
    process: subprocess.Popen[str] | None = None
    while time.monotonic() < end:
        if process is None:
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                text=True,
            )  # fmt: skip
        assert process.stdin is not None
        assert process.stdout is not None
        number = numbers.get()
        numbers.put(number + 1)
        if number - options.first >= options.problems:
            break
        try:
            process.stdin.write(f"{number}\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except BrokenPipeError:
            line = ""
        found.problems += 1
        if line:
            answer = json.loads(line)
            found.statuses.update(answer["statuses"])
            if "wrong" in answer:
                found.wrong.append({"problem": number, **answer["wrong"]})
            continue
        said = process.communicate()[1]
        case = numbered(number, options)
        message = f"the process ended with status {process.returncode}: {said[-1500:]}"
        paste = to_paste([case, again(case)], options.backend)
        found.wrong.append({"problem": number, "message": message, "paste": paste})
        process = None
    if process is not None:
        process.communicate()


def save(found: Found, options: argparse.Namespace, seconds: int) -> None:
    """Beside the parts that were saved of the same seed: a long run may come in several."""
    name, before = saved(options)
    part = {
        "first": options.first, "tried": found.problems, "calls": dict(found.statuses),
        "wrong": found.wrong, "seconds": seconds, "commit": options.commit,
    }  # fmt: skip
    parts = [each for each in before.get("parts", []) if each["first"] != options.first]
    write(name, sorted([*parts, part], key=lambda each: each["first"]), options)


def saved(options: argparse.Namespace) -> tuple[str, dict[str, Any]]:
    """The name of the file, and what it holds of the same seed; nothing if it is of another."""
    where = runner.environment(BACKENDS[options.backend], runner.device_of(options.backend))
    name = f"fuzz_{options.backend}_{where['arch']}"
    path = machine.RESULTS / f"{name}.json"
    before = json.loads(path.read_text()) if path.exists() else {}
    if any(before.get(key, 0) != value for key, value in same(options).items()):
        return name, {}
    for part in before["parts"]:  # those of older files have the file's
        part.setdefault("commit", before["environment"]["commit"])
    return name, before


def same(options: argparse.Namespace) -> dict[str, Any]:
    """What all parts of a file share."""
    return {name: getattr(options, name) for name in ("backend", "seed", "longest", "families")}


def write(name: str, parts: list[dict[str, Any]], options: argparse.Namespace) -> None:
    """``wrong`` counts what is wrong still, ``mended`` what was right when it ran ``--again``."""
    calls: collections.Counter[str] = collections.Counter()
    for each in parts:
        calls.update(each["calls"])
    ever = [each for part in parts for each in part["wrong"]]
    still = [each for each in ever if each.get("again", {}).get("message", "not run")]
    results = {
        "what": "random problems against float64 under the one rule, each called twice",
        "arch": name.split("_", 2)[2], **same(options),
        "tried": sum(each["tried"] for each in parts), "calls": dict(calls), "wrong": len(still),
        "mended": len(ever) - len(still), "seconds": sum(each["seconds"] for each in parts),
        "parts": parts,
    }  # fmt: skip
    print(machine.save(name, results))


def run_again(options: argparse.Namespace) -> int:
    """Runs each problem that the file calls wrong, as drawn and as it was made small."""
    name, before = saved(options)
    backend, still = BACKENDS[options.backend], 0
    for each in (each for part in before.get("parts", []) for each in part["wrong"]):
        case = numbered(each["problem"], options)
        if reason := left_out(case, backend):
            still += 1
            print(f"problem {each['problem']}: left out: {reason}")
            continue
        pasted: dict[str, Any] = {}
        exec(each["paste"].rsplit("\n", 1)[0], pasted)
        message, statuses = wrong([case, again(case)], backend)
        message, of_paste = (message, []) if message else wrong(pasted["cases"], backend)
        each["again"] = {"commit": options.commit, "message": message,
                         "statuses": [*statuses, *of_paste]}  # fmt: skip
        still += bool(message)
        print(f"problem {each['problem']}: {message or 'right'}")
    if before and options.save:
        write(name, before["parts"], options)
    return 1 if still else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--backend", default="torch")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--problems", type=int, default=1 << 60, help="at most so many")
    parser.add_argument("--first", type=int, default=0, help="number of the first problem")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seed", default="0")
    parser.add_argument("--longest", type=int, default=0, help="rows or keys (by the backend)")
    parser.add_argument("--families", type=int, default=0, help="of cases that compile alike")
    parser.add_argument("--stuck", type=float, help="seconds for one problem (by the backend)")
    parser.add_argument("--shrink", type=float, default=60.0, help="seconds to make it smaller")
    parser.add_argument("--plant", default="", choices=("numbers", "crash", "stuck"))
    parser.add_argument("--again", action="store_true", help="what the saved file calls wrong")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    options.longest = options.longest or {"torch": 300, "cuda": 600}.get(options.backend, 200)
    if options.stuck is None:
        # The interpreter takes minutes for the largest problems.
        options.stuck = 1200.0 if is_interpreted(options.backend) else 300.0
    if options.worker:
        work(options)
        return 0
    options.commit = bench.environment()["commit"]
    if options.again:
        return run_again(options)
    begin = time.monotonic()
    found, numbers = Found(), queue.SimpleQueue[int]()
    numbers.put(options.first)
    arguments = (numbers, begin + options.minutes * 60, found, options)
    threads = [threading.Thread(target=drive, args=arguments) for _ in range(options.jobs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for each in found.wrong:
        print(f"problem {each['problem']}: {each['message']}\n{each['paste']}\n")
    print(f"{found.problems} problems, calls: {dict(found.statuses)}, wrong: {len(found.wrong)}")
    if options.save:
        save(found, options, round(time.monotonic() - begin))
    return 1 if found.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
