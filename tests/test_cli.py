"""The command line: what it prints, where, and with which status."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import time
import xml.etree.ElementTree
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pyfa import cache, cli, env
from pyfa.backends import BACKENDS, NAMES
from pyfa.backends.common import calls
from pyfa.backends.hip import code, forward, plans
from pyfa.backends.hip.target import TARGET
from pyfa.backends.native import catalog
from pyfa.cli import problem
from pyfa.device import DEVICES
from pyfa.errors import CodeObjectError
from pyfa.plan import Plan
from pyfa.problem import FEATURES, Problem

EXAMPLE = Problem(1, 256, 256, 1, 1, 64, 64, "bfloat16", frozenset(), DEVICES["MI300X"], True)


def call(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Status, stdout and stderr of one command in this process."""
    try:
        status = cli.main(arguments)
    except SystemExit as left:  # argparse leaves this way
        status = int(left.code or 0)
    printed = capsys.readouterr()
    return status, printed.out, printed.err


def report(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    """The JSON report of a command that succeeds, with nothing before or after it."""
    status, out, err = call(capsys, *arguments, "--json")
    assert (status, err) == (0, "")
    data: dict[str, Any] = json.loads(out)
    assert data["schema"] == 1
    return data


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line on stderr of a command that was used wrongly."""
    status, out, err = call(capsys, *arguments)
    assert (status, out) == (2, "")
    assert err.count("\n") == 1
    assert err.startswith("pyfa")
    assert ": error: " in err
    return err


@pytest.fixture
def cache_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "cache"
    monkeypatch.setenv("PYFA_CACHE_DIR", str(path))
    return path


def fill(count: int) -> None:
    for index in range(count):
        key = cache.key(f"source {index}", [], "compiler 1", "gfx942")
        cache.get_or_build(
            "kernel",
            key,
            suffix=".hsaco",
            source=f"source {index}",
            meta={"arch": "gfx942"},
            build=lambda: b"x" * 1000,
        )


class TestMain:
    def test_both_ways_in_and_its_version(self) -> None:
        module = subprocess.run(
            [sys.executable, "-m", "pyfa", "--version"], capture_output=True, text=True
        )
        script = subprocess.run(
            [str(Path(sys.executable).parent / "pyfa"), "--version"],
            capture_output=True,
            text=True,
        )
        assert module.stdout == script.stdout
        assert module.stdout.startswith("pyfa 0.")

    @pytest.mark.parametrize(
        ("arguments", "expected"),
        [
            ((), "expected a command"),
            (("benchmark",), "invalid choice"),
            (("explain", "--heads", "x"), "expected a number, or two"),
            (("explain", "--heads", "8,2,1"), "expected a number, or two"),
            (("explain", "--heads", "8,3"), "a number of heads that divides q's 8"),
            (("explain", "--batch", "-1"), "expected a number"),
            (("explain", "--head-dim", "577"), "a head_dim from 1 to 576"),
            (("explain", "--window", "1"), "expected two numbers or none"),
            (("explain", "--dtype", "float64"), "expected one of float16"),
            (("explain", "--features", "gqa"), "for gqa, use --heads H,Hk"),
            (("explain", "--features", "softcaps"), "got 'softcaps'"),
            (("explain", "--device", "MI9"), "MI300X"),
            (("cache",), "required"),
            (("cache", "prune"), "--max-age or --max-size"),
            (("cache", "prune", "--max-size", "2Q"), "expected a size"),
            (("cache", "prune", "--max-age", "-1"), "expected 0 or more days"),
            (("conformance", "--level", "half"), "invalid choice"),
            (("conformance", "--backend", "vulkan"), "got 'vulkan'"),
            (("conformance", "--features", "nonsense"), "got 'nonsense'"),
            (("conformance", "--max-seqlen", "0"), "expected 1 or more"),
            (("conformance", "--orders", "0"), "expected 1 or more"),
            (("conformance", "--backend", "torch", "--orders", "2"), "torch cannot choose"),
            (("conformance", "--out", "/nowhere/x.json"), "no folder /nowhere"),
            (("conformance", "compare", "/nowhere/a", "/nowhere/b"), "/nowhere/a"),
            (("demo", "--seqlen", "8"), "expected 256 or more"),
        ],
    )
    def test_wrong_use_is_one_line(
        self, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], expected: str
    ) -> None:
        assert expected in refused(capsys, *arguments)

    def test_a_backend_that_is_not_here_is_one_line(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        name, why = next((n, w) for n in NAMES if (w := BACKENDS[n].why_unavailable()))
        assert f"{name}: {why}" in refused(capsys, "conformance", "--backend", name)

    def test_a_reader_that_leaves_is_no_crash(self) -> None:
        command = f"{sys.executable} -m pyfa info --json | head -1"
        ended = subprocess.run(command, shell=True, capture_output=True, text=True)
        assert ended.stderr == ""
        assert ended.stdout == "{\n"


class TestInfo:
    def test_has_every_backend_and_variable(self, capsys: pytest.CaptureFixture[str]) -> None:
        data = report(capsys, "info")
        assert [answer["name"] for answer in data["backends"]] == list(NAMES)
        ready = {answer["name"]: answer["ready"] for answer in data["backends"]}
        assert ready["torch"]
        about = {answer["name"]: answer["about"] for answer in data["backends"]}
        assert (about["emulator"] is not None) == ready["emulator"]
        assert [row["name"] for row in data["environment"]][: len(env.VARIABLES)] == list(
            env.VARIABLES
        )
        assert data["devices"][-1]["kind"] == "CPU"
        assert data["versions"]["torch"]

    def test_text_says_why_a_backend_is_not_ready(self, capsys: pytest.CaptureFixture[str]) -> None:
        status, out, err = call(capsys, "info")
        assert (status, err) == (0, "")
        for name in NAMES:
            why = BACKENDS[name].why_unavailable()
            assert f"{name:<8}  {(why or 'ready')[:60]}" in out
        assert out.isascii()

    def test_settings_that_are_wrong_are_shown(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("PYFA_STRICT", "maybe")
        monkeypatch.setenv("PYFA_BACKENDS", "torch")
        rows = {row["name"]: row for row in report(capsys, "info")["environment"]}
        assert "expected 1 or 0" in rows["PYFA_STRICT"]["error"]
        assert rows["PYFA_BACKENDS"]["error"] == "not a variable of pyfa"
        assert rows["PYFA_CHECK"]["error"] is None

    def test_cache(self, capsys: pytest.CaptureFixture[str], cache_dir: Path) -> None:
        assert report(capsys, "info")["cache"]["exists"] is False
        fill(2)
        kept = report(capsys, "info")["cache"]
        assert (kept["directory"], kept["entries"]) == (str(cache_dir), 2)
        cache_dir.chmod(0o777)
        assert "can be written by others" in report(capsys, "info")["cache"]["unusable"]


class TestExplain:
    def test_default_problem(self, capsys: pytest.CaptureFixture[str]) -> None:
        data = report(capsys, "explain")
        assert data["chosen"] in NAMES
        assert "q (1, 8192, 8, 64) bfloat16" in data["problem"]
        assert [answer["name"] for answer in data["backends"]] == list(NAMES)

    def test_flags(self, capsys: pytest.CaptureFixture[str]) -> None:
        status, out, _ = call(
            capsys, "explain", "--batch", "2", "--seqlen", "128,256", "--heads", "8,2",
            "--head-dim", "64,32", "--dtype", "fp16", "--window", "16,none", "--device", "mi300x",
        )  # fmt: skip
        assert status == 0
        assert " ".join(out.split()).startswith(
            "q (2, 128, 8, 64) float16, k (2, 256, 2, 64), v (2, 256, 2, 32), "
            "window=(16, None), on gfx942"
        )

    @pytest.mark.parametrize("name", problem.by_name())
    def test_each_feature_reaches_the_problem(
        self, capsys: pytest.CaptureFixture[str], name: str
    ) -> None:
        data = report(capsys, "explain", "--features", name)
        shown = {
            "softcap": "softcap=30.0", "dropout": "dropout_p=0.1", "chunk": "attention_chunk=8192"
        }.get(name, name)  # fmt: skip
        assert shown in data["problem"].split(", ")

    @pytest.mark.parametrize(
        "names",
        ["varlen,paged", "varlen,leftpad", "varlen,seqused,dropout,bias", "paged,leftpad,sinks",
         "varlen,backward,dlse,alibi,deterministic"],
    )  # fmt: skip
    def test_features_together(self, capsys: pytest.CaptureFixture[str], names: str) -> None:
        shown = report(capsys, "explain", "--features", names)["problem"]
        for name in names.split(","):
            assert name in shown

    def test_every_feature_can_be_said(self, capsys: pytest.CaptureFixture[str]) -> None:
        flags = {feature.flag.split()[0] for feature in FEATURES.values() if feature.flag}
        _, told, _ = call(capsys, "explain", "--help")
        assert [name for name in (*problem.by_name(), *flags) if name not in told] == []

    def test_it_takes_no_memory(self, capsys: pytest.CaptureFixture[str]) -> None:
        size = "1000000000"
        data = report(capsys, "explain", "--seqlen", size, "--heads", "64", "--batch", "64")
        assert size in data["problem"]

    def test_nobody_able_is_an_answer(self, capsys: pytest.CaptureFixture[str]) -> None:
        status, out, _ = call(capsys, "explain", "--dtype", "float8_e4m3fn")
        assert status == 0
        assert ("no backend can run this attention" in out) == ("* " not in out)


class TestCompileAndInspect:
    @pytest.fixture
    def few_plans(self, monkeypatch: pytest.MonkeyPatch) -> list[Plan]:
        """Four of the HIP plans, for which compiling all of them would take minutes."""
        long = replace(EXAMPLE, seqlen_q=4096, seqlen_k=4096)
        wanted = [
            forward.plan("hip", replace(long, head_dim=dim, head_dim_v=dim, features=features))
            for dim, features in (
                (64, frozenset()), (128, frozenset()), (64, frozenset({"softcap", "alibi"})),
            )
        ]  # fmt: skip
        wanted.append(plans.plan_of("hip", "combine", calls.DTYPE_CODES["bfloat16"]))
        assert set(wanted) <= set(catalog.all_plans(TARGET, "gfx942"))
        monkeypatch.setattr(catalog, "all_plans", lambda target, arch: wanted)
        return wanted

    def test_compile(
        self, capsys: pytest.CaptureFixture[str], tmp_path: Path, few_plans: list[Plan]
    ) -> None:
        status, out, _ = call(
            capsys, "compile", "--arch", "gfx942", "--out", str(tmp_path), "--json"
        )
        assert status == 0
        objects = json.loads(out)["objects"]
        assert len(objects) == len(list(tmp_path.glob("*.hsaco"))) == len(few_plans)
        for entry in objects:
            assert entry["spills"] == entry["scratch_bytes"] == 0
            assert entry["lds_bytes"] <= 65536
            (file,) = tmp_path.glob(f"*{entry['sha256'][:16]}.hsaco")
            assert hashlib.sha256(file.read_bytes()).hexdigest() == entry["sha256"]

    def test_a_plan_that_fails_is_named_and_the_others_are_built(
        self,
        capsys: pytest.CaptureFixture[str],
        monkeypatch: pytest.MonkeyPatch,
        few_plans: list[Plan],
    ) -> None:
        whole = code.compiled

        def compiled(plan: Plan, arch: str) -> code.Code:
            if plan == few_plans[1]:
                raise CodeObjectError(f"{plan} on {arch} spills 1 registers, 0 B of scratch")
            return whole(plan, arch)

        monkeypatch.setattr(code, "compiled", compiled)
        status, out, err = call(
            capsys, "compile", "--arch", "gfx942", "--all", "--bundle", "--json"
        )
        assert status == 1
        found = json.loads(out)
        assert [entry["plan"] for entry in found["objects"]] == [
            str(plan) for plan in few_plans if plan != few_plans[1]
        ]
        assert found["failed"] == [f"{few_plans[1]} on gfx942 spills 1 registers, 0 B of scratch"]
        assert f"pyfa compile: {found['failed'][0]}" in err

    def test_inspect(self, capsys: pytest.CaptureFixture[str], few_plans: list[Plan]) -> None:
        """Plain plans, or all of the kernel's. A tile of 32 × 64 is 4·32·64·D FLOP, 512 a clock."""
        found = report(capsys, "inspect", "attn_fwd", "--arch", "gfx942")["plans"]
        assert [p["constants"] for p in found] == [dict(plan.constants) for plan in few_plans[:2]]
        for plan in found:
            assert plan["mfma_clocks"] == 4 * 32 * 64 * plan["constants"]["HEAD_DIM"] / 512
            assert plan["instructions"]["trans"] == 32
            bound = plan["static_bound"]
            low, high = bound["tflops_at_sustained_clock"]
            assert 0 < low < high < 1307 / 2.1 * 1.23 + 1  # all FLOP of a card at 1.23 GHz
            share = bound["flops_per_clock_of_cu"] / 2048
            assert share == pytest.approx(min(1, 1 / plan["vector_over_mfma"]))
        everything = report(capsys, "inspect", "attn_fwd", "--arch", "gfx942", "--all")["plans"]
        assert everything[:2] == found
        assert everything[2]["title"] == "64/64 bf16 softcap"
        assert everything[2]["vector_clocks"] > 2 * found[0]["vector_clocks"]

    def test_what_inspect_prints(
        self,
        capsys: pytest.CaptureFixture[str],
        monkeypatch: pytest.MonkeyPatch,
        few_plans: list[Plan],
    ) -> None:
        monkeypatch.setenv("COLUMNS", "160")
        status, out, _ = call(capsys, "inspect", "attn_fwd", "--arch", "gfx942")
        assert status == 0
        assert "The bound is static, not measured" in out
        assert max(map(len, out.splitlines())) <= 160  # a pipe's width: no row in two
        mix, units = (out.split("\n\n")[n].splitlines() for n in (1, 2))
        assert mix[0].split()[:4] == ["instructions", "tile", "salu", "valu"]
        assert [line.split()[:4] for line in mix[1:]] == [
            ["64/64", "bf16", "plain", "32×64"], ["128/128", "bf16", "plain", "32×64"],
        ]  # fmt: skip
        assert [line.split()[3] for line in units[1:]] == ["1024", "2048"]

    @pytest.mark.parametrize(
        "arguments",
        [
            ("compile", "--arch", "gfx90a"),
            ("inspect", "attn_fwd", "--arch", "sm_90a"),
            ("inspect", "attn", "--arch", "gfx942"),
            ("inspect", "combine", "--arch", "gfx942"),
        ],
    )
    def test_what_there_is_not(
        self, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]
    ) -> None:
        status, out, error = call(capsys, *arguments)
        assert (status, out) == (2, "")
        assert error.startswith("pyfa: error: ")
        assert "expected one of" in error


class TestCache:
    def test_list_prune_clear(self, capsys: pytest.CaptureFixture[str], cache_dir: Path) -> None:
        assert report(capsys, "cache", "list")["entries"] == []
        fill(3)
        entries = report(capsys, "cache", "list")["entries"]
        assert [(entry["name"], entry["arch"]) for entry in entries] == [("kernel", "gfx942")] * 3
        status, out, _ = call(capsys, "cache", "list")
        assert status == 0
        assert f"{cache_dir}: 3 entries" in out
        assert entries[0]["key"][:8] in out

        largest = max(entry["bytes"] for entry in entries)
        removed = report(capsys, "cache", "prune", "--max-size", f"{largest}B")["entries"]
        assert [entry["key"] for entry in removed] == [entry["key"] for entry in entries[:2]]
        assert report(capsys, "cache", "prune", "--max-age", "1")["entries"] == []
        assert len(report(capsys, "cache", "clear")["entries"]) == 1
        assert report(capsys, "cache", "list")["entries"] == []

    def test_a_folder_that_is_refused_is_status_1(
        self, capsys: pytest.CaptureFixture[str], cache_dir: Path
    ) -> None:
        cache_dir.mkdir()
        cache_dir.chmod(0o777)
        status, out, err = call(capsys, "cache", "list")
        assert status == 1
        assert "can be written by others" in err
        assert "0 entries" in out

    @pytest.mark.parametrize(
        ("text", "expected"),
        [("500M", 5e8), ("2GB", 2e9), ("1.5g", 1.5e9), ("7", 7.0), ("7B", 7.0), ("3kB", 3e3)],
    )
    def test_sizes(self, text: str, expected: float) -> None:
        from pyfa.cli.cache import _bytes

        assert _bytes(text) == expected


class TestConformance:
    def test_run_writes_what_was_asked_for(
        self, capsys: pytest.CaptureFixture[str], tmp_path: Path
    ) -> None:
        out, junit = tmp_path / "report.json", tmp_path / "report.xml"
        arguments = ("conformance", "--backend", "torch", "--features", "batch_idx",
                     "--max-seqlen", "64")  # fmt: skip
        data = report(capsys, *arguments, "--out", str(out), "--junit", str(junit))
        assert data["command"] == "conformance"
        assert json.loads(out.read_text())["schema"]
        assert xml.etree.ElementTree.parse(junit).getroot() is not None

        assert report(capsys, "conformance", "compare", str(out), str(out))["schema"] == 1
        status, text, _ = call(capsys, "conformance", "compare", str(out), str(out))
        assert (status, bool(text)) == (0, True)

    def test_a_failed_case_is_status_1(
        self,
        capsys: pytest.CaptureFixture[str],
        monkeypatch: pytest.MonkeyPatch,
        tmp_path: Path,
        nothing_bound: Callable[[], None],
    ) -> None:
        good, bad = tmp_path / "good.json", tmp_path / "bad.json"
        arguments = ("conformance", "--backend", "torch", "--features", "batch_idx",
                     "--max-seqlen", "32", "--out")  # fmt: skip
        assert call(capsys, *arguments, str(good))[0] == 0
        # Of the class: the undone change of an instance would stay as its attribute.
        backend = type(BACKENDS["torch"])
        bind = backend.bind

        def wrong(*described: Any) -> Any:
            run = bind(*described)

            def run_wrong(*tensors: torch.Tensor) -> list[torch.Tensor]:
                out, *rest = run(*tensors)
                return [out * 1.25, *rest]

            return run_wrong

        monkeypatch.setattr(backend, "bind", wrong)
        # The same calls came before, and their runs are kept.
        nothing_bound()
        status, text, _ = call(capsys, *arguments, str(bad))
        assert status == 1
        assert text
        assert call(capsys, "conformance", "compare", str(good), str(bad))[0] == 1


class TestDemo:
    def test_its_report(self) -> None:
        """Also that progress stays off stdout. Who is faster on so short a job is not judged:
        each side repeats it for a tenth of a second in place of three. A process of its own, 4 s
        to import, has each side at one length, and not at the other."""
        short = """
import sys
from pyfa.cli import demo, main, measure

of_its_own = demo._run_side
demo._SECONDS = 0.1
demo._run_side = lambda spec, folder: (
    of_its_own(spec, folder) if spec.seqlen == 512 else measure.measure(spec)
)
sys.exit(main())
"""
        ended = subprocess.run(
            [sys.executable, "-c", short, "demo", "--seqlen", "512", "--json"],
            capture_output=True,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        assert ended.returncode in (0, 1), ended.stderr
        data = json.loads(ended.stdout)
        assert [(side["name"], side["seqlen"]) for side in data["sides"]] == [
            ("pyfa", 512), ("naive", 512), ("pyfa", 256), ("naive", 256),
        ]  # fmt: skip
        assert [error["name"] for error in data["errors"]] == ["out", "dq", "dk", "dv"]
        for error in data["errors"]:
            assert 0 < error["pyfa"] <= error["allowed"]
        for side in data["sides"]:
            assert side["measured"]["forward"] > 0
            assert side["measured"]["runs"] >= 1
        ours, plain = data["sides"][:2]
        assert plain["measured"]["extra_bytes"] > ours["measured"]["extra_bytes"]
        assert data["checks"]["errors within the conformance rule"]
        assert (ended.returncode == 0) == all(data["checks"].values())

    def test_a_wrong_result_is_found(self, tmp_path: Path) -> None:
        """The yardstick itself: results that are off by more than the rule allows are named."""
        import torch

        from pyfa.cli import demo
        from pyfa.cli.measure import Spec, inputs, naive

        spec = Spec("pyfa", "cpu", 256, 2, 16, "float32", True, 0.0, "")
        truth, _ = demo._reference_head(spec)
        plain = {name: x.float() for name, x in truth.items()}
        torch.save(plain, tmp_path / "naive.pt")
        torch.save(plain, tmp_path / "pyfa.pt")
        assert [error.message for error in demo._errors(spec, tmp_path)] == [""] * 4
        torch.save(plain | {"dk": plain["dk"] * 1.001}, tmp_path / "pyfa.pt")
        wrong = {error.name: error.message for error in demo._errors(spec, tmp_path)}
        assert wrong["dk"].startswith("dk: max error")
        assert wrong["dq"] == ""

        q, k, v, _ = inputs(spec, spec.seqlen)
        out = naive(q.double(), k.double(), v.double(), causal=True)[:, :, :1]
        assert torch.allclose(out, truth["out"], rtol=0, atol=1e-12)


class TestProgress:
    def test_piped_progress_is_plain_and_rare(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from pyfa.cli import console

        now = 0.0
        monkeypatch.setattr(time, "monotonic", lambda: now)
        with console.progress("work") as show:
            for done in range(100):
                now += 1.0
                show(done, 100, f"case {done}")
        printed = capsys.readouterr()
        assert printed.out == ""
        assert printed.err.splitlines()[0] == "work: 9/100 about 2 min left case 9"
        assert len(printed.err.splitlines()) == 10
        assert printed.err.isascii()
