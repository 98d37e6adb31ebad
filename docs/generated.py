"""The generated parts of the guide: tables of features, archs, settings, commands, API.

A page asks for one by a line ``<!-- generated: NAME ARGUMENTS -->``; ``PARTS`` has the functions,
each of which returns Markdown. Nothing here needs a GPU or a compiler.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import functools
import io
import itertools
import json
import math
import os
import re
import shlex
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

import pyfa
from pyfa import cli, device, env, mods
from pyfa.arch import ARCHS
from pyfa.backends import AUTOMATIC, BACKENDS, NAMES
from pyfa.backends.cuda import plans as cuda_plans
from pyfa.backends.cuda.target import TARGET as CUDA
from pyfa.backends.hip import plans as hip_plans
from pyfa.backends.hip.target import TARGET as HIP
from pyfa.backends.native import catalog
from pyfa.device import DEVICES, Device
from pyfa.problem import FEATURES, Problem

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
# Where each backend is asked what it can do.
ASKED_ON = {
    "hip": DEVICES["MI300X"],
    "cuda": DEVICES["H200"],
    "triton": DEVICES["MI300X"],
    "torch": device.CPU,
    "emulator": device.CPU,
}


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(
        "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in line) + " |"
        for line in lines
    )


def problem_on(
    where: Device,
    features: Iterable[str] = (),
    dtype: str = "bfloat16",
    seqlen_q: int = 4096,
) -> Problem:
    """Return attention of 4,096 keys with 8 heads and head_dim 128 that needs ``features``."""
    wanted = frozenset(features)
    return Problem(
        batch=1,
        seqlen_q=seqlen_q,
        seqlen_k=4096,
        heads_q=8,
        heads_k=2 if "gqa" in wanted else 8,
        head_dim=128,
        head_dim_v=64 if "dv" in wanted else 128,
        dtype="float8_e4m3fn" if "fp8" in wanted else dtype,
        features=wanted,
        device=where,
        square=seqlen_q == 4096,
        page_size=256 if "paged" in wanted else 0,
        mods=_mods(wanted),
    )


def _mods(wanted: frozenset[str]) -> str:
    """Return the digest of mods that need ``wanted``. Backends refuse some calls by the digest,
    not by the feature."""
    gain = torch.ones(8, requires_grad=True)
    score: mods.Mod | None = None
    if "captured_grad" in wanted:
        score = lambda score, b, h, q_idx, kv_idx: score * gain[h]  # noqa: E731
    elif "score_mod" in wanted:
        score = lambda score, b, h, q_idx, kv_idx: score - 0.1 * (q_idx - kv_idx)  # noqa: E731
    mask = (lambda b, h, q_idx, kv_idx: q_idx >= kv_idx) if "mask_mod" in wanted else None
    return mods.resolve(score, mask, torch.device("cpu"))[0]


# --- what each backend can do


# What the names that ``pyfa explain --features`` takes stand for, where messages say too little.
_MEANINGS = {
    "softcap": "softcap of the scores",
    "alibi": "ALiBi (`alibi_slopes`)",
    "bias": "a float or boolean `bias`",
    "dropout": "dropout of the probabilities (`dropout_p`)",
    "sinks": "attention sinks (`sinks`)",
    "chunk": "chunked attention (`attention_chunk`)",
    "tree": "tree attention (`tree_mask`)",
    "leftpad": "left padding of a cache (`cache_leftpad`)",
    "batch_idx": "the row of the cache that each sequence uses (`cache_batch_idx`)",
    "dv": "a different head_dim for `v`",
    "topk": "latent attention over a list of keys per query row (`indices`)",
    "backward": "gradients of q, k and v",
    "deterministic": "bitwise equal gradients in every run",
    "fp8": "float8 keys and values",
}


def features() -> str:
    """Return a row for each name in FEATURES, a column for each backend."""
    rows = [
        [
            f"`{name}`",
            _MEANINGS.get(name, one.phrase),
            *(_mark(name in BACKENDS[each].FEATURES) for each in NAMES),
        ]
        for name, one in FEATURES.items()
    ]
    dtypes = sorted({dtype for each in BACKENDS.values() for dtype in each.DTYPES})
    rows += [
        [f"`{dtype}`", "dtype of q", *(_mark(dtype in BACKENDS[each].DTYPES) for each in NAMES)]
        for dtype in dtypes
    ]
    return table(["feature", "meaning", *(f"`{name}`" for name in NAMES)], rows)


def _mark(is_there: bool) -> str:
    return "yes" if is_there else "**no**"


def combinations() -> str:
    """Return pairs of features that a backend supports separately and refuses together, with the
    number of query rows if it decides. Pairs of one feature that are just not implemented share a
    row, and so do backends that refuse the same."""
    rows: dict[tuple[str, str], list[str]] = {}
    for name in NAMES:
        backend = BACKENDS[name]
        found: dict[str, list[str]] = {}
        plain: list[tuple[str, str]] = []
        for pair in itertools.combinations([f for f in FEATURES if f in backend.FEATURES], 2):
            alone = {reason for one in pair for reason in _refusals(name, (one,))}
            for reason, when in _refusals(name, pair).items():
                if reason in alone:
                    continue
                if when == "" and re.fullmatch(r".* with .* is not implemented", reason):
                    plain.append(pair)
                else:
                    both = " with ".join(f"`{one}`" for one in pair)
                    found.setdefault(reason + when, []).append(both)
        while plain:  # the feature in most pairs first
            most = max(FEATURES, key=lambda one: sum(one in pair for pair in plain))
            others = [f"`{a if b == most else b}`" for a, b in plain if most in (a, b)]
            row = f"`{most}` with {', '.join(others)}", "not implemented"
            rows.setdefault(row, []).append(f"`{name}`")
            plain = [pair for pair in plain if most not in pair]
        for reason, pairs in found.items():
            rows.setdefault((", ".join(pairs), reason), []).append(f"`{name}`")
    return table(
        ["backends", "combination", "reason"],
        ([", ".join(names), *row] for row, names in rows.items()),
    )


@functools.cache  # a feature is in as many pairs as there are others
def _refusals(name: str, wanted: tuple[str, ...]) -> dict[str, str]:
    """Return why backend ``name`` refuses ``wanted``, and for each reason "", or whether only many
    or only few query rows are refused."""
    many, one = (
        BACKENDS[name].why_not(problem_on(ASKED_ON[name], wanted, seqlen_q=rows))
        for rows in (4096, 1)
    )
    when = {
        reason: "" if reason in one else " (refused only with many query rows)" for reason in many
    }
    return when | {
        reason: " (refused only with few query rows)" for reason in one if reason not in many
    }


def fused() -> str:
    """Return which features the torch backend runs in PyTorch's fused attention, on a CPU and on a
    GPU."""
    able = [name for name in FEATURES if name in BACKENDS["torch"].FEATURES]
    rows = []
    for label, where in (("a CPU", device.CPU), ("a GPU", DEVICES["H200"])):
        plans = {name: BACKENDS["torch"].plan(problem_on(where, [name])) for name in able}
        rows.append(
            [
                label,
                ", ".join(f"`{name}`" for name in able if plans[name].kernel == "sdpa"),
                ", ".join(f"`{name}`" for name in able if plans[name].kernel != "sdpa"),
            ]
        )
    return table(["tensors on", "PyTorch's fused kernel", "tiled eager PyTorch"], rows)


_VENDORS = {
    "amd": "an AMD GPU",
    "nvidia": "an NVIDIA GPU",
    "cpu": "a CPU",
    "unknown": "another device",
}


def automatic() -> str:
    """Return the order of backends, by the vendor of the tensors' device."""
    return table(
        ["tensors on", "order"],
        (
            [_VENDORS[vendor], ", ".join(f"`{name}`" for name in names)]
            for vendor, names in AUTOMATIC.items()
        ),
    )


# --- where it ran


@functools.cache
def results() -> dict[str, dict[str, Any]]:
    """Return every result file with its environment, by name."""
    return {path.name: json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))}


def arch_of(environment: dict[str, Any]) -> str | None:
    """Return the arch of the GPU that a result was measured on; None without one."""
    gpu = environment.get("gpu")
    if not gpu:
        return None
    return next((row.arch for row in DEVICES.values() if row.name in gpu), None)


def conformance_results() -> dict[tuple[str, str | None], dict[str, Any]]:
    """Return the results of the suite by backend and arch; not those of a part of its cases, of
    grids for fewer SMs, or of another arch's tiles (``note``)."""
    return {
        (data["backend"], arch_of(data["environment"])): data
        for name, data in results().items()
        if name.startswith("conformance_") and not {"only", "sample", "sms", "note"} & data.keys()
    }


def _counts(data: dict[str, Any]) -> str:
    counted = ", ".join(f"{count:,} {status}" for status, count in data["counts"].items())
    return f"{data['level']} suite: {counted}"


@functools.cache
def compiled_by_triton() -> frozenset[str]:
    """Return the archs for which the tests compile Triton's kernels without a GPU."""
    text = (ROOT / "tests" / "triton" / "test_triton_plans.py").read_text()
    lists = re.findall(r'"arch", (\[.*?\])\)\ndef test_\w+_compiles_ahead', text)
    return frozenset(itertools.chain.from_iterable(ast.literal_eval(each) for each in lists))


def fp8_accuracy() -> str:
    """Return errors of float8 and of 16 bits on inputs with outliers, in 10⁻³, for head_dim 128."""
    tables = [x for x in results()["fp8_accuracy.json"]["tables"] if x["head_dim"] == 128]
    rows = []
    for name in tables[0]["rmse"]:
        cells = [f"{each['rmse'][name] * 1e3:#.2g}".rstrip(".") for each in tables]
        last = tables[-1]["rmse_with_p_in_float8"].get(name)
        cells.append("" if last is None else f"{last * 1e3:#.2g}".rstrip("."))
        dtype, eager, _ = name.partition(" eager")
        rows.append([f"PyTorch, unfused, {dtype}" if eager else f"pyfa, {name}", *cells])
    lengths = [f"{each['rows']:,} rows" for each in tables]
    return table(["", *lengths, f"{lengths[-1]}, P in float8"], rows)


def state(name: str, arch: str) -> str:
    """Return how backend ``name`` is verified on ``arch``: one of the terms of ``archs``."""
    where = next((each for each in DEVICES.values() if each.arch == arch), None)
    where = where or Device(arch, arch, 1, 1, 0.0, 0, 0, 0, 0.0)
    refused = BACKENDS[name].why_not(problem_on(where))
    if refused:
        return f"refused: {'; '.join(refused)}"
    ran = conformance_results()
    if (name, arch) in ran:
        return f"run on hardware: {_counts(ran[name, arch])}"
    if name == "hip" and ("emulator", None) in ran:
        return f"emulated, not run on hardware: {_counts(ran['emulator', None])}"
    compiled = (
        (name == "cuda" and cuda_plans.compiled_for(arch) in cuda_plans.TILED)
        or (name == "hip" and arch in hip_plans.ARCHS)
        or (name == "triton" and arch in compiled_by_triton())
    )
    return "compiled in the tests, not run" if compiled else "untested"


def archs() -> str:
    """Return a row for each arch, a column for each backend that has kernels."""
    rows = []
    for arch in ARCHS:
        known = ", ".join(each.name for each in DEVICES.values() if each.arch == arch)
        cells = [state(name, arch) for name in ("hip", "cuda", "triton")]
        rows.append([f"`{arch}`", known or "–", *cells])
    return table(["arch", "devices known by name", "`hip`", "`cuda`", "`triton`"], rows)


def machines() -> str:
    """Return a row for each machine that produced a result, with its result files."""
    rows: dict[tuple[str, ...], list[str]] = {}
    for name, data in results().items():
        found = data["environment"]
        stack = "none"
        if found.get("gpu"):
            versions = [("driver", "driver"), ("cuda", "CUDA"), ("hip", "ROCm")]
            stack = ", ".join(f"{label} {found[key]}" for key, label in versions if found.get(key))
        triton = f", Triton {found['triton']}" if found.get("triton") else ""
        key = (
            found.get("gpu") or "none",
            found["platform"].split("-")[0] + " x86-64"
            if "x86_64" in found["platform"]
            else found["platform"],
            stack,
            found["python"],
            found["torch"] + triton,
        )
        rows.setdefault(key, []).append(f"`{name}`")
    return table(
        ["GPU", "OS", "driver", "Python", "torch", "files in `benchmarks/results`"],
        ([*key, ", ".join(names)] for key, names in sorted(rows.items(), reverse=True)),
    )


def verified() -> str:
    """Return a line for each backend: what it passed, and on which device."""
    ran = conformance_results()
    lines = []
    for name in NAMES:
        found = [
            f"The {data['level']} conformance suite ran on an {data['environment']['gpu']} on "
            f"{data['environment']['date']}: {_outcome(data)}."
            for (backend, arch), data in ran.items()
            if backend == name and arch
        ]
        if name == "hip" and not found:
            emulated = ran["emulator", None]
            lines.append(
                "- `hip`, for MI300X: **functionally emulated, not verified on hardware**. The "
                "project's own emulator executes the kernels' machine code; no MI300X has run it. "
                f"The {emulated['level']} conformance suite last ran in the emulator on "
                f"{emulated['environment']['date']}: {_outcome(emulated)}. "
                "The speed of `hip` is unknown."
            )
        elif found:
            none = "No GPU of another arch has run this backend."
            lines.append(f"- `{name}`: {' '.join(found)} {none}")
        elif name in ("cuda", "triton"):
            lines.append(f"- `{name}`: The suite has run on no GPU.")
    return "\n".join([*lines, "- `torch`: The project's tests run this backend on a CPU."])


def _outcome(data: dict[str, Any]) -> str:
    counts = data["counts"]
    failed = sum(n for status, n in counts.items() if status not in ("passed", "refused"))
    text = f"{counts['passed']:,} cases passed, {counts.get('refused', 0):,} refused"
    return f"{text} as unsupported" + (f", {failed:,} did not pass" if failed else "")


def conformance() -> str:
    """Return every result of the suite, with what was refused."""
    rows = []
    for (name, arch), data in conformance_results().items():
        found = data["environment"]
        where = f"{found['gpu']} (`{arch}`)" if found.get("gpu") else "CPU"
        refused = "<br>".join(
            f"{why.replace('; ', ', and ')}: {n}" for why, n in data["declined"].items()
        )
        rows.append(
            [f"`{name}`", where, _counts(data), refused, f"{found['commit']}, {found['date']}"]
        )
    return table(["backend", "device", "result", "refused cases, by reason", "commit, date"], rows)


def devices() -> str:
    """Return the names that ``--device`` takes."""
    rows = [
        [
            f"`{each.name}`",
            f"`{each.arch}`",
            str(each.units),
            str(each.dies),
            f"{each.bandwidth / 1e9:,.0f}",
            f"{each.memory_bytes / device.GIB:.0f}",
        ]
        for each in DEVICES.values()
    ]
    return table(["device", "arch", "CUs or SMs", "XCDs", "bandwidth (GB/s)", "memory (GiB)"], rows)


# --- what was measured


def speed(name: str) -> str:
    """Return a row for each case of ``bench_<name>.json``: all values, and pyfa's speed divided by
    the fastest other library's."""
    cells: dict[str, dict[str, Any]] = {}
    data = results()[f"bench_{name}.json"]
    for row in data["rows"]:
        cells.setdefault(row["cell"], {})[row["peer"]] = row
    took_part = {peer for found in cells.values() for peer in found}
    peers = sorted(took_part, key=list(data["peers"]).index)
    rows, ratios, unit = [], [], ""
    for cell, found in cells.items():
        seconds = {k: v["seconds"]["median"] for k, v in found.items() if "seconds" in v}
        ratios.append(min(v for k, v in seconds.items() if k != "pyfa") / seconds["pyfa"])
        unit = found["pyfa"]["unit"]
        digits = {"TFLOP/s": 0, "TB/s": 2}.get(unit, 1)
        values = [f"{found[k]['value']:.{digits}f}" if k in seconds else "–" for k in peers]
        rows.append([cell, *values, f"{ratios[-1]:.2f}"])
    unit = unit.replace("us", "µs")
    mean = statistics.geometric_mean(ratios)
    return (
        table([unit, *peers, "pyfa / fastest"], rows)
        + f"\n\nThe last column has a geometric mean of {mean:.3f}; its smallest value is "
        f"{min(ratios):.3f}."
    )


def mods_beside(name: str) -> str:
    """Return the times of mods, and those of FlexAttention in the same run."""
    rows = []
    for row in results()[name]["rows"]:
        cells = [row["mod"], f"{row['rows']:,}", str(row["head_dim"])]
        for pass_ in ("forward", "backward"):
            times = row.get(pass_), row.get(f"flex_{pass_}"), row.get(f"{pass_}_speedup")
            cells += ["–" if x is None else f"{x:.2f}" for x in times]
        rows.append(cells)
    head = ["mod", "tokens", "head_dim"]
    for pass_ in ("forward", "backward"):
        head += [f"{pass_}, ms", "`flex`, ms", "speed, pyfa / `flex`"]
    return table(head, rows)


def fp8_speed() -> str:
    """Return the TFLOP/s of pyfa in float8 and in 16 bits, and of cuDNN in float8, in one run."""
    data = results()["bench_fp8_h200.json"]
    cells: dict[tuple[int, int, bool], dict[tuple[str, str], float]] = {}
    for row in data["rows"]:
        problem = row["problem"]
        cell = problem["head_dim"], problem["seqlen_k"], problem["causal"]
        if "value" in row:
            cells.setdefault(cell, {})[row["peer"], problem["fp8"]] = row["value"]
    rows = []
    for (dim, length, causal), found in cells.items():
        ours = found["pyfa", "inputs"]
        others = [found.get(key) for key in (("pyfa", ""), ("cudnn", "inputs"))]
        values = ["–" if other is None else f"{other:.0f}" for other in others]
        ratios = ["–" if other is None else f"{ours / other:.2f}" for other in others]
        mask = "causal" if causal else "full"
        rows.append([str(dim), f"{length:,}", mask, f"{ours:.0f}", *values, *ratios])
    head = ["head_dim", "keys", "mask", "float8", "bfloat16", "cuDNN's float8"]
    return table([*head, "float8 / bfloat16", "pyfa / cuDNN"], rows)


def naive_beside() -> str:
    """Return the time and memory of standard attention and of pyfa, by length."""
    found = {
        (row["kind"], row["side"], row["seqlen"]): row
        for row in results()["naive_vs_pyfa.json"]["lengths"]
    }

    def cell(row: dict[str, Any], key: str, unit: float) -> str:
        if key not in row:
            return str(row["why_not"])
        digits = max(0, 2 - int(math.log10(row[key] / unit)))
        return f"{row[key] / unit:,.{digits}f}"

    rows = []
    for length in sorted({length for *_, length in found if length >= 1024}):
        ways = itertools.product(("forward", "training"), ("naive", "pyfa"))
        four = [found[kind, side, length] for kind, side in ways]
        times = [cell(row, "seconds", 1e-3) for row in four]
        sizes = [cell(row, "extra_bytes", 1e9) for row in four]
        rows.append([f"{length:,}", *times, *sizes[2:]])
    sides = ["forward, standard", "forward, pyfa", "training, standard", "training, pyfa"]
    head = [f"{each} (ms)" for each in sides] + [f"{each} (GB)" for each in sides[2:]]
    return table(["tokens", *head], rows)


def context_parallel() -> str:
    """Return the times of each method over GPUs for 131,072 tokens, and the time and memory of the
    longest sequences."""
    ways = {"ring": "`ring_attention`", "ulysses": "`ulysses_attention`", "both": "both, 2 × 2"}
    parts, longest, tables = ("forward", "backward"), [], []
    head = [x for part in parts for x in (f"{part} (ms)", "TFLOP/s", "efficiency")]
    for count in (4, 2):
        rows = []
        data = results()[f"context_parallel_{count}.json"]
        tokens = data["title"].split()[0]
        for row in data["speeds"]:
            if "gpus" not in row:
                continue
            cells = [str(row["gpus"]), ways.get(row["side"], row["side"])]
            for part in parts:
                share = row.get("of_one_gpu", {part: 1.0})[part]
                cells += [f"{row[f'{part}_seconds'] * 1e3:.1f}", f"{row[f'{part}_tflops']:,.0f}"]
                cells.append(_percent(share))
            rows.append(cells)
        tables.append(table(["GPUs", f"method ({tokens} tokens)", *head], rows))
        for row in data["long"]:
            cells = [f"{row['seqlen']:,}", str(row["gpus"]), ways.get(row["side"], row["side"])]
            cells += [f"{row[f'{part}_seconds']:.2f}" for part in parts]
            longest.append([*cells, f"{row['peak_bytes'] / 1e9:.1f}", f"{row['ratio']:.2f}"])
    more = [f"{part} (s)" for part in parts]
    memory = ["peak memory per GPU (GB)", "peak / minimum"]
    tables.append(table(["tokens", "GPUs", "method", *more, *memory], longest))
    return "\n\n".join(tables)


def dram() -> str:
    """Return the bytes that Nsight Compute counts, and those that ``pyfa plan`` computes."""
    rows = []
    for row in results()["hbm_traffic.json"]["traffic"]:
        once, moved = row["compulsory_bytes"], row["dram_bytes"]
        shown = [f"{x / 1e9:,.3f}" for x in (once, row["estimated_bytes"], moved)]
        more = [f"{x / 1e9:,.1f}" for x in (row["l2_bytes"], row["requested_bytes"])]
        title = row["title"].removesuffix(" full").replace("naive", "standard attention,")
        rows.append([title, *shown, f"{moved / once:.2f} ×", *more])
    head = ["compulsory", "estimated", "DRAM", "DRAM / compulsory", "through L2", "requested"]
    return table(["GB", *head], rows)


def sanitizers() -> str:
    """Return the errors that Compute Sanitizer reported in pyfa's kernels."""
    rows = []
    for kernels, name in (
        ("sm_80", "sanitizer_cuda.json"),
        ("Hopper", "sanitizer_cuda_sm_90.json"),
    ):
        for found in results()[name]["tools"]:
            cases = ", ".join(f"{count} {status}" for status, count in found["cases"].items())
            rows.append([kernels, f"`{found['tool']}`", cases, str(found["of_our_kernels"])])
    return table(["kernels", "tool", "cases", "errors reported in pyfa's kernels"], rows)


def _percent(value: float, sign: str = "") -> str:
    return f"{value:{sign}.1%}".replace("%", " %")


def _spread(values: Sequence[float], style: str, scale: float = 1) -> str:
    return " to ".join(f"{value * scale:{style}}" for value in sorted(values))


def timing_model() -> str:
    """Return the predicted and published TFLOP/s of other projects' gfx942 kernels."""
    rows = [
        [
            row["kernel"].split(",")[0],
            row["shape"],
            row["machine"],
            "fit" if row["fit"] else "blind",
            f"{row['published']:.0f}",
            f"{row['predicted']:.0f}",
            _percent(row["error"], "+"),
        ]
        for row in results()["mi300x_model.json"]["pairs"]
    ]
    head = ["kernel", "batch, heads, length", "published by", "use", "published", "model", "error"]
    return table(head, rows)


def timing_errors() -> str:
    """Return the mean error of the blind pairs, by kernel."""
    data = results()["mi300x_model.json"]
    law, of_machine = data["blind_mean_error"], data["blind_with_clock_of_machine"]
    own: dict[str, list[str]] = {}
    for pair, error in data["blind_within_one_clock"].items():
        kernel, machine = pair.split(", ")
        own.setdefault(kernel, []).append(f"{_percent(error)} ({machine})")
    rows = [
        [kernel, _percent(law[kernel]), _percent(of_machine[kernel]), ", ".join(own[kernel])]
        for kernel in own
    ]
    rows.append(["all", "", _percent(of_machine["all"]), ""])
    head = ["kernel", "one clock law", "a clock for each machine"]
    return table([*head, "a clock for each kernel and machine"], rows)


def timing_utilization() -> str:
    """Return the share of clocks in which the matrix units work, as modeled and as measured."""
    rows = [
        [shape, _spread(both["model"], ".2f"), f"{both['measured']:.2f}"]
        for shape, both in results()["mi300x_model.json"]["mfma_utilization"].items()
    ]
    return table(["kernel and shape", "model", "measured"], rows)


def timing_own() -> str:
    """Return the timing model's figures for pyfa's kernels."""
    rows = []
    for row in results()["mi300x_own.json"]["problems"]:
        kernels = row["kernels"]
        share = "; ".join(_spread(one["utilization"], ".2f") for one in kernels)
        lost = kernels[0]["lost"][0]
        worst = sorted(lost, key=lambda cause: -lost[cause])[:2]
        rate = _spread(row["tflops"], ".0f") + " TFLOP/s"
        if row["bound"] == ["HBM", "HBM"]:
            rate = _spread(row["bytes_per_second"], ".1f", 1e-12) + " TB/s"
        conflicts = max(one["lds_conflict_clocks"] for one in kernels)
        pass_ = "decode" if "--seqlen 1," in row["flags"] else row["role"]
        rows.append([f"`{row['flags']}`", pass_, share,
                     ", ".join(f"{cause} {lost[cause]:.2f}" for cause in worst),
                     f"{conflicts:.0f}", rate])  # fmt: skip
    head = ["problem", "pass", "matrix units busy", "largest losses", "LDS conflicts", "rate"]
    return table(head, rows)


def timing_causal() -> str:
    """Return the speed of causal attention by pyfa and by other kernels, modeled and published."""
    rows = []
    for row in results()["mi300x_own.json"]["causal"]:
        scale = row["clock_of_machine"]
        theirs = row["rival_by_the_model"]
        rows.append([str(row["head_dim"]), _spread(row["ours"], ".0f", scale), row["rival"],
                     _spread(theirs, ".0f", scale) if theirs else "not run",
                     f"{row['rival_published']:.0f}"])  # fmt: skip
    head = ["head_dim", "pyfa, model", "other kernel", "other, model", "other, published"]
    return table(head, rows)


def timing_constants() -> str:
    """Return every number of the timing model."""
    from pyfa.emulator.timing import constants

    more = {
        "clock_hz": constants.CLOCK_HZ,
        "clock_exponent": constants.CLOCK_EXPONENT,
        "machines": constants.MACHINES,
    }
    rows = [
        [f"`{name}`", f"{one.low:g}", f"{one.high:g}", one.unit, one.source]
        for name, one in {**constants.ISSUE, **constants.DEVICE, **more}.items()
    ]
    return table(["constant", "low", "high", "unit", "source"], rows)


# --- settings, extras, commands


def settings() -> str:
    """Return the PYFA_* variables."""
    rows = [[f"`{each.name}`", each.form, each.meaning] for each in env.VARIABLES.values()]
    return table(["variable", "value", "meaning"], rows)


_EXTRAS = {
    "cuda": "compile and launch CUDA kernels with the NVRTC that PyTorch brings",
    "nvrtc": "install NVRTC, if PyTorch does not bring it",
    "triton": "use the `triton` backend; not for ROCm, whose PyTorch brings its own Triton",
    "rocm": "launch kernels through hip-python (optional, on ROCm)",
    "compile": "compile HIP kernels",
    "emulator": "run HIP kernels in the emulator; the same packages as `compile`",
    "bench": "write the report of `pyfa bench`",
    "docs": "build this guide",
    "browser": "test the guide and the report in a browser",
    "dev": "work on pyfa: the tests, linters and type checker",
}


def extras() -> str:
    """Return the optional dependencies and what each is for."""
    text = (ROOT / "pyproject.toml").read_text()
    (section,) = re.findall(r"^\[project.optional-dependencies\]\n(.*?)^\[", text, re.M | re.S)
    found = re.findall(r"^(\w+) = (\[.*?\])$", section, re.M | re.S)
    rows = [
        [f"`{name}`", _EXTRAS[name], ", ".join(f"`{each}`" for each in ast.literal_eval(listed))]
        for name, listed in found
    ]
    return table(["extra", "for", "installs"], rows)


def subparsers(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """Return the commands below a parser, by name."""
    return {
        name: each
        for action in parser._actions
        if isinstance(action, argparse._SubParsersAction)
        for name, each in action.choices.items()
    }


def commands() -> str:
    """Return every command with its usage, options and examples."""
    parts = []
    for name, parser in subparsers(cli.parser()).items():
        parts += _command(f"pyfa {name}", parser, 2)
    return "\n\n".join(parts)


def _command(name: str, parser: argparse.ArgumentParser, level: int) -> list[str]:
    with _plain_columns():
        usage = parser.format_usage().removeprefix("usage: ").replace("[-h] ", "").strip()
    parts = [f"{'#' * level} {name}", parser.description or "", f"```text\n{usage}\n```"]
    rows = []
    for action in parser._actions:
        if isinstance(action, (argparse._HelpAction, argparse._SubParsersAction)):
            continue
        shown = ", ".join(action.option_strings) or str(action.metavar or action.dest)
        value = action.metavar or ("|".join(map(str, action.choices)) if action.choices else "")
        if action.option_strings and action.nargs != 0 and value:
            shown += f" {value}"
        said = action.help or ""
        told = "default" in said or action.nargs == 0
        if not told and action.default not in (None, False, argparse.SUPPRESS, ()):
            default = action.default
            if isinstance(default, tuple):
                default = ",".join(map(str, default))
            said = f"{said}; default `{default}`" if said else f"default `{default}`"
        rows.append([f"`{shown}`", said])
    if rows:
        parts.append(table(["argument", "meaning"], rows))
    for below, each in subparsers(parser).items():
        parts += _command(f"{name} {below}", each, level + 1)
    return parts


@contextlib.contextmanager
def _plain_columns(columns: int = 100) -> Any:
    """argparse and rich take the width of a terminal from here."""
    before = {name: os.environ.get(name) for name in ("COLUMNS", "NO_COLOR")}
    os.environ |= {"COLUMNS": str(columns), "NO_COLOR": "1"}
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def run(*arguments: str) -> str:
    """Run a command for a named device; return it and its output, which is the same on every
    machine."""
    if "--device" not in arguments or arguments[0] not in ("explain", "plan"):
        raise ValueError(f"{shlex.join(arguments)}: its output depends on the machine")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), _plain_columns():
        status = cli.main(arguments)
    if status:
        raise ValueError(f"pyfa {shlex.join(arguments)} ended with status {status}")
    command, output = f"pyfa {shlex.join(arguments)}", printed.getvalue().rstrip()
    return f"```shell\n{command}\n```\n\n```text\n{output}\n```"


def wheel_plans() -> str:
    """Return how many plans `ci/wheel` builds for each arch, and how many of them are common."""
    script = (ROOT / "ci" / "wheel").read_text()
    (arguments,) = re.findall(r"set -- (.*)", script)
    options = cli.parser().parse_args(["compile", *shlex.split(arguments)])
    rows = []
    for arch in options.arch.split(","):
        target = HIP if arch in hip_plans.ARCHS else CUDA
        every = catalog.chosen_plans(target, arch, options.all, options.head_dim)
        rows.append((arch, len(every), len(catalog.common_plans(target, arch))))
    rows.append(("all", *(sum(column) for column in list(zip(*rows, strict=True))[1:])))
    return table(
        ["arch", "plans", "common plans"], [[arch, f"{n:,}", f"{few:,}"] for arch, n, few in rows]
    )


def version() -> str:
    return pyfa.__version__


PARTS: dict[str, Callable[..., str]] = {
    "archs": archs,
    "automatic": automatic,
    "combinations": combinations,
    "commands": commands,
    "conformance": conformance,
    "context_parallel": context_parallel,
    "devices": devices,
    "dram": dram,
    "extras": extras,
    "features": features,
    "fp8_accuracy": fp8_accuracy,
    "fp8_speed": fp8_speed,
    "fused": fused,
    "machines": machines,
    "mods_beside": mods_beside,
    "naive_beside": naive_beside,
    "run": run,
    "sanitizers": sanitizers,
    "settings": settings,
    "speed": speed,
    "timing_constants": timing_constants,
    "timing_errors": timing_errors,
    "timing_model": timing_model,
    "timing_causal": timing_causal,
    "timing_own": timing_own,
    "timing_utilization": timing_utilization,
    "verified": verified,
    "wheel_plans": wheel_plans,
}
