"""Files of tensors are read back, and values that are not finite have names."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors.torch
import torch
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine
from transformers import LlamaConfig, LlamaForCausalLM

from dstrain.errors import RunFailed
from dstrain.train.checkpoints.checkpoints import checksum
from dstrain.train.checkpoints.tensor_files import nonfinite_states, nonfinite_weights, reading_back
from tests.train.checkpoints.damage import HARMS

SAVED = torch.save


def tiny() -> Any:
    sizes: dict[str, Any] = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, tie_word_embeddings=True, **sizes)).bfloat16()


def engine() -> Any:
    writer = TorchCheckpointEngine.__new__(TorchCheckpointEngine)
    writer.zipfile_serialization = True
    return SimpleNamespace(checkpoint_engine=writer)


def test_the_checksums_are_those_of_the_files(tmp_path: Path) -> None:
    live = engine()
    with reading_back(live) as checksums:
        tiny().save_pretrained(tmp_path, max_shard_size="5KB")
        live.checkpoint_engine.save({"a": torch.randn(1000), "step": 3}, str(tmp_path / "states.pt"))
    assert len(checksums) >= 3
    assert checksums == {path: checksum(path) for path in checksums}
    assert torch.load(tmp_path / "states.pt", mmap=True)["step"] == 3
    assert "save" not in vars(live.checkpoint_engine)


@pytest.mark.parametrize("harm", HARMS.values(), ids=HARMS)
def test_a_model_that_the_disk_does_not_keep_ends_the_run(
    tmp_path: Path, harm: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = safetensors.torch.save_file

    def save(tensors: Any, path: Any, metadata: Any = None) -> None:
        saved(tensors, path, metadata)
        whole = Path(path).read_bytes()
        begin = 8 + int.from_bytes(whole[:8], "little")
        (tmp_path / "tensors").write_bytes(whole[begin:])
        harm(tmp_path / "tensors")
        Path(path).write_bytes(whole[:begin] + (tmp_path / "tensors").read_bytes())

    monkeypatch.setattr(safetensors.torch, "save_file", save)
    with pytest.raises(RunFailed, match=r"model\.safetensors was read back, and \S+ has other bytes"), reading_back():
        tiny().save_pretrained(tmp_path)


@pytest.mark.parametrize("harm", HARMS.values(), ids=HARMS)
def test_states_that_the_disk_does_not_keep_end_the_run(
    tmp_path: Path, harm: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def save(states: Any, file: Any, **options: Any) -> None:
        SAVED(states, file, **options)
        file.flush()
        harm(tmp_path / "states.pt")

    monkeypatch.setattr(torch, "save", save)
    live = engine()
    with pytest.raises(RunFailed, match=r"states\.pt was read back"), reading_back(live):
        live.checkpoint_engine.save({"a": torch.randn(1000)}, tmp_path / "states.pt")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_weight_that_is_not_finite_has_its_name(value: float) -> None:
    model = tiny()
    assert nonfinite_weights(model) == []
    name = "model.layers.1.mlp.down_proj.weight"
    model.get_parameter(name).data[0, 0] = value
    assert nonfinite_weights(model) == [name]
    model.get_parameter(name).requires_grad_(False)
    assert nonfinite_weights(model, only_trained=True) == []


def test_padding_behind_a_part_of_zero_3_does_not_count() -> None:
    model = tiny()
    name = "model.norm.weight"
    parameter: Any = model.get_parameter(name)
    parameter.ds_numel, parameter.ds_zero_partition_rank = 16, 2
    parameter.ds_tensor = torch.tensor([1.0] * 4 + [float("nan")] * 2)  # of three ranks with six elements each
    parameter.ds_tensor.ds_numel = 6
    assert nonfinite_weights(model) == []
    parameter.ds_tensor[3] = float("inf")
    assert nonfinite_weights(model) == [name]


def test_states_of_the_optimizer_have_the_names_of_their_weights() -> None:
    model = tiny()
    optimizer = torch.optim.AdamW(model.parameters())
    model(input_ids=torch.tensor([[1, 2, 3]]), labels=torch.tensor([[1, 2, 3]])).loss.backward()
    optimizer.step()
    assert nonfinite_states(model, optimizer) == []
    optimizer.state[model.get_parameter("model.norm.weight")]["exp_avg_sq"][3] = float("inf")
    assert nonfinite_states(model, optimizer) == ["exp_avg_sq of model.norm.weight"]
