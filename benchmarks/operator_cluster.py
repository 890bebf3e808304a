"""A control plane and an operator process of this checkout, for the operator's benchmarks.

The cluster is that of MILLPOND_KUBECONFIG, or one of hack/devcluster's own that lives as long as the benchmark.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from kubernetes import client, config
from prometheus_client.parser import text_string_to_metric_families

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "hack"))

CONTROL_PLANE = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler")
FIELD_MANAGER = "millpond-benchmark"
LABEL = "millpond.dev/benchmark"
STATE_PREFIX = "millpond-benchmark-"
"""Of the folder a cluster of the benchmark's own lives in; its programs have it in their command lines."""
_TICKS = os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def use_cluster() -> Iterator[Path]:
    """Kubeconfig of a cluster with this checkout's CRDs."""
    given = os.environ.get("MILLPOND_KUBECONFIG")
    if given:
        install_crds(Path(given))
        yield Path(given)
        return
    from devcluster import lifecycle
    from devcluster.paths import find_layout

    with tempfile.TemporaryDirectory(prefix=STATE_PREFIX) as folder:
        environ = {**os.environ, "MILLPOND_STATE_DIR": folder}
        layout = find_layout(environ, Path.home())
        lifecycle.up(layout, node=False, environ=environ)
        try:
            install_crds(layout.admin_kubeconfig)
            yield layout.admin_kubeconfig
        finally:
            lifecycle.down(layout)


def connect(kubeconfig: Path) -> client.ApiClient:
    """A client of the cluster's administrator."""
    return config.new_client_from_config(str(kubeconfig))


def install_crds(kubeconfig: Path) -> None:
    """Apply the CRDs and wait until they are served."""
    api = client.ApiextensionsV1Api(connect(kubeconfig))
    for path in sorted((ROOT / "crds").glob("*.yaml")):
        crd = yaml.safe_load(path.read_text(encoding="utf-8"))
        name = crd["metadata"]["name"]
        api.patch_custom_resource_definition(
            name, crd, field_manager=FIELD_MANAGER, force=True, _content_type="application/apply-patch+yaml"
        )
        while not _is_established(api.read_custom_resource_definition(name)):
            time.sleep(0.1)
    time.sleep(1.5)  # the handler of a new schema is there a moment later, and nothing reports it


def _is_established(crd: Any) -> bool:
    return any(c.type == "Established" and c.status == "True" for c in crd.status.conditions or ())


@contextlib.contextmanager
def make_namespace(kubeconfig: Path, name: str) -> Iterator[str]:
    """A namespace for the time of the block."""
    core = client.CoreV1Api(connect(kubeconfig))
    core.create_namespace({"metadata": {"name": name, "labels": {LABEL: "true"}}})
    try:
        yield name
    finally:
        with contextlib.suppress(client.ApiException):
            core.delete_namespace(name, grace_period_seconds=0)


def find_port() -> int:
    """A free port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass
class OperatorProcess:
    """`millpond-operator` as a process of its own, as in a pod."""

    kubeconfig: Path
    namespace: str
    """Of its Lease."""
    arguments: tuple[str, ...] = ()
    metrics_port: int = field(default_factory=find_port)
    health_port: int = field(default_factory=find_port)
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start, and wait until it leads."""
        command = [
            sys.executable, "-m", "millpond_operator", "--kubeconfig", str(self.kubeconfig),
            "--operator-namespace", self.namespace, "--engine-image", "millpond-engine:benchmark",
            "--gateway-image", "millpond-gateway:benchmark", "--listen-host", "127.0.0.1",
            "--metrics-port", str(self.metrics_port), "--health-port", str(self.health_port),
            "--log-level", "warning", *self.arguments,
        ]  # fmt: skip
        self.process = subprocess.Popen(command, cwd=ROOT)
        deadline = time.monotonic() + 60
        while not self.is_ready():
            if time.monotonic() > deadline or self.process.poll() is not None:
                raise RuntimeError("the operator did not start; see its lines above")
            time.sleep(0.05)

    def stop(self) -> None:
        """End it as Kubernetes would."""
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            self.process.wait(30)

    def is_ready(self) -> bool:
        """Whether its first lists are in."""
        with contextlib.suppress(OSError):
            url = f"http://127.0.0.1:{self.health_port}/ready"
            return bool(urllib.request.urlopen(url, timeout=2).status == 200)
        return False

    def read_metrics(self) -> dict[tuple[str, ...], float]:
        """Samples by name and label values, in the order of the labels' names."""
        url = f"http://127.0.0.1:{self.metrics_port}/metrics"
        text = urllib.request.urlopen(url, timeout=10).read().decode()
        return {
            (sample.name, *(value for _, value in sorted(sample.labels.items()))): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }

    def count_calls(self) -> dict[tuple[str, str], int]:
        """Calls to the API server so far, by verb and kind; watches are not among them."""
        found: dict[tuple[str, str], int] = {}
        for (name, *values), value in self.read_metrics().items():
            if name == "millpond_operator_api_requests_total":
                _code, kind, verb = values
                found[verb, kind] = found.get((verb, kind), 0) + int(value)
        return found

    def read_memory(self) -> tuple[float, float]:
        """Resident memory now and at its highest, MiB."""
        assert self.process is not None
        status = Path(f"/proc/{self.process.pid}/status").read_text(encoding="ascii")
        lines = dict(line.split(":", 1) for line in status.splitlines())
        return int(lines["VmRSS"].split()[0]) / 1024, int(lines["VmHWM"].split()[0]) / 1024

    def read_cpu_seconds(self) -> float:
        """CPU time it has used."""
        assert self.process is not None
        return read_cpu_seconds(self.process.pid)


def read_cpu_seconds(pid: int | str) -> float:
    """CPU time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def read_control_plane_cpu() -> dict[str, float]:
    """CPU seconds by program of a control plane of the benchmark's own; empty for one that was given."""
    found: dict[str, float] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it may end meanwhile
            words = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
            program = Path(words[0]).name
            if program in CONTROL_PLANE and any(STATE_PREFIX in word for word in words):
                found[program] = read_cpu_seconds(folder.name)
    return found


def make_pool(name: str, **spec: Any) -> dict[str, Any]:
    """A pool as small as it can be."""
    return {
        "apiVersion": "millpond.dev/v1alpha1",
        "kind": "InferencePool",
        "metadata": {"name": name},
        "spec": {
            "model": {"source": "file:///models/tiny.gguf"},
            "resources": {"limits": {"cpu": "1", "memory": "1Gi"}},
            "replicas": 1,
            **spec,
        },
    }
