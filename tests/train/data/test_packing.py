import runpy
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from dstrain.facts.cluster.hostfile import expand
from dstrain.facts.data.best_fit import best_fit
from dstrain.job.schema import Job
from dstrain.launch.scripts.exports import ExportEngine, export
from dstrain.train import demo
from dstrain.train.arguments import recompute
from dstrain.train.data import collate
from dstrain.train.data.collate import Collator, PackedRows, Packing, taken_by
from dstrain.train.data.prepare import kept_rows

pytestmark = pytest.mark.engine


def members(lengths: list[int], *, capacity: int = 64, seed: int = 0) -> list[list[int]]:
    return [row.tolist() for row in collate.packed(np.array(lengths), capacity, seed=seed)]


@given(lengths=st.lists(st.integers(1, 64), min_size=1), seed=st.integers(0, 9))
def test_every_sample_is_in_one_row_and_no_row_overflows(lengths: list[int], seed: int) -> None:
    rows = members(lengths, seed=seed)
    assert sorted(sample for row in rows for sample in row) == list(range(len(lengths)))
    assert all(0 < sum(lengths[sample] for sample in row) <= 64 for row in rows)


@given(lengths=st.lists(st.integers(1, 64), min_size=1))
def test_rows_are_those_of_best_fit_sample_by_sample(lengths: list[int]) -> None:
    rooms: list[int] = []
    for length in sorted(lengths, reverse=True):
        room = min((room for room in rooms if room >= length), default=None)
        if room is not None:
            rooms.remove(room)
        rooms.append((64 if room is None else room) - length)
    rows = members(lengths)
    assert sorted(64 - sum(lengths[sample] for sample in row) for row in rows) == sorted(rooms)


def test_same_seed_gives_same_rows_and_another_seed_others() -> None:
    lengths = [7, 9, 11, 13] * 20
    assert members(lengths, seed=1) == members(lengths, seed=1)
    assert members(lengths, seed=1) != members(lengths, seed=2)


@pytest.mark.parametrize("length", [0, 33])
def test_sample_that_cannot_be_in_a_row_is_refused(length: int) -> None:
    with pytest.raises(ValueError, match=f"a sample has {length} tokens, a row 32"):
        best_fit({5: 1, length: 1}, 32)


def test_rows_of_real_lengths_are_full() -> None:
    lengths = [len(question + answer) // 4 for question, answer in demo.pairs_of_standard_library()]
    assert sum(lengths) / (512 * len(members(lengths, capacity=512))) > 0.98


def test_the_second_rank_maps_the_rows_of_the_first(tmp_path: Path) -> None:
    lengths = np.array([30, 40, 20, 64])
    first = kept_rows(tmp_path, lengths, 64, seed=0)
    second = kept_rows(tmp_path, np.array([]), 64, seed=0)  # not even looked at
    assert [row.tolist() for row in second] == [row.tolist() for row in first]
    assert isinstance(second.members, np.memmap)
    assert sorted(second.sums(lengths).tolist()) == [30, 60, 64]


def packed(samples: list[list[int]], rows: list[list[int]]) -> PackedRows:
    columns = datasets.Dataset.from_dict({"input_ids": samples, "labels": samples})
    return PackedRows(samples=columns.with_format("arrow"), rows=Packing.of(rows))


def test_positions_restart_and_first_tokens_are_no_targets() -> None:
    row = packed([[1, 2, 3], [4, 5]], [[1, 0]])[0]
    assert {key: value.tolist() for key, value in row.items()} == {
        "input_ids": [4, 5, 1, 2, 3],
        "labels": [-100, 5, -100, 2, 3],
        "position_ids": [0, 1, 0, 1, 2],
    }


def test_packed_batch_has_no_attention_mask_and_padding_is_a_sample_of_its_own() -> None:
    rows = packed([[1, 2, 3], [4, 5], [6]], [[0, 1], [2]])
    batch = Collator(pad_token_id=9, packing=True)([rows[0], rows[1]])
    assert "attention_mask" not in batch
    assert batch["use_cache"] is False
    assert batch["input_ids"].tolist() == [[1, 2, 3, 4, 5, 9, 9, 9], [6, 9, 9, 9, 9, 9, 9, 9]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1, 0, 1, 2], [0, 0, 1, 2, 3, 4, 5, 6]]
    assert batch["labels"][:, 5:].eq(-100).all()


def test_kernels_are_told_where_samples_begin() -> None:
    rows = packed([[1, 2, 3], [4, 5], [6]], [[0, 1], [2]])
    batch = Collator(pad_token_id=9, packing=True)([rows[0], rows[1]])
    assert batch["cu_seq_lens_q"].dtype == torch.int32
    assert batch["cu_seq_lens_q"].tolist() == [0, 3, 5, 8, 9, 16]
    assert batch["cu_seq_lens_k"].tolist() == [0, 3, 5, 8, 9, 16]
    assert (batch["max_length_q"], batch["max_length_k"]) == (7, 7)
    assert type(batch["max_length_q"]) is int
    assert batch["seq_idx"].dtype == torch.int32
    assert batch["seq_idx"].tolist() == [[0, 0, 0, 1, 1, 2, 2, 2], [0, 1, 1, 1, 1, 1, 1, 1]]


def test_a_model_is_given_only_what_it_takes() -> None:
    class Model:
        def forward(self, input_ids: None, position_ids: None, seq_idx: None) -> None: ...

    batch = Collator(pad_token_id=9, packing=True, takes=taken_by(Model()))([packed([[1, 2], [3]], [[0, 1]])[0]])
    assert set(batch) == {"input_ids", "labels", "position_ids", "seq_idx"}


def test_borders_are_those_that_transformers_finds_in_one_row() -> None:
    from transformers.modeling_flash_attention_utils import prepare_fa_kwargs_from_position_ids

    rows = packed([[1, 2, 3], [4, 5], [6]], [[0, 1, 2]])
    batch = Collator(pad_token_id=9, packing=True)([rows[0]])
    (expected, _), (longest, _) = prepare_fa_kwargs_from_position_ids(batch["position_ids"])
    assert batch["cu_seq_lens_q"].tolist() == expected.tolist()
    assert batch["max_length_q"] == longest


def test_samples_are_padded_with_a_mask() -> None:
    samples: list[dict[str, Any]] = [
        {"input_ids": [1, 2, 3], "labels": [-100, 2, 3]},
        {"input_ids": [4], "labels": [4], "length": 1},
    ]
    batch = Collator(pad_token_id=9, packing=False, pad_to_multiple_of=4)(samples)
    assert {key: value.tolist() for key, value in batch.items()} == {
        "input_ids": [[1, 2, 3, 9], [4, 9, 9, 9]],
        "labels": [[-100, 2, 3, -100], [4, -100, -100, -100]],
        "attention_mask": [[1, 1, 1, 0], [1, 0, 0, 0]],
    }


class Tokens:
    """Stands for a tokenizer where only the ids matter."""

    pad_token_id = 0
    eos_token_id = 2

    def __len__(self) -> int:
        return 512


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("attn", ["sdpa", "eager"])
def test_samples_of_a_row_do_not_see_each_other(attn: str, training: bool, checkpointing: bool) -> None:
    model = demo.make_model(Tokens())
    model.set_attn_implementation(attn)
    model.train(training)
    if checkpointing:
        recompute(model, {"use_reentrant": False})
    collate = Collator(pad_token_id=0, packing=True)
    generator = torch.Generator().manual_seed(0)
    before, after, kept, other = (torch.randint(3, 512, (n,), generator=generator).tolist() for n in (37, 21, 50, 45))

    def logits_of_kept(first: list[int], last: list[int]) -> Any:
        rows = packed([first, kept, last, other], [[0, 1, 2], [3]])
        out = model(**collate([rows[0], rows[1]])).logits
        return out[0, len(first) : len(first) + len(kept)]

    reference = logits_of_kept(before, after)
    changed = logits_of_kept([token ^ 1 for token in before], [token ^ 1 for token in after])
    assert torch.equal(reference, changed)
    alone = model(input_ids=torch.tensor([kept]), use_cache=False).logits[0]
    torch.testing.assert_close(reference, alone, atol=1e-5, rtol=1e-4)


def test_a_mask_of_ones_would_let_samples_see_each_other() -> None:
    """Why packed batches have no attention mask: with one, Transformers does not look at the positions."""
    model = demo.make_model(Tokens()).eval()
    collate = Collator(pad_token_id=0, packing=True)
    outputs = []
    for first in ([3] * 8, [4] * 8):
        batch = collate([packed([first, [5] * 8], [[0, 1]])[0]])
        outputs.append(model(**batch, attention_mask=torch.ones_like(batch["input_ids"])).logits[0, 8:])
    assert not torch.equal(*outputs)


def test_an_exported_script_refuses_a_model_that_mixes_the_samples_of_a_row(tmp_path: Path) -> None:
    job = Job(model="m", output_dir="o", data="d", packing=True)
    (tmp_path / "train.py").write_text(export(job, {}, expand("localhost:2", None), ExportEngine.DDP).files["train.py"])
    script = SimpleNamespace(**runpy.run_path(str(tmp_path / "train.py")))
    sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=32, num_attention_heads=2, initializer_range=0.5, **sizes))
    trainer = SimpleNamespace(
        train_dataset=[{"input_ids": list(range(20))}],
        data_collator=script.PackedCollator(model, 0),
        compute_loss_context_manager=nullcontext,
        _prepare_inputs=lambda inputs: inputs,
    )
    script.WholeSteps._require_isolation(trainer, model)
    trainer._prepare_inputs = lambda inputs: {"input_ids": inputs["input_ids"], "labels": None}
    with pytest.raises(SystemExit, match="mixes the samples of a packed row"):
        script.WholeSteps._require_isolation(trainer, model)
