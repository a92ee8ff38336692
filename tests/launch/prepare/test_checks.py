"""What a job asks for that its machines cannot do."""

import json
from contextlib import nullcontext
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from dstrain.choices import Attention, LossKernel, Method, Optimizer, Precision, Task
from dstrain.config.lint.rule import JobContext
from dstrain.errors import EnvironmentProblem, InvalidConfig, Place
from dstrain.facts import probe
from dstrain.facts.cluster import gpus, hostfile
from dstrain.facts.cluster.cluster import Cluster, Origin, describe
from dstrain.facts.model.model_facts import ModelFacts
from dstrain.facts.workload import Workload
from dstrain.findings import Severity
from dstrain.job.file import JobFile
from dstrain.job.model_changes import Lora
from dstrain.job.schema import Job
from dstrain.launch.prepare.checks import COMBINATIONS, DATA_FILES, OF_LINT, OF_MACHINES, findings, require
from dstrain.launch.prepare.job_context import model_of, request_of, workload_of
from dstrain.plan.estimate import estimate
from dstrain.plan.named_parts import unplanned_parts

EIGHT = describe(gpu=gpus.gpu("a100-80g"), gpu_origin=Origin.GIVEN, gpus=8)
HEAD = Lora(targets=("lm_head", "q_proj"))


def _workload(model: ModelFacts | None) -> Workload:
    """Returns the workload of a model on eight A100."""
    assert model is not None
    return Workload(model=model, cluster=EIGHT)


def file_of(**job: Any) -> JobFile:
    """Returns a job file whose keys are all at one place."""
    made = Job(**{"model": "m", "output_dir": "o", **job})
    return JobFile(job=made, locate=lambda keys: Place(file="job.yaml", line=9, column=5))


def combined(file: JobFile, model: ModelFacts | None, cluster: Cluster) -> None:
    """Raises InvalidConfig for a job whose keys do not work together or on its machines."""
    require((*OF_MACHINES, *COMBINATIONS), JobContext(job=file, model=model, cluster=cluster))


def test_two_names_of_one_machine_are_refused() -> None:
    hosts = hostfile.parse("localhost slots=1\n127.0.0.1 slots=1\n", "hostfile")
    with pytest.raises(InvalidConfig, match=r"hostfile:2:1: 127\.0\.0\.1 and localhost are two names"):
        require(OF_MACHINES, JobContext(job=file_of(), hosts=hosts, cluster=EIGHT))


def test_flash_attention_is_refused_on_gpus_that_were_found_and_are_too_old() -> None:
    file = file_of(attn=Attention.FLASH_ATTENTION_2)
    with pytest.raises(InvalidConfig, match=r"job\.yaml:9:5: flash_attention_2 does not run on v100-32g"):
        combined(file, None, describe(gpu=gpus.gpu("v100-32g"), gpu_origin=Origin.MEASURED, gpus=1))
    combined(file, None, replace(EIGHT, gpu_origin=Origin.MEASURED))
    combined(file, None, describe(gpu=gpus.from_nvml("new", 1000), gpu_origin=Origin.MEASURED, gpus=1))


@pytest.mark.parametrize(
    ("model", "job", "said"),
    [
        ("qwen3-8b", {"sp": 3}, "sp is 3, but SP must divide the GPUs"),
        ("qwen2.5-7b", {"sp": 8}, "SP must divide the attention heads"),
        ("gemma-3-27b", {"sp": 4, "seq_len": 8192}, "limits attention to a window with FlashAttention only"),
        ("qwen3-8b", {"sp": 4, "attn": Attention.EAGER}, "attn is eager and sp is 4, but "),
        ("qwen2.5-7b", {"tp": 8}, "tp is 8, but TP must divide the key-value heads"),
        ("qwen3-30b-a3b", {"tp": 2}, "AutoTP refuses the experts"),
        ("qwen3-30b-a3b", {"tiled_mlp": True}, "tiled_mlp is true, but an MLP is computed tile by tile in dense"),
        ("qwen3-8b", {"tp": 2, "method": Method.LORA}, "tp is 2, but AutoTP does not find linears"),
        ("qwen3-8b", {"loss": LossKernel.FUSED, "precision": Precision.FP16}, "exceed the range of fp16"),
        ("qwen3-8b", {"loss": LossKernel.FUSED, "method": Method.LORA, "lora": HEAD}, "a head without an adapter"),
        ("qwen3-vl-8b", {"liger": True}, "liger is true, but Liger's kernels are planned and run for deepseek_v2,"),
        ("qwen3-30b-a3b", {"ep": 2, "liger": True}, "Liger's experts are others"),
        ("qwen3-8b", {"loss": LossKernel.CHUNKED, "tp": 2}, "tensor-parallel ranks have a loss of their own"),
    ],
)
def test_a_combination_that_does_not_work_is_refused_at_its_line(model: str, job: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidConfig) as caught:
        combined(file_of(**job), probe.read_model(model), EIGHT)
    assert said in caught.value.problem
    keys = ("sp", "tp", "ep", "loss", "tiled_mlp", "liger", "attn")
    assert str(caught.value).startswith(tuple(f"job.yaml:9:5: {key} is " for key in keys))


@pytest.mark.parametrize(
    ("job", "said", "hint"),
    [
        ({"loss": LossKernel.FUSED, "tp": 2}, "loss is fused and tp is 2, but tensor-parallel", "Write loss: full."),
        ({"liger": True, "ep": 2}, "liger is true and ep is 2, but Liger's experts", "Write liger: false."),
        (
            {"optimizer": Optimizer.ADAMW_BF16, "precision": Precision.FP32},
            "optimizer is adamw_bf16, but adamw_bf16 needs precision bf16",
            "Write precision: bf16, or optimizer: adamw.",
        ),
    ],
)
def test_of_two_keys_that_exclude_each_other_the_one_to_change_is_named_once(
    job: dict[str, Any], said: str, hint: str
) -> None:
    model = "qwen3-30b-a3b" if "ep" in job else "qwen3-8b"
    file = file_of(model=model, attn=Attention.AUTO, **job)
    context = JobContext(job=file, model=probe.read_model(model), cluster=EIGHT)
    (found,) = [
        each for each in findings(OF_LINT, context) if each.rule == "DS808" and each.problem.startswith(tuple(job))
    ]
    assert (found.problem[: len(said)], found.fix) == (said, hint)
    absent = [each.severity for each in findings(OF_LINT, context) if "liger needs liger-kernel" in each.problem]
    assert absent == [Severity.WARNING] * (find_spec("liger_kernel") is None and "liger" in job)


def test_attention_that_transformers_does_not_have_for_a_model_is_refused_at_its_line() -> None:
    model = replace(probe.read_model("qwen3-8b"), has_sdpa=False)
    with pytest.raises(InvalidConfig, match=r"job\.yaml:9:5: attn is sdpa, but Transformers computes") as caught:
        combined(file_of(), model, EIGHT)
    assert caught.value.hint == "Write attn: auto."
    for attn in (Attention.EAGER, Attention.AUTO):
        combined(file_of(attn=attn), model, EIGHT)


def images_of(folder: Path, **job: Any) -> list[str]:
    """Returns the notes about a job whose data have an image."""
    (folder / "a.png").write_bytes(b"")
    (folder / "model").mkdir()
    kind = job.pop("kind", "image")
    is_pair = job.get("task", Task.SFT).rows == 2
    answers = {"chosen": "b", "rejected": "c"} if is_pair else {"output": "b"}
    row = {"instruction": f"<{kind}>", **answers, f"{kind}s": ["a.png"]}
    (folder / "train.jsonl").write_text(json.dumps(row))
    if job.pop("has_processor", True):
        (folder / "model" / "preprocessor_config.json").write_text("{}")
    (folder / "model" / "config.json").write_text(json.dumps({"model_type": job.pop("family", "qwen3_vl")}))
    file = file_of(model=str(folder / "model"), data=str(folder / "train.jsonl"), **job)
    return require(DATA_FILES, JobContext(job=file))


@pytest.mark.parametrize("packing", [False, True])
def test_an_estimate_without_images_says_so(tmp_path: Path, packing: bool) -> None:
    (note,) = images_of(tmp_path, packing=packing)
    assert note.endswith("train.jsonl: the estimate counts no images: set image_patches to the patches of a sample")


@pytest.mark.parametrize(
    ("job", "said"),
    [
        ({"packing": True, "family": "gemma3"}, "data: packing is true, which data with images do not support"),
        ({"tp": 2}, "data: tp is 2, which data with images do not support"),
        ({"has_processor": False}, "has no processor for them"),
        ({"has_processor": False, "task": Task.DPO}, "has no processor for them"),
        ({"kind": "video", "family": "gemma3"}, "data: gemma3 does not train on videos; qwen3_5, "),
        ({"kind": "audio"}, '"audios" holds sound, which is not supported'),
        (
            {"family": "mllama"},
            "data: mllama does not train on images: its layers attend to images through a mask of tiles",
        ),
    ],
)
def test_data_with_images_are_refused_where_they_do_not_train(tmp_path: Path, job: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidConfig) as caught:
        images_of(tmp_path, **job)
    assert said in caught.value.problem


@pytest.mark.parametrize(("family", "package"), [("mistral3", "torchvision"), ("smolvlm", "num2words")])
def test_a_family_whose_processor_needs_another_package_names_it(tmp_path: Path, family: str, package: str) -> None:
    if find_spec(package) is not None:
        assert images_of(tmp_path, family=family)
        return
    with pytest.raises(EnvironmentProblem, match=f"the processor of {family} needs {package}, which is not installed"):
        images_of(tmp_path, family=family)


def test_ligers_kernels_of_a_job_are_in_its_estimate() -> None:
    assert request_of(Job(model="m", output_dir="o", liger=True)).configuration.kernels.liger


def test_counted_images_and_a_trained_tower_change_the_estimate(tmp_path: Path) -> None:
    counted = Job(model="qwen3-vl-8b", output_dir="o", image_patches=1024)
    assert request_of(counted).image_patches == 1024
    trained = replace(counted, freeze_vision_tower=False)
    models = [model_of(job)[0] for job in (counted, trained)]
    config = {"zero_optimization": {"stage": 3}}
    frozen, whole = (estimate(_workload(model), request_of(counted), config) for model in models)
    tower = whole.num_trainable_params - frozen.num_trainable_params
    assert tower > 400e6
    states = 14 * tower / 8  # gradients in bf16, weights and two moments in fp32
    assert states < whole.memory.live_bytes_per_gpu - frozen.memory.live_bytes_per_gpu < 1.2 * states


def test_a_trained_tower_has_no_estimate_without_its_images(tmp_path: Path) -> None:
    trained = Job(model="gemma-3-4b", output_dir="o", freeze_vision_tower=False)
    gemma, qwen = probe.read_model("gemma-3-4b"), probe.read_model("qwen3-vl-8b")
    reason = "no estimate of memory: with freeze_vision_tower it needs image_patches, the patches of a sample"
    assert unplanned_parts(trained, gemma) == reason
    assert unplanned_parts(trained, replace(gemma, vision=None)) == reason  # a tower whose sizes are not known
    assert unplanned_parts(trained, qwen) == reason
    assert unplanned_parts(replace(trained, image_patches=64), qwen) is None
    wide = replace(trained, image_patches=4 * trained.seq_len + 4)
    assert f"are {trained.seq_len + 1:,} tokens, more than" in str(unplanned_parts(wide, qwen))
    file = replace(file_of(), job=trained)
    assert workload_of(JobContext(job=file, model=gemma, cluster=_workload(gemma).cluster)) is None


def test_parallelism_that_does_not_divide_the_gpus_is_refused_for_any_model() -> None:
    for key, size, is_right in [("sp", 3, False), ("sp", 4, True), ("tp", 3, False), ("ep", 3, False)]:
        with nullcontext() if is_right else pytest.raises(InvalidConfig, match="must divide the GPUs"):
            combined(file_of(**{key: size}), None, EIGHT)


@pytest.mark.parametrize(
    ("model", "gpu", "job", "why"),
    [
        ("qwen3-8b", "a100-80g", {"tiled_mlp": True}, "compiles tiled MLPs again in every step"),
        ("qwen3-30b-a3b", "a100-80g", {"ep": 2}, "not tried with experts that ranks share"),
        ("qwen3-vl-8b", "a100-80g", {}, "not tried with models that have a vision tower"),
        ("qwen3-8b", "pascal", {}, "older ones lack Triton"),
    ],
)
def test_layers_that_cannot_be_compiled_are_refused(model: str, gpu: str, job: dict[str, Any], why: str) -> None:
    file = file_of(torch_compile=True, precision=Precision.FP16, **job)
    pascal = replace(gpus.gpu("v100-16g"), compute_capability=(6, 0))
    cluster = describe(gpu=pascal if gpu == "pascal" else gpus.gpu(gpu), gpu_origin=Origin.GIVEN, gpus=8)
    with pytest.raises(InvalidConfig, match=why):
        combined(file, probe.read_model(model), cluster)


@pytest.mark.parametrize(
    "job",
    [
        {},
        {"loss": LossKernel.FUSED, "liger": True},
        {"sp": 8, "liger": True, "tiled_mlp": True},
        {"torch_compile": True},
        {"torch_compile": True, "tp": 4, "grad_ckpt": True},
        {"tp": 4},
        {"sp": 4, "packing": True, "attn": Attention.FLASH_ATTENTION_2},
    ],
)
def test_parallelism_that_works_is_not(job: dict[str, Any]) -> None:
    combined(file_of(**job), probe.read_model("qwen3-8b"), EIGHT)
