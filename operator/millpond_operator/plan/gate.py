"""The gate of a rollout: what gateways counted of the new revision, against what it must keep.

Under a gate old replicas stay until a replica of the new revision has answered for `bakeSeconds`. What is above a limit
until the last old replica has left turns the rollout round: the verdict, with its numbers, goes into annotations of the
new revision's record, so every later operator knows it, and the pool goes back to the revision named there. It counts
as long as the spec asks for the same revision under the same gate.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from millpond_common.contract import labels
from millpond_common.contract.gateway_report import RevisionReport
from millpond_operator.api.spec import GateSpec
from millpond_operator.desired.kinds import CONFIG_MAP
from millpond_operator.desired.names import make_workload_name
from millpond_operator.plan.snapshot import GatewayView, Pod, PoolSnapshot, Workload

MIN_TIMED_REQUESTS = 20
"""Below it one slow request would be the 95th percentile."""
MIN_REQUESTS = 10
"""Below it one failed request would be a tenth."""
TTFT_SHARE = 0.95


@dataclass(frozen=True, slots=True)
class Measured:
    """What all gateways counted of one revision."""

    num_requests: int = 0
    num_failed: int = 0
    num_timed: int = 0
    ttft_milliseconds: int | None = None
    """95th percentile, at most a tenth too high; None without a request."""


@dataclass(frozen=True, slots=True)
class Rejection:
    """A verdict that stands."""

    message: str
    fallback: str
    """Revision the pool went back to."""


@dataclass(frozen=True, slots=True)
class Trial:
    """What a gate means for the counts of one role."""

    revision: str
    """The revision to bring up: the wanted one, or the one before when it was rejected."""
    baking: bool = False
    """Old replicas stay, and new ones do not stand for them yet."""
    rejection: Rejection | None = None
    verdict: Mapping[str, str] | None = None
    """Annotations that reject the wanted revision from now on."""


def judge_trial(
    snapshot: PoolSnapshot,
    wanted: str,
    workloads: tuple[Workload, ...],
    *,
    role: str,
    desired: int,
    answering: frozenset[str],
) -> Trial:
    """Judge the wanted revision of a role by what runs and what gateways counted.

    Deployments of other revisions stay until the trial is over, empty ones too: they tell that there is one, and what to
    go back to. Without a wanted replica there is nothing to measure.

    Args:
        snapshot: the pool.
        wanted: revision the spec asks for.
        workloads: the role's Deployments that stay.
        role: in lower case.
        desired: replicas.
        answering: UIDs of replicas that answer.
    """
    gate, name = snapshot.pool.spec.rollout.gate, snapshot.pool.metadata.name
    if gate is None or snapshot.gateway is None:
        return Trial(wanted)
    rejection = find_rejection(snapshot, make_workload_name(name, role, wanted), gate)
    if rejection is not None and _is_kept(snapshot, role, rejection.fallback):
        return Trial(rejection.fallback, rejection=rejection)
    old = [w for w in workloads if w.revision != wanted]
    if not old or desired == 0:
        return Trial(wanted)
    breach = find_breach(gate, measure(snapshot.gateway, wanted))
    fallback = _choose_fallback(snapshot, role, old)
    if breach and fallback is not None:
        return Trial(wanted, baking=True, verdict=_make_verdict(gate, breach, fallback))
    proven = [p for p in snapshot.pods if p.uid in answering and p.revision == wanted and p.role == role]
    return Trial(wanted, baking=bool(breach) or not is_baked(gate, proven, snapshot.observed_at))


def measure(view: GatewayView, revision: str) -> Measured:
    """Add up what the gateways tell of a revision."""
    found = [entry for report in view.reports for entry in report.revisions if entry.revision == revision]
    timed, ttft = _find_percentile(found)
    return Measured(
        num_requests=sum(entry.num_requests for entry in found),
        num_failed=sum(entry.num_failed for entry in found),
        num_timed=timed,
        ttft_milliseconds=ttft,
    )


def _find_percentile(found: list[RevisionReport]) -> tuple[int, int | None]:
    counts: dict[int, int] = {}
    for bound, count in (pair for entry in found for pair in entry.ttft_counts):
        counts[bound] = counts.get(bound, 0) + count
    total = sum(counts.values())
    remaining = math.ceil(total * TTFT_SHARE)
    for bound in sorted(counts):
        remaining -= counts[bound]
        if remaining <= 0:
            return total, bound
    return 0, None


def find_breach(gate: GateSpec, measured: Measured) -> str:
    """What is above its limit, with the numbers; empty while nothing is, or while too few requests tell."""
    ttft, limit = measured.ttft_milliseconds, gate.ttft_milliseconds
    if limit is not None and ttft is not None and measured.num_timed >= MIN_TIMED_REQUESTS and ttft > limit:
        return (
            f"95th percentile of the time to the first token is {ttft} ms in {measured.num_timed} requests,"
            f" the gate allows {limit} ms"
        )
    if gate.error_percent is None or measured.num_requests < MIN_REQUESTS:
        return ""
    if measured.num_failed * 100 <= gate.error_percent * measured.num_requests:
        return ""
    percent = 100 * measured.num_failed / measured.num_requests
    return (
        f"{measured.num_failed} of {measured.num_requests} requests failed ({percent:.1f} %),"
        f" the gate allows {gate.error_percent} %"
    )


def is_baked(gate: GateSpec, answering: list[Pod], now: float) -> bool:
    """Whether a replica of the new revision has answered for as long as the gate wants."""
    since = min((pod.ready_since for pod in answering if pod.ready_since is not None), default=None)
    return since is not None and now - since >= gate.bake_seconds


def find_rejection(snapshot: PoolSnapshot, record: str, gate: GateSpec) -> Rejection | None:
    """The verdict on a revision's record, unless it was spoken under another gate."""
    live = snapshot.find_child(CONFIG_MAP, record)
    notes = {} if live is None else live.body["metadata"].get("annotations") or {}
    if notes.get(labels.REJECTED_BY) != describe_gate(gate) or not notes.get(labels.FALLBACK_REVISION):
        return None
    return Rejection(str(notes.get(labels.REJECTED) or ""), str(notes[labels.FALLBACK_REVISION]))


def describe_gate(gate: GateSpec) -> str:
    """The limits in one line: with others the revision is tried again."""
    return f"ttftMilliseconds={gate.ttft_milliseconds} errorPercent={gate.error_percent}"


def _make_verdict(gate: GateSpec, breach: str, fallback: str) -> dict[str, str]:
    return {
        labels.REJECTED: breach,
        labels.REJECTED_BY: describe_gate(gate),
        labels.FALLBACK_REVISION: fallback,
    }


def _choose_fallback(snapshot: PoolSnapshot, role: str, old: list[Workload]) -> str | None:
    """The youngest of the old revisions that can be made again, one that still serves before one that does not."""
    kept = [workload for workload in old if _is_kept(snapshot, role, workload.revision)]
    ranked = sorted(kept, key=lambda workload: (workload.wanted > 0, workload.created_at, workload.name))
    return ranked[-1].revision if ranked else None


def _is_kept(snapshot: PoolSnapshot, role: str, revision: str) -> bool:
    """Whether the revision's record is there, and no gate's verdict is on it."""
    name = make_workload_name(snapshot.pool.metadata.name, role, revision)
    live = snapshot.find_child(CONFIG_MAP, name)
    notes = {} if live is None else live.body["metadata"].get("annotations") or {}
    return live is not None and labels.REJECTED_BY not in notes
