"""What the allocator holds without DeepSpeed, against published nvidia-smi figures."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from itertools import islice
from typing import Any

import pytest

from benchmarks.published.pytorch import fsdp, live_bytes
from benchmarks.published.pytorch.estimate import reserved
from benchmarks.published.pytorch.sharding import with_states
from benchmarks.published.shelf import find_model
from benchmarks.published.training_code import PLANNED, TRANSFORMERS_4_45, UNSLOTH, Loss, StateDtypes, with_loss
from dstrain.choices import Attention, Method, Offload, Optimizer
from dstrain.facts.cluster import cluster as clusters
from dstrain.facts.cluster import gpus
from dstrain.facts.cluster.cluster import Origin
from dstrain.facts.model.model_facts import ModelFacts
from dstrain.job.model_changes import Lora
from dstrain.plan.configuration import DEFAULTS, Configuration, changed
from dstrain.plan.memory.outside import context_bytes, nccl_bytes
from dstrain.plan.memory.reserved import Reserved
from dstrain.units import GIB, MIB

A100 = gpus.gpu("a100-80g")
DRIVER_BYTES = 80 * GIB
"""An A100's memory; what the driver keeps of it is not in nvidia-smi's figure of the process."""


def model_of(name: str, added: int) -> ModelFacts:
    """Returns the published model with that many tokens added."""
    shelf = find_model(name, added_tokens=added)
    assert shelf is not None
    return shelf.model


MISTRAL, LLAMA = model_of("Mistral 7B", 1), model_of("Llama 3 8B", 2)
ADAPTER = Lora(rank=16, dropout=0.1, targets=("q_proj", "k_proj", "v_proj", "o_proj"))
ONE_GPU = changed(
    DEFAULTS,
    method=Method.LORA,
    lora=ADAPTER,
    grad_ckpt=True,
    attn=Attention.FLASH_ATTENTION_2,
    packing=True,
    code=with_states(replace(TRANSFORMERS_4_45, fused=UNSLOTH), StateDtypes.AUTOCAST),
    expandable_segments=False,
)
"""How fms-acceleration's a100_80gb_liger.csv was measured."""


def losing(loss: Loss, **changes: Any) -> Configuration:
    """Returns a configuration of one GPU with another loss."""
    configuration = changed(ONE_GPU, loss=PLANNED[loss], **changes)
    return replace(configuration, code=with_loss(configuration.code, loss))


def held(model: ModelFacts, configuration: Configuration, ranks: int = 1) -> Reserved:
    """Returns the replay on an A100."""
    return reserved(model, configuration, ranks, capacity_bytes=DRIVER_BYTES - GIB)


@pytest.mark.parametrize(
    ("model", "micro_batch", "loss", "nvidia_smi_mib"),
    [
        (MISTRAL, 4, Loss.LIGER, 23833),
        (MISTRAL, 8, Loss.LIGER, 32921),
        (MISTRAL, 16, Loss.LIGER, 51099),
        (MISTRAL, 4, Loss.IN_PLACE, 27511),
        (MISTRAL, 8, Loss.IN_PLACE, 40271),
        (MISTRAL, 16, Loss.IN_PLACE, 65793),
        (LLAMA, 4, Loss.IN_PLACE, 50711),
    ],
)
def test_one_gpu_holds_what_nvidia_smi_shows_but_for_the_context(
    model: ModelFacts, micro_batch: int, loss: Loss, nvidia_smi_mib: int
) -> None:
    configuration = losing(loss, micro_batch=micro_batch)
    outside = nvidia_smi_mib * MIB - held(model, configuration).reserved_bytes
    assert 0.2 * GIB < outside < 0.8 * GIB


def test_after_memory_ran_out_once_blocks_lie_closer() -> None:
    found = held(LLAMA, losing(Loss.IN_PLACE, micro_batch=8))
    assert (found.retries, found.settled_retries) == (1, 0)
    assert not found.out_of_memory
    assert found.reserved_bytes > 1.15 * found.settled_bytes
    assert found.settled_bytes + context_bytes(A100) == pytest.approx(58301 * MIB, rel=0.01)


@pytest.mark.parametrize(
    ("ranks", "micro_batch", "changes", "nvidia_smi_mib", "tolerance"),
    [
        (2, 8, {"loss": Loss.IN_PLACE}, 38142, 0.03),
        (4, 8, {"loss": Loss.IN_PLACE}, 34897, 0.03),
        (2, 2, {"method": Method.FULL, "code": with_states(TRANSFORMERS_4_45, StateDtypes.PURE_BF16)}, 44382, 0.06),
        (4, 4, {"method": Method.FULL, "loss": Loss.LIGER}, 47700, 0.06),
    ],
)
def test_fsdp_holds_what_nvidia_smi_shows(
    ranks: int, micro_batch: int, changes: dict[str, Any], nvidia_smi_mib: int, tolerance: float
) -> None:
    configuration = losing(changes.pop("loss", Loss.FULL), zero_stage=3, micro_batch=micro_batch, **changes)
    cluster = clusters.describe(gpu=A100, gpu_origin=Origin.GIVEN, gpus=ranks)
    outside = context_bytes(A100) + nccl_bytes(cluster, configuration)
    found = held(MISTRAL, configuration, ranks).settled_bytes + outside
    assert found == pytest.approx(nvidia_smi_mib * MIB, rel=tolerance)


def test_segments_that_grow_hold_less() -> None:
    configuration = changed(ONE_GPU, method=Method.FULL, code=with_states(ONE_GPU.code, StateDtypes.PURE_BF16))
    growing = changed(configuration, expandable_segments=True)
    peak = live_bytes.peak(MISTRAL, configuration, 1).total
    assert peak <= held(MISTRAL, growing).reserved_bytes < 1.02 * peak < held(MISTRAL, configuration).reserved_bytes


def test_on_one_gpu_gradients_of_almost_all_layers_meet_activations() -> None:
    configuration = changed(
        ONE_GPU, method=Method.FULL, optimizer=Optimizer.SGD, code=with_states(ONE_GPU.code, StateDtypes.PURE_BF16)
    )
    peak = live_bytes.peak(MISTRAL, configuration, 1)
    assert peak.name == "layer backward"
    assert peak.grads == pytest.approx(2 * MISTRAL.num_params, rel=0.05)


def test_a_run_that_is_too_large_runs_out_of_memory() -> None:
    configuration = changed(ONE_GPU, method=Method.FULL, micro_batch=4)
    found = reserved(MISTRAL, configuration, 1, capacity_bytes=40 * GIB)
    assert found.out_of_memory
    assert found.retries > 0
    assert found.reserved_bytes <= 40 * GIB


@pytest.mark.parametrize("method", [Method.FULL, Method.LORA])
@pytest.mark.parametrize("state_dtypes", [StateDtypes.PURE_BF16, StateDtypes.AUTOCAST])
def test_fsdp_with_shards_in_ram_leaves_no_more_on_the_gpu_than_gathered_units(
    method: Method, state_dtypes: StateDtypes
) -> None:
    here = changed(ONE_GPU, method=method, zero_stage=3, code=with_states(ONE_GPU.code, state_dtypes))
    configuration = changed(here, offload=Offload.PARAMS)
    alive: dict[Hashable, int] = {}
    left = []
    for events in islice(fsdp.steps(MISTRAL, configuration, 4, 0), 3):
        for key, size, *_ in events:
            alive[key] = size
        left.append(sum(alive.values()))
    units = fsdp._Run(MISTRAL, configuration, 4).bytes
    assert left[1] == left[2] <= fsdp.IN_FLIGHT * max(units[1:]) + units[fsdp.ROOT]
    assert held(MISTRAL, configuration, 4).reserved_bytes < held(MISTRAL, here, 4).reserved_bytes


def test_the_ranks_of_fsdp_share_every_tensor_once() -> None:
    configuration = changed(ONE_GPU, method=Method.FULL, zero_stage=3)
    pieces = [fsdp._Run(MISTRAL, configuration, 4).pieces(rank) for rank in range(4)]
    assert sum(sum(sum(group) for group in groups) for groups in pieces) == MISTRAL.num_params
