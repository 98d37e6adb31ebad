"""The scripts in benchmarks/ that a GPU run goes through: what they parse, count and compute."""

from __future__ import annotations

import importlib
import itertools
import sys
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

import pyfa
from pyfa import bench
from pyfa.backends.cuda import plans
from pyfa.backends.cuda.target import TARGET
from pyfa.backends.hip import code
from pyfa.backends.native import catalog
from pyfa.bench import timing
from pyfa.conformance import grid
from pyfa.conformance.cases import Case, packed
from pyfa.conformance.report import Report

SCRIPTS = Path(__file__).parents[2] / "benchmarks"

# As Nsight Compute 2025 prints it with --csv --print-units base, written by hand: its own messages
# and the program's output come first, a line a metric after.
_HEAD = (
    '"ID","Process ID","Process Name","Host Name","Kernel Name","Context","Stream","Block Size",'
    '"Grid Size","Device","CC","Section Name","Metric Name","Metric Unit","Metric Value"'
)
_KERNELS = (
    ("attention_forward", (268435456, 201326592, 67108864, 40000000, 36000000)),
    ("void at::native::softmax<float, 4>(T1 *, int)", (1000, 600, 400, 50, 40)),
)
_NAMES = (
    ("dram__bytes.sum", "byte"), ("dram__bytes_read.sum", "byte"),
    ("dram__bytes_write.sum", "byte"), ("lts__t_sectors.sum", "sector"),
    ("lts__t_sectors_srcunit_tex.sum", "sector"),
)  # fmt: skip


def recorded(problems: int = 0) -> str:
    """The table of these kernels; or of so many problems that run them, each behind its mark."""
    mark = ("at::cuda::<unnamed>::spin_kernel(long)", (7, 7, 7, 7, 7))
    lines = ["==PROF== Connected to process 4711 (/usr/bin/python3.12)", "a line of the program",
             '==PROF== Profiling "attention_forward" - 0: 0%....50%....100% - 1 pass',
             "==PROF== Disconnected from process 4711", _HEAD]  # fmt: skip
    for number, (kernel, values) in enumerate((mark, *_KERNELS) * problems or _KERNELS):
        start = f'"{number}","4711","python3.12","127.0.0.1","{kernel}","1","7","(128, 1, 1)"'
        lines += [
            f'{start},"(64, 1, 1)","0","9.0","Command line profiler metrics","{name}","{unit}",'
            f'"{value:,}"'
            for (name, unit), value in zip(_NAMES, values, strict=True)
        ]
    return "\n".join(lines) + "\n"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Imports a script by its name; all of them are forgotten afterwards."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    before = set(sys.modules)

    def load(name: str) -> ModuleType:
        return importlib.import_module(name)

    yield load
    for name in set(sys.modules) - before:
        file = getattr(sys.modules[name], "__file__", None)
        if file and Path(file).parent == SCRIPTS:
            del sys.modules[name]


def test_ncus_table_is_read(script: Any) -> None:
    ncu = script("ncu")
    kernels = ncu.parse(recorded())
    assert [one["kernel"] for one in kernels] == [name for name, _ in _KERNELS]
    assert kernels[0]["dram__bytes.sum"] == 268435456.0
    assert ncu.totals(kernels) == {
        "dram_bytes": 268436456.0, "dram_read_bytes": 201327192.0, "dram_write_bytes": 67109264.0,
        "l2_bytes": 36000040.0 * 32, "l2_all_bytes": 40000050.0 * 32,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("==ERROR== ERR_NVGPUCTRPERM - The user does not have permission", "ERR_NVGPUCTRPERM"),
        ("", "nothing"),
        (recorded().replace('"268,435,456"', '"n/a"'), "no dram__bytes.sum on this GPU"),
        (recorded().replace('"byte"', '"Gbyte"'), "got Gbyte"),
    ],
)
def test_what_is_no_table_is_said(script: Any, text: str, expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        script("ncu").parse(text)


def test_the_command_names_every_metric_that_is_read(script: Any) -> None:
    ncu = script("ncu")
    command = ncu.command(["python", "x.py"])
    assert command[0] == "ncu"
    assert command[-2:] == ["python", "x.py"]
    assert command[command.index("--metrics") + 1].split(",") == [name for name, _ in _NAMES]


def test_measured_bytes_stand_beside_the_formulas(
    script: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    traffic = script("hbm_traffic")
    told = {"compulsory_bytes": 100, "estimated_bytes": 110, "requested_bytes": 1000}
    said = "ran 0\nfailed 1 OutOfMemoryError: no room\nran 2\n" + recorded(problems=3)

    def run(command: list[str], **options: Any) -> SimpleNamespace:
        assert command[-3:-1] == ["--quick", "--until"]
        return SimpleNamespace(stdout=said, stderr="", returncode=0)

    monkeypatch.setattr(traffic.subprocess, "run", run)
    rows = traffic.measured(4, ["--quick"], 5.0)
    assert [row.get("dram_bytes") for row in rows] == [268436456.0, None, 268436456.0, None]
    assert [len(rows[number]["kernels"]) for number in (0, 2)] == [2, 2]
    assert rows[1]["why_not"] == "OutOfMemoryError: no room"
    assert rows[3]["why_not"] == "not run: 5 s were over"
    far = {**told, "side": "pyfa", "passes": "forward", "seqlen": 16384, "dram_bytes": 111.0}
    assert traffic.apart(far)
    assert not traffic.apart(far | {"dram_bytes": 109.0})
    assert not traffic.apart(far | {"seqlen": 4096})
    assert not traffic.apart(far | {"side": "naive"})


@pytest.mark.parametrize("passes", ["forward", "backward"])
def test_cases_are_modeled_and_run(script: Any, passes: str) -> None:
    traffic = script("hbm_traffic")
    for side in ("naive", "pyfa"):
        case = traffic.Case(side, passes, 256, 2, 64, True)
        told = traffic.model(case, "MI300X")
        assert told["compulsory_bytes"] <= told["estimated_bytes"] + 2 * 256 * 4
        assert told["estimated_bytes"] <= told["requested_bytes"]
        traffic.run(case, "cpu")


def test_a_backend_that_does_not_tell_its_tiles_is_said(
    script: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    traffic = script("hbm_traffic")
    monkeypatch.setattr(traffic.problem, "kernels_of", lambda *x: ((), "nobody tells"))
    told = traffic.model(traffic.Case("pyfa", "forward", 256, 2, 64, True), "H200")
    assert told["not_told"] == "nobody tells"
    assert "estimated_bytes" not in told
    assert told["compulsory_bytes"] > 0


def test_naive_and_pyfa_are_timed_in_turns(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "_FLUSHED", {"cpu": 1 << 16})
    compared = script("naive_vs_pyfa")
    monkeypatch.setattr(compared, "SECONDS", 0.0)
    rows = compared.measure(128, 2, 64, True, timing.Clock(torch.device("cpu")))
    assert [(row["kind"], row["side"]) for row in rows] == [
        (kind, side) for kind in ("forward", "training") for side in ("naive", "pyfa")
    ]
    assert all(row["seconds"] > 0 for row in rows)
    scores = 2 * 128 * 128 * 4
    assert rows[0]["computed_bytes"] == 2 * scores + 128 * 2 * 64 * 4
    monkeypatch.setattr(compared, "room", lambda device: scores)
    rows = compared.measure(128, 2, 64, True, timing.Clock(torch.device("cpu")))
    assert "would need" in rows[0]["why_not"]
    assert "seconds" not in rows[0]


@pytest.fixture
def small_sides(script: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module ``sides`` on a CPU, with few samples and with a FlexAttention that pyfa computes:
    PyTorch's has no gradients on a CPU."""
    sides = script("sides")
    monkeypatch.setattr(timing, "_FLUSHED", {"cpu": 1 << 16})
    monkeypatch.setattr(sides, "SECONDS", 0.0)

    def small(leaves: Any, dout: torch.Tensor, options: dict[str, Any]) -> Any:
        def attend(*x: torch.Tensor) -> torch.Tensor:
            turned = [y.transpose(1, 2) for y in x]
            return pyfa.attention(*turned, backend="torch", **options).transpose(1, 2)

        turned = [x.detach().transpose(1, 2).requires_grad_() for x in leaves]
        return sides.Side(attend, turned, dout.transpose(1, 2))

    monkeypatch.setattr(sides, "flex", small)
    return sides


def _put(found: list[dict[str, Any]]) -> Any:
    return SimpleNamespace(put=found.append)


def test_mods_are_timed_in_turns_with_their_peer(
    script: Any, small_sides: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    mods = script("mods")
    for name, value in (("_TOKENS", 128), ("_HEADS", 2), ("_DOCUMENT", 32), ("_FIRST_ROWS", 32)):
        monkeypatch.setattr(mods, name, value)
    found: list[dict[str, Any]] = []
    ready = SimpleNamespace(wait=lambda: None)
    for name in mods.NAMES:
        mods.row_of((128, 64, name), "torch", ready, nullcontext(), _put(found))
    assert [row["mod"] for row in found] == list(mods.NAMES)
    for row in found:
        assert row["differs"] < 0.02
        for pass_ in ("forward", "backward"):
            assert row[f"{pass_}_speedup"] == pytest.approx(
                row[f"flex_{pass_}"] / row[pass_], rel=0.1
            )
        assert row["spread"][0] <= 1.0 <= row["spread"][1]
    clock = timing.Clock(torch.device("cpu"))
    row = mods.documents(clock, 128, 64, "torch")
    assert {"forward", "varlen_forward", "backward_speedup_of_varlen"} <= row.keys()
    assert [each["mod"] for each in mods.first_use(clock, 64, "torch")] == [
        "sliding", "documents", "softcap"
    ]  # fmt: skip
    assert mods.new_tensor(clock, 64, "torch").keys() == {
        "head_dim", "repeated_us", "new_us", "more_us"
    }  # fmt: skip


def test_a_mod_that_differs_from_its_peer_is_seen(
    script: Any, small_sides: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    mods = script("mods")
    monkeypatch.setattr(mods, "_TOKENS", 128)
    correct = small_sides.flex
    monkeypatch.setattr(small_sides, "flex", lambda leaves, dout, options: correct(
        leaves, dout, {"mask_mod": lambda b, h, i, j: i > j - 3}
    ))  # fmt: skip
    found: list[dict[str, Any]] = []
    ready = SimpleNamespace(wait=lambda: None)
    mods.row_of((128, 64, "causal"), "torch", ready, nullcontext(), _put(found))
    assert found[0]["differs"] > 0.1


def test_score_terms_are_timed_in_turns_with_their_peer(
    script: Any, small_sides: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    terms = script("score_terms")
    monkeypatch.setattr(terms, "_BATCH", 1)
    monkeypatch.setattr(terms, "_ROWS", 128)
    monkeypatch.setattr(terms, "_HEADS", 2)
    clock = timing.Clock(torch.device("cpu"))
    for name in (*terms.built_in(), *terms.mods()):
        row = terms.row_of(clock, 64, name, "torch", True)
        assert row["forward"] > 0
        assert row["backward"] > 0
        assert ("flex_backward" in row) is (name not in ("full", "causal", "sinks", "dropout"))
        assert row.get("differs", 0.0) < 0.02, name
    assert "flex_forward" not in terms.row_of(clock, 64, "softcap", "torch", False)


@pytest.mark.parametrize("name", ["naive_vs_pyfa", "long_context"])
def test_computed_memory_has_the_sums_of_the_backend_that_runs(script: Any, name: str) -> None:
    """The saved files are an H200's, where dQ adds up in float32: as the allocator counted."""
    computed = script("peaks").beyond_inputs
    for row in bench.load(SCRIPTS / "results" / f"{name}.json")["lengths"]:
        size = (row["seqlen"], row["heads"], row["head_dim"], row["causal"])
        now = computed(row["side"], row["kind"], *size, device="H200")
        assert row["computed_bytes"] == now
        if (row["side"], row["kind"]) == ("pyfa", "training"):
            assert row["extra_bytes"] == pytest.approx(now, rel=0.01)


def test_lengths_end_where_they_should(script: Any) -> None:
    compared = script("naive_vs_pyfa")
    assert compared.lengths(262_144) == [128 << n for n in range(12)]
    assert compared.lengths(64) == [64]


def test_long_context_is_right_and_finds_what_is_wrong(
    script: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    long = script("long_context")
    arguments = ["long_context.py", "--seqlen", "256", "--heads", "2", "--head-dim", "64"]
    monkeypatch.setattr(sys, "argv", arguments)
    assert long.main() == 0
    assert "backward_tflops" in capsys.readouterr().out
    step = long.step
    monkeypatch.setattr(long, "step", lambda x, causal: step(x, not causal))
    assert long.main() == 1


def test_one_command_runs_all_and_says_what_failed(
    script: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gpu = script("gpu")
    ran: list[list[str]] = []

    def run(command: list[str], check: bool) -> SimpleNamespace:
        ran.append(command)
        return SimpleNamespace(returncode=2 if "hbm_traffic.py" in " ".join(command) else 0)

    monkeypatch.setattr(gpu.subprocess, "run", run)
    monkeypatch.setattr(sys, "argv", ["gpu.py"])
    assert gpu.main() == 1
    assert "failed: hbm_traffic\n" in capsys.readouterr().err
    assert len(ran) == len(bench.SUITES) + 4
    for command in ran:
        for name in command[1:]:
            if name.endswith(".py"):
                assert Path(name).is_file()


_SANITIZED = """========= COMPUTE-SANITIZER
========= Error: Race reported between Read access at attn_bwd+0x8a60
=========     and Write access at attn_bwd+0x8ab0 [96 hazards]
=========
========= Invalid __global__ read of size 4 bytes
=========     at void at::native::elementwise_kernel<128, 2>(int)+0x30
=========
========= RACECHECK SUMMARY: 1 hazards displayed (1 errors, 0 warnings)
"""


def test_a_sanitizers_reports_are_told_apart(
    script: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sanitize = script("sanitize")

    class Program:
        pid = 0

        def __init__(self, command: list[str], stdout: Any, **options: Any) -> None:
            assert options["env"]["PYTORCH_NO_CUDA_MEMORY_CACHING"] == "1"
            log = _SANITIZED if "--share 1" in " ".join(command) else _SANITIZED.splitlines()[-1]
            Path(command[command.index("--log-file") + 1]).write_text(log)
            stdout.write("ran: passed one \nof the program\nran: refused other \n")

        def wait(self, seconds: float) -> int:
            return 0

    monkeypatch.setattr(sanitize.subprocess, "Popen", Program)
    arguments = ["sanitize.py", "--cases", "5", "--jobs", "2", "--tools"]
    monkeypatch.setattr(sys, "argv", [*arguments, "memcheck"])
    assert sanitize.main() == 1
    said = capsys.readouterr().out.splitlines()[-1]
    # Five cases in two shares, of each of which two ran.
    for part in ("'passed': 2, 'refused': 2", "'not_run': 1", "'of_our_kernels': 1",
                 "'of_others': 1"):  # fmt: skip
        assert part in said
    options = ["--cases", "4", "--jobs", "2", "--tools"]
    monkeypatch.setattr(sys, "argv", ["sanitize.py", *options, "racecheck"])
    assert sanitize.main() == 0  # of barriers of some warps it knows nothing
    monkeypatch.setattr(sys, "argv", ["sanitize.py", *options, "memcheck"])
    assert sanitize.main() == 1


def test_on_hopper_its_own_kernels_are_sanitized(
    script: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    sanitize = script("sanitize")
    hopper = sanitize.device.DEVICES["H200"]
    cases = sanitize.chosen(200, hopper)
    assert len(set(cases)) == 200
    assert set(sanitize.LARGE_GRIDS) < set(cases)
    few_heads = set(sanitize.FEW_HEADS)
    assert few_heads < set(cases)
    assert not any(sanitize.own_plans(case, hopper) for case in few_heads)
    cases = [case for case in cases if case not in few_heads]
    plans = [sanitize.own_plans(case, hopper) for case in cases]
    assert all(plans)
    # Those of batch_invariant differ by a vote among the lanes of a row, those of chunks by a mask,
    # those of pages by how tiles are loaded.
    # Packed blocks have few rows. Whether a bias is copied in tiles depends on its tensor, which is
    # not made here. Plans for a score_mod are compiled for it.
    rest = {"INPUTS", "INVARIANT", "BANDED", "PAGE_ROWS", "PACKED"}
    tiles = {("SCORE", 5), ("SCORE", 6), ("TERMS", 36)}
    every, taken = (
        {plan for plan in found if not rest & {*dict(plan.constants)} | tiles & {*plan.constants}}
        for found in (catalog.all_plans(TARGET, "sm_90"), set().union(*plans))
    )
    every = {plan for plan in every if "/sm90/" in plan.kernel}
    assert {plan for plan in every if ("DTYPE", 1) in plan.constants} == taken
    for name in ("causal", "window", "gqa", "varlen", "seqused", "deterministic", "dlse"):
        assert any(name in case.features for case in cases)
    for case in sanitize.LARGE_GRIDS:
        groups = dict(sanitize.own_plans(case, hopper)[0].constants)["GROUPS"]
        blocks = -(-max(case.lengths_q) // (64 * groups)) * case.heads_q * case.batch
        assert blocks > 2 * hopper.units
    # Blocks merge chunks, and take a second work tile.
    assert set(sanitize.CHUNKS) < set(cases)
    for case in sanitize.CHUNKS[:-1]:
        values = dict(sanitize.own_plans(case, hopper)[0].constants)
        chunk = values["CHUNK_TILES"] * values["BLOCK_K"]
        assert min(case.lengths_k) > chunk
        assert min(case.lengths_q) > 64
        blocks = -(-max(case.lengths_q) // (64 * values["GROUPS"])) * case.heads_q * case.batch
        assert blocks > hopper.units
        assert values.get("CHUNK_SHARED", 0) == (case.head_dim <= 128)
        if case.page_size:
            assert values["WHOLE_PAGES"] == 1
            assert min(case.lengths_k) % case.page_size
    (parts,) = sanitize.own_plans(sanitize.CHUNKS[-1], hopper)
    assert "WHOLE_PAGES" not in dict(parts.constants)

    ran: list[str] = []

    class Program:
        def __init__(self, command: list[str], stdout: Any, **options: Any) -> None:
            ran.append(command[command.index("--tool") + 1])
            log = "========= ERROR SUMMARY: 0 errors"
            Path(command[command.index("--log-file") + 1]).write_text(log)
            stdout.write("ran: passed one \nkernel: cuda/sm90/attn_fwd.cu A=1\n")

        def wait(self, seconds: float) -> int:
            return 0

    monkeypatch.setattr(sanitize.subprocess, "Popen", Program)
    monkeypatch.setattr(sanitize, "facts", lambda: hopper)
    saved: dict[str, Any] = {}
    monkeypatch.setattr(sanitize.machine, "save", saved.__setitem__)
    arguments = ["sanitize.py", "--cases", "2", "--jobs", "2", "--save"]
    monkeypatch.setattr(sys, "argv", arguments)
    assert sanitize.main() == 0
    assert set(ran) == {"memcheck", "initcheck"}
    monkeypatch.setenv("PYFA_ARCH_TILES", "sm_80")
    sanitize.main()
    assert "racecheck" in ran
    assert set(saved) == {"sanitizer_cuda_sm_90", "sanitizer_cuda"}
    (kernels,) = {tuple(tool["kernels"]) for tool in saved["sanitizer_cuda_sm_90"]["tools"]}
    assert kernels == ("cuda/sm90/attn_fwd.cu A=1",)


def test_a_larger_sample_contains_a_smaller_one(script: Any) -> None:
    conformance = script("conformance")

    def drawn(sample: int, always: str = "") -> set[str]:
        options = SimpleNamespace(
            backend="torch", level="quick", only="", sample=sample, always=always
        )
        return {case.name for case in conformance.chosen(options)}

    few, more, every = drawn(20), drawn(60), drawn(0)
    assert (len(few), len(more)) == (20, 60)
    assert few < more < every
    assert drawn(20, "fp8") == few | {name for name in every if "fp8" in name}


@pytest.mark.parametrize(
    ("arguments", "name", "recorded"),
    [
        ((), "conformance_cuda_sm_90a", set()),
        (("--sample", "9"), "conformance_cuda_sm_90a_sample", {"sample"}),
        (("--only", "latent"), "conformance_cuda_sm_90a_latent", {"only"}),
        (("--sms", "2"), "conformance_cuda_sm_90a_2_sms", {"sms"}),
        (
            ("--only", "q65", "--sample", "9"),
            "conformance_cuda_sm_90a_q65_sample",
            {"only", "sample"},
        ),
    ],
)
def test_a_part_of_the_cases_is_saved_under_a_name_of_its_own(
    arguments: tuple[str, ...], name: str, recorded: set[str],
    script: Any, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    conformance = script("conformance")
    report = Report("cuda", "full", (), {"arch": "sm_90a"}, ())
    monkeypatch.setattr(conformance, "run", lambda *_: (report, 1))
    saved: dict[str, Any] = {}
    monkeypatch.setattr(conformance.machine, "save", saved.__setitem__)
    command = ["conformance.py", "--backend", "cuda", "--save", *arguments]
    monkeypatch.setattr(sys, "argv", command)
    conformance.main()
    assert list(saved) == [name]
    assert saved[name].keys() & {"only", "sample", "sms"} == recorded
    for argument in arguments[1::2]:
        assert any(argument in str(saved[name][key]) for key in recorded)


@pytest.mark.parametrize("option", ["--sms=2", "--tiles=sm_80"])
def test_grids_and_tiles_are_those_of_cuda(
    option: str, script: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    conformance = script("conformance")
    monkeypatch.setattr(conformance, "run", lambda *_: pytest.fail("has run"))
    monkeypatch.setattr(sys, "argv", ["conformance.py", "--backend", "torch", option])
    with pytest.raises(SystemExit):
        conformance.main()
    expected = f"{option.split('=')[0]} is for --backend cuda, not torch"
    assert expected in capsys.readouterr().err


def test_grids_are_those_of_a_gpu_with_few_sms(
    script: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = next(plan for plan in catalog.all_plans(TARGET, "sm_90") if plan.kernel in plans.COUNTED)
    most = plans.grid_of(plan, 1000, 1)
    for sms, expected in ((0, 132 * most), (2, 2 * most)):
        with monkeypatch.context() as patch:
            script("few_sms").run_on(sms, patch.setattr)
            assert plans.grid_of(plan, 1000, 132) == expected
    assert plans.grid_of(plan, 1000, 132) == 132 * most


def test_a_filter_without_cases_saves_nothing(
    script: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    conformance = script("conformance")
    command = ["conformance.py", "--backend", "torch", "--jobs", "1", "--only", "laten/", "--save"]
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit):
        conformance.main()
    assert "got 'laten/'" in capsys.readouterr().err


def test_kernels_of_cases_are_known_without_compiling_them(
    script: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel_cases = script("kernel_cases")
    monkeypatch.setattr(code, "load", lambda *_: pytest.fail("compiled"))
    monkeypatch.setattr(code, "begin", lambda *_: pytest.fail("compiled"))
    dims = {"head_dim": 576, "head_dim_v": 512, "heads_k": 1, "scale": 0.1}
    one, split, other, empty = (
        packed(((1,), (n,)), "latent", heads_q=heads, num_splits=splits, dtype="float16", **dims)
        for n, heads, splits in ((90, 100, 1), (90, 101, 2), (90, 4, 1), (0, 4, 1))
    )
    kernels_of = {case: kernel_cases.selected(case) for case in (one, split, other)}
    files = [{text.split()[0] for text in kernels_of[case]} for case in kernels_of]
    latent = "hip/attn_latent.hip"
    assert files == [{latent}, {latent, "hip/combine.hip"}, {"hip/attn_decode.hip"}]
    assert set().union(*kernels_of.values()) <= kernel_cases.SHIPPED.keys()
    # The smallest first, and one only if those before it left a kernel to it.
    assert kernel_cases.few(kernels_of) == [other, one, split]
    assert kernel_cases.few({one: kernels_of[one], other: kernels_of[one]}) == [other]
    assert kernel_cases.few({empty: kernels_of[one], one: kernels_of[one]}) == [one]


def test_the_quick_level_runs_both_kinds_of_mi300x_forwards(script: Any) -> None:
    """Each 16-bit type and head_dim up to 128 whose plain forwards have two: each has several
    cases, among them a causal one, grouped heads, lengths on the device, and rows that fill no
    workgroup. At head_dim 192 both kinds have a case with more rows than a workgroup."""
    kernel_cases = script("kernel_cases")
    declared = frozenset({"causal", "window", "gqa", "varlen", "seqused", "sinks", "dv"})
    found: dict[tuple[int, str, int], list[Case]] = {}
    for case in grid.cases("quick", declared, ("float16", "bfloat16")):
        if not case.features <= declared or case.head_dim not in (64, 96, 128, 192):
            continue
        for kernel in kernel_cases.selected(case):
            constants = dict(kernel_cases.SHIPPED[kernel].constants)
            if "WAVES" in constants and not constants["SCORE"]:
                key = case.head_dim, case.dtype, constants["WAVES"]
                found.setdefault(key, []).append(case)
    for dim, dtype, waves in itertools.product((64, 96, 128), ("float16", "bfloat16"), (4, 8)):
        cases = found[dim, dtype, waves]
        assert any(case.features & {"causal", "window"} for case in cases), (dim, dtype, waves)
        rows = 32 * waves
        assert any(max(case.lengths_q) % rows for case in cases)
        assert any(max(case.lengths_q) > rows for case in cases)
        assert any("gqa" in case.features for case in cases)
        if waves == 8:
            assert any(case.features >= {"varlen", "seqused", "causal"} for case in cases)
            assert any("causal" not in case.features for case in cases)
    wide = {key for key, cases in found.items() for case in cases
            if key[0] == 192 and max(case.lengths_q) > 32 * key[2]}  # fmt: skip
    assert {waves for _, _, waves in wide} == {4, 8}
