"""``pyfa inspect``: the instructions of a kernel's hot loop, and the bound that follows from them.

The kernel runs in the emulator with two lengths of keys. The difference of the executed
instructions is the cost of the tiles between the two lengths: the mix of full tiles, without masks
and edges, whatever the order of the code.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from . import inspect_timing, usage
from .console import print_json, print_table, print_text, progress

if TYPE_CHECKING:
    from ..backends.hip.samples import Sample
    from ..plan import Plan

# Clocks that an instruction of a wavefront holds its unit: 64 lanes over 16 wide SIMDs; v_exp_f32
# at a quarter. LDS moves 32 banks of 4 bytes a clock.
VALU_CLOCKS, TRANS_CLOCKS, LDS_BYTES_A_CLOCK = 4, 16, 128
SIMDS = 4  # of a compute unit
MFMA_FLOPS = 512  # of a SIMD in a clock, fp16 and bf16
# The clock that an MI300X holds at 750 W while its matrix units are busy, not its peak of 2.1 GHz:
# 1115 to 1230 MHz, AMD's ROCm blog "Measuring Max-Achievable FLOPs", part 2 (2025), taken
# second-hand.
SUSTAINED_HZ = (1.115e9, 1.23e9)
DEVICE = "MI300X"
_PACKED = ("v_pk_fma_f32", "v_pk_mul_f32", "v_pk_add_f32")


def add(commands: Any) -> None:
    """Add the command to argparse's ``commands``."""
    parser = usage.command(
        commands,
        "inspect",
        "show the instruction mix of a HIP kernel's hot loop",
        "Run a HIP kernel in the emulator and show, per wavefront and tile of keys, the "
        "instructions of its hot loop, the clocks of each unit, and the bound on the speed that "
        "follows from them.",
        "pyfa inspect attn_fwd --arch gfx942",
        "pyfa inspect attn_fwd --arch gfx942 --timing --head-dim 128 --causal",
    )
    parser.add_argument(
        "kernel",
        metavar="KERNEL",
        help="attn_fwd, attn_decode, attn_latent, attn_bwd, attn_bwd_onepass or bias_grad",
    )
    parser.add_argument("--arch", required=True, metavar="A", help="gfx942")
    parser.add_argument(
        "--all",
        action="store_true",
        help="include plans with score terms, dropout or pages (default: plain plans)",
    )
    inspect_timing.add_flags(parser)
    usage.add_json(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run the command; status 0, because nothing is checked."""
    from ..backends import BACKENDS
    from ..backends.hip import plans, samples
    from ..backends.hip.target import TARGET
    from ..backends.native import catalog
    from ..backends.native.plans import name_of

    why_not = BACKENDS["emulator"].why_unavailable()
    if why_not:
        raise ValueError(why_not)
    if options.arch not in plans.ARCHS:
        raise ValueError(f"--arch: expected one of {', '.join(plans.ARCHS)}; got {options.arch}")
    known = [plan for plan in catalog.all_plans(TARGET, options.arch) if samples.of(plan)]
    kernels = [plan for plan in known if name_of(plan) == options.kernel]
    if not kernels:
        names = sorted({name_of(plan) for plan in known})
        raise ValueError(f"kernel: expected one of {', '.join(names)}; got {options.kernel}")
    wanted = [plan for plan in kernels if options.all or samples.is_plain(plan)]
    asked = inspect_timing.problem_of(options)
    if options.timing:
        return _timing(options, wanted, asked)
    if asked is not None:
        raise ValueError("a problem's flags go with --timing")
    reports = []
    with progress("inspecting") as show:
        for done, plan in enumerate(wanted):
            show(done, len(wanted), str(plan))
            reports.append(inspect(plan, options.arch))
    if options.json:
        print_json("inspect", {"kernel": options.kernel, "arch": options.arch, "plans": reports})
    else:
        _print(options.kernel, options.arch, reports)
    return 0


def _timing(
    options: argparse.Namespace, wanted: list[Plan], asked: argparse.Namespace | None
) -> int:
    from ..backends.hip import runtime_timing

    answers: list[runtime_timing.Answer] = []
    if asked is not None:
        wanted, answers = inspect_timing.plans_of(asked, options.kernel)
    found = []
    with progress("timing") as show:
        for done, plan in enumerate(wanted):
            show(done, len(wanted), str(plan))
            one = runtime_timing.kernel(plan)
            if one is not None:
                found.append((plan, one))
    if options.json:
        data = {
            "kernel": options.kernel,
            "arch": options.arch,
            "device": inspect_timing.DEVICE,
            "what": inspect_timing.WORDS,
            "plans": [inspect_timing.as_dict(*one) for one in found],
            "problem": [inspect_timing.answer_as_dict(one) for one in answers],
        }
        print_json("inspect-timing", data)
    else:
        inspect_timing.show(options.kernel, found, answers, asked is not None)
    return 0


def inspect(plan: Plan, arch: str) -> dict[str, Any]:
    """Return the figures of one plan, whose kernel ``samples`` knows."""
    from ..backends.hip import code, samples

    sample = samples.of(plan)
    assert sample is not None
    short, long = (emulate(plan, sample, keys) for keys in (sample.short, sample.long))
    return {
        "title": sample.title,
        "constants": dict(plan.constants),
        "sha256": code.load(plan, arch).digest,
        "rows": sample.rows,
        "keys": sample.keys,
        **_figures(short, long, sample),
    }


def emulate(wanted: Plan, sample: Sample, keys: int) -> Any:
    """Return what the kernel of ``wanted`` executes when ``sample`` runs it with ``keys`` keys."""
    from ..backends.hip import runtime_timing

    return runtime_timing.counters_of(wanted, sample.run, keys)[0]


def _figures(short: Any, long: Any, sample: Sample) -> dict[str, Any]:
    """Return figures per wavefront and tile, unless a name says otherwise."""

    def more(before: int, after: int) -> float:
        return (after - before) / sample.tiles

    def counted(name: str) -> float:
        return more(getattr(short, name), getattr(long, name))

    def called(names: tuple[str, ...]) -> float:
        before, after = (sum(c.mnemonics.get(n, 0) for n in names) for c in (short, long))
        return more(before, after)

    mix = {
        name: more(short.instructions[name], long.instructions[name]) for name in short.instructions
    }
    matrix = more(sum(short.mfma_clocks.values()), sum(long.mfma_clocks.values()))
    vector = mix["valu"] * VALU_CLOCKS + mix["trans"] * TRANS_CLOCKS
    through = counted("lds_read_bytes") + counted("lds_write_bytes")
    direct = counted("lds_direct_bytes")
    # Four SIMDs share one LDS, whose clocks here are those of all of them.
    lds = SIMDS * (counted("lds_clocks") + direct / LDS_BYTES_A_CLOCK)
    return {
        "instructions": mix,
        "packed_fp32": called(_PACKED),
        "mfma_clocks": matrix,
        "vector_clocks": vector,
        "vector_over_mfma": vector / matrix,
        "lds_clocks": counted("lds_clocks"),
        "lds_conflict_clocks": counted("lds_conflict_clocks"),
        "lds_clocks_of_cu": lds,
        "lds_bytes": through,
        "lds_direct_bytes": direct,
        "lds_bytes_per_mfma_clock_of_cu": SIMDS * through / matrix,
        "lds_direct_bytes_per_mfma_clock_of_cu": SIMDS * direct / matrix,
        "load_bytes_per_mfma_clock_of_cu": SIMDS * counted("load_bytes") / matrix,
        "barriers_per_64_keys": mix["barrier"] * 64 / sample.keys,
        "static_bound": _bound(matrix, vector, lds),
    }


def _bound(matrix: float, vector: float, lds: float) -> dict[str, Any]:
    """Return the bound if all units work in parallel and the busiest is never idle."""
    from ..device import DEVICES

    clocks = {"MFMA": matrix, "VALU+exp": vector, "LDS": lds}
    busiest = max(clocks, key=lambda name: clocks[name])
    flops = SIMDS * MFMA_FLOPS * matrix / clocks[busiest]
    units = DEVICES[DEVICE].units
    return {
        "busiest": busiest,
        "flops_per_clock_of_cu": flops,
        "compute_units": units,
        "sustained_hz": SUSTAINED_HZ,
        "tflops_at_sustained_clock": [flops * units * hz / 1e12 for hz in SUSTAINED_HZ],
    }


def _print(kernel: str, arch: str, reports: list[dict[str, Any]]) -> None:
    print(f"{kernel} on {arch}, per wavefront and tile of keys, unmasked tiles, no rescaling")
    print()
    print_table(
        ["instructions", "tile", *reports[0]["instructions"], "packed fp32"],
        [
            [report["title"], f"{report['rows']}×{report['keys']}",
             *(f"{count:.4g}" for count in report["instructions"].values()),
             f"{report['packed_fp32']:.4g}"]
            for report in reports
        ],
    )  # fmt: skip
    print()
    columns = {
        "MFMA clk": ("mfma_clocks", ".0f"),
        "VALU+exp": ("vector_clocks", ".0f"),
        "/MFMA": ("vector_over_mfma", ".2f"),
        "LDS clk": ("lds_clocks", ".0f"),
        "conflicts": ("lds_conflict_clocks", ".0f"),
        "LDS B/clk": ("lds_bytes_per_mfma_clock_of_cu", ".1f"),
        "direct B/clk": ("lds_direct_bytes_per_mfma_clock_of_cu", ".1f"),
        "load B/clk": ("load_bytes_per_mfma_clock_of_cu", ".1f"),
        "barriers/64": ("barriers_per_64_keys", ".2g"),
    }
    print_table(
        ["units", *columns, "bound by", "FLOP/clk/CU", "TFLOP/s"],
        [
            [report["title"], *(f"{report[key]:{style}}" for key, style in columns.values()),
             *_bound_cells(report["static_bound"])]
            for report in reports
        ],
    )  # fmt: skip
    units = reports[0]["static_bound"]["compute_units"]
    low, high = (hz / 1e9 for hz in SUSTAINED_HZ)
    print()
    print_text(
        f"Clocks of one wavefront on each unit: {VALU_CLOCKS} per VALU instruction, {TRANS_CLOCKS} "
        "per v_exp_f32, MFMA by LLVM's model, LDS clocks and conflicts by the addresses. VALU "
        "includes packed fp32. B/clk: bytes of a compute unit per clock of its four matrix units: "
        "read and written in LDS, loaded into it directly, loaded from memory. barriers/64: per 64 "
        "keys."
    )
    print_text(
        "The bound is static, not measured: it assumes that the busiest of MFMA, VALU+exp and LDS "
        "never idles. It ignores latency, waits, barriers, issue, caches and HBM. TFLOP/s: "
        f"{units} compute units at the clock that {DEVICE} sustains, {low:g} to {high:g} GHz."
    )


def _bound_cells(bound: Mapping[str, Any]) -> tuple[str, str, str]:
    low, high = bound["tflops_at_sustained_clock"]
    flops = f"{bound['flops_per_clock_of_cu']:.0f}"
    return bound["busiest"], flops, f"{low:.0f} to {high:.0f}"
