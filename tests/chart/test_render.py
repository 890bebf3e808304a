"""The chart under every values file of ci/ and under other names: valid, closed, restricted, consistent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.chart.conftest import CHART, ROOT, Helm, Manifest, Rendered

from millpond_common.contract import labels, ports
from millpond_common.version import __version__
from millpond_operator.cli import make_parser, make_settings

MATRIX: list[Path | None] = [None, *sorted((CHART / "ci").glob("*-values.yaml"))]
IDS = [path.stem if path else "defaults" for path in MATRIX]
NAMES = [("millpond", "millpond-system"), ("foo", "bar"), ("x" * 53, "n" * 63), ("my-millpond", "millpond")]
CLUSTER_SCOPED = {"ClusterRole", "ClusterRoleBinding", "CustomResourceDefinition"}


def walk(value: Any) -> list[Any]:
    """Every value inside a manifest."""
    if isinstance(value, dict):
        return [value, *(inner for item in value.values() for inner in walk(item))]
    if isinstance(value, list):
        return [value, *(inner for item in value for inner in walk(item))]
    return [value]


def list_pod_specs(rendered: Rendered) -> list[Manifest]:
    templates = [found["spec"]["template"]["spec"] for found in rendered.of("Deployment")]
    return templates + [found["spec"] for found in rendered.of("Pod")]


@pytest.mark.parametrize("values", MATRIX, ids=IDS)
def test_lint_is_silent(helm: Helm, values: Path | None) -> None:
    flags = ["--values", str(values)] if values else []
    done = helm.run("lint", "--strict", str(CHART), *flags)
    assert "[WARNING]" not in done.stdout
    assert "[ERROR]" not in done.stdout


@pytest.mark.parametrize(("release", "namespace"), NAMES)
@pytest.mark.parametrize(
    "values", [MATRIX[0], CHART / "ci/monitoring-values.yaml", CHART / "ci/namespaces-values.yaml"]
)
def test_op_074_no_name_assumes_the_release(
    helm: Helm, values: Path | None, release: str, namespace: str
) -> None:
    rendered = helm.template(values=values, release=release, namespace=namespace)
    assert rendered.objects
    seen = [
        (found["kind"], found["metadata"].get("namespace"), found["metadata"]["name"])
        for found in rendered.objects
    ]
    assert len(seen) == len(set(seen))
    for found in rendered.objects:
        assert len(found["metadata"]["name"]) <= 63
        assert ("namespace" in found["metadata"]) is (found["kind"] not in CLUSTER_SCOPED)
    for role in rendered.of("RoleBinding") + rendered.of("ClusterRoleBinding"):
        kind, name = role["roleRef"]["kind"], role["roleRef"]["name"]
        assert [r for r in rendered.of(kind) if r["metadata"]["name"] == name], (
            f"{name} is bound and not made"
        )


def test_cluster_objects_of_two_releases_of_one_name_never_meet(helm: Helm) -> None:
    def names(namespace: str) -> set[str]:
        rendered = helm.template(release="llm-millpond", namespace=namespace)
        return {f["metadata"]["name"] for f in rendered.of("ClusterRole") + rendered.of("ClusterRoleBinding")}

    assert names("one").isdisjoint(names("two"))


@pytest.mark.parametrize("values", MATRIX, ids=IDS)
def test_every_pod_is_restricted(helm: Helm, values: Path | None) -> None:
    for spec in list_pod_specs(helm.template(values=values)):
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["runAsUser"] > 0
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert "hostNetwork" not in spec
        for container in spec["containers"]:
            security = container["securityContext"]
            assert security["allowPrivilegeEscalation"] is False
            assert security["readOnlyRootFilesystem"] is True
            assert security["capabilities"] == {"drop": ["ALL"]}
            assert container["resources"]["requests"]
            assert container["resources"]["limits"]["memory"]


@pytest.mark.parametrize("values", MATRIX, ids=IDS)
def test_the_operator_understands_its_arguments(
    helm: Helm, values: Path | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rendered arguments go through the program's own parser, which refuses an unknown one."""
    for variable in ("POD_NAME", "POD_NAMESPACE"):
        monkeypatch.delenv(variable, raising=False)
    rendered = helm.template(values=values)
    (container,) = rendered.one("Deployment")["spec"]["template"]["spec"]["containers"]
    given = yaml.safe_load(values.read_text(encoding="utf-8")) if values else {}
    settings = make_settings(make_parser().parse_args([*container["args"], "--operator-namespace=x"]))
    build = settings.plan.build
    assert build.gateway_replicas == given.get("gateway", {}).get("replicas", 2)
    assert build.network_policies is given.get("networkPolicies", {}).get("enabled", True)
    assert build.metrics_namespaces == tuple(given.get("networkPolicies", {}).get("metricsNamespaces", ()))
    wanted = () if given.get("scope") != "Namespaces" else tuple(given.get("namespaces", ["millpond-system"]))
    assert settings.namespaces == wanted
    assert build.gateway_role_kind == ("Role" if wanted else "ClusterRole")
    assert settings.lease.name == rendered.one("Deployment")["metadata"]["name"]


@pytest.mark.parametrize("values", MATRIX, ids=IDS)
def test_the_role_gateways_get_is_the_one_the_operator_may_bind(helm: Helm, values: Path | None) -> None:
    rendered = helm.template(values=values)
    args = rendered.one("Deployment")["spec"]["template"]["spec"]["containers"][0]["args"]
    kind, name = (
        next(a.split("=")[1] for a in args if a.startswith(f"--gateway-role-{w}=")) for w in ("kind", "name")
    )
    roles = [role for role in rendered.of(kind) if role["metadata"]["name"] == name]
    if not rendered.of("RoleBinding"):
        return  # rbac.create is false: somebody else makes them
    assert roles
    binds = [rule for role in rendered.of(kind) for rule in role["rules"] if "bind" in rule["verbs"]]
    assert binds
    for rule in binds:
        assert rule["resourceNames"] == [name]
        assert rule["resources"] == [f"{kind.lower()}s"]


@pytest.mark.parametrize("values", MATRIX, ids=IDS)
def test_op_085_no_rule_has_a_wildcard(helm: Helm, values: Path | None) -> None:
    rendered = helm.template(values=values)
    for role in rendered.of("Role") + rendered.of("ClusterRole"):
        for rule in role["rules"]:
            assert "*" not in [*rule["apiGroups"], *rule["resources"], *rule["verbs"]], role["metadata"][
                "name"
            ]
            assert rule.get("resources"), "no rule for URLs outside the resources"


@pytest.mark.parametrize("values", MATRIX, ids=IDS)
def test_secrets_are_readable_by_name_only(helm: Helm, values: Path | None) -> None:
    """The operator makes one Secret of its own, by its name; every other is read at most."""
    rendered = helm.template(values=values)
    args = rendered.one("Deployment")["spec"]["template"]["spec"]["containers"][0]["args"]
    gateway = next(a.split("=")[1] for a in args if a.startswith("--gateway-role-name="))
    for role in rendered.of("Role") + rendered.of("ClusterRole"):
        for rule in role["rules"]:
            if "secrets" in rule["resources"]:
                assert rule["resourceNames"]
                own = rule["resourceNames"] == [labels.GATEWAY_NAME] and role["metadata"]["name"] != gateway
                assert rule["verbs"] == (["get", "create", "patch", "delete"] if own else ["get"])


def test_scope_namespaces_asks_for_nothing_across_the_cluster(helm: Helm) -> None:
    for name in ("namespaces", "own-namespace"):
        rendered = helm.template(values=CHART / "ci" / f"{name}-values.yaml")
        assert rendered.of("ClusterRole") == []
        assert rendered.of("ClusterRoleBinding") == []
        assert rendered.of("Role")


@pytest.mark.parametrize("values", MATRIX, ids=IDS)
def test_op_080_op_081_op_082_op_083_nothing_needs_a_certificate(helm: Helm, values: Path | None) -> None:
    """Rules live in the CRD and nothing converts, so no webhook refuses writes with an old or a missing CA."""
    rendered = helm.template(values=values)
    kinds = {found["kind"] for found in rendered.objects}
    assert not kinds & {
        "ValidatingWebhookConfiguration", "MutatingWebhookConfiguration", "APIService", "Certificate", "Issuer",
    }  # fmt: skip
    for crd in rendered.of("CustomResourceDefinition"):
        assert crd["spec"].get("conversion", {"strategy": "None"})["strategy"] == "None"
    assert "caBundle" not in str(rendered.objects)


def test_op_078_default_images_carry_the_version_of_the_chart(helm: Helm) -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text(encoding="utf-8"))
    assert chart["version"] == chart["appVersion"] == __version__
    container = helm.template().one("Deployment")["spec"]["template"]["spec"]["containers"][0]
    images = [container["image"], *(a.split("=", 1)[1] for a in container["args"] if "-image=" in a)]
    assert sorted(images) == [f"millpond/{name}:{__version__}" for name in ("engine", "gateway", "operator")]
    for name in ("engine_image", "gateway", "operator"):
        assert (ROOT / name / "Dockerfile").is_file()


def test_ports_and_paths_are_those_of_the_contract(helm: Helm) -> None:
    container = helm.template().one("Deployment")["spec"]["template"]["spec"]["containers"][0]
    assert {p["name"]: p["containerPort"] for p in container["ports"]} == {
        "metrics": ports.OPERATOR_METRICS,
        "health": ports.OPERATOR_HEALTH,
    }
    assert container["readinessProbe"]["httpGet"] == {"path": "/ready", "port": "health"}
    assert container["livenessProbe"]["httpGet"] == {"path": "/health", "port": "health"}


def test_the_crd_is_kept_unless_asked_otherwise(helm: Helm) -> None:
    crd = helm.template().one("CustomResourceDefinition")
    assert crd["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}
    kept = yaml.safe_load((ROOT / "crds" / "inferencepools.millpond.dev.yaml").read_text(encoding="utf-8"))
    assert crd["spec"] == kept["spec"]
    assert (
        "annotations"
        not in helm.template("--set", "crds.keep=false").one("CustomResourceDefinition")["metadata"]
    )
    assert helm.template("--set", "crds.install=false").of("CustomResourceDefinition") == []


@pytest.mark.parametrize(
    "flag",
    [
        "wings=2",
        "operator.image=x",
        "images.pullPolicy=Sometimes",
        "operator.replicas=many",
        "namespaces={team-a}",
        "scope=Everything",
        "gateway.replicas=0",
        "gateway.memory=lots",
        "monitoring.grafana=true",
        "rbac.secretNames={Not_A_Name}",
        "serviceAccount.create=maybe",
    ],
)
def test_values_that_mean_nothing_are_refused(helm: Helm, flag: str) -> None:
    done = helm.run("template", "x", str(CHART), "--set", flag, check=False)
    assert done.returncode != 0
    assert "schema" in done.stderr


def test_the_schema_is_closed_and_covers_every_value() -> None:
    import json

    schema = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
    values = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
    compare(values, schema, "values")


def compare(values: Manifest, schema: Manifest, path: str) -> None:
    assert schema["additionalProperties"] is False, path
    assert set(values) == set(schema["properties"]) - {"global"}, path
    for key, value in values.items():
        below = schema["properties"][key]
        if isinstance(value, dict) and "properties" in below:
            compare(value, below, f"{path}.{key}")


def test_notes_write_mpool_and_warn_of_risky_values(helm: Helm) -> None:
    def notes(*flags: str) -> str:
        done = helm.run("install", "x", str(CHART), "--dry-run=client", *flags)
        return done.stdout.partition("NOTES:")[2]

    plain = notes()
    assert "kubectl get mpool" in plain
    assert "WARNING" not in plain
    assert "kubectl get inferencepools " not in plain
    assert "EVERY InferencePool" in notes("--set", "crds.keep=false")
    assert "crds.install is false" in notes("--set", "crds.install=false")
    assert "gateway.replicas is 1" in notes("--set", "gateway.replicas=1")
    assert "No public registry" in plain
    assert "No public registry" not in notes("--set", "images.registry=registry.example.com")


def test_no_secret_is_written(helm: Helm) -> None:
    for values in MATRIX:
        assert helm.template(values=values).of("Secret") == []
