"""Options for model, machines and request, shared by the commands that plan."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import click

from dstrain.choices import (
    Attention,
    Hub,
    LossKernel,
    Method,
    Offload,
    Optimizer,
    Precision,
    RopeType,
    Task,
)
from dstrain.cli.types import SIZE, Choice, Named
from dstrain.facts.cluster import gpus, links
from dstrain.facts.model import aliases
from dstrain.job.model_changes import Lora
from dstrain.job.task_limits import PARTS
from dstrain.plan.request import LrScaling

F = TypeVar("F", bound=Callable[..., Any])

_ADAPTER = Lora()

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
    click.option(
        "--method", type=Choice(Method), default=Method.FULL.value, show_default=True, help="Trained parameters."
    ),
    click.option("--task", type=Choice(Task), default=Task.SFT.value, show_default=True, help="Training task."),
    click.option("--seq-len", type=int, help="Longest sample in tokens.  [default: 4096, or the model's limit]"),
    click.option("--global-batch", type=int, help="Samples of one optimizer step over all GPUs.  [default: about 64]"),
    click.option(
        "--lr-scaling",
        type=Choice(LrScaling),
        help="Let the learning rate follow the global batch.  [default: it stays]",
    ),
    click.option("--micro-batch", type=int, help="Samples (pairs) of one forward of one GPU.  [default: chosen]"),
)
_CHOICES = (
    click.option("--zero-stage", type=click.IntRange(0, 3), help="ZeRO stage.  [default: chosen]"),
    click.option("--offload", type=Choice(Offload), help="States to keep outside GPU memory.  [default: chosen]"),
    click.option(
        "--offload-ratio",
        type=float,
        help="With ZeRO-3, the share of an offloaded optimizer that leaves the GPU; 1: all of it.  [default: chosen]",
    ),
    click.option(
        "--hpz",
        type=int,
        help="GPUs of a node that share a second copy of ZeRO-3's parameters; 1: no copy.  [default: chosen]",
    ),
    click.option("--grad-ckpt/--no-grad-ckpt", default=None, help="Recompute activations.  [default: chosen]"),
    click.option(
        "--grad-ckpt-every-n-layers",
        type=click.IntRange(1),
        help="With checkpointing, recompute one layer of every N.  [default: chosen]",
    ),
    click.option(
        "--activation-offload/--no-activation-offload",
        default=None,
        help="Offload checkpointed activations to host RAM.  [default: if states are offloaded]",
    ),
    click.option(
        "--tiled-mlp/--no-tiled-mlp",
        default=None,
        help="Compute MLPs for a part of the tokens at a time.  [default: chosen for long rows]",
    ),
    click.option(
        "--torch-compile/--no-torch-compile",
        default=False,
        show_default=True,
        help="Let torch.compile compile the layers; the plan does not count its gain.",
    ),
    click.option(
        "--qwz/--no-qwz",
        default=False,
        show_default=True,
        help="Let ZeRO-3 gather parameters in 8 bits (ZeRO++), which rounds them.",
    ),
    click.option("--precision", type=Choice(Precision), help="Dtype of forward and backward.  [default: by the GPU]"),
    click.option("--attn", type=Choice(Attention), help="Attention implementation.  [default: auto, planned as sdpa]"),
    click.option(
        "--rope-scaling",
        type=Choice(RopeType),
        help="Positions beyond the model's length.  [default: yarn if the model's makers document it]",
    ),
    click.option(
        "--packing/--no-packing",
        default=None,
        help="Let short samples share rows.  [default: by the data, else not]",
    ),
    click.option(
        "--image-patches",
        type=int,
        default=0,
        show_default=True,
        help="Vision patches of the images and videos of a sample.",
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
    click.option(
        "--liger/--no-liger",
        default=False,
        show_default=True,
        help="Run norms, rotary embedding and MLPs on Liger's Triton kernels.",
    ),
    click.option("--sp", type=int, help="Ulysses sequence-parallel ranks.  [default: chosen]"),
    click.option("--tp", type=int, default=1, show_default=True, help="AutoTP tensor-parallel ranks."),
    click.option("--ep", type=int, help="AutoEP expert-parallel ranks.  [default: chosen]"),
    click.option(
        "--loss",
        type=Choice(LossKernel),
        help="How the loss is computed.  [default: with the least memory: fused, chunked or full]",
    ),
    click.option(
        "--optimizer",
        type=Choice((Optimizer.ADAMW, Optimizer.ADAMW_8BIT, Optimizer.ADAMW_BF16, Optimizer.MUON)),
        default=Optimizer.ADAMW.value,
        show_default=True,
        help="Optimizer.",
    ),
)
_BEYOND = (
    click.option("--grad-accum", type=int, help="Micro-batches of one optimizer step.  [default: chosen]"),
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
