"""Videos in tokens: those of Transformers' processor, the limits of the job, packed rows, and what is shown."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import pytest
from PIL import Image
from transformers import AutoModelForImageTextToText

from dstrain.choices import LossOn
from dstrain.errors import InvalidConfig
from dstrain.facts.data.turns import Conversation
from dstrain.job.schema import Job
from dstrain.train.data.collate import Collator
from dstrain.train.data.media import MediaCollator, MediaReader, load_media_reader
from dstrain.train.data.prepare import prepare
from dstrain.train.data.rendering import IGNORED
from dstrain.train.data.show import shown
from dstrain.train.data.tokenize import SEQUENCES, Encoded, Encoder, with_media
from dstrain.train.tokenizer import load_tokenizer
from tests.train.vision import (
    FRAMES,
    make_images,
    make_model,
    make_videos,
    need_videos,
    row,
    sampled,
    video_rows,
    write,
)

QUESTION = "<image>Is <video>this?"
PROMPT = (
    "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>Is <|vision_start|><|video_pad|><|vision_end|>this?"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, need: Callable[[object, str], None]) -> Path:
    need_videos(need)
    found = tmp_path_factory.mktemp("videos")
    make_images(found / "images")
    make_videos(found / "videos")
    make_model(found / "model")
    return found


@pytest.fixture
def job(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    data = write(folder / "train.jsonl", video_rows())
    return Job(model=str(folder / "model"), output_dir="o", data=str(data), seq_len=400, video_fps=2.0)


def encoder(job: Job, *, loss_on: LossOn = LossOn.ANSWER) -> Encoder:
    tokenizer: Any = load_tokenizer(job, job.model)
    media_reader = load_media_reader(job, job.model, tokenizer)
    return Encoder(tokenizer=tokenizer, seq_len=job.seq_len, loss_on=loss_on, media_reader=media_reader)


def encoded(job: Job, folder: Path, *video: str, loss_on: LossOn = LossOn.ANSWER) -> Encoded:
    turns = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": "red"}]
    files = tuple(str(folder / name) for name in video)
    talk = Conversation(messages=turns, images=(str(folder / "images" / "red.png"),), videos=(files,))
    (sample,) = encoder(job, loss_on=loss_on).encode([("here", talk)])
    return sample


@pytest.mark.parametrize("settings", [{}, {"video_fps": 4.0}, {"video_maxlen": 3}, {"video_max_pixels": 500}])
def test_tokens_and_pixels_are_those_of_transformers_processor(
    job: Job, folder: Path, settings: dict[str, Any]
) -> None:
    asked = replace(job, **settings)
    media_reader = encoder(asked).media_reader
    assert media_reader is not None
    reader = media_reader.processor.video_processor
    choose = partial(reader.sample_frames, fps=asked.video_fps)
    frames, metadata = sampled(folder / "videos" / "clip.mp4", choose)
    assert len(frames) == {4.0: 12}.get(asked.video_fps or 0, asked.video_maxlen or 6)
    if asked.video_max_pixels:
        frames = [Image.fromarray(frame).resize((28, 17)) for frame in frames]  # 476 pixels, in their ratio
    expected = media_reader.processor(
        text=[f"{PROMPT}<|im_end|>\n<|im_start|>assistant\nred<|im_end|>\n"],
        images=[Image.open(folder / "images" / "red.png")],
        videos=[frames],
        video_metadata=[metadata],
        do_sample_frames=False,
        return_tensors="pt",
    )
    sample = encoded(asked, folder, "videos/clip.mp4", loss_on=LossOn.ALL)
    assert sample.input_ids == expected["input_ids"][0].tolist()
    made = media_reader.pixels("videos", [sample.videos]) | media_reader.pixels("images", [sample.images])
    assert made.keys() == expected.keys() - {"input_ids", "attention_mask", "mm_token_type_ids"}
    assert all(value.equal(expected[name]) for name, value in made.items())
    learned = [token for token, label in zip(sample.input_ids, sample.labels, strict=True) if label != IGNORED]
    text = media_reader.processor.tokenizer.decode(learned)
    assert "seconds" not in text  # times are the processor's words, not the user's
    assert text.endswith("this?<|im_end|>\n<|im_start|>assistant\nred<|im_end|>\n")


def test_a_list_of_frames_has_the_times_of_the_jobs_frames_per_second(job: Job, folder: Path) -> None:
    texts = [
        encoder(asked).tokenizer.decode(encoded(asked, folder, *FRAMES * 2).input_ids)
        for asked in (job, replace(job, video_fps=1.0), replace(job, video_maxlen=2))
    ]
    found = [[word.partition(" seconds")[0] for word in text.split("<")[1:] if " seconds" in word] for text in texts]
    assert found == [["0.2", "1.2", "2.2"], ["0.5", "2.5", "4.5"], ["1.2"]]  # means of two frames, as Qwen3-VL has them


def collator(media_reader: MediaReader, *, packing: bool) -> MediaCollator:
    tokenizer = media_reader.processor.tokenizer
    return MediaCollator(
        collator=Collator(pad_token_id=tokenizer.pad_token_id, packing=packing),
        media_reader=media_reader,
        blanks={column: media_reader.blank_tokens(tokenizer, column) for column in ("images", "videos")},
        parameters=frozenset({"mm_token_type_ids"}),
    )


def collated(job: Job, *, packing: bool) -> dict[str, Any]:
    asked = replace(job, packing=packing)
    media_reader = encoder(asked).media_reader
    assert media_reader is not None
    data = prepare(asked, media_reader.processor.tokenizer, training=True, form=with_media(SEQUENCES, media_reader))
    assert data.media == {"images", "videos"}
    return collator(media_reader, packing=packing)([data.dataset[index] for index in range(len(data.dataset))])


def test_positions_of_packed_samples_are_those_of_each_alone(job: Job) -> None:
    alone = collated(job, packing=False)
    model = AutoModelForImageTextToText.from_pretrained(job.model).model
    keys = ("image_grid_thw", "video_grid_thw", "mm_token_type_ids", "attention_mask")
    expected, _ = model.get_rope_index(alone["input_ids"], **{key: alone[key] for key in keys})
    samples = {
        tuple(ids[mask.bool()].tolist()): places[:, mask.bool()]
        for ids, mask, places in zip(alone["input_ids"], alone["attention_mask"], expected.unbind(1), strict=True)
    }
    assert len(samples) == 8
    packed = collated(job, packing=True)
    starts = (packed["position_ids"][0] == 0).nonzero().tolist()
    found = 0
    for (line, start), following in zip(starts, [*starts[1:], None], strict=True):
        end = following[1] if following is not None and following[0] == line else packed["input_ids"].shape[1]
        tokens = tuple(packed["input_ids"][line, start:end].tolist())
        if tokens in samples:
            found += 1
            assert packed["position_ids"][1:, line, start:end].equal(samples[tokens])
    assert found == 8


def test_a_batch_without_any_has_a_hidden_blank_image_and_video_if_the_data_have_both(job: Job) -> None:
    media_reader = encoder(job).media_reader
    assert media_reader is not None
    collate = collator(media_reader, packing=False)
    text = {"input_ids": [5, 6, 7], "labels": [5, 6, 7], "images": [], "videos": []}
    batch = collate([text])
    assert int(batch["attention_mask"].sum()) == 3
    assert (batch["labels"][0, 3:] == IGNORED).all()
    for kind, name in ((1, "image"), (2, "video")):
        assert int((batch["mm_token_type_ids"] == kind).sum()) == int(batch[f"{name}_grid_thw"].prod()) // 4
    of_images = replace(collate, blanks={"images": collate.blanks["images"]})
    assert "video_grid_thw" not in of_images([text])


def test_videos_are_shown_as_size_frames_and_tokens(job: Job, folder: Path) -> None:
    (source,) = job.train_sources
    pieces = [shown(job, source, encoder(job), sample=number, limit=None).samples[0].pieces for number in (1, 2, 3)]
    texts = ["".join(piece.text for piece in each) for each in pieces]
    assert "[clip.mp4: 6 of 30 frames of 40 × 24 pixels, " in texts[0]
    assert "[frame0.png …: 3 of 3 frames of 40 × 24 pixels, " in texts[1]
    assert "Two: <|vision_start|>[short.webm: 2 of 5 frames of 40 × 24 pixels, " in texts[2]
    assert "[red.png: 16 × 24 pixels, 6 tokens]" in texts[2]


def test_a_broken_video_is_named_with_its_line_and_one_that_seq_len_cuts_teaches_nothing(
    job: Job, folder: Path
) -> None:
    assert not encoded(replace(job, seq_len=60), folder, "videos/clip.mp4").teaches
    (folder / "videos" / "broken.mp4").write_text("no video")
    data = write(folder / "broken.jsonl", [*video_rows(), {**row("<video>", "red"), "videos": ["videos/broken.mp4"]}])
    broken = replace(job, data=str(data))
    media_reader = encoder(broken).media_reader
    assert media_reader is not None
    with pytest.raises(InvalidConfig, match=r'broken.jsonl:9: video ".*broken.mp4" cannot be read'):
        prepare(broken, media_reader.processor.tokenizer, training=True, form=with_media(SEQUENCES, media_reader))


def test_a_family_that_does_not_train_on_videos_refuses_them(job: Job, folder: Path) -> None:
    reads = encoder(job)
    assert reads.media_reader is not None
    other = replace(reads, media_reader=replace(reads.media_reader, family="gemma3"))
    turns = [{"role": "user", "content": "<video>"}, {"role": "assistant", "content": "red"}]
    talk = Conversation(messages=turns, videos=((str(folder / "videos" / "clip.mp4"),),))
    with pytest.raises(InvalidConfig, match="here: gemma3 does not train on videos; qwen3_5, qwen3_5_moe, qwen3_vl, "):
        list(other.encode([("here", talk)]))
