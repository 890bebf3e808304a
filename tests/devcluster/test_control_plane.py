"""What the control plane alone must do, on the real API server."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest
from kubernetes import client
from kubernetes.client.exceptions import ApiException
from tests.fixtures.cluster import Cluster
from tests.fixtures.crds import wait_until_served
from tests.support.audit import read_events
from tests.support.kube import Kube, Manifest, wait_for

pytestmark = pytest.mark.cluster

GROUP = f"t{uuid.uuid4().hex[:8]}.millpond.dev"
"""A session's own, since others may use the cluster."""


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


@pytest.fixture
def ranges(kube: Kube) -> Iterator[None]:
    """A custom resource with a CEL rule."""
    crd = make_crd()
    read = (crd["apiVersion"], crd["kind"], crd["metadata"]["name"])
    kube.apply(crd)
    wait_until_served(kube, crd)
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

    def find_refusal() -> str:
        try:
            kube.core.create_namespaced_pod(kube.namespace, pod, dry_run="All")
        except ApiException as error:
            return str(error.body)
        return ""

    # The admission plugin sees the label a moment later.
    assert "violates PodSecurity" in wait_for("the pod is refused", find_refusal)


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

    def try_create(*, block: bool) -> ApiException | None:
        owners = [{**reference, "blockOwnerDeletion": block}]
        secret = {"metadata": {"name": f"s-{block}".lower(), "ownerReferences": owners}}
        try:
            writer.core.create_namespaced_secret(kube.namespace, secret)
        except ApiException as error:
            return error
        return None

    # The API server follows a new binding a moment later.
    wait_for("the right to create", lambda: try_create(block=False) is None)
    refused = try_create(block=True)
    assert refused is not None
    assert refused.status == 403
    assert "blockOwnerDeletion" in str(refused.body)


def test_the_audit_log_names_user_verb_and_object(cluster: Cluster, kube: Kube) -> None:
    kube.apply({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "audited"}})

    def find() -> list[Manifest]:
        refs = [
            (event, event.get("objectRef", {}))
            for event in read_events(cluster.audit_log, naming=kube.namespace)
        ]
        wanted = ("audited", kube.namespace)
        return [event for event, ref in refs if (ref.get("name"), ref.get("namespace")) == wanted]

    event = wait_for("the audit event", find)[0]
    assert event["verb"] == "patch"
    assert event["user"]["username"] == "millpond-admin"
    assert event["level"] == "Metadata"
