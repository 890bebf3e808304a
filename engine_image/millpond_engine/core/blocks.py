"""The block pool: preallocated records, reference counts, and intrusive lists that allocate and remember age.

A block is used (count > 0), cached (count 0, its content findable by prefix) or free. The unused
ones hang in doubly linked lists threaded through the records, so taking one out of the middle costs
the same as taking the oldest. List 0 is the free list; each further list keeps cached blocks, oldest
first, for one group of tenants. Tables are given back tail first: a list then always holds the
leaves of a prefix tree before their parents.
"""

from __future__ import annotations

from collections.abc import Sequence

FREE = 0
"""The list of blocks without content."""
SHARED = 1
"""The list of cached blocks whose tenants have no limit."""
_MAX_WEIGHT = 4


def count_blocks(num_tokens: int, block_tokens: int) -> int:
    """Blocks that hold this many tokens."""
    return -(-num_tokens // block_tokens)


class BlockPool:
    """Owner of every block's life. Block ids are 0 .. num_blocks - 1."""

    def __init__(self, num_blocks: int, list_of_owner: Sequence[int] = (SHARED,)) -> None:
        self.num_blocks = num_blocks
        self.counts = [0] * num_blocks
        """References: entries in block tables plus leases."""
        num_lists = 1 + max(list_of_owner)
        self.sizes = [0] * num_lists
        self.num_cached = 0
        self.cached_weight = 0
        """Cached blocks weighted by recent reuse, 1 to 4 each."""
        self.used_by = [0] * len(list_of_owner)
        self.cached_by = [0] * len(list_of_owner)
        """Used and cached blocks by who computed them; a block shared by several owners is the first one's."""
        self._owner = [0] * num_blocks
        self._list_of_owner = list_of_owner
        self._home = [FREE] * num_blocks
        self._weight = [1] * num_blocks
        self._age = [0] * num_blocks
        self._clock = 0
        heads = range(num_blocks, num_blocks + num_lists)
        self._next = [0] * num_blocks + list(heads)
        self._previous = [0] * num_blocks + list(heads)
        for block in range(num_blocks):
            self._link(block, FREE)

    @property
    def num_free(self) -> int:
        """Blocks without content."""
        return self.sizes[FREE]

    @property
    def num_available(self) -> int:
        """Blocks that can be allocated: free and cached ones."""
        return self.sizes[FREE] + self.num_cached

    @property
    def num_used(self) -> int:
        """Blocks with references."""
        return self.num_blocks - self.sizes[FREE] - self.num_cached

    def take_free(self, owner: int) -> int:
        """Allocate one block from the free list, which must not be empty; its count becomes 1."""
        block = self._next[self.num_blocks + FREE]
        self._unlink(block, FREE)
        self.counts[block] = 1
        self._owner[block] = owner
        self.used_by[owner] += 1
        return block

    def retain(self, block: int) -> None:
        """Add a reference; a cached block stops being evictable and gains weight."""
        if self.counts[block] == 0:
            self._unlink(block, self._home[block])
            self._weight[block] = min(self._weight[block] + 1, _MAX_WEIGHT)
            self.used_by[self._owner[block]] += 1
        self.counts[block] += 1

    def release(self, block: int) -> None:
        """Drop a reference; the last one makes the block cached or free."""
        count = self.counts[block] - 1
        assert count >= 0, f"block {block} was released more often than retained"
        self.counts[block] = count
        if count == 0:
            self.used_by[self._owner[block]] -= 1
            self._link(block, self._home[block])

    def keep_content(self, block: int) -> None:
        """Make a used block's content findable: it becomes cached, not free, when released."""
        self._home[block] = self._list_of_owner[self._owner[block]]

    def drop_content(self, block: int) -> None:
        """Undo `keep_content`; a cached block becomes free."""
        home = self._home[block]
        if self.counts[block] == 0 and home != FREE:
            self._unlink(block, home)
            self._link(block, FREE)
        self._home[block] = FREE
        self._weight[block] = 1

    def has_content(self, block: int) -> bool:
        """Whether the block is findable by prefix."""
        return self._home[block] != FREE

    def oldest(self, cached_list: int) -> int:
        """The least recently released block of a list, which must not be empty."""
        return self._next[self.num_blocks + cached_list]

    def oldest_of_all(self) -> int:
        """The least recently released cached block; there must be one."""
        lists = [number for number in range(SHARED, len(self.sizes)) if self.sizes[number]]
        return min((self.oldest(number) for number in lists), key=self._age.__getitem__)

    def walk(self, number: int) -> list[int]:
        """Blocks of a list, oldest first (for checks; linear)."""
        head = self.num_blocks + number
        found: list[int] = []
        block = self._next[head]
        while block != head:
            found.append(block)
            block = self._next[block]
        return found

    def _link(self, block: int, number: int) -> None:
        """Hang a block behind the youngest of a list."""
        head = self.num_blocks + number
        last = self._previous[head]
        self._next[last] = self._previous[head] = block
        self._previous[block], self._next[block] = last, head
        self.sizes[number] += 1
        if number != FREE:
            self._clock += 1
            self._age[block] = self._clock
            self.num_cached += 1
            self.cached_by[self._owner[block]] += 1
            self.cached_weight += self._weight[block]

    def _unlink(self, block: int, number: int) -> None:
        before, after = self._previous[block], self._next[block]
        self._next[before], self._previous[after] = after, before
        self.sizes[number] -= 1
        if number != FREE:
            self.num_cached -= 1
            self.cached_by[self._owner[block]] -= 1
            self.cached_weight -= self._weight[block]


class HostPool:
    """Host blocks of swapped sequences: a free list with fences, for a block read by a planned swap-in is free after that step."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._fences: dict[int, list[int]] = {}

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated."""
        return len(self._free)

    def allocate(self, num_blocks: int) -> list[int]:
        """Take blocks; the caller has checked `num_free`."""
        return [self._free.pop() for _ in range(num_blocks)]

    def release(self, blocks: list[int], fence: int | None) -> None:
        """Give blocks back, at once or when a step has ended."""
        if fence is None:
            self._free += blocks
        else:
            self._fences.setdefault(fence, []).extend(blocks)

    def end_step(self, step: int) -> None:
        """The step is over."""
        self._free += self._fences.pop(step, [])

    def list_unused(self) -> list[int]:
        """Free and fenced blocks (for checks)."""
        return self._free + [block for blocks in self._fences.values() for block in blocks]
