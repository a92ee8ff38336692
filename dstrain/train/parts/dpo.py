"""Direct preference optimization: the chosen answer becomes more probable than the rejected one, against a reference.

Source: Rafailov et al. 2023, "Direct Preference Optimization" (arXiv 2305.18290), equation 7; names and defaults
follow trl 1.16 trainer/dpo_trainer.py: DPOTrainer._compute_loss.

The reference is kept in the run directory, as log-probabilities of the model before training: a second model would need
its memory in every step, while one pass over the data before the first step needs none.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy, logsigmoid

from dstrain.choices import DpoLoss, LossKernel
from dstrain.errors import InvalidConfig
from dstrain.heartbeat import Phase
from dstrain.job.schema import Dpo, Job
from dstrain.paths import flush
from dstrain.rundir import RunDir
from dstrain.train import loss
from dstrain.train.checkpoints.checkpoints import Disk
from dstrain.train.data.collate import row_of, shift
from dstrain.train.data.pairs import REFERENCE, PairData, without_targets
from dstrain.train.data.rendering import IGNORED
from dstrain.train.loss import trial
from dstrain.train.parts.objective import Objective
from dstrain.train.parts.parallel import Alone
from dstrain.train.parts.training import Training
from dstrain.train.rank import Rank
from dstrain.units import counted


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """The figures of a model for the answers of a micro-batch, one for each row."""

    log_probs: torch.Tensor
    """Sums of the log-probabilities of their tokens: (rows,), float32."""
    num_tokens: torch.Tensor
    """Their tokens: (rows,); 0 in rows that fill up a rank's share of an evaluation."""


def answers_of(model: Any, inputs: Mapping[str, Any], kernel: LossKernel) -> Answers:
    """Returns the log-probabilities of the answers of a micro-batch with `labels`, (rows, seq).

    The model gets no labels, so it computes neither a loss of its own nor a router's.
    """
    targets = shift(inputs["labels"])
    others = {name: value for name, value in inputs.items() if name not in ("labels", REFERENCE)}
    log_probs = sequence_log_probs(model(**others).logits, targets, kernel)
    return Answers(log_probs=log_probs, num_tokens=(targets != IGNORED).sum(-1))


def sequence_log_probs(logits: torch.Tensor, targets: torch.Tensor, kernel: LossKernel) -> torch.Tensor:
    """Returns the sum of the log-probabilities of the targets of each row: (rows,), float32.

    `logits`: (rows, seq, vocab); `targets`: (rows, seq), shifted. `full` converts all logits to float32, as the loss of
    Transformers does; `chunked` does not.
    """
    flat, wanted = logits.reshape(-1, logits.shape[-1]), targets.reshape(-1).to(logits.device)
    if kernel is LossKernel.CHUNKED:
        losses = loss.token_losses(flat, wanted, IGNORED)
    else:
        losses = cross_entropy(flat.float(), wanted, ignore_index=IGNORED, reduction="none")
    return -losses.view(targets.shape).sum(-1)


@dataclass(frozen=True, slots=True, kw_only=True)
class DpoObjective:
    """DPO of a job; rows are all chosen sequences, then all rejected ones."""

    job: Job

    def outputs(self, model: Any, inputs: Mapping[str, Any]) -> Answers:
        """Returns the log-probabilities of both answers of each pair."""
        return answers_of(model, inputs, self.job.loss)

    def losses(self, outputs: Answers, reference: torch.Tensor) -> Mapping[str, torch.Tensor]:
        """Returns the loss of each pair, and TRL's figures of it: (pairs,) each."""
        ratios = outputs.log_probs - reference.to(outputs.log_probs.dtype)
        loss = pair_losses(ratios, outputs.num_tokens, self.job.dpo)
        nll = chosen_nll(outputs.log_probs, outputs.num_tokens)
        chosen, rejected = (self.job.dpo.beta * part for part in ratios.detach().chunk(2))
        log_probs = outputs.log_probs.detach().chunk(2)
        return {
            "loss": loss + self.job.dpo.sft_weight * nll if self.job.dpo.sft_weight else loss,
            "nll_loss": nll.detach(),
            "rewards/chosen": chosen,
            "rewards/rejected": rejected,
            "rewards/accuracies": (chosen > rejected).to(chosen.dtype),
            "rewards/margins": chosen - rejected,
            "logps/chosen": log_probs[0],
            "logps/rejected": log_probs[1],
        }

    def counts(self, outputs: Answers) -> torch.Tensor:
        """Returns whether each pair has an answer: (pairs,)."""
        return outputs.num_tokens.chunk(2)[0] > 0


def chosen_nll(log_probs: torch.Tensor, num_tokens: torch.Tensor) -> torch.Tensor:
    """Returns the negative log-likelihood of each chosen answer, per token: (pairs,); both arguments are (rows,).

    Source: Pang et al. 2024, "Iterative Reasoning Preference Optimization" (arXiv 2404.19733), equation 1.
    """
    return -(log_probs / num_tokens.clamp(min=1)).chunk(2)[0]


def pair_losses(ratios: torch.Tensor, num_tokens: torch.Tensor, dpo: Dpo) -> torch.Tensor:
    """Returns the loss of each pair: (pairs,).

    `ratios`: log-probabilities of answers over the reference's, (rows,), the chosen ones first; `num_tokens`:
    their tokens, (rows,), by which `ipo` divides them.
    """
    if dpo.loss_type is DpoLoss.IPO:
        chosen, rejected = (ratios / num_tokens.clamp(min=1)).chunk(2)
        return (chosen - rejected - 1 / (2 * dpo.beta)) ** 2
    chosen, rejected = ratios.chunk(2)
    margin = dpo.beta * (chosen - rejected)
    if dpo.loss_type is DpoLoss.HINGE:
        return torch.relu(1 - margin)
    if dpo.loss_type is DpoLoss.SIGMOID:
        return -logsigmoid(margin)
    wrong = dpo.label_smoothing
    return (wrong * logsigmoid(-margin) - (1 - wrong) * logsigmoid(margin)) / (1 - 2 * wrong)


class Figures:
    """Sums of the figures of pairs on the device; nothing waits for it until the means are asked for."""

    def __init__(self) -> None:
        """Starts without pairs."""
        self._names: tuple[str, ...] = ()
        self._sums: Any = None

    def add(self, figures: Mapping[str, torch.Tensor], counts: torch.Tensor) -> None:
        """Adds the figures of pairs, (pairs,) each, of those that count: (pairs,)."""
        values = torch.stack([figure.detach().double() for figure in figures.values()])
        sums = torch.cat([(values * counts.double()).sum(-1), counts.double().sum().unsqueeze(0)])
        self._names = tuple(figures)
        self._sums = sums if self._sums is None else self._sums + sums

    def drain(self, group: Any) -> tuple[dict[str, float], int]:
        """Returns the mean of each figure over the pairs of all ranks, and their number, and starts anew.

        `group` is a gloo group of all ranks; None for a single one.
        """
        if self._sums is None:
            return {}, 0
        sums, self._sums = self._sums.cpu(), None
        if group is not None:
            dist.all_reduce(sums, group=group)
        *totals, count = sums.tolist()
        means = {name: total / count for name, total in zip(self._names, totals, strict=True)} if count else {}
        return means, int(count)


Array = np.ndarray[Any, Any]


def reference_file(run_dir: RunDir, job: Job, data_digest: str) -> Path:
    """Returns the file of the reference log-probabilities: another one for other data, or another model."""
    folder = Path(job.model)
    weights = sorted(folder.glob("*.safetensors")) + sorted(folder.glob("*.bin")) if folder.is_dir() else []
    stamps = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in weights]
    adapter = f" {job.adapter}" if job.adapter else ""
    made_from = f"{data_digest} {job.model}{adapter} {job.precision} {job.method} {job.rope_scaling} {stamps}"
    return run_dir.path / f"reference-{hashlib.sha256(made_from.encode()).hexdigest()[:16]}.npy"


class ReferenceStore:
    """One array for all ranks, memory-mapped from a file on each disk."""

    def __init__(self, file: Path, *, rank: Rank, disk: Disk, group: Any) -> None:
        """`group` is a gloo group of all ranks; None for a single one."""
        self._file = file
        self._writes = rank.index == disk.ranks[0]
        self._rank = rank
        self._group = group

    def read(self) -> Array | None:
        """Returns the array, or None if it has not been made; all ranks call it together.

        A disk that lacks the file, as a new node's may, gets it from rank 0.
        """
        there = torch.tensor([self._file.exists()] * 2, dtype=torch.int32)
        if self._group is not None:
            everywhere = there[1:]
            dist.all_reduce(everywhere, op=dist.ReduceOp.MIN, group=self._group)
            dist.broadcast(there[:1], src=0, group=self._group)
        has_first, has_all = bool(there[0]), bool(there[1])
        if not has_first:
            return None
        if not has_all:
            held = [np.load(self._file) if self._rank.is_first else None]
            dist.broadcast_object_list(held, src=0, group=self._group)
            self.write(held[0])
        return self._mapped()

    def write(self, array: Any) -> Array:
        """Writes an array on each disk, and returns it memory-mapped; all ranks call it together, with the same one."""
        if self._writes:
            part = self._file.with_suffix(".part")
            with part.open("wb") as opened:
                np.save(opened, array)
            part.replace(self._file)
            flush(self._file)
        if self._group is not None:
            dist.barrier(group=self._group)
        return self._mapped()

    def _mapped(self) -> Array:
        mapped: Array = np.load(self._file, mmap_mode="r")
        return mapped


def no_reference(file: Path, checkpoint: str) -> InvalidConfig:
    """Returns the error of a run that resumes without the log-probabilities of the model before training."""
    return InvalidConfig(
        f"{checkpoint} was trained against a reference whose log-probabilities are not in {file.parent}: {file.name}",
        hint="Copy the file from the run directory of the checkpoint; with other data, start anew: resume: never",
    )


def computed_reference(
    batches: Iterable[Mapping[str, Any]],
    log_probs_of: Callable[[Mapping[str, Any]], torch.Tensor],
    *,
    num_pairs: int,
    group: Any,
) -> Array:
    """Returns the log-probabilities of all pairs, (pairs, 2), float32; all ranks run it together.

    `batches` are this rank's `Share`: pair `i` of rank `r` is number `i` × ranks + `r`. `log_probs_of`
    returns a micro-batch's, (2 × pairs,), the chosen sequences first.
    """
    parts = [log_probs_of(batch).float().cpu().view(2, -1).T for batch in batches]
    own = torch.cat(parts).contiguous()
    if group is None:
        gathered = [own]
    else:
        gathered = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
        dist.all_gather(gathered, own, group=group)
    whole: Array = torch.stack(gathered, dim=1).view(-1, 2)[:num_pairs].numpy()
    return whole


class PairLoss(Objective):
    """The mean loss of the pairs of a step, with a reference of the model before training."""

    blank = staticmethod(without_targets)

    def __init__(self, dpo: DpoObjective, *, train_digest: str, eval_digest: str | None) -> None:
        """Takes the formula, and the digests of the data, by which references are stored."""
        self._dpo = dpo
        self._digests = train_digest, eval_digest
        self._figures = Figures()

    def attach(self, trainer: Training, parallel: Alone) -> None:
        """Takes the Trainer."""
        self._trainer = trainer
        trainer.model_accepts_loss_kwargs = False  # every micro-batch has as many pairs: a step is the mean of means

    def whole(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Returns a micro-batch with the bits of the reference as integers: Transformers casts floats to bf16."""
        inputs[REFERENCE] = inputs[REFERENCE].double().view(torch.int64)
        return inputs

    def loss(
        self, model: Any, inputs: dict[str, Any], num_items_in_batch: Any, own: Callable[..., Any]
    ) -> tuple[torch.Tensor, Any]:
        """Returns the mean loss over the pairs of a micro-batch; its average over a step is that step's mean.

        The training data are padded to whole steps, so no micro-batch is shorter than another one.
        """
        with self._trainer.meter.forward(inputs["input_ids"].numel()):
            outputs, figures = self._outcome(model, inputs)
        others = {name: value for name, value in figures.items() if name != "loss"}
        self._figures.add(others, self._dpo.counts(outputs))
        return figures["loss"].mean(), outputs

    def _outcome(self, model: Any, inputs: Mapping[str, Any]) -> tuple[Answers, Mapping[str, torch.Tensor]]:
        outputs = self._dpo.outputs(model, inputs)
        return outputs, self._dpo.losses(outputs, inputs[REFERENCE].view(torch.float64))

    def evaluated(self, engine: Any, batches: Iterable[dict[str, Any]]) -> Mapping[str, float]:
        """Returns the means of loss and figures over the pairs of all ranks, each of which counts once."""
        evaluated = Figures()
        for inputs in batches:
            outputs, figures = self._outcome(engine, inputs)
            evaluated.add(figures, self._dpo.counts(outputs))
        means, count = evaluated.drain(self._trainer.group)
        return {**means, "samples": count}

    def totals(self, engine: Any, inputs: dict[str, Any]) -> torch.Tensor:
        """Returns the sum of the losses and the number of pairs of this rank's micro-batch: (2,), float64."""
        losses = self._outcome(engine, inputs)[1]["loss"].double()
        return torch.stack([losses.sum(), torch.ones_like(losses).sum()])

    def learned_tokens(self) -> Any:
        """Returns the tokens with loss of the first chosen answer: (tokens,)."""
        labels = np.asarray(self._trainer.train_dataset[0]["sequences"][0]["labels"])
        return labels[labels != IGNORED]

    def tried(self, num_tokens: int, size: int) -> dict[str, Any]:
        """Returns a micro-batch of that many tokens, without the reference."""
        tokens = np.resize(self.learned_tokens(), num_tokens)
        row = row_of(tokens, tokens, np.array([len(tokens)]))
        single = {"sequences": [row], REFERENCE: np.zeros(1)}
        inputs = self._trainer.inputs_of(self._trainer.data_collator([single] * size))
        del inputs[REFERENCE]
        return inputs

    def complete_data(self, checkpoint: str | None) -> None:
        """Gives the pairs their reference."""
        of_training, of_evaluation = self._digests
        self._read_or_compute("training", self._trainer.train_dataset, of_training, checkpoint)
        if of_evaluation is not None:
            self._read_or_compute("evaluation", self._trainer.eval_dataset, of_evaluation, checkpoint)

    def figures(self) -> Mapping[str, float]:
        """Returns the task's figures, as means over the pairs of the window on all ranks."""
        return self._figures.drain(self._trainer.group)[0]

    def forget(self) -> None:
        """Drops the figures of losses outside of training."""
        self._figures = Figures()

    def _read_or_compute(self, words: str, pairs: PairData, digest: str, checkpoint: str | None) -> None:
        """Gives pairs their reference: from an earlier start, or computed by the model before its first step.

        Raises InvalidConfig if a run resumes, with a model that is trained already, and has none.
        """
        trainer = self._trainer
        file = reference_file(trainer.run_dir, trainer.job, digest)
        store = ReferenceStore(file, rank=trainer.rank, disk=trainer.disk, group=trainer.group)
        pairs.reference = store.read()
        if pairs.reference is not None:
            trainer.rank.say(f"reference log-probabilities of the {words} data: {file.name}")
        elif checkpoint is not None:
            raise no_reference(file, checkpoint)
        else:
            trainer.rank.say(
                f"computing reference log-probabilities of the {words} data: {counted(len(pairs), 'pair')}"
            )
            pairs.reference = store.write(self._computed(pairs))

    def _computed(self, pairs: PairData) -> Array:
        """Returns the log-probabilities of all pairs under the model as it is; all ranks run it together."""
        trainer = self._trainer
        engine = trainer.model_wrapped
        batches = trainer.get_eval_dataloader(pairs)
        total, numbers = len(batches), itertools.count(1)

        def log_probs_of(batch: Mapping[str, Any]) -> torch.Tensor:
            trainer.heartbeat.count(Phase.REFERENCE, next(numbers), total)
            with trainer.compute_loss_context_manager():
                return self._dpo.outputs(engine, trainer.inputs_of(batch)).log_probs

        with trial(engine):
            found = computed_reference(batches, log_probs_of, num_pairs=len(pairs), group=trainer.group)
        trainer.heartbeat.send(trainer.state.global_step, Phase.LOADING)
        return found
