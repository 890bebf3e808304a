"""The KV cache: block pool and prefix tree joined, with the fences that keep a running step's blocks alive.

Content is published after the step that computed it has been read back, so a failed step leaves
nothing to hit. Eviction is lazy: a cached block keeps its content until the allocator needs it.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

from millpond_engine.core.blocks import SHARED, BlockPool
from millpond_engine.core.tree import Namespace, PrefixTree
from millpond_engine.records.capacity import Capacity
from millpond_engine.records.outputs import BlocksRemoved, BlocksStored, CacheCleared, CacheEvent, TokenView
from millpond_engine.records.settings import SchedulerSettings


class KvCache:
    """Blocks of the device: allocated, shared by prefix, fenced, evicted."""

    def __init__(
        self, settings: SchedulerSettings, capacity: Capacity, owners: Iterable[tuple[str, str]]
    ) -> None:
        limited = [rule for rule in settings.tenants if rule.max_cache_percent < 100]
        self.block_tokens = capacity.block_tokens
        lists = {rule.name: number for number, rule in enumerate(limited, SHARED + 1)}
        self.pool = BlockPool(capacity.num_blocks, [lists.get(tenant, SHARED) for _, tenant in owners])
        self.tree = PrefixTree(capacity.num_blocks, capacity.block_tokens)
        self.enabled = settings.prefix_cache
        self._record_events = settings.cache_events
        self._limits = [
            (lists[rule.name], capacity.num_blocks * rule.max_cache_percent // 100) for rule in limited
        ]
        """Tenants' own lists of cached blocks, and how many each may hold."""
        self._fences: dict[int, list[int]] = {}
        self._events: list[CacheEvent] = []
        self.num_evicted = 0

    def lookup(self, namespace: Namespace, tokens: bytes) -> list[int]:
        """Blocks that hold the longest known prefix of whole blocks; nothing is referenced yet."""
        return self.tree.lookup(namespace, tokens) if self.enabled else []

    def count_available_without(self, hit: Iterable[int]) -> int:
        """Blocks that can be allocated once `hit` is referenced."""
        counts = self.pool.counts
        return self.pool.num_available - sum(1 for block in hit if counts[block] == 0)

    def retain(self, blocks: Iterable[int]) -> None:
        """Add one table's references."""
        for block in blocks:
            self.pool.retain(block)

    def allocate(self, num_blocks: int, owner: int) -> list[int]:
        """Take blocks, evicting cached content as needed; the caller has checked what the pool has."""
        blocks: list[int] = []
        for _ in range(num_blocks):
            if not self.pool.num_free:
                self._evict()
            blocks.append(self.pool.take_free(owner))
        return blocks

    def release(self, blocks: Sequence[int], fence: int | None) -> None:
        """Give a table's references back, tail first; with a fence, only when that step has ended."""
        if fence is not None:
            self._fences.setdefault(fence, []).extend(reversed(blocks))
            return
        for block in reversed(blocks):
            self.pool.release(block)

    def end_step(self, step: int) -> None:
        """The step is over: what was fenced behind it is released."""
        for block in self._fences.pop(step, ()):
            self.pool.release(block)

    def count_fenced(self) -> int:
        """Blocks that come free when the steps in flight end."""
        counts = self.pool.counts
        return sum(1 for block in self.list_leases() if counts[block] == 1)

    def list_leases(self) -> list[int]:
        """One entry per reference held by a fence."""
        return [block for blocks in self._fences.values() for block in blocks]

    def publish(
        self,
        table: list[int],
        tokens: array[int],
        namespace: Namespace,
        span: tuple[int, int],
        fence: int | None,
    ) -> int:
        """Make blocks span[0] .. span[1] of a table findable; returns how many were exchanged.

        Where the tree already has blocks with these tokens, the table takes them and its own are
        given back (mini-sglang forgets to: its issue 142).
        """
        first, last = span
        size, pool = self.block_tokens, self.pool
        own = table[first:last]
        parent = table[first - 1] if first else None
        run = tokens[first * size : last * size]
        path = self.tree.insert(namespace, parent, first, run.tobytes(), own)
        num_known = len(own)
        while (
            num_known
            and path[num_known - 1] == own[num_known - 1]
            and not pool.has_content(own[num_known - 1])
        ):
            num_known -= 1
            pool.keep_content(own[num_known])
        if self._record_events and num_known < len(own):
            self._events.append(
                BlocksStored(
                    block_ids=tuple(own[num_known:]),
                    parent_block_id=path[num_known - 1] if num_known else parent,
                    tokens=tuple(run[num_known * size :]),
                    namespace=namespace,
                    prefix_tokens=TokenView(tokens, (first + num_known) * size),
                )
            )
        if path[:num_known] != own[:num_known]:
            self.retain(path[:num_known])
            table[first : first + num_known] = path[:num_known]
            self.release(own[:num_known], fence)
            return num_known
        return 0

    def clear(self) -> None:
        """Forget all cached content; blocks in tables stay where they are, but can no longer be found."""
        for block in self.tree.clear():
            self.pool.drop_content(block)
        if self._record_events:
            self._events.append(CacheCleared())

    def take_events(self) -> tuple[CacheEvent, ...]:
        """What happened since the last call, in order."""
        events, self._events = tuple(self._events), []
        return events

    def _evict(self) -> None:
        """Free the oldest cached block: of a tenant beyond its share if there is one, else of all."""
        sizes = self.pool.sizes
        over = next((number for number, share in self._limits if sizes[number] > share), None)
        victim = self.pool.oldest_of_all() if over is None else self.pool.oldest(over)
        removed = self.tree.remove(victim)
        for block in removed:
            assert self.pool.counts[block] == 0, f"block {block} is used behind an evictable one"
            self.pool.drop_content(block)
        self.num_evicted += len(removed)
        if self._record_events:
            reason = "Capacity" if over is None else "TenantShare"
            self._events.append(BlocksRemoved(tuple(removed), reason))
