"""Wrong arguments of every kind: an error that names the argument, or right numbers."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
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


def _cache(rows: int = 9) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    q, new = torch.randn(2, 1, 2, 8), torch.randn(2, 1, 2, 8)
    return q, torch.randn(2, rows, 2, 8), torch.randn(2, rows, 2, 8), new, new + 1


@pytest.mark.usefixtures("fresh_calls")
@pytest.mark.parametrize("calls_before", [0, 3])
@pytest.mark.parametrize("kind", ["inference", "shared"])
def test_a_refused_append_has_written_nothing(kind: str, calls_before: int) -> None:
    q, k_cache, v_cache, k, v = _cache()
    lengths = torch.tensor([2, 5], dtype=torch.int32)
    for _ in range(calls_before):
        pyfa.attention_kvcache(q, k_cache, v_cache, k=k, v=v, cache_seqlens=lengths)
    if kind == "inference":
        with torch.inference_mode():
            k_cache, v_cache = k_cache.clone(), v_cache.clone()
    else:
        k_cache = k_cache[:1].expand(2, -1, -1, -1)
    before = k_cache.clone(), v_cache.clone()
    with pytest.raises(ValueError, match=r"^k_cache: expected"):
        pyfa.attention_kvcache(q, k_cache, v_cache, k=k, v=v, cache_seqlens=lengths)
    assert torch.equal(k_cache, before[0])
    assert torch.equal(v_cache, before[1])
    if kind == "inference":
        with torch.inference_mode():
            pyfa.attention_kvcache(q, k_cache, v_cache, k=k, v=v, cache_seqlens=lengths)
        assert torch.equal(k_cache[0, 2], k[0, 0])


@pytest.mark.parametrize("causal", [False, True])
def test_rows_behind_the_last_sequence_need_no_rotary_position(causal: bool) -> None:
    _, k_cache, v_cache, *_ = _cache()
    q = torch.randn(20, 2, 8)
    offsets = torch.tensor([0, 1, 3], dtype=torch.int32)
    angles = torch.rand(9, 4)
    options = {
        "cache_seqlens": torch.tensor([7, 7], dtype=torch.int32), "causal": causal,
        "rotary_cos": angles.cos(), "rotary_sin": angles.sin(), "cu_seqlens_q": offsets,
        "max_seqlen_q": 2, "rotary_seqlens": torch.tensor([8, 7], dtype=torch.int32),
    }  # fmt: skip
    out = pyfa.attention_kvcache(q, k_cache, v_cache, **options)
    assert torch.equal(out[:3], pyfa.attention_kvcache(q[:3], k_cache, v_cache, **options))
    assert not out[3:].any()


@pytest.mark.parametrize("name", ["bias", "sinks", "alibi_slopes", "v"])
def test_no_tangent_is_dropped(name: str) -> None:
    from torch.autograd import forward_ad

    q, k, v = _dense()
    shapes = {"bias": (5, 5), "sinks": (4,), "alibi_slopes": (4,), "v": (2, 5, 4, 8)}
    with forward_ad.dual_level():
        x = forward_ad.make_dual(torch.randn(shapes[name]), torch.randn(shapes[name]))
        given = {"v": v} | {name: x}
        with pytest.raises(NotImplementedError, match="forward-mode"):
            pyfa.attention(q, k, **given)


@pytest.mark.parametrize("index", [0, 1])
def test_more_rows_than_kernels_count(index: int) -> None:
    shapes = [[1, 4, 1, 8]] * 3
    longer = [1, 2**31, 1, 8]
    shapes = [longer, *shapes[1:]] if index == 0 else [shapes[0], longer, longer]
    args = [torch.empty(1, dtype=torch.float16, device="meta").expand(shape) for shape in shapes]
    with pytest.raises(ValueError, match=f"^{'qk'[index]}: expected at most 2147483647 rows"):
        pyfa.explain(*args, device="MI300X")
    if index:
        with pytest.raises(ValueError, match=r"^k_cache: expected at most 2147483647 keys"):
            pyfa.explain(*args, device="MI300X", cache_seqlens=5)


@pytest.mark.filterwarnings("error")
def test_numpy_floats_are_floats() -> None:
    """NumPy compares a float16 with the limits of float32 in float16, where they are inf."""
    q = torch.randn(1, 3, 2, 8)
    for kind in (np.float16, np.float32, np.float64):
        assert torch.equal(
            pyfa.attention(q, q, q, scale=kind(0.5)), pyfa.attention(q, q, q, scale=0.5)
        )
        for name in ("scale", "softcap"):
            with pytest.raises(ValueError, match=f"^{name}: expected a finite number"):
                pyfa.attention(q, q, q, **{name: kind("inf")})


def test_numpy_integers_are_integers() -> None:
    x = torch.randn(9, 2, 8)
    offsets = torch.tensor([0, 4, 9], dtype=torch.int32)
    longest = np.int64(5)
    for _ in range(3):
        out = pyfa.attention_varlen(x, x, x, offsets, offsets, longest, longest)
    assert torch.equal(out, pyfa.attention_varlen(x, x, x, offsets, offsets, 5, 5))
    q, k_cache, v_cache, *_ = _cache()
    pyfa.attention_kvcache(q, k_cache, v_cache, num_splits=np.int32(2), cache_seqlens=np.int32(3))


@torch._dynamo.config.patch(capture_scalar_outputs=True)
def test_a_length_from_a_tensor_compiles_into_one_graph() -> None:
    def packed(x: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        longest = offsets.diff().max().item()
        out = pyfa.attention_varlen(x, x, x, offsets, offsets, longest, longest, causal=True)
        assert isinstance(out, torch.Tensor)
        return out

    x, offsets = torch.randn(9, 2, 8), torch.tensor([0, 4, 9], dtype=torch.int32)
    compiled = torch.compile(packed, fullgraph=True, backend="eager")
    assert torch.equal(compiled(x, offsets), packed(x, offsets))


@pytest.mark.parametrize("softcap", [0.0, 5.0])
@pytest.mark.parametrize("return_lse", [False, True])
def test_a_result_may_be_changed_in_place_before_no_backward(
    softcap: float, return_lse: bool
) -> None:
    """Backward needs it as it was, and says so, on the fused path and in tiles."""
    q, k, v = (x.requires_grad_() for x in _dense())
    for _ in range(3):
        result = pyfa.attention(q, k, v, softcap=softcap, return_lse=return_lse)
        out = result[0] if isinstance(result, tuple) else result
        before = out.detach().clone()
        out.mul_(2)
        assert torch.equal(out, 2 * before)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("backend", ["torch", "emulator"])
def test_many_gradients_at_once_are_those_of_one_by_one(backend: str) -> None:
    q, k, v = (torch.randn(1, 5, 2, 64).half().requires_grad_() for _ in range(3))
    for return_lse in (False, True):
        result = pyfa.attention(q, k, v, causal=True, return_lse=return_lse, backend=backend)
        outs = result if isinstance(result, tuple) else (result,)
        flows = [torch.randn(2, *x.shape, dtype=x.dtype) for x in outs]
        together = torch.autograd.grad(
            outs, (q, k, v), flows, is_grads_batched=True, retain_graph=True
        )
        for i in range(2):
            alone = torch.autograd.grad(outs, (q, k, v), [x[i] for x in flows], retain_graph=True)
            assert all(torch.equal(x[i], y) for x, y in zip(together, alone, strict=True))


def test_a_trace_is_refused_by_name() -> None:
    with pytest.raises(NotImplementedError, match=r"torch\.jit\.trace"):
        torch.jit.trace(lambda q, k, v: pyfa.attention(q, k, v), tuple(_dense()))


TWO = torch.ones(2)
WRONG: list[tuple[str, dict[str, object], type[Exception]]] = [
    ("alibi_slopes", {"alibi_slopes": [1.0] * 4}, TypeError),
    ("bias", {"bias": [1.0]}, TypeError),
    ("sinks", {"sinks": [1.0] * 4}, TypeError),
    ("softcap", {"softcap": TWO}, TypeError),
    ("softcap", {"softcap": torch.zeros(1)}, TypeError),
    ("dropout_p", {"dropout_p": TWO}, TypeError),
    ("dropout_p", {"dropout_p": torch.zeros(1)}, TypeError),
    ("dropout_p", {"dropout_p": []}, TypeError),
    ("dropout_p", {"dropout_p": None}, TypeError),
    ("dropout_p", {"dropout_p": False}, TypeError),
    ("scale", {"scale": np.complex64(1)}, TypeError),
    ("scale", {"scale": 1 + 0j}, TypeError),
    ("scale", {"scale": True}, TypeError),
    ("seed", {"seed": "x"}, TypeError),
    ("deterministic", {"deterministic": "False"}, TypeError),
    ("deterministic", {"deterministic": TWO}, TypeError),
    ("return_lse", {"return_lse": "no"}, TypeError),
    ("return_lse", {"return_lse": TWO}, TypeError),
    ("backend", {"backend": TWO}, TypeError),
    ("backend", {"backend": {}}, TypeError),
    ("backend", {"backend": ()}, ValueError),
]


@pytest.mark.usefixtures("fresh_calls")
@pytest.mark.parametrize(("name", "wrong", "error"), WRONG)
def test_wrong_arguments_are_named(
    name: str, wrong: dict[str, object], error: type[Exception]
) -> None:
    args = _dense()
    for repeated in range(3):
        with pytest.raises(error, match=f"^{name}: expected"):
            pyfa.attention(*args, **wrong)
        for _ in range(repeated):
            pyfa.attention(*args)


def _any_function(*_: object) -> torch.Tensor:
    return torch.tensor(1.0)


@pytest.mark.parametrize("name", ["score_mod", "mask_mod"])
def test_a_mod_of_other_arguments_is_named(name: str) -> None:
    with pytest.raises(
        TypeError, match=rf"^{name} <lambda>, .*: takes \(x\), expected \(.*b, h, q_idx, kv_idx\)"
    ):
        pyfa.attention(*_dense(), **{name: lambda x: x})
    pyfa.attention(*_dense(), score_mod=_any_function)


def test_a_page_table_is_looked_at_before_the_keys() -> None:
    x, offsets = torch.randn(5, 2, 8), torch.tensor([0, 5], dtype=torch.int32)
    with pytest.raises(TypeError, match=r"^page_table: expected a tensor; got list"):
        pyfa.attention_varlen(x, x, x, offsets, offsets, 5, 5, page_table=[[0]])


@pytest.mark.parametrize("packed", [False, True])
def test_lengths_of_a_cache_have_its_name(packed: bool) -> None:
    q, k_cache, v_cache, *_ = _cache()
    given: dict[str, object] = {}
    if packed:
        offsets = torch.tensor([0, 1, 2], dtype=torch.int32)
        q, given = q.flatten(0, 1), {"cu_seqlens_q": offsets, "max_seqlen_q": 1}
    lengths = torch.tensor([2, 9], dtype=torch.int32)
    pyfa.attention_kvcache(q, k_cache, v_cache, cache_seqlens=lengths, **given)
    for value in (-1, 10):  # a bound call, whose lengths are read as it runs
        lengths = torch.tensor([2, value], dtype=torch.int32)
        with pytest.raises(ValueError, match=r"^cache_seqlens: expected"):
            pyfa.attention_kvcache(q, k_cache, v_cache, cache_seqlens=lengths, **given)


@pytest.mark.parametrize("which", ["cache_batch_idx", "cache_leftpad"])
def test_scales_of_nobodys_blocks_may_be_anything(which: str) -> None:
    q, k, v = (torch.randn(2, 64, 2, 8).to(torch.float8_e4m3fn) for _ in range(3))
    scales = [torch.ones(2, 2, 4) for _ in range(3)]
    given = {which: torch.tensor([0], dtype=torch.int32)}
    if which == "cache_leftpad":
        given = {which: torch.tensor([0, 16], dtype=torch.int32)}
    else:
        q, scales[0] = q[:1], scales[0][:1]
    right = pyfa.attention_kvcache(q, k, v, descale=tuple(scales), **given)
    for x in scales[1:]:
        x[1, :, 0] = float("nan")
    assert torch.equal(pyfa.attention_kvcache(q, k, v, descale=tuple(scales), **given), right)


CACHED: list[tuple[str, dict[str, object]]] = [
    ("k", {"k": [1.0], "v": TWO, "cache_seqlens": 2}),
    ("k", {"k": TWO, "v": TWO, "cache_seqlens": 2}),
    ("rotary_cos", {"rotary_cos": [1.0], "rotary_sin": [1.0]}),
    ("rotary_sin", {"rotary_cos": TWO, "rotary_sin": [1.0]}),
    ("rotary_interleaved", {"rotary_interleaved": "no"}),
    ("causal", {"rotary_cos": torch.ones(9, 4), "rotary_sin": torch.ones(9, 4), "causal": TWO}),
    (
        "attention_chunk",
        {"rotary_cos": torch.ones(9, 4), "rotary_sin": torch.ones(9, 4), "attention_chunk": TWO},
    ),
]


@pytest.mark.usefixtures("fresh_calls")
@pytest.mark.parametrize(("name", "wrong"), CACHED)
def test_wrong_arguments_of_a_cache_are_named(name: str, wrong: dict[str, object]) -> None:
    q, k_cache, v_cache, *_ = _cache()
    for repeated in range(3):
        with pytest.raises((TypeError, ValueError), match=f"^{name}: expected"):
            pyfa.attention_kvcache(q, k_cache, v_cache, **wrong)
        for _ in range(repeated):
            pyfa.attention_kvcache(q, k_cache, v_cache)


@pytest.mark.parametrize("device", [5, "", [], "MI42"])
def test_a_device_that_explain_does_not_know(device: object) -> None:
    with pytest.raises((TypeError, ValueError), match=r"^device: expected"):
        pyfa.explain(*_dense(), device=device)


@pytest.mark.usefixtures("fresh_calls")
@pytest.mark.parametrize("scale", [float("nan"), 0.0, -1.0, float("inf")])
@pytest.mark.parametrize("index", [0, 1, 2])
@pytest.mark.parametrize("shape", [(), (2, 4), (2, 4, 1)])
def test_a_scale_of_float8_is_positive(scale: float, index: int, shape: tuple[int, ...]) -> None:
    args = [x.to(torch.float8_e4m3fn) for x in _dense()]
    right = tuple(torch.ones(shape) for _ in range(3))
    wrong = list(right)
    wrong[index] = wrong[index].clone()
    wrong[index].view(-1)[-1] = scale
    for _ in range(2):
        with pytest.raises(ValueError, match=rf"^descale \({'qkv'[index]}\): expected positive"):
            pyfa.attention(*args, descale=tuple(wrong))
        pyfa.attention(*args, descale=right)
