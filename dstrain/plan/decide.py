"""The plan: the fastest configuration that fits, with its reasons in numbers."""

from __future__ import annotations

from dstrain.choices import Attention, Method, Offload, Precision
from dstrain.errors import InvalidConfig
from dstrain.facts.cluster import Cluster, Origin
from dstrain.facts.model import Kind, ModelFacts
from dstrain.plan.params import adapted, linear_names, trained
from dstrain.plan.plan import Estimate, Plan
from dstrain.plan.request import Request
from dstrain.plan.search import does_not_fit, fastest_fit
from dstrain.units import format_bytes, format_count

LEARNING_RATES = {Method.FULL: 1e-5, Method.LORA: 1e-4, Method.QLORA: 2e-4}
"""Usual peak learning rates of supervised fine-tuning. Source: LLaMA-Factory's full examples (1e-5) and LoRA examples
(1e-4); QLoRA (arXiv 2305.14314), table 9 (2e-4 up to 13B)."""


def decide(model: ModelFacts, cluster: Cluster, request: Request) -> Plan:
    """Returns the fastest plan that fits.

    Raises DoesNotFit with the nearest thing that would, and InvalidConfig where the request contradicts itself or the
    GPU.
    """
    check(model, cluster, request)
    chosen, rejected = fastest_fit(model, cluster, request)
    if chosen is None:
        raise does_not_fit(model, cluster, request, rejected)
    configuration = chosen.configuration
    return Plan(
        chosen=chosen,
        rejected=_distinct(rejected),
        num_estimated=len(rejected) + 1,
        global_batch=cluster.num_gpus * configuration.micro_batch * configuration.grad_accum,
        learning_rate=LEARNING_RATES[request.method],
        reasons=_reasons(model, cluster, chosen),
        notes=_notes(model, cluster, request, chosen),
    )


def check(model: ModelFacts, cluster: Cluster, request: Request) -> None:
    """Raises InvalidConfig for what the GPU or the model cannot do."""
    gpu = cluster.gpu
    if request.precision is Precision.BF16 and not gpu.has_bf16 and gpu.fp16_flops_per_s > 0:
        raise InvalidConfig(f"--precision bf16: {gpu.name} has no bf16", hint="Write --precision fp16.")
    if request.attn is Attention.FLASH_ATTENTION_2 and not gpu.has_flash_attention_2:
        raise InvalidConfig(
            f"--attn flash_attention_2: {gpu.name} is older than what FlashAttention-2 runs on",
            hint="Write --attn sdpa.",
        )
    if request.method is not Method.FULL and not adapted(model, request.lora):
        raise InvalidConfig(
            f"no linear layer of {model.name} is named {', '.join(request.lora.targets)}",
            hint=f"Its linear layers: {', '.join(linear_names(model))}.",
        )


def _distinct(rejected: list[Estimate]) -> tuple[Estimate, ...]:
    """Returns the rejected candidates, of those with one title only the most frugal."""
    best: dict[str, Estimate] = {}
    for each in rejected:
        known = best.get(each.configuration.title)
        if known is None or each.memory.device_bytes_per_gpu < known.memory.device_bytes_per_gpu:
            best[each.configuration.title] = each
    return tuple(best.values())


def _reasons(model: ModelFacts, cluster: Cluster, chosen: Estimate) -> tuple[str, ...]:
    """Returns why, in sentences: what trains, the states per GPU, the peak, host RAM, the batch."""
    configuration, needs, states = chosen.configuration, chosen.memory, chosen.memory.states
    counts = trained(model, configuration.method, configuration.lora)
    share = "all" if counts.trainable == model.num_params else f"{format_count(counts.trainable)} of"
    parts = needs.breakdown_bytes
    samples = cluster.num_gpus * configuration.micro_batch * configuration.grad_accum
    gpus = "1 GPU" if cluster.num_gpus == 1 else f"{cluster.num_gpus} GPUs"
    reasons = [
        f"{share} {format_count(model.num_params)} parameters train; in {configuration.precision} with AdamW that is"
        f" {format_bytes(states.device)} of model states on each GPU (parameters {format_bytes(states.params)},"
        f" gradients {format_bytes(states.grads)}, optimizer {format_bytes(states.optimizer)})",
        f"the peak is at {needs.peak_instant}: {format_bytes(needs.device_bytes_per_gpu)} of"
        f" {format_bytes(cluster.gpu.memory_bytes)}, of which {format_bytes(parts.activations)} activations and"
        f" {format_bytes(parts.logits)} logits",
        f"{gpus} × micro-batch {configuration.micro_batch} × {configuration.grad_accum} accumulated"
        f" = {samples} samples a step",
    ]
    if configuration.offload is not Offload.NONE:
        needed, there = format_bytes(needs.host_bytes_per_node), format_bytes(cluster.host_memory_bytes)
        reasons.append(f"host RAM: {needed} of {there} on each node")
    return tuple(reasons)


def _notes(model: ModelFacts, cluster: Cluster, request: Request, chosen: Estimate) -> tuple[str, ...]:
    """Returns what was assumed, and what to know before training."""
    gpu, configuration = cluster.gpu, chosen.configuration
    notes = []
    if cluster.gpu_origin is Origin.ASSUMED:
        size = format_bytes(gpu.memory_bytes)
        notes.append(f"assumed: GPUs of type {gpu.name} ({size}); none was found here, name yours with --gpu")
    if cluster.host_memory_origin is Origin.ASSUMED and configuration.offload is not Offload.NONE:
        size = format_bytes(cluster.host_memory_bytes)
        notes.append(f"assumed: {size} of RAM on each node; say otherwise with --host-memory")
    if request.global_batch is None and request.micro_batch is None:
        samples = cluster.num_gpus * configuration.micro_batch * configuration.grad_accum
        notes.append(f"assumed: {samples} samples a step; say otherwise with --global-batch")
    if configuration.precision is Precision.FP16 and not gpu.has_bf16:
        notes.append(f"{gpu.name} has neither bf16 nor FlashAttention-2: fp16 with loss scaling and sdpa are used")
    if configuration.precision is Precision.FP16 and model.dtype == "bfloat16":
        notes.append(f"{model.name} was trained in bf16: fp16 may overflow; watch the loss scale")
    if request.method is Method.QLORA:
        notes.append("qlora needs bitsandbytes on the machine that trains: pip install 'dstrain[qlora]'")
    if model.vision is not None:
        frozen = format_count(model.num_params_of(Kind.VISION))
        notes.append(f"a vision-language model trains on text here; its vision tower ({frozen} parameters) is frozen")
    if model.moe is not None and request.method is not Method.FULL:
        notes.append("experts are 3-D tensors in Transformers 5: adapters go to the other linear layers")
    return tuple(notes)
