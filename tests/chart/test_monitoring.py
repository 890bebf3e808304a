"""Dashboards, alerts and monitors speak of metrics, labels and ports that the programs have."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from prometheus_client import CollectorRegistry
from tests.chart.conftest import CHART, ROOT, Helm

from millpond_common.contract import labels
from millpond_common.contract.metrics import make_engine_families
from millpond_gateway.app.metrics import Metrics as GatewayMetrics
from millpond_operator.desired.names import make_gateway_labels, make_pool_labels
from millpond_operator.loop.metrics import Metrics as OperatorMetrics

METRIC = re.compile(r"\bmillpond_(?:operator|gateway|engine)_[a-z0-9_]+")
SUFFIXES = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_count", "_sum")}
VALUES = CHART / "ci" / "monitoring-values.yaml"


def list_exposed() -> set[str]:
    """Every series name the three programs expose."""
    exposed = list_of(OperatorMetrics().registry) | list_of(GatewayMetrics().registry)
    for family in make_engine_families().values():
        base = family.name.removesuffix("_total")
        exposed |= {base + suffix for suffix in SUFFIXES[family.kind]}
    return exposed


def list_of(registry: CollectorRegistry) -> set[str]:
    return {family.name + suffix for family in registry.collect() for suffix in SUFFIXES[family.type]}


def list_queries() -> list[tuple[str, str]]:
    """(where, query) of every panel and alert."""
    queries = []
    for path in sorted((CHART / "files" / "dashboards").glob("*.json")):
        for panel in json.loads(path.read_text(encoding="utf-8"))["panels"]:
            queries += [(f"{path.name}: {panel['title']}", target["expr"]) for target in panel["targets"]]
    for group in read_alerts()["groups"]:
        queries += [(rule["alert"], rule["expr"]) for rule in group["rules"]]
    return queries


def read_alerts() -> dict[str, list[dict[str, object]]]:
    alerts: dict[str, list[dict[str, object]]] = yaml.safe_load(
        (CHART / "files/alerts.yaml").read_text(encoding="utf-8")
    )
    return alerts


def test_op_111_queries_name_metrics_that_exist() -> None:
    exposed = list_exposed()
    queries = list_queries()
    assert len(queries) > 20
    for where, query in queries:
        named = set(METRIC.findall(query))
        assert named, where
        assert named <= exposed, f"{where}: {named - exposed}"


def test_queries_group_by_labels_their_metric_has() -> None:
    """Labels the scrape adds are allowed everywhere."""
    added = {"namespace", "pod", "le", "millpond_dev_pool"}
    engine = {
        f"millpond_engine_{name}": {*family.labels, "model"}
        for name, family in make_engine_families().items()
    }
    for where, query in list_queries():
        grouped = {
            label.strip() for group in re.findall(r"by \(([^)]*)\)", query) for label in group.split(",")
        }
        for metric in METRIC.findall(query):
            base = metric if metric in engine else re.sub(r"_(bucket|count|sum)$", "", metric)
            if base in engine:
                assert grouped - added <= engine[base], where


def test_every_alert_has_a_runbook_section(helm: Helm) -> None:
    headings = re.findall(
        r"^## (\w+)$", (ROOT / "docs/how-to/alerts.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    names = [rule["alert"] for group in read_alerts()["groups"] for rule in group["rules"]]
    assert headings == names
    rendered = helm.template(values=VALUES).one("PrometheusRule")
    rules = [rule for group in rendered["spec"]["groups"] for rule in group["rules"]]
    assert [rule["alert"] for rule in rules] == names
    for rule in rules:
        assert (
            rule["annotations"]["runbook_url"] == f"https://runbooks.example/millpond#{rule['alert'].lower()}"
        )
        assert rule["annotations"]["summary"]
        assert rule["labels"]["severity"] in ("warning", "critical")


def test_op_087_monitors_select_the_pods_the_operator_makes(helm: Helm) -> None:
    rendered = helm.template(values=VALUES)
    made = {labels.ENGINE_COMPONENT: make_pool_labels("p"), labels.GATEWAY_COMPONENT: make_gateway_labels()}
    for component, own in made.items():
        monitor = rendered.one("PodMonitor", f"-{component}")
        assert monitor["spec"]["selector"]["matchLabels"].items() <= own.items()
        assert monitor["spec"]["podTargetLabels"] == [labels.POOL, labels.ROLE, labels.REVISION]
        assert monitor["metadata"]["labels"]["release"] == "prometheus"
    service = rendered.one("Service", "-metrics")
    chosen = rendered.one("ServiceMonitor")["spec"]
    assert chosen["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    assert chosen["endpoints"][0]["port"] in [port["name"] for port in service["spec"]["ports"]]
    (pod,) = rendered.of("Deployment")
    assert service["spec"]["selector"].items() <= pod["spec"]["template"]["metadata"]["labels"].items()


def test_dashboards_are_whole_and_found_by_grafana(helm: Helm) -> None:
    found = [c for c in helm.template(values=VALUES).of("ConfigMap") if "dashboard" in c["metadata"]["name"]]
    assert len(found) == 3
    for config in found:
        assert config["metadata"]["labels"]["grafana_dashboard"] == "1"
        assert config["metadata"]["annotations"] == {"grafana_folder": "Millpond"}
        (text,) = config["data"].values()
        board = json.loads(text)
        places = [(p["gridPos"]["x"], p["gridPos"]["y"]) for p in board["panels"]]
        assert len(places) == len(set(places))


def test_prometheus_understands_every_query(tmp_path: Path) -> None:
    """Alerts as they are, and each panel's query as if it were a recording rule."""
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed (Debian: apt-get install prometheus)")
    panels = [query for where, query in list_queries() if ".json:" in where]
    plain = [query.replace("$namespace", ".*").replace("$pool", ".*") for query in panels]
    rules = [{"record": f"panel_{number}", "expr": query} for number, query in enumerate(plain)]
    recorded = tmp_path / "panels.yaml"
    recorded.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}), encoding="utf-8")
    for path in (CHART / "files" / "alerts.yaml", recorded):
        done = subprocess.run(
            [promtool, "check", "rules", str(path)], check=False, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr
