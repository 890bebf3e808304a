"""`python -m millpond_engine`."""

from __future__ import annotations

import sys

from millpond_engine.cli import main

sys.exit(main())
