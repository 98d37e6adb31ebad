"""flash-attention's private functions: forward and backward apart, as their callers use them.

What they compute is held to ``pyfa.attention`` and its gradients, which the conformance suite holds
to the reference. Names and order of parameters are those of flash-attention 2.8, 3 and 4.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

import pyfa
from pyfa.compat import fa2, fa2_extension, fa2_interface, fa3_interface, fa4_interface, raw
from pyfa.compat.errors import ArgumentError

SCALE = 0.3
# q, k, v; two sequences packed.
OFFSETS = torch.tensor([0, 5, 33], dtype=torch.int32), torch.tensor([0, 40, 57], dtype=torch.int32)
LONGEST = 28, 40

DENSE = "dropout_p softmax_scale causal window_size_left window_size_right softcap alibi_slopes"
PACKED = "cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k"
GRADIENTS = "dout q k v out softmax_lse dq dk dv"
PARAMETERS = {
    "_flash_attn_forward": f"q k v {DENSE} return_softmax",
    "_flash_attn_varlen_forward": f"q k v {PACKED} {DENSE} return_softmax block_table leftpad_k "
    "seqused_k zero_tensors num_splits",
    "_flash_attn_backward": f"{GRADIENTS} {DENSE} deterministic rng_state",
    "_flash_attn_varlen_backward": f"{GRADIENTS} {PACKED} {DENSE} deterministic rng_state "
    "zero_tensors",
}


def tensors(
    rows: tuple[int, ...] = (2, 33), keys: tuple[int, ...] = (2, 57)
) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(1)
    q = torch.randn(*rows, 4, 24, requires_grad=True)
    k, v = (torch.randn(*keys, 2, 24, requires_grad=True) for _ in range(2))
    return q, k, v, torch.randn(*rows, 4, 24)


def packed() -> tuple[torch.Tensor, ...]:
    return tensors((33,), (57,))


def expected(
    function: Callable[..., Any], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
    dout: torch.Tensor, *where: Any, **options: Any,
) -> list[torch.Tensor]:  # fmt: skip
    """out, LSE, dq, dk, dv of one of pyfa's own functions."""
    out, lse = function(q, k, v, *where, scale=SCALE, return_lse=True, **options)
    return [out.detach(), lse.detach(), *torch.autograd.grad(out, (q, k, v), dout)]


def close(found: Any, wanted: Any) -> None:
    for x, y in zip(found, wanted, strict=True):
        torch.testing.assert_close(x.detach(), y)


def empty(*of: torch.Tensor) -> list[torch.Tensor]:
    return [torch.full_like(x, torch.nan).detach() for x in of]


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters_are_flash_attentions(name: str) -> None:
    """``_init_fn`` is where ring-flash-attn reads the defaults."""
    operator = getattr(fa2_interface, name)
    assert list(inspect.signature(operator._init_fn).parameters) == PARAMETERS[name].split()
    wrapped = getattr(fa2_interface, f"_wrapped{name}")
    assert [each.name for each in wrapped.default._schema.arguments] == PARAMETERS[name].split()
    assert str(wrapped.default) == f"flash_attn.{name}.default"


@pytest.mark.parametrize("wrapped", ["", "_wrapped"])
@pytest.mark.parametrize(
    ("causal", "left", "right", "softcap", "slopes"),
    [
        (False, -1, -1, 0.0, False),
        (True, -1, -1, 0.0, True),
        (False, 9, 3, 0.0, False),
        (True, 70, -1, 5.0, False),
    ],
)
def test_version_2(
    causal: bool, left: int, right: int, softcap: float, slopes: bool, wrapped: str
) -> None:
    q, k, v, dout = tensors()
    alibi = torch.rand(4) if slopes else None
    window = None if left == right == -1 else (left, right)
    want = expected(
        pyfa.attention, q, k, v, dout, causal=causal, window=window, softcap=softcap,
        alibi_slopes=alibi,
    )  # fmt: skip
    options = (0.0, SCALE, causal, left, right, softcap, alibi)
    forward = getattr(fa2_interface, f"{wrapped}_flash_attn_forward")
    out, lse, probabilities, state = forward(q, k, v, *options, False)
    assert probabilities.numel() == 0
    assert state.shape == (2,)
    assert state.dtype == torch.int64
    close((out, lse), want[:2])
    grads = empty(q, k, v)
    backward = getattr(fa2_interface, f"{wrapped}_flash_attn_backward")
    sums = backward(
        dout, *(x.detach() for x in (q, k, v, out, lse)), *grads, *options, False, rng_state=state
    )
    close(grads, want[2:])
    assert sums.shape == (2, 4, 128)
    close([sums[..., :33]], [(dout * out.detach()).sum(-1).transpose(1, 2)])
    assert not bool(sums[..., 33:].any())


@pytest.mark.parametrize("causal", [False, True])
def test_version_2_packed(causal: bool) -> None:
    q, k, v, dout = packed()
    want = expected(pyfa.attention_varlen, q, k, v, dout, *OFFSETS, *LONGEST, causal=causal)
    out, lse, _, state = fa2_interface._flash_attn_varlen_forward(
        q, k, v, *OFFSETS, *LONGEST, 0.0, SCALE, causal
    )
    # The second sequence has fewer keys than queries: rows that see nothing, +inf in version 2.
    assert bool((lse == torch.inf).any()) == causal
    close((out, lse), (want[0], fa2.their_lse(want[1])))
    grads = empty(q, k, v)
    sums = fa2_interface._flash_attn_varlen_backward(
        dout, *(x.detach() for x in (q, k, v, out, lse)), *grads, *OFFSETS, *LONGEST, 0.0, SCALE,
        causal, -1, -1, 0.0, None, False, state,
    )  # fmt: skip
    close(grads, want[2:])
    row_sums = (dout * out.detach()).sum(-1).t()
    assert sums.shape == (4, 33 + 2 * 128)
    close([sums[:, :5], sums[:, 5 + 128 : 33 + 128]], [row_sums[:, :5], row_sums[:, 5:]])


def test_lengths_and_blocks_of_keys() -> None:
    q, k, v, _ = packed()
    used = torch.tensor([40, 9], dtype=torch.int32)
    out, lse, *_ = fa2_interface._flash_attn_varlen_forward(
        q, k, v, *OFFSETS, *LONGEST, 0.0, SCALE, False, seqused_k=used
    )
    want = pyfa.attention_varlen(
        q, k, v, *OFFSETS, *LONGEST, seqused_k=used, scale=SCALE, return_lse=True
    )
    close((out, lse), [x.detach() for x in want])
    pages = torch.tensor([[3, 1, 0], [2, 4, 4]], dtype=torch.int32)
    k_pages, v_pages = torch.randn(5, 16, 2, 24), torch.randn(5, 16, 2, 24)
    out, *_ = fa2_interface._flash_attn_varlen_forward(
        q, k_pages, v_pages, *OFFSETS, *LONGEST, 0.0, SCALE, True, block_table=pages
    )
    first = k_pages[pages[0].long()].flatten(0, 1)[:40], v_pages[pages[0].long()].flatten(0, 1)[:40]
    alone = pyfa.attention(q[None, :5], *(x[None] for x in first), causal=True, scale=SCALE)
    close([out[:5]], [alone[0].detach()])


def test_dropout_comes_again_in_backward() -> None:
    q, k, v, dout = tensors()
    torch.manual_seed(3)
    out, lse, probabilities, state = fa2_interface._flash_attn_forward(
        q, k, v, 0.25, SCALE, True, -1, -1, 0.0, None, True
    )
    want = expected(
        pyfa.attention, q, k, v, dout, causal=True, dropout_p=0.25, seed=state[:1].clone()
    )
    close((out, lse), want[:2])
    assert probabilities.shape == (2, 4, 128, 128)
    assert bool((probabilities < 0).any())
    given = [x.detach() for x in (q, k, v, out, lse)]
    grads = empty(q, k, v)
    options = (0.25, SCALE, True, -1, -1, 0.0, None, False)
    fa2_interface._flash_attn_backward(dout, *given, *grads, *options, state)
    close(grads, want[2:])
    with pytest.raises(RuntimeError, match="rng_state: expected the forward's"):
        fa2_interface._flash_attn_backward(dout, *given, *grads, *options)


def test_rows_that_see_nothing() -> None:
    """Version 2 says +inf, version 3 −inf; either gives the same gradients."""
    q, k, v, dout = tensors((1, 60), (1, 57))
    want = expected(pyfa.attention, q, k, v, dout, causal=True)
    options = (0.0, SCALE, True, -1, -1, 0.0, None, False)
    out, lse, *_ = fa2_interface._flash_attn_forward(q, k, v, *options)
    assert bool((lse[..., :3] == torch.inf).all())
    out3, lse3, *_ = fa3_interface._flash_attn_forward(q, k, v, softmax_scale=SCALE, causal=True)
    assert bool((lse3[..., :3] == -torch.inf).all())
    for made, kept in ((out, lse), (out3, lse3)):
        grads = empty(q, k, v)
        given = [x.detach() for x in (q, k, v, made, kept)]
        fa2_interface._flash_attn_backward(dout, *given, *grads, *options)
        close(grads, want[2:])


def test_kernels_get_the_lse_of_a_row_that_sees_nothing_as_pyfas(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """−inf: what the kernels are tested with."""
    q, k, v, dout = (x.detach() for x in tensors((1, 60), (1, 57)))
    options = (0.0, SCALE, True, -1, -1, 0.0, None, False)
    out, lse, *_ = fa2_interface._flash_attn_forward(q, k, v, *options)
    seen = []
    prepare = raw.prepare

    def watched(*args: Any) -> Any:
        prepared = prepare(*args)

        class Watch:
            validate = prepared.validate

            @staticmethod
            def backward(call: Any, out: torch.Tensor, lse: torch.Tensor, *rest: Any) -> Any:
                seen.append(lse)
                return prepared.backward(call, out, lse, *rest)

        return Watch

    monkeypatch.setattr(raw, "prepare", watched)
    fa2_interface._flash_attn_backward(dout, q, k, v, out, lse, None, None, None, *options)
    assert bool((seen[0][..., :3] == -torch.inf).all())
    assert not bool((seen[0] == torch.inf).any())


def test_blocks_of_keys_merged_as_in_ring_attention() -> None:
    """Forward by blocks, merged by LSE; backward of each block from the merged out and LSE."""
    q, k, v, dout = tensors()
    want = expected(pyfa.attention, q, k, v, dout)
    options = (0.0, SCALE, False, -1, -1, 0.0, None, False)
    parts = [(k[:, a:b], v[:, a:b]) for a, b in itertools.pairwise((0, 20, 57))]
    made = [fa2_interface._flash_attn_forward(q, *part, *options)[:2] for part in parts]
    lse = torch.logaddexp(made[0][1], made[1][1]).detach()
    out = sum(x * (y - lse).exp().transpose(1, 2)[..., None] for x, y in made).detach()
    close((out, lse), want[:2])
    total = [torch.zeros_like(x) for x in (q, k, v)]
    for (a, b), part in zip(((0, 20), (20, 57)), parts, strict=True):
        dq = empty(q)[0]
        # Slices of larger tensors, which are written in place.
        dk, dv = total[1][:, a:b].detach(), total[2][:, a:b].detach()
        given = [x.detach() for x in (q, *part)]
        fa2_interface._wrapped_flash_attn_backward(dout, *given, out, lse, dq, dk, dv, *options)
        total[0] += dq
    close(total, want[2:])


def test_the_extension_by_position() -> None:
    q, k, v, dout = (x.detach() for x in tensors())
    into = torch.empty_like(q)
    out, lse, _, state = fa2_extension.fwd(
        q, k, v, into, None, 0.0, SCALE, False, -1, -1, 0.0, False, None
    )
    assert out is into
    *grads, _ = fa2_extension.bwd(
        dout, q, k, v, out, lse, None, None, None, None, 0.0, SCALE, False, -1, -1, 0.0, False,
        None, state,
    )  # fmt: skip
    q, k, v, dout = tensors()
    close((out, lse, *grads), expected(pyfa.attention, q, k, v, dout))
    with pytest.raises(RuntimeError, match="generator` argument is no longer supported"):
        fa2_extension.fwd(q, k, v, None, None, 0.0, SCALE, False, -1, -1, 0.0, False, 1)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        fa2_extension.fwd(q, k, v)  # type: ignore[call-arg]
    one, lengths = torch.randn(2, 1, 4, 24), torch.tensor([5, 56], dtype=torch.int32)
    cache = k.detach().clone(), v.detach().clone()
    out, lse = fa2_extension.fwd_kvcache(
        one, *cache, torch.ones(2, 1, 2, 24), torch.ones(2, 1, 2, 24), lengths, None, None, None,
        None, None, None, None, SCALE, True, -1, -1, 0.0, True, 0,
    )  # fmt: skip
    assert bool((cache[0][0, 5] == 1).all())
    keys = cache[0][:1, :6], cache[1][:1, :6]
    close([out[:1]], [pyfa.attention(one[:1], *keys, scale=SCALE)])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dq": torch.empty(2, 32, 4, 24)}, r"dq: expected shape \(2, 33, 4, 24\)"),
        ({"dv": torch.empty(2, 57, 2, 24).half()}, "dv: expected .*float32"),
        ({"softmax_lse": torch.empty(2, 33, 4)}, r"softmax_lse: expected shape \(2, 4, 33\)"),
        ({"dout": torch.empty(2, 33, 4, 8)}, "dout: expected shape"),
        ({"window_size_left": 1, "softmax_scale": float("nan")}, "softmax_scale"),
    ],
)
def test_wrong_arguments(change: dict[str, Any], message: str) -> None:
    q, k, v, dout = (x.detach() for x in tensors())
    out, lse, *_ = fa2_interface._flash_attn_forward(
        q, k, v, 0.0, SCALE, False, -1, -1, 0.0, None, False
    )
    given = {
        "dout": dout, "q": q, "k": k, "v": v, "out": out, "softmax_lse": lse,
        "dq": None, "dk": None, "dv": None, "dropout_p": 0.0, "softmax_scale": SCALE,
        "causal": False, "window_size_left": -1, "window_size_right": -1, "softcap": 0.0,
        "alibi_slopes": None, "deterministic": False,
    }  # fmt: skip
    with pytest.raises(ArgumentError, match=message):
        fa2_interface._flash_attn_backward(**given | change)


@pytest.mark.parametrize("layout", ["dense", "packed", "used"])
def test_version_3(layout: str) -> None:
    """Its operator has a gradient of its own, and takes lengths on dense tensors as well."""
    q, k, v, dout = packed() if layout == "packed" else tensors()
    where: dict[str, Any] = {}
    if layout == "packed":
        where = dict(zip(PACKED.split(), (*OFFSETS, *LONGEST), strict=True))
        want = expected(pyfa.attention_varlen, q, k, v, dout, *OFFSETS, *LONGEST, causal=True)
    elif layout == "used":
        used = torch.tensor([57, 11], dtype=torch.int32)
        where = {"seqused_k": used}
        seen = (torch.arange(57) < used[:, None])[:, None, None]
        want = expected(pyfa.attention, q, k, v, dout, bias=seen)
    else:
        want = expected(pyfa.attention, q, k, v, dout, causal=True)
    causal = layout != "used"
    out, lse, *partial = fa3_interface._flash_attn_forward(
        q, k, v, softmax_scale=SCALE, causal=causal, **where
    )
    assert [x.numel() for x in partial] == [0, 0]
    close((out, lse, *torch.autograd.grad(out, (q, k, v), dout)), want)
    given = [x.detach() for x in (q, k, v, out, lse)]
    grads = empty(q, k, v)
    where = {name.replace("seqused", "sequed"): x for name, x in where.items()}
    fa3_interface._flash_attn_backward(
        dout, *given, **where, dq=grads[0], dk=grads[1], dv=grads[2], softmax_scale=SCALE,
        is_causal=causal,
    )  # fmt: skip
    close(grads, want[2:])


def test_version_3_over_a_cache() -> None:
    q, k, v, _ = tensors((2, 1))
    lengths = torch.tensor([3, 20], dtype=torch.int32)
    cache = k.detach().clone(), v.detach().clone()
    new = torch.randn(2, 1, 2, 24), torch.randn(2, 1, 2, 24)
    out, *_ = torch.ops.flash_attn_3.fwd(
        q, *cache, *new, seqused_k=lengths, is_causal=True, softmax_scale=SCALE
    )
    assert torch.equal(cache[0][1, 20], new[0][1, 0])
    alone = pyfa.attention(q[:1], cache[0][:1, :4], cache[1][:1, :4], scale=SCALE)
    close([out[:1]], [alone.detach()])
    turned = fa3_interface._flash_attn_forward(q, *cache, *new, seqused_k=lengths)[0]
    with pytest.raises(NotImplementedError, match="over a cache"):
        torch.autograd.grad(turned.sum(), q)


def test_version_3_operators_have_flash_attentions_schemas() -> None:
    fwd = torch.ops.flash_attn_3.fwd.default._schema
    names = [each.name for each in fwd.arguments]
    assert (len(names), names[:7], names[-1]) == (
        34, ["q", "k", "v", "k_new", "v_new", "q_v", "out"], "sm_margin",
    )  # fmt: skip
    bwd = torch.ops.flash_attn_3.bwd.default._schema
    assert [each.name for each in bwd.arguments][:9] == GRADIENTS.split()
    assert (len(bwd.arguments), len(bwd.returns)) == (22, 5)
    q, k, v, _ = (x.detach() for x in tensors())
    into = torch.empty_like(q)
    out, lse, *_ = torch.ops.flash_attn_3.fwd(q, k, v, out=into)
    assert out.data_ptr() == into.data_ptr()
    merged, sums = torch.ops.flash_attn_3.fwd_combine(
        torch.stack([out, out]), torch.stack([lse, lse]).transpose(2, 3)
    )
    close((merged, sums), (out, lse.transpose(1, 2) + torch.tensor(2.0).log()))
    lengths = torch.tensor([57, 57], dtype=torch.int32)
    metadata = torch.ops.flash_attn_3.get_scheduler_metadata(
        2, 33, 57, 4, 2, 24, 24, torch.bfloat16, lengths
    )
    assert metadata.numel() == 0


@pytest.mark.parametrize("layout", ["dense", "packed"])
def test_version_4(layout: str) -> None:
    where: dict[str, Any] = {}
    if layout == "packed":
        q, k, v, dout = packed()
        where = dict(zip(PACKED.split(), (*OFFSETS, *LONGEST), strict=True))
        want = expected(pyfa.attention_varlen, q, k, v, dout, *OFFSETS, *LONGEST, causal=True)
    else:
        q, k, v, dout = tensors()
        want = expected(pyfa.attention, q, k, v, dout, causal=True)
    # TransformerEngine's way to say that a window is unlimited.
    options = {"softmax_scale": SCALE, "causal": True, "window_size_left": -1,
               "window_size_right": 0}  # fmt: skip
    out, lse, *nothing = fa4_interface._flash_attn_fwd(q, k, v, return_lse=True, **where, **options)
    assert nothing == [None, None]
    close((out, lse), want[:2])
    grads = empty(q, k, v)
    made = fa4_interface._flash_attn_bwd(
        q.detach(), k.detach(), v.detach(), out, dout, lse, **options, **where, dq=grads[0],
        dk=grads[1], dv=grads[2],
    )  # fmt: skip
    close(made, want[2:])
    close(grads, want[2:])
    assert fa4_interface._flash_attn_fwd(q, k, v, **where)[1] is None
    with pytest.raises(NotImplementedError, match="learnable_sink"):
        fa4_interface._flash_attn_bwd(
            q, k, v, out, dout, lse, learnable_sink=torch.zeros(4), **options, **where
        )
    with pytest.raises(AssertionError, match="head_dim_v"):
        fa4_interface._validate_head_dims(576, 513, 9, 8)


@pytest.mark.parametrize("name", PARAMETERS)
def test_compilers_see_the_right_shapes(name: str) -> None:
    """``opcheck`` runs the operator and its fake, and compares what they say."""
    is_packed, is_backward = "varlen" in name, "backward" in name
    q, k, v, dout = (x.detach() for x in (packed() if is_packed else tensors()))
    where = (*OFFSETS, *LONGEST) if is_packed else ()
    options = (0.0, SCALE, False, -1, -1, 0.0, None, False)
    if is_backward:
        function = pyfa.attention_varlen if is_packed else pyfa.attention
        out, lse = function(q, k, v, *where, scale=SCALE, return_lse=True)
        arguments: tuple[Any, ...] = (dout, q, k, v, out, lse, *empty(q, k, v), *where, *options)
    else:
        arguments = (q, k, v, *where, *options)
    operator = getattr(fa2_interface, f"_wrapped{name}").default
    torch.library.opcheck(operator, arguments, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("layout", ["dense", "packed"])
def test_compilers_see_version_3(layout: str) -> None:
    is_packed = layout == "packed"
    q, k, v, dout = (x.detach() for x in (packed() if is_packed else tensors()))
    named = dict(zip(PACKED.split(), (*OFFSETS, *LONGEST), strict=True)) if is_packed else {}
    checks = ("test_schema", "test_faketensor")
    forward = torch.ops.flash_attn_3._flash_attn_forward.default
    torch.library.opcheck(forward, (q, k, v), named, test_utils=checks)
    out, lse, *_ = forward(q, k, v, **named)
    backward = torch.ops.flash_attn_3._flash_attn_backward.default
    torch.library.opcheck(backward, (dout, q, k, v, out, lse), named, test_utils=checks)
