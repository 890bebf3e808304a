"""Status, scale and the printed table on the real API server."""

from __future__ import annotations

import json
from typing import Any

import pytest
from kubernetes.client.exceptions import ApiException
from tests.cluster.crd.conftest import read_causes
from tests.support.kube import Kube, Manifest, wait_for
from tests.support.pools import make_pool, make_scaled_pool, make_split_pool

from millpond_common.contract import labels
from millpond_operator.api import dump_status, parse_pool

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("crds")]

TIME = "2026-01-02T03:04:05Z"
READY = {
    "type": "Ready", "status": "True", "reason": "Answering", "message": "2 of 2 replicas answer",
    "observedGeneration": 1, "lastTransitionTime": TIME,
}  # fmt: skip
STATUS: Manifest = {
    "observedGeneration": 1,
    "modelName": "tiny",
    "replicas": 2,
    "readyReplicas": 2,
    "updatedReplicas": 2,
    "desiredReplicas": 2,
    "selector": f"{labels.COMPONENT}=engine,{labels.POOL}=pool",
    "endpoint": "http://millpond-gateway.apps.svc/v1",
    "revision": "5f7d",
    "conditions": [READY],
    "scaling": {
        "recommendation": 2, "decision": 2, "reason": "WithinLimits", "demandTokensPerSecond": 900,
        "capacityTokensPerSecond": 1500, "observedAt": TIME,
    },
    "roles": [{"name": "Both", "replicas": 2, "readyReplicas": 2, "selector": "a=b"}],
    "draining": [{"replica": "pool-1", "numRequests": 3, "deadline": TIME}],
}  # fmt: skip


def write_status(kube: Kube, status: Manifest, name: str = "pool") -> Manifest:
    return kube.patch_status({**make_pool(name), "status": status})


def request(kube: Kube, method: str, path: str, body: Any = None, **options: Any) -> Manifest:
    base = f"/apis/millpond.dev/v1alpha1/namespaces/{kube.namespace}/inferencepools"
    done = kube.dynamic.request(method, base + path, body=body, serialize=False, **options)
    return dict(json.loads(done.data))


def set_scale(kube: Kube, replicas: int, name: str = "pool") -> Manifest:
    patch = {"spec": {"replicas": replicas}}
    return request(kube, "PATCH", f"/{name}/scale", patch, content_type="application/merge-patch+json")


def test_status_is_written_apart_from_spec_and_read_by_the_view(kube: Kube) -> None:
    kube.create(make_pool(replicas=2) | {"status": STATUS})
    assert "status" not in kube.get("millpond.dev/v1alpha1", "InferencePool", "pool")
    stored = write_status(kube, STATUS)
    assert stored["status"] == STATUS
    assert stored["metadata"]["generation"] == 1
    assert dump_status(parse_pool(stored).status) == STATUS


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"conditions": [{**READY, "reason": ""}]}, "status.conditions[0].reason"),
        ({"conditions": [{**READY, "status": "Yes"}]}, "status.conditions[0].status"),
        ({"conditions": [{**READY, "message": "x" * 4097}]}, "status.conditions[0].message"),
        ({"roles": [{"name": "Helper"}]}, "status.roles[0].name"),
        ({"replicas": -1}, "status.replicas"),
    ],
)
def test_a_wrong_status_is_refused(kube: Kube, change: Manifest, field: str) -> None:
    kube.create(make_pool())
    with pytest.raises(ApiException) as refused:
        write_status(kube, change)
    assert [cause for cause in read_causes(refused.value) if cause.field == field]


def test_the_table_shows_what_a_user_asks_first(kube: Kube) -> None:
    kube.create(make_pool(replicas=2))
    write_status(kube, STATUS)
    table = request(kube, "GET", "", header_params={"Accept": "application/json;as=Table;v=v1;g=meta.k8s.io"})
    columns = [(column["name"], column["priority"]) for column in table["columnDefinitions"]]
    assert columns == [
        ("Name", 0), ("Model", 0), ("Desired", 0), ("Ready", 0), ("Status", 0), ("Endpoint", 0), ("Age", 0), ("Reason", 1),
    ]  # fmt: skip
    (row,) = table["rows"]
    cells = row["cells"]
    assert cells[:6] == ["pool", "tiny", 2, 2, "True", STATUS["endpoint"]]
    assert cells[7] == "Answering"


def test_short_name_and_category_lead_to_our_kind(kube: Kube) -> None:
    names = kube.resource("millpond.dev/v1alpha1", "InferencePool")
    assert names.short_names == ["mpool"]
    assert names.categories == ["millpond"]


def test_scale_reads_and_writes_the_count(kube: Kube) -> None:
    kube.create(make_pool(replicas=2))
    write_status(kube, STATUS)
    scale = request(kube, "GET", "/pool/scale")
    assert scale["spec"] == {"replicas": 2}
    assert scale["status"] == {"replicas": 2, "selector": STATUS["selector"]}
    set_scale(kube, 5)
    assert kube.get("millpond.dev/v1alpha1", "InferencePool", "pool")["spec"]["replicas"] == 5


def test_scale_of_a_pool_without_a_count_can_be_written_and_then_read(kube: Kube) -> None:
    """Absence means one replica; the API server has no number to show for it until somebody writes one."""
    kube.create(make_pool())
    with pytest.raises(ApiException) as unread:
        request(kube, "GET", "/pool/scale")
    assert ".spec.replicas" in unread.value.body
    set_scale(kube, 3)
    assert request(kube, "GET", "/pool/scale")["spec"] == {"replicas": 3}


@pytest.mark.parametrize("make", [make_scaled_pool, make_split_pool])
def test_scale_is_refused_where_somebody_else_owns_the_count(kube: Kube, make: Any) -> None:
    kube.create(make())
    with pytest.raises(ApiException) as refused:
        set_scale(kube, 3)
    assert refused.value.status == 422
    assert "replicas" in refused.value.body


def test_op_049_an_hpa_finds_a_selector_it_can_use(kube: Kube) -> None:
    """The HPA gets as far as asking for metrics, which this cluster does not serve; the selector is no obstacle."""
    kube.create(make_pool(replicas=2))
    write_status(kube, STATUS)
    kube.apply(make_hpa("pool"))

    def read_conditions() -> dict[str, str]:
        hpa = kube.get("autoscaling/v2", "HorizontalPodAutoscaler", "pool")
        found = hpa.get("status", {}).get("conditions") or []
        return {condition["type"]: condition["reason"] for condition in found}

    found = wait_for(
        "the HPA looks at the pool",
        lambda: "ScalingActive" in read_conditions() and read_conditions(),
        seconds=60,
    )
    assert found["AbleToScale"] == "SucceededGetScale"
    assert found["ScalingActive"] != "InvalidSelector"


def make_hpa(name: str) -> Manifest:
    target = {"apiVersion": "millpond.dev/v1alpha1", "kind": "InferencePool", "name": name}
    metric = {
        "type": "Resource",
        "resource": {"name": "cpu", "target": {"type": "Utilization", "averageUtilization": 50}},
    }
    return {
        "apiVersion": "autoscaling/v2",
        "kind": "HorizontalPodAutoscaler",
        "metadata": {"name": name},
        "spec": {"scaleTargetRef": target, "minReplicas": 1, "maxReplicas": 4, "metrics": [metric]},
    }
