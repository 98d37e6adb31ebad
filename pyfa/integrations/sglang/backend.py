"""The class that computes attention for SGLang. SGLang imports this module if pyfa is selected.

SGLang's keys and values are in pages before attention runs, so each layer is one call of
``attention_kvcache``: prefill, chunks of prompts and decode are rows of one packed batch.
"""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.runtime_context import get_exec

from ... import api

_log = logging.getLogger("pyfa")
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.float8_e4m3fnuz)


@dataclasses.dataclass
class Batch:
    """One step's batch, as ``attention_kvcache`` takes it. The sizes and addresses of a decode
    step's tensors do not change while CUDA graphs are captured and replayed."""

    page_table: torch.Tensor
    cache_seqlens: torch.Tensor
    cu_seqlens_q: torch.Tensor
    max_seqlen_q: int


class PyfaBackend(AttentionBackend):  # type: ignore[misc]  # SGLang is untyped where it matters
    """Computes attention of a decoder. Latent attention (MLA), encoders, speculative decoding,
    context parallelism and separate memory for layers with windows are not supported. They raise an
    error that names the feature."""

    needs_cpu_seq_lens = False

    def __init__(self, runner: Any) -> None:
        super().__init__()
        self.req_to_token = runner.req_to_token_pool.req_to_token
        self.token_to_kv_pool = runner.token_to_kv_pool
        self.page_size = runner.page_size
        self.batch_invariant = bool(get_exec().deterministic.enable_deterministic_inference)
        self._graphs: Batch | None = None
        self._refuse_unsupported(runner)
        if runner.device != "cpu" and self.page_size % 64:
            _log.warning(
                "SGLang's pages have %d keys: with --page-size 64 pyfa has faster kernels",
                self.page_size,
            )

    def _refuse_unsupported(self, runner: Any) -> None:
        """Raise ``NotImplementedError`` with each reason."""
        pool = self.token_to_kv_pool
        reasons = {
            "latent attention (MLA)": runner.use_mla_backend,
            "cross attention": runner.model_config.is_encoder_decoder,
            "separate memory for layers with windows (--disable-hybrid-swa-memory)": isinstance(
                pool, SWAKVPool
            ),
            "a KV cache layout other than NHD": pool.kv_cache_layout != "nhd",
            f"--kv-cache-dtype {pool.dtype}": pool.dtype not in _DTYPES,
            "speculative decoding": not runner.spec_algorithm.is_none(),
        }
        found = [name for name, is_so in reasons.items() if is_so]
        if found:
            raise NotImplementedError(f"pyfa in SGLang: {', '.join(found)} not supported")

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Make the metadata of a step that runs without a CUDA graph."""
        lengths = forward_batch.seq_lens
        if forward_batch.forward_mode.is_decode_or_idle():
            starts = torch.arange(lengths.shape[0] + 1, dtype=torch.int32, device=lengths.device)
            most = 1
        elif forward_batch.forward_mode.is_extend_without_speculative():
            rows = forward_batch.extend_seq_lens
            starts = torch.nn.functional.pad(rows.cumsum(0, dtype=torch.int32), (1, 0))
            most = max(forward_batch.extend_seq_lens_cpu)
        else:
            raise NotImplementedError(
                f"pyfa in SGLang: forward mode {forward_batch.forward_mode.name}"
            )
        slots = self.req_to_token[forward_batch.req_pool_indices, :: self.page_size]
        self.forward_metadata = Batch(
            (slots // self.page_size).int(), lengths.int(), starts, int(most)
        )

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Allocate the memory that captured graphs read, large enough for the largest decode
        step."""
        pages = -(-self.req_to_token.shape[1] // self.page_size)
        where = {"dtype": torch.int32, "device": self.req_to_token.device}
        self._graphs = Batch(
            torch.zeros(max_bs, pages, **where), torch.ones(max_bs, **where),
            torch.arange(max_bs + 1, **where), 1,
        )  # fmt: skip

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Refill the memory that a decode step's graph reads, before capture or replay."""
        if not forward_batch.forward_mode.is_decode_or_idle():
            raise NotImplementedError("pyfa in SGLang: a CUDA graph of a prefill")
        assert self._graphs is not None
        count = forward_batch.batch_size
        table, lengths = self._graphs.page_table[:count], self._graphs.cache_seqlens[:count]
        slots = self.req_to_token[forward_batch.req_pool_indices[:count], :: self.page_size]
        table.copy_(slots // self.page_size)
        lengths.copy_(forward_batch.seq_lens[:count])
        self.forward_metadata = Batch(table, lengths, self._graphs.cu_seqlens_q[: count + 1], 1)

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **more: Any,
    ) -> torch.Tensor:
        """Store new keys and values, and compute attention of q (tokens, H·D) over the pages."""
        sinks = more.pop("sinks", None)
        _refuse_layer(layer, more)
        pool = self.token_to_kv_pool
        scales = layer.k_scale, layer.v_scale
        if save_kv_cache and k is not None and v is not None:
            pool.set_kv_buffer(layer, KVWriteLoc(forward_batch.out_cache_loc, None), k, v, *scales)
        keys, values = (
            x.view(-1, self.page_size, *x.shape[1:])
            for x in (pool.get_key_buffer(layer.layer_id), pool.get_value_buffer(layer.layer_id))
        )
        descale = None
        if keys.dtype.itemsize == 1 and scales[0] is not None:
            descale = (None, *(x.detach().float().reshape(()) for x in scales))
        left, batch = layer.sliding_window_size, self.forward_metadata
        out: torch.Tensor = api.attention_kvcache(  # type: ignore[assignment]
            q.view(-1, layer.tp_q_head_num, layer.qk_head_dim), keys, values,
            page_table=batch.page_table, cache_seqlens=batch.cache_seqlens,
            cu_seqlens_q=batch.cu_seqlens_q, max_seqlen_q=batch.max_seqlen_q, causal=True,
            window=(left, 0) if left > -1 else None, softcap=float(layer.logit_cap),
            scale=layer.scaling, sinks=None if sinks is None else sinks.float(), descale=descale,
            batch_invariant=self.batch_invariant,
        )  # fmt: skip
        return out.view(-1, layer.tp_q_head_num * layer.v_head_dim)

    forward_decode = forward_extend


def _refuse_layer(layer: Any, more: dict[str, Any]) -> None:
    """Raise ``NotImplementedError`` for a layer, or an argument, that has no meaning here."""
    reasons = [name for name, value in more.items() if value is not None]
    if layer.is_cross_attention or layer.attn_type != AttentionType.DECODER:
        reasons.append(f"{layer.attn_type}")
    if layer.xai_temperature_len > 0:
        reasons.append("xai_temperature_len")
    if layer.logit_cap and layer.logit_capping_method != "tanh":
        reasons.append(f"logit_capping_method {layer.logit_capping_method!r}")
    if reasons:
        raise NotImplementedError(f"pyfa in SGLang: {', '.join(reasons)} not supported")
