"""How many replicas each revision of one role should have next.

Each revision is a Deployment of its own, so a rollout is two counts that move towards each other. The planner is
stateless: it reads what exists and names the next counts, so a crash between any two writes loses nothing.

Rules, for `desired` replicas:

- New replicas never push the number of pods, leaving ones included, above desired + surge (Surge) or above desired
  (Replace): what leaves still holds its GPU.
- Old replicas that are not ready go at once and use no budget.
- While the new revision is on trial (a gate), it stands for nothing: old replicas that answer stay up to that count.
- Old replicas that are ready go only while at least desired - maxUnavailable replicas answer; a new replica answers
  when it is ready, every gateway routes to it and a real request through the gateway succeeded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from millpond_common.contract.reasons import ConditionReason
from millpond_operator.plan.quota import is_quota_full
from millpond_operator.plan.snapshot import Pod, Workload

Mode = Literal["Surge", "Replace"]


@dataclass(frozen=True, slots=True)
class RoleInput:
    """One role as the planner sees it."""

    revision: str
    desired: int
    workloads: tuple[Workload, ...]
    pods: tuple[Pod, ...]
    answering: frozenset[str]
    """Uids of pods that answer requests."""
    strategy: Literal["Auto", "Surge", "Replace"]
    max_unavailable: int
    surge_percent: int
    fitting: int | None
    """Further replicas that fit now; None when unknown."""
    now: float
    patience_seconds: float
    """How long a new pod may find no room before old ones make some."""
    baking: bool = False
    """The new revision is on trial: its replicas do not stand for old ones yet."""


@dataclass(frozen=True, slots=True)
class RoleCounts:
    """The next counts."""

    by_revision: Mapping[str, int]
    """For every revision that should have a Deployment, the current one included."""
    finished: tuple[str, ...]
    """Revisions whose Deployment has nothing left and can go."""
    rolling: bool
    """Replicas of another revision exist."""
    mode: Mode
    reason: ConditionReason
    message: str


def plan_counts(state: RoleInput) -> RoleCounts:
    """Name the next counts of all revisions."""
    old = sorted(
        (w for w in state.workloads if w.revision != state.revision), key=lambda w: (w.created_at, w.name)
    )
    mode, reason, message = choose_mode(state)
    if state.desired == 0:
        counts = {workload.revision: 0 for workload in old} | {state.revision: 0}
    else:
        counts = _shrink_old(state, old, mode) | {state.revision: _grow_new(state, old, mode)}
    empty = tuple(w.revision for w in old if w.wanted == 0 and not _pods_of(state, w.revision))
    finished = () if state.baking else empty
    return RoleCounts(
        by_revision={revision: count for revision, count in counts.items() if revision not in finished},
        finished=finished,
        rolling=bool(old) and len(finished) < len(old),
        mode=mode,
        reason=reason,
        message=message,
    )


def choose_mode(state: RoleInput) -> tuple[Mode, ConditionReason, str]:
    """Surge or Replace, with the reason; Auto surges while there is room for one more replica."""
    if state.strategy == "Surge":
        return (
            "Surge",
            ConditionReason.ROLLING_OUT,
            "strategy Surge: new replicas start before old ones leave",
        )
    if state.strategy == "Replace":
        return (
            "Replace",
            ConditionReason.ROLLING_OUT,
            "strategy Replace: old replicas leave before new ones start",
        )
    new = _pods_of(state, state.revision)
    stuck = next((pod for pod in new if _is_stuck(state, pod)), None)
    if stuck is not None:
        text = f"pod {stuck.name} finds no room, so old replicas leave first: {stuck.unschedulable_message}"
        return "Replace", ConditionReason.WAITING_FOR_CAPACITY, text
    refused = next((w for w in state.workloads if w.revision == state.revision and _is_refused(w, new)), None)
    if refused is not None:
        text = f"the namespace's quota is full, so old replicas leave first: {refused.failure_message}"
        return "Replace", ConditionReason.WAITING_FOR_CAPACITY, text
    surging = len(state.pods) > state.desired and any(pod.uid not in state.answering for pod in new)
    if state.fitting == 0 and not surging:
        text = "no node has room for one more replica, so one old replica leaves before its successor starts"
        return "Replace", ConditionReason.WAITING_FOR_CAPACITY, text
    return "Surge", ConditionReason.ROLLING_OUT, "new replicas start before old ones leave"


def _is_stuck(state: RoleInput, pod: Pod) -> bool:
    """Without room for longer than it may take to bring a node up."""
    waited = state.now - pod.created_at > state.patience_seconds
    return waited and not pod.scheduled and bool(pod.unschedulable_message)


def _is_refused(workload: Workload, pods: list[Pod]) -> bool:
    """Whether a replica is wanted that no pod object could be made for until another has left."""
    return len(pods) < workload.wanted and is_quota_full(workload.failure_message)


def _grow_new(state: RoleInput, old: list[Workload], mode: Mode) -> int:
    """Count of the current revision: as many as fit beside what is left of the others."""
    current = next((w.wanted for w in state.workloads if w.revision == state.revision), 0)
    leaving = sum(max(w.wanted, len(_pods_of(state, w.revision))) for w in old)
    # So do pods that no count above includes: those of a Deployment that is gone already, and leaving ones of the
    # current revision (it may have been the old one a moment ago).
    known = {w.revision for w in old}
    leaving += sum(1 for pod in state.pods if pod.revision not in known and _is_extra(pod, state.revision))
    room = state.desired - leaving + (_compute_surge(state) if mode == "Surge" else 0)
    return max(min(current, state.desired), min(state.desired, max(room, 0)))


def _is_extra(pod: Pod, current: str) -> bool:
    return pod.deleting or pod.revision != current


def _compute_surge(state: RoleInput) -> int:
    wanted = max(1, state.desired * state.surge_percent // 100)
    return wanted if state.fitting is None else max(1, min(wanted, state.fitting))


def _shrink_old(state: RoleInput, old: list[Workload], mode: Mode) -> dict[str, int]:
    """Counts of the other revisions, oldest first."""
    tolerated = max(1, state.max_unavailable) if mode == "Replace" else state.max_unavailable
    standing = old if state.baking else state.workloads
    answering = sum(_count_surviving(state, w, answering_only=True) for w in standing)
    budget = max(0, answering - max(0, state.desired - tolerated))
    counts = {}
    for workload in old:
        ready = _count_surviving(state, workload, answering_only=False)
        taken = min(ready, budget)
        budget -= min(taken, _count_surviving(state, workload, answering_only=True))
        counts[workload.revision] = ready - taken
    return counts


def _count_surviving(state: RoleInput, workload: Workload, *, answering_only: bool) -> int:
    """Ready pods that stay when the Deployment reaches its count: the controller removes unready ones first."""
    pods = [pod for pod in _pods_of(state, workload.revision) if pod.serving]
    if answering_only:
        pods = [pod for pod in pods if pod.uid in state.answering]
    return min(len(pods), workload.wanted)


def _pods_of(state: RoleInput, revision: str) -> list[Pod]:
    return [pod for pod in state.pods if pod.revision == revision]
