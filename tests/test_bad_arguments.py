"""Wrong arguments of every kind: an error that names the argument, or right numbers."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

import pyfa

# Sizes of a nested tensor raise, its strides too; PyTorch's guards end the process over the latter.
_NESTED = """
import warnings; warnings.simplefilter("ignore")
import torch, pyfa

def rows(*shape, grad=False):
    return torch.randn(shape).requires_grad_(grad)

nested = torch.nested.nested_tensor([rows(5, 4, 8), rows(3, 4, 8)])
offsets = torch.tensor([0, 2, 5], dtype=torch.int32)
slopes = rows(4)
calls = {
    "q": lambda x: pyfa.attention(x, k, v, alibi_slopes=slopes),
    "k": lambda x: pyfa.attention(q, x, v, alibi_slopes=slopes),
    "alibi_slopes": lambda x: pyfa.attention(q, k, v, alibi_slopes=x),
    "v": lambda x: pyfa.attention_varlen(q[0], q[0], x, offsets, offsets, 3, 3),
    "k_cache": lambda x: pyfa.attention_kvcache(q, x, v),
}
right = {"alibi_slopes": slopes, "v": rows(5, 4, 8)}
for name, call in calls.items():
    q, k, v = rows(2, 5, 4, 8), rows(2, 5, 4, 8), rows(2, 5, 4, 8)
    for _ in range(3):  # from the second on, guards compare the tensors
        call(right.get(name, rows(2, 5, 4, 8)))
    try:
        call(nested)
    except ValueError as error:
        assert str(error).startswith(name + ": expected a dense tensor"), error
    else:
        raise AssertionError(name)
q, k, v = rows(2, 5, 4, 8, grad=True), rows(2, 5, 4, 8), rows(2, 5, 4, 8)
for _ in range(3):
    pyfa.attention(q, k, v).backward(rows(2, 5, 4, 8))
try:
    pyfa.attention(q, k, v).backward(nested)
except RuntimeError as error:
    print("refused", type(error).__name__)
"""


def test_nested_tensors_after_dense_ones_are_refused() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _NESTED], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, (done.returncode, done.stderr[-2000:])
    assert done.stdout.startswith("refused"), done.stdout


def _dense() -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(2, 5, 4, 8) for _ in range(3)]


@pytest.mark.parametrize("index", [0, 1, 2])
@pytest.mark.parametrize("kind", ["sparse", "mkldnn", "jagged"])
@pytest.mark.filterwarnings("ignore")
def test_layouts_without_strides(kind: str, index: int) -> None:
    args = _dense()
    x = args[index]
    args[index] = {
        "sparse": x.to_sparse,
        "mkldnn": x.to_mkldnn,
        "jagged": lambda: torch.nested.nested_tensor([*x], layout=torch.jagged),
    }[kind]()
    with pytest.raises(ValueError, match=f"^{'qkv'[index]}: expected a dense tensor"):
        pyfa.attention(*args)
