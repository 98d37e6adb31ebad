"""The plug-in for SGLang, without SGLang: what it registers, when, and for which versions.

The registry is a stand-in with the functions that the plug-in calls. ci/consumers serves a model
with the real SGLang.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from pyfa.integrations import sglang as integration

CHOICES = (
    "add_attention_backend_choices",
    "add_deterministic_attention_backend_choices",
    "add_radix_supported_deterministic_attention_backend_choices",
)


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], dict[str, Any]]:
    """Return a function that makes SGLang ``version`` importable; it returns what is registered."""

    def function(version: str) -> dict[str, Any]:
        found: dict[str, Any] = {"backends": {}, **{name: [] for name in CHOICES}}
        registry, choices = "srt.layers.attention.attention_registry", "srt.arg_groups.choices"
        for path in (registry, choices):
            parts = path.split(".")
            for count in range(len(parts) + 1):
                name = ".".join(("sglang", *parts[:count]))
                module = ModuleType(name)
                module.__path__ = []
                monkeypatch.setitem(sys.modules, name, module)
        sys.modules["sglang"].__version__ = version  # type: ignore[attr-defined]
        modules: Any = sys.modules
        modules[f"sglang.{registry}"].ATTENTION_BACKENDS = found["backends"]
        modules[f"sglang.{registry}"].register_attention_backend = lambda name: (
            lambda made: found["backends"].setdefault(name, made)
        )
        for name in CHOICES:
            setattr(modules[f"sglang.{choices}"], name, found[name].extend)
        return found

    return function


def test_it_adds_a_name_and_loads_nothing(install: Callable[[str], dict[str, Any]]) -> None:
    found = install("0.5.23")
    integration.register()
    integration.register()  # each process of SGLang loads plug-ins, some twice
    assert set(found.pop("backends")) == {"pyfa"}
    assert found == {name: ["pyfa"] for name in CHOICES}
    assert "pyfa.integrations.sglang.backend" not in sys.modules


def test_another_plugin_keeps_its_name(install: Callable[[str], dict[str, Any]]) -> None:
    found = install("0.5.23")
    found["backends"]["pyfa"] = "another"
    integration.register()
    assert found["backends"] == {"pyfa": "another"}
    assert found[CHOICES[0]] == []


@pytest.mark.parametrize("version", ["0.5.22", "0.6.0", "1.5.23", "dev"])
def test_another_version_is_refused_only_where_asked(
    install: Callable[[str], dict[str, Any]], version: str
) -> None:
    found = install(version)
    integration.register()
    with pytest.raises(
        ImportError, match=rf"0\.5\.23 or newer, and older than 0\.6\.0; got {version}"
    ):
        found["backends"]["pyfa"](None)


@pytest.mark.parametrize("version", ["0.5.23", "0.5.23.post1", "0.5.30rc1"])
def test_the_versions_that_are_supported(version: str) -> None:
    integration.check_version(version)
