"""Measures conversations in tokens as training has them, without Transformers: for plans."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dstrain.choices import Hub, LossOn, Task
from dstrain.config.templates.chat_template import ChatTemplate
from dstrain.facts.data.lengths import Measure, encoder_of
from dstrain.facts.data.turns import Conversation
from dstrain.facts.model.hub_config import read_chat_files
from dstrain.job.schema import Job
from dstrain.train.data.rendering import Renderer, learned_tokens


def measure_of(job: Job, source: str, hub: Hub, tokenizer: Path) -> Measure | None:
    """Returns the function that measures conversations of a job; None if the model has no chat template here."""
    files = read_chat_files(source, hub)
    text = job.chat_template or files.template
    if text is None:
        return None
    encoder = encoder_of(tokenizer)
    template = ChatTemplate(
        chat_template=text, special_tokens=files.special_tokens, token_id=lambda token: encoder.token_to_id(token)
    )
    loss_on = LossOn.LAST if job.task is Task.DPO else job.loss_on
    renderer = Renderer(tokenizer=template, loss_on=loss_on, thinking=job.thinking, tagged=template.tagged)

    def measure(conversations: Sequence[Conversation]) -> list[tuple[int, int] | None]:
        try:
            write = renderer.writer()
        except Exception:  # a template is a program of the model's author and may raise anything; dstrain run names it
            return [None] * len(conversations)
        found: list[tuple[int, int] | None] = []
        for conversation in conversations:
            try:
                written = write(conversation)
            except Exception:
                found.append(None)
                continue
            encoding = encoder.encode(written.text, add_special_tokens=False)
            learned = (range(len(encoding.ids))[part] for part in learned_tokens(encoding.offsets, written.spans))
            found.append((len(encoding.ids), sum(map(len, learned))))
        return found

    return measure
