"""The cluster's certificates: which there are (pure), and how OpenSSL makes them."""

import shutil
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from devcluster.errors import MissingToolError
from devcluster.network import LOOPBACK, Network
from devcluster.process import run_tool

VALID_DAYS = 365
CLUSTER_CA, ETCD_CA, FRONT_PROXY_CA = "ca", "etcd-ca", "front-proxy-ca"
SERVICE_ACCOUNT_KEY = "service-accounts"


@dataclass(frozen=True)
class Certificate:
    """One certificate to make. The common name and organization are the Kubernetes user and group."""

    name: str
    authority: str
    common_name: str
    organization: str | None = None
    dns_names: tuple[str, ...] = ()
    addresses: tuple[str, ...] = ()

    @property
    def is_server(self) -> bool:
        """Whether it names a server."""
        return bool(self.dns_names or self.addresses)


def make_control_plane_certificates(network: Network) -> tuple[Certificate, ...]:
    """List the certificates of everything that runs on the host."""
    service = (
        "kubernetes",
        "kubernetes.default",
        "kubernetes.default.svc",
        "kubernetes.default.svc.cluster.local",
    )
    return (
        Certificate("etcd-server", ETCD_CA, "etcd", addresses=(LOOPBACK,)),
        Certificate("etcd-client", ETCD_CA, "kube-apiserver"),
        Certificate(
            "api-server",
            CLUSTER_CA,
            "kube-apiserver",
            dns_names=(*service, "localhost"),
            addresses=tuple(dict.fromkeys((LOOPBACK, network.host_address, network.api_service_address))),
        ),
        Certificate(
            "api-server-kubelet-client", CLUSTER_CA, "kube-apiserver-kubelet-client", "system:masters"
        ),
        Certificate("front-proxy-client", FRONT_PROXY_CA, "front-proxy-client"),
        Certificate("admin", CLUSTER_CA, "millpond-admin", "system:masters"),
        Certificate("controller-manager", CLUSTER_CA, "system:kube-controller-manager"),
        Certificate("scheduler", CLUSTER_CA, "system:kube-scheduler"),
    )


def make_node_certificates(network: Network, node_name: str) -> tuple[Certificate, ...]:
    """List the certificates of everything that runs on the node."""
    return (
        Certificate("kubelet", CLUSTER_CA, f"system:node:{node_name}", "system:nodes"),
        Certificate(
            "kubelet-server", CLUSTER_CA, node_name, dns_names=(node_name,), addresses=(network.node_address,)
        ),
        Certificate("kube-proxy", CLUSTER_CA, "system:kube-proxy"),
        Certificate("coredns", CLUSTER_CA, "system:coredns"),
    )


def render_openssl_config(certificate: Certificate) -> str:
    """Render the request for one certificate; subject names are quoted by the format itself."""
    names = [f"DNS:{name}" for name in certificate.dns_names] + [
        f"IP:{address}" for address in certificate.addresses
    ]
    usage = "serverAuth, clientAuth" if certificate.is_server else "clientAuth"
    lines = ["[req]", "prompt = no", "distinguished_name = subject", "", "[subject]"]
    lines += [f"O = {certificate.organization}"] if certificate.organization else []
    lines += [f"CN = {certificate.common_name}", "", "[extensions]", "basicConstraints = critical, CA:FALSE"]
    lines += ["keyUsage = critical, digitalSignature", f"extendedKeyUsage = {usage}"]
    lines += [f"subjectAltName = {', '.join(names)}"] if names else []
    return "\n".join(lines) + "\n"


def create_authorities(folder: Path) -> None:
    """Make the three authorities and the key that signs service-account tokens."""
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o700)
    openssl = _find_openssl()
    with ThreadPoolExecutor(max_workers=4) as pool:
        made = [pool.submit(_create_authority, openssl, folder, name) for name in _AUTHORITIES]
        made.append(pool.submit(_create_token_key, openssl, folder / SERVICE_ACCOUNT_KEY))
        for future in made:
            future.result()


def create_certificates(folder: Path, certificates: Iterable[Certificate]) -> None:
    """Make the certificates, each signed by its authority."""
    openssl = _find_openssl()
    with ThreadPoolExecutor(max_workers=4) as pool:
        for future in [pool.submit(_create_certificate, openssl, folder, wanted) for wanted in certificates]:
            future.result()


_AUTHORITIES = (CLUSTER_CA, ETCD_CA, FRONT_PROXY_CA)
_KEY_KIND = ("-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:P-256")
_NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", str(VALID_DAYS))
_AUTHORITY_CONFIG = """[req]
prompt = no
distinguished_name = subject

[subject]
CN = millpond-devcluster-{name}

[extensions]
basicConstraints = critical, CA:TRUE
keyUsage = critical, keyCertSign, cRLSign, digitalSignature
subjectKeyIdentifier = hash
"""


def _find_openssl() -> str:
    openssl = shutil.which("openssl")
    if openssl is None:
        raise MissingToolError("openssl is not installed: install it (Debian: apt-get install openssl)")
    return openssl


def _create_token_key(openssl: str, base: Path) -> None:
    run_tool([openssl, "genpkey", *_KEY_KIND, "-out", f"{base}.key"])
    run_tool([openssl, "pkey", "-in", f"{base}.key", "-pubout", "-out", f"{base}.pub"])


def _create_authority(openssl: str, folder: Path, name: str) -> None:
    config = folder / f"{name}.cnf"
    config.write_text(_AUTHORITY_CONFIG.format(name=name))
    run_tool([openssl, "req", "-x509", *_NEW_KEY, *_files(folder, name)])


def _create_certificate(openssl: str, folder: Path, wanted: Certificate) -> None:
    config = folder / f"{wanted.name}.cnf"
    config.write_text(render_openssl_config(wanted))
    authority = folder / wanted.authority
    signer = ("-CA", f"{authority}.crt", "-CAkey", f"{authority}.key")
    run_tool([openssl, "req", "-x509", *_NEW_KEY, *signer, *_files(folder, wanted.name)])


def _files(folder: Path, name: str) -> tuple[str, ...]:
    base = folder / name
    return (
        "-config", f"{base}.cnf", "-extensions", "extensions",
        "-keyout", f"{base}.key", "-out", f"{base}.crt",
    )  # fmt: skip
