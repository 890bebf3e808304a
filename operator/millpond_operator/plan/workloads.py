"""Writes to the engine Deployments of one role: records first, then counts, with the victims named before."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from millpond_common.contract import labels
from millpond_common.contract.reasons import ConditionReason
from millpond_operator.api.pool import RoleView
from millpond_operator.api.spec import GateSpec
from millpond_operator.desired.children import make_owner
from millpond_operator.desired.kinds import CONFIG_MAP, DEPLOYMENT
from millpond_operator.desired.names import make_workload_name
from millpond_operator.desired.revision import compute_revision
from millpond_operator.desired.workload import (
    RevisionRecord,
    make_record,
    make_record_manifest,
    make_workload_manifest,
    parse_record,
)
from millpond_operator.plan.actions import STAGE_FIRST, STAGE_WORKLOADS, Action, Apply, Delete, EventNote
from millpond_operator.plan.answering import list_answering
from millpond_operator.plan.children import describe_foreign, describe_leftover, is_leftover, is_ours
from millpond_operator.plan.drift import has_drifted
from millpond_operator.plan.gate import Rejection, Trial, judge_trial
from millpond_operator.plan.rollout import RoleCounts, RoleInput, plan_counts
from millpond_operator.plan.scale import ReplicaDecision
from millpond_operator.plan.settings import PlanSettings
from millpond_operator.plan.snapshot import Child, Pod, PoolSnapshot, Workload
from millpond_operator.plan.victims import choose_victims, mark_victims


@dataclass(frozen=True, slots=True)
class RolePlan:
    """What happens to one role, and what was seen of it."""

    role: RoleView
    revision: str
    desired: int
    counts: RoleCounts
    pods: tuple[Pod, ...]
    answering: frozenset[str]
    actions: tuple[Action, ...]
    events: tuple[EventNote, ...]
    foreign: tuple[str, ...]
    """Names taken by objects of others."""
    leftovers: tuple[str, ...]
    """Names still held by objects of an earlier pool of this name."""
    record: RevisionRecord
    rejection: Rejection | None = None
    """Why the revision the spec asks for is not the one above."""
    wanted_revision: str = ""
    """The one the spec asks for."""

    @property
    def current_pods(self) -> tuple[Pod, ...]:
        """Pods of the current revision that are not leaving."""
        return tuple(pod for pod in self.pods if pod.revision == self.revision and not pod.deleting)


def plan_role(
    snapshot: PoolSnapshot,
    role: RoleView,
    decision: ReplicaDecision,
    settings: PlanSettings,
    *,
    refused: bool = False,
) -> RolePlan:
    """Decide counts and writes of one role; with `refused` its current revision gets no replica and others stay."""
    desired = decision.replicas
    label, wanted = role.role.lower(), compute_revision(snapshot.pool, role)
    workloads = tuple(w for w in snapshot.workloads if w.role == label and not w.deleting)
    pods = tuple(pod for pod in snapshot.pods if pod.role == label)
    answering = list_answering(snapshot, pods, current=wanted)
    trial = judge_trial(snapshot, wanted, workloads, role=label, desired=desired, answering=answering)
    revision = trial.revision
    if revision != wanted:
        answering = list_answering(snapshot, pods, current=revision)
    rollout = snapshot.pool.spec.rollout
    capacity = snapshot.capacity
    counts = plan_counts(
        RoleInput(
            revision=revision,
            desired=desired,
            workloads=workloads,
            # A pod on a node that was lost would hold a rollout for as long as nobody removes the node.
            pods=tuple(pod for pod in pods if not pod.is_lost(snapshot.observed_at)),
            answering=answering,
            strategy=rollout.strategy,
            max_unavailable=rollout.max_unavailable,
            surge_percent=settings.surge_percent,
            fitting=capacity.fitting_replicas.get(label) if capacity is not None else None,
            now=snapshot.observed_at,
            patience_seconds=settings.unschedulable_patience_seconds,
            baking=trial.baking,
        )
    )
    counts = _explain_trial(counts, trial, rollout.gate, wanted)
    if refused:
        counts = hold_back(counts, wanted, workloads, desired)
    record = find_record(snapshot, role, revision, settings)
    writes = _Writes(snapshot, workloads, pods, counts, record, decision.cached_values)
    actions, events = writes.list_all()
    if trial.verdict is not None and not writes.blocked:
        actions = (_reject(snapshot, record, trial.verdict), *actions)
    return RolePlan(
        role,
        revision,
        desired,
        counts,
        pods,
        answering,
        actions,
        events,
        writes.list_foreign(),
        writes.list_leftovers(),
        record,
        rejection=trial.rejection,
        wanted_revision=wanted,
    )


def _explain_trial(counts: RoleCounts, trial: Trial, gate: GateSpec | None, wanted: str) -> RoleCounts:
    if not counts.rolling or gate is None:
        return counts
    if trial.rejection is not None:
        text = f"revision {wanted} leaves again: {trial.rejection.message}"
        return replace(counts, reason=ConditionReason.ROLLED_BACK, message=text)
    if trial.baking and counts.reason == ConditionReason.ROLLING_OUT:
        text = (
            f"new replicas are measured against rollout.gate for {gate.bake_seconds} s before old ones leave"
        )
        return replace(counts, reason=ConditionReason.BAKING, message=text)
    return counts


def _reject(snapshot: PoolSnapshot, record: RevisionRecord, verdict: Mapping[str, str]) -> Apply:
    """Write the gate's verdict beside the record it is about."""
    live = snapshot.find_child(CONFIG_MAP, record.name)
    manifest = make_record_manifest(make_owner(snapshot.pool), record, annotations=verdict)
    return Apply(manifest, STAGE_FIRST, uid=live.uid if live is not None else None)


def hold_back(counts: RoleCounts, refused: str, workloads: tuple[Workload, ...], desired: int) -> RoleCounts:
    """Counts that start nothing of a revision that cannot run; the one that serves in its place follows the wanted count."""
    others = [w for w in workloads if w.revision != refused]
    held = {w.revision: desired if len(others) == 1 else w.wanted for w in others}
    held |= {w.revision: 0 for w in workloads if w.revision == refused}
    return replace(counts, by_revision=held, finished=(), rolling=False)


def find_record(
    snapshot: PoolSnapshot, role: RoleView, revision: str, settings: PlanSettings
) -> RevisionRecord:
    """The revision as it was made first, or as it would be made now."""
    name, label = snapshot.pool.metadata.name, role.role.lower()
    kept = find_kept_record(snapshot, label, revision)
    assert kept is None or kept.name == make_workload_name(name, label, revision)
    return kept or make_record(snapshot.pool, role, settings.build)


def find_kept_record(snapshot: PoolSnapshot, role: str, revision: str) -> RevisionRecord | None:
    """The record of any revision, if the cluster still holds it."""
    pool = snapshot.pool.metadata.name
    live = snapshot.find_child(CONFIG_MAP, make_workload_name(pool, role, revision))
    if live is None or not is_ours(live, snapshot):
        return None
    return parse_record(live.body, pool=pool, role=role, revision=revision)


@dataclass(frozen=True, slots=True)
class _Writes:
    """Turns counts into writes."""

    snapshot: PoolSnapshot
    workloads: tuple[Workload, ...]
    pods: tuple[Pod, ...]
    counts: RoleCounts
    record: RevisionRecord
    cached_values: Mapping[str, float]

    @property
    def blocked(self) -> bool:
        """Whether somebody else has a name that the role needs."""
        return bool(self.list_foreign() or self.list_leftovers())

    def list_all(self) -> tuple[tuple[Action, ...], tuple[EventNote, ...]]:
        """Actions in the order they are safe in, and events; none while a name is taken."""
        owner = make_owner(self.snapshot.pool)
        record = make_record_manifest(owner, self.record)
        if self.blocked:
            return (), ()
        actions: list[Action] = []
        if self.snapshot.find_child(CONFIG_MAP, record.name) is None:
            actions.append(Apply(record, STAGE_FIRST, uid=None))
        actions += self._mark()
        actions += self._apply_counts()
        actions += self._drop_finished()
        return tuple(actions), tuple(self._list_events())

    def list_foreign(self) -> tuple[str, ...]:
        """Names taken by objects of others."""
        return tuple(describe_foreign(c) for c in self._list_taken() if not is_leftover(c, self.snapshot))

    def list_leftovers(self) -> tuple[str, ...]:
        """Names held by objects of an earlier pool of this name."""
        return tuple(describe_leftover(c) for c in self._list_taken() if is_leftover(c, self.snapshot))

    def _list_taken(self) -> list[Child]:
        found = (self.snapshot.find_child(kind, self.record.name) for kind in (CONFIG_MAP, DEPLOYMENT))
        return [child for child in found if child is not None and not is_ours(child, self.snapshot)]

    def _mark(self) -> list[Action]:
        marks: list[Action] = []
        for workload in self.workloads:
            pods = [pod for pod in self.pods if pod.revision == workload.revision]
            wanted = self.counts.by_revision.get(workload.revision, 0)
            present = sum(1 for pod in pods if not pod.deleting)
            victims = choose_victims(
                pods,
                present - wanted,
                self.snapshot.gateway,
                values=self.cached_values,
                zones=self.snapshot.zones,
            )
            marks += mark_victims(pods, victims)
        return marks

    def _apply_counts(self) -> list[Action]:
        applies: list[Action] = []
        for revision, count in self.counts.by_revision.items():
            kept = find_kept_record(self.snapshot, self.record.role, revision)
            record = self.record if revision == self.record.revision else kept
            if record is None:
                continue  # somebody deleted an old revision's record; its Deployment is finished by deletion below
            manifest = make_workload_manifest(make_owner(self.snapshot.pool), record, replicas=count)
            live = self.snapshot.find_child(DEPLOYMENT, manifest.name)
            if live is None or has_drifted(manifest, live):
                applies.append(Apply(manifest, STAGE_WORKLOADS, uid=live.uid if live is not None else None))
        return applies

    def _drop_finished(self) -> list[Action]:
        gone = set(self.counts.finished)
        for revision in self.counts.by_revision:
            kept = find_kept_record(self.snapshot, self.record.role, revision)
            if revision != self.record.revision and kept is None and self.counts.by_revision[revision] == 0:
                gone.add(revision)
        return [
            Delete(DEPLOYMENT, workload.name, workload.uid, "no replica of this revision is left")
            for workload in self.workloads
            if workload.revision in gone
        ]

    def _list_events(self) -> list[EventNote]:
        """Counts that somebody else wrote into a child, which are about to be put back."""
        name = self.snapshot.pool.metadata.name
        notes = []
        for workload in self.workloads:
            count = self.counts.by_revision.get(workload.revision, 0)
            stranger = workload.replicas_manager not in ("", labels.MANAGER)
            if stranger and workload.wanted != count:
                text = (
                    f"Deployment {workload.name} was set to {workload.wanted} replicas by"
                    f" {workload.replicas_manager}; set back to {count}, which the pool owns:"
                    f" use kubectl scale mpool/{name} --replicas=N instead"
                )
                notes.append(EventNote(True, ConditionReason.CONFLICT, "SetBackReplicas", text))
        return notes
