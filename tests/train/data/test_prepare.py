import json
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import pytest

from dstrain.choices import Hub, LossOn, OnBadRow, OnLongSample, StoppingStrategy, Thinking
from dstrain.errors import EnvironmentProblem, InvalidConfig
from dstrain.job.data_source import DataSource
from dstrain.job.schema import Job
from dstrain.train import demo
from dstrain.train.data import sources
from dstrain.train.data.prepare import PreparedData, prepare
from dstrain.train.data.sources import from_hub

TALK = [
    {"role": "user", "content": "What is 2 + 2?"},
    {"role": "assistant", "content": "<think>\nAdd them.\n</think>\n\nFour, of\n  course. \U0001f600"},
    {"role": "user", "content": "And 3 + 3?"},
    {"role": "assistant", "content": "Six."},
]

THINKING = """\
{%- set last = namespace(user=0) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set last.user = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
{%- if m.role == 'assistant' %}
{%- set words = m.content.split('</think>')[-1].lstrip('\\n') %}
{{- '<|im_start|>assistant\\n' }}
{%- if loop.index0 > last.user %}{{- '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{{- words + '<|im_end|>\\n' }}
{%- else %}{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"""
"""As Qwen3's: thoughts of earlier answers are left out, the last answer gets empty ones."""

BRACKETS = """\
{%- for m in messages %}{% if m.role == 'user' %}{{- '[INST] ' + m.content + ' [/INST]' }}
{%- else %}{{- ' ' + m.content + '<|im_end|>' }}{% endif %}{% endfor %}"""
"""As Llama 2's: no words that prompt the answer."""

COUNTED = "{{- messages | length }}{% for m in messages %}{{- m.content }}{% endfor %}"
"""Nothing that it writes stays when a turn is added."""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", folder)
    return folder


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return demo.make_tokenizer([turn["content"] for turn in TALK] + ["user assistant system"])


def prepared(tmp_path: Path, tokenizer: Any, rows: list[dict[str, Any]], **options: Any) -> PreparedData:
    path = tmp_path / "train.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return prepare(Job(model="m", output_dir="o", data=str(path), **options), tokenizer, training=True)


def test_tokens_are_those_of_the_chat_template(tmp_path: Path, tokenizer: Any) -> None:
    sample = prepared(tmp_path, tokenizer, [{"messages": TALK}]).dataset[0]
    assert sample["input_ids"] == tokenizer.apply_chat_template(TALK)["input_ids"]
    assert sample["length"] == len(sample["input_ids"])


def test_tokenizer_without_offsets_gives_the_same_labels(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    fast = prepared(tmp_path, tokenizer, [{"messages": TALK}]).dataset[0]
    monkeypatch.setattr(type(tokenizer), "is_fast", False)
    assert prepared(tmp_path, tokenizer, [{"messages": TALK}]).dataset[0] == fast


def test_template_that_cannot_be_followed_is_refused(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer, "chat_template", COUNTED)
    with pytest.raises(InvalidConfig, match=r"train\.jsonl:1: the chat template writes no end of turn after an answer"):
        prepared(tmp_path, tokenizer, [{"messages": TALK}])
    everything = prepared(tmp_path, tokenizer, [{"messages": TALK}], loss_on=LossOn.ALL)
    assert everything.dataset[0]["labels"] == everything.dataset[0]["input_ids"]


def test_rows_that_cannot_be_used_are_skipped_and_named(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    fussy = demo.CHAT_TEMPLATE + "{% if 'bad' in messages[0].content %}{{ raise_exception('no, please') }}{% endif %}"
    monkeypatch.setattr(tokenizer, "chat_template", fussy)
    good: dict[str, Any] = {"instruction": "a", "output": "b"}
    rows = [good, {"instruction": "a", "output": 3}, {"instruction": "bad", "output": "b"}, good]
    with pytest.raises(InvalidConfig, match=r'train\.jsonl:2: "output" is 3'):
        prepared(tmp_path, tokenizer, rows)
    with pytest.raises(InvalidConfig, match=r"train\.jsonl:1: .*no, please"):
        prepared(tmp_path, tokenizer, rows[2:])
    found = prepared(tmp_path, tokenizer, rows, on_bad_row=OnBadRow.SKIP)
    assert found.num_samples == 2
    assert "2 unusable rows were skipped (on_bad_row: skip); the first:" in found.notes[1]
    assert re.fullmatch(r'  .*train\.jsonl:2: "output" is 3; it must be a string', found.notes[2])
    assert re.fullmatch(r"  .*train\.jsonl:3: the chat template rejects .*: no, please", found.notes[3])
    with pytest.raises(InvalidConfig, match=r"of 0 samples none (.|\n)*train\.jsonl:2"):
        prepared(tmp_path, tokenizer, rows[2:3] + rows[1:2], on_bad_row=OnBadRow.SKIP)


def test_lines_that_are_no_rows_are_skipped_too(tmp_path: Path, tokenizer: Any) -> None:
    path = tmp_path / "train.jsonl"
    path.write_text('nonsense\n{"text": "Six."}\n[1]\n')
    job = Job(model="m", output_dir="o", data=str(path), on_bad_row=OnBadRow.SKIP)
    found = prepare(job, tokenizer, training=True)
    assert found.num_samples == 1
    assert "2 unusable rows were skipped" in found.notes[1]


def test_empty_answers_and_lost_or_empty_thoughts_are_counted(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer, "chat_template", THINKING)
    empty = [{"role": "user", "content": "Six?"}, {"role": "assistant", "content": ""}]
    rows = [{"messages": TALK}, {"messages": empty}]
    assert [note.split(": ", 1)[1] for note in prepared(tmp_path, tokenizer, rows).notes[1:]] == [
        f"1 answer is empty: the model learns to say nothing there; the first: {tmp_path / 'train.jsonl'}:2",
        "2 answers begin with an empty block of thoughts (thinking: off makes it part of the prompt)",
    ]
    assert [
        note.split(": ", 1)[1] for note in prepared(tmp_path, tokenizer, rows, thinking=Thinking.LAST).notes[1:]
    ] == [
        f"1 answer is empty: the model learns to say nothing there; the first: {tmp_path / 'train.jsonl'}:2",
        "1 answer is trained without thoughts (thinking: last)",
        "2 answers begin with an empty block of thoughts (thinking: off makes it part of the prompt)",
    ]


def test_text_that_is_rendered_already_is_counted_with_its_first_line(tmp_path: Path, tokenizer: Any) -> None:
    rendered = {"instruction": "<|im_start|>user\nQ<|im_end|>", "output": "A"}
    foreign = {"instruction": "Q", "output": "A [/INST]"}
    found = prepared(tmp_path, tokenizer, [{"instruction": "<|im|>", "output": "A"}, rendered, foreign])
    note = "2 conversations have control tokens of a chat template in their own text: rendered already?"
    assert f"{tmp_path / 'train.jsonl'}: {note}; the first: {tmp_path / 'train.jsonl'}:2" in found.notes


def test_text_that_the_tokenizer_rejects_is_named_or_skipped(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode = type(tokenizer)._encode_plus

    def choosy(self: Any, text: Any, *args: Any, **options: Any) -> Any:
        if any("bad" in one for one in ([text] if isinstance(text, str) else text)):
            raise TypeError("TextInputSequence must be str")
        return encode(self, text, *args, **options)

    monkeypatch.setattr(tokenizer, "__class__", type("Choosy", (type(tokenizer),), {"_encode_plus": choosy}))
    for rows in ([{"text": "a"}, {"text": "bad"}, {"text": "c"}], [{"messages": TALK}, alpaca("bad"), alpaca("c")]):
        with pytest.raises(InvalidConfig, match=r"train.jsonl:2: the tokenizer rejects this text: TypeError"):
            prepared(tmp_path, tokenizer, rows)
        assert len(prepared(tmp_path, tokenizer, rows, on_bad_row=OnBadRow.SKIP).dataset) == 2


def alpaca(answer: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": answer}]}


@pytest.mark.parametrize("loss_on", list(LossOn))
def test_system_prompt_that_the_template_leaves_out_is_counted(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch, loss_on: LossOn
) -> None:
    without = "{%- set messages = messages | rejectattr('role', 'equalto', 'system') | list %}"
    monkeypatch.setattr(tokenizer, "chat_template", without + BRACKETS)
    notes = prepared(
        tmp_path, tokenizer, [{"messages": [{"role": "system", "content": "Brief!"}, *TALK]}], loss_on=loss_on
    ).notes
    assert notes[1].endswith("1 system prompt is omitted by the chat template")


def test_tokenizer_without_chat_template_is_refused(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer, "chat_template", None)
    with pytest.raises(InvalidConfig, match="has no chat template"):
        prepared(tmp_path, tokenizer, [{"messages": TALK}])


def test_text_ends_with_the_end_token_and_counts_whole(tmp_path: Path, tokenizer: Any) -> None:
    sample = prepared(tmp_path, tokenizer, [{"text": "Six, of course."}]).dataset[0]
    assert sample["labels"] == sample["input_ids"]
    assert tokenizer.decode(sample["input_ids"]) == "Six, of course.<|im_end|>"


def test_long_samples_are_cut_and_those_without_answer_left_out(tmp_path: Path, tokenizer: Any) -> None:
    def row(question: str, answer: str) -> dict[str, str]:
        return {"instruction": question, "output": answer}

    rows = [row("a", "b"), row("a " * 100, "b"), row("c", "d " * 100), row("e", "f")]
    found = prepared(tmp_path, tokenizer, rows, seq_len=48)
    assert found.num_samples == 3
    assert found.notes[1].endswith("longer than seq_len 48 and truncated: 2 samples (50.0%)")
    assert found.notes[2].endswith("without a token to learn and dropped: 1 sample")
    assert [len(ids) for ids in found.dataset["input_ids"]] == list(found.dataset["length"])
    assert found.num_tokens == sum(found.dataset["length"])
    assert max(found.dataset["length"]) == 48
    assert [tokenizer.decode(sample["input_ids"])[17:18] for sample in found.dataset] == ["a", "c", "e"]


def test_data_without_any_answer_are_refused(tmp_path: Path, tokenizer: Any) -> None:
    with pytest.raises(InvalidConfig, match=r"of 1 sample none has a token of an answer among its first 4"):
        prepared(tmp_path, tokenizer, [{"messages": TALK}], seq_len=4)


def test_packed_rows_hold_all_samples_and_their_labels(tmp_path: Path, tokenizer: Any) -> None:
    rows = [{"messages": TALK[2:] + TALK[2:] * (n % 3)} for n in range(50)]
    plain = prepared(tmp_path, tokenizer, rows, seq_len=256)
    found = prepared(tmp_path, tokenizer, rows, seq_len=256, packing=True)
    assert found.num_tokens == plain.num_tokens == sum(len(row["input_ids"]) for row in found.dataset)
    assert len(found.dataset) < 50
    assert sum(label != -100 for row in found.dataset for label in row["labels"]) == sum(
        label != -100 for sample in plain.dataset for label in sample["labels"]
    )
    assert sum(position == 0 for row in found.dataset for position in row["position_ids"]) == 50
    assert f"packed into {len(found.dataset)} rows of 256 tokens" in found.notes[-1]


def test_second_rank_reads_what_the_first_tokenized(tmp_path: Path, tokenizer: Any, cache: Path) -> None:
    first = prepared(tmp_path, tokenizer, [{"messages": TALK}])
    written = {path: path.stat().st_mtime_ns for path in cache.rglob("*.arrow")}
    path = str(tmp_path / "train.jsonl")
    second = prepare(Job(model="m", output_dir="o", data=path), tokenizer, training=True)
    assert second.dataset[0] == first.dataset[0]
    assert {path: path.stat().st_mtime_ns for path in cache.rglob("*.arrow")} == written
    longer = prepare(Job(model="m", output_dir="o", data=path, seq_len=30), tokenizer, training=True)
    assert len(longer.dataset[0]["input_ids"]) == 30


def words(tmp_path: Path, name: str, count: int) -> str:
    """Writes a data set of different texts, and returns its path."""
    path = tmp_path / f"{name}.jsonl"
    path.write_text("".join(json.dumps({"text": f"{name} {number}"}) + "\n" for number in range(count)))
    return str(path)


def texts(found: PreparedData, tokenizer: Any) -> list[str]:
    return [tokenizer.decode(sample["input_ids"], skip_special_tokens=True) for sample in found.dataset]


def test_data_sets_are_mixed_by_weight_and_the_log_has_their_counts(tmp_path: Path, tokenizer: Any) -> None:
    large, small = words(tmp_path, "x", 40), words(tmp_path, "y", 10)
    sources = (DataSource(path=large, weight=3.0), DataSource(path=small, weight=1.0))
    job = Job(model="m", output_dir="o", data=sources)
    found = prepare(job, tokenizer, training=True)
    names = [text[0] for text in texts(found, tokenizer)]
    assert (names.count("x"), names.count("y"), found.num_samples) == (30, 10, 40)
    assert f"  {large}: 30 from 40 samples (75.0%, weight 3)" in found.notes
    assert found.digest == prepare(job, tokenizer, training=True).digest
    again = prepare(replace(job, seed=7), tokenizer, training=True)
    assert texts(again, tokenizer) != texts(found, tokenizer)
    assert again.digest != found.digest
    repeated = prepare(replace(job, stopping_strategy=StoppingStrategy.ALL_EXHAUSTED), tokenizer, training=True)
    counts = Counter(texts(repeated, tokenizer))
    assert {text: count for text, count in counts.items() if text[0] == "x"} == {f"x {n}": 1 for n in range(40)}
    assert sorted(count for text, count in counts.items() if text[0] == "y") == [1] * 7 + [2] * 3


def test_a_list_without_weights_is_all_samples_and_a_glob_is_one_data_set(tmp_path: Path, tokenizer: Any) -> None:
    paths = (words(tmp_path, "x", 4), words(tmp_path, "y", 3))
    found = prepare(Job(model="m", output_dir="o", data=paths), tokenizer, training=True)
    assert texts(found, tokenizer) == [*(f"x {n}" for n in range(4)), *(f"y {n}" for n in range(3))]
    glob = prepare(Job(model="m", output_dir="o", data=f"{tmp_path}/*.jsonl"), tokenizer, training=True)
    assert texts(glob, tokenizer) == texts(found, tokenizer)
    assert glob.digest == found.digest
    first = prepare(Job(model="m", output_dir="o", data=paths, max_samples=2), tokenizer, training=True)
    assert texts(first, tokenizer) == ["x 0", "x 1", "y 0", "y 1"]


@pytest.mark.parametrize("packing", [False, True])
def test_held_out_samples_are_those_that_training_lacks(tmp_path: Path, tokenizer: Any, packing: bool) -> None:
    paths = (words(tmp_path, "x", 30), words(tmp_path, "y", 10))
    job = Job(model="m", output_dir="o", data=paths, val_split=0.1, packing=packing, seq_len=24)
    train, evaluation = (prepare(job, tokenizer, training=training) for training in (True, False))
    assert (train.num_samples, evaluation.num_samples) == (36, 4)
    assert evaluation.notes[0] == "val_split 0.1: 4 samples for evaluation"
    if not packing:
        held_out = texts(evaluation, tokenizer)
        assert sorted(text[0] for text in held_out) == ["x", "x", "x", "y"]
        assert set(held_out) | set(texts(train, tokenizer)) == {
            *(f"x {n}" for n in range(30)),
            *(f"y {n}" for n in range(10)),
        }
    with pytest.raises(InvalidConfig, match="val_split is 40, which holds out 40 of 40 samples"):
        prepare(replace(job, val_split=40.0), tokenizer, training=True)


def test_rows_of_a_hub_are_counted_before_they_are_tokenized(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = datasets.Dataset.from_dict({"text": ["a", "b"]})
    monkeypatch.setattr(sources, "from_hub", lambda source, hub, **_: (source.path, rows))
    monkeypatch.setattr("dstrain.train.data.prepare.tokenized", lambda *_: pytest.fail("it tokenizes"))
    job = Job(model="m", output_dir="o", data="some/data", val_split=2.0)
    with pytest.raises(InvalidConfig, match="val_split is 2, which holds out 2 of 2 samples"):
        prepare(job, tokenizer, training=True)


def test_only_some_weights_are_refused(tmp_path: Path, tokenizer: Any) -> None:
    sources = (DataSource(path=words(tmp_path, "x", 1), weight=1.0), DataSource(path=words(tmp_path, "y", 1)))
    with pytest.raises(InvalidConfig, match=r"y\.jsonl has no weight, but other data sets have"):
        prepare(Job(model="m", output_dir="o", data=sources), tokenizer, training=True)


def test_another_data_set_leaves_the_tokens_of_the_first_in_the_cache(
    tmp_path: Path, tokenizer: Any, cache: Path
) -> None:
    paths = (words(tmp_path, "x", 2), words(tmp_path, "y", 2))
    prepare(Job(model="m", output_dir="o", data=paths[0]), tokenizer, training=True)
    written = {path: path.stat().st_mtime_ns for path in cache.rglob("*.arrow")}
    prepare(Job(model="m", output_dir="o", data=paths), tokenizer, training=True)
    now = {path: path.stat().st_mtime_ns for path in cache.rglob("*.arrow")}
    assert now.items() > written.items()
    assert len(now) == 2


def test_long_samples_are_dropped_if_the_job_says_so(tmp_path: Path, tokenizer: Any) -> None:
    rows = [{"text": "Six."}, {"text": "Six. " * 50}]
    found = prepared(tmp_path, tokenizer, rows, seq_len=16, on_long_sample=OnLongSample.DROP)
    assert found.num_samples == 1
    assert found.notes[1].endswith("longer than seq_len 16 and dropped (on_long_sample): 1 sample (50.0%)")


def test_answers_that_seq_len_cuts_in_the_middle_are_counted(tmp_path: Path, tokenizer: Any) -> None:
    rows = [{"instruction": "a", "output": "d " * 100}, {"instruction": "a", "output": "d"}]
    notes = prepared(tmp_path, tokenizer, rows, seq_len=48).notes
    assert notes[-1].endswith("1 answer is cut in the middle by seq_len: the model does not learn to end such answers")
    assert re.search(r"\d+ \(\d+\.\d%\) with loss$", notes[0])


def test_a_split_is_of_the_hub_only(tmp_path: Path, tokenizer: Any) -> None:
    source = DataSource(path=words(tmp_path, "x", 1), split="train")
    with pytest.raises(InvalidConfig, match=r"x\.jsonl is a file, which has no split or subset"):
        prepare(Job(model="m", output_dir="o", data=source), tokenizer, training=True)


def test_changed_file_is_tokenized_again(tmp_path: Path, tokenizer: Any) -> None:
    assert prepared(tmp_path, tokenizer, [{"text": "Six."}]).num_samples == 1
    assert prepared(tmp_path, tokenizer, [{"text": "Six."}, {"text": "Four."}]).num_samples == 2


def test_progress_of_tokenizing_is_reported(tmp_path: Path, tokenizer: Any) -> None:
    path = tmp_path / "train.jsonl"
    path.write_text('{"text": "Six."}\n' * 3)
    counts: list[tuple[str, int, int]] = []
    job = Job(model="m", output_dir="o", data=str(path))
    prepare(job, tokenizer, training=True, report=lambda *count: counts.append(count))
    assert counts == [(str(path), 0, 3), (str(path), 3, 3)]


def test_what_nobody_reads_is_named_with_its_count_each_time(tmp_path: Path, tokenizer: Any) -> None:
    rows: list[dict[str, Any]] = [
        {"text": "Six.", "source": "web", "id": 7},
        {"text": "Six.", "source": "web", "id": None},
    ]
    for _ in range(2):  # the second time from the cache
        notes = prepared(tmp_path, tokenizer, rows).notes
        assert notes[-1].endswith("train.jsonl: unused columns: source (2 samples), id (1 sample)")


def splits(*names: str) -> datasets.DatasetDict:
    return datasets.DatasetDict({name: datasets.Dataset.from_dict({"text": [name]}) for name in names})


@pytest.mark.parametrize(
    ("names", "training", "split"),
    [
        (["test", "train"], True, "train"),
        (["test", "train", "validation"], False, "validation"),
        (["test", "train"], False, "test"),
        (["default"], True, "default"),
    ],
)
def test_hub_split_fits_the_purpose(
    monkeypatch: pytest.MonkeyPatch, names: list[str], training: bool, split: str
) -> None:
    monkeypatch.setattr(datasets, "load_dataset", lambda _: splits(*names))
    name, dataset = from_hub(DataSource(path="some/data"), Hub.HF, training=training)
    assert (name, dataset[0]["text"]) == (f"some/data ({split})", split)


def test_a_named_split_and_subset_are_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*names: str, split: str) -> datasets.Dataset:
        return datasets.Dataset.from_dict({"text": [f"{' '.join(names)} {split}"]})

    monkeypatch.setattr(datasets, "load_dataset", load)
    source = DataSource(path="some/data", subset="en", split="train[:5%]")
    name, dataset = from_hub(source, Hub.HF, training=True)
    assert (name, dataset[0]["text"]) == ("some/data (train[:5%])", "some/data en train[:5%]")


def test_training_split_is_not_evaluated_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets, "load_dataset", lambda _: splits("train"))
    with pytest.raises(InvalidConfig, match="has no split to evaluate on"):
        from_hub(DataSource(path="some/data"), Hub.HF, training=False)


def test_hub_rows_are_counted_in_messages(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    turns = {"messages": [TALK, TALK[:1]]}
    hub = datasets.DatasetDict({"train": datasets.Dataset.from_dict(turns)})
    monkeypatch.setattr(datasets, "load_dataset", lambda _: hub)
    with pytest.raises(InvalidConfig, match=r'some/data \(train\): row 2: "messages" ends with the user'):
        prepare(Job(model="m", output_dir="o", data="some/data"), tokenizer, training=True)


def test_unreachable_hub_is_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(_: str) -> None:
        raise ConnectionError("no route")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    with pytest.raises(EnvironmentProblem, match="no route"):
        from_hub(DataSource(path="some/data"), Hub.HF, training=True)


def test_absent_modelscope_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "modelscope", None)
    with pytest.raises(EnvironmentProblem) as caught:
        from_hub(DataSource(path="some/data"), Hub.MODELSCOPE, training=True)
    assert caught.value.hint == 'pip install "modelscope[datasets]"'
