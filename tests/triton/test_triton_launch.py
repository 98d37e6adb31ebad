"""Direct launches: what the driver is given, and when Triton's own launcher is asked instead."""

from __future__ import annotations

import ctypes
import struct
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
from pyfa import _torch
from pyfa.backends.common import libcuda
from pyfa.backends.triton import runtime_launch
from pyfa.backends.triton.specs import Spec

KINDS = {
    "Q": "*bf16",
    "rows": "i32",
    "stride": "i64",
    "scale": "fp32",
    "part": "i32",
    "N": "constexpr",
}
# As C lays them out: i64 at a multiple of 8, then two pointers of Triton's own.
PLACES = [(0, 8), (8, 4), (16, 8), (24, 4), (28, 4), (32, 8), (40, 8)]


class Driver:
    """libcuda as far as a launch needs it; ``errors`` are returned one by one."""

    def __init__(self, places: list[tuple[int, int]] = PLACES) -> None:
        self.places = places
        self.errors: list[int] = []
        self.launched: list[tuple[tuple[int, ...], bytes]] = []
        self.contexts = 0

    def cuFuncGetParamInfo(self, function: int, index: int, offset: Any, size: Any) -> int:
        if index >= len(self.places):
            return 1
        offset._obj.value, size._obj.value = self.places[index]
        return 0

    def cuLaunchKernelEx(self, how: Any, function: Any, parameters: None, extra: Any) -> int:
        # References, as ``ctypes.byref`` makes them.
        parts = extra._obj
        size = ctypes.c_size_t.from_address(parts[3]).value
        if self.errors:
            return self.errors.pop()
        # CUlaunchConfig: grid, block, dynamic shared memory, stream, attributes and their number.
        at, address = ctypes.addressof(how._obj), ctypes.addressof(function._obj)
        config = struct.unpack("7IQQI", ctypes.string_at(at, struct.calcsize("7IQQI")))
        self.launched.append(((address, *config), ctypes.string_at(parts[1], size)))
        return 0

    def cuDeviceGet(self, device: Any, index: int) -> int:
        return 0

    def cuDevicePrimaryCtxRetain(self, context: Any, device: Any) -> int:
        return 0

    def cuCtxSetCurrent(self, context: Any) -> int:
        self.contexts += 1
        return 0


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    found = Driver()
    monkeypatch.setattr(libcuda, "library", lambda: found)
    monkeypatch.setattr(_torch, "current_stream", lambda index: 7)
    return found


def compiled(**changes: Any) -> Any:
    facts = {"num_warps": 4, "shared": 1024, "num_ctas": 1, "global_scratch_size": 0}
    return SimpleNamespace(function=99, metadata=SimpleNamespace(**(facts | changes)))


def spec(**constants: Any) -> Spec:
    return Spec(None, KINDS, {"N": 1, **constants}, {}, {})


def test_arguments_are_packed_as_the_driver_expects(driver: Driver) -> None:
    code = runtime_launch.code_of(compiled(), spec(), 0)
    assert code is not None
    for programs, numbers in ((3, [4096]), (5, [1, 8192])):
        slots = [(0, len(numbers) - 1)]
        launch = runtime_launch.prepare(code, programs, (0, 5, -6, 0.5, 7), slots)
        launch(numbers, None)
    launch([2, 64], None)
    expected = [(99, programs, 1, 1, 128, 1, 1, 1024, 7, 0, 0) for programs in (3, 5, 5)]
    assert [how for how, _ in driver.launched] == expected
    packed = [struct.unpack("QiqfiQQ", data) for _, data in driver.launched]
    assert packed == [(address, 5, -6, 0.5, 7, 0, 0) for address in (4096, 8192, 64)]


def test_descriptors_have_memory_of_their_own(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = runtime_launch.code_of(compiled(global_scratch_size=256), spec(), 0)
    assert code is not None
    given: list[torch.Tensor] = []

    def empty(size: int, **how: Any) -> torch.Tensor:
        given.append(torch.zeros(size, dtype=how["dtype"]))
        return given[-1]

    monkeypatch.setattr(runtime_launch.torch, "empty", empty)
    launch = runtime_launch.prepare(code, 3, (0, 5, -6, 0.5, 7), [(0, 0)])
    for _ in range(2):
        launch([4096], None)
    assert len(given) == 2
    for x, (_, data) in zip(given, driver.launched, strict=True):
        assert x.numel() == 3 * 256
        assert struct.unpack("QiqfiQQ", data) == (4096, 5, -6, 0.5, 7, x.data_ptr(), 0)


def test_a_thread_without_a_context_gets_one(driver: Driver) -> None:
    code = runtime_launch.code_of(compiled(), spec(), 0)
    assert code is not None
    launch = runtime_launch.prepare(code, 1, (0, 5, 6, 0.5, 7), [(0, 0)])
    driver.errors = [libcuda.NO_CONTEXT]
    launch([4096], None)
    assert driver.contexts == len(driver.launched) == 1
    driver.errors = [700]
    with pytest.raises(RuntimeError, match="CUDA error 700"):
        launch([4096], None)


@pytest.mark.parametrize(
    ("facts", "constants", "places"),
    [
        ({"num_ctas": 2}, {}, PLACES),
        ({"global_scratch_size": 128}, {}, PLACES[:5]),
        ({"launch_pdl": True}, {}, PLACES),
        ({}, {"stride": 1}, PLACES),
        ({}, {}, PLACES[:4]),
        ({}, {}, [(0, 8), (8, 8), *PLACES[2:]]),
    ],
)
def test_what_it_does_not_know_is_left_to_triton(
    driver: Driver, facts: dict[str, Any], constants: dict[str, Any], places: Any
) -> None:
    driver.places = places
    assert runtime_launch.code_of(compiled(**facts), spec(**constants), 0) is None
