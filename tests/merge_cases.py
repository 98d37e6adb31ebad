"""Random parts for ``pyfa.merge``, held to what PyTorch's operators make of them in float32."""

from __future__ import annotations

import itertools
import random

import torch

import pyfa

FORMATS = (torch.float32, torch.float16, torch.bfloat16)


def laid_out(x: torch.Tensor, how: int) -> torch.Tensor:
    """The same elsewhere: in the middle of others, heads first, a head's elements apart."""
    if how == 1:
        return torch.nn.functional.pad(x, (3, 5))[..., 3:-5]
    if how == 2:
        return x.transpose(-3, -2).contiguous().transpose(-3, -2)
    return x.mT.contiguous().mT if how == 3 else x


def parts(
    draw: random.Random, device: str = "cpu"
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """2 to 4 parts of any formats and layout, with rows that a part, or all, have not seen."""
    torch.manual_seed(draw.randrange(1 << 30))
    dim, packed = draw.choice((7, 16, 20, 64, 256)), draw.random() < 0.4
    rows, heads, batch = draw.randint(1, 9), draw.randint(1, 5), draw.randint(1, 3)
    outs, lses = [], []
    for _ in range(draw.randint(2, 4)):
        shape = (rows, heads, dim) if packed else (batch, rows, heads, dim)
        lse = torch.randn((*shape[:-3], rows, heads)).mT * 3.0
        unseen = torch.rand(lse.shape) < 0.2
        lses.append(lse.masked_fill(unseen, -torch.inf).to(device))
        x = torch.randn(shape).masked_fill(unseen.mT[..., None], torch.nan)
        outs.append(laid_out(x.to(device, draw.choice(FORMATS)), draw.randrange(4)))
    for lse in lses:
        lse[..., -1] = -torch.inf
    return outs, lses


def agree(have: torch.Tensor, exact: torch.Tensor) -> bool:
    """Within one rounding to its format of float32 sums in another order."""
    bound = 2.0 * torch.finfo(have.dtype).eps
    return bool(((have.float() - exact).abs() <= bound * exact.abs() + 1e-6).all())


def wrong(seed: int, backend: str = "emulator", device: str = "cpu", merges: int = 12) -> bool:
    """Return whether one of these merges differs from the result of PyTorch's operators."""
    draw = random.Random(seed)
    for _ in range(merges):
        outs, lses = parts(draw, device)
        with pyfa.use_backend("torch"):
            exact, total = pyfa.merge([x.float() for x in outs], lses, return_lse=True)
        into = None
        if draw.random() < 0.5:
            dtype = draw.choice(FORMATS)
            into = torch.full(outs[0].shape, torch.nan, dtype=dtype, device=device)
        with pyfa.use_backend(backend):
            have, lse = pyfa.merge(outs, lses, into, return_lse=True)
            alone = pyfa.merge(outs, lses)
        assert into is None or have is into
        if not agree(have, exact) or not agree(alone, exact):
            return True
        if not torch.allclose(lse, total, atol=1e-5) or lse.dtype != torch.float32:
            return True
    return False


def cascade(backend: str, device: str = "cpu") -> tuple[tuple[torch.Tensor, ...], ...]:
    """Return out and LSE of attention over four parts of the keys, one of them empty, merged; and
    of attention over all keys in float32. The sinks come with the first part alone."""
    q, k, v = (
        torch.randn(2, n, h, 64, device=device).bfloat16() for n, h in ((3, 4), (90, 2), (90, 2))
    )
    sinks = torch.randn(4, device=device)
    with pyfa.use_backend(backend):
        cuts = [
            pyfa.attention(q, k[:, a:b], v[:, a:b], sinks=None if a else sinks, return_lse=True)
            for a, b in itertools.pairwise((0, 33, 33, 64, 90))
        ]
        have = pyfa.merge(*zip(*cuts, strict=True), return_lse=True)
    return have, pyfa.attention(q.float(), k.float(), v.float(), sinks=sinks, return_lse=True)
