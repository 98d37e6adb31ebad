"""The sections of a report that need no GPU: figures of the machine code, and conformance."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from . import charts
from .report_parts import CORRECT, MI300X, Cell, Section, Table, drawn, gpu, plain, where


def hip(name: str, data: Mapping[str, Any]) -> list[Section]:
    """Show registers, LDS and static bounds of the HIP forward, from a result of
    benchmarks/hip_static.py."""
    plans = data["plans"]
    shown = [plan for plan in plans if "plain" in plan["title"] and "bf16" in plan["title"]]
    bounds = {
        plan["title"]: sum(plan["static_bound"]["tflops_at_sustained_clock"]) / 2
        for plan in shown or plans
    }
    made, (axis,) = charts.figure(height=0.8 + 0.3 * len(bounds))
    charts.bars(axis, bounds, "TFLOP/s, static bound", "MI300X: the busiest unit never idle")
    head = ["plan", "VGPR", "spills", "LDS B", "VALU+exp / MFMA", "LDS B/clk", "bound by",
            "TFLOP/s at the sustained clock"]  # fmt: skip
    body = plain(
        [
            [plan["title"], plan["vgprs"], plan["spills"], plan["lds_bytes_of_workgroup"],
             f"{plan['vector_over_mfma']:.2f}", f"{plan['lds_bytes_per_mfma_clock_of_cu']:.1f}",
             plan["static_bound"]["busiest"],
             " to ".join(f"{x:.0f}" for x in plan["static_bound"]["tflops_at_sustained_clock"])]
            for plan in plans
        ]
    )  # fmt: skip
    return [
        Section(
            MI300X,
            30,
            "hip on MI300X, from machine code: registers, LDS, static bounds of the forward",
            "Registers, LDS and instructions of the compiled gfx942 kernels. The static bound is "
            "an upper limit, from instructions counted in the emulator; no hardware ran them.",
            " ".join(data["notes"]),
            where(name, data),
            [drawn(made, name, "Plans without score terms, bfloat16.")],
            [Table(head, body)],
            f"{len(plans)} plans of the forward, {sum(plan['spills'] for plan in plans)} spills",
        )
    ]


def conformance(name: str, data: Mapping[str, Any]) -> list[Section]:
    """Show a backend's result in the conformance suite, and the cases that are closest to their
    bounds."""
    counts = data["counts"]
    # Tiles of another arch that ran on this one; otherwise a word for its own tiles.
    tiles = data.get("tiles")
    note = f", tiles of {' and '.join(tiles)}" if isinstance(tiles, list) else ""
    note += f", grids for {data['sms']} SMs" if "sms" in data else ""
    failed = len(data["failed"])
    ran = f"{data['backend']} on {gpu(data)}{note}"
    if data["backend"] == "emulator":
        ran = "hip's gfx942 code in the emulator (functionally emulated, not verified on hardware)"
    summary = Table(["", "cases"], plain(sorted(counts.items())))
    worst = [
        [Cell(f"{ratio:.3f}", "bad" if ratio > 1 else ""), Cell(what), Cell(case)]
        for ratio, case, what in data["worst"]
    ]
    refused = data["declined"]
    pairs = refused.items() if isinstance(refused, Mapping) else Counter(refused).items()
    tables = [summary, Table(["share of the bound", "tensor", "case"], worst, "Closest", text=True)]
    if pairs:
        tables.append(Table(["refused because", "cases"], plain(list(pairs)), "Refused"))
    return [
        Section(
            CORRECT,
            40,
            f"{ran}: conformance",
            f"{data['ran']} cases of level {data['level']} against float64, {failed} failed. A "
            "backend that refuses a case says why.",
            "Inputs from raw PCG64 integers; the error may be 2 × that of naive attention in the "
            "same dtype (3 × for gradients and softcap) and 4 ulp, the mean error 1.5 ×.",
            where(name, data),
            [],
            tables,
            f"{ran}: {counts.get('passed', 0):,} cases passed, {failed} failed",
        )
    ]
