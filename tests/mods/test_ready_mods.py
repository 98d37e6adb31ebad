"""pyfa.masks and pyfa.scores against the same said by loops, through pyfa and through PyTorch."""

import math

import pytest
import torch
from torch.nn.attention.flex_attention import create_mask

import pyfa
from pyfa import masks, scores

S = 24
IDS = torch.tensor([0] * 5 + [3] * 9 + [1] * 7 + [2] * 3)
TWO = torch.stack((IDS, IDS.flip(0)))
PARENTS = torch.tensor([-1, 0, 0, 1, 1, 2, 4, -1])


def _ancestors(node):
    found = {node}
    while PARENTS[node] >= 0:
        node = int(PARENTS[node])
        found.add(node)
    return found


def _around(at, size, kernel):
    """The kernel places around ``at``, moved inside."""
    first = min(max(at - kernel // 2, 0), max(size - kernel, 0))
    return range(first, first + kernel)


def _place(ids, i):
    return i - min(j for j in range(S) if all(ids[n] == ids[i] for n in range(j, i + 1)))


def _cells(i, sizes):
    found = []
    for size in reversed(sizes):
        found.insert(0, i % size)
        i //= size
    return found


def _in_natten(i, j, sizes, kernels):
    pairs = zip(_cells(i, sizes), _cells(j, sizes), sizes, kernels, strict=True)
    return all(y in _around(x, size, kernel) for x, y, size, kernel in pairs)


def _diffusion(i, j, length=12, block=4):
    noisy_q, noisy_k = i < length, j < length
    a, b = i % length // block, j % length // block
    if noisy_q:
        return a == b if noisy_k else b < a
    return not noisy_k and b <= a


LENGTHS = torch.tensor([9, 24])
SPECIAL = torch.zeros(S, dtype=torch.bool)
SPECIAL[[2, 15]] = True
BEGINS, ENDS = torch.tensor([0, 6, 6]), torch.tensor([6, 18, 24])
TABLE = torch.rand(2, 3, 4, generator=torch.Generator().manual_seed(3)) < 0.6
TABLE[:, :, 0] = True

# name: (the mask, the same by loops of b, h, i and j).
MASKS = {
    "causal": (masks.causal(), lambda b, h, i, j: j <= i),
    "causal shifted": (masks.causal(torch.tensor([0, 4])), lambda b, h, i, j: j <= i + 4 * b),
    "sliding": (masks.sliding(4, 2), lambda b, h, i, j: j in range(i - 4, i + 3)),
    "dilated": (masks.dilated(9, 3, step=3), lambda b, h, i, j: j in range(i - 9, i + 4, 3)),
    "streaming": (
        masks.streaming(3, 5), lambda b, h, i, j: j <= i and (j < 3 or j in range(i - 5, i + 1))
    ),
    "padding": (masks.padding(LENGTHS), lambda b, h, i, j: j < [9, 24][b]),
    "documents": (masks.documents(IDS), lambda b, h, i, j: IDS[i] == IDS[j] and j <= i),
    "documents of two": (
        masks.documents(TWO, masks.sliding(2, 1)),
        lambda b, h, i, j: TWO[b, i] == TWO[b, j] and j in range(i - 2, i + 2),
    ),
    "documents with a prefix": (
        masks.documents(IDS, masks.prefix(3)),
        lambda b, h, i, j: IDS[i] == IDS[j] and (j <= i or _place(IDS, j) < 3),
    ),
    "prefix": (masks.prefix(7), lambda b, h, i, j: j < 7 or j <= i),
    "prefix of each": (masks.prefix(LENGTHS), lambda b, h, i, j: j < LENGTHS[b] or j <= i),
    "shared prefix": (
        masks.shared_prefix(torch.tensor(5), IDS),
        lambda b, h, i, j: j <= i and (j < 5 or IDS[i] == IDS[j]),
    ),
    "tree": (
        masks.tree(PARENTS, 16), lambda b, h, i, j: j < 16 or j - 16 in _ancestors(i)
    ),
    "global tokens": (
        masks.global_tokens(SPECIAL, masks.sliding(2, 2)),
        lambda b, h, i, j: i in (2, 15) or j in (2, 15) or abs(i - j) <= 2,
    ),
    "media": (
        masks.media(BEGINS, ENDS, 8),
        lambda b, h, i, j: BEGINS[j // 8] <= i < ENDS[j // 8],
    ),
    "block diffusion": (masks.block_diffusion(12, 4), lambda b, h, i, j: _diffusion(i, j)),
    "natten": (masks.natten((S,), 5), lambda b, h, i, j: j in _around(i, S, 5)),
    "natten 2D": (
        masks.natten((4, 6), (3, 4)), lambda b, h, i, j: _in_natten(i, j, (4, 6), (3, 4))
    ),
    "natten 3D": (
        masks.natten((2, 3, 4), (1, 3, 3)),
        lambda b, h, i, j: _in_natten(i, j, (2, 3, 4), (1, 3, 3)),
    ),
    "sliding tile": (
        masks.sliding_tile((2, 3), 4, (1, 2)),
        lambda b, h, i, j: _in_natten(i // 4, j // 4, (2, 3), (1, 2)),
    ),
    "spatial": (masks.spatial(6, 1), lambda b, h, i, j: abs(i // 6 - j // 6) <= 1),
    "temporal": (masks.temporal(6, 1), lambda b, h, i, j: abs(i % 6 - j % 6) <= 1),
    "blocks": (
        masks.blocks(TABLE, 8, 6), lambda b, h, i, j: bool(TABLE[h, i // 8, j // 6])
    ),
    "blocks for all heads": (
        masks.blocks(TABLE[:1], 8, 6), lambda b, h, i, j: bool(TABLE[0, i // 8, j // 6])
    ),
    "together": (
        masks.any_of(
            masks.all_of(masks.causal(), masks.not_(masks.sliding(3))), masks.spatial(4)
        ),
        lambda b, h, i, j: (j <= i and not i - 3 <= j <= i) or i // 4 == j // 4,
    ),
}  # fmt: skip
FAR = 6
REL = torch.randn(2, 2 * FAR + 1, generator=torch.Generator().manual_seed(1))
BUCKETS = torch.randn(2, 16, generator=torch.Generator().manual_seed(2))
DENSE = torch.randn(2, S, S, generator=torch.Generator().manual_seed(4))
SLOPES = scores.alibi_slopes(2)


def _t5(distance, buckets, bidirectional, farthest):
    """From key − query, as the paper's code says it in words."""
    base = 0
    if bidirectional:
        buckets //= 2
        base = buckets if distance > 0 else 0
        distance = abs(distance)
    else:
        distance = max(-distance, 0)
    exact = buckets // 2
    if distance < exact:
        return base + distance
    octaves = math.log(distance / exact) / math.log(farthest / exact)
    return base + min(exact + int(octaves * (buckets - exact)), buckets - 1)


SCORES = {
    "softcap": (scores.softcap(2.0), lambda s, b, h, i, j: 2.0 * math.tanh(s / 2.0)),
    "alibi": (scores.alibi(SLOPES), lambda s, b, h, i, j: s - SLOPES[h] * abs(i - j)),
    "relative": (
        scores.relative(REL),
        lambda s, b, h, i, j: s + REL[h, max(-FAR, min(FAR, i - j)) + FAR],
    ),
    "relative for all": (
        scores.relative(REL[0]),
        lambda s, b, h, i, j: s + REL[0, max(-FAR, min(FAR, i - j)) + FAR],
    ),
    "t5": (
        scores.t5(BUCKETS, farthest=20),
        lambda s, b, h, i, j: s + BUCKETS[h, _t5(j - i, 16, True, 20)],
    ),
    "t5 of a decoder": (
        scores.t5(BUCKETS, False, farthest=21),
        lambda s, b, h, i, j: s + BUCKETS[h, _t5(j - i, 16, False, 21)],
    ),
    "bias": (scores.bias(DENSE), lambda s, b, h, i, j: s + DENSE[h, i, j]),
    "bias for all": (scores.bias(DENSE[0]), lambda s, b, h, i, j: s + DENSE[0, i, j]),
    "gain": (scores.gain(SLOPES), lambda s, b, h, i, j: s * SLOPES[h]),
    "chain": (
        scores.chain(scores.gain(SLOPES), scores.softcap(1.0)),
        lambda s, b, h, i, j: math.tanh(s * SLOPES[h]),
    ),
    "masked": (
        scores.masked(masks.causal()), lambda s, b, h, i, j: s if j <= i else -math.inf
    ),
    "inside": (
        scores.inside(scores.alibi(SLOPES), torch.arange(S) % 8),
        lambda s, b, h, i, j: s - SLOPES[h] * abs(i % 8 - j % 8),
    ),
    "inside of two": (
        scores.inside(scores.alibi(SLOPES), torch.arange(2 * S).view(2, S) % 7),
        lambda s, b, h, i, j: s - SLOPES[h] * abs((i + S * b) % 7 - (j + S * b) % 7),
    ),
}  # fmt: skip


def _inputs(rows=S):
    generator = torch.Generator().manual_seed(7)
    shapes = ((2, rows, 2, 8), (2, S, 2, 8), (2, S, 2, 8))
    return [torch.randn(shape, generator=generator) for shape in shapes]


def _dense(rows, value):
    return torch.tensor(
        [
            [[[value(b, h, i, j) for j in range(S)] for i in range(rows)] for h in range(2)]
            for b in range(2)
        ]
    )


@pytest.mark.parametrize("name", MASKS)
def test_a_mask_is_what_loops_say(name):
    mask, loops = MASKS[name]
    rows = len(PARENTS) if name == "tree" else S
    expected = _dense(rows, lambda b, h, i, j: bool(loops(b, h, i, j)))
    assert not expected.all()
    assert torch.equal(create_mask(mask, 2, 2, rows, S, device="cpu"), expected)
    q, k, v = _inputs(rows)
    found = pyfa.attention(q, k, v, mask_mod=mask)
    torch.testing.assert_close(found, pyfa.attention(q, k, v, bias=expected))


@pytest.mark.parametrize("name", SCORES)
def test_a_score_is_what_loops_say(name):
    score, loops = SCORES[name]
    q, k, v = (x.double() for x in _inputs())
    plain = torch.einsum("bihd,bjhd->bhij", q, k) / math.sqrt(8)
    s = _dense(S, lambda b, h, i, j: float(loops(float(plain[b, h, i, j]), b, h, i, j)))
    expected = torch.einsum("bhij,bjhd->bihd", s.double().softmax(-1), v)
    found = pyfa.attention(*(x.float() for x in (q, k, v)), score_mod=score)
    torch.testing.assert_close(found.double(), expected, atol=2e-6, rtol=1e-5)


def test_another_table_is_the_same_mod():
    # Tables are values at run time: a new one is neither traced nor compiled.
    digests = {
        pyfa.mods.resolve(scores.relative(torch.randn(2, 9)), masks.documents(ids), ids.device)[0]
        for ids in (IDS, IDS.flip(0))
    }
    assert len(digests) == 1


def test_slopes_of_12_heads():
    expected = [2.0 ** (-(n + 1)) for n in range(8)] + [2.0 ** (-(n + 0.5)) for n in range(4)]
    assert scores.alibi_slopes(12).tolist() == pytest.approx(expected)


def test_wrong_arguments():
    with pytest.raises(ValueError, match="parents: expected −1 or an earlier node for node 1"):
        masks.tree(torch.tensor([-1, 1]))
    with pytest.raises(ValueError, match="kernel: expected one size for each of"):
        masks.natten((4, 4), (3,))
    with pytest.raises(ValueError, match="table: expected 2 to 4 dimensions"):
        masks.blocks(torch.zeros(4), 8, 8)


def test_every_ready_mod_is_tested():
    named = {name.partition(" ")[0] for name in (*MASKS, *SCORES)}
    made = {
        "all_of", "any_of", "not_", "alibi_slopes", "block_diffusion", "global_tokens",
        "shared_prefix", "sliding_tile",
    }  # fmt: skip
    assert {*masks.__all__, *scores.__all__} - made <= named
