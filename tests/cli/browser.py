"""Pages as a browser parses and shows them."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path

BROWSERS = ("chromium-headless-shell", "chromium", "google-chrome")
VOID = {"meta", "input", "img", "link", "base"}


@dataclass
class Page(HTMLParser):
    """A page as a browser parses it."""

    tags: list[tuple[str, dict[str, str | None]]] = field(default_factory=list)
    texts: dict[str, list[str]] = field(default_factory=dict)
    """Tag, id or name of a figure → the texts inside."""
    open: list[set[str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.tags.append((tag, values))
        if tag not in VOID:
            self.open.append({tag, *(str(values[name]) for name in ("id", "data-text") if name in values)})
            for name in self.open[-1]:
                self.texts.setdefault(name, []).append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        while self.open and tag not in self.open.pop():
            pass

    def handle_data(self, data: str) -> None:
        for name in set().union(*self.open):
            self.texts[name][-1] += data


def parsed(html: str) -> Page:
    page = Page()
    page.feed(html)
    return page


def installed(need: Callable[[object, str], None]) -> str:
    """Returns the program of a headless Chromium."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    need(browser, "no Chromium is installed")
    return str(browser)


def shown(
    target: Path, fragment: str = "", *options: str, need: Callable[[object, str], None]
) -> subprocess.CompletedProcess[str]:
    """Returns what a headless Chromium makes of a page: its document on stdout, messages of its console on stderr."""
    line = [installed(need), "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom", "--virtual-time-budget=1000"]
    line += ["--enable-logging=stderr", f"--user-data-dir={target.parent / 'profile'}", *options]
    return subprocess.run(
        [*line, f"{target.as_uri()}{fragment}"], capture_output=True, text=True, timeout=60, check=True
    )


def assert_stands_alone(page: Page) -> None:
    """Asserts that nothing on a page leads out of it."""
    attributes = {name for _, values in page.tags for name in values}
    assert not attributes & {"src", "href", "srcset", "action", "poster", "data", "background"}
    assert not {tag for tag, _ in page.tags} & {"link", "iframe", "object", "embed", "base", "form", "img"}
    style, script = page.texts["style"][0], page.texts["script"][-1]
    assert not any(word in style for word in ("url(", "@import", "@font-face"))
    assert not any(word in script for word in ("import ", "fetch", "XMLHttp", "WebSocket", "http:", "https:", "eval("))
    assert "innerHTML" not in script
