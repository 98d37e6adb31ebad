"""What the tests of the device runtime do in processes of their own.

Run as a program: reads a scenario's name, arguments and environment from each line of stdin, runs
it in a fork, where it may map whatever it wants, and writes what it returns. The fork has torch
imported (1.6 s, paid once) and no HIP runtime mapped.

torch is a CPU build here, so that three things of a ROCm build are put in its place, and nothing
else: ``torch.version.hip``, ``runtime_device.current_stream`` (a handle beyond 32 bits that differs
by device and by thread) and ``torch.cuda.get_device_properties``. A tensor is anything with a
``device``: none can be made on a GPU.
"""

from __future__ import annotations

import ctypes
import dataclasses
import importlib
import json
import os
import sys
import threading
import traceback
import types
from pathlib import Path
from typing import Any

import torch

from pyfa import codeobject, topology
from pyfa.backends.hip import code, compiler, libamdhip64, runtime_device
from pyfa.backends.hip.runtime_device import DeviceRuntime

STREAM = 0x7FAB00000000
IMAGE = bytes(range(0xF0, 0x100)) * 4
PARAMS = 40


def start(paths: list[str]) -> DeviceRuntime:
    """A runtime in a process where torch is a ROCm build and has mapped ``paths``."""
    for path in paths:
        ctypes.CDLL(path, mode=os.RTLD_NOW | os.RTLD_LOCAL)
    torch.version.hip = "7.0.0"
    runtime_device.current_stream = lambda index: STREAM + index
    torch.cuda.get_device_properties = lambda index: types.SimpleNamespace(
        gcnArchName="gfx90a:sramecc+:xnack-",
        multi_processor_count=104,
        name="MI210",
        total_memory=1,
    )
    return DeviceRuntime()


def kernel(data: bytes = IMAGE, digest: str = "d1", params: int = PARAMS) -> code.Code:
    facts: dict[str, Any] = {field.name: 0 for field in dataclasses.fields(codeobject.Kernel)}
    facts["name"] = "attn_fwd"
    facts["arguments"] = (
        codeobject.KernelArgument("", 0, params, "by_value"),
        codeobject.KernelArgument("", params, 8, "hidden_global_offset_x"),
    )
    return code.Code(data, digest, "built", codeobject.Kernel(**facts))


def on(index: int) -> dict[str, Any]:
    return {"q": types.SimpleNamespace(device=torch.device("cuda", index))}


def params(first: int) -> bytes:
    """Bytes with a zero in front and behind, which a C string would lose."""
    return bytes([0, first, *range(PARAMS - 3), 0])


def said(do: Any) -> list[str]:
    """The kind and the text of what ``do`` raises."""
    try:
        do()
    except Exception as error:
        return [type(error).__name__, str(error)]
    return ["nothing", ""]


def launches(paths: list[str], indices: list[int]) -> dict[str, Any]:
    """One launch on each of the devices, with different parameters."""
    runtime = start(paths)
    for number, index in enumerate(indices):
        runtime.launch(kernel(), (5 + number, 6, 7), 256, params(number), on(index))
    return {"reason": runtime.why_unavailable(), "copies": libamdhip64.copies()}


def launch_bytes(paths: list[str], hexadecimal: str, grid: list[int]) -> None:
    data = bytes.fromhex(hexadecimal)
    one = kernel(params=len(data))
    start(paths).launch(one, tuple(grid), 256, data, on(0))


def two_kernels(paths: list[str]) -> None:
    runtime = start(paths)
    for one in (kernel(), kernel(IMAGE[::-1], "d2"), kernel()):
        runtime.launch(one, (1, 1, 1), 64, params(0), on(0))


def refused(paths: list[str]) -> dict[str, Any]:
    """What a process says in which nothing can be launched."""
    runtime = start(paths)
    reason = runtime.why_unavailable()
    raised = said(lambda: runtime.launch(kernel(), (1, 1, 1), 64, params(0), on(0)))
    return {"reason": reason, "raised": raised, "copies": libamdhip64.copies()}


def another_build(cuda: str | None) -> str | None:
    torch.version.hip, torch.version.cuda = None, cuda
    return DeviceRuntime().why_unavailable()


def unlisted() -> str | None:
    """A system that does not list what a process has mapped."""
    libamdhip64._MAPS = Path("/nowhere/maps")
    return start([]).why_unavailable()


def loaded_later(path: str, later: str) -> list[str | None]:
    """The reason before, with torch's runtime, and when a second copy has come after it."""
    runtime = start([])
    reasons = [runtime.why_unavailable()]
    for each in (path, later):
        ctypes.CDLL(each)
        reasons.append(runtime.why_unavailable())
    return reasons


def failing(paths: list[str], answers: str, data: str = "") -> dict[str, Any]:
    """A launch in a runtime that is fine until then, and again when it is fine again."""
    runtime = start(paths)
    assert runtime.why_unavailable() is None
    one = kernel(bytes.fromhex(data) or IMAGE)
    os.environ["STANDIN_ANSWERS"] = answers
    raised = said(lambda: runtime.launch(one, (1, 2, 3), 64, params(0), on(1)))
    peek = ctypes.CDLL(paths[0]).hipPeekAtLastError()
    current = runtime_device._current_device(runtime._runtime()) if "Get" not in answers else 0
    os.environ["STANDIN_ANSWERS"] = ""
    after = said(lambda: runtime.launch(one, (1, 2, 3), 64, params(1), on(1)))
    return {"raised": raised, "left": peek, "current": current, "after": after}


def failing_beside(path: str, later: str) -> dict[str, Any]:
    """Error 709 after another library has brought a copy of its own."""
    runtime = start([path])
    runtime.launch(kernel(), (1, 1, 1), 64, params(0), on(0))
    ctypes.CDLL(later)
    os.environ["STANDIN_ANSWERS"] = "hipModuleLaunchKernel=709"
    raised = said(lambda: runtime.launch(kernel(), (1, 1, 1), 64, params(0), on(0)))
    return {"raised": raised, "copies": libamdhip64.copies()}


def capturing(paths: list[str]) -> dict[str, Any]:
    runtime = start(paths)
    os.environ["STANDIN_CAPTURING"] = "1"
    first = said(lambda: runtime.launch(kernel(), (1, 1, 1), 64, params(0), on(0)))
    early = said(lambda: runtime.prepare(kernel(), 0))
    os.environ["STANDIN_CAPTURING"] = "0"
    runtime.prepare(kernel(), 0)
    os.environ["STANDIN_CAPTURING"] = "1"
    Path(os.environ["STANDIN_LOG"]).write_text("")
    runtime.launch(kernel(), (1, 1, 1), 64, params(7), on(0))
    return {"first": first, "early": early}


def wrong_size(paths: list[str]) -> list[str]:
    runtime = start(paths)
    return said(lambda: runtime.launch(kernel(), (1, 1, 1), 64, params(0)[:-8], on(0)))


def threads(paths: list[str], count: int, each: int) -> list[str]:
    """``count`` threads, each with a stream and parameters of its own, that start together."""
    runtime = start(paths)
    mine = threading.local()
    runtime_device.current_stream = lambda index: STREAM + mine.number
    barrier = threading.Barrier(count)
    errors: list[str] = []

    def work(number: int) -> None:
        mine.number = number
        barrier.wait()
        for turn in range(each):
            target, grid = on((number + turn) % 2), (number + 1, 1, 1)
            try:
                runtime.launch(kernel(), grid, 64, params(number), target)
            except Exception:
                errors.append(traceback.format_exc())

    workers = [threading.Thread(target=work, args=(number,)) for number in range(count)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return errors


def kept(paths: list[str]) -> int:
    """How many more references to an image there are after it was loaded."""
    data = bytes(bytearray(IMAGE))
    before = sys.getrefcount(data)
    runtime = start(paths)
    runtime.prepare(kernel(data), 0)
    return sys.getrefcount(data) - before


def facts(paths: list[str], nodes: str) -> dict[str, Any]:
    topology.dies.__defaults__ = (Path(nodes),)
    runtime = start(paths)
    shapes = [list(runtime.shape(index)) for index in (0, 1)]
    left = ctypes.CDLL(paths[0]).hipPeekAtLastError()
    return {"describe": runtime.describe(), "shapes": shapes, "left": left}


def not_mapped(path: str) -> dict[str, Any]:
    return {"raised": said(lambda: libamdhip64.Hip(path)), "copies": libamdhip64.copies()}


def streams() -> list[int]:
    """Torch's private function where there is one, else the public way."""
    torch.cuda.current_stream = lambda index: types.SimpleNamespace(cuda_stream=STREAM + index)
    found = [importlib.reload(runtime_device).current_stream(3)]
    torch._C._cuda_getCurrentRawStream = lambda index: index
    return [*found, importlib.reload(runtime_device).current_stream(3)]


def real(names: list[str]) -> dict[str, Any]:
    """A real libamdhip64 by the first of ``names`` that the loader finds."""
    for name in names:
        try:
            ctypes.CDLL(name)
        except OSError:
            continue
        runtime = start([])
        return {"reason": runtime.why_unavailable(), "copies": libamdhip64.copies()}
    return {"copies": []}


def empty_kernel(arch: str) -> str:
    """A code object of ``arch``, in hexadecimal."""
    source = 'extern "C" __attribute__((global)) void attn_fwd() {}'
    return compiler.compile_hip(source, arch=arch, options=["-O3"]).hex()


def main() -> None:
    for line in sys.stdin:
        asked = json.loads(line)
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            os.environ.update(asked["environment"])
            try:
                answer = {"value": globals()[asked["scenario"]](*asked["arguments"])}
            except BaseException:
                answer = {"failed": traceback.format_exc()}
            print(json.dumps(answer), flush=True)
            os._exit(0)
        status = os.waitpid(child, 0)[1]
        if status:
            print(json.dumps({"failed": f"the process ended with status {status}"}), flush=True)


if __name__ == "__main__":
    main()
