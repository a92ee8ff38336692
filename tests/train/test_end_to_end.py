"""DeepSpeed and Trainer on two CPU ranks: what a run leaves behind."""

from __future__ import annotations

import json
import shutil
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from dstrain.choices import Method
from dstrain.facts.probe import read_model
from dstrain.job.model_changes import Lora
from dstrain.monitor.metrics import read_jsonl
from dstrain.monitor.outcomes import CheckName, Preflight
from dstrain.monitor.run_record import read as read_run
from dstrain.plan.configuration import DEFAULTS, changed
from dstrain.plan.memory.deepspeed import engine
from dstrain.plan.memory.params import trained
from dstrain.records import load_json
from dstrain.report.report import report
from dstrain.report.text import lines as lines_of
from dstrain.rundir import RunDir, is_whole
from dstrain.train.rank import SIGTERM_EXIT_CODE, read
from tests.train.engine import Engine
from tests.train.launching import (
    change_job,
    codes,
    lines,
    losses,
    make_run,
    said,
    tensors,
)

RANKS = 2


@pytest.fixture(scope="module")
def runs(root: Path, demo: Path, engine: Engine) -> Path:
    """One short run for each thing to look at."""
    folder = root / "several"
    broken = root / "broken"
    _put_nan(demo / "model", broken / "model")
    half_model = _in_bf16(demo / "model", root / "half-model")
    bloom = _bloom(demo / "model", root / "bloom")
    evaluation = str(demo / "eval.jsonl")
    offline = {"sinks": ["swanlab"], "mode": "offline", "name": "nice"}
    online = {"sinks": ["swanlab"], "mode": "online"}
    guessing = {"first_loss": {"warn": 0.5, "action": "stop"}}
    half = make_run(folder / "half", demo, resume="auto", monitor=offline, save_steps=2, save_total_limit=1)
    again = make_run(folder / "again", demo, resume="auto", preflight=True)
    made = [
        make_run(folder / "zero1", demo, zero={"stage": 1}, grad_accum=2, monitor={"sinks": ["tensorboard"]}),
        make_run(folder / "zero2", demo, eval_data=evaluation, eval_steps=2, save_steps=1, save_total_limit=2),
        make_run(folder / "zero3", demo, zero={"stage": 3}, eval_data=evaluation),
        make_run(folder / "offload", demo, zero={"offload_optimizer": {"device": "cpu"}}, preflight=True),
        make_run(folder / "lora2", demo, method="lora", lora={"dropout": 0.1}),
        make_run(folder / "lora3", demo, zero={"stage": 3}, method="lora", preflight=True),
        make_run(folder / "kept", demo, zero={"stage": 3, "stage3_gather_16bit_weights_on_model_save": False}),
        make_run(folder / "nan", demo, model=str(broken / "model"), preflight=True),
        make_run(folder / "steep", demo, learning_rate=1e20, max_steps=25, stop_on_nonfinite=3),
        make_run(folder / "stopped", demo, health=guessing, save_steps=100, preflight=True),
        make_run(folder / "packed", demo, zero={"stage": 3}, eval_data=evaluation, packing=True, precision="fp32"),
        make_run(folder / "padded", demo, eval_data=evaluation, micro_batch=4, precision="fp32", monitor=online),
        make_run(folder / "bloom", demo, zero={"stage": 3}, model=str(bloom), packing=True, attn="eager"),
        make_run(folder / "bad", demo, lr_scheduler_type="cosin"),
        make_run(folder / "fp32", demo, model=str(half_model), precision="fp32", zero={"stage": 3}),
        make_run(folder / "parallel", demo, engine={"tensor_parallel": {"autotp_size": 2}}),
    ]
    (half / ".secrets").write_text("SWANLAB_API_KEY=do-not-tell\n")
    (half / "checkpoint-9").mkdir()
    (half / "checkpoint-9" / "latest").write_text("global_step9")
    for run in (*made, half, again, again):
        engine.train(run)
    change_job(again, seed=7)
    engine.train(again)
    return folder


def _put_nan(model: Path, to: Path) -> None:
    from safetensors.torch import load_file, save_file

    shutil.copytree(model, to)
    state = load_file(to / "model.safetensors")
    state["model.norm.weight"][0] = float("nan")
    save_file(state, to / "model.safetensors", metadata={"format": "pt"})


def _in_bf16(model: Path, to: Path) -> Path:
    import torch
    from transformers import AutoModelForCausalLM

    shutil.copytree(model, to)
    AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).save_pretrained(to)
    return to


def _bloom(tokenizer: Path, to: Path) -> Path:
    """Writes a model of a family that lets packed samples see each other, and returns where."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    tokens = AutoTokenizer.from_pretrained(tokenizer)
    tokens.save_pretrained(to)
    config = AutoConfig.for_model("bloom", vocab_size=len(tokens), hidden_size=32, n_layer=2, n_head=2)
    AutoModelForCausalLM.from_config(config, attn_implementation="eager").save_pretrained(to)
    return to


def _summary(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return found


# What one run leaves


@pytest.mark.parametrize(
    "name",
    ["zero1", "zero2", "zero3", "offload", "lora2", "lora3", "kept", "half", "packed", "padded"],
)
def test_every_configuration_trains_to_its_end(runs: Path, name: str) -> None:
    assert codes(runs / name) == [[0, 0]], said(runs / name)[-3000:]
    summary = _summary(runs / name)
    assert summary["steps"] == 3
    measured = [rank["data_wait_s"] for rank in summary["measured"]["ranks"]]
    assert len(measured) == 2
    assert all(0 <= wait < summary["measured"]["step_s"] for wait in measured)


def test_zero_1_2_and_3_compute_the_same_losses(runs: Path) -> None:
    two, three, offload = (list(losses(runs / name).values()) for name in ("zero2", "zero3", "offload"))
    assert three == pytest.approx(two, rel=1e-3)
    assert offload == pytest.approx(two, rel=1e-3)


def test_the_final_model_loads_in_one_process_and_has_a_tokenizer(runs: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    for name in ("zero2", "zero3"):
        model = AutoModelForCausalLM.from_pretrained(runs / name / "final")
        assert not any(parameter.isnan().any() for parameter in model.parameters())
        assert len(AutoTokenizer.from_pretrained(runs / name / "final")) > 100
        assert not (runs / name / "final" / "training_args.bin").exists()  # a pickle with paths of this machine


def test_the_final_model_has_dtype_and_cache_of_its_base(runs: Path, root: Path) -> None:
    final, base = runs / "fp32" / "final", root / "half-model"
    assert {str(tensor.dtype) for tensor in tensors(final).values()} == {"torch.bfloat16"}
    configs = [json.loads((folder / "config.json").read_text()) for folder in (final, base)]
    assert [config["dtype"] for config in configs] == ["bfloat16", "bfloat16"]
    assert configs[0].get("use_cache", True)
    assert {str(tensor.dtype) for tensor in tensors(runs / "zero2" / "final").values()} == {"torch.float32"}


def test_a_final_folder_without_the_weights_ends_the_run_with_an_error(runs: Path) -> None:
    assert codes(runs / "parallel")[0][0] == 1
    assert "final does not hold the trained model" in said(runs / "parallel")
    assert not (runs / "parallel" / "summary.json").exists()


def test_the_final_adapters_of_zero_2_and_3_hold_every_matrix(runs: Path) -> None:
    from safetensors.torch import load_file

    two, three = (load_file(runs / name / "final" / "adapter_model.safetensors") for name in ("lora2", "lora3"))
    assert two.keys() == three.keys()
    assert len(two) == 2 * 7 * 2  # layers × linear layers × two matrices
    assert {name: tuple(value.shape) for name, value in two.items()} == {k: tuple(v.shape) for k, v in three.items()}


def test_a_checkpoint_is_marked_whole_and_old_ones_go(runs: Path) -> None:
    checkpoints = RunDir(runs / "zero2").checkpoints()
    assert [step for step, _ in checkpoints] == [2, 3]
    folder = checkpoints[-1][1]
    record = json.loads((folder / "complete.json").read_text())
    files, data, checksums = record.pop("files"), record.pop("data"), record.pop("checksums")
    assert checksums.keys() == files.keys()
    assert isinstance(record.pop("crc32"), int)
    assert record == {
        "step": 3,
        "world_size": 2,
        "zero_stage": 2,
        "micro_batch": 2,
        "grad_accum": 1,
        "sp": 1,
        "tp": 1,
        "ep": 1,
        "optimizer": "adamw",
        "rope_scaling": None,
        "attn": "sdpa",
        "only_model": False,
    }
    assert files == {
        path.relative_to(folder).as_posix(): path.stat().st_size
        for path in folder.rglob("*")
        if path.is_file() and path.name != "complete.json"
    }
    assert len(data) == 16


def test_evaluations_are_logged_with_their_step(runs: Path) -> None:
    evaluated = {line["step"] for line in read_jsonl(runs / "zero2" / "metrics.jsonl") if "eval_loss" in line}
    assert evaluated == {2, 3}
    assert _summary(runs / "zero3")["eval_loss"] == pytest.approx(7.5, abs=0.5)


@pytest.mark.parametrize("name", ["padded", "packed"])
def test_the_evaluation_is_a_mean_over_tokens(runs: Path, demo: Path, name: str) -> None:
    """As computed by hand, one sample at a time, though the last of 11 samples leave a rank without."""
    import torch
    from transformers import AutoModelForCausalLM

    from dstrain.train.data.prepare import prepare
    from dstrain.train.tokenizer import load_tokenizer

    given = read(RunDir(runs / name))
    job = replace(given.job, packing=False)
    samples = prepare(job, load_tokenizer(job, job.model), training=False).dataset
    model = AutoModelForCausalLM.from_pretrained(runs / name / "final", dtype=torch.float32).eval()
    total, targets = 0.0, 0
    for sample in samples:
        ids, labels = torch.tensor([sample["input_ids"]]), torch.tensor([sample["labels"]])
        number = int((labels[:, 1:] != -100).sum())
        total += float(model(input_ids=ids, labels=labels).loss.detach()) * number
        targets += number
    assert len(samples) == 11
    assert _summary(runs / name)["eval_loss"] == pytest.approx(total / targets, rel=1e-6)
    (logged,) = (line for line in read_jsonl(runs / name / "metrics.jsonl") if "eval_loss" in line)
    assert logged["eval_tokens"] == targets


def test_packing_is_refused_before_the_first_step_where_samples_would_see_each_other(runs: Path) -> None:
    assert codes(runs / "bloom") == [[3, 3]]
    assert "packing: BloomForCausalLM with attn: eager mixes the samples of a packed row" in said(runs / "bloom")
    assert not losses(runs / "bloom")


def test_a_health_rule_saves_and_ends_the_run_on_all_ranks(runs: Path) -> None:
    assert codes(runs / "stopped") == [[1, 1]]
    assert "WARNING: step 1: the first loss is" in said(runs / "stopped")
    assert "Error: the health rule first_loss ended the run: step 1: the first loss is" in said(runs / "stopped")
    assert "Traceback" not in said(runs / "stopped") + said(runs / "stopped", rank=1)
    assert (runs / "stopped" / "checkpoint-1" / "latest").exists()
    (told,) = [line for line in read_jsonl(runs / "stopped" / "health.jsonl") if line["rule"] == "first_loss"]
    assert (told["step"], told["severity"], told["action"]) == (1, "warning", "stop")


def test_the_checks_before_the_first_step_find_what_the_run_meets(runs: Path) -> None:
    found = {name: load_json(Preflight, RunDir(runs / name).preflight) for name in ("nan", "stopped", "again")}
    failed = {name: [check.name for check in one.checks if not check.passed] for name, one in found.items()}
    assert failed == {"nan": [CheckName.GRADIENTS], "stopped": [CheckName.FIRST_LOSS], "again": []}
    assert "not finite on ranks 0, 1: the gradient of " in said(runs / "nan")
    assert [check.name for check in found["again"].checks] == [CheckName.WORST_BATCH, CheckName.GRADIENTS]
    assert (found["nan"].step, found["again"].step) == (0, 3)  # a resumed run repeats what depends on memory


def test_steps_in_a_row_without_finite_gradients_end_the_run(runs: Path) -> None:
    assert codes(runs / "steep") == [[1, 1]]
    assert "the gradients of 3 steps in a row" in said(runs / "steep")
    stop = [line for line in read_jsonl(runs / "steep" / "health.jsonl") if line["action"] == "stop"]
    assert [(line["rule"], line["since"]) for line in stop] == [("stop_on_nonfinite", 1)]
    assert "Traceback" not in said(runs / "steep") + said(runs / "steep", rank=1)


def test_a_model_that_is_not_finite_is_not_saved_and_no_success(runs: Path) -> None:
    assert codes(runs / "nan") == [[1, 1]]
    assert "the model is lost at step 3: model.norm.weight is not finite (NaN or infinite)" in said(runs / "nan")
    assert not (runs / "nan" / "final").exists()
    assert not any(is_whole(folder) for _, folder in RunDir(runs / "nan").checkpoints())


def test_a_run_that_may_not_gather_says_how_to_get_the_model(runs: Path) -> None:
    assert not (runs / "kept" / "final").exists()
    assert "dstrain.train.checkpoints.export" in said(runs / "kept")
    assert _summary(runs / "kept")["final"] is None


def test_nothing_but_rank_0_talks(runs: Path) -> None:
    assert "step 3/3, loss" in said(runs / "zero2")
    assert "loss" not in said(runs / "zero2", rank=1)


def test_a_wrong_job_is_said_once_without_a_traceback(runs: Path) -> None:
    assert codes(runs / "bad") == [[3, 3]]
    assert 'did you mean "cosine"?' in said(runs / "bad")
    assert "Traceback" not in said(runs / "bad") + said(runs / "bad", rank=1)
    assert "cosin" not in said(runs / "bad", rank=1)


def test_a_loss_that_is_not_a_number_is_null_with_its_name_and_alarms(runs: Path) -> None:
    line = lines(runs / "nan")[0]
    assert (line["loss"], line["loss_nonfinite"]) == (None, "nan")
    assert "NaN" not in (runs / "nan" / "metrics.jsonl").read_text()
    assert {"nonfinite_step", "nonfinite_loss"} <= {line["rule"] for line in read_jsonl(runs / "nan" / "health.jsonl")}
    assert said(runs / "nan").count("WARNING: loss is nan") == 1


def test_a_resume_at_the_last_step_trains_no_further(runs: Path) -> None:
    assert codes(runs / "again") == [[0, 0]] * 3
    assert list(losses(runs / "again")) == [1, 2, 3]
    assert _summary(runs / "again")["steps"] == 3


def test_a_resume_on_other_samples_says_so_once(runs: Path) -> None:
    assert said(runs / "again").count("checkpoint-3 was trained on different samples or in a different order") == 1


def test_a_half_written_checkpoint_is_skipped_and_named(runs: Path) -> None:
    assert "checkpoint-9 was not written to its end (no complete.json): skipped" in said(runs / "half")
    assert "resuming from" not in said(runs / "half")
    assert (runs / "half" / "checkpoint-9").exists()


def test_the_report_of_a_run_says_what_its_ranks_did(runs: Path) -> None:
    reports = {
        name: report(read_run(RunDir(runs / name)), now=0) for name in ("zero2", "nan", "steep", "stopped", "again")
    }
    ends = {name: (one.stage, one.step) for name, one in reports.items()}
    assert ends.pop("steep")[0] == "unknown"  # these runs have no launcher, which alone says that one failed
    assert ends == {"zero2": ("ended", 3), "nan": ("unknown", 3), "stopped": ("unknown", 1), "again": ("ended", 3)}
    assert [mark.rule for mark in reports["stopped"].marks] == ["first_loss"]
    assert {"nonfinite_loss", "nonfinite_grad_norm"} & {mark.rule for mark in reports["nan"].marks}
    assert not reports["nan"].losses
    assert [step for step, _ in reports["zero2"].evaluations] == [2, 3]
    assert reports["zero2"].checkpoints == (2, 3)
    assert len(reports["zero2"].recorded.states) == RANKS
    assert [one.from_step for one in reports["again"].restarts] == [3, 3]
    assert all(lines_of(one) for one in reports.values())


# Model states


def _shapes(demo: Path) -> dict[str, int]:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(demo / "model"))
    return {name: parameter.numel() for name, parameter in model.named_parameters()}


def _states(folder: Path) -> list[dict[str, int]]:
    found: list[dict[str, int]] = json.loads((folder / "states.json").read_text())["ranks"]
    return found


@pytest.mark.parametrize("name", ["zero1", "zero2"])
def test_model_states_of_zero_1_and_2_are_the_plans_on_each_rank(runs: Path, demo: Path, name: str) -> None:
    counts = trained(read_model(str(demo / "model")), Method.FULL, Lora())
    params, way = counts.trainable, changed(DEFAULTS, zero_stage=int(name[-1]))
    kept = engine.gradients_by_rank(read_model(str(demo / "model")), way, RANKS)
    for rank, states in enumerate(_states(runs / name)):
        assert states["params"] == pytest.approx(2 * params, rel=5e-3)
        assert states["optimizer"] == pytest.approx(12 * params / RANKS, rel=5e-3)
        assert states["grads"] == pytest.approx(2 * kept[rank], rel=5e-3)
        assert states["host"] == 0


def test_model_states_of_zero_3_are_16_bytes_for_each_parameter_over_the_ranks(runs: Path, demo: Path) -> None:
    params = sum(_shapes(demo).values())
    for states in _states(runs / "zero3"):
        assert states["params"] + states["optimizer"] + states["grads"] == pytest.approx(16 * params / RANKS, rel=5e-3)
        assert states["trainable"] == params


def test_an_offloaded_optimizer_is_counted_as_host_memory(runs: Path, demo: Path) -> None:
    params = sum(_shapes(demo).values())
    for states in _states(runs / "offload"):
        assert states["optimizer"] == 0
        assert states["host"] == pytest.approx(16 * params / RANKS, rel=5e-3)  # with fp32 gradients


def test_an_adapter_has_gradients_and_optimizer_states_only_for_itself(runs: Path) -> None:
    for states in _states(runs / "lora2"):
        assert states["params"] == 2 * (states["trainable"] + states["frozen"])
        assert states["optimizer"] == pytest.approx(12 * states["trainable"] / RANKS, rel=5e-3)


# SwanLab


def test_two_ranks_make_one_swanlab_run_in_the_run_directory(runs: Path, engine: Engine) -> None:
    assert len(list((runs / "half" / "swanlog").glob("run-*/*.swanlab"))) == 1
    assert _summary(runs / "half")["swanlab_mode"] == "offline"
    assert not (engine.home / "swanlog").exists()


def test_no_secret_reaches_swanlabs_files(runs: Path) -> None:
    for file in (runs / "half").rglob("*"):
        if file.is_file() and file.name != ".secrets":
            assert b"do-not-tell" not in file.read_bytes(), file


def test_trackers_get_the_report_of_the_run(runs: Path) -> None:
    (text,) = (runs / "half" / "swanlog").glob("run-*/media/text/*")
    assert text.read_text().startswith("# success after 3 steps\n\n|  | planned | measured | off |")
    (table,) = (runs / "half" / "swanlog").glob("run-*/media/echarts/*")
    assert "time of a step" in table.read_text()
    (events,) = (runs / "zero1" / "tensorboard").glob("*/events.*")
    assert b"report/text_summary" in events.read_bytes()
    assert b"# success after 3 steps" in events.read_bytes()


def test_a_swanlab_that_cannot_start_online_goes_on_offline(runs: Path) -> None:
    assert said(runs / "padded").count("SwanLab: online failed to start") == 1
    assert _summary(runs / "padded")["swanlab_mode"] == "offline"


def test_sigterm_while_blocked_in_a_collective_keeps_swanlabs_data(root: Path, demo: Path, engine: Engine) -> None:
    """Rank 1 stands still, so rank 0 waits in a collective; it must leave within 5 s, with its curves on disk."""
    folder = make_run(root / "terminated", demo, max_steps=100_000, monitor={"sinks": ["swanlab"], "mode": "offline"})
    took_s: list[float] = []

    def has_left() -> bool:
        if len(read_jsonl(folder / "metrics.jsonl")) < 3:
            return False
        waiting, still = map(psutil.Process, engine.pids)
        still.suspend()
        time.sleep(1.5)
        began = time.monotonic()
        waiting.terminate()
        psutil.wait_procs([waiting], timeout=10)
        took_s.append(time.monotonic() - began)
        return True

    found = engine.run("dstrain.train", folder, log=Path(f"{folder}.log"), is_over=has_left)
    assert found == [SIGTERM_EXIT_CODE, -signal.SIGKILL], said(folder)[-2000:]
    assert took_s[0] < 5
    (file,) = (folder / "swanlog").glob("run-*/*.swanlab")
    assert b"train/loss" in file.read_bytes()


# Export


def test_an_exported_adapter_is_merged_into_its_base(runs: Path, root: Path, demo: Path, engine: Engine) -> None:
    out = root / "merged"
    assert engine.export(runs / "lora3", out, "--dtype", "fp32") == 0, said(out)
    merged, base = tensors(out), tensors(demo / "model")
    assert merged.keys() == base.keys()
    assert not merged["model.layers.0.mlp.up_proj.weight"].equal(base["model.layers.0.mlp.up_proj.weight"])
