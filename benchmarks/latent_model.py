"""Compare transformers' DeepseekV3Attention and DeepseekV32Attention, absorbed and expanded.

    python benchmarks/latent_model.py     # writes results/latent_model.json

Random weights; a prompt of 30 tokens, then 20 tokens one by one, on a paged latent cache. The
reference is the module in float64, the allowance follows from the same module in the same dtype
(docs/features.md). Of V3.2, the keys are those that its indexer selects; in bfloat16, all three
take the selection of the absorbed one.
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import Any

import machine
import torch
import transformers

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "integrations"))
from test_latent_model import INDEXER, PROMPT, TOKENS, VERSIONS, compared


def main() -> None:
    rows: list[dict[str, Any]] = []
    for version, dtype in itertools.product(VERSIONS, (torch.float32, torch.bfloat16)):
        check, got, ref, naive = compared(version, dtype)
        rows.append(
            {
                "model": f"deepseek_{version}",
                "dtype": str(dtype).removeprefix("torch."),
                "passed": check.passed,
                "max_error": (got.double() - ref).abs().max().item(),
                "max_error_expanded": (naive.double() - ref).abs().max().item(),
                "message": check.message,
            }
        )
        print(rows[-1])
    results = {
        "transformers": transformers.__version__,
        "prompt": PROMPT,
        "tokens": TOKENS,
        "indexer": INDEXER,
        "rows": rows,
    }
    print("wrote", machine.save("latent_model", results))


if __name__ == "__main__":
    main()
