"""What a repeated call gives Triton's kernels: the same launches and arguments as the first one."""

from __future__ import annotations

import importlib
import struct
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
from pyfa import dispatch, request
from pyfa.backends.base import OtherAlignment
from pyfa.backends.triton import runtime, runtime_launch
from pyfa.backends.triton.kernel import Kernel
from pyfa.device import DEVICES
from pyfa.problem import Call, problem_of

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


class Uncompiled(Kernel):
    """With a code object that nobody compiled, laid out as the driver would tell."""

    def __init__(self, spec: Any, index: int | None, driver: Any) -> None:
        self._spec, self._index, self._launch = spec, index, None
        kinds = [kind for kind in spec.signature.values() if kind != "constexpr"]
        code = runtime_launch.Code.__new__(runtime_launch.Code)
        code.function = driver.function(str((spec.function, spec.constants)))
        code.threads, code.shared, code.scratch, code.own, code.index = 128, 0, 0, 0, 0
        formats = runtime_launch._FORMATS
        code.formats = ["Q" if kind[0] == "*" else formats[kind] for kind in kinds]
        self._code = code
        driver.formats.append("".join(code.formats))


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(BENCHMARKS)
    with importlib.import_module("no_gpu").nvidia(notes=True) as found:
        found.formats = []
        monkeypatch.setattr(runtime, "Kernel", lambda spec, index: Uncompiled(spec, index, found))
        yield found


def launches(driver: Any) -> list[tuple[str, tuple[int, ...], tuple[Any, ...]]]:
    found = []
    for name, config, data in driver.launched:
        layout = driver.formats[driver.names.index(name)]
        found.append((name, config, struct.unpack(layout, data)))
    driver.launched.clear()
    return found


def made(shapes: dict[str, int], dtype: torch.dtype, **options: Any) -> tuple[Any, Call]:
    """A runner and a call of it."""
    b, i, j, h, hk, d, dv = (
        {"b": 1, "i": 128, "j": 128, "h": 4, "hk": 4, "d": 64, "dv": 64} | shapes
    ).values()
    q = torch.randn(b, i, h, d).to(dtype)
    k, v = torch.randn(b, j, hk, d).to(dtype), torch.randn(b, j, hk, dv).to(dtype)
    call = request.dense(q, k, v, request.Shared(**options)).call
    problem = problem_of(call, True, False, DEVICES["H200"], True)
    plan = dispatch.ask("triton", replace(problem), hypothetical=True).plan
    assert plan is not None
    return runtime.Runner(plan), call


def again(call: Call) -> Call:
    return call._replace(q=call.q.clone(), k=call.k.clone(), v=call.v.clone())


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (9, 2), "scale": 0.5}])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "shapes",
    [{}, {"b": 3, "i": 77, "j": 300}, {"h": 6, "hk": 2}, {"d": 128, "dv": 128},
     {"d": 192, "dv": 128}, {"d": 256, "dv": 256}, {"d": 40, "dv": 40}],
    ids=str,
)  # fmt: skip
def test_a_repeated_call_launches_what_the_first_did(
    driver: Any, shapes: dict[str, int], dtype: torch.dtype, options: dict[str, Any]
) -> None:
    runner, call = made(shapes, dtype, **options)
    key = runner._ready_key(call)
    assert key is not None
    out, lse = runner._forward(call, key)
    (first,) = launches(driver)
    for with_lse in (True, False):
        forward = runner.repeat(call, with_lse)
        if forward is None:
            continue  # split
        other = again(call)
        made_out, made_lse = forward(other.q, other.k, other.v)
        ((name, config, arguments),) = launches(driver)
        assert (name, config) == first[:2]
        given = (*other[:3], made_out)
        assert list(arguments[:4]) == [x.data_ptr() for x in given]
        assert arguments[4] == (made_lse.data_ptr() if with_lse else 0)
        differing = [n for n, (x, y) in enumerate(zip(arguments, first[2], strict=True)) if x != y]
        # Without an LSE one flag more.
        assert len([n for n in differing if n >= 5]) == (not with_lse)
    dout = torch.randn_like(out)
    grads = runtime.runtime_backward.backward(runner, call, out, lse, dout, None, False)
    general = launches(driver)
    prepared = runtime.runtime_backward.repeat(runner, call, out, lse, dout)
    assert prepared is not None
    assert launches(driver) == []
    other = again(call)
    out_2, lse_2, dout_2 = out.clone(), lse.clone(), dout.clone()
    grads_2 = prepared(dout_2, *other[:3], out_2, lse_2)
    # Which of the tensors stands where an address differs; base and delta are one allocation.
    pairs = {
        x.data_ptr(): y.data_ptr()
        for x, y in zip(
            (*call[:3], out, lse, dout, *grads[:3]),
            (*other[:3], out_2, lse_2, dout_2, *grads_2),
            strict=True,
        )
    }
    repeated = launches(driver)
    assert len(general) == len(repeated) == 2 + len(runner.keys_roles)
    base, base_2 = general[0][2][4], repeated[0][2][4]
    pairs[base] = base_2
    pairs[general[0][2][5]] = base_2 + general[0][2][5] - base
    for (name, config, arguments), (name_2, config_2, arguments_2) in zip(
        general, repeated, strict=True
    ):
        assert (name, config) == (name_2, config_2)
        assert tuple(pairs.get(x, x) for x in arguments) == arguments_2


def test_what_is_not_prepared(driver: Any) -> None:
    runner, call = made({}, torch.bfloat16)
    out, lse = runner._forward(call, None)
    dout = torch.randn_like(out)
    backward = runtime.runtime_backward
    assert backward.repeat(runner, call, out, lse, dout) is not None
    on_8 = torch.empty(dout.numel() + 4, dtype=dout.dtype)[4:].view(dout.shape)
    turned = call.q.mT.contiguous().mT
    for changed, gradient in (
        (call, dout[..., :1].expand(dout.shape)),
        (call, on_8),
        (call._replace(q=turned), dout),
        (call._replace(q=call.q[:, :0], max_seqlen_q=0), dout[:, :0]),
    ):
        assert backward.repeat(runner, changed, out, lse, gradient) is None
    for x, y in ((out.mT.contiguous().mT, lse), (out, lse.mT.contiguous().mT)):
        assert backward.repeat(runner, call, x, y, dout) is None


def test_addresses_of_another_alignment(driver: Any) -> None:
    runner, call = made({}, torch.bfloat16)
    on_8 = torch.empty(call.q.numel() + 4, dtype=call.q.dtype)[4:].view(call.q.shape)
    other = call._replace(q=on_8)
    runner._forward(other, runner._ready_key(other))
    for with_lse in (False, True):
        forward = runner.repeat(other, with_lse)
        assert forward is not None
        forward(on_8, call.k, call.v)
        with pytest.raises(OtherAlignment):
            forward(*call[:3])
    runner._forward(call, runner._ready_key(call))
    forward = runner.repeat(call, True)
    assert forward is not None
    out, lse = forward(*call[:3])
    backward = runtime.runtime_backward.repeat(runner, call, out, lse, out)
    assert backward is not None
    launches(driver)
    with pytest.raises(OtherAlignment):
        forward(on_8, call.k, call.v)
    with pytest.raises(OtherAlignment):
        backward(on_8, call.q, call.k, call.v, out, lse)
    assert launches(driver) == []
