"""Measure errors of float8 and 16-bit attention against float64, on inputs with outliers.

``python benchmarks/fp8_accuracy.py [--shape ROWS,HEADS,DIM …] [--save]``. Entries of Q, K and V are
N(0, 1) + N(0, 100)·Bernoulli(0.001), as in the FlashAttention-3 paper (Shah et al. 2024,
arXiv:2407.08608, table of numerical errors), which does not give the shape. The error depends on
the shape, because single outliers matter less in longer rows. All rows of the table are compared
with float64 on unrounded inputs, so an error includes the rounding of Q, K and V. There is no mask,
and the scale is 1/√dim.

Float8 has two columns: with P as the backend keeps it (torch: float32, Triton: bfloat16), and with
P rounded to float8's 4 significant bits, as 8-bit matrix units require.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import machine
import torch

import pyfa
from pyfa import reference
from pyfa.conformance import float8
from pyfa.problem import Call

_SHAPES = ((1024, 4, 64), (1024, 4, 128), (4096, 4, 64), (4096, 4, 128), (8192, 2, 128))
_BLOCK = 128
# What the paper has on an H100, and the bar: float8 with blocks and rotation at most 9.1e-3 where
# per tensor it is 2.4e-2. These two were checked against its text, the others were not.
_PAPER = {
    "float16 eager": 3.2e-4,
    "float16": 1.9e-4,
    "float8, per tensor": 2.4e-2,
    "float8, per tensor, rotated": 9.3e-3,
    "float8, blocks of 128": 2.4e-2,
    "float8, blocks of 128, rotated": 9.1e-3,
}
_BAR = 9.1e-3 / 2.4e-2
# Rows of scores at once: 8,192 keys and 4 heads in float64 are 256 MB.
_ROWS = 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", action="append", metavar="ROWS,HEADS,DIM")
    parser.add_argument("--save", action="store_true", help="write results/fp8_accuracy.json")
    options = parser.parse_args()
    shapes = [tuple(map(int, text.split(","))) for text in options.shape or ()] or _SHAPES
    tables = []
    for rows, heads, dim in shapes:
        tables.append(measure(rows, heads, dim))
        show(tables[-1])
    if options.save:
        results = {"paper": _PAPER, "bar": _BAR, "block": _BLOCK, "tables": tables}
        print(machine.save("fp8_accuracy", results))


def measure(rows: int, heads: int, dim: int, seed: int = 0) -> dict[str, Any]:
    """Root-mean-square errors of every way, for q, k, v (1, rows, heads, dim)."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    q, k, v = inputs((1, rows, heads, dim), seed)
    exact = _by_rows(Call(q, k, v, scale=dim**-0.5), torch.float64)
    errors: dict[str, float] = {}
    rounded: dict[str, float] = {}
    for dtype in (torch.float16, torch.bfloat16):
        half = [x.to(dtype) for x in (q, k, v)]
        name = str(dtype).removeprefix("torch.")
        eager = _by_rows(Call(*half, scale=dim**-0.5), dtype)
        errors[f"{name} eager"] = _rms(eager, exact)
        errors[name] = _rms(pyfa.attention(*(x.to(device) for x in half)), exact)
    for label, options in (
        ("per tensor", {"per_tensor": True}),
        ("per head", {}),
        (f"blocks of {_BLOCK}", {"block": _BLOCK}),
    ):
        for turned in (False, True):
            name = f"float8, {label}" + ", rotated" * turned
            seed_of = seed if turned else None
            x = pyfa.quantize(
                *(x.float().to(device) for x in (q, k, v)), hadamard=turned, seed=seed_of, **options
            )
            # float16 out, so that what is seen is float8's error and not the output's rounding.
            out = pyfa.attention(x.q, x.k, x.v, descale=x.descale, out_dtype=torch.float16)
            errors[name] = _rms(out, exact)
            scales = [s.cpu().expand(1, heads) if s.dim() == 2 else s.cpu() for s in x.descale]
            call = Call(*(t.cpu() for t in x[:3]), scale=dim**-0.5)
            call = call._replace(q_descale=scales[0], k_descale=scales[1], v_descale=scales[2])
            rounded[name] = _rms(_by_rows(call, torch.float32, float8.round_p), exact)
    per_tensor, best = "float8, per tensor", f"float8, blocks of {_BLOCK}, rotated"
    return {
        "rows": rows,
        "heads": heads,
        "head_dim": dim,
        "seed": seed,
        "rms_of_output": float(exact.square().mean().sqrt()),
        "rmse": errors,
        "rmse_with_p_in_float8": rounded,
        "ratio": errors[best] / errors[per_tensor],
        "ratio_with_p_in_float8": rounded[best] / rounded[per_tensor],
    }


def inputs(shape: tuple[int, ...], seed: int) -> list[torch.Tensor]:
    """q, k and v in float64, N(0, 1) + N(0, 100)·Bernoulli(0.001)."""
    source = torch.Generator().manual_seed(seed)

    def normal() -> torch.Tensor:
        return torch.randn(shape, generator=source, dtype=torch.float64)

    return [
        normal() + 10.0 * normal() * (torch.rand(shape, generator=source) < 0.001) for _ in "qkv"
    ]


def _by_rows(
    call: Call,
    dtype: torch.dtype,
    round_p: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> torch.Tensor:
    """``reference.attention`` without a mask, of some rows at a time."""
    outs = []
    for begin in range(0, call.q.shape[1], _ROWS):
        part = call._replace(q=call.q[:, begin : begin + _ROWS])
        if call.q_descale is not None and call.q_descale.dim() == 3:
            first = begin // _BLOCK
            part = part._replace(q_descale=call.q_descale[..., first : first + _ROWS // _BLOCK])
        outs.append(reference.attention(part, dtype, round_p)[0])
    return torch.cat(outs, 1)


def _rms(x: torch.Tensor, exact: torch.Tensor) -> float:
    return float((x.cpu().double() - exact).square().mean().sqrt())


def show(table: dict[str, Any]) -> None:
    print(f"\n{table['rows']} rows, {table['heads']} heads of {table['head_dim']}")
    print(f"{'RMSE':<32}{'here':>10}{'float8 P':>10}{'paper':>10}")
    for name, error in table["rmse"].items():
        p = table["rmse_with_p_in_float8"].get(name)
        cells = (error, p, _PAPER.get(name))
        print(f"{name:<32}" + "".join(f"{'' if x is None else f'{x:.1e}':>10}" for x in cells))
    print(
        f"blocks and rotation over per tensor: {table['ratio']:.2f}, with P in float8 "
        f"{table['ratio_with_p_in_float8']:.2f}; the bar is {_BAR:.2f}"
    )


if __name__ == "__main__":
    main()
