"""A node of the test cluster: an agent beside a private runtime, asked through the API server.

It is `tests.support.node.Node`, with all that can do, as a member of a `Plane`'s cluster. The agent is
ours, or the reference kubelet: tests of what both must do alike run with either.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml

from pykubelet.cli.node.up import standalone_config
from pykubelet.cm.cgroups.driver import CgroupFiles
from pykubelet.cm.cgroups.values import CgroupValues, parse_path
from pykubelet.devcluster.admin_client import ApiStatusError
from pykubelet.linux.cgroupfs import detect_cgroups
from tests.support.node import BIN, PATIENCE, Node, is_ready
from tests.support.plane import Document, Plane, pod_document, unique
from tests.support.ports import held_port
from tests.support.runtime import RunningRuntime

T = TypeVar("T")

DEVICE_PLUGIN_DIR = "--device-plugin-dir"

TOO_MANY, SERVER_ERROR = 429, 500
GRACE = 2
"""Pods of tests end quickly."""
UNTIL_TOLD = "while [ ! -e /tmp/end ]; do sleep 0.1; done"
END = "(sleep 0.5; touch /tmp/end) >/dev/null 2>&1 </dev/null &"
"""Tells it, after this command itself has ended: who is inside of a container goes with it."""


class ClusterNode(Node):
    """One agent that is a node of a cluster."""

    def __init__(
        self,
        plane: Plane,
        runtime: RunningRuntime,
        name: str,
        command: Sequence[str],
        ports: tuple[int, int],
        *,
        root: Path,
        reference: bool = False,
        env: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(runtime.instance, command, ports, root=root, env=env)
        self.plane = plane
        self.name = name
        self.reference = reference
        """Whether the agent is the reference kubelet, which leaves dead containers for a while."""
        self.image = runtime.busybox_image
        self.held = contextlib.ExitStack()
        """What keeps others from taking its ports."""

    @property
    def user(self) -> str:
        """Who it is to the API server."""
        return f"system:node:{self.name}"

    def hand_to(self, program: Path | None) -> None:
        """Use another program as the agent from the next start on: the reference kubelet, or ours (None)."""
        assert self.process is None
        flags = [flag for flag in self.command[1:] if not flag.startswith(DEVICE_PLUGIN_DIR)]
        own = [f"{DEVICE_PLUGIN_DIR}={self.root}/device-plugins"] if program is None else []
        self.command = [str(program or BIN / "kubelet"), *flags, *own]
        self.reference = program is not None
        self.log = self.log.with_name(f"agent-{unique('handed')}.log")

    def write(self, document: Document | str, file: str = "") -> str:
        """Put a static pod's manifest into the directory; returns its name, which its mirror pod has, too."""
        super().write(document, file)
        return f"{file if isinstance(document, str) else document['metadata']['name']}-{self.name}"

    def pods(self) -> list[Document]:
        """All pods as the agent serves them."""
        return self.get("/pods")["items"] or []  # the reference says null for none

    def wait(self, what: str, look: Callable[[], T | None], seconds: float = PATIENCE) -> T:
        """Return the first true result of `look`; a busy API server's refusal is not one yet."""

        def patient() -> T | None:
            try:
                return look()
            except ApiStatusError as err:
                if err.code != TOO_MANY and err.code < SERVER_ERROR:
                    raise
                raise ConnectionError(str(err)) from err

        return super().wait(what, patient, seconds)

    def node_object(self) -> Document | None:
        """The node as the API server has it."""
        return self.plane.find("node", self.name)

    def wait_registered(self, seconds: float = 90) -> Document:
        """Wait until the node is in the cluster and Ready."""

        def look() -> Document | None:
            found = self.node_object()
            return found if found is not None and is_ready(found) else None

        return self.wait(f"node {self.name} to be Ready", look, seconds)

    def pod_document(self, name: str, namespace: str, script: str = "", **spec: Any) -> Document:
        """A pod for this node, of the image that is here; it ends quickly when told to."""
        forever = "trap 'exit 0' TERM; while true; do sleep 3600 & wait $!; done"
        container = {
            "name": "main",
            "image": self.image,
            "imagePullPolicy": "Never",
            "command": ["sh", "-c", script or forever],
        }
        spec = {"containers": [container], "terminationGracePeriodSeconds": GRACE, **spec}
        return pod_document(name, namespace, self.name, **spec)

    def create_pod(self, namespace: str, name: str = "", script: str = "", **spec: Any) -> Document:
        """Create a pod bound to this node; returns it as the API server has it.

        Admission in the API server knows a new PriorityClass only after its informer does.
        """
        document = self.pod_document(name or unique("p"), namespace, script, **spec)

        def create() -> Document | None:
            try:
                return self.plane.create(document)
            except ApiStatusError as err:
                if "no PriorityClass with name" not in str(err):
                    raise
                return None

        if "priorityClassName" not in spec:
            return self.plane.create(document)
        return self.wait(f"PriorityClass {spec['priorityClassName']} to be known", create)

    def api_pod(self, pod: Document) -> Document | None:
        """The pod as the API server has it now; None when it is gone or another has its name."""
        meta = pod["metadata"]
        found = self.plane.find("pod", meta["name"], meta["namespace"])
        return found if found is not None and found["metadata"]["uid"] == meta["uid"] else None

    def wait_api_pod(
        self, pod: Document, what: str, fits: Callable[[Document], object], seconds: float = PATIENCE
    ) -> Document:
        """Wait until the API server's pod fits; returns it."""

        def look() -> Document | None:
            found = self.api_pod(pod)
            return found if found is not None and fits(found) else None

        return self.wait(f"pod {pod['metadata']['name']} {what}", look, seconds)

    def wait_pod_ready(self, pod: Document, seconds: float = PATIENCE) -> Document:
        """Wait until the API server reports that the pod is ready."""
        return self.wait_api_pod(pod, "to be ready", is_ready, seconds)

    def wait_pod_phase(self, pod: Document, phase: str, seconds: float = PATIENCE) -> Document:
        """Wait until the API server reports that the pod is in this phase."""
        return self.wait_api_pod(
            pod, f"to be {phase}", lambda found: found["status"].get("phase") == phase, seconds
        )

    def delete_pod(self, pod: Document, seconds: float = PATIENCE) -> None:
        """Delete a pod as people do, and wait until it is gone from the API and from the node."""
        meta = pod["metadata"]
        self.plane.delete("pod", meta["name"], meta["namespace"])
        self.wait(f"pod {meta['name']} to be gone", lambda: self._is_gone(pod), seconds)
        if not self.reference:
            self.wait_gone(meta["name"], meta["uid"], seconds)

    def _is_gone(self, pod: Document) -> bool:
        """Whether the API server says so; one that cannot say has not."""
        meta = pod["metadata"]
        found = self.plane.known("pod", meta["name"], meta["namespace"])
        return found is None or bool(found["metadata"]["uid"] != meta["uid"])

    def leave(self) -> None:
        """End all pods of this node, then the agent, and take the node out of the cluster."""
        for pod in self.plane.items("pod", query=f"fieldSelector=spec.nodeName%3D{self.name}"):
            self.plane.delete("pod", pod["metadata"]["name"], pod["metadata"]["namespace"], grace=0)
        for path in self.manifests.iterdir():
            path.unlink()
        if self.process is not None:
            try:
                self.wait("all pods to be gone", lambda: not self._still_there(), 120)
            except AssertionError as err:
                raise AssertionError(f"left behind: {self._still_there()}\n{err}") from None
        self.kill()
        self.plane.delete("node", self.name)
        self.plane.delete("lease", self.name, "kube-node-lease")

    def _still_there(self) -> object:
        return self.truth.running() if self.reference else self.left_of()


def cluster_node(
    plane: Plane,
    runtime: RunningRuntime,
    *,
    name: str = "",
    program: Path | None = None,
    kubeconfig: Path | None = None,
    flags: Sequence[str] = (),
    root: Path | None = None,
    env: Mapping[str, str] | None = None,
    settings: Mapping[str, Any] | None = None,
) -> ClusterNode:
    """Make a node of the cluster, configured as a cluster's nodes are; it is not started yet.

    `program` is the reference kubelet instead of ours (have `undo_host_changes` of `devcluster` around
    it), `flags` follow ours on the command line, `settings` are fields of its KubeletConfiguration.
    With `--bootstrap-kubeconfig` in the flags, give the path for the new kubeconfig as `kubeconfig`.
    """
    name = name or unique("n")
    instance = runtime.instance
    held = contextlib.ExitStack()
    secure, health, read_only = (held.enter_context(held_port()) for _ in range(3))
    config = {
        **standalone_config(instance, runtime.endpoint),
        "address": "0.0.0.0",
        "port": secure,
        "healthzPort": health,
        "readOnlyPort": read_only,
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": True},
            "x509": {"clientCAFile": str(plane.authority)},
        },
        "authorization": {"mode": "Webhook"},
        "clusterDomain": "cluster.local",
        "failCgroupV1": False,
        "volumePluginDir": str(instance.kubelet_root / "volume-plugins"),
        **(settings or {}),
    }
    path = instance.data_dir / f"{name}.yaml"
    path.write_text(yaml.safe_dump(config))
    root = root or instance.kubelet_root
    # The reference wants its cgroup root to exist; ours makes it.
    CgroupFiles(detect_cgroups()).make(parse_path(instance.cgroup_root), CgroupValues())
    command = [
        str(program or BIN / "kubelet"),
        f"--config={path}",
        f"--root-dir={root}",
        f"--cert-dir={root}/pki",
        f"--hostname-override={name}",
        f"--kubeconfig={kubeconfig or plane.node_kubeconfig(name)}",
        "-v=4",
        # The default is shared by all kubelets of this host; upstream has no such flag.
        *([f"{DEVICE_PLUGIN_DIR}={root}/device-plugins"] if program is None else []),
        *flags,
    ]
    made = ClusterNode(
        plane,
        runtime,
        name,
        command,
        (health, read_only),
        root=root,
        reference=program is not None,
        env=env,
    )
    made.held = held
    return made


@contextlib.contextmanager
def in_cluster(node: ClusterNode, *, start: bool = True) -> Iterator[ClusterNode]:
    """Run a node in the cluster for the time of a block; with it, its pods and its objects go."""
    try:
        if start:
            node.start()
            node.wait_registered()
        yield node
        node.check_log()
        node.leave()
    finally:
        node.kill()
        node.truth.close()
        node.held.close()
