"""Who sends a request: by certificate, by bearer token, or nobody in particular.

The ways are tried in this order and the first that succeeds counts, also when an earlier one failed: a
certificate of a foreign authority does no harm beside a good token. But whoever shows something that
does not hold, and nothing that does, is refused even where anonymous requests are allowed.
"""

from __future__ import annotations

from pykubelet.logs import get_logger
from pykubelet.server.client_certs import ClientCertificates
from pykubelet.server.identity import (
    ANONYMOUS,
    AUTHENTICATED,
    NOBODY,
    UNAUTHENTICATED,
    BadCredentials,
    Shown,
    User,
    bearer_token,
    websocket_token,
)
from pykubelet.server.reviews import NoAnswer, TokenReviews

log = get_logger(__name__)


class Authenticator:
    """Finds out who sends a request; ways that are not configured are None."""

    def __init__(
        self, certificates: ClientCertificates | None, tokens: TokenReviews | None, *, anonymous: bool
    ) -> None:
        self._certificates = certificates
        self._tokens = tokens
        self._anonymous = anonymous

    @property
    def wants_certificates(self) -> bool:
        """Whether clients should be asked for a certificate."""
        return self._certificates is not None

    async def user(self, shown: Shown) -> User | None:
        """The sender; None when the request must be refused. Why is for the log only."""
        problems: list[Exception] = []
        for way in (self._by_certificate, self._by_bearer, self._by_websocket):
            try:
                user = await way(shown)
            except (BadCredentials, NoAnswer) as err:
                problems.append(err)
                continue
            if user is not None:
                return _with_standing(user)
        if problems:
            log.v(2).info("Unable to authenticate a request", errors=[str(problem) for problem in problems])
            return None
        return NOBODY if self._anonymous else None

    async def _by_certificate(self, shown: Shown) -> User | None:
        return self._certificates.user(shown) if self._certificates is not None else None

    async def _by_bearer(self, shown: Shown) -> User | None:
        token = bearer_token(shown.authorization)
        return await self._tokens.user(token) if token and self._tokens is not None else None

    async def _by_websocket(self, shown: Shown) -> User | None:
        if shown.protocols is None or self._tokens is None:
            return None
        token = websocket_token(shown.protocols)
        return await self._tokens.user(token) if token else None


def _with_standing(user: User) -> User:
    """Everybody who is somebody is in the group of the authenticated."""
    if user.name == ANONYMOUS or AUTHENTICATED in user.groups or UNAUTHENTICATED in user.groups:
        return user
    return user.with_group(AUTHENTICATED)
