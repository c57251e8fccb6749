"""Who is who in a control plane: every certificate and every kubeconfig, in one list.

The same names, groups and authorities as kubeadm makes: one authority for the cluster, one for etcd,
one for the front proxy, and a key for service accounts' tokens.
"""

from __future__ import annotations

import base64
import os
import socket
from datetime import timedelta
from pathlib import Path

import yaml

from pykubelet.devcluster import pki
from pykubelet.devcluster.layout import CLUSTER_DOMAIN, SERVICE_IP, Layout, Settings
from pykubelet.devcluster.pki import Authority, Subject

KUBELET_CLIENT = "kube-apiserver-kubelet-client"
LOOPBACK = "127.0.0.1"
_AUTHORITIES = {"ca": "kubernetes", "etcd-ca": "etcd-ca", "front-proxy-ca": "front-proxy-ca"}
_CLIENTS = {
    # file: authority, name, groups
    "apiserver-etcd-client": ("etcd-ca", "kube-apiserver-etcd-client", ()),
    "apiserver-kubelet-client": ("ca", KUBELET_CLIENT, ()),
    "front-proxy-client": ("front-proxy-ca", "front-proxy-client", ()),
    "admin": ("ca", "kubernetes-admin", ("system:masters",)),
}
_USERS = {
    # kubeconfig: name, groups
    "controller-manager": ("system:kube-controller-manager", ()),
    "scheduler": ("system:kube-scheduler", ()),
}


def make_identities(layout: Layout, settings: Settings) -> None:
    """Make every key, certificate and kubeconfig that the control plane and its admin need."""
    layout.pki.mkdir(mode=0o700, exist_ok=True)
    for file, name in _AUTHORITIES.items():
        pki.ensure_authority(_authority(layout, file), name)
    pki.ensure_key_pair(layout.key("sa"), layout.pki / "sa.pub")
    for file, subject in servers(settings).items():
        signer = "etcd-ca" if file == "etcd" else "ca"
        pki.issue(_authority(layout, signer), subject, layout.certificate(file), layout.key(file))
    for file, (signer, name, groups) in _CLIENTS.items():
        subject = Subject(name, groups)
        pki.issue(_authority(layout, signer), subject, layout.certificate(file), layout.key(file))
    certificate, key = layout.certificate("admin").read_bytes(), layout.key("admin").read_bytes()
    write_private(layout.kubeconfig("admin"), client_kubeconfig(layout, settings, certificate, key))
    for file, (name, groups) in _USERS.items():
        user_kubeconfig(layout, settings, Subject(name, groups), layout.kubeconfig(file))
    write_private(layout.kubeconfig("bootstrap"), token_kubeconfig(layout, settings, settings.token))


def servers(settings: Settings) -> dict[str, Subject]:
    """The certificates that servers show, and under which names."""
    host = socket.gethostname().lower()
    service = "kubernetes.default.svc"
    names = ("kubernetes", "kubernetes.default", service, f"{service}.{CLUSTER_DOMAIN}", "localhost", host)
    addresses = dict.fromkeys((SERVICE_IP, LOOPBACK, settings.address))
    return {
        "apiserver": Subject("kube-apiserver", server_names=(*names, *addresses)),
        "etcd": Subject("etcd", server_names=("localhost", LOOPBACK), both=True),
    }


def node_kubeconfig(
    layout: Layout, settings: Settings, node: str, path: Path, life: timedelta = timedelta(days=365)
) -> None:
    """Write the kubeconfig of a node, as a finished TLS bootstrap would."""
    user_kubeconfig(layout, settings, Subject(f"system:node:{node}", ("system:nodes",)), path, life)


def user_kubeconfig(
    layout: Layout,
    settings: Settings,
    subject: Subject,
    path: Path,
    life: timedelta = timedelta(days=365),
) -> None:
    """Write a kubeconfig for whoever this is, with a new client certificate in it."""
    certificate, key = pki.issue_pem(_authority(layout, "ca"), subject, life)
    write_private(path, client_kubeconfig(layout, settings, certificate, key))


def client_kubeconfig(layout: Layout, settings: Settings, certificate: bytes, key: bytes) -> str:
    """A kubeconfig with a client certificate inside."""
    user = {"client-certificate-data": _base64(certificate), "client-key-data": _base64(key)}
    return _kubeconfig(layout, settings, user)


def token_kubeconfig(layout: Layout, settings: Settings, token: str) -> str:
    """A kubeconfig with a bearer token inside."""
    return _kubeconfig(layout, settings, {"token": token})


def write_private(path: Path, text: str) -> None:
    """Write a file at once and whole that only its owner may read."""
    hidden = path.with_name(f".{path.name}.new")
    with os.fdopen(os.open(hidden, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(text)
    hidden.rename(path)


def _kubeconfig(layout: Layout, settings: Settings, user: dict[str, str]) -> str:
    # Loopback: it is there on every network, and nobody sends it through a proxy.
    cluster = {
        "server": f"https://{LOOPBACK}:{settings.port}",
        "certificate-authority-data": _base64(layout.authority.read_bytes()),
    }
    document = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "dev", "cluster": cluster}],
        "users": [{"name": "user", "user": user}],
        "contexts": [{"name": "dev", "context": {"cluster": "dev", "user": "user"}}],
        "current-context": "dev",
    }
    return yaml.safe_dump(document, sort_keys=False)


def _authority(layout: Layout, name: str) -> Authority:
    return Authority(layout.certificate(name), layout.key(name))


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()
