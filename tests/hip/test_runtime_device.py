"""The runtime of the `hip` backend, against stand-ins for libamdhip64 that record every call.

No GPU and no ROCm: what is checked is which copy is called, in what order and with what bytes. Each
scenario is a function in ``runtime_scenarios.py`` and runs in a process of its own, where one copy,
two or none is mapped as a ROCm build of torch would have; that file says what stands in for torch.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from runtime_scenarios import IMAGE, STREAM, packed

from pyfa import abi
from pyfa.backends.hip import libamdhip64
from pyfa.backends.hip.runtime_device import DeviceRuntime
from pyfa.device import CPU, DEVICES, dies_by_driver
from pyfa.problem import Call, Problem, problem_of

HERE = Path(__file__).parent
MODULE, FUNCTION = 0x7F1000000000, 0x7F2000000000
REAL = [f"libamdhip64.so{suffix}" for suffix in (".7", ".6", ".5", "")]

Scenario = Callable[..., Any]


@pytest.fixture(scope="module")
def copies(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Stand-ins: two copies of one runtime, and one that lacks a function."""
    root = tmp_path_factory.mktemp("standins")
    system = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    compiler = [system] if system else [sys.executable, "-m", "ziglang", "cc"]
    built = {}
    for name, path, extra in (
        ("torch", "torch/lib/libamdhip64.so", []),
        ("rocm", "opt/rocm 7/lib/libamdhip64.so.7", []),
        ("old", "old/libamdhip64.so.5", ["-DLACKING"]),
    ):
        target = root / path
        target.parent.mkdir(parents=True)
        subprocess.run(
            [*compiler, "-shared", "-fPIC", "-O1", f'-DCOPY="{name}"', *extra,
             "-Wl,-soname,libamdhip64.so.7", str(HERE / "standin.c"), "-o", str(target)],
            check=True,
        )  # fmt: skip
        built[name] = str(target)
    return built


@pytest.fixture(scope="module")
def server() -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, str(HERE / "runtime_scenarios.py")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "log"


@pytest.fixture(params=["ctypes", "hip-python"])
def binding(request: pytest.FixtureRequest) -> str:
    """What launches."""
    if request.param == "hip-python":
        pytest.importorskip("rocm.bindings.hip", reason="hip-python is not installed")
    found: str = request.param
    return found


@pytest.fixture
def scenario(server: subprocess.Popen[str], log: Path, binding: str) -> Scenario:
    """Runs one in a process of its own and returns what it returns."""

    def run(name: str, *arguments: Any, **environment: str) -> Any:
        given = {"STANDIN_LOG": str(log), "STANDIN_PARAMS": str(abi.SIZE), "BINDING": binding}
        environment = {**given, **environment}
        asked = {"scenario": name, "arguments": arguments, "environment": environment}
        assert server.stdin is not None
        assert server.stdout is not None
        server.stdin.write(json.dumps(asked) + "\n")
        server.stdin.flush()
        answer = json.loads(server.stdout.readline())
        if "failed" in answer:
            pytest.fail(answer["failed"])
        return answer["value"]

    return run


def calls(log: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.read_text().splitlines()]


def named(log: Path, name: str) -> list[dict[str, Any]]:
    return [call for call in calls(log) if call["call"] == name]


def a_launch(copy: str, number: int, device: int, function: int = FUNCTION) -> dict[str, Any]:
    """The record of launch ``number`` of the scenario `launches`."""
    return {
        "copy": copy,
        "call": "hipModuleLaunchKernel",
        "function": function,
        "grid": [5 + number, 1, 1],
        "block": [256, 1, 1],
        "lds": 0,
        "stream": STREAM + device,
        "extra": 0,
        "device": device,
        "params": packed(number).hex(),
    }


# --- which copy -----------------------------------------------------------------------------------


@pytest.mark.parametrize("mapped", ["torch", "rocm"])
def test_the_mapped_copy_is_called_and_no_other(
    scenario: Scenario, copies: dict[str, str], log: Path, mapped: str
) -> None:
    elsewhere = copies["rocm" if mapped == "torch" else "torch"]
    paths = {"LD_LIBRARY_PATH": str(Path(elsewhere).parent), "ROCM_PATH": elsewhere}
    found = scenario("launches", [copies[mapped]], [0], **paths)
    assert found == {"reason": None, "copies": [copies[mapped]]}
    assert {call["copy"] for call in calls(log)} == {mapped}


def test_two_copies_are_a_reason_that_names_both(
    scenario: Scenario, copies: dict[str, str], log: Path
) -> None:
    both = [copies["torch"], copies["rocm"]]
    found = scenario("refused", both)
    assert "2 HIP runtimes are loaded" in found["reason"]
    assert "709" in found["reason"]
    assert all(path in found["reason"] for path in both)
    assert found["raised"] == ["RuntimeError", found["reason"]]
    assert not log.exists()


def test_one_file_under_two_names_is_one_copy(
    scenario: Scenario, copies: dict[str, str], tmp_path: Path, log: Path
) -> None:
    names = [str(tmp_path / "libamdhip64.so.7"), str(tmp_path / "libamdhip64.so")]
    Path(names[0]).symlink_to(copies["torch"])
    Path(names[1]).symlink_to(names[0])
    found = scenario("launches", names, [0])
    assert found == {"reason": None, "copies": [copies["torch"]]}
    assert len(named(log, "hipModuleLaunchKernel")) == 1


def test_nothing_mapped(scenario: Scenario) -> None:
    found = scenario("refused", [])
    assert found["reason"] == "no libamdhip64 is loaded, though torch is a ROCm 7.0.0 build"
    assert found["raised"] == ["RuntimeError", found["reason"]]
    assert found["copies"] == []


@pytest.mark.parametrize(("cuda", "build"), [(None, "CPU"), ("12.8", "CUDA 12.8")])
def test_other_builds_of_torch(scenario: Scenario, cuda: str | None, build: str) -> None:
    reason = f"torch has no HIP runtime loaded: this is a {build} build of torch"
    assert scenario("another_build", cuda) == reason


def test_a_system_that_lists_no_maps(scenario: Scenario) -> None:
    reason = scenario("unlisted")
    assert "the list of loaded libraries is not readable" in reason
    assert "/nowhere/maps" in reason


def test_a_runtime_that_is_loaded_later_is_found(
    scenario: Scenario, copies: dict[str, str]
) -> None:
    reasons = scenario("loaded_later", copies["torch"], copies["rocm"])
    # torch's copy stays the one in use: a second one that comes later changes nothing for it.
    assert [reason is None for reason in reasons] == [False, True, True]


def test_a_copy_that_is_not_mapped_is_not_mapped_by_us(
    scenario: Scenario, copies: dict[str, str]
) -> None:
    found = scenario("not_mapped", copies["torch"])
    assert found["raised"][0] == "OSError"
    assert found["copies"] == []


def test_a_runtime_that_lacks_a_function(scenario: Scenario, copies: dict[str, str]) -> None:
    reason = scenario("refused", [copies["old"]])["reason"]
    assert copies["old"] in reason
    assert "hipStreamIsCapturing" in reason


MAPS = """\
00400000-00452000 r-xp 00000000 08:02 173521      /usr/bin/python3
7f0000000000-7f0000001000 r--p 00000000 08:02 11                 /opt/rocm 7/lib/libamdhip64.so.7
7f0000001000-7f0000002000 r-xp 00001000 08:02 11                 /opt/rocm 7/lib/libamdhip64.so.7
7f0000002000-7f0000003000 rw-p 00000000 00:00 0
7f0000003000-7f0000004000 r--p 00000000 08:02 11                 /bind/libamdhip64.so
7f0000004000-7f0000005000 r--p 00000000 08:02 12                 /x/libamdhip64.so.7.debug
7f0000005000-7f0000006000 r--p 00000000 08:02 13                 /x/libamdhip64_helper.so
7f0000006000-7f0000007000 r--p 00000000 08:02 14                 /libamdhip64.so.7/other.so
"""


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ("", []),
        # The same inode on another device is another file.
        ("7f0-7f1 r-xp 0 00:2a 11   /a/libamdhip64.so", ["/a/libamdhip64.so"]),
        ("7f0-7f1 r-xp 0 08:02 15   /a/libamdhip64.so (deleted)", ["/a/libamdhip64.so"]),
        ("7f0-7f1 r-xp 0 08:02 15   /a/libamdhip64-1f2e3d4c.so.7.0.7", None),
    ],
    ids=["one", "other device", "deleted", "renamed by auditwheel"],
)
def test_the_list_of_what_is_mapped(more: str, expected: list[str] | None) -> None:
    expected = [more.split()[-1]] if expected is None else expected
    lines = [*MAPS.splitlines(keepends=True), more + "\n"]
    assert libamdhip64.copies(lines) == ["/opt/rocm 7/lib/libamdhip64.so.7", *expected]


# --- by which binding -----------------------------------------------------------------------------

only_hip_python = pytest.mark.parametrize("binding", ["hip-python"], indirect=True)


@only_hip_python
@pytest.mark.parametrize("mapped", ["torch", "rocm"])
def test_hip_python_calls_the_mapped_copy(
    scenario: Scenario, copies: dict[str, str], log: Path, mapped: str
) -> None:
    """Wherever its own search would lead."""
    elsewhere = copies["rocm" if mapped == "torch" else "torch"]
    paths = {
        "LD_LIBRARY_PATH": str(Path(elsewhere).parent),
        "ROCM_PATH": str(Path(elsewhere).parents[1]),
    }
    found = scenario("unlike", [copies[mapped]], "rocm.bindings.hip", "unused", 0, **paths)
    assert found["reason"] is None
    assert found["same_search"]
    assert found["described"].endswith(f"{copies[mapped]}, launched by hip-python 10.0.0")
    assert {call["copy"] for call in calls(log)} == {mapped}


@only_hip_python
def test_hip_python_bound_earlier_to_the_mapped_copy(
    scenario: Scenario, copies: dict[str, str], log: Path
) -> None:
    found = scenario("bound_before", copies["torch"], copies["torch"])
    assert found["reason"] is None
    assert "launched by hip-python" in found["described"]
    assert found["copies"] == [copies["torch"]]
    assert {call["copy"] for call in calls(log)} == {"torch"}


@only_hip_python
def test_hip_python_bound_earlier_to_another_copy(
    scenario: Scenario, copies: dict[str, str], log: Path
) -> None:
    found = scenario("bound_before", copies["torch"], copies["rocm"])
    assert "2 HIP runtimes are loaded" in found["reason"]
    assert not log.exists()


@only_hip_python
def test_hip_python_that_opens_another_copy_does_not_launch(
    scenario: Scenario, copies: dict[str, str], log: Path
) -> None:
    found = scenario("deaf", [copies["torch"]], copies["rocm"])
    assert found["reason"] is None
    assert "launched by ctypes: hip-python is bound to another HIP runtime" in found["described"]
    assert {call["copy"] for call in calls(log)} == {"torch"}
    assert set(found["copies"]) == {copies["torch"], copies["rocm"]}


@only_hip_python
@pytest.mark.parametrize(
    ("module", "name", "value", "reason"),
    [
        ("rocm.bindings.util.paths", "get_library_path", None, "hip-python cannot be imported"),
        ("rocm.bindings.hip", "hipRuntimeGetVersion", None, "hip-python did not open"),
        ("rocm.bindings.hip", "hipPeekAtLastError", 0, "bound to another HIP runtime"),
        ("rocm.bindings.hip", "hipPeekAtLastError", 4, "bound to another HIP runtime"),
    ],
)
def test_another_hip_python_does_not_launch(
    scenario: Scenario, copies: dict[str, str], log: Path, module: str, name: str, value: Any,
    reason: str,
) -> None:  # fmt: skip
    found = scenario("unlike", [copies["torch"]], module, name, value)
    assert found["reason"] is None
    assert f"launched by ctypes: {reason}" in found["described"].replace("hip-python is ", "")
    assert found["same_search"]
    assert len(named(log, "hipModuleLaunchKernel")) == 1


@only_hip_python
def test_the_proof_leaves_torchs_error_where_it_was(
    scenario: Scenario, copies: dict[str, str]
) -> None:
    found = scenario("pending_error", [copies["torch"]])
    assert "launched by hip-python" in found["described"]
    assert found["left"] == 1


@pytest.mark.parametrize("binding", ["ctypes"], indirect=True)
def test_without_hip_python(scenario: Scenario, copies: dict[str, str]) -> None:
    assert scenario("described", [copies["torch"]]) == (
        f"HIP 7.0.51831, {copies['torch']}, launched by ctypes: "
        "hip-python 10 is not installed (no module rocm.bindings.hip)"
    )


# --- what is launched -----------------------------------------------------------------------------


def test_every_call_of_a_first_and_a_second_launch(
    scenario: Scenario, copies: dict[str, str], log: Path
) -> None:
    scenario("launches", [copies["torch"]], [0, 0])
    at = {"copy": "torch"}
    here, current = {**at, "call": "hipGetDevice"}, {**at, "call": "hipSetDevice", "device": 0}
    assert calls(log) == [
        # Loading, once: the device, is a graph being captured, the module and its function.
        here,
        current,
        {**at, "call": "hipStreamIsCapturing", "stream": STREAM},
        {**at, "call": "hipModuleLoadData", "image": IMAGE[:8].hex(), "device": 0},
        {**at, "call": "hipModuleGetFunction", "module": MODULE, "name": "attn_fwd"},
        current,
        # The first launch, then the second, each after torch has told the device. Nothing waits,
        # and nothing is allocated.
        here,
        a_launch("torch", 0, 0),
        here,
        a_launch("torch", 1, 0),
    ]


def test_a_launch_that_is_repeated_is_the_launch_alone(
    scenario: Scenario, copies: dict[str, str], log: Path
) -> None:
    scenario("repeats", [copies["torch"]])
    launch = a_launch("torch", 0, 0)
    here = {"copy": "torch", "call": "hipGetDevice"}
    assert calls(log)[-6:] == [
        call
        for moved in (0, 4096, 512)
        for call in (here, {**launch, "params": packed(0, moved).hex()})
    ]
    assert len(named(log, "hipModuleLoadData")) == 1


def test_what_follows_from_the_total_of_rows(
    scenario: Scenario, copies: dict[str, str], log: Path
) -> None:
    scenario("totals", [copies["torch"]])
    seen = []
    for call in named(log, "hipModuleLaunchKernel"):
        values = abi.unpack(bytes.fromhex(call["params"]))
        seen.append((call["grid"][0], call["stream"], values["lse_head"], values["seqlen_q"]))
    of_40, of_1 = [(2, STREAM, 40, 8), (3, STREAM, 40, 8)], [(2, STREAM, 1, 10), (1, STREAM, 1, 10)]
    assert seen == [*of_40, *of_1, *of_40]


def test_a_device_that_is_not_current(
    scenario: Scenario, copies: dict[str, str], log: Path
) -> None:
    scenario("launches", [copies["torch"]], [1, 0, 1])
    # A module of its own on each device, loaded while that device is current.
    assert [call["device"] for call in named(log, "hipModuleLoadData")] == [1, 0]
    assert named(log, "hipModuleLaunchKernel") == [
        a_launch("torch", 0, 1, FUNCTION),
        a_launch("torch", 1, 0, FUNCTION + 1),
        a_launch("torch", 2, 1, FUNCTION),
    ]
    # Around the last launch, torch made device 1 current and device 0 again, and asks once more
    # which one is.
    names = [(call["call"], call.get("device")) for call in calls(log)][-6:]
    assert names == [
        ("hipGetDevice", None),
        ("hipGetDevice", None),
        ("hipSetDevice", 1),
        ("hipGetDevice", None),
        ("hipModuleLaunchKernel", 1),
        ("hipSetDevice", 0),
    ]


def test_two_code_objects_are_two_modules(
    scenario: Scenario, copies: dict[str, str], log: Path
) -> None:
    scenario("two_kernels", [copies["torch"]])
    images = [call["image"] for call in named(log, "hipModuleLoadData")]
    assert images == [IMAGE[:8].hex(), IMAGE[::-1][:8].hex()]
    launched = [
        (call["function"], call["grid"], call["block"], call["params"])
        for call in named(log, "hipModuleLaunchKernel")
    ]
    assert launched == [
        (FUNCTION, [1, 1, 1], [64, 1, 1], packed(0).hex()),
        (FUNCTION + 1, [2, 1, 1], [128, 1, 1], packed(1).hex()),
        (FUNCTION, [3, 1, 1], [256, 1, 1], packed(0).hex()),
    ]


def test_params_of_a_call_arrive_as_they_were_packed(
    scenario: Scenario, copies: dict[str, str], log: Path
) -> None:
    found = scenario("call_params", [copies["torch"]])
    (record,) = named(log, "hipModuleLaunchKernel")
    assert record["grid"] == [12, 1, 1]
    assert record["block"] == [256, 1, 1]
    assert record["params"] == found["packed"]
    read = abi.unpack(bytes.fromhex(record["params"]))
    assert {name: read[name] for name in found["addresses"]} == found["addresses"]
    assert set(found["addresses"]) == {"q", "k", "v", "out", "lse"}
    assert (read["batch"], read["seqlen_k"], read["scale"]) == (3, 190, 0.125)


def test_params_of_another_size_are_refused(
    scenario: Scenario, copies: dict[str, str], log: Path
) -> None:
    kind, text = scenario("wrong_size", [copies["torch"]])
    given = f"attn_fwd takes {abi.SIZE - 8} bytes of parameters, got {abi.SIZE}"
    assert (kind, text) == ("ValueError", given)
    assert named(log, "hipModuleLaunchKernel") == []


def test_the_image_outlives_the_load(scenario: Scenario, copies: dict[str, str]) -> None:
    assert scenario("kept", [copies["torch"]]) == 1


def test_threads_load_once_and_keep_their_streams(
    scenario: Scenario, copies: dict[str, str], log: Path
) -> None:
    assert scenario("threads", [copies["torch"]], 8, 10) == []
    assert sorted(call["device"] for call in named(log, "hipModuleLoadData")) == [0, 1]
    module_on = {call["device"]: n for n, call in enumerate(named(log, "hipModuleLoadData"))}
    launched = named(log, "hipModuleLaunchKernel")
    assert len(launched) == 160
    seen = dict.fromkeys(range(8), 0)
    for call in launched:
        number = call["stream"] - STREAM
        turn, seen[number] = seen[number], seen[number] + 1
        owner = 0 if turn % 2 else number  # by turns what it bound itself and what thread 0 did
        assert call["grid"] == [owner + 1, 1, 1]
        assert call["params"] == packed(owner, 256 * number).hex()
        assert call["device"] == (number + turn // 2) % 2
        assert call["function"] == FUNCTION + module_on[call["device"]]
    assert set(seen.values()) == {20}


def test_capturing_a_graph(scenario: Scenario, copies: dict[str, str], log: Path) -> None:
    found = scenario("capturing", [copies["torch"]])
    for kind, text in found["refused"]:
        assert kind == "RuntimeError"
        assert "attn_fwd is not loaded on device 0" in text
        assert "before the capture" in text
    # Once it is loaded, a launch under capture is as any other, also one that is bound there.
    assert [call["call"] for call in calls(log)] == ["hipGetDevice", "hipModuleLaunchKernel"] * 2


def test_the_current_stream_is_torchs(scenario: Scenario) -> None:
    assert scenario("streams") == [STREAM + 3, 3]


# --- what fails -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answers", "kind", "texts"),
    [
        ("hipModuleLaunchKernel=709", "HipError",
         ["attn_fwd was not launched (grid (6, 1, 1), device 1)", "hipErrorContextIsDestroyed "
          "(709), context is destroyed", "another HIP runtime", "torch/lib/libamdhip64.so"]),
        ("hipModuleLaunchKernel=719", "HipError", ["(719)", "AMD_SERIALIZE_KERNEL=3"]),
        ("hipModuleLaunchKernel=12345", "HipError", ["unknown error (12345)"]),
        ("hipModuleLoadData=2", "HipError",
         ["attn_fwd was not loaded on device 1", "hipErrorOutOfMemory (2)", "empty_cache"]),
        ("hipModuleGetFunction=500", "CodeObjectError",
         ["no kernel 'attn_fwd'", "hipErrorNotFound (500)"]),
        ("hipModuleGetFunction=709", "HipError", ["attn_fwd was not found on device 1", "(709)"]),
        ("hipStreamIsCapturing=906", "HipError",
         ["hipErrorStreamCaptureImplicit (906)", "captured into a graph"]),
        ("hipSetDevice=101", "HipError", ["device 1 was not made current", "(101)"]),
        ("hipGetDevice=3", "HipError", ["does not report the current device", "(3)"]),
    ],
)  # fmt: skip
def test_codes_become_exceptions(
    scenario: Scenario, copies: dict[str, str], answers: str, kind: str, texts: list[str]
) -> None:
    found = scenario("failing", [copies["torch"]], answers)
    assert found["raised"][0] == kind
    for text in texts:
        assert text in found["raised"][1]
    # torch must not find our error at its next check, nor another device current.
    assert found["left"] == 0
    assert found["current"] == 0
    # A failure is not remembered as a loaded module.
    assert found["after"][-1] == ["nothing", ""]
    assert len(found["after"]) == 1 + ("LaunchKernel" in answers)
    assert all(each == ["nothing", ""] for each in found["after"])


@pytest.mark.parametrize("code", [200, 209, 218, 303])
def test_code_for_another_gpu_says_which(
    scenario: Scenario, copies: dict[str, str], code: int
) -> None:
    data = scenario("empty_kernel", "gfx942")
    found = scenario("failing", [copies["torch"]], f"hipModuleLoadData={code}", data)
    kind, text = found["raised"]
    assert kind == "CodeObjectError"
    assert "attn_fwd was not loaded on device 1" in text
    assert f"({code})" in text
    assert "The code object is for gfx942, the device is gfx90a" in text
    assert found["left"] == 0


def test_error_709_names_the_copies_that_are_loaded_by_then(
    scenario: Scenario, copies: dict[str, str], log: Path
) -> None:
    found = scenario("failing_beside", copies["torch"], copies["rocm"])
    assert sorted(found["copies"]) == sorted([copies["torch"], copies["rocm"]])
    kind, text = found["raised"]
    assert kind == "HipError"
    assert f"used: {copies['torch']}; loaded: " in text
    assert copies["rocm"] in text
    assert {call["copy"] for call in calls(log)} == {"torch"}


def test_no_device(scenario: Scenario, copies: dict[str, str]) -> None:
    found = scenario("refused", [copies["torch"]], STANDIN_ANSWERS="hipGetDeviceCount=100")
    assert "the HIP runtime has no GPU: hipErrorNoDevice (100)" in found["reason"]
    assert "/dev/kfd" in found["reason"]
    assert found["raised"] == ["RuntimeError", found["reason"]]


@pytest.mark.skipif(os.path.exists("/dev/kfd"), reason="this machine has an AMD GPU")
def test_a_real_runtime_without_a_device(scenario: Scenario) -> None:
    found = scenario("real", REAL)
    if not found["copies"]:
        pytest.skip("no libamdhip64 is installed (Debian: libamdhip64-5)")
    assert "hipErrorNoDevice (100)" in found["reason"]
    assert "/dev/kfd" in found["reason"]


# --- the device's facts ---------------------------------------------------------------------------

# Lines of an MI300X's node, with the counts of its partition.
NODE = """\
cpu_cores_count 0
simd_count {simds}
simd_per_cu 4
gfx_target_version 90402
location_id {location}
domain {domain}
unique_id 4376936076086227261
num_xcc {xccs}
"""
CPU_NODE = "cpu_cores_count 96\nsimd_count 0\nlocation_id 0\ndomain 0\nnum_xcc 0\n"


def nodes(folder: Path, *properties: str) -> Path:
    for number, text in enumerate(properties):
        (folder / str(number)).mkdir(parents=True)
        (folder / str(number) / "properties").write_text(text)
    return folder


def test_dies_from_the_drivers_topology(tmp_path: Path) -> None:
    folder = nodes(
        tmp_path,
        CPU_NODE,
        NODE.format(simds=1216, location=0x4700, domain=0, xccs=8),
        # One partition of eight: the function, 3, is its number.
        NODE.format(simds=152, location=0x4703, domain=1, xccs=1),
        # Before the field existed.
        NODE.format(simds=440, location=0x6108, domain=0, xccs=0),
    )
    assert dies_by_driver("0000:47:00.0", folder) == 8
    assert dies_by_driver("0001:47:00.3", folder) == 1
    assert dies_by_driver("0000:61:01.0", folder) is None
    assert dies_by_driver("0000:00:00.0", folder) is None
    assert dies_by_driver("0000:48:00.0", folder) is None


def test_a_topology_that_cannot_be_read(tmp_path: Path) -> None:
    assert dies_by_driver("0000:47:00.0", tmp_path / "none") is None
    folder = nodes(tmp_path / "nodes", CPU_NODE, "garbage\nsimd_count x\n\n")
    (folder / "2").mkdir()
    assert dies_by_driver("0000:47:00.0", folder) is None


def test_the_description_of_a_runtime(scenario: Scenario, copies: dict[str, str]) -> None:
    found = scenario("facts", [copies["torch"]])
    assert found["describe"].startswith(f"HIP 7.0.51831, {copies['torch']}, launched by ")
    assert found["left"] == 0


def a_call() -> Call:
    q, k, v = (torch.empty(3, rows, 4, 64, dtype=torch.float16) for rows in (130, 190, 190))
    return Call(q, k, v, max_seqlen_q=130, max_seqlen_k=190, scale=0.125)


@pytest.mark.parametrize(
    ("device", "expected"),
    [
        (DEVICES["MI300X"], None),
        (DEVICES["MI300X-CPX"], None),
        (DEVICES["MI250X"], "gfx90a is not gfx942"),
        (DEVICES["H200"], "the device is NVIDIA (sm_90a)"),
        (CPU, "the device is a CPU"),
    ],
    ids=lambda value: getattr(value, "arch", ""),
)
def test_devices_that_are_not_ours(device: Any, expected: str | None) -> None:
    problem: Problem = problem_of(a_call(), False, False, device, True)
    assert DeviceRuntime().why_not(problem) == expected
