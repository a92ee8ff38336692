"""Finds the parts of a model that a job names: frozen ones, parameters by pattern, modules of an adapter."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from itertools import accumulate

from dstrain.choices import Method
from dstrain.errors import InvalidConfig, nearest
from dstrain.facts.model.model_facts import ModelFacts, TensorGroup
from dstrain.facts.model.model_files import names_of
from dstrain.facts.model.traits import FROZEN, Part, part_of
from dstrain.job.limits import PARTS
from dstrain.job.model_changes import ALL_EXPERTS, ALL_LINEAR, Lora
from dstrain.job.schema import Job
from dstrain.plan.memory.params import (
    adapted,
    adapted_experts,
    is_inside,
    kept_whole,
    layers_of,
    linear_names,
    named_targets,
    stacked_experts,
)

_OF_MIXTRAL = frozenset({"gate", "w1", "w2", "w3"})
_OF_QWEN = frozenset({"gate", "gate_proj", "up_proj", "down_proj"})
_MATRICES = (_OF_MIXTRAL | _OF_QWEN | {"gate_up_proj"}) - {"gate"}
RENAMED_BY_PEFT = {
    **dict.fromkeys(("minimax", "minimax_m2", "mixtral"), _OF_MIXTRAL),
    **dict.fromkeys(
        (
            *("UnlimitedOcrTextModel", "afmoe", "beam", "cohere2_moe", "deepseek_v2", "deepseek_v3", "deepseek_v32"),
            *("Dots3NoteTextModel", "dots1", "ernie4_5_moe", "exaone_moe", "flex_olmo", "glm4_moe", "glm4_moe_lite"),
            *("glm4v_moe", "glm_moe_dsa", "hunyuan_v1_moe", "longcat_flash", "mellum", "olmoe", "qwen3_moe"),
            *("qwen3_next", "qwen3_omni_moe", "qwen3_omni_moe_text", "qwen3_omni_moe_thinker", "solar_open"),
        ),
        _OF_QWEN,
    ),
}
"""By `model_type`, the targets that PEFT turns into the stacked experts or the router, even where modules, as in shared
experts, are named so. Source: peft 0.21 utils/transformers_weight_conversion.py: _convert_peft_config_moe."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unknown:
    """A name in a job that is in no name of its model."""

    keys: tuple[str | int, ...]
    """The keys that lead to it in the job."""
    problem: str
    fix: str
    """The remedy, with the closest names of the model, best first."""


def unknown(job: Job, names: Sequence[str], model: ModelFacts | None = None) -> Iterator[Unknown]:
    """Yields names of a job that are in no parameter's name.

    `freeze` and `train_only` are regular expressions that may match anywhere in a name of a parameter;
    `lora: targets` and `modules_to_save` are ends of the names of modules, the former outside the vision tower.
    Source: peft 0.21 tuners/tuners_utils.py: check_target_module_exists; utils/other.py: _set_trainable.
    """
    if job.method is Method.FULL:
        for key, patterns in (("freeze", job.freeze), ("train_only", job.train_only)):
            for index, pattern in enumerate(patterns):
                if not any(re.search(pattern, name) for name in names):
                    yield _of_pattern((key, index), pattern, names)
    elif model is None:
        yield from unknown_modules(job.lora, names)
    else:
        yield from _unknown_to(model, job.lora, names)


def _unknown_to(model: ModelFacts, lora: Lora, names: Sequence[str]) -> Iterable[Unknown]:
    """Returns names of an adapter that are not in a model, one for each key; without names, judged by shapes."""
    stacked = [group.name for group in stacked_experts(model)]
    found = [*(unknown_modules(lora, names, model) if names else ()), *unknown_experts(lora, stacked, model.model_type)]
    if not found and (none := untargeted(model, lora)) is not None:
        return [none]
    return {one.keys: one for one in found}.values()


def unknown_modules(lora: Lora, names: Sequence[str], model: ModelFacts | None = None) -> Iterator[Unknown]:
    """Yields names of an adapter that match no module of the model, as `unknown` does."""
    language = modules(name for name in names if part_of(name) is Part.LANGUAGE_MODEL)
    heads = () if "score" in language else ("lm_head",)  # a tied head has no parameter of its own
    if ALL_LINEAR in lora.targets and len(lora.targets) > 1:
        problem = f"lora: targets has {ALL_LINEAR} beside other names, which PEFT takes alone"
        fix = f"write {ALL_LINEAR} alone, or the ends of all names"
        fix = f"write [{', '.join(named_targets(model, lora.targets))}]" if model is not None else fix
        yield Unknown(keys=("lora", "targets"), problem=problem, fix=fix)
    elif lora.targets != Lora().targets:
        yield from _missing("targets", lora.targets, (*language, *heads), dot=".")
    yield from _missing("modules_to_save", lora.modules_to_save, (*modules(names), *heads), dot="")


_AS_EXPERTS = f"remove it; target_parameters: [{ALL_EXPERTS}] gives each expert an adapter"


def unknown_experts(lora: Lora, stacked: Sequence[str], model_type: str) -> Iterator[Unknown]:
    """Yields the parameters that an adapter names and that are none of the stacked weights of experts, and the targets
    that PEFT takes for experts though they name modules."""
    for index, module in enumerate(lora.targets if stacked else ()):
        if module.rpartition(".")[2] in RENAMED_BY_PEFT.get(model_type, ()):
            problem = f'lora: targets has "{module}", which PEFT takes for experts or routers in {model_type}'
            yield Unknown(keys=("lora", "targets", index), problem=problem, fix=_AS_EXPERTS)
    ends = dict.fromkeys(name.partition("experts.")[1] + name.partition("experts.")[2] for name in stacked)
    for index, name in enumerate(lora.target_parameters):
        alone = replace(lora, target_parameters=(name,))
        if not any(map(alone.adapts_experts, stacked)):
            what, fix = "the model has no stacked weights of experts", "name modules as targets"
            if stacked:
                what = "no stacked weight of experts is named so"
                fix = f"write {ALL_EXPERTS} (all), or some of {', '.join(ends)}"
            problem = f'lora: target_parameters has "{name}", but {what}'
            yield Unknown(keys=("lora", "target_parameters", index), problem=problem, fix=fix)


def untargeted(model: ModelFacts, lora: Lora) -> Unknown | None:
    """Returns the problem if no target of an adapter is a linear layer, an embedding or experts, or None.

    Nor can PEFT wrap a head tied to an embedding that trains whole.
    """
    if model.tie_word_embeddings and "lm_head" in lora.targets and kept_whole(model, lora):
        problem = "lora: targets has lm_head, whose weight is the embedding, which modules_to_save trains whole"
        return Unknown(keys=("lora", "targets"), problem=problem, fix="remove lm_head from lora: targets")
    if adapted(model, lora) or adapted_experts(model, lora):
        return None
    problem = f"no linear layer or embedding of {model.name} is named {', '.join(lora.targets)}"
    problem = problem if lora.targets else "lora: targets is empty, so that nothing gets an adapter"
    others = "" if lora.targets == ("all-linear",) else ", or all-linear"
    fix = f"write some of {', '.join(linear_names(model))}{others}"
    return Unknown(keys=("lora", "targets"), problem=problem, fix=fix)


def require_targets(model: ModelFacts, lora: Lora) -> None:
    """Raises InvalidConfig for a target of an adapter that the model does not have."""
    for missing in _unknown_to(model, lora, names_of(model, model.source) or ()):
        raise InvalidConfig(missing.problem, hint=f"{missing.fix[0].upper()}{missing.fix[1:]}.")


def modules(names: Iterator[str] | Sequence[str]) -> tuple[str, ...]:
    """Returns the names of the modules that have parameters, and of those around them.

    >>> modules(["model.norm.weight", "lm_head.weight"])
    ('model', 'model.norm', 'lm_head')
    """
    owners = (accumulate(name.split(".")[:-1], lambda outer, inner: f"{outer}.{inner}") for name in names)
    return tuple(dict.fromkeys(owner for nested in owners for owner in nested))


def _missing(key: str, asked: Sequence[str], legal: Sequence[str], *, dot: str) -> Iterator[Unknown]:
    """Yields names of modules that end no legal name, from a dot on if `dot` is one."""
    for index, module in enumerate(asked):
        if not any(f"{dot}{name}".endswith(f"{dot}{module}") for name in legal):
            ends = {name.rpartition(".")[2] for name in legal}
            last = sorted(end for end in ends if not end.isdigit() and (key != "targets" or "norm" not in end))
            near = nearest(module.rpartition(".")[2], last)
            problem = f'lora: {key} has "{module}", but no module of the model is named so'
            instead = near or f"the end of a module's name: {', '.join(_closest(module, last, 8))}"
            is_expert = key == "targets" and "experts" in ends and module.rpartition(".")[2] in _MATRICES
            yield Unknown(
                keys=("lora", key, index), problem=problem, fix=_AS_EXPERTS if is_expert else f"write {instead}"
            )


def _of_pattern(keys: tuple[str | int, ...], pattern: str, names: Sequence[str]) -> Unknown:
    words = " ".join(re.findall(r"[A-Za-z_]\w*", re.sub(r"\\[A-Za-z]", "", pattern)))
    closest = ", ".join(_closest(words, _one_layer(names), 3))
    return Unknown(
        keys=keys,
        problem=f'{keys[0]} has "{pattern}", which is in no name of a parameter',
        fix=f"write a regular expression that is in a name; the closest are {closest}",
    )


def _closest(words: str, names: Sequence[str], count: int) -> list[str]:
    return sorted(names, key=lambda name: -_likeness(words, name))[:count]


def _one_layer(names: Sequence[str]) -> list[str]:
    """Returns whole names, without those that differ from an earlier one by numbers alone."""
    firsts = {re.sub(r"\.\d+(?=\.)", ".*", name): name for name in reversed(names)}
    return [name for name in firsts.values() if not any(other.endswith(f".{name}") for other in firsts.values())]


def _likeness(words: str, name: str) -> float:
    """Returns how much of a pattern's words is in a name, a little less for longer names."""
    blocks = SequenceMatcher(None, words, name, autojunk=False).get_matching_blocks()
    return sum(block.size**2 for block in blocks) - len(name) / 1000


def is_frozen(name: str, *, freeze: Iterable[str], train_only: Sequence[str]) -> bool:
    """Returns whether a job freezes a parameter: patterns are regular expressions that may match anywhere in its name.

    >>> is_frozen("model.layers.3.mlp.up_proj.weight", freeze=[r"layers\\.[0-7]\\."], train_only=[])
    True
    >>> is_frozen("model.embed_tokens.weight", freeze=[], train_only=["mlp"])
    True
    """
    if train_only and not any(re.search(pattern, name) for pattern in train_only):
        return True
    return any(re.search(pattern, name) for pattern in freeze)


def frozen_parts(job: Job) -> frozenset[Part]:
    """Returns the parts of a vision-language model that a job does not train."""
    kept = {
        Part.TOWER: job.freeze_vision_tower,
        Part.ALIGNER: job.freeze_multi_modal_projector,
        Part.LANGUAGE_MODEL: job.freeze_language_model,
    }
    return frozenset(part for part, is_kept in kept.items() if is_kept)


def traced_without(job: Job) -> tuple[Part, ...]:
    """Returns the parts that do not train when the planner traces a model; without images no tower is at work."""
    return tuple(sorted(frozen_parts(job) if job.image_patches else FROZEN))


def with_frozen(model: ModelFacts, job: Job) -> ModelFacts:
    """Returns the model with the marks of tensors that a job freezes."""
    freeze, train_only, parts = job.freeze, job.train_only, frozen_parts(job)
    if not freeze and not train_only and (not model.has_tower or parts == FROZEN):
        return model

    def is_marked(name: str) -> bool:
        in_part = model.has_tower and part_of(name) in parts
        return in_part or is_frozen(name, freeze=freeze, train_only=train_only)

    def marked(group: TensorGroup) -> TensorGroup:
        names = _names(group, model)
        return replace(group, frozen=tuple(index for index, name in enumerate(names) if is_marked(name)))

    return replace(model, tensors=tuple(map(marked, model.tensors)))


def images_beyond(seq_len: int | None, patches: int, model: ModelFacts) -> str | None:
    """Returns how many tokens more than a sample the images of a sample are, or None; None: its length is not known."""
    tokens = model.vision.num_tokens(patches) if model.vision is not None else 0
    if seq_len is None or tokens <= seq_len:
        return None
    return f"{patches:,} patches are {tokens:,} tokens, more than the {seq_len:,} of a sample, which would be dropped"


def unplanned_parts(job: Job, model: ModelFacts) -> str | None:
    """Returns why a job has no estimate, or None.

    The planner counts trained towers and aligners of Qwen3-VL, and of other families as they were traced with images;
    with an adapter whole copies of embedding and head alone. A tower's activations depend on the images, and a frozen
    language model trains nothing without any.
    """
    if (problem := images_beyond(job.seq_len, job.image_patches, model)) is not None:
        return f"no estimate of memory: image_patches: {problem}"
    others = [name for name in job.lora.modules_to_save if name.split(".")[-1] not in ("embed_tokens", "lm_head")]
    if others and job.method is not Method.FULL:
        return f"no estimate of memory: modules_to_save has {', '.join(others)}"
    changed = [name for name, default in PARTS.items() if getattr(job, name) is not default]
    if not changed or not model.has_tower:
        return None
    if not job.image_patches:
        return f"no estimate of memory: with {', '.join(changed)} it needs image_patches, the patches of a sample"
    return None


def _names(group: TensorGroup, model: ModelFacts) -> list[str]:
    """Returns the names of a group's parameters; in layers of several kinds, with the numbers of the first."""
    if not is_inside(group):
        return [group.name.replace("*", str(index)) for index in range(group.count)]
    return [f"{model.layers_root}.{layer}.{group.name}" for layer in layers_of(group, model.num_hidden_layers)]
