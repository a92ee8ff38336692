"""`.dstrain/lock.json`: what dstrain last generated, from which inputs, so that hand edits are known and never lost."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from dstrain.errors import Conflict, InvalidConfig
from dstrain.facts.cluster import Cluster
from dstrain.paths import write_together
from dstrain.records import load_json, to_json, type_config
from dstrain.render.jsonc import Pointer
from dstrain.render.schema import schema_files

LOCK = Path(".dstrain") / "lock.json"
"""Where the lock stands, below the folder of the generated files."""
GENERATED = ("ds_config.json", "job.yaml", "hostfile")
"""The files that are generated, and may be adopted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lock:
    """What was generated, or adopted. Machine-owned; commit it beside the files."""

    __pydantic_config__ = type_config

    schema: int = 1
    """Version of this record."""
    dstrain: str
    """Version of dstrain that generated the files."""
    deepspeed: str
    """Version of DeepSpeed installed then, or `none`."""
    template: str | None = None
    """DeepSpeed template; None for files that were adopted."""
    template_sha256: str | None = None
    """SHA-256 of the template's text; None for files that were adopted."""
    inputs: Mapping[str, Any] = field(default_factory=dict)
    """The options of gen-config that were typed; paths are relative to the generated files."""
    cluster: Cluster | None = None
    """The machines as they were found or assumed then; None for files that were adopted."""
    base: Mapping[str, str]
    """File name to the exact text that was generated: what hand edits are told from."""
    unsettled: Mapping[str, tuple[Pointer, ...]] = field(default_factory=dict)
    """File name to the keys of conflicts that were shown and not decided; your values stand there."""


def read_lock(folder: Path) -> Lock | None:
    """Returns the lock of a folder, or None where dstrain has generated nothing."""
    path = folder / LOCK
    if not path.exists():
        return None
    try:
        return load_json(Lock, path)
    except InvalidConfig as error:
        hint = f"Take it from version control, or move it away (mv {path} {path}.old) and type dstrain adopt {folder}."
        raise InvalidConfig(error.problem, hint=hint) from None


def standing(folder: Path, names: Iterable[str]) -> dict[str, str]:
    """Returns the texts of those files that are there, line ends and BOM as they are.

    Raises InvalidConfig with file:line:column for one that is not UTF-8, Conflict for what is no file.
    """
    found = {}
    for name in names:
        path = folder / name
        if not path.exists():
            continue
        if not path.is_file():
            raise Conflict(f"{path}: is not a file; nothing was changed", hint=f"mv {path} {path}.mine")
        raw = path.read_bytes()
        try:
            found[name] = raw.decode()
        except UnicodeDecodeError as error:
            before = raw[: error.start].decode(errors="replace")
            line, column = before.count("\n") + 1, len(before) - (before.rfind("\n") + 1) + 1
            raise InvalidConfig(f"{path}:{line}:{column}: is not UTF-8", hint="Save the file as UTF-8.") from None
    return found


def beside_unused(folder: Path, beside: Mapping[str, str]) -> dict[str, str]:
    """Returns the texts beside the files under names that take no earlier copy: `.bak`, then `.bak2`, `.bak3` …; a
    `.new` file is what the last generation would have written, and is replaced."""
    found = {}
    for name, text in beside.items():
        free, number = name, 2
        while name.endswith(".bak") and (folder / free).exists() and (folder / free).read_bytes() != text.encode():
            free, number = f"{name}{number}", number + 1
        found[free] = text
    return found


def write_files(folder: Path, lock: Lock, files: Mapping[str, str], beside: Mapping[str, str]) -> list[str]:
    """Writes the files, what stands `beside` them (`.new` and `.bak`), the lock and the schemas for editors, all or
    none; returns the names of the files that changed.

    Whoever may not read a file may not read copies of its text either: they have its mode, the lock that of the job.
    """
    copies = {folder / name: folder / Path(name).stem for name in beside} | {folder / LOCK: folder / "job.yaml"}
    texts = {folder / name: text for name, text in {**files, **beside}.items()}
    schemas = {folder / name: text for name, text in schema_files().items()}
    changed = write_together({**texts, **schemas, folder / LOCK: to_json(lock)}, like=copies)
    return [name for name in (*files, *beside) if folder / name in changed]


def installed(package: str) -> str:
    """Returns the version of an installed package, or `none`."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "none"
