"""Loads data sets by their hub id: Hugging Face or ModelScope."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import datasets  # type: ignore[import-untyped]

from dstrain.choices import Hub
from dstrain.errors import EnvironmentProblem, InvalidConfig

EVAL_SPLITS = ("validation", "valid", "dev", "eval", "test")
"""Splits for evaluation, in order of preference."""


def from_hub(data: str, hub: Hub, *, training: bool) -> tuple[str, datasets.Dataset]:
    """Returns a split of a data set on a hub, with a name for messages: `train`, or one for evaluation.

    Raises InvalidConfig for an unknown data set or split, EnvironmentProblem if the hub cannot be reached.
    """
    try:
        splits = _from_modelscope(data) if hub is Hub.MODELSCOPE else datasets.load_dataset(data)
    except datasets.exceptions.DatasetNotFoundError as error:
        raise InvalidConfig(
            f'data is "{data}", which is neither a file nor a data set on the hub: {_first_line(error)}',
            hint="Check the name; for a gated data set, set HF_TOKEN.",
        ) from error
    except (ConnectionError, TimeoutError) as error:
        raise EnvironmentProblem(
            f'the data set "{data}" cannot be loaded: {_first_line(error)}',
            hint="Use a local file, or set HF_ENDPOINT to a reachable mirror.",
        ) from error
    except ValueError as error:
        raise InvalidConfig(f'the data set "{data}" cannot be loaded: {_first_line(error)}') from error
    split = _choose(data, list(splits), training=training)
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


def _from_modelscope(data: str) -> Mapping[str, datasets.Dataset]:
    try:
        from modelscope.msdatasets import MsDataset  # type: ignore[import-not-found]
    except ImportError as error:
        raise EnvironmentProblem(
            f'the data set "{data}" needs modelscope, which cannot be imported: {error}',
            hint='pip install "modelscope[datasets]"',
        ) from error
    loaded = MsDataset.load(data)
    splits = loaded if isinstance(loaded, Mapping) else {"train": loaded}
    return {name: _plain(split) for name, split in splits.items()}


def _plain(split: Any) -> Any:
    return split.to_hf_dataset() if hasattr(split, "to_hf_dataset") else split


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]
