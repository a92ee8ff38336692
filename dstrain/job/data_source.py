"""The data sets of a job: a file, a glob or an id on a hub each, and how many samples of each an epoch has."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

from annotated_types import Gt

from dstrain.choices import Column, DataFormat, StoppingStrategy
from dstrain.errors import InvalidConfig
from dstrain.records import type_config
from dstrain.units import counted

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


def epoch_counts(sizes: Sequence[int], weights: Sequence[float], strategy: StoppingStrategy) -> list[int]:
    """Returns how many samples of each data set an epoch has, in the proportion of the weights.

    With `first_exhausted` no sample occurs twice: the data set that is smallest for its weight is used whole. With
    `all_exhausted` the one that is largest for its weight is used whole, and the others repeat. These are the
    expected counts of `datasets.interleave_datasets(probabilities=…)`, without its draws.

    >>> epoch_counts([1000, 100], [0.5, 0.5], StoppingStrategy.FIRST_EXHAUSTED)
    [100, 100]
    >>> epoch_counts([1000, 100], [3, 1], StoppingStrategy.ALL_EXHAUSTED)
    [1000, 333]
    """
    bound = min if strategy is StoppingStrategy.FIRST_EXHAUSTED else max
    per_weight = bound(size / weight for size, weight in zip(sizes, weights, strict=True))
    return [max(1, round(weight * per_weight)) for weight in weights]


def held_out_counts(sizes: Sequence[int], val_split: float) -> list[int]:
    """Returns how many samples of each data set are held out: a share of each, or a number in all.

    >>> held_out_counts([900, 100], 0.05), held_out_counts([900, 100], 11)
    ([45, 5], [10, 1])

    Raises InvalidConfig if no sample is held out, or none is left.
    """
    total = sum(sizes)
    wanted = round(val_split * total) if val_split < 1 else round(val_split)
    if not 0 < wanted < total:
        raise InvalidConfig(
            f"val_split is {val_split:g}, which holds out {min(wanted, total):,} of {counted(total, 'sample')}",
            hint="Write a share such as 0.05, or a number of samples below that of the data.",
        )
    exact = [wanted * size / total for size in sizes]
    counts = [int(share) for share in exact]
    by_remainder = sorted(range(len(sizes)), key=lambda index: counts[index] - exact[index])
    for index in by_remainder[: wanted - sum(counts)]:
        counts[index] += 1
    return counts
