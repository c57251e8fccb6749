"""Credential providers that are asked in the name of a pod's service account, as real programs."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from pykubelet.api.core import ServiceAccount
from pykubelet.api.duration import Duration
from pykubelet.api.meta import ObjectMeta
from pykubelet.api.pod import Pod
from pykubelet.images.credential_provider import (
    CredentialProvider,
    ProviderPlugins,
    ProviderResult,
    TokenAttributes,
)
from pykubelet.images.credentials import ServiceAccountCoordinates
from pykubelet.images.metrics import ImageMetrics
from pykubelet.objects.base import ObjectError
from pykubelet.objects.cluster_objects import ClusterObjects
from pykubelet.util.tasks import TaskScope
from tests.support.image_service import a_pod

V1 = "credentialprovider.kubelet.k8s.io/v1"
REPOSITORY = "registry.example.com/team/app"


class Accounts(ClusterObjects):
    """Accounts of a cluster that is being scripted."""

    def __init__(self) -> None:
        self.annotations = {"example.com/role": "puller", "example.com/secret": "x"}
        self.uid = "sa-1"
        self.asked: list[tuple[str, int, str]] = []
        self.broken = ""

    async def service_account(self, pod: Pod) -> ServiceAccount:
        if self.broken == "account":
            raise ObjectError('serviceaccounts "builder" not found')
        return ServiceAccount(metadata=ObjectMeta(uid=self.uid, annotations=self.annotations))

    async def token(self, pod: Pod, *, audience: str, seconds: int, account_uid: str = "") -> str:
        if self.broken == "token":
            raise ObjectError("failed to fetch token: no")
        self.asked.append((audience, seconds, account_uid))
        return f"token-of-{pod.uid}"


@pytest.fixture
def accounts() -> Accounts:
    return Accounts()


@pytest.fixture
async def scope() -> AsyncIterator[TaskScope]:
    async with TaskScope() as scope:
        yield scope


class Plugin:
    """A provider whose program keeps every request and gives the token's pod as the user."""

    def __init__(self, folder: Path, scope: TaskScope, accounts: Accounts, **options: Any) -> None:
        self.log = folder / "requests"
        password = options.pop("password", "hunter2")
        response = {
            "kind": "CredentialProviderResponse",
            "apiVersion": V1,
            "cacheKeyType": "Registry",
            "auth": {"registry.example.com": {"username": "user", "password": password}},
        }
        program = folder / "helper"
        program.write_text(f"#!/bin/sh\ncat >> {self.log}\nprintf '%s' '{json.dumps(response)}'\n")
        program.chmod(0o755)
        attributes: dict[str, Any] = {
            "service_account_token_audience": "registry",
            "cache_type": "ServiceAccount",
            "require_service_account": True,
        }
        provider = CredentialProvider(
            name="helper",
            match_images=["registry.example.com"],
            default_cache_duration=Duration.from_seconds(60),
            api_version=V1,
            token_attributes=TokenAttributes(**(attributes | options)),
        )
        self._plugins = ProviderPlugins(
            [provider], folder, scope, ImageMetrics(CollectorRegistry()), accounts
        )

    async def lookup(self, uid: str = "one", account: str = "builder") -> ProviderResult:
        pod = a_pod("app", uid=uid)
        pod.spec.service_account_name = account
        return await self._plugins.lookup(REPOSITORY, pod)

    @property
    def requests(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.log.read_text().splitlines()] if self.log.exists() else []


async def test_provider_lookup_passes_token_and_annotations(
    tmp_path: Path, scope: TaskScope, accounts: Accounts
) -> None:
    plugin = Plugin(
        tmp_path,
        scope,
        accounts,
        required_service_account_annotation_keys=["example.com/role"],
        optional_service_account_annotation_keys=["example.com/absent"],
    )
    found = await plugin.lookup()
    assert (len(found.credentials), found.failures) == (1, [])
    (request,) = plugin.requests
    assert request["serviceAccountToken"] == "token-of-one"
    assert request["serviceAccountAnnotations"] == {"example.com/role": "puller"}
    assert accounts.asked == [("registry", 3600, "sa-1")]


async def test_provider_lookup_credentials_carry_service_account_coordinates(
    tmp_path: Path, scope: TaskScope, accounts: Accounts
) -> None:
    plugin = Plugin(tmp_path, scope, accounts, require_service_account=False)
    for _ in ("asked", "cached"):
        [credentials] = (await plugin.lookup()).credentials
        assert credentials.source == ServiceAccountCoordinates("sa-1", "default", "builder")
    assert len(plugin.requests) == 1
    [credentials] = (await plugin.lookup(account="")).credentials
    assert credentials.source is None


@pytest.mark.parametrize(
    ("cache_type", "second", "runs"),
    [
        ("ServiceAccount", {"uid": "two"}, 1),
        ("ServiceAccount", {"uid": "two", "account": "other"}, 2),
        ("Token", {"uid": "two"}, 2),
        ("Token", {"uid": "one"}, 1),
    ],
)
async def test_provider_cache_type_decides_sharing(
    tmp_path: Path, scope: TaskScope, accounts: Accounts, cache_type: str, second: dict[str, str], runs: int
) -> None:
    plugin = Plugin(tmp_path, scope, accounts, cache_type=cache_type)
    await plugin.lookup()
    assert len((await plugin.lookup(**second)).credentials) == 1
    assert len(plugin.requests) == runs


async def test_provider_cache_recreated_service_account_is_not_shared(
    tmp_path: Path, scope: TaskScope, accounts: Accounts
) -> None:
    plugin = Plugin(tmp_path, scope, accounts)
    await plugin.lookup()
    accounts.uid = "sa-2"
    await plugin.lookup()
    assert len(plugin.requests) == 2


async def test_provider_lookup_service_account_requirements_unmet_is_skipped(
    tmp_path: Path, scope: TaskScope, accounts: Accounts
) -> None:
    plugin = Plugin(
        tmp_path, scope, accounts, required_service_account_annotation_keys=["example.com/opt-in"]
    )
    assert await plugin.lookup() == ProviderResult([], [])
    assert await plugin.lookup(account="") == ProviderResult([], [])
    assert plugin.requests == []
    relaxed = Plugin(tmp_path, scope, accounts, require_service_account=False)
    assert len((await relaxed.lookup(account="")).credentials) == 1
    assert "serviceAccountToken" not in relaxed.requests[0]


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        ("account", 'failed to get service account: serviceaccounts "builder" not found'),
        ("token", "failed to get service account token: failed to fetch token: no"),
    ],
)
async def test_provider_lookup_account_or_token_error_is_reported(
    tmp_path: Path, scope: TaskScope, accounts: Accounts, broken: str, words: str
) -> None:
    accounts.broken = broken
    found = await Plugin(tmp_path, scope, accounts).lookup()
    assert found.credentials == []
    assert found.failures == [f"credential provider helper failed: {words}"]


@pytest.mark.parametrize(("cache_type", "good"), [("ServiceAccount", False), ("Token", True)])
async def test_provider_lookup_token_as_password_requires_token_cache(
    tmp_path: Path, scope: TaskScope, accounts: Accounts, cache_type: str, good: bool
) -> None:
    plugin = Plugin(tmp_path, scope, accounts, cache_type=cache_type, password="token-of-one")
    found = await plugin.lookup()
    assert (bool(found.credentials), bool(found.failures)) == (good, not good)
    assert "token-of-one" not in str(found.failures)
