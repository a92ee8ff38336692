"""DeepSpeed's modules, and sections of a configuration that note what the engine reads of them."""

from __future__ import annotations

import importlib
import os
import warnings
from typing import Any


class Engine:
    """The modules of DeepSpeed, with two underlines for a dot: `engine.runtime__config`."""

    def __getattr__(self, name: str) -> Any:
        return importlib.import_module("deepspeed." + name.replace("__", "."))


def import_engine() -> Engine:
    """Imports DeepSpeed for the CPU accelerator; it warns then of what is not ours."""
    before = os.environ.get("DS_ACCELERATOR")
    os.environ["DS_ACCELERATOR"] = "cpu"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for module in ("runtime.engine", "module_inject.auto_ep_config", "runtime.zero.muon.original_muon"):
            importlib.import_module("deepspeed." + module)
    if before is None:
        del os.environ["DS_ACCELERATOR"]
    return Engine()


class Spy(dict[str, Any]):
    """A section that notes which names it was asked for, and the default named with each."""

    def __init__(self, asked: dict[str, Any], path: str, *args: Any) -> None:
        super().__init__(*args)
        self.asked, self.path = asked, path

    def _note(self, name: str, default: Any = None) -> None:
        path = f"{self.path}.{name}".lstrip(".")
        self.asked[path] = default if self.asked.get(path) is None else self.asked[path]

    def get(self, name: str, default: Any = None) -> Any:
        self._note(name, default)
        return super().get(name, default)

    def __getitem__(self, name: str) -> Any:
        self._note(name)
        return super().__getitem__(name)

    def __contains__(self, name: object) -> bool:
        self._note(str(name))
        return super().__contains__(name)

    def keys(self) -> Any:
        return self

    def __copy__(self) -> Spy:
        return Spy(self.asked, self.path, self)
