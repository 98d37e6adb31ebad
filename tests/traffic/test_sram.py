"""On-chip memory: the two rules, occupancy, and buffers beside what the compiler reports."""

from __future__ import annotations

from dataclasses import replace

import pytest
import turns
from hypothesis import given
from hypothesis import strategies as st

from pyfa.arch import ARCHS
from pyfa.backends import BACKENDS
from pyfa.backends.base import Tiled
from pyfa.backends.hip import backward, code, plans
from pyfa.backends.hip.target import TARGET
from pyfa.backends.native import tiling
from pyfa.backends.native.tiles import gfx942
from pyfa.device import DEVICES
from pyfa.problem import Problem
from pyfa.traffic import Shape
from pyfa.traffic.sram import occupancy, rows_of_three_tiles, rows_with_scores


@given(st.integers(1024, 1 << 20), st.sampled_from((32, 64, 128, 256)), st.sampled_from((2, 4)))
def test_rules_give_the_most_rows_that_fit(sram: int, d: int, size: int) -> None:
    def three(m: int) -> int:
        return 3 * m * d * size

    def all_of_it(m: int) -> int:
        return (4 * m * d + m * m) * size  # Q, K, V, O and S

    for rows, needs in (
        (rows_of_three_tiles(sram, d, size), three),
        (rows_with_scores(sram, d, size), all_of_it),
    ):
        assert needs(rows) <= sram < needs(rows + 1)


@pytest.mark.parametrize(
    ("sram", "three", "with_scores"), [(96_000, 62, 43), (96 * 1024, 64, 44), (65536, 42, 30)]
)
def test_rules_at_a_head_dim_of_128(sram: int, three: int, with_scores: int) -> None:
    assert rows_of_three_tiles(sram, 128) == three
    assert rows_with_scores(sram, 128) == with_scores


def test_occupancy_is_what_the_first_limit_leaves() -> None:
    a100, cdna3 = ARCHS["sm_80"], ARCHS["gfx942"]
    # CUDA's occupancy calculator, compute capability 8.0: 128 threads of 128 registers, 48 KiB.
    assert occupancy(a100, 48 * 1024, 128, 128) == (3, 12 / 64, "shared memory")
    assert occupancy(a100, 0, 128, 128) == (4, 16 / 64, "registers")
    assert occupancy(a100, 0, 1024, 32) == (2, 1.0, "wavefronts")
    # Five tiles of 32 KiB on an A100: one block an SM.
    assert occupancy(a100, 160 * 1024, 256) == (1, 8 / 64, "shared memory")
    assert occupancy(a100, 192 * 1024, 128) == (0, 0.0, "shared memory")
    # 512 registers a lane of a SIMD: 256 each for two wavefronts, four SIMDs.
    assert occupancy(cdna3, 65536, 512, 250) == (1, 8 / 32, "shared memory")
    assert occupancy(cdna3, 32768, 512, 170) == (1, 8 / 32, "registers")
    assert occupancy(cdna3, 16384, 256, 257) == (1, 4 / 32, "registers")


def problem(pair: tuple[int, int], *features: str, rows: int = 512) -> Problem:
    return Problem(1, rows, 512, 8, 2, *pair, "bfloat16", frozenset(features), DEVICES["MI300X"],
                   False)  # fmt: skip


def shape(pair: tuple[int, int], rows: int = 512) -> Shape:
    return Shape(1, rows, 512, 8, 2, *pair)


@pytest.mark.parametrize(
    "pair", turns.cases(gfx942.FORWARD, (pair for pair in gfx942.FORWARD if max(pair) > 64))
)
@pytest.mark.parametrize("rows", [1, 512])
@pytest.mark.parametrize("deterministic", [False, True])
def test_buffers_are_the_lds_of_the_code_object(
    pair: tuple[int, int], rows: int, deterministic: bool
) -> None:
    """Forward or decode, and backward in one pass or, deterministic, in two."""
    if code.why_unavailable():
        pytest.skip("no compiler for the kernels")
    asked = problem(pair, "backward", "gqa", *["deterministic"] * deterministic, rows=rows)
    plan = BACKENDS["hip"].plan(asked)
    by_formula = tiling.kernels_of(TARGET, plan, asked, shape(pair, rows), False)
    built = tiling.kernels_of(TARGET, plan, asked, shape(pair, rows), True)
    one_pass = not deterministic and pair in gfx942.TILES.one_pass
    expected = ["gradients"] if one_pass else ["dk_dv", "dq"]
    assert [one.role for one in built] == ["forward", *expected]
    for formula, found in zip(by_formula, built, strict=True):
        assert sum(formula.buffers.values()) == formula.shared_bytes == found.compiled_bytes
        assert 0 < found.registers <= 512
        assert replace(found, registers=0, compiled_bytes=0) == formula
    assert built[1].tiling.block_k % (16 * backward.WAVES) == 0


def test_buffers_of_decode_with_chunks() -> None:
    if code.why_unavailable():
        pytest.skip("no compiler for the kernels")
    asked = problem((64, 64), "gqa", "chunk", rows=1)
    plan = BACKENDS["hip"].plan(asked)
    (formula,) = tiling.kernels_of(TARGET, plan, asked, shape((64, 64), 1), False)
    (built,) = tiling.kernels_of(TARGET, plan, asked, shape((64, 64), 1), True)
    assert sum(formula.buffers.values()) == formula.shared_bytes == built.compiled_bytes


def test_backends_with_tiles_tell_them_for_every_named_device() -> None:
    """Also for problems of few rows and split keys; nothing is compiled."""
    tiled = {name: backend for name, backend in BACKENDS.items() if isinstance(backend, Tiled)}
    assert {"hip", "emulator", "triton"} <= set(tiled)
    for device in DEVICES.values():
        backend = tiled["hip" if device.arch in plans.ARCHS else "triton"]
        for rows in (1, 512):
            asked = replace(
                problem((128, 128), "backward", "gqa", "deterministic", rows=rows), device=device
            )
            plan = backend.plan(asked.bucketed())
            kernels = backend.tiled_kernels(plan, asked, shape((128, 128), rows), False)
            assert kernels[0].role == "forward"
            assert {"dq"} < {one.role for one in kernels}
            limits = device.limits
            assert limits is not None
            for one in kernels:
                assert 0 < one.shared_bytes <= limits.shared_bytes_per_block


@pytest.mark.parametrize("name", ["H200", "A100-80GB", "MI300X"])
def test_tritons_buffers_are_near_what_it_allocates(name: str) -> None:
    """Within 20 %, by compiling ahead of time: the rest changes layouts."""
    pytest.importorskip("triton")
    asked = replace(problem((128, 128), "gqa"), device=DEVICES[name], aligned=True)
    backend = BACKENDS["triton"]
    assert isinstance(backend, Tiled)
    plan = backend.plan(asked.bucketed())
    (formula,) = backend.tiled_kernels(plan, asked, shape((128, 128)), False)
    (built,) = backend.tiled_kernels(plan, asked, shape((128, 128)), True)
    assert 0.8 <= formula.shared_bytes / built.compiled_bytes <= 1.0
    assert built.registers > 0
