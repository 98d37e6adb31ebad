"""The bundle: built, emulated, put into a wheel, and run from there byte for byte."""

import hashlib
import inspect
import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from pyfa import bundle, cache
from pyfa.backends.common.calls import DTYPE_CODES
from pyfa.backends.hip import code, samples
from pyfa.backends.hip.target import TARGET
from pyfa.backends.native import catalog
from pyfa.cli import main
from pyfa.emulator import hazards
from pyfa.errors import CodeObjectError

# One process builds the bundle, for all of these.
pytestmark = pytest.mark.xdist_group("bundle")

ROOT = Path(__file__).parent.parent.parent
BFLOAT16 = DTYPE_CODES["bfloat16"]


def is_chosen(plan):
    """Whether ``plan`` is of bfloat16 and without score terms. How a bundle is built and run does
    not depend on what is in it."""
    constants = dict(plan.constants)
    return (
        plan.kernel != "hip/bias_grad.hip"
        and constants.get("DTYPE", BFLOAT16) == BFLOAT16
        and samples.is_plain(plan)
        and not constants.get("TERM")
    )


PLANS = list(filter(is_chosen, catalog.chosen_plans(TARGET, "gfx942", False, (64,))))

# ``pyfa``, where an arch has no other plans, and the suite no cases but the quick level's of
# bfloat16 and without score terms: the full level's take two minutes. One process: the other core
# has tests to run.
OF_PLAIN = f"""
import os, sys
from pyfa.backends.hip import samples
from pyfa.backends.native import catalog
from pyfa.cli import main
from pyfa.conformance import grid

{inspect.getsource(is_chosen)}
BFLOAT16 = {BFLOAT16}
chosen, cases = catalog.chosen_plans, grid.cases
catalog.chosen_plans = lambda *of: list(filter(is_chosen, chosen(*of)))
grid.cases = lambda level, *of: [
    case
    for case in cases("quick", *of)
    if case.dtype == "bfloat16"
    and (case.kind == "kvcache" or case.features.isdisjoint({{"softcap", "alibi", "bias"}}))
]
os.cpu_count = lambda: 1
sys.exit(main(sys.argv[1:]))
"""

# Runs a forward and a backward in the emulator and writes which bytes ran.
COMMON = """
import json, sys, torch, pyfa
from pyfa.backends import BACKENDS

q = torch.ones(1, 100, 1, 64, dtype=torch.bfloat16, requires_grad=True)
pyfa.attention(q, q, q, causal=True, backend="emulator").sum().backward()
json.dump(BACKENDS["emulator"].kernel_digests(), open(sys.argv[1], "w"))
"""


def run(*command, cwd, **environment):
    ended = subprocess.run(
        [str(part) for part in command],
        capture_output=True,
        text=True,
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": "", **environment},
    )
    assert ended.returncode == 0, f"{command}\n{ended.stdout}{ended.stderr}"
    return ended.stdout


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A copy of what version control holds, with its bundle built: of head_dim 64, bfloat16 and no
    score terms, plans which other tests compile too. ``ci/wheel`` builds every plan and runs
    every case."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True).split():
        if name.split("/")[0] not in ("tests", "benchmarks") and (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    compile_bundle = [sys.executable, "-c", OF_PLAIN, "compile", "--arch", "gfx942", "--bundle"]
    selection = ("--head-dim", "64", "--json")
    report = json.loads(run(*compile_bundle, *selection, cwd=folder, PYTHONPATH=str(folder)))
    assert report["failed"] == []
    assert {row["hazards"] for row in report["objects"]} == {0}
    return folder


def manifest(folder):
    return json.loads((folder / "pyfa" / "_bundle" / "manifest.json").read_text())


def test_every_code_object_was_emulated(checkout):
    objects = manifest(checkout)["objects"].values()
    assert len(objects) == len(PLANS)
    for entry in objects:
        assert entry["emulated"]
        assert (checkout / "pyfa" / "_bundle" / entry["file"]).is_file()


def test_every_code_object_keeps_its_wait_states(checkout):
    """All that a wheel carries; ``pyfa compile --all`` holds every other plan to the same."""
    for entry in manifest(checkout)["objects"].values():
        data = (checkout / "pyfa" / "_bundle" / entry["file"]).read_bytes()
        assert hazards.check(data) == []


def test_a_bundle_with_a_hazard_is_refused(tmp_path, monkeypatch, capsys):
    """One s_nop of one plan a wait state shorter."""
    plan = next(
        plan for plan in catalog.common_plans(TARGET, "gfx942") if plan.kernel == "hip/append.hip"
    )
    good, (longer, shorter) = code.build(plan, "gfx942"), (b"\x01\0\x80\xbf", b"\0\0\x80\xbf")
    assert longer in good
    monkeypatch.setattr(catalog, "chosen_plans", lambda *_: [plan])
    monkeypatch.setattr(bundle, "FOLDER", tmp_path / "bundle")
    monkeypatch.setenv("PYFA_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(code, "build", lambda plan, arch: good.replace(longer, shorter, 1))
    assert main(["compile", "--arch", "gfx942", "--bundle"]) == 1
    assert not bundle.FOLDER.exists()
    assert [entry.plan for entry in cache.entries()] == [str(plan)]
    told = capsys.readouterr().err
    assert f"pyfa compile: {plan}: append at 0x" in told
    assert "and needs 2: " in told


def test_another_build_gives_the_same_bytes(checkout):
    """From another folder, in another process, and not from the cache: a large kernel and a small
    one."""
    digests = {entry["plan"]: entry["sha256"] for entry in manifest(checkout)["objects"].values()}
    for kernel in ("hip/attn_fwd.hip", "hip/gaps.hip"):
        plan = next(plan for plan in PLANS if plan.kernel == kernel)
        data = code.build(plan, "gfx942")
        assert hashlib.sha256(data).hexdigest() == digests[str(plan)]


def test_a_wheel_runs_its_own_bundle(checkout, tmp_path):
    """From a fresh environment: the digests in the report are those in the wheel."""
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", tmp_path, checkout,
        cwd=tmp_path)  # fmt: skip
    (wheel,) = tmp_path.glob("*.whl")
    env = tmp_path / "env"
    run(sys.executable, "-m", "venv", "--without-pip", env, cwd=tmp_path)
    python = env / "bin" / "python"
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))",
                    cwd=tmp_path).strip())  # fmt: skip
    # torch, numpy and what compiles the emulator's core come from this environment; pyfa does not.
    (site / "lent.pth").write_text(sysconfig.get_path("purelib") + "\n")
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-compile", "--no-deps",
        "--no-index", wheel, cwd=tmp_path)  # fmt: skip
    own = tmp_path / "cache"
    for path in cache.directory().glob("emulator-*"):  # 11 s to compile, and not of the bundle
        shutil.copytree(path, own / path.name)
    report = tmp_path / "report.json"
    script = tmp_path / "common.py"
    script.write_text(COMMON)
    run(python, script, report, cwd=tmp_path, PYFA_CACHE_DIR=str(own))
    ran = json.loads(report.read_text())
    verified = {e["plan"]: e["sha256"] for e in manifest(checkout)["objects"].values()}
    assert len(ran) >= 2
    assert ran.items() <= verified.items()
    # Nothing was compiled but the emulator itself.
    assert {path.name.split("-")[0] for path in own.iterdir() if path.is_dir()} == {"emulator"}
    told = json.loads(run(python, "-m", "pyfa", "info", "--json", cwd=tmp_path))["bundle"]
    assert len(told["objects"]) == len(verified)
    assert told["damaged"] == []


def test_damaged_bytes_are_refused(checkout, monkeypatch):
    folder = checkout / "pyfa" / "_bundle"
    key, entry = next(iter(manifest(checkout)["objects"].items()))
    monkeypatch.setattr(bundle, "FOLDER", folder)
    bundle.manifest.cache_clear()
    try:
        assert bundle.find("gfx942", key) == (folder / entry["file"]).read_bytes()
        assert bundle.find("gfx90a", key) is None
        data = bytearray((folder / entry["file"]).read_bytes())
        data[-1] ^= 1
        (folder / entry["file"]).write_bytes(data)
        with pytest.raises(CodeObjectError, match="not the file that was verified"):
            bundle.find("gfx942", key)
    finally:
        bundle.manifest.cache_clear()
