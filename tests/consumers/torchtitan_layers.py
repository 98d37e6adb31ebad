"""torchtitan on a CPU: a Llama 3 with pyfa as its inner attention over packed documents, compared
with torchtitan's ``ScaledDotProductAttention`` over each document alone. Its own
``VarlenAttention`` needs a GPU.
"""

from __future__ import annotations

from typing import Any

import torch
from checks import calls_of, check
from torchtitan.models.common.attention import ScaledDotProductAttention, VarlenMetadata
from torchtitan.models.llama3 import model_registry

from pyfa.integrations.torchtitan import PyfaAttention

DOCUMENTS = ((20, 44), (64,))  # of each row of the batch


def model(inner: Any) -> Any:
    config = model_registry("debugmodel", attn_backend="varlen").model
    for layer in config.layers:
        layer.attention.inner_attention = inner.Config()
    made = config.build()
    torch.manual_seed(0)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    return made


def main() -> None:
    calls = calls_of("attention_varlen")
    found, wanted = model(PyfaAttention), model(ScaledDotProductAttention)
    torch.manual_seed(1)
    tokens = torch.randint(0, 2048, (len(DOCUMENTS), 64))
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in DOCUMENTS])
    masks = found.get_attention_masks(positions)
    assert isinstance(masks, VarlenMetadata)
    logits = found(tokens, positions, masks)
    assert len(calls) == len(found.layers)
    alone = [
        wanted(part[None], torch.arange(len(part))[None])[0]
        for row, lengths in zip(tokens, DOCUMENTS, strict=True)
        for part in row.split(lengths)
    ]
    check(
        "Llama 3, packed documents, logits",
        logits.flatten(0, 1).detach(),
        torch.cat(alone).detach(),
    )
    weights = torch.randn(logits.flatten(0, 1).shape)
    (logits.flatten(0, 1) * weights).sum().backward()
    (torch.cat(alone) * weights).sum().backward()
    gradients = (torch.cat([x.grad.flatten() for x in m.parameters()]) for m in (found, wanted))
    check("Llama 3, packed documents, gradients", *gradients)

    def doubled(out: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
        return out * lse.exp()[..., None]

    layer = PyfaAttention.Config(window_size=(9, 0)).build()
    q, k, v = (torch.randn(2, 64, 4, 16) for _ in range(3))
    out = layer(q, k, v, attention_masks=masks, out_transform=doubled)
    scores = torch.einsum("blnh,bmnh->bnlm", q, k) / 4
    same = (positions - torch.arange(64)).unsqueeze(2) == (positions - torch.arange(64)).unsqueeze(
        1
    )
    seen = same & torch.ones(64, 64, dtype=torch.bool).tril().triu(-9)
    sums = torch.einsum("bnlm,bmnh->blnh", scores.exp() * seen[:, None], v)
    check("window and out_transform with the LSE", out, sums)


main()
