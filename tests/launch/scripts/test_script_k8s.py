"""Manifests: every one is what the operators' schemas say, quotes what it is given, and says where secrets are."""

from __future__ import annotations

import copy
import itertools
import os
import re
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from ruamel.yaml import YAML

from dstrain.errors import InvalidConfig
from dstrain.launch.scripts.k8s import Claim, Kind, Pods, label, manifest, outside, parse_claim
from dstrain.launch.scripts.script_context import ScriptContext
from tests.launch.scripts.manifests import SPECS, ours, published, strangers

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


def every_manifest() -> list[dict[str, Any]]:
    """Returns manifests through every branch of the templates."""
    choices = itertools.product(Kind, (1, 2, 5), (PODS, FULL, Pods(image="train")), ((), ("seed=7",)), (True, False))
    return [
        parsed(
            manifest(
                replace(ASKED, nodes=nodes, overrides=overrides, secrets=ASKED.secrets if secret else ()), pods, kind
            )
        )
        for kind, nodes, pods, overrides, secret in choices
    ]


def faults(document: dict[str, Any], schema: dict[str, Any]) -> list[str]:
    """Returns what a schema has against a manifest."""
    return [
        f"{list(error.absolute_path)}: {error.message}" for error in Draft202012Validator(schema).iter_errors(document)
    ]


def key(document: dict[str, Any]) -> tuple[str, str]:
    return document["apiVersion"], document["kind"]


def containers(document: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns all containers of a manifest, the trainer of a TrainJob among them."""
    found: list[dict[str, Any]] = []

    def look(node: Any) -> None:
        if isinstance(node, dict):
            found.extend(each for each in [node] if "image" in node)
            for each in node.values():
                look(each)
        elif isinstance(node, list):
            for each in node:
                look(each)

    look(document)
    return found


@pytest.mark.parametrize("kind", Kind)
def test_a_manifest_is_the_one_on_record(kind: Kind, golden: Callable[[str, str], None]) -> None:
    golden(f"script/k8s.{kind.value}.yaml", manifest(replace(ASKED, overrides=("seed=7",)), FULL, kind))


def test_every_manifest_has_known_fields_alone() -> None:
    assert not [fault for document in every_manifest() for fault in faults(document, ours(key(document)))]


@pytest.mark.parametrize(
    "document", [parsed(manifest(ASKED, FULL, kind)) for kind in Kind], ids=[k.value for k in Kind]
)
def test_a_broken_manifest_is_told(document: dict[str, Any]) -> None:
    schemas = [ours(key(document)), *([published()[key(document)]] if published() else [])]
    for schema in schemas:
        assert faults(document | {"spec": document["spec"] | {"replica": 1}}, schema)
        broken = copy.deepcopy(document)
        containers(broken)[0]["imagePullPolice"] = "Always"
        assert faults(broken, schema)
        broken = copy.deepcopy(document)
        containers(broken)[0]["args"] = "sleep"
        assert faults(broken, schema)


@pytest.mark.skipif(not published(), reason="DSTRAIN_CRDS names no folder with the published schemas")
def test_every_manifest_is_what_the_published_schemas_say() -> None:
    assert not [fault for document in every_manifest() for fault in faults(document, published()[key(document)])]


@pytest.mark.skipif(not published(), reason="DSTRAIN_CRDS names no folder with the published schemas")
@pytest.mark.parametrize("kind", SPECS, ids=[kind for _, kind in SPECS])
def test_the_fields_on_record_are_those_of_the_published_schemas(kind: tuple[str, str]) -> None:
    assert strangers(ours(kind), published()[kind]) == []


@pytest.mark.parametrize("kind", Kind)
def test_the_scripts_of_pods_are_bash(kind: Kind) -> None:
    for container in containers(parsed(manifest(ASKED, FULL, kind))):
        assert container["command"] == ["bash", "-c"]
        text = container["args"][0]
        done = subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True)
        assert (done.returncode, done.stderr) == (0, "")
        assert re.findall(r"\$\(|\$\$", text) == []  # Kubernetes would take these for variables of its own


@pytest.mark.parametrize("kind", Kind)
def test_secrets_are_references_where_ranks_are_started(kind: Kind) -> None:
    found = [each for container in containers(parsed(manifest(ASKED, FULL, kind))) for each in container.get("env", [])]
    named = {each["name"]: each["valueFrom"]["secretKeyRef"] for each in found if "valueFrom" in each}
    assert named == {name: {"name": "dstrain", "key": name} for name in ASKED.secrets}


@pytest.mark.parametrize("kind", Kind)
@pytest.mark.parametrize("nodes", [1, 3])
def test_all_nodes_are_there_with_their_gpus(kind: Kind, nodes: int) -> None:
    spec = parsed(manifest(replace(ASKED, nodes=nodes), FULL, kind))["spec"]
    if kind is Kind.PYTORCHJOB:
        pods = [(each["replicas"], each["template"]) for each in spec["pytorchReplicaSpecs"].values()]
    elif kind is Kind.MPIJOB:
        pods = [(each["replicas"], each["template"]) for each in spec["mpiReplicaSpecs"].values()]
    elif kind is Kind.VOLCANO:
        pods = [(each["replicas"], each["template"]) for each in spec["tasks"]]
        assert spec["minAvailable"] == nodes
    else:
        assert spec["trainer"]["resourcesPerNode"]["limits"]["nvidia.com/gpu"] == 8
        assert (spec["trainer"]["numNodes"], spec["trainer"]["numProcPerNode"]) == (nodes, 8)
        return
    limits = [(count, pod["spec"]["containers"][0].get("resources", {}).get("limits", {})) for count, pod in pods]
    assert sum(count * limit.get("nvidia.com/gpu", 0) for count, limit in limits) == 8 * nodes


PRINTABLE = st.text(min_size=1).filter(str.isprintable)


@given(value=PRINTABLE, kind=st.sampled_from(Kind))
def test_whatever_is_printable_arrives_as_it_was(value: str, kind: Kind) -> None:
    asked = replace(
        ASKED, job=Path("/shared") / value / "job.yaml", overrides=(f"model={value}",), job_env={"A": value}
    )
    found = parsed(manifest(asked, PODS, kind))
    first = next(container for container in containers(found) if "env" in container)
    env = {each["name"]: each.get("value", "").replace("$$", "$") for each in first["env"]}
    assert env["A"] == value
    assert env["DSTRAIN_JOB"] == str(asked.job)
    assert first["args"][1:] == ["dstrain", "--set", f"model={value}".replace("$", "$$")]


@pytest.mark.parametrize(
    "pods",
    [
        replace(PODS, image="a b"),
        replace(PODS, namespace="ML"),
        replace(PODS, secret="a_b"),
        replace(PODS, shm="lots"),
        replace(PODS, cpus="-1"),
        replace(PODS, memory="1GB; rm"),
        replace(PODS, gpu_resource="nvidia.com/gpu: 8"),
        replace(PODS, runtime=""),
        replace(PODS, queue="a\nb"),
    ],
)
def test_what_the_api_server_would_refuse_is_told(pods: Pods) -> None:
    with pytest.raises(InvalidConfig):
        manifest(ASKED, pods, Kind.VOLCANO)


@pytest.mark.parametrize("name", ["Qwen", "1b", "a" * 60, "a_b", "a.b", "-a", ""])
def test_a_name_that_pods_cannot_have_is_told(name: str) -> None:
    with pytest.raises(InvalidConfig, match="--name is"):
        manifest(replace(ASKED, name=name), PODS, Kind.PYTORCHJOB)


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
    container = next(each for each in containers(document) if "env" in each)
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


@pytest.mark.parametrize("kind", [Kind.PYTORCHJOB, Kind.TRAINJOB])
@pytest.mark.parametrize(("is_done", "code"), [(True, 0), (False, 75)])
def test_a_pod_prepares_and_trains_and_says_whether_it_left_early(
    tmp_path: Path, kind: Kind, is_done: bool, code: int
) -> None:
    out = tmp_path / "out put"
    out.mkdir()
    if is_done:
        (out / "summary.json").touch()
    found, calls = run_pod(parsed(manifest(in_folder(tmp_path), PODS, kind)), tmp_path)
    assert found == code
    prepare = ["-P", "-m", "dstrain.cli", "script", "prepare", f"{tmp_path}/job.yaml", "--nodes", "2", "--gpus", "16"]
    assert calls == [
        [*prepare, "--set", "monitor.name=$(A) $$ 'b'", "--set", "resume=auto"],
        ["-P", "-m", "torch.distributed.run", "-m", "dstrain.train", str(out)],
    ]


def test_the_launcher_of_an_mpijob_starts_the_run_on_the_operators_hosts(tmp_path: Path) -> None:
    found, calls = run_pod(parsed(manifest(in_folder(tmp_path), PODS, Kind.MPIJOB)), tmp_path)
    hosts = f"{tmp_path}/out put/hostfile.job"
    assert found == 0
    words = ["--launcher", "ssh", "--hostfile", hosts, "--save-on-term", "--set", "monitor.name=$(A) $$ 'b'"]
    assert calls == [
        ["-P", "-m", "dstrain.cli", "hostfile", "write", "--from", "k8s", "-o", hosts],
        ["-P", "-m", "dstrain.cli", "run", f"{tmp_path}/job.yaml", *words, "--set", "resume=auto"],
    ]
