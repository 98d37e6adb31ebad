"""``pyfa compile``: builds code objects without a GPU, and the bundle of a wheel."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import compile_cuda, planned, usage
from .console import print_json, print_table, progress

if TYPE_CHECKING:
    from ..conformance.cases import Case
    from ..plan import Plan


def add(commands: Any) -> None:
    """Add the command to argparse's ``commands``."""
    parser = usage.command(
        commands,
        "compile",
        "build code objects without a GPU",
        "Build the common plans' code objects for an arch, without a GPU. For each kernel: "
        "registers, spills, LDS or shared memory, and how many of its workgroups fit on a compute "
        "unit (SM). What is compiled goes to the cache, for later runs.",
        "pyfa compile --arch gfx942 --out objects",
        "pyfa compile --arch sm_90 --all",
    )
    parser.add_argument(
        "--arch", required=True, metavar="A[,B]", help="archs, such as gfx942 or sm_80,sm_86"
    )
    parser.add_argument(
        "--all", action="store_true", help="build every plan (default: those a wheel carries)"
    )
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="write the code objects to this folder"
    )
    parser.add_argument(
        "--bundle",
        action="store_true",
        help="write the bundle that a wheel carries, after checking each code object's wait "
        "states and running the conformance suite on it in the emulator",
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
    if options.bundle and archs != [of_hip.EMULATED]:
        raise ValueError(f"--bundle: expected --arch {of_hip.EMULATED}")
    built = []
    for arch in archs:
        build = compile_cuda.build if arch in of_cuda.TILED else _build
        built += build(arch, options.all)
    if options.out is not None:
        _write(options.out, built)
    failed = _faults(built)
    if options.bundle and not failed:
        failed = _bundle(built)
    for each in failed:
        print(f"pyfa compile: {each}", file=sys.stderr)
    if options.json:
        hidden = ("data", "key", "faults")
        facts = [{k: v for k, v in row.items() if k not in hidden} for row in built]
        print_json("compile", {"objects": facts, "failed": failed})
    else:
        for columns in (_COLUMNS, compile_cuda.COLUMNS):
            found = [row for row in built if set(columns) <= set(row)]
            rows = [_cells(row, columns, options.verbose) for row in found]
            if rows:
                print_table(["kernel", "plan", "arch", *columns.values(), "sha256"], rows)
    return 1 if failed else 0


# What the report says of a kernel, and its heading.
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


def _build(arch: str, every: bool) -> list[dict[str, Any]]:
    from ..backends.hip.target import TARGET
    from ..backends.native import catalog

    wanted = (catalog.all_plans if every else catalog.common_plans)(TARGET, arch)
    rows = []
    # The compiler runs in processes of its own.
    with progress("compiling") as show, ThreadPoolExecutor(os.cpu_count()) as pool:
        for done, row in enumerate(pool.map(partial(_row, arch), wanted)):
            show(done + 1, len(wanted), row["plan"])
            rows.append(row)
    return rows


def _row(arch: str, plan: Plan) -> dict[str, Any]:
    from ..backends.hip import code, runtime_hazards

    made = code.compiled(plan, arch)
    kernel, data = made.kernel, made.data
    faults = runtime_hazards.faults(data)
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


def _file(row: dict[str, Any]) -> str:
    suffix = "cubin" if row["arch"].startswith("sm_") else "hsaco"
    return f"{row['kernel']}-{row['arch']}-{row['sha256'][:16]}.{suffix}"


def _write(folder: Path, rows: list[dict[str, Any]]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for row in rows:
        (folder / _file(row)).write_bytes(row["data"])


def _bundle(rows: list[dict[str, Any]]) -> list[str]:
    """Write the bundle and verify it; return the names of the conformance cases that failed.

    The emulator runs the files that were written, and the manifest lists for each digest the cases
    that it passed. If a case fails, the bundle is removed.
    """
    from .. import bundle

    shutil.rmtree(bundle.FOLDER, ignore_errors=True)
    _write(bundle.FOLDER, rows)
    objects = {
        row["key"]: {
            "file": _file(row),
            "sha256": row["sha256"],
            "arch": row["arch"],
            "plan": row["plan"],
            "emulated": [],
        }
        for row in rows
    }
    _write_manifest(objects)
    passed, failed = _emulate()
    for entry in objects.values():
        entry["emulated"] = passed.get(entry["sha256"], [])
    unproved = [entry["plan"] for entry in objects.values() if not entry["emulated"]]
    failed += [f"no case ran {plan}" for plan in unproved]
    if failed:
        shutil.rmtree(bundle.FOLDER)
    else:
        _write_manifest(objects)
    return failed


def _write_manifest(objects: dict[str, dict[str, Any]]) -> None:
    from .. import bundle
    from ..backends.hip import code, compiler

    manifest = {"schema": bundle.SCHEMA, "compiler": compiler.PINNED, "objects": objects}
    text = json.dumps(manifest, indent=1, sort_keys=True)
    (bundle.FOLDER / "manifest.json").write_text(text + "\n")
    bundle.manifest.cache_clear()
    code.load.cache_clear()


def _is_common(case: Case) -> bool:
    """Return whether ``case`` needs only the plans that the wheel bundles (head_dim 64 and 128, no
    dropout, no pages in prefill)."""
    from ..backends.native.plans import COMMON_HEAD_DIMS

    return (
        case.head_dim == case.head_dim_v in COMMON_HEAD_DIMS
        and not case.dropout_p
        and not case.page_size
    )


def _emulate() -> tuple[dict[str, list[str]], list[str]]:
    """Run the full suite's common cases in the emulator; return the passed ones by digest, and the
    failed ones."""
    from ..backends import BACKENDS
    from ..backends.hip.backend import HipBackend
    from ..conformance import grid, report, runner

    emulator = BACKENDS["emulator"]
    assert isinstance(emulator, HipBackend)
    suite = grid.cases("full", emulator.FEATURES, emulator.DTYPES)
    cases = [case for case in suite if _is_common(case)]
    passed: dict[str, list[str]] = {}
    failed = []
    with progress("emulating") as show:
        for done, case in enumerate(cases):
            show(done, len(cases), case.name)
            emulator.launch.digests.clear()
            result = runner.run_case(emulator, case, runner.device_of("emulator"))
            if result.status == report.PASSED:
                for digest in emulator.launch.digests.values():
                    passed.setdefault(digest, []).append(case.name)
            elif result.status in (report.FAILED, report.CRASHED):
                failed.append(case.name)
    return passed, failed
