"""The block pool: preallocated records, reference counts, and intrusive lists that allocate and remember age.

A block is used (count > 0), cached (count 0, its content findable by prefix) or free. The unused
ones hang in doubly linked lists threaded through the records, so taking one out of the middle costs
the same as taking the oldest. List 0 is the free list; each further list keeps cached blocks, oldest
first, for one group of tenants. Tables are given back tail first: a list then always holds the
leaves of a prefix tree before their parents.
"""

from __future__ import annotations

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

    def __init__(self, num_blocks: int, num_cached_lists: int = 1) -> None:
        self.num_blocks = num_blocks
        self.counts = [0] * num_blocks
        """References: entries in block tables plus leases."""
        num_lists = 1 + num_cached_lists
        self.sizes = [0] * num_lists
        self.num_cached = 0
        self.cached_weight = 0
        """Cached blocks weighted by recent reuse, 1 to 4 each."""
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

    def take_free(self) -> int:
        """Allocate one block from the free list, which must not be empty; its count becomes 1."""
        block = self._next[self.num_blocks + FREE]
        self._unlink(block, FREE)
        self.counts[block] = 1
        return block

    def retain(self, block: int) -> None:
        """Add a reference; a cached block stops being evictable and gains weight."""
        if self.counts[block] == 0:
            self._unlink(block, self._home[block])
            self._weight[block] = min(self._weight[block] + 1, _MAX_WEIGHT)
        self.counts[block] += 1

    def release(self, block: int) -> None:
        """Drop a reference; the last one makes the block cached or free."""
        count = self.counts[block] - 1
        assert count >= 0, f"block {block} was released more often than retained"
        self.counts[block] = count
        if count == 0:
            self._link(block, self._home[block])

    def keep_content(self, block: int, cached_list: int) -> None:
        """Make a used block's content findable: it becomes cached, not free, when released."""
        self._home[block] = cached_list

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
            self.cached_weight += self._weight[block]

    def _unlink(self, block: int, number: int) -> None:
        before, after = self._previous[block], self._next[block]
        self._next[before], self._previous[after] = after, before
        self.sizes[number] -= 1
        if number != FREE:
            self.num_cached -= 1
            self.cached_weight -= self._weight[block]
