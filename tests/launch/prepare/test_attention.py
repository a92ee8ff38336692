"""The attention of a run is the best that all of its nodes have, decided once and said with its reason."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from dstrain.choices import Attention, Method, Precision
from dstrain.config.lint.rule import JobContext
from dstrain.errors import EnvironmentProblem, Place
from dstrain.facts import probe
from dstrain.facts.attention_kernels import AttentionKernels
from dstrain.facts.cluster import gpus
from dstrain.facts.cluster.cluster import Origin, describe
from dstrain.job.file import JobFile
from dstrain.job.schema import Job
from dstrain.launch.prepare.attention import Wish, choose, wish_of

FA3, FA2, SDPA = Attention.FLASH_ATTENTION_3, Attention.FLASH_ATTENTION_2, Attention.SDPA
WITH_BOTH = AttentionKernels(packages={FA3: "3.0.0", FA2: "2.8.3"})
WITH_2 = AttentionKernels(packages={FA2: "2.8.3"})
CACHED = AttentionKernels(cached={FA3: "0123456789"}, downloadable=(FA2,))
AUTO = Wish(asked=Attention.AUTO, place="job.yaml:9:7", planned=SDPA)


def wish(model: str = "qwen3-8b", facts: dict[str, Any] | None = None, *, on_cpu: bool = False, **job: Any) -> Wish:
    file = JobFile(
        job=Job(model=model, output_dir="o", **({"attn": Attention.AUTO} | job)),
        locate=lambda keys: Place(file="job.yaml", line=9, column=7),
    )
    cluster = describe(gpu=gpus.gpu("cpu" if on_cpu else "h100"), gpu_origin=Origin.GIVEN, gpus=8)
    return wish_of(JobContext(job=file, model=replace(probe.read_model(model), **(facts or {})), cluster=cluster))


def said(asked: Wish, **nodes: AttentionKernels) -> str:
    choice = choose(asked, nodes)
    assert choice.says is not None
    assert choice.says.startswith(choice.attn)
    return choice.says


def test_a_node_that_lacks_the_best_kernel_lowers_all() -> None:
    assert said(AUTO, a=WITH_BOTH, b=WITH_BOTH) == "flash_attention_3 (flash-attn-3 3.0.0), on all 2 nodes"
    assert said(AUTO, a=WITH_BOTH, b=WITH_BOTH, c=WITH_2) == (
        "flash_attention_2 (flash-attn 2.8.3), on all 3 nodes; c lacks flash_attention_3"
    )
    assert said(AUTO, a=WITH_BOTH, b=AttentionKernels()) == "sdpa; b lacks flash_attention_3; b lacks flash_attention_2"
    assert said(AUTO, a=AttentionKernels()) == "sdpa; no FlashAttention is installed that the GPUs run"


def test_nodes_with_other_releases_do_not_share_a_kernel() -> None:
    older = AttentionKernels(packages={FA2: "2.7.4"})
    assert said(AUTO, a=WITH_2, b=WITH_2, c=older) == "sdpa; c has flash-attn 2.7.4, most have flash-attn 2.8.3"
    assert said(AUTO, a=CACHED, b=WITH_BOTH).startswith("sdpa; b has flash-attn-3 3.0.0, most have kernels-community/")


def test_a_kernel_of_the_hub_counts_if_every_node_has_cached_it() -> None:
    assert said(AUTO, a=CACHED, b=CACHED) == (
        "flash_attention_3 (kernels-community/vllm-flash-attn3 0123456), on all 2 nodes"
    )
    assert choose(replace(AUTO, only_packages=True), {"a": CACHED}).attn is SDPA


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        (wish(on_cpu=True), "FlashAttention has no kernels for a CPU"),
        (wish(precision=Precision.FP32), "FlashAttention needs bf16 or fp16"),
        (wish(facts={"head_dim": 512}), "FlashAttention takes heads of up to 256 elements, its version 4 of up to 128"),
        (wish(facts={"has_flash": False}), "Transformers has no FlashAttention for this family"),
    ],
)
def test_what_the_job_or_the_model_cannot_have_is_not_chosen(asked: Wish, reason: str) -> None:
    assert said(asked, a=WITH_BOTH) == f"sdpa; {reason}"


def test_families_without_sdpa_keep_eager() -> None:
    assert said(wish(facts={"has_sdpa": False}), a=WITH_BOTH).startswith("eager; this family's attention has sinks")


def test_sequence_parallelism_takes_packages_alone() -> None:
    assert wish(sp=2).only_packages
    assert choose(wish(sp=2), {"a": CACHED}).attn is SDPA
    assert Attention.FLASH_ATTENTION_4 in wish(sp=2).unsuitable


def test_what_the_job_names_must_be_on_every_node() -> None:
    asked = wish(attn=FA2)
    assert choose(asked, {"a": WITH_2, "b": WITH_BOTH}).says is None
    with pytest.raises(EnvironmentProblem, match=r"job\.yaml:9:7: attn is flash_attention_2, but b lacks") as caught:
        choose(asked, {"a": WITH_2, "b": AttentionKernels()})
    assert "install_kernel('kernels-community/flash-attn2', version=" in str(caught.value.hint)
    assert (
        said(asked, a=CACHED) == "flash_attention_2; a will download kernels-community/flash-attn2 as the ranks start"
    )
    with pytest.raises(EnvironmentProblem, match="a lacks flash_attention_2"):
        choose(wish(attn=FA2, sp=2), {"a": CACHED})  # offline or not, DeepSpeed looks for a package


def test_adapters_of_a_family_with_sinks_take_the_kernel_of_the_hub() -> None:
    asked = wish(facts={"model_type": "gpt_oss", "has_sdpa": False}, attn=FA2, method=Method.LORA)
    assert choose(asked, {"a": CACHED}).says is None
    with pytest.raises(EnvironmentProblem, match="a lacks flash_attention_3"):
        choose(asked, {"a": WITH_BOTH})


def test_a_resumed_run_keeps_its_kernel_if_every_node_still_has_it() -> None:
    assert said(replace(AUTO, kept=FA2), a=WITH_BOTH) == "flash_attention_2 (flash-attn 2.8.3), as in the checkpoint"
    assert said(replace(AUTO, kept=SDPA), a=WITH_BOTH) == "sdpa, as in the checkpoint"
    assert said(replace(AUTO, kept=FA3), a=WITH_BOTH, b=WITH_2) == (
        "flash_attention_2 (flash-attn 2.8.3), on all 2 nodes; the checkpoint was trained with flash_attention_3; b"
        " lacks flash_attention_3"
    )
    assert said(replace(AUTO, kept=Attention.FLASH_ATTENTION_4), a=WITH_2).endswith("a lacks flash_attention_4")
    assert said(replace(wish(precision=Precision.FP32), kept=FA2), a=WITH_2) == (
        "sdpa; the checkpoint was trained with flash_attention_2; FlashAttention needs bf16 or fp16"
    )
