"""What finds faults that were planted in a kernel's source (the fixture ``plant``)."""

from collections.abc import Iterable

import torch

from pyfa.conformance import build, cases, examine
from pyfa.emulator import EmulatorError


def faults_found(wanted: Iterable[cases.Case]) -> list[str]:
    """What the emulator or the rule finds wrong, up to the first case that shows any."""
    for case in wanted:
        expected = examine.Expected(build.build(case))
        try:
            checks = examine.examine(expected, "emulator", torch.device("cpu")).checks
        except EmulatorError as error:
            return [str(error)]
        found = [check.message for check in checks if not check.passed]
        if found:
            return found
    return []
