"""Service account tokens bound to pods, and their cache.

Volumes and plugins request a token for every use and get the cached one until its renewal is due: when 80 %
of its lifetime are over, or after a day. If the renewal fails, the old token is returned until it expires,
because the API server may recover before. The tokens of a pod are dropped with the pod; the cache is in
memory only.
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
from pykubelet.objects.base import ObjectError
from pykubelet.objects.fetch import err_text, retry_until_observed
from pykubelet.util.backoff import ErrorLogLimiter

log = get_logger(__name__)
MAX_AGE_SECONDS = 24 * 3600.0
JITTER_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class ServiceToken:
    """A token with its validity, in Unix seconds."""

    token: str = field(repr=False)
    issued: float
    expires: float

    def is_due(self, now: float, jitter: float = 0.0) -> bool:
        """Return whether renewal is due; `jitter` from 0 to 1 makes it due up to ten seconds earlier."""
        early = jitter * JITTER_SECONDS
        max_age = self.issued + MAX_AGE_SECONDS - early
        last_fifth = self.expires - (self.expires - self.issued) / 5 - early
        return now > min(max_age, last_fifth)

    def is_expired(self, now: float) -> bool:
        """Return whether the token has expired."""
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
    """Request a token bound to a pod; it becomes invalid with the pod. Raises KubeError.

    Without audiences it is for the API server, which may grant another lifetime than requested. With an
    `account_uid` it is for the account with this UID, not for a later one of the same name.
    """
    bound = BoundObjectReference(kind="Pod", api_version="v1", name=pod.metadata.name, uid=pod.uid)
    token_request = TokenRequest(
        metadata=ObjectMeta(uid=account_uid),
        spec=TokenRequestSpec(audiences=list(audiences), expiration_seconds=seconds, bound_object_ref=bound),
    )
    response = await client.create_below(
        SERVICE_ACCOUNTS,
        account,
        pod.metadata.namespace,
        "token",
        token_request,
        api_version="authentication.k8s.io/v1",
    )
    expires = response.status.expiration_timestamp
    if not response.status.token or expires is None:
        raise InvalidResponse(
            f"the API server gave no token for service account {pod.metadata.namespace}/{account}"
        )
    life = response.spec.expiration_seconds or seconds
    return ServiceToken(response.status.token, expires.timestamp() - life, expires.timestamp())


class TokenCache:
    """Cache of the tokens of the node's pods; `clock` returns Unix time in seconds."""

    def __init__(
        self,
        client: ApiClient,
        *,
        clock: Callable[[], float] = time.time,
        rng: Callable[[], float] = random.random,
    ) -> None:
        self._client = client
        self._clock = clock
        self._rng = rng
        self._entries: dict[_Key, _CacheEntry] = {}
        self._error_log = ErrorLogLimiter(log, "Couldn't update token")

    async def get(
        self, pod: Pod, *, audiences: tuple[str, ...] = (), seconds: int = 3600, account_uid: str = ""
    ) -> str:
        """Return a token of the pod's service account, bound to the pod. Raises ObjectError."""
        key = _Key(pod.uid, pod.spec.service_account_name, audiences, seconds, account_uid)
        entry = self._entries.setdefault(key, _CacheEntry())
        # Concurrent callers share one token request.
        async with entry.lock:
            if entry.token is None or entry.token.is_due(self._clock(), self._rng()):
                await self._renew(pod, key, entry)
            assert entry.token is not None
            return entry.token.token

    def forget(self, uid: str) -> None:
        """Drop the tokens of a removed pod."""
        for key in [key for key in self._entries if key.uid == uid]:
            del self._entries[key]

    def drop_expired(self) -> None:
        """Drop expired tokens."""
        now = self._clock()
        for key, entry in list(self._entries.items()):
            if not entry.lock.locked() and (entry.token is None or entry.token.is_expired(now)):
                del self._entries[key]

    async def _renew(self, pod: Pod, key: _Key, entry: _CacheEntry) -> None:
        """Request a new token. Raises ObjectError only if there is no old one or it has expired."""
        try:
            entry.token = await retry_until_observed(
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
            if entry.token is None:
                raise ObjectError(f"failed to fetch token: {err_text(err)}") from err
            if entry.token.is_expired(self._clock()):
                raise ObjectError(
                    f"token of service account {pod.metadata.namespace}/{key.account} "
                    f"expired and refresh failed: {err_text(err)}"
                ) from err
            self._error_log.failed(err, asyncio.get_running_loop().time())
        else:
            self._error_log.succeeded(asyncio.get_running_loop().time())


class _Key(NamedTuple):
    uid: str
    account: str
    audiences: tuple[str, ...]
    seconds: int
    account_uid: str


@dataclass(slots=True, eq=False)
class _CacheEntry:
    token: ServiceToken | None = None
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
