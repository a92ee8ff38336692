"""Loads everything that a rank needs before its first step, in the order that works."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import deepspeed  # type: ignore[import-untyped]
import torch
import torch.distributed as dist
import transformers
from transformers import TrainingArguments

from dstrain.choices import Precision
from dstrain.errors import EnvironmentProblem
from dstrain.facts.cluster.cluster import Cluster
from dstrain.facts.model.model_facts import ModelFacts
from dstrain.heartbeat import Phase, Sender
from dstrain.job.schema import Job
from dstrain.monitor.callback import CountingCollator, Meter, MetricsCallback
from dstrain.monitor.metrics import Hardware, hardware
from dstrain.monitor.sinks.jsonl import JsonlFile, current_steps, read_jsonl
from dstrain.monitor.sinks.registry import Guarded
from dstrain.rundir import RunDir
from dstrain.train import rank as ranks
from dstrain.train.arguments import training_arguments
from dstrain.train.checkpoints.node_storage import shared
from dstrain.train.checkpoints.saved_model import base_config
from dstrain.train.data.collate import Collator, taken_by
from dstrain.train.data.prepare import PreparedData, prepare
from dstrain.train.measure_states import MeasureCallback
from dstrain.train.model import load_model, load_tokenizer, source_of
from dstrain.train.rank import Rank
from dstrain.train.trainer import Trainer


@dataclass(kw_only=True)
class TrainingSetup:
    """What one rank holds while it trains."""

    job: Job
    run_dir: RunDir
    """Where files go."""
    rank: Rank
    """Which rank this is."""
    arguments: TrainingArguments
    """Must outlive the model, since ZeRO-3 looks at them through a weak link."""
    group: Any
    """A gloo group of all ranks, for small gathers that touch no GPU; None with one rank."""
    tokenizer: Any
    train_data: PreparedData
    """Training data in tokens."""
    eval_data: PreparedData | None
    """Evaluation data in tokens."""
    model: Any
    """The model, partitioned already under ZeRO-3."""
    base: Mapping[str, Any]
    """The configuration of the model that training starts from."""
    against: Hardware | None
    """What MFU is measured against."""
    metrics: MetricsCallback | None = None
    """What was measured so far."""

    @classmethod
    def prepare(
        cls,
        job: Job,
        ds_config: Mapping[str, Any],
        run_dir: RunDir,
        rank: Rank,
        heartbeat: Sender,
        *,
        model: ModelFacts | None,
        cluster: Cluster | None,
    ) -> TrainingSetup:
        """Returns a rank that is ready to train.

        The process group comes first (else ZeRO-3 sees one rank), then the arguments (else it does not partition),
        then data, whose faults show in seconds, and the model last.
        """
        on_gpu = torch.cuda.is_available()
        ranks.quieten(on_terminal=rank.is_first and sys.stderr.isatty())
        group = _connect(rank, job, ds_config, heartbeat, on_gpu=on_gpu)
        transformers.set_seed(job.seed)  # adapters are drawn before the Trainer seeds
        arguments = training_arguments(job, ds_config, on_gpu=on_gpu, has_eval=job.eval_data is not None)
        source = source_of(job)
        tokenizer = load_tokenizer(job, source)
        tokens = partial(prepare, job, tokenizer, report=partial(heartbeat.count, Phase.TOKENIZING))
        train_data = tokens(data=str(job.data), training=True)
        eval_data = tokens(data=job.eval_data, training=False) if job.eval_data else None
        for prepared in (train_data, eval_data):
            for note in prepared.notes if prepared else ():
                rank.say(note)
        rank.say(f"loading {job.model}")
        heartbeat.send(0, Phase.WEIGHTS)
        loaded = load_model(job, source, ds_config, report=partial(heartbeat.count, Phase.WEIGHTS))
        heartbeat.send(0, Phase.LOADING)
        return cls(
            job=job,
            run_dir=run_dir,
            rank=rank,
            arguments=arguments,
            group=group,
            tokenizer=tokenizer,
            train_data=train_data,
            eval_data=eval_data,
            model=loaded,
            base=base_config(source, trust_remote_code=job.trust_remote_code),
            against=_against(job, model, cluster) if on_gpu else None,
        )

    @property
    def has_eval(self) -> bool:
        """Whether there is something to evaluate on."""
        return self.eval_data is not None

    def was_evaluated(self, trainer: Trainer) -> bool:
        """Returns whether the last step has an evaluation already."""
        step = trainer.state.global_step
        return any("eval_loss" in logged and logged["step"] == step for logged in trainer.state.log_history)

    def trainer(self, sinks: Sequence[Guarded], heartbeat: Sender) -> Trainer:
        """Returns the Trainer, with metrics and model-state measurements; `heartbeat` goes to the agent."""
        first = self.rank.is_first
        self.metrics = MetricsCallback(
            Meter(),
            group=self.group,
            against=self.against,
            metrics=JsonlFile(self.run_dir.metrics) if first else None,
            health=JsonlFile(self.run_dir.health) if first else None,
            sinks=sinks,
            say=self.rank.say,
        )
        collator = Collator(
            pad_token_id=int(self.tokenizer.pad_token_id), packing=self.job.packing, takes=taken_by(self.model)
        )
        trainer = Trainer(
            run_dir=self.run_dir,
            rank=self.rank,
            disk=shared(self.run_dir, self.rank, os.environ, self.group),
            save_total_limit=self.job.save_total_limit,
            stop_on_nonfinite=self.job.stop_on_nonfinite,
            metrics=self.metrics,
            heartbeat=heartbeat,
            base=self.base,
            trust_remote_code=self.job.trust_remote_code,
            group=self.group,
            data_digest=self.train_data.digest,
            model=self.model,
            args=self.arguments,
            train_dataset=self.train_data.dataset,
            eval_dataset=self.eval_data.dataset if self.eval_data else None,
            data_collator=CountingCollator(collator),
            processing_class=self.tokenizer,
        )
        trainer.add_callback(
            MeasureCallback(lambda: trainer.model_wrapped, self.run_dir, group=self.group, is_first=first)
        )
        return trainer

    def summary(self, trainer: Trainer) -> dict[str, Any]:
        """Returns what the run came to, for `summary.json`."""
        found = self.metrics
        assert found is not None
        trained = next((line for line in trainer.state.log_history[::-1] if "train_runtime" in line), {})
        train_s = trained.get("train_runtime")
        logged = current_steps(read_jsonl(self.run_dir.metrics))
        return {
            "steps": trainer.state.global_step,
            "skipped_steps": trainer.skipped_steps,
            "first_loss": next((line["loss"] for line in logged if "loss" in line), None),
            "last_loss": found.last_loss,
            "eval_loss": found.eval_loss,
            "tokens": found.total_tokens,
            "train_s": train_s,
            "tokens_per_s": found.total_tokens / train_s if train_s else None,
            "peak_bytes_per_gpu": found.peak_bytes,
            "ranks": self.rank.world_size,
        }


def _against(job: Job, model: ModelFacts | None, cluster: Cluster | None) -> Hardware | None:
    if model is None or cluster is None:
        return None
    return hardware(model, cluster.gpu, method=job.method, precision=job.precision)


def _connect(rank: Rank, job: Job, ds_config: Mapping[str, Any], heartbeat: Sender, *, on_gpu: bool) -> Any:
    """Brings up DeepSpeed's process group; returns a gloo group of all ranks, or None for a single one.

    Raises EnvironmentProblem where this node has fewer GPUs than ranks, or they cannot compute in the job's precision.
    """
    accelerator = deepspeed.accelerator.get_accelerator()
    computes = {Precision.BF16: accelerator.is_bf16_supported, Precision.FP16: accelerator.is_fp16_supported}
    if job.precision in computes and not computes[job.precision]():
        other = "fp32" if not on_gpu else "fp16" if job.precision is Precision.BF16 else "bf16"
        raise EnvironmentProblem(
            f"precision is {job.precision}, which this {'GPU' if on_gpu else 'CPU'} does not compute in",
            hint=f"precision: {other}",
        )
    if on_gpu:
        visible = torch.cuda.device_count()
        if rank.local_index >= visible:
            raise EnvironmentProblem(
                f"local rank {rank.local_index} has no GPU: {visible} are visible on this node",
                hint="Write as many slots in the hostfile as the node has GPUs.",
            )
        torch.cuda.set_device(rank.local_index)
    ranks.announce_builds(rank, ds_config, os.environ, on_gpu=on_gpu)
    heartbeat.send(0, Phase.CONNECTING)
    try:
        if not dist.is_initialized():
            deepspeed.init_distributed(auto_mpi_discovery=False, verbose=False)
    except dist.DistNetworkError:
        if rank.is_first and ranks.is_port_taken(os.environ):
            heartbeat.send(0, Phase.PORT_TAKEN)
        raise
    group = None if rank.world_size == 1 else dist.new_group(backend="gloo")
    heartbeat.send(0, Phase.LOADING)
    return group
