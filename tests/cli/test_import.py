"""`dstrain import`: a file of another tool becomes a job, and what is lost is named."""

from __future__ import annotations

import json
import re
from importlib import import_module
from pathlib import Path

import pytest

from dstrain.job.file import read_job
from tests.cli.conftest import Type

MACHINE = ("--gpus", "8", "--gpu", "h100")
TRAIN = """\
model_name_or_path: Qwen/Qwen3-8B
stage: sft
finetuning_type: full
cutoff_len: 4096
per_device_train_batch_size: 2
gradient_accumulation_steps: 4
bf16: true
learning_rate: 2.0e-5
use_unsloth: true
overwrite_cache: true
"""
ZERO = {"zero_optimization": {"stage": 3, "overlap_com": True}, "gradient_accumulation_steps": 8}
AUTO = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")


@pytest.fixture
def train(tmp_path: Path) -> Path:
    path = tmp_path / "train.yaml"
    path.write_text(TRAIN)
    return path


def test_a_job_is_written_with_its_values_and_the_tools_defaults(dstrain: Type, tmp_path: Path, train: Path) -> None:
    done = dstrain("import", train.name, *MACHINE, "-o", "job")
    assert done.returncode == 0, done.stderr
    job = read_job(tmp_path / "job" / "job.yaml").job
    assert (job.seq_len, job.micro_batch, job.grad_accum, job.learning_rate) == (4096, 2, 4, 2e-5)
    assert (job.lr_scheduler_type, job.warmup_ratio, job.data) == ("linear", 0.0, None)
    text = (tmp_path / "job" / "job.yaml").read_text()
    assert 'lr_scheduler_type: "linear"  # LLaMA-Factory\'s default' in text
    assert "learning_rate: 2e-05\n" in text
    assert "train.yaml:9:1: use_unsloth: loss: fused spares the logits" in done.stdout
    assert "overwrite_cache (10)" in done.stdout
    assert "1 is the file, 2 what dstrain would choose" in done.stdout


@pytest.mark.parametrize(
    ("lines", "stage", "offload", "hpz"),
    [
        (
            "DEEPSPEED\ndeepspeed_config: {zero_stage: 3, offload_optimizer_device: cpu}",
            3,
            "optimizer",
            1,
        ),
        ("DEEPSPEED\ndeepspeed_config: {zero_stage: 3, offload_param_device: cpu}", 3, "params", 1),
        ("DEEPSPEED\ndeepspeed_config: {zero_stage: 3}\nnum_machines: 2", 3, "none", 1),
        ("DEEPSPEED", 2, "none", 1),
        ("FSDP\nfsdp_config: {fsdp_version: 2}", 3, "none", 1),
        ("FSDP\nfsdp_config: {fsdp_sharding_strategy: HYBRID_SHARD}", 3, "none", 1),
        ("FSDP\nfsdp_config: {fsdp_sharding_strategy: HYBRID_SHARD}\nnum_machines: 2", 3, "none", 4),
        ("FSDP\nfsdp_config: {fsdp_sharding_strategy: 5}\nnum_machines: 2", 2, "none", 1),
        (
            "FSDP\nfsdp_config: {fsdp_reshard_after_forward: false, fsdp_offload_params: true}",
            2,
            "optimizer",
            1,
        ),
        ("FSDP\ndeepspeed_config: {zero_stage: 1}\nfsdp_config: {fsdp_version: 2}", 3, "none", 1),
    ],
)
def test_what_a_file_shards_and_offloads_is_written_whole(
    dstrain: Type, tmp_path: Path, lines: str, stage: int, offload: str, hpz: int
) -> None:
    (tmp_path / "acc.yaml").write_text(f"distributed_type: {lines}\nnum_processes: 8\n")
    done = dstrain("import", "acc.yaml", "--gpu", "4090", "--model", "qwen3-8b", "--json", "-n")
    document = json.loads(done.stdout)
    written = json.loads(document["files"]["ds_config.json"])["zero_optimization"]
    keys = {"none": [], "optimizer": ["offload_optimizer"], "params": ["offload_optimizer", "offload_param"]}[offload]
    assert (written["stage"], [key for key in written if key.startswith("offload")]) == (stage, keys)
    assert "ratio" not in written.get("offload_optimizer", {})
    theirs = document["imported"]
    assert [theirs[key] for key in ("zero_stage", "offload", "offload_ratio", "hpz")] == [stage, offload, 1, hpz]
    assert written.get("zero_hpz_partition_size", 1) == hpz
    assert bool(document["past_faults"]) is lines.startswith("DEEPSPEED")


def test_a_file_without_parallelism_is_planned_without(dstrain: Type, train: Path) -> None:
    train.write_text(TRAIN.replace("4096", "131072"))
    done = dstrain("import", train.name, *MACHINE, "--json", "-n")
    document = json.loads(done.stdout)
    assert (document["imported"]["sp"], document["planned"]["sp"] > 1) == (1, True)


@pytest.mark.parametrize(("model", "is_known"), [("qwen3-8b", True), ("qwen3-vl-8b", False)])
def test_ligers_kernels_are_kept_where_liger_has_them(
    dstrain: Type, tmp_path: Path, train: Path, model: str, is_known: bool
) -> None:
    train.write_text(f"{TRAIN}enable_liger_kernel: true\n")
    done = dstrain("import", train.name, *MACHINE, "--model", model)
    assert done.returncode == 0, done.stderr
    assert read_job(tmp_path / "job.yaml").job.liger is is_known
    said = "train.yaml:11:1: liger: Liger has no kernels that are planned for qwen3_vl"
    assert (said in " ".join(done.stdout.split())) is not is_known


def test_afterwards_gen_config_keeps_what_the_file_says(dstrain: Type, tmp_path: Path, train: Path) -> None:
    dstrain("import", train.name, *MACHINE)
    assert "lr_scheduler_type" in dstrain("explain", "--edits").stdout
    assert dstrain("gen-config", "--seq-len", "2048").returncode == 0
    job = read_job(tmp_path / "job.yaml").job
    assert (job.seq_len, job.micro_batch, job.learning_rate, job.lr_scheduler_type) == (2048, 2, 2e-5, "linear")


def test_lints_findings_have_their_place_in_the_file(dstrain: Type, tmp_path: Path, train: Path) -> None:
    (tmp_path / "zero.json").write_text(json.dumps({**dict.fromkeys(AUTO, "auto"), **ZERO}, indent=2))
    train.write_text(f"{TRAIN}deepspeed: zero.json\n")
    done = dstrain("import", train.name, *MACHINE, "--json", "-n")
    document = json.loads(done.stdout)
    assert not (tmp_path / "job.yaml").exists()
    found = {(finding["rule"], finding["file"], finding["line"]) for finding in document["findings"]}
    assert {("DS101", "zero.json", 8), ("DS410", "zero.json", 4)} <= found
    assert "train.yaml:6:1" in next(f["problem"] for f in document["findings"] if f["rule"] == "DS410")
    assert document["files"]["ds_config.json"] == (tmp_path / "zero.json").read_text()
    assert document["imported"]["zero_stage"] == 3


def test_what_earlier_releases_of_deepspeed_trained_with_the_file_is_said(
    dstrain: Type, tmp_path: Path, train: Path
) -> None:
    zero = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    (tmp_path / "zero.json").write_text(json.dumps({**dict.fromkeys(AUTO, "auto"), "zero_optimization": zero}))
    train.write_text(f"{TRAIN}deepspeed: zero.json\n")
    said = " ".join(dstrain("import", train.name, *MACHINE, "-n").stdout.split())
    assert "under DeepSpeed 0.15.2 to before 0.19.0 it trained something else: of each step only the first" in said
    assert "(DeepSpeed#7967, DS951)" in said
    document = json.loads(dstrain("import", train.name, *MACHINE, "--json", "-n").stdout)
    assert "DS951" in {fault["rule"] for fault in document["past_faults"]}
    train.write_text(TRAIN)
    plain = dstrain("import", train.name, *MACHINE, "-n").stdout
    assert "trained something else" not in plain
    assert "LLaMA-Factory trains it without ZeRO; its stage and offload are those of dstrain" in plain


def test_what_contradicts_is_named_by_the_keys_of_the_file(dstrain: Type, tmp_path: Path, train: Path) -> None:
    zero = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    (tmp_path / "zero.json").write_text(
        json.dumps({**dict.fromkeys(AUTO, "auto"), "zero_optimization": zero}, indent=2)
    )
    train.write_text(f"{TRAIN}optim: adamw_bnb_8bit\ndeepspeed: zero.json\n")
    (tmp_path / "dpo.sh").write_text("swift rlhf --model a --rlhf_type dpo --max_length 64 \\\n  --packing true\n")
    (tmp_path / "half.yaml").write_text(TRAIN)
    for words, places in {
        (train.name,): (
            "`optim: adamw_bnb_8bit` (train.yaml:11:1)",
            "`zero_optimization.offload_optimizer` (zero.json:8:5)",
        ),
        ("dpo.sh", "--model", "qwen3-8b"): ("`rlhf_type: dpo` (dpo.sh:1:22)", "`packing: true` (dpo.sh:2:3)"),
        ("half.yaml", "--gpu", "v100"): ("`bf16: true` (half.yaml:7:1)", "has no bf16"),
    }.items():
        done = dstrain("import", *MACHINE, *words)
        assert done.returncode == 3
        assert all(place in done.stderr for place in places), done.stderr
        assert "--" not in done.stderr
    assert done.stdout.splitlines()[:4] == [
        "half.yaml: LLaMA-Factory",
        "read",
        "  half.yaml:1:1: model_name_or_path → model: Qwen/Qwen3-8B",
        "  half.yaml:3:1: finetuning_type → method: full",
    ]


def test_a_file_of_another_training_is_shown_as_it_was_read(dstrain: Type, train: Path) -> None:
    train.write_text(f"{TRAIN}use_galore: true\n")
    done = dstrain("import", train.name, *MACHINE)
    assert (done.returncode, list(train.parent.iterdir())) == (3, [train])
    assert "train.yaml:11:1: use_galore: another optimizer" in done.stderr
    assert "  train.yaml:4:1: cutoff_len → seq_len: 4096\n" in done.stdout
    assert "has no counterpart\n  train.yaml:9:1: use_unsloth: " in done.stdout
    document = json.loads(dstrain("import", train.name, *MACHINE, "--json").stdout)
    assert "use_galore" in document["error"]
    assert {"target": "seq_len", "value": 4096, "key": "cutoff_len", "file": "train.yaml", "line": 4} in document[
        "read"
    ]


def test_a_strategy_that_a_file_names_stays(dstrain: Type, tmp_path: Path) -> None:
    (tmp_path / "sft.sh").write_text(
        "NPROC_PER_NODE=4 swift sft --model Qwen/Qwen3-8B --use_hf true --max_length 2048 --deepspeed zero3_offload\n"
    )
    done = dstrain("import", "sft.sh", "--gpu", "4090", "-o", "job")
    assert done.returncode == 0, done.stderr
    zero = json.loads((tmp_path / "job" / "ds_config.json").read_text())["zero_optimization"]
    assert (zero["stage"], zero["offload_param"]["device"]) == (3, "cpu")
    assert (tmp_path / "job" / "hostfile").read_text().split() == ["localhost", "slots=4"]
    assert read_job(tmp_path / "job" / "job.yaml").job.grad_accum == 4


def test_all_linear_beside_other_names_is_written_as_the_names_of_the_layers(dstrain: Type, tmp_path: Path) -> None:
    (tmp_path / "sft.sh").write_text(
        "swift sft --model Qwen/Qwen3-8B --use_hf true --max_length 2048 --tuner_type lora --deepspeed zero2 \\\n"
        "  --target_modules all-linear embed_tokens lm_head\n"
    )
    done = dstrain("import", "sft.sh", *MACHINE, "-o", "job")
    assert "PEFT takes all-linear alone, so the job names the layers" in done.stdout, done.stderr
    assert "DS227" not in done.stdout
    layers = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    assert read_job(tmp_path / "job" / "job.yaml").job.lora.targets == (*layers, "embed_tokens", "lm_head")


def test_targets_that_no_adapter_can_have_are_found_where_the_file_names_them(dstrain: Type, tmp_path: Path) -> None:
    line = "swift sft --model Qwen/Qwen3-8B --use_hf true --max_length 2048 --tuner_type lora --deepspeed zero2 \\\n"
    (tmp_path / "sft.sh").write_text(f"{line}  --target_modules all-embedding\n")
    done = dstrain("import", "sft.sh", *MACHINE, "-n")
    assert 'sft.sh:2:3: error DS227: lora: targets has "all-embedding"' in done.stdout, done.stderr


def test_data_sets_of_a_file_are_named_from_the_job(dstrain: Type, tmp_path: Path, train: Path) -> None:
    (tmp_path / "data").mkdir()
    info = {"one": {"file_name": "one.jsonl"}, "two": {"hf_hub_url": "a/b", "split": "test"}}
    (tmp_path / "data" / "dataset_info.json").write_text(json.dumps(info))
    (tmp_path / "data" / "one.jsonl").write_text('{"instruction": "a", "output": "b"}\n')
    train.write_text(f"{TRAIN}dataset: one,two\nval_size: 0.1\neval_strategy: epoch\n")
    assert dstrain("import", train.name, *MACHINE, "-o", "job").returncode == 0
    job = read_job(tmp_path / "job" / "job.yaml").job
    assert [source.path for source in job.train_sources] == [str(tmp_path / "data" / "one.jsonl"), "a/b"]
    assert (job.train_sources[1].split, job.val_split, job.eval_strategy) == ("test", 0.1, "epoch")


def test_another_training_is_refused_with_every_reason(dstrain: Type, tmp_path: Path, train: Path) -> None:
    train.write_text(f"{TRAIN.replace('sft', 'ppo')}use_dora: true\n")
    done = dstrain("import", train.name, *MACHINE)
    assert done.returncode == 3
    assert "train.yaml:2:1: stage: `ppo`" in done.stderr
    assert "train.yaml:11:1: use_dora: another adapter" in done.stderr
    assert not (tmp_path / "job.yaml").exists()


def test_other_files_are_not_overwritten_without_force(dstrain: Type, tmp_path: Path, train: Path) -> None:
    (tmp_path / "job.yaml").write_text("model: mine\n")
    done = dstrain("import", train.name, *MACHINE)
    assert (done.returncode, "job.yaml: exists already and differs" in done.stderr) == (6, True)
    assert (tmp_path / "job.yaml").read_text() == "model: mine\n"
    assert not (tmp_path / "ds_config.json").exists()
    assert dstrain("import", train.name, *MACHINE, "--force").returncode == 0
    assert (tmp_path / "job.yaml.bak").read_text() == "model: mine\n"
    assert "nothing changed" in dstrain("import", train.name, *MACHINE).stderr


def test_a_file_without_a_model_asks_for_one(dstrain: Type, tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(
        json.dumps({"zero_optimization": {"stage": 2}, "communication_data_type": "fp32"})
    )
    done = dstrain("import", "ds.json", *MACHINE)
    assert (done.returncode, "Add --model NAME." in done.stderr) == (3, True)
    assert dstrain("import", "ds.json", *MACHINE, "--model", "qwen3-8b").returncode == 0
    assert "communication_data_type" in (tmp_path / "ds_config.json").read_text()


def test_settings_at_which_a_run_stops_are_not_written(dstrain: Type, tmp_path: Path) -> None:
    zero = {"zero_optimization": {"stage": 3}}
    wrong = {**zero, "train_batch_size": 16, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 4}
    (tmp_path / "ds.json").write_text(json.dumps(wrong))
    done = dstrain("import", "ds.json", "--model", "qwen3-8b", "--gpus", "4", "--gpu", "h100", "-o", "job")
    assert (done.returncode, (tmp_path / "job" / "job.yaml").exists()) == (3, False)
    assert "at which dstrain run stops, so nothing was written" in done.stderr
    assert "next:" not in done.stderr


def test_settings_that_do_not_fit_are_written_and_said(dstrain: Type, tmp_path: Path) -> None:
    large = {"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": 64}
    (tmp_path / "ds.json").write_text(json.dumps(large))
    done = dstrain("import", "ds.json", "--model", "qwen3-8b", "--gpus", "4", "--gpu", "h100", "-o", "job")
    assert (done.returncode, "as it is, it does not fit" in done.stdout) == (0, True), done.stderr
    assert '"train_micro_batch_size_per_gpu": 64' in (tmp_path / "job" / "ds_config.json").read_text()
    assert done.stderr.splitlines()[-1].endswith(": dstrain explain --edits job")


HINTS = {
    "long.yaml": "base_model: Qwen/Qwen3-8B\nsequence_len: 500000\nmicro_batch_size: 1\n",
    "stop.yaml": f"{TRAIN}use_dora: true\nlora_thing: 3\n",
    "half.yaml": f"{TRAIN}optim: adamw_bnb_8bit\nbf16: false\nfp16: true\n",
    "bare.json": json.dumps({"zero_optimization": {"stage": 2}, "train_batch_size": "auto"}),
    "none.sh": "echo hello\n",
    "shell.sh": "deepspeed train.py --model_name_or_path $MODEL --bf16\n",
    "other.sh": "llamafactory-cli train a.yaml\n",
    "rows.sh": "deepspeed train.py --model_name_or_path Qwen/Qwen3-8B --bf16 --data_path none.jsonl --lora_r 8\n",
}
"""Files at which an import ends, or says what to do."""


def test_every_option_that_an_import_advises_is_one_that_it_has(dstrain: Type, tmp_path: Path) -> None:
    command = import_module("dstrain.cli.verbs.import").command
    own = {name for parameter in command.params for name in parameter.opts}
    foreign, texts = {}, {}
    for name, text in HINTS.items():
        (tmp_path / name).write_text(text)
        done = dstrain("import", name, *MACHINE, "-n")
        texts[name] = done.stderr
        advised = [word for line in done.stderr.splitlines() for word in re.findall(r"(?<![\w-])--[a-z][a-z-]+", line)]
        foreign[name] = [
            word for word in advised if word not in own and word[2:] not in text and "add --lora" not in word
        ]
    allowed = {"rows.sh": ["--lora"]}  # options of the script itself
    assert {name: words for name, words in foreign.items() if set(words) - set(allowed.get(name, ()))} == {}
    assert "`sequence_len: 500000` (long.yaml:2:1) is longer than qwen3-8b" in texts["long.yaml"]
    assert "--ignore use_dora --ignore lora_thing" in texts["stop.yaml"]
