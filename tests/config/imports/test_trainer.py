"""Training scripts are imported as what they train: by their options, by their names, or not at all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dstrain.config.imports.read import import_file
from dstrain.config.imports.source import Fate
from dstrain.config.imports.tables import launch_variables
from dstrain.config.imports.walk import Imported
from dstrain.errors import InvalidConfig

MODEL = "--model_name_or_path a/b --bf16"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "work"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def imported(text: str, name: str = "run.sh", **options: Any) -> Imported:
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    Path(name).write_text(text)
    return import_file(Path(name), **options)


def values(found: Imported) -> dict[str, Any]:
    assert not found.stops, found.stops
    return {target: value.value for target, value in found.values.items()}


@pytest.mark.parametrize(
    ("program", "options", "expected"),
    [
        ("train.py", "--lora_enable True --lora_r 128 --lora_alpha 256", ("lora", 128, 256, ["all-linear"])),
        ("train.py", "--use_lora True --lora_r 8 --lora_alpha 16", ("lora", 8, 16, ["all-linear"])),
        ("train.py", "--use_peft True --lora_rank 8 --lora_alpha 16", ("lora", 8, 16, ["all-linear"])),
        ("train.py", "--lora_rank 8 --lora_alpha 32", ("lora", 8, 32, ["all-linear"])),
        ("train.py", "--use_lora True --q_lora True --lora_r 8 --lora_alpha 16", ("qlora", 8, 16, ["all-linear"])),
        ("train.py", "--lora_enable True --bits 4 --lora_r 8 --lora_alpha 16", ("qlora", 8, 16, ["all-linear"])),
        ("train.py", "--use_peft", ("lora", 16, 32, ["q_proj", "v_proj"])),
        ("llava/train/train_mem.py", "--lora_enable True", ("lora", 64, 16, ["all-linear"])),
        ("fastchat/train/train_lora.py", "--q_lora False", ("lora", 8, 16, ["q_proj", "v_proj"])),
        ("open_instruct/finetune.py", "--use_lora --lora_alpha 8", ("lora", 64, 8, ["all-linear"])),
        ("supervised_finetuning.py", "--target_modules q_proj,v_proj", ("lora", 8, 32, ["q_proj", "v_proj"])),
        ("finetune.py", "--use_lora --lazy_preprocess True", ("lora", 64, 16, ["c_attn", "c_proj", "w1", "w2"])),
        ("train.py", "--lora_enable False --lora_r 8", ("full", 8, None, None)),
        ("train.py", "", ("full", None, None, None)),
    ],
)
def test_adapters_are_those_of_the_script(program: str, options: str, expected: tuple[Any, ...]) -> None:
    found = values(imported(f"deepspeed --num_gpus 8 {program} {MODEL} {options}\n"))
    assert tuple(found.get(key) for key in ("method", "lora.rank", "lora.alpha", "lora.targets")) == expected


@pytest.mark.parametrize(
    ("program", "options", "key"),
    [
        ("train.py", "--use_lora True", "use_lora"),
        ("train.py", "--lora_rank 8", "lora_rank"),
        ("train_lora.py", "", "use_peft"),
        ("train.py", "--enable_lora --lora_r 8", "enable_lora"),
        ("train.py", "--unfreeze_layers 4", "unfreeze_layers"),
        ("train.py", "--tune_mm_llm False", "tune_mm_llm"),
        ("train.py", "--adapter_dim 64", "adapter_dim"),
        ("train.py", "--quantize_4bit", "quantize_4bit"),
        ("train.py", "--kl_coef 0.1", "kl_coef"),
        ("train.py", "--max_tokens_length 4096", "max_tokens_length"),
        ("train.py", "--prompt_style vicuna", "prompt_style"),
        ("train.py", "--data_mixing 0.5", "data_mixing"),
        ("train.py", "--focal_loss True", "focal_loss"),
        ("train.py", "--beta 0.1", "beta"),
        ("train.py", "--vision_lr 1e-6", "vision_lr"),
        ("llava/train/train.py", "--vision_tower openai/clip", "vision_tower"),
        ("internvl/train/internvl_chat_finetune.py", "--use_llm_lora 16", "use_llm_lora"),
        ("ppo_training.py", "", "script_name"),
        ("train_grpo.py", "", "script_name"),
        ("open_instruct/dpo_tune_cache.py", "", "loss_type"),
    ],
)
def test_an_import_that_would_train_something_else_stops(program: str, options: str, key: str) -> None:
    found = imported(f"deepspeed {program} {MODEL} {options}\n")
    (note,) = (note for note in found.stops if note.key == key)
    assert (note.place.line, note.fate) in ((1, Fate.OTHER_TRAINING), (None, Fate.OTHER_TRAINING))


def test_a_key_is_left_out_where_it_is_named() -> None:
    text = f"deepspeed train.py {MODEL} --prompt_style vicuna\n"
    found = imported(text, ignore=["prompt_style"])
    assert not found.stops
    assert [(note.key, note.text) for note in found.notes] == [("prompt_style", "left out, as --ignore says")]
    with pytest.raises(InvalidConfig, match=r"--ignore prompt_styl: run\.sh has no such key"):
        imported(text, ignore=["prompt_styl"])


def test_a_switch_that_is_off_and_a_key_of_other_things_do_not_stop() -> None:
    found = imported(f"deepspeed train.py {MODEL} --use_my_lora False --save_place x --no_gradient_checkpointing\n")
    assert values(found)["grad_ckpt"] is False
    assert {note.key: note.fate for note in found.notes} == {
        "use_my_lora": Fate.UNKNOWN,
        "save_place": Fate.UNKNOWN,
    }


@pytest.mark.parametrize(
    ("name", "program", "expected"),
    [
        ("run.sh", "train_dpo.py", {"task": "dpo"}),
        ("dpo/run.sh", "train.py", {"task": "dpo"}),
        ("run_pt.sh", "train.py", {"loss_on": "all", "data_format": "text"}),
        ("run.sh", "pretraining.py", {"loss_on": "all", "data_format": "text"}),
        ("dpo/run.sh", "sft.py", {}),
        ("run.sh", "finetune.py", {}),
    ],
)
def test_names_say_the_task(name: str, program: str, expected: dict[str, str]) -> None:
    found = values(imported(f"deepspeed {program} {MODEL}\n", name))
    assert {key: found[key] for key in ("task", "loss_on", "data_format") if key in found} == expected


def test_a_recipe_in_a_folder_for_dpo_trains_pairs_of_its_mixture() -> None:
    sets = "[{id: a/b, config: c, split: train_prefs, weight: 1.0}, {id: d/e, weight: 0.5}]"
    text = f"model_name_or_path: m/n\nbeta: 0.05\ndataset_mixture: {{datasets: {sets}, test_split_size: 20}}\n"
    found = values(imported(text, "dpo/config.yaml"))
    assert (found["task"], found["dpo.beta"], found["val_split"]) == ("dpo", 0.05, 20)
    assert found["data"] == [
        {"path": "a/b", "subset": "c", "split": "train_prefs"},
        {"path": "d/e", "split": "train[:50%]"},
    ]


def test_the_code_of_a_script_is_looked_at_for_an_adapter_without_a_switch() -> None:
    Path("train.py").write_text("model = get_peft_model(model, LoraConfig(r=8))\n")
    found = imported(f"deepspeed train.py {MODEL}\n")
    assert [note.key for note in found.stops] == ["use_peft"]
    Path("train.py").write_text("if args.use_lora:\n    config = LoraConfig(r=8)\n")
    assert not imported(f"deepspeed train.py {MODEL}\n").stops


@pytest.mark.parametrize(
    "command",
    [
        "torchrun --nproc_per_node=8 --nnodes=2 train.py",
        "deepspeed train.py",
        "accelerate launch train.py",
        "python -u train.py",
        "python -m my.train",
        "srun --gres=gpu:8 bash -c 'torchrun --nproc_per_node=8 train.py'",
    ],
)
def test_a_script_without_options_is_a_training_command(command: str) -> None:
    found = imported(f"python prepare_data.py --x 1\n{command}\npython merge_lora.py --y 2\n")
    (note,) = (note for note in found.notes if note.fate is Fate.UNREAD)
    assert ("no options" in note.text, note.place.line) == (True, 2)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("deepspeed train.py --output_dir out\n  --deepspeed z3.json\n", 2),
        ("deepspeed train.py --output_dir out \\ \n  --deepspeed z3.json\n", 2),
        ("deepspeed train.py --output_dir out \\\n  # --seed 1 \\\n  --deepspeed z3.json\n", 3),
    ],
)
def test_a_line_that_is_left_of_a_command_is_told(text: str, line: int) -> None:
    found = imported(text)
    (note,) = (note for note in found.notes if note.fate is Fate.UNREAD)
    assert (note.key, note.place.line, "backslash" in note.text) == ("--deepspeed", line, True)
    assert "plan.ds_config" not in found.values
    assert found.values["output_dir"].value == "out"


def test_the_gpus_of_the_command_line_are_there_before_the_script() -> None:
    text = "torchrun --nproc_per_node=${GPUS} train.py --gradient_accumulation_steps $((128 / (4 * GPUS)))\n"
    variables = launch_variables({"NNODES": "3"}, gpus=16, gpus_per_node=8, script=text)
    found = values(imported(text, given=lambda script: variables))
    assert (found["grad_accum"], found["machines.gpus_per_node"]) == (2, 16)
    assert (variables["NPROC_PER_NODE"], variables["NNODES"]) == ("8", "2")
    counted = launch_variables({}, gpus=16, gpus_per_node=8, script="torchrun --nnodes=$WORLD_SIZE a.py")
    assert (counted["WORLD_SIZE"], variables["WORLD_SIZE"]) == ("2", "16")


def test_what_only_a_shell_computes_stops_where_it_matters_alone() -> None:
    text = "torchrun --nproc_per_node $(nproc) --master_port $PORT train.py --output_dir o/$(date +%s)"
    found = imported(f"{text} --model_name_or_path $MODEL\n", typed=["model"])
    assert {note.key for note in found.notes if note.fate is Fate.MISSING} == {
        *("nproc_per_node", "output_dir", "model_name_or_path"),
    }
    with pytest.raises(InvalidConfig, match=r"run.sh:1:\d+: --model_name_or_path has \$MODEL, which only a shell"):
        imported(f"{text} --model_name_or_path $MODEL\n")


def test_the_settings_of_a_script_may_be_in_a_file() -> None:
    Path("dpo").mkdir()
    Path("dpo/config.yaml").write_text("model_name_or_path: a/b\nlearning_rate: 1.0e-6\nbeta: 0.5\n")
    found = values(imported("accelerate launch scripts/dpo.py --config dpo/config.yaml --seed 7\n"))
    assert (found["model"], found["dpo.beta"], found["seed"]) == ("a/b", 0.5, 7)
    Path("lf.yaml").write_text("model_name_or_path: a\nstage: sft\nfinetuning_type: lora\n")
    with pytest.raises(InvalidConfig, match="a file of LLaMA-Factory"):
        imported("accelerate launch src/train.py lf.yaml\n")


def test_lengths_of_a_schedule_that_the_trainer_compares_are_those_of_the_job() -> None:
    params = '"warmup_num_steps": 500, "total_num_steps": 2000, "warmup_max_lr": 0.0003'
    text = f'{{"zero_optimization": {{"stage": 2}}, "scheduler": {{"type": "WarmupDecayLR", "params": {{{params}}}}}}}'
    found = values(imported(text, "ds_config.json"))
    assert (found["warmup_steps"], found["max_steps"], found["learning_rate"]) == (500, 2000, 0.0003)
