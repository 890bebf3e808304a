"""What the node must do: run a pod from the registry, with names, network and access for kubectl.

The pods' image holds nothing but kubectl: it is a client of names and HTTP, and `kubectl proxy` is a server.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import subprocess
import threading
from collections.abc import Iterator
from datetime import datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import IPv4Network
from pathlib import Path

import pytest
from tests.fixtures.cluster import Cluster
from tests.support.kube import Kube, Manifest, wait_for

from devcluster import registry

pytestmark = [pytest.mark.cluster, pytest.mark.node]

PROXY_PORT = 8001


@pytest.fixture(scope="module")
def image(node_cluster: Cluster) -> Iterator[str]:
    """The image's name in the cluster, after a push to the registry."""
    if node_cluster.record is None:
        pytest.skip("a cluster given by MILLPOND_KUBECONFIG has no registry of ours")
    local = f"localhost/devcluster-test/kubectl:{os.getpid()}"
    binary = node_cluster.kubectl.resolve()
    container = run("buildah", "from", "scratch")
    try:
        run("buildah", "copy", "--quiet", container, str(binary), "/kubectl")
        run("buildah", "config", "--entrypoint", '["/kubectl"]', "--user", "65534:65534", container)
        run("buildah", "commit", "--quiet", container, local)
    finally:
        run("buildah", "rm", container)
    yield registry.push(node_cluster.record, local)
    run("buildah", "rmi", local)


def run(*argv: str) -> str:
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, f"{argv}: {done.stderr}"
    return done.stdout.strip()


def make_pod(name: str, image: str, *arguments: str) -> Manifest:
    container = {"name": "kubectl", "image": image, "args": list(arguments)}
    spec = {"restartPolicy": "Never", "terminationGracePeriodSeconds": 1, "containers": [container]}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": {"app": name}},
        "spec": spec,
    }


def run_to_end(kube: Kube, pod: Manifest) -> str:
    kube.apply(pod)
    name = pod["metadata"]["name"]

    def has_ended() -> str | None:
        phase = kube.get("v1", "Pod", name)["status"].get("phase")
        return phase if phase in {"Succeeded", "Failed"} else None

    phase = wait_for(f"pod {name} ends", has_ended)
    logs = str(kube.core.read_namespaced_pod_log(name, kube.namespace))
    assert phase == "Succeeded", logs
    return logs


@pytest.fixture
def server(kube: Kube, image: str) -> str:
    """A running pod that serves HTTP on PROXY_PORT."""
    arguments = ("proxy", f"--port={PROXY_PORT}", "--address=0.0.0.0", "--accept-hosts=.*")
    kube.apply(make_pod("server", image, *arguments))

    def address() -> str | None:
        status = kube.get("v1", "Pod", "server")["status"]
        return str(status["podIP"]) if status.get("phase") == "Running" else None

    found = str(wait_for("the server runs", address))
    wait_for("the server answers", lambda: answers(found, PROXY_PORT))
    return found


def fetch_status(address: str, port: int) -> int:
    connection = http.client.HTTPConnection(address, port, timeout=10)
    try:
        connection.request("GET", "/version")
        return connection.getresponse().status
    finally:
        connection.close()


def answers(address: str, port: int) -> bool:
    try:
        return fetch_status(address, port) == 200
    except OSError:
        return False


def test_a_pod_from_the_registry_finds_the_api_server_by_name(kube: Kube, image: str) -> None:
    mounted = "/var/run/secrets/kubernetes.io/serviceaccount"
    server = {"server": "https://kubernetes.default.svc", "certificate-authority": f"{mounted}/ca.crt"}
    kubeconfig = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "c", "cluster": server}],
        "users": [{"name": "u", "user": {"tokenFile": f"{mounted}/token"}}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
        "current-context": "x",
    }
    data = {"config": json.dumps(kubeconfig)}
    kube.apply({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "kubeconfig"}, "data": data})
    pod = make_pod("dns", image, "--kubeconfig=/etc/kube/config", "auth", "whoami", "--output=json")
    pod["spec"]["volumes"] = [{"name": "kube", "configMap": {"name": "kubeconfig"}}]
    pod["spec"]["containers"][0]["volumeMounts"] = [{"name": "kube", "mountPath": "/etc/kube"}]
    assert f"system:serviceaccount:{kube.namespace}:default" in run_to_end(kube, pod)


def test_a_pod_reaches_a_server_beside_the_cluster(cluster: Cluster, kube: Kube, image: str) -> None:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"weights of " + self.path.encode())

        def log_message(self, *_: object) -> None:
            pass

    beside = ThreadingHTTPServer((cluster.host_address, 0), Handler)
    threading.Thread(target=beside.serve_forever, args=(0.02,), daemon=True).start()
    try:
        url = f"http://host.millpond.internal:{beside.server_port}"
        assert "weights of /model.gguf" in run_to_end(
            kube, make_pod("fetch", image, f"--server={url}", "get", "--raw=/model.gguf")
        )
    finally:
        beside.shutdown()
        beside.server_close()


def test_an_unknown_name_fails_at_once(kube: Kube, image: str) -> None:
    kube.apply(make_pod("nowhere", image, "--server=http://models.example.org", "get", "--raw=/"))
    wait_for("the pod fails", lambda: kube.get("v1", "Pod", "nowhere")["status"].get("phase") == "Failed")
    (container,) = kube.get("v1", "Pod", "nowhere")["status"]["containerStatuses"]
    ended = container["state"]["terminated"]
    began, end = (datetime.fromisoformat(ended[stamp]) for stamp in ("startedAt", "finishedAt"))
    assert (end - began).total_seconds() < 10, "a resolver that is not answered waits for longer"
    assert "no such host" in kube.core.read_namespaced_pod_log("nowhere", kube.namespace)


@pytest.fixture
def service(kube: Kube, server: str) -> str:
    """The address of a service in front of the server, once it answers; its name is `server`."""
    spec = {"selector": {"app": "server"}, "ports": [{"port": 80, "targetPort": PROXY_PORT}]}
    made = kube.apply({"apiVersion": "v1", "kind": "Service", "metadata": {"name": "server"}, "spec": spec})
    address = str(made["spec"]["clusterIP"])
    wait_for("the service answers", lambda: answers(address, 80))
    return address


def test_the_host_reaches_pods_and_services(server: str, service: str) -> None:
    assert fetch_status(server, PROXY_PORT) == 200
    assert fetch_status(service, 80) == 200


@pytest.mark.usefixtures("service")
def test_pods_reach_services_by_name(kube: Kube, image: str) -> None:
    pod = make_pod("client", image, "--server=http://server", "get", "--raw=/version")
    assert "gitVersion" in run_to_end(kube, pod)


def test_a_service_address_nobody_has_is_refused_at_once(cluster: Cluster, server: str) -> None:
    assert cluster.record is not None
    unused = str(list(IPv4Network(cluster.record.network.service_cidr).hosts())[-1])
    with pytest.raises(ConnectionRefusedError):
        fetch_status(unused, 80)


def test_kubectl_port_forward_and_exec(cluster: Cluster, kube: Kube, server: str) -> None:
    environ = {**os.environ, "KUBECONFIG": str(cluster.kubeconfig)}
    base = [str(cluster.kubectl), "--namespace", kube.namespace]
    forward = subprocess.Popen(
        [*base, "port-forward", "pod/server", f":{PROXY_PORT}"],
        env=environ,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert forward.stdout is not None
        found = re.search(r"127\.0\.0\.1:(\d+)", forward.stdout.readline())
        assert found is not None
        assert fetch_status("127.0.0.1", int(found[1])) == 200
    finally:
        forward.terminate()
        forward.wait(timeout=10)
    done = subprocess.run(
        [*base, "exec", "server", "--", "/kubectl", "version", "--client"],
        env=environ, capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert "v1.36" in done.stdout, done.stderr


def test_an_image_that_is_not_there_is_reported(kube: Kube, image: str) -> None:
    kube.apply(make_pod("absent", f"{registry.REGISTRY_NAME}/no/such:image"))

    def reason() -> str | None:
        statuses = kube.get("v1", "Pod", "absent")["status"].get("containerStatuses") or [{}]
        return statuses[0].get("state", {}).get("waiting", {}).get("reason")

    wait_for("the pull fails", lambda: reason() in {"ErrImagePull", "ImagePullBackOff"})


def test_a_new_network_namespace_took_the_firewall_rules(cluster: Cluster, server: str) -> None:
    """kube-proxy's rules exist, and not on the host."""
    assert cluster.record is not None
    link = cluster.record.find("link")
    assert link is not None
    inside = run("nsenter", f"--net=/proc/{link.pid}/ns/net", "iptables-save")
    assert "KUBE-SVC" in inside
    assert "KUBE-" not in run("iptables-save")
    assert Path(f"/proc/{link.pid}/ns/net").readlink() != Path("/proc/self/ns/net").readlink()
