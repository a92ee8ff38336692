"""How a job says that the rows of its data sets become samples."""

from __future__ import annotations

from dstrain.choices import DataFormat, Task
from dstrain.facts.data.sample_formats import Reading
from dstrain.job import task_limits
from dstrain.job.data_source import DataSource
from dstrain.job.schema import Job

FORMATS = {Task.PRETRAIN: DataFormat.TEXT, Task.DPO: DataFormat.PREFERENCE}
"""The format of tasks that have only one."""


def reading_for(source: DataSource, job: Job) -> Reading:
    """Returns how rows of a data set of a job become samples. Raises InvalidConfig for a format not of the task."""
    data_format = source.format or job.data_format
    task_limits.require_format(job.task, data_format)
    if data_format is DataFormat.AUTO:
        data_format = FORMATS.get(job.task, data_format)
    columns = {str(name): column for name, column in (source.columns or {}).items()}
    return Reading(format=data_format, columns=columns, system=job.system)
