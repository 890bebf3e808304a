"""What the chart and the examples say to optional APIs is taken by those APIs' real CRDs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from tests.chart.conftest import CHART, ROOT, Helm, Manifest
from tests.fixtures.crds import CRDS, install_crd
from tests.fixtures.own_cluster import OwnCluster
from tests.support.kube import Kube

pytestmark = pytest.mark.cluster

MONITORS = ("ServiceMonitor", "PodMonitor", "PrometheusRule")
VALUES = CHART / "ci" / "monitoring-values.yaml"


def install_api(cluster: OwnCluster, name: str) -> None:
    """Install an optional API's CRDs, which Go's module proxy brings."""
    command = [sys.executable, str(ROOT / "hack" / "fetch-crds"), name]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    for path in done.stdout.split():
        install_crd(Kube(cluster.kubeconfig), Path(path))


def apply_strictly(cluster: OwnCluster, objects: list[Manifest], folder: Path) -> None:
    """Server-side, so that a field the schema lacks is refused."""
    path = folder / "objects.yaml"
    path.write_text(yaml.safe_dump_all(objects), encoding="utf-8")
    cluster.kubectl("apply", "--server-side", "--validate=strict", "-f", str(path))


def test_monitors_and_rules_are_taken_by_the_prometheus_operator_s_crds(
    helm: Helm, own_cluster: OwnCluster, tmp_path: Path
) -> None:
    install_api(own_cluster, "monitoring")
    rendered = helm.template(values=VALUES, namespace="default")
    objects = [found for kind in MONITORS for found in rendered.of(kind)]
    assert {found["kind"] for found in objects} == set(MONITORS)
    apply_strictly(own_cluster, objects, tmp_path)
    kube = Kube(own_cluster.kubeconfig)
    for sent in objects:
        stored = kube.get(sent["apiVersion"], sent["kind"], sent["metadata"]["name"])
        assert find_lost(sent["spec"], stored["spec"]) == []


def test_a_monitor_with_a_misspelt_field_is_refused(own_cluster: OwnCluster, tmp_path: Path) -> None:
    """So that the test above can fail."""
    install_api(own_cluster, "monitoring")
    endpoint = {"port": "metrics", "intervall": "15s"}
    bad = {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "ServiceMonitor",
        "metadata": {"name": "bad"},
        "spec": {"selector": {}, "endpoints": [endpoint]},
    }
    with pytest.raises(AssertionError, match="intervall"):
        apply_strictly(own_cluster, [bad], tmp_path)


def test_the_example_for_keda_is_taken_by_keda_s_crd(own_cluster: OwnCluster, tmp_path: Path) -> None:
    install_api(own_cluster, "keda")
    install_crd(Kube(own_cluster.kubeconfig), CRDS / "inferencepools.millpond.dev.yaml")
    text = (ROOT / "examples" / "07-keda.yaml").read_text(encoding="utf-8")
    objects = [found for found in yaml.safe_load_all(text) if found]
    assert [found for found in objects if found["kind"] == "ScaledObject"]
    apply_strictly(own_cluster, objects, tmp_path)
    for found in objects:
        Kube(own_cluster.kubeconfig).delete(found["apiVersion"], found["kind"], found["metadata"]["name"])


def find_lost(sent: object, stored: object, path: str = "") -> list[str]:
    """Paths of what was sent and is not stored."""
    if isinstance(sent, dict) and isinstance(stored, dict):
        return [lost for key in sent for lost in find_lost(sent[key], stored.get(key), f"{path}.{key}")]
    if isinstance(sent, list) and isinstance(stored, list) and len(sent) == len(stored):
        pairs = zip(sent, stored, strict=True)
        return [lost for n, pair in enumerate(pairs) for lost in find_lost(*pair, f"{path}[{n}]")]
    return [] if sent == stored else [path]
