"""A real control plane for tests, and questions to it.

One serves a whole test session, so tests share it: name what you make by `unique`, put it into the
`namespace` fixture's namespace where you can, and leave the API server running.
"""

import contextlib
import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

from pykubelet.devcluster import identities
from pykubelet.devcluster.admin_client import UNREACHABLE, ApiStatusError
from pykubelet.devcluster.cluster import DevCluster, last_log_error
from pykubelet.devcluster.identities import Subject
from pykubelet.devcluster.layout import Component

T = TypeVar("T")
Document = dict[str, Any]

POLL = 0.05
PATIENCE = 45.0
"""In seconds: long for a busy machine, and less than the minute after which agents look at everything."""
APPLY = "application/apply-patch+yaml"
MERGE = "application/merge-patch+json"
STRATEGIC = "application/strategic-merge-patch+json"
_GROUPS = {
    "apiregistration.k8s.io/v1": "apiservice",
    "apps/v1": "daemonset deployment replicaset statefulset controllerrevision",
    "autoscaling/v2": "horizontalpodautoscaler",
    "batch/v1": "job cronjob",
    "certificates.k8s.io/v1": "certificatesigningrequest",
    "coordination.k8s.io/v1": "lease",
    "discovery.k8s.io/v1": "endpointslice",
    "node.k8s.io/v1": "runtimeclass",
    "policy/v1": "poddisruptionbudget",
    "rbac.authorization.k8s.io/v1": "role rolebinding clusterrole clusterrolebinding",
    "resource.k8s.io/v1": "deviceclass resourceclaim resourceclaimtemplate resourceslice",
    "scheduling.k8s.io/v1": "priorityclass",
    "storage.k8s.io/v1": "storageclass csinode csidriver volumeattachment",
}
_GROUP_OF = {kind: group for group, kinds in _GROUPS.items() for kind in kinds.split()}
_CLUSTER_WIDE = (
    "node namespace persistentvolume certificatesigningrequest runtimeclass clusterrole clusterrolebinding "
    "priorityclass storageclass csinode csidriver volumeattachment deviceclass resourceslice "
    "apiservice"
)


def unique(prefix: str) -> str:
    """Return a name that nothing else has."""
    return f"{prefix}-{os.urandom(4).hex()}"


class Plane:
    """One control plane; `cluster` has its settings, files and processes."""

    def __init__(self, cluster: DevCluster) -> None:
        self.cluster = cluster
        self.server = f"https://127.0.0.1:{cluster.settings.port}"
        self.authority = cluster.layout.authority
        """The certificate of the cluster's authority: what a kubelet's clientCAFile is."""
        self.admin = cluster.layout.kubeconfig("admin")
        self.reference_kubelet: Path | None = cluster.programs.kubelet

    # Who may come in

    def node_kubeconfig(self, name: str, life: timedelta = timedelta(days=1)) -> Path:
        """A kubeconfig of system:node:NAME, as a finished bootstrap leaves it."""
        path = self._file("node")
        identities.node_kubeconfig(self.cluster.layout, self.cluster.settings, name, path, life)
        return path

    def user_kubeconfig(self, name: str, *groups: str) -> Path:
        """A kubeconfig of any user."""
        path = self._file("user")
        subject = Subject(name, groups)
        identities.user_kubeconfig(self.cluster.layout, self.cluster.settings, subject, path)
        return path

    def bootstrap_kubeconfig(self, token: str = "") -> Path:
        """A kubeconfig with the bootstrap token, or with another token."""
        path = self._file("token")
        text = identities.token_kubeconfig(
            self.cluster.layout, self.cluster.settings, token or self.cluster.settings.token
        )
        identities.write_private(path, text)
        return path

    # Asking and telling

    def kubectl(
        self,
        *args: str,
        input: str | None = None,
        check: bool = True,
        kubeconfig: Path | None = None,
        timeout: float = 60,
    ) -> str:
        """Run kubectl, as the admin by default; returns its output, and errors with `check` off."""
        command = [str(self.cluster.programs.kubectl), f"--kubeconfig={kubeconfig or self.admin}", *args]
        done = subprocess.run(
            command, input=input, capture_output=True, text=True, timeout=timeout, check=False
        )
        if not check:
            return done.stdout + done.stderr
        assert done.returncode == 0, f"kubectl {' '.join(args)}: {done.stdout}{done.stderr}"
        return done.stdout

    def request(self, method: str, path: str, body: object = None, **more: Any) -> Any:
        """Query the API server itself; raises ApiRefusal when it says no."""
        if method != "GET":
            # Nobody asks again for what a busy API server takes long to do.
            more.setdefault("timeout", 30)
        return self.cluster.api.request(method, path, body, **more)

    def get(self, kind: str, name: str, namespace: str = "default") -> Document:
        """Return an object; `kind` is what its manifest says, in any case."""
        answer: Document = self.request("GET", f"{self.place(kind, namespace)}/{name}")
        return answer

    def find(self, kind: str, name: str, namespace: str = "default") -> Document | None:
        """Return an object, or None when it does not exist or nobody can say."""
        try:
            return self.get(kind, name, namespace)
        except ApiStatusError as err:
            if err.code not in (404, 429) and err.code < 500:
                raise
        except UNREACHABLE:
            pass
        return None

    def known(self, kind: str, name: str, namespace: str = "default") -> Document | None:
        """Return an object, or None if the API server reports that it does not exist; raises otherwise."""
        try:
            return self.get(kind, name, namespace)
        except ApiStatusError as err:
            if err.code != 404:
                raise
            return None

    def items(self, kind: str, namespace: str = "", query: str = "") -> list[Document]:
        """Return the objects of a kind, of one namespace or all; `query` is a URL's, such as a selector."""
        answer = self.request("GET", f"{self.place(kind, namespace)}?{query}")
        return list(answer["items"])

    def apply(self, document: Document) -> Document:
        """Apply a document (server-side apply)."""
        meta = document["metadata"]
        place = self.place(document["kind"], meta.get("namespace", "default"), document["apiVersion"])
        query = "fieldManager=tests&force=true"
        answer: Document = self.request(
            "PATCH", f"{place}/{meta['name']}?{query}", document, content_type=APPLY
        )
        return answer

    def create(self, document: Document) -> Document:
        """Create an object; returns it as the API server has it."""
        namespace = document["metadata"].get("namespace", "default")
        answer: Document = self.request(
            "POST", self.place(document["kind"], namespace, document["apiVersion"]), document
        )
        return answer

    def patch(
        self, kind: str, name: str, namespace: str, change: Document, *, subresource: str = ""
    ) -> Document:
        """Change an object by a merge patch."""
        path = f"{self.place(kind, namespace)}/{name}" + (f"/{subresource}" if subresource else "")
        answer: Document = self.request("PATCH", path, change, content_type=MERGE)
        return answer

    def delete(self, kind: str, name: str, namespace: str = "default", *, grace: int | None = None) -> None:
        """Request an object's deletion; one that is gone already is fine."""
        options = {} if grace is None else {"gracePeriodSeconds": grace}
        try:
            self.request("DELETE", f"{self.place(kind, namespace)}/{name}", options)
        except ApiStatusError as err:
            if err.code != 404:
                raise

    def events(self, namespace: str, name: str) -> list[Document]:
        """The events about an object, the oldest first."""
        found = self.items("event", namespace, f"fieldSelector=involvedObject.name%3D{name}")
        return sorted(found, key=lambda event: event["metadata"]["creationTimestamp"])

    @staticmethod
    def place(kind: str, namespace: str = "", version: str = "") -> str:
        """The path of a collection."""
        kind = kind.lower()
        version = version or _GROUP_OF.get(kind, "v1")
        base = f"/api/{version}" if "/" not in version else f"/apis/{version}"
        inside = f"/namespaces/{namespace}" if namespace and kind not in _CLUSTER_WIDE.split() else ""
        return f"{base}{inside}/{_plural(kind)}"

    # Waiting

    def wait(self, what: str, look: Callable[[], T | None], seconds: float = PATIENCE) -> T:
        """Return the first true result of `look`."""
        deadline = time.monotonic() + seconds
        last: object = None
        while True:
            try:
                if answer := look():
                    return answer
                last = answer
            except (*UNREACHABLE, ApiStatusError) as err:
                last = err
            if time.monotonic() > deadline:
                raise AssertionError(f"{what}: not within {seconds:g} s; the last look gave {last!r}")
            time.sleep(POLL)

    def wait_for(
        self,
        kind: str,
        name: str,
        namespace: str,
        fits: Callable[[Document], object] = lambda _: True,
        seconds: float = PATIENCE,
    ) -> Document:
        """Wait until an object exists and fits; returns it."""

        def look() -> Document | None:
            found = self.find(kind, name, namespace)
            return found if found is not None and fits(found) else None

        return self.wait(f"{kind} {namespace}/{name}", look, seconds)

    def wait_gone(self, kind: str, name: str, namespace: str = "default", seconds: float = PATIENCE) -> None:
        """Wait until an object does not exist."""

        def look() -> bool:
            try:
                self.get(kind, name, namespace)
            except ApiStatusError as err:
                return err.code == 404
            return False

        self.wait(f"{kind} {namespace}/{name} to be gone", look, seconds)

    # Its processes

    def stop_server(self) -> None:
        """End the API server politely."""
        self.cluster.stop_component(Component.APISERVER)

    def kill_server(self) -> None:
        """End the API server as a power cut would."""
        self.cluster.stop_component(Component.APISERVER, grace=0)

    def start_server(self) -> None:
        """Start the API server again and wait until it is ready."""
        self.cluster.start_component(Component.APISERVER)
        self.cluster.wait_ready()

    @contextlib.contextmanager
    def without_server(self) -> Iterator[None]:
        """Stop the API server for the time of a block.

        The controllers are started again, too: those that were left to wait would go on waiting for a while.
        """
        self.kill_server()
        try:
            yield
        finally:
            self.start_server()
            self.restart_controllers()

    def restart_controllers(self) -> None:
        """Start the controllers and the scheduler again, after an outage that they were left to wait in."""
        for component in (Component.CONTROLLER_MANAGER, Component.SCHEDULER):
            self.cluster.stop_component(component, grace=0)
            self.cluster.start_component(component)

    @contextlib.contextmanager
    def signing(self, duration: str) -> Iterator[None]:
        """Sign nodes' certificates for this long only (such as 2m) for the time of a block."""
        before = self.cluster.settings.signing_duration
        self.cluster.restart_component(Component.CONTROLLER_MANAGER, signing_duration=duration)
        try:
            yield
        finally:
            self.cluster.restart_component(Component.CONTROLLER_MANAGER, signing_duration=before)

    def check(self) -> None:
        """Fail if a part of the control plane has ended by itself."""
        running = self.cluster.running()
        for component in Component:
            told = last_log_error(self.cluster.layout.log(component))
            assert component in running, f"{component} ended by itself: {told}"

    # Recorded requests

    def audit_mark(self) -> int:
        """Where the audit log ends now; give it to `audit` to see only what comes after."""
        path = self.cluster.layout.audit_log
        return path.stat().st_size if path.exists() else 0

    def audit(self, since: int = 0) -> list[Document]:
        """Requests that were answered, as audit events, in their order: user, verb, objectRef…"""
        with self.cluster.layout.audit_log.open("rb") as file:
            file.seek(max(since - 1, 0))
            lines = file.read().split(b"\n")
        # What follows the last line break is still being written; so was, perhaps, what the mark is in.
        found = [json.loads(line) for line in lines[1 if since else 0 : -1]]
        answered = [event for event in found if event["stage"] == "ResponseComplete"]
        # Each is written after its answer, so perhaps after one that was asked for later.
        return sorted(answered, key=lambda event: str(event["requestReceivedTimestamp"]))

    def writes(self, user: str, since: int = 0) -> list[Document]:
        """What a user has created, changed or deleted: audit events."""
        verbs = {"create", "update", "patch", "delete", "deletecollection"}
        return [
            event
            for event in self.audit(since)
            if event["verb"] in verbs and event["user"]["username"] == user
        ]

    def _file(self, prefix: str) -> Path:
        folder = self.cluster.layout.directory / "users"
        folder.mkdir(exist_ok=True)
        return folder / f"{unique(prefix)}.kubeconfig"


def pod_document(name: str, namespace: str, node: str = "", **spec: Any) -> Document:
    """A small pod; bound to a node already where one is named, so that no scheduler is needed."""
    container = {"name": "main", "image": "busybox", "command": ["sleep", "3600"]}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {"containers": [container], **({"nodeName": node} if node else {}), **spec},
    }


def _plural(kind: str) -> str:
    if kind == "endpoints":
        return kind
    if kind.endswith("y"):
        return f"{kind[:-1]}ies"
    return f"{kind}es" if kind.endswith("s") else f"{kind}s"
