"""Writes LLaMA-Factory's dataset_info.json, in which it looks up data sets by name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dstrain.choices import DataFormat
from dstrain.errors import InvalidConfig
from dstrain.facts.data import datafile, sample_formats
from dstrain.job.file import is_local
from dstrain.job.schema import Job

TRAINING, EVALUATION = "train", "eval"
"""Names of the data sets."""


def dataset_info(job: Job, media: Mapping[str, Mapping[str, str]]) -> tuple[DataFormat, dict[str, Any]]:
    """Returns the format of a job's data, and the content of dataset_info.json; `media` are the columns of images and
    videos of each data set. Raises InvalidConfig if the format is unknown: it is `auto`, and the data are not here."""
    form, columns = _form(job)
    info = {TRAINING: _data_set(str(job.data), columns, media[TRAINING])}
    if job.eval_data is not None:
        info[EVALUATION] = _data_set(str(job.eval_data), columns, media[EVALUATION])
    return form, info


def _form(job: Job) -> tuple[DataFormat, dict[str, Any]]:
    """Returns the format of a job's data, and LLaMA-Factory's entry for its columns, from the first row of a file."""
    row: Mapping[str, Any] = {}
    if Path(str(job.data)).is_file():
        row = next((sample.row for sample in datafile.samples(str(job.data))), {})
    form = sample_formats.detect(row) if row and job.data_format is DataFormat.AUTO else job.data_format
    if form is DataFormat.AUTO:
        raise InvalidConfig(f"the format of {job.data} is not known here", hint="Set data_format in job.yaml.")
    if form is DataFormat.TEXT:
        return form, {"columns": {"prompt": "text"}}
    if form is DataFormat.ALPACA:
        return form, {"formatting": "alpaca"}
    column = "conversations" if "conversations" in row else "messages"
    first = (row.get(column) or [{}])[0]
    tags = {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}
    own = {"tags": tags} if "from" not in first else {}
    return form, {"formatting": "sharegpt", "columns": {"messages": column}, **own}


def _data_set(name: str, entry: Mapping[str, Any], media: Mapping[str, str]) -> dict[str, Any]:
    """Returns an entry of dataset_info.json: a file by its path, or an id on the hub."""
    columns = {**entry.get("columns", {}), **media}
    return {
        "file_name" if is_local(name) else "hf_hub_url": name,
        **entry,
        **({"columns": columns} if columns else {}),
    }
