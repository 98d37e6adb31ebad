"""What a repeated call gives Triton's kernels: the same launches and arguments as the first one."""

from __future__ import annotations

import functools
import importlib
import struct
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
import pyfa
from pyfa import dispatch, request
from pyfa.backends import BACKENDS
from pyfa.backends.base import OtherAlignment, Rounding, Saved
from pyfa.backends.triton import runtime, runtime_backward, runtime_launch
from pyfa.backends.triton.kernel import Kernel
from pyfa.device import DEVICES
from pyfa.problem import Call, problem_of, tensors_of

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


class Uncompiled(Kernel):
    """With a code object that nobody compiled, laid out as the driver would tell."""

    def __init__(self, spec: Any, index: int | None, driver: Any) -> None:
        self._spec, self._index, self._launch = spec, index, None
        kinds = [kind for kind in spec.signature.values() if kind != "constexpr"]
        code = runtime_launch.Code.__new__(runtime_launch.Code)
        code.function = driver.function(str((spec.function, spec.constants)))
        code.threads, code.shared, code.scratch, code.own, code.index = 128, 0, 0, 2, 0
        formats = runtime_launch._FORMATS
        code.formats = ["Q" if kind[0] == "*" else formats[kind] for kind in kinds] + ["Q"] * 2
        self._code = code
        driver.formats.append("".join(code.formats))


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(BENCHMARKS)
    with importlib.import_module("no_gpu").nvidia(notes=True) as found:
        found.formats = []
        monkeypatch.setattr(runtime, "Kernel", lambda spec, index: Uncompiled(spec, index, found))
        yield found


@pytest.fixture
def quantizing(driver: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """``backends.triton.quantize`` with kernels that nobody compiled, and none from before."""
    module = importlib.import_module("pyfa.backends.triton.quantize")
    monkeypatch.setattr(module, "Kernel", lambda spec, index: Uncompiled(spec, index, driver))
    for name in ("_kernel", "_ready"):
        monkeypatch.setattr(module, name, functools.cache(getattr(module, name).__wrapped__))
    return module


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
    """The same with other tensors."""
    return call._replace(q=call.q.clone(), k=call.k.clone(), v=call.v.clone())


Launch = tuple[str, tuple[int, ...], tuple[Any, ...]]


def check_same(found: list[Launch], first: list[Launch], pairs: dict[int, int]) -> None:
    """The same launches, with the addresses on the right of ``pairs`` for those on the left."""
    assert len(found) == len(first) > 0
    for (name, config, arguments), (name_1, config_1, arguments_1) in zip(
        found, first, strict=True
    ):
        assert (name, config) == (name_1, config_1)
        for x, x_1 in zip(arguments, arguments_1, strict=True):
            assert x == pairs.get(x_1, x_1)


def addresses(old: Any, new: Any) -> dict[int, int]:
    return {x.data_ptr(): y.data_ptr() for x, y in zip(old, new, strict=True) if x is not None}


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
    for with_lse in (True, False):
        forward = runner.bind(call, with_lse)
        assert launches(driver) == []
        outputs = forward(*tensors_of(call))
        first = launches(driver)
        assert list(first[0][2][:3]) == [x.data_ptr() for x in call[:3]]
        if len(first) == 1:
            assert first[0][2][3] == outputs[0].data_ptr()
            assert first[0][2][4] == (outputs[1].data_ptr() if with_lse else 0)
        other = again(call)
        outputs_2 = forward(*tensors_of(other))
        pairs = addresses((*call[:3], *outputs), (*other[:3], *outputs_2))
        check_same(launches(driver), first, pairs)
    out, lse, *_ = runner.bind(call, True)(*tensors_of(call))
    launches(driver)
    dout = torch.randn_like(out)
    backward = runtime_backward.bind(runner, Saved(call, out, lse, dout), False)
    assert launches(driver) == []
    grads = backward(dout, out, lse, *tensors_of(call))
    first = launches(driver)
    assert len(first) == 2 + len(runner.keys_roles)
    other = again(call)
    given = (dout.clone(), out.clone(), lse.clone(), *tensors_of(other))
    grads_2 = backward(*given)
    found = launches(driver)
    old = (*call[:3], dout, out, lse, *grads[:3])
    new = (*other[:3], *given[:3], *grads_2[:3])
    pairs = addresses(old, new)
    # What is kept of each row, between the kernels.
    pairs |= dict(zip(first[0][2][4:6], found[0][2][4:6], strict=True))
    check_same(found, first, pairs)


def on_8(x: torch.Tensor) -> torch.Tensor:
    return torch.empty(x.numel() + 4, dtype=x.dtype)[4:].view(x.shape).copy_(x)


def test_what_the_kernels_cannot_read_is_copied_at_each_call(driver: Any) -> None:
    runner, call = made({}, torch.bfloat16)
    out, lse, *_ = runner.bind(call, True)(*tensors_of(call))
    dout = torch.randn_like(out)
    launches(driver)
    turned = call.q.mT.contiguous().mT
    for changed, gradient, x, y in (
        (call, dout[..., :1].expand(dout.shape), out, lse),
        (call, on_8(dout), out, lse),
        (call._replace(q=turned), dout, out, lse),
        (call, dout, out.mT.contiguous().mT, lse),
        (call, dout, out, lse.mT.contiguous().mT),
    ):
        run = runtime_backward.bind(runner, Saved(changed, x, y, gradient), False)
        for _ in range(2):
            run(gradient, x, y, *tensors_of(changed))
            of_sums, of_keys, *_ = launches(driver)
            q, k, v, of_dout = of_keys[2][:4]
            assert (k, v) == (call.k.data_ptr(), call.v.data_ptr())
            assert (q == changed.q.data_ptr()) == (changed.q is not turned)
            assert (of_dout == gradient.data_ptr()) == (gradient is dout)
            assert of_dout % 16 == 0
            assert (x.data_ptr() in of_sums[2]) == x.is_contiguous()
            assert (y.data_ptr() in of_sums[2]) == y.is_contiguous()


def test_no_rows_launch_nothing(driver: Any) -> None:
    runner, call = made({}, torch.bfloat16)
    none = call._replace(q=call.q[:, :0], max_seqlen_q=0)
    out, lse, *_ = runner.bind(none, True)(*tensors_of(none))
    assert launches(driver) == []
    run = runtime_backward.bind(runner, Saved(none, out, lse, out), False)
    for _ in range(2):
        grads = run(out, out, lse, *tensors_of(none))
        assert [x.shape for x in grads[:3]] == [x.shape for x in none[:3]]


def test_addresses_of_another_alignment(driver: Any) -> None:
    runner, call = made({}, torch.bfloat16)
    other = call._replace(q=on_8(call.q))
    for with_lse in (False, True):
        forward = runner.bind(other, with_lse)
        forward(*tensors_of(other))
        launches(driver)
        with pytest.raises(OtherAlignment):
            forward(*tensors_of(call))
    forward = runner.bind(call, True)
    out, lse, *_ = forward(*tensors_of(call))
    backward = runtime_backward.bind(runner, Saved(call, out, lse, out), False)
    launches(driver)
    with pytest.raises(OtherAlignment):
        forward(*tensors_of(other))
    for number in range(6):
        given = [out, out, lse, *tensors_of(call)]
        given[number] = on_8(given[number]) if number != 2 else torch.empty(
            lse.numel() + 1)[1:].view(lse.shape)  # fmt: skip
        with pytest.raises(OtherAlignment):
            backward(*given)
    assert launches(driver) == []


def test_a_repeated_call_passes_few_functions(driver: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the public call, of pyfa's own."""
    backend = dispatch.BACKENDS["triton"]
    monkeypatch.setattr(type(backend), "why_unavailable", lambda self: None)
    monkeypatch.setattr(backend, "_runners", {}, raising=False)
    q, k, v = (torch.randn(2, 128, 4, 64).bfloat16() for _ in range(3))
    package = str(Path(pyfa.__file__).parent)
    for options in ({}, {"causal": True, "return_lse": True}):
        found: list[str] = []

        def note(frame: Any, event: str, argument: Any, found: list[str] = found) -> None:
            if event == "call" and frame.f_code.co_filename.startswith(package):
                found.append(frame.f_code.co_name)

        for turn in range(4):
            found.clear()
            sys.setprofile(note)
            try:
                pyfa.attention(q, k, v, backend="triton", **options)
            finally:
                sys.setprofile(None)
            assert len(launches(driver)) == 1
            assert turn < 2 or 0 < len(found) <= 30, f"{len(found)}: {found}"


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize(("block", "passes"), [(16, 1), (None, 2)])
def test_quantize_launches_its_kernels(
    driver: Any, quantizing: Any, block: int | None, passes: int, turned: bool
) -> None:
    """``MOST`` is the scales' own memory, or of a first launch that measures."""
    signs = torch.ones(64) if turned else None
    how = Rounding(2, block, False, signs, torch.float8_e4m3fn)
    for _ in range(3):
        xs = [torch.randn(2, 70, 2, 64).bfloat16() for _ in range(3)]
        made = BACKENDS["triton"].quantize(xs, how)  # type: ignore[attr-defined]
        found = launches(driver)
        assert len(found) == passes
        for name, _, values in found:
            assert "quantize_rows" in name
            given = (*xs, *(y for y, _ in made), made[0][1])
            assert values[:7] == tuple(x.data_ptr() for x in given)
            assert (values[7] == values[6]) == (passes == 1)
            assert values[8] == (0 if signs is None else signs.data_ptr())
            assert values[9:15] == (70 * 2 * 64, 2 * 64, 64, 70, 2, 64)
        assert len({values for *_, values in found}) == 1, "both read one MOST"
        assert [y.dtype for y, _ in made] == [how.dtype] * 3
