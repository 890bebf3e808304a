"""The operator under the chart's roles and no other rights, in both scopes, through a pool's life; the audit log tells.

Runs on a control plane of its own: an operator of all namespaces has no business on a shared cluster.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from kubernetes import client
from tests.chart.conftest import CHART, Helm, Manifest
from tests.fixtures.crds import CRDS, install_crd
from tests.fixtures.own_cluster import OwnCluster
from tests.support.audit import Call, is_allowed, list_rights, read_calls
from tests.support.fake_gateway import FakeGateway
from tests.support.kube import Kube, wait_for
from tests.support.kubelet import Behaviour, FakeKubelet
from tests.support.pools import make_pool
from tests.support.running_operator import RunningOperator

from millpond_common.contract import labels
from millpond_operator.cli import make_parser, make_settings
from millpond_operator.loop.settings import OperatorSettings
from millpond_operator.observe import references

pytestmark = pytest.mark.cluster

ROLLOUT = {"strategy": "Surge", "drainSeconds": 1}
POOL = ("millpond.dev/v1alpha1", "InferencePool", "life")
SCOPES = ["Cluster", "Namespaces"]
# Rights that no healthy life needs, each with the moment it is for.
RARELY_USED = {
    ("millpond.dev", "inferencepools/finalizers", "update"): "asked by the admission plugin, never called",
    ("millpond.dev", "inferencepools/status", "get"): "read back by tools under the same account",
    ("millpond.dev", "inferencepools", "get"): "read again after a conflict",
    ("rbac.authorization.k8s.io", "clusterroles", "bind"): "asked when the gateway's binding is written",
    ("rbac.authorization.k8s.io", "roles", "bind"): "asked when the gateway's binding is written",
    ("", "secrets", "get"): "only the names in rbac.secretNames",
    ("", "secrets", "delete"): "the gateway switched off",
    ("", "events", "get"): "an event that repeats",
    ("", "events", "patch"): "an event that repeats",
    ("", "pods", "get"): "a name that is taken",
    **{
        (group, resource, verb): moment
        for group, resource in (
            ("", "serviceaccounts"),
            ("", "services"),
            ("apps", "deployments"),
            ("networking.k8s.io", "networkpolicies"),
            ("policy", "poddisruptionbudgets"),
            ("rbac.authorization.k8s.io", "rolebindings"),
        )
        for verb, moment in (
            ("get", "a name that is taken"),
            ("patch", "a child that somebody, or a new version of the operator, changed"),
        )
        if (resource, verb) != ("deployments", "patch")  # every count is written by it
    },
    ("", "configmaps", "get"): "a name that is taken",
    ("", "configmaps", "patch"): "the verdict of a gate",
    ("", "persistentvolumeclaims", "get"): "a name that is taken",
    ("", "persistentvolumeclaims", "patch"): "a claim that the operator made and somebody changed",
    ("coordination.k8s.io", "leases", "create"): "the release's Lease was deleted by hand",
    ("", "pods/log", "get"): "a replica that fetches its model",
    ("", "pods", "delete"): "a replica replaced by hand of the operator",
    ("", "services", "delete"): "a child that is not wanted any more",
    ("", "configmaps", "delete"): "a revision that falls out of the history",
    ("", "serviceaccounts", "delete"): "a child that is not wanted any more",
    ("", "persistentvolumeclaims", "delete"): "a cache that is switched off",
    ("apps", "deployments", "delete"): "a revision that has ended",
    ("policy", "poddisruptionbudgets", "delete"): "a child that is not wanted any more",
    ("networking.k8s.io", "networkpolicies", "delete"): "policies switched off",
    ("rbac.authorization.k8s.io", "rolebindings", "delete"): "the gateway switched off",
}


@dataclass(frozen=True)
class Installation:
    """One release of the chart, with its operator started by the test from the rendered arguments."""

    scope: str
    release_namespace: str
    pool_namespace: str
    user: str
    rules: list[Manifest]
    settings: OperatorSettings
    kubeconfig: Path


def make_namespaces(kube: Kube, *names: str) -> None:
    for name in names:
        kube.core.create_namespace({"metadata": {"name": name}})
        wait_for(
            f"service account of {name}",
            lambda name=name: kube.exists("v1", "ServiceAccount", "default", name),
        )


def install(helm: Helm, own: OwnCluster, scope: str, folder: Path) -> Installation:
    """Install without operator pods (there is no node), then make a kubeconfig that is the service account."""
    mark = scope.lower()
    release, system, apps = f"rel-{mark}", f"system-{mark}", f"apps-{mark}"
    kube = Kube(own.kubeconfig)
    install_crd(kube, CRDS / "inferencepools.millpond.dev.yaml")
    make_namespaces(kube, system, apps)
    flags = [
        "--set",
        f"crds.install=false,operator.replicas=0,gateway.replicas=1,gateway.cpu=4k,scope={scope}",
    ]
    flags += ["--set", "rbac.secretNames={hub}"]
    flags += ["--set", f"namespaces={{{apps}}}"] if scope == "Namespaces" else []
    helm.run(
        "install", release, str(CHART), "--namespace", system, "--kubeconfig", str(own.kubeconfig), *flags
    )
    (deployment,) = kube.list("apps/v1", "Deployment", system)
    spec = deployment["spec"]["template"]["spec"]
    account = spec["serviceAccountName"]
    arguments = [*spec["containers"][0]["args"], f"--operator-namespace={system}", "--listen-host=127.0.0.1"]
    settings = make_settings(make_parser().parse_args([*arguments, "--metrics-port=0", "--health-port=0"]))
    settings = replace(settings, plan=replace(settings.plan, moving_recheck_seconds=0.5))
    return Installation(
        scope=scope,
        release_namespace=system,
        pool_namespace=apps,
        user=f"system:serviceaccount:{system}:{account}",
        rules=list_bound_rules(kube, system, account, [system, apps]),
        settings=settings,
        kubeconfig=write_kubeconfig(own, system, account, folder),
    )


def list_bound_rules(kube: Kube, namespace: str, account: str, places: list[str]) -> list[Manifest]:
    """Rules of every role bound to the account, read back from the cluster."""
    group = "rbac.authorization.k8s.io/v1"
    bindings = kube.list(group, "ClusterRoleBinding")
    bindings += [found for place in places for found in kube.list(group, "RoleBinding", place)]
    wanted = ("ServiceAccount", account, namespace)
    rules: list[Manifest] = []
    for binding in bindings:
        subjects = [(s["kind"], s["name"], s.get("namespace")) for s in binding.get("subjects") or []]
        if wanted in subjects:
            role = binding["roleRef"]
            rules += kube.get(group, role["kind"], role["name"], binding["metadata"].get("namespace"))[
                "rules"
            ]
    assert rules
    return rules


def write_kubeconfig(own: OwnCluster, namespace: str, account: str, folder: Path) -> Path:
    token = own.kubectl("--namespace", namespace, "create", "token", account).strip()
    config = json.loads(own.kubectl("config", "view", "--raw", "-o", "json"))
    (cluster,) = config["clusters"]
    config["users"] = [{"name": account, "user": {"token": token}}]
    config["contexts"] = [{"name": "operator", "context": {"cluster": cluster["name"], "user": account}}]
    config["current-context"] = "operator"
    path = folder / "operator.kubeconfig"
    path.write_text(json.dumps(config), encoding="utf-8")
    return path


def behave(pod: Manifest) -> Behaviour:
    """Engines of the bad image crash; everything else runs at once."""
    if pod["spec"]["containers"][0]["image"].endswith(":bad"):
        ended = {"exitCode": 1, "reason": "Error", "message": "no such model"}
        return Behaviour(waiting={"reason": "CrashLoopBackOff"}, terminated=ended, restarts=3)
    return Behaviour()


def live_through(kube: Kube) -> None:
    """Create, settle, shrink, roll, fail, mend and delete a pool."""
    claims = [
        {"name": "gpu", "resourceClaimTemplateName": "gpus"},
        {"name": "own", "resourceClaimName": "own"},
    ]
    limits = {"limits": {"cpu": "4k", "memory": "1Gi"}, "claims": [{"name": c["name"]} for c in claims]}
    asked = {"devices": {"requests": [{"name": "gpu", "exactly": {"deviceClassName": "gpu.example.com"}}]}}
    for kind, name, spec in (
        ("ResourceClaimTemplate", "gpus", {"spec": asked}),
        ("ResourceClaim", "own", asked),
    ):
        kube.apply(
            {"apiVersion": "resource.k8s.io/v1", "kind": kind, "metadata": {"name": name}, "spec": spec}
        )
    model = {
        "source": "hf://o/r",
        "secretRef": {"name": "hub"},
        "cache": {"type": "Claim", "sizeLimit": "1Gi"},
    }

    def apply(**spec: Any) -> None:
        kube.apply(
            make_pool(
                POOL[2],
                **{
                    "model": model,
                    "resources": limits,
                    "template": {"resourceClaims": claims},
                    "replicas": 2,
                    "rollout": ROLLOUT,
                    **spec,
                },
            )
        )

    def ready() -> bool:
        pool = kube.get(*POOL)
        found = {c["type"]: c for c in pool.get("status", {}).get("conditions") or []}.get("Ready", {})
        current = found.get("observedGeneration") == pool["metadata"]["generation"]
        return current and found["status"] == "True"

    def reason() -> str:
        conditions = kube.get(*POOL).get("status", {}).get("conditions") or []
        return next((c["reason"] for c in conditions if c["type"] == "Ready"), "")

    def see() -> object:
        return kube.get(*POOL).get("status")

    apply()
    wait_for("the pool names the missing Secret", lambda: reason() == "SecretNotFound", seen=see)
    kube.apply(
        {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "hub"}, "stringData": {"HF_TOKEN": "x"}}
    )
    wait_for("the pool is Ready", ready, seen=see)
    apply(replicas=1)
    wait_for("one replica is left", ready, seen=see)
    apply(replicas=1, engine={"image": "engine:bad"})
    wait_for("the failure is named", lambda: reason() == "CrashLoop", seen=see)
    apply(replicas=1, engine={"image": "engine:good"})
    wait_for("the pool is mended", ready, seen=see)
    kube.delete(*POOL)
    wait_for("the pool is gone", lambda: not kube.exists(*POOL))


@pytest.fixture(scope="module", params=SCOPES)
def lived(
    request: pytest.FixtureRequest,
    helm: Helm,
    own_cluster: OwnCluster,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[Installation, list[Call], Kube]]:
    """A release of one scope after a pool's whole life, with the calls its operator made."""
    installation = install(helm, own_cluster, request.param, tmp_path_factory.mktemp("roles"))
    kube = Kube(own_cluster.kubeconfig, installation.pool_namespace)
    kubelet = FakeKubelet(kube, behave=behave)
    kubelet.start()
    operator = RunningOperator(installation.kubeconfig, installation.settings, FakeGateway(kubelet)).start()
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(references, "KEEP_SECONDS", 1.0)
            live_through(kube)
        yield installation, read_calls(own_cluster.audit_log, installation.user), kube
    finally:
        operator.stop()
        kubelet.stop()
        helm.run(
            "uninstall", f"rel-{installation.scope.lower()}", "--namespace", installation.release_namespace,
            "--kubeconfig", str(own_cluster.kubeconfig),
        )  # fmt: skip


Lived = tuple[Installation, list[Call], Kube]


def test_op_089_every_call_of_the_operator_is_covered_by_the_chart_s_rules(lived: Lived) -> None:
    installation, calls, _ = lived
    assert len({(call.verb, call.resource) for call in calls}) > 30
    assert [call for call in calls if call.code == 403] == []
    assert [call for call in calls if not is_allowed(call, installation.rules)] == []


def test_no_right_is_given_without_need(lived: Lived) -> None:
    installation, calls, _ = lived
    used = {(call.group, call.resource, call.verb) for call in calls}
    unused = list_rights(installation.rules) - used - RARELY_USED.keys()
    assert not unused, sorted(unused)


def test_op_086_scope_namespaces_makes_no_call_across_the_cluster(lived: Lived) -> None:
    installation, calls, _ = lived
    across = {(call.verb, call.resource) for call in calls if not call.namespace}
    if installation.scope == "Namespaces":
        assert across == set()
    else:
        assert ("list", "nodes") in across


def test_op_090_children_and_events_are_where_the_pool_is(lived: Lived) -> None:
    installation, calls, kube = lived
    events = [
        e for e in kube.core.list_event_for_all_namespaces().items if e.source.component == labels.MANAGER
    ]
    mine = [
        e
        for e in events
        if e.involved_object.name == POOL[2] and e.metadata.namespace == installation.pool_namespace
    ]
    assert mine
    assert not [e for e in events if e.metadata.namespace == "default"]
    written = {call.namespace for call in calls if call.verb in ("create", "patch", "delete", "update")}
    assert written == {installation.pool_namespace, installation.release_namespace}
    leases = {call.namespace for call in calls if call.resource == "leases"}
    assert leases == {installation.release_namespace}


def test_the_gateway_s_account_may_read_pools_and_pods_of_its_namespace_only(
    lived: Lived, own_cluster: OwnCluster
) -> None:
    installation, _, kube = lived
    place = installation.pool_namespace
    kube.apply(make_pool("other", replicas=0, resources={"limits": {"cpu": "4k"}}))
    binding = ("rbac.authorization.k8s.io/v1", "RoleBinding", labels.GATEWAY_NAME)
    wait_for("the gateway's binding", lambda: kube.exists(*binding))
    account = f"--as=system:serviceaccount:{place}:{labels.GATEWAY_NAME}"

    def may(*question: str) -> str:
        return own_cluster.kubectl("auth", "can-i", account, *question, check=False).strip()

    # The API server follows a new binding a moment later.
    wait_for("the binding counts", lambda: may("list", "inferencepools.millpond.dev", "-n", place) == "yes")
    assert may("watch", "pods", "-n", place) == "yes"
    assert may("get", "secrets/hub", "-n", place) == "yes"
    assert may("get", "secrets/other", "-n", place) == "no"
    assert may("list", "secrets", "-n", place) == "no"
    assert may("patch", "pods", "-n", place) == "no"
    assert may("list", "pods", "-n", "default") == "no"
    kube.delete(POOL[0], POOL[1], "other")
    wait_for("the pool is gone", lambda: not kube.exists(POOL[0], POOL[1], "other"))


def test_pools_follow_the_cluster_s_view_and_edit_roles(lived: Lived, own_cluster: OwnCluster) -> None:
    installation, _, kube = lived
    rbac = client.RbacAuthorizationV1Api(kube.api_client)
    for role in ("view", "edit"):
        body = {
            "metadata": {"name": role},
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": role},
            "subjects": [{"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": role}],
        }
        rbac.create_namespaced_role_binding(installation.pool_namespace, body)

    def may(user: str, verb: str) -> str:
        question = (
            "auth",
            "can-i",
            verb,
            "inferencepools.millpond.dev",
            "-n",
            installation.pool_namespace,
            f"--as={user}",
        )
        return own_cluster.kubectl(*question, check=False).strip()

    wanted = "yes" if installation.scope == "Cluster" else "no"
    wait_for("the first role aggregates", lambda: may("view", "get") == wanted)
    wait_for("the second role aggregates", lambda: may("edit", "patch") == wanted)
    assert may("view", "patch") == "no"
