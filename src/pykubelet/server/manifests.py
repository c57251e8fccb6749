"""`/manifests/`, which manages static pod manifests over HTTP, and the routes of the control socket.

| request | response |
|---|---|
| `GET /manifests/` | `Manifests`: the files of the static pod directory and their contents |
| `GET /manifests/{name}` | the file's bytes; 403 for a symbolic link or a file that contains a Secret |
| `PUT /manifests/{name}` | `Manifest` as written; `?replace=true` is `pykubelet run --replace` |
| `DELETE /manifests/{name}` | `Manifest` as deleted |

A manifest is accepted as a whole or rejected: it is validated as the static pod source validates it, and
replaced atomically. Permission to write manifests equals root on the node (a pod can mount any path), so
anonymous clients are always rejected, whatever the configured authorization allows them.

The control socket, which only root can open, serves `/manifests/` and, for the command line:

| request | response |
|---|---|
| `GET /pods` | `NodePods`: every pod with its status and its pod worker state |
| `GET /pods/{uid}` | the same for one pod |
| `GET /stats/summary`, `/metrics/cadvisor`, `/metrics/resource` | statistics, as on the API |
| `GET /pressure` | `PressureReport`: eviction signals, thresholds and first victims |
| `POST /config/reload` | `ReloadReport`: fields that changed or require a restart, or the problems |
| `GET /pods/{uid}/journal` | `PodJournal`: events and timeline |
| `POST /pods/{uid}/restart?container=…` | `Restarted`: the containers that will restart in place |
| `POST /pods/{uid}/ephemeralcontainers` | 201 for a container as in the API; 422 if the pod cannot have it |

Responses are JSON; a missing pod or container is a 404 with an `ErrorResponse`. The structs below are shared
by the servers and the command line.
"""

from __future__ import annotations

import asyncio
import errno
import math
import re
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from aiohttp import web

from pykubelet.api.meta import from_json, to_json
from pykubelet.api.pod import Container, Pod
from pykubelet.config.errors import ConfigError
from pykubelet.config.live import ReloadReport
from pykubelet.eviction.report import PressureReport
from pykubelet.logs import get_logger
from pykubelet.podconfig.ephemeral_containers import EphemeralContainerRejected
from pykubelet.podconfig.local_objects import title
from pykubelet.podconfig.manifests import MAX_BYTES, Contents, read_bytes, read_manifest
from pykubelet.podconfig.static_pods import (
    ManifestConflict,
    install_manifest,
    mode_for,
    names_of,
    plan_installation,
    read_manifest_dir,
    static_contents,
)
from pykubelet.podconfig.validate import DEFAULT_OPTIONS, PodValidationOptions
from pykubelet.podworkers.engine import PodEngine
from pykubelet.server.auth.identity import ANONYMOUS, USER
from pykubelet.server.manifest_schema import Manifest, ManifestErrorResponse, ManifestPod, Manifests
from pykubelet.server.pods import ErrorResponse, NodePods, PodJournal, Restarted
from pykubelet.util.tasks import finish_in_thread

log = get_logger(__name__)


MAX_NAME_BYTES = 200
_BAD_NAME = re.compile(r"\.|.*[/\x00-\x1f\x7f]", re.DOTALL)
_BODY_TIMEOUT_SECONDS = 60.0
RELOAD_TIMEOUT_SECONDS = 65.0
"""Seconds for a reload of the configuration, with the wait for one in progress."""
PRESSURE_TIMEOUT_SECONDS = 9.0
"""Seconds for a report on the eviction signals; the command line waits ten."""


class _ManifestError(Exception):
    """Raised to end a manifest request with an HTTP status and a `ManifestErrorResponse`."""

    def __init__(self, status: int, message: str, problems: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.status = status
        self.response = ManifestErrorResponse(message=message, problems=list(problems))


class ManifestDirectory:
    """Static pod directory of a node; `served` and `options` as in `static_contents`, `clock` in ns."""

    def __init__(
        self,
        directory: Path,
        node_name: str,
        *,
        served: frozenset[str] = frozenset(),
        options: PodValidationOptions = DEFAULT_OPTIONS,
        clock: Callable[[], int],
    ) -> None:
        self._directory = directory
        self._node_name = node_name
        self._served = served
        self._options = options
        self._clock = clock
        self._write_lock = asyncio.Lock()

    def routes(self, *, max_bytes: int = MAX_BYTES) -> list[web.RouteDef]:
        """Return the routes of `/manifests/`, which accept manifests of at most `max_bytes`."""

        async def listing(_: web.Request) -> web.Response:
            return _manifest_response(await asyncio.to_thread(self._list))

        async def get(request: web.Request) -> web.Response:
            data = await asyncio.to_thread(self._read, self._path(request))
            return web.Response(body=data, content_type="application/yaml")

        async def put(request: web.Request) -> web.Response:
            path = self._path(request)
            replace = request.query.get("replace", "") in ("true", "1")
            data = await _body(request, max_bytes)
            async with self._write_lock:
                manifest, is_new = await finish_in_thread(lambda: self._write(path, data, replace=replace))
            pods = [pod.uid for pod in manifest.pods]
            log.info("Wrote static pod manifest", path=path, pods=pods, objects=manifest.objects)
            return _manifest_response(manifest, 201 if is_new else 200)

        async def delete(request: web.Request) -> web.Response:
            path = self._path(request)
            async with self._write_lock:
                removed = await finish_in_thread(lambda: self._remove(path))
            log.info("Removed static pod manifest", path=path)
            return _manifest_response(removed)

        return [
            web.get("/manifests/", _with_error_response(listing)),
            web.get("/manifests/{name}", _with_error_response(get), allow_head=False),
            web.put("/manifests/{name}", _with_error_response(put)),
            web.delete("/manifests/{name}", _with_error_response(delete)),
        ]

    def _path(self, request: web.Request) -> Path:
        name = request.match_info["name"]
        if _BAD_NAME.match(name) or len(name.encode("utf-8", "surrogateescape")) > MAX_NAME_BYTES:
            raise _ManifestError(
                400, "the name of a manifest is a file's: no slashes, not hidden, and not too long"
            )
        return self._directory / name

    def _list(self) -> Manifests:
        try:
            files = sorted(path for path in self._directory.iterdir() if not path.name.startswith("."))
        except OSError as err:
            raise _io_error(self._directory, err) from err
        return Manifests(items=[self._describe(path) for path in files if path.is_file()])

    def _describe(self, path: Path) -> Manifest:
        try:
            return _to_manifest(path, self._parse(path, read_bytes(path)))
        except ConfigError as err:
            return Manifest(path=str(path), problems=[problem.message for problem in err.problems])
        except OSError as err:
            return Manifest(path=str(path), problems=[f"cannot be read: {err.strerror}"])

    def _parse(self, path: Path, data: bytes) -> Contents:
        return static_contents(
            data,
            source="file",
            origin=str(path),
            node_name=self._node_name,
            now=self._clock(),
            served=self._served,
            options=self._options,
        )

    def _read(self, path: Path) -> bytes:
        if path.is_symlink():
            raise _ManifestError(403, f"{path} is a link: what it leads to is not shown")
        try:
            data = read_bytes(path)
        except FileNotFoundError:
            raise _not_found(path) from None
        except ConfigError as err:
            raise _ManifestError(409, str(err)) from err
        except OSError as err:
            raise _io_error(path, err) from err
        if _may_contain_secret(data, path):
            raise _ManifestError(
                403, f"{path} holds a secret: it is not shown, but can be replaced or deleted"
            )
        return data

    def _write(self, path: Path, data: bytes, *, replace: bool) -> tuple[Manifest, bool]:
        try:
            contents = self._parse(path, data)
            written = read_manifest(
                data, str(path), objects=bool(contents.objects), workloads=bool(contents.workloads)
            )
        except ConfigError as err:
            problems = [problem.message for problem in err.problems]
            raise _ManifestError(422, "; ".join(problems), problems) from err
        if contents.is_empty:
            raise _ManifestError(422, "holds no pod", ["holds no pod"])
        try:
            is_new = not path.exists()
            plan = plan_installation(
                path, names_of(written), read_manifest_dir(self._directory), replace=replace
            )
            install_manifest(plan, data, mode_for(written))
        except ManifestConflict as err:
            raise _ManifestError(409, str(err)) from err
        except OSError as err:
            raise _io_error(path, err) from err
        return _to_manifest(path, contents), is_new

    def _remove(self, path: Path) -> Manifest:
        if not path.is_symlink() and not path.is_file():
            raise _not_found(path)
        manifest = self._describe(path)
        try:
            path.unlink()
        except FileNotFoundError:
            raise _not_found(path) from None
        except OSError as err:
            raise _io_error(path, err) from err
        return manifest


def _with_error_response(handler: Callable[[web.Request], Any]) -> Callable[[web.Request], Any]:
    async def respond(request: web.Request) -> web.StreamResponse:
        user = request.get(USER)
        try:
            if user is not None and user.name == ANONYMOUS:
                raise _ManifestError(403, "manifests are for clients that say who they are")
            response: web.StreamResponse = await handler(request)
        except _ManifestError as err:
            return _manifest_response(err.response, err.status)
        return response

    return respond


async def _body(request: web.Request, max_bytes: int) -> bytes:
    too_large = _ManifestError(413, f"a manifest has at most {max_bytes} bytes")
    if (request.content_length or 0) > max_bytes:
        raise too_large
    data = bytearray()
    try:
        async with asyncio.timeout(_BODY_TIMEOUT_SECONDS):
            async for chunk in request.content.iter_any():
                data += chunk
                if len(data) > max_bytes:
                    raise too_large
    except TimeoutError:
        raise _ManifestError(408, f"the manifest did not come within {_BODY_TIMEOUT_SECONDS:g} s") from None
    return bytes(data)


def _to_manifest(path: Path, contents: Contents) -> Manifest:
    pods = [
        ManifestPod(namespace=p.metadata.namespace, name=p.metadata.name, uid=p.uid) for p in contents.pods
    ]
    return Manifest(
        path=str(path),
        pods=pods,
        objects=[
            *map(title, contents.objects),
            *(workload.title for workload in contents.workloads),
        ],
        warnings=[str(warning) for warning in contents.warnings],
    )


def _may_contain_secret(data: bytes, path: Path) -> bool:
    try:
        return read_manifest(data, str(path), objects=False, workloads=True).has_secret
    except ConfigError:
        return b"Secret" in data


def _not_found(path: Path) -> _ManifestError:
    return _ManifestError(404, f"there is no manifest {path}")


def _io_error(path: Path, err: OSError) -> _ManifestError:
    status = 507 if err.errno in (errno.ENOSPC, errno.EDQUOT) else 500
    return _ManifestError(status, f"{path} cannot be used: {err.strerror}")


def _manifest_response(document: Any, status: int = 200) -> web.Response:
    return web.Response(body=to_json(document), status=status, content_type="application/json")


def pressure_routes(report: Callable[[], Awaitable[PressureReport]]) -> list[web.RouteDef]:
    """Return the route of `pykubelet pressure` on the control socket.

    One report is built at a time. Clients that wait share the next one: many do not exceed the timeout.
    """
    lock = asyncio.Lock()
    started, latest = -math.inf, PressureReport()

    async def respond(_: web.Request) -> web.Response:
        nonlocal started, latest
        clock = asyncio.get_running_loop().time
        requested = clock()
        try:
            async with asyncio.timeout(PRESSURE_TIMEOUT_SECONDS), lock:
                if started < requested:
                    began = clock()
                    latest = await report()
                    started = began
                return _control_response(latest)
        except TimeoutError:
            message = "the eviction signals cannot be measured in time: the node is very busy; see its log"
            return _control_response(ErrorResponse(message=message), 503)

    return [web.get("/pressure", respond)]


def reload_routes(reload: Callable[[str], Awaitable[ReloadReport]]) -> list[web.RouteDef]:
    """Return the route of `pykubelet config reload` on the control socket."""

    async def respond(_: web.Request) -> web.Response:
        try:
            async with asyncio.timeout(RELOAD_TIMEOUT_SECONDS):
                return _control_response(await reload("control socket"))
        except TimeoutError:
            message = "the configuration cannot be reloaded in time: see the node's log"
            return _control_response(ErrorResponse(message=message), 503)

    return [web.post("/config/reload", respond)]


def control_routes(engine: PodEngine) -> list[web.RouteDef]:
    """Return the routes of the control socket for the command line."""

    def matching_pods(request: web.Request) -> list[Pod]:
        uid = request.match_info["uid"]
        return [pod for pod in engine.pods() if pod.uid == uid]

    def respond(pods: list[Pod]) -> web.Response:
        return _control_response(NodePods(pods=pods, states={pod.uid: engine.state(pod.uid) for pod in pods}))

    async def list_pods(_: web.Request) -> web.Response:
        return respond(engine.pods())

    async def get_pod(request: web.Request) -> web.Response:
        pods = matching_pods(request)
        return respond(pods) if pods else _no_such_pod(request)

    async def journal(request: web.Request) -> web.Response:
        if not matching_pods(request):
            return _no_such_pod(request)
        events, timeline = engine.journal(request.match_info["uid"])
        return _control_response(PodJournal(events=events, timeline=timeline))

    async def restart(request: web.Request) -> web.Response:
        pods = matching_pods(request)
        if not pods:
            return _no_such_pod(request)
        container = request.query.get("container") or None
        try:
            names = engine.restart(pods[0].uid, container)
        except LookupError as err:
            return _control_response(
                ErrorResponse(message=str(err.args[0]) if err.args else "no such container"), 404
            )
        log.info("Restart requested", pod=pods[0].full_name, podUID=pods[0].uid, containers=names)
        return _control_response(Restarted(containers=names))

    async def add_ephemeral_container(request: web.Request) -> web.Response:
        pods = matching_pods(request)
        if not pods:
            return _no_such_pod(request)
        try:
            container = from_json(Container, await request.read())
            engine.add_ephemeral_container(pods[0].uid, container)
        except ValueError as err:
            return _control_response(ErrorResponse(message=f"the container cannot be read: {err}"), 400)
        except EphemeralContainerRejected as err:
            return _control_response(ErrorResponse(message=str(err)), 422)
        except LookupError:
            return _no_such_pod(request)
        log.info(
            "Added ephemeral container",
            pod=pods[0].full_name,
            podUID=pods[0].uid,
            containerName=container.name,
            image=container.image,
        )
        return _control_response(container, 201)

    return [
        web.post("/pods/{uid}/ephemeralcontainers", add_ephemeral_container),
        web.get("/pods", list_pods),
        web.get("/pods/{uid}", get_pod),
        web.get("/pods/{uid}/journal", journal),
        web.post("/pods/{uid}/restart", restart),
    ]


def _no_such_pod(request: web.Request) -> web.Response:
    return _control_response(
        ErrorResponse(message=f"there is no pod with uid {request.match_info['uid']}"), 404
    )


def _control_response(document: Any, status: int = 200) -> web.Response:
    return web.Response(body=to_json(document), status=status, content_type="application/json")
