"""The probe: this machine's GPUs, RAM and files, and a model by any of its names."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from cases import TINY_CONFIG as CONFIG

from dstrain.choices import Hub
from dstrain.errors import InvalidConfig
from dstrain.facts.probe import LocalGpu, _visible, host_memory_bytes, local_gpus, read_model, read_text
from dstrain.units import GIB

GPUS = [LocalGpu(name="NVIDIA H200", memory_mib=143771, index=n, uuid=f"GPU-{n}abc-{n}") for n in range(4)]


def test_gpus_are_counted_without_raising() -> None:
    assert all(gpu.memory_mib >= 0 for gpu in local_gpus())


def test_no_gpu_is_visible_where_cuda_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert local_gpus() == []


@pytest.mark.parametrize(
    ("wanted", "indices"),
    [
        (None, [0, 1, 2, 3]),
        ("0,1", [0, 1]),
        ("3, 1", [3, 1]),
        ("", []),
        ("-1", []),
        ("NoDevFiles", []),
        ("0,9,1", [0]),
        ("1,1", []),
        ("GPU-2abc-2", [2]),
        ("GPU-3", [3]),
        ("GPU-", []),
        ("MIG-1", []),
    ],
)
def test_visible_devices_are_read_as_cuda_does(wanted: str | None, indices: list[int]) -> None:
    assert [gpu.index for gpu in _visible(GPUS, wanted)] == indices


def test_the_ram_is_that_of_this_machine_or_less() -> None:
    assert GIB // 4 < host_memory_bytes() < 100_000 * GIB


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model = tmp_path / "my-model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(CONFIG))
    return model


def test_a_local_folder_or_file_is_a_model(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = read_model(str(folder))
    assert (facts.name, facts.source, facts.num_hidden_layers) == ("my-model", str(folder), 2)
    assert read_model(str(folder / "config.json")) == facts
    monkeypatch.chdir(folder)
    assert (read_model(".").name, read_model(".").source) == ("my-model", ".")


def test_a_folder_without_config_says_so(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match=r"no config\.json in this folder"):
        read_model(str(tmp_path))


@pytest.mark.parametrize("name", ["./nowhere", "/nowhere/at/all", "~/nowhere", "x/config.json", "~nobody-at-all/x"])
def test_a_path_that_does_not_exist_is_not_looked_up_on_a_hub(name: str) -> None:
    with pytest.raises(InvalidConfig, match="no such folder or file"):
        read_model(name)


def test_a_malformed_config_is_named_with_its_place(folder: Path) -> None:
    (folder / "config.json").write_text('{\n  "model_type": "qwen3",\n}\n')
    with pytest.raises(InvalidConfig, match=rf"{folder}/config\.json:\d:\d+: not valid JSON"):
        read_model(str(folder))


@pytest.mark.parametrize(
    ("asked", "hub", "name", "source"),
    [
        ("Qwen3 8B", Hub.HF, "qwen3-8b", "Qwen/Qwen3-8B"),
        ("qwen3-8b", Hub.MODELSCOPE, "qwen3-8b", "Qwen/Qwen3-8B"),
        ("Qwen/Qwen2.5-7B-Instruct", Hub.HF, "Qwen/Qwen2.5-7B-Instruct", "Qwen/Qwen2.5-7B-Instruct"),
    ],
)
def test_a_known_model_needs_no_network_and_no_folder_of_its_name_hides_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: str, hub: Hub, name: str, source: str
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    (tmp_path / "qwen3-8b").mkdir()
    monkeypatch.chdir(tmp_path)
    facts = read_model(asked, hub=hub)
    assert (facts.name, facts.source) == (name, source)
    assert facts.num_params == (8_190_735_360 if name == "qwen3-8b" else facts.num_params)


@pytest.mark.parametrize("name", ["qwen3-8bb", "quen3-8b"])
def test_a_misspelt_alias_gets_the_nearest(name: str) -> None:
    with pytest.raises(InvalidConfig, match=f'"{name}" is neither a known model') as caught:
        read_model(name)
    assert caught.value.hint == 'Did you mean "qwen3-8b"?'


@pytest.mark.parametrize("name", ["", "zzzzzzzz", "a b c", "x" * 5000, "a\0b"])
def test_a_name_that_means_nothing_says_what_would(name: str) -> None:
    with pytest.raises(InvalidConfig) as caught:
        read_model(name)
    assert caught.value.hint is not None


def test_what_is_no_text_is_refused_with_its_place(tmp_path: Path) -> None:
    file = tmp_path / "notes"
    file.write_bytes(b"fine\nk\xe4se")
    with pytest.raises(InvalidConfig, match="notes:2:2: not UTF-8 text"):
        read_text(file)
    with pytest.raises(InvalidConfig, match="cannot be read: Is a directory"):
        read_text(tmp_path)


def test_probing_imports_no_giant() -> None:
    giants = "'torch', 'transformers', 'huggingface_hub', 'pynvml'"
    code = f"import sys, dstrain.facts.probe; print([name for name in ({giants}) if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
