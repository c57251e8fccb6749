"""Who the agent is to the API server, at this moment.

Tokens and certificates are renewed by others while the agent runs: in files, or by a program. So
every request asks here first, which is cheap while nothing changed. What was good before stays in use
while its successor cannot be read or does not fit together, since a renewal may be half-way.
"""

from __future__ import annotations

import asyncio
import base64
import math
import os
import ssl
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import quote

from pykubelet.kube.access import Access, Impersonation
from pykubelet.kube.certificates import Lifetime, certificates, lifetime
from pykubelet.kube.errors import NoCredentials
from pykubelet.kube.exec_plugin import PluginAnswer, PluginError, ask_plugin
from pykubelet.kube.metrics import RestMetrics
from pykubelet.kube.tls import BadMaterial, client_context
from pykubelet.kube.watched_file import WatchedFile
from pykubelet.logs import get_logger

log = get_logger(__name__)

PLUGIN_PAUSE_SECONDS = 5.0
"""After a plugin failed, it is not run again for so long."""
PLUGIN_LEAST_SECONDS = 30.0
"""So long an answer is used that is over as soon as it comes. The clock may be hours ahead: then the API
server knows better, and the plugin cannot be run for each request."""

Headers = tuple[tuple[str, str], ...]
# What may stand in the name of a header unescaped; letters are lowered by everyone on the way.
_HEADER_NAME = "!#$&'*+-.^_`|~"


@dataclass(frozen=True, slots=True, eq=False)
class Credentials:
    """What goes with one request; the same object as long as nothing changed."""

    headers: Headers = field(repr=False)
    context: ssl.SSLContext | None = field(repr=False)
    """None: the API server is asked without TLS."""


class CredentialSource:
    """Gives the credentials of an Access; `clock` is the wall clock, which expiry is about."""

    def __init__(
        self,
        access: Access,
        *,
        environ: Mapping[str, str] = os.environ,
        clock: Callable[[], float] = time.time,
        metrics: RestMetrics | None = None,
    ) -> None:
        self._access = access
        self._metrics = metrics
        if metrics is not None:
            metrics.plugin_certificate(self._plugin_seconds_left)
        self._environ = environ
        self._clock = clock
        self._files = _files(access)
        self._plugin_lock = asyncio.Lock()
        self._answer: PluginAnswer | None = None
        self._at_least_until = 0.0
        self._stale = False
        self._failure: tuple[float, PluginError] | None = None
        self._material: tuple[bytes | None, bytes] | None = None
        self._refused_material: tuple[bytes | None, bytes] | None = None
        self._current: Credentials | None = None

    async def current(self) -> Credentials:
        """Give what is valid now; raises NoCredentials."""
        if not self._access.uses_tls:
            return self._remember((), None)
        ca = self._read(self._access.ca, "certificate-authority")
        answer = await self._ask_plugin(ca)
        identity = self._identity() if answer is None else answer.identity
        context = self._context(ca, identity)
        return self._remember(self._headers(answer), context)

    def use(self, access: Access) -> None:
        """Be this user from now on; a certificate that cannot be used leaves the one before in use."""
        self._access, self._files = access, _files(access)
        self._answer = self._failure = None

    async def renewed(self, refused: Credentials) -> bool:
        """After the API server refused these: look for newer ones, and say whether there are any."""
        if self._current is refused:
            self._stale = True
            for file in self._files.values():
                file.forget()
        return await self.current() is not refused

    def problem(self) -> str:
        """Say what is wrong with the client certificate in use; empty when it is valid or there is none."""
        life = _lifetime(self._material[1]) if self._material else None
        problem = life.problem(datetime.fromtimestamp(self._clock(), UTC)) if life else None
        return f"the client certificate {problem}" if problem else ""

    def _remember(self, headers: Headers, context: ssl.SSLContext | None) -> Credentials:
        if self._current is None or self._current.headers != headers or self._current.context is not context:
            self._current = Credentials(headers, context)
        return self._current

    def _headers(self, answer: PluginAnswer | None) -> Headers:
        access = self._access
        headers: list[tuple[str, str]] = []
        token = self._token() if answer is None else answer.token
        if token:
            if not token.isascii() or not token.isprintable():
                raise self._none("the token has characters that a token cannot have")
            headers.append(("Authorization", f"Bearer {token}"))
        elif access.username or access.password:
            login = base64.b64encode(f"{access.username}:{access.password}".encode()).decode()
            headers.append(("Authorization", f"Basic {login}"))
        if access.impersonate is not None:
            headers += impersonation_headers(access.impersonate)
        return tuple(headers)

    def _token(self) -> str:
        if self._access.token_file is None:
            return self._access.token
        try:
            data = self._files[self._access.token_file].contents(asyncio.get_running_loop().time())
            token = data.decode().strip()
        except (OSError, UnicodeDecodeError) as err:
            if self._access.token:
                return self._access.token
            why = err.strerror if isinstance(err, OSError) else "it is not text"
            raise self._none(f"tokenFile {self._access.token_file} cannot be read: {why}") from None
        if not token:
            raise self._none(f"tokenFile {self._access.token_file} is empty")
        return token

    def _identity(self) -> bytes:
        certificate = self._read(self._access.certificate, "client-certificate")
        key = self._read(self._access.key, "client-key")
        return certificate + b"\n" + key if certificate and key else b""

    def _read(self, material: bytes | Path | None, name: str) -> bytes | None:
        if not isinstance(material, Path):
            return material
        try:
            return self._files[material].contents(asyncio.get_running_loop().time())
        except OSError as err:
            raise self._none(f"{name} {material} cannot be read: {err.strerror}") from None

    def _context(self, ca: bytes | None, identity: bytes) -> ssl.SSLContext:
        material = (ca, identity)
        known = self._current.context if self._current is not None else None
        if known is not None and material in (self._material, self._refused_material):
            return known
        try:
            context = client_context(ca=ca, insecure=self._access.insecure, identity=identity)
        except BadMaterial as err:
            if known is None:
                raise self._none(str(err)) from None
            log.error(err, "Failed to use a renewed certificate, keeping the one before")
            self._refused_material = material
            return known
        if known is not None:
            log.v(1).info("Certificates have changed, connecting anew", server=self._access.server)
        self._material, self._refused_material = material, None
        return context

    async def _ask_plugin(self, ca: bytes | None) -> PluginAnswer | None:
        access = self._access
        plugin = access.plugin
        if plugin is None or access.token or access.token_file or access.username or access.certificate:
            return None
        async with self._plugin_lock:
            now = asyncio.get_running_loop().time()
            known = None if self._stale else self._answer
            if known is not None and (now < self._at_least_until or not self._expired(known)):
                return known
            if self._failure is not None and now < self._failure[0] + PLUGIN_PAUSE_SECONDS:
                raise self._none(str(self._failure[1]))
            before = self._answer
            try:
                self._answer = await ask_plugin(plugin, access, ca, environ=self._environ)
            except PluginError as err:
                self._failure = (asyncio.get_running_loop().time(), err)
                raise self._none(str(err)) from None
            self._failure, self._stale = None, False
            late = self._expired(self._answer)
            self._at_least_until = asyncio.get_running_loop().time() + PLUGIN_LEAST_SECONDS if late else 0.0
            if before is not None and before.identity != self._answer.identity:
                self._count_rotation(before)
            return self._answer

    def _count_rotation(self, before: PluginAnswer) -> None:
        if self._metrics is not None and (life := _lifetime(before.identity)) is not None:
            self._metrics.plugin_rotated(self._clock() - life.begins.timestamp())

    def _plugin_seconds_left(self) -> float:
        life = _lifetime(self._answer.identity) if self._answer is not None else None
        return life.ends.timestamp() - self._clock() if life is not None else math.inf

    def _expired(self, answer: PluginAnswer) -> bool:
        return answer.expires is not None and answer.expires.timestamp() <= self._clock()

    def _none(self, why: str) -> NoCredentials:
        return NoCredentials(self._access.server, why)


def _files(access: Access) -> dict[Path, WatchedFile]:
    paths = (access.ca, access.certificate, access.key, access.token_file)
    return {path: WatchedFile(path) for path in paths if isinstance(path, Path)}


def impersonation_headers(who: Impersonation) -> Headers:
    """Give the headers that ask for another user's rights."""
    headers = [("Impersonate-User", who.user)]
    if who.uid:
        headers.append(("Impersonate-Uid", who.uid))
    headers += [("Impersonate-Group", group) for group in who.groups]
    for name, values in who.extra.items():
        key = f"Impersonate-Extra-{quote(name, safe=_HEADER_NAME)}"
        headers += [(key, value) for value in values]
    return tuple(headers)


def _lifetime(identity: bytes) -> Lifetime | None:
    ders = certificates(identity)
    try:
        return lifetime(ders[0]) if ders else None
    except ValueError:
        return None
