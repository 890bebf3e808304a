"""Command line of the engine: `serve`, `fetch`, `inspect`, `advise`.

Exit codes: 0 done, 1 the work failed, 2 the command line or the configuration is wrong.
"""

from __future__ import annotations

import argparse
import errno
import sys
from collections.abc import Sequence

from millpond_common.contract.engine_config import ConfigError
from millpond_common.version import __version__
from millpond_engine.commands.advise import add_advise_flags, run_advise
from millpond_engine.commands.serve import add_serve_flags, run_serve
from millpond_engine.fetch.command import (
    add_fetch_flags,
    add_inspect_flags,
    run_fetch_command,
    run_inspect_command,
)
from millpond_engine.text.tokenizer import TokenizerError


def make_parser() -> argparse.ArgumentParser:
    """The whole command line."""
    parser = argparse.ArgumentParser(prog="millpond-engine", description="Millpond's inference engine.")
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    serve = commands.add_parser(
        "serve", help="load a model and serve it", description="Load a model and serve it."
    )
    add_serve_flags(serve)
    serve.set_defaults(run=run_serve)
    fetch = commands.add_parser(
        "fetch", help="bring a model into a directory", description="Bring a model into a directory."
    )
    add_fetch_flags(fetch)
    fetch.set_defaults(run=run_fetch_command)
    inspect = commands.add_parser(
        "inspect",
        help="tell the size of a model that is here",
        description="Tell the size of a model that is here.",
    )
    add_inspect_flags(inspect)
    inspect.set_defaults(run=run_inspect_command)
    advise = commands.add_parser(
        "advise", help="choose the block size", description="Choose the size of KV blocks."
    )
    add_advise_flags(advise)
    advise.set_defaults(run=run_advise)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand; returns the exit code."""
    arguments = make_parser().parse_args(argv)
    try:
        code: int = arguments.run(arguments)
    except (ConfigError, TokenizerError) as error:
        print(f"millpond-engine: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        if error.errno not in (errno.EADDRINUSE, errno.EACCES, errno.EADDRNOTAVAIL):
            raise
        print(f"millpond-engine: {error}; choose another address or port", file=sys.stderr)
        return 2
    except OverflowError as error:
        print(f"millpond-engine: {error}; ports are 0 to 65535", file=sys.stderr)
        return 2
    return code
