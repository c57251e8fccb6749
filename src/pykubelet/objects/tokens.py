"""Tokens of service accounts, kept until a new one is due.

Volumes and plugins ask again and again and get the same token until four fifths of its life are
over, or a day. A token that cannot be renewed is given out for as long as it is valid: the API
server may be back before its end. A pod's tokens go with the pod.

Tokens of service accounts, bound to the pod that uses them.

The API server issues them for a while; they are due for renewal when four fifths of that are over or
after a day, whichever comes first. They are kept by `pods/token_cache.py`.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from pykubelet.api.core import BoundObjectReference, TokenRequest, TokenRequestSpec
from pykubelet.api.meta import ObjectMeta
from pykubelet.api.pod import Pod
from pykubelet.apiserver.client import SERVICE_ACCOUNTS, ApiClient
from pykubelet.apiserver.errors import InvalidResponse, KubeError
from pykubelet.logs import get_logger
from pykubelet.objects.base import ObjectError, err_text, until_seen
from pykubelet.util.backoff import ErrorLogLimiter

log = get_logger(__name__)
LONGEST_SECONDS = 24 * 3600.0
JITTER_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class ServiceToken:
    """A token and its life, in seconds since 1970."""

    token: str = field(repr=False)
    issued: float
    expires: float

    def is_due(self, now: float, chance: float = 0.0) -> bool:
        """Whether a new one should be had; `chance` from 0 to 1 makes it up to ten seconds earlier."""
        early = chance * JITTER_SECONDS
        day = self.issued + LONGEST_SECONDS - early
        most = self.expires - (self.expires - self.issued) / 5 - early
        return now > min(day, most)

    def is_expired(self, now: float) -> bool:
        """Whether nobody accepts it any more."""
        return now > self.expires


async def request_token(
    client: ApiClient,
    pod: Pod,
    account: str,
    *,
    audiences: Sequence[str] = (),
    seconds: int = 3600,
    account_uid: str = "",
) -> ServiceToken:
    """Have a token issued for a pod; it ends with the pod. Raises KubeError.

    Without audiences it is for the API server itself, which may give another life than asked for.
    With an `account_uid` it is for that very account, not for a later one of the same name.
    """
    bound = BoundObjectReference(kind="Pod", api_version="v1", name=pod.metadata.name, uid=pod.uid)
    wanted = TokenRequest(
        metadata=ObjectMeta(uid=account_uid),
        spec=TokenRequestSpec(audiences=list(audiences), expiration_seconds=seconds, bound_object_ref=bound),
    )
    answer = await client.create_below(
        SERVICE_ACCOUNTS,
        account,
        pod.metadata.namespace,
        "token",
        wanted,
        api_version="authentication.k8s.io/v1",
    )
    expires = answer.status.expiration_timestamp
    if not answer.status.token or expires is None:
        raise InvalidResponse(
            f"the API server gave no token for service account {pod.metadata.namespace}/{account}"
        )
    life = answer.spec.expiration_seconds or seconds
    return ServiceToken(answer.status.token, expires.timestamp() - life, expires.timestamp())


class TokenCache:
    """The tokens of the node's pods; `clock` gives seconds since 1970."""

    def __init__(
        self,
        client: ApiClient,
        *,
        clock: Callable[[], float] = time.time,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self._client = client
        self._clock = clock
        self._chance = chance
        self._kept: dict[_Key, _Kept] = {}
        self._complaints = ErrorLogLimiter(log, "Couldn't update token")

    async def get(
        self, pod: Pod, *, audiences: tuple[str, ...] = (), seconds: int = 3600, account_uid: str = ""
    ) -> str:
        """Give a token of the pod's service account, bound to the pod; raises ObjectError."""
        key = _Key(pod.uid, pod.spec.service_account_name, audiences, seconds, account_uid)
        kept = self._kept.setdefault(key, _Kept())
        # Whoever asks for the same meanwhile waits for the answer instead of asking.
        async with kept.turn:
            if kept.token is None or kept.token.is_due(self._clock(), self._chance()):
                await self._renew(pod, key, kept)
            assert kept.token is not None
            return kept.token.token

    def forget(self, uid: str) -> None:
        """Drop the tokens of a pod that is gone."""
        for key in [key for key in self._kept if key.uid == uid]:
            del self._kept[key]

    def drop_expired(self) -> None:
        """Drop tokens that nobody accepts any more."""
        now = self._clock()
        for key, kept in list(self._kept.items()):
            if not kept.turn.locked() and (kept.token is None or kept.token.is_expired(now)):
                del self._kept[key]

    async def _renew(self, pod: Pod, key: _Key, kept: _Kept) -> None:
        """Have a new token; a failure is raised only when the old one is of no use any more."""
        try:
            kept.token = await until_seen(
                lambda: request_token(
                    self._client,
                    pod,
                    key.account,
                    audiences=key.audiences,
                    seconds=key.seconds,
                    account_uid=key.account_uid,
                )
            )
        except KubeError as err:
            if kept.token is None:
                raise ObjectError(f"failed to fetch token: {err_text(err)}") from err
            if kept.token.is_expired(self._clock()):
                raise ObjectError(
                    f"token of service account {pod.metadata.namespace}/{key.account} "
                    f"expired and refresh failed: {err_text(err)}"
                ) from err
            self._complaints.failed(err, asyncio.get_running_loop().time())
        else:
            self._complaints.succeeded(asyncio.get_running_loop().time())


class _Key(NamedTuple):
    uid: str
    account: str
    audiences: tuple[str, ...]
    seconds: int
    account_uid: str


@dataclass(slots=True, eq=False)
class _Kept:
    token: ServiceToken | None = None
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
