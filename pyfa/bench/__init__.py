"""Attention compared with other libraries: the code behind ``pyfa bench``.

``suites`` lists what is measured, ``peers`` the libraries, and ``timing`` measures. ``runner``
combines them, ``comparison`` compares two results, and ``machine`` describes the machine.
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
