"""What is in a new cluster besides what the API server makes itself: what kubeadm would create.

Nodes may join with the bootstrap token, their client certificates are approved by themselves, and
the API server may ask kubelets for logs and the like. Serving certificates are not approved by
themselves anywhere: a person does that (`kubectl certificate approve`).
"""

from __future__ import annotations

from typing import Any

from pykubelet.devcluster.identities import KUBELET_CLIENT

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
