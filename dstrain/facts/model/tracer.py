"""Asks the meta-tensor tracer, a child process that imports PyTorch and Transformers, and caches its answers.

The child reads `Questions` and writes `Answers` as JSON, in the same order.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from functools import cache
from pathlib import Path

from dstrain.choices import Hub, Method
from dstrain.errors import EnvironmentProblem, InvalidConfig, not_installed
from dstrain.facts.model import hub_config
from dstrain.facts.model.model_facts import Kind, ModelFacts, Moe, TensorGroup, Vision
from dstrain.facts.model.traces import (
    ActivationProfile,
    Description,
    Parameter,
    Question,
    Subject,
    Trace,
    Traced,
    Wanted,
)
from dstrain.facts.model.vision_towers import frozen
from dstrain.facts.releases import installed
from dstrain.facts.this_machine import user_cache
from dstrain.paths import python, write_atomic
from dstrain.records import from_data, load_json, to_data, to_json, type_config

NO_LIMIT = 2**31 - 1
"""`max_position_embeddings` of a model whose config has no such limit."""

_DTYPES = ("bfloat16", "float16", "float32")
_ROUTERS = frozenset({"gate", "router", "shared_expert_gate"})
_ATTENTION = re.compile(r"attn|attention|mixer")


def from_description(description: Description, *, name: str, source: str) -> ModelFacts:
    """Returns the facts in a description.

    Heads, widths and the vocabulary come from the usual keys of the config; parameters are exact. A mixture of experts
    is recognized if Transformers keeps its experts in 3-D parameters and the config has `num_experts_per_tok`. Raises
    InvalidConfig if the config lacks the basic sizes.
    """
    sizes = description.sizes
    missing = [key for key in ("hidden_size", "num_hidden_layers") if key not in sizes]
    if missing:
        raise InvalidConfig("\n".join(f'{name}: "{key}" is missing' for key in missing))
    # names of keys differ between families: sizes that the config lacks come from the parameters
    groups = _groups(description)
    heads = sizes.get("num_attention_heads", 1)
    width, value_width = _head_widths(description, heads)
    return ModelFacts(
        name=name,
        source=source,
        model_type=description.model_type,
        hidden_size=sizes["hidden_size"],
        num_hidden_layers=sizes["num_hidden_layers"],
        num_attention_heads=heads,
        num_key_value_heads=sizes.get("num_key_value_heads", heads),
        head_dim=width,
        v_head_dim=value_width,
        rotary_dim=sizes.get("qk_rope_head_dim") or round(width * description.rotary_ratio),
        intermediate_size=sizes.get("intermediate_size") or _widest_mlp(groups, sizes["hidden_size"]),
        vocab_size=sizes.get("vocab_size") or max(group.shape[0] for group in groups if group.kind is Kind.EMBEDDING),
        max_position_embeddings=sizes.get("max_position_embeddings", NO_LIMIT),
        tie_word_embeddings=description.tie_word_embeddings,
        has_qk_norm=any(re.search(r"\bq_?(layer)?norm\.weight$", group.name) for group in groups),
        dtype=description.dtype if description.dtype in _DTYPES else "float32",
        moe=_moe(description, groups),
        vision=_vision(description),
        tensors=groups,
        layers_root=description.layers_root,
        num_scored_layers=description.num_scored_layers,
        linear_state_numel=description.linear_state_numel,
        has_sdpa=description.has_sdpa,
        has_flash=description.has_flash,
    )


def _head_widths(description: Description, heads: int) -> tuple[int, int]:
    """Returns the widths of a query head and of a value head; latent attention has its own keys for them."""
    sizes = description.sizes
    width = sizes.get("head_dim") or sizes["hidden_size"] // heads
    latent = [sizes.get(key, 0) for key in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")]
    return (latent[0] + latent[1], latent[2]) if all(latent) else (width, width)


def _groups(description: Description) -> tuple[TensorGroup, ...]:
    """Returns the parameters by name, kind and shape; indices in names become stars."""
    counts: dict[tuple[str, Kind, tuple[int, ...], bool], int] = {}
    for parameter in description.parameters:
        kind = _kind(parameter)
        name = parameter.name
        if parameter.layer is not None:
            name = name.removeprefix(f"{description.layers_root}.{parameter.layer}.")
        name = re.sub(r"(?<=\.)\d+(?=\.)", "*", name)
        key = (name, kind, parameter.shape, parameter.is_linear)
        counts[key] = counts.get(key, 0) + 1
    groups = (
        TensorGroup(name=name, kind=kind, shape=shape, count=count, is_linear=is_linear)
        for (name, kind, shape, is_linear), count in counts.items()
    )
    return tuple(frozen(group) if group.kind is Kind.VISION else group for group in groups)


def _kind(parameter: Parameter) -> Kind:
    """Returns the kind of a parameter, by its role and the parts of its name."""
    by_role = {"embedding": Kind.EMBEDDING, "head": Kind.HEAD, "norm": Kind.NORM, "vision": Kind.VISION}
    if parameter.role in by_role:
        return by_role[parameter.role]
    parts = parameter.name.split(".")
    if "experts" in parts:
        return Kind.EXPERT
    if _ROUTERS & set(parts[:-1]):
        return Kind.ROUTER
    return Kind.ATTENTION if any(_ATTENTION.search(part) for part in parts) else Kind.MLP


def _widest_mlp(groups: Sequence[TensorGroup], hidden_size: int) -> int:
    """Returns the inner width of the MLP from its matrices, by default the hidden size."""
    return max((max(group.shape) for group in groups if group.kind is Kind.MLP), default=hidden_size)


def _vision(description: Description) -> Vision | None:
    sizes = {"spatial_merge_size": 1, **description.vision_sizes}
    needed = {field.name for field in fields(Vision) if field.default is MISSING}
    return Vision(**sizes) if needed <= set(sizes) else None


def _moe(description: Description, groups: Sequence[TensorGroup]) -> Moe | None:
    per_token = description.sizes.get("num_experts_per_tok")
    down = next((group for group in groups if group.kind is Kind.EXPERT and group.name.endswith("down_proj")), None)
    if per_token is None or description.moe_block is None or down is None or len(down.shape) != 3:
        return None
    num_experts, *sides = down.shape
    hidden = description.sizes["hidden_size"]
    width = description.sizes.get("moe_intermediate_size") or next((side for side in sides if side != hidden), hidden)
    shared = [group for group in groups if "shared_expert" in group.name and group.name.endswith("up_proj.weight")]
    return Moe(
        num_experts=num_experts,
        experts_per_token=per_token,
        intermediate_size=width,
        shared_intermediate_size=sum(group.shape[0] for group in shared),
        num_moe_layers=down.count,
        block_class=description.moe_block,
    )


TIMEOUT_S = 600.0
"""Time limit of the tracer: imports take 5 to 20 s, a pass of a few layers 0.1 s."""

_PACKAGES = ("torch", "transformers", "peft")
"""Packages whose code the tracer runs."""

_SOURCES = ("train/model.py", "train/adapters.py", "train/tracing/*.py", "facts/model/trac*.py")
"""The tracer's own code, below the package."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Why a question has no answer."""

    __pydantic_config__ = type_config

    problem: str
    hint: str | None = None


Answer = Trace | Description | ActivationProfile | Failure


@dataclass(frozen=True, slots=True, kw_only=True)
class Questions:
    """The tracer's standard input."""

    __pydantic_config__ = type_config

    questions: tuple[Question, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """The tracer's standard output, and a file of the cache."""

    __pydantic_config__ = type_config

    answers: tuple[Answer, ...]
    """In the order of the questions."""


def trace_model(
    subject: Subject,
    way: Question,
    *,
    name: str,
    source: str,
    known: ModelFacts | None = None,
    timeout_s: float = TIMEOUT_S,
) -> ModelFacts:
    """Returns the facts of a model and its activations when trained as `way` says; its own `subject` is ignored.

    `known`: its facts, if only its activations are not.

    Raises InvalidConfig for 4-bit weights and if Transformers cannot build or run the model, EnvironmentProblem if the
    tracer cannot run here.
    """
    if way.method is Method.QLORA:
        problem = f"{name}: 4-bit weights cannot be planned: its layers are traced, and a trace has none to quantise"
        raise InvalidConfig(problem, hint="Other methods can be planned, if they fit.")
    description_question = Question(subject=subject, wanted=Wanted.DESCRIPTION)
    way = replace(way, subject=subject, wanted=Wanted.PROFILE)
    # one process answers both, since importing Transformers takes most of the time
    answers = ask((description_question, way), folder=cache_folder(), timeout_s=timeout_s)
    for answer in answers:
        if isinstance(answer, Failure):
            raise InvalidConfig(f"{name}: {answer.problem}", hint=answer.hint)
    description, profile = answers
    assert isinstance(description, Description)
    assert isinstance(profile, ActivationProfile)
    what = "the vision tower" if known is not None else "layers"
    note = (
        f'{what} of model_type "{description.model_type}" {"is" if known is not None else "are"} not written in'
        f" dstrain: traced with Transformers {installed('transformers')} on tensors without data"
    )
    model = known or from_description(description, name=name, source=source)
    return replace(model, traced=Traced(note=note, profile=profile))


def ask(
    questions: Sequence[Question], *, folder: Path | None = None, timeout_s: float = TIMEOUT_S
) -> tuple[Answer, ...]:
    """Returns the answers in the order of the questions, all from one child process.

    Answers by the same packages and the same tracer are cached in `folder`, unless the model brings its own code;
    failures are not cached. Raises EnvironmentProblem if the tracer cannot run.
    """
    files = [_file(question, folder) for question in questions]
    answers = {index: answer for index, file in enumerate(files) if (answer := _cached(file)) is not None}
    missing = [index for index in range(len(questions)) if index not in answers]
    if missing:
        fresh = _run([questions[index] for index in missing], timeout_s)
        for index, answer in zip(missing, fresh, strict=True):
            answers[index] = answer
            file = files[index]
            if file is not None and not isinstance(answer, Failure):
                write_atomic(file, to_json(Answers(answers=(answer,))))
    return tuple(answers[index] for index in range(len(questions)))


def cache_folder() -> Path:
    """Returns the folder of the cache: `dstrain/traces` below $XDG_CACHE_HOME, or else below ~/.cache."""
    return user_cache(os.environ) / "dstrain" / "traces"


def _file(question: Question, folder: Path | None) -> Path | None:
    if folder is None or question.subject.trust_remote_code:
        return None
    text = json.dumps(to_data(question), sort_keys=True)
    key = hashlib.sha256(f"{_fingerprint()}\n{text}".encode()).hexdigest()
    return folder / f"{key}.json"


def _cached(file: Path | None) -> Answer | None:
    if file is None or not file.exists():
        return None
    try:
        return load_json(Answers, file).answers[0]
    except (InvalidConfig, IndexError):  # damaged, or written by another version: asked again and overwritten
        return None


@cache
def _fingerprint() -> str:
    """Returns the versions that answers depend on: the packages' and a checksum of the tracer's code."""
    digest = hashlib.sha256(b"".join(source.read_bytes() for source in _sources())).hexdigest()
    return " ".join([*(f"{name}={installed(name)}" for name in _PACKAGES), digest])


def _sources() -> list[Path]:
    package = Path(__file__).resolve().parents[2]
    return sorted(source for pattern in _SOURCES for source in package.glob(pattern))


def _run(questions: Sequence[Question], timeout_s: float) -> tuple[Answer, ...]:
    """Returns the answers of a child process without GPUs.

    It is offline unless a model brings its own code, which is not in the cache or on a hub that answers.
    """
    remote = [question.subject.source or "" for question in questions if question.subject.trust_remote_code]
    is_online = bool(remote) and all(
        hub_config.cached_file(source, Hub.HF) is None or hub_config.is_reached(source, Hub.HF)
        for source in dict.fromkeys(remote)
    )
    # CUDA would take seconds and memory to start, for tensors without data
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""} | ({} if is_online else {hub_config.OFFLINE: "1"})
    try:
        child = subprocess.run(
            python("-m", "dstrain.train.tracing"),
            input=json.dumps(to_data(Questions(questions=tuple(questions)))),
            capture_output=True,
            text=True,
            timeout=timeout_s,
            env=environment,
            check=False,
        )
    except subprocess.TimeoutExpired:
        hint = "Run it again on a less busy machine."
        raise EnvironmentProblem(f"the tracer took more than {timeout_s:.0f} s", hint=hint) from None
    if child.returncode != 0:
        raise _broken(child.returncode, child.stderr.splitlines())
    data = json.loads(child.stdout)
    return from_data(Answers, data, locate=lambda place: f"the tracer's answer: /{'/'.join(map(str, place))}").answers


def _broken(returncode: int, lines: Iterable[str]) -> EnvironmentProblem:
    """Returns the error of a child that failed: its last line, or the missing package and how to install it."""
    last = next((line.strip() for line in reversed(list(lines)) if line.strip()), f"exit code {returncode}")
    module = last.removeprefix("ModuleNotFoundError: No module named ").strip("'\"")
    if module != last:
        return not_installed("the tracer needs", module, install=f"pip install {module}")
    return EnvironmentProblem(f"the tracer failed: {last}", hint="The tracer is `python -m dstrain.train.tracing`.")
