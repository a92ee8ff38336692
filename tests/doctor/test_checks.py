"""Versions, extensions, limits, disks, network and hubs, judged from facts."""

from __future__ import annotations

import re
from configparser import ConfigParser
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from dstrain.choices import Attention
from dstrain.doctor.checks import attention, limits, network, online, ops, software, space
from dstrain.doctor.checks.all import findings
from dstrain.doctor.facts import Endpoint
from dstrain.doctor.finding import Mark
from dstrain.doctor.gpu_facts import Gpus, GpuState
from dstrain.doctor.requirements import Needs
from dstrain.facts import window
from dstrain.facts.attention_kernels import AttentionKernels
from dstrain.facts.deepspeed_ops import Lock
from dstrain.facts.window import TESTED
from dstrain.launch.prepare.attention import Wish
from dstrain.units import GIB, MIB
from tests.doctor import samples
from tests.doctor.samples import HOSTS, facts, folder, said

NEEDS = Needs()
RUN = Needs(has_job=True, hosts=HOSTS, slots=8)
FA3, FA2 = Attention.FLASH_ATTENTION_3, Attention.FLASH_ATTENTION_2
ON_CPU = Needs(on_cpu=True)


def test_a_good_machine_has_nothing_but_good_lines() -> None:
    assert {each.mark for each in findings(facts(), NEEDS)} == {Mark.OK}


def test_a_look_that_failed_is_told() -> None:
    found = findings(facts(software=None, failed={"software": "no answer within 3.6 s"}), NEEDS)
    assert said(found)[0] == "! software: no answer within 3.6 s"


# attention


def test_the_kernels_of_a_host_are_one_line_and_the_choice_of_a_run_another() -> None:
    kernels = AttentionKernels(packages={FA2: "2.8.3"}, cached={FA2: "0", FA3: "0123456789"})
    alone = replace(NEEDS, wish=Wish(asked=Attention.AUTO, place="job.yaml:9:7", planned=Attention.SDPA))
    cached = "flash_attention_3 (kernels-community/vllm-flash-attn3 0123456)"
    assert said(attention.check(facts(attention=kernels), alone)) == [
        f"✓ attention: {cached}, flash_attention_2 (flash-attn 2.8.3), sdpa, eager",
        f"✓ dstrain run takes {cached}",
    ]
    assert said(attention.check(facts(attention=AttentionKernels()), NEEDS)) == ["✓ attention: sdpa, eager"]
    assert attention.check(facts(attention=AttentionKernels()), ON_CPU) == []


def test_hosts_that_lack_what_the_job_names_are_told_together() -> None:
    needs = replace(RUN, wish=Wish(asked=FA2, place="job.yaml:9:7", planned=FA2))
    (told,) = attention.chosen(needs, {"a": AttentionKernels(packages={FA2: "2.8.3"}), "b": AttentionKernels()})
    assert (told.mark, told.what) == (
        Mark.ERROR,
        "job.yaml:9:7: attn is flash_attention_2, but b lacks flash_attention_2",
    )


# software


def about_software(needs: Needs = NEEDS, gpus: Gpus | None = None, **changes: object) -> list[str]:
    known = facts(software=samples.software(**changes))
    return said(software.check(known if gpus is None else replace(known, gpus=gpus), needs))


def test_what_is_missing_is_an_error_with_the_command_that_installs_it() -> None:
    packages = {"torch": "2.13.0", "deepspeed": None, "transformers": "5.23.0", "peft": None}
    found = about_software(packages=packages)
    wanted = "pip install 'deepspeed<0.20,>=0.19.8' 'peft<0.22,>=0.19' 'torch==2.13.0'"
    assert found[0] == f"✗ not installed: deepspeed, peft → {wanted}"


@pytest.mark.parametrize("version", ["5.30.1", "5.25", "6.0.0rc1"])
def test_a_version_that_was_not_tested_is_a_warning(version: str) -> None:
    packages = {"torch": "2.13.0", "deepspeed": "0.19.8", "transformers": version, "peft": "0.21.2"}
    assert (
        f"! transformers {version} is outside the supported range <5.25,>=5.23" in about_software(packages=packages)[0]
    )


HYBRID = replace(NEEDS, model_type="qwen3_5")
KERNELS = {"flash-linear-attention": "0.5.0", "causal-conv1d": None}


def test_kernels_that_the_model_calls_and_that_are_missing_are_a_warning_with_their_cost() -> None:
    (found,) = [line for line in about_software(HYBRID, kernels={}) if "qwen3_5" in line]
    assert found == (
        "! qwen3_5 trains without flash-linear-attention and causal-conv1d, slower and in more memory than planned; "
        "a step of Qwen3.5-9B took 1.22 in place of 0.70 s on 8 B200 (transformers#48718),"
        " and 12 of its layers needed 14.2 in place of 12.4 GiB of an H200"
        " → pip install 'flash-linear-attention' 'causal-conv1d' 'torch==2.13.0'"
    )
    (found,) = [line for line in about_software(HYBRID, kernels=KERNELS) if "qwen3_5" in line]
    assert found.startswith("! qwen3_5 trains without causal-conv1d, slower and in more memory than planned →")
    assert not [line for line in about_software(kernels={}) if "trains without" in line]
    assert not [line for line in about_software(replace(HYBRID, on_cpu=True), kernels={}) if "qwen3_5" in line]


@pytest.mark.parametrize(
    ("gpu", "triton", "tilelang", "is_refused"),
    [
        ("NVIDIA H100 80GB HBM3", "3.6.0", None, True),
        ("NVIDIA GH200 480GB", "3.4.0", None, True),
        ("NVIDIA H100 80GB HBM3", "3.7.1", None, False),
        ("NVIDIA H100 80GB HBM3", "3.6.0", "0.1.9", False),
        ("NVIDIA A100-SXM4-80GB", "3.6.0", None, False),
    ],
)
def test_a_triton_with_wrong_gradients_of_linear_attention_is_an_error_on_hopper(
    gpu: str, triton: str, tilelang: str | None, is_refused: bool
) -> None:
    kernels = {"flash-linear-attention": "0.5.2", "causal-conv1d": "1.6.0"}
    state = Gpus(has_driver=True, gpus=(GpuState(bus="0", name=gpu),))
    lines = about_software(HYBRID, state, kernels=kernels, compilers={"triton": triton, "tilelang": tilelang})
    assert any("on Hopper: the gated backward pass raises an error" in line for line in lines) == is_refused


def test_packed_rows_without_the_kernels_that_keep_samples_apart_are_an_error() -> None:
    packed = replace(HYBRID, packs_rows=True)
    both = "qwen3_5 keeps the samples of packed rows apart by kernels of flash-linear-attention and causal-conv1d"
    (found,) = [line for line in about_software(packed, kernels=KERNELS) if "qwen3_5" in line]
    install = "pip install 'causal-conv1d' 'torch==2.13.0'"
    assert found == f"✗ {both}; missing: causal-conv1d → packing: false, or: {install}"
    (found,) = [line for line in about_software(replace(packed, on_cpu=True)) if "qwen3_5" in line]
    assert found == f"✗ {both}, which run on GPUs only → packing: false"


def test_only_what_the_tests_ran_is_said_to_be_tested() -> None:
    tested = {"torch": "2.13.0+cu130", "deepspeed": "0.19.8", "transformers": "5.23.0", "peft": "0.21.2"}
    assert about_software(packages=tested)[0].endswith("and 1 more, as tested")
    newer = about_software(packages=tested | {"torch": "2.14.1"})[0]
    assert newer.startswith("✓ Python 3.12.4, torch 2.14.1,")
    assert newer.endswith("in the supported ranges; untested: torch (tested: 2.13.0)")


def test_an_old_deepspeed_is_known_bad_and_its_known_faults_are_named() -> None:
    packages = {"torch": "2.9.1", "deepspeed": "0.18.9", "transformers": "5.23.0", "peft": "0.21.2"}
    bad, faults = about_software(packages=packages)[:2]
    assert bad.startswith("! deepspeed 0.18.9 is known bad: it lacks runtime/chunked_cross_entropy.py")
    assert bad.endswith("pip install 'deepspeed==0.19.8' 'torch==2.9.1'")
    assert faults.startswith(
        "! deepspeed 0.18.9 has known faults with some settings (wrong result: DS951, DS952, DS953"
    )
    assert "DS955" not in faults  # fixed before
    assert faults.endswith("pip install 'deepspeed>=0.19.6' 'torch==2.9.1'")


def test_every_range_that_is_known_bad_excludes_what_was_tested() -> None:
    assert [row for row in window.KNOWN_BAD if any(map(partial(is_bad, row), TESTED[row.package]))] == []


def is_bad(row: window.KnownBad, version: str) -> bool:
    return window.known_bad(row.package, version) is row


def test_the_tested_versions_are_those_of_the_constraints() -> None:
    root = Path(__file__).parents[2]
    text = (root / "constraints.txt").read_text(encoding="utf-8")
    pins = dict(line.split("==") for line in text.splitlines() if "==" in line and not line.startswith("#"))
    setup = ConfigParser()
    setup.read(root / "setup.cfg", encoding="utf-8")
    needed = re.findall(r"^([\w.-]+)", setup["options"]["install_requires"], re.MULTILINE)
    lower = {name.lower(): version for name, version in pins.items()}
    assert {name: lower[name.lower()] for name in needed} == {name: releases[0] for name, releases in TESTED.items()}


def test_a_python_that_was_not_tested_is_a_warning() -> None:
    assert about_software(python="3.14.0")[0].startswith("! Python 3.14.0 is outside the tested range, 3.11 to 3.13")


def test_a_checkout_that_was_never_installed_says_so() -> None:
    found = about_software(ranges={}, packages={}, tested_pythons=())
    assert found[0].endswith("→ pip install -e .")


def test_a_driver_older_than_torchs_cuda_is_an_error() -> None:
    old = Gpus(has_driver=True, driver="535.54.03", cuda="12.2")
    found = about_software(gpus=old, torch_cuda="13.0", nvcc=None)
    assert found[1].startswith("✗ torch is built for CUDA 13.0, and driver 535.54.03 runs CUDA up to 12.2")
    assert "install driver 580 or newer" in found[1]
    assert about_software(gpus=old, torch_cuda="12.8", nvcc=None)[1:] == []  # the same major runs


def test_torch_without_cuda_beside_gpus_is_an_error() -> None:
    assert about_software(torch_cuda=None)[1].startswith("✗ torch 2.13.0 is built without CUDA, and this machine has 8")
    assert about_software(ON_CPU, torch_cuda=None)[1:] == []


@pytest.mark.parametrize(
    ("nvcc", "torch", "sign"),
    [("12.8", "12.8", "✓"), ("12.4", "12.8", "✓"), ("13.1", "13.0", "!"), ("11.8", "12.8", "!")],
)
def test_nvcc_must_go_with_torch_as_deepspeed_wants_it(nvcc: str, torch: str, sign: str) -> None:
    gpus = Gpus(has_driver=True, driver="590", cuda="13.1")
    assert about_software(gpus=gpus, nvcc=nvcc, torch_cuda=torch)[1][0] == sign


def test_nvcc_that_a_job_needs_is_an_error_unless_the_check_is_off() -> None:
    job = Needs(ops=("fused_adam",))
    assert about_software(job, nvcc="11.8")[1].startswith("✗ /usr/local/cuda/bin/nvcc is of CUDA 11.8, torch of 12.8")
    off = Needs(ops=("fused_adam",), environment={"DS_SKIP_CUDA_CHECK": "1"})
    assert about_software(off, nvcc="11.8")[1].startswith("!")


# DeepSpeed's extensions


def about_ops(needs: Needs = NEEDS, **changes: object) -> list[str]:
    return said(ops.check(facts(toolchain=samples.toolchain(**changes)), needs))


def test_what_is_built_and_what_can_be_is_told() -> None:
    found = about_ops(built=("cpu_adam",))
    assert found == ["✓ cpu_adam built; fused_adam, async_io can be, on first use"]


def test_libaio_is_asked_for_by_the_systems_own_name() -> None:
    assert about_ops(has_libaio=False)[1].endswith("no libaio → apt-get install libaio-dev")
    assert about_ops(has_libaio=False, installer="dnf")[1].endswith("→ dnf install libaio-devel")


def test_what_a_job_needs_and_cannot_be_built_is_an_error() -> None:
    found = about_ops(Needs(ops=("cpu_adam", "async_io")), has_libaio=False)
    assert found[1] == "✗ async_io cannot be built: no libaio; this job needs async_io → apt-get install libaio-dev"


def test_without_a_compiler_everything_shares_a_line() -> None:
    found = about_ops(ON_CPU, compiler=None, has_ninja=False)
    assert len(found) == 1
    assert found[0].endswith("cannot be built: no C++ compiler, no ninja → apt-get install g++; pip install ninja")


def test_extensions_of_a_gpu_need_nvcc_and_those_of_the_cpu_do_not() -> None:
    found = about_ops(has_cuda_toolkit=False)
    assert "fused_adam, async_io cannot be built: no nvcc" in " ".join(found)
    assert found[0] == "✓ cpu_adam can be, on first use"
    assert about_ops(ON_CPU, has_cuda_toolkit=False)[0].startswith(
        "✓ cpu_adam, deepspeed_shm_comm, fused_adam, async_io"
    )


def test_architectures_that_deepspeed_cannot_read_stop_a_job_that_builds_for_them() -> None:
    job = Needs(ops=("fused_adam",))
    found = about_ops(job, architectures="8.0 9.0a;10.0a+PTX", built=())
    assert found[-1].endswith('→ export TORCH_CUDA_ARCH_LIST="8.0 9.0;10.0+PTX"')
    for needs, changes in ((Needs(ops=("cpu_adam",)), {"architectures": "9.0a"}), (job, {"architectures": "9.0"})):
        assert "ARCH_LIST" not in " ".join(about_ops(needs, **changes, built=()))


def test_a_lock_beside_which_nothing_happens_is_named_with_the_command_that_removes_it() -> None:
    lock = Lock(path="/ext/cpu_adam/lock", idle_s=3000, is_built=False)
    found = about_ops(locks=(lock,))
    assert found[0].startswith("✗ /ext/cpu_adam/lock is held by no visible process")
    assert "its folder has not changed for 50 min 0 s" in found[0]
    assert found[0].endswith("→ rm /ext/cpu_adam/lock")


@pytest.mark.parametrize("idle_s", [30, 3000])
def test_a_lock_of_an_extension_that_the_job_does_not_need_stops_nothing(idle_s: float) -> None:
    lock = Lock(path="/ext/cpu_adam/lock", idle_s=idle_s, is_built=False)
    for is_quick in (False, True):
        found = about_ops(Needs(has_job=True, ops=("fused_adam",), is_quick=is_quick), locks=(lock,))
        assert not any(line.startswith("✗") for line in found)
        assert any("this job does not need it" in line for line in found) == (idle_s == 3000 and not is_quick)
        needed = about_ops(Needs(has_job=True, ops=("cpu_adam",), is_quick=is_quick), locks=(lock,))
        assert needed[0].startswith("✗" if idle_s == 3000 else "!")


def test_a_young_lock_may_be_another_containers() -> None:
    found = about_ops(locks=(Lock(path="/ext/cpu_adam/lock", idle_s=30, is_built=False),))
    assert found[0].startswith("! /ext/cpu_adam/lock")
    assert "another container or host may be building → if none is: rm" in found[0]


def test_a_lock_of_an_extension_that_is_built_is_no_finding() -> None:
    found = about_ops(locks=(Lock(path="/ext/cpu_adam/lock", idle_s=3000, is_built=True),))
    assert not any("lock" in line for line in found)


# limits


def about_limits(needs: Needs = NEEDS, **changes: object) -> list[str]:
    return said(limits.check(facts(limits=samples.limits(**changes)), needs))


def test_dockers_shared_memory_is_an_error_for_several_gpus() -> None:
    found = about_limits(shm_bytes=64 * MIB, shm_free_bytes=64 * MIB, is_container=True)
    assert found[0].startswith("✗ /dev/shm has 64.0 MiB free of 64.0 MiB, and 8 ranks need 264.0 MiB")
    assert "docker run --ipc=host" in found[0]


def test_small_shared_memory_is_a_warning() -> None:
    found = about_limits(shm_bytes=512 * MIB, shm_free_bytes=512 * MIB)
    assert found[0] == "! /dev/shm is small, 512.0 MiB → sudo mount -o remount,size=50% /dev/shm"


def test_shared_memory_that_is_full_says_what_to_look_at() -> None:
    found = about_limits(shm_bytes=500 * GIB, shm_free_bytes=MIB)
    assert "ls -lS /dev/shm" in found[0]


def test_ranks_on_the_cpu_want_deepspeeds_buffers() -> None:
    found = about_limits(Needs(on_cpu=True, slots=2), shm_bytes=100 * MIB, shm_free_bytes=100 * MIB)
    assert "2 ranks need 132.0 MiB" in found[0]


def test_open_files_follow_the_data_loaders() -> None:
    assert about_limits(open_files=1024)[0].startswith("✓")
    found = about_limits(Needs(workers=4), open_files=1024)
    assert found[0] == "! 1024 open files are allowed; a rank may need 5120 → ulimit -n 65536"
    assert about_limits(open_files=200)[0].startswith("✗ 200 open files are allowed")
    hard = about_limits(open_files=512, open_files_hard=512)
    assert hard[0].endswith("sudo tee -a /etc/security/limits.conf, and log in again")


def test_rdma_between_hosts_wants_locked_memory() -> None:
    assert about_limits(RUN, memlock_bytes=8 * MIB)[0].startswith("✗ 8.00 MiB of locked memory is allowed: RDMA cannot")
    assert about_limits(memlock_bytes=8 * MIB)[0].startswith("✓")


# RAM and disk

JOB = Needs(
    has_job=True, host_bytes=154 * GIB, checkpoint_bytes=100 * GIB, num_checkpoints=3, folders={"output": "/data/out"}
)


def about_space(needs: Needs = JOB, **changes: object) -> list[str]:
    return said(space.check(facts(space=samples.space(**changes)), needs))


def test_ram_and_disk_are_told_in_numbers() -> None:
    assert about_space() == [
        "✓ RAM: 154.0 GiB needed, 900.0 GiB of 1000 GiB free",
        "✓ disk: 3 × 100.0 GiB of checkpoints, 900.0 GiB free",
    ]


def test_without_a_job_nothing_is_said_of_ram_and_disk() -> None:
    assert about_space(NEEDS, folders={}) == []


def test_ram_that_is_not_there_is_an_error_and_ram_in_use_a_warning() -> None:
    assert about_space(ram_bytes=100 * GIB)[0].startswith(
        "✗ the job needs 154.0 GiB of RAM on this host, which has 100.0 GiB"
    )
    assert about_space(available_bytes=100 * GIB)[0].startswith(
        "! the job needs 154.0 GiB of RAM on this host; 100.0 GiB of"
    )


def test_checkpoints_that_do_not_fit_are_an_error() -> None:
    assert "and one checkpoint takes 100.0 GiB" in about_space(folders={"output": folder(50 * GIB)})[1]
    found = about_space(folders={"output": folder(250 * GIB)})[1]
    assert found.startswith("✗ /data/out: 250.0 GiB free, and 3 checkpoints of 100.0 GiB will be written")
    assert "save_total_limit=1" in found
    with_one = about_space(folders={"output": folder(150 * GIB)})[1]  # of two, the first goes when the second is there
    assert ("save_total_limit" in with_one, "larger disk" in with_one) == (False, True)


def test_keeping_every_checkpoint_is_a_warning() -> None:
    found = about_space(replace(JOB, num_checkpoints=None))[1]
    assert found.startswith("! /data/out: every checkpoint of 100.0 GiB is kept, and 9 fit")
    assert "save_total_limit=2" in found
    for free, limit in ((250, "save_total_limit=1"), (150, "larger disk")):
        assert limit in about_space(replace(JOB, num_checkpoints=None), folders={"output": folder(free * GIB)})[1]


def test_other_hosts_need_their_share_of_a_checkpoint() -> None:
    other = replace(JOB, hosts=HOSTS, is_first=False)
    assert about_space(other, folders={"output": folder(160 * GIB)})[1].startswith("✓ disk: 3 × 50.0 GiB")


def test_what_ranks_read_must_be_there() -> None:
    assert about_space(unreadable=("/data/train.jsonl",))[1].startswith("✗ /data/train.jsonl cannot be read here")


def test_nvme_must_hold_what_is_offloaded() -> None:
    job = replace(JOB, nvme_bytes=400 * GIB, folders={"nvme": "/nvme"})
    assert about_space(job, folders={"nvme": folder(100 * GIB, path="/nvme")})[1].startswith(
        "✗ nvme_path /nvme: 100.0 GiB"
    )
    shut = about_space(job, folders={"nvme": folder(900 * GIB, path="/nvme", is_writable=False)})
    assert shut[1].startswith("✗ nvme_path /nvme cannot be written")


# network


def about_network(needs: Needs = RUN, **changes: object) -> list[str]:
    return said(network.check(facts(network=samples.network(**changes)), needs))


WAYS = {"node1": "10.0.0.1"}


def test_the_way_to_the_other_hosts_is_named() -> None:
    found = about_network(routes=WAYS)
    assert found == [
        "✓ eth0 (10.0.0.1, MTU 9000, 100 Gb/s) leads to the other hosts",
        "✓ RDMA: mlx5_0-7, 400 Gb/s InfiniBand",
        "✓ port 29500 is free for rank 0",
    ]


def test_one_host_needs_no_interface() -> None:
    assert about_network(NEEDS)[0].endswith(
        "leads to the internet; RDMA: mlx5_0-7, 400 Gb/s InfiniBand; on one host no variable is needed"
    )


def test_a_master_without_a_name_is_an_error() -> None:
    found = about_network(routes=WAYS, master_is_known=False)
    assert found[0].startswith("✗ node0, the host of rank 0, cannot be resolved here")


def test_a_variable_that_matches_nothing_is_an_error_and_says_what_would() -> None:
    needs = replace(RUN, environment={"NCCL_SOCKET_IFNAME": "ib0", "GLOO_SOCKET_IFNAME": "eth0"})
    found = about_network(needs, routes=WAYS)
    assert found[0].startswith("✗ NCCL_SOCKET_IFNAME=ib0 matches no interface here that is up: lo, eth0")
    assert found[0].endswith("→ export NCCL_SOCKET_IFNAME==eth0")


def test_tcp_between_hosts_is_a_warning() -> None:
    assert about_network(routes=WAYS, rdma=())[1].startswith("! no RDMA device is up: NCCL goes over TCP at 100 Gb/s")
    down = about_network(routes=WAYS, rdma=(samples.rdma(state="DOWN"),))
    assert down[1].startswith("! no RDMA device is up (mlx5_0 down)")


def test_one_port_of_many_that_is_down_is_a_warning() -> None:
    ports = (
        samples.rdma("mlx5_0"),
        samples.rdma("mlx5_1", state="DOWN"),
        samples.rdma("eth_x", gbits_per_s=25.0, state="DOWN"),
    )
    found = about_network(routes=WAYS, rdma=ports)
    assert "! RDMA ports down: mlx5_1 → ibstat mlx5_1; check the cable" in found


def test_rdma_over_ethernet_wants_large_packets() -> None:
    small = replace(samples.ETH, mtu=1500)
    port = samples.rdma(link_layer="Ethernet", interface="eth0")
    found = about_network(routes=WAYS, rdma=(port,), interfaces=(small,))
    assert found[2].startswith("! MTU 1500 on eth0: RDMA sends small packets over it → sudo ip link set eth0 mtu 9000")


def test_a_port_that_is_taken_is_an_error_where_it_was_named() -> None:
    assert about_network(routes=WAYS, port_user="python (77)")[-1].startswith("! port 29500 is used by python (77)")
    named = replace(RUN, environment={"MASTER_PORT": "29501"})
    assert about_network(named, routes=WAYS, port_user="python (77)")[-1].startswith(
        "✗ port 29501 (MASTER_PORT) is used"
    )


# hubs


def about_hubs(needs: Needs = NEEDS, **changes: object) -> list[str]:
    return said(online.check(facts(online=samples.online(**changes)), needs))


SILENT = Endpoint(url="https://huggingface.co", took_s=None, problem="Name or service not known")


def test_a_hub_that_is_silent_is_a_warning_with_a_way_around() -> None:
    found = about_hubs(endpoints={"Hugging Face": SILENT})
    assert found[0].startswith("! https://huggingface.co cannot be reached: Name or service not known")
    assert "HF_ENDPOINT=https://hf-mirror.com" in found[0]
    assert "HF_HUB_OFFLINE=1" in found[0]


def test_a_proxys_own_certificate_has_its_own_fix() -> None:
    bad = replace(SILENT, problem="[SSL: CERTIFICATE_VERIFY_FAILED] self-signed certificate")
    assert "export SSL_CERT_FILE=" in about_hubs(endpoints={"Hugging Face": bad})[0]


def test_offline_is_no_fault() -> None:
    found = about_hubs(endpoints={}, is_offline=True)
    assert found[0].startswith(
        "✓ Hugging Face is offline (HF_HUB_OFFLINE); only its cache is used; /cache: 900.0 GiB free"
    )


def test_a_job_of_local_files_asks_no_hub() -> None:
    found = about_hubs(Needs(has_job=True, hubs=()))
    assert found[0] == "✓ model and data are local; no hub is needed"


def test_a_cache_that_is_full_or_shut_is_a_warning() -> None:
    full = {"Hugging Face": folder(5 * GIB, path="/cache")}
    assert about_hubs(caches=full)[1].startswith(
        "! /cache, Hugging Face's cache, has only 5.00 GiB free → export HF_HOME="
    )
    shut = {"Hugging Face": folder(500 * GIB, path="/cache", is_writable=False)}
    assert "cannot be written" in about_hubs(caches=shut)[1]


def test_swanlab_without_a_key_runs_offline() -> None:
    assert about_hubs()[-1].startswith("✓ SwanLab runs offline, without a key: `swanlab login`")


def test_swanlab_that_must_be_online_wants_a_key() -> None:
    found = about_hubs(Needs(swanlab_mode="online"))
    assert found[-1].startswith("✗ SwanLab is set to online, but has no key → swanlab login")


def test_swanlab_with_a_key_that_is_not_reached_is_a_warning() -> None:
    silent = {"SwanLab": replace(SILENT, url="https://api.swanlab.cn")}
    found = about_hubs(Needs(environment={"SWANLAB_API_KEY": "***"}), endpoints=silent)
    assert found[-1].endswith("→ export SWANLAB_MODE=offline, and later: swanlab sync")


def test_a_mode_that_there_is_not_is_an_error() -> None:
    assert about_hubs(Needs(environment={"SWANLAB_MODE": "onlin"}))[-1].startswith('✗ SwanLab: SWANLAB_MODE is "onlin"')


def test_a_proxy_between_hosts_wants_exceptions() -> None:
    found = about_hubs(RUN, proxies={"https_proxy": "http://***@proxy:3128"})
    assert found[-1].startswith("! https_proxy=http://***@proxy:3128: also between the hosts → export no_proxy=")
