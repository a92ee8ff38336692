"""Which losses take shifted targets and the token count of a step, and which are the mean of a micro-batch."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.models.auto import modeling_auto

from dstrain.train.loss import asked_loss, computes_own_loss, is_mean_of_logits, takes_targets
from tests.train.test_loss import TEXT, qwen2_5_vl, qwen3


class OwnLoss(Qwen3ForCausalLM):
    """A model of someone who computes a mean."""

    smoothing = 0.0

    def forward(self, input_ids: Any, labels: Any, attention_mask: Any, **_: Any) -> Any:
        outputs = super().forward(input_ids=input_ids, attention_mask=attention_mask)
        assert outputs.logits is not None
        if labels is not None:
            logits, targets = outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
            outputs.loss = torch.nn.functional.cross_entropy(logits, targets, label_smoothing=self.smoothing)
        return outputs


class Smoothed(OwnLoss):
    """Another one, whose loss is not that of the targets alone."""

    smoothing = 0.5


class FewArguments(Qwen3ForCausalLM):
    """A model that takes nothing more than it names."""

    def forward(self, input_ids: Any, labels: Any, attention_mask: Any) -> Any:
        return super().forward(input_ids=input_ids, labels=labels, attention_mask=attention_mask)


class Delegates(Qwen3ForCausalLM):
    """A model whose inner model asks for the loss, as Kosmos-2."""

    def forward(self, **inputs: Any) -> Any:  # type: ignore[override]
        return super().forward(**inputs)


def own_loss(kind: type[OwnLoss] = OwnLoss) -> Any:
    model = kind(Qwen3Config(**TEXT))
    torch.nn.init.normal_(model.lm_head.weight)  # so that its logits differ
    return model


def smoothed() -> Any:
    return own_loss(Smoothed)


def few_arguments() -> Any:
    return FewArguments(Qwen3Config(**TEXT))


def delegates() -> Any:
    return Delegates(Qwen3Config(**TEXT))


def batch() -> dict[str, Any]:
    ids = torch.randint(10, 60, (2, 16))
    return {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}


@pytest.mark.parametrize(
    ("make", "is_own", "takes", "is_mean"),
    [
        (qwen3, False, True, True),
        (qwen2_5_vl, False, True, True),
        (delegates, True, True, True),
        (own_loss, True, False, True),
        (smoothed, True, False, False),
        (few_arguments, True, False, True),
    ],
)
def test_a_loss_is_known_by_what_it_computes(make: Any, is_own: bool, takes: bool, is_mean: bool) -> None:
    torch.manual_seed(0)
    model, inputs = make().train(), batch()
    state = torch.get_rng_state()
    assert computes_own_loss(model) is is_own
    assert takes_targets(model, inputs) is takes
    assert is_mean_of_logits(model, inputs) is is_mean
    assert model.training
    assert state.equal(torch.get_rng_state())


def test_the_loss_asked_for_is_a_mean_over_the_tokens_of_a_step() -> None:
    torch.manual_seed(0)
    model, inputs = own_loss(), batch()
    inputs["labels"] = inputs["labels"].masked_fill(torch.arange(16) < torch.tensor([[3], [12]]), -100)
    parts = [{name: value[row : row + 1] for name, value in inputs.items()} for row in range(2)]
    whole = model(**inputs).loss
    ask, count = asked_loss(model), (inputs["labels"][:, 1:] != -100).sum()
    asked = sum(ask(model(**part | {"labels": None}), part["labels"], num_items_in_batch=count) for part in parts)
    torch.testing.assert_close(asked, whole)
    assert not torch.isclose(sum(model(**part).loss for part in parts) / 2, whole, rtol=1e-3)  # of micro-batches


def classes() -> Iterator[Any]:
    """Yields the classes of Transformers that write text, of what is read, seen or heard."""
    kinds = ("CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM")
    names = (name for kind in kinds for name in getattr(modeling_auto, f"MODEL_FOR_{kind}_MAPPING_NAMES").values())
    found = {each for name in names for each in ([name] if isinstance(name, str) else name)}
    yield from (getattr(transformers, name) for name in sorted(found))


def hands_on(kind: Any) -> Iterator[bool]:
    """Yields of each place where a class asks for its loss whether it hands on what its forward is given."""
    (forward,) = ast.parse(textwrap.dedent(inspect.getsource(kind.forward))).body
    assert isinstance(forward, ast.FunctionDef)
    others = forward.args.kwarg.arg if forward.args.kwarg else None
    for node in ast.walk(forward):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "self.loss_function":
            yield any(word.arg is None and ast.unparse(word.value) == others for word in node.keywords)


@pytest.mark.engine
def test_every_class_of_transformers_that_asks_for_its_loss_hands_on_the_token_count() -> None:
    """The others are tried before the first step."""
    asks = {kind: list(hands_on(kind)) for kind in classes()}
    trusted = {kind for kind, places in asks.items() if places}
    assert {kind for kind in trusted if not all(asks[kind])} == set()
    assert {kind for kind in asks if not _computes_own_loss(kind)} == trusted
    assert len(trusted) > 200


def _computes_own_loss(kind: Any) -> bool:
    with torch.device("meta"):
        return computes_own_loss(kind.__new__(kind))
