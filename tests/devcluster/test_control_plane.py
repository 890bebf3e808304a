"""What the control plane alone must do, on the real API server."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from kubernetes import client
from kubernetes.client.exceptions import ApiException
from tests.fixtures.cluster import Cluster
from tests.support.kube import Kube, Manifest, wait_for

pytestmark = pytest.mark.cluster

GROUP = "devcluster.millpond.dev"


def make_crd() -> Manifest:
    spec = {
        "type": "object",
        "properties": {"low": {"type": "integer"}, "high": {"type": "integer"}},
        "x-kubernetes-validations": [
            {"rule": "self.low <= self.high", "message": "low must not exceed high"}
        ],
    }
    schema = {"type": "object", "properties": {"spec": spec}}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"ranges.{GROUP}"},
        "spec": {
            "group": GROUP,
            "scope": "Namespaced",
            "names": {"kind": "Range", "plural": "ranges"},
            "versions": [
                {"name": "v1", "served": True, "storage": True, "schema": {"openAPIV3Schema": schema}}
            ],
        },
    }


def make_range(low: int, high: int) -> Manifest:
    return {
        "apiVersion": f"{GROUP}/v1",
        "kind": "Range",
        "metadata": {"name": "r"},
        "spec": {"low": low, "high": high},
    }


def is_established(crd: Manifest) -> bool:
    conditions = crd.get("status", {}).get("conditions") or []
    return any(found["type"] == "Established" and found["status"] == "True" for found in conditions)


@pytest.fixture
def ranges(kube: Kube) -> Iterator[None]:
    """A custom resource with a CEL rule."""
    crd = make_crd()
    read = (crd["apiVersion"], crd["kind"], crd["metadata"]["name"])
    kube.apply(crd)
    wait_for("the CRD is served", lambda: is_established(kube.get(*read)))
    yield
    kube.delete(*read)


@pytest.mark.usefixtures("ranges")
def test_custom_resources_follow_their_cel_rules(kube: Kube) -> None:
    assert kube.apply(make_range(1, 2))["spec"] == {"low": 1, "high": 2}
    with pytest.raises(ApiException, match="low must not exceed high") as refused:
        kube.apply(make_range(3, 2))
    assert refused.value.status == 422


def test_server_side_apply_keeps_owners_apart(kube: Kube) -> None:
    base = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "shared"}}
    kube.apply({**base, "data": {"a": "1"}}, manager="first")
    kube.apply({**base, "data": {"b": "1"}}, manager="second")
    with pytest.raises(ApiException) as conflict:
        kube.apply({**base, "data": {"a": "2"}}, manager="second", force=False)
    assert conflict.value.status == 409
    assert kube.get("v1", "ConfigMap", "shared")["data"] == {"a": "1", "b": "1"}


def test_owner_garbage_collection_works(kube: Kube) -> None:
    owner = kube.apply({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "owner"}})
    reference = {"apiVersion": "v1", "kind": "ConfigMap", "name": "owner", "uid": owner["metadata"]["uid"]}
    kube.apply(
        {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "child", "ownerReferences": [reference]}}
    )
    kube.delete("v1", "ConfigMap", "owner")
    wait_for("the child follows its owner", lambda: not kube.exists("v1", "Secret", "child"))


def test_a_service_account_has_only_the_rights_it_was_given(cluster: Cluster, kube: Kube) -> None:
    token = kube.core.create_namespaced_service_account_token(
        "default", kube.namespace, {"spec": {"expirationSeconds": 600}}
    ).status.token
    settings = client.Configuration()
    settings.host = kube.api_client.configuration.host
    settings.ssl_ca_cert = kube.api_client.configuration.ssl_ca_cert
    settings.api_key = {"authorization": f"Bearer {token}"}
    weak = client.CoreV1Api(client.ApiClient(settings))
    with pytest.raises(ApiException) as refused:
        weak.list_namespaced_secret(kube.namespace)
    assert refused.value.status == 403
    assert f"system:serviceaccount:{kube.namespace}:default" in refused.value.body


def test_pod_security_is_enforced(kube: Kube) -> None:
    label = {"pod-security.kubernetes.io/enforce": "restricted"}
    kube.core.patch_namespace(kube.namespace, {"metadata": {"labels": label}})
    pod = {"metadata": {"name": "root"}, "spec": {"containers": [{"name": "c", "image": "i"}]}}
    with pytest.raises(ApiException, match="violates PodSecurity"):
        kube.core.create_namespaced_pod(kube.namespace, pod)


def test_blocking_owner_deletion_needs_the_right_to(kube: Kube, cluster: Cluster) -> None:
    """The plugin is off in a plain cluster and on in OpenShift; operators that forget the right fail only there."""
    owner = kube.apply({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "owner"}})
    rules = [{"apiGroups": [""], "resources": ["secrets"], "verbs": ["create"]}]
    rbac = client.RbacAuthorizationV1Api(kube.api_client)
    rbac.create_namespaced_role(kube.namespace, {"metadata": {"name": "writer"}, "rules": rules})
    subject = {"kind": "User", "name": "writer", "apiGroup": "rbac.authorization.k8s.io"}
    role = {"kind": "Role", "name": "writer", "apiGroup": "rbac.authorization.k8s.io"}
    rbac.create_namespaced_role_binding(
        kube.namespace, {"metadata": {"name": "writer"}, "subjects": [subject], "roleRef": role}
    )
    writer = Kube(cluster.kubeconfig, kube.namespace)
    writer.api_client.set_default_header("Impersonate-User", "writer")
    reference = {"apiVersion": "v1", "kind": "ConfigMap", "name": "owner", "uid": owner["metadata"]["uid"]}
    for block, allowed in ((False, True), (True, False)):
        secret = {
            "metadata": {
                "name": f"s-{block}".lower(),
                "ownerReferences": [{**reference, "blockOwnerDeletion": block}],
            }
        }
        if allowed:
            writer.core.create_namespaced_secret(kube.namespace, secret)
            continue
        with pytest.raises(ApiException, match="blockOwnerDeletion") as refused:
            writer.core.create_namespaced_secret(kube.namespace, secret)
        assert refused.value.status == 403


def test_the_audit_log_names_user_verb_and_object(cluster: Cluster, kube: Kube) -> None:
    kube.apply({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "audited"}})

    def find() -> list[Manifest]:
        events = [
            json.loads(line) for line in cluster.audit_log.read_text().splitlines() if kube.namespace in line
        ]
        return [event for event in events if event.get("objectRef", {}).get("name") == "audited"]

    event = wait_for("the audit event", find)[0]
    assert event["verb"] == "patch"
    assert event["user"]["username"] == "millpond-admin"
    assert event["level"] == "Metadata"
