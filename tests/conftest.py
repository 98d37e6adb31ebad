"""What tests of several folders ask for."""

from __future__ import annotations

import gc
import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import turns

from pyfa import _torch, binding, bound, cache
from pyfa.backends.native import builds
from pyfa.bound import Table


@pytest.fixture(autouse=True)
def no_build_outlives_its_test(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Threads that build kernels end before what the test changed is put back."""
    yield
    builds.settle()


CallsOf = Callable[[Any, str], list[Any]]
Forget = Callable[[], None]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Long tests first: a long one at the end would run on one core, the others idle. What waits
    for the night is left out, unless it is named, before others take turns."""
    if not turns.all_run() and not any("::" in argument for argument in config.args):
        left_out = [item for item in items if item.get_closest_marker("night")]
        items[:] = [item for item in items if not item.get_closest_marker("night")]
        config.hook.pytest_deselected(items=left_out)
    items.sort(key=lambda item: item.get_closest_marker("long") is None)


@pytest.fixture(scope="module", autouse=True)
def collections_visit_what_is_new() -> None:
    """A collection of garbage does not visit what was there before this file: it took a quarter of
    a second, of which a test that asks for forty took ten."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    gc.unfreeze()


@pytest.fixture(scope="module")
def invariance_cases() -> Iterator[ModuleType]:
    """What ``benchmarks/batch_invariance.py`` compares."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks"))
        yield importlib.import_module("invariance_cases")
        sys.modules.pop("invariance_cases")


@pytest.fixture(scope="session")
def code_of_tests() -> Path:
    """A code cache beside the user's, for what tests alone compile: kernels with planted faults,
    the compiler's reports. Later sessions find it there; the oldest gives way at 512 MB."""
    usual = cache.directory()
    with pytest.MonkeyPatch.context() as patch:
        path = usual.with_name(f"{usual.name}-tests")
        patch.setenv("PYFA_CACHE_DIR", str(path))
        cache.prune(max_bytes=1 << 29)
    return path


@pytest.fixture
def nothing_bound(monkeypatch: pytest.MonkeyPatch) -> Forget:
    """No call has come yet, and again none whenever this is called: those that are bound hold the
    backend and the code that they were bound with."""

    def forget() -> None:
        monkeypatch.setattr(binding, "calls", Table())
        monkeypatch.setattr(bound, "calls", Table())

    forget()
    return forget


@pytest.fixture(params=["guards", "by hand"])
def fresh_calls(
    request: pytest.FixtureRequest, nothing_bound: Forget, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No call has come yet. Twice: also as with a PyTorch that has no such guards."""
    if request.param == "by hand":
        monkeypatch.setattr(_torch, "TensorGuards", None)


@pytest.fixture
def calls_of(monkeypatch: pytest.MonkeyPatch) -> CallsOf:
    """The arguments of all calls of a module's function from now on."""

    def calls_of(module: Any, name: str) -> list[Any]:
        seen: list[Any] = []
        function = getattr(module, name)

        def noted(*arguments: Any, **named: Any) -> Any:
            seen.append(arguments)
            return function(*arguments, **named)

        monkeypatch.setattr(module, name, noted)
        return seen

    return calls_of
