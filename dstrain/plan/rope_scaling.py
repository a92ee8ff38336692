"""Chooses and checks the scaling of rotary positions for sequences beyond a model's own length."""

from __future__ import annotations

from math import ceil

from dstrain.choices import RopeType
from dstrain.errors import InvalidConfig
from dstrain.facts.model.model_facts import ModelFacts
from dstrain.job.model_changes import RopeScaling

_QWEN3, _QWEN3_PRETRAINED, _QWEN3_LONGEST = ("qwen3", "qwen3_moe"), 32768, 131072
"""Families with their pretrained length, and the length for which their makers have validated YaRN, in tokens.
Source: github.com/QwenLM/Qwen3 docs/source/inference/transformers.md: Enabling Long Context; the model cards."""


def _is_documented(model: ModelFacts) -> bool:
    """Returns whether the makers of a model document YaRN: Qwen3, except versions that are longer by themselves."""
    # config.json has 40,960 where 8,192 for a prompt come on top of the pretrained length
    return model.model_type in _QWEN3 and model.max_position_embeddings in (_QWEN3_PRETRAINED, 40960)


def reaching(model: ModelFacts, rope_type: RopeType, seq_len: int) -> RopeScaling | None:
    """Returns the smallest whole factor for a length in tokens; None if the pretrained length is enough.

    Factors are whole, as in the model cards: 2 for 65,536 tokens of Qwen3, 4 for 131,072.
    """
    original = _QWEN3_PRETRAINED if _is_documented(model) else model.max_position_embeddings
    factor = ceil(seq_len / original)
    if factor == 1:
        return None
    return RopeScaling(rope_type=rope_type, factor=float(factor), original_max_position_embeddings=original)


def fault(model: ModelFacts, scaling: RopeScaling, seq_len: int) -> str | None:
    """Returns the reason why a model cannot be trained on such lengths with a scaling, or None."""
    if model.rope_type != "default":
        return f"config.json of {model.name} already has rope_type {model.rope_type}, which is kept as it is"
    if model.model_type == "phi3":  # Transformers 5.23 models/phi3/configuration_phi3.py: validate_rope
        return f"{model.name} is a phi3, whose config takes no rope_type but longrope"
    original = scaling.original_max_position_embeddings or model.max_position_embeddings
    reach = int(scaling.factor * original)
    if seq_len > reach:
        return f"{scaling} of {original} positions reaches {reach} tokens, and seq_len is {seq_len}"
    return None


def chosen(model: ModelFacts, wish: RopeScaling | RopeType | None, seq_len: int) -> RopeScaling | None:
    """Returns the scaling for a length: as given, with a factor if only its type is given, YaRN where the makers of the
    model document it, or None if the model needs none.

    Raises InvalidConfig if the model is too short without one, or cannot have it.
    """
    own = model.max_position_embeddings
    if wish is None and seq_len <= own:
        return None
    if wish is None and (not _is_documented(model) or seq_len > _QWEN3_LONGEST):
        raise _too_long(model, seq_len)
    scaling = wish if isinstance(wish, RopeScaling) else reaching(model, wish or RopeType.YARN, seq_len)
    if scaling is None:
        raise InvalidConfig(
            f"--rope-scaling {wish}: {model.name} reaches --seq-len {seq_len} without it",
            hint="Leave it out; for shorter samples of a longer model, write rope_scaling with its factor in job.yaml.",
        )
    if (problem := fault(model, scaling, seq_len)) is not None:
        raise InvalidConfig(f"--rope-scaling {scaling.rope_type}: {problem}", hint=f"Write --seq-len {own} or less.")
    return scaling


class TooLong(InvalidConfig):
    """A model was not made for samples of a length."""

    def __init__(self, problem: str, *, hint: str, why: str, longest: int) -> None:
        """`why` is the end of a sentence that begins with the length, and `longest` the longest one that trains."""
        self.why, self.longest = why, longest
        super().__init__(problem, hint=hint)


def _too_long(model: ModelFacts, seq_len: int) -> TooLong:
    own = model.max_position_embeddings
    why, longest = f"is longer than {model.name} was made for ({own})", own
    hint = f"Write --seq-len {own} or less"
    if _is_documented(model):
        longest, hint = _QWEN3_LONGEST, f"Write --seq-len {_QWEN3_LONGEST} or less, which YaRN was validated for"
    scaling = reaching(model, RopeType.YARN, seq_len)
    if scaling is not None and fault(model, scaling, seq_len) is None:
        hint += f", or add --rope-scaling yarn, which stretches its positions (factor {scaling.factor:g})"
    return TooLong(f"--seq-len {seq_len} {why}", hint=f"{hint}.", why=why, longest=longest)


def notes(model: ModelFacts, wish: RopeScaling | RopeType | None, scaling: RopeScaling) -> list[str]:
    """Returns the assumptions about positions, and the effects of the scaling."""
    said = []
    if wish is None:
        said.append(
            f"assumed: {scaling} over {scaling.original_max_position_embeddings} positions, as Qwen documents it up to"
            f" {_QWEN3_LONGEST} tokens; another with --rope-scaling, none up to --seq-len"
            f" {model.max_position_embeddings}"
        )
    if scaling.rope_type is RopeType.DYNAMIC:
        said.append("dynamic scaling depends on the longest text before: losses depend on the order of the samples")
    else:
        said.append(f"{scaling.rope_type} scaling is the same for all lengths: short texts may get slightly worse")
    return said
