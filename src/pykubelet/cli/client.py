"""The command line's way to a running node: plain HTTP over the agent's control socket.

A question costs a few milliseconds and none of the agent's libraries, so that `ps` is instant.
Everything that can go wrong is a NodeError with one line that says what to do.

Which pod and which container a person means.

A pod is named as it was written (`web`), as the node calls it (`web-node1`), with its namespace in
front (`kube-system/dns`), or by the beginning of its uid. What fits several is refused with the list
of them: a command must never hit a pod that was not meant.
"""

from __future__ import annotations

import http.client
import socket
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar
from urllib.parse import quote, urlencode

from pykubelet.api.meta import from_json
from pykubelet.api.pod import Container, Pod
from pykubelet.podconfig.static_pods import is_static_pod
from pykubelet.server.manifests import Manifest
from pykubelet.server.pods import SOCKET_NAME, NodePods, PodJournal, Refusal, Restarted
from pykubelet.standalone.data_dir import holder
from pykubelet.standalone.instance import Instance

T = TypeVar("T")
PATIENCE = 10.0
"""How long an agent may take to answer, in seconds."""


class NodeError(Exception):
    """The node could not be asked, or refused; the text is one line with the cause and a remedy."""


class KubeletNotRunning(NodeError):
    """No agent runs on the data directory."""


class NotFoundError(NodeError):
    """The node has no such pod or container (any more)."""


class ManifestRejected(NodeError):
    """The node does not take a manifest; the text says why."""


class NodeClient:
    """Asks the agent that runs on a data directory; every method raises NodeError."""

    def __init__(self, instance: Instance) -> None:
        self._instance = instance
        self._socket = instance.kubelet_root / SOCKET_NAME

    def pods(self) -> NodePods:
        """All pods."""
        return self._ask("GET", "/pods", NodePods)

    def pod(self, uid: str) -> NodePods:
        """One pod; raises NotThere when it is gone."""
        return self._ask("GET", f"/pods/{quote(uid, safe='')}", NodePods)

    def journal(self, uid: str) -> PodJournal:
        """What happened to a pod."""
        return self._ask("GET", f"/pods/{quote(uid, safe='')}/journal", PodJournal)

    def restart(self, uid: str, container: str | None) -> list[str]:
        """Restart a container of a pod, or all, in place; gives their names."""
        query = "?" + urlencode({"container": container}) if container else ""
        return self._ask("POST", f"/pods/{quote(uid, safe='')}/restart{query}", Restarted).containers

    def put_manifest(self, name: str, content: bytes, *, replace: bool) -> Manifest:
        """Give the node a manifest under a file's name; raises NotTaken when it is refused."""
        path = f"/manifests/{quote(name, safe='')}{'?replace=true' if replace else ''}"
        return self._ask("PUT", path, Manifest, content)

    def _ask(self, method: str, path: str, kind: type[T], content: bytes | None = None) -> T:
        connection = _UnixConnection(self._socket)
        try:
            connection.request(method, path, content)
            answer = connection.getresponse()
            body = answer.read()
        except (FileNotFoundError, ConnectionRefusedError, NotADirectoryError) as err:
            raise self._unreachable() from err
        except PermissionError as err:
            raise NodeError("only root may ask the node: run it with sudo") from err
        except TimeoutError as err:
            raise NodeError(
                f"the node does not answer within {PATIENCE:g}s: it is very busy, or hangs; see its log"
            ) from err
        except (OSError, http.client.HTTPException) as err:
            raise NodeError(f"the connection to the node broke ({err}): is it being stopped?") from err
        finally:
            connection.close()
        return _read(kind, answer.status, body)

    def _unreachable(self) -> NodeError:
        where = self._instance.data_dir
        if holder(self._instance) is not None:
            return NodeError(f"the node on {where} is still starting, or stopping: try again in a moment")
        option = "" if self._instance.name == "pykubelet" else f" --data-dir {where}"
        return KubeletNotRunning(f"no node runs on {where}: start it with `pykubelet up{option}`")


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=PATIENCE)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(PATIENCE)
        self.sock.connect(str(self._path))


_REFUSALS: dict[int, type[NodeError]] = {404: NotFoundError, 409: ManifestRejected, 422: ManifestRejected}


def _read(kind: type[T], status: int, body: bytes) -> T:
    try:
        if status in (200, 201):
            return from_json(kind, body)
        message = from_json(Refusal, body).message
    except ValueError as err:
        raise NodeError(
            f"the node's answer (status {status}) cannot be read ({err}): is it of another version?"
        ) from err
    raise _REFUSALS.get(status, NodeError)(message)


SHORTEST_UID = 4
_MOST_SHOWN = 10
_DEFAULT_CONTAINER = "kubectl.kubernetes.io/default-container"


class SelectionError(Exception):
    """Nothing or too much fits; the text says what there is."""


def choose_pod(pods: Sequence[Pod], text: str, states: Mapping[str, str] | None = None) -> Pod:
    """Find the pod that `text` names; `states` are the workers' by uid.

    Raises ChoiceError with the candidates.
    """
    found = _matching(pods, text)
    if not found:
        if not pods:
            raise SelectionError(f"there is no pod {text!r}: this node has no pods at all")
        raise SelectionError(_listing(f"there is no pod {text!r}; there are:", pods))
    # A pod that is being replaced has its successor's name until it is gone.
    if len({pod.full_name for pod in found}) == 1 and len(found) > 1:
        staying = [pod for pod in found if (states or {}).get(pod.uid, "syncing") == "syncing"]
        found = staying[-1:] or found[-1:]
    if len(found) > 1:
        raise SelectionError(_listing(f"{text!r} may be any of these, say which:", found))
    return found[0]


def choose_container(pod: Pod, name: str | None) -> tuple[Container, bool]:
    """Find a container of a pod, and say whether it was chosen among several that were not named.

    Without a name it is the one that the pod's author made the default, or the first.
    Raises ChoiceError with the containers that there are.
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
    """A pod's containers of every kind, ordinary ones first."""
    return [*pod.spec.containers, *pod.spec.init_containers, *pod.spec.ephemeral_containers]


def written_name(pod: Pod) -> str:
    """The pod's name as its author wrote it: static pods got the node's name behind it."""
    suffix = f"-{pod.spec.node_name.lower()}"
    if is_static_pod(pod) and pod.spec.node_name:
        return pod.metadata.name.removesuffix(suffix)
    return pod.metadata.name


def _matching(pods: Iterable[Pod], text: str) -> list[Pod]:
    """Give what fits best: a full name beats a written one, and both beat a uid."""
    namespace, slash, name = text.rpartition("/")
    inside = [pod for pod in pods if not slash or pod.metadata.namespace == namespace]
    ways = (
        [pod for pod in inside if pod.metadata.name == name],
        [pod for pod in inside if written_name(pod) == name],
        [pod for pod in inside if len(name) >= SHORTEST_UID and pod.uid.startswith(name)],
    )
    return next((found for found in ways if found), [])


def _listing(heading: str, pods: Sequence[Pod]) -> str:
    shown = [f"  {pod.full_name} (uid {pod.uid})" for pod in pods[:_MOST_SHOWN]]
    rest = len(pods) - len(shown)
    return "\n".join([heading, *shown, *([f"  and {rest} more"] if rest else [])])
