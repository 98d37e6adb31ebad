"""diffusers' dispatcher and pyfa: by a stand-in of the interface that pyfa registers with.

The real diffusers runs in ci/consumers. What is here stands for it: a closed enumeration of names,
a registry of functions, and the function that shares out context parallelism.
"""

from __future__ import annotations

import enum
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from pyfa.integrations import diffusers as integration


class Registry:
    def __init__(self) -> None:
        self.functions: dict[Any, Callable[..., Any]] = {}
        self.parallel: set[str] = set()

    def register(
        self, backend: Any, constraints: Any = None, supports_context_parallel: bool = False
    ) -> Callable[..., Any]:
        def decorator(function: Callable[..., Any]) -> Callable[..., Any]:
            self.functions[backend] = function
            if supports_context_parallel:
                self.parallel.add(backend.value)
            return function

        return decorator


def in_blocks(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: Any, forward_op: Any,
    backward_op: Any, _parallel_config: Any,
) -> Any:  # fmt: skip
    """Ring attention of one process: two blocks of keys, then the gradients of each."""
    context = SimpleNamespace()
    context.save_for_backward = lambda *x: setattr(context, "saved_tensors", x)
    *options, _ = rest
    blocks = list(zip(key.chunk(2, 1), value.chunk(2, 1), strict=True))
    made = [
        forward_op(context, query, *block, *options, True, _save_ctx=not number)
        for number, block in enumerate(blocks)
    ]
    lse = torch.logaddexp(made[0][1], made[1][1])
    out = sum(x * (y - lse).exp()[..., None] for x, y in made)
    grads = [
        backward_op(context, _parallel_config, query=query, key=k, value=v, out=out, lse=lse)
        for k, v in blocks
    ]
    return out, lse, grads


@pytest.fixture
def dispatcher(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    class Fresh(str, enum.Enum):
        NATIVE = "native"

    package, models = ModuleType("diffusers"), ModuleType("diffusers.models")
    package.__version__ = "0.0"  # type: ignore[attr-defined]
    module = ModuleType("diffusers.models.attention_dispatch")
    module.AttentionBackendName = Fresh  # type: ignore[attr-defined]
    module._AttentionBackendRegistry = Registry()  # type: ignore[attr-defined]
    module._templated_context_parallel_attention = in_blocks  # type: ignore[attr-defined]
    for each in (package, models, module):
        monkeypatch.setitem(sys.modules, each.__name__, each)
    return module


@pytest.fixture
def attention(dispatcher: ModuleType) -> Callable[..., Any]:
    integration.register()
    names = dispatcher.AttentionBackendName
    function: Callable[..., Any] = dispatcher._AttentionBackendRegistry.functions[names("pyfa")]
    return function


def tensors(rows: int = 12, keys: int = 12) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(2, n, 4, 16, requires_grad=True) for n in (rows, keys, keys)]


def sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
    moved = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(*moved, **options).transpose(1, 2)


def test_the_name_joins_the_closed_list(dispatcher: ModuleType) -> None:
    names = dispatcher.AttentionBackendName
    for _ in range(2):
        integration.register()
        assert [each.value for each in names.__members__.values()] == ["native", "pyfa"]
        assert [each.name for each in names] == ["NATIVE", "PYFA"]
    member = names("pyfa")
    assert member is names.PYFA is names["PYFA"]
    assert member == "pyfa"
    assert isinstance(member, names)
    registry = dispatcher._AttentionBackendRegistry
    assert registry.parallel == {"pyfa"}
    assert list(registry.functions) == [member]


def test_another_dispatcher_is_refused(dispatcher: ModuleType) -> None:
    del dispatcher._templated_context_parallel_attention
    with pytest.raises(ImportError, match=r"diffusers 0\.0 has no _templated_context_parallel"):
        integration.register()
    assert [each.value for each in dispatcher.AttentionBackendName] == ["native"]


MASK = torch.arange(12) < torch.tensor([[9], [12]])


@pytest.mark.parametrize(
    ("keys", "mine", "theirs"),
    [
        (12, {}, {}),
        (20, {"scale": 0.1}, {"scale": 0.1}),
        (12, {"is_causal": True}, {"is_causal": True}),
        (20, {"is_causal": True}, {"is_causal": True}),
        (8, {"is_causal": True}, {"is_causal": True}),
        (12, {"attn_mask": MASK}, {"attn_mask": MASK[:, None, None]}),
        (12, {"attn_mask": MASK[:, None, None]}, {"attn_mask": MASK[:, None, None]}),
        (12, {"attn_mask": torch.ones(1, 4, 12, 12).tril(2)},
         {"attn_mask": torch.ones(1, 4, 12, 12).tril(2)}),
    ],
)  # fmt: skip
def test_equal_to_pytorchs(
    attention: Callable[..., Any], keys: int, mine: dict[str, Any], theirs: dict[str, Any]
) -> None:
    q, k, v = tensors(keys=keys)
    found, wanted = attention(q, k, v, **mine), sdpa(q, k, v, **theirs)
    torch.testing.assert_close(found, wanted)
    dout = torch.randn_like(wanted)
    grads = torch.autograd.grad(found, (q, k, v), dout)
    torch.testing.assert_close(grads, torch.autograd.grad(wanted, (q, k, v), dout))


def test_causal_with_a_mask_over_more_keys(attention: Callable[..., Any]) -> None:
    q, k, v = tensors(keys=20)
    seen = torch.ones(12, 20, dtype=torch.bool).tril()
    mask = torch.rand(2, 1, 12, 20) > 0.3
    mask[..., 0] = True
    wanted = sdpa(q, k, v, attn_mask=mask & seen)
    torch.testing.assert_close(attention(q, k, v, attn_mask=mask, is_causal=True), wanted)
    added = torch.randn(2, 1, 12, 20)
    wanted = sdpa(q, k, v, attn_mask=added.masked_fill(~seen, -torch.inf))
    torch.testing.assert_close(attention(q, k, v, attn_mask=added, is_causal=True), wanted)


def test_context_parallel_blocks(attention: Callable[..., Any]) -> None:
    q, k, v = tensors(keys=20)
    wanted, dout = sdpa(q, k, v), torch.randn(2, 12, 4, 16)
    inputs = (x.detach() for x in (q, k, v))
    # The stand-in takes the gradient of the output where diffusers has its configuration.
    out, lse, grads = attention(*inputs, _parallel_config=dout)
    torch.testing.assert_close(out, wanted)
    assert lse.shape == (2, 12, 4)
    dq, dk, dv = torch.autograd.grad(wanted, (q, k, v), dout)
    torch.testing.assert_close(grads[0][0] + grads[1][0], dq)
    torch.testing.assert_close(torch.cat([grads[0][1], grads[1][1]], 1), dk)
    torch.testing.assert_close(torch.cat([grads[0][2], grads[1][2]], 1), dv)
    with pytest.raises(ValueError, match="neither attn_mask nor dropout_p"):
        attention(q, k, v, attn_mask=torch.ones(2, 20, dtype=torch.bool), _parallel_config=dout)


@pytest.mark.parametrize("text", [False, True])
def test_a_processor_is_pytorchs_layer_by_the_dispatcher(
    dispatcher: ModuleType, attention: Callable[..., Any], text: bool
) -> None:
    """An image with a group norm and a residual; its own rows as keys, or a text's, masked."""
    torch.manual_seed(0)
    seen: list[Any] = []

    def dispatch(*tensors: torch.Tensor, attn_mask: Any, backend: Any, parallel_config: Any) -> Any:
        seen.append(backend)
        return attention(*tensors, attn_mask)

    dispatcher.dispatch_attention_fn = dispatch  # type: ignore[attr-defined]
    linear = [torch.nn.Linear(size, 32) for size in (32, *[20 if text else 32] * 2, 32)]
    norm = torch.nn.GroupNorm(4, 32)
    layer = SimpleNamespace(
        to_q=linear[0], to_k=linear[1], to_v=linear[2],
        to_out=[linear[3], torch.nn.Identity()], heads=2, spatial_norm=None, group_norm=norm,
        norm_cross=None, norm_q=None, norm_k=lambda x: F.normalize(x, dim=-1),
        residual_connection=True, rescale_output_factor=2.0,
        prepare_attention_mask=lambda mask, keys, batch: mask.repeat_interleave(2, 0),
    )  # fmt: skip
    processor = integration.Processor()
    processor._attention_backend = "pyfa"
    image, told = torch.randn(2, 32, 3, 4), torch.randn(2, 7, 20) if text else None
    mask = torch.randn(2, 1, 7) if text else None
    found = processor(layer, image, told, mask)
    rows = norm(image.flatten(2)).transpose(1, 2)
    made = (linear[0](rows), *(x(told if text else rows) for x in linear[1:3]))
    q, k, v = (x.unflatten(-1, (2, 16)) for x in made)
    out = sdpa(q, F.normalize(k, dim=-1), v, attn_mask=None if mask is None else mask[:, None])
    wanted = (linear[3](out.flatten(2)).transpose(1, 2).reshape(image.shape) + image) / 2
    torch.testing.assert_close(found, wanted)
    assert seen == ["pyfa"]
