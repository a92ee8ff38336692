"""Tables of `nvidia-smi topo`, read, drawn and judged."""

from __future__ import annotations

import pytest

from dstrain.doctor import topology, topology_drawing
from dstrain.doctor.checks import topology as check
from dstrain.doctor.requirements import Needs
from tests.doctor import machines
from tests.doctor.samples import facts, said

BEHIND = "(─ behind one PCIe switch, · through the CPU)"


@pytest.mark.parametrize(
    ("table", "picture"),
    [
        (
            machines.HGX_H100,
            [
                "NVLink  GPU 0-7, every pair by 18 links",
                "NUMA 0  GPU0─mlx5_0 · GPU1─mlx5_1 · GPU2─mlx5_2 · GPU3─mlx5_5",
                "NUMA 1  GPU4─mlx5_6 · GPU5─mlx5_7 · GPU6─mlx5_8 · GPU7─mlx5_9",
                "far     mlx5_3 · mlx5_4",
                f"        {BEHIND}",
            ],
        ),
        (
            machines.DGX_A100,
            [
                "NVLink  GPU 0-7, every pair by 12 links",
                "NUMA 1  GPU2,3─mlx5_2-3",
                "NUMA 3  GPU0,1─mlx5_0-1",
                "NUMA 5  GPU6,7─mlx5_8-9",
                "NUMA 7  GPU4,5─mlx5_6-7",
                "far     mlx5_4 · mlx5_5 · mlx5_10 · mlx5_11",
                f"        {BEHIND}",
            ],
        ),
        (
            machines.DGX_1,
            [
                "NVLink  0→1-2×1 3-4×2; 1→3×1 2,5×2; 2→3×1 6×2; 3→7×2; 4→5-6×1 7×2; 5→7×1",
                "        6×2; 6→7×1",
                "NUMA 0  GPU0 · GPU1 · GPU2 · GPU3",
                "NUMA 1  GPU4 · GPU5 · GPU6 · GPU7",
                "        (a→b×n: n links from GPU a to GPU b)",
            ],
        ),
        (machines.MIXED, ["NVLink  none", "NUMA 0  GPU1 · GPU2 · GPU3 · GPU4", "NUMA 1  GPU0"]),
        (machines.TWO_5090, ["NVLink  none", "NUMA 0  GPU0 · GPU1"]),
    ],
    ids=["hgx-h100", "dgx-a100", "dgx-1", "mixed", "two-5090"],
)
def test_a_machine_is_drawn_in_a_few_lines(table: str, picture: list[str]) -> None:
    found = topology.parse(table)
    assert found is not None
    assert topology_drawing.draw(found) == picture


def test_pairs_with_a_bridge_are_told_apart() -> None:
    table = machines.topo(4, lambda a, b: "NV4" if a // 2 == b // 2 else "SYS", "0011")
    found = topology.parse(table)
    assert found is not None
    assert topology_drawing.nvlink_text(found) == "GPU 0-1, every pair by 4 links; GPU 2-3, every pair by 4 links"


@pytest.mark.parametrize("text", ["", "Failed to initialize NVML", "\tGPU0\tGPU1\tCPU Affinity\nGPU0\t X \n"])
def test_what_is_no_table_is_none(text: str) -> None:
    assert topology.parse(text) is None


def judged(table: str, p2p: str = "", needs: Needs | None = None) -> list[str]:
    return said(check.check(facts(topology=topology.parse(table, p2p)), needs or Needs()))


def test_a_whole_machine_is_one_line() -> None:
    assert judged(machines.HGX_H100, machines.p2p(8, lambda a, b: "OK")) == ["✓ the 8 GPUs are connected by NVLink"]


def test_links_that_are_down_are_an_error() -> None:
    table = machines.topo(8, lambda a, b: "NV17" if 5 in (a, b) else "NV18", "00001111")
    found = judged(table)
    assert found[1].startswith("✗ GPU 5 with 0-4,6-7: 17 NVLinks, elsewhere 18: links are down → nvidia-smi nvlink -s")


def test_a_gpu_that_lost_its_peers_is_an_error() -> None:
    found = judged(machines.HGX_H100, machines.p2p(8, lambda a, b: "NS" if 3 in (a, b) else "OK"))
    assert "✗ GPU 3 with 0-2,4-7: NVLinks, and no P2P (NS)" in found[1]


def test_gpus_that_never_have_p2p_are_no_fault() -> None:
    found = judged(machines.TWO_5090, machines.TWO_5090_P2P)
    assert found[1] == "✓ no P2P with GPUs of this kind: NCCL goes through shared memory"


def test_a_chipset_that_forbids_p2p_is_a_warning_with_a_fix() -> None:
    found = judged(machines.TWO_5090, machines.p2p(2, lambda a, b: "CNS"))
    assert found[1].startswith(
        "! GPU 0-1: no P2P, the chipset does not pass it on: NCCL goes through RAM → turn off IOMMU"
    )


def test_a_variable_that_turns_nvlink_off_is_told() -> None:
    found = judged(machines.HGX_H100, needs=Needs(environment={"NCCL_P2P_DISABLE": "1"}))
    assert "! NCCL_P2P_DISABLE=1 keeps NCCL from using NVLink → unset NCCL_P2P_DISABLE" in found


def test_one_gpu_has_no_topology() -> None:
    assert judged(machines.topo(1, lambda a, b: "", "0")) == []
