"""`dstrain run` before anything is launched: what it checks, and what it says."""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.cli.conftest import Type

CONFIG = {
    "model_type": "qwen3",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 128,
    "vocab_size": 512,
    "tie_word_embeddings": True,
    "max_position_embeddings": 512,
    "torch_dtype": "float32",
}
EMPTY_WEIGHTS = (2).to_bytes(8, "little") + b"{}"
SAMPLE = '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n'


@pytest.fixture
def job(dstrain: Type, tmp_path: Path) -> Path:
    """A job for two CPU ranks, as gen-config writes it."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "model" / "model.safetensors").write_bytes(EMPTY_WEIGHTS)
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    (tmp_path / "train.jsonl").write_text(SAMPLE * 10)
    words = ("gen-config", "--gpus", "2", "--gpu", "cpu", "--model", "./model", "--data", "train.jsonl")
    done = dstrain(*words, "--seq-len", "64")
    assert done.returncode == 0, done.stderr
    return tmp_path / "job.yaml"


def change(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def test_dry_run_prints_the_launchers_command_and_writes_nothing(dstrain: Type, job: Path) -> None:
    done = dstrain("run", "--dry-run")
    assert done.returncode == 0, done.stderr
    words = shlex.split(done.stdout)
    assert words[1:4] == ["-P", "-m", "deepspeed.launcher.runner"]
    assert words[-3:] == ["--module", "dstrain.train", str(job.parent / "output")]
    assert "--no_ssh" in words, "this machine"
    assert words[words.index("--hostfile") + 1] == str(job.parent / "output" / "hostfile")
    assert json.loads(dstrain("run", "-n", "--json").stdout)["command"][2] == "-m"
    assert not (job.parent / "output").exists()


@pytest.mark.parametrize("words", [("run", "-n"), ("script", "prepare"), ("data", "show")])
def test_the_cache_of_the_ranks_is_the_one_that_is_looked_at(
    dstrain: Type, job: Path, words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (job.parent / "hf" / "hub" / "models--org--model" / "snapshots").mkdir(parents=True)
    (job.parent / "model").rename(job.parent / "hf" / "hub" / "models--org--model" / "snapshots" / "a")
    change(job, "./model", "org/model")
    done = dstrain(*words)
    assert (done.returncode, '"org/model" is not in the cache' in done.stderr) == (5, True), done.stderr
    change(job, "env: {", f'env: {{"HF_HOME": "{job.parent / "hf"}", ')
    done = dstrain(*words)
    assert '"org/model" is not in the cache' not in done.stderr
    assert (done.returncode == 0) == (words[0] != "data"), done.stderr  # the tokenizer to show rows with is empty


@pytest.mark.parametrize("hosts", [["nodea"], ["nodea", "nodeb"]])
def test_each_of_the_hosts_starts_its_own_ranks(dstrain: Type, job: Path, hosts: list[str]) -> None:
    (job.parent / "hostfile").write_text("".join(f"{host} slots=2\n" for host in hosts))
    change(job, "micro_batch: ", "micro_batch: 1 # ")
    words = shlex.split(dstrain("run", "--dry-run").stdout)
    assert words[words.index("--master_addr") + 1] == "nodea", "a single remote host is not this machine"
    assert words[words.index("--node_rank") + 1] == "0"


@pytest.mark.parametrize(("op", "code"), [("deepspeed_shm_comm", 5), ("cpu_adam", 0)])
def test_a_stale_lock_stops_a_dry_run_if_the_job_needs_its_extension(
    dstrain: Type, job: Path, op: str, code: int
) -> None:
    lock = job.parent / "extensions" / op / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    for path in (lock, lock.parent):
        os.utime(path, (1e9, 1e9))
    done = dstrain("run", "-n", TORCH_EXTENSIONS_DIR=str(lock.parents[1]))
    assert (done.returncode, f"→ rm {lock}" in done.stderr) == (code, code == 5), done.stderr
    assert lock.exists()
    assert dstrain("run", "-n", "--no-doctor", TORCH_EXTENSIONS_DIR=str(lock.parents[1])).returncode == 0


@pytest.mark.parametrize(
    ("settings", "code", "said"),
    [
        (["resume=nowhere"], 3, "--set resume"),
        (["method=lora", "lora.targets=[nope]"], 3, "q_proj"),
        (["hub=modelscope", "data=some/data"], 5, "--set hub: modelscope needs modelscope"),
        (["env.HF_TOKEN=hf_x"], 3, "HF_TOKEN is a secret, and every user can read"),
        (["output_dir=/proc/nowhere"], 5, "/proc/nowhere"),
    ],
)
def test_a_setting_that_cannot_be_is_named(dstrain: Type, job: Path, settings: list[str], code: int, said: str) -> None:
    done = dstrain("run", "-n", *(word for setting in settings for word in ("--set", setting)))
    assert (done.returncode, said in done.stderr) == (code, True), done.stderr
    assert "hf_x" not in done.stderr + done.stdout


def test_a_part_that_the_model_does_not_have_has_its_place(dstrain: Type, job: Path) -> None:
    change(job, "output_dir:", "freeze: [embed, qproj]\noutput_dir:")
    done = dstrain("run", "-n")
    line = job.read_text()[: job.read_text().index("qproj")].count("\n") + 1
    assert (done.returncode, f'job.yaml:{line}:17: DS227: freeze has "qproj"' in done.stderr) == (3, True)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('data: "train.jsonl"', "data: null", "job.yaml:7:1: data is not set"),
        ("learning_rate: ", "learning_rat: ", 'did you mean "learning_rate"?'),
        ("hostfile: hostfile", "hostfile: hosts", "no such file"),
        ("ds_config: ds_config.json", "ds_config: ds.json", "no such file"),
        ('method: "full"', 'method: "qlora"', "bitsandbytes"),
        ("grad_ckpt: ", "optimizer: adamw_8bit\ngrad_ckpt: ", "adamw_8bit needs bitsandbytes"),
        ("sinks: [swanlab]", "sinks: [swanlab]\n  mode: local", "local needs swanboard, which is not installed"),
        ('attn: "auto"', 'attn: "flash_attention_2"', "FlashAttention has no kernels for a CPU"),
        ("grad_ckpt: ", "liger: true\ngrad_ckpt: ", "liger is true, but the ranks train on the CPU: Triton compiles"),
    ],
)
def test_a_mistake_in_the_job_is_named_with_its_line(dstrain: Type, job: Path, old: str, new: str, said: str) -> None:
    change(job, old, new)
    done = dstrain("run", "-n")
    assert done.returncode in (3, 5)
    assert said in done.stderr.replace("\n", " ")


@pytest.mark.parametrize(
    ("version", "said"),
    [
        (None, "--set liger: liger needs liger-kernel, which is not installed"),
        ("0.7.0", "--set liger: liger needs liger-kernel >=0.8.5,<0.9, and 0.7.0 is installed"),
    ],
)
def test_ligers_kernels_need_their_packages(dstrain: Type, job: Path, version: str | None, said: str) -> None:
    if version is None and find_spec("liger_kernel") is not None:
        pytest.skip("liger-kernel is installed")
    site = job.parent / "site"
    for name in ("liger_kernel", "triton") if version else ():
        (site / name).mkdir(parents=True)
        (site / name / "__init__.py").write_text("")
        (site / f"{name}-{version}.dist-info").mkdir()
        (site / f"{name}-{version}.dist-info" / "METADATA").write_text(f"Name: {name}\nVersion: {version}\n")
    path = os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")])
    done = dstrain("run", "-n", "--set", "liger=true", TRITON_INTERPRET="1", PYTHONPATH=path)
    assert (done.returncode, said in done.stderr.replace("\n", " ")) == (5, True), done.stderr
    assert "pip install 'dstrain[kernels]'" in done.stderr


def test_images_that_are_missing_are_named_by_run_and_lint_before_anything_starts(dstrain: Type, job: Path) -> None:
    data = job.parent / "train.jsonl"
    data.write_text(SAMPLE + SAMPLE.replace("]}", '], "images": ["a.png"]}'))
    done = dstrain("run", "-n")
    said = " ".join(done.stderr.split())
    assert (done.returncode, f'{data}:2: image "a.png" does not exist' in said) == (3, True), said
    done = dstrain("lint")
    assert done.returncode == 3
    assert f'job.yaml:7:1: error DS808: data: {data}:2: image "a.png" does not exist' in " ".join(done.stdout.split())


def test_columns_that_nobody_reads_are_noted(dstrain: Type, job: Path) -> None:
    (job.parent / "train.jsonl").write_text(SAMPLE.replace("]}", '], "source": "web"}') * 3)
    assert "train.jsonl: unused columns: source (3 samples)" in dstrain("run", "-n").stderr


@pytest.mark.parametrize("name", ["tokenizer.json", "config.json", "model.safetensors"])
def test_a_file_of_the_model_that_is_missing_is_named(dstrain: Type, job: Path, name: str) -> None:
    (job.parent / "model" / name).unlink()
    done = dstrain("run", "-n")
    assert (done.returncode, f"has no {name.partition('.')[0].replace('model', 'weights')}" in done.stderr) == (
        3,
        True,
    )


def test_a_download_that_broke_off_is_named(dstrain: Type, job: Path) -> None:
    model = job.parent / "model" / "model.safetensors"
    model.write_bytes(EMPTY_WEIGHTS[:-1])
    done = dstrain("run", "-n")
    assert (done.returncode, "not a complete safetensors file" in done.stderr) == (3, True)
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    model.rename(model.with_name("model-00001-of-00002.safetensors")).write_bytes(EMPTY_WEIGHTS)
    model.with_name("model.safetensors.index.json").write_text(json.dumps(index))
    assert "model-00002-of-00002.safetensors missing, listed in" in dstrain("run", "-n").stderr


def test_a_monitor_of_deepspeed_needs_its_package_too(dstrain: Type, job: Path) -> None:
    config = job.parent / "ds_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"comet": {"enabled": True}}))
    done = dstrain("run", "-n")
    assert (done.returncode, "comet needs comet_ml" in done.stderr) == (5, True)
    assert "Traceback" not in done.stderr
    assert not (job.parent / "output").exists()


def test_bad_data_is_named_before_the_launch(dstrain: Type, job: Path) -> None:
    (job.parent / "train.jsonl").write_text(SAMPLE + '{"messages": [\n')
    done = dstrain("run")
    assert (done.returncode, "train.jsonl:2" in done.stderr) == (3, True), done.stderr
    assert not (job.parent / "output").exists()


def test_a_placeholder_host_is_refused_with_its_line(dstrain: Type, job: Path) -> None:
    (job.parent / "hostfile").write_text("gpu01 slots=2\nCHANGE-ME-2 slots=2\n")
    done = dstrain("run")
    assert (done.returncode, "hostfile:2" in done.stderr) == (3, True)


def test_gpus_that_are_not_there_are_refused(dstrain: Type, job: Path) -> None:
    change(job, "env: ", "# env: ")
    done = dstrain("run")
    assert done.returncode == 5
    assert "env.DS_ACCELERATOR=cpu" in done.stderr


def test_checkpoints_of_an_earlier_run_are_exit_6(dstrain: Type, job: Path) -> None:
    (job.parent / "output" / "checkpoint-5").mkdir(parents=True)
    done = dstrain("run", "--dry-run")
    assert (done.returncode, "resume=auto" in done.stderr) == (6, True)


def test_a_port_in_use_is_named(dstrain: Type, job: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        done = dstrain("run", "--master-port", port)
    assert done.returncode == 5
    assert port in done.stderr


def test_a_missing_job_says_how_to_make_one(dstrain: Type) -> None:
    done = dstrain("run")
    assert (done.returncode, "gen-config" in done.stderr) == (3, True)


@pytest.mark.engine
def test_hand_edits_are_on_record_with_the_run(dstrain: Type, job: Path, light_checkout: Path) -> None:
    change(job, "seed: 42", "seed: 7")
    done = dstrain("run", "--set", "max_steps=1", DS_ACCELERATOR="cpu", PYTHONPATH=str(light_checkout))
    assert done.returncode == 0, done.stderr
    assert "attn     sdpa; FlashAttention has no kernels for a CPU" in done.stderr
    assert json.loads((job.parent / "output" / "request.json").read_text())["attn"] == "sdpa"
    assert json.loads((job.parent / "output" / "edits.json").read_text()) == [
        {"file": "job.yaml", "key": "seed", "pointer": ["seed"], "base": 42, "yours": 7}
    ]


def _of(extensions: Path) -> list[str]:
    """Returns the command lines of processes that build in a folder."""
    lines = []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if f"TORCH_EXTENSIONS_DIR={extensions}\0".encode() in (entry / "environ").read_bytes():
                lines.append((entry / "cmdline").read_text().replace("\0", " ").strip())
    return [line for line in lines if line]


def test_a_run_that_is_stopped_while_it_builds_leaves_no_compiler(dstrain: Type, job: Path, tmp_path: Path) -> None:
    compiler, extensions = tmp_path / "slow", tmp_path / "extensions"
    compiler.write_text('#!/bin/sh\ncase "$*" in *"-c "*) sleep 4321 & wait;; *) exec c++ "$@";; esac\n')
    compiler.chmod(0o755)
    environment = {**os.environ, "CXX": str(compiler), "TORCH_EXTENSIONS_DIR": str(extensions)}
    command = [sys.executable, "-P", "-m", "dstrain.cli", "run", "--no-doctor"]
    run = subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True)
    until = time.monotonic() + 300
    while "sleep 4321" not in _of(extensions):
        assert time.monotonic() < until and run.poll() is None, run.communicate()
        time.sleep(0.2)
    run.send_signal(signal.SIGTERM)
    _, said = run.communicate(timeout=100)
    assert (run.returncode, "stopped (SIGTERM); no rank is left running" in said) == (1, True), said
    assert _of(extensions) == []
    assert not list(extensions.glob("*/lock"))


@pytest.fixture
def evil(job: Path) -> Path:
    """A job that came with a module for every Python."""
    (job.parent / "evil").mkdir()
    (job.parent / "evil" / "sitecustomize.py").write_text(f"open({str(job.parent / 'pwned')!r}, 'w')\n")
    job.write_text(job.read_text().replace("env: {", f'env: {{PYTHONPATH: "{job.parent / "evil"}", '))
    return job


VERBS = [
    ("run", "-n"),
    ("doctor", "job.yaml"),
    ("tune", "-n"),
    ("lint",),
    ("script", "accelerate", "-n"),
    *(("script", kind, "-n") for kind in ("slurm", "bash")),
    ("script", "k8s", "--image", "x", "-n"),
    ("script", "prepare"),
    ("data", "show"),
    ("data", "prepare"),
    ("hostfile", "check", "hostfile", "--reach", "--job", "job.yaml"),
]


@pytest.mark.parametrize("words", VERBS, ids=" ".join)
def test_a_job_that_names_code_is_refused_by_every_verb_that_would_use_its_environment(
    dstrain: Type, evil: Path, words: tuple[str, ...]
) -> None:
    (evil.parent / "hostfile").write_text("localhost slots=2\n")
    done = dstrain(*words)
    line = evil.read_text()[: evil.read_text().index("PYTHONPATH")].count("\n") + 1
    assert done.returncode == 3, done.stderr
    assert f"job.yaml:{line}:" in done.stderr
    assert "PYTHONPATH may run code: it names modules that every Python imports" in done.stderr
    assert "--trust-job" in done.stderr
    assert not (evil.parent / "pwned").exists()


def test_a_trusted_job_runs_and_so_does_a_variable_that_was_typed(dstrain: Type, evil: Path) -> None:
    done = dstrain("run", "-n", "--trust-job")
    assert done.returncode == 0, done.stderr
    assert "--trust-job" in dstrain("script", "slurm", "-n", "--nodes", "1", "--gpus", "2", "--trust-job").stdout
    assert dstrain("run", "-n").returncode == 3  # it is trusted once
    evil.write_text(evil.read_text().replace("PYTHONPATH:", "FOO:"))
    assert dstrain("run", "-n", "--set", f"env.PYTHONPATH={evil.parent}").returncode == 0


def test_a_folder_that_came_with_an_environment_file_runs_no_code(dstrain: Type, job: Path) -> None:
    (job.parent / "hostfile").write_text("nodea slots=1\nnodeb slots=1\n")
    (job.parent / ".deepspeed_env").write_text("NCCL_DEBUG=INFO\nLD_PRELOAD=./evil.so\n")
    words = ("run", "-n", "--hostfile", "hostfile", "--no-doctor")
    done = dstrain(*words)
    assert (done.returncode, "LD_PRELOAD may run code" in done.stderr) == (3, True), done.stderr
    assert ".deepspeed_env:2" in done.stderr
    assert dstrain(*words, "--trust-job").returncode == 0
    assert dstrain(*words, HOME=str(job.parent)).returncode == 0  # it is the user's own
