"""Checks system limits, and RAM and disks against the estimate of a job."""

from __future__ import annotations

from dstrain import findings
from dstrain.doctor.facts import Facts, Folder, Limits, Space
from dstrain.doctor.requirements import Needs
from dstrain.findings import Notes
from dstrain.units import GIB, MIB, format_bytes, format_sizes

SHM_PER_CPU_RANK = 66 * MIB
"""Shared memory of DeepSpeed's CPU collectives for each rank. Source: deepspeed 0.19.8 csrc/cpu/comm/shm.cpp."""
SHM_PER_GPU_RANK = 33 * MIB
"""Shared memory of NCCL for each GPU that uses it, roughly: 4 MiB per channel and peer."""
SHM_PER_WORKER = 64 * MIB
"""Shared memory of a data loader's process for batches in flight."""
SHM_COMFORTABLE = GIB
"""Shared memory below which NVIDIA advises `docker run --shm-size=1g`. Source: NCCL user guide, troubleshooting."""
FILES, FILES_PER_RANK, FILES_PER_WORKER = 1024, 8, 1024
"""Files that a rank opens: libraries, weights, logs; sockets to every other rank; tensors of its data loader."""
FEWEST_FILES = 256
"""Files without which PyTorch does not start."""
MEMLOCK_FOR_RDMA = 64 * MIB
"""Locked memory below which RDMA buffers cannot be registered."""


def check_limits(limits: Limits, facts: Facts, needs: Needs, notes: Notes) -> None:
    """Adds findings about the system's limits."""
    ranks = needs.slots or max(1, len(facts.gpus.gpus) if facts.gpus else 1)
    fine = [*_shm(limits, ranks, needs, notes), *_files(limits, needs, notes)]
    has_rdma = facts.network is not None and bool(facts.network.active_ports)
    fine += _memlock(limits, needs, notes, has_rdma=has_rdma)
    if fine:
        notes.ok(", ".join(fine))


def _shm(limits: Limits, ranks: int, needs: Needs, notes: Notes) -> list[str]:
    if limits.shm_bytes is None or limits.shm_free_bytes is None:
        notes.bad("/dev/shm is not mounted", "mount -t tmpfs -o size=50% tmpfs /dev/shm")
        return []
    fix = f"sudo mount -o remount,size={'50%' if limits.shm_bytes < SHM_COMFORTABLE else '80%'} /dev/shm"
    if limits.is_container:
        fix = "docker run --ipc=host …, or --shm-size=16g; in Kubernetes an emptyDir of medium Memory at /dev/shm"
    per_rank = SHM_PER_CPU_RANK if needs.on_cpu else SHM_PER_GPU_RANK if ranks > 1 else 0
    wanted = ranks * (per_rank + needs.workers * SHM_PER_WORKER)
    free, size = format_bytes(limits.shm_free_bytes), format_bytes(limits.shm_bytes)
    if limits.shm_free_bytes < wanted:
        who = f"{ranks} ranks need" if ranks > 1 else "a rank needs"
        what = f"/dev/shm has {free} free of {size}, and {who} {format_bytes(wanted)}: they die of SIGBUS"
        notes.bad(what, fix if limits.shm_bytes < 2 * wanted else "ls -lS /dev/shm  shows leftover files; remove them")
    elif limits.shm_bytes < SHM_COMFORTABLE:
        notes.warn(f"/dev/shm is small, {size}", fix)
    else:
        return [f"/dev/shm {free} free"]
    return []


def _files(limits: Limits, needs: Needs, notes: Notes) -> list[str]:
    soft, hard = limits.open_files, limits.open_files_hard
    world = needs.hosts.num_slots if needs.hosts else 1
    wanted = FILES + (FILES_PER_RANK * world if world > 8 else 0) + FILES_PER_WORKER * needs.workers
    if soft is None or soft >= wanted:
        return [f"{soft or 'unlimited'} open files"]
    most = 65536 if hard is None else min(hard, 65536)
    fix = f"ulimit -n {most}"
    if most < wanted:
        raised = "echo '* - nofile 65536' | sudo tee -a /etc/security/limits.conf, and log in again"
        fix = "docker run --ulimit nofile=65536 …" if limits.is_container else raised
    what = f"{soft} open files are allowed; a rank may need {wanted}"
    if soft < FEWEST_FILES:
        notes.bad(what, fix)
    else:
        notes.warn(what, fix)
    return []


def _memlock(limits: Limits, needs: Needs, notes: Notes, *, has_rdma: bool) -> list[str]:
    allowed = limits.memlock_bytes
    if allowed is None:
        return ["unlimited locked memory"]
    if has_rdma and needs.num_hosts > 1 and allowed < MEMLOCK_FOR_RDMA:
        what = f"{format_bytes(allowed)} of locked memory is allowed: RDMA cannot register its buffers"
        fix = "echo '* - memlock unlimited' | sudo tee -a /etc/security/limits.conf, and log in again"
        notes.bad(what, "docker run --ulimit memlock=-1 …" if limits.is_container else fix)
        return []
    return [f"{format_bytes(allowed)} locked memory, enough {'here' if has_rdma else 'without RDMA'}"]


LEAST_FREE = 10 * GIB
"""Free space below which a run directory is likely to fill up."""


def check_space(space: Space, facts: Facts, needs: Needs, notes: Notes) -> None:
    """Adds findings about RAM and disks; none without a job."""
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


def _ram(space: Space, wanted: int, notes: Notes) -> None:
    need, has, free = format_sizes(wanted, space.ram_bytes, space.available_bytes)
    if wanted > space.ram_bytes:
        notes.bad(findings.too_little_ram("the job", need, f"has {has}"), findings.LESS_RAM)
    elif wanted > space.available_bytes:
        notes.warn(findings.too_little_ram("the job", need, f"has {free} free of {has}"), "ps aux --sort=-rss | head")
    else:
        notes.ok(f"RAM: {need} needed, {free} of {has} free")


def _output(folder: Folder, needs: Needs, notes: Notes) -> None:
    """Adds whether checkpoints fit. All hosts but the first need a share of each: if the folder is not shared, every
    host writes its own ranks' part."""
    if not folder.is_writable:
        notes.bad(findings.UNWRITABLE.format(key="output_dir", folder=folder.path), findings.OTHER_FOLDER)
        return
    if needs.checkpoint_bytes is None:
        if folder.free_bytes < LEAST_FREE:
            what = f"{folder.path}: only {format_bytes(folder.free_bytes)} free, and the size of checkpoints is unknown"
            notes.warn(what, findings.LARGER_DISK, is_unfit=True)
        return
    one = needs.checkpoint_bytes if needs.is_first else needs.checkpoint_bytes // needs.num_hosts
    free, size = format_bytes(folder.free_bytes), format_bytes(one)
    count = needs.num_checkpoints
    fits = folder.free_bytes // one if one else 0
    where, larger = f"in {folder.path}", findings.LARGER_DISK
    if folder.free_bytes < one:
        notes.bad(findings.too_full("one checkpoint takes", one, folder.free_bytes, where), larger)
    elif count is None:
        what = f"{folder.path}: every checkpoint of {size} is kept, and {fits} fit into the {free} of free space"
        limit = min(2, fits - 1) if one else 2  # of two that fit, the first goes after the second was written
        notes.warn(what, f"dstrain run --set save_total_limit={limit}" if limit else larger)
    elif folder.free_bytes < one * count:
        what = findings.too_full(f"{count} checkpoints that exist at once take", one * count, folder.free_bytes, where)
        notes.bad(what, f"dstrain run --set save_total_limit=1; or {larger}" if fits > 1 else larger)
    else:
        notes.ok(f"disk: {count} × {size} of checkpoints, {free} free")


def _nvme(folder: Folder, needs: Needs, notes: Notes) -> None:
    if not folder.is_writable:
        says = findings.UNWRITABLE.format(key="nvme_path", folder=folder.path)
        notes.bad(says, f"sudo install -d -o $USER {folder.path}")
    elif folder.free_bytes < needs.nvme_bytes:
        says = findings.too_full("offloaded states take", needs.nvme_bytes, folder.free_bytes, f"in {folder.path}")
        notes.bad(says, findings.LARGER_DRIVE)
    else:
        notes.ok(f"NVMe: {format_bytes(needs.nvme_bytes)} needed, {format_bytes(folder.free_bytes)} free")
