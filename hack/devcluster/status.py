"""What runs, for people and for programs."""

from dataclasses import dataclass
from typing import Any

from devcluster.build import read_version
from devcluster.decision import Observed
from devcluster.paths import Layout
from devcluster.process import is_alive
from devcluster.record import Record
from devcluster.render.node import HOST_NAME, REGISTRY_NAME


@dataclass(frozen=True)
class Status:
    """An observed cluster with its layout."""

    layout: Layout
    observed: Observed
    record: Record | None


def make_status_document(status: Status) -> dict[str, Any]:
    """The document of `status -o json`; its fields are what scripts rely on."""
    record, observed = status.record, status.observed
    running = record is not None and observed.control_plane_answers
    document: dict[str, Any] = {
        "running": running,
        "node": observed.node_ready,
        "stateDir": str(status.layout.state),
        "logDir": str(status.layout.logs),
        "kubernetesVersion": read_version("kubernetes", "k8s.io/kubernetes"),
    }
    if record is None or not running:
        return {**document, "remains": observed.has_remains}
    network, ports = record.network, record.ports
    return {
        **document,
        "version": record.version,
        "kubeconfig": str(status.layout.admin_kubeconfig),
        "apiServer": f"https://{network.host_address}:{ports.api_server}",
        "auditLog": str(status.layout.logs / "audit.log"),
        "programDir": record.programs,
        "hostAddress": network.host_address,
        "hostName": HOST_NAME,
        "nodeAddress": network.node_address,
        "podCidr": network.pod_cidr,
        "serviceCidr": network.service_cidr,
        "dnsAddress": network.dns_address,
        "registry": {"name": REGISTRY_NAME, "address": f"{network.host_address}:{ports.registry}"},
        "processes": {process.role: process.pid for process in record.processes if is_alive(process)},
    }


def render_status(document: dict[str, Any]) -> str:
    """Render the document for a person."""
    if not document["running"]:
        hint = "; `down` removes what an earlier run left" if document["remains"] else ""
        return f"not running (Kubernetes {document['kubernetesVersion']}){hint}"
    rows = {
        "Kubernetes": document["kubernetesVersion"],
        "API server": document["apiServer"],
        "kubeconfig": document["kubeconfig"],
        "node": f"{document['nodeAddress']} Ready" if document["node"] else "none (add one: up --node)",
        "host, as pods see it": f"{document['hostAddress']} ({document['hostName']})",
        "registry": f"{document['registry']['name']} (at {document['registry']['address']})",
        "logs": document["logDir"],
        "running": ", ".join(f"{role} {pid}" for role, pid in document["processes"].items()),
    }
    return "\n".join(f"{name:<21} {value}" for name, value in rows.items())
