"""Planned lengths of conversations are those of training, with tools, thoughts and system prompts in real templates."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from dstrain.choices import Hub, LossOn, Thinking
from dstrain.facts.data.datafile import parsed
from dstrain.facts.data.formats import Reading
from dstrain.facts.data.lengths import RENDERED, Lengths, read_lengths
from dstrain.facts.data.rows import Sample, entries
from dstrain.facts.data.turns import Conversation
from dstrain.job.schema import Job
from dstrain.train.data.rendering import measure_of
from dstrain.train.data.tokenize import Encoded, Encoder
from tests.train.data.test_labels import make_tokenizer

READING = Reading(system="You are a helpful assistant of few words.")
NUM_ROWS = 3 * RENDERED
WORDS = ["add", "two", "numbers", "and tell me what", "they are,", "请", "回答", "é", "\U0001f600"]


def text(rng: random.Random, most: int) -> str:
    return " ".join(rng.choices(WORDS, k=1 + int(most * rng.random() ** 3)))


def tool(name: str) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"city": {"type": "string", "description": "A city."}}}
    return {"type": "function", "function": {"name": name, "description": "Weather.", "parameters": parameters}}


def talk(rng: random.Random, *, tools: bool, thoughts: bool) -> dict[str, Any]:
    turns: list[dict[str, Any]] = []
    for _ in range(rng.choice((1, 1, 2, 4))):
        turns.append({"role": "user", "content": text(rng, 80)})
        if tools and rng.random() < 0.6:
            call = {"name": "weather", "arguments": {"city": text(rng, 5)}}
            turns.append(
                {
                    "role": "assistant",
                    "content": "",
                    "tool_calls": [{"type": "function", "id": "abcdefghi", "function": call}],
                }
            )
            turns.append({"role": "tool", "content": text(rng, 30), "tool_call_id": "abcdefghi", "name": "weather"})
        thought = f"<think>\n{text(rng, 100)}\n</think>\n\n" if thoughts and rng.random() < 0.7 else ""
        turns.append({"role": "assistant", "content": thought + text(rng, 150)})
    row: dict[str, Any] = {"messages": turns}
    return row | ({"tools": [tool("weather"), *map(tool, "abc"[: rng.randrange(4)])]} if tools else {})


def planned_and_trained(
    name: str, rows: list[dict[str, Any]], folder: Path, **options: Any
) -> tuple[Lengths, list[Encoded]]:
    tokenizer = make_tokenizer(name)
    tokenizer.save_pretrained(folder / "model")
    data = folder / "train.jsonl"
    data.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    job = Job(model=str(folder / "model"), output_dir="o", **options)
    file = folder / "model" / "tokenizer.json"
    measure = measure_of(job, job.model, Hub.HF, file)
    planned = read_lengths(str(data), READING, file, measure=measure, loss_on=job.loss_on)
    encoder = Encoder(tokenizer=tokenizer, seq_len=2**20, loss_on=job.loss_on, thinking=job.thinking)
    samples = [(row.where, parsed(row, READING)) for row in entries(data, None) if isinstance(row, Sample)]
    return planned, list(encoder.encode((where, one) for where, one in samples if isinstance(one, Conversation)))


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("name", "tools", "thoughts", "options"),
    [
        ("qwen3", True, True, {}),
        ("qwen2.5", True, False, {"loss_on": LossOn.LAST}),
        ("llama-3", False, False, {}),
        ("glm-4.5", False, True, {"thinking": Thinking.LAST}),
        ("gpt-oss", True, True, {}),
        ("deepseek-r1", False, True, {}),
        ("phi-4-mini", False, False, {"loss_on": LossOn.ALL}),
    ],
)
def test_planned_lengths_are_those_of_training(
    name: str, tools: bool, thoughts: bool, options: dict[str, Any], tmp_path: Path
) -> None:
    rng = random.Random(0)
    rows = [talk(rng, tools=tools, thoughts=thoughts) for _ in range(NUM_ROWS)]
    planned, trained = planned_and_trained(name, rows, tmp_path, **options)
    lengths = sorted(len(sample.input_ids) for sample in trained)
    assert (planned.num_samples, len(lengths)) == (NUM_ROWS, NUM_ROWS)
    assert sum(planned.tokens) == pytest.approx(sum(lengths), rel=0.03)
    assert planned.tokens[-1] == pytest.approx(lengths[-1], rel=0.03)
    limit = lengths[3 * NUM_ROWS // 4]
    assert planned.share_longer(limit) == pytest.approx(0.25, abs=0.03)
    learned = sum(sample.num_learned for sample in trained)
    assert planned.target_share == pytest.approx(learned / sum(lengths), abs=0.02)


def test_few_rows_are_rendered_one_by_one(tmp_path: Path) -> None:
    rng = random.Random(1)
    planned, trained = planned_and_trained("qwen3", [talk(rng, tools=True, thoughts=True) for _ in range(40)], tmp_path)
    assert list(planned.tokens) == sorted(len(sample.input_ids) for sample in trained)


def test_a_template_that_marks_answers_itself_gives_the_same_tokens(tmp_path: Path) -> None:
    tagged = (
        "{%- for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}"
        "{{ m.content }}<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}\n{% endfor %}"
    )
    tokenizer = make_tokenizer("qwen3")
    tokenizer.chat_template = tagged
    tokenizer.save_pretrained(tmp_path)
    job = Job(model=str(tmp_path), output_dir="o")
    chat = Conversation(messages=[{"role": "user", "content": "q"}, {"role": "assistant", "content": "answer"}])
    encoder = Encoder(tokenizer=tokenizer, seq_len=4096, loss_on=LossOn.ANSWER)
    measure = measure_of(job, job.model, Hub.HF, tmp_path / "tokenizer.json")
    (trained,) = encoder.encode([("here", chat)])
    assert measure is not None
    assert measure([chat]) == [(len(trained.input_ids), trained.num_learned)]
