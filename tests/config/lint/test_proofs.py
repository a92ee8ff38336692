"""What rules say happens, happens: each error of the corpus against the real engine.

What the parser refuses is given to DeepSpeedConfig; what shows in a run is trained by two ranks, one
configuration after another; what needs CUDA is read in the engine's source.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dstrain.config import jsonc
from dstrain.config.jsonc import Pointer
from dstrain.config.keys import ROWS, Key, Kind
from dstrain.config.lint.engine import check, fixed, read
from dstrain.config.lint.rule import Subject
from dstrain.config.lint.rules.key_names import is_refused
from dstrain.config.resolve_auto import for_trainer
from dstrain.findings import errors
from dstrain.job.schema import Job
from tests.config.lint.case import Becomes, Case, Raises, Says
from tests.config.lint.cases_engine import ENGINE_CASES, KNOWLEDGE, SOUND
from tests.config.lint.cases_text import TEXT_CASES
from tests.conftest import asked_for
from tests.train.engine import Engine

CASES = [case for case in (*TEXT_CASES, *ENGINE_CASES, *KNOWLEDGE) if case.proof is not None]
TRAINED = [case for case in CASES if isinstance(case.proof, Becomes) or getattr(case.proof, "by", "") == "ranks"]
PARSED = [case for case in CASES if getattr(case.proof, "by", "") == "config"]
READ = [case for case in CASES if isinstance(case.proof, Says)]


@pytest.fixture(scope="module")
def trained(
    tmp_path_factory: pytest.TempPathFactory, engine: Engine, request: pytest.FixtureRequest
) -> dict[str, list[Any]]:
    """What two ranks made of the configurations, by the name of the case."""
    asked = asked_for(request, "case")
    chosen = [case for case in TRAINED if case in asked]
    folder = tmp_path_factory.mktemp("lint")
    cases = folder / "cases.json"
    fields = ("name", "is_trainers", "is_composite", "arguments")
    given = [{name: getattr(case, name) for name in fields} | {"config": value(case)} for case in chosen]
    sound = {"is_trainers": False, "is_composite": False, "arguments": {}}
    given += [{**sound, "name": name, "config": json.loads(text)} for name, text in SOUND]
    given.sort(key=_makes_groups)  # what AutoTP makes in a process stays there
    cases.write_text(json.dumps(given))
    codes = engine.run("tests.config.lint.ranks", cases, log=folder / "log", timeout_s=560)
    assert codes == [0, 0], (folder / "log.0").read_text()[-4000:]
    ranks = [json.loads(Path(f"{cases}.{rank}").read_text()) for rank in (0, 1)]
    return {one["name"]: [rank[one["name"]] for rank in ranks] for one in given}


def _makes_groups(one: dict[str, Any]) -> bool:
    """Returns whether a configuration makes groups of tensor-parallel ranks."""
    size = one["config"].get("tensor_parallel", {}).get("autotp_size", 1)
    return isinstance(size, int) and size > 1


def value(case: Case) -> Any:
    """Returns the configuration as `json.load` gives it: the last of two equal keys."""
    return jsonc.read(case.source, "x.json").value


@pytest.mark.parts(12)
@pytest.mark.parametrize("case", TRAINED, ids=lambda case: case.name)
def test_two_ranks_fail_or_become_another_run_as_it_says(case: Case, trained: dict[str, list[Any]]) -> None:
    for found in trained[case.name]:
        if isinstance(case.proof, Raises):
            assert case.proof.words, "an empty word proves nothing"
            assert case.proof.words in found.get("error", "it trained")
        else:
            assert isinstance(case.proof, Becomes)
            assert {key: found.get(key, found) for key in case.proof.facts} == case.proof.facts


@pytest.mark.parametrize("name", [name for name, _ in SOUND])
def test_what_lint_lets_pass_trains(name: str, trained: dict[str, list[Any]]) -> None:
    document, _ = read(dict(SOUND)[name], "x.json")
    assert document is not None
    assert errors(check(Subject(document=document, is_trainers=False))) == []
    for found in trained[name]:
        assert "error" not in found, found


@pytest.fixture(scope="session")
def parsed() -> dict[str, str]:
    """What DeepSpeedConfig raises, by the name of the case."""
    program = (
        "import json, sys\n"
        "from deepspeed.runtime.config import DeepSpeedConfig\n"
        "found = {}\n"
        "for name, config in json.load(sys.stdin).items():\n"
        "    try: DeepSpeedConfig(config)\n"
        "    except Exception as error: found[name] = f'{type(error).__name__}: {error}'\n"
        "print('\\n' + json.dumps(found))"
    )
    removed = {key.path: _holding(key) for key in ROWS if key.removed is not None}
    given = json.dumps({**{case.name: value(case) for case in PARSED}, **removed})
    line = [sys.executable, "-W", "ignore", "-c", program]
    done = subprocess.run(line, input=given, capture_output=True, text=True, check=True)
    found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.commands
@pytest.mark.parametrize("case", PARSED, ids=lambda case: case.name)
def test_the_parser_refuses_it(case: Case, parsed: dict[str, str]) -> None:
    assert isinstance(case.proof, Raises)
    assert case.proof.words in parsed[case.name]


_SETTINGS = """
import json, sys
from enum import Enum
from pydantic import BaseModel
from deepspeed.runtime.config import DeepSpeedConfig

def flat(path, value):
    if isinstance(value, BaseModel):
        value = value.model_dump()
    if isinstance(value, dict):
        return {name: inner for key, each in value.items() for name, inner in flat(f"{path}.{key}", each).items()}
    return {path: str(value)}

def settings(config):
    try:
        parsed = vars(DeepSpeedConfig(config))
    except Exception:
        return None
    plain = {key: each for key, each in parsed.items() if key != "_param_dict" and " object at 0x" not in str(each)}
    return {name: inner for key, each in plain.items() for name, inner in flat(key, each).items()}

print("\\n" + json.dumps([[settings(config) for config in pair] for pair in json.load(sys.stdin)]))
"""


def _filled(config: dict[str, Any]) -> dict[str, Any]:
    """Returns a configuration with what the Trainer of a job of defaults fills in."""
    return for_trainer(config, Job(model="m", output_dir="o"), None, num_ranks=1)


def _without(config: dict[str, Any], pointers: set[Pointer]) -> dict[str, Any]:
    """Returns a configuration without these keys."""
    copied: dict[str, Any] = json.loads(json.dumps(config))
    for *outer, name in pointers:
        node: Any = copied
        for part in outer:
            node = node.get(part, {}) if isinstance(node, dict) else {}
        if isinstance(node, dict):
            node.pop(name, None)
    return copied


@pytest.mark.commands
def test_a_fix_changes_no_setting_of_the_engine_but_the_key_that_it_mends() -> None:
    """Compares the real parser's results for each case before and after --fix. A case that it refuses is compared
    without the mended keys."""
    pairs, mended_keys = [], []
    for case in (*TEXT_CASES, *ENGINE_CASES):
        document, _ = read(case.source, "x.json")
        if document is None:
            continue
        after, mended = fixed(Subject(document=document, is_trainers=case.is_trainers))
        old = {change.pointer for finding in mended for change in finding.changes}
        new = {
            (*change.pointer[:-1], change.renamed or change.pointer[-1])
            for finding in mended
            for change in finding.changes
        }
        if mended:
            before = _without(document.value, old)
            assert _without(after.config, new) == before, case.name
            pairs.append([_filled(document.value), _filled(before), _filled(after.config)])
            mended_keys.append((case.name, {str(pointer[-1]) for pointer in old | new}))
    line = [sys.executable, "-W", "ignore", "-c", _SETTINGS]
    done = subprocess.run(line, input=json.dumps(pairs), capture_output=True, text=True, check=True)
    for (name, keys), (whole, bare, now) in zip(mended_keys, json.loads(done.stdout.splitlines()[-1]), strict=True):
        before = whole if whole is not None else bare
        if before is not None and now is not None:
            changed = {path for path in {*before, *now} if before.get(path) != now.get(path)}
            strangers = {path for path in changed if not any(key in path.split(".") for key in keys)}
            assert all(_follows(path, keys) for path in strangers), (name, strangers)


def _follows(path: str, keys: set[str]) -> bool:
    """Returns whether a setting of the parser is another name of a key, or counted from it."""
    others = {
        "gradient_accumulation_steps": ("train_batch_size",),
        "train_micro_batch_size_per_gpu": ("train_batch_size",),
        "zero_optimization": ("zero_config", "zero_optimization_stage", "zero_enabled"),
        "stage": ("zero_optimization_stage", "zero_enabled"),
        "bf16": ("bfloat16_config", "precision"),
        "type": ("optimizer_name", "scheduler_name"),
        "params": ("scheduler_params", "optimizer_params"),
        "lr": ("optimizer_params",),
    }
    return any(path.split(".")[0] in others.get(key, ()) for key in keys)


WRONGLY_MENDED = (
    '"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "gpu"}}',
    '"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cuda"}}',
    *(
        f'"zero_optimization": {{"stage": 2}}, "scheduler": {{"type": "{name}", "params": {{{params}}}}}'
        for name, params in (
            ("polynomial", ""),
            ("linear", ""),
            ("constant", ""),
            ("constant_with_warmup", ""),
            ("cosine", ""),
            ("CosineAnnealing", '"T_max": 10'),
            ("CosineAnnealing", '"warmup_min_lr": 0, "warmup_max_lr": 1e-5, "warmup_num_steps": 10, "T_max": 100'),
        )
    ),
    *(
        f'"zero_optimization": {{"stage": 2}}, "optimizer": {{"type": "{name}", "params": {{"lr": "auto"}}}}'
        for name in (
            "FusedAdam",
            "PagedAdamW",
            "galore_adamw",
            "stable_adamw",
            "AdamW8bit",
            "Adam8bit",
            "Adan",
            "Lamb2",
        )
    ),
    '"zero_optimization": {"stage": 2}, "fp16": {"enabled": false, "bf16_master_weights_and_grads": true}',
    '"zero_optimization": {"stage": 2}, "gradient_clipping": 0.5, "train_batch_size": 7',
    '"zero_optimization": {"stage": 3}',
)
"""What two letters make another thing, or what only a person can decide."""


@pytest.mark.parametrize("body", WRONGLY_MENDED)
def test_what_is_no_slip_of_a_letter_is_offered_and_not_applied(body: str) -> None:
    text = f'{{"train_micro_batch_size_per_gpu": "auto", "zero_allow_untested_optimizer": true, {body}}}'
    document, _ = read(text, "x.json")
    assert document is not None
    after, mended = fixed(Subject(document=document, is_trainers=True))
    assert (mended, after.document.text) == ([], text)


def _holding(key: Key) -> dict[str, object]:
    """Returns a sound configuration with a key that is gone."""
    config: dict[str, Any] = {"train_micro_batch_size_per_gpu": 1}
    *outer, name = key.path.split(".")
    node = config
    for part in outer:
        node = node.setdefault(part, {})
    node[name] = {} if key.kind is Kind.OBJECT else True if key.kind is Kind.BOOL else 8
    return config


@pytest.mark.commands
@pytest.mark.parametrize("key", [key for key in ROWS if key.removed is not None], ids=lambda key: key.path)
def test_a_key_that_is_gone_is_an_error_where_the_parser_refuses_it(key: Key, parsed: dict[str, str]) -> None:
    assert is_refused(key) == (key.path in parsed)


@pytest.mark.parametrize("case", READ, ids=lambda case: case.name)
def test_the_engine_says_it(case: Case) -> None:
    assert isinstance(case.proof, Says)
    package, _, rest = case.proof.file.partition("/")
    spec = importlib.util.find_spec(package)
    assert spec is not None and spec.origin is not None
    assert case.proof.text in (Path(spec.origin).parent / rest).read_text(encoding="utf-8")
