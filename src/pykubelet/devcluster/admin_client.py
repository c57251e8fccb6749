"""API client of the cluster administrator, and the bootstrap objects of a new cluster.

The client is blocking and opens a new connection for each request. It is used to start a cluster and in
tests, where simplicity matters; kubelets use `pykubelet.apiserver`.

The bootstrap objects are those that kubeadm creates: nodes can join with the bootstrap token, their client
certificates are approved automatically, and the API server may access the kubelets' API. Serving
certificates are not approved automatically; the administrator does that with `kubectl certificate approve`.
"""

from __future__ import annotations

import http.client
import json
import ssl
from pathlib import Path
from typing import Any

from pykubelet.devcluster.identities import KUBELET_CLIENT, LOOPBACK
from pykubelet.devcluster.layout import Layout, Settings

UNREACHABLE = (OSError, http.client.HTTPException)
"""Exceptions of a request when the API server is not reachable."""


class ApiStatusError(Exception):
    """Raised when the API server responds with an error status."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        """HTTP status code."""


class AdminClient:
    """Client of one API server, with a client certificate."""

    def __init__(self, port: int, authority: Path, certificate: Path, key: Path) -> None:
        self._port = port
        self._context = ssl.create_default_context(cafile=str(authority))
        self._context.load_cert_chain(certificate, key)

    def request(
        self,
        method: str,
        path: str,
        body: object = None,
        *,
        content_type: str = "application/json",
        timeout: float = 10,
    ) -> Any:
        """Return the response body, decoded if it is JSON. Raises ApiStatusError or one of UNREACHABLE."""
        connection = http.client.HTTPSConnection(LOOPBACK, self._port, timeout=timeout, context=self._context)
        try:
            data = None if body is None else json.dumps(body).encode()
            connection.request(method, path, data, {"Content-Type": content_type} if data else {})
            response = connection.getresponse()
            raw = response.read()
        finally:
            connection.close()
        is_json = response.headers.get_content_type() == "application/json"
        content = json.loads(raw) if is_json else raw.decode(errors="replace")
        if response.status >= http.client.BAD_REQUEST:
            message = content.get("message", "") if isinstance(content, dict) else content
            raise ApiStatusError(response.status, message)
        return content

    def ready(self) -> bool:
        """Return whether `/readyz` of the API server returns ok."""
        try:
            return bool(self.request("GET", "/readyz", timeout=5) == "ok")
        except (*UNREACHABLE, ApiStatusError):
            return False


def admin_client(layout: Layout, settings: Settings) -> AdminClient:
    """Return the administrator's client of a cluster. Raises OSError when its certificates do not exist."""
    return AdminClient(settings.port, layout.authority, layout.certificate("admin"), layout.key("admin"))


Document = dict[str, Any]
BOOTSTRAPPERS = "system:bootstrappers:kubeadm:default-node-token"
NODES = "system:nodes"
_RBAC = "rbac.authorization.k8s.io"
_CSR = "system:certificates.k8s.io:certificatesigningrequests"


def bootstrap_objects(token: str) -> list[tuple[str, Document]]:
    """Return the bootstrap objects, each with the path of its collection."""
    roles, bindings = (f"/apis/{_RBAC}/v1/{kind}" for kind in ("clusterroles", "clusterrolebindings"))
    return [
        (roles, _role("kubeadm:get-nodes", verbs=["get"], resources=["nodes"])),
        (bindings, _binding("kubeadm:get-nodes", "kubeadm:get-nodes", "Group", BOOTSTRAPPERS)),
        (bindings, _binding("kubeadm:kubelet-bootstrap", "system:node-bootstrapper", "Group", BOOTSTRAPPERS)),
        (
            bindings,
            _binding("kubeadm:node-autoapprove-bootstrap", f"{_CSR}:nodeclient", "Group", BOOTSTRAPPERS),
        ),
        (
            bindings,
            _binding(
                "kubeadm:node-autoapprove-certificate-rotation", f"{_CSR}:selfnodeclient", "Group", NODES
            ),
        ),
        (
            bindings,
            _binding("apiserver-kubelet-client", "system:kubelet-api-admin", "User", KUBELET_CLIENT),
        ),
        ("/api/v1/namespaces/kube-system/secrets", bootstrap_token(token)),
    ]


def bootstrap_token(token: str) -> Document:
    """Return the Secret of a bootstrap token ID.SECRET."""
    identifier, _, secret = token.partition(".")
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": f"bootstrap-token-{identifier}", "namespace": "kube-system"},
        "type": "bootstrap.kubernetes.io/token",
        "stringData": {
            "token-id": identifier,
            "token-secret": secret,
            "usage-bootstrap-authentication": "true",
            "usage-bootstrap-signing": "true",
            "auth-extra-groups": BOOTSTRAPPERS,
        },
    }


def _role(name: str, *, verbs: list[str], resources: list[str]) -> Document:
    return {
        "apiVersion": f"{_RBAC}/v1",
        "kind": "ClusterRole",
        "metadata": {"name": name},
        "rules": [{"apiGroups": [""], "resources": resources, "verbs": verbs}],
    }


def _binding(name: str, role: str, kind: str, subject_name: str) -> Document:
    return {
        "apiVersion": f"{_RBAC}/v1",
        "kind": "ClusterRoleBinding",
        "metadata": {"name": name},
        "roleRef": {"apiGroup": _RBAC, "kind": "ClusterRole", "name": role},
        "subjects": [{"apiGroup": _RBAC, "kind": kind, "name": subject_name}],
    }
