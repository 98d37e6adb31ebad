"""``pyfa plan``: the table, JSON, pictures, and what is refused."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from pyfa import cli
from pyfa.backends.hip import code
from pyfa.device import DEVICES

SEED = ("--seqlen", "4096", "--heads", "32", "--head-dim", "128", "--dtype", "fp16")


def call(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    try:
        status = cli.main(["plan", *arguments])
    except SystemExit as left:
        status = int(left.code or 0)
    printed = capsys.readouterr()
    return status, printed.out, printed.err


def report(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    status, out, err = call(capsys, *arguments, "--json")
    assert (status, err) == (0, "")
    data: dict[str, Any] = json.loads(out)
    assert (data["schema"], data["command"]) == (1, "plan")
    return data


@pytest.mark.parametrize("device", DEVICES)
def test_it_works_for_every_named_device(capsys: pytest.CaptureFixture[str], device: str) -> None:
    backend = "hip" if DEVICES[device].arch == "gfx942" else "triton"
    arguments = (*SEED, "--device", device, "--backend", backend)
    data = report(capsys, *arguments, "--features", "backward")
    assert data["device"]["name"] == device
    assert data["costs"]["tiled"]["backward"]["dram"] > data["compulsory_bytes"]["backward"] * 0.999
    # The least of the problem: of a forward's 4.2 MB a head, with the LSE.
    assert data["compulsory_bytes"]["forward"] == 32 * (4 * 4096 * 128 * 2 + 4096 * 4)
    assert data["flops"] == {"forward": 32 * 4 * 4096**2 * 128, "backward": 32 * 10 * 4096**2 * 128}
    status, out, _ = call(capsys, *arguments)
    assert status == 0
    assert "134.7 MB" in out
    assert "ridge" in out


def test_masks_count(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--seqlen", "100,300", "--device", "H200", "--heads", "1")
    causal = report(capsys, *arguments, "--causal")
    assert causal["shape"]["visible_pairs"] == sum(200 + i + 1 for i in range(100))
    near = report(capsys, *arguments, "--causal", "--window", "10,5")
    assert near["shape"]["visible_pairs"] == 100 * 11
    both = report(capsys, *arguments, "--window", "10,5")
    assert both["shape"]["visible_pairs"] == sum(
        len(range(max(0, 200 + i - 10), min(300, 200 + i + 6))) for i in range(100)
    )
    full = report(capsys, *arguments, "--window", "none,none")
    assert full["shape"]["visible_pairs"] == 100 * 300


def test_decode_and_what_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--seqlen", "1,65536", "--heads", "32,8", "--head-dim", "128", "--device", "H200")
    data = report(capsys, *arguments, "--features", "paged", "--backend", "triton")
    assert data["least"]["forward"]["by"] == "memory"
    assert data["kernels"][0]["packed"] == 4
    assert any("page table" in text for text in data["left_out"])
    status, out, _ = call(capsys, *arguments, "--features", "bias")
    assert status == 0
    assert "Not counted: the bias" in out


def test_a_backend_without_tiles_and_a_device_without_peaks(
    capsys: pytest.CaptureFixture[str],
) -> None:
    status, out, _ = call(capsys, "--seqlen", "256", "--backend", "torch", "--device", "H200")
    assert status == 0
    assert "torch has no known tiles (--backend " in " ".join(out.split())
    assert "tiled, forward" not in out
    data = report(capsys, "--seqlen", "256", "--backend", "torch", "--device", "H200")
    assert data["kernels"] == []
    assert data["costs"]["tiled"] == {}
    assert data["costs"]["standard"]["forward"]["seconds"] > 0


def test_compiled_kernels_have_registers(capsys: pytest.CaptureFixture[str]) -> None:
    if code.why_unavailable():
        pytest.skip("no compiler for the kernels")
    _, out, _ = call(capsys, *SEED, "--device", "MI300X")
    assert "an upper bound" in out
    data = report(capsys, *SEED, "--device", "MI300X", "--compile")
    (kernel,) = data["kernels"]
    assert kernel["compiled"]
    assert kernel["registers"] > 128
    assert kernel["shared_bytes"] == sum(kernel["buffers"].values()) == 65536
    assert kernel["occupancy"]["share"] == 0.25


def test_a_billion_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    """7.8 million blocks of rows, each of which walks all keys, or those up to its diagonal."""
    tokens = 10**9
    size = ("--seqlen", str(tokens), "--heads", "1", "--head-dim", "64", "--device", "MI300X")
    full = report(capsys, *size)
    (kernel,) = full["kernels"]
    rows = kernel["block_q"]
    assert kernel["splits"] == 1
    blocks = -(-tokens // rows)
    once = tokens * 64 * 2  # Q, or the output; bytes of bfloat16
    requested = 2 * once + 2 * blocks * once + 4 * tokens  # with the LSE
    assert full["costs"]["tiled"]["forward"]["requested"] == requested
    causal = report(capsys, *size, "--causal")["costs"]["tiled"]["forward"]["requested"]
    walked = sum(min(tokens, first + rows) for first in range(0, tokens, rows))
    assert causal == 2 * once + 2 * walked * 64 * 2 + 4 * tokens


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--device", "MI9"), "MI300X"),
        (("--seqlen", "0"), "expected 1 or more"),
        (("--seqlen", "2147483648"), "expected at most 2,147,483,647"),
        (("--seqlen", "1000000000", "--batch", "2000000000"), "that PyTorch can describe"),
        (("--plot", "x.txt"), "expected a name that ends in .png, .svg, .pdf"),
        (("--plot", "/nowhere/x.png"), "there is no folder /nowhere"),
        (("--backend", "vulkan"), "got 'vulkan'"),
    ],
)
def test_wrong_use_is_one_line(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], expected: str
) -> None:
    if "--plot" in arguments:
        pytest.importorskip("matplotlib")
    status, out, err = call(capsys, *arguments)
    assert (status, out) == (2, "")
    assert err.count("\n") == 1
    assert expected in err


def test_a_picture_without_matplotlib_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    there = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "matplotlib" else there(name)
    )
    status, _, err = call(capsys, *SEED, "--plot", "x.png")
    assert status == 2
    assert (
        "--plot needs matplotlib, which the extra bench has: pip install 'pyfa-attention[bench]'"
        in err
    )


@pytest.mark.parametrize("device", ["MI300X", "A100-80GB"])
@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_pictures_are_drawn(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, device: str, suffix: str
) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / f"plan.{suffix}"
    status, out, err = call(
        capsys, *SEED, "--device", device, "--features", "backward", "--plot", str(path), "--json"
    )
    assert status == 0
    assert json.loads(out)["device"]["name"] == device
    assert f"wrote {path}" in err
    assert path.stat().st_size > 10_000


def test_the_timing_model_where_the_device_is_an_mi300x(
    capsys: pytest.CaptureFixture[str],
) -> None:
    from pyfa.backends.hip import runtime_timing

    if runtime_timing.why_unavailable():
        pytest.skip("no emulator or no code objects here")
    flags = (*SEED, "--device", "MI300X", "--compile")
    (answer,) = report(capsys, *flags)["timing_model"]
    assert answer["role"] == "forward"
    assert answer["tflops"][0] < answer["tflops"][1] < 1307
    _, out, _ = call(capsys, *flags)
    assert out.count("model, not measured") == 1
    assert report(capsys, *SEED, "--device", "H200")["timing_model"] == []
