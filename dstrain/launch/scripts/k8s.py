"""Writes a manifest for Kubernetes: a TrainJob of Kubeflow Trainer, `trainer.kubeflow.org/v1alpha1`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from dstrain.config.templates import render_yaml
from dstrain.errors import InvalidConfig
from dstrain.job.file import looks_local
from dstrain.job.schema import Job
from dstrain.launch.environment import SAFE_PATH
from dstrain.launch.scripts.job_script import ScriptContext, one_line
from dstrain.units import MIB

GRACE_S = 600
"""How long a pod may take to end: one step and one checkpoint."""
_LABEL = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_RESOURCE = re.compile(r"([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-\w.]*[A-Za-z0-9])?", re.ASCII)
_QUANTITY = re.compile(r"[0-9]+(\.[0-9]+)?([KMGTPE]i|[mkMGTPE])?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A PersistentVolumeClaim and its mount point."""

    name: str
    path: str
    """The mount path, absolute."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pods:
    """The parts of a job's pods."""

    image: str
    """The image, with dstrain installed."""
    namespace: str | None = None
    """The namespace; not given: the one of kubectl's context."""
    claims: tuple[Claim, ...] = ()
    """Volumes shared by all pods."""
    secret: str = "dstrain"
    """The Secret in which the job's secrets are, by the names of their variables."""
    shm: str = "16Gi"
    """Limit of a pod's shared memory."""
    cpus: str | None = None
    memory: str | None = None
    gpu_resource: str = "nvidia.com/gpu"
    """The resource name of a GPU."""
    runtime: str = "torch-distributed"
    """The ClusterTrainingRuntime."""


def parse_claim(text: str, what: str = "--pvc") -> Claim:
    """Returns a claim and its mount path. Raises InvalidConfig.

    >>> parse_claim("training:/shared").path
    '/shared'
    """
    name, colon, path = text.partition(":")
    if not colon or not path.startswith("/") or ":" in path or ".." in PurePosixPath(path).parts:
        raise InvalidConfig(f'{what} "{text}" is not CLAIM:/path', hint=f"Write {what} training:/shared.")
    return Claim(name=_checked(what, name, _SUBDOMAIN, 253), path=one_line(what, path))


def manifest(asked: ScriptContext, pods: Pods) -> str:
    """Returns the manifest of a job."""
    _checked("--name", asked.name, _LABEL, 63 - len(f"-node-0-{max(0, asked.nodes - 1)}"))
    values = {
        "name": asked.name,
        "nodes": asked.nodes,
        "gpus": asked.gpus,
        "words": [_literal(word) for word in asked.words],
        "variables": _variables(asked),
        "secrets": asked.secrets,
        "volumes": [
            {"name": f"volume-{number}", "claim": claim.name, "path": claim.path}
            for number, claim in enumerate(pods.claims)
        ],
        "grace_s": GRACE_S,
    }
    return render_yaml("k8s.trainjob.yaml.j2", values | _checked_pods(pods))


def _checked_pods(pods: Pods) -> dict[str, Any]:
    """Returns the options of the pods; raises InvalidConfig for values that the API server would refuse."""
    if not re.fullmatch(r"[A-Za-z0-9][\w./:@-]*", pods.image, re.ASCII):
        raise InvalidConfig(f'--image "{pods.image}" is not an image', hint="Write it as registry/name:tag.")
    for what, quantity in (("--shm", pods.shm), ("--cpus", pods.cpus), ("--memory", pods.memory)):
        if quantity is not None:
            _checked(what, quantity, _QUANTITY, 32)
            if what != "--cpus" and quantity.isdigit() and 0 < int(quantity) < MIB:
                hint = f"Write {what} {quantity}Gi."
                raise InvalidConfig(f"{what} {quantity} has no unit: it would be bytes", hint=hint)
    return {
        "image": pods.image,
        "namespace": None if pods.namespace is None else _checked("--namespace", pods.namespace, _SUBDOMAIN, 63),
        "secret": _checked("--secret", pods.secret, _SUBDOMAIN, 253),
        "shm": pods.shm,
        "cpus": pods.cpus,
        "memory": pods.memory,
        "gpu_resource": _checked("--gpu-resource", pods.gpu_resource, _RESOURCE, 253),
        "runtime": _checked("--runtime", pods.runtime, _SUBDOMAIN, 253),
    }


def _variables(asked: ScriptContext) -> list[tuple[str, str]]:
    """Returns the environment of the pods; the script inside them reads its values there."""
    ours = {
        "DSTRAIN_PYTHON": asked.python,
        "DSTRAIN_JOB": str(asked.job),
        "DSTRAIN_FOLDER": str(asked.job.parent),
        "DSTRAIN_RUN_DIR": str(asked.run_dir),
        "DSTRAIN_NODES": str(asked.nodes),
        "DSTRAIN_GPUS": str(asked.nodes * asked.gpus),
        **SAFE_PATH,
    }
    return [(name, _literal(value)) for name, value in {**ours, **dict(sorted(asked.job_env.items()))}.items()]


def outside(asked: ScriptContext, job: Job, claims: tuple[Claim, ...]) -> list[str]:
    """Returns the paths on none of the volumes, which the pods would not find, or would lose with themselves."""
    sources = {"data": job.train_sources, "eval_data": job.eval_sources}
    named = [("model", job.model), *((key, data.path) for key, all_data in sources.items() for data in all_data)]
    local = [(key, name) for key, name in named if looks_local(name)]
    paths = [("the job", str(asked.job)), ("output_dir", job.output_dir), *local, ("ds_config", job.ds_config)]
    return [
        f"{what} {path}"
        for what, path in paths
        if not any(PurePosixPath(path).is_relative_to(claim.path) for claim in claims)
    ]


def _literal(value: str) -> str:
    """Returns text that Kubernetes passes on as it is: in arguments and environment `$(NAME)` means a variable.

    Source: kubernetes third_party/forked/golang/expansion: `$$` is a dollar.
    """
    return value.replace("$", "$$")


def _checked(what: str, value: str, pattern: re.Pattern[str], longest: int) -> str:
    """Returns a name as Kubernetes takes it; raises InvalidConfig for others."""
    if pattern.fullmatch(value) is None:
        raise InvalidConfig(
            f'{what} is "{value}", which Kubernetes refuses', hint="Use lower-case letters, digits and dashes."
        )
    if len(value) > longest:
        raise InvalidConfig(f'{what} is "{value}", {len(value)} characters long; the limit is {longest}')
    return value


def label(name: str) -> str:
    """Returns the name that a job has in Kubernetes.

    >>> label("Qwen3-8B_run.2")
    'qwen3-8b-run-2'
    """
    plain = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    return plain if plain[:1].isalpha() else f"run-{plain}".rstrip("-")
