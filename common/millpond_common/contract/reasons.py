"""Condition types and the enumerated reasons that appear unchanged in status, events, metrics and logs."""

from __future__ import annotations

from enum import StrEnum


class ConditionType(StrEnum):
    """Conditions of an InferencePool; polarity is constant: True is the good or active state, except Degraded and ScalingLimited."""

    READY = "Ready"
    PROGRESSING = "Progressing"
    MODEL_AVAILABLE = "ModelAvailable"
    MODEL_FITS = "ModelFits"
    SCALING_ACTIVE = "ScalingActive"
    SCALING_LIMITED = "ScalingLimited"
    DEGRADED = "Degraded"


class ConditionReason(StrEnum):
    """Why a condition has its status. One word for one cause, wherever it is reported."""

    # Ready and Progressing
    ANSWERING = "Answering"  # every wanted replica of the current revision answered a real request through the gateway
    SCALED_TO_ZERO = "ScaledToZero"
    PENDING = "Pending"  # not yet looked at
    CREATING = "Creating"  # children are being made
    ROLLING_OUT = "RollingOut"
    BAKING = "Baking"  # the new revision is measured against rollout.gate before old replicas leave
    ROLLED_BACK = "RolledBack"  # the new revision did not keep rollout.gate; the one before serves
    WAITING_FOR_CAPACITY = "WaitingForCapacity"  # a surge does not fit; the rollout replaces one by one
    DRAINING = "Draining"
    COMPLETE = "Complete"
    PAUSED = "Paused"
    REPLICAS_NOT_READY = "ReplicasNotReady"
    GATEWAY_NOT_READY = "GatewayNotReady"
    GATEWAY_NOT_ROUTING = "GatewayNotRouting"  # the gateway does not know the replica yet
    PROBE_FAILED = "ProbeFailed"  # the real request through the gateway failed
    # what can be wrong with a replica
    UNSCHEDULABLE = "Unschedulable"
    IMAGE_PULL = "ImagePull"
    CRASH_LOOP = "CrashLoop"
    OOM_KILLED = "OOMKilled"
    MODEL_FETCH_FAILED = "ModelFetchFailed"
    MODEL_LOAD = "ModelLoad"  # the engine is still loading, or failed to load, the weights
    CONFIG_ERROR = (
        "ConfigError"  # the container cannot be created as asked (missing Secret, ConfigMap, claim)
    )
    # ModelAvailable
    MODEL_LOADED = "ModelLoaded"
    MODEL_FETCHING = "ModelFetching"
    MODEL_TOO_LARGE = (
        "ModelTooLarge"  # weights and KV cache do not fit the asked memory; numbers in the message
    )
    MODEL_FITS = "ModelFits"
    MODEL_SIZE_UNKNOWN = "ModelSizeUnknown"
    DEVICE_MEMORY_UNKNOWN = "DeviceMemoryUnknown"  # the model's size is known, the memory it gets is not
    # the world
    SECRET_NOT_FOUND = "SecretNotFound"  # noqa: S105 - a reason, not a password
    CLAIM_NOT_FOUND = "ClaimNotFound"
    CHILD_NOT_OURS = "ChildNotOurs"  # an object with the name we need belongs to another controller
    API_ERROR = "ApiError"
    INVALID_SPEC = "InvalidSpec"
    NOT_SUPPORTED = "NotSupported"  # accepted by the schema, not served by this release
    CONFLICT = "Conflict"  # two owners of one field
    HEALTHY = "Healthy"
    # ScalingActive, ScalingLimited
    FIXED_REPLICAS = "FixedReplicas"
    EXTERNAL_SCALER = "ExternalScaler"
    SCALING = "Scaling"
    NO_DATA = "NoData"
    STALE_DATA = "StaleData"
    WITHIN_LIMITS = "WithinLimits"
    MIN_REPLICAS = "MinReplicas"
    MAX_REPLICAS = "MaxReplicas"
    PARTIAL_DATA = "PartialData"  # fewer gateways reported than are expected
    CAPACITY_UNKNOWN = "CapacityUnknown"  # there is demand, and no replica's capacity has been measured yet
    RATE_LIMIT = "RateLimit"
    TARGET_UNREACHABLE = "TargetUnreachable"  # an idle replica already misses the TTFT target


class ScalingReason(StrEnum):
    """What decided a replica count, or which rule bound it."""

    # axes of demand: the recommendation came from this one
    PREFILL_DEMAND = "PrefillDemand"
    DECODE_DEMAND = "DecodeDemand"
    KV_PRESSURE = "KVPressure"
    QUEUED_TOKENS = "QueuedTokens"
    WARM_FLOOR = "WarmFloor"
    HELD_DEMAND = "HeldDemand"  # requests are held for a pool at zero
    IDLE = "Idle"
    STEADY = "Steady"  # the count already is what demand asks for
    # rules that bound the decision
    WITHIN_TOLERANCE = "WithinTolerance"
    MIN_REPLICAS = "MinReplicas"
    MAX_REPLICAS = "MaxReplicas"
    RATE_LIMIT = "RateLimit"
    STABILIZING = "Stabilizing"
    FLEET_MINUS_ONE = "FleetMinusOne"  # one replica fewer would miss a target
    CACHED_VALUE = "CachedValue"  # what the victim has cached would have to be computed again
    PENDING_SUSPECT = (
        "PendingSuspect"  # a replica has been pending for longer than twice the measured start time
    )
    BUDGET = "Budget"
    PAIR_BOUND = "PairBound"  # the other role cannot grow with it
    # what is missing
    NO_DATA = "NoData"
    STALE_DATA = "StaleData"
    PARTIAL_DATA = "PartialData"  # fewer gateways reported than are expected
    CAPACITY_UNKNOWN = "CapacityUnknown"
    TARGET_UNREACHABLE = "TargetUnreachable"  # an idle replica already misses the TTFT target
