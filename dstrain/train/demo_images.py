"""Makes pictures, questions about them and a tiny Qwen3-VL, offline: `python -m dstrain.train.demo_images DIR`.

No question tells its answer: a model that gets no pixels can only guess colors and shapes.
"""

from __future__ import annotations

import json
import math
import random
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable
from contextlib import redirect_stdout
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from transformers import (
    PreTrainedTokenizerFast,
    Qwen2VLImageProcessorPil,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)

from dstrain.train.demo import EVAL_SAMPLES, SEED, Demo, labels_of, make_tokenizer, write_rows

CHAT_TEMPLATE = """\
{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' }}
{%- if m.content is string %}{{- m.content }}
{%- else %}{%- for part in m.content %}
{%- if part.type in ('image', 'video') %}{{- '<|vision_start|><|' + part.type + '_pad|><|vision_end|>' }}
{%- else %}{{- part.text }}{% endif %}{% endfor %}{% endif %}
{{- '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"""
"""ChatML with images and videos as parts of turns. Source: the chat template of Qwen3-VL."""
COLORS = ("red", "green", "blue", "yellow", "purple", "orange")
SHAPES = ("circle", "square", "triangle")
QUESTIONS = {
    "What is in the picture?": "a {color} {shape}",
    "What color is it?": "{color}",
    "Which shape is it?": "{shape}",
}
"""Question → answer."""
TRAIN_SAMPLES = 1536

_TOKENS = {name: f"<|{name}|>" for name in ("image_pad", "video_pad", "vision_start", "vision_end")}
_PATCH = 8
"""Side of a patch, in pixels."""
_TEXT = {
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [8, 4, 4]},
    "tie_word_embeddings": True,
}
_TOWER = {
    "depth": 3,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_heads": 2,
    "out_hidden_size": 128,
    "patch_size": _PATCH,
    "num_position_embeddings": 64,
    "deepstack_visual_indexes": [0, 1],
}


def build(folder: Path) -> Demo:
    """Writes `model`, `train.jsonl`, `eval.jsonl` and `pictures` to the folder; the same every time."""
    (folder / "pictures").mkdir(parents=True, exist_ok=True)
    chosen = random.Random(SEED)
    samples = [_sample(folder, number, chosen) for number in range(TRAIN_SAMPLES + EVAL_SAMPLES)]
    train, evaluation = samples[EVAL_SAMPLES:], samples[:EVAL_SAMPLES]
    tokenizer = make_vision_tokenizer(turn["content"] for sample in train for turn in sample["messages"])
    model = save_model(folder / "model", tokenizer, text=_TEXT, tower=_TOWER)
    return Demo(
        model=str(folder / "model"),
        train=write_rows(folder / "train.jsonl", train),
        eval=write_rows(folder / "eval.jsonl", evaluation),
        params=model.num_parameters(),
        vocab_size=len(tokenizer),
        train_samples=len(train),
        eval_samples=len(evaluation),
        loss_to_beat=loss_without_pictures(evaluation, tokenizer),
    )


def _sample(folder: Path, number: int, chosen: random.Random) -> dict[str, Any]:
    """Draws a picture and returns a question about it with its answer."""
    color, shape, question = chosen.choice(COLORS), chosen.choice(SHAPES), chosen.choice(list(QUESTIONS))
    name = f"pictures/{number:04}.png"
    _draw(folder / name, color, shape, chosen)
    turns = [
        {"role": "user", "content": question},
        {"role": "assistant", "content": QUESTIONS[question].format(color=color, shape=shape)},
    ]
    return {"messages": turns, "images": [name]}


def _draw(file: Path, color: str, shape: str, chosen: random.Random) -> None:
    """Writes a picture of one shape, of random size and place, on black."""
    from PIL import Image, ImageDraw

    width, height = 8 * _PATCH, 6 * _PATCH  # 48 patches, of which four become a token
    picture = Image.new("RGB", (width, height))
    side = chosen.randint(height // 2, 3 * height // 4)
    left, top = chosen.randint(0, width - side - 1), chosen.randint(0, height - side - 1)
    right, bottom = left + side, top + side
    pen = ImageDraw.Draw(picture)
    if shape == "circle":
        pen.ellipse((left, top, right, bottom), fill=color)
    elif shape == "square":
        pen.rectangle((left, top, right, bottom), fill=color)
    else:
        pen.polygon([(left, bottom), (right, bottom), (left + side // 2, top)], fill=color)
    picture.save(file)


def loss_without_pictures(samples: Iterable[dict[str, Any]], tokenizer: Any) -> float:
    """Returns the entropy of the answers given their questions, in nats per token that counts in the loss.

    It is the loss of the best model that sees no picture, tuned on these very samples: Σ −ln p(answer | question)
    over the tokens of all answers, with their ends of turn.
    """
    rows = list(samples)
    answers: dict[str, Counter[str]] = defaultdict(Counter)
    for row in rows:
        question, answer = (turn["content"] for turn in row["messages"])
        answers[question][answer] += 1
    nats = -sum(n * math.log(n / given.total()) for given in answers.values() for n in given.values())
    return nats / sum(
        len(sample["labels"]) for sample in labels_of((row["messages"][-1]["content"] for row in rows), tokenizer)
    )


def make_vision_tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """Returns the demo's tokenizer with the special tokens of Qwen3-VL, trained on the texts."""
    tokenizer = make_tokenizer(texts)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", *_TOKENS.values()]})
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def save_model(
    folder: Path, tokenizer: Any, *, text: dict[str, Any], tower: dict[str, Any]
) -> Qwen3VLForConditionalGeneration:
    """Writes a Qwen3-VL with random weights, its tokenizer and its processor, and returns the model.

    `text` and `tower` are the sizes of its configuration. Leaves the state of other random numbers as it was.
    """
    ids: dict[str, Any] = {f"{name}_id": tokenizer.convert_tokens_to_ids(token) for name, token in _TOKENS.items()}
    config = Qwen3VLConfig(
        text_config={"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id, **text},
        vision_config=tower,
        image_token_id=ids["image_pad_id"],
        video_token_id=ids["video_pad_id"],
        vision_start_token_id=ids["vision_start_id"],
        vision_end_token_id=ids["vision_end_id"],
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        model = Qwen3VLForConditionalGeneration(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    size = {"shortest_edge": 16 * tower["patch_size"] ** 2 // 4, "longest_edge": 4096}
    Qwen2VLImageProcessorPil(patch_size=tower["patch_size"], size=size).save_pretrained(folder)
    return model


def main() -> None:
    """Builds into the folder named on the command line and prints what was made as one line of JSON."""
    with redirect_stdout(sys.stderr):  # libraries that are loaded on the way greet on stdout
        made = build(Path(sys.argv[1]).resolve())
    print(json.dumps(asdict(made)))


if __name__ == "__main__":
    main()
