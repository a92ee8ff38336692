"""DeepSpeed's extensions: what is needed, what is built, and locks of killed builds."""

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from dstrain.facts.deepspeed_ops import (
    extension_folder,
    held_locks,
    missing_ops,
    needed_ops,
    torch_folder,
    unheld_locks,
)


@pytest.mark.parametrize(
    ("config", "needed"),
    [
        ({"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}, ["cpu_adam"]),
        ({"zero_optimization": {"offload_param": {"device": "nvme"}}}, ["async_io"]),
        ({"optimizer": {"type": "Muon"}}, ["fused_adam"]),  # it steps what is no matrix
        # an odd shape needs nothing
        ({"zero_optimization": 3}, []),
        ({"zero_optimization": {"offload_optimizer": "cpu", "offload_param": [1]}}, []),
        ({"optimizer": "AdamW"}, []),
        ({"optimizer": {"type": None}}, []),
    ],
)
def test_a_configuration_needs_its_extensions(config: dict[str, Any], needed: list[str]) -> None:
    assert needed_ops(config, on_gpu=True) == needed


def build(folder: Path, torch: Path | None = None) -> Path:
    """Writes what a build leaves, against a PyTorch (None: the installed one)."""
    folder.mkdir(parents=True)
    include = (torch or torch_folder() or Path()) / "include"
    (folder / "build.ninja").write_text(f"cflags = -isystem {include}\n")
    extension = folder / f"{folder.name}.so"
    extension.touch()
    return extension


def test_an_extension_is_missing_until_its_build_has_ended(tmp_path: Path) -> None:
    extension = build(tmp_path / "cpu_adam")
    assert missing_ops(["cpu_adam", "async_io"], {"TORCH_EXTENSIONS_DIR": str(tmp_path)}) == ["async_io"]
    extension.unlink()
    assert missing_ops(["cpu_adam"], {"TORCH_EXTENSIONS_DIR": str(tmp_path)}) == ["cpu_adam"]


def test_an_extension_of_another_environment_is_missing(tmp_path: Path) -> None:
    cache = tmp_path / "torch_extensions"
    environment = {"XDG_CACHE_HOME": str(tmp_path)}
    own = extension_folder(environment)
    assert own.parent == cache
    build(cache / "py39_cu118" / "cpu_adam")
    assert missing_ops(["cpu_adam"], environment) == ["cpu_adam"]
    build(own / "cpu_adam")
    assert missing_ops(["cpu_adam"], environment) == []


def test_an_extension_that_was_built_against_another_pytorch_is_missing(tmp_path: Path) -> None:
    build(tmp_path / "cpu_adam", torch=Path("/opt/other/torch"))
    assert missing_ops(["cpu_adam"], {"TORCH_EXTENSIONS_DIR": str(tmp_path)}) == ["cpu_adam"]


@pytest.mark.parametrize("newer", ["cpu_adam/build.ninja", None])
def test_an_extension_older_than_its_rules_or_than_pytorch_is_missing(tmp_path: Path, newer: str | None) -> None:
    extension = build(tmp_path / "cpu_adam")
    folder = torch_folder()
    assert folder is not None
    at = (tmp_path / newer if newer else folder / "version.py").stat().st_mtime
    os.utime(extension, (at - 10, at - 10))
    assert missing_ops(["cpu_adam"], {"TORCH_EXTENSIONS_DIR": str(tmp_path)}) == ["cpu_adam"]


@pytest.mark.commands
def test_the_folder_is_the_one_that_pytorch_itself_takes(tmp_path: Path) -> None:
    code = "from torch.utils.cpp_extension import _get_build_directory as f; print(f('cpu_adam', False))"
    names = {name: value for name, value in os.environ.items() if name != "TORCH_EXTENSIONS_DIR"}
    environment = {**names, "HOME": str(tmp_path)}
    environment.pop("XDG_CACHE_HOME", None)
    said = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert said.stdout.strip() == str(extension_folder(environment) / "cpu_adam")


def test_a_lock_is_named_only_where_no_process_is_seen_to_hold_it(tmp_path: Path) -> None:
    lock = tmp_path / "cpu_adam" / "lock"
    lock.parent.mkdir()
    environment = {"TORCH_EXTENSIONS_DIR": str(tmp_path)}
    with lock.open("w"):
        assert unheld_locks(["cpu_adam"], environment) == []
        assert held_locks([os.getpid()]) == {lock}
    (found,) = unheld_locks(["cpu_adam"], environment)
    assert (found.path, found.is_stale, found.is_abandoned) == (str(lock), False, False)


def test_a_lock_is_stale_once_nothing_was_written_beside_it_for_minutes(tmp_path: Path) -> None:
    lock, part = tmp_path / "cpu_adam" / "lock", tmp_path / "cpu_adam" / "cpu_adam.o"
    lock.parent.mkdir()
    long_ago = time.time() - 1000
    for path in (lock, part):
        path.touch()
        os.utime(path, (long_ago, long_ago))
    environment = {"TORCH_EXTENSIONS_DIR": str(tmp_path)}
    assert [found.is_stale for found in unheld_locks(["cpu_adam"], environment)] == [True]
    part.touch()  # somebody elsewhere builds
    assert [found.is_stale for found in unheld_locks(["cpu_adam"], environment)] == [False]


def test_an_old_lock_of_an_extension_that_is_built_is_needed_by_nobody(tmp_path: Path) -> None:
    extension = build(tmp_path / "cpu_adam")
    lock = extension.with_name("lock")
    lock.touch()
    folder = torch_folder()
    assert folder is not None
    at = max(folder.joinpath("version.py").stat().st_mtime, time.time() - 1000)
    for path in extension.parent.iterdir():
        os.utime(path, (at, at))
    (found,) = unheld_locks(["cpu_adam"], {"TORCH_EXTENSIONS_DIR": str(tmp_path)})
    assert (found.is_abandoned, found.is_stale) == (True, False)
