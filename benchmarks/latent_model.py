"""Compare DeepseekV3Attention (transformers) with absorbed weights to its expanded form.

    python benchmarks/latent_model.py     # writes results/latent_model.json

Random weights; a prompt of 30 tokens, then 20 tokens one by one, on a paged latent cache. The
reference is the module in float64, the allowance follows from the same module in the same dtype
(docs/features.md).
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import machine
import torch
import transformers

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "integrations"))
from test_latent_model import PROMPT, TOKENS, compared


def main() -> None:
    rows: list[dict[str, Any]] = []
    for dtype in (torch.float32, torch.bfloat16):
        check, got, ref, naive = compared(dtype)
        rows.append(
            {
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
        "rows": rows,
    }
    print("wrote", machine.save("latent_model", results))


if __name__ == "__main__":
    main()
