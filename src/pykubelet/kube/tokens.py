"""Tokens of service accounts, bound to the pod that uses them.

The API server issues them for a while; they are due for renewal when four fifths of that are over or
after a day, whichever comes first. They are kept by `pods/token_cache.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from pykubelet.api.core import BoundObjectReference, TokenRequest, TokenRequestSpec
from pykubelet.api.meta import ObjectMeta
from pykubelet.api.pod import Pod
from pykubelet.kube.client import ApiClient
from pykubelet.kube.errors import BadAnswer
from pykubelet.kube.resources import SERVICE_ACCOUNTS

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
        raise BadAnswer(
            f"the API server gave no token for service account {pod.metadata.namespace}/{account}"
        )
    life = answer.spec.expiration_seconds or seconds
    return ServiceToken(answer.status.token, expires.timestamp() - life, expires.timestamp())
