"""What the MI300X timing model says of pyfa's own kernels: a model, not measured.

python benchmarks/mi300x_own.py        # writes results/mi300x_own.json
"""

from __future__ import annotations

import argparse
from typing import Any

import machine

from pyfa.backends.hip import runtime_timing
from pyfa.backends.hip.target import TARGET
from pyfa.backends.native import tiling
from pyfa.cli import inspect_timing, problem
from pyfa.cli.problem import modelled

LONG = "--batch 4 --seqlen 16384 --heads 16"
PROBLEMS = (
    *(f"{LONG} --head-dim {dim}" for dim in ("64", "96", "128", "192,128", "192", "256")),
    *(f"{LONG} --head-dim {dim} --causal" for dim in ("64", "128")),
    *(f"{LONG} --head-dim {dim} --dtype float8_e4m3fnuz" for dim in ("128", "256")),
    *(f"{LONG} --head-dim {dim} --features backward" for dim in ("64", "128")),
    "--batch 16 --seqlen 1,32768 --heads 32,8 --head-dim 128",
)


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    rows: list[dict[str, Any]] = []
    for flags in PROBLEMS:
        parser = argparse.ArgumentParser()
        problem.add_flags(parser)
        options = parser.parse_args(flags.split())
        options.device, options.backend, options.compile = inspect_timing.DEVICE, "hip", False
        explanation, model, why = modelled(options)
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
                    "utilisation": [e.utilisation for e in found.estimates],
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
        print(flags, [k["utilisation"] for k in rows[-1]["kernels"]], inspect_timing.line(last))
    print("wrote", machine.save("mi300x_own", {"what": inspect_timing.WORDS, "problems": rows}))


if __name__ == "__main__":
    main()
