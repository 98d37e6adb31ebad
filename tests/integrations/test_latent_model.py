"""The attention of DeepSeek-V3 and -V3.2 absorbed, on a latent cache, against transformers'
expanded one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import pyfa
from pyfa.conformance.tolerances import Check, judge

transformers: Any = pytest.importorskip("transformers")

PROMPT, TOKENS, PAGE = 30, 20, 16
HEADS, RANK, NOPE, ROPE, DIM_V = 4, 96, 32, 16, 24
VERSIONS = ("v3", "v32")
# V3.2: fewer keys a row than the prompt has, more than its first rows see. So many heads of the
# indexer that no two scores of a row are equal: a head adds 0 to half of them.
INDEXER = {"index_topk": 12, "index_n_heads": 16, "index_head_dim": 32}


def modeling(version: str) -> Any:
    name = f"deepseek_{version}"
    return pytest.importorskip(f"transformers.models.{name}.modeling_{name}")


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
        self.index_keys = transformers.DynamicCache(config=module.config)
        self.selected: list[torch.Tensor] = []

    def __call__(
        self, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        module = self.module
        residual = module.q_a_layernorm(module.q_a_proj(hidden))
        q_nope, q_rope = (
            module.q_b_proj(residual).unflatten(-1, (HEADS, -1)).split([NOPE, ROPE], -1)
        )
        latent, rope = module.kv_a_proj_with_mqa(hidden).split([RANK, ROPE], -1)
        turn = modeling("v3").apply_rotary_pos_emb_interleave
        q_rope, rope = turn(q_rope.transpose(1, 2), rope[:, None], cos, sin)
        new = module.kv_a_layernorm(latent)[:, :, None], rope.transpose(1, 2)
        pyfa.append_latent(self.cache, new, self.used, page_table=self.table, v_dim=RANK)
        self.used = self.used + hidden.shape[1]
        indices = None
        if hasattr(module, "indexer"):
            indices = module.indexer(hidden, residual, (cos, sin), mask, None, self.index_keys)
            self.selected.append(indices)
        absorbed = torch.einsum("bshn,hnr->bshr", q_nope, self.to_keys)
        out = pyfa.attention_latent(
            (absorbed, q_rope.transpose(1, 2)), self.cache, v_dim=RANK, page_table=self.table,
            cache_seqlens=self.used, indices=indices, causal=True, scale=module.scaling,
        )  # fmt: skip
        return module.o_proj(torch.einsum("bshr,hvr->bshv", out, self.to_values).flatten(2))


@torch.no_grad()
def compared(
    version: str, dtype: torch.dtype
) -> tuple[Check, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return what the rule says, and the outputs: absorbed, of the module in float64, and of the
    module in ``dtype``."""
    torch.manual_seed(0)
    deepseek, name = modeling(version), f"Deepseek{version.upper()}"
    config = getattr(transformers, f"{name}Config")(
        hidden_size=64, num_attention_heads=HEADS, num_key_value_heads=HEADS, q_lora_rank=48,
        kv_lora_rank=RANK, qk_nope_head_dim=NOPE, qk_rope_head_dim=ROPE, v_head_dim=DIM_V,
        num_hidden_layers=1, **(INDEXER if version == "v32" else {}),
    )  # fmt: skip
    config._attn_implementation = "eager"
    module = getattr(deepseek, f"{name}Attention")(config, layer_idx=0).eval().to(dtype)
    exact = getattr(deepseek, f"{name}Attention")(config, layer_idx=0).eval().double()
    exact.load_state_dict(module.state_dict())
    length = PROMPT + TOKENS
    hidden = torch.randn(2, length, 64).to(dtype)
    rotary = getattr(deepseek, f"{name}RotaryEmbedding")(config)
    cos, sin = rotary(hidden, torch.arange(length)[None])
    mask = torch.full((length, length), -torch.inf, dtype=dtype).triu(1)[None, None]

    absorbed, parts, begin = Absorbed(module, 2), [], 0
    for rows in (PROMPT, *[1] * TOKENS):
        end = begin + rows
        at = slice(begin, end)
        parts.append(absorbed(hidden[:, at], cos[:, at], sin[:, at], mask[0, :, at, :end]))
        begin = end

    if absorbed.selected and dtype != torch.float32:
        # In 16 bits another order of sums may select another key, so all three take one list.
        selected = torch.cat(absorbed.selected, 1)
        for each in (module, exact):
            each.indexer.forward = lambda *_, **__: selected
    naive, _ = module(hidden, (cos, sin), mask)
    ref, _ = exact(hidden.double(), (cos.double(), sin.double()), mask.double())
    got = torch.cat(parts, 1)
    return judge("out", got, ref, naive), got, ref, naive


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_prompt_and_decoded_tokens_are_those_of_the_expanded_module(
    dtype: torch.dtype, version: str
) -> None:
    check = compared(version, dtype)[0]
    assert check.passed, check.message


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "fault",
    [{"indices": None}, {"causal": False}, {"scale": (RANK + ROPE) ** -0.5}],
    ids=["no lists", "later keys", "scale of the latents"],
)
def test_fault_is_found(
    fault: dict[str, Any], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    sound = pyfa.attention_latent
    monkeypatch.setattr(
        pyfa, "attention_latent", lambda *args, **named: sound(*args, **{**named, **fault})
    )
    assert not compared("v32", dtype)[0].passed
