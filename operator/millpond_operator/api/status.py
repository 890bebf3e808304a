"""The status of an InferencePool, and how conditions change.

Ready, Progressing, ModelAvailable, ModelFits and ScalingActive are good when True; ScalingLimited and Degraded when
False. `lastTransitionTime` moves only when a status flips; `observedGeneration` is on each condition.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

import msgspec

from millpond_common.contract.model_facts import ModelFacts, WeightType
from millpond_common.contract.reasons import ConditionReason, ConditionType

MAX_MESSAGE_LENGTH = 4096
"""Bound of a condition's message in the CRD."""
MAX_DRAINING = 32
"""Bound of `status.draining` in the CRD."""

ConditionStatus = Literal["True", "False", "Unknown"]
_ORDER = {kind.value: position for position, kind in enumerate(ConditionType)}


class _Record(msgspec.Struct, frozen=True, rename="camel", kw_only=True, omit_defaults=True):
    """What all records share; absent fields stay out of the written status."""


class Condition(_Record, frozen=True, kw_only=True):
    """One condition as the API server holds it."""

    type: str
    status: ConditionStatus
    reason: str
    message: str
    observed_generation: int | None = None
    last_transition_time: datetime


class StartTime(_Record, frozen=True, kw_only=True):
    """Start times measured on one kind of node."""

    node_kind: str
    """Empty where the operator may not see nodes. Written even so: it is the key of the list."""
    seconds: int
    num_starts: int


class ScalingStatus(_Record, frozen=True, kw_only=True):
    """The last decision of the autoscaler; an absent number is unknown, never zero."""

    recommendation: int | None = None
    decision: int | None = None
    reason: str | None = None
    demand_tokens_per_second: int | None = None
    capacity_tokens_per_second: int | None = None
    start_seconds: int | None = None
    """Measured time from creating a replica to its being ready, 90th percentile; gateways promise by it."""
    start_times: tuple[StartTime, ...] = ()
    """The same by kind of node, so that the next operator knows them."""
    observed_at: datetime | None = None


class RoleStatus(_Record, frozen=True, kw_only=True):
    """Replicas of one role."""

    name: Literal["Both", "Prefill", "Decode"]
    replicas: int | None = None
    ready_replicas: int | None = None
    selector: str | None = None
    devices: int | None = None


class DrainingReplica(_Record, frozen=True, kw_only=True):
    """A replica that is leaving."""

    replica: str
    num_requests: int | None = None
    deadline: datetime | None = None


class ModelStatus(_Record, frozen=True, kw_only=True):
    """Size of the model as the fetch step of a replica told it; kept so that the next revision is judged before it starts."""

    files: str
    """Digest of source, revision and checksum: facts of other files say nothing."""
    num_parameters: int
    dtype: WeightType
    num_layers: int
    num_kv_heads: int
    head_dim: int
    max_model_tokens: int

    def to_facts(self) -> ModelFacts:
        """The facts alone."""
        return ModelFacts(
            num_parameters=self.num_parameters,
            dtype=self.dtype,
            num_layers=self.num_layers,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            max_model_tokens=self.max_model_tokens,
        )


class PoolStatus(_Record, frozen=True, kw_only=True):
    """What runs."""

    observed_generation: int | None = None
    model_name: str | None = None
    replicas: int | None = None
    ready_replicas: int | None = None
    updated_replicas: int | None = None
    desired_replicas: int | None = None
    selector: str | None = None
    endpoint: str | None = None
    revision: str | None = None
    conditions: tuple[Condition, ...] = ()
    scaling: ScalingStatus | None = None
    model: ModelStatus | None = None
    roles: tuple[RoleStatus, ...] = ()
    draining: tuple[DrainingReplica, ...] = ()


@dataclass(frozen=True)
class Judgement:
    """What a check found about one condition now.

    Attributes:
        type: the condition.
        status: True, False, or None for unknown.
        reason: the cause.
        message: for a human, with the next step.
    """

    type: ConditionType
    status: bool | None
    reason: ConditionReason
    message: str


def dump_status(status: PoolStatus) -> dict[str, Any]:
    """Plain data as the API server holds it, lists and texts included; absent fields are left out."""
    built = msgspec.json.decode(msgspec.json.encode(status))
    assert isinstance(built, dict)
    return built


def parse_model_status(data: Any) -> ModelStatus | None:
    """Read `status.model` of any pool; None when it is of another form."""
    try:
        return msgspec.convert(data, ModelStatus)
    except msgspec.ValidationError:
        return None


def get_condition(status: PoolStatus, kind: ConditionType) -> Condition | None:
    """The condition of a type, if the status has it."""
    return next((condition for condition in status.conditions if condition.type == kind), None)


def update_conditions(
    previous: Iterable[Condition], judgements: Iterable[Judgement], *, generation: int, now: datetime
) -> tuple[Condition, ...]:
    """Conditions after a round of checks, in the order of ConditionType.

    A type that was not judged this time is dropped: a condition nobody checks any more would grow false.

    Args:
        previous: conditions of the status as it was read.
        judgements: at most one per type.
        generation: `metadata.generation` of the judged spec.
        now: an aware time; cut to whole seconds, as Kubernetes writes times.
    """
    before = {condition.type: condition for condition in previous}
    after = [_apply(before.get(found.type), found, generation, now) for found in judgements]
    assert len({condition.type for condition in after}) == len(after), "two judgements of one condition"
    return tuple(sorted(after, key=lambda condition: _ORDER[condition.type]))


def _apply(before: Condition | None, found: Judgement, generation: int, now: datetime) -> Condition:
    status = _to_status(found.status)
    since = before.last_transition_time if before is not None and before.status == status else None
    return Condition(
        type=found.type.value,
        status=status,
        reason=found.reason.value,
        message=_cut(found.message),
        observed_generation=generation,
        last_transition_time=since or now.replace(microsecond=0),
    )


def _to_status(value: bool | None) -> ConditionStatus:
    if value is None:
        return "Unknown"
    return "True" if value else "False"


def _cut(message: str) -> str:
    return message if len(message) <= MAX_MESSAGE_LENGTH else message[: MAX_MESSAGE_LENGTH - 1] + "…"
