"""GPUs: the table, names as people type them, names as NVML reports them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dstrain.errors import InvalidConfig
from dstrain.facts.cluster.cluster import LINKS
from dstrain.facts.cluster.gpu_table import ROWS, Row
from dstrain.facts.cluster.gpus import GPUS, Chip, Gpu, from_nvml, gpu
from dstrain.records import from_data, to_data


@pytest.mark.parametrize("name", GPUS)
def test_every_row_is_whole(name: str) -> None:
    row = GPUS[name]
    assert row.name == name
    assert row.link in LINKS
    assert row.host_link in LINKS
    assert "http" in row.source or name in {"cpu", "h20-141g", "l20"}
    assert row.has_bf16 or row.compute_capability < (8, 0)
    assert 0 < row.attention_ratio <= row.gemm_ratio < 1
    assert name == "cpu" or 1e9 < row.hbm_bytes_per_s < 1e13
    assert name == "cpu" or row.fp32_flops_per_s > 0
    assert name == "cpu" or 4_000 < row.memory_mib < 300_000
    assert name == "cpu" or 9e12 < row.fp16_flops_per_s < 3e15
    assert row.bf16_flops_per_s in (row.fp16_flops_per_s, 0)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.names[0])
def test_peaks_are_those_of_multiprocessors_and_clock(row: Row) -> None:
    """A data sheet's products in half precision are at its boost clock; Hopper's CUDA cores are faster than that."""
    at_the_clock = 1e-6 * row.sms * row.mhz
    assert row.half == pytest.approx(at_the_clock * row.make.half, rel=0.03)
    assert row.fp32 == pytest.approx(at_the_clock * row.make.fp32, rel=0.21)
    assert len(row.make.source) > 10


@pytest.mark.parametrize(
    ("name", "fp32"),
    [
        *(("rtx-2060-super", 7.2), ("rtx-2080-ti", 13.4), ("rtx-3050", 9.1), ("rtx-3060", 12.7), ("rtx-3060-ti", 16.2)),
        *(("rtx-3070", 20.3), ("rtx-3080", 29.8), ("rtx-3080-ti", 34.1), ("rtx-3090-ti", 40), ("rtx-4060", 15.1)),
        *(("rtx-4060-ti", 22.1), ("rtx-4070", 29.1), ("rtx-4070-ti-super", 44.1), ("rtx-4080", 48.7)),
        *(("rtx-5070", 30.9), ("rtx-5070-ti", 43.9), ("rtx-5080", 56.3), ("rtx-a4000", 19.2), ("rtx-4500-ada", 39.6)),
    ],
)
def test_cards_have_the_fp32_of_their_pages(name: str, fp32: float) -> None:
    assert gpu(name).fp32_flops_per_s == pytest.approx(fp32 * 1e12, rel=0.01)


def test_no_two_rows_answer_to_one_name() -> None:
    names = [name for row in GPUS.values() for name in (row.name, *row.aliases)]
    assert len(names) == len(set(names))
    for row in GPUS.values():
        assert {gpu(name).name for name in (row.name, *row.aliases)} == {row.name}


def test_the_peaks_are_dense_and_those_of_geforce_with_fp32_accumulation() -> None:
    peaks = {"h100-sxm": 989.4, "a100-80g": 312, "l4": 121, "3090": 71, "4090": 165.2, "5090": 209.5}
    assert {name: gpu(name).bf16_flops_per_s / 1e12 for name in peaks} == peaks


def test_bf16_begins_with_compute_capability_8() -> None:
    for row in GPUS.values():
        if row.name != "cpu" and row.compute_capability > (0, 0):
            assert row.has_bf16 == row.has_flash_attention_2 == (row.compute_capability >= (8, 0)), row.name


def test_a_cpu_has_fp32_only_and_no_known_speed() -> None:
    row = gpu("cpu")
    assert (row.has_bf16, row.fp16_flops_per_s, row.has_flash_attention_2) == (False, 0, False)
    assert (row.fp32_flops_per_s, row.hbm_bytes_per_s) == (0, 0)


def test_memory_is_counted_as_nvidia_smi_does_and_what_is_measured_replaces_it() -> None:
    assert gpu("a100-80g").memory_bytes == 80 * 2**30
    assert gpu("h100-sxm").memory_bytes == 81559 * 2**20
    assert from_nvml("NVIDIA A10", 0).memory_mib == 23028
    assert from_nvml("NVIDIA A10", 24564).memory_mib == 24564, "with ECC off"


@pytest.mark.parametrize(
    ("typed", "name"),
    [
        ("a100", "a100-80g"),
        ("A100-80GB", "a100-80g"),
        ("a100 40g", "a100-40g"),
        ("H100", "h100-sxm"),
        ("h100_pcie", "h100-pcie"),
        ("4090", "rtx-4090"),
        ("RTX4090", "rtx-4090"),
        ("GeForce RTX 3090", "rtx-3090"),
        ("v100", "v100-32g"),
        ("MI300X", "mi300x"),
        ("none", "cpu"),
        ("3060", "rtx-3060"),
        ("rtx3060", "rtx-3060"),
        ("RTX 3060 Laptop GPU", "rtx-3060-laptop"),
        ("4090-laptop", "rtx-4090-laptop"),
        ("3060-8g", "rtx-3060-8g"),
        ("3060 12GB", "rtx-3060"),
        ("4060ti-16g", "rtx-4060-ti-16g"),
        ("2080ti", "rtx-2080-ti"),
        ("a5000", "rtx-a5000"),
        ("pro 4500", "rtx-pro-4500"),
        ("GB300", "gb300"),
    ],
)
def test_names_are_taken_as_people_type_them(typed: str, name: str) -> None:
    assert gpu(typed).name == name


@pytest.mark.parametrize(("typed", "near"), [("h1000", "h100-sxm"), ("a100-80x", "a100-80g"), ("rtx-4009", "rtx-4090")])
def test_a_misspelt_gpu_gets_the_nearest(typed: str, near: str) -> None:
    with pytest.raises(InvalidConfig, match=f'"{typed}" is not a GPU') as caught:
        gpu(typed)
    assert caught.value.hint == f'Did you mean "{near}"?'


@pytest.mark.parametrize("typed", ["voodoo2", "", "nvidia", "6070", "rtx-9999", "c300"])
def test_a_strange_gpu_gets_all_of_them(typed: str) -> None:
    with pytest.raises(InvalidConfig) as caught:
        gpu(typed)
    assert caught.value.hint == "Known: " + ", ".join(GPUS)


@pytest.mark.parametrize(
    ("reported", "name"),
    [
        ("NVIDIA A100-SXM4-80GB", "a100-80g"),
        ("NVIDIA A100-SXM4-40GB", "a100-40g"),
        ("NVIDIA A100 80GB PCIe", "a100-80g-pcie"),
        ("NVIDIA A100-PCIE-40GB", "a100-40g-pcie"),
        ("A100-SXM4-40GB", "a100-40g"),
        ("NVIDIA A800-SXM4-80GB", "a800-80g"),
        ("NVIDIA A800 80GB PCIe", "a800-80g-pcie"),
        ("NVIDIA H100 80GB HBM3", "h100-sxm"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA H100 NVL", "h100-nvl"),
        ("NVIDIA H800", "h800"),
        ("NVIDIA H20", "h20"),
        ("NVIDIA H20-3e", "h20-141g"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA GH200 480GB", "gh200"),
        ("NVIDIA B200", "b200"),
        ("NVIDIA B300 SXM6 AC", "b300"),
        ("NVIDIA A10G", "a10g"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA L40", "l40"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA L20", "l20"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("NVIDIA GeForce RTX 4090 D", "rtx-4090-d"),
        ("NVIDIA RTX A6000", "rtx-a6000"),
        ("NVIDIA RTX 6000 Ada Generation", "rtx-6000-ada"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "rtx-pro-6000"),
        ("Tesla V100-SXM2-32GB", "v100-32g"),
        ("Tesla V100-PCIE-16GB", "v100-16g-pcie"),
        ("Tesla T4", "t4"),
        ("AMD Instinct MI300X", "mi300x"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "rtx-4090-laptop"),
        ("NVIDIA GeForce RTX 3050 6GB Laptop GPU", "rtx-3050-laptop-6g"),
        ("NVIDIA GeForce RTX 2070 with Max-Q Design", "rtx-2070-max-q"),
        ("NVIDIA RTX A2000 12GB", "rtx-a2000-12g"),
        ("NVIDIA RTX 4000 Ada Generation", "rtx-4000-ada"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "rtx-pro-6000-workstation"),
        ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", "rtx-pro-6000-max-q"),
        ("NVIDIA GB200", "gb200"),
    ],
)
def test_reported_names_find_their_row(reported: str, name: str) -> None:
    assert from_nvml(reported, 12345).name == name


@pytest.mark.parametrize(
    ("reported", "memory_mib", "name"),
    [
        ("NVIDIA GeForce RTX 3060", 12288, "rtx-3060"),
        ("NVIDIA GeForce RTX 3060", 8192, "rtx-3060-8g"),
        ("NVIDIA GeForce RTX 4060 Ti", 16380, "rtx-4060-ti-16g"),
        ("NVIDIA GeForce RTX 2060", 12288, "rtx-2060-12g"),
        ("NVIDIA GeForce RTX 3080 Laptop GPU", 16384, "rtx-3080-laptop-16g"),
    ],
)
def test_of_cards_with_one_name_the_memory_tells(reported: str, memory_mib: int, name: str) -> None:
    assert from_nvml(reported, memory_mib).name == name


@pytest.mark.parametrize(
    "reported",
    ["NVIDIA GeForce RTX 4090 Ti", "NVIDIA L20X", "GRID A100X-40C", "NVIDIA A100-SXM4-80GB MIG 1g.10gb"],
)
def test_a_card_of_another_kind_is_not_taken_for_its_namesake(reported: str) -> None:
    found = from_nvml(reported, 16376)
    assert (found.name, found.memory_mib, found.is_listed) == (reported, 16376, False)


def test_a_gpu_that_is_not_in_the_table_has_its_memory_and_no_invented_speed() -> None:
    found = from_nvml("NVIDIA Future X", 100_000)
    assert (found.memory_mib, found.bf16_flops_per_s, found.has_bf16) == (100_000, 0, False)


@pytest.mark.parametrize(
    ("row", "chip"),
    [
        ("a100-80g", (6912, 1410, 1593, 5120)),
        ("v100-32g", (5120, 1530, 877, 4096)),
        ("t4", (2560, 1590, 5001, 256)),
        ("a10", (9216, 1695, 6251, 384)),
        ("rtx-3090", (10496, 1695, 9751, 384)),
        ("rtx-4090", (16384, 2520, 10501, 384)),
        ("rtx-5090", (21760, 2407, 14001, 512)),
    ],
)
def test_speed_from_cores_and_clocks_is_that_of_the_data_sheets(row: str, chip: tuple[int, int, int, int]) -> None:
    listed, (cores, clock, memory, bus) = gpu(row), chip
    figures = Chip(
        num_cores=cores,
        sm_clock_mhz=clock,
        memory_clock_mhz=memory,
        memory_bus_bits=bus,
        compute_capability=listed.compute_capability,
    )
    kind = "" if listed.has_peer_access else " GeForce"
    found = from_nvml(f"NVIDIA{kind} {row} Plus", listed.memory_mib, figures)
    assert (found.is_listed, found.num_multiprocessors) == (False, listed.num_multiprocessors)
    for name in ("fp32_flops_per_s", "fp16_flops_per_s", "bf16_flops_per_s", "hbm_bytes_per_s"):
        assert getattr(found, name) == pytest.approx(getattr(listed, name), rel=0.02), name
    assert (found.has_bf16, found.has_flash_attention_2) == (listed.has_bf16, listed.has_flash_attention_2)


def test_an_unlisted_gpu_is_the_nearest_of_its_generation_scaled() -> None:
    """Half the multiprocessors and memory of an RTX 5080, at four fifths of its clock."""
    near = gpu("rtx-5080")
    chip = Chip(
        num_cores=5376, sm_clock_mhz=2094, memory_clock_mhz=7501, memory_bus_bits=256, compute_capability=(12, 0)
    )
    found = from_nvml("NVIDIA GeForce RTX 5065", 8151, chip)
    assert (found.like, found.num_multiprocessors, found.memory_mib) == ("rtx-5070", 42, 8151)
    assert found.bf16_flops_per_s == pytest.approx(0.4 * near.bf16_flops_per_s, rel=0.01)
    assert found.hbm_bytes_per_s == pytest.approx(0.5 * near.hbm_bytes_per_s, rel=0.01)
    laptop = from_nvml("NVIDIA GeForce RTX 5065 Laptop GPU", 8151, chip)
    assert GPUS[laptop.like].name.endswith("-laptop")
    board = from_nvml("NVIDIA RTX PRO 2000 Blackwell", 16311, replace(chip, num_cores=4352))
    assert (board.like, board.has_peer_access) == ("rtx-pro-4000", True)


def test_a_gpu_of_a_later_generation_is_like_the_last_of_the_table_and_an_older_one_has_no_tensor_cores() -> None:
    chip = Chip(
        num_cores=2560, sm_clock_mhz=1733, memory_clock_mhz=5005, memory_bus_bits=256, compute_capability=(6, 1)
    )
    older = from_nvml("NVIDIA GeForce GTX 1080", 8192, chip)
    later = from_nvml("NVIDIA GeForce RTX 6090", 49152, replace(chip, compute_capability=(13, 0)))
    assert (older.fp16_flops_per_s, older.like) == (0, "")
    assert older.fp32_flops_per_s == pytest.approx(8.87e12, rel=0.01)
    assert later.bf16_flops_per_s == pytest.approx(2 * later.fp32_flops_per_s, rel=0.01)


def test_a_record_of_an_earlier_release_has_what_kernels_reach_on_its_row() -> None:
    record = to_data(gpu("4090"))
    for name in ("like", "scaled_multiprocessors"):
        del record[name]
    found = from_data(Gpu, record, locate=str)
    assert (found.gemm_ratio, found.cache_mib, found.num_multiprocessors) == (0.95, 72, 128)


@pytest.mark.parametrize(
    ("name", "link"),
    [
        *(("a100-80g", "pcie4"), ("h100-sxm", "pcie5"), ("gh200", "nvlink4"), ("v100-32g", "pcie3")),
        *(("rtx-4090", "pcie4"), ("rtx-4060-ti", "pcie4x8"), ("rtx-5060-ti", "pcie5x8"), ("mi300x", "pcie5")),
    ],
)
def test_a_gpu_reaches_its_host_by_its_generations_link(name: str, link: str) -> None:
    assert gpu(name).host_link == link
