"""Compiled kernels, HIP and Triton: results against numpy, any order of waves, no false alarm."""

from __future__ import annotations

import functools
import mmap
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pyfa import codeobject
from pyfa.backends.hip.compiler import compile_hip
from pyfa.emulator import Checks, Counters, Machine, Program, load, pack_arguments

SOURCE = Path(__file__).with_name("kernels.hip")


@pytest.fixture(scope="session")
def program() -> Program:
    return load(compile_hip(SOURCE.read_text(), arch="gfx942", options=()))


def run(
    program: Program,
    name: str,
    grid: Any,
    block: Any,
    *arguments: Any,
    lds: int = 0,
    **machine: Any,
) -> Counters:
    """Maps the arrays among ``arguments`` and launches the kernel."""
    device = Machine(**machine)
    kernel = program.kernel(name)
    values = [
        device.map_array(a, f"argument {n}") if isinstance(a, np.ndarray) else a
        for n, a in enumerate(arguments)
    ]
    packed = pack_arguments(kernel.kernel, values)
    return device.launch(kernel, grid=grid, block=block, kernarg=packed, lds_bytes=lds)


ORDERS: list[dict[str, Any]] = [{"in_order": True}, {"seed": 1}, {"seed": 2, "threads": 2}]


def same_for_all_orders(
    program: Program, name: str, grid: Any, block: Any, *arguments: Any, out: Any
) -> Counters:
    first, counters = None, None
    for order in ORDERS:
        out[...] = 0
        counters = run(program, name, grid, block, *arguments, **order)
        if first is None:
            first = out.tobytes()
        assert out.tobytes() == first
    assert counters is not None
    return counters


def test_compiled_bytes_are_the_same_twice() -> None:
    source = SOURCE.read_text()
    builds = [compile_hip(source, arch="gfx942", options=()) for _ in range(2)]
    assert builds[0] == builds[1]
    parsed = codeobject.parse(builds[0])
    assert (parsed.arch, parsed.version) == ("gfx942", 5)
    assert all(not k.vgpr_spills and not k.sgpr_spills for k in parsed.kernels.values())


def test_vector_add(program: Program) -> None:
    n = 1000
    a, b = np.random.default_rng(0).standard_normal((2, n)).astype(np.float32)
    c = np.zeros(n, np.float32)
    counters = same_for_all_orders(program, "vector_add", (4,), (256,), a, b, c, n, out=c)
    assert (c == a + b).all()
    assert counters.store_bytes == 4 * n
    assert counters.load_bytes - counters.scalar_bytes == 2 * 4 * n
    assert counters.scalar_bytes >= 16 * 28  # each wavefront its arguments
    assert counters.mnemonics["global_store_dword"] == 16
    assert counters.executed[program.object.kernel("vector_add").entry] == 16


def test_transpose(program: Program) -> None:
    rows, columns = 100, 150
    a = np.random.default_rng(1).standard_normal((rows, columns)).astype(np.float32)
    out = np.zeros((columns, rows), np.float32)
    grid = ((columns + 63) // 64, (rows + 63) // 64)
    counters = same_for_all_orders(
        program, "transpose", grid, (256,), a, out, rows, columns, out=out
    )
    assert (out == a.T).all()
    assert counters.lds_conflict_clocks == 0
    assert counters.barriers == 6 * 4


def test_bank_conflicts_are_counted(program: Program) -> None:
    out = np.zeros(64, np.float32)
    counters = run(program, "conflicts", (1,), (64,), out)
    # Each half of the wave has 32 dwords in one bank: 32 clocks, 31 more than without conflict.
    assert counters.lds_clocks == 2 * 2 * 32
    assert counters.lds_conflict_clocks == 2 * 2 * 31
    assert counters.lds_write_bytes == counters.lds_read_bytes == 64 * 4
    assert counters.lds_direct_bytes == 0


def test_reduce(program: Program) -> None:
    n = 1000
    a = np.random.default_rng(2).integers(-50, 50, (5, n)).astype(np.float32)
    out = np.zeros(5, np.float32)
    same_for_all_orders(program, "reduce", (5,), (256,), a, out, n, out=out)
    assert (out == a.sum(1)).all()


def test_gemm(program: Program) -> None:
    m, n, k = 64, 96, 40
    rng = np.random.default_rng(3)
    a, b = (rng.standard_normal((size, k)).astype(np.float16) for size in (m, n))
    c = np.zeros((m, n), np.float32)
    counters = same_for_all_orders(program, "gemm", (2, 3), (64,), a, b, c, n, k, out=c)
    assert np.abs(c - a.astype(np.float64) @ b.T.astype(np.float64)).max() < 1e-5
    assert counters.mfma_clocks == {"v_mfma_f32_32x32x8_f16": 6 * 5 * 32}


def attention_reference(q: Any, k: Any, v: Any, causal: bool = False) -> Any:
    score = np.einsum("...id,...jd->...ij", q.astype(np.float64), k.astype(np.float64)) / 8
    if causal:
        score = np.where(np.tri(score.shape[-1], dtype=bool), score, -np.inf)
    p = np.exp(score - score.max(-1, keepdims=True))
    return p / p.sum(-1, keepdims=True) @ v.astype(np.float64)


def test_attention(program: Program) -> None:
    length = 100
    q, k, v = np.random.default_rng(4).standard_normal((3, length, 64)).astype(np.float16)
    out = np.zeros((length, 64), np.float32)
    scale = float(np.float32(np.log2(np.e) / 8))
    same_for_all_orders(program, "attention", (2,), (256,), q, k, v, out, length, scale, out=out)
    assert np.abs(out - attention_reference(q, k, v)).max() < 1e-3


def test_division_is_correctly_rounded(program: Program) -> None:
    rng = np.random.default_rng(5)
    n = 1024
    bits = rng.integers(0, 1 << 32, (2, n), dtype=np.uint64).astype(np.uint32)
    a, b = bits.view(np.float32)
    x, y = rng.integers(0, 1 << 63, (2, n), dtype=np.uint64).view(np.float64) * rng.choice(
        [-1, 1], n
    )
    special = [0.0, -0.0, 1.0, np.inf, -np.inf, np.nan, 1e-40, 3e38]
    a[:64], b[:64] = np.repeat(special, 8), np.tile(special, 8)
    x[:64], y[:64] = np.repeat(special, 8), np.tile(special, 8)
    c, z = np.zeros(n, np.float32), np.zeros(n)
    run(program, "divide", (4,), (256,), a.copy(), b.copy(), c, x.copy(), y.copy(), z)
    with np.errstate(all="ignore"):
        np.testing.assert_array_equal(c, a / b)
        np.testing.assert_array_equal(z, x / y)


def test_atomics_from_several_threads(program: Program) -> None:
    total, count, highest = np.zeros(1, np.float32), np.zeros(1, np.uint32), np.zeros(1, np.uint32)
    run(program, "atomics", (50,), (128,), total, count, highest, threads=2)
    assert (total[0], count[0], highest[0]) == (6400, 6400, 6399)


def test_scratch_and_divergent_loops(program: Program) -> None:
    out = np.zeros(64, np.int32)
    counters = run(program, "scratch", (1,), (64,), out, 23)
    wanted = [sum((i * 7 + t) % 32 * t for i in range(t % 23)) for t in range(64)]
    assert out.tolist() == wanted
    assert any(name.startswith(("scratch_", "flat_")) for name in counters.mnemonics)


def test_sparse_memory_beyond_4_gib(program: Program) -> None:
    machine = Machine()
    kernel = program.kernel("far_copy")
    step = (1 << 31) // 64 // 4 * 5  # elements: the last lane is near 10 GiB
    nbytes = 4 * (63 * step + 1)
    assert nbytes > 2 * 2**32
    # Sparse: pages take memory only when they are accessed.
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
    values, results = (np.frombuffer(mmap.mmap(-1, nbytes, flags=flags), np.uint8) for _ in "io")
    source, target = (machine.map_array(x, f"array {x.ctypes.data}") for x in (values, results))
    values.view(np.float32)[::step][:64] = np.arange(64)
    packed = pack_arguments(kernel.kernel, [source, target, step])
    machine.launch(kernel, grid=(1,), block=(64,), kernarg=packed)
    assert results.view(np.float32)[::step][:64].tolist() == list(range(1, 65))


@functools.cache
def triton_program(name: str) -> tuple[Program, str, int, int, bytes]:
    """A Triton kernel: program, name, bytes of LDS, threads, and its code object."""
    pytest.importorskip("triton", reason="triton is not installed")
    import aot_kernels as kernels

    common = {
        "length": "i32",
        "scale": "fp32",
        "D": "constexpr",
        "BM": "constexpr",
        "BN": "constexpr",
        "CAUSAL": "constexpr",
    }
    pointers = dict.fromkeys("qkvo", "*fp16")
    built = {
        "softmax": lambda: kernels.build(
            kernels.softmax,
            {"x": "*fp32", "y": "*fp32", "columns": "i32", "stride": "i32", "BLOCK": "constexpr"},
            {"BLOCK": 1024},
        ),
        "matmul": lambda: kernels.build(
            kernels.matmul,
            {
                "a": "*bf16",
                "b": "*bf16",
                "c": "*fp32",
                "m": "i32",
                "n": "i32",
                "k": "i32",
                "BM": "constexpr",
                "BN": "constexpr",
                "BK": "constexpr",
            },
            {"BM": 64, "BN": 64, "BK": 32},
        ),
        "attention": lambda: kernels.build(
            kernels.attention,
            {**pointers, **common},
            {"D": 64, "BM": 64, "BN": 32, "CAUSAL": False},
        ),
        "causal": lambda: kernels.build(
            kernels.attention, {**pointers, **common}, {"D": 64, "BM": 64, "BN": 64, "CAUSAL": True}
        ),
    }[name]()
    data, kernel, shared, threads = built
    return load(data), kernel, shared, threads, data


@pytest.mark.filterwarnings("ignore")
def test_triton_softmax() -> None:
    program, name, shared, threads, _ = triton_program("softmax")
    assert program.object.kernel(name).preload_dwords > 0
    x = np.random.default_rng(6).standard_normal((7, 1000)).astype(np.float32)
    y = np.zeros_like(x)
    run(program, name, (7,), (threads,), x, y, 1000, 1000, lds=shared, seed=3)
    p = np.exp(x - x.max(1, keepdims=True))
    assert np.abs(y - p / p.sum(1, keepdims=True)).max() < 1e-7


@pytest.mark.filterwarnings("ignore")
def test_triton_matmul() -> None:
    program, name, shared, threads, _ = triton_program("matmul")
    m, n, k = 100, 90, 80
    rng = np.random.default_rng(7)
    codes = [
        (rng.standard_normal(s).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
        for s in ((m, k), (k, n))
    ]
    a, b = ((c.astype(np.uint32) << 16).view(np.float32).astype(np.float64) for c in codes)
    c = np.zeros((m, n), np.float32)
    run(program, name, (2, 2), (threads,), *codes, c, m, n, k, lds=shared, seed=3)
    assert np.abs(c - a @ b).max() < 2e-5


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["attention", "causal"])
def test_triton_attention(kind: str) -> None:
    program, name, shared, threads, _ = triton_program(kind)
    length = 150
    q, k, v = np.random.default_rng(8).standard_normal((3, 2, length, 64)).astype(np.float16)
    out = np.zeros_like(q)
    scale = float(np.float32(np.log2(np.e) / 8))
    for order in ORDERS:
        run(program, name, (3, 2), (threads,), q, k, v, out, length, scale, lds=shared, **order)
        assert np.abs(out - attention_reference(q, k, v, kind == "causal")).max() < 2e-3


def test_checks_off_give_the_same_bits(program: Program) -> None:
    length = 70
    q, k, v = np.random.default_rng(9).standard_normal((3, length, 64)).astype(np.float16)
    outs = []
    for checks in (Checks(), Checks.off()):
        out = np.zeros((length, 64), np.float32)
        run(program, "attention", (2,), (256,), q, k, v, out, length, 0.18, checks=checks)
        outs.append(out.tobytes())
    assert outs[0] == outs[1]
