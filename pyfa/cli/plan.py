"""``pyfa plan``: the cost of a problem on a device, and what fits where. Nothing is run."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import inspect_timing, planned, problem, usage
from .console import print_json, print_table, print_text, size

if TYPE_CHECKING:
    from ..backends.hip.runtime_timing import Answer
    from ..dispatch import Explanation
    from ..traffic import Model

# Features beyond the dense attention that the model counts.
_LEFT_OUT = {
    "bias": "the bias and its gradient",
    "varlen": "the packed batch: all sequences count as the longest",
    "seqused": "lengths per sequence: all count as the longest",
    "paged": "the page table",
    "leftpad": "cache_leftpad: all keys count",
    "dropout": "the generator's instructions",
}
_NOTE = (
    "Compulsory: each input is read once, each output written once. Requested: all requests of the "
    "kernels, before any cache (standard attention: tiles of 128 × 128). DRAM: an estimate between "
    "the two, from the size of the last-level cache. Visible FLOPs leave out masked scores. "
    "FLOP/byte: visible FLOPs per DRAM byte. At least: the time at the vendor's peak rates, which "
    "no GPU sustains. It is a lower bound, not a prediction."
)


def add(commands: Any) -> None:
    """Add the command to argparse's ``commands``."""
    parser = usage.command(
        commands,
        "plan",
        "compute bytes, FLOPs, memory and a roofline of a problem",
        "Compute the cost of a problem on a device by formula: LDS or shared memory, block sizes "
        "that fit, bytes, FLOPs, peak memory and a roofline, for standard attention and for pyfa's "
        "kernels. No kernel runs, and no GPU is needed.",
        "pyfa plan --seqlen 16384 --heads 16 --head-dim 128 --causal --device MI300X",
        "pyfa plan --seqlen 8192 --features backward --device H200 --plot plan.svg",
    )
    problem.add_flags(parser)
    problem.add_device(parser)
    parser.add_argument(
        "--backend", metavar="B", help="the backend to plan for (default: the one that would run)"
    )
    parser.add_argument(
        "--compile", action="store_true", help="compile the kernels to count registers"
    )
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="also draw the result, as .png, .svg or .pdf"
    )
    planned.add_flag(parser)
    usage.add_json(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run the command; status 0 even if no backend would run the problem, because the formulas
    still hold."""
    if options.plot is not None:
        # Check this first, not after seconds of compilation.
        from ..bench import charts

        charts.require("--plot")
        charts.check_name(options.plot)
    answer, result, why_none = problem.modeled(options)
    left_out = [text for name, text in _LEFT_OUT.items() if name in answer.problem.features]
    if options.plot is not None:
        from . import plan_plot

        plan_plot.draw(options.plot, answer, result.shape, options.dtype)
        print(f"pyfa: wrote {options.plot}", file=sys.stderr)
    timing = _timing(answer, result, options.compile)
    if options.json:
        data = {
            "problem": answer.problem.described,
            "backend": answer.chosen,
            "plan": _plan(answer, True),
            "left_out": left_out,
            "timing_model": [inspect_timing.answer_as_dict(one) for one in timing],
            **result.as_dict(),
        }
        print_json("plan", data)
    else:
        _print(answer, result, why_none, left_out, options.verbose)
        if result.device.name == inspect_timing.DEVICE:
            print()
            for one in timing:
                print_text(f"{one.role}: {inspect_timing.line(one)}", "  ")
            if not timing:
                print_text("No timing model: it needs compiled HIP kernels. Add --compile.")
    return 0


def _timing(answer: Explanation, model: Model, compiled: bool) -> list[Answer]:
    """Return the timing model's figures, if the device is an MI300X and the kernels are bundled."""
    from ..backends.hip import runtime_timing

    if model.device.name != inspect_timing.DEVICE or answer.chosen != "hip":
        return []
    (plan,) = (one.plan for one in answer.answers if one.backend == "hip")
    assert plan is not None
    known = (plan, answer.problem, model.shape)
    if runtime_timing.why_unavailable() or not (compiled or runtime_timing.is_at_hand(*known)):
        return []
    return runtime_timing.answers(*known, model)


def _plan(answer: Explanation, whole: bool) -> str | None:
    """Return the chosen backend's plan: with its constants, or only its kernel."""
    for one in answer.answers:
        if one.backend == answer.chosen and one.plan is not None:
            return str(one.plan) if whole else one.plan.kernel
    return None


def _print(
    answer: Explanation, model: Model, why_none: str, left_out: list[str], verbose: bool
) -> None:
    device = model.device
    print_text(answer.problem.described, "  ")
    print_text(_device_line(model), "  ")
    print_text(f"backend {answer.chosen or 'none'}: {why_none or _plan(answer, verbose)}", "  ")
    if model.fits:
        print()
        _print_kernels(model)
    if device.limits is not None:
        print()
        block = device.limits.shared_bytes_per_block
        rows = [[name, str(count)] for name, count in model.rules().items()]
        print_table([f"rows of a block that fit {block / 1024:.0f} KiB", "rows"], rows)
    print()
    _print_costs(model, "backward" in answer.problem.features)
    print()
    print_text(_NOTE)
    for text in left_out:
        print_text(f"Not counted: {text}.")


def _device_line(model: Model) -> str:
    from ..traffic import last_level_bytes

    device = model.device
    peak = device.matrix_flops(model.dtype)
    if not device.bandwidth or not peak:
        return f"{device.name or device.arch}: unknown peaks, so no roofline"
    return (
        f"{device.name}: {device.units} {_units(model)}, {peak / 1e12:.4g} TFLOP/s {model.dtype}, "
        f"{device.bandwidth / 1e12:.3g} TB/s, ridge {model.ridge:.0f} FLOP/byte, last-level "
        f"cache {last_level_bytes(device) / 2**20:.0f} MiB, on-chip memory "
        f"{device.shared_bandwidth / 1e12:.1f} TB/s (vendor's figures)"
    )


def _units(model: Model) -> str:
    return "CUs" if model.device.vendor == "amd" else "SMs"


def _print_kernels(model: Model) -> None:
    rows = []
    for fit in model.fits:
        kernel, tiling = fit.kernel, fit.kernel.tiling
        tile = f"{tiling.block_q} × {tiling.block_k}"
        parts = f" in {tiling.splits} splits" if tiling.splits > 1 else ""
        known = fit.occupancy
        limit = model.device.limits.shared_bytes_per_block if model.device.limits else 0
        rows.append(
            [
                kernel.role.replace("_", ", ") + parts,
                tile,
                str(fit.workgroups),
                str(kernel.threads),
                str(kernel.registers or "–"),
                f"{kernel.shared_bytes}",
                f"{kernel.shared_bytes / limit:.0%}" if limit else "–",
                f"{known.workgroups}" if known else "–",
                f"{'' if kernel.registers else '≤ '}{known.share:.0%}" if known else "–",
                _in_vendors_words(known.limited_by, model) if known else "–",
            ]
        )
    head = ["kernel", "rows × keys", "workgroups", "threads", "registers", "on-chip bytes",
            "of the limit", f"per {_units(model)[:-1]}", "occupancy", "limited by"]  # fmt: skip
    print_table(head, rows)
    for fit in model.fits:
        buffers = ", ".join(f"{name}: {count} B" for name, count in fit.kernel.buffers.items())
        print_text(f"  on chip, {fit.kernel.role.replace('_', ', ')}: {buffers}", "    ")
    if not all(fit.kernel.registers for fit in model.fits):
        print_text("  Occupancy is an upper bound: only --compile counts registers.", "    ")


def _in_vendors_words(limit: str, model: Model) -> str:
    return limit.replace("shared memory", "LDS") if model.device.vendor == "amd" else limit


def _print_costs(model: Model, backward: bool) -> None:
    columns = [
        (f"{way}, {to}", model.costs.get((way, to)), to)
        for to in ("forward", "backward")
        for way in ("standard", "tiled")
        if to == "forward" or backward
    ]
    known = [(name, cost, to) for name, cost, to in columns if cost is not None]

    def row(title: str, cells: list[str]) -> list[str]:
        return [title, *cells]

    rows = [
        row("compulsory", [size(model.compulsory[to]) for _, _, to in known]),
        row("requested", [size(cost.requested) for _, cost, _ in known]),
        row("DRAM, estimated", [size(cost.dram) for _, cost, _ in known]),
        row("visible TFLOP", [f"{model.flops[to] / 1e12:.4g}" for _, _, to in known]),
        row("computed TFLOP", [f"{cost.computed_flops / 1e12:.4g}" for _, cost, _ in known]),
        row("FLOP/byte", [f"{cost.intensity:.3g}" for _, cost, _ in known]),
        row("bound by", [cost.by or "–" for _, cost, _ in known]),
        row("at least", [seconds(cost.seconds) for _, cost, _ in known]),
        row("at least, any tiles", [seconds(model.least[to].seconds) for _, _, to in known]),
        row("peak memory", [_peak(model, name, to) for name, _, to in known]),
    ]
    print_table(["", *(name for name, _, _ in known)], rows)


def _peak(model: Model, name: str, to: str) -> str:
    kind = "training" if to == "backward" else "forward"
    return size(model.peak_bytes[name.split(",")[0], kind])


def seconds(time: float) -> str:
    """Format ``time`` for people; a dash if it is unknown."""
    if not time:
        return "–"
    if time >= 1.0:
        return f"{time:.3g} s"
    return f"{time * 1e6:.1f} us" if time < 1e-3 else f"{time * 1e3:.3g} ms"
