"""Holds the Triton kernels to the conformance rule in Triton's interpreter; prints JSON.

Run by test_triton_interpreter.py as a process of its own: TRITON_INTERPRET is read when the kernels
are decorated, so one process cannot both interpret and compile.

    TRITON_INTERPRET=1 python interpreted.py OF GROUP…

Of the cases of a group, and of the faults planted in block lists, one in OF is run.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import json
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from fast_interpreter import speed_up

from pyfa import binding, blocks, bound, conformance, dispatch, mods, reference
from pyfa.backends import BACKENDS
from pyfa.backends.base import Saved
from pyfa.backends.triton import backward as triton_backward
from pyfa.backends.triton import forward, plans, runtime_backward, specs
from pyfa.backends.triton import lists as triton_lists
from pyfa.backends.triton.runtime import Runner
from pyfa.backends.triton.runtime_lists import ByLists
from pyfa.blocks import kept
from pyfa.conformance import grid
from pyfa.device import CPU
from pyfa.problem import Call, problem_of, tensors_of

# One case of each kind, by the words that its name must hold.
CASES = {
    "masks": ("backward-causal", "backward-window=9,-1", "causal-window=12,0", "fp16-b2-q17",
              "q63-k2", "q129-k17"),
    "scores": ("backward-softcap=2.0", "backward-alibi=heads", "bias=hidden-sinks", "scale=0.0",
               "backward-bias=bool-sinks", "dropout_p=0.9"),
    "gradients": ("dlse=both-causal", "bias=rows-bias_grad", "bias=keys-bias_grad",
                  "dlse=both-sinks", "d64x40-backward", "h4x1"),
    "layouts": ("varlen-bf16", "used_q", "page_size=32", "page_size=5", "kvcache", "leftpad",
                "batch_idx", "d1x256", "d59x59-backward", "gapped"),
    "float8": ("dense-fp8-b2-q65", "dense-fp8fnuz-b2", "fp8-b2-q65-k97-h6x3", "varlen-fp8-b4",
               "page_size=32-scales", "kvcache-bf16", "leftpad-cache_dtype", "num_splits=3-cache",
               "page_size=64-cache"),
    "mods": ("d64x64-backward-mask_mod=documents", "score_mod=gated", "mask_mod=strided",
             "page_size=16-mask_mod=prefix"),
    "bands": ("backward-attention_chunk=16", "causal-attention_chunk=40", "window=40,-9",
              "alibi=batch", "window=-2,9", "varlen-bf16", "window=-6,-1"),
    "trees": ("causal-tree", "num_splits=3-tree", "sinks-tree", "packed_q-tree"),
    "wide": ("b1-q33-k65-h2x2-d320x320", "d64x500", "b1-q65-k97-h2x2-d576x512-backward",
             "varlen-fp16-b3-q5,64,33-k97,64,31-h4x2-d320x320-backward", "page_size=16",
             "d259x259", "num_splits=3"),
    "latent": ("h4x1-d576x512", "topk=20", "page_size=16", "d320x256", "num_splits=3",
               "sinks-slack=3-page_size=7", "causal-scale=0.05-cache_dtype"),
    # Not of float8: the interpreter takes its NaN for 480.
    "hostile": ("q65-k97-h4x2-d64x64-backward-causal-hostile=k=nan", "sinks-hostile=q=nan",
                "page_size=16-hostile=q=nan", "num_splits=3-hostile=v=nan",
                "q33-k33-h2x2-d64x64-hostile=q=-inf", "window=40,0-hostile=k=inf",
                "num_splits=3-hostile=padding"),
}  # fmt: skip


def conform(group: str, of: int) -> list[str]:
    """What fails of a group's cases: for each word the first quick case whose name holds it."""
    backend = BACKENDS["triton"]
    cases = grid.cases("quick", backend.FEATURES, backend.DTYPES, None, 97)
    chosen = {}
    for word in CASES[group][::of]:
        for case in cases:
            alike = ("fp8" in case.features) == (group == "float8") or group == "latent"
            banded = not case.features.isdisjoint(("chunk", "negative_edge"))
            alike = alike and (banded == (group == "bands") or group == "wide")
            for family in ("wide", "latent"):
                alike = alike and (family in case.features) == (group == family)
            if word in case.name and alike and bool(case.hostile) == (group == "hostile"):
                chosen[case.name] = case
                break
    report = conformance.run_cases(backend, list(chosen.values()))
    return [
        f"{result.name}: {result.status} {' '.join(result.messages)[-600:]}"
        for result in report.results
        if result.status != "passed"
    ]


def paths() -> list[str]:
    """What fails of the ways that the plans of a CPU do not take: splits, copy engine, dies."""
    torch.manual_seed(0)
    r, failures = torch.randn, []
    used = torch.tensor([7, 290], dtype=torch.int32)
    q, k, v = r(2, 1, 8, 64), r(2, 300, 2, 64), r(2, 300, 2, 64)
    decode = Call(q, k, v, seqused_k=used, max_seqlen_q=1, max_seqlen_k=300, scale=0.1)
    dense = Call(
        r(2, 70, 4, 64), r(2, 90, 2, 64), r(2, 90, 2, 64), max_seqlen_q=70, max_seqlen_k=90,
        scale=0.1, window_right=0,
    )  # fmt: skip
    few_heads = dense._replace(q=r(1, 70, 2, 64), k=r(1, 90, 1, 64), v=r(1, 90, 1, 64))
    packed = Call(
        r(73, 4, 64), r(93, 2, 64), r(93, 2, 64), max_seqlen_q=65, max_seqlen_k=50, scale=0.1,
        window_right=0, cu_seqlens_q=torch.tensor([0, 5, 5, 70], dtype=torch.int32),
        cu_seqlens_k=torch.tensor([0, 33, 40, 90], dtype=torch.int32),
    )  # fmt: skip
    # All but flat: what is left of 1 − tanh² must not be a difference.
    capped = few_heads._replace(q=few_heads.q.abs() * 2, k=few_heads.k.abs() + 1, softcap=3.0)
    copied = {"fwd_tma": True, "dk_tma": True, "dq_tma": True}
    for name, call, change, backward in (
        ("3 parts", decode._replace(num_splits=3), lambda c: {}, False),
        ("30 parts, sinks", decode._replace(num_splits=30, sinks=r(8)), lambda c: {}, False),
        ("4 parts, many rows", few_heads._replace(num_splits=4), lambda c: {}, False),
        ("copy engine", dense, lambda c: copied, True),
        ("copy engine, packed", packed, lambda c: copied, True),
        ("dK and dV apart", few_heads,
         lambda c: {f"dv{key[2:]}": c[key] for key in c if key.startswith("dk_")}, True),
        ("eight dies", dense, lambda c: {"dies": 8}, True),
        ("wide offsets", few_heads, lambda c: {}, False),
        ("saturated softcap", capped, lambda c: {}, True),
    ):  # fmt: skip
        failures += [f"{name}: {what}" for what in _compare(call, change, backward)]
    return failures


def lists(of: int) -> list[str]:
    """What fails of block lists: calls whose kernels visit by them, and planted faults in lists and
    in what kernels make of them that are not found."""
    torch.manual_seed(0)
    r, cpu = torch.randn, torch.device("cpu")
    ids = torch.arange(300) // 100
    ends = torch.tensor([40, 130, 190, 300])

    def call(mask_mod: Callable, rows: int, keys: int, heads: int, heads_k: int, **more) -> Call:
        digest, captured = mods.resolve(None, mask_mod, cpu)
        slots = {f"captured{slot}": x for slot, x in enumerate(captured)}
        shapes = ((2, rows, heads, 64), (2, keys, heads_k, 64), (2, keys, heads_k, 64))
        return Call(
            *map(r, shapes), max_seqlen_q=rows, max_seqlen_k=keys, scale=0.1, mods=digest,
            **slots, **more,
        )  # fmt: skip

    documents = call(lambda b, h, i, j: ids[i] == ids[j], 100, 200, 2, 1)
    by_head = call(lambda b, h, i, j: (j < ends[h]) & (i + b * 64 >= j), 100, 130, 2, 1)
    used = torch.tensor([7, 190], dtype=torch.int32)
    cases = {
        "documents": (documents, True),
        "by head and sequence": (by_head, True),
        "nothing hidden": (call(lambda b, h, i, j: i >= 0, 70, 90, 1, 1), True),
        "rows that see nothing": (call(lambda b, h, i, j: i < 60, 130, 90, 1, 1), True),
        "window": (documents._replace(window_left=60, window_right=20), True),
        "lengths": (documents._replace(seqused_k=used), False),
        # Few rows: combining the parts takes a program for each.
        "window in splits": (
            call(lambda b, h, i, j: ids[i + 100] <= ids[j], 40, 300, 1, 1, num_splits=2,
                 window_left=140, window_right=20), False,
        ),
        "decode": (call(lambda b, h, i, j: j % 97 < 64, 2, 300, 8, 2), False),
        "decode by head": (call(lambda b, h, i, j: j < ends[h % 4], 2, 300, 8, 2), False),
        "decode in splits": (call(lambda b, h, i, j: j % 97 < 64, 2, 300, 8, 2, num_splits=4),
                             False),
    }  # fmt: skip

    def compared(names=tuple(cases)) -> Iterator[str]:
        kept.clear()
        for name in names:
            given, with_backward = cases[name]
            for what in _compare(given, lambda c: {}, with_backward):
                yield f"{name}: {what}"

    failures = list(compared())
    few = ("window in splits",)
    make, visits = ByLists._make, triton_lists.visits

    def fewer(self, call, tiles):
        counts, entries = make(self, call, tiles)
        return blocks.Lists((counts - torch.tensor([0, 1])).clamp(min=0).int(), entries)

    def as_full(self, call, tiles):
        counts, entries = make(self, call, tiles)
        return blocks.Lists(counts[..., 1:].expand(counts.shape).contiguous(), entries)

    def of_others(self, call, tiles):
        counts, entries = make(self, call, tiles)
        return blocks.Lists(counts.roll(1, 2).contiguous(), entries.roll(1, 2).contiguous())

    # Of documents both blocks have the same list.
    of_lists = (*few, "by head and sequence")
    for fault in (fewer, as_full, of_others):
        ByLists._make = fault
        if not any(compared(of_lists)):
            failures.append(f"lists with a fault are not found: {fault.__name__}")
    ByLists._make = make
    # Places in a list, as ``visits`` returns them: first, last, before, behind, asked, partial.
    for place, change in ((1, 1), (2, 1), (3, -1), (4, -1), (5, 1), (6, -1))[::of]:

        def wrong(*given, place=place, change=change, **named):
            found = list(visits(*given, **named))
            found[place] = found[place] + change
            return tuple(found)

        forward.visits = triton_backward.visits = wrong
        if not any(compared(few)):
            failures.append(f"result {place} of visits with a fault is not found")
    forward.visits = triton_backward.visits = visits
    return failures


def _compare(call: Call, change: Callable[[dict], dict], backward: bool) -> list[str]:
    plan = plans.plan(problem_of(call, backward, False, CPU, True).bucketed(), "triton")
    constants = dict(plan.constants)
    constants |= change(constants)
    runner = Runner(dataclasses.replace(plan, constants=tuple(sorted(constants.items()))))
    out, lse, *_ = runner.bind(call, True)(*tensors_of(call))
    want, want_lse = reference.attention(call)
    pairs = {"out": (out, want), "lse": (lse.exp(), want_lse.exp())}
    if backward:
        dout = torch.randn_like(out)
        # Laid out in another way than the forward's, as PyTorch's operator may hand them in.
        of_forward = [x.mT.contiguous().mT for x in (out, lse)]
        run = runtime_backward.bind(runner, Saved(call, *of_forward, dout), False)
        found = run(dout, *of_forward, *tensors_of(call))
        expected = reference.gradients(call, dout)
        for name in ("dq", "dk", "dv"):
            pairs[name] = (getattr(found, name), expected[name])
    return [
        f"{name} is off by {error:.1e}"
        for name, (x, y) in pairs.items()
        if not (error := float((x - y).abs().max() / y.abs().max())) < 1e-5
    ]


def invariance() -> list[str]:
    """What of ``batch_invariant`` fails: bits that depend on company, or a planted dependence on it
    that is not found."""
    sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
    cases = importlib.import_module("invariance_cases")
    sizes = cases.Sizes((3,), (1000,), (48,), (2,), ())
    model = cases.Model(2, 1, 64, 64, torch.float16, window=100, longest=200)

    def compared() -> list[str]:
        found = cases.run(
            [model], rows=2, device="cpu", backend="triton", sizes=sizes, with_gradients=1, seed=5
        )
        return [f"{each.company}: {each.what} of {each.row}" for each in found.failures]

    failures = compared()
    usual = specs._common
    specs._common = lambda *given: usual(*given) | {"ORDERED": False}
    for known in (dispatch._prepared, binding.calls, bound.calls):
        known.clear()
    BACKENDS["triton"]._runners.clear()
    if not compared():
        failures.append("tiles that are visited in an order of their own are not found")
    return failures


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    speed_up()
    of, groups = int(sys.argv[1]), sys.argv[2:]
    own = {"paths": paths, "invariance": invariance, "lists": functools.partial(lists, of)}
    failures = {which: own[which]() if which in own else conform(which, of) for which in groups}
    print(json.dumps({which: found for which, found in failures.items() if found}))
