"""The four listings of online softmax in the documents that pyfa was asked for with, run as they
stand on maxima that grow along the keys, each with its verdict.

The update rules are transcribed, in float64, so that what is off is the rule and not rounding:
keys come in blocks, each of which may raise the maximum that earlier ones were scaled by.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

Array = NDArray[np.float64]
Attention = Callable[[Array, Array, Array], Array]
ROWS, KEYS, DIM, BLOCK, LANES = 16, 128, 32, 32, 32


def exact(q: Array, k: Array, v: Array, scale: float = 1.0) -> Array:
    s = q @ k.T * scale
    p = np.exp(s - s.max(1, keepdims=True))
    return np.asarray(p @ v / p.sum(1, keepdims=True))


def blocks(x: Array) -> list[Array]:
    return [x[first : first + BLOCK] for first in range(0, len(x), BLOCK)]


def listing_000(q: Array, k: Array, v: Array) -> Array:
    """000, lines 30 to 46."""
    m, total, out = np.full(len(q), -np.inf), np.zeros(len(q)), np.zeros((len(q), DIM))
    for k_block, v_block in zip(blocks(k), blocks(v), strict=True):
        scores = q @ k_block.T / np.sqrt(DIM)
        m_new = np.maximum(m, scores.max(1))
        total = np.exp(m - m_new) * total + np.exp(scores - m_new[:, None]).sum(1)
        m = m_new
        out += np.exp(scores - m[:, None]) @ v_block
    return np.asarray(out / total[:, None])


def listing_002_first(q: Array, k: Array, v: Array) -> Array:
    """002, lines 46 to 78: ``online_softmax_attention_block``."""
    m, total, out = np.full(len(q), -np.inf), np.zeros(len(q)), np.zeros((len(q), DIM))
    for k_block, v_block in zip(blocks(k), blocks(v), strict=True):
        s = q @ k_block.T
        m_new = np.maximum(m, s.max(1))
        scale_prev = np.exp(m - m_new)
        p = np.exp(s - m_new[:, None])
        total = total * scale_prev + p.sum(1)
        out = out * scale_prev[:, None] + p @ v_block
        m = m_new
    return np.asarray(out / total[:, None])


def listing_002_cuda(q: Array, k: Array, v: Array) -> Array:
    """002, lines 81 to 156: the maximum goes through ``warp_reduce_max``, ``row_sum`` through
    nothing. Lane l has the scores of the keys l, l + 32, … of a row and those columns of O."""
    m, out = np.full(len(q), -np.inf), np.zeros((len(q), DIM))
    sums = np.zeros((len(q), LANES))
    for k_block, v_block in zip(blocks(k), blocks(v), strict=True):
        s = q @ k_block.T
        new_max = np.maximum(m, s.max(1))
        scale = np.exp(m - new_max)
        p = np.exp(s - new_max[:, None])
        sums = sums * scale[:, None] + p.reshape(len(q), -1, LANES).sum(1)
        out = out * scale[:, None] + p @ v_block
        m = new_max
    inverse = 1.0 / sums
    return np.asarray(out * np.tile(inverse, DIM // LANES))


def listing_002_second(q: Array, k: Array, v: Array) -> Array:
    """002, lines 171 to 187: ``flash_attention_2_block``, said to rescale once in the end."""
    m, total, unscaled = np.full(len(q), -np.inf), np.zeros(len(q)), np.zeros((len(q), DIM))
    for k_block, v_block in zip(blocks(k), blocks(v), strict=True):
        s = q @ k_block.T
        m_block = s.max(1)
        m_new = np.maximum(m, m_block)
        p = np.exp(s - m_block[:, None])
        unscaled += p @ v_block * np.exp(m_block - m_new)[:, None]
        total *= np.exp(m - m_new)
        total += p.sum(1) * np.exp(m_block - m_new)
        m = m_new
    return np.asarray(unscaled / total[:, None])


def problem(growing: bool) -> tuple[Array, Array, Array]:
    """Scores of a standard deviation near 1; ``growing`` by 3 a block of keys, else falling.

    All of q is positive in its last element, where the keys of a block share a value.
    """
    random = np.random.Generator(np.random.PCG64(0))
    # From raw integers: the streams of `normal` are not frozen across versions of numpy.
    q, k, v = (
        random.integers(-(2**15), 2**15, size).astype(np.float64) / 2**15
        for size in ((ROWS, DIM), (KEYS, DIM), (KEYS, DIM))
    )
    q[:, -1] = 1.0
    steps = np.repeat(np.arange(KEYS // BLOCK), BLOCK)
    k[:, -1] = 3.0 * (steps if growing else steps[::-1])
    return q, k, v


LISTINGS: dict[str, tuple[Attention, float]] = {
    "000": (listing_000, DIM**-0.5),
    "002, first": (listing_002_first, 1.0),
    "002, CUDA": (listing_002_cuda, 1.0),
    "002, FlashAttention-2": (listing_002_second, 1.0),
}


def error(name: str, growing: bool, factor: float = 1.0) -> float:
    """Against exact attention with the listing's own scale. ``factor`` on the growing part."""
    attention, scale = LISTINGS[name]
    q, k, v = problem(growing)
    k[:, -1] *= factor / scale
    return float(np.abs(attention(q, k, v) - exact(q, k, v, scale)).max())


def test_the_first_of_002_is_right() -> None:
    assert error("002, first", growing=True) < 1e-14
    assert error("002, first", growing=False) < 1e-14
    # What it leaves out: 1/√d, and rows that see nothing, which are NaN.
    with np.errstate(invalid="ignore"):
        nothing = listing_002_first(
            np.ones((1, DIM)), np.full((BLOCK, DIM), -np.inf), np.ones((BLOCK, DIM))
        )
    assert np.isnan(nothing).all()


@pytest.mark.parametrize("name", ["000", "002, FlashAttention-2"])
def test_an_output_that_is_not_rescaled_is_wrong_where_maxima_grow(name: str) -> None:
    """Earlier blocks keep the weight that they had under a smaller maximum: e³ each time."""
    # V lies within ±1: half of its range and more. How much depends on the inputs.
    assert error(name, growing=True) > 0.5
    # As long as the first block has the maximum nothing has to be rescaled, and all is well.
    assert error(name, growing=False, factor=2.0) < 1e-14
    # The larger the steps, the more of the output is what should have vanished.
    assert error(name, growing=True, factor=2.0) > error(name, growing=True)


def test_both_wrong_rules_are_one_and_the_same() -> None:
    """Their O is Σ exp(s − the maximum so far) V: 002's only gets there by a detour."""
    q, k, v = problem(growing=True)
    scaled = k * DIM**0.5
    np.testing.assert_allclose(listing_000(q, scaled, v), listing_002_second(q, k, v), rtol=1e-12)


def test_a_row_sum_that_is_not_reduced_over_the_warp_is_wrong() -> None:
    """Each lane divides its columns by the sum of its own keys, a 32nd of the whole on average."""
    q, k, v = problem(growing=True)
    found, right = listing_002_cuda(q, k, v), exact(q, k, v)
    assert np.median(np.abs(found / right)) > LANES / 2
    # In a warp whose keys are all alike a lane's sum is a 32nd exactly; all else is right.
    alike = np.repeat(k[::LANES], LANES, 0)
    np.testing.assert_allclose(
        listing_002_cuda(q, alike, v), LANES * exact(q, alike, v), rtol=1e-12
    )
