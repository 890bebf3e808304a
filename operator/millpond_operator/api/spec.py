"""The spec of an InferencePool as frozen records, field by field as in the CRD.

Names, defaults and enumerations repeat the CRD; a test compares them with it. Bounds and rules between
fields live in the CRD only: what the API server let through is taken as checked. Fields this release does
not know are passed over, so that it can read objects of its successor.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import field

Quantity = str | int
FreeForm = dict[str, Any]
"""Part of a pod written by the user and passed on as it is."""


class _Record(msgspec.Struct, frozen=True, rename="camel", kw_only=True):
    """What all records share: immutable, camelCase outside, keyword arguments only."""


class NameRef(_Record, frozen=True, kw_only=True):
    """An object of the pool's namespace."""

    name: str


class KeyRef(_Record, frozen=True, kw_only=True):
    """A key of a Secret or ConfigMap of the pool's namespace."""

    name: str
    key: str
    optional: bool | None = None


class FieldRef(_Record, frozen=True, kw_only=True):
    """A field of the pod."""

    field_path: str


class EnvSource(_Record, frozen=True, kw_only=True):
    """Where a variable's value comes from; exactly one field is set."""

    secret_key_ref: KeyRef | None = None
    config_map_key_ref: KeyRef | None = None
    field_ref: FieldRef | None = None


class EnvVar(_Record, frozen=True, kw_only=True):
    """An environment variable."""

    name: str
    value: str | None = None
    value_from: EnvSource | None = None


class CacheSpec(_Record, frozen=True, kw_only=True):
    """Where fetched files are kept."""

    type: Literal["None", "Claim", "Node"] = "None"
    claim_name: str | None = None
    storage_class_name: str | None = None
    access_mode: Literal["ReadWriteMany", "ReadWriteOnce"] | None = None
    size_limit: str | None = None


class AdapterSpec(_Record, frozen=True, kw_only=True):
    """A LoRA adapter served beside the model."""

    name: str
    source: str
    sha256: str | None = None


class ModelSpec(_Record, frozen=True, kw_only=True):
    """Which model, and where its files come from."""

    name: str | None = None
    source: str
    revision: str | None = None
    sha256: str | None = None
    secret_ref: NameRef | None = None
    env: tuple[EnvVar, ...] = ()
    cache: CacheSpec = CacheSpec()
    adapters: tuple[AdapterSpec, ...] = ()


class DiskTierSpec(_Record, frozen=True, kw_only=True):
    """Local disk for KV blocks."""

    size: str


class MooncakeSpec(_Record, frozen=True, kw_only=True):
    """A Mooncake Store."""

    master_address: str


class StoreTierSpec(_Record, frozen=True, kw_only=True):
    """Store of KV blocks shared by the fleet."""

    mooncake: MooncakeSpec


class KVCacheSpec(_Record, frozen=True, kw_only=True):
    """Memory of the KV cache by tier."""

    block_tokens: Literal[8, 16, 32, 64, 128] = 16
    device_percent: int = 90
    device_memory: str | None = None
    host_memory: str | None = None
    disk: DiskTierSpec | None = None
    store: StoreTierSpec | None = None


class EngineSpec(_Record, frozen=True, kw_only=True):
    """How each replica runs the model."""

    image: str | None = None
    image_pull_policy: Literal["Always", "IfNotPresent", "Never"] | None = None
    image_pull_secrets: tuple[NameRef, ...] = ()
    dtype: Literal["Auto", "BFloat16", "Float16", "Float32"] = "Auto"
    max_model_tokens: int = 8192
    default_output_tokens: int | None = None
    tensor_parallel_size: int = 1
    startup_seconds: int = 1800
    kv_cache: KVCacheSpec = KVCacheSpec()
    extra_args: tuple[str, ...] = ()
    env: tuple[EnvVar, ...] = ()


class ResourceClaimUse(_Record, frozen=True, kw_only=True):
    """A resource claim of the pod that the engine uses."""

    name: str
    request: str | None = None


class ResourcesSpec(_Record, frozen=True, kw_only=True):
    """What one replica gets."""

    limits: dict[str, Quantity]
    requests: dict[str, Quantity] = field(default_factory=dict)
    claims: tuple[ResourceClaimUse, ...] = ()


class AdmitWhileQueuedSpec(_Record, frozen=True, kw_only=True):
    """Admit a class only while another waits little."""

    class_name: str = field(name="class")
    below: int


class ClassSpec(_Record, frozen=True, kw_only=True):
    """A traffic class."""

    name: str
    priority: int = 0
    ttft_milliseconds: int | None = None
    itl_milliseconds: int | None = None
    reserved_kv_percent: int = field(default=0, name="reservedKVPercent")
    max_share_percent: int = 100
    admit_while_queued: AdmitWhileQueuedSpec | None = None


class TenantSpec(_Record, frozen=True, kw_only=True):
    """A tenant with a share of its own."""

    name: str
    weight: int = 1
    max_concurrency: int | None = None
    tokens_per_minute: int | None = None
    """Kept by the gateways alone."""
    max_cache_percent: int = 100
    api_key_secret_ref: NameRef | None = None


class PricingSpec(_Record, frozen=True, kw_only=True):
    """Prices per million tokens, as decimal text."""

    input_per_million: str
    cached_input_per_million: str | None = None
    output_per_million: str
    currency: str = "USD"


DEFAULT_CLASSES = (
    ClassSpec(name="interactive", priority=100),
    ClassSpec(name="agent", priority=50),
    ClassSpec(
        name="batch",
        priority=0,
        admit_while_queued=AdmitWhileQueuedSpec(class_name="interactive", below=4),
    ),
)


class SchedulingSpec(_Record, frozen=True, kw_only=True):
    """Which requests run, in which order, at what share."""

    max_batch_tokens: int = 2048
    max_sequences: int = 256
    max_queued_requests: int = 1024
    max_queued_tokens: int = 4_000_000
    policy: Literal["FairShare", "Fifo", "Priority", "Deadline"] = "FairShare"
    preemption: Literal["Auto", "Swap", "Recompute", "Reject"] = "Auto"
    classes: tuple[ClassSpec, ...] = DEFAULT_CLASSES
    default_class: str = "interactive"
    tenants: tuple[TenantSpec, ...] = ()
    pricing: PricingSpec | None = None


class ScalingTargets(_Record, frozen=True, kw_only=True):
    """Load one replica should carry at most."""

    queued_tokens: int = 8000
    kv_percent: int = 80
    ttft_milliseconds: int | None = None


class ScalingSpec(_Record, frozen=True, kw_only=True):
    """Limits and targets of the autoscaler."""

    min_replicas: int = 1
    max_replicas: int
    targets: ScalingTargets = ScalingTargets()
    scale_down_stabilization_seconds: int = 300
    idle_seconds: int = 600
    cold_start_hold_seconds: int | None = None
    warm_floor: Literal["None", "Bursts"] = "None"


class TemplateMetadata(_Record, frozen=True, kw_only=True):
    """Further labels and annotations of the pods."""

    labels: dict[str, str] = field(default_factory=dict)
    annotations: dict[str, str] = field(default_factory=dict)


class PodResourceClaim(_Record, frozen=True, kw_only=True):
    """A resource claim of the pod."""

    name: str
    resource_claim_name: str | None = None
    resource_claim_template_name: str | None = None


class TemplateSpec(_Record, frozen=True, kw_only=True):
    """Additions to the engine pods; free parts are passed on as they are."""

    metadata: TemplateMetadata = TemplateMetadata()
    node_selector: dict[str, str] = field(default_factory=dict)
    tolerations: tuple[FreeForm, ...] = ()
    affinity: FreeForm | None = None
    topology_spread_constraints: tuple[FreeForm, ...] = ()
    priority_class_name: str | None = None
    runtime_class_name: str | None = None
    service_account_name: str | None = None
    security_context: FreeForm | None = None
    resource_claims: tuple[PodResourceClaim, ...] = ()
    volumes: tuple[FreeForm, ...] = ()
    volume_mounts: tuple[FreeForm, ...] = ()


class RoleSpec(_Record, frozen=True, kw_only=True):
    """Replicas of one role of a split pool; what is absent comes from the pool."""

    replicas: int | None = None
    scaling: ScalingSpec | None = None
    resources: ResourcesSpec | None = None
    template: TemplateSpec = TemplateSpec()


class DisaggregationSpec(_Record, frozen=True, kw_only=True):
    """Separate replicas for prefill and decode."""

    prefill: RoleSpec
    decode: RoleSpec
    max_devices: int | None = None


class GatewaySpec(_Record, frozen=True, kw_only=True):
    """How the namespace's gateway serves the pool."""

    enabled: bool = True
    routing: Literal["Auto", "Prefix", "LeastLoaded", "RoundRobin"] = "Auto"
    price_of_recompute: int = 5


class GateSpec(_Record, frozen=True, kw_only=True):
    """What a new revision must keep before its rollout is complete."""

    ttft_milliseconds: int | None = None
    error_percent: int | None = None
    bake_seconds: int = 300


class RolloutSpec(_Record, frozen=True, kw_only=True):
    """How a change reaches the replicas."""

    strategy: Literal["Auto", "Surge", "Replace"] = "Auto"
    max_unavailable: int = 0
    drain_seconds: int = 300
    gate: GateSpec | None = None


class PoolSpec(_Record, frozen=True, kw_only=True):
    """What should run."""

    model: ModelSpec
    engine: EngineSpec = EngineSpec()
    resources: ResourcesSpec | None = None
    scheduling: SchedulingSpec = SchedulingSpec()
    replicas: int | None = None
    scaling: ScalingSpec | None = None
    disaggregation: DisaggregationSpec | None = None
    gateway: GatewaySpec = GatewaySpec()
    rollout: RolloutSpec = RolloutSpec()
    template: TemplateSpec = TemplateSpec()
