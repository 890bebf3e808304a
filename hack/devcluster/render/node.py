"""Files and command lines of the node: containerd, kubelet, kube-proxy, CoreDNS and the registry."""

from pathlib import Path
from typing import Any

from devcluster.network import Network
from devcluster.paths import Layout
from devcluster.render.controlplane import CLUSTER_DOMAIN, Flags

NODE_NAME = "millpond-node"
# Image names keep this host wherever the registry really listens; containerd is told where.
REGISTRY_NAME = "registry.millpond.local:5000"
PAUSE_IMAGE = f"{REGISTRY_NAME}/devcluster/pause:1"
HOST_NAME = "host.millpond.internal"
CONTAINERD_SOCKET = "/run/containerd/containerd.sock"
DNS_READY_PORT, PROXY_HEALTH_PORT = 8181, 10256
# What the kubelet wants these to be. The node sees files with these values in their place, so the machine's own,
# which have no namespace, stay as they are.
KERNEL_SETTINGS = {
    "vm/overcommit_memory": "1",
    "vm/panic_on_oom": "0",
    "kernel/panic": "10",
    "kernel/panic_on_oops": "1",
    "kernel/keys/root_maxkeys": "1000000",
    "kernel/keys/root_maxbytes": "25000000",
}
# Folders inside the node that live on disk, and their names below the run folder.
BIND_MOUNTS = {"/var/lib/kubelet": "kubelet", "/var/log/pods": "pod-logs"}


def render_containerd_config(layout: Layout, *, cni_dir: Path, may_raise_oom_score: bool) -> str:
    """Render containerd's configuration; folders are the node's own private ones."""
    cri = 'plugins."io.containerd.grpc.v1.cri"'
    return f"""version = 2
root = "/var/lib/containerd"
state = "/run/containerd"
oom_score = 0
disabled_plugins = [
  "io.containerd.snapshotter.v1.aufs",
  "io.containerd.snapshotter.v1.btrfs",
  "io.containerd.snapshotter.v1.devmapper",
  "io.containerd.snapshotter.v1.zfs",
]

[grpc]
address = "{CONTAINERD_SOCKET}"

[plugins."io.containerd.internal.v1.opt"]
path = "/var/lib/containerd/opt"

[{cri}]
sandbox_image = "{PAUSE_IMAGE}"
restrict_oom_score_adj = {str(not may_raise_oom_score).lower()}

[{cri}.containerd]
discard_unpacked_layers = true

[{cri}.containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"

[{cri}.containerd.runtimes.runc.options]
SystemdCgroup = false

[{cri}.cni]
bin_dir = "{cni_dir}"
conf_dir = "{layout.config / "cni"}"

[{cri}.registry]
config_path = "{layout.config / "certs.d"}"
"""


def render_registry_hosts(network: Network, port: int) -> str:
    """Render where containerd finds the registry behind its stable name."""
    address = f"http://{network.host_address}:{port}"
    return f'server = "{address}"\n\n[host."{address}"]\ncapabilities = ["pull", "resolve"]\n'


def make_cni_config(network: Network) -> dict[str, Any]:
    """Pod network: a routed point-to-point link per pod, so no bridge and no bridge filter is involved."""
    ipam = {
        "type": "host-local",
        "dataDir": "/run/cni-ipam",
        "ranges": [[{"subnet": network.pod_cidr}]],
        "routes": [{"dst": "0.0.0.0/0"}],
    }
    return {
        "cniVersion": "0.4.0",
        "name": "devcluster",
        "plugins": [{"type": "ptp", "ipMasq": False, "ipam": ipam}],
    }


def make_kubelet_config(layout: Layout, network: Network, *, cgroup_v1: bool) -> dict[str, Any]:
    """Kubelet configuration. All pods live below one cgroup of ours."""
    pki = layout.pki
    versioned = {"failCgroupV1": False} if cgroup_v1 else {}
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "address": network.node_address,
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": True},
            "x509": {"clientCAFile": str(pki / "ca.crt")},
        },
        "authorization": {"mode": "Webhook"},
        "tlsCertFile": str(pki / "kubelet-server.crt"),
        "tlsPrivateKeyFile": str(pki / "kubelet-server.key"),
        "containerRuntimeEndpoint": f"unix://{CONTAINERD_SOCKET}",
        "clusterDNS": [network.dns_address],
        "clusterDomain": CLUSTER_DOMAIN,
        "resolvConf": str(layout.config / "resolv.conf"),
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": f"/{layout.cgroup}",
        "enforceNodeAllocatable": [],
        "failSwapOn": False,
        "oomScoreAdj": 0,
        "volumePluginDir": "/var/lib/kubelet/volume-plugins",
        "registerNode": True,
        "nodeStatusUpdateFrequency": "5s",
        # The disk is the developer's own: evict and collect late, in absolute numbers.
        "evictionHard": {"memory.available": "100Mi", "nodefs.available": "1Gi", "imagefs.available": "1Gi"},
        "imageGCHighThresholdPercent": 97,
        "imageGCLowThresholdPercent": 95,
        "serializeImagePulls": False,
        **versioned,
    }


def make_kubelet_flags(layout: Layout, network: Network) -> Flags:
    """Kubelet flags: what its configuration file has no field for."""
    return {
        "config": layout.config / "kubelet.json",
        "kubeconfig": layout.config / "kubelet.kubeconfig",
        "hostname-override": NODE_NAME,
        "node-ip": network.node_address,
    }


def make_kube_proxy_config(layout: Layout, network: Network) -> dict[str, Any]:
    """kube-proxy configuration; its rules lie in the node's network namespace."""
    return {
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "clientConnection": {"kubeconfig": str(layout.config / "kube-proxy.kubeconfig")},
        "hostnameOverride": NODE_NAME,
        "healthzBindAddress": f"{network.node_address}:{PROXY_HEALTH_PORT}",
        "mode": "iptables",
        "clusterCIDR": network.pod_cidr,
        "detectLocalMode": "ClusterCIDR",
        # The connection table's size has no namespace: leave the machine's.
        "conntrack": {"maxPerCore": 0, "min": 0},
        "oomScoreAdj": 0,
        "iptables": {"minSyncPeriod": "0s"},
    }


def render_corefile(layout: Layout, network: Network) -> str:
    """Render the Corefile: cluster names, one name for the host, and a quick no for the outside.

    Pods have no route out, so a resolver that forwarded would only turn each typo into a time-out.
    """
    return f"""{CLUSTER_DOMAIN}:53 in-addr.arpa:53 ip6.arpa:53 {{
    bind {network.node_address}
    errors
    health 127.0.0.1:8080
    ready {network.node_address}:{DNS_READY_PORT}
    kubernetes {CLUSTER_DOMAIN} in-addr.arpa ip6.arpa {{
        kubeconfig {layout.config / "coredns.kubeconfig"} devcluster
        pods insecure
        ttl 5
    }}
    loadbalance
}}

millpond.internal:53 {{
    bind {network.node_address}
    errors
    hosts {{
        {network.host_address} {HOST_NAME}
    }}
}}

.:53 {{
    bind {network.node_address}
    errors
    template ANY ANY {{
        rcode NXDOMAIN
    }}
}}
"""


def make_registry_config(layout: Layout, network: Network, port: int) -> dict[str, Any]:
    """Configuration of the registry; it speaks plain HTTP on an address that only this host and its pods reach."""
    return {
        "version": 0.1,
        "log": {"level": "warn", "accesslog": {"disabled": True}},
        "storage": {
            "filesystem": {"rootdirectory": str(layout.images / "registry")},
            "delete": {"enabled": True},
        },
        "http": {"addr": f"{network.host_address}:{port}"},
    }
