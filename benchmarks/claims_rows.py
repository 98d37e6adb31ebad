"""The rows of ``claims.py``: statements, and the functions that compute ours."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pyfa import bench
from pyfa.arch import ARCHS
from pyfa.device import DEVICES
from pyfa.traffic import Shape, attention_flops, compulsory_bytes, footprint, sram, tensor_bytes
from pyfa.traffic.kernels import TiledKernel, Tiling
from pyfa.traffic.passes import standard_backward, standard_forward, tiled_passes

RESULTS = Path(__file__).parent / "results"
F0, F1 = "000_276d2f487c591c8b.txt", "001_9348b38b9c1e6eeb.txt"
F2, F3 = "002_2f3eb708cc518a47.txt", "003_c2413c344fc15882.txt"
F4 = "004_5d0ff79c1537880e.txt"
KIB = 1024
Between = tuple[float, float]
# file, statement, stated, what that means, ours, unit, assuming, why
Row = tuple[str, str, str, Between, float | None, str, str, str]

A100, MI300X, RTX4070 = DEVICES["A100-80GB"], DEVICES["MI300X"], DEVICES["RTX4070"]
N, D, SIZE = 4096, 128, 2
HEAD = Shape(1, N, N, 1, 1, D, D)
PER_HEAD = "per head, fp16, d = 128"
ONCE = f"{PER_HEAD}, K and V cross HBM once"
NO_CLOCK = "no A100 to measure on"
_SCORES = N * N * SIZE
_MATRIX = N * D * SIZE


def within(value: float, unit: float = 0.0) -> Between:
    """A figure that was rounded (or cut) at ``unit``."""
    return value - unit, value + unit


def least(value: float) -> Between:
    return value, math.inf


def standard_bytes(shape: Shape, v_twice: bool = False) -> int:
    """Every matrix of each of the three kernels once. ``v_twice``: V with Q and K, and again."""
    moved = sum(w.once for one in standard_forward(shape) for w in (*one.reads, *one.writes))
    return moved + (shape.seqlen_k * shape.head_dim_v * shape.itemsize if v_twice else 0)


def tiled_bytes(shape: Shape) -> int:
    """Q, K, V and O once, without the LSE, which the documents do not have."""
    return compulsory_bytes(shape) - 4 * shape.lines * shape.seqlen_q


def reduction(length: int, head_dim: int = D) -> float:
    shape = Shape(1, length, length, 1, 1, head_dim, head_dim)
    return standard_bytes(shape) / tiled_bytes(shape)


def requested(rows: int, length: int = N) -> int:
    """What a forward in tiles of ``rows`` × 64 asks of the memory system."""
    kernel = TiledKernel("forward", Tiling(rows, 64), (D, D), 256)
    shape = Shape(1, length, length, 1, 1, D, D)
    return tiled_passes(shape, [kernel])[0].requested


def five_tiles(size_of_s_and_o: int) -> int:
    """Q, K and V of 128 × 128 in fp16, and S and O."""
    return 128 * 128 * (3 * SIZE + 2 * size_of_s_and_o)


def measured(name: str, key: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = bench.load(RESULTS / f"{name}.json")[key]
    return rows


def by_length(kind: str) -> dict[int, float]:
    """Naive's seconds over pyfa's, by N, where naive attention fits: by naive_vs_pyfa.py."""
    seconds: dict[int, dict[str, float]] = {}
    for row in measured("naive_vs_pyfa", "lengths"):
        if row["kind"] == kind and "seconds" in row:
            seconds.setdefault(row["seqlen"], {})[row["side"]] = row["seconds"]
    return {n: of["naive"] / of["pyfa"] for n, of in seconds.items() if "naive" in of}


def small_grids(longest: int) -> list[float]:
    """The same of ``pyfa bench small``: one sequence, causal."""
    seconds: dict[str, dict[str, float]] = {}
    for row in measured("bench_small_naive_h200", "rows"):
        if row["problem"]["seqlen_q"] <= longest:
            seconds.setdefault(row["cell"], {})[row["peer"]] = row["seconds"]["median"]
    return [of["naive"] / of["pyfa"] for of in seconds.values()]


def counted(side: str, causal: bool = False) -> dict[str, Any]:
    """What Nsight Compute counted of a forward at N = 4096: benchmarks/hbm_traffic.py."""
    wanted = {"side": side, "passes": "forward", "seqlen": N, "causal": causal}
    (row,) = (row for row in measured("hbm_traffic", "traffic") if wanted.items() <= row.items())
    return row


def claims() -> Iterator[Row]:
    yield from _document_0()
    yield from _document_1()
    yield from _document_2_bytes()
    yield from _document_2_device()
    yield from _document_2_speed()
    yield from _documents_3_and_4()


def _document_0() -> Iterator[Row]:
    ada = ARCHS["sm_89"]
    yield (F0, "L0 cache, bytes a thread", "128", within(128), None, "", "",
           "no such figure is published for either GPU")  # fmt: skip
    yield (F0, "L1 of an SM (RTX 4070)", "128 KB", within(128, 1), 128, "KiB", "",
           "with shared memory, of which 100 KiB can be had (programming guide, 8.9)")  # fmt: skip
    yield (F0, "SRAM of an SM, RTX 4070", "96–192 KB", (96, 192), ada.shared_bytes / KIB, "KiB", "",
           "")  # fmt: skip
    yield (F0, "SRAM of a CU, MI300X", "96–192 KB", (96, 192), ARCHS["gfx942"].shared_bytes / KIB,
           "KiB", "", "LDS")  # fmt: skip
    yield F0, "L2, RTX 4070", "12 MB", within(12, 1), RTX4070.l2_bytes / KIB**2, "MiB", "", ""
    for stated in (750, 576):
        yield (F0, "memory bandwidth, RTX 4070", f"{stated} GB/s", within(stated, 1),
               RTX4070.bandwidth / 1e9, "GB/s", "",
               "vendor's figure; the document has both")  # fmt: skip
    yield (F0, "memory bandwidth by cycles", "192 GB/s per 100 cycles", within(192), None, "", "",
           "not a unit of anything")  # fmt: skip
    for device in (RTX4070, MI300X):
        yield (F0, f"SRAM's bandwidth over that of memory, {device.name}", "10–100×", (10, 100),
               device.shared_bandwidth / device.bandwidth, "×", "vendor's clock", "")  # fmt: skip
    yield (F0, "SRAM bandwidth, RTX 4070", "5 TB/s", within(5, 1), RTX4070.shared_bandwidth / 1e12,
           "TB/s", "", "46 SMs × 128 B × 2.475 GHz")  # fmt: skip
    double = requested(64, 2 * N) / requested(64)
    yield (F0, "accesses from O(N²d) to O(Nd): growth at twice N", "2×", within(2, 0.1), double,
           "×", "",
           "what tiles request grows as N²·d/M (Dao et al. 2022, theorem 2): linear are only "
           "compulsory bytes, and memory")  # fmt: skip
    wide = standard_bytes(HEAD._replace(head_dim=256, head_dim_v=256)) / standard_bytes(HEAD)
    yield (F0, "O(N²d) without tiling: growth at twice d", "2×", within(2, 0.1), wide, "×", "",
           "standard attention moves Θ(Nd + N²)")  # fmt: skip
    yield (F0, "M = 96_000 / (3·128·4)", "62 rows", within(62), sram.rows_of_three_tiles(96_000, D),
           "rows", "a tile each of Q, K, V alone, float32; the document itself keeps S and O too",
           "")  # fmt: skip
    yield (F0, "the same with S and O counted", "62 rows", within(62),
           sram.rows_with_scores(96_000, D), "rows", "tiles of Q, K, V, O and S in SRAM, float32",
           "at 96,000 B; 30 in MI300X's 64 KiB")  # fmt: skip
    yield (F0, "memory, MI300X", "192 GB", within(192), MI300X.memory_bytes / KIB**3, "GiB", "", "")
    yield (F0, "memory bandwidth, MI300X", "5.2 TB/s", within(5.2, 0.05), MI300X.bandwidth / 1e12,
           "TB/s", "", "data sheet: 5.3")  # fmt: skip
    yield (F0, "SRAM bandwidth, MI300X", "100+ TB/s", least(100), MI300X.shared_bandwidth / 1e12,
           "TB/s", "", "LDS: 304 CUs × 128 B × 2.1 GHz")  # fmt: skip
    for length, bound in ((384, 4), (1152, 10)):
        yield (F0, f"HBM pressure saved, at N = {length}", "4–10×", (4, 10), reduction(length), "×",
               f"{ONCE}; N from 384 to 1152: N/d + 1 = {bound} here", "")  # fmt: skip
    yield (F0, "HBM pressure saved, at N = 4096", "4–10×", (4, 10), reduction(N), "×", "d = 128",
           "“a 4B token model” says nothing of N and d")  # fmt: skip
    yield (F0, "L3 of a chiplet, MI300X", "64 MB", within(64), MI300X.cache_bytes / KIB**2 / 4,
           "MiB", "a chiplet is one of four IO dies; all 256 MiB serve all eight XCDs",
           "")  # fmt: skip


def _document_1() -> Iterator[Row]:
    layer = HEAD._replace(heads_q=32, heads_k=32)
    yield (F1, "score matrix at N = 4096", "1.0 GB", within(1.0, 0.05), 32 * _SCORES / KIB**3,
           "GiB", "32 heads, GiB: one head is 33.6 MB", "")  # fmt: skip
    yield (F1, "HBM I/O of standard attention", "over 4 GB", least(4), standard_bytes(layer) / 1e9,
           "GB", "32 heads, fp16, d = 128, V once", "")  # fmt: skip
    tiles = (4 * 128 * 128 * SIZE + 2 * 128 * 4) / KIB
    yield (F1, "tiles in SRAM", "~129 KB", within(129, 0.5), tiles, "KiB",
           "Q, K, V and O tiles of 128 × 128 in fp16, m and l in fp32; S in registers",
           "")  # fmt: skip
    for length, stated in ((N, 33), (4 * N, 129)):
        yield (F1, f"less HBM traffic at N = {length}", f"{stated}×", within(stated, 0.5),
               reduction(length), "×", f"{ONCE}, V once: N/d + 1", "")  # fmt: skip
    yield (F1, "less HBM traffic at N = 4096, d = 64", "33×", within(33, 0.5), reduction(N, 64),
           "×", "d = 64", "the figure is one of d = 128")  # fmt: skip
    yield (F1, "less memory at N = 4096", "~9×", within(9, 0.5), footprint.ratio_with_scores(N, D),
           "×", f"{PER_HEAD}; one score matrix beside Q, K, V, O: 1 + N/4d", "")  # fmt: skip
    both = footprint.standard_bytes(HEAD) / footprint.tiled_bytes(HEAD)
    yield (F1, "less memory, S and P alive as in eager PyTorch", "~9×", within(9, 0.5), both, "×",
           "S and P both alive", "a forward alone; the LSE counted")  # fmt: skip
    tiled = attention_flops(HEAD)
    ratio = sum(one.flops for one in standard_forward(HEAD)) / tiled
    yield (F1, "FLOPs as before, forward", "1×", within(1), ratio, "×", "matrix products, no mask",
           "")  # fmt: skip
    back = attention_flops(HEAD, True) / sum(one.flops for one in standard_backward(HEAD))
    yield (F1, "FLOPs as before, backward", "1×", within(1, 0.05), back, "×",
           "matrix products, S made again",
           "S is computed again: five products for four")  # fmt: skip


def _document_2_bytes() -> Iterator[Row]:
    first, softmax, last = (
        {w.tensor: w.once / 1e6 for w in (*one.reads, *one.writes)}
        for one in standard_forward(HEAD)
    )
    qkv = first["q"] + first["k"] + last["v"]
    yield F2, "Q, K, V load", "3.14 MB", within(3.14, 0.01), qkv, "MB", "", PER_HEAD
    yield F2, "S store", "33.5 MB", within(33.5, 0.1), first["s"], "MB", "", PER_HEAD
    yield F2, "S load for softmax", "33.5 MB", within(33.5, 0.1), softmax["s"], "MB", "", PER_HEAD
    yield F2, "P store", "33.5 MB", within(33.5, 0.1), softmax["p"], "MB", "", PER_HEAD
    yield (F2, "P load, V load", "34.0 MB", within(34.0, 0.1), last["p"] + last["v"], "MB", "",
           f"{PER_HEAD}; V is loaded here for the second time")  # fmt: skip
    yield F2, "O store", "1.05 MB", within(1.05, 0.01), last["out"], "MB", "", PER_HEAD
    yield (F2, "standard attention, a head", "~139 MB", within(139, 0.5),
           standard_bytes(HEAD, True) / 1e6, "MB", f"{PER_HEAD}, V counted twice", "")  # fmt: skip
    yield (F2, "standard attention, a head, V once", "~139 MB", within(139, 0.5),
           standard_bytes(HEAD) / 1e6, "MB", "V counted once",
           "the printed lines sum to 138.7")  # fmt: skip
    yield (F2, "standard attention, 32 heads", "4.4 GB", within(4.4, 0.05),
           32 * standard_bytes(HEAD) / 1e9, "GB", f"{PER_HEAD}, V once (4.46 with it twice)",
           "")  # fmt: skip
    yield (F2, "FlashAttention, a head", "~4.2 MB", within(4.2, 0.05), tiled_bytes(HEAD) / 1e6,
           "MB", ONCE, "tiles request 36 MB at 256 rows, 69 at 128, 136 at 64")  # fmt: skip
    yield (F2, "FlashAttention, a head, as tiles of 128 rows request", "~4.2 MB", within(4.2, 0.05),
           requested(128) / 1e6, "MB", "no cache: what tiles of 128 rows request",
           "what caches save is not in the document")  # fmt: skip
    yield (F2, "FlashAttention, 32 heads", "134 MB", within(134, 0.5), 32 * tiled_bytes(HEAD) / 1e6,
           "MB", ONCE, "")  # fmt: skip
    yield F2, "reduction", "33×", within(33, 0.5), reduction(N), "×", f"{ONCE}, V once", ""
    yield (F2, "ncu: HBM read", "~134 MB", within(134, 0.5), 32 * 3 * _MATRIX / 1e6, "MB", "",
           "Q, K, V of 32 heads; 134 is reads and writes together")  # fmt: skip
    yield F2, "ncu: HBM write", "~33 MB", within(33, 1), 32 * _MATRIX / 1e6, "MB", ONCE, ""
    yield from _document_2_counted()


def _document_2_counted() -> Iterator[Row]:
    where = "H200, bf16, pyfa, 32 heads of 128, Nsight Compute"
    more = "also what the flush before the call had left in L2, probably"
    for name, causal in (("no mask", False), ("causal", True)):
        row = counted("pyfa", causal)
        yield (F2, f"ncu: HBM read, measured, {name}", "~134 MB", within(134, 0.5),
               row["dram_read_bytes"] / 1e6, "MB", where, "")  # fmt: skip
        yield (F2, f"ncu: HBM write, measured, {name}", "~33 MB", within(33, 1),
               row["dram_write_bytes"] / 1e6, "MB", where, more)  # fmt: skip
        yield (F2, f"FlashAttention, 32 heads, measured, {name}", "134 MB", within(134, 0.5),
               row["dram_bytes"] / 1e6, "MB", where, "")  # fmt: skip
    naive = counted("naive")
    moved = 32 / naive["heads"] * naive["dram_bytes"]
    eager = f"H200, bf16, eager PyTorch, {naive['heads']} heads counted"
    yield (F2, "standard attention, 32 heads, measured", "4.4 GB", within(4.4, 0.05), moved / 1e9,
           "GB", eager, "the scale is a kernel of its own there")  # fmt: skip
    yield (F2, "reduction, measured, no mask", "33×", within(33, 0.5),
           moved / counted("pyfa")["dram_bytes"], "×", f"{where}; {eager}",
           "both move half as much again as stated")  # fmt: skip


def _document_2_device() -> Iterator[Row]:
    arch = ARCHS["sm_80"]
    limit = arch.shared_bytes_per_block
    yield (F2, "registers of an SM, A100", "256 KB", within(256), arch.register_bytes / KIB, "KiB",
           "", "the document calls them L0")  # fmt: skip
    yield (F2, "L1 of an SM, A100", "192 KB", within(192), 192, "KiB", "",
           "with shared memory: 164 KiB of it, 163 for one block (white paper)")  # fmt: skip
    yield F2, "L2, A100", "40 MB", within(40), A100.l2_bytes / KIB**2, "MiB", "", ""
    yield F2, "memory, A100", "80 GB", within(80), A100.memory_bytes / KIB**3, "GiB", "", ""
    yield (F2, "SRAM's bandwidth over HBM's, A100", "10×", within(10, 0.5),
           A100.shared_bandwidth / A100.bandwidth, "×", "shared memory alone, the 80 GB card",
           "")  # fmt: skip
    yield (F2, "a tile of 128 × 128 in fp16", "32 KB", within(32), 128 * 128 * SIZE / KIB, "KiB",
           "", "")  # fmt: skip
    yield (F2, "five tiles", "160 KB", within(160), five_tiles(SIZE) / KIB, "KiB",
           "S and O in fp16", "with S and O in fp32, as FlashAttention has them, 224")  # fmt: skip
    yield (F2, "“fits in 192KB shared memory”: of what a block may have", "≤ 100 %", (0, 100),
           five_tiles(SIZE) / limit * 100, "%", "S and O in fp16; the limit of a block is 163 KiB",
           "")  # fmt: skip
    yield (F2, "the same with S and O in fp32", "≤ 100 %", (0, 100), five_tiles(4) / limit * 100,
           "%", "S and O in fp32", "")  # fmt: skip
    yield (F2, "the same on MI300X", "≤ 100 %", (0, 100),
           five_tiles(SIZE) / ARCHS["gfx942"].shared_bytes_per_block * 100, "%",
           "the 64 KiB of MI300X", "")  # fmt: skip
    yield (F2, "shared memory used by Br = Bc = 128", "~85 %", within(85, 2.5),
           five_tiles(SIZE) / limit * 100, "%", "",
           "83 % of 192 KB, which no block can have")  # fmt: skip
    for warps in (4, 8):
        share = sram.occupancy(arch, five_tiles(SIZE), 32 * warps).share
        yield (F2, f"SM occupancy with these tiles, {warps} warps", "75–85 %", (75, 85),
               share * 100, "%", "", "one block an SM, of 64 warps that it could hold")  # fmt: skip


def _document_2_speed() -> Iterator[Row]:
    flops, peak = attention_flops(HEAD), A100.matrix_flops("float16")
    standard, tiled = flops / standard_bytes(HEAD, True), flops / tiled_bytes(HEAD)
    yield (F2, "intensity, standard", "2.8 FLOP/byte", within(2.8, 0.1), standard, "FLOP/byte", "",
           "by the document's own bytes")  # fmt: skip
    yield (F2, "intensity, FlashAttention", "89 FLOP/byte", within(89, 1), tiled, "FLOP/byte", "",
           f"compulsory; requested: {flops / requested(64):.0f} at 64 rows, "
           f"{flops / requested(128):.0f} at 128, {flops / requested(256):.0f} at 256")  # fmt: skip
    yield (F2, "intensity, FlashAttention-2", "102 FLOP/byte", within(102, 1), tiled, "FLOP/byte",
           "", "the same bytes")  # fmt: skip
    yield (F2, "FlashAttention is compute-bound at 89 FLOP/byte: A100's ridge", "≤ 89", (0, 89),
           peak / A100.bandwidth, "FLOP/byte", "",
           "201 with 1.555 TB/s: 89 would be memory-bound")  # fmt: skip
    yield (F2, "intensity grows", "30×", within(30, 5), tiled / standard, "×", ONCE, "")
    for name, stated in (("standard", 1.2), ("FlashAttention", 124), ("FlashAttention-2", 156)):
        yield F2, f"achieved, {name}", f"{stated} TFLOP/s", within(stated), None, "", "", NO_CLOCK
    yield (F2, "2.8 FLOP/byte at 1.2 TFLOP/s: of what memory allows", "~100 %", (50, 100),
           1.2e12 / (2.8 * A100.bandwidth) * 100, "%", "",
           "memory-bound at 21 % of the bandwidth: the two do not go together")  # fmt: skip
    yield F2, "peak, A100", "312 TFLOP/s", within(312, 0.5), peak / 1e12, "TFLOP/s", "", ""
    yield F2, "150 TFLOP/s of the peak", "48 %", within(48, 0.5), 150e12 / peak * 100, "%", "", ""
    yield F2, "achieved", "150+ TFLOP/s", least(150), None, "", "", NO_CLOCK
    small = "H200, one sequence, causal, D = 128, plain eager products against pyfa, graph replay"
    for length, stated in ((128, "N < 256: tiling overhead dominates"),
                           (512, "N < 512: matrix products often win")):  # fmt: skip
        ratio = min(small_grids(length))
        yield F2, f"{stated}: pyfa's speed over naive's", "< 1×", (0, 1), ratio, "×", "", small
    units = DEVICES["H200"].units
    kernel = TiledKernel("forward", Tiling(128, 64), (D, D), 256)
    groups = tiled_passes(HEAD._replace(seqlen_q=512, seqlen_k=512, heads_q=8, heads_k=8), [kernel])
    yield (F2, "small batches cannot fill the SMs: blocks for 132 SMs", "< 132", (0, units - 1),
           groups[0].workgroups, "blocks", "H200, one sequence, 8 heads, N = 512, 128 rows a block",
           "splitting the keys is the answer")  # fmt: skip


def _documents_3_and_4() -> Iterator[Row]:
    yield (F3, "SRAM of an SM, A100", "192 KB", within(192), 192, "KiB", "",
           "with L1; 164 KiB of it shared")  # fmt: skip
    yield (F3, "memory, A100", "40–80 GB", (40, 80), A100.memory_bytes / KIB**3, "GiB", "", "")
    yield (F3, "SRAM bandwidth, A100", "19 TB/s", within(19, 0.5), A100.shared_bandwidth / 1e12,
           "TB/s", "108 SMs × 128 B × 1.41 GHz", "")  # fmt: skip
    yield (F3, "memory bandwidth, A100", "1.5–2.0 TB/s", (1.5, 2.05), A100.bandwidth / 1e12, "TB/s",
           "", "1.555 with 40 GB")  # fmt: skip
    h200 = DEVICES["H200"]
    yield (F3, "FP8 over 16 bits: peak of Hopper's matrix units", "nearly 2×", (1.7, 2),
           h200.matrix_flops("float8_e4m3fn") / h200.matrix_flops("bfloat16"), "×",
           "the vendor's peaks", "what attention reaches is not measured here")  # fmt: skip
    where = "H200, bf16, pyfa against eager PyTorch, one sequence, 16 heads of 128, no mask"
    for name, kind in (("inference (forward)", "forward"),
                       ("training (forward and backward)", "training")):  # fmt: skip
        ratios = by_length(kind)
        # Below, the time of naive training is the host's.
        for length in (2048, N, 4 * N):
            yield (F4, f"faster, {name}, N = {length}", "2–4×", (2, 4), ratios[length], "×", where,
                   f"{min(ratios.values()):.2f} to {max(ratios.values()):.2f} from N = "
                   f"{min(ratios)} to {max(ratios)}")  # fmt: skip
    yield (F4, "up to, for attention itself", "9×", within(9, 1),
           max(by_length("forward").values()), "×", f"{where}; forward", "")  # fmt: skip
    masked = small_grids(2 * N)
    yield (F4, "faster, inference (forward), causal", "2–4×", (2, 4),
           statistics.geometric_mean(masked), "×",
           "H200, bf16, one sequence, causal, N = 128 to 8192, graph replay, geometric mean",
           f"{min(masked):.2f} to {max(masked):.2f}: eager attention computes what the mask hides, "
           "and masks in a kernel of its own")  # fmt: skip
    yield (F4, "up to, causal too", "9×", within(9, 1), max(masked), "×", "causal",
           "more than stated")  # fmt: skip
    double = footprint.tiled_bytes(HEAD._replace(seqlen_q=2 * N, seqlen_k=2 * N))
    yield (F4, "memory linear in N: growth at twice N", "2×", within(2),
           double / footprint.tiled_bytes(HEAD), "×", "",
           "with the LSE; tests/gpu measures it")  # fmt: skip
    long = Shape(1, 262_144, 262_144, 32, 32, D, D)
    room = h200.memory_bytes
    yield (F4, "256k tokens on one GPU: memory of a training step", "fits", (0, 100),
           footprint.tiled_bytes(long, training=True, sums=True) / room * 100, "% of an H200",
           "32 heads of 128, bf16, one layer's attention, dQ added up in float32", "")  # fmt: skip
    sizes = tensor_bytes(long)
    given = sum(sizes[name] for name in ("q", "k", "v", "dout"))
    (ran,) = measured("long_context", "lengths")
    yield (F4, "the same, measured", "fits", (0, 100), (given + ran["extra_bytes"]) / room * 100,
           "% of an H200", "the same, causal", "benchmarks/long_context.py")  # fmt: skip
    yield (F4, "the same, standard attention", "does not fit", least(100),
           footprint.standard_bytes(long, training=True) / room * 100, "% of an H200", "",
           "")  # fmt: skip
    worst = max(
        bench.load(RESULTS / f"conformance_{name}.json")["worst"][0][0]
        for name in ("emulator_cpu", "cuda_sm_90a", "triton_sm_90a")
    )
    yield (F4, "exact: the largest error over what the rule allows", "≤ 1", (0, 1), worst, "",
           "up to rounding: naive attention's own error is the yardstick",
           "three backends' suites")  # fmt: skip
