"""Options for model, machines and request, shared by the commands that plan."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from itertools import chain
from pathlib import Path
from types import MappingProxyType, NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

import click
from annotated_types import Ge, Le

from dstrain.cli.group import F, options
from dstrain.cli.types import SIZE, Choice, Named
from dstrain.facts.cluster import gpus
from dstrain.facts.cluster.cluster import LINKS
from dstrain.facts.model import aliases
from dstrain.job.model_changes import Lora
from dstrain.job.schema import Job
from dstrain.plan.request import Request, Unset
from dstrain.records import annotations_of, field_docs

_NO_OPTION = frozenset({"lora", "router_loss"})
"""Fields of a request without an option: a record, of which some fields have one, and a key of the job."""
_SECTIONS = {
    "First": ("model", "data", "gpus", "gpu", "hosts", "method", "seq_len", "global_batch", "out", "dry_run"),
    "Machines": ("hostfile", "gpus_per_node", "gpu_memory_limit", "host_memory", "nvme", "interconnect"),
    "Training": (
        *("task", "optimizer", "lr_scaling", "precision", "loss", "rope_scaling", "packing", "eval_data", "hub"),
        *("lora_rank", "lora_targets", "lora_target_parameters", "lora_dropout"),
    ),
    "Memory and speed": (
        *("zero_stage", "offload", "offload_ratio", "hpz", "micro_batch", "grad_accum", "grad_ckpt"),
        *("grad_ckpt_every_n_layers", "activation_offload", "tiled_mlp", "attn", "liger", "torch_compile", "qwz"),
        *("sp", "tp", "ep"),
    ),
    "Images": ("image_patches", "freeze_vision_tower", "freeze_multi_modal_projector", "freeze_language_model"),
}
_PLACED = frozenset(chain.from_iterable(_SECTIONS.values())) | _NO_OPTION
_OTHERS = {"Memory and speed": tuple(name for name in Request.__dataclass_fields__ if name not in _PLACED)}
SECTIONS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {title: (*names, *_OTHERS.get(title, ())) for title, names in _SECTIONS.items()}
)
"""Sections of the help of a command that plans → their options, the ones that matter first in the first; options in
none of them are about the output. A field of a request that no section names is in the one about memory and speed."""
_OF_VERBS = frozenset({"model", "data", "hostfile", "eval_data"})
"""Keys of a job whose options are written by hand: a name may be an alias, and only some verbs take data."""
_PLANNED_ONLY = frozenset({"grad_accum", "lora_rank", "lora_targets", "lora_target_parameters", "lora_dropout"})
"""Options that can be planned, and that gen-config does not write."""


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _help(text: str) -> str:
    """Returns the docstring of a field as the help of its option: keys that are options are spelled as such."""
    keys = Request.__dataclass_fields__.keys() - _NO_OPTION
    return re.sub("`([^`]+)`", lambda name: _flag(name[1]) if name[1] in keys else name[1], text)


def _kind(hint: Any) -> Any:
    """Returns the Click type of a field: the type of its values besides None; an enum before a record."""
    if get_origin(hint) is Literal:
        return Choice(get_args(hint))
    kinds = [kind for kind in get_args(hint) or (hint,) if kind is not NoneType]
    enum = next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Enum)), None)
    return kinds[0] if enum is None else Choice(enum)


_HINTS = {record: get_type_hints(record) for record in (Job, Request, Lora)}


def field_option(name: str, record: Any = Request, *, prefix: str = "", **attributes: Any) -> Callable[[F], F]:
    """Returns the option of a field: its type, its default, and its docstring as help.

    A field of a request that a job has too has the job's docstring, and its legal values if these are fewer.
    """
    of_job, default = _HINTS[Job].get(name), record.__dataclass_fields__[name].default
    kind = _kind(of_job if get_origin(of_job) is Literal else _HINTS[record][name])
    flag, said = _flag(f"{prefix}{name}"), annotations_of(record).get(name, ())
    # the bounds of the record are those of Click, which tells them with the option's name
    match said:
        case Ge(ge=int(least)), Le(le=int(most)), *_:
            kind = click.IntRange(least, most)
    if kind is bool:
        flag, kind = f"{flag}/--no-{flag[2:]}", None
    unset = next((one.words for one in said if isinstance(one, Unset)), None)
    text = _help({**field_docs(Job), **field_docs(record)}[name])
    return click.option(
        flag,
        **{
            "type": kind,
            "default": default.value if isinstance(default, Enum) else default,
            "show_default": unset is None,
            "help": text if unset is None else f"{text}  [default: {unset}]",
            **attributes,
        },
    )


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
        type=Named(lambda: LINKS),
        metavar="LINK",
        help="Link between nodes, per GPU, such as ib400 or roce100.",
    ),
)
_ADAPTER: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "rank": {},
        "targets": {"type": str, "metavar": "NAME,NAME", "default": ",".join(Lora().targets)},
        "target_parameters": {"type": str, "metavar": "NAME,NAME", "default": "", "show_default": "none"},
        "dropout": {},
    }
)
"""Fields of an adapter that are options → what differs from the field: lists are typed with commas."""


def _planned(*, is_generated: bool) -> Iterator[Callable[[F], F]]:
    """Yields the options of the request, in the order of the sections; gen-config has fewer."""
    for name in chain.from_iterable(SECTIONS.values()):
        if is_generated and name in _PLANNED_ONLY:
            continue
        if name in Request.__dataclass_fields__:
            yield field_option(name)
        elif name in Job.__dataclass_fields__.keys() - _OF_VERBS:
            yield field_option(name, Job)
        elif name.removeprefix("lora_") in _ADAPTER:
            field = name.removeprefix("lora_")
            yield field_option(field, Lora, prefix="lora_", **_ADAPTER[field])


def facts_options(function: F) -> F:
    """Adds the options that describe model, machines and request, as far as gen-config can carry them out; it may take
    the model from the last time."""
    return options(_model(required=False), *_MACHINES, *_planned(is_generated=True))(function)


def plan_options(function: F) -> F:
    """Adds the options of `facts_options`, and those that gen-config cannot carry out."""
    return options(_model(required=True), *_MACHINES, *_planned(is_generated=False))(function)


def machine_options(function: F) -> F:
    """Adds the options that describe the machines."""
    return options(*_MACHINES)(function)


def _model(*, required: bool) -> Callable[[F], F]:
    default = "" if required else "  [default: that of the last time]"
    text = f"Alias (qwen3-32b), hub id, local folder or config.json.{default}"
    return click.option(
        "--model", type=Named(aliases.known, or_file=True), required=required, metavar="NAME", help=text
    )


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
GENERATED = frozenset(parameter.name for parameter in click.command(DATA(facts_options(lambda: None))).params)
"""Names of the options that describe a question to gen-config."""
