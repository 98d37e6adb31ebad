"""Run the current cases on the faults that ``mutations.py`` did not catch.

``python benchmarks/mutations_again.py --ran FILE [--seed S] [--jobs N] [--minutes M] [--save]``
reads ``results/mutations_hip.json`` (or ``mutations_hip_seed_S.json``) and FILE, where
``coverage.py --ran FILE`` has noted what each case executes. A survivor that
``equivalent_faults.py`` has a reason for is equivalent. The others are tried on the cases of the
file's level that execute their place, the quickest ``--most`` of them. In the place of a survivor
whose code object no such case runs any more, a fault of the same kernel and kind is drawn, in code
that the cases execute now.

``--save`` notes in each survivor's field ``again`` what catches it now, "equivalent" or "survived",
for one that was drawn anew also its place, and writes the sums to the field ``again`` of the file.
All else in the file stays.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import random
import time
from pathlib import Path
from typing import Any

import equivalent_faults
import executed
import machine_faults
import mutations
from processes import Processes

from pyfa import bench, codeobject
from pyfa.backends.hip import code
from pyfa.backends.hip.target import TARGET
from pyfa.backends.native import catalog
from pyfa.bench.machine import to_text
from pyfa.conformance import grid
from pyfa.conformance.report import PASSED

RESULTS = Path(__file__).parent / "results"
EQUIVALENT, SURVIVED = "equivalent", "survived"


def planted_of(survivor: dict[str, Any], digests: set[str]) -> mutations.Planted | None:
    """The fault, in the code object of which the record has the first digits."""
    digest = next((each for each in digests if each.startswith(survivor["object"])), None)
    if digest is None or "words" not in survivor:
        return None
    low, high = (int(word, 16) for word in survivor["words"])
    fault = machine_faults.Fault(survivor["kind"], low, high)
    return mutations.Planted(digest, survivor["kernel"], int(survivor["pc"], 16), fault)


def drawn_anew(
    survivor: dict[str, Any], number: int, noted: list[executed.Ran], images: dict[str, bytes]
) -> mutations.Planted | None:
    """A fault of the survivor's kernel and kind in what the cases execute; None where FILE has no
    case of the kernel, as of those for mods, which do not ship."""
    places = sorted({
        (digest, pc) for one in noted for digest, (kernel, pcs) in one.executed.items()
        if kernel == survivor["kernel"] and digest in images for pc in pcs
    })  # fmt: skip
    draw = random.Random(f"again/{number}")
    while places:
        digest, pc = draw.choice(places)
        low, high = (int.from_bytes(images[digest][at : at + 4], "little") for at in (pc, pc + 4))
        found = [x for x in mutations.of_words(low, high) if x.kind == survivor["kind"]]
        if found:
            return mutations.Planted(digest, survivor["kernel"], pc, draw.choice(found))
    return None


def images_of(kernels: set[str]) -> dict[str, bytes]:
    """The code of these kernels' objects that ship."""
    plans = [plan for plan in catalog.common_plans(TARGET, executed.ARCH)
             if Path(plan.kernel).stem in kernels]  # fmt: skip
    found = [code.load(plan, executed.ARCH) for plan in plans]
    return {each.digest: codeobject.parse(each.data).image for each in found}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ran", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--most", type=int, default=12, help="cases for each")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    begin = time.monotonic()
    seed = f"_seed_{options.seed}" if options.seed else ""
    result = RESULTS / f"mutations_hip{seed}.json"
    saved = json.loads(result.read_text())
    emulator = mutations.EMULATOR
    cases = grid.cases(saved["level"], emulator.FEATURES, emulator.DTYPES)
    names = {case.name for case in cases}
    noted = [one for one in executed.read(options.ran)
             if one.case.name in names and one.status == PASSED]  # fmt: skip
    digests = {digest for one in noted for digest in one.executed}
    planted = [planted_of(each, digests) for each in saved["survivors"]]
    gone = [each for each, there in zip(saved["survivors"], planted, strict=True) if not there]
    images = images_of({each["kernel"] for each in gone})
    for number, survivor in enumerate(saved["survivors"]):
        for key in [key for key in survivor if key in _OF_AGAIN]:
            del survivor[key]
        if planted[number] is None:
            planted[number] = drawn_anew(survivor, number, noted, images)
    work, wanted = [], dict[str, executed.Ran]()
    for survivor, each in zip(saved["survivors"], planted, strict=True):
        if each is None:
            continue
        why = equivalent_faults.of_code(each.digest, each.pc, each.fault.low)
        if why:
            survivor |= {"again": EQUIVALENT, "why": why}
            continue
        work.append(each)
        executing = [x for x in noted if each.pc in x.executed.get(each.digest, ("", []))[1]]
        for one in sorted(executing, key=lambda one: one.seconds)[: options.most]:
            wanted[one.case.name] = one
    processes = Processes(options.jobs, begin + options.minutes * 60, mutations.start)
    ran = list(processes.run([(mutations.run_plainly, (x.case, True)) for x in wanted.values()]))
    print(f"{time.monotonic() - begin:.0f} s: {len(ran)} cases ran", flush=True)
    found: dict[mutations.Planted, mutations.Verdict] = {}
    try:
        for verdict in mutations.judge_all(processes, work, ran, 1 << 30):
            found[verdict.planted] = verdict
            print(verdict.by or SURVIVED, verdict.case, verdict.text, flush=True)
    except TimeoutError:
        print("no time is left")
    processes.close()
    for survivor, each in zip(saved["survivors"], planted, strict=True):
        if each in found:
            survivor["again"] = found[each].by or SURVIVED
            if found[each].by:
                survivor["again_case"] = found[each].case
        if each and not each.digest.startswith(survivor["object"]):
            survivor["drawn_anew"] = {
                "object": each.digest[:12], "pc": hex(each.pc),
                "words": [hex(word) for word in (each.fault.low, each.fault.high)],
                "instruction": found[each].text if each in found else "",
            }  # fmt: skip
    sums = collections.Counter(each.get("again", "not run") for each in saved["survivors"])
    good = saved["caught"] + sum(
        count for by, count in sums.items() if by not in (SURVIVED, "not run")
    )
    print(dict(sums), f"{good} of {saved['ran']} caught or equivalent")
    if options.save:
        saved["again"] = {
            "cases_of_the_level": len(names), "cases_run": len(ran), "by": dict(sums),
            "drawn_anew": len(gone), "caught_or_equivalent": good,
            "environment": bench.environment(), "seconds": round(time.monotonic() - begin),
        }  # fmt: skip
        result.write_text(to_text(saved) + "\n")


# What an earlier time has noted of a survivor.
_OF_AGAIN = ("again", "again_case", "instruction", "why", "drawn_anew")


if __name__ == "__main__":
    main()
