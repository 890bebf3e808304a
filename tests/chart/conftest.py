"""Render the chart with the pinned Helm."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "charts" / "millpond"
Manifest = dict[str, Any]


@dataclass(frozen=True)
class Rendered:
    """What one `helm template` gave."""

    objects: tuple[Manifest, ...]
    release: str
    namespace: str

    def of(self, kind: str) -> list[Manifest]:
        return [found for found in self.objects if found["kind"] == kind]

    def one(self, kind: str, suffix: str = "") -> Manifest:
        (found,) = [item for item in self.of(kind) if item["metadata"]["name"].endswith(suffix)]
        return found


class Helm:
    """The Helm binary."""

    def __init__(self, binary: str) -> None:
        self.binary = binary
        self._rendered: dict[tuple[object, ...], Rendered] = {}

    def run(self, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [self.binary, *arguments], check=False, capture_output=True, text=True, timeout=120
        )
        assert not check or done.returncode == 0, done.stderr
        return done

    def template(
        self,
        *flags: str,
        values: Path | None = None,
        release: str = "millpond",
        namespace: str = "millpond-system",
    ) -> Rendered:
        key = (flags, values, release, namespace)
        if key not in self._rendered:
            self._rendered[key] = self._template(*flags, values=values, release=release, namespace=namespace)
        return self._rendered[key]

    def _template(self, *flags: str, values: Path | None, release: str, namespace: str) -> Rendered:
        more = ["--values", str(values)] if values is not None else []
        done = self.run("template", release, str(CHART), "--namespace", namespace, *more, *flags)
        objects = tuple(found for found in yaml.load_all(done.stdout, Loader=yaml.CSafeLoader) if found)
        return Rendered(objects, release, namespace)


@pytest.fixture(scope="session")
def helm() -> Helm:
    done = subprocess.run(
        [sys.executable, str(ROOT / "hack" / "fetch-helm")],
        check=False,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    return Helm(done.stdout.strip())
