"""Which problems the torch backend leaves to PyTorch's attention, on a CPU and on GPUs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import pyfa

HALF = torch.float16


def kernel(device: str | None, *shape: int, **options: Any) -> tuple[str, tuple[str, ...]]:
    """Return the kernel of the torch backend, and why it is not PyTorch's; "" without a plan."""
    rows, heads, dim, keys = shape
    dtype = options.pop("dtype", HALF)
    stride = options.pop("stride", dim)
    q, k = (
        torch.empty_strided(
            (2, n, heads, dim), (n * heads * stride, heads * stride, stride, 1),
            dtype=dtype, device="meta", requires_grad=options.get("deterministic", False),
        )
        for n in (rows, keys)
    )  # fmt: skip
    found = pyfa.explain(q, k, k, device=device, backend="torch", **options)
    (answer,) = (answer for answer in found.answers if answer.backend == "torch")
    if answer.plan is None:
        return "", tuple(answer.reasons)
    return answer.plan.kernel, answer.plan.notes


PLAIN = (8, 2, 64, 8)  # rows, heads, head_dim, keys
ONE = (1, 2, 64, 1)
LONGER = (8, 2, 64, 9)


@pytest.mark.parametrize("device", [None, "H200", "MI300X"])
@pytest.mark.parametrize(
    ("shape", "options"),
    [
        (PLAIN, {}),
        (ONE, {}),
        (LONGER, {}),
        (PLAIN, {"causal": True}),
        (PLAIN, {"scale": 0.5, "causal": True}),
        (PLAIN, {"dtype": torch.bfloat16}),
    ],
)
def test_left_to_pytorch(device: str | None, shape: Any, options: dict[str, Any]) -> None:
    assert kernel(device, *shape, **options) == ("sdpa", ())


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        (PLAIN, {"dtype": torch.float32}),
        (PLAIN, {"scale": 0.0}),
        ((8, 2, 12, 8), {}),
        (PLAIN, {"stride": 65}),
        (PLAIN, {"deterministic": True}),
        (PLAIN, {"deterministic": True, "causal": True}),
    ],
)
def test_left_to_pytorch_on_a_cpu(shape: Any, options: dict[str, Any]) -> None:
    assert kernel(None, *shape, **options) == ("sdpa", ())


@pytest.mark.parametrize("device", [None, "H200"])
@pytest.mark.parametrize(
    ("shape", "options", "why"),
    [
        (PLAIN, {"softcap": 3.0}, "PyTorch's attention does not support softcap"),
        (
            PLAIN,
            {"softcap": 3.0, "window": (3, 3)},
            "PyTorch's attention does not support softcap, window",
        ),
        (
            PLAIN,
            {"deterministic": True, "return_lse": True},
            "PyTorch's attention does not support a gradient through the LSE",
        ),
        ((0, 2, 64, 8), {}, "PyTorch's fused kernels refuse empty tensors"),
        ((8, 2, 64, 0), {}, "PyTorch's fused kernels refuse empty tensors"),
        (LONGER, {"causal": True}, "PyTorch's causal mask is aligned to the top left"),
        (
            PLAIN,
            {"scale": 0.0, "causal": True},
            "PyTorch's attention loses the causal mask if the scale is 0 or negative",
        ),
    ],
)
def test_why_not_pytorch(device: str | None, shape: Any, options: dict[str, Any], why: str) -> None:
    found, reasons = kernel(device, *shape, **options)
    assert found == "tiled"
    assert why in reasons


@pytest.mark.parametrize("device", ["H200", "MI300X"])
@pytest.mark.parametrize(
    ("shape", "options", "why"),
    [
        (PLAIN, {"stride": 65}, "PyTorch's flash attention needs rows aligned to 16 bytes"),
        (
            PLAIN,
            {"scale": -0.5},
            "PyTorch's flash attention gives NaN if the scale is 0 or negative",
        ),
        (PLAIN, {"dtype": torch.float32}, "PyTorch's flash attention does not support float32"),
        ((8, 2, 12, 8), {}, "head_dim 12 is not a multiple of 8"),
        (PLAIN, {"deterministic": True}, "PyTorch's flash backward is not deterministic"),
    ],
)
def test_why_not_pytorch_on_a_gpu(
    device: str, shape: Any, options: dict[str, Any], why: str
) -> None:
    found, reasons = kernel(device, *shape, **options)
    assert found == "tiled"
    assert reasons[-1] == why
    assert set(reasons[:-1]) <= {"PyTorch's flash attention needs rows aligned to 16 bytes"}


def test_batch_invariant() -> None:
    assert kernel(None, *PLAIN, batch_invariant=True)[0] == "tiled"
    assert kernel("H200", *PLAIN, batch_invariant=True) == (
        "",
        ("on a GPU, PyTorch chooses its matrix products by the size of the batch",),
    )
