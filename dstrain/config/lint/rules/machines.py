"""Rules about the machines: group sizes that must divide the number of GPUs; GPU memory, host RAM and disks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import Any

from dstrain.choices import Method, Precision
from dstrain.config.lint.rule import STOPS, Broken, Fault, Rule, Subject, fault, in_job, together, when
from dstrain.config.lint.rules.releases import trains_in
from dstrain.facts.ds_config import nvme_path
from dstrain.facts.model.model_facts import ModelFacts, TensorGroup
from dstrain.findings import LARGER_DISK, LARGER_DRIVE, LESS_RAM, Severity, too_full, too_little_ram
from dstrain.job.schema import Job
from dstrain.paths import shown
from dstrain.plan.configuration import DEFAULTS, changed
from dstrain.plan.labels import title
from dstrain.plan.search.rules import RULES as PLANNERS
from dstrain.units import format_sizes

LONGEST_GROUP = 40_960
"""Elements of one group at most: 512 threads × 16 elements × 5 steps; for more, no kernel is launched.
Source: deepspeed 0.19.8 ops/csrc/quantization/swizzled_quantize.cu: launch_swizzled_quant_impl (read, not run)."""
PER_LOAD = 8
"""fp16 elements of one load. Source: quantize::h_per_load."""


def is_quantized(shape: Sequence[int], ranks: int) -> bool:
    """Returns whether gradients of a shape are quantized; vectors, and what 2 × `ranks` do not divide, are not.

    Source: deepspeed 0.19.8 runtime/comm/coalesced_collectives.py: all_to_all_quant_reduce.

    >>> is_quantized((25_600, 5_120), 16), is_quantized((25_600, 5_120), 24), is_quantized((5_120,), 16)
    (True, False, False)
    """
    return len(shape) > 1 and prod(shape) % (2 * ranks) == 0


def is_garbled(shape: Sequence[int], ranks: int) -> bool:
    """Returns whether the kernels leave a part of such gradients unwritten, without an error.

    They quantize max(shape[0], shape[1], ranks) groups, an equal number for each rank, and drop the remainder; a group
    that is too long, such as of merged experts, is not quantized at all, and groups must be whole loads.

    >>> is_garbled((25_600, 5_120), 16), is_garbled((128_258, 4_096), 16), is_garbled((128, 1_536, 2_048), 16)
    (False, True, True)
    """
    if not is_quantized(shape, ranks):
        return False
    groups = max(shape[0], shape[1], ranks)
    elements = prod(shape) // groups
    return groups % ranks != 0 or elements % PER_LOAD != 0 or elements > LONGEST_GROUP


def garbled(model: ModelFacts, ranks: int) -> list[TensorGroup]:
    """Returns the trained tensors of a model of which qgZ loses gradients on that many ranks."""
    return [group for group in model.tensors if group.num_trained and is_garbled(group.shape, ranks)]


_HPZ = "zero_optimization.zero_hpz_partition_size"
_QGZ = "zero_optimization.zero_quantized_gradients"
_QWZ = "zero_optimization.zero_quantized_weights"
_SHARE = "its share of the RAM is"
_LOADING, _PLANNED = " while the model is loaded", "are planned with"
SURELY_MORE = 1.1
"""Ratio of need to capacity above which a finding is an error. Estimates are within 11 % of every published run
(docs/accuracy.md)."""


def _indivisible_copies(s: Subject) -> Broken:
    """Returns the words for an hpZ that does not divide the GPUs of a node; an error if it divides none at all."""
    share = s.number(_HPZ, 1)
    if s.hosts is None or s.stage != 3 or share <= 1:
        return None
    slots = min(host.slots for host in s.hosts.hosts)
    severity = None if s.hosts.num_slots % share else Severity.WARNING
    return {"share": share, "slots": slots, "severity": severity} if slots % share else None


def _indivisible_tp(s: Subject) -> Broken:
    size = s.number("tensor_parallel.autotp_size", 0)
    if s.hosts is None or size <= 1 or s.hosts.num_slots % size == 0:
        return None
    return {"size": size, "all": s.hosts.num_slots, "slots": min(host.slots for host in s.hosts.hosts)}


def _has_qgz(s: Subject) -> bool:
    return s.stage == 3 and s.is_true(_QGZ)


def _is_one_node(s: Subject) -> bool:
    return s.hosts is not None and len(s.hosts.hosts) == 1


def _sends_half(s: Subject) -> bool:
    return (s.at("communication_data_type", None) or ("fp16" if trains_in(s, Precision.FP16) else "?")) == "fp16"


def _garbled(s: Subject) -> Broken:
    if s.hosts is None or s.model is None or _is_one_node(s) or not _has_qgz(s):
        return None
    ranks = s.hosts.num_slots
    lost = garbled(s.model, ranks)
    return {"lost": lost[0].name, "shape": " × ".join(map(str, lost[0].shape)), "ranks": ranks} if lost else None


def _unquantizable(s: Subject) -> list[dict[str, Any]]:
    """Returns the planner's rules against quantized weights of this model, its method and its machines, in words."""
    if s.model is None or s.cluster is None or s.stage != 3 or not s.is_true(_QWZ):
        return []
    chosen = changed(DEFAULTS, zero_stage=3, qwz=True, method=s.asked.method if s.asked is not None else Method.FULL)
    broken = [rule for rule in PLANNERS if rule.lint == "DS813" and rule.breaks(s.model, s.cluster, chosen)]
    wrong, stops = (
        "training goes wrong without an error: codes of 4 bits become others",
        "the run stops at its first step",
    )
    return [{"says": rule.says, "effect": wrong if "method" in rule.options else stops} for rule in broken]


def _gpu(subject: Subject) -> Iterator[Fault]:
    needs, cluster = subject.estimate, subject.cluster
    if needs is None or cluster is None or needs.fits_gpu or _is_a_guess(subject):
        return
    needed, there = needs.memory.needed_bytes_per_gpu, cluster.gpu.memory_bytes
    surely = needed > SURELY_MORE * there
    sizes, loaded = format_sizes(needed, there, needs.usable_bytes_per_gpu), not needs.memory.load.fits_gpu
    where, has = ("on each GPU", f"{cluster.gpu.name} has") if not cluster.gpu.is_cpu else ("for each rank", _SHARE)
    ends = "the run runs out of memory" if surely else "the run may run out of memory"
    yield fault(
        "zero_optimization",
        f"{title(needs.configuration)} needs {sizes[0]} {where}{_LOADING if loaded else ''}; "
        f"{has} {sizes[1]}, of which {sizes[2]} {_PLANNED}",
        _killed(surely=surely) if cluster.gpu.is_cpu else ends,
        "dstrain plan shows what fits",
        severity=Severity.ERROR if surely else Severity.WARNING,
    )


def _killed(*, surely: bool) -> str:
    return f"the kernel {'kills' if surely else 'may kill'} a rank (exit code -9)"


def _host(subject: Subject) -> Iterator[Fault]:
    needs, cluster = subject.estimate, subject.cluster
    if needs is None or cluster is None or needs.fits_host or _is_a_guess(subject):
        return
    needed, there = needs.memory.host_bytes_per_node, cluster.host_memory_bytes
    is_assumed, loaded = cluster.host_memory_origin == "assumed", needed == needs.memory.load.host_bytes_per_node
    surely = needed > SURELY_MORE * there and not is_assumed
    sizes = format_sizes(needed, there, needs.usable_bytes_per_host)
    there_is = f"{'is assumed to have' if is_assumed else 'has'} {sizes[1]}, of which {sizes[2]} {_PLANNED}"
    yield fault(
        "zero_optimization",
        too_little_ram(title(needs.configuration), sizes[0], there_is, _LOADING if loaded else ""),
        _killed(surely=surely),
        "dstrain plan shows what fits" if loaded else LESS_RAM,
        severity=Severity.ERROR if surely else Severity.WARNING,
    )


def _exceeds(what_takes: str, needed: int, free: int | None, where: str) -> Broken:
    """Returns the words for bytes that a disk does not have; None if it has, or its free bytes are not known."""
    return {"says": too_full(what_takes, needed, free, where)} if free is not None and needed > free else None


def _disk(s: Subject, job: Job) -> Broken:
    if s.estimate is None:
        return None
    needed = s.estimate.saved_bytes(only_model=job.save_only_model)
    return _exceeds("one checkpoint takes", needed, s.free_disk_bytes, f"in {shown(job.output_dir)}")


def _nvme(s: Subject) -> Broken:
    if s.estimate is None:
        return None
    needed = s.estimate.memory.nvme_bytes_per_node
    return _exceeds("offloaded states take", needed, s.free_nvme_bytes, f"in {nvme_path(s.config)}")


def _is_a_guess(subject: Subject) -> bool:
    """Returns whether the GPU, or the RAM of ranks on a CPU, is unknown or assumed; whether a run fits is then not
    checked."""
    cluster = subject.cluster
    if cluster is None or cluster.gpu_origin == "assumed":
        return True
    return cluster.gpu.is_cpu and cluster.host_memory_origin == "assumed"


FITS = frozenset({"DS802", "DS803", "DS807"})
"""Rules that find a run too large for its machines: its settings are legal, and fit others."""
# fmt: off
_E, _W = Severity.ERROR, Severity.WARNING
RULES = (
    Rule(id="DS801", severity=_E, title="group that does not divide the GPUs",
         find=together(
             when(_HPZ, _indivisible_copies,
                  problem="{name} is {share:g}, which does not divide the {slots} GPUs of a node",
                  effect="the second copy is shared across nodes, or DeepSpeed uses another number without a warning",
                  fix="write {slots}: the GPUs of a node"),
             when("tensor_parallel.autotp_size", _indivisible_tp,
                  problem="autotp_size is {size:g}, which does not divide {all} GPUs",
                  effect="the run stops when the groups are created",
                  fix="write a number that divides {slots}, the GPUs of a node")),
         source="deepspeed 0.19.8 utils/groups.py: _create_zero_param_parallel_group"),
    Rule(id="DS802", severity=_E, title="does not fit the GPU", find=_gpu, source="dstrain.plan.estimate"),
    Rule(id="DS803", severity=_E, title="does not fit the RAM", find=_host, source="dstrain.plan.estimate"),
    Rule(id="DS807", severity=_E, title="does not fit the NVMe drive",
         find=when("zero_optimization.offload_optimizer.nvme_path", _nvme, effect=STOPS,
                   problem="{says}", fix=LARGER_DRIVE),
         source="dstrain.plan.estimate"),
    Rule(id="DS804", severity=_E, title="does not fit the disk",
         find=in_job("output_dir", _disk,
                     problem="{says}", effect="the run stops when it writes the first checkpoint", fix=LARGER_DISK),
         source="dstrain.plan.estimate"),
    Rule(id="DS809", severity=_W, title="quantized gradients on one node",
         find=when(_QGZ, lambda s: _has_qgz(s) and _is_one_node(s),
                   problem="{name} is true, and all GPUs are on one node",
                   effect="gradients are sent unquantized: DeepSpeed quantizes them between nodes only",
                   fix="remove the line"),
         source="deepspeed 0.19.8 runtime/zero/stage3.py: __avg_scatter_grads (num_nodes > 1)"),
    Rule(id="DS810", severity=_E, title="quantized gradients that are not fp16",
         find=when(_QGZ, lambda s: _has_qgz(s) and not _is_one_node(s) and not _sends_half(s),
                   problem="{name} is true, and gradients are not fp16",
                   effect="training goes wrong without an error: DeepSpeed's kernel reads their bits as fp16",
                   fix='remove the line, or write "communication_data_type": "fp16"'),
         source="deepspeed 0.19.8 ops/csrc/quantization/pt_binding.cpp: ds_swizzle_quant (read, not run)"),
    Rule(id="DS811", severity=_E, title="quantized gradients of unsuitable shapes",
         find=when(_QGZ, _garbled,
                   problem="{name} is true, and {lost} ({shape}) does not suit its kernels on {ranks} GPUs",
                   effect="training goes wrong without an error: parts of the gradients are never written",
                   fix="remove the line"),
         source="deepspeed 0.19.8 ops/csrc/quantization/swizzled_quantize.cu (read, not run)"),
    Rule(id="DS813", severity=_E, title="weights that cannot be quantized",
         find=when(_QWZ, _unquantizable, problem="{name} is true, but {says}", effect="{effect}",
                   fix="remove the line"),
         source="deepspeed 0.19.8 runtime/zero/partition_parameters.py: CUDAQuantizer.quantize (read, not run)"),
)
"""Rules about the machines."""
# fmt: on
