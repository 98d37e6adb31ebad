"""Which problems the cuda backend takes, with whose tiles."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

import pyfa
from pyfa import dispatch, mods, request
from pyfa.backends import BACKENDS
from pyfa.backends.common import libcuda, splits
from pyfa.backends.cuda import (
    backend,
    backward,
    code,
    decode,
    forward,
    forward_sm90,
    plans,
    runtime_compiler,
    tensor_maps,
)
from pyfa.backends.cuda.target import TARGET
from pyfa.backends.native import attend, catalog
from pyfa.backends.native import decode as native_decode
from pyfa.backends.native import plans as native_plans
from pyfa.backends.native.target import Block
from pyfa.backends.native.tiles import GROUP, sm90
from pyfa.device import DEVICES
from pyfa.plan import Plan
from pyfa.problem import Problem
from pyfa.sizes import Size, value_at

BIAS = forward_sm90.OTHER_BIAS
EXAMPLE = Problem(2, 1024, 1024, 16, 16, 128, 128, "bfloat16", frozenset(), DEVICES["H200"], True)


def answer(**changes: object) -> dispatch.Answer:
    return dispatch.ask("cuda", replace(EXAMPLE, **changes), hypothetical=True)


@pytest.mark.parametrize(
    ("arch", "tiles"),
    [
        ("sm_80", "sm_80"), ("sm_86", "sm_86"), ("sm_87", "sm_86"), ("sm_89", "sm_89"),
        ("sm_90a", "sm_90"), ("sm_90", "sm_90"), ("sm_100", "sm_100"), ("sm_103", "sm_100"),
        ("sm_110", "sm_80"), ("sm_120", "sm_120"), ("sm_121", "sm_120"),
    ],
)  # fmt: skip
def test_whose_tiles(arch: str, tiles: str) -> None:
    assert plans.tiled_arch(arch) == tiles


def test_tiles_of_another_arch(monkeypatch: pytest.MonkeyPatch) -> None:
    own = answer().plan
    monkeypatch.setenv("PYFA_ARCH_TILES", "sm_86")
    forced = answer().plan
    assert forced is not None
    assert own is not None
    assert "tiles of sm_86 on sm_90a (PYFA_ARCH_TILES)" in forced.notes
    assert own.notes == ()
    assert forced.constants == answer(device=DEVICES["RTX4090"]).plan.constants  # sm_89's are alike
    monkeypatch.setenv("PYFA_ARCH_TILES", "sm_75")
    with pytest.raises(ValueError, match="PYFA_ARCH_TILES='sm_75': expected one of sm_80, sm_86"):
        answer()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"device": DEVICES["MI300X"]}, "the device is AMD (gfx942)"),
        ({"device": replace(DEVICES["H200"], arch="sm_75")}, "sm_75 is older than sm_80"),
        ({"dtype": "float32"}, "float32 is not implemented"),
        ({"features": frozenset({"bias", "bias_grad", "backward"})}, "gradient of bias"),
        ({"features": frozenset({"paged", "backward"}), "page_size": 16}, "backward with a page"),
    ],
)
def test_reasons(changes: dict[str, object], reason: str) -> None:
    found = answer(**changes)
    assert found.plan is None
    assert any(reason in each for each in found.reasons)


def test_every_plan_is_one_that_is_compiled_ahead() -> None:
    known = {name: set(catalog.all_plans(TARGET, name)) for name in plans.TILED}
    for device in ("A100-80GB", "RTX4090", "H200"):
        for dims in ((1, 1), (64, 64), (80, 80), (96, 64), (128, 128), (192, 128), (136, 200)):
            for features in ((), ("causal",), ("softcap", "gqa"), ("dropout",), ("paged",)):
                for rows in (1, 4, 1024):
                    found = answer(
                        head_dim=dims[0], head_dim_v=dims[1], features=frozenset(features),
                        device=DEVICES[device], seqlen_q=rows, heads_k=4,
                    )  # fmt: skip
                    assert found.plan in known[plans.tiled_arch(DEVICES[device].arch)]


def test_no_more_than_forty_plans_of_a_kernel_for_each_format() -> None:
    """Hopper's backward has eight for each of its ten: plain, five terms alone, one of them also
    in tiles, several; and 16 with tiles that follow from the grid, plain and with sinks. Its
    forward has two more for each of its eight pairs of head dims, softcap and ALiBi alone, for six
    of them one with tiles of a bias, and 14 with tiles that follow from the grid, the window or the
    longest sequence."""
    more = {backward.SM90: 96, forward_sm90.KERNEL: 72}
    for arch in plans.TILED:
        decodes = native_decode.all_plans(TARGET, "cuda", arch)
        for every in (forward.all_plans(arch), backward.all_plans(arch), decodes):
            for kernel in {plan.kernel for plan in every}:
                of_kernel = [p.constants for p in every if p.kernel == kernel]
                mine = [x for x in of_kernel if dict(x)["DTYPE"] == 0]
                assert len(mine) == len(set(mine))
                float8 = sum(not {"INPUTS", "KEY_DTYPE"}.isdisjoint(dict(x)) for x in mine)
                # Of one warpgroup and of several, over pages and not, invariant and not.
                packed = sum("PACKED" in dict(x) for x in mine)
                # The same, and with score terms.
                invariant = sum("INVARIANT" in dict(x) and "PACKED" not in dict(x) for x in mine)
                others = len(mine) - float8 - invariant - packed
                assert max(float8, others) <= more.get(kernel, 40)
                assert invariant <= 48
                assert packed <= 48


def test_a_few_rows_over_a_cache_are_decode() -> None:
    few = answer(seqlen_q=1, heads_k=4).plan
    many = answer(seqlen_q=512, heads_k=4).plan
    assert few is not None
    assert many is not None
    assert (few.kernel, many.kernel) == (decode.KERNEL, forward_sm90.KERNEL)


@pytest.mark.parametrize(
    ("changes", "packed"),
    [
        ({"seqlen_q": 8, "heads_k": 2}, 1),
        ({"seqlen_q": 16, "heads_k": 2}, 2),
        ({"seqlen_q": 2, "heads_k": 4}, 0),  # decode's
        ({"seqlen_q": 1024, "heads_k": 2}, 0),  # of one head each block has rows enough
        ({"seqlen_q": 64, "heads_k": 16}, 0),
        ({"seqlen_q": 16, "heads_q": 128, "heads_k": 1}, 0),  # more heads than rows of a block
        ({"seqlen_q": 8, "heads_k": 2, "features": frozenset({"gqa", "alibi"})}, 0),
        ({"seqlen_q": 8, "heads_k": 2, "positive": False}, 0),
        ({"seqlen_q": 8, "heads_k": 2, "device": DEVICES["A100-80GB"]}, 0),
        ({"seqlen_q": 2, "heads_k": 4, "features": frozenset({"gqa", "batch_invariant"})}, 1),
    ],
)
def test_rows_of_a_group_share_a_block_of_hopper(changes: dict[str, object], packed: int) -> None:
    found = answer(**{"features": frozenset({"gqa", "causal"}), **changes}).plan
    assert found is not None
    constants = dict(found.constants)
    assert constants.get("PACKED", 0) * int(constants.get("GROUPS", 0)) == packed


@pytest.mark.parametrize("group", [2, 6, 7, 24, 64])
@pytest.mark.parametrize("rows", [1, 9, 33, 64])
def test_packed_blocks_are_as_many_as_the_kernel_counts(group: int, rows: int) -> None:
    """Each of its warpgroups has the same rows of every head: 64 lines have 64 // group rows."""
    for groups in (1, 2):
        plan = forward_sm90._plan((128, 128), 1, 1, 0, 0, False, groups, True)
        q, k = torch.empty(3, rows, 2 * group, 128), torch.empty(3, 100, 2, 128)
        call = request.dense(q, k, k, request.Shared()).call
        expected = -(-rows // (groups * (64 // group))) * 2 * 3
        assert attend.blocks_of(TARGET, plan, call) == expected


@pytest.mark.parametrize(
    ("driver", "compiler", "fits"), [(13, 13, True), (13, 12, True), (12, 13, False)]
)
def test_code_that_the_driver_would_refuse(
    monkeypatch: pytest.MonkeyPatch, driver: int, compiler: int, fits: bool
) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(libcuda, "library", lambda: object())
    monkeypatch.setattr(libcuda, "version", lambda: (driver, 0))
    monkeypatch.setattr(runtime_compiler, "why_unavailable", lambda: None)
    monkeypatch.setattr(runtime_compiler, "major", lambda: compiler)
    known = (backend._why_unavailable, code.why_no_compiler)
    for each in known:
        each.cache_clear()
    try:
        why = BACKENDS["cuda"].why_unavailable()
    finally:
        for each in known:
            each.cache_clear()
    assert (why is None) == fits
    assert fits or "NVRTC 13 generates code that this driver (CUDA 12) cannot load" in str(why)


@pytest.mark.parametrize(
    ("features", "kernel", "notes"),
    [
        (("causal", "softcap", "varlen", "gqa"), forward_sm90.KERNEL, ()),
        (
            ("dropout",),
            forward.KERNEL,
            ("sm80's kernel: sm90's has no dropout",),
        ),
        (("paged",), forward_sm90.KERNEL, ()),
        (
            ("paged", "leftpad"),
            forward.KERNEL,
            ("sm80's kernel: sm90's has no cache_leftpad with pages",),
        ),
        (("bias",), forward.KERNEL, (f"sm80's kernel: sm90's has no {BIAS}",)),
    ],
)
def test_what_hopper_leaves_to_ampere_s_kernel(
    features: tuple[str, ...], kernel: str, notes: tuple[str, ...]
) -> None:
    found = answer(features=frozenset(features), page_size=16 * ("paged" in features)).plan
    assert found is not None
    assert (found.kernel, found.notes) == (kernel, notes)


@pytest.mark.parametrize(
    ("features", "changes", "own"),
    [
        (("bias", "causal", "varlen", "sinks", "backward"), {}, True),
        (("bias",), {"head_dim": 256, "head_dim_v": 256}, True),
        (("bias",), {"bias_tiles": False}, False),
        (("bias",), {"aligned": False}, False),
        (("bias", "softcap"), {}, False),
        (("bias", "dropout"), {}, False),
        (("bias", "batch_invariant"), {}, False),
        (("bias", "paged"), {"page_size": 16}, False),
    ],
)
def test_which_bias_hopper_copies(
    features: tuple[str, ...], changes: dict[str, object], own: bool
) -> None:
    asked: dict[str, object] = {"features": frozenset(features), "bias_tiles": True, **changes}
    found = answer(**asked).plan
    assert found is not None
    assert (dict(found.constants)["SCORE"] == tensor_maps.BIAS_SCORE) == own
    if own:
        assert replace(found, notes=()) in catalog.all_plans(TARGET, "sm_90")


_SLOPES, _TABLE = torch.ones(16), torch.ones(16, 64)


@pytest.mark.parametrize(
    ("score_mod", "head_dim", "groups", "block_k"),
    [
        (lambda s, b, h, i, j: s + _SLOPES[h] * (j - i), 64, 3, 128),
        (lambda s, b, h, i, j: 30 * torch.tanh(s / 30), 64, 3, 96),
        (lambda s, b, h, i, j: s + _TABLE[h, i - j], 64, 2, 128),  # a load for each score
        (lambda s, b, h, i, j: s + sum((j * n - i).abs() for n in range(20)), 64, 2, 128),
        (lambda s, b, h, i, j: s + _SLOPES[h] * (j - i), 128, 2, 128),
    ],
    ids=["ALiBi", "softcap", "relative", "long", "ALiBi, 128"],
)
def test_tiles_of_a_score_mod_on_hopper(
    score_mod: mods.Mod, head_dim: int, groups: int, block_k: int
) -> None:
    digest, _ = mods.resolve(score_mod, None, torch.device("cpu"))
    dims = {"head_dim": head_dim, "head_dim_v": head_dim}
    found = answer(features=frozenset({"score_mod"}), mods=digest, **dims).plan
    assert found is not None
    constants = dict(found.constants)
    assert (constants["GROUPS"], constants["BLOCK_K"]) == (groups, block_k)


def test_a_problem_with_any_score_mod_has_a_plan() -> None:
    found = answer(features=frozenset({"score_mod"}), head_dim=64, head_dim_v=64).plan
    assert found is not None
    assert dict(found.constants)["SCORE"] == forward_sm90.SCORE_MOD


FLOAT8: dict[str, object] = {"dtype": "float8_e4m3fn", "dtype_out": "bfloat16"}
CACHE: dict[str, object] = {"dtype": "bfloat16", "dtype_k": "float8_e4m3fn", "dtype_out": ""}


@pytest.mark.parametrize(
    ("changes", "constants"),
    [
        ({}, {"DTYPE": 1, "INPUTS": 2, "SCALES": 0, "SCORE": 0, "HEAD_DIM": 128}),
        ({}, {"GROUPS": 3, "BLOCK_K": 128}),
        ({"dtype_out": "float16", "scales": 64}, {"DTYPE": 0, "SCALES": 1}),
        ({"features": frozenset({"fp8", "softcap", "varlen"})}, {"SCALES": 0, "SCORE": 1}),
        ({"head_dim": 192, "head_dim_v": 96}, {"HEAD_DIM": 256, "HEAD_DIM_V": 256}),
        ({"head_dim": 40}, {"HEAD_DIM": 128}),
    ],
)
def test_float8_on_hopper(changes: dict[str, object], constants: dict[str, int]) -> None:
    found = answer(**{"features": frozenset({"fp8"}), **FLOAT8, **changes}).plan
    assert found is not None
    assert found.kernel == forward_sm90.KERNEL
    assert constants.items() <= dict(found.constants).items()
    assert found.notes[0] == "float8: P is also rounded to float8"
    assert replace(found, notes=()) in catalog.all_plans(TARGET, "sm_90")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (
            {"device": DEVICES["A100-80GB"]},
            "float8 prefill is implemented for sm_90a, not for sm_80",
        ),
        ({"dtype": "float8_e4m3fnuz"}, "float8_e4m3fnuz is not implemented"),
        (CACHE, "float8 keys with bfloat16 queries need few query rows (decode)"),
        ({"features": frozenset({"fp8", "bias"})}, "float8 with bias is not implemented"),
        (
            {
                "features": frozenset({"fp8", "paged"}),
                "page_size": 3,
                "head_dim": 64,
                "head_dim_v": 64,
            },
            "float8 with page sizes that are not a multiple of 2 keys is not implemented",
        ),
        ({"features": frozenset({"fp8", "dropout"})}, "float8 with dropout is not implemented"),
        ({"features": frozenset({"fp8", "backward"})}, "float8 has no backward"),
        (
            {"seqlen_q": 2, "heads_k": 1, "head_dim": 40},
            "decode needs a head_dim that is a multiple of 16",
        ),
        (
            {"seqlen_q": 1, "features": frozenset({"fp8", "dropout"})},
            "float8 with dropout is not implemented",
        ),
        (
            CACHE | {"seqlen_q": 1, "device": DEVICES["A100-80GB"]},
            "sm_80 has no instruction that converts float8 to float16 (sm_89 has one)",
        ),
    ],
)
def test_float8_that_is_left_to_others(changes: dict[str, object], reason: str) -> None:
    found = answer(**{"features": frozenset({"fp8"}), **FLOAT8, **changes})
    assert found.plan is None
    assert list(found.reasons) == [reason]


def test_a_float8_cache_on_another_vendor() -> None:
    features = frozenset({"fp8"})
    found = answer(**CACHE, seqlen_q=1, features=features, device=DEVICES["MI300X"])
    assert found.plan is None
    assert any("AMD" in reason for reason in found.reasons)


@pytest.mark.parametrize(
    ("changes", "constants"),
    [
        (CACHE, {"DTYPE": 1, "KEY_DTYPE": 2, "HEAD_DIM": 128, "HEAD_DIM_V": 128}),
        (CACHE | {"dtype": "float16", "heads_k": 4}, {"DTYPE": 0, "KEY_DTYPE": 2}),
        (FLOAT8, {"DTYPE": 1, "KEY_DTYPE": 2}),
        (FLOAT8 | {"dtype_out": "float16", "scales": 16}, {"DTYPE": 0, "KEY_DTYPE": 2}),
        (CACHE | {"head_dim": 192, "head_dim_v": 96}, {"HEAD_DIM": 256, "HEAD_DIM_V": 256}),
        (CACHE | {"heads_k": 1, "seqlen_q": 4}, {"TILES": 2, "TEAM": 4}),
    ],
)
@pytest.mark.parametrize("device", ["H200", "RTX4090"])
def test_a_float8_cache_under_a_few_rows(
    device: str, changes: dict[str, object], constants: dict[str, int]
) -> None:
    features = frozenset(
        {"fp8", "causal", "window", "softcap", "bias", "sinks", "paged", "seqused"}
    )
    given = {"seqlen_q": 1, "features": features, "page_size": 16, "device": DEVICES[device]}
    found = answer(**given | changes).plan
    assert found is not None
    assert found.kernel == decode.KERNEL
    assert constants.items() <= dict(found.constants).items()
    tiles = plans.tiled_arch(DEVICES[device].arch)
    assert replace(found, notes=()) in catalog.all_plans(TARGET, tiles)
    assert replace(found, notes=()) not in catalog.common_plans(TARGET, tiles)


def test_hopper_s_own_kernels_are_compiled_for_its_own_target() -> None:
    found = {plans.compiled_for("sm_90a", plan) for plan in catalog.all_plans(TARGET, "sm_90")}
    assert found == {"sm_90", "sm_90a"}
    ours = forward_sm90.plan(EXAMPLE)
    assert plans.compiled_for("sm_90a", ours) == "sm_90a"
    assert plans.grid_of(ours, 1000, 132) == 132
    assert plans.grid_of(ours, 7, 132) == 7


def test_hopper_s_backward_stays_on_its_sms() -> None:
    two_fit = sm90.OwnBackward(1, 64, blocks=2)
    for chosen, most in ((None, 132), (two_fit, 264)):
        ours = backward.sm90_plans_of((64, 64), 1, False, 0, chosen=chosen)[1]
        assert plans.grid_of(ours, 1000, 132) == most
        assert plans.grid_of(ours, 7, 132) == 7
        packed = plans.grid_of(ours, 4 * (Size("k") // 128 + 3), 132)
        assert [value_at(packed, (0, keys)) for keys in (1, 128 * 97)] == [12, most]
    plain = backward.sm90_plans_of((64, 64), 1, False, 0)[1]
    for ours in (
        backward.sm90_plans_of((64, 64), 1, True, 0)[1],
        backward.sm90_plans_of((64, 64), 1, False, backward.TERM_BITS["sinks"])[1],
        backward.sm90_plans_of((64, 64), 1, False, 0, mods=True)[1],
        native_plans.banded(plain),
    ):
        assert plans.grid_of(ours, 1000, 132) == 132
    for one_each in (
        backward.sm90_plans_of((256, 256), 1, False, 0)[1],
        backward.sm90_plans_of((64, 64), 1, False, backward.ALL_TERMS)[1],
    ):
        assert plans.grid_of(one_each, 1000, 132) == 1000


def test_explain_names_the_plan() -> None:
    meta = [torch.empty(1, 256, 8, 96, dtype=torch.float16, device="meta") for _ in range(3)]
    text = str(pyfa.explain(*meta, causal=True, device="A100-80GB"))
    assert "* cuda      plan: cuda/sm80/attn_fwd.cu" in text


# Batch, queries, keys, heads, head_dim, causal; warpgroups and keys of a tile that an H100 was
# fastest with (cuda_tuning_h200.json, "forward, tiles by the grid"), or with tiles of 64 keys an
# H200 ("forward, sm90, two blocks of 64 rows and 64 keys on an SM").
FASTEST = [
    ((64, 197, 197, 12, 64, False), (1, 112)), ((32, 257, 257, 16, 64, False), (3, 96)),
    ((128, 77, 77, 12, 64, False), (1, 80)), ((8, 512, 512, 16, 64, False), (3, 128)),
    ((1, 512, 512, 16, 64, True), (1, 128)), ((2, 4096, 4096, 10, 64, False), (1, 128)),
    ((1, 16384, 16384, 16, 64, True), (3, 128)), ((1, 192, 65536, 16, 64, False), (3, 128)),
    ((128, 50, 50, 12, 64, False), (1, 64)), ((64, 197, 197, 12, 64, True), (1, 64)),
    ((8, 512, 512, 16, 64, True), (1, 64)), ((1, 1024, 1024, 32, 64, True), (1, 64)),
    ((1, 1024, 1024, 8, 128, True), (1, 128)), ((1, 1024, 1024, 32, 128, True), (2, 128)),
    ((64, 50, 50, 12, 128, False), (1, 64)), ((32, 257, 257, 16, 128, True), (1, 64)),
    ((1, 512, 512, 32, 128, True), (1, 64)), ((8, 512, 512, 16, 128, False), (2, 128)),
    ((64, 50, 50, 10, 96, False), (1, 64)), ((16, 197, 197, 10, 96, False), (2, 112)),
    ((2, 2048, 2048, 10, 96, True), (2, 128)), ((1, 512, 512, 8, 192, False), (1, 96)),
    ((4, 1024, 1024, 8, 192, True), (2, 96)), ((1, 300, 300, 8, 256, True), (1, 64)),
    ((8, 257, 257, 8, 256, False), (2, 48)), ((4, 1024, 1024, 8, 256, False), (2, 80)),
]  # fmt: skip


@pytest.mark.parametrize(("shape", "tiles"), FASTEST)
def test_hopper_s_tiles_follow_the_grid(
    shape: tuple[int, int, int, int, int, bool], tiles: tuple[int, int]
) -> None:
    batch, rows, keys, heads, dim, causal = shape
    given: dict[str, object] = {
        "batch": batch, "seqlen_q": rows, "seqlen_k": keys, "heads_q": heads, "heads_k": heads,
        "head_dim": dim, "head_dim_v": dim, "square": rows == keys,
        "features": frozenset({"causal"} if causal else ()),
    }  # fmt: skip

    def made(**changes: object) -> tuple[int, int]:
        plan = answer(**given | changes).plan
        assert plan is not None
        constants = dict(plan.constants)
        return constants["GROUPS"], constants["BLOCK_K"]

    assert made() == tiles
    # What the model does not know has the tiles of every grid; scales that are not positive have
    # a kernel of their own.
    own = sm90.FORWARD[dim, dim][causal]
    general = (own.groups, own.block_k)
    if causal:
        assert made(square=False) == general
    features = frozenset({"varlen"} | ({"causal"} if causal else set()))
    assert made(features=features, seqlen_k=8192) == general
    terms = answer(**given, positive=False).plan
    assert terms is not None
    assert dict(terms.constants)["SCORE"] != 0


# Head_dim, keys that a row sees; warpgroups and keys of a tile that an H200 was fastest with
# (cuda_tuning_h200.json, "forward, sm90, two blocks of 64 rows and 64 keys on an SM").
OF_WINDOWS = [
    ((64, 129), (1, 64)), ((64, 1025), (1, 64)), ((64, 1537), (3, 128)), ((64, 0), (3, 128)),
    ((96, 257), (1, 64)), ((96, 513), (2, 128)), ((128, 513), (1, 64)), ((128, 1025), (2, 128)),
    ((192, 129), (2, 96)), ((256, 257), (1, 64)), ((256, 513), (2, 80)),
]  # fmt: skip


@pytest.mark.parametrize(("shape", "tiles"), OF_WINDOWS)
def test_hopper_s_tiles_follow_the_window(shape: tuple[int, int], tiles: tuple[int, int]) -> None:
    dim, window = shape

    def made(*features: str) -> tuple[int, int]:
        plan = answer(
            batch=1, seqlen_q=8192, seqlen_k=8192, heads_q=32, heads_k=32, head_dim=dim,
            head_dim_v=dim, window=window, features=frozenset({"window", *features}),
        ).plan  # fmt: skip
        assert plan is not None
        assert plan in catalog.all_plans(TARGET, "sm_90")
        constants = dict(plan.constants)
        return constants["GROUPS"], constants["BLOCK_K"]

    assert made() == made("sinks", "gqa", "backward") == made("varlen") == tiles
    terms = sm90.FORWARD[dim, dim][2 if dim in (64, 192, 256) else 1]
    assert made("softcap") == (terms.groups, terms.block_k)


# Head_dim, most rows and keys of a sequence, causal; the same.
OF_LENGTHS = [
    ((64, 64, False), (1, 64)), ((64, 256, False), (1, 64)), ((64, 512, False), (3, 128)),
    ((64, 1024, True), (1, 64)), ((64, 2048, True), (3, 128)), ((96, 64, True), (1, 64)),
    ((96, 128, False), (2, 176)), ((128, 64, False), (1, 64)), ((128, 128, True), (2, 128)),
    ((256, 64, False), (1, 64)), ((256, 128, False), (2, 80)), ((192, 64, False), (2, 112)),
]  # fmt: skip


@pytest.mark.parametrize(("shape", "tiles"), OF_LENGTHS)
@pytest.mark.parametrize("feature", ["varlen", "seqused"])
def test_hopper_s_tiles_follow_the_longest_sequence(
    shape: tuple[int, int, bool], tiles: tuple[int, int], feature: str
) -> None:
    dim, longest, causal = shape

    def made(**changes: object) -> tuple[int, int]:
        given: dict[str, object] = {
            "batch": 128, "seqlen_q": longest, "seqlen_k": longest, "heads_q": 16, "heads_k": 16,
            "head_dim": dim, "head_dim_v": dim,
            "features": frozenset({feature} | ({"causal"} if causal else set())),
        }  # fmt: skip
        plan = answer(**given | changes).plan
        assert plan is not None
        assert plan in catalog.all_plans(TARGET, "sm_90")
        constants = dict(plan.constants)
        return constants["GROUPS"], constants["BLOCK_K"]

    assert made() == tiles
    own = sm90.FORWARD[dim, dim][causal]
    assert made(seqlen_k=8192) == made(seqlen_q=8192) == (own.groups, own.block_k)


def test_a_grid_that_leaves_sms_idle_gets_blocks_of_half_the_rows() -> None:
    a100 = DEVICES["A100-80GB"]
    few = answer(batch=1, heads_q=8, heads_k=8, device=a100).plan
    many = answer(batch=16, heads_q=16, heads_k=16, device=a100).plan
    softcap = frozenset({"softcap"})
    general = answer(batch=1, heads_q=8, heads_k=8, device=a100, features=softcap).plan
    assert [dict(p.constants)["ROWS"] for p in (few, many, general) if p] == [16, 32, 32]


@pytest.mark.parametrize(
    ("blocks", "keys", "lines", "parts"),
    [
        (8, 65536, 1024, 33),  # 8 blocks of 128 rows over a long cache: as many as fill the device
        (128, 512, 32 * 512, 1),  # putting 16,384 lines together would cost more than it gains
        (300, 65536, 38400, 1),  # the grid is full
        (8, 255, 1024, 1),  # no part shorter than 256 keys
        (0, 4096, 0, 16),
    ],
)
def test_when_forward_splits_the_keys(blocks: int, keys: int, lines: int, parts: int) -> None:
    costs = TARGET.block_of(forward.all_plans("sm_80")[0]).costs
    assert splits.within_a_round(blocks, keys, 264, lines, costs) == parts


def test_hopper_s_kernel_gains_less_by_splitting() -> None:
    ours = TARGET.block_of(forward_sm90.plan(EXAMPLE))
    other = TARGET.block_of(forward.all_plans("sm_80")[0])

    def parts(block: Block, blocks: int, keys: int, lines: int) -> int:
        return splits.within_a_round(blocks, keys, 132, lines, block.costs)

    assert parts(other, 16, 1024, 4096) == 4
    assert parts(ours, 16, 1024, 4096) == 1
    assert parts(ours, 8, 65536, 1024) == 16
    assert (other.per_unit, ours.per_unit) == (2, 1)


@pytest.mark.parametrize(
    ("blocks", "lines", "apart"),
    [
        (64, 4, True),
        (600, 64, True),  # few leave little to be merged
        (192, 512, False),
        (66, 512, True),  # half of the SMs would have none
        (67, 512, False),
    ],
)
def test_when_chunks_are_splits(blocks: int, lines: int, apart: bool) -> None:
    assert splits.are_apart(blocks, 132, lines) is apart


def test_a_call_with_chunks_names_what_merges_them() -> None:
    problem = replace(EXAMPLE, features=frozenset({"batch_invariant"}))
    ours = BACKENDS["cuda"].kernels(problem)
    assert "CHUNKED" in dict(ours[-1].constants)
    assert set(ours) <= set(catalog.all_plans(TARGET, "sm_90"))
    assert len(BACKENDS["cuda"].kernels(replace(problem, device=DEVICES["A100-80GB"]))) == 2


PAGE_SIZES = (8, 16, 32, 48, 64, 80, 128, 256)


def invariant_plans() -> list[Plan]:
    """Those of Hopper with batch_invariant: compiled ahead, and of calls over pages of all sizes
    with few rows, few rows of grouped heads, and many, in few blocks and in many."""
    shapes = [
        {"batch": batch, "seqlen_q": rows, "heads_k": heads_k, "head_dim": dim, "head_dim_v": dim_v}
        for batch in (1, 64)
        for rows, heads_k in ((1, 16), (64, 16), (16, 2), (200, 2))
        for dim, dim_v in sm90.FORWARD_INVARIANT
    ]
    features = frozenset({"batch_invariant", "causal", "paged"})
    found = {
        answer(**shape, features=features | {"gqa"} if shape["heads_k"] < 16 else features,
               square=False, page_size=page_size).plan
        for shape in shapes
        for page_size in PAGE_SIZES
    } | set(forward_sm90.all_plans())  # fmt: skip
    return [plan for plan in found if plan and ("INVARIANT", 1) in plan.constants]


def test_chunks_are_those_of_a_pair_and_of_score_terms_alone() -> None:
    """Bits depend on the tiles, the chunks and the warpgroups that P is computed as with."""
    bits: dict[object, set[object]] = {}
    seen: dict[str, set[object]] = {"GROUPS": set(), "PACKED": set(), "PAGE_ROWS": set()}
    for plan in invariant_plans():
        values = dict(plan.constants)
        kind = values["HEAD_DIM"], values["HEAD_DIM_V"], values["SCORE"]
        tiles = values["BLOCK_K"], values.get("CHUNK_TILES", 0)
        bits.setdefault(kind, set()).add((*tiles, values.get("OF_GROUPS", values["GROUPS"])))
        for name, found in seen.items():
            found.add(values.get(name, 0))
    assert len(bits) == 2 * len(sm90.FORWARD_INVARIANT)
    for (dim, _, score), (one, *others) in bits.items():
        assert not others
        block_k, chunk_tiles, _ = one
        most = 0 if score else 1024 if dim <= 128 else 2048
        assert chunk_tiles == most // block_k
    assert seen["GROUPS"] == {1, 2, 3}
    assert seen["PACKED"] == {0, 1}
    assert {0, 8, 16, 32, 64, 128} <= seen["PAGE_ROWS"]


def test_what_is_kept_between_chunks_takes_no_block_from_an_sm() -> None:
    shared = {False: set[int](), True: set[int]()}
    for plan in invariant_plans():
        values = dict(plan.constants)
        if "CHUNK_TILES" not in values:
            assert "CHUNK_SHARED" not in values
            continue
        blocks, size = values.get("BLOCKS", 1), values["SHARED_BYTES"]
        tiles = sm90.Own(values["GROUPS"], values["BLOCK_K"], values["STAGES"])
        pair = values["HEAD_DIM"], values["HEAD_DIM_V"]
        kept = tiles.kept_bytes(pair) if "CHUNK_SHARED" in values else 0
        assert size == tiles.shared_bytes(pair) + kept
        assert size <= 227 * 1024 == plans.limits_of("sm_90").shared_bytes_per_block
        registers = 65536 // (plans.threads_of(plan) * blocks) // 8 * 8
        counts = {plans.blocks_per_sm(plan, "sm_90", registers, x) for x in (size, size - kept)}
        assert counts == {blocks}
        block = TARGET.block_of(plan)
        assert (block.kept == 0) == bool(kept)  # or it lies in global memory
        shared[bool(kept)].add(pair[0])
    assert shared == {False: {64, 96, 192, 256}, True: {64, 96, 128, 192}}


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_pages_are_whole_where_their_size_divides_a_tile(page_size: int) -> None:
    features = frozenset({"paged", "causal"})
    latent = {"head_dim": 576, "head_dim_v": 512, "heads_q": 128, "heads_k": 1, "seqlen_q": 1}
    found = [
        answer(features=features | more, page_size=page_size, square=False, **changes).plan
        for more, changes in (
            *((set(), {"head_dim": dim, "head_dim_v": dim}) for dim in (64, 96, 128, 192, 256)),
            ({"softcap"}, {"head_dim": 192}),
            ({"batch_invariant"}, {"head_dim": 192}),
            ({"fp8"}, FLOAT8),
            ({"latent", "gqa", "dv"}, latent),
        )
    ]
    tiles = set()
    for plan in found:
        assert plan is not None
        assert "/sm90/" in plan.kernel
        values = dict(plan.constants)
        tiles.add(values["BLOCK_K"])
        assert values["PAGE_ROWS"] == math.gcd(page_size, values["BLOCK_K"])
        assert values.get("WHOLE_PAGES", 0) == (values["BLOCK_K"] % page_size == 0)
    assert {64, 80, 96, 112, 128} <= tiles
    assert "WHOLE_PAGES" not in dict(forward_sm90.plan(EXAMPLE).constants)


@pytest.mark.parametrize("keys", [1, 16, 500, 8192, 65536])
@pytest.mark.parametrize("blocks", [1, 8, 100, 132, 600])
def test_parts_of_decode(blocks: int, keys: int) -> None:
    parts = decode.splits_for(Plan("cuda", decode.KERNEL), blocks, keys, 132, 512)
    assert 1 <= parts <= max(1, -(-keys // GROUP) // 4)  # none shorter than 64 keys
    if blocks % 132 == 0:
        assert parts == 1


def test_more_keys_are_never_in_fewer_parts() -> None:
    plan = Plan("cuda", decode.KERNEL)
    parts = [decode.splits_for(plan, 8, keys, 132, 512) for keys in (64, 1024, 8192, 65536)]
    assert parts == sorted(parts)
    assert parts[0] == 1
    assert parts[-1] >= 16  # 8 blocks and 132 SMs
