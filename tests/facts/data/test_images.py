"""Images of a sample: where they are written, and the files that must exist."""

import json
from pathlib import Path
from typing import Any

import pytest

from dstrain.errors import InvalidConfig
from dstrain.facts.data.datafile import check, parsed
from dstrain.facts.data.rows import Sample
from dstrain.facts.data.sample_formats import PLAIN, require, to_sample, unused
from dstrain.facts.data.turns import Conversation

Row = dict[str, Any]


def row(content: Any, answer: str = "b", **columns: Any) -> Row:
    return {"messages": [{"role": "user", "content": content}, {"role": "assistant", "content": answer}], **columns}


def sample_of(row: Row) -> Conversation:
    found = to_sample(row, require(list(row), PLAIN))
    assert isinstance(found, Conversation)
    return found


def part(**values: Any) -> Row:
    return {"type": "image", **values}


TEXT = {"type": "text", "text": "What?"}


@pytest.mark.parametrize(
    ("given", "text", "images"),
    [
        (row("a <image> b", images=["x.png"]), "a <image> b", ["x.png"]),
        (row("a <image> b", image="x.png"), "a <image> b", ["x.png"]),
        (row("What?", images=["x.png", "y.png"]), "<image><image>What?", ["x.png", "y.png"]),
        (row([part(image="x.png"), TEXT]), "<image>What?", ["x.png"]),
        (row([TEXT, part(image="x.png", text=None)]), "What?<image>", ["x.png"]),
        (row([TEXT, {"type": "image_url", "image_url": {"url": "file:///d/x.png"}}]), "What?<image>", ["/d/x.png"]),
        (row([TEXT, {"type": "input_image", "image_url": "x.png"}]), "What?<image>", ["x.png"]),
        (row([part(), TEXT, part()], images=["x.png", "y.png"]), "<image>What?<image>", ["x.png", "y.png"]),
        (row("the tag `<image>`", images=[]), "the tag `<image>`", []),
        ({"instruction": "a", "input": "<image>", "output": "b", "images": "x.png"}, "a\n<image>", ["x.png"]),
    ],
)
def test_images_are_marks_in_the_text_and_paths_in_their_order(given: Row, text: str, images: list[str]) -> None:
    found = sample_of(given)
    assert found.messages[0] == {"role": "user", "content": text}
    assert list(found.images) == images
    assert unused(given, require(list(given), PLAIN)) == []


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        (row("<image><image>", images=["x.png"]), "2 marks <image>, but 1 image"),
        (row("<image>"), '"<image>" stands for an image, video or audio without a file'),
        (row([part(), TEXT]), "1 mark <image>, but 0 images"),
        (row([part(image="x.png")], images=["y.png"]), "some images are parts of turns, others are not"),
        (row([part(image="x.png", text="a")]), "neither text nor an image"),
        (row([{"type": "video", "video": "x.mp4"}]), "neither text nor an image"),
        (row("a", "<image>", images=["x.png"]), "turn 2, of the assistant: has an image"),
        (row("a", images=["https://host/x.png"]), '"images" is "https://host/x.png", not a file'),
        (row("a", images=[{"bytes": "", "path": None}]), '"images" holds the content of an image'),
        (row("a", images=[3]), '"images" is 3; it must be a path'),
        (row("a", images=["x.png"], image="x.png"), "images and image are both given"),
        (row("<video>", images=["x.png"]), '"<video>" stands for'),
    ],
)
def test_what_is_wrong_with_images_is_said(given: Row, problem: str) -> None:
    with pytest.raises(InvalidConfig) as caught:
        sample_of(given)
    assert problem in caught.value.problem


def test_paths_are_relative_to_the_data_file_which_names_the_line_of_a_missing_one(tmp_path: Path) -> None:
    (tmp_path / "x.png").write_bytes(b"")
    given = row("a", images=["x.png"])
    found = parsed(Sample(where="here", row=given, folder=tmp_path), require(list(given), PLAIN))
    assert isinstance(found, Conversation)
    assert found.images == (str(tmp_path / "x.png"),)
    data = tmp_path / "train.jsonl"
    data.write_text(f"{json.dumps(given)}\n{json.dumps(row('a', images=['gone/y.png']))}\n")
    with pytest.raises(InvalidConfig) as caught:
        check(data, PLAIN)
    missing = tmp_path / "gone" / "y.png"
    assert caught.value.problem == f'{data}:2: image "gone/y.png" does not exist ({missing})'


def test_a_broken_image_is_found_where_all_are_opened(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    image.new("RGB", (64, 64), "red").save(tmp_path / "good.png")
    whole = (tmp_path / "good.png").read_bytes()
    (tmp_path / "cut.png").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "text.png").write_text("no image")
    data = tmp_path / "train.jsonl"
    data.write_text("".join(f"{json.dumps(row('a', images=[f'{name}.png']))}\n" for name in ("good", "cut", "text")))
    assert check(data, PLAIN).has_images
    with pytest.raises(InvalidConfig) as caught:
        check(data, PLAIN, opens_images=True)
    first, second = caught.value.problem.splitlines()
    assert first.startswith(f'{data}:2: image "{tmp_path / "cut.png"}" cannot be read: ')
    assert second.startswith(f'{data}:3: image "{tmp_path / "text.png"}" cannot be read: cannot identify')
