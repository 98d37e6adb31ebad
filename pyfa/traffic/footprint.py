"""Peak bytes of device memory of standard and of tiled attention, including inputs and outputs."""

from __future__ import annotations

from .compulsory import tensor_bytes
from .passes import splits_bytes
from .shape import Shape

_INPUTS, _GRADIENTS = ("q", "k", "v", "out"), ("dout", "dq", "dk", "dv")


def standard_bytes(shape: Shape, training: bool = False) -> int:
    """Return the peak bytes of eager attention, without the mask's own matrix.

    Forward: S and P exist at the same time. Training: autograd keeps P; while dS is computed, P, dP
    and dS exist, in addition to inputs, output and gradients.
    """
    sizes = tensor_bytes(shape)
    if training:
        return _sum(sizes, *_INPUTS, *_GRADIENTS) + 3 * sizes["s"]
    return _sum(sizes, *_INPUTS) + 2 * sizes["s"]


def tiled_bytes(shape: Shape, training: bool = False, splits: int = 1, sums: bool = False) -> int:
    """Return the peak bytes of kernels that keep S on chip: inputs, output, LSE, and partial
    results of split keys.

    Training adds the gradients, two floats per row that backward keeps (delta, and the LSE in base
    2) and, with ``sums``, dQ in float32.
    """
    sizes = tensor_bytes(shape)
    forward = _sum(sizes, *_INPUTS, "lse") + splits_bytes(shape, splits)
    if not training:
        return forward
    kept = 2 * sizes["delta"] + (sizes["dq_sum"] if sums else 0)
    return max(forward, _sum(sizes, *_INPUTS, *_GRADIENTS, "lse") + kept)


def _sum(sizes: dict[str, int], *names: str) -> int:
    return sum(sizes[name] for name in names)
