"""Attention measured beside its peers: what ``pyfa bench`` runs.

``suites`` says what is measured, ``peers`` who takes part, ``timing`` how. ``runner`` puts them
together, ``comparison`` two results; ``machine`` says where results come from.
"""

from .comparison import Comparison, compare
from .machine import SCHEMA, environment, load, to_text, write
from .runner import Effort, run
from .suites import SUITES

__all__ = [
    "SCHEMA",
    "SUITES",
    "Comparison",
    "Effort",
    "compare",
    "environment",
    "load",
    "run",
    "to_text",
    "write",
]
