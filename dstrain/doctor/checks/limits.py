"""Checks system limits: shared memory, locked memory, open files."""

from __future__ import annotations

from dstrain.doctor.facts import Facts, Limits
from dstrain.doctor.finding import Finding, Notes
from dstrain.doctor.requirements import Needs
from dstrain.units import GIB, MIB, format_bytes

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


def check(facts: Facts, needs: Needs) -> list[Finding]:
    """Returns findings about the system's limits."""
    limits, notes = facts.limits, Notes("limits")
    if limits is None:
        return []
    ranks = needs.slots or max(1, len(facts.gpus.gpus) if facts.gpus else 1)
    fine = [*_shm(limits, ranks, needs, notes), *_files(limits, needs, notes)]
    has_rdma = facts.network is not None and bool(facts.network.active_ports)
    fine += _memlock(limits, needs, notes, has_rdma=has_rdma)
    if fine:
        notes.ok(", ".join(fine))
    return notes.findings


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
