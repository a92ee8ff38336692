"""Versions, extensions, limits, disks, network and hubs, judged from facts."""

from __future__ import annotations

import re
from collections.abc import Callable
from configparser import ConfigParser
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from dstrain.choices import Attention
from dstrain.doctor import software_checks
from dstrain.doctor.checks import findings
from dstrain.doctor.facts import Endpoint, Facts, Gpus, GpuState
from dstrain.doctor.requirements import Needs
from dstrain.facts import releases
from dstrain.facts.attention_kernels import AttentionKernels
from dstrain.facts.deepspeed_ops import Lock
from dstrain.facts.releases import TESTED
from dstrain.findings import Severity
from dstrain.launch.prepare.attention import Wish
from dstrain.units import GIB, MIB
from tests.doctor import samples
from tests.doctor.samples import HOSTS, facts, folder, said

NEEDS = Needs()
RUN = Needs(has_job=True, hosts=HOSTS, slots=8)
FA3, FA2 = Attention.FLASH_ATTENTION_3, Attention.FLASH_ATTENTION_2
ON_CPU = Needs(on_cpu=True)


def test_a_good_machine_has_nothing_but_good_lines() -> None:
    assert {each.severity for each in findings(facts(), NEEDS)} == {Severity.OK}


def test_a_look_that_failed_is_told() -> None:
    found = findings(facts(software=None, failed={"software": "no answer within 3.6 s"}), NEEDS)
    assert said(found)[0] == "! software: no answer within 3.6 s"


# attention


def test_the_kernels_of_a_host_are_one_line_and_the_choice_of_a_run_another() -> None:
    kernels = AttentionKernels(packages={FA2: "2.8.3"}, cached={FA2: "0", FA3: "0123456789"})
    alone = replace(NEEDS, wish=Wish(asked=Attention.AUTO, place="job.yaml:9:7", planned=Attention.SDPA))
    cached = "flash_attention_3 (kernels-community/vllm-flash-attn3 0123456)"
    assert said(samples.found("attention", facts(attention=kernels), alone)) == [
        f"✓ attention: {cached}, flash_attention_2 (flash-attn 2.8.3), sdpa, eager",
        f"✓ dstrain run takes {cached}",
    ]
    assert said(samples.found("attention", facts(attention=AttentionKernels()), NEEDS)) == ["✓ attention: sdpa, eager"]
    assert samples.found("attention", facts(attention=AttentionKernels()), ON_CPU) == []


def test_hosts_that_lack_what_the_job_names_are_told_together() -> None:
    needs = replace(RUN, wish=Wish(asked=FA2, place="job.yaml:9:7", planned=FA2))
    (told,) = software_checks.chosen(needs, {"a": AttentionKernels(packages={FA2: "2.8.3"}), "b": AttentionKernels()})
    assert (told.severity, told.problem) == (
        Severity.ERROR,
        "job.yaml:9:7: attn is flash_attention_2, but b lacks flash_attention_2",
    )


# software


def about_software(needs: Needs = NEEDS, gpus: Gpus | None = None, **changes: object) -> list[str]:
    known = facts(software=samples.software(**changes))
    return said(samples.found("software", known if gpus is None else replace(known, gpus=gpus), needs))


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
    assert [row for row in releases.KNOWN_BAD if any(map(partial(is_bad, row), TESTED[row.package]))] == []


def is_bad(row: releases.KnownBad, version: str) -> bool:
    return releases.known_bad(row.package, version) is row


def test_the_tested_versions_are_those_of_the_constraints() -> None:
    text = (Path(__file__).parents[2] / "constraints.txt").read_text(encoding="utf-8")
    pins = dict(line.split("==") for line in text.splitlines() if "==" in line and not line.startswith("#"))
    needed = re.findall(r"^([\w.-]+)", requirements(), re.MULTILINE)
    lower = {name.lower(): version for name, version in pins.items()}
    assert {name: lower[name.lower()] for name in needed} == {name: releases[0] for name, releases in TESTED.items()}


def requirements() -> str:
    """Returns the packages that dstrain needs, one a line, as setup.cfg has them."""
    setup = ConfigParser()
    setup.read(Path(__file__).parents[2] / "setup.cfg", encoding="utf-8")
    return setup["options"]["install_requires"]


def test_the_window_of_transformers_is_from_the_oldest_tested_minor_to_the_newest() -> None:
    minors = sorted(tuple(map(int, version.split(".")[:2])) for version in TESTED["transformers"])
    (first_major, first), (major, last) = minors[0], minors[-1]
    assert f"transformers>={first_major}.{first},<{major}.{last + 1}" in requirements().splitlines()


def test_what_other_tools_pin_is_in_the_ranges_and_tested_or_known_bad() -> None:
    ranges = dict(re.findall(r"^([\w.-]+?)((?:[<>]=?).+)$", requirements(), re.MULTILINE))
    pins = [pin.split("==") for tool in releases.BESIDE.values() for pin in tool]
    assert [pin for pin in pins if pin[1] not in TESTED[pin[0]] and releases.known_bad(*pin) is None] == []
    assert [pin for pin in pins if not releases.is_in_range(pin[1], ranges[pin[0]])] == []


# the other checks

JOB = Needs(
    has_job=True, host_bytes=154 * GIB, checkpoint_bytes=100 * GIB, num_checkpoints=3, folders={"output": "/data/out"}
)
KEEPS_ALL = replace(JOB, num_checkpoints=None)
ON_NVME = replace(JOB, nvme_bytes=400 * GIB, folders={"nvme": "/nvme"})
OLD = Gpus(has_driver=True, driver="535.54.03", cuda="12.2")
NEW = Gpus(has_driver=True, driver="590", cuda="13.1")
ADAM, CPU_ADAM = Needs(ops=("fused_adam",)), Needs(ops=("cpu_adam",))
NAMED = replace(RUN, environment={"NCCL_SOCKET_IFNAME": "ib0", "GLOO_SOCKET_IFNAME": "eth0"})
WAYS = {"routes": {"node1": "10.0.0.1"}}
SILENT = Endpoint(url="https://huggingface.co", took_s=None, problem="Name or service not known")
BAD_CERTIFICATE = replace(SILENT, problem="[SSL: CERTIFICATE_VERIFY_FAILED] self-signed certificate")
SAMPLES: dict[str, Callable[..., Facts]] = {
    "software": lambda gpus=None, **changes: facts(gpus=gpus or facts().gpus, software=samples.software(**changes)),
    "ops": lambda **changes: facts(toolchain=samples.toolchain(**changes)),
    "limits": lambda **changes: facts(limits=samples.limits(**changes)),
    "space": lambda **changes: facts(space=samples.space(**changes)),
    "network": lambda **changes: facts(network=samples.network(**changes)),
    "online": lambda **changes: facts(online=samples.online(**changes)),
}
"""Check → the facts of a good machine with changes to what the check looks at."""


def about(check: str, needs: Needs, **changes: Any) -> list[str]:
    return said(samples.found(check, SAMPLES[check](**changes), needs))


def packages(**versions: str | None) -> dict[str, Any]:
    """Returns the packages of a good machine with other versions, or without some."""
    return {"packages": {**samples.software().packages, **versions}}


def disk(gib: int, **changes: Any) -> dict[str, Any]:
    """Returns an output folder on a disk with so many GiB left."""
    return {"folders": {"output": folder(gib * GIB, **changes)}}


def nvme(gib: int, **changes: Any) -> dict[str, Any]:
    return {"folders": {"nvme": folder(gib * GIB, path="/nvme", **changes)}}


def cache(gib: int, **changes: Any) -> dict[str, Any]:
    return {"caches": {"Hugging Face": folder(gib * GIB, path="/cache", **changes)}}


def lock(idle_s: float) -> dict[str, Any]:
    return {"locks": (Lock(path="/ext/cpu_adam/lock", idle_s=idle_s, is_built=False),)}


def shm(free: int, total: int | None = None, **changes: Any) -> dict[str, Any]:
    return {"shm_bytes": total or free, "shm_free_bytes": free, **changes}


# fmt: off
TOLD: tuple[tuple[str, Needs, dict[str, Any], str, tuple[str, ...]], ...] = (
    # packages and Pythons
    ("software", NEEDS, packages(deepspeed=None, peft=None),
     "✗ dstrain needs deepspeed and peft, which are not installed → pip install "
     "'deepspeed<0.20,>=0.19.8' 'peft<0.22,>=0.19' 'torch==2.13.0'", ()),
    *(("software", NEEDS, packages(transformers=version),
       f"! dstrain supports transformers <5.25,>=5.23, and {version} is installed → ", ())
      for version in ("5.30.1", "5.25", "6.0.0rc1")),
    ("software", NEEDS, {"python": "3.14.0"}, "! Python 3.14.0 is outside the tested range, 3.11 to 3.13", ()),
    ("software", NEEDS, {"ranges": {}, "packages": {}, "tested_pythons": ()}, "", ("→ pip install -e .",)),
    # CUDA of torch, the driver and nvcc
    ("software", NEEDS, {"gpus": OLD, "torch_cuda": "13.0", "nvcc": None},
     "✗ torch is built for CUDA 13.0, and driver 535.54.03 runs CUDA up to 12.2", ("install driver 580 or newer",)),
    ("software", NEEDS, {"torch_cuda": None}, "✗ torch 2.13.0 is built without CUDA, and this machine has 8", ()),
    *(("software", NEEDS, {"gpus": NEW, "nvcc": nvcc, "torch_cuda": torch}, f"{sign} ", ("nvcc",))
      for nvcc, torch, sign in (
        ("12.8", "12.8", "✓"), ("12.4", "12.8", "✓"), ("13.1", "13.0", "!"), ("11.8", "12.8", "!"))),
    ("software", ADAM, {"nvcc": "11.8"}, "✗ /usr/local/cuda/bin/nvcc is of CUDA 11.8, torch of 12.8", ()),
    ("software", replace(ADAM, environment={"DS_SKIP_CUDA_CHECK": "1"}), {"nvcc": "11.8"}, "! ", ("nvcc",)),
    # libaio by the system's own name
    ("ops", NEEDS, {"has_libaio": False}, "! async_io cannot be built", ("no libaio → apt-get install libaio-dev",)),
    ("ops", NEEDS, {"has_libaio": False, "installer": "dnf"}, "! async_io", ("→ dnf install libaio-devel",)),
    ("ops", Needs(ops=("cpu_adam", "async_io")), {"has_libaio": False},
     "✗ async_io cannot be built: no libaio; this job needs async_io → apt-get install libaio-dev", ()),
    # without a CUDA toolkit
    ("ops", NEEDS, {"has_cuda_toolkit": False}, "✓ cpu_adam can be, on first use", ()),
    ("ops", NEEDS, {"has_cuda_toolkit": False}, "!", ("fused_adam, async_io cannot be built: no nvcc",)),
    ("ops", ON_CPU, {"has_cuda_toolkit": False}, "✓ cpu_adam, deepspeed_shm_comm, fused_adam, async_io", ()),
    ("ops", ADAM, {"architectures": "8.0 9.0a;10.0a+PTX", "built": ()}, "✗",
     ('→ export TORCH_CUDA_ARCH_LIST="8.0 9.0;10.0+PTX"',)),  # which DeepSpeed cannot read
    # locks: one beside which nothing happens, and one that another container may hold
    ("ops", NEEDS, lock(3000), "✗ /ext/cpu_adam/lock is held by no visible process",
     ("its folder has not changed for 50 min 0 s", "→ rm /ext/cpu_adam/lock")),
    ("ops", NEEDS, lock(30), "! /ext/cpu_adam/lock", ("another container or host may be building → if none is: rm",)),
    # shared memory: of Docker, small, full, and for DeepSpeed's buffers of ranks on a CPU
    ("limits", NEEDS, shm(64 * MIB, is_container=True),
     "✗ /dev/shm has 64.0 MiB free of 64.0 MiB, and 8 ranks need 264.0 MiB", ("docker run --ipc=host",)),
    ("limits", NEEDS, shm(512 * MIB), "! /dev/shm is small, 512.0 MiB → sudo mount -o remount,size=50% /dev/shm", ()),
    ("limits", NEEDS, shm(MIB, 500 * GIB), "✗ /dev/shm", ("ls -lS /dev/shm",)),
    ("limits", Needs(on_cpu=True, slots=2), shm(100 * MIB), "✗ /dev/shm", ("2 ranks need 132.0 MiB",)),
    # open files follow the data loaders
    ("limits", Needs(workers=4), {"open_files": 1024},
     "! 1024 open files are allowed; a rank may need 5120 → ulimit -n 65536", ()),
    ("limits", NEEDS, {"open_files": 200}, "✗ 200 open files are allowed", ()),
    ("limits", NEEDS, {"open_files": 512, "open_files_hard": 512}, "! 512 open files are allowed",
     ("sudo tee -a /etc/security/limits.conf, and log in again",)),
    ("limits", RUN, {"memlock_bytes": 8 * MIB}, "✗ 8.00 MiB of locked memory is allowed: RDMA cannot", ()),
    # RAM
    ("space", JOB, {"ram_bytes": 100 * GIB},
     "✗ the job needs 154.0 GiB of RAM on each node, which has 100.0 GiB → offload less", ()),
    ("space", JOB, {"available_bytes": 100 * GIB},
     "! the job needs 154.0 GiB of RAM on each node, which has 100.0 GiB free of 1000 GiB", ()),
    # checkpoints: of two, the first goes when the second is there
    ("space", JOB, disk(50),
     "✗ one checkpoint takes 100.0 GiB, and 50.0 GiB are free in /data/out → free some space", ()),
    ("space", JOB, disk(150), "✗ 3 checkpoints that exist at once take 300.0 GiB", ("larger disk",)),
    ("space", JOB, disk(250),
     "✗ 3 checkpoints that exist at once take 300.0 GiB, and 250.0 GiB are free in /data/out → ",
     ("save_total_limit=1",)),
    ("space", KEEPS_ALL, {}, "! /data/out: every checkpoint of 100.0 GiB is kept, and 9 fit", ("save_total_limit=2",)),
    ("space", KEEPS_ALL, disk(250), "! /data/out", ("save_total_limit=1",)),
    ("space", KEEPS_ALL, disk(150), "! /data/out", ("larger disk",)),
    ("space", replace(JOB, hosts=HOSTS, is_first=False), disk(160), "✓ disk: 3 × 50.0 GiB", ()),  # its share
    ("space", JOB, {"unreadable": ("/data/train.jsonl",)}, "✗ /data/train.jsonl cannot be read here", ()),
    ("space", ON_NVME, nvme(100),
     "✗ offloaded states take 400.0 GiB, and 100.0 GiB are free in /nvme → free some space, or name an nvme_path", ()),
    ("space", ON_NVME, nvme(900, is_writable=False), "✗ nvme_path /nvme cannot be written", ()),
    # the network
    ("network", NEEDS, {}, "✓ ", ("leads to the internet; RDMA: mlx5_0-7, 400 Gb/s InfiniBand",
                                  "; on one host no variable is needed")),
    ("network", RUN, WAYS | {"master_is_known": False}, "✗ node0, the host of rank 0, cannot be resolved here", ()),
    ("network", NAMED, WAYS, "✗ NCCL_SOCKET_IFNAME=ib0 matches no interface here that is up: lo, eth0",
     ("→ export NCCL_SOCKET_IFNAME==eth0",)),
    ("network", RUN, WAYS | {"rdma": ()}, "! no RDMA device is up: NCCL goes over TCP at 100 Gb/s", ()),
    ("network", RUN, WAYS | {"rdma": (samples.rdma(state="DOWN"),)}, "! no RDMA device is up (mlx5_0 down)", ()),
    ("network", RUN, WAYS | {"rdma": (samples.rdma("mlx5_0"), samples.rdma("mlx5_1", state="DOWN"),
                                      samples.rdma("eth_x", gbits_per_s=25.0, state="DOWN"))},
     "! RDMA ports down: mlx5_1 → ibstat mlx5_1; check the cable", ()),
    ("network", RUN, WAYS | {"rdma": (samples.rdma(link_layer="Ethernet", interface="eth0"),),
                             "interfaces": (replace(samples.ETH, mtu=1500),)},
     "! MTU 1500 on eth0: RDMA sends small packets over it → sudo ip link set eth0 mtu 9000", ()),
    ("network", RUN, WAYS | {"port_user": "python (77)"}, "! port 29500 is used by python (77)", ()),
    ("network", replace(RUN, environment={"MASTER_PORT": "29501"}), WAYS | {"port_user": "python (77)"},
     "✗ port 29501 (MASTER_PORT) is used", ()),
    # hubs and their caches
    ("online", NEEDS, {"endpoints": {"Hugging Face": SILENT}},
     "! https://huggingface.co cannot be reached: Name or service not known",
     ("HF_ENDPOINT=https://hf-mirror.com", "HF_HUB_OFFLINE=1")),
    ("online", NEEDS, {"endpoints": {"Hugging Face": BAD_CERTIFICATE}}, "! https://huggingface.co",
     ("export SSL_CERT_FILE=",)),
    ("online", NEEDS, {"endpoints": {}, "is_offline": True},
     "✓ Hugging Face is offline (HF_HUB_OFFLINE); only its cache is used; /cache: 900.0 GiB free", ()),
    ("online", Needs(has_job=True, hubs=()), {}, "✓ model and data are local; no hub is needed", ()),
    ("online", NEEDS, cache(5), "! /cache, Hugging Face's cache, has only 5.00 GiB free → export HF_HOME=", ()),
    ("online", NEEDS, cache(500, is_writable=False), "! /cache, Hugging Face's cache, ", ("cannot be written",)),
    ("online", RUN, {"proxies": {"https_proxy": "http://***@proxy:3128"}},
     "! https_proxy=http://***@proxy:3128: also between the hosts → export no_proxy=", ()),
    # SwanLab
    ("online", NEEDS, {}, "✓ SwanLab runs offline, without a key: `swanlab login`", ()),
    ("online", Needs(swanlab_mode="online"), {}, "✗ SwanLab is set to online, but has no key → swanlab login", ()),
    ("online", Needs(environment={"SWANLAB_API_KEY": "***"}),
     {"endpoints": {"SwanLab": replace(SILENT, url="https://api.swanlab.cn")}}, "! ",
     ("→ export SWANLAB_MODE=offline, and later: swanlab sync",)),
    ("online", Needs(environment={"SWANLAB_MODE": "onlin"}), {}, '✗ SwanLab: SWANLAB_MODE is "onlin"', ()),
)
"""Check, needs, what is wrong with the machine, how the one line begins that tells it, and more parts of that line."""
# fmt: on


@pytest.mark.parametrize(("check", "needs", "changes", "line", "parts"), TOLD)
def test_what_is_wrong_is_one_line_with_the_way_out(
    check: str, needs: Needs, changes: dict[str, Any], line: str, parts: tuple[str, ...]
) -> None:
    lines = about(check, needs, **changes)
    assert len([each for each in lines if each.startswith(line) and all(part in each for part in parts)]) == 1, lines


@pytest.mark.parametrize(
    ("check", "needs", "changes", "lines"),
    [
        ("ops", NEEDS, {"built": ("cpu_adam",)}, ["✓ cpu_adam built; fused_adam, async_io can be, on first use"]),
        (
            *("space", JOB, {}),
            ["✓ RAM: 154.0 GiB needed, 900.0 GiB of 1000 GiB free",
             "✓ disk: 3 × 100.0 GiB of checkpoints, 900.0 GiB free"],
        ),
        ("space", NEEDS, {"folders": {}}, []),
        (
            *("network", RUN, WAYS),
            ["✓ eth0 (10.0.0.1, MTU 9000, 100 Gb/s) leads to the other hosts",
             "✓ RDMA: mlx5_0-7, 400 Gb/s InfiniBand", "✓ port 29500 is free for rank 0"],
        ),
    ],
)  # fmt: skip
def test_what_is_fine_is_told_in_numbers(check: str, needs: Needs, changes: dict[str, Any], lines: list[str]) -> None:
    assert about(check, needs, **changes) == lines


@pytest.mark.parametrize(
    ("check", "needs", "changes", "word"),
    [
        ("software", NEEDS, {"gpus": OLD, "torch_cuda": "12.8", "nvcc": None}, "driver"),  # the same major runs
        ("software", ON_CPU, {"torch_cuda": None}, "CUDA"),
        ("ops", CPU_ADAM, {"architectures": "9.0a", "built": ()}, "ARCH_LIST"),
        ("ops", ADAM, {"architectures": "9.0", "built": ()}, "ARCH_LIST"),
        ("ops", NEEDS, {"locks": (Lock(path="/ext/cpu_adam/lock", idle_s=3000, is_built=True),)}, "lock"),
        ("space", JOB, disk(150), "save_total_limit"),
        ("limits", NEEDS, {"open_files": 1024}, "!"),
        ("limits", NEEDS, {"memlock_bytes": 8 * MIB}, "✗"),
    ],
)
def test_what_stands_in_nobodys_way_is_not_told(check: str, needs: Needs, changes: dict[str, Any], word: str) -> None:
    assert word not in " ".join(about(check, needs, **changes))


def test_without_a_compiler_everything_shares_a_line() -> None:
    (found,) = about("ops", ON_CPU, compiler=None, has_ninja=False)
    assert found.endswith("cannot be built: no C++ compiler, no ninja → apt-get install g++; pip install ninja")


@pytest.mark.parametrize("idle_s", [30, 3000])
def test_a_lock_of_an_extension_that_the_job_does_not_need_stops_nothing(idle_s: float) -> None:
    for is_quick in (False, True):
        found = about("ops", Needs(has_job=True, ops=("fused_adam",), is_quick=is_quick), **lock(idle_s))
        assert not any(line.startswith("✗") for line in found)
        assert any("this job does not need it" in line for line in found) == (idle_s == 3000 and not is_quick)
        needed = about("ops", Needs(has_job=True, ops=("cpu_adam",), is_quick=is_quick), **lock(idle_s))
        assert needed[0].startswith("✗" if idle_s == 3000 else "!")
