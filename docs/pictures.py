"""Draws the pictures of the pages: `dstrain plan` in a terminal, and the packages of dstrain with their imports."""

from __future__ import annotations

import ast
import configparser
import io
import re
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import SVG_EXPORT_THEME
from rich.text import Text

ROOT = Path(__file__).parent.parent
IMAGES = ROOT / "docs" / "images"
PLAN_WORDS = ("plan", "--gpus", "8", "--gpu", "h100", "--model", "qwen3-8b", "--top", "3")
"""The command of the pages and, with `-v`, of the README's picture."""
COLORS = {"P": "blue", "G": "green", "O": "yellow", "B": "cyan", "W": "cyan", "A": "magenta", "L": "red", "x": "white"}
"""Color of each letter of the memory bars."""
WIDTH, ROW, BOX_WIDTH, BOX_HEIGHT = 760, 74, 104, 34
"""Sizes of the picture of the packages, in pixels."""


def terminal(words: tuple[str, ...], output: str) -> str:
    """Returns a command and its output as an SVG of a terminal, without a font from the network."""
    console = Console(record=True, width=80, file=io.StringIO(), color_system="truecolor")
    console.print(Text(f"$ dstrain {' '.join(words)}\n", style="bold"))
    for line in output.splitlines():
        text = Text(line)
        text.highlight_regex(r"^(model|cluster|chosen|why|note)\b", "bold blue")
        if bar := re.match(r" +([PGOBWALx]{8,})", line):
            for at in range(bar.start(1), bar.end(1)):
                text.stylize(COLORS[line[at]], at, at + 1)
        console.print(text, soft_wrap=True)
    svg = console.export_svg(title="dstrain plan", theme=SVG_EXPORT_THEME, unique_id="plan")
    svg = svg.replace("<svg ", '<svg xml:space="preserve" ', 1)
    return re.sub(r"\s*@font-face \{.*?\}", "", svg, flags=re.DOTALL)


def layers() -> list[list[str]]:
    """Returns the packages of dstrain from the top layer down, as the import contract in setup.cfg has them."""
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg", encoding="utf-8")
    rows: list[list[str]] = []
    for line in config["importlinter:contract:flow"]["layers"].split("\n"):
        names = [name.strip().split(".")[1] for name in line.split("|") if name.strip()]
        new = [name for name in dict.fromkeys(names) if not any(name in row for row in rows)]
        if new:
            rows.append(new)
    return rows


def imports() -> set[tuple[str, str]]:
    """Returns which top-level part of dstrain imports which, from the import statements."""
    pairs = set()
    for path in sorted((ROOT / "dstrain").rglob("*.py")):
        importer = path.relative_to(ROOT / "dstrain").parts[0].removesuffix(".py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            modules += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            pairs |= {(importer, name.split(".")[1]) for name in modules if name.startswith("dstrain.")}
    return {(importer, imported) for importer, imported in pairs if importer != imported}


def packages() -> str:
    """Returns an SVG of the layers and of the imports between neighbours and beyond; leaves have no arrows drawn."""
    rows = layers()
    leaves = {name for row in rows for name in row if not (ROOT / "dstrain" / name).is_dir()}
    centers = {}
    for level, row in enumerate(rows):
        for index, name in enumerate(row):
            centers[name] = (round(WIDTH * (index + 1) / (len(row) + 1)), 30 + level * ROW)
    parts = [_arrow(*centers[importer], *centers[imported]) for importer, imported in sorted(imports())
             if importer in centers and imported in centers and imported not in leaves]  # fmt: skip
    parts += [_box(name, *centers[name], name in leaves) for name in centers]
    height = 30 + len(rows) * ROW
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}"'
        ' font-family="monospace" font-size="13">'
        '<defs><marker id="tip" markerWidth="7" markerHeight="6" refX="7" refY="3" orient="auto">'
        '<path d="M0,0 L7,3 L0,6 z" fill="#57606a"/></marker></defs>'
        '<rect width="100%" height="100%" fill="#ffffff"/>'
    )
    return "\n".join([head, *parts, "</svg>\n"])


def _arrow(x: int, y: int, to_x: int, to_y: int) -> str:
    """Returns a curve from the lower edge of one box to the upper edge of another; long ones bow to the side."""
    bow = max(0, (to_y - y) // ROW - 1) * 42
    side = 1 if (x + to_x + to_y) // 2 % 2 else -1
    bend = (x + to_x) // 2 + side * bow
    start, end = y + BOX_HEIGHT // 2, to_y - BOX_HEIGHT // 2
    path = f"M{x},{start} C{bend},{start + 30} {bend},{end - 30} {to_x},{end}"
    return f'<path d="{path}" fill="none" stroke="#57606a" stroke-width="1" opacity="0.6" marker-end="url(#tip)"/>'


def _box(name: str, x: int, y: int, is_leaf: bool) -> str:
    """Returns a named box."""
    fill = "#f6f8fa" if is_leaf else "#ddf4ff"
    corner = f'x="{x - BOX_WIDTH // 2}" y="{y - BOX_HEIGHT // 2}" width="{BOX_WIDTH}" height="{BOX_HEIGHT}" rx="6"'
    return (
        f'<rect {corner} fill="{fill}" stroke="#57606a"/><text x="{x}" y="{y + 5}" text-anchor="middle">{name}</text>'
    )
