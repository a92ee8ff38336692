"""Trains tiny models of all families that see on this rank, under ZeRO-3: `tests.train.family_images FOLDER`.

Writes the losses of this rank to FOLDER/losses.RANK.json: family → step → loss.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import deepspeed
import torch
from transformers import AutoConfig

from dstrain.choices import LossOn
from dstrain.facts.data.turns import Conversation
from dstrain.job.schema import Job
from dstrain.train.checkpoints.saved_model import family_of
from dstrain.train.data.collate import Collator
from dstrain.train.data.media import MediaCollator, load_media_reader
from dstrain.train.data.tokenize import Encoder
from dstrain.train.tokenizer import load_tokenizer
from tests.train.vision_families import FAMILIES

RATE = 0.05
SAMPLES: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "wide": ("<image>What is this?", "It is red", ("wide",)),
    "text": ("What is red?", "It is white, blue or green", ()),
    "both": ("Is <image> this <image>?", "red or blue", ("wide", "tall")),
    "tall": ("What is<image>this?", "blue", ("tall",)),
}
"""Question, answer and images."""
STEPS = ((("wide",), ("text",)), (("text", "both"), ("tall",)), (("text",), ("text", "text")))
"""Step → rank → samples of its micro-batch; the last one has no image on any rank."""
CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    "gradient_clipping": 0.0,
    "zero_allow_untested_optimizer": True,
}


def conversation(folder: Path, name: str) -> Conversation:
    question, answer, names = SAMPLES[name]
    turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return Conversation(messages=turns, images=tuple(str(folder / f"{image}.png") for image in names))


def encoder(folder: Path, family: str) -> Encoder:
    """Returns what dstrain makes tokens of a family's samples with."""
    job = Job(model=str(folder / family), output_dir="o")
    tokenizer: Any = load_tokenizer(job, job.model)
    media_reader = load_media_reader(job, job.model, tokenizer)
    return Encoder(tokenizer=tokenizer, seq_len=256, loss_on=LossOn.ANSWER, media_reader=media_reader)


def micro_batches(folder: Path, family: str, model: Any, rank: int) -> list[dict[str, Any]]:
    encodes = encoder(folder, family)
    media_reader = encodes.media_reader
    assert media_reader is not None
    collate = MediaCollator.of(
        model,
        torch.float32,
        collator=Collator(pad_token_id=encodes.tokenizer.pad_token_id, packing=False),
        media_reader=media_reader,
        blanks={"images": media_reader.blank_tokens(encodes.tokenizer)},
    )
    found = []
    for step in STEPS:
        samples = encodes.encode((name, conversation(folder, name)) for name in step[rank])
        rows = [{"input_ids": s.input_ids, "labels": s.labels, "images": s.images} for s in samples]
        found.append(collate(rows))
    return found


def losses_of(folder: Path, family: str, rank: int) -> list[float]:
    family_class = family_of(AutoConfig.from_pretrained(folder / family))
    model = family_class.from_pretrained(folder / family, dtype=torch.float32)
    batches = micro_batches(folder, family, model, rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=CONFIG)
    found = []
    for batch in batches:
        loss = engine(**batch).loss
        engine.backward(loss)
        engine.step()
        found.append(float(loss.detach()))
    engine.destroy()
    return found


def main() -> None:
    folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])
    torch.set_num_threads(1)
    deepspeed.init_distributed("gloo")
    losses = {family: losses_of(folder, family, rank) for family in FAMILIES}
    (folder / f"losses.{rank}.json").write_text(json.dumps(losses))


if __name__ == "__main__":
    main()
