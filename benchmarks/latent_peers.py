"""Time latent decode on an NVIDIA GPU, compared with FlashAttention-3 and ordinary decode.

    python benchmarks/latent_peers.py [--fa3 LIBRARY] [--rounds 11] [--save]

One bfloat16 query token a sequence over a cache of 576 elements a key, the first 512 of them its
values. ``dense``: a contiguous cache that is full. ``paged``: pages of 64 keys with lengths on the
device, FlashAttention-3 with its scheduler's metadata, which is made before and not timed. Of
FlashAttention-3 k and v are views of the same cache. ``plain`` is pyfa's decode at head_dim 128
over a dense cache of as many bytes, with 16 query heads of one KV head and with 32 of 8. All calls
are replayed from CUDA graphs, in turns in one process; medians. Outputs are compared first.
``--fa3`` loads FlashAttention-3's operators from a library. ``--save`` writes
``results/latent_peers_<gpu>.json``.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any

import machine
import torch
from serving import _NONE, seconds

import pyfa
from pyfa.bench.timing import captured

Call = Callable[[], torch.Tensor]

_DIM, _DIM_V, _SCALE, _PAGE = 576, 512, 192**-0.5, 64
# batch, keys
_SHAPES = ((128, 1024), (128, 8192), (32, 8192), (16, 65536))
_HEADS = (16, 32, 64, 128)
# Heads and KV heads of decode at head_dim 128, which reads as many bytes: of 16 heads alone.
_PLAIN = ((16, 1), (32, 8))
_PLAIN_DIM = 128
_CALLS = 5  # of a graph


def of_fa3(q: torch.Tensor, cache: torch.Tensor, paged: dict[str, Any]) -> Call:
    given = _NONE | {"q_v": q[..., :_DIM_V]}
    metadata = None
    if paged:
        given |= {"seqused_k": paged["cache_seqlens"], "page_table": paged["page_table"]}
        metadata = torch.ops.flash_attn_3.get_scheduler_metadata(
            len(q), 1, paged["page_table"].shape[1] * _PAGE, q.shape[2], 1, _DIM - _DIM_V, _DIM_V,
            q.dtype, paged["cache_seqlens"], page_size=_PAGE, is_causal=True,
        )  # fmt: skip
    rest = (_SCALE, True, -1, -1, 0, 0.0, True, metadata, 0, None, 0)
    rope, k, v = q[..., _DIM_V:], cache[..., _DIM_V:], cache[..., :_DIM_V]

    def attend() -> torch.Tensor:
        out: torch.Tensor = torch.ops.flash_attn_3.fwd(rope, k, v, *given.values(), *rest)[0]
        return out

    return attend


def of_pyfa(q: torch.Tensor, cache: torch.Tensor, paged: dict[str, Any]) -> Call:
    def attend() -> torch.Tensor:
        out = pyfa.attention_latent(q, cache, scale=_SCALE, causal=True, backend="cuda", **paged)
        assert isinstance(out, torch.Tensor)
        return out

    return attend


def plain(batch: int, keys: int, heads: int, heads_k: int) -> Call:
    """Decode over a cache of as many bytes as ``keys`` latent ones."""
    length, rest = divmod(keys * _DIM, heads_k * 2 * _PLAIN_DIM)
    assert rest == 0
    q, k, v = (
        torch.randn(batch, rows, count, _PLAIN_DIM, device="cuda", dtype=torch.bfloat16)
        for rows, count in ((1, heads), (length, heads_k), (length, heads_k))
    )

    def attend() -> torch.Tensor:
        out = pyfa.attention_kvcache(q, k, v, causal=True, backend="cuda")
        assert isinstance(out, torch.Tensor)
        return out

    return attend


def measured(batch: int, keys: int, heads: int, kind: str, fa3: bool, rounds: int) -> Any:
    torch.manual_seed(0)
    q = torch.randn(batch, 1, heads, _DIM, device="cuda", dtype=torch.bfloat16)
    cache = torch.randn(batch, keys, 1, _DIM, device="cuda", dtype=torch.bfloat16)
    paged: dict[str, Any] = {}
    if kind == "paged":
        cache = cache.view(-1, _PAGE, 1, _DIM)
        paged["page_table"] = torch.randperm(len(cache), device="cuda").int().view(batch, -1)
        paged["cache_seqlens"] = torch.full((batch,), keys, dtype=torch.int32, device="cuda")
    calls = {"pyfa": of_pyfa(q, cache, paged)}
    if fa3:
        calls["fa3"] = of_fa3(q, cache, paged)
    outs = {name: call().view(batch, heads, _DIM_V) for name, call in calls.items()}
    for name, out in outs.items():
        torch.testing.assert_close(out, outs["pyfa"], rtol=2e-2, atol=2e-3, msg=f"{name}: {{}}")
    if heads == 16 and kind == "dense":
        for of_plain in _PLAIN:
            calls["plain {}/{}".format(*of_plain)] = plain(batch, keys, *of_plain)
    replays: dict[str, Callable[[], object]]
    replays = {name: captured(call, _CALLS)[0].replay for name, call in calls.items()}
    took = seconds(replays, rounds, _CALLS)
    row: dict[str, Any] = {"heads": heads, "batch": batch, "keys": keys, "cache": kind}
    row["us"] = {name: round(each * 1e6, 1) for name, each in took.items()}
    row["tb_per_s"] = round(2e-12 * batch * keys * _DIM / took["pyfa"], 3)
    row["tflops"] = round(2e-12 * batch * heads * keys * (_DIM + _DIM_V) / took["pyfa"], 1)
    row["over"] = {
        name: round(each / took["pyfa"], 3) for name, each in took.items() if name != "pyfa"
    }
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--fa3", help="a library with FlashAttention-3's operators")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    if options.fa3:
        torch.ops.load_library(options.fa3)
    rows = []
    for heads in _HEADS:
        for batch, keys in _SHAPES:
            for kind in ("dense", "paged"):
                one = measured(batch, keys, heads, kind, bool(options.fa3), options.rounds)
                rows.append(one)
                print(one, flush=True)
    if options.save:
        gpu = machine.gpu()
        how = f"Medians of {options.rounds} replays of {_CALLS} calls in turn, warm caches."
        print(machine.save(f"latent_peers_{gpu}", {"how": how, "rows": rows}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
