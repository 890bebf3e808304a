"""`millpond-engine fetch` and `inspect`: flags and bodies, for the command line to wire in."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
from pathlib import Path

from millpond_engine.fetch.model import DEFAULT_REVISION, run_fetch, run_inspect
from millpond_engine.termination import HELP, choose_termination_path

STOPPED = 128 + signal.SIGTERM
"""Exit code after SIGTERM, as a shell would tell it."""


def add_fetch_flags(parser: argparse.ArgumentParser) -> None:
    """Flags of `fetch`."""
    parser.add_argument(
        "--source",
        required=True,
        metavar="URI",
        help="hf://OWNER/REPO[/FILE], http(s)://, s3://BUCKET/PREFIX or file:///",
    )
    parser.add_argument("--to", required=True, type=Path, metavar="DIR", help="where the files go")
    parser.add_argument(
        "--revision", help=f"branch, tag or commit of a hub repository (default: {DEFAULT_REVISION})"
    )
    parser.add_argument("--sha256", metavar="HEX", help="digest of the one file that the source names")
    _add_termination_flag(parser)


def add_inspect_flags(parser: argparse.ArgumentParser) -> None:
    """Flags of `inspect`."""
    parser.add_argument(
        "--path", required=True, type=Path, metavar="PATH", help="GGUF file, or directory with a model"
    )
    _add_termination_flag(parser)


def _add_termination_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--termination-message", type=Path, metavar="FILE", help=HELP)


def run_fetch_command(arguments: argparse.Namespace) -> int:
    """Fetch; returns the exit code."""
    _end_on_sigterm()
    return run_fetch(
        arguments.source,
        arguments.to,
        revision=arguments.revision,
        sha256=arguments.sha256,
        termination_message=choose_termination_path(arguments.termination_message),
    )


def run_inspect_command(arguments: argparse.Namespace) -> int:
    """Tell the size of a model that is here; returns the exit code."""
    _end_on_sigterm()
    path = choose_termination_path(arguments.termination_message)
    return run_inspect(arguments.path, termination_message=path)


def _end_on_sigterm() -> None:
    """End at once when asked to: what arrived is kept, and a pod that nobody wants any more goes.

    The first process of a container has no default for SIGTERM: it would stay for the pod's whole grace. A thread
    ends it, since Python's own handlers wait while a compiled library reads.
    """
    told, tells = os.pipe()
    os.set_blocking(tells, False)
    signal.set_wakeup_fd(tells)
    signal.signal(signal.SIGTERM, lambda _number, _frame: None)

    def wait() -> None:
        os.read(told, 1)
        print("fetch: asked to stop; what arrived is kept", file=sys.stderr, flush=True)
        os._exit(STOPPED)

    threading.Thread(target=wait, name="sigterm", daemon=True).start()
