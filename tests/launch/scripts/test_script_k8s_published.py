"""Manifests go through the models that Kubeflow and Kubernetes publish on PyPI, and come back whole."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
from kubeflow.training import ApiClient
from kubeflow_trainer_api.models import TrainerV1alpha1TrainJob

from dstrain.launch.scripts.k8s import Kind, manifest
from tests.launch.scripts.test_script_k8s import ASKED, FULL, every_manifest, key, parsed

Place = tuple[str | int, ...]
"""Keys and indices from the top of a manifest."""

QUANTITIES = ("limits", "sizeLimit")
"""Fields whose values may be text or numbers; of numbers the models make text or fractions."""

DOCUMENTS = {kind: parsed(manifest(ASKED, FULL, kind)) for kind in Kind}


@cache
def client() -> ApiClient:
    """Returns what makes models of JSON, those of `kubernetes.client` among them; it connects to nothing."""
    return ApiClient()


@cache
def manifests() -> dict[Kind, list[dict[str, Any]]]:
    """Returns the manifests through every branch of the templates, by kind."""
    kinds = {key(document): kind for kind, document in DOCUMENTS.items()}
    found: dict[Kind, list[dict[str, Any]]] = {kind: [] for kind in Kind}
    for document in every_manifest():
        found[kinds[key(document)]].append(document)
    return found


def returned(document: dict[str, Any], kind: Kind) -> dict[str, Any]:
    """Returns a manifest as the published models give it back; where a kind has none, its pod templates alone do."""
    if kind is Kind.TRAINJOB:
        found: dict[str, Any] = TrainerV1alpha1TrainJob.from_dict(document).to_dict()
        return found
    if kind is Kind.PYTORCHJOB:
        return swagger(document, "KubeflowOrgV1PyTorchJob")
    whole = copy.deepcopy(document)
    whole["metadata"] = swagger(whole["metadata"], "V1ObjectMeta")
    for owner in owners(whole, kind):
        owner["template"] = swagger(owner["template"], "V1PodTemplateSpec")
    return whole


def swagger(node: dict[str, Any], model: str) -> dict[str, Any]:
    """Returns a part of a manifest as a model of Kubeflow's training client gives it back."""
    made = client().deserialize(SimpleNamespace(data=json.dumps(node)), model)
    found: dict[str, Any] = client().sanitize_for_serialization(made)
    return found


def owners(document: dict[str, Any], kind: Kind) -> list[dict[str, Any]]:
    """Returns what holds a pod template, in an MPIJob or a Job of Volcano."""
    spec = document["spec"]
    found = list(spec["mpiReplicaSpecs"].values() if kind is Kind.MPIJOB else spec["tasks"])
    assert found and all("template" in each for each in found)
    return found


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


def faults(document: dict[str, Any], kind: Kind) -> list[str]:
    """Returns what the models refuse of a manifest, or do not give back."""
    try:
        return differences(document, returned(document, kind))
    except (AttributeError, TypeError, ValueError) as error:  # the models of Kubernetes raise all of these
        return [repr(error)]


def nodes(node: Any, place: Place = ()) -> Iterator[tuple[Place, Any]]:
    """Yields every part of a manifest and where it stands."""
    yield place, node
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for name, value in items:
        yield from nodes(value, (*place, name))


def covered(document: dict[str, Any], kind: Kind) -> list[tuple[Place, Any]]:
    """Returns the parts of a manifest that a published model knows, but for quantities."""
    return [
        (place, node)
        for place, node in nodes(document)
        if not is_quantity(place)
        and (kind in (Kind.TRAINJOB, Kind.PYTORCHJOB) or place[:1] == ("metadata",) or "template" in place)
    ]


def changed(document: dict[str, Any], place: Place, value: Any) -> dict[str, Any]:
    """Returns a manifest with another value in one place."""
    found = {"": copy.deepcopy(document)}
    *way, last = ("", *place)
    holder: Any = found
    for name in way:
        holder = holder[name]
    holder[last] = value
    return found[""]


@pytest.mark.parametrize("kind", Kind)
def test_every_manifest_comes_back_whole_from_the_published_models(kind: Kind) -> None:
    assert manifests()[kind]
    assert [fault for document in manifests()[kind] for fault in faults(document, kind)] == []


@pytest.mark.parametrize("kind", Kind)
def test_a_field_that_no_published_model_has_is_told_wherever_it_stands(kind: Kind) -> None:
    records = [(place, node) for place, node in covered(DOCUMENTS[kind], kind) if isinstance(node, dict)]
    assert len(records) > 10
    broken = {place: changed(DOCUMENTS[kind], place, node | {"imagePullPolice": "x"}) for place, node in records}
    assert [place for place, document in broken.items() if not faults(document, kind)] == []


@pytest.mark.parametrize("kind", Kind)
def test_a_value_of_another_type_is_told_wherever_it_stands(kind: Kind) -> None:
    others = [(place, 7 if isinstance(node, str) else "7") for place, node in covered(DOCUMENTS[kind], kind) if place]
    assert len(others) > 30
    broken = {place: changed(DOCUMENTS[kind], place, other) for place, other in others}
    assert [place for place, document in broken.items() if not faults(document, kind)] == []
