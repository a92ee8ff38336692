"""The attention kernels that Transformers would load, found without importing them."""

from __future__ import annotations

from pathlib import Path

import pytest

from dstrain.facts.attention_kernels import AttentionKernels
from tests.attention_hosts import BUILD, Machine

pytestmark = pytest.mark.commands

FA2, FA3 = "kernels-community/flash-attn2", "kernels-community/vllm-flash-attn3"
H100, A100 = (9, 0), (8, 0)


def test_packages_count_that_the_gpus_run_and_transformers_takes(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.install("flash-attn", "2.8.3", module="flash_attn")
    machine.install("flash-attn-3", "3.0.0", module="flash_attn_interface")
    assert machine.kernels(H100).packages == {"flash_attention_3": "3.0.0", "flash_attention_2": "2.8.3"}
    assert machine.kernels(A100, H100).packages == {"flash_attention_2": "2.8.3"}
    assert machine.kernels((7, 0)) == AttentionKernels()


def test_a_package_that_is_too_old_or_shares_its_module_does_not_count(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.install("flash-attn", "2.3.2", module="flash_attn")
    assert machine.kernels(H100) == AttentionKernels()
    machine.install("flash-attn-4", "4.0.0", module="flash_attn")
    assert machine.kernels(H100).packages == {"flash_attention_4": "4.0.0"}


def test_kernels_of_the_hub_count_if_their_build_is_cached(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.cache(FA2, 4)
    assert machine.kernels(A100) == AttentionKernels()  # without the package that loads them
    machine.install("kernels", "0.18.2", module="kernels")
    machine.cache(FA3, 1, build=BUILD.replace("torch213", "torch212"))
    online, offline = machine.kernels(H100), machine.kernels(H100, HF_HUB_OFFLINE="1")
    assert online.cached == offline.cached == {"flash_attention_2": "0123456789"}
    assert (online.downloadable, offline.downloadable) == (("flash_attention_3", "flash_attention_4"), ())
    assert machine.kernels(H100, HF_HUB_CACHE=str(tmp_path / "another")).cached == {}


def test_builds_for_a_stable_abi_serve_later_releases_of_pytorch(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.install("kernels", "0.18.3", module="kernels")
    machine.cache(FA3, 1, build=BUILD.replace("torch213-cxx11-cu128", "torch-stable-abi29-cu126"))
    machine.cache(FA2, 4, build=BUILD.replace("cu128", "cu130"))
    assert set(machine.kernels(H100).cached) == {"flash_attention_3"}
