"""Command line of the gateway."""

from __future__ import annotations

import argparse
import errno
import gc
import os
import sys
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path

import structlog
import uvloop
from lightkube.core.exceptions import ConfigError

from millpond_common.contract import ports
from millpond_common.version import __version__
from millpond_gateway.app.form import find_form
from millpond_gateway.app.memory import find_allocator
from millpond_gateway.app.options import Options
from millpond_gateway.app.peer_keys import PeerKeyError, read_keys
from millpond_gateway.app.plan import WorkerPlan, take_plan
from millpond_gateway.app.process import GatewayProcess
from millpond_gateway.app.supervisor import Supervisor
from millpond_gateway.app.traces import make_tracing
from millpond_gateway.app.values import (
    parse_address,
    parse_port,
    parse_positive_count,
    parse_positive_seconds,
    parse_seconds,
    parse_workers,
)
from millpond_gateway.flow.records import FlowSettings
from millpond_gateway.proxy.settings import RelaySettings
from millpond_gateway.routing.records import Policy
from millpond_gateway.world.kubernetes import load_config
from millpond_gateway.world.static import StaticError, parse_static
from millpond_gateway.world.watch import WatchSettings

_GC_ALLOCATIONS = 20_000
"""Requests leave few cycles: the default of 700 spends its time finding none."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the gateway; the exit status is 0 after a drain, 2 for a wrong command line, 1 for anything else."""
    arguments = sys.argv[1:] if arguments is None else arguments
    plan = take_plan()
    options = parse_options(arguments)
    configure_log()
    if not options.static:
        try:
            load_config()
        except ConfigError as error:
            print(f"millpond-gateway: {error}", file=sys.stderr)
            return 2
    gc.freeze()  # what is loaded by now lives as long as the process; collections need not walk it
    gc.set_threshold(_GC_ALLOCATIONS, 20, 50)
    try:
        if plan is None and options.workers > 1:
            return uvloop.run(_supervise(options, arguments))
        return uvloop.run(_run(options, plan))
    except OSError as error:
        if error.errno not in (errno.EADDRINUSE, errno.EACCES, errno.EADDRNOTAVAIL):
            raise
        print(
            f"millpond-gateway: cannot listen: {error}; choose other --host, --port or --admin-port",
            file=sys.stderr,
        )
    except OverflowError as error:
        print(f"millpond-gateway: {error}; ports are 0 to 65535", file=sys.stderr)
    return 2


async def _run(options: Options, plan: WorkerPlan | None) -> int:
    return await GatewayProcess(options, plan, tracing=make_tracing()).run()


async def _supervise(options: Options, arguments: Sequence[str]) -> int:
    return await Supervisor(options, arguments).run()


def parse_options(arguments: Sequence[str]) -> Options:
    """Options from the command line; leaves the process with status 2 when they cannot be used."""
    parser = make_parser()
    given = parser.parse_args(arguments)
    for flag in given.static:
        try:
            parse_static(flag, weights=given.weights)
        except StaticError as error:
            parser.error(f"--static {error}")
    if given.static and given.peer_key_file is not None:
        try:
            read_keys(given.peer_key_file)
        except PeerKeyError as error:
            parser.error(f"--peer-key-file {error}")
    pools = {flag.partition("=")[0] for flag in given.static}
    for flag in given.weights:
        if flag.partition("=")[0] not in pools:
            parser.error(f"--weights {flag!r}: no --static pool has that name")
    relay = RelaySettings(**{name: getattr(given, name) for name in _RELAY_FLAGS})
    return Options(
        host=given.host,
        port=given.port,
        admin_port=given.admin_port,
        static=tuple(given.static),
        weights=tuple(given.weights),
        routing=given.routing,
        price_of_recompute=given.price_of_recompute,
        namespace=given.namespace,
        peer_port=given.peer_port,
        peers=tuple(given.peer),
        peer_key_file=given.peer_key_file,
        any_peer=given.any_peer,
        kv_events=not given.no_kv_events,
        workers=given.workers,
        poll_seconds=given.poll_seconds,
        drain_delay_seconds=given.drain_delay_seconds,
        grace_seconds=given.grace_seconds,
        access_log=not given.no_access_log,
        seed=given.seed,
        relay=replace(relay, expose_decisions=given.expose_decisions, hidden_usage=not given.no_hidden_usage),
        flow=FlowSettings(hedge_percent=given.hedge_percent),
        watch=WatchSettings(resync_seconds=given.resync_seconds),
    )


_RELAY_FLAGS = {
    "max_connections": "client connections at once",
    "max_requests": "open requests at once",
    "max_body_bytes": "largest request body",
    "max_buffered_body_bytes": "all request bodies held at once",
    "first_byte_seconds": "from sending a request to an engine to its first answered byte",
    "idle_seconds": "between two bytes of an engine's answer",
    "total_seconds": "from the end of a request to the end of its answer",
    "engine_idle_seconds": "keep-alive towards engines; must be below theirs",
    "comment_seconds": "silence after which a streaming client gets a comment; 0 for clients that choke on comments",
    "max_attempts": "replicas asked for one request",
}

_MAY_BE_ZERO = {"comment_seconds"}


def make_parser() -> argparse.ArgumentParser:
    """The command line; defaults are those of `Options` and `RelaySettings`."""
    parser = argparse.ArgumentParser(
        prog="millpond-gateway",
        description="One OpenAI-compatible address for every InferencePool of a namespace.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    _add_process(parser)
    _add_static(parser)
    _add_peers(parser)
    _add_watching(parser)
    _add_requests(parser)
    _add_limits(parser)
    return parser


def _add_process(parser: argparse.ArgumentParser) -> None:
    add, defaults = parser.add_argument, Options()
    add("--version", action="version", version=f"%(prog)s {__version__} ({find_form()}, {find_allocator()})")
    add("--host", default=defaults.host, help="address to listen on")
    add("--port", type=parse_port, default=ports.GATEWAY_HTTP, help="OpenAI surface; 0 picks a free port")
    add(
        "--admin-port",
        type=parse_port,
        default=ports.GATEWAY_ADMIN,
        help="health, metrics, report and probe",
    )
    add(
        "--workers",
        type=parse_workers,
        default=defaults.workers,
        help="processes that serve the port together, each at a peer port of its own from --peer-port on",
    )
    add(
        "--drain-delay-seconds",
        type=parse_seconds,
        default=defaults.drain_delay_seconds,
        help="requests are still accepted this long after SIGTERM",
    )
    add(
        "--grace-seconds",
        type=parse_seconds,
        default=defaults.grace_seconds,
        help="open streams may take this long to finish",
    )


def _add_static(parser: argparse.ArgumentParser) -> None:
    add, defaults = parser.add_argument, Options()
    add(
        "--static",
        action="append",
        default=[],
        metavar="NAME=URL[,URL...]",
        help="serve these engines instead of asking Kubernetes; a path in a URL goes in front of the engine's own; may be repeated",
    )
    add(
        "--weights",
        action="append",
        default=[],
        metavar="NAME=REVISION=WEIGHT[,...]",
        help="shares of new requests by revision of a static pool; revisions are named in its URLs, ?revision=",
    )
    add(
        "--routing",
        choices=[policy.value for policy in Policy],
        default=defaults.routing,
        help="policy of static pools",
    )
    add(
        "--price-of-recompute",
        type=parse_seconds,
        default=defaults.price_of_recompute,
        help="λ of static pools",
    )


def _add_peers(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--peer-port",
        type=parse_port,
        default=ports.GATEWAY_PEERS,
        help="where other gateways send their decisions",
    )
    add(
        "--peer",
        action="append",
        type=parse_address,
        default=[],
        metavar="HOST:PORT",
        help="another gateway; may be repeated",
    )
    add(
        "--peer-key-file",
        type=Path,
        default=None,
        metavar="FILE",
        help="keys by which gateways know one another, one a line, read again when it changes; inside a cluster the "
        "operator's Secret needs no flag; without any, peers are known by their address alone",
    )
    add(
        "--any-peer",
        action="store_true",
        help="hear peers at any address; for networks that rewrite the addresses of pods",
    )


def _add_watching(parser: argparse.ArgumentParser) -> None:
    add, defaults = parser.add_argument, Options()
    add(
        "--namespace",
        default=os.environ.get("POD_NAMESPACE"),
        help="namespace to watch; default: the pod's own",
    )
    add(
        "--resync-seconds",
        type=parse_positive_seconds,
        default=defaults.watch.resync_seconds,
        help="a full list at least this often",
    )
    add(
        "--poll-seconds",
        type=parse_positive_seconds,
        default=defaults.poll_seconds,
        help="how often each engine is asked for its state",
    )
    add("--no-kv-events", action="store_true", help="do not follow the engines' KV events")


def _add_requests(parser: argparse.ArgumentParser) -> None:
    add, defaults = parser.add_argument, Options()
    add(
        "--hedge-percent",
        type=parse_seconds,
        default=defaults.flow.hedge_percent,
        help="requests of a hundred that may get a second attempt when the first is late and has not begun",
    )
    add(
        "--no-hidden-usage",
        action="store_true",
        help="do not ask engines for the usage of streams whose clients did not",
    )
    add("--no-access-log", action="store_true", help="no line per request")
    add("--expose-decisions", action="store_true", help="answer with the replica and the score breakdown")
    add("--seed", type=int, default=None, help="of tie-breaks; random when absent")


def _add_limits(parser: argparse.ArgumentParser) -> None:
    """A flag for each setting of the relay that has a text."""
    kinds = {field.name: field.default for field in fields(RelaySettings)}
    for name, text in _RELAY_FLAGS.items():
        parse = parse_positive_count if isinstance(kinds[name], int) else parse_positive_seconds
        parse = parse_seconds if name in _MAY_BE_ZERO else parse
        parser.add_argument(f"--{name.replace('_', '-')}", type=parse, default=kinds[name], help=text)


def configure_log() -> None:
    """JSON lines on standard error; the access log has standard output."""
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(),
        ],
        logger_factory=structlog.PrintLoggerFactory(file=sys.stderr),
        cache_logger_on_first_use=True,
    )
