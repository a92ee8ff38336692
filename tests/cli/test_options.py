"""Every value of every option is typed once, as Click's own tables have it: a documented exit code, no traceback."""

from __future__ import annotations

import contextlib
import io
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from click.core import ParameterSource

from dstrain import errors
from dstrain.cli.main import cli, main
from dstrain.cli.types import SIZE, Choice, Named
from dstrain.job.code_variables import TRUSTED

pytestmark = pytest.mark.sweep

CODES = {0, 2} | {each.exit_code for each in vars(errors).values() if hasattr(each, "exit_code")}
ONE = {"--gpus": "2", "--gpu": "4090", "--model": "qwen3-0.6b", "--seq-len": "256", "--zero-stage": "2"}
ONE |= {"--offload": "none", "--micro-batch": "1", "--grad-ckpt": ""}
SCRIPT = {"": ("job.yaml",), "--nodes": "1", "--gpus": "1", "-n": ""}
BASE: dict[str, dict[str, Any]] = {
    "explain": {"": ("gradient_clipping",)},
    "export": {"": ("adapter", "out"), "-n": ""},
    "gen-config": {**ONE, "-n": "", "-o": "new"},
    "import": {"": ("import.yaml",), "--gpus": "2", "--gpu": "4090", "--model": "qwen3-0.6b", "-n": "", "-o": "new"},
    "hostfile write": {"": ("gpu[1-2]:2",), "-n": ""},
    "lint": {"": ("ds_config.json",), "--fix": "", "-n": ""},
    "logs": {"": ("run",)},
    "plan": ONE,
    "report": {"": ("run",)},
    "run": {"-n": "", "--no-doctor": ""},
    **{f"script {name}": SCRIPT for name in ("slurm", "bash")},
    "script accelerate": {"-n": ""},
    "script k8s": {**SCRIPT, "--image": "image"},
    "script prepare": {"": ("job.yaml",)},
    "status": {"": ("run",)},
    "stop": {"": ("run",), "-n": ""},
    "show template": {"-n": "", "--dir": "mine"},
    "tune": {"-n": ""},
}
"""Verb → options that keep it quick and free of effects; arguments are under an empty name."""
PARSED = {("demo", None), ("doctor", None), ("logs", "--follow"), ("hostfile check", "--reach"), ("export", None)}
PARSED |= {("run", "--sync"), ("script prepare", None), ("gen-config", "--on-conflict")}
PARSED |= {("gen-config", "--html"), ("report", "--html"), ("data show", None), ("data prepare", None)}
"""Verbs and options that are parsed and not carried out: they train, ask hosts, or wait."""
ALONE = {"--force", "--on-conflict", "--hostfile", "--hosts", "--from", "--from-file"}
"""Options that replace another of the base."""
OWN: dict[tuple[str, str], dict[str, Any]] = {
    ("gen-config", "--adopt"): {"-n": "", "-o": "new"},
    ("report", "--output"): {"": ("run",), "--calibrate": "", "-n": ""},
    ("report", "--dry-run"): {"": ("run",), "--calibrate": ""},
}
"""Verb and option → the base that goes with this option alone."""
WORDS = {"--set": "seed=7", "--ignore": "DS802", "--pvc": "data:/data", "--host-memory": "64GiB", "--memory": "64GiB"}
WORDS |= {"--hosts": "gpu[01-02]:1", "--nvme": ".", "--data": "train.jsonl", "--eval-data": "train.jsonl"}
WORDS |= {
    "--deepspeed": "0.18.9",
    "--hostfile": "hostfile",
    "--job": "job.yaml",
    "--time": "2h",
    "--spare": "gpu17",
    "--template-dir": "mine",
}
"""Option that takes any word → a legal value."""


def commands() -> Iterator[tuple[str, click.Command]]:
    def walk(name: str, command: click.Command) -> Iterator[tuple[str, click.Command]]:
        if not isinstance(command, click.Group):
            yield name, command
            return
        context = click.Context(command)
        for child in command.list_commands(context):
            inner = command.get_command(context, child)
            assert inner is not None
            yield from walk(f"{name} {child}".strip(), inner)

    return walk("", cli)


def legal(option: click.Option) -> list[str]:
    """Returns the values of an option that Click's table calls legal; one word for an option that takes any."""
    kind = option.type
    if isinstance(kind, Choice):
        return [*kind.choices]
    if isinstance(kind, click.Choice):
        return list(kind.choices)
    if isinstance(kind, Named):
        return [*kind.names()]
    if isinstance(kind, click.IntRange | click.FloatRange):
        ends = ((kind.min, kind.min_open), (kind.max, kind.max_open))
        bounds = [bound for bound, is_open in ends if bound is not None and not is_open]
        return [f"{bound:g}" for bound in dict.fromkeys([*bounds, (kind.min or 0) + 1])]
    if kind is click.INT or kind is click.FLOAT:
        return ["1", "0"]
    name = max(option.opts, key=len)
    default = [option.default] if isinstance(option.default, str) else []
    return [*default, WORDS.get(name, "64GiB" if kind is SIZE else "word")]


def illegal(option: click.Option) -> list[str]:
    """Returns values that the parser must refuse."""
    kind = option.type
    if isinstance(kind, click.IntRange | click.FloatRange):
        ends = ((kind.min, kind.min_open), (kind.max, kind.max_open))
        outside = [bound + step for bound, step in ((kind.min, -1), (kind.max, 1)) if bound is not None]
        outside += [bound for bound, is_open in ends if bound is not None and is_open]
        return [*(f"{bound:g}" for bound in outside), "many"]
    is_closed = isinstance(kind, Choice | click.Choice) or kind in (click.INT, click.FLOAT, SIZE)
    return ["no such thing", ""] if is_closed else []


def typed(name: str, option: click.Option, words: list[str]) -> list[str]:
    """Returns a verb with its base and an option."""
    base = dict(OWN.get((name, max(option.opts, key=len)), BASE.get(name, {})))
    for other in {*option.opts, *option.secondary_opts}:
        base.pop(other, None)
    arguments = list(base.pop("", ()))
    if option.opts[0] in ALONE:
        arguments = arguments if name != "hostfile write" else []
        for machines in ("--gpus", "--gpu") if option.opts[0] in ("--hosts", "--hostfile") else ():
            base.pop(machines, None)
    rest = [word for key, value in base.items() for word in ([key, value] if value else [key])]
    return [*name.split(), *arguments, *rest, *words]


def cases() -> Iterator[tuple[str, click.Option, list[str], bool]]:
    """Yields verb, option, what is typed, and whether the parser takes it; a table that verbs share is tried once."""
    tables: set[str] = set()
    for name, command in commands():
        for option in command.params:
            if not isinstance(option, click.Option):
                continue
            word = max(option.opts, key=len)
            if option.is_flag:
                yield from ((name, option, [flag], True) for flag in (*option.opts, *option.secondary_opts))
                continue
            values = legal(option)[: 1 if word in tables else None]
            tables |= {word} if isinstance(option.type, Named) else set()
            yield from ((name, option, [word, value], True) for value in values)
            yield from ((name, option, [word, value], False) for value in illegal(option))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder with a generated job, its data, a run directory, an adapter, templates and a hostfile."""
    place = tmp_path_factory.mktemp("options")
    with contextlib.chdir(place):
        Path("train.jsonl").write_text('{"text": "a"}\n' * 8, encoding="utf-8")
        Path("new").mkdir()
        Path("run").mkdir()
        Path("adapter").mkdir()
        Path("adapter/adapter_config.json").write_text('{"base_model_name_or_path": "nothing"}', encoding="utf-8")
        lines = ["model_name_or_path: qwen3-0.6b", "stage: sft", "finetuning_type: lora", "dataset: train.jsonl"]
        Path("import.yaml").write_text("\n".join(lines), encoding="utf-8")
        one = [word for key, value in ONE.items() for word in ([key, value] if value else [key])]
        assert type_("gen-config", *one, "--data", "train.jsonl")[0] == 0
        assert type_("show", "template", "--dir", "mine")[0] == 0
    return place


def type_(*words: str) -> tuple[int, str, str]:
    """Returns exit code, stdout and stderr of a command that is typed in this process; a traceback is a failure."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main(list(words))
        except SystemExit as leaving:
            return int(leaving.code or 0), out.getvalue(), err.getvalue()
    raise AssertionError("main always exits")


@pytest.fixture(autouse=True)
def _alone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A folder of the tests' own, a machine without GPUs, no terminal, and no file or trust that outlives a command."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("sys.stdin", io.StringIO())
    # a context that is only parsed, or that ends in a usage error, is never closed
    token = TRUSTED.set(False)
    before = set(folder.iterdir())
    yield
    for made in set(folder.iterdir()) - before:
        shutil.rmtree(made) if made.is_dir() else made.unlink()
    TRUSTED.reset(token)


def _shown(value: object) -> str:
    return " ".join(value) if isinstance(value, list) else value if isinstance(value, str) else ""


@pytest.mark.parts(16)
@pytest.mark.parametrize(("name", "option", "words", "is_legal"), list(cases()), ids=_shown)
def test_every_value_of_every_option_has_a_documented_end(
    name: str, option: click.Option, words: list[str], is_legal: bool
) -> None:
    command = typed(name, option, words)
    if is_legal and PARSED & {(name, None), (name, max(option.opts, key=len))}:
        verb = dict(commands())[name]
        context = verb.make_context(name, command[len(name.split()) :], **cli.context_settings)
        assert context.get_parameter_source(option.name or "") is ParameterSource.COMMANDLINE
        return
    code, _, err = type_(*command)
    assert code in CODES
    assert (code == 2) != is_legal, err
