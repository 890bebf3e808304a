"""OP-014: another API group has a kind of the same name; ours is still found by its short name and full name.

Runs on a control plane of its own, because the order of installation is the point and the shared cluster's CRDs
may be in use.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from tests.fixtures.crds import CRDS, install_crd
from tests.fixtures.own_cluster import OwnCluster
from tests.support.kube import Kube, Manifest
from tests.support.pools import make_pool

pytestmark = pytest.mark.cluster

OURS = CRDS / "inferencepools.millpond.dev.yaml"
THEIR_GROUP = "inference.networking.k8s.io"
ORDERS = ["theirs first", "ours first"]


def make_their_crd() -> Manifest:
    """A kind of the same name and plural in the gateway extension's group, at the more stable version v1."""
    anything = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    schema = {"type": "object", "properties": {"spec": anything, "status": anything}}
    names = {
        "kind": "InferencePool",
        "plural": "inferencepools",
        "singular": "inferencepool",
        "shortNames": ["infpool"],
    }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {
            "name": f"inferencepools.{THEIR_GROUP}",
            "annotations": {"api-approved.kubernetes.io": "unapproved, a test's stand-in"},
        },
        "spec": {
            "group": THEIR_GROUP,
            "scope": "Namespaced",
            "names": names,
            "versions": [
                {"name": "v1", "served": True, "storage": True, "schema": {"openAPIV3Schema": schema}}
            ],
        },
    }


def release_pools(own: OwnCluster) -> None:
    """Take finalizers from pools that other tests left on this cluster: no operator is here that would."""
    kube = Kube(own.kubeconfig)
    if not kube.exists("apiextensions.k8s.io/v1", "CustomResourceDefinition", "inferencepools.millpond.dev"):
        return
    found = own.kubectl("get", "inferencepools.millpond.dev", "--all-namespaces", "-o", "json")
    for metadata in (item["metadata"] for item in json.loads(found)["items"]):
        name, namespace = metadata["name"], metadata["namespace"]
        patch = ("--type=merge", "--patch", '{"metadata":{"finalizers":null}}')
        own.kubectl("patch", "inferencepools.millpond.dev", name, "--namespace", namespace, *patch)


def remove_all(own: OwnCluster) -> None:
    release_pools(own)
    names = [f"crd/inferencepools.{THEIR_GROUP}", "crd/inferencepools.millpond.dev"]
    own.kubectl("delete", "--ignore-not-found", "--wait", "--timeout=80s", *names)


def install_theirs(kube: Kube, folder: Path) -> None:
    path = folder / "theirs.yaml"
    path.write_text(yaml.safe_dump(make_their_crd()), encoding="utf-8")
    install_crd(kube, path)


@pytest.mark.parametrize("order", ORDERS)
def test_op_014_our_pools_are_served_beside_a_kind_of_the_same_name(
    own_cluster: OwnCluster, order: str, tmp_path: Path
) -> None:
    kube = Kube(own_cluster.kubeconfig)
    remove_all(own_cluster)
    if order == "theirs first":
        install_theirs(kube, tmp_path)
    install_crd(kube, OURS)
    if order == "ours first":
        install_theirs(kube, tmp_path)
    fresh = Kube(own_cluster.kubeconfig)
    theirs = {"apiVersion": f"{THEIR_GROUP}/v1", "kind": "InferencePool", "metadata": {"name": "theirs"}}
    fresh.create(make_pool("ours", replicas=1))
    fresh.create({**theirs, "spec": {}})

    def list_names(what: str) -> list[str]:
        return [line.split("/")[-1] for line in own_cluster.kubectl("get", what, "-o", "name").split()]

    assert list_names("mpool") == ["ours"]
    assert list_names("inferencepools.millpond.dev") == ["ours"]
    assert list_names("millpond") == ["ours"]
    assert list_names("infpool") == ["theirs"]
    assert "scaled" in own_cluster.kubectl("scale", "mpool", "ours", "--replicas=2")
    remove_all(own_cluster)
