"""The HTTP probe: a GET whose status is from 200 to 399.

Redirects are followed within the host, at most ten times; one that leads elsewhere is not followed,
counts as healthy and is a warning for people. An answer's body never reaches an event of a failure:
it may hold secrets.
"""

from __future__ import annotations

import asyncio
import ssl
from urllib.parse import urljoin

from pykubelet.api.pod import HTTPGetAction
from pykubelet.probes.http_client import Answer, DialError, Url, get, parse_url, request_target
from pykubelet.probes.http_wire import WireError
from pykubelet.probes.outcome import Outcome, Target, resolve_host, resolve_port
from pykubelet.probes.tcp_check import dial_failure

_MOST_REDIRECTS = 10
_REDIRECTS = (301, 302, 303, 307, 308)


async def http_check(
    action: HTTPGetAction, target: Target, timeout: float, agent: str, tls: ssl.SSLContext | None
) -> Outcome:
    """Ask; `timeout` covers everything, redirects too. Raises BadTarget."""
    url = url_of(action, target)
    first = url
    headers = [(header.name, header.value) for header in action.http_headers]
    deadline = asyncio.get_running_loop().time() + timeout
    for _ in range(_MOST_REDIRECTS):
        try:
            answer = await get(url, headers, agent=agent, tls=tls, deadline=deadline)
            onward = _onward(answer, url)
        except (DialError, OSError, WireError, ValueError) as err:
            return Outcome("failure", f'Get "{url}": {_describe(err, url)}')
        if onward is None or onward.host != first.host:
            return judge(answer)
        if (onward.scheme, onward.address) != (url.scheme, url.address):
            # A host header that the author gave is for the first server, not for where it sends us.
            headers = [(name, value) for name, value in headers if name.lower() != "host"]
        url = onward
    return Outcome("failure", f'Get "{url}": stopped after {_MOST_REDIRECTS} redirects')


def url_of(action: HTTPGetAction, target: Target) -> Url:
    """Give the address of an HTTP action in a container. Raises BadTarget."""
    port = resolve_port(action.port, target.container)
    host = resolve_host(action.host, target)
    return Url(action.scheme.lower() or "http", host, port, request_target(action.path))


def judge(answer: Answer) -> Outcome:
    """Say what an answer means."""
    if answer.broken:
        return Outcome("failure", answer.broken, errored=True)
    if not 200 <= answer.status < 400:
        return Outcome("failure", f"HTTP probe failed with statuscode: {answer.status}")
    body = answer.body.decode(errors="replace")
    if answer.status >= 300:
        return Outcome("warning", f"Probe terminated redirects, Response body: {body}")
    return Outcome("success", body)


def _onward(answer: Answer, url: Url) -> Url | None:
    """Where a redirect leads, or None if it is none."""
    if answer.status not in _REDIRECTS or not answer.location:
        return None
    return parse_url(urljoin(str(url), answer.location))


def _describe(err: Exception, url: Url) -> str:
    cause = err.__cause__
    if isinstance(err, DialError) and isinstance(cause, ssl.SSLError):
        return f"tls: {cause.reason or cause}"
    if isinstance(err, DialError) and isinstance(cause, OSError):
        return dial_failure(cause, url.host, url.port)
    if isinstance(err, TimeoutError):
        return "context deadline exceeded (Client.Timeout exceeded while awaiting headers)"
    if isinstance(err, ConnectionResetError):
        return f"read tcp {url.address}: connection reset by peer"
    return str(err)
