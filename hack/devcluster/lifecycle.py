"""Bring the cluster up and down: look, decide, act."""

import os
import shutil
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager

from devcluster import build, cgroups, namespaces
from devcluster.controlplane import make_client, start_control_plane
from devcluster.decision import CONTROL_PLANE_ROLES, LINK_ROLE, NODE_ROLE, NODE_ROLES, Next, Observed, decide
from devcluster.errors import DevclusterError, NotRunningError, StartError
from devcluster.lock import hold_lock
from devcluster.node import start_node, stop_node
from devcluster.paths import Layout, find_hidden_dir
from devcluster.process import find_marked, is_alive, stop
from devcluster.record import Record, load_record, read_boot_id, save_record
from devcluster.steps import step
from devcluster.tools import ensure_tools

LOCK_SECONDS = 300.0
STOP_GRACE_SECONDS = 2.0
PATIENCE_SECONDS = 30.0
# etcd, logs and the pause image; a node's images come on top and say so themselves.
RUN_SPACE_BYTES = 2 << 30


def observe(layout: Layout) -> tuple[Observed, Record | None]:
    """Look at record, processes, link and API server."""
    record = load_record(layout.record)
    remains = bool(layout.record.exists() or find_marked(layout) or has_remains(layout))
    if record is None or not record.started or record.boot_id != read_boot_id():
        return Observed(has_remains=remains), None
    alive = {process.role for process in record.processes if is_alive(process)}
    wanted = CONTROL_PLANE_ROLES if not _has_link_role(record) else (LINK_ROLE, *CONTROL_PLANE_ROLES)
    whole = alive.issuperset(wanted)
    client = make_client(layout, record) if whole else None
    node_alive = record.node_started and alive.issuperset(NODE_ROLES)
    observed = Observed(
        has_record=True,
        has_remains=remains,
        control_plane_alive=whole,
        control_plane_answers=client is not None and client.is_ready(),
        node_recorded=record.find(NODE_ROLE) is not None,
        node_alive=node_alive,
        node_ready=client is not None and node_alive and client.is_node_ready(record.node_name),
    )
    return observed, record


def up(layout: Layout, *, node: bool, environ: Mapping[str, str]) -> Record:
    """Bring the cluster up, with a node if asked; does nothing for what already runs.

    Raises:
        DevclusterError: with what to do; whatever this call had started is gone again.
    """
    _check_place(layout)
    ensure_tools(node=node)
    programs = build.build(layout)
    with hold_cluster(layout):
        build.check_space(layout.state, RUN_SPACE_BYTES, "run the cluster")
        observed, record = _observe_patiently(layout, want_node=node)
        todo = decide(observed, want_node=node)
        if todo is Next.NOTHING:
            assert record is not None
            return record
        if todo in {Next.START, Next.CLEAN_AND_START}:
            record = _start(layout, todo, programs_key=programs.name, environ=environ)
        assert record is not None
        return _add_node(layout, record, todo) if node else record


def down(layout: Layout) -> bool:
    """Stop everything and forget the cluster's objects; returns whether there was anything."""
    if not layout.state.exists():
        return False
    with hold_cluster(layout):
        return clean(layout)


def wipe(layout: Layout) -> None:
    """`down`, then remove images, logs, and the built programs."""
    down(layout)
    for folder in (layout.state, layout.cache):
        if folder.exists():
            shutil.rmtree(folder)


def hold_cluster(layout: Layout) -> AbstractContextManager[None]:
    """Keep other commands from changing the cluster."""
    return hold_lock(layout.lock, deadline_seconds=LOCK_SECONDS)


def require_record(layout: Layout, *, node: bool = False) -> Record:
    """The record of a running cluster.

    Raises:
        NotRunningError: it does not run, or has no node where one is needed.
    """
    observed, record = observe(layout)
    if record is None or not observed.control_plane_answers:
        raise NotRunningError("no cluster is up: run `python -m devcluster up`")
    if node and not observed.node_alive:
        raise NotRunningError("the cluster has no node: run `python -m devcluster up --node`")
    return record


def has_remains(layout: Layout) -> bool:
    """Whether a run folder, network link or cgroup of ours exists."""
    return layout.run.exists() or namespaces.has_link(layout) or bool(cgroups.list_cgroups(layout.cgroup))


def clean(layout: Layout) -> bool:
    """End every process of this cluster, remove its link, cgroups and run folder; returns whether there was anything.

    Raises:
        StartError: the kernel would not let go of something, which the message names.
    """
    marked = find_marked(layout)
    if not (marked or has_remains(layout) or layout.record.exists()):
        return False
    # A short grace is enough: what these programs would save is forgotten anyway.
    stuck = stop(marked, grace_seconds=STOP_GRACE_SECONDS)
    if stuck:
        raise StartError(
            f"processes {', '.join(map(str, stuck))} do not end: see what they wait for in /proc/PID/stack"
        )
    if os.geteuid() == 0:
        namespaces.delete_link(layout)
        cgroups.delete_cgroups(layout.cgroup)
    if layout.run.exists():
        shutil.rmtree(layout.run)
    layout.record.unlink(missing_ok=True)
    return True


def _check_place(layout: Layout) -> None:
    for folder in (layout.state, layout.cache):
        hidden = find_hidden_dir(folder) if os.geteuid() == 0 else None
        if hidden is not None:
            raise DevclusterError(
                f"{folder} lies below {hidden}, which the node covers with its own:"
                " set MILLPOND_STATE_DIR and MILLPOND_CACHE_DIR to folders elsewhere"
            )


def _observe_patiently(layout: Layout, *, want_node: bool) -> tuple[Observed, Record | None]:
    """Give programs that run but do not answer a while: on a busy machine that is no reason to start over."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        observed, record = observe(layout)
        slow = observed.control_plane_alive and not observed.control_plane_answers
        slow |= want_node and observed.node_alive and not observed.node_ready
        if not slow or time.monotonic() > deadline:
            return observed, record
        time.sleep(0.5)


def _has_link_role(record: Record) -> bool:
    return record.find(LINK_ROLE) is not None


def _start(layout: Layout, todo: Next, *, programs_key: str, environ: Mapping[str, str]) -> Record:
    if todo is Next.CLEAN_AND_START:
        with step(f"removed what an earlier run left ({todo.value})"):
            clean(layout)
    if layout.logs.exists():
        shutil.rmtree(layout.logs)
    programs = layout.cache / programs_key

    def save(record: Record) -> None:
        save_record(layout.record, record)

    try:
        return start_control_plane(layout, programs, programs_key, environ, save)
    except BaseException:
        clean(layout)
        raise


def _add_node(layout: Layout, record: Record, todo: Next) -> Record:
    if todo is Next.CLEAN_AND_ADD_NODE:
        with step("stopped the node that was not whole"):
            record = stop_node(layout, record)
            save_record(layout.record, record)

    def save(changed: Record) -> None:
        nonlocal record
        record = changed
        save_record(layout.record, changed)

    try:
        return start_node(layout, record, save)
    except BaseException:
        save_record(layout.record, stop_node(layout, record))
        raise
