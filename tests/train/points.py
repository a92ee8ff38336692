"""Points of the planner's space as gen-config's files, on CPU ranks with a tiny model of the planned family."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from dstrain.choices import Method, Precision
from dstrain.config.files import generated
from dstrain.config.jsonc import Change
from dstrain.facts import probe
from dstrain.facts.cluster import cluster as clusters
from dstrain.facts.cluster import gpus, hostfile
from dstrain.facts.cluster.cluster import Origin
from dstrain.facts.model import aliases
from dstrain.facts.model.model_facts import ModelFacts
from dstrain.facts.workload import Workload
from dstrain.job.file import read_job
from dstrain.launch.launch import write_inputs
from dstrain.launch.prepare.prepare import PreparedRun, prepare
from dstrain.plan.configuration import DEFAULTS, Configuration, changed
from dstrain.plan.estimate import assess
from dstrain.plan.estimate_records import Plan
from dstrain.plan.labels import label
from dstrain.plan.memory.peak import Detail
from dstrain.plan.search.search_space import global_batch
from dstrain.train.checkpoints.saved_model import family_of
from tests.train.engine import Engine
from tests.train.launching import QLORA, codes, losses, said, tensors

STEPS = 3
SIZES: Mapping[str, Any] = {
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 128,
    "moe_intermediate_size": 32,
    "max_position_embeddings": 2048,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
}
"""What a configuration says of these keys, in a tiny model."""
VISION: Mapping[str, Any] = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 2,
    "out_hidden_size": 128,
    "num_position_embeddings": 64,
    "deepstack_visual_indexes": [0, 1],
}
ROPE: dict[str, Any] = {"rope_scaling": None, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}


def tiny_model(alias: str, tokenizer: Path, to: Path) -> Path:
    """Writes a random model of a known model's family and settings, in tiny sizes, with another model's tokenizer."""
    shutil.copytree(tokenizer, to)
    (to / "model.safetensors").unlink()
    tokens = json.loads((to / "config.json").read_text())
    found = aliases.resolve(alias)
    assert found is not None
    known = _plain(found[1].config)
    text = known.get("text_config", known)
    text |= {key: value for key, value in SIZES.items() if key in text} | ROPE
    text |= {key: tokens[key] for key in ("vocab_size", "pad_token_id", "bos_token_id", "eos_token_id")}
    if "kv_lora_rank" in text:  # each head has its own keys, made of a small common state
        text |= {"num_key_value_heads": text["num_attention_heads"], "n_group": 2, "topk_group": 1}
    if "vision_config" in known:
        text["rope_parameters"] = ROPE["rope_parameters"] | {"mrope_section": [6, 5, 5]}
        known["vision_config"] |= {key: value for key, value in VISION.items() if key in known["vision_config"]}
        known |= {"image_token_id": 5, "video_token_id": 6, "vision_start_token_id": 7, "vision_end_token_id": 8}
    config = AutoConfig.for_model(**known)
    torch.manual_seed(0)
    family_of(config).from_config(config).float().save_pretrained(to)
    return to


def _plain(value: Any) -> Any:
    return {key: _plain(item) for key, item in value.items()} if isinstance(value, Mapping) else value


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A configuration for the ranks of a machine that plays several nodes."""

    alias: str
    workload: Workload
    configuration: Configuration

    @property
    def title(self) -> str:
        return f"{self.alias}: {label(self.configuration)} on {self.workload.cluster.num_gpus} ranks"

    @property
    def kind(self) -> tuple[Any, ...]:
        """What losses depend on: everything else is how they are computed."""
        batch = self.configuration.batch
        return self.alias, self.configuration.model.method, batch.seq_len, batch.packing, batch.rope_scaling

    @property
    def alone(self) -> Point:
        """The same training by one rank without ZeRO, in micro-batches of one sample."""
        whole = global_batch(self.workload.cluster, self.configuration)
        model, batch = self.configuration.model, self.configuration.batch
        kept = {"method": model.method, "packing": batch.packing, "rope_scaling": batch.rope_scaling}
        configuration = changed(
            DEFAULTS, seq_len=batch.seq_len, precision=Precision.FP32, micro_batch=1, grad_accum=whole, **kept
        )
        workload = workload_of(self.workload.model, 1, 1)
        return Point(alias=self.alias, workload=workload, configuration=configuration)


def workload_of(model: ModelFacts, nodes: int, per_node: int, *, nvme: Path | None = None) -> Workload:
    """Returns a model and the CPU ranks of a machine that plays nodes, with a folder for offloaded states."""
    cluster = clusters.describe(
        gpu=gpus.gpu(gpus.CPU),
        gpu_origin=Origin.GIVEN,
        gpus=nodes * per_node,
        gpus_per_node=per_node,
        host_memory_bytes=2**36,
        nvme_path=None if nvme is None else str(nvme),
    )
    return Workload(model=model, cluster=cluster)


def write(point: Point, folder: Path, data: Path) -> Path:
    """Writes the files of a point as gen-config does and its run directory as `dstrain run` does; returns that."""
    write_files(point, folder, data)
    return write_run(folder, f"max_steps={STEPS}").run_dir.path


def write_files(point: Point, folder: Path, data: Path) -> None:
    """Writes the files of a point as gen-config does."""
    folder.mkdir()
    workload, configuration = point.workload, point.configuration
    plan = Plan(
        chosen=assess(workload, configuration, detail=Detail.QUICK),
        rejected=(),
        num_estimated=1,
        global_batch=global_batch(workload.cluster, configuration),
        learning_rate=1e-3,
        reasons=(),
        notes=(),
    )
    hosts = hostfile.expand(f"localhost:{workload.cluster.num_gpus}", None)
    job = {"model": workload.model.source, "data": str(data), "eval_data": None, "hub": "hf", "output_dir": "output"}
    for name, text in generated(plan, workload, hosts, template_dir=None, job=job).items():
        (folder / name).write_text(text)


def write_run(folder: Path, *overrides: str, changes: Sequence[Change] = ()) -> PreparedRun:
    """Writes the run directory of a folder's job as `dstrain run` does, with overrides as of `--set`, and changes of
    the DeepSpeed configuration."""
    file = read_job(folder / "job.yaml", ["logging_steps=1", "monitor.sinks=[]", *overrides])
    prepared = prepare(file, {"DS_ACCELERATOR": "cpu"}, changes=changes)
    prepared.run_dir.path.mkdir(exist_ok=True)
    write_inputs(prepared, job=prepared.job, hostfile=(folder / "hostfile").read_text(), secrets={})
    return prepared


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """Trains points, and one rank without ZeRO for each kind of them."""

    folder: Path
    demo: Path
    engine: Engine
    models: dict[str, ModelFacts] = field(default_factory=dict)
    alone: dict[tuple[Any, ...], Path] = field(default_factory=dict)

    def model(self, alias: str) -> ModelFacts:
        """Returns the tiny model that stands for a known one."""
        if alias not in self.models:
            place = tiny_model(alias, self.demo / "model", self.folder / alias)
            self.models[alias] = probe.read_model(str(place))
        return self.models[alias]

    def train(self, point: Point, name: str) -> Path:
        """Returns the run directory of a point whose ranks have ended."""
        with pytest.MonkeyPatch.context() as patch:
            if point.configuration.model.method is Method.QLORA:
                patch.setattr(sys, "path", [*sys.path, str(QLORA)])  # the checks before a launch look for bitsandbytes
            place = write(point, self.folder / name, self.demo / "train.jsonl")
        self.engine.train(place, ranks=point.workload.cluster.num_gpus)
        return place

    def trains_as_one_rank_does(self, point: Point, name: str) -> None:
        """Asserts that all ranks end well, with the losses and the final weights of one rank without ZeRO."""
        place = self.train(point, name)
        assert codes(place) == [[0] * point.workload.cluster.num_gpus], f"{point.title}\n{said(place)[-3000:]}"
        kind = (point.kind, global_batch(point.workload.cluster, point.configuration))
        if kind not in self.alone:
            alone = self.train(point.alone, f"alone {len(self.alone)}")
            assert codes(alone) == [[0]], f"{point.alone.title}\n{said(alone)[-3000:]}"
            self.alone[kind] = alone
        assert losses(place) == pytest.approx(losses(self.alone[kind]), rel=1e-4), (
            f"{point.title}: {losses(place)} {losses(self.alone[kind])}"
        )
        whole, expected = tensors(place / "final"), tensors(self.alone[kind] / "final")
        assert set(whole) == set(expected), point.title
        for key, weight in whole.items():
            if weight.shape != expected[key].shape:
                # Transformers saves Qwen3-VL's experts as they are used, and under ZeRO-3 as the hub has them
                weight = weight.transpose(1, 2)
            assert weight.float().allclose(expected[key].float(), rtol=1e-2, atol=1e-3), f"{point.title}: {key}"


def needs_bitsandbytes(need: Any) -> None:
    """Skips a test if `make qlora` has not run."""
    need((QLORA / "bitsandbytes").is_dir(), "bitsandbytes is not installed: make qlora")
