"""Count the faults in the CUDA kernels' source that the suite finds, on a GPU.

``python benchmarks/mutations_cuda.py [--faults 100] [--jobs N] [--seed S] [--again] [--save]``
plans the cases of the full level for an H200 and takes ``--plans`` of the plans that most cases
have, some of each kernel. It plants faults in them (``cuda_faults.py``), drawn from the seed, one
at a time. Kernels take turns. A fault that the compiler makes the same machine code of is none, and
another is drawn. It is in one plan here, and in the source of all: what is caught is a lower bound.

A fault is caught by the first case that fails or crashes, among those that may launch its plan:
those of the quick level, then others, for ``--seconds``. Only cases of ``--known`` plans run, since
a plan takes up to 30 seconds to compile. Each fault has a process of its own, which ends where a
case takes 20 seconds. Where the same cases end with the code unchanged, that case has caught the
fault; else such a fault is counted apart.

A survivor is tried again in two ways. With a mark in the place of its line, a variable that is set:
where no case sets it, the line is not executed, and the fault is counted apart. (A trap would take
a second each, one at a time.) And under Compute Sanitizer with six cases that have most splits and
the first six: memcheck, and racecheck for a kernel that has no TMA, for what is read or written
beside a tensor, or too early, need not show in numbers. A report counts that names the kernel with
the fault. What survives all of it is listed with its line, and with the reason in
``equivalent_faults.py`` where it is equivalent.

``--again`` also tries the survivors of the saved results whose line still exists; they are counted
apart, since they are no sample. With ``--faults 0`` the saved sample stays. After three quarters of
``--minutes`` no fault is begun; one whose cases have passed when they end has survived. ``--noted
FILE`` gets a line as soon as a fault is judged, and ``--report FILE`` makes the results of these
lines, of a run that was cut off. ``--dry`` stops in front of the first process that would use a
GPU. ``--save`` writes ``results/mutations_cuda_<arch>.json``; ``--recount`` looks up the reasons
for those survivors again.
"""

from __future__ import annotations

import argparse
import collections
import hashlib
import itertools
import json
import multiprocessing
import os
import random
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import cuda_faults
import cuda_judge
import equivalent_faults
import machine
import processes
import torch
from cuda_faults import Fault, code_of
from cuda_judge import DEVICE, Drawn, Job, from_json, level, quick, to_json

from pyfa import bench
from pyfa.backends.common.calls import DTYPE_CODES
from pyfa.backends.native.plans import source_of
from pyfa.conformance.cases import Case
from pyfa.plan import Plan
from pyfa.problem import Problem

_STUCK = 300.0


class Jobs:
    """What is still to do, the next stage of a fault before a new fault. It may have nothing now
    and something later."""

    def __init__(self, known: list[Plan], some: list[Drawn], options: argparse.Namespace) -> None:
        self.next = collections.deque(Job("build", plan) for plan in known)
        self.again = collections.deque(each for each in some if each.again)
        self.fresh = collections.deque(each for each in some if not each.again)
        self.options = options
        self.last = _BEGIN + options.minutes * 45.0  # of 60 seconds: then no fault is begun
        self.drawn_again: collections.Counter[str] = collections.Counter()
        self.under_way = 0
        self.found: list[Judged] = []
        self.passed: dict[
            tuple[Plan, Fault], Judged
        ] = {}  # all of their cases, and are tried further
        self.broken: list[str] = []

    def __iter__(self) -> Jobs:
        return self

    def __next__(self) -> Job:
        if not self.next:
            fresh = sum(not each.drawn.again for each in self.found) < self.options.faults
            some = self.again or (self.fresh if fresh else None)
            if not some or time.monotonic() > self.last:
                raise StopIteration
            each = some.popleft()
            self.under_way += 1
            self.next.append(Job("compile", each.plan, each))
        return self.next.popleft()

    def take(self, job: Job, by: str, case: str) -> Judged | None:
        """Take a job's answer; return the fault if that was the last one."""
        each = job.of
        if by == cuda_judge.BROKEN:
            self.broken.append(case)
            say(f"{by}: {job.what} {job.plan}: {case}")
            if each is not None and job.what in ("compile", "cases"):
                self.under_way -= 1
                return None
        if each is None:
            return None
        if job.what == "compile" and by != cuda_judge.COMPILED:
            # A compiler that crashes or does not end has compiled nothing either.
            self.drawn_again[by if by == cuda_judge.SAME else cuda_judge.UNCOMPILED] += 1
            self.under_way -= 1
            if each.again:
                say(f"again: {by}: {each.plan} {each.fault}")
            return None
        if job.what == "compile":
            self.next.append(job._replace(what="cases", seconds=self.options.seconds))
            return None
        if job.what == "cases" and by == cuda_judge.ALARM:
            self.next.appendleft(job._replace(what="unchanged"))
            return None
        if job.what == "unchanged":
            by = cuda_judge.ENDLESS if by == cuda_judge.SURVIVED else processes.NO_ANSWER
            case = ""
        if job.what == "cases" and by == cuda_judge.SURVIVED:
            each = each._replace(cases=each.cases[: int(case)])
            self.passed[each.plan, each.fault] = Judged(each, by, "")
            self.next.appendleft(job._replace(what="mark", of=each))
            return None
        if job.what == "mark" and by != cuda_judge.UNREACHED:
            # Also where the mark does not compile.
            if self.options.tools and not reason_of(each):
                self.next.appendleft(job._replace(what="tools"))
                return None
            by = cuda_judge.SURVIVED
        if job.what == "tools" and by not in cuda_judge.TOOLS:
            by = cuda_judge.SURVIVED
        self.under_way -= 1
        self.passed.pop((each.plan, each.fault), None)
        self.found.append(Judged(each, by, case))
        return self.found[-1]


class Judged(NamedTuple):
    drawn: Drawn
    by: str
    case: str


def reason_of(each: Drawn) -> str:
    """Return why a fault is equivalent, "" where nobody has shown it."""
    fault = each.fault
    in_front = cuda_faults.in_front(source_of(each.plan), fault.line)
    return equivalent_faults.of_source(
        str(each.plan), code_of(fault.old), code_of(fault.new), in_front
    )


def judge_all(known: list[Plan], some: list[Drawn], options: argparse.Namespace) -> Jobs:
    """Judge faults in processes that are forked by this one, which has one thread, has imported all
    and touched no GPU."""
    level()
    jobs = Jobs(known, some, options)
    end = _BEGIN + options.minutes * 60
    for job, (by, case) in processes.judged(
        jobs, cuda_judge.answer, at_once=options.jobs, stuck=_STUCK, end=end
    ):
        done = jobs.take(job, by, case)
        if done and options.noted:
            processes.note(options.noted, [to_json(done.drawn)], (done.by, done.case))
        if done:
            print(f"{time.monotonic() - _BEGIN:.0f} s:", done.by[:40] or "survived",
                  done.drawn.plan.kernel, done.drawn.fault[:4], done.case, flush=True)  # fmt: skip
        if job.what == "build" and not any(each.what == "build" for each in jobs.next):
            say(f"{len(known)} plans compiled or under way")
    jobs.under_way -= len(jobs.passed)
    jobs.found += jobs.passed.values()
    return jobs


def say(what: str) -> None:
    print(f"{time.monotonic() - _BEGIN:.0f} s: {what}", flush=True)


_BEGIN = time.monotonic()


def draw(options: argparse.Namespace) -> tuple[list[Plan], list[Drawn]]:
    """Return the plans whose cases run, and faults: survivors of the saved results, if wanted, then
    new ones, the kernels in turn."""
    launched = {name: may_launch(case) for name, case in level().items()}
    by_plan: dict[Plan, list[str]] = collections.defaultdict(list)
    for name in sorted(level(), key=lambda name: (name not in quick(), digest(name))):
        for plan in launched[name]:
            by_plan[plan].append(name)
    by_kernel: dict[str, list[Plan]] = collections.defaultdict(list)
    for plan in sorted(by_plan, key=str):
        by_kernel[plan.kernel].append(plan)
    for kernel, some in by_kernel.items():
        some.sort(key=lambda plan: -len(by_plan[plan]))
        alike: dict[Any, Plan] = {}  # but for the dtype
        for plan in some:
            rest = tuple(pair for pair in plan.constants if pair[0] != "DTYPE")
            alike.setdefault(rest if len(some) > 2 else plan, plan)
        by_kernel[kernel] = [*alike.values()][: -(-options.plans // len(by_kernel))]
    again = survivors_of_saved(by_plan) if options.again else []
    # What faults are in, with a case of each; then what most cases need, those of the quick level
    # before others.
    known = dict.fromkeys(plan for some in by_kernel.values() for plan in some)
    known |= dict.fromkeys(plan for plan, _ in again)
    for plan in [*known]:
        known |= dict.fromkeys(launched[by_plan[plan][0]])
    counts = {
        plan: len(names) + 3 * sum(name in quick() for name in names)
        for plan, names in by_plan.items()
    }
    most = sorted(by_plan, key=lambda plan: (-counts[plan], str(plan)))
    more = [plan for plan in most if plan not in known]
    known |= dict.fromkeys(more[: max(options.known - len(known), 0)])

    def drawn(plan: Plan, fault: Fault, again: bool = False) -> Drawn:
        names = [name for name in by_plan[plan] if known.keys() >= {*launched[name]}]
        return Drawn(plan, fault, names[: options.cases], again)

    found = [drawn(plan, fault, True) for plan, fault in again]
    chosen = random.Random(options.seed)
    seen = set[tuple[str, str, str, str]]()
    in_turn = itertools.cycle(sorted(by_kernel))
    for kernel in itertools.islice(in_turn, 4 * options.faults):
        plan = chosen.choice(by_kernel[kernel])
        those = list(cuda_faults.faults(source_of(plan)))
        if not those:
            continue
        kind = chosen.choice(sorted({fault.kind for fault in those}))
        fault = chosen.choice([fault for fault in those if fault.kind == kind])
        key = (kernel, fault.before, fault.old, fault.new)
        if key not in seen:
            seen.add(key)
            found.append(drawn(plan, fault))
    # The slowest to compile first.
    return sorted(known, key=lambda plan: -len(source_of(plan))), found


def survivors_of_saved(by_plan: dict[Plan, list[str]]) -> list[tuple[Plan, Fault]]:
    """Return those that nobody has explained, in the plan that is most like theirs and has the
    line."""
    saved = json.loads(_saved(DEVICE.arch).read_text())
    found = []
    parts = [saved, saved.get("again", {})]
    lines = (each for part in parts for name in _LEFT for each in part.get(name, []))
    for line in lines:
        if "equivalent" in line:
            continue
        kernel, *constants = line["plan"].split()
        some = [plan for plan in by_plan if plan.kernel == kernel]
        some.sort(key=lambda plan: len({*str(plan).split()[1:]} ^ {*constants}))
        old, new = code_of(line["old"]), code_of(line["new"])
        for plan in some[:4]:
            fault = cuda_faults.found_again(source_of(plan), line["line"], old, new)
            if fault is not None:
                found.append((plan, fault))
                break
        else:
            say(f"no longer there: {line['plan']} {line['old']}")
    return list(dict.fromkeys(found))


_LEFT = ("survivors", "no_answer_faults")  # of results: what nothing caught


def _saved(arch: str) -> Path:
    return machine.RESULTS / f"mutations_cuda_{arch}.json"


def may_launch(case: Case) -> list[Plan]:
    """Return the plans of a case on an H200. The sources of users' functions are in the processes
    that registered them: these cases have none here."""
    if case.score_mod or case.mask_mod or case.block_mask:
        return []
    narrow = case.dtypes[1] if case.dtypes[1] != case.dtype else ""
    problem = Problem(
        case.batch, max(case.lengths_q, default=0), max(case.lengths_k, default=0), case.heads_q,
        case.heads_k, case.head_dim, case.head_dim_v, case.dtype, case.features, DEVICE,
        square=case.lengths_q == case.lengths_k, page_size=case.page_size,
        aligned=case.layout not in ("unaligned", "gapped"),
        positive=case.scale is None or case.scale > 0.0, dtype_k=narrow,
        dtype_out=case.out_dtype or ("bfloat16" if case.dtype.startswith("float8") else ""),
        scales=case.scales if isinstance(case.scales, int) else 0,
    ).bucketed()  # fmt: skip
    if cuda_judge.CUDA.why_not(problem):
        return []
    found = cuda_judge.CUDA.kernels(problem)
    if case.kind not in ("kvcache", "latent"):
        found = [plan for plan in found if not plan.kernel.endswith("combine.cu")]
    if case.new_keys or case.rotary:
        dtype = DTYPE_CODES.get(case.cache_dtype or case.dtype)
        if dtype is not None:
            found = [*found, cuda_judge.CUDA.target.plan_of("cuda", "append", dtype)]
    return [replace(plan, notes=()) for plan in found]


def digest(name: str) -> bytes:
    return hashlib.sha256(name.encode()).digest()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--faults", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--plans", type=int, default=40, help="that have faults")
    parser.add_argument("--known", type=int, default=80, help="plans that cases may launch")
    parser.add_argument("--cases", type=int, default=400, help="of a fault, the most")
    parser.add_argument("--seconds", type=float, default=45.0, help="for the cases of a fault")
    parser.add_argument("--again", action="store_true", help="the survivors of saved results too")
    parser.add_argument("--tools", type=int, default=1, help="0: without Compute Sanitizer")
    parser.add_argument("--noted", type=Path, help="gets a line for each fault that is judged")
    parser.add_argument("--report", type=Path, help="what a run has noted, and no run")
    parser.add_argument("--dry", action="store_true", help="only draw")
    parser.add_argument("--recount", action="store_true", help="of saved results: reasons alone")
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.recount:
        recount(DEVICE.arch)
        return
    if options.report:
        lines = map(json.loads, options.report.read_text().splitlines())
        found = [Judged(from_json(each), by, case) for each, by, case in lines]
        report(found, {}, options, {})
        return
    # Elsewhere: to plan asks the driver, and no process can be forked that may do so again.
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        known, some = pool.submit(draw, options).result()
    again = sum(each.again for each in some)
    say(f"{len(known)} plans, {again} faults again, {len(some) - again} drawn")
    if options.dry:
        for each in some:
            print(each.plan, each.fault, len(each.cases), reason_of(each))
        return
    jobs = judge_all(known, some, options)
    seconds = round(time.monotonic() - _BEGIN)
    more = {"seconds": seconds, "not_finished": jobs.under_way, "broken": len(jobs.broken)}
    report(jobs.found, more, options, dict(jobs.drawn_again))


def report(
    found: list[Judged], more: dict[str, Any], options: argparse.Namespace, again: dict[str, int]
) -> None:
    """Print what came of the faults, and save it."""
    results = {
        "what": "faults in the source of CUDA kernels, in lines that the full level executes",
        "seed": options.seed, "known_plans": options.known, "most_cases": options.cases,
        "seconds_of_cases": options.seconds,
        "tools": bool(options.tools and cuda_judge.sanitizer()),
        **counted([each for each in found if not each.drawn.again]),
        "drawn_again": again, **more,
    }  # fmt: skip
    of_before = [each for each in found if each.drawn.again]
    if of_before:
        results["again"] = counted(of_before) | {"each": [line_of(each) for each in of_before]}
    if of_before and not options.faults:
        # The sample stays, and with it the machine and the commit that it was drawn on.
        tried = results["again"] | {"environment": bench.environment(), **more}
        results = json.loads(_saved(DEVICE.arch).read_text()) | {"again": tried}
    for line in results["survivors"]:
        print("survived:", line)
    for name, of in (("", results), ("again: ", results.get("again"))):
        if of:
            print(
                f"{name}{of['caught']} of {of['faults']} caught, {of['equivalent']} equivalent, "
                f"{of['no_answer']} gave no answer, {len(of['not_executed'])} not executed"
            )
    print(again, more)
    if options.save:
        print(machine.save(f"mutations_cuda_{DEVICE.arch}", results))


def line_of(each: Judged) -> dict[str, Any]:
    fault = each.drawn.fault
    line = {
        "plan": str(each.drawn.plan), "kind": fault.kind, "line": fault.line,
        "before": fault.before, "old": fault.old.strip(), "new": fault.new.strip(),
        "cases": len(each.drawn.cases),
    }  # fmt: skip
    why = reason_of(each.drawn) if each.by == cuda_judge.SURVIVED else ""
    by = {"equivalent": why} if why else {"by": each.by[:200], "case": each.case} if each.by else {}
    return line | by


def counted(found: list[Judged]) -> dict[str, Any]:
    """Return how many faults were caught, by what, and what was not."""
    unreached = [each for each in found if each.by == cuda_judge.UNREACHED]
    found = [each for each in found if each.by != cuda_judge.UNREACHED]
    # A loop without end, or a machine that was busy: not counted as caught.
    unanswered = [line_of(each) for each in found if each.by == processes.NO_ANSWER]
    survivors = [line_of(each) for each in found if each.by == cuda_judge.SURVIVED]
    rows = collections.Counter[tuple[str, str]](
        (each.drawn.fault.kind, each.by[:60]) for each in found if each.by != cuda_judge.SURVIVED
    )
    rows.update((line["kind"], _kind_of(line)) for line in survivors)
    return {
        "faults": len(found),
        "caught": len(found) - len(survivors) - len(unanswered),
        "equivalent": sum("equivalent" in line for line in survivors),
        "no_answer": len(unanswered),
        "rows": [{"kind": kind, "by": by, "count": n} for (kind, by), n in sorted(rows.items())],
        "survivors": survivors,
        "no_answer_faults": unanswered,
        "not_executed": [line_of(each) for each in unreached],
    }


def _kind_of(survivor: dict[str, Any]) -> str:
    return "equivalent" if "equivalent" in survivor else "survived"


def recount(arch: str) -> None:
    """Look up the survivors of the saved results again: reasons may have been found since."""
    path = _saved(arch)
    results = json.loads(path.read_text())
    for part in filter(None, (results, results.get("again"))):
        for line in part["survivors"]:
            why = _reason_of_line(line)
            line.pop("equivalent", None)
            line |= {"equivalent": why} if why else {}
        left = collections.Counter((line["kind"], _kind_of(line)) for line in part["survivors"])
        rows = [row for row in part["rows"] if row["by"] not in ("equivalent", "survived")]
        rows += [{"kind": kind, "by": by, "count": count} for (kind, by), count in left.items()]
        part["rows"] = sorted(rows, key=lambda row: (row["kind"], row["by"]))
        part["equivalent"] = sum("equivalent" in line for line in part["survivors"])
        print(f"{part['caught']} caught, {part['equivalent']} equivalent of {part['faults']}")
    path.write_text(bench.to_text(results) + "\n")


def _reason_of_line(line: dict[str, Any]) -> str:
    """Return the reason for a survivor of saved results whose line may have moved; "" where it has
    gone."""
    kernel, *constants = line["plan"].split()
    pairs = (each.split("=") for each in constants)
    plan = Plan("cuda", kernel, tuple((name, int(value)) for name, value in pairs))
    old, new = code_of(line["old"]), code_of(line["new"])
    fault = cuda_faults.found_again(source_of(plan), line["line"], old, new)
    return reason_of(Drawn(plan, fault, [])) if fault else ""


if __name__ == "__main__":
    main()
