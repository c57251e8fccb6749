"""Authentication and authorization of API requests, built from the kubelet configuration.

Authenticators are tried in this order: client certificate, bearer token, bearer token in the WebSocket
protocols. The first that succeeds wins, even if an earlier one failed: a certificate of an unknown CA is
harmless with a valid token. A request with only invalid credentials is rejected even if anonymous requests
are allowed.

A request is authorized if any one of its attributes is allowed; they are checked in order. If the API server
cannot decide, the request fails with 500; it is never allowed.

Client certificates are verified against `clientCAFile` on each request, not once per connection, so that a
removed CA or an expired certificate takes effect immediately. The file is read again when it changes; if the
new contents are invalid, the previous CAs stay in force.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol

from pykubelet.apiserver.certificates.x509 import lifetime
from pykubelet.apiserver.tls import WatchedFile
from pykubelet.config.types import KubeletConfiguration
from pykubelet.logs import get_logger
from pykubelet.server.identity import (
    ANONYMOUS,
    AUTHENTICATED,
    NOBODY,
    UNAUTHENTICATED,
    AuthorizerAttributes,
    BadCredentials,
    HttpError,
    RequestCredentials,
    User,
    bearer_token,
    certificate_user,
    websocket_token,
)
from pykubelet.server.metrics import ServerMetrics
from pykubelet.server.reviews import AccessReviews, ReviewClient, ReviewUnavailable, TokenReviews
from pykubelet.server.tls import Authorities, NoAuthorities, OpensslMissing
from pykubelet.util.tasks import TaskScope

log = get_logger(__name__)


class Authorizer(Protocol):
    """Authorizer of one set of attributes, such as `reviews.AccessReviews`."""

    async def allowed(self, user: User, wish: AuthorizerAttributes) -> bool:
        """Return whether the user is allowed. Raises ReviewUnavailable if that cannot be determined."""
        ...


class AlwaysAllow:
    """Authorizer of mode AlwaysAllow."""

    async def allowed(self, user: User, wish: AuthorizerAttributes) -> bool:
        """Return True."""
        return True


async def authorize(judge: Authorizer, user: User, wanted: Iterable[AuthorizerAttributes]) -> None:
    """Check that the user is allowed one of the attributes. Raises HttpError (403 or 500) otherwise."""
    asked: list[AuthorizerAttributes] = []
    for wish in wanted:
        asked.append(wish)
        try:
            if await judge.allowed(user, wish):
                return
        except ReviewUnavailable as err:
            log.v(2).info("Authorization error", user=user.name, subresource=wish.subresource, err=err)
            raise HttpError(
                500,
                f"Authorization error (user={user.name}, verb={wish.verb}, resource=nodes, "
                f"subresource={wish.subresource})",
            ) from None
    names = " ".join(wish.subresource for wish in asked)
    verb = asked[0].verb
    log.v(2).info("Forbidden", user=user.name, verb=verb, resource="nodes", subresources=names)
    raise HttpError(
        403, f"Forbidden (user={user.name}, verb={verb}, resource=nodes, subresource(s)=[{names}])\n"
    )


class BadAuthorities(Exception):
    """Raised when the CA file cannot be used; one line with the cause."""


class ClientCertificates:
    """Authenticator of client certificates, verified against a CA file."""

    def __init__(self, path: Path, metrics: ServerMetrics) -> None:
        """Read the file. Raises BadAuthorities and OpensslMissing."""
        self._file = WatchedFile(path)
        self._metrics = metrics
        try:
            self._contents = self._file.contents(time.monotonic())
            self._authorities = Authorities(self._contents)
        except (OSError, NoAuthorities) as err:
            raise BadAuthorities(
                f"clientCAFile {path} cannot be used: {getattr(err, 'strerror', None) or err}"
            ) from None

    def user(self, shown: RequestCredentials) -> User | None:
        """Return the certificate's user; None without a certificate or user name. Raises BadCredentials."""
        if not shown.chain:
            return None
        self._metrics.certificate_shown(_seconds_left(shown.chain[0]))
        fingerprint = hashlib.sha256(shown.chain[0]).hexdigest()
        if problem := self._current().problem(shown.chain):
            raise BadCredentials(f"the client's certificate {fingerprint[:16]} is not accepted: {problem}")
        return certificate_user(shown.subject, fingerprint)

    def _current(self) -> Authorities:
        contents = self._file.contents(time.monotonic())
        if contents != self._contents:
            # Stored even if invalid, so that it is not parsed again until it changes.
            self._contents = contents
            try:
                self._authorities = Authorities(contents)
                log.info("Reloaded client CA file", path=str(self._file.path))
            except NoAuthorities as err:
                log.error(
                    err, "Failed to reload client CA file, keeping previous CAs", path=str(self._file.path)
                )
        return self._authorities


def _seconds_left(der: bytes) -> float:
    try:
        return lifetime(der).ends.timestamp() - time.time()
    except ValueError:
        return 0.0


class Authenticator:
    """Request authenticator; methods that are not configured are None."""

    def __init__(
        self, certificates: ClientCertificates | None, tokens: TokenReviews | None, *, anonymous: bool
    ) -> None:
        self._certificates = certificates
        self._tokens = tokens
        self._anonymous = anonymous

    @property
    def wants_certificates(self) -> bool:
        """Whether the TLS handshake should request a client certificate."""
        return self._certificates is not None

    async def user(self, shown: RequestCredentials) -> User | None:
        """Return the user; None if the request must be rejected. The reasons are only logged."""
        problems: list[Exception] = []
        for way in (self._by_certificate, self._by_bearer, self._by_websocket):
            try:
                user = await way(shown)
            except (BadCredentials, ReviewUnavailable) as err:
                problems.append(err)
                continue
            if user is not None:
                return _with_standing(user)
        if problems:
            log.v(2).info("Unable to authenticate the request", errors=[str(problem) for problem in problems])
            return None
        return NOBODY if self._anonymous else None

    async def _by_certificate(self, shown: RequestCredentials) -> User | None:
        return self._certificates.user(shown) if self._certificates is not None else None

    async def _by_bearer(self, shown: RequestCredentials) -> User | None:
        token = bearer_token(shown.authorization)
        return await self._tokens.user(token) if token and self._tokens is not None else None

    async def _by_websocket(self, shown: RequestCredentials) -> User | None:
        if shown.protocols is None or self._tokens is None:
            return None
        token = websocket_token(shown.protocols)
        return await self._tokens.user(token) if token else None


def _with_standing(user: User) -> User:
    """Return the user with the group system:authenticated added, unless anonymous or unauthenticated."""
    if user.name == ANONYMOUS or AUTHENTICATED in user.groups or UNAUTHENTICATED in user.groups:
        return user
    return user.with_group(AUTHENTICATED)


class AuthConfigError(Exception):
    """Raised when authentication, authorization or TLS cannot be configured; one line, cause and remedy."""


def make_authenticator(
    config: KubeletConfiguration, client: ReviewClient | None, scope: TaskScope, metrics: ServerMetrics
) -> Authenticator:
    """Return the configured authenticator. Raises AuthConfigError."""
    wanted = config.authentication
    certificates, tokens = None, None
    if wanted.x509.client_ca_file:
        try:
            certificates = ClientCertificates(Path(wanted.x509.client_ca_file), metrics)
        except (BadAuthorities, OpensslMissing) as err:
            raise AuthConfigError(str(err)) from err
    if wanted.webhook.enabled:
        if client is None:
            raise AuthConfigError(
                "authentication.webhook needs an API server: set authentication.webhook.enabled to false "
                "to run standalone"
            )
        tokens = TokenReviews(client, scope, wanted.webhook.cache_ttl.seconds, metrics)
    if certificates is None and tokens is None and not wanted.anonymous.enabled:
        raise AuthConfigError(
            "nobody could use the API: enable authentication.x509 (clientCAFile), authentication.webhook or "
            "authentication.anonymous, or set enableServer to false"
        )
    return Authenticator(certificates, tokens, anonymous=wanted.anonymous.enabled)


def make_judge(
    config: KubeletConfiguration,
    client: ReviewClient | None,
    node_name: Callable[[], str],
    scope: TaskScope,
    metrics: ServerMetrics,
) -> Authorizer:
    """Return the configured authorizer. Raises AuthConfigError."""
    wanted = config.authorization
    if wanted.mode == "AlwaysAllow":
        return AlwaysAllow()
    if client is None:
        raise AuthConfigError(
            "authorization.mode Webhook needs an API server: "
            "set authorization.mode to AlwaysAllow to run standalone"
        )
    return AccessReviews(
        client,
        scope,
        node_name,
        metrics,
        yes_seconds=wanted.webhook.cache_authorized_ttl.seconds,
        no_seconds=wanted.webhook.cache_unauthorized_ttl.seconds,
    )
