"""Rules about the text: duplicate keys, and syntax that plain JSON does not have."""

from __future__ import annotations

from collections.abc import Iterator

from dstrain.config.document import lookup
from dstrain.config.jsonc import place_of
from dstrain.config.lint.finding import Fault, Severity
from dstrain.config.lint.rule import Rule
from dstrain.config.lint.subject import ABSENT, Subject, shown

SYNTAX, NO_OBJECT = "DS001", "DS003"
"""Rules that `read` applies to files without a configuration."""


def _repeated(subject: Subject) -> Iterator[Fault]:
    document = subject.document
    for key in document.repeated:
        line = place_of(document.text, key.first, document.name).line
        value = lookup(document.value, key.pointer)
        last = "" if value is ABSENT else f", {shown(value)},"  # absent if an outer key is repeated too
        yield Fault(
            pointer=key.pointer,
            at=key.at,
            problem=f'"{key.pointer[-1]}" is repeated (first on line {line})',
            effect=f"the Trainer uses the last value{last} without a warning; DeepSpeed itself refuses the file",
            fix="keep one of them",
        )


def _extras(subject: Subject) -> Iterator[Fault]:
    if subject.job is not None:
        return
    for what, offset in subject.document.extras.items():
        yield Fault(
            at=offset,
            problem=f"{what} is not plain JSON",
            effect="dstrain and DeepSpeed accept it; a Trainer that reads the file by its path stops",
            fix="leave it for dstrain run; remove it for other tools",
        )


_JSON_LOAD = "accelerate 1.15 utils/deepspeed.py: HfDeepSpeedConfig (json.load)"

# fmt: off
RULES = (
    Rule(id="DS002", severity=Severity.ERROR, title="repeated key", find=_repeated,
         source=_JSON_LOAD + "; deepspeed 0.19.8 runtime/config_utils.py: dict_raise_error_on_duplicate_keys"),
    Rule(id="DS004", severity=Severity.INFO, title="comments, trailing commas, BOM", find=_extras, source=_JSON_LOAD),
)
"""Rules about the text."""
# fmt: on
