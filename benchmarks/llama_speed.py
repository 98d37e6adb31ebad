"""Time a transformers Llama with pyfa and with other attention, and paged decode.

    python benchmarks/llama_speed.py [--save] [--layers 16] [--hidden 2048] [--tokens 4096]

The shape of Llama-3.2-1B with random weights, bfloat16: a training step (forward, backward, AdamW)
and a prefill that fills a dynamic cache. Then one step of decoding through the attention of a layer
of 64 sequences of 8,192 tokens: pyfa with pages of 16 and a new key a sequence, against PyTorch's
SDPA on a static cache that it is copied into, with the mask of a static cache and, where all
sequences are as long as the cache, without. Exit status 1 where pyfa is slower than another beyond
the spread.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import machine
import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

import pyfa
from pyfa.bench.timing import Clock, in_turns
from pyfa.cli.console import print_table
from pyfa.integrations import transformers as integration

HOW = (
    "Rounds in which the implementations take turns on one model, a 512 MB buffer overwritten "
    "between samples; medians, and the spread between the rounds' medians."
)
ROUNDS, SECONDS = 5, 0.3
PAGE = 16

Call = Callable[[], object]
Within = Callable[[], AbstractContextManager[Any]]


def implementations(device: torch.device) -> dict[str, tuple[str, Within]]:
    """What transformers calls them, and inside of what they run: pyfa, PyTorch's by its own choice
    and on a GPU its FlashAttention-2, and flash-attention's packages where they are installed."""
    found: dict[str, tuple[str, Within]] = {name: (name, nullcontext) for name in ("pyfa", "sdpa")}
    if device.type == "cuda":
        found["sdpa, flash"] = ("sdpa", lambda: sdpa_kernel(SDPBackend.FLASH_ATTENTION))
    for package, version in (("flash_attn", "2"), ("flash_attn_interface", "3")):
        if importlib.util.find_spec(package):
            name = f"flash_attention_{version}"
            found[name] = (name, nullcontext)
    return found


def steps(options: argparse.Namespace, device: torch.device) -> dict[str, dict[str, Call]]:
    """By what is measured, by implementation, a call."""
    integration.register()
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=options.hidden, intermediate_size=4 * options.hidden,
        num_hidden_layers=options.layers, num_attention_heads=options.hidden // 64,
        num_key_value_heads=options.hidden // 256, head_dim=64, vocab_size=options.vocabulary,
        max_position_embeddings=2 * options.tokens, tie_word_embeddings=True,
    )  # fmt: skip
    with torch.device(device):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=device.type == "cuda")
    ids = torch.randint(options.vocabulary, (options.batch, options.tokens), device=device)

    def training(name: str, within: Within) -> Call:
        def step() -> None:
            model.set_attn_implementation(name)
            optimizer.zero_grad()
            with within():
                model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
            optimizer.step()

        return step

    def prefill(name: str, within: Within) -> Call:
        @torch.no_grad()
        def run() -> None:
            model.set_attn_implementation(name)
            cache = DynamicCache(config=config)
            with within():
                model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)

        return run

    ways = implementations(device)
    return {
        "training step": {name: training(*way) for name, way in ways.items()},
        "prefill": {name: prefill(*way) for name, way in ways.items()},
    }


def decoding(options: argparse.Namespace, device: torch.device) -> dict[str, Call]:
    """One step of a layer's attention, with the new keys."""
    batch, tokens = options.sequences, options.context
    heads, heads_k, dim = options.hidden // 64, options.hidden // 256, 64

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device, dtype=torch.bfloat16)

    q = normal(batch, 1, heads, dim)
    new_k, new_v = (normal(batch, 1, heads_k, dim) for _ in range(2))
    pages = batch * tokens // PAGE
    k, v = (normal(pages, PAGE, heads_k, dim) for _ in range(2))
    order = torch.randperm(pages, device=device, dtype=torch.int32).view(batch, -1)
    before = torch.full((batch,), tokens - 1, device=device, dtype=torch.int32)

    def paged() -> object:
        return pyfa.attention_kvcache(
            q, k, v, k=new_k, v=new_v, cache_seqlens=before, page_table=order, causal=True
        )

    static_k, static_v = (normal(batch, heads_k, tokens, dim) for _ in range(2))
    where = torch.tensor([tokens - 1], device=device)
    seen = torch.ones(batch, 1, 1, tokens, device=device, dtype=torch.bool)
    turned = [x.transpose(1, 2) for x in (q, new_k, new_v)]

    def static(mask: torch.Tensor | None) -> object:
        static_k.index_copy_(2, where, turned[1])
        static_v.index_copy_(2, where, turned[2])
        return F.scaled_dot_product_attention(
            turned[0], static_k, static_v, attn_mask=mask, enable_gqa=True
        )

    return {
        "pyfa": paged, "sdpa, masked": lambda: static(seen), "sdpa, all full": lambda: static(None)
    }  # fmt: skip


def measured(clock: Clock, calls: Mapping[str, Call]) -> dict[str, dict[str, float]]:
    """Median seconds by name, and the rounds' spread."""
    samples = in_turns(clock, "device", calls, ROUNDS, SECONDS)
    rounds = {name: [statistics.median(one) for one in found] for name, found in samples.items()}
    return {
        name: {
            "seconds": statistics.median(found),
            "spread": (max(found) - min(found)) / statistics.median(found),
        }
        for name, found in rounds.items()
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--save", action="store_true", help="write results/llama_speed.json")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--vocabulary", type=int, default=128_256)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=4096, help="of a sequence of the model")
    parser.add_argument("--sequences", type=int, default=64, help="decoded at once")
    parser.add_argument("--context", type=int, default=8192, help="tokens of a decoded sequence")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    clock = Clock(device)
    rows: list[dict[str, Any]] = []
    slower, begin = False, time.monotonic()
    cells = {**steps(options, device), "paged decode": decoding(options, device)}
    tokens = {"paged decode": options.sequences}
    for what, calls in cells.items():
        found = measured(clock, calls)
        ours = found["pyfa"]
        for name, one in found.items():
            ratio = one["seconds"] / ours["seconds"]
            per_second = tokens.get(what, options.batch * options.tokens) / one["seconds"]
            rows.append({"what": what, "who": name, **one, "tokens_per_second": per_second,
                         "pyfa_is_faster": ratio})  # fmt: skip
            slower = slower or ratio < 1.0 - max(one["spread"], ours["spread"])
        print(f"{time.monotonic() - begin:4.0f} s {what}", file=sys.stderr)
        if options.save:
            machine.save("llama_speed", {"how": HOW, "options": vars(options), "rows": rows})
    print_table(
        ["", "", "ms", "tokens/s", "pyfa's speed, of it"],
        [
            [row["what"], row["who"], f"{row['seconds'] * 1e3:.3f}",
             f"{row['tokens_per_second']:.4g}", f"{row['pyfa_is_faster']:.3f}"]
            for row in rows
        ],
    )  # fmt: skip
    return int(slower)


if __name__ == "__main__":
    sys.exit(main())
