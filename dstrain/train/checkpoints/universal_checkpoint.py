"""Converts a checkpoint to the form that any number of ranks can load.

Run as `python -m dstrain.train.checkpoints.universal_checkpoint CHECKPOINT`.

It uses DeepSpeed's own converter, omits weights that are not loaded from such a copy, and works around errors of
DeepSpeed's loader: `_trim` before loading, `mend` after it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from zipfile import is_zipfile

import psutil
import torch

from dstrain.errors import DstrainError, EnvironmentProblem, InvalidConfig
from dstrain.facts.ds_config import ZERO, section
from dstrain.heartbeat import NO_VERIFY
from dstrain.paths import flush, write_atomic
from dstrain.rundir import UNIVERSAL, UNIVERSAL_PART, UNIVERSAL_SUMS, file_sizes
from dstrain.train.checkpoints.checkpoints import checksum, is_converted, refuse_altered, refuse_damaged
from dstrain.train.checkpoints.tensor_files import load_only_tensors, naming_pickles
from dstrain.train.rank import quieten

_WORKERS = 4
"""Largest number of processes that read shards. Source: deepspeed 0.19.8 ds_to_universal.py: parse_arguments"""
_UNREAD = ("module", "frozen_param_fragments")
"""Weights in files of model states. In a universal copy, trained ones are in other files; frozen ones come from the
base model. Source: deepspeed 0.19.8 runtime/engine.py: _load_checkpoint"""


def convert(checkpoint: Path) -> Path:
    """Creates the universal copy of a checkpoint next to its shards, and returns its folder.

    An existing copy is kept. A copy takes 12 bytes of disk per trained parameter (fp32 weights and two moments), and
    twice as much during conversion. Raises InvalidConfig for an incomplete checkpoint or one without shards, and
    EnvironmentProblem if a file cannot be read or written.
    """
    refuse_damaged(checkpoint)
    if NO_VERIFY not in os.environ:
        refuse_altered(checkpoint)
    latest = checkpoint / "latest"
    tag = latest.read_text(encoding="utf-8").strip() if latest.is_file() else ""
    copy = checkpoint / f"{tag}_universal"
    if is_converted(checkpoint):
        return copy
    if not tag or not any((checkpoint / tag).glob("*_optim_states.pt")):
        raise InvalidConfig(f"{checkpoint} holds no ZeRO shards")
    part = checkpoint / UNIVERSAL_PART
    try:
        # of a conversion that was killed
        for old in (part, copy):
            shutil.rmtree(old, ignore_errors=True)
        _lighten(checkpoint / tag, part / "shards")
        _convert(part, copy.name)
        _trim(part / copy.name / "zero" / "optimizer_state.pt")
        (part / copy.name).rename(copy)
        flush(copy)
        sums = {f"{copy.name}/{name}": checksum(copy / name) for name in file_sizes(copy)}
        write_atomic(checkpoint / UNIVERSAL_SUMS, json.dumps(sums) + "\n")
        # last: the name is the mark that the copy is whole
        write_atomic(checkpoint / UNIVERSAL, copy.name)
    except OSError as error:
        raise EnvironmentProblem(
            f"{checkpoint} cannot be converted: {error}",
            hint="Check that the disk is writable and not full, and that no shard is missing.",
        ) from error
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return copy


def _lighten(shards: Path, to: Path) -> None:
    """Creates a folder with the shards, but without the weights in files of model states.

    These files are then equal on all ranks, so all are links to the first one. Otherwise every rank would copy and
    read the weights, and the converter would write frozen ones in fp32.
    """
    to.mkdir(parents=True)
    for file in shards.glob("*_optim_states.pt"):
        (to / file.name).symlink_to(file.resolve())
    first, *others = sorted(shards.glob("*_model_states.pt"))
    states = _load(first)
    _refuse_round_robin(shards, states.get("ds_config"))
    for name in _UNREAD:
        if name in states:
            states[name] = {}
    torch.save(states, to / first.name)
    for file in others:
        (to / file.name).symlink_to(first.name)


def _load(path: Path) -> dict[str, Any]:
    """Returns the content of a DeepSpeed file; tensors are memory-mapped if the format allows."""
    content: dict[str, Any] = torch.load(path, map_location="cpu", mmap=is_zipfile(path))  # PyTorch's default: no code
    return content


def _refuse_round_robin(shards: Path, config: Any) -> None:
    """Raises InvalidConfig for shards with round-robin gradients, whose positions DeepSpeed records wrongly.

    Source: deepspeed 0.19.8 runtime/zero/stage_1_and_2.py: _link_all_hp_params
    """
    if isinstance(config, Mapping) and section(config, ZERO).get("round_robin_gradients"):
        raise InvalidConfig(
            f"{shards} was written with zero_optimization.round_robin_gradients: its weights would be mixed up"
        )


def _convert(folder: Path, name: str) -> None:
    """Runs DeepSpeed's converter in the folder, since it treats "+" and "[" in paths as patterns."""
    from deepspeed.checkpoint import ds_to_universal  # type: ignore[import-untyped]

    workers = _workers(folder / "shards")
    with contextlib.chdir(folder):
        ds_to_universal.main(
            argparse.Namespace(
                input_folder="shards",
                output_folder=name,
                num_extract_workers=workers,
                num_merge_workers=min(workers, 2),
                keep_temp_folder=False,
                strict=True,
                inject_missing_state=True,
            )
        )


def _workers(shards: Path) -> int:
    """Returns the number of processes that fit into free memory: each holds the shard of one rank twice."""
    largest = max(file.stat().st_size for file in shards.glob("*_optim_states.pt"))
    fit = psutil.virtual_memory().available // (2 * largest)
    return max(1, min(_WORKERS, os.cpu_count() or 1, fit))


def _trim(path: Path) -> None:
    """Reduces the common optimizer state to values shared by all ranks and all parameter groups.

    For ZeRO-3 the converter stores rank 0's whole shard there, and every rank would read it. Every group would also get
    the first group's hyper-parameters, including weight decay; differing ones now stay as in the job.
    Source: deepspeed 0.19.8 runtime/zero/stage3.py: load_hp_checkpoint_state_from_checkpoint_dir_stage3
    """
    saved = _load(path)
    inner = saved.get("optimizer_state_dict")
    if inner is None:  # ZeRO-1 and 2
        return
    first, *others = inner["param_groups"]
    common = {key: value for key, value in first.items() if all(group.get(key) == value for group in others)}
    states = {index: {"step": state["step"]} for index, state in inner["state"].items() if "step" in state}
    light = {key: value for key, value in saved.items() if key not in ("optimizer_state_dict", "fp32_flat_groups")}
    light |= {"optimizer_state_dict": {"state": states, "param_groups": [common]}, "param_groups": [common]}
    torch.save(light, path.with_suffix(".light"))
    path.with_suffix(".light").replace(path)


def mend(optimizer: Any) -> None:
    """Gives every optimizer state loaded from a universal copy its own step counter, of the right type.

    With ZeRO-3, DeepSpeed shares one tensor among all groups, and each of them would increment it. DeepSpeed's
    optimizers count with numbers, PyTorch's with tensors, which a fused one keeps on the device of the weights.
    """
    counts_with_tensors = isinstance(optimizer, torch.optim.Adam)
    is_beside = any(group.get("fused") or group.get("capturable") for group in optimizer.param_groups)
    for weights, state in optimizer.state.items():
        step = float(state["step"])
        if counts_with_tensors:
            state["step"] = torch.tensor(step, dtype=torch.float32, device=weights.device if is_beside else "cpu")
        else:
            state["step"] = int(step)


def main(arguments: Sequence[str]) -> int:
    """Returns the exit code of the program."""
    parser = argparse.ArgumentParser(
        prog="python -m dstrain.train.checkpoints.universal_checkpoint", description=(__doc__ or "").split(":")[0]
    )
    parser.add_argument("checkpoint", type=Path, metavar="CHECKPOINT")
    given = parser.parse_args(arguments)
    quieten(on_terminal=sys.stderr.isatty())
    try:
        load_only_tensors()
        with naming_pickles(given.checkpoint):
            copy = convert(given.checkpoint)
    except DstrainError as error:
        print(f"Error: {error}", file=sys.stderr)
        return error.exit_code
    print(f"wrote {copy}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
