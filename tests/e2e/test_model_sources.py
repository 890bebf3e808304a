"""Models come to the node: slowly, broken off, damaged, once for many replicas, and from a claim without a copy."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.conftest import Fleet
from tests.support.kube import wait_for
from tests.support.operator_world import find_condition
from tests.support.slow_files import SlowFiles

pytestmark = [pytest.mark.node, pytest.mark.timeout(600)]
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def files(fleet: Fleet) -> Iterator[SlowFiles]:
    command = [sys.executable, str(ROOT / "hack" / "fetch-model")]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert fleet.site.cluster.host_address is not None
    server = SlowFiles(fleet.site.cluster.host_address, Path(done.stdout.strip().splitlines()[-1]))
    yield server
    server.close()


def apply(fleet: Fleet, name: str, model: dict[str, Any], *, replicas: int = 1) -> None:
    pool = fleet.make_fake_pool(name, replicas=replicas)
    pool["spec"]["model"] = {"name": name, **model}
    fleet.site.apply(pool)


def get_condition(fleet: Fleet, pool: str, kind: str) -> dict[str, str]:
    return dict(find_condition(fleet.site.fetch_pool(pool), kind))


@pytest.mark.slow  # tests/unit/millpond_engine/fetch/test_fetch.py shows the fetch step's part
def test_op_094_a_server_that_goes_silent_at_40_percent_is_left_and_the_rest_resumed(
    fleet: Fleet, files: SlowFiles
) -> None:
    files.bytes_per_second = 6 << 20
    cut = files.size * 2 // 5
    files.silent_after = [cut]
    apply(fleet, "silent", {"source": files.url, "sha256": files.sha256})
    seen: list[str] = []

    def told() -> bool:
        condition = get_condition(fleet, "silent", "ModelAvailable")
        if condition["reason"] == "ModelFetching":
            seen.append(condition["message"])
        return condition["status"] == "True"

    wait_for("the model to be there", told, seconds=300)
    progress = [int(found[1]) for line in seen if (found := re.search(r": (\d+) %, .* MiB/s$", line))]
    assert progress, seen
    assert 0 < min(progress) <= 40
    log = fleet.site.run_kubectl(
        "logs", "-l", "millpond.dev/pool=silent", "-c", "fetch-model", "--tail=-1", what="reading the log"
    )
    assert f"trying again from byte {cut}" in log
    assert files.ranges == ["", f"bytes={cut}-"]
    fleet.site.wait_ready("silent", seconds=180)
    model = fleet.site.fetch_pool("silent")["status"]["model"]
    assert model["numParameters"] == 134_515_008, "the fetch step told the size"


def test_a_damaged_file_is_a_clear_condition_and_the_right_checksum_mends_it(
    fleet: Fleet, files: SlowFiles
) -> None:
    apply(fleet, "damaged", {"source": files.url, "sha256": "0" * 64})
    # One status is judged: the next try, a moment later, is fetching again.
    pool = fleet.site.wait_for(
        "damaged",
        lambda pool: find_condition(pool)["reason"] == "ModelFetchFailed",
        what="names the checksum",
        seconds=180,
    )
    message = find_condition(pool)["message"]
    assert files.sha256 in message
    assert "0" * 64 in message
    assert find_condition(pool, "ModelAvailable")["reason"] == "ModelFetchFailed"
    apply(fleet, "damaged", {"source": files.url, "sha256": files.sha256})
    fleet.site.wait_ready("damaged", seconds=240)


def test_op_095_two_replicas_of_a_node_fetch_once_into_its_cache(fleet: Fleet, files: SlowFiles) -> None:
    files.bytes_per_second = 24 << 20
    # A query makes this test's files its own in a cache that outlives it.
    source = f"{files.url}?{time.time_ns()}"
    model = {"source": source, "sha256": files.sha256, "cache": {"type": "Node"}}
    apply(fleet, "sharing", model, replicas=2)
    fleet.site.wait_ready("sharing", seconds=240)
    assert files.ranges == [""]


@pytest.mark.slow
def test_op_096_what_lies_in_a_claim_is_served_from_there(
    fleet: Fleet, files: SlowFiles, request: pytest.FixtureRequest
) -> None:
    apply(fleet, "filling", {"source": files.url, "sha256": files.sha256, "cache": {"type": "Node"}})
    fleet.site.wait_ready("filling", seconds=240)
    (path,) = set(re.findall(r"/models/(\S+)", read_config(fleet, "filling")))
    fleet.site.run_kubectl("delete", "mpool", "filling", "--wait", what="deleting the first pool")
    asked = len(files.ranges)
    request.addfinalizer(make_claim(fleet, "weights"))
    apply(fleet, "lying", {"source": f"pvc://weights/{path}"})
    fleet.site.wait_ready("lying", seconds=240)
    assert len(files.ranges) == asked, "nothing was fetched"


def read_config(fleet: Fleet, pool: str) -> str:
    """Path of the model as the engine's configuration names it."""
    found = json.loads(
        fleet.site.run_kubectl(
            "get", "configmap", "-l", f"millpond.dev/pool={pool}", "-o", "json", what="reading the record"
        )
    )
    (config,) = [i["data"]["engine.yaml"] for i in found["items"] if "engine.yaml" in i.get("data", {})]
    return next(line for line in config.splitlines() if line.startswith("modelPath:"))


def make_claim(fleet: Fleet, name: str) -> Callable[[], object]:
    """A claim on the node's cache, whose files the first pool brought; returns what removes it."""
    volume = f"{name}-{fleet.site.namespace}"
    meta = {"namespace": fleet.site.namespace}
    size = {"storage": "1Gi"}
    fleet.site.apply(
        {
            "apiVersion": "v1",
            "kind": "PersistentVolume",
            "metadata": {"name": volume},
            "spec": {
                "capacity": size,
                "accessModes": ["ReadWriteMany"],
                "persistentVolumeReclaimPolicy": "Retain",
                "storageClassName": "",
                "hostPath": {"path": "/var/lib/millpond/models", "type": "Directory"},
                "claimRef": {"name": name, **meta},
            },
        },
        {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": {"name": name, **meta},
            "spec": {
                "accessModes": ["ReadWriteMany"],
                "storageClassName": "",
                "volumeName": volume,
                "resources": {"requests": size},
            },
        },
    )

    def remove() -> None:
        fleet.site.remove_pools()
        fleet.site.run_kubectl("delete", f"pvc/{name}", f"pv/{volume}", what="removing the claim")

    return remove
