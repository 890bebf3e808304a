"""The fair hold queue of one pool.

Bands by class priority, highest first. Inside a band deficit round robin over tenants, on uncached tokens and by
weight (Shreedhar, Varghese 1995), so a tenant's share does not grow with the number of its requests. Low bands
do not starve: a request held past the bound is served ahead of higher bands, in at least every fourth turn.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping
from typing import Final

from millpond_gateway.flow.records import (
    ClassPolicy,
    FlowReason,
    FlowSettings,
    HeldRequest,
    TenantPolicy,
)

_STARVED_EVERY: Final = 4
_DEFAULT_CLASS: Final = ClassPolicy(name="")


class _Band:
    """One class's requests: a queue per tenant and the round over tenants."""

    __slots__ = ("deficits", "fresh", "num_held", "tenants")

    def __init__(self) -> None:
        self.tenants: OrderedDict[str, deque[HeldRequest]] = OrderedDict()
        self.deficits: dict[str, float] = {}
        self.fresh = True
        """The tenant at the head has not had its quantum this round."""
        self.num_held = 0

    def add(self, held: HeldRequest) -> None:
        queue = self.tenants.get(held.tenant)
        if queue is None:
            queue = self.tenants[held.tenant] = deque()
            self.deficits[held.tenant] = 0.0
        queue.append(held)
        self.num_held += 1

    def remove(self, held: HeldRequest) -> None:
        self.tenants[held.tenant].remove(held)
        self.num_held -= 1
        self._forget_if_empty(held.tenant)

    def oldest(self) -> HeldRequest | None:
        heads = [queue[0] for queue in self.tenants.values()]
        return min(heads, key=lambda held: held.arrived_at, default=None)

    def head(self, weights: Mapping[str, int], quantum_tokens: int) -> HeldRequest:
        """Next request of the round; turns the round as far as deficits demand, and charges nothing."""
        while True:
            tenant, queue = next(iter(self.tenants.items()))
            if self.fresh:
                self.deficits[tenant] += quantum_tokens * weights.get(tenant, 1)
                self.fresh = False
            if queue[0].uncached_tokens <= self.deficits[tenant]:
                return queue[0]
            self.tenants.move_to_end(tenant)
            self.fresh = True

    def charge(self, held: HeldRequest) -> None:
        """The tenant pays for a request that was served, in turn or out of it."""
        self.deficits[held.tenant] -= held.uncached_tokens

    def _forget_if_empty(self, tenant: str) -> None:
        if self.tenants[tenant]:
            return
        self.fresh = self.fresh or next(iter(self.tenants)) == tenant
        del self.tenants[tenant]
        del self.deficits[tenant]


class HoldQueue:
    """Requests of one pool that wait for capacity, bounded in number, bytes and time."""

    def __init__(
        self,
        settings: FlowSettings,
        classes: Iterable[ClassPolicy] = (),
        tenants: Iterable[TenantPolicy] = (),
    ) -> None:
        self._settings = settings
        self._bands: dict[str, _Band] = {}
        self._held: dict[str, HeldRequest] = {}
        self._turns_since_starved = _STARVED_EVERY
        self.num_bytes = 0
        self.num_tokens = 0
        self.set_policies(classes, tenants)

    def __len__(self) -> int:
        return len(self._held)

    def set_policies(self, classes: Iterable[ClassPolicy], tenants: Iterable[TenantPolicy]) -> None:
        """Follow changed classes and weights; what is held stays."""
        self._classes = {policy.name: policy for policy in classes}
        self._weights = {policy.name: max(policy.weight, 1) for policy in tenants}

    def num_held(self, traffic_class: str) -> int:
        """Requests of one class held now."""
        band = self._bands.get(traffic_class)
        return 0 if band is None else band.num_held

    def count_tenants(self) -> dict[str, int]:
        """Requests held by tenant."""
        counts: dict[str, int] = {}
        for band in self._bands.values():
            for tenant, queue in band.tenants.items():
                counts[tenant] = counts.get(tenant, 0) + len(queue)
        return counts

    def count_tenant_tokens(self) -> dict[str, int]:
        """Tokens charged for held requests, by tenant."""
        counts: dict[str, int] = {}
        for held in self._held.values():
            counts[held.tenant] = counts.get(held.tenant, 0) + held.budget_tokens
        return counts

    def add(self, held: HeldRequest) -> FlowReason | None:
        """Hold a request; the reason of refusal when the queue is full or its bytes are."""
        if len(self._held) >= self._settings.max_held:
            return FlowReason.QUEUE_FULL
        if self.num_bytes + held.num_bytes > self._settings.max_held_bytes:
            return FlowReason.HELD_BYTES
        assert held.request_id not in self._held
        self._held[held.request_id] = held
        self._bands.setdefault(held.traffic_class, _Band()).add(held)
        self.num_bytes += held.num_bytes
        self.num_tokens += held.uncached_tokens
        return None

    def peek(self, now: float) -> HeldRequest | None:
        """The request whose turn it is; it stays until `take` or `remove`. None when nothing may go."""
        starved = self._find_starved(now)
        if starved is not None:
            return starved
        for name in self._open_classes():
            return self._bands[name].head(self._weights, self._settings.quantum_tokens)
        return None

    def take(self, request_id: str, now: float) -> HeldRequest:
        """Serve a request that `peek` gave: it leaves the queue and its tenant pays for it."""
        held = self._held[request_id]
        out_of_turn = self._find_starved(now) is held and not self._is_first_band(held.traffic_class)
        self._turns_since_starved = 0 if out_of_turn else self._turns_since_starved + 1
        self._bands[held.traffic_class].charge(held)
        self.remove(request_id)
        return held

    def remove(self, request_id: str) -> HeldRequest | None:
        """Forget a request whose client left or whose hold ended; None when it is not held."""
        held = self._held.pop(request_id, None)
        if held is None:
            return None
        band = self._bands[held.traffic_class]
        band.remove(held)
        if band.num_held == 0:
            del self._bands[held.traffic_class]
        self.num_bytes -= held.num_bytes
        self.num_tokens -= held.uncached_tokens
        return held

    def expire(self, now: float) -> list[HeldRequest]:
        """Remove and return requests held past their bound."""
        expired = [held for held in self._held.values() if held.expires_at <= now]
        for held in expired:
            self.remove(held.request_id)
        return expired

    def next_expiry(self) -> float | None:
        """When the next hold ends."""
        return min((held.expires_at for held in self._held.values()), default=None)

    def is_gated(self, policy: ClassPolicy) -> bool:
        """Whether a class waits for another class's queue to shorten."""
        return policy.gate_class is not None and self.num_held(policy.gate_class) >= policy.gate_below

    def find_class(self, name: str) -> ClassPolicy:
        """Policy of a class; a neutral one for an unknown name."""
        return self._classes.get(name, _DEFAULT_CLASS)

    def _open_classes(self) -> list[str]:
        """Classes with requests that may go, highest priority first."""
        names = sorted(self._bands, key=lambda name: -self.find_class(name).priority)
        return [name for name in names if not self.is_gated(self.find_class(name))]

    def _is_first_band(self, name: str) -> bool:
        names = self._open_classes()
        return bool(names) and names[0] == name

    def _find_starved(self, now: float) -> HeldRequest | None:
        """The oldest request past the starvation bound, where its turn has come."""
        if self._turns_since_starved < _STARVED_EVERY - 1:
            return None
        oldest = [held for band in self._bands.values() if (held := band.oldest()) is not None]
        held = min(oldest, key=lambda entry: entry.arrived_at, default=None)
        if held is None or now - held.arrived_at < self._settings.starvation_seconds:
            return None
        return held
