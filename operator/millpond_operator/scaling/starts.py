"""How long a replica takes to start, by kind of node: what is measured, kept and shared between pools of one model."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from millpond_operator.scaling.learn import compute_horizon

MAX_STARTS = 32
"""Start times kept; older ones say little about today's nodes and images."""
ENOUGH_STARTS = 5
"""A pool that has measured this many on a kind of node needs nobody else's."""
MAX_KINDS = 8
"""Kinds that a pool's status keeps."""
KIND_LABELS = ("node.kubernetes.io/instance-type", "nvidia.com/gpu.product", "amd.com/gpu.product-name")
ARCHITECTURE_LABEL = "kubernetes.io/arch"


@dataclass(frozen=True, slots=True)
class Start:
    """One start of a replica."""

    node_kind: str
    """Empty where the operator may not see nodes: then all of them are one kind."""
    seconds: float
    """From its creation to its being ready: node, image, model and all."""


@dataclass(frozen=True, slots=True)
class StartSummary:
    """What is known of one kind of node."""

    node_kind: str
    seconds: float
    """90th percentile."""
    num_starts: int


def name_node_kind(labels: Mapping[str, str]) -> str:
    """Instance type and GPU product where the node says them, else its architecture."""
    known = [labels[name] for name in KIND_LABELS if labels.get(name)]
    return "/".join(known) or labels.get(ARCHITECTURE_LABEL, "")


def find_horizon(own: Sequence[Start], others: Sequence[Start], kinds: Collection[str]) -> float:
    """Time to count on for the next start: the slowest of the kinds of node that replicas run on.

    Args:
        own: starts of this pool, oldest first.
        others: starts of other pools that serve the same model.
        kinds: of the nodes that replicas run on now; where none does, that of the last start counts.
    """
    return max(compute_horizon(_pick(own, others, kind)) for kind in _find_kinds(own, others, kinds))


def find_start_seconds(own: Sequence[Start], others: Sequence[Start], kinds: Collection[str]) -> float | None:
    """The same from what was measured alone; None until a replica of the model has started."""
    found = [_find_p90(_pick(own, others, kind)) for kind in _find_kinds(own, others, kinds)]
    return max((seconds for seconds in found if seconds is not None), default=None)


def summarise_starts(starts: Sequence[Start]) -> tuple[StartSummary, ...]:
    """One line per kind of node, those used last first; at most MAX_KINDS."""
    kinds = list(dict.fromkeys(start.node_kind for start in reversed(starts)))[:MAX_KINDS]
    made = []
    for kind in kinds:
        seconds = _pick(starts, (), kind)
        found = _find_p90(seconds)
        assert found is not None
        made.append(StartSummary(kind, found, len(seconds)))
    return tuple(made)


def recall_starts(summaries: Sequence[StartSummary]) -> tuple[Start, ...]:
    """As many starts as make the summary count as much as before, the kind used last at the end."""
    return tuple(
        Start(summary.node_kind, summary.seconds)
        for summary in reversed(summaries)
        for _ in range(min(summary.num_starts, ENOUGH_STARTS))
    )[-MAX_STARTS:]


def _find_kinds(own: Sequence[Start], others: Sequence[Start], kinds: Collection[str]) -> Collection[str]:
    measured = {start.node_kind for start in (*own, *others)}
    known = measured & set(kinds)
    if known:
        return known
    return {own[-1].node_kind} if own else {others[-1].node_kind} if others else {""}


def _pick(own: Sequence[Start], others: Sequence[Start], kind: str) -> list[float]:
    mine = [start.seconds for start in own if start.node_kind == kind]
    if len(mine) >= ENOUGH_STARTS:
        return mine
    return mine + [start.seconds for start in others if start.node_kind == kind]


def _find_p90(seconds: Sequence[float]) -> float | None:
    ordered = sorted(seconds)
    return ordered[min(len(ordered) * 9 // 10, len(ordered) - 1)] if ordered else None
