"""Hosts as schedulers name them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dstrain.errors import InvalidConfig
from dstrain.facts.cluster.host_sources import SOURCES, HostQuery
from dstrain.facts.cluster.hostfile import Hosts, expand


def hosts(source: str, *, text: str | None = None, environment: dict[str, str] | None = None, **asked: Any) -> Hosts:
    def read(path: Path) -> str:
        if text is None:
            raise InvalidConfig(f"{path}: no such file")
        return text

    given = {"file": None, "slots": None, "match": None} | asked
    return SOURCES[source](HostQuery(environment=environment or {}, read=read, **given))


def pairs(found: Hosts) -> list[tuple[str, int]]:
    return [(host.name, host.slots) for host in found.hosts]


@pytest.mark.parametrize(
    ("variables", "slots"),
    [
        ({"SLURM_GPUS_ON_NODE": "8"}, 8),
        ({"SLURM_GPUS_PER_NODE": "4"}, 4),
        ({"SLURM_GPUS_PER_NODE": "h100:2"}, 2),
        ({"SLURM_GPUS_PER_NODE": "gpu:h100:2"}, 2),
    ],
)
def test_slurm_names_its_nodes_and_gpus(variables: dict[str, str], slots: int) -> None:
    found = hosts("slurm", environment={"SLURM_JOB_NODELIST": "gpu[08-10],big1", **variables})
    assert pairs(found) == [("gpu08", slots), ("gpu09", slots), ("gpu10", slots), ("big1", slots)]


DETAILS = """JobId=7 JobName=bash
   NumNodes=2-2 NumCPUs=2 NumTasks=2
   JOB_GRES=gpu:12
     Nodes=node01 CPU_IDs=0 Mem=0 GRES=gpu:8(IDX:0-7)
     Nodes=node02 CPU_IDs=0 Mem=0 GRES=gpu:a100:3(IDX:0,2,4),gpu:v100:1(IDX:7)
"""
TWO = {"SLURM_JOB_NODELIST": "node[01-02]"}


def test_slurm_counts_the_gpus_of_each_node() -> None:
    job = {**TWO, "SLURM_JOB_ID": "7", "SLURM_GPUS": "12", "SLURM_GPUS_ON_NODE": "8"}
    assert pairs(hosts("slurm", environment=job, details=lambda job: DETAILS * (job == "7"))) == [
        ("node01", 8),
        ("node02", 4),
    ]


@pytest.mark.parametrize(
    ("variables", "slots"),
    [
        ({"SLURM_GPUS_PER_NODE": "a100:4,v100:2", "SLURM_GPUS_ON_NODE": "6"}, (6, 6)),
        ({"SLURM_GPUS_PER_TASK": "2", "SLURM_TASKS_PER_NODE": "3,1", "SLURM_GPUS_ON_NODE": "6"}, (6, 2)),
        ({"SLURM_GPUS_PER_TASK": "2", "SLURM_TASKS_PER_NODE": "3(x2)"}, (6, 6)),
        ({"SLURM_GPUS": "16", "SLURM_GPUS_ON_NODE": "8"}, (8, 8)),
        ({"SLURM_GPUS_ON_NODE": "8"}, (8, 8)),
    ],
)
def test_slurm_variables_count_the_gpus_of_each_node(variables: dict[str, str], slots: tuple[int, int]) -> None:
    found = hosts("slurm", environment={**TWO, **variables})
    assert tuple(host.slots for host in found.hosts) == slots


def test_slurm_gpus_of_unequal_nodes_are_not_guessed() -> None:
    with pytest.raises(InvalidConfig, match="no variable says") as caught:
        hosts("slurm", environment={**TWO, "SLURM_GPUS": "12", "SLURM_GPUS_ON_NODE": "8"})
    assert expand(str(caught.value.hint).rpartition(" ")[2], None).num_slots == 12


def test_slurm_without_gpus_says_what_to_ask_for() -> None:
    with pytest.raises(InvalidConfig, match="SLURM_GPUS_ON_NODE") as caught:
        hosts("slurm", environment={"SLURM_JOB_NODELIST": "gpu[08-10]"})
    assert "--gpus-per-node" in str(caught.value.hint)


def test_pbs_counts_the_lines_of_a_host() -> None:
    found = hosts("pbs", text="n1\nn1\nn2\nn2\n", environment={"PBS_NODEFILE": "/var/nodes"})
    assert pairs(found) == [("n1", 2), ("n2", 2)]
    assert found.name == "/var/nodes"


def test_lsf_reads_its_file_or_its_variable() -> None:
    assert pairs(hosts("lsf", environment={"LSB_MCPU_HOSTS": "n1 8 n2 4"})) == [("n1", 8), ("n2", 4)]
    found = hosts("lsf", text="n1\nn1\nn2\n", environment={"LSB_DJOB_HOSTFILE": "/f", "LSB_MCPU_HOSTS": "x 1"})
    assert pairs(found) == [("n1", 2), ("n2", 1)]


def test_open_mpi_and_mpijob_hostfiles_are_read() -> None:
    text = "# head\nn1 slots=8 max_slots=8\nn2  slots = 4 # four\nn3:2\n"
    assert pairs(hosts("openmpi", text=text, file=Path("f"))) == [("n1", 8), ("n2", 4), ("n3", 2)]
    assert pairs(hosts("k8s", text=text)) == [("n1", 8), ("n2", 4), ("n3", 2)]


def test_volcano_names_the_master_first() -> None:
    variables = {"VC_WORKER_HOSTS": "job-worker-0.job,job-worker-1.job", "VC_MASTER_HOSTS": "job-master-0.job"}
    found = hosts("k8s", environment=variables, slots=8)
    assert pairs(found) == [("job-master-0.job", 8), ("job-worker-0.job", 8), ("job-worker-1.job", 8)]


def test_skypilot_lists_addresses() -> None:
    variables = {"SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2\n", "SKYPILOT_NUM_GPUS_PER_NODE": "8"}
    assert pairs(hosts("sky", environment=variables)) == [("10.0.0.1", 8), ("10.0.0.2", 8)]


def test_ssh_hosts_without_wildcards_are_chosen_by_a_pattern() -> None:
    text = "Host *\n  User me\nHost gpu1 gpu2 # two\nhost=login\nHost !bad gpu?\n"
    assert pairs(hosts("ssh-config", text=text, slots=8, match="gpu*")) == [("gpu1", 8), ("gpu2", 8)]
    assert [host.name for host in hosts("ssh-config", text=text, slots=8).hosts] == ["gpu1", "gpu2", "login"]


def test_slots_that_are_said_win() -> None:
    assert pairs(hosts("sky", environment={"SKYPILOT_NODE_IPS": "a", "SKYPILOT_NUM_GPUS_PER_NODE": "8"}, slots=4)) == [
        ("a", 4)
    ]


@pytest.mark.parametrize("source", sorted(SOURCES))
def test_outside_of_its_jobs_a_source_says_so(source: str) -> None:
    with pytest.raises(InvalidConfig):
        hosts(source)


@pytest.mark.parametrize("source", ["ssh-config", "openmpi", "k8s"])
def test_hosts_without_slots_ask_for_them(source: str) -> None:
    with pytest.raises(InvalidConfig, match="does not count GPUs"):
        hosts(source, text="Host a\n" if source == "ssh-config" else "a\n", file=Path("f"))
