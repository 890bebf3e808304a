"""Gates between queue and batch that are not about free blocks: tenant caps, class gates, class shares."""

from __future__ import annotations

from millpond_engine.core.blocks import count_blocks
from millpond_engine.core.limits import compute_class_limit
from millpond_engine.core.sequence import Group
from millpond_engine.core.settings import ClassRule
from millpond_engine.core.state import State
from millpond_engine.records.request import WaitReason


def check_gates(state: State, group: Group) -> WaitReason | None:
    """Why a waiting request may not enter the batch whatever the room, or None."""
    if group.running:
        return None
    tenant = group.request.tenant
    cap = state.get_tenant(tenant).max_concurrency
    if cap is not None and state.count_running(tenant) >= cap:
        return WaitReason.TENANT_CAP
    rule = group.rule
    if rule.gate_class is not None and state.queue.num_by_class.get(rule.gate_class, 0) >= rule.gate_below:
        return WaitReason.CLASS_GATE
    return None if _within_share(state, group, rule) else WaitReason.CAPACITY


def _within_share(state: State, group: Group, rule: ClassRule) -> bool:
    """Whether the class stays within its share, and leaves other classes what they reserved."""
    limit = state.capacity.num_blocks
    own_limit = compute_class_limit(state.settings, rule, limit)
    if own_limit == limit:
        return True
    used: dict[str, int] = {}
    for sequence in state.running:
        name = sequence.group.rule.name
        used[name] = used.get(name, 0) + max(0, len(sequence.table) - sequence.shared)
    needed = count_blocks(len(group.request.prompt) + 1, state.capacity.block_tokens)
    if used.get(rule.name, 0) + needed > limit * rule.max_share_percent // 100 and used.get(rule.name):
        return False
    reserved = sum(
        max(0, limit * other.reserved_percent // 100 - used.get(other.name, 0))
        for other in state.settings.classes
        if other.name != rule.name
    )
    return needed <= limit - sum(used.values()) - reserved or not used
