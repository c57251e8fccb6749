"""Credential providers: programs that know the logins of registries whose passwords change.

Each program is asked only for images that match its configuration, once at a time for the same
image, and not again while its last answer is good. A program that fails is as if it knew nothing:
the pull is tried without it, and the failure is in the log and in the pod's timeline.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from pykubelet.api.pod import Pod
from pykubelet.images.keyring import Credentials, CredentialSource, Keyring, Registries, registry_matches
from pykubelet.images.metrics import ImageMetrics
from pykubelet.images.provider_accounts import Identity, PodAccounts, identify
from pykubelet.images.provider_config import CredentialProvider
from pykubelet.images.provider_exec import Answer, CacheKey, ProviderError, ask_provider
from pykubelet.images.shared import SharedCalls, Stopped
from pykubelet.logs import get_logger
from pykubelet.tasks import TaskScope

log = get_logger(__name__)


class Found(NamedTuple):
    """What the providers had for an image."""

    credentials: list[Credentials]
    failures: list[str]
    """One line for each provider that failed."""


class ProviderPlugins:
    """All credential providers of the node."""

    def __init__(
        self,
        providers: Sequence[CredentialProvider],
        bin_dir: Path,
        tasks: TaskScope,
        metrics: ImageMetrics,
        accounts: PodAccounts | None = None,
    ) -> None:
        self._plugins = [_Plugin(provider, bin_dir, tasks, metrics, accounts) for provider in providers]

    async def lookup(self, repository: str, pod: Pod) -> Found:
        """Ask every provider that is for this repository, all at the same time."""
        asked = [plugin for plugin in self._plugins if plugin.is_for(repository)]
        async with asyncio.TaskGroup() as tasks:
            answers = [tasks.create_task(_try(plugin, repository, pod)) for plugin in asked]
        keyring, failures = Keyring(), []
        for answer in answers:
            match answer.result():
                case str() as failure:
                    failures.append(failure)
                case registries, source:
                    keyring.add(registries, source)
        return Found(keyring.lookup(repository), failures)


_Tracked = tuple[Registries, CredentialSource | None]
"""A provider's credentials, and the service account whose token it received."""


async def _try(plugin: _Plugin, repository: str, pod: Pod) -> _Tracked | str:
    try:
        return await plugin.registries(repository, pod)
    except (ProviderError, Stopped) as err:
        log.error(
            err,
            "A credential provider failed; going on without it",
            provider=plugin.name,
            image=repository,
            pod=pod.full_name,
        )
        return f"credential provider {plugin.name} failed: {err}"


class _Kept(NamedTuple):
    registries: Registries
    until: float


class _Plugin:
    """One provider and what it said before."""

    def __init__(
        self,
        provider: CredentialProvider,
        bin_dir: Path,
        tasks: TaskScope,
        metrics: ImageMetrics,
        accounts: PodAccounts | None,
    ) -> None:
        self.name = provider.name
        self._provider = provider
        self._program = bin_dir / provider.name
        self._metrics = metrics
        self._accounts = accounts
        self._calls: SharedCalls[tuple[str, str], Registries] = SharedCalls(
            tasks, f"credential-provider-{self.name}"
        )
        self._kept: dict[_Place, _Kept] = {}

    def is_for(self, repository: str) -> bool:
        """Whether this provider is for such an image."""
        return any(registry_matches(pattern, repository) for pattern in self._provider.match_images)

    async def registries(self, repository: str, pod: Pod) -> _Tracked:
        """Give the provider's answer, a kept one if there is one; raises ProviderError."""
        identity = await identify(pod, self._provider.token_attributes, self._accounts)
        if identity is None:
            log.v(5).info("Not asking a credential provider", provider=self.name, pod=pod.full_name)
            return {}, None
        now, owner = _now(), identity.cache_key(self._provider.token_attributes)
        for scope in ("Image", "Registry", "Global"):
            kept = self._kept.get(_place(scope, repository, owner))
            if kept is not None and now < kept.until:
                return kept.registries, identity.source
        call = (repository, identity.call_key())
        asked = await self._calls.run(call, lambda: self._ask(repository, identity, owner))
        return asked, identity.source

    async def _ask(self, repository: str, identity: Identity, owner: str) -> Registries:
        log.v(5).info("Asking credential provider", provider=self.name, image=repository)
        started = _now()
        failed = True
        try:
            answer = await ask_provider(
                self._provider, self._program, repository, identity.token, identity.annotations
            )
            failed = False
        finally:
            self._metrics.plugin_ran(self.name, _now() - started, failed=failed)
        self._check_no_echo(answer, identity)
        duration = answer.cache_duration
        if duration is None:
            duration = self._provider.default_cache_duration
        now = _now()
        self._kept = {key: kept for key, kept in self._kept.items() if now < kept.until}
        if duration is not None and duration > 0:
            until = now + duration.seconds
            self._kept[_place(answer.cache_key, repository, owner)] = _Kept(answer.registries, until)
        return answer.registries

    def _check_no_echo(self, answer: Answer, identity: Identity) -> None:
        """Refuse a pod's own token as a login where the answer is kept for others; raises ProviderError."""
        wanted = self._provider.token_attributes
        if wanted is None or not identity.token or wanted.cache_type == "Token":
            return
        if any(login.password == identity.token for login in answer.registries.values()):
            raise ProviderError(
                "it gave the service account's token as the password: write cacheType: Token for it"
            )


_Place = tuple[CacheKey, str, str]
"""Where an answer is kept: for what, for which of these, and for whom."""


def _place(scope: CacheKey, repository: str, owner: str) -> _Place:
    name = {"Image": repository, "Registry": repository.partition("/")[0], "Global": ""}[scope]
    return scope, name, owner


def _now() -> float:
    return asyncio.get_running_loop().time()
