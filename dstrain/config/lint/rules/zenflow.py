"""Rules about ZenFlow: its requirements, and how its intervals combine."""

from __future__ import annotations

from collections.abc import Iterator

from dstrain.config.lint.finding import Fault, Severity
from dstrain.config.lint.rule import Rule, when
from dstrain.config.lint.subject import Subject

_DS = "deepspeed 0.19.8 "
_ZERO = "zero_optimization."
_E, _W = Severity.ERROR, Severity.WARNING


def has_zenflow(s: Subject) -> bool:
    """Returns whether the section is there, which alone turns ZenFlow on."""
    return isinstance(s.at(_ZERO + "zenflow"), dict)


def _zenflow_strategy(s: Subject) -> bool:
    section = s.at(_ZERO + "zenflow", {})
    if not isinstance(section, dict):
        return False
    is_auto = bool(section.get("select_strategy", "auto") == "auto")
    interval = section.get("select_interval", "auto")
    return is_auto == (isinstance(interval, int) and not isinstance(interval, bool))


def _zenflow_intervals(s: Subject) -> bool:
    select, update = s.at(_ZERO + "zenflow.select_interval", 0), s.at(_ZERO + "zenflow.update_interval", 0)
    is_step = s.at(_ZERO + "zenflow.select_strategy", "auto") == "step"
    return is_step and all(type(each) is int for each in (select, update)) and select < update


def _zenflow_accumulation(subject: Subject) -> Iterator[Fault]:
    """ZenFlow puts its update_interval in the place of the accumulation steps that the Trainer counts."""
    given = subject.at("gradient_accumulation_steps", 1)
    if given == "auto" and subject.job is not None:
        given = subject.job.job.grad_accum
    if has_zenflow(subject) and isinstance(given, int) and given > 1:
        yield Fault(
            pointer=("gradient_accumulation_steps",),
            problem=f"zenflow beside {given} accumulation steps",
            effect="the engine takes zenflow's update_interval in their place, and the Trainer goes on counting these",
            fix="accumulate 1 step, and set update_interval",
        )


# fmt: off
RULES = (
    Rule(id="DS307", severity=_E, title="ZenFlow without an offloaded optimizer",
         find=when(_ZERO + "zenflow",
                   lambda s: has_zenflow(s) and s.stage > 0 and s.device("offload_optimizer") != "cpu",
                   problem="zenflow without an optimizer on the CPU",
                   effect="the run stops when the engine starts",
                   fix='write "offload_optimizer": {{"device": "cpu"}}, or remove zenflow'),
         source=_DS + "runtime/zenflow/zenflow_stage_1_and_2.py: Zenflow must be used with cpu offload"),
    Rule(id="DS308", severity=_E, title="ZenFlow's strategy and interval",
         find=when(_ZERO + "zenflow.select_interval", lambda s: has_zenflow(s) and _zenflow_strategy(s),
                   problem="zenflow's select_strategy and select_interval do not go together",
                   effect="the run stops when the engine starts",
                   fix='write "select_strategy": "step" with a number, or leave both out'),
         source=_DS + "runtime/zenflow/engine.py: configure_zenflow"),
    Rule(id="DS309", severity=_E, title="ZenFlow's two intervals",
         find=when(_ZERO + "zenflow.update_interval", _zenflow_intervals,
                   problem="zenflow updates every {value} steps and selects more often",
                   effect="the run stops when the engine starts",
                   fix="write a select_interval of at least update_interval"),
         source=_DS + "runtime/zenflow/engine.py: configure_zenflow"),
    Rule(id="DS310", severity=_E, title="ZenFlow with the Trainer's optimizer",
         find=when(_ZERO + "zenflow", lambda s: has_zenflow(s) and s.is_trainers and not s.has("optimizer"),
                   problem="zenflow without an optimizer section",
                   effect="the run stops when the engine starts: ZenFlow reads the optimizer's parameters here",
                   fix='write "optimizer": {{"type": "AdamW", "params": {{"lr": "auto"}}}}'),
         source=_DS + "runtime/zenflow/zenflow_stage_1_and_2.py: optimizer_params"),
    Rule(id="DS326", severity=_E, title="ZenFlow's offload without overlap",
         find=when(_ZERO + "zenflow.offload",
                   lambda s: s.is_true(_ZERO + "zenflow.offload") and s.stage > 0
                   and s.at(_ZERO + "overlap_comm", s.stage == 3) is not True,
                   problem="zenflow.offload without overlap_comm",
                   effect="the run stops when the engine starts", fix='write "overlap_comm": true'),
         source=_DS + "runtime/zenflow/zenflow_stage_1_and_2.py: offload selective optimizer"),
    Rule(id="DS327", severity=_W, title="ZenFlow and accumulation", find=_zenflow_accumulation,
         source=_DS + "runtime/zenflow/engine.py: configure_zenflow sets gradient_accumulation_steps"),
)
"""Rules about ZenFlow."""
# fmt: on
