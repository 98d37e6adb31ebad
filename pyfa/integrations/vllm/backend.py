"""The classes that vLLM expects of an attention backend. vLLM imports this module if pyfa is
selected; the import fails for an unsupported version of vLLM.

vLLM's keys and values are in pages before attention runs, so each layer is one call of
``attention_kvcache``: prefill, chunks of prompts and decode are rows of one packed batch. All
tensors of the metadata are vLLM's own buffers, which it refills in place, so a captured CUDA graph
reads the lengths of the step that it replays.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import torch
import vllm

from ... import api, validate
from . import check_version

check_version(vllm.__version__)  # before names that another version may not have

from vllm import envs  # noqa: E402
from vllm.platforms import current_platform  # noqa: E402
from vllm.v1.attention.backend import (  # noqa: E402
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadataBuilder,
    AttentionType,
    MultipleOf,
)

_FLOAT8 = ("fp8", "fp8_e4m3")


class PyfaBackend(AttentionBackend):  # type: ignore[misc]  # vLLM is untyped where it matters
    """vLLM's attention backend for pyfa: declares what pyfa supports.

    Encoders, latent attention (MLA), cascades, context parallelism and masks of multimodal prefixes
    are not implemented. They raise an error that names the feature.
    """

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto", "float16", "bfloat16", *_FLOAT8]
    forward_includes_kv_cache_update = False

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"  # vLLM looks it up in its enumeration

    @staticmethod
    def get_impl_cls() -> type[PyfaImpl]:
        return PyfaImpl

    @staticmethod
    def get_builder_cls() -> type[PyfaMetadataBuilder]:
        return PyfaMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        return [MultipleOf(16)]

    @classmethod
    def get_preferred_block_size(cls, default_block_size: int) -> int:
        # Over pages of 16 keys a prefill takes 1.02 times as long as over a dense cache, over pages
        # of 64 as long (benchmarks/results/serving_fa3.json).
        return max(default_block_size, 64)

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return head_size <= validate.MAX_HEAD_DIM_V  # vLLM's keys and values have one head size

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return True

    @classmethod
    def supports_combination(
        cls,
        head_size: int,
        dtype: torch.dtype,
        kv_cache_dtype: str | None,
        *others: Any,
        **more: Any,
    ) -> str | None:
        if kv_cache_dtype in _FLOAT8 and dtype == torch.float32:
            return f"kv_cache_dtype {kv_cache_dtype}: expected queries of 16 bits; got float32"
        if kv_cache_dtype in ("float16", "bfloat16") and getattr(torch, kv_cache_dtype) != dtype:
            return (
                f"kv_cache_dtype {kv_cache_dtype}: expected the dtype of the queries; got {dtype}"
            )
        # For other sizes pyfa would copy k and v for its kernels: all pages, at each step.
        unit = 16 if kv_cache_dtype in _FLOAT8 else 16 // dtype.itemsize
        if head_size % unit:
            return f"head_size: expected a multiple of {unit}; got {head_size}"
        return None


@dataclasses.dataclass
class PyfaMetadata:
    """One step's batch, as ``attention_kvcache`` takes it."""

    num_actual_tokens: int
    max_query_len: int
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor


class PyfaMetadataBuilder(AttentionMetadataBuilder):  # type: ignore[misc]
    """Passes vLLM's own buffers on as metadata. No step allocates memory or copies data."""

    # A plan depends on max_query_len. It is the same at capture and replay for a batch of equal
    # query lengths; vLLM runs others between the pieces of a graph.
    _cudagraph_support = AttentionCGSupport.UNIFORM_BATCH
    supports_update_block_table = True

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> PyfaMetadata:
        common = common_attn_metadata
        if common.causal is not True:
            raise NotImplementedError("causal: pyfa in vLLM supports causal attention only")
        for name in ("mm_req_doc_ranges", "rswa_prefix_lens"):
            if getattr(common, name) is not None:
                raise NotImplementedError(f"{name}: not supported by pyfa in vLLM")
        return PyfaMetadata(
            common.num_actual_tokens,
            common.max_query_len,
            common.query_start_loc,
            common.seq_lens,
            common.block_table_tensor,
            common.slot_mapping,
        )

    def update_block_table(
        self, metadata: PyfaMetadata, blk_table: torch.Tensor, slot_mapping: torch.Tensor
    ) -> PyfaMetadata:
        return dataclasses.replace(metadata, block_table=blk_table, slot_mapping=slot_mapping)


class PyfaImpl(AttentionImpl):  # type: ignore[misc]
    """One layer's attention."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
    ) -> None:
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.num_kv_heads = num_kv_heads or num_heads
        self.kv_cache_dtype = kv_cache_dtype
        self.sinks = self._sinks_of_model = sinks
        self.float8 = current_platform.fp8_dtype() if kv_cache_dtype in _FLOAT8 else None
        self._refuse_unsupported(attn_type)
        self.shared: dict[str, Any] = {
            "scale": self.scale,
            "causal": True,
            "window": None if sliding_window is None else (sliding_window - 1, 0),
            "softcap": float(logits_soft_cap or 0.0),
            "batch_invariant": bool(envs.VLLM_BATCH_INVARIANT),
        }
        # vLLM makes models under a default device, which is where this lands.
        self.alibi_slopes = (
            None if alibi_slopes is None else torch.tensor(alibi_slopes, dtype=torch.float32)
        )

    def _refuse_unsupported(self, attn_type: str) -> None:
        """Raise ``NotImplementedError``. vLLM asks ``PyfaBackend`` itself, but not on a CPU."""
        reasons = PyfaBackend.validate_configuration(
            head_size=self.head_size,
            dtype=torch.get_default_dtype(),  # the model's, while vLLM makes it
            kv_cache_dtype=self.kv_cache_dtype,
            block_size=None,
            use_mla=False,
            has_sink=self.sinks is not None,
            use_sparse=False,
            use_mm_prefix=False,
            use_per_head_quant_scales=False,
            device_capability=None,
            attn_type=attn_type,
        )
        if reasons:
            raise NotImplementedError(f"pyfa in vLLM: {'; '.join(reasons)}")

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        given = self._sinks_of_model
        if given is None or self.sinks is None:
            return
        if self.sinks is given:
            self.sinks = given.detach().to(torch.float32, copy=True)  # once, not at each call
        else:  # after a reload: captured graphs read this memory
            self.sinks.copy_(given.detach())

    def _pages(self, kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the keys and the values, (pages, page_size, Hk, D), as views of vLLM's cache
        (pages, Hk, page_size, 2·D), whatever its strides."""
        keys, values = kv_cache.transpose(1, 2).split(self.head_size, dim=-1)
        return keys, values

    def do_kv_cache_update(
        self,
        layer: Any,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Write new keys and values, (tokens, Hk, D), to their slots; a negative slot is
        padding."""
        pages = self._pages(kv_cache)
        if key.is_cuda:
            from vllm import _custom_ops

            _custom_ops.reshape_and_cache_flash(
                key, value, *pages, slot_mapping, self.kv_cache_dtype,
                layer._k_scale, layer._v_scale,
            )  # fmt: skip
            return
        real = slot_mapping >= 0
        page_size = kv_cache.shape[2]
        at = slot_mapping[real] // page_size, slot_mapping[real] % page_size
        scales = layer._k_scale, layer._v_scale
        for new, cache, scale in zip((key, value), pages, scales, strict=True):
            rows = new[: slot_mapping.shape[0]][real]
            if self.float8 is not None:
                most = torch.finfo(self.float8).max
                rows = (rows.float() / scale).clamp(-most, most).to(self.float8).view(cache.dtype)
            cache[at] = rows

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: PyfaMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Compute attention of query (tokens, H, D) over the pages; rows beyond the batch's tokens
        are padding for a CUDA graph."""
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("output_scale: a quantized output is not supported")
        if attn_metadata is None:  # vLLM measures its memory
            return output.fill_(0)
        keys, values = self._pages(kv_cache)
        descale = None
        if self.float8 is not None:
            keys, values = keys.view(self.float8), values.view(self.float8)
            descale = (None, layer._k_scale, layer._v_scale)
        tokens = attn_metadata.num_actual_tokens
        out: Any = api.attention_kvcache(
            query[:tokens], keys, values, page_table=attn_metadata.block_table,
            cache_seqlens=attn_metadata.seq_lens, cu_seqlens_q=attn_metadata.query_start_loc,
            max_seqlen_q=attn_metadata.max_query_len, alibi_slopes=self.alibi_slopes,
            sinks=self.sinks, descale=descale, **self.shared,
        )  # fmt: skip
        output[:tokens].copy_(out)
        return output
