"""DPO of dstrain beside that of TRL: the same model, data, order and steps, on two CPU ranks in fp32.

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
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.train.launching import command, environment, lines, make_run, without_dropout

STEPS, PAIRS, MICRO_BATCH, GRAD_ACCUM, BETA, RATE, SEQ_LEN = 8, 24, 2, 2, 0.1, 1e-3, 128
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
COMPARED = (
    *("loss", "rewards/chosen", "rewards/rejected", "rewards/margins", "logps/chosen"),
    "rewards/accuracies",
)
"""Names of figures, TRL's and ours."""


def write_pairs(demo: Path, to: Path) -> None:
    """Writes pairs of the demo's talks: the rejected answer is that to another question."""
    talks = [json.loads(line)["messages"] for line in (demo / "train.jsonl").read_text().splitlines()[: 2 * PAIRS]]
    rows = [
        {"prompt": good[:-1], "chosen": good[-1:], "rejected": bad[-1:]}
        for good, bad in zip(talks[::2], talks[1::2], strict=True)
    ]
    to.write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def set_template(model: Path) -> None:
    """Gives a model the template of which both tools learn the same tokens."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(model)


def run_trl(folder: Path, stage: int) -> None:
    """Trains with TRL on this rank; rank 0 writes what it logged."""
    import datasets  # type: ignore[import-untyped]
    import trl  # type: ignore[import-not-found, unused-ignore]
    from transformers import AutoTokenizer

    zero = {"stage": stage} | ({"stage3_param_persistence_threshold": "auto"} if stage == 3 else {})
    arguments = trl.DPOConfig(
        output_dir=str(folder / f"trl{stage}"),
        deepspeed=CONFIG | {"zero_optimization": zero},
        use_cpu=True,
        bf16=False,
        per_device_train_batch_size=MICRO_BATCH,
        gradient_accumulation_steps=GRAD_ACCUM,
        gradient_checkpointing=False,
        max_steps=STEPS,
        max_length=SEQ_LEN,
        learning_rate=RATE,
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
        beta=BETA,
        precompute_ref_log_probs=True,
    )
    trainer = trl.DPOTrainer(
        model=str(folder / "model"),
        args=arguments,
        train_dataset=datasets.load_dataset("json", data_files=str(folder / "pairs.jsonl"), split="train"),
        processing_class=AutoTokenizer.from_pretrained(folder / "model"),
    )
    trainer.train()
    if trainer.is_world_process_zero():
        logged = [line for line in trainer.state.log_history if "loss" in line]
        (folder / f"trl{stage}.json").write_text(json.dumps(logged))


def launch(folder: Path, program: Sequence[str], *, path: str = "") -> None:
    """Runs two ranks by DeepSpeed's launcher. Raises RuntimeError with their output if one fails."""
    variables = environment(folder)
    variables["PYTHONPATH"] += f"{os.pathsep}{path}"
    done = subprocess.run(command(folder, program), cwd=folder, env=variables, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(program)} failed:\n{(done.stdout + done.stderr)[-6000:]}")


def compare(folder: Path, stage: int, trl: str) -> float:
    """Trains with both, prints every step, and returns the largest relative difference of a loss."""
    launch(folder, [__file__, "--rank-of", str(folder), "--stage", str(stage)], path=trl)
    theirs = json.loads((folder / f"trl{stage}.json").read_text())
    run = make_run(
        folder / f"dstrain{stage}",
        folder,
        zero={"stage": stage},
        data=str(folder / "pairs.jsonl"),
        task="dpo",
        dpo={"beta": BETA},
        loss="chunked",
        model=str(folder / "model"),
        precision="fp32",
        seq_len=SEQ_LEN,
        micro_batch=MICRO_BATCH,
        grad_accum=GRAD_ACCUM,
        grad_ckpt=False,
        max_steps=STEPS,
        learning_rate=RATE,
        lr_scheduler_type="constant",
        warmup_ratio=0.0,
    )
    launch(folder, ["--module", "dstrain.train", str(run)])
    ours = lines(run)
    print(f"ZeRO-{stage}\n    step  " + "  ".join(f"{name:>27}" for name in COMPARED))
    for own, their in zip(ours, theirs, strict=True):
        both = "  ".join(f"{own[name]:13.6f} {float(their[name]):13.6f}" for name in COMPARED)
        print(f"    {own['step']:4}  {both}")
    return max(abs(float(own["loss"]) / float(their["loss"]) - 1) for own, their in zip(ours, theirs, strict=True))


def main() -> None:
    """Compares both stages, and fails if a loss differs by more than 1e-4 of itself."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl", default="", help="folder into which trl was installed")
    parser.add_argument("--rank-of", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--stage", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank_of is not None:
        run_trl(given.rank_of, given.stage)
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        launch_demo = [sys.executable, "-m", "dstrain.train.demo", str(folder / "demo")]
        subprocess.run(launch_demo, check=True, capture_output=True, env=environment(folder))
        write_pairs(folder / "demo", folder / "pairs.jsonl")
        set_template(without_dropout(folder / "demo" / "model", folder / "model"))
        worst = max(compare(folder, stage, given.trl) for stage in (2, 3))
    print(f"largest relative difference of a loss: {worst:.1e}")
    sys.exit(worst > 1e-4)


if __name__ == "__main__":
    main()
