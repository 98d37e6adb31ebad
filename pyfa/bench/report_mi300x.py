"""The sections of a report that show the timing model of an MI300X. Its figures are modeled, not
measured."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from . import mi300x
from .report_parts import MI300X, Section, Table, plain, where

_HOW = (
    "The model replays the instructions that the emulator executed on one compute unit, with LDS, "
    "L1, waits and barriers. It adds rounds of workgroups, bytes, and the clock rate at 750 W. "
    "Ranges cover its assumptions (docs/mi300x.md)."
)


def beside(name: str, data: Mapping[str, Any]) -> list[Section]:
    """Show measured and modeled figures side by side, for results from an MI300X."""
    found = data["mi300x"]
    return [
        Section(
            MI300X,
            10,
            f"hip on MI300X: measured, and by the timing model ({found['what']})",
            found["sentence"],
            f"{_HOW} {found['left_out']}",
            where(name, data),
            [],
            [Table(mi300x.HEAD, plain(mi300x.table(data["rows"])))],
            found["sentence"],
        )
    ]


def own(name: str, data: Mapping[str, Any]) -> list[Section]:
    """Show the model's figures for pyfa's kernels, from a result of benchmarks/mi300x_own.py."""
    rows = []
    for one in data["problems"]:
        busy = "; ".join(
            f"{kernel['title']} {_span(kernel['utilization'], '.2f')}" for kernel in one["kernels"]
        )
        rows.append(
            [
                one["flags"].replace("--", ""), _span(one["tflops"], ".0f"),
                _span([x * 1e-12 for x in one["bytes_per_second"]], ".2f"), busy,
                " or ".join(dict.fromkeys(one["bound"])),
            ]
        )  # fmt: skip
    fastest = max(data["problems"], key=lambda one: max(one["tflops"]))
    head = ["", "TFLOP/s", "TB/s", "matrix units busy in full tiles", "bound by"]
    return [
        Section(
            MI300X,
            29,
            f"hip on MI300X, by the timing model ({data['what']})",
            "What pyfa's kernels would reach on an MI300X by the model. Nothing here was measured.",
            _HOW,
            where(name, data),
            [],
            [Table(head, plain(rows), text=True)],
            f"{_span(fastest['tflops'], '.0f')} TFLOP/s for the fastest of {len(rows)} problems "
            f"({fastest['flags'].replace('--', '')}; model, not measured)",
        )
    ]


def _span(values: Any, style: str) -> str:
    low, high = sorted(values)
    return f"{low:{style}} to {high:{style}}"
