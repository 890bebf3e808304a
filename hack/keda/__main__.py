"""Entry point of `python -m keda`: builds what is missing and prints the folder of the programs."""

import os
import sys
from pathlib import Path

from devcluster.errors import DevclusterError
from devcluster.paths import find_layout
from keda.build import build


def main() -> int:
    """Build; returns the exit status."""
    try:
        print(build(find_layout(os.environ, Path.home())))
    except DevclusterError as error:
        print(f"keda: {error}", file=sys.stderr)
        return 1
    return 0


sys.exit(main())
