"""The invariants of the scheduler's state, each stated once; linear, for tests and the leak metric."""

from __future__ import annotations

from collections import Counter

from millpond_engine.core.blocks import FREE
from millpond_engine.core.sequence import NO_ROW
from millpond_engine.core.state import State


def check_state(state: State) -> None:
    """Assert all of them.

    Raises:
        AssertionError: naming the block, row or request that is wrong.
    """
    _check_counts(state)
    _check_tree(state)
    _check_host(state)
    _check_rows(state)
    _check_requests(state)


def _check_counts(state: State) -> None:
    """Free + cached + used = total, and a block's count is its table entries plus its leases."""
    pool = state.cache.pool
    references = Counter(block for sequence in state.running for block in sequence.table)
    references.update(state.cache.list_leases())
    for block, count in enumerate(pool.counts):
        assert count == references[block], f"block {block}: count {count}, but {references[block]} references"
    lists = [pool.walk(number) for number in range(len(pool.sizes))]
    assert [len(blocks) for blocks in lists] == pool.sizes, "a list's length differs from its count"
    unused = [block for blocks in lists for block in blocks]
    assert len(unused) == len(set(unused)), "a block hangs in two lists"
    assert all(pool.counts[block] == 0 for block in unused), "a used block hangs in a list"
    assert len(unused) + pool.num_used == pool.num_blocks, "free + cached + used is not the total"
    assert pool.num_used == sum(1 for count in pool.counts if count), "a block is nowhere"
    assert all(not pool.has_content(block) for block in lists[FREE]), "a free block is findable"
    assert sum(pool.sizes[1:]) == pool.num_cached == sum(pool.cached_by)
    assert pool.num_used == sum(pool.used_by)


def _check_tree(state: State) -> None:
    """Tree and pool agree on what is findable, and nothing used hangs below something unused."""
    pool, cache = state.cache.pool, state.cache
    pairs = cache.tree.walk()
    findable = {block for block, _ in pairs}
    assert len(findable) == len(pairs), "a block is twice in the tree"
    assert findable == {block for block in range(pool.num_blocks) if pool.has_content(block)}
    for block, parent in pairs:
        assert not pool.counts[block] or parent is None or pool.counts[parent], (
            f"block {block} is used below an unused one"
        )
    for sequence in state.running:
        tokens, size = sequence.tokens, cache.block_tokens
        run = tokens[: sequence.published * size].tobytes()
        path = cache.tree.lookup(sequence.group.request.namespace, run)
        assert path == sequence.table[: sequence.published], (
            f"the path of row {sequence.row} is not its table"
        )


def _check_host(state: State) -> None:
    held = [block for group in state.groups.values() for block in group.host_blocks]
    everything = sorted(held + state.host.list_unused())
    assert everything == list(range(state.host.num_blocks)), "a host block is lost or held twice"


def _check_rows(state: State) -> None:
    rows = list(state.free_rows)
    for group in state.groups.values():
        rows += group.spare_rows
        rows += [sequence.row for sequence in group.running]
    assert sorted(rows) == list(range(state.settings.max_sequences)), "a row is lost or held twice"


def _check_requests(state: State) -> None:
    for group in state.groups.values():
        assert not group.finished, f"request {group.request.request_id} has nothing left to run"
        assert (group in state.queue) == group.is_waiting(), (
            f"request {group.request.request_id} is misplaced in the queue"
        )
        assert all(s in state.running and s.row != NO_ROW for s in group.running)
        assert all(s not in state.running and s.row == NO_ROW and not s.table for s in group.waiting)
        for sequence in group.running:
            assert len(sequence.table) * state.capacity.block_tokens >= sequence.computed
            assert sequence.computed <= sequence.num_tokens
    assert len(state.running) == sum(len(group.running) for group in state.groups.values())
    assert all(group.request.request_id in state.groups for group in state.queue)
