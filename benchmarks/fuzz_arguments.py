"""Make random calls with one wrong argument each, and check that the error names it.

``python benchmarks/fuzz_arguments.py [--backend B] [--calls 2000] [--jobs N] [--seed S] [--save]``.
A call is a small problem of ``fuzz.py``. It is made as it is, then with one argument that no
meaning of the function allows: another type, dtype, device, shape or layout, a value outside its
range, a misspelled name, one of a pair without the other; then as it is again. Half of the wrong
calls come before the right one, half after it, when pyfa has bound it. The answer has to be a
``ValueError`` or ``TypeError`` whose first words name the argument (where two arguments disagree,
either), or an ``UnsupportedProblem``; nothing may have been written, and the right call has to give
the bits that it gave. Anything else is printed: "accepted", or the raw error. The status is 1 then.
``--save`` writes ``results/fuzz_arguments_<backend>.json``.
"""

from __future__ import annotations

import argparse
import collections
import inspect
import multiprocessing
import os
import random
import re
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import fuzz
import machine
import numpy as np
import torch

import pyfa
from pyfa import binding, bound
from pyfa.backends import BACKENDS
from pyfa.bound import Table
from pyfa.conformance import build, modifiers
from pyfa.conformance.cases import Case

FUNCTIONS: dict[str, Callable[..., Any]] = {
    "dense": pyfa.attention, "varlen": pyfa.attention_varlen, "kvcache": pyfa.attention_kvcache,
}  # fmt: skip
_LENGTHS = ("seqused_q", "seqused_k", "cache_seqlens", "cache_leftpad", "cache_batch_idx",
            "rotary_seqlens", "page_table")  # fmt: skip
_OFFSETS = ("cu_seqlens_q", "cu_seqlens_k", "cu_seqlens_new")
_FLAGS = ("causal", "deterministic", "return_lse", "batch_invariant", "rotary_interleaved")
_COUNTS = ("num_splits", "attention_chunk", "max_seqlen_q", "max_seqlen_k")
_NAN, _INF = float("nan"), float("inf")
_NEVER = 1 << 20  # more rows, keys and pages than any of these problems has


class Wrong(NamedTuple):
    """``arguments`` in place of the right ones; ``names``: those that the answer may name."""

    what: str
    arguments: dict[str, Any]
    names: tuple[str, ...]


def call_of(case: Case, backend: str) -> dict[str, Any]:
    """The arguments of a case's call."""
    inputs = build.build(case)
    given = {name: item.view(item.buffer.clone()) for name, item in inputs.placed.items()}
    scales = tuple(given.pop(f"{name}_descale", None) for name in "qkv")
    given |= {**inputs.others, **modifiers.mods_of(case, torch.device("cpu"))}
    if scales[1] is not None:
        given["descale"] = scales
    return {**given, "return_lse": True, "backend": backend}


def wrongs(function: Callable[..., Any], given: dict[str, Any]) -> Iterator[Wrong]:
    """Everything that is wrong with one argument of this call."""
    known = inspect.signature(function).parameters
    for name, value in given.items():
        if isinstance(value, torch.Tensor) and name != "seed":
            yield from _wrong_tensors(name, value, given)
    for name in (each for each in _LENGTHS if isinstance(given.get(each), torch.Tensor)):
        yield from _wrong_lengths(name, given)
    for name in (each for each in _OFFSETS if isinstance(given.get(each), torch.Tensor)):
        yield from _wrong_offsets(name, given[name])
    for name in (each for each in _FLAGS if each in known):
        for value in (2, -1, 0.5, "yes", torch.ones(2), []) + ((None,) if name != "x" else ()):
            yield Wrong(f"a flag is {value!r}", {name: value}, (name,))
    for name in (each for each in _COUNTS if each in known):
        wrong_counts: tuple[Any, ...] = (-1, 1.5, True, "7", torch.ones(2), [3])
        if name.startswith("max_seqlen"):
            wrong_counts += (1 << 31, *((None,) if given.get(name) is not None else ()))
            if name in given:
                yield from _too_short(name, given)
        for value in wrong_counts:
            if name in given or not name.startswith("max_seqlen"):
                yield Wrong(f"a count is {value!r}", {name: value}, (name,))
    for name, values in {
        "scale": (_NAN, _INF, -_INF, 1e39, "0.1", True, 1j, [0.1], torch.ones(2)),
        "softcap": (-1.0, _NAN, _INF, "30", None, True, 1j, [30.0], torch.ones(2)),
        "dropout_p": (1.0, 1.5, -0.1, _NAN, "0.1", None, True, [0.1], torch.ones(2)),
        "seed": (1.5, "7", True, [7]),
        "window": (5, "5,5", (1,), (1, 2, 3), (1.5, 2), (True, 1), ("1", 2), torch.ones(2), {}),
        "backend": ("tirton", "", 3, ("torch", "nope"), (), [], {"torch"}, torch.ones(2)),
        "out_dtype": ("bfloat16", torch.float64, torch.int8, 16, float),
        "score_mod": (5, "causal", lambda: 0, torch.ones(2)),
        "mask_mod": (5, "causal", lambda: True, torch.ones(2)),
        "alibi_slopes": ([0.5], 0.5, "0.5"), "sinks": ([0.5], 0.5, "x"), "bias": ([0.5], 0.5, "x"),
        "page_table": ([[0]], 0, "x"), "seqused_k": ([1], 1, "x"),
        "cache_leftpad": ([0], 0, "x"), "cache_batch_idx": ([0], 0, "x"),
    }.items():  # fmt: skip
        for value in values if name in known else ():
            yield Wrong(f"{name} is {type(value).__name__} {value!r}"[:90], {name: value}, (name,))
    if "seed" in known and given.get("dropout_p"):
        for value in (1 << 64, -(1 << 63) - 1, torch.ones(1), torch.ones(2, dtype=torch.int64)):
            yield Wrong(f"seed is {value!r}", {"seed": value}, ("seed",))
    if "descale" in known and given["q"].itemsize > 1 and "descale" not in given:
        ones = torch.ones(())
        yield Wrong("scales of no float8", {"descale": (ones, ones, ones)}, ("descale",))
    for name in ("block_table", "softmax_scale", "is_causal", "causl", "x", "window_size"):
        yield Wrong("an argument that is none", {name: None}, (name,))
    yield from _halves(given, known)


def _wrong_tensors(name: str, x: torch.Tensor, given: dict[str, Any]) -> Iterator[Wrong]:
    """Of another kind, dtype, device or shape."""
    main = name in ("q", "k", "v", "k_cache", "v_cache")
    number = name == "cache_seqlens"  # which may be an int
    for what, value in {
        "a list": x.float().tolist() if x.numel() < 99 else [1.0], "a str": "x",
        "an array": np.zeros(tuple(x.shape), np.float32), "an object": object(),
    }.items():  # fmt: skip
        yield Wrong(f"{name} is {what}", {name: value}, (name,))
    if main and name in "qkv":
        yield Wrong(f"{name} is None", {name: None}, (name,))
    if not number:
        yield Wrong(f"{name} is a number", {name: 1.5}, (name,))
    if x.itemsize > 1 and x.dtype != torch.bool:
        yield Wrong(f"{name} is sparse", {name: x.to_sparse()}, (name,))
    dtypes = [torch.complex64, torch.int64, torch.int16]
    dtypes += [torch.float64] if main else []
    dtypes += [torch.float32, torch.bool] if x.dtype == torch.int32 else []
    dtypes += [torch.bool] if main or name in ("sinks", "alibi_slopes") else []
    related = _together(name, given)
    for dtype in dtypes:
        changed = torch.zeros(x.shape, dtype=dtype)
        yield Wrong(f"{name} in {dtype}", {name: changed}, related if main else (name,))
    yield Wrong(f"{name} on meta", {name: x.to("meta")}, related if main else (name,))
    if name != "bias":
        yield Wrong(f"{name} with one dimension more", {name: x[None]}, related)
        yield Wrong(f"{name} with one dimension less", {name: x.flatten(0, 1)} if x.dim() > 1
                    else {name: x.sum(dtype=x.dtype)}, related)  # fmt: skip
    # Sizes that others have to share: all of k's, v's but the last, of q the last.
    dims: tuple[int, ...] = ()
    if name in ("k", "k_cache"):
        dims = tuple(range(x.dim()))
    elif name in ("v", "v_cache"):
        dims = tuple(range(x.dim() - 1)) if name == "v_cache" or "k_cache" not in given else (-1,)
    elif name == "q":
        dims = (-1,)
    elif name in ("sinks", "alibi_slopes", *_LENGTHS, *_OFFSETS) and x.numel():
        dims = (0,)
    elif name in ("rotary_cos", "rotary_sin"):
        dims = (0, 1)
    for dim in dims:
        if x.shape[dim] and x.itemsize > 1:
            more = torch.cat([x, x.narrow(dim, 0, 1)], dim)
            of = related if main or name in _OFFSETS or name.startswith("rotary") else (name,)
            yield Wrong(f"{name} with {more.shape[dim]} in dimension {dim}", {name: more}, of)


def _together(name: str, given: dict[str, Any]) -> tuple[str, ...]:
    """Arguments whose shapes, dtypes and devices have to agree with those of ``name``."""
    groups = (("q", "k", "v", "k_cache", "v_cache"), ("rotary_cos", "rotary_sin"))
    for group in groups:
        if name in group:
            extra = [*_LENGTHS, *_OFFSETS, "sinks", "alibi_slopes", "bias", "descale", "seed"]
            return (*group, *(extra if name in ("q", "k", "v", "k_cache", "v_cache") else ()))
    if name in _OFFSETS:
        return (*_OFFSETS, *_LENGTHS, "alibi_slopes", "bias", "k_cache", "k", "q")
    return (name,)


def _wrong_lengths(name: str, given: dict[str, Any]) -> Iterator[Wrong]:
    """Values outside of what there is. Of a page table those that a sequence uses."""
    x = given[name]
    if not x.numel() or (name == "rotary_seqlens" and given["q"].shape[0] == 0):
        return
    names = (name,)
    if name in ("cache_seqlens", "cache_leftpad"):
        names = ("cache_seqlens", "cache_leftpad")
    if name == "page_table":
        used = given.get("seqused_k", given.get("cache_seqlens"))
        lengths = used.tolist() if isinstance(used, torch.Tensor) else [used] * x.shape[0]
        full = [row for row, n in enumerate(lengths) if n]
        if used is None or not full:
            return
        place: tuple[int, ...] = (full[0], 0)
        names = ("page_table", "cache_batch_idx")
    else:
        place = (x.shape[0] - 1,)
    if name == "rotary_seqlens":
        names = ("rotary_seqlens", "rotary_cos")
    for value in (-1, _NEVER, 2**31 - 1, -(2**31)):
        changed = x.clone()
        changed[place] = value
        yield Wrong(f"{name} has {value}", {name: changed}, names)


def _wrong_offsets(name: str, x: torch.Tensor) -> Iterator[Wrong]:
    names = (name, "seqused_q", "seqused_k")
    for place, value in ((0, 1), (0, -1), (-1, _NEVER), (-1, -1)):
        changed = x.clone()
        changed[place] = value
        yield Wrong(f"{name}[{place}] is {value}", {name: changed}, names)
    yield Wrong(f"{name} is empty", {name: x[:0]}, names)


def _too_short(name: str, given: dict[str, Any]) -> Iterator[Wrong]:
    offsets = given.get(name.replace("max_seqlen", "cu_seqlens"))
    if isinstance(offsets, torch.Tensor) and offsets.numel() > 1:
        longest = int(offsets.diff().max())
        if longest:
            of = (name, name.replace("max_seqlen", "cu_seqlens"), "seqused_k", "seqused_q", "bias")
            yield Wrong(f"{name} is {longest - 1} of {longest}", {name: longest - 1}, of)


def _halves(given: dict[str, Any], known: Any) -> Iterator[Wrong]:
    """One of two that belong together."""
    for one, other in (("rotary_cos", "rotary_sin"), ("rotary_sin", "rotary_cos")):
        if one in given:
            yield Wrong(f"{one} alone", {other: None}, ("rotary_cos", "rotary_sin"))
    if "k_cache" in known:
        for one, other in (("k", "v"), ("v", "k")):
            if one in given:
                yield Wrong(f"{one} alone", {other: None}, (one, other))
        if "k" in given:
            yield Wrong("k and v, and no lengths", {"cache_seqlens": None}, ("cache_seqlens",))
        if "page_table" in given:
            rows = torch.zeros(given["page_table"].shape[0], dtype=torch.int32)
            both = ("cache_batch_idx", "page_table")
            yield Wrong("rows and pages", {"cache_batch_idx": rows}, both)
        if "cu_seqlens_q" in given:
            names = ("max_seqlen_q", "q", "cu_seqlens_q")
            yield Wrong("offsets, and no longest", {"max_seqlen_q": None}, names)
            yield Wrong("packed rows, and no offsets", {"cu_seqlens_q": None}, names)


def says(error: Exception, names: tuple[str, ...]) -> bool:
    """Whether an error is an answer."""
    if isinstance(error, pyfa.UnsupportedProblem):
        return True
    if type(error) not in (ValueError, TypeError):
        return False
    if "unexpected keyword argument" in str(error):
        return any(f"'{name}'" in str(error) for name in names)
    return any(name in names for name in re.findall(r"\w+", str(error).partition(": ")[0]))


def content(x: object) -> object:
    """The bytes of a tensor's memory, gaps among them."""
    if not isinstance(x, torch.Tensor):
        return x
    return bytes(x.untyped_storage().tolist()) if x.numel() < 4096 else float(x.double().nansum())


def one(work: tuple[int, str, str]) -> dict[str, Any]:
    """A wrong call: "" or what is wrong with its answer."""
    number, seed, name = work
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    draw = random.Random(f"arguments/{seed}/{number}")
    backend = BACKENDS[name]
    turns = (fuzz.drawn(f"arguments/{seed}/{number}/{turn}", backend, 40) for turn in range(99))
    case = next(case for case in turns if case.kind in FUNCTIONS)
    function = FUNCTIONS[case.kind]
    given = call_of(case, name)
    by_kind = collections.defaultdict(list)
    for each in wrongs(function, given):
        by_kind[min(each.arguments)].append(each)
    # Each argument as often as any other, however much can be wrong with it.
    wrong = draw.choice(by_kind[draw.choice(sorted(by_kind))])
    binding.calls, bound.calls = Table(), Table()
    right: list[torch.Tensor] = []
    is_bound = draw.random() < 0.5
    caches = {each: given[each] for each in ("k_cache", "v_cache") if each in given}
    kept = {each: x.clone() for each, x in caches.items()}

    def call() -> list[torch.Tensor]:
        for each, x in caches.items():
            x.copy_(kept[each])
        out = function(**given)
        return [x.detach().clone() for x in out]

    what, said = "", ""
    try:
        right = call()
        if is_bound:
            right = call()
    except pyfa.UnsupportedProblem:
        return {"what": "the right call is refused", "name": min(wrong.arguments)}
    except Exception as error:
        what, said = "the right call raised", f"{type(error).__name__}: {error}"[:300]
        return {"number": number, "what": what, "case": case.name, "said": said, "name": ""}
    if not is_bound:
        binding.calls, bound.calls = Table(), Table()
    before = {each: content(x) for each, x in given.items()}
    try:
        function(**{**given, **wrong.arguments})
        what = "accepted"
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
        if not says(error, wrong.names):
            what = "a raw error"
    if not what and any(
        before[each] != content(x) for each, x in given.items() if isinstance(x, torch.Tensor)
    ):
        what = "written to"
    if not what and any(
        not torch.equal(x.nan_to_num(7), y.nan_to_num(7))
        for x, y in zip(right, call(), strict=True)
        if x.is_floating_point() and x.itemsize > 1
    ):
        what = "the right call is another"
    return {
        "number": number, "what": what, "wrong": wrong.what, "bound": is_bound, "case": case.name,
        "said": said[:300], "name": min(wrong.arguments),
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--backend", default="torch")
    parser.add_argument("--calls", type=int, default=2000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seed", default="0")
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    begin = time.monotonic()
    numbers = range(options.first, options.first + options.calls)
    work = [(number, options.seed, options.backend) for number in numbers]
    with multiprocessing.get_context("spawn").Pool(options.jobs) as pool:
        found = list(pool.imap_unordered(one, work, chunksize=8))
    bad = [each for each in found if each["what"] not in ("", "the right call is refused")]
    counts = collections.Counter(each["what"] or "refused by name" for each in found)
    for each in sorted(bad, key=lambda each: each["number"]):
        print(each)
    print(f"{len(found)} calls: {dict(counts)}")
    if options.save:
        results = {
            "what": "random calls with one wrong argument: refused by name, or not",
            "backend": options.backend, "seed": options.seed, "calls": len(found),
            "answers": dict(counts), "arguments": dict(collections.Counter(
                each["name"] for each in found).most_common()),
            "bad": bad, "seconds": round(time.monotonic() - begin),
        }  # fmt: skip
        print(machine.save(f"fuzz_arguments_{options.backend}", results))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
