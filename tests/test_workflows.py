"""The workflows' steps, run as Actions runs them: ``bash -e``, one after the other.

In place of the GPUs stand a CPU and the emulator, in place of the level a few short cases. The
set-up step meets a Python without torch, and a pip that installs nothing.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import turns

from pyfa import cli
from pyfa.backends import BACKENDS

yaml = pytest.importorskip("yaml", reason="reads workflows; comes with transformers")

ROOT = Path(__file__).parent.parent
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
# Chosen keys of a latent cache: float16 and bfloat16, which the CPU has too, and dtypes that only
# one of the two has. Of four kernels; those of other features are more, and larger.
SHORT = "quick --features topk --max-seqlen 40"
STANDS_FOR = {"hip": "emulator", "cuda": "torch"}


def documented() -> dict[str, Any]:
    text = (ROOT / "docs" / "ci.md").read_text()
    (found,) = re.findall(r"^```yaml\n(.*?)^```", text, re.M | re.S)
    workflow: dict[str, Any] = yaml.safe_load(found)
    return workflow


def own(name: str = "conformance") -> dict[str, Any]:
    workflow: dict[str, Any] = yaml.safe_load(
        (ROOT / ".github" / "workflows" / f"{name}.yml").read_text()
    )
    return workflow


def steps(job: dict[str, Any], **matrix: str) -> dict[str, str]:
    """The commands of a job by their names, with the matrix' values put in."""
    found = {}
    for step in job["steps"]:
        if "run" in step:
            text = step["run"]
            for name, value in matrix.items():
                text = text.replace(f"${{{{ matrix.{name} }}}}", value)
            found[step["name"]] = re.sub(r"\$\{\{ inputs\.level.*?\}\}", "full", text)
    return found


def bash(command: str, folder: Path, options: str = "-e", **environment: str) -> str:
    ended = subprocess.run(
        ["bash", "--noprofile", "--norc", *options.split(), "-c", command],
        cwd=folder,
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
    )
    assert ended.returncode == 0, f"{command}\n{ended.stdout}{ended.stderr}"
    return ended.stdout


def test_the_projects_workflow_is_the_documented_one() -> None:
    jobs = own()["jobs"]
    told = documented()["jobs"]
    assert set(jobs) == {"conformance", "compare"}
    for name, job in jobs.items():
        assert steps(job) == steps(told[name])
        assert {k: v for k, v in job.items() if k != "steps"} == {
            k: v for k, v in told[name].items() if k != "steps"
        }


def test_every_job_names_its_backend_and_is_strict() -> None:
    job = own()["jobs"]["conformance"]
    assert job["env"]["PYFA_STRICT"] == "1"
    assert {each["backend"] for each in job["strategy"]["matrix"]["include"]} <= set(BACKENDS)
    assert "--backend ${{ matrix.backend }}" in steps(job)["Conformance"]
    extras = re.findall(r"^(\w+) = \[", (ROOT / "pyproject.toml").read_text(), re.M)
    assert {each["extras"] for each in job["strategy"]["matrix"]["include"]} <= {"", *extras}


def test_pull_requests_are_checked() -> None:
    workflow = own("checks")
    # YAML 1.1 reads the key "on" as a boolean.
    assert "pull_request" in workflow[True]
    (command,) = steps(workflow["jobs"]["checks"]).values()
    assert (ROOT / command).stat().st_mode & 0o111


@pytest.mark.parametrize("job", ["fuzz", "arguments"])
def test_the_nightly_commands(job: str) -> None:
    """That they are commands that exist, with these backends."""
    workflow = own("nightly")
    assert "schedule" in workflow[True]
    matrix = workflow["jobs"][job].get("strategy", {"matrix": {"include": [{}]}})["matrix"]
    for values in matrix["include"]:
        assert values.get("backend", "torch") in BACKENDS
        *_, command = steps(workflow["jobs"][job], **values).values()
        script = (ROOT / command.split()[1]).read_text()
        for option in re.findall(r"--[a-z]+", command):
            assert f'"{option}"' in script, option


def test_all_that_has_turns_runs_at_night() -> None:
    """Each file that asks whose turn it is, and each test that plants a fault."""
    job = own("nightly")["jobs"]["plans"]
    assert job["env"] == {turns.ALL: "1"}
    *commands, of_hip = list(steps(job).values())[1:]
    run = [ROOT / part for text in commands for part in text.split() if part.startswith("tests/")]
    takes_turns = re.compile(
        r"turns\.(some|cases|faults|all_run)\(|mark\.night|ptxas\.by_turns\("
        r"|def test\w*\([^)]*\bplant\b|def test_resources\("
    )
    files = {*(ROOT / "tests").rglob("test_*.py")} - {Path(__file__)}
    asking = {path for path in files if takes_turns.search(path.read_text())}
    assert len(asking) > 20
    for path in asking:
        assert path in run or not set(path.parents).isdisjoint(run), path
    assert cli.parser().parse_args(of_hip.split()[1:]).all


@pytest.mark.parametrize("all_of_them", ["", "1"])
def test_turns(all_of_them: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One in so many of each kind, at least one, the same again; those of a longer list that a
    shorter one has are the first to be taken."""
    monkeypatch.setenv(turns.ALL, all_of_them)
    things = [(kind, number) for kind in "ab" for number in range(40)] + [("c", 0)]
    found = turns.some(things, 8, kind=lambda thing: thing[0], name=str)
    assert found == turns.some(things, 8, kind=lambda thing: thing[0], name=str)
    assert found == [thing for thing in things if thing in found]
    counts = [sum(thing[0] == kind for thing in found) for kind in "abc"]
    assert counts == ([40, 40, 1] if all_of_them else [5, 5, 1])


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_pip_knows_an_index_of_cpu_builds(path: Path) -> None:
    """The default index's torch is a CUDA build, which does not go with the versions pinned for a
    machine without a GPU."""
    workflow = yaml.safe_load(path.read_text())
    assert workflow["env"]["PIP_EXTRA_INDEX_URL"] == "${{ vars.TORCH_CPU_INDEX }}"


@pytest.mark.parametrize("options", ["-e", "-e -o pipefail", "-eu"])
@pytest.mark.parametrize("torch", ["none", "cuda"])
def test_the_set_up_step(options: str, torch: str, tmp_path: Path) -> None:
    """Where torch is missing it once ended here, with status 1 and without a word."""
    shutil.copytree(ROOT / "ci", tmp_path / "ci")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    # A Python whose environments are itself, whose torch is as told, whose pip does nothing.
    stand_in = tmp_path / "bin" / "python3"
    stand_in.parent.mkdir()
    version = {"none": "exit 1", "cuda": "echo 2.11.0+cu130; exit 0"}[torch]
    stand_in.write_text(
        f"""#!/usr/bin/env bash
case "$*" in
  "-m venv"*) mkdir -p "${{@: -1}}/bin"; cp "$0" "${{@: -1}}/bin/python"; exit 0 ;;
  "-m pip"*) exit 0 ;;
esac
if [ "$1" = - ] && [ $# = 2 ]; then echo "$0"; exit 0; fi
if [ "$1" = - ]; then {version}; fi
exec {sys.executable} "$@"
"""
    )
    stand_in.chmod(0o755)
    path = tmp_path / "path"
    for job in (own()["jobs"]["conformance"], own()["jobs"]["compare"]):
        path.write_text("")
        step = steps(job, extras="compile")["Set up pyfa"]
        bash(step, tmp_path, options, PYTHON=str(stand_in), GITHUB_PATH=str(path))
        assert path.read_text() == f"{tmp_path}/.venv/bin\n"


@pytest.mark.night
def test_the_jobs_steps(tmp_path: Path) -> None:
    if why := BACKENDS["emulator"].why_unavailable():
        pytest.skip(why)
    (tmp_path / "bin").mkdir()
    pyfa = tmp_path / "bin" / "pyfa"
    pyfa.write_text(f'#!/bin/sh\nexec {sys.executable} -m pyfa "$@"\n')
    pyfa.chmod(0o755)
    environment = {
        "PATH": f"{pyfa.parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "PYFA_STRICT": "1",
    }
    job = own()["jobs"]["conformance"]
    for each in job["strategy"]["matrix"]["include"]:
        backend = STANDS_FOR.get(each["backend"], each["backend"])
        found = steps(job, name=each["name"], backend=backend)
        command = found["Conformance"].replace("full", SHORT)
        assert command != found["Conformance"]
        # One process is enough for two reports of the same backend.
        done = {"cpu": "", "nvidia": "cp cpu.json nvidia.json; cp cpu.xml nvidia.xml"}
        bash(done.get(each["name"]) or command, tmp_path, **environment)
        assert (tmp_path / f"{each['name']}.xml").is_file()
    compare = steps(own()["jobs"]["compare"])
    del compare["Set up pyfa"]
    assert len(compare) == 3
    for command in compare.values():
        out = bash(command, tmp_path, **environment)
        assert out.splitlines()[-1].startswith("same: ")
    # Without --common it would not be green.
    plain = compare["AMD and CPU"].replace(" --common", "") + " || echo different"
    assert bash(plain, tmp_path, **environment).splitlines()[-1] == "different"
