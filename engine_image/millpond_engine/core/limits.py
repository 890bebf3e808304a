"""What a request may have: refused at once if never, held at the gate while its tenant or class has its share."""

from __future__ import annotations

from millpond_engine.core.blocks import count_blocks
from millpond_engine.core.sequence import Group
from millpond_engine.core.state import State
from millpond_engine.records.capacity import Capacity
from millpond_engine.records.request import Refusal, RefusalReason, Request, WaitReason
from millpond_engine.records.settings import ClassRule, SchedulerSettings


def count_group_blocks(request: Request, settings: SchedulerSettings, capacity: Capacity) -> int:
    """Most blocks a request needs at once to make progress to its end.

    The KV of the last token is never stored. Samples can run one after the other; the beams of a
    search run together, share the whole blocks of the prompt, and need a spare block each for copies.
    """
    size = capacity.block_tokens
    prompt = len(request.prompt)
    one = count_blocks(prompt + max(request.stop.max_tokens - 1, 0), size)
    if request.beam is None:
        return one
    shared = (prompt - 1) // size if settings.prefix_cache else 0
    return shared + request.beam.width * (one - shared + 1)


def compute_class_limit(settings: SchedulerSettings, rule: ClassRule, num_blocks: int) -> int:
    """Blocks that requests of a class may ever use together: its share, less what others have reserved."""
    reserved = sum(other.reserved_percent for other in settings.classes if other.name != rule.name)
    return num_blocks * min(rule.max_share_percent, 100 - min(reserved, 100)) // 100


def check_request(
    request: Request, rule: ClassRule, settings: SchedulerSettings, capacity: Capacity
) -> Refusal | None:
    """Refuse what could never run, whatever the load."""
    message = _find_invalid(request, settings, capacity)
    if message:
        return Refusal(request.request_id, RefusalReason.INVALID_VALUE, message)
    prompt, limit = len(request.prompt), request.stop.max_tokens
    if prompt + limit > capacity.max_model_tokens:
        message = f"{prompt} prompt tokens and {limit} output tokens exceed the context of {capacity.max_model_tokens}"
        return Refusal(request.request_id, RefusalReason.CONTEXT_LENGTH_EXCEEDED, message)
    needed = count_group_blocks(request, settings, capacity)
    allowed = compute_class_limit(settings, rule, capacity.num_blocks)
    if needed > allowed:
        size = capacity.block_tokens
        message = (
            f"the request may need {needed} blocks of {size} tokens ({prompt} prompt tokens, {limit} output tokens), "
            f"class {rule.name} can have {allowed} ({allowed * size} tokens); shorten the prompt or lower max_tokens"
        )
        return Refusal(request.request_id, RefusalReason.KV_CAPACITY_EXCEEDED, message)
    return None


def _find_invalid(request: Request, settings: SchedulerSettings, capacity: Capacity) -> str:
    """What is wrong with the values, or nothing."""
    beam = request.beam
    if not request.prompt:
        return "the prompt has no tokens"
    if not 0 <= min(request.prompt) <= max(request.prompt) < capacity.vocabulary_size:
        return f"prompt tokens must be in 0 .. {capacity.vocabulary_size - 1}"
    if request.stop.max_tokens < 0 or request.stop.min_tokens < 0:
        return "max_tokens and min_tokens must not be negative"
    if request.n < 1 or request.best_of < 1:
        return "n and best_of must be at least 1"
    if beam is not None and not request.n <= beam.width <= settings.max_sequences:
        return f"a beam search needs n <= width <= {settings.max_sequences} (maxSequences)"
    if beam is not None and request.grammar is not None:
        return "a beam search cannot follow a grammar"
    if request.stop.max_tokens == 0 and (beam is not None or max(request.n, request.best_of) > 1):
        return "with max_tokens 0 there is nothing to sample more than once"
    return ""


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
