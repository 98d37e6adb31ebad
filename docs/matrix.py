"""Two more generated parts of the guide: the support matrix, and the kernels of known models.

The dispatcher chooses the backends. How they were tested comes from benchmarks/results.
"""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Callable
from dataclasses import replace

import generated
from generated import DEVICES, FEATURES, table

from pyfa import cli
from pyfa.arch import ARCHS
from pyfa.backends import AUTOMATIC, BACKENDS
from pyfa.cli import model_config
from pyfa.device import Device

DIMS = (64, 96, 128, 192, 256)
# The query rows of each pass, and the features that it needs in addition to the row's feature.
PASSES: dict[str, tuple[int, tuple[str, ...]]] = {
    "forward": (4096, ()),
    "backward": (4096, ("backward",)),
    "decode": (1, ("seqused",)),
}
DTYPES = {"16 bits": "bfloat16", "float32": "float32", "float8": "float8_e4m3fn"}
# Features that are a pass or a dtype, that only gradients have, that only caches have, and that
# caches cannot have.
_APART = ("backward", "fp8")
_OF_GRADIENTS = ("bias_grad", "dlse", "deterministic")
_OF_CACHES = ("leftpad", "batch_idx")
_NOT_OF_CACHES = ("dropout", "varlen")


def tested(name: str, arch: str) -> str:
    """Return the letters of how ``name`` was tested on ``arch``; the page explains them."""
    if name == "torch":
        return "P"
    state = generated.state(name, arch)
    if state.startswith("run on hardware"):
        return "H"
    if state.startswith("emulated"):
        return "E"
    compiled = state.startswith("compiled")
    if name == "triton":  # its kernels run in Triton's interpreter in the tests
        return "C, I" if compiled else "I"
    return "T" if arch in executed_elsewhere() else "C" if compiled else "U"


def executed_elsewhere() -> set[str]:
    """Return the archs whose tiles passed the suite on a GPU of another arch."""
    found = (data.get("tiles") for data in generated.results().values())
    return {arch for tiles in found if isinstance(tiles, list) for arch in tiles}


def device_of(arch: str) -> Device:
    known = (each for each in DEVICES.values() if each.arch == arch)
    return next(known, Device(arch, arch, 1, 1, 0.0, 0, 0, 0, 0.0))


def first_able(device: Device, feature: str, passed: str, dtype: str, dim: int) -> str:
    """Return the first backend in the dispatcher's order that can run ``feature``, or ""."""
    rows, needed = PASSES[passed]
    wanted = {*needed, *([feature] if feature else [])} | ({"fp8"} if "float8" in dtype else set())
    problem = generated.problem_on(device, wanted, dtype, rows)
    if "float8" in dtype and device.arch == "gfx942":
        dtype = "float8_e4m3fnuz"
    problem = replace(problem, dtype=dtype, head_dim=dim, head_dim_v=64 if feature == "dv" else dim)
    return next(
        (each for each in AUTOMATIC[device.vendor] if not BACKENDS[each].why_not(problem)), ""
    )


def cell(arch: str, feature: str, passed: str, dtype: str) -> str:
    """Return the backend that runs ``feature``, with the letters of ``tested``; with head dims if
    these run on several backends."""
    device = device_of(arch)
    if passed == "backward" and dtype == "float8_e4m3fn":
        return "–"
    if feature in _OF_GRADIENTS and passed != "backward":
        return "–"
    if (feature in _OF_CACHES) != (passed == "decode") and feature in (
        *_OF_CACHES,
        *_NOT_OF_CACHES,
    ):
        return "–"
    if feature in _NOT_OF_CACHES and passed == "decode":
        return "–"
    found: dict[str, list[str]] = {}
    for dim in DIMS:
        found.setdefault(first_able(device, feature, passed, dtype, dim), []).append(str(dim))
    parts = []
    for name, dims in found.items():
        said = f"`{name}` {tested(name, arch)}" if name else "**no**"
        parts.append(said if len(found) == 1 else f"{said} ({', '.join(dims)})")
    return "; ".join(parts)


def matrix() -> str:
    """Return one table for each group of archs whose tables are equal."""
    columns = [(label, passed) for label in DTYPES for passed in PASSES]
    columns.remove(("float8", "backward"))
    head = ["feature", *(f"{passed}, {label}" for label, passed in columns)]
    names = ["", *(name for name in FEATURES if name not in _APART)]
    tables: dict[str, list[str]] = {}
    for arch in ARCHS:
        rows = [
            [f"`{name}`" if name else "none"]
            + [cell(arch, name, passed, DTYPES[label]) for label, passed in columns]
            for name in names
        ]
        tables.setdefault(table(head, rows), []).append(arch)
    return "\n\n".join(
        f"### {', '.join(archs)}\n\n{_devices(archs)}{text}" for text, archs in tables.items()
    )


def _devices(archs: list[str]) -> str:
    known = [each.name for each in DEVICES.values() if each.arch in archs]
    return f"Devices known by name: {', '.join(known)}.\n\n" if known else ""


# --- models


def models() -> str:
    """Return a row for each known model: its attention, and the kernels that would run it."""
    rows = []
    for name in model_config.NAMES:
        answers = {device: _explained(name, device) for device in ("MI300X", "H200")}
        first = answers["MI300X"]
        kinds = dict.fromkeys(_kind(row["attention"]) for row in first["rows"])
        runs = [
            "; ".join(dict.fromkeys(f"{row['phase']}: {_kernel(row)}" for row in answer["rows"]))
            for answer in answers.values()
        ]
        rows.append([f"`{name}`", "; ".join(kinds), *runs])
    return table(
        ["model", "attention layers", "kernels on MI300X (not run)", "kernels on H200 (not run)"],
        rows,
    )


def _kind(attention: dict[str, object]) -> str:
    heads = f"{attention['heads_q']}/{attention['heads_k']} heads, head_dim {attention['head_dim']}"
    more = [f"window {attention['window']}"] if attention["window"] else []
    more += ["sinks"] if attention["sinks"] else []
    more += ["softcap"] if attention["softcap"] else []
    return f"{attention['name']} ({attention['layers']}): {', '.join([heads, *more])}"


def _kernel(row: dict[str, object]) -> str:
    if not row["chosen"]:
        why = row["why"]
        return "none: " + "; ".join(map(str, why if isinstance(why, list) else [why]))
    plan = str(row["plan"]).split()[0].rsplit("/", 1)[-1]
    return f"`{row['chosen']}` {plan}"


def _explained(name: str, device: str) -> dict[str, list[dict[str, object]]]:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        status = cli.main(["explain", "--model", name, "--device", device, "--json"])
    if status:
        raise ValueError(f"pyfa explain --model {name} ended with status {status}")
    answer: dict[str, list[dict[str, object]]] = json.loads(printed.getvalue())
    return answer


def measured_models() -> str:
    """Return the measurements of a model and of one of its layers:
    benchmarks/results/llama_speed.json."""
    data = generated.results()["llama_speed.json"]
    gpu = data["environment"]["gpu"]
    sizes = data["options"]
    called = {
        "sdpa": "PyTorch's SDPA",
        "sdpa, flash": "PyTorch's SDPA, FlashAttention only",
        "sdpa, masked": "SDPA on a static cache, with its mask",
        "sdpa, all full": "SDPA on a full static cache, no mask",
    }
    rows = [
        [
            row["what"],
            called.get(row["who"], row["who"]),
            f"{row['tokens_per_second']:,.0f}",
            f"{row['pyfa_is_faster']:.2f}",
            gpu,
        ]
        for row in data["rows"]
    ]
    head = ["task", "attention", "tokens/s", "speed, pyfa / this attention", "GPU"]
    text = (
        f"The model is a Llama with {sizes['layers']} layers and hidden size {sizes['hidden']:,}. "
        f"Decode has {sizes['sequences']} sequences of {sizes['context']:,} tokens:"
    )
    return f"{text}\n\n" + table(head, rows)


def measured_layers() -> str:
    """Return the speed of models' layers: benchmarks/results/bench_layers_peers_h200.json."""
    data = generated.results()["bench_layers_peers_h200.json"]
    layers: dict[str, list[str]] = {}
    fastest: dict[tuple[str, str], float] = {}
    for row in data["rows"]:
        problem = row["problem"]
        label, pass_ = problem["label"], problem["passes"]
        cell = row["cell"].removeprefix(label).removesuffix(" backward").strip()
        columns = layers.setdefault(label, [cell, *["–"] * 4])
        if "value" not in row:
            continue
        at = 1 + 2 * (pass_ == "backward")
        if row["peer"] == "pyfa":
            columns[at] = f"{row['value']:.0f}"
        elif row["value"] > fastest.get((label, pass_), 0.0):
            fastest[label, pass_] = row["value"]
            columns[at + 1] = f"{row['value']:.0f} ({row['peer']})"
    head = ["layer", "shape", "forward", "fastest other", "backward", "fastest other"]
    return table(head, [[name, *columns] for name, columns in layers.items()])


PARTS: dict[str, Callable[..., str]] = {
    "matrix": matrix,
    "measured_layers": measured_layers,
    "measured_models": measured_models,
    "models": models,
}
