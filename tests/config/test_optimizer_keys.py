"""The table of configuration keys, where the engine reads it late: optimizers, schedules, rules, and the Trainer."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import textwrap
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

from dstrain.config.keys import (
    ENGINE_ADAM,
    KEYS,
    OWN_OPTIMIZERS,
    OWN_SCHEDULES,
    PYTHON_SCHEDULES,
    ROWS,
    TORCH_OPTIMIZERS,
    TORCH_SCHEDULES,
    Kind,
    Names,
    children,
    optimizer_parameters,
)
from tests.config.reading import Engine, Spy, import_engine

LIVE = {key.path: key for key in ROWS if key.removed is None}
METRIC = "data_efficiency.data_sampling.curriculum_learning.curriculum_metrics.*"
LTD = "data_efficiency.data_routing.random_ltd"
FROM_PYTHON = {"ChainedScheduler", "LRScheduler", "_LRScheduler", "LambdaLR", "MultiplicativeLR", "SequentialLR"}
"""Schedules of torch that take functions or other schedules, which JSON cannot say."""
UNREAD = {"optimizer.params.max_grad_norm", "optimizer.params.decoupled_wd"}
"""Refused by the engine; and of the package mup, which is not installed."""


@pytest.fixture(scope="module")
def engine() -> Engine:
    return import_engine()


def _below(path: str) -> set[str]:
    return {key.path.removeprefix(path + ".") for key in children(tuple(path.split("."))) if key.path in LIVE}


def _signatures(classes: Iterable[Any]) -> dict[str, list[Any]]:
    """Returns the parameters of all classes but the first, with the defaults they have."""
    found: dict[str, list[Any]] = {}
    for cls in classes:
        for parameter in list(inspect.signature(cls).parameters.values())[1:]:
            found.setdefault(parameter.name, []).append(
                list(parameter.default) if isinstance(parameter.default, tuple) else parameter.default
            )
    return found


def _constants(function: Callable[..., Any], engine: Engine) -> set[str]:
    """Returns the names that a method of the engine takes out of the optimizer's parameters."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    names = set()
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Attribute(attr="pop"), args=[ast.Constant(str(name)), *_]):
                names.add(name)
            case ast.Call(func=ast.Attribute(attr="pop"), args=[ast.Name(name), *_]):
                names.add(getattr(engine.runtime__engine, name))
    return names


def _optimizers(engine: Engine) -> dict[str, Any]:
    optim = importlib.import_module("torch.optim")
    hidden = ("Optimizer", "Muon")  # a base; and one whose name means DeepSpeed's own
    classes = {name: cls for name, cls in vars(optim).items() if inspect.isclass(cls) and name not in hidden}
    return {name: cls for name, cls in classes.items() if issubclass(cls, optim.Optimizer)}


def _schedules(engine: Engine) -> dict[str, Any]:
    torch = importlib.import_module("torch.optim.lr_scheduler")
    own = {
        name: getattr(engine.runtime__lr_schedules, name) for name in engine.runtime__lr_schedules.VALID_LR_SCHEDULES
    }
    classes = {name: cls for name, cls in vars(torch).items() if inspect.isclass(cls) and name not in FROM_PYTHON}
    return own | {name: cls for name, cls in classes.items() if issubclass(cls, torch.LRScheduler)}


def test_parameters_of_optimizers_are_those_that_some_optimizer_takes(engine: Engine) -> None:
    classes = [
        *_optimizers(engine).values(),
        engine.ops__adam.FusedAdam,
        engine.ops__adam.DeepSpeedCPUAdam,
        engine.ops__adagrad.DeepSpeedCPUAdagrad,
        engine.ops__lamb.FusedLamb,
        engine.ops__lion.FusedLion,
        engine.ops__lion.DeepSpeedCPULion,
    ]
    taken = _signatures(classes)
    del taken["adamw_mode"]  # the engine hands it on itself
    core = engine.runtime__engine.DeepSpeedEngine
    popped = _constants(core._configure_basic_optimizer, engine) | _constants(core.get_optimizer_configuration, engine)
    muon = {*core._MUON_HALF_KEYS, *core._ADAM_HALF_KEYS, "muon_lr", "adam_lr", "per_head_muon"}
    rows = {f"optimizer.params.{name}" for name in _below("optimizer.params")}
    assert {f"optimizer.params.{name}" for name in {*taken, *popped, *muon}} == rows - UNREAD | {
        "optimizer.params.max_grad_norm"
    }
    for name, defaults in taken.items():
        key = LIVE[f"optimizer.params.{name}"]
        assert key.default in defaults or name in ("max_grad_norm", "momentum"), key.path
    assert LIVE["optimizer.params.ns_method"].words == tuple(
        sorted(engine.runtime__zero__muon__original_muon.NS_METHODS)
    )


def _takes(cls: Any) -> dict[str, Any]:
    """Returns the parameters of a class but the first, with their defaults; `...` must be given."""
    parameters = list(inspect.signature(cls).parameters.values())[1:]
    defaults = {each.name: ... if each.default is inspect.Parameter.empty else each.default for each in parameters}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in defaults.items()}


def test_each_optimizer_of_torch_takes_what_the_table_says(engine: Engine) -> None:
    assert {name: _takes(cls) for name, cls in _optimizers(engine).items()} == TORCH_OPTIMIZERS


def test_each_optimizer_of_deepspeed_takes_what_the_table_says(engine: Engine) -> None:
    read = {*ENGINE_ADAM, "adamw_mode", "max_grad_norm"}
    gpu = {"adam": engine.ops__adam.FusedAdam, "lamb": engine.ops__lamb.FusedLamb, "lion": engine.ops__lion.FusedLion}
    cpu = {"adam": engine.ops__adam.DeepSpeedCPUAdam, "lion": engine.ops__lion.DeepSpeedCPULion}
    cpu["adagrad"] = engine.ops__adagrad.DeepSpeedCPUAdagrad
    for classes, is_offloaded in ((gpu, False), (cpu, True)):
        for name, cls in classes.items():
            said, taken = optimizer_parameters(name, {}, is_offloaded=is_offloaded), _takes(cls)
            assert said is not None
            assert {key: said[key] for key in said if key not in read} == {
                key: taken[key] for key in taken if key not in read
            }, name
    assert {*OWN_OPTIMIZERS} == set(engine.runtime__config.DEEPSPEED_OPTIMIZERS)


def test_each_schedule_takes_what_the_table_says(engine: Engine) -> None:
    assert {name: _takes(cls) for name, cls in _schedules(engine).items()} == {**OWN_SCHEDULES, **TORCH_SCHEDULES}
    assert set(PYTHON_SCHEDULES) <= FROM_PYTHON


def test_types_of_optimizers_are_those_that_the_engine_finds(engine: Engine) -> None:
    own, words = set(engine.runtime__config.DEEPSPEED_OPTIMIZERS), LIVE["optimizer.type"].words
    assert {word.lower() for word in words} >= own
    assert {word for word in words if word.lower() not in own} == {
        name for name in _optimizers(engine) if name.lower() not in own
    }


def test_parameters_of_schedules_are_those_that_some_schedule_takes(engine: Engine) -> None:
    taken = _signatures(_schedules(engine).values())
    assert set(taken) == _below("scheduler.params")
    for name, defaults in taken.items():
        key = LIVE[f"scheduler.params.{name}"]
        assert key.default in defaults or key.default is None, key.path
        assert key.default is not None or inspect.Parameter.empty in defaults or None in defaults or key.default_note
    assert set(LIVE["scheduler.type"].words) == set(_schedules(engine))


@pytest.mark.parametrize("path", ["optimizer.params", "scheduler.params"])
def test_a_parameter_nobody_takes_raises(engine: Engine, path: str) -> None:
    assert LIVE[path].names is Names.REFUSED
    classes = {**_optimizers(engine), "FusedAdam": engine.ops__adam.FusedAdam} if path[0] == "o" else _schedules(engine)
    kinds = {parameter.kind for cls in classes.values() for parameter in inspect.signature(cls).parameters.values()}
    assert inspect.Parameter.VAR_KEYWORD not in kinds


def test_what_transformers_fills_is_marked_and_nothing_else() -> None:
    spec = importlib.util.find_spec("transformers")
    assert spec is not None and spec.origin is not None
    source = (Path(spec.origin).parent / "integrations" / "deepspeed.py").read_text(encoding="utf-8")
    filled = {
        node.args[0].value
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in ("fill_match", "fill_only")
        and isinstance(node.args[0], ast.Constant)
    }
    assert {key.path for key in ROWS if key.filled} == filled


def test_what_the_engine_rejects_by_name_is_removed(engine: Engine) -> None:
    config = engine.runtime__config
    rejected = {*config._REMOVED_TOP_LEVEL_CONFIG_KEYS}
    rejected |= {f"zero_optimization.{name}" for name in config._REMOVED_ZERO_CONFIG_KEYS}
    assert rejected <= {key.path for key in ROWS if key.removed}
    for path in rejected:
        section, _, name = path.rpartition(".")
        with pytest.raises(config.DeepSpeedConfigError):
            config.DeepSpeedConfig({"train_batch_size": 1, **({section: {name: 1}} if section else {name: 1})})


@pytest.mark.parametrize("schedule", ["fixed_linear", "fixed_root", "fixed_discrete"])
def test_what_a_curriculum_reads_is_a_row(engine: Engine, schedule: str) -> None:
    asked: dict[str, Any] = {}
    names = {"total_curriculum_step": 1, "difficulty_step": 8, "root_degree": 2, "difficulty": [1, 2], "max_step": [1]}
    steps = Spy(asked, f"{METRIC}.schedule_config", names)
    metric = {"min_difficulty": 1, "max_difficulty": 2, "schedule_type": schedule, "schedule_config": steps}
    scheduler = engine.runtime__data_pipeline__curriculum_scheduler.CurriculumScheduler(Spy(asked, METRIC, metric))
    scheduler.get_difficulty(1)
    assert set(asked) <= set(LIVE)
    assert schedule in LIVE[f"{METRIC}.schedule_type"].words


def test_what_random_ltd_reads_is_a_row(engine: Engine) -> None:
    asked: dict[str, Any] = {}
    growth = Spy(asked, f"{LTD}.random_ltd_schedule.schedule_config", {"require_steps": 1, "seq_per_step": 1})
    schedule = {"min_value": 1, "max_value": 2, "schedule_type": "fixed_linear", "schedule_config": growth}
    config = {
        "total_layer_num": 2,
        "random_ltd_layer_num": 1,
        "random_ltd_schedule": Spy(asked, f"{LTD}.random_ltd_schedule", schedule),
        "global_batch_size": 1,
        "layer_token_lr_schedule": Spy(asked, f"{LTD}.layer_token_lr_schedule", {"enabled": False}),
    }
    scheduler = engine.runtime__data_pipeline__data_routing__scheduler.RandomLTDScheduler(Spy(asked, LTD, config))
    scheduler.update_seq(1)
    below = {path for path in LIVE if path.startswith(f"{LTD}.") and LIVE[path].source.startswith("runtime/data_pi")}
    layer = {path for path in below if "basic_layer.py" in LIVE[path].source}
    assert set(asked) <= set(LIVE) and below - layer - set(asked) == {f"{LTD}.enabled"}


def test_names_of_data_efficiency_are_those_the_engine_knows(engine: Engine) -> None:
    known = {value for value in vars(engine.runtime__data_pipeline__constants).values() if isinstance(value, str)}
    assert {path[-1] for path in KEYS if path[0] == "data_efficiency"} - known == {"*"}


def test_own_rules_of_autotp_are_read_with_those_defaults(engine: Engine) -> None:
    asked: dict[str, Any] = {}
    path = "tensor_parallel.partition_config"
    rule = Spy(asked, f"{path}.layer_specs.*", {"patterns": []})
    engine.module_inject__autotp_config.AutoTPConfig.from_dict(Spy(asked, path, {"layer_specs": [rule]}))
    rows = {key for key in LIVE if key.startswith(f"{path}.") and not key.endswith("*")}
    assert set(asked) == rows
    assert {key: default for key, default in asked.items() if default != LIVE[key].default} == {}
    kinds = {kind.value for kind in engine.module_inject__autotp_config.PartitionType}
    assert {word.lower() for word in LIVE[f"{path}.layer_specs.*.partition_type"].words} == kinds
    presets = LIVE["tensor_parallel.preset_model"].words
    assert all(engine.module_inject__autotp_config.AutoTPPresets.get_preset(word) for word in presets)


def test_weights_are_quantized_by_those_names(engine: Engine) -> None:
    source = inspect.getsource(engine.inference__quantization__utils)
    read = {name for name in _below("weight_quantization.quantized_initialization") if f"config['{name}']" in source}
    assert (
        read
        == _below("weight_quantization.quantized_initialization")
        == {path[-1] for path in KEYS if path[:-1] == ("weight_quantization", "post_init_quant", "*")}
    )
    assert source.count("config['") == sum(source.count(f"config['{name}']") for name in read)


def test_autoep_takes_those_texts_and_numbers(engine: Engine) -> None:
    autoep, path = engine.module_inject__auto_ep_config, "expert_parallel."
    assert LIVE[path + "preset_model"].words == tuple(autoep.PRESET_MODELS)
    assert LIVE[path + "expert_activation"].words == tuple(autoep.EXPERT_ACTIVATIONS)
    texts = {key.path: "neither" for key in LIVE.values() if key.path.startswith(path) and key.words}
    numbers = {key.path: key.least - 1 for key in LIVE.values() if key.path.startswith(path) and key.least is not None}

    def validate(more: Mapping[str, Any]) -> None:
        autoep.validate_autoep_config(autoep.parse_autoep_config({"enabled": True, **more}), 1, 1, 1, 1)

    validate({})
    for name, bad in {**texts, **numbers}.items():
        if name not in (path + "top_k",):
            with pytest.raises((ValueError, ZeroDivisionError)):
                validate({name.removeprefix(path): bad})


@pytest.mark.parametrize(
    "path",
    [
        path
        for path, key in LIVE.items()
        if (key.words and key.kind is Kind.TEXT and (path.count(".") == 0 or path.startswith("checkpoint.")))
    ],
)
def test_texts_read_without_a_model_are_checked(engine: Engine, path: str) -> None:
    def read(word: str) -> Any:
        value: Any = word
        for name in reversed(path.split(".")):
            value = {name: value}
        config = engine.runtime__config.DeepSpeedConfig({"train_batch_size": 1, **value})
        if path == "log_level":
            engine.utils__logging.get_log_level_from_string(config.log_level)
        return config

    for word in LIVE[path].words:
        read(word)
    with pytest.raises((ValueError, AssertionError, engine.runtime__config.DeepSpeedConfigError)):
        read("neither")


def test_number_formats_are_those_the_engine_knows(engine: Engine) -> None:
    known = {text for dtype in engine.runtime__config.DtypeEnum for text in dtype._all_values[1:]}
    for path in ("torch_autocast.dtype", *(f"data_types.{name}_dtype" for name in ("grad_accum", "param", "buffer"))):
        assert set(LIVE[path].words) == {text for text in known if "int8" not in text}, path
