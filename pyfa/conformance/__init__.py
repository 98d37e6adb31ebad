"""The conformance suite. Its cases, inputs and error bounds are the same for every backend and on
every machine.

>>> report = conformance.run(backend="triton", level="quick")
>>> report.ok
>>> report.save_json("triton.json")
>>> conformance.compare(conformance.load("triton.json"), conformance.load("hip.json")).same
"""

from .cases import Case
from .comparison import Comparison, compare
from .grid import LEVELS
from .report import SCHEMA, CaseResult, Report, load
from .runner import run, run_cases

__all__ = [
    "LEVELS",
    "SCHEMA",
    "Case",
    "CaseResult",
    "Comparison",
    "Report",
    "compare",
    "load",
    "run",
    "run_cases",
]
