"""Each tool's keys, defaults and traps, as small files of its own form."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dstrain.config.imports.converters import HYBRID
from dstrain.config.imports.read import TOOLS, import_file
from dstrain.config.imports.source import Fate
from dstrain.config.imports.walk import Imported
from dstrain.errors import InvalidConfig

LLAMAFACTORY = "model_name_or_path: Qwen/Qwen3-8B\nstage: sft\n"
SWIFT = "swift sft --model Qwen/Qwen3-8B "
AXOLOTL = "base_model: Qwen/Qwen3-8B\nlearning_rate: 2e-4\n"
ACCELERATE = "distributed_type: DEEPSPEED\n"
FULL = f"{LLAMAFACTORY}finetuning_type: full\n"
DYNAMO = f"{ACCELERATE}dynamo_config:\n  dynamo_backend: "
FSDP_OFFLOAD = "fsdp_config.fsdp_offload_params"
TRAINER = "torchrun --nproc_per_node 4 train.py --model_name_or_path Qwen/Qwen3-8B "
DEEPSPEED = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 2}}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def imported(text: str, name: str = "train.yaml") -> Imported:
    Path(name).write_text(text)
    return import_file(Path(name))


def value(found: Imported, target: str) -> Any:
    return found.values[target].value if target in found.values else None


def notes(found: Imported, fate: Fate) -> dict[str, str]:
    return {note.key: note.text for note in found.notes if note.fate is fate}


@pytest.mark.parametrize(
    ("text", "name", "tool"),
    [
        (LLAMAFACTORY, "a.yaml", "llamafactory"),
        ("model: a\ntuner_type: lora\n", "a.yml", "swift"),
        (AXOLOTL, "a.yml", "axolotl"),
        (ACCELERATE, "a.yaml", "accelerate"),
        (json.dumps(DEEPSPEED), "ds.json", "deepspeed"),
        (SWIFT, "run.sh", "swift"),
        ("llamafactory-cli train --model_name_or_path a", "run.sh", "llamafactory"),
        (TRAINER, "run.sh", "trainer"),
        ("accelerate launch --num_processes 2 sft.py --model_name_or_path a", "run.sh", "trainer"),
        ("deepspeed --num_gpus 2 sft.py --model_name_or_path a", "run.sh", "trainer"),
    ],
)
def test_a_tool_is_recognized_by_its_file(text: str, name: str, tool: str) -> None:
    assert imported(text, name).source.tool is TOOLS[tool]


@pytest.mark.parametrize(
    ("text", "name", "target", "expected"),
    [
        (LLAMAFACTORY, "a.yaml", "learning_rate", 5e-5),
        (LLAMAFACTORY, "a.yaml", "lr_scheduler_type", "linear"),
        (LLAMAFACTORY, "a.yaml", "micro_batch", 8),
        (LLAMAFACTORY, "a.yaml", "method", "lora"),
        (f"{LLAMAFACTORY}lora_rank: 16\n", "a.yaml", "lora.alpha", 32),
        (LLAMAFACTORY, "a.yaml", "lora.targets", ["all-linear"]),
        (LLAMAFACTORY, "a.yaml", "seq_len", 2048),
        (LLAMAFACTORY, "a.yaml", "grad_ckpt", True),
        (SWIFT, "a.sh", "learning_rate", 1e-4),
        (f"{SWIFT}--tuner_type full", "a.sh", "learning_rate", 1e-5),
        (SWIFT, "a.sh", "weight_decay", 0.1),
        (SWIFT, "a.sh", "adam_beta2", 0.95),
        (SWIFT, "a.sh", "lora.rank", 8),
        (SWIFT, "a.sh", "lora.alpha", 32),
        (SWIFT, "a.sh", "lora.dropout", 0.05),
        (SWIFT, "a.sh", "hub", "modelscope"),
        (f"USE_HF=1 {SWIFT}", "a.sh", "hub", "hf"),
        (SWIFT, "a.sh", "plan.global_batch", 16),
        (SWIFT, "a.sh", "monitor.sinks", ["tensorboard"]),
        (AXOLOTL, "a.yaml", "seq_len", 512),
        (AXOLOTL, "a.yaml", "method", "full"),
        (AXOLOTL, "a.yaml", "num_train_epochs", 1.0),
        (AXOLOTL, "a.yaml", "warmup_ratio", 0.03),
        (AXOLOTL, "a.yaml", "save_total_limit", 4),
        (TRAINER, "a.sh", "grad_ckpt", False),
        (TRAINER, "a.sh", "save_total_limit", None),
    ],
)
def test_an_absent_key_is_the_tools_default(text: str, name: str, target: str, expected: Any) -> None:
    found = imported(text, name)
    assert value(found, target) == expected
    assert found.values[target].is_default or "lora_rank" in text or "USE_HF" in text


@pytest.mark.parametrize(
    ("text", "name", "target", "expected"),
    [
        ("packing: true\n", "a.yaml", "packing", True),
        ("neat_packing: true\n", "a.yaml", "packing", True),
        ("quantization_bit: 4\n", "a.yaml", "method", "qlora"),
        ("pure_bf16: true\n", "a.yaml", "precision", "bf16"),
        ("pure_bf16: true\n", "a.yaml", "optimizer", "adamw_bf16"),
        ("pure_bf16: true\noptim: adamw_8bit\n", "a.yaml", "optimizer", "adamw_8bit"),
        ("pure_bf16: true\ndeepspeed: {zero_optimization: {stage: 2}}\n", "a.yaml", "optimizer", "adamw"),
        ("fp16: true\n", "a.yaml", "precision", "fp16"),
        ("finetuning_type: full\n", "a.yaml", "precision", "fp32"),
        ("finetuning_type: full\nbf16: true\n", "a.yaml", "precision", "bf16"),
        ("finetuning_type: full\npure_bf16: true\n", "a.yaml", "precision", "bf16"),
        ("finetuning_type: lora\n", "a.yaml", "precision", "bf16"),
        ("warmup_steps: 10\n", "a.yaml", "warmup_steps", 10),
        ("val_size: 0.1\n", "a.yaml", "val_split", 0.1),
        ("max_samples: 9\n", "a.yaml", "max_samples", 9),
        ("mask_history: true\n", "a.yaml", "loss_on", "last"),
        ("disable_gradient_checkpointing: true\n", "a.yaml", "grad_ckpt", False),
        ("lora_target: q_proj,v_proj\n", "a.yaml", "lora.targets", ["q_proj", "v_proj"]),
        ("lora_target: all,embed_tokens\n", "a.yaml", "lora.targets", ["embed_tokens"]),
        ("flash_attn: fa2\n", "a.yaml", "attn", "flash_attention_2"),
        ("enable_liger_kernel: true\n", "a.yaml", "liger", True),
        ("flash_attn: auto\n", "a.yaml", "attn", "auto"),
        ("flash_attn: fa3\n", "a.yaml", "attn", "flash_attention_3"),
        ("train_on_prompt: true\n", "a.yaml", "loss_on", "all"),
        ("add_tokens: <a>,<b>\nresize_vocab: true\n", "a.yaml", "new_tokens", ["<a>", "<b>"]),
        ("adapter_name_or_path: /saved\n", "a.yaml", "adapter", "/saved"),
        ("additional_target: embed_tokens,lm_head\n", "a.yaml", "lora.modules_to_save", ["embed_tokens", "lm_head"]),
        ("stage: pt\n", "a.yaml", "data_format", "text"),
        ("video_max_pixels: 50176\n", "a.yaml", "video_max_pixels", 50176),
        ("video_fps: 1.0\n", "a.yaml", "video_fps", 1.0),
        ("video_maxlen: 64\n", "a.yaml", "video_maxlen", 64),
    ],
)
def test_llamafactory(text: str, name: str, target: str, expected: Any) -> None:
    base = "model_name_or_path: a\n" if "stage" in text else LLAMAFACTORY
    assert value(imported(f"{base}{text}template: x\n", name), target) == expected


def test_llamafactorys_packing_lets_samples_see_each_other_and_its_neat_packing_does_not() -> None:
    assert "see each other" in notes(imported(f"{LLAMAFACTORY}packing: true\n"), Fate.CHANGED)["packing"]
    both = imported(f"{LLAMAFACTORY}packing: true\nneat_packing: true\n")
    assert "packing" not in notes(both, Fate.CHANGED)


def test_llamafactorys_data_are_found_by_their_name(here: Path) -> None:
    info: dict[str, Any] = {
        "mine": {"file_name": "mine.jsonl", "formatting": "sharegpt", "columns": {"messages": "turns"}},
        "hub": {"hf_hub_url": "a/b", "subset": "c"},
        "pairs": {"file_name": "pairs.json", "ranking": True},
    }
    (here / "data").mkdir()
    (here / "data" / "dataset_info.json").write_text(json.dumps(info))
    one = imported(f"{LLAMAFACTORY}dataset: mine\n")
    mine = {"path": "data/mine.jsonl", "columns": {"messages": "turns"}}
    assert (value(one, "data"), value(one, "data_format")) == ([mine], "messages")
    two = imported(f"{LLAMAFACTORY}dataset: mine, hub\n")
    assert value(two, "data") == [{**mine, "format": "messages"}, {"path": "a/b", "subset": "c", "format": "alpaca"}]
    assert [note.key for note in imported(f"{LLAMAFACTORY}dataset: pairs\n").stops] == ["dataset"]
    with pytest.raises(InvalidConfig, match=r'train.yaml:3:1: dataset: "other" is not in data/dataset_info.json'):
        imported(f"{LLAMAFACTORY}dataset: other\n")


@pytest.mark.parametrize(
    ("text", "expected"), [("", 589824), ("image_max_pixels: 4096", 4096), (f"image_max_pixels: {2**63 - 1}", None)]
)
def test_llamafactorys_data_with_images_have_its_limit_of_pixels(here: Path, text: str, expected: int | None) -> None:
    info = {"cats": {"file_name": "cats.jsonl", "formatting": "sharegpt", "columns": {"images": "images"}}}
    (here / "data").mkdir()
    (here / "data" / "dataset_info.json").write_text(json.dumps(info | {"texts": {"file_name": "texts.jsonl"}}))
    found = imported(f"{LLAMAFACTORY}dataset: cats\nmedia_dir: data\n{text}\n")
    assert (value(found, "max_pixels"), notes(found, Fate.MISSING)) == (expected, {})
    least = imported(f"{LLAMAFACTORY}dataset: cats\nmedia_dir: data\nimage_min_pixels: 64\n")
    assert (value(found, "min_pixels"), value(least, "min_pixels")) == (1024, 64)
    assert value(imported(f"{LLAMAFACTORY}dataset: texts\n"), "max_pixels") is None
    elsewhere = imported(f"{LLAMAFACTORY}dataset: cats\nmedia_dir: pictures\n")
    assert "media_dir" in notes(elsewhere, Fate.MISSING)


def test_llamafactorys_data_with_videos_have_its_limits_of_frames(here: Path) -> None:
    info = {"clips": {"file_name": "clips.jsonl", "formatting": "sharegpt", "columns": {"videos": "films"}}}
    (here / "data").mkdir()
    (here / "data" / "dataset_info.json").write_text(json.dumps(info))
    found = imported(f"{LLAMAFACTORY}dataset: clips\nvideo_fps: 1.0\n")
    assert value(found, "data") == [{"path": "data/clips.jsonl", "columns": {"videos": "films"}}]
    limits = [value(found, key) for key in ("video_max_pixels", "video_fps", "video_maxlen")]
    assert limits == [65536, 1.0, 128]


def test_swifts_variables_limit_images_and_frames() -> None:
    variables = "MAX_PIXELS=1003520 VIDEO_MAX_TOKEN_NUM=128 FPS=1.5 FPS_MAX_FRAMES=12"
    found = imported(f"{variables} swift sft --model a", "a.sh")
    targets = ("max_pixels", "video_max_pixels", "video_fps", "video_maxlen")
    assert [value(found, target) for target in targets] == [1003520, 131072, 1.5, 12]
    assert value(imported("IMAGE_MAX_TOKEN_NUM=1024 swift sft --model a", "a.sh"), "max_pixels") == 1024 * 1024
    assert not {*targets} & imported("swift sft --model a", "a.sh").values.keys()


@pytest.mark.parametrize(
    ("words", "target", "expected"),
    [
        ("--gradient_accumulation_steps $(expr 16 / $n)", "grad_accum", 8),
        ("--gradient_accumulation_steps $((16 / (n * 1)))", "grad_accum", 8),
        ("--gradient_accumulation_steps $((16 / m))", None, None),
        ("--learning-rate=3e-5", "learning_rate", 3e-5),
        ("--dataset 'a/b:c#500'", "data", [{"path": "a/b", "subset": "c", "max_samples": 500}]),
        ("--loss_scale all", "loss_on", "all"),
        ("--deepspeed zero2_offload", "plan.offload", "optimizer"),
        ("--quant_bits 4 --quant_method bnb", "method", "qlora"),
        ("--packing true --attn_impl flash_attn", "attn", "flash_attention_2"),
        ("--use_liger_kernel true", "liger", True),
        ("--torch_dtype float16", "precision", "fp16"),
        ("--target_parameters experts.down_proj", "lora.target_parameters", ["experts.down_proj"]),
        ("--sequence_parallel_size 2", "sp", 2),
    ],
)
def test_swift(words: str, target: str | None, expected: Any) -> None:
    text = f"n=2\nNPROC_PER_NODE=$n \\\nswift sft \\\n  --model a \\\n  {words}\n"
    if target is None:
        with pytest.raises(InvalidConfig, match=r"a.sh:5:\d+: --gradient_accumulation_steps has .* only a shell"):
            imported(text, "a.sh")
        return
    found = imported(text, "a.sh")
    assert (value(found, target), value(found, "machines.gpus_per_node")) == (expected, 2)


def test_a_place_in_a_script_is_the_line_of_the_option() -> None:
    found = imported(f"# how\n{SWIFT}\\\n  --system 'two\nlines' \\\n  --seed 7  # --seed 8\n", "a.sh")
    assert str(found.values["system"].place) == "a.sh:3:3"
    assert (found.values["seed"].value, str(found.values["seed"].place)) == (7, "a.sh:5:3")


@pytest.mark.parametrize(
    ("text", "target", "expected"),
    [
        ("adapter: qlora\nload_in_4bit: true\n", "method", "qlora"),
        ("adapter: lora\nload_in_8bit: true\n", "method", "lora"),
        ("warmup_steps: 10\nwarmup_ratio: 0.5\n", "warmup_steps", 10),
        ("saves_per_epoch: 1\n", "save_strategy", "epoch"),
        ("saves_per_epoch: 2\nnum_epochs: 4\n", "save_steps", 0.125),
        ("val_set_size: 0.1\nevals_per_epoch: 4\nnum_epochs: 2\n", "eval_steps", 0.125),
        ("save_only_model: true\n", "save_only_model", True),
        ("unfrozen_parameters: [^lm_head.weight$, model.norm]\n", "train_only", ["^lm_head.weight$", "^model.norm"]),
        ("adapter: lora\nlora_modules_to_save: [lm_head]\n", "lora.modules_to_save", ["lm_head"]),
        ("adapter: lora\nlora_target_parameters: [mlp.experts.down_proj]\n", "lora.targets", []),
        (
            "adapter: lora\nlora_target_linear: true\nlora_target_modules: [embed_tokens]\n",
            "lora.targets",
            ["all-linear", "embed_tokens"],
        ),
        (
            "adapter: lora\nlora_target_linear: true\nlora_target_parameters: [experts.down_proj]\n",
            "lora.target_parameters",
            ["experts.down_proj"],
        ),
        ("sequence_len: 64\n", "on_long_sample", "drop"),
        ("datasets:\n  - path: a.jsonl\n    type: chat_template\n", "data_format", "messages"),
        ("liger_rope: true\nliger_rms_norm: true\n", "liger", True),
        ("liger_glu_activation: false\n", "liger", None),
        ("sample_packing: true\n", "packing", True),
        ("gradient_checkpointing: offload\n", "activation_offload", True),
        ("fsdp_config:\n  reshard_after_forward: true\n  offload_params: true\n", "plan.offload", "params"),
        ("wandb_project: p\nuse_wandb: true\n", "monitor.sinks", ["wandb"]),
    ],
)
def test_axolotl(text: str, target: str, expected: Any) -> None:
    assert value(imported(AXOLOTL + text), target) == expected


def test_axolotls_switches_of_ligers_parts_become_one() -> None:
    some = imported(f"{AXOLOTL}liger_rope: true\n")
    text = "liger: true replaces what liger_rms_norm and liger_glu_activation would, too"
    assert notes(some, Fate.CHANGED)["liger_rope"] == text
    all_ = imported(f"{AXOLOTL}liger_rope: true\nliger_rms_norm: true\nliger_glu_activation: true\n")
    assert "liger_rope" not in notes(all_, Fate.CHANGED)


def test_axolotls_zero2_offloads_and_that_is_said(here: Path) -> None:
    config = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
    (here / "zero2.json").write_text(json.dumps(config))
    found = imported(f"{AXOLOTL}deepspeed: zero2.json\n")
    assert "offloads the optimizer to cpu" in notes(found, Fate.CHANGED)["deepspeed"]


def test_accelerate_says_where_and_its_deepspeed_configuration_says_the_numbers(here: Path) -> None:
    (here / "ds.json").write_text(json.dumps({**DEEPSPEED, "gradient_clipping": 0.5, "fp16": {"enabled": True}}))
    section = "deepspeed_config:\n  deepspeed_config_file: ds.json\n"
    found = imported(f"{ACCELERATE}num_processes: 8\nnum_machines: 2\n{section}")
    assert (found.of("machines"), value(found, "max_grad_norm")) == ({"gpus": 8, "nodes": 2}, 0.5)
    assert (value(found, "precision"), value(found, "micro_batch")) == ("fp16", 2)
    zero = "deepspeed_config:\n  zero_stage: 3\n  offload_optimizer_device: cpu\n  offload_param_device: cpu\n"
    assert imported(ACCELERATE + zero).of("plan") == {"zero_stage": 3, "offload": "params"}
    fsdp = "fsdp_config:\n  fsdp_version: 2\n  fsdp_reshard_after_forward: false\n"
    assert imported(f"distributed_type: FSDP\n{fsdp}").of("plan") == {"zero_stage": 2}


@pytest.mark.parametrize(
    ("strategy", "plan", "says"),
    [
        ("HYBRID_SHARD", {"zero_stage": 3, "hpz": HYBRID}, "ZeRO-3 shards the same states over the GPUs of all nodes"),
        ("_HYBRID_SHARD_ZERO2", {"zero_stage": 2}, "ZeRO-2 shards the same states over the GPUs of all nodes"),
        ("FULL_SHARD", {"zero_stage": 3}, "ZeRO-3 shards the same states"),
    ],
)
def test_what_is_sharded_inside_nodes_alone_is_told(strategy: str, plan: dict[str, Any], says: str) -> None:
    key = "fsdp_config.fsdp_sharding_strategy"
    found = imported(f"distributed_type: FSDP\nfsdp_config:\n  fsdp_sharding_strategy: {strategy}\n")
    assert found.of("plan") == plan
    assert notes(found, Fate.CHANGED)[key].startswith(says)
    assert ("not of each node" in notes(found, Fate.CHANGED)[key]) is (strategy != "FULL_SHARD")


def test_experts_that_axolotl_quantizes_are_imported_and_the_cost_is_told() -> None:
    found = imported(f"{AXOLOTL}adapter: qlora\nload_in_4bit: true\nquantize_moe_experts: true\n")
    assert (found.stops, value(found, "method")) == ((), "qlora")
    assert "four times the bytes" in notes(found, Fate.MISSING)["quantize_moe_experts"]


def test_a_launcher_takes_accelerates_file_and_its_options(here: Path) -> None:
    (here / "two.yaml").write_text(f"{ACCELERATE}num_processes: 2\nmixed_precision: fp16\n")
    words = "accelerate launch --config_file two.yaml --num_processes 4 sft.py --model_name_or_path a --bf16"
    found = imported(words, "a.sh")
    assert (found.of("machines"), value(found, "precision")) == ({"gpus": 4}, "bf16")


@pytest.mark.parametrize(
    ("text", "name", "key"),
    [
        (f"{LLAMAFACTORY.replace('sft', 'ppo')}", "a.yaml", "stage"),
        (f"{LLAMAFACTORY.replace('sft', 'kto')}", "a.yaml", "stage"),
        (f"{LLAMAFACTORY.replace('sft', 'rm')}", "a.yaml", "stage"),
        (f"{LLAMAFACTORY.replace('sft', 'dpo')}pref_loss: simpo\n", "a.yaml", "pref_loss"),
        (f"{LLAMAFACTORY.replace('sft', 'dpo')}pref_bco_weight: 1\n", "a.yaml", "pref_bco_weight"),
        (f"{LLAMAFACTORY}use_dora: true\n", "a.yaml", "use_dora"),
        ("swift rlhf --rlhf_type grpo --model a", "a.sh", "rlhf_type"),
        ("swift rlhf --rlhf_type kto --beta 0.3 --model a", "a.sh", "rlhf_type"),
        ("swift rlhf --rlhf_type rm --model a", "a.sh", "rlhf_type"),
        ("swift rlhf --rlhf_type dpo --ld_alpha 0.1 --model a", "a.sh", "ld_alpha"),
        (f"{SWIFT}--loss_type hinge", "a.sh", "loss_type"),
        (f"{SWIFT}--task_type seq_cls", "a.sh", "task_type"),
        (f"{AXOLOTL}rl: grpo\n", "a.yaml", "rl"),
        (f"{AXOLOTL}rl: kto\n", "a.yaml", "rl"),
        (f"{AXOLOTL}reward_model: true\n", "a.yaml", "reward_model"),
        ("trl kto --model_name_or_path a", "a.sh", "script_name"),
        ("trl reward --model_name_or_path a", "a.sh", "script_name"),
        ("deepspeed train.py --model_name_or_path a --desirable_weight 2", "a.sh", "desirable_weight"),
        (
            "deepspeed train.py --model_name_or_path a --center_rewards_coefficient 0.01",
            "a.sh",
            "center_rewards_coefficient",
        ),
        (f"{AXOLOTL}rl: dpo\ndpo_use_weighting: true\n", "a.yaml", "dpo_use_weighting"),
        (f"{AXOLOTL}optimizer: muon\n", "a.yaml", "optimizer"),
    ],
)
def test_another_training_stops(text: str, name: str, key: str) -> None:
    assert [note.key for note in imported(text, name).stops] == [key]


def test_preferences_train_by_dpo(here: Path) -> None:
    info = {
        "pairs": {
            "file_name": "pairs.json",
            "ranking": True,
            "columns": {"prompt": "question", "chosen": "good", "rejected": "bad"},
        },
        "answers": {"file_name": "answers.json"},
    }
    (here / "dataset_info.json").write_text(json.dumps(info))
    text = f"{LLAMAFACTORY.replace('sft', 'dpo')}dataset_dir: .\npref_beta: 0.2\npref_loss: hinge\npref_ftx: 0.5\n"
    found = imported(f"{text}dataset: pairs\n")
    assert not found.stops
    assert [value(found, key) for key in ("task", "dpo.beta", "dpo.loss_type", "dpo.sft_weight")] == [
        "dpo",
        0.2,
        "hinge",
        0.5,
    ]
    columns = {"instruction": "question", "chosen": "good", "rejected": "bad"}
    assert value(found, "data") == [{"path": "pairs.json", "columns": columns}]
    assert value(found, "data_format") == "preference"
    assert [note.key for note in imported(f"{text}dataset: answers\n").stops] == ["dataset"]
    swift = imported("swift rlhf --rlhf_type dpo --beta 0.3 --rpo_alpha 0.1 --model a", "a.sh")
    assert not swift.stops
    assert [value(swift, key) for key in ("task", "dpo.beta", "dpo.sft_weight")] == ["dpo", 0.3, 0.1]
    assert "dpo.beta" not in imported(f"{LLAMAFACTORY}pref_beta: 0.2\n").values


def test_answers_with_a_label_and_reward_models_are_left_to_trl(here: Path) -> None:
    info = {
        "marked": {"file_name": "m.json", "columns": {"prompt": "question", "response": "answer", "kto_tag": "good"}},
        "pairs": {"file_name": "pairs.json", "ranking": True, "columns": {"chosen": "good", "rejected": "bad"}},
    }
    (here / "dataset_info.json").write_text(json.dumps(info))
    kto = imported(f"{LLAMAFACTORY.replace('sft', 'kto')}dataset_dir: .\ndataset: marked\nkto_chosen_weight: 1.5\n")
    assert {note.key: "TRL's KTOTrainer" in note.text for note in kto.stops} == {"dataset": True, "stage": True}
    reward = imported(f"{LLAMAFACTORY.replace('sft', 'rm')}dataset_dir: .\ndataset: pairs\n")
    assert "TRL's RewardTrainer" in next(note.text for note in reward.stops if note.key == "stage")


@pytest.mark.parametrize(
    ("lines", "data", "expected"),
    [
        ("rl: dpo\nrl_beta: 0.2\n", "chatml.argilla", {"task": "dpo", "dpo.beta": 0.2, "data_format": "preference"}),
        ("rl: ipo\n", "chat_template.default", {"task": "dpo", "dpo.loss_type": "ipo"}),
    ],
)
def test_axolotl_trains_preferences(lines: str, data: str, expected: dict[str, Any]) -> None:
    found = imported(f"base_model: a\nsequence_len: 1024\n{lines}datasets:\n  - path: b/c\n    type: {data}\n")
    assert not found.stops
    assert {key: value(found, key) for key in expected} == expected
    columns = {"chosen": "chosen_response", "rejected": "rejected_response"}
    rows = [{"path": "b/c", "columns": columns}] if "argilla" in data else "b/c"
    assert value(found, "data") == rows


def test_a_key_that_no_table_has_is_named_with_its_line_and_the_key_that_was_meant() -> None:
    found = imported(f"{LLAMAFACTORY}logging_step: 4\ncutof_len: 4096\n")
    known, length = (next(note for note in found.notes if note.key == key) for key in ("logging_step", "cutof_len"))
    assert (known.fate, 'did you mean "logging_steps"?' in known.text) == (Fate.UNKNOWN, True)
    assert (length.fate, str(length.place)) == (Fate.OTHER_TRAINING, "train.yaml:4:1")
    assert 'did you mean "cutoff_len"?' in length.text


@pytest.mark.parametrize(
    ("text", "name", "fate", "key", "said"),
    [
        (f"{SWIFT}--loss_scale last_round+ignore_empty_think", "a.sh", Fate.CHANGED, "loss_scale", "thinking: off"),
        (f"{AXOLOTL}evals_per_epoch: 4\n", "a.yaml", Fate.MISSING, "evals_per_epoch", "set eval_data or val_split"),
        (f"{AXOLOTL}fp16: true\n", "a.yaml", Fate.MISSING, "fp16", "set precision to fp16"),
        (f"{AXOLOTL}peft_use_dora: true\n", "a.yaml", Fate.OTHER_TRAINING, "peft_use_dora", "another adapter"),
        (f"{SWIFT}--use_rslora true", "a.sh", Fate.OTHER_TRAINING, "use_rslora", "another adapter"),
        (f"{LLAMAFACTORY}resize_vocab: true\n", "a.yaml", Fate.MISSING, "resize_vocab", "name these in new_tokens"),
        (f"{FULL}additional_target: norm\n", "a.yaml", Fate.NEEDLESS, "additional_target", "for an adapter"),
        (f"{LLAMAFACTORY}buffer_size: 9\n", "a.yaml", Fate.NEEDLESS, "buffer_size", "changes nothing"),
        (f"{FULL}train_on_prompt: true\nmask_history: true\n", "a.yaml", Fate.CHANGED, "train_on_prompt", "decides"),
        (f"{DYNAMO}EAGER\n", "a.yaml", Fate.MISSING, "dynamo_config.dynamo_backend", "inductor"),
        (f"{ACCELERATE}fsdp_config: {{fsdp_offload_params: true}}\n", "a.yaml", Fate.NEEDLESS, FSDP_OFFLOAD, "nothing"),
    ],
)
def test_what_is_not_simply_written_is_on_the_page(text: str, name: str, fate: Fate, key: str, said: str) -> None:
    assert said in notes(imported(text, name), fate)[key]


@pytest.mark.parametrize(
    ("text", "name", "problem"),
    [
        ("a: [1\n", "a.yaml", r"a.yaml:2:1: "),
        ("- a\n", "a.yaml", "a.yaml: is not a mapping of keys"),
        ("a: 1\n", "a.yaml", "its keys are those of no tool"),
        ("echo hello\n", "a.sh", "a.sh: has no training command"),
        ("swift sft --model 'a\n", "a.sh", "a.sh:1:19: this quote is not closed"),
        ("llamafactory-cli train a.yaml\n", "a.sh", "a.sh:1:24: the settings are in a.yaml"),
        (f"{LLAMAFACTORY}learning_rate: fast\n", "a.yaml", 'a.yaml:3:1: learning_rate: "fast" is not a number'),
        (f"{LLAMAFACTORY}deepspeed: none.json\n", "a.yaml", 'a.yaml:3:1: deepspeed: "none.json": no such file'),
        ("model: a\ntrain_dataset: b\n", "a.yaml", "LLaMA-Factory's v1 format is not read"),
        ("model: a\nds_config: b\n", "a.yaml", "it is a job of dstrain already"),
    ],
)
def test_what_cannot_be_read_is_one_error_with_its_place(text: str, name: str, problem: str) -> None:
    with pytest.raises(InvalidConfig, match=problem):
        imported(text, name)


def test_several_bad_values_are_reported_together() -> None:
    with pytest.raises(InvalidConfig) as error:
        imported(f"{LLAMAFACTORY}cutoff_len: -1\nseed: 1\nwarmup_ratio: much\n")
    assert [line.partition(": ")[0] for line in error.value.problem.splitlines()] == [
        "train.yaml:3:1",
        "train.yaml:5:1",
    ]


ON = {"streaming": True, "shuffle_buffer": 500, "max_steps": 9}


@pytest.mark.parametrize(
    ("text", "name", "expected"),
    [
        (f"{LLAMAFACTORY}early_stopping_steps: 3\n", "a.yaml", {"early_stopping": 3}),
        (f"{LLAMAFACTORY}early_stopping_steps: null\n", "a.yaml", {"early_stopping": None}),
        (f"{LLAMAFACTORY}load_best_model_at_end: true\n", "a.yaml", {"load_best": True}),
        (f"{TRAINER} --load_best_model_at_end False", "a.sh", {"load_best": None}),
        (f"{SWIFT} --early_stop_interval 5", "a.sh", {"early_stopping": 5}),
        (f"{AXOLOTL}early_stopping_patience: 2\n", "a.yaml", {"early_stopping": 2}),
        (
            f"{AXOLOTL}eval_table_size: 4\neval_max_new_tokens: 64\n",
            "a.yaml",
            {"samples.eval_prompts": 4, "samples.max_new_tokens": 64},
        ),
        (f"{AXOLOTL}eval_max_new_tokens: 64\n", "a.yaml", {"samples.max_new_tokens": None}),
        (f"{LLAMAFACTORY}streaming: true\nbuffer_size: 500\nmax_steps: 9\n", "a.yaml", ON),
        (f"{SWIFT} --streaming true --shuffle_buffer_size 500 --max_steps 9", "run.sh", ON),
        (f"{AXOLOTL}streaming: true\nstreaming_multipack_buffer_size: 500\nmax_steps: 9\n", "a.yaml", ON),
        (f"{TRAINER} --streaming True --max_steps 9", "run.sh", ON | {"shuffle_buffer": None}),
        (
            f"{LLAMAFACTORY}streaming: false\nbuffer_size: 500\nmax_steps: 9\n",
            "a.yaml",
            {"streaming": None, "shuffle_buffer": None, "max_steps": 9},
        ),
        (
            f"{LLAMAFACTORY}packing: true\nneat_packing: false\nuse_swanlab: true\nreport_to: wandb\n",
            "a.yaml",
            {"packing": True, "monitor.sinks": ["wandb", "swanlab"]},
        ),
        (f"{LLAMAFACTORY}mask_history: true\n", "a.yaml", {"loss_on": "last", "thinking": "last"}),
        (f"{LLAMAFACTORY}mask_history: true\npreserve_thinking: true\n", "a.yaml", {"thinking": None}),
        (f"{LLAMAFACTORY}mask_history: true\nenable_thinking: false\n", "a.yaml", {"thinking": "off"}),
    ],
)
def test_keys_that_belong_together_are_taken_over(text: str, name: str, expected: dict[str, Any]) -> None:
    found = imported(text, name)
    assert {target: value(found, target) for target in expected} == expected


def test_only_the_evaluation_loss_chooses_the_best_checkpoint() -> None:
    found = imported(f"{LLAMAFACTORY}load_best_model_at_end: true\nmetric_for_best_model: rouge\n")
    assert notes(found, Fate.MISSING) == {"metric_for_best_model": "the lowest evaluation loss is best"}


@pytest.mark.parametrize("tool", TOOLS)
def test_a_target_is_a_key_of_a_job_or_a_choice_of_gen_config(tool: str) -> None:
    from dataclasses import fields

    from dstrain.job.model_changes import Lora
    from dstrain.job.schema import Dpo, Job, Monitor, Samples

    legal = {field.name for field in fields(Job)}
    sections = {"dpo": Dpo, "lora": Lora, "samples": Samples, "monitor": Monitor}
    legal |= {f"{name}.{field.name}" for name, section in sections.items() for field in fields(section)}
    targets = {row.target for row in TOOLS[tool].rows.values() if row.target}
    assert {target for target in targets if not target.startswith(("plan.", "machines."))} <= legal


@pytest.mark.parametrize(
    ("text", "name", "compiles"),
    [
        (TRAINER + "--torch_compile True", "run.sh", True),
        (f"{DYNAMO}INDUCTOR\n", "train.yaml", True),
        (AXOLOTL + "torch_compile: true\ntorch_compile_backend: inductor\n", "train.yaml", True),
        (AXOLOTL + "torch_compile: auto\n", "train.yaml", None),
    ],
)
def test_compiling_is_taken_over(text: str, name: str, compiles: bool | None) -> None:
    found = imported(text, name)
    assert value(found, "torch_compile") is compiles
    assert "torch_compile_backend" not in notes(found, Fate.MISSING)
    missing = notes(imported(AXOLOTL + "torch_compile_backend: cudagraphs\n"), Fate.MISSING)
    assert "torch_compile_backend" in missing
