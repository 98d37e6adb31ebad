"""vLLM on a CPU with pyfa's plug-in: a small Llama with random weights, its greedy tokens compared
with those of vLLM's own backend. vllm_layer.py has the features that a Llama does not use.

Prompts of 5 to 300 tokens are served at once, with prefix caching and prompts in chunks, so that a
step mixes prompts, chunks and decode. Each backend has a process of its own, because vLLM loads
plug-ins once. Without PYFA_VLLM_CPU the plug-in is there and must stay idle. At the end pyfa is
given lengths that are off by one, to see that the comparison can fail.
"""

from __future__ import annotations

import json
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from serving import NEW_TOKENS, judge, kinds, off_by_one, prompts, save, served

SERVED = {
    "dtype": "float32", "enforce_eager": True, "skip_tokenizer_init": True, "max_model_len": 512,
    "enable_prefix_caching": True, "enable_chunked_prefill": True, "max_num_batched_tokens": 96,
    "max_num_seqs": 8, "seed": 0, "disable_log_stats": False,
}  # fmt: skip


def serve(folder: Path) -> None:
    """Print the tokens, and what was seen of pyfa's calls, as a line of JSON."""
    from vllm import LLM, SamplingParams

    import pyfa.api

    seen = {"calls": 0, "mixed": 0, "continued": 0, "planted": 0}
    own = pyfa.api.attention_kvcache

    def counted(q: torch.Tensor, *args: Any, **named: Any) -> Any:
        mixed, continued = kinds(named)
        seen["calls"] += 1
        seen["mixed"] += mixed
        seen["continued"] += continued
        return own(q, *args, **(off_by_one(named) if seen["planted"] else named))

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


def variables(folder: Path, with_pyfa: bool) -> dict[str, str]:
    return {
        "PYFA_VLLM_CPU": str(int(with_pyfa)),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CONFIG_ROOT": str(folder),
        "VLLM_CACHE_ROOT": str(folder),
    }


def main() -> None:
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        save(folder)
        with ThreadPoolExecutor(2) as pool:
            each = (variables(folder, with_pyfa) for with_pyfa in (False, True))
            judge(*pool.map(lambda told: served([made], told), each))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        serve(Path(sys.argv[1]))
    else:
        main()
