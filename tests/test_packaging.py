"""Wheel and sdist: what is in them, that the wheel works elsewhere, and what it leaves alone.

Nothing here uses the network: what pip may choose from are stand-ins made on the spot, or nothing.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import runpy
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

# One process builds the wheel, for all of these.
pytestmark = pytest.mark.xdist_group("packaging")

ROOT = Path(__file__).parent.parent
WHEEL_LIMIT = 60 * 10**6
# pip without the settings of this machine.
PIP_ENVIRONMENT = {
    name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "PYTHON"))
} | {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}


def run(*command: str | Path, cwd: Path | None = None) -> str:
    ended = subprocess.run(
        [str(part) for part in command],
        capture_output=True,
        text=True,
        cwd=cwd,
        env=PIP_ENVIRONMENT,
    )
    assert ended.returncode == 0, f"{command}\n{ended.stdout}{ended.stderr}"
    return ended.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist, and the wheel that was built from it."""
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT)
    return folder


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    (path,) = built.glob("*.whl")
    return path


def make_environment(path: Path) -> Path:
    """An environment with nothing in it; returns its Python. pip works on it from outside."""
    run(sys.executable, "-m", "venv", "--without-pip", path)
    return path / "bin" / "python"


def pip(python: Path, *arguments: str | Path) -> str:
    return run(sys.executable, "-m", "pip", "--python", python, *arguments)


def install(python: Path, *arguments: str | Path) -> None:
    """Python compiles what is imported; pip would compile all of it."""
    pip(python, "install", "--no-compile", *arguments)


def site_packages(python: Path) -> Path:
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    return Path(run(python, "-c", code).strip())


def make_wheel(
    folder: Path, name: str, version: str, files: Mapping[str, str], requires: Sequence[str] = ()
) -> None:
    """The smallest wheel that pip accepts."""
    stem = f"{name.replace('-', '_')}-{version}"
    requirements = "".join(f"Requires-Dist: {each}\n" for each in requires)
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{requirements}"
    contents = {
        **files,
        f"{stem}.dist-info/METADATA": metadata,
        f"{stem}.dist-info/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = f"{stem}.dist-info/RECORD"
    lines = []
    for path, text in contents.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=")
        lines.append(f"{path},sha256={digest.decode()},{len(text.encode())}")
    contents[record] = "\n".join([*lines, f"{record},,", ""])
    with zipfile.ZipFile(folder / f"{stem}-py3-none-any.whl", "w") as archive:
        for path, text in contents.items():
            archive.writestr(path, text)


def hashes(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def test_wheel_contents(wheel: Path) -> None:
    assert wheel.stat().st_size <= WHEEL_LIMIT
    assert wheel.name.endswith("-py3-none-any.whl")
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"pyfa"}
    assert "pyfa/api.py" in names
    assert "pyfa/_kernels/params.h" in names
    assert "pyfa/py.typed" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert not [name for name in names if "test" in name.split("/")[1] or "__pycache__" in name]
    # Every module and data file of the checkout, so that none is lost to a pattern.
    listed = run("git", "-C", ROOT, "ls-files", "pyfa", "kernels").split()
    expected = {name.replace("kernels/", "pyfa/_kernels/", 1) for name in listed}
    assert {name for name in expected if (ROOT / name).exists()} <= set(names)


def test_sdist_contents(built: Path) -> None:
    (path,) = built.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
    assert {"pyproject.toml", "LICENSE", "README.md", "CHANGELOG.md", "CONTRIBUTING.md"} <= names
    assert {"pyfa/api.py", "ci/test", "ci/demo", "tests/test_packaging.py"} <= names
    assert "kernels/params.h" in names
    assert not [name for name in names if name.startswith((".venv", ".git/", "dist/"))]


def test_wheel_works_in_another_environment(wheel: Path, tmp_path: Path) -> None:
    """Its own copy of pyfa, from another folder, over the torch and numpy of this environment."""
    python = make_environment(tmp_path / "env")
    # Where this environment sees its packages; an editable pyfa among them does not come along.
    lent = [path for path in sys.path if path.endswith("-packages")]
    (site_packages(python) / "lent.pth").write_text("\n".join([*lent, ""]))
    install(python, "--no-deps", wheel)
    code = """
import torch, pyfa
print(pyfa.__file__)
q = torch.randn(1, 32, 4, 16, requires_grad=True)
out = pyfa.attention(q, q, q, causal=True)
out.sum().backward()
assert q.grad is not None
"""
    assert str(tmp_path / "env") in run(python, "-c", code, cwd=tmp_path)
    pyfa = python.parent / "pyfa"
    info = json.loads(run(pyfa, "info", "--json", cwd=tmp_path))
    assert {answer["name"]: answer["ready"] for answer in info["backends"]}["torch"]
    assert "* " in run(pyfa, "explain", "--causal", cwd=tmp_path)


ROCM_TORCH = "2.9.0+rocm6.4"


@pytest.fixture
def rocm(tmp_path: Path) -> tuple[Path, Path]:
    """An environment with stand-ins for ROCm's torch and its triton, and what pip may choose from.

    The choice holds newer plain builds of both: what an installation would do harm with.
    """
    folder = tmp_path / "wheels"
    folder.mkdir()
    for name in ("numpy", "filelock", "platformdirs", "rich"):
        make_wheel(folder, name, "9.0", {f"{name}.py": ""})
    make_wheel(folder, "torch", ROCM_TORCH, {"torch/__init__.py": "hip = '6.4'"},
               ["pytorch-triton-rocm==3.5.0"])  # fmt: skip
    make_wheel(folder, "pytorch-triton-rocm", "3.5.0", {"triton/__init__.py": "rocm = True"})
    python = make_environment(tmp_path / "env")
    install(python, "--find-links", folder, "torch", "rich")
    make_wheel(folder, "torch", "99.0", {"torch/__init__.py": "hip = None"}, ["triton"])
    make_wheel(folder, "triton", "99.0", {"triton/__init__.py": "rocm = False"})
    return python, folder


def test_an_installed_rocm_torch_is_left_as_it_was(wheel: Path, rocm: tuple[Path, Path]) -> None:
    python, folder = rocm
    site = site_packages(python)
    before = hashes(site)
    assert any(name.startswith(f"torch-{ROCM_TORCH}") for name in before)
    install(python, "--find-links", folder, wheel)
    after = hashes(site)
    assert {name: after.get(name) for name in before} == before
    new = {
        name.split("/")[0].split("-")[0].removesuffix(".py") for name in set(after) - set(before)
    }
    assert new <= {"pyfa", "pyfa_attention", "numpy", "filelock", "platformdirs", "..", "bin"}
    pip(python, "check")
    install(python, "--find-links", folder, "--upgrade", wheel)
    assert {name: hashes(site).get(name) for name in before} == before


def test_a_wheel_that_requires_triton_would_be_found(
    wheel: Path, rocm: tuple[Path, Path], tmp_path: Path
) -> None:
    """The check above sees the harm that it is there for."""
    python, folder = rocm
    spoilt = tmp_path / "spoilt" / wheel.name
    spoilt.parent.mkdir()
    with zipfile.ZipFile(wheel) as good, zipfile.ZipFile(spoilt, "w") as bad:
        for item in good.infolist():
            data = good.read(item)
            if item.filename.endswith(".dist-info/METADATA"):
                data = data.replace(b"Requires-Dist: rich\n", b"Requires-Dist: triton\n", 1)
                assert b"Requires-Dist: triton\n" in data
            bad.writestr(item, data)
    before = hashes(site_packages(python))
    install(python, "--find-links", folder, spoilt)
    after = hashes(site_packages(python))
    changed = {name for name in before if after.get(name) != before[name]}
    assert changed == {"triton/__init__.py"}


def test_dependencies_are_few_and_extras_are_said(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    (name,) = (each for each in archive.namelist() if each.endswith(".dist-info/METADATA"))
    lines = archive.read(name).decode().splitlines()
    required = [line.split(": ", 1)[1] for line in lines if line.startswith("Requires-Dist: ")]
    plain = sorted(each for each in required if "extra ==" not in each)
    assert plain == ["filelock", "numpy", "platformdirs", "rich", "torch>=2.7"]
    extras = {line.split(": ", 1)[1] for line in lines if line.startswith("Provides-Extra: ")}
    assert "[Start](docs/start.md#install) lists all extras" in (ROOT / "README.md").read_text()
    said = runpy.run_path(str(ROOT / "docs" / "generated.py"))["extras"]()
    assert set(re.findall(r"^\| `(\w+)`", said, re.M)) == extras


def test_the_page_on_an_index_leads_nowhere_wrong(wheel: Path) -> None:
    """An index shows the README alone: no picture and no link of the checkout may be in it."""
    archive = zipfile.ZipFile(wheel)
    (name,) = (each for each in archive.namelist() if each.endswith(".dist-info/METADATA"))
    head, _, page = archive.read(name).decode().partition("\n\n")
    assert "Description-Content-Type: text/markdown" in head
    own = (ROOT / "README.md").read_text()
    assert "](docs/start.md)" in own
    assert '<img src="docs/' in own
    targets = re.findall(r"\]\(([^)]*)\)", page) + re.findall(r'src="([^"]*)"', page)
    assert [each for each in targets if not each.startswith("https://")] == []
    for kept in ("# pyfa", "pyfa.attention(q, k, v, causal=True)", "Features and support lists"):
        assert kept in page


def test_hints_name_the_distribution() -> None:
    """What an error says to install is what this project is called on an index, with an extra."""
    text = (ROOT / "pyproject.toml").read_text()
    project = re.search(r'^name = "([^"]+)"', text, re.M)
    assert project is not None
    extras = set(re.findall(r"^(\w+) = \[", text, re.M))
    hints = []
    for path in (ROOT / "pyfa").rglob("*.py"):
        hints += re.findall(r"pip install '([\w.-]+)\[(\w+)\]'", path.read_text())
    assert len(hints) >= 3
    for name, extra in hints:
        assert name == project[1]
        assert extra in extras
