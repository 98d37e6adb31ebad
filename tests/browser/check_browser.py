"""The guide and the report in a headless Chromium, as files, without a network: ``ci/browser``.

Not collected by ``pytest tests``, because it takes minutes and needs a browser.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, sync_playwright

ROOT = Path(__file__).parent.parent.parent
WIDTHS = (360, 390, 768, 1024, 1440)
THEMES = ("light", "dark")
# A word, and a page that explains it.
SEARCHES = {
    "softcap": "features", "checkpointing": "training", "page_table": "serving",
    "Philox": "how", "ring_attention": "context_parallel", "NVRTC": "start",
    "diffusers": "integrations", "PYFA_CACHE_DIR": "settings", "use_backend": "api",
    "roofline": "cli",
}  # fmt: skip


@pytest.fixture(scope="session")
def guide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("guide")
    command = ["sphinx", "-q", "-W", "-b", "html", ROOT / "docs", folder]
    subprocess.run([sys.executable, "-m", *command], check=True, env=_environment())
    return folder


@pytest.fixture(scope="session")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    command = ["pyfa", "bench", "--report", folder, "--from", ROOT / "benchmarks" / "results"]
    subprocess.run([sys.executable, "-m", *command], check=True, env=_environment())
    return folder


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT)}


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    names = ("chromium", "chromium-browser", "google-chrome")
    system = next((found for name in names if (found := shutil.which(name))), None)
    # Chromium refuses its sandbox to root, which a container often is.
    with sync_playwright() as engine:
        opened = engine.chromium.launch(executable_path=system, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture
def tab(browser: Browser) -> Iterator[Page]:
    """A page whose every request is for a file and every error is a failure."""
    context = browser.new_context(offline=True)
    opened = context.new_page()
    asked: list[str] = []
    errors: list[str] = []
    opened.on("request", lambda one: asked.append(one.url))
    opened.on("pageerror", lambda error: errors.append(str(error)))
    yield opened
    context.close()
    assert [url for url in asked if not url.startswith(("file:", "data:", "blob:"))] == []
    # The lines beside search results: Sphinx fetches pages, which browsers refuse to files.
    assert [each for each in errors if each != "Failed to fetch"] == []


@pytest.fixture(params=THEMES)
def page(request: pytest.FixtureRequest, tab: Page) -> Page:
    """A page in one theme."""
    tab.emulate_media(color_scheme=request.param)
    return tab


def overflow(page: Page) -> int:
    """Pixels by which the page is wider than the window."""
    return int(page.evaluate("document.documentElement.scrollWidth - innerWidth"))


SERIOUS = (Path(__file__).parent / "serious.js").read_text()
AXE = Axe().axe_script


def serious(page: Page, looks: set[str]) -> list[str]:
    """What axe finds, of level serious or critical: rule, element, and why. ``looks`` are those
    that it judged before; those of this page are added."""
    if not page.evaluate("'axe' in window"):
        page.evaluate(AXE)
    found = page.evaluate(SERIOUS, sorted(looks))
    looks.update(found["judged"])
    return list(found["faults"])


@pytest.fixture(scope="session")
def looks() -> set[str]:
    return set()


def look(page: Page, looks: set[str], widths: tuple[int, ...] = WIDTHS) -> None:
    for theme in THEMES:
        page.emulate_media(color_scheme=theme)
        for width in widths:
            page.set_viewport_size({"width": width, "height": 900})
            assert serious(page, looks) == [], f"{page.url} at {width}, {theme}"
            assert overflow(page) <= 0, f"{page.url} at {width}, {theme}"


NAMES = sorted(
    path.relative_to(ROOT / "docs").with_suffix("").as_posix()
    for path in (ROOT / "docs").rglob("*.md")
)


@pytest.mark.parametrize("name", NAMES)
def test_pages_fit_and_are_accessible(tab: Page, guide: Path, looks: set[str], name: str) -> None:
    tab.goto((guide / f"{name}.html").as_uri())
    look(tab, looks)


def test_the_report_fits_and_is_accessible(tab: Page, report: Path, looks: set[str]) -> None:
    tab.goto((report / "index.html").as_uri())
    look(tab, looks)
    tab.evaluate("for (const each of document.querySelectorAll('details')) each.open = true")
    look(tab, looks, WIDTHS[-1:])


@pytest.mark.parametrize(
    ("element", "change", "rule"),
    [
        ("td", "color: #999", "color-contrast"),
        ("td", "background: #555", "color-contrast"),
        ("td", "opacity: 0.4", "color-contrast"),
        ("article p > a:not(:has(*))", "color: #222; text-decoration: none", "link-in-text-block"),
    ],
)
def test_one_of_many_is_found(tab: Page, guide: Path, element: str, change: str, rule: str) -> None:
    """One text of each look is judged, so a text of another look must not be taken for it."""
    tab.goto((guide / "features.html").as_uri())
    looks: set[str] = set()
    assert serious(tab, looks) == []
    assert looks
    tab.evaluate(
        f"[...document.querySelectorAll('{element}')].slice(0, 6).at(-1).style = '{change}'"
    )
    assert {each.split(":")[0] for each in serious(tab, looks)} == {rule}


def test_the_report_has_at_most_three_screens_until_a_section_is_opened(
    page: Page, report: Path
) -> None:
    page.set_viewport_size({"width": 1440, "height": 900})
    page.goto((report / "index.html").as_uri())
    assert page.evaluate("document.documentElement.scrollHeight") <= 3 * 900


def wait_for_search(page: Page) -> None:
    """Results appear one by one; the summary comes after the last."""
    page.wait_for_function("document.querySelector('#search-results .search-summary')?.innerText")


@pytest.mark.parametrize("word", SEARCHES)
def test_search_finds(page: Page, guide: Path, word: str) -> None:
    page.goto((guide / "index.html").as_uri())
    page.fill("input.sidebar-search", word)
    page.press("input.sidebar-search", "Enter")
    wait_for_search(page)
    found = page.eval_on_selector_all("#search-results li a", "all => all.map(a => a.href)")
    assert any(f"/{SEARCHES[word]}.html" in each for each in found), found


def test_search_finds_nothing_for_nonsense(page: Page, guide: Path) -> None:
    page.goto(f"{(guide / 'search.html').as_uri()}?q=xyzzyplugh")
    wait_for_search(page)
    assert page.query_selector_all("#search-results li a") == []


@pytest.mark.parametrize("name", ["index", "start", "serving", "cli"])
def test_copy_buttons_copy_the_code(page: Page, guide: Path, name: str) -> None:
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.goto((guide / f"{name}.html").as_uri())
    blocks = page.query_selector_all("div.highlight")
    assert len(page.query_selector_all("div.highlight button.copybtn")) == len(blocks)
    for block in blocks[:3]:
        block.hover()
        button = block.query_selector("button.copybtn")
        assert button is not None
        button.click()
        page.wait_for_timeout(100)
        copied = page.evaluate("navigator.clipboard.readText()")
        assert copied.strip() == block.query_selector("pre").inner_text().strip()  # type: ignore[union-attr]


def test_the_theme_can_be_chosen_and_is_kept(page: Page, guide: Path) -> None:
    page.goto((guide / "start.html").as_uri())
    button = page.locator("button.theme-toggle:visible").first
    seen = {page.evaluate("document.body.dataset.theme")}
    for _ in range(2):
        button.click()
        seen.add(page.evaluate("document.body.dataset.theme"))
    assert seen == {"auto", "light", "dark"}
    chosen = page.evaluate("document.body.dataset.theme")
    page.goto((guide / "index.html").as_uri())
    assert page.evaluate("document.body.dataset.theme") == chosen


def test_the_navigation_stays(page: Page, guide: Path) -> None:
    page.set_viewport_size({"width": 1440, "height": 900})
    page.goto((guide / "api.html").as_uri())
    page.evaluate("scrollTo(0, 5000)")
    page.wait_for_timeout(200)
    for place in (".sidebar-tree", ".toc-tree"):
        box = page.locator(place).first.bounding_box()
        assert box is not None
        assert box["y"] < 900
        assert box["y"] + box["height"] > 0
