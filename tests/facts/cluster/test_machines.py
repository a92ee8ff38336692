"""The machines of a job, on machines with and without GPUs."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from nvml import Gpu, Machine

from dstrain.errors import InvalidConfig
from dstrain.facts import probe
from dstrain.facts.cluster.cluster import Origin
from dstrain.facts.cluster.gpus import gpu
from dstrain.facts.cluster.machines import resolve_gpu, resolve_hosts
from dstrain.facts.this_machine import names


def test_a_hostfile_is_read_with_its_name(tmp_path: Path) -> None:
    file = tmp_path / "hostfile"
    with pytest.raises(InvalidConfig, match="no such file") as caught:
        resolve_hosts(file)
    assert "dstrain hostfile write" in str(caught.value.hint)
    file.write_bytes(b"a slots=8\r\nb slots=8\r\n")
    hosts = resolve_hosts(file)
    assert (hosts.name, hosts.num_slots) == (str(file), 16)
    file.write_bytes(b"\xef\xbb\xbfa slots=8\n")
    with pytest.raises(InvalidConfig, match="1:1: starts with a byte order mark"):
        resolve_hosts(file)


def test_without_a_hostfile_this_machine_is_the_host(machine: Machine) -> None:
    machine(Gpu(), Gpu())
    hosts = resolve_hosts(None)
    assert [(host.name, host.slots) for host in hosts.hosts] == [("localhost", 2)]


def test_a_gpu_that_is_not_in_the_table_is_planned_from_what_nvml_says(machine: Machine) -> None:
    machine(Gpu())
    found, origin = resolve_gpu()
    assert (found.name, found.memory_mib, origin, found.is_listed) == (
        "NVIDIA GeForce RTX 5070 Plus",
        12227,
        Origin.MEASURED,
        False,
    )
    # as an RTX 5070, by NVIDIA's white paper: 30.9 TFLOP/s, 61.7 with fp32 accumulation, 672 GB/s
    assert found.fp32_flops_per_s == pytest.approx(30.9e12, rel=0.005)
    assert found.bf16_flops_per_s == pytest.approx(61.7e12, rel=0.005)
    assert found.hbm_bytes_per_s == pytest.approx(672e9, rel=0.005)


def test_the_smallest_gpu_here_stands_for_all(machine: Machine) -> None:
    machine(Gpu(name="NVIDIA H100 80GB HBM3", memory_mib=81559), Gpu(name="NVIDIA A10", memory_mib=23028))
    assert resolve_gpu()[0].name == "a10"


def test_a_name_that_was_typed_wins_and_may_be_that_of_a_gpu_here(machine: Machine) -> None:
    machine(Gpu())
    assert resolve_gpu(given="h100") == (gpu("h100"), Origin.GIVEN)
    assert resolve_gpu(given="rtx-5070-plus")[0].memory_mib == 12227
    with pytest.raises(InvalidConfig, match="is not a GPU that dstrain knows"):
        resolve_gpu(given="rtx-5065")


def test_the_plan_stands_in_for_gpus_that_are_not_here(machine: Machine) -> None:
    planned = (gpu("h100"), Origin.GIVEN)
    assert resolve_gpu(planned=planned) == planned
    machine(Gpu())
    assert resolve_gpu(planned=planned)[1] is Origin.MEASURED


def test_a_gpu_without_memory_of_its_own_has_the_ram(machine: Machine) -> None:
    machine(Gpu(name="NVIDIA GB10", memory_mib=0))
    assert resolve_gpu()[0].memory_mib == probe.host_memory_bytes() // 2**20


def test_a_gpu_whose_clocks_are_secret_has_no_speed(machine: Machine) -> None:
    machine(Gpu(name="GRID A100X-40C", memory_mib=40960, num_cores=0))
    found = resolve_gpu()[0]
    assert (found.memory_mib, found.fp32_flops_per_s, found.has_bf16) == (40960, 0, False)


def test_this_machine_knows_its_name_and_loopback_address() -> None:
    assert {socket.gethostname(), "127.0.0.1"} <= names()
