"""Debugging endpoints: `/debug/`, `/flagz`, `/statusz`, and the document of `/configz`.

| path | response |
|---|---|
| `/debug/pprof/` | list of profiles |
| `/debug/pprof/profile?seconds=N` | CPU profile of these seconds (cProfile), by function; one at a time |
| `/debug/pprof/goroutine`, `/debug/tasks` | every asyncio task and its stack |
| `/debug/pprof/block` | time that tasks have waited, by stack; empty without `enableContentionProfiling` |
| `/debug/pprof/cmdline` | command line |
| `/debug/pods/{namespace}/{pod}` | a pod's events and timeline of sync decisions |
| `PUT /debug/flags/v` | sets the log verbosity |
| `/flagz`, `/statusz` | flags in force; start time, uptime, versions and paths |
| `/configz` | configuration in force, as JSON |

`/flagz` and `/statusz` return text, and JSON if the client requests that type
(`Accept: application/json;v=v1beta1;g=config.k8s.io;as=Flagz`).

The `/configz` document is built from the configuration in effect, which a reload may change; values of
`staticPodURLHeader` are masked, because they may contain credentials.
"""

from __future__ import annotations

import asyncio
import io
import platform
import re
import time
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from email.message import Message
from pathlib import Path
from typing import Any

from aiohttp import hdrs, web

from pykubelet import KUBERNETES_VERSION
from pykubelet.api.meta import to_json
from pykubelet.config.codec import to_document
from pykubelet.config.types import KubeletConfiguration
from pykubelet.logs import get_logger
from pykubelet.logs.mask import MASK
from pykubelet.logs.setup import set_verbosity
from pykubelet.podworkers.engine import PodEngine
from pykubelet.server.auth.identity import HttpError
from pykubelet.server.contention import ContentionProfile
from pykubelet.server.pipeline import plain_text
from pykubelet.server.pods import PodJournal

log = get_logger(__name__)
_LONGEST_PROFILE_SECONDS = 300
_NUMBER = re.compile(r"[0-9]{1,9}", re.ASCII)
_INDEX = "/debug/pprof/\n\nProfiles:\n  profile?seconds=30\n  goroutine\n  block\n  cmdline\n"


def profiling_routes(contention: ContentionProfile) -> list[web.RouteDef]:
    """Return the routes of `/debug/pprof/` and `/debug/tasks`."""
    profile_lock = asyncio.Lock()

    async def index(_: web.Request) -> web.Response:
        return plain_text(200, _INDEX)

    async def profile(request: web.Request) -> web.Response:
        text = request.query.get("seconds", "30")
        if _NUMBER.fullmatch(text) is None or not 0 < int(text) <= _LONGEST_PROFILE_SECONDS:
            raise HttpError(400, f"seconds must be a number from 1 to {_LONGEST_PROFILE_SECONDS}\n")
        if profile_lock.locked():
            raise HttpError(429, "a profile is being made\n", {"Retry-After": "30"})
        async with profile_lock:
            return plain_text(200, await _profile(int(text)))

    async def tasks(_: web.Request) -> web.Response:
        return plain_text(200, _tasks())

    async def block(_: web.Request) -> web.Response:
        return plain_text(200, contention.text())

    async def command_line(_: web.Request) -> web.Response:
        return plain_text(200, Path("/proc/self/cmdline").read_bytes().decode(errors="replace"))

    return [
        web.get("/debug/pprof/", index),
        web.get("/debug/pprof/profile", profile),
        web.get("/debug/pprof/goroutine", tasks),
        web.get("/debug/pprof/block", block),
        web.get("/debug/pprof/cmdline", command_line),
        web.get("/debug/tasks", tasks),
    ]


def timeline_routes(engine: PodEngine) -> list[web.RouteDef]:
    """Return the route of a pod's events and timeline."""

    async def timeline(request: web.Request) -> web.Response:
        meta = (request.match_info["namespace"], request.match_info["pod"])
        found = [pod for pod in engine.pods() if (pod.metadata.namespace, pod.metadata.name) == meta]
        if not found:
            raise HttpError(404, "pod does not exist")
        events, entries = engine.journal(found[0].uid)
        return web.Response(
            body=to_json(PodJournal(events=events, timeline=entries)), content_type="application/json"
        )

    return [web.get("/debug/pods/{namespace}/{pod}", timeline)]


def verbosity_routes() -> list[web.RouteDef]:
    """Return the route that sets the log verbosity."""

    async def verbosity(request: web.Request) -> web.Response:
        if request.method != "PUT":
            return plain_text(406, "unsupported http method\n")
        text = (await request.text()).strip()
        if _NUMBER.fullmatch(text) is None:
            return plain_text(
                400, f'failed set klog.logging.verbosity {text[:20]}: "{text[:20]}" is no number\n'
            )
        set_verbosity(int(text))
        log.info("Set log verbosity", verbosity=int(text))
        return plain_text(200, f"successfully set klog.logging.verbosity to {text}\n")

    return [web.route("*", "/debug/flags/v", verbosity)]


async def _profile(seconds: int) -> str:
    # Imported lazily to save memory: profiles are rarely requested.
    import cProfile
    import pstats

    profiler = cProfile.Profile()
    profiler.enable()
    try:
        await asyncio.sleep(seconds)
    finally:
        profiler.disable()
    text = io.StringIO()
    pstats.Stats(profiler, stream=text).sort_stats("tottime").print_stats(100)
    return text.getvalue()


def _tasks() -> str:
    lines = []
    for task in sorted(asyncio.all_tasks(), key=lambda task: task.get_name()):
        stack = task.get_stack(limit=8)
        frames = [f"    {frame.f_code.co_qualname}, line {frame.f_lineno}" for frame in stack]
        lines += [task.get_name(), *frames]
    return "\n".join([f"{len(asyncio.all_tasks())} tasks", *lines, ""])


_GROUP = "config.k8s.io"
_WARNING = (
    "\nkubelet {}\nWarning: This endpoint is not meant to be machine parseable, has no formatting "
    "compatibility guarantees and is for debugging purposes only.\n"
)


def flagz_routes(flags: Callable[[], Mapping[str, str]]) -> list[web.RouteDef]:
    """Return the route of `/flagz`, with the flags sorted by name."""

    async def respond(request: web.Request) -> web.Response:
        found = dict(sorted(flags().items()))
        text = "".join(f"{name}={value}\n" for name, value in found.items())
        return _negotiated_response(request, "Flagz", text, {"flags": found})

    return [web.get("/flagz", respond)]


def statusz_routes(paths: Iterable[str], started: datetime) -> list[web.RouteDef]:
    """Return the route of `/statusz`; `paths` are the paths that it lists."""
    listed = sorted(set(paths))

    async def respond(request: web.Request) -> web.Response:
        seconds = max(0, int(time.time() - started.timestamp()))
        start_time = started.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        python_version = f"Python {platform.python_version()}"
        version = KUBERNETES_VERSION.removeprefix("v")
        text = (
            f"\nStarted: {start_time}\nUp: {_uptime(seconds)}\nGo version: {python_version}\n"
            f"Binary version: {version}\n\nPaths: {' '.join(listed)}\n"
        )
        document = {
            "startTime": start_time,
            "uptimeSeconds": seconds,
            "goVersion": python_version,
            "binaryVersion": version,
            "paths": listed,
        }
        return _negotiated_response(request, "Statusz", text, document)

    return [web.get("/statusz", respond)]


def _negotiated_response(
    request: web.Request, kind: str, text: str, document: dict[str, Any]
) -> web.Response:
    accepted = request.headers.get(hdrs.ACCEPT, "").strip()
    for media_range in accepted.split(",") if accepted else ["text/plain"]:
        if not media_range.isascii():
            # Not a valid media type, and the email parser below does not accept it.
            continue
        header = Message()
        header["Content-Type"] = media_range.strip()
        media = header.get_content_type()
        if media == "text/plain" or media_range.strip().startswith("*/*"):
            return web.Response(text=_WARNING.format(kind.lower()) + text)
        version = header.get_param("v")
        matches = header.get_param("g") == _GROUP and header.get_param("as") == kind
        if media == "application/json" and matches and version in ("v1alpha1", "v1beta1"):
            body = {"kind": kind, "apiVersion": f"{_GROUP}/{version}", "metadata": {"name": "kubelet"}}
            return web.Response(body=to_json(body | document), content_type="application/json")
    return web.Response(
        status=406,
        text="only the following media types are accepted: text/plain, "
        f"application/json;v=v1beta1;g={_GROUP};as={kind}\n",
    )


def _uptime(seconds: int) -> str:
    minutes, seconds = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} hr {minutes:02d} min {seconds:02d} sec"


def configz_document(config: KubeletConfiguration) -> dict[str, Any]:
    """Return the document of `/configz`."""
    document = to_document(config)
    headers = document.get("staticPodURLHeader") or {}
    document["staticPodURLHeader"] = {name: [MASK for _ in values] for name, values in headers.items()}
    return {"kubeletconfig": document}
