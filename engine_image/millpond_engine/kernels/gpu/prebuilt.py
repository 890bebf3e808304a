"""Triton's driver module, compiled when the image is built: the image has no C compiler, and Triton asks for one once.

Triton 3.7 compiles one C file, `driver.c` of its NVIDIA backend, at the first launch on a machine; the kernels themselves
go through its own `ptxas`. The image is built with `python -m millpond_engine.kernels.gpu.prebuilt TRITON DIR`; at run time
the module is found in the folder that MILLPOND_KERNELS names, by the digest of the source it was made from.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

_NAME = "cuda_utils"
"""What Triton calls the module."""


def find_prebuilt(triton: Path, folder: Path | None = None) -> Path | None:
    """The module for the Triton in this folder, if this image has it."""
    named = os.environ.get("MILLPOND_KERNELS", "")
    folder = folder or (Path(named) if named else None)
    source = _source(triton)
    if folder is None or not source.is_file():
        return None
    found = folder / _file_name(source.read_bytes())
    return found if found.is_file() else None


def use_prebuilt(module: Path) -> None:
    """Let Triton take this module where it would call a compiler for it."""
    from triton import knobs  # noqa: PLC0415 - the CPU image has no Triton

    def build(name: str, *_: Any) -> str:
        if name != _NAME:
            raise RuntimeError(f"Triton wants to compile {name}, which this image has not built; install gcc")
        return str(module)

    knobs.build.impl = build


def compile_driver(triton: Path, folder: Path) -> Path:
    """Compile the module against the headers that come with Triton; the GPU's own library is not needed.

    Raises:
        subprocess.CalledProcessError: the compiler failed; what it said is on standard error.
    """
    source = _source(triton)
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / _file_name(source.read_bytes())
    cc = os.environ.get("CC", "gcc")
    with tempfile.TemporaryDirectory() as work:
        # An empty library of that name: the module must ask for the driver's when it is loaded.
        stub = Path(work) / "libcuda.so.1"
        empty = ["-shared", "-Wl,-soname,libcuda.so.1", "-o", str(stub), "-xc", "/dev/null"]
        subprocess.run([cc, *empty], check=True)  # noqa: S603 - the builder's own compiler
        includes = [f"-I{source.parent / 'include'}", f"-I{sysconfig.get_paths()['include']}"]
        flags = ["-O3", "-shared", "-fPIC", "-Wno-psabi", "-Wl,--no-as-needed", "-o", str(target)]
        subprocess.run([cc, str(source), *flags, *includes, str(stub)], check=True)  # noqa: S603 - as above
    return target


def _source(triton: Path) -> Path:
    return triton / "backends" / "nvidia" / "driver.c"


def _file_name(source: bytes) -> str:
    digest = hashlib.sha256(source).hexdigest()[:16]
    return f"{_NAME}-{digest}{sysconfig.get_config_var('EXT_SUFFIX')}"


if __name__ == "__main__":
    if _source(Path(sys.argv[1])).is_file():  # an image for the CPU has no Triton
        print(compile_driver(Path(sys.argv[1]), Path(sys.argv[2])))
