"""Models that ``--model`` knows by name: the fields of their config.json that attention needs.

These are public facts, from the config.json (Flux: transformer/config.json) of the repository on
huggingface.co that is given with each model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def _decoder(
    family: str, layers: int, hidden: int, heads: int, heads_k: int, **more: Any
) -> dict[str, Any]:
    return {
        "model_type": family,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": heads_k,
        **more,
    }


NAMES: Mapping[str, Mapping[str, Any]] = {
    # meta-llama/Llama-3.1-8B, -70B, -405B
    "llama-3.1-8b": _decoder("llama", 32, 4096, 32, 8),
    "llama-3.1-70b": _decoder("llama", 80, 8192, 64, 8),
    "llama-3.1-405b": _decoder("llama", 126, 16384, 128, 8),
    # mistralai/Mistral-7B-v0.1
    "mistral-7b": _decoder("mistral", 32, 4096, 32, 8, sliding_window=4096),
    # mistralai/Mixtral-8x7B-v0.1
    "mixtral-8x7b": _decoder("mixtral", 32, 4096, 32, 8, sliding_window=None),
    # Qwen/Qwen3-8B
    "qwen3-8b": _decoder("qwen3", 36, 4096, 32, 8, head_dim=128, use_sliding_window=False),
    # google/gemma-2-9b
    "gemma-2-9b": _decoder(
        "gemma2", 42, 3584, 16, 8, head_dim=256, sliding_window=4096, attn_logit_softcapping=50.0
    ),
    # google/gemma-3-27b-it, text_config
    "gemma-3-27b": _decoder(
        "gemma3_text", 62, 5376, 32, 16, head_dim=128, sliding_window=1024,
        sliding_window_pattern=6,
    ),
    # openai/gpt-oss-20b, -120b
    "gpt-oss-20b": _decoder("gpt_oss", 24, 2880, 64, 8, head_dim=64, sliding_window=128),
    "gpt-oss-120b": _decoder("gpt_oss", 36, 2880, 64, 8, head_dim=64, sliding_window=128),
    # deepseek-ai/DeepSeek-V3
    "deepseek-v3": _decoder(
        "deepseek_v3", 61, 7168, 128, 128, kv_lora_rank=512, qk_rope_head_dim=64,
        qk_nope_head_dim=128, v_head_dim=128,
    ),
    # google-bert/bert-base-uncased
    "bert-base": _decoder("bert", 12, 768, 12, 12, max_position_embeddings=512),
    # google/vit-base-patch16-224
    "vit-base": _decoder("vit", 12, 768, 12, 12, image_size=224, patch_size=16),
    # black-forest-labs/FLUX.1-dev
    "flux.1-dev": {
        "_class_name": "FluxTransformer2DModel",
        "num_layers": 19,
        "num_single_layers": 38,
        "num_attention_heads": 24,
        "attention_head_dim": 128,
    },
}  # fmt: skip
