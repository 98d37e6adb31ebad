"""``pyfa info``: devices, backends, versions, settings and the cache of this machine."""

from __future__ import annotations

import argparse
import os
import platform
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from . import usage
from .console import print_json, print_table, print_text, size

# Whoever helps with a problem asks for these first.
_DISTRIBUTIONS = (
    "torch", "numpy", "triton", "pytorch-triton-rocm", "hip-python", "cuda-core", "cuda-bindings",
    "nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12", "ziglang",
)  # fmt: skip


def add(commands: Any) -> None:
    """Add the command to argparse's ``commands``."""
    parser = usage.command(
        commands,
        "info",
        "show devices, backends, versions, settings, cache",
        "Show devices, the state of each backend, versions, settings and the code cache.",
        "pyfa info",
        "pyfa info --json",
    )
    usage.add_json(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run the command; always status 0, because a backend that is not ready is an answer."""
    data = collect()
    if options.json:
        print_json("info", data)
    else:
        _print(data)
    return 0


def collect() -> dict[str, Any]:
    """Return everything that the command prints, as plain data."""
    from .. import __version__

    return {
        "pyfa": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "versions": _versions(),
        "warnings": list(filter(None, (wrong_torch(),))),
        "devices": _devices(),
        "backends": _backends(),
        "bundle": _bundle(),
        "cache": _cache(),
        "environment": _environment(),
    }


_KFD = (Path("/dev/kfd"), Path("/sys/class/kfd"))


def wrong_torch(kfd: Sequence[Path] = _KFD) -> str | None:
    """Return what is wrong with this machine's torch: a build for CUDA beside an AMD GPU's driver,
    whose files are ``kfd``. None if nothing is."""
    import torch

    found = next((path for path in kfd if path.exists()), None)
    if found is None or torch.version.hip or not torch.version.cuda or torch.cuda.is_available():
        return None
    return (
        f"this PyTorch is a build for CUDA {torch.version.cuda}, and {found} says that the machine "
        "has an AMD GPU: install a build for ROCm (https://pytorch.org/get-started)"
    )


def _versions() -> dict[str, str]:
    import torch

    found = {}
    for name in _DISTRIBUTIONS:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    found["torch"] = str(torch.__version__)
    for name, version in (("torch's HIP", torch.version.hip), ("torch's CUDA", torch.version.cuda)):
        if version:
            found[name] = str(version)
    return found


def _bundle() -> dict[str, Any]:
    from .. import bundle
    from ..errors import CodeObjectError

    objects = bundle.manifest()["objects"]
    damaged = []
    for key, entry in objects.items():
        try:
            bundle.find(entry["arch"], key)
        except (OSError, CodeObjectError):
            damaged.append(entry["file"])
    return {
        "objects": [
            {
                "kernel": entry["plan"],
                "arch": entry["arch"],
                "sha256": entry["sha256"],
                "emulated_cases": len(entry["emulated"]),
            }
            for entry in objects.values()
        ],
        "damaged": damaged,
    }


def _bundle_text(data: dict[str, Any]) -> str:
    objects = data["objects"]
    if not objects:
        return "none (in a checkout, `pyfa compile --arch gfx942,sm_90 --bundle` makes one)"
    if data["damaged"]:
        return f"damaged: {', '.join(data['damaged'])}"
    cases = sum(entry["emulated_cases"] for entry in objects)
    archs = ", ".join(sorted({entry["arch"] for entry in objects}))
    emulated = sum(entry["emulated_cases"] > 0 for entry in objects)
    told = f"{len(objects)} code objects for {archs}, all digests match"
    if emulated:
        told += (
            f"; {cases} conformance cases passed on {emulated} of them in the emulator (not "
            "verified on hardware)"
        )
    return told


def _devices() -> list[dict[str, Any]]:
    import torch

    from .. import device

    cpu = {
        "name": device.CPU.name,
        "kind": "CPU",
        "arch": "cpu",
        "threads": torch.get_num_threads(),
    }
    if not torch.cuda.is_available():
        return [cpu]
    kind = "AMD (hip)" if torch.version.hip else "NVIDIA (cuda)"
    gpus = [device.of(torch.device("cuda", index)) for index in range(torch.cuda.device_count())]
    return [
        *(
            {
                "name": gpu.name,
                "kind": kind,
                "arch": gpu.arch,
                "known_arch": gpu.limits is not None,
                "units": gpu.units,
                "dies": gpu.dies,
                "memory_bytes": gpu.memory_bytes,
                "l2_bytes": gpu.l2_bytes,
                "bandwidth": gpu.bandwidth,
            }
            for gpu in gpus
        ),
        cpu,
    ]


def _backends() -> list[dict[str, Any]]:
    from ..backends import BACKENDS, NAMES
    from ..backends.base import Described

    answers: list[dict[str, Any]] = []
    for name in NAMES:
        backend = BACKENDS[name]
        why = backend.why_unavailable()
        about = backend.describe() if why is None and isinstance(backend, Described) else None
        answers.append({"name": name, "ready": why is None, "why_not": why, "about": about})
    return answers


def _cache() -> dict[str, Any]:
    from .. import cache

    home = cache.directory()
    # Entries are counted, not verified as by `pyfa cache list`: that reads every file.
    entries, occupied = cache.occupied()
    return {
        "directory": str(home),
        "exists": home.is_dir(),
        "unusable": cache.why_unusable(home),
        "entries": entries,
        "bytes": occupied,
    }


def _environment() -> list[dict[str, Any]]:
    from .. import env

    rows = []
    for name, variable in env.VARIABLES.items():
        try:
            error = None
            env.get(name)
        except ValueError as problem:
            error = str(problem)
        rows.append(
            {
                "name": name,
                "value": os.environ.get(name),
                "error": error,
                "meaning": variable.meaning,
            }
        )
    unknown = sorted(name for name in os.environ if name.startswith("PYFA_"))
    rows += [
        {"name": name, "value": os.environ[name], "error": "not a variable of pyfa", "meaning": ""}
        for name in unknown
        if name not in env.VARIABLES
    ]
    return rows


def _print(data: dict[str, Any]) -> None:
    versions = [f"{name} {version}" for name, version in data["versions"].items()]
    print_text(f"pyfa {data['pyfa']}, Python {data['python']}, {', '.join(versions)}", "  ")
    print(data["platform"])
    for warning in data["warnings"]:
        print_text(f"warning: {warning}", " " * 9)
    print()
    rows = []
    for device in data["devices"]:
        facts = f"{device['threads']} threads" if device["kind"] == "CPU" else _gpu_facts(device)
        rows.append([device["kind"], device["name"], device["arch"], facts])
    print_table(["device", "name", "arch", ""], rows)
    print()
    answers = [
        [each["name"], each["why_not"] or ", ".join(filter(None, ("ready", each["about"])))]
        for each in data["backends"]
    ]
    print_table(["backend", ""], answers)
    print()
    print_text(f"bundle   {_bundle_text(data['bundle'])}", " " * 9)
    kept = data["cache"]
    state = kept["unusable"] or f"{kept['entries']} entries, {size(kept['bytes'])}"
    if not kept["unusable"] and not kept["exists"]:
        state = "not created yet"
    print_text(f"cache    {kept['directory']}: {state}", " " * 9)
    print()
    settings = []
    for row in data["environment"]:
        value = "not set" if row["value"] is None else repr(row["value"])
        settings.append([row["name"], value, row["error"] or row["meaning"].replace("`", "")])
    print_table(["variable", "value", ""], settings)


def _gpu_facts(device: dict[str, Any]) -> str:
    unit = "CUs" if device["arch"].startswith("gfx") else "SMs"
    facts = [f"{device['units']} {unit}", size(device["memory_bytes"])]
    if device["bandwidth"]:
        facts.append(f"{device['bandwidth'] / 1e12:.2f} TB/s")
    if not device["known_arch"]:
        facts.append("unknown arch")
    return ", ".join(facts)
