"""A machine with which nothing is wrong, to be changed in one place by each test."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from dstrain.doctor import gpu_probes as probe
from dstrain.doctor.checks import CHECKS
from dstrain.doctor.facts import (
    Endpoint,
    Facts,
    Folder,
    KernelLog,
    Limits,
    Network,
    Online,
    RdmaPort,
    Software,
    Space,
    Toolchain,
)
from dstrain.doctor.requirements import Needs
from dstrain.facts.cluster.hostfile import Hosts, expand
from dstrain.facts.network import Interface
from dstrain.findings import SIGNS, Finding
from dstrain.units import GIB
from tests.doctor import machines

HOSTS: Hosts = expand("node[0-1]:8", None)
ETH = Interface(name="eth0", is_up=True, addresses=("10.0.0.1",), mtu=9000, mbits_per_s=100_000)
LO = Interface(name="lo", is_up=True, addresses=("127.0.0.1",), mtu=65536, mbits_per_s=0)


def found(check: str, known: Facts, needs: Needs) -> list[Finding]:
    """Returns the findings of one check."""
    return next(each for each in CHECKS if each.id == check).findings(known, needs)


def said(findings: list[Finding]) -> list[str]:
    """Returns findings as `✗ what → fix`, one a line."""
    return [f"{SIGNS[each.severity]} {each.problem}" + (f" → {each.fix}" if each.fix else "") for each in findings]


def software(**changes: Any) -> Software:
    found = Software(
        python="3.12.4",
        tested_pythons=("3.11", "3.12", "3.13"),
        packages={"torch": "2.13.0", "deepspeed": "0.19.8", "transformers": "5.23.0", "peft": "0.21.2"},
        ranges={
            "torch": ">=2.9",
            "deepspeed": "<0.20,>=0.19.8",
            "transformers": "<5.25,>=5.23",
            "peft": "<0.22,>=0.19",
        },
        kernels={"flash-linear-attention": None, "causal-conv1d": None, "mamba-ssm": None},
        same={"Python": "3.12.4", "torch": "2.13.0", "dstrain": "0.1"},
        torch_cuda="12.8",
        nvcc="12.8",
        nvcc_path="/usr/local/cuda/bin/nvcc",
    )
    return replace(found, **changes)


def toolchain(**changes: Any) -> Toolchain:
    found = Toolchain(
        compiler="/usr/bin/c++",
        has_ninja=True,
        has_python_headers=True,
        has_libaio=True,
        has_numactl=True,
        has_cuda_toolkit=True,
        installer="apt-get",
        built=(),
        locks=(),
    )
    return replace(found, **changes)


def rdma(name: str = "mlx5_0", **changes: Any) -> RdmaPort:
    port = RdmaPort(device=name, state="ACTIVE", gbits_per_s=400.0, link_layer="InfiniBand", interface=None)
    return replace(port, **changes)


def network(**changes: Any) -> Network:
    found = Network(
        interfaces=(LO, ETH),
        routes={},
        default_address="10.0.0.1",
        master_is_known=True,
        rdma=tuple(rdma(f"mlx5_{each}") for each in range(8)),
        port_user=None,
    )
    return replace(found, **changes)


def limits(**changes: Any) -> Limits:
    found = Limits(
        shm_bytes=500 * GIB,
        shm_free_bytes=490 * GIB,
        memlock_bytes=None,
        open_files=65536,
        open_files_hard=65536,
        is_container=False,
    )
    return replace(found, **changes)


def folder(free: int, **changes: Any) -> Folder:
    return replace(Folder(path="/data/out", free_bytes=free, is_writable=True), **changes)


def space(**changes: Any) -> Space:
    found = Space(ram_bytes=1000 * GIB, available_bytes=900 * GIB, folders={"output": folder(900 * GIB)}, unreadable=())
    return replace(found, **changes)


def online(**changes: Any) -> Online:
    names = {"Hugging Face": "https://huggingface.co", "ModelScope": "https://modelscope.cn"}
    found = Online(
        endpoints={name: Endpoint(url=url, took_s=0.2, problem=None) for name, url in names.items()},
        is_offline=False,
        caches={name: folder(900 * GIB, path="/cache") for name in names},
        has_swanlab_login=False,
        proxies={},
    )
    return replace(found, **changes)


def facts(**changes: Any) -> Facts:
    """Returns the facts of a DGX; `changes` replace whole subjects."""
    found = Facts(
        host="node0",
        time_s=1e9,
        software=software(),
        toolchain=toolchain(),
        gpus=probe.parse_nvidia_smi(machines.smi_xml(*[{}] * 8)),
        kernel_log=KernelLog(problem=None, xids=()),
        topology=probe.parse_topology(machines.HGX_H100, machines.p2p(8, lambda a, b: "OK")),
        network=network(),
        limits=limits(),
        space=space(),
        online=online(),
    )
    return replace(found, **changes)
