"""What is known of the current model's size: kept in the status, told by a fetch step, or by a pool beside this one."""

from __future__ import annotations

from dataclasses import dataclass

from millpond_common.contract import labels
from millpond_common.contract.model_facts import ModelFacts, read_termination
from millpond_common.contract.reasons import ConditionReason
from millpond_operator.api.pool import RoleView, list_roles
from millpond_operator.api.status import Judgement, ModelStatus
from millpond_operator.desired.engine_config import has_gpu
from millpond_operator.desired.model import make_files_digest
from millpond_operator.desired.revision import compute_revision
from millpond_operator.plan.fit import judge_fit, keep_judgement, merge_fits
from millpond_operator.plan.snapshot import Pod, PoolSnapshot

TELLING = (labels.FETCH_CONTAINER, labels.INSPECT_CONTAINER)
"""Init containers that tell the size of the base model when they end."""


@dataclass(frozen=True, slots=True)
class FitView:
    """The model's size and what it means for each role."""

    model: ModelStatus | None
    judgement: Judgement
    refused: frozenset[str]
    """Roles whose current revision cannot run."""


def find_model(snapshot: PoolSnapshot, current_pods: tuple[Pod, ...]) -> ModelStatus | None:
    """The size of the model the spec names now; None while nobody has told.

    The end of a fetch is exact; its beginning, and what another pool with the same files knows, come next.

    Args:
        snapshot: the pool with what was announced.
        current_pods: pods of current revisions; others may hold another model.
    """
    files = make_files_digest(snapshot.pool)
    told = (read_pod(pod) for pod in current_pods)
    exact = next((facts for facts in told if facts is not None), None)
    if exact is not None:
        return make_status(files, exact)
    kept = snapshot.pool.status.model
    if kept is not None and kept.files == files:
        return kept
    early = (snapshot.announced.get(pod.uid) for pod in current_pods)
    facts = next((facts for facts in early if facts is not None), None)
    if facts is not None:
        return make_status(files, facts)
    return next((model for model in snapshot.sibling_models if model.files == files), None)


def read_pod(pod: Pod) -> ModelFacts | None:
    """What the fetch step of a pod left when it ended well."""
    done = (c for c in pod.containers if c.name in TELLING and c.exit_code == 0)
    return next((facts for c in done if (facts := read_termination(c.exit_message)) is not None), None)


def make_status(files: str, facts: ModelFacts) -> ModelStatus:
    """The form that is kept."""
    return ModelStatus(
        files=files,
        num_parameters=facts.num_parameters,
        dtype=facts.dtype,
        num_layers=facts.num_layers,
        num_kv_heads=facts.num_kv_heads,
        head_dim=facts.head_dim,
        max_model_tokens=facts.max_model_tokens,
    )


def judge_fits(snapshot: PoolSnapshot) -> FitView:
    """Judge every role of the pool with what is known."""
    pool = snapshot.pool
    current = {role.role: _list_current(snapshot, role) for role in list_roles(pool)}
    model = find_model(snapshot, tuple(pod for pods in current.values() for pod in pods))
    facts = model.to_facts() if model is not None else None
    fits: dict[str, Judgement] = {}
    for role in list_roles(pool):
        memory = (snapshot.device_memory or {}).get(role.role)
        found = judge_fit(pool, role, facts, memory)
        found = keep_judgement(pool, found, looked=snapshot.device_memory is not None)
        loaded = any(pod.ready for pod in current[role.role])
        fits[role.role] = _prove(found) if loaded and not found.status else found
    refused = frozenset(name for name, found in fits.items() if found.status is False)
    return FitView(model, merge_fits(fits), refused)


def needs_device_memory(snapshot: PoolSnapshot) -> bool:
    """Whether the size is known and a role asks for accelerators, so that a look at the nodes is worth its calls."""
    roles = [r for r in list_roles(snapshot.pool) if has_gpu(r.resources)]
    pods = tuple(pod for role in roles for pod in _list_current(snapshot, role))
    return bool(roles) and find_model(snapshot, pods) is not None


def _list_current(snapshot: PoolSnapshot, role: RoleView) -> tuple[Pod, ...]:
    revision, label = compute_revision(snapshot.pool, role), role.role.lower()
    return tuple(p for p in snapshot.pods if p.revision == revision and p.role == label and not p.deleting)


def _prove(found: Judgement) -> Judgement:
    """A replica that has loaded the model says more than any estimate."""
    text = f"a replica of this revision has loaded it ({found.message})"
    return Judgement(found.type, True, ConditionReason.MODEL_FITS, text)
