"""The table of configuration keys, against the engine and the Trainer that are installed."""

from __future__ import annotations

import ast
import dataclasses
import enum
import importlib
import inspect
import types
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from dstrain.config.keys import KEYS, ROWS, Key, Kind, Names, children, key_of
from tests.config.reading import Engine, Spy, import_engine

LIVE = {key.path: key for key in ROWS if key.removed is None}
OBJECTS = [key for key in LIVE.values() if key.kind is Kind.OBJECT and "*" not in key.path]
FREE_TEXTS = {"comet.mode", "tensor_parallel.preset_model"}
"""Texts that the engine takes unchecked; what reads them later knows only those of the table."""
LATE = (
    "data_efficiency.data_sampling.curriculum_learning.",
    "data_efficiency.data_routing.random_ltd.",
    "optimizer.params.",
    "scheduler.params.",
    "tensor_parallel.partition_config.",
    "weight_quantization.",
)
"""Prefixes of keys whose values DeepSpeed passes on unread."""
LATE_KEYS = {
    "data_efficiency.data_sampling.dynamic_batching.metrics_path",
    "data_parallel_size",
    "sequence_parallel_size",
}
VARIANTS: tuple[Mapping[str, Any], ...] = (
    {},
    {"zero_optimization": True},
    {
        "data_efficiency.data_sampling.dynamic_batching": {"enabled": True, "max_tokens": 1},
        "expert_parallel": {"enabled": False},
        "optimizer": {"type": "Adam"},
        "scheduler": {"type": "WarmupLR"},
    },
)
"""Contents of a document that make the engine take another branch while it reads it."""
EXAMPLES: Mapping[str, Mapping[str, Any]] = {"fp16": {"enabled": True}}
"""What must stand beside a key for its range to be checked."""


@pytest.fixture(scope="module")
def engine() -> Engine:
    return import_engine()


def _models(engine: Engine) -> dict[str, Any]:
    """Returns the pydantic model of each section that has one, by the section's path."""
    config = engine.runtime__config
    roots = {
        "bf16": engine.runtime__precision_config.DeepSpeedBF16Config,
        "comms_logger": engine.comm__config.CommsLoggerConfig,
        "compile": config.CompileConfig,
        "fp16": engine.runtime__precision_config.DeepSpeedFP16Config,
        "hybrid_engine": config.HybridEngineConfig,
        "tensor_parallel": engine.runtime__tensor_parallel__config.TPTrainingConfig,
        "timers.throughput": engine.utils__config.DeepSpeedThroughputTimerConfig,
        "weight_quantization": config.WeightQuantConfig,
        "zero_optimization": engine.runtime__zero__config.DeepSpeedZeroConfig,
    }
    monitors = engine.monitor__config.DeepSpeedMonitorConfig.model_fields
    roots |= {name: field.annotation for name, field in monitors.items()}
    found = {}
    waiting = list(roots.items())
    while waiting:
        path, model = waiting.pop()
        found[path] = model
        for name, field in model.model_fields.items():
            kind, annotation, _ = _read(field.annotation)
            if kind is Kind.OBJECT and hasattr(annotation, "model_fields"):
                waiting.append((f"{path}.{field.alias or name}", annotation))
    return found


def _read(annotation: Any) -> tuple[Kind, Any, bool]:
    """Returns the kind of an annotation, the annotation without None, and whether it took None."""
    parts = typing.get_args(annotation)
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        bare = [part for part in parts if part is not type(None)]
        if str in bare and int in bare:
            return Kind.INT, int, len(bare) < len(parts)
        return _read(bare[0])[0], bare[0], len(bare) < len(parts)
    origin = typing.get_origin(annotation) or annotation
    if origin is typing.Literal or (inspect.isclass(origin) and issubclass(origin, str | Path)):
        return Kind.TEXT, annotation, False
    for kind, classes in ((Kind.BOOL, bool), (Kind.INT, int), (Kind.NUMBER, float), (Kind.LIST, list | tuple)):
        if inspect.isclass(origin) and issubclass(origin, classes):
            return kind, annotation, False
    if origin is dict or hasattr(origin, "model_fields"):
        return Kind.OBJECT, annotation, False
    return Kind.ANY, annotation, True


def _fields(engine: Engine) -> Iterator[tuple[str, str, Any, Any]]:
    """Yields path, name, field and model of every field, once by its name and once by its alias."""
    for path, model in _models(engine).items():
        for name, field in model.model_fields.items():
            for spelling in {name, field.alias or name}:
                yield f"{path}.{spelling}", spelling, field, model


def _plain(value: Any) -> Any:
    value = value.value if isinstance(value, enum.Enum) else value
    return list(value) if isinstance(value, tuple) else value


def _nested(path: str, value: Mapping[str, Any]) -> dict[str, Any]:
    for name in reversed(path.split(".")):
        value = {name: value}
    return dict(value)


def _asked(engine: Engine) -> dict[str, Any]:
    """Returns every name outside the pydantic sections that reading a configuration asks for, with its default."""
    asked: dict[str, Any] = {}
    for variant in VARIANTS:
        document = Spy(asked, "", {"train_batch_size": 1})
        models = _models(engine)
        for key in sorted(OBJECTS, key=lambda key: key.path.count(".")):
            parts = key.path.split(".")
            inside = not any(".".join(parts[: n + 1]) in models for n in range(len(parts)))
            if inside and key.path not in ("bf16", "bfloat16") and not key.path.startswith(LATE):
                place = document
                for part in parts[:-1]:
                    place = dict.__getitem__(place, part)
                place[parts[-1]] = Spy(asked, key.path, variant.get(key.path) or {})
        document |= {name: value for name, value in variant.items() if value is True}
        engine.runtime__config.DeepSpeedConfig(document)
    return asked


def test_every_path_stands_once_and_below_a_row_of_its_own() -> None:
    assert len(KEYS) == len(ROWS)
    assert [key.path for key in ROWS if tuple(key.path.split("."))[:-1] not in {(), *KEYS}] == []
    assert [path for path in KEYS if not all(part == "*" or part.isidentifier() for part in path)] == []


def test_rows_are_found_by_wildcard_by_index_and_through_another_name() -> None:
    assert key_of(("compile", "passes", 3)) is KEYS["compile", "passes", "*"]
    assert key_of(("bfloat16", "enabled")) is KEYS["bf16", "enabled"]
    assert key_of(("bf16", "enabld")) is None and key_of((3,)) is None and key_of(()) is None
    assert children(("bfloat16",)) == children(("bf16",)) != ()
    assert {key.path for key in children(())} == {key.path for key in ROWS if "." not in key.path}


def test_another_name_is_like_the_name_it_stands_for() -> None:
    for key in (key for key in ROWS if key.alias_of):
        other = LIVE[str(key.alias_of)]
        fields = ("kind", "default", "least", "most", "words", "names")
        assert [getattr(key, name) for name in fields] == [getattr(other, name) for name in fields], key.path


def test_rows_say_what_they_mean_in_short_and_removed_ones_what_to_do() -> None:
    assert [key.path for key in ROWS if len(key.meaning) > 200 or not key.meaning.endswith((".", ".)"))] == []
    assert [key.path for key in ROWS if key.removed and not key.instead] == []
    assert [key.path for key in ROWS if key.words and key.kind is Kind.OBJECT] == []


def test_every_model_of_the_engine_is_a_section(engine: Engine) -> None:
    def below(cls: Any) -> Iterator[Any]:
        for child in cls.__subclasses__():
            yield from (child, *below(child))

    known = {*_models(engine).values(), engine.monitor__config.DeepSpeedMonitorConfig}
    found = set(below(engine.runtime__config_utils.DeepSpeedConfigModel))
    assert {cls.__name__ for cls in found - known if not cls.__module__.startswith("deepspeed.inference")} == set()


def test_every_field_is_a_row_and_every_row_a_field(engine: Engine) -> None:
    models = _models(engine)
    rows = {path for path in LIVE if path.rpartition(".")[0] in models and not path.endswith("*")}
    assert {path for path, *_ in _fields(engine)} == rows


def test_kind_null_and_default_are_those_of_the_field(engine: Engine) -> None:
    for path, _, field, _ in _fields(engine):
        key = LIVE[path]
        kind, _, nullable = _read(field.annotation)
        assert (key.kind, key.is_nullable or kind is Kind.ANY) == (kind, nullable), path
        if kind not in (Kind.OBJECT, Kind.ANY):
            assert key.default == _plain(field.get_default(call_default_factory=True)), path


def test_texts_are_those_that_the_field_takes(engine: Engine) -> None:
    for path, name, field, model in _fields(engine):
        key, annotation = LIVE[path], _read(field.annotation)[1]
        if typing.get_origin(annotation) is typing.Literal:
            assert key.words == typing.get_args(annotation), path
        elif inspect.isclass(annotation) and issubclass(annotation, enum.Enum) and key.kind is Kind.TEXT:
            assert set(key.words) == {member.value for member in annotation}, path
        for word in key.words:
            model(**{name: word})
        if key.words and path not in FREE_TEXTS:
            with pytest.raises(ValueError):
                model(**{name: "neither of them"})


def test_ranges_are_those_that_the_field_takes(engine: Engine) -> None:
    for path, name, field, model in _fields(engine):
        key, beside = LIVE[path], EXAMPLES.get(path.split(".")[0], {})
        limits = {type(limit).__name__: next(iter(dataclasses.asdict(limit).values())) for limit in field.metadata}
        step = int(key.kind is Kind.INT)
        if "Ge" in limits or "Gt" in limits:
            assert key.least == limits.get("Ge", limits.get("Gt", 0) + step), path
        if "Le" in limits or "Lt" in limits:
            assert key.most == limits.get("Le", limits.get("Lt", 0) - step), path
        for bad in ([] if key.least is None else [key.least - 1]) + ([] if key.most is None else [key.most + 1]):
            with pytest.raises(ValueError):
                model(**beside, **{name: bad})
        if key.kind is Kind.INT and key.least is not None:
            model(**beside, **{name: int(key.least)})


@pytest.mark.parametrize("key", [key for key in OBJECTS if not key.path.endswith(".params")], ids=lambda key: key.path)
def test_an_unknown_name_is_refused_just_where_the_table_says_so(engine: Engine, key: Key) -> None:
    document = {"train_batch_size": 1, **_nested(key.path, {"no_such_name": 1})}
    try:
        engine.runtime__config.DeepSpeedConfig(document)
        refused = False
    except (TypeError, ValueError):
        refused = True
    assert refused == (key.names is Names.REFUSED)


def test_every_name_the_engine_asks_for_is_a_row_with_that_default(engine: Engine) -> None:
    asked = _asked(engine)
    assert sorted(set(asked) - {key.path for key in ROWS}) == []
    for path, default in asked.items():
        if path in LIVE and LIVE[path].kind is not Kind.OBJECT and default is not None:
            assert LIVE[path].default == default, path


def test_every_row_outside_the_models_is_asked_for(engine: Engine) -> None:
    asked, models = set(_asked(engine)), _models(engine)
    rows = {path for path in LIVE if "*" not in path and not any(path.startswith(model + ".") for model in models)}
    late = {path for path in rows if path.startswith(LATE)} | LATE_KEYS
    pipeline = {path for path in rows if path.startswith("pipeline.")}
    assert sorted(rows - asked - late - pipeline) == []
    read = set(engine.runtime__config.get_pipeline_config({})) | {"use_reentrant"}
    assert {path.removeprefix("pipeline.") for path in pipeline} == read


def test_what_initialize_reads_is_a_row(engine: Engine) -> None:
    source = Path(str(importlib.import_module("deepspeed").__file__)).read_text(encoding="utf-8")
    names = set()
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Subscript(value=ast.Name("config"), slice=ast.Constant(str(name))):
                names.add(name)
            case ast.Compare(left=ast.Constant(str(name)), comparators=[ast.Name("config")]):
                names.add(name)
            case ast.Call(func=ast.Attribute(value=ast.Name("config"), attr="get"), args=[ast.Constant(str(name)), *_]):
                names.add(name)
    assert {"sequence_parallel_size", "data_parallel_size"} <= names <= set(LIVE)
