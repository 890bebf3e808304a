"""The real KEDA, a real Prometheus and an operator of this checkout on a control plane of their own."""

from __future__ import annotations

import base64
import json
import os
import shutil
import socket
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes import client
from tests.fixtures.crds import CRDS, install_crd
from tests.fixtures.own_cluster import OwnCluster
from tests.support.kube import Kube, wait_for
from tests.support.operator_world import World
from tests.support.ports import find_port

from devcluster import pki
from devcluster.paths import find_layout
from keda import run
from keda.build import find_programs
from millpond_operator.loop.autoscaler import ScalingSettings

FAST = ScalingSettings(interval=0.5, wake_interval=0.3)


@dataclass(frozen=True, slots=True)
class Site:
    """What the suite runs on."""

    world: World
    prometheus: str
    """Its address."""
    logs: Path

    def query(self, expression: str) -> float | None:
        """Value of a query with one result; None without one."""
        quoted = urllib.request.quote(expression)  # type: ignore[attr-defined]
        with urllib.request.urlopen(f"{self.prometheus}/api/v1/query?query={quoted}", timeout=5) as answer:
            found = json.load(answer)["data"]["result"]
        return float(found[0]["value"][1]) if found else None

    def explain(self) -> str:
        """Last words of KEDA's operator."""
        lines = (self.logs / "keda-operator.log").read_text(errors="replace").splitlines()
        return "\n".join(lines[-8:])


@pytest.fixture(scope="session")
def site(own_cluster: OwnCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """Everything started in order, and ended in the opposite one."""
    programs = find_programs(find_layout(os.environ, Path.home()))
    if programs is None:
        pytest.skip("KEDA is not built: `make test-keda` builds it")
    prometheus = shutil.which("prometheus")
    if prometheus is None:
        pytest.skip("prometheus is not installed: `make test-keda` installs it as root")
    kube, folder = Kube(own_cluster.kubeconfig), tmp_path_factory.mktemp("keda")
    for path in sorted(CRDS.glob("*.yaml")):
        install_crd(kube, path)
    for path in run.list_manifests(programs / "config"):
        for manifest in yaml.safe_load_all(path.read_text(encoding="utf-8")):
            kube.apply(manifest)
    with ExitStack() as stack:
        world = World(own_cluster.kubeconfig, start_operator=False)
        stack.callback(world.close)
        operator = world.start_operator(scaling=FAST).operator
        assert operator is not None
        port = find_port()
        target = f"127.0.0.1:{operator.metrics_port}"
        _keep(stack, run.start_prometheus(prometheus, folder=folder, port=port, target=target))
        _start_keda(stack, programs, folder, kube)
        made = Site(world, f"http://127.0.0.1:{port}", folder)
        wait_for("Prometheus has scraped the operator", lambda: _is_scraped(made), seconds=60)
        yield made


def _start_keda(stack: ExitStack, programs: Path, folder: Path, kube: Kube) -> None:
    """The operator under KEDA's own account and rights, and the adapter where the API server looks for it."""
    pki.create_authorities(folder / "pki")
    names = pki.Certificate("tls", pki.CLUSTER_CA, run.HOST_NAMES[0], dns_names=run.HOST_NAMES)
    pki.create_certificates(folder / "pki", [names])
    kubeconfig = _write_kubeconfig(kube, folder / "keda.kubeconfig")
    grpc, port = find_port(), find_port()
    known: dict[str, Any] = {"kubeconfig": kubeconfig, "certificates": folder / "pki", "grpc_port": grpc}
    log = folder / "keda-operator.log"
    operator = _keep(stack, run.start_operator(programs, log=log, **known))
    wait_for("KEDA's operator listens", lambda: _listens(operator, grpc, log), seconds=60)
    log = folder / "keda-adapter.log"
    adapter = run.start_adapter(programs, port=port, metrics_port=find_port(), log=log, **known)
    _keep(stack, adapter)
    wait_for("KEDA's adapter listens", lambda: _listens(adapter, port, log), seconds=60)
    authority = base64.b64encode((folder / "pki" / "ca.crt").read_bytes()).decode()
    service = kube.apply(run.make_adapter_service("localhost"))
    name = kube.apply(run.make_api_service(service, port=port, authority=authority))["metadata"]["name"]
    wait_for("the API server reaches the adapter", lambda: _is_available(kube, name), seconds=60)


def _write_kubeconfig(kube: Kube, path: Path) -> Path:
    """A kubeconfig of KEDA's service account, so that KEDA has the rights its manifests give it and no others."""
    request = client.AuthenticationV1TokenRequest(
        spec=client.V1TokenRequestSpec(audiences=["https://kubernetes.default.svc.cluster.local"])
    )
    token = kube.core.create_namespaced_service_account_token(run.ACCOUNT, run.NAMESPACE, request)
    config = yaml.safe_load(kube.kubeconfig.read_text(encoding="utf-8"))
    config["users"][0]["user"] = {"token": token.status.token}
    path.write_text(yaml.safe_dump(config))
    path.chmod(0o600)
    return path


def _keep(stack: ExitStack, process: subprocess.Popen[bytes]) -> subprocess.Popen[bytes]:
    def end() -> None:
        process.terminate()
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(15)

    stack.callback(end)
    return process


def _listens(process: subprocess.Popen[bytes], port: int, log: Path) -> bool:
    assert process.poll() is None, log.read_text(errors="replace")[-2000:]
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _is_available(kube: Kube, name: str) -> bool:
    found = kube.get("apiregistration.k8s.io/v1", "APIService", name)
    conditions = found.get("status", {}).get("conditions") or []
    return any(c["type"] == "Available" and c["status"] == "True" for c in conditions)


def _is_scraped(site: Site) -> bool:
    try:
        return site.query("up") == 1.0
    except OSError:
        return False
