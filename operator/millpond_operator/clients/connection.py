"""How to reach the API server: the pod's service account, the file in KUBECONFIG, or the default file."""

from __future__ import annotations

import base64
import ssl
from collections.abc import Callable
from pathlib import Path

from lightkube.config.client_adapter import verify_cluster
from lightkube.config.kubeconfig import KubeConfig, SingleConfig
from lightkube.config.models import User
from lightkube.core.exceptions import ConfigError

from millpond_operator.errors import SettingsError

Clock = Callable[[], float]
KEEP_TOKEN_SECONDS = 60.0
"""A token in a file is read again after this long; the kubelet rotates it long before it runs out."""


def load_connection(kubeconfig: Path | None = None, context: str | None = None) -> SingleConfig:
    """Read address and credentials once; tokens of a service account are read again when they rotate.

    Raises:
        SettingsError: no configuration was found, or it lacks the context.
    """
    try:
        config = KubeConfig.from_file(kubeconfig) if kubeconfig is not None else KubeConfig.from_env()
        chosen = config.get(context)
    except (ConfigError, OSError, KeyError) as error:
        message = (
            f"no Kubernetes configuration: {error}: run in a cluster, set KUBECONFIG, or pass --kubeconfig"
        )
        raise SettingsError(message) from error
    assert chosen is not None, "get() without a default raises instead"
    if _needs_program(chosen.user):
        raise SettingsError(
            "the kubeconfig's user gets its credentials from a program, which is not supported: "
            "use one with a token or a client certificate, or run in a cluster"
        )
    return chosen


def _needs_program(user: User | None) -> bool:
    """Whether a user has nothing but a program that would make its credentials."""
    if user is None or not (user.exec or user.auth_provider):
        return False
    return not (user.token or user.token_file or user.client_cert or user.client_cert_data)


def make_ssl_context(connection: SingleConfig) -> ssl.SSLContext:
    """The cluster's authority and the user's certificate; the environment changes neither."""
    user = connection.user or User()
    return verify_cluster(connection.cluster, user, connection.abs_file, trust_env=False)


class Credentials:
    """The Authorization header, read anew from its file now and then."""

    def __init__(self, connection: SingleConfig, clock: Clock) -> None:
        self._connection = connection
        self._clock = clock
        self._header = ""
        self._until = float("-inf")

    def get_header(self) -> str:
        """Value of the header; empty for a connection with a certificate or with nothing."""
        if self._clock() >= self._until:
            self._header = _make_header(self._connection)
            self._until = self._clock() + KEEP_TOKEN_SECONDS
        return self._header

    def forget(self) -> None:
        """Read it again at the next call: the API server did not accept it."""
        self._until = float("-inf")


def _make_header(connection: SingleConfig) -> str:
    token, user = read_token(connection), connection.user
    if token:
        return f"Bearer {token}"
    if user is not None and user.username and user.password:
        return "Basic " + base64.b64encode(f"{user.username}:{user.password}".encode()).decode()
    return ""


def read_token(connection: SingleConfig) -> str | None:
    """Current bearer token, if the connection uses one."""
    user = connection.user
    if user is None:
        return None
    if user.token_file:
        return Path(user.token_file).read_text(encoding="utf-8").strip()
    return user.token
