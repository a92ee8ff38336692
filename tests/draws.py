"""Sweeps: tests with very many cases, of which a run has one of several fixed parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar
from zlib import crc32

Item = TypeVar("Item")
NUM_PARTS = 144
"""As many runs, each with the next part, try everything."""
CASES = {
    "tests/plan/search/test_search.py::test_bounds_lose_nothing": 16,
    "tests/plan/memory/test_closed_form.py::test_it_is_near_the_engine": 16,
    "tests/config/lint/test_proofs.py::test_two_ranks_fail_or_become_another_run_as_it_says": 12,
    "tests/plan/memory/deepspeed/test_allocations.py::test_candidates_of_a_question_have_one_peak": 16,
    "tests/train/test_engine_memory.py": 144,
    "tests/train/test_space.py::test_a_point_trains_as_one_rank_without_zero_does": 144,
    "tests/train/test_space.py::test_shared_experts_train_as_one_rank_does": 16,
    "tests/train/test_space.py::test_the_choice_for_a_question_trains": 24,
    "tests/train/test_model_parallel.py": 144,
    "tests/train/test_trace.py::test_a_trace_equals_what_pytorch_allocates": 12,
    "tests/train/data/test_packing_families.py::test_every_family_on_the_tape_attends_by_sample_as_the_tape_has_it": 24,
    "tests/facts/model/test_tracer.py": 12,
    "tests/cli/test_options.py::test_every_value_of_every_option_has_a_documented_end": 16,
    "tests/facts/model/test_families.py::test_every_tensor_is_the_one_that_transformers_builds": 6,
    "tests/cli/test_bombs.py::test_a_bomb_does_not_go_off": 3,
    "tests/cli/test_proposals.py::test_what_an_answer_proposes_does_what_it_says": 144,
    "tests/cli/test_script_accelerate.py::test_the_next_line_trains_the_default_job": 3,
    "tests/test_docs.py::test_a_cell_of_the_matrix_is_the_plan": 48,
}
"""Tests with many cases, and in how many parts these are tried. Each number divides NUM_PARTS."""
TESTS = {
    "tests/launch/test_hosts.py": 3,
    "tests/launch/test_slurm.py": 2,
    "tests/launch/test_process.py": 2,
    "tests/launch/run/test_start.py": 2,
    "tests/plan/search/test_bounds.py": 4,
}
"""Files whose tests start processes or hosts of their own, or replay much: parts of a run of all tests."""
PLACES = (
    *("tests/train/test_best_model_and_samples.py", "tests/train/test_bf16_states.py", "tests/train/test_muon.py"),
    *("tests/train/test_communication.py", "tests/train/test_elastic.py", "tests/train/test_expert_adapters.py"),
    *("tests/train/test_experts.py", "tests/train/test_optimizer.py", "tests/train/test_families_of_2026.py"),
    *("tests/train/test_rope_scaling.py", "tests/train/test_options.py", "tests/train/test_compiled_layers.py"),
    *("tests/train/test_loading.py", "tests/train/test_nonfinite_step.py", "tests/train/test_image_families.py"),
    *("tests/train/test_images.py", "tests/train/test_videos.py"),
    *("tests/train/test_preferences.py", "tests/train/test_streaming.py"),
    "tests/cli/test_page.py::test_a_browser_shows_the_point_of_the_address_or_of_the_sliders",
    "tests/cli/test_script.py::test_a_pod_leaves_with_a_checkpoint_and_bash_goes_on_to_the_end",
    "tests/cli/test_tune.py::test_the_fastest_is_written_edits_stay_and_what_failed_is_a_result",
    "tests/launch/filesync/test_sync.py::test_a_run_is_killed_and_goes_on_with_another_host_in_place_of_one",
    "tests/launch/filesync/test_sync.py::test_zero_3_from_a_machine_without_ranks_brings_everything_there",
    "tests/launch/run/test_out_of_memory.py",
    "tests/launch/scripts/test_exports.py::test_fsdp2_and_ddp_train_the_demo_with_the_losses_of_zero_3_and_zero_1",
    "tests/launch/test_slurm_run.py",
    "tests/test_measure.py::test_one_case_is_measured_on_the_cpu_and_compared_with_its_plan",
    "tests/test_site.py",
    "tests/train/data/test_tokenized.py::test_a_killed_preparation_goes_on_where_it_was_by_two_at_once_and_run_finds_it",
)
"""Places whose tests, but for the fast ones, take up to two minutes each: a run of all tests has one of PLACE_PARTS."""
PLACE_PARTS = 6


def part_of(name: str, *, is_whole: bool, is_fast: bool) -> tuple[int, int] | None:
    """Returns in which part of how many a test is; None if every run has it.

    name: Its node id, from which the part follows, whatever other tests there are.
    is_whole: Whether the run is of all tests: in others, only cases have parts.
    """

    # all tests of a case are in one part, so that one run of it serves them; numbers are dealt evenly
    case = name.partition("[")[2].removesuffix("]") or name
    number = int(case) if case.isdecimal() else crc32(case.encode())

    def among(places: dict[str, int]) -> tuple[int, int] | None:
        parts = next((parts for place, parts in places.items() if name.startswith(place)), None)
        return (number % parts, parts) if parts else None

    if (found := among(CASES)) or not is_whole:
        return found
    at = next((at for at, place in enumerate(PLACES) if name.startswith(place)), None)
    return among(TESTS) or ((at % PLACE_PARTS, PLACE_PARTS) if at is not None and not is_fast else None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """The part of each sweep that this run has."""

    part: int | None
    """Below NUM_PARTS; None: everything is tried."""

    def has(self, place: tuple[int, int] | None) -> bool:
        """Returns whether a test in that part of so many is tried."""
        return self.part is None or place is None or self.part % place[1] == place[0]

    def __call__(self, population: Sequence[Item], size: int) -> list[Item]:
        """Returns this part of a population, in its order: at least so many, and more where NUM_PARTS are too few."""
        parts = min(NUM_PARTS, max(1, len(population) // size))
        return list(population) if self.part is None else list(population)[self.part % parts :: parts]
