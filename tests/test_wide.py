"""Head dims above 256: which kernel runs where, and what each backend says of what it lacks."""

from dataclasses import replace

import pytest
import torch

import pyfa
from pyfa.backends import BACKENDS
from pyfa.device import DEVICES
from pyfa.problem import Problem

ON = {"hip": "MI300X", "emulator": "MI300X", "cuda": "H200", "triton": "MI300X", "torch": "MI300X"}


def problem(backend, *features, dim=512, dim_v=512, **changes):
    values = {
        "batch": 1, "seqlen_q": 4096, "seqlen_k": 4096, "heads_q": 8, "heads_k": 8,
        "head_dim": dim, "head_dim_v": dim_v, "dtype": "bfloat16",
        "features": frozenset({"wide", *features}), "device": DEVICES[ON[backend]], "square": True,
    }  # fmt: skip
    return Problem(**values | changes)


def declined(backend, *features, **changes):
    """The reasons without those that are of this machine."""
    asked = problem(backend, *features, **changes)
    known = set(BACKENDS[backend].why_not(replace(asked, features=frozenset({"wide"}))))
    return [reason for reason in BACKENDS[backend].why_not(asked) if reason not in known]


@pytest.mark.parametrize("backend", sorted(ON))
@pytest.mark.parametrize(("dim", "dim_v"), [(257, 257), (512, 512), (576, 512), (64, 512)])
@pytest.mark.parametrize(
    "features",
    [(), ("causal", "gqa"), ("varlen", "window"), ("paged", "seqused", "gqa"), ("chunk", "causal"),
     ("softcap", "alibi", "bias", "sinks"), ("negative_edge",), ("tree", "seqused")],
)  # fmt: skip
def test_every_backend_has_the_forward(backend, dim, dim_v, features):
    assert declined(backend, *features, dim=dim, dim_v=dim_v) == []


@pytest.mark.parametrize("backend", ["hip", "emulator", "cuda"])
@pytest.mark.parametrize(
    ("features", "what"),
    [
        (("backward",), "backward"),
        (("dropout",), "dropout"),
        (("score_mod",), "a score_mod"),
        (("mask_mod",), "a mask_mod"),
        (("batch_invariant",), "batch invariance (batch_invariant)"),
        (("fp8",), "float8"),
    ],
)
def test_what_is_refused_has_a_reason(backend, features, what):
    changes = {"dtype_k": "float8_e4m3fn"} if what == "float8" else {}
    assert declined(backend, *features, **changes) == [
        f"a head_dim above 256 with {what} is not implemented"
    ]


@pytest.mark.parametrize("backend", ["triton", "torch"])
def test_two_backends_have_the_backward(backend):
    assert declined(backend, "backward", "causal", dim=576) == []


@pytest.mark.parametrize("device", ["MI300X", "H200"])
def test_a_training_step_falls_to_triton(device):
    q = torch.empty(1, 64, 2, 512, device="meta", dtype=torch.bfloat16, requires_grad=True)
    found = pyfa.explain(q, q, q, device=device)
    assert found.chosen == "triton"
    reasons = [x for each in found.answers if each.backend in ("hip", "cuda") for x in each.reasons]
    assert "a head_dim above 256 with backward is not implemented" in reasons


@pytest.mark.parametrize(
    ("device", "rows", "kernel"),
    [
        ("MI300X", 4096, "hip/attn_decode.hip"),
        ("H200", 4096, "cuda/sm90/attn_fwd.cu"),
        ("H200", 1, "cuda/sm80/attn_decode.cu"),
        ("A100-80GB", 4096, "cuda/sm80/attn_decode.cu"),
    ],
)
def test_prefill_and_decode_have_their_kernels(device, rows, kernel):
    backend = "hip" if device == "MI300X" else "cuda"
    asked = problem(backend, seqlen_q=rows, device=DEVICES[device])
    assert BACKENDS[backend].plan(asked).kernel == kernel


def test_hopper_leaves_what_its_kernel_lacks_to_decode():
    asked = problem("cuda", "bias")
    assert BACKENDS["cuda"].plan(asked).kernel == "cuda/sm80/attn_decode.cu"
