"""Megatron-Core on a CPU: a GPT with pyfa as its core attention, compared with the same model on
Megatron's own ``DotProductAttention``; packed sequences, which that does not take, with the
sequences one by one.
"""

from __future__ import annotations

import contextlib
import os
from typing import Any

import torch
import torch.distributed as dist
from checks import calls_of, check
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig

from pyfa.integrations.megatron import PyfaAttention

SEQLEN, BATCH, VOCABULARY = 48, 2, 128


def config(**more: Any) -> TransformerConfig:
    return TransformerConfig(
        num_layers=2, hidden_size=64, num_attention_heads=4, num_query_groups=2,
        use_cpu_initialization=True, hidden_dropout=0.0, attention_dropout=0.0,
        params_dtype=torch.float32, gradient_accumulation_fusion=False, **more,
    )  # fmt: skip


def model(with_pyfa: bool, **more: Any) -> GPTModel:
    spec = get_gpt_layer_local_spec(normalization="RMSNorm")
    if with_pyfa:
        spec.submodules.self_attention.submodules.core_attention = PyfaAttention
    torch.manual_seed(0)
    return GPTModel(
        config(normalization="RMSNorm", **more), spec, VOCABULARY, SEQLEN,
        position_embedding_type="rope",
    )  # fmt: skip


def run(with_pyfa: bool, **more: Any) -> tuple[torch.Tensor, list[torch.Tensor]]:
    made = model(with_pyfa, **more)
    torch.manual_seed(1)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    tokens = torch.randint(0, VOCABULARY, (BATCH, SEQLEN))
    positions = torch.arange(SEQLEN).expand(BATCH, SEQLEN)
    hidden = torch.ones(SEQLEN, SEQLEN, dtype=torch.bool).triu(1)[None, None]
    loss = made(tokens, positions, hidden, labels=tokens.roll(-1, 1))
    loss.sum().backward()
    return loss.detach(), [x.grad for x in made.parameters()]


def packed() -> None:
    torch.manual_seed(2)
    layer = PyfaAttention(config(), 1, AttnMaskType.causal, "self")
    lengths = (5, 30, 13)
    q, k, v = (torch.randn(sum(lengths), heads, 16) for heads in (4, 2, 2))
    starts = torch.tensor((0, *lengths)).cumsum(0)
    params = PackedSeqParams("thd", starts, starts, max_seqlen_q=30, max_seqlen_kv=30)
    out = layer(q, k, v, None, packed_seq_params=params)
    alone = [
        layer(*(x[:, None] for x in parts), None)[:, 0]
        for parts in zip(*(x.split(lengths) for x in (q, k, v)), strict=True)
    ]
    check("packed sequences, out", out, torch.cat(alone))


def masks() -> None:
    """A mask of padding, as Megatron's own layer takes it, and a window, whose mask it makes on a
    GPU alone."""
    torch.manual_seed(3)
    q, k, v = (torch.randn(SEQLEN, BATCH, heads, 16) for heads in (4, 2, 2))
    unseen = torch.arange(SEQLEN) >= torch.tensor([[SEQLEN], [29]])
    own, ours = (
        kind(config(), 1, AttnMaskType.padding, "self")(q, k, v, unseen[:, None, None])
        for kind in (DotProductAttention, PyfaAttention)
    )
    check("padding, out", ours, own)
    window = PyfaAttention(config(window_size=(7, 0)), 1, AttnMaskType.causal, "self")
    seen = torch.ones(SEQLEN, SEQLEN, dtype=torch.bool).tril().triu(-7)
    given = (x.permute(1, 2, 0, 3) for x in (q, k, v))
    sdpa = torch.nn.functional.scaled_dot_product_attention
    wanted = sdpa(*given, attn_mask=seen, enable_gqa=True)
    check("window, out", window(q, k, v, None), wanted.permute(2, 0, 1, 3).flatten(2))


def main() -> None:
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="29513", RANK="0", WORLD_SIZE="1")
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel()
    # Megatron's own attention wants these of a GPU: its buffer's device, a generator for dropout.
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value]
    tensor_parallel.get_cuda_rng_tracker().fork = contextlib.nullcontext
    calls = calls_of("attention")
    for name, more in {
        "GPT": {},
        "scaled by the layer's number": {"apply_query_key_layer_scaling": True},
        "off-by-one softmax": {"softmax_type": "off-by-one"},
    }.items():
        calls.clear()
        loss, grads = run(False, **more)
        assert not calls
        found, ours = run(True, **more)
        assert len(calls) == 2, f"{len(calls)} calls of two layers"
        check(f"{name}, loss", found, loss)
        check(f"{name}, gradients", *(torch.cat([g.flatten() for g in x]) for x in (ours, grads)))
    packed()
    masks()
    dist.destroy_process_group()


main()
