"""Images, chart and quickstart pool on the cluster."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from demo.cluster import Cluster
from demo.errors import DemoError
from demo.steps import ROOT, run, say
from images.build import IMAGES, build

SYSTEM_NAMESPACE = "millpond-system"
NAMESPACE = "millpond-demo"
RELEASE = "millpond"
QUICKSTART = ROOT / "examples/01-quickstart.yaml"


@dataclass(frozen=True, slots=True)
class Model:
    """The file the pool loads."""

    source: str
    sha256: str


def push_images(cluster: Cluster) -> dict[str, str]:
    """Build what changed, push it, and return image name -> name on the node."""
    names: dict[str, str] = {}
    for name, image in IMAGES.items():
        local = build(image)
        if cluster.host_address is not None:
            output = run(
                [sys.executable, "-m", "devcluster", "push", local], what=f"pushing the {name} image"
            )
            names[name] = output.strip().splitlines()[-1]
        else:
            names[name] = f"{cluster.registry}/{local.rpartition('/')[2]}"
            run(
                ["buildah", "push", local, f"docker://{names[name]}"],
                what=f"pushing {names[name]}",
                hint="log in to the registry of MILLPOND_REGISTRY",
            )
    return names


def serve_model(cluster: Cluster) -> tuple[Model | None, subprocess.Popen[str] | None]:
    """Fetch the model file and serve it beside the cluster; on a foreign cluster the example's own source is used."""
    if cluster.host_address is None:
        return None, None
    path = Path(
        run([sys.executable, "hack/fetch-model"], what="fetching the model file").strip().splitlines()[-1]
    )
    digest = run(["sha256sum", str(path)], what="hashing the model file").split()[0]
    command = [sys.executable, "-m", "demo.files", str(path.parent), cluster.host_address, "0"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert server.stdout is not None
    port = server.stdout.readline().strip()
    if not port:
        raise DemoError("the file server beside the cluster did not start", hint=LOG_HINT)
    say(f"{path.name} ({path.stat().st_size / 1e6:.0f} MB) is served at {cluster.host_address}:{port}")
    return Model(f"http://{cluster.host_address}:{port}/{path.name}", digest), server


LOG_HINT = "look at the output above"


def install_chart(cluster: Cluster, images: dict[str, str], *, values: tuple[str, ...] = ()) -> None:
    """Helm upgrade --install, waiting for the operator."""
    helm = run([sys.executable, "hack/fetch-helm"], what="finding helm").strip().splitlines()[-1]
    settings = [f"images.{name}={image}" for name, image in images.items()]
    flags = [flag for setting in (*settings, *values) for flag in ("--set", setting)]
    command = [
        helm,
        "upgrade",
        "--install",
        RELEASE,
        "charts/millpond",
        "--namespace",
        SYSTEM_NAMESPACE,
        "--create-namespace",
        # The CRD may be there already, from tests or from kubectl.
        "--take-ownership",
        "--force-conflicts",
        "--wait",
        "--timeout",
        "180s",
        *flags,
    ]
    run(
        command,
        what="helm upgrade --install",
        env=cluster.env,
        seconds=240,
        hint=f"kubectl -n {SYSTEM_NAMESPACE} get pods,events",
    )


def make_pool(model: Model | None, *, changes: dict[str, Any] | None = None) -> dict[str, Any]:
    """The quickstart's pool, loading the served file, with changes to its spec merged in."""
    pool = next(
        doc
        for doc in yaml.safe_load_all(QUICKSTART.read_text(encoding="utf-8"))
        if doc["kind"] == "InferencePool"
    )
    pool["metadata"]["namespace"] = NAMESPACE
    if model is not None:
        pool["spec"]["model"].update(source=model.source, sha256=model.sha256)
    for key, value in (changes or {}).items():
        pool["spec"][key] = value
    return dict(pool)


def apply(cluster: Cluster, *documents: dict[str, Any]) -> None:
    """Kubectl apply --server-side."""
    text = yaml.safe_dump_all(documents)
    cluster.run_kubectl(
        "apply", "--server-side", "--force-conflicts", "-f", "-", what="kubectl apply", given=text
    )


def remove_pool(cluster: Cluster) -> None:
    """Remove the pool of an earlier demo: a pool keeps the engine image it was made with until its spec changes."""
    command = [
        "-n",
        NAMESPACE,
        "delete",
        "inferencepools.millpond.dev",
        "--all",
        "--ignore-not-found",
        "--timeout=120s",
    ]
    cluster.run_kubectl(*command, what="removing the pool of an earlier demo", seconds=150)


def wait_ready(cluster: Cluster, pool: str, *, seconds: float = 420) -> dict[str, Any]:
    """Wait until the pool's Ready condition is True for its current generation, printing each change."""
    deadline = time.monotonic() + seconds
    last = ""
    while time.monotonic() < deadline:
        document = cluster.fetch_json("-n", NAMESPACE, "get", "mpool", pool, what="reading the pool")
        line, ready = describe(document)
        if line != last:
            say(line)
            last = line
        if ready:
            return document
        time.sleep(1)
    raise DemoError(
        f"pool {pool} is not Ready after {seconds:.0f} s: {last}",
        hint=f"kubectl -n {NAMESPACE} describe mpool {pool}; kubectl -n {NAMESPACE} get pods",
    )


def describe(document: dict[str, Any]) -> tuple[str, bool]:
    """One line on a pool, and whether it is Ready at its current generation."""
    status = document.get("status", {})
    conditions = {c["type"]: c for c in status.get("conditions", ())}
    ready = conditions.get("Ready")
    if ready is None:
        return "waiting for the operator's first look", False
    current = ready.get("observedGeneration") == document["metadata"]["generation"]
    counts = f"{status.get('readyReplicas', 0)} of {status.get('desiredReplicas', '?')} replicas"
    line = f"Ready={ready['status']} {ready['reason']}: {ready['message']} ({counts})"
    return line, current and ready["status"] == "True"


def find_gateway_pods(cluster: Cluster) -> list[str]:
    """Names of the namespace's gateway pods."""
    found = json.loads(
        cluster.run_kubectl(
            "-n",
            NAMESPACE,
            "get",
            "pods",
            "-l",
            "app.kubernetes.io/component=gateway",
            "-o",
            "json",
            what="listing gateway pods",
        )
    )
    return [item["metadata"]["name"] for item in found["items"]]
