"""Pods made and removed through the API server, with the moment at which a watcher hears of each step."""

from __future__ import annotations

import contextlib
import http.client
import json
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from bench.floor import COMMAND
from bench.plane import NODE
from pykubelet.devcluster.cluster import DevCluster

LIMIT_SECONDS = 300.0
_COLLECTION = "/api/v1/namespaces/default/pods"
_AT_ONCE = 8
"""How many creators there are."""

_Request = tuple[str, str, dict[str, Any] | None]


class WatchedPods:
    """The pods of one measurement: when each was running, and when it was gone, on `time.monotonic`."""

    def __init__(self, cluster: DevCluster) -> None:
        self._cluster = cluster
        self.running: dict[str, float] = {}
        self.ready: dict[str, float] = {}
        self.gone: dict[str, float] = {}
        self._news = threading.Condition()
        self._ended = False

    def create(self, image: str, names: list[str], **container: Any) -> float:
        """Create pods all at once, with further fields of their container; gives when that began."""
        return self._ask([("POST", _COLLECTION, _pod(image, name, container)) for name in names])

    def delete(self, names: list[str]) -> float:
        """Delete pods all at once; gives when that began."""
        return self._ask([("DELETE", f"{_COLLECTION}/{name}", None) for name in names])

    def wait_running(self, names: list[str]) -> list[float]:
        """Wait until all run; gives when each did."""
        return self._wait(names, self.running, "run")

    def wait_ready(self, names: list[str]) -> list[float]:
        """Wait until all are Ready; gives when each was."""
        return self._wait(names, self.ready, "are Ready")

    def wait_gone(self, names: list[str]) -> list[float]:
        """Wait until all are gone; gives when each was."""
        return self._wait(names, self.gone, "are gone")

    def _wait(self, names: list[str], seen: dict[str, float], what: str) -> list[float]:
        with self._news:
            if not self._news.wait_for(lambda: self._ended or seen.keys() >= set(names), LIMIT_SECONDS):
                raise RuntimeError(
                    f"only {len(seen)} of {len(names)} pods {what} after {LIMIT_SECONDS:.0f} s"
                )
        if self._ended:
            raise RuntimeError("the watch of the pods ended")
        return [seen[name] for name in names]

    def _ask(self, requests: list[_Request]) -> float:
        """Make requests side by side, each side on one connection as clients do; gives when that began."""
        sides = min(_AT_ONCE, len(requests))
        began = time.monotonic()
        with ThreadPoolExecutor(sides) as pool:
            list(pool.map(lambda side: _ask_in_turn(self._cluster, requests[side::sides]), range(sides)))
        return began

    def _heard(self, event: dict[str, Any]) -> None:
        name, now = event["object"]["metadata"]["name"], time.monotonic()
        with self._news:
            if event["type"] == "DELETED":
                self.gone.setdefault(name, now)
            elif event["object"]["status"].get("phase") == "Running":
                self.running.setdefault(name, now)
                conditions = event["object"]["status"].get("conditions", ())
                if any(one["type"] == "Ready" and one["status"] == "True" for one in conditions):
                    self.ready.setdefault(name, now)
            self._news.notify_all()

    def _end(self) -> None:
        with self._news:
            self._ended = True
            self._news.notify_all()


@contextlib.contextmanager
def watched_pods(cluster: DevCluster) -> Iterator[WatchedPods]:
    """Watch pods for the time of a block."""
    pods, connection = WatchedPods(cluster), _watch(cluster)
    answer = connection.getresponse()
    reader = threading.Thread(target=_read, args=(answer, pods._heard, pods._end), daemon=True)
    reader.start()
    try:
        yield pods
    finally:
        # Ends the reader's read, which closing alone would not.
        if connection.sock is not None:
            connection.sock.shutdown(2)
        reader.join(10)
        connection.close()


def _pod(image: str, name: str, container: dict[str, Any]) -> dict[str, Any]:
    main = {"name": "main", "image": image, "imagePullPolicy": "IfNotPresent", "command": COMMAND}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name},
        "spec": {
            "nodeName": NODE,
            "terminationGracePeriodSeconds": 2,
            "dnsPolicy": "Default",
            "containers": [main | container],
        },
    }


def _ask_in_turn(cluster: DevCluster, requests: list[_Request]) -> None:
    with contextlib.closing(_connection(cluster)) as connection:
        for method, path, document in requests:
            body = None if document is None else json.dumps(document).encode()
            connection.request(method, path, body, {"Content-Type": "application/json"} if body else {})
            answer = connection.getresponse()
            told = answer.read()
            if answer.status >= http.client.BAD_REQUEST:
                raise RuntimeError(f"{method} {path}: {answer.status}: {told.decode(errors='replace')}")


def _connection(cluster: DevCluster) -> http.client.HTTPSConnection:
    layout = cluster.layout
    context = ssl.create_default_context(cafile=str(layout.authority))
    context.load_cert_chain(layout.certificate("admin"), layout.key("admin"))
    return http.client.HTTPSConnection("127.0.0.1", cluster.settings.port, context=context, timeout=60)


def _watch(cluster: DevCluster) -> http.client.HTTPSConnection:
    version = cluster.api.request("GET", f"{_COLLECTION}?limit=1")["metadata"]["resourceVersion"]
    connection = _connection(cluster)
    connection.timeout = None
    connection.request("GET", f"{_COLLECTION}?watch=true&resourceVersion={version}&timeoutSeconds=1800")
    return connection


def _read(
    answer: http.client.HTTPResponse, hear: Callable[[dict[str, Any]], None], end: Callable[[], None]
) -> None:
    try:
        while line := answer.readline():
            hear(json.loads(line))
    except (OSError, http.client.HTTPException, ValueError):
        pass  # the measurement is over, or the wait says that it failed
    finally:
        end()
