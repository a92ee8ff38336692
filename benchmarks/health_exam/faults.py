"""Causes that change what a rank computes or keeps: batches, labels, weights, gradients and memory."""

from __future__ import annotations

import sys
from typing import Any

import torch

from benchmarks.health_exam.injection import Injection, Steps, change_batches
from dstrain.monitor.meter import routers_of
from dstrain.train.data.rendering import IGNORED


def leak(injection: Injection) -> None:
    """Keeps `size` MB more in each step, on one rank."""

    def keep() -> None:
        injection.kept.append(bytearray(b"1") * int(injection.size * 1e6))

    if injection.rank == injection.on_rank:
        injection.trainer.add_callback(Steps(injection, keep))


def bad_batch(injection: Injection) -> None:
    """Makes the micro-batches of one step of one rank overflow, whenever they come: their embeddings are NaN."""
    bad: list[torch.Tensor] = []

    def poison(_: Any, inputs: tuple[torch.Tensor], output: torch.Tensor) -> torch.Tensor:
        if _is_onset(injection):
            bad.append(inputs[0].clone())
        is_bad = injection.trainer.model.training and any(torch.equal(inputs[0], each) for each in bad)
        return output * float("nan") if is_bad else output

    if injection.rank == injection.on_rank:
        injection.trainer.model.get_input_embeddings().register_forward_hook(poison)


def _is_onset(injection: Injection) -> bool:
    trainer = injection.trainer
    return bool(trainer.model.training) and int(trainer.state.global_step) + 1 == injection.onset


def bad_labels(injection: Injection) -> None:
    """Replaces labels by random tokens."""
    random = torch.Generator().manual_seed(injection.rank)

    def shuffle(batch: dict[str, Any]) -> dict[str, Any]:
        labels = batch["labels"]
        if injection.is_active:
            drawn = torch.randint(3, 2000, labels.shape, generator=random)
            batch["labels"] = torch.where(labels == IGNORED, labels, drawn)
        return batch

    change_batches(injection, shuffle)


def high_rate(injection: Injection) -> None:
    """Multiplies the learning rate by `size`, once."""
    _raise_rate(injection, times=1)


def rising_rate(injection: Injection) -> None:
    """Multiplies the learning rate by `size` in each step from the onset on."""
    _raise_rate(injection, times=sys.maxsize)


def _raise_rate(injection: Injection, *, times: int) -> None:
    left = [times]

    def raise_rate() -> None:
        if left[0]:
            left[0] -= 1
            scheduler = injection.trainer.lr_scheduler
            scheduler.base_lrs = [rate * injection.size for rate in scheduler.base_lrs]
            for group in injection.trainer.optimizer.param_groups:
                group["lr"] *= injection.size

    injection.trainer.add_callback(Steps(injection, raise_rate))


def wrong_weights(injection: Injection) -> None:
    """Scales the last norm, as if head and body belonged to different models."""
    with torch.no_grad():
        injection.trainer.model.model.norm.weight.mul_(injection.size)


def padding(injection: Injection) -> None:
    """Pads each row to `size` times its length."""

    def pad(batch: dict[str, Any]) -> dict[str, Any]:
        if injection.is_active:
            more = int((injection.size - 1) * batch["input_ids"].shape[1])
            for name, value in (("input_ids", 0), ("attention_mask", 0), ("labels", IGNORED)):
                batch[name] = torch.nn.functional.pad(batch[name], (0, more), value=value)
        return batch

    change_batches(injection, pad)


def masked(injection: Injection) -> None:
    """Removes the labels of one row of each micro-batch."""

    def mask(batch: dict[str, Any]) -> dict[str, Any]:
        if injection.is_active:
            batch["labels"][0] = IGNORED
        return batch

    change_batches(injection, mask)


def no_labels(injection: Injection) -> None:
    """Removes all labels."""

    def mask(batch: dict[str, Any]) -> dict[str, Any]:
        if injection.is_active:
            batch["labels"] = torch.full_like(batch["labels"], IGNORED)
        return batch

    change_batches(injection, mask)


def known_answer(injection: Injection) -> None:
    """Makes each row one token again and again, so that the model soon knows every answer."""

    def repeat(batch: dict[str, Any]) -> dict[str, Any]:
        if injection.is_active:
            batch["input_ids"] = torch.full_like(batch["input_ids"], int(injection.size))
            batch["labels"] = torch.where(batch["labels"] == IGNORED, IGNORED, int(injection.size))
        return batch

    change_batches(injection, repeat)


def preferred_expert(injection: Injection) -> None:
    """Adds `size` to the logit of one expert of the last layer."""
    router = _routers(injection)[-1]
    _bias(injection, router, torch.eye(router.num_experts)[0])


def starved_experts(injection: Injection) -> None:
    """Takes `size` from the logits of a quarter of the experts of each layer."""
    for router in _routers(injection):
        _bias(injection, router, -(torch.arange(router.num_experts) < router.num_experts // 4).float())


def uneven_router(injection: Injection) -> None:
    """Adds normal numbers, times `size`, to the logits of all experts of each layer."""
    random = torch.Generator().manual_seed(1)
    for router in _routers(injection):
        _bias(injection, router, torch.randn(router.num_experts, generator=random))


def _routers(injection: Injection) -> list[Any]:
    return list(routers_of(injection.trainer.model))


def _bias(injection: Injection, router: Any, bias: torch.Tensor) -> None:
    """Makes a router choose by other logits, before anything else sees its choice."""

    def choose(_: Any, __: Any, outputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        if not injection.is_active:
            return outputs
        logits = outputs[0] + injection.size_now * bias
        weights, chosen = logits.softmax(-1, dtype=torch.float32).topk(router.top_k, dim=-1)
        return logits, (weights / weights.sum(-1, keepdim=True)).to(outputs[1].dtype), chosen

    router.register_forward_hook(choose, prepend=True)


def overflow(injection: Injection) -> None:
    """Multiplies the gradients of one rank by `size` in every third step: in fp16 they overflow."""

    def scaled(grad: torch.Tensor) -> torch.Tensor:
        is_third = int(injection.trainer.state.global_step) % 3 == 0
        return grad * injection.size if injection.is_active and is_third else grad

    if injection.rank == injection.on_rank:
        for parameter in injection.trainer.model.parameters():
            parameter.register_hook(scaled)


def vanishing(injection: Injection) -> None:
    """Multiplies all gradients by `size`."""
    for parameter in injection.trainer.model.parameters():
        parameter.register_hook(lambda grad: grad * injection.size if injection.is_active else grad)
