"""Check of credentials against a registry: the handshake of the distribution API, `GET /v2/`.

The registry is untrusted until TLS has verified its name, and bounded afterwards: time, size of responses, no
redirects. The password is sent only over TLS, also to the token server that the registry names; plain HTTP
is used for registries on loopback only, as containerd does. No message contains the password.
"""

from __future__ import annotations

import asyncio
import base64
import ipaddress
import re
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import msgspec

from pykubelet.cli.printers import escape_unprintable

if TYPE_CHECKING:
    import aiohttp

TIMEOUT_SECONDS = 15.0
"""Seconds for the whole check."""
MAX_BODY_BYTES = 256 * 1024
_HUB, _HUB_HOST = "docker.io", "registry-1.docker.io"
_PARAMETER = re.compile(r'([a-zA-Z_]+)="([^"\\]*)"')
_MAX_TEXT = 200


class RegistryError(Exception):
    """Raised when the registry rejects the credentials or cannot be asked; one line."""


@dataclass(frozen=True, slots=True, repr=False)
class Login:
    """Credentials to check; the repr is masked."""

    host: str
    """Host of the registry, with its port if there is one."""
    user: str
    password: str

    def __repr__(self) -> str:
        return f"Login({self.host!r}, <masked>)"


@dataclass(frozen=True, slots=True)
class _Reply:
    status: int
    challenge: str
    body: bytes


class _Token(msgspec.Struct):
    token: str = ""
    access_token: str = ""


def check_login(login: Login, ca_file: Path | None = None, *, timeout: float = TIMEOUT_SECONDS) -> None:
    """Return when the registry accepts the credentials. Raises RegistryError."""
    asyncio.run(_check_in_time(login, _tls_context(ca_file), timeout))


def is_loopback(host: str) -> bool:
    """Return whether a host, with or without port, is this machine, which containerd reaches without TLS."""
    name = re.sub(r":[0-9]+$", "", host).strip("[]")
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return name == "localhost"


def parse_challenge(header: str) -> tuple[str, dict[str, str]]:
    """Return scheme and parameters of a WWW-Authenticate header."""
    scheme, _, rest = header.partition(" ")
    return scheme.lower(), {key.lower(): value for key, value in _PARAMETER.findall(rest)}


def _tls_context(ca_file: Path | None) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=str(ca_file) if ca_file is not None else None)
    except (OSError, ssl.SSLError) as err:
        raise RegistryError(f"the CA file {ca_file} cannot be used: {err}") from err


async def _check_in_time(login: Login, tls: ssl.SSLContext, timeout: float) -> None:
    # Imported here: only this command needs it.
    import aiohttp

    try:
        async with (
            asyncio.timeout(timeout),
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=tls)) as session,
        ):
            await _check(session, login, _basic(login))
    except TimeoutError:
        raise RegistryError(f"{login.host} did not respond within {timeout:g} s") from None
    except aiohttp.ClientConnectorCertificateError as err:
        raise RegistryError(
            f"the certificate of {login.host} cannot be verified ({_text(str(err.certificate_error))}): "
            "give the CA of the registry with --ca-file"
        ) from None
    except (aiohttp.ClientError, OSError, ValueError) as err:
        raise RegistryError(
            f"{login.host} cannot be reached: {_text(str(err) or type(err).__name__)}"
        ) from None


async def _check(session: aiohttp.ClientSession, login: Login, basic: str) -> None:
    host = _HUB_HOST if login.host == _HUB else login.host
    url = f"{'http' if is_loopback(host) else 'https'}://{host}/v2/"
    first = await _get(session, url)
    if first.status == 200:
        # It needs no login for this request; wrong credentials are rejected nevertheless.
        _require(login, await _get(session, url, auth=basic))
        return
    scheme, parameters = parse_challenge(first.challenge)
    if first.status != 401 or scheme not in ("basic", "bearer"):
        raise RegistryError(f"{login.host} is not a registry: GET /v2/ returned status {first.status}")
    if scheme == "basic":
        _require(login, await _get(session, url, auth=basic))
        return
    realm = parameters.get("realm", "")
    if not realm.startswith("https://") and not (is_loopback(host) and realm.startswith("http://")):
        raise RegistryError(
            f"{login.host} names the token server {_text(realm)!r}, which has no TLS: "
            "the password was not sent"
        )
    query = {"account": login.user, "client_id": "pykubelet"}
    query |= {key: parameters[key] for key in ("service", "scope") if key in parameters}
    reply = await _get(session, realm, params=query, auth=basic)
    _require(login, reply)
    try:
        found = msgspec.json.decode(reply.body, type=_Token)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        raise RegistryError(f"the token server of {login.host} returned no token") from None
    token = found.token or found.access_token
    if not token.isascii() or not token.isprintable() or not token:
        raise RegistryError(f"the token server of {login.host} returned no token")
    _require(login, await _get(session, url, auth=f"Bearer {token}"))


def _require(login: Login, reply: _Reply) -> None:
    if reply.status in (401, 403):
        raise RegistryError(f"{login.host} rejected the credentials of user {_text(login.user)!r}")
    if reply.status != 200:
        raise RegistryError(f"{login.host} cannot check the credentials: it returned status {reply.status}")


async def _get(
    session: aiohttp.ClientSession,
    url: str,
    *,
    params: dict[str, str] | None = None,
    auth: str = "",
) -> _Reply:
    headers = {"Authorization": auth} if auth else {}
    async with session.get(
        url, params=params, headers=headers, allow_redirects=False, proxy=_proxy(url)
    ) as reply:
        body = bytearray()
        async for chunk in reply.content.iter_chunked(16384):
            body += chunk
            if len(body) > MAX_BODY_BYTES:
                raise RegistryError(f"{reply.url.host} returned more than {MAX_BODY_BYTES >> 10} KiB")
        return _Reply(reply.status, reply.headers.get("WWW-Authenticate", ""), bytes(body))


def _basic(login: Login) -> str:
    return f"Basic {base64.b64encode(f'{login.user}:{login.password}'.encode()).decode()}"


def _proxy(url: str) -> str | None:
    """Return the proxy of the environment; aiohttp's own lookup would also send passwords of ~/.netrc."""
    parts = urlsplit(url)
    is_direct = is_loopback(parts.netloc) or proxy_bypass(parts.hostname or "")
    return None if is_direct else getproxies().get(parts.scheme)


def _text(text: str) -> str:
    return escape_unprintable(text[:_MAX_TEXT], lines=False)
