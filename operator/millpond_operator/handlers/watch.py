"""kopf as the source of events: handlers that pass each on and return nothing, under settings that stay silent.

kopf lists, watches, reconnects and notices dead streams. It writes nothing: `on.event` handlers add no finalizer
and no annotation, and a handler that returns None patches nothing.
"""

from __future__ import annotations

import asyncio
import platform
from collections.abc import Callable, Mapping
from typing import Any

import kopf
from lightkube.config.kubeconfig import SingleConfig

from millpond_operator.clients.connection import read_token
from millpond_operator.desired.kinds import Kind
from millpond_operator.loop.operator import Operator
from millpond_operator.loop.resync import WATCHED, get_selector


class NoDiffs(kopf.DiffBaseStorage):
    """Keeps no last-handled state: nothing here asks what changed, and by default every event is copied for it twice."""

    def build(self, **_: object) -> Any:
        """An object without anything that could differ."""
        return {}

    def fetch(self, **_: object) -> None:
        """Nothing was kept."""

    def store(self, **_: object) -> None:
        """Keep nothing."""


class NoProgress(kopf.ProgressStorage):
    """Keeps no progress: event handlers have none, and kopf shall write nothing."""

    def fetch(self, **_: object) -> None:
        """Nothing was kept."""

    def store(self, **_: object) -> None:
        """Keep nothing."""

    def purge(self, **_: object) -> None:
        """There is nothing to remove."""

    def touch(self, **_: object) -> None:
        """Do not wake an object by a write."""

    def clear(self, *, essence: Any) -> Any:
        """The essence holds nothing of ours."""
        return essence


SERVER_TIMEOUT_SECONDS = 300
CLIENT_TIMEOUT_SECONDS = 330


async def run_watches(
    operator: Operator, connection: SingleConfig, *, ready: asyncio.Event, stop: asyncio.Event
) -> None:
    """Run kopf until `stop` is set; `ready` is set once its streams are set up."""
    namespaces = operator.settings.namespaces
    # Without a name kopf looks the user up in /etc/passwd, where a container's numeric user has no entry.
    identity: Any = platform.node() or "millpond-operator"
    await kopf.operator(
        identity=identity,
        registry=make_registry(operator, connection),
        settings=make_settings(
            namespaced=bool(namespaces), inactivity_seconds=operator.settings.watch_inactivity_seconds
        ),
        standalone=True,  # never pause for another kopf operator's peering; the Lease is the only election
        clusterwide=not namespaces,
        namespaces=list(namespaces),
        ready_flag=ready,
        stop_flag=stop,
    )


def make_registry(operator: Operator, connection: SingleConfig) -> kopf.OperatorRegistry:
    """A registry of our own; the default one is global and filled by imports."""
    registry = kopf.OperatorRegistry()
    for kind in WATCHED:
        # Always with the group: a bare plural that two groups serve is dropped by kopf with one warning line.
        kopf.on.event(kind.group, kind.version, kind.plural, registry=registry, id=f"take-{kind.plural}")(
            _make_handler(operator, kind)
        )
    kopf.on.login(registry=registry, id="login")(_make_login(connection))
    return registry


def make_settings(*, namespaced: bool, inactivity_seconds: float) -> kopf.OperatorSettings:
    """Settings that keep kopf from writing, from asking for permissions it was not given, and from going deaf."""
    settings = kopf.OperatorSettings()
    settings.persistence.finalizer = "millpond.dev/kopf"
    settings.persistence.progress_storage = NoProgress()
    settings.persistence.diffbase_storage = NoDiffs()
    settings.posting.enabled = False
    settings.process.ultimate_exiting_timeout = (
        None  # Kubernetes ends what hangs; a library should not kill us
    )
    settings.scanning.disabled = namespaced
    settings.watching.server_timeout = SERVER_TIMEOUT_SECONDS
    settings.watching.client_timeout = CLIENT_TIMEOUT_SECONDS
    settings.watching.connect_timeout = 10
    settings.watching.inactivity_timeout = inactivity_seconds
    settings.queueing.idle_timeout = 1.0
    for kind in WATCHED:
        selector = get_selector(kind)
        if selector is not None:
            settings.watching.label_selectors[kind.group, kind.version, kind.plural] = selector
    return settings


def _make_handler(operator: Operator, kind: Kind) -> Callable[..., Any]:
    async def take(event: Mapping[str, Any], **_: object) -> None:
        operator.take_event(kind, event["type"], dict(event["object"]))

    return take


def _make_login(connection: SingleConfig) -> Callable[..., Any]:
    """Credentials from the connection the rest of the operator uses, so that no installed library changes them."""

    async def login(**_: object) -> kopf.ConnectionInfo:
        return make_connection_info(connection)

    return login


def make_connection_info(connection: SingleConfig) -> kopf.ConnectionInfo:
    """Kopf's form of a connection; a rotated token is read anew each time kopf asks."""
    cluster, user = connection.cluster, connection.user
    info: dict[str, Any] = {"server": cluster.server, "insecure": cluster.insecure}
    if cluster.certificate_auth:
        info["ca_path"] = str(connection.abs_file(cluster.certificate_auth))
    elif cluster.certificate_auth_data:
        info["ca_data"] = cluster.certificate_auth_data
    if user is not None:
        info |= {"username": user.username, "password": user.password, "token": read_token(connection)}
        if user.client_cert_data:
            info |= {"certificate_data": user.client_cert_data, "private_key_data": user.client_key_data}
        elif user.client_cert:
            info["certificate_path"] = str(connection.abs_file(user.client_cert))
            info["private_key_path"] = str(connection.abs_file(user.client_key or ""))
    return kopf.ConnectionInfo(**info)
