from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from tests.support.engine_server import Running, Setup, run_engine


@pytest.fixture
async def engine() -> AsyncIterator[Running]:
    """An engine as fast as its loop, 1,024 tokens of context, 256 blocks of 16; whole again after the test."""
    async with run_engine(Setup()) as running:
        yield running
        await running.settle()
