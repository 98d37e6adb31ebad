"""pyfa.masks and pyfa.scores against the same said by loops, through pyfa and through PyTorch."""

import inspect
import math

import numpy as np
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


INTS, FLOATS = torch.zeros(6, dtype=torch.int32), torch.zeros(6)
CAUSAL = masks.causal()
NO_INTEGER = (1.5, "4", None, True, FLOATS[0], INTS[:2], torch.tensor(True))
NO_ROW = (None, [0, 1], 5, INTS[0], INTS.view(1, 2, 3), FLOATS)
NO_FUNCTION = (None, 3, INTS)
NO_SIZES = (4, 2.0, None, (4, 0), (4, 1.5), (4, True), (), "46", INTS[0], INTS, (2**63,))
NO_SCORE_TABLE = (None, [0.0], 1.0, FLOATS[0], FLOATS.bool(), FLOATS.to(torch.complex64))

# function: {argument: wrong values of it}.
WRONG = {
    masks.all_of: {"masks": NO_FUNCTION},
    masks.any_of: {"masks": NO_FUNCTION},
    masks.not_: {"other": NO_FUNCTION},
    masks.causal: {"shift": (1.5, "4", None, True, FLOATS, INTS.view(2, 3), 2**63)},
    masks.sliding: {"left": NO_INTEGER, "right": NO_INTEGER},
    masks.dilated: {"left": NO_INTEGER, "right": NO_INTEGER, "step": (*NO_INTEGER, 0, -1)},
    masks.streaming: {"sinks": (*NO_INTEGER, -1), "left": (*NO_INTEGER, -1)},
    masks.padding: {"lengths": (*NO_ROW, INTS.view(2, 3))},
    masks.documents: {"ids": NO_ROW, "inside": (3, INTS)},
    masks.prefix: {"length": (1.5, None, -1, FLOATS[0], INTS.view(2, 3))},
    masks.shared_prefix: {"length": (1.5, None, -1, FLOATS[0]), "answers": NO_ROW},
    masks.tree: {"parents": (*NO_ROW, INTS.view(2, 3), INTS), "past": (1.5, None, -1, FLOATS[0])},
    masks.global_tokens: {"is_global": (None, [True], INTS, FLOATS), "otherwise": NO_FUNCTION},
    masks.media: {
        "begins": (*NO_ROW, INTS.view(2, 3)), "ends": (*NO_ROW, INTS.view(2, 3), INTS[:5]),
        "tokens": (*NO_INTEGER, 0),
    },
    masks.block_diffusion: {"length": (*NO_INTEGER, -1), "block": (*NO_INTEGER, 0)},
    masks.natten: {"sizes": NO_SIZES, "kernel": (0, 2.0, None, True, (3,), (3, 0), (3, 1.5))},
    masks.sliding_tile: {
        "tiles": NO_SIZES, "tokens": (*NO_INTEGER, 0), "kernel": (0, 2.0, None, (3,), (3, 0)),
    },
    masks.spatial: {"tokens": (*NO_INTEGER, 0), "frames": (*NO_INTEGER, -1)},
    masks.temporal: {"tokens": (*NO_INTEGER, 0), "places": (*NO_INTEGER, -1)},
    masks.blocks: {
        "table": (None, [[1]], INTS, INTS.view(1, 1, 1, 2, 3), TABLE.to(torch.complex64)),
        "rows": (*NO_INTEGER, 0), "keys": (*NO_INTEGER, 0),
    },
    scores.chain: {"scores": NO_FUNCTION},
    scores.masked: {"mask": NO_FUNCTION},
    scores.softcap: {"cap": (None, "2", True, 0, -2.0, math.nan, math.inf, FLOATS, FLOATS[0] > 0)},
    scores.alibi_slopes: {"heads": (0, -1, 1.5, None, True, INTS[0])},
    scores.alibi: {"slopes": (*NO_SCORE_TABLE, DENSE)},
    scores.relative: {"table": (*NO_SCORE_TABLE, FLOATS, DENSE)},
    scores.t5: {
        "table": (*NO_SCORE_TABLE, FLOATS, DENSE, BUCKETS[:, :3]),
        "bidirectional": (None, 2, "no"),
        "farthest": (4, 0, -1.5, None, "128", True, math.nan, FLOATS),
    },
    scores.bias: {"table": (*NO_SCORE_TABLE, FLOATS, FLOATS.view(1, 1, 1, 2, 3))},
    scores.gain: {"table": (*NO_SCORE_TABLE, DENSE)},
    scores.inside: {"score": NO_FUNCTION, "places": NO_ROW},
}  # fmt: skip
RIGHT = {
    "other": CAUSAL, "inside": CAUSAL, "otherwise": CAUSAL, "mask": CAUSAL, "sizes": (4, 6),
    "tiles": (2, 3), "kernel": 3, "score": scores.alibi(SLOPES), "is_global": SPECIAL,
    "parents": PARENTS, "ids": IDS, "answers": IDS, "lengths": LENGTHS, "begins": INTS,
    "ends": INTS, "places": IDS,
}  # fmt: skip
OF_TABLES = {masks.blocks: TABLE, scores.t5: BUCKETS}


def _called(function, **given):
    """The function's result, of right values for all arguments that it needs but ``given``."""
    if (parameter := next(iter(inspect.signature(function).parameters.values()))).kind == (
        parameter.VAR_POSITIONAL
    ):
        return function(*given.values())
    needed = {
        name: OF_TABLES.get(function) if name == "table" else RIGHT.get(name, 4)
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.default is parameter.empty
    }
    return function(**needed | given)


@pytest.mark.parametrize(
    ("function", "name", "value"),
    [
        pytest.param(function, name, value, id=f"{function.__name__} {name} {number}")
        for function, arguments in WRONG.items()
        for name, values in arguments.items()
        for number, value in enumerate(values)
    ],
)
def test_a_wrong_argument_is_named(function, name, value):
    with pytest.raises((TypeError, ValueError), match=f"^{name}: expected .+; got ") as caught:
        _called(function, **{name: value})
    assert type(caught.value) in (TypeError, ValueError)  # no ModError


def test_every_argument_is_tested_with_wrong_values():
    functions = [getattr(module, name) for module in (masks, scores) for name in module.__all__]
    arguments = {each: {*inspect.signature(each).parameters} - {"device"} for each in functions}
    assert {function: {*given} for function, given in WRONG.items()} == arguments


WHOLE = [getattr(torch, f"{kind}{bits}") for kind in ("int", "uint") for bits in (8, 16, 32, 64)]


@pytest.mark.parametrize("dtype", WHOLE, ids=str)
def test_tensors_of_every_integer_dtype(dtype):
    row, number = torch.tensor([0, 0, 1]).to(dtype), torch.tensor(2).to(dtype)
    for each in (number, row):
        masks.causal(each), masks.prefix(each), masks.shared_prefix(each, row)
        masks.tree(PARENTS, each)
    masks.sliding(number, number), masks.dilated(number, number, step=number)
    masks.streaming(number, number), masks.block_diffusion(number, number)
    masks.spatial(number, number), masks.temporal(number, number)
    masks.padding(row), masks.media(row, row, number), masks.global_tokens(SPECIAL, CAUSAL)
    masks.blocks(row[None], number, number), masks.sliding_tile((2, 3), number, (1, 2))
    scores.inside(scores.gain(row), row), scores.softcap(number), scores.t5(BUCKETS, True, number)
    if dtype not in (torch.uint16, torch.uint32, torch.uint64):  # torch compares few of these
        masks.documents(row)


def test_what_else_is_right():
    whole = [np.int8(3), np.int64(3), np.uint32(3)]
    for each in (*whole, 2**40, -2):  # so large that it is no limit; before the query
        masks.causal(each), masks.sliding(each, each), masks.dilated(each, each, step=3)
    for each in whole:
        masks.natten((each, 4), each), masks.natten([4, each], [each, each])
        masks.natten(np.array([4, 6]), np.array([3, 3])), masks.natten(torch.Size([4]), range(1, 2))
        masks.blocks(TABLE.float(), each, each), scores.softcap(each)
        assert scores.alibi_slopes(each).shape == (3,)
    masks.documents(IDS > 1), masks.shared_prefix(0, IDS > 1), masks.streaming(0, 0)
    scores.softcap(np.float16(2)), scores.softcap(torch.tensor(2.0)), scores.chain()
    scores.t5(BUCKETS, 0, torch.tensor(20.0)), scores.t5(BUCKETS, np.True_, 20.5)
    scores.gain(torch.nn.Parameter(SLOPES.double())), scores.relative(torch.ones(1))


def _made_and_used(b, h, q_idx, kv_idx, ids, slopes):
    """What code that torch.compile traces may make."""
    within = masks.documents(ids, masks.sliding(3, 2))
    mask = masks.any_of(within, masks.all_of(masks.not_(masks.prefix(ids[0])), masks.causal(2)))
    far = masks.natten((4, 6), (3, 3)), masks.sliding_tile((2, 3), 4, 1), masks.spatial(6, 1)
    mask = masks.global_tokens(ids > 2, masks.any_of(mask, masks.dilated(4, step=2), *far))
    score = scores.chain(scores.alibi(slopes), scores.softcap(2.0), scores.gain(slopes))
    zero = torch.zeros(q_idx.shape)
    return torch.where(
        mask(b, h, q_idx, kv_idx), scores.masked(mask)(score(zero, b, h, q_idx, kv_idx), b, h,
        q_idx, kv_idx), scores.relative(torch.cat((slopes, slopes[:1])))(zero, b, h, q_idx, kv_idx)
    )  # fmt: skip


@pytest.mark.parametrize("dynamic", [None, True])
def test_made_inside_of_a_compiled_function(dynamic):
    zero, i = torch.zeros(1, 1, dtype=torch.int64), torch.arange(S)
    given = zero, zero, i[:, None], i[None], IDS, SLOPES
    torch.compiler.reset()
    compiled = torch.compile(_made_and_used, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    torch.testing.assert_close(compiled(*given), _made_and_used(*given))


def test_made_from_numbers_that_only_the_compiled_code_knows():
    def near(q_idx, kv_idx, number, marks):
        left = number.item()
        mask = masks.all_of(masks.sliding(left), masks.streaming(left, left), masks.spatial(left))
        mask = masks.any_of(mask, masks.sliding(np.int64(1), np.int64(1)), masks.causal(-left))
        ends = marks.nonzero()[:, 0]  # of a size that is not known, either
        mask = masks.any_of(mask, masks.media(marks.logical_not().nonzero()[:, 0], ends, left))
        score = scores.chain(scores.softcap(number.float().item()), scores.relative(ends.float()))
        seen = mask(0, 0, q_idx, kv_idx)
        return scores.masked(lambda *_: seen)(score(q_idx - kv_idx * 1.0, 0, 0, q_idx, kv_idx), 0,
                                              0, q_idx, kv_idx)  # fmt: skip

    i = torch.arange(S)
    given = i[:, None], i[None], torch.tensor(4), torch.arange(14) % 2 == 0
    torch.compiler.reset()
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        compiled = torch.compile(near, fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(*given), near(*given))


def test_wrong_arguments():
    with pytest.raises(ValueError, match="masks: expected at least one mask"):
        masks.any_of()
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
