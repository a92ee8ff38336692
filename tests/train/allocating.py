"""A program: what PyTorch's CPU allocator gives out in real passes, for the questions on standard input.

No dispatch mode and no hook of ours is at work: sizes are those of the profiler's allocations and frees, in order.
"""

from __future__ import annotations

import json
import sys
from inspect import signature
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from dstrain.facts.model.tracer import Questions
from dstrain.facts.model.traces import Question
from dstrain.records import from_data
from dstrain.train.data.collate import without_adapter
from dstrain.train.tracing.building import make_inputs, prepare


def peak_bytes(question: Question) -> int:
    """Returns the most bytes alive in the second of two passes, as libraries set up what they keep in the first."""
    model = prepare(question).to_empty(device="cpu")
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    base.tie_weights()
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.zero_()
    one_pass(model, question)
    model.zero_grad(set_to_none=True)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        one_pass(model, question)
    events: Any = recorded.profiler.kineto_results.events()  # type: ignore[union-attr]
    sizes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    live = highest = 0
    for _, num_bytes in sizes:
        live += num_bytes
        highest = max(highest, live)
    return highest


def one_pass(model: Any, question: Question) -> None:
    ids = torch.ones((question.micro_batch, question.seq_len), dtype=torch.int64)
    labels = torch.ones_like(ids)
    inputs = images(model, ids, question)
    loss = model(input_ids=ids, labels=labels, **inputs).loss
    for name in [name for name in inputs if name.startswith("pixel_")]:
        del inputs[name]  # the Trainer drops a micro-batch before the backward pass
    loss.backward()


def images(model: Any, ids: torch.Tensor, question: Question) -> dict[str, Any]:
    """Puts as many tokens of images into the rows as the tower makes, and returns what the processor adds."""
    if not question.image_patches:
        return {}
    base = without_adapter(model)
    made = {name: value for name, value in make_inputs(question, model).items() if name not in ("input_ids", "labels")}
    made = {name: torch.ones_like(value, device="cpu") if value.is_meta else value for name, value in made.items()}
    if "image_position_ids" in made:  # else all patches of an image have one place
        side = int(question.image_patches**0.5)
        places = torch.cartesian_prod(torch.arange(side), torch.arange(side))
        made["image_position_ids"][:] = places
    takes = signature(base.model.get_image_features).parameters
    features = base.model.get_image_features(**{name: value for name, value in made.items() if name in takes})
    parts = features.pooler_output
    tokens = sum(part.shape[:-1].numel() for part in ([parts] if isinstance(parts, torch.Tensor) else parts))
    ids[:, : tokens // len(ids)] = base.config.image_token_id
    return made


if __name__ == "__main__":
    torch.backends.mkldnn.set_flags(False)  # its products in bf16 have workspaces where a CPU has AMX
    asked = from_data(Questions, json.load(sys.stdin), locate=lambda place: str(place))
    print(json.dumps([peak_bytes(question) for question in asked.questions]))
