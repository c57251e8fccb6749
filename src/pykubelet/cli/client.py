"""Client of a running node: HTTP over the kubelet's control socket, and selection of pods by name.

A request takes a few milliseconds and loads none of the kubelet's libraries, so `ps` starts without delay.
Every failure is a NodeError with one line that contains the remedy.

A pod is selected by its name in the manifest (`web`), its name on the node (`web-node1`), either with its
namespace in front (`kube-system/dns`), `pod/NAMESPACE/NAME` as `-o name` prints it, or a prefix of its uid.
An ambiguous name is an error that lists the candidates: a command must never act on a pod that was not meant.

`run_command` runs a command: an error is one line on standard error; Ctrl-C, SIGTERM, SIGHUP and a closed
output pipe end a command without a message, with the exit code that a shell reports for the signal, after it
has removed what is incomplete.
"""

from __future__ import annotations

import http.client
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote, urlencode

from pykubelet.api.meta import from_json, to_json
from pykubelet.api.pod import Container, Pod
from pykubelet.api.stats import PodStats, Summary
from pykubelet.cli.errors import print_error
from pykubelet.cli.printers import escape_unprintable
from pykubelet.config.errors import ConfigError
from pykubelet.podconfig.static_pods import is_static_pod
from pykubelet.server.manifest_schema import Manifest
from pykubelet.server.pods import ErrorResponse, NodePods, PodJournal, Restarted
from pykubelet.standalone.instance import EmbeddedError
from pykubelet.stats.samples import MemoryCurves

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from pykubelet.cli.node_access import Node
    from pykubelet.config.live import ReloadReport
    from pykubelet.eviction.report import PressureReport
    from pykubelet.images.pull_progress import PullProgress
    from pykubelet.podconfig.event_log import EventPage
    from pykubelet.server.images import ImageUsages, PruneReport
    from pykubelet.server.node_info import NodeInfo

T = TypeVar("T")
REQUEST_TIMEOUT_SECONDS = 10.0
"""Timeout of connecting to the control socket and of each read, in seconds."""
RELOAD_TIMEOUT_SECONDS = 75.0
"""The same for a reload of the configuration, in seconds."""
PRUNE_TIMEOUT_SECONDS = 600.0
"""The same for a removal of unused images, in seconds."""
USAGE_TIMEOUT_SECONDS = 2.0
"""The same for usage that a command shows in addition, in seconds."""
EVENT_TIMEOUT_SECONDS = 30.0
"""The same for a request that waits for events, in seconds."""
MAX_BYTES = 16 << 20
"""Bound of a page of events; a full log has less than 8 MiB."""
MAX_SUMMARY_BYTES = 32 << 20
"""Bound of a Summary; one of 500 pods has about 2 MiB."""


class NodeError(Exception):
    """Raised when a request to the node fails; the text is one line with the cause and a remedy."""


class KubeletNotRunning(NodeError):
    """Raised when no kubelet runs on the selected node."""


class NodeNotFound(NodeError):
    """Raised when the options select no node."""


class NotFoundError(NodeError):
    """Raised when the node does not have the pod or the container, or no longer."""


class ManifestRejected(NodeError):
    """Raised when the node rejects a manifest; the text is the reason."""


class EphemeralContainerNotAdded(NodeError):
    """Raised when a pod cannot have an ephemeral container; the text is the reason."""


class StatisticsNotServed(NodeError):
    """Raised when the running kubelet has no statistics endpoint, because it is of an older version."""


class NodeClient:
    """Client of the kubelet of a node; every method raises NodeError."""

    def __init__(self, node: Node, timeout: float | None = None) -> None:
        self._node = node
        self._timeout = timeout

    def info(self) -> NodeInfo:
        """Return the paths and names of the node. Raises NotFoundError when its version is older."""
        # Imported here: most commands do not need it.
        from pykubelet.server.node_info import NodeInfo

        status, body = self._fetch("GET", "/node")
        if status == 404:
            raise NotFoundError("the kubelet is of an older version, which does not report its paths")
        return _read(NodeInfo, status, body)

    def pods(self) -> NodePods:
        """Return all pods of the node and the states of their workers."""
        return self._request("GET", "/pods", NodePods)

    def pod(self, uid: str) -> NodePods:
        """Return one pod. Raises NotFoundError when the node does not have it."""
        return self._request("GET", f"/pods/{quote(uid, safe='')}", NodePods)

    def journal(self, uid: str) -> PodJournal:
        """Return the events and the timeline of a pod."""
        return self._request("GET", f"/pods/{quote(uid, safe='')}/journal", PodJournal)

    def events(self, log: str = "", after: int = 0, *, wait: bool = False) -> EventPage:
        """Return the events after a cursor; `wait` waits for one for at most some 20 seconds."""
        # Imported here: other commands start faster without it.
        from pykubelet.podconfig.event_log import EventPage

        query = urlencode({"log": log, "after": after} | ({"wait": "1"} if wait else {}))
        status, body = self._fetch(
            "GET", f"/events?{query}", timeout=EVENT_TIMEOUT_SECONDS if wait else None, max_bytes=MAX_BYTES
        )
        if status == 404:
            raise NodeError(f"the node on {self._node.title} is of an older version, which keeps no events")
        return _read(EventPage, status, body)

    def document(self, path: str, *, timeout: float | None = None) -> tuple[int, bytes]:
        """Return status and body of any GET request, of which at most MAX_SUMMARY_BYTES."""
        return self._fetch("GET", path, timeout=timeout, max_bytes=MAX_SUMMARY_BYTES)

    def restart(self, uid: str, container: str | None) -> list[str]:
        """Restart one container of a pod, or all, in place; return the names of the restarted containers."""
        query = "?" + urlencode({"container": container}) if container else ""
        return self._request("POST", f"/pods/{quote(uid, safe='')}/restart{query}", Restarted).containers

    def add_ephemeral_container(self, uid: str, container: Container) -> None:
        """Add an ephemeral container to a running pod. Raises EphemeralContainerNotAdded."""
        path = f"/pods/{quote(uid, safe='')}/ephemeralcontainers"
        status, body = self._fetch("POST", path, to_json(container))
        if status == 422:
            raise EphemeralContainerNotAdded(_error_text(body))
        _read(Container, status, body)

    def pressure(self) -> PressureReport:
        """Return the state of the eviction signals."""
        # Imported here: other commands start faster without it.
        from pykubelet.eviction.report import PressureReport

        return self._request("GET", "/pressure", PressureReport)

    def reload_config(self) -> ReloadReport:
        """Reload the configuration, and return what changed."""
        # Imported here: other commands start faster without it.
        from pykubelet.config.live import ReloadReport

        status, body = self._fetch("POST", "/config/reload", timeout=RELOAD_TIMEOUT_SECONDS)
        if status == 404:
            raise NodeError(
                f"the node on {self._node.title} cannot reload its configuration: "
                "it runs an older version; restart it"
            )
        return _read(ReloadReport, status, body)

    def image_usages(self) -> ImageUsages:
        """Return when each image was last used."""
        # Imported here: only commands on images need it.
        from pykubelet.server.images import ImageUsages

        return self._request("GET", "/images", ImageUsages)

    def pulls(self) -> list[PullProgress]:
        """Return the image pulls in progress; empty if the node does not report them, or not in time."""
        # Imported here: only commands that wait for pods need it.
        from pykubelet.images.pull_progress import PullProgress

        try:
            status, body = self._fetch(
                "GET", "/images/pulls", timeout=USAGE_TIMEOUT_SECONDS, max_bytes=MAX_BYTES
            )
            return _read(list[PullProgress], status, body) if status == 200 else []
        except NodeError:
            return []

    def prune_images(self, *, dry_run: bool) -> PruneReport:
        """Remove unused images, or only list them."""
        # Imported here: only commands on images need it.
        from pykubelet.server.images import PruneReport

        path = f"/images/prune?dryRun={'true' if dry_run else 'false'}"
        status, body = self._fetch("POST", path, timeout=PRUNE_TIMEOUT_SECONDS)
        if status == 404:
            raise NodeError(
                f"the node on {self._node.title} cannot remove unused images: "
                "it runs an older version; restart it"
            )
        return _read(PruneReport, status, body)

    def put_manifest(self, name: str, content: bytes, *, replace: bool) -> Manifest:
        """Install a manifest under a file name. Raises ManifestRejected when the node rejects it."""
        path = f"/manifests/{quote(name, safe='')}{'?replace=true' if replace else ''}"
        return self._request("PUT", path, Manifest, content)

    def delete_manifest(self, name: str) -> Manifest:
        """Remove a manifest. Raises NotFoundError when there is none of this name."""
        return self._request("DELETE", f"/manifests/{quote(name, safe='')}", Manifest)

    def summary(self, *, brief: bool = False, timeout: float | None = None) -> Summary:
        """Return the usage of the node and its pods; `brief` is only CPU and memory.

        Raises StatisticsNotServed when the kubelet does not have the endpoint.
        """
        return _read(Summary, 200, self._summary_body(brief=brief, timeout=timeout))

    def pod_usage(self, *, brief: bool = True) -> dict[str, PodStats]:
        """Return the usage of pods by uid; empty if the node does not report it, or not in time."""
        try:
            summary = self.summary(brief=brief, timeout=USAGE_TIMEOUT_SECONDS)
        except NodeError:
            return {}
        return {stats.pod_ref.uid: stats for stats in summary.pods}

    def memory_curves(self, uid: str) -> MemoryCurves:
        """Return the memory of a pod's containers in the last minutes; empty if it is not reported."""
        path = f"/pods/{quote(uid, safe='')}/memory"
        try:
            status, body = self._fetch(
                "GET", path, timeout=USAGE_TIMEOUT_SECONDS, max_bytes=MAX_SUMMARY_BYTES
            )
            return _read(MemoryCurves, 200, body) if status == 200 else MemoryCurves()
        except NodeError:
            return MemoryCurves()

    def summary_document(self) -> tuple[Summary, dict[str, Any]]:
        """Return the Summary, and the same as plain values with every field; errors as in `summary`."""
        body = self._summary_body(brief=False, timeout=None)
        return _read(Summary, 200, body), _read(dict[str, Any], 200, body)

    def _summary_body(self, *, brief: bool, timeout: float | None) -> bytes:
        path = "/stats/summary?only_cpu_and_memory=true" if brief else "/stats/summary"
        status, body = self._fetch("GET", path, timeout=timeout, max_bytes=MAX_SUMMARY_BYTES)
        if status == 200:
            return body
        if status == 404:
            raise StatisticsNotServed(
                f"the node on {self._node.title} does not serve statistics: it runs an older version; "
                f"stop it and {self._node.start_hint}"
            )
        raise NodeError(
            f"the node cannot report statistics (status {status}: {_error_text(body)}): "
            "try again in some seconds, or see its log"
        )

    def _request(self, method: str, path: str, kind: type[T], content: bytes | None = None) -> T:
        return _read(kind, *self._fetch(method, path, content))

    def _fetch(
        self,
        method: str,
        path: str,
        content: bytes | None = None,
        *,
        timeout: float | None = None,
        max_bytes: int | None = None,
    ) -> tuple[int, bytes]:
        seconds = next((one for one in (timeout, self._timeout) if one is not None), REQUEST_TIMEOUT_SECONDS)
        connection = _UnixConnection(self._node.socket, seconds)
        try:
            connection.request(method, path, content)
            response = connection.getresponse()
            body = response.read() if max_bytes is None else response.read(max_bytes + 1)
        except (FileNotFoundError, ConnectionRefusedError, NotADirectoryError) as err:
            raise self._unreachable() from err
        except PermissionError as err:
            raise NodeError("only root may ask the node: run it with sudo") from err
        except TimeoutError as err:
            raise NodeError(
                f"the node does not answer within {seconds:g}s: it is very busy, or hangs; see its log"
            ) from err
        except (OSError, http.client.HTTPException) as err:
            raise NodeError(f"the connection to the node broke ({err}): is it being stopped?") from err
        finally:
            connection.close()
        if max_bytes is not None and len(body) > max_bytes:
            raise NodeError(
                f"the node's answer has more than {max_bytes >> 20} MiB: is it of another version?"
            )
        return response.status, body

    def _unreachable(self) -> NodeError:
        node = self._node
        if node.lock_owner() is not None:
            return NodeError(
                f"the node on {node.title} is still starting, or stopping: try again in a moment"
            )
        return KubeletNotRunning(f"no node runs on {node.title}: {node.start_hint}")


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: Path, timeout: float) -> None:
        super().__init__("localhost", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))


_STATUS_ERRORS: dict[int, type[NodeError]] = {
    404: NotFoundError,
    409: ManifestRejected,
    422: ManifestRejected,
}


def _read(kind: type[T], status: int, body: bytes) -> T:
    try:
        if status in (200, 201):
            return from_json(kind, body)
        message = from_json(ErrorResponse, body).message
    except ValueError as err:
        raise NodeError(
            f"the node's answer (status {status}) cannot be read ({err}): is it of another version?"
        ) from err
    raise _STATUS_ERRORS.get(status, NodeError)(message)


def _error_text(body: bytes) -> str:
    """Return the message of an error response, or the beginning of a text that is not JSON."""
    try:
        text = from_json(ErrorResponse, body).message
    except ValueError:
        text = body[:_MAX_ERROR_CHARACTERS].decode(errors="replace")
    return escape_unprintable(text.strip()[:_MAX_ERROR_CHARACTERS], lines=False) or "no reason"


SHORTEST_UID = 4
KIND_PREFIX = "pod/"
_MAX_ERROR_CHARACTERS = 300
_MAX_LISTED = 10
_DEFAULT_CONTAINER = "kubectl.kubernetes.io/default-container"


class SelectionError(Exception):
    """Raised when no pod or container matches, or several do; the text lists the candidates."""


def choose_pod(pods: Sequence[Pod], text: str, states: Mapping[str, str] | None = None) -> Pod:
    """Return the pod that `text` selects; `states` maps uids to pod worker states.

    Raises SelectionError with the candidates.
    """
    found = _matching(pods, text)
    if not found:
        if not pods:
            raise SelectionError(f"there is no pod {text!r}: this node has no pods at all")
        raise SelectionError(_listing(f"there is no pod {text!r}; there are:", pods))
    # A pod that is being replaced shares its name with its successor until it has terminated.
    if len({pod.full_name for pod in found}) == 1 and len(found) > 1:
        remaining = [pod for pod in found if (states or {}).get(pod.uid, "syncing") == "syncing"]
        found = remaining[-1:] or found[-1:]
    if len(found) > 1:
        raise SelectionError(_listing(f"{text!r} may be any of these, say which:", found))
    return found[0]


def choose_container(pod: Pod, name: str | None) -> tuple[Container, bool]:
    """Return a container of a pod, and whether it was picked by default from several.

    Without a name it is that of the annotation kubectl.kubernetes.io/default-container, or the first.
    Raises SelectionError with the pod's containers.
    """
    containers = all_containers(pod)
    if name is None:
        default = pod.metadata.annotations.get(_DEFAULT_CONTAINER)
        for container in pod.spec.containers:
            if container.name == default:
                return container, False
        if not pod.spec.containers:
            raise SelectionError(f"pod {pod.metadata.name} has no containers")
        return pod.spec.containers[0], len(containers) > 1
    for container in containers:
        if container.name == name:
            return container, False
    names = ", ".join(container.name for container in containers)
    raise SelectionError(f"pod {pod.metadata.name} has no container {name!r}; it has: {names}")


def all_containers(pod: Pod) -> list[Container]:
    """Return the containers, init containers and ephemeral containers of a pod."""
    return [*pod.spec.containers, *pod.spec.init_containers, *pod.spec.ephemeral_containers]


def manifest_name(pod: Pod) -> str:
    """Return the pod's name as in its manifest: for static pods without the node name suffix."""
    suffix = f"-{pod.spec.node_name.lower()}"
    if is_static_pod(pod) and pod.spec.node_name:
        return pod.metadata.name.removesuffix(suffix)
    return pod.metadata.name


def _matching(pods: Sequence[Pod], text: str) -> list[Pod]:
    """Return the best matches: by pod name, else by name in the manifest, else by uid prefix.

    `pod/` in front, as in the output of `-o name`, is the kind if it is no namespace.
    """
    found = _matching_name(pods, text)
    if not found and text.startswith(KIND_PREFIX):
        return _matching_name(pods, text.removeprefix(KIND_PREFIX))
    return found


def _matching_name(pods: Iterable[Pod], text: str) -> list[Pod]:
    namespace, slash, name = text.rpartition("/")
    candidates = [pod for pod in pods if not slash or pod.metadata.namespace == namespace]
    matches = (
        [pod for pod in candidates if pod.metadata.name == name],
        [pod for pod in candidates if manifest_name(pod) == name],
        [pod for pod in candidates if len(name) >= SHORTEST_UID and pod.uid.startswith(name)],
    )
    return next((found for found in matches if found), [])


def _listing(heading: str, pods: Sequence[Pod]) -> str:
    lines = [f"  {pod.full_name} (uid {pod.uid})" for pod in pods[:_MAX_LISTED]]
    rest = len(pods) - len(lines)
    return "\n".join([heading, *lines, *([f"  and {rest} more"] if rest else [])])


_EXPECTED_ERRORS: tuple[type[Exception], ...] = (NodeError, SelectionError, EmbeddedError, ConfigError)
_SIGNAL_EXIT_BASE = 128
"""Base of the exit code of a process ended by a signal; the signal's number is added."""


def run_command(program: str, work: Callable[[], int], *expected: type[Exception]) -> int:
    """Run `work` and return its exit code; usual and `expected` exceptions become one line and code 1."""
    try:
        with _exit_on_signals():
            code = work()
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader closed the pipe. Redirect stdout, so that flushing Python's buffer at exit does not fail.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _SIGNAL_EXIT_BASE + signal.SIGPIPE
    except _EXPECTED_ERRORS + expected as err:
        return print_error(program, err)
    except KeyboardInterrupt:
        return _SIGNAL_EXIT_BASE + signal.SIGINT
    return code


@contextmanager
def _exit_on_signals() -> Iterator[None]:
    """Exit with unwinding on SIGTERM and SIGHUP; an ignored signal (`nohup`) or another handler stays."""
    changed = []
    if threading.current_thread() is threading.main_thread():
        changed = [
            number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) is signal.SIG_DFL
        ]
    for number in changed:
        signal.signal(number, lambda number, _: sys.exit(_SIGNAL_EXIT_BASE + number))
    try:
        yield
    finally:
        for number in changed:
            signal.signal(number, signal.SIG_DFL)


@contextmanager
def signals_deferred() -> Iterator[None]:
    """Defer SIGINT, SIGTERM and SIGHUP until the context ends, so that output is not left half written.

    Only in the main thread. Blocking them there would not suffice: the kernel delivers them to other threads.
    """
    received: list[int] = []
    handlers = {
        number: signal.signal(number, lambda number, _: received.append(number)) or signal.SIG_DFL
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    }
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        if received:
            signal.raise_signal(signal.Signals(received[0]))


def draw_live(frames: Iterable[RenderableType], console: Console) -> None:
    """Draw each frame in the place of the previous one, and restore the terminal however it ends."""
    # Imported here: only terminal output needs rich.
    from rich.live import Live

    live = Live(console=console, auto_refresh=False)
    try:
        for frame in frames:
            with signals_deferred():
                live.start()
                live.update(frame, refresh=True)
    finally:
        with signals_deferred():
            live.stop()
