"""The Kubernetes kinds the operator reads or writes."""

from __future__ import annotations

from dataclasses import dataclass

from millpond_common.contract import labels


@dataclass(frozen=True, slots=True)
class Kind:
    """Where objects of one kind live in the API."""

    group: str
    version: str
    name: str
    plural: str
    namespaced: bool = True

    @property
    def api_version(self) -> str:
        """Value of `apiVersion`."""
        return f"{self.group}/{self.version}" if self.group else self.version

    def make_path(
        self, namespace: str | None, name: str | None = None, subresource: str | None = None
    ) -> str:
        """URL path of the collection, one object, or its subresource; without a namespace, of all namespaces."""
        parts = ["apis", self.group, self.version] if self.group else ["api", self.version]
        if namespace is not None and self.namespaced:
            parts += ["namespaces", namespace]
        parts += [self.plural, *([name] if name else []), *([subresource] if subresource else [])]
        return "/" + "/".join(parts)


POOL = Kind(labels.GROUP, labels.VERSION, labels.KIND, labels.PLURAL)
DEPLOYMENT = Kind("apps", "v1", "Deployment", "deployments")
POD = Kind("", "v1", "Pod", "pods")
SERVICE = Kind("", "v1", "Service", "services")
CONFIG_MAP = Kind("", "v1", "ConfigMap", "configmaps")
SERVICE_ACCOUNT = Kind("", "v1", "ServiceAccount", "serviceaccounts")
CLAIM = Kind("", "v1", "PersistentVolumeClaim", "persistentvolumeclaims")
BUDGET = Kind("policy", "v1", "PodDisruptionBudget", "poddisruptionbudgets")
NETWORK_POLICY = Kind("networking.k8s.io", "v1", "NetworkPolicy", "networkpolicies")
ROLE_BINDING = Kind("rbac.authorization.k8s.io", "v1", "RoleBinding", "rolebindings")
SECRET = Kind("", "v1", "Secret", "secrets")
NODE = Kind("", "v1", "Node", "nodes", namespaced=False)
DEVICE_CLASS = Kind("resource.k8s.io", "v1", "DeviceClass", "deviceclasses", namespaced=False)
RESOURCE_SLICE = Kind("resource.k8s.io", "v1", "ResourceSlice", "resourceslices", namespaced=False)
RESOURCE_CLAIM = Kind("resource.k8s.io", "v1", "ResourceClaim", "resourceclaims")
RESOURCE_CLAIM_TEMPLATE = Kind("resource.k8s.io", "v1", "ResourceClaimTemplate", "resourceclaimtemplates")
EVENT = Kind("", "v1", "Event", "events")
SCALER = Kind("autoscaling", "v2", "HorizontalPodAutoscaler", "horizontalpodautoscalers")
LEASE = Kind("coordination.k8s.io", "v1", "Lease", "leases")

CHILDREN = (
    DEPLOYMENT,
    SERVICE,
    CONFIG_MAP,
    SERVICE_ACCOUNT,
    CLAIM,
    BUDGET,
    NETWORK_POLICY,
    ROLE_BINDING,
)
"""Kinds that exist in every cluster and that the operator makes; each has one watch shared by all pools."""
