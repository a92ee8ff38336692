"""Rules about the machines: group sizes that must divide the number of GPUs; GPU memory, host RAM and disks."""

from __future__ import annotations

from collections.abc import Iterator

from dstrain.choices import Precision
from dstrain.config.lint.advisories import trains_in
from dstrain.config.lint.finding import Fault, Severity
from dstrain.config.lint.quantized_gradients import garbled
from dstrain.config.lint.rule import STOPS, Rule
from dstrain.config.lint.rules.jobs import in_job
from dstrain.config.lint.subject import Subject
from dstrain.units import format_bytes, format_sizes

_ZERO = "zero_optimization."
_SHARE = "its share of the RAM is"
_LOADING, _PLANNED = " while the model is loaded", "are planned with"
SURELY_MORE = 1.1
"""Ratio of need to capacity above which a finding is an error. Estimates are within 11 % of every published run
(docs/accuracy.md)."""


def _divides(subject: Subject) -> Iterator[Fault]:
    if subject.hosts is None:
        return
    slots = min(host.slots for host in subject.hosts.hosts)
    share = subject.number(_ZERO + "zero_hpz_partition_size", 1)
    if subject.stage == 3 and share > 1 and slots % share:
        yield Fault(
            pointer=("zero_optimization", "zero_hpz_partition_size"),
            severity=None if subject.hosts.num_slots % share else Severity.WARNING,
            problem=f"zero_hpz_partition_size is {share:g}, which does not divide the {slots} GPUs of a node",
            effect="the second copy is shared across nodes, or DeepSpeed uses another number without a warning",
            fix=f"write {slots}: the GPUs of a node",
        )
    size = subject.number("tensor_parallel.autotp_size", 0)
    if size > 1 and subject.hosts.num_slots % size:
        yield Fault(
            pointer=("tensor_parallel", "autotp_size"),
            problem=f"autotp_size is {size:g}, which does not divide {subject.hosts.num_slots} GPUs",
            effect="the run stops when the groups are created",
            fix=f"write a number that divides {slots}, the GPUs of a node",
        )


def _not_half(subject: Subject) -> Iterator[Fault]:
    key = "zero_quantized_gradients"
    is_one_node = subject.hosts is not None and len(subject.hosts.hosts) == 1
    sent_as = subject.at("communication_data_type", None) or ("fp16" if trains_in(subject, Precision.FP16) else "?")
    if subject.stage == 3 and subject.is_true(_ZERO + key) and sent_as != "fp16" and not is_one_node:
        yield Fault(
            pointer=("zero_optimization", key),
            problem=f"{key} is true, and gradients are not fp16",
            effect="training goes wrong without an error: DeepSpeed's kernel reads their bits as fp16",
            fix='remove the line, or write "communication_data_type": "fp16"',
        )


def _garbled(subject: Subject) -> Iterator[Fault]:
    key = "zero_quantized_gradients"
    if subject.hosts is None or len(subject.hosts.hosts) == 1 or subject.model is None or subject.stage < 3:
        return
    ranks = subject.hosts.num_slots
    lost = garbled(subject.model, ranks)
    if subject.is_true(_ZERO + key) and lost:
        shape = " × ".join(map(str, lost[0].shape))
        yield Fault(
            pointer=("zero_optimization", key),
            problem=f"{key} is true, and {lost[0].name} ({shape}) does not suit its kernels on {ranks} GPUs",
            effect="training goes wrong without an error: parts of the gradients are never written",
            fix="remove the line",
        )


def _one_node(subject: Subject) -> Iterator[Fault]:
    key = "zero_quantized_gradients"
    is_one_node = subject.hosts is not None and len(subject.hosts.hosts) == 1
    if is_one_node and subject.stage == 3 and subject.is_true(_ZERO + key):
        yield Fault(
            pointer=("zero_optimization", key),
            problem=f"{key} is true, and all GPUs are on one node",
            effect="gradients are sent unquantized: DeepSpeed quantizes them between nodes only",
            fix="remove the line",
        )


def _gpu(subject: Subject) -> Iterator[Fault]:
    needs, cluster = subject.estimate, subject.cluster
    if needs is None or cluster is None or needs.fits_gpu or _is_a_guess(subject):
        return
    needed, there = needs.memory.needed_bytes_per_gpu, cluster.gpu.memory_bytes
    surely = needed > SURELY_MORE * there
    sizes, loaded = format_sizes(needed, there, needs.usable_bytes_per_gpu), not needs.memory.load.fits_gpu
    where, has = ("on each GPU", f"{cluster.gpu.name} has") if not cluster.gpu.is_cpu else ("for each rank", _SHARE)
    ends = "the run runs out of memory" if surely else "the run may run out of memory"
    yield Fault(
        pointer=("zero_optimization",),
        severity=Severity.ERROR if surely else Severity.WARNING,
        problem=f"{needs.configuration.title} needs {sizes[0]} {where}{_LOADING if loaded else ''}; "
        f"{has} {sizes[1]}, of which {sizes[2]} {_PLANNED}",
        effect=_killed(surely=surely) if cluster.gpu.is_cpu else ends,
        fix="dstrain plan shows what fits",
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
    has = "is assumed to have" if is_assumed else "has"
    yield Fault(
        pointer=("zero_optimization",),
        severity=Severity.ERROR if surely else Severity.WARNING,
        problem=f"{needs.configuration.title} needs {sizes[0]} of RAM on each node{_LOADING if loaded else ''}, "
        f"which {has} {sizes[1]}, of which {sizes[2]} {_PLANNED}",
        effect=_killed(surely=surely),
        fix=f"{'' if loaded else 'offload less, or use more nodes: '}dstrain plan shows what fits",
    )


def _disk(subject: Subject) -> Iterator[Fault]:
    job, free = subject.asked, subject.free_disk_bytes
    if subject.estimate is None or free is None or job is None:
        return
    needed = subject.estimate.saved_bytes(only_model=job.save_only_model)
    if needed > free:
        problem = f"one checkpoint takes {format_bytes(needed)}; the disk of output_dir has {format_bytes(free)} free"
        fix = "free some space, or choose an output_dir on a larger disk"
        yield in_job(subject, "output_dir", problem, "the run stops when it writes the first checkpoint", fix)


def _nvme(subject: Subject) -> Iterator[Fault]:
    if subject.estimate is None or subject.free_nvme_bytes is None:
        return
    needed = subject.estimate.memory.nvme_bytes_per_node
    if needed > subject.free_nvme_bytes:
        yield Fault(
            pointer=("zero_optimization", "offload_optimizer", "nvme_path"),
            problem=f"offloading to NVMe takes {format_bytes(needed)} on each node; the drive has "
            f"{format_bytes(subject.free_nvme_bytes)} free",
            effect=STOPS,
            fix="free some space, or choose a folder on a larger drive",
        )


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
RULES = (
    Rule(id="DS801", severity=Severity.ERROR, title="group that does not divide the GPUs", find=_divides,
         source="deepspeed 0.19.8 utils/groups.py: _create_zero_param_parallel_group"),
    Rule(id="DS802", severity=Severity.ERROR, title="does not fit the GPU", find=_gpu, source="dstrain.plan.estimate"),
    Rule(id="DS803", severity=Severity.ERROR, title="does not fit the RAM", find=_host, source="dstrain.plan.estimate"),
    Rule(id="DS807", severity=Severity.ERROR, title="does not fit the NVMe drive", find=_nvme,
         source="dstrain.plan.estimate"),
    Rule(id="DS809", severity=Severity.WARNING, title="quantized gradients on one node", find=_one_node,
         source="deepspeed 0.19.8 runtime/zero/stage3.py: __avg_scatter_grads (num_nodes > 1)"),
    Rule(id="DS810", severity=Severity.ERROR, title="quantized gradients that are not fp16", find=_not_half,
         source="deepspeed 0.19.8 ops/csrc/quantization/pt_binding.cpp: ds_swizzle_quant (read, not run)"),
    Rule(id="DS811", severity=Severity.ERROR, title="quantized gradients of unsuitable shapes", find=_garbled,
         source="deepspeed 0.19.8 ops/csrc/quantization/swizzled_quantize.cu (read, not run)"),
    Rule(id="DS804", severity=Severity.ERROR, title="does not fit the disk", find=_disk,
         source="dstrain.plan.estimate"),
)
"""Rules about the machines."""
# fmt: on
