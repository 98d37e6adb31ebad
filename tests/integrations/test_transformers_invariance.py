"""Generation in any batch and teacher forcing in a packed one: the same bits of log-probabilities.

PyTorch's matrix products of linear layers depend on the batch themselves. Here they are made one
row at a time, so that what is left is attention's, caches and left padding included.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

import pyfa  # noqa: E402
from pyfa.integrations import transformers as integration  # noqa: E402

integration.register()

PROMPTS, BATCH, NEW = 64, 16, 4


@pytest.fixture(autouse=True)
def rows_alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def linear(x: torch.Tensor, weight: torch.Tensor, bias: Any = None) -> torch.Tensor:
        assert bias is None
        rows = x.reshape(-1, 1, x.shape[-1])
        return (rows * weight).sum(-1).reshape(*x.shape[:-1], len(weight))

    monkeypatch.setattr(torch.nn.functional, "linear", linear)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def build(dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, pad_token_id=0, bos_token_id=1,
        eos_token_id=96, max_position_embeddings=64, attn_implementation="pyfa",
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    for parameter in model.parameters():
        parameter.data = torch.randn_like(parameter) * (0.3 if parameter.dim() > 1 else 0.5)
    return model.to(dtype).eval()


def prompts() -> list[torch.Tensor]:
    torch.manual_seed(1)
    return [torch.randint(2, 96, (n,)) for n in torch.randint(1, 50, (PROMPTS,)).tolist()]


def generated(model: Any, given: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens (B, NEW) and their log-probabilities (B, NEW, vocabulary), padded on the left."""
    longest = max(len(x) for x in given)
    ids = torch.stack([torch.nn.functional.pad(x, (longest - len(x), 0)) for x in given])
    found = model.generate(
        ids, attention_mask=(ids != 0).long(), max_new_tokens=NEW, min_new_tokens=NEW,
        do_sample=False, output_logits=True, return_dict_in_generate=True,
    )  # fmt: skip
    return found.sequences[:, -NEW:], torch.stack(found.logits, 1).float().log_softmax(-1)


def in_batches_of(size: int, model: Any, given: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    found = [generated(model, given[n : n + size]) for n in range(0, len(given), size)]
    return tuple(torch.cat(parts) for parts in zip(*found, strict=True))


def forced(model: Any, given: list[torch.Tensor], tokens: torch.Tensor) -> torch.Tensor:
    """The same of given tokens, in one packed batch without a cache."""
    whole = [torch.cat([x, more[:-1]]) for x, more in zip(given, tokens, strict=True)]
    lengths = torch.tensor([len(x) for x in whole])
    offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    with torch.no_grad():
        logits = model(
            torch.cat(whole)[None], use_cache=False,
            position_ids=torch.cat([torch.arange(int(n)) for n in lengths])[None],
            cu_seq_lens_q=offsets, cu_seq_lens_k=offsets, max_length_q=int(lengths.max()),
            max_length_k=int(lengths.max()),
        ).logits[0]  # fmt: skip
    found = torch.stack([logits[end - NEW : end] for end in offsets[1:].tolist()])
    return found.float().log_softmax(-1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_log_probabilities_do_not_depend_on_the_batch(dtype: torch.dtype) -> None:
    model, given = build(dtype), prompts()
    with pyfa.use_batch_invariant():
        tokens, alone = in_batches_of(1, model, given)
        same_tokens, together = in_batches_of(BATCH, model, given)
        packed = forced(model, given, tokens)
    assert torch.equal(same_tokens, tokens)
    assert torch.equal(together, alone)
    assert torch.equal(packed, alone)


def test_without_it_they_do() -> None:
    model, given = build(torch.float32), prompts()
    tokens, together = in_batches_of(BATCH, model, given)
    assert not torch.equal(forced(model, given, tokens), together)
