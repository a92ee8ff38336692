"""Goldens of every template over several models, and DeepSpeed's own opinion of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cases import CASES, Case, files, plan

from dstrain.config.files import template_of
from dstrain.config.templates import render_json, render_script, template_names
from dstrain.errors import InvalidConfig

pytestmark = pytest.mark.commands

by_name = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


@by_name
def test_each_case_uses_the_template_it_stands_for(case: Case) -> None:
    assert template_of(plan(**case.options).chosen.configuration) == case.template


def test_every_template_has_a_golden() -> None:
    assert {case.template for case in CASES} == set(template_names())


@by_name
def test_the_files_are_the_golden_ones(case: Case, golden: Callable[[str, str], None]) -> None:
    texts = files(**case.options)
    for name in ("ds_config.json", "job.yaml"):
        golden(f"{case.name}/{name}", texts[name])
    config = json.loads(texts["ds_config.json"])
    assert config["gradient_clipping"] == config["gradient_accumulation_steps"] == "auto"
    assert not {"comms_logger", "wall_clock_breakdown"} & set(config), "they stop overlap"


def test_a_mixture_of_experts_is_gathered_by_its_block() -> None:
    config = json.loads(files(model="qwen3-30b-a3b", gpus=16, gpu="h100")["ds_config.json"])
    assert config["zero_optimization"]["leaf_module"] == {"classes": ["Qwen3MoeSparseMoeBlock"]}


@by_name
def test_deepspeed_accepts_what_transformers_fills_in(case: Case, tmp_path: Path) -> None:
    from deepspeed.runtime.config import DeepSpeedConfig

    filled = _filled(json.loads(files(**case.options)["ds_config.json"]), case, tmp_path)
    loaded = DeepSpeedConfig(filled)
    assert loaded.zero_optimization_stage == filled["zero_optimization"]["stage"]
    assert loaded.gradient_clipping == 1.0
    assert "auto" not in json.dumps(filled)


def _filled(config: dict[str, Any], case: Case, folder: Path) -> dict[str, Any]:
    """Returns the configuration after Transformers' own integration has replaced every "auto"."""
    from transformers import PretrainedConfig, TrainingArguments
    from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

    chosen = plan(**case.options).chosen.configuration
    arguments = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=chosen.batch.micro_batch,
        gradient_accumulation_steps=chosen.step.grad_accum,
        use_cpu=True,
        bf16=chosen.model.precision == "bf16",
        report_to="none",
    )
    filler = HfTrainerDeepSpeedConfig(config)
    filler.trainer_config_process(arguments)
    sizes: dict[str, Any] = {"hidden_size": 1024}
    model = type("Model", (), {"config": PretrainedConfig(**sizes)})()
    filler.trainer_config_finalize(arguments, model, 100)
    found: dict[str, Any] = filler.config
    return found


@pytest.mark.parametrize("fault", ["{{ nothing }}", "{{ 1 / 0 }}", "{% if %}"])
def test_a_fault_in_a_partial_is_placed_in_the_partial(fault: str, tmp_path: Path) -> None:
    (tmp_path / "zero2.json.j2").write_text('{\n{% include "_zero12.json.j2" %}\n}\n')
    (tmp_path / "_zero12.json.j2").write_text(f'"a": 1,\n"b": {fault}\n')
    with pytest.raises(InvalidConfig, match=r"^_zero12\.json\.j2:2: "):
        render_json("zero2.json.j2", {}, override=tmp_path)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"a": {{ nothing }}}', "'nothing' is undefined"),
        ('{"a": 1,\n "a": 2}', r"zero2.json.j2:2:2: the key \"a\" is repeated"),
    ],
)
def test_a_fault_in_a_template_is_named(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "zero2.json.j2").write_text(text)
    with pytest.raises(InvalidConfig, match=said):
        render_json("zero2.json.j2", {}, override=tmp_path)


def test_a_value_cannot_break_out_of_its_string(tmp_path: Path) -> None:
    (tmp_path / "zero2.json.j2").write_text('{"path": {{ path }}}')
    assert render_json("zero2.json.j2", {"path": '", "stage": 3, "x": "'}, override=tmp_path) == {
        "path": '", "stage": 3, "x": "'
    }


def test_an_unknown_template_gets_the_nearest_name() -> None:
    with pytest.raises(InvalidConfig) as caught:
        render_json("zero4.json.j2", {})
    assert "zero" in str(caught.value.hint)
    with pytest.raises(InvalidConfig, match="unknown template"):
        render_script("no-such.sh.j2", {})


@pytest.mark.parametrize(
    "code",
    [
        "cycler.__init__.__globals__.os.system('touch F')",
        "lipsum.__globals__['os'].popen('touch F').read()",
        "''.__class__.__mro__[1].__subclasses__()",
        "self.__init__.__globals__",
        "('%s' | attr('format')).__globals__",
        "stage.__class__",
        "[].append(1) or [].extend([1])",
        "range(10 ** 9) | list",
    ],
)
def test_a_template_reaches_nothing_but_its_values(tmp_path: Path, code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "zero1.json.j2").write_text('{"a": {{ (CODE) | string }}}'.replace("CODE", code))
    with pytest.raises(InvalidConfig, match=r"zero1\.json\.j2"):
        render_json("zero1.json.j2", {"stage": 1}, override=tmp_path)
    assert not (tmp_path / "F").exists()
