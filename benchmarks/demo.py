"""Run ``pyfa demo`` and save its report: ``python benchmarks/demo.py [arguments of pyfa demo]``."""

from __future__ import annotations

import json
import subprocess
import sys

import machine


def main() -> None:
    command = [sys.executable, "-m", "pyfa", "demo", "--json", *sys.argv[1:]]
    ended = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if ended.returncode > 1:
        sys.exit(ended.returncode)
    report = json.loads(ended.stdout)
    where = "cpu" if report["device"] == "CPU" else "gpu"
    print(machine.save(f"demo_{where}", {"report": report}))
    sys.exit(ended.returncode)


if __name__ == "__main__":
    main()
