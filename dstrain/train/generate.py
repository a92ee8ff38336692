"""Generates texts from a few prompts as training goes, on all ranks (a Transformers callback)."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from dstrain.choices import Task, Thinking
from dstrain.errors import InvalidConfig
from dstrain.facts.ds_config import zero_stage
from dstrain.heartbeat import Phase
from dstrain.job.schema import Job, Samples
from dstrain.monitor.callback import MetricsCallback
from dstrain.monitor.metrics import JsonlFile
from dstrain.monitor.outcomes import GeneratedText
from dstrain.train.data.collate import without_adapter
from dstrain.train.data.isolation import attending_whole_rows
from dstrain.train.data.rendering import IGNORED
from dstrain.train.parts.training import Training
from dstrain.train.rank import of_all_ranks
from dstrain.units import counted, format_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """The beginning of a generated text."""

    text: str
    """For people."""
    tokens: tuple[int, ...]
    """Includes the tokens of the chat template."""


def prompts_of(job: Job, tokenizer: Any, eval_rows: Any) -> list[Prompt]:
    """Returns the prompts of a job, then the prompts of its first evaluation samples.

    `eval_rows`: samples with `input_ids` and `labels`, packed or not; None without evaluation data. Raises
    InvalidConfig for a chat template that refuses a question.
    """
    assert job.samples is not None
    prompts = [Prompt(text=text, tokens=_tokens(text, job, tokenizer)) for text in job.samples.prompts]
    count = job.samples.eval_prompts
    samples = getattr(eval_rows, "samples", eval_rows)  # those of packed rows
    for index in range(min(count, len(samples)) if count else 0):
        row = samples.with_format("numpy")[index]
        tokens = row["input_ids"][: _length(row["labels"])].tolist()
        prompts.append(Prompt(text=tokenizer.decode(tokens, skip_special_tokens=True), tokens=tuple(tokens)))
    return prompts


def _length(labels: Any) -> int:
    """Returns the tokens before the first answer; half of a text whose tokens all count. `labels`: (tokens,)."""
    first = int((labels != IGNORED).argmax())
    return first if first > 1 else max(1, len(labels) // 2)


def _tokens(text: str, job: Job, tokenizer: Any) -> tuple[int, ...]:
    """Returns the tokens of a question in the chat template, or of the beginning of a text."""
    if job.task is Task.PRETRAIN or not tokenizer.chat_template:
        return tuple(tokenizer(text)["input_ids"])
    system = [{"role": "system", "content": job.system}] if job.system is not None else []
    options = {"enable_thinking": False} if job.thinking is Thinking.OFF else {}
    chat = [*system, {"role": "user", "content": text}]
    try:
        tokens = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False, **options)
    except Exception as error:  # the template is code of its own
        problem = f'samples: the chat template refuses the prompt "{text}": {error}'
        raise InvalidConfig(problem, hint="Use eval_prompts, or another chat_template.") from error
    return tuple(tokens)


class SamplesCallback(TrainerCallback):
    """Generates at each evaluation, or after every so many steps; each rank generates as often.

    Greedy: no random number is drawn, so that training is the same, to the last bit, as without.
    """

    def __init__(self, trainer: Training, samples: Samples, metrics: MetricsCallback) -> None:
        """`metrics` writes the texts, on rank 0. Raises InvalidConfig for a model that cannot generate."""
        base = without_adapter(trainer.model)
        if not base.can_generate():
            raise InvalidConfig(f"samples: {type(base).__name__} cannot generate texts", hint="Remove samples.")
        self._trainer = trainer
        self._samples = samples
        self._metrics = metrics
        self._tokenizer = trainer.processing_class
        self._rank = trainer.rank
        self._file = JsonlFile(trainer.run_dir.samples)
        self._prompts = prompts_of(trainer.job, trainer.processing_class, trainer.eval_dataset)
        self._is_sharded = zero_stage(trainer.args.hf_deepspeed_config.config) == 3

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Generates at an evaluation, unless the job gives the steps in between."""
        if self._samples.generate_every is None:
            self._generate(state.global_step)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Generates after every so many steps."""
        every = self._samples.generate_every
        if every is not None and state.global_step % every == 0:
            self._generate(state.global_step)
            self._trainer.heartbeat.send(state.global_step, Phase.STEP)

    @property
    def longest_prompt(self) -> int:
        """Tokens of the longest prompt."""
        return max(len(prompt.tokens) for prompt in self._prompts)

    def rehearse(self, num_tokens: int) -> GeneratedText:
        """Returns a few tokens after the longest prompt, the same one on all ranks; nothing is written."""
        longest = max(self._prompts, key=lambda prompt: len(prompt.tokens))
        with self._evaluating() as model:
            return self._text(model, longest, 0, most=min(num_tokens, self._samples.max_new_tokens))

    def _generate(self, step: int) -> None:
        """Generates on all ranks, and writes on rank 0; like evaluations, it takes no time of steps."""
        began = time.monotonic()
        self._trainer.heartbeat.send(step, Phase.EVALUATING)
        with self._metrics.meter.aside():
            shares = of_all_ranks(self._share(step), self._trainer.group)
        if not self._rank.is_first:
            return
        texts = [text for texts in zip(*shares, strict=True) for text in texts][: len(self._prompts)]
        self._metrics.show(self._file, texts)
        number, seconds = counted(len(texts), "text"), format_seconds(time.monotonic() - began)
        self._rank.say(f"step {step}: generated {number} in {seconds}: {self._file.path.name}")

    def _share(self, step: int) -> list[GeneratedText]:
        """Returns the texts of this rank's prompts; all ranks have as many, so that some may be generated twice."""
        num_ranks = self._rank.world_size
        rounds = range(math.ceil(len(self._prompts) / num_ranks))
        indices = (turn * num_ranks + self._rank.index for turn in rounds)
        with self._evaluating() as model:
            most = self._samples.max_new_tokens
            return [self._text(model, self._prompts[index % len(self._prompts)], step, most=most) for index in indices]

    @contextmanager
    def _evaluating(self) -> Iterator[Any]:
        """Yields the model without dropout, checkpoints of activations and attention sample by sample."""
        engine = self._trainer.model_wrapped
        was_training = engine.training
        engine.eval()
        try:
            with torch.no_grad(), attending_whole_rows(engine.module):
                yield engine.module
        finally:
            engine.train(was_training)

    def _text(self, model: Any, prompt: Prompt, step: int, *, most: int) -> GeneratedText:
        """Returns a text of at most so many tokens.

        Under ZeRO-3 all ranks gather each layer for each token, until the longest text ends.
        """
        began = time.monotonic()
        tokens = torch.tensor([prompt.tokens], device=self._trainer.model_wrapped.device)
        output = model.generate(
            input_ids=tokens,
            attention_mask=torch.ones_like(tokens),
            generation_config=_greedy(model, self._tokenizer, most),
            synced_gpus=self._is_sharded and self._rank.world_size > 1,
        )
        new = output[0, tokens.shape[1] :].tolist()
        text = self._tokenizer.decode(new, skip_special_tokens=True)
        seconds = round(time.monotonic() - began, 3)
        return GeneratedText(step=step, prompt=prompt.text, text=text, tokens=len(new), seconds=seconds)


def _greedy(model: Any, tokenizer: Any, max_new_tokens: int) -> GenerationConfig:
    """Returns how to generate: the likeliest token each, whatever else the model's own settings say of sampling."""
    of_model = without_adapter(model).generation_config.eos_token_id
    ends = {*(of_model if isinstance(of_model, list) else [of_model]), tokenizer.eos_token_id} - {None}
    return GenerationConfig(  # type: ignore[no-untyped-call]
        max_new_tokens=max_new_tokens,
        do_sample=False,
        num_beams=1,
        temperature=1.0,
        top_p=1.0,
        top_k=50,
        use_cache=True,
        eos_token_id=sorted(ends) or None,
        pad_token_id=tokenizer.pad_token_id,
    )
