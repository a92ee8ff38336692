"""Tape against trace: what the plan says of a case, beside what Transformers' own code does without data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from benchmarks.named_peaks import Instant, of_variant, variant_of
from dstrain.facts.model.model_facts import ModelFacts
from dstrain.facts.model.tracer import Failure, ask
from dstrain.facts.model.traces import Trace
from dstrain.plan.configuration import Configuration
from dstrain.plan.labels import title
from dstrain.plan.memory.layers.activations import has_layer_code
from tests.plan.memory.layers.shapes import Case


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One case."""

    family: str
    """Row of the table."""
    way: str
    """How the model is trained."""
    shape: str
    """Its size in a few words."""
    trace_bytes: int
    """The trace's peak."""
    trace_instant: str
    """When that is."""
    tape_bytes: int
    """The tape's peak."""
    tape_instant: str
    """When that is."""
    bar_ratio: float
    """The error that is allowed."""

    @property
    def error_ratio(self) -> float:
        """Returns tape / trace − 1."""
        return self.tape_bytes / self.trace_bytes - 1

    @property
    def is_within(self) -> bool:
        """Returns whether the error is one that is allowed."""
        return abs(self.error_ratio) <= self.bar_ratio


def highest(model: ModelFacts, configuration: Configuration) -> Instant:
    """Returns the tape's highest instant, as a trace would see it."""
    variant = replace(variant_of(configuration), kernel_workspaces=False)
    return max(of_variant(model, variant), key=lambda instant: instant.total)


def compare(asked: Sequence[Case]) -> list[Compared]:
    """Returns the cases that the tape knows, traced in one child process. Raises where the tracer has no answer."""
    known = [case for case in asked if has_layer_code(case.model)]
    answers = ask([case.question for case in known])
    compared = []
    for case, trace in zip(known, answers, strict=True):
        if isinstance(trace, Failure):
            raise RuntimeError(f"{case.family}, {title(case.configuration)}: {trace.problem}")
        assert isinstance(trace, Trace)
        peak = highest(case.model, case.configuration)
        compared.append(
            Compared(
                family=case.family,
                way=title(case.configuration),
                shape=_shape(case),
                trace_bytes=trace.peak_bytes,
                trace_instant=trace.peak_instant,
                tape_bytes=peak.total,
                tape_instant=peak.name,
                bar_ratio=case.bar_ratio,
            )
        )
    return compared


def _shape(case: Case) -> str:
    model, batch = case.model, case.configuration.batch
    return (
        f"{batch.micro_batch}×{batch.seq_len}, "
        f"L{model.num_hidden_layers} h{model.hidden_size} I{model.intermediate_size} "
        f"H{model.num_attention_heads}/{model.num_key_value_heads}×{model.head_dim} V{model.vocab_size}"
        f"{' tied' if model.tie_word_embeddings else ''}"
    )
