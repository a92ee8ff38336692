"""Mixtures of experts: their auxiliary loss does not depend on ranks and accumulation, and loads are counted."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from dstrain.errors import InvalidConfig
from dstrain.job.schema import Job
from dstrain.monitor.expert_balance import EVENT, LoadMap, balance, curves, load_map, newest
from dstrain.monitor.meter import ExpertLoads, routers_of
from dstrain.monitor.metrics import read_jsonl, tag_of
from dstrain.monitor.sinks.sink import CELL
from dstrain.train.loss import RouterLoss
from tests.train.engine import Engine
from tests.train.launching import codes, lines, losses, make_run, said
from tests.train.tiny import experts, latent, sizes

pytestmark = pytest.mark.parts(6, at=0)

SPARSE = sizes() | experts(4, router_aux_loss_coef=0.25)


def job(**values: Any) -> Job:
    return Job(model="", output_dir="", **values)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("family", "options", "num_layers"),
    [
        ("qwen3_moe", experts(6), 2),
        ("mixtral", experts(6), 2),
        ("gpt_oss", experts(6), 2),
        ("glm4_moe", experts(6) | latent(), 1),
        ("deepseek_v3", experts(6) | latent(), 1),
        ("qwen3", {}, 0),
    ],
)
def test_every_router_is_counted_layer_by_layer(family: str, options: dict[str, Any], num_layers: int) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[family](**sizes(**options)))
    loads = ExpertLoads(routers_of(model), None)
    tokens = torch.randint(0, 96, (2, 10))
    model.eval()
    model(tokens)
    assert loads.close() == {}  # nothing has trained
    model.train()
    model(tokens)
    found = loads.close()
    assert bool(found) == bool(num_layers)
    if found:
        assert found["experts"] == 6 * num_layers
        assert len(found["expert_load_cv_by_layer"]) == num_layers
        assert found["expert_layers"] == [*range(2 - num_layers, 2)]
        assert 0 <= found["expert_load_cv"] <= found["expert_load_cv_worst_layer"] <= 5**0.5
        assert 1 <= found["expert_load_max_over_mean"] <= 6
        record = newest([loads.record(7) or {}])
        assert record is not None
        assert [sum(layer) for layer in record.loads] == pytest.approx([6] * num_layers, abs=0.03)
    assert loads.record(8) is None
    assert loads.close() == {}


def test_balance_is_that_of_the_counts() -> None:
    found = balance([[30, 10, 0, 0], [10, 10, 10, 10]], (0, 1))
    assert found["dead_experts_by_layer"] == [2, 0]
    assert found["expert_load_max_over_mean"] == 3
    assert found["expert_load_cv_worst_layer"] == pytest.approx(1.5**0.5)
    assert found["expert_load_diversity_by_layer"][1] == pytest.approx(1)


def test_figures_of_layers_are_curves_and_the_map_keeps_rare_experts() -> None:
    counts = [[1, 1999, 0, 0], [500, 500, 500, 500]]
    names = curves(balance(counts, (3, 11)))
    assert len(names) == 4 * 2
    assert (names["expert_load_max_over_mean/layer_03"], names["dead_experts/layer_11"]) == (3.998, 0)
    loads = load_map(counts, (3, 11), 40)
    assert loads.loads == ((0.01, 4.0, 0.0, 0.0), (1.0, 1.0, 1.0, 1.0))
    assert "expert 1 of layer 3 is the busiest with 4.0 times the mean; 2 of 8 experts got no token" in loads.text
    assert loads.rows[0][:4] == ("3", "1.73", "4.00", "1")


def test_the_last_whole_map_counts() -> None:
    whole = {"event": EVENT, "step": 4, "layers": [0], "loads": [[1.0, 1.0]]}
    damaged = ({**whole, "loads": "x"}, {**whole, "layers": [0, 1]}, {**whole, "loads": [[0.0, 0.0]]})
    assert newest([whole, *damaged, {"step": 5}]) == LoadMap(step=4, layers=(0,), loads=((1.0, 1.0),))
    assert newest(damaged) is None


def test_the_coefficient_weighs_a_mean_over_micro_batches() -> None:
    config = Qwen3MoeConfig(**SPARSE)
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(config)
    tokens = torch.randint(0, 96, (1, 12))
    wanted, micro_batches, num_ranks = 0.5, 4, 2
    router_loss = RouterLoss(model, job(router_aux_loss_coef=wanted), num_ranks)
    plain = model(tokens, labels=tokens).loss
    outputs = model(tokens, labels=tokens, **router_loss.arguments)
    found = router_loss.weighed(num_ranks * outputs.loss, outputs, micro_batches)
    assert found.item() == pytest.approx(
        num_ranks * plain.item() + wanted / micro_batches * outputs.aux_loss.item(), rel=1e-5
    )


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")
@pytest.mark.parametrize("is_reentrant", [False, True])
def test_reentrant_checkpointing_of_adapters_would_not_train_it_and_is_refused(is_reentrant: bool) -> None:
    config = Qwen3MoeConfig(**SPARSE)
    base = Qwen3MoeForCausalLM(config)
    base.enable_input_require_grads()
    base.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": is_reentrant})
    model = get_peft_model(base, LoraConfig(target_modules=["q_proj"]))
    router_loss = RouterLoss(model, job(router_aux_loss_coef=0.1), 1)
    tokens = torch.ones(1, 12, dtype=torch.long)
    outputs = model.train()(tokens, labels=tokens, **router_loss.arguments)
    with pytest.raises(InvalidConfig, match="has no gradient") if is_reentrant else nullcontext():
        router_loss.weighed(outputs.loss, outputs, 1)


@pytest.mark.parametrize(
    ("coefficient", "own", "is_on", "weight"),
    [(None, False, False, 0), (None, True, True, 0.25), (0.0, True, False, 0), (0.1, False, True, 0.1)],
)
def test_without_a_coefficient_the_models_own_counts(
    coefficient: float | None, own: bool, is_on: bool, weight: float
) -> None:
    config = Qwen3MoeConfig(**SPARSE, output_router_logits=own)
    found = RouterLoss(Qwen3MoeForCausalLM(config), job(router_aux_loss_coef=coefficient), 2)
    assert (found.arguments, found.coefficient) == ({"output_router_logits": is_on}, weight)


def test_models_and_jobs_without_such_a_loss_are_refused() -> None:
    dense = AutoModelForCausalLM.from_config(Qwen3Config(**sizes()))
    with pytest.raises(InvalidConfig, match="Qwen3ForCausalLM has no auxiliary loss"):
        RouterLoss(dense, job(router_aux_loss_coef=0.1), 1)
    assert RouterLoss(dense, job(), 1).arguments == {}
    sparse = Qwen3MoeForCausalLM(Qwen3MoeConfig(**SPARSE))
    with pytest.raises(InvalidConfig, match="tp is 2"):
        RouterLoss(sparse, job(router_aux_loss_coef=0.1, tp=2), 2)


@pytest.mark.parametrize(("stage", "ep"), [(3, 1), (2, 2), (3, 2)])
def test_losses_and_norms_are_those_of_one_rank_on_two_that_accumulate(
    demo: Path, engine: Engine, tmp_path: Path, stage: int, ep: int
) -> None:
    """Every sample is the same one, so that the auxiliary loss of a micro-batch does not depend on how many it has."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(demo / "model")
    own = {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id, "norm_topk_prob": True}
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**SPARSE | own))
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    first = (demo / "train.jsonl").read_text().splitlines()[0]
    (tmp_path / "data.jsonl").write_text(f"{first}\n" * 8)
    shared: dict[str, Any] = {
        "model": str(tmp_path / "model"),
        "data": str(tmp_path / "data.jsonl"),
        "router_aux_loss_coef": 0.5,
        "precision": "fp32",
    }
    runs = []
    for ranks, micro_batch, grad_accum in ((1, 4, 1), (2, 1, 2)):
        folder = tmp_path / f"{ranks} ranks"
        kept = {"monitor": {"sinks": ["tensorboard"]}, "ep": ep} if ranks == 2 else {}
        shared_experts = {"expert_parallel": {"enabled": True, "autoep_size": ep}} if ranks * ep > 2 else {}
        batch = {"micro_batch": micro_batch, "grad_accum": grad_accum}
        zero = {"stage": stage if ranks == 2 else 2}
        make_run(folder, demo, zero=zero, engine=shared_experts, **batch, **shared, **kept)
        engine.train(folder, ranks=ranks)
        assert set(codes(folder)[-1]) == {0}, said(folder)[-3000:]
        runs.append(folder)
    alone, together = runs
    assert losses(together) == pytest.approx(losses(alone), rel=1e-4)
    for there, here in zip(lines(together), lines(alone), strict=True):
        assert there["grad_norm"] == pytest.approx(here["grad_norm"], rel=1e-3)
        if ep == 1:  # DeepSpeed's own layers count no loads
            assert there["expert_load_cv_by_layer"] == pytest.approx(here["expert_load_cv_by_layer"], abs=0.05)
            assert there["experts"] == 8
    if ep == 1:
        _assert_layers_reach_tensorboard(together, lines(together)[-1])
    assert json.loads((tmp_path / "model" / "config.json").read_text())["output_router_logits"] is False


def _assert_layers_reach_tensorboard(run: Path, last: dict[str, Any]) -> None:
    """Asserts that each layer has its curves, and that the end of the run has the map and its table."""
    events = EventAccumulator(str(next((run / "tensorboard").iterdir()))).Reload()
    for name in ("expert_load_cv", "expert_load_max_over_mean", "expert_load_diversity", "dead_experts"):
        for layer, value in enumerate(last[f"{name}_by_layer"]):
            assert events.Scalars(tag_of(f"{name}/layer_{layer:02}"))[-1].value == pytest.approx(value)
    found = newest(read_jsonl(run / "metrics.jsonl"))
    assert found is not None
    assert (found.step, found.layers, len(found.loads[0])) == (last["step"], (0, 1), 4)
    (picture,) = events.Images("expert_loads")
    assert (picture.height, picture.width) == (2 * CELL, 4 * CELL)
    (text,) = (event.tensor_proto.string_val[0].decode() for event in events.Tensors("expert_loads/text_summary"))
    assert found.text in text
    assert f"| 1 | {' | '.join(found.rows[1][1:])} |" in text
