"""How each tool of `benchmarks/peers.py` is installed and started: dstrain, TRL and LLaMA-Factory, each in its own way.

Every tool reads the same model, conversations and DeepSpeed configuration, and its ranks start by the same launcher.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dstrain.paths import python

RANKS = 2
POLL_S = 0.2
REPOSITORY = Path(__file__).resolve().parents[1]
LEARNING_RATE = 1e-3

TRL = ("trl==1.16.0",)
LLAMA_FACTORY = (
    "llamafactory==0.9.5", "transformers==5.6.0", "tokenizers==0.22.2", "huggingface_hub==1.5.0", "accelerate==1.11.0",
    "datasets==4.0.0", "peft==0.18.1", "trl==0.24.0", "omegaconf==2.4.0", "antlr4-python3-runtime==4.9.3",
    "tyro==0.8.14", "docstring-parser==0.18.0", "shtab==1.13.0", "typeguard==4.6.1", "httpx==0.28.1",
    "httpcore==1.0.9", "h11==0.16.0", "anyio", "sniffio",
)  # fmt: skip
"""The newest release, the newest packages that it allows, and what those need beyond dstrain's environment."""
_NO_AUDIO = '"""In place of torchaudio, which LLaMA-Factory imports, and whose wheel on PyPI needs CUDA."""\n'


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One job that every tool does."""

    folder: Path
    """Holds `model`, `data` and what `dstrain gen-config` writes, and takes what the tools write."""
    precision: str
    """`bf16` or `fp32`."""
    seq_len: int
    """Tokens of a packed row."""
    micro_batch: int
    """Rows of a micro-batch."""
    grad_accum: int
    steps: int
    """Optimizer steps, those of the warmup included."""
    logging_steps: int
    """Steps from one log to the next, which are those of a round."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A tool that trains."""

    name: str
    packages: tuple[str, ...]
    """What its environment has of its own; none: it runs in that of dstrain."""
    command: Callable[[Case, str], list[str]]
    """Returns the command of a case, given the Python of the environment."""
    attention: str
    """How it keeps the samples of a row apart on a CPU."""


def interpreter(tool: Tool, folder: Path) -> str:
    """Returns the Python of a tool's environment below a folder, which is made if it is missing.

    It has its own packages over those of the environment that runs this program, so that torch is the same.
    """
    if not tool.packages:
        return sys.executable
    environment = folder / tool.name
    program = environment / "bin" / "python"
    if not (environment / "complete").exists():
        subprocess.run([sys.executable, "-m", "venv", str(environment)], check=True)
        (site,) = environment.glob("lib/python3.*/site-packages")
        (site / "base.pth").write_text("".join(f"{path}\n" for path in sys.path if path.endswith("site-packages")))
        install = [str(program), "-m", "pip", "-q", "install", "--no-compile", "--no-deps", *tool.packages]
        subprocess.run(install, check=True)
        if tool.name == "llamafactory":
            (site / "torchaudio.py").write_text(_NO_AUDIO)
        (environment / "complete").touch()
    return str(program)


def versions(tool: Tool, program: str) -> dict[str, str]:
    """Returns the releases that a tool runs with."""
    names = ("torch", "transformers", "deepspeed", "accelerate", *([tool.name] if tool.packages else []))
    code = f"import json, importlib.metadata as m; print(json.dumps({{n: m.version(n) for n in {names!r}}}))"
    found: dict[str, str] = json.loads(subprocess.check_output([program, "-P", "-c", code], text=True))
    return found


def _launched(case: Case, program: str, module: str, config: Mapping[str, Any], *words: str) -> list[str]:
    """Returns the command that runs a module on every rank with a configuration in a file, as dstrain does."""
    (case.folder / "hostfile").write_text(f"localhost slots={RANKS}\n")
    path = case.folder / f"{module}.yaml"
    path.write_text(json.dumps(config, indent=2))  # which is YAML too
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    launcher = ["--hostfile", str(case.folder / "hostfile"), "--no_ssh", "--node_rank", "0"]
    launcher += ["--master_addr", "127.0.0.1", "--master_port", str(port), "--no_local_rank"]
    return [program, "-P", "-m", "deepspeed.launcher.runner", *launcher, "--module", module, *words, str(path)]


def _trainer_arguments(case: Case, output: str) -> dict[str, Any]:
    """Returns the settings that TRL and LLaMA-Factory pass to Transformers, equal to dstrain's job."""
    return {
        "output_dir": str(case.folder / output),
        "max_steps": case.steps,
        "per_device_train_batch_size": case.micro_batch,
        "gradient_accumulation_steps": case.grad_accum,
        "learning_rate": LEARNING_RATE,
        "lr_scheduler_type": "linear",
        "optim": "adamw_torch_fused",
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
        "logging_steps": case.logging_steps,
        "save_strategy": "no",
        "report_to": "none",
        "bf16": case.precision == "bf16",
        "use_cpu": True,
        "deepspeed": str(case.folder / "ds_config.json"),
    }


def by_dstrain(case: Case, program: str, **more: Any) -> list[str]:
    """Returns `dstrain run`, on the job that `gen-config` has written, with keys that differ."""
    settings: dict[str, Any] = {
        "max_steps": case.steps,
        "save_steps": 10**6,
        "learning_rate": LEARNING_RATE,
        "warmup_ratio": 0,
    }
    settings |= {"lr_scheduler_type": "linear", "logging_steps": case.logging_steps, "monitor.sinks": "[]"} | more
    words = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    return [program, "-P", "-m", "dstrain.cli", "run", str(case.folder / "job.yaml"), *words]


def by_trl(case: Case, program: str) -> list[str]:
    """Returns the script of `trl sft` with packing, which is then best-fit and without padding."""
    config = _trainer_arguments(case, "trl") | {
        "model_name_or_path": str(case.folder / "model"),
        "dataset_name": str(case.folder / "data"),
        "max_length": case.seq_len,
        "packing": True,
        "assistant_only_loss": True,
        "gradient_checkpointing": False,
    }
    return _launched(case, program, "trl.scripts.sft", config, "--config")


def by_llama_factory(case: Case, program: str) -> list[str]:
    """Returns the command that `llamafactory-cli train` starts on every rank, with neat packing."""
    tags = {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}
    columns = {"messages": "messages"}
    described = {"file_name": "train.jsonl", "formatting": "sharegpt", "columns": columns, "tags": tags}
    (case.folder / "data" / "dataset_info.json").write_text(json.dumps({"demo": described}))
    config = _trainer_arguments(case, "llamafactory") | {
        "stage": "sft",
        "do_train": True,
        "finetuning_type": "full",
        "model_name_or_path": str(case.folder / "model"),
        "dataset_dir": str(case.folder / "data"),
        "dataset": "demo",
        "template": "chatml",
        "cutoff_len": case.seq_len,
        "packing": True,
        "neat_packing": True,
        "disable_gradient_checkpointing": True,
    }
    return _launched(case, program, "llamafactory.launcher", config)


TOOLS: Mapping[str, Tool] = {
    tool.name: tool
    for tool in (
        Tool(name="dstrain", packages=(), command=by_dstrain, attention="SDPA, sample by sample"),
        Tool(name="trl", packages=TRL, command=by_trl, attention="SDPA, mask over the joined rows of a micro-batch"),
        Tool(name="llamafactory", packages=LLAMA_FACTORY, command=by_llama_factory, attention="SDPA, mask over a row"),
    )
}


def make_case(folder: Path, *, zero_stage: int, precision: str, sizes: Mapping[str, int]) -> Case:
    """Makes the files of a case, by `dstrain gen-config`, beside `model` and `data/train.jsonl` in a folder."""
    batch = {name: sizes[name] for name in ("seq_len", "micro_batch", "grad_accum")}
    words = ["--model", "model", "--data", "data/train.jsonl", "--gpus", str(RANKS), "--gpu", "cpu", "--packing"]
    words += ["--zero-stage", str(zero_stage), "--precision", precision, "--seq-len", str(batch["seq_len"])]
    words += ["--micro-batch", str(batch["micro_batch"]), "--output-dir", "dstrain"]
    words += ["--global-batch", str(batch["micro_batch"] * batch["grad_accum"] * RANKS)]
    subprocess.run(python("-m", "dstrain.cli", "gen-config", *words), check=True, capture_output=True, cwd=folder)
    steps = sizes["warmup"] + sizes["rounds"] * sizes["steps"]
    return Case(folder=folder, precision=precision, steps=steps, logging_steps=sizes["steps"], **batch)


class Run:
    """A tool that trains, and waits for its turn before each round."""

    def __init__(self, tool: Tool, case: Case, program: str, settings: Mapping[str, Any]) -> None:
        """Starts the tool. `settings`: those of `peer_probe/sitecustomize.py`."""
        self._name = tool.name
        self._folder = case.folder / f"turns-{tool.name}"
        self._folder.mkdir()
        self._output = self._folder / "output"
        environment = {
            **os.environ,
            "DS_ACCELERATOR": "cpu",
            "OMP_NUM_THREADS": "1",  # a core for each rank, in every tool
            "TOKENIZERS_PARALLELISM": "false",
            "HF_HUB_OFFLINE": "1",
            "HF_DATASETS_CACHE": str(self._folder / "cache"),
            "PYTHONPATH": f"{Path(__file__).with_name('peer_probe')}:{REPOSITORY}",
            "DSTRAIN_TIMEOUTS": "hang_s=0",  # a rank that waits for its turn does not hang
            "DSTRAIN_PEERS": json.dumps({**settings, "folder": str(self._folder), "connects": bool(tool.packages)}),
        }
        with self._output.open("w") as file:
            self._process = subprocess.Popen(
                tool.command(case, program),
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                cwd=case.folder,
            )

    def round(self, number: int) -> list[dict[str, float]]:
        """Lets the tool train for a round and returns what each rank measured. Raises RuntimeError if it fails."""
        (self._folder / f"go{number}").touch()
        paths = [self._folder / f"round{number}-rank{rank}.json" for rank in range(RANKS)]
        while not all(path.exists() for path in paths):
            if self._process.poll() is not None:
                end = self._output.read_text(encoding="utf-8")[-3000:]
                raise RuntimeError(f"{self._name} exits with {self._process.returncode}:\n{end}")
            time.sleep(POLL_S)
        return [json.loads(path.read_text(encoding="utf-8")) for path in paths]

    def wait(self) -> None:
        """Waits for the end of the tool."""
        self._process.wait()

    def stop(self) -> None:
        """Ends the tool, if it has not ended."""
        self._process.terminate()
        self._process.wait()
