"""The namespace's gateway, shared by its pools.

The oldest pools that want the gateway are owners of its objects, none a controller: the garbage collector removes
them with the last pool. All pools' tasks build the same manifests from the same list of pools, so it does not matter
which of them applies. Few owners are enough, since a leaving pool is replaced while it drains; a thousand
would have every new pool rewrite a thousand references.
"""

from __future__ import annotations

from typing import Any

from millpond_common.contract import gateway_peers, labels, ports
from millpond_operator.desired import names
from millpond_operator.desired.children import make_metrics_peers, make_operator_peer, make_rule
from millpond_operator.desired.env import make_env, make_field_env
from millpond_operator.desired.kinds import (
    BUDGET,
    DEPLOYMENT,
    NETWORK_POLICY,
    ROLE_BINDING,
    SECRET,
    SERVICE,
    SERVICE_ACCOUNT,
    Kind,
)
from millpond_operator.desired.manifest import Manifest, Owner, make_manifest
from millpond_operator.desired.pod import CONTAINER_SECURITY, GRACE_MARGIN_SECONDS, POD_SECURITY
from millpond_operator.desired.settings import BuildSettings

GATEWAY_KINDS = (SERVICE_ACCOUNT, ROLE_BINDING, SECRET, SERVICE, DEPLOYMENT, BUDGET, NETWORK_POLICY)
_PEER_PORTS = {
    "port": ports.GATEWAY_PEERS,
    "endPort": ports.GATEWAY_PEERS + ports.MAX_GATEWAY_WORKERS - 1,
    "protocol": "TCP",
}
_KEY_SOURCE = {"secretName": labels.GATEWAY_NAME, "defaultMode": 0o440, "optional": True}
"""Optional: gateways that wait for their key serve, each for itself, and find it when it comes."""
POD_FIELDS = {"POD_NAME": "metadata.name", "POD_NAMESPACE": "metadata.namespace", "POD_IP": "status.podIP"}


def make_gateway(
    owners: list[Owner], settings: BuildSettings, *, owns_count: bool = True, keyed: bool = False
) -> list[Manifest]:
    """All objects of a namespace's gateway.

    Args:
        owners: its pools by name, at least one.
        settings: of the operator.
        owns_count: whether the number of gateways is the operator's; false once a scaler has set it.
        keyed: whether the Secret with their key is the operator's to make; its content comes once, from who writes it.
    """
    contents: dict[Kind, dict[str, Any]] = {
        SERVICE_ACCOUNT: {"automountServiceAccountToken": False},
        ROLE_BINDING: _make_binding(owners[0].namespace, settings),
        **({SECRET: {}} if keyed else {}),
        SERVICE: _make_service(),
        DEPLOYMENT: _make_deployment(settings, owns_count=owns_count),
        BUDGET: _make_budget(),
    }
    if settings.network_policies:
        contents[NETWORK_POLICY] = _make_network_policy(settings)
    return [_make(owners, kind, content) for kind, content in contents.items()]


def make_endpoint(namespace: str, settings: BuildSettings) -> str:
    """Address of the OpenAI surface inside the cluster."""
    return f"http://{labels.GATEWAY_NAME}.{namespace}.svc.{settings.cluster_domain}/v1"


def _make(owners: list[Owner], kind: Kind, content: dict[str, Any]) -> Manifest:
    return make_manifest(
        kind,
        owners[0].namespace,
        labels.GATEWAY_NAME,
        own_labels=names.make_gateway_labels(),
        owners=[owner.make_reference(controller=False) for owner in owners],
        content=content,
    )


def _make_binding(namespace: str, settings: BuildSettings) -> dict[str, Any]:
    return {
        "roleRef": {
            "apiGroup": "rbac.authorization.k8s.io",
            "kind": settings.gateway_role_kind,
            "name": settings.gateway_role_name,
        },
        "subjects": [{"kind": "ServiceAccount", "name": labels.GATEWAY_NAME, "namespace": namespace}],
    }


def _make_service() -> dict[str, Any]:
    http = {"name": "http", "port": ports.GATEWAY_SERVICE, "targetPort": "http", "protocol": "TCP"}
    return {"spec": {"type": "ClusterIP", "selector": names.make_gateway_selector(), "ports": [http]}}


def _make_budget() -> dict[str, Any]:
    selector = {"matchLabels": names.make_gateway_selector()}
    return {"spec": {"maxUnavailable": 1, "unhealthyPodEvictionPolicy": "AlwaysAllow", "selector": selector}}


def _make_network_policy(settings: BuildSettings) -> dict[str, Any]:
    gateways = {"podSelector": {"matchLabels": names.make_gateway_selector()}}
    rules: list[dict[str, Any]] = [
        {"ports": [{"port": ports.GATEWAY_HTTP, "protocol": "TCP"}]},
        {"from": [gateways], "ports": [_PEER_PORTS]},
        make_rule([make_operator_peer(settings), *make_metrics_peers(settings)], [ports.GATEWAY_ADMIN]),
    ]
    spec = {"podSelector": gateways["podSelector"], "policyTypes": ["Ingress"], "ingress": rules}
    return {"spec": spec}


def _make_deployment(settings: BuildSettings, *, owns_count: bool) -> dict[str, Any]:
    selector = {"matchLabels": names.make_gateway_selector()}
    count = {"replicas": settings.gateway_replicas} if owns_count else {}
    spec = {
        **count,
        "revisionHistoryLimit": 2,
        "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}},
        "selector": selector,
        "template": {
            "metadata": {
                "labels": names.make_gateway_labels(),
                "annotations": {"kubectl.kubernetes.io/default-container": "gateway"},
            },
            "spec": _make_pod_spec(settings),
        },
    }
    return {"spec": spec}


def _make_pod_spec(settings: BuildSettings) -> dict[str, Any]:
    spread = {
        "maxSkew": 1,
        "topologyKey": "kubernetes.io/hostname",
        "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": {"matchLabels": names.make_gateway_selector()},
    }
    spec: dict[str, Any] = {
        "serviceAccountName": labels.GATEWAY_NAME,
        "automountServiceAccountToken": True,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": settings.gateway_grace_seconds,
        "securityContext": dict(POD_SECURITY),
        "topologySpreadConstraints": [spread],
        "containers": [_make_container(settings)],
        "volumes": [{"name": "tmp", "emptyDir": {}}, {"name": "peers", "secret": dict(_KEY_SOURCE)}],
    }
    if settings.image_pull_secrets:
        spec["imagePullSecrets"] = [{"name": name} for name in settings.image_pull_secrets]
    return spec


def _choose_stream_grace(settings: BuildSettings) -> int:
    """How long a leaving gateway's streams may take: it must have ended them, and said so, when the kubelet kills it."""
    return max(1, settings.gateway_grace_seconds - GRACE_MARGIN_SECONDS)


def _make_container(settings: BuildSettings) -> dict[str, Any]:
    probe = {"port": "admin"}
    container = {
        "name": "gateway",
        "image": settings.gateway_image,
        "args": [f"--grace-seconds={_choose_stream_grace(settings)}", *settings.gateway_args],
        "env": [*make_field_env(POD_FIELDS), *make_env(settings.gateway_env)],
        "ports": [
            {"name": "http", "containerPort": ports.GATEWAY_HTTP, "protocol": "TCP"},
            {"name": "admin", "containerPort": ports.GATEWAY_ADMIN, "protocol": "TCP"},
            {"name": "peers", "containerPort": ports.GATEWAY_PEERS, "protocol": "TCP"},
        ],
        "resources": {
            "requests": {"cpu": settings.gateway_cpu, "memory": settings.gateway_memory},
            "limits": {"memory": settings.gateway_memory_limit},
        },
        "securityContext": dict(CONTAINER_SECURITY),
        "readinessProbe": {"httpGet": probe | {"path": "/ready"}, "periodSeconds": 2, "failureThreshold": 2},
        "livenessProbe": {"httpGet": probe | {"path": "/health"}, "periodSeconds": 10, "failureThreshold": 6},
        "volumeMounts": [
            {"name": "tmp", "mountPath": "/tmp"},  # noqa: S108 - a mount of the container
            {"name": "peers", "mountPath": gateway_peers.DIRECTORY, "readOnly": True},
        ],
    }
    return container | ({"imagePullPolicy": settings.image_pull_policy} if settings.image_pull_policy else {})
