"""Credential providers as real programs."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from pykubelet.api.duration import Duration
from pykubelet.api.pod import Pod
from pykubelet.images import credential_provider as provider_exec
from pykubelet.images.credential_provider import (
    CredentialProvider,
    ExecEnvVar,
    ProviderError,
    ProviderPlugins,
    ProviderResult,
    TokenAttributes,
    run_provider,
)
from pykubelet.images.credentials import Credentials
from pykubelet.images.image_manager import ImageManager
from pykubelet.images.metrics import ImageMetrics
from pykubelet.images.puller import PullLimits
from pykubelet.podconfig.pod_history import PodHistory
from pykubelet.util.tasks import TaskScope
from tests.support.image_service import FakeImages, a_pod, a_sandbox, an_image

V1 = "credentialprovider.kubelet.k8s.io/v1"
REPOSITORY = "registry.example.com/team/app"
Write = Callable[..., CredentialProvider]


def answer(**changes: Any) -> str:
    return json.dumps(
        {
            "kind": "CredentialProviderResponse",
            "apiVersion": V1,
            "cacheKeyType": "Image",
            "auth": {"registry.example.com": {"username": "user", "password": "hunter2"}},
            **changes,
        }
    )


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write a program; it counts its runs in `<name>.runs`."""

    def make(script: str, name: str = "helper", **options: Any) -> CredentialProvider:
        program = tmp_path / name
        program.write_text(f"#!/bin/sh\necho run >> {program}.runs\n{script}\n")
        program.chmod(0o755)
        defaults: dict[str, Any] = {
            "match_images": ["registry.example.com", "*.other.example.com"],
            "default_cache_duration": Duration.from_seconds(60),
            "api_version": V1,
        }
        return CredentialProvider(name=name, **(defaults | options))

    return make


def runs(tmp_path: Path, name: str = "helper") -> int:
    log = tmp_path / f"{name}.runs"
    return len(log.read_text().splitlines()) if log.exists() else 0


def saying(text: str) -> str:
    return f"cat > /dev/null\ncat <<'END'\n{text}\nEND"


async def test_run_provider_passes_request_args_and_env(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INHERITED", "yes")
    monkeypatch.setenv("REPLACED", "old")
    provider = write(
        f'cat > {tmp_path}/request\necho "$@ $INHERITED $REPLACED" > {tmp_path}/setting\n' + saying(answer()),
        args=["get", "a b"],
        env=[ExecEnvVar(name="REPLACED", value="new")],
    )
    found = await run_provider(provider, tmp_path / "helper", REPOSITORY)
    assert json.loads((tmp_path / "request").read_text()) == {
        "kind": "CredentialProviderRequest",
        "apiVersion": V1,
        "image": REPOSITORY,
    }
    assert (tmp_path / "setting").read_text() == "get a b yes new\n"
    assert found.registries == {"registry.example.com": Credentials("user", "hunter2")}
    assert (found.cache_key, found.cache_duration) == ("Image", None)


@pytest.mark.parametrize("version", ["v1", "v1beta1", "v1alpha1"])
async def test_run_provider_all_api_versions_are_supported(
    write: Write, tmp_path: Path, version: str
) -> None:
    protocol = f"credentialprovider.kubelet.k8s.io/{version}"
    text = answer(apiVersion=protocol, cacheDuration="1m30s", cacheKeyType="Global", auth=None)
    found = await run_provider(write(saying(text), api_version=protocol), tmp_path / "helper", REPOSITORY)
    assert (found.registries, found.cache_key, found.cache_duration) == (
        {},
        "Global",
        Duration.from_seconds(90),
    )


async def test_run_provider_stdin_not_read_succeeds(write: Write, tmp_path: Path) -> None:
    found = await run_provider(write(f"echo '{answer()}'"), tmp_path / "helper", "x" * 200_000)
    assert found.registries


@pytest.mark.parametrize(
    ("script", "complaint"),
    [
        (saying(""), "not a valid CredentialProviderResponse"),
        (saying("hunter2"), "not a valid CredentialProviderResponse"),
        (saying("[]"), "not a valid CredentialProviderResponse"),
        (saying(answer(surprise="hunter2")), "not a valid CredentialProviderResponse"),
        (saying(answer(auth={"a": "hunter2"})), "not a valid CredentialProviderResponse"),
        (saying(answer(auth={"a": {"username": 1, "password": "hunter2"}})), "not a valid"),
        (saying(answer(cacheDuration="hunter2")), "not a valid CredentialProviderResponse"),
        (saying(answer(cacheKeyType="Planet")), "not a valid CredentialProviderResponse"),
        (saying(answer(cacheKeyType=None)), "its answer has no cacheKeyType"),
        (saying(answer(kind="Pod")), "its answer is a 'Pod'"),
        (saying(answer(apiVersion="v1")), "its answer has apiVersion 'v1', the request had " + V1),
        ("printf '\\377\\376'", "not a valid CredentialProviderResponse"),
        (saying(answer()) + "\necho no >&2; echo luck >&2; exit 3", "it failed with status 3: no luck"),
        ("exit 1", "it failed with status 1: it gave no reason"),
        ("kill -9 $$", "it failed with status -9"),
        ("head -c 3000000 /dev/zero >&2; exit 1", "it failed with status 1"),
    ],
)
async def test_run_provider_bad_response_or_exit_raises_without_secret(
    write: Write, tmp_path: Path, script: str, complaint: str
) -> None:
    provider = write(script)
    with pytest.raises(ProviderError) as caught:
        await run_provider(provider, tmp_path / "helper", REPOSITORY)
    assert complaint in str(caught.value)
    assert "hunter2" not in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 2000


async def test_run_provider_missing_binary_raises(write: Write, tmp_path: Path) -> None:
    provider = write("")
    (tmp_path / "helper").unlink()
    with pytest.raises(ProviderError, match="helper could not be started: No such file or directory"):
        await run_provider(provider, tmp_path / "helper", REPOSITORY)


def alive(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False


async def gone(pid: int) -> bool:
    async with asyncio.timeout(45):
        while alive(pid):
            await asyncio.sleep(0.01)
    return True


async def test_run_provider_endless_output_is_killed(write: Write, tmp_path: Path) -> None:
    provider = write(f"echo $$ > {tmp_path}/pid\nexec cat /dev/zero")
    started = time.monotonic()
    with pytest.raises(ProviderError, match="its answer is longer than 1024 KiB"):
        await run_provider(provider, tmp_path / "helper", REPOSITORY)
    assert time.monotonic() - started < 45, "not by its timeout"
    assert await gone(int((tmp_path / "pid").read_text()))


SLEEPY = "sleep 300 &\necho $! > {folder}/child\necho $$ > {folder}/pid\nwait"


async def test_run_provider_timeout_kills_process_and_children(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert provider_exec.TIMEOUT_SECONDS == 60
    monkeypatch.setattr(provider_exec, "TIMEOUT_SECONDS", 5.0)
    provider = write(SLEEPY.format(folder=tmp_path))
    with pytest.raises(ProviderError, match=r"it did not answer within 5 s"):
        await run_provider(provider, tmp_path / "helper", REPOSITORY)
    for name in ("pid", "child"):
        assert await gone(int((tmp_path / name).read_text()))


async def test_run_provider_cancelled_kills_process_and_children(write: Write, tmp_path: Path) -> None:
    provider = write(SLEEPY.format(folder=tmp_path))
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(5):
            await run_provider(provider, tmp_path / "helper", REPOSITORY)
    for name in ("pid", "child"):
        assert await gone(int((tmp_path / name).read_text()))


async def lookup(
    plugins: ProviderPlugins, repository: str = REPOSITORY, pod: Pod | None = None
) -> ProviderResult:
    return await plugins.lookup(repository, pod or a_pod("app"))


async def test_provider_lookup_runs_only_for_matching_images(
    write: Write, tmp_path: Path, scope: TaskScope, metrics: ImageMetrics
) -> None:
    plugins = ProviderPlugins([write(saying(answer()))], tmp_path, scope, metrics)
    assert await lookup(plugins, "quay.io/team/app") == ProviderResult([], [])
    assert await lookup(plugins, "registry.example.com:5000/app") == ProviderResult([], [])
    assert runs(tmp_path) == 0
    assert await lookup(plugins) == ProviderResult([Credentials("user", "hunter2")], [])
    assert await lookup(plugins, "a.other.example.com/app") == ProviderResult([], []), (
        "its answer does not fit"
    )
    assert runs(tmp_path) == 2


@pytest.mark.parametrize(
    ("scope_name", "expected"),
    [("Image", [1, 1, 2, 3]), ("Registry", [1, 1, 1, 2]), ("Global", [1, 1, 1, 1])],
)
async def test_provider_lookup_response_cached_by_cache_key_type(
    write: Write,
    tmp_path: Path,
    scope: TaskScope,
    metrics: ImageMetrics,
    scope_name: str,
    expected: list[int],
) -> None:
    plugins = ProviderPlugins([write(saying(answer(cacheKeyType=scope_name)))], tmp_path, scope, metrics)
    counts = []
    for repository in (
        "registry.example.com/a",
        "registry.example.com/a",
        "registry.example.com/b",
        "x.other.example.com/a",
    ):
        await lookup(plugins, repository)
        counts.append(runs(tmp_path))
    assert counts == expected


@pytest.mark.parametrize(
    ("said", "default", "expected"),
    [("0s", 60.0, 2), (None, 0.0, 2), (None, 60.0, 1), ("60s", 0.0, 1), ("100ms", 60.0, 2), ("-1s", 60.0, 2)],
)
async def test_provider_lookup_response_cached_for_cache_duration(
    write: Write,
    tmp_path: Path,
    scope: TaskScope,
    metrics: ImageMetrics,
    said: str | None,
    default: float,
    expected: int,
) -> None:
    provider = write(
        saying(answer(cacheDuration=said)), default_cache_duration=Duration.from_seconds(default)
    )
    plugins = ProviderPlugins([provider], tmp_path, scope, metrics)
    for _ in range(2):
        assert (await lookup(plugins)).credentials
        await asyncio.sleep(0.15)
    assert runs(tmp_path) == expected


async def test_provider_lookup_concurrent_pods_share_one_run(
    write: Write, tmp_path: Path, scope: TaskScope, metrics: ImageMetrics
) -> None:
    provider = write("sleep 0.3\n" + saying(answer(cacheDuration="0s")))
    plugins = ProviderPlugins([provider], tmp_path, scope, metrics)
    found = await asyncio.gather(*(lookup(plugins) for _ in range(20)))
    assert all(each.credentials for each in found)
    assert runs(tmp_path) == 1


async def test_provider_lookup_several_providers_merges_credentials_and_failures(
    write: Write, tmp_path: Path, scope: TaskScope, metrics: ImageMetrics, registry: CollectorRegistry
) -> None:
    wide = {"registry.example.com": {"username": "wide", "password": ""}}
    narrow = {"registry.example.com/team": {"username": "narrow", "password": ""}}
    providers = [
        write(saying(answer(auth=wide)), "wide"),
        write("echo out of luck >&2; exit 1", "broken"),
        write(saying(answer(auth=narrow)), "narrow"),
    ]
    found = await lookup(ProviderPlugins(providers, tmp_path, scope, metrics))
    assert [credentials.username for credentials in found.credentials] == ["narrow", "wide"]
    assert found.failures == ["credential provider broken failed: it failed with status 1: out of luck"]
    for name, failures in (("wide", None), ("broken", 1)):
        labels = {"plugin_name": name}
        assert (
            registry.get_sample_value("kubelet_credential_provider_plugin_errors_total", labels) == failures
        )
        assert registry.get_sample_value("kubelet_credential_provider_plugin_duration_count", labels) == 1


async def test_provider_lookup_failure_is_not_cached(
    write: Write, tmp_path: Path, scope: TaskScope, metrics: ImageMetrics
) -> None:
    provider = write(f"test -e {tmp_path}/ready || exit 1\n" + saying(answer()))
    plugins = ProviderPlugins([provider], tmp_path, scope, metrics)
    assert (await lookup(plugins)).failures
    (tmp_path / "ready").touch()
    assert (await lookup(plugins)).credentials


@pytest.mark.parametrize(
    ("required", "account", "asked", "failed"),
    [(True, "", 0, False), (False, "", 1, False), (True, "default", 0, True), (False, "default", 0, True)],
)
async def test_provider_lookup_service_account_token_without_api_server_fails(
    write: Write,
    tmp_path: Path,
    scope: TaskScope,
    metrics: ImageMetrics,
    required: bool,
    account: str,
    asked: int,
    failed: bool,
) -> None:
    token = TokenAttributes(
        service_account_token_audience="x", cache_type="Token", require_service_account=required
    )
    plugins = ProviderPlugins([write(saying(answer()), token_attributes=token)], tmp_path, scope, metrics)
    pod = a_pod("app")
    pod.spec.service_account_name = account
    found = await lookup(plugins, pod=pod)
    assert (runs(tmp_path), bool(found.credentials), bool(found.failures)) == (asked, asked == 1, failed)


async def test_ensure_image_uses_providers_and_reports_failures(
    write: Write,
    tmp_path: Path,
    scope: TaskScope,
    metrics: ImageMetrics,
    journal: PodHistory,
    service: FakeImages,
) -> None:
    image = f"{REPOSITORY}:1"
    service.offered[image] = an_image(image)
    service.logins = {("user", "hunter2")}
    providers = [write(saying(answer())), write("exit 7", "broken")]
    puller = ImageManager(
        service,
        journal,
        scope,
        limits=PullLimits(),
        metrics=metrics,
        plugins=ProviderPlugins(providers, tmp_path, scope, metrics),
    )
    pod = a_pod(image)
    assert (await puller.ensure(pod, pod.spec.containers[0], a_sandbox(pod))).id
    notes = [note.text for note in journal.timeline(pod.uid)]
    assert "credential provider broken failed: it failed with status 7: it gave no reason" in notes
    assert "hunter2" not in str(notes)
