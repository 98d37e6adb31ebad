"""SGLang on a CPU with pyfa's plug-in: a small Llama with random weights, its greedy tokens
compared with those of SGLang's own ``torch_native`` backend.

Prompts of 5 to 300 tokens are served at once, with the prefix cache and prompts in chunks, twice:
the second time whole prompts are cached. Each backend has processes of its own; where pyfa is not
asked for, the plug-in is there and must stay idle. At the end pyfa is given lengths that are off by
one, to see that the comparison can fail.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import types
from pathlib import Path
from typing import Any

import torch
from serving import NEW_TOKENS, judge, kinds, off_by_one, prompts, save, served

SERVED = {
    "device": "cpu", "dtype": "float32", "skip_tokenizer_init": True, "context_length": 512,
    "max_total_tokens": 8192, "max_running_requests": 8, "chunked_prefill_size": 96,
    "random_seed": 0, "grammar_backend": "none", "disable_overlap_schedule": True,
    "enable_mixed_chunk": True, "log_level": "error",
}  # fmt: skip


def stand_ins() -> torch.library.Library:
    """Make ``import sglang`` succeed where torchvision and vLLM have no kernels.

    torchvision registers operators that its compiled half defines; vLLM is asked for a kernel that
    a CPU never calls. SGLang's processes import this file, so they have these, too.
    """
    operators = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        operators.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    for name in ("vllm", "vllm._custom_ops"):
        sys.modules[name] = types.ModuleType(name)
    sys.modules["vllm._custom_ops"].rotary_embedding = None  # type: ignore[attr-defined]
    return operators


def counted() -> None:
    """Note pyfa's calls in a file, and plant lengths that are off by one once it says so. In the
    process that serves, which is not the one that asks."""
    import pyfa.api

    own, notes = pyfa.api.attention_kvcache, Path(os.environ["NOTES"])

    def noted(q: torch.Tensor, *args: Any, **named: Any) -> Any:
        with notes.open("a") as file:
            file.write(json.dumps(kinds(named)) + "\n")
        planted = notes.with_suffix(".planted").exists()
        return own(q, *args, **(off_by_one(named) if planted else named))

    pyfa.api.attention_kvcache = noted


def serve(folder: str, backend: str) -> None:
    """Print the tokens as a line of JSON."""
    import sglang

    notes = Path(os.environ["NOTES"])
    greedy = {"temperature": 0.0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
    engine = sglang.Engine(model_path=folder, attention_backend=backend, **SERVED)

    def tokens() -> tuple[list[list[int]], int]:
        made = engine.generate(input_ids=prompts(), sampling_params=greedy)
        return [x["output_ids"] for x in made], sum(x["meta_info"]["cached_tokens"] for x in made)

    (first, _), (second, hits) = tokens(), tokens()
    found = {"tokens": first + second, "hits": hits}
    seen = [json.loads(line) for line in notes.read_text().splitlines()] if notes.exists() else []
    notes.with_suffix(".planted").touch()
    found |= {"calls": len(seen), "mixed": sum(x for x, _ in seen)}
    found |= {"continued": sum(x for _, x in seen), "planted": tokens()[0]}
    print("\n" + json.dumps(found), flush=True)
    engine.shutdown()


def main() -> None:
    with tempfile.TemporaryDirectory() as made:
        save(Path(made))

        def tokens(backend: str) -> dict[str, Any]:
            return served([made, backend], {"NOTES": f"{made}/{backend}.notes", "HOME": made})

        judge(tokens("torch_native"), tokens("pyfa"))


_operators = stand_ins()
if "NOTES" in os.environ:
    counted()
if __name__ == "__main__":
    if len(sys.argv) > 1:
        serve(*sys.argv[1:])
    else:
        main()
