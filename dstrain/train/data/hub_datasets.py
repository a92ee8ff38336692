"""Loads data sets by their hub id: Hugging Face or ModelScope."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import datasets  # type: ignore[import-untyped]

from dstrain.choices import Hub
from dstrain.errors import EnvironmentProblem, InvalidConfig, first_line
from dstrain.job.data_source import DataSource

EVAL_SPLITS = ("validation", "valid", "dev", "eval", "test")
"""Splits for evaluation, in order of preference."""


def from_hub(source: DataSource, hub: Hub, *, training: bool, streaming: bool = False) -> tuple[str, Any]:
    """Returns a split of a data set on a hub, with a name for messages: the named one, `train`, or one for evaluation.

    With `streaming` it is an IterableDataset, whose rows are read when they are asked for. Raises InvalidConfig for an
    unknown data set or split, EnvironmentProblem if the hub cannot be reached.
    """
    data = source.path
    try:
        splits = _from_modelscope(source, streaming) if hub is Hub.MODELSCOPE else _from_hugging_face(source, streaming)
    except datasets.exceptions.DatasetNotFoundError as error:
        raise InvalidConfig(
            f'data is "{data}", which is neither a file nor a data set on the hub: {first_line(error)}',
            hint="Check the name; for a gated data set, set HF_TOKEN.",
        ) from error
    except (ConnectionError, TimeoutError) as error:
        raise EnvironmentProblem(
            f'the data set "{data}" cannot be loaded: {first_line(error)}',
            hint="Use a local file, or set HF_ENDPOINT to a reachable mirror.",
        ) from error
    except ValueError as error:
        raise InvalidConfig(f'the data set "{data}" cannot be loaded: {first_line(error)}') from error
    split = source.split or _choose(data, list(splits), training=training)
    return f"{data} ({split})", splits[split]


def _choose(data: str, names: list[str], *, training: bool) -> str:
    wanted = ("train",) if training else EVAL_SPLITS
    split = next((name for name in wanted if name in names), None)
    if split is None and len(names) == 1 and (training or names != ["train"]):
        split = names[0]
    if split is None:
        purpose = "train on" if training else "evaluate on"
        raise InvalidConfig(
            f'the data set "{data}" has no split to {purpose} (one of {", ".join(wanted)}); it has {", ".join(names)}',
            hint="Save the split as a JSONL file, and use that.",
        )
    return split


def _from_hugging_face(source: DataSource, streaming: bool) -> Mapping[str, Any]:
    """Returns the splits by name; only the named one, which may be a slice such as `train[:5%]`, if there is one."""
    subset = [source.subset] if source.subset is not None else []
    options = {"streaming": True} if streaming else {}
    if source.split is None:
        splits: Mapping[str, Any] = datasets.load_dataset(source.path, *subset, **options)
        return splits
    return {source.split: datasets.load_dataset(source.path, *subset, split=source.split, **options)}


def _from_modelscope(source: DataSource, streaming: bool) -> Mapping[str, Any]:
    if streaming:
        problem = f'the data set "{source.path}" cannot be streamed from ModelScope, which dstrain only downloads'
        raise InvalidConfig(problem, hint="Download it, and name its files as data.")
    try:
        from modelscope.msdatasets import MsDataset  # type: ignore[import-not-found]
    except ImportError as error:
        raise EnvironmentProblem(
            f'the data set "{source.path}" needs modelscope, which cannot be imported: {error}',
            hint='pip install "modelscope[datasets]"',
        ) from error
    named = {"subset_name": source.subset, "split": source.split}
    loaded = MsDataset.load(source.path, **{name: value for name, value in named.items() if value is not None})
    splits = loaded if isinstance(loaded, Mapping) else {source.split or "train": loaded}
    return {name: _plain(split) for name, split in splits.items()}


def _plain(split: Any) -> Any:
    return split.to_hf_dataset() if hasattr(split, "to_hf_dataset") else split
