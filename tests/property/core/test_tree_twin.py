"""The prefix tree against a naive twin: a dictionary from whole prefixes to blocks."""

from __future__ import annotations

from array import array

from hypothesis import given, settings
from hypothesis import strategies as st

from millpond_engine.core.tree import PrefixTree

SIZE = 2
NUM_BLOCKS = 400

tokens = st.lists(st.integers(0, 2), min_size=0, max_size=24)
operations = st.lists(
    st.one_of(
        st.tuples(st.just("insert"), st.sampled_from(["a", "b"]), tokens),
        st.tuples(st.just("lookup"), st.sampled_from(["a", "b"]), tokens),
        st.tuples(st.just("remove"), st.just("a"), st.integers(0, 10_000)),
        st.tuples(st.just("clear"), st.just("a"), st.just(0)),
    ),
    max_size=40,
)


class NaiveCache:
    """What a prefix cache means, in the slowest way."""

    def __init__(self) -> None:
        self.blocks: dict[tuple[str, tuple[int, ...]], int] = {}

    def lookup(self, namespace: str, prompt: list[int]) -> list[int]:
        found = []
        for end in range(SIZE, len(prompt) + 1, SIZE):
            block = self.blocks.get((namespace, tuple(prompt[:end])))
            if block is None:
                break
            found.append(block)
        return found

    def insert(self, namespace: str, prompt: list[int], blocks: list[int]) -> list[int]:
        path = []
        for i, block in enumerate(blocks):
            path.append(self.blocks.setdefault((namespace, tuple(prompt[: (i + 1) * SIZE])), block))
        return path

    def remove(self, block: int) -> set[int]:
        (place,) = [place for place, held in self.blocks.items() if held == block]
        gone = [p for p in self.blocks if p[0] == place[0] and p[1][: len(place[1])] == place[1]]
        return {self.blocks.pop(p) for p in gone}


@settings(max_examples=400, deadline=None, derandomize=True)
@given(operations)
def test_tree_and_twin_agree(steps):
    tree, twin = PrefixTree(NUM_BLOCKS, SIZE), NaiveCache()
    unused = list(range(NUM_BLOCKS))
    for kind, namespace, value in steps:
        if kind == "remove":
            if not twin.blocks:
                continue
            block = sorted(twin.blocks.values())[value % len(twin.blocks)]
            removed = tree.remove(block)
            assert set(removed) == twin.remove(block)
            assert len(removed) == len(set(removed))
        elif kind == "clear":
            assert sorted(tree.clear()) == sorted(twin.blocks.values())
            twin.blocks.clear()
        elif kind == "lookup":
            assert tree.lookup((namespace,), array("I", value).tobytes()) == twin.lookup(namespace, value)
        else:
            whole = value[: len(value) // SIZE * SIZE]
            known = twin.lookup(namespace, whole)
            depth = len(known) // 2  # continue from the middle of a known path, as a growing sequence does
            blocks = [unused.pop() for _ in range(len(whole) // SIZE - depth)]
            parent = known[depth - 1] if depth else None
            run = array("I", whole[depth * SIZE :]).tobytes()
            path = tree.insert((namespace,), parent, depth, run, blocks)
            assert known[:depth] + path == twin.insert(namespace, whole, known[:depth] + blocks)
        assert {block for block, _ in tree.walk()} == set(twin.blocks.values())
