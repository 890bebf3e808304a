"""Entry point of `python -m millpond_operator`."""

import sys

from millpond_operator.cli import main

sys.exit(main())
