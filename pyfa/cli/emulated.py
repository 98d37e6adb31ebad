"""The second half of ``pyfa demo``: runs the MI300X kernel's machine code on this CPU."""

from __future__ import annotations

import time
from typing import Any

from .console import print_table

_SEQLEN, _HEADS, _HEADS_K, _HEAD_DIM = 256, 4, 2, 128


def collect() -> dict[str, Any]:
    """Run one causal bfloat16 forward in the emulator; return errors, counters and the digest of
    the code.

    Returns ``{"why_not": …}`` if this machine cannot run it.
    """
    import torch

    import pyfa

    from .. import reference, request
    from ..backends import BACKENDS
    from ..backends.hip import plans
    from ..backends.hip.backend import HipBackend
    from ..backends.hip.runtime_emulator import EmulatorRuntime
    from ..conformance import tolerances

    backend = BACKENDS["emulator"]
    why_not = backend.why_unavailable()
    if why_not:
        return {"why_not": why_not}
    assert isinstance(backend, HipBackend)
    assert isinstance(backend.runtime, EmulatorRuntime)
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, _SEQLEN, heads, _HEAD_DIM) for heads in (_HEADS, _HEADS_K, _HEADS_K)]
    q, k, v = (torch.randn(s, generator=generator).to(torch.bfloat16) for s in shapes)
    call = request.dense(q, k, v, request.Shared(causal=True)).call
    pyfa.attention(q, k, v, causal=True, backend="emulator")  # finds and decodes the code object
    begin = time.perf_counter()
    out = pyfa.attention(q, k, v, causal=True, backend="emulator")
    seconds = time.perf_counter() - begin
    assert isinstance(out, torch.Tensor)
    exact, naive = reference.attention(call)[0], reference.attention(call, q.dtype)[0]
    check = tolerances.judge("out", out, exact, naive)
    counters, ran = backend.runtime.counters, backend.runtime.code
    assert counters is not None
    assert ran is not None
    return {
        "problem": f"1 × {_SEQLEN} × {_HEADS}/{_HEADS_K} × {_HEAD_DIM}, bfloat16, causal, forward",
        "arch": plans.EMULATED,
        "kernel": ran.kernel.name,
        "sha256": ran.digest,
        "origin": ran.origin,
        "registers": ran.kernel.vgprs,
        "spills": ran.kernel.vgpr_spills + ran.kernel.sgpr_spills,
        "lds_bytes": ran.kernel.lds_bytes,
        "error": check.max_error,
        "naive_error": float((naive - exact).abs().max()),
        "allowed": check.max_bound,
        "message": check.message,
        "seconds": seconds,
        "instructions": dict(counters.instructions),
        "mfma_clocks": sum(counters.mfma_clocks.values()),
        "lds_clocks": counters.lds_clocks,
        "lds_conflict_clocks": counters.lds_conflict_clocks,
        "load_bytes": counters.load_bytes,
        "store_bytes": counters.store_bytes,
    }


def show(data: dict[str, Any]) -> None:
    """Print the result of ``collect``."""
    print()
    if "why_not" in data:
        print(f"the MI300X kernel's machine code was not run: {data['why_not']}")
        return
    total = sum(data["instructions"].values())
    print(f"MI300X ({data['arch']}) machine code, emulated on this CPU: {data['problem']}")
    print(f"code object {data['sha256'][:16]}… ({data['origin']}), {data['registers']} registers, "
          f"{data['spills']} spills, {data['lds_bytes']} B of LDS")  # fmt: skip
    print(f"error against float64 {data['error']:.2e}, naive {data['naive_error']:.2e}, "
          f"allowed {data['allowed']:.2e}")  # fmt: skip
    print()
    rows = [[name, f"{count:,}"] for name, count in data["instructions"].items()]
    rows += [
        ["all", f"{total:,}"],
        ["MFMA clocks", f"{data['mfma_clocks']:,}"],
        ["LDS clocks (modeled)", f"{data['lds_clocks']:,}"],
        ["of them bank conflicts", f"{data['lds_conflict_clocks']:,}"],
        ["bytes requested", f"{data['load_bytes']:,}"],
        ["bytes stored", f"{data['store_bytes']:,}"],
    ]
    print_table(["wavefront instructions", "count"], rows)
    print()
    rate = total / data["seconds"] / 1e6
    print(f"{rate:.1f} M wavefront instructions per second; LDS races, waits and bounds checked")
    print("functionally emulated, not verified on hardware")
