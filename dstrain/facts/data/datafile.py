"""Finds and checks data files, and reads their rows as samples.

Refuses samples that teach wrong things: text that no tokenizer takes, and answers that were cut while written. Faults
that only a tokenizer sees, such as control tokens in a text, are counted when samples become tokens.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dstrain.choices import DataFormat, Task
from dstrain.errors import InvalidConfig, located
from dstrain.facts.data import media
from dstrain.facts.data.columns import KINDS, unused_text
from dstrain.facts.data.formats import Pair, Reading, require, to_pair, to_sample, unused
from dstrain.facts.data.rows import SUFFIXES, Part, Sample, entries
from dstrain.facts.data.turns import Conversation, Message
from dstrain.job import limits
from dstrain.job.data_source import DataSource
from dstrain.job.schema import Job

_SURROGATE = re.compile(r"[\ud800-\udfff]")
_NUL = "\\u0000"
_REASONS = ("finish_reason", "finishReason", "stop_reason", "done_reason")
"""Columns, or keys of a turn, with the end of a generation. Source: OpenAI, Gemini, Anthropic, Ollama."""
_CUT = frozenset({"length", "max_tokens", "max_output_tokens", "content_filter", "safety", "error"})
_FLAGS = ("truncated", "is_truncated")
_THOUGHT = re.compile(r"\s*(?:<(?P<tag>[\w:|]*(?:think|thought|reason)[\w:|]*)>|\[(?P<mark>THINK)\])", re.IGNORECASE)
"""The beginning of a thought: `<think>`, `<thinking>`, `<seed:think>`, `<reasoning>`, `[THINK]`."""
_CALL = re.compile(r"^\s*<(tool_calls?|function_calls?)>(?!.*</\1>)", re.DOTALL | re.MULTILINE)
_SKIP = "Remove the row, or set on_bad_row: skip to leave such rows out."


def require_sound(sample: Conversation | str | Pair, row: Mapping[str, Any]) -> None:
    """Raises InvalidConfig, without a place, for a sample that cannot be learned from; `row` holds it.

    Answers without loss and rejected ones may be cut: only their text must be whole.
    """
    if isinstance(sample, Pair):
        with located("chosen"):
            require_sound(sample.chosen, {})
        with located("rejected"):
            _require_texts(sample.rejected)
        return
    if isinstance(sample, str):
        _require_text(sample, lambda: iter([("text", sample)]))
        return
    _require_texts(sample)
    if len(sample.unlearned) < sum(message["role"] == "assistant" for message in sample.messages):
        _require_whole_by_name(row)
    for index, message in enumerate(sample.messages):
        if message["role"] == "assistant" and index not in sample.unlearned:
            _require_whole_message(message, f"turn {index + 1}, of the assistant: ")


def _require_texts(sample: Conversation) -> None:
    """Raises InvalidConfig for characters in a conversation that are none."""
    _require_text([sample.messages, sample.tools], lambda: _strings(sample))


def _require_text(values: Any, strings: Callable[[], Iterator[tuple[str, str]]]) -> None:
    """Raises InvalidConfig for characters that are none; `strings` finds them if there are any."""
    text = json.dumps(values, ensure_ascii=False, default=str)
    try:
        text.encode()
    except UnicodeEncodeError:
        for place, string in strings():
            if found := _SURROGATE.search(string):
                half = f"half a character (\\u{ord(found[0]):04x}) at {found.start() + 1}"
                raise InvalidConfig(
                    f"{place}: has {half}, which no tokenizer takes: the text was cut within an emoji or the like",
                    hint=_SKIP,
                ) from None
    if _NUL in text:
        for place, string in strings():
            if "\0" in string:
                raise InvalidConfig(
                    f"{place}: has a NUL character (\\u0000) at {string.index(chr(0)) + 1}, which is no text",
                    hint=_SKIP,
                )


def _strings(sample: Conversation) -> Iterator[tuple[str, str]]:
    """Yields the place and the text of everything in a conversation that a template may write."""
    for number, message in enumerate(sample.messages, start=1):
        for key, value in message.items():
            yield from ((f"turn {number}, {key}", text) for text in _within(value))
    yield from (("tools", text) for text in _within(sample.tools))


def _within(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield str(key)
            yield from _within(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _within(item)


def _require_whole_by_name(row: Mapping[str, Any]) -> None:
    """Raises InvalidConfig if a row or its last turn says that the answer was cut."""
    last = [value[-1] for value in row.values() if isinstance(value, list) and value and isinstance(value[-1], Mapping)]
    for holder in (row, *last):
        for name in _REASONS:
            if str(holder.get(name)).lower() in _CUT:
                raise InvalidConfig(
                    f'"{name}" is "{holder[name]}": the answer was cut while it was written', hint=_SKIP
                )
        for name in _FLAGS:
            if holder.get(name) is True:
                raise InvalidConfig(f'"{name}" is true: the answer was cut while it was written', hint=_SKIP)


def _require_whole_message(message: Message, place: str) -> None:
    """Raises InvalidConfig for an answer that ends within its thoughts or within a call."""
    content, calls = message["content"], message.get("tool_calls")
    if opened := _THOUGHT.match(content):
        closing = f"</{opened['tag']}>" if opened["tag"] else "[/THINK]"
        before, closed, after = content.partition(closing)
        if not closed:
            problem = f"begins thoughts with {opened[0].strip()} and ends without {closing}"
            raise InvalidConfig(f"{place}{problem}: it was cut while it was written", hint=_SKIP)
        thoughts, answer = before[opened.end() :], after
    else:
        thoughts, answer = message.get("reasoning_content", ""), content
    if thoughts.strip() and not answer.strip() and not calls:
        raise InvalidConfig(f"{place}has thoughts but no answer: it was cut while it was written", hint=_SKIP)
    if not calls and (call := _CALL.search(content)):
        raise InvalidConfig(f"{place}ends within a <{call[1]}>: it was cut while it was written", hint=_SKIP)


Refuse = Callable[[InvalidConfig], None]
"""Called with the error of an unusable row: raises it, or returns to skip the row."""

_SHOWN_PROBLEMS = 5
_GLOB = frozenset("*?[")


@dataclass(frozen=True, slots=True, kw_only=True)
class DataReport:
    """The contents of a valid data file."""

    format: DataFormat
    """Never `auto`."""
    columns: tuple[str, ...]
    """Column names, in order of appearance."""
    rows_checked: int
    """Number of rows that were parsed as conversations."""
    complete: bool
    """Whether these are all rows."""
    unused: Mapping[str, int]
    """Unused column, such as `source`, or `messages.name` in turns → number of checked rows with it."""
    media: tuple[str, ...]
    """Columns of images and videos that one of the checked rows has."""

    @property
    def note(self) -> str | None:
        """A line about unused columns, or None."""
        if not self.unused:
            return None
        scope = "" if self.complete else f", of the first {self.rows_checked:,}"
        return unused_text(self.unused) + scope


def is_file_name(data: str) -> bool:
    """Returns whether `data` of a job is a file rather than the id of a data set on a hub.

    >>> is_file_name("data/train.jsonl"), is_file_name("tatsu-lab/alpaca")
    (True, False)
    """
    is_path = data.startswith((".", "/", "~")) or data.lower().endswith(SUFFIXES)
    return is_path or not _GLOB.isdisjoint(data) or Path(data).exists()


def files_of(data: str) -> list[Path]:
    """Returns the data files that a path or a glob names, sorted by name; a path need not exist.

    Raises InvalidConfig if no file matches a glob.
    """
    path = Path(data).expanduser()
    if _GLOB.isdisjoint(data) or path.exists():
        return [path]
    pattern = str(path.relative_to(path.anchor))
    files = sorted(file for file in Path(path.anchor).glob(pattern) if file.is_file())
    if not files:
        raise InvalidConfig(f"{data}: no file matches", hint="A pattern such as data/*.jsonl names files.")
    return files


def found(data: str) -> list[str]:
    """Returns the names of the files that a glob matches, or the name itself if it is no glob or none does."""
    if _GLOB.isdisjoint(data):
        return [data]
    try:
        return [str(path) for path in files_of(data)]
    except InvalidConfig:
        return [data]


def check(
    path: str | Path,
    reading: Reading,
    *,
    limit_bytes: int | None = None,
    skip: bool = False,
    opens_images: bool = False,
) -> DataReport:
    """Returns the contents of a data file, after parsing the rows in its first `limit_bytes` as conversations.

    Images and videos must exist, and with `opens_images` must be whole. Raises InvalidConfig with up to five
    problems, one per line, each with file and line, or with one that all have; with `skip` only if no row is usable.
    """
    source, seen = Path(path), _Seen()
    problems: list[InvalidConfig] = []
    useful = False
    for entry in entries(source, limit_bytes):
        try:
            if isinstance(entry, InvalidConfig):
                raise entry
            reading = reading_of(str(path), list(entry.row), reading) if seen.num_rows == 0 else reading
            seen.add(entry, reading, opens_images=opens_images)
        except InvalidConfig as error:
            is_again = not skip and any(error.problem == other.problem for other in problems)
            problems.append(error)
            is_of_file = not skip and seen.num_rows == 0 and error is not entry  # its columns, which each row has
            is_enough = len(problems) == _SHOWN_PROBLEMS and not (skip and useful)
            if is_enough or is_of_file or is_again or reading.format is DataFormat.AUTO:
                break
        else:
            useful = True
    if problems and not (skip and useful):
        raise _problems(source, problems)
    if seen.num_rows == 0:
        raise InvalidConfig(f"{source}: no samples")
    complete = limit_bytes is None or source.stat().st_size <= limit_bytes
    if complete:
        _require_columns(source, reading, list(seen.columns))
    return seen.report(reading.format, complete=complete)


@dataclass
class _Seen:
    """Columns, unused columns and media of the rows of a file that were read so far."""

    num_rows: int = 0
    columns: dict[str, None] = field(default_factory=dict)
    unused: Counter[str] = field(default_factory=Counter)
    media: set[str] = field(default_factory=set)

    def add(self, row: Sample, reading: Reading, *, opens_images: bool) -> None:
        """Adds a row. Raises InvalidConfig if it is unusable, or with `opens_images` if one of its files is."""
        self.num_rows += 1
        self.columns.update(dict.fromkeys(row.row))
        sample = parsed(row, reading)
        self.unused.update(unused(row.row, reading))
        prompt = sample.chosen if isinstance(sample, Pair) else sample
        if isinstance(prompt, Conversation) and prompt.has_media:
            self.media.update(prompt.media)
            if opens_images:
                _require_whole_sample(prompt, row.where)

    def report(self, data_format: DataFormat, *, complete: bool) -> DataReport:
        """Returns it as the contents of a file."""
        return DataReport(
            format=data_format,
            columns=tuple(self.columns),
            rows_checked=self.num_rows,
            complete=complete,
            unused=dict(self.unused),
            media=tuple(kind.columns[0] for kind in KINDS if kind.columns[0] in self.media),
        )


def _require_whole_sample(sample: Conversation, where: str) -> None:
    with located(where):
        for path in sample.images:
            media.opened(path)
        for video in sample.videos:
            media.require_whole(video)


def _problems(source: Path, errors: list[InvalidConfig]) -> InvalidConfig:
    """Returns one error for the problems of several rows."""
    problems, hints = list(dict.fromkeys(error.problem for error in errors)), [error.hint for error in errors]
    more = [f"{source}: stopped after {_SHOWN_PROBLEMS} problems"] if len(problems) == _SHOWN_PROBLEMS else []
    return InvalidConfig("\n".join(problems + more), hint="\n".join(dict.fromkeys(filter(None, hints))) or None)


def _require_columns(source: Path, reading: Reading, columns: list[str]) -> None:
    """Raises InvalidConfig if the job names a column that no row has."""
    absent = [f'{name} is "{column}"' for name, column in reading.columns.items() if column not in columns]
    if absent:
        raise InvalidConfig(f"{source}: columns: {', '.join(absent)}, which no row has; they have {', '.join(columns)}")


def stop(error: InvalidConfig) -> None:
    """Raises the error of a row."""
    raise error


def samples(path: str | Path, refuse: Refuse = stop, part: Part | None = None) -> Iterator[Sample]:
    """Yields every row of a data file or of a part of it, in order; errors of unreadable rows go to `refuse`.

    Raises InvalidConfig if a whole file has no samples.
    """
    empty = part is None
    for entry in entries(Path(path), None, part):
        if isinstance(entry, InvalidConfig):
            refuse(entry)
            continue
        empty = False
        yield entry
    if empty:
        raise InvalidConfig(f"{path}: no samples")


def parsed(sample: Sample, reading: Reading) -> Conversation | str | Pair:
    """Returns the conversation, text or pair of a row. Raises InvalidConfig with file and line if it is no sample to
    learn from, for missing images and videos too."""
    with located(sample.where):
        found = _parsed(sample, reading)
        require_sound(found, sample.row)
        return found


def _parsed(sample: Sample, reading: Reading) -> Conversation | str | Pair:
    if reading.format is DataFormat.PREFERENCE:
        pair = to_pair(sample.row, reading)
        chosen, rejected = (_located(side, sample.folder) for side in pair.sides)
        return Pair(chosen=chosen, rejected=rejected) if pair.has_media else pair
    found = to_sample(sample.row, reading)
    return found if isinstance(found, str) else _located(found, sample.folder)


def _located(found: Conversation, folder: Path | None) -> Conversation:
    """Returns a conversation with the places of its media. Raises InvalidConfig if one is missing."""
    if not found.has_media:
        return found
    return replace(
        found,
        images=media.located(found.images, folder, "image"),
        videos=tuple(media.located(files, folder, "frame" if len(files) > 1 else "video") for files in found.videos),
    )


def reading_of(name: str, columns: list[str], reading: Reading) -> Reading:
    """Returns the reading with its format, detected if it is `auto`. Raises InvalidConfig with the file's name."""
    with located(name):
        return require(columns, reading)


FORMATS = {Task.PRETRAIN: DataFormat.TEXT, Task.DPO: DataFormat.PREFERENCE}
"""The format of tasks that have only one."""


def reading_for(source: DataSource, job: Job) -> Reading:
    """Returns how rows of a data set of a job become samples. Raises InvalidConfig for a format not of the task."""
    data_format = source.format or job.data_format
    limits.require_format(job.task, data_format)
    if data_format is DataFormat.AUTO:
        data_format = FORMATS.get(job.task, data_format)
    columns = {str(name): column for name, column in (source.columns or {}).items()}
    return Reading(format=data_format, columns=columns, system=job.system)
