"""Compute the timing model's costs for ``pyfa bench mi300x`` (model, not measured).

    python benchmarks/mi300x_costs.py [--check]

Writes pyfa/bench/mi300x_costs.json, by the digest of each code object, so that the suite needs no
emulator on the machine that it measures. Kernels whose code and constants are what they were are
not run again. ``--check`` writes nothing and ends with status 1 where the file is not the newest.
"""

from __future__ import annotations

import argparse
import json
import sys

from pyfa.backends.hip import runtime_sensitivity
from pyfa.bench import machine, mi300x, suites


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing")
    options = parser.parse_args()
    constants = {name: list(one.ends) for name, one in mi300x.constants_known().items()}
    old = json.loads(mi300x.COSTS.read_text()) if mi300x.COSTS.exists() else {}
    known = old.get("kernels", []) if old.get("constants") == constants else []
    table = runtime_sensitivity.Table(known)
    for cell in suites.SUITES[suites.MI300X](True):
        found = mi300x.reckon(cell, table)
        print(f"{cell.name}: {cell.value(found.seconds[0]):.4g} to "
              f"{cell.value(found.seconds[1]):.4g} {cell.unit} ({mi300x.WORDS})")  # fmt: skip
    kernels = sorted(
        (one.as_dict() for one in table.used.values()),
        key=lambda one: (one["title"], one["digest"]),
    )
    new = {"what": mi300x.WORDS, "constants": constants, "kernels": kernels}
    text = machine.to_text(new) + "\n"
    if mi300x.COSTS.exists() and mi300x.COSTS.read_text() == text:
        print(f"{mi300x.COSTS.name} is the newest")
        return 0
    if options.check:
        print(f"{mi300x.COSTS.name} is of other code: {sorted(table.made_here)}")
        return 1
    mi300x.COSTS.write_text(text)
    print("wrote", mi300x.COSTS)
    return 0


if __name__ == "__main__":
    sys.exit(main())
