"""An operator that runs for the whole session in a namespace of its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.fixtures.cluster import Cluster
from tests.support.operator_world import World


@pytest.fixture(scope="session")
def world(crds: Cluster) -> Iterator[World]:
    """Operator, fake kubelet and fake gateways shared by tests that use pools of their own names."""
    made = World(crds.kubeconfig)
    yield made
    made.close()


@pytest.fixture
def own_world(crds: Cluster) -> Iterator[World]:
    """A world of the test's own, without an operator yet."""
    made = World(crds.kubeconfig, start_operator=False)
    yield made
    made.close()
