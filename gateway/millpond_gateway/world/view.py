"""The gateway's view of pools and replicas: fed by watches, flags and engines; read as snapshots.

Identity of a replica is its pod's UID. Every list replaces the whole kind, so whatever an interrupted watch
missed is repaired by the next one. The view knows its age: cached state alone is never called healthy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from millpond_gateway.routing.records import EndpointView
from millpond_gateway.world.records import EngineFacts, PoolView, Replica, WorldSnapshot

Listener = Callable[[WorldSnapshot], None]
_NOTHING = EngineFacts()


class World:
    """Mutable store on one event loop; each change tells the listener at once."""

    def __init__(self, listener: Listener | None = None) -> None:
        self._listener = listener
        self._pools: dict[str, PoolView] = {}
        self._replicas: dict[str, Replica] = {}
        self._facts: dict[str, EngineFacts] = {}
        self._awaited: set[str] = set()
        self._proved: dict[str, float] = {}
        self._version = 0
        self._snapshot = self._make_snapshot()

    @property
    def snapshot(self) -> WorldSnapshot:
        """Everything as of the last change."""
        return self._snapshot

    @property
    def replicas(self) -> tuple[Replica, ...]:
        """Every known replica."""
        return tuple(self._replicas.values())

    def find_replica(self, uid: str) -> Replica | None:
        """One known replica."""
        return self._replicas.get(uid)

    def listen(self, listener: Listener) -> None:
        """Tell `listener` now and at every change."""
        self._listener = listener
        listener(self._snapshot)

    # Freshness.

    def expect(self, source: str) -> None:
        """The view is not synced before this source has given its first full list."""
        self._awaited.add(source)
        self._change()

    def prove(self, source: str, now: float) -> None:
        """The source showed that it is alive: an event, a bookmark or a list."""
        self._proved[source] = now

    def compute_age_seconds(self, now: float) -> float | None:
        """Seconds since the stalest source proved itself alive; None while one never has."""
        if not self._proved or self._awaited:
            return None
        return max(0.0, now - min(self._proved.values()))

    # Pools.

    def set_pools(self, pools: Iterable[PoolView], *, source: str) -> None:
        """Replace every pool."""
        self._pools = {pool.name: pool for pool in pools}
        self._awaited.discard(source)
        self._change()

    def put_pool(self, pool: PoolView) -> None:
        """One pool changed or came."""
        if self._pools.get(pool.name) != pool:
            self._pools[pool.name] = pool
            self._change()

    def remove_pool(self, name: str) -> None:
        """One pool is gone."""
        if self._pools.pop(name, None) is not None:
            self._change()

    # Replicas.

    def set_replicas(self, replicas: Iterable[Replica], *, source: str) -> None:
        """Replace every replica."""
        self._replicas = {replica.uid: replica for replica in replicas}
        self._facts = {uid: facts for uid, facts in self._facts.items() if uid in self._replicas}
        self._awaited.discard(source)
        self._change()

    def put_replica(self, replica: Replica) -> None:
        """One replica changed or came."""
        if self._replicas.get(replica.uid) != replica:
            self._replicas[replica.uid] = replica
            self._change()

    def remove_replica(self, uid: str) -> None:
        """One replica is gone."""
        if self._replicas.pop(uid, None) is not None:
            self._facts.pop(uid, None)
            self._change()

    # Engines.

    def put_facts(self, uid: str, facts: EngineFacts) -> None:
        """An engine answered, or did not."""
        if uid in self._replicas and self._facts.get(uid) != facts:
            self._facts[uid] = facts
            self._change()

    def find_facts(self, uid: str) -> EngineFacts:
        """What the engine told last."""
        return self._facts.get(uid, _NOTHING)

    def _change(self) -> None:
        self._version += 1
        self._snapshot = self._make_snapshot()
        if self._listener is not None:
            self._listener(self._snapshot)

    def _make_snapshot(self) -> WorldSnapshot:
        endpoints: dict[str, list[EndpointView]] = {name: [] for name in self._pools}
        for replica in self._replicas.values():
            pool = self._pools.get(replica.pool)
            if pool is not None:
                endpoints[pool.name].append(make_endpoint(pool, replica, self.find_facts(replica.uid)))
        return WorldSnapshot(
            version=self._version,
            pools=dict(self._pools),
            endpoints={name: tuple(views) for name, views in endpoints.items()},
            synced=not self._awaited,
        )


def make_endpoint(pool: PoolView, replica: Replica, facts: EngineFacts) -> EndpointView:
    """A replica as routing sees it: the API server's word and the engine's own, the stricter one wins."""
    limits = [limit for limit in (pool.max_model_tokens, facts.max_model_tokens) if limit is not None]
    ready = facts.answers and facts.ready if replica.static else replica.ready and facts.ready
    return EndpointView(
        uid=replica.uid,
        pod=replica.pod,
        address=replica.address,
        prefix=replica.prefix,
        epoch=facts.epoch,
        revision=replica.revision,
        role=replica.role,
        ready=ready,
        cordoned=replica.cordoned or facts.draining,
        block_tokens=facts.block_tokens or pool.block_tokens,
        num_blocks=facts.num_blocks,
        max_model_tokens=min(limits, default=None),
        prefill_tokens_per_second=facts.prefill_tokens_per_second,
    )
