"""The manifest: it is what the published model says, quotes what it is given, and says where secrets are."""

from __future__ import annotations

import copy
import itertools
import os
import re
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ruamel.yaml import YAML

from dstrain.errors import InvalidConfig
from dstrain.launch.scripts.job_script import ScriptContext
from dstrain.launch.scripts.k8s import Claim, Pods, label, manifest, outside, parse_claim

pytestmark = pytest.mark.editors

ASKED = ScriptContext(
    job=Path("/shared/qwen/job.yaml"),
    run_dir=Path("/shared/qwen/output"),
    name="qwen",
    nodes=2,
    gpus=8,
    hosts=(),
    python="python3",
    overrides=(),
    secrets=("HF_TOKEN", "SWANLAB_API_KEY"),
    exports={},
    job_env={"NCCL_DEBUG": "WARN"},
)
PODS = Pods(image="registry.local/train:1", claims=(Claim(name="training", path="/shared"),))
FULL = replace(PODS, namespace="ml", cpus="64", memory="512Gi")


def parsed(text: str) -> dict[str, Any]:
    """Returns a manifest as the API server has it."""
    found: dict[str, Any] = YAML(typ="safe").load(text)
    return found


DOCUMENT = parsed(manifest(ASKED, FULL))
Place = tuple[str | int, ...]
"""Keys and indices from the top of a manifest."""
QUANTITIES = ("limits", "sizeLimit")
"""Fields whose values may be text or numbers; of numbers the model makes text or fractions."""


def every_manifest() -> list[dict[str, Any]]:
    """Returns manifests through every branch of the template."""
    choices = itertools.product((1, 2), (PODS, FULL, Pods(image="train")), ((), ("seed=7",)), ((), ASKED.secrets))
    return [
        parsed(manifest(replace(ASKED, nodes=nodes, overrides=overrides, secrets=secrets), pods))
        for nodes, pods, overrides, secrets in choices
    ]


def differences(before: Any, after: Any, place: Place = ()) -> list[str]:
    """Returns where a manifest came back as something else."""
    if isinstance(before, dict) and isinstance(after, dict):
        return [
            found for name in before | after for found in differences(before.get(name), after.get(name), (*place, name))
        ]
    if isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        pairs = enumerate(zip(before, after, strict=True))
        return [found for index, (one, other) in pairs for found in differences(one, other, (*place, index))]
    if is_quantity(place) and isinstance(before, int) and isinstance(after, str | float):
        before, after = float(before), float(after)
    return [] if type(before) is type(after) and before == after else [f"{place}: {before!r} came back as {after!r}"]


def is_quantity(place: Place) -> bool:
    return any(name in QUANTITIES for name in place[-2:])


def faults(document: dict[str, Any]) -> list[str]:
    """Returns what the published model refuses of a manifest, or does not give back."""
    from kubeflow_trainer_api.models import TrainerV1alpha1TrainJob  # a second of imports

    try:
        return differences(document, TrainerV1alpha1TrainJob.from_dict(document).to_dict())
    except (AttributeError, TypeError, ValueError) as error:
        return [repr(error)]


def nodes(node: Any, place: Place = ()) -> Iterator[tuple[Place, Any]]:
    """Yields every part of a manifest and where it stands."""
    yield place, node
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for name, value in items:
        yield from nodes(value, (*place, name))


def changed(document: dict[str, Any], place: Place, value: Any) -> dict[str, Any]:
    """Returns a manifest with another value in one place."""
    found = {"": copy.deepcopy(document)}
    *way, last = ("", *place)
    holder: Any = found
    for name in way:
        holder = holder[name]
    holder[last] = value
    return found[""]


def trainer() -> dict[str, Any]:
    """Returns the container that trains."""
    found: dict[str, Any] = DOCUMENT["spec"]["trainer"]
    return found


def test_a_manifest_is_the_one_on_record(golden: Callable[[str, str], None]) -> None:
    golden("script/k8s.trainjob.yaml", manifest(replace(ASKED, overrides=("seed=7",)), FULL))


def test_every_manifest_comes_back_whole_from_the_published_model() -> None:
    assert [fault for document in every_manifest() for fault in faults(document)] == []


@pytest.mark.parametrize("is_field", [True, False])
def test_a_field_that_the_published_model_lacks_or_a_value_of_another_type_is_found_anywhere(is_field: bool) -> None:
    parts = [(place, node) for place, node in nodes(DOCUMENT) if not is_quantity(place)]
    others: list[tuple[Place, Any]]
    if is_field:
        others = [(place, node | {"imagePullPolice": "x"}) for place, node in parts if isinstance(node, dict)]
    else:
        others = [(place, 7 if isinstance(node, str) else "7") for place, node in parts if place]
    assert len(others) > 10
    assert [place for place, other in others if not faults(changed(DOCUMENT, place, other))] == []


def test_the_script_of_a_pod_is_bash() -> None:
    assert trainer()["command"] == ["bash", "-c"]
    text = trainer()["args"][0]
    done = subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert re.findall(r"\$\(|\$\$", text) == []  # Kubernetes would take these for variables of its own


def test_secrets_are_references() -> None:
    named = {each["name"]: each["valueFrom"]["secretKeyRef"] for each in trainer()["env"] if "valueFrom" in each}
    assert named == {name: {"name": "dstrain", "key": name} for name in ASKED.secrets}


@pytest.mark.parametrize("nodes", [1, 3])
def test_all_nodes_are_there_with_their_gpus(nodes: int) -> None:
    found = parsed(manifest(replace(ASKED, nodes=nodes), FULL))["spec"]["trainer"]
    assert found["resourcesPerNode"]["limits"]["nvidia.com/gpu"] == 8
    assert (found["numNodes"], found["numProcPerNode"]) == (nodes, 8)


PRINTABLE = st.text(min_size=1).filter(str.isprintable)


@given(value=PRINTABLE)
def test_whatever_is_printable_arrives_as_it_was(value: str) -> None:
    asked = replace(
        ASKED, job=Path("/shared") / value / "job.yaml", overrides=(f"model={value}",), job_env={"A": value}
    )
    found = parsed(manifest(asked, PODS))["spec"]["trainer"]
    env = {each["name"]: each.get("value", "").replace("$$", "$") for each in found["env"]}
    assert env["A"] == value
    assert env["DSTRAIN_JOB"] == str(asked.job)
    assert found["args"][1:] == ["dstrain", "--set", f"model={value}".replace("$", "$$")]


@pytest.mark.parametrize(
    "change",
    [
        *({"image": "a b"}, {"namespace": "ML"}, {"secret": "a_b"}, {"shm": "lots"}, {"cpus": "-1"}),
        *({"memory": "1GB; rm"}, {"gpu_resource": "nvidia.com/gpu: 8"}, {"runtime": ""}),
    ],
)
def test_what_the_api_server_would_refuse_is_told(change: dict[str, str]) -> None:
    with pytest.raises(InvalidConfig):
        manifest(ASKED, replace(PODS, **change))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["Qwen", "1b", "a" * 60, "a_b", "a.b", "-a", ""])
def test_a_name_that_pods_cannot_have_is_told(name: str) -> None:
    with pytest.raises(InvalidConfig, match="--name is"):
        manifest(replace(ASKED, name=name), PODS)


@given(st.text())
def test_any_name_becomes_one_that_pods_can_have(name: str) -> None:
    assert re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", label(name))


@pytest.mark.parametrize("text", ["training", "training:", "training:shared", "Training:/a", "a:/b:/c", "a:/../etc"])
def test_a_claim_without_a_place_is_told(text: str) -> None:
    with pytest.raises(InvalidConfig, match="--pvc"):
        parse_claim(text)


def test_what_lies_on_no_volume_is_told() -> None:
    from dstrain.job.schema import Job

    job = Job(model="Qwen/Qwen3-8B", data="/data/train.jsonl", output_dir="/shared/out", ds_config="/shared/a.json")
    assert outside(ASKED, job, PODS.claims) == ["data /data/train.jsonl"]


def run_pod(document: dict[str, Any], folder: Path) -> tuple[int, list[list[str]]]:
    """Runs what a pod would, with a program in place of Python; returns its code and the words of each call."""
    program = folder / "python"
    program.write_text('#!/bin/bash\nprintf "%s\\0" "$@" --- >>"$0.typed"\n')
    program.chmod(0o755)
    container = document["spec"]["trainer"]
    variables = {each["name"]: each.get("value", "").replace("$$", "$") for each in container["env"]}
    line = [*container["command"], *(word.replace("$$", "$") for word in container["args"])]
    done = subprocess.run(line, env={**os.environ, **variables}, capture_output=True, timeout=30)
    calls = Path(f"{program}.typed").read_text().split("\0---\0")[:-1]
    return done.returncode, [call.split("\0") for call in calls]


def in_folder(folder: Path) -> ScriptContext:
    return replace(
        ASKED,
        job=folder / "job.yaml",
        run_dir=folder / "out put",
        python=str(folder / "python"),
        overrides=("monitor.name=$(A) $$ 'b'",),
    )


@pytest.mark.parametrize(("is_done", "code"), [(True, 0), (False, 75)])
def test_a_pod_prepares_and_trains_and_says_whether_it_left_early(tmp_path: Path, is_done: bool, code: int) -> None:
    out = tmp_path / "out put"
    out.mkdir()
    if is_done:
        (out / "summary.json").touch()
    found, calls = run_pod(parsed(manifest(in_folder(tmp_path), PODS)), tmp_path)
    assert found == code
    prepare = ["-P", "-m", "dstrain.cli", "script", "prepare", f"{tmp_path}/job.yaml", "--nodes", "2", "--gpus", "16"]
    assert calls == [
        [*prepare, "--set", "monitor.name=$(A) $$ 'b'", "--set", "resume=auto"],
        ["-P", "-m", "torch.distributed.run", "-m", "dstrain.train", str(out)],
    ]
