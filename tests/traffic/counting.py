"""What the formulas are held to: the same by enumeration, pair by pair and tile by tile."""

from __future__ import annotations

from hypothesis import strategies as st

from pyfa.traffic import ROLES, Shape, TiledKernel, Tiling


def sees(shape: Shape, row: int, key: int) -> bool:
    """Whether query ``row`` sees ``key``, by the definition in the README."""
    middle = row + shape.seqlen_k - shape.seqlen_q
    left, right = shape.window_left, shape.window_right
    return not ((left >= 0 and key < middle - left) or (right >= 0 and key > middle + right))


def pairs(shape: Shape) -> list[tuple[int, int]]:
    """All (query, key) pairs that the mask leaves, of one head."""
    return [
        (i, j) for i in range(shape.seqlen_q) for j in range(shape.seqlen_k) if sees(shape, i, j)
    ]


def walked(shape: Shape, kernel: TiledKernel) -> list[list[int]]:
    """For every block of owned rows (or keys), the keys (or rows) of the tiles that it walks: from
    the tile of the first to the tile of the last that any owned one sees."""
    owns_keys = ROLES[kernel.role].owns_keys
    owned_by, step = kernel.tiling.block_q, kernel.tiling.block_k
    owned, other = shape.seqlen_q, shape.seqlen_k
    if owns_keys:
        owned_by, step, owned, other = step, owned_by, other, owned
    visible = set(pairs(shape))
    found = []
    for first in range(0, owned, owned_by):
        mine = range(first, min(first + owned_by, owned))
        seen = [
            x for x in range(other)
            if any(((x, y) if owns_keys else (y, x)) in visible for y in mine)
        ]  # fmt: skip
        begin = min(seen) // step * step if seen else 0
        end = min((max(seen) // step + 1 + kernel.ahead) * step, other) if seen else 0
        found.append(list(range(begin, end)))
    return found


def kernel(role: str, block_q: int, block_k: int, ahead: int = 0) -> TiledKernel:
    return TiledKernel(role, Tiling(block_q, block_k), (16, 32), 64, whole_tiles=True, ahead=ahead)


_length = st.integers(1, 40)
_window = st.integers(-1, 12)


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    heads_k, group = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    return Shape(
        draw(st.integers(1, 2)), draw(_length), draw(_length), heads_k * group, heads_k,
        draw(st.sampled_from((8, 16))), draw(st.sampled_from((8, 24))), draw(_window),
        draw(_window),
    )  # fmt: skip
