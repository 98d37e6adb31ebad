"""pyfa: exact attention on AMD MI300X, NVIDIA GPUs and CPUs through one API."""

from . import masks, scores
from .api import attention, attention_kvcache, attention_varlen, explain
from .context import use_batch_invariant
from .dispatch import use_backend
from .errors import CodeObjectError, CompileError, PerformanceWarning, UnsupportedProblem
from .latent import append_latent, attention_latent
from .merging import merge
from .quantize import Quantized, quantize
from .validate import Edge

__version__ = "0.1.0"

__all__ = [
    "CodeObjectError",
    "CompileError",
    "Edge",
    "PerformanceWarning",
    "Quantized",
    "UnsupportedProblem",
    "append_latent",
    "attention",
    "attention_kvcache",
    "attention_latent",
    "attention_varlen",
    "explain",
    "masks",
    "merge",
    "quantize",
    "scores",
    "use_backend",
    "use_batch_invariant",
]
