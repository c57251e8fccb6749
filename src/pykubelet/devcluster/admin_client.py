"""The admin's line to the API server: a request, an answer. Blocking, and a new connection each time.

For starting a cluster and for tests, where being plain counts; nodes have `pykubelet.kube`.

What is in a new cluster besides what the API server makes itself: what kubeadm would create.

Nodes may join with the bootstrap token, their client certificates are approved by themselves, and
the API server may ask kubelets for logs and the like. Serving certificates are not approved by
themselves anywhere: a person does that (`kubectl certificate approve`).
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
"""What a request raises when there is no API server to answer it."""


class ApiStatusError(Exception):
    """The API server answered, and the answer is no."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        """The HTTP status."""


class AdminClient:
    """Requests to one API server, as whom the certificate says."""

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
        """Give the answer, a document or text; raises ApiRefusal, or one of UNREACHABLE."""
        connection = http.client.HTTPSConnection(LOOPBACK, self._port, timeout=timeout, context=self._context)
        try:
            data = None if body is None else json.dumps(body).encode()
            connection.request(method, path, data, {"Content-Type": content_type} if data else {})
            answer = connection.getresponse()
            raw = answer.read()
        finally:
            connection.close()
        is_json = answer.headers.get_content_type() == "application/json"
        told = json.loads(raw) if is_json else raw.decode(errors="replace")
        if answer.status >= http.client.BAD_REQUEST:
            message = told.get("message", "") if isinstance(told, dict) else told
            raise ApiStatusError(answer.status, message)
        return told

    def ready(self) -> bool:
        """Whether the API server says that it is ready."""
        try:
            return bool(self.request("GET", "/readyz", timeout=5) == "ok")
        except (*UNREACHABLE, ApiStatusError):
            return False


def admin_api(layout: Layout, settings: Settings) -> AdminClient:
    """The admin's line to a cluster; raises OSError when its certificates are not there."""
    return AdminClient(settings.port, layout.authority, layout.certificate("admin"), layout.key("admin"))


Document = dict[str, Any]
BOOTSTRAPPERS = "system:bootstrappers:kubeadm:default-node-token"
NODES = "system:nodes"
_RBAC = "rbac.authorization.k8s.io"
_CSR = "system:certificates.k8s.io:certificatesigningrequests"


def first_objects(token: str) -> list[tuple[str, Document]]:
    """Give what to create, each with the collection that it belongs to."""
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
    """The secret that makes a token, ID.SECRET, good for joining the cluster."""
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


def _binding(name: str, role: str, kind: str, whom: str) -> Document:
    return {
        "apiVersion": f"{_RBAC}/v1",
        "kind": "ClusterRoleBinding",
        "metadata": {"name": name},
        "roleRef": {"apiGroup": _RBAC, "kind": "ClusterRole", "name": role},
        "subjects": [{"apiGroup": _RBAC, "kind": kind, "name": whom}],
    }
