"""Tables of `nvidia-smi topo`, read and judged."""

from __future__ import annotations

import pytest

from dstrain.doctor import gpu_checks
from dstrain.doctor import gpu_probes as probe
from dstrain.doctor.requirements import Needs
from tests.doctor import machines, samples
from tests.doctor.samples import facts, said


@pytest.mark.parametrize(
    ("table", "widths"),
    [
        (machines.HGX_H100, {18}),
        (machines.DGX_A100, {12}),
        (machines.DGX_1, {1, 2}),
        (machines.MIXED, set()),
        (machines.TWO_5090, set()),
    ],
    ids=["hgx-h100", "dgx-a100", "dgx-1", "mixed", "two-5090"],
)
def test_the_links_of_a_machine_are_read(table: str, widths: set[int]) -> None:
    found = probe.parse_topology(table)
    assert found is not None
    assert set(gpu_checks.nvlinks(found).values()) == widths


@pytest.mark.parametrize("text", ["", "Failed to initialize NVML", "\tGPU0\tGPU1\tCPU Affinity\nGPU0\t X \n"])
def test_what_is_no_table_is_none(text: str) -> None:
    assert probe.parse_topology(text) is None


DOWN = machines.topo(8, lambda a, b: "NV17" if 5 in (a, b) else "NV18", "00001111")
WITHOUT_NVLINK = Needs(environment={"NCCL_P2P_DISABLE": "1"})


@pytest.mark.parametrize(
    ("table", "p2p", "needs", "line"),
    [
        (machines.HGX_H100, machines.p2p(8, lambda a, b: "OK"), Needs(), "✓ the 8 GPUs are connected by NVLink"),
        (DOWN, "", Needs(), "✗ GPU 5 with 0-4,6-7: 17 NVLinks, elsewhere 18: links are down → nvidia-smi nvlink -s"),
        (
            *(machines.HGX_H100, machines.p2p(8, lambda a, b: "NS" if 3 in (a, b) else "OK"), Needs()),
            "✗ GPU 3 with 0-2,4-7: NVLinks, and no P2P (NS)",
        ),
        (
            *(machines.TWO_5090, machines.TWO_5090_P2P, Needs()),
            "✓ no P2P with GPUs of this kind: NCCL goes through shared memory",
        ),
        (
            *(machines.TWO_5090, machines.p2p(2, lambda a, b: "CNS"), Needs()),
            "! GPU 0-1: no P2P, the chipset does not pass it on: NCCL goes through RAM → turn off IOMMU",
        ),
        (
            *(machines.HGX_H100, "", WITHOUT_NVLINK),
            "! NCCL_P2P_DISABLE=1 keeps NCCL from using NVLink → unset NCCL_P2P_DISABLE",
        ),
        (machines.topo(1, lambda a, b: "", "0"), "", Needs(), None),
    ],
)
def test_what_joins_the_gpus_is_judged(table: str, p2p: str, needs: Needs, line: str | None) -> None:
    found = said(samples.found("topology", facts(topology=probe.parse_topology(table, p2p)), needs))
    assert found == [] if line is None else any(each.startswith(line) for each in found), found
