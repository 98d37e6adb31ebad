"""A kernel for Hugging Face's ``kernels`` library: flash-attention's functions with sinks, on pyfa.

    pyfa hub export DIR        # writes the folder, and prints the line to set:
    LOCAL_KERNELS=kernels-community/flash-attn2=DIR python program.py

``kernels`` then loads pyfa in place of that repository. transformers with
``attn_implementation="flash_attention_2"`` also loads pyfa if no flash-attention is installed.

Conventions are those of ``pyfa.compat.fa2``, with one more argument: ``s_aux`` (H,), the sinks of
GPT-OSS. Options must be passed by keyword, because the libraries that this kernel replaces disagree
on their order. Options passed by position raise ``TypeError``.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch

from .arguments import Window
from .errors import in_words_of
from .fa2 import Result, attend, attend_cache
from .probabilities import Packed

__all__ = ["flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"]

_in_their_words = in_words_of(
    page_table="block_table", return_lse="return_attn_probs", sinks="s_aux"
)


@_in_their_words
def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    s_aux: torch.Tensor | None = None,
) -> Result:
    """Call ``fa2.flash_attn_func`` with sinks ``s_aux`` (H,), which have a gradient."""
    return attend(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
        deterministic, return_attn_probs, sinks=s_aux,
    )  # fmt: skip


@_in_their_words
def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: torch.Tensor | None = None,
    s_aux: torch.Tensor | None = None,
) -> Result:
    """Call ``fa2.flash_attn_varlen_func`` with sinks ``s_aux`` (H,), which have a gradient."""
    return attend(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
        deterministic, return_attn_probs,
        Packed(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, block_table), s_aux,
    )  # fmt: skip


@_in_their_words
def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    *,
    rotary_cos: torch.Tensor | None = None,
    rotary_sin: torch.Tensor | None = None,
    cache_seqlens: int | torch.Tensor | None = None,
    cache_batch_idx: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: torch.Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    s_aux: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Call ``fa2.flash_attn_with_kvcache`` with sinks ``s_aux`` (H,)."""
    return attend_cache(
        q, k_cache, v_cache, k=k, v=v, rotary_cos=rotary_cos, rotary_sin=rotary_sin,
        cache_seqlens=cache_seqlens, cache_batch_idx=cache_batch_idx, cache_leftpad=cache_leftpad,
        block_table=block_table, scale=softmax_scale, causal=causal, window_size=window_size,
        softcap=softcap, rotary_interleaved=rotary_interleaved, alibi_slopes=alibi_slopes,
        num_splits=num_splits, return_softmax_lse=return_softmax_lse, sinks=s_aux,
    )  # fmt: skip


OWN_NAME = "pyfa/attention"
# The kernels that transformers 5.22 loads for flash_attention_2 and 3 if neither is installed:
# AITER's on ROCm for both. GPT-OSS asks for vllm-flash-attn3 everywhere.
_FALLBACKS = {
    "ROCm": ("kernels-community/aiter-flash-attn", "kernels-community/vllm-flash-attn3"),
    "other": ("kernels-community/flash-attn2", "kernels-community/vllm-flash-attn3"),
}
# The variant that `kernels` takes with every torch and device.
_VARIANT = Path("build", "torch-universal")
_FIRST_LINE = '"""Written by `pyfa hub export`: flash-attention\'s functions on pyfa\'s kernels."""'


def fallback_names() -> tuple[str, ...]:
    """Return the repositories that the exported folder stands for: pyfa's own name, and those that
    transformers falls back to with this build of torch."""
    return (OWN_NAME, *_FALLBACKS["ROCm" if torch.version.hip else "other"])


def export(folder: Path) -> Path:
    """Write the folder that ``kernels`` loads. Return its absolute path.

    Raises ``ValueError`` if LOCAL_KERNELS cannot contain the path, and ``FileExistsError`` if
    ``folder`` contains a kernel that ``export`` did not write.
    """
    folder = folder.absolute()
    if ":" in str(folder) or "=" in str(folder):
        raise ValueError(f"DIR: expected a path without ':' and '=', got {folder}")
    inside = folder / _VARIANT
    module = inside / "__init__.py"
    others = [path for path in (folder / "build").glob("*") if path != inside]
    written = module.is_file() and module.read_text().startswith(_FIRST_LINE)
    if others or (inside.exists() and not written):
        raise FileExistsError(f"DIR: another kernel is in {folder / 'build'}")
    inside.mkdir(parents=True, exist_ok=True)
    module.write_text(f"{_FIRST_LINE}\n\nfrom pyfa.compat.hub import *\n")
    metadata = {
        "id": "_pyfa_attention",
        "name": "pyfa-attention",
        "version": 1,
        "license": "Apache-2.0",
        "python-depends": [],
        "backend": {"type": "cpu"},
    }
    (inside / "metadata.json").write_text(json.dumps(metadata, indent=1) + "\n")
    return folder


def variable(folder: Path, names: Sequence[str]) -> str:
    """Return the line ``LOCAL_KERNELS=…`` that makes ``kernels`` load ``folder`` for ``names``."""
    return "LOCAL_KERNELS=" + ":".join(f"{name}={folder}" for name in names)
