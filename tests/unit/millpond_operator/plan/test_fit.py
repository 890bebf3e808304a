"""Memory is judged before a replica starts, from sizes somebody told, and never from a guess."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from tests.support.operator_builders import (
    NOW,
    SETTINGS,
    get_reasons,
    get_role,
    list_applied,
    make_container,
    make_living,
    make_pod,
    make_pool,
    make_revision,
    make_snapshot,
)

from millpond_common.contract.model_facts import ModelFacts, dump_facts
from millpond_common.contract.reasons import ConditionReason, ConditionType
from millpond_operator.api.pool import InferencePool
from millpond_operator.api.status import dump_status
from millpond_operator.desired.model import make_files_digest
from millpond_operator.plan.capacity import compute_rooms
from millpond_operator.plan.devices import find_device_memory
from millpond_operator.plan.fit import judge_fit
from millpond_operator.plan.known_model import make_status, needs_device_memory
from millpond_operator.plan.planner import plan
from millpond_operator.plan.snapshot import DeviceMemory

LLAMA_13B = ModelFacts(
    num_parameters=13_015_864_320,
    dtype="BFloat16",
    num_layers=40,
    num_kv_heads=40,
    head_dim=128,
    max_model_tokens=32768,
)
LLAMA_8B = ModelFacts(
    num_parameters=8_030_261_248,
    dtype="BFloat16",
    num_layers=32,
    num_kv_heads=8,
    head_dim=128,
    max_model_tokens=131072,
)
GPU_24 = DeviceMemory(24 << 30, "label nvidia.com/gpu.memory of node a")
GPU_80 = DeviceMemory(80 << 30, "label nvidia.com/gpu.memory of node a")


def make_gpu_pool(
    *, tokens: int = 32768, status: dict[str, Any] | None = None, **engine: Any
) -> InferencePool:
    return make_pool(
        model={"source": "hf://owner/model"},
        resources={"limits": {"nvidia.com/gpu": engine.get("tensorParallelSize", 1)}},
        engine={"maxModelTokens": tokens, **engine},
        status=status,
    )


def judge(pool: InferencePool, facts: ModelFacts | None, memory: DeviceMemory | None) -> tuple[Any, str, str]:
    found = judge_fit(pool, get_role(pool), facts, memory)
    return found.status, found.reason, found.message


def test_op_091_a_model_larger_than_the_gpu_is_refused_with_weights_kv_and_free_memory() -> None:
    status, reason, message = judge(make_gpu_pool(), LLAMA_13B, GPU_24)
    assert (status, reason) == (False, ConditionReason.MODEL_TOO_LARGE)
    assert "weights 24.24 GiB" in message
    assert "KV of one sequence of 32768 tokens 25.00 GiB" in message
    assert "a replica gets 24.00 GiB" in message
    assert "free after weights 0.00 GiB" in message
    assert "the weights alone do not fit" in message


def test_op_091_an_unknown_model_is_allowed_and_said_so() -> None:
    status, reason, message = judge(make_gpu_pool(), None, GPU_24)
    assert (status, reason) == (None, ConditionReason.MODEL_SIZE_UNKNOWN)
    assert "not known yet" in message
    assert "nothing is refused" in message


def test_op_091_weights_that_fit_without_room_for_one_sequence_are_refused_with_what_fits() -> None:
    status, _, message = judge(make_gpu_pool(tokens=131072), LLAMA_8B, GPU_24)
    # 24 GiB less 14.96 GiB of weights leave 9.04 GiB, 90 % of it 8.14 GiB, at 128 KiB a token.
    assert status is False
    assert "for KV: 8.14 GiB" in message
    assert "about 66668 fit" in message
    tokens = 66668 // 16 * 16
    assert judge(make_gpu_pool(tokens=tokens), LLAMA_8B, GPU_24)[0] is True
    assert judge(make_gpu_pool(tokens=tokens + 32), LLAMA_8B, GPU_24)[0] is False


@pytest.mark.parametrize(
    ("engine", "facts", "memory", "status"),
    [
        ({}, LLAMA_13B, GPU_80, True),
        ({"tensorParallelSize": 4}, LLAMA_13B, GPU_24, True),
        ({"dtype": "Float32"}, LLAMA_13B, GPU_80, False),
        ({"kvCache": {"deviceMemory": "60Gi"}}, LLAMA_13B, GPU_80, False),
        ({"kvCache": {"deviceMemory": "55Gi"}}, LLAMA_13B, GPU_80, True),
        ({"extraArgs": ["--runner", "fake"]}, LLAMA_13B, GPU_24, None),
        ({"extraArgs": ["--dtype=Float16"]}, LLAMA_13B, GPU_24, None),
        ({"extraArgs": ["--log-level=debug"]}, LLAMA_13B, GPU_24, False),
        ({}, LLAMA_13B, DeviceMemory(None, "node b has no label"), None),
        ({}, LLAMA_13B, None, None),
    ],
)
def test_what_the_spec_says_changes_the_need(
    engine: dict[str, Any], facts: ModelFacts, memory: DeviceMemory | None, status: bool | None
) -> None:
    assert judge(make_gpu_pool(**engine), facts, memory)[0] is status


@pytest.mark.parametrize(
    ("limits", "cache", "status"),
    [
        ({"memory": "24Gi"}, {}, True),
        ({"memory": "15Gi"}, {}, False),
        ({"memory": "24Gi"}, {"hostMemory": "8300Mi"}, False),
        ({"cpu": "4"}, {}, None),
    ],
)
def test_on_a_cpu_the_limit_of_memory_counts(
    limits: dict[str, str], cache: dict[str, str], status: bool | None
) -> None:
    pool = make_pool(
        model={"source": "hf://owner/model"}, resources={"limits": limits}, engine={"kvCache": cache}
    )
    assert judge(pool, LLAMA_8B, None)[0] is status


@pytest.mark.parametrize(
    ("wanted", "published", "on_gpu", "loaded"),
    [
        ("Auto", "Float32", True, 2),
        ("Auto", "Float32", False, 4),
        ("Auto", "Float16", False, 2),
        ("Float32", "BFloat16", True, 4),
    ],
)
def test_weights_count_in_the_type_they_are_loaded_in(
    wanted: str, published: Any, on_gpu: bool, loaded: int
) -> None:
    facts = ModelFacts(
        num_parameters=1 << 30, dtype=published, num_layers=1, num_kv_heads=1, head_dim=1, max_model_tokens=1
    )
    limits = {"nvidia.com/gpu": 1} if on_gpu else {"memory": "64Gi"}
    pool = make_pool(model={"source": "hf://o/m"}, resources={"limits": limits}, engine={"dtype": wanted})
    assert f"weights {loaded}.00 GiB" in judge(pool, facts, GPU_24)[2]


# --- the plan -------------------------------------------------------------------------------------------------------


def remember(pool: InferencePool, facts: ModelFacts) -> dict[str, Any]:
    """A status that holds what an earlier replica told."""
    status = make_status(make_files_digest(pool), facts)
    return {"model": json.loads(json.dumps(dump_status(pool.status) | {}))} | {
        "model": {
            "files": status.files,
            "numParameters": facts.num_parameters,
            "dtype": facts.dtype,
            "numLayers": facts.num_layers,
            "numKvHeads": facts.num_kv_heads,
            "headDim": facts.head_dim,
            "maxModelTokens": facts.max_model_tokens,
        }
    }


def test_op_091_a_known_model_that_cannot_fit_starts_no_pod() -> None:
    pool = make_gpu_pool(status=remember(make_gpu_pool(), LLAMA_13B))
    snapshot = make_snapshot(pool, device_memory={"Both": GPU_24})
    assert needs_device_memory(snapshot)
    decided = plan(snapshot, SETTINGS, NOW)
    assert not [name for name in list_applied(decided) if name.startswith("Deployment/smol")]
    reasons = get_reasons(decided)
    assert reasons["ModelFits"][:2] == ("False", "ModelTooLarge")
    assert reasons["Ready"][:2] == ("False", "ModelTooLarge")
    assert "no replica of this revision is started" in reasons["Ready"][2]
    assert reasons["Progressing"][:2] == ("False", "ModelTooLarge")
    assert [note.reason for note in decided.events if note.warning] == ["ModelTooLarge"]
    larger = plan(make_snapshot(pool, device_memory={"Both": GPU_80}), SETTINGS, NOW)
    assert [name for name in list_applied(larger) if name.startswith("Deployment/smol")]
    assert get_reasons(larger)["ModelFits"][:2] == ("True", "ModelFits")


def test_op_091_a_replica_whose_fetch_tells_too_much_gives_its_gpu_back() -> None:
    pool = make_gpu_pool()
    revision = make_revision(pool)
    told = json.dumps({"reason": "Fetched", "message": "9 files", "model": json.loads(dump_facts(LLAMA_13B))})
    fetch = make_container(
        name="fetch-model", is_init=True, ready=True, running=False, exit_code=0, exit_message=told
    )
    pod = make_pod(revision=revision, ready=False, ready_since=None, containers=(fetch, make_container()))
    decided = plan(make_living(pool, pods=(pod,), device_memory={"Both": GPU_24}), SETTINGS, NOW)
    (count,) = [
        body["spec"]["replicas"]
        for name, body in list_applied(decided).items()
        if name == f"Deployment/smol-{revision}"
    ]
    assert count == 0
    assert decided.status is not None
    assert decided.status.model is not None
    assert decided.status.model.to_facts() == LLAMA_13B


def test_op_091_the_size_told_at_the_beginning_of_a_fetch_is_enough() -> None:
    pool = make_gpu_pool()
    pod = make_pod(revision=make_revision(pool), ready=False, ready_since=None)
    living = make_living(pool, pods=(pod,), device_memory={"Both": GPU_24}, announced={pod.uid: LLAMA_13B})
    assert get_reasons(plan(living, SETTINGS, NOW))["ModelFits"][:2] == ("False", "ModelTooLarge")


def test_a_refused_revision_leaves_the_one_that_serves_alone() -> None:
    before = make_gpu_pool(tokens=4096)
    old = make_pod("old", revision=make_revision(before))
    after = make_gpu_pool(tokens=32768, status=remember(before, LLAMA_13B))
    living = make_living(before, pods=(old,))
    snapshot = make_snapshot(
        after,
        pods=(old,),
        children=living.children,
        workloads=living.workloads,
        device_memory={"Both": DeviceMemory(40 << 30, "a label")},
    )
    decided = plan(snapshot, SETTINGS, NOW)
    assert not [name for name in list_applied(decided) if name.startswith("Deployment/smol")]
    assert get_reasons(decided)["Ready"][:2] == ("False", "ModelTooLarge")
    more = msgspec.structs.replace(after, spec=msgspec.structs.replace(after.spec, replicas=3))
    scaled = plan(replace(snapshot, pool=more), SETTINGS, NOW)
    counts = {
        n: b["spec"]["replicas"] for n, b in list_applied(scaled).items() if n.startswith("Deployment/smol")
    }
    assert counts == {f"Deployment/smol-{make_revision(before)}": 3}, (
        "what serves still follows the wanted count"
    )


def test_a_pool_beside_teaches_and_one_with_other_files_does_not() -> None:
    pool = make_gpu_pool()
    same = make_status(make_files_digest(pool), LLAMA_13B)
    other = make_status("another", LLAMA_13B)
    for models, reason in (((same,), "ModelTooLarge"), ((other,), "ModelSizeUnknown")):
        snapshot = make_snapshot(pool, sibling_models=models, device_memory={"Both": GPU_24})
        assert get_reasons(plan(snapshot, SETTINGS, NOW))["ModelFits"][1] == reason
    changed = make_gpu_pool(status=remember(make_pool(model={"source": "hf://owner/old"}), LLAMA_13B))
    decided = plan(make_snapshot(changed, device_memory={"Both": GPU_24}), SETTINGS, NOW)
    assert get_reasons(decided)["ModelFits"][1] == "ModelSizeUnknown"


def test_a_replica_that_has_loaded_the_model_proves_that_it_fits() -> None:
    pool = make_gpu_pool(status=remember(make_gpu_pool(), LLAMA_13B))
    pod = make_pod(revision=make_revision(pool))
    decided = plan(make_living(pool, pods=(pod,), device_memory={"Both": GPU_24}), SETTINGS, NOW)
    status, reason, message = get_reasons(decided)["ModelFits"]
    assert (status, reason) == ("True", "ModelFits")
    assert "has loaded it" in message


def test_without_a_look_at_the_nodes_the_judgement_of_this_generation_stays() -> None:
    kept = {
        "type": "ModelFits",
        "status": "True",
        "reason": "ModelFits",
        "message": "as it was",
        "observedGeneration": 3,
        "lastTransitionTime": "2026-01-01T00:00:00Z",
    }
    for generation, reason in ((3, "ModelFits"), (2, "DeviceMemoryUnknown")):
        status = remember(make_gpu_pool(), LLAMA_13B) | {
            "conditions": [kept | {"observedGeneration": generation}]
        }
        decided = plan(make_snapshot(make_gpu_pool(status=status)), SETTINGS, NOW)
        assert get_reasons(decided)["ModelFits"][1] == reason


# --- nodes ----------------------------------------------------------------------------------------------------------


def make_node(name: str, *, labels: dict[str, str], gpus: str = "1", resource: str = "nvidia.com/gpu") -> Any:
    return {
        "metadata": {"name": name, "labels": labels},
        "status": {
            "conditions": [{"type": "Ready", "status": "True"}],
            "allocatable": {resource: gpus, "pods": "10"} if gpus else {"pods": "10"},
        },
    }


def test_the_memory_of_a_gpu_is_read_from_the_labels_of_nodes_that_may_be_used() -> None:
    pool = make_gpu_pool()
    nodes = [
        make_node("small", labels={"nvidia.com/gpu.memory": "24576"}),
        make_node("large", labels={"nvidia.com/gpu.memory": "81920", "zone": "b"}),
        make_node("plain", labels={}, gpus=""),
    ]
    found = find_device_memory(compute_rooms(nodes, []), get_role(pool), {})
    assert found == DeviceMemory(80 << 30, "label nvidia.com/gpu.memory of node large")
    selected = {"nodeSelector": {"zone": "b"}}
    nodes[1]["spec"] = {"taints": [{"key": "gpu", "effect": "NoSchedule"}]}
    tainted = find_device_memory(compute_rooms(nodes, []), get_role(pool), selected)
    assert tainted == DeviceMemory(None, "no node that the replicas may use has nvidia.com/gpu")


@pytest.mark.parametrize("label", [{}, {"nvidia.com/gpu.memory": "much"}, {"nvidia.com/gpu.memory": "0"}])
def test_one_silent_node_makes_the_memory_unknown(label: dict[str, str]) -> None:
    nodes = [
        make_node("told", labels={"nvidia.com/gpu.memory": "24576"}),
        make_node("silent", labels=label),
    ]
    found = find_device_memory(compute_rooms(nodes, []), get_role(make_gpu_pool()), {})
    assert found == DeviceMemory(None, "node silent has no label nvidia.com/gpu.memory")


def test_amd_s_label_has_a_unit_of_its_own() -> None:
    pool = make_pool(resources={"limits": {"amd.com/gpu": 1}})
    nodes = [make_node("a", labels={"amd.com/gpu.vram": "64G"}, resource="amd.com/gpu")]
    assert find_device_memory(compute_rooms(nodes, []), get_role(pool), {}) == DeviceMemory(
        64 << 30, "label amd.com/gpu.vram of node a"
    )
    assert find_device_memory(compute_rooms(nodes, []), get_role(make_pool()), {}) is None


def test_the_condition_is_in_its_place() -> None:
    kinds = [kind.value for kind in ConditionType]
    assert kinds.index("ModelFits") == kinds.index("ModelAvailable") + 1
