"""The loss of a model: with less memory than Transformers' own, tried on a few tokens, evaluated, and its routers'."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy

from dstrain.choices import LOGITS_PER_TILE, LossKernel
from dstrain.errors import InvalidConfig
from dstrain.job.schema import Job
from dstrain.train.data.collate import shift, without_adapter
from dstrain.train.data.rendering import IGNORED


def without_targets(row: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a row of which no token counts."""
    return {**row, "labels": [IGNORED] * len(row["labels"])}


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """One rank's share of the rows, whole micro-batches and equally many on all ranks.

    ZeRO-3 runs each forward on all ranks, and sequence parallelism expects the size of a micro-batch. A shorter share
    is filled with rows without targets.
    """

    rows: Any
    """All rows: a sequence of samples."""
    index: int
    """Index of the share: of the rank, or of its sequence-parallel group."""
    count: int
    """Number of shares."""
    micro_batch: int = 1
    """Rows of a micro-batch: the share is a multiple of it."""
    blank: Callable[[Mapping[str, Any]], Mapping[str, Any]] = without_targets
    """Returns a row without targets, made of another one."""

    def __len__(self) -> int:
        return math.ceil(len(self.rows) / (self.count * self.micro_batch)) * self.micro_batch

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        """Returns a row of this rank; past the end of the data, the first row without targets."""
        if index >= len(self):
            raise IndexError(index)
        number = index * self.count + self.index
        if number < len(self.rows):
            row: Mapping[str, Any] = self.rows[number]
            return row
        return self.blank(self.rows[0])


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Returns the sum of the losses and the number of targets of a micro-batch: (2,), float64.

    `logits`: (batch, seq, vocab); `targets`: (batch, seq). One row at a time, so that only one row's logits exist in
    float32.
    """
    totals = torch.zeros(2, dtype=torch.float64, device=logits.device)
    for row, labels in zip(logits, targets, strict=True):
        losses = cross_entropy(row.float(), labels, ignore_index=IGNORED, reduction="none")
        totals[0] += losses.double().sum()
        totals[1] += (labels != IGNORED).sum()
    return totals


def mean_loss(
    totals_of: Callable[[Mapping[str, Any]], torch.Tensor], batches: Iterable[Mapping[str, Any]], group: Any
) -> tuple[float, int]:
    """Returns the mean loss per target over the micro-batches of all ranks, and the number of targets.

    `totals_of` returns the sum of the losses and the number of targets of a micro-batch: (2,), float64. `group` is a
    gloo group of all ranks; None for a single one. The loss is NaN without targets.
    """
    totals = torch.zeros(2, dtype=torch.float64)
    for batch in batches:
        counted = totals_of(batch)
        totals = totals.to(counted.device) + counted
    totals = totals.cpu()
    if group is not None:
        dist.all_reduce(totals, group=group)
    loss, targets = totals.tolist()
    return loss / targets if targets else math.nan, int(targets)


_AFTER_THE_HEAD = ("final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier")
"""Settings that scale or bound logits. Source: Transformers 5.23 models gemma2, cohere, granite, falcon_h1."""
_CHECKED = 1e-2
"""Largest relative difference between a model's own loss of some tokens and the loss of their logits."""


def replace_loss(model: Any, loss: LossKernel) -> None:
    """Makes a model compute its loss as `loss` says: chunked or fused.

    Raises InvalidConfig for a model with its own code, which need not ask for the loss that it is given, and, with the
    fused loss, for a head that is not one plain matrix.
    """
    base = without_adapter(model)
    if not type(base).__module__.startswith("transformers."):
        problem = f"loss: {loss} needs a model of Transformers, not {type(base).__module__}"
        raise InvalidConfig(problem, hint="loss: full")
    if loss is LossKernel.CHUNKED:
        base.loss_function = chunked_loss
        return
    if computes_own_loss(model):
        problem = f"loss: fused needs a model that asks for its loss, which {type(base).__name__} computes on its own"
        raise InvalidConfig(problem, hint="loss: chunked")
    head, config = base.get_output_embeddings(), base.config.get_text_config()
    if hasattr(head, "modules_to_save"):  # the copy that trains beside an adapter
        head = head.modules_to_save[head.active_adapters[0]]
    if type(head) is not torch.nn.Linear or head.bias is not None:
        problem = f"loss: fused needs a head without bias or adapter, not {type(head).__name__}"
        raise InvalidConfig(problem, hint="loss: chunked")
    for name in _AFTER_THE_HEAD:
        if getattr(config, name, None) not in (None, 1):
            problem = f"loss: fused needs a head that makes the logits, but {type(base).__name__} has {name}"
            raise InvalidConfig(problem, hint="loss: chunked")
    _FusedHead(head).replace_in(base)


def computes_own_loss(model: Any) -> bool:
    """Returns whether a model may compute its loss on its own, which then need not know the token count of a step.

    False: its code hands what it is given to `loss_function`, as most of Transformers' do; a test reads them all.
    """
    try:
        return "self.loss_function(" not in inspect.getsource(type(without_adapter(model)).forward)
    except (OSError, TypeError):  # code that is in no file
        return True


def asked_loss(model: Any) -> Callable[..., torch.Tensor]:
    """Returns the loss that a model should ask for, as the Trainer calls it in its place: a mean over a step's tokens.

    Source: transformers 5.23 trainer.py: Trainer.compute_loss, `compute_loss_func`.
    """
    base = without_adapter(model)
    vocab_size = base.config.get_text_config().vocab_size

    def loss(outputs: Any, labels: torch.Tensor, num_items_in_batch: torch.Tensor | int | None = None) -> torch.Tensor:
        counts = {"num_items_in_batch": num_items_in_batch}
        found: torch.Tensor = base.loss_function(outputs.logits, labels, vocab_size, **counts)
        return found

    return loss


def chunked_loss(
    logits: torch.Tensor,
    labels: torch.Tensor | None,
    vocab_size: int,
    num_items_in_batch: torch.Tensor | int | None = None,
    ignore_index: int = IGNORED,
    shift_labels: torch.Tensor | None = None,
    **_: Any,
) -> torch.Tensor:
    """Returns the sum over the targets divided by `num_items_in_batch`, by default their number: (), float32.

    `logits`: (batch, seq, vocab); `labels`, or `shift_labels` if already shifted: (batch, seq).
    Source: Transformers 5.23 loss/loss_utils.py: ForCausalLMLoss.
    """
    targets = targets_of(labels, shift_labels).reshape(-1).to(logits.device)
    return _mean(sum_of_losses(logits.reshape(-1, vocab_size), targets, ignore_index), targets, num_items_in_batch)


def sum_of_losses(logits: torch.Tensor, targets: torch.Tensor, ignored: int) -> torch.Tensor:
    """Returns the sum of the losses of logits (tokens, vocab) and targets (tokens,): (), float32."""
    return token_losses(logits, targets, ignored).sum()


def token_losses(logits: torch.Tensor, targets: torch.Tensor, ignored: int) -> torch.Tensor:
    """Returns the losses of logits (tokens, vocab) and targets (tokens,), 0 for ignored ones: (tokens,), float32.

    A few rows are converted to float32 at a time, and the gradient is written in the dtype of the logits. Source:
    deepspeed 0.19.8 runtime/chunked_cross_entropy.py.
    """
    # a trace of the model's code, which prints JSON, needs no DeepSpeed, which prints too
    from deepspeed.runtime.chunked_cross_entropy import chunked_cross_entropy  # type: ignore[import-untyped]

    losses: torch.Tensor = chunked_cross_entropy(logits, targets, ignored, reduction="none")
    return losses


class _FusedHead:
    """A head that returns the sum of the losses in place of logits, while the model knows the targets."""

    def __init__(self, head: torch.nn.Linear) -> None:
        self._head = head
        self._targets: torch.Tensor | None = None

    def replace_in(self, model: Any) -> None:
        """Makes a model hand its targets to the head, and take the loss from there."""
        forward = model.forward

        @wraps(forward)  # the Trainer reads the signature
        def with_targets(*arguments: Any, **inputs: Any) -> Any:
            labels, shifted = inputs.get("labels"), inputs.get("shift_labels")
            self._targets = None if labels is None and shifted is None else targets_of(labels, shifted)
            try:
                return forward(*arguments, **inputs)
            finally:
                self._targets = None

        model.forward = with_targets
        model.loss_function = self._loss
        self._head.forward = self._forward  # type: ignore[method-assign, assignment]

    def _forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Returns logits (batch, seq, vocab) of hidden states (batch, seq, hidden), or the sum of the losses: ().

        The head's own hooks stay around it, so that ZeRO-3 gathers its weight once, and the engine sees its gradient.
        """
        weight, device = self._head.weight, hidden.device.type
        if self._targets is None:
            return torch.nn.functional.linear(hidden, weight)
        if device != "meta" and torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
            with torch.autocast(device, enabled=False):
                return _fused(hidden.to(dtype), weight.to(dtype), self._targets)
        return _fused(hidden, weight, self._targets)

    def _loss(
        self,
        logits: torch.Tensor,
        labels: torch.Tensor | None,
        vocab_size: int,  # some classes give it by place
        num_items_in_batch: torch.Tensor | int | None = None,
        shift_labels: torch.Tensor | None = None,
        **_: Any,
    ) -> torch.Tensor:
        return _mean(logits, targets_of(labels, shift_labels), num_items_in_batch)


def _fused(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    rows = hidden.reshape(-1, hidden.shape[-1])
    if not torch.is_grad_enabled():  # autograd tells a function what requires gradients, whether they are wanted or not
        rows, weight = rows.detach(), weight.detach()
    total: torch.Tensor = _Fused.apply(rows, weight, targets.reshape(-1))  # type: ignore[no-untyped-call]
    return total


class _Fused(torch.autograd.Function):
    """The sum of the losses of hidden states; both gradients are made in the forward pass, tile by tile.

    Tiles are of tokens with a target: the others need no logits. Of the demo's tokens a third has one.
    """

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """`hidden`: (tokens, hidden); `weight`: (vocab, hidden); `targets`: (tokens,). Returns (), float32."""
        needs_hidden, needs_weight, _ = ctx.needs_input_grad
        grad_hidden = torch.zeros_like(hidden) if needs_hidden else None
        grad_weight = torch.zeros_like(weight) if needs_weight else None
        total = torch.zeros((), device=hidden.device)
        size = max(1, LOGITS_PER_TILE // weight.shape[0])
        targets = targets.to(hidden.device)
        places = _places(targets)
        for start in range(0, len(places), size):
            part = places[start : start + size]
            rows = hidden[part]
            loss, grad = _tile(rows, weight, targets[part], differentiates=needs_hidden or needs_weight)
            total += loss
            if grad_weight is not None:
                grad_weight.addmm_(grad.t(), rows)
            if grad_hidden is not None:
                grad_hidden[part] = torch.mm(grad, weight, out=rows)
            del grad, rows  # not beside those of the next tile
        ctx.grads = grad_hidden, grad_weight
        return total

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Returns the gradients times the sum's own: (tokens, hidden), (vocab, hidden)."""
        made, ctx.grads = ctx.grads, None
        return (*(None if grad is None else grad.mul_(grads[0]) for grad in made), None)


def _places(targets: torch.Tensor) -> torch.Tensor:
    """Returns where the targets (tokens,) are not ignored; without data, all places. It waits for a GPU, once."""
    if targets.is_meta:
        return torch.arange(len(targets), device=targets.device)
    return (targets != IGNORED).nonzero().flatten()


def _tile(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, *, differentiates: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the sum of the losses of a tile, (), and the gradient of its logits, (tokens, vocab)."""
    logits = torch.mm(hidden, weight.t())
    if not differentiates:
        return sum_of_losses(logits, targets, IGNORED), logits
    with torch.enable_grad():
        loss = sum_of_losses(logits.requires_grad_(), targets, IGNORED)
    (grad,) = torch.autograd.grad(loss, logits)
    return loss.detach(), grad


def targets_of(labels: torch.Tensor | None, shifted: torch.Tensor | None) -> torch.Tensor:
    """Returns the targets of the logits, (batch, seq): labels shifted to the token before, unless they are already."""
    if shifted is not None:
        return shifted
    assert labels is not None
    return shift(labels)


def _mean(total: torch.Tensor, targets: torch.Tensor, num_items: torch.Tensor | int | None) -> torch.Tensor:
    count = (targets != IGNORED).sum() if num_items is None else num_items
    return total / (count.to(total.device) if isinstance(count, torch.Tensor) else count)


def takes_targets(engine: Any, inputs: Mapping[str, Any]) -> bool:
    """Returns whether the loss is a sum over `shift_labels` divided by `num_items_in_batch`; all ranks run it together.

    `inputs`: a micro-batch with `labels`, (batch, seq). Classes of vision-language models say that they do not
    (`accepts_loss_kwargs`), and most do; the Trainer would then average over micro-batches of different lengths. The
    sum is 0 where there are no targets; a mean is NaN, and a loss that shifts `labels` itself is above 0.
    """
    labels = inputs["labels"]
    targets = {"shift_labels": torch.full_like(labels, IGNORED), "num_items_in_batch": labels.new_tensor(1)}
    with trial(engine):
        try:
            return bool(engine(**{**inputs, **targets}).loss == 0)
        except TypeError:  # an unknown argument
            return False


def is_that_of_logits(engine: Any, inputs: Mapping[str, Any]) -> bool:
    """Returns whether a model's loss is the cross entropy of its logits; all ranks run it together.

    A fused loss is not, in a model that scales or bounds its logits. `inputs`: a micro-batch with `labels`.
    """
    targets = {name: value for name, value in inputs.items() if name in ("labels", "shift_labels")}
    others = {name: value for name, value in inputs.items() if name not in targets}
    with trial(engine):
        sums = sums_of(engine, inputs)
        logits = engine(**others).logits
    losses = loss_of(logits, targets_of(targets.get("labels"), targets.get("shift_labels")))
    return bool(torch.isclose(sums[0], losses[0], rtol=_CHECKED, atol=_CHECKED))


def is_mean_of_logits(engine: Any, inputs: Mapping[str, Any]) -> bool:
    """Returns whether a loss that takes no token count is the mean of its micro-batch; all ranks run it together.

    Losses that shift no labels, smooth them or add something are not. `inputs`: a micro-batch with `labels`.
    """
    with trial(engine):
        loss = engine(**inputs).loss
        total, count = loss_of(engine(**{**inputs, "labels": None}).logits, shift(inputs["labels"]))
    return bool(torch.isclose(loss.double(), total / count, rtol=_CHECKED, atol=_CHECKED))


def sums_of(engine: Any, inputs: Mapping[str, Any]) -> torch.Tensor:
    """Returns the sum of the losses, which the model computes, and the number of targets: (2,), float64.

    The router's loss, which some models add in each micro-batch, is left out.
    """
    targets = targets_of(inputs.get("labels"), inputs.get("shift_labels"))
    config = without_adapter(getattr(engine, "module", engine)).config.get_text_config()
    others = {"output_router_logits": False} if getattr(config, "output_router_logits", False) else {}
    loss = engine(**inputs, **others, num_items_in_batch=targets.new_ones(())).loss
    return torch.stack([loss.double(), (targets != IGNORED).sum().double()])


@contextmanager
def trial(engine: Any) -> Iterator[None]:
    """Forwards within it have no gradients and no dropout, leave random numbers as they are, and compile nothing."""
    was_training = engine.training
    engine.eval()
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    try:
        with torch.random.fork_rng(devices), torch.no_grad(), torch.compiler.set_stance("force_eager"):
            yield
    finally:
        engine.train(was_training)


class RouterLoss:
    """Asks the model for its auxiliary loss, and weighs it as a mean over the micro-batches of a step.

    Models of Transformers add coefficient × auxiliary loss to the loss of each micro-batch, which the Trainer then sums
    over micro-batches and ranks, because the loss of tokens is divided by their number in the whole step: 64
    micro-batches in a step would make the coefficient 64 times what it says.
    Source: Transformers 5.23 models/qwen3_moe/modeling_qwen3_moe.py: forward; trainer.py: compute_loss, training_step.
    """

    def __init__(self, model: Any, job: Job, num_ranks: int) -> None:
        """Without a coefficient in the job the model's configuration says whether there is one.

        Raises InvalidConfig for a model without such a loss, and for ranks that share sequences or weights. Those that
        share experts have routers and sequences of their own.
        """
        base, coefficient = without_adapter(model), job.router_aux_loss_coef
        self._num_ranks = num_ranks
        config = base.config.get_text_config()
        own = getattr(config, "router_aux_loss_coef", None)
        if coefficient and own is None:
            problem = f"router_aux_loss_coef is {coefficient:g}, but {type(base).__name__} has no auxiliary loss"
            raise InvalidConfig(problem, hint="router_aux_loss_coef: null")
        if coefficient and job.ranks_per_batch > 1:
            key = next(key for key in ("sp", "tp") if getattr(job, key) > 1)
            problem = (
                f"router_aux_loss_coef is {coefficient:g}, and {key} is {getattr(job, key)}: ranks have parts of it"
            )
            raise InvalidConfig(problem, hint=f"{key}: 1, or router_aux_loss_coef: null")
        self._own = float(own or 0)
        is_on = bool(coefficient) if coefficient is not None else bool(getattr(config, "output_router_logits", False))
        self.coefficient = (self._own if coefficient is None else coefficient) if is_on else 0.0
        self.arguments: dict[str, Any] = {} if own is None else {"output_router_logits": is_on}
        """Arguments of the model's forward pass."""

    def weighed(self, loss: torch.Tensor, outputs: Any, micro_batches: int) -> torch.Tensor:
        """Returns the loss of a micro-batch, (), with the auxiliary loss weighed anew.

        `loss` has it times the model's own coefficient and the number of ranks, over which the engine averages;
        `micro_batches`: of a rank in a step. Raises InvalidConfig if it would train nothing.
        """
        auxiliary = getattr(outputs, "aux_loss", None)
        if not isinstance(auxiliary, torch.Tensor):
            return loss
        if self.coefficient and loss.requires_grad and not auxiliary.requires_grad:
            problem = (
                "the loss that balances experts has no gradient: adapters under ZeRO-3 need reentrant checkpointing"
            )
            raise InvalidConfig(
                f"{problem}, which makes it without", hint="router_aux_loss_coef: 0, or grad_ckpt: false"
            )
        weight = self.coefficient / micro_batches - self._own * self._num_ranks
        return loss + weight * auxiliary.to(loss.device)
