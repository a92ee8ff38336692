"""Loads everything that a rank needs before its first step, in the order that works."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import deepspeed  # type: ignore[import-untyped]
import torch
import torch.distributed as dist
import transformers
from torch.distributed.distributed_c10d import Store
from torch.distributed.rendezvous import register_rendezvous_handler, rendezvous
from transformers import TrainingArguments

from dstrain.choices import Precision, Task
from dstrain.errors import EnvironmentProblem
from dstrain.facts.cluster.cluster import Cluster
from dstrain.facts.model.model_facts import ModelFacts
from dstrain.heartbeat import MARK, Phase, Sender, run_of
from dstrain.job import limits
from dstrain.job.schema import Job
from dstrain.monitor.callback import MetricsCallback
from dstrain.monitor.collectives import Collectives
from dstrain.monitor.health.history import Facts
from dstrain.monitor.health.rules import Watch
from dstrain.monitor.meter import CountingCollator, ExpertLoads, Meter, ram_bytes, routers_of
from dstrain.monitor.metrics import Hardware, JsonlFile, current_steps, hardware, read_jsonl
from dstrain.monitor.sinks.registry import Guarded
from dstrain.monitor.windows import measurement, throughput
from dstrain.records import to_data
from dstrain.rundir import RunDir
from dstrain.train import job_data, memory
from dstrain.train import rank as ranks
from dstrain.train.adapters import note_on_base
from dstrain.train.arguments import training_arguments
from dstrain.train.checkpoints.checkpoints import shared
from dstrain.train.checkpoints.saved_model import DTYPES, base_config
from dstrain.train.checkpoints.tensor_files import load_only_tensors
from dstrain.train.data.collate import Collator, joins_rows, taken_by, without_adapter
from dstrain.train.data.media import MediaCollator
from dstrain.train.data.pairs import PairCollator
from dstrain.train.data.stream import StreamCollator
from dstrain.train.generate import SamplesCallback
from dstrain.train.memory import MeasureCallback
from dstrain.train.model import load_model
from dstrain.train.parts.dpo import DpoObjective, PairLoss
from dstrain.train.parts.objective import Objective, TokenLoss
from dstrain.train.parts.parallel import Alone, SequenceParallel, TensorParallel
from dstrain.train.parts.saving import require_weights
from dstrain.train.preflight.checks import Checks
from dstrain.train.rank import Inputs, Rank
from dstrain.train.tokenizer import source_of
from dstrain.train.trainer import Trainer

if TYPE_CHECKING:
    from dstrain.monitor.verdict import FirstSteps

_SCHEME = "dstrain"
"""Of the address under which ranks meet: as `env://`, among ranks of one run."""


class PortTaken(EnvironmentProblem):
    """The port of rank 0 belongs to another run."""


def meet(url: str, **options: Any) -> Iterator[tuple[Store, int, int]]:
    """Yields the store of the run, the rank and the number of ranks, as torch's `env://` does.

    Two runs that start at the same time may have chosen one port. A rank that met the other run's rank 0 would wait
    for its own forever.

    Raises:
        PortTaken: the store belongs to another run.
    """
    mark = run_of(os.environ.get(MARK, ""))
    for store, rank, world_size in rendezvous(url.replace(_SCHEME, "env", 1), **options):
        if rank == 0:
            store.set(_RUN, mark)
        elif store.get(_RUN).decode() != mark:
            where = f"{os.environ['MASTER_ADDR']}, port {os.environ['MASTER_PORT']}"
            raise PortTaken(f"another run uses {where}", hint="Start again, with another --master-port.")
        yield store, rank, world_size


_RUN = "dstrain/run"
register_rendezvous_handler(_SCHEME, meet)  # type: ignore[no-untyped-call]


def observed(rank: Rank, job: Job, *, on_gpu: bool) -> Collectives:
    """Observes the collectives of this rank from now on, unless the job says no.

    Call it before DeepSpeed keeps their functions.
    """
    collectives = Collectives(on_gpu=on_gpu)
    if rank.world_size > 1 and job.monitor.collectives:
        collectives.install()
    return collectives


def connect(rank: Rank, job: Job, ds_config: Mapping[str, Any], heartbeat: Sender, *, on_gpu: bool) -> Any:
    """Starts DeepSpeed's process group; returns a gloo group of all ranks, or None for a single one.

    Raises EnvironmentProblem if this node has fewer GPUs than ranks, or if they do not support the job's precision.
    """
    accelerator = deepspeed.accelerator.get_accelerator()
    computes = {Precision.BF16: accelerator.is_bf16_supported, Precision.FP16: accelerator.is_fp16_supported}
    if job.precision in computes and not computes[job.precision]():
        other = "fp32" if not on_gpu else "fp16" if job.precision is Precision.BF16 else "bf16"
        raise EnvironmentProblem(
            f"precision is {job.precision}, which this {'GPU' if on_gpu else 'CPU'} does not support",
            hint=f"precision: {other}",
        )
    if on_gpu:
        visible = torch.cuda.device_count()
        if rank.local_index >= visible:
            raise EnvironmentProblem(
                f"local rank {rank.local_index} has no GPU: {visible} are visible on this node",
                hint=f"Write slots={visible} for this node in the hostfile.",
            )
        # before the process group: NCCL takes the current device
        torch.cuda.set_device(rank.local_index)
        memory.observe()
    ranks.announce_builds(rank, ds_config, os.environ, on_gpu=on_gpu)
    heartbeat.send(0, Phase.CONNECTING)
    try:
        if not dist.is_initialized():
            deepspeed.init_distributed(auto_mpi_discovery=False, verbose=False, init_method=f"{_SCHEME}://")
    except (dist.DistNetworkError, PortTaken) as error:
        # `run` takes another port and starts again
        if isinstance(error, PortTaken) or (rank.is_first and ranks.is_port_taken(os.environ)):
            heartbeat.send(0, Phase.PORT_TAKEN)
        raise
    # beside NCCL: gathers of small objects wait for no kernel
    group = None if rank.world_size == 1 else dist.new_group(backend="gloo")
    heartbeat.send(0, Phase.LOADING)
    return group


@dataclass(kw_only=True)
class TrainingSetup:
    """The objects of one rank while it trains."""

    job: Job
    run_dir: RunDir
    rank: Rank
    arguments: TrainingArguments
    """They must outlive the model: ZeRO-3 reads them through a weak reference."""
    group: Any
    """A gloo group of all ranks, for small gathers that touch no GPU; None with one rank."""
    collectives: Collectives
    """Observes the collectives of training."""
    data: job_data.JobData
    model: Any
    """The model; ZeRO-3 has partitioned it already."""
    base: Mapping[str, Any]
    """The configuration of the base model."""
    against: Hardware | None
    """Model FLOPs and peak FLOP/s, for MFU."""
    metrics: MetricsCallback | None = None

    @classmethod
    def prepare(cls, inputs: Inputs, rank: Rank, heartbeat: Sender) -> TrainingSetup:
        """Returns a rank that is ready to train.

        The process group comes first (otherwise ZeRO-3 sees one rank), then the arguments (otherwise ZeRO-3 does not
        partition), then the data, whose errors show within seconds, and the model last.
        """
        job, ds_config = inputs.job, inputs.ds_config
        limits.require(job)
        require_weights(job, ds_config)
        on_gpu = torch.cuda.is_available()
        ranks.import_muon(ds_config)
        ranks.quieten(on_terminal=rank.is_first and sys.stderr.isatty())
        collectives = observed(rank, job, on_gpu=on_gpu)
        group = connect(rank, job, ds_config, heartbeat, on_gpu=on_gpu)
        transformers.set_seed(job.seed)  # adapters are drawn before the Trainer seeds
        arguments = training_arguments(job, ds_config, num_ranks=rank.world_size, on_gpu=on_gpu)
        source = source_of(job)
        data = job_data.load(job, source, lambda _, done, total: heartbeat.count(Phase.TOKENIZING, done, total))
        for note in data.notes:
            rank.say(note)
        _announce(job, rank)
        heartbeat.send(0, Phase.WEIGHTS)
        return cls(
            job=job,
            run_dir=inputs.run_dir,
            rank=rank,
            arguments=arguments,
            group=group,
            collectives=collectives,
            data=data,
            model=_loaded(job, source, ds_config, data.tokenizer, heartbeat),
            base=base_config(source, trust_remote_code=job.trust_remote_code),
            against=_against(job, inputs.model, inputs.cluster) if on_gpu else None,
        )

    def final_eval_loss(self, trainer: Trainer) -> float | None:
        """Evaluates the model, unless that was done after the last step, and returns its loss.

        None without evaluation data, or without a token to predict.
        """
        if self.data.eval is None:
            return None
        step = trainer.state.global_step
        if not any("eval_loss" in logged and logged["step"] == step for logged in trainer.state.log_history):
            trainer.evaluate()
        logged = [line for line in trainer.state.log_history if "eval_loss" in line and line["step"] == step]
        return float(logged[-1]["eval_loss"]) if logged and logged[-1].get("eval_tokens", 1) else None

    def trainer(self, sinks: Sequence[Guarded], heartbeat: Sender, first_steps: FirstSteps | None) -> Trainer:
        """Returns the Trainer with its callbacks; `first_steps` compares metrics with the plan, on rank 0."""
        # before anything loads a checkpoint, DeepSpeed included: a pickle can run code
        load_only_tensors()
        self.metrics = self._metrics(sinks, first_steps)
        trainer = Trainer(
            job=self.job,
            run_dir=self.run_dir,
            rank=self.rank,
            disk=shared(self.run_dir, os.environ, self.group),
            metrics=self.metrics,
            heartbeat=heartbeat,
            base=self.base,
            group=self.group,
            checks=self._checks(first_steps) if self.job.preflight else None,
            data_digest=self.data.train.digest,
            objective=self._objective(),
            parallel=self._parallel(),
            model=self.model,
            args=self.arguments,
            train_dataset=self.data.train.dataset,
            eval_dataset=self.data.eval.dataset if self.data.eval else None,
            data_collator=self._whole_collator(),
            processing_class=self.data.tokenizer,
            extra_files=self.data.media_reader.files if self.data.media_reader else (),
        )
        measure = MeasureCallback(
            lambda: trainer.model_wrapped, self.run_dir, group=self.group, is_first=self.rank.is_first
        )
        trainer.add_callback(measure)
        if self.job.samples is not None:
            trainer.add_callback(SamplesCallback(trainer, self.job.samples, self.metrics))
        return trainer

    def _metrics(self, sinks: Sequence[Guarded], first_steps: FirstSteps | None) -> MetricsCallback:
        """Returns the callback that measures the run, and on rank 0 writes the figures."""
        first = self.rank.is_first
        return MetricsCallback(
            Meter(self.collectives),
            group=self.group,
            against=self.against,
            metrics=JsonlFile(self.run_dir.metrics) if first else None,
            health=JsonlFile(self.run_dir.health) if first else None,
            watch=Watch(self.job.health, self._facts()),
            first_steps=first_steps,
            sinks=sinks,
            say=self.rank.say,
            experts=ExpertLoads(routers_of(self.model), self.group),
        )

    def _checks(self, first_steps: FirstSteps | None) -> Checks:
        estimate = first_steps.record.estimate if first_steps is not None else None
        return Checks(
            job=self.job,
            run_dir=self.run_dir,
            rank=self.rank,
            group=self.group,
            tokenizer=self.data.tokenizer,
            facts=self._facts(),
            step_s=first_steps.planned_step_s if first_steps is not None else None,
            checkpoint_bytes=estimate.saved_bytes(only_model=self.job.save_only_model) if estimate else None,
        )

    def _facts(self) -> Facts:
        """Returns the facts that health rules compare with."""
        on_gpu = torch.cuda.is_available()
        return Facts(
            is_cross_entropy=self.job.task is not Task.DPO,
            vocab_size=without_adapter(self.model).config.get_text_config().vocab_size,
            max_grad_norm=self.job.max_grad_norm,
            device_bytes=torch.cuda.get_device_properties().total_memory if on_gpu else None,
            host_bytes=ram_bytes(),
        )

    def _objective(self) -> Objective:
        """Returns the loss of the job's task."""
        if self.job.task is not Task.DPO:
            return TokenLoss()
        held_out = None if self.data.eval is None else self.data.eval.digest
        return PairLoss(DpoObjective(job=self.job), train_digest=self.data.train.digest, eval_digest=held_out)

    def _parallel(self) -> Alone:
        """Returns how ranks share the work of a micro-batch."""
        if self.job.ep > 1:
            from dstrain.train.parts.expert_parallel import ExpertParallel

            return ExpertParallel()
        if self.job.sp > 1:
            return SequenceParallel(self.job, self.rank)
        return TensorParallel() if self.job.tp > 1 else Alone()

    @property
    def _media(self) -> frozenset[str]:
        """The columns of images and videos that a sample of the data has."""
        return self.data.train.media | (self.data.eval.media if self.data.eval is not None else frozenset())

    def _whole_collator(self) -> CountingCollator | StreamCollator:
        counting = CountingCollator(self._collator())
        return StreamCollator(counting) if self.job.streaming else counting

    def _collator(self) -> Collator | PairCollator | MediaCollator:
        plain = Collator(
            pad_token_id=int(self.data.tokenizer.pad_token_id),
            packing=self.job.packing,
            takes=taken_by(self.model),
            joins_rows=joins_rows(self.model),
            slices=self.job.sp,
        )
        collator: Collator | MediaCollator = plain
        reader = self.data.media_reader
        if reader is not None and (media := self._media):
            blanks = {column: reader.blank_tokens(self.data.tokenizer, column) for column in sorted(media)}
            dtype = DTYPES[self.job.precision]
            collator = MediaCollator.of(self.model, dtype, collator=plain, media_reader=reader, blanks=blanks)
        return PairCollator(collator=collator) if self.job.task is Task.DPO else collator

    def summary(self, trainer: Trainer) -> dict[str, Any]:
        """Returns the content of `summary.json`."""
        metrics = self.metrics
        assert metrics is not None
        logged = current_steps(read_jsonl(self.run_dir.metrics))
        steps = throughput(logged)
        return {
            "steps": trainer.state.global_step,
            "skipped_steps": trainer.watch.skipped_steps,
            "first_loss": next((line["loss"] for line in logged if "loss" in line), None),
            "last_loss": metrics.last_loss,
            "eval_loss": metrics.eval_loss,
            "best": to_data(trainer.saver.best_model) if trainer.saver.best_model else None,
            "tokens": steps.tokens if steps else 0,
            "train_s": steps.seconds if steps else None,
            "tokens_per_s": steps.tokens_per_s if steps else None,
            "peak_bytes_per_gpu": metrics.peak_bytes,
            "measured": to_data(measurement(logged)),
            "ranks": self.rank.world_size,
        }


def _announce(job: Job, rank: Rank) -> None:
    """Announces the model and adapter, and an adapter that names another model than the job."""
    rank.say(f"loading {job.model}{f' and {job.adapter}' if job.adapter else ''}")
    if job.torch_compile:
        rank.say("torch_compile: the first pass compiles the layers, which takes minutes")
    if (note := note_on_base(job)) is not None:
        rank.say(f"note: {note}")


def _loaded(job: Job, source: str, ds_config: Mapping[str, Any], tokenizer: Any, heartbeat: Sender) -> Any:
    """Loads the model and reports progress."""
    counted = partial(heartbeat.count, Phase.WEIGHTS)
    model = load_model(job, source, ds_config, num_tokens=len(tokenizer), report=counted)
    heartbeat.send(0, Phase.LOADING)
    return model


def _against(job: Job, model: ModelFacts | None, cluster: Cluster | None) -> Hardware | None:
    if model is None or cluster is None:
        return None
    return hardware(model, cluster.gpu, method=job.method, precision=job.precision)
