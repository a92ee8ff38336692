"""The check of the chat template, on a model that has learned its own from a few conversations."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from dstrain.choices import LossOn
from dstrain.job.schema import Job
from dstrain.monitor.outcomes import Check, CheckName, Preflight
from dstrain.records import load_json
from dstrain.rundir import RunDir
from dstrain.train.data.collate import Collator, shift
from dstrain.train.data.tokenize import Encoder
from dstrain.train.demo import CHAT_TEMPLATE
from dstrain.train.loss import loss_of
from dstrain.train.preflight import samples
from dstrain.train.rank import Rank
from tests.train.engine import Engine
from tests.train.launching import codes, make_run, said

OTHER = (
    "{% for message in messages %}### {{ message['role'] | upper }} says: {{ message['content'] }}\n"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
)
KNOWN = f"<|endoftext|>{CHAT_TEMPLATE}"
"""Another template that it has learned."""


@pytest.fixture(scope="session")
def taught(root: Path, demo: Path) -> Path:
    """The demo's model after some steps on the conversations of a file, in its own template and in another one."""
    folder = root / "taught"
    folder.mkdir()
    lines = (demo / "some.jsonl").read_text().splitlines(keepends=True)
    (folder / "few.jsonl").write_text("".join(sorted(lines, key=len)[:8]))
    tokenizer = AutoTokenizer.from_pretrained(demo / "model")
    model: Any = AutoModelForCausalLM.from_pretrained(demo / "model", dtype=torch.float32)
    job = Job(model="m", data=str(folder / "few.jsonl"), output_dir="o")
    taught: list[dict[str, list[int]]] = []
    for text in (KNOWN, CHAT_TEMPLATE):
        tokenizer.chat_template = text
        encoder = Encoder(tokenizer=tokenizer, seq_len=256, loss_on=LossOn.ANSWER)
        every = encoder.encode(samples._conversations(job))
        taught += [{"input_ids": each.input_ids, "labels": each.labels} for each in every]
    batch = Collator(pad_token_id=0, packing=False)(taught)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for _ in range(40):
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    for each in (model, tokenizer):
        each.save_pretrained(folder / "model")
    return folder


def compared(model: Path, data: Path, chat_template: str | None) -> Check | None:
    """Returns what the check says of a model on one rank."""
    job = Job(model=str(model), data=str(data), output_dir="o", chat_template=chat_template)
    engine = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = chat_template
    trainer: Any = SimpleNamespace(
        job=job,
        rank=Rank(index=0, world_size=1, local_index=0),
        group=None,
        processing_class=tokenizer,
        model_wrapped=engine,
        data_collator=Collator(pad_token_id=0, packing=False),
        trial_size=lambda: 1,
        totals=lambda engine, batch: loss_of(engine(batch["input_ids"]).logits, shift(batch["labels"])),
    )
    return samples.compare_template(trainer, vocab_size=2048)


def test_a_template_that_the_model_does_not_know_is_told_before_the_first_step(
    taught: Path, root: Path, demo: Path, engine: Engine
) -> None:
    files: dict[str, Any] = {"model": str(taught / "model"), "data": str(taught / "few.jsonl"), "chat_template": OTHER}
    run = make_run(root / "other_template", demo, preflight=True, max_steps=1, seq_len=256, **files)
    engine.train(run)
    assert codes(run) == [[0, 0]], said(run)[-3000:]
    (found,) = [each for each in load_json(Preflight, RunDir(run).preflight).checks if each.name is CheckName.TEMPLATE]
    assert not found.passed
    assert found.text.startswith("answers of 8 conversations have a loss of ")
    assert "the model does not know it; remove chat_template from the job, and it trains in its own" in found.text
    assert f"✗ chat template: {found.text}" in said(run)


def test_a_template_that_the_model_knows_passes(taught: Path) -> None:
    found = compared(taught / "model", taught / "few.jsonl", KNOWN)
    assert found is not None
    assert found.passed, found.text
    assert "knows neither" not in found.text


def test_a_model_that_has_learned_nothing_knows_neither(taught: Path, demo: Path) -> None:
    found = compared(demo / "model", taught / "few.jsonl", OTHER)
    assert found is not None
    assert found.passed
    assert found.text.endswith("the model knows neither")


def test_the_models_own_template_is_not_compared(taught: Path) -> None:
    assert compared(taught / "model", taught / "few.jsonl", CHAT_TEMPLATE) is None
    assert not samples.has_choice(Job(model="m", data="d", output_dir="o"))
