"""Runs one forward and backward pass of a model without data, and records live bytes."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import pairwise
from typing import Any

import torch

from dstrain.choices import Attention
from dstrain.errors import DstrainError, InvalidConfig, first_line
from dstrain.facts.model.traces import Moment, Question, Segment, Trace
from dstrain.train.data.isolation import NoPositions, attend_by_sample, packed_masks
from dstrain.train.tracing import images
from dstrain.train.tracing.anatomy import Anatomy, dissect
from dstrain.train.tracing.building import make_inputs, prepare, with_loss
from dstrain.train.tracing.kernels import as_on_cuda
from dstrain.train.tracing.tracker import StorageTracker

_LOSS = ("loss forward", "loss backward")
_AT_THE_HEAD = ("head backward", "embedding backward", "vision backward")


def trace(question: Question) -> Trace:
    """Traces the pass of a question. Raises DstrainError if the model cannot run without data.

    Rows are attended as in training: with a mask if samples cannot be attended one by one.
    """
    try:
        return _trace(question, by_sample=True)
    except NoPositions:
        return _trace(question, by_sample=False)


def _trace(question: Question, *, by_sample: bool) -> Trace:
    model = prepare(question)
    if by_sample and question.is_packed and question.attn is Attention.SDPA:
        attend_by_sample(model)
    loss = with_loss(model, question)
    anatomy = dissect(model)
    parameters = list(model.parameters())
    tracker = StorageTracker(
        round_bytes=question.round_bytes,
        known=[*parameters, *model.buffers()],
    )
    witness = _Witness(tracker, anatomy, parameters)
    try:
        inputs_bytes = _run(model, question, tracker, by_sample=by_sample)
    except (NoPositions, InvalidConfig):
        raise
    except Exception as error:  # code of other people, which may raise anything
        name = type(model).__name__
        raise DstrainError(f"{name} cannot be traced without data: {first_line(error)}") from error
    return Trace(
        segments=tuple(_segments(tracker, _Kinds(witness.grads, _tied_bytes(anatomy, question)), question)),
        saved_bytes=witness.saved_bytes(),
        params_bytes=sum(parameter.nbytes for parameter in parameters),
        trainable_bytes=sum(parameter.nbytes for parameter in parameters if parameter.requires_grad),
        inputs_bytes=inputs_bytes,
        loss=loss,
    )


def _run(model: Any, question: Question, tracker: StorageTracker, *, by_sample: bool) -> int:
    """Runs the pass, and returns the bytes of its inputs.

    Pixels are freed before the backward pass, as in the Trainer; remaining tokens and masks are small.
    """
    sees = images.at_work(model, tracker.see) if question.image_patches else nullcontext()
    with _without_collecting(), as_on_cuda(is_packed=question.is_packed), sees, tracker:
        tracker.enter_phase("embedding forward")
        inputs = make_inputs(question, model)
        if not by_sample:
            inputs["attention_mask"] = packed_masks(model, inputs["position_ids"])
        inputs_bytes = tracker.live_bytes
        outputs = model(**inputs)
        loss = outputs.loss
        if not question.holds_outputs:
            del outputs
        for name in [name for name in inputs if name.startswith("pixel_")]:
            del inputs[name]
        tracker.enter_phase("loss backward")
        loss.backward()
    return inputs_bytes


@contextmanager
def _without_collecting() -> Iterator[None]:
    """Turns garbage collection off within it, so that the same question always has the same answer."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


class _Witness:
    """Hooks that tell the tracker where in the pass it is, and that see gradients arrive.

    No hook keeps a tensor, and none sits before a gradient is accumulated: there a second reference would make
    PyTorch copy the gradient instead of taking it over.
    """

    def __init__(self, tracker: StorageTracker, anatomy: Anatomy, parameters: list[torch.Tensor]) -> None:
        self._begins: list[int] = []
        self._tracker = tracker
        self.grads: set[int] = set()
        """Storages that came to be gradients of parameters."""
        for parameter in parameters:
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._see_grad)  # type: ignore[no-untyped-call]
        self._watch(anatomy)

    def saved_bytes(self) -> tuple[int, ...]:
        """Returns how live bytes grew from the beginning of each layer to the next."""
        return tuple(after - before for before, after in pairwise(self._begins))

    def _watch(self, anatomy: Anatomy) -> None:
        count = len(anatomy.layers)
        begin, end = self._begin, self._end
        anatomy.embedding.register_forward_hook(end("embedding forward", "embedding backward"))
        if anatomy.vision is not None:
            anatomy.vision.register_forward_pre_hook(begin("vision forward"))
            anatomy.vision.register_forward_hook(end("embedding forward", "vision backward"))
        for index, layer in enumerate(anatomy.layers):
            after = ("norm forward", None) if index == count - 1 else ("layer forward", index)
            layer.register_forward_pre_hook(begin("layer forward", index))
            layer.register_forward_hook(end(after[0], "layer backward", index, after[1]))
        if anatomy.head is not None:
            anatomy.head.register_forward_pre_hook(begin("loss forward"))
            anatomy.head.register_forward_hook(end("loss forward", "head backward"))

    def _begin(self, phase: str, layer: int | None = None) -> Any:
        def hook(module: Any, args: Any) -> None:
            if layer is not None:
                self._begins.append(self._tracker.live_bytes)
            self._tracker.enter_phase(phase, layer)

        return hook

    def _end(self, phase: str, backward: str, layer: int | None = None, next_layer: int | None = None) -> Any:
        """Returns a hook after a module: `phase` begins there, and `backward` when its gradient exists."""

        def hook(module: Any, args: Any, output: Any) -> None:
            self._tracker.enter_phase(phase, next_layer)
            tensor = _first_tensor(output)
            if tensor is not None and tensor.requires_grad:
                arrived = partial(self._arrive, backward, layer)
                tensor.register_hook(arrived)  # type: ignore[no-untyped-call]

        return hook

    def _arrive(self, phase: str, layer: int | None, gradient: Any) -> None:
        self._tracker.enter_phase(phase, layer)

    def _see_grad(self, parameter: torch.Tensor) -> None:
        number = None if parameter.grad is None else self._tracker.number_of(parameter.grad)
        if number is not None:
            self.grads.add(number)


def _first_tensor(output: Any) -> torch.Tensor | None:
    """Returns the tensor that a module's gradient comes back through."""
    if isinstance(output, torch.Tensor):
        return output
    values = output.values() if hasattr(output, "values") else output
    return next((value for value in values if isinstance(value, torch.Tensor)), None)


def _tied_bytes(anatomy: Anatomy, question: Question) -> int | None:
    """Returns the bytes of a head that is also the embedding and trains, else None."""
    weight: Any = getattr(anatomy.head, "weight", None)
    is_tied = weight is not None and weight is getattr(anatomy.embedding, "weight", None)
    if not is_tied or not weight.requires_grad:
        return None
    return -(-int(weight.nbytes) // question.round_bytes) * question.round_bytes


class _Kinds:
    """Purpose of each storage: activations, logits or gradients of parameters, in the order of a Moment.

    Logits are what was allocated between the head and the end of the loss's backward pass. The gradients of a tied head
    are two, one from the head and one from the embedding, of which only the sum comes to the parameter.
    """

    def __init__(self, grads: set[int], tied_bytes: int | None) -> None:
        self._grads, self._tied_bytes = grads, tied_bytes
        self._of: dict[int, int] = {}

    def of(self, number: int, num_bytes: int, phase: str) -> int:
        """Returns the kind of a storage, which is decided when it is allocated."""
        if num_bytes > 0:
            is_grad = number in self._grads or (num_bytes == self._tied_bytes and phase in _AT_THE_HEAD)
            self._of[number] = 2 if is_grad else int(phase in _LOSS)
        return self._of[number]


def _segments(tracker: StorageTracker, kinds: _Kinds, question: Question) -> list[Segment]:
    """Returns the pass cut into its phases, each with the moments before something is freed."""
    segments: list[Segment] = []
    live = [0, 0, 0]
    starts = [*(start for start, _, _ in tracker.phases[1:]), len(tracker.events)]
    for (start, name, layer), stop in zip(tracker.phases, starts, strict=True):
        moments: list[Moment] = []
        grew = False
        for number, num_bytes in tracker.events[start:stop]:
            if num_bytes < 0 and grew:
                moments.append(_moment(live))
            grew = num_bytes > 0
            live[kinds.of(number, num_bytes, name)] += num_bytes
        if grew:
            moments.append(_moment(live))
        if moments:
            segment = Segment(name=name, layer=layer, moments=tuple(moments))
            segments.append(
                segment if question.every_moment else Segment(name=name, layer=layer, moments=(segment.highest,))
            )
    return segments


def _moment(live: list[int]) -> Moment:
    return Moment(activations=live[0], logits=live[1], grads=live[2])
