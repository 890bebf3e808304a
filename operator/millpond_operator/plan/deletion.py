"""A deleted pool: its replicas drain, then its finalizer goes, at the latest at a deadline.

Children then go with the garbage collector. The escape while no operator runs, told in the operator's README:
`kubectl patch mpool NAME --type=merge -p '{"metadata":{"finalizers":null}}'`.
"""

from __future__ import annotations

from millpond_common.contract.labels import FINALIZER
from millpond_operator.desired.children import make_owner
from millpond_operator.desired.kinds import DEPLOYMENT
from millpond_operator.desired.pod import GRACE_MARGIN_SECONDS
from millpond_operator.desired.workload import make_workload_manifest
from millpond_operator.plan.actions import STAGE_WORKLOADS, Action, Apply, Delete, SetFinalizer
from millpond_operator.plan.settings import PlanSettings
from millpond_operator.plan.snapshot import PoolSnapshot
from millpond_operator.plan.victims import mark_victims
from millpond_operator.plan.workloads import find_kept_record


def plan_deletion(snapshot: PoolSnapshot, settings: PlanSettings, now: float) -> tuple[Action, ...]:
    """Writes that bring a deleted pool to its end."""
    metadata = snapshot.pool.metadata
    if FINALIZER not in metadata.finalizers:
        return ()
    assert metadata.deletion_timestamp is not None
    allowed = snapshot.pool.spec.rollout.drain_seconds + GRACE_MARGIN_SECONDS + settings.delete_margin_seconds
    overdue = now > metadata.deletion_timestamp.timestamp() + allowed
    empty = not snapshot.pods and all(workload.wanted == 0 for workload in snapshot.workloads)
    if empty or overdue:
        return (SetFinalizer(present=False),)
    present = [pod for pod in snapshot.pods if not pod.deleting]
    return (*mark_victims(present, present), *_scale_to_zero(snapshot))


def _scale_to_zero(snapshot: PoolSnapshot) -> list[Action]:
    actions: list[Action] = []
    for workload in snapshot.workloads:
        if workload.wanted == 0 or workload.deleting:
            continue
        record = find_kept_record(snapshot, workload.role, workload.revision)
        if record is None:
            # Without its record the Deployment cannot be applied; deleting it drains its pods just as well.
            actions.append(Delete(DEPLOYMENT, workload.name, workload.uid, "the pool is being deleted"))
        else:
            manifest = make_workload_manifest(make_owner(snapshot.pool), record, replicas=0)
            actions.append(Apply(manifest, STAGE_WORKLOADS, uid=workload.uid))
    return actions
