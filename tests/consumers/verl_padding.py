"""verl's attention_utils.py with `pyfa compat`: its own functions, on flash_attn.bert_padding.

Loaded by its path, for verl as a whole needs ray and vLLM; what it asks of verl itself, whether
there is an NPU, is a stand-in. einops' own rearrange is what pyfa's is compared with.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
from types import ModuleType

import einops
import torch
from checks import check

import pyfa.compat.bert_padding

device = ModuleType("verl.utils.device")
device.is_torch_npu_available = lambda **options: False  # type: ignore[attr-defined]
sys.modules["verl.utils.device"] = device

found = importlib.metadata.distribution("verl").locate_file("verl/utils/attention_utils.py")
spec = importlib.util.spec_from_file_location("attention_utils", str(found))
assert spec is not None
assert spec.loader is not None
utils = importlib.util.module_from_spec(spec)
spec.loader.exec_module(utils)

ours = pyfa.compat.bert_padding
assert utils._get_attention_functions() == (
    ours.index_first_axis, ours.pad_input, ours.rearrange, ours.unpad_input,
)  # fmt: skip

torch.manual_seed(0)
mask = torch.rand(3, 9) > 0.4
ids = torch.randint(0, 100, (3, 9, 1))
rows, indices, *_ = utils.unpad_input(ids, mask)
check("unpad_input", rows[:, 0], ids[mask][:, 0])
positions = torch.randint(0, 100, (4, 3, 9))
flat = utils.index_first_axis(utils.rearrange(positions, "c b s -> (b s) c"), indices)
check("index_first_axis, rearrange", flat, positions.permute(1, 2, 0)[mask])
check("pad_input", utils.pad_input(rows, indices, 3, 9), ids * mask[..., None])
x = torch.randn(2, 3, 4, 5)
for pattern, sizes in (
    ("b s ... -> (b s) ...", {}),
    ("b s h d -> b h s d", {}),
    ("b s (h e) d -> (b h) s (e d)", {"h": 2}),
    ("... a b -> ... (b a)", {}),
    ("a ... -> (...) 1 a", {}),
):
    check(f"rearrange {pattern}", ours.rearrange(x, pattern, **sizes),
          einops.rearrange(x, pattern, **sizes), 0.0)  # fmt: skip
