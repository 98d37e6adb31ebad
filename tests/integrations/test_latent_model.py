"""DeepSeek-V3's attention absorbed, on a latent cache, against transformers' expanded one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import pyfa
from pyfa.conformance.tolerances import Check, judge

pytest.importorskip("transformers")
deepseek: Any = pytest.importorskip("transformers.models.deepseek_v3.modeling_deepseek_v3")

from transformers import DeepseekV3Config  # noqa: E402

PROMPT, TOKENS, PAGE = 30, 20, 16
HEADS, RANK, NOPE, ROPE, DIM_V = 4, 96, 32, 16, 24


class Absorbed:
    """The module's weights over a paged cache of latents."""

    def __init__(self, module: Any, batch: int) -> None:
        self.module = module
        weight = module.kv_b_proj.weight.unflatten(0, (HEADS, -1))
        self.to_keys, self.to_values = weight.split([NOPE, DIM_V], 1)
        pages = -(-(PROMPT + TOKENS) // PAGE)
        self.cache = torch.full((batch * pages, PAGE, 1, RANK + ROPE), torch.nan)
        self.cache = self.cache.to(weight.dtype)
        self.table = torch.randperm(batch * pages).int().view(batch, pages)
        self.used = torch.zeros(batch, dtype=torch.int32)

    def __call__(self, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        module = self.module
        q = module.q_b_proj(module.q_a_layernorm(module.q_a_proj(hidden)))
        q_nope, q_rope = q.unflatten(-1, (HEADS, -1)).split([NOPE, ROPE], -1)
        latent, rope = module.kv_a_proj_with_mqa(hidden).split([RANK, ROPE], -1)
        turn = deepseek.apply_rotary_pos_emb_interleave
        q_rope, rope = turn(q_rope.transpose(1, 2), rope[:, None], cos, sin)
        new = module.kv_a_layernorm(latent)[:, :, None], rope.transpose(1, 2)
        pyfa.append_latent(self.cache, new, self.used, page_table=self.table, v_dim=RANK)
        self.used = self.used + hidden.shape[1]
        absorbed = torch.einsum("bshn,hnr->bshr", q_nope, self.to_keys)
        out = pyfa.attention_latent(
            (absorbed, q_rope.transpose(1, 2)), self.cache, v_dim=RANK, page_table=self.table,
            cache_seqlens=self.used, causal=True, scale=module.scaling,
        )  # fmt: skip
        return module.o_proj(torch.einsum("bshr,hvr->bshv", out, self.to_values).flatten(2))


@torch.no_grad()
def compared(dtype: torch.dtype) -> tuple[Check, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return what the rule says, and the outputs: absorbed, of the module in float64, and of the
    module in ``dtype``."""
    torch.manual_seed(0)
    config = DeepseekV3Config(
        hidden_size=64, num_attention_heads=HEADS, num_key_value_heads=HEADS, q_lora_rank=48,
        kv_lora_rank=RANK, qk_nope_head_dim=NOPE, qk_rope_head_dim=ROPE, v_head_dim=DIM_V,
        num_hidden_layers=1,
    )  # fmt: skip
    config._attn_implementation = "eager"
    module = deepseek.DeepseekV3Attention(config, layer_idx=0).eval().to(dtype)
    exact = deepseek.DeepseekV3Attention(config, layer_idx=0).eval().double()
    exact.load_state_dict(module.state_dict())
    length = PROMPT + TOKENS
    hidden = torch.randn(2, length, 64).to(dtype)
    cos, sin = deepseek.DeepseekV3RotaryEmbedding(config)(hidden, torch.arange(length)[None])

    absorbed, parts, begin = Absorbed(module, 2), [], 0
    for rows in (PROMPT, *[1] * TOKENS):
        at = slice(begin, begin + rows)
        parts.append(absorbed(hidden[:, at], cos[:, at], sin[:, at]))
        begin += rows

    mask = torch.full((length, length), -torch.inf).triu(1)[None, None]
    naive, _ = module(hidden, (cos, sin), mask.to(dtype))
    ref, _ = exact(hidden.double(), (cos.double(), sin.double()), mask.double())
    got = torch.cat(parts, 1)
    return judge("out", got, ref, naive), got, ref, naive


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_prompt_and_decoded_tokens_are_those_of_the_expanded_module(dtype: torch.dtype) -> None:
    check = compared(dtype)[0]
    assert check.passed, check.message
