"""First index layer: prefixes that this fleet of gateways routed, an LRU per replica sized to its block count.

A radix tree over chained block keys. A node holds a run of keys that never branched, so a block costs eight
bytes and a node's overhead is shared by its run. Because every key identifies the whole prefix before it, a run
is compared by its last key alone, and the point of divergence is found by bisection.

Per replica the nodes form a recency list in which an ancestor is never older than a descendant: evicting from
the old end always trims a tail, so what a replica holds stays a set of complete prefixes.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Sequence
from typing import Final

KEY_BYTES: Final = 8
NODE_BYTES: Final = 320
"""Node, its array header and its entry in the parent's children, measured with CPython 3.11."""
HOLD_BYTES: Final = 200
"""Hold and its entry in the node, measured likewise."""
_FULL: Final = 0.9
"""Share of its blocks from which on a replica counts as full: an eviction frees a prompt's worth at once."""


class RoutedMatch:
    """Leading blocks of a prompt that a replica was sent before."""

    __slots__ = ("num_blocks", "num_recent_blocks")

    def __init__(self, num_blocks: int, num_recent_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.num_recent_blocks = num_recent_blocks
        """The part that was routed so recently that no event can be expected yet."""


class RoutedMatches:
    """What the index knows of one prompt."""

    __slots__ = ("num_shared_blocks", "num_shared_copies", "replicas", "shared_routed_at")

    def __init__(self, replicas: dict[str, RoutedMatch], num_shared_blocks: int) -> None:
        self.replicas = replicas
        """Replicas without any leading block are absent."""
        self.num_shared_blocks = num_shared_blocks
        """Leading blocks after which routed prompts went different ways: a system prompt, not one session's history."""
        self.num_shared_copies = 0
        """Replicas that hold all of those blocks."""
        self.shared_routed_at = 0.0
        """When one of them last got a prompt that begins with those blocks."""

    def note_copies(self, node: _Node, depth: int) -> None:
        """Fill in who holds the shared blocks: they end `depth` blocks into `node`."""
        for hold in node.holds.values():
            if hold.depth >= depth:
                self.num_shared_copies += 1
                self.shared_routed_at = max(self.shared_routed_at, hold.routed_at)


class _Node:
    __slots__ = ("children", "holds", "keys", "parent")

    def __init__(self, parent: _Node | None, keys: array[int]) -> None:
        self.parent = parent
        self.keys = keys
        self.children: dict[int, _Node] = {}
        self.holds: dict[str, _Hold] = {}


class _Hold:
    """One replica's part of a node: its first `depth` blocks; a link of the replica's recency list."""

    __slots__ = ("depth", "newer", "node", "older", "routed_at")

    def __init__(self, node: _Node | None, depth: int, routed_at: float) -> None:
        self.node = node
        self.depth = depth
        self.routed_at = routed_at
        self.newer: _Hold = self
        self.older: _Hold = self

    def unlink(self) -> None:
        self.older.newer = self.newer
        self.newer.older = self.older

    def link_older_than(self, other: _Hold) -> None:
        self.newer = other
        self.older = other.older
        other.older.newer = self
        other.older = self


class _Replica:
    __slots__ = ("capacity", "num_blocks", "recency")

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.num_blocks = 0
        self.recency = _Hold(None, 0, 0.0)  # sentinel: .newer is the oldest hold, .older the newest


class RoutedIndex:
    """Prefixes per replica, bounded in blocks per replica and in bytes over all."""

    def __init__(self, *, max_bytes: int, speculative_seconds: float) -> None:
        self._root = _Node(None, array("Q"))
        self._replicas: dict[str, _Replica] = {}
        self._max_bytes = max_bytes
        self._speculative_seconds = speculative_seconds
        self._num_keys = 0
        self._num_nodes = 0
        self._num_holds = 0

    def set_bounds(self, *, max_bytes: int, speculative_seconds: float) -> None:
        """Follow changed settings; a smaller bound takes effect with the next insertion."""
        self._max_bytes = max_bytes
        self._speculative_seconds = speculative_seconds

    @property
    def num_bytes(self) -> int:
        """Estimated memory."""
        return self._num_keys * KEY_BYTES + self._num_nodes * NODE_BYTES + self._num_holds * HOLD_BYTES

    @property
    def num_distinct_blocks(self) -> int:
        """Blocks held by at least one replica."""
        return self._num_keys

    def num_blocks(self, uid: str) -> int:
        """Blocks held for one replica."""
        replica = self._replicas.get(uid)
        return 0 if replica is None else replica.num_blocks

    def match(self, keys: Sequence[int], now: float) -> RoutedMatches:
        """Leading blocks per replica, and how many of them are shared among prompts."""
        recent_since = now - self._speculative_seconds
        found: dict[str, RoutedMatch] = {}
        node = self._root
        position = 0
        num_shared = 0
        shared_node, shared_depth = node, 0
        num_keys = len(keys)
        while position < num_keys:
            child = node.children.get(keys[position])
            num_others = len(node.children) - (child is not None)
            if num_others:
                num_shared = position
                shared_node, shared_depth = node, len(node.keys)
            if child is None:
                break
            length = _common_length(child.keys, keys, position)
            _extend_matches(found, child, position, length, recent_since)
            position += length
            if length < len(child.keys):
                if position < num_keys:
                    num_shared = position
                    shared_node, shared_depth = child, length
                break
            node = child
        matches = RoutedMatches(found, num_shared)
        if num_shared:
            matches.note_copies(shared_node, shared_depth)
        return matches

    def retention_seconds(self, uid: str, now: float) -> float:
        """How long a replica keeps blocks that nothing uses: the age of its oldest, infinite while it has room."""
        replica = self._replicas.get(uid)
        if replica is None or replica.num_blocks < replica.capacity * _FULL:
            return math.inf
        return now - replica.recency.newer.routed_at

    def insert(self, uid: str, keys: Sequence[int], *, capacity: int, now: float) -> None:
        """Note that `uid` was sent a prompt with these keys; evict past `capacity` blocks and past the byte bound."""
        replica = self._replicas.setdefault(uid, _Replica(capacity))
        replica.capacity = capacity
        if len(keys) > capacity:
            keys = keys[:capacity]
        path = self._make_path(keys)
        for node in reversed(path):
            self._touch(replica, uid, node, now)
        self._evict_to(replica, uid, replica.capacity)
        while self.num_bytes > self._max_bytes and self._num_holds > 0:
            self._shrink_largest()

    def drop_replica(self, uid: str) -> int:
        """Forget everything of a replica; returns the blocks forgotten."""
        replica = self._replicas.pop(uid, None)
        if replica is None:
            return 0
        num_blocks = replica.num_blocks
        self._evict_to(replica, uid, 0)
        return num_blocks

    def count_unique_blocks(self, uid: str) -> int:
        """Blocks that only this replica holds: what is lost with it."""
        replica = self._replicas.get(uid)
        return 0 if replica is None else sum(self._unique_part(uid, hold) for hold in _oldest_first(replica))

    @staticmethod
    def _unique_part(uid: str, hold: _Hold) -> int:
        assert hold.node is not None
        others = [other.depth for other_uid, other in hold.node.holds.items() if other_uid != uid]
        return max(hold.depth - max(others, default=0), 0)

    def _make_path(self, keys: Sequence[int]) -> list[_Node]:
        path: list[_Node] = []
        node = self._root
        position = 0
        while position < len(keys):
            child = node.children.get(keys[position])
            if child is None:
                path.append(self._add_leaf(node, array("Q", keys[position:])))
                break
            length = _common_length(child.keys, keys, position)
            if length < len(child.keys):
                self._split(child, length)
            path.append(child)
            position += len(child.keys)
            node = child
        return path

    def _add_leaf(self, parent: _Node, keys: array[int]) -> _Node:
        leaf = _Node(parent, keys)
        parent.children[keys[0]] = leaf
        self._num_nodes += 1
        self._num_keys += len(keys)
        return leaf

    def _split(self, node: _Node, length: int) -> None:
        """Cut a node after `length` blocks; the node keeps the head, a new child takes the tail."""
        tail = _Node(node, node.keys[length:])
        tail.children = node.children
        for child in tail.children.values():
            child.parent = tail
        node.keys = node.keys[:length]
        node.children = {tail.keys[0]: tail}
        self._num_nodes += 1
        for uid, hold in node.holds.items():
            if hold.depth > length:
                rest = _Hold(tail, hold.depth - length, hold.routed_at)
                rest.link_older_than(hold)
                tail.holds[uid] = rest
                hold.depth = length
                self._num_holds += 1

    def _touch(self, replica: _Replica, uid: str, node: _Node, now: float) -> None:
        hold = node.holds.get(uid)
        if hold is None:
            hold = node.holds[uid] = _Hold(node, 0, now)
            self._num_holds += 1
        else:
            hold.unlink()
        replica.num_blocks += len(node.keys) - hold.depth
        hold.depth = len(node.keys)
        hold.routed_at = now
        hold.link_older_than(replica.recency)  # the sentinel closes the ring: this is the newest place

    def _evict_to(self, replica: _Replica, uid: str, capacity: int) -> None:
        while replica.num_blocks > capacity:
            hold = replica.recency.newer
            trimmed = min(hold.depth, replica.num_blocks - capacity)
            hold.depth -= trimmed
            replica.num_blocks -= trimmed
            node = hold.node
            assert node is not None
            if hold.depth == 0:
                hold.unlink()
                del node.holds[uid]
                self._num_holds -= 1
            self._shrink_node(node)

    def _shrink_node(self, node: _Node) -> None:
        longest = max((hold.depth for hold in node.holds.values()), default=0)
        if longest == len(node.keys):
            return
        self._num_keys -= len(node.keys) - longest
        if longest:
            del node.keys[longest:]
            return
        assert not node.children
        assert node.parent is not None
        del node.parent.children[node.keys[0]]
        self._num_nodes -= 1

    def _shrink_largest(self) -> None:
        uid, replica = max(self._replicas.items(), key=lambda item: item[1].num_blocks)
        self._evict_to(replica, uid, replica.num_blocks - max(replica.num_blocks // 16, 1))


def _extend_matches(
    found: dict[str, RoutedMatch], node: _Node, position: int, length: int, recent_since: float
) -> None:
    """Lengthen the matches that reach `position` by what their replicas hold of a node's first `length` blocks."""
    for uid, hold in node.holds.items():
        match = found.get(uid)
        if match is None:
            if position:
                continue
            match = found[uid] = RoutedMatch(0, 0)
        elif match.num_blocks < position:
            continue
        depth = hold.depth
        match.num_blocks = position + (depth if depth < length else length)
        if hold.routed_at >= recent_since:
            match.num_recent_blocks = match.num_blocks


def _common_length(run: Sequence[int], keys: Sequence[int], position: int) -> int:
    """Leading keys of `run` equal to those at `position`; chained keys make equality monotone."""
    high = min(len(run), len(keys) - position)
    if run[high - 1] == keys[position + high - 1]:
        return high
    low = 0
    while low < high:
        middle = (low + high) // 2
        if run[middle] == keys[position + middle]:
            low = middle + 1
        else:
            high = middle
    return low


def _oldest_first(replica: _Replica) -> Iterator[_Hold]:
    hold = replica.recency.newer
    while hold is not replica.recency:
        yield hold
        hold = hold.newer
