"""What is made of the tracer's answers, without asking it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dstrain.errors import InvalidConfig
from dstrain.facts.model.model_facts import Kind, Moe
from dstrain.facts.model.tracer import NO_LIMIT, from_description
from dstrain.facts.model.traces import Depths, Description, Moment, Parameter, Segment, Trace, depths, fit


def passed(layers: int, samples: int, *, moments: int = 1) -> Trace:
    """A trace of a model whose bytes are known: 10 a sample, 3 a layer and sample, and gradients of 100 a layer."""
    loss = Moment(activations=10 * samples + 3 * layers * samples, logits=50 * samples, grads=0)
    low = Moment(activations=10 * samples, logits=0, grads=0)
    back = [
        Segment(
            name="layer backward",
            layer=layer,
            moments=(
                Moment(activations=10 * samples + 3 * (layer + 1) * samples, logits=0, grads=100 * (layers - layer)),
            ),
        )
        for layer in reversed(range(layers))
    ]
    return Trace(
        segments=(Segment(name="loss backward", layer=None, moments=(low,) * (moments - 1) + (loss,)), *back),
        saved_bytes=(),
        params_bytes=0,
        trainable_bytes=0,
        inputs_bytes=0,
    )


def corners(*layers: int) -> dict[tuple[int, int], Trace]:
    return {(depth, samples): passed(depth, samples) for depth in layers for samples in (1, 2)}


def test_any_depth_and_micro_batch_follow_from_four_traces() -> None:
    profile = fit(Depths(few=2, more=3), kept=corners(2, 3), recomputed=corners(2, 3))
    for layers, samples in ((2, 1), (7, 5), (40, 64)):
        peaks = {
            peak.name: peak.total for peak in profile.peaks(num_layers=layers, micro_batch=samples, grad_ckpt=False)
        }
        expected = passed(layers, samples)
        assert max(peaks.values()) == expected.peak_bytes
        assert peaks["loss backward"] == expected.segments[0].highest.total


def test_the_first_and_the_last_layer_both_can_be_the_peak() -> None:
    profile = fit(Depths(few=2, more=3), kept=corners(2, 3), recomputed=corners(2, 3))
    few_samples = profile.peaks(num_layers=10, micro_batch=1, grad_ckpt=True)[-1]
    many_samples = profile.peaks(num_layers=10, micro_batch=1000, grad_ckpt=True)[-1]
    assert (few_samples.grads, many_samples.grads) == (1000, 100)


def test_moments_that_never_are_the_highest_are_left_out() -> None:
    traces = {at: passed(*at, moments=5) for at in corners(2, 3)}
    profile = fit(Depths(few=2, more=3), kept=traces, recomputed=traces)
    assert [course.name for course in profile.kept].count("loss backward") == 1


def test_segments_of_different_length_are_compared_by_their_highest_moment() -> None:
    traces = {at: passed(*at, moments=sum(at)) for at in corners(2, 3)}
    profile = fit(Depths(few=2, more=3), kept=traces, recomputed=traces)
    peak = profile.peaks(num_layers=9, micro_batch=4, grad_ckpt=False)[0]
    assert peak.total == passed(9, 4).segments[0].highest.total


def test_a_model_too_short_for_two_depths_answers_for_its_own_alone() -> None:
    profile = fit(Depths(few=3, more=3), kept=corners(3), recomputed=corners(3))
    assert max(peak.total for peak in profile.peaks(num_layers=3, micro_batch=9, grad_ckpt=False)) == (
        passed(3, 9).peak_bytes
    )
    with pytest.raises(InvalidConfig, match="has 3 layers, not 4"):
        profile.peaks(num_layers=4, micro_batch=1, grad_ckpt=False)


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        ([0], Depths(few=1, more=1, different=0)),
        ([0] * 2, Depths(few=2, more=2, different=0)),
        ([0, 1, 2, 3], Depths(few=4, more=4, different=3)),
        ([0, 1] * 12, Depths(few=2, more=4, different=0)),
        ([0] + [1, 2] * 8, Depths(few=3, more=5, different=1)),
    ],
)
def test_depths_lie_one_period_apart_and_whole_periods_from_the_model(kinds: list[int], expected: Depths) -> None:
    assert depths(kinds) == expected
    period = expected.more - expected.few
    assert period == 0 or (len(kinds) - expected.few) % period == 0


DESCRIPTION = Description(
    model_type="nobody",
    sizes={"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_experts_per_tok": 2},
    vision_sizes={},
    rotary_ratio=0.5,
    tie_word_embeddings=False,
    dtype="bfloat16",
    layers_root="model.blocks",
    layer_kinds=(0, 0),
    moe_block="NobodyMoe",
    parameters=(
        Parameter(name="model.embed.weight", shape=(100, 64), layer=None, role="embedding", is_linear=False),
        *(
            Parameter(name=f"model.blocks.{layer}.{name}", shape=shape, layer=layer, role=role, is_linear=is_linear)
            for layer in (0, 1)
            for name, shape, role, is_linear in (
                ("attn.q.weight", (64, 64), "other", True),
                ("mlp.gate.weight", (8, 64), "other", False),
                ("mlp.experts.gate_up_proj", (8, 96, 64), "other", False),
                ("mlp.experts.down_proj", (8, 64, 48), "other", False),
                ("mlp.shared_expert.up_proj.weight", (32, 64), "other", True),
                ("norm.weight", (64,), "norm", False),
            )
        ),
        Parameter(name="lm_head.weight", shape=(100, 64), layer=None, role="head", is_linear=True),
    ),
)


def test_parameters_are_grouped_by_what_they_belong_to() -> None:
    model = from_description(DESCRIPTION, name="nobody-1b", source="some/nobody")
    kinds = {group.name: (group.kind, group.count, group.is_linear) for group in model.tensors}
    assert kinds == {
        "model.embed.weight": (Kind.EMBEDDING, 1, False),
        "attn.q.weight": (Kind.ATTENTION, 2, True),
        "mlp.gate.weight": (Kind.ROUTER, 2, False),
        "mlp.experts.gate_up_proj": (Kind.EXPERT, 2, False),
        "mlp.experts.down_proj": (Kind.EXPERT, 2, False),
        "mlp.shared_expert.up_proj.weight": (Kind.MLP, 2, True),
        "norm.weight": (Kind.NORM, 2, False),
        "lm_head.weight": (Kind.HEAD, 1, True),
    }


def test_experts_are_known_by_their_tensors() -> None:
    model = from_description(DESCRIPTION, name="nobody-1b", source="some/nobody")
    assert model.moe == Moe(
        num_experts=8,
        experts_per_token=2,
        intermediate_size=48,
        shared_intermediate_size=32,
        num_moe_layers=2,
        block_class="NobodyMoe",
    )


def test_sizes_that_the_config_does_not_name_follow_from_others() -> None:
    model = from_description(DESCRIPTION, name="nobody-1b", source="some/nobody")
    assert (model.num_key_value_heads, model.head_dim, model.rotary_dim, model.vocab_size) == (4, 16, 8, 100)
    assert model.max_position_embeddings == NO_LIMIT


def test_a_config_without_sizes_is_refused() -> None:
    with pytest.raises(InvalidConfig, match=r'"hidden_size" is missing\n.*"num_hidden_layers" is missing'):
        from_description(replace(DESCRIPTION, sizes={}), name="nobody-1b", source="some/nobody")
