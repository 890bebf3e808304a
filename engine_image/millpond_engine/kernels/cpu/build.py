"""Compile the CPU kernels for this processor, or find them compiled.

The engine image compiles every variant at build time (`python -m millpond_engine.kernels.cpu.build DIR`) and
names the folder in MILLPOND_KERNELS; elsewhere the one needed is compiled on first use and cached.
"""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

SOURCES = ("cpu.cpp", "vectors.h", "matmul.h", "attention.h")
FLAGS = ("-O3", "-std=c++17", "-fopenmp", "-fno-math-errno", "-ffp-contract=fast", "-shared", "-fPIC")
COMPILE_SECONDS = 300


@dataclass(frozen=True, slots=True)
class Variant:
    """One instruction set."""

    name: str
    flags: tuple[str, ...]
    cpu_flags: frozenset[str]
    """Feature words of /proc/cpuinfo that a processor needs to run it."""
    vendor: str = ""
    """The only make of processor on which it is worth choosing, when there is one."""


_AVX512 = frozenset({"avx512f", "avx512bw", "avx512dq", "avx512vl"})
VARIANTS = (
    Variant(
        "avx512bf16",
        ("-march=x86-64-v4", "-mavx512bf16", "-mprefer-vector-width=512"),
        _AVX512 | {"avx512_bf16"},
        "AuthenticAMD",
    ),
    Variant("avx512", ("-march=x86-64-v4", "-mprefer-vector-width=512"), _AVX512),
    Variant("avx2", ("-march=x86-64-v3",), frozenset({"avx2", "fma", "bmi2", "f16c"})),
)
"""Best first. Intel's cores take two cycles for a bfloat16 dot product, and do four times as many multiply-adds of
floats meanwhile, which is twice the work: there, widening the weights is the faster way, and the more exact one."""
GENERIC = Variant("generic", (), frozenset())


class KernelBuildError(RuntimeError):
    """The kernels cannot be compiled; the engine then runs on plain torch."""


def choose_variant(machine: str, words: frozenset[str]) -> Variant:
    """The best variant for a processor, from what `read_cpu_words` says of it."""
    if machine in {"x86_64", "AMD64"}:
        for variant in VARIANTS:
            if variant.cpu_flags <= words and (not variant.vendor or variant.vendor in words):
                return variant
    return GENERIC


def runs(variant: Variant) -> bool:
    """Whether this processor has the instructions."""
    return variant.cpu_flags <= read_cpu_words()


def read_cpu_words(path: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """Feature words of the first processor and its vendor; empty where there is no such file."""
    try:
        lines = path.read_text(encoding="utf-8").partition("\n\n")[0].splitlines()
    except OSError:
        return frozenset()
    wanted = ("flags", "vendor_id")
    return frozenset(
        word for line in lines if line.startswith(wanted) for word in line.partition(":")[2].split()
    )


def find_library(variant: Variant) -> Path:
    """The compiled variant: from MILLPOND_KERNELS, from the cache, or compiled now.

    Raises:
        KernelBuildError: no compiler, or it fails.
    """
    name = library_name(variant)
    provided = os.environ.get("MILLPOND_KERNELS")
    if provided and (Path(provided) / name).exists():
        return Path(provided) / name
    cached = cache_directory() / name
    if not cached.exists():
        compile_variant(variant, cached)
    return cached


def library_name(variant: Variant) -> str:
    """File name with a digest of sources and flags, so that a changed source is compiled again."""
    digest = hashlib.sha256(" ".join((*FLAGS, *variant.flags)).encode())
    for name in SOURCES:
        digest.update((Path(__file__).parent / name).read_bytes())
    return f"millpond-{variant.name}-{digest.hexdigest()[:16]}.so"


def compile_variant(variant: Variant, target: Path) -> None:
    """Run the C++ compiler.

    Raises:
        KernelBuildError: with the compiler's first lines.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f"{target.name}.{os.getpid()}")
    source = Path(__file__).parent / SOURCES[0]
    command = [os.environ.get("CXX", "g++"), *FLAGS, *variant.flags, str(source), "-o", str(part)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_SECONDS, check=False)  # noqa: S603 - fixed arguments
    except (OSError, subprocess.TimeoutExpired) as error:
        raise KernelBuildError(
            f"cannot run the C++ compiler {command[0]}: {error}; install g++ or set CXX"
        ) from error
    if done.returncode != 0:
        raise KernelBuildError(f"{command[0]} failed on {source.name}: {done.stderr[:1000]}")
    part.rename(target)


def cache_directory() -> Path:
    """Where compiled kernels are kept between runs."""
    cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(cache) / "millpond" / "kernels"


def main(arguments: list[str]) -> int:
    """Compile every variant of this machine's architecture into a folder, as the image build does."""
    target = Path(arguments[0])
    for variant in (*VARIANTS, GENERIC) if platform.machine() == "x86_64" else (GENERIC,):
        compile_variant(variant, target / library_name(variant))
        print(target / library_name(variant))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
