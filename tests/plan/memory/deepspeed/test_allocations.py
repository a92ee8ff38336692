"""The allocator is asked for the bytes that the engine counts, block by block."""

from __future__ import annotations

import random
import shlex
from collections.abc import Hashable, Iterator
from dataclasses import replace
from itertools import chain, islice

import pytest

from benchmarks.questions import QUESTIONS, asked
from dstrain.facts.model.families import from_config
from dstrain.facts.model.model_facts import ModelFacts
from dstrain.plan.configuration import Configuration
from dstrain.plan.labels import title
from dstrain.plan.memory.deepspeed import allocations, engine
from dstrain.plan.memory.deepspeed.replay import highest
from dstrain.plan.memory.deepspeed.settings import micro_batches_played
from dstrain.plan.memory.layers.attention import as_attended
from dstrain.plan.memory.zero import sharing_ranks
from dstrain.plan.named_parts import with_frozen
from dstrain.plan.search.evaluator import Evaluator, usable_ratio
from dstrain.plan.search.search_space import in_ram_too, space
from tests.train.engine_cases import CASES, Case, job_of

CANDIDATES = 14
"""Configurations of each question that are tried."""


@pytest.fixture(autouse=True)
def no_blocks_in_flight(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Lets gathered blocks go as soon as the engine frees them."""
    monkeypatch.setattr(allocations, "IN_FLIGHT", 0)
    allocations._written.cache_clear()
    yield
    allocations._written.cache_clear()


def scripted(model: ModelFacts, configuration: Configuration, ranks: int) -> int:
    """Returns the peak of live bytes in what the allocator is asked for, up to the end of the second step."""
    sizes: dict[Hashable, int] = {}
    live = most = 0
    before, *steps = islice(allocations.steps(model, configuration, ranks, 0), 3)
    for event in chain(before, *steps):
        live += event[1] or -sizes.pop(event[0], 0)
        if event[1]:
            assert sizes.setdefault(event[0], event[1]) == event[1]
        most = max(most, live) if allocations.LOADED not in sizes else 0
    return most


def counted(model: ModelFacts, configuration: Configuration, ranks: int) -> int:
    """Returns the peak of live bytes that the engine counts on the first rank."""
    every = engine.engine_of(model, configuration, ranks)
    first = replace(every, spans=every.spans[:1])
    recording = engine.recorded(model, configuration)
    return highest(first, recording, overlaps=configuration.zero.overlap_comm).total


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.name}, {case.ranks}")
def test_a_measured_case_has_one_peak(case: Case) -> None:
    way = case.configuration
    plain = with_frozen(from_config(case.model, name=case.name, source=case.name), job_of(case))
    model, ranks = plain, case.ranks // way.parallel.tp
    assert scripted(model, way, ranks) == counted(model, way, ranks)


@pytest.mark.sweep
@pytest.mark.parts(16)
@pytest.mark.parametrize("words", [question.words for question in QUESTIONS])
def test_candidates_of_a_question_have_one_peak(words: str) -> None:
    question = asked(shlex.split(words))
    workload, request = question.workload, question.request
    evaluator = Evaluator(workload, usable_ratio(request))
    candidates = [each for opened in (request, *in_ram_too(workload, request)) for each in space(workload, opened)]
    for candidate in random.Random(words).sample(candidates, min(CANDIDATES, len(candidates))):
        way = as_attended(evaluator.configuration(candidate), workload.cluster.gpu)
        way = replace(way, step=replace(way.step, grad_accum=micro_batches_played(way)))
        ranks = sharing_ranks(workload.cluster, way)
        assert scripted(workload.model, way, ranks) == counted(workload.model, way, ranks), title(way)
