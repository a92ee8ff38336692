"""Decisions from the lengths of the training data, and the duration of a run on them."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from dstrain.choices import Interval, Task
from dstrain.errors import InvalidConfig
from dstrain.facts.data.best_fit import best_fit
from dstrain.facts.data.lengths import Lengths
from dstrain.facts.model.model_facts import ModelFacts
from dstrain.facts.model.traits import traits
from dstrain.facts.workload import Workload
from dstrain.job.limits import limits_of_media
from dstrain.job.schema import Job
from dstrain.plan.configuration import Configuration
from dstrain.plan.estimate_records import Estimate
from dstrain.plan.memory.layers.activations import has_layer_code
from dstrain.plan.request import Request
from dstrain.plan.search.search_space import (
    DEFAULT_GLOBAL_BATCH,
    data_parallel_ranks,
    global_batch,
    row_tokens,
)
from dstrain.plan.speed.step_time import forward_s, speed

LEAST_STEPS = 200
"""Steps of a run below which rows are not shared by default: each step trains several times the samples, and a short
schedule would leave too few of them. A judgement; `--packing` overrules it."""
LEAST_SEQ_LEN = 512
"""Shortest length that is chosen: below it a step is launches and latencies."""
LARGEST_SHARE = 0.5
"""Share of a row that samples fill on average, up to which rows are shared by default."""
SIMULATED_MICRO_BATCHES = 400
CHECKPOINT_BYTES_PER_S = 1e9
"""Bytes that a node writes in a second while all of its ranks save. A judgement: shared file systems reach less, local
drives more."""
PADDED_TO = 8
"""Tokens that the length of a micro-batch is a multiple of. Source: dstrain/train/data/collate.py."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunTime:
    """How a plan trains a data set."""

    steps: int
    """Optimizer steps of the run."""
    epochs: float
    """Passes over the data in these steps."""
    rows_per_epoch: int
    """Rows of an epoch: samples, or with packing what several of them share."""
    seq_len: int
    """Tokens of the longest row."""
    tokens_per_epoch: int
    """Tokens of all samples, as far as they are not cut."""
    cut_share: float
    """Samples that are longer than a row, 0…1."""
    idle_share: float
    """Part of a step that is padding, or a rank's wait for the longest row of all, 0…1."""
    padded_ratio: float
    """Tokens of rows of one sample each, with padding and waiting, over the tokens of this run's rows."""
    packed_ratio: float
    """Tokens of the rows of this run, with padding and waiting, over the tokens of rows that samples share, or would
    if they can."""
    packed_steps: int
    """Optimizer steps of such rows."""
    seconds: float | None
    """Seconds of all steps, evaluations and checkpoints; None if the GPU's speed is unknown."""
    evaluations: int = 0
    """Evaluations of the run."""
    evaluation_s: float = 0.0
    """Seconds of all of them, which `seconds` include."""
    checkpoints: int = 0
    """Checkpoints of the run, the final model not among them."""
    checkpoint_bytes: int = 0
    """Bytes of one checkpoint."""
    checkpoint_s: float = 0.0
    """Seconds of all checkpoints where each node writes `CHECKPOINT_BYTES_PER_S`, which `seconds` include."""
    uncertainty_ratio: float
    """Half the width of the range that it is in for 8 of 10 runs, over `seconds`."""


def with_lengths(
    request: Request, model: ModelFacts, lengths: Lengths, *, epochs: float, max_steps: int | None = None
) -> Request:
    """Returns the request with what it leaves open and the data decide.

    Short samples share rows if the model's family is known to keep them apart and enough steps are left; else a row is
    as long as the longest sample, up to the default. Raises InvalidConfig as `for_media`.
    """
    if lengths.has_media:
        request = for_media(request, model)
    limit = row_tokens(request, model)
    if request.packing is None and request.task is not Task.DPO and _keeps_apart(model, lengths):
        items, scale = _rows(lengths, limit, is_packed=True), lengths.num_samples / len(lengths.tokens)
        steps = max_steps or len(items) * scale * epochs / (request.global_batch or DEFAULT_GLOBAL_BATCH)
        fill = sum(min(length, limit) for length in lengths.tokens) / len(lengths.tokens) / limit
        if steps >= LEAST_STEPS and fill <= LARGEST_SHARE:
            return replace(request, packing=True)
    if request.seq_len is None and not request.packing:
        longest = 1 << (lengths.tokens[-1] - 1).bit_length()
        request = replace(request, seq_len=min(limit, max(LEAST_SEQ_LEN, longest)))
    return replace(request, packing=bool(request.packing))


def for_media(request: Request, model: ModelFacts) -> Request:
    """Returns the request without the choices that a run on images or videos refuses.

    Raises InvalidConfig if it asks for one.
    """
    limits = limits_of_media(packs=traits(model.model_type).packs_images)
    for limit in (limit for limit in limits if hasattr(request, limit.key)):  # others are no choice of a plan
        asked = getattr(request, limit.key)
        if asked is None:
            request = replace(request, **{limit.key: limit.values[0]})
        elif asked not in limit.values:
            problem = limit.problem("data with images or videos do", asked)
            raise InvalidConfig(problem, hint=f"Leave --{limit.key} out, or name other data.")
    return request


def _keeps_apart(model: ModelFacts, lengths: Lengths) -> bool:
    """Returns whether a family is known to keep the samples of a row apart, and their images if they have any."""
    return has_layer_code(model) and (not lengths.has_media or traits(model.model_type).packs_images)


def run_time(workload: Workload, estimate: Estimate, lengths: Lengths, job: Job, *, eval_samples: int = 0) -> RunTime:
    """Returns the steps of a job, its evaluations on so many samples and its checkpoints, and their time.

    A step takes as long as one of the longest row of all ranks, an evaluation the forward part of steps on such rows.
    """
    c = estimate.configuration
    items = _rows(lengths, c.batch.seq_len, is_packed=c.batch.packing)
    cut = [min(length, c.batch.seq_len) for length in lengths.tokens]
    # the lengths are of some of the rows
    scale = lengths.num_samples / len(lengths.tokens)
    rows, batch = round(len(items) * scale), global_batch(workload.cluster, c)
    steps, per_epoch = _steps(job, rows / batch)
    ranks = data_parallel_ranks(workload.cluster, c)
    longest = _largest_micro_batch(items, c.batch.micro_batch, ranks)
    step_s = _step_s(workload, estimate, longest)
    # the end of a run is always evaluated
    evaluations = max(_times(job.eval_strategy, job.eval_steps, steps, per_epoch), 1) + job.eval_on_start
    evaluated = eval_samples * rows / lengths.num_samples / c.batch.micro_batch / ranks
    evaluation_s = evaluations * math.ceil(evaluated) * _forward_share(workload, c) * (step_s or 0.0)
    checkpoints = _times(job.save_strategy, job.save_steps, steps, per_epoch)
    num_nodes, only_model = workload.cluster.num_nodes, job.save_only_model
    checkpoint_s = checkpoints * checkpoint_seconds(estimate, num_nodes, only_model=only_model)
    packed = _packed(workload.model, c, lengths) or items
    return RunTime(
        steps=steps,
        epochs=steps / per_epoch,
        rows_per_epoch=rows,
        seq_len=c.batch.seq_len,
        tokens_per_epoch=round(sum(cut) * scale),
        cut_share=lengths.share_longer(c.batch.seq_len),
        idle_share=1 - c.batch.micro_batch * sum(items) / len(items) / longest,
        padded_ratio=_largest_micro_batch(cut, c.batch.micro_batch, ranks) * len(cut) / longest / len(items),
        packed_ratio=longest * len(items) / _largest_micro_batch(packed, c.batch.micro_batch, ranks) / len(packed),
        packed_steps=_steps(job, len(packed) * scale / batch)[0],
        seconds=None if step_s is None else steps * step_s + evaluation_s + checkpoint_s,
        evaluations=evaluations if eval_samples else 0,
        evaluation_s=evaluation_s,
        checkpoints=checkpoints,
        checkpoint_bytes=estimate.saved_bytes(only_model=only_model),
        checkpoint_s=checkpoint_s,
        uncertainty_ratio=estimate.speed.uncertainty_ratio if estimate.speed else 0.0,
    )


def _steps(job: Job, batches: float) -> tuple[int, int]:
    """Returns the steps of a run, and of an epoch, whose last one is filled up (`dstrain.train.trainer`)."""
    per_epoch = math.ceil(batches)
    return job.max_steps or math.ceil(per_epoch * job.num_train_epochs), per_epoch


def checkpoint_seconds(estimate: Estimate, num_nodes: int, *, only_model: bool) -> float:
    """Returns the seconds that a checkpoint takes where each node writes `CHECKPOINT_BYTES_PER_S`."""
    return estimate.saved_bytes(only_model=only_model) / num_nodes / CHECKPOINT_BYTES_PER_S


def _times(strategy: Interval, interval: float | None, steps: int, per_epoch: int) -> int:
    """Returns how often something is done in a run that is due after each epoch, or so many steps, or share of them,
    and after the last step.

    >>> [_times(Interval.STEPS, interval, 1000, 400) for interval in (None, 300, 0.25)]
    [0, 4, 4]
    """
    if strategy is Interval.EPOCH:
        return math.ceil(steps / per_epoch)
    if interval is None:
        return 0
    return math.ceil(steps / (interval if interval >= 1 else math.ceil(interval * steps)))


def _forward_share(workload: Workload, configuration: Configuration) -> float:
    """Returns the share of a micro-batch's forward passes in the time of a step."""
    alone, whole = forward_s(workload, configuration), speed(workload, configuration)
    return alone / whole.step_s if alone is not None and whole is not None else 0.0


def _rows(lengths: Lengths, seq_len: int, *, is_packed: bool) -> list[int]:
    """Returns the tokens of each row of the sampled data."""
    cut = [min(length, seq_len) for length in lengths.tokens]
    if not is_packed:
        return cut
    return [kind.num_tokens for kind in best_fit(Counter(cut), seq_len) for _ in range(kind.num_rows)]


def _packed(model: ModelFacts, c: Configuration, lengths: Lengths) -> list[int]:
    """Returns the tokens of each row that samples would share; none if they do already, or cannot."""
    if c.batch.packing or c.batch.task is Task.DPO or not _keeps_apart(model, lengths):
        return []
    return _rows(lengths, c.batch.seq_len, is_packed=True)


def _largest_micro_batch(items: Sequence[int], micro_batch: int, ranks: int) -> float:
    """Returns the mean tokens of the largest micro-batch of all ranks, with its padding.

    >>> _largest_micro_batch([90], 2, 8)
    192.0
    """
    rng = random.Random(0)
    count = max(20, SIMULATED_MICRO_BATCHES // ranks)
    longest = [max(rng.choices(items, k=micro_batch * ranks)) for _ in range(count)]
    return micro_batch * sum(-(-length // PADDED_TO) * PADDED_TO for length in longest) / count


def _step_s(workload: Workload, estimate: Estimate, tokens: float) -> float | None:
    """Returns the seconds of a step whose micro-batches have so many tokens on the slowest rank."""
    c, known = estimate.configuration, estimate.speed
    whole = speed(workload, c)
    if known is None or whole is None:
        return None
    shorter = speed(workload, _shortened(c, tokens / c.batch.micro_batch))
    return known.step_s if shorter is None else known.step_s * shorter.step_s / whole.step_s


def _shortened(configuration: Configuration, length: float) -> Configuration:
    """Returns the configuration with rows of this length, as SP ranks divide them."""
    part = configuration.parallel.sp
    seq_len = min(configuration.batch.seq_len, max(part, round(length / part) * part))
    return replace(configuration, batch=replace(configuration.batch, seq_len=seq_len))
