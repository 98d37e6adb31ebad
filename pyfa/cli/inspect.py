"""``pyfa inspect``: what a kernel's hot loop is made of, and the bound that follows from it.

The loop is not searched for in the listing. The kernel runs in the emulator on two lengths of keys,
and what the longer run executed more is what the tiles between them took: the mix of full tiles,
with masks and edges gone, whatever order the compiler laid the blocks in.
"""

from __future__ import annotations

import argparse
from typing import Any

from .console import print_json, print_table

# Two lengths a few tiles long: what lies before and after the loop cancels.
_SHORT, _LONG = 512, 1024
_LANES = 64
# Clocks that an instruction holds its unit: 64 lanes over 16 wide SIMDs; v_exp_f32 at a quarter.
_VALU_CLOCKS, _TRANS_CLOCKS = 4, 16


def add(commands: Any) -> None:
    """Add the command to argparse's ``commands``."""
    parser = commands.add_parser(
        "inspect",
        help="the instruction mix of a kernel's hot loop",
        description="Runs a kernel in the emulator and shows, per wavefront and tile of keys, the "
        "instructions of its hot loop, clocks of each unit, and the static bound they imply.",
    )
    parser.add_argument("kernel", metavar="KERNEL", help="attn_fwd")
    parser.add_argument("--arch", required=True, metavar="A", help="gfx942")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Status 0; nothing here is a check."""
    from ..backends import BACKENDS
    from ..backends.hip import code, plans

    why_not = BACKENDS["emulator"].why_unavailable()
    if why_not:
        raise ValueError(why_not)
    if options.arch not in plans.ARCHS:
        raise ValueError(f"--arch: expected one of {', '.join(plans.ARCHS)}; got {options.arch}")
    kernels = [plan for plan in plans.all_plans("hip") if code.name_of(plan) == options.kernel]
    if not kernels:
        names = sorted({code.name_of(plan) for plan in plans.all_plans("hip")})
        raise ValueError(f"kernel: expected one of {', '.join(names)}; got {options.kernel}")
    reports = [_inspect(plan, options.arch) for plan in kernels]
    if options.json:
        print_json("inspect", {"kernel": options.kernel, "arch": options.arch, "plans": reports})
    else:
        _print(options.kernel, options.arch, reports)
    return 0


def _inspect(plan: Any, arch: str) -> dict[str, Any]:
    from ..backends.hip import code, forward

    kernel = code.load(plan, arch)
    short, long = (_emulate(plan, keys) for keys in (_SHORT, _LONG))
    waves = forward.THREADS // _LANES
    tiles = (_LONG - _SHORT) // forward.BLOCK_K * waves

    def more(before: int, after: int) -> float:
        return (after - before) / tiles

    names = short.instructions
    mix = {name: more(names[name], long.instructions[name]) for name in names}
    matrix = more(sum(short.mfma_clocks.values()), sum(long.mfma_clocks.values()))
    vector = mix["valu"] * _VALU_CLOCKS + mix["trans"] * _TRANS_CLOCKS
    return {
        "constants": dict(plan.constants),
        "sha256": kernel.digest,
        "instructions": mix,
        "mfma_clocks": matrix,
        "vector_clocks": vector,
        "vector_over_mfma": vector / matrix,
        "lds_clocks": more(short.lds_clocks, long.lds_clocks),
        "lds_conflict_clocks": more(short.lds_conflict_clocks, long.lds_conflict_clocks),
        "load_bytes": more(short.load_bytes, long.load_bytes),
    }


def _emulate(plan: Any, keys: int) -> Any:
    """Counters of one workgroup of full rows against ``keys`` keys."""
    import torch

    import pyfa

    from ..backends import BACKENDS
    from ..backends.hip import forward
    from ..backends.hip.backend import HipBackend
    from ..backends.hip.runtime_emulator import EmulatorRuntime

    constants = dict(plan.constants)
    dtype = (torch.float16, torch.bfloat16)[constants["DTYPE"]]
    q = torch.zeros(1, forward.BLOCK_Q, 1, constants["HEAD_DIM"], dtype=dtype)
    k = torch.zeros(1, keys, 1, constants["HEAD_DIM"], dtype=dtype)
    pyfa.attention(q, k, k, causal=bool(constants["CAUSAL"]), backend="emulator")
    backend = BACKENDS["emulator"]
    assert isinstance(backend, HipBackend)
    assert isinstance(backend.runtime, EmulatorRuntime)
    return backend.runtime.counters


def _print(kernel: str, arch: str, reports: list[dict[str, Any]]) -> None:
    from ..backends.hip import forward

    print(
        f"{kernel} on {arch}, per wavefront of 32 query rows and {forward.BLOCK_K} keys, full tiles"
    )
    print()
    classes = list(reports[0]["instructions"])
    rows = []
    for report in reports:
        text = " ".join(f"{name}={value}" for name, value in report["constants"].items())
        mix = [f"{report['instructions'][name]:g}" for name in classes]
        clocks = [
            f"{report[name]:.0f}"
            for name in ("mfma_clocks", "vector_clocks", "lds_clocks", "lds_conflict_clocks")
        ]
        rows.append([text, *mix, *clocks, f"{report['vector_over_mfma']:.2f}"])
    units = ["MFMA clk", "VALU+exp clk", "LDS clk", "conflicts", "(VALU+exp)/MFMA"]
    print_table(["constants", *classes, *units], rows)
    print()
    print(
        "Clocks of one wavefront on each unit (VALU 4, v_exp_f32 16); LDS clocks and conflicts are"
    )
    print(
        "modelled. A static bound: at best a loop takes the longest of its columns, not measured."
    )
