"""Watches that die unnoticed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import yaml
from tests.support.kube import wait_for
from tests.support.operator_world import World
from tests.support.silent_proxy import SilentProxy

from millpond_operator.loop.lease import LeaseSettings

pytestmark = pytest.mark.cluster


@pytest.fixture
def proxy(own_world: World) -> Iterator[SilentProxy]:
    config = yaml.safe_load(own_world.kubeconfig.read_text(encoding="utf-8"))
    address = urlsplit(config["clusters"][0]["cluster"]["server"])
    assert address.hostname is not None
    made = SilentProxy(address.hostname, address.port or 443)
    made.start()
    yield made
    made.stop()


def test_op_012_a_change_is_seen_although_the_watches_fell_silent(
    own_world: World, proxy: SilentProxy, tmp_path: Path
) -> None:
    world = own_world
    config = yaml.safe_load(world.kubeconfig.read_text(encoding="utf-8"))
    config["clusters"][0]["cluster"]["server"] = f"https://127.0.0.1:{proxy.port}"
    kubeconfig = tmp_path / "kubeconfig"
    kubeconfig.write_text(yaml.safe_dump(config), encoding="utf-8")
    kubeconfig.chmod(0o600)
    # Resync is far away, so that only the watches can tell.
    lease = LeaseSettings(namespace=world.namespace, duration=6.0, deadline=4.0, period=0.5)
    world.start_operator(
        kubeconfig=kubeconfig,
        watch_inactivity_seconds=3.0,
        resync_seconds=3600.0,
        early_resync_seconds=(),
        lease=lease,
    )
    world.create("silent", replicas=1)
    world.wait_ready("silent")
    proxy.silence()
    world.patch("silent", {"spec": {"replicas": 2}})
    wait_for("the change is seen", lambda: world.list_workloads("silent")[0]["spec"]["replicas"] == 2)
    assert proxy.num_silenced > 0, "nothing was swallowed, so nothing was tested"
    world.wait_ready("silent")
