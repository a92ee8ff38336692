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

    return SOURCES[source](HostQuery(environment=environment or {}, read=read, **asked))


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
    found = hosts("slurm", environment=job, details=lambda job: DETAILS * (job == "7"))
    assert pairs(found) == [("node01", 8), ("node02", 4)]


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


def test_slurm_gpus_that_no_variable_says_are_not_guessed() -> None:
    with pytest.raises(InvalidConfig, match="no variable says") as caught:
        hosts("slurm", environment={**TWO, "SLURM_GPUS": "12", "SLURM_GPUS_ON_NODE": "8"})
    assert expand(str(caught.value.hint).rpartition(" ")[2], None).num_slots == 12
    with pytest.raises(InvalidConfig, match="SLURM_GPUS_ON_NODE") as caught:
        hosts("slurm", environment={"SLURM_JOB_NODELIST": "gpu[08-10]"})
    assert "--gpus-per-node" in str(caught.value.hint)


MPI = "# head\nn1 slots=8 max_slots=8\nn2  slots = 4 # four\nn3:2\n"
SSH = "Host *\n  User me\nHost gpu1 gpu2 # two\nhost=login\nHost !bad gpu?\n"
VOLCANO = {"VC_WORKER_HOSTS": "job-worker-0.job,job-worker-1.job", "VC_MASTER_HOSTS": "job-master-0.job"}
SKY = {"SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2\n", "SKYPILOT_NUM_GPUS_PER_NODE": "8"}


@pytest.mark.parametrize(
    ("source", "given", "found"),
    [
        ("pbs", {"text": "n1\nn1\nn2\nn2\n", "environment": {"PBS_NODEFILE": "/var/nodes"}}, [("n1", 2), ("n2", 2)]),
        ("lsf", {"environment": {"LSB_MCPU_HOSTS": "n1 8 n2 4"}}, [("n1", 8), ("n2", 4)]),
        (
            "lsf",
            {"text": "n1\nn1\nn2\n", "environment": {"LSB_DJOB_HOSTFILE": "/f", "LSB_MCPU_HOSTS": "x 1"}},
            [("n1", 2), ("n2", 1)],
        ),
        ("openmpi", {"text": MPI, "file": Path("f")}, [("n1", 8), ("n2", 4), ("n3", 2)]),
        ("k8s", {"text": MPI}, [("n1", 8), ("n2", 4), ("n3", 2)]),
        (
            "k8s",  # Volcano names the master first
            {"environment": VOLCANO, "slots": 8},
            [("job-master-0.job", 8), ("job-worker-0.job", 8), ("job-worker-1.job", 8)],
        ),
        ("sky", {"environment": SKY}, [("10.0.0.1", 8), ("10.0.0.2", 8)]),
        ("sky", {"environment": SKY, "slots": 4}, [("10.0.0.1", 4), ("10.0.0.2", 4)]),  # what is said wins
        ("ssh-config", {"text": SSH, "slots": 8, "match": "gpu*"}, [("gpu1", 8), ("gpu2", 8)]),
        ("ssh-config", {"text": SSH, "slots": 8}, [("gpu1", 8), ("gpu2", 8), ("login", 8)]),
    ],
)
def test_a_source_names_its_hosts(source: str, given: dict[str, Any], found: list[tuple[str, int]]) -> None:
    assert pairs(hosts(source, **given)) == found


@pytest.mark.parametrize("source", sorted(SOURCES))
def test_outside_of_its_jobs_a_source_says_so(source: str) -> None:
    with pytest.raises(InvalidConfig):
        hosts(source)


@pytest.mark.parametrize("source", ["ssh-config", "openmpi", "k8s"])
def test_hosts_without_slots_ask_for_them(source: str) -> None:
    with pytest.raises(InvalidConfig, match="does not count GPUs"):
        hosts(source, text="Host a\n" if source == "ssh-config" else "a\n", file=Path("f"))
