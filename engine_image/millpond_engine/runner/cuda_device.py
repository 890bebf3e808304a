"""Whether this process can use a GPU; imports nothing that a CPU image lacks."""

from __future__ import annotations

import importlib.util
import os
import shutil
from pathlib import Path

import torch


class DeviceUnavailableError(RuntimeError):
    """The configured device cannot be used; the message says what is missing."""


def find_gpu(rank: int = 0, size: int = 1) -> torch.device:
    """The GPU that one of `size` ranks uses; this process works on it from now on.

    Raises:
        DeviceUnavailableError: there are too few, or kernels cannot be compiled.
    """
    if not torch.cuda.is_available():
        raise DeviceUnavailableError(
            "device Cuda is asked for, but torch finds no GPU; see `nvidia-smi` in the container"
        )
    from millpond_engine.kernels.gpu.prebuilt import find_prebuilt, use_prebuilt  # noqa: PLC0415

    problem = explain_missing_compiler()
    if problem is not None:
        raise DeviceUnavailableError(f"a GPU is there, but {problem}; or set device Cpu")
    prebuilt = find_prebuilt(_find_triton() or Path())
    if prebuilt is not None:
        use_prebuilt(prebuilt)
    if torch.cuda.device_count() < size:
        raise DeviceUnavailableError(
            f"tensorParallelSize is {size}, but torch finds {torch.cuda.device_count()} GPUs; lower it or add GPUs"
        )
    if size > 1:
        torch.cuda.set_device(rank)
    return torch.device("cuda", torch.cuda.current_device())


def explain_missing_compiler() -> str | None:
    """What is missing to compile kernels; None when nothing is."""
    triton = _find_triton()
    if triton is None:
        return "Triton is not installed: use an engine image built with DEVICE=cuda"
    from millpond_engine.kernels.gpu.prebuilt import find_prebuilt  # noqa: PLC0415

    compiler = any(shutil.which(name) for name in ("gcc", "clang")) or "CC" in os.environ
    if not (compiler or find_prebuilt(triton) or "TRITON_CACHE_DIR" in os.environ):
        return (
            "Triton finds no C compiler for its driver module: "
            "install gcc or name a filled cache in TRITON_CACHE_DIR"
        )
    return None


def _find_triton() -> Path | None:
    spec = importlib.util.find_spec("triton")
    return None if spec is None or spec.origin is None else Path(spec.origin).parent
