"""The order of candidates, batches, and what is said when nothing fits."""

import pytest
from cases import ask, plan

from dstrain.choices import Method, Offload
from dstrain.errors import DoesNotFit, InvalidConfig
from dstrain.plan.search import candidates


def test_offload_comes_after_everything_else() -> None:
    asked = ask(model="qwen3-8b", gpus=8)
    order = [candidate.offload for candidate in candidates(asked.model, asked.cluster, asked.request)]
    assert order == sorted(order, key=list(Offload).index)


def test_smaller_micro_batches_come_after_checkpointing() -> None:
    asked = ask(model="qwen3-8b", gpus=8, seq_len=1024, offload="none")
    order = [(c.micro_batch, c.grad_ckpt) for c in candidates(asked.model, asked.cluster, asked.request)]
    assert list(dict.fromkeys(order)) == [(4, False), (4, True), (2, False), (2, True), (1, False), (1, True)]


def test_a_choice_that_is_given_is_kept() -> None:
    chosen = plan(model="qwen3-0.6b", gpus=8, zero_stage=3, micro_batch=2, grad_ckpt=True).chosen.configuration
    assert (chosen.zero_stage, chosen.micro_batch, chosen.grad_ckpt) == (3, 2, True)


def test_a_global_batch_is_kept_exactly() -> None:
    found = plan(model="qwen3-8b", gpus=8, global_batch=48)
    chosen = found.chosen.configuration
    assert found.global_batch == 8 * chosen.micro_batch * chosen.grad_accum == 48


def test_a_global_batch_that_does_not_divide_is_refused_with_the_nearest() -> None:
    with pytest.raises(InvalidConfig) as caught:
        plan(model="qwen3-8b", gpus=8, global_batch=50)
    assert caught.value.hint == "Write --global-batch 48 or 56."


def test_what_does_not_fit_names_what_would() -> None:
    with pytest.raises(DoesNotFit) as caught:
        plan(model="llama-3.1-405b", gpus=8)
    assert "--gpus" in str(caught.value.hint)
    assert "host RAM" in caught.value.problem


def test_parameter_offload_under_zero_2_is_refused() -> None:
    with pytest.raises(InvalidConfig, match="--zero-stage 2 and --offload params"):
        plan(model="qwen3-8b", gpus=8, zero_stage=2, offload="params")


def test_a_micro_batch_that_does_not_divide_the_global_batch_is_refused() -> None:
    with pytest.raises(InvalidConfig, match="no multiple of 2 GPUs × micro-batch 3"):
        plan(model="qwen3-0.6b", gpus=2, micro_batch=3, global_batch=16)


def test_short_samples_do_not_swell_the_default_batch() -> None:
    assert plan(model="qwen3-8b", gpus=16, gpu="h100", seq_len=256).global_batch == 64


def test_the_gpus_that_would_fit_can_be_typed() -> None:
    with pytest.raises(DoesNotFit) as caught:
        plan(model="qwen3-8b", gpus=3, gpu="4090")
    assert "--gpus-per-node 3" in str(caught.value.hint)


def test_nvme_needs_a_folder() -> None:
    with pytest.raises(InvalidConfig, match="--offload nvme"):
        plan(model="qwen3-8b", gpus=8, offload="nvme")


def test_a_sequence_longer_than_the_model_is_refused() -> None:
    with pytest.raises(InvalidConfig, match="40960"):
        plan(model="qwen3-8b", gpus=8, seq_len=50_000)


def test_the_micro_batch_grows_where_memory_allows() -> None:
    assert plan(model="qwen3-0.6b", gpus=8, gpu="h200").chosen.configuration.micro_batch > 1


def test_a_larger_gpu_never_makes_the_choice_more_frugal() -> None:
    small = plan(model="qwen3-8b", gpus=4, gpu="a100-40g")
    large = plan(model="qwen3-8b", gpus=4, gpu="h200")
    assert len(large.rejected) <= len(small.rejected)


def test_lora_needs_no_offload_where_full_training_does() -> None:
    full = plan(model="qwen3-8b", gpus=1, host_memory=2**40)
    adapter = plan(model="qwen3-8b", gpus=1, method="lora")
    assert full.chosen.configuration.offload is not Offload.NONE
    assert adapter.chosen.configuration.offload is Offload.NONE
    assert adapter.chosen.configuration.method is Method.LORA
