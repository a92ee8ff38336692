"""What leaves: a job's files for accelerate, FSDP2, torchrun and LLaMA-Factory."""

from __future__ import annotations

import ast
import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace
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
from dstrain.launch.scripts.exports import Export, Target, export
from dstrain.plan.estimate import BF16_STATES
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


@pytest.mark.parametrize(("target", "kind"), [(Target.ACCELERATE, "DEEPSPEED"), (Target.FSDP2, "FSDP")])
def test_accelerates_file_is_read_back_as_the_same_machines_and_strategy(
    tmp_path: Path, target: Target, kind: str
) -> None:
    folder = written(export(job_of(tmp_path), ZERO3, NODES, target), tmp_path / "out")
    config = parse_yaml((folder / "accelerate.yaml").read_text(), "accelerate.yaml")[0]
    assert (config["distributed_type"], config["main_process_ip"]) == (kind, "a")
    found = import_file(folder / "accelerate.yaml")
    assert found.of("machines") == {"gpus": 16, "nodes": 2}
    assert found.notes == () or not found.stops
    if target is Target.FSDP2:
        assert found.of("plan") == {"zero_stage": 3}
    else:
        assert json.loads((folder / "ds_config.json").read_text()) == {"zero_optimization": {"stage": 3}}


def test_llamafactorys_files_are_read_back_as_the_same_job(tmp_path: Path) -> None:
    lora: dict[str, Any] = {"rank": 4, "alpha": 6, "dropout": 0.1, "targets": ["q_proj"]}
    values: dict[str, Any] = {"method": "lora", "seq_len": 512, "packing": True, "loss_on": "all", "grad_ckpt": False}
    values |= {"learning_rate": 3e-4, "grad_accum": 3, "warmup_ratio": 0.2, "lr_scheduler_type": "linear"}
    values |= {"save_total_limit": None, "adam_beta2": 0.9, "seed": 1}
    folder = written(export(job_of(tmp_path, lora=lora, **values), ZERO3, TWO, Target.LLAMAFACTORY), tmp_path / "out")
    found = import_file(folder / "train.yaml")
    back = {key: found.values[key].value for key in values}
    assert back == values
    assert found.of("lora") == lora
    assert (found.values["data"].value, found.values["data_format"].value) == (str(tmp_path / "train.jsonl"), "alpaca")
    assert found.of("plan") == {"ds_config": str(folder / "ds_config.json")}


@pytest.mark.parametrize("target", Target)
def test_a_precision_without_a_key_is_told(tmp_path: Path, target: Target) -> None:
    made = export(job_of(tmp_path, precision="fp32"), ZERO3, TWO, target)
    told = any(note.startswith("precision: fp32 has no key") for note in made.notes)
    assert told is (target is Target.LLAMAFACTORY)
    assert not any("fp32" in note for note in export(job_of(tmp_path), ZERO3, TWO, target).notes)


def test_llamafactory_evaluates_at_the_end_where_there_are_data(tmp_path: Path) -> None:
    held_out = export(job_of(tmp_path, val_split=0.1), ZERO3, TWO, Target.LLAMAFACTORY).files["train.yaml"]
    settings = parse_yaml(held_out, "train.yaml")[0]
    assert (settings["do_eval"], settings["eval_strategy"]) == (True, "no")
    assert "do_eval" not in export(job_of(tmp_path), ZERO3, TWO, Target.LLAMAFACTORY).files["train.yaml"]


@pytest.mark.parametrize("target", [Target.ACCELERATE, Target.FSDP2, Target.TORCHRUN])
def test_what_a_plain_trainer_lacks_is_refused(tmp_path: Path, target: Target) -> None:
    with pytest.raises(InvalidConfig, match="has no counterpart of sp: 2, tiled_mlp: true"):
        export(job_of(tmp_path, tiled_mlp=True, sp=2), ZERO3, TWO, target)


@pytest.mark.parametrize("target", Target)
def test_optimizers_reach_the_tools_that_have_them(tmp_path: Path, target: Target) -> None:
    job = job_of(tmp_path, optimizer=Optimizer.ADAMW_BF16)
    if target in (Target.ACCELERATE, Target.LLAMAFACTORY):
        config = json.loads(export(job, ZERO3, TWO, target).files["ds_config.json"])
        assert dict.fromkeys(BF16_STATES, True).items() <= config["bf16"].items()
    else:
        with pytest.raises(InvalidConfig, match="has no counterpart of optimizer: adamw_bf16"):
            export(job, ZERO3, TWO, target)
    with pytest.raises(InvalidConfig, match="has no counterpart of optimizer: muon"):
        export(job_of(tmp_path, optimizer=Optimizer.MUON), ZERO3, TWO, target)


@pytest.mark.parametrize(
    ("target", "method", "is_reentrant"),
    [(Target.ACCELERATE, "lora", True), (Target.ACCELERATE, "full", False), (Target.FSDP2, "lora", False)],
)
def test_checkpointing_has_the_form_of_a_run(tmp_path: Path, target: Target, method: str, is_reentrant: bool) -> None:
    job = job_of(tmp_path, method=method, grad_ckpt=True)
    written = json.loads(export(job, ZERO3, TWO, target).files["train.json"])
    assert written["gradient_checkpointing_kwargs"] == {"use_reentrant": is_reentrant}


@pytest.mark.parametrize("target", Target)
def test_frozen_parameters_are_refused(tmp_path: Path, target: Target) -> None:
    with pytest.raises(InvalidConfig, match=r'has no counterpart of freeze: \["embed_tokens"\]'):
        export(job_of(tmp_path, freeze=["embed_tokens"]), ZERO3, TWO, target)


def test_adapters_to_continue_and_whole_modules_reach_llamafactory(tmp_path: Path) -> None:
    job = replace(job_of(tmp_path, method="lora", lora={"modules_to_save": ["lm_head"]}), adapter="/saved")
    written = parse_yaml(export(job, ZERO3, TWO, Target.LLAMAFACTORY).files["train.yaml"], "train.yaml")[0]
    assert (written["adapter_name_or_path"], written["additional_target"]) == ("/saved", "lm_head")
    with pytest.raises(InvalidConfig, match="has no counterpart of lora: target_parameters"):
        export(job_of(tmp_path, method="lora", lora={"target_parameters": ["experts"]}), ZERO3, TWO, Target.ACCELERATE)
    with pytest.raises(InvalidConfig, match="has no counterpart of adapter: /saved"):
        export(job, ZERO3, TWO, Target.TORCHRUN)
    script = json.loads(export(replace(job, adapter=None), ZERO3, TWO, Target.TORCHRUN).files["train.json"])
    assert script["lora"]["modules_to_save"] == ["lm_head"]


@pytest.mark.parametrize("target", Target)
def test_ligers_kernels_are_asked_for_with_their_loss(tmp_path: Path, target: Target) -> None:
    made = export(job_of(tmp_path, liger=True, loss="fused"), ZERO3, TWO, target)
    if target is Target.LLAMAFACTORY:
        assert parse_yaml(made.files["train.yaml"], "train.yaml")[0]["enable_liger_kernel"] is True
    else:
        assert json.loads(made.files["train.json"])["use_liger_kernel"] is True
    assert "Liger's own loss takes the place of loss: fused" in made.notes
    assert "liger_kernel" not in " ".join(export(job_of(tmp_path), ZERO3, TWO, target).files.values())


@pytest.mark.parametrize("target", Target)
def test_preferences_are_not_exported_as_answers(tmp_path: Path, target: Target) -> None:
    with pytest.raises(InvalidConfig, match="has no counterpart of task: dpo"):
        export(job_of(tmp_path, task=Task.DPO), ZERO3, TWO, target)


TURNS = [{"role": "user", "content": "<image>What?"}, {"role": "assistant", "content": "A cat."}]


def with_rows(tmp_path: Path, *rows: dict[str, Any], **values: Any) -> Job:
    job = job_of(tmp_path, **values)
    (tmp_path / "train.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return job


@pytest.mark.parametrize("target", [target for target in Target if target is not Target.LLAMAFACTORY])
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
def test_what_limits_or_trains_images_is_not_left_out(tmp_path: Path, target: Target, changes: dict[str, Any]) -> None:
    with pytest.raises(InvalidConfig, match=f"{target} has no counterpart of {next(iter(changes))}: "):
        export(job_of(tmp_path, **changes), ZERO3, TWO, target)
    with pytest.raises(InvalidConfig, match=f"{target} has no counterpart of images or videos in the data"):
        export(with_rows(tmp_path, {"messages": TURNS, "images": ["cat.png"]}), ZERO3, TWO, target)


@pytest.mark.parametrize(
    "limits",
    [
        {
            "max_pixels": 4096,
            "min_pixels": 1024,
            "video_max_pixels": 1024,
            "video_fps": 1.5,
            "video_maxlen": 16,
            "freeze_vision_tower": False,
        },
        {"freeze_multi_modal_projector": False, "freeze_language_model": True, "video_fps": 2.0, "video_maxlen": 128},
    ],
    ids=("all", "as the processor has it"),
)
def test_jobs_with_images_and_videos_are_read_back_as_the_same(tmp_path: Path, limits: dict[str, Any]) -> None:
    text = {"messages": [{"role": "user", "content": "Hi"}, TURNS[1]]}
    row = {"messages": [{"role": "user", "content": "<image><video>What?"}, TURNS[1]]}
    job = with_rows(tmp_path, text, {**row, "image": "cat.png", "videos": [["1.png", "2.png"]]}, **limits)
    made = export(job, ZERO3, TWO, Target.LLAMAFACTORY)
    found = import_file(written(made, tmp_path / "out") / "train.yaml")
    keys = [key for key in found.values if "pixels" in key or "video" in key or key.startswith("freeze")]
    assert {key: found.values[key].value for key in keys} == limits
    assert found.values["data"].value == [{"path": str(tmp_path / "train.jsonl"), "columns": {"images": "image"}}]
    assert "media_dir" not in [note.key for note in found.notes]
    assert any(note.startswith("set `template`") for note in made.notes)


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"messages": TURNS, "images": ["data:image/png;base64,AA"]}, "images as data URLs"),
        ({"messages": [{"role": "user", "content": "What?"}, TURNS[1]], "images": ["a.png"]}, "images without marks"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "image": "a.png"}]}]}, "images in turns"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_forms_of_images_that_llamafactory_lacks_are_refused(tmp_path: Path, row: dict[str, Any], problem: str) -> None:
    with pytest.raises(InvalidConfig, match=rf"train\.jsonl:1: has {problem}"):
        export(with_rows(tmp_path, row), ZERO3, TWO, Target.LLAMAFACTORY)


def test_the_script_needs_no_dstrain(tmp_path: Path) -> None:
    files = export(job_of(tmp_path, packing=True), ZERO3, TWO, Target.TORCHRUN).files
    trees = [ast.parse(text) for name, text in files.items() if name.endswith(".py")]
    imports = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    names = {node.module if isinstance(node, ast.ImportFrom) else node.names[0].name for node in imports}
    assert {str(name).partition(".")[0] for name in names} - sys.stdlib_module_names == {
        *("torch", "datasets", "transformers", "peft", "numpy", "packing", "swanlab"),
    }
    assert len(trees) == 2


def test_packed_rows_are_those_of_a_run_and_their_mask_is_told(tmp_path: Path) -> None:
    job = job_of(tmp_path, packing=True)
    assert "packing.py" not in export(job_of(tmp_path), ZERO3, TWO, Target.TORCHRUN).files
    made = export(job, ZERO3, TWO, Target.TORCHRUN)
    assert any(note.startswith("attention over packed rows gets a mask") for note in made.notes)
    flash = export(replace(job, attn=Attention.FLASH_ATTENTION_2), ZERO3, TWO, Target.TORCHRUN)
    assert not any("gets a mask" in note for note in flash.notes)
    assert not any("gets a mask" in note for note in export(job, ZERO3, TWO, Target.LLAMAFACTORY).notes)


def test_fsdp2_and_ddp_train_the_demo_with_the_losses_of_zero_3_and_zero_1(
    tmp_path: Path, made_demo: Path, engine: Engine
) -> None:
    demo = tmp_path / "demo"
    shutil.copytree(made_demo, demo)
    lines = (demo / "train.jsonl").read_text().splitlines(keepends=True)
    (demo / "train.jsonl").write_text("".join(lines[:64]))
    for stage, target, packing in ((3, Target.FSDP2, False), (1, Target.TORCHRUN, True)):
        settings: dict[str, Any] = {"precision": "fp32", "grad_accum": 2, "max_steps": 4, "packing": packing}
        settings["eval_data"] = None if packing else str(demo / "eval.jsonl")
        run = make_run(tmp_path / f"zero{stage}", demo, zero={"stage": stage}, **settings)
        engine.train(run)
        (run / "ds_config.json").write_text((run / "ds_config.resolved.json").read_text())
        request = json.loads((run / "request.json").read_text()) | {"env": {"DS_ACCELERATOR": "cpu"}}
        (run / "job.yaml").write_text(json.dumps(request))
        job = read_job(run / "job.yaml").job
        exported = export(job, json.loads((run / "ds_config.json").read_text()), TWO, target)
        folder = written(exported, tmp_path / target.value)
        words = [*exported.command.split()[:-1], str(SHIM)]
        line = [str(Path(sys.executable).parent / words[0]), *words[1:]]
        done = subprocess.run(line, cwd=folder, env=environment(tmp_path), capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        assert target is not Target.FSDP2 or "sharded: " in done.stdout
        assert [file.name for file in folder.rglob("eval_results.json")] == ([] if packing else ["eval_results.json"])
        assert packing or "eval_loss" in done.stdout
        assert done.stdout.count("without a process group") == 2
        theirs = [float(loss) for loss in re.findall(r"exact loss: ([\d.]+)", done.stdout)]
        assert len(theirs) == 4
        assert theirs == pytest.approx(list(losses(run).values()), rel=1e-5)
