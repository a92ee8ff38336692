"""Each proposal in a message is legal and has the effect that its sentence promises: it is typed."""

from __future__ import annotations

import json
import random
import re
import shlex
from pathlib import Path

import pytest

from dstrain.facts.cluster.gpus import GPUS
from dstrain.facts.model.families import known
from tests.cli.conftest import Type

MODELS = [name for name in known() if not name.startswith(("deepseek", "kimi"))]
GIVEN = (
    *("--zero-stage 0", "--zero-stage 2", "--zero-stage 3", "--offload none", "--offload optimizer", "--no-grad-ckpt"),
    *("--micro-batch 4", "--micro-batch 16", "--global-batch 48", "--loss full", "--sp 2", "--ep 2", "--tp 2"),
    *("--hosts gpu[1-2]", "--precision fp16", "--precision bf16", "--attn flash_attention_2", "--packing", "--liger"),
    *("--gpu-memory-limit 10GiB", "--task dpo", "--optimizer adamw_8bit", "--offload nvme", "--hpz 4"),
)
LIKES = {"fits": 0, "does not fit": 4, "refused": 3}


def question(number: int) -> str:
    """Returns a random question, which tends to ask for more than fits."""
    rng = random.Random(number)
    gpu = rng.choice([name for name, row in GPUS.items() if not row.is_cpu])
    words = f"--model {rng.choice(MODELS)} --gpu {gpu} --method {rng.choice(('full', 'full', 'lora', 'qlora'))}"
    given = rng.sample(GIVEN, rng.choice((0, 0, 1, 1, 2)))
    if not any(option.startswith("--hosts") for option in given):
        words += f" --gpus {2 ** rng.randrange(6)}"
    length, memory = rng.choice((None, None, 2048, 32768)), rng.choice((None, None, 64, 256))
    words += f" --seq-len {length}" if length else ""
    words += f" --host-memory {memory}GiB" if memory else ""
    return " ".join([words, *given])


def options_of(words: str) -> dict[str, str]:
    """Returns options by name; a switch has no value."""
    options: dict[str, str] = {}
    for word in shlex.split(words):
        if word.startswith("--"):
            options[word] = ""
        else:
            options[list(options)[-1]] = word
    return options


def changed(asked: str, proposal: str) -> list[str]:
    """Returns a question with the options of a proposal, and without those that it leaves out."""
    added, _, left_out = proposal.partition("without ")
    options = options_of(asked)
    for name in options_of(left_out.replace(" and ", " ")):
        del options[name]
    for name in options_of(added):
        options.pop(f"--no-{name.removeprefix('--')}", None)
    options |= options_of(added)
    return [word for pair in options.items() for word in pair if word]


def proposals(stderr: str) -> list[tuple[str, str]]:
    """Returns the options that an answer proposes, and the plan that they are said to make."""
    _, _, block = stderr.partition("These options fit:\n")
    return [(line[:at], line[at + 2 :]) for line in block.splitlines() for at in [line.rindex(": ")]]


@pytest.mark.parts(144)
@pytest.mark.parametrize("number", range(300))
def test_what_an_answer_proposes_does_what_it_says(dstrain: Type, tmp_path: Path, number: int) -> None:
    asked = question(number)
    done = dstrain("plan", *shlex.split(asked), "-v")
    assert done.returncode in LIKES.values(), done.stderr
    for words, plan in proposals(done.stderr) if done.returncode == 4 else []:
        again = dstrain("plan", *changed(asked, words.strip()), "--top", "1")
        assert again.returncode == 0, f"{asked}\n{words}\n{again.stderr}"
        assert f" {plan}," in " ".join(again.stdout.split()), f"{asked}\n{words}: {plan}\n{again.stdout}"
    if done.returncode == 3:
        for words in re.findall(r"Write (--[a-z-]+ [^ ,.]+)", done.stderr):
            again = dstrain("plan", *changed(asked, words), "--top", "1")
            assert again.stderr.partition("\n")[0] != done.stderr.partition("\n")[0], f"{asked}\n{words}"
            assert again.returncode in (0, 4), f"{asked}\n{words}\n{again.stderr}"
    text = " ".join(done.stdout.split())
    better = re.findall(r"(--liger|(?:--offload none )?--optimizer adamw_8bit)\b", text)
    for words in better if done.returncode == 0 else []:
        again = dstrain("plan", *changed(asked, words), "--top", "1")
        assert again.returncode == 0, f"{asked}\n{words}\n{again.stderr}"
    for line in re.findall(r"^next: dstrain (.*)$", done.stderr, re.MULTILINE):
        again = dstrain(*shlex.split(line), "--dry-run")
        assert again.returncode == 0, f"{line}\n{again.stderr}"


@pytest.mark.engine
def test_a_traced_model_is_not_sent_in_a_circle(dstrain: Type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """LoRA that does not fit proposed QLoRA, which no trace has, and QLoRA answered that LoRA is to be used."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    sizes = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 128}
    config = {"model_type": "gpt_neox", "vocab_size": 500, "max_position_embeddings": 256, **sizes}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    asked = (
        "--model . --gpus 1 --gpu 4090 --gpu-memory-limit 800MiB --host-memory 64GiB --seq-len 128 --micro-batch 256"
    )
    done = dstrain("plan", *shlex.split(asked), "--method", "lora")
    assert done.returncode == 4, done.stderr
    assert "--micro-batch 128" in [words.strip() for words, _ in proposals(done.stderr)]
    assert "qlora" not in done.stderr
    refused = dstrain("plan", *shlex.split(asked), "--method", "qlora")
    assert (refused.returncode, "4-bit weights cannot be planned" in refused.stderr) == (3, True)
    assert "--method" not in refused.stderr
