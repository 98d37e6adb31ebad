"""VOPC: every comparison and class test, with and without writing EXEC, against numpy."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from single_instructions import draw, run, view

from pyfa.emulator import tables

KINDS = {
    "f32": "f",
    "f16": "h",
    "f64": "d",
    "i32": "i",
    "u32": "u",
    "i16": "t",
    "u16": "s",
    "i64": "l",
    "u64": "q",
}
CONDITIONS: dict[str, Any] = {
    "f": lambda x, y: np.zeros(64, bool),
    "lt": np.less,
    "eq": np.equal,
    "le": np.less_equal,
    "gt": np.greater,
    "lg": lambda x, y: (x < y) | (x > y),
    "ge": np.greater_equal,
    "o": lambda x, y: ~(np.isnan(x) | np.isnan(y)),
    "u": lambda x, y: np.isnan(x) | np.isnan(y),
    "nge": lambda x, y: ~(x >= y),
    "nlg": lambda x, y: ~((x < y) | (x > y)),
    "ngt": lambda x, y: ~(x > y),
    "nle": lambda x, y: ~(x <= y),
    "neq": np.not_equal,
    "nlt": lambda x, y: ~(x < y),
    "tru": lambda x, y: np.ones(64, bool),
    "ne": np.not_equal,
    "t": lambda x, y: np.ones(64, bool),
}
MASK = 0x0123456789ABCDEF


def classes(x: Any, wanted: Any) -> Any:
    """ISA: signalling NaN 1, quiet NaN 2, -inf 4, -normal 8, -denormal 16, -0 32, then positive."""
    info = np.finfo(x.dtype)
    bits = x.view({2: np.uint16, 4: np.uint32, 8: np.uint64}[x.dtype.itemsize])
    quiet = (bits >> (info.nmant - 1) & 1).astype(bool)
    denormal = (x != 0) & (np.abs(x) < info.smallest_normal)
    minus = np.signbit(x)
    where = np.select(
        [
            np.isnan(x) & ~quiet,
            np.isnan(x),
            np.isinf(x) & minus,
            np.isinf(x),
            denormal & minus,
            denormal,
            (x == 0) & minus,
            x == 0,
            minus,
        ],
        [0, 1, 2, 9, 4, 7, 5, 6, 3],
        8,
    )
    return (wanted >> where & 1).astype(bool)


@pytest.fixture(scope="module")
def outcomes() -> list[Any]:
    rng = np.random.default_rng(11)
    jobs, snippets, inputs = [], [], []
    for name in tables.VOPC.values():
        match = re.fullmatch(r"v_cmp(x?)_(\w+)_(\w+)", name)
        assert match
        kind = KINDS[match[3]]
        second = "u" if match[2] == "class" else kind
        for encoding in ("e32", "e64"):
            rows = np.concatenate(
                [draw(kind, rng), draw(second, rng), draw("u", rng), draw("u", rng)]
            )
            same = rng.random(64) < 0.3
            if second == kind:
                rows[2:4, same] = rows[0:2, same]
            operands = ", ".join(
                f"v[{r}:{r + 1}]" if k in "dlq" else f"v{r}" for r, k in ((2, kind), (4, second))
            )
            to = "vcc" if encoding == "e32" else "s[30:31]"
            snippets.append(
                f"s_mov_b32 exec_lo, 0x{MASK & 0xFFFFFFFF:x}\ns_mov_b32 exec_hi, 0x{MASK >> 32:x}\n"
                f"{name}_{encoding} {to}, {operands}\ns_mov_b64 s[20:21], {to}\n"
                "s_mov_b64 s[22:23], exec\ns_mov_b64 exec, -1\nv_mov_b32 v8, s22\nv_mov_b32 v9, s23"
            )
            inputs.append(rows)
            jobs.append((name, match[1], match[2], kind, second))
    results = run(snippets, np.array(inputs))
    return [(*job, rows, result) for job, rows, result in zip(jobs, inputs, results, strict=True)]


@pytest.mark.parametrize("name", sorted(tables.VOPC.values()))
def test_comparison(name: str, outcomes: list[Any]) -> None:
    active = np.array([MASK >> lane & 1 for lane in range(64)], bool)
    for case, to_exec, condition, kind, second, rows, result in outcomes:
        if case != name:
            continue
        x, y = view(rows[0:2], kind), view(rows[2:4], second)
        wanted = (classes(x, y) if condition == "class" else CONDITIONS[condition](x, y)) & active
        mask = sum(1 << lane for lane in range(64) if wanted[lane])
        assert int(result[2, 0]) | int(result[3, 0]) << 32 == mask
        left = int(result[0, 0]) | int(result[1, 0]) << 32
        assert left == (mask if to_exec else MASK)
