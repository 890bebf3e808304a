"""What `up` decides to do, from what it sees."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from devcluster.decision import Next, Observed, decide
from devcluster.network import CANDIDATES, Ports, make_network
from devcluster.process import Process, fetch_start_ticks, is_alive
from devcluster.record import Record, load_record, parse_record, render_record, save_record

WHOLE = Observed(has_record=True, has_remains=True, control_plane_alive=True, control_plane_answers=True)
WITH_NODE = replace(WHOLE, node_recorded=True, node_alive=True, node_ready=True)


@pytest.mark.parametrize(
    ("observed", "want_node", "expected"),
    [
        (Observed(), False, Next.START),
        (Observed(), True, Next.START),
        (Observed(has_remains=True), False, Next.CLEAN_AND_START),
        (WHOLE, False, Next.NOTHING),
        (WHOLE, True, Next.ADD_NODE),
        (WITH_NODE, True, Next.NOTHING),
        (WITH_NODE, False, Next.NOTHING),
        (replace(WHOLE, control_plane_alive=False), False, Next.CLEAN_AND_START),
        (replace(WHOLE, control_plane_answers=False), True, Next.CLEAN_AND_START),
        (replace(WITH_NODE, node_alive=False, node_ready=False), True, Next.CLEAN_AND_ADD_NODE),
        (replace(WITH_NODE, node_ready=False), True, Next.CLEAN_AND_ADD_NODE),
        (replace(WITH_NODE, node_alive=False, node_ready=False), False, Next.NOTHING),
        (replace(WITH_NODE, control_plane_alive=False), True, Next.CLEAN_AND_START),
    ],
)
def test_up_decides(observed: Observed, want_node: bool, expected: Next) -> None:
    assert decide(observed, want_node=want_node) is expected


def make_record() -> Record:
    return Record(
        version="v1.36.3-abc",
        boot_id="boot",
        programs="/programs",
        network=make_network(CANDIDATES[0], with_link=True),
        ports=Ports(api_server=6443, registry=5000, etcd=1, etcd_peer=2, controller_manager=3, scheduler=4),
        node_name="node",
        processes=(Process("etcd", 12, 345),),
    )


def test_a_record_survives_being_written(tmp_path: Path) -> None:
    save_record(tmp_path / "cluster.json", make_record())
    assert load_record(tmp_path / "cluster.json") == make_record()
    assert [path.name for path in tmp_path.iterdir()] == ["cluster.json"]


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", '{"format": 0}', '{"format": 1}', '{"format": 1, "version": "x"}']
)
def test_a_record_that_makes_no_sense_counts_as_none(text: str) -> None:
    assert parse_record(text) is None


def test_a_torn_record_counts_as_none() -> None:
    whole = render_record(make_record())
    for length in range(0, len(whole) - 2, 40):
        assert parse_record(whole[:length]) is None


def test_another_process_with_the_same_number_is_not_ours() -> None:
    ticks = fetch_start_ticks(1)
    assert ticks is not None
    assert is_alive(Process("init", 1, ticks))
    assert not is_alive(Process("init", 1, ticks + 1))
    assert not is_alive(Process("gone", 2**22 + 1, ticks))
