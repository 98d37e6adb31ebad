"""`pyfa explain --model`: layers, bytes and caches of models, computed by hand beside each."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pyfa import cli
from pyfa.cli import model_config
from pyfa.cli.model_names import NAMES


def report(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert cli.main(["explain", "--device", "MI300X", "--json", *arguments]) == 0
    answer: dict[str, Any] = json.loads(capsys.readouterr().out)
    return answer


def heads(row: dict[str, Any]) -> tuple[int, ...]:
    names = ("layers", "heads_q", "heads_k", "head_dim", "head_dim_v")
    return tuple(row["attention"][name] for name in names)


# (model, flags, rows: (phase, layers, query heads, key heads, dims of K and V, window, bytes of one
# layer), bytes of the cache: needed, with every token).
# Bytes of a row: Q and O, K and V, then the LSE in float32. bfloat16: 2 bytes.
BY_HAND = [
    (
        "llama-3.1-8b", ["--seqlen", "8192", "--batch", "2"],
        [
            ("prefill", 32, 32, 8, 128, 128, None,
             2 * (2 * 8192 * 32 * 128 * 2 + 2 * 8192 * 8 * 128 * 2 + 8192 * 32 * 4)),
            ("decode", 32, 32, 8, 128, 128, None,
             2 * (2 * 32 * 128 * 2 + 2 * 8192 * 8 * 128 * 2 + 32 * 4)),
        ],
        (2_147_483_648, 2_147_483_648),  # 2 × 8192 tokens of 32 × 2 × 8 × 128 × 2 B = 131,072 B
    ),
    (
        "llama-3.1-70b", ["--seqlen", "4096", "--tp", "8"],
        [
            ("prefill", 80, 8, 1, 128, 128, None,
             2 * 4096 * 8 * 128 * 2 + 2 * 4096 * 128 * 2 + 4096 * 8 * 4),
            ("decode", 80, 8, 1, 128, 128, None, 2 * 8 * 128 * 2 + 2 * 4096 * 128 * 2 + 8 * 4),
        ],
        (167_772_160, 167_772_160),  # 4096 tokens of 80 × 2 × 1 × 128 × 2 B = 40,960 B
    ),
    (
        "mistral-7b", ["--seqlen", "16384"],
        [
            ("prefill", 32, 32, 8, 128, 128, 4096,
             2 * 16384 * 32 * 128 * 2 + 2 * 16384 * 8 * 128 * 2 + 16384 * 32 * 4),
            # Of 16384 keys the one query sees 4096.
            ("decode", 32, 32, 8, 128, 128, 4096,
             2 * 32 * 128 * 2 + 2 * 4096 * 8 * 128 * 2 + 32 * 4),
        ],
        (536_870_912, 2_147_483_648),  # 4096 and 16384 tokens of 131,072 B
    ),
    (
        "mixtral-8x7b", ["--seqlen", "1024,4096"],
        [
            ("prefill", 32, 32, 8, 128, 128, None,
             2 * 1024 * 32 * 128 * 2 + 2 * 4096 * 8 * 128 * 2 + 1024 * 32 * 4),
            ("decode", 32, 32, 8, 128, 128, None,
             2 * 32 * 128 * 2 + 2 * 4096 * 8 * 128 * 2 + 32 * 4),
        ],
        (536_870_912, 536_870_912),
    ),
    (
        "qwen3-8b", ["--seqlen", "2048"],
        [
            ("prefill", 36, 32, 8, 128, 128, None,
             2 * 2048 * 32 * 128 * 2 + 2 * 2048 * 8 * 128 * 2 + 2048 * 32 * 4),
            ("decode", 36, 32, 8, 128, 128, None,
             2 * 32 * 128 * 2 + 2 * 2048 * 8 * 128 * 2 + 32 * 4),
        ],
        (301_989_888, 301_989_888),  # 2048 tokens of 36 × 2 × 8 × 128 × 2 B = 147,456 B
    ),
    (
        "gemma-2-9b", ["--seqlen", "8192"],
        [
            ("prefill", 21, 16, 8, 256, 256, 4096,
             2 * 8192 * 16 * 256 * 2 + 2 * 8192 * 8 * 256 * 2 + 8192 * 16 * 4),
            ("prefill", 21, 16, 8, 256, 256, None,
             2 * 8192 * 16 * 256 * 2 + 2 * 8192 * 8 * 256 * 2 + 8192 * 16 * 4),
            ("decode", 21, 16, 8, 256, 256, 4096,
             2 * 16 * 256 * 2 + 2 * 4096 * 8 * 256 * 2 + 16 * 4),
            ("decode", 21, 16, 8, 256, 256, None,
             2 * 16 * 256 * 2 + 2 * 8192 * 8 * 256 * 2 + 16 * 4),
        ],
        # 21 layers of 8,192 B a token, 4096 and 8192 of them; or 42 layers with 8192.
        (21 * 8192 * (4096 + 8192), 42 * 8192 * 8192),
    ),
    (
        "gemma-3-27b", ["--seqlen", "8192"],
        [
            ("prefill", 52, 32, 16, 128, 128, 1024,
             2 * 8192 * 32 * 128 * 2 + 2 * 8192 * 16 * 128 * 2 + 8192 * 32 * 4),
            ("prefill", 10, 32, 16, 128, 128, None,
             2 * 8192 * 32 * 128 * 2 + 2 * 8192 * 16 * 128 * 2 + 8192 * 32 * 4),
            ("decode", 52, 32, 16, 128, 128, 1024,
             2 * 32 * 128 * 2 + 2 * 1024 * 16 * 128 * 2 + 32 * 4),
            ("decode", 10, 32, 16, 128, 128, None,
             2 * 32 * 128 * 2 + 2 * 8192 * 16 * 128 * 2 + 32 * 4),
        ],
        (52 * 1024 * 8192 + 10 * 8192 * 8192, 62 * 8192 * 8192),
    ),
    (
        "gpt-oss-120b", ["--seqlen", "4096"],
        [
            ("prefill", 18, 64, 8, 64, 64, 128,
             2 * 4096 * 64 * 64 * 2 + 2 * 4096 * 8 * 64 * 2 + 4096 * 64 * 4),
            ("prefill", 18, 64, 8, 64, 64, None,
             2 * 4096 * 64 * 64 * 2 + 2 * 4096 * 8 * 64 * 2 + 4096 * 64 * 4),
            ("decode", 18, 64, 8, 64, 64, 128, 2 * 64 * 64 * 2 + 2 * 128 * 8 * 64 * 2 + 64 * 4),
            ("decode", 18, 64, 8, 64, 64, None, 2 * 64 * 64 * 2 + 2 * 4096 * 8 * 64 * 2 + 64 * 4),
        ],
        (18 * 2048 * (128 + 4096), 36 * 2048 * 4096),
    ),
    (
        "deepseek-v3", ["--seqlen", "4096", "--tp", "8"],
        [
            ("prefill", 61, 16, 16, 192, 128, None,
             4096 * 16 * (192 + 128) * 2 * 2 + 4096 * 16 * 4),
            # The latent vector of 576 is K and V.
            ("decode", 61, 16, 1, 576, 512, None,
             16 * (576 + 512) * 2 + 4096 * 576 * 2 + 16 * 4),
        ],
        (287_834_112, 287_834_112),  # 4096 tokens of 61 × 576 × 2 B = 70,272 B, on every GPU
    ),
    (
        "bert-base", ["--batch", "4"],
        [("forward", 12, 12, 12, 64, 64, None, 4 * (4 * 512 * 12 * 64 * 2 + 512 * 12 * 4))],
        (0, 0),
    ),
    (
        "vit-base", [],
        # 14 × 14 patches and the class token.
        [("forward", 12, 12, 12, 64, 64, None, 4 * 197 * 12 * 64 * 2 + 197 * 12 * 4)],
        (0, 0),
    ),
    (
        "flux.1-dev", [],
        [
            ("forward", 19, 24, 24, 128, 128, None, 4 * 4608 * 24 * 128 * 2 + 4608 * 24 * 4),
            ("forward", 38, 24, 24, 128, 128, None, 4 * 4608 * 24 * 128 * 2 + 4608 * 24 * 4),
        ],
        (0, 0),
    ),
]  # fmt: skip


@pytest.mark.parametrize(("name", "flags", "rows", "cache"), BY_HAND, ids=lambda x: str(x)[:14])
def test_by_hand(
    name: str, flags: list[str], rows: list[tuple[Any, ...]], cache: tuple[int, int],
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    found = report(capsys, "--model", name, *flags)
    assert [row["phase"] for row in found["rows"]] == [row[0] for row in rows]
    for row, (_, *expected, window, one_layer) in zip(found["rows"], rows, strict=True):
        assert heads(row) == tuple(expected)
        assert row["attention"]["window"] == window
        assert row["bytes"] == expected[0] * one_layer
        assert row["bound_by"] in ("memory", "compute")
        # No faster than memory, at the data sheet's 5.3 TB/s, by more than rounding.
        assert row["at_least_seconds"] >= row["bytes"] / 5.3e12 * 0.999
        assert row["plan"] or row["why"]
    assert (found["cache_bytes"]["needed"], found["cache_bytes"]["every_token"]) == cache


def test_flops_and_time_by_hand(capsys: pytest.CaptureFixture[str]) -> None:
    """Full attention: 4·d FLOPs a pair, at 1307 TFLOP/s; a causal one has N·(N+1)/2 pairs."""
    (row, *_) = report(capsys, "--model", "vit-base", "--batch", "64")["rows"]
    assert row["flops"] == 12 * 64 * 12 * 197 * 197 * 4 * 64
    prefill = report(capsys, "--model", "llama-3.1-8b", "--seqlen", "8192")["rows"][0]
    assert prefill["flops"] == 32 * 32 * (8192 * 8193 // 2) * 4 * 128
    assert prefill["at_least_seconds"] >= prefill["flops"] / 1307.4e12


def test_masks_and_scores_reach_the_problem(capsys: pytest.CaptureFixture[str]) -> None:
    """softcap, sinks and windows are asked of every backend, so that the plan is theirs."""
    assert cli.main(["explain", "--device", "MI300X", "--model", "gpt-oss-20b"]) == 0
    text = capsys.readouterr().out
    assert "64/8 heads, head_dim 64, causal, window 128, sinks" in text
    assert "hip/attn_decode.hip" in text
    assert "It is a bound, not a prediction" in " ".join(text.split())
    assert cli.main(["explain", "--device", "MI300X", "--model", "gemma-2-9b"]) == 0
    text = capsys.readouterr().out
    assert "softcap 50" in text
    assert "SCORE=7" in text  # the kernel of a softcap alone
    assert "if layers with a window also keep every token" in text


@pytest.mark.parametrize(
    ("device", "kernel"), [("MI300X", "hip/attn_latent.hip"), ("H200", "cuda/sm90/attn_latent.cu")]
)
def test_latent_decode_runs_in_the_latent_kernel(
    device: str, kernel: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """As ``attention_latent`` runs it. A plain head_dim of 576 would be torch's."""
    prefill, decode = report(capsys, "--model", "deepseek-v3", "--device", device)["rows"]
    assert decode["plan"].startswith(f"{kernel} ")
    assert "LATENT" in decode["plan"].upper()
    assert decode["shape"]["latent"]
    assert not prefill["shape"]["latent"]


def test_latent_prefill_with_one_head_per_gpu_has_keys_and_values(
    capsys: pytest.CaptureFixture[str],
) -> None:
    prefill, _ = report(capsys, "--model", "deepseek-v3", "--tp", "128", "--seqlen", "512")["rows"]
    assert prefill["bytes"] == 61 * (512 * 2 * (192 + 128) * 2 + 512 * 4)
    assert "LATENT" not in prefill["plan"]


@pytest.mark.parametrize(
    ("config", "name"),
    [
        ("LlamaConfig", None), ("MistralConfig", "mistral-7b"), ("MixtralConfig", "mixtral-8x7b"),
        ("Qwen2Config", None), ("Qwen3Config", None), ("Gemma2Config", None),
        ("Gemma3TextConfig", None), ("GptOssConfig", "gpt-oss-120b"),
        ("DeepseekV3Config", "deepseek-v3"), ("BertConfig", "bert-base"),
        ("ViTConfig", "vit-base"),
    ],
)  # fmt: skip
def test_what_transformers_writes(config: str, name: str | None, tmp_path: Path) -> None:
    """Its own config classes, saved by itself; some have the sizes of a model known by name."""
    transformers = pytest.importorskip("transformers")
    written = getattr(transformers, config)()
    written.save_pretrained(tmp_path)
    model = model_config.load(str(tmp_path))
    assert sum(each.layers for each in model.prefill) == written.num_hidden_layers
    types = getattr(written, "layer_types", None) or []
    sliding = sum(each.layers for each in model.prefill if each.window is not None)
    if types:
        assert sliding == types.count("sliding_attention")
    if name is not None:
        assert model._replace(name="") == model_config.load(name)._replace(name="")


def test_language_models_inside_others() -> None:
    inner = dict(NAMES["gemma-3-27b"])
    outer = {"model_type": "gemma3", "text_config": inner, "vision_config": {}}
    assert model_config.read(outer, "x") == model_config.read(inner, "x")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "llama-9"], "expected a config.json or one of llama-3.1-8b"),
        (["--model", "llama-3.1-8b", "--tp", "3"], "a divisor of 32 query heads; got 3"),
        (["--model", "gemma-3-27b", "--tp", "0"], "--tp"),
        (["--model", "llama-3.1-8b", "--seqlen", "9,8"], "--seqlen"),
        (["--model", "llama-3.1-8b", "--dtype", "float8_e4m3fn"], "--dtype"),
        (["--tp", "2"], "--tp: only with --model"),
    ],
)
def test_wrong_use(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ("{}", "no num_hidden_layers"),
        ('{"num_hidden_layers": 2, "num_attention_heads": 4}', "no hidden_size"),
        ('{"num_hidden_layers": "2"}', "no num_hidden_layers"),
    ],
)
def test_a_config_that_lacks_something(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(text)
    assert cli.main(["explain", "--model", str(tmp_path)]) == 2
    assert message in capsys.readouterr().err


def test_more_gpus_than_key_heads_keep_one_each(capsys: pytest.CaptureFixture[str]) -> None:
    found = report(capsys, "--model", "llama-3.1-70b", "--tp", "16", "--seqlen", "1024")
    assert heads(found["rows"][0]) == (80, 4, 1, 128, 128)
    assert found["cache_bytes"]["needed"] == 1024 * 80 * 2 * 128 * 2
