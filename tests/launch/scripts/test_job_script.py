"""Job scripts for schedulers and shells: what they say, what they refuse, and how they behave when they run."""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dstrain.errors import InvalidConfig
from dstrain.job.file import read_job
from dstrain.launch.scripts import job_script
from dstrain.launch.scripts.job_script import (
    Batch,
    ScriptContext,
    bash,
    describe,
    directive,
    directive_path,
    parse_time,
)

ASKED = ScriptContext(
    job=Path("/shared/qwen/job.yaml"),
    run_dir=Path("/shared/qwen/output"),
    name="qwen",
    nodes=2,
    gpus=8,
    hosts=("gpu01", "gpu02"),
    python="/opt/dstrain/bin/python",
    overrides=("seed=7",),
    secrets=("HF_TOKEN", "SWANLAB_API_KEY"),
    exports={"NCCL_DEBUG": "WARN"},
    job_env={"NCCL_DEBUG": "WARN"},
)
BATCH = Batch(time_s=43200, partition="gpu", account="nlp", qos="high", reservation="dl", memory_bytes=2**39)
SCRIPTS: Mapping[str, Callable[[ScriptContext], str]] = {
    "slurm.sbatch": lambda asked: job_script.slurm(asked, BATCH),
    "bash.sh": bash,
}
RECORDER = """\
#!/bin/bash
# Stands for Python: writes the words of its command line.
printf '%s\\0' "$@" --- >>"$0.typed"
"""


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """A program in place of Python."""
    program = tmp_path / "bin" / "python"
    program.parent.mkdir()
    program.write_text(RECORDER)
    program.chmod(0o755)
    return program


def typed(program: Path) -> list[list[str]]:
    """Returns the words of each call of the program."""
    words = Path(f"{program}.typed").read_bytes().decode().split("\0")[:-1]
    calls: list[list[str]] = [[]]
    for word in words:
        if word == "---":
            calls.append([])
        else:
            calls[-1].append(word)
    return calls[:-1]


def asked_in(folder: Path, python: Path) -> ScriptContext:
    return replace(ASKED, job=folder / "job.yaml", run_dir=folder / "out", python=str(python))


# What they say


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_is_the_one_on_record(name: str, golden: Callable[[str, str], None]) -> None:
    golden(f"script/{name}", SCRIPTS[name](ASKED))


@pytest.mark.parametrize("name", SCRIPTS)
@pytest.mark.parametrize("asked", [ASKED, replace(ASKED, nodes=1, hosts=(), secrets=(), overrides=(), exports={})])
def test_a_script_is_bash(name: str, asked: ScriptContext) -> None:
    done = subprocess.run(["bash", "-n"], input=SCRIPTS[name](asked), text=True, capture_output=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_days_are_slurms_own() -> None:
    assert "#SBATCH --time=1-12:00:00\n" in job_script.slurm(ASKED, Batch(time_s=129600))


@pytest.mark.parametrize("text", ["", "24", "-1h", "1 h", "5m", "1:00", "24:00:61", "1e3s", "99999999h"])
def test_a_time_that_is_none_is_told(text: str) -> None:
    with pytest.raises(InvalidConfig, match="--time"):
        parse_time(text)


# What they refuse


@given(st.text())
def test_a_directive_is_safe_or_refused(value: str) -> None:
    try:
        assert shlex.quote(directive("--partition", value)) == value
        assert not value.startswith("-")
    except InvalidConfig as error:
        assert "--partition" in error.problem


@given(st.text().map(lambda name: f"/{name}"))
def test_the_path_of_a_directive_is_safe_or_refused(value: str) -> None:
    try:
        assert shlex.quote(directive_path("output_dir", Path(value))) == str(Path(value))
    except InvalidConfig as error:
        assert "output_dir" in error.problem


@pytest.mark.parametrize(
    ("asked", "batch", "said"),
    [
        (replace(ASKED, name="a b"), Batch(time_s=3600), '--name is "a b"'),
        (ASKED, Batch(time_s=3600, partition="gpu; id"), '--partition is "gpu; id"'),
        (ASKED, Batch(time_s=3600, account="a\n#SBATCH --uid=0"), "--account is"),
        (replace(ASKED, run_dir=Path("/my runs/%j")), Batch(time_s=3600), "output_dir is"),
    ],
)
def test_what_a_scheduler_could_misread_is_refused(asked: ScriptContext, batch: Batch, said: str) -> None:
    with pytest.raises(InvalidConfig, match=said):
        job_script.slurm(asked, batch)


def test_nodes_without_names_cannot_be_started_by_hand() -> None:
    with pytest.raises(InvalidConfig, match="names of the 2 nodes"):
        bash(replace(ASKED, hosts=()))


# What they are filled with


def described(folder: Path, hostfile: str = "", **words: object) -> ScriptContext:
    """Returns what the scripts of a small job are filled with."""
    (folder / "hostfile").write_text(hostfile)
    (folder / "job.yaml").write_text(
        f"model: a/b\noutput_dir: output\n{'hostfile: hostfile' if hostfile else ''}\n"
        "env: {NCCL_DEBUG: WARN, WANDB_API_KEY: in-the-job}\n"
    )
    given: dict[str, object] = {"environment": {}, "python": "python3", **words}
    return describe(read_job(folder / "job.yaml"), folder / "job.yaml", **given)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("hostfile", "words", "shape", "hosts"),
    [
        ("a slots=8\nb slots=8\n", {}, (2, 8), ("a", "b")),
        ("a slots=8\nb slots=8\n", {"nodes": 4}, (4, 8), ()),
        ("a slots=8\nb slots=8\n", {"gpus": 8}, (1, 8), ()),
        ("a slots=8\nb slots=4\n", {"nodes": 2, "gpus": 8}, (2, 4), ("a", "b")),
        ("CHANGE-ME-1 slots=4\n", {}, (1, 4), ()),
        ("", {"gpus": 16}, (2, 8), ()),
        ("", {"nodes": 3}, (3, 8), ()),
    ],
)
def test_nodes_and_gpus_are_said_or_those_of_the_hostfile(
    tmp_path: Path, hostfile: str, words: dict[str, int], shape: tuple[int, int], hosts: tuple[str, ...]
) -> None:
    found = described(tmp_path, hostfile, **words)
    assert ((found.nodes, found.gpus), found.hosts) == (shape, hosts)


@pytest.mark.parametrize(
    ("hostfile", "words", "said"),
    [
        ("a slots=8\nb slots=4\n", {}, "4, 8 slots"),
        ("", {"nodes": 3, "gpus": 8}, "8 GPUs do not divide evenly among 3 nodes"),
        ("", {"nodes": 1, "overrides": ("env.HF_TOKEN=abc",)}, "--set env.HF_TOKEN: HF_TOKEN is a secret, and others"),
        ("", {"nodes": 1, "overrides": ("monitor.name=a\nb",)}, "line breaks"),
        ("", {"nodes": 1, "python": "/a\nb/python"}, "line breaks"),
    ],
)
def test_what_no_script_can_say_is_told(tmp_path: Path, hostfile: str, words: dict[str, object], said: str) -> None:
    with pytest.raises(InvalidConfig, match=said):
        described(tmp_path, hostfile, **words)


def test_secrets_are_named_and_never_told(tmp_path: Path) -> None:
    values = {"HF_TOKEN": "hf-secret", "SWANLAB_API_KEY": "swan-secret", "HF_ENDPOINT": "https://me:pass-word@hub"}
    asked = described(tmp_path, "a slots=8\n", environment=values | {"NCCL_IB_HCA": "mlx5"})
    assert asked.secrets == ("HF_ENDPOINT", "HF_TOKEN", "SWANLAB_API_KEY", "WANDB_API_KEY")
    assert asked.exports == {"NCCL_DEBUG": "WARN", "NCCL_IB_HCA": "mlx5", "PYTHONSAFEPATH": "1", **_python_path(asked)}
    for script in SCRIPTS.values():
        text = script(replace(asked, job=ASKED.job, run_dir=ASKED.run_dir))
        assert "HF_TOKEN" in text
        for value in ("hf-secret", "swan-secret", "pass-word", "in-the-job"):
            assert value not in text


def _python_path(asked: ScriptContext) -> dict[str, str]:
    return {name: value for name, value in asked.exports.items() if name == "PYTHONPATH"}


# How they behave


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=st.text(min_size=1, max_size=20).filter(lambda name: name.isprintable() and "/" not in name))
def test_whatever_is_printable_arrives_as_it_was(python: Path, name: str) -> None:
    if name in (".", "..") or len(name.encode(errors="replace")) > 200 or not _is_encodable(name):
        return
    folder = python.parent.parent / name
    folder.mkdir(exist_ok=True)
    Path(f"{python}.typed").unlink(missing_ok=True)
    asked = replace(asked_in(folder, python), overrides=(f"monitor.name={name}",))
    subprocess.run(["bash", "-c", bash(asked), "script", "prepare"], check=True, capture_output=True)
    for call in typed(python):
        assert call[:5] == ["-P", "-m", "dstrain.cli", "script", "prepare"]
        assert call[5] == str(folder / "job.yaml")
        assert ["--set", f"monitor.name={name}"] == call[-4:-2]


def _is_encodable(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


@pytest.mark.parametrize(("codes", "code"), [((0, 0), 0), ((0, 3), 3), ((4, 0), 4)])
def test_all_nodes_are_started_over_ssh_and_a_failure_comes_back(
    python: Path, codes: tuple[int, int], code: int
) -> None:
    folder = python.parent.parent / "a folder"
    (folder / "out").mkdir(parents=True)
    ssh = python.parent / "ssh"
    ssh.write_text('#!/bin/bash\nprintf "%s\\n" "${@: -2:1}" >>"$0.hosts"\nexec bash -c "${@: -1}"\n')
    ssh.chmod(0o755)
    python.write_text(
        '#!/bin/bash\nprintf \'%s\\0\' "$@" --- >>"$0.typed"\n'
        f'[ "$3" = dstrain.cli ] || {{ c=({codes[0]} {codes[1]}); exit "${{c[$8]}}"; }}\n'
    )
    script = folder / "job.sh"
    script.write_text(bash(asked_in(folder, python)))
    path = {"PATH": f"{python.parent}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", str(script)], env={**os.environ, **path}, capture_output=True, text=True, timeout=30)
    assert done.returncode == code, done.stderr
    if code == 0:
        assert sorted(Path(f"{ssh}.hosts").read_text().split()) == ["gpu01", "gpu02"]
        prepared, *nodes = typed(python)
        assert prepared[3:5] == ["script", "prepare"]
        assert sorted(" ".join(node) for node in nodes) == [
            f"-P -m deepspeed.launcher.runner --hostfile {folder}/out/hostfile --no_ssh --node_rank {rank}"
            f" --master_addr gpu01 --master_port 29500 --enable_each_rank_log {folder}/out/logs"
            f" --no_local_rank --module dstrain.train {folder}/out"
            for rank in (0, 1)
        ]
