"""Count registers, spills, LDS and instructions of the HIP forward kernel, without a GPU.

    python benchmarks/hip_static.py [--plain] [--save]

A row per plan: what ``pyfa compile`` and ``pyfa inspect`` show, and, where LLVM 19's llvm-objdump
and llvm-mca are installed, the share of its cycles in which llvm-mca has the matrix unit busy when
one wavefront repeats the hot loop. NOTES says what none of this knows.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import tempfile
from collections import Counter
from typing import Any

import machine as results

from pyfa.backends.hip import code, forward, plans, samples
from pyfa.cli.inspect import emulate, inspect
from pyfa.emulator.counters import MFMA_CLOCKS
from pyfa.plan import Plan

ITERATIONS = 20
SECONDS = 60  # llvm-mca 19 can spin for ever on some inputs
UNIT = 4  # clocks of a cycle of llvm-mca's model
# llvm-mca 19 aborts on loads that go directly to LDS, gives a barrier a latency of its own, and
# knows no targets of branches.
DROPPED = re.compile(r"s_barrier|s_c?branch|s_endpgm|.*\blds$")
NOTES = [
    "inspect: the busiest of MFMA, VALU+exp and LDS is taken as never idle and all others as "
    "hidden: no latency, waits, barriers, issue limits, caches, HBM, power. Nothing was measured.",
    "llvm-mca: one wavefront alone, in order; a second one on the SIMD would fill gaps. Branches, "
    "barriers and what llvm-mca does not take (all buffer loads; see `dropped`) are left out, so "
    "nothing waits for memory or for other wavefronts; v_exp_f32 takes 1 cycle of issue instead of "
    "4; LDS has a fixed latency and no conflicts. A model of one wavefront, no prediction.",
]


def tool(name: str) -> str | None:
    return shutil.which(f"{name}-19") or shutil.which(name)


def said(command: list[str], text: str = "") -> str:
    """What a command prints; nothing where it fails or does not end."""
    try:
        ended = subprocess.run(
            command, input=text, capture_output=True, text=True, timeout=SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return ""
    return ended.stdout


def listing(data: bytes) -> dict[int, str]:
    """Every instruction of a code object by its address, as llvm-mca reads it."""
    with tempfile.NamedTemporaryFile(suffix=".hsaco") as file:
        file.write(data)
        file.flush()
        text = said([str(tool("llvm-objdump")), "-d", "--mcpu=gfx942", file.name])
    found = re.findall(r"^\s+(\S.*?)\s*// ([0-9A-F]{12}):", text, re.MULTILINE)
    return {int(address, 16): instruction for instruction, address in found}


def hot_loop(plan: Plan) -> tuple[list[int], int]:
    """Addresses that the emulator ran more often on more keys, in the order of the code.

    Those with the most common difference, and how many have another: what is not run every turn.
    """
    sample = samples.of(plan)
    assert sample is not None
    short, long = (emulate(plan, sample, keys).executed for keys in (sample.short, sample.long))
    more = {pc: count - short.get(pc, 0) for pc, count in long.items()}
    more = {pc: count for pc, count in more.items() if count}
    turns = Counter(more.values()).most_common(1)[0][0]
    loop = sorted(pc for pc, count in more.items() if count == turns)
    return loop, len(more) - len(loop)


def cycles(lines: list[str]) -> float | None:
    """Cycles of one turn, of instructions that llvm-mca takes; None where it takes them not."""
    command = [str(tool("llvm-mca")), "-mtriple=amdgcn", "-mcpu=gfx942",
               f"-iterations={ITERATIONS}", "-all-views=false", "-summary-view"]  # fmt: skip
    found = re.search(r"Total Cycles:\s+(\d+)", said(command, "\n".join(lines) + "\n"))
    return int(found[1]) / ITERATIONS if found else None


def mca(plan: Plan, data: bytes) -> dict[str, Any]:
    """llvm-mca's figures of the hot loop, or why there are none."""
    if tool("llvm-objdump") is None or tool("llvm-mca") is None:
        return {"why_not": "llvm-objdump or llvm-mca is not installed"}
    text = listing(data)
    if not text:
        return {"why_not": "this llvm-objdump does not know gfx942: LLVM 17 or newer does"}
    addresses, others = hot_loop(plan)
    loop = [text[pc] for pc in addresses]
    lines = [line for line in loop if not DROPPED.match(line)]
    dropped = Counter(line.split()[0] for line in loop if DROPPED.match(line))
    turn = cycles(lines)
    if turn is None:
        # Something else that it does not take: find it by its name, one by one.
        refused = {name for name in {line.split()[0] for line in lines}
                   if cycles([next(x for x in lines if x.split()[0] == name)]) is None}  # fmt: skip
        dropped.update(line.split()[0] for line in lines if line.split()[0] in refused)
        lines = [line for line in lines if line.split()[0] not in refused]
        turn = cycles(lines)
    if turn is None:
        return {"why_not": f"no answer within {SECONDS} s", "dropped": dict(dropped)}
    busy = sum(MFMA_CLOCKS.get(line.split()[0], 0) for line in lines) / UNIT
    return {
        "instructions": len(lines),
        "not_every_turn": others,
        "cycles": round(turn, 1),
        "mfma_cycles": busy,
        "mfma_share": round(busy / turn, 3),
        "dropped": dict(dropped),
    }


def row(plan: Plan) -> dict[str, Any]:
    built = code.load(plan, plans.EMULATED)
    kernel = built.kernel
    return {
        **inspect(plan, plans.EMULATED),
        "vgprs": kernel.vgprs,
        "agprs": kernel.agprs,
        "sgprs": kernel.sgprs,
        "spills": kernel.vgpr_spills + kernel.sgpr_spills,
        "scratch_bytes": kernel.scratch_bytes,
        "lds_bytes_of_workgroup": kernel.lds_bytes,
        "code_bytes": len(built.data),
        "llvm_mca": mca(plan, built.data),
    }


def main() -> None:
    """Prints a row per plan."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--plain", action="store_true", help="only plans without score terms")
    parser.add_argument("--save", action="store_true", help="write results/hip_static.json")
    options = parser.parse_args()
    version = said([str(tool("llvm-mca")), "--version"]) if tool("llvm-mca") else ""
    found = re.search(r"LLVM version (\S+)", version)
    print(f"{'plan':<28}{'VGPR':>5}{'AGPR':>5}{'SGPR':>5}{'spills':>7}{'LDS B':>7}{'V/M':>6}"
          f"{'LDS B/clk':>10}{'conflicts':>10}{'barriers':>9}{'mca':>7}")  # fmt: skip
    rows = []
    for plan in forward.all_plans("hip"):
        if options.plain and not samples.is_plain(plan):
            continue
        data = row(plan)
        rows.append(data)
        share = data["llvm_mca"].get("mfma_share", "-")
        print(f"{data['title']:<28}{data['vgprs']:>5}{data['agprs']:>5}{data['sgprs']:>5}"
              f"{data['spills']:>7}{data['lds_bytes_of_workgroup']:>7}"
              f"{data['vector_over_mfma']:>6.2f}{data['lds_bytes_per_mfma_clock_of_cu']:>10.1f}"
              f"{data['lds_conflict_clocks']:>10.0f}{data['barriers_per_64_keys']:>9.2g}"
              f"{share:>7}", flush=True)  # fmt: skip
    for note in NOTES:
        print(note)
    if options.save:
        facts = {"llvm_mca": found[1] if found else None, "notes": NOTES, "plans": rows}
        print(results.save("hip_static", facts))


if __name__ == "__main__":
    main()
