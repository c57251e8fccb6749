"""Pods that survive a reboot without the API server."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from pykubelet.api.core import ConfigMap, Secret
from pykubelet.api.meta import ObjectMeta
from pykubelet.api.node import Node, NodeStatus
from pykubelet.api.pod import Container, Pod, PodSpec
from pykubelet.api.pod_status import PodStatus
from pykubelet.api.quantity import Quantity
from pykubelet.api.volume import PodCertificateProjection
from pykubelet.objects.base import (
    CertificateRefused,
    CredentialBundle,
    NoObjects,
    ObjectError,
    ObjectNotFound,
)
from pykubelet.podconfig.checkpoints import CheckpointedObjects, Checkpoints


def pod(name: str, image: str = "i") -> Pod:
    meta = ObjectMeta(name=name, namespace="ns", uid=f"uid-{name}")
    return Pod(metadata=meta, spec=PodSpec(containers=[Container(name="c", image=image)]))


@contextlib.asynccontextmanager
async def running(checkpoints: Checkpoints) -> AsyncIterator[None]:
    async with asyncio.TaskGroup() as group:
        task = group.create_task(checkpoints.run())
        await asyncio.sleep(0)
        yield
        task.cancel()


class Cluster(NoObjects):
    """An API server that is there or not."""

    def __init__(self) -> None:
        self.away = False
        self.gone = False

    def _check(self, what: str) -> None:
        if self.away:
            raise ObjectError(f"{what}: the API server is away")
        if self.gone:
            raise ObjectNotFound(f"{what} not found")

    async def config_map(self, pod: Pod, name: str) -> ConfigMap:
        self._check(name)
        return ConfigMap(metadata=ObjectMeta(name=name), data={"key": "value"})

    async def secret(self, pod: Pod, name: str) -> Secret:
        self._check(name)
        return Secret(metadata=ObjectMeta(name=name), data={"key": b"\xff\x00"})

    async def token(self, pod: Pod, *, audience: str, seconds: int) -> str:
        self._check("token")
        return f"token for {audience}"

    async def handler(self, pod: Pod) -> str:
        self._check("runtime class")
        return "runsc"


@pytest.mark.looptime
async def test_checkpoints_restart_restores_pods_and_status(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    before = Checkpoints(folder)
    async with running(before):
        for name in ("a", "b", "c"):
            before.save(pod(name))
        before.save(pod("a"), PodStatus(phase="Succeeded"))
        before.save(pod("b", image="newer"))
        await asyncio.sleep(2)
        before.forget("uid-c")
    after = Checkpoints(folder)
    assert [(it.metadata.name, it.status.phase) for it in after.pods()] == [("a", "Succeeded"), ("b", "")]
    assert after.pods()[1].spec.containers[0].image == "newer"
    assert sorted(path.name for path in folder.iterdir()) == ["uid-a.json", "uid-b.json"]
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}


@pytest.mark.looptime
async def test_checkpoints_unchanged_pod_is_not_rewritten(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    async with running(checkpoints):
        checkpoints.save(pod("a"))
        await asyncio.sleep(1)
        written = (tmp_path / "uid-a.json").stat().st_ino
        checkpoints.save(pod("a"))
        await asyncio.sleep(1)
        assert (tmp_path / "uid-a.json").stat().st_ino == written


async def test_checkpoints_damaged_files_are_skipped(tmp_path: Path) -> None:
    good = Checkpoints(tmp_path)
    async with running(good):
        good.save(pod("good"))
    (tmp_path / "cut.json").write_text('{"pod": {"meta')
    (tmp_path / "uid-other.json").write_bytes((tmp_path / "uid-good.json").read_bytes())
    (tmp_path / "uid-half.new").write_text("{")
    assert [it.metadata.name for it in Checkpoints(tmp_path).pods()] == ["good"]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "cut.json",
        "uid-good.json",
        "uid-other.json",
    ]


@pytest.mark.looptime
async def test_checkpoints_node_labels_and_allocatable_are_restored(tmp_path: Path) -> None:
    meta = ObjectMeta(name="one", labels={"disk": "fast"}, resource_version="7")
    allocatable = {"example.com/dongle": Quantity.parse("2")}
    seen = Node(metadata=meta, status=NodeStatus(phase="x", allocatable=allocatable))
    before = Checkpoints(tmp_path)
    assert before.node is None
    async with running(before):
        before.save_node(seen)
        await asyncio.sleep(1)
        written = (tmp_path / "node.json").stat().st_ino
        # A heartbeat is no reason to write.
        before.save_node(replace(seen, status=replace(seen.status, phase="y")))
        await asyncio.sleep(1)
        assert (tmp_path / "node.json").stat().st_ino == written
    after = Checkpoints(tmp_path)
    assert after.pods() == []
    assert after.node is not None
    assert after.node.metadata.labels == {"disk": "fast"}
    assert after.node.status == NodeStatus(allocatable=allocatable)


async def test_checkpoints_directory_with_other_files_is_unchanged(tmp_path: Path) -> None:
    folder = tmp_path / "etc"
    (folder / "ssl").mkdir(parents=True)
    (folder / "hosts").write_text("127.0.0.1 localhost")
    folder.chmod(0o755)
    checkpoints = Checkpoints(folder)
    async with running(checkpoints):
        checkpoints.save(pod("a"))
    assert sorted(path.name for path in folder.iterdir()) == ["hosts", "ssl", "uid-a.json"]
    assert folder.stat().st_mode & 0o777 == 0o755
    assert [it.metadata.name for it in Checkpoints(folder).pods()] == ["a"]


async def test_checkpoints_own_directory_gets_mode_700(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    Checkpoints(tmp_path)
    assert tmp_path.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o770])
async def test_checkpoints_directory_writable_by_others_raises_permission_error(
    tmp_path: Path, mode: int
) -> None:
    tmp_path.chmod(mode)
    try:
        with pytest.raises(PermissionError, match=r"others may write there.*: chown .* and chmod 700 it, or"):
            Checkpoints(tmp_path)
        assert tmp_path.stat().st_mode & 0o7777 == mode
    finally:
        tmp_path.chmod(0o700)


@pytest.mark.looptime
async def test_checkpoints_write_fails_is_retried(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    checkpoints = Checkpoints(folder)
    async with running(checkpoints):
        folder.rmdir()
        checkpoints.save(pod("a"))
        await asyncio.sleep(2)
        folder.mkdir()
        await asyncio.sleep(15)
        assert (folder / "uid-a.json").exists()


async def test_checkpointed_objects_server_away_returns_runtime_handler(tmp_path: Path) -> None:
    cluster, before = Cluster(), Checkpoints(tmp_path)
    plain, classy = pod("plain"), pod("classy")
    classy.spec.runtime_class_name = "gvisor"
    objects = CheckpointedObjects(cluster, before, cluster.handler)
    async with running(before):
        for one in (plain, classy):
            before.save(one)
        assert await objects.handler(plain) == ""
        assert await objects.handler(classy) == "runsc"
    cluster.away = True
    objects = CheckpointedObjects(cluster, Checkpoints(tmp_path), cluster.handler)
    assert await objects.handler(plain) == ""
    assert await objects.handler(classy) == "runsc"
    classy.spec.runtime_class_name = "kata"
    with pytest.raises(ObjectError, match="away"):
        await objects.handler(classy)


async def test_checkpointed_objects_server_away_returns_last_objects(tmp_path: Path) -> None:
    cluster, before = Cluster(), Checkpoints(tmp_path)
    objects = CheckpointedObjects(cluster, before, cluster.handler)
    async with running(before):
        before.save(pod("a"))
        await objects.config_map(pod("a"), "map")
        await objects.secret(pod("a"), "secret")
        await objects.token(pod("a"), audience="x", seconds=60)
        await objects.config_map(pod("unknown"), "map")
    cluster.away = True
    objects = CheckpointedObjects(cluster, Checkpoints(tmp_path), cluster.handler)
    assert (await objects.config_map(pod("a"), "map")).data == {"key": "value"}
    assert (await objects.secret(pod("a"), "secret")).data == {"key": b"\xff\x00"}
    assert await objects.token(pod("a"), audience="x", seconds=60) == "token for x"
    with pytest.raises(ObjectError, match="away"):
        await objects.token(pod("a"), audience="other", seconds=60)
    with pytest.raises(ObjectError, match="away"):
        await objects.config_map(pod("unknown"), "map")
    cluster.away, cluster.gone = False, True
    with pytest.raises(ObjectNotFound):
        await objects.config_map(pod("a"), "map")


class Signer(NoObjects):
    """A source of certificates that can fail."""

    error: ObjectError | None = None

    async def pod_certificate(
        self, pod: Pod, volume: str, index: int, source: PodCertificateProjection
    ) -> CredentialBundle:
        if self.error is not None:
            raise self.error
        return CredentialBundle(private_key="key", certificate_chain="chain")


async def test_checkpointed_objects_refused_certificate_is_not_replaced_by_checkpoint(tmp_path: Path) -> None:
    signer, checkpoints = Signer(), Checkpoints(tmp_path)
    objects = CheckpointedObjects(signer, checkpoints, Cluster().handler)
    checkpoints.save(pod("a"))
    source = PodCertificateProjection(signer_name="example.com/s", key_type="ED25519")
    issued = await objects.pod_certificate(pod("a"), "v", 0, source)
    signer.error = ObjectError("credential bundle is not issued yet")
    assert await objects.pod_certificate(pod("a"), "v", 0, source) == issued
    signer.error = CertificateRefused("permanently denied")
    with pytest.raises(CertificateRefused):
        await objects.pod_certificate(pod("a"), "v", 0, source)
