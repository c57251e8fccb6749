"""`/healthz` on its own port: is the agent alive?

Load balancers, systemd units and people ask; the answer must cost nothing and must not depend
on the runtime or the API server being quick. Each check is a function that returns nothing when
all is well, or the reason when not. Reasons are shown to the log only, as the reference does: the
port needs no authentication, so the page says just which check failed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from aiohttp import web

from pykubelet.logs import get_logger

log = get_logger(__name__)

Check = Callable[[], str | None]
"""Gives the reason why something is unhealthy, or None."""


def health_routes(checks: Mapping[str, Check]) -> list[web.RouteDef]:
    """Routes for `/healthz` and one below it for each check."""

    async def overall(request: web.Request) -> web.Response:
        excluded = set(request.query.getall("exclude", []))
        return _answer(checks, excluded, verbose="verbose" in request.query)

    async def single(request: web.Request) -> web.Response:
        name = request.match_info["name"]
        check = checks.get(name)
        if check is None:
            return web.Response(status=404, text=f"no check {name!a}; there are: {', '.join(checks)}\n")
        reason = check()
        if reason is None:
            return web.Response(text="ok")
        log.warning("Health check failed", check=name, reason=reason)
        return web.Response(status=500, text=f"internal server error: {reason}\n")

    return [web.get("/healthz", overall), web.get("/healthz/{name}", single)]


def _answer(checks: Mapping[str, Check], excluded: set[str], *, verbose: bool) -> web.Response:
    lines, failed = [], []
    for name, check in checks.items():
        if name in excluded:
            lines.append(f"[+]{name} excluded: ok")
            continue
        reason = check()
        if reason is None:
            lines.append(f"[+]{name} ok")
        else:
            lines.append(f"[-]{name} failed: reason withheld")
            failed.append(f"{name}: {reason}")
    unknown = sorted(excluded - set(checks))
    if unknown:
        lines.append(f"warn: some health checks cannot be excluded: no matches for {', '.join(unknown)}")
    if failed:
        log.warning("Health check failed", reasons=failed)
        return web.Response(status=500, text="\n".join([*lines, "healthz check failed", ""]))
    if verbose:
        return web.Response(text="\n".join([*lines, "healthz check passed", ""]))
    return web.Response(text="ok")
