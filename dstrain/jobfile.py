"""Reading a job file: overrides on top, paths made absolute, and every value knows where it was written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dstrain.errors import InvalidConfig
from dstrain.job import SYNONYMS, Job
from dstrain.records import Locator, Place, from_data, parse_yaml


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFile:
    """A job with its source."""

    job: Job
    """The job, with overrides applied and local paths absolute."""
    locate: Locator
    """Says where a key was written: `job.yaml:3:1`, or `--set key`."""


def read_job(path: Path, overrides: Sequence[str] = ()) -> JobFile:
    """Returns the job in a YAML file, with `key=value` overrides on top (`lora.rank=8` reaches inside).

    Raises InvalidConfig with every problem and its place.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise InvalidConfig(
            f"{path}: no such file", hint="dstrain gen-config writes one; or name yours: dstrain run path/to/job.yaml"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidConfig(f"{path}: cannot be read: {error}") from None
    data, locate_in_file = parse_yaml(text, str(path))
    if not isinstance(data, dict):
        raise InvalidConfig(f"{path}: a job is a list of `key: value` lines", hint="Compare the examples in launch/.")
    given = [_override(data, item) for item in overrides]

    def locate(place: Place) -> str:
        for option in given:
            if place[: len(option)] == option:
                return f"--set {'.'.join(map(str, option))}"
        return locate_in_file(place)

    job = from_data(Job, data, locate=locate, synonyms=SYNONYMS)
    return JobFile(job=_absolute(job, path.resolve().parent), locate=locate)


def _override(data: dict[str, Any], item: str) -> Place:
    """Writes one `key=value` into `data`; returns its place."""
    key, separator, value = item.partition("=")
    place = tuple(key.strip().split("."))
    if not separator or not all(place):
        raise InvalidConfig(f'--set "{item}" is not key=value', hint="Write --set learning_rate=1e-5.")
    node = data
    for part in place[:-1]:
        inner = node.setdefault(part, {})
        if not isinstance(inner, dict):
            raise InvalidConfig(f'--set "{item}": {part} has no keys of its own')
        node = inner
    node[place[-1]], _ = parse_yaml(value, f"--set {key}")
    return place


def _absolute(job: Job, folder: Path) -> Job:
    """Returns the job with local paths absolute; what is no file here may be an id on the hub and stays."""

    def maybe(name: str | None) -> str | None:
        if name is None:
            return None
        path = (folder / Path(name).expanduser()).resolve()
        return str(path) if path.exists() or looks_local(name) else name

    return replace(
        job,
        model=maybe(job.model) or job.model,
        data=maybe(job.data),
        eval_data=maybe(job.eval_data),
        ds_config=str((folder / Path(job.ds_config).expanduser()).resolve()),
        hostfile=None if job.hostfile is None else str((folder / Path(job.hostfile).expanduser()).resolve()),
        output_dir=str((folder / Path(job.output_dir).expanduser()).resolve()),
        resume=job.resume
        if job.resume in ("never", "auto")
        else str((folder / Path(job.resume).expanduser()).resolve()),
    )


def looks_local(name: str) -> bool:
    """Returns whether a name can only be a path, not an id on a hub.

    >>> looks_local("./model"), looks_local("train.jsonl"), looks_local("Qwen/Qwen3-32B")
    (True, True, False)
    """
    return name.startswith((".", "/", "~")) or name.endswith((".jsonl", ".json", ".parquet")) or name.count("/") > 1
