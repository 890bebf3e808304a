"""Clusters of these tests' own, which they may break; the programs are the shared, cached ones."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from devcluster import lifecycle
from devcluster.paths import Layout, find_layout

HACK = Path(__file__).parents[2] / "hack"


@dataclass(frozen=True)
class Driver:
    """The driver's command line over a state folder of its own."""

    layout: Layout
    environ: dict[str, str]

    def argv(self, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "devcluster", *arguments]

    def run(self, *arguments: str, seconds: float = 120.0, **extra: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.argv(*arguments), env={**self.environ, **extra}, capture_output=True, text=True, timeout=seconds, check=False
        )  # fmt: skip

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self.argv(*arguments),
            env=self.environ,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )


@pytest.fixture
def driver(tmp_path: Path) -> Iterator[Driver]:
    """A driver whose cluster is gone after the test, however the test ends."""
    environ = {**os.environ, "PYTHONPATH": str(HACK), "MILLPOND_STATE_DIR": str(tmp_path)}
    made = Driver(find_layout(environ, Path.home()), environ)
    yield made
    lifecycle.down(made.layout)


@pytest.fixture
def root() -> None:
    if os.geteuid() != 0:
        pytest.skip("a node needs root")
