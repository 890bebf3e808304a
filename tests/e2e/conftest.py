"""One installation of the chart on the node cluster for the whole suite, in namespaces of its own."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.fixtures.cluster import Cluster
from tests.support.kube import wait_for

from demo.cluster import Cluster as DemoCluster
from demo.forward import port_forward
from demo.install import Model, Site, make_pool, push_images, serve_model
from millpond_common.contract import labels

FAKE_ARGUMENTS = [
    "--runner", "fake", "--fake-prefill-tokens-per-second", "20000", "--fake-decode-step-seconds", "0.02",
    "--fake-load-seconds", "1",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Fleet:
    """The installation, its images and the model file."""

    site: Site
    images: dict[str, str]
    model: Model

    def install(self, *values: str) -> None:
        """Install or upgrade the chart for the one namespace."""
        scope = (
            "crds.install=false",
            "scope=Namespaces",
            f"namespaces={{{self.site.namespace}}}",
            "gateway.cpu=50m",
        )
        self.site.install_chart(self.images, values=(*scope, *values))

    def make_fake_pool(self, name: str, *, replicas: int, revision: str = "1", **spec: Any) -> dict[str, Any]:
        """A pool whose engines script their tokens: everything is real but the model."""
        engine = {"extraArgs": FAKE_ARGUMENTS, "env": [{"name": "TEST_REVISION", "value": revision}]}
        resources = {"limits": {"cpu": "1", "memory": "512Mi"}, "requests": {"cpu": "50m", "memory": "128Mi"}}
        spec = {"replicas": replicas, "engine": engine, "resources": resources, **spec}
        return make_pool(self.model, namespace=self.site.namespace, name=name, **spec)


@pytest.fixture(scope="session")
def fleet(node_cluster: Cluster, crds: Cluster) -> Iterator[Fleet]:
    """Images pushed, chart installed for one namespace, model file served; all removed at the end."""
    assert node_cluster.record is not None, "the end-to-end suite pushes to the registry of hack/devcluster"
    name = uuid.uuid4().hex[:8]
    host, registry = node_cluster.host_address, "registry.millpond.local:5000/millpond"
    cluster = DemoCluster(Path(node_cluster.kubeconfig), str(node_cluster.kubectl), host, registry)
    site = Site(cluster, system_namespace=f"e2e-system-{name}", namespace=f"e2e-{name}")
    with ExitStack() as stack:
        images = push_images(cluster)
        site.make_namespace()
        stack.callback(_remove_namespaces, site)
        model, server = serve_model(cluster)
        assert model is not None
        assert server is not None
        stack.callback(server.wait)
        stack.callback(server.terminate)
        fleet = Fleet(site, images, model)
        stack.callback(site.uninstall_chart)
        fleet.install()
        stack.callback(site.remove_pools)
        yield fleet


@pytest.fixture
def gateway_url(fleet: Fleet) -> Iterator[Callable[[], str]]:
    """Open a port to the gateway; a function, since the gateway exists only once a pool does."""
    with ExitStack() as stack:

        def connect() -> str:
            # A forwarded port stays with one pod, which should not be one that leaves with an earlier test's pool.
            wait_for("only lasting gateways", lambda: _are_lasting(fleet.site))
            forward = port_forward(fleet.site.cluster, fleet.site.namespace, "service/millpond-gateway", 80)
            return stack.enter_context(forward)

        yield connect


@pytest.fixture(autouse=True)
def _no_pool_stays(fleet: Fleet) -> Iterator[None]:
    yield
    fleet.site.remove_pools()


def _are_lasting(site: Site) -> bool:
    listed = site.run_kubectl(
        "get", "pods", "-l", f"{labels.COMPONENT}=gateway", "-o", "json", what="listing gateways"
    )
    pods = json.loads(listed)["items"]
    return bool(pods) and all(_is_ready(p) and not p["metadata"].get("deletionTimestamp") for p in pods)


def _is_ready(pod: dict[str, Any]) -> bool:
    conditions = pod["status"].get("conditions") or []
    return any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)


def _remove_namespaces(site: Site) -> None:
    names = (site.namespace, site.system_namespace)
    site.cluster.run_kubectl(
        "delete", "namespace", *names, "--ignore-not-found", "--wait=false", what="cleaning up"
    )
