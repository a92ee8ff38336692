"""The schemas accept what is right and refuse what is wrong, at its place."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft7Validator
from ruamel.yaml import YAML

from dstrain.config.jsonc import Pointer
from dstrain.config.keys import KEYS, ROWS, Kind, key_of
from dstrain.config.lint.engine import read
from dstrain.config.schema import CONFIG_SCHEMA, JOB_SCHEMA, SCHEMA_KEY, config_schema, job_schema, schema_files
from dstrain.job.file import synonyms
from dstrain.job.schema import Job
from dstrain.records import to_data
from tests.config.lint.case import Case
from tests.config.lint.documented import RAW, TRAINERS
from tests.config.lint.test_corpus import CASES

ROOT = Path(__file__).parents[2]
GOLDENS = sorted((ROOT / "tests" / "golden").glob("*/ds_config.json"))
JOBS, EXAMPLES = sorted((ROOT / "tests" / "golden").glob("*/job.yaml")), sorted((ROOT / "launch").glob("*.job.yaml"))
CONFIG, JOB = Draft7Validator(config_schema()), Draft7Validator(job_schema())

FREE: dict[str, Any] = {
    "_comment": {"who": "me"},
    "x-owner": "me",
    "bfloat16": {"enabled": True},
    "tensor_parallel": {"autotp_size": 2, "partition_config": {"layer_specs": [{"patterns": ["q_proj"]}]}},
    "weight_quantization": {"post_init_quant": {"mlp": {"num_bits": 4, "group_size": 64, "group_dim": 0}}},
    "datastates_ckpt": {"host_cache_size": 16},
}
"""Notes, another name, a list of objects, names that are anybody's."""
OUTDATED = {
    "Transformers, NVMe": ["aio.thread_count"],
    "Accelerate, ZeRO-3 with offload": ["zero_optimization.stage3_gather_16bit_weights_on_model_save"],
    "DeepSpeed, Getting started": ["zero_optimization"],
}
"""What documentation shows and lint warns of too: a name that is gone, an "auto" that nothing fills, ZeRO as true."""
VISIBLE = (
    *("DS101", "DS102", "DS103", "DS104"),  # names
    *("DS110", "DS111", "DS112", "DS113"),  # types, ranges and words
    *("DS209", "DS501", "DS503"),
)
"""Rules of lint whose every mistake is one of a single key, so that a schema can say it."""

BAD: tuple[tuple[dict[str, Any], str], ...] = (
    ({"zero_optimization": {"sub_group_size": "auto"}}, "zero_optimization.sub_group_size"),
    ({"zero_optimization": {"reduce_bucket_size": 0}}, "zero_optimization.reduce_bucket_size"),
    ({"zero_optimization": {"offload_param": {"devise": "cpu"}}}, "zero_optimization.offload_param"),
    ({"bf16": {"enable": True}}, "bf16"),
    ({"bf16": True}, "bf16"),
    ({"fp16": {"enabled": "true"}}, "fp16.enabled"),
    ({"fp16": {"loss_scale": "auto"}}, "fp16.loss_scale"),
    ({"gradient_clipping": "1.0"}, "gradient_clipping"),
    ({"gradient_clipping": None}, "gradient_clipping"),
    ({"train_batch_size": 0}, "train_batch_size"),
    ({"train_batch_size": True}, "train_batch_size"),
    ({"communication_data_type": "int8"}, "communication_data_type"),
    ({"optimizer": {"type": "Adam", "params": {"learning_rate": 1e-5}}}, "optimizer.params"),
    ({"checkpoint": {"tag_validation": "STOP"}}, "checkpoint.tag_validation"),
    ({"activation_checkpointing": {"partition_activation": True}}, "activation_checkpointing"),
    ({"flops_profiler": {"profile_steps": 1}}, "flops_profiler"),
    (
        {"tensor_parallel": {"partition_config": {"layer_specs": [{"pattern": ["q"]}]}}},
        "tensor_parallel.partition_config.layer_specs.0",
    ),
    ({"weight_quantization": {"post_init_quant": {"mlp": {"bits": 4}}}}, "weight_quantization.post_init_quant.mlp"),
)


def errors(validator: Draft7Validator, document: Any) -> list[str]:
    """Returns the paths of all errors, dotted."""
    return [".".join(map(str, error.absolute_path)) for error in validator.iter_errors(document)]


def faults(config: dict[str, Any]) -> Iterator[Pointer]:
    """Yields the place of every error; of an unknown name its own, not that of its object."""
    for error in CONFIG.iter_errors(config):
        place = tuple(error.absolute_path)
        if error.validator != "additionalProperties":  # of several forms, the one that fits as far as an item
            yield max((place, *(tuple(each.absolute_path) for each in error.context or ())), key=len)
            continue
        notes = "|".join(error.schema.get("patternProperties", {})) or "$^"
        for name in error.instance:
            if name not in error.schema["properties"] and not re.search(notes, name):
                yield (*place, name)


def leaves(schema: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], dict[str, Any]]]:
    """Yields the schema of every key with its path."""
    inner = dict(schema.get("properties", {}))
    for name, keyword in (("*", "additionalProperties"), ("*", "items")):
        if isinstance(schema.get(keyword), dict):
            inner[name] = schema[keyword]
    for option in schema.get("anyOf", ()):
        inner |= option.get("properties", {}) | ({"*": option["items"]} if "items" in option else {})
    for name, each in inner.items():
        yield (*path, name), each
        yield from leaves(each, (*path, name))


@pytest.mark.parametrize("schema", [config_schema(), job_schema()], ids=["config", "job"])
def test_the_schema_is_draft_7(schema: dict[str, Any]) -> None:
    Draft7Validator.check_schema(schema)
    assert "$ref" not in json.dumps(schema)


@pytest.mark.parametrize("path", GOLDENS, ids=lambda path: path.parent.name)
def test_every_golden_configuration_is_valid(path: Path) -> None:
    config = json.loads(path.read_text(encoding="utf-8"))
    assert errors(CONFIG, config) == []
    assert next(iter(config)) == SCHEMA_KEY
    assert config[SCHEMA_KEY] == f"./{CONFIG_SCHEMA}"


@pytest.mark.parametrize("path", [*JOBS, *EXAMPLES], ids=lambda path: path.parent.name)
def test_every_golden_and_example_job_is_valid(path: Path) -> None:
    assert errors(JOB, YAML(typ="safe", pure=True).load(path)) == []


@pytest.mark.parametrize("path", JOBS, ids=lambda path: path.parent.name)
def test_a_job_names_its_schema_on_its_first_line(path: Path) -> None:
    first = path.read_text(encoding="utf-8").splitlines()[0]
    assert first == f"# yaml-language-server: $schema=./{JOB_SCHEMA}"


@pytest.mark.parametrize("name", [*TRAINERS, *RAW])
def test_a_documented_configuration_is_valid_but_for_what_is_outdated(name: str) -> None:
    assert [".".join(map(str, place)) for place in faults({**TRAINERS, **RAW}[name])] == OUTDATED.get(name, [])


def test_notes_lists_and_free_names_are_valid() -> None:
    assert errors(CONFIG, FREE) == []


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_of_the_mistakes_that_lint_knows_those_of_one_key_are_errors_and_nothing_beside_them(case: Case) -> None:
    document, _ = read(case.source, "x.json")
    if document is None or not isinstance(document.value, dict):
        return  # nothing that a schema could be asked about
    found = [document.place(pointer) for pointer in faults(document.value)]
    places = [(place.line, place.column) for place in found]
    assert places == [case.place] if case.rule in VISIBLE else places in ([], [case.place])


@pytest.mark.parametrize(("config", "path"), BAD, ids=[json.dumps(config)[:60] for config, _ in BAD])
def test_what_is_wrong_is_an_error_at_its_place(config: dict[str, Any], path: str) -> None:
    assert errors(CONFIG, config) == [path]


def test_every_key_is_there_and_no_removed_one() -> None:
    there = {path for path, _ in leaves(config_schema())} - {(SCHEMA_KEY,)}
    assert there >= {tuple(key.path.split(".")) for key in ROWS if key.removed is None}
    assert not there & {tuple(key.path.split(".")) for key in ROWS if key.removed is not None}


def test_every_default_is_legal_where_it_stands() -> None:
    for path, schema in leaves(config_schema()):
        if "default" in schema:
            assert errors(Draft7Validator(schema), schema["default"]) == [], path


def test_auto_is_legal_exactly_where_something_is_filled_in_or_the_engine_has_it() -> None:
    for path, schema in leaves(config_schema()):
        key = key_of(path)
        if key is None or key.kind in (Kind.ANY, Kind.OBJECT) or (key.kind is Kind.TEXT and not key.words):
            continue
        takes_auto = not errors(Draft7Validator(schema), "auto")
        assert takes_auto == (key.filled is not None or "auto" in key.words), path


def test_a_deprecated_key_says_what_to_write() -> None:
    for path, schema in leaves(config_schema()):
        key = KEYS.get(path)
        assert schema.get("deprecated", False) == (key is not None and key.instead is not None), path
        if key is not None and key.instead is not None:
            assert key.instead in schema["description"]


def test_every_key_has_a_description() -> None:
    for schema in (config_schema(), job_schema()):
        named = [(path, each) for path, each in leaves(schema) if path[-1] != "*"]
        assert [path for path, each in named if not each.get("description")] == []


def test_a_job_with_every_default_is_valid_and_one_with_another_tools_names_is_not() -> None:
    job = to_data(Job(model="m", output_dir="o"))
    assert errors(JOB, job) == []
    for name in synonyms():
        if name not in job:
            assert errors(JOB, {**job, name: 1}) == [""], name


@pytest.mark.parametrize(
    ("change", "path"),
    [
        ({"seq_len": 0}, "seq_len"),
        ({"method": "loar"}, "method"),
        ({"lora": {"rnk": 8}}, "lora"),
        ({"warmup_ratio": 3}, "warmup_ratio"),
        ({"monitor": {"sinks": ["swanlap"]}}, "monitor.sinks.0"),
        ({"env": {"A": [1]}}, "env.A"),
        ({"model": None}, "model"),
    ],
)
def test_what_is_wrong_in_a_job_is_an_error_at_its_place(change: dict[str, Any], path: str) -> None:
    assert errors(JOB, {"model": "m", "output_dir": "o", **change}) == [path]


def test_a_variable_may_be_a_number_as_a_job_reads_it() -> None:
    assert errors(JOB, {"model": "m", "output_dir": "o", "env": {"OMP_NUM_THREADS": 8}}) == []


def test_the_files_are_the_schemas() -> None:
    assert {name: json.loads(text) for name, text in schema_files().items()} == {
        CONFIG_SCHEMA: config_schema(),
        JOB_SCHEMA: job_schema(),
    }
