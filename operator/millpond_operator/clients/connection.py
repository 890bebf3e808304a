"""How to reach the API server: the pod's service account, the file in KUBECONFIG, or the default file."""

from __future__ import annotations

from pathlib import Path

from lightkube.config.kubeconfig import KubeConfig, SingleConfig
from lightkube.core.exceptions import ConfigError

from millpond_operator.errors import SettingsError


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
    return chosen


def read_token(connection: SingleConfig) -> str | None:
    """Current bearer token, if the connection uses one."""
    user = connection.user
    if user is None:
        return None
    if user.token_file:
        return Path(user.token_file).read_text(encoding="utf-8").strip()
    return user.token
