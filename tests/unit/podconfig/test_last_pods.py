"""Pods that were last known, for when the API server does not answer."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from pykubelet.api.pod import Pod
from pykubelet.podconfig.api_source import FIRST_LIST_TIMEOUT_SECONDS, CheckpointSource
from pykubelet.podconfig.checkpoints import Checkpoints
from pykubelet.podconfig.mux import PodChange, PodStore
from pykubelet.util.tasks import TaskScope
from tests.support.pods import make_pod, make_status

pytestmark = pytest.mark.looptime


class Node:
    """The parts around the pods of old."""

    def __init__(self, folder: Path) -> None:
        self.checkpoints = Checkpoints(folder)
        self.store = PodStore()
        self.offered: list[str] = []
        self.answer = asyncio.Event()
        self.last = CheckpointSource(self.checkpoints, self.store, self._offer)

    def _offer(self, pods: Sequence[Pod]) -> None:
        self.offered += [pod.uid for pod in pods]

    async def answered(self) -> None:
        await self.answer.wait()

    def want(self, pod: Pod) -> None:
        self.store.apply(PodChange("ADD", pod, "api"))
        self.last.update(pod, None)

    @property
    def kept(self) -> list[str]:
        return [pod.uid for pod in self.checkpoints.pods()]


@asynccontextmanager
async def running(folder: Path) -> AsyncIterator[Node]:
    node = Node(folder)
    async with TaskScope() as scope:
        scope.start(node.checkpoints.run(), name="checkpoints")
        scope.start(node.last.run(node.answered), name="last")
        await asyncio.sleep(0)
        yield node


async def test_checkpoint_source_api_server_silent_offers_checkpointed_pods(tmp_path: Path) -> None:
    async with running(tmp_path / "c") as node:
        node.want(make_pod("a", "one"))
        node.want(make_pod("b", "two"))
        node.last.update(make_pod("b", "two"), make_status())
    async with running(tmp_path / "c") as node:
        await asyncio.sleep(FIRST_LIST_TIMEOUT_SECONDS - 1)
        assert node.offered == []
        await asyncio.sleep(2)
        assert node.offered == ["a", "b"]
        assert node.last.has_unconfirmed_pods
        assert [pod.status.phase for pod in node.checkpoints.pods()] == ["Pending", "Running"]
        # What the API server does not have is forgotten when it speaks, and only then.
        node.last.handle_api_pods([make_pod("b", "two")], set())
        assert node.kept == ["b"]
        assert not node.last.has_unconfirmed_pods
    assert Node(tmp_path / "c").kept == ["b"]


async def test_checkpoint_source_api_server_responds_offers_nothing(tmp_path: Path) -> None:
    async with running(tmp_path / "c") as node:
        node.want(make_pod("a"))
    async with running(tmp_path / "c") as node:
        await asyncio.sleep(1)
        node.answer.set()
        await asyncio.sleep(60)
        assert node.offered == []
        assert not node.last.has_unconfirmed_pods


async def test_checkpoint_source_pod_removed_by_api_deletes_checkpoint(tmp_path: Path) -> None:
    async with running(tmp_path / "c") as node:
        pod = make_pod("a")
        node.want(pod)
        node.store.apply(PodChange("REMOVE", pod, "api"))
        node.last.update(pod, None)
        assert node.kept == []
        # Its last status comes when it has stopped: too late to matter.
        node.last.update(pod, make_status("Failed"))
        assert node.kept == []


async def test_checkpoint_source_unreadable_pod_retains_checkpoint(tmp_path: Path) -> None:
    async with running(tmp_path / "c") as node:
        node.want(make_pod("a", "odd"))
        node.last.handle_api_pods([], {"default/odd"})
        assert node.kept == ["a"]


async def test_checkpoint_source_static_pod_is_not_checkpointed(tmp_path: Path) -> None:
    async with running(tmp_path / "c") as node:
        node.want(make_pod("a", annotations={"kubernetes.io/config.source": "file"}))
        assert node.kept == []
