import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from dstrain.choices import DataFormat, Task
from dstrain.facts.data.datafile import check, samples
from dstrain.facts.data.formats import PLAIN
from dstrain.train import demo
from dstrain.train.demo import ROWS, conversation, loss_without_pictures

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("demo")
    command = [sys.executable, "-m", "dstrain.train.demo", str(folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    return {"folder": folder, **json.loads(done.stdout)}


def test_says_what_it_made_in_one_line(built: dict[str, Any]) -> None:
    assert built["train_samples"] > 2000
    assert built["eval_samples"] == demo.EVAL_SAMPLES
    assert 0.5e6 < built["params"] < 4e6
    assert 5 < built["loss_to_beat"] < math.log(built["vocab_size"])


@pytest.mark.parametrize(("task", "form"), [(Task.SFT, DataFormat.MESSAGES), (Task.PRETRAIN, DataFormat.TEXT)])
def test_rows_have_the_form_of_their_task(task: Task, form: DataFormat, tmp_path: Path) -> None:
    assert set(ROWS) == set(Task)
    rows = list(ROWS[task]([conversation("def f():", "What it does.")]))
    assert check(demo.write_rows(tmp_path / "rows.jsonl", rows), PLAIN).format == form
    assert task is not Task.PRETRAIN or rows == [{"text": 'def f():\n    """What it does."""'}]


def test_data_pass_the_check(built: dict[str, Any]) -> None:
    for part in ("train", "eval"):
        found = check(built[part], PLAIN)
        assert (found.format, found.rows_checked) == (DataFormat.MESSAGES, built[f"{part}_samples"])


def test_no_sample_is_there_twice(built: dict[str, Any]) -> None:
    rows = [sample.row["messages"] for part in ("train", "eval") for sample in samples(built[part])]
    for turn in (0, 1):
        assert len({row[turn]["content"] for row in rows}) == len(rows)


def test_model_and_tokenizer_load(built: dict[str, Any]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(built["model"])
    model = AutoModelForCausalLM.from_pretrained(built["model"])
    assert model.num_parameters() == built["params"]
    assert (tokenizer.pad_token, tokenizer.eos_token) == ("<|endoftext|>", "<|im_end|>")
    assert model.config.pad_token_id == tokenizer.pad_token_id
    text = "def f(x: int) -> None:\n    naïve \U0001f600"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_pairs_have_the_words_from_last_to_first_as_rejected_answer(tmp_path: Path) -> None:
    made = demo.build(tmp_path, task=Task.DPO)
    pairs = [json.loads(line) for line in Path(made.eval).read_text().splitlines()]
    assert len(pairs) == made.eval_samples
    for pair in pairs:
        (chosen,), (rejected,) = pair["chosen"], pair["rejected"]
        assert chosen["content"].split() == rejected["content"].split()[::-1]


def test_with_experts_it_is_a_mixture_of_about_as_many_active_parameters(built: dict[str, Any]) -> None:
    sparse: Any = demo.make_model(AutoTokenizer.from_pretrained(built["model"]), num_experts=8)
    assert sparse.config.num_experts == 8
    experts = sum(weight.numel() for name, weight in sparse.named_parameters() if ".experts." in name)
    assert 0.8 < (sparse.num_parameters() - experts * 6 / 8) / built["params"] < 1.2


def test_untrained_model_knows_nothing(built: dict[str, Any]) -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(built["model"])
    model = AutoModelForCausalLM.from_pretrained(built["model"])
    turns = next(samples(built["eval"])).row["messages"]
    ids = tokenizer.apply_chat_template(turns, return_tensors="pt")["input_ids"]
    loss = model(ids, labels=ids).loss.item()
    assert loss > built["loss_to_beat"]


def test_same_python_gives_the_same_bytes(built: dict[str, Any], made_demo: Path) -> None:
    for path in sorted(path for path in made_demo.rglob("*") if path.is_file()):
        assert path.read_bytes() == (built["folder"] / path.relative_to(made_demo)).read_bytes(), path.name


def test_model_leaves_other_random_numbers_alone() -> None:
    class Tokens:
        pad_token_id, eos_token_id = 0, 2

        def __len__(self) -> int:
            return 64

    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    demo.make_model(Tokens())
    assert torch.equal(torch.rand(3), expected)


def test_entropy_of_equally_frequent_tokens_is_the_log_of_their_number() -> None:
    assert demo.unigram_entropy([{"labels": [-100, *range(8)]}]) == pytest.approx(math.log(8))


def test_no_question_about_a_picture_tells_its_answer(tmp_path: Path) -> None:
    made = demo.build_pictures(tmp_path)
    found = check(made.train, PLAIN)
    assert (found.rows_checked, found.media) == (made.train_samples, ("images",))
    rows = [sample.row for sample in samples(made.train)]
    answers: dict[str, set[str]] = {question: set() for question in demo.QUESTIONS}
    for row in rows:
        question, answer = (turn["content"] for turn in row["messages"])
        answers[question].add(answer)
    assert [len(given) for given in answers.values()] == [18, 6, 3]
    guessed = sum(math.log(len(given)) for given in answers.values())  # all answers are about as frequent
    tokens = 4 + 2 + 2  # with ends of turn
    assert made.loss_to_beat == pytest.approx(guessed / tokens, rel=0.12)


def test_a_model_that_knows_the_questions_alone_has_the_loss_without_pictures() -> None:
    class Words:
        eos_token_id = 0

        def __call__(self, text: str, **_: object) -> dict[str, list[int]]:
            return {"input_ids": [1] * len(text.split())}

    asked = [("Color?", "red"), ("Color?", "blue"), ("Shape?", "a circle"), ("Shape?", "a circle")]
    rows = [{"messages": [{"content": question}, {"content": answer}]} for question, answer in asked]
    assert loss_without_pictures(rows, Words()) == pytest.approx(2 * math.log(2) / (2 + 2 + 3 + 3))
