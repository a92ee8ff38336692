"""Data as other tools name them → the data of a job."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dstrain.config import jsonc
from dstrain.config.imports.converters import is_dpo, listed, names
from dstrain.config.imports.source import ABSENT, READ, Convert, Converted, OtherTraining, Source, Unmatched
from dstrain.errors import InvalidConfig
from dstrain.facts.data.formats import SIDES


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSet:
    """One data set of another tool."""

    settings: Mapping[str, Any]
    """The keys of `DataSource`; a key without value is None."""
    losses: tuple[str, ...] = ()
    """The parts that a job does not express, and the advice."""
    limits: Mapping[str, Any] = field(default_factory=dict)
    """Keys of the job that the tool sets for such data if its file does not."""


def job_values(sets: Sequence[DataSet], *, target: str) -> Converted:
    """Returns the data of a job: the name of one data set without further settings, else a list."""
    losses = "; ".join(dict.fromkeys(loss for one in sets for loss in one.losses))
    sources = [{key: value for key, value in one.settings.items() if value} for one in sets]
    forms = {source.get("format") for source in sources}
    values: dict[str, Any] = {}
    if len(forms) == 1 and target == "data" and (form := forms.pop()) is not None:
        values["data_format"] = form
        sources = [{key: value for key, value in source.items() if key != "format"} for source in sources]
    for one in sets:
        values |= one.limits
    is_plain = len(sources) == 1 and sources[0].keys() == {"path"}
    return Converted(values={target: sources[0]["path"] if is_plain else sources, **values}, note=losses)


_INFO = "dataset_info.json"
_COLUMNS = {"prompt": "instruction", "query": "input", "response": "output", "history": "history", "system": "system"}
"""Columns of LLaMA-Factory's alpaca format → ours."""
_TURNS = ("messages", "conversations")
_LIMITS: Mapping[str, Mapping[str, tuple[str, Any]]] = {
    "images": {"image_max_pixels": ("max_pixels", 768 * 768), "image_min_pixels": ("min_pixels", 32 * 32)},
    "videos": {
        "video_max_pixels": ("video_max_pixels", 256 * 256),
        "video_fps": ("video_fps", 2.0),
        "video_maxlen": ("video_maxlen", 128),
    },
}
"""Column → its keys that limit its content, each with the job's key and its default. Source: LLaMA-Factory 0.9
hparams/model_args.py: ProcessorArguments."""


def llamafactory(target: str) -> Convert:
    """Returns the converter of LLaMA-Factory's data, whose names are keys of dataset_info.json."""

    def convert(value: Any, source: Source) -> Converted:
        return job_values(_named(names(value, source), source), target=target)

    return convert


def media_dir(value: Any, source: Source) -> Any:
    """Writes nothing for LLaMA-Factory's folder of images if the data are in it too. Raises Unmatched for another."""
    sets = _named(names(source.value("dataset"), source), source)
    if {Path(str(one.settings["path"])).resolve().parent for one in sets} != {Path(str(value)).expanduser().resolve()}:
        raise Unmatched("paths of images are relative to the data file")
    return READ


def _named(wanted: Sequence[str], source: Source) -> list[DataSet]:
    folder = str(source.value("dataset_dir", "data"))
    if folder == "ONLINE":
        return [DataSet(settings={"path": name}) for name in wanted]
    if folder.startswith("REMOTE:"):
        raise Unmatched(f"{folder[7:]} on the hub has their {_INFO}; download it, and name the files as data")
    try:
        path = source.find(f"{folder}/{_INFO}")
    except InvalidConfig:
        named = ", ".join(wanted)
        raise Unmatched(f"{named}: {folder}/{_INFO}, which has the files, is not here; name them as data") from None
    table = jsonc.read(path.read_text(encoding="utf-8"), str(path)).value
    for name in wanted:
        if name not in table:
            raise InvalidConfig(f'"{name}" is not in {path}')
    return [_of_info(table[name], path.parent, source) for name in wanted]


def _of_info(entry: Mapping[str, Any], folder: Path, source: Source) -> DataSet:
    """Returns one entry of dataset_info.json. Source: LLaMA-Factory 0.9 data/parser.py: DatasetAttr."""
    if entry.get("columns", {}).get("kto_tag") is not None:
        raise OtherTraining("answers with a label (kto_tag) are for KTO, by which TRL's KTOTrainer trains")
    if "audios" in entry.get("columns", {}):
        raise OtherTraining("rows with audios: dstrain trains on text, images and videos")
    if bool(entry.get("ranking")) is not is_dpo(source):
        raise OtherTraining("pairs of answers (ranking: true) and stage: dpo go together")
    is_modelscope = source.value("USE_MODELSCOPE_HUB") == "1" or "hf_hub_url" not in entry
    hub = entry.get("ms_hub_url" if is_modelscope and "ms_hub_url" in entry else "hf_hub_url")
    file = entry.get("file_name") or entry.get("script_url") or entry.get("cloud_file_name") or ""
    columns, is_alpaca = dict(entry.get("columns", {})), entry.get("formatting", "alpaca") == "alpaca"
    if source.value("stage") == "pt":
        renamed, form = {"text": columns.get("prompt", "text")}, "text"
    elif is_alpaca:
        renamed, form = {ours: columns.get(theirs, ours) for theirs, ours in _COLUMNS.items()}, "alpaca"
    else:
        turns = columns.get("messages", "conversations")
        renamed, form = {} if turns in _TURNS else {"messages": turns}, "messages"
    if entry.get("ranking"):
        # pairs have two answers in the place of one
        renamed.pop("output", None)
        renamed, form = renamed | {side: columns.get(side, side) for side in SIDES}, "preference"
    renamed |= {key: columns[key] for key in ("images", "videos") if key in columns}
    settings = {
        "path": str(hub) if hub else str(folder / file),
        "format": form,
        "split": entry.get("split"),
        "subset": entry.get("subset"),
        "max_samples": entry.get("num_samples"),
        "columns": {ours: theirs for ours, theirs in renamed.items() if ours != theirs},
    }
    keys = [item for column in _LIMITS.keys() & columns.keys() for item in _LIMITS[column].items()]
    absent = {ours: default for theirs, (ours, default) in keys if source.given(theirs) is ABSENT}
    return DataSet(settings=settings, limits=absent)


def rows(value: Any, source: Source) -> Any:
    """Returns a file of rows, or the files of a folder. Raises Unmatched for one that is not here."""
    found = [_local_rows(str(name), source) for name in listed(value)]
    return found[0] if len(found) == 1 else [{"path": path} for path in found]


def _local_rows(name: str, source: Source) -> str:
    try:
        path = source.find(name)
    except InvalidConfig:
        raise Unmatched(f"`{name}` is not here; name the rows with --data") from None
    if not path.is_dir():
        return str(path)
    for form in ("jsonl", "json", "parquet", "txt"):
        if any(path.glob(f"**/*.{form}")):
            return f"{path}/**/*.{form}"
    raise Unmatched(f"`{name}` has no .jsonl, .json, .parquet or .txt; name the rows with --data")


def mixer(value: Any, source: Source) -> Any:
    """Returns the data of open-instruct: names, each with a number of rows or a share of them."""
    if isinstance(value, Mapping):
        pairs = list(value.items())
    else:
        names_ = listed(value)
        pairs = list(zip(names_[::2], names_[1::2], strict=False))
    splits = [str(name) for name in listed(source.value("dataset_splits") or [])]
    split = next((name for name in splits if name.startswith("train")), None)
    return job_values(
        [_share(_local(str(name), source), {"split": split}, amount) for name, amount in pairs], target="data"
    )


def on_hub(value: Any, source: Source) -> Any:
    """Returns a data set by its name, with the configuration and the split that other keys give."""
    subset = source.value("dataset_config") or source.value("dataset_config_name")
    split = source.value("dataset_train_split") or source.value("dataset_train_name") or source.value("dataset_split")
    settings = {"path": str(value), "subset": subset, "split": None if split == "train" else split}
    return job_values([DataSet(settings=settings)], target="data")


def mixture(value: Any, _: Source) -> Any:
    """Returns the data of a recipe of the alignment-handbook. Source: src/alignment/data.py: get_dataset."""
    if not isinstance(value, Mapping) or not isinstance(value.get("datasets"), list):
        raise InvalidConfig("is not a mapping with a list `datasets`")
    sets = [
        _share(str(item.get("id")), {"subset": item.get("config"), "split": item.get("split", "train")}, weight)
        for item in value["datasets"]
        for weight in [None if item.get("weight") is None else float(item["weight"])]
    ]
    made = job_values(sets, target="data")
    held_out = value.get("test_split_size")
    return replace(made, values={**made.values, "val_split": held_out}) if held_out else made


def _share(path: str, settings: Mapping[str, Any], amount: Any) -> DataSet:
    """Returns a data set of which a number of rows is taken, or a share (a number with a point)."""
    settings = {"path": path, **settings}
    if isinstance(amount, int) and not isinstance(amount, bool):
        return DataSet(settings={**settings, "max_samples": amount})
    if amount in (None, 1.0):
        return DataSet(settings=settings)
    percent = round(float(amount) * 100)
    if not 0 < percent < 100 or path.endswith((".jsonl", ".json", ".parquet")):
        raise OtherTraining(f"{amount} of the rows of {path}: name the rows themselves as `data`")
    split = f"{settings.get('split') or 'train'}[:{percent}%]"
    return DataSet(settings={**settings, "split": split}, losses=(f"of {path} the first {percent} % of the rows",))


_SWIFT = re.compile(r"(?:(?P<hub>HF|MS)::)?(?P<name>[^#:]+|[^#]*\.jsonl?)(?::(?P<subset>[^#]+))?(?:#(?P<rows>\d+))?")


def swift(target: str) -> Convert:
    """Returns the converter of ms-swift's data: `hub::id:subset#rows`. Source: its 4.4 documentation."""

    def convert(value: Any, source: Source) -> Converted:
        return job_values([_of_swift(str(item), source) for item in listed(value)], target=target)

    return convert


def _of_swift(text: str, source: Source) -> DataSet:
    match = _SWIFT.fullmatch(text)
    if match is None:
        return DataSet(settings={"path": text})
    rows = int(match["rows"]) if match["rows"] else None
    return DataSet(settings={"path": _local(match["name"], source), "subset": match["subset"], "max_samples": rows})


def _local(name: str, source: Source) -> str:
    """Returns a local file as it is found from here, and every other name as it is."""
    if not name.endswith((".jsonl", ".json", ".parquet", ".arrow", ".csv", ".txt")):
        return name
    try:
        return str(source.find(name))
    except InvalidConfig:
        return name


_AXOLOTL_FORMS = {
    "alpaca": "alpaca",
    "chat_template": "messages",
    "completion": "text",
    "pretrain": "text",
    "sharegpt": "messages",
}
_AXOLOTL_FIELDS = ("data_files", "shards", "roles_to_train", "train_on_eos", "train_on_eot", "drop_system_message")
_TURN_KEYS = ({"role": "role", "content": "content"}, {"role": "from", "content": "value"})


def axolotl(target: str) -> Convert:
    """Returns the converter of axolotl's list of data sets. Source: axolotl 0.16 schemas/datasets.py: SFTDataset."""

    def convert(value: Any, source: Source) -> Converted:
        entries = [item for item in listed(value) if isinstance(item, Mapping)]
        if not entries:
            raise InvalidConfig("is not a list of `- path: …`")
        return job_values([_of_axolotl(item, source) for item in entries], target=target)

    return convert


def _of_axolotl(entry: Mapping[str, Any], source: Source) -> DataSet:
    kind = entry.get("type")
    form = _AXOLOTL_FORMS.get(str(kind).partition(":")[0]) if not isinstance(kind, Mapping) else None
    if is_dpo(source):
        return _of_axolotl_preferences(entry, source)
    losses = []
    if form is None and kind is not None:
        shown = "a template of its own" if isinstance(kind, Mapping) else f"`{kind}`"
        losses.append(f"type is {shown}: write the rows as instruction and output, or as messages")
    turns, text = entry.get("field_messages"), entry.get("field")
    columns = (
        {"messages": turns} if turns not in (None, *_TURNS) else {"text": text} if text not in (None, "text") else {}
    )
    mapping = entry.get("message_property_mappings")
    if isinstance(mapping, Mapping) and dict(mapping) not in _TURN_KEYS:
        losses.append(f"name the keys of each turn `role` and `content`, not {', '.join(map(str, mapping.values()))}")
    losses += [
        f"`{key}: {entry[key]}`: choose these rows or tokens yourself"
        # axolotl and dstrain learn the turns of the assistant by default
        for key in _AXOLOTL_FIELDS
        if entry.get(key) not in (None, ["assistant"])
    ]
    settings = {
        "path": _local(str(entry.get("path", "")), source),
        "format": form,
        "subset": entry.get("name"),
        "split": entry.get("split"),
        "columns": columns,
    }
    return DataSet(settings=settings, losses=tuple(losses))


_AXOLOTL_PREFERENCES: Mapping[str, Mapping[str, str]] = {
    "argilla": {"chosen": "chosen_response", "rejected": "rejected_response"},
    "argilla_chat": {},
    "chat_template": {},
    "icr": {"prompt": "input"},
    "intel": {},
    "prompt_pairs": {},
    "ultra": {},
}
"""Schemas of axolotl's preferences, the last part of a type such as `chatml.intel` → columns known by other
names. Source: axolotl 0.16 prompt_strategies/dpo, chatml.py and llama3.py."""


def _of_axolotl_preferences(entry: Mapping[str, Any], source: Source) -> DataSet:
    """Returns a data set of pairs. Source: axolotl 0.16 schemas/datasets.py: DPODataset."""
    kind = entry.get("type")
    template, _, last = str(kind).partition(".")
    schema = "chat_template" if template == "chat_template" else last
    losses = []
    if kind is not None and (isinstance(kind, Mapping) or schema not in _AXOLOTL_PREFERENCES):
        shown = "a template of its own" if isinstance(kind, Mapping) else f"`{kind}`"
        losses.append(f"type is {shown}: name the columns of prompt and answers in `columns`")
    elif template in ("chatml", "llama3", "zephyr", "gemma"):
        losses.append(f"the model's own chat template is used, not {template}")
    named = {"messages": "field_messages", "chosen": "field_chosen", "rejected": "field_rejected"}
    columns = dict(_AXOLOTL_PREFERENCES.get(schema, {}))
    columns |= {ours: str(entry[theirs]) for ours, theirs in named.items() if entry.get(theirs) not in (None, ours)}
    settings = {
        "path": _local(str(entry.get("path", "")), source),
        "format": "preference",
        "subset": entry.get("name"),
        "split": entry.get("split"),
        "columns": columns,
    }
    return DataSet(settings=settings, losses=tuple(losses))
