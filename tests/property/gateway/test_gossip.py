"""Shared decisions converge under loss, reordering, duplication, restarts and partitions."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.routing import make_cold, make_endpoints, make_router, place

from millpond_gateway.routing.router import Router
from millpond_gateway.routing.shared import SharedDecisions
from millpond_gateway.routing.splitmix import SplitMix

NAMES = ("a", "b", "c")


class Node:
    """A gateway process with its inbox of undelivered messages."""

    def __init__(self, name: str, epoch: int, replicas: int = 3) -> None:
        self.name = name
        self.router: Router = make_router(replicas, seed=epoch)
        self.shared = SharedDecisions(origin=name, epoch=epoch)
        self.shared.attach(self.router)
        self.open: list[int] = []


class Network:
    """Three nodes, and messages in flight that a test delivers, loses or repeats in any order."""

    def __init__(self) -> None:
        self.now = 0.0
        self.epoch = 0
        self.nodes: dict[str, Node] = {}
        self.in_flight: list[tuple[str, bytes]] = []
        for name in NAMES:
            self.start(name)

    def start(self, name: str) -> None:
        self.epoch += 1
        self.nodes[name] = Node(name, self.epoch)

    def reserve(self, name: str, number: int) -> None:
        node = self.nodes[name]
        node.open.append(place(node.router, make_cold(number, 16 * (1 + number)), self.now).id)

    def progress(self, name: str, position: int, *, end: bool) -> None:
        node = self.nodes[name]
        if node.open:
            reservation = node.open[position % len(node.open)]
            if end:
                node.open.remove(reservation)
                node.router.release(reservation)
            else:
                node.router.first_token(reservation, self.now)

    def broadcast(self, name: str, *, heartbeat: bool) -> None:
        node = self.nodes[name]
        messages = node.shared.heartbeat() if heartbeat else node.shared.flush()
        self.in_flight += [(peer, data) for data in messages for peer in NAMES if peer != name]

    def deliver(self, position: int, *, keep: bool) -> None:
        if self.in_flight:
            position %= len(self.in_flight)
            peer, data = self.in_flight[position] if keep else self.in_flight.pop(position)
            self.in_flight += list(self.nodes[peer].shared.receive(data, self.now))

    def settle(self) -> None:
        """A quiet network: heartbeats each second, everything delivered in order."""
        self.in_flight.clear()
        for _ in range(4):
            self.now += 1.0
            for name in NAMES:
                self.broadcast(name, heartbeat=True)
            while self.in_flight:
                self.deliver(0, keep=False)
            for node in self.nodes.values():
                node.shared.expire(self.now)


names = st.sampled_from(NAMES)
steps = st.one_of(
    st.tuples(st.just("reserve"), names, st.integers(0, 200)),
    st.tuples(st.just("progress"), names, st.integers(0, 50), st.booleans()),
    st.tuples(st.just("broadcast"), names, st.booleans()),
    st.tuples(st.just("deliver"), st.integers(0, 50), st.booleans()),
    st.tuples(st.just("lose"), st.integers(0, 50)),
    st.tuples(st.just("start"), names),
    st.tuples(st.just("wait"), st.floats(0.0, 3.0)),
)


def run(network: Network, step: tuple) -> None:  # type: ignore[type-arg]
    kind, *rest = step
    if kind == "progress":
        network.progress(rest[0], rest[1], end=rest[2])
    elif kind == "broadcast":
        network.broadcast(rest[0], heartbeat=rest[1])
    elif kind == "deliver":
        network.deliver(rest[0], keep=rest[1])
    elif kind == "lose":
        if network.in_flight:
            network.in_flight.pop(rest[0] % len(network.in_flight))
    elif kind == "wait":
        network.now += rest[0]
        for node in network.nodes.values():
            node.shared.expire(network.now)
    else:
        getattr(network, kind)(*rest)


@settings(max_examples=120, deadline=None)
@given(st.lists(steps, max_size=60))
def test_all_gateways_agree_once_the_network_is_quiet(history: list[tuple]) -> None:  # type: ignore[type-arg]
    network = Network()
    for step in history:
        run(network, step)
        for node in network.nodes.values():
            assert all(node.router.load.view(e.uid).queued_tokens >= 0 for e in make_endpoints(3))
    network.settle()
    assert_agreement(network)


def assert_agreement(network: Network) -> None:
    for node in network.nodes.values():
        assert node.router.load.sum_origin(node.name) == {}
        for other in network.nodes.values():
            if other is not node:
                assert node.router.load.sum_origin(other.name) == other.router.load.sum_origin("")


def test_a_long_run_with_a_third_of_messages_lost_exercises_every_repair() -> None:
    network, random = Network(), SplitMix(7)
    for number in range(6000):
        name = NAMES[random.below(3)]
        kind = random.below(10)
        if kind < 3:
            network.reserve(name, number % 200)
        elif kind < 6:
            network.progress(name, random.below(50), end=kind == 5)
        elif kind < 8:
            network.broadcast(name, heartbeat=random.below(4) == 0)
        for _ in range(2):
            if network.in_flight and random.below(3) == 0:
                network.in_flight.pop(random.below(min(len(network.in_flight), 4)))
            network.deliver(random.below(4), keep=random.below(10) == 0)
        if random.below(1500) == 0:
            network.start(name)
        network.now += 0.01
        for node in network.nodes.values():
            node.shared.expire(network.now)
    network.settle()
    assert_agreement(network)
    counts = [node.shared.counts for node in network.nodes.values()]
    assert sum(count.num_gaps for count in counts) > 20
    assert sum(count.num_duplicates for count in counts) > 20
    assert sum(count.num_full_states for count in counts) > 2
    assert sum(count.num_applied for count in counts) > 500


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=200))
def test_garbage_from_a_peer_is_a_typed_error_or_harmless(data: bytes) -> None:
    from millpond_gateway.routing.wire import WireError

    node = Node("a", 1)
    try:
        node.shared.receive(data, 0.0)
    except WireError:
        return
    assert len(node.router.load) == 0
