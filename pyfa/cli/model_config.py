"""The attention layers of a model from its config.json: shapes, masks and caches. No weights, no
network.

Reads the files of Hugging Face's transformers and diffusers. An unknown family is read as a
Llama-type decoder if it has the same fields.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from .model_names import NAMES


class Attention(NamedTuple):
    """Layers with the same attention.

    ``cached``: elements per token and layer in the cache, 0 without a cache. ``window``: keys that
    a query sees, including its own; None for all. ``latent``: the cache holds one vector per token,
    which all heads share.
    """

    name: str
    layers: int
    heads_q: int
    heads_k: int
    head_dim: int
    head_dim_v: int
    causal: bool = True
    window: int | None = None
    softcap: float = 0.0
    sinks: bool = False
    cached: int = 0
    latent: bool = False

    @property
    def values_in_keys(self) -> bool:
        """Return whether V is the first elements of K, read once for both."""
        return self.latent and self.heads_k == 1


class Model(NamedTuple):
    """``prefill``: over all tokens at once. ``decode``: one token over the cache; empty if the
    model has no cache. ``tokens``: the default number of tokens if the model fixes one (images),
    else 0."""

    name: str
    family: str
    prefill: tuple[Attention, ...]
    decode: tuple[Attention, ...]
    tokens: int = 0


def load(source: str) -> Model:
    """Return the model of a config.json, of the folder that contains it, or of a name in ``NAMES``.

    Raises ``ValueError`` if it is missing, or lacks a field that is needed.
    """
    path = Path(source)
    if path.is_dir():
        path /= "config.json"
    if path.is_file():
        try:
            config = json.loads(path.read_text())
        except json.JSONDecodeError as error:
            raise ValueError(f"--model: {path} is not JSON: {error}") from error
        return read(config, source)
    known = {name.lower(): name for name in NAMES}
    if source.lower() not in known:
        raise ValueError(
            f"--model: expected a config.json or one of {', '.join(NAMES)}; got {source!r}"
        )
    return read(NAMES[known[source.lower()]], known[source.lower()])


def read(config: Mapping[str, Any], name: str) -> Model:
    """Return the model that ``config`` describes."""
    # Models of text and images keep the language model's fields apart.
    if "num_hidden_layers" not in config and isinstance(config.get("text_config"), Mapping):
        config = config["text_config"]
    family = str(config.get("model_type") or config.get("_class_name") or "")
    if family.startswith("Flux"):
        return _flux(config, name)
    layers, heads = _number(config, "num_hidden_layers"), _number(config, "num_attention_heads")
    if family in _ENCODERS:
        dim = _head_dim(config, heads)
        every = Attention("all layers", layers, heads, heads, dim, dim, causal=False)
        return Model(name, family, (every,), (), _tokens(config))
    if config.get("kv_lora_rank"):
        return _latent(config, name, family, layers, heads)
    dim = _head_dim(config, heads)
    heads_k = int(config.get("num_key_value_heads") or heads)
    window = config.get("sliding_window")
    base = Attention(
        "", 0, heads, heads_k, dim, dim,
        softcap=float(config.get("attn_logit_softcapping") or 0.0),
        sinks=family == "gpt_oss",
        cached=2 * heads_k * dim,
    )  # fmt: skip
    sliding = _sliding(config, family, layers)
    kinds = []
    for kind, count, seen in (
        ("sliding window", sliding, None if window is None else int(window)),
        ("all layers" if not sliding else "full attention", layers - sliding, None),
    ):
        if count:
            kinds.append(base._replace(name=kind, layers=count, window=seen))
    return Model(name, family, tuple(kinds), tuple(kinds))


# Every token sees every token, and nothing is cached.
_ENCODERS = ("bert", "roberta", "xlm-roberta", "distilbert", "electra", "vit", "deit", "dinov2",
             "siglip_vision_model", "clip_vision_model")  # fmt: skip


def _latent(
    config: Mapping[str, Any], name: str, family: str, layers: int, heads: int
) -> Model:  # fmt: skip
    """Return DeepSeek's attention: K and V are made from one latent vector per token; only this
    vector is cached.

    A prompt attends with expanded K and V. A decode step folds the projections into the queries and
    attends to one KV head, the latent vector itself (DeepSeek-AI 2024, arXiv:2405.04434, section
    2.1).
    """
    rank, rope = _number(config, "kv_lora_rank"), _number(config, "qk_rope_head_dim")
    nope, dim_v = _number(config, "qk_nope_head_dim"), _number(config, "v_head_dim")
    expanded = Attention(
        "MLA, expanded", layers, heads, heads, nope + rope, dim_v, cached=rank + rope,
        latent=True,
    )  # fmt: skip
    absorbed = Attention(
        "MLA, absorbed", layers, heads, 1, rank + rope, rank, cached=rank + rope, latent=True
    )
    return Model(name, family, (expanded,), (absorbed,))


def _flux(config: Mapping[str, Any], name: str) -> Model:
    """Return Flux's attention: text and image tokens in one sequence, in two kinds of blocks with
    the same attention."""
    heads, dim = _number(config, "num_attention_heads"), _number(config, "attention_head_dim")
    kinds = tuple(
        Attention(kind, _number(config, field), heads, heads, dim, dim, causal=False)
        for kind, field in (("double blocks", "num_layers"), ("single blocks", "num_single_layers"))
    )
    # 1024 × 1024 pixels: latents of 128 × 128 in patches of 2 × 2; text of T5's 512.
    return Model(name, "flux", kinds, (), 64 * 64 + 512)


def _tokens(config: Mapping[str, Any]) -> int:
    """Return the number of tokens: an image's patches and class token, or a text encoder's
    positions."""
    if config.get("image_size") and config.get("patch_size"):
        return (int(config["image_size"]) // int(config["patch_size"])) ** 2 + 1
    return int(config.get("max_position_embeddings") or 0)


def _sliding(config: Mapping[str, Any], family: str, layers: int) -> int:
    """Return how many layers have the sliding window."""
    if config.get("sliding_window") is None or config.get("use_sliding_window") is False:
        return 0
    types = config.get("layer_types")
    if types:
        return sum("sliding" in str(each) for each in types)
    pattern = config.get("sliding_window_pattern") or config.get("_sliding_window_pattern")
    if pattern or family in ("gemma3", "gemma3_text"):
        return layers - layers // int(pattern or 6)  # every sixth is full
    if family in ("gemma2", "gpt_oss"):
        return layers - layers // 2  # every second is full, the first is not
    if "max_window_layers" in config:
        return max(0, layers - int(config["max_window_layers"]))  # Qwen: those above
    return layers


def _head_dim(config: Mapping[str, Any], heads: int) -> int:
    return int(config.get("head_dim") or _number(config, "hidden_size") // heads)


def _number(config: Mapping[str, Any], field: str) -> int:
    value = config.get(field)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"--model: the config has no {field} (got {value!r})")
    return value
