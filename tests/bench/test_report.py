"""``pyfa bench --report``: what the page says, that it stands alone, and what it refuses."""

from __future__ import annotations

import copy
import importlib.util
import json
import math
import re
import xml.etree.ElementTree
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from pyfa import bench, cli
from pyfa.bench import report, report_speed

pytest.importorskip("matplotlib")
pytest.importorskip("jinja2")
from pyfa.bench import charts

# One process draws the report, for all of these.
pytestmark = pytest.mark.xdist_group("report")

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"


class Page(HTMLParser):
    """Tags with their attributes, and the text, of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of the project's own results, by the command."""
    made = tmp_path_factory.mktemp("report")
    assert cli.main(["bench", "--report", str(made), "--from", str(RESULTS)]) == 0
    return made


@pytest.fixture(scope="module")
def page(folder: Path) -> str:
    return (folder / "index.html").read_text()


def test_it_stands_alone(page: str) -> None:
    """Nothing is loaded: no script, no address but those of names of XML."""
    found = Page(page)
    assert not {"script", "link", "img", "iframe"} & {tag for tag, _ in found.tags}
    loaded = [
        value
        for _, attributes in found.tags
        for name, value in attributes.items()
        if name in ("src", "href", "xlink:href", "data")
    ]
    assert loaded
    assert all(str(value).startswith(("#", "data:image/png")) for value in loaded)
    assert "url(" not in re.sub(r"url\(#\w+\)", "", page)


def test_pictures_are_svg_with_identifiers_of_their_own(page: str) -> None:
    pictures = re.findall(r"<svg.*?</svg>", page, re.DOTALL)
    assert len(pictures) >= 15
    seen: set[str] = set()
    for picture in pictures:
        root = xml.etree.ElementTree.fromstring(picture)
        assert root.get("viewBox")
        assert root.get("width") is None  # as wide as its place
        assert root.get("aria-label")
        assert charts.INK not in picture
        names = [value for one in root.iter() if (value := one.get("id"))]
        assert len(names) == len(set(names))
        assert not seen & set(names)
        seen |= set(names)
        for used in re.findall(r"(?:url\(#|xlink:href=\"#)([\w-]+)", picture):
            assert used in names


def test_every_picture_is_a_file_that_is_right_in_light_and_dark(folder: Path, page: str) -> None:
    files = list((folder / "pictures").iterdir())
    assert len(files) == page.count("<figure>")
    for path in files:
        text = path.read_text()
        root = xml.etree.ElementTree.fromstring(text)
        assert root.get("width")
        assert root.get("height")
        dark = text.index("(prefers-color-scheme: dark)")
        grounds = [found.start() for found in re.finditer("background: #", text)]
        assert len(grounds) == 2
        assert grounds[0] < dark < grounds[1]
        assert charts.INK not in text
        assert "currentColor" in text


def drawn(path: Path) -> list[str]:
    """A picture's text, and where its marks are, to a point: fonts differ by less."""
    root = xml.etree.ElementTree.parse(path).getroot()
    marks = [one for one in root.iter() if one.tag.endswith("}use")]
    return [text for text in map(str.strip, root.itertext()) if text] + [
        f"{float(one.get('x', 0)):.0f}, {float(one.get('y', 0)):.0f}" for one in marks
    ]


def test_pictures_of_readme_and_guide_are_what_the_command_makes(folder: Path) -> None:
    readme, guide = (ROOT / "README.md").read_text(), (ROOT / "docs" / "speed.md").read_text()
    in_readme = re.findall(r'<img src="docs/(pictures/[^"]+)"', readme)
    shown = re.findall(r"!\[[^]]+\]\((pictures/[^)]+)\)", guide)
    assert in_readme
    assert set(in_readme) <= set(shown)
    assert len(re.findall(r'<img [^>]*alt="[^"]+"', readme)) == len(in_readme)
    assert {path.name for path in (ROOT / "docs" / "pictures").iterdir()} == {
        Path(name).name for name in shown
    }
    for name in shown:
        assert drawn(ROOT / "docs" / name) == drawn(folder / name), (
            f"docs/{name} is older than the results: pyfa bench --report out --from "
            f"benchmarks/results, then copy out/{name} there"
        )


def test_every_section_says_how_and_where(page: str) -> None:
    found = Page(page)
    titles = re.findall(r"<summary><h3>(.*?)</h3></summary>", page)
    files = [bench.load(path) for path in RESULTS.glob("bench_*_h200.json")]
    assert {suite for data in files for suite in data["suites"]} <= {
        title.split(":")[0] for title in titles
    }
    assert found.text.count("How: ") == len(titles)
    assert found.text.count("NVIDIA H200, driver 580") >= 13
    for path in RESULTS.glob("*.json"):
        assert path.name in found.text  # shown, or said to have no section


def test_figures_are_those_of_the_file(page: str) -> None:
    data = bench.load(RESULTS / "bench_forward_peers_h200.json")
    text = Page(page).text
    for row in data["rows"]:
        if "value" in row:
            low, high = row["seconds"]["quartiles"]
            spread = (high - low) / 2 / row["seconds"]["median"]
            assert f"{row['value']:.4g} ±{spread:.1%}" in text
    first = {row["peer"]: row["seconds"]["median"] for row in data["rows"][:6]}
    assert f"{first['cudnn'] / first['pyfa']:.2f}" in text


@pytest.fixture
def without_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes half a second to draw."""
    monkeypatch.setattr(charts, "svg", lambda *given: '<svg viewBox="0 0 1 1"></svg>')


def result(**more: Any) -> dict[str, Any]:
    """A result of two cells and two peers, one of which is missing in one."""
    problem = {"head_dim": 64, "causal": True, "seqlen_q": 128, "seqlen_k": 128, "batch": 1,
               "heads_q": 2, "heads_k": 2, "timed": "device", "dtype": "bfloat16"}  # fmt: skip
    rows: list[dict[str, Any]] = []
    for cell, length in (("one <b>", 128), ("two", 256)):
        for peer, median in (("pyfa", 1.0), ("other", 2.0)):
            seconds = {"median": median, "quartiles": [median * 0.9, median * 1.1]}
            rows.append({"suite": "forward", "cell": cell, "peer": peer, "unit": "TFLOP/s",
                         "problem": problem | {"seqlen_q": length}, "seconds": seconds,
                         "value": 8.0 / median})  # fmt: skip
    del rows[-1]["value"], rows[-1]["seconds"]
    rows[-1]["why_not"] = "no kernel"
    environment = {"gpu": "NVIDIA H200", "driver": "1", "torch": "2", "pyfa": "0", "commit": "c",
                   "date": "2026-11-20", "python": "3", "triton": None}  # fmt: skip
    return {
        "schema": 1, "environment": environment, "suites": ["forward"], "device": "cuda",
        "effort": {"rounds": 3, "seconds": 0.03, "warm_up": 3},
        "peers": {"pyfa": "", "other": ""}, "absent": {}, "rows": rows, **more,
    }  # fmt: skip


def test_every_title_names_the_backend_and_what_it_ran_on(page: str) -> None:
    titles = re.findall(r"<summary><h3>(.*?)</h3></summary>", page)
    assert len(titles) >= 20
    for title in titles:
        assert re.search(r"\b(hip|cuda|triton|torch|emulator|backend not recorded)\b", title), title
        assert re.search(r"H100|H200|MI300X|CPU", title) or "emulator" in title, title


@pytest.mark.usefixtures("without_pictures")
def test_the_backend_is_recorded_and_shown(tmp_path: Path) -> None:
    made = report.write(tmp_path, [report.checked("x.json", result(backend="cuda"))])
    assert "<h3>forward: pyfa (cuda on NVIDIA H200) compared with other</h3>" in made.read_text()


def test_one_row_a_question_and_a_summary_come_first(page: str) -> None:
    start = page[page.index("<main>") : page.index("<details>")]
    text = " ".join(Page(start).text.split())
    places = [text.index(question) for question in report.QUESTIONS.values()]
    assert places == sorted(places)
    assert "0 failed" in text
    assert "not verified on hardware" in text
    assert "model, not measured" in text
    # Geometric means, from the file.
    data = bench.load(RESULTS / "bench_decode_peers_h200.json")
    cells: dict[str, dict[str, float]] = {}
    for row in data["rows"]:
        if "seconds" in row:
            cells.setdefault(row["cell"], {})[row["peer"]] = row["seconds"]["median"]
    ratios = [one["cudnn"] / one["pyfa"] for one in cells.values() if "cudnn" in one]
    (row,) = re.findall(r"<tr><td>decode</td>(.*?)</tr>", start, re.S)
    assert f">{math.prod(ratios) ** (1 / len(ratios)):.2f}</td>" in row


def test_sections_are_closed_until_one_is_opened(page: str) -> None:
    found = Page(page)
    tags = [tag for tag, _ in found.tags]
    assert "main" in tags
    details = [attributes for tag, attributes in found.tags if tag == "details"]
    assert len(details) == page.count("<summary>") >= 20
    assert not any("open" in attributes for attributes in details)
    outside = re.sub(r"<details>.*?</details>", "", page, flags=re.S)
    assert "<svg" not in outside
    assert outside.count("<tr>") < 30


@pytest.mark.usefixtures("without_pictures")
def test_the_newest_file_of_a_suite_alone_unless_asked(tmp_path: Path) -> None:
    old, new = result(), result()
    old["environment"]["date"] = "2026-11-19"
    alone = result()
    alone["peers"] = {"pyfa": "", "pyfa:triton": ""}
    for row in alone["rows"]:
        row["peer"] = row["peer"].replace("other", "pyfa:triton")
    given = [report.checked(f"{name}.json", data)
             for name, data in (("b", new), ("old", old), ("alone", alone))]  # fmt: skip
    page = report.write(tmp_path / "a", given).read_text()
    assert page.count("<details>") == 2
    assert "--older shows them): old.json." in page
    page = report.write(tmp_path / "b", given, older=True).read_text()
    assert page.count("<details>") == 3
    assert "--older" not in page


def test_a_peer_has_one_color_everywhere() -> None:
    from matplotlib.colors import to_hex

    seen: dict[str, set[str]] = {}
    for names in (
        ["pyfa", "cudnn"],
        ["fa3", "cudnn", "pyfa"],
        ["naive", "pyfa", "naive, computed"],
    ):
        _, (axis,) = charts.figure()
        charts.lines(axis, {name: [(1, 1), (2, 2)] for name in names}, "x", "y", "t")
        for line in axis.lines:
            name = str(line.get_label()).split(",")[0]
            seen.setdefault(name, set()).add(to_hex(line.get_color()))
    assert all(len(colors) == 1 for colors in seen.values())
    assert len(set.union(*seen.values())) == len(seen) == 4


def test_titles_are_inside_their_pictures_and_read_out(page: str) -> None:
    for picture in re.findall(r"<svg.*?</svg>", page, re.DOTALL):
        root = xml.etree.ElementTree.fromstring(picture)
        assert root[0].tag.endswith("title")
        assert len(str(root[0].text)) > 10
        width = float(str(root.get("viewBox")).split()[2])
        for one in (each for each in root.iter() if each.tag.endswith("}text")):
            style, moved = str(one.get("style")), str(one.get("transform"))
            place = re.search(r"translate\(([-\d.]+)", moved)
            size = re.search(r"([\d.]+)px", style)
            if "middle" not in style or "rotate(-90" in moved or size is None:
                continue
            x = float(place[1] if place else one.get("x") or 0)
            half = len("".join(one.itertext())) * float(size[1]) * 0.25  # of narrow letters
            assert half <= x <= width - half, "".join(one.itertext())


@pytest.mark.usefixtures("without_pictures")
def test_ratios_reasons_and_markup_are_right(tmp_path: Path) -> None:
    made = report.write(tmp_path, [report.checked("x.json", result())])
    text, found = made.read_text(), Page(made.read_text())
    assert "On geometric average pyfa's speed is 2.00 × other (2.00 to 2.00)." in found.text
    assert "– other: no kernel." in found.text
    assert "one <b>" in found.text
    assert "<b>" not in text
    assert text.count('class="best"') == 2


@pytest.mark.usefixtures("without_pictures")
def test_the_best_of_times_is_the_least() -> None:
    data = result()
    for row in data["rows"]:
        row["unit"] = "us"
    (section,) = report_speed.sections("x", data)
    best = [row[0].text for row in section.tables[0].rows for cell in row[1:] if cell.kind]
    assert best == ["one <b>", "two"]
    assert section.tables[0].rows[0][2].kind == "best"  # 4 against 8


@pytest.mark.parametrize("lost", ["environment", "date", "commit"])
def test_figures_without_an_environment_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], lost: str
) -> None:
    data = result()
    if lost == "environment":
        del data["environment"]
    else:
        del data["environment"][lost]
    path = tmp_path / "x.json"
    path.write_text(json.dumps(data))
    status = cli.main(["bench", "--report", str(tmp_path / "out"), "--from", str(path)])
    assert status == 2
    assert "x.json: expected an environment with" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("without_pictures")
def test_results_of_other_scripts_have_sections(tmp_path: Path) -> None:
    """Those that a GPU run will write, as the scripts write them."""
    lengths = [
        {"kind": kind, "side": side, "seqlen": n, "seconds": n * 1e-6, "extra_bytes": n * 100,
         "computed_bytes": n * 99}
        for kind in ("forward", "training") for side in ("naive", "pyfa") for n in (128, 256)
    ]  # fmt: skip
    traffic = [
        {"title": "pyfa, N = 16384", "compulsory_bytes": 1e8, "estimated_bytes": 1.1e8,
         "dram_bytes": 1.2e8, "requested_bytes": 3e9, "l2_bytes": 3.1e9}
    ]  # fmt: skip
    base = {"schema": 1, "environment": result()["environment"], "how": "By hand."}
    made = report.write(
        tmp_path,
        [
            report.checked("a.json", base | {"lengths": lengths}),
            report.checked("b.json", base | {"traffic": traffic}),
        ],
    )
    text = Page(made.read_text()).text
    assert "Standard attention against pyfa" in text
    assert "Bytes: model against measured" in text
    assert "110.0" in text


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["forward", "--from", "x.json"], "--from: expected --report and no SUITE"),
        (
            ["forward", "--report", "y", "--from", "x.json"],
            "--from: expected --report and no SUITE",
        ),
        (["--report", "y", "--from", "/nowhere/x.json"], "No such file"),
        (["--report", "y", "--from", "/etc/apt"], "there is no result file"),
    ],
)
def test_wrong_use_is_one_line(
    capsys: pytest.CaptureFixture[str], arguments: list[str], expected: str
) -> None:
    assert cli.main(["bench", *arguments]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert expected in err


@pytest.mark.parametrize("package", ["matplotlib", "jinja2"])
def test_a_missing_package_is_named_with_its_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], package: str
) -> None:
    there = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == package else there(name)
    )
    assert cli.main(["bench", "--report", "x", "--from", "y"]) == 2
    assert (
        f"--report needs {package}, which the extra bench has: pip install 'pyfa-attention[bench]'"
        in (capsys.readouterr().err)
    )


def test_the_same_results_give_the_same_page(tmp_path: Path) -> None:
    once = report.write(tmp_path / "a", [report.checked("x", result())]).read_text()
    again = report.write(tmp_path / "b", [report.checked("x", copy.deepcopy(result()))])
    assert once == again.read_text()
