"""How many faults of a single instruction conformance finds in the HIP kernels' machine code.

``python benchmarks/mutations.py [--level full] [--faults 200] [--jobs N] [--save]`` runs the cases
of ``--level`` on the emulator and notes which instructions each executes. That is a conformance run
with its coverage: instructions executed, of all in the code objects that ship. Then it plants
``--faults`` faults, drawn from ``--seed``, in instructions that the quick level executes, one at a
time: dropped waits and barriers, changed offsets, registers, branch conditions and comparisons
(``machine_faults.py``). Kernels and kinds take turns, so that small kernels and rare kinds are
tried as well. A fault is caught by the first case that fails or crashes, among all of the level
that execute the instruction, those of the quick level first. ``--all wait,barrier`` plants every
fault of these kinds, each before at most ``--cases`` cases.

What survives is listed with its instruction: it is equivalent, or a case is missing. A dropped wait
that survives was redundant in every case that ran it, since the emulator knows of each register,
each byte of LDS and each store whether it has been waited for.

``--minutes`` is for all of it; faults that did not run are counted. ``--save`` writes
``results/mutations_hip.json`` (with ``--all``: ``mutations_hip_all.json``).
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import functools
import hashlib
import multiprocessing
import os
import random
import sys
import time
from typing import Any, NamedTuple

import machine
import machine_faults
import torch

import pyfa.emulator
from pyfa import codeobject
from pyfa.backends import BACKENDS
from pyfa.backends.hip import code, runtime_emulator
from pyfa.backends.hip.target import TARGET
from pyfa.backends.native import catalog
from pyfa.conformance import build, examine, grid, runner
from pyfa.conformance.cases import Case
from pyfa.conformance.report import CRASHED, FAILED, PASSED
from pyfa.emulator import Coverage, Covered
from pyfa.plan import Plan

ARCH = "gfx942"
_EMULATOR: Any = BACKENDS["emulator"]
_MOST_INSTRUCTIONS = 1 << 22  # of a wavefront: a fault may make a loop without end
_prepare = pyfa.emulator.prepare
_programs = runtime_emulator.program


class Ran(NamedTuple):
    """A case without a fault: its seconds, and what it executed of each code object."""

    case: Case
    status: str
    seconds: float
    executed: dict[str, tuple[str, list[int]]]
    objects: dict[str, bytes]


class Planted(NamedTuple):
    """A fault at an address of a code object, and the cases that execute it, quick ones first."""

    digest: str
    kernel: str
    pc: int
    fault: machine_faults.Fault
    cases: tuple[Case, ...]


class Verdict(NamedTuple):
    """``by``: what caught a fault, "" where nothing did; ``case``: in which case; ``ran``: how many
    it took."""

    planted: Planted
    text: str
    by: str
    case: str
    ran: int


def start() -> None:
    """A process that runs one case at a time on one core."""
    torch.set_num_threads(1)
    runtime_emulator._cores = lambda: 1  # type: ignore[attr-defined]


@functools.lru_cache(64)
def expected_of(case: Case) -> examine.Expected:
    return examine.Expected(build.build(case))


def run_case(case: Case) -> runner.CaseResult:
    return runner.run_case(_EMULATOR, case, torch.device("cpu"), expected_of(case))


_sent: set[str] = set()


def run_plainly(case: Case) -> Ran:
    runtime = _EMULATOR.runtime
    runtime.coverage = Coverage()
    objects: dict[str, bytes] = {}

    def noting(data: bytes) -> Any:
        digest = hashlib.sha256(data).hexdigest()
        if digest not in _sent:
            _sent.add(digest)
            objects[digest] = data
        return _programs(data)

    runtime_emulator.program = noting  # type: ignore[assignment]
    begin = time.perf_counter()
    result = run_case(case)
    executed = {
        digest: (each.kernel, sorted(each.executed))
        for digest, each in runtime.coverage.objects.items()
    }
    return Ran(case, result.status, time.perf_counter() - begin, executed, objects)


def mutated(data: bytes, pc: int, fault: machine_faults.Fault) -> tuple[Any, str]:
    """The program with the fault, and the instruction before and after."""
    parsed = codeobject.parse(data)
    before = _programs(data).code
    index = before.index_at(pc)
    size = int(before.instructions[index]["size"])
    words = fault.low.to_bytes(4, "little") + fault.high.to_bytes(4, "little")
    image = parsed.image[:pc] + words[:size] + parsed.image[pc + size :]
    program = _prepare(dataclasses.replace(parsed, image=image))
    after = program.code
    row, old = after.instructions[after.index_at(pc)], before.instructions[index]
    changed = [
        f"{name} {old[name]}→{row[name]}" for name in ("imm", "dst", "sdst", "src")
        if (old[name] != row[name]).any()
    ]  # fmt: skip
    text = f"{before.text(index)} → {after.text(after.index_at(pc))}"
    return program, f"{text} ({', '.join(changed)})" if changed else text


def judge(work: tuple[Planted, bytes]) -> Verdict:
    planted, data = work
    program, text = mutated(data, planted.pc, planted.fault)

    def replaced(given: bytes) -> Any:
        same = hashlib.sha256(given).hexdigest() == planted.digest
        return program if same else _programs(given)

    runtime_emulator.program = replaced  # type: ignore[assignment]
    pyfa.emulator.Machine = functools.partial(  # type: ignore[misc]
        pyfa.emulator.machine.Machine, max_instructions=_MOST_INSTRUCTIONS
    )
    for number, case in enumerate(planted.cases):
        result = run_case(case)
        if result.status in (FAILED, CRASHED):
            message = result.messages[-1].strip() if result.messages else ""
            raised = next((line for line in message.splitlines() if "EmulatorError" in line), "")
            if raised:
                by = "emulator: " + raised.split("EmulatorError: ")[-1].split(":")[0]
            else:
                by = "wrong numbers" if result.status == FAILED else "crash"
            return Verdict(planted, text, by, case.name, number + 1)
    return Verdict(planted, text, "", "", len(planted.cases))


def drawn(
    ran: list[Ran], objects: dict[str, bytes], quick: set[str], options: argparse.Namespace
) -> list[Planted]:
    """Faults in instructions that the cases named ``quick`` executed."""
    by_place: dict[tuple[str, str, int], list[Ran]] = collections.defaultdict(list)
    for one in sorted(ran, key=lambda one: (one.case.name not in quick, one.seconds)):
        for digest, (kernel, addresses) in one.executed.items():
            for pc in addresses:
                place = kernel, digest, pc
                if one.case.name in quick or place in by_place:
                    by_place[place].append(one)
    images = {digest: codeobject.parse(data).image for digest, data in objects.items()}
    wanted = options.all.split(",") if options.all else machine_faults.KINDS
    pools: dict[tuple[str, str], list[Planted]] = collections.defaultdict(list)
    for (kernel, digest, pc), runs in sorted(by_place.items(), key=lambda item: item[0]):
        image = images[digest]
        low, high = (int.from_bytes(image[at : at + 4], "little") for at in (pc, pc + 4))
        for fault in machine_faults.faults(low, high):
            of_these = not options.kernels or kernel in options.kernels.split(",")
            if fault.kind in wanted and of_these:
                cases = tuple(one.case for one in (runs[: options.cases] if options.all else runs))
                pools[kernel, fault.kind].append(Planted(digest, kernel, pc, fault, cases))
    generator = random.Random(options.seed)
    for pool in pools.values():
        generator.shuffle(pool)
    if options.all:
        found = [each for pool in pools.values() for each in pool]
        generator.shuffle(found)
        return found
    found = []
    while len(found) < options.faults and any(pools.values()):
        found += [pool.pop() for pool in pools.values() if pool]
    return found[: options.faults]


def static_of(plan: Plan) -> tuple[str, Covered]:
    """The digest of a plan's code object and how many instructions it has."""
    found = code.load(plan, ARCH)
    kernel = _programs(found.data).kernel(found.kernel.name)
    return found.digest, Covered(found.kernel.name, len(kernel.code.names))


def coverage(ran: list[Ran], shipped: dict[str, Covered]) -> list[dict[str, Any]]:
    """By kernel: code objects that ship and instructions in them, and how many were executed."""
    total, every = Coverage(), Coverage()
    every.add(shipped)
    for one in ran:
        total.add({
            digest: Covered(kernel, shipped[digest].static, set(addresses))
            for digest, (kernel, addresses) in one.executed.items()
        })  # fmt: skip
    ran_of, rows = total.by_kernel(), []
    for kernel, (objects, static, _) in every.by_kernel().items():
        objects_ran, _, executed = ran_of.get(kernel, (0, 0, 0))
        rows.append({
            "kernel": kernel, "objects": objects, "ran": objects_ran, "instructions": static,
            "executed": executed, "share": round(executed / static, 4),
        })  # fmt: skip
    sums = {name: sum(row[name] for row in rows)
            for name in ("objects", "ran", "instructions", "executed")}  # fmt: skip
    return [
        *rows,
        {"kernel": "all", **sums, "share": round(sums["executed"] / sums["instructions"], 4)},
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--level", choices=grid.LEVELS, default="quick")
    parser.add_argument("--only", default="", help="cases whose name holds this")
    parser.add_argument("--kernels", default="", help="faults in these alone: combine,gaps")
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--all", default="", help="every fault of these kinds: wait,barrier")
    parser.add_argument("--cases", type=int, default=12, help="cases for each of --all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    begin = time.monotonic()

    def left() -> float:
        return max(0.0, options.minutes * 60 - (time.monotonic() - begin))

    def cases_of(level: str) -> list[Case]:
        found = grid.cases(level, _EMULATOR.FEATURES, _EMULATOR.DTYPES)
        return [case for case in found if options.only in case.name]

    quick = {case.name for case in cases_of("quick")}
    cases = sorted(cases_of(options.level), key=lambda case: case.name not in quick)
    objects: dict[str, bytes] = {}
    ran: list[Ran] = []
    verdicts: list[Verdict] = []
    planted: list[Planted] = []
    covered: dict[str, Any] = {}
    with multiprocessing.get_context("spawn").Pool(options.jobs, initializer=start) as pool:
        try:
            shipped = pool.imap_unordered(static_of, catalog.all_plans(TARGET, ARCH, "hip"))
            plain = pool.imap_unordered(run_plainly, cases, chunksize=4)
            for _ in cases:
                one = plain.next(timeout=left())
                objects |= one.objects
                ran.append(one)
            counts = collections.Counter(one.status for one in ran)
            print(
                f"{time.monotonic() - begin:.0f} s: {len(objects)} code objects ran, {dict(counts)}"
            )
            static = dict(shipped)
            for level in ("quick", options.level):
                of_level = [one for one in ran if level != "quick" or one.case.name in quick]
                covered[level] = coverage(of_level, static)
            for level, rows in covered.items():
                for row in rows:
                    print(level, row)
            passed = [one for one in ran if one.status == PASSED]
            planted = drawn(passed, objects, quick, options)
            found = pool.imap_unordered(judge, [(x, objects[x.digest]) for x in planted])
            for number in range(len(planted)):
                verdicts.append(found.next(timeout=left()))
                if number % 500 == 499:
                    print(f"{time.monotonic() - begin:.0f} s: {number + 1}", file=sys.stderr)
        except multiprocessing.TimeoutError:
            pool.terminate()
    conformance = {
        "cases": len(cases), "ran": len(ran), **collections.Counter(one.status for one in ran),
        "wrong": [one.case.name for one in ran if one.status in (FAILED, CRASHED)],
    }  # fmt: skip
    found = {"conformance": conformance, "coverage": covered}
    report(verdicts, len(planted), quick, found, options, time.monotonic() - begin)


def report(
    verdicts: list[Verdict],
    planted: int,
    quick: set[str],
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
            by_quick = sum(v.case in quick for v in of_kind)
            rows.append({
                "kind": kind, "planted": len(of_kind), "caught": caught,
                "caught_by_quick": by_quick, "by": dict(by),
            })  # fmt: skip
            print(f"{kind:<12} {caught:>5} of {len(of_kind):>5} caught  {dict(by)}")
    survivors = [
        {
            "kernel": v.planted.kernel, "object": v.planted.digest[:12], "pc": hex(v.planted.pc),
            "kind": v.planted.fault.kind, "change": v.text, "cases": v.ran,
        }
        for v in verdicts if not v.by
    ]  # fmt: skip
    for each in survivors[:400]:
        print("survived:", each)
    caught = len(verdicts) - len(survivors)
    print(found["conformance"])
    print(f"{caught} of {len(verdicts)} caught, {planted - len(verdicts)} not run, {seconds:.0f} s")
    if options.save:
        name = "mutations_hip_all" if options.all else "mutations_hip"
        results = {
            "what": "faults of one instruction in machine code that the level executes",
            "level": options.level, "seed": options.seed, "kinds": options.all or "all",
            "planted": planted, "ran": len(verdicts), "caught": caught,
            "not_run": planted - len(verdicts), "rows": rows, "survivors": survivors, **found,
            "seconds": round(seconds),
        }  # fmt: skip
        print(machine.save(name, results))


if __name__ == "__main__":
    main()
