"""Lengths that are sampled with the tokenizer alone are those of training."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from dstrain.choices import DataFormat, LossOn
from dstrain.errors import InvalidConfig
from dstrain.facts.data.datafile import parsed
from dstrain.facts.data.formats import PLAIN, Reading
from dstrain.facts.data.lengths import SAMPLED_ROWS, read_lengths
from dstrain.facts.data.rows import Sample, entries, spread
from dstrain.facts.data.turns import Conversation


@pytest.mark.commands
def test_lengths_are_those_of_training(made_demo: Path) -> None:
    from transformers import AutoTokenizer

    from dstrain.train.data.tokenize import Encoder

    encoder = Encoder(tokenizer=AutoTokenizer.from_pretrained(made_demo / "model"), seq_len=4096, loss_on=LossOn.ANSWER)
    data = made_demo / "train.jsonl"
    rows = [row for row in entries(data, None) if isinstance(row, Sample)][:300]
    samples = [(row.where, sample) for row in rows if isinstance(sample := parsed(row, PLAIN), Conversation)]
    exact = sorted(len(encoded.input_ids) for encoded in encoder.encode(samples))
    assert len(exact) == 300
    few = made_demo.parent / "few_lengths.jsonl"
    few.write_text("".join(json.dumps(row.row) + "\n" for row in rows))
    sampled = read_lengths(str(few), PLAIN, made_demo / "model" / "tokenizer.json")
    assert sampled.num_samples == 300
    assert sum(sampled.tokens) == pytest.approx(sum(exact), rel=0.03)
    assert sampled.at(0.95) == pytest.approx(exact[284], rel=0.05)


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    """Splits a text into words."""
    words = Tokenizer(models.WordLevel({"?": 0, "one": 1, "two": 2, "add": 3}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(str(tmp_path / "words.json"))
    return tmp_path / "words.json"


def pairs(count: int) -> list[dict[str, str]]:
    rng = random.Random(0)
    return [{"instruction": "add", "output": "one two " * rng.choice((1, 3, 90))} for _ in range(count)]


def test_a_large_file_is_sampled_in_even_distances_and_its_rows_are_counted(tokenizer: Path, tmp_path: Path) -> None:
    rows = pairs(120_000)
    large = tmp_path / "large.jsonl"
    large.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert large.stat().st_size > 32 * 2**20
    lengths = read_lengths(str(large), PLAIN, tokenizer)
    assert (len(lengths.tokens), lengths.num_samples) == (SAMPLED_ROWS, len(rows))
    assert lengths.share_longer(100) == pytest.approx(1 / 3, abs=0.04)  # long lines are not drawn more often


def test_parquet_is_sampled_from_all_its_row_groups(tokenizer: Path, tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    rows = [{"instruction": "add", "output": "one " * (1 + number // 1000)} for number in range(20_000)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet", row_group_size=1000)
    lengths = read_lengths(str(tmp_path / "a.parquet"), PLAIN, tokenizer)
    assert lengths.num_samples == len(rows)
    assert lengths.tokens[0] < 0.6 * lengths.tokens[-1]


def test_a_list_a_pair_and_a_glob_have_lengths(tokenizer: Path, tmp_path: Path) -> None:
    (tmp_path / "list.json").write_text(json.dumps(pairs(5000)))
    of_list = read_lengths(str(tmp_path / "list.json"), PLAIN, tokenizer)
    assert (len(of_list.tokens), of_list.num_samples, of_list.estimate) == (2500, 5000, None)
    pair = {"prompt": "add", "chosen": "one", "rejected": "one two three four five six"}
    (tmp_path / "pair.jsonl").write_text(json.dumps(pair) + "\n")
    swapped = pair | {"chosen": pair["rejected"], "rejected": pair["chosen"]}
    (tmp_path / "riap.jsonl").write_text(json.dumps(swapped) + "\n")
    both = read_lengths(str(tmp_path / "*.jsonl"), Reading(format=DataFormat.PREFERENCE), tokenizer)
    assert both.num_samples == 2
    assert both.tokens[0] == both.tokens[1]


def test_unusable_rows_are_left_out_and_a_file_of_them_is_refused(tokenizer: Path, tmp_path: Path) -> None:
    data = tmp_path / "a.jsonl"
    data.write_text(json.dumps(pairs(1)[0]) + '\n{"instruction": "add"}\nnot JSON\n')
    assert len(read_lengths(str(data), PLAIN, tokenizer).tokens) == 1
    data.write_text('{"instruction": 3, "output": 4}\n')
    with pytest.raises(InvalidConfig, match="none of 1 sampled rows is usable"):
        read_lengths(str(data), PLAIN, tokenizer)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(InvalidConfig, match="cannot be read as a tokenizer"):
        read_lengths(str(data), PLAIN, tmp_path / "tokenizer.json")


def test_small_files_are_spread_over(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("".join(f'{{"text": "{number}"}}\n' for number in range(100)))
    rows = [row.row["text"] for row in spread(tmp_path / "a.jsonl", 10)[0] if isinstance(row, Sample)]
    assert rows == [str(number) for number in range(0, 100, 10)]


@pytest.mark.parametrize("kind", ["image", "video"])
def test_data_with_images_have_lengths_once_their_tokens_are_given(tmp_path: Path, tokenizer: Path, kind: str) -> None:
    (tmp_path / "a.png").write_bytes(b"")
    data, plain = tmp_path / "train.jsonl", tmp_path / "plain.jsonl"
    row = {"instruction": f"<{kind}><{kind}>What?", "output": "b"}
    data.write_text(f"{json.dumps(row | {f'{kind}s': ['a.png'] * 2})}\n{json.dumps(row | {'instruction': 'What?'})}\n")
    plain.write_text(json.dumps(row | {"instruction": "What?"}))
    with pytest.raises(InvalidConfig, match=f"has {kind}s, whose tokens the model's processor counts; --image-patches"):
        read_lengths(str(data), PLAIN, tokenizer)
    found, text = (read_lengths(str(file), PLAIN, tokenizer, image_tokens=256) for file in (data, plain))
    assert found.tokens == (*text.tokens, text.tokens[0] + 256 + 2 * 2)
    assert found.has_media
    assert not text.has_media
    assert found.target_share < text.target_share
