"""`/pods` and `/spec/` of the read-only port (v1 PodList and hardware), and `/healthz`.

The read-only port has no authentication (standalone it listens on loopback only), so it has no endpoint with
side effects.

On a standalone node any local user can read it, and so could a web page in a browser on the node, through a
host name that resolves to 127.0.0.1 (DNS rebinding). There, requests with a foreign Host header get 403
(`own_hosts_only`), and pods are returned without the values of environment variables and of HTTP headers of
probes and hooks, and without the annotation in which kubectl repeats them (`without_values`); root reads them
from the control socket. In a cluster the port behaves as upstream: monitoring uses host names that only DNS
knows.

`/healthz` must be cheap and must not depend on the response time of the runtime or the API server. As
upstream, it reports only which checks failed and the reasons are logged; `/healthz/{name}` returns the reason
of that check. All checks run on the API server and the read-only port. The health port runs only
`ping`, as upstream: it shows that the process responds, and nothing else to clients without authentication.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from ipaddress import ip_address
from typing import Any

from aiohttp import hdrs, web
from aiohttp.typedefs import Middleware
from msgspec.structs import replace

from pykubelet.api.meta import to_json
from pykubelet.api.pod import Pod
from pykubelet.linux.hardware import Hardware
from pykubelet.logs import get_logger
from pykubelet.podworkers.engine import PodEngine
from pykubelet.server.metrics.server_metrics import HealthMetrics
from pykubelet.server.pipeline import plain_text
from pykubelet.server.pods import pod_list_json

log = get_logger(__name__)
_LAST_APPLIED = "kubectl.kubernetes.io/last-applied-configuration"


def read_only_routes(engine: PodEngine, *, omit_values: bool = False) -> list[web.RouteDef]:
    """Return the route of `/pods`; `omit_values` applies `without_values`."""

    async def pods(_: web.Request) -> web.Response:
        shown = engine.pods()
        if omit_values:
            shown = [without_values(pod) for pod in shown]
        return web.Response(body=pod_list_json(shown), content_type="application/json")

    return [web.get("/pods", pods)]


def spec_routes(machine_info: Callable[[], Awaitable[Hardware]]) -> list[web.RouteDef]:
    """Return the routes of `/spec`."""

    async def spec(_: web.Request) -> web.Response:
        return web.Response(body=to_json(await machine_info()), content_type="application/json")

    return [web.get("/spec/", spec), web.get("/spec", spec)]


def own_hosts_only(names: Iterable[str]) -> Middleware:
    """Reject requests whose Host is neither an IP address nor localhost nor one of these names."""
    own_names = {"localhost", *(name.lower().rstrip(".") for name in names)}

    @web.middleware
    async def middleware(request: web.Request, handler: Any) -> web.StreamResponse:
        host = request.headers.get(hdrs.HOST, "")
        if host and not _is_own_host(host, own_names):
            log.v(2).info("Rejected request for a foreign host", host=host[:253], path=request.path[:253])
            return plain_text(
                403,
                "Forbidden: this Host is not the node's: use an IP address, localhost or the node's name\n",
            )
        response: web.StreamResponse = await handler(request)
        return response

    return middleware


def without_values(pod: Pod) -> Pod:
    """Return the pod without potential secrets: values of env and of HTTP headers."""
    spec, meta = pod.spec, pod.metadata
    annotations = {key: value for key, value in meta.annotations.items() if key != _LAST_APPLIED}
    return replace(
        pod,
        metadata=replace(meta, annotations=annotations),
        spec=replace(
            spec,
            containers=[_container_without_values(container) for container in spec.containers],
            init_containers=[_container_without_values(container) for container in spec.init_containers],
            ephemeral_containers=[
                _container_without_values(container) for container in spec.ephemeral_containers
            ],
        ),
    )


def _container_without_values(container: Any) -> Any:
    probes = {
        name: _handler_without_values(probe)
        for name in ("liveness_probe", "readiness_probe", "startup_probe")
        if (probe := getattr(container, name)) is not None
    }
    if (hooks := container.lifecycle) is not None:
        probes["lifecycle"] = replace(
            hooks,
            post_start=_handler_without_values(hooks.post_start),
            pre_stop=_handler_without_values(hooks.pre_stop),
        )
    env = [replace(variable, value="") for variable in container.env]
    return replace(container, env=env, **probes)


def _handler_without_values(handler: Any) -> Any:
    if handler is None or handler.http_get is None:
        return handler
    headers = [replace(header, value="") for header in handler.http_get.http_headers]
    return replace(handler, http_get=replace(handler.http_get, http_headers=headers))


def _is_own_host(host: str, own_names: set[str]) -> bool:
    name, _, port = host.rpartition(":")
    # Without a port the last colon, if any, is within the brackets of an IPv6 address.
    if not name or not (port.isascii() and port.isdigit()):
        name = host
    if name.startswith("[") and name.endswith("]"):
        name = name[1:-1]
    try:
        ip_address(name)
    except ValueError:
        return name.lower().rstrip(".") in own_names
    return True


Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Check = Callable[[], str | None]
"""Returns the reason why a component is unhealthy, or None."""


PING: Mapping[str, Check] = {"ping": lambda: None}
"""The only check of the health port."""
_NOSNIFF = {"X-Content-Type-Options": "nosniff"}


def health_routes(checks: Mapping[str, Check], metrics: HealthMetrics | None = None) -> list[web.RouteDef]:
    """Return the routes of `/healthz`, whose results are recorded, and of each check, for all methods."""

    async def overall(request: web.Request) -> web.Response:
        excluded = set(request.query.getall("exclude", []))
        return _health_response(checks, excluded, metrics, verbose="verbose" in request.query)

    def single(name: str, check: Check) -> Handler:
        async def respond(_: web.Request) -> web.Response:
            reason = check()
            if reason is None:
                return web.Response(text="ok")
            log.warning("Health check failed", check=name, reason=reason)
            return web.Response(status=500, text=f"internal server error: {reason}\n", headers=_NOSNIFF)

        return respond

    return [
        web.route("*", "/healthz", overall),
        *(web.route("*", f"/healthz/{name}", single(name, check)) for name, check in checks.items()),
    ]


def health_port_routes(metrics: HealthMetrics) -> list[web.RouteDef]:
    """Return the routes of the health port, which runs only `ping` and has nothing else."""

    async def not_found(_: web.Request) -> web.Response:
        return web.Response(status=404, text="404 page not found\n", headers=_NOSNIFF)

    return [*health_routes(PING, metrics), web.route("*", "/{path:.*}", not_found)]


def _health_response(
    checks: Mapping[str, Check], excluded: set[str], metrics: HealthMetrics | None, *, verbose: bool
) -> web.Response:
    lines, failed = [], []
    for name, check in checks.items():
        if name in excluded:
            lines.append(f"[+]{name} excluded: ok")
            continue
        reason = check()
        if metrics is not None:
            metrics.observe(name, healthy=reason is None)
        if reason is None:
            lines.append(f"[+]{name} ok")
        else:
            lines.append(f"[-]{name} failed: reason withheld")
            failed.append(f"{name}: {reason}")
    unknown = ",".join(f'"{name}"' for name in sorted(excluded - set(checks)))
    if unknown:
        lines.append(f"warn: some health checks cannot be excluded: no matches for {unknown}")
    text = "ok"
    if failed:
        log.warning("Health check failed", reasons=failed)
        text = "\n".join([*lines, "healthz check failed", ""])
    elif verbose:
        text = "\n".join([*lines, "healthz check passed", ""])
    return web.Response(status=500 if failed else 200, text=text, headers=_NOSNIFF)
