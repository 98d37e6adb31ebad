"""The sections of a report that show measured speed, memory and bytes."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from typing import Any

from ..device import DEVICES, Device
from ..traffic import Shape, compulsory_bytes
from . import charts, report_mi300x
from .report_parts import MEMORY, SPEED, Cell, Picture, Section, Table, drawn, gpu, where
from .suites import MI300X

# What each suite shows, in the order of the report.
_SHOWS = {
    "forward": "Forward at a constant number of tokens, without and with a causal mask.",
    "backward": "Only the gradients of q, k and v, at a constant number of tokens.",
    "decode": "One query per sequence and a long cache: bytes of K and V, counted once, over time.",
    "small": "One sequence: grids that do not fill the device. Less is better.",
    "varlen": "Sequences of different lengths, packed without padding. Peers without a packed "
    "call get one call per sequence.",
    "window": "Causal attention to the nearest keys, without and with sinks; FLOPs of exactly the "
    "visible pairs.",
    "gqa": "Query heads that share key heads, and keys that are wider than values; forward and "
    "backward.",
    "layers": "The attention layers of known models, forward and backward.",
    "wide": "Forward at head_dim 512.",
    "fp8": "Forward with float8 inputs, compared with 16-bit inputs.",
    "fp8_decode": "Decode with a float8 cache and 16-bit queries, compared with a 16-bit cache. "
    "Less is better.",
    "quantize": "Bytes read and written over time, by quantize without and with the rotation, and "
    "by a copy.",
    "model": "A training step of a small GPT, AdamW included, with each peer's attention.",
    "host": "Problems so small that host time dominates. Less is better.",
}
_TIMED = {
    "device": "GPU events around each call, a buffer larger than any cache overwritten in between",
    "replay": "a CUDA graph of 20 calls, replayed with a warm cache",
    "host": "calls without waiting for the device, 50 per sample",
}
Rows = dict[str, dict[str, Mapping[str, Any]]]


def sections(name: str, data: Mapping[str, Any]) -> list[Section]:
    """Return one section for each suite in a result of ``pyfa bench``. If the result is from an
    MI300X, also return a section that compares it with the timing model."""
    found = report_mi300x.beside(name, data) if "mi300x" in data else []
    for suite in data["suites"]:
        if suite == MI300X:
            continue
        rows: Rows = {}
        for row in data["rows"]:
            if row["suite"] == suite:
                rows.setdefault(row["cell"], {})[row["peer"]] = row
        peers = [peer for peer in data["peers"] if any(_value(by, peer) for by in rows.values())]
        if rows and peers:
            found.append(_section(name, data, suite, rows, peers))
    return found


def _section(
    name: str, data: Mapping[str, Any], suite: str, rows: Rows, peers: list[str]
) -> Section:
    first = next(row for by in rows.values() for row in by.values() if "value" in row)
    unit, timed = first["unit"], first["problem"]["timed"]
    effort = data["effort"]
    if data["device"] == "cpu" and timed == "device":
        timed_by = "a clock around each call, a buffer overwritten in between"
    else:
        timed_by = _TIMED[timed]
    how = (
        f"{effort['rounds']} rounds in which the peers take turns, {effort['seconds']} s of "
        f"samples each; median over all, after {effort['warm_up']} calls to warm up; {timed_by}."
    )
    pictures: list[Picture | None] = []
    if suite in ("forward", "backward"):
        pictures += [*_by_length(name, suite, rows, peers), _roofline(name, data, suite, rows)]
    pictures.append(_ratios(name, suite, rows, peers))
    means = _means(rows, peers)
    on = f"{data['backend']} on {gpu(data)}" if data.get("backend") else _unrecorded(data)
    return Section(
        SPEED,
        next((n for n, name in enumerate(_SHOWS) if name == suite), len(_SHOWS)),
        f"{suite}: pyfa ({on}) compared with {', '.join(means) or 'no other library'}",
        f"{_SHOWS.get(suite, suite)} {_summary(rows, peers)}",
        how,
        where(name, data),
        [picture for picture in pictures if picture],
        [_table(rows, peers, unit)],
        suite=suite,
        ran_on=on,
        means=means,
    )


def _unrecorded(data: Mapping[str, Any]) -> str:
    return f"{gpu(data)}, backend not recorded"


def _value(by_peer: Mapping[str, Mapping[str, Any]], peer: str) -> float:
    row = by_peer.get(peer, {})
    return float(row.get("value", 0.0))


def _ratio(by_peer: Mapping[str, Mapping[str, Any]], peer: str) -> float:
    """Return pyfa's speed divided by that of a peer; NaN if one of them has none."""
    theirs, ours = (by_peer.get(one, {}).get("seconds") for one in (peer, "pyfa"))
    return float(theirs["median"] / ours["median"]) if theirs and ours else math.nan


def _means(rows: Rows, peers: list[str]) -> dict[str, float]:
    """Return geometric means of pyfa's speed over each peer's."""
    found = {peer: [_ratio(by, peer) for by in rows.values()] for peer in peers if peer != "pyfa"}
    there = {peer: [r for r in ratios if not math.isnan(r)] for peer, ratios in found.items()}
    return {peer: statistics.geometric_mean(ratios) for peer, ratios in there.items() if ratios}


def _summary(rows: Rows, peers: list[str]) -> str:
    parts = []
    for peer in peers:
        ratios = [r for by in rows.values() if not math.isnan(r := _ratio(by, peer))]
        if peer != "pyfa" and ratios:
            low, high = min(ratios), max(ratios)
            mean = statistics.geometric_mean(ratios)
            parts.append(f"{mean:.2f} × {peer} ({low:.2f} to {high:.2f})")
    return f"On geometric average pyfa's speed is {', '.join(parts)}." if parts else ""


def _by_length(name: str, suite: str, rows: Rows, peers: list[str]) -> list[Picture]:
    """Show speed over the sequence length: a picture for each head dim, full and causal."""
    kinds: dict[tuple[int, bool], dict[str, list[tuple[float, float]]]] = {}
    for by in rows.values():
        problem = next(iter(by.values()))["problem"]
        series = kinds.setdefault((problem["head_dim"], problem["causal"]), {})
        for peer in peers:
            if value := _value(by, peer):
                series.setdefault(peer, []).append((problem["seqlen_q"], value))
    pictures = []
    for (dim, causal), series in sorted(kinds.items()):
        title = f"{suite}, D = {dim}, {'causal' if causal else 'full'}"
        made, (axis,) = charts.figure()
        ordered = {peer: sorted(points) for peer, points in series.items()}
        charts.lines(axis, ordered, "queries and keys", "TFLOP/s", title, log_y=False)
        caption = f"{title}: speed against the sequence length; more is better."
        pictures.append(drawn(made, f"{name} {title}", caption))
    return pictures


def device_of(data: Mapping[str, Any]) -> Device | None:
    """Return the entry of ``DEVICES`` for the device that the results are from."""
    gpu = data["environment"].get("gpu") or ""
    return next((one for key, one in DEVICES.items() if key.split("-")[0] in gpu.split()), None)


def _roofline(name: str, data: Mapping[str, Any], suite: str, rows: Rows) -> Picture | None:
    device = device_of(data)
    if device is None:
        return None
    points = {}
    for cell, by in rows.items():
        problem, seconds = by["pyfa"]["problem"], by["pyfa"].get("seconds")
        if seconds is None or not problem["causal"]:
            continue
        shape = Shape(
            problem["batch"], problem["seqlen_q"], problem["seqlen_k"], problem["heads_q"],
            problem["heads_k"], problem["head_dim"], problem["head_dim"], window_right=0,
        )  # fmt: skip
        speed = by["pyfa"]["value"] * 1e12
        flops = speed * seconds["median"]
        moved = compulsory_bytes(shape, backward=suite == "backward")
        points[cell.replace(" causal", "")] = (flops / moved, speed)
    dtype = next(iter(rows.values()))["pyfa"]["problem"]["dtype"]
    made, (axis,) = charts.figure(height=4.2)
    charts.roofline(axis, device, dtype, points, f"{suite}, causal: pyfa on {device.name}")
    caption = (
        "Measured speed over FLOPs per compulsory byte, under the vendor's peaks. The distance to "
        "the roof is the largest possible gain."
    )
    return drawn(made, f"{name} {suite} roofline", caption)


def _ratios(name: str, suite: str, rows: Rows, peers: list[str]) -> Picture | None:
    others = [peer for peer in peers if peer != "pyfa"]
    if not others or len(rows) < 2:
        return None
    # A single column still has room for the names of the rows.
    width = max(3.6, 1.9 + 0.75 * len(others))
    made, (axis,) = charts.figure(height=0.9 + 0.24 * len(rows), width=width)
    values = [[_ratio(by, peer) for peer in others] for by in rows.values()]
    charts.heat_map(axis, list(rows), others, values, f"{suite}: pyfa's speed over a peer's")
    caption = "Above 1, blue: pyfa is faster. Below, orange: the peer is."
    return drawn(made, f"{name} {suite} ratios", caption)


def _table(rows: Rows, peers: list[str], unit: str) -> Table:
    less_is_better = unit == "us"
    body = []
    reasons: dict[str, set[str]] = {}
    for cell, by in rows.items():
        values = {peer: _value(by, peer) for peer in peers if _value(by, peer)}
        best = (min if less_is_better else max)(values.values())
        cells = [Cell(cell)]
        for peer in peers:
            row = by.get(peer, {})
            if "why_not" in row:
                reasons.setdefault(row["why_not"], set()).add(peer)
            if peer not in values:
                cells.append(Cell("–"))
                continue
            low, high = row["seconds"]["quartiles"]
            spread = (high - low) / 2 / row["seconds"]["median"]
            text = f"{values[peer]:.4g} ±{spread:.1%}"
            cells.append(Cell(text, "best" if values[peer] == best else ""))
        body.append(cells)
    note = "± is half of the interquartile range. " + " ".join(
        f"– {', '.join(sorted(names))}: {why}." for why, names in reasons.items()
    )
    return Table(["", *peers], body, unit, note)


def lengths(name: str, data: Mapping[str, Any]) -> list[Section]:
    """Show naive attention and pyfa over the sequence length, from a result of
    benchmarks/naive_vs_pyfa.py."""
    pictures = []
    for kind in ("forward", "training"):
        rows = [row for row in data["lengths"] if row["kind"] == kind]
        # One length alone makes no line.
        if len({row["seqlen"] for row in rows}) < 2:
            continue
        for key, y in (("seconds", "seconds"), ("extra_bytes", "bytes beyond the inputs")):
            series: dict[str, list[tuple[float, float]]] = {}
            for row in rows:
                if row.get(key):
                    series.setdefault(row["side"], []).append((row["seqlen"], row[key]))
                if key == "extra_bytes":
                    label = f"{row['side']}, computed"
                    series.setdefault(label, []).append((row["seqlen"], row["computed_bytes"]))
            made, (axis,) = charts.figure()
            charts.lines(axis, series, "queries and keys", y, kind)
            caption = f"{kind.capitalize()}: {y}; less is better."
            pictures.append(drawn(made, f"{name} {kind} {key}", caption))
    head = ["seqlen", "kind", "side", "ms", "MB beyond the inputs", "computed"]
    body = [
        [
            Cell(str(row["seqlen"])), Cell(row["kind"]), Cell(row["side"]),
            Cell(f"{row['seconds'] * 1e3:.4g}" if row.get("seconds") else row["why_not"]),
            Cell(f"{row['extra_bytes'] / 1e6:.1f}" if row.get("extra_bytes") else "–"),
            Cell(f"{row['computed_bytes'] / 1e6:.1f}"),
        ]
        for row in data["lengths"]
    ]  # fmt: skip
    shows = "Standard attention holds every score, tiled attention none: time and memory against N."
    title = data.get("title", "Standard attention against pyfa")
    return [
        Section(
            MEMORY,
            20,
            f"{title} ({_unrecorded(data)})",
            shows,
            data["how"],
            where(name, data),
            pictures,
            [Table(head, body)],
            _longest(data),
        )
    ]


def _longest(data: Mapping[str, Any]) -> str:
    """Return the memory of both sides at the longest length that both measured."""
    found: dict[tuple[str, int], dict[str, float]] = {}
    for row in data["lengths"]:
        if row.get("extra_bytes"):
            sides = found.setdefault((row["kind"], row["seqlen"]), {})
            sides[row["side"]] = row["extra_bytes"]
    both = [key for key, sides in found.items() if len(sides) > 1]
    if not both:
        return ""
    kind, seqlen = max(both, key=lambda key: (key[1], key[0]))
    told = ", ".join(f"{side} {size / 1e9:.3g} GB" for side, size in found[kind, seqlen].items())
    return f"{kind} at {seqlen:,} tokens on {gpu(data)}, beyond the inputs: {told}"


def traffic(name: str, data: Mapping[str, Any]) -> list[Section]:
    """Compare measured DRAM bytes and L2 sectors with the modeled bytes, from a result of
    benchmarks/hbm_traffic.py."""
    head = ["", "compulsory MB", "DRAM, estimated", "DRAM, ncu", "requested MB", "L2, ncu"]
    keys = ("compulsory_bytes", "estimated_bytes", "dram_bytes", "requested_bytes", "l2_bytes")
    rows = [row for row in data["traffic"] if "dram_bytes" in row]
    body = [
        [Cell(row["title"]), *(Cell(f"{row[k] / 1e6:.1f}" if k in row else "–") for k in keys)]
        for row in rows
    ]
    made, (axis,) = charts.figure()
    for computed, measured, label in (
        ("compulsory_bytes", "dram_bytes", "DRAM over compulsory"),
        ("estimated_bytes", "dram_bytes", "DRAM over the estimate"),
        ("requested_bytes", "l2_bytes", "L2 over requested"),
    ):
        points = [(row[computed], row[measured]) for row in rows if computed in row]
        charts.against(axis, label, points)
    charts.finish_against(axis, "bytes by the model", "bytes by ncu", "Model against measured")
    picture = drawn(made, name, "On the line the model is right.")
    shows = "Bytes that the memory system moved, compared with those that the formulas give."
    return [
        Section(
            MEMORY, 21, f"Bytes: model against measured ({_unrecorded(data)})",
            shows, data["how"], where(name, data), [picture] if rows else [], [Table(head, body)],
        )
    ]  # fmt: skip
