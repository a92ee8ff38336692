"""How many samples of each data set an epoch has: by weights, without those held out for evaluation."""

from __future__ import annotations

from collections.abc import Sequence

from dstrain.choices import StoppingStrategy
from dstrain.errors import InvalidConfig
from dstrain.units import counted


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
