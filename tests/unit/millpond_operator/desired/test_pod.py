"""The engine's pod: what production needs, what a template may add, and what it may not take away."""

from __future__ import annotations

from typing import Any

import pytest
from tests.support.operator_builders import BUILD, get_role, make_pool

from millpond_common.contract import labels
from millpond_operator.desired.workload import RevisionRecord, make_record


def render(**spec: Any) -> RevisionRecord:
    pool = make_pool(**spec)
    return make_record(pool, get_role(pool), BUILD)


def get_engine(record: RevisionRecord) -> dict[str, Any]:
    return next(c for c in record.template["spec"]["containers"] if c["name"] == labels.ENGINE_CONTAINER)


def test_the_pod_meets_the_restricted_profile() -> None:
    spec = render(model={"source": "hf://owner/repo"}).template["spec"]
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert spec["automountServiceAccountToken"] is False
    for container in [*spec["containers"], *spec["initContainers"]]:
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }


def test_every_place_that_is_written_is_a_volume() -> None:
    record = render(model={"source": "hf://owner/repo"})
    mounts = {m["mountPath"]: m for m in get_engine(record)["volumeMounts"]}
    assert set(mounts) == {"/etc/millpond", "/tmp", "/dev/shm", "/models"}
    assert mounts["/models"]["readOnly"] is True
    volumes = {v["name"] for v in record.template["spec"]["volumes"]}
    assert {m["name"] for m in mounts.values()} <= volumes


@pytest.mark.parametrize("seconds", [1, 300, 600, 86400])
def test_op_038_the_grace_period_follows_drain_seconds(seconds: int) -> None:
    record = render(rollout={"drainSeconds": seconds})
    assert record.template["spec"]["terminationGracePeriodSeconds"] > seconds
    assert f"drainSeconds: {seconds}" in record.engine_yaml


def test_the_startup_probe_leaves_time_to_load() -> None:
    probe = get_engine(render(engine={"startupSeconds": 901}))["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] >= 901
    assert probe["httpGet"]["path"] == "/ready"


def test_limits_become_requests_and_what_is_missing_gets_a_floor() -> None:
    resources = get_engine(render(resources={"limits": {"nvidia.com/gpu": 1, "memory": "40Gi"}}))["resources"]
    assert resources["limits"] == {"nvidia.com/gpu": 1, "memory": "40Gi"}
    assert resources["requests"] == {"nvidia.com/gpu": 1, "memory": "40Gi", "cpu": "1"}


def test_a_request_of_the_user_wins_over_limit_and_floor() -> None:
    asked = {"limits": {"cpu": "4", "memory": "8Gi"}, "requests": {"cpu": "500m"}}
    assert get_engine(render(resources=asked))["resources"]["requests"] == {"cpu": "500m", "memory": "8Gi"}


def test_the_fetch_step_asks_for_no_gpu() -> None:
    record = render(model={"source": "hf://owner/repo"}, resources={"limits": {"nvidia.com/gpu": 1}})
    fetch = record.template["spec"]["initContainers"][0]
    assert fetch["name"] == labels.FETCH_CONTAINER
    assert set(fetch["resources"]["requests"]) == {"cpu", "memory"}
    assert fetch["resources"]["limits"] == {}


def test_op_097_what_fetching_needs_reaches_the_fetch_step_only() -> None:
    model = {
        "source": "hf://owner/repo",
        "secretRef": {"name": "hf-token"},
        "env": [{"name": "HTTPS_PROXY", "value": "http://proxy:3128"}],
    }
    record = render(model=model)
    fetch = record.template["spec"]["initContainers"][0]
    assert fetch["envFrom"] == [{"secretRef": {"name": "hf-token"}}]
    assert fetch["env"] == [{"name": "HTTPS_PROXY", "value": "http://proxy:3128"}]
    engine = get_engine(record)
    assert "envFrom" not in engine
    assert "HTTPS_PROXY" not in {variable["name"] for variable in engine["env"]}


def test_op_076_pods_wait_for_no_controller_but_kubernetes_own() -> None:
    """So an upgrade, or an operator that is away, leaves none of them stuck."""
    spec = render(model={"source": "hf://owner/repo"}).template["spec"]
    assert not {"schedulingGates", "readinessGates", "schedulerName"} & spec.keys()
    assert "finalizers" not in render().template["metadata"]


def test_a_template_adds_and_the_operators_parts_stay() -> None:
    template = {
        "metadata": {"labels": {"team": "search"}, "annotations": {"note": "x"}},
        "nodeSelector": {"gpu": "h200"},
        "tolerations": [{"key": "gpu", "operator": "Exists"}],
        "securityContext": {"fsGroup": 1000},
        "priorityClassName": "high",
        "volumes": [{"name": "scratch", "emptyDir": {}}],
        "volumeMounts": [{"name": "scratch", "mountPath": "/scratch"}],
        "topologySpreadConstraints": [
            {"maxSkew": 2, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule"}
        ],
    }
    record = render(template=template)
    spec = record.template["spec"]
    assert record.template["metadata"]["labels"]["team"] == "search"
    assert record.template["metadata"]["labels"][labels.POOL] == "smol"
    assert spec["nodeSelector"] == {"gpu": "h200"}
    assert spec["securityContext"]["fsGroup"] == 1000
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["priorityClassName"] == "high"
    assert [v["name"] for v in spec["volumes"]][-1] == "scratch"
    assert "millpond-config" in [v["name"] for v in spec["volumes"]]
    assert [m["mountPath"] for m in get_engine(record)["volumeMounts"]][-1] == "/scratch"
    assert spec["topologySpreadConstraints"][0]["topologyKey"] == "zone"


def test_extra_arguments_come_last() -> None:
    args = get_engine(render(engine={"extraArgs": ["--log-level", "debug"]}))["args"]
    assert args == ["serve", "--config", "/etc/millpond/engine.yaml", "--log-level", "debug"]


def test_resource_claims_reach_the_engine_container() -> None:
    record = render(
        resources={"limits": {"cpu": "8"}, "claims": [{"name": "gpu"}]},
        template={"resourceClaims": [{"name": "gpu", "resourceClaimTemplateName": "one-h200"}]},
    )
    assert get_engine(record)["resources"]["claims"] == [{"name": "gpu"}]
    assert record.template["spec"]["resourceClaims"] == [
        {"name": "gpu", "resourceClaimTemplateName": "one-h200"}
    ]
    assert "device: Cuda" in record.engine_yaml
