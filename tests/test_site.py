"""A browser opens, without a network, the pages that `make docs` builds, searches them, and follows links."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import quote, unquote

import pytest

from tests.browser import Browser

pytestmark = [pytest.mark.editors, pytest.mark.parts(6, at=4)]

ROOT = Path(__file__).parent.parent
QUERIES = Path(__file__).with_name("search_queries.txt")
"""What people type, in English or Chinese: query, and the pages that answer."""
FIRST = 3
"""Among how many pages the answer must be."""
RESULTS = """new Promise((resolve, reject) => {
  setTimeout(() => reject("no answer"), 10000);
  setInterval(() => document.querySelector(".search-summary")?.innerText
    && resolve([...document.querySelectorAll("ul.search a")].map((link) => link.getAttribute("href"))), 20);
})"""
Need = Callable[[object, str], None]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, need: Need) -> Path:
    need(find_spec("sphinx"), "Sphinx is not installed: make docs installs it")
    need(shutil.which("make"), "make is not installed")
    folder = tmp_path_factory.mktemp("site")
    line = ["make", "docs", f"SITE={folder}", f"BIN={Path(sys.executable).parent}", "--old-file=.venv/.docs"]
    subprocess.run(line, cwd=ROOT, check=True)
    return folder


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory, need: Need) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("browser"), need) as browser:
        yield browser


def found(browser: Browser, site: Path, language: str, query: str) -> list[str]:
    """Returns the pages that a search names, best first."""
    browser.open(f"{(site / language / 'search.html').as_uri()}?q={quote(query)}")
    pages = [address.partition(".html")[0] for address in browser.evaluate(RESULTS)]
    return list(dict.fromkeys(pages))


def test_a_search_finds_a_page_that_answers(site: Path, browser: Browser) -> None:
    missed = {}
    rows = [line.split(": ") for line in QUERIES.read_text(encoding="utf-8").splitlines()]
    for query, answers in rows:
        language = "zh" if re.search(r"[\u4e00-\u9fff]", query) else "en"
        pages = found(browser, site, language, query)
        assert all((site / language / f"{page}.html").exists() for page in pages)
        if not set(pages[:FIRST]) & set(answers.split()):
            missed[query] = pages[:6]
    assert missed == {}
    assert browser.errors == []


def test_a_chinese_search_leads_to_the_pages_that_are_english(site: Path, browser: Browser) -> None:
    assert found(browser, site, "zh", "DS405") == []
    browser.evaluate("document.getElementById('english').click()")
    browser.wait()
    assert browser.evaluate(RESULTS)[0] == "lint.html"
    assert browser.errors == []


@pytest.mark.parametrize("language", ["en", "zh"])
def test_a_page_opens_and_a_click_leads_on(site: Path, browser: Browser, language: str) -> None:
    browser.open((site / "index.html").as_uri())
    browser.evaluate(f"document.querySelector('a[href^=\"{language}\"]').click()")
    browser.wait()
    browser.evaluate("document.querySelector('article a[href=\"quickstart.html\"]').click()")
    browser.wait()
    assert browser.evaluate("location.pathname") == str(site / language / "quickstart.html")
    assert browser.evaluate("document.documentElement.lang").startswith(language)
    assert browser.evaluate("document.querySelectorAll('h2').length") > 5
    assert browser.errors == []


class Links(HTMLParser):
    """The addresses to which a page leads or from which it loads, and the anchors that it has."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.leads: list[str] = []
        self.loads: list[str] = []
        self.anchors: set[str] = set()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("href", "src") and value is not None:
                (self.leads if tag == "a" else self.loads).append(value)
            elif name == "id" and value:
                self.anchors.add(value)


def test_every_link_leads_to_something_and_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    pages = {path: Links(path) for path in site.rglob("*.html")}
    assert not [path for path in pages if "zh" in path.parts[len(site.parts) + 1 :]]
    broken = []
    for path, page in pages.items():
        assert not [address for address in page.loads if re.match("(https?:)?//", address)], path
        for address in page.leads:
            name, _, anchor = address.partition("#")
            if re.match("https?:|mailto:", address):
                continue
            target = (path.parent / unquote(name.partition("?")[0])).resolve() if name else path
            if not target.is_file() or (target in pages and anchor and unquote(anchor) not in pages[target].anchors):
                broken.append(f"{path.relative_to(site)}: {address}")
    assert broken == []
