"""Pools and pods of one namespace from the Kubernetes API, over lightkube's connection settings."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncGenerator, Callable
from typing import TypeVar

import httpx2
import structlog
from lightkube.config.client_adapter import AsyncClient, ConnectionParams
from lightkube.config.kubeconfig import KubeConfig, SingleConfig
from lightkube.core.exceptions import ConfigError

from millpond_common.contract import labels
from millpond_gateway.world.parse import parse_peer, parse_pool, parse_replica
from millpond_gateway.world.records import Peer, PoolView
from millpond_gateway.world.secrets import Keys, SecretReader
from millpond_gateway.world.view import World
from millpond_gateway.world.watch import (
    Object,
    Source,
    Store,
    Watcher,
    WatchError,
    WatchExpiredError,
    WatchSettings,
)

_log = structlog.get_logger("world")
_PAGE = 500
_GONE = 410
_CONFIG_HINT = "run inside a pod, set KUBECONFIG, or name engines with --static"
POOLS = "inferencepools"
PODS = "pods"
_GATEWAYS = f"{labels.COMPONENT}={labels.GATEWAY_COMPONENT}"
_Parsed = TypeVar("_Parsed")


class KubernetesSource:
    """One kind in one namespace."""

    def __init__(self, client: httpx2.AsyncClient, name: str, path: str, selector: str = "") -> None:
        self.name = name
        self._client = client
        self._path = path
        self._params = {"labelSelector": selector} if selector else {}

    async def list_all(self) -> tuple[list[Object], str]:
        """All pages of the kind.

        Raises:
            WatchError: refused or unreachable.
        """
        objects: list[Object] = []
        params = {**self._params, "limit": str(_PAGE)}
        while True:
            try:
                answer = await self._client.get(self._path, params=params)
                self._check(answer)
                page = answer.json()
            except (httpx2.HTTPError, ConfigError, ValueError) as error:
                raise WatchError(f"list of {self.name}: {error or type(error).__name__}") from error
            objects.extend(page.get("items") or ())
            token = page["metadata"].get("continue")
            if not token:
                return objects, page["metadata"]["resourceVersion"]
            params["continue"] = token

    async def watch_from(self, version: str, seconds: float) -> AsyncGenerator[bytes, None]:
        """Events since `version`.

        Raises:
            WatchError: refused, unreachable or broken off.
        """
        params = {
            **self._params,
            "watch": "1",
            "allowWatchBookmarks": "true",
            "resourceVersion": version,
            "timeoutSeconds": str(max(1, int(seconds))),
        }
        timeout = httpx2.Timeout(10.0, read=None)
        try:
            async with self._client.stream("GET", self._path, params=params, timeout=timeout) as answer:
                self._check(answer)
                async for line in answer.aiter_lines():
                    if line:
                        yield line.encode()
        except (httpx2.HTTPError, ConfigError) as error:
            raise WatchError(f"watch of {self.name}: {error or type(error).__name__}") from error

    def _check(self, answer: httpx2.Response) -> None:
        if answer.status_code == _GONE:
            raise WatchExpiredError(f"{self.name}: the version is gone")
        if answer.status_code >= 400:
            hint = (
                "; give the gateway's ServiceAccount get, list and watch on it"
                if answer.status_code == 403
                else ""
            )
            raise WatchError(f"{self.name}: the API server answered {answer.status_code}{hint}")


class PoolStore:
    """Feeds pools into the view."""

    def __init__(self, world: World, clock: Callable[[], float]) -> None:
        self._world = world
        self._clock = clock

    def replace(self, objects: list[Object]) -> None:
        """All pools."""
        pools = [pool for obj in objects if (pool := _read_pool(obj)) is not None]
        self._world.set_pools(pools, source=POOLS)

    def put(self, obj: Object) -> None:
        """One pool; a pool whose gateway was switched off is no pool here."""
        pool = _read_pool(obj)
        if pool is not None:
            self._world.put_pool(pool)
        else:
            self._world.remove_pool(obj["metadata"]["name"])

    def remove(self, obj: Object) -> None:
        """One pool is gone."""
        self._world.remove_pool(obj["metadata"]["name"])

    def prove(self) -> None:
        """The watch of pools is alive."""
        self._world.prove(POOLS, self._clock())


class PodStore:
    """Feeds engine pods into the view."""

    def __init__(self, world: World, clock: Callable[[], float]) -> None:
        self._world = world
        self._clock = clock

    def replace(self, objects: list[Object]) -> None:
        """All engine pods."""
        replicas = [replica for obj in objects if (replica := _read(parse_replica, obj)) is not None]
        self._world.set_replicas(replicas, source=PODS)

    def put(self, obj: Object) -> None:
        """One pod; a pod without address or label is no replica."""
        replica = _read(parse_replica, obj)
        if replica is not None:
            self._world.put_replica(replica)
        else:
            self._world.remove_replica(obj["metadata"]["uid"])

    def remove(self, obj: Object) -> None:
        """One pod is gone."""
        self._world.remove_replica(obj["metadata"]["uid"])

    def prove(self) -> None:
        """The watch of pods is alive."""
        self._world.prove(PODS, self._clock())


class PeerStore:
    """Addresses of the other gateways of the namespace."""

    def __init__(
        self,
        own_pod: str,
        listener: Callable[[frozenset[str]], None],
        hosts_listener: Callable[[frozenset[str]], None],
    ) -> None:
        self._own_pod = own_pod
        self._listener = listener
        self._hosts_listener = hosts_listener
        self._peers: dict[str, Peer] = {}

    def replace(self, objects: list[Object]) -> None:
        """All gateway pods."""
        self._peers.clear()
        for obj in objects:
            self._note(obj)
        self._tell()

    def put(self, obj: Object) -> None:
        """One gateway pod."""
        self._note(obj)
        self._tell()

    def remove(self, obj: Object) -> None:
        """One gateway pod is gone."""
        self._peers.pop(obj["metadata"]["uid"], None)
        self._tell()

    def prove(self) -> None:
        """Peers that are not seen show by their silence."""

    def _note(self, obj: Object) -> None:
        peer = _read(parse_peer, obj)
        if peer is None or obj["metadata"]["name"] == self._own_pod:
            self._peers.pop(obj["metadata"]["uid"], None)
        else:
            self._peers[obj["metadata"]["uid"]] = peer

    def _tell(self) -> None:
        self._hosts_listener(frozenset(peer.host for peer in self._peers.values()))
        self._listener(frozenset(address for peer in self._peers.values() for address in peer.addresses))


def _read(parse: Callable[[Object], _Parsed | None], obj: Object) -> _Parsed | None:
    try:
        return parse(obj)
    except (KeyError, TypeError, ValueError) as error:
        name = (obj.get("metadata") or {}).get("name")
        _log.warning("object not understood", name=name, error=f"{type(error).__name__}: {error}")
        return None


def _read_pool(obj: Object) -> PoolView | None:
    pool = _read(parse_pool, obj)
    for warning in pool.warnings if pool is not None else ():
        _log.warning("part of a pool left aside", name=obj["metadata"].get("name"), reason=warning)
    return pool


async def watch_namespace(
    world: World,
    namespace: str | None,
    settings: WatchSettings,
    *,
    peers: PeerStore | None = None,
    deliver_keys: Callable[[Keys], None] | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Keep `world`, and `peers`, in step with the objects of one namespace, until cancelled.

    Raises:
        ConfigError: there is no usable Kubernetes configuration.
    """
    config = load_config()
    namespace = namespace or config.namespace
    jitter = random.random
    async with AsyncClient(config, ConnectionParams()) as client:
        sources: list[tuple[Source, Store]] = [
            (
                KubernetesSource(client, POOLS, f"/apis/{labels.API_VERSION}/namespaces/{namespace}/{POOLS}"),
                PoolStore(world, clock),
            ),
            (
                KubernetesSource(client, PODS, f"/api/v1/namespaces/{namespace}/{PODS}", labels.POOL),
                PodStore(world, clock),
            ),
        ]
        if peers is not None:
            sources.append(
                (
                    KubernetesSource(client, "gateways", f"/api/v1/namespaces/{namespace}/{PODS}", _GATEWAYS),
                    peers,
                )
            )
        async with asyncio.TaskGroup() as group:
            if deliver_keys is not None:
                reader = SecretReader(
                    client, namespace, wanted=lambda: find_key_secrets(world), deliver=deliver_keys
                )
                group.create_task(reader.run())
            for source, store in sources:
                group.create_task(Watcher(source, store, settings, clock=clock, jitter=jitter).run())


def find_key_secrets(world: World) -> frozenset[str]:
    """Secrets that tenants name, over all pools."""
    pools = world.snapshot.pools.values()
    return frozenset(entry.key_secret for pool in pools for entry in pool.tenants if entry.key_secret)


def load_config() -> SingleConfig:
    """Settings of the pod's ServiceAccount, or of KUBECONFIG.

    Raises:
        ConfigError: neither is there, or it cannot be used; the message says what to do.
    """
    try:
        config = KubeConfig.from_env().get()
    except (ConfigError, OSError) as error:
        raise ConfigError(f"no Kubernetes configuration ({error}): {_CONFIG_HINT}") from error
    if config is None:
        raise ConfigError(f"no Kubernetes configuration: {_CONFIG_HINT}")
    return config
