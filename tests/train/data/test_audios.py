"""Audios in tokens: limits, the cut by seq_len, what `dstrain data show` shows, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import datasets

from dstrain.choices import LossOn, Task
from dstrain.errors import InvalidConfig
from dstrain.facts.data.turns import Conversation
from dstrain.facts.model.audio_towers import TRAINS_AUDIO
from dstrain.job.schema import Job
from dstrain.job.task_limits import require_for_media
from dstrain.train.data.image_processor import load_media_reader
from dstrain.train.data.media_reader import MediaReader
from dstrain.train.data.prepare import prepare
from dstrain.train.data.show import shown
from dstrain.train.data.tokenize import Encoded, Encoder
from dstrain.train.data.tokenized import SEQUENCES, with_media
from dstrain.train.tokenizer import load_tokenizer
from tests.sounds import tone, write_wav
from tests.train.audio_families import FAMILIES, WINDOW_S, make_family


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, need: Callable[[object, str], None]) -> Path:
    need(find_spec("av"), "av is not installed: make videos")
    found = tmp_path_factory.mktemp("audios")
    for family in ("qwen2_audio", "glmasr"):
        make_family(family, found / family)
    write_wav(found / "short.wav", tone(440, 1.2))
    write_wav(found / "long.wav", tone(440, 5.0))
    return found


@pytest.fixture
def job(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    rows = [row("short.wav"), row("long.wav"), row()]
    (folder / "train.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in rows))
    return Job(model=str(folder / "qwen2_audio"), output_dir="o", data=str(folder / "train.jsonl"), seq_len=256)


def row(*audios: str) -> dict[str, Any]:
    turns = [{"role": "user", "content": "What is this?"}, {"role": "assistant", "content": "red"}]
    return {"messages": turns, "audios": list(audios)}


def encoder(job: Job) -> Encoder:
    tokenizer: Any = load_tokenizer(job, job.model)
    media_reader = load_media_reader(job, job.model, tokenizer)
    return Encoder(tokenizer=tokenizer, seq_len=job.seq_len, loss_on=LossOn.ANSWER, media_reader=media_reader)


def encoded(job: Job, *audios: str, images: tuple[str, ...] = ()) -> Encoded:
    asked, answer = row()["messages"]
    marked = {**asked, "content": "<image>" * len(images) + "<audio>" * len(audios) + asked["content"]}
    files = tuple(str(Path(job.model).parent / audio) for audio in audios)
    (sample,) = encoder(job).encode([("here", Conversation(messages=[marked, answer], audios=files, images=images))])
    return sample


def heard(sample: Encoded) -> int:
    return sum(index is not None for index in sample.media_of)


def test_the_tiny_families_are_those_that_train() -> None:
    assert FAMILIES.keys() == TRAINS_AUDIO.keys()


@pytest.mark.parametrize(("family", "longest"), [("qwen2_audio", WINDOW_S), ("glmasr", 2 * WINDOW_S)])
def test_audios_are_cut_at_audio_max_seconds_or_at_what_the_processor_takes(
    job: Job, folder: Path, family: str, longest: int
) -> None:
    asked, rate = replace(job, model=str(folder / family)), TRAINS_AUDIO[family].tokens_per_s
    for audio, most, seconds, cut in (
        ("short.wav", None, 1.2, 0),
        ("long.wav", None, longest, 1),
        ("short.wav", 0.8, 0.8, 1),
    ):
        sample = encoded(replace(asked, audio_max_seconds=most), audio)
        assert (heard(sample), sample.counts.cut_audios) == (int(rate * seconds), cut)
    with pytest.raises(
        InvalidConfig, match=f"audio_max_seconds is 60, but the processor of .* takes {longest} seconds"
    ):
        encoder(replace(asked, audio_max_seconds=60.0))


def test_a_sample_whose_audios_seq_len_would_cut_teaches_nothing_and_is_counted(job: Job) -> None:
    sample = encoded(replace(job, seq_len=20), "short.wav")
    assert not sample.teaches
    assert sample.counts.cut_images == 1


def test_audios_are_shown_as_seconds_and_tokens(job: Job) -> None:
    (source,) = job.train_sources
    pieces = [shown(job, source, encoder(job), sample=number, limit=None).samples[0].pieces for number in (1, 2)]
    texts = ["".join(piece.text for piece in each) for each in pieces]
    assert "[short.wav: 1.20 seconds, 30 tokens]" in texts[0]
    assert "[long.wav: the first 2.00 seconds, 50 tokens]" in texts[1]


def prepared(job: Job) -> Any:
    reads = encoder(job)
    assert isinstance(reads.media_reader, MediaReader)
    return prepare(job, reads.tokenizer, training=True, form=with_media(SEQUENCES, reads.media_reader))


def test_cut_and_broken_audios_are_told(job: Job, folder: Path) -> None:
    data = prepared(job)
    assert data.media == {"audios"}
    assert data.notes[-1].endswith("1 audio is cut at audio_max_seconds (default: what the processor takes)")
    (folder / "broken.wav").write_text("no sound")
    (folder / "broken.jsonl").write_text(f"{json.dumps(row())}\n{json.dumps(row('broken.wav'))}\n")
    with pytest.raises(InvalidConfig, match=r'broken.jsonl:2: audio ".*broken.wav" cannot be read'):
        prepared(replace(job, data=str(folder / "broken.jsonl")))


@pytest.mark.parametrize("key", ["sp", "tp", "ep"])
def test_ranks_that_share_rows_or_weights_are_refused(job: Job, key: str) -> None:
    changes: dict[str, Any] = {key: 2}
    with pytest.raises(InvalidConfig, match=f"{key} is 2, which data with audios do not support"):
        prepared(replace(job, **changes))


@pytest.mark.parametrize("changes", [{"streaming": True}, {"task": Task.DPO}, {"task": Task.KTO}], ids=str)
def test_streams_and_other_tasks_are_refused(changes: dict[str, Any]) -> None:
    asked = Job(model="m", output_dir="o", **changes)
    with pytest.raises(InvalidConfig, match=f"{next(iter(changes))} is .*, which data with audios do not support"):
        require_for_media(asked, ["audios"], packs=True)
    require_for_media(asked, ["images"], packs=True)


def test_other_media_and_two_audios_where_one_is_taken_are_refused(job: Job, folder: Path) -> None:
    with pytest.raises(InvalidConfig, match="here: qwen2_audio does not train on images: it has no vision tower"):
        encoded(job, images=(str(folder / "x.png"),))
    with pytest.raises(InvalidConfig, match="here: the processor rejects its audios: Got 1 text but 2 audios"):
        encoded(replace(job, model=str(folder / "glmasr")), "short.wav", "short.wav")
