"""What ranks send each other, against the papers by hand."""

from __future__ import annotations

import pytest

from benchmarks.published.pytorch.sharding import with_states
from benchmarks.published.training_code import StateDtypes
from dstrain.choices import Method, Offload
from dstrain.facts import probe
from dstrain.facts.cluster.cluster import Cluster
from dstrain.job.model_changes import Lora
from dstrain.plan.configuration import DEFAULTS, Configuration, changed
from dstrain.plan.speed.collectives import Collective, Phase, collectives
from dstrain.plan.speed.efficiency import INTER_RATIO, INTRA_RATIO, efficiency
from dstrain.plan.speed.traffic import work
from tests.plan.machines import cluster

MODEL = probe.read_model("llama-3.1-8b")
PARAMS = MODEL.num_params
FRUGAL = changed(DEFAULTS, zero_stage=3, overlap_comm=True, max_reuse_distance=0, prefetch_bucket_size=10**9)


def _cluster(num_gpus: int = 8, inter: str = "ib400") -> Cluster:
    return cluster(num_gpus, inter=inter)


def _sent(configuration: Configuration, num_gpus: int = 8) -> list[Collective]:
    return collectives(_cluster(num_gpus), configuration, work(MODEL, configuration))


def _volume(configuration: Configuration, num_gpus: int = 8) -> float:
    """Returns bytes × passes of a step in units of 2Ψ, as ZeRO's paper counts them."""
    counts = {Phase.FORWARD: configuration.step.grad_accum, Phase.BACKWARD: configuration.step.grad_accum}
    found = _sent(configuration, num_gpus)
    return sum(counts.get(each.phase, 1) * each.passes * each.num_bytes for each in found) / (2 * PARAMS)


@pytest.mark.parametrize(
    ("stage", "accum", "times"),
    [(0, 1, 2), (0, 4, 2), (1, 1, 3), (1, 4, 3), (2, 1, 3), (2, 4, 9), (3, 1, 3), (3, 4, 12)],
)
def test_zero_sends_its_gradients_and_parameters_as_often_as_the_engine_does(
    stage: int, accum: int, times: float
) -> None:
    assert _volume(changed(FRUGAL, zero_stage=stage, grad_accum=accum)) == pytest.approx(times)


def test_one_gpu_sends_nothing() -> None:
    assert _sent(FRUGAL, num_gpus=1) == []


def test_an_adapter_reduces_its_own_gradients_alone() -> None:
    adapted = changed(FRUGAL, zero_stage=2, method=Method.LORA, lora=Lora(rank=8))
    trainable = work(MODEL, adapted).counts.trainable

    assert _volume(adapted) == pytest.approx(3 * trainable / PARAMS)


def test_parameters_that_stay_are_not_gathered_again() -> None:
    assert _volume(changed(FRUGAL, max_reuse_distance=2 * PARAMS)) == pytest.approx(2)


def test_pytorch_scatters_gradients_where_deepspeed_reduces_them_everywhere() -> None:
    pytorch = changed(FRUGAL, code=with_states(FRUGAL.code, StateDtypes.PURE_BF16), zero_stage=2)

    assert _volume(pytorch) == pytest.approx(2)
    assert all(each.is_hidden for each in _sent(pytorch))


def test_hpz_gathers_inside_the_node_in_the_backward_pass() -> None:
    forward, backward, _ = _sent(changed(FRUGAL, hpz=8), num_gpus=16)

    assert (forward.ranks, backward.ranks) == (16, 8)
    assert not backward.spans_nodes(_cluster(16))


def test_qwz_halves_both_gathers() -> None:
    whole, halved = (_sent(changed(FRUGAL, qwz=qwz), num_gpus=16) for qwz in (False, True))
    assert [each.num_bytes / other.num_bytes for each, other in zip(halved, whole, strict=True)] == [0.5, 0.5, 1]


@pytest.mark.parametrize(("overlap", "hidden"), [(True, True), (False, False)])
def test_only_overlapped_reduction_is_hidden(overlap: bool, hidden: bool) -> None:
    found = _sent(changed(FRUGAL, zero_stage=2, overlap_comm=overlap))

    assert [each.is_hidden for each in found] == [hidden, False]


def test_ulysses_sends_queries_keys_values_and_outputs() -> None:
    """For as many key heads as query heads DeepSpeed's paper has 4·h of each token; of a quarter it is 2.5·h."""
    sent = [each for each in _sent(changed(FRUGAL, sp=4, seq_len=8192)) if not each.is_ring]

    assert sent[0].num_bytes == 2 * 8192 / 4 * 2.5 * 4096 * 32
    assert sent[1].num_bytes == sent[0].num_bytes


def test_tensor_parallel_ranks_reduce_twice_in_each_layer() -> None:
    forward = next(each for each in _sent(changed(FRUGAL, tp=2)) if each.phase is Phase.FORWARD and each.ranks == 2)

    assert (forward.num_bytes, forward.messages, forward.passes) == (2 * 2 * 4096 * 4096 * 32, 64, 2)


def test_a_ring_over_nodes_has_all_their_adapters() -> None:
    """Two nodes of eight, 400 Gbit/s each: NVLink is the narrower; with 25 Gbit/s the adapters are."""
    rates, gathered = efficiency(_cluster(16)), Collective(phase=Phase.STEP, num_bytes=1e10, messages=0, ranks=16)

    fast, slow = _cluster(16), _cluster(16, inter="eth25")

    assert gathered.seconds(fast, rates) == pytest.approx(1e10 * 15 / 16 / (8 * 50e9 * INTER_RATIO), rel=0.05)
    expected = 1e10 * 15 / 16 / (8 * 3.125e9 * INTER_RATIO)
    assert gathered.seconds(slow, efficiency(slow)) == pytest.approx(expected)


def test_a_ring_inside_a_node_has_the_link_of_its_gpus() -> None:
    cluster = _cluster()
    gathered = Collective(phase=Phase.STEP, num_bytes=1e10, messages=0, ranks=8)

    expected = 1e10 * 7 / 8 / (450e9 * INTRA_RATIO)
    assert gathered.seconds(cluster, efficiency(cluster)) == pytest.approx(expected)


def test_offloading_changes_nothing_between_ranks() -> None:
    assert _volume(changed(FRUGAL, offload=Offload.PARAMS)) == _volume(FRUGAL)
