"""Images, chart and pools on a cluster; the demo and the end-to-end tests share it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from demo.cluster import Cluster
from demo.errors import DemoError
from demo.steps import ROOT, TOOLS, run, say
from images.build import IMAGES, build
from images.errors import ImageError

RELEASE = "millpond"
QUICKSTART = ROOT / "examples/01-quickstart.yaml"


@dataclass(frozen=True, slots=True)
class Model:
    """The file a pool loads."""

    source: str
    sha256: str


@dataclass(frozen=True, slots=True)
class Site:
    """Where the release and its pools live on a cluster."""

    cluster: Cluster
    system_namespace: str = "millpond-system"
    namespace: str = "millpond-demo"

    def run_kubectl(self, *arguments: str, what: str, seconds: float = 120, given: str | None = None) -> str:
        """Run kubectl in the pools' namespace."""
        return self.cluster.run_kubectl(
            "-n", self.namespace, *arguments, what=what, seconds=seconds, given=given
        )

    def install_chart(
        self, images: Mapping[str, str], *, values: tuple[str, ...] = (), release: str = RELEASE
    ) -> None:
        """Run helm upgrade --install and wait for the operator."""
        helm = run([sys.executable, "hack/fetch-helm"], what="finding helm").strip().splitlines()[-1]
        settings = [f"images.{name}={image}" for name, image in images.items()]
        flags = [flag for setting in (*settings, *values) for flag in ("--set", setting)]
        command = [
            helm,
            "upgrade",
            "--install",
            release,
            "charts/millpond",
            "--namespace",
            self.system_namespace,
        ]
        # A CRD that an earlier checkout or a test applied with kubectl becomes the release's.
        command += [
            "--create-namespace",
            "--take-ownership",
            "--force-conflicts",
            "--wait",
            "--timeout",
            "180s",
            *flags,
        ]
        hint = f"kubectl -n {self.system_namespace} get pods,events"
        run(command, what="helm upgrade --install", env=self.cluster.env, seconds=240, hint=hint)

    def uninstall_chart(self, *, release: str = RELEASE) -> None:
        """Run helm uninstall; pools and their CRD stay."""
        helm = run([sys.executable, "hack/fetch-helm"], what="finding helm").strip().splitlines()[-1]
        command = [
            helm,
            "uninstall",
            release,
            "--namespace",
            self.system_namespace,
            "--ignore-not-found",
            "--wait",
        ]
        run(command, what="helm uninstall", env=self.cluster.env, seconds=180)

    def apply(self, *documents: Mapping[str, Any]) -> None:
        """Apply on the server's side."""
        text = yaml.safe_dump_all([dict(document) for document in documents])
        command = ("apply", "--server-side", "--force-conflicts", "-f", "-")
        self.cluster.run_kubectl(*command, what="kubectl apply", given=text)

    def make_namespace(self) -> None:
        """Make the pools' namespace if it is not there."""
        self.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": self.namespace}})

    def remove_pools(self) -> None:
        """Remove the pools of an earlier run: a pool keeps the engine image it was made with until its spec changes."""
        command = ("delete", "inferencepools.millpond.dev", "--all", "--ignore-not-found", "--timeout=120s")
        self.run_kubectl(*command, what="removing the pools of an earlier run", seconds=150)

    def fetch_pool(self, pool: str) -> dict[str, Any]:
        """Read one pool."""
        return self.cluster.fetch_json("-n", self.namespace, "get", "mpool", pool, what="reading the pool")

    def wait_ready(self, pool: str, *, seconds: float = 420) -> dict[str, Any]:
        """Wait until Ready is True at the pool's current generation, printing each change.

        Raises:
            DemoError: not within `seconds`; with the last reason.
        """
        return self.wait_for(pool, lambda document: describe(document)[1], what="is Ready", seconds=seconds)

    def wait_for(
        self, pool: str, wanted: Callable[[dict[str, Any]], bool], *, what: str, seconds: float
    ) -> dict[str, Any]:
        """Wait until the pool is as wanted, printing each change.

        Raises:
            DemoError: not within `seconds`; with the last reason.
        """
        deadline = time.monotonic() + seconds
        last = ""
        while time.monotonic() < deadline:
            document = self.fetch_pool(pool)
            line, _ = describe(document)
            if line != last:
                say(line)
                last = line
            if wanted(document):
                return document
            time.sleep(1)
        hint = f"kubectl -n {self.namespace} describe mpool {pool}; kubectl -n {self.namespace} get pods"
        raise DemoError(f"not within {seconds:.0f} s: pool {pool} {what}; last seen: {last}", hint=hint)


def push_images(cluster: Cluster) -> dict[str, str]:
    """Build what changed, push it, and return image name -> name on the node.

    Raises:
        DemoError: an image cannot be built or pushed.
    """
    names: dict[str, str] = {}
    for name, image in IMAGES.items():
        try:
            local = build(image)
        except ImageError as error:
            raise DemoError(f"the {name} image: {error}") from error
        if cluster.host_address is not None:
            output = run(
                [sys.executable, "-m", "devcluster", "push", local], what=f"pushing the {name} image"
            )
            names[name] = next(
                line for line in reversed(output.splitlines()) if "/millpond/" in line and " " not in line
            )
        else:
            names[name] = f"{cluster.registry}/{local.rpartition('/')[2]}"
            hint = "log in to the registry of MILLPOND_REGISTRY"
            run(
                ["buildah", "push", local, f"docker://{names[name]}"],
                what=f"pushing {names[name]}",
                hint=hint,
            )
    return names


def serve_model(cluster: Cluster) -> tuple[Model | None, subprocess.Popen[str] | None]:
    """Fetch the model file and serve it beside the cluster; on a foreign cluster the example's own source is used.

    Raises:
        DemoError: the server does not start.
    """
    if cluster.host_address is None:
        return None, None
    path = Path(
        run([sys.executable, "hack/fetch-model"], what="fetching the model file").strip().splitlines()[-1]
    )
    digest = run(["sha256sum", str(path)], what="hashing the model file").split()[0]
    command = [sys.executable, "-m", "demo.files", str(path.parent), cluster.host_address, "0"]
    server = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env={**os.environ, **TOOLS}
    )
    assert server.stdout is not None
    port = server.stdout.readline().strip()
    if not port:
        raise DemoError("the file server beside the cluster did not start", hint="look at the output above")
    say(f"{path.name} ({path.stat().st_size / 1e6:.0f} MB) is served at {cluster.host_address}:{port}")
    return Model(f"http://{cluster.host_address}:{port}/{path.name}", digest), server


def make_pool(model: Model | None, *, namespace: str, name: str = "smollm2", **spec: Any) -> dict[str, Any]:
    """The quickstart's pool, loading the served file, with fields of its spec replaced."""
    documents = yaml.safe_load_all(QUICKSTART.read_text(encoding="utf-8"))
    pool: dict[str, Any] = next(document for document in documents if document["kind"] == "InferencePool")
    pool["metadata"].update(namespace=namespace, name=name)
    if model is not None:
        pool["spec"]["model"].update(source=model.source, sha256=model.sha256)
    pool["spec"].update(spec)
    return pool


def describe(document: Mapping[str, Any]) -> tuple[str, bool]:
    """One line on a pool, and whether it is Ready at its current generation."""
    status = document.get("status", {})
    conditions = {condition["type"]: condition for condition in status.get("conditions", ())}
    ready = conditions.get("Ready")
    if ready is None:
        return "waiting for the operator's first look", False
    current = ready.get("observedGeneration") == document["metadata"]["generation"]
    counts = f"{status.get('readyReplicas', 0)} of {status.get('desiredReplicas', '?')} replicas"
    line = f"Ready={ready['status']} {ready['reason']}: {ready['message']} ({counts})"
    return line, current and ready["status"] == "True"
