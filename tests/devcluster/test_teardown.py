"""Nothing stays: after `down`, after every process was killed, after the driver itself was killed."""

from __future__ import annotations

import contextlib
import os
import signal

import pytest
from tests.devcluster import machine
from tests.devcluster.conftest import Driver
from tests.support.kube import Kube, Manifest, wait_for

from devcluster.paths import Layout
from devcluster.process import find_marked
from devcluster.record import Record, load_record

pytestmark = [pytest.mark.cluster, pytest.mark.node, pytest.mark.usefixtures("root")]


def run_a_pod(layout: Layout) -> None:
    """Run a pod of the sandbox image, which is there without a push, with a volume that the kubelet mounts."""
    kube = Kube(layout.admin_kubeconfig)
    pod: Manifest = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "sleeper"},
        "spec": {
            "containers": [
                {
                    "name": "sleeper",
                    "image": "registry.millpond.local:5000/devcluster/pause:1",
                    "volumeMounts": [{"name": "memory", "mountPath": "/memory"}],
                }
            ],
            "volumes": [{"name": "memory", "emptyDir": {"medium": "Memory"}}],
        },
    }
    kube.apply(pod)
    wait_for(
        "the pod runs",
        lambda: kube.get("v1", "Pod", "sleeper")["status"].get("phase") == "Running",
    )


def assert_nothing_left(driver: Driver, before: machine.Machine, namespaces: frozenset[str]) -> None:
    layout = driver.layout
    assert machine.look(layout) == before
    assert machine.list_processes(layout) == frozenset()
    assert machine.list_mounts(layout) == []
    assert machine.list_cgroups(layout) == ()
    assert not layout.run.exists()
    assert not layout.record.exists()
    assert machine.list_all_namespaces() & namespaces == frozenset()


def load(layout: Layout) -> Record:
    record = load_record(layout.record)
    assert record is not None
    return record


def kill_everything(layout: Layout) -> None:
    for pid in find_marked(layout):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def test_down_leaves_nothing(driver: Driver) -> None:
    before = machine.look(driver.layout)
    up = driver.run("up", "--node")
    assert up.returncode == 0, up.stderr
    run_a_pod(driver.layout)
    during, processes = machine.look(driver.layout), machine.list_processes(driver.layout)
    namespaces = machine.list_namespaces(driver.layout)
    # The comparison afterwards means something only if there was something.
    assert len(processes) >= 15, "control plane, node, shim, sandbox and container"
    assert len(namespaces) >= 4
    assert machine.list_cgroups(driver.layout)
    assert during.addresses
    assert during.routes
    assert (during.settings, during.firewall) == (before.settings, before.firewall), "not even while it runs"
    down = driver.run("down")
    assert down.returncode == 0, down.stderr
    assert_nothing_left(driver, before, namespaces)
    assert machine.list_all_namespaces() & namespaces == frozenset()
    assert driver.run("status").returncode == 3


def test_two_ups_make_one_cluster_and_a_node_is_added_in_place(driver: Driver) -> None:
    both = [driver.start("up"), driver.start("up")]
    said = [process.communicate(timeout=200)[1] for process in both]
    assert [process.returncode for process in both] == [0, 0], said
    assert sum("etcd and API server" in text for text in said) == 1
    first = load(driver.layout)
    assert driver.run("up", "--node").returncode == 0
    second = load(driver.layout)
    assert second.find("kube-apiserver") == first.find("kube-apiserver"), "the running API server goes on"
    assert second.node_started
    for again in (["up", "--node"], ["up"]):
        done = driver.run(*again)
        assert done.returncode == 0, done.stderr
        assert "etcd and API server" not in done.stderr
        assert load(driver.layout) == second, "nothing was started again"


def test_up_repairs_a_node_that_lost_a_program_and_a_cluster_that_lost_all(driver: Driver) -> None:
    before = machine.look(driver.layout)
    assert driver.run("up", "--node").returncode == 0
    run_a_pod(driver.layout)
    first, namespaces = load(driver.layout), machine.list_namespaces(driver.layout)
    kill_kubelet(driver.layout)
    repaired = driver.run("up", "--node")
    assert repaired.returncode == 0, repaired.stderr
    assert "stopped the node that was not whole" in repaired.stderr
    assert load(driver.layout).find("kube-apiserver") == first.find("kube-apiserver")
    wait_for("the pod runs again", lambda: is_running(driver.layout))

    namespaces |= machine.list_namespaces(driver.layout)
    kill_everything(driver.layout)
    driver.layout.record.write_text('{"format": 1, "version": "torn')
    status = driver.run("status")
    assert (status.returncode, "`down` removes" in status.stdout) == (3, True)
    again = driver.run("up", "--node")
    assert again.returncode == 0, again.stderr
    assert "removed what an earlier run left" in again.stderr
    run_a_pod(driver.layout)
    assert driver.run("down").returncode == 0
    assert_nothing_left(driver, before, namespaces)


def kill_kubelet(layout: Layout) -> None:
    kubelet = load(layout).find("kubelet")
    assert kubelet is not None
    os.kill(kubelet.pid, signal.SIGKILL)


def is_running(layout: Layout) -> bool:
    status = Kube(layout.admin_kubeconfig).get("v1", "Pod", "sleeper")["status"]
    return any("running" in found["state"] for found in status.get("containerStatuses") or [])


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_up_works_after_its_driver_was_stopped_half_way(driver: Driver, number: signal.Signals) -> None:
    before = machine.look(driver.layout)
    half = driver.start("up")
    log = driver.layout.logs / "kube-apiserver.log"
    wait_for("the API server starts", log.exists)
    half.send_signal(number)
    _, said = half.communicate(timeout=100)
    if number is signal.SIGTERM:
        assert "interrupted" in said
        assert_nothing_left(driver, before, frozenset())
        return
    assert find_marked(driver.layout), "the API server is still there"
    again = driver.run("up")
    assert again.returncode == 0, again.stderr
    assert "removed what an earlier run left" in again.stderr
    assert driver.run("down").returncode == 0
    assert_nothing_left(driver, before, frozenset())
