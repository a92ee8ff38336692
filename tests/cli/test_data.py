"""`dstrain data show`: a sample as the model sees it, with its counts, from the code that trains."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from dstrain.choices import Task
from dstrain.cli.verbs.data import lines
from dstrain.errors import InvalidConfig
from dstrain.facts.data.messages import Piece, ShownData, ShownSample
from dstrain.job.schema import Job
from dstrain.train import demo
from dstrain.train.data.show import shown as shown_data
from dstrain.train.data.tokenize import Encoder
from dstrain.train.tokenizer import load_tokenizer
from tests.cli.conftest import Type

TURNS: list[dict[str, Any]] = [
    {"role": "user", "content": "Two?"},
    {"role": "assistant", "content": "Four.", "weight": 0},
    {"role": "user", "content": "Three?"},
    {"role": "assistant", "content": "Nine, of course."},
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tokenizer = demo.make_tokenizer([turn["content"] for turn in TURNS] + ["user assistant"])
    tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text('{"model_type": "qwen3"}')
    rows = [{"messages": TURNS, "source": "web"}, {"messages": [TURNS[0], {"role": "assistant", "content": ""}]}]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def test_a_job_in_the_place_of_data_is_named(dstrain: Type, folder: Path) -> None:
    done = dstrain("data", "show", "x.yaml", "--model", "model")
    assert done.returncode == 2
    assert "x.yaml is a job, not data; type dstrain data show --job x.yaml --model model" in done.stderr


def test_a_file_is_shown_with_marks_around_what_has_loss(dstrain: Type, folder: Path) -> None:
    done = dstrain("data", "show", "train.jsonl", "--model", "model")
    assert done.returncode == 0, done.stderr
    assert "Four.<|im_end|>" in done.stdout
    assert "assistant\n⟦Nine, of course.<|im_end|>⟧" in done.stdout
    for line in (
        "sample 1, train.jsonl:1 (text between ⟦ and ⟧ has loss)",
        "train.jsonl, all 2 samples",
        "  note       unused columns: source (1 sample)",
    ):
        assert line in done.stdout.splitlines()
    empty = "  note       1 answer is empty: the model learns to say nothing there"
    assert any(line.startswith(empty) and "train.jsonl:2" in line for line in done.stdout.splitlines()), done.stdout


def test_the_data_sets_of_a_job_are_shown_as_it_reads_them(dstrain: Type, folder: Path) -> None:
    (folder / "job.yaml").write_text(
        "model: model\noutput_dir: out\nseq_len: 24\nloss_on: all\n"
        "data: [{path: train.jsonl, max_samples: 1}, {path: 'q*.jsonl', columns: {question: q, answer: a}}]\n"
    )
    (folder / "q.jsonl").write_text('{"q": "Two?", "a": "Nine."}\n')
    done = dstrain("data", "show", "--set", "loss_on=answer", "--json")
    assert done.returncode == 0, done.stderr
    first, second = json.loads(done.stdout)["data"]
    assert (first["num_samples"], first["num_untaught"], first["num_long"]) == (1, 1, 1)
    learned = [piece["text"] for piece in second["samples"][0]["pieces"] if piece["is_learned"]]
    assert learned == ["Nine.", "<|im_end|>"]
    assert second["samples"][0]["num_learned"] == second["num_learned"] > 0


def test_what_is_wrong_with_the_question_or_the_data_is_one_sentence(dstrain: Type, folder: Path) -> None:
    missing = dstrain("data", "show", "train.jsonl")
    assert (missing.returncode, "give --job, or FILE and --model" in missing.stderr) == (2, True)
    few = dstrain("data", "show", "train.jsonl", "--model", "model", "--sample", "3", "--set", "seqlen=3")
    assert few.returncode == 3
    assert 'unknown key "seqlen"; did you mean "seq_len"?' in few.stderr


def test_a_sample_beyond_the_last_is_refused(folder: Path) -> None:
    job = Job(model=str(folder / "model"), output_dir="o", data=str(folder / "train.jsonl"))
    encoder = Encoder(tokenizer=load_tokenizer(job, job.model), seq_len=64, loss_on=job.loss_on)
    with pytest.raises(InvalidConfig, match=r"train\.jsonl has 2 usable samples, none of number 3"):
        shown_data(job, job.train_sources[0], encoder, sample=3, limit=None)
    with pytest.raises(InvalidConfig, match=r"train\.jsonl has 1 usable sample, none of number 3"):
        shown_data(job, replace(job.train_sources[0], max_samples=1), encoder, sample=3, limit=None)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("data: train.jsonl\nval_split: 2\n", "job.yaml:4:1: val_split is 2, which holds out 2 of 2 samples"),
        (
            "data: [train.jsonl, {path: train.jsonl, weight: 1}]\n",
            "train.jsonl has no weight, but other data sets have",
        ),
    ],
)
def test_what_cannot_be_mixed_or_held_out_is_refused_before_it_is_tokenized(
    dstrain: Type, folder: Path, line: str, says: str
) -> None:
    (folder / "job.yaml").write_text(f"model: model\noutput_dir: out\n{line}")
    done = dstrain("data", "prepare", HF_DATASETS_CACHE=str(folder / "cache"))
    assert (done.returncode, done.stdout) == (3, "")
    assert says in done.stderr
    assert not (folder / "cache").exists()


def test_a_model_that_is_neither_here_nor_on_a_hub_that_answers_is_said_at_once(dstrain: Type, folder: Path) -> None:
    (folder / "job.yaml").write_text("model: org/model\noutput_dir: out\ndata: train.jsonl\n")
    variables = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(folder / "hf"), "HF_HUB_OFFLINE": ""}
    for words in (("data", "show"), ("data", "prepare")):
        done = dstrain(*words, **variables)
        assert (done.returncode, done.stdout) == (5, "")
        assert done.stderr.count("\n") == 2
        assert "org/model/resolve/main/config.json: connection failed" in done.stderr
    cached = folder / "hf/hub/models--org--model/snapshots/abc"
    cached.mkdir(parents=True)
    for file in (folder / "model").iterdir():
        (cached / file.name).write_bytes(file.read_bytes())
    (cached.parents[1] / "refs").mkdir()
    (cached.parents[1] / "refs/main").write_text("abc")
    done = dstrain("data", "show", **variables)
    assert done.returncode == 0, done.stderr
    assert done.stderr == "http://127.0.0.1:9 cannot be reached: org/model is read from the cache\n"


def said(folder: Path, file: str, *, sample: int = 1, **settings: Any) -> list[str]:
    """Returns the lines that the command prints about a file when its output is piped."""
    job = Job(model=str(folder / "model"), output_dir="o", data=str(folder / file), **settings)
    encoder = Encoder(tokenizer=load_tokenizer(job, job.model), seq_len=64, loss_on=job.loss_on)
    found = shown_data(job, job.train_sources[0], encoder, sample=sample, limit=None)
    return "\n".join(lines(found, job, in_color=False)).splitlines()


def test_the_marks_of_a_text_are_around_the_tokens_that_are_counted(folder: Path) -> None:
    (folder / "text.jsonl").write_text('{"text": "Nine, of course."}\n')
    shown_lines = said(folder, "text.jsonl", task=Task.PRETRAIN)
    (line,) = [line for line in shown_lines if "⟦" in line and "sample 1" not in line]
    assert not line.startswith("⟦")  # the first token is never predicted


def shown(*pieces: Piece, **more: Any) -> ShownData:
    sample = ShownSample(number=1, place="a.jsonl:1", pieces=pieces, num_tokens=2, num_learned=1, num_cut=0)
    fields: dict[str, Any] = {
        "num_samples": 1,
        "is_complete": False,
        "num_tokens": 2,
        "max_tokens": 2,
        "num_learned": 1,
    }
    fields |= {"num_untaught": 0, "num_long": 0, "counts": {}, "notes": (), **more}
    return ShownData(name="a.jsonl", samples=(sample,), **fields)


def test_on_a_terminal_what_has_loss_is_green_and_a_sample_cannot_change_the_terminal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = Job(model="m", output_dir="o")
    data = shown(
        Piece(text="a\x1b[2J\n", is_learned=False, is_special=False), Piece(text="b", is_learned=True, is_special=True)
    )
    assert lines(data, job, in_color=True)[1] == "a\\x1b[2J\n\x1b[0m\x1b[32m\x1b[1mb\x1b[0m"
    monkeypatch.setenv("NO_COLOR", "1")
    assert lines(data, job, in_color=True)[1] == "a\\x1b[2J\n⟦b⟧"
    assert "a.jsonl, the first 1 sample" in lines(data, job, in_color=True)


def test_both_sides_of_a_pair_are_shown_and_equal_pairs_counted(folder: Path) -> None:
    different = {"prompt": "2 + 2?", "chosen": "4", "rejected": "5"}
    rows = [different, different | {"rejected": "4"}, different | {"rejected": ""}]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    shown_lines = said(folder, "pairs.jsonl", sample=2, task=Task.DPO)
    titles = [line for line in shown_lines if line.startswith("sample ")]
    assert [side in title for side, title in zip(("chosen", "rejected"), titles, strict=True)] == [True, True]
    text = "\n".join(shown_lines)
    for part in (
        "pairs.jsonl:2",
        "pairs.jsonl, all 3 samples",
        "1 pair has equal answers, of which nothing can be learned",
        "1 answer of a pair is empty",
        "dropped    1 sample without a token to learn",
    ):
        assert part in text
