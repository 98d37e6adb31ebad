"""What the tests of the device runtime do in processes of their own.

Run as a program: reads a scenario's name, arguments and environment from each line of stdin, runs
it in a fork, where it may map whatever it wants, and writes what it returns. The fork has torch
imported (1.6 s, paid once) and no HIP runtime mapped.

torch is a CPU build here, so that five things of a ROCm build are put in its place, and nothing
else: ``torch.version.hip``, ``_torch.current_stream`` (a handle beyond 32 bits that differs by
device and by thread), ``_torch.current_device`` and ``torch.cuda.device`` (which ask and tell the
HIP runtime, as torch does) and ``torch.cuda.get_device_properties``. A tensor is anything with a
``device`` and an address: none can be made on a GPU.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import gc
import importlib
import json
import os
import sys
import threading
import traceback
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from pyfa import _torch, abi, codeobject
from pyfa.backends.base import Run
from pyfa.backends.common.program import Params, Program, arguments_of, run_of
from pyfa.backends.hip import code, compiler, libamdhip64, plans, runtime_device
from pyfa.backends.hip.runtime_device import DeviceRuntime
from pyfa.problem import Call, form_of, tensors_of
from pyfa.sizes import Size

STREAM = 0x7FAB00000000
IMAGE = bytes(range(0xF0, 0x100)) * 4
ADDRESSES = {"q": 0x7FCC00000000, "k": 0x7FDD00000010, "v": 0x7FEE00000020}


def start(paths: list[str]) -> DeviceRuntime:
    """A runtime in a process where torch is a ROCm build and has mapped ``paths``.

    Without hip-python, unless BINDING asks for it.
    """
    if os.environ.get("BINDING") != "hip-python":
        sys.modules["rocm.bindings.hip"] = None  # type: ignore[assignment]
    for path in paths:
        ctypes.CDLL(path, mode=os.RTLD_NOW | os.RTLD_LOCAL)
    torch.version.hip = "7.0.0"
    _torch.current_stream = lambda index: STREAM + index
    if paths:
        _torch.current_device = lambda: current_device(paths[0])
        torch.cuda.device = lambda index: current(paths[0], index)
    torch.cuda.get_device_properties = lambda index: types.SimpleNamespace(
        gcnArchName="gfx90a:sramecc+:xnack-",
        multi_processor_count=104,
        name="MI210",
        total_memory=1,
    )
    return DeviceRuntime()


def current_device(path: str) -> int:
    index = ctypes.c_int()
    assert ctypes.CDLL(path).hipGetDevice(ctypes.byref(index)) == 0
    return index.value


@contextlib.contextmanager
def current(path: str, index: int) -> Iterator[None]:
    before = current_device(path)
    ctypes.CDLL(path).hipSetDevice(index)
    try:
        yield
    finally:
        ctypes.CDLL(path).hipSetDevice(before)


def kernel(data: bytes = IMAGE, digest: str = "d1", params: int = abi.SIZE) -> code.Code:
    facts: dict[str, Any] = {field.name: 0 for field in dataclasses.fields(codeobject.Kernel)}
    facts["name"] = "attn_fwd"
    facts["arguments"] = (
        codeobject.KernelArgument("", 0, params, "by_value"),
        codeobject.KernelArgument("", params, 8, "hidden_global_offset_x"),
    )
    return code.Code(data, digest, "built", codeobject.Kernel(**facts))


def tensors(index: int, moved: int = 0) -> list[Any]:
    """q, k and v on device ``index``, as many bytes further on as ``moved`` says."""
    return [
        types.SimpleNamespace(
            device=torch.device("cuda", index), data_ptr=lambda at=address: at + moved
        )
        for address in ADDRESSES.values()
    ]


def params(number: int) -> Params:
    """Of launch ``number``, with zeros in front and behind, which a C string would lose."""
    values = {"batch": number, "q_row": 2**40 + number, "scale": 0.5, "k_block_log2": 6}
    return Params(values, {"q": "q", "out": "v", "lse": "k"})


def packed(number: int, moved: int = 0) -> bytes:
    """The same as the kernel gets them."""
    addresses = {name: address + moved for name, address in ADDRESSES.items()}
    data = abi.pack(arguments_of(params(number), addresses))
    assert data[0] == data[-1] == 0
    return data


def program(index: int, *steps: tuple[int, int, Params]) -> Program:
    """Steps of (blocks, threads, parameters) over three tensors on device ``index``."""
    made = Program(ADDRESSES, tensors(index)[0])
    for blocks, threads, each in steps:
        made.add(plans.plan_of("hip", "gaps"), blocks, threads, each)
    return made


def bind(
    runtime: DeviceRuntime, index: int = 0, blocks: int = 1, number: int = 0, threads: int = 64,
    one: code.Code | None = None,
) -> Run:  # fmt: skip
    """One launch of a kernel, bound."""
    described = program(index, (blocks, threads, params(number)))
    return run_of(described, runtime.launch_of(described, [one or kernel()]), runtime.empty)(None)


def said(do: Any) -> list[str]:
    """The kind and the text of what ``do`` raises."""
    try:
        do()
    except Exception as error:
        return [type(error).__name__, str(error)]
    return ["nothing", ""]


def launches(paths: list[str], indices: list[int]) -> dict[str, Any]:
    """One launch on each of the devices, with different parameters, each bound anew."""
    runtime = start(paths)
    for number, index in enumerate(indices):
        bind(runtime, index, 5 + number, number, 256)(*tensors(index))
    return {"reason": runtime.why_unavailable(), "copies": libamdhip64.copies()}


def repeats(paths: list[str]) -> None:
    """One launch, bound once, on tensors at three places."""
    run = bind(start(paths), 0, 5, 0, 256)
    for moved in (0, 4096, 512):
        run(*tensors(0, moved))


def call_params(paths: list[str]) -> dict[str, Any]:
    """A launch with the parameters of a call, and what they should be."""
    runtime = start(paths)
    q, k, v = (torch.empty(3, rows, 4, 64, dtype=torch.float16) for rows in (130, 190, 190))
    call = Call(q, k, v, max_seqlen_q=130, max_seqlen_k=190, scale=0.125)
    out, lse = torch.empty(call.out_shape()), torch.empty(call.lse_shape())
    given = {**dict(zip(form_of(call).names, tensors_of(call), strict=True)), "out": out}
    given["lse"] = lse
    addresses = {name: x.data_ptr() for name, x in given.items()}
    values = abi.forward_values(call, out.stride(), lse.stride())
    described = Program(given, tensors(0)[0])
    pointers = {name: name for name in given}
    described.add(plans.plan_of("hip", "gaps"), 12, 256, Params(values, pointers))
    launch = runtime.launch_of(described, [kernel()])
    run_of(described, launch, runtime.empty)(None)(*given.values())
    return {"packed": abi.pack({**values, **addresses}).hex(), "addresses": addresses}


def two_kernels(paths: list[str]) -> None:
    """Three steps of one program, two of one kernel and of one set of parameters."""
    runtime = start(paths)
    first, second = params(0), params(1)
    described = program(0, (1, 64, first), (2, 128, second), (3, 256, first))
    kernels = [kernel(), kernel(IMAGE[::-1], "d2"), kernel()]
    run_of(described, runtime.launch_of(described, kernels), runtime.empty)(None)(*tensors(0))


def totals(paths: list[str]) -> None:
    """Two steps of which one's grid and both steps' parameters follow from the total of rows."""
    runtime = start(paths)
    first, second = (
        each._replace(values={**each.values, "lse_head": Size("q"), "seqlen_q": Size("k") + 1})
        for each in (params(0), params(1))
    )
    described = program(0, (2, 64, first), (-(-Size("q") // 16), 128, second))
    launch = runtime.launch_of(described, [kernel(), kernel()])
    for each in ((40, 7), (1, 9), (40, 7)):
        run_of(described, launch, runtime.empty)(each)(*tensors(0))


def refused(paths: list[str]) -> dict[str, Any]:
    """What a process says in which nothing can be launched."""
    runtime = start(paths)
    reason = runtime.why_unavailable()
    raised = said(lambda: bind(runtime))
    return {"reason": reason, "raised": raised, "copies": libamdhip64.copies()}


def described(paths: list[str]) -> str:
    return start(paths).describe()


def bound_before(mapped: str, before: str) -> dict[str, Any]:
    """hip-python was asked for something, with ROCM_PATH as it is, before there was a runtime."""
    ctypes.CDLL(before)
    hip = importlib.import_module("rocm.bindings.hip")
    search = importlib.import_module("rocm.bindings.util.paths")
    theirs, search.get_library_path = search.get_library_path, lambda name: before.encode()
    hip.hipRuntimeGetVersion()
    search.get_library_path = theirs
    return {**launches_or_reason([mapped]), "copies": libamdhip64.copies()}


def launches_or_reason(paths: list[str]) -> dict[str, Any]:
    runtime = start(paths)
    reason = runtime.why_unavailable()
    if reason is None:
        bind(runtime)(*tensors(0))
    return {"reason": reason, "described": "" if reason else runtime.describe()}


def deaf(paths: list[str], other: str) -> dict[str, Any]:
    """A hip-python that opens ``other`` whatever its search says."""
    hip = importlib.import_module("rocm.bindings.hip")
    opened = hip.hipRuntimeGetVersion
    search = importlib.import_module("rocm.bindings.util.paths")

    def version() -> Any:
        search.get_library_path = lambda name: other.encode()
        return opened()

    hip.hipRuntimeGetVersion = version
    found = launches_or_reason(paths)
    return {**found, "copies": libamdhip64.copies()}


def unlike(paths: list[str], module: str, name: str, value: Any) -> dict[str, Any]:
    """A hip-python without ``name``, or with ``value`` there; whether its search stays the same."""
    of = importlib.import_module(module)
    search = importlib.import_module("rocm.bindings.util.paths")
    if value is None:
        delattr(of, name)
    else:
        setattr(of, name, lambda *_: (value,))
    before = getattr(search, "get_library_path", None)
    found = launches_or_reason(paths)
    return {**found, "same_search": getattr(search, "get_library_path", None) is before}


def pending_error(paths: list[str]) -> dict[str, Any]:
    """torch left an error behind, which its next check is to find."""
    for path in paths:
        ctypes.CDLL(path).hipDeviceGetAttribute(ctypes.byref(ctypes.c_int()), 4711, 0)
    described = start(paths).describe()
    return {"described": described, "left": ctypes.CDLL(paths[0]).hipPeekAtLastError()}


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
    bound: list[Run] = []

    def launch() -> None:
        bound.append(bind(runtime, 1, 6, one=one))
        bound[-1](*tensors(1))

    os.environ["STANDIN_ANSWERS"] = answers
    raised = said(launch)
    peek = ctypes.CDLL(paths[0]).hipPeekAtLastError()
    current = runtime_device._current_device(runtime._runtime()[0]) if "Get" not in answers else 0
    os.environ["STANDIN_ANSWERS"] = ""
    # What was bound before it failed is as good as what is bound anew.
    after = [said(lambda run=run: run(*tensors(1))) for run in bound] + [said(launch)]
    return {"raised": raised, "left": peek, "current": current, "after": after}


def failing_beside(path: str, later: str) -> dict[str, Any]:
    """Error 709 after another library has brought a copy of its own."""
    runtime = start([path])
    run = bind(runtime)
    run(*tensors(0))
    ctypes.CDLL(later)
    os.environ["STANDIN_ANSWERS"] = "hipModuleLaunchKernel=709"
    raised = said(lambda: run(*tensors(0)))
    return {"raised": raised, "copies": libamdhip64.copies()}


def capturing(paths: list[str]) -> dict[str, Any]:
    """Bound under capture, twice; then before it, and launched, and bound again, under it."""
    runtime = start(paths)
    os.environ["STANDIN_CAPTURING"] = "1"
    refused = [said(lambda: bind(runtime)) for _ in range(2)]
    os.environ["STANDIN_CAPTURING"] = "0"
    run = bind(runtime)
    os.environ["STANDIN_CAPTURING"] = "1"
    Path(os.environ["STANDIN_LOG"]).write_text("")
    run(*tensors(0))
    bind(runtime, blocks=2)(*tensors(0))
    return {"refused": refused}


def wrong_size(paths: list[str]) -> list[str]:
    runtime = start(paths)
    return said(lambda: bind(runtime, one=kernel(params=abi.SIZE - 8)))


def threads(paths: list[str], count: int, each: int) -> list[str]:
    """``count`` threads, each with a stream and tensors of its own, that start together. Each
    launches what it bound itself, with parameters of its own, and what the first of them bound."""
    runtime = start(paths)
    mine = threading.local()
    _torch.current_stream = lambda index: STREAM + mine.number
    barrier = threading.Barrier(count)
    errors: list[str] = []
    bound: dict[int, list[Run]] = {}

    def work(number: int) -> None:
        mine.number = number
        barrier.wait()
        try:
            bound[number] = [bind(runtime, index, number + 1, number) for index in (0, 1)]
            barrier.wait()
            for turn in range(each):
                index = (number + turn) % 2
                for owner in (number, 0):
                    bound[owner][index](*tensors(index, 256 * number))
        except Exception:
            errors.append(traceback.format_exc())
            barrier.abort()

    workers = [threading.Thread(target=work, args=(number,)) for number in range(count)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return errors


def kept(paths: list[str]) -> int:
    """How many more references to an image there are after it was loaded, and what was bound to it
    is gone."""
    data = bytes(bytearray(IMAGE))
    before = sys.getrefcount(data)
    runtime = start(paths)
    bind(runtime, one=kernel(data))
    gc.collect()
    return sys.getrefcount(data) - before


def facts(paths: list[str]) -> dict[str, Any]:
    found = start(paths).describe()
    return {"describe": found, "left": ctypes.CDLL(paths[0]).hipPeekAtLastError()}


def not_mapped(path: str) -> dict[str, Any]:
    return {"raised": said(lambda: libamdhip64.Hip(path)), "copies": libamdhip64.copies()}


def streams() -> list[int]:
    """Torch's private function where there is one, else the public way."""
    torch.cuda.current_stream = lambda index: types.SimpleNamespace(cuda_stream=STREAM + index)
    found = [importlib.reload(_torch).current_stream(3)]
    torch._C._cuda_getCurrentRawStream = lambda index: index
    return [*found, importlib.reload(_torch).current_stream(3)]


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
    with contextlib.suppress(ImportError):
        importlib.import_module("rocm.bindings.hip")  # 0.1 s; it opens a runtime at its first call
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
