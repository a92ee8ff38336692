"""What reaches the ranks, and that it is exactly what was there."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from dstrain.errors import InvalidConfig
from dstrain.launch.environment import (
    expanded,
    exports,
    file_text,
    for_nodes,
    is_secret,
    launcher_environment,
    read_user_files,
    refuse_secrets,
    secrets,
    write_secrets,
)
from dstrain.launch.launch import start_script
from dstrain.launch.nodes.connection import new_mark
from dstrain.launch.nodes.node_runner import NodeRunner
from dstrain.launch.nodes.protocol import Begin, decode, encode
from dstrain.paths import write_atomic
from dstrain.rundir import RunDir
from dstrain.train.rank import read_secrets

NASTY = "a $HOME `id` \"q\" 'p' \\ \\\\ %h %n %% ! ~ * ; & | é"


LOOP = 'while IFS= read -r line; do eval "export ${line%%=*}=\\"${line#*=}\\""; done'
"""How `start.sh` reads the environment file."""


def as_the_nodes_see_it(text: str, *, node: dict[str, str] | None = None) -> dict[str, str]:
    """Does with an environment file what `start.sh` does on a node, and returns the variables."""
    names = [line.partition("=")[0] for line in text.split("\n") if line]
    code = f"import json,os; print(json.dumps({{n: os.environ[n] for n in {names}}}))"
    child = subprocess.run(
        ["bash", "-c", f'{LOOP}; exec "$0" -c "$1"', sys.executable, code],
        env=node or {},
        check=True,
        capture_output=True,
        input=text.encode("utf-8", errors="surrogateescape"),
    )
    found: dict[str, str] = json.loads(child.stdout)
    return found


def test_the_listed_families_travel_and_nothing_else() -> None:
    env = {"HF_HOME": "/hf", "NCCL_IB_HCA": "mlx5", "PATH": "/bin", "CUDA_VISIBLE_DEVICES": "0", "DS_ENV_FILE": "x"}
    assert file_text(for_nodes(env, {"MINE": "1"})) == "HF_HOME=/hf\nMINE=1\nNCCL_IB_HCA=mlx5\n"


@settings(max_examples=8, deadline=None)
@example(texts=[NASTY, "  spaces  ", "", "50%", "%", "=a=b", "\t"])
@given(texts=st.lists(st.text(st.characters(exclude_characters="\0", codec="utf-8")), min_size=1, max_size=20))
def test_any_value_survives_start_sh(texts: list[str]) -> None:
    values = {f"HF_{number}": text for number, text in enumerate(texts) if not is_secret(f"HF_{number}", text)}
    if values:
        assert as_the_nodes_see_it(file_text(for_nodes(values, {}))) == values


HOSTILE = [
    *("a b", "lr 1e-5 & bigger batch", "a; touch F", "x | tee F", "$(touch F)", "`touch F`", "${HOME}", "$HOME"),
    *("a\u2028touch F", "a\u0085touch F", "a\x0btouch F", "a\x0ctouch F", "a\ntouch F", "\r\nb", '"; touch F; "'),
    *("'", "\\", "\\\\$(touch F)", "%h %n %u", "  ends  ", "\t", "", "é\udcff", "-n", "#", "!!", "~", "*", "a=b"),
]  # fmt: skip


def kept(folder: Path, environment: dict[str, str]) -> dict[str, str]:
    """Returns the environment in which a real agent's launcher finds itself, the order having gone over the wire."""
    code = "import json, os; print(json.dumps({k: v for k, v in os.environ.items() if k.startswith('HF_')}))"
    begin = Begin(
        host="node", run_dir=str(folder), mark=new_mark(), command=[sys.executable, "-c", code], environment={},
        unset=[name for name in os.environ if name.startswith("HF_")], exports=for_nodes(environment, {}),
        first_rank=0, num_ranks=0, master_port=29500, mirror=False, timeouts={},
    )  # fmt: skip
    message = decode(encode(begin))
    assert message is not None
    node_runner = NodeRunner(message[1])
    while not node_runner.is_over:
        node_runner.tick(reads_logs=True)
        node_runner.wait(0.05)
    (log,) = RunDir(folder).logs.glob(f"*{begin.mark[:6]}.log")
    found: dict[str, str] = json.loads(log.read_text())
    return found


def arrives_by(way: Callable[[dict[str, str]], dict[str, str]], values: dict[str, str], run_dir: RunDir) -> None:
    """Asserts that a rank gets exactly these variables, and that none of them has started anything."""
    values = {name: value for name, value in values.items() if not is_secret(name, value)}
    assert way(values) == values
    assert not list(run_dir.path.rglob("F"))


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@example(texts=HOSTILE)
@given(texts=st.lists(st.text(st.characters(exclude_characters="\0", codec="utf-8")), min_size=1, max_size=20))
def test_any_value_reaches_a_node_as_it_is(tmp_path: Path, texts: list[str]) -> None:
    values = {f"HF_{number}": text for number, text in enumerate(texts)}
    arrives_by(lambda values: kept(tmp_path, values), values, RunDir(tmp_path))


def test_hostile_values_come_through_start_sh(tmp_path: Path) -> None:
    run_dir, values = RunDir(tmp_path), {f"HF_{number}": value for number, value in enumerate(HOSTILE)}
    code = "import json, os; print(json.dumps({k: v for k, v in os.environ.items() if k.startswith(('HF_', 'JOB_'))}))"
    own = {f"JOB_{number}": value for number, value in enumerate(HOSTILE)}

    def started(values: dict[str, str]) -> dict[str, str]:
        write_atomic(run_dir.environment, file_text(for_nodes(values, own)), mode=0o600)
        script = start_script(
            [sys.executable, "-c", code, "--node_rank", "0"], run_dir=run_dir, exported=exports(own, ""),
            secret_names=[], is_node_by_node=True,
        )  # fmt: skip
        write_atomic(run_dir.start_script, script)
        subprocess.run(["bash", "-n", str(run_dir.start_script)], check=True)
        line = ["bash", str(run_dir.start_script), "0"]
        done = subprocess.run(line, check=True, capture_output=True, text=True, env={"PATH": os.environ["PATH"]})
        found: dict[str, str] = json.loads(done.stdout)
        assert {name: found.pop(name) for name in own} == own
        return found

    arrives_by(started, values, run_dir)


def test_what_the_launcher_exports_by_itself_is_quoted_too() -> None:
    env = {"PYTHONSTARTUP": "$(id)", "MV2_X": "`id`", "UCX_X": "a b"}
    assert file_text(for_nodes(env, {})) == "MV2_X=\\`id\\`\nPYTHONSTARTUP=\\$(id)\nUCX_X=a b\n"


def test_what_cannot_be_handed_on_is_named() -> None:
    with pytest.raises(InvalidConfig, match='"A B" is not a valid name'):
        for_nodes({}, {"A B": "1"})
    with pytest.raises(InvalidConfig, match=r"\.deepspeed_env:2: "):
        for_nodes({}, {}, "A=1\nnonsense\n")
    with pytest.raises(InvalidConfig, match="HF_TOKEN holds a line break"):
        secrets({"HF_TOKEN": "a\nb"}, {})


def test_secrets_go_to_the_secrets_and_not_to_the_environment_file() -> None:
    env = {"HF_TOKEN": "hf_x", "SWANLAB_API_KEY": "k", "GITHUB_TOKEN": "not ours", "HF_ENDPOINT": "http://u:p@h"}
    job = {"SWANLAB_NOTIFY_BARK_KEY": "b", "PLAIN": "1"}
    user = "WANDB_API_KEY='w'\n"
    carried = secrets(env, job, user)
    assert carried == {
        "HF_TOKEN": "hf_x",
        "SWANLAB_API_KEY": "k",
        "HF_ENDPOINT": "http://u:p@h",
        "SWANLAB_NOTIFY_BARK_KEY": "b",
        "WANDB_API_KEY": "w",
    }
    assert file_text(for_nodes(env, job, user)) == "PLAIN=1\n"


@pytest.mark.parametrize(
    "override",
    ["env.HF_TOKEN=hf_x", "env={A: 1, HF_TOKEN: hf_x}", "env.PROXY=http://me:pw@host", "monitor.webhook=https://hook"],
)
def test_a_secret_is_no_option(override: str) -> None:
    with pytest.raises(InvalidConfig, match="is a secret, and they are seen"):
        refuse_secrets(["seed=1", override], "they are seen")
    refuse_secrets(["env.HF_HOME=/hf", "env={A: 1}", "data=https://host/a", "seed=1", "odd"], "they are seen")


def test_the_launcher_gets_neither_secrets_nor_another_launchers_rank() -> None:
    env = {"HF_TOKEN": "hf_x", "RANK": "3", "HOME": "/root"}
    assert launcher_environment(env, {"A": "1"}, {"HF_TOKEN": "hf_x"}) == {"HOME": "/root", "A": "1"}


def test_the_users_file_may_have_comments_blank_lines_and_export() -> None:
    text = "# mine\n\nexport NCCL_DEBUG=INFO\nA=\"x y\"\nB='$HOME'\nPATH2=/opt:$PATH\n"
    found = as_the_nodes_see_it(file_text(for_nodes({}, {}, text)), node={"PATH": "/bin"})
    assert found == {"NCCL_DEBUG": "INFO", "A": "x y", "B": "$HOME", "PATH2": "/opt:/bin"}


@pytest.mark.parametrize(
    "raw", ["$(id)", '"a $(id)"', "`id`", "${A:-x}", "\\\\$(id)", "x`id", "${A"]
)  # fmt: skip
def test_the_users_file_holds_no_command(raw: str) -> None:
    with pytest.raises(InvalidConfig, match=r"\.deepspeed_env:2: A holds (\$|`).* only a shell could expand"):
        for_nodes({}, {}, f"B=1\nA={raw}\n")


@pytest.mark.parametrize(
    ("raw", "value"),
    [("'$(id)'", "$(id)"), (r"\$(id)", "$(id)"), ("$B/x", "b/x"), ("${B}x", "bx"), ('"a"b; id; "c"', 'a"b; id; "c')]
    + [(same, same) for same in ("a;id", "$", "$1", "$$", r"C:\d", "%h")] + [('"  a  "', "  a  ")],
)  # fmt: skip
def test_what_the_users_file_says_means_the_same_by_every_road(raw: str, value: str) -> None:
    texts = for_nodes({}, {}, f"A={raw}\n")
    assert expanded(texts, {"B": "b"}) == {"A": value}
    assert as_the_nodes_see_it(file_text(texts), node={"B": "b"}) == {"A": value}


def test_the_job_wins_over_the_users_file_which_wins_over_the_shell() -> None:
    env, user = {"NCCL_DEBUG": "shell", "NCCL_ALGO": "shell"}, "NCCL_DEBUG=file\nNCCL_ALGO=file\n"
    assert file_text(for_nodes(env, {"NCCL_DEBUG": "job"}, user)) == "NCCL_ALGO=file\nNCCL_DEBUG=job\n"


def test_the_users_files_are_found_where_the_launcher_looks(tmp_path: Path) -> None:
    home, folder = tmp_path / "home", tmp_path / "here"
    for place, text in ((home, "A=1\n"), (folder, "A=2\n")):
        place.mkdir()
        (place / ".deepspeed_env").write_text(text)
    assert file_text(for_nodes({}, {}, read_user_files({}, home=home, folder=folder))) == "A=2\n"
    for place, named, is_refused in ((home, {}, False), (folder, {}, True), (folder, {"DS_ENV_FILE": "own"}, False)):
        file = place / named.get("DS_ENV_FILE", ".deepspeed_env")
        file.write_text("LD_PRELOAD=x.so\n")
        with pytest.raises(InvalidConfig, match="LD_PRELOAD may run code") if is_refused else nullcontext():
            read_user_files(named, home=home, folder=folder)


def test_secrets_are_for_their_user_alone_and_come_back(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    write_secrets(run_dir, {"HF_TOKEN": "a=b#c"})
    assert stat.S_IMODE(run_dir.secrets.stat().st_mode) == 0o600
    assert read_secrets(run_dir.secrets) == {"HF_TOKEN": "a=b#c"}
