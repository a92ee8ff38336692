"""Checks RAM and disks against the job's estimate."""

from __future__ import annotations

from dstrain.doctor.facts import Facts, Folder, Space
from dstrain.doctor.finding import Finding, Notes
from dstrain.doctor.requirements import Needs
from dstrain.units import GIB, counted, format_bytes

LEAST_FREE = 10 * GIB
"""Free space below which a run directory is likely to fill up."""


def check(facts: Facts, needs: Needs) -> list[Finding]:
    """Returns findings about RAM and disks; none without a job."""
    space, notes = facts.space, Notes("space")
    if space is None:
        return []
    if needs.host_bytes is not None:
        _ram(space, needs.host_bytes, notes)
    for path in space.unreadable:
        notes.bad(
            f"{path} cannot be read here, and every rank reads it", f"ls -ld {path}; share or copy it", is_unfit=True
        )
    output, nvme = space.folders.get("output"), space.folders.get("nvme")
    if output is not None:
        _output(output, needs, notes)
    if nvme is not None:
        _nvme(nvme, needs, notes)
    return notes.findings


def _ram(space: Space, wanted: int, notes: Notes) -> None:
    has, free, need = format_bytes(space.ram_bytes), format_bytes(space.available_bytes), format_bytes(wanted)
    fix = "dstrain plan shows configurations that need less: less offload, ZeRO-3, fewer ranks on a host"
    if wanted > space.ram_bytes:
        notes.bad(f"the job needs {need} of RAM on this host, which has {has}", fix)
    elif wanted > space.available_bytes:
        notes.warn(f"the job needs {need} of RAM on this host; {free} of {has} are free", "ps aux --sort=-rss | head")
    else:
        notes.ok(f"RAM: {need} needed, {free} of {has} free")


def _output(folder: Folder, needs: Needs, notes: Notes) -> None:
    """Adds whether checkpoints fit. All hosts but the first need a share of each: if the folder is not shared, every
    host writes its own ranks' part."""
    if not folder.is_writable:
        notes.bad(f"{folder.path} cannot be written", "name another output_dir, or: sudo chown $USER on its parent")
        return
    if needs.checkpoint_bytes is None:
        if folder.free_bytes < LEAST_FREE:
            what = f"{folder.path}: only {format_bytes(folder.free_bytes)} free, and the size of checkpoints is unknown"
            notes.warn(what, "name an output_dir on a larger disk", is_unfit=True)
        return
    one = needs.checkpoint_bytes if needs.is_first else needs.checkpoint_bytes // needs.num_hosts
    free, size = format_bytes(folder.free_bytes), format_bytes(one)
    count = needs.num_checkpoints
    fits = folder.free_bytes // one if one else 0
    larger = "an output_dir on a larger disk"  # of two that fit, the first goes after the second was written
    if folder.free_bytes < one:
        notes.bad(f"{folder.path}: {free} free, and one checkpoint takes {size}", "name an output_dir on a larger disk")
    elif count is None:
        what = f"{folder.path}: every checkpoint of {size} is kept, and {fits} fit into the {free} of free space"
        limit = min(2, fits - 1) if one else 2
        notes.warn(what, f"dstrain run --set save_total_limit={limit}" if limit else f"name {larger}")
    elif folder.free_bytes < one * count:
        what = f"{folder.path}: {free} free, and {counted(count, 'checkpoint')} of {size} will be written"
        notes.bad(what, f"dstrain run --set save_total_limit=1, or {larger}" if fits > 1 else f"name {larger}")
    else:
        notes.ok(f"disk: {count} × {size} of checkpoints, {free} free")


def _nvme(folder: Folder, needs: Needs, notes: Notes) -> None:
    free, need = format_bytes(folder.free_bytes), format_bytes(needs.nvme_bytes)
    if not folder.is_writable:
        notes.bad(f"nvme_path {folder.path} cannot be written", f"sudo install -d -o $USER {folder.path}")
    elif folder.free_bytes < needs.nvme_bytes:
        notes.bad(f"nvme_path {folder.path}: {free} free, {need} needed", "name a larger disk in ds_config.json")
    else:
        notes.ok(f"NVMe: {need} needed, {free} free")
