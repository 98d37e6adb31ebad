"""The plug-in for vLLM, without vLLM: what it registers, when, and for which versions.

The registry is a stand-in with the two functions that the plug-in calls. ci/consumers serves models
with the real vLLM.
"""

from __future__ import annotations

import enum
import importlib
import sys
from collections.abc import Callable
from types import ModuleType

import pytest

from pyfa.integrations import vllm as integration


class Backends(enum.Enum):
    CPU_ATTN = "vllm.v1.attention.backends.cpu_attn.CPUAttentionBackend"
    FLASH_ATTN = "vllm.v1.attention.backends.flash_attn.FlashAttentionBackend"
    CUSTOM = None

    def is_overridden(self) -> bool:
        return self in REGISTERED

    def get_path(self) -> str:
        return REGISTERED.get(self, self.value)


REGISTERED: dict[Backends, str] = {}


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that makes vLLM ``version`` importable, with the registry or without."""
    REGISTERED.clear()
    monkeypatch.delenv("PYFA_VLLM_CPU", raising=False)

    def function(version: str, with_registry: bool = True) -> None:
        packages = ("", ".v1", ".v1.attention", ".v1.attention.backends")
        for name in packages if with_registry else packages[:1]:
            module = ModuleType(f"vllm{name}")
            module.__path__ = []
            module.__version__ = version  # type: ignore[attr-defined]
            monkeypatch.setitem(sys.modules, module.__name__, module)
        if with_registry:
            registry = ModuleType("vllm.v1.attention.backends.registry")
            registry.AttentionBackendEnum = Backends  # type: ignore[attr-defined]
            registry.register_backend = REGISTERED.__setitem__  # type: ignore[attr-defined]
            monkeypatch.setitem(sys.modules, registry.__name__, registry)

    return function


def test_unasked_it_replaces_nothing(install: Callable[..., None]) -> None:
    install("0.32.0")
    integration.register()
    integration.register()  # vLLM may load plug-ins more than once
    assert REGISTERED == {Backends.CUSTOM: integration.BACKEND}
    assert "pyfa.integrations.vllm.backend" not in sys.modules


def test_asked_on_a_cpu_it_replaces_cpu_attn_alone(
    install: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    install("0.32.1+cpu")
    monkeypatch.setenv("PYFA_VLLM_CPU", "1")
    integration.register()
    assert set(REGISTERED) == {Backends.CUSTOM, Backends.CPU_ATTN}
    assert set(REGISTERED.values()) == {integration.BACKEND}


@pytest.mark.parametrize("name", ["AttentionBackendEnum", "register_backend"])
def test_a_registry_of_other_names_is_left_alone_unless_asked(
    name: str, install: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM calls plug-ins unguarded, so an error would end every vLLM beside pyfa."""
    install("0.32.0")
    monkeypatch.delattr(sys.modules["vllm.v1.attention.backends.registry"], name)
    integration.register()
    assert not REGISTERED
    monkeypatch.setenv("PYFA_VLLM_CPU", "1")
    with pytest.raises(AttributeError, match=name):
        integration.register()


def test_another_plugin_keeps_its_name(install: Callable[..., None]) -> None:
    install("0.32.0")
    REGISTERED[Backends.CUSTOM] = "other.Backend"
    integration.register()
    assert REGISTERED == {Backends.CUSTOM: "other.Backend"}


@pytest.mark.parametrize("version", ["0.31.9", "0.33.0", "1.32.0", "dev"])
def test_another_version_is_refused_only_where_asked(
    install: Callable[..., None], monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    install(version, with_registry=False)
    integration.register()
    assert REGISTERED == {}
    monkeypatch.setenv("PYFA_VLLM_CPU", "1")
    with pytest.raises(ImportError, match=rf"0\.32 or newer, and older than 0\.33; got {version}"):
        integration.register()
    assert REGISTERED == {}


@pytest.mark.parametrize("version", ["0.32.0", "0.32.0+rocm71", "0.32.2rc1"])
def test_the_versions_that_are_supported(version: str) -> None:
    integration.check_version(version)


def test_the_backend_refuses_another_version(install: Callable[..., None]) -> None:
    install("0.40.0")
    with pytest.raises(ImportError, match=r"older than 0\.33; got 0\.40\.0"):
        importlib.import_module(integration.BACKEND.rpartition(".")[0])
