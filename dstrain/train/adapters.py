"""Changes a model before it trains: adapters around it, frozen parts, stretched rotary positions."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from torch.nn import Linear

from dstrain.choices import Method, RopeType
from dstrain.errors import InvalidConfig
from dstrain.facts.model import traits
from dstrain.facts.model.traits import Part, part_of
from dstrain.job.model_changes import ALL_EXPERTS, Lora, RopeScaling, read_adapter, shape_of_adapter
from dstrain.job.schema import Job
from dstrain.paths import write_atomic
from dstrain.plan import named_parts
from dstrain.plan.named_parts import unknown, unknown_experts
from dstrain.records import load_json, to_json
from dstrain.train.checkpoints.saved_model import shape_of


def of_job(model: Any, job: Job, *, dtype: torch.dtype | None) -> Any:
    """Returns the model with the adapter of a job: a new one, or the job's `adapter`."""
    adapted = with_adapter(model, job.lora, grad_ckpt=job.grad_ckpt, dtype=dtype)
    if job.adapter is not None:
        load(adapted, Path(job.adapter), job.lora)
    return adapted


def _adapter_targets(lora: Lora, model: Any) -> str | list[str]:
    """Returns the modules that get an adapter; in a mixture of experts, `all-linear` means attention.

    PEFT 0.21 would also adapt the experts and their router in families that it rewrites for Transformers 5 (75 times
    the parameters in Qwen3-30B-A3B), without dropout.
    """
    if lora.targets != ("all-linear",):
        return list(lora.targets)
    if not _stacked_experts(model):
        return "all-linear"
    names = (name for name, module in model.named_modules() if isinstance(module, Linear) and ".self_attn." in name)
    return sorted({name.rpartition(".")[2] for name in names})


def _stacked_experts(model: Any) -> list[str]:
    """Returns the names of the parameters that hold a matrix of all experts of a layer."""
    parameters = model.named_parameters()
    return [name for name, value in parameters if ".experts." in name and len(shape_of(value)) == 3]


def _adapted_experts(lora: Lora, model: Any) -> list[str] | None:
    """Returns the parameters of which each expert gets an adapter, by the ends of their names; None without any.

    Raises InvalidConfig for one that holds no experts, and for a target that PEFT takes for them.
    """
    stacked = _stacked_experts(model)
    for name in unknown_experts(lora, stacked, model.config.model_type):
        raise InvalidConfig(name.problem, hint=name.fix)
    ends = {".".join(name.split(".")[-2:]) for name in stacked}
    named = {end for name in lora.target_parameters for end in (ends if name == ALL_EXPERTS else {name})}
    return sorted(named) or None


def is_tied(model: Any) -> bool:
    """Returns whether the head of a model shares the weight of its embedding."""
    return bool(getattr(model.config, "tie_word_embeddings", False))


def with_adapter(model: Any, lora: Lora, *, grad_ckpt: bool, dtype: torch.dtype | None, **options: Any) -> Any:
    """Returns the model with LoRA matrices around linear layers of its language model and experts, all else frozen.

    The matrices get `dtype` (None: as PEFT makes them); PEFT's `get_peft_model` takes `options`.
    """
    from peft import LoraConfig, get_peft_model

    others = "|".join(sorted(traits.VISION | traits.ALIGNER))
    adapter = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=_adapter_targets(lora, model),
        target_parameters=_adapted_experts(lora, model),
        exclude_modules=rf".*\.({others})\..*" if traits.has_tower(model.config) else None,
        modules_to_save=list(lora.modules_to_save) or None,
        ensure_weight_tying=bool(lora.modules_to_save) and is_tied(model),
        task_type="CAUSAL_LM",
    )
    if grad_ckpt:
        require_input_grads(model)
    try:
        # adapters in the model's dtype: DeepSpeed keeps their fp32 masters
        adapted = get_peft_model(model, adapter, autocast_adapter_dtype=False, **options)
    except ValueError as error:
        names = ", ".join(lora.targets)
        reason = str(error).split(". ")[0]
        raise InvalidConfig(f'lora: targets is "{names}": {reason}', hint="targets: [all-linear]") from error
    if dtype is not None:
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.to(dtype)
    return adapted


def require_input_grads(model: Any) -> None:
    """Makes the embeddings of tokens require gradients: layers recomputed from frozen ones have none otherwise.

    Transformers' own function asks it of the patches of a tower as well, which would then keep what its frozen blocks
    compute, and go backward through them, for nothing.
    Source: Transformers 5.23 modeling_utils.py: enable_input_require_grads.
    """

    def require(_module: Any, _inputs: Any, output: torch.Tensor) -> None:
        output.requires_grad_(True)

    model.get_input_embeddings().register_forward_hook(require)


def note_on_base(job: Job) -> str | None:
    """Returns a note if the adapter that a job continues from names another model than the job."""
    if job.adapter is None:
        return None
    base = read_adapter(Path(job.adapter)).get("base_model_name_or_path")
    same = base is None or base == job.model or Path(base).name == Path(job.model).name
    return None if same else f"the adapter names {base} as its model; the job has {job.model}"


def untie(model: Any) -> bool:
    """Gives the head its own weight if an adapter of the embedding or of the head would change both; returns whether.

    Merged into a weight that the two share, it would be part of both. Source: peft issue 2777.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    base = model.get_base_model()
    ends = (base.get_input_embeddings(), base.get_output_embeddings())
    if not is_tied(base) or not any(isinstance(end, BaseTunerLayer) for end in ends):
        return False
    head = getattr(ends[1], "base_layer", ends[1])
    head.weight = torch.nn.Parameter(head.weight.detach().clone())
    for config in (base.config, base.config.get_text_config()):
        config.tie_word_embeddings = False
    return True


_COPY = ".modules_to_save."
"""A part of the name of a module that trains whole; PEFT saves it without."""


def load(model: Any, folder: Path, lora: Lora) -> None:
    """Gives the adapter of a model the weights that PEFT saved in a folder.

    Raises InvalidConfig for another adapter, or one of another model.
    """
    import deepspeed  # type: ignore[import-untyped]
    from peft import load_peft_weights, set_peft_model_state_dict

    shape_of_adapter(folder, lora, given=("rank", "alpha", "targets", "target_parameters", "modules_to_save"))
    # PEFT writes a resized embedding once more, under the name of its copy
    weights = {key: value for key, value in load_peft_weights(str(folder), device="cpu").items() if _COPY not in key}
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    try:
        with deepspeed.zero.GatheredParameters(trained, modifier_rank=0):  # changes nothing below ZeRO-3
            result: Any = set_peft_model_state_dict(model, weights)
    except (OSError, KeyError, RuntimeError, ValueError) as error:
        raise _other_model(folder, str(error).strip().split("\n")[-1].strip()) from error
    adapter = f".{model.active_adapter}."
    missing = [name for name in result.missing_keys if adapter in name]
    if missing or result.unexpected_keys:
        (name, words) = (missing[0], "is missing") if missing else (result.unexpected_keys[0], "is unknown")
        raise _other_model(folder, f"{name} {words}")


def _other_model(folder: Path, problem: str) -> InvalidConfig:
    return InvalidConfig(
        f"adapter: {folder} does not fit the model: {problem}", hint="Name as `model` what it was trained on."
    )


def freeze(model: Any, job: Job) -> None:
    """Freezes the parts of a vision-language model that a job does not train; a language model stays as it is.

    Raises InvalidConfig if a job freezes the whole model.
    """
    has_tower = any(part_of(name) is Part.TOWER for name, _ in model.named_parameters())
    parts = named_parts.frozen_parts(job)
    if job.freeze_language_model and (not has_tower or len(parts) == len(Part)):
        raise InvalidConfig("freeze_language_model leaves nothing to train", hint="freeze_language_model: false")
    freeze_parts(model, parts)
    _freeze_by_name(model, job)


def _freeze_by_name(model: Any, job: Job) -> None:
    """Freezes the parameters that a job names.

    Raises InvalidConfig for a name that the model does not have, and if nothing is left to train.
    """
    for missing in unknown(job, [name for name, _ in model.named_parameters()]):
        raise InvalidConfig(missing.problem, hint=f"{missing.fix[0].upper()}{missing.fix[1:]}.")
    for name, parameter in model.named_parameters():
        if named_parts.is_frozen(name, freeze=job.freeze, train_only=job.train_only):
            parameter.requires_grad_(False)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise InvalidConfig("freeze and train_only leave nothing to train", hint="Remove one of the patterns.")


def freeze_parts(model: Any, parts: Collection[Part]) -> None:
    """Freezes parts of a vision-language model; nothing in a language model."""
    named = [(part_of(name), parameter) for name, parameter in model.named_parameters()]
    has_tower = any(part is Part.TOWER for part, _ in named)
    for part, parameter in named:
        if has_tower and part in parts:
            parameter.requires_grad_(False)


_ROPE_FILE = "rope_scaling.json"
"""The scaling in the folder of an adapter: PEFT stores nothing of the base model's configuration but its name, and
Transformers takes a folder with a config.json for a whole model."""
BESIDE_ADAPTER = (
    f"the adapter needs its base model with the rope_scaling in {_ROPE_FILE} beside it, which PEFT does not store: "
    "merge both with dstrain export, or write it into the config.json of the base"
)
"""The line that ends the training of an adapter on stretched positions."""


def stretch(config: Any, scaling: RopeScaling | None) -> None:
    """Writes a scaling into a configuration of Transformers 5, which keeps it in `rope_parameters` whatever the name in
    config.json; of a multimodal model into the text's, with types for layers (Gemma 3) into full attention's.

    `max_position_embeddings` becomes the new length, as in the model cards, except for `dynamic`, which computes from
    the original length there. Raises InvalidConfig if the model has other positions, is scaled already, or would not
    read the scaling back from its own config.json.
    Source: Transformers 5.23 modeling_rope_utils.py: standardize_rope_params, _compute_dynamic_ntk_parameters.
    """
    if scaling is None:
        return
    text = config.get_text_config()
    parameters = _rope_parameters(text)
    kind = parameters.get("rope_type")
    if kind != "default":
        problem = "has no rotary positions" if kind is None else f"already has rope_type {kind} in its config.json"
        raise InvalidConfig(f"rope_scaling: the model ({config.model_type}) {problem}", hint="Remove rope_scaling.")
    original = scaling.original_max_position_embeddings or text.max_position_embeddings
    values = {"rope_type": str(scaling.rope_type), "factor": scaling.factor}
    # of these types only YaRN reads the original length from the parameters
    if scaling.rope_type is RopeType.YARN:
        values["original_max_position_embeddings"] = original
    parameters.update(values)
    is_dynamic = scaling.rope_type is RopeType.DYNAMIC
    text.max_position_embeddings = original if is_dynamic else int(scaling.factor * original)
    _require_readable(config, parameters, scaling)


def _rope_parameters(text: Any) -> dict[str, Any]:
    """Returns the rotary parameters inside a configuration of a language model; empty if it has none."""
    parameters: dict[str, Any] = getattr(text, "rope_parameters", None) or {}
    full: dict[str, Any] = parameters.get("full_attention", parameters)
    return full


def _require_readable(config: Any, parameters: dict[str, Any], scaling: RopeScaling) -> None:
    """Raises InvalidConfig if the class of a configuration refuses or changes a scaling as it reads it."""
    try:
        read = _rope_parameters(type(config).from_dict(config.to_dict()).get_text_config())
        problem = "" if read == parameters else "reads it back otherwise"
    except Exception as error:  # the code of a model may raise anything
        problem = str(error).partition("\n")[0]
    if problem:
        raise InvalidConfig(
            f"rope_scaling: {type(config).__name__} takes no rope_type {scaling.rope_type}: {problem}",
            hint="Remove rope_scaling, or choose another rope_type.",
        )


def write_beside_adapter(folder: Path, job: Job) -> None:
    """Writes the scaling that the base model of an adapter needs to the adapter's folder; nothing for a whole model."""
    if job.rope_scaling is not None and job.method is not Method.FULL:
        write_atomic(folder / _ROPE_FILE, to_json(job.rope_scaling))


def read_beside_adapter(folder: Path) -> RopeScaling | None:
    """Returns the scaling that the base model of an adapter needs, or None."""
    return load_json(RopeScaling, folder / _ROPE_FILE) if (folder / _ROPE_FILE).is_file() else None
