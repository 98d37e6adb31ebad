"""Imports inside pyfa go one way, and every module has a place in that order.

The walk reads the syntax tree, so an import inside a function or under ``TYPE_CHECKING`` counts.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "pyfa"

# Every module or package of pyfa may import those before it. A backend is a layer of its own kind.
ORDER = (
    "errors", "_torch", "env", "context",
    "arch", "device", "mods", "problem", "shape", "sizes", "validate", "validate_cache",
    "validate_fp8", "validate_mods", "validate_values", "masks", "scores",
    "blocks", "reference", "traffic", "plan",
    "abi", "sources", "codeobject", "cubin", "bundle", "cache", "emulator",
    "backends",
    "dispatch", "merging", "bound", "ops", "request", "sharding", "binding", "api", "latent",
    "quantize", "",
    "compat", "integrations", "distributed", "conformance", "bench", "cli", "__main__",
)  # fmt: skip
BACKENDS = ("hip", "cuda", "triton", "torch")
# What every backend may import; native, only hip and cuda do.
SHARED = ("base", "common", "native")
DRIVERS = ("hip", "cuda", "rocm")


def modules(package: Path) -> dict[str, Path]:
    """Every module of the package by its dotted name below it; the package itself is ""."""
    found = {}
    for path in sorted(package.rglob("*.py")):
        parts = list(path.relative_to(package).with_suffix("").parts)
        if parts[-1] == "__init__":
            parts.pop()
        found[".".join(parts)] = path
    return found


def imports(
    name: str, path: Path, known: dict[str, Path], for_types: bool = True
) -> list[tuple[int, str, bool]]:
    """(line, module, whether it is pyfa's) of every import in ``path``; without ``for_types`` of
    none that only a type checker reads."""
    here = name.split(".") if name else []
    if path.name != "__init__.py":
        here = here[:-1]
    found: list[tuple[int, str, bool]] = []

    def add(line: int, target: str, names: list[str]) -> None:
        """``from target import names`` inside pyfa: a name may be a module itself."""
        for each in names or [""]:
            module = f"{target}.{each}".strip(".")
            found.append((line, module if each and module in known else target, True))

    tree = ast.parse(path.read_text())
    if not for_types:
        tree = _WithoutTypes().visit(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            names = [alias.name for alias in node.names]
            if node.level:
                base = here[: len(here) - node.level + 1]
                add(
                    node.lineno,
                    ".".join([*base, *(node.module or "").split(".")]).strip("."),
                    names,
                )
            elif (node.module or "").split(".")[0] == "pyfa":
                add(node.lineno, (node.module or "")[len("pyfa.") :], names)
            else:
                found.append((node.lineno, node.module or "", False))
        elif isinstance(node, ast.Import):
            for alias in node.names:
                inside = alias.name.split(".")[0] == "pyfa"
                target = alias.name[len("pyfa.") :] if inside else alias.name
                found.append((node.lineno, target, inside))
        elif isinstance(node, ast.Call) and _is_dynamic(node.func) and node.args:
            first = node.args[0]
            if isinstance(first, ast.Constant) and isinstance(first.value, str):
                inside = first.value.split(".")[0] == "pyfa"
                target = first.value[len("pyfa.") :] if inside else first.value
                found.append((node.lineno, target, inside))
    return found


class _WithoutTypes(ast.NodeTransformer):
    def visit_If(self, node: ast.If) -> ast.AST | list[ast.stmt]:
        if isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            return node.orelse
        return self.generic_visit(node)


def circles(package: Path) -> list[list[str]]:
    """The modules that import each other, by however many others, inside functions too.

    That a module's packages are imported before it does not count: ``pyfa`` imports nearly all.
    """
    known = modules(package)
    graph = {
        name: {
            target
            for _, target, inside in imports(name, path, known, for_types=False)
            if inside and target in known
        }
        for name, path in known.items()
    }
    reached = {name: _reached(graph, name) for name in graph}
    found = {
        tuple(sorted(other for other in mine if name in reached[other]))
        for name, mine in reached.items()
        if name in mine
    }
    return sorted(map(list, found))


def _reached(graph: dict[str, set[str]], start: str) -> set[str]:
    found: set[str] = set()
    waiting = list(graph[start])
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting += graph[name]
    return found


def _is_dynamic(function: ast.expr) -> bool:
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    return name in ("import_module", "__import__")


def violations(package: Path) -> list[str]:
    """A sentence for every module without a place and every import that goes the wrong way."""
    known = modules(package)
    found = []
    for name, path in known.items():
        parts = name.split(".")
        if parts[0] not in ORDER:
            found.append(f"{name}: has no place in ORDER")
            continue
        if parts[0] == "backends" and len(parts) > 1 and parts[1] not in (*BACKENDS, *SHARED):
            found.append(f"{name}: is a backend that BACKENDS does not know")
            continue
        for line, target, inside in imports(name, path, known):
            why = _why_not(name, path, target) if inside else _why_not_outside(name, path, target)
            if why:
                found.append(f"{name}:{line}: imports {target or 'pyfa'}: {why}")
    return found


def _why_not(name: str, path: Path, target: str) -> str:
    mine, theirs = name.split("."), target.split(".")
    if theirs[0] not in ORDER:
        return "has no place in ORDER"
    if mine[0] == "reference":
        alone = theirs[0] in ("problem", "mods")
        return "" if alone else "reference imports problem and mods alone"
    if theirs[0] == "emulator" and mine[0] != "emulator":
        allowed = mine[0] == "backends" and path.name.startswith("runtime")
        return "" if allowed else "only a backend's runtime runs the emulator"
    if theirs[0] == mine[0] == "backends":
        if len(mine) == 1 or "".join(theirs[1:2]) in (*SHARED, mine[1]):
            return ""
        return "backends do not import each other"
    if ORDER.index(theirs[0]) > ORDER.index(mine[0]):
        return f"{theirs[0] or 'pyfa'} comes after {mine[0]}"
    return ""


def _why_not_outside(name: str, path: Path, target: str) -> str:
    top = target.split(".")[0]
    if top in DRIVERS and not path.name.startswith("runtime"):
        return "only runtime*.py files import a driver"
    if top == "triton" and not name.startswith("backends.triton"):
        return "only backends/triton imports triton"
    if top == "diffusers" and name != "integrations.diffusers":
        return "only integrations/diffusers.py imports diffusers"
    if top == "transformers" and name != "integrations.transformers":
        return "only integrations/transformers.py imports transformers"
    if top == "vllm" and not name.startswith("integrations.vllm"):
        return "only integrations/vllm imports vllm"
    return ""


def test_imports_go_one_way() -> None:
    assert violations(PACKAGE) == []


def test_no_modules_import_each_other() -> None:
    assert circles(PACKAGE) == []


def test_a_planted_circle_is_found(tmp_path: Path) -> None:
    _write(tmp_path / "__init__.py", "from .a import x")
    _write(tmp_path / "a.py", "from .folder import b")
    _write(tmp_path / "folder" / "__init__.py", "")
    _write(tmp_path / "folder" / "b.py", "def f():\n    from .c import y")
    _write(tmp_path / "folder" / "c.py", "from ..d import z")
    _write(tmp_path / "d.py", "if TYPE_CHECKING:\n    from .a import x")
    assert circles(tmp_path) == []
    _write(tmp_path / "d.py", "from .a import x")
    assert circles(tmp_path) == [["a", "d", "folder.b", "folder.c"]]


def test_every_module_is_walked() -> None:
    known = modules(PACKAGE)
    assert {"", "api", "backends", "backends.torch.sdpa", "cli", "__main__"} <= set(known)
    assert len(imports("api", known["api"], known)) > 3


@pytest.mark.parametrize(
    ("path", "source", "expected"),
    [
        ("plan.py", "from .dispatch import prepare", "dispatch comes after plan"),
        ("plan.py", "def f():\n    from . import api", "api comes after plan"),
        ("device.py", "import pyfa.cache", "cache comes after device"),
        ("device.py", "from pyfa import attention", "pyfa comes after device"),
        ("device.py", "import pyfa", "pyfa comes after device"),
        ("device.py", "import importlib\nimportlib.import_module('pyfa.cli')", "cli comes after"),
        ("reference.py", "from .device import of", "reference imports problem and mods alone"),
        ("newcomer.py", "", "has no place in ORDER"),
        ("backends/vulkan/backend.py", "", "BACKENDS does not know"),
        ("backends/torch/x.py", "from ..triton import plans", "do not import each other"),
        ("backends/torch/x.py", "from ...backends import NAMES", "do not import each other"),
        ("backends/torch/x.py", "from ...dispatch import prepare", "comes after backends"),
        ("backends/hip/plans.py", "import hip", "only runtime*.py"),
        ("backends/hip/plans.py", "from cuda.bindings import driver", "only runtime*.py"),
        ("backends/hip/plans.py", "from ...emulator import machine", "only a backend's runtime"),
        ("cli/x.py", "from ..emulator import machine", "only a backend's runtime"),
        ("cli/x.py", "import triton", "only backends/triton"),
        ("cli/x.py", "from transformers import AutoModel", "only integrations/transformers.py"),
        ("cli/x.py", "import diffusers", "only integrations/diffusers.py"),
        ("cli/x.py", "from vllm import envs", "only integrations/vllm"),
        ("api.py", "from .compat import fa2", "compat comes after api"),
    ],
)
def test_a_planted_violation_is_found(
    tmp_path: Path, path: str, source: str, expected: str
) -> None:
    names = ("device", "plan", "problem", "cache", "dispatch", "api", "emulator/machine",
             "backends/base", "backends/torch/tiled", "backends/triton/plans")  # fmt: skip
    for name in names:
        _write(tmp_path / f"{name}.py", "import torch")
    for folder in ("", "cli", "emulator", "backends", "backends/torch", "backends/triton"):
        _write(tmp_path / folder / "__init__.py", "")
    assert violations(tmp_path) == []
    _write(tmp_path / path, source)
    found = violations(tmp_path)
    assert len(found) == 1
    assert expected in found[0]


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("backends/hip/runtime_device.py", "from hip import hip"),
        ("backends/hip/runtime_emulator.py", "from ...emulator import machine"),
        ("backends/cuda/runtime.py", "from cuda.bindings import driver\nfrom ..base import x"),
        ("backends/triton/kernel.py", "import triton.language as tl"),
        ("cli/info.py", "import pyfa\nfrom .. import cache\nfrom . import console"),
        ("integrations/transformers.py", "from transformers import AttentionInterface"),
    ],
)
def test_what_is_allowed_passes(tmp_path: Path, path: str, source: str) -> None:
    for name in ("emulator/machine", "cache", "cli/console", "backends/base"):
        _write(tmp_path / f"{name}.py", "")
    _write(tmp_path / "__init__.py", "")
    _write(tmp_path / path, source)
    assert violations(tmp_path) == []


def _write(path: Path, source: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(source)


def test_private_names_of_pytorch_are_in_one_module() -> None:
    found = [
        f"{name}:{node.lineno}"
        for name, path in modules(PACKAGE).items()
        if name != "_torch"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and node.attr == "_C"
    ]
    assert not found
