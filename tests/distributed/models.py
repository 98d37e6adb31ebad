"""In a worker: a model of transformers whose sequences lie in parts on several processes."""

from __future__ import annotations

import functools
import warnings

import torch
import torch.distributed as dist
import workers

from pyfa.distributed import local_positions, ring_attention, shard


def _model(kind: str):
    import transformers

    from pyfa.integrations import transformers as integration

    group = workers.group(2)
    integration.register("ring", functools.partial(ring_attention, group=group))
    torch.manual_seed(0)
    common = {
        "vocab_size": 53, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    }  # fmt: skip
    if kind == "llama":
        config = transformers.LlamaConfig(**common)
        return transformers.LlamaForCausalLM(config)
    config = transformers.GptOssConfig(
        **common, sliding_window=9, num_local_experts=2, num_experts_per_tok=1
    )
    return transformers.GptOssForCausalLM(config)


def differences(kind: str) -> tuple[float, float]:
    """Of logits, and the largest of any parameter's gradient summed over ranks, from one process'.

    Relative to the largest value of each.
    """
    warnings.simplefilter("ignore")
    group, model = workers.group(2), _model(kind)
    tokens = torch.randint(0, 53, (2, 64))
    model.set_attn_implementation("eager")
    whole = model(tokens).logits
    weights = torch.randn_like(whole)
    names, leaves = zip(*model.named_parameters(), strict=True)
    expected = torch.autograd.grad((whole * weights).sum(), leaves, allow_unused=True)
    model.set_attn_implementation("ring")
    positions = local_positions(64, group=group)[None].expand(2, -1)
    logits = model(shard(tokens, group=group), position_ids=positions).logits
    own = (logits * shard(weights, group=group)).sum()
    worst = 0.0
    found = torch.autograd.grad(own, leaves, allow_unused=True)
    for name, grad, other in zip(names, found, expected, strict=True):
        if other is not None:
            assert grad is not None, name
            dist.all_reduce(grad, group=group)
            worst = max(worst, float((grad - other).abs().max() / other.abs().max()))
    part = shard(whole, group=group)
    return float((logits - part).abs().max() / part.abs().max()), worst


def padded() -> str:
    """What is said of padding."""
    tokens = torch.randint(0, 53, (2, 32))
    model = _model("llama")
    model.set_attn_implementation("ring")
    try:
        model(tokens, attention_mask=torch.arange(32).expand(2, -1) > 3)
    except NotImplementedError as error:
        return str(error)
    return ""
