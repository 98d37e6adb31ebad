"""Time context parallelism on several GPUs, compared with one GPU and other libraries.

    python benchmarks/context_parallel.py [--gpus 4] [--seconds 600] [--save]

Times of forward and backward over 131,072 tokens, causal, bfloat16, on one GPU and on all; the same
of PyTorch's experimental context parallel and of ring-flash-attn where they run; time and peak
memory of 1,048,576 tokens, and of PyTorch's fastest. Starts a process for each GPU. Ours come
first, and all that is there is saved after each part; none is begun when ``--seconds`` are over.
Exit status 1 where a result is wrong.
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import machine
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.attention import SDPBackend, sdpa_kernel

import pyfa
from pyfa.distributed import ring_attention, shard, ulysses_attention, unshard
from pyfa.traffic import Shape, attention_flops

HOW = (
    "Median of --times calls after two warm-ups. A call begins behind a barrier and ends when the "
    "last rank's device is done. 'of one GPU': FLOPS of all GPUs over their number times the FLOPS "
    "of pyfa.attention of the same whole sequence on one. NVLink multicast is off. Memory: the "
    "allocator's peak over q, k, v, out, their gradients, and two blocks of k and v, of one call. "
    "PyTorch's context parallel gets keys and values repeated to as many heads as q has."
)
# What the rounding of bfloat16 leaves of the same rows computed in other blocks, as a share of the
# largest value: 2⁻⁸ twice.
MOST_ERROR = 2.0**-7
# (forward, backward) shares of one GPU's throughput, and of the least memory.
BARS, MEMORY_BAR = (0.90, 0.85), 1.5
HEADS_K_OF = 4  # query heads of a key head
OURS = ("ring", "ulysses", "both")
TORCH = {
    "torch context parallel, flash": SDPBackend.FLASH_ATTENTION,
    "torch context parallel, cudnn": SDPBackend.CUDNN_ATTENTION,
}

Step = Callable[[], tuple[torch.Tensor, Callable[[], None]]]


class Bench:
    """A rank's tensors and what it measures."""

    def __init__(self, options: argparse.Namespace, rank: int) -> None:
        self.options = options
        self.rank = rank
        self.on_gpu = options.device == "cuda"
        self.device = torch.device("cuda", rank) if self.on_gpu else torch.device("cpu")
        self.size = options.gpus
        self.begin = time.monotonic()

    def time_is_over(self) -> bool:
        """By the first rank's clock: all do the same."""
        over = time.monotonic() - self.begin > self.options.seconds
        said = torch.tensor(float(over), device=self.device)
        dist.broadcast(said, 0)
        return bool(said)

    def say(self, what: str) -> None:
        if self.rank == 0:
            print(f"{time.monotonic() - self.begin:4.0f} s {what}", flush=True)

    def tensors(self, rows: int, seed: int) -> list[torch.Tensor]:
        """q, k, v and dout of ``rows`` rows."""
        torch.manual_seed(seed)
        heads = self.options.heads
        counts = (heads, heads // HEADS_K_OF, heads // HEADS_K_OF, heads)
        shapes = [(1, rows, n, self.options.head_dim) for n in counts]
        return [torch.randn(s, device=self.device, dtype=torch.bfloat16) for s in shapes]

    def wait(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize()

    def timed(self, step: Step, alone: bool = False) -> tuple[float, float]:
        """Seconds of forward and backward, the slowest rank's; ``alone``: this rank's."""
        seconds: list[tuple[float, float]] = []
        for _ in range(2 + self.options.times):
            marks = []
            out, backward = None, None
            for part in ("forward", "backward"):
                self.wait()
                if not alone:
                    dist.barrier()
                    self.wait()
                marks.append(time.perf_counter())
                if part == "forward":
                    out, backward = step()
                else:
                    assert backward is not None
                    backward()
                self.wait()
                marks.append(time.perf_counter())
            del out, backward
            row = torch.tensor([marks[1] - marks[0], marks[3] - marks[2]], device=self.device)
            if not alone:
                dist.all_reduce(row, dist.ReduceOp.MAX)
            seconds.append((float(row[0]), float(row[1])))
        measured = seconds[2:]
        return (
            statistics.median(each[0] for each in measured),
            statistics.median(each[1] for each in measured),
        )


def by(function: Callable[..., Any], leaves: list[torch.Tensor], dout: torch.Tensor) -> Step:
    """Forward by ``function`` and its backward."""

    def step() -> tuple[torch.Tensor, Callable[[], None]]:
        out = function(*leaves)
        return out, lambda: torch.autograd.grad(out, leaves, dout) and None

    return step


def ways(bench: Bench) -> dict[str, Callable[[list[torch.Tensor]], Step]]:
    """How this rank computes its part of whole tensors, by name."""
    mesh = DeviceMesh(bench.options.device, list(range(bench.size)))

    def ring(x: list[torch.Tensor]) -> Step:
        *leaves, dout = (shard(one, mesh=mesh).requires_grad_() for one in x)
        return by(lambda *qkv: ring_attention(*qkv, mesh=mesh, causal=True), leaves, dout.detach())

    def ulysses(x: list[torch.Tensor]) -> Step:
        parts = (shard(one, mesh=mesh, sharding="contiguous").requires_grad_() for one in x)
        *leaves, dout = parts
        return by(
            lambda *qkv: ulysses_attention(*qkv, mesh=mesh, causal=True), leaves, dout.detach()
        )

    def both(x: list[torch.Tensor]) -> Step:
        two = DeviceMesh(bench.options.device, torch.arange(bench.size).reshape(2, -1))
        *leaves, dout = (shard(one, mesh=two).requires_grad_() for one in x)
        return by(lambda *qkv: ring_attention(*qkv, mesh=two, causal=True), leaves, dout.detach())

    def torch_own(backend: SDPBackend, x: list[torch.Tensor]) -> Step:
        *leaves, dout = (_with_all_heads(one, bench.options.heads) for one in x)
        leaves = [shard(one, mesh=mesh, dim=2).requires_grad_() for one in leaves]
        return _torch_step(mesh, backend, leaves, shard(dout, mesh=mesh, dim=2))

    def ring_flash(x: list[torch.Tensor]) -> Step:
        from ring_flash_attn import zigzag_ring_flash_attn_func

        *leaves, dout = (shard(one, mesh=mesh).requires_grad_() for one in x)
        return by(
            lambda *qkv: zigzag_ring_flash_attn_func(*qkv, causal=True), leaves, dout.detach()
        )

    found = {"ring": ring, "ulysses": ulysses}
    if bench.size >= 4 and bench.size % 2 == 0:
        found["both"] = both
    peers = {name: functools.partial(torch_own, backend) for name, backend in TORCH.items()}
    return found | peers | {"ring-flash-attn": ring_flash}


def _torch_step(
    mesh: DeviceMesh, backend: SDPBackend, leaves: list[torch.Tensor], dout: torch.Tensor
) -> Step:
    """PyTorch's own, on this rank's (B, H, S, D)."""

    def step() -> tuple[torch.Tensor, Callable[[], None]]:
        with _torch_context_parallel(mesh, backend):
            out = F.scaled_dot_product_attention(*leaves, is_causal=True)

        def backward() -> None:
            with _torch_context_parallel(mesh, backend):
                torch.autograd.grad(out, leaves, dout)

        return out, backward

    return step


def _with_all_heads(x: torch.Tensor, heads: int) -> torch.Tensor:
    """(B, H, S, D), heads repeated."""
    return x.repeat_interleave(heads // x.shape[2], 2).transpose(1, 2).contiguous()


@contextmanager
def _torch_context_parallel(mesh: DeviceMesh, backend: SDPBackend) -> Iterator[None]:
    """Inside, F.scaled_dot_product_attention is PyTorch's ring attention on zigzag's parts."""
    from torch.distributed.tensor.experimental import context_parallel

    # Which has to cut something; the tensors are cut already.
    buffer = torch.zeros(2 * mesh.size(), device=mesh.device_type)
    with (
        sdpa_kernel(backend),
        context_parallel(mesh, buffers=[buffer], buffer_seq_dims=[0], no_restore_buffers={buffer}),
    ):
        yield


class Speeds:
    """One problem of ``--seqlen`` tokens, whole on every rank, by one way after the other."""

    def __init__(self, bench: Bench) -> None:
        options = bench.options
        self.bench = bench
        self.x = bench.tensors(options.seqlen, seed=0)
        shape = Shape(1, options.seqlen, options.seqlen, options.heads, options.heads // HEADS_K_OF,
                      options.head_dim, options.head_dim, window_right=0)  # fmt: skip
        self.flops = attention_flops(shape), attention_flops(shape, backward=True)
        with torch.no_grad():
            expected = pyfa.attention(*self.x[:3], causal=True)
        assert isinstance(expected, torch.Tensor)
        self.expected = expected
        self.alone = self.one_gpu()

    def one_gpu(self) -> dict[str, Any]:
        """The row of the first rank's GPU alone, on every rank."""
        leaves = [one.detach().requires_grad_() for one in self.x[:3]]
        alone = by(lambda *qkv: pyfa.attention(*qkv, causal=True), leaves, self.x[3])
        seconds = torch.zeros(2, device=self.bench.device)
        if self.bench.rank == 0:
            seconds += torch.tensor(self.bench.timed(alone, alone=True), device=seconds.device)
        dist.broadcast(seconds, 0)
        forward, backward = seconds.tolist()
        return _row("one GPU", 1, (forward, backward), self.flops)

    def row(self, name: str, way: Callable[[list[torch.Tensor]], Step]) -> dict[str, Any]:
        """Seconds, FLOPS, share of one GPU's, and of ours the error of out."""
        bench = self.bench
        try:
            step = way(self.x)
            out = step()[0].detach()
            row = _row(name, bench.size, bench.timed(step), self.flops)
        except Exception as error:
            # A peer that is not installed, or does not take this problem: on all ranks alike.
            return {"side": name, "why_not": f"{type(error).__name__}: {error}"}
        row["of_one_gpu"] = {
            part: row[f"{part}_tflops"] / bench.size / self.alone[f"{part}_tflops"]
            for part in ("forward", "backward")
        }
        if name in ("ring", "ulysses"):
            sharding = "zigzag" if name == "ring" else "contiguous"
            whole = unshard(out, seqlen=bench.options.seqlen, sharding=sharding)
            error = (whole - self.expected).abs().max() / self.expected.abs().max()
            row["error"] = float(error)
        return row


def _row(
    name: str, gpus: int, seconds: tuple[float, float], flops: tuple[float, float]
) -> dict[str, Any]:
    return {
        "side": name, "gpus": gpus, "forward_seconds": seconds[0], "backward_seconds": seconds[1],
        "forward_tflops": flops[0] / seconds[0] / 1e12,
        "backward_tflops": flops[1] / seconds[1] / 1e12,
    }  # fmt: skip


def long(bench: Bench, name: str) -> dict[str, Any]:
    """One call over the longest sequence, by the ring or by PyTorch's own: time, peak memory, and
    what memory cannot be less than the ring's."""
    before = torch.cuda.memory_allocated() if bench.on_gpu else 0
    rows = bench.options.long // bench.size
    q, k, v, dout = bench.tensors(rows, seed=bench.rank)
    least = 2 * (q.nbytes + k.nbytes + v.nbytes + dout.nbytes) + 2 * (k.nbytes + v.nbytes)
    if name in TORCH:
        *leaves, dout = (_with_all_heads(x, bench.options.heads) for x in (q, k, v, dout))
        del q, k, v
        mesh = DeviceMesh(bench.options.device, list(range(bench.size)))
        step = _torch_step(mesh, TORCH[name], [x.requires_grad_() for x in leaves], dout)
    else:
        leaves = [x.requires_grad_() for x in (q, k, v)]
        step = by(lambda *qkv: ring_attention(*qkv, causal=True), leaves, dout)
    if bench.on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    bench.wait()
    begin = time.perf_counter()
    try:
        out, backward = step()
        bench.wait()
        middle = time.perf_counter()
        backward()
        bench.wait()
    except Exception as error:
        return {"side": name, "why_not": f"{type(error).__name__}: {error}"}
    end = time.perf_counter()
    del out
    peak = torch.cuda.max_memory_allocated() - before if bench.on_gpu else 0
    found = torch.tensor([middle - begin, end - middle, float(peak)], dtype=torch.float64)
    found = found.to(bench.device)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    seconds, seconds_back, most = found.tolist()
    return {
        "side": name, "seqlen": bench.options.long, "gpus": bench.size, "forward_seconds": seconds,
        "backward_seconds": seconds_back, "peak_bytes": int(most), "least_bytes": least,
        "ratio": most / least,
    }  # fmt: skip


def work(rank: int, options: argparse.Namespace, store: str) -> None:
    """One rank; the first prints and saves."""
    os.environ["NCCL_NVLS_ENABLE"] = "0"
    bench = Bench(options, rank)
    if bench.on_gpu:
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl" if bench.on_gpu else "gloo", init_method=f"file://{store}", rank=rank,
        world_size=options.gpus, timeout=timedelta(minutes=2),
    )  # fmt: skip
    speeds = Speeds(bench)
    lengths, longs = [speeds.alone], list[dict[str, Any]]()
    bench.say("one GPU")
    found = ways(bench)
    ours = [name for name in found if name in OURS]
    order = [*ours, "long", *(name for name in found if name not in OURS), "long peer"]
    left = []
    for name in order:
        if bench.time_is_over():
            left.append(name)
            continue
        if name == "long":
            longs.append(long(bench, "ring"))
        elif name == "long peer":
            ran = [row for row in lengths if row["side"] in TORCH and "gpus" in row]
            if ran:
                fastest = min(ran, key=lambda row: row["forward_seconds"])
                longs.append(long(bench, fastest["side"]))
        else:
            lengths.append(speeds.row(name, found[name]))
        if bench.on_gpu:
            torch.cuda.empty_cache()
        bench.say(name)
        if rank == 0:
            save(options, lengths, longs, order[order.index(name) + 1 :])
    if rank == 0:
        report(options, lengths, longs, left)
    dist.destroy_process_group()


def bars(lengths: list[dict[str, Any]], longs: list[dict[str, Any]]) -> dict[str, bool]:
    """What should hold, and whether it does, of what has been measured."""
    found: dict[str, bool] = {}
    for row in longs:
        if row["side"] == "ring" and "ratio" in row:
            found["memory"] = row["ratio"] <= MEMORY_BAR
    sides = {row["side"]: row for row in lengths if "gpus" in row}
    for part, bar in zip(("forward", "backward"), BARS, strict=True):
        if "ring" not in sides:
            continue
        found[f"{part} at least {bar:.0%}"] = sides["ring"]["of_one_gpu"][part] >= bar
        for peer in (*TORCH, "ring-flash-attn"):
            if peer in sides:
                seconds = sides["ring"][f"{part}_seconds"], sides[peer][f"{part}_seconds"]
                found[f"{part} faster than {peer}"] = seconds[0] <= seconds[1]
    return found


def save(
    options: argparse.Namespace,
    lengths: list[dict[str, Any]],
    longs: list[dict[str, Any]],
    left: list[str],
) -> None:
    if options.save:
        title = f"{options.seqlen:,} tokens on {options.gpus} GPUs"
        results = {"title": title, "how": HOW, "speeds": lengths, "long": longs, "not_run": left}
        results["bars"] = bars(lengths, longs)
        machine.save(f"context_parallel_{options.gpus}", results)


def report(
    options: argparse.Namespace,
    lengths: list[dict[str, Any]],
    longs: list[dict[str, Any]],
    left: list[str],
) -> None:
    """Print all rows and bars, save them, and exit with 1 where an output is wrong."""
    for row in (*lengths, *longs):
        if "why_not" in row:
            print(f"{row['side']:30} {row['why_not'].splitlines()[0][:120]}")
        elif "seqlen" in row:
            print(
                f"{row['side']:30} {row['seqlen']:,} tokens: forward {row['forward_seconds']:.2f} "
                f"s, backward {row['backward_seconds']:.2f} s, {row['peak_bytes'] / 1e9:.1f} GB a "
                f"GPU, {row['ratio']:.2f} of the least"
            )
        else:
            share = row.get("of_one_gpu", {"forward": 1.0, "backward": 1.0})
            error = f"error {row['error']:.1e}" if "error" in row else ""
            print(
                f"{row['side']:30} forward {row['forward_seconds'] * 1e3:8.2f} ms "
                f"{row['forward_tflops']:7.1f} TFLOPS {share['forward']:6.1%}   "
                f"backward {row['backward_seconds'] * 1e3:8.2f} ms "
                f"{row['backward_tflops']:7.1f} TFLOPS {share['backward']:6.1%}   {error}"
            )
    for name in left:
        print(f"{name:30} not run: {options.seconds:.0f} s were over")
    for name, held in bars(lengths, longs).items():
        print(f"{'holds' if held else 'MISSED':7} {name}")
    save(options, lengths, longs, left)
    if any(row.get("error", 0.0) > MOST_ERROR for row in lengths):
        raise SystemExit(1)
    for row in (*lengths, *longs):
        if "why_not" in row and row["side"] in OURS:
            raise SystemExit(1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gpus", type=int, default=max(2, torch.cuda.device_count()))
    parser.add_argument("--seqlen", type=int, default=131_072)
    parser.add_argument("--long", type=int, default=1_048_576, help="tokens for memory")
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--times", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=600.0, help="then no part is begun")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--save", action="store_true", help="write results/context_parallel_N.json")
    options = parser.parse_args()
    if options.device == "cuda" and torch.cuda.device_count() < options.gpus:
        parser.error(f"expected {options.gpus} GPUs; PyTorch finds {torch.cuda.device_count()}")
    with tempfile.TemporaryDirectory() as folder:
        context = torch.multiprocessing.get_context("spawn")
        store = str(Path(folder) / "store")
        ranks = [
            context.Process(target=work, args=(rank, options, store))
            for rank in range(options.gpus)
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
    return max(abs(process.exitcode or 0) for process in ranks) and 1


if __name__ == "__main__":
    sys.exit(main())
