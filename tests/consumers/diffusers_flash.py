"""diffusers with `pyfa compat` and with pyfa's own backend: a small Flux, Wan and UNet, in float32.

No message of a fallback, every backend of flash-attention equal to diffusers' own "native", with
gradients, and the two operators of which its context parallelism is made. ``_flash_3`` is not run:
diffusers wraps it in an operator of its own for CUDA alone.
"""

from __future__ import annotations

import io
import logging
from types import SimpleNamespace
from typing import Any

import torch
from checks import calls_of, check

heard = io.StringIO()
logging.getLogger("diffusers").addHandler(logging.StreamHandler(heard))

from diffusers import (  # noqa: E402
    FluxTransformer2DModel,
    UNet2DConditionModel,
    WanTransformer3DModel,
)
from diffusers.models import attention_dispatch  # noqa: E402

from pyfa.compat import fa2  # noqa: E402
from pyfa.integrations import diffusers as integration  # noqa: E402

assert "alling back" not in heard.getvalue(), heard.getvalue()
assert attention_dispatch._CAN_USE_FLASH_ATTN
assert attention_dispatch.flash_attn_func is fa2.flash_attn_func
assert attention_dispatch._CAN_USE_FLASH_ATTN_3


def flux() -> tuple[Any, dict[str, Any]]:
    model = FluxTransformer2DModel(
        patch_size=1, in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16,
        num_attention_heads=2, joint_attention_dim=32, pooled_projection_dim=32,
        axes_dims_rope=[4, 4, 8],
    )  # fmt: skip
    return model, {
        "hidden_states": torch.randn(2, 16, 4),
        "encoder_hidden_states": torch.randn(2, 8, 32),
        "pooled_projections": torch.randn(2, 32),
        "timestep": torch.ones(2),
        "img_ids": torch.rand(16, 3),
        "txt_ids": torch.zeros(8, 3),
    }


def wan() -> tuple[Any, dict[str, Any]]:
    model = WanTransformer3DModel(
        patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=16, in_channels=4,
        out_channels=4, text_dim=16, freq_dim=32, ffn_dim=32, num_layers=2, cross_attn_norm=True,
        qk_norm="rms_norm_across_heads", rope_max_seq_len=32,
    )  # fmt: skip
    return model, {
        "hidden_states": torch.randn(1, 4, 2, 16, 16),
        "timestep": torch.tensor([3]),
        "encoder_hidden_states": torch.randn(1, 12, 16),
    }


def unet() -> tuple[Any, dict[str, Any]]:
    """As SDXL: attention within the image and to the text, in the deeper of two levels."""
    model = UNet2DConditionModel(
        sample_size=16, in_channels=4, out_channels=4, block_out_channels=(32, 64),
        layers_per_block=1, norm_num_groups=8, cross_attention_dim=32, attention_head_dim=(2, 4),
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), use_linear_projection=True,
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"), transformer_layers_per_block=2,
    )  # fmt: skip
    return model, {
        "sample": torch.randn(2, 4, 16, 16),
        "timestep": torch.tensor([3]),
        "encoder_hidden_states": torch.randn(2, 7, 32),
    }


def results(model: Any, inputs: dict[str, Any]) -> list[torch.Tensor]:
    """The output, and the gradient of the first input."""
    name, first = next(iter(inputs.items()))
    first = first.clone().requires_grad_()
    out = model(**inputs | {name: first}).sample
    (gradient,) = torch.autograd.grad(out.square().sum(), first)
    return [out.detach(), gradient]


integration.register()
calls = calls_of("attention")
torch.manual_seed(0)
for build in (flux, wan, unet):
    model, inputs = build()
    model.eval()
    if build is not unet:
        model.set_attention_backend("native")
    own = results(model, inputs)
    assert not calls
    if build is unet:
        model.set_attn_processor(integration.Processor())
    for backend in ("flash", "flash_varlen", "pyfa"):
        model.set_attention_backend(backend)
        layers = [x.processor for x in model.modules() if getattr(x, "processor", None)]
        assert all(processor._attention_backend == backend for processor in layers)
        found = results(model, inputs)
        for what, x, y in zip(("output", "gradient"), found, own, strict=True):
            check(f"{build.__name__}, {backend}: {what}", x, y)
    assert len(calls) >= len(layers) > 1, f"{len(calls)} calls of {len(layers)} layers"
    calls.clear()

# What diffusers' ring and Ulysses attention call, one block at a time.
q, k, v = (torch.randn(2, 24, 4, 16, requires_grad=True) for _ in range(3))
context = SimpleNamespace(save_for_backward=lambda *x: setattr(context, "saved_tensors", x))
out, lse = attention_dispatch._flash_attention_forward_op(context, q, k, v, return_lse=True)
score = torch.einsum("bqhd,bkhd->bhqk", q, k) / 4
wanted = torch.einsum("bhqk,bkhd->bqhd", score.softmax(-1), v)
check("context parallel: forward", out.detach(), wanted.detach())
check("context parallel: LSE", lse.detach(), score.logsumexp(-1).transpose(1, 2).detach())
dout = torch.randn_like(out)
found = attention_dispatch._flash_attention_backward_op(context, dout)
for name, x, y in zip("qkv", found, torch.autograd.grad(wanted, (q, k, v), dout), strict=True):
    check(f"context parallel: d{name}", x.detach(), y)
