"""Bytes that the memory system moved, by Nsight Compute, beside those that the formulas give.

    python benchmarks/hbm_traffic.py [--save] [--quick]

Runs itself under ncu for each problem: a forward or a backward of pyfa, or of standard attention,
after a buffer of 512 MB has been overwritten. Needs an NVIDIA GPU, ncu, and the right to read the
GPU's counters. Exit status 1 where compulsory bytes and DRAM bytes of a long forward are more than
10 % apart.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from dataclasses import asdict, dataclass
from typing import Any

import machine
import ncu
import torch

import pyfa
from pyfa import cli
from pyfa.cli import plan
from pyfa.cli.console import print_table
from pyfa.cli.measure import naive

HOW = (
    "Nsight Compute, one call of each after a warm-up and a flush of 512 MB, caches not flushed "
    "between kernels, clocks as they are. DRAM: dram__bytes.sum. L2: 32 B times "
    "lts__t_sectors_srcunit_tex.sum. Compulsory, estimated and requested bytes by pyfa.traffic."
)
FLUSHED = 512 << 20
AGREE, LONG = 0.10, 16384


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
    _, found, why = plan.modelled(
        cli.parser().parse_args(arguments + (["--causal"] if case.causal else []))
    )
    way = "standard" if case.side == "naive" else "tiled"
    cost = found.costs.get((way, case.passes))
    told: dict[str, Any] = {"compulsory_bytes": found.compulsory[case.passes]}
    if cost is None:
        return told | {"not_told": why}
    return told | {"estimated_bytes": cost.dram, "requested_bytes": cost.requested}


def run(case: Case, device: str = "cuda") -> None:
    """What ncu watches: everything before is outside of the profiled range."""
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


def measured(case: Case) -> dict[str, Any]:
    program = [sys.executable, __file__, "--case", *(str(x) for x in asdict(case).values())]
    ended = subprocess.run(ncu.command(program), capture_output=True, text=True, check=False)
    try:
        kernels = ncu.parse(ended.stdout)
    except ValueError as error:
        return {"why_not": f"{error} {ended.stderr.strip()[-300:]}".strip()}
    return {**ncu.totals(kernels), "kernels": kernels}


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
    parser.add_argument("--case", nargs=6, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        side, passes, seqlen, heads, head_dim, causal = options.case
        run(Case(side, passes, int(seqlen), int(heads), int(head_dim), causal == "True"))
        return 0
    missing = ncu.why_unavailable() or (None if torch.cuda.is_available() else "there is no GPU")
    if missing:
        print(f"hbm_traffic: {missing}", file=sys.stderr)
        return 2
    rows = []
    for case in cases(options.quick):
        row = {"title": case.title, **asdict(case), **model(case, options.device)}
        rows.append(row | measured(case))
        print(f"{case.title}: {rows[-1].get('why_not', 'measured')}", file=sys.stderr)
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
    return 1 if any(map(apart, rows)) else 0


if __name__ == "__main__":
    sys.exit(main())
