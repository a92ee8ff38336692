"""What every verb says about a missing hostfile, a GPU that is not in the table, and more slots than GPUs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from nvml import Gpu, Machine

from dstrain.cli.main import main
from dstrain.facts.model import aliases

Said = Callable[..., tuple[int, str]]

JOB = "model: Qwen/Qwen3-0.6B\ndata: train.jsonl\noutput_dir: out\nhostfile: nodes\nmonitor: {sinks: []}\n"
PLANNED = ("--model", "qwen3-0.6b", "--seq-len", "512", "--method", "lora")
HOSTFILE = ("--hostfile", "nodes")


@pytest.fixture
def said(tmp_path: Path, machine: Machine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Said:
    """Returns a function that types a command in a folder with data and says how it ended, with all that it printed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "train.jsonl").write_text('{"instruction": "Hello", "output": "Hello."}\n')

    def type_(*words: str) -> tuple[int, str]:
        with pytest.raises(SystemExit) as ended:
            main(words)
        printed = capsys.readouterr()
        return int(ended.value.code or 0), " ".join((printed.out + printed.err).split())

    return type_


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("gen-config", *PLANNED, *HOSTFILE), 3),
        (("plan", *PLANNED, *HOSTFILE), 3),
        (("lint",), 3),
        (("run", "-n"), 3),
        (("doctor", *HOSTFILE), 3),
        (("doctor", "job.yaml"), 5),
        (("script", "slurm"), 3),
        (("hostfile", "check", "nodes"), 3),
    ],
    ids=lambda words: " ".join(words[:2]) if isinstance(words, tuple) else "",
)
def test_a_missing_hostfile_is_refused_by_every_verb(said: Said, words: tuple[str, ...], code: int) -> None:
    Path("job.yaml").write_text(JOB)
    Path("ds_config.json").write_text("{}")
    ended, text = said(*words)
    assert (ended, "hostfile nodes: no such file" in text, "dstrain hostfile write" in text) == (code, True, True), text


def test_machines_that_are_said_stand_in_for_a_missing_hostfile(said: Said) -> None:
    Path("job.yaml").write_text(JOB)
    assert said("script", "slurm", "--nodes", "2", "--gpus", "16")[0] == 0


@pytest.mark.parametrize("verb", ["gen-config", "plan", "lint", "run", "script"])
def test_a_gpu_that_is_not_in_the_table_is_planned_for_by_every_verb(said: Said, machine: Machine, verb: str) -> None:
    machine(Gpu())
    entry = aliases.resolve("qwen3-0.6b")
    assert entry is not None
    cache = Path(".cache", "huggingface", "hub", "models--Qwen--Qwen3-0.6B")  # `run` looks for the model
    for name, content in (("refs/main", "1"), ("snapshots/1/config.json", json.dumps(dict(entry[1].config)))):
        (cache / name).parent.mkdir(parents=True)
        (cache / name).write_text(content)
    planning = ("gen-config", *PLANNED, "--data", "train.jsonl")
    if verb not in ("gen-config", "plan"):
        assert said(*planning)[0] == 0
    words = {
        "gen-config": planning,
        "plan": ("plan", *PLANNED),
        "run": ("run", "-n", "--no-doctor"),
        "script": ("script", "slurm"),
    }
    ended, text = said(*words.get(verb, (verb,)))
    assert ended == 0, text
    if verb in ("gen-config", "plan"):
        note = "RTX 5070 Plus is not in the table of GPUs: planned as the nearest of its generation, rtx-5070,"
        assert text.count(note) == 1, text


@pytest.mark.parametrize(("verb", "code"), [("gen-config", 0), ("plan", 0), ("lint", 0), ("run", 5)])
def test_more_slots_than_gpus_are_said_alike_by_every_verb(said: Said, machine: Machine, verb: str, code: int) -> None:
    machine(Gpu(), Gpu())
    assert said("gen-config", *PLANNED, "--data", "train.jsonl")[0] == 0
    Path("hostfile").write_text("localhost slots=3\n")
    planning = (verb, *PLANNED, "--hostfile", "hostfile")
    words = {"gen-config": (*planning, "-n"), "plan": planning, "run": ("run", "-n")}
    ended, text = said(*words.get(verb, (verb,)))
    said_alike = "3 slots, but only 2 GPUs" in text, "write slots=2 into the hostfile" in text
    assert (ended, *said_alike) == (code, True, True), text
