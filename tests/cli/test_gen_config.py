"""`dstrain gen-config`: what it writes, what it prints, and what it refuses."""

from __future__ import annotations

import json
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Type = Callable[..., Any]
PLAN = ("gen-config", "--gpus", "16", "--model", "qwen3-32b")


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_it_writes_four_files(dstrain: Type, tmp_path: Path) -> None:
    assert dstrain(*PLAN).returncode == 0
    assert files(tmp_path) == {"ds_config.json", "job.yaml", "hostfile", ".dstrain/lock.json"}


def test_the_first_line_of_next_names_the_placeholders(dstrain: Type) -> None:
    assert "next 1: put the names of your nodes into hostfile" in dstrain(*PLAN).stderr


def test_talk_goes_to_stderr_and_nothing_to_stdout(dstrain: Type) -> None:
    done = dstrain(*PLAN)
    assert done.stdout == ""
    assert "ZeRO-3" in done.stderr


def test_no_line_is_wider_than_80_columns_when_piped(dstrain: Type) -> None:
    assert max(map(len, dstrain(*PLAN).stderr.splitlines())) <= 80


def test_an_assumed_gpu_is_said_to_be_assumed(dstrain: Type) -> None:
    assert "assumed: GPUs of type a100-80g" in dstrain(*PLAN).stderr


def test_dry_run_prints_the_configuration_and_writes_nothing(dstrain: Type, tmp_path: Path) -> None:
    done = dstrain(*PLAN, "--dry-run")
    assert json.loads(done.stdout)["zero_optimization"]["stage"] == 3
    assert files(tmp_path) == set()


def test_json_holds_the_plan_with_parts_that_sum_up(dstrain: Type) -> None:
    found = json.loads(dstrain(*PLAN, "--json", "--dry-run").stdout)
    memory = found["plans"][found["chosen"]]["memory"]
    assert sum(memory["breakdown_bytes"].values()) == memory["device_bytes_per_gpu"]
    assert found["model"]["num_params"] == 32_762_123_264
    assert json.loads(found["files"]["ds_config.json"])["zero_optimization"]["stage"] == 3


def test_json_embeds_the_document_of_plan(dstrain: Type) -> None:
    found = json.loads(dstrain(*PLAN, "--json", "--dry-run").stdout)
    planned = json.loads(dstrain("plan", *PLAN[1:], "--json").stdout)
    assert set(found) - set(planned) == {"notes", "files"}
    assert set(planned) <= set(found)
    assert {*planned["plans"][0]} == {*found["plans"][0]}


def test_json_lists_what_else_would_fit_and_how_it_stands_to_the_choice(dstrain: Type) -> None:
    found = json.loads(dstrain(*PLAN, "--json", "--dry-run").stdout)
    assert len(found["plans"]) > 1
    assert all("plan 1" in each["reasons"][0] for each in found["plans"][1:])
    assert found["considered"]["estimated"] + found["considered"]["excluded_by_bound"] > 50


def test_only_what_it_can_write_is_chosen(dstrain: Type) -> None:
    found = json.loads(dstrain(*PLAN, "--json", "--dry-run").stdout)
    assert {(each["sp"], each["tp"]) for each in found["plans"]} == {(1, 1)}
    assert all(each["zero_stage"] > 0 for each in found["plans"])


def test_diff_shows_what_would_change_and_writes_nothing(dstrain: Type, tmp_path: Path) -> None:
    dstrain(*PLAN)
    before = (tmp_path / "job.yaml").read_text()
    done = dstrain(*PLAN, "--seq-len", "2048", "--diff")
    assert "-seq_len: 4096\n+seq_len: 2048\n" in done.stdout
    assert (tmp_path / "job.yaml").read_text() == before


def test_running_it_twice_changes_nothing(dstrain: Type) -> None:
    dstrain(*PLAN)
    assert "nothing changed" in dstrain(*PLAN).stderr


def test_an_edited_file_is_kept_and_the_exit_code_is_6(dstrain: Type, tmp_path: Path) -> None:
    dstrain(*PLAN)
    edited = (tmp_path / "ds_config.json").read_text().replace("true", "false", 1)
    (tmp_path / "ds_config.json").write_text(edited)
    done = dstrain(*PLAN, "--seq-len", "2048")
    assert done.returncode == 6
    assert "mv ds_config.json ds_config.json.mine" in done.stderr
    assert (tmp_path / "ds_config.json").read_text() == edited
    assert "seq_len: 4096" in (tmp_path / "job.yaml").read_text()


def test_a_files_mode_is_kept(dstrain: Type, tmp_path: Path) -> None:
    dstrain(*PLAN)
    (tmp_path / "job.yaml").chmod(0o640)
    dstrain(*PLAN, "--seq-len", "2048")
    assert stat.S_IMODE((tmp_path / "job.yaml").stat().st_mode) == 0o640


def test_hosts_are_written_to_the_hostfile(dstrain: Type, tmp_path: Path) -> None:
    dstrain(*PLAN, "--hosts", "gpu[01-02]")
    assert (tmp_path / "hostfile").read_text() == "gpu01 slots=8\ngpu02 slots=8\n"


def test_data_is_named_relative_to_the_job(dstrain: Type, tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text('{"text": "a"}\n')
    dstrain(*PLAN, "--data", "train.jsonl", "-o", "runs")
    assert f'data: "{tmp_path}/train.jsonl"' in (tmp_path / "runs" / "job.yaml").read_text()
    dstrain(*PLAN, "--data", "train.jsonl")
    assert 'data: "train.jsonl"' in (tmp_path / "job.yaml").read_text()


def test_a_users_own_hostfile_in_the_same_folder_is_left_alone(dstrain: Type, tmp_path: Path) -> None:
    text = "# ours\ngpu01 slots=8\ngpu02 slots=8\n"
    (tmp_path / "hostfile").write_text(text)
    assert dstrain(*PLAN, "--hostfile", "hostfile").returncode == 0
    assert (tmp_path / "hostfile").read_text() == text


def test_json_with_diff_is_one_document(dstrain: Type) -> None:
    assert "+seq_len: 4096" in json.loads(dstrain(*PLAN, "--json", "--diff").stdout)["diff"]


def test_the_lock_keeps_what_was_typed_and_the_machines(dstrain: Type, tmp_path: Path) -> None:
    dstrain(*PLAN)
    lock = json.loads((tmp_path / ".dstrain" / "lock.json").read_text())
    assert lock["inputs"] == {"model": "qwen3-32b", "gpus": 16}
    assert lock["cluster"]["gpu"]["name"] == "a100-80g"


def test_data_that_does_not_exist_yet_is_named_where_it_will_be(dstrain: Type, tmp_path: Path) -> None:
    dstrain(*PLAN, "--data", "later.jsonl", "-o", "runs")
    assert f'data: "{tmp_path}/later.jsonl"' in (tmp_path / "runs" / "job.yaml").read_text()


def test_a_template_that_makes_another_zero_is_refused(dstrain: Type, tmp_path: Path) -> None:
    dstrain("templates", "eject", "zero3.json.j2", "--dir", "mine")
    partial = tmp_path / "mine" / "_zero3.json.j2"
    partial.write_text(partial.read_text().replace('"stage": 3', '"stage": 0'))
    done = dstrain(*PLAN, "--template-dir", "mine")
    assert (done.returncode, "makes ZeRO-0" in done.stderr) == (3, True)
    assert not (tmp_path / "job.yaml").exists()


@pytest.mark.parametrize("text", ["{{ 1/0 }}", "{{ moe_block_class.x }}", "{% if %}", "{"])
def test_a_broken_template_is_named_without_a_traceback(dstrain: Type, tmp_path: Path, text: str) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "zero3.json.j2").write_text(text)
    done = dstrain(*PLAN, "--template-dir", "mine")
    assert (done.returncode, "zero3.json.j2" in done.stderr, "Traceback" in done.stderr) == (3, True, False)


def test_a_folder_without_templates_is_refused(dstrain: Type, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    assert dstrain(*PLAN, "--template-dir", "mine").returncode == 3


def test_named_hosts_share_the_gpus(dstrain: Type, tmp_path: Path) -> None:
    dstrain("gen-config", "--gpus", "8", "--model", "qwen3-8b", "--hosts", "a,b")
    assert (tmp_path / "hostfile").read_text() == "a slots=4\nb slots=4\n"


def test_the_template_of_a_folder_is_used(dstrain: Type, tmp_path: Path) -> None:
    dstrain("templates", "eject", "zero3.json.j2", "--dir", "mine")
    template = tmp_path / "mine" / "zero3.json.j2"
    template.write_text(
        template.read_text().replace('"zero_optimization"', '"dump_state": true,\n  "zero_optimization"')
    )
    assert json.loads(dstrain(*PLAN, "--template-dir", "mine", "-n").stdout)["dump_state"] is True


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("--gpus", "16", "--model", "qwen33-32b"), 3, 'Did you mean "qwen3-32b"?'),
        (("--gpus", "16", "--model", "qwen3-32b", "--gpu", "h1000"), 3, 'Did you mean "h100'),
        (("--gpus", "0", "--model", "qwen3-32b"), 3, "--gpus is 0"),
        (("--gpus", "8", "--model", "qwen3-8b", "--seq-len", "-5"), 3, "--seq-len is -5"),
        (("--gpus", "12", "--gpus-per-node", "8", "--model", "qwen3-8b"), 3, "--gpus 8"),
        (("--gpus", "16", "--model", "qwen3-8b", "--hosts", "a"), 3, "16"),
        (("--gpus", "8", "--model", "broken.json"), 3, "broken.json:1:"),
        (("--gpus", "8", "--model", "qwen3-8b", "-o", "/proc/nowhere"), 5, "cannot be written"),
        (("--gpus", "8", "--model", "qwen3-8b", "--method", "lara"), 2, "did you mean lora?"),
        (("--gpus", "8", "--model", "llama-3.1-405b"), 4, "What would fit"),
        (("--gpus", "8", "--model", "qwen3-8b", "--hostfile", "none"), 3, "none"),
        (("--gpus", "8", "--model", "org/unknown"), 5, "Name a local folder"),
    ],
)
def test_bad_input_gets_one_message_and_no_file(
    dstrain: Type, tmp_path: Path, words: tuple[str, ...], code: int, said: str
) -> None:
    (tmp_path / "broken.json").write_text('{"model_type": ')
    done = dstrain("gen-config", *words, HF_ENDPOINT="http://127.0.0.1:9")
    assert done.returncode == code, done.stderr
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert files(tmp_path) == {"broken.json"}
