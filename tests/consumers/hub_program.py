"""A program of transformers that asks for flash attention and knows nothing of pyfa.

    python tests/consumers/hub_program.py NAME     # the attn_implementation to compare with sdpa

Before transformers, ``hub_kernels`` may let torch call itself a build for ROCm.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import transformers
from checks import check

TINY = {
    "vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 96, "max_position_embeddings": 64,
}  # fmt: skip
LENGTH = 24


def build(kind: str) -> Any:
    torch.manual_seed(0)
    if kind == "llama":
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**TINY))
    else:
        # Windows shorter than the input, and sinks, which sdpa has not: eager is what counts.
        config = transformers.GptOssConfig(
            **TINY, sliding_window=5, num_local_experts=4, num_experts_per_tok=2,
            rope_scaling=None, experts_implementation="eager", attn_implementation="eager",
        )  # fmt: skip
        model = transformers.GptOssForCausalLM(config)
    for parameter in model.parameters():
        # Initial weights are so small that all scores would be alike.
        parameter.data = torch.randn_like(parameter) * (0.3 if parameter.dim() > 1 else 0.5)
    return model.eval()


def evaluate(model: Any, tokens: torch.Tensor, mask: torch.Tensor) -> dict[str, torch.Tensor]:
    """Logits where there are tokens, and the gradient of every weight."""
    real = mask.bool()
    logits = model(tokens, attention_mask=mask).logits[real]
    model.zero_grad()
    torch.manual_seed(2)
    (logits * torch.randn(logits.shape)).sum().backward()
    grads = {name: x.grad.clone() for name, x in model.named_parameters() if x.grad is not None}
    return {"logits": logits.detach(), **grads}


def continuous(model: Any, name: str) -> None:
    """Continuous batching over a paged cache, against each prompt alone with the model's own."""
    torch.manual_seed(3)
    prompts = [torch.randint(2, 96, (length,)).tolist() for length in (3, 9, 17, 5)]
    given = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    wanted = [
        model.generate(torch.tensor([prompt]), eos_token_id=None, **given)[0, len(prompt) :]
        for prompt in prompts
    ]
    model.set_attn_implementation(name)
    outputs = model.generate_batch(
        inputs=prompts,
        generation_config=transformers.GenerationConfig(eos_token_id=-1, **given),
        continuous_batching_config=transformers.ContinuousBatchingConfig(
            block_size=32, num_blocks=16, max_batch_tokens=64
        ),
    )
    found = torch.tensor([each.generated_tokens for each in outputs.values()])
    check("llama: tokens of continuous batching", found, torch.stack(wanted), 0.0)


def main() -> None:
    name = sys.argv[1]
    torch.manual_seed(1)
    tokens = torch.randint(2, 96, (2, LENGTH))
    for kind in ("llama", "gpt_oss"):
        model = build(kind)
        own = model.config._attn_implementation
        for left, right in ((0, 0), (7, 0), (0, 7)):
            mask = torch.ones_like(tokens)
            mask[1, :left] = 0
            mask[1, LENGTH - right :] = 0
            model.set_attn_implementation(own)
            wanted = evaluate(model, tokens, mask)
            model.set_attn_implementation(name)
            assert model.config._attn_implementation != own
            found = evaluate(model, tokens, mask)
            assert found.keys() == wanted.keys()
            assert kind == "llama" or any("sinks" in each for each in found)
            case = f"{kind}, {left} padded on the left, {right} on the right"
            check(f"{case}: logits", found.pop("logits"), wanted.pop("logits"))
            scale = {each: x.abs().max() for each, x in wanted.items()}
            mine, theirs = (
                torch.cat([x[each].flatten() / scale[each] for each in scale if scale[each] > 0])
                for x in (found, wanted)
            )
            check(f"{case}: gradients, each relative to its largest", mine, theirs)
        if kind == "llama":
            given = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
            found = model.generate(tokens, **given)
            model.set_attn_implementation(own)
            check(f"{kind}: greedy tokens", found, model.generate(tokens, **given), 0.0)
            continuous(model, name)


if __name__ == "__main__":
    main()
