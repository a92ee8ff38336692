"""Reward models: language models whose head gives a sequence one number, read at its last token.

Transformers' classes for classification have that head (`score`) and read it before the first padding; so does everyone
who loads the saved model, as long as its config.json has the padding token. Source: Transformers 5.23
modeling_layers.py: GenericForSequenceClassification.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING, AutoModelForSequenceClassification

from dstrain.errors import InvalidConfig
from dstrain.job.schema import Job

_CLASS = "ForSequenceClassification"


def is_scoring(config: Any) -> bool:
    """Returns whether a saved model is a reward model, by the class in its config.json."""
    return any(name.endswith(_CLASS) for name in getattr(config, "architectures", None) or ())


def has_score(model: Any) -> bool:
    """Returns whether a model without adapter gives sequences a number."""
    return type(model).__name__.endswith(_CLASS)


def with_score(config: Any) -> Any:
    """Returns the class that loads the reward model of a configuration, which it prepares.

    Raises InvalidConfig if Transformers has none for the family.
    """
    if type(config) not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
        problem = (
            f"task: reward needs a model that Transformers can give a score, which it cannot for {config.model_type}"
        )
        raise InvalidConfig(problem, hint="Train a reward on a language model such as Qwen3.")
    if getattr(config, "num_labels", None) != 1:
        config.num_labels = 1
    return AutoModelForSequenceClassification


@contextmanager
def expecting_new_score(config: Any) -> Iterator[None]:
    """Keeps Transformers from warning that a language model has no score, and a reward model no logits."""
    family: Any = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING[type(config)]
    names: dict[str, Any] = {
        "_keys_to_ignore_on_load_missing": [r"^score\."],
        "_keys_to_ignore_on_load_unexpected": [r"^lm_head\."],
    }
    before: dict[str, Any] = {name: getattr(family, name, None) for name in names}
    for name, patterns in names.items():
        setattr(family, name, [*(before[name] or ()), *patterns])
    try:
        yield
    finally:
        for name, patterns in before.items():
            setattr(family, name, patterns)


def require_head(config: Any, job: Job) -> None:
    """Raises InvalidConfig for a reward model where a language model trains: its head would be drawn anew."""
    if is_scoring(config):
        problem = f"model: {job.model} is a reward model, without logits of the vocabulary, but task is {job.task}"
        raise InvalidConfig(problem, hint="task: reward")


def draw_score(model: Any, seed: int) -> None:
    """Draws the head of a language model that becomes a reward model, alike under every ZeRO stage.

    Source of the distribution: Transformers 5.23 modeling_utils.py: PreTrainedModel._init_weights.
    """
    import deepspeed  # type: ignore[import-untyped]

    weight, config = model.score.weight, model.config.get_text_config()
    with deepspeed.zero.GatheredParameters([weight], modifier_rank=0), torch.no_grad():  # nothing below ZeRO-3
        drawn = torch.randn(weight.shape, generator=torch.Generator().manual_seed(seed))
        weight.copy_(drawn * getattr(config, "initializer_range", 0.02))


def note_on_padding(tokenizer: Any) -> str | None:
    """Returns a note if the padding is a token that ends answers, which Transformers then takes for padding, too."""
    if tokenizer.pad_token_id != tokenizer.eos_token_id:
        return None
    return f"{tokenizer.eos_token} is also the padding, so that a score is read at the last token before it"


def set_padding(model: Any, pad_token_id: int) -> None:
    """Tells a reward model, and all who load it later, which token is padding."""
    model.config.pad_token_id = pad_token_id
    model.config.get_text_config().pad_token_id = pad_token_id
