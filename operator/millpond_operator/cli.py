"""Command line of `millpond-operator`: every flag has an environment variable, MILLPOND_ and its name in capitals."""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import socket
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from lightkube.config.kubeconfig import SingleConfig

from millpond_common.contract import ports
from millpond_operator.api.spec import EnvVar
from millpond_operator.clients.connection import load_connection
from millpond_operator.desired.gateway import POD_FIELDS
from millpond_operator.desired.settings import BuildSettings
from millpond_operator.errors import OperatorError, SettingsError
from millpond_operator.handlers.run import run_operator
from millpond_operator.log import LEVELS, configure_logging
from millpond_operator.loop.lease import LeaseSettings
from millpond_operator.loop.settings import OperatorSettings
from millpond_operator.plan.settings import PlanSettings

NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
DESCRIPTION = """Run InferencePools (mpool) of a cluster or of some namespaces.

Each flag can also be given as an environment variable: MILLPOND_ and the flag's name in capitals with underscores,
lists separated by commas. A flag wins over its variable."""


class _Parser(argparse.ArgumentParser):
    """Options that read their default from the environment."""

    def add(self, flag: str, help_text: str, **options: object) -> None:
        """Add one option."""
        variable = "MILLPOND_" + flag.removeprefix("--").upper().replace("-", "_")
        value = os.environ.get(variable)
        if value is not None:
            options["default"] = value.split(",") if options.get("action") == "append" else value
            options.pop("required", None)
        self.add_argument(flag, help=f"{help_text} [{variable}]", **options)  # type: ignore[arg-type]


def make_parser() -> argparse.ArgumentParser:
    """The whole command line."""
    parser = _Parser(
        prog="millpond-operator",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"millpond-operator {get_version()}")
    _add_cluster(parser)
    _add_children(parser)
    _add_process(parser)
    return parser


def _add_cluster(parser: _Parser) -> None:
    add = parser.add
    add(
        "--namespace",
        "serve this namespace only; may be repeated; without it, the whole cluster",
        action="append",
        default=[],
    )
    add(
        "--kubeconfig",
        "kubeconfig file; without it the pod's service account, then KUBECONFIG, then ~/.kube/config",
    )
    add("--context", "context of the kubeconfig; default is its current one")
    add(
        "--operator-namespace",
        "namespace of the operator itself, for its Lease and for network policies; default is the pod's",
    )
    add("--lease-name", "name of the Lease that elects the acting instance", default="millpond-operator")
    add(
        "--identity",
        "name of this instance in the Lease; default is the pod's name",
        default=os.environ.get("POD_NAME"),
    )


def _add_children(parser: _Parser) -> None:
    add = parser.add
    add("--engine-image", "engine image of pools that name none", required=True)
    add("--gateway-image", "gateway image", required=True)
    add(
        "--image-pull-policy",
        "pull policy of both; default is Kubernetes' own",
        choices=["Always", "IfNotPresent", "Never"],
    )
    add(
        "--image-pull-secret",
        "pull secret of both, in each pool's namespace; may be repeated",
        action="append",
        default=[],
    )
    add("--gateway-replicas", "gateway pods per namespace (default %(default)s)", type=int, default=2)
    add("--gateway-cpu", "CPU request of a gateway pod (default %(default)s)", default="250m")
    add("--gateway-memory", "memory request of a gateway pod (default %(default)s)", default="256Mi")
    add("--gateway-memory-limit", "memory limit of a gateway pod (default %(default)s)", default="1Gi")
    add(
        "--gateway-grace-seconds",
        "grace period of a gateway pod, of which its streams have all but 30 s (default %(default)s)",
        type=int,
        default=330,
    )
    add("--gateway-arg", "further argument of the gateway; may be repeated", action="append", default=[])
    add(
        "--gateway-env",
        "environment variable of the gateway, NAME=VALUE; may be repeated",
        action="append",
        default=[],
    )
    add(
        "--gateway-role-kind",
        "kind of the role that gateways are bound to (default %(default)s)",
        choices=["ClusterRole", "Role"],
        default="ClusterRole",
    )
    add("--gateway-role-name", "name of that role (default %(default)s)", default="millpond-gateway")
    add(
        "--metrics-namespace",
        "namespace whose pods may scrape engines and gateways; may be repeated",
        action="append",
        default=[],
    )
    add(
        "--network-policies",
        "write NetworkPolicies for engines and gateways (default %(default)s)",
        choices=["true", "false"],
        default="true",
    )
    add(
        "--node-cache-path",
        "directory of a node that pools with model cache type Node share (default %(default)s)",
        default="/var/lib/millpond/models",
    )
    add("--cluster-domain", "DNS domain of the cluster (default %(default)s)", default="cluster.local")


def _add_process(parser: _Parser) -> None:
    add = parser.add
    add("--resync-seconds", "period of full lists (default %(default)s)", type=float, default=300.0)
    add(
        "--watch-inactivity-seconds",
        "silence after which a watch is taken for dead (default %(default)s)",
        type=float,
        default=70.0,
    )
    add("--max-parallel", "pools worked on at once (default %(default)s)", type=int, default=16)
    add(
        "--revision-history",
        "earlier revisions whose record is kept per pool (default %(default)s)",
        type=int,
        default=3,
    )
    add("--listen-host", "address of the ports below (default %(default)s)", default="0.0.0.0")  # noqa: S104 - a pod's ports
    add("--metrics-port", "port of /metrics (default %(default)s)", type=int, default=ports.OPERATOR_METRICS)
    add(
        "--health-port",
        "port of /health and /ready (default %(default)s)",
        type=int,
        default=ports.OPERATOR_HEALTH,
    )
    add("--log-level", "least level that is logged (default %(default)s)", choices=LEVELS, default="info")
    add(
        "--log-format",
        "json for machines, text for eyes (default %(default)s)",
        choices=["json", "text"],
        default="json",
    )


def make_settings(options: argparse.Namespace) -> OperatorSettings:
    """Settings from parsed options.

    Raises:
        SettingsError: an option cannot be used.
    """
    namespace = options.operator_namespace or _read_namespace()
    build = BuildSettings(
        engine_image=options.engine_image,
        gateway_image=options.gateway_image,
        image_pull_policy=options.image_pull_policy,
        image_pull_secrets=tuple(options.image_pull_secret),
        gateway_replicas=options.gateway_replicas,
        gateway_cpu=options.gateway_cpu,
        gateway_memory=options.gateway_memory,
        gateway_memory_limit=options.gateway_memory_limit,
        gateway_grace_seconds=options.gateway_grace_seconds,
        gateway_args=tuple(options.gateway_arg),
        gateway_env=tuple(_read_variable(text) for text in options.gateway_env),
        gateway_role_kind=options.gateway_role_kind,
        gateway_role_name=options.gateway_role_name,
        operator_namespace=namespace,
        metrics_namespaces=tuple(options.metrics_namespace),
        network_policies=options.network_policies == "true",
        cluster_domain=options.cluster_domain,
        node_cache_path=options.node_cache_path,
    )
    for flag in (
        "gateway_replicas",
        "gateway_grace_seconds",
        "resync_seconds",
        "watch_inactivity_seconds",
        "max_parallel",
    ):
        if getattr(options, flag) <= 0:
            raise SettingsError(f"--{flag.replace('_', '-')} must be above 0")
    return OperatorSettings(
        plan=PlanSettings(build=build, history=options.revision_history),
        lease=LeaseSettings(namespace=namespace, name=options.lease_name),
        identity=options.identity or f"{socket.gethostname()}-{os.getpid()}",
        namespaces=tuple(dict.fromkeys(options.namespace)),
        kubeconfig=Path(options.kubeconfig) if options.kubeconfig else None,
        context=options.context,
        resync_seconds=options.resync_seconds,
        watch_inactivity_seconds=options.watch_inactivity_seconds,
        max_parallel=options.max_parallel,
        listen_host=options.listen_host,
        metrics_port=options.metrics_port,
        health_port=options.health_port,
    )


def _read_variable(text: str) -> EnvVar:
    name, equals, value = text.partition("=")
    if not (equals and re.fullmatch(r"[A-Za-z_][A-Za-z0-9_.-]*", name)):
        raise SettingsError(f"--gateway-env {name}: write NAME=VALUE")
    if name in POD_FIELDS:
        raise SettingsError(f"--gateway-env {name}: the operator sets this variable itself")
    return EnvVar(name=name, value=value)


def _read_namespace() -> str:
    try:
        return NAMESPACE_FILE.read_text(encoding="utf-8").strip()
    except OSError as error:
        raise SettingsError("outside a pod write --operator-namespace, where the Lease is kept") from error


def get_version() -> str:
    """Version of the installed distribution; images that copy the sources have none."""
    try:
        return version("millpond")
    except PackageNotFoundError:
        return os.environ.get("MILLPOND_VERSION", "unknown")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run until a signal comes; 0 after a clean stop, 1 after a failure, 2 for a bad command line."""
    options = make_parser().parse_args(arguments)
    configure_logging(level=options.log_level, as_json=options.log_format == "json")
    try:
        settings = make_settings(options)
        connection = load_connection(settings.kubeconfig, settings.context)
        asyncio.run(_run(settings, connection))
    except OperatorError as error:
        sys.stderr.write(f"millpond-operator: {error}\n")
        return 2 if isinstance(error, SettingsError) else 1
    return 0


async def _run(settings: OperatorSettings, connection: SingleConfig) -> None:
    await run_operator(settings, connection, stop=asyncio.Event(), handle_signals=True)
