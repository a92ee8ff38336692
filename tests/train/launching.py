"""Run directories for tests, ranks on the CPU for them, and the real launcher."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]
QLORA = CHECKOUT / ".cache" / "qlora"
"""Where `make qlora` installs bitsandbytes."""
VIDEOS = CHECKOUT / ".cache" / "videos"
"""Where `make videos` installs what videos need."""
EXACT: Mapping[str, Any] = {
    "precision": "fp32",
    "seq_len": 256,
    "grad_accum": 2,
    "lr_scheduler_type": "constant",
    "warmup_ratio": 0.0,
    "max_grad_norm": 0.0,
}
"""A job whose steps a test can compute again: fp32, a constant rate, no clipping."""


def make_run(
    folder: Path,
    demo: Path,
    *,
    zero: Mapping[str, Any] | None = None,
    engine: Mapping[str, Any] | None = None,
    **job: Any,
) -> Path:
    """Writes a run directory for a few steps of the demo's model, and returns it; without checks, to save time."""
    folder.mkdir(parents=True)
    base: dict[str, Any] = {
        "model": str(demo / "model"),
        "data": str(demo / "train.jsonl"),
        "output_dir": str(folder),
        "seq_len": 64,
        "micro_batch": 2,
        "max_steps": 3,
        "logging_steps": 1,
        "learning_rate": 1e-3,
        "monitor": {"sinks": []},
        "preflight": False,
    }
    (folder / "request.json").write_text(json.dumps(base | job))
    stage3 = {"stage3_gather_16bit_weights_on_model_save": True, "stage3_param_persistence_threshold": "auto"}
    section = {"stage": 2, "reduce_bucket_size": "auto"} | dict(zero or {})
    config = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"},
        "fp16": {"enabled": "auto"},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": (stage3 if section["stage"] == 3 else {}) | section,
        **(engine or {}),
    }
    (folder / "ds_config.resolved.json").write_text(json.dumps(config))
    return folder


def change_job(folder: Path, **job: Any) -> None:
    """Changes the job of a run directory."""
    request = folder / "request.json"
    request.write_text(json.dumps(json.loads(request.read_text()) | job))


def without_dropout(model: Path, to: Path) -> Path:
    """Copies a model so that its losses do not depend on random states, and returns the copy."""
    shutil.copytree(model, to)
    config = to / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"attention_dropout": 0.0}))
    return to


def environment(home: Path) -> dict[str, str]:
    """Returns the environment of ranks: CPU, offline, and nobody's SwanLab login."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SWANLAB_", "WANDB_"))}
    return kept | {
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "HOME": str(home),
        "PYTHONPATH": str(CHECKOUT),
        "TORCH_EXTENSIONS_DIR": os.environ.get(
            "TORCH_EXTENSIONS_DIR", str(Path.home() / ".cache" / "dstrain-test-extensions")
        ),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }


def command(home: Path, program: Sequence[str]) -> list[str]:
    """Returns the launcher's command line for two ranks on this machine."""
    hostfile = home / "hostfile"
    hostfile.write_text("localhost slots=2\n")
    return [
        *(sys.executable, "-m", "deepspeed.launcher.runner", "--hostfile", str(hostfile), "--no_ssh"),
        *("--node_rank", "0", "--master_addr", "127.0.0.1", "--master_port", str(free_port()), "--no_local_rank"),
        *program,
    ]


def free_port() -> int:
    """Returns a port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def losses(folder: Path) -> dict[int, float | None]:
    """Returns the loss of each step, the last word on it."""
    from dstrain.monitor.metrics import current_steps, read_jsonl

    return {
        line["step"]: line["loss"] for line in current_steps(read_jsonl(folder / "metrics.jsonl")) if "loss" in line
    }


def truncate_newest(folder: Path) -> None:
    """Halves an optimizer shard of the newest checkpoint, as a power cut may."""
    newest = max(folder.glob("checkpoint-*"), key=lambda path: int(path.name.rpartition("-")[2]))
    shard = next(newest.glob("global_step*/*optim_states.pt"))
    os.truncate(shard, shard.stat().st_size // 2)


def copy_half(checkpoint: Path, to: Path) -> None:
    """Makes a checkpoint that looks as if a kill had cut its writing short."""
    shutil.copytree(checkpoint, to)
    (to / "complete.json").unlink()


def codes(folder: Path) -> list[list[int]]:
    """Returns the exit codes of all starts of `Engine.train` on a run directory: those of the ranks for each."""
    return [json.loads(line) for line in Path(f"{folder}.codes").read_text().splitlines()]


def require_resumed(cut: Path, whole: Path) -> None:
    """Asserts that a run that was killed and has gone on ends as an undisturbed one, to the last bit."""
    assert codes(whole) == [[0, 0]], said(whole)[-3000:]
    assert codes(cut)[0][0] == -signal.SIGKILL
    assert codes(cut)[1] == [0, 0], said(cut)[-3000:]
    assert losses(cut) == losses(whole)
    final, expected = tensors(cut / "final"), tensors(whole / "final")
    assert final.keys() == expected.keys()
    assert all(final[key].equal(expected[key]) for key in expected)


def said(folder: Path, rank: int = 0) -> str:
    """Returns what a rank printed in all starts of `Engine.train` on a run directory."""
    return Path(f"{folder}.log.{rank}").read_text()


def tensors(folder: Path) -> dict[str, Any]:
    """Returns the weights in a folder by name."""
    from safetensors.torch import load_file

    (weights,) = folder.glob("*model.safetensors")  # of a model or an adapter
    found: dict[str, Any] = load_file(weights)
    return found


def lines(folder: Path) -> list[dict[str, Any]]:
    """Returns the lines of a run's metrics that have a loss."""
    from dstrain.monitor.metrics import read_jsonl

    return [line for line in read_jsonl(folder / "metrics.jsonl") if "loss" in line]


def evaluations(folder: Path) -> dict[int, float]:
    """Returns the evaluation loss of a run by step."""
    from dstrain.monitor.metrics import read_jsonl

    return {line["step"]: line["eval_loss"] for line in read_jsonl(folder / "metrics.jsonl") if "eval_loss" in line}


def require_packed_as_alone(folder: Path) -> None:
    """Asserts that the check before the first step compared a packed row with its samples, and found the same loss."""
    checks = {check["name"]: check for check in json.loads((folder / "preflight.json").read_text())["checks"]}
    assert checks["packing"]["passed"], checks["packing"]
    assert checks["packing"]["figures"]["packed"] == pytest.approx(checks["packing"]["figures"]["alone"], rel=1e-5)


def require_losses(logged: Sequence[Mapping[str, Any]], optimizer: Any, losses: Callable[[], Sequence[Any]]) -> None:
    """Asserts that logged losses are the means over tokens of a model that an optimizer steps by them.

    `losses`: the loss of each sample and the number of its tokens, now.
    """
    for line in logged:
        found = losses()
        expected = sum(loss * count for loss, count in found) / sum(count for _, count in found)
        assert line["loss"] == pytest.approx(float(expected.detach()), rel=1e-4)
        optimizer.zero_grad()
        expected.backward()
        optimizer.step()


def short_talks(demo: Path) -> list[list[dict[str, str]]]:
    """Returns 26 conversations of the demo, with short answers of different lengths."""
    talks = [json.loads(line)["messages"] for line in (demo / "train.jsonl").read_text().splitlines()]
    return sorted(talks, key=lambda talk: len(talk[-1]["content"]))[40:66]


def write_parts(folder: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Writes 8 rows to train on, which are a step, and the others to evaluate."""
    for name, part in (("train", rows[:8]), ("eval", rows[8:])):
        (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in part))
