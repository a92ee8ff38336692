"""What nvidia-smi says of GPUs, read and judged."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from dstrain.doctor import gpu_probes as probe
from dstrain.doctor.facts import Gpus
from dstrain.doctor.requirements import Needs
from tests.doctor import samples
from tests.doctor.machines import smi_xml
from tests.doctor.samples import HOSTS, facts, said

NEEDS = Needs()


def judged(*differences: Mapping[str, str], needs: Needs = NEEDS, **versions: str) -> list[str]:
    return said(samples.found("gpus", facts(gpus=probe.parse_nvidia_smi(smi_xml(*differences, **versions))), needs))


def test_healthy_gpus_are_one_line() -> None:
    assert judged(*[{}] * 8) == ["✓ 8 × NVIDIA H100 80GB HBM3, driver 570.158.01 (CUDA up to 12.8)"]


@pytest.mark.parametrize(
    ("difference", "line"),
    [
        ({"ecc_errors/volatile/dram_uncorrectable": "2"}, "✗ GPU 1: 2 uncorrectable memory errors since the driver"),
        ({"ecc_errors/volatile/sram_uncorrectable_parity": "1"}, "✗ GPU 1: 1 uncorrectable memory errors since"),
        ({"ecc_errors/volatile/double_bit/total": "3"}, "✓"),  # where the newer counts are, they hold
        ({"ecc_errors/aggregate/dram_uncorrectable": "71"}, "! GPU 1: uncorrectable memory errors in the past (71)"),
        ({"remapped_rows/remapped_row_pending": "Yes"}, "✗ GPU 1: bad memory that the next reset repairs"),
        ({"remapped_rows/remapped_row_failure": "Yes"}, "✗ GPU 1: bad memory that cannot be repaired"),
        ({"retired_pages/pending_retirement": "Yes"}, "✗ GPU 1: bad memory that the next reset repairs"),
        ({"gpu_recovery_action": "Drain and Reset"}, '✗ GPU 1: the driver asks for "Drain and Reset"'),
        ({"gpu_reset_status/reset_required": "Yes"}, '✗ GPU 1: the driver asks for "Reset"'),
        ({"fabric/state": "In Progress"}, '✗ GPU 1: the NVSwitch fabric is "In Progress"'),
        ({"compute_mode": "Prohibited"}, "✗ GPU 1: the compute mode prohibits"),
        ({"mig_mode/current_mig": "Enabled"}, "! GPU 1: cut into slices (MIG)"),
        ({"ecc_mode/current_ecc": "Disabled"}, "! GPU 1: ECC is off"),
        ({"ecc_mode/current_ecc": "Disabled", "product_name": "NVIDIA RTX A5000"}, "!"),  # ECC is off there by default
        (
            {"clocks_event_reasons/clocks_event_reason_hw_thermal_slowdown": "Active", "temperature/gpu_temp": "88 C"},
            "! GPU 1: throttled: hw thermal slowdown at 88 °C",
        ),
        (
            {"clocks_throttle_reasons/clocks_throttle_reason_hw_power_brake_slowdown": "Active"},
            "! GPU 1: throttled: hw power brake slowdown",
        ),
        ({"clocks_event_reasons/clocks_event_reason_sw_power_cap": "Active"}, "✓"),
        ({"gpu_power_readings/current_power_limit": "500.00 W"}, "! GPU 1: power limit 500 W, by default 700 W"),
        ({"pci/pci_gpu_link_info/link_widths/current_link_width": "8x"}, "! GPU 1: PCIe runs on 8 of 16 lanes"),
        ({"persistence_mode": "Disabled"}, "! GPU 1: persistence mode is off"),
        ({"fb_memory_usage/used": "22437 MiB"}, "! GPU 1: in use: 21.9 GiB"),
    ],
)
def test_a_fault_is_told_with_the_gpu_that_has_it(difference: Mapping[str, str], line: str) -> None:
    assert judged({}, difference)[-1].startswith(line)


def test_the_fix_names_the_gpus() -> None:
    hot = {"gpu_power_readings/current_power_limit": "300.00 W"}
    found = judged({}, hot, hot)
    assert found[1].startswith("! GPU 1-2: power limit 300 W, by default 700 W → sudo nvidia-smi -i 1,2 -pl 700")


def test_what_one_reset_mends_is_one_line() -> None:
    bad = {"ecc_errors/volatile/dram_uncorrectable": "32", "gpu_recovery_action": "Reset"}
    found = judged({}, bad)
    assert len(found) == 2
    assert 'cannot be trusted; the driver asks for "Reset" → sudo nvidia-smi --gpu-reset -i 1' in found[1]


def test_a_bad_gpu_that_no_run_uses_stops_none() -> None:
    bad = {"gpu_recovery_action": "Reset"}
    found = judged({}, bad, needs=Needs(environment={"CUDA_VISIBLE_DEVICES": "0"}))
    assert found[-1].startswith('! GPU 1: the driver asks for "Reset"')


def test_programs_on_a_gpu_are_named_and_the_screen_is_not() -> None:
    processes = (
        "<process_info><pid>4937</pid><type>C</type><process_name>/bin/python train.py</process_name></process_info>"
        "<process_info><pid>99</pid><type>G</type><process_name>/usr/lib/xorg/Xorg</process_name></process_info>"
    )
    found = judged({"fb_memory_usage/used": "9216 MiB", "processes": processes})
    assert found[1].startswith("! GPU 0: in use: 9.0 GiB by python (4937) →")


def test_fewer_gpus_than_slots_is_an_error() -> None:
    found = judged(*[{}] * 7, needs=Needs(hosts=HOSTS, slots=8))
    assert "✗ 8 slots, but only 7 GPUs → write slots=7 into the hostfile" in found


def test_gpus_of_several_kinds_are_told() -> None:
    found = judged({}, {"product_name": "NVIDIA A100-SXM4-80GB"})
    assert found[0].startswith("! 1 × NVIDIA H100 80GB HBM3, 1 × NVIDIA A100-SXM4-80GB")


@pytest.mark.parametrize(
    ("found", "needs", "line"),
    [
        (Gpus(has_driver=False, has_tool=False), NEEDS, "! no NVIDIA GPU here"),
        (Gpus(has_driver=False, has_tool=False), Needs(has_job=True), "✗ no NVIDIA GPU here"),
        (Gpus(has_driver=False), Needs(on_cpu=True), "✓ training is on the CPU"),
        (Gpus(has_driver=True, is_late=True, problem="no answer"), NEEDS, "✗ no answer: the driver hangs"),
        (
            Gpus(has_driver=True, is_late=True, problem="no answer"),
            Needs(is_quick=True),
            "! no answer: the driver hangs",
        ),
        (
            Gpus(has_driver=True, problem="Failed to initialize NVML: Driver/library version mismatch"),
            NEEDS,
            "✗ Failed to initialize NVML: Driver/library version mismatch → sudo reboot",
        ),
        (Gpus(has_driver=True), NEEDS, "✗ nvidia-smi shows no GPU"),
    ],
)
def test_no_gpu_is_told_with_the_reason(found: Gpus, needs: Needs, line: str) -> None:
    assert said(samples.found("gpus", facts(gpus=found), needs))[0].startswith(line)


def test_what_is_no_answer_of_nvidia_smi_is_none() -> None:
    assert (
        probe.parse_nvidia_smi("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.") is None
    )
    assert probe.parse_nvidia_smi("<html></html>") is None


def test_words_of_a_driver_that_deprecates_are_no_values() -> None:
    found = probe.parse_nvidia_smi(smi_xml({"gpu_recovery_action": "Requested functionality has been deprecated"}))
    assert found is not None
    assert found.gpus[0].recovery is None
