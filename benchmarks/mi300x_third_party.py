"""Runs other people's gfx942 attention kernels in the emulator, for ``mi300x_model.py``.

Nothing of theirs is in this repository: AITER's code objects and MoonMath's source are read from
clones (bare ones too) that the caller names. Inputs are zeros, one workgroup is recorded.
"""

from __future__ import annotations

import struct
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pyfa.backends.hip import compiler
from pyfa.emulator import Checks, Machine, pack_arguments
from pyfa.emulator.timing import device, issue

DIM = 128
ROW = 2 * DIM  # bytes


@dataclass(frozen=True)
class Traced:
    """A kernel at two lengths: its turns, tiles of the recorded workgroup, and how many fit."""

    short: issue.Turns
    long: issue.Turns
    tiles: tuple[float, float]
    resident: int


def read(where: Path, name: str) -> bytes:
    """File ``name`` of a clone, as its last commit has it, or of a plain folder."""
    if (where / name).exists():
        return (where / name).read_bytes()
    done = subprocess.run(
        ["git", "-C", str(where), "show", f"HEAD:{name}"], capture_output=True, check=False
    )
    if done.returncode:
        raise FileNotFoundError(f"{name} is not in {where}: {done.stderr.decode().strip()}")
    return done.stdout


def _pointer(address: int) -> bytes:
    return struct.pack("<QQ", address, 0)


def _number(value: float) -> bytes:
    raw = struct.pack("<f", value) if isinstance(value, float) else struct.pack("<I", value)
    return raw + bytes(12)


class _Zeros:
    """Zeroed arrays, mapped; with room behind each, since tiles are loaded whole."""

    def __init__(self) -> None:
        self.machine = Machine(checks=Checks.off())
        self.kept: list[Any] = []

    def __call__(self, nbytes: int, name: str) -> int:
        whole = np.zeros(nbytes + (1 << 18) + 4096, np.uint8)
        start = -whole.ctypes.data % 4096  # as a GPU's allocator gives it: at a page
        self.kept.append(whole[start : start + nbytes + (1 << 18)])
        return self.machine.map_array(self.kept[-1], name)


def _turns(
    machine: Machine, data: bytes, part: str, grid: Sequence[int], threads: int, kernarg: Any
) -> tuple[issue.Turns, int]:
    program = machine.load(data)
    (name,) = (name for name in program.object.kernels if part in name)
    kernel = program.kernel(name)
    if callable(kernarg):
        kernarg = kernarg(kernel.kernel)
    counters = machine.launch(kernel, grid=grid, block=(threads,), kernarg=kernarg, trace=(0,))
    copies = device.resident(kernel.kernel, threads)
    return issue.turns_of(kernel.code, counters.traces, copies), copies


def aiter_forward(where: Path, name: str, causal: bool) -> Traced:
    """``name``: rtz, rtna, rtne. A workgroup has 256 rows; under a mask, two blocks of them."""
    mask = "causal_" if causal else ""
    data = read(where, f"hsa/gfx942/fmha_v3_fwd/MI300/fwd_hd128_bf16_{mask}{name}.co")
    found, tiles = [], []
    for length in (1024, 2048):
        rows = length if causal else 256
        zeros = _Zeros()
        q, k, v, out = (zeros(n * ROW, x) for n, x in
                        ((rows, "q"), (length, "k"), (length, "v"), (rows, "o")))  # fmt: skip
        lse = zeros(4 * rows, "lse")
        # 3: its own choice where heads are no multiple of 8; the order of workgroups alone.
        sizes = (rows, ROW, 256 * ROW, rows * ROW, rows * ROW, 1, ROW, length * ROW, length * ROW,
        3,          0, length, DIM, DIM, 1, ROW, length * ROW, length * ROW, ROW, rows * ROW,
                 rows * ROW)  # fmt: skip
        kernarg = b"".join(_pointer(x) for x in (out, q, k, v, lse)) + _number(0.0884)
        kernarg += b"".join(map(_number, sizes)) + 2 * _pointer(0) + _number(4 * rows)
        kernarg += 5 * _pointer(0) + 6 * _number(0)
        blocks = rows // 256
        grid = (blocks // 2 if causal else 1, 1, 1)
        turns, copies = _turns(zeros.machine, data, "fmha_fwd", grid, 512, kernarg)
        found.append(turns)
        tiles.append((length + 256) / 64 if causal else length / 64)
    return Traced(found[0], found[1], (tiles[0], tiles[1]), copies)


def aiter_backward(where: Path, way: str, name: str) -> Traced:
    """``way``: a16, a32. A workgroup owns 192 keys and walks the rows in tiles of 16."""
    data = read(where, f"hsa/gfx942/fmha_v3_bwd/bwd_hd128_bf16_{way}_{name}.co")
    found = []
    keys = 192
    for rows in (512, 1024):
        zeros = _Zeros()
        of_keys = [zeros(keys * ROW, x) for x in ("dk", "dv", "k", "v")]
        dk, dv, k, v = of_keys
        q, dout = (zeros(rows * ROW, x) for x in ("q", "dout"))
        dq = zeros(rows * DIM * 4, "dq")
        lse, delta = (zeros(rows * 4, x) for x in ("lse", "delta"))
        rs, ks = rows * ROW, keys * ROW
        sizes = (rows, 192 * ROW, rs, rs, ROW, 1, ks, ks, ROW, ROW, keys, DIM, DIM, 1, ks, ks, ROW,
                 rs, rs, ROW, ks, ks, ks, ks, ROW, 4 * rows)  # fmt: skip
        kernarg = b"".join(_pointer(x) for x in (dq, dk, dv, q, k, v, dout, lse, delta))
        kernarg += _number(0.0884) + _number(1.442695) + b"".join(map(_number, sizes))
        kernarg += 4 * _pointer(0) + _number(rows) + 2 * _number(0)
        turns, copies = _turns(zeros.machine, data, "fmha_bwd", (1, 1, 1), 256, kernarg)
        found.append(turns)
    return Traced(found[0], found[1], (512 / 16, 1024 / 16), copies)


# What the source of MoonMath's kernel takes from HIP's headers, which the compiler here lacks.
_HIP = """#pragma once
#define __global__ __attribute__((global))
#define __device__ __attribute__((device))
#define __host__ __attribute__((host))
#define __shared__ __attribute__((shared))
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(t, w) __attribute__((amdgpu_flat_work_group_size(1, t), \\
                                               amdgpu_waves_per_eu(w)))
#define FLT_MAX 3.40282347e+38F
struct dim3 { unsigned x, y, z; };
struct int4 { int x, y, z, w; };
typedef void *hipStream_t;
struct __hip_bfloat16 { unsigned short x; };
typedef __attribute__((address_space(4))) const unsigned *Hidden;
__device__ inline dim3 of_items() { return {__builtin_amdgcn_workitem_id_x(), 0, 0}; }
__device__ inline dim3 of_groups() {
  return {__builtin_amdgcn_workgroup_id_x(), __builtin_amdgcn_workgroup_id_y(), 0};
}
__device__ inline dim3 of_grid() {
  Hidden p = (Hidden)__builtin_amdgcn_implicitarg_ptr();
  return {p[0], p[1], p[2]};
}
#define threadIdx (of_items())
#define blockIdx (of_groups())
#define gridDim (of_grid())
__device__ inline int __all(int p) {
  return __builtin_amdgcn_ballot_w64(p) == __builtin_amdgcn_ballot_w64(true);
}
__device__ inline int __any(int p) { return __builtin_amdgcn_ballot_w64(p) != 0; }
__device__ inline unsigned long __ballot(int p) { return __builtin_amdgcn_ballot_w64(p); }
__device__ inline void __syncthreads() { __builtin_amdgcn_s_barrier(); }
__device__ inline float fmaxf(float a, float b) { return __builtin_fmaxf(a, b); }
__device__ inline float fminf(float a, float b) { return __builtin_fminf(a, b); }
__device__ inline float fmaf(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
__device__ __host__ inline int min(int a, int b) { return a < b ? a : b; }
__device__ __host__ inline int max(int a, int b) { return a > b ? a : b; }
"""
_INSTANCE = """
template __global__ void attention_forward<true, false, false>(
    const bf16_t *, const bf16_t *, const bf16_t *, bf16_t *, int, int, float, int, const int16_t *,
    int16_t *, const int16_t *, float, int, float *, int, int, const int *);
}
"""
_FAST = ("-ffast-math", "-fno-math-errno", "-mllvm", "-amdgpu-early-inline-all=true", "-mllvm",
         "-amdgpu-function-calls=false")  # fmt: skip


def moonmath_code(where: Path, rounding: str, clang: Path | None) -> bytes:
    """Its kernel compiled by ``clang``, or by the pinned compiler; the host code is cut off.

    Needs the headers of a host's C++ library. Its LDS and registers are written for AMD's compiler:
    with clang 19 two registers spill, with the pinned one hundreds (which ``device`` cannot know).
    """
    source = read(where, "csrc/attention_kernel.hip").decode()
    source = source[: source.index("// ===== DISPATCH")] + _INSTANCE
    zig = compiler.zig()
    assert zig is not None
    front = (
        [str(clang)] if clang else [str(zig), "clang", "-isystem", str(zig.parent / "lib/include")]
    )
    back = [str(clang)] if clang else [str(zig), "clang"]
    with tempfile.TemporaryDirectory() as folder:
        at = Path(folder)
        (at / "hip").mkdir()
        for name in ("hip/hip_runtime.h", "hip/hip_bf16.h", "hip/hip_runtime_api.h"):
            (at / name).write_text(_HIP if name.endswith("runtime.h") else
                                   '#include <hip/hip_runtime.h>\n')  # fmt: skip
        for name in ("cfloat", "cmath"):
            (at / name).write_text("")
        (at / "opus.hpp").write_bytes(read(where, "csrc/opus.hpp"))
        (at / "k.hip").write_text(source)
        steps = (
            [*front, "-x", "hip", "--offload-device-only", "-nogpulib", "-nogpuinc", "-fgpu-rdc",
             "-c", "-emit-llvm", "-mcode-object-version=5", "-std=c++17", "-g0", "-O3", *_FAST,
             "--offload-arch=gfx942", f"-DBF16_ROUND={rounding.upper()}", "-I.", "k.hip", "-o",
             "k.bc"],
            [*back, "-target", "amdgcn-amd-amdhsa", "-nogpulib", "-c", "-x", "ir", "-g0",
             "-mcpu=gfx942", "-O3", "k.bc", "-o", "k.o"],
            [str(zig), "ld.lld", "-shared", "--build-id=none", "k.o", "-o", "k.hsaco"],
        )  # fmt: skip
        for step in steps:
            done = subprocess.run(step, cwd=at, capture_output=True, check=False)
            if done.returncode:
                raise RuntimeError(done.stderr.decode(errors="replace")[-2000:])
        return (at / "k.hsaco").read_bytes()


def moonmath(data: bytes) -> tuple[Traced, dict[str, int]]:
    """Its forward: 384 rows of a workgroup, 64 keys of a tile. Also its registers and spills."""
    found = []
    facts: dict[str, int] = {}
    for length in (1024, 2048):
        zeros = _Zeros()
        q, k, v, out = (zeros(n * ROW, x) for n, x in
                        ((384, "q"), (length, "k"), (length, "v"), (384, "o")))  # fmt: skip
        values = (q, k, v, out, 384, length, 0.1275, 1, 0, 0, 0, 0.0, 0, 0, 0, 0, 0)

        def kernarg(kernel: Any, values: Any = values) -> bytes:
            facts.update(registers=kernel.vgprs, spills=kernel.vgpr_spills)
            return pack_arguments(kernel, values)

        turns, copies = _turns(zeros.machine, data, "attention_forward", (1, 1, 1), 512, kernarg)
        found.append(turns)
    return Traced(found[0], found[1], (1024 / 64, 2048 / 64), copies), facts


# (BLOCK_N, waves_per_eu) of the configurations that its autotuner chooses from; BLOCK_M is 128.
TRITON_CONFIGS = ((128, 2), (64, 2), (64, 3), (64, 1), (32, 2))
TRITON_ROWS = 128


def triton_forward(source: Path, dim: int, block_n: int, waves: int) -> Traced:
    """``attn_fwd`` of HipKittens' triton_baseline_v02.py under a causal mask, by this Triton.

    The last block of rows is recorded: its tiles reach over all keys. Another Triton than the one
    that was measured compiles it.
    """
    found, copies = [], 1
    for length in (1024, 2048):
        data, name, shared, threads = _triton_code(source, dim, block_n, waves, length)
        zeros = _Zeros()
        row = 2 * dim
        q, k, v, out = (zeros(length * row, x) for x in ("q", "k", "v", "o"))
        lse = zeros(4 * length, "lse")
        program = zeros.machine.load(data)
        kernel = program.kernel(name)
        strides = (length * dim, length * dim, dim) * 4
        # bias, its strides, ALiBi's, dropout and the generator are there only as arguments.
        kernarg = pack_arguments(kernel.kernel, (q, k, v, lse, out, *strides))
        last = length // TRITON_ROWS - 1
        counters = zeros.machine.launch(
            kernel, grid=(last + 1, 1, 1), block=(threads,), kernarg=kernarg, lds_bytes=shared,
            trace=(last,),
        )  # fmt: skip
        copies = device.resident(kernel.kernel, threads, shared)
        found.append(issue.turns_of(kernel.code, counters.traces, copies))
    return Traced(found[0], found[1], (1024 / block_n, 2048 / block_n), copies)


def _triton_code(
    source: Path, dim: int, block_n: int, waves: int, length: int
) -> tuple[bytes, str, int, int]:
    import importlib.util

    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    text = source.read_text()
    # The tests and the autotuner, which wants a GPU, are left out.
    head = text[: text.index("def get_gfx_version")].replace("import pytest\n", "")
    body = text[text.index("@triton.jit\ndef attn_fwd(") : text.index("@triton.jit\ndef _attn_bwd")]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "baseline.py")
        path.write_text(head + body)
        spec = importlib.util.spec_from_file_location("baseline", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        function = module.attn_fwd
        constants = {
            "SM_SCALE": dim**-0.5, "PERSISTENT": False, "PERSISTENT_DYNAMIC": False, "NUM_CU": 304,
            "GRID_CU_MULTIP": 2, "B": 16, "HQ": 16, "HK": 16, "ACTUAL_BLOCK_DMODEL": dim,
            "MAX_SEQLENS_Q": length, "MAX_SEQLENS_K": length, "VARLEN": False, "IS_CAUSAL": True,
            "BLOCK_M": TRITON_ROWS, "BLOCK_DMODEL": dim, "BLOCK_N": block_n, "PRE_LOAD_V": False,
            "USE_BIAS": False, "ENABLE_DROPOUT": False, "RETURN_ENCODED_SOFTMAX": False,
            "USE_ALIBI": False, "INT8": False, "USE_P_SCALE": False, "INT8_KV": False,
            "dropout_p": 0.0, "philox_seed": 0, "philox_offset_base": 0,
            **dict.fromkeys(("bias", "Q_descale", "K_descale", "P_scale", "P_descale", "V_descale",
                             "cu_seqlens_q", "cu_seqlens_k", "atomic_counter", "encoded_softmax",
                             "alibi_slopes")),
            **dict.fromkeys(("stride_qk", "stride_kk", "stride_vn", "stride_on"), 1),
            **dict.fromkeys(("stride_bz", "stride_bh", "stride_bm", "stride_bn", "stride_az",
                             "stride_ah"), 0),
        }  # fmt: skip
        pointers = {"Q": "*bf16", "K": "*bf16", "V": "*bf16", "Out": "*bf16", "L": "*fp32"}
        signature = {
            name: "constexpr" if name in constants else pointers.get(name, "i32")
            for name in function.arg_names
        }
        names = list(function.arg_names)
        divisible = {
            (names.index(name),): [["tt.divisibility", 16]]
            for name, kind in signature.items()
            if kind != "constexpr"
        }
        built = triton.compile(
            ASTSource(function, signature, constants, divisible),
            target=GPUTarget("hip", "gfx942", 64),
            options={"num_warps": 4, "num_stages": 1, "waves_per_eu": waves},
        )
    facts = built.metadata
    return built.asm["hsaco"], facts.name, facts.shared, facts.num_warps * 64
