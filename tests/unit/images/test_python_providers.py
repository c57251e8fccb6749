"""Registry credentials by third-party code."""

import asyncio
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from pykubelet.api.meta import ObjectMeta
from pykubelet.api.pod import Pod
from pykubelet.images.credential_provider import CredentialPlugin, ProviderPlugins, ProviderResult
from pykubelet.images.credentials import Credentials, SecretCoordinates
from pykubelet.images.metrics import ImageMetrics
from pykubelet.images.python_providers import MAX_CALLS, MAX_REGISTRIES, PythonProvider, installed_providers
from pykubelet.util.tasks import TaskScope

REPOSITORY = "registry.example.com/team/app"
POD = Pod(metadata=ObjectMeta(name="web", namespace="ns", uid="u1"))


async def lookup(function: Any) -> ProviderResult:
    async with TaskScope() as tasks:
        return await plugins(tasks, PythonProvider(function, "mine", tasks)).lookup(REPOSITORY, POD)


def plugins(tasks: TaskScope, *providers: CredentialPlugin) -> ProviderPlugins:
    return ProviderPlugins(
        (), Path("/nonexistent"), tasks, ImageMetrics(CollectorRegistry()), None, providers
    )


async def test_lookup_function_returns_matching_credentials_of_node() -> None:
    asked: list[str] = []
    forged = Credentials("node", "s3cret", source=SecretCoordinates("u", "ns", "secret"))

    def function(repository: str) -> dict[str, Credentials]:
        asked.append(repository)
        return {"registry.example.com": forged, "other.example.com": Credentials("x", "y")}

    found = await lookup(function)
    assert asked == [REPOSITORY]
    assert found == ProviderResult([Credentials("node", "s3cret")], [])
    assert found.credentials[0].source is None


def raising(repository: str) -> dict[str, Credentials]:
    raise ValueError("the password hunter2 was wrong")


@pytest.mark.parametrize(
    ("function", "failure"),
    [
        (raising, "it raised ValueError"),
        (lambda repository: None, "it must return a mapping"),
        (
            lambda repository: {str(n): Credentials() for n in range(MAX_REGISTRIES + 1)},
            "at most 1000 registries",
        ),
        (lambda repository: {"r": ("user", "hunter2")}, "it must return Credentials by registry"),
        (lambda repository: {"r": Credentials("u", b"hunter2")}, "its credentials must be text"),  # type: ignore[arg-type]
        (lambda repository: {"r": Credentials("u", "hunter2" * 10_000)}, "its credentials must be text"),
    ],
)
async def test_lookup_broken_function_is_failure_without_secrets(
    function: Any, failure: str, caplog: pytest.LogCaptureFixture
) -> None:
    found = await lookup(function)
    assert found.credentials == []
    (text,) = found.failures
    assert text.startswith("credential provider mine failed: ")
    assert failure in text
    assert "hunter2" not in text + caplog.text


async def test_lookup_failing_function_keeps_credentials_of_others() -> None:
    async with TaskScope() as tasks:
        good = PythonProvider(lambda repository: {"*.example.com": Credentials("a", "b")}, "good", tasks)
        found = await plugins(tasks, PythonProvider(raising, "bad", tasks), good).lookup(REPOSITORY, POD)
    assert found.credentials == [Credentials("a", "b")]
    assert len(found.failures) == 1


async def test_lookup_hanging_function_times_out_and_threads_are_limited() -> None:
    release = threading.Event()
    calls: list[str] = []

    def function(repository: str) -> dict[str, Credentials]:
        calls.append(repository)
        release.wait()
        return {}

    try:
        async with TaskScope() as tasks:
            hanging = plugins(tasks, PythonProvider(function, "mine", tasks, timeout=0.01))
            for number in range(MAX_CALLS + 3):
                found = await hanging.lookup(f"{REPOSITORY}{number}", POD)
                expected = "did not return within 0.01 s" if number < MAX_CALLS else "calls have not returned"
                assert expected in found.failures[0]
    finally:
        release.set()
    assert len(calls) == MAX_CALLS


async def test_lookup_concurrent_pulls_of_repository_share_one_call() -> None:
    release, calls = threading.Event(), []

    def function(repository: str) -> dict[str, Credentials]:
        calls.append(repository)
        release.wait()
        return {"registry.example.com": Credentials("a", "b")}

    async with TaskScope() as tasks:
        shared = plugins(tasks, PythonProvider(function, "mine", tasks))
        lookups = [asyncio.ensure_future(shared.lookup(REPOSITORY, POD)) for _ in range(5)]
        for _ in range(10):
            await asyncio.sleep(0)
        release.set()
        found = await asyncio.gather(*lookups)
    assert found == [ProviderResult([Credentials("a", "b")], [])] * 5
    assert calls == [REPOSITORY]


@dataclass
class Entry:
    name: str
    loaded: Any
    value: str = "their.module:login"

    def load(self) -> Any:
        if isinstance(self.loaded, Exception):
            raise self.loaded
        return self.loaded


async def test_installed_providers_broken_entries_are_skipped(caplog: pytest.LogCaptureFixture) -> None:
    async with TaskScope() as tasks:
        entries = [
            Entry("b", raising),
            Entry("c", ImportError("no module")),
            Entry("a", raising),
            Entry("d", 5),
        ]
        assert [provider.name for provider in installed_providers(tasks, entries)] == ["a", "b"]
    assert caplog.text.count("Failed to load credential provider") == 2
