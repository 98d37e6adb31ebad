"""The suites' problems: what they count, and that all peers compute the same on them."""

from __future__ import annotations

import importlib
import itertools
import sys
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import pyfa
from pyfa.bench import gpt, packed, peers, suites

CPU = torch.device("cpu")


def ready(name: str, cell: suites.Cell) -> peers.Ready:
    (peer,) = [peer for peer in peers.chosen([name], "cpu")[0] if peer.name == name]
    return peer.ready(cell, CPU)


@pytest.mark.parametrize("suite", ["varlen", "window", "gqa", "layers"])
def test_peers_compute_the_same(suite: str) -> None:
    for cell in suites.SUITES[suite](False):
        # PyTorch's own has neither term.
        others = ("naive",) if cell.softcap or cell.sinks else ("sdpa", "naive")
        outs = {name: ready(name, cell).forward() for name in ("pyfa", *others)}
        for name, out in outs.items():
            # Peers that want heads first get them so, but for packed sequences.
            same = out if name == "pyfa" or cell.lengths else out.transpose(1, 2)
            torch.testing.assert_close(same, outs["pyfa"], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("suite", "passes", "label"),
    [
        ("varlen", "both", "16 short"),
        ("gqa", "backward", ""),
        ("layers", "backward", "GPT-OSS sliding"),
        ("layers", "backward", "Gemma-2"),
    ],
)
def test_gradients_are_the_same(suite: str, passes: str, label: str) -> None:
    cell = [cell for cell in suites.SUITES[suite](False)
            if cell.passes == passes and cell.label == label][-1]  # fmt: skip
    found = []
    for name in ("pyfa", "naive"):
        one = ready(name, cell)
        heads_first = name == "naive" and not cell.lengths
        torch.manual_seed(0)
        dout = torch.randn(one.dout.transpose(1, 2).shape if heads_first else one.dout.shape)
        dout = dout.transpose(1, 2) if heads_first else dout
        assert dout.shape == one.dout.shape
        grads = torch.autograd.grad(one.forward(), one.leaves, dout)
        assert len(grads) == 3 + cell.sinks
        found.append([x.transpose(1, 2) if heads_first and x.ndim == 4 else x for x in grads])
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("longest", [True, False])
@pytest.mark.parametrize("version", [2, 3, 4])
def test_packages_are_given_packed_sequences_by_name(
    monkeypatch: pytest.MonkeyPatch, version: int, longest: bool
) -> None:
    theirs = importlib.import_module(f"pyfa.compat.fa{version}").flash_attn_varlen_func
    cell = suites.SUITES["varlen"](False)[0]

    # Some releases of version 4 do without the longest lengths.
    def without(q, k, v, *, cu_seqlens_q, cu_seqlens_k, causal):  # type: ignore[no-untyped-def]
        length = cell.seqlen_q
        return theirs(q, k, v, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k,
                      max_seqlen_q=length, max_seqlen_k=length, causal=causal)  # fmt: skip

    module = SimpleNamespace(flash_attn_varlen_func=theirs if longest else without)
    monkeypatch.setitem(sys.modules, "their_package", module)
    out = packed.by_package("their_package", cell, CPU).forward()
    torch.testing.assert_close(out, ready("pyfa", cell).forward(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("version", [2, 3, 4])
def test_packages_are_given_the_terms_that_they_take(
    monkeypatch: pytest.MonkeyPatch, version: int
) -> None:
    theirs = importlib.import_module(f"pyfa.compat.fa{version}").flash_attn_func
    monkeypatch.setitem(sys.modules, "theirs", SimpleNamespace(flash_attn_func=theirs))
    for cell in suites.SUITES["layers"](False):
        if cell.sinks and version < 4:
            with pytest.raises(ValueError, match="it takes no sinks"):
                peers._package("theirs", cell, CPU)
            continue
        out = peers._package("theirs", cell, CPU).forward()
        torch.testing.assert_close(out, ready("pyfa", cell).forward(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("label", "why"), [("Gemma-2", "it takes no softcap"), ("GPT-OSS full", "it takes no sinks")]
)
def test_a_peer_without_a_term_says_so(
    monkeypatch: pytest.MonkeyPatch, label: str, why: str
) -> None:
    (cell, _) = (cell for cell in suites.SUITES["layers"](False) if cell.label == label)
    plain = SimpleNamespace(flash_attn_func=lambda q, k, v, causal, window_size: q)
    monkeypatch.setitem(sys.modules, "plain", plain)
    for prepare in (peers.PEERS["sdpa"].prepare, lambda *given: peers._package("plain", *given)):
        with pytest.raises(ValueError, match=why):
            prepare(cell, CPU)


def test_flex_computes_softcap_and_sinks(monkeypatch: pytest.MonkeyPatch) -> None:
    # Not compiled, which would take minutes here.
    monkeypatch.setattr(peers, "_compiled", lambda function: function)
    for made in (peers._compiled_flex, peers._compiled_flex_with_sinks):
        made.cache_clear()
    for cell in suites.SUITES["layers"](False):
        if not (cell.passes == "forward" and (cell.softcap or cell.sinks)):
            continue
        out = peers.PEERS["flex"].prepare(cell, CPU).forward().transpose(1, 2)
        torch.testing.assert_close(out, ready("pyfa", cell).forward(), rtol=1e-4, atol=1e-4)
    for made in (peers._compiled_flex, peers._compiled_flex_with_sinks):
        made.cache_clear()


def test_layers_are_those_of_their_models() -> None:
    by_label = {cell.label: cell for cell in suites.SUITES["layers"](True)}
    assert len(by_label) == 13
    capped = [label for label, cell in by_label.items() if cell.softcap]
    assert capped == ["Gemma-2"]
    assert [label for label, cell in by_label.items() if cell.sinks] == [
        "GPT-OSS sliding", "GPT-OSS full"
    ]  # fmt: skip
    name = by_label["GPT-OSS sliding"].name
    assert name == "GPT-OSS sliding D=64 B=1 S=8192 H=64,8 causal window=128 sinks backward"


def test_a_model_step_is_the_same_with_every_attention_and_trains() -> None:
    (cell,) = suites.SUITES["model"](False)
    losses = {}
    for name in ("pyfa", "sdpa", "naive"):
        one = ready(name, cell)
        assert one.step is not None
        before = one.forward().item()
        for _ in range(8):
            one.step()
        losses[name] = (before, one.forward().item())
    first, last = losses["pyfa"]
    assert last < first - 0.002
    for other in losses.values():
        assert other == pytest.approx((first, last), abs=1e-3)


def test_the_steps_of_a_model_leave_torchs_generator_alone() -> None:
    (cell,) = suites.SUITES["model"](False)
    torch.manual_seed(7)
    expected = torch.rand(1)
    torch.manual_seed(7)
    gpt.step(cell, CPU, lambda q, k, v: q)
    assert torch.rand(1) == expected


def test_flops_are_those_of_the_visible_pairs() -> None:
    window = suites.Cell("window", 2, 64, 64, 4, 4, 16, True, "float32", window=10)
    pairs = sum(min(i, 10) + 1 for i in range(64))
    assert window.flops == 4 * 2 * 4 * pairs * 16
    cells = suites.Cell("varlen", 2, 48, 48, 4, 4, 16, True, "float32", lengths=(48, 16))
    assert cells.flops == 4 * 4 * (48**2 + 16**2) / 2 * 16
    assert cells.tokens == 64
    step = suites.Cell("model", 2, 64, 64, 2, 2, 8, True, "float32", unit="ktoken/s", layers=2)
    assert step.value(0.5) == pytest.approx(2 * 64 / 0.5 / 1e3)


def test_values_may_be_narrower_than_keys() -> None:
    cell = suites.Cell("gqa", 2, 64, 64, 4, 4, 24, False, "float32", head_dim_v=16)
    pairs = 2 * 4 * 64 * 64
    # Q·K and P·V; then dO·V and Pᵀ·dO, and what has Q's and K's width: scores again, dQ and dK.
    assert cell.flops == 2 * pairs * (24 + 16)
    assert replace(cell, passes="backward").flops == 2 * pairs * (2 * 16 + 3 * 24)
    assert replace(cell, passes="both").flops == 2 * pairs * (3 * 16 + 4 * 24)
    assert replace(cell, passes="backward", head_dim_v=0).flops == 2.5 * 4 * pairs * 24
    for passes in ("forward", "backward"):
        (wide,) = [cell for cell in suites.SUITES["gqa"](True)
                   if cell.head_dim != cell.dim_v and cell.passes == passes]  # fmt: skip
        assert (wide.head_dim, wide.dim_v) == (192, 128)
        assert "D=192,128" in wide.name


def test_deterministic_gradients_are_measured_where_they_are_wanted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[bool] = []

    def attention(q, k, v, *, deterministic=False, **options):  # type: ignore[no-untyped-def]
        asked.append(deterministic)
        return pyfa.attention(q, k, v, **options)

    def attention_varlen(*arguments, deterministic=False, **options):  # type: ignore[no-untyped-def]
        asked.append(deterministic)
        return pyfa.attention_varlen(*arguments, **options)

    stand_in = SimpleNamespace(attention=attention, attention_varlen=attention_varlen)
    for module in (peers, packed):
        monkeypatch.setattr(module, "pyfa", stand_in)
    assert not any("deterministic" in peer.name for peer in peers.chosen(None, "cpu")[0])
    for cell in (suites.SUITES["backward"](False)[0], suites.SUITES["varlen"](False)[0]):
        asked.clear()
        for name in ("pyfa", "pyfa:deterministic"):
            ready(name, cell).forward()
        assert asked == [False, True]


def test_packs_fill_their_total() -> None:
    totals = {"": 16384, "64 lognormal": 29087, "256 short": 32754, "8 long": 32768}
    for gpu in (True, False):
        for cell in suites.SUITES["varlen"](gpu):
            assert sum(cell.lengths) == (totals.get(cell.label) if gpu else cell.tokens)
            assert max(cell.lengths) == cell.seqlen_q
            assert len(cell.lengths) == cell.batch


def test_a_peer_without_such_a_call_says_so() -> None:
    flex = peers.PEERS["flex"]
    (model,) = suites.SUITES["model"](False)
    with pytest.raises(ValueError, match="does not build a model with it"):
        flex.ready(model, CPU)
    with pytest.raises(ValueError, match="not run it on packed sequences"):
        flex.ready(suites.SUITES["varlen"](False)[0], CPU)


def test_float8_is_measured_beside_16_bits() -> None:
    pyfa_peer, sdpa = peers.PEERS["pyfa"], peers.PEERS["sdpa"]
    kinds = set()
    for cell in (
        cell for name in ("fp8", "fp8_decode", "quantize") for cell in suites.SUITES[name](False)
    ):
        kinds.add(cell.fp8)
        found = pyfa_peer.ready(cell, CPU).forward()
        if cell.fp8 in ("", "inputs", "cache"):
            shape = (cell.batch, cell.seqlen_q, cell.heads_q, cell.head_dim)
            assert found.shape == shape
        if cell.fp8:
            with pytest.raises(ValueError, match="not run it with float8"):
                sdpa.ready(cell, CPU)
    assert kinds == {"", "inputs", "cache", "copy", "quantize", "rotate"}
    for gpu, name in itertools.product((True, False), ("fp8", "fp8_decode", "quantize")):
        cells = suites.SUITES[name](gpu)
        assert len({cell.name for cell in cells}) == len(cells)
        assert len({cell.unit for cell in cells}) == 1


def test_bytes_are_those_that_move() -> None:
    cell = suites.Cell("fp8", 2, 64, 64, 4, 4, 16, True, "bfloat16", unit="TB/s")
    elements = 2 * 64 * 4 * 16
    moved = {kind: replace(cell, fp8=kind).bytes_moved for kind in ("", "cache", "copy", "rotate")}
    assert moved == {
        "": 4 * elements, "cache": 2 * elements, "copy": 12 * elements, "rotate": 9 * elements
    }  # fmt: skip


class Symbol:
    """A tensor of a cuDNN graph."""

    def _told(self, value: object) -> Symbol:
        return self

    set_output = set_dim = set_stride = set_data_type = _told


class Graph:
    """As much of cuDNN's as ``by_cudnn`` asks for."""

    asked: dict[str, Any]
    pack: dict[Symbol, torch.Tensor]

    def __init__(self, **types: object) -> None: ...

    def tensor(self, dim: list[int], stride: list[int], data_type: str) -> Symbol:
        return Symbol()

    def sdpa_fp8(self, **asked: Any) -> list[Symbol | None]:
        self.made: list[Symbol | None] = [Symbol(), None, Symbol(), Symbol()]
        Graph.asked = asked
        return self.made

    def get_workspace_size(self) -> int:
        return 0

    def execute(
        self, pack: dict[Symbol, torch.Tensor], workspace: torch.Tensor, handle: object
    ) -> None:
        q, k, v = (pack[Graph.asked[name]].float() for name in "qkv")
        scores = q @ k.transpose(-1, -2) * Graph.asked["attn_scale"]
        if Graph.asked["use_causal_mask"]:
            rows = scores.shape[-1]
            scores += torch.full((rows, rows), -torch.inf).triu(1)
        out = self.made[0]
        assert out is not None
        pack[out].copy_(scores.softmax(-1) @ v)
        Graph.pack = pack

    def __getattr__(self, step: str) -> Callable[..., None]:
        return lambda *given: None


def test_cudnn_gets_float8_by_its_own_package(monkeypatch: pytest.MonkeyPatch) -> None:
    names = SimpleNamespace(FP8_E4M3="float8", FLOAT="float32", A="A")
    package = SimpleNamespace(
        create_handle=object, set_stream=lambda **given: None, pygraph=Graph, data_type=names,
        heur_mode=names,
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "cudnn", package)
    stream = SimpleNamespace(cuda_stream=0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    for cell in suites.SUITES["fp8"](False):
        if cell.fp8 != "inputs":
            continue
        found = peers.PEERS["cudnn"].ready(cell, CPU)
        out = found.forward()
        assert out.dtype == found.leaves[0].dtype == torch.float8_e4m3fn
        x = [leaf.transpose(1, 2) for leaf in found.leaves]
        wanted = pyfa.attention(*x, causal=cell.causal, descale=(torch.ones(1, 1),) * 3)
        torch.testing.assert_close(out.float(), wanted.float(), rtol=0.07, atol=0.02)
        assert len(Graph.pack) == 3 + 6 + 3
    with pytest.raises(ValueError, match="does not quantize"):
        peers.PEERS["cudnn"].ready(suites.SUITES["quantize"](False)[0], CPU)
