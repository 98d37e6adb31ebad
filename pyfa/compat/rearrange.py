"""``rearrange`` as in einops, which ``flash_attn.bert_padding`` re-exports: reshape and permute."""

from __future__ import annotations

import math
import re

import torch

from .. import validate


def rearrange(x: torch.Tensor, pattern: str, /, **sizes: int) -> torch.Tensor:
    """Return ``x`` with its axes split, moved and merged: ``"b s ... -> (b s) ..."``.

    The syntax is that of einops. Parentheses on the right merge axes. Parentheses on the left
    split an axis into ``sizes``; one size may be missing. ``...`` is any number of axes, and 1 is
    an axis of size 1. Raises ``ValueError`` if the pattern does not fit x.
    """
    left, arrow, right = pattern.partition("->")
    if not arrow:
        validate.wrong("pattern", "two sides of '->'", pattern)
    spread = x.dim() - sum(group != ["..."] for group in _groups(left))
    if spread < 0 or (spread and "..." not in left):
        validate.wrong("x", f"the axes of {left.strip()!r}", x)
    rest = " ".join(f"_{i}" for i in range(spread))
    groups, wanted = (_groups(side.replace("...", f" {rest} ")) for side in (left, right))
    known = dict(sizes)
    for group, size in zip(groups, x.shape, strict=True):
        known |= _sizes(group, size, known, x)
    order = [name for group in groups for name in group if name != "1"]
    target = [name for group in wanted for name in group if name != "1"]
    if sorted(order) != sorted(target):
        validate.wrong("pattern", "the same names on both sides", pattern)
    moved = x.reshape([known[name] for name in order]).permute([order.index(n) for n in target])
    return moved.reshape([math.prod(known[n] for n in group if n != "1") for group in wanted])


def _groups(side: str) -> list[list[str]]:
    """Return the axes of one side: single names, or the names in parentheses together."""
    if re.sub(r"\([^()]*\)|[\w.]+|\s+", "", side):
        validate.wrong("pattern", "names, parentheses and '...'", side)
    found = re.findall(r"\([^()]*\)|[\w.]+", side)
    return [each.strip("()").split() for each in found]


def _sizes(group: list[str], size: int, known: dict[str, int], x: torch.Tensor) -> dict[str, int]:
    """Return the size of each name in one axis of x; at most one of them is not given."""
    sizes = {name: known[name] for name in group if name in known}
    rest = [name for name in group if name not in known and name != "1"]
    product = math.prod(sizes.values())
    if len(rest) == 1 and product and size % product == 0:
        return {**sizes, rest[0]: size // product}
    if rest or product != size:
        validate.wrong("x", f"an axis of {' · '.join(group) or 1} with {known}", x)
    return sizes
