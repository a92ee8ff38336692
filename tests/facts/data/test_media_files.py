"""Videos of a sample: where they are written, the files that must exist, and what is wrong with them."""

import json
from base64 import b64encode
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dstrain.errors import EnvironmentProblem, InvalidConfig
from dstrain.facts.data import media
from dstrain.facts.data.datafile import check
from dstrain.facts.data.formats import PLAIN, require, unused
from dstrain.facts.data.media import Files
from tests.facts.data.test_media import TEXT, Row, part, row, sample_of

URL = "data:video/mp4;base64,AAAA"


def video(**values: Any) -> Row:
    return {"type": "video", **values}


@pytest.mark.parametrize(
    ("given", "text", "images", "found"),
    [
        (row("a <video> b", videos=["x.mp4"]), "a <video> b", [], [("x.mp4",)]),
        (row("What?", video="x.mp4"), "<video>What?", [], [("x.mp4",)]),
        (row("<video>?", videos=[["1.png", "2.png"]]), "<video>?", [], [("1.png", "2.png")]),
        (row([video(video="file:///d/x.mp4"), TEXT]), "<video>What?", [], [("/d/x.mp4",)]),
        (row([video(video=["1.png", "2.png"]), TEXT]), "<video>What?", [], [("1.png", "2.png")]),
        (row([{"type": "video_url", "video_url": {"url": URL}}, TEXT]), "<video>What?", [], [(URL,)]),
        (row([video(), TEXT], videos=["x.mp4"]), "<video>What?", [], [("x.mp4",)]),
        (row("a", videos=[{"bytes": b"ab", "path": "x.mp4"}]), "<video>a", [], [("data:;base64,YWI=",)]),
        (row("?", images=["x.png"], videos=["x.mp4"]), "<image><video>?", ["x.png"], [("x.mp4",)]),
        (row([part(image="x.png"), video(video="x.mp4"), TEXT]), "<image><video>What?", ["x.png"], [("x.mp4",)]),
        (row("<video>a<image>", images=["x.png"], videos=["x.mp4"]), "<video>a<image>", ["x.png"], [("x.mp4",)]),
        (row("the tag `<video>`", videos=[]), "the tag `<video>`", [], []),
    ],
)
def test_videos_are_marks_in_the_text_and_files_in_their_order(
    given: Row, text: str, images: list[str], found: list[Files]
) -> None:
    sample = sample_of(given)
    assert sample.messages[0] == {"role": "user", "content": text}
    assert (list(sample.images), list(sample.videos)) == (images, found)
    assert unused(given, require(list(given), PLAIN)) == []


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        (row("<video><video>", videos=["x.mp4"]), "2 marks <video>, but 1 video"),
        (row("<video>"), '"<video>" stands for an image, video or audio without a file'),
        (row("<video><image>", videos=["x.mp4"]), '"<image>" stands for'),
        (row([video(video="x.mp4")], videos=["y.mp4"]), "some videos are parts of turns, others are not"),
        (row([video(video="x.mp4", fps=1.0)]), "content has a video with fps, which is not supported"),
        (row("a", videos=[["1.png"]]), '"videos" is ["1.png"], a list of 1 frame'),
        (row("a", "<video>", videos=["x.mp4"]), "turn 2, of the assistant: has a video"),
        (row("a", videos=["https://host/x.mp4"]), '"videos" is "https://host/x.mp4", not a file'),
        (row("a", videos=[3]), '"videos" is 3; it must be a path, bytes or a data URL'),
        (row("a", videos=[b"x" * (21 << 20)]), '"videos" has 21.0 MiB; a video in a row has 20.0 MiB at most'),
        (row("a", videos=["x.mp4"], video="x.mp4"), "videos and video are both given"),
        ({"messages": [{"role": "user", "content": "a", "videos": ["x.mp4"]}]}, '"videos" holds videos'),
    ],
)
def test_what_is_wrong_with_videos_is_said(given: Row, problem: str) -> None:
    with pytest.raises(InvalidConfig) as caught:
        sample_of(given)
    assert problem in caught.value.problem


def test_a_missing_file_is_named_with_its_line_and_so_is_a_missing_frame(tmp_path: Path) -> None:
    (tmp_path / "1.png").write_bytes(b"")
    data = tmp_path / "train.jsonl"
    data.write_text("".join(f"{json.dumps(row('a', videos=[given]))}\n" for given in ("x.mp4", ["1.png", "2.png"])))
    with pytest.raises(InvalidConfig) as caught:
        check(data, PLAIN)
    assert caught.value.problem.splitlines() == [
        f'{data}:1: video "x.mp4" does not exist ({tmp_path / "x.mp4"})',
        f'{data}:2: frame "2.png" does not exist ({tmp_path / "2.png"})',
    ]


def test_broken_videos_are_named_with_their_lines_where_all_are_read(
    tmp_path: Path, need: Callable[[object, str], None]
) -> None:
    from tests.train.vision import make_videos, need_videos

    need_videos(need)
    make_videos(tmp_path / "good")
    whole = (tmp_path / "good" / "short.webm").read_bytes()
    (tmp_path / "text.mp4").write_text("no video")
    (tmp_path / "cut.mp4").write_bytes((tmp_path / "good" / "clip.mp4").read_bytes()[:-200])
    (tmp_path / "none.mp4").write_bytes(b"")
    frames = [f"good/frame{index}.png" for index in range(3)]
    url = f"data:video/webm;base64,{b64encode(whole).decode()}"
    given = ["good/clip.mp4", "good/short.webm", url, frames, "text.mp4", "cut.mp4", "none.mp4", ["text.mp4", *frames]]
    data = tmp_path / "train.jsonl"
    data.write_text("".join(f"{json.dumps(row('a', videos=[each]))}\n" for each in given))
    assert check(data, PLAIN).media == ("videos",)
    with pytest.raises(InvalidConfig) as caught:
        check(data, PLAIN, opens_images=True)
    assert [line.partition(" cannot be read")[0] for line in caught.value.problem.splitlines()] == [
        *(f'{data}:{line}: video "{tmp_path / name}.mp4"' for line, name in ((5, "text"), (6, "cut"), (7, "none"))),
        f'{data}:8: image "{tmp_path / "text.mp4"}"',
    ]


def test_a_file_that_ends_too_early_or_frames_of_several_sizes_are_told(
    tmp_path: Path, need: Callable[[object, str], None]
) -> None:
    image = pytest.importorskip("PIL.Image")
    from tests.train.vision import make_videos, need_videos

    need_videos(need)
    make_videos(tmp_path / "good")
    clip = (str(tmp_path / "good" / "clip.mp4"),)
    assert media.header_of(clip) == media.Header(num_frames=30, fps=10.0, width=40, height=24)
    assert [frame.size for frame in media.frames_of(clip, [3, 29])] == [(40, 24)] * 2
    with pytest.raises(InvalidConfig, match=r"clip.mp4\" ends after 30 of at least 41 frames"):
        list(media.frames_of(clip, [3, 40]))
    turned = (str(tmp_path / "good" / "turned.mp4"),)
    assert media.header_of(turned) == media.Header(num_frames=5, fps=10.0, width=24, height=40)
    (frame,) = media.frames_of(turned, [0])
    upright, lying = frame.load(), next(media.frames_of(clip, [0])).rotate(90, expand=True).load()
    assert all(abs(upright[at][0] - lying[at][0]) < 32 for at in ((2, 2), (8, 36), (20, 20)))
    image.new("RGB", (8, 8)).save(tmp_path / "small.png")
    with pytest.raises(InvalidConfig, match=r"small.png\" have 40 × 24 and 8 × 8 pixels"):
        media.require_whole((str(tmp_path / "good" / "frame0.png"), str(tmp_path / "small.png")))


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("PIL")
    monkeypatch.setattr(media, "find_spec", lambda name: name == "PIL" or None)
    with pytest.raises(EnvironmentProblem) as caught:
        media.require_packages()
    assert caught.value.problem == "videos need torchvision and av, which are not installed"
    assert caught.value.hint == "pip install 'dstrain[videos]'"
