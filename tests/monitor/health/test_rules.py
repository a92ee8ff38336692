"""Rules of health on runs that are healthy, and on the same runs with a known trouble from a known step on."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import cache
from itertools import islice
from typing import Any

import pytest

from dstrain.job.schema import HealthAction, HealthLimits, HealthRule
from dstrain.monitor.expert_balance import balance
from dstrain.monitor.health.history import Facts, History
from dstrain.monitor.health.rules import RULES, Watch

FACTS = Facts(
    vocab_size=150_000,
    max_grad_norm=1.0,
    device_bytes=80 * 2**30,
    host_bytes=100 * 10**9,
)
ONSET = 600
"""Step at which troubles begin."""
Window = dict[str, Any]
Change = Callable[[int, Window], Window]


def windows(seed: int, *, steps: int = 1000, every: int = 5) -> Iterator[tuple[int, Window]]:
    """Yields what a healthy fine-tuning logs: a noisy loss that falls, uneven batches, now and then a slow step."""
    rng, links = random.Random(seed), random.Random(-seed)
    for step in range(every, steps + 1, every):
        tokens = rng.uniform(0.8, 1.2)
        step_s = tokens * rng.uniform(0.97, 1.03) * (1.3 if rng.random() < 0.02 else 1)
        yield (
            step,
            {
                "loss": (0.9 + 0.8 * 0.99 ** (step / 2)) * rng.lognormvariate(0, 0.06),
                "grad_norm": 0.6 * rng.lognormvariate(0, 0.25),
                "learning_rate": 1e-5,
                "step_s": step_s,
                "tokens_per_s": tokens / step_s,
                "data_wait_share": 0.5 if step == every else rng.uniform(0, 0.02),
                "padding_share": rng.uniform(0, 0.1),
                "peak_bytes_per_gpu": 60e9 * rng.uniform(0.99, 1.0),
                "peak_bytes_by_rank": [60e9 * rng.uniform(0.97, 1.0) for _ in range(8)],
                "reserved_bytes_per_gpu": 66e9,
                "alloc_retries": 0,
                "host_bytes_max": 9e9 * rng.uniform(0.999, 1.001),
                "host_used_share": 0.4,
                "skipped_steps": 2,
                "loss_scale": 65536.0,
                "masked_share": 0.0,
                "expert_load_cv": 0.4 * rng.uniform(0.95, 1.05),
                "expert_load_max_over_mean": 3 * links.uniform(0.9, 1.1),
                "dead_experts": 3 + rng.randint(0, 2),
                "experts": 6144,
                "forward_s_by_rank": [tokens * rng.uniform(0.95, 1.05) for _ in range(8)],
                "forward_s_per_token_by_rank": [1e-6 * rng.uniform(0.95, 1.05) for _ in range(8)],
                "cpu_wait_share_by_rank": [rng.uniform(0, 0.01) for _ in range(8)],
                "comm_s_by_rank": [step_s * links.uniform(0.08, 0.14) for _ in range(8)],
                "own_s_by_rank": [step_s * links.uniform(0.80, 0.86) for _ in range(8)],
                "bus_share": links.uniform(0.85, 1.1),
                "mfu": 0.38 * rng.uniform(0.95, 1.05),
                "gpu_utilization": 0.97,
                "gpu_power_share": 0.8 * rng.uniform(0.95, 1.05),
                "gpu_clock_mhz_by_rank": [1900 * rng.uniform(0.98, 1.0) for _ in range(8)],
                "gpu_power_w_by_rank": [560 * rng.uniform(0.95, 1.05) for _ in range(8)],
                **({"checkpoint_s": rng.uniform(9, 11), "checkpoint_share": 0.02} if step % 100 == 0 else {}),
            },
        )


@cache
def healthy(seed: int) -> tuple[Watch, dict[str, int]]:
    """Returns what has watched a run until `ONSET`, and the first step at which each rule was broken."""
    watch = Watch({}, FACTS, clock=lambda: 0.0)
    first: dict[str, int] = {}
    for step, values in windows(seed, steps=ONSET - 5):
        for finding in watch.see(step, values):
            first.setdefault(finding.rule, finding.step)
    return watch, first


def found(change: Change, *, seed: int = 0, until: HealthRule | None = None) -> dict[str, int]:
    """Returns the first step at which each rule was broken, with a change from `ONSET` on, perhaps up to a rule."""
    watch, first = deepcopy(healthy(seed))
    for step, values in islice(windows(seed), ONSET // 5 - 1, None):
        for finding in watch.see(step, change(step, values)):
            first.setdefault(finding.rule, finding.step)
        if until in first:
            break
    return first


@pytest.mark.sweep
@pytest.mark.parametrize("seed", range(10))
def test_a_healthy_run_has_at_most_one_warning_in_a_thousand_steps(seed: int) -> None:
    assert len(found(lambda step, values: values, seed=seed)) <= 1


def scaled(name: str, factor: float) -> Change:
    return lambda step, values: {**values, name: values[name] * factor}


def fixed(name: str, value: Any) -> Change:
    return lambda step, values: {**values, name: value}


def growing(name: str, share: float) -> Change:
    return lambda step, values: {**values, name: values[name] * (1 + share) ** ((step - ONSET) / 5)}


def of_rank(name: str, factor: float, *, rank: int = 5) -> Change:
    def changed(step: int, values: Window) -> Window:
        return {**values, name: [value * (factor if at == rank else 1) for at, value in enumerate(values[name])]}

    return changed


def slow_forward(step: int, values: Window) -> Window:
    """Makes the forward passes of one rank slower."""
    per_pass = of_rank("forward_s_by_rank", 1.6)(step, values)
    return of_rank("forward_s_per_token_by_rank", 1.6)(step, per_pass)


def slower(step: int, values: Window) -> Window:
    """Makes steps take longer."""
    return {**values, "step_s": values["step_s"] * 1.6, "tokens_per_s": values["tokens_per_s"] / 1.6}


def late(step: int, values: Window) -> Window:
    """Makes the other ranks wait for one, whose forward passes take no longer."""
    more = 0.5 * values["step_s"]
    own = [seconds + (more if rank == 5 else 0) for rank, seconds in enumerate(values["own_s_by_rank"])]
    waits = [seconds + (0 if rank == 5 else more) for rank, seconds in enumerate(values["comm_s_by_rank"])]
    return {**slower(step, values), "own_s_by_rank": own, "comm_s_by_rank": waits}


TROUBLES: dict[HealthRule, tuple[Change, int]] = {
    HealthRule.LOSS_SPIKE: (scaled("loss", 3), 1),
    HealthRule.ABOVE_GUESSING: (fixed("loss", 20.0), 1),
    HealthRule.ZERO_LOSS: (fixed("loss", 0.0), 1),
    HealthRule.ALWAYS_CLIPPED: (scaled("grad_norm", 4), 20),
    HealthRule.VANISHED_GRADIENT: (scaled("grad_norm", 1e-6), 1),
    HealthRule.SKIPPED_STEPS: (lambda step, v: {**v, "skipped_steps": 2 + (step - ONSET) // 5}, 4),
    HealthRule.SLOWDOWN: (slower, 3),
    HealthRule.MASKED_SAMPLES: (fixed("masked_share", 0.3), 1),
    HealthRule.SLOW_RANK: (of_rank("own_s_by_rank", 1.5), 3),
    HealthRule.BUS_BANDWIDTH: (scaled("bus_share", 0.4), 3),
    HealthRule.SLOW_CHECKPOINT: (lambda step, v: {**v, "checkpoint_s": 30.0}, 1),
    HealthRule.DATA_WAIT: (fixed("data_wait_share", 0.3), 2),
    HealthRule.PADDING: (fixed("padding_share", 0.6), 2),
    HealthRule.MEMORY_GROWTH: (growing("host_bytes_max", 0.03), 4),
    HealthRule.BUSIEST_EXPERT: (scaled("expert_load_max_over_mean", 2.5), 2),
    HealthRule.DEAD_EXPERTS: (fixed("dead_experts", 200), 3),
}
"""Rule → a trouble, and the number of windows from its onset within which it is named."""


@pytest.mark.parametrize("rule", TROUBLES)
def test_a_trouble_is_named_and_its_message_tells_what_to_do(rule: HealthRule) -> None:
    change, within = TROUBLES[rule]
    first = found(change, until=rule)
    assert ONSET <= first[rule] < ONSET + 5 * within, first


def told(watch: Watch, *lines: Window) -> list[str]:
    return [found.rule for step, values in enumerate(lines, start=1) for found in watch.see(step, values)]


def test_a_first_loss_above_that_of_guessing_is_told_once() -> None:
    assert told(Watch({}, FACTS), {"loss": 20.0}, {"loss": 20.0}) == ["first_loss"]
    assert told(Watch({}, FACTS), {"loss": 11.9}) == []


def test_a_loss_that_leaves_that_of_guessing_behind_is_told_at_once_with_the_last_step_before() -> None:
    watch = Watch({HealthRule.ABOVE_GUESSING: HealthLimits(action=HealthAction.STOP)}, Facts(vocab_size=1540))
    lines = enumerate([7.2, 7.1, 70.8, 330.0], start=1)
    findings = [one for step, loss in lines for one in watch.see(step, {"loss": loss})]
    assert [(one.rule, one.step, one.since, one.action) for one in findings] == [
        ("above_guessing", 3, 1, HealthAction.STOP)
    ]


def test_a_start_above_guessing_that_falls_does_not_diverge() -> None:
    assert told(Watch({}, FACTS), *({"loss": loss} for loss in (20.0, 25.0, 19.0, 3.0, 11.0))) == ["first_loss"]


def test_a_loss_that_is_not_one_of_tokens_may_be_0_or_large() -> None:
    watch = Watch({}, Facts(is_cross_entropy=False, vocab_size=150_000))
    assert told(watch, {"loss": 20.0}, {"loss": 0.0}) == []
    assert told(watch, *[{"loss": 1.0, "padding_share": 0.6}] * 6) == []  # pairs of answers cannot share rows
    assert told(Watch({}, FACTS), *[{"loss": 1.0, "padding_share": 0.6}] * 6) == ["padding"]


def message(watch: Watch, rule: HealthRule, lines: list[Window]) -> str:
    findings = [one for at, values in enumerate(lines, start=1) for one in watch.see(5 * at, values)]
    return next(one.message for one in findings if one.rule == rule)


def test_padding_says_how_many_more_tokens_rows_without_it_train() -> None:
    lines = [{"loss": 1.0, "padding_share": share} for share in (0.3, 0.9, 1 / 3)]
    assert "33% of all tokens are padding; without it, the same time would train up to 1.5 × the tokens." in message(
        Watch({}, FACTS), HealthRule.PADDING, lines
    )


@pytest.mark.parametrize(
    ("rule", "names", "expected"),
    [
        # 80 GiB less 60 GiB and three windows of 2.5 GiB each, 2 GiB of others, and 0.5 GiB a step: 21 steps
        (
            HealthRule.MEMORY_GROWTH,
            {"peak_bytes_per_gpu": (60 * 2**30, 2**29), "outside_bytes_by_rank": ([2**30, 2 * 2**30], None)},
            "the GPU's peak grows by 512.0 MiB a step; at this pace the GPU is full in about 42 s (21 steps).",
        ),
        # 60 of 100 GB are free, and 20 MiB a step of one rank
        (
            HealthRule.MEMORY_GROWTH,
            {"host_bytes_max": (9e9, 20 * 2**20), "host_used_share": (0.4, None)},
            "a rank's RAM grows by 20.0 MiB a step; at this pace the RAM of its node is full in about 1 h 35 min "
            "(2,861 steps).",
        ),
        # all processes of the node take 1 % a step
        (
            HealthRule.MEMORY_GROWTH,
            {"host_bytes_max": (9e9, 20 * 2**20), "host_used_share": (0.25, 0.01)},
            "at this pace the RAM of its node is full in about 2 min 0 s (60 steps).",
        ),
        (HealthRule.MEMORY_GROWTH, {"host_bytes_max": (9e9, 20 * 2**20)}, "a rank's RAM grows by 20.0 MiB a step. "),
    ],
)
def test_memory_that_grows_says_how_fast_and_when_it_is_full(
    rule: HealthRule, names: dict[str, tuple[Any, float | None]], expected: str
) -> None:
    def line(steps: int) -> Window:
        grown = {name: start + each * steps if each else start for name, (start, each) in names.items()}
        return {"loss": 1.0, "step_s": 2.0, "tokens_per_s": 1.0, **grown}

    lines = [line(0)] * 25 + [line(5 * at) for at in range(1, 30)]
    assert expected in message(Watch({}, FACTS), rule, lines)


def test_memory_that_grows_less_than_its_noise_from_window_to_window_is_named() -> None:
    def leaks(step: int, values: Window) -> Window:
        return {**values, "host_bytes_max": values["host_bytes_max"] * (1 + 0.004 * (step - ONSET + 5) / 5)}

    assert found(leaks, until=HealthRule.MEMORY_GROWTH)[HealthRule.MEMORY_GROWTH] <= ONSET + 5 * 14
    assert HealthRule.MEMORY_GROWTH not in found(lambda _, values: values)


def test_an_evaluation_loss_that_rises_clearly_once_or_twice_while_the_loss_falls_is_overfitting() -> None:
    watch = Watch({}, FACTS)
    falling = [{"loss": 2.0 - number / 50} for number in range(40)]
    assert told(watch, *falling, {"eval_loss": 1.0}, {"eval_loss": 1.01}, {"eval_loss": 1.04}) == ["overfitting"]
    assert told(Watch({}, FACTS), *falling, {"eval_loss": 1.0}, {"eval_loss": 1.06}) == ["overfitting"]
    assert told(Watch({}, FACTS), *falling[::-1], {"eval_loss": 1.0}, {"eval_loss": 1.2}) == []
    assert told(Watch({}, FACTS), *falling, {"eval_loss": 1.0}, {"eval_loss": 1.04}, {"eval_loss": 0.9}) == []


def test_every_rule_has_a_trouble_here() -> None:
    here = {*TROUBLES, HealthRule.FIRST_LOSS, HealthRule.OVERFITTING, HealthRule.RESUMED_LOSS, HealthRule.PLATEAU}
    assert here == set(RULES) == set(HealthRule)


@pytest.mark.parametrize(("favored", "broken"), [(16, {"busiest_expert"}), (8, {"busiest_expert", "dead_experts"})])
def test_one_layer_of_48_whose_router_favors_few_experts_is_named(favored: int, broken: set[str]) -> None:
    def balances(*, one: bool) -> Window:
        usual = [1000 + 10 * expert for expert in range(128)]
        few = [5000 if expert < favored else 50 if favored == 16 else 0 for expert in range(128)]
        return {"loss": 1.0, **balance([few if one else usual, *[usual] * 47], range(48))}

    watch = Watch({}, FACTS)
    assert told(watch, *[balances(one=False)] * 25) == []
    assert set(told(watch, *[balances(one=True)] * 3)) == broken


def test_a_rule_about_ranks_names_the_one_to_blame() -> None:
    rule = HealthRule.SLOW_RANK
    watch, change = Watch({}, FACTS), TROUBLES[rule][0]
    findings = [one for step, values in windows(0, steps=100) for one in watch.see(step, change(step, values))]
    assert {one.rank for one in findings if one.rule == rule} == {5}
    assert any("rank 5" in one.message for one in findings if one.rule == rule)


def unmeasured(cause: Change) -> Change:
    """Returns a cause in a run whose collectives nobody measures, as those of earlier releases."""

    def changed(step: int, values: Window) -> Window:
        slow = cause(step, slower(step, values))
        return {name: value for name, value in slow.items() if name not in ("comm_s_by_rank", "own_s_by_rank")}

    return changed


def test_a_lag_in_forward_passes_counts_only_if_nobody_measures_whole_steps() -> None:
    def ranks(change: Change) -> set[int | None]:
        watch = Watch({}, FACTS)
        findings = [one for step, values in windows(0, steps=100) for one in watch.see(step, change(step, values))]
        return {one.rank for one in findings if one.rule == HealthRule.SLOW_RANK}

    assert ranks(slow_forward) == set()
    assert ranks(unmeasured(slow_forward)) == {5}


def test_a_rank_that_the_others_wait_for_is_named_if_its_forward_passes_are_as_fast() -> None:
    watch = Watch({}, FACTS)
    findings = [one for step, values in windows(0, steps=100) for one in watch.see(step, late(step, values))]
    assert {one.rank for one in findings if one.rule == HealthRule.SLOW_RANK} == {5}


def plateaus(course: Callable[[int], float], *, scatter: float, rate: Callable[[int], float] = lambda at: 1e-5) -> int:
    """Returns how many of 10 runs of 300 windows with a course of the loss are said to be flat."""
    rule = RULES[HealthRule.PLATEAU]

    def is_told(seed: int) -> bool:
        noise, history = random.Random(seed), History(FACTS)
        for at in range(1, 301):
            loss = course(at) * noise.lognormvariate(0, scatter)
            history.add({"step": 2 * at, "loss": loss, "learning_rate": rate(at)})
            most = rule.signal(history)
            if most is not None and most <= rule.warn:
                return True
        return False

    return sum(map(is_told, range(10)))


@pytest.mark.parametrize("scatter", [0.01, 0.03])
def test_a_loss_that_has_not_fallen_since_the_start_is_a_plateau(scatter: float) -> None:
    assert plateaus(lambda at: 2.0, scatter=scatter) >= 8


@pytest.mark.sweep
def test_a_loss_that_falls_or_has_fallen_to_its_floor_is_none_whatever_the_rate_does() -> None:
    def floor(at: int) -> float:
        return 1.7 + 0.3 * math.exp(-at / 20)

    for scatter in (0.01, 0.03):
        assert plateaus(lambda at: 2 - 0.4 * at / 300, scatter=scatter) == plateaus(floor, scatter=scatter) == 0
    assert plateaus(floor, scatter=0.02, rate=lambda at: 0.5e-5 * (1 + math.cos(math.pi * at / 300))) == 0


def test_a_loss_is_not_judged_while_the_learning_rate_rises() -> None:
    assert plateaus(lambda at: 2.0, scatter=0.01, rate=lambda at: 1e-7 * 1.05**at) == 0


def test_losses_that_a_resumed_run_repeats_are_compared_with_those_before() -> None:
    earlier = [{"step": step, "loss": 2.0 - step / 100, "grad_norm": 1.0} for step in range(1, 41)]
    for loss, broken in ((1.6999, []), (1.66, ["resumed_loss"])):
        watch = Watch({}, FACTS)
        watch.history.resume(earlier, step=29)
        found_then = watch.see(30, {"loss": loss, "grad_norm": 1.0})
        assert [one.rule for one in found_then] == broken
        assert [one.rule for one in watch.see(31, {"loss": 1.5, "grad_norm": 1.0})] == []


def test_a_resumed_run_knows_the_losses_before_but_not_the_speed() -> None:
    watch = Watch({}, FACTS)
    watch.history.resume(({"step": step, "loss": 1.0, "step_s": 1.0} for step in range(1, 41)), step=40)
    assert [one.rule for one in watch.see(41, {"loss": 3.0, "step_s": 9.0, "tokens_per_s": 1.0})] == ["loss_spike"]


def above(*ratios: float) -> list[Window]:
    """Returns a usual loss, and losses that are so many times that of a model that guesses."""
    return [{"loss": 1.0}, *({"loss": ratio * math.log(150_000)} for ratio in ratios)]


def test_a_signal_around_its_limit_is_told_once_and_again_when_it_gets_worse() -> None:
    watch = Watch({}, FACTS, clock=lambda: 0.0)
    lines = above(1.51, 1.45, 1.51, 1.45, 3.1, 1.0, 1.51)
    assert [(found.step, found.severity) for step, values in enumerate(lines, start=1)
            for found in watch.see(step, values)] == [(2, "warning"), (6, "critical")]  # fmt: skip


@pytest.mark.parametrize("ratio", [1.6, 3.1])
def test_a_signal_that_comes_and_goes_is_told_once_in_ten_minutes(ratio: float) -> None:
    watch = Watch({}, FACTS, clock=lambda: 0.0)
    assert told(watch, *above(*[ratio, 0.1] * 5)) == ["above_guessing"]


def test_it_is_told_again_after_ten_minutes() -> None:
    now = 0.0
    watch = Watch({}, FACTS, clock=lambda: now)
    assert told(watch, *above(1.6, 0.1)) == ["above_guessing"]
    now = 601.0
    assert told(watch, *above(1.6)) == ["above_guessing"]


def test_limits_and_actions_are_the_jobs() -> None:
    limits = {
        HealthRule.DATA_WAIT: HealthLimits(enabled=False),
        HealthRule.LOSS_SPIKE: HealthLimits(warn=1.0, critical=2.0, action=HealthAction.STOP),
    }
    watch = Watch(limits, FACTS)
    lines = [{"loss": 1.0, "data_wait_share": 0.9} for _ in range(30)]
    seen = [found for step, values in enumerate([*lines, {"loss": 1.3}], start=1) for found in watch.see(step, values)]
    assert [(found.rule, found.action) for found in seen] == [("loss_spike", HealthAction.STOP)]


def test_a_warning_has_no_consequence_where_a_critical_value_exists() -> None:
    watch = Watch({HealthRule.ABOVE_GUESSING: HealthLimits(action=HealthAction.STOP)}, FACTS)
    usual, warning, critical = above(2.0, 4.0)
    assert watch.see(1, usual) == []
    assert [found.action for found in watch.see(2, warning)] == [HealthAction.TELL]
    assert [found.action for found in watch.see(3, critical)] == [HealthAction.STOP]
