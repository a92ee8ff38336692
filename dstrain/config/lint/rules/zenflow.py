"""Rules about ZenFlow: its requirements, and how its intervals combine."""

from __future__ import annotations

from collections.abc import Iterator

from dstrain.config.lint.advisories import accumulation
from dstrain.config.lint.finding import Fault, Severity
from dstrain.config.lint.rule import Rule, when
from dstrain.config.lint.subject import Subject, has_zenflow

_ZERO = "zero_optimization."
_ZENFLOW = _ZERO + "zenflow"
_ENGINE = "deepspeed 0.19.8 runtime/zenflow/engine.py: configure_zenflow"
_OPTIMIZER = "deepspeed 0.19.8 runtime/zenflow/zenflow_stage_1_and_2.py: "
_E = Severity.ERROR


def _is_interval_inconsistent(s: Subject) -> bool:
    is_auto = bool(s.at(_ZENFLOW + ".select_strategy", "auto") == "auto")
    interval = s.at(_ZENFLOW + ".select_interval", "auto")
    return has_zenflow(s) and is_auto == (isinstance(interval, int) and not isinstance(interval, bool))


def _selects_more_often(s: Subject) -> bool:
    select, update = s.at(_ZENFLOW + ".select_interval", 0), s.at(_ZENFLOW + ".update_interval", 0)
    is_step = s.at(_ZENFLOW + ".select_strategy", "auto") == "step"
    return is_step and type(select) is int and type(update) is int and select < update


def _does_not_overlap(s: Subject) -> bool:
    is_overlapped = s.at(_ZERO + "overlap_comm", s.stage == 3) is True
    return s.is_true(_ZENFLOW + ".offload") and s.stage > 0 and not is_overlapped


def _accumulation(subject: Subject) -> Iterator[Fault]:
    """ZenFlow replaces the accumulation steps that the Trainer counts by its update_interval."""
    steps = accumulation(subject)
    if has_zenflow(subject) and steps is not None and steps > 1:
        yield Fault(
            pointer=("gradient_accumulation_steps",),
            problem=f"zenflow with {steps} accumulation steps",
            effect="the engine replaces them by zenflow's update_interval, but the Trainer keeps counting them",
            fix="accumulate 1 step, and set update_interval",
        )


# fmt: off
RULES = (
    Rule(id="DS307", severity=_E, title="ZenFlow without an offloaded optimizer",
         find=when(_ZENFLOW, lambda s: has_zenflow(s) and s.stage > 0 and s.device("offload_optimizer") != "cpu",
                   problem="zenflow without an optimizer on the CPU",
                   fix='write "offload_optimizer": {{"device": "cpu"}}, or remove zenflow'),
         source=_OPTIMIZER + "Zenflow must be used with cpu offload"),
    Rule(id="DS308", severity=_E, title="ZenFlow's strategy and interval",
         find=when(_ZENFLOW + ".select_interval", _is_interval_inconsistent,
                   problem="zenflow's select_strategy and select_interval contradict each other",
                   fix='write "select_strategy": "step" with a number, or omit both'), source=_ENGINE),
    Rule(id="DS309", severity=_E, title="ZenFlow's two intervals",
         find=when(_ZENFLOW + ".update_interval", _selects_more_often,
                   problem="zenflow updates every {value} steps and selects more often",
                   fix="write a select_interval of at least update_interval"), source=_ENGINE),
    Rule(id="DS310", severity=_E, title="ZenFlow with the Trainer's optimizer",
         find=when(_ZENFLOW, lambda s: has_zenflow(s) and s.is_trainers and not s.has("optimizer"),
                   problem="zenflow without an optimizer section",
                   effect="the run stops when the engine starts: ZenFlow reads the optimizer's parameters here",
                   fix='write "optimizer": {{"type": "AdamW", "params": {{"lr": "auto"}}}}'),
         source=_OPTIMIZER + "optimizer_params"),
    Rule(id="DS326", severity=_E, title="ZenFlow's offload without overlap",
         find=when(_ZENFLOW + ".offload", _does_not_overlap, problem="zenflow.offload without overlap_comm",
                   fix='write "overlap_comm": true'),
         source=_OPTIMIZER + "offload selective optimizer"),
    Rule(id="DS327", severity=Severity.WARNING, title="ZenFlow with accumulation", find=_accumulation,
         source=_ENGINE + " sets gradient_accumulation_steps"),
)
"""Rules about ZenFlow."""
# fmt: on
