"""Faults planted in a kernel's source."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import turns

from pyfa import cache
from pyfa.backends import BACKENDS
from pyfa.backends.common.program import Step
from pyfa.backends.hip import code
from pyfa.backends.hip.runtime_emulator import EmulatorRuntime
from pyfa.emulator import native
from pyfa.errors import CodeObjectError
from pyfa.plan import Plan

Plant = Callable[[str, str, str], None]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of the faults of each file one in 32 is planted, and of the plans one in 32 is built for its
    registers alone, as each takes a compile; all at night, and where a test is named."""
    if any("::" in argument for argument in config.args):
        return
    compiling = [
        item
        for item in items
        if item.path.parent == Path(__file__).parent
        and ("plant" in item.fixturenames or item.originalname == "test_resources")
    ]
    kept = turns.some(
        compiling,
        32,
        kind=lambda item: (item.path, "plant" in item.fixturenames),
        name=lambda item: item.nodeid,
    )
    left_out = set(compiling).difference(kept)
    items[:] = [item for item in items if item not in left_out]
    config.hook.pytest_deselected(items=list(left_out))


@pytest.fixture
def kernels_run(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kernels that the emulator ran, by name, in order."""
    names: list[str] = []
    original = EmulatorRuntime.run

    def run(
        self: EmulatorRuntime, step: Step, kernel: code.Code, params: bytes, tensors: Any
    ) -> None:
        names.append(kernel.kernel.name)
        original(self, step, kernel, params, tensors)

    monkeypatch.setattr(EmulatorRuntime, "run", run)
    return names


@pytest.fixture
def plant(
    monkeypatch: pytest.MonkeyPatch, nothing_bound: Callable[[], None], code_of_tests: Path
) -> Iterator[Plant]:
    """Replaces a snippet, which must occur exactly once, in the source of every plan of a kernel.

    Code objects go to the tests' own cache, and sound ones come from the usual one: the kernels
    around a planted one are compiled once (14 s of 21 for a case of the bias gradient).
    Calls that are bound to sound ones are forgotten.
    """
    native.load()
    monkeypatch.setenv("PYFA_CACHE_READONLY_DIRS", str(cache.directory()))
    monkeypatch.setenv("PYFA_CACHE_DIR", str(code_of_tests))
    original = code.source_of

    def plant(kernel: str, snippet: str, other: str) -> None:
        def changed(plan: Plan) -> str:
            text = original(plan)
            if plan.kernel != kernel:
                return text
            assert text.count(snippet) == 1, f"the kernel has {text.count(snippet)} × {snippet!r}"
            return text.replace(snippet, other)

        monkeypatch.setattr(code, "source_of", changed)
        forget_code()
        nothing_bound()

    yield plant
    forget_code()


@pytest.fixture
def without_registers(
    monkeypatch: pytest.MonkeyPatch, nothing_bound: Callable[[], None]
) -> Callable[[str, int], None]:
    """Lets plans with this value of a constant spill."""
    real = code.load

    def refuse(constant: str, value: int) -> None:
        def load(plan: Plan, arch: str) -> code.Code:
            if dict(plan.constants).get(constant) == value:
                raise CodeObjectError(f"{plan} spills")
            return real(plan, arch)

        monkeypatch.setattr(code, "load", load)
        monkeypatch.setattr(BACKENDS["emulator"].launch, "_fitting", {})

    return refuse


def forget_code() -> None:
    """Forget what was made of sources, and their keys."""
    code.load.cache_clear()  # first, as it waits for threads, which use the keys
    code.key_of.cache_clear()
