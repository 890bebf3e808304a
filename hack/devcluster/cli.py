"""Command line: `python -m devcluster up|down|wipe|status|push|kubeconfig|kubectl|build`."""

import argparse
import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType

from devcluster import build, lease, lifecycle, registry, status
from devcluster.errors import DevclusterError
from devcluster.paths import Layout, find_layout
from devcluster.steps import say, step


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; errors become one line and status 1."""
    parser = make_parser()
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["kubectl"]:
        arguments.insert(1, "--")  # kubectl's own options may come first
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        result = COMMANDS[options.command](find_layout(os.environ, Path.home()), options)
    except DevclusterError as error:
        say(f"devcluster: {error}")
        return 1
    except OSError as error:
        say(f"devcluster: {error}; what this command had started is gone")
        return 1
    except KeyboardInterrupt:
        say("devcluster: interrupted; what this command had started is gone")
        return 130
    return result


def make_parser() -> argparse.ArgumentParser:
    """Describe the commands."""
    parser = argparse.ArgumentParser(
        prog="devcluster", description="A real single-node Kubernetes for tests and demo."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    up = commands.add_parser("up", help="start the control plane, or add what is missing")
    up.add_argument(
        "--node", action="store_true", help="also run a node with containers, DNS and a registry (root)"
    )
    commands.add_parser("down", help="stop everything; keep programs and images")
    commands.add_parser("wipe", help="stop everything and remove programs and images too")
    shown = commands.add_parser("status", help="say what runs")
    shown.add_argument("-o", "--output", choices=("text", "json"), default="text")
    pushed = commands.add_parser(
        "push", help="push a local image to the cluster's registry; prints its name there"
    )
    pushed.add_argument("image")
    commands.add_parser("kubeconfig", help="print the path of the administrator's kubeconfig")
    kubectl = commands.add_parser("kubectl", help="run kubectl against the cluster", add_help=False)
    kubectl.add_argument("arguments", nargs=argparse.REMAINDER)
    commands.add_parser(
        "build", help="compile the cluster's programs if they are not cached; prints their folder"
    )
    return parser


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _up(layout: Layout, options: argparse.Namespace) -> int:
    with step("cluster is up"):
        record = lifecycle.up(layout, node=options.node, environ=os.environ)
    lease.keep_up(layout)
    key = build.find_version_key()
    if record.version != key:
        say(f"note: it runs {record.version}, this checkout has {key}: run `down`, then `up` to change")
    print(f"export KUBECONFIG={layout.admin_kubeconfig}")
    return 0


def _down(layout: Layout, _options: argparse.Namespace) -> int:
    with step("cluster is down"):
        if not lifecycle.down(layout):
            say("nothing was running")
    return 0


def _wipe(layout: Layout, _options: argparse.Namespace) -> int:
    with step("cluster, images and programs are removed"):
        lifecycle.wipe(layout)
    return 0


def _status(layout: Layout, options: argparse.Namespace) -> int:
    observed, record = lifecycle.observe(layout)
    document = status.make_status_document(status.Status(layout, observed, record))
    print(json.dumps(document, indent=2) if options.output == "json" else status.render_status(document))
    return 0 if document["running"] else 3


def _push(layout: Layout, options: argparse.Namespace) -> int:
    print(registry.push(lifecycle.require_record(layout, node=True), options.image))
    return 0


def _kubeconfig(layout: Layout, _options: argparse.Namespace) -> int:
    lifecycle.require_record(layout)
    print(layout.admin_kubeconfig)
    return 0


def _kubectl(layout: Layout, options: argparse.Namespace) -> int:
    record = lifecycle.require_record(layout)
    kubectl = str(Path(record.programs) / "kubectl")
    sys.stdout.flush()
    arguments = options.arguments[1:] if options.arguments[:1] == ["--"] else options.arguments
    os.execve(kubectl, [kubectl, *arguments], {**os.environ, "KUBECONFIG": str(layout.admin_kubeconfig)})


def _build(layout: Layout, _options: argparse.Namespace) -> int:
    print(build.build(layout))
    return 0


COMMANDS: dict[str, Callable[[Layout, argparse.Namespace], int]] = {
    "up": _up,
    "down": _down,
    "wipe": _wipe,
    "status": _status,
    "push": _push,
    "kubeconfig": _kubeconfig,
    "kubectl": _kubectl,
    "build": _build,
}
