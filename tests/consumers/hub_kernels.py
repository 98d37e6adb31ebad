"""Hugging Face's kernels library with the folder of `pyfa hub export`, under transformers.

The program is started with the variable that the command prints and with nothing else changed: as
on NVIDIA, and with a torch that says it is a build for ROCm, where AITER's name is the fallback.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent

# What counts the calls, and what torch says of itself; then the program, as its own __main__.
STARTED = """
import json, runpy, sys
import torch
platform, program, name = sys.argv[1:]
torch.version.hip = "6.4" if platform == "ROCm" else None
calls = 0
from pyfa import api
def counted(function):
    def run(*arguments, **options):
        global calls
        calls += 1
        return function(*arguments, **options)
    return run
api.attention, api.attention_varlen = counted(api.attention), counted(api.attention_varlen)
sys.argv = [program, name]
runpy.run_path(program, run_name="__main__")
print(json.dumps({"name": "calls of pyfa", "calls": calls}))
"""


def started(platform: str, name: str, variables: dict[str, str]) -> subprocess.CompletedProcess:
    command = [sys.executable, "-c", STARTED, platform, str(HERE / "hub_program.py"), name]
    environment = {**os.environ, **variables}
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600)


def told(name: str, good: bool) -> None:
    print(json.dumps({"name": name, "error": float(not good), "limit": 0.0}), flush=True)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        for platform in ("CUDA", "ROCm"):
            export = (
                "import sys, torch\n"
                f"torch.version.hip = '6.4' if {platform!r} == 'ROCm' else None\n"
                "from pyfa import cli\nsys.exit(cli.main(['hub', 'export', sys.argv[1]]))"
            )
            line = subprocess.run(
                [sys.executable, "-c", export, folder], capture_output=True, text=True, check=True
            ).stdout.strip()
            variable, _, value = line.partition("=")
            assert variable == "LOCAL_KERNELS"
            assert ("kernels-community/aiter-flash-attn=" in value) == (platform == "ROCm")
            for name in ("flash_attention_2", "flash_attention_3", "pyfa/attention"):
                ended = started(platform, name, {variable: value})
                if ended.returncode:
                    sys.exit(ended.stderr)
                *lines, last = [x for x in ended.stdout.splitlines() if x.startswith("{")]
                for each in map(json.loads, lines):
                    print(json.dumps({**each, "name": f"{platform}, {name}, {each['name']}"}))
                calls = json.loads(last)["calls"]
                # 2 models of 2 layers, 3 maskings; Llama's 12 tokens, and 8 of continuous batching,
                # where prompts and decoding share a call, each in 2 layers.
                told(f"{platform}, {name}: pyfa ran {calls} times",
                     calls == 2 * 2 * 3 + 12 * 2 + 8 * 2)  # fmt: skip
        ended = started("CUDA", "flash_attention_2", {})
        told("without the variable there is no such kernel", ended.returncode != 0)


if __name__ == "__main__":
    main()
