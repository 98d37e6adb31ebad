"""Packages that call pyfa under flash-attention's names: ``flash_attn``, ``flash_attn_3`` and
``flash_attn_4``.

They are for programs and libraries that import ``flash_attn``, ``flash_attn_interface`` or
``flash_attn.cute``, or look up the packages with ``importlib.metadata``, on machines without
flash-attention. Each package is its own distribution, with a dist-info that records its installer
(``INSTALLER``) and its files (``RECORD``, with digests). Existing packages are never overwritten.
Only files that this module wrote, unchanged, are ever removed.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import importlib.metadata
import importlib.util
import io
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from .. import __version__

_INSTALLER = "pyfa"


class ShimError(Exception):
    """Another package occupies the shim's place, or the shim's files were changed."""


@dataclass(frozen=True)
class Distribution:
    """One package: the version of the interface, and each file's source in ``pyfa.compat``.

    ``short`` is its short name, such as fa2.
    """

    short: str
    name: str
    interface: str
    modules: Mapping[str, str]

    @property
    def version(self) -> str:
        return f"{self.interface}+pyfa.{__version__}"

    @property
    def dist_info(self) -> str:
        return f"{self.name}-{self.version}.dist-info"

    @property
    def roots(self) -> list[str]:
        """Return the top-level names that Python imports: folders, or modules at the top."""
        return sorted({PurePosixPath(path).parts[0].removesuffix(".py") for path in self.modules})

    def contents(self) -> dict[str, str]:
        """Return every file except RECORD, by its path."""
        metadata = (
            f"Metadata-Version: 2.1\nName: {self.name}\nVersion: {self.version}\n"
            "Summary: flash-attention's interface on pyfa's kernels, written by `pyfa compat`\n"
        )
        return {
            f"{self.dist_info}/INSTALLER": f"{_INSTALLER}\n",
            f"{self.dist_info}/METADATA": metadata,
            f"{self.dist_info}/WHEEL": (
                f"Wheel-Version: 1.0\nGenerator: pyfa {__version__}\n"
                "Root-Is-Purelib: true\nTag: py3-none-any\n"
            ),
            f"{self.dist_info}/top_level.txt": "".join(f"{root}\n" for root in self.roots),
            **{path: self._source(path) for path in self.modules},
        }

    def _source(self, path: str) -> str:
        lines = [f'"""Written by `pyfa compat install`: {self.name} on pyfa\'s kernels."""', ""]
        if self.modules[path]:
            lines += [f"from pyfa.compat.{self.modules[path]} import *"]
            lines += [f"from . import {name}" for name in self._inside(path)]
            lines += [""]
        return "\n".join([*lines, f'__version__ = "{self.version}"', ""])

    def _inside(self, path: str) -> list[str]:
        """Return the submodules of a package that are available once flash-attention's package is
        imported."""
        if not path.endswith("/__init__.py"):
            return []
        folder = PurePosixPath(path).parent
        found = (PurePosixPath(each) for each in self.modules)
        return sorted(each.stem for each in found if each.parent == folder and str(each) != path)


DISTRIBUTIONS = (
    Distribution(
        "fa2",
        "flash_attn",
        # The last release. TransformerEngine 2.20 takes none from 2.8.4 on.
        "2.8.3",
        {
            "flash_attn/__init__.py": "fa2",
            "flash_attn/flash_attn_interface.py": "fa2_interface",
            "flash_attn/bert_padding.py": "bert_padding",
            "flash_attn/layers/__init__.py": "",
            "flash_attn/layers/rotary.py": "rotary",
            "flash_attn/ops/__init__.py": "",
            "flash_attn/ops/triton/__init__.py": "",
            "flash_attn/ops/triton/rotary.py": "rotary",
            "flash_attn_2_cuda.py": "fa2_extension",
        },
    ),
    Distribution(
        "fa3",
        "flash_attn_3",
        "3.0.0",
        {
            "flash_attn_interface.py": "fa3_interface",
            "flash_attn_3/__init__.py": "",
            "flash_attn_3/_C.py": "fa3_extension",
            "flash_attn_3/flash_attn_interface.py": "fa3_interface",
        },
    ),
    Distribution(
        "fa4",
        "flash_attn_4",
        "4.0.0",
        {
            "flash_attn/cute/__init__.py": "fa4",
            "flash_attn/cute/interface.py": "fa4_interface",
            "flash_attn/cute/block_sparsity.py": "fa4_blocks",
            "flash_attn/cute/compute_block_sparsity.py": "fa4_blocks",
        },
    ),
)


class Status(NamedTuple):
    """One distribution in a folder. Its ``state`` is absent, installed, outdated, changed or
    foreign."""

    name: str
    state: str
    version: str | None = None
    where: str | None = None


def purelib() -> Path:
    """Return the running environment's folder of pure Python packages."""
    return Path(sysconfig.get_path("purelib"))


def chosen(only: Sequence[str] = ()) -> tuple[Distribution, ...]:
    """Return the distributions whose short names (fa2, fa3, fa4) are in ``only``; all of them if
    ``only`` is empty."""
    return tuple(each for each in DISTRIBUTIONS if not only or each.short in only)


def status(target: Path | None = None, only: Sequence[str] = ()) -> list[Status]:
    """Return the state of each distribution, in ``target`` or wherever Python finds it."""
    return [_status_of(each, target) for each in chosen(only)]


def install(target: Path | None = None, only: Sequence[str] = ()) -> list[Status]:
    """Write missing packages into ``target`` (default: ``purelib()``); return the state afterwards.

    With ``only``, a collection of short names, only these packages are written; the others stay as
    they are. Raises ``ShimError``, before anything is written, if Python finds another package with
    one of these names, or if the shim's own files were changed.
    """
    folder = target or purelib()
    found = status(target, only)
    for each in found:
        if each.state == "foreign":
            raise ShimError(
                f"{each.name} is installed already ({each.where}) and is never overwritten; "
                "import pyfa.compat instead, or uninstall it first"
            )
    _refuse_changed(folder, only)
    for package, now in zip(chosen(only), found, strict=True):
        if now.state == "outdated":
            _remove(folder, package)
        if now.state != "installed":
            _write(folder, package)
    importlib.invalidate_caches()
    return status(target, only)


def remove(target: Path | None = None, only: Sequence[str] = ()) -> list[Status]:
    """Remove what ``install`` wrote into ``target`` (default: ``purelib()``), and nothing else.

    Raises ``ShimError``, before anything is removed, if a file of the shim was changed. Returns the
    state before.
    """
    folder = target or purelib()
    _refuse_changed(folder, only)
    found = [each for each in status(target, only) if each.state in ("installed", "outdated")]
    for package in chosen(only):
        _remove(folder, package)
    importlib.invalidate_caches()
    return found


def _status_of(each: Distribution, target: Path | None) -> Status:
    folder = target or purelib()
    mine = _dist_info(folder, each)
    if mine is not None:
        state = "installed" if mine.name == each.dist_info else "outdated"
        if any(not path.is_file() for path in _record(folder, mine)):
            state = "outdated"  # writing it was interrupted
        if _changed(folder, mine):
            state = "changed"
        version = mine.name.removeprefix(f"{each.name}-").removesuffix(".dist-info")
        return Status(each.name, state, version, str(folder))
    where = _in_the_way(each, folder) or (_elsewhere(each, folder) if target is None else None)
    return Status(each.name, "foreign" if where else "absent", None, where)


def _in_the_way(each: Distribution, folder: Path) -> str | None:
    """Return a path in ``folder`` that has the distribution's name or the name of one of its
    files."""
    names = (info for info in folder.glob("*.dist-info") if _named(info, each))
    paths = (folder / path for path in each.modules if (folder / path).exists())
    return next((str(path) for path in (*names, *paths)), None)


def _named(info: Path, each: Distribution) -> bool:
    name = info.name.split("-")[0]
    return name.lower().replace(".", "_") == each.name


def _elsewhere(each: Distribution, folder: Path) -> str | None:
    """Return where Python finds such a package outside ``folder``."""
    for root in each.roots:
        spec = importlib.util.find_spec(root)
        if spec is not None:
            for place in spec.submodule_search_locations or [spec.origin or ""]:
                if Path(place).resolve().parent != folder.resolve():
                    return place
    try:
        found = str(importlib.metadata.distribution(each.name).locate_file(""))
    except importlib.metadata.PackageNotFoundError:
        return None
    return None if Path(found).resolve() == folder.resolve() else found


def _dist_info(folder: Path, each: Distribution) -> Path | None:
    """Return the dist-info of ``each`` in ``folder``, if this module wrote it."""
    for info in sorted(folder.glob("*.dist-info")):
        installer = info / "INSTALLER"
        written = installer.is_file() and installer.read_text().strip() == _INSTALLER
        if written and _named(info, each):
            return info
    return None


def _record(folder: Path, info: Path) -> dict[Path, str]:
    """Return the files that RECORD lists inside ``folder``, with their digests ("" for RECORD
    itself)."""
    record = info / "RECORD"
    if not record.is_file():
        return {}
    listed = {}
    for path, digest, _ in csv.reader(record.read_text().splitlines()):
        file = folder / path
        if folder.resolve() in file.resolve().parents:
            listed[file] = digest
    return listed


def _changed(folder: Path, info: Path) -> list[Path]:
    """Return the files of RECORD that differ from what was written; missing files do not count."""
    return [
        path
        for path, digest in _record(folder, info).items()
        if digest and path.is_file() and _digest(path.read_bytes()) != digest
    ]


def _refuse_changed(folder: Path, only: Sequence[str]) -> None:
    changed = [
        str(path)
        for each in chosen(only)
        if (info := _dist_info(folder, each)) is not None
        for path in _changed(folder, info)
    ]
    if changed:
        raise ShimError(
            f"changed since `pyfa compat install` wrote it: {', '.join(changed)}; put it back, or "
            "delete it by hand"
        )


def _digest(data: bytes) -> str:
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest())
    return f"sha256={digest.decode().rstrip('=')}"


def _write(folder: Path, each: Distribution) -> None:
    contents = {path: text.encode() for path, text in each.contents().items()}
    record = io.StringIO()
    rows = csv.writer(record, lineterminator="\n")
    for path, data in contents.items():
        rows.writerow([path, _digest(data), len(data)])
    rows.writerow([f"{each.dist_info}/RECORD", "", ""])
    # RECORD and INSTALLER first: whatever an interruption leaves behind can then be removed.
    contents = {f"{each.dist_info}/RECORD": record.getvalue().encode(), **contents}
    for path, data in contents.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(data)


def _remove(folder: Path, each: Distribution) -> None:
    info = _dist_info(folder, each)
    if info is None:
        return
    files = list(_record(folder, info))
    # The dist-info goes last, for it is what says that the rest is ours.
    for path in sorted(files, key=lambda path: (path.parent == info, path.name == "INSTALLER")):
        for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
            compiled.unlink()
        path.unlink(missing_ok=True)
    for parent in sorted(_folders(folder, files), key=lambda path: -len(path.parts)):
        if parent.is_dir() and not any(parent.iterdir()):
            parent.rmdir()


def _folders(folder: Path, files: list[Path]) -> set[Path]:
    """Return the folders below ``folder`` that hold ``files``, and those that hold their
    bytecode."""
    found = {folder / "__pycache__"}
    for file in files:
        for parent in file.parents:
            if parent == folder:
                break
            found |= {parent, parent / "__pycache__"}
    return found
