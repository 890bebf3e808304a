"""Devices asked for by resource claim are counted where that is certain, and are "unknown" everywhere else."""

from __future__ import annotations

from typing import Any

import pytest
from tests.support.operator_builders import (
    NOW,
    SETTINGS,
    get_reasons,
    get_role,
    make_living,
    make_pod,
    make_pool,
    make_revision,
)

from millpond_operator.plan.capacity import compute_capacity, compute_rooms
from millpond_operator.plan.claims import (
    Inventory,
    add_needs,
    find_room,
    list_used_claims,
    parse_class,
    pick_memory,
    read_need,
)
from millpond_operator.plan.planner import plan
from millpond_operator.plan.snapshot import Capacity, ClaimNeed, DeviceMemory

Manifest = dict[str, Any]
DRIVER = "gpu.example.com"
IS_GPU = f"device.driver == '{DRIVER}' && device.attributes['{DRIVER}'].type == 'gpu'"


def make_class(*expressions: str, name: str = "gpu") -> Manifest:
    return {
        "metadata": {"name": name},
        "spec": {"selectors": [{"cel": {"expression": e}} for e in expressions]},
    }


def make_device(name: str, *, kind: str = "gpu", memory: str = "24Gi", **changes: Any) -> Manifest:
    return {
        "name": name,
        "attributes": {"type": {"string": kind}},
        "capacity": {"memory": {"value": memory}} if memory else {},
        **changes,
    }


def make_slice(node: str | None, *devices: Manifest, generation: int = 1, driver: str = DRIVER) -> Manifest:
    place = {"nodeName": node} if node else {"allNodes": True}
    pool = {"name": node or "shared", "generation": generation}
    return {"spec": {"driver": driver, "pool": pool, "devices": list(devices), **place}}


def make_allocated(node: str, *devices: str, **changes: Any) -> Manifest:
    results = [{"driver": DRIVER, "pool": node, "device": device, **changes} for device in devices]
    return {"status": {"allocation": {"devices": {"results": results}}}}


def make_inventory(
    *slices: Manifest, claims: tuple[Manifest, ...] = (), expression: str = IS_GPU
) -> Inventory:
    return Inventory(slices, claims, (make_class(expression), make_class("true", name="other")))


def make_request(**exactly: Any) -> Manifest:
    return {"name": "gpu", "exactly": {"deviceClassName": "gpu", **exactly}}


def make_claiming_pool(**changes: Any) -> Any:
    return make_pool(
        resources={"limits": {"memory": "8Gi"}, "claims": [{"name": "gpu"}]},
        template={"resourceClaims": [{"name": "gpu", "resourceClaimTemplateName": "two-gpus"}]},
        **changes,
    )


@pytest.mark.parametrize(
    ("requests", "chosen", "need"),
    [
        ([make_request()], None, 1),
        ([make_request(count=4)], None, 4),
        ([make_request(count=2), {**make_request(count=3), "name": "more"}], None, 5),
        ([make_request(count=2), {**make_request(count=3), "name": "more"}], "more", 3),
        ([make_request(count=2)], "absent", None),
        ([make_request(allocationMode="All")], None, None),
        ([make_request(selectors=[{"cel": {"expression": "true"}}])], None, None),
        ([{"name": "gpu", "firstAvailable": [{"name": "a", "deviceClassName": "gpu"}]}], None, None),
        ([make_request(), {"name": "nic", "exactly": {"deviceClassName": "nic"}}], None, None),
        ([], None, None),
    ],
)
def test_a_claim_has_a_number_only_where_it_is_exact(
    requests: list[Manifest], chosen: str | None, need: int | None
) -> None:
    found = read_need({"devices": {"requests": requests}}, chosen)
    assert found == (ClaimNeed("gpu", need) if need else None)


def test_claims_of_one_role_are_added() -> None:
    assert add_needs([ClaimNeed("gpu", 1), ClaimNeed("gpu", 2)]) == ClaimNeed("gpu", 3)
    assert add_needs([ClaimNeed("gpu", 1), ClaimNeed("nic", 2)]) is None
    assert add_needs([ClaimNeed("gpu", 1), None]) is None
    assert add_needs([]) is None
    ((used, request),) = list_used_claims(get_role(make_claiming_pool()))
    assert (used.resource_claim_template_name, request) == ("two-gpus", None)


@pytest.mark.parametrize(
    ("expressions", "driver"),
    [
        ([IS_GPU], DRIVER),
        ([f'device.driver == "{DRIVER}"', "device.attributes['a.b'].ready == true"], DRIVER),
        ([f"device.driver == '{DRIVER}' || true"], None),
        (
            [
                f"device.driver == '{DRIVER}' && device.capacity['{DRIVER}'].memory.isGreaterThan(quantity('1Gi'))"
            ],
            None,
        ),
        (["device.attributes['a.b'].type == 'gpu'"], None),
        (["true"], None),
        ([], None),
    ],
)
def test_only_classes_of_plain_equalities_are_understood(expressions: list[str], driver: str | None) -> None:
    found = parse_class(make_class(*expressions))
    assert (found.driver if found is not None else None) == driver


def test_op_092_free_devices_are_what_slices_offer_less_what_claims_hold() -> None:
    inventory = make_inventory(
        make_slice("a", *(make_device(f"gpu-{n}") for n in range(4)), make_device("mig", kind="mig")),
        make_slice(
            "b", make_device("gpu-0", taints=[{"key": "k", "effect": "NoSchedule"}]), make_device("gpu-1")
        ),
        make_slice("c", make_device("gpu-0"), driver="other.example.com"),
        claims=(make_allocated("a", "gpu-0", "gpu-1"), make_allocated("a", "gpu-2", adminAccess=True), {}),
    )
    room = find_room(ClaimNeed("gpu", 2), inventory)
    assert room is not None
    assert room.free == {"a": 2, "b": 1}


def test_an_older_generation_of_a_pool_of_devices_does_not_count() -> None:
    new = make_slice("a", make_device("gpu-0"), generation=2)
    old = make_slice("a", make_device("gpu-0"), make_device("gpu-1"))
    room = find_room(ClaimNeed("gpu", 1), make_inventory(old, new))
    assert room is not None
    assert room.free == {"a": 1}


@pytest.mark.parametrize(
    "inventory",
    [
        make_inventory(make_slice(None, make_device("gpu-0"))),
        make_inventory(make_slice("a", make_device("gpu-0", consumesCounters=[{"counterSet": "x"}]))),
        make_inventory(make_slice("a", make_device("gpu-0")), expression="true"),
        Inventory((), (), ()),
    ],
    ids=["shared by nodes", "parts of one another", "class not understood", "no such class"],
)
def test_what_cannot_be_counted_is_unknown(inventory: Inventory) -> None:
    assert find_room(ClaimNeed("gpu", 1), inventory) is None


def make_node(name: str) -> Manifest:
    return {
        "metadata": {"name": name, "labels": {}},
        "status": {
            "conditions": [{"type": "Ready", "status": "True"}],
            "allocatable": {"cpu": "16", "memory": "64Gi", "pods": "110"},
        },
    }


def test_op_092_replicas_that_fit_are_bounded_by_free_devices() -> None:
    role = get_role(make_claiming_pool())
    rooms = compute_rooms([make_node("a"), make_node("b")], [])
    inventory = make_inventory(
        make_slice("a", *(make_device(f"gpu-{n}") for n in range(5))), make_slice("b", make_device("gpu-0"))
    )
    room = find_room(ClaimNeed("gpu", 2), inventory)
    assert room is not None
    spec = {"containers": [{"resources": {"limits": {"memory": "8Gi"}}}]}
    capacity = compute_capacity(rooms, [("both", role, spec)], {"both": room})
    assert capacity.fitting_replicas == {"both": 2}
    assert capacity.free["devices of class gpu"] == "5"
    assert compute_capacity(rooms, [("both", role, spec)]).fitting_replicas == {}, "unknown, not unlimited"


def test_op_092_status_counts_claimed_devices_and_the_reason_names_them() -> None:
    pool = make_claiming_pool(replicas=2)
    revision = make_revision(pool)
    pods = (
        make_pod("pod-0", revision=revision),
        make_pod("pod-1", revision=revision, ready=False, scheduled=False, unschedulable_message="0/2 nodes"),
    )
    needs = {"Both": ClaimNeed("gpu", 2)}
    capacity = Capacity({"both": 0}, {"memory": "40.0Gi", "devices of class gpu": "1"})
    decided = plan(make_living(pool, pods=pods, claim_needs=needs, capacity=capacity), SETTINGS, NOW)
    assert decided.status is not None
    assert decided.status.roles[0].devices == 2
    status, reason, message = get_reasons(decided)["Ready"]
    assert (status, reason) == ("False", "Unschedulable")
    assert "asks for memory 8Gi, devices of class gpu 2" in message
    assert "devices of class gpu 1" in message
    unknown = plan(make_living(pool, pods=pods), SETTINGS, NOW)
    assert unknown.status is not None
    assert unknown.status.roles[0].devices is None
    assert "devices of claims gpu" in get_reasons(unknown)["Ready"][2]


def test_counted_gpus_are_in_the_status_too() -> None:
    pool = make_pool(resources={"limits": {"nvidia.com/gpu": 2}}, engine={"tensorParallelSize": 2})
    pods = tuple(make_pod(f"pod-{n}", revision=make_revision(pool)) for n in range(3))
    decided = plan(make_living(pool, pods=pods), SETTINGS, NOW)
    assert decided.status is not None
    assert decided.status.roles[0].devices == 6


def test_the_memory_of_claimed_devices_comes_from_their_capacity() -> None:
    inventory = make_inventory(
        make_slice("a", make_device("gpu-0")),
        make_slice("b", make_device("gpu-0", memory="80Gi")),
        make_slice("c", make_device("gpu-0", memory="")),
    )
    room = find_room(ClaimNeed("gpu", 1), inventory)
    assert room is not None
    assert pick_memory(room, ["a", "b"]) == DeviceMemory(80 << 30, "device gpu-0 of node b")
    assert pick_memory(room, ["a", "c"]).num_bytes is None
    assert pick_memory(room, ["z"]).num_bytes is None
