"""`.dstrain/lock.json`: the last generated files and their inputs, from which hand edits are detected."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dstrain.config.jsonc import Pointer
from dstrain.config.schema import schema_files
from dstrain.errors import Conflict, InvalidConfig
from dstrain.facts.cluster.cluster import Cluster
from dstrain.facts.workload import RowContents
from dstrain.paths import write_together
from dstrain.records import load_json, to_json, type_config

LOCK = Path(".dstrain") / "lock.json"
"""The path of the lock, relative to the generated files."""
GENERATED = ("ds_config.json", "job.yaml", "hostfile")
"""The files that are generated, and may be adopted."""
SCHEMA = 2
"""Version of the lock's record; 2 adds adopted files and the previous values of open conflicts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unsettled:
    """A reported, undecided conflict; the file has your value."""

    __pydantic_config__ = type_config

    pointer: Pointer
    base: tuple[Any, ...] = ()
    """The value before you and dstrain changed it; empty if there was none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lock:
    """The record of generated or adopted files. Owned by dstrain; commit it with the files."""

    __pydantic_config__ = type_config

    schema: int = SCHEMA
    """Version of this record."""
    dstrain: str
    """Version of dstrain that generated the files."""
    deepspeed: str
    """Version of DeepSpeed installed at that time, or `none`."""
    template: str | None = None
    """DeepSpeed template; None for adopted files."""
    template_sha256: str | None = None
    """SHA-256 of the template's text; None for adopted files."""
    inputs: Mapping[str, Any] = field(default_factory=dict)
    """The given options of gen-config; paths are relative to the generated files."""
    tuned: tuple[str, ...] = ()
    """Those that `dstrain tune` chose: the next one may choose others."""
    cluster: Cluster | None = None
    """The machines, as detected or assumed at that time; None for adopted files."""
    contents: RowContents | None = None
    """Contents of the data's rows at that time; None if the data were not read."""
    base: Mapping[str, str]
    """File name → the exact generated text, from which hand edits are detected."""
    unsettled: Mapping[str, tuple[Unsettled, ...]] = field(default_factory=dict)
    """File name → open conflicts."""
    adopted: tuple[str, ...] = ()
    """Files whose text in `base` dstrain did not write: the first generation asks before each change."""


def read_lock(folder: Path) -> Lock | None:
    """Returns the lock of a folder, or None if dstrain has generated nothing there."""
    path = folder / LOCK
    if not path.exists():
        return None
    try:
        lock = load_json(Lock, path, upgrade=_upgraded)
        others = sorted({*lock.base, *lock.unsettled, *lock.adopted} - {*GENERATED})
        if others:
            raise InvalidConfig(f'{path}: "{others[0]}" is not a file that dstrain generates')
        return lock
    except InvalidConfig as error:
        place = "" if folder == Path() else f" -o {folder}"
        hint = f"Restore it from version control, or: mv {path} {path}.old && dstrain gen-config{place} --adopt"
        raise InvalidConfig(error.problem, hint=error.hint or hint) from None


def planned_cluster(folder: Path) -> Cluster | None:
    """Returns the cluster that the files of a folder were generated for; None if unknown."""
    lock = read_lock(folder)
    return lock.cluster if lock is not None else None


def planned_contents(folder: Path) -> RowContents | None:
    """Returns the contents of the data's rows when the files of a folder were generated; None if unknown."""
    lock = read_lock(folder)
    return lock.contents if lock is not None else None


def _upgraded(data: Any) -> Any:
    """Returns the data of a lock, converted from schema 1, whose open conflicts are bare keys."""
    if not (isinstance(data, dict) and data.get("schema") == 1 and isinstance(data.get("unsettled", {}), dict)):
        return data
    unsettled = {name: [{"pointer": pointer} for pointer in keys] for name, keys in data.get("unsettled", {}).items()}
    return {**data, "schema": SCHEMA, "unsettled": unsettled}


def standing(folder: Path, names: Iterable[str]) -> dict[str, str]:
    """Returns the texts of the existing files, with their line ends and BOM.

    Raises InvalidConfig with file:line:column if a text is not UTF-8, Conflict if a path is not a file.
    """
    texts = {}
    for name in names:
        path = folder / name
        if not path.exists():
            continue
        if not path.is_file():
            raise Conflict(f"{path} is not a file; nothing was changed", hint=f"mv {path} {path}.mine")
        raw = path.read_bytes()
        try:
            texts[name] = raw.decode()
        except UnicodeDecodeError as error:
            before = raw[: error.start].decode(errors="replace")
            line, column = before.count("\n") + 1, len(before) - (before.rfind("\n") + 1) + 1
            raise InvalidConfig(f"{path}:{line}:{column}: is not UTF-8", hint="Save the file as UTF-8.") from None
    return texts


def differing(paths: Iterable[Path], *, otherwise: str) -> Conflict:
    """Returns the error of existing files with other texts than those to write; `otherwise` is what else to type."""
    names = ", ".join(map(str, paths))
    hint = f"--force replaces it and keeps yours as .bak; {otherwise}."
    return Conflict(f"{names}: exists already and differs; nothing was written", hint=hint)


def _beside_unused(folder: Path, beside: Mapping[str, str], *, ours: Mapping[str, str] | None = None) -> dict[str, str]:
    """Returns the additional files under names that overwrite none of yours: `.bak`, then `.bak2`, `.bak3` …

    A name is free if no file has it, or if the file already has the text or, byte for byte, the text that dstrain wrote
    before (`ours`, by file name).
    """
    named = {}
    for name, text in beside.items():
        free, number = name, 2
        while not _is_one_of(folder / free, (text, (ours or {}).get(name))):
            free, number = f"{name}{number}", number + 1
        named[free] = text
    return named


def backups(texts: Mapping[Path, str]) -> dict[Path, str]:
    """Returns the copies to keep of files that are replaced, given with their texts: `.bak`, then `.bak2` …"""
    return {
        path.parent / name: text
        for path, present in texts.items()
        for name, text in _beside_unused(path.parent, {f"{path.name}.bak": present}).items()
    }


def _is_one_of(path: Path, texts: Iterable[str | None]) -> bool:
    """Returns whether `path` does not exist or is a file with one of the texts."""
    if not os.path.lexists(path):
        return True
    return path.is_file() and path.read_bytes() in [text.encode() for text in texts if text is not None]


def new_files(folder: Path, base: Mapping[str, str]) -> list[Path]:
    """Returns the files `NAME.new`, `NAME.new2` … that still have the text that dstrain wrote (`base`, by NAME)."""
    paths = [path for name in base for path in folder.glob(f"{name}.new*")]
    return sorted(path for path in paths if path.is_file() and path.read_bytes() == base.get(path.stem, "").encode())


def write_files(
    folder: Path, lock: Lock, files: Mapping[str, str], beside: Mapping[str, str], *, before: Lock | None = None
) -> list[str]:
    """Writes the additional files (`.new` and `.bak`), the files, the schemas for editors and the lock, all or none:
    copies of your files first, the lock last. Returns the names of the changed files.

    A `.new` file from `before` is updated while its conflict is open and then deleted; one of yours is kept. Copies
    have the mode of their file, and the lock the mode of the job, so that nobody can read more than before.
    """
    ours = before.base if before else {}
    earlier = new_files(folder, ours)
    open_ = {f"{path.stem}.new": lock.base[path.stem] for path in earlier if path.stem in lock.unsettled}
    named = _beside_unused(folder, {**beside, **open_}, ours={f"{name}.new": text for name, text in ours.items()})
    copies = {folder / name: folder / Path(name).stem for name in named} | {folder / LOCK: folder / "job.yaml"}
    schemas = {folder / name: text for name, text in schema_files().items()}
    texts = {**{folder / name: text for name, text in files.items()}, **schemas, folder / LOCK: to_json(lock)}
    changed = write_together(texts, backups={folder / name: text for name, text in named.items()}, like=copies)
    for path in earlier:
        if path.name not in named:
            path.unlink()
    return [name for name in (*files, *named) if folder / name in changed]
