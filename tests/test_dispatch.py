"""Who runs a problem, in which order of say, and what is told when somebody cannot."""

import logging
import warnings

import pytest
import torch

import pyfa
from pyfa import dispatch
from pyfa.backends import AUTOMATIC, BACKENDS, NAMES
from pyfa.backends.torch.backend import TorchBackend
from pyfa.device import CPU, DEVICES


@pytest.fixture(autouse=True)
def fresh(monkeypatch, nothing_bound):
    """No choice made before the test is kept, and none made in it stays."""
    monkeypatch.setattr(dispatch, "_prepared", {})
    monkeypatch.setattr(dispatch, "_lost", set())
    dispatch._from_environment.cache_clear()
    yield
    dispatch._from_environment.cache_clear()


class Named(TorchBackend):
    """The torch backend under another name, which notes that it ran."""

    def __init__(self, name, ran, unavailable=None):
        self.NAME = name
        self.ran = ran
        self.unavailable = unavailable

    def why_unavailable(self):
        return self.unavailable

    def bind(self, plan, call, append, with_lse):
        bound = super().bind(plan, call, append, with_lse)

        def run(*tensors):
            self.ran.append(self.NAME)
            return bound(*tensors)

        return run


@pytest.fixture
def ran(monkeypatch):
    """Every backend is here and able; the list says which ran."""
    ran = []
    for name in NAMES:
        monkeypatch.setitem(dispatch.BACKENDS, name, Named(name, ran))
    return ran


@pytest.fixture
def inputs():
    torch.manual_seed(0)
    return torch.randn(3, 1, 8, 2, 4).unbind()


def test_order_of_say(ran, inputs, monkeypatch, nothing_bound):
    """The argument, then the context, then the environment, then automatic."""
    pyfa.attention(*inputs)
    monkeypatch.setenv("PYFA_BACKEND", "triton,torch")
    dispatch._from_environment.cache_clear()
    monkeypatch.setattr(dispatch, "_prepared", {})
    nothing_bound()
    pyfa.attention(*inputs)
    with pyfa.use_backend("cuda", "torch"):
        pyfa.attention(*inputs)
        pyfa.attention(*inputs, backend="emulator")
        with pyfa.use_backend("hip"):
            pyfa.attention(*inputs, causal=True)
        pyfa.attention(*inputs)
    pyfa.attention(*inputs)
    assert ran == ["torch", "triton", "cuda", "emulator", "hip", "cuda", "triton"]


def test_a_list_is_tried_in_order_and_not_beyond(ran, inputs, monkeypatch):
    monkeypatch.setitem(dispatch.BACKENDS, "cuda", Named("cuda", ran, "no driver"))
    pyfa.attention(*inputs, backend=["cuda", "triton", "torch"])
    pyfa.attention(*inputs, backend="cuda, torch")
    assert ran == ["triton", "torch"]
    with pytest.raises(pyfa.UnsupportedProblem, match="cuda  no driver") as caught:
        pyfa.attention(*inputs, backend="cuda")
    assert list(caught.value.reasons) == ["cuda"]


def test_wrong_names_in_the_environment(inputs, monkeypatch):
    monkeypatch.setenv("PYFA_BACKEND", "fast")
    dispatch._from_environment.cache_clear()
    with pytest.raises(ValueError, match="got 'fast'"):
        pyfa.attention(*inputs)


def lose(monkeypatch, ran):
    monkeypatch.setitem(dispatch.AUTOMATIC, "cpu", ("hip", "torch"))
    monkeypatch.setitem(dispatch.BACKENDS, "hip", Named("hip", ran, "two HIP runtimes: a and b"))


def test_losing_the_vendors_backend_warns_once(ran, inputs, monkeypatch):
    lose(monkeypatch, ran)
    with pytest.warns(pyfa.PerformanceWarning, match=r"hip .*: two HIP runtimes: a and b"):
        pyfa.attention(*inputs)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pyfa.attention(*inputs, causal=True)
    assert ran == ["torch", "torch"]


def test_strict_makes_it_an_error(ran, inputs, monkeypatch):
    lose(monkeypatch, ran)
    monkeypatch.setenv("PYFA_STRICT", "1")
    with pytest.raises(pyfa.PerformanceWarning, match="two HIP runtimes"):
        pyfa.attention(*inputs)
    assert ran == []


def test_a_problem_that_is_declined_is_no_loss(inputs):
    """Only the environment takes a backend away; a missing feature is nobody's surprise."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pyfa.attention(*inputs, softcap=3.0)


def test_each_new_plan_is_logged_once(inputs, monkeypatch, caplog):
    monkeypatch.setenv("PYFA_LOG", "plan")
    with caplog.at_level(logging.INFO, "pyfa"):
        for _ in range(3):
            pyfa.attention(*inputs, causal=True)
    (record,) = [r for r in caplog.records if r.name == "pyfa"]
    assert "torch sdpa" in record.getMessage()


class TestExplain:
    def test_every_backend_answers(self, inputs):
        told = pyfa.explain(*inputs, causal=True)
        assert [answer.backend for answer in told.answers] == list(NAMES)
        assert told.chosen == "torch"
        for answer in told.answers:
            assert bool(answer.reasons) != (answer.plan is not None)
        assert str(told).splitlines()[0] == told.as_dict()["problem"]

    @pytest.mark.parametrize("name", DEVICES)
    def test_devices_that_are_not_here(self, name):
        q = torch.empty(2, 128, 8, 128, dtype=torch.bfloat16, device="meta")
        told = pyfa.explain(q, q[:, :, :2], q[:, :, :2], causal=True, device=name)
        vendor = DEVICES[name].vendor
        able = [a.backend for a in told.answers if a.plan is not None]
        assert told.chosen == next(b for b in AUTOMATIC[vendor] if b in able)
        assert f"on {DEVICES[name].arch}" in str(told)
        assert ("hip" in able) == (DEVICES[name].arch == "gfx942")

    def test_layouts(self):
        q = torch.empty(9, 2, 8, device="meta")
        offsets = torch.empty(3, dtype=torch.int32, device="meta")
        packed = pyfa.explain(q, q, q, cu_seqlens_q=offsets, cu_seqlens_k=offsets, max_seqlen_q=5,
                              max_seqlen_k=5)  # fmt: skip
        assert "varlen" in packed.problem.features
        cache = torch.empty(2, 16, 2, 8, device="meta")
        cached = pyfa.explain(cache[:, :1], cache, cache, cache_seqlens=4, k=cache[:, :1],
                              v=cache[:, :1])  # fmt: skip
        assert "seqused" in cached.problem.features

    def test_what_a_layout_lacks(self):
        q = torch.empty(9, 2, 8, device="meta")
        with pytest.raises(TypeError, match=r"^cu_seqlens_q: expected it with max_seqlen_k"):
            pyfa.explain(q, q, q, max_seqlen_k=9)
        with pytest.raises(TypeError, match=r"^latent: expected True or False; got str"):
            pyfa.explain(q, q, q, latent="yes")

    def test_nothing_is_written(self):
        k, new = torch.zeros(1, 4, 1, 8), torch.ones(1, 1, 1, 8)
        pyfa.explain(new, k, k, k=new, v=new, cache_seqlens=1)
        assert not k.any()

    def test_unknown_arguments(self, inputs):
        with pytest.raises(TypeError, match="did you mean 'causal'"):
            pyfa.explain(*inputs, is_causal=True)
        with pytest.raises(ValueError, match="device: expected one of MI300X"):
            pyfa.explain(*inputs, device="MI9")


def test_named_devices_have_an_arch_and_a_peak():
    for device in DEVICES.values():
        assert device.limits is not None
        assert device.matrix_flops("bfloat16") > 0
    # The data sheets' own products.
    assert DEVICES["MI300X"].matrix_flops("float16") == pytest.approx(1307.4e12, rel=1e-3)
    assert DEVICES["H200"].matrix_flops("float16") == pytest.approx(989.4e12, rel=2e-3)
    assert DEVICES["A100-80GB"].matrix_flops("float16") == pytest.approx(312e12, rel=1e-3)
    assert CPU.vendor == "cpu"
    assert CPU.matrix_flops("float16") == 0


def test_backends_know_their_features():
    from pyfa.problem import FEATURES

    for name, backend in BACKENDS.items():
        assert name == backend.NAME
        assert set(FEATURES) >= backend.FEATURES
