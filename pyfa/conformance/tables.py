"""The tensors that the mods of the cases capture."""

from __future__ import annotations

from collections.abc import Callable

import torch

from .cases import Case
from .inputs import integers, near_normal

Mod = Callable[..., torch.Tensor]


class Tables:
    """The tables of a case. They are made on the CPU and moved to the device of the call."""

    def __init__(self, case: Case, where: torch.device) -> None:
        self.case, self.where = case, where
        self.longest = max((*case.lengths_q, *case.lengths_k, 1))

    def integers(self, name: str, shape: tuple[int, ...], below: int) -> torch.Tensor:
        found = integers(f"{self.case.name}/{name}", torch.Size(shape).numel(), below)
        return torch.tensor(found, dtype=torch.int32).reshape(shape).to(self.where)

    def normal(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return near_normal(f"{self.case.name}/{name}", shape).to(dtype).to(self.where)
