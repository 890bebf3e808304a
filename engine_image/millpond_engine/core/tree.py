"""Radix tree from token runs to blocks: which blocks already hold a prompt's KV.

A node's edge is a run of whole blocks with their tokens; children are keyed by the tokens of their
first block under a root per namespace, so two prompts meet only where every token, and the
namespace, are equal: a hash decides nothing. Runs are compared in doubling windows, then bisected.

A position in the tree is named by the block that ends there: `node_of` finds its node, also after
splits and growth, so holders of a path keep no handles. What protects a path from eviction is the
reference count of its blocks: a table always references a whole path, hence a block with references
never has a parent without (checked by `check`). Idea: SGLang's RadixAttention (arXiv 2312.07104).
"""

from __future__ import annotations

from dataclasses import dataclass, field

TOKEN_BYTES = 4
Namespace = tuple[str, ...]


@dataclass(slots=True, eq=False, repr=False)
class Node:
    """A run of blocks."""

    parent: Node | None
    start: int
    """Number of blocks before this node on its path."""
    namespace: Namespace
    tokens: bytearray = field(default_factory=bytearray)
    blocks: list[int] = field(default_factory=list)
    children: dict[bytes, Node] = field(default_factory=dict)


def make_child_key(tokens: bytes | bytearray, offset: int, size: int) -> bytes:
    """The tokens of one block, which name a child."""
    return bytes(tokens[offset : offset + size])


class PrefixTree:
    """Prefixes of all namespaces. Tokens come as bytes, four each."""

    def __init__(self, num_blocks: int, block_tokens: int) -> None:
        self._size = block_tokens * TOKEN_BYTES
        self._roots: dict[Namespace, Node] = {}
        self.node_of: list[Node | None] = [None] * num_blocks

    def lookup(self, namespace: Namespace, tokens: bytes) -> list[int]:
        """Blocks of the longest known prefix of whole blocks."""
        node = self._roots.get(namespace)
        found: list[int] = []
        offset, end, size = 0, len(tokens) - len(tokens) % self._size, self._size
        while node is not None and offset < end:
            node = node.children.get(make_child_key(tokens, offset, size))
            if node is None:
                break
            num_equal = self._count_equal(node, 0, tokens, offset)
            found += node.blocks[:num_equal]
            if num_equal < len(node.blocks):
                break
            offset += num_equal * size
        return found

    def insert(
        self, namespace: Namespace, parent: int | None, depth: int, tokens: bytes, blocks: list[int]
    ) -> list[int]:
        """Add blocks behind the path of `depth` blocks that ends with block `parent` (None: the root).

        Returns the path's own blocks for these tokens: where it already had some, those, else the
        given ones. The caller gives its duplicates back.
        """
        root = Node(None, 0, namespace)
        node = self._roots.setdefault(namespace, root) if parent is None else self.node_of[parent]
        assert node is not None, f"block {parent} is not in the tree"
        used = depth - node.start
        path: list[int] = []
        while len(path) < len(blocks):
            offset = len(path) * self._size
            num_equal = self._count_equal(node, used, tokens, offset)
            path += node.blocks[used : used + num_equal]
            used += num_equal
            if len(path) == len(blocks):
                break
            if used < len(node.blocks):
                node = self._split(node, used)
            offset = len(path) * self._size
            child = node.children.get(make_child_key(tokens, offset, self._size))
            if child is None:
                self._attach(node, tokens[offset:], blocks[len(path) :])
                path += blocks[len(path) :]
            else:
                node, used = child, 0
        return path

    def remove(self, block: int) -> list[int]:
        """Cut the path before this block; returns it and everything behind it."""
        node = self.node_of[block]
        assert node is not None, f"block {block} is not in the tree"
        index = len(node.blocks) - 1 if node.blocks[-1] == block else node.blocks.index(block)
        removed = node.blocks[index:]
        for child in node.children.values():
            removed += _list_blocks(child)
        node.children = {}
        if index == 0:
            self._detach(node)
        del node.blocks[index:], node.tokens[index * self._size :]
        for gone in removed:
            self.node_of[gone] = None
        return removed

    def clear(self) -> list[int]:
        """Forget everything; returns the blocks that were in the tree."""
        removed = [block for root in self._roots.values() for block in _list_blocks(root)]
        for block in removed:
            self.node_of[block] = None
        self._roots.clear()
        return removed

    def walk(self) -> list[tuple[int, int | None]]:
        """Every block with its parent (for checks; linear)."""
        pairs: list[tuple[int, int | None]] = []
        stack: list[tuple[Node, int | None]] = [(root, None) for root in self._roots.values()]
        while stack:
            node, parent = stack.pop()
            for block in node.blocks:
                assert self.node_of[block] is node, f"block {block} points to another node"
                pairs.append((block, parent))
                parent = block
            assert len(node.tokens) == len(node.blocks) * self._size
            stack += [(child, parent) for child in node.children.values()]
        return pairs

    def _count_equal(self, node: Node, used: int, tokens: bytes, offset: int) -> int:
        """Equal blocks of `node` from its block `used` on and of `tokens` from byte `offset` on."""
        size, edge = self._size, node.tokens
        limit = min(len(node.blocks) - used, (len(tokens) - offset) // size)
        shift = offset - used * size
        low, window = used, 1
        end = used + limit
        while low < end:
            high = min(low + window, end)
            if edge[low * size : high * size] == tokens[low * size + shift : high * size + shift]:
                low, window = high, window * 2
                continue
            while high - low > 1:
                middle = (low + high) // 2
                same = edge[low * size : middle * size] == tokens[low * size + shift : middle * size + shift]
                low, high = (middle, high) if same else (low, middle)
            break
        return low - used

    def _attach(self, node: Node, tokens: bytes, blocks: list[int]) -> None:
        """Hang new blocks behind a node: a leaf grows, any other gets a child."""
        if node.parent is None or node.children:
            child = Node(node, node.start + len(node.blocks), node.namespace)
            node.children[make_child_key(tokens, 0, self._size)] = child
            node = child
        node.tokens += tokens
        node.blocks += blocks
        for block in blocks:
            self.node_of[block] = node

    def _split(self, node: Node, index: int) -> Node:
        """Cut a node before its block `index`; returns the new upper part."""
        size, parent = self._size, node.parent
        assert parent is not None, "a root has no blocks to split"
        upper = Node(parent, node.start, node.namespace)
        upper.tokens, upper.blocks = node.tokens[: index * size], node.blocks[:index]
        parent.children[make_child_key(upper.tokens, 0, size)] = upper
        for block in upper.blocks:
            self.node_of[block] = upper
        node.parent, node.start = upper, node.start + index
        node.tokens, node.blocks = node.tokens[index * size :], node.blocks[index:]
        upper.children[make_child_key(node.tokens, 0, size)] = node
        return upper

    def _detach(self, node: Node) -> None:
        parent = node.parent
        assert parent is not None, "a root has no blocks to remove"
        del parent.children[make_child_key(node.tokens, 0, self._size)]
        if parent.parent is None and not parent.children:
            del self._roots[parent.namespace]


def _list_blocks(node: Node) -> list[int]:
    found: list[int] = []
    stack = [node]
    while stack:
        current = stack.pop()
        found += current.blocks
        stack += current.children.values()
    return found
