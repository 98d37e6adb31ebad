"""Compare the MI300X timing model with published times of other projects' kernels.

    python benchmarks/mi300x_model.py --aiter CLONE --moonmath FOLDER --triton FOLDER \
        --aotriton FOLDER --ck FILE

Runs each kernel in the emulator, the model over what it executed, and writes predicted and
published TFLOP/s of every pair to results/mi300x_model.json. One clock for each end of the
constants is chosen on MoonMath's pairs marked ``fit``, and one factor for every other machine on
its own; the others are predicted blind, and so is all of backward. How the clock falls with
utilization comes from counters (mi300x_clock.py). No AMD hardware takes part.

The kernels are gfx942 code objects that the caller has, and none is kept here:

--aiter     a clone of ROCm/aiter, which carries its code objects
--moonmath  rtz.hsaco, rtna.hsaco, rtne.hsaco: the forward of moonmath-ai/amd-kernels by rounding
--triton    HipKittens' triton_baseline_v02.py: attn_fwd_HEAD_KEYS_WAVES_LENGTH (.hsaco, .json), by
            head, keys of a tile, waves per SIMD, and lengths 1024 and 2048
--aotriton  attn_fwd_64_64, attn_fwd_64_128, attn_fwd_128_64 (.hsaco, .json), by head and keys
--ck        CK's tiled forward for causal bfloat16 of head 64 (mi300x_third_party.py says which)

Each .json is Triton's file of metadata, with ``name``, ``shared`` and ``num_warps``.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import machine
import mi300x_clock
import mi300x_third_party as third_party
from mi300x_pairs import MFMA_UTIL, PAIRS, Pair

from pyfa.emulator.timing import constants, device
from pyfa.emulator.timing.report import Estimate, estimate

ENDS = constants.ends()
Estimates = Mapping[str, tuple[Estimate, ...]]
Law = tuple[float, float]  # Hz at the reference utilization, and the exponent
ROUNDINGS = ("rtz", "rtna", "rtne")
SWEEP = "attn-dsl-bench"
LEVEL = "MoonMath"  # the machine whose clock is fitted: most of the pairs of the fit


def _traced(options: argparse.Namespace, failed: dict[str, str]) -> dict[str, third_party.Traced]:
    """Every kernel that could be had, by its name in the pairs."""
    wanted: dict[str, Callable[[], third_party.Traced]] = {}
    facts: dict[str, Any] = {}
    if options.aiter:
        for name in ROUNDINGS:
            wanted[f"AITER forward {name}"] = (
                lambda n=name: third_party.aiter_forward(options.aiter, n, False)
            )  # fmt: skip
        wanted["AITER forward causal rtna"] = lambda: third_party.aiter_forward(
            options.aiter, "rtna", True
        )
        for way in ("a16", "a32"):
            wanted[f"AITER backward {way} rtz"] = (
                lambda w=way: third_party.aiter_backward(options.aiter, w, "rtz")
            )  # fmt: skip
    if options.moonmath:

        def moonmath(rounding: str) -> third_party.Traced:
            traced, facts[rounding] = third_party.moonmath(options.moonmath, rounding)
            if facts[rounding]["spills"] > 8:
                raise RuntimeError(f"compiled with {facts[rounding]['spills']} spilled registers, "
                                   "which is not the kernel that was measured")  # fmt: skip
            return traced

        for name in ROUNDINGS:
            wanted[f"MoonMath {name}"] = lambda n=name: moonmath(n)
    if options.triton:
        for dim in (128, 64):
            for keys, waves in third_party.TRITON_CONFIGS:
                wanted[f"Triton forward causal {dim}, {keys} keys, {waves} waves"] = (
                    lambda d=dim, k=keys, w=waves: third_party.triton_forward(options.triton, d, k,
                    w)
                )  # fmt: skip
    if options.aotriton:
        for dim, keys in third_party.AOTRITON_TILES:
            wanted[f"AOTriton forward causal {dim}, {keys} keys"] = (
                lambda d=dim, k=keys: third_party.aotriton_forward(options.aotriton, d, k)
            )  # fmt: skip
    if options.ck:
        wanted["CK forward causal 64"] = lambda: third_party.ck_forward(options.ck)
    found = {}
    for name, make in wanted.items():
        try:
            found[name] = make()
        except Exception as error:  # one kernel less: said in the report
            failed[name] = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
    return found


def launches(pair: Pair, one: Estimate) -> list[device.Launch]:
    """The kernels of a pair, as the library that was timed launches them."""
    heads = pair.batch * pair.heads
    rows = heads * pair.length
    if pair.backward:
        groups = [one.clocks(pair.length / 16)] * (-(-pair.length // 192) * heads)
        matrix = one.matrix(pair.length / 16) * len(groups)
        size = 4 if "a32" in pair.kernel else 2
        # Row sums of O · dO; float32 is converted at the end. The zeroing of dQ is not timed.
        before = device.Launch([1.0], 1.0, 1, rows * 128 * 2 * 2)
        after = [device.Launch([1.0], 1.0, 1, rows * 128 * 6)] if size == 4 else []
        return [before, device.Launch(groups, matrix, one.resident), *after]
    if "Triton" in pair.kernel:
        keys = int(pair.kernel.split(", ")[1].split()[0])
        tiles_of = [-(-(n + 1) * third_party.TRITON_ROWS // keys)
                    for n in range(-(-pair.length // third_party.TRITON_ROWS))]  # fmt: skip
        groups = [one.clocks(tiles) for tiles in tiles_of] * heads
        matrix = sum(map(one.matrix, tiles_of)) * heads
        taken = pair.kernel.startswith("AOTriton")
        return [device.Launch(groups, matrix, one.resident, taken=taken)]
    if pair.kernel.startswith("CK"):  # block by block, all heads side by side
        tiles_of = [2 * (n + 1) for n in range(-(-pair.length // third_party.CK_ROWS))]
        groups = [one.clocks(tiles) for tiles in tiles_of for _ in range(heads)]
        return [device.Launch(groups, sum(map(one.matrix, tiles_of)) * heads, one.resident)]
    if pair.causal:  # a workgroup has block i and block n - 1 - i
        blocks = -(-pair.length // 256)
        groups = [one.clocks((pair.length + 256) / 64)] * (-(-blocks // 2) * heads)
        return [device.Launch(groups, one.matrix((pair.length + 256) / 64) * len(groups))]
    tiles = pair.length / 64
    if not pair.kernel.startswith("MoonMath"):
        groups = [one.clocks(tiles)] * (-(-pair.length // 256) * heads)
        return [device.Launch(groups, one.matrix(tiles) * len(groups))]
    count = -(-pair.length // 384) * heads
    units = int(constants.DEVICE["units"].low)
    tail, parts = count % units, 1
    if tail and tail <= units * 19 // 20:  # its own rule for splitting the last round
        spans = {g: -(-tail * g // units) * -(-tiles // g) + (3 if g > 1 else 0)
                 for g in range(1, 2 * units // tail + 1)}  # fmt: skip
        parts = min(spans, key=lambda g: spans[g])
    whole = count - tail if parts > 1 else count
    found = [device.Launch([1.0], 1.0, 1, rows * 128 * 2 * 2)]  # V is transposed first
    found.append(device.Launch([one.clocks(tiles)] * whole, one.matrix(tiles) * whole))
    if parts > 1:
        split = [one.clocks(tiles / parts)] * (tail * parts)
        found.append(device.Launch(split, one.matrix(tiles / parts) * len(split)))
        found.append(device.Launch([1.0], 1.0, 1, tail * parts * 384 * 130 * 4))
    return found


def predicted(pair: Pair, estimates: Estimates, clocks: Mapping[str, Law]) -> list[device.Time]:
    """At each end."""
    outside = {"launch_seconds": mi300x_clock.law().outside} if pair.machine == SWEEP else {}
    return [
        device.time(launches(pair, one), one.end, clocks[one.end], outside)
        for one in estimates[pair.kernel]
    ]


def chosen(pair: Pair, estimates: Estimates, clocks: Mapping[str, Law]) -> str:
    """The kernel of a pair: of several, the one that its autotuner would take, by this model.

    AOTriton's are tuned beforehand: its table for gfx942 has what is taken for a length.
    """
    if pair.kernel.startswith("AOTriton"):
        keys = third_party.aotriton_keys(pair.dim, pair.length)
        return f"{pair.kernel}, {keys} keys"
    names = [n for n in estimates if n == pair.kernel or n.startswith(f"{pair.kernel}, ")]

    def seconds(name: str) -> float:
        return sum(t.seconds for t in predicted(pair._replace(kernel=name), estimates, clocks))

    return min(names, key=seconds) if len(names) > 1 else names[0]


def _counted(pair: Pair, estimates: Estimates, clocks: Mapping[str, Law]) -> list[float]:
    """What ``MfmaUtil`` shows at each end: a mean over what ran, an autotuner's runs included,
    which are as many of each of its kernels."""
    share = MFMA_UTIL[pair.kernel, pair.length][1]
    taken = chosen(pair, estimates, clocks)
    tried = [n for n in estimates if n.startswith(f"{pair.kernel}, ")] if share < 1 else [taken]
    of = {
        name: [t.utilization for t in predicted(pair._replace(kernel=name), estimates, clocks)]
        for name in {*tried, taken}
    }
    return [
        share * of[taken][end] + (1 - share) * fmean(of[name][end] for name in tried)
        for end in range(len(ENDS))
    ]


def tflops(pair: Pair, at: Sequence[device.Time]) -> list[float]:
    return [pair.flops / t.seconds / 1e12 for t in at]


def fitted(pairs: Sequence[Pair], estimates: Estimates) -> tuple[dict[str, Law], dict[str, float]]:
    """The clock of each end with the least mean error over ``pairs``, and those errors.

    The exponent is not: it is what counters say.
    """
    best: dict[str, tuple[float, Law]] = {}
    for step in range(90, 171):
        law = (step * 1e7, constants.CLOCK_EXPONENT.low)
        at = [tflops(p, predicted(p, estimates, dict.fromkeys(ENDS, law))) for p in pairs]
        for number, end in enumerate(ENDS):
            error = fmean(
                abs(math.log(one[number] / p.tflops)) for p, one in zip(pairs, at, strict=True)
            )
            if end not in best or error < best[end][0]:
                best[end] = (error, law)
    return {e: best[e][1] for e in ENDS}, {e: best[e][0] for e in ENDS}


def _family(pair: Pair) -> str:
    name = pair.kernel.split()[0]
    return " ".join(pair.kernel.split()[:2]) if name == "AITER" else name


def _orders(rows: Sequence[Mapping[str, Any]], apart: float = 0.08) -> dict[str, Any]:
    """Kernels on one shape and machine that differ by ``apart`` or more: how many in their
    order."""
    right = total = 0
    wrong = []
    for n, a in enumerate(rows):
        for b in rows[n + 1 :]:
            if any(a[of] != b[of] for of in ("machine", "shape", "dim")):
                continue
            published, model = (math.log(a[k] / b[k]) for k in ("published", "predicted"))
            if abs(published) >= math.log(1 + apart):
                total += 1
                right += published * model > 0
                if published * model <= 0:
                    wrong.append(f"{a['kernel']} and {b['kernel']} on {a['shape']}")
    return {"pairs": total, "right": right, "wrong": wrong}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--aiter", type=Path, help="a clone of ROCm/aiter")
    parser.add_argument("--moonmath", type=Path, help="a folder with MoonMath's forward, compiled")
    parser.add_argument("--triton", type=Path, help="a folder with HipKittens' baseline, compiled")
    parser.add_argument("--aotriton", type=Path, help="a folder with AOTriton's forward, compiled")
    parser.add_argument("--ck", type=Path, help="CK's forward for head 64, compiled")
    parser.add_argument("--name", default="mi300x_model", help="of the file in results/")
    options = parser.parse_args()
    failed: dict[str, str] = {}
    traced = _traced(options, failed)
    estimates = {
        name: tuple(estimate(t.short, t.long, t.tiles, end, t.resident) for end in ENDS)
        for name, t in traced.items()
    }
    pairs = [p for p in PAIRS if any(n.split(",")[0] == p.kernel for n in estimates)]
    if not pairs:
        raise SystemExit(f"no kernel could be run: {failed or 'name a clone'}")
    basis = [pair for pair in pairs if pair.fit and not pair.backward]
    level = [pair for pair in basis if pair.machine == LEVEL]
    clocks, fit_error = fitted(level or basis, estimates)
    rows = []
    for published in pairs:
        pair = published._replace(kernel=chosen(published, estimates, clocks))
        at = predicted(pair, estimates, clocks)
        both = tflops(pair, at)
        middle = math.sqrt(both[0] * both[1])
        rows.append(
            {
                "kernel": pair.kernel,
                "family": _family(pair),
                "shape": f"{pair.batch},{pair.heads}/{pair.heads_k},{pair.length}"
                + (" causal" if pair.causal else ""),
                "dim": pair.dim,
                "machine": pair.machine,
                "fit": pair.fit,
                "published": pair.tflops,
                "predicted": middle,
                "ends": both,
                "utilization": [t.utilization for t in at],
                "hz": [t.hz for t in at],
                "bound": [t.bound for t in at],
                "error": middle / pair.tflops - 1,
            }
        )
    blind = [row for row in rows if not row["fit"]]
    groups = {
        "forward": [r for r in blind if "backward" not in r["family"]],
        "backward": [r for r in blind if "backward" in r["family"]],
        **{f: [r for r in blind if r["family"] == f] for f in sorted({r["family"] for r in blind})},
        **{
            m: [r for r in blind if r["machine"] == m]
            for m in sorted({r["machine"] for r in blind})
        },
    }
    # One clock a kernel family and machine, of its own: what is left is the shape's part.
    shapes = {}
    for row in blind:
        key = f"{row['family']}, {row['machine']}"
        alike = [r for r in blind if f"{r['family']}, {r['machine']}" == key]
        scale = math.exp(fmean(math.log(r["published"] / r["predicted"]) for r in alike))
        shapes[key] = fmean(abs(r["predicted"] * scale / r["published"] - 1) for r in alike)
    # How far the machines behind the figures are from one clock for all, by the pairs of the fit.
    machines = {
        name: math.exp(
            fmean(
                math.log(r["published"] / r["predicted"])
                for r in rows
                if r["machine"] == name and r["fit"]
            )
        )
        for name in sorted({r["machine"] for r in rows if r["fit"]})
    }
    measured = {
        f"{pair.kernel}, {pair.length}": {
            "model": _counted(pair, estimates, clocks), "measured": MFMA_UTIL[pair.kernel,
            pair.length][0],
        }
        for pair in pairs
        if pair.machine == SWEEP and (pair.kernel, pair.length) in MFMA_UTIL
    }  # fmt: skip
    scaled = [row["predicted"] * machines[row["machine"]] / row["published"] - 1 for row in blind]
    results = {
        "what": "model, not measured",
        "clock_from_counters": vars(mi300x_clock.law()),
        "clock": {end: {"hz": hz, "exponent": exponent} for end, (hz, exponent) in clocks.items()},
        "clock_of_machine": machines,
        "fit_error": fit_error,
        "pairs": rows,
        "blind_mean_error": {k: fmean(abs(r["error"]) for r in v) for k, v in groups.items() if v},
        "blind_with_clock_of_machine": {
            family: fmean(
                abs(r["predicted"] * machines[r["machine"]] / r["published"] - 1)
                for r in blind
                if r["family"] == family
            )
            for family in sorted({r["family"] for r in blind})
        } | {"all": fmean(map(abs, scaled))},
        "blind_within_one_clock": shapes,
        "mfma_utilization": measured,
        "order_8_percent": _orders(blind),
        "order_8_percent_with_fit": _orders(rows),
        "kernels": {
            name: {
                one.end: {
                    "utilization": one.utilization, "clocks_of_tile": one.clocks_of_tile,
                    "fixed_clocks": one.fixed_clocks, "lost": dict(one.lost),
                }
                for one in both
            }
            for name, both in estimates.items()
        },
        "not_run": failed,
    }  # fmt: skip
    for row in rows:
        low, high = sorted(row["ends"])
        print(f"{row['kernel'].split(',')[0]:26s} {row['shape']:20s} {row['machine']:14s} "
              f"{'fit  ' if row['fit'] else 'blind'} {row['published']:6.0f} "
              f"{low:6.0f} to {high:4.0f} {row['error']:+7.1%}")  # fmt: skip
    print("clock", clocks, "fit error", fit_error, "machines", machines)
    for key, value in results["blind_mean_error"].items():
        print(f"blind, {key}: {value:.1%}")
    for key, value in results["blind_with_clock_of_machine"].items():
        print(f"blind with the clock of its machine, {key}: {value:.1%}")
    for key, value in shapes.items():
        print(f"blind with a clock of its own, {key}: {value:.1%}")
    print("MfmaUtil", measured)
    print("order", results["order_8_percent"], results["order_8_percent_with_fit"])
    print("not run", failed)
    print("wrote", machine.save(options.name, results))


if __name__ == "__main__":
    main()
