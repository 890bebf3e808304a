"""Typed, frozen view of the InferencePool resource; pure, shared by everything above it."""

from millpond_operator.api.errors import ApiViewError, QuantityError, SpecError
from millpond_operator.api.pool import InferencePool, PoolMetadata, RoleView, list_roles, parse_pool
from millpond_operator.api.quantity import parse_bytes, parse_quantity
from millpond_operator.api.source import ModelSource, parse_source
from millpond_operator.api.status import (
    Condition,
    DrainingReplica,
    Judgement,
    ModelStatus,
    PoolStatus,
    RoleStatus,
    ScalingStatus,
    dump_status,
    get_condition,
    update_conditions,
)

__all__ = [
    "ApiViewError",
    "Condition",
    "DrainingReplica",
    "InferencePool",
    "Judgement",
    "ModelSource",
    "ModelStatus",
    "PoolMetadata",
    "PoolStatus",
    "QuantityError",
    "RoleStatus",
    "RoleView",
    "ScalingStatus",
    "SpecError",
    "dump_status",
    "get_condition",
    "list_roles",
    "parse_bytes",
    "parse_pool",
    "parse_quantity",
    "parse_source",
    "update_conditions",
]
