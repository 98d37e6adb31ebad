"""Bytes and FLOPs by formula against the same counted one by one."""

from __future__ import annotations

import pytest
from counting import kernel, pairs, shapes, walked
from hypothesis import given, settings
from hypothesis import strategies as st

from pyfa.device import DEVICES
from pyfa.traffic import (
    ROLES,
    Shape,
    attention_flops,
    compulsory_bytes,
    dram_bytes,
    last_level_bytes,
    memory,
    model,
    passes,
    tensor_bytes,
)  # fmt: skip
from pyfa.traffic.flops import tile_flops, tile_pairs
from pyfa.traffic.requested import requested_of, workgroups

SEED = Shape(1, 4096, 4096, 1, 1, 128, 128)
blocks = st.sampled_from((1, 4, 16))
roles = st.sampled_from(sorted(ROLES))


@given(shapes())
def test_visible_pairs_are_those_of_the_mask(shape: Shape) -> None:
    seen = pairs(shape)
    assert shape.visible_pairs() == len(seen)
    rows = shape.batch * shape.heads_q
    d, dv = shape.head_dim, shape.head_dim_v
    assert attention_flops(shape) == rows * len(seen) * 2 * (d + dv)
    assert attention_flops(shape, backward=True) == rows * len(seen) * 2 * (3 * d + 2 * dv)


@given(shapes())
def test_who_sees_whom_is_the_same_from_both_sides(shape: Shape) -> None:
    assert sorted((j, i) for i, j in pairs(shape)) == pairs(shape.mirrored)
    assert shape.mirrored.mirrored == shape


@given(shapes())
def test_compulsory_reads_what_somebody_sees(shape: Shape) -> None:
    keys = len({j for _, j in pairs(shape)})
    rows = shape.batch * shape.heads_q * shape.seqlen_q
    d, dv, k_heads = shape.head_dim, shape.head_dim_v, shape.batch * shape.heads_k
    inputs = rows * d * 2 + k_heads * keys * (d + dv) * 2
    assert compulsory_bytes(shape) == inputs + rows * dv * 2 + rows * 4
    gradients = rows * d * 2 + k_heads * shape.seqlen_k * (d + dv) * 2
    saved = rows * dv * 2 * 2 + rows * 4  # out, dout, LSE
    assert compulsory_bytes(shape, backward=True) == inputs + saved + gradients


@settings(deadline=None, max_examples=60)
@given(shapes(), roles, blocks, blocks, st.integers(0, 1))
def test_kernels_ask_for_the_tiles_that_they_walk(
    shape: Shape, role: str, block_q: int, block_k: int, ahead: int
) -> None:
    one = kernel(role, block_q, block_k, ahead)
    what = ROLES[role]
    reads, writes = requested_of(shape, one)
    count = sum(len(block) for block in walked(shape, one))
    heads_q, heads_k = shape.batch * shape.heads_q, shape.batch * shape.heads_k
    width = {"q": shape.head_dim * 2, "k": shape.head_dim * 2, "v": shape.head_dim_v * 2,
             "dout": shape.head_dim_v * 2, "lse": 4, "delta": 4}  # fmt: skip
    # K and V pass by for every query head; Q and dO are those of the query heads of each key head.
    for name in what.streamed:
        assert reads[name] == heads_q * count * width[name]
    sizes = tensor_bytes(shape)
    for name in what.held:
        assert reads[name] == sizes[name]
    # An atomic addition for each row of each head that a block walks over.
    added = {"dq_sum": heads_q * count * shape.head_dim * 4} if what.added else {}
    assert writes == {name: sizes[name] for name in what.written} | added
    assert workgroups(shape, one) == len(walked(shape, one)) * (
        heads_k if what.owns_keys else heads_q
    )


@settings(deadline=None, max_examples=60)
@given(shapes(), roles, blocks, blocks)
def test_tiles_compute_what_they_hold(shape: Shape, role: str, block_q: int, block_k: int) -> None:
    one = kernel(role, block_q, block_k)
    step = block_q if ROLES[role].owns_keys else block_k
    tiles = sum(-(-len(block) // step) for block in walked(shape, one))
    counted = tiles * block_q * block_k * shape.batch * shape.heads_q
    assert tile_pairs(shape, one) == counted
    assert counted >= shape.visible_pairs() * shape.batch * shape.heads_q
    # Head dims as compiled, 16 and 32: S, dP (V's), and one product for each result.
    products = {"forward": (1, 1), "dk_dv": (2, 2), "dk": (2, 1), "dv": (1, 1), "dq": (2, 1),
                "gradients": (3, 2)}  # fmt: skip
    d, dv = products[role]
    assert tile_flops(shape, one) == 2 * counted * (d * 16 + dv * 32)


@settings(deadline=None)
@given(shapes(), blocks, blocks, st.integers(0, 1 << 20), st.integers(1, 300))
def test_dram_lies_between_compulsory_and_requested(
    shape: Shape, block_q: int, block_k: int, cache: int, slots: int
) -> None:
    """For rows that all see something: a kernel asks for no key of a row that sees none."""
    if shape.seqlen_q > shape.seqlen_k:
        shape = shape._replace(window_left=-1, window_right=-1)
    forward = passes.tiled_passes(shape, [kernel("forward", block_q, block_k)])
    backward = [kernel("dk_dv", block_q, block_k), kernel("dq", block_q, block_k)]
    lse = tensor_bytes(shape)["lse"]  # which standard attention does not write
    for way, least in (
        (forward, compulsory_bytes(shape)),
        (passes.tiled_passes(shape, backward), compulsory_bytes(shape, backward=True)),
        (passes.standard_forward(shape), compulsory_bytes(shape) - lse),
    ):
        # A byte for the rounding of each kernel.
        dram = dram_bytes(way, cache, slots)
        assert least - len(way) <= dram <= sum(one.requested for one in way) + len(way)
        # Less cache, more traffic.
        assert dram_bytes(way, 0, slots) >= dram >= dram_bytes(way, 1 << 40, slots)


def test_a_cache_for_all_makes_dram_compulsory_and_none_makes_it_requested() -> None:
    shape = SEED._replace(seqlen_q=1024, seqlen_k=1024)
    tiled = passes.tiled_passes(shape, [kernel("forward", 64, 64)])
    assert dram_bytes(tiled, 1 << 40, 100) == compulsory_bytes(shape)
    assert dram_bytes(tiled, 0, 1) == sum(one.requested for one in tiled)
    standard = passes.standard_forward(shape)
    assert dram_bytes(standard, 1 << 40, 1) == compulsory_bytes(shape) - 1024 * 4  # it has no LSE


def test_standard_attention_moves_what_its_lines_say() -> None:
    """Each matrix of a kernel once: Dao et al. (2022), algorithms 0 and 3, at a cache of nothing
    and a matrix product that asks for each input once."""
    n, d, e = 4096, 128, 2
    s, x = n * n * e, n * d * e
    forward = passes.standard_forward(SEED)
    once = [sum(stream.once for stream in (*one.reads, *one.writes)) for one in forward]
    assert once == [2 * x + s, 2 * s, s + 2 * x]
    assert sum(once) == 4 * s + 4 * x
    with_mask = passes.standard_forward(SEED, elementwise=2)
    assert sum(w.once for one in with_mask for w in (*one.reads, *one.writes)) == 8 * s + 4 * x
    backward = passes.standard_backward(SEED)
    once = [sum(stream.once for stream in (*one.reads, *one.writes)) for one in backward]
    assert once == [s + 2 * x, 2 * x + s, 3 * s, s + 2 * x, s + 2 * x]
    assert sum(one.flops for one in forward) == attention_flops(SEED)
    assert sum(one.flops for one in backward) == 4 * 2 * n * n * d  # S is not made again


def test_a_product_asks_for_its_inputs_once_per_tile_of_the_output() -> None:
    first, _, last = passes.standard_forward(SEED)
    assert {r.tensor: r.asked // r.once for r in first.reads} == {"q": 32, "k": 32}
    assert {r.tensor: r.asked // r.once for r in last.reads} == {"p": 1, "v": 32}
    grouped = SEED._replace(heads_q=4)
    assert {r.tensor: r.asked // r.once for r in passes.standard_forward(grouped)[0].reads} == {
        "q": 32, "k": 128,
    }  # fmt: skip


def test_memory_is_what_is_alive_at_the_peak() -> None:
    n, d = 4096, 128
    x, s = n * d * 2, n * n * 2
    assert memory.standard_bytes(SEED) == 4 * x + 2 * s
    assert memory.standard_bytes(SEED, training=True) == 8 * x + 3 * s
    assert memory.tiled_bytes(SEED) == 4 * x + 4 * n
    assert memory.tiled_bytes(SEED, training=True) == 8 * x + 3 * 4 * n
    assert memory.tiled_bytes(SEED, training=True, sums=True) == 10 * x + 3 * 4 * n
    assert memory.tiled_bytes(SEED, splits=3) == 4 * x + 4 * n + 3 * n * (d + 1) * 4


def test_the_bound_is_the_slower_of_the_two_and_kernels_add_up() -> None:
    device = DEVICES["A100-80GB"]
    found = model(SEED, device, "float16", [kernel("forward", 128, 128)])
    peak, bandwidth = 2048 * 108 * 1.41e9, 2039e9
    least = found.least["forward"]
    assert least.by == "compute"
    assert least.seconds == pytest.approx(4 * 4096**2 * 128 / peak)
    assert found.ridge == pytest.approx(peak / bandwidth)
    short = model(SEED._replace(seqlen_q=1), device, "float16")
    assert short.least["forward"].by == "memory"
    assert short.least["forward"].seconds == pytest.approx(short.compulsory["forward"] / bandwidth)
    cost = found.costs["standard", "forward"]
    moved = dram_bytes(passes.standard_forward(SEED), last_level_bytes(device), 108)
    assert cost.dram == moved
    assert cost.intensity == pytest.approx(attention_flops(SEED) / moved)
    # One after the other: the products at one bound, softmax at the other.
    assert cost.seconds >= moved / bandwidth * 0.99
    assert found.costs["tiled", "forward"].computed_flops == tile_flops(
        SEED, kernel("forward", 128, 128)
    )


def test_every_device_by_name_has_all_of_it() -> None:
    for device in DEVICES.values():
        data = model(SEED, device, "bfloat16", [kernel("forward", 64, 64)]).as_dict()
        assert data["least"]["forward"]["seconds"] > 0
        assert data["device"]["last_level_bytes"] >= 4 << 20
        shared = data["device"]["shared_bandwidth"]
        assert shared == 0 or shared > data["device"]["bandwidth"]  # 0: not in the arch's row
        assert min(data["rows_that_fit"].values()) >= 16
        assert data["costs"]["tiled"]["forward"]["seconds"] > 0
        assert device.matrix_flops("float32") > 0
