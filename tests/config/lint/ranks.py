"""Gives one configuration after another to the real engine on this rank: `tests.config.lint.ranks CASES`.

CASES is a JSON file: a list of objects with `name`, `config`, `is_trainers` and `arguments` (of TrainingArguments).
Each rank writes what happened to `CASES.RANK`: for each name an error, or what the engine made of the configuration.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

WIDTH, VOCABULARY, LENGTH = 32, 64, 8


def composite_model() -> Any:
    """Returns a vision-language model whose config has no hidden_size of its own."""
    from transformers import CLIPVisionConfig, LlavaConfig, LlavaForConditionalGeneration

    tower = CLIPVisionConfig(
        hidden_size=WIDTH, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4, image_size=16, patch_size=8
    )
    config = LlavaConfig(text_config=tiny_model().config, vision_config=tower, image_token_index=VOCABULARY - 1)
    return LlavaForConditionalGeneration(config)


def tiny_model() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=WIDTH,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCABULARY,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def data() -> list[dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    rows = torch.randint(0, VOCABULARY, (8, LENGTH))
    return [{"input_ids": row, "labels": row} for row in rows]


def by_trainer(case: dict[str, Any], folder: str) -> dict[str, Any]:
    """Trains a step with the Trainer, saves, and returns what the engine made of the configuration."""
    from accelerate.state import AcceleratorState, GradientState, PartialState
    from transformers import Trainer, TrainingArguments
    from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    given = {"per_device_train_batch_size": 1, "max_steps": 1, "bf16": True, "max_grad_norm": 0.3} | case["arguments"]
    arguments = TrainingArguments(
        output_dir=folder,
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        deepspeed=case["config"],
        **given,
    )
    loads_sharded = bool(is_deepspeed_zero3_enabled())
    model = composite_model() if case["is_composite"] else tiny_model()
    trainer = Trainer(model=model, args=arguments, train_dataset=data())
    trainer.train()
    trainer.save_model(f"{folder}/final")
    found = engine_facts(trainer.model_wrapped)
    found["loads_sharded"] = loads_sharded
    found["saved_weights"] = any(Path(f"{folder}/final").glob("*.safetensors"))
    return found


def by_hand(case: dict[str, Any], folder: str) -> dict[str, Any]:
    """Trains a step with `deepspeed.initialize`, and returns what the engine made of the configuration."""
    import deepspeed

    model = tiny_model()
    optimizer = None if "optimizer" in case["config"] else torch.optim.AdamW(model.parameters(), lr=1e-4)
    path = Path(folder) / "ds_config.json"
    path.write_text(json.dumps(case["config"]))
    engine, _, _, _ = deepspeed.initialize(model=model, optimizer=optimizer, config=str(path))
    rows = torch.stack([row["input_ids"] for row in data()[:1]])
    loss = engine(input_ids=rows, labels=rows).loss
    engine.backward(loss)
    engine.step()
    return engine_facts(engine)


def engine_facts(engine: Any) -> dict[str, Any]:
    """Returns what an engine is, as far as rules speak of it."""
    inner = engine.optimizer
    return {
        "stage": int(engine.zero_optimization_stage()),
        "train_batch_size": engine.train_batch_size(),
        "gas": engine.gradient_accumulation_steps(),
        "clip": engine.gradient_clipping(),
        "dtype": str(next(engine.module.parameters()).dtype),
        "overlap_comm": bool(engine.zero_overlap_comm()),
        "optimizer": type(getattr(inner, "optimizer", inner)).__name__,
        "lr": float(inner.param_groups[0]["lr"]),
        "weight_decay": float(inner.param_groups[0]["weight_decay"]),
        "wrapper": type(inner).__name__,
        "offloads_params": bool(getattr(getattr(inner, "parameter_offload", None), "offload_device", "none") != "none")
        and "cpu" in str(getattr(getattr(inner, "parameter_offload", None), "offload_device", "")),
        "cpu_offload": bool(getattr(inner, "cpu_offload", False) or getattr(inner, "offload_optimizer", False)),
        "swaps": bool(getattr(inner, "swap_optimizer", False)),
        "zenflow": bool(getattr(engine, "zenflow", False)),
        "hpz_group": _hpz_group(),
        "reduce_bucket": int(engine.zero_reduce_bucket_size()),
        "sequence_parallel": int(getattr(engine, "sequence_parallel_size", 1)),
    }


def _hpz_group() -> int | None:
    """Returns how many ranks share ZeRO++'s second copy."""
    import torch.distributed as dist
    from deepspeed.utils import groups

    group = groups._get_zero_param_intra_parallel_group()
    return None if group is None else dist.get_world_size(group)


def happened(case: dict[str, Any]) -> dict[str, Any]:
    """Returns what happened with one configuration."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            return (by_trainer if case["is_trainers"] else by_hand)(case, folder)
        except (Exception, SystemExit) as error:
            return {"error": f"{type(error).__name__}: {error}"}


def main() -> None:
    import deepspeed
    import torch.distributed as dist

    deepspeed.init_distributed()
    cases = json.loads(Path(sys.argv[1]).read_text())
    found = {}
    for case in cases:
        found[case["name"]] = happened(case)
        print(f"[{os.environ['RANK']}] {case['name']}: {str(found[case['name']])[:200]}", flush=True)
        gc.collect()
        with contextlib.suppress(Exception):
            dist.barrier()
    Path(f"{sys.argv[1]}.{os.environ['RANK']}").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
