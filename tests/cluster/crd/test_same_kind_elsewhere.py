"""OP-014: another API group has a kind of the same name; ours is still found by its short name and full name.

Runs on a control plane of its own, because the order of installation is the point and the shared cluster's CRDs
may be in use.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from tests.fixtures.crds import CRDS, install_crd
from tests.support.kube import Kube, Manifest
from tests.support.pools import make_pool

from devcluster.build import find_programs
from devcluster.paths import find_layout

pytestmark = pytest.mark.cluster

ROOT = Path(__file__).resolve().parents[3]
OURS = CRDS / "inferencepools.millpond.dev.yaml"
THEIR_GROUP = "inference.networking.k8s.io"
ORDERS = ["theirs first", "ours first"]


@pytest.fixture(scope="module")
def own_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kube]:
    """A control plane nobody else uses."""
    if os.environ.get("MILLPOND_KUBECONFIG"):
        pytest.skip("the order of installation cannot be chosen on a cluster given by MILLPOND_KUBECONFIG")
    state = tmp_path_factory.mktemp("same-kind")
    environ = {**os.environ, "MILLPOND_STATE_DIR": str(state), "PYTHONPATH": str(ROOT / "hack")}
    subprocess.run([sys.executable, "-m", "devcluster", "up"], env=environ, check=True, timeout=120)
    try:
        yield Kube(find_layout(environ, Path.home()).admin_kubeconfig)
    finally:
        subprocess.run([sys.executable, "-m", "devcluster", "down"], env=environ, check=True, timeout=60)


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


def remove_all(kube: Kube) -> None:
    for name in (f"inferencepools.{THEIR_GROUP}", "inferencepools.millpond.dev"):
        kube.delete("apiextensions.k8s.io/v1", "CustomResourceDefinition", name)
        _kubectl(kube, "wait", "--for=delete", f"crd/{name}", "--timeout=30s")


def install_theirs(kube: Kube, folder: Path) -> None:
    path = folder / "theirs.yaml"
    path.write_text(yaml.safe_dump(make_their_crd()), encoding="utf-8")
    install_crd(kube, path)


@pytest.mark.parametrize("order", ORDERS)
def test_op_014_our_pools_are_served_beside_a_kind_of_the_same_name(
    own_cluster: Kube, order: str, tmp_path: Path
) -> None:
    remove_all(own_cluster)
    if order == "theirs first":
        install_theirs(own_cluster, tmp_path)
    install_crd(own_cluster, OURS)
    if order == "ours first":
        install_theirs(own_cluster, tmp_path)
    fresh = Kube(own_cluster.kubeconfig)
    fresh.create(make_pool("ours", replicas=1))
    fresh.create(
        {
            "apiVersion": f"{THEIR_GROUP}/v1",
            "kind": "InferencePool",
            "metadata": {"name": "theirs"},
            "spec": {},
        }
    )

    assert _list_names(fresh, "mpool") == ["ours"]
    assert _list_names(fresh, "inferencepools.millpond.dev") == ["ours"]
    assert _list_names(fresh, "millpond") == ["ours"]
    assert _list_names(fresh, "infpool") == ["theirs"]
    scaled = _kubectl(fresh, "scale", "mpool", "ours", "--replicas=2")
    assert "scaled" in scaled


def _list_names(kube: Kube, what: str) -> list[str]:
    return [line.split("/")[-1] for line in _kubectl(kube, "get", what, "-o", "name").split()]


def _kubectl(kube: Kube, *arguments: str) -> str:
    programs = find_programs(find_layout(os.environ, Path.home()))
    assert programs is not None
    command = [str(programs / "kubectl"), "--kubeconfig", str(kube.kubeconfig), "--namespace=default"]
    cache = str(kube.kubeconfig.parent / "kubectl-cache")
    done = subprocess.run(
        [*command, f"--cache-dir={cache}", *arguments], capture_output=True, text=True, check=True
    )
    return done.stdout
