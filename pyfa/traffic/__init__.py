"""What one attention costs, by formula: bytes, FLOPs, memory, and what bounds it on a device.

Three quantities of bytes that are never confused: ``compulsory`` (each input read once, each
output written once), ``requested`` (what the tiles of kernels ask of the memory system) and the
estimate of ``dram`` between the two, from the sizes of caches. Only the first and the third are HBM
traffic.

``shape`` says what is computed, ``kernels`` with which tiles, ``requested`` what these ask for.
``passes`` puts the kernels of tiled and of standard attention one behind the other, ``dram`` sends
them through a cache, ``flops`` counts products, ``footprint`` memory, ``sram`` what fits on chip,
``roofline`` what bounds it all; ``model`` is all of that for one problem on one device.
"""

from .compulsory import compulsory_bytes, tensor_bytes
from .dram import dram_bytes, last_level_bytes
from .flops import attention_flops
from .kernels import ROLES, TiledKernel, Tiling
from .model import Model, model
from .requested import Requested, requested_bytes
from .shape import Shape

__all__ = [
    "ROLES",
    "Model",
    "Requested",
    "Shape",
    "TiledKernel",
    "Tiling",
    "attention_flops",
    "compulsory_bytes",
    "dram_bytes",
    "last_level_bytes",
    "model",
    "requested_bytes",
    "tensor_bytes",
]
