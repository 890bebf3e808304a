"""Time from the apply of an example to its pools being Ready on a node, images present, engines with the fake runner.

Everything but the model's arithmetic is real: cluster, chart, gateway, fetch of the model file, probes through the gateway. Each
example comes alone into an empty namespace, so its time includes the namespace's gateway.

    PYTHONPATH=hack python -m benchmarks.operator_ready --json results.json
"""

from __future__ import annotations

import argparse
import sys
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml
from benchmarks.figures import Figure, report, tell

from demo.cluster import find_cluster
from demo.install import Model, Site, push_images, serve_model
from demo.steps import ROOT

GOAL_SECONDS = 20.0
EXAMPLES = ("01-quickstart", "03-multi-tenant", "05-autoscale", "09-gguf", "11-two-models")
"""Those that ask for nothing a node without a GPU lacks."""
FAKE = ["--runner", "fake", "--fake-load-seconds", "0"]
RESOURCES = {"limits": {"cpu": "1", "memory": "512Mi"}, "requests": {"cpu": "50m", "memory": "128Mi"}}


def read_example(name: str, model: Model, namespace: str) -> list[dict[str, Any]]:
    """The documents of an example, pools on fake engines and on what a small node has."""
    text = (ROOT / "examples" / f"{name}.yaml").read_text(encoding="utf-8")
    documents: list[dict[str, Any]] = [found for found in yaml.safe_load_all(text) if found]
    for document in documents:
        document["metadata"]["namespace"] = namespace
        if document["kind"] != "InferencePool":
            continue
        spec = document["spec"]
        spec["model"] = {"name": document["metadata"]["name"], "source": model.source, "sha256": model.sha256}
        spec["engine"] = {"extraArgs": FAKE}
        spec["resources"] = RESOURCES
    return documents


def measure(site: Site, documents: list[dict[str, Any]]) -> float:
    """Seconds from apply until every pool of the example is Ready; the pools are removed afterwards."""
    pools = [found["metadata"]["name"] for found in documents if found["kind"] == "InferencePool"]
    started = time.monotonic()
    site.apply(*documents)
    for pool in pools:
        site.wait_ready(pool, seconds=180)
    seconds = time.monotonic() - started
    site.remove_pools()
    return seconds


def main() -> int:
    """Measure, print, write JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with ExitStack() as stack:
        cluster = find_cluster()
        site = replace(Site(cluster), namespace="millpond-ready", system_namespace="millpond-ready-system")
        images = push_images(cluster)
        model, server = serve_model(cluster)
        if model is None or server is None:
            sys.exit(
                "operator_ready: serves its own model file and needs hack/devcluster, not MILLPOND_KUBECONFIG"
            )
        stack.callback(server.terminate)
        site.make_namespace()
        stack.callback(
            cluster.run_kubectl,
            "delete",
            "namespace",
            site.namespace,
            site.system_namespace,
            what="cleaning up",
        )
        stack.callback(site.uninstall_chart)
        site.install_chart(
            images, values=("scope=Namespaces", f"namespaces={{{site.namespace}}}", "gateway.cpu=50m")
        )
        stack.callback(site.remove_pools)
        tell("a first pool brings the images to the node; it is not counted")
        measure(site, read_example(EXAMPLES[0], model, site.namespace))
        figures = []
        for name in EXAMPLES:
            seconds = measure(site, read_example(name, model, site.namespace))
            figures.append(
                Figure(name, seconds, "s", goal=f"<= {GOAL_SECONDS:g}", met=seconds <= GOAL_SECONDS)
            )
    return report(figures, arguments.json)


if __name__ == "__main__":
    sys.exit(main())
