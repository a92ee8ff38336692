"""Builds models on the meta device with Transformers and PEFT, and their inputs."""

from __future__ import annotations

from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoConfig
from transformers.initialization import no_init_weights

from dstrain.choices import Attention, LossKernel, Method, Precision
from dstrain.errors import InvalidConfig, first_line
from dstrain.facts.model.trace_records import Question, Subject
from dstrain.train.adapters import freeze_parts, with_adapter
from dstrain.train.arguments import recompute
from dstrain.train.checkpoints.saved_model import DTYPES, family_of
from dstrain.train.loss import replace_loss
from dstrain.train.tokenizer import OWN_CODE
from dstrain.train.tracing import images


def load_config(subject: Subject, num_hidden_layers: int | None = None) -> Any:
    """Returns the config as Transformers reads it, shortened to its first layers if a number is given.

    A list with one entry a layer is shortened too, so that the layers left are those that the whole model begins with.
    """
    model_type = str(subject.config.get("model_type"))
    if model_type not in CONFIG_MAPPING and (subject.source is None or not subject.trust_remote_code):
        raise InvalidConfig(f'Transformers has no code for model_type "{model_type}"', hint=OWN_CODE)
    try:
        if model_type in CONFIG_MAPPING:
            config = CONFIG_MAPPING[model_type].from_dict(dict(subject.config))
        else:
            config = AutoConfig.from_pretrained(str(subject.source), trust_remote_code=True)
    except Exception as error:  # code of other people, which may raise anything
        raise InvalidConfig(f"Transformers cannot read the config: {first_line(error)}") from error
    text = config.get_text_config()
    if getattr(
        text, "per_layer_config", None
    ):  # Gemma 4's heads are wider in some layers: sizes are those of the others
        text.allow_global_per_layer_attribute_access = True
    if num_hidden_layers is not None:
        shorten(config, num_hidden_layers)
    return config


def shorten(config: Any, num_hidden_layers: int) -> None:
    """Leaves the first layers of a config."""
    text = config.get_text_config()
    for name, value in per_layer_lists(text).items():
        setattr(text, name, value[:num_hidden_layers])
    text.num_hidden_layers = num_hidden_layers


def per_layer_lists(text: Any) -> dict[str, list[Any]]:
    """Returns the lists of a config that have one entry a layer; token ids can be as many only by chance."""
    return {
        name: list(value)
        for name, value in sorted(vars(text).items())
        if isinstance(value, (list, tuple)) and len(value) == text.num_hidden_layers and "token" not in name
    }


def build(config: Any, subject: Subject, precision: Precision = Precision.BF16) -> Any:
    """Returns the model that the config describes, on the meta device, as `train.model` would load it."""
    family = family_of(config)
    options: dict[str, Any] = {"dtype": DTYPES[precision], "attn_implementation": "eager"}
    try:
        with torch.device("meta"), no_init_weights():
            options |= {"trust_remote_code": subject.trust_remote_code}
            model = family.from_config(config, **options)
        model.tie_weights()
    except Exception as error:  # code of other people, which may raise anything
        raise InvalidConfig(f"Transformers cannot build the model: {first_line(error)}") from error
    return model


def prepare(question: Question) -> Any:
    """Returns the model of a question, ready for a training pass: attention, adapter, checkpointing."""
    subject = question.subject
    config = load_config(subject, question.num_hidden_layers)
    model = build(config, subject, question.precision)
    _set_attention(model, question.attn)
    for each in (model.config, model.config.get_text_config()):
        each.use_cache = False
    freeze_parts(model, question.frozen_parts)
    if question.method is Method.LORA:
        dtype = DTYPES[question.precision]
        with torch.device("meta"):
            model = with_adapter(
                model, question.lora, grad_ckpt=question.grad_ckpt, dtype=dtype, low_cpu_mem_usage=True
            )
    if question.grad_ckpt:
        _recompute(model, question)
    model.train()
    return model


def with_loss(model: Any, question: Question) -> LossKernel:
    """Makes the model compute the loss of a question, or the next one that the model has; returns which."""
    losses = (LossKernel.FUSED, LossKernel.CHUNKED)
    for loss in losses[losses.index(question.loss) :] if question.loss in losses else ():
        try:
            replace_loss(model, loss)
        except InvalidConfig:
            continue
        return loss
    return LossKernel.FULL


def _set_attention(model: Any, attn: Attention) -> None:
    """Sets the implementation in every part of the model; its code reads the name when it runs.

    It cannot be given to `from_config`, which looks for the flash_attn package. A family without sdpa gets eager.
    """
    if attn is Attention.SDPA and not getattr(model, "_supports_sdpa", False):
        attn = Attention.EAGER
    if attn is Attention.FLASH_ATTENTION_2 and not getattr(model, "_supports_flash_attn", False):
        name = type(model).__name__
        raise InvalidConfig(f"Transformers' {name} does not support {attn.value}", hint="Use attn eager.")
    configs = [model.config, *(m.config for m in model.modules() if hasattr(m, "config"))]
    for config in {id(config): config for config in configs}.values():
        if hasattr(config, "_attn_implementation_internal"):
            config._attn_implementation_internal = attn.value


def _recompute(model: Any, question: Question) -> None:
    """Switches checkpointing on as the Trainer does."""
    try:
        recompute(model, {"use_reentrant": question.is_reentrant})
    except ValueError as error:
        raise InvalidConfig(f"Transformers cannot recompute this model: {first_line(error)}") from error


def make_inputs(question: Question, model: Any) -> dict[str, Any]:
    """Returns the arguments of the model's forward pass. Call it under the tracker, so that they are counted.

    A mask of ones is left out, as Transformers drops it before the first layer.
    """
    shape = (question.micro_batch, question.seq_len)
    inputs: dict[str, Any] = {
        "input_ids": images.whole_numbers(shape),
        "labels": images.whole_numbers(shape),
    }
    if question.is_packed:
        inputs["position_ids"] = images.whole_numbers(shape)
        if question.attn in (Attention.FLASH_ATTENTION_2, Attention.SDPA):
            inputs |= _borders(question)
    elif question.has_padding:
        inputs["attention_mask"] = images.whole_numbers(shape)
    if question.image_patches:
        inputs |= images.inputs(question, model)
    return inputs


def _borders(question: Question) -> dict[str, Any]:
    """Returns the borders of packed samples as `train.data.collate` gives them to flash attention; one sample a row."""
    borders = torch.empty(question.micro_batch + 1, dtype=torch.int32, device="meta")
    length = question.seq_len
    return {"cu_seq_lens_q": borders, "cu_seq_lens_k": borders, "max_length_q": length, "max_length_k": length}
