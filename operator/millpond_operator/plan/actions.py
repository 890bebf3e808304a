"""One write each. A plan is an ordered tuple of them; any prefix, once done, leaves a state that converges."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from millpond_common.contract.reasons import ConditionReason
from millpond_operator.api.status import PoolStatus
from millpond_operator.desired.kinds import Kind
from millpond_operator.desired.manifest import Manifest

STAGE_FIRST, STAGE_WORKLOADS, STAGE_REST = 0, 1, 2
"""What pods need before they start, the workloads, and what may come after them."""


@dataclass(frozen=True, slots=True)
class Apply:
    """Create a child, or update it by server-side apply."""

    manifest: Manifest
    stage: int
    """Applies of one stage are independent of one another; a lower stage comes first."""
    uid: str | None
    """Of the live object, so that one that took its name meanwhile is not written to. None when the snapshot holds no
    such object: one that exists after all is looked at first, since it may be a stranger's."""

    adopt: bool = False
    """Whether the live object was created, not applied, and so must first be made one that loses what it should lose."""

    @property
    def is_new(self) -> bool:
        """Whether the object does not exist yet, as far as known."""
        return self.uid is None


@dataclass(frozen=True, slots=True)
class Delete:
    """Delete a child, only this very object."""

    kind: Kind
    name: str
    uid: str
    why: str


@dataclass(frozen=True, slots=True)
class MarkPod:
    """Change labels and annotations of one engine pod."""

    name: str
    uid: str
    labels: Mapping[str, str | None]
    annotations: Mapping[str, str | None]
    why: str


@dataclass(frozen=True, slots=True)
class SetFinalizer:
    """Put the drain finalizer on the pool, or take it away."""

    present: bool


Action = Apply | Delete | MarkPod | SetFinalizer


@dataclass(frozen=True, slots=True)
class EventNote:
    """One Kubernetes event about the pool; equal type, reason and message are counted, not repeated."""

    warning: bool
    reason: ConditionReason | str
    action: str
    message: str


@dataclass(frozen=True, slots=True)
class PoolPlan:
    """Everything one decision asks for."""

    actions: tuple[Action, ...]
    status: PoolStatus | None
    """The whole status, or None when it is as it should be."""
    events: tuple[EventNote, ...]
    recheck_seconds: float
    """Look again after this time even if nothing reports a change."""
    urgent: bool = True
    """Whether the status must be written at once, and not together with what follows."""
