"""Images in tokens: labels, the cut by seq_len, the micro-batch, and what `dstrain data show` shows."""

import sys
from base64 import b64encode
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from torch.utils.data import DataLoader

from dstrain.choices import LossOn, Task
from dstrain.errors import EnvironmentProblem, InvalidConfig
from dstrain.facts.data.media import opened
from dstrain.facts.data.turns import Conversation
from dstrain.job.schema import Job
from dstrain.monitor.meter import COUNTS, CountingCollator
from dstrain.train.data.collate import Collator
from dstrain.train.data.media import MediaCollator, MediaReader, load_media_reader
from dstrain.train.data.pairs import PAIRS
from dstrain.train.data.prepare import PreparedData, prepare
from dstrain.train.data.rendering import IGNORED
from dstrain.train.data.show import shown
from dstrain.train.data.stream import StreamCollator, StreamProgress
from dstrain.train.data.tokenize import SEQUENCES, Encoder, with_media
from dstrain.train.job_data import streamed
from dstrain.train.tokenizer import load_tokenizer
from tests.train.vision import make_images, make_model, row, rows, write


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("images")
    make_images(found / "images")
    make_model(found / "model")
    return found


@pytest.fixture
def job(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    data = write(folder / "train.jsonl", rows())
    return Job(model=str(folder / "model"), output_dir="o", data=str(data), seq_len=256)


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Any:
    return load_tokenizer(Job(model=str(folder / "model"), output_dir="o"), str(folder / "model"))


def media_reader_of(folder: Path, tokenizer: Any, **options: Any) -> MediaReader:
    job = Job(model=str(folder / "model"), output_dir="o", **options)
    found = load_media_reader(job, job.model, tokenizer)
    assert found is not None
    return found


def encoder(
    folder: Path, tokenizer: Any, *, loss_on: LossOn = LossOn.ANSWER, seq_len: int = 256, **job: Any
) -> Encoder:
    media_reader = media_reader_of(folder, tokenizer, **job)
    return Encoder(tokenizer=tokenizer, seq_len=seq_len, loss_on=loss_on, media_reader=media_reader)


def talk(folder: Path, *names: str) -> Conversation:
    turns = [
        {"role": "user", "content": "This?" + "<image>" * len(names)},
        {"role": "assistant", "content": "red"},
        {"role": "user", "content": "two"},
        {"role": "assistant", "content": "white"},
    ]
    return Conversation(messages=turns, images=tuple(str(folder / "images" / f"{name}.png") for name in names))


def decoded(tokenizer: Any, labels: list[int]) -> str:
    return str(tokenizer.decode([label for label in labels if label != IGNORED]))


def test_only_answers_carry_loss_and_tokens_are_those_of_the_processor(folder: Path, tokenizer: Any) -> None:
    (sample,) = encoder(folder, tokenizer).encode([("here", talk(folder, "red", "white"))])
    assert decoded(tokenizer, sample.labels) == "red<|im_end|>white<|im_end|>"
    image_id = tokenizer.convert_tokens_to_ids("<|image_pad|>")
    assert sample.input_ids.count(image_id) == 2 * 3 + 5 * 3  # 16 × 24 and 40 × 24 pixels, 8 × 8 to a token
    assert [index for index in sample.media_of if index is not None] == [0] * 6 + [1] * 15


def test_tokens_of_images_carry_no_loss_where_all_others_do(folder: Path, tokenizer: Any) -> None:
    (sample,) = encoder(folder, tokenizer, loss_on=LossOn.ALL).encode([("here", talk(folder, "red"))])
    image_id = tokenizer.convert_tokens_to_ids("<|image_pad|>")
    expected = [IGNORED if token == image_id else token for token in sample.input_ids]
    assert sample.labels == expected


def test_max_pixels_makes_an_image_smaller(folder: Path, tokenizer: Any) -> None:
    image_id = tokenizer.convert_tokens_to_ids("<|image_pad|>")
    (sample,) = encoder(folder, tokenizer, max_pixels=16 * 16).encode([("here", talk(folder, "white"))])
    assert sample.input_ids.count(image_id) == 2 * 2  # 20 × 12 pixels, which the processor rounds to 16 × 16


def test_min_pixels_makes_an_image_larger(folder: Path, tokenizer: Any) -> None:
    image_id = tokenizer.convert_tokens_to_ids("<|image_pad|>")
    (sample,) = encoder(folder, tokenizer, min_pixels=32 * 48).encode([("here", talk(folder, "red"))])
    assert sample.input_ids.count(image_id) == 4 * 6  # 16 × 24 pixels, made 32 × 48
    plain, other = (media_reader_of(folder, tokenizer, **options) for options in ({}, {"min_pixels": 9}))
    assert plain.identity != other.identity


def test_a_sample_whose_images_seq_len_would_cut_teaches_nothing_and_is_counted(folder: Path, tokenizer: Any) -> None:
    (sample,) = encoder(folder, tokenizer, seq_len=20).encode([("here", talk(folder, "white"))])
    assert not sample.teaches
    assert sample.counts.cut_images == 1


def test_a_model_without_processor_refuses_images_with_their_place(folder: Path, tokenizer: Any) -> None:
    plain = Encoder(tokenizer=tokenizer, seq_len=256, loss_on=LossOn.ANSWER)
    with pytest.raises(InvalidConfig, match="here: has images, but the model lacks a tower for them and its processor"):
        list(plain.encode([("here", talk(folder, "red"))]))


def prepared(job: Job, folder: Path, tokenizer: Any) -> PreparedData:
    media_reader = media_reader_of(folder, tokenizer)
    return prepare(job, tokenizer, training=True, form=with_media(SEQUENCES, media_reader))


def collator_of(folder: Path, tokenizer: Any, *, packing: bool) -> MediaCollator:
    media_reader = media_reader_of(folder, tokenizer)
    return MediaCollator(
        collator=Collator(pad_token_id=tokenizer.pad_token_id, packing=packing),
        media_reader=media_reader,
        blanks={"images": media_reader.blank_tokens(tokenizer)},
        parameters=frozenset({"mm_token_type_ids"}),
    )


def test_packing_is_refused_where_the_positions_of_images_are_not_known(job: Job, folder: Path, tokenizer: Any) -> None:
    media_reader = replace(media_reader_of(folder, tokenizer), positions=None)
    form = with_media(SEQUENCES, media_reader)
    with pytest.raises(InvalidConfig, match="packing is true, which data with images do not support: in packed rows"):
        prepare(replace(job, packing=True), tokenizer, training=True, form=form)


def test_a_packed_row_has_the_images_of_its_samples_in_order_and_positions_of_each(
    job: Job, folder: Path, tokenizer: Any
) -> None:
    data = prepared(replace(job, packing=True), folder, tokenizer)
    assert data.notes[-2].endswith("packed into 2 rows of 256 tokens, 59.4% filled")
    assert data.notes[-1].endswith("a row has at most 256 tokens of images, each of 8 × 8 pixels")
    packed = [data.dataset[index] for index in range(2)]
    assert sum(len(row["images"]) for row in packed) == 6
    collator = collator_of(folder, tokenizer, packing=True)
    batch = collator(packed)
    text, *rotated = batch["position_ids"]
    sizes = [opened(path).size for row in packed for path in row["images"]]
    assert batch["image_grid_thw"].tolist() == [[1, height // 4, width // 4] for width, height in sizes]
    starts = text == 0
    assert sum(int(starts[index, : len(row["input_ids"])].sum()) for index, row in enumerate(packed)) == 8
    assert all(int(axis[starts].abs().sum()) == 0 for axis in rotated)
    is_image = batch["mm_token_type_ids"] == 1
    for has_image, is_start, axis in zip(is_image, starts, rotated[0], strict=True):
        assert (axis[1:] == axis[:-1])[has_image[1:] & has_image[:-1]].all()  # one instant for an image
        assert (axis[1:] > axis[:-1])[~has_image[1:] & ~is_start[1:]].all()
    assert "attention_mask" not in batch


def test_a_packed_row_without_images_has_a_blank_one_as_a_sample_that_counts_as_padding(
    job: Job, folder: Path, tokenizer: Any
) -> None:
    write(folder / "texts.jsonl", [*rows()[:1], *rows()[5:]])
    data = prepared(replace(job, data=str(folder / "texts.jsonl"), packing=True, seq_len=90), folder, tokenizer)
    row = next(row for row in data.dataset if not row["images"])
    batch = collator_of(folder, tokenizer, packing=True)([row])
    length = len(row["input_ids"])
    tokens, text, labels = batch["input_ids"][0], batch["position_ids"][0, 0], batch["labels"][0]
    assert text[length:].equal(torch.arange(len(text) - length))
    assert batch["image_grid_thw"].tolist() == [[1, 8, 8]]
    image_id = tokenizer.convert_tokens_to_ids("<|image_pad|>")
    assert int((tokens[length:] == image_id).sum()) == int((tokens == image_id).sum()) == 8 * 8 // 4
    assert (labels[length:] == IGNORED).all()
    counts = CountingCollator(lambda rows: batch)([])[COUNTS]
    assert (counts.tokens, counts.padding, counts.samples) == (60, len(text) - 60, (30, 30))


def test_a_batch_without_images_has_a_hidden_blank_one(job: Job, folder: Path, tokenizer: Any) -> None:
    data = prepared(job, folder, tokenizer)
    assert data.media == {"images"}
    collator = collator_of(folder, tokenizer, packing=False)
    texts = [data.dataset[index] for index in (5, 6)]
    batch, image_id = collator(texts), tokenizer.convert_tokens_to_ids("<|image_pad|>")
    assert batch["image_grid_thw"].tolist() == [[1, 8, 8]]
    is_image = batch["input_ids"] == image_id
    assert int(is_image.sum()) == 8 * 8 // 4
    assert batch["mm_token_type_ids"].equal(is_image.long())
    assert batch["attention_mask"].sum(dim=1).tolist() == [len(text["input_ids"]) for text in texts]
    assert not (is_image & (batch["labels"] != IGNORED)).any()
    mixed = collator([data.dataset[4], texts[0]])
    assert mixed["image_grid_thw"].tolist() == [[1, 6, 4], [1, 6, 10]]
    assert mixed["pixel_values"].dtype == torch.float32
    narrow = replace(collator, dtype=torch.bfloat16)([data.dataset[4], texts[0]])
    assert narrow["pixel_values"].equal(mixed["pixel_values"].bfloat16())
    assert narrow["image_grid_thw"].equal(mixed["image_grid_thw"])


def in_row(file: Path, form: str) -> Any:
    content = file.read_bytes()
    if form == "data URL":
        return f"data:image/png;base64,{b64encode(content).decode()}"
    return {"bytes": content, "path": file.name}


@pytest.mark.parametrize("form", ["data URL", "Parquet", "hub"])
def test_images_in_rows_make_the_tokens_and_pixels_of_those_in_files(
    job: Job, folder: Path, tokenizer: Any, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = [{**each, "images": [in_row(folder / name, form) for name in each["images"]]} for each in rows()[3:6]]
    source = folder / "in_rows.jsonl" if form == "data URL" else folder / "in_rows.parquet"
    if form == "data URL":
        write(source, given)
    else:
        datasets.Dataset.from_list(given).to_parquet(source)
    changed = replace(job, data=str(source))
    if form == "hub":
        features = datasets.Dataset.from_list(given).features | {"images": datasets.List(datasets.Image())}
        split = datasets.Dataset.from_list(given, features=datasets.Features(features))
        monkeypatch.setattr(datasets, "load_dataset", lambda _: {"train": split})
        changed = replace(job, data="some/data")
    data, expected = (prepared(each, folder, tokenizer) for each in (changed, job))
    collate = collator_of(folder, tokenizer, packing=False)
    batch, of_files = (
        collate([dataset[start], dataset[start + 1], dataset[start + 2]])
        for dataset, start in ((data.dataset, 0), (expected.dataset, 3))
    )
    assert all(value.equal(of_files[name]) for name, value in batch.items())
    sample = shown(changed, changed.train_sources[0], encoder(folder, tokenizer), sample=1, limit=None).samples[0]
    text = "".join(piece.text for piece in sample.pieces)
    assert f"[{'PNG' if form == 'data URL' else 'image'} in the row: 40 × 24 pixels, 15 tokens]" in text


def test_images_are_shown_as_size_and_tokens(job: Job, folder: Path, tokenizer: Any) -> None:
    (source,) = job.train_sources
    sample = shown(job, source, encoder(folder, tokenizer), sample=5, limit=None).samples[0]
    text = "".join(piece.text for piece in sample.pieces)
    red, white = "[red.png: 16 × 24 pixels, 6 tokens]", "[white.png: 40 × 24 pixels, 15 tokens]"
    assert f"Two: <|vision_start|>{red}<|vision_end|> and <|vision_start|>{white}<|vision_end|>?" in text
    assert [piece.text for piece in sample.pieces if piece.is_learned] == ["red, white", "<|im_end|>"]


def test_a_broken_image_is_named_with_its_line(job: Job, folder: Path, tokenizer: Any) -> None:
    (folder / "images" / "broken.png").write_text("no image")
    data = write(folder / "broken.jsonl", [*rows(), row("<image>", "red", "images/broken.png")])
    broken = Job(model=job.model, output_dir="o", data=str(data), seq_len=256)
    with pytest.raises(InvalidConfig, match=r'broken.jsonl:9: image ".*broken.png" cannot be read'):
        prepared(broken, folder, tokenizer)


class Streaming:
    """A rank that reads a stream in micro-batches of one row."""

    def __init__(self, job: Job, folder: Path, tokenizer: Any) -> None:
        job = replace(job, streaming=True, max_steps=9, shuffle_buffer=4)
        self.data, _ = streamed(job, tokenizer, media_reader_of(folder, tokenizer))
        self.progress = StreamProgress(self.data.dataset, self.data.digest, rank=0, num_ranks=1, workers=0)
        collate = StreamCollator(collator_of(folder, tokenizer, packing=job.packing))
        self._batches = self.progress.noted(DataLoader(self.data.dataset, batch_size=1, collate_fn=collate))

    def batches(self, count: int) -> list[dict[str, Any]]:
        return list(islice(self._batches, count))


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(
        value.equal(other[name]) if isinstance(value, torch.Tensor) else value == other[name]
        for name, value in one.items()
    )


@pytest.mark.parametrize("packing", [False, True])
def test_a_stream_has_the_micro_batches_of_the_cached_path_and_goes_on_at_the_sample(
    job: Job, folder: Path, tokenizer: Any, tmp_path: Path, packing: bool
) -> None:
    job = replace(job, packing=packing, seq_len=60 if packing else 256)  # no two samples with images fit into a row
    rows = prepared(job, folder, tokenizer).dataset
    collate = collator_of(folder, tokenizer, packing=packing)
    cached = [collate([rows[index]]) for index in range(len(rows))]
    whole, cut, again = (Streaming(job, folder, tokenizer) for _ in range(3))
    assert whole.data.media == {"images"}
    every = whole.batches(len(cached))
    if not packing:
        assert all(any(same(batch, one) for one in cached) for batch in every)
    assert sum(len(batch["image_grid_thw"]) for batch in every) >= 6
    sums = [sorted(float(batch["pixel_values"].sum()) for batch in batches) for batches in (every, cached)]
    assert packing or sums[0] == pytest.approx(sums[1])
    first = cut.batches(2)
    cut.progress.save(tmp_path)
    assert again.progress.restore(tmp_path) is None
    assert all(map(same, every, [*first, *again.batches(len(every) - 2)]))
    longest = collate([whole.data.dataset.longest()])
    assert longest["input_ids"].shape[1] == -(-job.seq_len // 8) * 8
    assert len(longest["image_grid_thw"]) >= 1


def test_a_kind_that_no_row_had_before_training_is_refused_in_a_stream(
    job: Job, folder: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dstrain.train.job_data.named_in", lambda row: [])
    with pytest.raises(InvalidConfig, match=r"train.jsonl: byte \d+: has images, which no row has that was"):
        Streaming(job, folder, tokenizer)


def test_pairs_of_texts_need_no_pillow_and_images_say_that_they_do(
    job: Job, folder: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = {"prompt": "What is red?", "chosen": "It is", "rejected": "It is not"}
    job = replace(job, task=Task.DPO, data=str(write(folder / "pairs.jsonl", [pair])))
    expected = prepare(job, tokenizer, training=True, form=PAIRS).dataset[0]["sequences"]
    template = tokenizer.chat_template
    monkeypatch.setattr(tokenizer, "chat_template", None)
    monkeypatch.setitem(sys.modules, "PIL", None)
    form = with_media(PAIRS, media_reader_of(folder, tokenizer))
    assert tokenizer.chat_template == template
    sequences = prepare(job, tokenizer, training=True, form=form).dataset[0]["sequences"]
    assert [side["input_ids"] for side in sequences] == [side["input_ids"] for side in expected]
    seen = replace(job, data=str(write(folder / "seen.jsonl", [pair | {"images": ["images/red.png"]}])))
    with pytest.raises(EnvironmentProblem, match="images need Pillow, which is not installed"):
        prepare(seen, tokenizer, training=True, form=form)
