"""Tiny random models of many families: packed samples and padding do not change losses, or are refused or masked."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from dstrain.errors import InvalidConfig
from dstrain.facts.model.traces import Subject
from dstrain.train.arguments import recompute
from dstrain.train.data.collate import (
    Collator,
    joins_rows,
    shift,
    taken_by,
)
from dstrain.train.data.isolation import (
    Trial,
    attend_by_sample,
    packed_masks,
    sees_padding,
)
from dstrain.train.loss import loss_of
from dstrain.train.tracing.building import load_config
from tests.plan.memory.layers import shapes
from tests.train.data.test_packing import packed
from tests.train.tiny import sizes

pytestmark = pytest.mark.engine

LLAMA = sizes(64, layers=4, heads=4, vocab_size=512, max_position_embeddings=256) | {
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}
SLIDING = {"sliding_window": 8}
LINEAR = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 1}
NEMOTRON = {"mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 1}
APART, MASKED, REFUSED = "keeps samples apart", "keeps them apart with masks", "is refused"


@dataclass(frozen=True, kw_only=True)
class Family:
    """A family, and what becomes of packing."""

    name: str
    becomes: str = APART
    config: Mapping[str, Any] = field(default_factory=dict)
    attn: tuple[str, ...] = ("sdpa", "eager")


FAMILIES = (
    Family(name="qwen3"),
    Family(name="llama"),
    Family(name="mistral", config=SLIDING),
    Family(name="gemma3_text", config={**SLIDING, "layer_types": ["sliding_attention", "full_attention"] * 2}),
    Family(name="qwen3_moe", config={**EXPERTS, "num_experts": 4}),
    Family(name="gpt2"),
    Family(name="gpt_oss", becomes=MASKED, config={**EXPERTS, **SLIDING, "num_local_experts": 4}, attn=("eager",)),
    Family(name="opt", becomes=MASKED, config={"ffn_dim": 128, "word_embed_proj_dim": 64}),
    Family(name="mpt", becomes=MASKED, config={"d_model": 64, "n_heads": 4, "n_layers": 4}, attn=("eager",)),
    Family(name="bloom", becomes=REFUSED, attn=("eager",)),
    Family(name="minimax", becomes=REFUSED, config={**EXPERTS, "num_local_experts": 4}),
    Family(
        name="mamba2",
        becomes=REFUSED,
        config={"num_heads": 8, "head_dim": 16, "n_groups": 1, "state_size": 16},
        attn=("eager",),
    ),
    # their kernels for packed rows are not installed
    Family(name="qwen3_next", becomes=REFUSED, config={**EXPERTS, **LINEAR, "num_experts": 4}),
    Family(name="qwen3_5_text", becomes=REFUSED, config=LINEAR),
    Family(name="lfm2", becomes=REFUSED, config={"layer_types": ["conv", "full_attention"] * 2}),
    Family(name="falcon_h1", becomes=REFUSED, config={**MAMBA, "mamba_d_ssm": 128}),
    Family(
        name="granitemoehybrid",
        becomes=REFUSED,
        config={**MAMBA, "layer_types": ["mamba", "attention"] * 2, "num_local_experts": 0},
    ),
    Family(
        name="nemotron_h",
        becomes=REFUSED,
        config={**NEMOTRON, "layers_block_type": ["mamba", "attention", "mlp", "mamba"]},
    ),
    Family(name="bamba", becomes=REFUSED, config={**MAMBA, "attn_layer_indices": [1, 3]}),
)
CASES = [pytest.param(family, attn, id=f"{family.name} {attn}") for family in FAMILIES for attn in family.attn]

WAYS = [pytest.param(*case.values, False, id=case.id) for case in CASES]
WAYS += [
    pytest.param(family, "sdpa", True, id=f"{family.name} sdpa by sample")
    for family in FAMILIES
    if "sdpa" in family.attn
]


def make(family: Family, attn: str, seed: int = 0) -> Any:
    base = {name: value for name, value in LLAMA.items() if name not in {"head_dim", "num_key_value_heads"}}
    if family.name in {"gpt2", "bloom", "mpt"}:
        base = {"vocab_size": 512, "n_layer": 4, "n_head": 4} | ({} if family.name == "mpt" else {"hidden_size": 64})
    elif family.name != "opt":
        base = dict(LLAMA)
    torch.manual_seed(seed)
    config = AutoConfig.for_model(family.name, **{**base, **family.config})
    return AutoModelForCausalLM.from_config(config, attn_implementation=attn, dtype=torch.float32)


def without_dropout(model: Any) -> None:
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        for name in ("dropout", "attention_dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(("family", "attn", "attends_by_sample"), WAYS)
def test_the_loss_of_packed_samples_is_that_of_the_same_alone_or_packing_is_refused(
    family: Family, attn: str, attends_by_sample: bool, checkpointing: bool
) -> None:
    model = make(family, attn).train()
    if checkpointing:
        recompute(model, {"use_reentrant": False})
    collate = Collator(pad_token_id=0, packing=True, takes=taken_by(model))
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.1  # must not be taken for a sample that sees another
    random = np.random.default_rng(0)
    samples = [random.integers(3, 512, size).tolist() for size in (37, 21, 50, 45, 30)]
    rows = packed(samples, [[0, 1, 2], [3, 4]])
    state = torch.get_rng_state()

    def ask() -> bool:
        tokens = rows[0]["input_ids"]
        trial = Trial(model=model, engine=model, inputs_of=lambda row: collate([row] * 2), tokens=tokens, group=None)
        works = attends_by_sample and trial.works_by_sample()
        assert works is (attends_by_sample and family.becomes is not REFUSED)
        return not works and trial.needs_masks()

    if family.becomes is REFUSED:
        with pytest.raises(InvalidConfig, match=rf"packing: {type(model).__name__} with attn: {attn}") as caught:
            ask()
        assert caught.value.hint == "packing: false"
        return
    has_masks = ask()
    assert has_masks is (family.becomes is MASKED and not attends_by_sample)
    assert model.training
    assert state.equal(torch.get_rng_state())
    batch = collate([rows[0], rows[1]])
    labels = batch.pop("labels")
    if has_masks:
        batch["attention_mask"] = packed_masks(model, batch["position_ids"])
    without_dropout(model)
    together = loss_of(model(**batch).logits, shift(labels))
    if attends_by_sample:
        attend_by_sample(model, is_on=False)
    texts = [torch.tensor([sample]) for sample in samples]
    alone = torch.stack([loss_of(model(input_ids=ids).logits, shift(ids)) for ids in texts]).sum(dim=0)
    assert together.tolist() == pytest.approx(alone.tolist(), rel=1e-6)


def of_one_row(per_sample: Callable[..., Any]) -> Callable[..., Any]:
    """Returns what stands for a kernel of fla: samples between borders, of one row only, by Transformers' own code."""

    def rule(*tensors: Any, cu_seqlens: Any, **options: Any) -> tuple[Any, None]:
        assert all(tensor.shape[0] == 1 for tensor in tensors)
        gates = [options.pop(name) for name in ("g", "beta")]
        parts = zip(*(each.split(cu_seqlens.diff().tolist(), dim=1) for each in (*tensors, *gates)), strict=True)
        outs = [per_sample(*part[:3], g=part[3], beta=part[4], use_qk_l2norm_in_kernel=True)[0] for part in parts]
        return torch.cat(outs, dim=1), None

    return rule


def of_each_sample(per_sample: Callable[..., Any]) -> Callable[..., Any]:
    """Returns what stands for causal_conv1d's kernel: samples told apart by `seq_idx`, by Transformers' own code."""

    def convolution(states: Any, *weights: Any, seq_idx: Any, activation: str, **_: Any) -> Any:
        lengths = seq_idx[0].unique_consecutive(return_counts=True)[1].tolist()
        outs = [per_sample(part, *weights, activation=activation) for part in states.split(lengths, dim=2)]
        return torch.cat(outs, dim=2)

    return convolution


@pytest.mark.parametrize("name", ["qwen3_5_text", "qwen3_next"])
def test_kernels_of_linear_attention_are_told_the_samples_of_a_row(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (family,) = [family for family in FAMILIES if family.name == name]
    model = make(family, "sdpa").eval()
    code = sys.modules[type(model).__module__]
    for function, stand_in in (("torch_chunk_gated_delta_rule", of_one_row), ("causal_conv1d_fn", of_each_sample)):
        monkeypatch.setattr(code, function, stand_in(getattr(code, function)))
    collate = Collator(pad_token_id=0, packing=True, takes=taken_by(model), joins_rows=joins_rows(model))
    random = np.random.default_rng(0)
    samples = [random.integers(3, 512, size).tolist() for size in (37, 21, 50, 45, 30)]
    rows = packed(samples, [[0, 1, 2], [3, 4]])
    trial = Trial(model=model, engine=model, inputs_of=lambda row: collate([row] * 2), tokens=range(3, 200), group=None)
    assert not trial.needs_masks()
    batch = collate([rows[0], rows[1]])
    assert batch["input_ids"].shape == (1, 2 * 112)
    labels = batch.pop("labels")
    together = loss_of(model(**batch).logits, shift(labels))
    monkeypatch.undo()
    texts = [torch.tensor([sample]) for sample in samples]
    alone = torch.stack([loss_of(model(input_ids=ids).logits, shift(ids)) for ids in texts]).sum(dim=0)
    assert together.tolist() == pytest.approx(alone.tolist(), rel=1e-6)


@pytest.mark.parts(24)
@pytest.mark.parametrize("family", shapes.FAMILIES)
def test_every_family_on_the_tape_attends_by_sample_as_the_tape_has_it(family: str) -> None:
    config = load_config(Subject(config=shapes.config_of(family, Random(0))), 2)
    config.get_text_config().vocab_size = 128
    auto = AutoModelForImageTextToText if hasattr(config, "vision_config") else AutoModelForCausalLM
    torch.manual_seed(0)
    model = auto.from_config(config, attn_implementation="sdpa", dtype=torch.float32)
    collate = Collator(pad_token_id=0, packing=True, takes=taken_by(model))
    trial = Trial(model=model, engine=model, inputs_of=lambda row: collate([row]), tokens=range(3, 100), group=None)
    assert trial.works_by_sample()


def test_attention_in_chunks_keeps_its_masks() -> None:
    (family,) = [family for family in FAMILIES if family.name == "llama"]
    model = make(family, "sdpa")
    model.config.attention_chunk_size = 4
    assert not attend_by_sample(model)
    assert model.config._attn_implementation == "sdpa"


def test_rounding_of_experts_is_not_taken_for_a_sample_that_sees_another() -> None:
    (family,) = [family for family in FAMILIES if family.name == "qwen3_moe"]
    collate = Collator(pad_token_id=0, packing=True, takes=taken_by(make(family, "sdpa")))
    for seed in range(12):
        model = make(family, "sdpa", seed).train()
        trial = Trial(model=model, engine=model, inputs_of=lambda row: collate([row]), tokens=range(3, 200), group=None)
        assert not trial.needs_masks()


def padded(samples: list[list[int]]) -> dict[str, Any]:
    return Collator(pad_token_id=0, packing=False)([{"input_ids": ids, "labels": ids} for ids in samples])


@pytest.mark.parametrize(("family", "attn"), CASES)
def test_padding_at_the_end_needs_no_mask(family: Family, attn: str) -> None:
    model = make(family, attn)
    without_dropout(model)
    random = np.random.default_rng(0)
    samples = [random.integers(3, 512, size).tolist() for size in (37, 21)]
    state = torch.get_rng_state()
    assert not sees_padding(model, padded([samples[0][:9]] * 2), None)
    assert state.equal(torch.get_rng_state())
    batch = padded(samples)
    mask, labels = batch.pop("attention_mask"), batch.pop("labels")
    losses = [loss_of(model(**batch, **told).logits, shift(labels)) for told in ({}, {"attention_mask": mask})]
    alone = [loss_of(model(input_ids=ids).logits, shift(ids)) for ids in (torch.tensor([sample]) for sample in samples)]
    for loss in losses:
        assert loss.tolist() == pytest.approx(torch.stack(alone).sum(dim=0).tolist(), rel=1e-6)


def test_a_model_that_looks_ahead_needs_a_mask_of_padding() -> None:
    (family,) = [family for family in FAMILIES if family.name == "qwen3"]
    model = make(family, "sdpa")
    for layer in model.model.layers:
        layer.self_attn.is_causal = False
    assert sees_padding(model, padded([list(range(3, 12))] * 2), None)


def test_a_model_that_demands_a_mask_gets_it() -> None:
    (family,) = [family for family in FAMILIES if family.name == "qwen3"]
    model = make(family, "sdpa")
    forward = model.forward
    model.forward = lambda input_ids, attention_mask: forward(input_ids=input_ids, attention_mask=attention_mask)
    assert sees_padding(model, padded([list(range(3, 12))] * 2), None)
