"""One layer of pyfa's backend with vLLM's own classes, for what vllm_serving.py does not serve:
float8 caches, sinks, caches of both orders, padding, batch invariance, and what is declined.

The expected output is written out below in float64, one sequence at a time.
"""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import torch
from checks import check, declined
from vllm.v1.attention.backend import AttentionType, CommonAttentionMetadata

from pyfa.integrations.vllm.backend import PyfaBackend

HEADS, HEADS_K, DIM, PAGE, PAGES = 4, 2, 32, 16, 64
ROWS, KEYS = [1, 7, 1, 40], [90, 7, 33, 64]  # decode, a prompt, decode, the second chunk of one
PADDING = 3  # tokens of a graph's batch that belong to no sequence


def layer_of(dtype: torch.dtype, dim: int = DIM, **options: Any) -> Any:
    """Return the Impl, as vLLM makes it: while the default dtype is the model's."""
    torch.set_default_dtype(dtype)
    impl = PyfaBackend.get_impl_cls()(HEADS, dim, dim**-0.5, HEADS_K, **options)
    impl.process_weights_after_loading(dtype)
    torch.set_default_dtype(torch.float32)
    return impl


def metadata_of(block_table: torch.Tensor, slots: torch.Tensor, **differing: Any) -> Any:
    offsets = torch.tensor([0, *ROWS]).cumsum(0).int()
    common = CommonAttentionMetadata(
        query_start_loc=offsets, query_start_loc_cpu=offsets, num_reqs=len(ROWS),
        seq_lens=torch.tensor(KEYS).int(), num_actual_tokens=sum(ROWS), max_query_len=max(ROWS),
        max_seq_len=max(KEYS), block_table_tensor=block_table, slot_mapping=slots, **differing,
    )  # fmt: skip
    config: Any = SimpleNamespace()
    builder = PyfaBackend.get_builder_cls()(None, [], config, torch.device("cpu"))
    return builder.build(0, common)


def expected(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, given: dict[str, Any]) -> Any:
    """Attention of the last rows of one sequence, in float64."""
    q, k, v = (x.double().transpose(0, 1) for x in (q, k, v))
    k, v = (x.repeat_interleave(HEADS // HEADS_K, 0) for x in (k, v))
    scores = q @ k.transpose(1, 2) * q.shape[-1] ** -0.5
    if given.get("logits_soft_cap"):
        scores = given["logits_soft_cap"] * (scores / given["logits_soft_cap"]).tanh()
    back = torch.arange(k.shape[1] - q.shape[1], k.shape[1])[:, None] - torch.arange(k.shape[1])
    if given.get("alibi_slopes"):
        scores -= torch.tensor(given["alibi_slopes"])[:, None, None] * back
    seen = (back >= 0) & (back < (given.get("sliding_window") or back.shape[1]))
    scores = scores.masked_fill(~seen, -torch.inf)
    if given.get("sinks") is not None:
        sinks = given["sinks"].double()[:, None, None].expand(-1, q.shape[1], 1)
        scores = torch.cat([scores, sinks], -1)
    weights = scores.softmax(-1)[..., : k.shape[1]]
    return (weights @ v).transpose(0, 1)


def run(
    dtype: torch.dtype, by_head: bool, dim: int = DIM, **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (out, expected) of a batch whose keys reach shuffled pages through vLLM's slots."""
    torch.manual_seed(0)
    impl = layer_of(dtype, dim, **options)
    scales = (torch.tensor(0.5), torch.tensor(0.25)) if impl.float8 else (torch.ones(()),) * 2
    layer = SimpleNamespace(_k_scale=scales[0], _v_scale=scales[1])
    stored = torch.uint8 if impl.float8 else dtype
    shape = (PAGES, HEADS_K, PAGE) if by_head else (PAGES, PAGE, HEADS_K)
    cache = torch.zeros(*shape, 2 * dim, dtype=stored)
    cache = cache if by_head else cache.transpose(1, 2)
    table = torch.randperm(PAGES)[: len(KEYS) * 8].view(len(KEYS), 8).int()
    # All keys are new to the cache here; vLLM writes those of each step.
    key, value = (torch.randn(sum(KEYS) + PADDING, HEADS_K, dim).to(dtype) for _ in range(2))
    query = torch.randn(sum(ROWS) + PADDING, HEADS, dim).to(dtype)
    at = [
        table[number, torch.arange(n) // PAGE] * PAGE + torch.arange(n) % PAGE
        for number, n in enumerate(KEYS)
    ]
    slots = torch.cat([*at, torch.full((PADDING,), -1)]).long()
    before = cache.clone()
    impl.do_kv_cache_update(layer, key, value, cache, slots)
    changed = (cache != before).any(-1).any(1).sum()
    assert changed == sum(KEYS), f"{changed} slots were written, of {sum(KEYS)} given"
    output = torch.full_like(query, 7.0)
    impl.forward(layer, query, key, value, cache, metadata_of(table, slots), output)
    assert bool((output[sum(ROWS) :] == 7).all()), "rows of padding were written"

    def rounded(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        if not impl.float8:
            return x
        return (x.float() / scale).to(impl.float8).double() * scale

    wanted = [
        expected(q, rounded(k, scales[0]), rounded(v, scales[1]), options)
        for q, k, v in zip(
            query[: sum(ROWS)].split(ROWS), key[: sum(KEYS)].split(KEYS),
            value[: sum(KEYS)].split(KEYS), strict=True,
        )
    ]  # fmt: skip
    return output[: sum(ROWS)], torch.cat(wanted)


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"sliding_window": 20},
    "softcap": {"logits_soft_cap": 3.0},
    "ALiBi": {"alibi_slopes": [0.5, 0.25, 0.125, 0.0625]},
    "sinks": {"sinks": torch.tensor([1.0, -1.0, 3.0, 0.0])},
    "sinks, window": {"sinks": torch.tensor([1.0, -1.0, 3.0, 0.0]), "sliding_window": 20},
}
for name, options in CASES.items():
    for by_head in (True, False):
        order = "heads before rows" if by_head else "rows before heads"
        check(f"{name}, {order}", *run(torch.float32, by_head, **options))
check("window, head_size 512", *run(torch.float32, True, 512, sliding_window=20))
# The output is rounded to bfloat16, 2⁻⁹ of each value.
for name in ("plain", "sinks, window"):
    both = run(torch.bfloat16, True, kv_cache_dtype="fp8", **CASES[name])
    check(f"float8 cache, {name}", *both, limit=2**-8)

# New weights in the model's own memory, as a reload writes them; captured graphs keep the layer's.
model_sinks = CASES["sinks"]["sinks"].bfloat16()
layer = layer_of(torch.bfloat16, sinks=model_sinks)
place = layer.sinks.data_ptr()
model_sinks.add_(1.0)
layer.process_weights_after_loading(torch.bfloat16)
check("sinks after a reload", layer.sinks, model_sinks.float(), limit=0.0)
assert layer.sinks.data_ptr() == place

os.environ["VLLM_BATCH_INVARIANT"] = "1"
assert layer_of(torch.float32).shared["batch_invariant"] is True
check("batch invariant", *run(torch.float32, True))
del os.environ["VLLM_BATCH_INVARIANT"]
assert layer_of(torch.float32).shared["batch_invariant"] is False

table = torch.zeros(len(KEYS), 8).int()
for attn_type in (AttentionType.ENCODER, AttentionType.ENCODER_ONLY):
    declined("attention type", lambda x=attn_type: layer_of(torch.float32, attn_type=x))
declined("16 bits", lambda: layer_of(torch.float32, kv_cache_dtype="fp8"))
declined("kv_cache_dtype", lambda: layer_of(torch.bfloat16, kv_cache_dtype="fp8_e5m2"))
declined("causal", lambda: metadata_of(table, table, causal=False))
declined("mm_req_doc_ranges", lambda: metadata_of(table, table, mm_req_doc_ranges={}))
for size in (101, 520):
    declined("head_size", lambda size=size: layer_of(torch.float32, size))
