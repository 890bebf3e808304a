"""Which blocks are resident, by routing key: turns the scheduler's cache events into wire events and snapshots."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from millpond_common.contract.blockkey import KeyScope, extend_block_keys, make_namespace
from millpond_common.contract.kv_events import ClearedBlocks, KvEvent, RemovedBlocks, StoredBlocks
from millpond_engine.records.outputs import BlocksRemoved, BlocksStored, CacheCleared, CacheEvent

_MAX_RUN = 64
"""Blocks of one event of a snapshot."""


@dataclass(frozen=True, slots=True)
class _Resident:
    """One block: enough to announce it again."""

    key: int
    parent: int | None
    tokens: bytes
    """Unsigned 32-bit integers in this machine's order."""
    scope: KeyScope


class ResidentBlocks:
    """The device's cached and shared blocks in the order they were stored, so parents come before children."""

    def __init__(self, *, model: str, block_tokens: int, seed: int) -> None:
        self._model = model
        self._block_tokens = block_tokens
        self._seed = seed
        self._blocks: dict[int, _Resident] = {}
        self._num_by_key: dict[int, int] = {}
        self._scopes: dict[tuple[str, ...], KeyScope] = {}
        self.stored_total = 0
        self.removed_total = 0

    def __len__(self) -> int:
        return len(self._blocks)

    def apply(self, event: CacheEvent) -> list[KvEvent]:
        """Take one event in; returns what to publish for it."""
        if isinstance(event, BlocksStored):
            return [self._store(event)]
        if isinstance(event, BlocksRemoved):
            keys = tuple(key for block in event.block_ids if (key := self._remove(block)) is not None)
            return [RemovedBlocks(keys)] if keys else []
        assert isinstance(event, CacheCleared)
        return [self.clear()]

    def clear(self) -> ClearedBlocks:
        """Forget everything."""
        self.removed_total += len(self._blocks)
        self._blocks.clear()
        self._num_by_key.clear()
        return ClearedBlocks()

    def list_stored(self) -> Iterator[StoredBlocks]:
        """All resident blocks, parents before children; neighbours of one chain share an event."""
        run: list[_Resident] = []
        for block in list(self._blocks.values()):
            if run and (
                block.parent != run[-1].key or block.scope is not run[0].scope or len(run) == _MAX_RUN
            ):
                yield self._join(run)
                run = []
            run.append(block)
        if run:
            yield self._join(run)

    def _join(self, run: list[_Resident]) -> StoredBlocks:
        tokens = array("I")
        tokens.frombytes(b"".join([block.tokens for block in run]))
        keys = tuple([block.key for block in run])
        return self._make_event(keys, run[0].parent, tokens, run[0].scope)

    def _store(self, event: BlocksStored) -> StoredBlocks:
        scope = self._find_scope(event.namespace)
        parent = self._find_parent(event, scope)
        start = scope.compute_root() if parent is None else parent
        keys = extend_block_keys(scope, start, event.tokens)
        size = self._block_tokens
        before = parent
        for position, (block, key) in enumerate(zip(event.block_ids, keys, strict=True)):
            self._remove(block)
            tokens = array("I", event.tokens[position * size : (position + 1) * size]).tobytes()
            self._blocks[block] = _Resident(key, before, tokens, scope)
            self._num_by_key[key] = self._num_by_key.get(key, 0) + 1
            before = key
        self.stored_total += len(keys)
        return self._make_event(tuple(keys), parent, event.tokens, scope)

    def _find_parent(self, event: BlocksStored, scope: KeyScope) -> int | None:
        """Key of the block in front; computed from the prefix when that block is not resident."""
        if event.parent_block_id is None:
            return None
        known = self._blocks.get(event.parent_block_id)
        if known is not None:
            return known.key
        keys = extend_block_keys(scope, scope.compute_root(), tuple(event.prefix_tokens))
        return keys[-1] if keys else None

    def _remove(self, block: int) -> int | None:
        """Forget a block; its key when no other block holds the same content."""
        known = self._blocks.pop(block, None)
        if known is None:
            return None
        self.removed_total += 1
        left = self._num_by_key[known.key] - 1
        if left:
            self._num_by_key[known.key] = left
            return None
        del self._num_by_key[known.key]
        return known.key

    def _find_scope(self, namespace: tuple[str, ...]) -> KeyScope:
        """Scope of the server's namespace (model, adapter, tenant, salt)."""
        scope = self._scopes.get(namespace)
        if scope is None:
            _, adapter, tenant, salt = (*namespace, "", "", "", "")[:4]
            scope = KeyScope(
                self._model, self._block_tokens, self._seed, adapter, make_namespace(tenant, salt)
            )
            if len(self._scopes) >= 65_536:  # salts are the callers' to choose
                self._scopes.clear()
            self._scopes[namespace] = scope
        return scope

    def _make_event(
        self, keys: tuple[int, ...], parent: int | None, tokens: Sequence[int], scope: KeyScope
    ) -> StoredBlocks:
        return StoredBlocks(
            keys=keys,
            parent=parent,
            tokens=tokens,
            block_tokens=self._block_tokens,
            adapter=scope.adapter,
            namespace=scope.namespace,
        )
