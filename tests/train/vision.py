"""A tiny Qwen3-VL with its processor, and conversations about real image files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from PIL import Image

from dstrain.train.demo_images import make_vision_tokenizer, save_model

COLORS = ("red", "green", "blue", "white")
Row = dict[str, Any]


def make_model(folder: Path) -> Path:
    """Writes a model with two decoder layers and three tower blocks, its tokenizer and its processor."""
    texts = [*COLORS, "What is the color of this? It is of two images or none"] * 4
    text = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]},
    }
    tower = {
        "depth": 3,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 2,
        "out_hidden_size": 64,
        "patch_size": 4,
        "num_position_embeddings": 64,
        "deepstack_visual_indexes": [0, 1],
    }
    save_model(folder, make_vision_tokenizer(texts), text=text, tower=tower)
    return folder


def make_images(folder: Path) -> None:
    """Writes an image of each color, each of another size."""
    folder.mkdir(parents=True)
    for number, color in enumerate(COLORS):
        Image.new("RGB", (16 + 8 * number, 24), color).save(folder / f"{color}.png")


def rows() -> list[Row]:
    """Returns eight conversations with one image, two or none, in several forms."""
    found: list[Row] = [row(f"<image>What is this? {color}", color, f"images/{color}.png") for color in COLORS]
    found[1] = row("What is the color?", "green", "images/green.png")  # no mark
    parts = [{"type": "text", "text": "This?"}, {"type": "image_url", "image_url": {"url": "images/blue.png"}}]
    found[2] = {"messages": [{"role": "user", "content": parts}, {"role": "assistant", "content": "blue"}]}
    found.append(row("Two: <image> and <image>?", "red, white", "images/red.png", "images/white.png"))
    return [*found, *(row(f"What is the color of {word}?", f"It is {word}") for word in ("none", "two", "images"))]


def row(question: str, answer: str, *images: str) -> Row:
    """Returns a question about images and its answer."""
    turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return {"messages": turns, "images": list(images)}


def write(file: Path, rows: list[Row]) -> Path:
    """Writes rows as JSON lines."""
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return file
