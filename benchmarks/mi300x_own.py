"""Apply the MI300X timing model to pyfa's own kernels (model, not measured).

python benchmarks/mi300x_own.py            # writes results/mi300x_own.json
python benchmarks/mi300x_own.py --latent   # latent decode alone: results/mi300x_latent.json
python benchmarks/mi300x_own.py --wide     # head_dim 512 beside 256: results/mi300x_wide.json
python benchmarks/mi300x_own.py --terms    # backward with score terms: results/mi300x_terms.json
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import machine
from mi300x_pairs import PAIRS

from pyfa.backends.hip import runtime_timing
from pyfa.backends.hip.target import TARGET
from pyfa.backends.native import tiling
from pyfa.cli import inspect_timing, problem
from pyfa.cli.problem import modeled
from pyfa.emulator.timing import constants, device

LONG = "--batch 4 --seqlen 16384 --heads 16"
PROBLEMS = (
    *(f"{LONG} --head-dim {dim}" for dim in ("64", "96", "128", "192,128", "192", "256")),
    *(f"{LONG} --head-dim {dim} --causal" for dim in ("64", "128")),
    *(f"{LONG} --head-dim {dim} --dtype float8_e4m3fnuz" for dim in ("128", "256")),
    *(f"{LONG} --head-dim {dim} --features backward" for dim in ("64", "128")),
    "--batch 16 --seqlen 1,32768 --heads 32,8 --head-dim 128",
)

LATENT = tuple(
    f"--features latent --batch {batch} --seqlen 1,{keys} --heads {heads},1 --head-dim 576,512"
    for batch, keys in ((128, 1024), (128, 8192), (16, 65536), (1, 65536))
    for heads in (16, 32, 64, 128)
)

# Prefill, and decode of many sequences, where 256 has a forward kernel and 512 runs on decode's.
WIDE = tuple(
    f"{shape} --head-dim {dim}"
    for dim in ("256", "512", "576,512")
    for shape in (
        "--batch 4 --seqlen 8192 --heads 16", "--batch 4 --seqlen 8192 --heads 16 --causal",
        "--batch 64 --seqlen 1,8192 --heads 32,4",
    )
)  # fmt: skip

# Backwards: plain, with one score term, and with two, which the general plan runs. 256 takes two
# passes.
TERMS = tuple(
    f"{LONG} --head-dim {dim} --features backward{terms}"
    for dim, of_dim in {
        "64": ("", ",sinks", ",alibi", ",softcap", ",dropout", ",bias", ",softcap,alibi"),
        "96": ("", ",alibi", ",softcap", ",bias", ",softcap,alibi"),
        "128": ("", ",sinks", ",alibi", ",softcap", ",dropout", ",bias", ",softcap,alibi"),
        "192,128": ("", ",sinks", ",softcap,alibi"),
        "192": ("", ",alibi", ",softcap", ",softcap,alibi"),
        "256": ("", ",softcap", ",softcap,alibi"),
        "256 --causal": ("", ",softcap", ",softcap,alibi"),
    }.items()
    for terms in of_dim
)

# Causal, 16 heads of 16 sequences of 16,384, which attn-dsl-bench measured of others.
RIVALS = {"128": "AITER forward causal rtna", "64": "CK forward causal 64"}
MACHINE = "attn-dsl-bench"


def causal() -> list[dict[str, Any]]:
    """Ours beside others' on one shape, by the clocks that mi300x_model.py fitted to the others."""
    fitted = json.loads((machine.RESULTS / "mi300x_model.json").read_text())
    laws = {end: (law["hz"], law["exponent"]) for end, law in fitted["clock"].items()}
    rows = []
    for dim, rival in RIVALS.items():
        options = options_of(f"--batch 16 --seqlen 16384 --heads 16 --head-dim {dim} --causal")
        explanation, model, _ = modeled(options)
        (plan,) = (one.plan for one in explanation.answers if one.backend == "hip")
        assert plan is not None
        ((tiled, one),) = tiling.pairs_of(TARGET, plan, explanation.problem, model.shape)
        kernel, work = runtime_timing.kernel(one), runtime_timing.work_of(tiled, model.shape)
        assert kernel is not None
        rates = []
        for number, end in enumerate(constants.ends()):
            launch = work.launch(kernel.cost(number), work.resident(kernel.resident), 0.0)
            seconds = device.time([launch], end, laws[end]).seconds
            rates.append(model.flops["forward"] / seconds / 1e12)
        theirs = [
            row["ends"]
            for row in fitted["pairs"]
            if row["kernel"] == rival and row["shape"] == "16,16/16,16384 causal"
        ]
        published = [
            pair.tflops
            for pair in PAIRS
            if pair.kernel == rival and (pair.machine, pair.length) == (MACHINE, 16384)
        ]
        rows.append(
            {
                "head_dim": int(dim),
                "ours": rates,
                "rival": rival,
                "rival_by_the_model": theirs[0] if theirs else None,
                "rival_published": published[0],
                "clock_of_machine": fitted["clock_of_machine"][MACHINE],
            }
        )
        print(rows[-1])
    return rows


def options_of(flags: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    problem.add_flags(parser)
    options = parser.parse_args(flags.split())
    options.device, options.backend, options.compile = inspect_timing.DEVICE, "hip", False
    return options


def modelled_rows(problems: tuple[str, ...]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for flags in problems:
        explanation, model, why = modeled(options_of(flags))
        assert model.fits, why
        (plan,) = (one.plan for one in explanation.answers if one.backend == "hip")
        assert plan is not None
        kernels = []
        for tiled, one in tiling.pairs_of(TARGET, plan, explanation.problem, model.shape):
            found = runtime_timing.kernel(one)
            assert found is not None
            kernels.append(
                {
                    "role": tiled.role,
                    "title": found.title,
                    "utilization": [e.utilization for e in found.estimates],
                    "lost": [dict(e.lost) for e in found.estimates],
                    "end_of_loop": [e.end_of_loop for e in found.estimates],
                    "lds_conflict_clocks": found.conflict_clocks,
                    "resident": found.resident,
                }
            )
        answers = runtime_timing.answers(plan, explanation.problem, model.shape, model)
        last = answers[-1]  # backward where it was asked for
        rows.append(
            {
                "flags": flags,
                "role": last.role,
                "kernels": [
                    k for k in kernels if (k["role"] == "forward") == (last.role == "forward")
                ],
                **inspect_timing.answer_as_dict(last),
            }
        )
        print(flags, [k["utilization"] for k in rows[-1]["kernels"]], inspect_timing.line(last))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--latent", action="store_true", help="latent decode alone")
    parser.add_argument("--wide", action="store_true", help="head dims above 256 alone")
    parser.add_argument("--terms", action="store_true", help="backward with score terms alone")
    options = parser.parse_args()
    for asked, name, problems in (
        (options.latent, "mi300x_latent", LATENT),
        (options.wide, "mi300x_wide", WIDE),
        (options.terms, "mi300x_terms", TERMS),
    ):
        if asked:
            results = {"what": inspect_timing.WORDS, "problems": modelled_rows(problems)}
            saved = machine.RESULTS / f"{name}.json"
            if saved.exists():  # of kernels before a change
                results |= {k: v for k, v in json.loads(saved.read_text()).items() if k == "before"}
            print("wrote", machine.save(name, results))
            return
    rows = modelled_rows(PROBLEMS)
    results = {"what": inspect_timing.WORDS, "problems": rows, "causal": causal()}
    print("wrote", machine.save("mi300x_own", results))


if __name__ == "__main__":
    main()
