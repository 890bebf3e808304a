"""Share one cluster among test sessions: the first brings it up, the last takes it down.

A session leaves a file with its process number. Whoever leaves last stops the cluster, but only one that a session
had started: a cluster somebody brought up by hand stays.
"""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from devcluster import build, lifecycle
from devcluster.errors import NotRunningError
from devcluster.paths import Layout
from devcluster.process import Process, fetch_start_ticks, is_alive
from devcluster.record import Record, load_record

OWNED = "owned-by-tests"


def join(layout: Layout, *, node: bool, environ: Mapping[str, str]) -> Record:
    """Make sure the cluster runs and count this process among its users.

    Raises:
        DevclusterError: it cannot run; with what to do.
    """
    layout.users.mkdir(parents=True, exist_ok=True)
    _own_lease(layout).touch()  # first, so that a session that leaves right now sees this one
    before = load_record(layout.record)
    record = lifecycle.up(layout, node=node, environ=environ)
    if before is None or before.find("kube-apiserver") != record.find("kube-apiserver"):
        (layout.users / OWNED).touch()
    if record.version != build.find_version_key():
        raise NotRunningError(
            f"the cluster that is up runs {record.version}, not this checkout's programs: run `make cluster-down` first"
        )
    return record


def leave(layout: Layout, *, keep: bool) -> bool:
    """Stop counting this process; returns whether that took the cluster down."""
    if keep:
        keep_up(layout)
    _own_lease(layout).unlink(missing_ok=True)
    with lifecycle.hold_cluster(layout):
        if not (layout.users / OWNED).exists() or list_users(layout):
            return False
        (layout.users / OWNED).unlink()
        return lifecycle.clean(layout)


def keep_up(layout: Layout) -> None:
    """Note that a person wants the cluster: no test session takes it down from now on."""
    (layout.users / OWNED).unlink(missing_ok=True)


def list_users(layout: Layout) -> tuple[Process, ...]:
    """List the sessions that are still alive, and forget the others."""
    if not layout.users.is_dir():
        return ()
    files = {path: _parse_lease(path.name) for path in layout.users.iterdir() if path.name != OWNED}
    for path in select_stale(files):
        path.unlink(missing_ok=True)
    return tuple(user for user in files.values() if user is not None and is_alive(user))


def select_stale(files: Mapping[Path, Process | None]) -> Iterable[Path]:
    """Select the leases whose process is gone."""
    return [path for path, user in files.items() if user is None or not is_alive(user)]


def _own_lease(layout: Layout) -> Path:
    return layout.users / f"{os.getpid()}-{fetch_start_ticks(os.getpid())}"


def _parse_lease(name: str) -> Process | None:
    pid, _, ticks = name.partition("-")
    return Process("user", int(pid), int(ticks)) if pid.isdecimal() and ticks.isdecimal() else None
