"""Everything the conditions are judged from: the snapshot and what was decided about it."""

from __future__ import annotations

from dataclasses import dataclass

from millpond_operator.api.pool import InferencePool
from millpond_operator.plan.actions import Apply
from millpond_operator.plan.children import ChildrenPlan
from millpond_operator.plan.problems import Problem, find_problems
from millpond_operator.plan.scale import ReplicaDecision
from millpond_operator.plan.settings import PlanSettings
from millpond_operator.plan.snapshot import Pod, PoolSnapshot
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
    def answering_current(self) -> tuple[Pod, ...]:
        """Replicas of current revisions that answer."""
        return tuple(pod for role in self.roles for pod in role.current_pods if pod.uid in role.answering)

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
            for problem in find_problems(role.current_pods, self.snapshot.capacity, describe_asked(role))
        )

    @property
    def pending_applies(self) -> tuple[Apply, ...]:
        """Children that are being made or corrected."""
        own = tuple(action for role in self.roles for action in role.actions if isinstance(action, Apply))
        return own + self.children.applies

    @property
    def foreign(self) -> tuple[str, ...]:
        """Names taken by objects of others."""
        return self.children.foreign + tuple(name for role in self.roles for name in role.foreign)


def describe_asked(role: RolePlan) -> str:
    """What one replica asks for, as in "nvidia.com/gpu 1, memory 4Gi"."""
    resources = role.role.resources
    asked = {**resources.limits, **resources.requests}
    return ", ".join(f"{name} {amount}" for name, amount in asked.items()) or "nothing"
