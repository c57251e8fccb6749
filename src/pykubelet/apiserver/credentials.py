"""Credentials of the API client: files, exec plugins and kubeconfig changes.

Tokens and certificates are renewed by other processes while the kubelet runs, so `CredentialSource` is
queried before every request; this is cheap while nothing has changed. The previous certificate stays in
use while its successor cannot be loaded, because a renewal may be in progress.

An exec plugin (`exec` in a kubeconfig) gets its input in KUBERNETES_EXEC_INFO and writes an ExecCredential
to stdout. Its run time and output are bounded, and it has no terminal. Its stdout is secret and appears in
no message; its stderr does.

`follow_kubeconfig` rereads a kubeconfig that is replaced while the kubelet runs, since credentials inside
it expire. Credentials and certificate authority follow the file; the address of the API server does not:
all connections and watches depend on it, so a change requires a restart.
"""

from __future__ import annotations

import asyncio
import base64
import math
import os
import ssl
import time
import unicodedata
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import NoReturn
from urllib.parse import quote

import msgspec

from pykubelet.apiserver.certificates.x509 import Lifetime, certificates, lifetime
from pykubelet.apiserver.errors import KubeconfigError, NoCredentials
from pykubelet.apiserver.metrics import RestMetrics
from pykubelet.apiserver.rest_config import ExecPlugin, Impersonation, RestConfig
from pykubelet.apiserver.tls import BadMaterial, WatchedFile, client_context
from pykubelet.linux.processes import OutputTooLarge, run_bounded
from pykubelet.logs import get_logger
from pykubelet.util.text import quoted

log = get_logger(__name__)
TIMEOUT_SECONDS = 60.0
MAX_OUTPUT_BYTES = 1024 * 1024


class PluginError(Exception):
    """The exec plugin returned no usable credentials: one line without secrets."""


@dataclass(frozen=True, slots=True)
class PluginCredentials:
    """Credentials from an exec plugin: a token, or a certificate with its key in PEM, or both."""

    token: str = field(default="", repr=False)
    identity: bytes = field(default=b"", repr=False)
    expires: datetime | None = None
    """None: until the API server rejects them."""


async def run_plugin(
    plugin: ExecPlugin, access: RestConfig, ca: bytes | None, *, environ: Mapping[str, str] = os.environ
) -> PluginCredentials:
    """Run the exec plugin. `ca` is the authority to pass to it. Raises PluginError."""
    environment = {
        **environ,
        **plugin.env,
        "KUBERNETES_EXEC_INFO": exec_info(plugin, access, ca).decode(),
    }
    try:
        finished = await run_bounded(
            [plugin.command, *plugin.args], environment, seconds=TIMEOUT_SECONDS, max_bytes=MAX_OUTPUT_BYTES
        )
    except FileNotFoundError:
        hint = f": {_plain(plugin.install_hint)}" if plugin.install_hint else ": install it"
        raise PluginError(f"exec plugin {plugin.command} was not found{hint}") from None
    except (OSError, ValueError) as err:
        if isinstance(err, TimeoutError):
            raise PluginError(
                f"exec plugin {plugin.command} did not answer within {TIMEOUT_SECONDS:g} s"
            ) from None
        why = err.strerror if isinstance(err, OSError) else str(err)
        raise PluginError(f"exec plugin {plugin.command} could not be started: {why}") from None
    except OutputTooLarge:
        raise PluginError(
            f"exec plugin {plugin.command}: its answer is longer than {MAX_OUTPUT_BYTES // 1024} KiB"
        ) from None
    if finished.status:
        message = _plain(finished.stderr) or "it gave no reason"
        raise PluginError(f"exec plugin {plugin.command} failed with status {finished.status}: {message}")
    try:
        return read_exec_credential(finished.output, plugin.api_version)
    except PluginError as err:
        raise PluginError(f"exec plugin {plugin.command}: {err}") from None


def exec_info(plugin: ExecPlugin, access: RestConfig, ca: bytes | None) -> bytes:
    """Return the value of KUBERNETES_EXEC_INFO."""
    spec: dict[str, object] = {"interactive": False}
    if plugin.provide_cluster_info:
        cluster = {
            "server": access.server,
            "tls-server-name": access.tls_server_name,
            "insecure-skip-tls-verify": access.insecure,
            "certificate-authority-data": base64.b64encode(ca).decode() if ca else "",
            "proxy-url": access.proxy,
            "disable-compression": not access.compression,
            "config": plugin.cluster_config,
        }
        spec["cluster"] = {name: value for name, value in cluster.items() if value}
    return msgspec.json.encode({"kind": "ExecCredential", "apiVersion": plugin.api_version, "spec": spec})


class _Status(msgspec.Struct, rename="camel"):
    token: str = ""
    client_certificate_data: str = ""
    client_key_data: str = ""
    expiration_timestamp: datetime | None = None


class _ExecCredential(msgspec.Struct, rename="camel"):
    kind: str = ""
    api_version: str = ""
    status: _Status | None = None


def read_exec_credential(output: bytes, api_version: str) -> PluginCredentials:
    """Decode an ExecCredential. Raises PluginError."""
    try:
        credential = msgspec.json.decode(output, type=_ExecCredential)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        # The library's message may quote the input.
        raise PluginError("its answer is not a valid ExecCredential") from None
    if credential.kind != "ExecCredential":
        raise PluginError(f"its answer is a {quoted(credential.kind)}, not an ExecCredential")
    if credential.api_version != api_version:
        raise PluginError(
            f"its answer has apiVersion {quoted(credential.api_version)}, the kubeconfig wants {api_version}"
        )
    if credential.status is None:
        raise PluginError("its answer has no status")
    status = credential.status
    if bool(status.client_certificate_data) != bool(status.client_key_data):
        raise PluginError("its answer has a certificate or a key, but not both")
    if not status.token and not status.client_certificate_data:
        raise PluginError("its answer has neither a token nor a certificate with its key")
    expires = status.expiration_timestamp
    if expires is not None and expires.tzinfo is None:
        expires = expires.replace(tzinfo=UTC)
    identity = f"{status.client_certificate_data}\n{status.client_key_data}".encode()
    return PluginCredentials(status.token, identity if status.client_certificate_data else b"", expires)


def _plain(text: str) -> str:
    """Return untrusted text as one line without control characters."""
    shown = "".join(c if not unicodedata.category(c).startswith("C") else " " for c in text)
    return " ".join(shown.split())


PLUGIN_RETRY_SECONDS = 5.0
"""Seconds after a failure during which the plugin is not run again."""
PLUGIN_MIN_SECONDS = 30.0
"""Seconds for which credentials are used that have already expired on arrival. The local clock may be hours
ahead: the API server decides, and the plugin must not run for every request."""
Headers = tuple[tuple[str, str], ...]

# Characters that need no escaping in a header name; the case of letters is not preserved in transit.
_HEADER_NAME = "!#$&'*+-.^_`|~"


@dataclass(frozen=True, slots=True, eq=False)
class Credentials:
    """Credentials of one request; the same object as long as nothing changed."""

    headers: Headers = field(repr=False)
    context: ssl.SSLContext | None = field(repr=False)
    """None: the API server is contacted without TLS."""


class CredentialSource:
    """Source of the current credentials of a RestConfig; `clock` is the wall clock, for expiry."""

    def __init__(
        self,
        access: RestConfig,
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
        self._obtained: PluginCredentials | None = None
        self._at_least_until = 0.0
        self._stale = False
        self._failure: tuple[float, PluginError] | None = None
        self._material: tuple[bytes | None, bytes] | None = None
        self._rejected_material: tuple[bytes | None, bytes] | None = None
        self._current: Credentials | None = None

    async def current(self) -> Credentials:
        """Return the currently valid credentials. Raises NoCredentials."""
        if not self._access.uses_tls:
            return self._updated((), None)
        ca = self._read(self._access.ca, "certificate-authority")
        obtained = await self._plugin_credentials(ca)
        identity = self._identity() if obtained is None else obtained.identity
        context = self._context(ca, identity)
        return self._updated(self._headers(obtained), context)

    def use(self, access: RestConfig) -> None:
        """Switch to this user; if its certificate is not usable, the previous one stays in use."""
        self._access, self._files = access, _files(access)
        self._obtained = self._failure = None

    async def renewed(self, rejected: Credentials) -> bool:
        """Reload credentials that the API server rejected; return whether they changed."""
        if self._current is rejected:
            self._stale = True
            for file in self._files.values():
                file.forget()
        return await self.current() is not rejected

    def problem(self) -> str:
        """Describe why the client certificate in use is not valid; empty if it is valid or absent."""
        life = _lifetime(self._material[1]) if self._material else None
        problem = life.problem(datetime.fromtimestamp(self._clock(), UTC)) if life else None
        return f"the client certificate {problem}" if problem else ""

    def _updated(self, headers: Headers, context: ssl.SSLContext | None) -> Credentials:
        if self._current is None or self._current.headers != headers or self._current.context is not context:
            self._current = Credentials(headers, context)
        return self._current

    def _headers(self, obtained: PluginCredentials | None) -> Headers:
        access = self._access
        headers: list[tuple[str, str]] = []
        token = self._token() if obtained is None else obtained.token
        if token:
            if not token.isascii() or not token.isprintable():
                raise self._no_credentials("the token has characters that a token cannot have")
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
            raise self._no_credentials(f"tokenFile {self._access.token_file} cannot be read: {why}") from None
        if not token:
            raise self._no_credentials(f"tokenFile {self._access.token_file} is empty")
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
            raise self._no_credentials(f"{name} {material} cannot be read: {err.strerror}") from None

    def _context(self, ca: bytes | None, identity: bytes) -> ssl.SSLContext:
        material = (ca, identity)
        known = self._current.context if self._current is not None else None
        if known is not None and material in (self._material, self._rejected_material):
            return known
        try:
            context = client_context(ca=ca, insecure=self._access.insecure, identity=identity)
        except BadMaterial as err:
            if known is None:
                raise self._no_credentials(str(err)) from None
            log.error(err, "Failed to load renewed certificate, keeping the previous one")
            self._rejected_material = material
            return known
        if known is not None:
            log.v(1).info("Certificates changed, opening new connections", server=self._access.server)
        self._material, self._rejected_material = material, None
        return context

    async def _plugin_credentials(self, ca: bytes | None) -> PluginCredentials | None:
        access = self._access
        plugin = access.plugin
        if plugin is None or access.token or access.token_file or access.username or access.certificate:
            return None
        async with self._plugin_lock:
            now = asyncio.get_running_loop().time()
            known = None if self._stale else self._obtained
            if known is not None and (now < self._at_least_until or not self._expired(known)):
                return known
            if self._failure is not None and now < self._failure[0] + PLUGIN_RETRY_SECONDS:
                raise self._no_credentials(str(self._failure[1]))
            before = self._obtained
            try:
                self._obtained = await run_plugin(plugin, access, ca, environ=self._environ)
            except PluginError as err:
                self._failure = (asyncio.get_running_loop().time(), err)
                raise self._no_credentials(str(err)) from None
            self._failure, self._stale = None, False
            late = self._expired(self._obtained)
            self._at_least_until = asyncio.get_running_loop().time() + PLUGIN_MIN_SECONDS if late else 0.0
            if before is not None and before.identity != self._obtained.identity:
                self._count_rotation(before)
            return self._obtained

    def _count_rotation(self, before: PluginCredentials) -> None:
        if self._metrics is not None and (life := _lifetime(before.identity)) is not None:
            self._metrics.plugin_rotated(self._clock() - life.begins.timestamp())

    def _plugin_seconds_left(self) -> float:
        life = _lifetime(self._obtained.identity) if self._obtained is not None else None
        return life.ends.timestamp() - self._clock() if life is not None else math.inf

    def _expired(self, obtained: PluginCredentials) -> bool:
        return obtained.expires is not None and obtained.expires.timestamp() <= self._clock()

    def _no_credentials(self, why: str) -> NoCredentials:
        return NoCredentials(self._access.server, why)


def _files(access: RestConfig) -> dict[Path, WatchedFile]:
    paths = (access.ca, access.certificate, access.key, access.token_file)
    return {path: WatchedFile(path) for path in paths if isinstance(path, Path)}


def impersonation_headers(who: Impersonation) -> Headers:
    """Return the impersonation headers."""
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


CHECK_SECONDS = 10.0


async def follow_kubeconfig(
    path: Path, load: Callable[[Path], RestConfig], access: RestConfig, credentials: CredentialSource
) -> NoReturn:
    """Apply changes of the kubeconfig until cancelled; `access` is the RestConfig in use."""
    last_fingerprint: tuple[int, ...] | None = None
    while True:
        await asyncio.sleep(CHECK_SECONDS)
        fingerprint = _fingerprint(path)
        if fingerprint is not None and fingerprint != last_fingerprint:
            last_fingerprint = fingerprint
            access = _reload(path, load, access, credentials)


def _reload(
    path: Path, load: Callable[[Path], RestConfig], access: RestConfig, credentials: CredentialSource
) -> RestConfig:
    try:
        found = load(path)
    except KubeconfigError as err:
        log.error(err, "Failed to load changed kubeconfig, keeping the previous one")
        return access
    if found == access:
        return access
    if _endpoint(found) != _endpoint(access):
        log.warning(
            "Kubeconfig changed the connection to the API server, restart the kubelet to apply it",
            path=str(path),
            server=found.server,
        )
        return access
    log.info("Kubeconfig changed, using its credentials", path=str(path))
    credentials.use(found)
    return found


def _endpoint(access: RestConfig) -> tuple[object, ...]:
    return access.server, access.tls_server_name, access.proxy, access.compression


def _fingerprint(path: Path) -> tuple[int, ...] | None:
    """Return a fingerprint of the file's version; None while it does not exist."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
