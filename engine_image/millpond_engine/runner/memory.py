"""How many KV blocks fit: the arithmetic, and the limits of the container it reads."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from millpond_engine.model.errors import ModelTooLargeError

RESERVED_BYTES = 1 << 30
"""Left to the process itself: code, activations, queues."""
CPU_SHARE_PERCENT = 50
"""Of the memory left after weights, when the configuration names no size: a CPU's memory has other uses too."""


@dataclass(frozen=True, slots=True)
class AvailableMemory:
    """Bytes this process may still take, and who says so."""

    bytes: int
    source: str


@dataclass(frozen=True, slots=True)
class PoolSize:
    """Number of device blocks and what bounds it, in words with numbers."""

    num_blocks: int
    limited_by: str


class PoolTooSmallError(RuntimeError):
    """Not even one sequence fits; the message names the size to change."""


def compute_pool_size(
    *,
    bytes_per_block: int,
    block_tokens: int,
    device_bytes: int | None,
    available: AvailableMemory,
    useful_blocks: int,
) -> PoolSize:
    """Choose the number of blocks.

    `useful_blocks` is what the most sequences at full length could ever fill; more would lie idle.

    Raises:
        PoolTooSmallError: the bytes do not hold one block.
    """
    if device_bytes is not None:
        budget, reason = device_bytes, f"kvCache.deviceBytes of {format_bytes(device_bytes)}"
    else:
        budget = max(0, available.bytes - RESERVED_BYTES) * CPU_SHARE_PERCENT // 100
        reason = f"{CPU_SHARE_PERCENT} % of the {format_bytes(available.bytes)} that {available.source} leaves, less {format_bytes(RESERVED_BYTES)}"
    num_blocks = budget // bytes_per_block
    if num_blocks > useful_blocks and device_bytes is None:
        num_blocks, reason = (
            useful_blocks,
            f"maxSequences at full length need no more than {useful_blocks} blocks",
        )
    if num_blocks < 1:
        raise PoolTooSmallError(
            f"no KV block of {format_bytes(bytes_per_block)} ({block_tokens} tokens) fits: limited by {reason}; "
            "give the container more memory or lower kvCache.blockTokens"
        )
    return PoolSize(num_blocks, reason)


def check_weights_fit(weight_bytes: int, available: AvailableMemory) -> None:
    """Refuse weights before they are read: the kernel ends a process that takes too much without a word.

    Raises:
        ModelTooLargeError: with both sizes.
    """
    if weight_bytes > available.bytes:
        raise ModelTooLargeError(
            f"the weights take {format_bytes(weight_bytes)} and {available.source} leaves {format_bytes(available.bytes)}; "
            "give the container more memory, or take a smaller dtype or model"
        )


def read_available_memory(root: Path = Path("/")) -> AvailableMemory:
    """The smallest of the machine's free memory and the container's limit, cgroup version 1 or 2."""
    found = [_machine(root)]
    for folder, names in _cgroup_groups(root):
        free = _cgroup_free(folder, *names)
        if free is not None:
            found.append(AvailableMemory(free, "the cgroup limit"))
    return min(found, key=lambda memory: memory.bytes)


def _machine(root: Path) -> AvailableMemory:
    for line in _read(root / "proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            return AvailableMemory(int(line.split()[1]) * 1024, "the machine")
    return AvailableMemory(1 << 62, "the machine")


_V2 = ("memory.current", "memory.max", "inactive_file")
_V1 = ("memory.usage_in_bytes", "memory.limit_in_bytes", "total_inactive_file")


def _cgroup_groups(root: Path) -> list[tuple[Path, tuple[str, str, str]]]:
    """Folders whose limits bind this process, own group and all above it, with their file names."""
    groups: list[tuple[Path, tuple[str, str, str]]] = []
    base = root / "sys/fs/cgroup"
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        relative = path.lstrip("/")
        if controllers == "":
            groups.extend((folder, _V2) for folder in _ancestors(base, relative))
        elif "memory" in controllers.split(","):
            groups.extend((folder, _V1) for folder in _ancestors(base / "memory", relative))
    return groups


def _ancestors(base: Path, relative: str) -> list[Path]:
    folder, folders = base / relative, [base]
    while folder not in {base, folder.parent}:
        folders.append(folder)
        folder = folder.parent
    return folders


def _cgroup_free(folder: Path, usage: str, limit: str, inactive: str) -> int | None:
    limit_text, usage_text = _read(folder / limit).strip(), _read(folder / usage).strip()
    if not limit_text.isdigit() or not usage_text.isdigit():
        return None
    reclaimable = 0
    for line in _read(folder / "memory.stat").splitlines():
        if line.startswith(inactive + " "):
            reclaimable = int(line.split()[1])
    return max(0, int(limit_text) - int(usage_text) + reclaimable)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii")
    except OSError:
        return ""


def format_bytes(count: int) -> str:
    """MiB or GiB, rounded up to what matters."""
    mib = count / (1 << 20)
    return f"{mib / 1024:.1f} GiB" if mib >= 1024 else f"{math.ceil(mib * 100) / 100:g} MiB"
