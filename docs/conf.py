"""How Sphinx builds the pages: `make docs` runs it once for English and once, with `-t zh`, for Chinese."""

from __future__ import annotations

import re
from typing import Any

import dstrain

IS_CHINESE = globals()["tags"].has("zh")  # Sphinx puts the tags here before it reads this file

project = html_title = "dstrain"
author = "the authors of dstrain"
version = release = dstrain.__version__
language = "zh_CN" if IS_CHINESE else "en"
root_doc = "zh/index" if IS_CHINESE else "index"
extensions = ["myst_parser"]
myst_heading_anchors = 4
html_theme = "furo"
html_show_sphinx = False
html_search_language = "zh"  # splits Chinese into words, and English as usual
suppress_warnings = [
    "toc.not_included",  # the pages of the other language
    "myst.xref_missing",  # files of the repository beside docs/; tests/test_docs.py checks every link
    "misc.highlighting_failure",  # excerpts that are no whole program
]


def _with_contents(app: Any, name: str, text: list[str]) -> None:
    """Gives an index page the contents of the sidebar, from its headings and its links to pages."""
    if not name.endswith("index"):
        return
    for section in text[0].split("\n## ")[1:]:
        heading = section.partition("\n")[0]
        pages = "\n".join(re.findall(r"\(([^()#:]+)\.md\)", section))
        text[0] += f"\n```{{toctree}}\n:hidden:\n:caption: {heading}\n\n{pages}\n```\n"


def setup(app: Any) -> None:
    """Hooks into Sphinx."""
    app.connect("source-read", _with_contents)
