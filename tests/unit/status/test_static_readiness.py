"""Readiness of static pods over restarts of the kubelet."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from pykubelet.api.pod import Container, Pod
from pykubelet.api.pod_status import PodStatus
from pykubelet.kuberuntime.observed import ObservedContainer, ObservedPod
from pykubelet.probes.results import health
from pykubelet.status.compute import StatusStore
from pykubelet.status.static_readiness import FILE, WRITE_SECONDS, StaticReadiness
from tests.support.pods import container, make_pod, make_status
from tests.support.probes import exec_probe

RUNNING = ObservedPod(
    uid="u1",
    name="web",
    namespace="default",
    containers=(ObservedContainer(id="c1", name="main", phase="running", started_at=1),),
)


def static(*, probed: bool = True, source: str = "file", uid: str = "u1") -> Pod:
    pod = make_pod(uid, annotations={"kubernetes.io/config.source": source}, status=PodStatus())
    probe = exec_probe("r") if probed else None
    pod.spec.containers = [Container(name="main", readiness_probe=probe)]
    return pod


def reported(ready: bool) -> PodStatus:
    return make_status(
        "Running", container("main", ready=ready, started=True, container_id="containerd://c1")
    )


def is_written(subject: StaticReadiness, file: Path) -> bool:
    """Return whether the file has what the subject knows; without anything to know there is no file."""
    if subject._changed.is_set():
        return False
    content = msgspec.json.encode(subject._entries)
    return file.read_bytes() == content if file.exists() else not subject._entries


async def restarted(root: Path, *before: Callable[[StaticReadiness], None]) -> StaticReadiness:
    """The next process's, after one in which this happened; it ends without a chance to write."""
    subject = StaticReadiness(root)
    task = asyncio.create_task(subject.run())
    for happen in before:
        happen(subject)
        while not is_written(subject, root / FILE):
            await asyncio.sleep(WRITE_SECONDS / 10)
    found = StaticReadiness(root)
    task.cancel()
    await asyncio.wait([task])
    return found


def ready_of(pod: Pod) -> bool:
    """What a prober that never asked reports of a container that is older than the kubelet."""
    return health(pod, RUNNING, lambda *_: None, lambda *_: True)["main"].ready


@pytest.mark.parametrize("ready", [False, True])
async def test_static_readiness_kubelet_restarted_restores_reported_ready(
    tmp_path: Path, ready: bool
) -> None:
    def happen(subject: StaticReadiness) -> None:
        statuses = StatusStore()
        statuses.add_listener(subject.record)
        statuses.set(static(), reported(not ready))
        statuses.set(static(), reported(ready))

    subject = await restarted(tmp_path, happen)
    assert ready_of(subject.restore(static())) is ready
    # Another pod is none of it, and begins as without any memory.
    other = static(uid="u2")
    assert subject.restore(other) is other
    assert (tmp_path / FILE).stat().st_mode & 0o777 == 0o600


async def test_static_readiness_run_cancelled_writes_pending_changes(tmp_path: Path) -> None:
    subject = StaticReadiness(tmp_path)
    task = asyncio.create_task(subject.run())
    await asyncio.sleep(0)
    subject.record(static(), reported(False), None)
    task.cancel()
    await asyncio.wait([task])
    assert not ready_of(StaticReadiness(tmp_path).restore(static()))


async def test_static_readiness_other_pods_not_recorded(tmp_path: Path) -> None:
    def happen(subject: StaticReadiness) -> None:
        subject.record(static(probed=False), reported(False), None)
        subject.record(static(source="api"), reported(False), None)

    await restarted(tmp_path, happen)
    assert not (tmp_path / FILE).exists()


async def test_static_readiness_pods_removed_deletes_entries(tmp_path: Path) -> None:
    def happen(subject: StaticReadiness) -> None:
        for uid in ("u1", "u2", "u3"):
            subject.record(static(uid=uid), reported(False), None)

    def go(subject: StaticReadiness) -> None:
        subject.forget("u1")
        subject.retain({"u3"}.__contains__)

    subject = await restarted(tmp_path, happen, go)
    assert [subject.restore(static(uid=uid)).status != PodStatus() for uid in ("u1", "u2", "u3")] == [
        False,
        False,
        True,
    ]


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b'{"u1": 5}'])
async def test_static_readiness_damaged_file_ignored(tmp_path: Path, content: bytes) -> None:
    (tmp_path / FILE).parent.mkdir()
    (tmp_path / FILE).write_bytes(content)
    pod = static()
    assert StaticReadiness(tmp_path).restore(pod) is pod
