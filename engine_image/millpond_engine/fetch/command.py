"""`millpond-engine fetch`: flags and body, for the command line to wire in."""

from __future__ import annotations

import argparse
from pathlib import Path

from millpond_engine.fetch.model import DEFAULT_REVISION, run_fetch

TERMINATION_LOG = Path("/dev/termination-log")


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
    parser.add_argument(
        "--termination-message",
        type=Path,
        metavar="FILE",
        default=TERMINATION_LOG,
        help=f"gets one JSON line on failure (default: {TERMINATION_LOG})",
    )


def run_fetch_command(arguments: argparse.Namespace) -> int:
    """Fetch; returns the exit code."""
    return run_fetch(
        arguments.source,
        arguments.to,
        revision=arguments.revision,
        sha256=arguments.sha256,
        termination_message=arguments.termination_message,
    )
