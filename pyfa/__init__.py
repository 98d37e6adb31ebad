"""pyfa: exact attention on AMD MI300X, NVIDIA GPUs and CPUs through one API."""

from .api import attention, attention_kvcache, attention_varlen, explain
from .dispatch import use_backend
from .errors import CodeObjectError, CompileError, PerformanceWarning, UnsupportedProblem

__version__ = "0.1.0"

__all__ = [
    "CodeObjectError",
    "CompileError",
    "PerformanceWarning",
    "UnsupportedProblem",
    "attention",
    "attention_kvcache",
    "attention_varlen",
    "explain",
    "use_backend",
]
