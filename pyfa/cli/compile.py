"""``pyfa compile``: builds code objects without a GPU."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
from collections.abc import Callable, Collection
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import CodeObjectError, CompileError
from . import bundling, planned, usage
from .console import print_json, print_table, progress

if TYPE_CHECKING:
    from ..plan import Plan


def add(commands: Any) -> None:
    """Add the command to argparse's ``commands``."""
    parser = usage.command(
        commands,
        "compile",
        "build code objects without a GPU",
        "Compile the most common kernels for an arch, without a GPU. For each kernel, print "
        "registers, spills, LDS or shared memory, and how many workgroups fit on a compute unit "
        "(SM). The compiled code stays in the cache for later runs.",
        "pyfa compile --arch gfx942 --out objects",
        "pyfa compile --arch sm_90 --all",
        "pyfa compile --arch gfx942,sm_80,sm_90 --head-dim 128 --bundle",
    )
    parser.add_argument(
        "--arch", required=True, metavar="A[,B]", help="archs, such as gfx942 or sm_80,sm_86"
    )
    parser.add_argument(
        "--all", action="store_true", help="build every plan (default: those that most calls need)"
    )
    parser.add_argument(
        "--head-dim",
        type=_head_dims,
        default=(),
        metavar="D[,D]",
        help="only plans for these head dims (default: 64,128; with --all every one)",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="write each code object to this folder as soon as it is built; an interrupted run "
        "resumes with the cache and this folder",
    )
    parser.add_argument(
        "--bundle",
        action="store_true",
        help="check the wait states of each code object for gfx942, write the bundle for a wheel, "
        "and run the conformance suite on it in the emulator; if a case fails, remove the bundle",
    )
    parser.add_argument(
        "--resume",
        type=Path,
        metavar="FILE",
        help="with --bundle: record in FILE which cases passed in the emulator, and skip cases "
        "that an earlier run of the same sources recorded",
    )
    planned.add_flag(parser)
    usage.add_json(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run the command; status 0 if every plan was built without a fault and, if requested,
    emulated."""
    from ..backends.cuda import plans as of_cuda
    from ..backends.hip import plans as of_hip

    archs = options.arch.split(",")
    known = (*of_hip.ARCHS, *of_cuda.TILED)
    for arch in archs:
        if arch not in known:
            raise ValueError(f"--arch: expected one of {', '.join(known)}; got {arch}")
    if options.bundle and any(arch in of_hip.ARCHS for arch in archs):
        _refuse_another_compiler()
    built, failed, left_out = list[dict[str, Any]](), list[str](), list[str]()
    for arch in archs:
        made, refused = build(arch, options.all, options.head_dim, options.out)
        built += made
        failed += refused
    failed += _faults(built)
    if options.bundle and not failed:
        failed, left_out = bundling.bundle(built, options.all, options.head_dim, options.resume)
    for plan in left_out:
        print(f"pyfa compile: left out of the bundle: no case ran {plan}", file=sys.stderr)
    for each in failed:
        print(f"pyfa compile: {each}", file=sys.stderr)
    if options.json:
        hidden = ("data", "key", "faults", "bundled")
        facts = [{k: v for k, v in row.items() if k not in hidden} for row in built]
        print_json("compile", {"objects": facts, "failed": failed, "left_out": left_out})
    else:
        for columns in (_COLUMNS, _CUDA_COLUMNS):
            found = [row for row in built if set(columns) <= set(row)]
            rows = [_cells(row, columns, options.verbose) for row in found]
            if rows:
                print_table(["kernel", "plan", "arch", *columns.values(), "sha256"], rows)
    return 1 if failed else 0


def _refuse_another_compiler() -> None:
    """Raise ``ValueError`` unless ziglang is the pinned one: bundled code is found by its name."""
    from ..backends.hip import compiler

    if compiler.why_unavailable() is None and compiler.version() != compiler.PINNED:
        raise ValueError(f"--bundle: expected {compiler.PINNED}; got {compiler.version()}")


# The report's columns for a kernel, and their headings.
_COLUMNS = {
    "vgprs": "VGPR",
    "agprs": "AGPR",
    "sgprs": "SGPR",
    "spills": "spills",
    "scratch_bytes": "scratch B",
    "lds_bytes": "LDS B",
    "kernarg_bytes": "kernarg B",
    "waves_per_simd": "waves/SIMD",
    "hazards": "hazards",
}
_CUDA_COLUMNS = {
    "registers": "registers",
    "stack_bytes": "stack B",
    "shared_bytes": "shared B",
    "blocks_per_sm": "blocks/SM",
}


def _head_dims(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected head dims such as 64,128, got {text}") from None


def build(
    arch: str, every: bool, head_dims: Collection[int], out: Path | None = None
) -> tuple[list[dict[str, Any]], list[str]]:
    """Build every plan of ``arch``, or only the common ones. If ``head_dims`` is not empty, build
    only plans for these head dims. Return a row for each plan that was built, and why the others
    failed. Unless ``out`` is None, write each code object to this folder as soon as it is built."""
    from ..backends.cuda import plans
    from ..backends.cuda.target import TARGET as CUDA
    from ..backends.hip.target import TARGET as HIP
    from ..backends.native import catalog

    pool: Executor
    if arch in plans.TILED:  # NVRTC compiles one program at a time in a process
        spawning = multiprocessing.get_context("spawn")
        target, row, pool = CUDA, cuda_row, ProcessPoolExecutor(os.cpu_count(), spawning)
    else:  # the HIP compiler runs in separate processes
        target, row, pool = HIP, _row, ThreadPoolExecutor(os.cpu_count())
    wanted = catalog.chosen_plans(target, arch, every, head_dims)
    rows, failed = [], []
    with progress("compiling") as show, pool:
        for done, made in enumerate(pool.map(partial(_written, out, row, arch), wanted)):
            show(done + 1, len(wanted), str(wanted[done]))
            if isinstance(made, str):
                failed.append(made)
            else:
                rows.append(made)
    return rows, failed


def _written(
    out: Path | None, row: Callable[[str, Plan], dict[str, Any]], arch: str, plan: Plan
) -> dict[str, Any] | str:
    """Build ``plan`` and return its row of the report. Unless ``out`` is None, write the code
    object to this folder. If the build fails, return the reason instead of raising, so that the
    other plans are still built. This runs in the pool, so each code object is written as soon as it
    is built, even if plans earlier in the list take longer."""
    try:
        made = row(arch, plan)
    except (CodeObjectError, CompileError) as error:
        return str(error)
    if out is not None:
        bundling.write(out, [made])
    return made


def _row(arch: str, plan: Plan) -> dict[str, Any]:
    from ..backends.hip import code, compiler, runtime_emulator

    made = code.compiled(plan, arch)
    kernel, data = made.kernel, made.data
    faults = runtime_emulator.faults(data)
    return {
        "kernel": kernel.name,
        "constants": dict(plan.constants),
        "plan": str(plan),
        "arch": arch,
        "vgprs": kernel.vgprs,
        "agprs": kernel.agprs,
        "sgprs": kernel.sgprs,
        "spills": kernel.vgpr_spills + kernel.sgpr_spills,
        "scratch_bytes": kernel.scratch_bytes,
        "lds_bytes": kernel.lds_bytes,
        "kernarg_bytes": kernel.kernarg_bytes,
        "waves_per_simd": _waves(kernel.vgprs),
        "hazards": len(faults),
        "faults": faults,
        "sha256": made.digest,
        "key": code.key_of(plan, arch),
        "data": data,
        "bundled": {"arch": arch, "compiler": compiler.version(), "kernel": asdict(kernel)},
    }


def cuda_row(arch: str, plan: Plan) -> dict[str, Any]:
    """Return the resources of ``plan`` on ``arch``, of NVIDIA's."""
    from ..backends.cuda import code, plans, runtime_compiler

    target = plans.compiled_for(arch, plan)
    made = code.compiled(plan, target)
    shared = made.kernel.shared_bytes + plans.shared_bytes(plan)
    return {
        "kernel": made.kernel.name,
        "constants": dict(plan.constants),
        "plan": str(plan),
        "arch": arch,
        "registers": made.kernel.registers,
        "stack_bytes": made.kernel.stack_bytes,
        "shared_bytes": shared,
        "blocks_per_sm": plans.blocks_per_sm(plan, arch, made.kernel.registers, shared),
        "sha256": made.digest,
        "key": code.key_of(plan, target),
        "data": made.data,
        "bundled": {"arch": target, "compiler": runtime_compiler.version()},
    }


def _faults(rows: list[dict[str, Any]]) -> list[str]:
    """Return errors that could give wrong results on a GPU: instructions closer together than
    gfx942 allows."""
    return [f"{row['plan']}: {fault}" for row in rows for fault in row.get("faults", ())]


def _waves(registers: int) -> int:
    """Return how many wavefronts fit on a SIMD by their registers: 512, allocated in steps of 8; at
    most 8."""
    return min(8, 512 // max(8, -(-registers // 8) * 8))


def _cells(row: dict[str, Any], columns: dict[str, str], verbose: bool) -> list[str]:
    told = (planned.text if verbose else planned.words)(row["constants"])
    figures = [str(row[name]) for name in columns]
    return [row["kernel"], told, row["arch"], *figures, row["sha256"][:16]]
