"""Time a backward of grouped heads by the number of parts of a group's query heads.

python benchmarks/backward_groups.py --save           # on a GPU: backward_groups_<gpu>.json
python benchmarks/backward_groups.py --model --save   # the MI300X timing model: mi300x_groups.json

On a GPU, one process measures all numbers of parts of a shape in turn, for several rounds. A figure
is the median over the rounds, in µs. "chosen" is the number of parts that pyfa chooses
(``splits.of_group``).
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import machine
import torch

import pyfa
from pyfa import binding, bound
from pyfa.backends.common import splits
from pyfa.bound import Table

# batch, rows and keys, query heads, KV heads, head_dim, causal
SHAPES = (
    (2, 8192, 16, 1, 128, True),
    (1, 8192, 32, 1, 128, True),
    (1, 8192, 8, 1, 128, True),
    (1, 4096, 8, 1, 128, False),
    (1, 8192, 64, 8, 128, True),
    (2, 8192, 32, 8, 128, True),
    (2, 4096, 32, 8, 128, True),
    (8, 1024, 64, 8, 128, True),
    (8, 1024, 32, 8, 128, True),
    (8, 1024, 32, 4, 128, True),
    (8, 1024, 32, 1, 128, True),
    (1, 1024, 32, 8, 128, True),
    (1, 2048, 64, 8, 128, True),
    (1, 4096, 32, 4, 128, True),
    (4, 4096, 16, 2, 128, True),
    (8, 1024, 64, 8, 128, False),
    (1, 8192, 32, 8, 128, True),
    (1, 4096, 32, 4, 256, True),
    (1, 8192, 64, 8, 64, True),
)
_ROUNDS, _MICROSECONDS = 7, 15_000


@contextmanager
def divided(parts: int) -> Iterator[list[int]]:
    """Divide groups into ``parts``; if that is 0, as pyfa chooses, which the list then holds."""
    seen: list[int] = []
    original = splits.of_group

    def of_group(*arguments: Any) -> int:
        seen.append(parts or original(*arguments))
        return seen[-1]

    with (
        mock.patch.object(splits, "of_group", of_group),
        mock.patch.object(binding, "calls", Table()),
        mock.patch.object(bound, "calls", Table()),
    ):
        yield seen


def parts_of(group: int) -> list[int]:
    return [parts for parts in range(1, group + 1) if group % parts == 0]


def _backward(shape: tuple[int, int, int, int, int, bool], parts: int) -> Callable[[], Any]:
    """Return a backward that is bound with ``parts``."""
    batch, length, heads_q, heads_k, dim, causal = shape
    q, k, v, dout = (
        torch.randn(batch, length, heads, dim, device="cuda", dtype=torch.bfloat16)
        for heads in (heads_q, heads_k, heads_k, heads_q)
    )
    leaves = [x.requires_grad_() for x in (q, k, v)]
    with divided(parts):
        out = pyfa.attention(*leaves, causal=causal)
        torch.autograd.grad(out, leaves, dout, retain_graph=True)
    return lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True)


def _microseconds(run: Callable[[], Any], times: int) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    for _ in range(times):
        run()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / times * 1e3


def measured(shape: tuple[int, int, int, int, int, bool]) -> dict[str, Any]:
    counts = parts_of(shape[2] // shape[3])
    runs = {parts: _backward(shape, parts) for parts in counts}
    times = max(1, int(_MICROSECONDS / _microseconds(runs[1], 2)))
    found: dict[int, list[float]] = {parts: [] for parts in counts}
    for _ in range(_ROUNDS):
        for parts, run in runs.items():
            found[parts].append(_microseconds(run, times))
    with divided(0) as chosen:
        _backward(shape, 0)
    quartiles = {parts: statistics.quantiles(x, n=4) for parts, x in found.items()}
    return {
        "us": {parts: round(x[1], 1) for parts, x in quartiles.items()},
        "quartiles": {parts: [round(x[0], 1), round(x[2], 1)] for parts, x in quartiles.items()},
        "chosen": chosen[0],
    }


def modelled(shape: tuple[int, int, int, int, int, bool]) -> dict[str, Any]:
    """Return the model's microseconds, the most and the least."""
    import mi300x_own

    batch, length, heads_q, heads_k, dim, causal = shape
    flags = f"--batch {batch} --seqlen {length} --heads {heads_q},{heads_k} --head-dim {dim}"
    flags += " --features backward" + causal * " --causal"

    def seconds(parts: int) -> tuple[list[float], int]:
        with divided(parts) as chosen:
            (row,) = mi300x_own.modelled_rows((flags,))
        return [round(x * 1e6) for x in row["seconds"]], chosen[0]

    counts = parts_of(heads_q // heads_k)
    return {"us": {parts: seconds(parts)[0] for parts in counts}, "chosen": seconds(0)[1]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", action="store_true", help="the MI300X timing model")
    parser.add_argument("--save", action="store_true", help="write a file into results/")
    options = parser.parse_args()
    rows = []
    for shape in SHAPES:
        if options.model and shape[4] == 256:
            continue  # two passes, whose workgroups own rows as well
        found = (modelled if options.model else measured)(shape)
        names = ("batch", "seqlen", "heads_q", "heads_k", "head_dim", "causal")
        rows.append({**dict(zip(names, shape, strict=True)), **found})
        print(rows[-1], flush=True)
    if options.save:
        what = "microseconds of a backward, by parts of a group's query heads"
        name = "mi300x_groups"
        if options.model:
            what += "; model, not measured"
        else:
            name = f"backward_groups_{machine.gpu()}"
        print(machine.save(name, {"what": what, "rows": rows}))


if __name__ == "__main__":
    main()
