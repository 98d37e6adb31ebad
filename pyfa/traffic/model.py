"""All costs of one attention on one device, standard and tiled, as numbers and as plain data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ..device import Device
from ..shape import Shape
from . import memory, sram
from .dram import each_dram_bytes, last_level_bytes
from .flops import attention_flops
from .kernels import ROLES, TiledKernel
from .passes import Pass, standard_backward, standard_forward, tiled_passes
from .requested import workgroups
from .roofline import Bound, bound, ridge

WAYS, DIRECTIONS = ("standard", "tiled"), ("forward", "backward")


@dataclass(frozen=True)
class Costs:
    """The costs of one algorithm in one direction, in bytes and FLOPs.

    ``intensity``: visible FLOPs per byte of estimated DRAM traffic. ``seconds``: a lower bound on
    the time, summed over the kernels: at peak rates, a kernel needs this time for the FLOPs of its
    tiles or for its estimated DRAM bytes. ``by``: which of the two limits most of that time,
    ``compute`` or ``memory``.
    """

    requested: int
    dram: int
    computed_flops: int
    intensity: float
    seconds: float
    by: str


@dataclass(frozen=True)
class Fit:
    """One kernel of the plan on one compute unit."""

    kernel: TiledKernel
    workgroups: int
    occupancy: sram.Occupancy | None


@dataclass(frozen=True)
class Model:
    """The result of ``model``.

    ``least``: the bound of the problem itself, from visible FLOPs and compulsory bytes; no kernel
    can be faster. ``costs``: by algorithm and direction, missing if the tiles are unknown.
    ``peak_bytes``: memory by algorithm, for a forward and for training.
    """

    shape: Shape
    device: Device
    dtype: str
    compulsory: Mapping[str, int]
    flops: Mapping[str, int]
    least: Mapping[str, Bound]
    costs: Mapping[tuple[str, str], Costs]
    peak_bytes: Mapping[tuple[str, str], int]
    fits: tuple[Fit, ...]

    @property
    def ridge(self) -> float:
        """Return the FLOP/byte above which the device's matrix units are the bound; 0 if
        unknown."""
        return ridge(self.device, self.dtype)

    def rules(self) -> dict[str, int]:
        """Return the rows per block by the rules of ``sram``, for float32 (as common notes on
        FlashAttention count) and for the problem's dtype. Empty if the device's shared-memory limit
        is unknown."""
        limits = self.device.limits
        if limits is None:
            return {}
        block, dim, size = limits.shared_bytes_per_block, self.shape.head_dim, self.shape.itemsize
        return {
            "Q, K and V, float32": sram.rows_of_three_tiles(block, dim),
            "Q, K, V, S and O, float32": sram.rows_with_scores(block, dim),
            f"Q, K and V, {self.dtype}": sram.rows_of_three_tiles(block, dim, size),
            f"Q, K, V, S and O, {self.dtype}": sram.rows_with_scores(block, dim, size),
        }

    def as_dict(self) -> dict[str, Any]:
        """Return plain data, for JSON: FLOPs, bytes, seconds, FLOP/byte."""
        device = self.device
        limits = device.limits
        return {
            "shape": self.shape._asdict() | {"visible_pairs": self.shape.visible_pairs()},
            "dtype": self.dtype,
            "device": {
                "name": device.name,
                "arch": device.arch,
                "units": device.units,
                "peak_flops": device.matrix_flops(self.dtype),
                "bandwidth": device.bandwidth,
                "ridge": self.ridge,
                "shared_bandwidth": device.shared_bandwidth,
                "shared_bytes": limits.shared_bytes if limits else 0,
                "shared_bytes_per_block": limits.shared_bytes_per_block if limits else 0,
                "last_level_bytes": last_level_bytes(device),
                "source": limits.source if limits else "",
            },
            "rows_that_fit": self.rules(),
            "kernels": [_fit_as_dict(fit) for fit in self.fits],
            "compulsory_bytes": dict(self.compulsory),
            "flops": dict(self.flops),
            "least": {name: one._asdict() for name, one in self.least.items()},
            "costs": {
                way: {
                    to: asdict(self.costs[way, to]) for to in DIRECTIONS if (way, to) in self.costs
                }
                for way in WAYS
            },
            "peak_bytes": {
                way: {to: self.peak_bytes[way, to] for to in ("forward", "training")}
                for way in WAYS
            },
        }


def model(shape: Shape, device: Device, dtype: str, kernels: Sequence[TiledKernel] = ()) -> Model:
    """Return the costs of ``shape`` on ``device``, by standard attention and by a plan's
    ``kernels``."""
    fits = tuple(
        Fit(kernel, workgroups(shape, kernel), _occupancy(device, kernel)) for kernel in kernels
    )
    forward = [kernel for kernel in kernels if kernel.role == "forward"]
    backward = [kernel for kernel in kernels if kernel.role != "forward"]
    # The workgroups that run at once: of the forward kernel as many as fit, of a matrix product one
    # per unit.
    resident = {fit.kernel.role: fit.occupancy.workgroups for fit in fits if fit.occupancy}
    ways: dict[tuple[str, str], tuple[list[Pass], int]] = {
        ("standard", "forward"): (standard_forward(shape), 1),
        ("standard", "backward"): (standard_backward(shape), 1),
    }
    for to, some in (("forward", forward), ("backward", backward)):
        if some:
            ways["tiled", to] = (tiled_passes(shape, some), resident.get(some[0].role, 1))
    compulsory = {to: memory.compulsory_bytes(shape, to == "backward") for to in DIRECTIONS}
    flops = {to: attention_flops(shape, to == "backward") for to in DIRECTIONS}
    splits = forward[0].tiling.splits if forward else 1
    sums = any("dq_sum" in ROLES[kernel.role].added for kernel in kernels)
    return Model(
        shape=shape,
        device=device,
        dtype=dtype,
        compulsory=compulsory,
        flops=flops,
        least={to: bound(device, dtype, flops[to], compulsory[to]) for to in DIRECTIONS},
        costs={
            key: _costs(passes, device, dtype, flops[key[1]], at_once * device.units)
            for key, (passes, at_once) in ways.items()
        },
        peak_bytes={
            (way, name): peak
            for training, name in ((False, "forward"), (True, "training"))
            for way, peak in (
                ("standard", memory.standard_bytes(shape, training)),
                ("tiled", memory.tiled_bytes(shape, training, splits, sums)),
            )
        },
        fits=fits,
    )


def _costs(passes: Sequence[Pass], device: Device, dtype: str, flops: int, slots: int) -> Costs:
    moved = each_dram_bytes(passes, last_level_bytes(device), slots)
    bounds = [
        bound(device, dtype, one.flops, bytes_moved)
        for one, bytes_moved in zip(passes, moved, strict=True)
    ]
    seconds = {by: sum(b.seconds for b in bounds if b.by == by) for by in ("memory", "compute")}
    known = any(b.by for b in bounds)
    return Costs(
        requested=sum(one.requested for one in passes),
        dram=sum(moved),
        computed_flops=sum(one.flops for one in passes),
        intensity=flops / sum(moved) if sum(moved) else 0.0,
        seconds=sum(seconds.values()),
        by=max(seconds, key=lambda by: seconds[by]) if known else "",
    )


def _occupancy(device: Device, kernel: TiledKernel) -> sram.Occupancy | None:
    if device.limits is None:
        return None
    return sram.occupancy(device.limits, kernel.shared_bytes, kernel.threads, kernel.registers)


def _fit_as_dict(fit: Fit) -> dict[str, Any]:
    kernel = fit.kernel
    return {
        "role": kernel.role,
        **kernel.tiling._asdict(),
        "dims": list(kernel.dims),
        "threads": kernel.threads,
        "workgroups": fit.workgroups,
        "buffers": dict(kernel.buffers),
        "shared_bytes": kernel.shared_bytes,
        "compiled": bool(kernel.compiled_bytes or kernel.registers),
        "registers": kernel.registers,
        "occupancy": fit.occupancy._asdict() if fit.occupancy else None,
    }
