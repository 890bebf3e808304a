"""Run KEDA's two programs against a cluster that has no node: what KEDA's manifests install, with processes for pods."""

import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

NAMESPACE = "keda"
ACCOUNT = "keda-operator"
ADAPTER_SERVICE = "keda-metrics-apiserver"
HOST_NAMES = (f"{ADAPTER_SERVICE}.{NAMESPACE}.svc", f"{ACCOUNT}.{NAMESPACE}.svc", "localhost")
"""What the certificate of both programs names."""
MANIFESTS = (
    "crd/bases/*.yaml",
    "general/namespace.yaml",
    "service_account/service_account.yaml",
    "rbac/role.yaml",
    "rbac/role_binding.yaml",
    "metrics-server/role.yaml",
    "metrics-server/role_binding.yaml",
)
"""Below KEDA's config folder, in the order they can be applied in: everything but pods, services and webhooks."""


def list_manifests(config: Path) -> list[Path]:
    """Files to apply as they are."""
    return [path for pattern in MANIFESTS for path in sorted(config.glob(pattern))]


def make_adapter_service(host: str) -> dict[str, Any]:
    """The metrics adapter's Service; the API server finds the process through its external name."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": ADAPTER_SERVICE, "namespace": NAMESPACE},
        "spec": {"type": "ExternalName", "externalName": host},
    }


def make_api_service(service: Mapping[str, Any], *, port: int, authority: str) -> dict[str, Any]:
    """KEDA's registration of external metrics, pointed at the process's port. `authority` is base64."""
    reference = {"name": service["metadata"]["name"], "namespace": NAMESPACE, "port": port}
    return {
        "apiVersion": "apiregistration.k8s.io/v1",
        "kind": "APIService",
        "metadata": {"name": "v1beta1.external.metrics.k8s.io"},
        "spec": {
            "service": reference,
            "group": "external.metrics.k8s.io",
            "version": "v1beta1",
            "groupPriorityMinimum": 100,
            "versionPriority": 100,
            "caBundle": authority,
        },
    }


def start_operator(
    programs: Path, *, kubeconfig: Path, certificates: Path, grpc_port: int, log: Path
) -> "subprocess.Popen[bytes]":
    """Start the operator; without webhooks, certificates given instead of rotated."""
    argv = [
        str(programs / "keda-operator"),
        "--metrics-bind-address=0",
        "--health-probe-bind-address=0",
        f"--metrics-service-bind-address=127.0.0.1:{grpc_port}",
        f"--cert-dir={certificates}",
        "--zap-log-level=info",
        "--zap-encoder=console",
    ]
    return _start(argv, kubeconfig, log)


def start_adapter(
    programs: Path,
    *,
    kubeconfig: Path,
    certificates: Path,
    port: int,
    metrics_port: int,
    grpc_port: int,
    log: Path,
) -> "subprocess.Popen[bytes]":
    """Start the metrics adapter, which the API server asks for external metrics."""
    argv = [
        str(programs / "keda-adapter"),
        f"--secure-port={port}",
        "--bind-address=127.0.0.1",
        f"--port={metrics_port}",
        f"--metrics-service-address=localhost:{grpc_port}",
        f"--metrics-service-grpc-authority={ACCOUNT}.{NAMESPACE}.svc",
        f"--client-ca-file={certificates / 'ca.crt'}",
        f"--tls-cert-file={certificates / 'tls.crt'}",
        f"--tls-private-key-file={certificates / 'tls.key'}",
        f"--cert-dir={certificates}",
        f"--lister-kubeconfig={kubeconfig}",
        f"--authentication-kubeconfig={kubeconfig}",
        f"--authorization-kubeconfig={kubeconfig}",
        "--zap-log-level=info",
    ]
    return _start(argv, kubeconfig, log)


def start_prometheus(
    program: str, *, folder: Path, port: int, target: str, interval: str = "1s"
) -> "subprocess.Popen[bytes]":
    """Start a Prometheus that scrapes one target and keeps its data in `folder`."""
    config = folder / "prometheus.yml"
    config.write_text(
        f"global: {{scrape_interval: {interval}}}\n"
        "scrape_configs:\n"
        "- job_name: millpond-operator\n"
        f"  static_configs: [{{targets: ['{target}']}}]\n"
    )
    argv = [
        program,
        f"--config.file={config}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
        # A series that its target no longer has is gone from answers after this long.
        "--query.lookback-delta=10s",
    ]
    return _start(argv, None, folder / "prometheus.log")


def _start(argv: list[str], kubeconfig: Path | None, log: Path) -> "subprocess.Popen[bytes]":
    environ = {
        "PATH": "/usr/bin:/bin",
        "HOME": "/nonexistent",
        "WATCH_NAMESPACE": "",
        "POD_NAMESPACE": NAMESPACE,
        "KEDA_CLUSTER_OBJECT_NAMESPACE": NAMESPACE,
    }
    environ |= {"KUBECONFIG": str(kubeconfig)} if kubeconfig is not None else {}
    with log.open("ab") as output:
        return subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environ)
