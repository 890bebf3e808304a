"""The store: newest copy wins, lists correct it, pools find their objects."""

from __future__ import annotations

from typing import Any

from millpond_common.contract import labels
from millpond_operator.desired.kinds import DEPLOYMENT, POD, SERVICE
from millpond_operator.observe.store import (
    GATEWAY_OWNER,
    Store,
    Stored,
    find_owner_pool,
    find_replicas_manager,
)


def make(
    name: str, version: int, *, pool: str | None = "smol", uid: str = "u", namespace: str = "ns"
) -> dict[str, Any]:
    own = {labels.POOL: pool} if pool is not None else {}
    metadata = {
        "name": name,
        "namespace": namespace,
        "uid": uid,
        "resourceVersion": str(version),
        "labels": own,
    }
    return {"metadata": metadata}


def test_an_older_copy_changes_nothing() -> None:
    store = Store()
    assert store.put(POD, make("a", 5))
    assert not store.put(POD, make("a", 5))
    assert not store.put(POD, make("a", 4))
    assert store.put(POD, make("a", 6))


def test_a_late_copy_does_not_bring_a_deleted_object_back() -> None:
    store = Store()
    store.put(POD, make("a", 5))
    assert store.remove(POD, make("a", 7))
    assert not store.put(POD, make("a", 6))
    assert store.get(POD, "ns", "a") is None
    assert store.put(POD, make("a", 8, uid="other"))


def test_the_deletion_of_a_predecessor_leaves_the_successor() -> None:
    store = Store()
    store.put(POD, make("a", 9, uid="new"))
    assert not store.remove(POD, make("a", 8, uid="old"))
    assert store.get(POD, "ns", "a") is not None


def test_a_list_removes_what_vanished_unseen_and_keeps_what_is_newer_than_it() -> None:
    store = Store()
    store.put(POD, make("gone", 3))
    store.put(POD, make("kept", 4))
    store.put(POD, make("later", 12))
    changed = store.replace(POD, [make("kept", 4), make("new", 9)], version=10)
    assert changed == {("ns", "gone"), ("ns", "new")}
    assert {key[1] for key in store.keys(POD)} == {"kept", "later", "new"}
    assert store.is_synced([POD])
    assert not store.is_synced([POD, SERVICE])


def test_objects_are_found_by_their_pool() -> None:
    store = Store()
    store.put(POD, make("a", 1))
    store.put(POD, make("b", 2, pool="other"))
    store.put(POD, make("c", 3, namespace="elsewhere"))
    assert [stored.body["metadata"]["name"] for stored in store.list_of_pool(POD, "ns", "smol")] == ["a"]
    store.put(POD, make("a", 4, pool="other"))
    assert store.list_of_pool(POD, "ns", "smol") == []
    assert len(store.list_of_pool(POD, "ns", "other")) == 2


def test_whose_an_object_is() -> None:
    gateway = make("millpond-gateway", 1, pool=None)
    gateway["metadata"]["labels"] = {labels.COMPONENT: "gateway", labels.PART_OF: "millpond"}
    assert find_owner_pool(gateway) == GATEWAY_OWNER
    assert find_owner_pool(make("a", 1)) == "smol"
    assert find_owner_pool(make("a", 1, pool=None)) is None


def test_who_set_the_replicas_last() -> None:
    def entry(manager: str, time: str, fields: dict[str, Any]) -> dict[str, Any]:
        return {"manager": manager, "time": time, "fieldsV1": {"f:spec": fields}}

    obj = make("d", 1)
    obj["metadata"]["managedFields"] = [
        entry("millpond-operator", "2026-01-01T00:00:00Z", {"f:replicas": {}}),
        entry("kubectl", "2026-01-01T00:00:05Z", {"f:replicas": {}}),
        entry("other", "2026-01-01T00:00:09Z", {"f:paused": {}}),
    ]
    assert find_replicas_manager(obj) == "kubectl"
    store = Store()
    store.put(DEPLOYMENT, obj)
    stored = store.get(DEPLOYMENT, "ns", "d")
    assert stored is not None
    assert stored.replicas_manager == "kubectl"
    assert "managedFields" not in stored.body["metadata"], "the bulk of an object is not kept"


def test_an_object_is_read_once_per_copy() -> None:
    store = Store()
    reads: list[int] = []

    def parse(stored: Stored) -> int:
        reads.append(stored.version)
        return stored.version

    assert store.read(POD, "ns", "a", parse) is None
    store.put(POD, make("a", 5))
    assert [store.read(POD, "ns", "a", parse) for _ in range(3)] == [5, 5, 5]
    store.put(POD, make("a", 4))
    assert store.read_of_pool(POD, "ns", "smol", parse) == [5]
    store.put(POD, make("a", 6))
    assert store.read_of_pool(POD, "ns", "smol", parse) == [6]
    assert reads == [5, 6]
    store.remove(POD, make("a", 7))
    assert store.read(POD, "ns", "a", parse) is None
    assert store.read_of_pool(POD, "ns", "smol", parse) == []


def test_a_namespace_is_listed_from_its_own_objects_alone() -> None:
    store = Store()
    for number in range(3):
        store.put(POD, make(f"p{2 - number}", number + 1, namespace="one"))
        store.put(POD, make(f"q{number}", number + 1, namespace="two"))
    names = [stored.body["metadata"]["name"] for stored in store.list_in_namespace(POD, "one")]
    assert names == ["p0", "p1", "p2"]
    store.put(POD, make("p1", 9, pool="other", namespace="one"))
    store.remove(POD, make("p0", 10, namespace="one"))
    names = [stored.body["metadata"]["name"] for stored in store.list_in_namespace(POD, "one")]
    assert names == ["p1", "p2"]
    assert store.list_in_namespace(SERVICE, "one") == store.list_in_namespace(POD, "none") == []


def test_changes_are_counted_by_kind_and_old_copies_are_none() -> None:
    store = Store()
    store.put(POD, make("a", 5))
    before = store.count_changes(POD)
    store.put(POD, make("a", 5))
    store.put(SERVICE, make("a", 9))
    assert store.count_changes(POD) == before
    store.put(POD, make("a", 6))
    store.remove(POD, make("a", 7))
    assert store.count_changes(POD) == before + 2
