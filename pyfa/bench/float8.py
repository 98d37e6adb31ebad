"""Benchmarks float8 inputs, float8 caches with 16-bit queries, and the cost of the conversion to
float8."""

from __future__ import annotations

import importlib
from typing import Any

import torch

import pyfa

from .ready import Ready
from .suites import QUANTIZE_BLOCK, Cell


def inputs(cell: Cell, device: torch.device) -> list[torch.Tensor]:
    """Return q, k, v (batch, seqlen, heads, head_dim) before they are rounded to float8."""
    generator = torch.Generator(device).manual_seed(0)
    sizes = ((cell.seqlen_q, cell.heads_q), *((cell.seqlen_k, cell.heads_k),) * 2)
    return [
        torch.randn(
            (cell.batch, length, heads, cell.head_dim),
            generator=generator, device=device, dtype=getattr(torch, cell.dtype),
        )
        for length, heads in sizes
    ]  # fmt: skip


def by_pyfa(backend: str | None, cell: Cell, device: torch.device) -> Ready:
    q, k, v = inputs(cell, device)
    if cell.fp8 == "copy":
        return _ready(lambda: (q.clone(), k.clone(), v.clone())[0], q, k, v)
    if cell.fp8 in ("quantize", "rotate"):
        turned = cell.fp8 == "rotate"
        seed = 0 if turned else None

        def made() -> torch.Tensor:
            return pyfa.quantize(q, k, v, block=QUANTIZE_BLOCK, hadamard=turned, seed=seed).k

        return _ready(made, q, k, v)
    cached = cell.fp8 == "cache"
    x = pyfa.quantize(None if cached else q, k, v)
    queries = q if x.q is None else x.q
    if cell.cache:

        def decode() -> Any:
            return pyfa.attention_kvcache(
                queries, x.k, x.v, causal=cell.causal, descale=x.descale, backend=backend
            )

        return _ready(decode, queries, x.k, x.v)

    def forward() -> Any:
        return pyfa.attention(
            queries, x.k, x.v, causal=cell.causal, descale=x.descale, backend=backend
        )

    return _ready(forward, queries, x.k, x.v)


def by_flash_attention_3(cell: Cell, device: torch.device) -> Ready:
    """Prepare ``flash_attn_interface``, which supports float8 only with float8 queries."""
    if cell.fp8 != "inputs":
        raise ValueError("it has no float8 keys under 16-bit queries, and does not quantize")
    module = importlib.import_module("flash_attn_interface")
    x = pyfa.quantize(*inputs(cell, device))
    assert x.q is not None
    scales = dict(zip(("q_descale", "k_descale", "v_descale"), x.descale, strict=True))

    def forward() -> Any:
        result = module.flash_attn_func(x.q, x.k, x.v, causal=cell.causal, **scales)
        return result[0] if isinstance(result, tuple) else result

    return _ready(forward, x.q, x.k, x.v)


def by_cudnn(cell: Cell, device: torch.device) -> Ready:
    """Prepare cuDNN through its ``cudnn`` package, with scales of 1 and a float8 output."""
    if cell.fp8 != "inputs":
        raise ValueError("it has no float8 keys under 16-bit queries, and does not quantize")
    cudnn = importlib.import_module("cudnn")
    handle = cudnn.create_handle()
    cudnn.set_stream(handle=handle, stream=torch.cuda.current_stream(device).cuda_stream)
    float8, float32 = cudnn.data_type.FP8_E4M3, cudnn.data_type.FLOAT
    graph = cudnn.pygraph(
        io_data_type=float8,
        intermediate_data_type=float32,
        compute_data_type=float32,
        handle=handle,
    )
    x = pyfa.quantize(*inputs(cell, device))
    assert x.q is not None
    leaves = [y.transpose(1, 2) for y in (x.q, x.k, x.v)]
    given = {
        graph.tensor(dim=list(y.shape), stride=list(y.stride()), data_type=float8): y
        for y in leaves
    }
    ones = torch.ones(1, 1, 1, 1, device=device)
    names = ("descale_q", "descale_k", "descale_v", "descale_s", "scale_s", "scale_o")
    scales = {name: graph.tensor(dim=[1] * 4, stride=[1] * 4, data_type=float32) for name in names}
    made = graph.sdpa_fp8(
        **dict(zip("qkv", given, strict=True)), **scales, is_inference=True,
        attn_scale=cell.head_dim**-0.5, use_causal_mask=cell.causal,
    )  # fmt: skip
    out = torch.empty_like(x.q).transpose(1, 2)
    # The output, no LSE, and the largest of P and of the output.
    results = {made[0]: out} | {
        each: torch.zeros_like(ones) for each in made[2:] if each is not None
    }
    for symbol, tensor in results.items():
        symbol.set_output(True).set_dim(list(tensor.shape)).set_stride(list(tensor.stride()))
        symbol.set_data_type(float8 if tensor is out else float32)
    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans([cudnn.heur_mode.A])
    graph.check_support()
    graph.build_plans()
    size = max(1, graph.get_workspace_size())
    workspace = torch.empty(size, device=device, dtype=torch.uint8)
    pack = given | results | dict.fromkeys(scales.values(), ones)

    def forward() -> torch.Tensor:
        graph.execute(pack, workspace, handle=handle)
        return out.transpose(1, 2)

    return _ready(forward, *leaves)


def _ready(forward: Any, *leaves: torch.Tensor) -> Ready:
    """Return the ``Ready``. There is no gradient, so ``dout`` is unused."""
    return Ready(forward, leaves, leaves[0])
