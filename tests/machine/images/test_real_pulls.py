"""Pulls through a real containerd from real registries, open and with a password."""

from __future__ import annotations

import asyncio
import base64
import json
import re
import socket
import tempfile
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from pykubelet.api.duration import Duration
from pykubelet.api.pod import Pod
from pykubelet.cri import runtime_pb2 as pb
from pykubelet.cri.channel import CriMetrics
from pykubelet.cri.connect import RuntimeConnection, connect
from pykubelet.images.credential_provider import ProviderPlugins, load_providers
from pykubelet.images.credentials import NodeCredentials, PullSecret
from pykubelet.images.image_manager import ImageManager, PresentImage
from pykubelet.images.metrics import ImageMetrics, PullRecordMetrics
from pykubelet.images.pull_manager import PullManager, verification_policy
from pykubelet.images.pull_records import PullRecordFiles, PullRecords
from pykubelet.images.puller import ImageError, PullLimits
from pykubelet.podconfig.pod_history import PodHistory
from pykubelet.util.tasks import TaskScope
from tests.support.image_registry import PASSWORD, USER, Registry, running_registry
from tests.support.image_service import a_pod, a_sandbox
from tests.support.runtime import RunningRuntime

pytestmark = pytest.mark.machine

REFUSED = re.compile("401 Unauthorized|authorization failed|no basic auth credentials")
"""How containerd's versions tell it."""


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="pyk-registry-") as name:
        yield Path(name)


@pytest.fixture(scope="module")
def open_registry(folder: Path) -> Iterator[Registry]:
    with running_registry(folder / "open") as registry:
        yield registry


@pytest.fixture(scope="module")
def guarded_registry(folder: Path) -> Iterator[Registry]:
    with running_registry(folder / "guarded", protected=True) as registry:
        yield registry


@pytest.fixture
async def cri(
    private_runtime: RunningRuntime, registry: CollectorRegistry
) -> AsyncIterator[RuntimeConnection]:
    """The runtime; images that a test brings are removed."""
    async with await connect(
        private_runtime.endpoint, timeout=Duration.from_seconds(60), metrics=CriMetrics(registry)
    ) as client:
        before = {image.id for image in await client.images.list_images()}
        try:
            yield client
        finally:
            for image in await client.images.list_images():
                if image.id not in before:
                    await client.images.remove_image(pb.ImageSpec(image=image.id))


class Node:
    """A puller at the real runtime, with a clock that a test can move on."""

    def __init__(
        self,
        cri: RuntimeConnection,
        journal: PodHistory,
        scope: TaskScope,
        metrics: ImageMetrics,
        root_dir: Path,
        pull_manager: PullManager,
    ) -> None:
        self.ahead = 0.0
        self.journal = journal
        self.root_dir = root_dir
        self.puller = ImageManager(
            cri.images,
            journal,
            scope,
            limits=PullLimits(serialize=False, max_parallel=3, qps=100, burst=100),
            metrics=metrics,
            node_credentials=NodeCredentials(root_dir, root_dir).load,
            clock=lambda: asyncio.get_running_loop().time() + self.ahead,
            pull_manager=pull_manager,
        )

    async def ensure(self, pod: Pod, *secrets: PullSecret) -> PresentImage:
        return await self.puller.ensure(pod, pod.spec.containers[0], a_sandbox(pod), secrets)

    async def refusal(self, pod: Pod, *secrets: PullSecret) -> ImageError:
        with pytest.raises(ImageError) as caught:
            await self.ensure(pod, *secrets)
        return caught.value

    def reasons(self, pod: Pod) -> list[str]:
        return [event.reason for event in self.journal.events(pod.uid)]


@pytest.fixture
async def node(
    cri: RuntimeConnection,
    journal: PodHistory,
    scope: TaskScope,
    metrics: ImageMetrics,
    registry: CollectorRegistry,
    tmp_path: Path,
) -> Node:
    record_metrics = PullRecordMetrics(registry)
    records = PullRecords(PullRecordFiles(tmp_path), record_metrics, intents_size=10, pulled_size=10)
    policy = verification_policy("NeverVerifyPreloadedImages")
    manager = PullManager(records, policy, cri.images, scope, record_metrics)
    await manager.start()
    return Node(cri, journal, scope, metrics, tmp_path, manager)


@pytest.fixture
def name() -> str:
    """A repository that no other test uses."""
    return f"team/app-{uuid.uuid4().hex[:8]}"


def pull_secret(host: str, password: str = PASSWORD) -> PullSecret:
    auth = base64.b64encode(f"{USER}:{password}".encode()).decode()
    content = json.dumps({"auths": {f"http://{host}": {"auth": auth}}}).encode()
    return PullSecret("default", "login", "kubernetes.io/dockerconfigjson", {".dockerconfigjson": content})


def calls(registry: CollectorRegistry, operation: str) -> float:
    labels = {"operation_type": operation}
    return registry.get_sample_value("kubelet_runtime_operations_total", labels) or 0


async def test_containerd_pull_image_present_afterwards(
    node: Node, cri: RuntimeConnection, open_registry: Registry, name: str
) -> None:
    open_registry.push(name, "1", user="1234")
    pod = a_pod(f"{open_registry.host}/{name}:1")
    pulled = await node.ensure(pod)
    assert pulled.id.startswith("sha256:")
    assert (pulled.uid, pulled.username) == (1234, "")
    status = (await cri.images.image_status(pb.ImageSpec(image=pulled.id))).image
    assert status.repo_tags == [f"{open_registry.host}/{name}:1"]
    assert await node.ensure(pod) == pulled
    [pulling, done, present] = node.journal.events(pod.uid)
    assert pulling.message == f'Pulling image "{open_registry.host}/{name}:1"'
    assert done.message.startswith(f'Successfully pulled image "{open_registry.host}/{name}:1" in ')
    assert done.message.endswith(f"Image size: {status.size} bytes.")
    assert present.message.endswith("already present on machine and can be accessed by the pod")


async def test_containerd_pull_without_tag_uses_latest(
    node: Node, open_registry: Registry, name: str
) -> None:
    open_registry.push(name, "latest", user="nobody")
    found = await node.ensure(a_pod(f"{open_registry.host}/{name}"))
    assert (found.uid, found.username) == (None, "nobody")
    assert await node.ensure(a_pod(f"{open_registry.host}/{name}:latest", "Never")) == found


async def test_containerd_pull_by_digest_returns_that_image(
    node: Node, open_registry: Registry, name: str
) -> None:
    first = open_registry.push(name, "1", note="first")
    second = open_registry.push(name, "1", note="second")
    by_digest = await node.ensure(a_pod(f"{open_registry.host}/{name}@{first}"))
    by_both = await node.ensure(a_pod(f"{open_registry.host}/{name}:1@{first}", "Always"))
    assert by_digest == by_both
    by_tag = await node.ensure(a_pod(f"{open_registry.host}/{name}:1"))
    assert by_tag == await node.ensure(a_pod(f"{open_registry.host}/{name}@{second}"))
    assert by_tag != by_digest


async def test_containerd_pull_policy_always_follows_moved_tag(
    node: Node, open_registry: Registry, name: str
) -> None:
    pod = a_pod(f"{open_registry.host}/{name}:1")
    open_registry.push(name, "1", note="first")
    first = await node.ensure(pod)
    open_registry.push(name, "1", note="second")
    assert await node.ensure(pod) == first
    pod.spec.containers[0].image_pull_policy = "Always"
    second = await node.ensure(pod)
    assert second != first
    pod.spec.containers[0].image_pull_policy = "IfNotPresent"
    assert await node.ensure(pod) == second


async def test_containerd_pull_missing_image_enters_back_off(
    node: Node, open_registry: Registry, name: str
) -> None:
    open_registry.push(name, "1")
    absent_digest = f"sha256:{'0' * 64}"
    for image in (
        f"{open_registry.host}/{name}-none:1",
        f"{open_registry.host}/{name}:2",
        f"{open_registry.host}/{name}@{absent_digest}",
    ):
        pod = a_pod(image, uid=image)
        err = await node.refusal(pod)
        assert err.reason == "ErrImagePull"
        assert err.message.startswith("rpc error: code = NotFound desc = failed to pull and unpack image ")
        again = await node.refusal(pod)
        assert again.reason == "ImagePullBackOff"
        assert again.message == f'Back-off pulling image "{image}": ErrImagePull: {err.message}'
        assert node.reasons(pod) == ["Pulling", "Failed", "BackOff"]


async def test_containerd_pull_missing_or_wrong_password_fails(
    node: Node, guarded_registry: Registry, name: str
) -> None:
    guarded_registry.push(name, "1")
    image = f"{guarded_registry.host}/{name}:1"
    nobody = await node.refusal(a_pod(image, uid="nobody"))
    assert nobody.reason == "ErrImagePull"
    assert REFUSED.search(nobody.message)
    wrong = await node.refusal(a_pod(image, uid="wrong"), pull_secret(guarded_registry.host, "wrong"))
    assert wrong.reason == "ErrImagePull"
    assert REFUSED.search(wrong.message)
    other = await node.refusal(a_pod(image, uid="other"), pull_secret("other.example.com"))
    assert other.message == nobody.message, "a login for another registry is not used"
    said = str([node.journal.events("wrong"), node.journal.timeline("wrong"), wrong])
    assert "d3Jvbmc" not in said, "nor shown in its encoded form"


async def test_containerd_pull_with_pull_secret_succeeds(
    node: Node, guarded_registry: Registry, name: str
) -> None:
    guarded_registry.push(name, "1")
    pod = a_pod(f"{guarded_registry.host}/{name}:1")
    assert (await node.ensure(pod, pull_secret(guarded_registry.host))).id
    assert node.reasons(pod) == ["Pulling", "Pulled"]
    assert PASSWORD not in str([node.journal.events(pod.uid), node.journal.timeline(pod.uid)])


async def test_containerd_pull_node_credentials_tried_after_pod_secrets(
    node: Node, guarded_registry: Registry, name: str, registry: CollectorRegistry
) -> None:
    guarded_registry.push(name, "1")
    pod = a_pod(f"{guarded_registry.host}/{name}:1")
    (node.root_dir / "config.json").write_text(
        json.dumps({"auths": {guarded_registry.host: {"username": USER, "password": PASSWORD}}})
    )
    assert (await node.ensure(pod, pull_secret(guarded_registry.host, "wrong"))).id
    assert calls(registry, "pull_image") == 2


async def test_containerd_pull_with_credential_provider_succeeds(
    cri: RuntimeConnection,
    journal: PodHistory,
    scope: TaskScope,
    metrics: ImageMetrics,
    guarded_registry: Registry,
    name: str,
    tmp_path: Path,
) -> None:
    guarded_registry.push(name, "1")
    protocol = "credentialprovider.kubelet.k8s.io/v1"
    response = {
        "kind": "CredentialProviderResponse",
        "apiVersion": protocol,
        "cacheKeyType": "Registry",
        "auth": {f"{guarded_registry.host}/team": {"username": USER, "password": PASSWORD}},
    }
    (tmp_path / "helper").write_text(f"#!/bin/sh\ncat > {tmp_path}/request\necho '{json.dumps(response)}'\n")
    (tmp_path / "helper").chmod(0o755)
    provider = {
        "name": "helper",
        "apiVersion": protocol,
        "matchImages": [guarded_registry.host],
        "defaultCacheDuration": "1m",
    }
    (tmp_path / "config.yaml").write_text(
        json.dumps(
            {
                "apiVersion": "kubelet.config.k8s.io/v1",
                "kind": "CredentialProviderConfig",
                "providers": [provider],
            }
        )
    )
    providers = load_providers(tmp_path / "config.yaml", tmp_path)
    puller = ImageManager(
        cri.images,
        journal,
        scope,
        limits=PullLimits(),
        metrics=metrics,
        plugins=ProviderPlugins(providers, tmp_path, scope, metrics),
    )
    pod = a_pod(f"{guarded_registry.host}/{name}:1")
    assert (await puller.ensure(pod, pod.spec.containers[0], a_sandbox(pod))).id
    assert json.loads((tmp_path / "request").read_text())["image"] == f"{guarded_registry.host}/{name}"


async def test_containerd_pull_registry_restarted_succeeds_after_back_off(
    node: Node, folder: Path, name: str
) -> None:
    with running_registry(folder / "restarted") as registry:
        registry.push(name, "1")
        host = registry.host
    with socket.socket() as kept:
        # Nobody else shall be given its port meanwhile.
        kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        kept.bind(("127.0.0.1", int(host.rpartition(":")[2])))
        pod = a_pod(f"{host}/{name}:1")
        err = await node.refusal(pod)
        assert err.reason == "ErrImagePull"
        assert "connection refused" in err.message
        assert (await node.refusal(pod)).reason == "ImagePullBackOff"
        stopped = asyncio.get_running_loop().time()
        with running_registry(folder / "restarted", host=host):
            # However long its start took, the pod's pause is not over.
            node.ahead -= asyncio.get_running_loop().time() - stopped
            waiting = await node.refusal(pod)
            assert (waiting.reason, "connection refused" in waiting.message) == ("ImagePullBackOff", True)
            assert waiting.retry_after is not None
            node.ahead += waiting.retry_after
            assert (await node.ensure(pod)).id
        assert node.reasons(pod) == ["Pulling", "Failed", "BackOff", "Pulled"]


async def test_containerd_pull_many_pods_share_one_pull(
    node: Node, open_registry: Registry, name: str, registry: CollectorRegistry
) -> None:
    open_registry.push(name, "1")
    pods = [
        a_pod(
            f"{open_registry.host}/{name}:1", uid=f"u{n}", annotations={"kubernetes.io/config.seen": str(n)}
        )
        for n in range(40)
    ]
    found = await asyncio.gather(*(node.ensure(pod) for pod in pods))
    assert len(set(found)) == 1
    assert calls(registry, "pull_image") == 1
    assert calls(registry, "image_status") == 2
    for pod in pods:
        assert node.reasons(pod) == ["Pulling", "Pulled"]
    await asyncio.gather(*(node.ensure(pod) for pod in pods))
    assert calls(registry, "image_status") <= 3


async def test_containerd_pull_removed_image_is_pulled_again(
    node: Node, cri: RuntimeConnection, open_registry: Registry, name: str
) -> None:
    open_registry.push(name, "1")
    pod = a_pod(f"{open_registry.host}/{name}:1")
    found = await node.ensure(pod)
    await cri.images.remove_image(pb.ImageSpec(image=found.id))
    await asyncio.sleep(1.1)
    assert await node.ensure(pod) == found
    assert (await cri.images.image_status(pb.ImageSpec(image=found.id))).HasField("image")


async def test_containerd_pull_pod_deleted_cancels_pull_in_runtime(node: Node, name: str) -> None:
    connected, left = asyncio.Event(), asyncio.Event()

    async def be_silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # A connection without a request yet would be kept for later, cancelled or not.
        while await reader.read(1000):
            connected.set()
        left.set()
        writer.close()

    async with asyncio.timeout(60), await asyncio.start_server(be_silent, "127.0.0.1", 0) as server:
        host, port = server.sockets[0].getsockname()
        async with asyncio.TaskGroup() as group:
            pulling = group.create_task(node.ensure(a_pod(f"{host}:{port}/{name}:1")))
            await connected.wait()
            assert not left.is_set()
            pulling.cancel()
        await left.wait()
    assert pulling.cancelled()
