"""SwanLab itself, offline, in a process of its own: it keeps state for the whole process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

pytestmark = pytest.mark.engine

PROGRAM = """
import os
import sys
from pathlib import Path
from dstrain.choices import SwanLabMode
from dstrain.monitor.metrics import points
from dstrain.monitor.expert_balance import balance, load_map
from dstrain.monitor.outcomes import GeneratedText, table
from dstrain.monitor.metrics import scalars
from dstrain.monitor.end_report import filterable
from dstrain.monitor.sinks.registry import End, Setup, open_sinks

folder, mode, resumed = Path(sys.argv[1]), SwanLabMode(sys.argv[2]), sys.argv[3] == "resumed"
named = {"name": "qwen3-8b-lora-4x4090-zero2", "description": "8.19 B parameters", "tags": ("lora", "4x4090")}
config = filterable({"job": {"lora": {"targets": ["q", "v"]}}, "num_gpus": 4})
setup = Setup(project="p", mode=mode, run_dir=folder, config=config, is_resumed=resumed, **named)
sinks = open_sinks(["swanlab"], setup, lambda line: print("SAID", line))
for sink in sinks:
    for step in range(3):
        sink.log(points({"loss": 3.0 - step, "grad_norm": float("nan"), "tokens_per_s": 5, "eval_loss": 3.0}), step)
    counts = [[30, 10], [20, 20]]
    sink.log(points(scalars(balance(counts, (1, 2)))), 2)
    sink.show(load_map(counts, (1, 2), 2).table(2))
    sink.show(table([GeneratedText(step=2, prompt="Who | are you?", text="I am a\\nmodel.", tokens=7, seconds=0.5)]))
    sink.finish(End(sys.argv[4]))
print("OPENED", len(sinks), flush=True)
os._exit(0)
"""


def run(folder: Path, mode: str, resumed: str = "new", end: str = "success", **environment: str) -> str:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SWANLAB_")}
    home = folder / "home"
    home.mkdir(exist_ok=True)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(folder), mode, resumed, end],
        cwd=home,
        env=kept | {"HOME": str(home), "PYTHONPATH": str(Path(__file__).parents[3])} | environment,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_offline_keeps_its_files_in_the_run_directory(tmp_path: Path) -> None:
    assert "SAID SwanLab: offline in" in run(tmp_path, "offline")
    (file,) = (tmp_path / "swanlog").glob("run-*/*.swanlab")
    content = file.read_bytes()
    assert b"train/loss" in content
    assert b"eval/loss" in content
    assert b"speed/tokens_per_s" in content
    (saved,) = file.parent.rglob("config.yaml")
    config = yaml.safe_load(saved.read_text())
    assert {key: item["value"] for key, item in config.items()} == {"job.lora.targets": "q, v", "num_gpus": 4}
    assert b"samples/text" in content
    for name in (b"experts/load_cv", b"experts_load_cv/layer_01", b"experts_dead/layer_02", b"expert_loads/text"):
        assert name in content
    texts = [path.read_bytes() for path in file.parent.rglob("*") if path.is_file()]
    assert any(b"| 1 | 0.50 | 1.50 | 0 |" in text for text in texts)
    assert any(b"| Who \\| are you? | I am a<br>model. | 7 |" in text for text in texts)
    assert b"expert_loads/picture" in content
    assert len(list(file.parent.rglob("*.png"))) == 1
    for said in (b"qwen3-8b-lora-4x4090-zero2", b"8.19 B parameters", b"4x4090", b"num_gpus"):
        assert said in content or any(said in other.read_bytes() for other in file.parent.rglob("*") if other.is_file())
    assert not (tmp_path / "home" / "swanlog").exists()


def test_a_resumed_run_keeps_its_id_and_a_new_one_does_not(tmp_path: Path) -> None:
    def known() -> str:
        return str(json.loads((tmp_path / ".dstrain-run.json").read_text())["swanlab_id"])

    run(tmp_path, "offline")
    first = known()
    resumed = run(tmp_path, "offline", "resumed")
    assert known() == first
    parts = sorted(map(str, (tmp_path / "swanlog").glob("run-*")))
    assert len(parts) == 2
    assert f"to upload: swanlab sync {' '.join(parts)}\n" in resumed
    assert all(first in folder.name for folder in (tmp_path / "swanlog").glob("run-*"))
    run(tmp_path, "offline", "new")
    assert known() != first


def test_online_without_a_key_goes_on_offline_with_one_line(tmp_path: Path) -> None:
    output = run(tmp_path, "online")
    assert output.count("failed to start") == 1
    assert "OPENED 1" in output


def test_a_folder_that_cannot_be_written_goes_on_without_it(tmp_path: Path) -> None:
    (tmp_path / "swanlog").write_text("a file is in the way")
    output = run(tmp_path, "offline")
    assert output.count("failed to start") == 1
    assert "OPENED 0" in output


def test_disabled_opens_nothing(tmp_path: Path) -> None:
    assert "OPENED 0" in run(tmp_path, "disabled")
    assert not (tmp_path / "swanlog").exists()


@pytest.fixture
def webhook() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """The address of a service that takes every message, and the messages."""
    taken: list[dict[str, Any]] = []

    class Service(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            taken.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b'{"code": 0}')

        def log_message(self, format: str, *arguments: Any) -> None:
            """Says nothing."""

    server = HTTPServer(("127.0.0.1", 0), Service)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/hook", taken
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.parametrize(
    ("end", "told"), [("success", "completed successfully"), ("aborted", "it was stopped before its last step")]
)
def test_a_notice_tells_how_a_run_ended_and_its_address_is_in_no_file(
    tmp_path: Path, webhook: tuple[str, list[dict[str, Any]]], end: str, told: str
) -> None:
    address, taken = webhook
    lark = {"WEBHOOK_URL": address, "SECRET": "signs-messages", "LANGUAGE": "en"}
    given = {f"SWANLAB_NOTIFY_LARK_{name}": value for name, value in lark.items()}
    run(tmp_path, "offline", end=end, **given)
    (message,) = taken
    assert told in message["content"]["text"]
    assert message["sign"]
    texts = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    assert not any(secret in text for text in texts for secret in (address.encode(), b"signs-messages"))


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("LARK_URL", "notices: SWANLAB_NOTIFY_LARK_…: missing a required argument: 'webhook_url'; none is sent there"),
        ("FEISHU_WEBHOOK_URL", "notices: SwanLab has no feishu, but lark, dingtalk,"),
        ("EMAIL_PORT", "notices: SWANLAB_NOTIFY_EMAIL_…: missing a required argument: 'sender_email'"),
    ],
)
def test_a_wrong_variable_is_named_and_the_run_goes_on(tmp_path: Path, name: str, told: str) -> None:
    printed = run(tmp_path, "offline", **{f"SWANLAB_NOTIFY_{name}": "x"})
    assert f"SAID {told}" in printed
    assert "OPENED 1" in printed
