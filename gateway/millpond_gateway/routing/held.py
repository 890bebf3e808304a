"""Second index layer: the blocks each replica said it holds, by KV events.

Per replica, tier and cache group one packed set of routing keys. Engines that publish routing keys are indexed
as they are; for others the tokens are hashed again and the engine's hash is mapped to the routing key. The device
tier has set semantics, so a block stored three times, or announced again on reuse, counts once; offload tiers
count stores per hash, since chunks may announce a shared one once each.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import xxhash

from millpond_common.contract.blockkey import SCHEME_VERSION, KeyScope, extend_block_keys
from millpond_gateway.routing.kvevents import Cleared, Event, Removed, Stored, Tier
from millpond_gateway.routing.packed import PackedMap, PackedSet, spread

TIER_CREDITS = {Tier.DEVICE: 1.0, Tier.HOST: 0.75, Tier.DISK: 0.25}
"""What a block of a tier is worth against recomputing it."""
_MAX_ROOTS = 1024
_MAX_BLOCKS = 1 << 23


class HeldMatch(NamedTuple):
    """Leading blocks of a prompt that a replica holds."""

    num_blocks: int
    """On the device."""
    credit_blocks: float
    """Blocks of all tiers by their worth; at least `num_blocks`."""


class Applied(NamedTuple):
    """What a list of events changed."""

    num_stored: int
    num_removed: int
    num_unindexed: int
    """Blocks that could not be keyed: unknown parent, unknown medium, or an image's."""


class _Group:
    """Blocks of one tier and cache group."""

    __slots__ = ("extra_counts", "keys", "window_blocks")

    def __init__(self, expected: int) -> None:
        self.keys = PackedSet(expected)
        self.extra_counts: dict[int, int] = {}
        self.window_blocks: int | None = None


class ReplicaBlocks:
    """What one replica holds."""

    def __init__(self, *, model: str, seed: int, num_blocks: int | None = None) -> None:
        self._model = model
        self._seed = seed
        self._num_blocks = num_blocks or 0
        self._groups: dict[tuple[Tier, int], _Group] = {}
        self._keys_by_hash = PackedMap()
        self._roots: dict[KeyScope, int] = {}
        self.overflowed = False
        """More blocks were announced than the engine can have: removals were missed, a snapshot is due."""

    @property
    def num_blocks(self) -> int:
        """Blocks on the device, the largest cache group's."""
        return max(
            (len(group.keys) for (tier, _), group in self._groups.items() if tier is Tier.DEVICE), default=0
        )

    @property
    def num_bytes(self) -> int:
        """Memory of the tables."""
        return self._keys_by_hash.num_bytes + sum(group.keys.num_bytes for group in self._groups.values())

    def clear(self) -> None:
        """Forget everything."""
        self._groups.clear()
        self._keys_by_hash.clear()
        self._roots.clear()
        self.overflowed = False

    def apply(self, events: Iterable[Event]) -> Applied:
        """Apply events in order."""
        num_stored = num_removed = num_unindexed = 0
        for event in events:
            if isinstance(event, Stored):
                stored = self._store(event)
                num_stored += stored
                num_unindexed += len(event.hashes) - stored
            elif isinstance(event, Removed):
                num_removed += self._remove(event)
            elif isinstance(event, Cleared):
                self.clear()
        return Applied(num_stored, num_removed, num_unindexed)

    def match(self, keys: Sequence[int]) -> HeldMatch:
        """Leading blocks of `keys` on the device, and by worth over all tiers."""
        device = self._match_tier(Tier.DEVICE, keys, 0)
        credit = float(device)
        position = device
        for tier in (Tier.HOST, Tier.DISK):
            end = self._match_tier(tier, keys, position)
            credit += (end - position) * TIER_CREDITS[tier]
            position = end
        return HeldMatch(device, credit)

    def _match_tier(self, tier: Tier, keys: Sequence[int], start: int) -> int:
        groups = [group for (of_tier, _), group in self._groups.items() if of_tier is tier]
        # engines drop a prefix's tail first, so presence is monotone
        whole = [group for group in groups if group.window_blocks is None]
        if not groups or start >= len(keys):
            return start
        end = min((group.keys.find_end(keys, start) for group in whole), default=len(keys))
        for group in groups:
            if group.window_blocks is not None:
                end = _match_window(group.keys, keys, start, end, group.window_blocks)
        return end

    def _store(self, event: Stored) -> int:
        if event.tier is Tier.UNKNOWN:
            return 0
        keys = self._find_keys(event)
        if keys is None:
            return 0
        group = self._find_group(event)
        if event.window_tokens is not None:
            group.window_blocks = max(math.ceil(event.window_tokens / event.block_tokens), 1)
        if len(group.keys) + len(keys) > self._max_blocks(event.tier):
            self.overflowed = True
            return 0
        counts = event.tier is not Tier.DEVICE and not event.reuse
        for key in keys:
            if not group.keys.add(key) and counts:
                group.extra_counts[key] = group.extra_counts.get(key, 0) + 1
        return len(keys)

    def _find_group(self, event: Stored) -> _Group:
        group = self._groups.get((event.tier, event.group))
        if group is None:
            expected = self._num_blocks if event.tier is Tier.DEVICE else 0
            group = self._groups[event.tier, event.group] = _Group(expected)
        return group

    def _max_blocks(self, tier: Tier) -> int:
        """Blocks past which removals must have been missed."""
        if tier is Tier.DEVICE and self._num_blocks:
            return self._num_blocks + self._num_blocks // 10 + 64
        return _MAX_BLOCKS

    def _remove(self, event: Removed) -> int:
        group = self._groups.get((event.tier, event.group))
        if group is None:
            return 0
        num_removed = 0
        for block_hash in event.hashes:
            mapped = self._keys_by_hash.get(spread(block_hash))
            key = block_hash if mapped is None else mapped
            extra = group.extra_counts.get(key, 0)
            if extra > 1:
                group.extra_counts[key] = extra - 1
            elif extra == 1:
                del group.extra_counts[key]
            elif group.keys.discard(key):
                num_removed += 1
                self._forget_hash(block_hash, key)
        return num_removed

    def _forget_hash(self, block_hash: int, key: int) -> None:
        if not any(key in group.keys for group in self._groups.values()):
            self._keys_by_hash.discard(spread(block_hash))

    def _find_keys(self, event: Stored) -> Sequence[int] | None:
        """Routing keys of the event's blocks; None when the parent is unknown."""
        if event.scheme == SCHEME_VERSION:
            return event.hashes
        scope = KeyScope(self._model, event.block_tokens, self._seed, event.adapter, event.namespace)
        parent = (
            self._find_root(scope) if event.parent is None else self._keys_by_hash.get(spread(event.parent))
        )
        if parent is None:
            return None
        keys = _chain_keys(scope, parent, event)
        for block_hash, key in zip(event.hashes, keys, strict=True):
            self._keys_by_hash.put(spread(block_hash), key)
        return keys

    def _find_root(self, scope: KeyScope) -> int:
        root = self._roots.get(scope)
        if root is None:
            if len(self._roots) >= _MAX_ROOTS:
                self._roots.clear()
            root = self._roots[scope] = scope.compute_root()
        return root


def _chain_keys(scope: KeyScope, parent: int, event: Stored) -> list[int]:
    if not any(event.extras):
        return extend_block_keys(scope, parent, event.tokens)
    keys: list[int] = []
    for position, extra in enumerate(event.extras):
        tokens = event.tokens[position * event.block_tokens : (position + 1) * event.block_tokens]
        parent = extend_block_keys(scope, parent, tokens)[0]
        if extra:  # an image's block must match no text, and what follows it neither
            parent = xxhash.xxh3_64_intdigest(parent.to_bytes(8, "little") + extra, seed=scope.seed)
        keys.append(parent)
    return keys


def _match_window(held: PackedSet, keys: Sequence[int], start: int, end: int, window_blocks: int) -> int:
    """Longest prefix up to `end` whose last window is held: what a sliding-window group needs of it."""
    run = 0
    for position in range(end - 1, start - 1, -1):
        run = run + 1 if keys[position] in held else 0
        if run >= window_blocks:
            return position + run
        if position == start and run:
            return start + run
    return start
