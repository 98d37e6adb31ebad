"""The cost of one attention, by formula: bytes, FLOPs, memory, and the bound on a device.

There are three separate byte counts: ``compulsory`` (each input read once, each output written
once), ``requested`` (what the tiles of kernels request from the memory system), and the estimate of
``dram`` between the two, from the sizes of caches. Only the first and the third are HBM traffic.

``Shape`` describes the problem, ``kernels`` the tiles, and ``requested`` counts the tiles'
requests. ``passes`` lists the kernels of tiled and of standard attention, and ``dram`` models their
traffic through a cache. ``flops`` counts products, ``memory`` bytes, and ``sram`` what fits on
chip. ``roofline`` computes the bound. ``model`` combines all of this for one problem on one device.
"""

from ..shape import Shape
from .dram import dram_bytes, last_level_bytes
from .flops import attention_flops
from .kernels import ROLES, TiledKernel, Tiling
from .memory import compulsory_bytes, tensor_bytes
from .model import Model, model
from .requested import Requested, requested_bytes

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
