"""Adapters of the experts of a mixture: PEFT's `target_parameters`, on two ranks under ZeRO-3 and in one process."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from dstrain.choices import Method
from dstrain.errors import InvalidConfig
from dstrain.facts.cluster.hostfile import Host, Hosts
from dstrain.facts.model.families import from_config
from dstrain.facts.probe import read_model
from dstrain.job.model_changes import Lora
from dstrain.job.schema import Job
from dstrain.launch.scripts.exports import ExportEngine, export
from dstrain.plan.memory.params import trained
from dstrain.rundir import RunDir
from dstrain.train.adapters import with_adapter
from dstrain.train.data.prepare import prepare
from dstrain.train.rank import read
from dstrain.train.tokenizer import load_tokenizer
from tests.train.engine import Engine
from tests.train.launching import EXACT, codes, losses, make_run, said, tensors
from tests.train.tiny import experts, latent, sizes

# of PEFT, which calls Transformers by a name that will change
pytestmark = [
    pytest.mark.parts(6, at=5),
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning"),
]

FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {},
    "mixtral": {"sliding_window": None},
    "deepseek_v3": latent(),
    "gpt_oss": {},
}
NAMES = ("experts.down_proj", "experts.gate_up_proj")
LORA: dict[str, Any] = {"rank": 4, "alpha": 8, "targets": ["q_proj"], "target_parameters": list(NAMES)}


def made(family: str, **options: Any) -> Any:
    """Returns a tiny model."""
    own = {} if family == "qwen3" else experts(4, **FAMILIES.get(family, {}))
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(CONFIG_MAPPING[family](**sizes(**own | options)))


@pytest.fixture(scope="module")
def start(root: Path, demo: Path) -> Path:
    """A folder with a mixture of experts, eight equal samples, and an adapter that PEFT alone has made."""
    folder = root / "experts"
    tokenizer = PreTrainedTokenizerFast.from_pretrained(demo / "model")
    model = made("qwen3_moe", vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id)
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    (folder / "data.jsonl").write_text((demo / "train.jsonl").read_text().splitlines(keepends=True)[0] * 8)
    config = LoraConfig(
        r=4, lora_alpha=8, target_modules=["q_proj"], target_parameters=list(NAMES), task_type="CAUSAL_LM"
    )
    adapted = get_peft_model(AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32), config)
    for name, parameter in adapted.named_parameters():
        if ".lora_B." in name:
            torch.nn.init.normal_(parameter, std=0.1)
    adapted.save_pretrained(str(folder / "adapter"))
    return folder


@pytest.fixture(scope="module")
def run(start: Path, demo: Path, engine: Engine) -> Path:
    """Two ranks that go on from the adapter under ZeRO-3, with checkpointing."""
    job: dict[str, Any] = {
        "model": str(start / "model"),
        "data": str(start / "data.jsonl"),
        "adapter": str(start / "adapter"),
    }
    settings: dict[str, Any] = {**EXACT, "grad_accum": 1, "micro_batch": 1, "seq_len": 64}
    leaf = {"leaf_module": {"classes": ["Qwen3MoeSparseMoeBlock"]}}
    folder = make_run(start / "run", demo, zero={"stage": 3, **leaf}, method="lora", lora=LORA, **job, **settings)
    engine.train(folder)
    assert codes(folder) == [[0, 0]], said(folder)[-3000:]
    return folder


def loaded(start: Path, adapter: Path) -> Any:
    """Returns what PEFT makes of an adapter, ready to train."""
    base = AutoModelForCausalLM.from_pretrained(start / "model", dtype=torch.float32)
    return PeftModel.from_pretrained(base, str(adapter), is_trainable=True).train()


def test_two_ranks_train_what_peft_and_transformers_train_in_one_process(start: Path, run: Path) -> None:
    job = read(RunDir(run)).job
    sample = prepare(job, load_tokenizer(job, job.model), training=True).dataset[0]
    tokens, labels = (torch.tensor([sample[key]]) for key in ("input_ids", "labels"))
    model = loaded(start, start / "adapter")
    adapters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(adapters, lr=job.learning_rate, weight_decay=job.weight_decay)
    found = []
    for _ in range(3):
        loss = model(input_ids=tokens, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    assert [*losses(run).values()] == pytest.approx(found, rel=1e-6)
    ours, theirs = loaded(start, run / "final").state_dict(), model.state_dict()
    assert all(torch.allclose(ours[name], theirs[name], atol=1e-5) for name in theirs)


def test_states_are_those_that_are_planned(start: Path, run: Path) -> None:
    lora = read(RunDir(run)).job.lora
    planned = trained(read_model(str(start / "model")), Method.LORA, lora)
    states = json.loads((run / "states.json").read_text())
    assert [rank["trainable"] for rank in states["ranks"]] == [planned.trainable] * 2


def test_an_export_adds_the_adapter_of_each_expert(start: Path, run: Path, engine: Engine) -> None:
    assert engine.export(run, start / "merged") == 0
    merged = AutoModelForCausalLM.from_pretrained(start / "merged", dtype=torch.float32)
    tokens = torch.arange(2, 40).reshape(1, -1)
    with torch.no_grad():
        expected = loaded(start, run / "final").eval()(tokens).logits
        assert torch.allclose(merged.eval()(tokens).logits, expected, atol=1e-4)
    adapter, base = tensors(run / "final"), made("qwen3_moe").config
    down = adapter["base_model.model.model.layers.0.mlp.experts.lora_B.weight"]
    assert tuple(down.shape) == (base.hidden_size, 4 * base.num_experts)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("names", [("experts",), ("experts.down_proj",)])
def test_the_plan_counts_what_peft_makes(family: str, names: tuple[str, ...]) -> None:
    model = made(family)
    lora = Lora(rank=3, targets=(), target_parameters=names)
    counted = None
    if family != "gpt_oss":  # whose facts are traced
        facts = from_config({**model.config.to_dict(), "model_type": family}, name=family, source=family)
        counted = trained(facts, Method.LORA, lora).trainable
    adapted = with_adapter(model, lora, grad_ckpt=False, dtype=torch.bfloat16)
    found = {name: parameter for name, parameter in adapted.named_parameters() if parameter.requires_grad}
    assert {parameter.dtype for parameter in found.values()} == {torch.bfloat16}
    assert all(".mlp.experts." in name for name in found)
    layers = 1 if family == "deepseek_v3" else 2
    assert len(found) == 2 * layers * (2 if names == ("experts",) else 1)
    assert counted in (None, sum(parameter.numel() for parameter in found.values()))


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("experts.up_proj", 'target_parameters has "experts.up_proj", but no stacked weight of experts is named so'),
        ("mlp.gate.weight", 'target_parameters has "mlp.gate.weight", but no stacked weight of experts'),
    ],
)
def test_other_parameters_are_refused_with_those_that_are_there(name: str, problem: str) -> None:
    with pytest.raises(InvalidConfig, match=problem) as caught:
        with_adapter(made("qwen3_moe"), Lora(target_parameters=(name,)), grad_ckpt=False, dtype=None)
    assert caught.value.hint == "write experts (all), or some of experts.gate_up_proj, experts.down_proj"


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen2_moe", "qwen3_5_moe_text"])
def test_targets_of_shared_experts_are_adapted_or_refused_where_peft_adapts_the_others(family: str) -> None:
    lora = Lora(targets=("down_proj",))
    theirs = get_peft_model(made(family), LoraConfig(target_modules=["down_proj"], task_type="CAUSAL_LM"))
    adapted = [name for name, parameter in theirs.named_parameters() if parameter.requires_grad]
    if family == "deepseek_v3":
        assert all(".experts." in name for name in adapted)
        with pytest.raises(InvalidConfig, match='targets has "down_proj", which PEFT takes for experts'):
            with_adapter(made(family), lora, grad_ckpt=False, dtype=None)
    else:
        assert all(".shared_expert.down_proj." in name for name in adapted)
        model = with_adapter(made(family), lora, grad_ckpt=False, dtype=None)
        assert [name for name, parameter in model.named_parameters() if parameter.requires_grad] == adapted


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3"])
def test_an_exported_script_adapts_the_modules_of_a_run(tmp_path: Path, family: str) -> None:
    model = made(family)
    job = Job(model="m", output_dir="o", data="d.jsonl", method=Method.LORA)
    two = Hosts(hosts=(Host(name="localhost", slots=2),), name="h")
    (tmp_path / "train.py").write_text(export(job, {}, two, ExportEngine.DDP).files["train.py"])
    targets = runpy.run_path(str(tmp_path / "train.py"), run_name="script")["targets_of"](model, "all-linear")
    theirs = get_peft_model(made(family), LoraConfig(target_modules=targets, task_type="CAUSAL_LM"))
    ours = with_adapter(model, Lora(), grad_ckpt=False, dtype=torch.float32)
    names = [{name for name, value in each.named_parameters() if value.requires_grad} for each in (theirs, ours)]
    assert names[0] == names[1]
