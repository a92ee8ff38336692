"""Several hosts, compared."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from dstrain.cli.output.doctor import of_hosts
from dstrain.doctor.facts import Facts, Folder, Gpus
from dstrain.doctor.gpu_probes import parse_nvidia_smi as parse
from dstrain.doctor.hosts import Answer, interfaces, judged, unfit
from dstrain.doctor.requirements import bare
from dstrain.facts.cluster.hostfile import Hosts, expand
from dstrain.findings import Severity
from dstrain.launch.remote import Obstacle, Refusal, refusal
from tests.doctor import samples
from tests.doctor.machines import smi_xml
from tests.doctor.samples import facts, said

HOSTS: Hosts = expand("node[0-2]:8", None)
NEEDS = bare({}, HOSTS)
BUSY = {"fb_memory_usage/used": "22437 MiB"}
OUTPUT = Folder(path="/out", free_bytes=9 * 2**30, is_writable=True)
WAYS = {each.name: "10.0.0.1" for each in HOSTS.hosts}


def alike() -> Facts:
    return facts(network=samples.network(routes=WAYS))


def answers(*found: Facts | Refusal, skew_s: float = 0.0) -> list[Answer]:
    return [
        Answer(host=host, refusal=each) if isinstance(each, Refusal) else Answer(host=host, facts=each, skew_s=skew_s)
        for host, each in zip(HOSTS.hosts, found, strict=True)
    ]


SILENT = Refusal(obstacle=Obstacle.TIMEOUT, text="no answer within 7 s")


def worse(found: list[Answer], host: str) -> list[str]:
    return said([each for each in judged(found, NEEDS)[host] if each.severity is not Severity.OK])


def test_hosts_that_are_alike_have_nothing_to_tell_but_the_interface_that_run_sets() -> None:
    found = judged(answers(*[alike()] * 3), NEEDS)
    assert all(each.severity is Severity.OK for findings in found.values() for each in findings)
    wanted = "✓ dstrain run sets NCCL_SOCKET_IFNAME==eth0 GLOO_SOCKET_IFNAME=eth0"
    assert said(found["node0"])[-1] == wanted


def test_another_version_is_an_error_and_another_driver_a_warning() -> None:
    other = replace(
        alike(),
        software=samples.software(same={"Python": "3.12.4", "torch": "2.12.0", "dstrain": "0.1"}),
        gpus=Gpus(has_driver=True, driver="550.54", cuda="12.8", gpus=alike().gpus.gpus),  # type: ignore[union-attr]
    )
    found = worse(answers(alike(), alike(), other), "node2")
    assert found[0].startswith("✗ torch is 2.12.0; most hosts have 2.13.0")
    assert found[1].startswith("! driver 550.54; most hosts have 570.158.01")


def test_a_clock_that_is_off_is_a_warning() -> None:
    found = answers(alike(), alike(), alike())
    found[1] = replace(found[1], skew_s=42.0)
    assert worse(found, "node1")[0].startswith("! its clock is +42 s off")


def test_another_mtu_and_fewer_rdma_ports_are_told() -> None:
    slow = samples.network(routes=WAYS, interfaces=(replace(samples.ETH, mtu=1500),), rdma=(samples.rdma(),))
    found = worse(answers(alike(), alike(), facts(network=slow)), "node2")
    assert found[0].startswith("! MTU 1500; most hosts have 9000")
    assert found[1].startswith("! RDMA: 1 ports, 400 Gb/s together; most hosts have 8 ports, 3200 Gb/s together")


def test_another_interface_is_told_with_what_to_type() -> None:
    other = samples.network(routes=WAYS, interfaces=(replace(samples.ETH, name="ens3"),))
    found = answers(alike(), alike(), facts(network=other))
    assert interfaces(found) == {"node0": "eth0", "node1": "eth0", "node2": "ens3"}
    assert worse(found, "node0")[0].endswith("export NCCL_SOCKET_IFNAME==eth0,ens3")


def test_a_host_that_cannot_be_asked_says_what_to_type() -> None:
    found = answers(alike(), SILENT, refusal(255, "me@node2: Permission denied (publickey)."))
    assert worse(found, "node1") == [
        "✗ no answer within 7 s → ssh node1 true  shows what is wrong; or remove its line from the hostfile"
    ]
    assert worse(found, "node2")[0].endswith("→ ssh-copy-id node2")


def test_what_all_hosts_have_is_told_once() -> None:
    small = replace(alike(), limits=samples.limits(open_files=512, open_files_hard=4096))
    odd = replace(small, network=samples.network(routes=WAYS, rdma=()))
    told = of_hosts(judged(answers(small, small, odd), NEEDS), {"NCCL_SOCKET_IFNAME": "=eth0"}, verbose=False)
    text = "\n".join(told)
    assert text.count("512 open files are allowed") == 1
    assert told[0].startswith("! node0  ")
    assert told[3] == "✓ dstrain run sets NCCL_SOCKET_IFNAME==eth0"
    assert told.index("every host") < told.index("node2")
    assert "node1" not in told


def test_a_silent_host_does_not_hide_what_the_others_have_in_common() -> None:
    small = replace(alike(), limits=samples.limits(open_files=512, open_files_hard=4096))
    told = of_hosts(judged(answers(small, SILENT, small), NEEDS), {}, verbose=False)
    assert "every host that answers" in told
    assert "\n".join(told).count("512 open files are allowed") == 1


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({}, []),
        ({"gpus": Gpus(has_driver=False, has_tool=False)}, ["no NVIDIA GPU here"]),
        ({"gpus": Gpus(has_driver=True, has_tool=False)}, ["nvidia-smi is not installed"]),
        ({"gpus": parse(smi_xml(*[{}] * 7))}, ["8 slots, but only 7 GPUs"]),
        ({"gpus": parse(smi_xml(*[{}] * 8, BUSY))}, []),  # a ninth GPU, which the run does not use
        ({"gpus": parse(smi_xml(*[{}] * 7, BUSY))}, ["GPU 7: in use"]),
        ({"gpus": parse(smi_xml(*[{}] * 7, {"ecc_mode/current_ecc": "Disabled"}))}, []),
        ({"software": samples.software(same={"Python": "3.12.4", "torch": "2.12.0", "dstrain": "0.1"})}, ["torch is"]),
        ({"space": samples.space(unreadable=("/data",))}, ["/data cannot be read"]),
        ({"space": samples.space(folders={"output": OUTPUT})}, ["/out: only 9"]),
    ],
)
def test_a_host_is_unfit_if_it_cannot_take_its_part(change: dict[str, Any], words: list[str]) -> None:
    problems = unfit(answers(alike(), alike(), replace(alike(), **change)), NEEDS)
    assert problems["node0"] == problems["node1"] == []
    assert len(problems["node2"]) == len(words), problems
    assert all(problem.startswith(start) for problem, start in zip(problems["node2"], words, strict=True)), problems


def test_a_host_with_another_clock_or_without_an_answer_is_unfit() -> None:
    late = answers(alike(), alike(), SILENT)
    late[1] = replace(late[1], skew_s=42.0)
    expected = {"node0": [], "node1": ["its clock is +42 s off"], "node2": ["no answer within 7 s"]}
    assert unfit(late, NEEDS) == expected


@pytest.mark.parametrize(
    ("code", "errors", "obstacle", "fix"),
    [
        (255, "ssh: Could not resolve hostname node2: Name or service not known", Obstacle.NAME, "write node2 into"),
        (255, "Host key verification failed.", Obstacle.HOST_KEY, "ssh-keyscan -H node2 >>"),
        (127, "env: /x/python: No such file or directory", Obstacle.PYTHON, "ssh node2 true"),
        (1, "ModuleNotFoundError: No module named 'dstrain.doctor'", Obstacle.DSTRAIN, "install the same dstrain"),
        (1, "Warning: Permanently added 'node2'.\n", Obstacle.OTHER, "ssh node2 true"),
    ],
)
def test_the_fix_follows_from_why_a_host_refused(code: int, errors: str, obstacle: Obstacle, fix: str) -> None:
    reason = refusal(code, errors)
    assert reason.obstacle is obstacle
    (line,) = worse(answers(alike(), alike(), reason), "node2")
    assert line.startswith(f"✗ {reason.text} → {fix}")
