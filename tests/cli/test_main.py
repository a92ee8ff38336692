"""The command itself: its help, and how it ends."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from click.shell_completion import ShellComplete

from dstrain.cli.main import VERBS, cli
from tests.cli.conftest import ROOT, Type


def test_a_short_line_is_answered_as_it_should(dstrain: Type, tmp_path: Path) -> None:
    assert dstrain("-h").stdout == dstrain("--help").stdout
    done = dstrain("gen-conf")
    assert (done.returncode, "gen-config" in done.stderr) == (2, True)
    (tmp_path / "job.yaml").write_text("model: a/b\noutput_dir: o\n" + "\n" * 97 + "typo: 1\n")
    assert "job.yaml:100:1" in dstrain("run").stderr, "a number and no picture"


def test_ctrl_c_is_130(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:  # a hub that never answers
        command = [sys.executable, "-m", "dstrain.cli", "gen-config", "--gpus", "8", "--model", "a/b"]
        port = server.getsockname()[1]
        environment = {**os.environ, "HF_ENDPOINT": f"http://127.0.0.1:{port}", "PYTHONPATH": str(ROOT)}
        heed = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # a background job ignores it
        options: dict[str, Any] = {"stderr": subprocess.PIPE, "text": True, "preexec_fn": heed}
        child = subprocess.Popen(command, cwd=tmp_path, env=environment, **options)
        connection, _ = server.accept()
        child.send_signal(signal.SIGINT)
        _, said = child.communicate(timeout=20)
        connection.close()
    assert (child.returncode, "Traceback" in said) == (130, False)


def test_no_color_means_no_escape_codes(dstrain: Type) -> None:
    done = dstrain("gen-config", "--model", "nope", "--gpus", "1", NO_COLOR="1", FORCE_COLOR="1")
    assert "\x1b[3" not in done.stderr


def test_a_terminal_that_is_not_utf_8_shows_what_it_can(dstrain: Type) -> None:
    done = dstrain("explain", "overlap_comm", PYTHONIOENCODING="ascii")
    assert (done.returncode, "Traceback" in done.stderr) == (0, False)


def test_a_full_disk_is_one_clear_error() -> None:
    with Path("/dev/full").open("w") as full:
        line = [sys.executable, "-m", "dstrain.cli", "show", "schema"]
        done = subprocess.run(
            line,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            timeout=60,
        )
    assert done.returncode == 5
    assert done.stderr.startswith("error: the output cannot be written")
    assert "Traceback" not in done.stderr


PLAN = "plan --model qwen3-8b --gpus 8 --gpu h100"


@pytest.mark.parametrize("words", ["show schema", "run --help", "explain overlap_comm --json", PLAN])
def test_a_reader_that_is_gone_ends_any_command_silently_by_sigpipe(words: str) -> None:
    read, write = os.pipe()
    os.close(read)
    line = [sys.executable, "-m", "dstrain.cli", *words.split()]
    options: dict[str, Any] = {"stdout": write, "stderr": subprocess.PIPE, "text": True, "timeout": 60}
    done = subprocess.run(line, env={**os.environ, "PYTHONPATH": str(ROOT)}, **options)
    os.close(write)
    assert (done.returncode, done.stderr) == (-signal.SIGPIPE, "")


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("plan --model qw", "qwen3-8b"),
        ("gen-config --gpu h", "h100-sxm"),
        ("plan --interconnect ib", "ib400"),
        ("plan --method q", "qlora"),
        ("hostfile write --from sl", "slurm"),
    ],
)
def test_the_tab_key_completes_names(typed: str, offered: str) -> None:
    words = typed.split()
    items = ShellComplete(cli, {}, "dstrain", "_DSTRAIN_COMPLETE").get_completions(words[:-1], words[-1])
    assert offered in [item.value for item in items]
    assert all(item.value.startswith(words[-1]) for item in items)


def test_a_model_that_no_table_has_is_completed_as_a_path() -> None:
    items = ShellComplete(cli, {}, "dstrain", "_DSTRAIN_COMPLETE").get_completions(["plan", "--model"], "./mo")
    assert [item.type for item in items] == ["file"]


@pytest.mark.parametrize("verb", VERBS)
def test_a_verb_is_the_command_of_its_module(verb: str) -> None:
    with cli.make_context("dstrain", [], resilient_parsing=True) as ctx:
        command = cli.get_command(ctx, verb)
    assert command is not None
    assert command.name == verb
    assert len(VERBS[verb]) <= 60
