"""Why a request has no answer: options that contradict each other, and batches that no ranks can share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from dstrain.errors import InvalidConfig
from dstrain.facts.cluster.cluster import Cluster
from dstrain.plan.configuration import DEGREES
from dstrain.plan.request import Request
from dstrain.plan.search.rule import Rule


def contradiction(request: Request, broken: Iterable[Sequence[Rule]]) -> InvalidConfig:
    """Returns the error of a request that no way satisfies: the options that the least broken way contradicts.

    `broken` has the rules that each way breaks.
    """
    rule = min(broken, key=len)[0]
    words = [_option(name, getattr(request, name)) for name in rule.options if _is_given(request, name)]
    said = f"{' and '.join(words)}; {rule.says}" if words else rule.says
    if len(words) < 2:
        return InvalidConfig(f"{said[0].lower() if not words else said[0]}{said[1:]}", hint="Choose another value.")
    return InvalidConfig(f"the options contradict each other: {said}", hint="Remove one of them.")


def _is_given(request: Request, name: str) -> bool:
    value = getattr(request, name)
    return value is not None and (name not in DEGREES or value > 1)


_OPTIONS = {"state_dtypes": "states"}


def _option(name: str, value: object) -> str:
    """Returns an option as typed on the command line."""
    word = "--" + _OPTIONS.get(name, name).replace("_", "-")
    return word if value is True else f"{word} {value}"


def no_batch(cluster: Cluster, request: Request, ranks: int) -> InvalidConfig:
    """Returns the error of a global batch that no way keeps, in numbers; `ranks` are data-parallel at most."""
    wanted = request.global_batch or 0
    groups = f"{cluster.num_gpus} GPUs" if ranks == cluster.num_gpus else f"{ranks} groups of {cluster.num_gpus} GPUs"
    unit = ranks * (request.micro_batch or 1) * (request.grad_accum or 1)
    options = [str(size) for size in (wanted // unit * unit, (wanted // unit + 1) * unit) if size]
    hint = f"Write --global-batch {' or '.join(options)}."
    if unit == ranks:
        return InvalidConfig(f"--global-batch {wanted} cannot be shared by {groups}", hint=hint)
    parts = [groups]
    parts += [f"micro-batch {request.micro_batch}"] if request.micro_batch else []
    parts += [f"{request.grad_accum} accumulated"] if request.grad_accum else []
    verb = "is not" if request.micro_batch and request.grad_accum else "is not a multiple of"
    return InvalidConfig(
        f"the options contradict each other: --global-batch {wanted} {verb} {' × '.join(parts)}", hint=hint
    )
