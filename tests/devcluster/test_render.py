"""Configuration the driver writes: parsed back, and held to what must not change by accident."""

from __future__ import annotations

import tomllib
from base64 import b64decode
from pathlib import Path

import pytest
import yaml

from devcluster import cgroups, namespaces, registry
from devcluster.network import CANDIDATES, LOOPBACK, Ports, make_network
from devcluster.paths import find_hidden_dir, find_layout
from devcluster.pki import (
    Certificate,
    make_control_plane_certificates,
    make_node_certificates,
    render_openssl_config,
)
from devcluster.render import controlplane, node
from devcluster.render.manifests import make_dns_manifests

LAYOUT = find_layout({}, Path("/home/dev"))
NETWORK = make_network(CANDIDATES[0], with_link=True)
PORTS = Ports(api_server=6443, registry=5000, etcd=1, etcd_peer=2, controller_manager=3, scheduler=4)


@pytest.mark.parametrize(
    ("environ", "state", "cache"),
    [
        ({}, "/home/dev/.local/state/millpond/devcluster", "/home/dev/.cache/millpond/devcluster"),
        ({"XDG_STATE_HOME": "/s", "XDG_CACHE_HOME": "/c"}, "/s/millpond/devcluster", "/c/millpond/devcluster"),
        ({"MILLPOND_STATE_DIR": "/a", "MILLPOND_CACHE_DIR": "b"}, "/a/devcluster", "/home/dev/b/devcluster"),
        ({"MILLPOND_STATE_DIR": ""}, "/home/dev/.local/state/millpond/devcluster", "/home/dev/.cache/millpond/devcluster"),
    ],
)  # fmt: skip
def test_folders_follow_the_environment(environ: dict[str, str], state: str, cache: str) -> None:
    layout = find_layout(environ, Path("/home/dev"))
    assert (str(layout.state), str(layout.cache)) == (state, cache)


def test_two_states_share_no_name() -> None:
    other = find_layout({"MILLPOND_STATE_DIR": "/elsewhere"}, Path("/home/dev"))
    assert {LAYOUT.link, LAYOUT.cgroup}.isdisjoint({other.link, other.cgroup})
    assert len(LAYOUT.link) <= 15


@pytest.mark.parametrize(
    ("path", "hidden"),
    [
        ("/var/lib/jenkins/x", "/var/lib"),
        ("/run/user/0", "/run"),
        ("/var/library", None),
        ("/home/dev", None),
    ],
)
def test_a_folder_that_the_node_covers_is_found(path: str, hidden: str | None) -> None:
    assert find_hidden_dir(Path(path)) == hidden


def test_the_api_server_is_as_strict_as_a_hardened_one() -> None:
    flags = controlplane.make_api_server_flags(LAYOUT, NETWORK, PORTS)
    assert flags["authorization-mode"] == "Node,RBAC"
    assert "OwnerReferencesPermissionEnforcement" in str(flags["enable-admission-plugins"])
    assert flags["bind-address"] == NETWORK.host_address
    assert "0.0.0.0" not in map(str, flags.values())


def test_etcd_listens_on_loopback_and_wants_certificates() -> None:
    flags = controlplane.make_etcd_flags(LAYOUT, PORTS)
    assert flags["client-cert-auth"] == "true"
    assert all(LOOPBACK in str(value) for name, value in flags.items() if name.endswith("-urls"))


def test_the_audit_policy_keeps_who_did_what() -> None:
    rules = controlplane.make_audit_policy()["rules"]
    assert rules[-1] == {"level": "Metadata"}
    assert all("nonResourceURLs" in rule for rule in rules[:-1])


def test_a_kubeconfig_holds_its_keys() -> None:
    text = controlplane.render_kubeconfig(
        server="https://10.0.0.1:6443", user="admin", authority=b"ca", certificate=b"crt", key=b"key"
    )
    parsed = yaml.safe_load(text)
    assert parsed["clusters"][0]["cluster"]["server"] == "https://10.0.0.1:6443"
    assert b64decode(parsed["users"][0]["user"]["client-key-data"]) == b"key"
    assert parsed["contexts"][0]["context"] == {"cluster": "devcluster", "user": "admin"}


@pytest.mark.parametrize("may_raise", [True, False])
def test_containerd_is_told_where_it_is_and_what_it_may(may_raise: bool) -> None:
    text = node.render_containerd_config(LAYOUT, cni_dir=Path("/usr/lib/cni"), may_raise_oom_score=may_raise)
    cri = tomllib.loads(text)["plugins"]["io.containerd.grpc.v1.cri"]
    assert cri["restrict_oom_score_adj"] is not may_raise
    assert cri["sandbox_image"].startswith(node.REGISTRY_NAME)
    assert cri["cni"]["bin_dir"] == "/usr/lib/cni"


def test_the_registry_is_found_behind_its_name() -> None:
    hosts = tomllib.loads(node.render_registry_hosts(NETWORK, 5001))
    assert hosts["server"] == f"http://{NETWORK.host_address}:5001"
    assert hosts["host"][hosts["server"]]["capabilities"] == ["pull", "resolve"]


@pytest.mark.parametrize("cgroup_v1", [True, False])
def test_the_kubelet_keeps_to_its_cgroup_and_asks_who_calls(cgroup_v1: bool) -> None:
    config = node.make_kubelet_config(LAYOUT, NETWORK, cgroup_v1=cgroup_v1)
    assert config["cgroupRoot"] == f"/{LAYOUT.cgroup}"
    assert config["authentication"]["anonymous"] == {"enabled": False}
    assert config["authorization"] == {"mode": "Webhook"}
    assert config.get("failCgroupV1", True) is not cgroup_v1


def test_kube_proxy_leaves_the_machine_s_connection_table_alone() -> None:
    config = node.make_kube_proxy_config(LAYOUT, NETWORK)
    assert config["conntrack"] == {"maxPerCore": 0, "min": 0}


def test_dns_answers_for_the_host_and_has_a_service() -> None:
    corefile = node.render_corefile(LAYOUT, NETWORK)
    assert f"{NETWORK.host_address} {node.HOST_NAME}" in corefile
    assert corefile.count("{") == corefile.count("}")
    manifests = make_dns_manifests(NETWORK)
    assert (
        manifests["/api/v1/namespaces/kube-system/services/kube-dns"]["spec"]["clusterIP"]
        == NETWORK.dns_address
    )
    assert all(path.endswith(f"/{found['metadata']['name']}") for path, found in manifests.items())


def test_every_identity_is_the_one_its_built_in_role_is_bound_to() -> None:
    certificates = (*make_control_plane_certificates(NETWORK), *make_node_certificates(NETWORK, "n"))
    users = {wanted.name: (wanted.common_name, wanted.organization) for wanted in certificates}
    assert users["kubelet"] == ("system:node:n", "system:nodes")
    assert users["kube-proxy"] == ("system:kube-proxy", None)
    assert users["scheduler"] == ("system:kube-scheduler", None)
    assert users["controller-manager"] == ("system:kube-controller-manager", None)
    assert len(users) == len(certificates)


def test_a_server_certificate_names_its_addresses_and_a_client_has_none() -> None:
    server = render_openssl_config(Certificate("s", "ca", "s", dns_names=("a", "b"), addresses=("10.0.0.1",)))
    assert "subjectAltName = DNS:a, DNS:b, IP:10.0.0.1" in server
    assert "serverAuth" in server
    client = render_openssl_config(Certificate("c", "ca", "c", "group"))
    assert "subjectAltName" not in client
    assert "serverAuth" not in client
    assert "O = group" in client


@pytest.mark.parametrize(
    ("local", "path"),
    [
        ("localhost/millpond/engine:dev", "millpond/engine:dev"),
        ("millpond/engine:dev", "millpond/engine:dev"),
        ("engine", "engine:latest"),
        ("quay.example:443/a/b", "a/b:latest"),
        ("docker.example/a:1", "a:1"),
        ("registry.millpond.local:5000/a/b:2", "a/b:2"),
    ],
)
def test_an_image_keeps_its_path_and_tag_in_the_registry(local: str, path: str) -> None:
    assert registry.make_cluster_name(local) == f"{node.REGISTRY_NAME}/{path}"


def test_cgroup_hierarchies_are_told_apart() -> None:
    mounts = "cgroup /sys/fs/cgroup/cpu cgroup rw,cpu 0 0\ncgroup2 /sys/fs/cgroup/unified cgroup2 rw 0 0\nproc /proc proc rw 0 0\n"
    assert cgroups.parse_hierarchies(mounts) == (
        (Path("/sys/fs/cgroup/cpu"), "cgroup"),
        (Path("/sys/fs/cgroup/unified"), "cgroup2"),
    )


def test_mounts_that_the_node_covers_are_released_deepest_first() -> None:
    mounts = "\n".join(
        f"x {target} t o 0 0"
        for target in ("/", "/var/lib/a", r"/var/lib/a/b\040c", "/runner", "/run", "/home")
    )
    assert namespaces.select_covered_mounts(mounts) == ["/var/lib/a/b c", "/var/lib/a", "/run"]
