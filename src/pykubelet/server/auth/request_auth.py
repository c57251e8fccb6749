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
from pykubelet.apiserver.client import ApiClient
from pykubelet.apiserver.tls import WatchedFile
from pykubelet.config.feature_gates import FeatureGates
from pykubelet.config.types import KubeletConfiguration
from pykubelet.logs import get_logger
from pykubelet.server.auth.identity import (
    ANONYMOUS,
    ANONYMOUS_USER,
    AUTHENTICATED,
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
from pykubelet.server.auth.reviews import AccessReviews, ReviewUnavailable, TokenReviews
from pykubelet.server.metrics.server_metrics import ServerMetrics
from pykubelet.server.tls import Authorities, NoAuthorities, OpensslMissing
from pykubelet.util.tasks import TaskScope

log = get_logger(__name__)


class Authorizer(Protocol):
    """Authorizer of one set of attributes, such as `reviews.AccessReviews`."""

    async def allowed(self, user: User, attributes: AuthorizerAttributes) -> bool:
        """Return whether the user is allowed. Raises ReviewUnavailable if that cannot be determined."""
        ...


class AlwaysAllow:
    """Authorizer of mode AlwaysAllow."""

    async def allowed(self, user: User, attributes: AuthorizerAttributes) -> bool:
        """Return True."""
        return True


async def authorize(authorizer: Authorizer, user: User, alternatives: Iterable[AuthorizerAttributes]) -> None:
    """Check that the user is allowed one of the attributes. Raises HttpError (403 or 500) otherwise."""
    checked: list[AuthorizerAttributes] = []
    for attributes in alternatives:
        checked.append(attributes)
        try:
            if await authorizer.allowed(user, attributes):
                return
        except ReviewUnavailable as err:
            log.v(2).info("Authorization error", user=user.name, subresource=attributes.subresource, err=err)
            raise HttpError(
                500,
                f"Authorization error (user={user.name}, verb={attributes.verb}, resource=nodes, "
                f"subresource={attributes.subresource})",
            ) from None
    names = " ".join(attributes.subresource for attributes in checked)
    verb = checked[0].verb
    log.v(2).info("Forbidden", user=user.name, verb=verb, resource="nodes", subresources=names)
    raise HttpError(
        403, f"Forbidden (user={user.name}, verb={verb}, resource=nodes, subresource(s)=[{names}])\n"
    )


class BadAuthorities(Exception):
    """Raised when the CA file cannot be used; one line with the cause."""


class ClientCertificates:
    """Authenticator of client certificates, verified against a CA file."""

    def __init__(self, path: Path, metrics: ServerMetrics, *, reads_uid: bool = True) -> None:
        """Read the file; `reads_uid` is for the user's uid in subjects.

        Raises BadAuthorities and OpensslMissing.
        """
        self._reads_uid = reads_uid
        self._file = WatchedFile(path)
        self._metrics = metrics
        try:
            self._contents = self._file.contents(time.monotonic())
            self._authorities = Authorities(self._contents)
        except (OSError, NoAuthorities) as err:
            raise BadAuthorities(
                f"clientCAFile {path} cannot be used: {getattr(err, 'strerror', None) or err}"
            ) from None

    def user(self, credentials: RequestCredentials) -> User | None:
        """Return the certificate's user; None without a certificate or user name. Raises BadCredentials."""
        if not credentials.chain:
            return None
        self._metrics.observe_client_certificate(_seconds_left(credentials.chain[0]))
        fingerprint = hashlib.sha256(credentials.chain[0]).hexdigest()
        if problem := self._current_authorities().problem(credentials.chain):
            raise BadCredentials(f"the client's certificate {fingerprint[:16]} is not accepted: {problem}")
        return certificate_user(credentials.subject, fingerprint, reads_uid=self._reads_uid)

    def _current_authorities(self) -> Authorities:
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
    def requests_certificates(self) -> bool:
        """Whether the TLS handshake should request a client certificate."""
        return self._certificates is not None

    async def user(self, credentials: RequestCredentials) -> User | None:
        """Return the user; None if the request must be rejected. The reasons are only logged."""
        problems: list[Exception] = []
        for authenticate in (self._by_certificate, self._by_bearer, self._by_websocket):
            try:
                user = await authenticate(credentials)
            except (BadCredentials, ReviewUnavailable) as err:
                problems.append(err)
                continue
            if user is not None:
                return _with_authenticated_group(user)
        if problems:
            log.v(2).info("Unable to authenticate the request", errors=[str(problem) for problem in problems])
            return None
        return ANONYMOUS_USER if self._anonymous else None

    async def _by_certificate(self, credentials: RequestCredentials) -> User | None:
        return self._certificates.user(credentials) if self._certificates is not None else None

    async def _by_bearer(self, credentials: RequestCredentials) -> User | None:
        token = bearer_token(credentials.authorization)
        return await self._tokens.user(token) if token and self._tokens is not None else None

    async def _by_websocket(self, credentials: RequestCredentials) -> User | None:
        if credentials.protocols is None or self._tokens is None:
            return None
        token = websocket_token(credentials.protocols)
        return await self._tokens.user(token) if token else None


def _with_authenticated_group(user: User) -> User:
    """Return the user with the group system:authenticated added, unless anonymous or unauthenticated."""
    if user.name == ANONYMOUS or AUTHENTICATED in user.groups or UNAUTHENTICATED in user.groups:
        return user
    return user.with_group(AUTHENTICATED)


class AuthConfigError(Exception):
    """Raised when authentication, authorization or TLS cannot be configured; one line, cause and remedy."""


def make_authenticator(
    config: KubeletConfiguration,
    gates: FeatureGates,
    client: ApiClient | None,
    scope: TaskScope,
    metrics: ServerMetrics,
) -> Authenticator:
    """Return the configured authenticator. Raises AuthConfigError."""
    authentication = config.authentication
    certificates, tokens = None, None
    if authentication.x509.client_ca_file:
        try:
            certificates = ClientCertificates(
                Path(authentication.x509.client_ca_file),
                metrics,
                reads_uid=gates.enabled("AllowParsingUserUIDFromCertAuth"),
            )
        except (BadAuthorities, OpensslMissing) as err:
            raise AuthConfigError(str(err)) from err
    if authentication.webhook.enabled:
        if client is None:
            raise AuthConfigError(
                "authentication.webhook needs an API server: set authentication.webhook.enabled to false "
                "to run standalone"
            )
        tokens = TokenReviews(client, scope, authentication.webhook.cache_ttl.seconds, metrics)
    if certificates is None and tokens is None and not authentication.anonymous.enabled:
        raise AuthConfigError(
            "nobody could use the API: enable authentication.x509 (clientCAFile), authentication.webhook or "
            "authentication.anonymous, or set enableServer to false"
        )
    return Authenticator(certificates, tokens, anonymous=authentication.anonymous.enabled)


def make_authorizer(
    config: KubeletConfiguration,
    client: ApiClient | None,
    node_name: Callable[[], str],
    scope: TaskScope,
    metrics: ServerMetrics,
) -> Authorizer:
    """Return the configured authorizer. Raises AuthConfigError."""
    authorization = config.authorization
    if authorization.mode == "AlwaysAllow":
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
        allowed_ttl_seconds=authorization.webhook.cache_authorized_ttl.seconds,
        denied_ttl_seconds=authorization.webhook.cache_unauthorized_ttl.seconds,
    )
