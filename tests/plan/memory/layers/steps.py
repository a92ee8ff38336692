"""Prints every allocation of one micro-batch, on the trace and on the tape side by side: where they part is a mistake.

Example: python -m tests.plan.memory.layers.steps qwen3 --method lora --grad-ckpt

Allocations are matched by their size. Each line has the live MiB after it, on either side.
"""

from __future__ import annotations

import argparse
import random
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import replace
from difflib import SequenceMatcher
from itertools import zip_longest
from typing import Any, NamedTuple
from unittest.mock import patch

from benchmarks.named_peaks import variant_of
from dstrain.choices import Attention, Method
from dstrain.facts.model.families import from_config
from dstrain.facts.model.model_facts import ModelFacts
from dstrain.facts.model.traces import Question, Subject
from dstrain.job.model_changes import Lora
from dstrain.plan.configuration import DEFAULTS, changed
from dstrain.plan.memory.layers.activations import layer_kinds, play
from dstrain.plan.memory.layers.context import Context, Variant
from dstrain.plan.memory.layers.tape import Ledger, Tape, TapeEvent
from dstrain.train.tracing import passes
from dstrain.train.tracing.tracker import StorageTracker
from tests.plan.memory.layers.shapes import FAMILIES, config_of

_MIB = 2**20
_LIBRARY = {"new", "like", "grad", "__init__", "append", "gathered", "<genexpr>", "<listcomp>"}


class Step(NamedTuple):
    """One allocation."""

    num_bytes: int
    """Its size."""
    live_bytes: int
    """What lives after it."""
    instant: str
    """When it is."""
    maker: str
    """Who makes it: PyTorch's operation, or the functions of the tape."""

    @property
    def text(self) -> str:
        """Returns it on one line."""
        return f"{self.live_bytes / _MIB:9.2f} {self.num_bytes / _MIB:+8.2f}  {self.instant:18.18} {self.maker:34.34}"


class _Events(list[TapeEvent]):
    """The tape's list of events, which makes a step of each large allocation."""

    def __init__(self, ledger: Ledger, least: int) -> None:
        super().__init__()
        self._ledger, self._least = ledger, least
        self.steps: list[Step] = []

    def append(self, event: TapeEvent) -> None:
        if event[1] >= self._least:
            names = [frame.name for frame in traceback.extract_stack()[:-2] if frame.name not in _LIBRARY]
            self.steps.append(Step(event[1], self._ledger.live, self._ledger.instant, " ".join(names[-3:])))


def on_the_tape(model: ModelFacts, variant: Variant, least: int) -> list[Step]:
    """Returns the allocations of at least so many bytes."""
    tape = Tape()
    events = _Events(tape.ledger, least)
    tape.ledger.events = events
    play(Context(model, variant, tape), layer_kinds(model, variant))
    return events.steps


def in_the_trace(question: Question, least: int) -> list[Step]:
    """Returns the allocations of at least so many bytes."""
    steps: list[Step] = []

    class Tracker(StorageTracker):  # type: ignore[no-untyped-call, unused-ignore]
        def __torch_dispatch__(
            self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
        ) -> Any:
            count = len(self.events)
            out = super().__torch_dispatch__(func, types, args, kwargs)
            for _, num_bytes in self.events[count:]:
                if num_bytes >= least:
                    _, phase, layer = self.phases[-1]
                    name = f"{phase} {layer}" if phase == "layer backward" else phase
                    steps.append(Step(num_bytes, self.live_bytes, name, str(func)))
            return out

    with patch.object(passes, "StorageTracker", Tracker):
        passes.trace(question)
    return steps


def side_by_side(trace: list[Step], tape: list[Step]) -> Iterator[str]:
    """Yields a line for each step, one stretch of the pass after the other; those of one side alone are marked."""
    stretches = dict.fromkeys(_stretch(step) for step in (*trace, *tape))
    for stretch in stretches:
        yield from _matched(*([step for step in side if _stretch(step) == stretch] for side in (trace, tape)))


def _stretch(step: Step) -> str:
    """Returns the stretch that a step belongs to: the trace tells parts of the forward pass that the tape does not."""
    return step.instant if step.instant.endswith("backward") or step.instant[-1].isdigit() else "forward"


def _matched(trace: list[Step], tape: list[Step]) -> Iterator[str]:
    blank = " " * len(Step(0, 0, "", "").text)
    matcher = SequenceMatcher(None, [step.num_bytes for step in trace], [step.num_bytes for step in tape], False)
    for what, left, left_end, right, right_end in matcher.get_opcodes():
        mark = " " if what == "equal" else "|"
        for ours, theirs in zip_longest(trace[left:left_end], tape[right:right_end]):
            yield f"{ours.text if ours else blank} {mark} {theirs.text if theirs else ''}".rstrip()


def main() -> None:
    """Prints both."""
    options = _options()
    config = config_of(options.family, random.Random(options.family))
    text: dict[str, Any] = config.get("text_config") or config
    text["num_hidden_layers"] = options.layers
    model = from_config(config, name=options.family, source=options.family)
    targets = ("all-linear",) if model.moe is None else ("o_proj",)
    experts = ("experts",) if options.experts else ()
    ways: dict[str, Any] = {
        "seq_len": options.tokens,
        "micro_batch": options.rows,
        "method": options.method,
        "lora": Lora(rank=8, dropout=options.dropout, targets=targets, target_parameters=experts),
        "attn": options.attn,
        "grad_ckpt": options.grad_ckpt,
    }
    variant = replace(variant_of(changed(DEFAULTS, **ways)), kernel_workspaces=False)
    question = Question(subject=Subject(config=config), **ways)
    least = options.least_kib * 1024
    for line in side_by_side(in_the_trace(question, least), on_the_tape(model, variant, least)):
        print(line)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("family", choices=FAMILIES)
    parser.add_argument("--method", type=Method, choices=[Method.FULL, Method.LORA], default=Method.FULL)
    parser.add_argument("--dropout", type=float, default=0.0, help="of the adapters [%(default)s]")
    parser.add_argument("--experts", action="store_true", help="adapters of experts too")
    parser.add_argument("--attn", type=Attention, choices=list(Attention), default=Attention.FLASH_ATTENTION_2)
    parser.add_argument("--grad-ckpt", action="store_true", help="recompute layers")
    parser.add_argument("--layers", type=int, default=2, help="decoder layers [%(default)s]")
    parser.add_argument("--rows", type=int, default=1, help="samples; several of them are padded [%(default)s]")
    parser.add_argument("--tokens", type=int, default=512, help="tokens of each sample [%(default)s]")
    parser.add_argument("--least-kib", type=int, default=64, help="leave out what is smaller [%(default)s]")
    return parser.parse_args()


if __name__ == "__main__":
    main()
