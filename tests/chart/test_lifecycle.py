"""Install, upgrade, adopt and uninstall on a real API server; what an uninstall leaves is what the README says."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.chart.conftest import CHART, Helm
from tests.fixtures.crds import CRDS
from tests.fixtures.own_cluster import OwnCluster
from tests.support.kube import Kube, wait_for
from tests.support.pools import make_pool

pytestmark = pytest.mark.cluster

CRD = ("apiextensions.k8s.io/v1", "CustomResourceDefinition", "inferencepools.millpond.dev")


@dataclass(frozen=True)
class Site:
    """A cluster without Millpond, and Helm."""

    helm: Helm
    cluster: OwnCluster
    kube: Kube

    def run(self, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        return self.helm.run(*arguments, "--kubeconfig", str(self.cluster.kubeconfig), check=check)

    def install(
        self, release: str, namespace: str, *flags: str, chart: Path = CHART, check: bool = True
    ) -> str:
        place = ("--namespace", namespace, "--create-namespace")
        # There is no node, so operator pods would stay Pending.
        done = self.run(
            "upgrade",
            "--install",
            release,
            str(chart),
            *place,
            "--set=operator.replicas=0",
            *flags,
            check=check,
        )
        return done.stdout + done.stderr

    def uninstall(self, release: str, namespace: str) -> None:
        self.run(
            "uninstall", release, "--namespace", namespace, "--ignore-not-found", "--wait", "--timeout=60s"
        )


@pytest.fixture
def site(helm: Helm, own_cluster: OwnCluster) -> Iterator[Site]:
    found = Site(helm, own_cluster, Kube(own_cluster.kubeconfig))
    wipe = ("delete", "--ignore-not-found", "--wait", "--timeout=60s", "crd/inferencepools.millpond.dev")
    own_cluster.kubectl(*wipe)
    yield found
    for release, namespace in (("foo", "bar"), ("other", "elsewhere")):
        found.uninstall(release, namespace)
    own_cluster.kubectl(*wipe)


def test_op_074_any_release_name_and_namespace_installs(site: Site) -> None:
    notes = site.install("foo", "bar")
    assert "kubectl get mpool" in notes
    site.cluster.kubectl(
        "wait", "--for=condition=Established", "--timeout=30s", "crd/inferencepools.millpond.dev"
    )
    site.kube.create(make_pool(replicas=1))
    assert site.kube.exists("apps/v1", "Deployment", "foo-millpond-operator", "bar")
    site.kube.delete("millpond.dev/v1alpha1", "InferencePool", "pool")


def test_op_075_uninstall_ends_and_leaves_the_crd_and_the_pools(site: Site) -> None:
    site.install("foo", "bar")
    Kube(site.cluster.kubeconfig).create(make_pool(replicas=1))
    site.uninstall("foo", "bar")
    fresh = Kube(site.cluster.kubeconfig)
    assert fresh.exists("millpond.dev/v1alpha1", "InferencePool", "pool")
    left = fresh.list(
        "rbac.authorization.k8s.io/v1", "ClusterRole", label_selector="app.kubernetes.io/instance=foo"
    )
    assert left == []
    assert fresh.list("apps/v1", "Deployment", "bar") == []
    # The same release comes back to its CRD; the pool is still there.
    site.install("foo", "bar")
    assert fresh.exists("millpond.dev/v1alpha1", "InferencePool", "pool")


def install_older_crd(site: Site, folder: Path) -> None:
    """What somebody applied with kubectl some versions ago."""
    text = (CRDS / "inferencepools.millpond.dev.yaml").read_text(encoding="utf-8")
    older = text.replace("shortNames: [mpool]", "shortNames: [oldpool]")
    assert older != text
    path = folder / "older-crd.yaml"
    path.write_text(older, encoding="utf-8")
    site.cluster.kubectl("apply", "--server-side", "-f", str(path))


def test_op_077_a_crd_made_by_kubectl_is_adopted_as_upgrade_md_says(site: Site, tmp_path: Path) -> None:
    install_older_crd(site, tmp_path)
    refused = site.install("foo", "bar", check=False)
    assert "inferencepools.millpond.dev" in refused
    assert "ownership" in refused
    assert "--take-ownership --force-conflicts" in (CHART / "UPGRADE.md").read_text(encoding="utf-8")
    site.install("foo", "bar", "--take-ownership", "--force-conflicts")
    assert site.kube.get(*CRD)["spec"]["names"]["shortNames"] == ["mpool"]
    adopted = site.kube.get(*CRD)["metadata"]
    assert adopted["annotations"]["meta.helm.sh/release-name"] == "foo"
    assert adopted["annotations"]["helm.sh/resource-policy"] == "keep"


def test_op_077_the_labels_of_upgrade_md_do_the_same(site: Site, tmp_path: Path) -> None:
    install_older_crd(site, tmp_path)
    crd = "crd/inferencepools.millpond.dev"
    site.cluster.kubectl("label", crd, "app.kubernetes.io/managed-by=Helm")
    marks = ("meta.helm.sh/release-name=foo", "meta.helm.sh/release-namespace=bar")
    site.cluster.kubectl("annotate", crd, *marks)
    site.install("foo", "bar", "--force-conflicts")
    assert site.kube.get(*CRD)["spec"]["names"]["shortNames"] == ["mpool"]
    assert site.kube.get(*CRD)["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"


def test_an_upgrade_of_the_chart_upgrades_the_crd(site: Site, tmp_path: Path) -> None:
    older = tmp_path / "older"
    shutil.copytree(CHART, older)
    path = older / "templates" / "crds" / "inferencepools.millpond.dev.yaml"
    text = path.read_text(encoding="utf-8")
    changed = text.replace("shortNames: [mpool]", "shortNames: [oldpool]")
    assert changed != text
    path.write_text(changed, encoding="utf-8")
    site.install("foo", "bar", chart=older)
    assert site.kube.get(*CRD)["spec"]["names"]["shortNames"] == ["oldpool"]
    site.kube.dynamic.resources.invalidate_cache()
    Kube(site.cluster.kubeconfig).create(make_pool(replicas=1))
    site.install("foo", "bar")
    assert site.kube.get(*CRD)["spec"]["names"]["shortNames"] == ["mpool"]
    assert Kube(site.cluster.kubeconfig).exists("millpond.dev/v1alpha1", "InferencePool", "pool")


def test_without_keep_the_crd_goes_with_the_release(site: Site) -> None:
    site.install("foo", "bar", "--set=crds.keep=false")
    site.uninstall("foo", "bar")
    wait_for("the CRD is gone", lambda: not site.kube.exists(*CRD))
