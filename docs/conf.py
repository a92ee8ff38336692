"""How Sphinx builds the pages: `make docs` runs it once for English and once, with `-t zh`, for Chinese."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from sphinx.search.en import SearchEnglish

import dstrain

IS_CHINESE = globals()["tags"].has("zh")  # Sphinx puts the tags here before it reads this file
DOCS = Path(__file__).parent

project = html_title = "dstrain"
author = "the authors of dstrain"
version = release = dstrain.__version__
language = "zh_CN" if IS_CHINESE else "en"
exclude_patterns = ["zh"]
extensions = ["myst_parser"]
myst_heading_anchors = 4
html_theme = "furo"
html_show_sphinx = False
html_search_language = "pairs"
html_show_search_summary = False  # a page opened from a disk may not fetch another one
suppress_warnings = [
    "myst.xref_missing",  # files of the repository beside docs/; tests/test_docs.py checks every link
    "misc.highlighting_failure",  # excerpts that are no whole program
]


class Pairs(SearchEnglish):
    """English by its stems, and Chinese by characters and pairs of them, into which search.js splits a query."""

    lang = "pairs"
    js_splitter_code = (DOCS / "search.js").read_text(encoding="utf-8")

    def split(self, input: str) -> list[str]:
        """Returns the words of a text."""
        words = re.findall(r"[\u4e00-\u9fff]|[^\W\u4e00-\u9fff]+", input)
        return words + re.findall(r"(?=([\u4e00-\u9fff]{2}))", input)


def _with_contents(app: Any, name: str, text: list[str]) -> None:
    """Gives an index page the contents of the sidebar, from its headings and its links to pages."""
    if not name.endswith("index"):
        return
    for section in text[0].split("\n## ")[1:]:
        heading = section.partition("\n")[0]
        pages = "\n".join(re.findall(r"\(([^()#:]+)\.md\)", section))
        text[0] += f"\n```{{toctree}}\n:hidden:\n:caption: {heading}\n\n{pages}\n```\n"


def _between_sites(app: Any, name: str, text: list[str]) -> None:
    """Leads links to pages of the other language, and to recorded reports, to where they lie beside this site."""

    def link(match: re.Match[str]) -> str:
        words, target, anchor = match.groups()
        place = Path(app.srcdir, name, "..", target).resolve()
        if not place.is_relative_to(DOCS) or not place.is_file():
            return match[0]
        inside = place.relative_to(DOCS)
        if inside.suffix == ".md" and (inside.parts[0] == "zh") != IS_CHINESE:
            inside = inside.with_suffix(".html") if inside.parts[0] == "zh" else Path("en", inside).with_suffix(".html")
        elif inside.parts[0] != "gallery":
            return match[0]
        return f'<a href="{"../" * (name.count("/") + 1)}{inside}{anchor}">{words}</a>'

    text[0] = re.sub(r"\[([^][]+)\]\(([^()#:\s]+)((?:#[^()\s]+)?)\)", link, text[0])


def setup(app: Any) -> None:
    """Hooks into Sphinx."""
    app.add_search_language(Pairs)
    app.connect("source-read", _between_sites)
    app.connect("source-read", _with_contents)
