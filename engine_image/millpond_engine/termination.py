"""The last word of a container: one JSON line where Kubernetes reads it, and nowhere else."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from pathlib import Path

POD_PATH = Path("/dev/termination-log")
HELP = f"gets one JSON line on failure (default: {POD_PATH} in a pod, none elsewhere)"
_MESSAGE_BYTES = 3500
"""Kubernetes cuts termination messages at 4096 bytes."""


def choose_termination_path(named: Path | None, environ: Mapping[str, str] = os.environ) -> Path | None:
    """The file that a flag names; without one the pod's, and none where no kubelet started this process."""
    if named is not None:
        return named
    return POD_PATH if environ.get("KUBERNETES_SERVICE_HOST") else None


def write_termination_message(path: Path | None, reason: str, message: str, **more: object) -> None:
    """Leave reason, message and what else is told; a path that cannot be written is ignored, the exit code still tells."""
    if path is None:
        return
    kept = message.encode()[:_MESSAGE_BYTES].decode(errors="ignore")
    with contextlib.suppress(OSError):
        path.write_text(json.dumps({"reason": reason, "message": kept, **more}) + "\n", encoding="utf-8")
