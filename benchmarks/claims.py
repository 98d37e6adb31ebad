"""The figures of the documents that pyfa was asked for with, each beside ours.

    python benchmarks/claims.py [--save]

Five documents explain tiled attention by numbers; their names begin 000 to 004. Every numeric
statement of theirs is a row: what is stated, what comes out of ``pyfa.traffic``, of the tables of
``pyfa.device`` or of measured results, what has to be assumed for it, and a verdict. The verdict is
computed: ours lies in the interval that the stated figure means, or it does not; a statement whose
truth hangs on what is assumed has a row for each assumption. The listings of
online softmax are run by ``tests/traffic/test_listings.py``. Nothing outside the project is read.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass

import machine
from claims_rows import claims

from pyfa.cli.console import print_table

HOLDS, ASSUMING, OTHERWISE = "holds", "holds under assumptions", "not under these assumptions"
WRONG, OPEN = "wrong", "not checkable here"
VERDICTS = (HOLDS, ASSUMING, OTHERWISE, WRONG, OPEN)


@dataclass(frozen=True)
class Claim:
    """``low`` … ``high``: what the stated figure means, rounding included; ``ours`` None where it
    cannot be checked, for which ``why`` says the reason. ``assuming`` is what ours rests on beyond
    the statement itself; ``why`` otherwise a remark."""

    file: str
    statement: str
    stated: str
    low: float
    high: float
    ours: float | None
    unit: str
    assuming: str = ""
    why: str = ""

    @property
    def verdict(self) -> str:
        if self.ours is None:
            return OPEN
        if self.low <= self.ours <= self.high:
            return ASSUMING if self.assuming else HOLDS
        return OTHERWISE if self.assuming else WRONG


def rows() -> Iterator[Claim]:
    for file, statement, stated, (low, high), ours, unit, assuming, why in claims():
        yield Claim(file, statement, stated, low, high, ours, unit, assuming, why)


def as_dict(claim: Claim) -> dict[str, object]:
    data = asdict(claim)
    for end in ("low", "high"):
        if math.isinf(data[end]):
            data[end] = None  # open-ended: JSON has no infinity
    return data | {"verdict": claim.verdict}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--save", action="store_true", help="write results/claims.json")
    options = parser.parse_args()
    found = list(rows())
    print_table(
        ["file", "statement", "stated", "ours", "verdict", "assuming, or why"],
        [
            [
                claim.file[:3],
                claim.statement,
                claim.stated,
                "–" if claim.ours is None else f"{claim.ours:.4g} {claim.unit}".strip(),
                claim.verdict,
                "; ".join(text for text in (claim.assuming, claim.why) if text),
            ]
            for claim in found
        ],
    )
    counts = Counter(claim.verdict for claim in found)
    print(", ".join(f"{counts[verdict]} {verdict}" for verdict in VERDICTS))
    if options.save:
        facts = {"what": "figures of the documents", "rows": [as_dict(claim) for claim in found]}
        print(machine.save("claims", facts))
    return 0


if __name__ == "__main__":
    sys.exit(main())
