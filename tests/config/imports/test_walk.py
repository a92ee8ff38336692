"""Each key of each tool's tables, with a value that asks for something, is written into the job or is on the page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dstrain.config.imports.read import TOOLS
from dstrain.config.imports.source import Fate, Setting, Source, Tool
from dstrain.config.imports.trainer import SCRIPTS
from dstrain.config.imports.walk import Imported, walk
from dstrain.errors import InvalidConfig, Place

PLAIN: tuple[Any, ...] = (True, 3, 0.25, "x", ["x"], {"a": 3})
"""Values of a switch, a number, a share, a name, and collections of them; a tool takes one of them for most keys."""
PAIRS = {"rl": "dpo", "stage": "dpo", "rlhf_type": "dpo", "script_name": ["dpo.py"]}
OWN: dict[str, tuple[Any, ...]] = {
    "adapter": ("lora",),
    "attn_impl": ("flash_attn",),
    "attn_implementation": ("sdpa",),
    "bf16": (True,),
    "dataset_mixture": ({"datasets": [{"id": "a/b", "weight": 0.5}], "test_split_size": 9},),
    "deepspeed.bf16": ({"enabled": True},),
    "deepspeed.fp16": ({"enabled": True},),
    "deepspeed_config.deepspeed_hostfile": ("hosts",),
    "distributed_type": ("FSDP", "DEEPSPEED", "MULTI_CPU"),
    "dynamo_config.dynamo_backend": ("INDUCTOR", "EAGER"),
    "finetuning_type": ("full",),
    "flash_attn": ("fa2",),
    "fp16": (True,),
    "fsdp_config.fsdp_sharding_strategy": ("SHARD_GRAD_OP",),
    "hostfile": ("hosts",),
    "llamafactory.dataset": ("rows",),
    "llamafactory.eval_dataset": ("rows",),
    "load_in_4bit": (True,),
    "load_in_8bit": (True,),
    "enable_thinking": (False,),
    "eval_strategy": ("epoch",),
    "evaluation_strategy": ("epoch",),
    "lr_scheduler": ("linear",),
    "lr_scheduler_type": ("linear",),
    "mixed_precision": ("fp16",),
    "optim": ("adamw_8bit",),
    "optimizer": ("adamw_8bit",),
    "save_strategy": ("epoch",),
    "truncation_strategy": ("right",),
    "excess_length_strategy": ("truncate",),
    "tuner_type": ("full",),
    "loss_scale": ("all", "last_round", "ignore_empty_think", "last_round+ignore_empty_think", "react"),
    "loss_type": ("ipo", "simpo"),
    "optimizer.params.betas": ([0.8, 0.9],),
    "optimizer.type": ("Lamb",),
    "dpo_loss": ("ipo",),
    "pref_loss": ("ipo",),
    "quant_method": ("hqq",),
    "quantization_method": ("hqq",),
    "rl": ("dpo",),
    "script_name": (["train_dpo.py"], ["pretraining.py"], ["ppo.py"]),
    "rlhf_type": ("dpo",),
    "sft_type": ("full",),
    "stage": ("pt", "dpo"),
    "swanlab_mode": ("local",),
    "torch_dtype": ("float16",),
    "train_file": ("rows.jsonl",),
    "train_type": ("full",),
    "validation_file": ("rows.jsonl",),
}
"""Values of keys, or of a tool's own keys, that take others than the plain ones."""
CONTEXT: dict[str, dict[str, Any]] = {
    "beta": PAIRS,
    "buffer_size": {"streaming": True},
    "dpo_beta": PAIRS,
    "dpo_loss": PAIRS,
    "eval_dataset": {"dataset": "rows"},
    "eval_max_new_tokens": {"eval_table_size": 2},
    "eval_steps": {"eval_dataset": "rows", "val_dataset": "a", "val_set_size": 0.1, "validation_file": "rows.jsonl"},
    "evals_per_epoch": {"val_set_size": 0.1},
    "fsdp_config.fsdp_activation_checkpointing": {"distributed_type": "FSDP"},
    "fsdp_config.fsdp_offload_params": {"distributed_type": "FSDP"},
    "fsdp_config.fsdp_reshard_after_forward": {"distributed_type": "FSDP"},
    "fsdp_config.fsdp_sharding_strategy": {"distributed_type": "FSDP"},
    "load_in_4bit": {"use_peft": True},
    "load_in_8bit": {"use_peft": True},
    "lora_r": {"use_peft": True},
    "lora_rank": {"lora_alpha": 4},
    "loss_type": PAIRS,
    "pref_beta": PAIRS,
    "pref_ftx": PAIRS,
    "pref_loss": PAIRS,
    "quant_method": {"quant_bits": 4},
    "quantization_method": {"quantization_bit": 4},
    "rl_beta": PAIRS,
    "rpo_alpha": PAIRS,
    "shuffle_buffer_size": {"streaming": True},
    "streaming_multipack_buffer_size": {"streaming": True},
}
"""Keys that ask for something beside others, of which each tool takes its own. Alone, they are on the page."""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("x", "hosts", "rows.jsonl"):
        Path(name).write_text("{}")
    info = {"rows": {"file_name": "rows.jsonl"}}
    Path("dataset_info.json").write_text(json.dumps(info))


def walked(tool: Tool, settings: dict[str, Any], variables: dict[str, Any]) -> Imported | None:
    """Returns the import of settings; None if the tool takes no such value, which is an error with its place."""
    placed = [
        {key: Setting(value=value, place=Place(file="a", line=1)) for key, value in values.items()}
        for values in (settings, variables)
    ]
    try:
        return walk(Source(path=Path("a"), tool=tool, settings=placed[0], environment=placed[1]))
    except InvalidConfig as error:
        assert str(error).startswith("a:1"), error
        return None


def is_told(found: Imported, key: str, without: Imported | None) -> bool:
    """Returns whether a key writes a value, changes that of another one, or is on the page."""
    values = {target: value.value for target, value in found.values.items()}
    before = {target: value.value for target, value in without.values.items()} if without else {}
    writers = [value.key for value in found.values.values()]
    return values != before or key in (*writers, *(note.key for note in found.notes))


KNOWN = {**TOOLS, **{script.tool.title: script.tool for script in SCRIPTS}}


@pytest.mark.sweep
@pytest.mark.parametrize(("tool", "is_variable"), [(tool, kind) for tool in KNOWN for kind in (False, True)])
def test_no_key_that_asks_for_something_is_dropped_silently(tool: str, is_variable: bool) -> None:
    known = KNOWN[tool]
    dropped, unwritten = [], []
    for key, row in (known.environment if is_variable else known.rows).items():
        context = {name: value for name, value in CONTEXT.get(key, {}).items() if name in known.rows}
        fates = set()
        for beside in [{}, context] if context else [{}]:
            base = {"dataset_dir": "."} | beside if "dataset_dir" in known.rows and key != "dataset_dir" else beside
            without = walked(known, base, {})
            for value in OWN.get(f"{tool}.{key}") or OWN.get(key) or (("cpu", "1", "3") if is_variable else PLAIN):
                given = {key: value}
                found = walked(known, base if is_variable else base | given, given if is_variable else {})
                if found is None:
                    continue
                fates |= {"written"} if key in [made.key for made in found.values.values()] else {"told"}
                means_nothing = any(value is other or (value == other and value is not True) for other in row.unless)
                if not (is_told(found, key, without) or means_nothing or value == row.default):
                    dropped.append((key, value, beside))
        if row.fate is Fate.WRITTEN and row.target and "written" not in fates:
            unwritten.append(key)
    assert (dropped, unwritten) == ([], [])
