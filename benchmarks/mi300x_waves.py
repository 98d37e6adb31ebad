"""Compare MI300X forwards of workgroups with 8 and 4 wavefronts by the model (model, not measured).

``python benchmarks/mi300x_waves.py [--save]`` computes the time of plain forwards in bfloat16 with
either kind of workgroup, and says which one pyfa chooses (``pyfa/backends/hip/forward.py``). Of a
packed batch, which is modeled workgroup by workgroup as in ``mi300x_packed.py``, the lengths are
drawn, with grouped heads and without. ``--save`` writes ``results/mi300x_waves.json``.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import random
from collections.abc import Iterator
from typing import Any
from unittest import mock

import machine
import mi300x_own
import mi300x_packed

from pyfa.backends.hip import code, runtime_timing
from pyfa.backends.hip.plans import EMULATED
from pyfa.backends.hip.target import TARGET
from pyfa.backends.native.tiles import Pair, gfx942
from pyfa.cli.inspect_timing import DEVICE, WORDS
from pyfa.cli.problem import modeled
from pyfa.device import by_name
from pyfa.emulator.timing import constants, device
from pyfa.plan import Plan
from pyfa.problem import Problem

PAIRS = tuple(gfx942.FORWARD_SMALL)
KINDS = (8, 4)
SEQUENCES = ((1, 8), (1, 32), (4, 32), (64, 32))  # and heads: from a small grid to a large one
HEADS = ((32, 8), (32, 32))  # of a packed batch
WINDOWS = (64, 128, 256, 512, 768, 1024, 1536, 2048, 4096)
LENGTHS = (50, 128, 197, 256, 384, 512, 577, 768, 1024, 1536, 2048, 4096)
FEW_ROWS = ((64, 2048), (128, 1024), (128, 16384), (256, 1024), (300, 1024), (300, 4096),
            (512, 1024), (512, 4096), (2048, 77))  # fmt: skip
LONGEST = (128, 256, 512, 1024, 2048, 4096)  # of a packed batch


def flag(pair: Pair) -> str:
    return str(pair[0]) if pair[0] == pair[1] else f"{pair[0]},{pair[1]}"


def problems() -> Iterator[str]:
    """The flags of each dense problem."""
    for pair, (batch, heads) in itertools.product(PAIRS, SEQUENCES):
        first = f"--batch {batch} --heads {heads} --head-dim {flag(pair)} --seqlen"
        for keys in WINDOWS:
            tokens = 4096 if batch == 64 else 8192
            yield f"{first} {tokens} --causal --window {keys - 1},0"
        for shape, mask in itertools.product(
            (*LENGTHS, *(f"{rows},{keys}" for rows, keys in FEW_ROWS)), ("", " --causal")
        ):
            if "2048,77" not in str(shape) or not mask:
                yield f"{first} {shape}{mask}"
    for pair in PAIRS:
        yield f"--batch 4 --heads 16 --head-dim {flag(pair)} --seqlen 16384"
        yield f"--batch 16 --heads 16 --head-dim {flag(pair)} --seqlen 1024 --causal"


@contextlib.contextmanager
def only(waves: int) -> Iterator[None]:
    """Give every plain forward workgroups of so many wavefronts."""
    tiles = gfx942.TILES
    small = {pair: one.tiles for pair, one in tiles.forward_small.items()} if waves == 4 else {}
    one_kind = tiles._replace(forward={**tiles.forward, **small}, forward_small={})
    with mock.patch.object(gfx942, "TILES", one_kind):
        yield


def waves_of(plan: Plan) -> int:
    return int(dict(plan.constants)["WAVES"])


def of_dense(flags: str) -> tuple[Plan, list[float]]:
    """The plan, and the shortest and the longest time in microseconds."""
    explanation, model, _ = modeled(mi300x_own.options_of(flags))
    (plan,) = (one.plan for one in explanation.answers if one.backend == "hip")
    assert plan is not None
    (answer,) = runtime_timing.answers(plan, explanation.problem, model.shape, model)
    return plan, sorted(round(1e6 * seconds, 2) for seconds in answer.seconds)


def ratio_of(times: dict[int, list[float]]) -> list[float]:
    return [round(x, 3) for x in sorted(b / a for a, b in zip(times[8], times[4], strict=True))]


def row_of(what: dict[str, Any], times: dict[int, list[float]], chosen: int) -> dict[str, Any]:
    return {
        **what,
        "us, 8 wavefronts": times[8],
        "us, 4 wavefronts": times[4],
        "ratio": ratio_of(times),
        "chosen": chosen,
    }


def dense_rows() -> Iterator[dict[str, Any]]:
    for flags in problems():
        times = {}
        for waves in KINDS:
            with only(waves):
                _, times[waves] = of_dense(flags)
        chosen, us = of_dense(flags)
        assert us == times[waves_of(chosen)]
        yield row_of({"problem": flags}, times, waves_of(chosen))


def lengths_of(kind: str, count: int, longest: int) -> list[int]:
    """Draw lengths, one of which is the longest."""
    draw = random.Random(1)

    def one() -> int:
        if kind == "equal":
            return longest
        if kind == "uniform":
            return draw.randint(1, longest)
        return max(1, min(longest, int(draw.lognormvariate(0, 0.8) * longest / 5)))

    return [longest, *(one() for _ in range(count - 1))]


def packed_problem(
    pair: Pair, count: int, longest: int, causal: bool, heads: tuple[int, int] = HEADS[0]
) -> Problem:
    group = {"gqa"} if heads[0] != heads[1] else set()
    features = {"varlen", *group, *(["causal"] if causal else [])}
    return Problem(
        batch=count, seqlen_q=longest, seqlen_k=longest, heads_q=heads[0], heads_k=heads[1],
        head_dim=pair[0], head_dim_v=pair[1], dtype="bfloat16", features=frozenset(features),
        device=by_name(DEVICE), square=True,
    ).bucketed()  # fmt: skip


def with_bytes(
    launch: device.Launch, plan: Plan, pair: Pair, lengths: list[int], heads: tuple[int, int],
    causal: bool,
) -> device.Launch:  # fmt: skip
    """``launch`` with the bytes of a batch whose K and V no cache holds from one row block to the
    next: only the query heads of a KV head, side by side, share them."""
    block = TARGET.block_of(plan)
    keys = block.keys * sum(
        mi300x_packed.tiles_of(number, block.rows, length, block.keys, False, causal)
        for length in lengths
        for number in range(-(-length // block.rows))
    )
    of_keys, others = 2 * sum(pair) * keys, sum(lengths) * heads[0] * (2 * sum(pair) + 4)
    return dataclasses.replace(
        launch, dram_bytes=of_keys * heads[1] + others, l2_bytes=of_keys * heads[0] + others
    )


def packed_rows() -> Iterator[dict[str, Any]]:
    for pair in PAIRS:
        kinds = {}
        for waves in KINDS:
            with only(waves):
                plan = TARGET.forward_plan("hip", packed_problem(pair, 64, 128, False))
            kinds[waves] = plan, mi300x_packed.kinds_of(plan, pair)
        for causal, longest, kind, count, heads in itertools.product(
            (False, True), LONGEST, ("equal", "uniform", "lognormal"), (16, 64), HEADS
        ):
            lengths, times, uncached = lengths_of(kind, count, longest), {}, {}
            for waves, (plan, costs) in kinds.items():
                launches = [
                    mi300x_packed.launches(plan, one, lengths, *heads, causal)[1] for one in costs
                ]
                loading = [with_bytes(one, plan, pair, lengths, heads, causal) for one in launches]
                times[waves], uncached[waves] = (
                    sorted(
                        round(1e6 * device.time([one], end).seconds, 2)
                        for one, end in zip(some, constants.ends(), strict=True)
                    )
                    for some in (launches, loading)
                )
            what = {
                "head_dim": flag(pair), "heads": heads, "causal": causal, "sequences": count,
                "lengths": kind, "longest": longest,
            }  # fmt: skip
            asked = packed_problem(pair, count, longest, causal, heads)
            chosen = waves_of(TARGET.forward_plan("hip", asked))
            yield row_of(what, times, chosen) | {"ratio, uncached": ratio_of(uncached)}


def resources(pair: Pair) -> dict[str, int]:
    """What a workgroup of 4 wavefronts takes, of the plain forward in bfloat16."""
    plan, _ = of_dense(f"--seqlen 128 --head-dim {flag(pair)}")
    kernel = code.load(plan, EMULATED).kernel
    return {
        **gfx942.FORWARD_SMALL[pair].tiles._asdict(),
        "vgprs": kernel.vgprs,
        "vgpr_spills": kernel.vgpr_spills,
        "sgpr_spills": kernel.sgpr_spills,
        "lds_bytes": kernel.lds_bytes,
    }


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The ratios of the calls that use 4 wavefronts, and of the others."""
    found = {}
    for waves in KINDS:
        mine = [row["ratio"] for row in rows if row["chosen"] == waves]
        every = [ratio for both in mine for ratio in both]
        found[f"{waves} wavefronts"] = {
            "problems": len(mine),
            "ratio": [min(every), round(sum(every) / len(every), 3), max(every)],
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    rows = {"dense": list(dense_rows()), "packed": list(packed_rows())}
    results = {
        "what": "plain forwards in bfloat16, the shortest and the longest time; ratio: of 4 "
        "wavefronts to 8, and of the chosen kinds the least, mean and largest; uncached: with all "
        f"bytes of K and V from HBM for each row block of a packed batch: {WORDS}",
        "4 wavefronts": {flag(pair): resources(pair) for pair in PAIRS},
        "chosen": {name: summary(some) for name, some in rows.items()},
        "rows": rows["dense"],
        "packed": rows["packed"],
    }
    print(results["chosen"])
    if options.save:
        print(machine.save("mi300x_waves", results))


if __name__ == "__main__":
    main()
