"""What vllm_serving.py and sglang_serving.py share: the model, the prompts, and the judgement."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from checks import report

VOCABULARY = 512
MODEL = {
    "vocab_size": VOCABULARY, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "max_position_embeddings": 1024, "initializer_range": 0.2, "tie_word_embeddings": False,
}  # fmt: skip
NEW_TOKENS = 12


def prompts() -> list[list[int]]:
    """20 prompts of 5 to 300 tokens; every third one begins with the same 130, more than a page."""
    generator = torch.Generator().manual_seed(1)
    lengths = torch.linspace(5, 300, 20).long()[torch.randperm(20, generator=generator)].tolist()
    made = [torch.randint(3, VOCABULARY, (n,), generator=generator).tolist() for n in lengths]
    shared = max(made, key=len)[:130]
    return [
        shared + prompt[130:] if number % 3 == 0 and len(prompt) > 130 else prompt
        for number, prompt in enumerate(made)
    ]


def save(folder: Path) -> None:
    """Write the model that is served."""
    import transformers

    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**MODEL))
    model.save_pretrained(folder)


def kinds(named: dict[str, Any]) -> tuple[bool, bool]:
    """Whether a call of ``attention_kvcache`` mixes prompts and decode, and whether it has a chunk
    of a prompt that is not the first."""
    rows, lengths = named["cu_seqlens_q"].diff(), named["cache_seqlens"]
    mixed = bool((rows == 1).any() and (rows > 1).any())
    return mixed, bool(((rows > 1) & (lengths > rows)).any())


def off_by_one(named: dict[str, Any]) -> dict[str, Any]:
    """The fault that the comparison has to find."""
    return {**named, "cache_seqlens": (named["cache_seqlens"] - 1).clamp(min=0)}


def served(arguments: list[str], variables: dict[str, str]) -> dict[str, Any]:
    """Run this program again with ``arguments``; return the last line of JSON that it prints."""
    command = [sys.executable, sys.argv[0], *arguments]
    ended = subprocess.run(command, env={**os.environ, **variables}, capture_output=True, text=True)
    if ended.returncode:
        raise RuntimeError((ended.stdout + ended.stderr)[-6000:])
    found: dict[str, Any] = json.loads(ended.stdout.rstrip().splitlines()[-1])
    return found


def judge(wanted: dict[str, Any], found: dict[str, Any]) -> None:
    """Compare what ``served`` returned without pyfa and with it."""
    assert wanted["calls"] == 0, "the plug-in was not asked for, and ran"
    assert min(found[x] for x in ("calls", "mixed", "continued", "hits")) > 0, found
    flat = [token for each in wanted["tokens"] for token in each]
    distinct = len(set(flat))
    assert distinct > 50, f"{distinct} distinct tokens say little"
    planted = differing(found["planted"], wanted["planted"])
    assert planted > 0, "lengths that are off by one changed no token"
    steps = f"{found['mixed']} mixed, {found['continued']} with a chunk"
    what = f"{len(flat)} tokens, {distinct} distinct; {found['calls']} calls, {steps}"
    what += f"; {found['hits']} prompt tokens cached; off by one, {planted} tokens differ"
    report(f"Llama: {what}", differing(found["tokens"], wanted["tokens"]))


def differing(found: list[list[int]], wanted: list[list[int]]) -> int:
    pairs = zip(found, wanted, strict=True)
    return sum(a != b for mine, theirs in pairs for a, b in zip(mine, theirs, strict=True))
