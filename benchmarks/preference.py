"""DPO, rewards and KTO of dstrain beside those of TRL: the same model, data, order and steps, on two CPU ranks in fp32.

Example: pip install --target trl-only --no-deps trl==1.16.0
         DS_ACCELERATOR=cpu python benchmarks/preference.py --trl trl-only

Prints the loss and the figures of each step, under ZeRO-2 and ZeRO-3. TRL's ranks run this file.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.train.launching import command, environment, lines, make_run, without_dropout

STEPS, PAIRS, MICRO_BATCH, GRAD_ACCUM, BETA, CENTER = 8, 24, 2, 2, 0.1, 0.01
RATE = {"dpo": 1e-3, "reward": 2e-4, "kto": 1e-3}
SEQ_LEN = {"dpo": 128, "reward": 512, "kto": 512}
"""TRL cuts long answers for DPO as dstrain does, but drops long pairs of a reward model, so these are not cut."""
LABELS, LABELS_MICRO_BATCH, WEIGHTS = 8, 4, (1.5, 0.5)
"""KTO's rows are a step, since TRL estimates the divergence of each micro-batch and does not shuffle; their weights."""
CONFIG = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "zero_allow_untested_optimizer": True,
}
TEMPLATE = (
    "{% for message in messages %}"
    "{{ ('' if loop.first else '\\n') + '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '\\n<|im_start|>assistant\\n' }}{% endif %}"
)
"""ChatML without a line break after the last turn, which TRL would train on as a part of the answer."""
DPO = {name: name for name in ("loss", "rewards/chosen", "rewards/rejected", "rewards/margins", "logps/chosen")}
COMPARED: Mapping[str, Mapping[str, str]] = {
    "dpo": DPO | {"rewards/accuracies": "rewards/accuracies"},
    "reward": {"loss": "loss", "rewards/margins": "margin", "rewards/accuracies": "accuracy"},
    "kto": {name: name for name in ("loss", "rewards/chosen", "rewards/rejected", "logps/chosen", "kl")},
}
"""Task → our name of a figure → TRL's."""
OURS: Mapping[str, Mapping[str, Any]] = {
    "dpo": {"task": "dpo", "dpo": {"beta": BETA}, "loss": "chunked"},
    "reward": {"task": "reward", "reward": {"center_rewards_coefficient": CENTER}},
    "kto": {
        "task": "kto",
        "kto": {"beta": BETA, "desirable_weight": WEIGHTS[0], "undesirable_weight": WEIGHTS[1]},
        "loss": "chunked",
    },
}
"""Task → keys of the job."""


def write_pairs(demo: Path, to: Path) -> None:
    """Writes pairs of the demo's talks: the rejected answer is that to another question."""
    talks = [json.loads(line)["messages"] for line in (demo / "train.jsonl").read_text().splitlines()[: 2 * PAIRS]]
    rows = [
        {"prompt": good[:-1], "chosen": good[-1:], "rejected": bad[-1:]}
        for good, bad in zip(talks[::2], talks[1::2], strict=True)
    ]
    to.write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def write_labels(demo: Path, to: Path) -> None:
    """Writes labeled answers of the demo's talks.

    The last answers of both halves are the same: TRL gives the first prompt of a micro-batch the last answer of that
    micro-batch, dstrain that of the row before it.
    """
    talks = [json.loads(line)["messages"] for line in (demo / "train.jsonl").read_text().splitlines()[:LABELS]]
    answers = [talk[-1:] for talk in talks]
    answers[-1] = answers[LABELS // 2 - 1]
    rows = [
        {"prompt": talk[:-1], "completion": answer, "label": number % 3 == 0}
        for number, (talk, answer) in enumerate(zip(talks, answers, strict=True))
    ]
    to.write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def batch_of(task: str) -> tuple[int, int]:
    """Returns micro-batch and accumulation."""
    return (LABELS_MICRO_BATCH, 1) if task == "kto" else (MICRO_BATCH, GRAD_ACCUM)


def set_template(model: Path) -> None:
    """Gives a model the template of which both tools learn the same tokens."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(model)


def give_score(model: Path) -> None:
    """Makes a reward model of a language model, so that both tools begin with the same score."""
    from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

    from dstrain.train.scoring import draw_score, set_padding

    config = AutoConfig.from_pretrained(model, num_labels=1)
    scored = AutoModelForSequenceClassification.from_pretrained(model, config=config)
    draw_score(scored, seed=42)
    set_padding(scored, int(AutoTokenizer.from_pretrained(model).pad_token_id))
    scored.save_pretrained(model)


def run_trl(folder: Path, task: str, stage: int) -> None:
    """Trains with TRL on this rank; rank 0 writes what it logged."""
    import datasets  # type: ignore[import-untyped]
    import trl  # type: ignore[import-not-found, unused-ignore]
    from transformers import AutoTokenizer

    zero = {"stage": stage} | ({"stage3_param_persistence_threshold": "auto"} if stage == 3 else {})
    kto = {**OURS["kto"]["kto"], "precompute_ref_log_probs": True, "train_sampling_strategy": "sequential"}
    micro_batch, grad_accum = batch_of(task)
    kinds: Mapping[str, Any] = {
        "dpo": (trl.DPOConfig, trl.DPOTrainer, {"beta": BETA, "precompute_ref_log_probs": True}),
        "reward": (trl.RewardConfig, trl.RewardTrainer, {"center_rewards_coefficient": CENTER}),
        "kto": (trl.KTOConfig, trl.KTOTrainer, kto),
    }
    config, trainer_of, own = kinds[task]
    arguments = config(
        output_dir=str(folder / f"trl-{task}{stage}"),
        deepspeed=CONFIG | {"zero_optimization": zero},
        use_cpu=True,
        bf16=False,
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=grad_accum,
        gradient_checkpointing=False,
        max_steps=STEPS,
        max_length=SEQ_LEN[task],
        learning_rate=RATE[task],
        lr_scheduler_type="constant",
        optim="adamw_torch_fused",
        max_grad_norm=1.0,
        seed=42,
        data_seed=42,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        disable_dropout=False,
        model_init_kwargs={"dtype": "float32"},
        dataloader_pin_memory=False,
        **own,
    )
    trainer = trainer_of(
        model=str(folder / task),
        args=arguments,
        train_dataset=datasets.load_dataset("json", data_files=str(folder / f"{task}.jsonl"), split="train"),
        processing_class=AutoTokenizer.from_pretrained(folder / task),
    )
    trainer.train()
    if trainer.is_world_process_zero():
        logged = [line for line in trainer.state.log_history if "loss" in line]
        (folder / f"trl-{task}{stage}.json").write_text(json.dumps(logged))


def launch(folder: Path, program: Sequence[str], *, path: str = "") -> None:
    """Runs two ranks by DeepSpeed's launcher. Raises RuntimeError with their output if one fails."""
    variables = environment(folder)
    variables["PYTHONPATH"] += f"{os.pathsep}{path}"
    done = subprocess.run(command(folder, program), cwd=folder, env=variables, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(program)} failed:\n{(done.stdout + done.stderr)[-6000:]}")


def compare(folder: Path, task: str, stage: int, trl: str) -> float:
    """Trains with both, prints every step, and returns the largest relative difference of a loss."""
    launch(folder, [__file__, "--rank-of", str(folder), "--task", task, "--stage", str(stage)], path=trl)
    theirs = json.loads((folder / f"trl-{task}{stage}.json").read_text())
    micro_batch, grad_accum = batch_of(task)
    run = make_run(
        folder / f"dstrain-{task}{stage}",
        folder,
        zero={"stage": stage},
        data=str(folder / f"{task}.jsonl"),
        **OURS[task],
        model=str(folder / task),
        precision="fp32",
        seq_len=SEQ_LEN[task],
        micro_batch=micro_batch,
        grad_accum=grad_accum,
        grad_ckpt=False,
        max_steps=STEPS,
        learning_rate=RATE[task],
        lr_scheduler_type="constant",
        warmup_ratio=0.0,
    )
    launch(folder, ["--module", "dstrain.train", str(run)])
    ours = lines(run)
    names = COMPARED[task]
    print(f"{task}, ZeRO-{stage}\n    step  " + "  ".join(f"{name:>27}" for name in names))
    for own, their in zip(ours, theirs, strict=True):
        both = "  ".join(f"{own[our]:13.6f} {float(their[name]):13.6f}" for our, name in names.items())
        print(f"    {own['step']:4}  {both}")
    return max(abs(float(own["loss"]) / float(their["loss"]) - 1) for own, their in zip(ours, theirs, strict=True))


def main() -> None:
    """Compares tasks under both stages, and fails if a loss differs by more than 1e-4 of itself."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl", default="", help="folder into which trl was installed")
    parser.add_argument("--rank-of", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--stage", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--task", choices=[*COMPARED], help="default: all")
    given = parser.parse_args()
    if given.rank_of is not None:
        run_trl(given.rank_of, given.task, given.stage)
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        launch_demo = [sys.executable, "-m", "dstrain.train.demo", str(folder / "demo")]
        subprocess.run(launch_demo, check=True, capture_output=True, env=environment(folder))
        for task in ("dpo", "reward"):
            write_pairs(folder / "demo", folder / f"{task}.jsonl")
        write_labels(folder / "demo", folder / "kto.jsonl")
        tasks = [given.task] if given.task else [*COMPARED]
        for task in tasks:
            set_template(without_dropout(folder / "demo" / "model", folder / task))
        if "reward" in tasks:
            give_score(folder / "reward")
        worst = max(compare(folder, task, stage, given.trl) for task in tasks for stage in (2, 3))
    print(f"largest relative difference of a loss: {worst:.1e}")
    sys.exit(worst > 1e-4)


if __name__ == "__main__":
    main()
