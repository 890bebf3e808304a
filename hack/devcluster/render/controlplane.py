"""Command lines and files of etcd, the API server, the controller manager and the scheduler."""

from base64 import b64encode
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from devcluster.network import LOOPBACK, Network, Ports
from devcluster.paths import Layout

CLUSTER_DOMAIN = "cluster.local"
# Beyond the defaults: NodeRestriction is what Node authorization relies on, and
# OwnerReferencesPermissionEnforcement (on in OpenShift) shows an operator that sets blockOwnerDeletion without the right.
ADMISSION_PLUGINS = ("NodeRestriction", "OwnerReferencesPermissionEnforcement")
AUDIT_LOG = "audit.log"

Flags = Mapping[str, str | int | Path]


def render_flags(program: str | Path, flags: Flags) -> list[str]:
    """Turn a program and its flags into an argument list."""
    return [str(program), *(f"--{name}={value}" for name, value in flags.items())]


def make_etcd_flags(layout: Layout, ports: Ports) -> Flags:
    """Flags of etcd: loopback only, client certificates required."""
    client, peer = f"https://{LOOPBACK}:{ports.etcd}", f"http://{LOOPBACK}:{ports.etcd_peer}"
    return {
        "name": "devcluster",
        "data-dir": layout.run / "etcd",
        "listen-client-urls": client,
        "advertise-client-urls": client,
        "listen-peer-urls": peer,
        "initial-advertise-peer-urls": peer,
        "initial-cluster": f"devcluster={peer}",
        "cert-file": layout.pki / "etcd-server.crt",
        "key-file": layout.pki / "etcd-server.key",
        "client-cert-auth": "true",
        "trusted-ca-file": layout.pki / "etcd-ca.crt",
        "auto-compaction-retention": "1h",
        "logger": "zap",
        "log-level": "warn",
    }


def make_api_server_flags(layout: Layout, network: Network, ports: Ports) -> Flags:
    """Flags of the API server, with the authorization and admission of a hardened cluster and an audit log."""
    pki = layout.pki
    return {
        "bind-address": network.host_address,
        "advertise-address": network.host_address,
        "secure-port": ports.api_server,
        "tls-cert-file": pki / "api-server.crt",
        "tls-private-key-file": pki / "api-server.key",
        "client-ca-file": pki / "ca.crt",
        "etcd-servers": f"https://{LOOPBACK}:{ports.etcd}",
        "etcd-cafile": pki / "etcd-ca.crt",
        "etcd-certfile": pki / "etcd-client.crt",
        "etcd-keyfile": pki / "etcd-client.key",
        "authorization-mode": "Node,RBAC",
        "enable-admission-plugins": ",".join(ADMISSION_PLUGINS),
        "allow-privileged": "true",
        "service-cluster-ip-range": network.service_cidr,
        "service-account-issuer": f"https://kubernetes.default.svc.{CLUSTER_DOMAIN}",
        "service-account-key-file": pki / "service-accounts.pub",
        "service-account-signing-key-file": pki / "service-accounts.key",
        "kubelet-certificate-authority": pki / "ca.crt",
        "kubelet-client-certificate": pki / "api-server-kubelet-client.crt",
        "kubelet-client-key": pki / "api-server-kubelet-client.key",
        "kubelet-preferred-address-types": "InternalIP",
        "requestheader-client-ca-file": pki / "front-proxy-ca.crt",
        "requestheader-allowed-names": "front-proxy-client",
        "requestheader-username-headers": "X-Remote-User",
        "requestheader-group-headers": "X-Remote-Group",
        "requestheader-extra-headers-prefix": "X-Remote-Extra-",
        "proxy-client-cert-file": pki / "front-proxy-client.crt",
        "proxy-client-key-file": pki / "front-proxy-client.key",
        "audit-policy-file": layout.config / "audit-policy.json",
        "audit-log-path": layout.logs / AUDIT_LOG,
        "audit-log-maxsize": 200,
        "audit-log-maxbackup": 1,
        "profiling": "false",
    }


def make_controller_manager_flags(layout: Layout, network: Network, ports: Ports) -> Flags:
    """Flags of the controller manager: every controller, each under its own service account."""
    kubeconfig = layout.config / "controller-manager.kubeconfig"
    return {
        "kubeconfig": kubeconfig,
        "authentication-kubeconfig": kubeconfig,
        "authorization-kubeconfig": kubeconfig,
        "bind-address": LOOPBACK,
        "secure-port": ports.controller_manager,
        "leader-elect": "false",
        "use-service-account-credentials": "true",
        "service-account-private-key-file": layout.pki / "service-accounts.key",
        "root-ca-file": layout.pki / "ca.crt",
        "cluster-signing-cert-file": layout.pki / "ca.crt",
        "cluster-signing-key-file": layout.pki / "ca.key",
        "requestheader-client-ca-file": layout.pki / "front-proxy-ca.crt",
        "allocate-node-cidrs": "false",
        "service-cluster-ip-range": network.service_cidr,
        # The default of 20 calls a second for each controller would be what a benchmark of a thousand pools measures.
        "kube-api-qps": "200",
        "kube-api-burst": "400",
        # The default of 15 seconds is what a test would wait for, each time an HPA is to say something.
        "horizontal-pod-autoscaler-sync-period": "2s",
        "profiling": "false",
    }


def make_scheduler_flags(layout: Layout, ports: Ports) -> Flags:
    """Flags of the scheduler."""
    kubeconfig = layout.config / "scheduler.kubeconfig"
    return {
        "kubeconfig": kubeconfig,
        "authentication-kubeconfig": kubeconfig,
        "authorization-kubeconfig": kubeconfig,
        "bind-address": LOOPBACK,
        "secure-port": ports.scheduler,
        "leader-elect": "false",
        "profiling": "false",
    }


def make_audit_policy() -> dict[str, Any]:
    """Audit policy: who did what to which object, once per finished call; health probes left out."""
    return {
        "apiVersion": "audit.k8s.io/v1",
        "kind": "Policy",
        "omitStages": ["RequestReceived"],
        "rules": [
            {"level": "None", "nonResourceURLs": ["/healthz*", "/livez*", "/readyz*"]},
            {"level": "Metadata"},
        ],
    }


def render_kubeconfig(*, server: str, user: str, authority: bytes, certificate: bytes, key: bytes) -> str:
    """Render a kubeconfig with its keys embedded, so that the one file works wherever it is copied."""
    return f"""apiVersion: v1
kind: Config
clusters:
- name: devcluster
  cluster:
    server: {server}
    certificate-authority-data: {b64encode(authority).decode()}
users:
- name: {user}
  user:
    client-certificate-data: {b64encode(certificate).decode()}
    client-key-data: {b64encode(key).decode()}
contexts:
- name: devcluster
  context:
    cluster: devcluster
    user: {user}
current-context: devcluster
"""
