"""Rules about the text: duplicate keys, and syntax that plain JSON does not have."""

from __future__ import annotations

from collections.abc import Iterator

from dstrain.config.document import lookup
from dstrain.config.jsonc import place_of
from dstrain.config.lint.finding import Fault, Severity
from dstrain.config.lint.rule import Rule
from dstrain.config.lint.subject import ABSENT, Subject, shown

SYNTAX, NO_OBJECT = "DS001", "DS003"
"""Rules that `check` applies itself, because nothing else can be said of such a file."""


def _repeated(subject: Subject) -> Iterator[Fault]:
    document = subject.document
    for each in document.repeated:
        line = place_of(document.text, each.first, document.name).line
        value = lookup(document.value, each.pointer)
        last = "" if value is ABSENT else f", {shown(value)},"  # an outer key may stand again, and hide it
        yield Fault(
            pointer=each.pointer,
            at=each.at,
            problem=f'"{each.pointer[-1]}" stands here again (first on line {line})',
            effect=f"the Trainer takes the last{last} and says nothing; DeepSpeed itself refuses the file",
            fix="keep one of them",
        )


def _extras(subject: Subject) -> Iterator[Fault]:
    if subject.job is not None:
        return
    for what, offset in subject.document.extras.items():
        yield Fault(
            at=offset,
            problem=f"{what} stands here, which plain JSON does not have",
            effect="dstrain and DeepSpeed read it; a Trainer that is given the file's path does not, and stops",
            fix="leave it for dstrain run; take it out for other tools",
        )


RULES = (
    Rule(
        id="DS002",
        severity=Severity.ERROR,
        title="a key stands twice",
        find=_repeated,
        source="accelerate 1.15 utils/deepspeed.py: HfDeepSpeedConfig (json.load); "
        "deepspeed 0.19.8 runtime/config_utils.py: dict_raise_error_on_duplicate_keys",
    ),
    Rule(
        id="DS004",
        severity=Severity.INFO,
        title="comments, trailing commas, a BOM",
        find=_extras,
        source="accelerate 1.15 utils/deepspeed.py: HfDeepSpeedConfig (json.load)",
    ),
)
"""Rules about the text."""
