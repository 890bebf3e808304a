"""An InferencePool as the operator reads it: metadata, spec and the status written last."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

import msgspec
from msgspec import field

from millpond_common.contract.labels import PAUSED
from millpond_operator.api.errors import SpecError
from millpond_operator.api.spec import (
    PoolSpec,
    ResourcesSpec,
    RoleSpec,
    ScalingSpec,
    TemplateSpec,
)
from millpond_operator.api.status import PoolStatus

DEFAULT_REPLICAS = 1
"""Count of a pool with neither `replicas` nor `scaling`; not a schema default, which would forbid `scaling`."""
DEFAULT_HUB_REVISION = "main"
"""Revision of an hf:// source that names none."""

Role = Literal["Both", "Prefill", "Decode"]
_AT = re.compile(r"^(?P<problem>.*?)(?: - at (?:`key` in )?`\$\.?(?P<path>.*)`)?$", re.DOTALL)


class PoolMetadata(msgspec.Struct, frozen=True, rename="camel", kw_only=True):
    """The parts of the metadata that decisions use."""

    name: str
    namespace: str
    uid: str
    generation: int
    resource_version: str = ""
    deletion_timestamp: datetime | None = None
    labels: dict[str, str] = field(default_factory=dict)
    annotations: dict[str, str] = field(default_factory=dict)
    finalizers: tuple[str, ...] = ()


class InferencePool(msgspec.Struct, frozen=True, rename="camel", kw_only=True):
    """One pool."""

    metadata: PoolMetadata
    spec: PoolSpec
    status: PoolStatus = PoolStatus()

    @property
    def key(self) -> tuple[str, str]:
        """Namespace and name."""
        return self.metadata.namespace, self.metadata.name

    @property
    def model_name(self) -> str:
        """What clients put in `model`."""
        return self.spec.model.name or self.metadata.name

    @property
    def model_revision(self) -> str | None:
        """Revision of a hub source; None for every other source."""
        if not self.spec.model.source.startswith("hf://"):
            return None
        return self.spec.model.revision or DEFAULT_HUB_REVISION

    @property
    def is_deleting(self) -> bool:
        """Whether the pool has been deleted and waits for its finalizers."""
        return self.metadata.deletion_timestamp is not None

    @property
    def is_paused(self) -> bool:
        """Whether the operator should observe and report only."""
        return self.metadata.annotations.get(PAUSED) == "true"


@dataclass(frozen=True)
class RoleView:
    """One role of a pool with everything it inherits.

    Attributes:
        role: Both for a pool without disaggregation.
        replicas: the fixed count; None where the autoscaler owns it.
        scaling: the autoscaler's limits; None where the count is fixed.
        resources: what one replica gets.
        templates: additions to the pods, to be merged in this order.
    """

    role: Role
    replicas: int | None
    scaling: ScalingSpec | None
    resources: ResourcesSpec
    templates: tuple[TemplateSpec, ...]


def parse_pool(data: Any) -> InferencePool:
    """Read an object of the API server.

    Raises:
        SpecError: with the path of the field that cannot be read.
    """
    try:
        return msgspec.convert(data, InferencePool)
    except msgspec.ValidationError as error:
        found = _AT.match(str(error))
        assert found is not None
        raise SpecError(found["path"] or "object", found["problem"]) from error


def list_roles(pool: InferencePool) -> tuple[RoleView, ...]:
    """The roles whose replicas a pool wants, each with what it inherits from the pool.

    Raises:
        SpecError: when a role has no resources; the CRD's rules exclude it.
    """
    spec = pool.spec
    if spec.disaggregation is None:
        whole = RoleSpec(replicas=spec.replicas, scaling=spec.scaling)
        return (_view(spec, "Both", whole, "spec.resources"),)
    split = spec.disaggregation
    return (
        _view(spec, "Prefill", split.prefill, "spec.disaggregation.prefill.resources"),
        _view(spec, "Decode", split.decode, "spec.disaggregation.decode.resources"),
    )


def _view(spec: PoolSpec, role: Role, own: RoleSpec, path: str) -> RoleView:
    resources = own.resources or spec.resources
    if resources is None:
        raise SpecError(path, "write limits: what one replica gets")
    fixed = own.replicas if own.replicas is not None else DEFAULT_REPLICAS
    return RoleView(
        role=role,
        replicas=None if own.scaling is not None else fixed,
        scaling=own.scaling,
        resources=resources,
        templates=(spec.template,) if role == "Both" else (spec.template, own.template),
    )
