"""A tiny Qwen3-VL with its processor, and conversations about real image and video files."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from transformers import Qwen3VLConfig, Qwen3VLMoeConfig, Qwen3VLMoeForConditionalGeneration
from transformers.video_utils import load_video

from dstrain.train.data.rendering import IGNORED
from dstrain.train.demo import SEED, make_vision_tokenizer, save_model
from tests.train.tiny import sizes

COLORS = ("red", "green", "blue", "white")
Row = dict[str, Any]


def make_model(folder: Path) -> Path:
    """Writes a model with two decoder layers and three tower blocks, its tokenizer and its processor."""
    texts = [*COLORS, "What is the color of this? It is of two images or none"] * 4
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}
    text = sizes(64, heads=4, rope_parameters=rope)
    del text["vocab_size"]  # the tokenizer's
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
    settings = {"patch_size": 4, "size": {"shortest_edge": 256, "longest_edge": 8192}, "min_frames": 2}
    videos = {"video_processor_type": "Qwen3VLVideoProcessor", **settings}
    (folder / "video_preprocessor_config.json").write_text(json.dumps(videos))
    return folder


def make_mixture(folder: Path, plain: Path) -> Path:
    """Writes a Qwen3-VL with four experts, of which a token takes two, and the sizes and files of `make_model`'s."""
    config: Any = Qwen3VLConfig.from_pretrained(plain)
    text = config.text_config.to_dict()
    del text["model_type"]
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    names = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    ids = {name: getattr(config, name) for name in names}
    tower = config.vision_config.to_dict()
    del tower["model_type"]
    shutil.copytree(plain, folder, ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        made = Qwen3VLMoeConfig(text_config=text | experts, vision_config=tower, **ids)
        Qwen3VLMoeForConditionalGeneration(made).save_pretrained(folder)
    return folder


def need_videos(need: Callable[[object, str], None]) -> None:
    """Skips a test if `make videos` has not run."""
    need(find_spec("torchvision") and find_spec("av"), "torchvision or av is not installed: make videos")


def sampled(file: Path, choose: Callable[..., Any]) -> tuple[Any, Any]:
    """Returns frames of a video by Transformers' decoder, and what it says about them."""
    load: Any = load_video
    return load(str(file), sample_indices_fn=choose)  # type: ignore[no-any-return]


def make_videos(folder: Path) -> None:
    """Writes `clip.mp4`, of 30 frames in 3 seconds, `short.webm`, which does not count its 5, `turned.mp4`, shown
    turned left, and `frame0.png` …"""
    import av

    folder.mkdir(parents=True)
    frames = [Image.new("RGB", (40, 24), (8 * index, 0, 255 - 8 * index)) for index in range(30)]
    for index, frame in enumerate(frames):
        frame.paste("white", (index, 4, index + 8, 12))
    for name, codec, count in (("clip.mp4", "mpeg4", 30), ("short.webm", "libvpx", 5), ("turned.mp4", "mpeg4", 5)):
        with av.open(str(folder / name), "w") as container:
            stream = container.add_stream(codec, rate=10)
            stream.width, stream.height, stream.pix_fmt = 40, 24, "yuv420p"
            if name == "turned.mp4":
                stream.set_display_rotation(90)
            for image in [*map(av.VideoFrame.from_image, frames[:count]), None]:
                container.mux(stream.encode(image))
    for index in range(3):
        frames[9 * index].save(folder / f"frame{index}.png")


FRAMES = [f"videos/frame{index}.png" for index in range(3)]


def video_rows() -> list[Row]:
    """Returns eight conversations with a video, an image, both or none, in several forms."""
    frames = [{"type": "video", "video": FRAMES}, {"type": "text", "text": "This?"}]
    both = [{"type": "text", "text": "Two: "}, {"type": "video_url", "video_url": {"url": "videos/short.webm"}}]
    both += [{"type": "text", "text": " and "}, {"type": "image_url", "image_url": {"url": "images/red.png"}}]
    found: list[Row] = [
        {**row("<video>What is this?", "red"), "videos": ["videos/clip.mp4"]},
        row(frames, "white"),
        row(both, "red, white"),
        row("What is the color?", "green", "images/green.png"),
        {**row("What is it of?", "blue"), "video": "videos/short.webm"},  # no mark
    ]
    return [*found, *(row(f"What is the color of {word}?", f"It is {word}") for word in ("none", "two", "images"))]


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


def row(question: Any, answer: str, *images: str) -> Row:
    """Returns a question, perhaps about images, and its answer."""
    turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return {"messages": turns, "images": list(images)}


def labelled(processor: Any, question: str, answer: str, **media: Any) -> dict[str, Any]:
    """Returns what Transformers' processor makes of a question and its answer, with labels of the answer's tokens."""
    prompt = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
    inputs, before = (
        processor(text=[text], return_tensors="pt", add_special_tokens=False, **media)
        for text in (f"{prompt}{answer}<|im_end|>\n", prompt)
    )
    labels = inputs["input_ids"].clone()
    labels[:, : before["input_ids"].shape[1]] = IGNORED
    labels[:, -1:] = IGNORED
    return {**inputs, "labels": labels}


def loss_and_count(model: Any, inputs: dict[str, Any]) -> tuple[Any, int]:
    """Returns the mean loss of inputs as Transformers computes it, and the number of their targets."""
    return model(**inputs).loss, int((inputs["labels"][:, 1:] != IGNORED).sum())


def write(file: Path, rows: list[Row]) -> Path:
    """Writes rows as JSON lines."""
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return file
