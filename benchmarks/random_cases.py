"""Draw the cases of ``random_launches.py``, and the kernels that should run them."""

from __future__ import annotations

import argparse
import math
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from pyfa import device, dispatch
from pyfa.backends.common.calls import DTYPE_CODES
from pyfa.backends.cuda import backward, plans
from pyfa.backends.native.backward import is_general_problem
from pyfa.conformance import build, examine
from pyfa.conformance.cases import Case, pick
from pyfa.conformance.inputs import Inputs, Placed, integers
from pyfa.problem import Call, is_aligned, problem_of

Fields = dict[str, Any]

_MASKS: tuple[Fields, ...] = (
    {},
    {"causal": True},
    {"causal": True},
    {"causal": True, "window": (200, 0)},
    {"window": (31, 5)},
    {"window": (-1, 70)},
    {"window": (300, -1)},
)
_GRADIENTS: tuple[Fields, ...] = ({}, {}, {"deterministic": True}, {"dlse": "both"})
_TERMS: tuple[Fields, ...] = (
    {"softcap": 20.0},
    {"alibi": "heads"},
    {"softcap": 5.0, "alibi": "batch"},
)
# Many of them fill Hopper's SMs more than once: its forward's blocks then count what they take.
_MANY_HEADS = ((16, 4), (24, 8), (32, 4), (32, 32))
_HEADS = ((1, 1), (2, 2), (3, 1), (4, 2), (8, 1), (8, 8), *_MANY_HEADS, *_MANY_HEADS)
_GAPS = ("contiguous", "contiguous", "strided", "heads_first")


class Kind(NamedTuple):
    """Cases for which Triton compiles the same few kernels.

    ``own``: which passes Hopper's own kernels take: "both", "forward", "backward", or none. Lengths
    are ``least`` to ``longest``. ``weight``: how many there are of it beside others.
    """

    name: str
    own: str
    dims: tuple[tuple[int, int], ...]
    options: tuple[Fields, ...] = ({},)
    weight: int = 1
    least: int = 65  # fewer rows take other tiles of Triton's
    longest: int = 1000  # more keys too
    dtype: str = "bfloat16"
    layouts: tuple[str, ...] = _GAPS
    cached: str = ""  # "decode" or "prefill": attention_kvcache, which has no gradient


KINDS = (
    Kind("128", "both", ((128, 128),), weight=4, least=1, longest=1500),
    Kind("64", "both", ((64, 64),), weight=4, least=1, longest=1500),
    Kind("256", "both", ((256, 256),), weight=2),
    Kind("192, 128", "both", ((192, 128),), weight=2),
    Kind("192", "both", ((160, 160), (176, 176), (192, 192)), weight=2),
    Kind("96", "both", ((80, 80), (96, 96), (112, 112)), weight=2),
    Kind("odd multiples of 8", "both", ((72, 72), (88, 88), (104, 104), (120, 120))),
    Kind("128 fp16", "both", ((128, 128),), dtype="float16"),
    Kind("64 fp16", "both", ((64, 64),), dtype="float16"),
    Kind("copied first", "both", ((64, 64),), layouts=("unaligned", "gapped")),
    Kind("128 terms", "both", ((128, 128),), _TERMS),
    Kind("64 terms", "both", ((64, 64),), _TERMS),
    Kind("sinks", "both", ((64, 64), (128, 128)), ({"sinks": True},)),
    Kind("dropout", "backward", ((128, 128),), ({"dropout_p": 0.2},)),
    Kind("prefill", "forward", ((128, 128),), longest=1500, cached="prefill"),
    Kind("decode", "", ((64, 64), (128, 128)), weight=2, longest=1500, cached="decode"),
)
# In turn, so that few cases are of all kinds too.
IN_TURN = tuple(
    kind for turn in range(max(k.weight for k in KINDS)) for kind in KINDS if turn < kind.weight
)


def drawn(index: int, options: argparse.Namespace) -> tuple[Kind, Case]:
    """Case ``index`` of the seed, the same on every machine."""
    kind = IN_TURN[index % len(IN_TURN)]
    key = f"random_launches/{options.seed}/{index}"

    def choice(axis: str, choices: Any) -> Any:
        return pick(f"{key}/{axis}", choices)

    def below(axis: str, count: int) -> int:
        return integers(f"{key}/{axis}", 1, count)[0]

    batch, (heads_q, heads_k) = 1 + below("batch", 4), choice("heads", _HEADS)
    if kind.cached == "decode":
        heads_q, heads_k = choice("heads", ((8, 2), (16, 4), (32, 8)))
    # Lengths have room for so many scores in all, give or take.
    room = 1.4 * math.sqrt(options.scores / (heads_q * batch))
    longest = max(1, min(kind.longest, options.longest, int(max(room, kind.least))))
    least = min(kind.least, longest)

    def length(axis: str, least: int = least) -> int:
        return least + below(axis, longest - least + 1)

    dim, dim_v = choice("dims", kind.dims)
    fields: Fields = {
        "dtype": kind.dtype,
        "heads_q": heads_q,
        "heads_k": heads_k,
        "head_dim": dim,
        "head_dim_v": dim_v,
        "layout": choice("layout", kind.layouts),
        **choice("masks", _MASKS),
        **choice("options", kind.options),
    }
    if kind.cached:
        rows = choice("rows", (1, 1, 2, 4)) if kind.cached == "decode" else length("rows")
        keys = tuple(max(rows, length(f"keys{b}", 1)) for b in range(batch))
        storage: tuple[Fields, ...] = ({}, {"batch_idx": True}, {"leftpad": True})
        if kind.cached == "decode":
            storage += ({"page_size": 16}, {"page_size": 64}, {"num_splits": 3})
        fields |= {"kind": "kvcache", "lengths_q": (rows,) * batch, "lengths_k": keys, "slack": 3}
        fields |= {"new_keys": choice("new", (0, 0, 1)), **choice("storage", storage)}
        return kind, Case(**fields)
    fields |= {"backward": True, **choice("gradients", _GRADIENTS)}
    if fields["layout"] != "gapped" and below("packed", 5) < 2:
        # Sequences of a pack may have nothing at all, but for the first.
        lengths = [
            tuple(
                below(f"few{side}{b}", 2) if b and below(f"is_few{side}{b}", 6) == 0
                else length(f"{side}{b}", 1 if b else least)
                for b in range(batch)
            )
            for side in "qk"
        ]  # fmt: skip
        same = below("same", 2) == 0
        used: tuple[Fields, ...]
        used = ({}, {}, {"used_q": True}, {"used_k": True}, {"used_q": True, "used_k": True})
        fields |= {
            "kind": "varlen",
            "lengths_q": lengths[0],
            "lengths_k": lengths[0 if same else 1],
        }
        fields |= {"slack": choice("slack", (0, 3)), **choice("used", used)}
        return kind, Case(**fields)
    fields["lengths_q"] = fields["lengths_k"] = (length("rows"),) * batch
    if below("same", 2):
        fields["lengths_k"] = (length("keys", 1),) * batch
    return kind, Case(**fields)


def on_device(inputs: Inputs, where: torch.device) -> Inputs:
    """``inputs`` with all tensors but the sequences there."""

    def moved(x: Any) -> Any:
        if isinstance(x, Placed):
            return replace(x, buffer=x.buffer.to(where))
        return x.to(where) if isinstance(x, torch.Tensor) else x

    spec = Call(*map(moved, inputs.spec))
    return replace(
        inputs,
        placed={name: moved(x) for name, x in inputs.placed.items()},
        others={name: moved(x) for name, x in inputs.others.items()},
        cache_after={name: moved(x) for name, x in inputs.cache_after.items()},
        spec=spec, naive=spec, dout=moved(inputs.dout), dlse=moved(inputs.dlse),
    )  # fmt: skip


def kernels_of(case: Case, inputs: Inputs, backend: str, where: torch.device) -> list[str]:
    """What the plan of the case's forward runs, and of its backward where that has a plan."""
    call = inputs.spec._replace(return_lse=bool(case.dlse), deterministic=case.deterministic)
    problem = problem_of(call, case.backward, False, device.of(where), is_aligned(call))
    plan = dispatch.ask(backend, problem).plan
    if plan is None:
        return []
    found = [plan.kernel]
    if case.backward and backend == "cuda":
        code, general = DTYPE_CODES[problem.dtype], is_general_problem(problem)
        dims = problem.head_dim, problem.head_dim_v
        kernels = backward.plans_for(problem.arch, dims, code, general, case.deterministic)
        found.append(kernels[1].kernel)
    return found


def unexpected(kind: Kind, kernels: list[str], backend: str, where: torch.device) -> str:
    """How a device with kernels of its own did not take these; "" elsewhere and otherwise."""
    if backend != "cuda" or not plans.runs_sm90(device.of(where).arch):
        return ""
    expected = [kind.own in ("both", each) for each in ("forward", "backward")]
    if ["/sm90/" in kernel for kernel in kernels] == expected[: len(kernels)] and kernels:
        return ""
    return f"other kernels than expected: {', '.join(kernels) or 'none'}"


def expected_on(case: Case, where: torch.device) -> examine.Expected | None:
    """What is expected of a case, computed where that is fast; None leaves it to conformance."""
    modified = case.score_mod or case.mask_mod or case.tree or case.dropout_p
    if where.type != "cuda" or modified or case.dtypes[1] not in ("bfloat16", "float16"):
        return None
    here = build.build(case)
    expected, there = examine.Expected(here), examine.Expected(on_device(here, where))
    with torch.device(where):  # the reference makes its masks wherever torch makes tensors
        for name in ("ref", "naive", "recomputed"):
            vars(expected)[name] = {
                each: x if x is None else x.cpu() for each, x in getattr(there, name).items()
            }
    return expected
