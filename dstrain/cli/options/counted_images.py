"""Counts the vision patches of the images of `--data`, in place of asking for them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dstrain.errors import DstrainError
from dstrain.facts.data.datafile import files_of, is_file_name
from dstrain.facts.data.image_patches import Eye, eye_of
from dstrain.facts.data.job_reading import reading_for
from dstrain.facts.data.lengths import usable_rows
from dstrain.facts.data.rows import spread
from dstrain.facts.data.turns import Conversation
from dstrain.facts.model import aliases
from dstrain.job.file import read_job
from dstrain.job.schema import Job
from dstrain.units import counted

_ROWS = 200
"""Rows that are looked at."""


def counted_patches(options: Mapping[str, Any]) -> tuple[int, str | None]:
    """Returns the most patches that the images of a sample have, and how they were counted; 0 if they are not known.

    They are not without data here, for a model whose processor cuts images by another rule, and for videos.
    """
    data = options.get("data")
    if not data:
        return 0, None
    try:
        job = (
            read_job(Path(data), is_only_read=True).job
            if data.endswith((".yaml", ".yml"))
            else Job(model="", output_dir="", data=data)
        )
        sees = eye_of(_source(options), options["hub"], max_pixels=job.max_pixels, min_pixels=job.min_pixels)
        return (job.image_patches, None) if sees is None or job.image_patches else _most(job, options, sees)
    except (DstrainError, OSError):
        return 0, None  # what is wrong with the data is said where they are read


def _source(options: Mapping[str, Any]) -> str:
    """Returns the folder or the id of the model."""
    name = str(Path(options["model"]).expanduser())
    known = None if Path(name).exists() else aliases.resolve(options["model"])
    return known[1].hub_id if known is not None and known[1].hub_id else name


def _most(job: Job, options: Mapping[str, Any], sees: Eye) -> tuple[int, str | None]:
    found: list[int] = []
    sources = [source for source in job.train_sources if is_file_name(source.path)]
    files = [(source, file) for source in sources for file in files_of(source.path) if file.exists()]
    for source, file in files:
        rows, _ = spread(file, -(-_ROWS // len(files)))
        for _, sides in usable_rows(file, rows[:_ROWS], reading_for(source, job)):
            if isinstance(sides[0], Conversation) and sides[0].has_media:
                patches = sees.patches_of(sides[0])
                if patches is None:
                    return 0, None
                found.append(patches)
    if not found:
        return 0, None
    looked = f"the most that the images of a sample have, of {counted(len(found), 'sample')} that were looked at"
    return max(found), f"--image-patches {max(found)}: {looked} ({sum(found) / len(found):,.0f} on average)"
