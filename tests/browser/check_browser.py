"""The guide and the report in a headless Chromium, as files, without a network: ``ci/browser``.

Not collected by ``pytest tests``, because it takes minutes and needs a browser.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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


@pytest.fixture(params=THEMES)
def page(request: pytest.FixtureRequest, browser: Browser) -> Iterator[Page]:
    """A page in one theme, whose every request is for a file and every error is a failure."""
    context = browser.new_context(color_scheme=request.param, offline=True)
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


def overflow(page: Page) -> int:
    """Pixels by which the page is wider than the window."""
    return int(page.evaluate("document.documentElement.scrollWidth - innerWidth"))


def serious(page: Page) -> list[str]:
    """What axe finds, of level serious or critical: rule, element, and why."""
    found: dict[str, Any] = Axe().run(page).response
    return [
        f"{rule['id']}: {node['html'][:160]}: {json.dumps(node['any'][:1])[:400]}"
        for rule in found["violations"]
        if rule["impact"] in ("serious", "critical")
        for node in rule["nodes"]
    ]


def look(page: Page, file: Path) -> None:
    page.goto(file.as_uri())
    for width in WIDTHS:
        page.set_viewport_size({"width": width, "height": 900})
        page.wait_for_timeout(50)
        assert overflow(page) <= 0, f"{file.name} at {width}"
        assert serious(page) == [], f"{file.name} at {width}"


NAMES = sorted(
    path.relative_to(ROOT / "docs").with_suffix("").as_posix()
    for path in (ROOT / "docs").rglob("*.md")
)


@pytest.mark.parametrize("name", NAMES)
def test_pages_fit_and_are_accessible(page: Page, guide: Path, name: str) -> None:
    look(page, guide / f"{name}.html")


def test_the_report_fits_and_is_accessible(page: Page, report: Path) -> None:
    look(page, report / "index.html")
    page.evaluate("for (const each of document.querySelectorAll('details')) each.open = true")
    look_open = [overflow(page), serious(page)]
    assert look_open == [0, []] or (look_open[0] <= 0 and look_open[1] == [])


def test_the_report_has_at_most_three_screens_until_a_section_is_opened(
    page: Page, report: Path
) -> None:
    page.set_viewport_size({"width": 1440, "height": 900})
    page.goto((report / "index.html").as_uri())
    assert page.evaluate("document.documentElement.scrollHeight") <= 3 * 900


@pytest.mark.parametrize("word", SEARCHES)
def test_search_finds(page: Page, guide: Path, word: str) -> None:
    page.goto((guide / "index.html").as_uri())
    page.fill("input.sidebar-search", word)
    page.press("input.sidebar-search", "Enter")
    page.wait_for_selector("#search-results li a")
    page.wait_for_timeout(500)
    found = page.eval_on_selector_all("#search-results li a", "all => all.map(a => a.href)")
    assert any(f"/{SEARCHES[word]}.html" in each for each in found), found


def test_search_finds_nothing_for_nonsense(page: Page, guide: Path) -> None:
    page.goto(f"{(guide / 'search.html').as_uri()}?q=xyzzyplugh")
    page.wait_for_selector("#search-results p")
    page.wait_for_timeout(500)
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
