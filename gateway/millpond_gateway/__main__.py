"""`python -m millpond_gateway`."""

import sys

from millpond_gateway.cli import main

sys.exit(main())
