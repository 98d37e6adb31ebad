"""Run other projects' gfx942 attention kernels in the emulator, for ``mi300x_model.py``.

Nothing of theirs is in this repository: AITER's code objects and MoonMath's source are read from
clones (bare ones too) that the caller names, AOTriton's and CK's code objects from files. Inputs
are zeros, one workgroup is recorded.
"""

from __future__ import annotations

import json
import struct
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

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


def moonmath(folder: Path, rounding: str) -> tuple[Traced, dict[str, int]]:
    """MoonMath's forward with 384 rows per workgroup and 64 keys per tile, from code objects that
    the caller has: ``rtz.hsaco``, ``rtna.hsaco``, ``rtne.hsaco``. Also its registers and spills.

    Its LDS and registers are written for AMD's compiler: one that spills hundreds of registers
    makes another kernel of it, which the model cannot know.
    """
    data, found = read(folder, f"{rounding}.hsaco"), []
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


def triton_forward(folder: Path, dim: int, block_n: int, waves: int) -> Traced:
    """``attn_fwd`` of HipKittens' triton_baseline_v02.py under a causal mask, from code objects
    that the caller has, one for each of two lengths.

    The last block of rows is recorded: its tiles reach over all keys.
    """
    found, copies = [], 1
    for length in (1024, 2048):
        name = f"attn_fwd_{dim}_{block_n}_{waves}_{length}"
        facts = json.loads(read(folder, f"{name}.json"))
        data, shared, threads = (
            read(folder, f"{name}.hsaco"),
            facts["shared"],
            facts["num_warps"] * 64,
        )
        zeros = _Zeros()
        row = 2 * dim
        q, k, v, out = (zeros(length * row, x) for x in ("q", "k", "v", "o"))
        lse = zeros(4 * length, "lse")
        program = zeros.machine.load(data)
        kernel = program.kernel(facts["name"])
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


# (head, keys of a tile) of AOTriton 0.11's kernels for causal bfloat16 on gfx942: 128 rows, four
# wavefronts, one a SIMD, but two for (64, 64). A length's kernel is what its tuning database says.
AOTRITON_TILES = ((128, 64), (64, 128), (64, 64))


def aotriton_keys(dim: int, length: int) -> int:
    """Keys of a tile that its database has for a length."""
    return 64 if dim == 128 or length == 2048 else 128


def aotriton_forward(folder: Path, dim: int, keys: int) -> Traced:
    """``attn_fwd`` of AOTriton under a causal mask, from a code object that the caller has.

    Its workgroups stay, and take blocks of rows from a counter. The counter is set so that the
    recorded one takes the last block and ends.
    """
    name = f"attn_fwd_{dim}_{keys}"
    facts = json.loads(read(folder, f"{name}.json"))
    data, threads, found, copies = read(folder, f"{name}.hsaco"), facts["num_warps"] * 64, [], 1
    for length in (1024, 2048):
        zeros = _Zeros()
        q, k, v, out = (zeros(length * 2 * dim, x) for x in ("q", "k", "v", "o"))
        lse, counter = zeros(4 * length, "lse"), zeros(4, "counter")
        zeros.kept[-1].view(np.int32)[0] = length // TRITON_ROWS - 1
        kernel = zeros.machine.load(data).kernel(facts["name"])
        strides = (length * dim, length * dim, dim) * 4
        to_the_diagonal = 0x80000001  # its word for it, on both sides
        kernarg = pack_arguments(kernel.kernel, (
            q, k, v, 0.0884, lse, out, *strides, 1, 1, 0, 0, 0, length, length, to_the_diagonal,
            to_the_diagonal, counter, 304, 1))  # fmt: skip
        counters = zeros.machine.launch(
            kernel, grid=(1, 1, 1), block=(threads,), kernarg=kernarg, lds_bytes=facts["shared"],
            trace=(0,),
        )  # fmt: skip
        copies = device.resident(kernel.kernel, threads, facts["shared"])
        found.append(issue.turns_of(kernel.code, counters.traces, copies))
    return Traced(found[0], found[1], (1024 / keys, 2048 / keys), copies)


CK_ROWS = 128
_CK_ARGUMENTS = 128  # bytes: one structure by value


def ck_forward(file: Path) -> Traced:
    """CK's tiled forward for causal bfloat16 of head 64, from a code object that the caller has:
    ``BlockFmhaPipelineQRKSVSAsync``, 128 rows and 64 keys, all padded but keys, no LSE.

    The last block of rows is recorded: its tiles reach over all keys.
    """
    data, dim, found, copies = file.read_bytes(), 64, [], 1
    for length in (1024, 2048):
        zeros = _Zeros()
        pointers = [zeros(length * 2 * dim, x) for x in ("q", "k", "v", "o")]
        heads = (length * dim,) * 4
        raw = struct.pack(
            "<4Q6if4i4i4x3i4i", *pointers, length, length, dim, dim, 1, 1, 0.18, *(dim,) * 4,
            *heads, -1, 0, 1, *heads,
        )  # fmt: skip
        raw += bytes(_CK_ARGUMENTS - len(raw))
        program = zeros.machine.load(data)
        (name,) = (name for name in program.object.kernels if "kentry" in name)
        kernel, last = program.kernel(name), length // CK_ROWS - 1
        counters = zeros.machine.launch(
            kernel, grid=(1, 1, last + 1), block=(256,), kernarg=raw, trace=(last,)
        )
        copies = device.resident(kernel.kernel, 256)
        found.append(issue.turns_of(kernel.code, counters.traces, copies))
    return Traced(found[0], found[1], (1024 / 64, 2048 / 64), copies)
