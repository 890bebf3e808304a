"""Everything the conditions are judged from: the snapshot and what was decided about it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from millpond_operator.api.pool import InferencePool
from millpond_operator.desired.names import make_workload_name
from millpond_operator.plan.actions import Apply
from millpond_operator.plan.children import ChildrenPlan
from millpond_operator.plan.known_model import FitView
from millpond_operator.plan.problems import Problem, find_problems
from millpond_operator.plan.scale import ReplicaDecision
from millpond_operator.plan.settings import PlanSettings
from millpond_operator.plan.snapshot import ClaimNeed, Pod, PoolSnapshot
from millpond_operator.plan.workloads import RolePlan


@dataclass(frozen=True, slots=True)
class Facts:
    """Input of every check."""

    snapshot: PoolSnapshot
    roles: tuple[RolePlan, ...]
    decisions: tuple[ReplicaDecision, ...]
    children: ChildrenPlan
    settings: PlanSettings
    now: float
    fit: FitView | None = None
    """What is known of the model's size and memory; None for a pool that is leaving or not served."""

    @property
    def pool(self) -> InferencePool:
        """The pool."""
        return self.snapshot.pool

    @property
    def desired(self) -> int:
        """Replicas wanted, all roles together."""
        return sum(role.desired for role in self.roles)

    @property
    def current_pods(self) -> tuple[Pod, ...]:
        """Pods of current revisions that are not leaving."""
        return tuple(pod for role in self.roles for pod in role.current_pods)

    @property
    def rolling(self) -> bool:
        """Replicas of other revisions exist."""
        return any(role.counts.rolling for role in self.roles)

    @property
    def problems(self) -> tuple[Problem, ...]:
        """What is wrong with replicas of current revisions, the most telling first."""
        return tuple(
            problem
            for role in self.roles
            for problem in find_problems(
                role.current_pods,
                self.snapshot.capacity,
                describe_asked(role, self.snapshot.claim_needs),
                now=self.now,
            )
        )

    @property
    def pending_applies(self) -> tuple[Apply, ...]:
        """Children that are being made or corrected."""
        own = tuple(action for role in self.roles for action in role.actions if isinstance(action, Apply))
        return own + self.children.applies

    @property
    def rejected_records(self) -> set[str]:
        """Names of the records that hold a gate's verdict on what the spec asks for."""
        name = self.pool.metadata.name
        return {
            make_workload_name(name, role.role.role.lower(), role.wanted_revision)
            for role in self.roles
            if role.rejection is not None
        }

    @property
    def foreign(self) -> tuple[str, ...]:
        """Names taken by objects of others."""
        return self.children.foreign + tuple(name for role in self.roles for name in role.foreign)

    @property
    def leftovers(self) -> tuple[str, ...]:
        """Names still held by objects of an earlier pool of this name."""
        return self.children.leftovers + tuple(name for role in self.roles for name in role.leftovers)


def describe_asked(role: RolePlan, needs: Mapping[str, ClaimNeed]) -> str:
    """What one replica asks for, as in "nvidia.com/gpu 1, memory 4Gi" or "devices of class gpu.example.com 2"."""
    resources = role.role.resources
    asked = {**resources.limits, **resources.requests}
    parts = [f"{name} {amount}" for name, amount in asked.items()]
    need = needs.get(role.role.role)
    if need is not None:
        parts.append(f"devices of class {need.class_name} {need.num_devices}")
    elif resources.claims:
        parts.append("devices of claims " + ", ".join(claim.name for claim in resources.claims))
    return ", ".join(parts) or "nothing"
