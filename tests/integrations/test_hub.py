"""`pyfa hub export`: the folder, the line, and functions that compute with sinks.

``tests/consumers/hub_kernels.py`` loads the folder with the real library.
"""

from __future__ import annotations

import importlib.util
import inspect
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from pyfa import cli
from pyfa.api import attention
from pyfa.compat import fa2, hub
from pyfa.compat.fa2 import ArgumentError


def exported(folder: Path) -> Any:
    """The module, loaded as `kernels` does: from its file, under the metadata's id."""
    inside = folder / "build" / "torch-universal"
    metadata = json.loads((inside / "metadata.json").read_text())
    spec = importlib.util.spec_from_file_location(metadata["id"], inside / "__init__.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(("hip", "name"), [(None, "flash-attn2"), ("6.4", "aiter-flash-attn")])
def test_the_line_names_the_fallback(
    hip: str | None, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.chdir(tmp_path)
    assert cli.main(["hub", "export", "kernel"]) == 0
    variable, _, value = capsys.readouterr().out.strip().partition("=")
    assert variable == "LOCAL_KERNELS"
    served = dict(entry.split("=") for entry in value.split(":"))
    names = {"pyfa/attention", f"kernels-community/{name}", "kernels-community/vllm-flash-attn3"}
    assert set(served) == names
    assert set(served.values()) == {str(tmp_path / "kernel")}


def test_chosen_names_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["hub", "export", str(tmp_path / "kernel"), "--name", "mine/one", "mine/two"]
    assert cli.main([*arguments, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["names"] == ["mine/one", "mine/two"]
    assert (
        data["variable"] == f"LOCAL_KERNELS=mine/one={tmp_path}/kernel:mine/two={tmp_path}/kernel"
    )


def test_the_functions_are_those_of_flash_attention(tmp_path: Path) -> None:
    module = exported(hub.export(tmp_path))
    assert set(hub.__all__) <= set(dir(module))
    for name in hub.__all__:
        theirs = dict(inspect.signature(getattr(fa2, name)).parameters)
        mine = dict(inspect.signature(getattr(module, name)).parameters)
        assert [*mine] == [*theirs, "s_aux"]
        for each, parameter in theirs.items():
            assert mine[each].default == parameter.default


@pytest.mark.parametrize("sinks", [False, True])
def test_they_compute_with_sinks(sinks: bool, tmp_path: Path) -> None:
    module = exported(hub.export(tmp_path))
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 40, heads, 16, requires_grad=True) for heads in (4, 2, 2))
    s_aux = torch.randn(4, requires_grad=True) if sinks else None
    given = [x for x in (q, k, v, s_aux) if x is not None]
    wanted = attention(q, k, v, causal=True, window=(7, 7), sinks=s_aux)
    dout = torch.randn_like(wanted)
    grads = torch.autograd.grad(wanted, given, dout)
    options = {"causal": True, "window_size": (7, 7), "s_aux": s_aux}
    out = module.flash_attn_func(q, k, v, **options)
    assert torch.equal(out, wanted)
    for mine, theirs in zip(torch.autograd.grad(out, given, dout), grads, strict=True):
        assert torch.equal(mine, theirs)
    starts = torch.tensor([0, 40, 80], dtype=torch.int32)
    flat = [x.flatten(0, 1) for x in (q, k, v)]
    out = module.flash_attn_varlen_func(*flat, starts, starts, 40, 40, **options)
    torch.testing.assert_close(out.unflatten(0, (2, 40)), wanted)
    # The last query over a cache that the last key is appended to, in pages that are not in order.
    with torch.no_grad():
        pages = torch.tensor([[3, 0, 5, 1], [2, 6, 4, 7]], dtype=torch.int32)
        caches = []
        for x in (k, v):
            cache = torch.zeros(8, 10, 2, 16)
            cache[pages.long()] = x.unflatten(1, (4, 10))
            cache[pages[:, 3].long(), 9] = torch.nan
            caches.append(cache)
        out = module.flash_attn_with_kvcache(
            q[:, -1:], *caches, k[:, -1:], v[:, -1:], block_table=pages,
            cache_seqlens=torch.tensor([39, 39], dtype=torch.int32), **options,
        )  # fmt: skip
    torch.testing.assert_close(out, wanted[:, -1:])


def test_options_are_keywords(tmp_path: Path) -> None:
    """What is dropout_p in one library is the scale in another."""
    q = torch.randn(1, 8, 1, 16)
    with pytest.raises(TypeError, match="positional"):
        hub.flash_attn_func(q, q, q, 0.25)  # type: ignore[call-arg]
    with pytest.raises(ArgumentError, match=r"^s_aux: "):
        hub.flash_attn_func(q, q, q, s_aux=torch.randn(3))


@pytest.mark.parametrize("name", ["a:b", "a=b"])
def test_a_path_that_the_variable_cannot_hold(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["hub", "export", str(tmp_path / name)]) == 2
    assert "DIR: expected a path without ':' and '='" in capsys.readouterr().err
    assert not (tmp_path / name).exists()


def test_another_kernel_stays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "build" / "torch-cuda" / "__init__.py"
    other.parent.mkdir(parents=True)
    other.write_text("")
    assert cli.main(["hub", "export", str(tmp_path)]) == 2
    assert "DIR: another kernel is in" in capsys.readouterr().err
    other.rename(tmp_path / "__init__.py")
    other.parent.rename(tmp_path / "build" / "torch-universal")
    (tmp_path / "__init__.py").rename(tmp_path / "build" / "torch-universal" / "__init__.py")
    assert cli.main(["hub", "export", str(tmp_path)]) == 2


def test_a_name_that_is_no_repository(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["hub", "export", str(tmp_path), "--name", "flash-attn2"]) == 2
    assert "--name: expected OWNER/NAME, got flash-attn2" in capsys.readouterr().err


def test_its_own_folder_is_written_again(tmp_path: Path) -> None:
    hub.export(tmp_path)
    hub.export(tmp_path)
    exported(tmp_path)
