"""Vector instructions one by one, against numpy, in every encoding the assembler has for them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from single_instructions import ROWS_IN, draw, run, view
from vector_cases import CASES

from pyfa.emulator import tables

ROUNDS = 3
WIDE = "dqlF"
LOOSE = {"v_sin_f32": 1, "v_cos_f32": 1}  # ulp: computed in another precision here than there
HALF = "HS"  # destinations that keep the other half


def operand(first: int, kind: str) -> str:
    return f"v[{first}:{first + 1}]" if kind in WIDE else f"v{first}"


def encodings(name: str) -> list[str]:
    short = name in set(tables.VOP1.values()) | set(tables.VOP2.values())
    return [name + "_e32", name + "_e64"] if short else [name]


def bits_of(result: Any, kind: str) -> Any:
    """Expected destination dwords (2, 64); None where a row is not written."""
    if kind == "F":
        return [np.asarray(part).astype(np.float32).view(np.uint32) for part in result]
    if kind in "dql":
        array = np.asarray(result).astype({"d": "f8", "q": "u8", "l": "i8"}[kind])
        pair = array.view(np.uint32).reshape(64, 2)
        return [pair[:, 0], pair[:, 1]]
    if kind == "f":
        return [np.asarray(result).astype(np.float32).view(np.uint32), None]
    if kind in "hH":
        return [np.asarray(result).astype(np.float16).view(np.uint16).astype(np.uint32), None]
    low = np.asarray(result).astype(np.int64 if np.asarray(result).dtype.kind != "u" else np.uint64)
    mask = 0xFFFF if kind in "stS" else 0xFFFFFFFF
    return [(low.astype(np.uint64) & np.uint64(mask)).astype(np.uint32), None]


def is_nan(bits: Any, kind: str) -> Any:
    if kind in "fF":
        return (bits & 0x7FFFFFFF) > 0x7F800000
    if kind in "hH":
        return (bits & 0x7FFF) > 0x7C00
    return np.zeros(64, bool)


def same(got: Any, wanted: Any, kind: str, ulps: int) -> Any:
    if kind == "p":
        halves = [(got >> n & 0xFFFF, wanted >> n & 0xFFFF) for n in (0, 16)]
        return np.all([(g == w) | (is_nan(g, "h") & is_nan(w, "h")) for g, w in halves], axis=0)
    close = np.abs(got.astype(np.int64) - wanted.astype(np.int64)) <= ulps
    return close | (is_nan(got, kind) & is_nan(wanted, kind))


@pytest.fixture(scope="module")
def outcomes() -> list[tuple[str, str, str, Any, Any, Any]]:
    rng = np.random.default_rng(7)
    jobs, snippets, inputs = [], [], []
    for name, (sources, destination, _, function) in CASES.items():
        for spelled in encodings(name):
            for _ in range(ROUNDS):
                rows = np.concatenate(
                    [
                        *(draw(kind, rng) for kind in sources),
                        *(draw("u", rng) for _ in range(ROWS_IN // 2 - len(sources))),
                    ]
                )
                operands = [operand(2 + 2 * n, kind) for n, kind in enumerate(sources)]
                snippets.append(f"{spelled} {operand(8, destination)}, {', '.join(operands)}")
                inputs.append(rows)
                jobs.append((name, spelled, destination, function, sources))
    results = run(snippets, np.array(inputs))
    return [(*job, rows, result) for job, rows, result in zip(jobs, inputs, results, strict=True)]


@pytest.mark.parametrize("name", sorted(CASES))
def test_vector_instruction(name: str, outcomes: Any) -> None:
    ran = 0
    for case, spelled, kind, function, sources, rows, result in outcomes:
        if case != name:
            continue
        ran += 1
        arguments = [view(rows[2 * n : 2 * n + 2], s) for n, s in enumerate(sources)]
        with np.errstate(all="ignore"):
            wanted = bits_of(function(*arguments), kind)
        if kind in HALF:
            wanted[0] = wanted[0] & 0xFFFF | rows[6] & 0xFFFF0000
        for number, expected in enumerate(wanted):
            if expected is None:
                expected, compare = rows[7], "u"
            else:
                compare = kind if kind != "d" else "u"
            got = result[number]
            if kind == "d":
                nan = np.isnan(view(result[:2], "d")) & np.isnan(view(np.array(wanted), "d"))
                good = nan | (got == expected)
            elif kind in HALF:
                good = (got == expected) | (
                    is_nan(got & 0xFFFF, "h")
                    & is_nan(expected & 0xFFFF, "h")
                    & (kind == "H")
                    & (got >> 16 == expected >> 16)
                )
            else:
                good = same(got, expected, compare, LOOSE.get(name, 0))
            if not good.all():
                lane = int(np.flatnonzero(~good)[0])
                values = [np.asarray(a)[..., lane] for a in arguments]
                pytest.fail(
                    f"{spelled} lane {lane} of {values}: got 0x{got[lane]:08x}, expected "
                    f"0x{expected[lane]:08x}"
                )
    assert ran >= ROUNDS
