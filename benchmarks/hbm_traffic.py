"""Count DRAM and L2 traffic with Nsight Compute, compared with the bytes by formula.

    python benchmarks/hbm_traffic.py [--save] [--quick] [--seconds 600]

Runs itself under ncu, one problem after the other: a forward or a backward of pyfa, or of standard
attention, after a buffer of 512 MB has been overwritten; none is begun when ``--seconds`` are over.
Needs an NVIDIA GPU, ncu, and the right to read the GPU's counters. Exit status 1 where compulsory
bytes and DRAM bytes of a long forward are more than 10 % apart, or a problem was not run.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import machine
import ncu
import torch

import pyfa
from pyfa import cli
from pyfa.cli import problem
from pyfa.cli.console import print_table
from pyfa.cli.measure import naive

HOW = (
    "Nsight Compute, one call of each after a warm-up and a flush of 512 MB, caches not flushed "
    "between kernels, clocks as they are. DRAM: dram__bytes.sum. L2: 32 B times "
    "lts__t_sectors_srcunit_tex.sum. Compulsory, estimated and requested bytes by pyfa.traffic."
)
FLUSHED = 512 << 20
AGREE, LONG = 0.10, 16384
# A kernel of PyTorch's that attention does not run: in ncu's table it stands before each problem's.
MARK = "spin_kernel"
_RAN, _FAILED = "ran ", "failed "


@dataclass(frozen=True)
class Case:
    """``side``: pyfa or naive; ``passes``: forward or backward."""

    side: str
    passes: str
    seqlen: int
    heads: int
    head_dim: int
    causal: bool

    @property
    def title(self) -> str:
        mask = "causal" if self.causal else "full"
        return f"{self.side} {self.passes} N={self.seqlen} H={self.heads} D={self.head_dim} {mask}"


def cases(quick: bool) -> list[Case]:
    lengths = (4096,) if quick else (4096, 16384, 65536)
    found = [
        Case("pyfa", passes, length, 32, 128, causal)
        for passes in ("forward", "backward")
        for causal in (False, True)
        for length in lengths
    ]
    # The scores of 32 heads at 16,384 are 17 GB, of which backward holds three.
    found += [
        Case("naive", passes, length, 8, 128, False)
        for passes in ("forward", "backward")
        for length in lengths
        if length <= 16384
    ]
    return found


def model(case: Case, device: str) -> dict[str, Any]:
    """What the formulas say of it on a named device: no more than the compulsory bytes, and why,
    where the backend that is measured does not tell its tiles."""
    arguments = [
        "plan", "--seqlen", str(case.seqlen), "--heads", str(case.heads), "--head-dim",
        str(case.head_dim), "--dtype", "bf16", "--device", device, "--features", "backward",
    ]  # fmt: skip
    _, found, why = problem.modeled(
        cli.parser().parse_args(arguments + (["--causal"] if case.causal else []))
    )
    way = "standard" if case.side == "naive" else "tiled"
    cost = found.costs.get((way, case.passes))
    told: dict[str, Any] = {"compulsory_bytes": found.compulsory[case.passes]}
    if cost is None:
        return told | {"not_told": why}
    return told | {"estimated_bytes": cost.dram, "requested_bytes": cost.requested}


def run(case: Case, device: str = "cuda") -> None:
    """One problem, in a profiled range of its own: everything before is outside of it."""
    shape = (1, case.seqlen, case.heads, case.head_dim)
    q, k, v, dout = (torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(4))
    leaves = (q.requires_grad_(), k.requires_grad_(), v.requires_grad_())

    def forward() -> torch.Tensor:
        if case.side == "naive":
            return naive(*leaves, causal=case.causal)
        out = pyfa.attention(*leaves, causal=case.causal)
        assert isinstance(out, torch.Tensor)
        return out

    torch.autograd.grad(forward(), leaves, dout)
    out = forward() if case.passes == "backward" else None
    if device == "cuda":
        torch.empty(FLUSHED, dtype=torch.uint8, device=device).zero_()
        torch.cuda.synchronize()
        torch.cuda.cudart().cudaProfilerStart()
    if out is None:
        forward()
    else:
        torch.autograd.grad(out, leaves, dout)
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.cudart().cudaProfilerStop()


def run_all(found: Sequence[Case], until: float) -> None:
    """What ncu watches: problem after problem, each behind the mark; says which ones ran."""
    for number, case in enumerate(found):
        if time.monotonic() > until:
            return
        torch.cuda.cudart().cudaProfilerStart()
        torch.cuda._sleep(1)
        torch.cuda.synchronize()
        torch.cuda.cudart().cudaProfilerStop()
        try:
            run(case)
            print(f"{_RAN}{number}", flush=True)
        except Exception as error:
            print(f"{_FAILED}{number} {type(error).__name__}: {error}".splitlines()[0], flush=True)
        torch.cuda.empty_cache()


def by_problem(kernels: Sequence[dict[str, object]]) -> list[list[dict[str, object]]]:
    """The kernels between two marks."""
    groups: list[list[dict[str, object]]] = []
    for kernel in kernels:
        if MARK in str(kernel["kernel"]):
            groups.append([])
        else:
            groups[-1].append(kernel)
    return groups


def measured(count: int, arguments: Sequence[str], seconds: float) -> list[dict[str, Any]]:
    """What ncu says of each of the ``count`` problems, or why it says nothing."""
    until = time.monotonic() + seconds
    program = [sys.executable, __file__, *arguments, "--until", str(until)]
    ended = subprocess.run(ncu.command(program), capture_output=True, text=True, check=False)
    lines = ended.stdout.splitlines()
    ran = {int(line.removeprefix(_RAN)) for line in lines if line.startswith(_RAN)}
    why = dict(
        line.removeprefix(_FAILED).split(" ", 1) for line in lines if line.startswith(_FAILED)
    )
    try:
        groups = by_problem(ncu.parse(ended.stdout))
    except ValueError as error:
        said = f"{error} {ended.stderr.strip()[-300:]}".strip()
        return [{"why_not": said}] * count
    return [
        {**ncu.totals(groups[number]), "kernels": groups[number]}
        if number in ran
        else {"why_not": why.get(str(number), f"not run: {seconds:.0f} s were over")}
        for number in range(count)
    ]


def apart(row: dict[str, Any]) -> bool:
    """Whether a forward of pyfa over many long rows moved more or less than it had to."""
    if row["side"] != "pyfa" or row["passes"] != "forward" or row["seqlen"] < LONG:
        return False
    return abs(row.get("dram_bytes", 0.0) / row["compulsory_bytes"] - 1.0) > AGREE


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--save", action="store_true", help="write results/hbm_traffic.json")
    parser.add_argument("--quick", action="store_true", help="N = 4096 alone")
    parser.add_argument("--device", default="H200", help="its name, for the formulas")
    parser.add_argument("--seconds", type=float, default=600.0, help="then no problem is begun")
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    found = cases(options.quick)
    if options.until:
        run_all(found, options.until)
        return 0
    missing = ncu.why_unavailable() or (None if torch.cuda.is_available() else "there is no GPU")
    if missing:
        print(f"hbm_traffic: {missing}", file=sys.stderr)
        return 2
    arguments = ["--quick"] if options.quick else []
    counted = measured(len(found), arguments, options.seconds)
    rows = [
        {"title": case.title, **asdict(case), **model(case, options.device), **counts}
        for case, counts in zip(found, counted, strict=True)
    ]
    for row in rows:
        if "why_not" in row:
            print(f"{row['title']}: {row['why_not']}", file=sys.stderr)
    names = ("compulsory_bytes", "estimated_bytes", "dram_bytes", "requested_bytes", "l2_bytes")
    print_table(
        ["MB", *(name.removesuffix("_bytes") for name in names)],
        [
            [row["title"], *(f"{row[n] / 1e6:.1f}" if n in row else "–" for n in names)]
            for row in rows
        ],
    )
    if options.save:
        print(machine.save("hbm_traffic", {"how": HOW, "traffic": rows}))
    return 1 if any("why_not" in row or apart(row) for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
