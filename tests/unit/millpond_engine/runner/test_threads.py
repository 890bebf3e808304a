from __future__ import annotations

from pathlib import Path

import pytest

from millpond_engine.runner.threads import SPIN_COUNT, count_processors, prepare_threads


def write(root: Path, name: str, text: str) -> None:
    path = root / "sys/fs/cgroup" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


@pytest.mark.parametrize(
    ("limit", "threads"),
    [("200000 100000\n", 2), ("150000 100000\n", 2), ("max 100000\n", 64), ("50000 100000", 1)],
)
def test_a_container_gets_as_many_threads_as_its_quota(tmp_path: Path, limit: str, threads: int) -> None:
    write(tmp_path, "cpu.max", limit)
    assert count_processors(64, tmp_path) == threads


@pytest.mark.parametrize(("quota", "threads"), [("200000", 2), ("-1", 64), ("1000", 1)])
def test_the_older_cgroups_count_too(tmp_path: Path, quota: str, threads: int) -> None:
    write(tmp_path, "cpu/cpu.cfs_quota_us", quota)
    write(tmp_path, "cpu/cpu.cfs_period_us", "100000")
    assert count_processors(64, tmp_path) == threads


def test_without_a_quota_the_affinity_counts(tmp_path: Path) -> None:
    assert count_processors(3, tmp_path) == 3


def test_what_the_user_set_stays(tmp_path: Path) -> None:
    environ = {"OMP_NUM_THREADS": "7", "OMP_WAIT_POLICY": "ACTIVE"}
    assert prepare_threads(environ, tmp_path) == 7
    assert environ == {"OMP_NUM_THREADS": "7", "OMP_WAIT_POLICY": "ACTIVE"}
    assert prepare_threads({"OMP_NUM_THREADS": "4,2"}, tmp_path) == 1


def test_threads_sleep_when_they_wait_for_long(tmp_path: Path) -> None:
    environ: dict[str, str] = {}
    write(tmp_path, "cpu.max", "100000 100000")
    assert prepare_threads(environ, tmp_path) == 1
    assert environ == {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": SPIN_COUNT}
