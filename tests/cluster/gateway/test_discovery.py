"""Discovery against a real API server: pools and pods as objects, engines in this process."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from tests.fixtures.cluster import Cluster
from tests.fixtures.gateway import FakeEngine, MakeEngine, MakeGateway, RunningGateway, Script
from tests.support.kube import Kube

from millpond_gateway.world.watch import WatchSettings

pytestmark = pytest.mark.cluster
POOL = "chat"


def make_pod(name: str, engine: FakeEngine, **labels: str) -> dict[str, Any]:
    port = {"name": "http", "containerPort": engine.port}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "labels": {"millpond.dev/pool": POOL, "millpond.dev/revision": "r1", **labels},
        },
        "spec": {
            "nodeName": "nowhere",
            "containers": [{"name": "engine", "image": "none", "ports": [port]}],
            "terminationGracePeriodSeconds": 0,
        },
    }


def set_ready(kube: Kube, name: str, *, ready: bool = True) -> None:
    condition = {"type": "Ready", "status": "True" if ready else "False"}
    status = {
        "phase": "Running",
        "podIP": "127.0.0.1",
        "podIPs": [{"ip": "127.0.0.1"}],
        "conditions": [condition],
    }
    kube.patch_status({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "status": status})


def make_pool(**gateway: Any) -> dict[str, Any]:
    return {
        "apiVersion": "millpond.dev/v1alpha1",
        "kind": "InferencePool",
        "metadata": {"name": POOL},
        "spec": {
            "model": {"name": "tiny", "source": "hf://org/tiny"},
            "replicas": 1,
            "resources": {"limits": {"cpu": "1"}},
            "gateway": gateway,
        },
    }


async def start(
    make_gateway: MakeGateway, cluster: Cluster, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> RunningGateway:
    monkeypatch.setenv("KUBECONFIG", str(cluster.kubeconfig))
    return await make_gateway(options={"namespace": namespace, "watch": WatchSettings(resync_seconds=5.0)})


async def ask(gateway: RunningGateway) -> httpx.Response:
    async with httpx.AsyncClient(timeout=60) as client:
        return await client.post(f"{gateway.url}/v1/completions", json={"model": "tiny", "prompt": "x"})


async def test_gw_022_gw_025_gw_045_pods_are_followed_and_a_cordon_is_honoured(
    crds: Cluster,
    namespace: str,
    kube: Kube,
    make_engine: MakeEngine,
    make_gateway: MakeGateway,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first, second = await make_engine(), await make_engine()
    gateway = await start(make_gateway, crds, namespace, monkeypatch)
    await asyncio.to_thread(kube.create, make_pool())
    async with asyncio.timeout(20):
        while POOL not in gateway.process.world.snapshot.pools:
            await asyncio.sleep(0.02)
    assert (await ask(gateway)).status_code == 503
    await asyncio.to_thread(kube.create, make_pod("p1", first))
    await asyncio.to_thread(set_ready, kube, "p1")
    await gateway.until_routable(1, POOL)
    assert (await ask(gateway)).status_code == 200
    await asyncio.to_thread(kube.create, make_pod("p2", second))
    await asyncio.to_thread(set_ready, kube, "p2")
    await gateway.until_routable(2, POOL)
    mark = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "p1", "labels": {"millpond.dev/cordoned": "true"}},
    }
    await asyncio.to_thread(kube.apply, mark)
    await gateway.until_routable(1, POOL)
    before = len(first.seen)
    for _ in range(5):
        assert (await ask(gateway)).status_code == 200
    assert len(first.seen) == before
    await asyncio.to_thread(set_ready, kube, "p2", ready=False)
    await gateway.until_routable(0, POOL)
    await asyncio.to_thread(kube.core.delete_namespaced_pod, "p1", namespace)
    async with asyncio.timeout(20):
        while len(gateway.process.world.replicas) > 1:
            await asyncio.sleep(0.02)


async def test_gw_029_a_new_gateway_knows_all_endpoints_within_five_seconds_and_is_then_ready(
    crds: Cluster,
    namespace: str,
    kube: Kube,
    make_engine: MakeEngine,
    make_gateway: MakeGateway,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = await make_engine()
    await asyncio.to_thread(kube.create, make_pool())
    for number in range(5):
        await asyncio.to_thread(kube.create, make_pod(f"p{number}", engine))
        await asyncio.to_thread(set_ready, kube, f"p{number}")
    loop = asyncio.get_running_loop()
    taken = []
    for _ in range(3):
        began = loop.time()
        gateway = await start(make_gateway, crds, namespace, monkeypatch)
        await gateway.until_routable(5, POOL)
        taken.append(loop.time() - began)
    assert min(taken) < 5, "the best of three: the machine may be busy with something else"
    async with httpx.AsyncClient() as client:
        async with asyncio.timeout(20):
            while (await client.get(f"{gateway.admin_url}/ready")).status_code != 200:
                await asyncio.sleep(0.05)
        report = (await client.get(f"{gateway.admin_url}/v1/report")).json()
        assert report["synced"] is True
        uid = next(replica.uid for replica in gateway.process.world.replicas)
        probe = await client.post(f"{gateway.admin_url}/v1/probe", json={"pool": POOL, "podUid": uid})
    assert probe.json()["ok"] is True, probe.text


async def test_gw_046_a_deleted_pod_with_open_streams_gets_no_new_ones_and_finishes_them(
    crds: Cluster,
    namespace: str,
    kube: Kube,
    make_engine: MakeEngine,
    make_gateway: MakeGateway,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = await make_engine(script=Script(num_chunks=40, chunk_seconds=0.05))
    gateway = await start(make_gateway, crds, namespace, monkeypatch)
    await asyncio.to_thread(kube.create, make_pool())
    pod = make_pod("p1", engine)
    pod["metadata"]["finalizers"] = ["millpond.dev/test"]
    await asyncio.to_thread(kube.create, pod)
    await asyncio.to_thread(set_ready, kube, "p1")
    await gateway.until_routable(1, POOL)
    stream = asyncio.create_task(ask(gateway))
    async with asyncio.timeout(20):
        while not engine.num_open:
            await asyncio.sleep(0.01)
    await asyncio.to_thread(kube.core.delete_namespaced_pod, "p1", namespace)
    await gateway.until_routable(0, POOL)
    assert (await ask(gateway)).status_code == 503
    assert (await stream).status_code == 200
    patch = {"metadata": {"finalizers": None}}
    await asyncio.to_thread(kube.core.patch_namespaced_pod, "p1", namespace, patch)
