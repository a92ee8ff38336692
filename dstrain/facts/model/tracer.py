"""Asks the meta-tensor tracer, a child process that imports PyTorch and Transformers, and caches its answers.

The child reads `Questions` and writes `Answers` as JSON, in the same order.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from dstrain.choices import Hub, Method
from dstrain.errors import EnvironmentProblem, InvalidConfig
from dstrain.facts.caches import user_cache
from dstrain.facts.model import hub_config
from dstrain.facts.model.model_facts import ModelFacts
from dstrain.facts.model.trace_records import Description, Question, Subject, Trace, Wanted
from dstrain.facts.model.traced_activations import ActivationProfile, Traced
from dstrain.facts.model.traced_model import from_description
from dstrain.facts.releases import installed
from dstrain.paths import python, write_atomic
from dstrain.records import from_data, load_json, to_data, to_json, type_config

TIMEOUT_S = 600.0
"""Time limit of the tracer: imports take 5 to 20 s, a pass of a few layers 0.1 s."""

_PACKAGES = ("torch", "transformers", "peft")
"""Packages whose code the tracer runs."""

_SOURCES = ("train/trace.py", "train/model.py", "train/tracing/*.py", "facts/model/trac*.py")
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
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""} | ({} if is_online else {hub_config.OFFLINE: "1"})
    try:
        child = subprocess.run(
            python("-m", "dstrain.train.trace"),
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
        return EnvironmentProblem(f"the tracer needs {module}, which is not installed", hint=f"pip install {module}")
    return EnvironmentProblem(f"the tracer failed: {last}", hint="The tracer is `python -m dstrain.train.trace`.")
