"""What is said of a choice, and what a GPU cannot do."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
from cases import ask, plan

from dstrain.choices import Attention, LossKernel, Method, Offload, Optimizer, Precision, Task
from dstrain.errors import InvalidConfig
from dstrain.facts.cluster.calibration import Calibration, Measured
from dstrain.facts.workload import RowContents
from dstrain.job.limits import CPU_LIMITS, CpuLimit
from dstrain.plan.estimate import assess
from dstrain.plan.labels import CHOICE_WORDS, label, short_label
from dstrain.plan.search.alternatives import gain_ratio, neighbours
from dstrain.plan.search.decide import Survey, decide, survey
from dstrain.plan.search.evaluator import estimated
from dstrain.plan.search.reasons import faster
from dstrain.plan.search.search import search
from dstrain.plan.speed.step_time import speed

pytestmark = pytest.mark.commands

ONE: dict[str, Any] = {"zero_stage": 2, "offload": Offload.NONE, "micro_batch": 1, "grad_ckpt": True}
"""Wishes that leave the search little to compare."""


@pytest.mark.parametrize("method", Method)
@pytest.mark.parametrize("task", Task)
def test_every_task_has_a_plan_with_every_method(task: Task, method: Method) -> None:
    assert plan(model="qwen3-0.6b", gpus=2, gpu="4090", task=task, method=method, global_batch=8).chosen.fits


@pytest.mark.parametrize("gpu", ["v100-32g", "t4"])
def test_before_ampere_fp16_is_chosen_and_said(gpu: str) -> None:
    found = plan(model="qwen3-0.6b", gpus=1, gpu=gpu, seq_len=1024)
    assert found.chosen.configuration.model.precision is Precision.FP16
    assert found.chosen.configuration.kernels.attn is Attention.SDPA
    assert any("neither bf16 nor FlashAttention-2" in note for note in found.notes)


def test_bf16_on_a_v100_is_refused() -> None:
    with pytest.raises(InvalidConfig, match="no bf16"):
        plan(model="qwen3-0.6b", gpus=1, gpu="v100-32g", precision="bf16")


def test_qlora_says_what_to_install() -> None:
    assert any("dstrain[qlora]" in note for note in plan(model="qwen3-8b", gpus=1, method="qlora").notes)


def test_a_vision_tower_is_said_to_be_frozen() -> None:
    assert any("is frozen" in note for note in plan(model="qwen3-vl-8b", gpus=8).notes)


def test_a_plan_says_what_compiling_would_bring_and_never_compiles_by_itself() -> None:
    asked = {"model": "qwen3-8b", "gpus": 8}
    plain, compiled = plan(**asked), plan(**asked, torch_compile=True)
    assert not plain.chosen.configuration.kernels.torch_compile
    assert any(
        "torch.compile: published runs save 14 to 21 %" in note and "dstrain tune" in note for note in plain.notes
    )
    assert any("torch.compile" in note and "not counted" in note for note in compiled.notes)
    assert plain.chosen.speed == compiled.chosen.speed
    on_cpu = plan(model="qwen3-0.6b", gpus=2, gpu="cpu", seq_len=512, host_memory=2**38)
    assert not any("torch.compile" in note for note in (*on_cpu.notes, *plan(model="qwen3-vl-8b", gpus=8).notes))


def test_reasons_carry_the_batch_identity() -> None:
    assert any("= 64 samples a step" in reason.text for reason in plan(model="qwen3-8b", gpus=8).reasons)


@pytest.mark.parametrize(
    ("contents", "words"),
    [
        (None, "64 rows"),
        (RowContents(sample_tokens=64, attended_tokens=64, target_share=1), "64 rows (about 4,100 samples)"),
    ],
    ids=["unknown", "known"],
)
def test_a_packed_step_has_rows_and_samples_if_they_are_known(contents: RowContents | None, words: str) -> None:
    asked = ask(model="qwen3-0.6b", gpus=8, seq_len=4096, packing=True, **ONE | {"micro_batch": None})
    workload = replace(asked.workload, contents=contents)
    found = decide(workload, asked.request)
    assert any(f"= {words} a step" in reason.text for reason in found.reasons)
    assert f"assumed: {words} a step; change it with --global-batch" in found.notes
    found = decide(workload, replace(asked.request, global_batch=128))
    doubled = words.replace("64", "128").replace("4,100", "8,200")
    assert any(f"meant for 64 rows a step; for {doubled}, --lr-scaling" in note for note in found.notes)


def test_a_cpu_trains_in_fp32() -> None:
    assert (
        plan(model="qwen3-0.6b", gpus=2, gpu="cpu", seq_len=512, host_memory=2**38).chosen.configuration.model.precision
        is Precision.FP32
    )


@pytest.mark.parametrize(
    "limit", [limit for limit in CPU_LIMITS if not limit.is_of_engine], ids=lambda limit: limit.value
)
def test_what_a_cpu_does_not_run_is_refused_or_said(limit: CpuLimit) -> None:
    options: dict[str, Any] = {limit.key: limit.value}
    if limit.key == "offload":
        options |= {"zero_stage": 3, "nvme": "/nvme"}
    options |= {"model": "qwen3-0.6b", "gpus": 2, "gpu": "cpu", "seq_len": 512, "host_memory": 2**38}
    if limit.unless:
        notes = plan(**options).notes
        (note,) = [note for note in notes if limit.why in note]
        assert limit.unless in note
        assert not any("has neither bf16" in note for note in notes)  # a CPU trains in bf16
    else:
        with pytest.raises(InvalidConfig, match=limit.why):
            plan(**options)


def surveyed(wishes: dict[str, Any] | None = None, **options: Any) -> Survey:
    """Returns the survey of a question with all that DeepSpeed can do left open."""
    return _surveyed(tuple((wishes or {}).items()), tuple(sorted(options.items())))


@cache
def _surveyed(wishes: tuple[tuple[str, Any], ...], options: tuple[tuple[str, Any], ...]) -> Survey:
    asked = ask(**dict(options))
    return survey(asked.workload, replace(asked.request, **{"sp": None, "tp": None, **dict(wishes)}))


def said(found: Survey, pattern: str) -> list[str]:
    """Returns the reasons for the choice that match."""
    return [reason.text for reason in found.proposals[0].reasons if re.search(pattern, reason.text)]


def test_reasons_say_what_was_chosen_over_what_and_by_how_much() -> None:
    assert said(
        surveyed(model="qwen3-8b", gpus=8, gpu="h100"), r"^\S.* over .*: (\d+ % faster|[\d.]+ × as fast), .* GiB"
    )


def test_reasons_say_what_more_memory_would_change() -> None:
    assert said(surveyed(model="qwen3-8b", gpus=8), r"^with [\d.]+ GiB more per GPU, .* would be \d+ % faster")


def test_what_more_memory_would_change_is_true() -> None:
    asked = ask(model="qwen3-8b", gpus=8)
    found = survey(asked.workload, asked.request)
    first, other = found.first, found.rejected[0]
    missing = other.memory.device_bytes_per_gpu - other.usable_bytes_per_gpu
    assert missing > 0
    mib = asked.workload.cluster.gpu.memory_mib + 1 + round(missing / 2**20 / 0.9)
    cluster = asked.workload.cluster
    larger = replace(asked.workload, cluster=replace(cluster, gpu=replace(cluster.gpu, memory_mib=mib)))
    assert assess(larger, other.configuration).fits
    known = speed(larger, other.configuration)
    assert known is not None
    assert first.speed is not None
    assert known.step_s < first.speed.step_s


def test_reasons_name_what_a_step_waits_for() -> None:
    assert said(surveyed(model="qwen3-32b", gpus=16), r"a step takes .* \(± \d+ %\).* MFU \d+ %; limited by compute")


def test_reasons_name_the_sizes_of_buffers() -> None:
    asked = {"zero_stage": 3, "offload": Offload.NONE}
    assert said(surveyed(asked, model="qwen3-8b", gpus=8), r"engine buffers sized to the free memory.*sub-groups of")


def test_the_other_plans_are_compared_with_the_first() -> None:
    others = surveyed(model="qwen3-8b", gpus=8, gpu="h100").proposals[1:]
    assert all(
        re.match(r"(as fast as|\d+ % (slower|faster) than) plan 1, (.* per GPU|the same memory)", each.reasons[0].text)
        for each in others
    )


def test_a_divided_optimizer_is_divided_as_little_as_fits() -> None:
    asked = {"zero_stage": 3, "offload": Offload.OPTIMIZER}
    found = surveyed(asked, model="qwen3-8b", gpus=8, gpu="h200").first
    assert found.configuration.zero.offload_ratio == 0.05


@pytest.mark.parametrize(
    ("wishes", "question", "words"),
    [
        ({"grad_ckpt": True, "micro_batch": 1}, {"model": "qwen3-0.6b", "gpu": "h200"}, "--grad-ckpt"),
        ({"micro_batch": 2}, {"model": "qwen3-32b", "gpu": "h100"}, "--micro-batch 2"),
        ({"hpz": 8}, {"model": "qwen3-32b", "gpu": "h100"}, "--hpz 8"),
        ({"attn": Attention.EAGER, "sp": 1}, {"model": "qwen3-0.6b", "gpu": "h200"}, "--attn eager"),
        ({"loss": LossKernel.FULL, "qwz": True}, {"model": "qwen3-32b", "gpu": "h100"}, "--qwz --loss full"),
    ],
)
def test_what_was_asked_for_is_compared_with_what_dstrain_would_choose(
    wishes: dict[str, Any], question: dict[str, Any], words: str
) -> None:
    asked, free = surveyed(wishes, gpus=8, **question), surveyed(gpus=8, **question).first
    (reason,) = said(asked, ", as asked; ")
    assert asked.first.speed is not None and free.speed is not None
    gain = free.speed.tokens_per_s_per_gpu / asked.first.speed.tokens_per_s_per_gpu - 1
    without = "them" if " --" in words else "it"
    assert (
        reason == f"{words}, as asked; without {without}, {label(free.configuration)} would be {faster(gain)} and fits"
    )
    if words in ("--micro-batch 2", "--hpz 8"):
        assert not said(asked, f"^{words.removeprefix('--').replace('hpz', 'hpZ')} over ")


@pytest.mark.parametrize(
    ("wishes", "question"),
    [
        ({}, {"model": "qwen3-32b", "gpu": "h100"}),
        ({"global_batch": 512}, {"model": "qwen3-32b", "gpu": "h100"}),
        ({"seq_len": 8192, "offload_ratio": 0.25}, {"model": "qwen3-32b", "gpu": "h100"}),
        ({}, {"model": "qwen3-8b", "gpu": "h100"}),
    ],
)
def test_no_alternative_of_a_choice_is_slower_than_a_plan_of_the_table(
    wishes: dict[str, Any], question: dict[str, Any]
) -> None:
    asked = ask(gpus=8, **question)
    workload, request = asked.workload, replace(asked.request, **{"sp": None, **wishes})
    ranking = search(workload, request, top=6)
    others = neighbours(
        workload,
        request,
        ranking.plans[0],
        ranking=ranking,
        assess=partial(estimated, workload),
        verify=partial(assess, workload),
    )
    assert others
    for other in others:
        words = CHOICE_WORDS[other.topic]
        assert words(other.estimate.configuration) == other.other
        for row in ranking.plans:
            if words(row.configuration) == other.other:
                gain = gain_ratio(workload.cluster, row, other.best) if other.best is not None else None
                assert gain is not None and gain < 0.01, (other.other, label(row.configuration))


def test_a_plan_says_which_links_and_which_ram_it_assumes() -> None:
    of_links = "assumed: ib200 between nodes; change it with --interconnect"
    assert of_links in plan(model="qwen3-32b", gpus=16).notes
    assert of_links not in plan(model="qwen3-32b", gpus=16, interconnect="ib200").notes
    assert of_links not in plan(model="qwen3-8b", gpus=8).notes
    found = surveyed(model="qwen3-32b", gpus=8, gpu="h100")
    assert found.first.configuration.checkpointing.offload
    assert any(note.endswith("change it with --host-memory") for note in found.notes)
    assert said(found, r"^host RAM: .*; in training layers' inputs take 32.0 GiB of it")


def test_a_period_of_more_layers_than_there_are_is_refused() -> None:
    for wishes in ({}, {"grad_ckpt": True}):
        with pytest.raises(InvalidConfig, match="--grad-ckpt-every-n-layers 50; the model has fewer layers than that"):
            surveyed({"grad_ckpt_every_n_layers": 50, **wishes}, model="qwen3-8b", gpus=8)


def test_a_plan_that_is_passed_over_is_compared_with_the_choice_as_it_is_refined() -> None:
    question: dict[str, Any] = {"model": "qwen3-32b", "gpus": 8, "gpu": "h100"}
    found = surveyed({"seq_len": 8192}, **question)
    named = surveyed({"seq_len": 8192, "offload_ratio": 0.25}, **question).first
    assert found.first.configuration.zero.offload_ratio == 0.35
    assert found.first.speed is not None and named.speed is not None
    gain = named.speed.tokens_per_s_per_gpu / found.first.speed.tokens_per_s_per_gpu - 1
    (reason,) = said(found, "^with larger engine buffers than .*opt25%")
    assert f"({100 * gain:.0f} ± " in reason


def test_the_fastest_plan_that_is_passed_over_is_in_the_table() -> None:
    found = surveyed(model="qwen3-32b", gpus=16)
    (reason,) = said(found, "^simpler than ")
    assert any(short_label(each.estimate.configuration) in reason for each in found.proposals[1:])


def test_the_parts_of_what_limits_a_step_come_first() -> None:
    found = surveyed({"hpz": 8}, model="qwen3-32b", gpus=8, gpu="h100")
    assert said(found, r"limited by compute \(matrix products \d+ %, attention \d+ %; CPU optimizer \d+ %\)")


def test_states_of_a_divided_optimizer_are_those_of_whole_sub_groups() -> None:
    memory = surveyed({"seq_len": 8192}, model="qwen3-32b", gpus=8, gpu="h100").first.memory
    assert memory.states.optimizer == pytest.approx(memory.breakdown_bytes.optimizer, rel=1e-4)
    assert memory.states.optimizer == 3 * memory.states.grads


def test_one_configuration_keeps_its_buffers_unless_it_fits_only_with_small_ones() -> None:
    one = {"zero_stage": 3, "offload": Offload.NONE, "micro_batch": 1, "grad_ckpt": True}
    first = surveyed(one, model="qwen3-8b", gpus=8).first.configuration
    assert (first.zero.reduce_bucket_size, first.zero.max_reuse_distance) == (4096**2, 10**9)


def test_one_configuration_is_estimated_also_where_it_does_not_fit() -> None:
    one = {"zero_stage": 0, "offload": Offload.NONE, "micro_batch": 8, "grad_ckpt": False}
    found = surveyed(one, model="qwen3-8b", gpus=8)
    assert (found.fits, len(found.proposals)) == (False, 1)
    configuration = found.first.configuration
    assert (configuration.zero.stage, configuration.batch.micro_batch) == (0, 8)
    assert not configuration.checkpointing.enabled


def test_inputs_of_layers_wait_in_ram_where_states_would() -> None:
    asked: dict[str, Any] = {"model": "qwen3-8b", "gpus": 1, "gpu": "4090", "method": "lora", "seq_len": 16384}
    found, without = surveyed(**asked), surveyed({"activation_offload": False}, **asked)
    chosen, other = found.first, without.first
    assert (chosen.configuration.checkpointing.offload, chosen.configuration.zero.offload) == (True, Offload.NONE)
    assert (other.configuration.checkpointing.offload, other.configuration.zero.is_offloaded) == (False, True)
    assert chosen.speed is not None and other.speed is not None
    assert chosen.speed.tokens_per_s_per_gpu > 1.1 * other.speed.tokens_per_s_per_gpu
    assert said(found, "^host RAM: ")


def test_an_offloaded_optimizer_names_the_one_of_8_bits_that_would_spare_it() -> None:
    eight_bit = r"^8-bit AdamW without offload would be 2\d % faster and fits \(ZeRO-3, .*: 1,\d{3} tokens a second"
    asked: dict[str, Any] = {"model": "qwen3-32b", "gpus": 8, "gpu": "h100"}
    found = surveyed({"offload": Offload.OPTIMIZER, "sp": 1}, **asked)
    assert said(found, eight_bit)
    assert found.first.configuration.step.optimizer is Optimizer.ADAMW
    assert not said(surveyed({"sp": 1}, **asked), "8-bit")


@pytest.mark.parametrize(
    ("request_", "question", "text"),
    [
        (
            {},
            {"model": "qwen3-8b", "gpu": "h100"},
            r"^--liger would be \d+ % faster, by Liger's kernels \(dstrain\[kernels\]\)$",
        ),
        ({"liger": True}, {"model": "qwen3-8b", "gpu": "h100"}, "^liger needs liger-kernel on the machine that trains"),
        ({}, {"model": "qwen3-vl-8b", "gpu": "h100"}, None),
        ({}, {"model": "qwen3-0.6b", "gpu": "v100-32g"}, None),
        ({}, {"model": "qwen3-0.6b", "gpu": "mi300x"}, None),
        ({}, {"model": "qwen3-0.6b", "gpu": "cpu"}, None),
    ],
)
def test_a_plan_says_what_ligers_kernels_would_gain(
    request_: dict[str, Any], question: dict[str, Any], text: str | None
) -> None:
    notes = [note for note in surveyed(ONE | request_, gpus=8, **question).notes if "iger" in note]
    assert len(notes) == (text is not None), notes
    assert text is None or re.search(text, notes[0])


def test_the_gain_is_that_of_the_plan_with_ligers_kernels() -> None:
    plain, liger = (surveyed(ONE | {"liger": is_on}, model="qwen3-8b", gpus=8) for is_on in (False, True))
    assert plain.first.speed is not None and liger.first.speed is not None
    gain = plain.first.speed.step_s / liger.first.speed.step_s - 1
    assert any(note.startswith(f"--liger would be {100 * gain:.0f} % faster") for note in plain.notes)


def test_a_rate_between_nodes_counts_for_the_link_it_was_measured_on_and_the_plan_says_so() -> None:
    question = ask(model="qwen3-8b", gpus=16, gpu="h100-sxm", interconnect="eth25", **ONE, sp=1)
    slow = survey(question.workload, question.request)
    entry = Measured(source="5 runs", inter_bus_bytes_per_s=3.2e11, inter_link="ib400")

    def calibrated(entry: Measured) -> Survey:
        workload = replace(question.workload, calibration=Calibration(gpus={"h100-sxm": entry}))
        return survey(workload, question.request)

    assert calibrated(entry).first == slow.first
    assert "calibrated: 5 runs; its rate of ib400 does not count for eth25" in calibrated(entry).notes
    assert calibrated(replace(entry, inter_link="eth25")).first != slow.first
    assert "calibrated: 5 runs" in calibrated(replace(entry, inter_link=None)).notes
