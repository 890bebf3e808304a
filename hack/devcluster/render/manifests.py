"""Objects the driver applies: what cluster DNS needs."""

from typing import Any

from devcluster.network import Network

RBAC = "rbac.authorization.k8s.io"


def make_dns_manifests(network: Network) -> dict[str, dict[str, Any]]:
    """Objects by API path. CoreDNS runs beside the kubelet, so its Service has hand-made endpoints."""
    role = "system:coredns"
    reads = [
        {"apiGroups": [""], "resources": ["namespaces", "pods", "services"], "verbs": ["list", "watch"]},
        {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["list", "watch"]},
    ]
    subject = {"apiGroup": RBAC, "kind": "User", "name": role}
    in_system = {"namespace": "kube-system"}
    ports = [
        {"name": "dns", "port": 53, "protocol": "UDP"},
        {"name": "dns-tcp", "port": 53, "protocol": "TCP"},
    ]
    return {
        f"/apis/{RBAC}/v1/clusterroles/{role}": {
            "apiVersion": f"{RBAC}/v1", "kind": "ClusterRole", "metadata": {"name": role}, "rules": reads,
        },
        f"/apis/{RBAC}/v1/clusterrolebindings/{role}": {
            "apiVersion": f"{RBAC}/v1", "kind": "ClusterRoleBinding", "metadata": {"name": role},
            "roleRef": {"apiGroup": RBAC, "kind": "ClusterRole", "name": role}, "subjects": [subject],
        },
        "/api/v1/namespaces/kube-system/services/kube-dns": {
            "apiVersion": "v1", "kind": "Service", "metadata": {"name": "kube-dns", **in_system},
            "spec": {"clusterIP": network.dns_address, "ports": ports},
        },
        "/apis/discovery.k8s.io/v1/namespaces/kube-system/endpointslices/kube-dns": {
            "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice",
            "metadata": {"name": "kube-dns", **in_system, "labels": {"kubernetes.io/service-name": "kube-dns"}},
            "addressType": "IPv4",
            "endpoints": [{"addresses": [network.node_address], "conditions": {"ready": True}}],
            "ports": ports,
        },
    }  # fmt: skip
