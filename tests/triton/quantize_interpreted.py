"""Run with TRITON_INTERPRET=1: the quantizing kernel against plain PyTorch. Exits by an assert.

    TRITON_INTERPRET=1 python quantize_interpreted.py INDEX...

The indices are those of ``CASES`` that are wanted.
"""

import importlib
import itertools
import sys

import torch
from fast_interpreter import speed_up

from pyfa.backends.base import Rounding
from pyfa.backends.triton import quantize

# ``pyfa.quantize`` is the function.
plain = importlib.import_module("pyfa.quantize")._by_pytorch

WAYS = ((None, False), (None, True), (16, False), (64, False))
CASES = tuple(itertools.product((64, 96, 128, 192, 256), WAYS, (False, True)))


def main(wanted: list[int]) -> None:
    torch.manual_seed(0)
    formats = (torch.float8_e4m3fn, torch.float8_e4m3fnuz)
    assert len(CASES) == 40  # of which the caller chooses
    for index in wanted:
        dim, (block, per_tensor), turned = CASES[index]
        dtype = formats[index % 3 == 0]
        # One launch for all, one for queries, or one for values. Of three heads a tile has rows to
        # spare.
        more, last = ((2, dim), (4, dim), (6, dim), (2, dim // 2))[index // 6 % 4]
        xs = [
            torch.randn(2, 70, n, width) * torch.rand(2, 70, 1, 1) ** 8
            for n, width in ((more, dim), (2, dim), (2, last))
        ]
        kind = (torch.bfloat16, torch.float16, torch.float32)[index // 2 % 3]
        for each, x in enumerate(xs):
            x[0, :16] = 0.0
            xs[each] = x.to(kind)
        if index % 5 == 0:
            xs[1] = xs[1].transpose(1, 2).contiguous().transpose(1, 2)
        signs = torch.randint(0, 2, (dim,)) * 2.0 - 1.0 if turned else None
        how = Rounding(2, block, per_tensor, signs, dtype)
        each = zip(quantize.quantize(xs, how), plain(xs, how), strict=True)
        for place, (of_kernel, of_torch) in enumerate(each):
            # Sums in another order move a rotated value across the edge of a rounding now and then.
            moves = turned and place < 2
            torch.testing.assert_close(
                of_kernel[1], of_torch[1], rtol=1e-6 if moves else 0.0, atol=0.0
            )
            share = float((of_kernel[0].float() != of_torch[0].float()).float().mean())
            assert share <= (2e-3 if moves else 0.0), (dim, block, per_tensor, turned, place, share)


if __name__ == "__main__":
    speed_up()
    main([int(index) for index in sys.argv[1:]])
