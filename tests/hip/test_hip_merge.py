"""``pyfa.merge`` as one launch of ``combine``, run in the emulator, against PyTorch's operators."""

from __future__ import annotations

import pytest
import torch
from merge_cases import cascade, wrong

import pyfa
from pyfa import merging


@pytest.fixture(autouse=True)
def _none_is_kept():
    merging._bound.clear()
    yield
    merging._bound.clear()


def test_it_is_what_pytorch_makes_of_it(kernels_run) -> None:
    assert not wrong(0)
    assert set(kernels_run) == {"combine"}


def test_a_cascade_with_sinks_once(kernels_run) -> None:
    torch.manual_seed(0)
    have, want = cascade("emulator")
    assert "combine" in kernels_run
    torch.testing.assert_close(have[0].float(), want[0], atol=1e-2, rtol=1e-2)
    torch.testing.assert_close(have[1], want[1], atol=1e-4, rtol=1e-4)


def test_the_same_parts_have_the_same_bits_in_any_batch() -> None:
    torch.manual_seed(0)
    outs, lses = torch.randn(3, 6, 5, 4, 64).bfloat16(), torch.randn(3, 6, 4, 5)
    with pyfa.use_backend("emulator"):
        together = pyfa.merge(outs, lses)
        for b in range(6):
            alone = pyfa.merge(outs[:, b : b + 1], lses[:, b : b + 1])
            assert torch.equal(alone, together[b : b + 1])


@pytest.mark.parametrize("what", ["a gradient", "five parts", "out is a part", "no rows"])
def test_what_is_left_to_pytorch(what: str, kernels_run) -> None:
    outs, lses = [torch.randn(2, 3, 4, 8) for _ in range(2)], [torch.randn(2, 4, 3)] * 2
    out = None
    if what == "a gradient":
        outs[0].requires_grad_()
    elif what == "five parts":
        outs, lses = outs[:1] * 5, lses[:1] * 5
    elif what == "out is a part":
        out = outs[1]
    else:
        outs, lses = [x[:, :0] for x in outs], [x[..., :0] for x in lses]
    expected = pyfa.merge([x.clone() for x in outs], lses)
    with pyfa.use_backend("emulator"):
        have = pyfa.merge(outs, lses, out)
    assert torch.equal(have, expected)
    assert have.requires_grad == (what == "a gradient")
    assert not kernels_run


FAULTS = {
    "the first part's LSE for all": ("captured_of(p)[2 * i + 1]", "captured_of(p)[1]"),
    "a part that saw nothing is read": ("lse[i] != -INFINITY_F && columns > 0)\n      out[i] = ele",
                                        "columns > 0)\n      out[i] = ele"),
    "a head's LSE a row on": ("stand.head * sums.stride[1]", "stand.head * sums.stride[2]"),
    "no step between elements": ("(long long)j * part.stride[3]]", "j]"),
    "bfloat16 taken for float16": ("part.size[0] == BFLOAT16", "part.size[0] == 7"),
    "float32 out not cut at the head's end": ("if (place.column + j < p.head_dim_v) ((float",
                                              "if (j < 4) ((float"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_caught(fault: str, plant) -> None:
    plant("hip/combine.hip", *FAULTS[fault])
    try:
        caught = wrong(0)
    except Exception:
        caught = True  # the emulator found an access that nobody may make
    assert caught
