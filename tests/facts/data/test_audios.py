"""Audios in rows: the forms in which data have them, and files that cannot be heard."""

import json
from base64 import b64encode
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dstrain.choices import Task
from dstrain.errors import EnvironmentProblem, InvalidConfig
from dstrain.facts.data import audios, containers
from dstrain.facts.data.datafile import check
from dstrain.facts.data.preferences import to_pair
from dstrain.facts.data.sample_formats import PLAIN, Reading, require, to_sample
from dstrain.facts.data.turns import Conversation
from dstrain.job.schema import Job
from dstrain.job.task_limits import require_for_media
from tests.sounds import RATE, tone, write_wav

Row = dict[str, Any]
TEXT = {"type": "text", "text": "What is said?"}


def row(question: Any, **columns: Any) -> Row:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": "hi"}], **columns}


def sample_of(given: Row) -> Conversation:
    sample = to_sample(given, require(list(given), PLAIN))
    assert isinstance(sample, Conversation)
    return sample


@pytest.mark.parametrize(
    "given",
    [
        row("<audio>What is said?", audios=["x.wav"]),
        row("What is said?", audio="x.wav"),
        row([{"type": "audio"}, TEXT], audios=["x.wav"]),
        row([{"type": "audio", "audio": "x.wav"}, TEXT]),
        row([{"type": "audio", "audio_url": "x.wav"}, TEXT]),
        row([{"type": "audio_url", "audio_url": {"url": "x.wav"}}, TEXT]),
        row([{"type": "audio", "path": "x.wav"}, TEXT]),
        row("What is said?", audios=[{"bytes": None, "path": "x.wav"}]),
        {"instruction": "What is said?", "output": "hi", "audios": ["x.wav"]},
    ],
)
def test_every_form_is_a_mark_and_a_file(given: Row) -> None:
    sample = sample_of(given)
    assert [message["content"] for message in sample.messages] == ["<audio>What is said?", "hi"]
    assert (sample.audios, sample.media) == (("x.wav",), ("audios",))


def test_what_has_no_mark_stands_before_the_question_after_images_and_videos() -> None:
    sample = sample_of(row("?", images=["x.png"], videos=["x.mp4"], audios=["x.wav", "y.wav"]))
    assert sample.messages[0]["content"] == "<image><video><audio><audio>?"


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        (row("<audio>"), '"<audio>" stands for an image, video or audio without a file'),
        (row("<audio><audio>", audios=["x.wav"]), "2 marks <audio>, but 1 audio"),
        (row("a", audios=["https://host/x.wav"]), '"audios" is "https://host/x.wav", not a file'),
        (row("a", audios=[{"array": ["loud"], "sampling_rate": 8000}]), "not sound as numbers"),
        (row("a", audios=[{"array": [0.5, -0.5]}]), "not sound as numbers"),
        (row([{"type": "audio", "audio": "x.wav", "fps": 2}]), "has an audio with fps, which is not supported"),
    ],
)
def test_what_is_wrong_with_audios_is_said(given: Row, problem: str) -> None:
    with pytest.raises(InvalidConfig) as caught:
        sample_of(given)
    assert problem in caught.value.problem


def test_both_sides_of_a_pair_have_its_audios_which_its_task_refuses() -> None:
    pair = to_pair({"prompt": "a", "chosen": "b", "rejected": "c", "audios": ["x.wav"]}, Reading())
    assert [side.audios for side in pair.sides] == [("x.wav",)] * 2
    with pytest.raises(InvalidConfig, match="task is dpo, which data with audios do not support"):
        require_for_media(Job(model="m", output_dir="o", task=Task.DPO), ["audios"], packs=True)


@pytest.fixture
def wav(tmp_path: Path, need: Callable[[object, str], None]) -> Path:
    need(find_spec("av"), "av is not installed: make videos")
    write_wav(tmp_path / "x.wav", tone(440, 1.5))
    return tmp_path / "x.wav"


def test_sound_in_rows_is_that_of_files(wav: Path) -> None:
    expected, content = audios.opened(str(wav), RATE).samples, wav.read_bytes()
    numbers, encoded = expected.astype(float).tolist(), b64encode(content).decode()
    part = {"type": "input_audio", "input_audio": {"data": encoded, "format": "wav"}}
    for given in (
        row("a", audios=[{"bytes": content, "path": "x.wav"}]),
        row("a", audios=[{"array": numbers, "sampling_rate": RATE}]),
        row("a", audios=[{"array": [numbers, numbers], "sampling_rate": RATE}]),
        row("a", audios=[f"data:audio/wav;base64,{encoded}"]),
        row([part, TEXT]),
    ):
        (audio,) = sample_of(given).audios
        assert np.abs(audios.opened(audio, RATE).samples - expected).max() < 1e-6
    (none,) = sample_of(row("a", audios=[{"array": [*numbers, float("nan")], "sampling_rate": RATE}])).audios
    with pytest.raises(InvalidConfig, match='audio "audio in the row" has samples that are no numbers'):
        audios.opened(none, RATE)
    (two,) = sample_of(row("a", audios=[{"array": [numbers, [0.0] * len(numbers)], "sampling_rate": RATE}])).audios
    assert np.abs(audios.opened(two, RATE).samples - expected / 2).max() < 1e-6


def test_sound_is_resampled_and_cut(wav: Path) -> None:
    write_wav(wav.with_name("cd.wav"), tone(440, 1.5, rate=44_100), rate=44_100)
    made = audios.opened(str(wav.with_name("cd.wav")), RATE).samples
    assert np.abs(made - tone(440, 1.5))[100:-100].max() < 1e-3
    for seconds, is_cut in ((1.5, False), (1.0, True)):
        sound = audios.opened(str(wav), RATE, seconds)
        assert (sound.seconds, sound.is_cut) == (seconds, is_cut)


def test_what_cannot_be_heard_is_named_with_its_line(wav: Path) -> None:
    folder = wav.parent
    write_wav(folder / "none.wav", tone(440, 0.0))
    (folder / "empty.wav").write_bytes(b"")
    (folder / "text.wav").write_text("no sound")
    names = ("x.wav", "none.wav", "empty.wav", "text.wav")
    data = folder / "train.jsonl"
    data.write_text("".join(f"{json.dumps(row('a', audios=[name]))}\n" for name in names))
    assert check(data, PLAIN).media == ("audios",)
    with pytest.raises(InvalidConfig) as caught:
        check(data, PLAIN, opens_images=True)
    assert caught.value.problem.splitlines() == [
        f'{data}:2: audio "{folder}/none.wav" has 0 seconds of sound',
        f'{data}:3: audio "{folder}/empty.wav" cannot be read: Invalid data found when processing input',
        f'{data}:4: audio "{folder}/text.wav" cannot be read: Invalid data found when processing input',
    ]
    data.write_text(json.dumps(row("a", audios=["gone.wav"])))
    with pytest.raises(InvalidConfig, match=r':1: audio "gone.wav" does not exist'):
        check(data, PLAIN)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(containers, "find_spec", lambda name: None)
    with pytest.raises(EnvironmentProblem) as caught:
        audios.require_packages()
    assert caught.value.problem == "audios need av, which is not installed"
    assert caught.value.hint == "pip install 'dstrain[audios]'"
