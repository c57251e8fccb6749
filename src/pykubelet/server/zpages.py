"""`/flagz` and `/statusz`: the flags in force, and what runs here since when.

As text for people; as JSON for those who ask for that kind by name
(`Accept: application/json;v=v1beta1;g=config.k8s.io;as=Flagz`).
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from email.message import Message
from typing import Any

from aiohttp import hdrs, web

from pykubelet import KUBERNETES_VERSION
from pykubelet.api.meta import to_json

_GROUP = "config.k8s.io"
_WARNING = (
    "\nkubelet {}\nWarning: This endpoint is not meant to be machine parseable, has no formatting "
    "compatibility guarantees and is for debugging purposes only.\n"
)


def flagz_routes(flags: Callable[[], Mapping[str, str]]) -> list[web.RouteDef]:
    """Route for the flags, by their names."""

    async def answer(request: web.Request) -> web.Response:
        found = dict(sorted(flags().items()))
        text = "".join(f"{name}={value}\n" for name, value in found.items())
        return _negotiated(request, "Flagz", text, {"flags": found})

    return [web.get("/flagz", answer)]


def statusz_routes(paths: Iterable[str], started: datetime) -> list[web.RouteDef]:
    """Route for the state of the agent; `paths` are those that it lists."""
    listed = sorted(set(paths))

    async def answer(request: web.Request) -> web.Response:
        seconds = max(0, int(time.time() - started.timestamp()))
        moment = started.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        runs_on = f"Python {platform.python_version()}"
        version = KUBERNETES_VERSION.removeprefix("v")
        text = (
            f"\nStarted: {moment}\nUp: {_uptime(seconds)}\nGo version: {runs_on}\n"
            f"Binary version: {version}\n\nPaths: {' '.join(listed)}\n"
        )
        document = {
            "startTime": moment,
            "uptimeSeconds": seconds,
            "goVersion": runs_on,
            "binaryVersion": version,
            "paths": listed,
        }
        return _negotiated(request, "Statusz", text, document)

    return [web.get("/statusz", answer)]


def _negotiated(request: web.Request, kind: str, text: str, document: dict[str, Any]) -> web.Response:
    accepted = request.headers.get(hdrs.ACCEPT, "").strip()
    for wish in accepted.split(",") if accepted else ["text/plain"]:
        if not wish.isascii():
            # No media type, and more than the reader below expects.
            continue
        asked = Message()
        asked["Content-Type"] = wish.strip()
        media = asked.get_content_type()
        if media == "text/plain" or wish.strip().startswith("*/*"):
            return web.Response(text=_WARNING.format(kind.lower()) + text)
        version = asked.get_param("v")
        is_ours = asked.get_param("g") == _GROUP and asked.get_param("as") == kind
        if media == "application/json" and is_ours and version in ("v1alpha1", "v1beta1"):
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
