"""One data set of a job: a file, a glob or an id on a hub, with its weight in the mixture."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

from annotated_types import Gt

from dstrain.choices import Column, DataFormat
from dstrain.errors import InvalidConfig
from dstrain.records import type_config

Positive = Annotated[int, Gt(0)]
PositiveFloat = Annotated[float, Gt(0)]


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSource:
    """One data set."""

    __pydantic_config__ = type_config

    path: str
    """A file, a glob, or a data set id on the hub."""
    weight: PositiveFloat | None = None
    """Share of the samples of an epoch, relative to the other data sets, all of which then have one."""
    max_samples: Positive | None = None
    """Number of samples to use, from the beginning; default: the job's."""
    split: str | None = None
    """Split of a data set on the hub, such as `train` or `train[:5%]`; default: by its purpose."""
    subset: str | None = None
    """Configuration of a data set on the hub; default: its only one."""
    format: DataFormat | None = None
    """As `data_format`; default: the job's."""
    columns: Mapping[Column, str] | None = None
    """As `columns` of the job; default: the job's."""


Sources = str | DataSource | tuple[str | DataSource, ...]
"""Accepted values of `data` and `eval_data`."""


def listed(sources: Sources | None) -> tuple[DataSource, ...]:
    """Returns data sets as a tuple; a name alone is the path of one.

    >>> [source.path for source in listed(("a.jsonl", DataSource(path="b.jsonl", weight=2.0)))]
    ['a.jsonl', 'b.jsonl']
    """
    if sources is None:
        return ()
    items = sources if isinstance(sources, tuple) else (sources,)
    return tuple(DataSource(path=item) if isinstance(item, str) else item for item in items)


def with_paths(sources: Sources | None, path_of: Callable[[str], str]) -> Sources | None:
    """Returns data sets in the same form, with `path_of` of each path."""
    if isinstance(sources, tuple):
        return tuple(_with_path(item, path_of) for item in sources)
    return None if sources is None else _with_path(sources, path_of)


def _with_path(source: str | DataSource, path_of: Callable[[str], str]) -> str | DataSource:
    return path_of(source) if isinstance(source, str) else replace(source, path=path_of(source.path))


def weights_of(sources: Sequence[DataSource]) -> list[float] | None:
    """Returns the weights of data sets, or None without any. Raises InvalidConfig if only some have one."""
    weights = [source.weight for source in sources if source.weight is not None]
    if weights and len(weights) < len(sources):
        without = next(source.path for source in sources if source.weight is None)
        raise InvalidConfig(f"{without} has no weight, but other data sets have", hint="Give all of them a weight.")
    return weights or None
