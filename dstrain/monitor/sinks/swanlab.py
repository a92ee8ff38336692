"""The SwanLab sink; the only importer of swanlab, inside functions."""

from __future__ import annotations

import json
import os
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dstrain.choices import SwanLabMode
from dstrain.errors import not_installed, type_and_line
from dstrain.monitor.sinks.sink import upload_command
from dstrain.paths import write_atomic

if TYPE_CHECKING:
    from dstrain.monitor.sinks.sink import Setup, Table

RUN_RECORD = ".dstrain-run.json"
"""File in the run directory with the run's id, so that a resumed run continues its curves, and with the folders of its
offline parts."""
NOTIFY = "SWANLAB_NOTIFY_"
"""Beginning of the variables: `SWANLAB_NOTIFY_LARK_WEBHOOK_URL` is the argument `webhook_url` of `LarkCallback`."""
_LONGEST_NOTICE_S = 10.0
"""Seconds that a run waits at its end until notices are sent."""
_ENDS = {"aborted": "it was stopped before its last step"}


class SwanlabSink:
    """One SwanLab run."""

    def __init__(
        self,
        swanlab: Any,
        *,
        mode: SwanLabMode,
        folder: Path,
        run_id: str,
        to_upload: Sequence[str],
        plugins: Sequence[Any] = (),
    ) -> None:
        """`swanlab` is the module with an active run; `to_upload` are the folders of all offline parts; `plugins` send
        notices."""
        self._swanlab = swanlab
        self._plugins = plugins
        self._mode = mode
        self._folder = folder
        self._id = run_id
        self._to_upload = to_upload

    @property
    def place(self) -> str:
        """Where to find the curves."""
        where = f"{self._mode} in {self._folder}"
        if self._mode is SwanLabMode.ONLINE:
            where = getattr(self._swanlab.get_run(), "url", None) or "online"
        return f"SwanLab: {where}{f'; to upload: {upload_command(self._to_upload)}' if self._to_upload else ''}"

    @property
    def facts(self) -> Mapping[str, Any]:
        """Mode, folder, id, and the folders to upload."""
        return {
            "swanlab_mode": str(self._mode),
            "swanlab_dir": str(self._folder),
            "swanlab_id": self._id,
            "swanlab_to_upload": list(self._to_upload),
        }

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Adds one point to each curve."""
        self._swanlab.log(dict(values), step=int(step))

    def show(self, table: Table) -> None:
        """Adds a text, and a table and a picture where what SwanLab needs for them is installed."""
        self._swanlab.log({f"{table.name}/text": self._swanlab.Text(table.text)}, step=table.step)
        with suppress(ImportError):
            chart = self._swanlab.echarts.Table()
            chart.add(list(table.columns), [list(row) for row in table.rows])
            self._swanlab.log({f"{table.name}/figures": chart}, step=table.step)
        if table.cells:
            with suppress(ImportError):
                self._swanlab.log({f"{table.name}/picture": self._swanlab.Image(table.pixels())}, step=table.step)

    def finish(self, end: str, error: str | None) -> None:
        """Closes the run: SwanLab flushes its file only then."""
        if self._swanlab.has_run():
            try:
                # without an error, plug-ins would call a run that was stopped a success
                self._swanlab.finish(state=end, error=error or _ENDS.get(end))
            except ValueError:
                # finally it restores a signal handler, which only the main thread may do
                if threading.current_thread() is threading.main_thread():
                    raise
            _wait_for(self._plugins)


def open_sink(setup: Setup, say: Callable[[str], None]) -> SwanlabSink | None:
    """Returns a SwanLab run in the mode of `setup`, else in `offline`, else None.

    The mode is always passed, so SwanLab never prompts. Each failure is one line.
    """
    if setup.mode is SwanLabMode.DISABLED:
        return None
    os.environ["SWANLAB_INTERACTIVE"] = "false"
    try:
        import swanlab  # type: ignore[import-untyped]
    except ImportError:
        raise not_installed("monitor: sinks has", "swanlab", install="pip install 'swanlab>=0.10,<0.11'") from None
    run_id = _run_id(setup)
    folder = setup.run_dir / "swanlog"
    plugins = _plugins(os.environ, say)
    for mode in dict.fromkeys((setup.mode, SwanLabMode.OFFLINE)):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            _init(swanlab, setup, mode, folder, run_id, plugins)
            made = sorted(folder.glob(f"run-*{run_id}*"))  # named by time; one per part of a resumed run
            part = made[-1] if made else folder
            to_upload = _note_part(setup, part.name if mode is SwanLabMode.OFFLINE else None)
            return SwanlabSink(swanlab, mode=mode, folder=part, run_id=run_id, to_upload=to_upload, plugins=plugins)
        except Exception as error:
            rest = (
                "continuing offline"
                if mode is not SwanLabMode.OFFLINE
                else "training continues without it, see metrics.jsonl"
            )
            say(f"SwanLab: {mode} failed to start ({type_and_line(error)}); {rest}")
    return None


def _init(swanlab: Any, setup: Setup, mode: SwanLabMode, folder: Path, run_id: str, plugins: Sequence[Any]) -> None:
    if swanlab.has_run():
        swanlab.finish()
    swanlab.init(
        mode=str(mode),
        project=setup.project,
        name=setup.name,
        description=setup.description,
        tags=list(setup.tags),
        log_dir=str(folder),
        config=dict(setup.config),
        id=run_id,
        resume="allow",
        parallel="none",
        callbacks=list(plugins),
    )
    for plugin in plugins:
        # SwanLab 0.10 makes a link of a path without a workspace, as an offline run has it, and fails without a word
        if str(plugin._path).startswith("/"):
            plugin._path = None


def _run_id(setup: Setup) -> str:
    """Returns the id of the earlier part of a resumed run, else a new one, which is recorded."""
    known = _record(setup).get("swanlab_id") if setup.is_resumed else None
    if isinstance(known, str) and known:
        return known
    run_id = uuid.uuid4().hex[:21]
    write_atomic(setup.run_dir / RUN_RECORD, json.dumps({"swanlab_id": run_id}) + "\n")
    return run_id


def _note_part(setup: Setup, name: str | None) -> list[str]:
    """Records an offline part; returns the existing folders of all parts."""
    record = _record(setup)
    names = [*record.get("offline", []), *([name] if name else [])]
    write_atomic(setup.run_dir / RUN_RECORD, json.dumps({**record, "offline": names}) + "\n")
    folders = [setup.run_dir / "swanlog" / name for name in names]
    return [str(folder) for folder in folders if folder.is_dir()]


def _record(setup: Setup) -> dict[str, Any]:
    """Returns the record of this run's parts; an empty one if it is missing or damaged."""
    try:
        record = json.loads((setup.run_dir / RUN_RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}


def _plugins(environment: Mapping[str, str], say: Callable[[str], None]) -> list[Any]:
    """Returns the plug-ins whose arguments are in the environment; one that lacks or misspells any is named."""
    given: dict[str, dict[str, str]] = {}
    for name, value in environment.items():
        if name.startswith(NOTIFY) and value.strip():
            service, _, argument = name.removeprefix(NOTIFY).partition("_")
            given.setdefault(service, {})[argument.lower()] = value.strip()
    if not given:
        return []
    from swanlab.plugin import notification  # type: ignore[import-untyped]

    kinds = {name.removesuffix("Callback").upper(): getattr(notification, name) for name in notification.__all__}
    del kinds["NOTIFICATION"]  # the base class
    made = []
    for service, arguments in given.items():
        if service not in kinds:
            known = ", ".join(map(str.lower, kinds))
            say(f"notices: SwanLab has no {service.lower()}, but {known}; none is sent there")
            continue
        try:
            made.append(_plugin(kinds[service], arguments))
        except (TypeError, ValueError) as error:
            problem = str(error).splitlines()[0] if isinstance(error, TypeError) else "a value has the wrong type"
            say(f"notices: {NOTIFY}{service}_…: {problem}; none is sent there")
    return made


def _plugin(kind: Callable[..., Any], arguments: Mapping[str, str]) -> Any:
    """Returns a plug-in; raises TypeError for arguments that are missing or unknown, and ValueError for values."""
    parameters = signature(kind).parameters
    signature(kind).bind(**arguments)
    from pydantic import TypeAdapter  # only notices need it, and every rank imports this module early

    typed = {name: TypeAdapter(parameters[name].annotation).validate_python(value) for name, value in arguments.items()}
    return kind(**typed)


def _wait_for(plugins: Sequence[Any]) -> None:
    """Waits until the plug-ins have sent their notices: a rank ends without joining their thread."""
    with suppress(TimeoutError):
        for plugin in plugins[:1]:  # they share a pool of one thread, so that what is submitted now runs last
            plugin._executor.submit(lambda: None).result(_LONGEST_NOTICE_S)
