"""The HTTP probe: a GET whose status is from 200 to 399. And the GET of a container's hook.

Redirects are followed within the host, at most ten times; one that leads elsewhere is not followed,
counts as healthy and is a warning for people. An answer's body never reaches an event of a failure:
it may hold secrets.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Sequence
from dataclasses import replace
from urllib.parse import urljoin

from pykubelet import KUBERNETES_VERSION
from pykubelet.api.pod import Container, HTTPGetAction
from pykubelet.host.http_answer import WireError
from pykubelet.probes.http_client import (
    Answer,
    DialError,
    Url,
    get,
    parse_url,
    request_target,
    unverified_tls,
)
from pykubelet.probes.outcome import BadTarget, Outcome, Target, resolve_host, resolve_port
from pykubelet.probes.tcp_check import dial_failure

_MOST_REDIRECTS = 10
_TOO_LATE = " (Client.Timeout exceeded while awaiting headers)"
_REDIRECTS = (301, 302, 303, 307, 308)
_NOT_TLS = ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "HTTP_REQUEST")

Headers = Sequence[tuple[str, str]]


class GetFailed(Exception):
    """A GET gave no answer; the text names the address and the reason."""

    def __init__(self, url: Url, reason: str, *, plain: bool = False) -> None:
        super().__init__(f'Get "{url}": {reason}')
        self.plain = plain
        """Whether TLS was asked for and the server speaks plain HTTP."""


def user_agent(purpose: str) -> str:
    """How this agent calls itself: `kube-probe/1.36`."""
    return f"kube-{purpose}/{KUBERNETES_VERSION.removeprefix('v').rpartition('.')[0]}"


async def http_check(action: HTTPGetAction, target: Target, timeout: float, tls: ssl.SSLContext) -> Outcome:
    """Ask; `timeout` covers everything, redirects too. Raises BadTarget."""
    url = url_of(action, target)
    deadline = asyncio.get_running_loop().time() + timeout
    try:
        return judge(await follow(url, _headers(action), "probe", tls, deadline))
    except GetFailed as err:
        return Outcome("failure", str(err))


async def lifecycle_get(
    action: HTTPGetAction,
    container: Container,
    address: str,
    fell_back: Callable[[], None] = lambda: None,
) -> str | None:
    """Make the request of a container's hook to its pod; any answer will do. The caller bounds the time.

    Gives why there was none. A server that speaks plain HTTP where TLS was asked for is asked again
    without, and without credentials, as authors have come to rely on; `fell_back` is called when that
    worked.
    """
    tls = unverified_tls()
    headers = _headers(action)
    try:
        url = url_of(action, Target(container, "", address))
        try:
            await follow(url, headers, "lifecycle", tls, None)
        except GetFailed as err:
            if not err.plain:
                raise
            public = [(name, value) for name, value in headers if name.lower() != "authorization"]
            await follow(replace(url, scheme="http"), public, "lifecycle", tls, None)
            fell_back()
    except (BadTarget, GetFailed) as err:
        return str(err)
    return None


def url_of(action: HTTPGetAction, target: Target) -> Url:
    """Give the address of an HTTP action in a container. Raises BadTarget."""
    port = resolve_port(action.port, target.container)
    host = resolve_host(action.host, target)
    return Url(action.scheme.lower() or "http", host, port, request_target(action.path))


async def follow(
    url: Url, headers: Headers, purpose: str, tls: ssl.SSLContext, deadline: float | None
) -> Answer:
    """GET, and go where the answer leads within the same host. Raises GetFailed."""
    agent, host = user_agent(purpose), url.host
    for _ in range(_MOST_REDIRECTS):
        try:
            answer = await get(url, headers, agent=agent, tls=tls, deadline=deadline)
            onward = _onward(answer, url)
        except (DialError, OSError, WireError, ValueError) as err:
            plain = isinstance(err.__cause__, ssl.SSLError) and err.__cause__.reason in _NOT_TLS
            raise GetFailed(url, _describe(err, url, plain), plain=plain) from err
        if onward is None or onward.host != host:
            return answer
        if (onward.scheme, onward.address) != (url.scheme, url.address):
            # A host header that the author gave is for the first server, not for where it sends us.
            headers = [(name, value) for name, value in headers if name.lower() != "host"]
        url = onward
    raise GetFailed(url, f"stopped after {_MOST_REDIRECTS} redirects")


def judge(answer: Answer) -> Outcome:
    """Say what an answer means to a probe."""
    if answer.broken:
        return Outcome("failure", answer.broken, errored=True)
    if not 200 <= answer.status < 400:
        return Outcome("failure", f"HTTP probe failed with statuscode: {answer.status}")
    body = answer.body.decode(errors="replace")
    if answer.status >= 300:
        return Outcome("warning", f"Probe terminated redirects, Response body: {body}")
    return Outcome("success", body)


def _headers(action: HTTPGetAction) -> Headers:
    return [(header.name, header.value) for header in action.http_headers]


def _onward(answer: Answer, url: Url) -> Url | None:
    """Where a redirect leads, or None if it is none."""
    if answer.status not in _REDIRECTS or not answer.location:
        return None
    return parse_url(urljoin(str(url), answer.location))


def _describe(err: Exception, url: Url, plain: bool) -> str:
    cause = err.__cause__
    if plain:
        return "http: server gave HTTP response to HTTPS client"
    if isinstance(err, DialError) and isinstance(cause, ssl.SSLError):
        return f"tls: {cause.reason or cause}"
    if isinstance(err, DialError) and isinstance(cause, OSError):
        text = dial_failure(cause, url.host, url.port)
        return text + _TOO_LATE if isinstance(cause, TimeoutError) else text
    if isinstance(err, TimeoutError):
        return "context deadline exceeded" + _TOO_LATE
    if isinstance(err, ConnectionResetError):
        return f"read tcp {url.address}: connection reset by peer"
    return str(err)
