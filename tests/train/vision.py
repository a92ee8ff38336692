"""A tiny Qwen3-VL with its processor, and conversations about real image files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from transformers import Qwen2VLImageProcessorPil, Qwen3VLConfig, Qwen3VLForConditionalGeneration

from dstrain.train.demo import make_tokenizer

TEMPLATE = """\
{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' }}
{%- if m.content is string %}{{- m.content }}
{%- else %}{%- for part in m.content %}
{%- if part.type == 'image' %}{{- '<|vision_start|><|image_pad|><|vision_end|>' }}
{%- else %}{{- part.text }}{% endif %}{% endfor %}{% endif %}
{{- '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"""
"""Writes parts of turns as Qwen3-VL's does."""
TOKENS = {name: f"<|{name}|>" for name in ("image_pad", "video_pad", "vision_start", "vision_end")}
COLORS = ("red", "green", "blue", "white")
Row = dict[str, Any]


def make_model(folder: Path) -> Path:
    """Writes a model with two decoder layers and three tower blocks, its tokenizer and its processor."""
    tokenizer = make_tokenizer([*COLORS, "What is the color of this? It is of two images or none"] * 4)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", *TOKENS.values()]})
    tokenizer.chat_template = TEMPLATE
    ids: dict[str, Any] = {name: tokenizer.convert_tokens_to_ids(token) for name, token in TOKENS.items()}
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]},
        "pad_token_id": tokenizer.pad_token_id,
    }
    vision = {
        "depth": 3,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 2,
        "out_hidden_size": 64,
        "patch_size": 4,
        "num_position_embeddings": 64,
        "deepstack_visual_indexes": [0, 1],
    }
    config = Qwen3VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=ids["image_pad"],
        video_token_id=ids["video_pad"],
        vision_start_token_id=ids["vision_start"],
        vision_end_token_id=ids["vision_end"],
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        Qwen3VLForConditionalGeneration(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    size = {"shortest_edge": 64, "longest_edge": 4096}
    Qwen2VLImageProcessorPil(patch_size=4, size=size).save_pretrained(folder)
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
