"""`/debug/`: what the agent is doing, for those who look for the reason why.

| path | answer |
|---|---|
| `/debug/pprof/` | what there is |
| `/debug/pprof/profile?seconds=N` | where the agent's time went during these seconds, by function |
| `/debug/pprof/goroutine`, `/debug/tasks` | every task of the event loop and where it waits |
| `/debug/pprof/cmdline` | the command line |
| `/debug/pods/{namespace}/{pod}` | a pod's events and the timeline of decisions about it |
| `PUT /debug/flags/v` | sets the verbosity of the log |
"""

from __future__ import annotations

import asyncio
import io
import re
from pathlib import Path

from aiohttp import web

from pykubelet.api.meta import to_json
from pykubelet.logs import get_logger
from pykubelet.logs.setup import set_verbosity
from pykubelet.server.pipeline import plain_text
from pykubelet.server.pods import PodJournal, PodsView
from pykubelet.server.refused import Refused

log = get_logger(__name__)

_LONGEST_PROFILE_SECONDS = 300
_NUMBER = re.compile(r"[0-9]{1,9}", re.ASCII)
_INDEX = "/debug/pprof/\n\nProfiles:\n  profile?seconds=30\n  goroutine\n  cmdline\n"


def profiling_routes() -> list[web.RouteDef]:
    """Routes that tell where the agent's time goes."""
    one_at_a_time = asyncio.Lock()

    async def index(_: web.Request) -> web.Response:
        return plain_text(200, _INDEX)

    async def profile(request: web.Request) -> web.Response:
        text = request.query.get("seconds", "30")
        if _NUMBER.fullmatch(text) is None or not 0 < int(text) <= _LONGEST_PROFILE_SECONDS:
            raise Refused(400, f"seconds must be a number from 1 to {_LONGEST_PROFILE_SECONDS}\n")
        if one_at_a_time.locked():
            raise Refused(429, "a profile is being made\n", {"Retry-After": "30"})
        async with one_at_a_time:
            return plain_text(200, await _profile(int(text)))

    async def tasks(_: web.Request) -> web.Response:
        return plain_text(200, _tasks())

    async def command_line(_: web.Request) -> web.Response:
        return plain_text(200, Path("/proc/self/cmdline").read_bytes().decode(errors="replace"))

    return [
        web.get("/debug/pprof/", index),
        web.get("/debug/pprof/profile", profile),
        web.get("/debug/pprof/goroutine", tasks),
        web.get("/debug/pprof/cmdline", command_line),
        web.get("/debug/tasks", tasks),
    ]


def timeline_routes(view: PodsView) -> list[web.RouteDef]:
    """Routes that tell what happened to a pod."""

    async def timeline(request: web.Request) -> web.Response:
        meta = (request.match_info["namespace"], request.match_info["pod"])
        found = [pod for pod in view.pods() if (pod.metadata.namespace, pod.metadata.name) == meta]
        if not found:
            raise Refused(404, "pod does not exist")
        events, notes = view.journal(found[0].uid)
        return web.Response(
            body=to_json(PodJournal(events=events, timeline=notes)), content_type="application/json"
        )

    return [web.get("/debug/pods/{namespace}/{pod}", timeline)]


def verbosity_routes() -> list[web.RouteDef]:
    """Route that sets the verbosity of the log."""

    async def verbosity(request: web.Request) -> web.Response:
        if request.method != "PUT":
            return plain_text(406, "unsupported http method\n")
        text = (await request.text()).strip()
        if _NUMBER.fullmatch(text) is None:
            return plain_text(
                400, f'failed set klog.logging.verbosity {text[:20]}: "{text[:20]}" is no number\n'
            )
        set_verbosity(int(text))
        log.info("The verbosity of the log was set", verbosity=int(text))
        return plain_text(200, f"successfully set klog.logging.verbosity to {text}\n")

    return [web.route("*", "/debug/flags/v", verbosity)]


async def _profile(seconds: int) -> str:
    # Imported here: hardly anybody ever asks.
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
        where = [f"    {frame.f_code.co_qualname}, line {frame.f_lineno}" for frame in stack]
        lines += [task.get_name(), *where]
    return "\n".join([f"{len(asyncio.all_tasks())} tasks", *lines, ""])
