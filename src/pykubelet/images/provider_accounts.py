"""The service account in whose name a credential provider is asked, where its configuration wants one.

The provider gets a token that is good for the provider's audience only, and those annotations of the
account that its configuration names. An account without a required annotation does not take part:
the provider is not asked at all then.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from pykubelet.api.core import ServiceAccount
from pykubelet.api.pod import Pod
from pykubelet.images.keyring import ServiceAccountCoordinates
from pykubelet.images.provider_config import TokenAttributes
from pykubelet.images.provider_exec import ProviderError
from pykubelet.pods.objects import ObjectError

TOKEN_SECONDS = 3600


class PodAccounts(Protocol):
    """The service accounts of pods, as an API server knows them: `pods.cluster_objects.ClusterObjects`."""

    async def service_account(self, pod: Pod) -> ServiceAccount:
        """Give the pod's service account; raises ObjectError."""

    async def token(self, pod: Pod, *, audience: str, seconds: int, account_uid: str) -> str:
        """Give a token of that very account, bound to the pod; raises ObjectError."""


@dataclass(frozen=True, slots=True)
class Identity:
    """Who asks a provider."""

    namespace: str
    name: str
    uid: str
    token: str = field(repr=False)
    annotations: Mapping[str, str]

    def cache_key(self, wanted: TokenAttributes | None) -> str:
        """Tell apart those who must not share an answer: accounts, or even tokens."""
        parts = [self.namespace, self.name, self.uid, *self._annotations()]
        if wanted is not None and wanted.cache_type == "Token":
            parts.append(self.fingerprint)
        return "\0".join(parts)

    def call_key(self) -> str:
        """Tell apart those for whom a provider must be run separately."""
        return "\0".join([self.fingerprint, *self._annotations()])

    @property
    def source(self) -> ServiceAccountCoordinates | None:
        """The service account, None when the provider received no token."""
        return ServiceAccountCoordinates(self.uid, self.namespace, self.name) if self.name else None

    @property
    def fingerprint(self) -> str:
        """What stands for the token where it must not be shown."""
        return hashlib.sha256(self.token.encode()).hexdigest()

    def _annotations(self) -> list[str]:
        return [part for pair in sorted(self.annotations.items()) for part in pair]


NOBODY = Identity("", "", "", "", {})
"""Who asks where no account is wanted, or the pod has none and need not."""


async def identify(pod: Pod, wanted: TokenAttributes | None, accounts: PodAccounts | None) -> Identity | None:
    """Give the identity to ask with; None when the provider is not to be asked. Raises ProviderError."""
    if wanted is None:
        return NOBODY
    name = pod.spec.service_account_name
    if not name:
        return None if wanted.require_service_account else NOBODY
    if accounts is None:
        raise ProviderError(
            f"it wants a token of service account {name}, "
            "which only an API server can give, and this agent runs without one"
        )
    try:
        account = await accounts.service_account(pod)
    except ObjectError as err:
        raise ProviderError(f"failed to get service account: {err}") from err
    given = account.metadata.annotations
    required = wanted.required_service_account_annotation_keys
    if not all(key in given for key in required):
        return None
    keys = [*required, *wanted.optional_service_account_annotation_keys]
    annotations = {key: given[key] for key in keys if key in given}
    try:
        token = await accounts.token(
            pod,
            audience=wanted.service_account_token_audience,
            seconds=TOKEN_SECONDS,
            account_uid=account.metadata.uid,
        )
    except ObjectError as err:
        raise ProviderError(f"failed to get service account token: {err}") from err
    return Identity(pod.metadata.namespace, name, account.metadata.uid, token, annotations)
