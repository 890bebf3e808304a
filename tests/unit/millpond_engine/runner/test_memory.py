"""How many blocks fit, and where the numbers come from: the machine, cgroup 1, cgroup 2."""

from __future__ import annotations

from pathlib import Path

import pytest

from millpond_engine.runner.memory import (
    CPU_SHARE_PERCENT,
    RESERVED_BYTES,
    AvailableMemory,
    PoolTooSmallError,
    compute_pool_size,
    read_available_memory,
)

GIB = 1 << 30


def _write(root: Path, files: dict[str, str]) -> Path:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return root


MACHINE = {"proc/meminfo": f"MemTotal: 99 kB\nMemAvailable: {20 * GIB // 1024} kB\n"}


def test_without_a_cgroup_the_machine_bounds(tmp_path: Path) -> None:
    found = read_available_memory(_write(tmp_path, MACHINE))
    assert found == AvailableMemory(20 * GIB, "the machine")


@pytest.mark.parametrize("at_root", [True, False])
def test_cgroup_2_bounds_by_the_tightest_group_above(tmp_path: Path, at_root: bool) -> None:
    group = "sys/fs/cgroup" if at_root else "sys/fs/cgroup/kubepods/pod7"
    files = {
        **MACHINE,
        "proc/self/cgroup": "0::/kubepods/pod7/engine\n",
        f"{group}/memory.max": str(4 * GIB),
        f"{group}/memory.current": str(3 * GIB),
        f"{group}/memory.stat": f"anon 5\ninactive_file {GIB}\n",
        "sys/fs/cgroup/kubepods/pod7/engine/memory.max": "max\n",
        "sys/fs/cgroup/kubepods/pod7/engine/memory.current": "1\n",
    }
    assert read_available_memory(_write(tmp_path, files)) == AvailableMemory(2 * GIB, "the cgroup limit")


def test_cgroup_1_bounds_too(tmp_path: Path) -> None:
    group = "sys/fs/cgroup/memory/pods"
    files = {
        **MACHINE,
        "proc/self/cgroup": "5:cpu,cpuacct:/pods\n4:memory:/pods\n0::/\n",
        f"{group}/memory.limit_in_bytes": str(8 * GIB),
        f"{group}/memory.usage_in_bytes": str(2 * GIB),
        f"{group}/memory.stat": "inactive_file 5\ntotal_inactive_file 100\n",
    }
    assert read_available_memory(_write(tmp_path, files)).bytes == 6 * GIB + 100


def _size(**changes: object) -> object:
    options: dict[str, object] = {
        "bytes_per_block": 1 << 20,
        "block_tokens": 16,
        "device_bytes": None,
        "available": AvailableMemory(9 * GIB, "the cgroup limit"),
        "useful_blocks": 1 << 30,
    }
    return compute_pool_size(**(options | changes))  # type: ignore[arg-type]


def test_a_share_of_what_is_left_is_taken_and_said() -> None:
    size = _size()
    assert size.num_blocks == (9 * GIB - RESERVED_BYTES) * CPU_SHARE_PERCENT // 100 // (1 << 20)  # type: ignore[attr-defined]
    assert "the cgroup limit" in size.limited_by  # type: ignore[attr-defined]
    assert "9.0 GiB" in size.limited_by  # type: ignore[attr-defined]


def test_a_configured_size_is_taken_as_it_is() -> None:
    size = _size(device_bytes=10 << 20, useful_blocks=4)
    assert (size.num_blocks, size.limited_by) == (10, "kvCache.deviceBytes of 10 MiB")  # type: ignore[attr-defined]


def test_no_more_blocks_than_sequences_can_fill() -> None:
    size = _size(useful_blocks=100)
    assert size.num_blocks == 100  # type: ignore[attr-defined]
    assert "maxSequences" in size.limited_by  # type: ignore[attr-defined]


def test_no_room_for_one_block_names_what_to_change() -> None:
    with pytest.raises(PoolTooSmallError, match=r"kvCache\.deviceBytes of 1 MiB.*memory"):
        _size(device_bytes=1 << 20, bytes_per_block=2 << 20)
