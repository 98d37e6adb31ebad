"""Run with TRITON_INTERPRET=1: the quantising kernel against plain PyTorch. Exits by an assert."""

import importlib
import itertools

import torch

from pyfa.backends.base import Rounding
from pyfa.backends.triton import quantize

# ``pyfa.quantize`` is the function.
plain = importlib.import_module("pyfa.quantize")._in_pytorch


def main() -> None:
    torch.manual_seed(0)
    formats = (torch.float8_e4m3fn, torch.float8_e4m3fnuz)
    ways = ((None, False), (None, True), (16, False), (64, False))
    for index, (dim, (block, per_tensor), turned) in enumerate(
        itertools.product((64, 96, 256), ways, (False, True))
    ):
        heads, dtype = (2, 4)[index % 2], formats[index % 3 == 0]
        x = torch.randn(2, 70, heads, dim) * torch.rand(2, 70, 1, 1) ** 8
        x[0, :16] = 0.0
        x = x.to((torch.bfloat16, torch.float16)[index % 2])
        signs = torch.randint(0, 2, (dim,)) * 2.0 - 1.0 if turned else None
        how = Rounding(2, block, per_tensor, signs, dtype)
        of_kernel, of_torch = quantize.quantize(x, how), plain(x, how)
        torch.testing.assert_close(of_kernel[1], of_torch[1], rtol=1e-6, atol=0.0)
        unequal = of_kernel[0].float() != of_torch[0].float()
        # Sums in another order move a rotated value across the edge of a rounding now and then.
        share = float(unequal.float().mean())
        assert share <= (2e-3 if turned else 0.0), (dim, block, per_tensor, turned, share)


if __name__ == "__main__":
    main()
