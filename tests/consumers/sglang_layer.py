"""One layer of pyfa's backend with SGLang's own classes and pools, for what sglang_serving.py does
not serve: pages of 16 keys, windows, sinks, softcap, float8 caches, the memory of CUDA graphs, and
what is declined.

The expected output is written out below in float64, one sequence at a time.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import sglang_serving
import torch
from checks import calls_of, check, declined

assert sglang_serving.SERVED  # its stand-ins come before SGLang

from sglang.srt.layers.radix_attention import AttentionType, RadixAttention  # noqa: E402
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool  # noqa: E402
from sglang.srt.model_executor.forward_batch_info import ForwardMode  # noqa: E402

from pyfa.integrations.sglang import backend  # noqa: E402

HEADS, HEADS_K, DIM, PAGE, LONGEST = 4, 2, 32, 16, 128
ROWS, KEYS = [1, 7, 1, 40], [90, 7, 33, 64]  # decode, a prompt, decode, the second chunk of one


def runner(dtype: torch.dtype, **differing: Any) -> Any:
    pool = MHATokenToKVPool(1024, PAGE, dtype, HEADS_K, DIM, 1, "cpu", False)
    told: dict[str, Any] = {
        "req_to_token_pool": ReqToTokenPool(len(KEYS), LONGEST, "cpu", False),
        "token_to_kv_pool": pool, "page_size": PAGE, "device": "cpu", "use_mla_backend": False,
        "model_config": SimpleNamespace(is_encoder_decoder=False),
        "spec_algorithm": SimpleNamespace(is_none=lambda: True), **differing,
    }  # fmt: skip
    return SimpleNamespace(**told)


def backend_of(deterministic: bool = False, **told: Any) -> Any:
    flags = SimpleNamespace(enable_deterministic_inference=deterministic)
    backend.get_exec = lambda: SimpleNamespace(deterministic=flags)
    return backend.PyfaBackend(runner(**told))


def layer_of(**options: Any) -> Any:
    return RadixAttention(HEADS, DIM, DIM**-0.5, HEADS_K, 0, **options)


def expected(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: Any, sinks: Any) -> Any:
    """Attention of the last rows of one sequence, in float64."""
    q, k, v = (x.double().transpose(0, 1) for x in (q, k, v))
    k, v = (x.repeat_interleave(HEADS // HEADS_K, 0) for x in (k, v))
    scores = q @ k.transpose(1, 2) * DIM**-0.5
    if layer.logit_cap:
        scores = layer.logit_cap * (scores / layer.logit_cap).tanh()
    back = torch.arange(k.shape[1] - q.shape[1], k.shape[1])[:, None] - torch.arange(k.shape[1])
    left = layer.sliding_window_size
    seen = (back >= 0) & (back <= (left if left > -1 else back.shape[1]))
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.double()[:, None, None].expand(-1, q.shape[1], 1)], -1)
    return (scores.softmax(-1)[..., : k.shape[1]] @ v).transpose(0, 1)


def stored(made: Any, layer: Any, k: torch.Tensor, v: torch.Tensor) -> Any:
    """Give each sequence pages of a shuffled order, and store all but its new rows; return the new
    rows' places."""
    order = 1 + torch.randperm(1024 // PAGE)
    places, start = [], 0
    for number, (rows, keys) in enumerate(zip(ROWS, KEYS, strict=True)):
        pages = order[number * 8 : number * 8 + 8]
        slots = (pages[:, None] * PAGE + torch.arange(PAGE)).flatten()[:keys]
        made.req_to_token[number + 1, :keys] = slots.int()
        old = slots[: keys - rows]
        part = slice(start, start + keys - rows)
        scales = layer.k_scale, layer.v_scale
        made.token_to_kv_pool.set_kv_buffer(
            layer, backend.KVWriteLoc(old, None), k[part].clone(), v[part].clone(), *scales
        )
        places.append(slots[keys - rows :])
        start += keys
    return torch.cat(places)


def run(
    dtype: torch.dtype, cache: torch.dtype, sinks: Any = None, scale: float = 1.0, **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    made, layer = backend_of(dtype=cache), layer_of(**options)
    if scale != 1.0:
        layer.k_scale, layer.v_scale = torch.tensor(scale), torch.tensor(scale / 2)
    k, v = (torch.randn(sum(KEYS), HEADS_K, DIM).to(dtype) for _ in range(2))
    q = torch.randn(sum(ROWS), HEADS * DIM).to(dtype)
    places = stored(made, layer, k, v)
    ends = torch.tensor(KEYS).cumsum(0).tolist()
    new = torch.cat([torch.arange(x - rows, x) for x, rows in zip(ends, ROWS, strict=True)])
    batch = SimpleNamespace(
        forward_mode=ForwardMode.MIXED, batch_size=len(KEYS), out_cache_loc=places,
        seq_lens=torch.tensor(KEYS), req_pool_indices=torch.arange(1, len(KEYS) + 1),
        extend_seq_lens=torch.tensor(ROWS), extend_seq_lens_cpu=ROWS,
    )  # fmt: skip
    made.init_forward_metadata(batch)
    more = {} if sinks is None else {"sinks": sinks}
    out = made.forward(q, k[new].clone(), v[new].clone(), layer, batch, **more)

    def rounded(x: torch.Tensor, by: float) -> torch.Tensor:
        return x if cache == dtype else (x.float() / by).to(cache).double() * by

    parts = zip(
        q.view(-1, HEADS, DIM).split(ROWS), rounded(k, scale).split(KEYS),
        rounded(v, scale / 2 if scale != 1.0 else 1.0).split(KEYS), strict=True,
    )  # fmt: skip
    wanted = torch.cat([expected(*part, layer, sinks) for part in parts])
    return out.view(wanted.shape), wanted


def graph() -> None:
    """Steps of decode that a CUDA graph would replay: the memory is the same, what it holds new."""
    torch.manual_seed(0)
    made, layer = backend_of(dtype=torch.float32), layer_of()
    k, v = (torch.randn(sum(KEYS), HEADS_K, DIM) for _ in range(2))
    stored(made, layer, k, v)
    made.init_cuda_graph_state(8, 8)
    seen = []
    for rows in ([1, 2], [3, 4]):
        batch = SimpleNamespace(
            forward_mode=ForwardMode.DECODE, batch_size=2, req_pool_indices=torch.tensor(rows),
            seq_lens=torch.tensor([KEYS[x - 1] - ROWS[x - 1] for x in rows]).clamp(min=1),
        )  # fmt: skip
        made.init_forward_metadata_out_graph(batch, in_capture=not seen)
        found = made.forward_metadata
        seen.append([x.data_ptr() for x in (found.page_table, found.cache_seqlens)])
        q = torch.randn(2, HEADS * DIM)
        graphs = made.forward(q, None, None, layer, batch)
        made.init_forward_metadata(batch)
        wanted = made.forward(q, None, None, layer, batch)
        check(f"a graph's memory, requests {rows}", graphs, wanted, limit=0.0)
    assert seen[0] == seen[1], "a replay would read other memory"


FULL, HALF, NARROW = torch.float32, torch.bfloat16, torch.float8_e4m3fn
SINKS = torch.tensor([1.0, -1.0, 3.0, 0.0])
check("pages of 16 keys, mixed", *run(FULL, FULL))
check("window", *run(FULL, FULL, sliding_window_size=19))
check("softcap", *run(FULL, FULL, logit_cap=3.0))
check("sinks, window", *run(FULL, FULL, SINKS, sliding_window_size=19))
# The output is rounded to bfloat16, 2⁻⁹ of each value.
check("float8 cache", *run(HALF, NARROW), limit=2**-8)
check("float8 cache with scales, sinks", *run(HALF, NARROW, SINKS, 0.5), limit=2**-8)
graph()

calls = calls_of("attention_kvcache")
run(FULL, FULL)
assert calls[0]["batch_invariant"] is False
assert backend_of(deterministic=True, dtype=FULL).batch_invariant is True

declined("latent", lambda: backend_of(dtype=FULL, use_mla_backend=True))
encoder = SimpleNamespace(is_encoder_decoder=True)
declined("cross attention", lambda: backend_of(dtype=FULL, model_config=encoder))
draft = SimpleNamespace(is_none=lambda: False)
declined("speculative", lambda: backend_of(dtype=FULL, spec_algorithm=draft))
declined("float8_e5m2", lambda: backend_of(dtype=torch.float8_e5m2))
declined("ENCODER_ONLY", lambda: run(FULL, FULL, attn_type=AttentionType.ENCODER_ONLY))
verify = SimpleNamespace(forward_mode=ForwardMode.TARGET_VERIFY, seq_lens=torch.ones(1))
declined("TARGET_VERIFY", lambda: backend_of(dtype=FULL).init_forward_metadata(verify))
