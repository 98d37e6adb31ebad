"""TransformerEngine's attention modules with `pyfa compat`: what they import, and what they call.

``utils``, ``backends`` and ``context_parallel`` of its wheel run as they are. The rest of it needs
a compiled extension and a GPU: stand-ins take its place. Its own functions for a block of context
parallelism, forward and backward, then run with versions 2, 3 and 4 of flash-attention, two halves
of the keys after one another, and merge to the whole.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import sys
import tempfile
from importlib.metadata import distribution
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

PACKAGE = "transformer_engine.pytorch.attention.dot_product_attention"
REAL = {f"{PACKAGE}.{name}" for name in ("utils", "backends", "context_parallel")}
FILES = Path(str(distribution("transformer_engine").locate_file("")))

# Version 4 is taken only where NVIDIA's DSL is.
dsl = Path(tempfile.mkdtemp()) / "nvidia_cutlass_dsl-4.6.2.dist-info"
dsl.mkdir()
(dsl / "METADATA").write_text("Metadata-Version: 2.1\nName: nvidia-cutlass-dsl\nVersion: 4.6.2\n")
sys.path.append(str(dsl.parent))


class StandIns:
    """Every module of TransformerEngine but the real ones."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name in REAL:
            file = FILES / f"{name.replace('.', '/')}.py"
            return importlib.util.spec_from_file_location(name, file)
        if name.split(".")[0] in ("transformer_engine", "transformer_engine_torch"):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]
        return None

    def create_module(self, spec: Any) -> Any:
        module = MagicMock(name=spec.name, __path__=[], __spec__=spec, __name__=spec.name)
        module.jit_fuser = lambda function: function
        module.no_torch_dynamo = lambda *options, **named: lambda function: function
        return module

    def exec_module(self, module: ModuleType) -> None:
        pass


sys.meta_path.insert(0, StandIns())  # type: ignore[arg-type]

import torch  # noqa: E402
from checks import check  # noqa: E402

import pyfa  # noqa: E402

backends = importlib.import_module(f"{PACKAGE}.backends")
context_parallel = importlib.import_module(f"{PACKAGE}.context_parallel")

found = backends.fa_utils
assert found.is_installed, "TransformerEngine does not take this version of flash-attn"
assert found.v2_7_0_plus
assert found.v3_is_installed
assert found.fa3_supports_softcap
assert found.v4_is_installed

torch.manual_seed(0)
SCALE = 0.2
q = torch.randn(2, 24, 4, 16, requires_grad=True)
k, v = (torch.randn(2, 40, 2, 16, requires_grad=True) for _ in range(2))
dout = torch.randn(2, 24, 4, 16)
wanted, wanted_lse = pyfa.attention(q, k, v, scale=SCALE, return_lse=True)
grads = torch.autograd.grad(wanted, (q, k, v), dout)
OFFSETS = [torch.arange(3, dtype=torch.int32) * rows for rows in (24, 20)]

FUNCTIONS = {
    2: (backends._flash_attn_fwd, backends._flash_attn_bwd),
    3: (backends._flash_attn_fwd_v3, backends._flash_attn_bwd_v3),
    4: (backends._flash_attn_fwd_v4, backends._flash_attn_bwd_v4),
}
PACKED = {
    2: (backends._flash_attn_varlen_fwd, backends._flash_attn_varlen_bwd),
    3: FUNCTIONS[3],
    4: FUNCTIONS[4],
}


def forward_options(version: int, layout: str) -> dict[str, Any]:
    """As its ring's forward sets them."""
    options: dict[str, Any] = {"softmax_scale": SCALE, "window_size_left": -1,
                               "window_size_right": -1}  # fmt: skip
    if version == 2:
        options |= {"dropout_p": 0.0, "return_softmax": False, "alibi_slopes": None, "softcap": 0.0}
        if layout == "thd":
            options["block_table"] = None
    if version == 4:
        options["return_lse"] = True
    return options


def backward_options(version: int) -> dict[str, Any]:
    options: dict[str, Any] = {"softmax_scale": SCALE, "deterministic": False}
    if version == 2:
        options |= {"dropout_p": 0.0, "alibi_slopes": None, "softcap": 0.0}
    return options


def tokens(x: torch.Tensor, layout: str) -> torch.Tensor:
    x = x.detach().contiguous()
    return x.flatten(0, 1) if layout == "thd" else x


for layout in ("bshd", "thd"):
    for version, (forward, backward) in (PACKED if layout == "thd" else FUNCTIONS).items():
        chosen = (version == 3, version == 4)
        name = f"version {version}, {layout}"
        halves = [[tokens(x, layout) for x in half] for half in zip(
            k.chunk(2, dim=1), v.chunk(2, dim=1), strict=True)]  # fmt: skip
        mine = tokens(q, layout)
        made = [
            context_parallel.cp_p2p_fwd_flash_attn(
                *chosen, layout, forward_options(version, layout), forward, 24, 20, False, None,
                None, mine, *half, *OFFSETS, "all",
            )
            for half in halves
        ]  # fmt: skip
        lse = torch.logaddexp(made[0][1], made[1][1])
        weights = [(each[1] - lse).exp().transpose(-1, -2)[..., None] for each in made]
        out = sum(x[0] * weight for x, weight in zip(made, weights, strict=True))
        whole_lse = wanted_lse.transpose(0, 1).flatten(1) if layout == "thd" else wanted_lse
        check(f"{name}: out", out, tokens(wanted, layout))
        check(f"{name}: LSE", lse, whole_lse.detach())
        parts = [
            context_parallel.cp_p2p_bwd_flash_attn(
                *chosen, layout, 24, 20, [OFFSETS[0]] * 2, [OFFSETS[1]] * 2, step, 2,
                backward_options(version), backward, [each[2] for each in made], lse, None, False,
                None, None, mine, *halves[1 - step], out, tokens(dout, layout), "all",
            )
            for step in range(2)
        ]  # fmt: skip
        check(f"{name}: dq", parts[0][0] + parts[1][0], tokens(grads[0], layout))
        for i, what in ((1, "dk"), (2, "dv")):
            for step in range(2):
                half = grads[i].chunk(2, dim=1)[1 - step]
                check(f"{name}: {what} of half {1 - step}", parts[step][i], tokens(half, layout))

# Importing the entry point of the extension that fused attention's backward may take.
assert backends.flash_attn_cuda_bwd is not None
