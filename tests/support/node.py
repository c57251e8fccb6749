"""A node for tests: an agent that can be killed at any moment, its manifests, and questions to it.

The agent is the real program in a process of its own. `kubelet_node` runs it beside a private
runtime that lives on when the agent dies; `up_node` runs `pykubelet up`, runtime included. What a
wait was for, the pods as they stood and the end of the agent's log are in every failure.
"""

import contextlib
import glob
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import grpc
import yaml

from pykubelet.cli.node.up import standalone_config
from pykubelet.cri import runtime_pb2 as pb
from pykubelet.standalone.instance import Instance
from tests.support.ports import free_port
from tests.support.runtime import RunningRuntime
from tests.support.runtime_view import Truth

T = TypeVar("T")
Document = dict[str, Any]

BIN = Path(sys.executable).parent
NAME = "n1"
"""The node's name; it is behind every static pod's name."""
POLL = 0.05
PATIENCE = 45.0
"""In seconds: long for a busy machine, and less than the minute after which an agent looks at everything."""
_NOT_YET = (
    urllib.error.URLError,
    ConnectionError,
    http.client.HTTPException,
    OSError,
    grpc.RpcError,
    StopIteration,  # a container's status that the pod does not have yet
)


class Node:
    """One agent, started and stopped at will; its pods are what is in its manifests directory."""

    def __init__(
        self,
        instance: Instance,
        command: Sequence[str],
        ports: tuple[int, int],
        *,
        root: Path | None = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.instance = instance
        self.root = root or instance.kubelet_root
        self.manifests = instance.manifests
        self.log = instance.data_dir.parent / f"agent-{os.urandom(2).hex()}.log"
        self.truth = Truth(instance.endpoint)
        self.process: subprocess.Popen[bytes] | None = None
        self.command = command
        self._healthz, self._read_only = ports
        self._env = {**os.environ, **(env or {})}

    # The agent's process

    def start(self, *, wait: bool = True) -> None:
        """Start the agent, and return when it is healthy unless told not to wait."""
        assert self.process is None
        with self.log.open("ab") as output:
            # An agent must not outlive the tests.
            command = ["setpriv", "--pdeathsig", "TERM", "--", *self.command]
            self.process = subprocess.Popen(command, stdout=output, stderr=output, env=self._env)
        if wait:
            self.wait("the agent to be healthy", self.is_healthy, 60)

    def kill(self) -> None:
        """End the agent as a power cut would."""
        self._end(signal.SIGKILL)

    def stop(self) -> int:
        """Request the end of the agent, and return its exit code."""
        return self._end(signal.SIGTERM)

    def restart(self) -> None:
        """Stop it and start it again."""
        assert self.stop() == 0, self.log_tail()
        self.start()

    def _end(self, number: int) -> int:
        process, self.process = self.process, None
        if process is None:
            return 0
        process.send_signal(number)
        try:
            return process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise AssertionError(f"the agent did not stop within 60 s\n{self.log_tail()}") from None

    def is_healthy(self) -> bool:
        with urllib.request.urlopen(f"http://127.0.0.1:{self._healthz}/healthz", timeout=10) as answer:
            return bool(answer.read() == b"ok")

    def log_text(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def log_tail(self, lines: int = 60) -> str:
        return "\n".join(["--- the agent's log ends with:", *self.log_text().splitlines()[-lines:]])

    def check_log(self) -> None:
        """Fail if the agent met something that nobody had thought of, however well it went on."""
        # One refusal of a pod begins with these words, in the reference, too.
        met = (
            r"Unexpected error(?! while attempting to recover from admission failure)|this is a bug|Traceback"
        )
        bad = re.findall(rf"^.*(?:{met}).*$", self.log_text(), re.MULTILINE)
        assert not bad, "\n".join(bad[:5])

    # Its manifests

    def write(self, document: Document | str, file: str = "") -> str:
        """Put a manifest into the directory at once and whole; returns the pod's name on the node."""
        if isinstance(document, str):
            name, text = file, document
        else:
            name, text = document["metadata"]["name"], json.dumps(document)
        path = self.manifests / (file or f"{name}.json")
        hidden = path.with_name(f".{path.name}.new")
        hidden.write_text(text)
        hidden.rename(path)
        return f"{name}-{NAME}"

    def remove(self, *names: str) -> None:
        """Take manifests away, by the name of the pod in them or of the file."""
        for name in names:
            for path in (self.manifests / name, self.manifests / f"{name.removesuffix(f'-{NAME}')}.json"):
                path.unlink(missing_ok=True)

    def clear(self, seconds: float = 60) -> None:
        """Take all manifests away and wait until nothing of any pod is left."""
        for path in self.manifests.iterdir():
            path.unlink()
        self.wait("all pods to be gone", lambda: not self.pods() and not self.left_of(), seconds)

    # What it says

    def page(self, path: str) -> str:
        """A page of the read-only port."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self._read_only}{path}", timeout=30) as answer:
            text: str = answer.read().decode()
            return text

    def get(self, path: str) -> Any:
        """Query the read-only port."""
        return json.loads(self.page(path))

    def pods(self) -> list[Document]:
        """All pods as the agent serves them."""
        items: list[Document] = self.get("/pods")["items"]
        return items

    def pod(self, name: str) -> Document | None:
        """The pod with this name on the node, if there is one; of several the one that is wanted."""
        return next((pod for pod in self.pods() if pod["metadata"]["name"] == name), None)

    def control(self, method: str, path: str) -> Any:
        """Query the control socket."""
        connection = _UnixConnection(str(self.root / "pykubelet.sock"))
        with contextlib.closing(connection):
            connection.request(method, path)
            answer = connection.getresponse()
            return json.loads(answer.read())

    def events(self, name: str) -> list[tuple[str, str, str]]:
        """A pod's events: reason, message, field."""
        pod = self.pod(name)
        if pod is None:
            return []
        journal = self.control("GET", f"/pods/{pod['metadata']['uid']}/journal")
        return [(event["reason"], event["message"], event["where"]) for event in journal["events"]]

    # Waiting

    def wait(self, what: str, look: Callable[[], T | None], seconds: float = PATIENCE) -> T:
        """Return the first true result of `look`; raises AssertionError with the whole story."""
        deadline = time.monotonic() + seconds
        last: object = None
        while True:
            try:
                answer = look()
                if answer:
                    return answer
                last = answer
            except _NOT_YET as err:
                last = err
            if self.process is not None and (code := self.process.poll()) is not None:
                raise AssertionError(
                    f"the agent ended with {code} while waiting for {what}\n{self.log_tail()}"
                )
            if time.monotonic() > deadline:
                told = f"{what}: not within {seconds:g} s; the last look gave {last!r}"
                raise AssertionError(f"{told}\n{self._story()}\n{self.log_tail()}")
            time.sleep(POLL)

    def wait_none(self, what: str, look: Callable[[], Sequence[str]], seconds: float = PATIENCE) -> None:
        """Wait until `look` returns nothing; the error lists what it returned last."""
        remaining: Sequence[str] = ()

        def is_empty() -> bool:
            nonlocal remaining
            remaining = look()
            return not remaining

        try:
            self.wait(what, is_empty, seconds)
        except AssertionError as err:
            raise AssertionError(f"left over: {list(remaining)}\n{err}") from None

    def wait_pod(
        self, name: str, what: str, fits: Callable[[Document], object], seconds: float = PATIENCE
    ) -> Document:
        """Wait until the pod is there and fits; returns it."""

        def look() -> Document | None:
            pod = self.pod(name)
            return pod if pod is not None and fits(pod) else None

        return self.wait(f"pod {name} {what}", look, seconds)

    def wait_ready(self, name: str, seconds: float = PATIENCE) -> Document:
        return self.wait_pod(name, "to be ready", is_ready, seconds)

    def wait_phase(self, name: str, phase: str, seconds: float = PATIENCE) -> Document:
        return self.wait_pod(name, f"to be {phase}", lambda pod: pod["status"]["phase"] == phase, seconds)

    def wait_event(self, name: str, reason: str, seconds: float = PATIENCE) -> str:
        """Wait for an event with this reason; returns its message."""
        return self.wait(
            f"event {reason} of {name}",
            lambda: next((told for why, told, _ in self.events(name) if why == reason), None),
            seconds,
        )

    def wait_gone(self, name: str, uid: str, seconds: float = PATIENCE) -> None:
        """Wait until nothing of a pod is left: not here, not in the runtime, not on the disk."""
        self.wait(
            f"pod {name} to be gone",
            lambda: all(pod["metadata"]["uid"] != uid for pod in self.pods()) and not self.left_of(uid),
            seconds,
        )

    def start_pod(self, document: Document, seconds: float = PATIENCE) -> Document:
        """Write a manifest and wait until its pod is ready."""
        return self.wait_ready(self.write(document), seconds)

    # Looking behind it

    def shell(self, name: str, script: str, container: str = "") -> str:
        """Run a script in a pod's running container and return what it wrote."""
        chosen = [
            one
            for one in self.truth.running(name)
            if not container or one.labels["io.kubernetes.container.name"] == container
        ]
        assert len(chosen) == 1, f"{name} has {len(chosen)} such containers running"
        code, text = self.truth.exec(chosen[0].id, "sh", "-c", script)
        assert code == 0, f"{script!r} ended with {code}: {text}"
        return text

    def left_of(self, uid: str = "") -> list[str]:
        """What is left of a pod, or of all pods: in the runtime, as directories, cgroups, logs."""
        boxes = [box for box in self.truth.sandboxes() if uid in ("", box.labels["io.kubernetes.pod.uid"])]
        containers = [
            one for one in self.truth.containers() if uid in ("", one.labels["io.kubernetes.pod.uid"])
        ]
        left = [f"sandbox {box.id}" for box in boxes] + [f"container {one.id}" for one in containers]
        left += [f"folder {path}" for path in _entries(self.root / "pods") if uid in ("", path.name)]
        left += [f"logs {path}" for path in _entries(self.instance.pod_logs) if path.name.endswith(uid)]
        left += [f"link {path}" for path in _entries(self.instance.pod_logs.parent / "containers") if not uid]
        return left + [f"cgroup {path}" for path in self.pod_cgroups() if path.name.endswith(uid)]

    def stale_links(self, pod_name: str) -> list[str]:
        """Return the links to logs of a pod's containers that do not exist any more."""
        links = [path.name for path in (self.instance.pod_logs.parent / "containers").glob(f"{pod_name}_*")]
        known = {one.id for one in self.truth.containers()}
        return [link for link in links if not any(id in link for id in known)]

    def pod_cgroups(self) -> list[Path]:
        """The cgroups of all pods, in every hierarchy."""
        top = f"/sys/fs/cgroup/*{self.instance.cgroup_root}/kubepods"
        # Not by `Path.glob`, for which it is an error if a directory goes away concurrently.
        return [Path(path) for path in (*glob.glob(f"{top}/pod*"), *glob.glob(f"{top}/*/pod*"))]  # noqa: PTH207

    def _story(self) -> str:
        try:
            told = [
                f"{pod['metadata']['name']} {pod['metadata']['uid'][:8]} {pod['status']['phase']} "
                + json.dumps([(s["name"], s["state"], s["restartCount"]) for s in all_statuses(pod)])
                for pod in self.pods()
            ]
        except _NOT_YET as err:
            told = [f"the agent does not tell its pods: {err}"]
        try:
            told += [
                f"container {one.id[:12]} of {one.labels.get('io.kubernetes.pod.name')} "
                f"{one.labels.get('io.kubernetes.pod.uid', '')[:8]}: "
                f"{one.metadata.name}.{one.metadata.attempt} {pb.ContainerState.Name(one.state)}"
                for one in self.truth.containers()
            ]
            told += [
                f"sandbox {box.id[:12]} of {box.metadata.name} {box.metadata.uid[:8]}: "
                f"{pb.PodSandboxState.Name(box.state)}"
                for box in self.truth.sandboxes()
            ]
        except grpc.RpcError as err:
            told.append(f"the runtime does not tell its containers: {err}")
        return "\n".join(told)


def kubelet_node(
    runtime: RunningRuntime,
    *,
    endpoint: str = "",
    root: Path | None = None,
    env: Mapping[str, str] | None = None,
    flags: Sequence[str] = (),
    **settings: Any,
) -> Node:
    """Make a node of the `kubelet` program beside a runtime, configured as `pykubelet up` does it."""
    instance, ports = runtime.instance, (free_port(), free_port())
    config = {
        **standalone_config(instance, endpoint or runtime.endpoint),
        "port": free_port(),
        "healthzPort": ports[0],
        "readOnlyPort": ports[1],
        **settings,
    }
    path = instance.data_dir / "kubelet.yaml"
    path.write_text(yaml.safe_dump(config))
    root = root or instance.kubelet_root
    command = [
        str(BIN / "kubelet"),
        f"--config={path}",
        f"--root-dir={root}",
        f"--cert-dir={root}/pki",
        # The default is shared by all kubelets of this host, and tests run several.
        f"--device-plugin-dir={root}/device-plugins",
        f"--hostname-override={NAME}",
        "-v=4",
        *flags,
    ]
    return Node(instance, command, ports, root=root, env=env)


def up_node(data_dir: Path) -> Node:
    """Make a node of `pykubelet up`: the agent brings its own runtime."""
    ports = (free_port(), free_port())
    flags = [
        f"--port={free_port()}",
        f"--healthz-port={ports[0]}",
        f"--read-only-port={ports[1]}",
        # Another node of this host may serve its page on the default port.
        "--page-port=0",
        f"--hostname-override={NAME}",
    ]
    command = [str(BIN / "pykubelet"), "up", "--data-dir", str(data_dir), "-v", "4", *flags]
    return Node(Instance.at(data_dir), command, ports)


@contextlib.contextmanager
def running(node: Node) -> Iterator[Node]:
    """Run the node's agent for the time of a block; it may be killed and started inside."""
    try:
        node.start()
        yield node
        node.check_log()
    finally:
        node.kill()
        node.truth.close()


def all_statuses(pod: Document) -> list[Document]:
    """The statuses of all containers of a pod."""
    status = pod["status"]
    return [*status.get("initContainerStatuses", ()), *status.get("containerStatuses", ())]


def status_of(pod: Document, container: str) -> Document:
    """The status of one container."""
    return next(status for status in all_statuses(pod) if status["name"] == container)


def condition(pod: Document, kind: str) -> str:
    """The status of one condition."""
    return next((c["status"] for c in pod["status"].get("conditions", ()) if c["type"] == kind), "")


def is_ready(pod: Document) -> bool:
    return condition(pod, "Ready") == "True"


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []


class _UnixConnection(http.client.HTTPConnection):
    """HTTP over a unix socket."""

    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=30)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)
