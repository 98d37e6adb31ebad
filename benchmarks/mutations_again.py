"""Tries the survivors of ``mutations.py`` again, on the cases that are there now.

``python benchmarks/mutations_again.py --ran FILE [--jobs N] [--minutes M] [--save]`` reads
``results/mutations_hip.json`` and FILE, where ``mutations.py --faults 0 --ran FILE`` has noted what
each case executes. It runs the cases of the quick level that execute the place of a survivor, and
no others, and plants each survivor there as ``mutations.py`` does. ``--save`` notes in each
survivor's field ``again`` what catches it now, "survived", or that its code object is not built any
more, and writes the sums to the field ``again`` of the file. All else in the file stays.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import time
from pathlib import Path
from typing import Any

import executed
import machine_faults
import mutations
from processes import Processes

from pyfa import bench
from pyfa.bench.machine import to_text
from pyfa.conformance import grid

RESULT = Path(__file__).parent / "results" / "mutations_hip.json"
GONE, SURVIVED = "no quick case runs this code object any more", "survived"


def planted_of(survivor: dict[str, Any], digests: set[str]) -> mutations.Planted | None:
    """The fault, in the code object of which the record has the first digits."""
    digest = next((each for each in digests if each.startswith(survivor["object"])), None)
    if digest is None or "words" not in survivor:
        return None
    low, high = (int(word, 16) for word in survivor["words"])
    fault = machine_faults.Fault(survivor["kind"], low, high)
    return mutations.Planted(digest, survivor["kernel"], int(survivor["pc"], 16), fault)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ran", type=Path, required=True)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    begin = time.monotonic()
    saved = json.loads(RESULT.read_text())
    noted = executed.read(options.ran)
    planted = [planted_of(each, {d for one in noted for d in one.executed})
               for each in saved["survivors"]]  # fmt: skip
    places = {(each.digest, each.pc) for each in planted if each}
    cases = [one.case for one in noted if any(
        (digest, pc) in places for digest, (_, pcs) in one.executed.items() for pc in pcs
    )]  # fmt: skip
    processes = Processes(options.jobs, begin + options.minutes * 60, mutations.start)
    ran = list(processes.run([(mutations.run_plainly, (case, True)) for case in cases]))
    print(f"{time.monotonic() - begin:.0f} s: {len(ran)} cases ran", flush=True)
    found: dict[mutations.Planted, mutations.Verdict] = {}
    try:
        there = [each for each in planted if each]
        for verdict in mutations.judge_all(processes, there, ran, 1 << 30):
            found[verdict.planted] = verdict
            print(verdict.by or SURVIVED, verdict.case, verdict.text, flush=True)
    except TimeoutError:
        print("no time is left")
    processes.close()
    for survivor, each in zip(saved["survivors"], planted, strict=True):
        if each is None:
            survivor["again"] = GONE
        elif each in found:
            survivor["again"] = found[each].by or SURVIVED
            survivor["instruction"] = found[each].text
            if found[each].by:
                survivor["again_case"] = found[each].case
    sums = collections.Counter(each.get("again", "not run") for each in saved["survivors"])
    print(dict(sums))
    if options.save:
        saved["again"] = {
            "cases_of_the_level": len(grid.cases("quick", mutations._EMULATOR.FEATURES,
                                                 mutations._EMULATOR.DTYPES)),
            "cases_run": len(cases), "by": dict(sums), "environment": bench.environment(),
            "seconds": round(time.monotonic() - begin),
        }  # fmt: skip
        RESULT.write_text(to_text(saved) + "\n")


if __name__ == "__main__":
    main()
