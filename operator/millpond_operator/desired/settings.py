"""What the operator was installed with; it shapes children, but never the revision of a pool."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from millpond_operator.api.spec import EnvVar


@dataclass(frozen=True, slots=True)
class BuildSettings:
    """Defaults of the operator's installation."""

    engine_image: str
    gateway_image: str
    image_pull_policy: str | None = None
    image_pull_secrets: tuple[str, ...] = ()
    gateway_replicas: int = 2
    gateway_cpu: str = "250m"
    gateway_memory: str = "256Mi"
    gateway_memory_limit: str = "1Gi"
    gateway_grace_seconds: int = 330
    gateway_args: tuple[str, ...] = ()
    gateway_env: tuple[EnvVar, ...] = ()
    gateway_role_kind: Literal["ClusterRole", "Role"] = "ClusterRole"
    gateway_role_name: str = "millpond-gateway"
    """Role the chart ships for gateways; the operator may bind this one and no other."""
    operator_namespace: str = "millpond-system"
    """Its pods may reach admin ports."""
    metrics_namespaces: tuple[str, ...] = ()
    """Namespaces whose pods may reach the ports with metrics, beside the operator's."""
    network_policies: bool = True
    cluster_domain: str = "cluster.local"
    node_cache_path: str = "/var/lib/millpond/models"
    """Directory of a node that cache type Node shares among replicas."""
