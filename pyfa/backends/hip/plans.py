"""What the HIP kernels have in common: archs, number formats, the plans of all of them."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.nn.functional import pad

from ... import device
from ...device import DEVICES, Device
from ...plan import Plan
from ...problem import Call, Problem

ARCHS = ("gfx942",)
DTYPES = ("float16", "bfloat16")
DTYPE_CODES = {"float16": 0, "bfloat16": 1}
LDS_BYTES = 65536
COMMON_HEAD_DIMS = (64, 128)
MAX_ROW_STRIDE = 1 << 23  # elements: offsets inside a tile are 32-bit


def device_of(problem: Problem) -> Device:
    """The device that a plan is made for: the emulator's stands for an MI300X."""
    return DEVICES["MI300X"] if problem.arch == "cpu" else problem.device


def device_at(where: torch.device) -> Device:
    """The same of the device that tensors are on."""
    return DEVICES["MI300X"] if where.type == "cpu" else device.of(where)


def tensors_of(call: Call) -> dict[str, torch.Tensor]:
    """The tensors that ``call`` came with, by name: what kernels may read."""
    return {name: x for name, x in call._asdict().items() if isinstance(x, torch.Tensor)}


def dtype_code(x: torch.Tensor) -> int:
    """The DTYPE that kernels for ``x`` are compiled with."""
    return DTYPE_CODES[str(x.dtype).removeprefix("torch.")]


def bucket_of(pairs: Iterable[tuple[int, int]], head_dim: int, head_dim_v: int) -> tuple[int, int]:
    """The smallest compiled pair of head dims that holds this one."""
    return min(pair for pair in pairs if pair[0] >= head_dim and pair[1] >= head_dim_v)


def readable(x: torch.Tensor) -> torch.Tensor:
    """``x`` in 16-byte units: rows without gaps, a multiple of 8 long, bases and strides too."""
    short = -x.shape[-1] % 8
    if short:
        return pad(x, (0, short))
    *strides, last = x.stride()
    row = x.stride(-3)
    if (
        last != 1
        or x.data_ptr() % 16
        or any(stride % 8 for stride in strides)
        or not x.shape[-1] <= row < MAX_ROW_STRIDE
    ):
        return x.clone(memory_format=torch.contiguous_format)
    return x


def with_readable(call: Call) -> Call:
    """``call`` with q, k and v as the kernels read them."""
    return call._replace(q=readable(call.q), k=readable(call.k), v=readable(call.v))


def results(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse, not initialised but where rows belong to no sequence, or lie beyond one's."""
    out = call.q.new_empty(call.out_shape())
    lse = call.q.new_empty(call.lse_shape(), dtype=torch.float32)
    if call.cu_seqlens_q is not None or call.seqused_q is not None:
        out.zero_()
        lse.fill_(-torch.inf)
    return out, lse


def all_plans(backend: str) -> list[Plan]:
    """Every kernel that any problem can get."""
    from . import append, backward, combine, decode, forward

    kernels = (forward, backward, decode, combine, append)
    return [plan for kernel in kernels for plan in kernel.all_plans(backend)]


def common_plans(backend: str) -> list[Plan]:
    """The kernels that a wheel carries: heads of 64 and 128, no dropout, no pages in prefill."""
    from . import forward

    def is_common(plan: Plan) -> bool:
        constants = dict(plan.constants)
        dim = constants.get("HEAD_DIM", COMMON_HEAD_DIMS[0])
        if constants.get("PAGED") or constants.get("SCORE") == forward.DROPOUT:
            return False
        return dim in COMMON_HEAD_DIMS and constants.get("HEAD_DIM_V", dim) == dim

    return [plan for plan in all_plans(backend) if is_common(plan)]
