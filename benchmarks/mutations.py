"""Count the single-instruction faults in the HIP kernels that the conformance suite finds.

``python benchmarks/mutations.py [--level full] [--faults 200] [--jobs N] [--save]`` runs the cases
of ``--level`` on the emulator and notes which instructions each executes. That is a conformance run
with its coverage: instructions executed, of all in the common code objects. Then it plants
``--faults`` faults, drawn from ``--seed``, in instructions that the quick level executes, one at a
time: dropped waits and barriers, changed offsets, registers, branch conditions and comparisons
(``machine_faults.py``). Kernels and kinds take turns, so that small kernels and rare kinds are
tried as well. ``--all wait,barrier`` plants every fault of these kinds.

A fault is tried on every launch of the quick level that executes its instruction, each made again
from the memory that it began with (``launches.py``). Where it raises in the emulator, it is caught,
for so would the case. Where it leaves other bytes than the code without it, the whole case runs,
and has to fail. Where it leaves the same bytes in every launch, no case of the level could tell.
With ``--level full`` what survives is also tried on the cases of that level.

What survives is listed with its instruction, how many launches it left as they were and how many
not: it is equivalent, or a case is missing. A dropped wait or barrier that survives was redundant
in all that ran, since the emulator knows of each register, each byte of LDS and each store whether
it has been waited for.

``--minutes`` is for all of it; what did not run is counted. SIGTERM ends it in the same way.
``--ran FILE`` keeps what each case executed, and cases that it has are not run again where no fault
is to be planted. ``--save`` writes ``results/mutations_hip.json`` (with ``--all``:
``mutations_hip_all.json``; with another seed than 0: ``mutations_hip_seed_1.json``). A result holds
for the code objects of which the file has a digest (``code``, by kernel).
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import executed
import launches
import machine
import machine_faults
import torch
from executed import ARCH, Ran
from processes import Processes

import pyfa.emulator
from pyfa import codeobject
from pyfa.backends import BACKENDS
from pyfa.backends.hip import runtime_emulator
from pyfa.backends.hip.target import TARGET
from pyfa.backends.native import catalog
from pyfa.blocks import kept as kept_lists
from pyfa.conformance import build, examine, grid, runner
from pyfa.conformance.cases import Case
from pyfa.conformance.report import CRASHED, FAILED, PASSED
from pyfa.emulator import Coverage, Covered, EmulatorError
from pyfa.emulator.text import text_of

EMULATOR: Any = BACKENDS["emulator"]
_MOST_INSTRUCTIONS = 1 << 22  # of a wavefront: a fault may make a loop without end
_MOST_OF_FULL = 100  # cases that a survivor is tried on, in the order of their names' digests
_prepare = pyfa.emulator.prepare
_programs = runtime_emulator.program


class Planted(NamedTuple):
    """A fault at an address of a code object."""

    digest: str
    kernel: str
    pc: int
    fault: machine_faults.Fault


class Verdict(NamedTuple):
    """``by``: what caught a fault, "" where nothing did; ``case``: in which case; ``same`` and
    ``other``: launches that it left as they were, and those that still passed."""

    planted: Planted
    text: str
    by: str
    case: str
    same: int
    other: int


def start() -> None:
    """A process that runs one case at a time on one core."""
    torch.set_num_threads(1)
    runtime_emulator._cores = lambda: 1  # type: ignore[attr-defined]
    pyfa.emulator.Machine = functools.partial(  # type: ignore[misc]
        pyfa.emulator.machine.Machine, max_instructions=_MOST_INSTRUCTIONS
    )


@functools.lru_cache(256)
def expected_of(case: Case) -> examine.Expected:
    return examine.Expected(build.build(case))


def run_case(case: Case) -> runner.CaseResult:
    kept_lists.clear()  # lists that were made without the fault
    return runner.run_case(EMULATOR, case, torch.device("cpu"), expected_of(case))


_sent: set[str] = set()
_kept: dict[str, list[launches.Kept]] = collections.defaultdict(list)


def run_plainly(case: Case, keep: bool = True) -> Ran:
    """Runs a case; ``keep``: for faults to be tried on its launches in this process."""
    runtime = EMULATOR.runtime
    runtime.coverage = Coverage()
    begin = time.perf_counter()
    with launches.keeping(runtime, case.name) as made:
        result = run_case(case)
    took = time.perf_counter() - begin
    executed = {
        digest: (each.kernel, sorted(each.executed))
        for digest, each in runtime.coverage.objects.items()
    }
    objects = {}
    for each in made:
        if keep and result.status == PASSED:
            _kept[each.code.digest].append(each)
        if each.code.digest not in _sent:
            _sent.add(each.code.digest)
            objects[each.code.digest] = each.code.data
    return Ran(case, result.status, took, executed, objects)


def mutated(data: bytes, pc: int, fault: machine_faults.Fault) -> tuple[Any, str]:
    """The program with the fault, and the instruction before and after.

    Only this instruction is decoded: to decode a whole object takes longer than most launches.
    """
    program = _programs(data)
    code, before = program.code, program.object
    index = code.index_at(pc)
    size = int(code.instructions[index]["size"])
    words = fault.low.to_bytes(4, "little") + fault.high.to_bytes(4, "little")
    image = before.image[:pc] + words[:size] + before.image[pc + size :]
    here = codeobject.Function(f"0x{pc:x}", pc, size)
    one = _prepare(dataclasses.replace(before, image=image, functions=(here,))).code
    rows = code.instructions.copy()
    target = rows[index]["imm"]
    rows[index] = one.instructions[0]
    if fault.kind == "branch":  # to the same place, which is not in sight of one instruction
        rows[index]["imm"] = target
    if not code.instructions["simple"].any():  # a mode for all of the code
        rows[index]["simple"] = 0
    names = (*code.names[:index], *one.names, *code.names[index + 1 :])
    changed = dataclasses.replace(code, instructions=rows, names=names)
    old = (int.from_bytes(before.image[at : at + 4], "little") for at in (pc, pc + 4))
    text = f"{text_of(*old)} → {text_of(fault.low, fault.high)}"
    return dataclasses.replace(program, code=changed), text


def judge(planted: Planted, most: int) -> Verdict:
    """Tries a fault on what this process has kept of its code object, at most ``most`` launches."""
    kept = [each for each in _kept[planted.digest] if planted.pc in each.executed]
    kept = sorted(kept, key=lambda each: each.seconds)[:most]
    program, text = mutated(kept[0].code.data, planted.pc, planted.fault)
    same, other, ran = 0, 0, set[str]()
    with replaced(planted.digest, program):
        for each in kept:
            try:
                unchanged = each.again(EMULATOR.runtime)
            except EmulatorError as raised:
                return Verdict(planted, text, f"emulator: {raised.check}", each.case, same, other)
            same += unchanged
            other += not unchanged
            if not unchanged and each.case not in ran:
                ran.add(each.case)
                by = caught(run_case(_named()[each.case]))
                if by:
                    return Verdict(planted, text, by, each.case, same, other - 1)
    return Verdict(planted, text, "", "", same, other)


@functools.cache
def _named() -> dict[str, Case]:
    found = grid.cases("full", EMULATOR.FEATURES, EMULATOR.DTYPES)
    return {case.name: case for case in found}


def judge_in(planted: Planted, data: bytes, cases: tuple[Case, ...]) -> tuple[str, str]:
    """What catches a fault among ``cases`` of the full level, and in which."""
    program, _ = mutated(data, planted.pc, planted.fault)
    with replaced(planted.digest, program):
        for case in cases:
            by = caught(run_case(case))
            if by:
                return by, case.name
    return "", ""


@contextlib.contextmanager
def replaced(digest: str, program: Any) -> Iterator[None]:
    """Launches of this code object execute ``program``."""
    runtime_emulator.program = lambda given: (  # type: ignore[assignment]
        program if hashlib.sha256(given).hexdigest() == digest else _programs(given)
    )
    try:
        yield
    finally:
        runtime_emulator.program = _programs


def caught(result: runner.CaseResult) -> str:
    if result.status not in (FAILED, CRASHED):
        return ""
    message = result.messages[-1].strip() if result.messages else ""
    raised = next((line for line in message.splitlines() if "EmulatorError" in line), "")
    if raised:
        return "emulator: " + raised.split("EmulatorError: ")[-1].split(":")[0]
    return "wrong numbers" if result.status == FAILED else "crash"


of_words = functools.cache(machine_faults.faults)


def drawn(
    ran: list[Ran], objects: dict[str, bytes], quick: set[str], options: argparse.Namespace
) -> tuple[list[Planted], list[Planted]]:
    """Faults in instructions that the cases named ``quick`` executed: ``--faults`` of all kinds,
    and all of the kinds in ``--all``."""
    places: set[tuple[str, str, int]] = set()
    for one in ran:
        if one.case.name in quick:
            for digest, (kernel, addresses) in one.executed.items():
                places.update((kernel, digest, pc) for pc in addresses)
    images = {digest: codeobject.parse(data).image for digest, data in objects.items()}
    pools: dict[tuple[str, str], list[Planted]] = collections.defaultdict(list)
    for kernel, digest, pc in sorted(places):
        image = images[digest]
        low, high = (int.from_bytes(image[at : at + 4], "little") for at in (pc, pc + 4))
        if options.kernels and kernel not in options.kernels.split(","):
            continue
        for fault in of_words(low, high):
            pools[kernel, fault.kind].append(Planted(digest, kernel, pc, fault))
    generator = random.Random(options.seed)
    for pool in pools.values():
        generator.shuffle(pool)
    whole = [each for (_, kind), pool in pools.items() for each in pool if kind in options.all]
    generator.shuffle(whole)
    whole = whole[options.part[0] :: options.part[1]]
    found = []
    while len(found) < options.faults and any(pools.values()):
        found += [pool.pop() for pool in pools.values() if pool]
    return found[: options.faults], whole


def place_of(case: Case) -> bytes:
    return hashlib.sha256(case.name.encode()).digest()


def run_level(
    processes: Processes, cases: list[Case], quick: set[str], plant: bool
) -> Iterator[tuple[int, Ran | tuple[str, Covered]]]:
    """What each case ran, and in which process; and what ships."""
    of_cases: list[Any] = [(run_plainly, (case, plant and case.name in quick)) for case in cases]
    shipped = [(executed.static_of, (plan,)) for plan in catalog.common_plans(TARGET, ARCH)]
    yield from processes.run(shipped + of_cases)


def judge_all(
    processes: Processes, planted: list[Planted], ran: list[tuple[int, Ran]], most: int
) -> Iterator[Verdict]:
    """What becomes of each fault in the launches that the processes have kept."""
    where: dict[tuple[str, int], dict[int, float]] = collections.defaultdict(dict)
    for process, one in ran:
        for digest, (_, addresses) in one.executed.items():
            for pc in addresses if one.status == PASSED else ():
                best = where[digest, pc].get(process, one.seconds)
                where[digest, pc][process] = min(best, one.seconds)
    work: list[Any] = []
    for each in planted:
        seconds = where[each.digest, each.pc]
        work.append((sorted(seconds, key=lambda process: seconds[process]), judge, (each, most)))
    left = [len(turns) for turns, _, _ in work]
    sums = [(0, 0)] * len(work)
    for number, _, verdict in processes.run_at(work):
        left[number] -= 1
        sums[number] = sums[number][0] + verdict.same, sums[number][1] + verdict.other
        if number in processes.stopped:
            continue
        if verdict.by or not left[number] or sum(sums[number]) >= most:
            processes.stop(number)
            yield verdict._replace(same=sums[number][0], other=sums[number][1])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--level", choices=grid.LEVELS, default="quick")
    parser.add_argument("--only", default="", help="cases whose name holds this")
    parser.add_argument("--kernels", default="", help="faults in these alone: combine,gaps")
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument(
        "--all", default=(), type=lambda kinds: kinds.split(","),
        help="every fault of these kinds too: wait,barrier",
    )  # fmt: skip
    parser.add_argument(
        "--part", default=(0, 1), type=lambda part: tuple(map(int, part.split("/"))),
        help="0/4: the first quarter of those of --all; --save adds it to the others of the file",
    )  # fmt: skip
    parser.add_argument("--most", type=int, default=1 << 30, help="launches for each fault")
    parser.add_argument("--ran", type=Path, help="where what ran is kept")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    begin = time.monotonic()
    signal.signal(signal.SIGTERM, no_time_is_left)

    def cases_of(level: str) -> list[Case]:
        found = grid.cases(level, EMULATOR.FEATURES, EMULATOR.DTYPES)
        return [case for case in found if options.only in case.name]

    def say(what: object) -> None:
        print(f"{time.monotonic() - begin:.0f} s: {what}", flush=True)

    plant = bool(options.faults or options.all)
    quick = {case.name for case in cases_of("quick")}
    before: list[Ran] = []
    if options.ran and options.ran.exists():
        before = executed.read(options.ran)
    known = {one.case.name for one in before if not plant or one.case.name not in quick}
    ran: list[tuple[int, Ran]] = [(-1, one) for one in before if one.case.name in known]
    cases = [case for case in cases_of(options.level) if case.name not in known]
    # Where time is short, those of the full level that ran are a sample.
    cases.sort(key=lambda case: (case.name not in quick, place_of(case)))
    level = len(cases) + len(ran)
    objects: dict[str, bytes] = {}
    static: dict[str, Covered] = {}
    verdicts: tuple[list[Verdict], list[Verdict]] = [], []
    planted: tuple[list[Planted], list[Planted]] = [], []
    processes = Processes(options.jobs, begin + options.minutes * 60, start)
    try:
        for process, one in run_level(processes, cases, quick, plant):
            if isinstance(one, Ran):
                objects |= one.objects
                ran.append((process, one._replace(objects={})))
            else:
                static[one[0]] = one[1]
        say("the level ran")
        if plant:
            here = [one for one in ran if one[0] >= 0 and one[1].case.name in quick]
            passed = [one for _, one in here if one.status == PASSED]
            planted = drawn(passed, objects, quick, options)
            say(f"{len(planted[0])} faults of all kinds, and {len(planted[1])}")
            for some, results in zip(planted, verdicts, strict=True):
                for verdict in judge_all(processes, some, here, options.most):
                    results.append(verdict)
                    if len(results) % 1000 == 0:
                        say(len(results))
                say(f"{len(results)} judged")
                if options.level == "full" and results is verdicts[0]:
                    results[:] = in_the_full_level(processes, results, ran, objects, quick)
                    say("survivors tried in the full level")
    except TimeoutError:
        say("no time is left")
    processes.close()
    alone = [one for _, one in ran]
    if options.ran:
        executed.write(options.ran, alone)
    conformance = {
        "cases": level, "ran": len(ran), **collections.Counter(one.status for one in alone),
        "wrong": [one.case.name for one in alone if one.status in (FAILED, CRASHED)],
    }  # fmt: skip
    covered = {}
    if static:
        for name in dict.fromkeys(("quick", options.level)):
            of_level = [one for one in alone if name != "quick" or one.case.name in quick]
            covered[name] = executed.coverage(of_level, static)
            for row in covered[name]:
                print(name, row)
    found = {"conformance": conformance, "coverage": covered, "code": executed.code_of(static)}
    seed = f"_seed_{options.seed}" if options.seed else ""
    for some, results, name in zip(planted, verdicts, (seed, "_all" + seed), strict=True):
        if some:
            report(results, len(some), name, found, options, time.monotonic() - begin)


def no_time_is_left(*_: object) -> None:
    raise TimeoutError


def in_the_full_level(
    processes: Processes,
    verdicts: list[Verdict],
    ran: list[tuple[int, Ran]],
    objects: dict[str, bytes],
    quick: set[str],
) -> list[Verdict]:
    """The verdicts, where what survived is tried on the other cases that execute it."""
    survived = [each for each in verdicts if not each.by]
    work: list[Any] = []
    for each in survived:
        p = each.planted
        executing = [
            one.case for _, one in ran
            if one.case.name not in quick and one.status == PASSED
            and p.pc in one.executed.get(p.digest, ("", []))[1]
        ]  # fmt: skip
        executing.sort(key=place_of)
        cases = tuple(executing[:_MOST_OF_FULL])
        work.append((judge_full, (each, objects[p.digest], cases)))
    return [v for v in verdicts if v.by] + [result for _, result in processes.run(work)]


def judge_full(verdict: Verdict, data: bytes, cases: tuple[Case, ...]) -> Verdict:
    by, case = judge_in(verdict.planted, data, cases)
    return verdict._replace(by=by, case=case)


def report(
    verdicts: list[Verdict],
    planted: int,
    name: str,
    found: dict[str, Any],
    options: argparse.Namespace,
    seconds: float,
) -> None:
    rows = []
    for kind in machine_faults.KINDS:
        of_kind = [v for v in verdicts if v.planted.fault.kind == kind]
        if of_kind:
            by = collections.Counter(v.by or "survived" for v in of_kind)
            caught = len(of_kind) - by["survived"]
            rows.append({"kind": kind, "planted": len(of_kind), "caught": caught, "by": dict(by)})
            print(f"{kind:<12} {caught:>5} of {len(of_kind):>5} caught  {dict(by)}")
    survivors = [
        {
            "kernel": v.planted.kernel, "object": v.planted.digest[:12], "pc": hex(v.planted.pc),
            "kind": v.planted.fault.kind, "change": v.text,
            "words": [hex(word) for word in (v.planted.fault.low, v.planted.fault.high)],
            "launches_left_same": v.same,
            "launches_changed_and_passed": v.other,
        }
        for v in verdicts if not v.by
    ]  # fmt: skip
    for each in survivors[:400]:
        print("survived:", each)
    caught = len(verdicts) - len(survivors)
    print(found["conformance"])
    print(f"{caught} of {len(verdicts)} caught, {planted - len(verdicts)} not run, {seconds:.0f} s")
    if options.save:
        part = {
            "part": options.part, "planted": planted, "ran": len(verdicts), "caught": caught,
            "not_run": planted - len(verdicts), "rows": rows, "survivors": survivors, **found,
            "seconds": round(seconds),
        }  # fmt: skip
        results = {
            "what": "faults of one instruction in machine code that the level executes",
            "level": options.level, "seed": options.seed,
            "kinds": options.all if name.startswith("_all") else "all",
            "most_launches": options.most,
        }  # fmt: skip
        print(machine.save(f"mutations_hip{name}", joined(results, part, name)))


def joined(same: dict[str, Any], part: dict[str, Any], name: str) -> dict[str, Any]:
    """The results of this part, beside those of the others that were saved of the same faults."""
    number, parts = part["part"]
    if parts == 1:
        return same | {key: value for key, value in part.items() if key != "part"}
    path = machine.RESULTS / f"mutations_hip{name}.json"
    before = json.loads(path.read_text()) if path.exists() else {}
    others = [each for each in before.get("parts", []) if each["part"][0] != number
              and each["part"][1] == parts and before["seed"] == same["seed"]]  # fmt: skip
    every = sorted([*others, part], key=lambda each: each["part"][0])
    sums = {key: sum(each[key] for each in every)
            for key in ("planted", "ran", "caught", "not_run", "seconds")}  # fmt: skip
    return same | sums | {"parts": every}


if __name__ == "__main__":
    main()
