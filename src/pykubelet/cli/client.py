"""The command line's way to a running node: plain HTTP over the agent's control socket.

A question costs a few milliseconds and none of the agent's libraries, so that `ps` is instant.
Everything that can go wrong is a NodeError with one line that says what to do.
"""

from __future__ import annotations

import http.client
import socket
from pathlib import Path
from typing import TypeVar
from urllib.parse import quote, urlencode

from pykubelet.api.meta import from_json
from pykubelet.embedded.instance import Instance
from pykubelet.embedded.lock import holder
from pykubelet.server.manifest_words import Manifest
from pykubelet.server.pods import SOCKET_NAME, NodePods, PodJournal, Refusal, Restarted

T = TypeVar("T")

PATIENCE = 10.0
"""How long an agent may take to answer, in seconds."""


class NodeError(Exception):
    """The node could not be asked, or refused; the text is one line with the cause and a remedy."""


class NodeDown(NodeError):
    """No agent runs on the data directory."""


class NotThere(NodeError):
    """The node has no such pod or container (any more)."""


class NotTaken(NodeError):
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
        return NodeDown(f"no node runs on {where}: start it with `pykubelet up{option}`")


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=PATIENCE)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(PATIENCE)
        self.sock.connect(str(self._path))


_REFUSALS: dict[int, type[NodeError]] = {404: NotThere, 409: NotTaken, 422: NotTaken}


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
