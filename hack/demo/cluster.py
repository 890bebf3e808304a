"""The cluster of the demo: hack/devcluster's, or the user's own through MILLPOND_KUBECONFIG."""

from __future__ import annotations

import json
import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from demo.errors import DemoError
from demo.steps import run, say

LOGS_HINT = "read the logs named by `make cluster-status`; `make cluster-down` and a second try start afresh"


@dataclass(frozen=True, slots=True)
class Cluster:
    """Where to talk to, and what the demo must bring itself."""

    kubeconfig: Path
    kubectl: str
    host_address: str | None
    """Address of this machine as pods see it; absent on a cluster that is not ours."""
    registry: str
    """Prefix of image names as the nodes pull them."""

    @property
    def env(self) -> dict[str, str]:
        """Environment for kubectl and helm."""
        return {"KUBECONFIG": str(self.kubeconfig)}

    def run_kubectl(self, *arguments: str, what: str, seconds: float = 120, given: str | None = None) -> str:
        """Run kubectl and return its output."""
        return run([self.kubectl, *arguments], what=what, env=self.env, seconds=seconds, given=given)

    def fetch_json(self, *arguments: str, what: str) -> dict[str, object]:
        """Run `kubectl ... -o json`."""
        document = json.loads(self.run_kubectl(*arguments, "-o", "json", what=what))
        assert isinstance(document, dict)
        return document


def find_cluster() -> Cluster:
    """Bring up or find the cluster.

    Raises:
        DemoError: no root and no kubeconfig, or the cluster does not answer.
    """
    own = os.environ.get("MILLPOND_KUBECONFIG")
    return _connect(Path(own)) if own else _bring_up()


def _connect(kubeconfig: Path) -> Cluster:
    registry = os.environ.get("MILLPOND_REGISTRY", "")
    kubectl = shutil.which("kubectl")
    if not kubeconfig.is_file():
        raise DemoError(
            f"MILLPOND_KUBECONFIG names {kubeconfig}, which is not a file", hint="point it at a kubeconfig"
        )
    if kubectl is None:
        raise DemoError(
            "kubectl is not installed",
            hint="install kubectl, or unset MILLPOND_KUBECONFIG to use hack/devcluster",
        )
    if not registry:
        raise DemoError(
            "your cluster needs a registry it can pull Millpond's images from",
            hint="set MILLPOND_REGISTRY=registry.example.com/team and be logged in to push there",
        )
    cluster = Cluster(kubeconfig, kubectl, None, registry.rstrip("/"))
    cluster.run_kubectl("version", what="asking the cluster for its version", seconds=30)
    say(f"using the cluster of {kubeconfig}")
    return cluster


def _bring_up() -> Cluster:
    if os.geteuid() != 0:
        raise DemoError(
            "the demo cluster runs containers and needs root",
            hint="run as root, set MILLPOND_KUBECONFIG to a cluster of yours, or run: make demo-local",
        )
    run(
        [sys.executable, "-m", "devcluster", "up", "--node"],
        what="bringing the cluster up",
        show=True,
        hint=LOGS_HINT,
    )
    status = json.loads(
        run([sys.executable, "-m", "devcluster", "status", "-o", "json"], what="reading the cluster's status")
    )
    return Cluster(
        Path(status["kubeconfig"]),
        str(Path(status["programDir"]) / "kubectl"),
        status["hostAddress"],
        f"{status['registry']['name']}/millpond",
    )
