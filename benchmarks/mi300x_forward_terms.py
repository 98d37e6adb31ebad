"""Apply the MI300X timing model to the forward with a score term alone, and over pages.

``python benchmarks/mi300x_forward_terms.py [--save]``: clocks in which a workgroup computes a tile
of keys, at both ends of the model's range (model, not measured), in bfloat16. ``own``: the plan of
the term, or of pages without terms; ``general``: the plan of all terms, with the same call. All
query rows share the row of the "shared bool bias". Pages of 64 keys are whole groups of 16, but the
plan of "pages of any size" does not know it.
``--save`` writes ``results/mi300x_forward_terms.json``.
"""

from __future__ import annotations

import argparse
from typing import Any

import machine
import mi300x_mods
import torch

from pyfa.backends.common.calls import GENERAL, PLAIN
from pyfa.backends.hip import forward, samples
from pyfa.problem import Call

_PAGE = 64
# The score class of each call's own plan, and the head dims that have it.
CALLS = {
    "plain": (PLAIN, (64, 96, 128, 256)),
    "bias": (forward.BIAS, (64, 96, 128)),
    "float32 bias": (forward.FLOAT32_BIAS, (64, 96, 128)),
    "bool bias": (forward.BOOL_BIAS, (64, 96, 128)),
    "shared bool bias": (forward.BOOL_BIAS, (64, 96, 128)),
    "ALiBi": (forward.ALIBI, (64, 96, 128)),
    "softcap": (forward.SOFTCAP, (64, 96, 128, 256)),
    "pages": (PLAIN, (64, 128, 256)),
    "pages of any size": (PLAIN, (64, 128, 256)),
}
_PAGING = {"pages": forward.WHOLE_GROUPS, "pages of any size": forward.ANY_PAGES}


def call_of(name: str, dim: int, rows: int, keys: int) -> Call:
    call = samples._call({"HEAD_DIM": dim, "HEAD_DIM_V": dim, "DTYPE": 1}, rows, keys)
    if "bias" in name:
        dtype = {"bias": torch.bfloat16, "float32 bias": torch.float32}.get(name, torch.bool)
        bias = samples._zeros(1, 1, 1 if "shared" in name else rows, keys, dtype=dtype)
        return call._replace(bias=bias.fill_(dtype == torch.bool))
    if name == "ALiBi":
        return call._replace(alibi_slopes=torch.ones(1, 1))
    if name == "softcap":
        return call._replace(softcap=30.0)
    if name in _PAGING:
        k, v = (x.unflatten(1, (-1, _PAGE)).squeeze(0) for x in (call.k, call.v))
        return call._replace(
            k=k,
            v=v,
            page_table=torch.arange(keys // _PAGE, dtype=torch.int32)[None],
            seqused_k=torch.tensor([keys], dtype=torch.int32),
        )
    return call


def modelled(name: str, dim: int, score: int) -> dict[str, Any]:
    paged = _PAGING.get(name, forward.UNPAGED)
    if score == GENERAL:
        paged = min(paged, forward.ANY_PAGES)
    plan = mi300x_mods.forward_plan(dim, score, paged)
    return mi300x_mods.forward_tile(plan, lambda rows, keys: call_of(name, dim, rows, keys))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    rows = []
    for name, (score, dims) in CALLS.items():
        for dim in dims:
            row = {"call": name, "head_dim": dim, "own": modelled(name, dim, score)}
            if name != "plain":
                row["general"] = modelled(name, dim, GENERAL)
            rows.append(row)
            print(row, flush=True)
    if options.save:
        results = {"what": "model, not measured", "rows": rows}
        print(machine.save("mi300x_forward_terms", results))


if __name__ == "__main__":
    main()
