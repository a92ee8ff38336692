"""Why a request has no answer: options that contradict each other, and batches that no ranks can share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from dstrain.errors import InvalidConfig
from dstrain.facts.cluster.cluster import Cluster
from dstrain.plan.configuration import DEGREES
from dstrain.plan.request import Request
from dstrain.plan.search.rules import Rule
from dstrain.units import counted


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """The words for the choices of a request where a person made them."""

    choices: str
    """What they are, as the beginning of a sentence."""
    spell: Callable[[str], str]
    """Returns a choice and its value, given the field of `Request`."""


class Unsatisfiable(InvalidConfig):
    """No way satisfies a request."""

    def __init__(self, request: Request, names: Sequence[str], say: Callable[[Terms], str], *, hint: str) -> None:
        """`names` are the fields that rule each other out; `say` names them, by default as options."""
        self.names, self.say, self.spell = names, say, partial(option, request)
        super().__init__(say(Terms(choices="the options", spell=self.spell)), hint=hint)


def unsatisfied(request: Request, name: str, why: str, *, hint: str) -> Unsatisfiable:
    """Returns the error of one choice, given its field and the end of the sentence that begins with it."""
    return Unsatisfiable(request, [name], lambda terms: f"{terms.spell(name)}{why}", hint=hint)


def contradiction(request: Request, broken: Iterable[Sequence[Rule]]) -> Unsatisfiable:
    """Returns the error of a request that no way satisfies: the options that the least broken way contradicts.

    `broken` has the rules that each way breaks.
    """
    rule = min(broken, key=len)[0]
    names = [name for name in rule.options if _is_given(request, name)]

    def say(terms: Terms) -> str:
        said = "; ".join([*([" and ".join(map(terms.spell, names))] if names else []), rule.says])
        return f"{terms.choices} contradict each other: {said}" if len(names) > 1 else said

    return Unsatisfiable(request, names, say, hint="Remove one of them." if len(names) > 1 else "Choose another value.")


def _is_given(request: Request, name: str) -> bool:
    value = getattr(request, name)
    return value is not None and (name not in (*DEGREES, "hpz") or value > 1)


def option(request: Request, name: str) -> str:
    """Returns a choice of a request as an option, as it is typed on the command line."""
    word, value = name.replace("_", "-"), getattr(request, name)
    if isinstance(value, bool):
        return f"--{word}" if value else f"--no-{word}"
    return f"--{word} {value}"


def no_batch(cluster: Cluster, request: Request, ranks: int) -> Unsatisfiable:
    """Returns the error of a global batch that no way keeps, in numbers; `ranks` are data-parallel at most."""
    wanted = request.global_batch or 0
    groups = f"{ranks} groups of {cluster.num_gpus} GPUs" if ranks != cluster.num_gpus else counted(ranks, "GPU")
    unit = ranks * (request.micro_batch or 1) * (request.grad_accum or 1)
    options = [str(size) for size in (wanted // unit * unit, (wanted // unit + 1) * unit) if size]
    hint = f"Write --global-batch {' or '.join(options)}."
    parts = [groups]
    parts += [f"micro-batch {request.micro_batch}"] if request.micro_batch else []
    parts += [f"{request.grad_accum} accumulated"] if request.grad_accum else []
    verb = "is not" if request.micro_batch and request.grad_accum else "is not a multiple of"

    def say(terms: Terms) -> str:
        given = terms.spell("global_batch")
        if unit == ranks:
            return f"{given} cannot be shared by {groups}"
        return f"{terms.choices} contradict each other: {given} {verb} {' × '.join(parts)}"

    return Unsatisfiable(request, ["global_batch"], say, hint=hint)
