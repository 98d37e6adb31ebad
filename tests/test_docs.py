"""The guide says what the code does: its examples run, its commands parse, its links lead on.

Its tables have all that the code has, and the messages that it explains are those of the code.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import html
import importlib.util
import io
import json
import logging
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch

import pyfa
from pyfa import cli, env
from pyfa.arch import ARCHS
from pyfa.backends import BACKENDS, NAMES
from pyfa.backends.cuda.target import TARGET as CUDA
from pyfa.backends.hip.target import TARGET as HIP
from pyfa.backends.native import catalog
from pyfa.compat import shim
from pyfa.device import DEVICES
from pyfa.problem import FEATURES

for name in ("sphinx", "myst_parser", "furo", "sphinx_copybutton"):
    pytest.importorskip(name, reason="needs the extra docs")

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))


def load(name: str) -> ModuleType:
    """A module of docs/, under the name that the other one imports it by."""
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def generated() -> Iterator[ModuleType]:
    yield load("generated")
    del sys.modules["generated"]


@pytest.fixture(scope="module")
def matrix(generated: ModuleType) -> Iterator[ModuleType]:
    yield load("matrix")
    del sys.modules["matrix"]


@pytest.fixture(scope="module")
def patterns() -> Iterator[ModuleType]:
    yield load("patterns")
    del sys.modules["patterns"]


def build(source: Path, out: Path) -> str:
    """What Sphinx says of ``source``: nothing, if every link and name leads somewhere."""
    done = subprocess.run(
        [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html",
         "-c", DOCS, source, out],
        capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=300,
    )  # fmt: skip
    assert (done.returncode == 0) == (not done.stderr), done.stderr
    return done.stderr


# Sphinx takes 15 s: one process builds the site, for all who read it.
reads_site = pytest.mark.xdist_group("site")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    assert build(DOCS, folder) == ""
    return folder


# --- blocks of code


class Block(NamedTuple):
    """One fenced block: its page, line, the words that introduce it, and what is in it."""

    page: str
    line: int
    info: tuple[str, ...]
    text: str


def blocks(path: Path) -> list[Block]:
    text = path.read_text()
    found = re.finditer(r"^```([^\n]*)\n(.*?)^```$", text, re.M | re.S)
    return [
        Block(
            path.relative_to(DOCS).as_posix(),
            text.count("\n", 0, each.start()) + 1,
            tuple(each[1].split()),
            each[2],
        )
        for each in found
    ]


BLOCKS = [block for path in PAGES for block in blocks(path)]
PYTHON = [block for block in BLOCKS if block.info[:1] == ("python",)]


def _has(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of the package around it
        return False


# What a snippet may need beyond a CPU, as the words of its fence after the first.
LACKING = {
    "gpu": "" if torch.cuda.is_available() else "needs a GPU",
    "cxx": "" if shutil.which("c++") or shutil.which("g++") else "needs a C++ compiler",
    "transformers": "" if _has("transformers") else "needs transformers",
    "deepseek_v32": "" if _has("transformers.models.deepseek_v32") else "needs DeepSeek-V3.2",
}
SPECIAL = [block for block in PYTHON if len(block.info) > 1]


def why_skipped(block: Block) -> str:
    return "; ".join(LACKING[word] for word in block.info[1:] if LACKING[word])


@pytest.fixture
def reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A reader's process: flash-attention's names are pyfa's, and what snippets set is undone."""
    shim.install(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.split(".")[0].startswith("flash_attn")]:
        monkeypatch.delitem(sys.modules, name)
    log = logging.getLogger("pyfa")
    before = dict(os.environ), log.level, list(log.handlers)
    torch.manual_seed(0)
    yield
    os.environ.clear()
    os.environ.update(before[0])
    log.setLevel(before[1])
    log.handlers[:] = before[2]
    for name in [name for name in sys.modules if name.split(".")[0].startswith("flash_attn")]:
        del sys.modules[name]


def execute(page: str, last: Block | None = None) -> None:
    """A page's snippets in one namespace, in order, up to ``last``; what they print is as shown.

    Those that need what is not here are left out; a page's others do not build on them.
    """
    # A module that can be found by its name, which torch.compile does.
    name = f"guide_{page.removesuffix('.md')}"
    module = sys.modules[name] = ModuleType(name)
    try:
        _execute(page, last, vars(module))
    finally:
        del sys.modules[name]


def _execute(page: str, last: Block | None, namespace: dict[str, Any]) -> None:
    printed = ""
    for block in (each for each in BLOCKS if each.page == page):
        if block.info == ("output",):
            assert printed.rstrip() == block.text.rstrip(), f"{page}:{block.line}"
        if block in PYTHON and not why_skipped(block):
            # So that a traceback shows the page's own line.
            text = "\n" * block.line + block.text
            with contextlib.redirect_stdout(io.StringIO()) as stdout:
                exec(compile(text, str(DOCS / page), "exec"), namespace)
            printed = stdout.getvalue()
        if block == last:
            return


@pytest.mark.parametrize("page", sorted({block.page for block in PYTHON}))
def test_examples_run(page: str, reader: None) -> None:
    execute(page)


@pytest.mark.parametrize("block", SPECIAL, ids=lambda block: f"{block.page}:{block.line}")
def test_examples_that_need_more(block: Block, reader: None) -> None:
    """Shown one by one, so that those which cannot run here are seen to be skipped, and why."""
    if why_skipped(block):
        pytest.skip(why_skipped(block))
    execute(block.page, block)


def test_there_are_examples_and_only_known_words() -> None:
    assert len(PYTHON) >= 30
    known = {"python", "shell", "yaml", "text", "output"}
    known |= {"{eval-rst}", "{toctree}", "{include}"}  # Sphinx's
    assert {block.info[0] for block in BLOCKS} <= known
    assert {word for block in PYTHON for word in block.info[1:]} <= set(LACKING)
    # Every block says what it is; an indented one is for formulas.
    assert [block for block in BLOCKS if not block.info] == []


# --- commands


def command_lines() -> list[tuple[str, str]]:
    """(where, command) of everything that calls pyfa or a script of the checkout."""
    found = []
    for block in BLOCKS:
        if block.info[0] not in ("shell", "yaml"):
            continue
        text = re.sub(r"\$\{\{ matrix\.backend \}\}", "torch", block.text)
        text = re.sub(r"\$\{\{.*?\}\}", "some", text)
        text = re.sub(r">\n((?: {10}.*\n)+)", lambda m: " ".join(m[1].split()) + "\n", text)
        for line in text.splitlines():
            line = line.strip().removeprefix("- ").removeprefix("run: ")
            line = re.sub(r"^(?:[A-Z_]+=\S+ )+", "", line)
            if re.match(r"(pyfa|ci/\w+|python) ", line + " "):
                found.append((f"{block.page}:{block.line}", line))
    return found


@pytest.mark.parametrize(("where", "line"), command_lines())
def test_commands_parse(where: str, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    name, *arguments = shlex.split(line, comments=True)
    if name == "pyfa":
        try:
            cli.parser().parse_args(arguments)
        except SystemExit as error:
            raise AssertionError(f"{where}: {capsys.readouterr().err}") from error
        suite = arguments[1:2] if arguments[0] == "bench" else []
        assert all(each.startswith("-") or each in cli.bench._SUITES for each in suite)
    elif name.startswith("ci/"):
        assert (ROOT / name).stat().st_mode & 0o111
    else:
        assert (ROOT / arguments[0]).is_file()


def test_the_guide_shows_every_command() -> None:
    used = {shlex.split(line, comments=True)[1] for _, line in command_lines() if "pyfa " in line}
    (every,) = (a.choices for a in cli.parser()._actions if isinstance(a.choices, dict))
    shown = {line.split()[3] for line in markers() if line.startswith("generated: run")} | used
    shown |= {line.split()[2] for line in markers() if line.startswith("generated: run")}
    assert set(every) <= shown


def test_the_workflow_is_one() -> None:
    yaml = pytest.importorskip("yaml")
    (block,) = (each for each in BLOCKS if each.info == ("yaml",))
    workflow = yaml.safe_load(block.text)
    assert set(workflow["jobs"]) == {"conformance", "compare", "speed"}
    for job in workflow["jobs"].values():
        for step in job["steps"]:
            assert ("run" in step) != ("uses" in step)
    # Extras that it names are there.
    named = set(re.findall(r"extras: (\w+)", block.text))
    assert named == {"cuda", "compile"}
    assert named <= set(re.findall(r"^(\w+) = \[", (ROOT / "pyproject.toml").read_text(), re.M))


# --- the built pages


VOID = ("meta", "link", "br", "hr", "img", "input", "rect", "path", "line", "polyline", "circle")


class Links(HTMLParser):
    """What a page asks a browser for, and what can be linked to in it."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.targets: list[str] = []
        self.loaded: list[str] = []
        self.stack: list[str] = []
        self.feed(path.read_text())
        assert self.stack == [], f"{path.name} leaves {self.stack} open"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        if tag not in VOID:
            self.stack.append(tag)
        if found.get("id"):
            self.anchors.add(str(found["id"]))
        if tag == "a":
            self.targets.append(str(found["href"]))
        else:
            self.loaded += [str(found[name]) for name in ("href", "src") if found.get(name)]

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.stack.pop() == tag


def built(page: Path) -> str:
    """The HTML of a page of the guide, in the folder of the site."""
    return page.relative_to(DOCS).with_suffix(".html").as_posix()


@reads_site
def test_links_and_what_is_loaded(site: Path) -> None:
    """Sphinx told of links between pages. The rest: what is loaded is in the folder."""
    pages = {path.relative_to(site).as_posix(): Links(path) for path in site.rglob("*.html")}
    assert {built(path) for path in PAGES} <= set(pages)
    for name, page in pages.items():
        folder = (site / name).parent
        for path in page.loaded:
            target = path.partition("?")[0].partition("#")[0]
            assert not re.match(r"[a-z]+:|//", target), f"{name} loads {path}"
            assert not target or (folder / target).exists(), f"{name}: {path}"
        for target in page.targets:
            path, _, anchor = target.partition("#")
            if re.match(r"https:", path):
                # The guide stands alone; the theme names its author, the changelog its rules,
                # and a figure that is not pyfa's names its paper.
                paper = path.startswith("https://arxiv.org/abs/")
                assert paper or "furo" in path or name == "changelog.html", f"{name}: {target}"
                continue
            leads = Path(os.path.normpath(folder / path)) if path else site / name
            assert leads.is_file(), f"{name}: {target}"
            found = pages.get(leads.relative_to(site).as_posix())
            assert not anchor or found is None or anchor in found.anchors, f"{name}: {target}"
    for file in (*site.rglob("*.css"), *site.rglob("*.js")):
        text = file.read_text()
        assert not re.search(r"url\([\"']?(https?:)?//|@import [\"']http", text), file.name
        assert not re.search(r"https?://[^\s\"']*(cdn|unpkg|fonts)\.", text), file.name


@reads_site
def test_every_page_is_in_the_navigation(site: Path) -> None:
    first = (site / "index.html").read_text()
    for path in PAGES:
        assert path == DOCS / "index.md" or f'href="{built(path)}"' in first, path


def test_a_broken_link_is_told(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "other.md").write_text("---\norphan: true\n---\n# Other\n")
    text = "# First\n\n[a](nowhere.md) [b](other.md#nowhere) [c](#nothing) [d](other.md#other)\n"
    text += "\n```{eval-rst}\n.. autofunction:: pyfa.nobody\n```\n"
    (source / "index.md").write_text(text)
    said = build(source, tmp_path / "out")
    for link in ("nowhere.md", "nowhere", "nothing", "nobody"):
        assert f"'{link}'" in said
    assert len(said.splitlines()) >= 4
    assert "#other'" not in said


def test_one_command_builds_it() -> None:
    assert (ROOT / "ci" / "docs").stat().st_mode & 0o111
    assert "sphinx" in (ROOT / "ci" / "docs").read_text()
    assert "docs/index.md" in (ROOT / "README.md").read_text()


def test_the_projects_own_site_builder_is_small() -> None:
    """Settings, style and script. The tables of ``generated.py`` are content."""
    files = [DOCS / "conf.py", *(DOCS / "style").iterdir()]
    assert sum(len(path.read_text().splitlines()) for path in files) <= 250


# --- what the code writes


@functools.cache
def markers() -> tuple[str, ...]:
    text = "\n".join(path.read_text() for path in PAGES)
    return tuple(re.findall(r"^<!-- (generated: .+?) -->$", text, re.M))


def test_every_part_is_used(
    generated: ModuleType, matrix: ModuleType, patterns: ModuleType
) -> None:
    parts = {*generated.PARTS, *matrix.PARTS, *patterns.PARTS}
    assert {line.split()[1] for line in markers()} == parts


def test_every_mask_has_a_picture_of_itself(patterns: ModuleType) -> None:
    drawn = {name for line in patterns.PICTURES for name in re.findall(r"masks\.(\w+)", line)}
    assert drawn == {*pyfa.masks.__all__}
    for line in patterns.PICTURES:
        seen, svg = patterns.seen(line), patterns.picture(line)
        runs = re.findall(r"M(\d+) (\d+)h(\d+)v1h-\d+z", svg)
        again = torch.zeros_like(seen)
        for column, row, length in (map(int, run) for run in runs):
            again[row, column : column + length] = True
        assert torch.equal(again, seen)
        assert 0 < int(seen.sum()) < seen.numel()
        assert 'role="img" aria-label="masks.' in svg


@pytest.mark.parametrize(
    ("arch", "device", "feature", "column", "flags"),
    [
        ("gfx942", "MI300X", "softcap", "forward, 16 bits", "--features softcap"),
        ("gfx942", "MI300X", "paged", "decode, 16 bits", "--features paged,seqused"),
        ("gfx942", "MI300X", "none", "forward, float32", "--dtype float32"),
        (
            "gfx942",
            "MI300X",
            "score_mod",
            "forward, float8",
            "--features score_mod --dtype float8_e4m3fnuz",
        ),
        ("sm_90a", "H200", "bias_grad", "backward, 16 bits", "--features bias,bias_grad,backward"),
        ("sm_80", "A100-80GB", "sinks", "backward, 16 bits", "--features sinks,backward"),
    ],
)
def test_the_matrix_says_what_the_dispatcher_answers(
    matrix: ModuleType, generated: ModuleType, capsys: pytest.CaptureFixture[str],
    arch: str, device: str, feature: str, column: str, flags: str,
) -> None:  # fmt: skip
    (text,) = (
        part for part in re.split("^### ", matrix.matrix(), flags=re.M)[1:]
        if arch in part.splitlines()[0].split(", ")
    )  # fmt: skip
    lines = text[text.index("| feature") :]
    columns = [each.strip() for each in lines.splitlines()[0].strip("|").split("|")]
    (row,) = (row for row in cells(lines) if row[0].strip("`") == feature)
    said = row[columns.index(column)]
    queries = "1,4096" if column.startswith("decode") else "4096"
    command = f"explain --seqlen {queries} --head-dim 128 --device {device} --json {flags}"
    assert cli.main(shlex.split(command)) == 0
    chosen = json.loads(capsys.readouterr().out)["chosen"]
    part = next(each for each in said.split("; ") if "(" not in each or "128" in each)
    assert part.split("`")[1] == chosen


def test_the_matrix_has_every_arch_and_only_letters_of_its_legend(
    matrix: ModuleType, generated: ModuleType
) -> None:
    text = matrix.matrix()
    titles = [arch for line in re.findall(r"^### (.+)$", text, re.M) for arch in line.split(", ")]
    assert sorted(titles) == sorted(ARCHS)
    letters = set(re.findall("[A-Z]", "".join(re.findall(r"` ([A-Z](?:, [A-Z])*)", text))))
    page = (DOCS / "matrix.md").read_text()
    assert letters <= set(re.findall(r"^\| ([A-Z]) \|", page, re.M))
    ran = generated.conformance_results()
    for arch in ARCHS:
        for name in ("hip", "cuda", "triton"):
            if BACKENDS[name].why_not(generated.problem_on(_device(arch))):
                continue
            letter = matrix.tested(name, arch)
            assert (letter == "H") == ((name, arch) in ran), (name, arch)
    assert matrix.tested("hip", "gfx942") in ("E", "H")
    assert matrix.tested("cuda", "sm_80") == "T"


def test_models_are_those_that_the_command_knows(matrix: ModuleType) -> None:
    from pyfa.cli import model_config

    names = [row[0].strip("`") for row in cells(matrix.models())]
    assert names == list(model_config.NAMES)
    data = json.loads((ROOT / "benchmarks" / "results" / "llama_speed.json").read_text())
    measured = cells(matrix.measured_models().split("\n\n")[1])
    assert [row[2] for row in measured] == [f"{x['tokens_per_second']:,.0f}" for x in data["rows"]]


def test_measured_layers_are_those_of_the_result(matrix: ModuleType) -> None:
    name = "bench_layers_peers_h200.json"
    rows = json.loads((ROOT / "benchmarks" / "results" / name).read_text())["rows"]
    found = {row[0]: row[2:] for row in cells(matrix.measured_layers())}
    assert set(found) == {row["problem"]["label"] for row in rows}
    for label, written in found.items():
        for column, pass_ in ((0, "forward"), (2, "backward")):
            speeds = {
                row["peer"]: row["value"]
                for row in rows
                if row["problem"]["label"] == label and row["problem"]["passes"] == pass_
                if "value" in row
            }
            assert written[column] == f"{speeds.pop('pyfa'):.0f}"
            best = max(speeds, key=lambda peer: speeds[peer])
            assert written[column + 1] == f"{speeds[best]:.0f} ({best})"


def cells(table: str) -> list[list[str]]:
    rows = [re.split(r"(?<!\\)\|", line.strip("|")) for line in table.splitlines()]
    return [[cell.strip() for cell in row] for row in rows[2:]]


def test_features_are_those_of_the_code(generated: ModuleType) -> None:
    rows = {row[0].strip("`"): row[2:] for row in cells(generated.features())}
    assert set(FEATURES) <= set(rows)
    for name in FEATURES:
        expected = ["yes" if name in BACKENDS[each].FEATURES else "**no**" for each in NAMES]
        assert rows[name] == expected
    assert rows["float32"] == ["**no**", "**no**", "yes", "yes", "**no**"]


def test_refused_combinations_are_those_of_the_code(generated: ModuleType) -> None:
    rows = [
        [name, *row]
        for names, *row in cells(generated.combinations())
        for name in names.split(", ")
    ]
    for name in ("`hip`", "`emulator`"):
        assert [name, "`dropout` with `paged`, `fp8`", "not implemented"] in rows
    mods_and_float8 = "`score_mod` with `fp8`, `mask_mod` with `fp8`"
    for name in ("`hip`", "`triton`", "`emulator`"):
        assert [name, mods_and_float8, BACKENDS_SAY_OF_MODS] in rows
    # A decode step over a float8 cache takes a bias and pages.
    reasons = {pair: why for name, pair, why in rows if name == "`cuda`"}
    assert reasons["`bias` with `fp8`"].endswith("(refused only with many query rows)")
    assert "`paged` with `fp8`" not in reasons
    for name in ("`triton`", "`torch`"):
        found = [row[1:] for row in rows if row[0] == name]
        assert ["`backward` with `fp8`", "float8 has no backward"] in found
        rest = {why for _, why in found} - {"float8 has no backward", BACKENDS_SAY_OF_MODS}
        assert len(rest) in (1, 2)
        assert all("batch" in why and "invarian" in why for why in rest)


BACKENDS_SAY_OF_MODS = "score_mod and mask_mod with float8 are not implemented"


def test_the_support_table_has_every_arch_and_claims_only_results(generated: ModuleType) -> None:
    rows = {row[0].strip("`"): row[1:] for row in cells(generated.archs())}
    assert set(rows) == set(ARCHS)
    ran = generated.conformance_results()
    for arch, (_, *states) in rows.items():
        for name, state in zip(("hip", "cuda", "triton"), states, strict=True):
            refused = BACKENDS[name].why_not(generated.problem_on(_device(arch)))
            assert state.startswith("refused") == bool(refused)
            assert state.startswith("run on hardware") == ((name, arch) in ran and not refused)
    # Until a result of an MI300X is there.
    if not any(name == "hip" and arch == "gfx942" for name, arch in ran):
        assert rows["gfx942"][1].startswith("emulated, not run on hardware")
    files = {path.name for path in (ROOT / "benchmarks" / "results").glob("*.json")}
    assert set(re.findall(r"`([\w.]+\.json)`", generated.machines())) == files


def test_the_wheels_plans_are_counted_by_arch(generated: ModuleType) -> None:
    *rows, total = cells(generated.wheel_plans())
    counts = [[int(cell.replace(",", "")) for cell in row[1:]] for row in rows]
    targets = {"gfx942": HIP, "sm_80": CUDA, "sm_86": CUDA, "sm_89": CUDA, "sm_90": CUDA}
    assert [row[0] for row in rows] == [*targets]
    for (arch, target), (every, common) in zip(targets.items(), counts, strict=True):
        plans = set(catalog.all_plans(target, arch))
        assert len(plans) == every
        assert 0 < common < every
        assert common == len(plans & {*catalog.common_plans(target, arch)})
    assert total == ["all", *(f"{sum(column):,}" for column in zip(*counts, strict=True))]
    # By hand nowhere else.
    for path in (DOCS / "ci.md", ROOT / "ci" / "wheel", *(DOCS / "kernels").glob("*.md")):
        assert not re.search(
            r"(full build|every plan)[^|\n]* \d[\d,]* (kernels|plans)", path.read_text()
        )


def test_a_part_of_the_suite_is_no_result_of_it(
    generated: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    every = generated.results()
    whole = every["conformance_triton_sm_90a.json"]
    parts = {
        f"conformance_triton_sm_90a_{key}.json": {**whole, key: ""} for key in ("only", "sample")
    }
    before = generated.conformance_results()
    monkeypatch.setattr(generated, "results", lambda: every | parts)
    assert generated.conformance_results() == before


def _device(arch: str) -> Any:
    from pyfa.device import Device

    known = (each for each in DEVICES.values() if each.arch == arch)
    return next(known, Device(arch, arch, 1, 1, 0.0, 0, 0, 0, 0.0))


def test_settings_commands_and_devices_are_those_of_the_code(generated: ModuleType) -> None:
    settings = {row[0].strip("`"): row[2] for row in cells(generated.settings())}
    assert settings == {name: each.meaning for name, each in env.VARIABLES.items()}
    text = generated.commands()

    def walk(name: str, parser: argparse.ArgumentParser) -> None:
        assert f" {name}\n" in text or name == "pyfa"
        for flag in parser._option_string_actions:
            assert flag in ("-h", "--help", "--version") or flag in text, f"{name} {flag}"
        for below, each in generated.subparsers(parser).items():
            walk(f"{name} {below}", each)

    walk("pyfa", cli.parser())
    assert [row[0].strip("`") for row in cells(generated.devices())] == list(DEVICES)
    extras = {row[0].strip("`") for row in cells(generated.extras())}
    said = re.findall(r"^(\w+) = \[\"?", (ROOT / "pyproject.toml").read_text(), re.M)
    assert extras <= set(said)
    assert {"cuda", "compile", "emulator", "docs"} <= extras


@reads_site
def test_every_public_name_has_its_signature_and_meaning(site: Path) -> None:
    page = (site / "api.html").read_text()
    inside = [f"{name}.{each}" for name in ("masks", "scores") for each in vars(pyfa)[name].__all__]
    for name in [*({*pyfa.__all__} - {"masks", "scores"}), *inside]:
        assert re.search(rf'<dt class="sig[^"]*" id="pyfa\.([a-z]+\.)?{name}"', page), name
    for alias in ("Window", "Descale", "Result", "Backends"):
        # Defined once, and every signature that has it leads there.
        assert page.count(f'id="pyfa.{alias}"') == 1
        assert f'href="#pyfa.{alias}"' in page
    assert "ForwardRef" not in page
    text = " ".join(html.unescape(re.sub(r"<[^>]+>", "", page)).split())
    assert re.search(r"window: pyfa.Window = None, .*scale: float \| None = None,", text)
    assert re.search(r"causal.{0,9}Query i sees keys j ≤ p", text)
    assert "**unknown" not in text
    compat = (site / "compat.html").read_text()
    for name in ("flash_attn_with_kvcache", "flash_attn_combine", "get_scheduler_metadata"):
        assert name in compat


def test_output_that_depends_on_the_machine_is_refused(generated: ModuleType) -> None:
    for arguments in (["explain", "--causal"], ["info"], ["bench", "--device", "H200"]):
        with pytest.raises(ValueError, match="depends on the machine"):
            generated.run(*arguments)
    assert "* hip" in generated.run("explain", "--causal", "--device", "MI300X")
