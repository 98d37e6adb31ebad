"""``pyfa compile --bundle``: writes a wheel's bundle, and verifies what the emulator can run."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import shutil
from collections.abc import Collection, Iterator
from concurrent.futures import Executor, ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .console import progress

if TYPE_CHECKING:
    from ..conformance.cases import Case


def write(folder: Path, rows: list[dict[str, Any]]) -> None:
    """Write the code objects of ``rows`` to ``folder``, each under its name only when it is whole.
    Files that are there and equal are not touched."""
    folder.mkdir(parents=True, exist_ok=True)
    for row in rows:
        path = folder / _file(row)
        if path.is_file() and path.read_bytes() == row["data"]:
            continue
        # Named by the key, because two plans with equal code may be written at the same time. Files
        # that a killed process left are overwritten.
        part = folder / f".{row['key']}.part"
        part.write_bytes(row["data"])
        os.replace(part, path)


class Notes:
    """The cases that passed in the emulator, each with the digests of the code it ran, by name.

    If ``path`` is given, each case is written there as soon as it has passed, so that an
    interrupted build can resume. Notes of other sources, or of another torch, are not used.
    """

    def __init__(self, path: Path | None) -> None:
        self.passed: dict[str, list[str]] = {}
        self._path = path
        if path is None:
            return
        of = _of_sources()
        lines = path.read_text().splitlines() if path.is_file() else []
        if lines[:1] == [of]:
            whole = (line for line in lines[1:] if line.endswith("]"))  # not the end of a kill
            self.passed = dict(map(json.loads, whole))
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = [of, *(json.dumps(item) for item in self.passed.items())]
        path.write_text("\n".join(kept) + "\n")

    def add(self, name: str, digests: list[str]) -> None:
        self.passed[name] = digests
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(json.dumps([name, digests]) + "\n")


def _of_sources() -> str:
    """Return a digest of the package, the kernels and the version of torch."""
    import torch

    from .. import bundle, sources

    digest = hashlib.sha256(torch.__version__.encode())
    for folder in (Path(bundle.__file__).parent, sources.directory()):
        for path in sorted(folder.rglob("*.[pch]*")):
            name = path.relative_to(folder)
            if path.is_file() and not {"__pycache__", "_bundle"} & set(name.parts):
                digest.update(f"{name} {hashlib.sha256(path.read_bytes()).hexdigest()}".encode())
    return digest.hexdigest()


def bundle(
    rows: list[dict[str, Any]],
    every: bool,
    head_dims: Collection[int],
    notes: Path | None = None,
) -> tuple[list[str], list[str]]:
    """Write the bundle. Return the names of the conformance cases that failed, and the plans that
    are left out. ``notes``: see ``Notes``.

    The emulator runs the bundle's files for gfx942, and the manifest lists the cases that each
    digest passed. If a case fails, the bundle is removed. If ``every`` plan was requested, a plan
    that no case ran is left out. Otherwise such a plan counts as a failure.
    """
    from .. import bundle

    shutil.rmtree(bundle.FOLDER, ignore_errors=True)
    write(bundle.FOLDER, rows)
    objects = {
        row["key"]: {
            "file": _file(row),
            "sha256": row["sha256"],
            "plan": row["plan"],
            "emulated": [],
            **row["bundled"],
        }
        for row in rows
    }
    _write_manifest(objects)
    emulated = {key: entry for key, entry in objects.items() if _is_emulated(entry)}
    try:
        passed, failed = _emulate(every, head_dims, Notes(notes)) if emulated else ({}, [])
    except BaseException:  # an interrupt, too: what was not emulated must not be found
        shutil.rmtree(bundle.FOLDER, ignore_errors=True)
        raise
    for entry in emulated.values():
        entry["emulated"] = passed.get(entry["sha256"], [])
    unproved = {key: entry for key, entry in emulated.items() if not entry["emulated"]}
    if not every:
        failed += [f"no case ran {entry['plan']}" for entry in unproved.values()]
    if failed:
        shutil.rmtree(bundle.FOLDER)
        return failed, []
    kept = {key: entry for key, entry in objects.items() if key not in unproved}
    files = {entry["file"] for entry in kept.values()}
    for entry in unproved.values():
        if entry["file"] not in files:
            (bundle.FOLDER / entry["file"]).unlink(missing_ok=True)
    _write_manifest(kept)
    return [], [entry["plan"] for entry in unproved.values()]


def _file(row: dict[str, Any]) -> str:
    arch = row["bundled"]["arch"]
    suffix = "cubin" if arch.startswith("sm_") else "hsaco"
    return f"{row['kernel']}-{arch}-{row['sha256'][:16]}.{suffix}"


def _is_emulated(entry: dict[str, Any]) -> bool:
    from ..backends.hip import plans

    return bool(entry["arch"] == plans.EMULATED)


def _write_manifest(objects: dict[str, dict[str, Any]]) -> None:
    from .. import bundle
    from ..backends.cuda import code as of_cuda
    from ..backends.hip import code as of_hip

    manifest = {"schema": bundle.SCHEMA, "objects": objects}
    text = json.dumps(manifest, indent=1, sort_keys=True)
    (bundle.FOLDER / "manifest.json").write_text(text + "\n")
    bundle.manifest.cache_clear()
    of_hip.load.cache_clear()
    of_cuda.load.cache_clear()


def _is_wanted(case: Case, every: bool, head_dims: Collection[int]) -> bool:
    """Return whether ``case`` can run a plan of the bundle. Unless it has ``every`` plan, it has
    those without dropout and without pages in prefill."""
    from ..backends.native.plans import COMMON_HEAD_DIMS

    if every:
        return not head_dims or case.head_dim <= max(head_dims)
    return (
        case.head_dim == case.head_dim_v
        and case.head_dim in (head_dims or COMMON_HEAD_DIMS)
        and not case.dropout_p
        and not case.page_size
    )


def _emulate(
    every: bool, head_dims: Collection[int], notes: Notes
) -> tuple[dict[str, list[str]], list[str]]:
    """Run the full suite's cases for the bundle in the emulator, except those in ``notes``. Return
    the passed cases by digest, and the failed ones."""
    from ..backends import BACKENDS
    from ..conformance import grid, report

    emulator = BACKENDS["emulator"]
    suite = grid.cases("full", emulator.FEATURES, emulator.DTYPES)
    wanted = {case.name: case for case in suite if _is_wanted(case, every, head_dims)}
    failed = []
    with progress("emulating") as show, _pool() as pool:
        left = [case for name, case in wanted.items() if name not in notes.passed]
        running = {pool.submit(_digests, case): case.name for case in left}
        known = len(wanted) - len(left)
        for done, future in enumerate(as_completed(running)):
            name, (status, digests) = running[future], future.result()
            show(known + done + 1, len(wanted), name)
            if status == report.PASSED:
                notes.add(name, digests)
            elif status in (report.FAILED, report.CRASHED):
                failed.append(name)
    passed: dict[str, list[str]] = {}
    for name in wanted:
        for digest in notes.passed.get(name, ()):
            passed.setdefault(digest, []).append(name)
    return passed, failed


@contextmanager
def _pool() -> Iterator[Executor]:
    """Yield a pool with a process for each core: a bundle of every plan runs all 4,200 cases."""
    spawning = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(os.cpu_count(), spawning, initializer=_without_compiler)
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


def _without_compiler() -> None:
    """Make this process use only the bundle and no compiler, as on the machine of a wheel's user.

    A case is refused if it needs code that is not in the bundle, such as that of a mod. Compiling
    it took 20 s, and emulating a case takes 0.1 s.
    """
    import torch

    from ..backends.hip import compiler

    torch.set_num_threads(1)
    compiler.why_unavailable = lambda: "only bundled code is run"


def _digests(case: Case) -> tuple[str, list[str]]:
    """Run ``case`` in the emulator; return its status and the digests of the code that it ran."""
    from ..backends import BACKENDS
    from ..backends.hip.backend import HipBackend
    from ..conformance import runner

    emulator = BACKENDS["emulator"]
    assert isinstance(emulator, HipBackend)
    emulator.launch.digests.clear()
    result = runner.run_case(emulator, case, runner.device_of("emulator"))
    return result.status, sorted(emulator.launch.digests.values())
