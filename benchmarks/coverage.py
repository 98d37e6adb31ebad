"""Measure which instructions of the common gfx942 code objects conformance cases execute.

``python benchmarks/coverage.py [--level full] [--all] [--ran FILE] [--minutes M] [--jobs N]
[--save]`` runs the cases of ``--level`` in the emulator: those of the quick level first, then the
others in turns of the kernels that they launch, so that each kernel gets as many of the first ones.
Cases that launch none of these code objects are not run. Each case is judged as in conformance.

Reports by kernel how many instructions were executed, and lists the others with the reason why no
case executes them (``unreached.py``). A reason that what ran has refuted is an error.

``--ran FILE`` keeps what each case executed; cases that the file has are not run again. SIGTERM and
the end of ``--minutes`` stop it early: what ran is counted, and the rest as not run. With 0 minutes
only what FILE has is reported. ``--save`` writes ``results/coverage_gfx942.json``, which holds for
the code objects of which it has a digest (``code``, by kernel). With ``--all`` the file is
``results/coverage_gfx942_all.json``.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import functools
import os
import signal
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import executed
import kernel_cases
import machine
import mutations
import source_lines
import unreached
from executed import ARCH, Ran
from processes import Processes

from pyfa.backends.hip import code, runtime_emulator
from pyfa.backends.hip.target import TARGET
from pyfa.backends.native import catalog
from pyfa.conformance import grid
from pyfa.conformance.cases import Case
from pyfa.conformance.report import CRASHED, FAILED, PASSED
from pyfa.emulator import Covered
from pyfa.plan import Plan

ELSEWHERE = "other code"  # the status of a case that launches none of the code objects
NOT_LAUNCHED = "no case launches it"  # the way in of a code object of which nothing was executed
_MOST_LINES = 40  # of what is left without a reason


class Of(dict[tuple[str, str, str], int]):
    """By (kernel, kind, reason): instructions that were not executed. The kind of those without a
    reason is "", and the reason their way in."""

    def add(self, key: tuple[str, str, str], count: int) -> None:
        self[key] = self.get(key, 0) + count


def left_of(plan: Plan, of_levels: Sequence[frozenset[int]]) -> list[tuple[Of, list[str]]]:
    """For the addresses that each level executes: what is left of the code object of ``plan``, and
    the reasons that it refutes."""
    found = code.load(plan, ARCH)
    program = runtime_emulator.program(found.data)
    kernel, decoded = found.kernel.name, program.kernel(found.kernel.name).code

    @functools.cache  # a second or more
    def explained() -> unreached.Explained:
        return unreached.Explained(plan, decoded, source_lines.places(plan, ARCH, program))

    def left(addresses: frozenset[int]) -> tuple[Of, list[str]]:
        of = Of()
        if not addresses:
            of.add((kernel, "", NOT_LAUNCHED), len(decoded.names))
            return of, []
        for each in unreached.left(decoded, addresses):
            rule = explained().reason(each)
            key = (rule.kind, rule.reason) if rule else ("", explained().way_in(each))
            of.add((kernel, *key), each.count)
        refuted = explained().refuted(addresses)
        return of, [f"{plan}: {rule.reason} ({rule.machine or rule.lines[0]})" for rule in refuted]

    return [left(addresses) for addresses in of_levels]


def rows_of(ran: list[Ran], static: dict[str, Covered], of: Of) -> list[dict[str, Any]]:
    """By kernel, and for all: what was executed, and how much of the rest has which reason."""
    rows = executed.coverage(ran, static)
    for row in rows:
        for kind in unreached.KINDS:
            row[kind.replace(" ", "_")] = sum(
                count for (kernel, of_kind, _), count in of.items()
                if of_kind == kind and row["kernel"] in (kernel, "all")
            )  # fmt: skip
        reachable = row["instructions"] - row["never"]
        row["share_of_reachable"] = round(row["executed"] / reachable, 4)
    return rows


def in_turns(cases: Iterable[tuple[Case, frozenset[str]]], quick: set[str]) -> list[Case]:
    """The cases of the quick level, then the others: the first of each set of kernels, the second
    of each, and so on."""
    turns = collections.Counter[frozenset[str]]()
    places = list[tuple[bool, int, bytes, Case]]()
    for case, kernels in sorted(cases, key=lambda each: mutations.place_of(each[0])):
        places.append((case.name not in quick, turns[kernels], mutations.place_of(case), case))
        turns[kernels] += 1
    return [case for *_, case in sorted(places, key=lambda place: place[:3])]


def launched(case: Case) -> frozenset[str]:
    """The code objects that ``case`` launches. Kernels with a user's function do not ship."""
    of_user = case.score_mod or case.mask_mod or case.block_mask
    return frozenset() if of_user else frozenset(kernel_cases.selected(case))


def chosen(
    cases: list[Case], plans: list[Plan], quick: set[str], jobs: int
) -> tuple[list[Case], list[Case]]:
    """Those of ``cases`` that launch code of ``plans``, in the order in which to run them, and the
    others."""
    names = {str(plan) for plan in plans}
    with concurrent.futures.ProcessPoolExecutor(jobs) as pool:
        kernels = [found & names for found in pool.map(launched, cases, chunksize=32)]
    both = list(zip(cases, kernels, strict=True))
    launching = [(case, found) for case, found in both if found]
    return in_turns(launching, quick), [case for case, found in both if not found]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--level", choices=grid.LEVELS, default="quick")
    parser.add_argument("--all", action="store_true", help="every code object of the wheel")
    parser.add_argument("--ran", type=Path, help="where what ran is kept")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    begin = time.monotonic()
    signal.signal(signal.SIGTERM, mutations.no_time_is_left)
    emulator = mutations.EMULATOR
    levels = {
        level: grid.cases(level, emulator.FEATURES, emulator.DTYPES)
        for level in dict.fromkeys(("quick", options.level))
    }
    quick, cases = {case.name for case in levels["quick"]}, levels[options.level]
    plans = (catalog.all_plans if options.all else catalog.common_plans)(TARGET, ARCH)
    of_level = {case.name for case in cases}
    ran: list[Ran] = []
    if options.ran and options.ran.exists():
        ran = [one for one in executed.read(options.ran) if one.case.name in of_level]
    known = {one.case.name for one in ran}
    new = [case for case in cases if case.name not in known] if options.minutes else []
    work, others = chosen(new, plans, quick, options.jobs)
    ran += [Ran(case, ELSEWHERE, 0.0, {}, {}) for case in others]
    print(f"{time.monotonic() - begin:.0f} s: {len(work)} cases to run", flush=True)
    processes = Processes(options.jobs, begin + options.minutes * 60, mutations.start)
    try:
        for _, one in processes.run([(mutations.run_plainly, (case, False)) for case in work]):
            ran.append(one._replace(objects={}))
    except TimeoutError:
        print("no time is left")
    processes.close()
    if options.ran:
        executed.write(options.ran, ran)
    found, refuted = measured(plans, ran, quick, options.level, options.jobs)
    result = {
        "what": f"instructions of {'all' if options.all else 'the common'} gfx942 code objects "
        "that cases execute, emulated; never, too_large, other_device: not executed, for a reason "
        "in left; share_of_reachable: without never",
        "conformance": {
            "cases": len(cases), "ran": sum(one.status != ELSEWHERE for one in ran),
            **collections.Counter(one.status for one in ran),
            "wrong": [one.case.name for one in ran if one.status in (FAILED, CRASHED)],
        },
        **found,
        "seconds_of_cases": round(sum(one.seconds for one in ran)),
    }  # fmt: skip
    for name, rows in found["coverage"].items():
        for row in rows:
            print(name, row)
    for row in found["left"]:
        print(row)
    print(result["conformance"])
    if refuted:
        sys.exit("reasons that are refuted, for unreached.py:\n" + "\n".join(refuted))
    if options.save:
        print(machine.save("coverage_gfx942_all" if options.all else "coverage_gfx942", result))


def measured(
    plans: list[Plan], ran: list[Ran], quick: set[str], level: str, jobs: int
) -> tuple[dict[str, Any], list[str]]:
    """The coverage of both levels and what the larger one leaves; and the refuted reasons."""
    with concurrent.futures.ProcessPoolExecutor(jobs) as pool:
        static = dict[str, Covered]()
        digests = list[str]()
        for digest, covered in pool.map(executed.static_of, plans):
            static[digest] = covered
            digests.append(digest)
        passed, executed_of = dict[str, list[Ran]](), list[dict[str, set[int]]]()
        for name in dict.fromkeys(("quick", level)):
            some = (one for one in ran if name != "quick" or one.case.name in quick)
            passed[name] = [one for one in some if one.status == PASSED]
            executed_of.append(executed.addresses(passed[name]))
        of_levels = [tuple(frozenset(sets[digest]) for sets in executed_of) for digest in digests]
        lefts = [Of() for _ in passed]
        refuted = list[str]()
        for found in pool.map(left_of, plans, of_levels):
            for left, (of, _) in zip(lefts, found, strict=True):
                for key, count in of.items():
                    left.add(key, count)
            refuted += found[-1][1]  # the larger level has all of the quick one
    covered = {
        name: rows_of(some, static, left)
        for (name, some), left in zip(passed.items(), lefts, strict=True)
    }
    left = listed(lefts[-1])
    return {"coverage": covered, "left": left, "code": executed.code_of(static)}, refuted


def listed(left: Of) -> list[dict[str, Any]]:
    """What is left, by reason; of what has none, the ways in that lead to most."""
    order = sorted(left.items(), key=lambda each: (not each[0][1], -each[1], each[0]))
    reasons = [each for each in order if each[0][1]]
    none = [each for each in order if not each[0][1]]
    rows = [
        {"kernel": kernel, "kind": kind or "no reason", "reason" if kind else "way_in": reason,
         "instructions": count}
        for (kernel, kind, reason), count in (*reasons, *none[:_MOST_LINES])
    ]  # fmt: skip
    rest = sum(count for _, count in none[_MOST_LINES:])
    more = {"kernel": "all", "kind": "no reason", "way_in": "all others", "instructions": rest}
    return [*rows, more] if rest else rows


if __name__ == "__main__":
    main()
