"""Images of a sample: where they are written, and the files that must exist."""

import json
from base64 import b64encode
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest

from dstrain.errors import InvalidConfig
from dstrain.facts.data.datafile import check, parsed
from dstrain.facts.data.formats import PLAIN, require, to_sample, unused
from dstrain.facts.data.media import opened
from dstrain.facts.data.rows import Sample, entries
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
URL = "data:image/png;base64,iVBORw0KGgo="


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
        (row("a", images=[{"bytes": None, "path": "x.png"}]), "<image>a", ["x.png"]),
        (row("a", images=[{"bytes": b"ab", "path": "x.png"}]), "<image>a", ["data:;base64,YWI="]),
        (row("a", image=b"ab"), "<image>a", ["data:;base64,YWI="]),
        (row([{"type": "image_url", "image_url": {"url": URL}}, TEXT]), "<image>What?", [URL]),
        (row([part(image={"bytes": b"ab", "path": None}), TEXT]), "<image>What?", ["data:;base64,YWI="]),
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
        (row([part(image="x.png", text="a")]), "content has an image with text, which is not supported"),
        (row([{"type": "smell", "smell": "x.nose"}]), "neither text nor an image or a video"),
        (row("a", "<image>", images=["x.png"]), "turn 2, of the assistant: has an image"),
        (row("a", images=["https://host/x.png"]), '"images" is "https://host/x.png", not a file'),
        (row("a", images=[{"bytes": "", "path": None}]), '"images" is {"bytes": "", "path": null}; it must be a path'),
        (row("a", images=[3]), '"images" is 3; it must be a path, bytes or a data URL'),
        (row("a", images=["data:image/png,abc"]), '"images" is "data:image/png,abc", a data URL without base64'),
        (row("a", images=["iVBORw0KGgo" * 400]), '"images" is "iVBORw0KGgoiVBORw0KGgoiVBORw0KGgoiVB..., too long for'),
        (row("a", images=[b"x" * (21 << 20)]), '"images" has 21.0 MiB; an image in a row has 20.0 MiB at most'),
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
    assert check(data, PLAIN).media == ("images",)
    with pytest.raises(InvalidConfig) as caught:
        check(data, PLAIN, opens_images=True)
    first, second = caught.value.problem.splitlines()
    assert first.startswith(f'{data}:2: image "{tmp_path / "cut.png"}" cannot be read: ')
    reason = "cannot be read: it is in no format that Pillow reads"
    assert second == f'{data}:3: image "{tmp_path / "text.png"}" {reason}'


def content_of(image: Any, kind: str) -> bytes:
    stream = BytesIO()
    image.save(stream, kind)
    return stream.getvalue()


def test_images_in_rows_are_read_as_those_in_files_and_broken_ones_are_named(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    parquet = pytest.importorskip("pyarrow.parquet")
    content = content_of(image.new("RGB", (6, 4), "red"), "PNG")
    url = f"data:image/png;base64,{b64encode(content).decode()}"
    lines = tmp_path / "train.jsonl"
    parts = [{"type": "image_url", "image_url": {"url": url}}, TEXT]
    lines.write_text(f"{json.dumps(row(parts))}\n{json.dumps(row('a', images=[url[:-40]]))}\n")
    with pytest.raises(InvalidConfig) as caught:
        check(lines, PLAIN, opens_images=True)
    assert caught.value.problem.startswith(f'{lines}:2: image "PNG in the row" cannot be read: ')
    assert check(lines, PLAIN).media == ("images",)
    data = tmp_path / "train.parquet"
    rows = [row("a", images=[{"bytes": content, "path": "x.png"}]), row("b", images=[{"bytes": b"no", "path": None}])]
    pyarrow = pytest.importorskip("pyarrow")
    parquet.write_table(pyarrow.Table.from_pylist(rows), data)
    first = next(iter(entries(data, None)))
    assert isinstance(first, Sample)
    sample = parsed(first, require(list(first.row), PLAIN))
    assert isinstance(sample, Conversation)
    assert opened(sample.images[0]).size == (6, 4)
    with pytest.raises(InvalidConfig) as caught:
        check(data, PLAIN, opens_images=True)
    assert (
        caught.value.problem
        == f'{data}: row 2: image "image in the row" cannot be read: it is in no format that Pillow reads'
    )
