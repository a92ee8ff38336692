"""Images and videos of a job's data as LLaMA-Factory reads them, with its keys that limit and train them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from dstrain.config.imports.converters import listed
from dstrain.config.imports.llamafactory import NO_LIMIT, ROWS
from dstrain.errors import InvalidConfig
from dstrain.facts.data.media import named_in
from dstrain.facts.data.media_kinds import KINDS, Kind
from dstrain.facts.data.row_values import is_given
from dstrain.facts.data.rows import Sample, entries
from dstrain.job.file import looks_local
from dstrain.job.schema import Job
from dstrain.job.task_limits import PARTS
from dstrain.launch.prepare.job_checks import CHECKED_DATA_BYTES

_LIMITS = ("max_pixels", "min_pixels", "video_max_pixels", "video_fps", "video_maxlen")
THEIR_LIMITS = {row.target: row.key for row in ROWS.values() if row.target in (*_LIMITS, *PARTS)}
"""Key of a job → LLaMA-Factory's, by the table of the import."""


def has_media(data: object) -> bool:
    """Returns whether a data file that is here has images or videos."""
    return any(True for _ in _rows_with_media(data))


def media_columns(data: object) -> dict[str, str]:
    """Returns LLaMA-Factory's names of the columns of images and videos → those of a data file, if it is here.

    Raises InvalidConfig with the place of a row in a form that only dstrain reads, of the rows that lint reads too.
    """
    columns: dict[str, str] = {}
    for sample, kind in _rows_with_media(data):
        theirs = kind.columns[0]
        given = [name for name in kind.columns if is_given(sample.row.get(name))]
        if not given or columns.setdefault(theirs, given[0]) != given[0]:
            _refuse(sample, f'{theirs} in turns, or in several columns: LLaMA-Factory reads one column "{theirs}"')
        text = json.dumps(sample.row, default=str, ensure_ascii=False)
        if kind.mark not in text:
            _refuse(sample, f"{theirs} without marks: LLaMA-Factory needs one {kind.mark} for each in the text")
        if any(";base64," in str(value) for value in listed(sample.row[given[0]])):
            _refuse(sample, f"{theirs} as data URLs: LLaMA-Factory reads files")
    return columns


def _rows_with_media(data: object) -> Iterator[tuple[Sample, Kind]]:
    """Yields the rows of a file that have images or videos, with their kind."""
    for sample in entries(Path(data), CHECKED_DATA_BYTES) if isinstance(data, str) and Path(data).is_file() else ():
        if isinstance(sample, InvalidConfig):
            continue
        for kind in KINDS:
            if kind.columns[0] in named_in(sample.row):
                yield sample, kind


def _refuse(sample: Sample, what: str) -> None:
    raise InvalidConfig(f"{sample.where}: has {what}", hint="Change the data, or train with dstrain run.")


def media_settings(job: Job, columns: Mapping[str, str]) -> dict[str, Any]:
    """Returns LLaMA-Factory's keys for the parts of the model that train, and the limits that the job has; sizes that
    only the model's processor limits are written as unlimited, since its own defaults are smaller."""
    settings = {THEIR_LIMITS[key]: getattr(job, key) for key, default in PARTS.items() if getattr(job, key) != default}
    settings |= {THEIR_LIMITS[key]: getattr(job, key) for key in _LIMITS if getattr(job, key) is not None}
    unlimited = {"images": "max_pixels", "videos": "video_max_pixels"}
    sizes = {THEIR_LIMITS[key]: job.max_pixels or NO_LIMIT for column, key in unlimited.items() if column in columns}
    sizes |= {THEIR_LIMITS["min_pixels"]: 1} if "images" in columns else {}
    folder = {"media_dir": str(Path(str(job.data)).parent)} if columns and looks_local(str(job.data)) else {}
    return sizes | settings | folder


def media_notes(job: Job, columns: Mapping[str, str]) -> Iterator[str]:
    """Yields what of images and videos differs."""
    yield "set `template` (`qwen3_vl_nothink` for Qwen3-VL): without one LLaMA-Factory reads no media"
    unset = [key for key in ("video_fps", "video_maxlen") if getattr(job, key) is None]
    if "videos" in columns and unset:
        yield f"without {' and '.join(unset)} LLaMA-Factory takes 2 frames a second and at most 128 of a video"
