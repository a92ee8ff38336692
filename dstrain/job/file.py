"""Reads a job file: accepts other tools' key names, applies overrides, makes paths absolute, and records places."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from dstrain.choices import Method
from dstrain.errors import InvalidConfig, Place, located
from dstrain.job.code_variables import refuse_code
from dstrain.job.data_source import with_paths
from dstrain.job.model_changes import shape_of_adapter
from dstrain.job.schema import Job
from dstrain.job.yaml_source import parse_yaml
from dstrain.records import Keys, Locator, from_data, to_data
from dstrain.removed import JOB

TEXTS = frozenset({"env"})
"""Keys whose values are mappings of text: `4` is "4"."""


@cache
def synonyms() -> Mapping[str, str]:
    """Returns the names of keys in other tools → ours."""
    table = tomllib.loads(Path(__file__).with_name("synonyms.toml").read_text(encoding="utf-8"))
    return {name: key for key, names in table.items() for name in names.split()}


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFile:
    """A job with its source."""

    job: Job
    """With overrides applied and local paths absolute."""
    locate: Locator
    """Returns the place of a key: in the file, or `--set key`."""

    def changed(self, overrides: Sequence[str]) -> JobFile:
        """Returns the job with more `key=value` overrides on top; no file is read again."""
        return job_of(to_data(self.job), self.locate, Path("/"), overrides)


def read_job(path: Path, overrides: Sequence[str] = (), *, is_only_read: bool = False) -> JobFile:
    """Returns the job in a YAML file, with `key=value` overrides on top (`lora.rank=8` reaches inside).

    Raises InvalidConfig with every problem and its place, and for variables in the file that could run code, unless
    the user trusts it, or unless it `is_only_read`: no process gets its environment.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise InvalidConfig(
            f"{path}: no such file", hint="dstrain gen-config writes one; or name yours, such as path/to/job.yaml."
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidConfig(f"{path}: cannot be read: {error}") from None
    data, locate = parse_yaml(text, str(path), texts=TEXTS)
    if not isinstance(data, dict):
        raise InvalidConfig(f"{path}: is not a list of `key: value` lines", hint="Compare the examples in launch/.")
    if not is_only_read and isinstance(data.get("env"), dict):
        refuse_code((str(name), locate(("env", name))) for name in data["env"])
    return job_of(data, locate, path.resolve().parent, overrides)


def job_of(data: dict[str, Any], locate_in_file: Locator, folder: Path, overrides: Sequence[str] = ()) -> JobFile:
    """Returns the job of plain data, whose paths are relative to `folder`, with `key=value` overrides on top.

    Raises InvalidConfig with every problem and its place.
    """
    options = [_override(data, item) for item in overrides]

    def locate(keys: Keys) -> Place:
        for option in options:
            if keys[: len(option)] == option:
                return Place(file=f"--set {'.'.join(map(str, option))}")
        return locate_in_file(keys)

    job = _absolute(from_data(Job, data, locate=locate, synonyms=synonyms, removed=JOB), folder, locate)
    _require_patterns(job, locate)
    return JobFile(job=_with_shape(job, data, locate), locate=locate)


def _with_shape(job: Job, data: Mapping[str, Any], locate: Locator) -> Job:
    """Returns the job with the shape of the adapter that it continues from, if that is here.

    Raises InvalidConfig if its `lora` has another one.
    """
    if job.adapter is None:
        return job
    if job.method is Method.FULL:
        raise InvalidConfig(f"{locate(('adapter',))}: adapter is given, but method is full", hint="method: lora")
    if not Path(job.adapter).is_dir():
        return job
    with located(locate(("adapter",))):
        shape = shape_of_adapter(Path(job.adapter), job.lora, given=data.get("lora") or {})
    return replace(job, lora=replace(job.lora, **shape))


def _require_patterns(job: Job, locate: Locator) -> None:
    """Raises InvalidConfig for a pattern of parameters that is no regular expression."""
    for key, patterns in (("freeze", job.freeze), ("train_only", job.train_only)):
        for index, pattern in enumerate(patterns):
            try:
                re.compile(pattern)
            except re.error as error:
                problem = f'{locate((key, index))}: "{pattern}" is no regular expression: {error}'
                hint = "Write a backslash before a character that stands for itself."
                raise InvalidConfig(problem, hint=hint) from None


def _override(data: dict[str, Any], item: str) -> Keys:
    """Writes one `key=value` into `data`; returns the keys that lead to it."""
    key, separator, value = item.partition("=")
    keys = tuple(key.strip().split("."))
    if not separator or not all(keys):
        raise InvalidConfig(f'--set "{item}" is not key=value', hint="Write --set learning_rate=1e-5.")
    node = data
    for part in keys[:-1]:
        inner = node.setdefault(part, {})
        if not isinstance(inner, dict):
            raise InvalidConfig(f'--set "{item}": {part} has no keys of its own')
        node = inner
    is_text = len(keys) == 2 and keys[0] in TEXTS and not value.startswith(('"', "'"))
    node[keys[-1]] = value if is_text else parse_yaml(value, f"--set {key}")[0]
    return keys


def _given(job: Job, local: Callable[[str, str], str]) -> dict[str, Any]:
    """Returns the paths that a job may lack, if it has them."""
    return {key: local(key, name) for key in ("adapter", "hostfile") if (name := getattr(job, key)) is not None}


def _absolute(job: Job, folder: Path, locate: Locator) -> Job:
    """Returns the job with local paths absolute; names of missing files stay, as they may be ids on the hub.

    Raises InvalidConfig with every illegal path.
    """
    problems = []

    def local(key: str, name: str) -> str:
        path, problem = _resolved(folder, name)
        if problem is not None:
            problems.append(f"{locate((key,))}: {key} is {_shortened(name)}; {problem}")
        return str(path)

    def maybe(key: str, name: str) -> str:
        path = local(key, name)
        return path if looks_local(name) or _exists(Path(path)) else name

    def template(text: str) -> str:
        # a template itself, not the name of a file
        if "{" in text or "\n" in text:
            return text
        try:
            return Path(local("chat_template", text)).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
            problems.append(f"{locate(('chat_template',))}: chat_template {_shortened(text)}: {str(reason).lower()}")
            return text

    absolute = replace(
        job,
        model=maybe("model", job.model),
        data=with_paths(job.data, partial(maybe, "data")),
        eval_data=with_paths(job.eval_data, partial(maybe, "eval_data")),
        ds_config=local("ds_config", job.ds_config),
        chat_template=None if job.chat_template is None else template(job.chat_template),
        **_given(job, local),
        output_dir=local("output_dir", job.output_dir),
        resume=job.resume if job.resume in ("never", "auto") else local("resume", job.resume),
    )
    if problems:
        raise InvalidConfig("\n".join(problems))
    return absolute


def _resolved(folder: Path, name: str) -> tuple[Path, str | None]:
    """Returns a path from a job as an absolute one, and a problem if it is illegal; it need not exist.

    `~unknown-user` and loops of links raise a RuntimeError, a NUL a ValueError.
    """
    try:
        path = (folder / Path(name).expanduser()).resolve()
        _exists(path)
    except OSError as error:
        return folder, str(error.strerror).lower()
    except (RuntimeError, ValueError) as error:
        return folder, f"{str(error)[:1].lower()}{str(error)[1:80]}"
    return path, None


def _exists(path: Path) -> bool:
    """Returns whether a path exists. Raises OSError if that cannot be determined, as below a folder without access."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def _shortened(name: str) -> str:
    """Returns a name in quotes, without the middle of a long one."""
    return f'"{name}"' if len(name) <= 80 else f'"{name[:40]}…{name[-20:]}" ({len(name)} characters)'


def is_local(name: str) -> bool:
    """Returns whether a model or data set is a path, as seen from the current folder, not an id on a hub."""
    return looks_local(name) or Path(name).exists()


def looks_local(name: str) -> bool:
    """Returns whether a name can only be a path, not an id on a hub.

    >>> looks_local("./model"), looks_local("train.jsonl"), looks_local("Qwen/Qwen3-32B")
    (True, True, False)
    """
    is_path = name.startswith((".", "/", "~")) or name.endswith((".jsonl", ".json", ".parquet", ".arrow"))
    return is_path or name.count("/") > 1 or any(letter in name for letter in "*?[")
