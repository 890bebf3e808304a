"""Sessions share a cluster: who starts it, who stops it. The cluster itself is left out here."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.devcluster.test_decision import make_record

from devcluster import lease, lifecycle
from devcluster.errors import NotRunningError
from devcluster.paths import Layout, find_layout
from devcluster.process import Process, fetch_start_ticks
from devcluster.record import Record


class Cluster:
    """Records what the lease makes of it."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.record: Record | None = None
        self.num_starts = 0

    def up(self, _layout: Layout, *, node: bool, environ: object) -> Record:
        if self.record is None:
            self.num_starts += 1
            self.record = make_record().with_process(Process("kube-apiserver", 7, self.num_starts))
            lifecycle.save_record(self.layout.record, self.record)
        return self.record

    def clean(self, _layout: Layout) -> bool:
        self.record = None
        self.layout.record.unlink(missing_ok=True)
        return True


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    made = Cluster(find_layout({"MILLPOND_STATE_DIR": str(tmp_path)}, tmp_path))
    made.layout.state.mkdir()
    monkeypatch.setattr(lifecycle, "up", made.up)
    monkeypatch.setattr(lifecycle, "clean", made.clean)
    monkeypatch.setattr(lease.build, "find_version_key", lambda: make_record().version)
    return made


@pytest.fixture
def neighbour(cluster: Cluster) -> Iterator[subprocess.Popen[bytes]]:
    """Another session that uses the cluster."""
    process = subprocess.Popen(["sleep", "60"])
    cluster.layout.users.mkdir(parents=True)
    (cluster.layout.users / f"{process.pid}-{fetch_start_ticks(process.pid)}").touch()
    yield process
    process.kill()
    process.wait()


def join(cluster: Cluster) -> Record:
    return lease.join(cluster.layout, node=False, environ={})


def test_a_session_stops_what_it_started(cluster: Cluster) -> None:
    join(cluster)
    assert len(lease.list_users(cluster.layout)) == 1
    assert lease.leave(cluster.layout, keep=False)
    assert cluster.record is None


def test_a_session_leaves_a_cluster_that_was_there(cluster: Cluster) -> None:
    cluster.up(cluster.layout, node=False, environ={})
    join(cluster)
    assert not lease.leave(cluster.layout, keep=False)
    assert cluster.record is not None


def test_joining_again_for_a_node_does_not_change_who_started_it(cluster: Cluster) -> None:
    join(cluster)
    join(cluster)
    assert cluster.num_starts == 1
    assert lease.leave(cluster.layout, keep=False)


def test_the_last_session_stops_it(cluster: Cluster, neighbour: subprocess.Popen[bytes]) -> None:
    join(cluster)
    assert not lease.leave(cluster.layout, keep=False)
    assert cluster.record is not None
    neighbour.kill()
    neighbour.wait()
    join(cluster)
    assert lease.leave(cluster.layout, keep=False), "the other session died without leaving"


def test_keep_keeps_it_for_good(cluster: Cluster) -> None:
    join(cluster)
    assert not lease.leave(cluster.layout, keep=True)
    join(cluster)
    assert not lease.leave(cluster.layout, keep=False)
    assert cluster.record is not None


def test_a_person_who_brings_it_up_takes_it_over(cluster: Cluster) -> None:
    join(cluster)
    lease.keep_up(cluster.layout)
    assert not lease.leave(cluster.layout, keep=False)


def test_programs_of_another_checkout_are_refused(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease.build, "find_version_key", lambda: "v9-other")
    with pytest.raises(NotRunningError, match="make cluster-down"):
        join(cluster)


def test_rubbish_among_the_leases_is_forgotten(cluster: Cluster) -> None:
    cluster.layout.users.mkdir(parents=True)
    for name in ("not-a-lease", "12", f"1-{10**15}"):
        (cluster.layout.users / name).touch()
    assert lease.list_users(cluster.layout) == ()
    assert list(cluster.layout.users.iterdir()) == []
