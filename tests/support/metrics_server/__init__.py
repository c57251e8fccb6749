"""metrics-server in a process on this host, as an aggregated API server of a test cluster.

It is built from the Go module in `module` and cached like the control plane. No kube-proxy runs, so its
Service has no selector, its EndpointSlice names this host, and the API server must connect to endpoints
itself (`API_FLAGS`).
"""

import base64
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from pykubelet.devcluster.binaries import GoBuild, GoModule, ensure_built
from pykubelet.devcluster.cluster import spawn
from pykubelet.devcluster.identities import Authority, Subject, issue
from tests.support.plane import Document, Plane
from tests.support.ports import held_port

PROGRAM = "metrics-server"
SOURCE = "sigs.k8s.io/metrics-server"
API_FLAGS = ("--enable-aggregator-routing=true",)
"""Flags of the API server that the registration needs."""
METRICS = "/apis/metrics.k8s.io/v1beta1"
RESOLUTION_SECONDS = 10
"""The shortest interval that it accepts."""
_NAMESPACE = "kube-system"
_USER = "metrics-server"
_RBAC = "rbac.authorization.k8s.io"
_READY_SECONDS = 90.0


def metrics_server_module() -> GoModule:
    """Return the Go module of metrics-server."""
    return GoModule(
        directory=Path(__file__).parent / "module",
        name=PROGRAM,
        title=PROGRAM,
        remedy="",
        programs={PROGRAM: GoBuild(f"{SOURCE}/cmd/{PROGRAM}", env={"CGO_ENABLED": "0"})},
        source=SOURCE,
    )


def find_metrics_server(report: Callable[[str], None]) -> Path:
    """Return the executable, building it if it is missing. Raises NotAvailable."""
    return ensure_built(metrics_server_module(), report) / PROGRAM


@contextmanager
def running_metrics_server(plane: Plane, program: Path, *flags: str) -> Iterator[None]:
    """Run metrics-server, registered in the cluster, for the time of a block.

    The block starts when the API server serves the metrics API. It scrapes the nodes that exist.
    """
    layout, settings = plane.cluster.layout, plane.cluster.settings
    with ExitStack() as stack:
        port = stack.enter_context(held_port())
        name = f"{PROGRAM}.{_NAMESPACE}.svc"
        files = (layout.directory / f"{PROGRAM}.crt", layout.directory / f"{PROGRAM}.key")
        issue(Authority(layout.authority, layout.key("ca")), Subject(name, server_names=(name,)), *files)
        for document in _registration(settings.address, port, layout.authority.read_bytes()):
            plane.apply(document)
        kubeconfig = plane.user_kubeconfig(_USER)
        command = [
            str(program),
            f"--kubeconfig={kubeconfig}",
            f"--authentication-kubeconfig={kubeconfig}",
            f"--authorization-kubeconfig={kubeconfig}",
            f"--secure-port={port}",
            f"--tls-cert-file={files[0]}",
            f"--tls-private-key-file={files[1]}",
            # The kubelets of tests have self-signed certificates and ports of their own.
            "--kubelet-insecure-tls",
            "--kubelet-use-node-status-port",
            "--kubelet-preferred-address-types=InternalIP",
            f"--metric-resolution={RESOLUTION_SECONDS}s",
            f"--kubelet-request-timeout={RESOLUTION_SECONDS - 1}s",
            "--v=2",
            *flags,
        ]
        log = layout.directory / f"{PROGRAM}.log"
        process = spawn(command, log, owned=True)
        stack.callback(_stop, process)

        def is_available() -> bool:
            assert process.poll() is None, f"metrics-server has ended: {_reason(log)}"
            found = plane.get("apiservice", "v1beta1.metrics.k8s.io")
            conditions = found.get("status", {}).get("conditions", ())
            return any(one["type"] == "Available" and one["status"] == "True" for one in conditions)

        plane.wait("the metrics API to be available", is_available, _READY_SECONDS)
        yield
        assert process.poll() is None, f"metrics-server has ended: {_reason(log)}"


def _reason(log: Path) -> str:
    """Return the error in its log, which its usage and a stack follow."""
    lines = log.read_text(errors="replace").splitlines()
    return next((line for line in lines if line.startswith(("Error:", "panic:"))), lines[-1] if lines else "")


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


def _registration(address: str, port: int, authority: bytes) -> list[Document]:
    """Return the objects of metrics-server's own manifests, for a process instead of a Deployment."""
    meta = {"name": PROGRAM, "namespace": _NAMESPACE}
    ports = [{"name": "https", "port": 443, "protocol": "TCP"}]
    rules: list[Document] = [
        {"apiGroups": [""], "resources": ["nodes/metrics"], "verbs": ["get"]},
        {"apiGroups": [""], "resources": ["pods", "nodes"], "verbs": ["get", "list", "watch"]},
    ]
    return [
        {
            "apiVersion": f"{_RBAC}/v1",
            "kind": "ClusterRole",
            "metadata": {"name": f"system:{PROGRAM}"},
            "rules": rules,
        },
        _binding("ClusterRoleBinding", f"system:{PROGRAM}", "ClusterRole", f"system:{PROGRAM}"),
        _binding("ClusterRoleBinding", f"{PROGRAM}:delegator", "ClusterRole", "system:auth-delegator"),
        _binding(
            "RoleBinding", f"{PROGRAM}-auth-reader", "Role", "extension-apiserver-authentication-reader"
        ),
        {"apiVersion": "v1", "kind": "Service", "metadata": meta, "spec": {"ports": ports}},
        {
            "apiVersion": "discovery.k8s.io/v1",
            "kind": "EndpointSlice",
            "metadata": {**meta, "labels": {"kubernetes.io/service-name": PROGRAM}},
            "addressType": "IPv4",
            "ports": [{**ports[0], "port": port}],
            "endpoints": [{"addresses": [address], "conditions": {"ready": True}}],
        },
        {
            "apiVersion": "apiregistration.k8s.io/v1",
            "kind": "APIService",
            "metadata": {"name": "v1beta1.metrics.k8s.io"},
            "spec": {
                "service": {**meta, "port": 443},
                "group": "metrics.k8s.io",
                "version": "v1beta1",
                "caBundle": base64.b64encode(authority).decode(),
                "groupPriorityMinimum": 100,
                "versionPriority": 100,
            },
        },
    ]


def _binding(kind: str, name: str, role_kind: str, role: str) -> Document:
    where = {"namespace": _NAMESPACE} if kind == "RoleBinding" else {}
    return {
        "apiVersion": f"{_RBAC}/v1",
        "kind": kind,
        "metadata": {"name": name, **where},
        "roleRef": {"apiGroup": _RBAC, "kind": role_kind, "name": role},
        "subjects": [{"apiGroup": _RBAC, "kind": "User", "name": _USER}],
    }
