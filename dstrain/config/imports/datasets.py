"""Data as other tools name them → the data of a job."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dstrain.config import jsonc
from dstrain.config.imports.converters import listed, names
from dstrain.config.imports.rows import Converted, OtherTraining, Unmatched
from dstrain.config.imports.source import Source
from dstrain.errors import InvalidConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSet:
    """One data set of another tool."""

    name: str
    """A file, or an id on a hub."""
    form: str = "auto"
    """`data_format` of a job."""
    losses: tuple[str, ...] = ()
    """What of it a job does not express, and what to do."""


def job_values(sets: Sequence[DataSet], source: Source, *, target: str = "data") -> Converted:
    """Returns the data of a job, which has one data set; of several none is chosen, and the note says how to join
    them. Data that cannot be named are left for the user to name, before any launch."""
    losses = "; ".join(dict.fromkeys(loss for one in sets for loss in one.losses))
    if len(sets) == 1:
        form = {"data_format": sets[0].form} if sets[0].form != "auto" and target == "data" else {}
        return Converted(values={target: sets[0].name, **form}, note=losses)
    together = f"{target} has one data set; put {', '.join(one.name for one in sets)} into one .jsonl file, and name it"
    raise Unmatched(f"{together}{f'; {losses}' if losses else ''}")


_INFO = "dataset_info.json"
_COLUMNS = {"prompt": "instruction", "query": "input", "response": "output", "history": "history", "system": "system"}
"""Columns of LLaMA-Factory's alpaca format → ours."""
_TURNS = ("messages", "conversations")


def llamafactory(value: Any, source: Source) -> Converted:
    """Returns the data of LLaMA-Factory, whose names are keys of dataset_info.json."""
    wanted = names(value, source)
    folder = str(source.value("dataset_dir", "data"))
    if folder == "ONLINE":
        return job_values([DataSet(name=name) for name in wanted], source)
    if folder.startswith("REMOTE:"):
        raise Unmatched(
            f"the data set {folder[7:]} on the hub has their {_INFO}; download it, and name the file as data"
        )
    try:
        path = source.find(f"{folder}/{_INFO}", "dataset")
    except InvalidConfig:
        named = ", ".join(wanted)
        raise Unmatched(
            f"{named}: the file of this name is in {folder}/{_INFO}, which is not here; name it as data"
        ) from None
    table = jsonc.read(path.read_text(encoding="utf-8"), str(path)).value
    for name in wanted:
        if name not in table:
            raise InvalidConfig(f'"{name}" is not in {path}', place=source.place("dataset"))
    return job_values([_of_info(table[name], path.parent, source) for name in wanted], source)


def _of_info(entry: Mapping[str, Any], folder: Path, source: Source) -> DataSet:
    """Returns one entry of dataset_info.json. Source: LLaMA-Factory 0.9 data/parser.py: DatasetAttr."""
    if entry.get("ranking") or "kto_tag" in entry.get("columns", {}):
        raise OtherTraining("the data set has pairs of answers, which preference training needs")
    is_modelscope = source.value("USE_MODELSCOPE_HUB") == "1" or "hf_hub_url" not in entry
    hub = entry.get("ms_hub_url" if is_modelscope and "ms_hub_url" in entry else "hf_hub_url")
    file = entry.get("file_name") or entry.get("script_url") or entry.get("cloud_file_name") or ""
    losses = [
        f"`{key}: {entry[key]}` of {_INFO}: choose these rows yourself"
        for key in ("subset", "split", "num_samples", "folder")
        if key in entry
    ]
    columns, is_alpaca = dict(entry.get("columns", {})), entry.get("formatting", "alpaca") == "alpaca"
    if source.value("stage") == "pt":
        renamed, form = ({} if columns.get("prompt") in (None, "text") else {columns["prompt"]: "text"}), "text"
    elif is_alpaca:
        renamed = {
            theirs: _COLUMNS[key] for key, theirs in columns.items() if key in _COLUMNS and theirs != _COLUMNS[key]
        }
        form = "alpaca"
    else:
        turns = columns.get("messages", "conversations")
        renamed, form = ({} if turns in _TURNS else {turns: "messages"}), "messages"
    losses += [f"rename the column `{theirs}` to `{ours}`" for theirs, ours in renamed.items()]
    seen = [columns[key] for key in ("images", "videos", "audios", "tools") if key in columns]
    if seen:
        losses.append(f"dstrain refuses rows with {', '.join(seen)}")
    return DataSet(name=str(hub) if hub else str(folder / file), form=form, losses=tuple(losses))


_SWIFT = re.compile(r"(?:(?P<hub>HF|MS)::)?(?P<name>[^#:]+|[^#]*\.jsonl?)(?::(?P<subset>[^#]+))?(?:#(?P<rows>\d+))?")


def swift(target: str) -> Any:
    """Returns the converter of ms-swift's data: `hub::id:subset#rows`. Source: its 4.4 documentation."""

    def convert(value: Any, source: Source) -> Converted:
        return job_values([_of_swift(str(item), source) for item in listed(value)], source, target=target)

    return convert


def _of_swift(text: str, source: Source) -> DataSet:
    match = _SWIFT.fullmatch(text)
    if match is None:
        return DataSet(name=text)
    losses = []
    if match["rows"]:
        losses.append(f"`#{match['rows']}` takes {match['rows']} rows of {match['name']}; choose these yourself")
    if match["subset"]:
        losses.append(f"the subset `{match['subset']}` of {match['name']}: save it as a file of its own")
    return DataSet(name=_local(match["name"], source), losses=tuple(losses))


def _local(name: str, source: Source) -> str:
    """Returns a local file as it is found from here, and every other name as it is."""
    if not name.endswith((".jsonl", ".json", ".parquet", ".csv", ".txt")):
        return name
    try:
        return str(source.find(name, "dataset"))
    except InvalidConfig:
        return name


_AXOLOTL_FORMS = {
    "alpaca": "alpaca",
    "chat_template": "messages",
    "completion": "text",
    "pretrain": "text",
    "sharegpt": "messages",
}
_AXOLOTL_FIELDS = (
    "name",
    "split",
    "data_files",
    "shards",
    "roles_to_train",
    "train_on_eos",
    "train_on_eot",
    "drop_system_message",
)


def axolotl(target: str) -> Any:
    """Returns the converter of axolotl's list of data sets. Source: axolotl 0.16 schemas/datasets.py: SFTDataset."""

    def convert(value: Any, source: Source) -> Converted:
        entries = [item for item in listed(value) if isinstance(item, Mapping)]
        if not entries:
            raise InvalidConfig("is not a list of `- path: …`")
        return job_values([_of_axolotl(item, source) for item in entries], source, target=target)

    return convert


def _of_axolotl(entry: Mapping[str, Any], source: Source) -> DataSet:
    kind = entry.get("type")
    form = _AXOLOTL_FORMS.get(str(kind).partition(":")[0]) if not isinstance(kind, Mapping) else None
    losses = []
    if form is None and kind is not None:
        shown = "a template of its own" if isinstance(kind, Mapping) else f"`{kind}`"
        losses.append(f"type is {shown}: write the rows as instruction and output, or as messages")
    if entry.get("field_messages") not in (None, "messages", "conversations"):
        losses.append(f"rename the column `{entry['field_messages']}` to `messages`")
    if entry.get("field") not in (None, "text"):
        losses.append(f"rename the column `{entry['field']}` to `text`")
    mapping = entry.get("message_property_mappings")
    if isinstance(mapping, Mapping) and dict(mapping) not in (
        {"role": "role", "content": "content"},
        {"role": "from", "content": "value"},
    ):
        losses.append(f"name the keys of each turn `role` and `content`, not {', '.join(map(str, mapping.values()))}")
    losses += [
        f"`{key}: {entry[key]}`: choose these rows or tokens yourself"
        for key in _AXOLOTL_FIELDS
        if entry.get(key) not in (None, "train", ["assistant"])
    ]
    return DataSet(name=_local(str(entry.get("path", "")), source), form=form or "auto", losses=tuple(losses))
