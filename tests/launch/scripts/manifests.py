"""Schemas of the manifests: the fields that ours may have, and the published ones where a folder of them is named."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

Schema = dict[str, Any]
Key = tuple[str, str]
"""`apiVersion` and `kind`."""

TEXT: Schema = {"type": "string"}
WHOLE: Schema = {"type": "integer", "minimum": 0}
QUANTITY: Schema = {"type": ["integer", "string"]}


def choice(*values: str) -> Schema:
    """Returns the schema of one of some words."""
    return {"enum": list(values)}


def many(schema: Schema) -> Schema:
    """Returns the schema of a list."""
    return {"type": "array", "items": schema}


def each(schema: Schema) -> Schema:
    """Returns the schema of an object with any keys."""
    return {"type": "object", "additionalProperties": schema}


def record(*needed: str, **fields: Schema) -> Schema:
    """Returns the schema of an object with these fields and no others."""
    return {"type": "object", "properties": fields, "required": list(needed), "additionalProperties": False}


LIMITS = record("limits", limits=each(QUANTITY))
ENV = many(
    record(
        "name",
        name=TEXT,
        value=TEXT,
        valueFrom=record("secretKeyRef", secretKeyRef=record("name", "key", name=TEXT, key=TEXT)),
    )
)
MOUNTS = many(record("name", "mountPath", name=TEXT, mountPath=TEXT))
VOLUMES = many(
    record(
        "name",
        name=TEXT,
        emptyDir=record("medium", medium=choice("Memory"), sizeLimit=QUANTITY),
        persistentVolumeClaim=record("claimName", claimName=TEXT),
    )
)
CONTAINER = record(
    *("name", "image", "command", "args"),
    name=TEXT,
    image=TEXT,
    command=many(TEXT),
    args=many(TEXT),
    env=ENV,
    resources=LIMITS,
    volumeMounts=MOUNTS,
)
POD = record(
    "containers",
    containers=many(CONTAINER),
    volumes=VOLUMES,
    restartPolicy=choice("Never", "OnFailure"),
    terminationGracePeriodSeconds=WHOLE,
)
TEMPLATE = record("spec", spec=POD)
METADATA = record("name", name=TEXT, namespace=TEXT)
REPLICAS = record(
    "replicas", "restartPolicy", "template", replicas=WHOLE, restartPolicy=choice("OnFailure"), template=TEMPLATE
)
RUN_POLICY = record("cleanPodPolicy", cleanPodPolicy=choice("None", "Running", "All"), backoffLimit=WHOLE)
POLICIES = many(
    record(
        *("event", "action"),
        event=choice("PodEvicted", "PodFailed", "TaskCompleted"),
        action=choice("RestartJob", "CompleteJob"),
    )
)
PATCHED_POD = record(
    terminationGracePeriodSeconds=WHOLE,
    containers=many(record("name", name=TEXT, volumeMounts=MOUNTS)),
    volumes=VOLUMES,
)
PATCHED_JOB = record("name", name=TEXT, template=record(spec=record(template=record(spec=PATCHED_POD))))
SPECS: dict[Key, Schema] = {
    ("kubeflow.org/v1", "PyTorchJob"): record(
        "pytorchReplicaSpecs",
        nprocPerNode=TEXT,
        runPolicy=RUN_POLICY,
        pytorchReplicaSpecs=record("Master", Master=REPLICAS, Worker=REPLICAS),
    ),
    ("trainer.kubeflow.org/v1alpha1", "TrainJob"): record(
        "runtimeRef",
        runtimeRef=record("name", name=TEXT),
        trainer=record(
            image=TEXT,
            command=many(TEXT),
            args=many(TEXT),
            env=ENV,
            numNodes=WHOLE,
            numProcPerNode=WHOLE,
            resourcesPerNode=LIMITS,
        ),
        runtimePatches=many(
            record(
                "manager",
                manager=TEXT,
                trainingRuntimeSpec=record(template=record(spec=record(replicatedJobs=many(PATCHED_JOB)))),
            )
        ),
    ),
    ("kubeflow.org/v2beta1", "MPIJob"): record(
        "mpiReplicaSpecs",
        slotsPerWorker=WHOLE,
        launcherCreationPolicy=choice("AtStartup", "WaitForWorkersReady"),
        mpiImplementation=choice("OpenMPI", "Intel", "MPICH"),
        runPolicy=RUN_POLICY,
        mpiReplicaSpecs=record("Launcher", "Worker", Launcher=REPLICAS, Worker=REPLICAS),
    ),
    ("batch.volcano.sh/v1alpha1", "Job"): record(
        "tasks",
        schedulerName=TEXT,
        queue=TEXT,
        minAvailable=WHOLE,
        maxRetry=WHOLE,
        plugins=each(many(TEXT)),
        policies=POLICIES,
        tasks=many(
            record("name", "replicas", "template", name=TEXT, replicas=WHOLE, policies=POLICIES, template=TEMPLATE)
        ),
    ),
}
"""What stands under `spec`, by kind."""


def ours(key: Key) -> Schema:
    """Returns the schema of our manifests of a kind."""
    api, kind = key
    return record(
        *("apiVersion", "kind", "metadata", "spec"),
        apiVersion=choice(api),
        kind=choice(kind),
        metadata=METADATA,
        spec=SPECS[key],
    )


@cache
def published() -> dict[Key, Schema]:
    """Returns the schemas of the CRDs in the folder that DSTRAIN_CRDS names, closed; none where it is not set."""
    folder = os.environ.get("DSTRAIN_CRDS")
    found: dict[Key, Schema] = {}
    for path in sorted(Path(folder).glob("*.yaml")) if folder else []:
        crd = YAML(typ="safe").load(path)
        for version in crd["spec"]["versions"]:
            key = (f"{crd['spec']['group']}/{version['name']}", crd["spec"]["names"]["kind"])
            found[key] = closed(version["schema"]["openAPIV3Schema"])
    return found


def closed(schema: Schema) -> Schema:
    """Returns a CRD's schema as JSON Schema in which unknown fields are errors, unless it says that they are kept."""
    if schema.get("x-kubernetes-int-or-string"):
        return QUANTITY
    found = {name: value for name, value in schema.items() if name not in ("description", "format")}
    if "properties" in found:
        found["properties"] = {name: closed(value) for name, value in found["properties"].items()}
        if not found.get("x-kubernetes-preserve-unknown-fields"):
            found.setdefault("additionalProperties", False)
    for name in ("items", "additionalProperties"):
        if isinstance(found.get(name), dict):
            found[name] = closed(found[name])
    return found


def strangers(mine: Schema, theirs: Schema, place: str = "") -> list[str]:
    """Returns the places of our fields that a published schema does not have, or has with another type."""
    if "properties" in mine and theirs.get("properties") is not None:
        found = []
        for name, value in mine["properties"].items():
            if name not in theirs["properties"]:
                found.append(f"{place}.{name}")
            else:
                found += strangers(value, theirs["properties"][name], f"{place}.{name}")
        return found
    if "properties" in mine and isinstance(theirs.get("additionalProperties"), dict):
        values = mine["properties"].items()
        return [
            each
            for name, value in values
            for each in strangers(value, theirs["additionalProperties"], place + "." + name)
        ]
    for name in ("items", "additionalProperties"):
        if isinstance(mine.get(name), dict) and isinstance(theirs.get(name), dict):
            return strangers(mine[name], theirs[name], place + "[]")
    if "enum" in mine:
        legal = theirs.get("enum")
        return [place] if theirs.get("type") != "string" or (legal and not set(mine["enum"]) <= set(legal)) else []
    if "properties" in mine and place != ".metadata":
        return [place]
    return [] if mine.get("type") == theirs.get("type") else [place]
