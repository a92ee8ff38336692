"""What leaves: a job's files for accelerate with DeepSpeed, FSDP2 and DDP."""

from __future__ import annotations

import ast
import json
import re
import shutil
import subprocess
import sys
from dataclasses import fields, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

import pytest

from dstrain.choices import Attention, Optimizer, Task
from dstrain.config.imports.read import import_file
from dstrain.errors import InvalidConfig
from dstrain.facts.cluster.hostfile import expand
from dstrain.job.file import read_job
from dstrain.job.schema import Job
from dstrain.job.yaml_source import parse_yaml
from dstrain.launch.scripts.exports import COMMAND, Export, ExportEngine, export
from dstrain.plan.configuration import BF16_STATES
from tests.train.engine import Engine
from tests.train.launching import environment, losses, make_run

TWO = expand("localhost:2", None)
NODES = expand("a:8,b:8", None)
ZERO3 = {"zero_optimization": {"stage": 3}, "$schema": "x"}
SHIM = Path(__file__).with_name("exported_on_cpu.py")


def job_of(tmp_path: Path, **values: Any) -> Job:
    (tmp_path / "train.jsonl").write_text('{"instruction": "a", "output": "b"}\n')
    base = {"model": "Qwen/Qwen3-8B", "output_dir": "output", "data": "train.jsonl"}
    (tmp_path / "job.yaml").write_text(json.dumps(base | values))
    return read_job(tmp_path / "job.yaml").job


def written(exported: Export, folder: Path) -> Path:
    folder.mkdir()
    for name, text in exported.files.items():
        (folder / name).write_text(text)
    return folder


@pytest.mark.parametrize(
    ("engine", "kind"),
    [(ExportEngine.DEEPSPEED, "DEEPSPEED"), (ExportEngine.FSDP2, "FSDP"), (ExportEngine.DDP, "MULTI_GPU")],
)
def test_accelerates_file_is_read_back_as_the_same_machines_and_strategy(
    tmp_path: Path, engine: ExportEngine, kind: str
) -> None:
    folder = written(export(job_of(tmp_path), ZERO3, NODES, engine), tmp_path / "out")
    config = parse_yaml((folder / "accelerate.yaml").read_text(), "accelerate.yaml")[0]
    assert (config["distributed_type"], config["main_process_ip"]) == (kind, "a")
    found = import_file(folder / "accelerate.yaml")
    assert found.of("machines") == {"gpus": 16, "nodes": 2}
    assert found.notes == () or not found.stops
    if engine is ExportEngine.FSDP2:
        assert found.of("plan") == {"zero_stage": 3}
    if engine is ExportEngine.DEEPSPEED:
        assert json.loads((folder / "ds_config.json").read_text()) == {"zero_optimization": {"stage": 3}}


@pytest.mark.parametrize("engine", ExportEngine)
def test_what_a_plain_trainer_lacks_is_refused(tmp_path: Path, engine: ExportEngine) -> None:
    with pytest.raises(InvalidConfig, match="has no counterpart of sp: 2, tiled_mlp: true"):
        export(job_of(tmp_path, tiled_mlp=True, sp=2), ZERO3, TWO, engine)


@pytest.mark.parametrize("engine", ExportEngine)
def test_optimizers_reach_the_engines_that_have_them(tmp_path: Path, engine: ExportEngine) -> None:
    job = job_of(tmp_path, optimizer=Optimizer.ADAMW_BF16)
    if engine is ExportEngine.DEEPSPEED:
        config = json.loads(export(job, ZERO3, TWO, engine).files["ds_config.json"])
        assert dict.fromkeys(BF16_STATES, True).items() <= config["bf16"].items()
    else:
        with pytest.raises(InvalidConfig, match="has no counterpart of optimizer: adamw_bf16"):
            export(job, ZERO3, TWO, engine)
    with pytest.raises(InvalidConfig, match="has no counterpart of optimizer: muon"):
        export(job_of(tmp_path, optimizer=Optimizer.MUON), ZERO3, TWO, engine)


@pytest.mark.parametrize(
    ("engine", "method", "is_reentrant"),
    [
        (ExportEngine.DEEPSPEED, "lora", True),
        (ExportEngine.DEEPSPEED, "full", False),
        (ExportEngine.FSDP2, "lora", False),
    ],
)
def test_checkpointing_has_the_form_of_a_run(
    tmp_path: Path, engine: ExportEngine, method: str, is_reentrant: bool
) -> None:
    job = job_of(tmp_path, method=method, grad_ckpt=True)
    written = json.loads(export(job, ZERO3, TWO, engine).files["train.json"])
    assert written["gradient_checkpointing_kwargs"] == {"use_reentrant": is_reentrant}


@pytest.mark.parametrize("engine", ExportEngine)
def test_frozen_parameters_are_refused(tmp_path: Path, engine: ExportEngine) -> None:
    with pytest.raises(InvalidConfig, match=r'has no counterpart of freeze: \["embed_tokens"\]'):
        export(job_of(tmp_path, freeze=["embed_tokens"]), ZERO3, TWO, engine)


def test_whole_modules_reach_the_script_and_adapters_to_continue_are_refused(tmp_path: Path) -> None:
    job = replace(job_of(tmp_path, method="lora", lora={"modules_to_save": ["lm_head"]}), adapter="/saved")
    with pytest.raises(InvalidConfig, match="has no counterpart of lora: target_parameters"):
        export(
            job_of(tmp_path, method="lora", lora={"target_parameters": ["experts"]}), ZERO3, TWO, ExportEngine.DEEPSPEED
        )
    with pytest.raises(InvalidConfig, match="has no counterpart of adapter: /saved"):
        export(job, ZERO3, TWO, ExportEngine.DDP)
    script = json.loads(export(replace(job, adapter=None), ZERO3, TWO, ExportEngine.DDP).files["train.json"])
    assert script["lora"]["modules_to_save"] == ["lm_head"]


@pytest.mark.parametrize("engine", ExportEngine)
def test_ligers_kernels_are_asked_for_with_their_loss(tmp_path: Path, engine: ExportEngine) -> None:
    made = export(job_of(tmp_path, liger=True, loss="fused"), ZERO3, TWO, engine)
    assert json.loads(made.files["train.json"])["use_liger_kernel"] is True
    assert "Liger's own loss takes the place of loss: fused" in made.notes
    assert "liger_kernel" not in " ".join(export(job_of(tmp_path), ZERO3, TWO, engine).files.values())


@pytest.mark.parametrize("engine", ExportEngine)
def test_preferences_are_not_exported_as_answers(tmp_path: Path, engine: ExportEngine) -> None:
    with pytest.raises(InvalidConfig, match="has no counterpart of task: dpo"):
        export(job_of(tmp_path, task=Task.DPO), ZERO3, TWO, engine)


TURNS = [{"role": "user", "content": "<image>What?"}, {"role": "assistant", "content": "A cat."}]


def with_rows(tmp_path: Path, *rows: dict[str, Any], **values: Any) -> Job:
    job = job_of(tmp_path, **values)
    (tmp_path / "train.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return job


@pytest.mark.parametrize("engine", ExportEngine)
@pytest.mark.parametrize(
    "changes",
    [
        {"max_pixels": 4096},
        {"min_pixels": 64},
        {"video_fps": 1.0},
        {"freeze_vision_tower": False},
    ],
    ids=str,
)
def test_what_limits_or_trains_images_is_not_left_out(
    tmp_path: Path, engine: ExportEngine, changes: dict[str, Any]
) -> None:
    with pytest.raises(InvalidConfig, match=f"{engine} has no counterpart of {next(iter(changes))}: "):
        export(job_of(tmp_path, **changes), ZERO3, TWO, engine)
    with pytest.raises(InvalidConfig, match=f"{engine} has no counterpart of images or videos in the data"):
        export(with_rows(tmp_path, {"messages": TURNS, "images": ["cat.png"]}), ZERO3, TWO, engine)


OF_A_RUN = {
    "ds_config": "its contents are the script's",
    "hostfile": "its hosts are those of accelerate.yaml",
    "image_patches": "estimates alone count them",
    "dpo": "task: dpo is refused",
    "stopping_strategy": "several data sets are refused",
    "shuffle_buffer": "streaming is refused",
    "muon_learning_rate": "optimizer: muon is refused",
    "torch_compile_backend": "torch_compile is left out, and says so",
    "early_stopping_threshold": "early_stopping is left out, and says so",
    "monitor.collectives": "the script measures none",
}
"""Keys that leave no trace in an export → the reason."""
OTHERS: dict[str, Any] = {
    "data": "other.jsonl",
    "eval_data": "eval.jsonl",
    "rope_scaling": {"rope_type": "yarn", "factor": 2},
    "columns": {"answer": "A"},
    "samples": {"prompts": ["Who are you?"]},
    "health": {"plateau": {"action": "stop"}},
    "env": {"NCCL_DEBUG": "INFO"},
    "lr_scheduler_kwargs": {"num_cycles": 1},
    "thinking": "all",
    "system": "Be brief.",
    "chat_template": "{{ messages }}",
    "video_maxlen": 8,
    "task": "dpo",
    "dpo": {"beta": 0.2},
    "hostfile": "hosts",
    "eval_steps": 5,
    "eval_micro_batch": 3,
    "lora.targets": ["q_proj"],
    "monitor.sinks": ["tensorboard"],
    "monitor.name": "mine",
    "monitor.mode": "offline",
    "adapter": "saved",
}
"""Values of keys that are not made from their defaults."""
WITH: dict[str, dict[str, Any]] = {
    **{key: {"eval_data": "eval.jsonl", "eval_steps": 2} for key in ("eval_micro_batch", "eval_on_start")},
    **{key: {"eval_data": "eval.jsonl"} for key in ("eval_steps", "eval_strategy")},
    **{key: {"method": "lora"} for key in ("lora", "adapter")},
}
"""Keys of the job beside which another one, or a section, is read."""


def another(name: str, default: Any) -> Any:
    """Returns another legal value of a key."""
    if name in OTHERS:
        return OTHERS[name]
    if isinstance(default, bool):
        return not default
    if isinstance(default, StrEnum):
        return next(value.value for value in type(default) if value != default)
    if isinstance(default, int | float):
        return default + 1 if default >= 1 else (default + 0.5) / 2 if isinstance(default, float) else 1
    return ["other"] if isinstance(default, tuple) else "other" if isinstance(default, str) else 1


def every_key() -> list[tuple[str, Any]]:
    """Returns the keys of a job and of its sections for adapters and metrics, with another value of each."""
    plain = Job(model="Qwen/Qwen3-8B", output_dir="output")
    found = []
    for key in (field.name for field in fields(Job)):
        default = getattr(plain, key)
        inner = fields(default) if key in ("lora", "monitor") else ()
        found += [(f"{key}.{field.name}", getattr(default, field.name)) for field in inner] or [(key, default)]
    return [(key, another(key, default)) for key, default in found]


@pytest.mark.parametrize(("name", "value"), every_key(), ids=[name for name, _ in every_key()])
def test_no_key_of_a_job_is_dropped_silently(tmp_path: Path, name: str, value: Any) -> None:
    key, _, inner = name.partition(".")
    beside = WITH.get(key, {})
    plain, changed = job_of(tmp_path, **beside), job_of(tmp_path, **beside | {key: {inner: value} if inner else value})
    assert changed != plain
    for engine in ExportEngine:
        before = export(plain, ZERO3, TWO, engine)
        try:
            made = export(changed, ZERO3, TWO, engine)
        except InvalidConfig as error:
            is_told = key in error.problem
        else:
            is_noted = any(key in note for note in made.notes) and made.notes != before.notes
            is_told = made.files != before.files or is_noted
        assert is_told == (name not in OF_A_RUN)


def test_the_script_needs_no_dstrain(tmp_path: Path) -> None:
    files = export(job_of(tmp_path, packing=True), ZERO3, TWO, ExportEngine.DDP).files
    trees = [ast.parse(text) for name, text in files.items() if name.endswith(".py")]
    imports = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    names = {node.module if isinstance(node, ast.ImportFrom) else node.names[0].name for node in imports}
    assert {str(name).partition(".")[0] for name in names} - sys.stdlib_module_names == {
        *("torch", "datasets", "transformers", "peft", "numpy", "packing", "swanlab"),
    }
    assert len(trees) == 2


def test_packed_rows_are_those_of_a_run_and_their_mask_is_told(tmp_path: Path) -> None:
    job = job_of(tmp_path, packing=True)
    assert "packing.py" not in export(job_of(tmp_path), ZERO3, TWO, ExportEngine.DDP).files
    made = export(job, ZERO3, TWO, ExportEngine.DDP)
    assert any(note.startswith("attention over packed rows gets a mask") for note in made.notes)
    flash = export(replace(job, attn=Attention.FLASH_ATTENTION_2), ZERO3, TWO, ExportEngine.DDP)
    assert not any("gets a mask" in note for note in flash.notes)


@pytest.mark.parts(6, at=1)
def test_fsdp2_and_ddp_train_the_demo_with_the_losses_of_zero_3_and_zero_1(
    tmp_path: Path, made_demo: Path, engine: Engine
) -> None:
    demo = tmp_path / "demo"
    shutil.copytree(made_demo, demo)
    lines = (demo / "train.jsonl").read_text().splitlines(keepends=True)
    (demo / "train.jsonl").write_text("".join(lines[:64]))
    for stage, sharding, packing in ((3, ExportEngine.FSDP2, False), (1, ExportEngine.DDP, True)):
        settings: dict[str, Any] = {"precision": "fp32", "grad_accum": 2, "max_steps": 4, "packing": packing}
        settings["eval_data"] = None if packing else str(demo / "eval.jsonl")
        run = make_run(tmp_path / f"zero{stage}", demo, zero={"stage": stage}, **settings)
        engine.train(run)
        (run / "ds_config.json").write_text((run / "ds_config.resolved.json").read_text())
        request = json.loads((run / "request.json").read_text()) | {"env": {"DS_ACCELERATOR": "cpu"}}
        (run / "job.yaml").write_text(json.dumps(request))
        job = read_job(run / "job.yaml").job
        exported = export(job, json.loads((run / "ds_config.json").read_text()), TWO, sharding)
        folder = written(exported, tmp_path / sharding.value)
        words = [*COMMAND.split()[:-1], str(SHIM)]
        line = [str(Path(sys.executable).parent / words[0]), *words[1:]]
        done = subprocess.run(line, cwd=folder, env=environment(tmp_path), capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        assert sharding is not ExportEngine.FSDP2 or "sharded: " in done.stdout
        assert [file.name for file in folder.rglob("eval_results.json")] == ([] if packing else ["eval_results.json"])
        assert packing or "eval_loss" in done.stdout
        assert done.stdout.count("without a process group") == 2
        theirs = [float(loss) for loss in re.findall(r"exact loss: ([\d.]+)", done.stdout)]
        assert len(theirs) == 4
        assert theirs == pytest.approx(list(losses(run).values()), rel=1e-5)
