"""vLLM on a CPU with pyfa's plug-in: a small Llama with random weights, its greedy tokens compared
with those of vLLM's own backend. vllm_layer.py has the features that a Llama does not use.

Prompts of 5 to 300 tokens are served at once, with prefix caching and prompts in chunks, so that a
step mixes prompts, chunks and decode. Each backend has a process of its own, because vLLM loads
plug-ins once. Without PYFA_VLLM_CPU the plug-in is there and must stay idle. At the end pyfa is
given lengths that are off by one, to see that the comparison can fail.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

VOCABULARY = 512
MODEL = {
    "vocab_size": VOCABULARY, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "max_position_embeddings": 1024, "initializer_range": 0.2, "tie_word_embeddings": False,
}  # fmt: skip
SERVED = {
    "dtype": "float32", "enforce_eager": True, "skip_tokenizer_init": True, "max_model_len": 512,
    "enable_prefix_caching": True, "enable_chunked_prefill": True, "max_num_batched_tokens": 96,
    "max_num_seqs": 8, "seed": 0, "disable_log_stats": False,
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


def serve(folder: Path) -> None:
    """Print the tokens, and what was seen of pyfa's calls, as a line of JSON."""
    from vllm import LLM, SamplingParams

    import pyfa.api

    seen = {"calls": 0, "mixed": 0, "continued": 0, "planted": 0}
    own = pyfa.api.attention_kvcache

    def counted(q: torch.Tensor, *args: Any, **named: Any) -> Any:
        rows = named["cu_seqlens_q"].diff()
        if seen["planted"]:
            named["cache_seqlens"] = (named["cache_seqlens"] - 1).clamp(min=0)
        seen["calls"] += 1
        seen["mixed"] += bool((rows == 1).any() and (rows > 1).any())
        seen["continued"] += bool(((rows > 1) & (named["cache_seqlens"] > rows)).any())
        return own(q, *args, **named)

    pyfa.api.attention_kvcache = counted
    greedy = SamplingParams(
        temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True, detokenize=False
    )
    asked = [{"prompt_token_ids": prompt} for prompt in prompts()]
    llm = LLM(str(folder), **SERVED)

    def tokens() -> list[list[int]]:
        return [list(x.outputs[0].token_ids) for x in llm.generate(asked, greedy)]

    made = tokens() + tokens()  # the second time, whole prompts are in the cache
    hits = sum(m.value for m in llm.get_metrics() if m.name == "vllm:prefix_cache_hits")
    found = {"tokens": made, "hits": hits, **seen}
    seen["planted"] = 1
    print("\n" + json.dumps({**found, "planted": tokens()}), flush=True)


def served(folder: Path, with_pyfa: bool) -> dict[str, Any]:
    """Return what ``serve`` prints in a process of its own."""
    variables = {
        **os.environ,
        "PYFA_VLLM_CPU": str(int(with_pyfa)),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CONFIG_ROOT": str(folder),
        "VLLM_CACHE_ROOT": str(folder),
    }
    command = [sys.executable, __file__, str(folder)]
    ended = subprocess.run(command, env=variables, capture_output=True, text=True)
    if ended.returncode:
        raise RuntimeError((ended.stdout + ended.stderr)[-6000:])
    found: dict[str, Any] = json.loads(ended.stdout.rstrip().splitlines()[-1])
    return found


def report(name: str, error: float, limit: float = 0.0) -> None:
    print(json.dumps({"name": name, "error": error, "limit": limit}), flush=True)


def main() -> None:
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        save(folder)
        with ThreadPoolExecutor(2) as pool:
            wanted, found = pool.map(served, (folder, folder), (False, True))
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


if __name__ == "__main__":
    if len(sys.argv) > 1:
        serve(Path(sys.argv[1]))
    else:
        main()
