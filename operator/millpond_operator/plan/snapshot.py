"""What the operator saw of one pool at one instant; the only input of a decision besides settings and time.

Everything is frozen. An absent observation is None, never zero.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from millpond_common.contract.gateway_report import EndpointReport, PoolReport
from millpond_common.contract.model_facts import ModelFacts
from millpond_operator.api.pool import InferencePool
from millpond_operator.api.status import ModelStatus
from millpond_operator.desired.kinds import Kind

LOST_SECONDS = 60.0
"""Past its deadline after which a leaving pod counts as lost; a kubelet ends it within seconds."""
MAX_GATEWAY_OWNERS = 2
"""Pools that own a namespace's gateway together; a leaving one is replaced while it drains."""


@dataclass(frozen=True, slots=True)
class ContainerState:
    """One container of a pod."""

    name: str
    is_init: bool
    ready: bool
    restarts: int
    running: bool
    waiting_reason: str = ""
    waiting_message: str = ""
    exit_code: int | None = None
    """Of the current or, while waiting or running again, the last termination."""
    exit_reason: str = ""
    exit_message: str = ""
    """The termination message, as the container left it."""


@dataclass(frozen=True, slots=True)
class Pod:
    """One engine or gateway pod."""

    name: str
    uid: str
    revision: str
    role: str
    phase: str
    ready: bool
    deleting: bool
    cordoned: bool
    scheduled: bool
    address: str
    node: str
    created_at: float
    ready_since: float | None
    unschedulable_message: str
    deletion_cost: int
    containers: tuple[ContainerState, ...]
    failure: str = ""
    """Why its node ended it for good (evicted, shut down, not admitted); such a pod never runs again."""
    deletion_deadline: float | None = None
    """When the kubelet ends what is left of it."""

    def is_lost(self, now: float) -> bool:
        """Whether its kubelet left it standing past the time it had to end it: the node is gone or does not answer.

        Such a pod may stay for as long as its node does. It holds nothing that a new one could have.
        """
        return self.deletion_deadline is not None and now > self.deletion_deadline + LOST_SECONDS

    @property
    def restarts(self) -> int:
        """Starts after the first, all containers together; a change means that old answers prove nothing."""
        return sum(container.restarts for container in self.containers)

    @property
    def serving(self) -> bool:
        """Ready and allowed to get new requests."""
        return self.ready and not self.deleting and not self.cordoned


@dataclass(frozen=True, slots=True)
class Workload:
    """The Deployment of one role and revision."""

    name: str
    uid: str
    role: str
    revision: str
    wanted: int
    """Its `spec.replicas`."""
    replicas_manager: str
    """Field manager that set `spec.replicas` last; empty when unknown."""
    generation: int
    observed_generation: int
    created_at: float
    deleting: bool
    failure_message: str = ""
    """Why its pods cannot be created at all (quota, admission), from its ReplicaFailure condition."""


@dataclass(frozen=True, slots=True)
class Child:
    """A live object under a name the operator uses."""

    kind: Kind
    name: str
    uid: str
    labels: Mapping[str, str]
    controller_uid: str | None
    owner_uids: frozenset[str]
    digest: str
    """Digest of the manifest that was applied last; empty on objects of others."""
    body: Mapping[str, Any]
    deleting: bool
    controller: str = ""
    """Kind and name of its controller, as "InferencePool/chat"."""
    scaled_by: str = ""
    """Who set the count of a Deployment through its scale subresource: an HPA, KEDA, `kubectl scale`."""
    created: bool = False
    """Whether the operator's fields are noted as those of a create: an apply without one of them would not remove it."""


@dataclass(frozen=True, slots=True)
class ProbeAnswer:
    """Outcome of the latest real request to one replica."""

    pod_uid: str
    ok: bool
    message: str
    at: float


@dataclass(frozen=True, slots=True)
class GatewayView:
    """What the namespace's gateways say about this pool."""

    num_ready: int
    """Gateway pods that are ready."""
    num_reporting: int
    """Ready gateway pods whose report came and whose first lists are in."""
    reports: tuple[PoolReport, ...] = ()
    error: str = ""
    """Why the last report failed, if one did."""
    problem: str = ""
    """What is wrong with a gateway pod that is not ready, in words."""
    observed_at: float = 0.0

    def is_routed(self, pod_uid: str) -> bool:
        """Whether every reporting gateway may choose the replica now."""
        if self.num_reporting == 0:
            return False
        return all(any(e.pod_uid == pod_uid and e.routable for e in r.endpoints) for r in self.reports) and (
            len(self.reports) == self.num_reporting
        )

    def find_endpoints(self, pod_uid: str) -> tuple[EndpointReport, ...]:
        """The replica as each gateway sees it."""
        return tuple(e for report in self.reports for e in report.endpoints if e.pod_uid == pod_uid)


@dataclass(frozen=True, slots=True)
class Capacity:
    """Free room of the nodes for one resource set, from allocatable minus requests of all pods."""

    fitting_replicas: Mapping[str, int]
    """How many further replicas of a role fit now, by role."""
    free: Mapping[str, str]
    """Largest free amount on one node, by resource, for messages."""
    beyond: Mapping[str, str] = field(default_factory=dict)
    """Resources of which no node has as much as one replica asks for, with the most that one has, for messages."""


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """The most memory one accelerator has among the nodes a role may use."""

    num_bytes: int | None
    """None while a node that may be used does not tell, or there is none."""
    source: str
    """Where the number is from, or why there is none."""


@dataclass(frozen=True, slots=True)
class ClaimNeed:
    """Devices one replica asks for by resource claim."""

    class_name: str
    num_devices: int


@dataclass(frozen=True, slots=True)
class ClaimRoom:
    """Free devices of one class."""

    need: ClaimNeed
    free: Mapping[str, int]
    """By node that has any, free or not."""
    memory: Mapping[str, DeviceMemory]
    """Of the largest device, by node."""


@dataclass(frozen=True, slots=True)
class SiblingPool:
    """Another pool of the namespace that shares its gateway."""

    name: str
    uid: str


@dataclass(frozen=True, slots=True)
class PoolSnapshot:
    """Everything that one decision about one pool may know."""

    pool: InferencePool
    observed_at: float
    workloads: tuple[Workload, ...] = ()
    pods: tuple[Pod, ...] = ()
    """Engine pods that run or may run."""
    ended: tuple[Pod, ...] = ()
    """Those that never will again; their ReplicaSet has replaced them, and nothing removes them soon."""
    children: tuple[Child, ...] = ()
    gateway: GatewayView | None = None
    """None when the pool wants no gateway."""
    count_manager: str = ""
    """Field manager that set the pool's `spec.replicas` last through the scale subresource; empty when none did."""
    scalers: tuple[str, ...] = ()
    """HorizontalPodAutoscalers that target the pool, those KEDA made included."""
    gateway_pools: tuple[SiblingPool, ...] = ()
    """Pools of the namespace that want the gateway, those that stay first, then by age; at most MAX_GATEWAY_OWNERS."""
    sees_gateway_key: bool = False
    """Whether the Secret with the gateways' key was looked for; where it exists it is among the children, without content."""
    probes: Mapping[str, ProbeAnswer] = field(default_factory=dict)
    fetch_progress: Mapping[str, str] = field(default_factory=dict)
    """How far the fetch step is, by pod uid, in its own words."""
    announced: Mapping[str, ModelFacts] = field(default_factory=dict)
    """The model's size as the fetch step told it at its beginning, by pod uid."""
    sibling_models: tuple[ModelStatus, ...] = ()
    """Sizes that other pools of the namespace have learned."""
    device_memory: Mapping[str, DeviceMemory] | None = None
    """Of the accelerators a role asks for, by role; None when nobody looked at the nodes."""
    claim_needs: Mapping[str, ClaimNeed] = field(default_factory=dict)
    """Devices by resource claim that one replica of a role asks for, by role; absent where not certain."""
    name_keeper: str = ""
    """Older pool of the namespace that the gateway serves this pool's model name from; empty where there is none."""
    missing_keys: tuple[str, ...] = ()
    """Secrets with tenants' API keys that do not exist."""
    forbidden_keys: tuple[str, ...] = ()
    """Those that the operator may not read, and so the gateways, which read them by the same right."""
    zones: Mapping[str, str] = field(default_factory=dict)
    """Zone by node, as far as nodes name one and the operator may see them."""
    missing_secrets: tuple[str, ...] = ()
    missing_claims: tuple[str, ...] = ()
    capacity: Capacity | None = None
    """None when the operator may not see nodes, or did not look."""

    def find_child(self, kind: Kind, name: str) -> Child | None:
        """The live object of this kind and name."""
        return next((child for child in self.children if child.kind == kind and child.name == name), None)
