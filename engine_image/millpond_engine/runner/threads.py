"""How many CPU threads the runner takes, and how they wait; decided before torch brings in OpenMP.

OpenMP counts the machine's processors, not the container's share of them: 64 threads under a limit of
two are throttled to a crawl. And its threads spin while they wait for one another, which on shared
processors costs the very time that the other thread needs: two engines of two threads each on two
processors finished nothing in four minutes spinning, and 59 tokens/s sleeping.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, MutableMapping
from pathlib import Path

SPIN_COUNT = "2000"
"""Looks at the partner before sleeping: meant to outlast the gaps within a step, and to be short against the time
slice of whoever else has the partner's processor."""


def prepare_threads(
    environ: MutableMapping[str, str] = os.environ, root: Path = Path("/"), *, size: int = 1
) -> int:
    """Set what OpenMP reads when it loads, unless the user has; returns the number of threads of each of `size` ranks."""
    if "OMP_WAIT_POLICY" not in environ:
        environ["OMP_WAIT_POLICY"] = "PASSIVE"
        environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)
    available = count_processors(len(os.sched_getaffinity(0)), root)
    environ.setdefault("OMP_NUM_THREADS", str(max(1, available // size)))
    try:
        return max(1, int(environ["OMP_NUM_THREADS"]))
    except ValueError:
        return 1  # a list for nested regions: OpenMP understands it, and its first level is its own matter


def count_processors(available: int, root: Path = Path("/")) -> int:
    """Processors of this process: what its affinity allows, within the container's quota rounded up."""
    quotas = [available, *(math.ceil(quota) for quota in _read_quotas(root) if quota > 0)]
    return max(1, min(quotas))


def _read_quotas(root: Path) -> Iterator[float]:
    """CPU quotas in processors, cgroup version 2 and 1, as seen from inside the container."""
    unified = _read(root / "sys/fs/cgroup/cpu.max").split()
    if len(unified) == 2 and unified[0].isdigit() and unified[1].isdigit():
        yield int(unified[0]) / int(unified[1])
    for folder in ("cpu", "cpu,cpuacct"):
        quota = _read(root / f"sys/fs/cgroup/{folder}/cpu.cfs_quota_us").strip()
        period = _read(root / f"sys/fs/cgroup/{folder}/cpu.cfs_period_us").strip()
        if quota.isdigit() and period.isdigit() and int(period) > 0:
            yield int(quota) / int(period)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""
