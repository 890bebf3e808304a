"""`millpond-engine fetch` and `inspect`: flags and bodies, for the command line to wire in."""

from __future__ import annotations

import argparse
from pathlib import Path

from millpond_engine.fetch.model import DEFAULT_REVISION, run_fetch, run_inspect
from millpond_engine.termination import HELP, choose_termination_path


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
    return run_fetch(
        arguments.source,
        arguments.to,
        revision=arguments.revision,
        sha256=arguments.sha256,
        termination_message=choose_termination_path(arguments.termination_message),
    )


def run_inspect_command(arguments: argparse.Namespace) -> int:
    """Tell the size of a model that is here; returns the exit code."""
    path = choose_termination_path(arguments.termination_message)
    return run_inspect(arguments.path, termination_message=path)
