"""How a job says that the rows of its data sets become samples."""

from __future__ import annotations

from dstrain.facts.data.sample_formats import Reading
from dstrain.job.data_source import DataSource
from dstrain.job.schema import Job


def reading_for(source: DataSource, job: Job) -> Reading:
    """Returns how rows of a data set of a job become samples."""
    columns = {str(name): column for name, column in (source.columns or {}).items()}
    return Reading(format=source.format or job.data_format, columns=columns, system=job.system)
