"""Random wrong arguments: an error that names one of the function's arguments, or right numbers.

python tests/test_random_arguments.py 2000   # calls, from number 0 on
"""

from __future__ import annotations

import random
import re
import sys
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import pyfa
from pyfa import reference, request
from pyfa.problem import Call

FUNCTIONS: dict[str, tuple[Callable[..., Any], Callable[..., request.Request]]] = {
    "dense": (pyfa.attention, request.dense),
    "packed": (pyfa.attention_varlen, request.varlen),
    "cached": (pyfa.attention_kvcache, request.kvcache),
}
# What an argument takes, by words: all else has to be refused.
KINDS = {
    "causal": "flag", "deterministic": "flag", "return_lse": "flag", "rotary_interleaved": "flag",
    "scale": "number none", "softcap": "number", "dropout_p": "number", "window": "window none",
    "backend": "names none", "seed": "int tensor none", "out_dtype": "dtype none",
    "max_seqlen_q": "int none", "max_seqlen_k": "int", "num_splits": "int",
    "cache_seqlens": "int tensor none", "descale": "none",
}  # fmt: skip
OBJECTS: list[Any] = [
    None, True, False, 0, 1, -1, 3, 2**31, 2**63, 2**70, 0.0, 1.0, 0.5, -2.5, float("nan"),
    float("inf"), 1e300, 1 + 2j, "", "no", "torch", "torch,torch", b"torch", [], [1],
    [1.0, 2.0], (),
    (1, 2), (0, 0), (None, 3), (1.5, 2), (-2, 0), ("a", "b"), {}, {"a": 1}, {1}, range(3), object(),
    int, len, np.int64(3), np.float32(0.5), np.complex64(1), np.bool_(True), np.zeros(2),
    np.zeros((2, 5, 4, 8), np.float32), np.array(0.0), torch.float16, torch.device("cpu"),
    torch.Size((2, 3)),
]  # fmt: skip


def i32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def right(kind: str, draw: random.Random) -> dict[str, Any]:
    """Arguments that are right, some of the optional ones among them."""
    if kind == "dense":
        given: dict[str, Any] = {name: torch.randn(2, 5, 4, 8) for name in "qkv"}
        more: dict[str, Any] = {"bias": torch.randn(5, 5), "alibi_slopes": torch.rand(2, 4)}
    elif kind == "packed":
        given = {name: torch.randn(9, 4, 8) for name in "qkv"}
        given |= {"cu_seqlens_q": i32(0, 4, 9), "cu_seqlens_k": i32(0, 4, 9)}
        given |= {"max_seqlen_q": 5, "max_seqlen_k": 5}
        more = {"bias": torch.randn(1, 5, 5), "seqused_q": i32(3, 5), "seqused_k": i32(4, 2)}
    else:
        given = {"q": torch.randn(2, 3, 4, 8)}
        given |= {name: torch.randn(2, 9, 2, 8) for name in ("k_cache", "v_cache")}
        more = {"cache_seqlens": i32(5, 4), "cache_leftpad": i32(0, 1), "num_splits": 2}
    if kind != "cached":
        more |= {"dropout_p": 0.0, "seed": 5, "deterministic": False}
    more |= {"causal": True, "window": (3, 0), "scale": 0.3, "softcap": 4.0, "return_lse": False}
    more |= {"sinks": torch.randn(4), "backend": "torch"}
    return given | {name: more[name] for name in draw.sample(list(more), draw.randrange(4))}


def changed(x: torch.Tensor, draw: random.Random) -> Any:
    """Something near ``x`` that is mostly wrong."""
    ways: list[Callable[[], Any]] = [
        lambda: x[None], lambda: x[0], lambda: x.double(), lambda: x.long(), lambda: x.bool(),
        lambda: x.to(torch.complex64), lambda: x.to("meta"), lambda: x.tolist(), lambda: x.numpy(),
        lambda: x.to_sparse(), lambda: x[..., :1], lambda: x[..., :0], lambda: x[:0], lambda: x[:1],
        lambda: torch.cat((x, x)), lambda: x.T, lambda: x.half(), lambda: -x, lambda: x + 100,
        lambda: x.to(torch.float8_e4m3fn), lambda: torch.nested.nested_tensor([x, x]),
        lambda: x.unsqueeze(0).expand(2, *x.shape), lambda: x.flip(0), lambda: torch.tensor(1),
        lambda: torch.quantize_per_tensor(x.float(), 0.1, 0, torch.qint8), lambda: x.to_mkldnn(),
    ]  # fmt: skip
    try:
        return draw.choice(ways)()
    except (RuntimeError, TypeError):  # not of this dtype
        return [x]


def takes(name: str, value: Any) -> bool:
    """Whether ``value`` is of a kind that the argument takes; tensors are for the reference."""
    kinds = KINDS.get(name, "tensor none").split()
    if value is None:
        return "none" in kinds
    if isinstance(value, torch.Tensor):
        return "tensor" in kinds
    is_int = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
    found = {
        "flag": isinstance(value, (bool, np.bool_)) or (type(value) is int and value in (0, 1)),
        "int": is_int,
        "number": is_int or isinstance(value, (float, np.floating)),
        "window": isinstance(value, (tuple, list)),
        "names": isinstance(value, (str, tuple, list)),
        "dtype": isinstance(value, torch.dtype),
    }
    return any(found[kind] for kind in kinds if kind in found)


def check(number: int) -> str:
    """What is wrong with how call ``number`` went; "" where nothing is."""
    draw = random.Random(number)
    torch.manual_seed(number)
    kind = draw.choice(list(FUNCTIONS))
    function, build = FUNCTIONS[kind]
    given = right(kind, draw)
    if draw.random() < 0.5:
        function(**given)  # so that the wrong call may find a bound one
        function(**given)
    names = [*given, *(name for name in KINDS if name in function.__kwdefaults__)]
    hostile = {}
    for name in draw.sample(names, 1 if draw.random() < 0.8 else 2):
        tensor = isinstance(given.get(name), torch.Tensor)
        hostile[name] = (
            changed(given[name], draw) if tensor and draw.random() < 0.8 else draw.choice(OBJECTS)
        )
    given |= hostile
    said = f"{kind}, {number}: {hostile}"[:400]
    try:
        result = function(**given)
    except pyfa.UnsupportedProblem:
        return ""
    except (TypeError, ValueError) as error:
        named = re.match(r"(\w+)(\[\d\])?( \(\w\))?: ", str(error))
        known = (*given, *function.__kwdefaults__, "q", "k", "v")
        return "" if named and named[1] in known else f"{said} -> {error!r}"
    except Exception as error:
        return f"{said} -> {error!r}"
    refused = [name for name, value in hostile.items() if not takes(name, value)]
    if refused:
        return f"{said} -> accepted {refused}"
    out = result[0] if isinstance(result, tuple) else result
    if out.is_meta:
        return ""
    return "" if is_right(out, given, build) else f"{said} -> wrong numbers"


def is_right(out: torch.Tensor, given: dict[str, Any], build: Any) -> bool:
    own = {name: value for name, value in given.items() if name not in request.Shared._fields}
    shared = request.Shared(**{n: x for n, x in given.items() if n in request.Shared._fields})
    q, k, v = (own.pop(n) for n in ("q", *(("k", "v") if "v" in own else ("k_cache", "v_cache"))))
    call: Call = build(q, k, v, shared, **own).call
    want, _ = reference.attention(call)
    finite = want.isfinite()
    error = (out.double() - want)[finite].abs().max() if finite.any() else torch.zeros(())
    return bool(error <= 0.03 * (1 + want[finite].abs().max())) if finite.any() else True


def failures(begin: int, end: int) -> list[str]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [text for number in range(begin, end) if (text := check(number))]


@pytest.mark.parametrize("part", range(4))
def test_random_arguments_are_refused_by_name_or_right(part: int) -> None:
    assert failures(part * 60, part * 60 + 60) == []


if __name__ == "__main__":
    found = failures(0, int(sys.argv[1]))
    print("\n".join(found))
    print(f"{len(found)} of {sys.argv[1]} calls")
