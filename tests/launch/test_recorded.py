"""What a restart reads."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from dstrain.job.file import read_job
from dstrain.launch.launch import Recorded
from dstrain.rundir import RunDir

JOB = """
model: org/model
data: "*.jsonl"
chat_template: own.jinja
output_dir: output
ds_config: ds_config.json
learning_rate: 1e-3
"""


def test_a_restart_reads_no_file_again_and_says_once_which_have_changed(tmp_path: Path) -> None:
    path, config, data, template = (tmp_path / name for name in ("job.yaml", "ds_config.json", "a.jsonl", "own.jinja"))
    path.write_text(JOB)
    config.write_text('{"zero_optimization": {"stage": 2}}')
    data.write_text("{}\n")
    template.write_text("{{ before }}")
    file = read_job(path, ["seed=7"])
    prepared = SimpleNamespace(run_dir=RunDir(tmp_path / "output"), ds_text=config.read_text(), is_local=True)
    launch: Any = SimpleNamespace(file=file, prepared=prepared)
    recorded = Recorded(launch, path)
    assert recorded.edited() == []
    path.write_text("learning_rate: 0.5\nmodel: [")
    config.unlink()
    template.write_text("{{ after }}")
    (tmp_path / "b.jsonl").write_text("{}\n")
    edits, other_data = recorded.edited()
    assert edits.endswith("job.yaml, " + f"{config} changed since the run began: the edit is for the next run")
    assert other_data.endswith("b.jsonl changed since the run began: it continues with other data")
    assert recorded.edited() == []
    again = recorded.file(["resume=auto", "micro_batch=2"]).job
    assert (again.learning_rate, again.seed, again.resume, again.micro_batch) == (1e-3, 7, "auto", 2)
    assert again.chat_template == "{{ before }}"
    assert Path(again.ds_config).read_text() == prepared.ds_text
