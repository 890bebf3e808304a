"""Install, upgrade, adopt and uninstall on a real API server; what an uninstall leaves is what the README says."""

from __future__ import annotations

import io
import json
import re
import shutil
import subprocess
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml
from tests.chart.conftest import CHART, Helm, Manifest
from tests.fixtures.crds import CRDS, wait_until_served
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

    def create_pool(self) -> Manifest:
        """Create a pool once the release's CRD is served: Helm does not wait for that."""
        crd = yaml.safe_load((CRDS / "inferencepools.millpond.dev.yaml").read_text(encoding="utf-8"))
        wait_until_served(self.kube, crd)
        return Kube(self.cluster.kubeconfig).create(make_pool(replicas=1))

    def uninstall(self, release: str, namespace: str) -> None:
        self.run(
            "uninstall", release, "--namespace", namespace, "--ignore-not-found", "--wait", "--timeout=60s"
        )


@pytest.fixture
def site(helm: Helm, own_cluster: OwnCluster) -> Iterator[Site]:
    found = Site(helm, own_cluster, Kube(own_cluster.kubeconfig))
    wipe = ("delete", "--ignore-not-found", "--wait", "--timeout=80s", "crd/inferencepools.millpond.dev")
    own_cluster.kubectl(*wipe)
    yield found
    for release, namespace in (("foo", "bar"), ("other", "elsewhere")):
        found.uninstall(release, namespace)
    own_cluster.kubectl(*wipe)


def test_op_074_any_release_name_and_namespace_installs(site: Site) -> None:
    notes = site.install("foo", "bar")
    assert "kubectl get mpool" in notes
    site.create_pool()
    assert site.kube.exists("apps/v1", "Deployment", "foo-millpond-operator", "bar")


def test_op_084_pools_are_read_and_listed_while_no_operator_runs(site: Site) -> None:
    site.install("foo", "bar")
    assert site.kube.get("apps/v1", "Deployment", "foo-millpond-operator", "bar")["spec"]["replicas"] == 0
    site.create_pool()
    for command in (("get", "mpool"), ("get", "mpool", "pool", "-o", "wide"), ("describe", "mpool", "pool")):
        assert "pool" in site.cluster.kubectl("-n", "default", *command)


def test_op_075_uninstall_ends_and_leaves_the_crd_and_the_pools(site: Site) -> None:
    site.install("foo", "bar")
    site.create_pool()
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
    site.create_pool()
    site.install("foo", "bar")
    assert site.kube.get(*CRD)["spec"]["names"]["shortNames"] == ["mpool"]
    assert Kube(site.cluster.kubeconfig).exists("millpond.dev/v1alpha1", "InferencePool", "pool")


def make_previous_chart(folder: Path) -> Path:
    """The chart as a version before this one would be: its CRD knows no `status.model`."""
    older = folder / "previous"
    shutil.copytree(CHART, older)
    chart = older / "Chart.yaml"
    text = chart.read_text(encoding="utf-8")
    chart.write_text(re.sub(r"(?m)^version: .*$", "version: 0.0.9", text), encoding="utf-8")
    crd = older / "templates" / "crds" / "inferencepools.millpond.dev.yaml"
    text = crd.read_text(encoding="utf-8")
    status_model = r"(?ms)^ {14}model:\n {16}type: object\n {16}description: >-\n {18}Size of the model.*?(?=^ {14}roles:)"
    without, found = re.subn(status_model, "", text)
    assert found == 1
    crd.write_text(without, encoding="utf-8")
    return older


def make_first_chart(folder: Path) -> Path:
    """The chart as it was committed first, from this checkout's history."""
    git = ["git", "-C", str(CHART.parents[1])]
    listed = subprocess.run(
        [*git, "log", "--reverse", "--format=%H", "--", "charts/millpond/Chart.yaml"],
        check=False,
        capture_output=True,
        text=True,
    )
    commits = listed.stdout.split()
    if len(commits) < 1 or listed.returncode != 0:
        pytest.skip("this checkout has no git history")
    packed = subprocess.run([*git, "archive", commits[0], "charts/millpond"], check=True, capture_output=True)
    with tarfile.open(fileobj=io.BytesIO(packed.stdout)) as archive:
        archive.extractall(folder, filter="data")
    return folder / "charts" / "millpond"


SIZE = {
    "files": "0123456789abcdef",
    "numParameters": 1,
    "dtype": "BFloat16",
    "numLayers": 1,
    "numKvHeads": 1,
    "headDim": 1,
    "maxModelTokens": 1,
}


def write_size(site: Site) -> Manifest:
    """Write a status with a field that only the newest CRD knows; returns what was stored."""
    pools = Kube(site.cluster.kubeconfig).resource("millpond.dev/v1alpha1", "InferencePool")
    done = pools.status.patch(
        name="pool",
        namespace="default",
        body={"status": {"observedGeneration": 1, "model": SIZE}},
        content_type="application/merge-patch+json",
    )
    return dict(done.to_dict())


@pytest.mark.parametrize("make_older", [make_previous_chart, make_first_chart], ids=["previous", "first"])
def test_op_073_an_upgrade_leaves_pools_untouched_and_brings_the_new_fields(
    site: Site, tmp_path: Path, make_older: Callable[[Path], Path]
) -> None:
    site.install("foo", "bar", chart=make_older(tmp_path))
    site.create_pool()
    before = write_size(site)
    assert "model" not in before["status"], "the older CRD drops what it does not know"
    site.install("foo", "bar")
    after = Kube(site.cluster.kubeconfig).get("millpond.dev/v1alpha1", "InferencePool", "pool")
    assert after["spec"] == before["spec"]
    for key in ("uid", "generation", "resourceVersion"):
        assert after["metadata"][key] == before["metadata"][key], key
    wait_for("the new schema to be served", lambda: write_size(site)["status"].get("model") == SIZE)


def test_op_079_upgrade_md_alone_leads_from_the_previous_version_to_this_one(
    site: Site, tmp_path: Path
) -> None:
    """Every command of its first section, as it is written, with the release and the namespace of this test."""
    site.install("foo", "bar", chart=make_previous_chart(tmp_path))
    section = (CHART / "UPGRADE.md").read_text(encoding="utf-8").split("\n## ")[0]
    commands = [line.strip() for line in section.splitlines() if line.startswith("    ")]
    assert commands == ["helm upgrade millpond charts/millpond --namespace millpond-system"]
    for command in commands:
        words = (
            command.replace("upgrade millpond ", "upgrade foo ").replace("millpond-system", "bar").split()[1:]
        )
        site.run(*(str(CHART) if word == "charts/millpond" else word for word in words))
    listed = json.loads(site.run("list", "--namespace", "bar", "--output", "json").stdout)
    version = yaml.safe_load((CHART / "Chart.yaml").read_text(encoding="utf-8"))["version"]
    assert [entry["chart"] for entry in listed] == [f"millpond-{version}"]
    schema = site.kube.get(*CRD)["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    assert "model" in schema["properties"]["status"]["properties"]


def test_without_keep_the_crd_goes_with_the_release(site: Site) -> None:
    site.install("foo", "bar", "--set=crds.keep=false")
    site.uninstall("foo", "bar")
    wait_for("the CRD is gone", lambda: not site.kube.exists(*CRD))
