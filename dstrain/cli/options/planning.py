"""Options for model, machines and request, shared by the commands that plan."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import Enum
from pathlib import Path
from types import MappingProxyType, NoneType
from typing import Any, TypeVar, get_args, get_type_hints

import click

from dstrain.choices import (
    Hub,
)
from dstrain.cli.types import SIZE, Choice, Named
from dstrain.facts.cluster import gpus, links
from dstrain.facts.model import aliases
from dstrain.job.model_changes import Lora
from dstrain.job.task_limits import PARTS
from dstrain.plan.request import Option, Request

F = TypeVar("F", bound=Callable[..., Any])

_ADAPTER = Lora()


def _of_request(names: str) -> Iterator[Callable[[F], F]]:
    """Yields the options of fields of a request."""
    kinds = get_type_hints(Request, include_extras=True)
    for name in names.split():
        hint, option = get_args(kinds[name])
        default = Request.__dataclass_fields__[name].default
        is_open = default is None
        text = f"{option.help}  [default: {option.unset}]" if is_open else option.help
        kind, flag = _kind(hint, option), f"--{name.replace('_', '-')}"
        if kind is bool:
            flag, kind = f"{flag}/--no-{flag[2:]}", None
        value = default.value if isinstance(default, Enum) else default
        yield click.option(flag, type=kind, default=value, show_default=not is_open, help=text)


def _kind(hint: Any, option: Option) -> Any:
    """Returns the Click type of a field: that of its values besides None, and of an enum rather than of a record."""
    kinds = [kind for kind in get_args(hint) or (hint,) if kind is not NoneType]
    enum = next((kind for kind in kinds if issubclass(kind, Enum)), None)
    if enum is not None:
        return Choice(option.choices or enum)
    if option.range:
        return click.IntRange(option.range[0], option.range[1] if len(option.range) > 1 else None)
    return kinds[0]


_MACHINES = (
    click.option("--gpus", type=int, help="GPUs altogether.  [default: this machine's, or the hosts']"),
    click.option(
        "--gpu",
        type=Named(lambda: gpus.NAMES),
        metavar="NAME",
        help="GPU model, such as h100 or 4090.  [default: read from this machine]",
    ),
    click.option(
        "--gpu-memory-limit",
        type=SIZE,
        metavar="SIZE",
        help="GPU memory that training may use, such as 60GiB.  [default: all of it]",
    ),
    click.option("--gpus-per-node", type=int, help="GPUs in each node.  [default: 8, or fewer when --gpus is fewer]"),
    click.option("--hosts", metavar="NAMES", help="Host names, such as gpu[01-02] or 10.0.0.1,10.0.0.2."),
    click.option("--hostfile", type=click.Path(path_type=Path), help="Hostfile in DeepSpeed's format."),
    click.option("--host-memory", type=SIZE, metavar="SIZE", help="RAM of each node, such as 512GiB."),
    click.option("--nvme", metavar="FOLDER", help="Folder on a local NVMe drive of each node; allows NVMe offload."),
    click.option(
        "--interconnect",
        type=Named(lambda: links.LINKS),
        metavar="LINK",
        help="Link between nodes, per GPU, such as ib400 or roce100.",
    ),
)
_REQUEST = (
    click.option("--hub", type=Choice(Hub), default=Hub.HF.value, show_default=True, help="Where ids are looked up."),
    *_of_request("method task seq_len global_batch lr_scaling micro_batch"),
)
_CHOICES = (
    *_of_request(
        "zero_stage offload offload_ratio hpz grad_ckpt grad_ckpt_every_n_layers activation_offload tiled_mlp"
        " torch_compile qwz precision attn rope_scaling packing image_patches"
    ),
    click.option(
        "--freeze-vision-tower/--no-freeze-vision-tower",
        default=PARTS["freeze_vision_tower"],
        show_default=True,
        help="Leave the tower of a vision-language model as it is.",
    ),
    click.option(
        "--freeze-multi-modal-projector/--no-freeze-multi-modal-projector",
        default=PARTS["freeze_multi_modal_projector"],
        show_default=True,
        help="Leave the aligner between tower and language model as it is.",
    ),
    click.option(
        "--freeze-language-model/--no-freeze-language-model",
        default=PARTS["freeze_language_model"],
        show_default=True,
        help="Leave the language model as it is, while another part trains.",
    ),
    *_of_request("liger sp tp ep loss optimizer"),
)
_BEYOND = (
    *_of_request("grad_accum"),
    click.option("--lora-rank", type=int, default=_ADAPTER.rank, show_default=True, help="Rank of the adapter."),
    click.option(
        "--lora-targets",
        metavar="NAMES",
        default=",".join(_ADAPTER.targets),
        show_default=True,
        help="Linear layers with an adapter: q_proj,v_proj.",
    ),
    click.option(
        "--lora-target-parameters",
        metavar="NAMES",
        default="",
        help="Stacked weights whose experts get an adapter each: experts (all), or experts.down_proj.  [default: none]",
    ),
    click.option(
        "--lora-dropout", type=float, default=_ADAPTER.dropout, show_default=True, help="Dropout before the adapter."
    ),
)
"""What can be planned, and gen-config does not write."""


def facts_options(function: F) -> F:
    """Adds the options that describe model, machines and request, as far as gen-config can carry them out; it may take
    the model from the last time."""
    return _with((_model(required=False), *_MACHINES, *_REQUEST, *_CHOICES), function)


def plan_options(function: F) -> F:
    """Adds the options of `facts_options`, and those that gen-config cannot carry out."""
    return _with((_model(required=True), *_MACHINES, *_REQUEST, *_CHOICES, *_BEYOND), function)


def machine_options(function: F) -> F:
    """Adds the options that describe the machines."""
    return _with(_MACHINES, function)


def _model(*, required: bool) -> Callable[[F], F]:
    default = "" if required else "  [default: that of the last time]"
    text = f"Alias (qwen3-32b), hub id, local folder or config.json.{default}"
    return click.option(
        "--model", type=Named(aliases.known, or_file=True), required=required, metavar="NAME", help=text
    )


def _with(options: tuple[Callable[[F], F], ...], function: F) -> F:
    for option in reversed(options):
        function = option(function)
    return function


HTML = click.option(
    "--html",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Write the plan as one HTML page too, with sliders for GPUs, tokens and micro-batch.",
)


DATA = click.option(
    "--data",
    metavar="FILE",
    help="Training data: .jsonl, .json, .parquet, .arrow, a glob or a data set id; to plan also a job file's list.",
)
_GENERATED = frozenset(parameter.name for parameter in click.command(DATA(facts_options(lambda: None))).params)


def is_generated(given: Iterable[str]) -> bool:
    """Returns whether gen-config has all of these options."""
    return _GENERATED.issuperset(given)


SECTIONS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "First": ("model", "data", "gpus", "gpu", "hosts", "method", "seq_len", "global_batch", "out", "dry_run"),
        "Machines": (*("hostfile", "gpus_per_node", "gpu_memory_limit", "host_memory", "nvme", "interconnect"),),
        "Training": (
            *("task", "optimizer", "lr_scaling", "precision", "loss", "rope_scaling", "packing", "eval_data", "hub"),
            *("lora_rank", "lora_targets", "lora_target_parameters", "lora_dropout"),
        ),
        "Memory and speed": (
            *("zero_stage", "offload", "offload_ratio", "hpz", "micro_batch", "grad_accum", "grad_ckpt"),
            *("grad_ckpt_every_n_layers", "activation_offload", "tiled_mlp", "attn", "liger", "torch_compile", "qwz"),
            *("qgz", "sp", "tp", "ep"),
        ),
        "Images": (*("image_patches", "freeze_vision_tower", "freeze_multi_modal_projector", "freeze_language_model"),),
    }
)
"""Sections of the help of a command that plans → their options, the ones that matter first in the first; what is in
none of them is about the output."""
