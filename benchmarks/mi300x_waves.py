"""Compare MI300X forwards of workgroups with 8 and 4 wavefronts by the model (model, not measured).

``python benchmarks/mi300x_waves.py [--save]`` computes the time of plain forwards with the tiles of
``pyfa/backends/native/tiles/gfx942.py``, and with workgroups of 4 wavefronts, of which a compute
unit has two at a time. ``--save`` writes ``results/mi300x_waves.json``.
"""

from __future__ import annotations

import argparse
import multiprocessing

import machine
import mi300x_own

from pyfa.backends.common.calls import DTYPE_CODES, PLAIN
from pyfa.backends.hip import code, forward
from pyfa.backends.hip.plans import EMULATED, tiles_of
from pyfa.backends.native.tiles import Pair, gfx942

BFLOAT16 = DTYPE_CODES["bfloat16"]
# With 32 keys per tile at head_dim 128, two workgroups fit in the LDS of a compute unit.
FOUR = {(64, 64): gfx942.Forward(64, 4), (128, 128): gfx942.Forward(32, 4)}
PROBLEMS = tuple(
    f"--batch {batch} --seqlen {tokens} --heads {heads} --head-dim {dim}{more}"
    for dim in (64, 128)
    for batch, tokens, heads, more in (
        (1, 8192, 16, " --causal --window 128,0"),
        (1, 8192, 16, " --causal --window 512,0"),
        (1, 8192, 16, " --causal --window 1024,0"),
        (1, 8192, 16, " --causal --window 4096,0"),
        (64, 50, 12, ""),
        (64, 197, 12, ""),
        (8, 512, 16, ""),
        (1, 128, 32, " --causal"),
        (1, 512, 32, " --causal"),
        (1, 2048, 32, " --causal"),
        (16, 1024, 16, " --causal"),
        (16, 1024, 16, ""),
        (4, 4096, 16, " --causal"),
        (4, 4096, 16, ""),
        (4, 16384, 16, ""),
    )
)


def microseconds(tiles: dict[Pair, gfx942.Forward]) -> list[list[float]]:
    """The shortest and the longest time of each problem, with ``tiles`` in place of the table's."""
    gfx942.FORWARD.update(tiles)
    rows = mi300x_own.modelled_rows(PROBLEMS)
    return [sorted(1e6 * seconds for seconds in row["seconds"]) for row in rows]


def resources(pair: Pair) -> dict[str, int]:
    """What a workgroup of 4 wavefronts takes, of the plain forward in bfloat16."""
    tiles = tiles_of(EMULATED)
    mine = tiles._replace(forward={**tiles.forward, pair: FOUR[pair]})
    plan = forward._plan("emulator", mine, pair, BFLOAT16, BFLOAT16, PLAIN, False)
    kernel = code.compiled(plan, EMULATED).kernel
    return {
        **FOUR[pair]._asdict(),
        "vgprs": kernel.vgprs,
        "vgpr_spills": kernel.vgpr_spills,
        "sgpr_spills": kernel.sgpr_spills,
        "lds_bytes": kernel.lds_bytes,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    with multiprocessing.get_context("spawn").Pool(2, maxtasksperchild=1) as pool:
        eight, four = pool.map(microseconds, ({}, FOUR), chunksize=1)
    rows = [
        {"problem": flags, "us, 8 wavefronts": before, "us, 4 wavefronts": after}
        for flags, before, after in zip(PROBLEMS, eight, four, strict=True)
    ]
    if options.save:
        what = "plain forwards in bfloat16, the shortest and the longest time: model, not measured"
        taken = {str(pair[0]): resources(pair) for pair in FOUR}
        print(machine.save("mi300x_waves", {"what": what, "4 wavefronts": taken, "rows": rows}))


if __name__ == "__main__":
    main()
