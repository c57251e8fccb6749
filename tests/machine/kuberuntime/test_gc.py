import asyncio
import itertools
import os
import threading
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import AsyncMock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pykubelet.api.duration import Duration
from pykubelet.cri import runtime_pb2 as pb
from pykubelet.cri.connect import RuntimeConnection
from pykubelet.kuberuntime.gc import GarbageCollector, GcPlan, GcPolicy, plan_gc, plan_log_dirs
from pykubelet.kuberuntime.labels import CONTAINER_NAME, POD_NAME, POD_NAMESPACE, POD_UID
from pykubelet.kuberuntime.observed import ContainerPhase, ObservedContainer, ObservedPod, ObservedSandbox
from pykubelet.kuberuntime.paths import legacy_log_link, pod_log_dir
from pykubelet.transport.errors import CriError, NotFound
from tests.support.cri_pods import connected
from tests.support.runtime import RunningRuntime

SECOND = 10**9
NOW = 1000 * SECOND


def dead(
    name: str, at: int, phase: ContainerPhase = "exited", sandbox: str = "s", key: str = ""
) -> ObservedContainer:
    """A container made in second `at`, called `name@at` unless told."""
    return ObservedContainer(
        id=key or f"{name}@{at}", name=name, phase=phase, created_at=at * SECOND, sandbox_id=sandbox
    )


def pod_of(
    uid: str, containers: Sequence[ObservedContainer], sandboxes: Sequence[ObservedSandbox] = ()
) -> dict[str, ObservedPod]:
    ordered = sorted(containers, key=lambda one: one.created_at, reverse=True)
    return {uid: ObservedPod(uid=uid, containers=tuple(ordered), sandboxes=tuple(sandboxes))}


def box(key: str, at: int, ready: bool = False) -> ObservedSandbox:
    return ObservedSandbox(id=key, ready=ready, created_at=at * SECOND)


def plan(pods: dict[str, ObservedPod], *gone: str, **policy: Any) -> GcPlan:
    return plan_gc(pods, GcPolicy(**policy), now=NOW, is_collectable=lambda uid: uid in gone)


def ids(found: GcPlan) -> list[str]:
    return [container.id for container in found.containers]


class TestContainers:
    @pytest.mark.parametrize(
        ("containers", "policy", "expected"),
        [
            pytest.param([dead("a", 1)], {}, [], id="the last one is kept"),
            pytest.param([dead("a", 1), dead("a", 3), dead("a", 2)], {}, ["a@1", "a@2"], id="oldest first"),
            pytest.param([dead("a", 1), dead("b", 2)], {}, [], id="each container counts for itself"),
            pytest.param(
                [dead("a", 1), dead("a", 2), dead("a", 3, "running")],
                {},
                ["a@1"],
                id="what runs does not count",
            ),
            pytest.param([dead("a", 1, "running")], {"max_per_container": 0}, [], id="what runs stays"),
            pytest.param([dead("a", 1)], {"max_per_container": 0}, ["a@1"], id="none is kept"),
            pytest.param([dead("a", 1), dead("a", 2)], {"max_per_container": -1}, [], id="all are kept"),
            pytest.param(
                [dead("a", 900), dead("a", 901), dead("a", 990), dead("a", 991)],
                {"min_age": Duration.from_seconds(50)},
                ["a@900"],
                id="the young are not looked at",
            ),
            pytest.param(
                [dead("a", 1, "unknown"), dead("a", 2, "created"), dead("a", 3)],
                {},
                ["a@1", "a@2"],
                id="neither started nor known",
            ),
            pytest.param(
                [dead("a", 1), dead("a", 2, "created")],
                {"max_per_container": 0},
                ["a@1"],
                id="one that may be about to start",
            ),
        ],
    )
    def test_plan_gc_existing_pod_removes_old_dead_containers(
        self, containers: list[ObservedContainer], policy: dict[str, Any], expected: list[str]
    ) -> None:
        assert ids(plan(pod_of("u", containers), **policy)) == expected

    def test_plan_gc_deleted_pod_removes_all_dead_containers(self) -> None:
        containers = [dead("a", 1), dead("b", 2, "created"), dead("c", 3, "unknown"), dead("d", 4, "running")]
        assert sorted(ids(plan(pod_of("u", containers), "u"))) == ["a@1", "b@2", "c@3"]
        assert ids(plan(pod_of("u", [dead("a", 999)]), "u", min_age=Duration.from_seconds(60))) == []

    def test_plan_gc_node_limit_exceeded_removes_evenly_per_container(self) -> None:
        """A container that crashes often does not crowd out the others."""
        pods = pod_of("one", [dead("a", at, key=f"a{at}") for at in range(100, 110)])
        pods |= pod_of("two", [dead("b", 1, key="b1"), dead("b", 2, key="b2")])
        found = ids(plan(pods, max_per_container=-1, max_containers=6))
        assert found == [f"a{at}" for at in range(100, 107)]
        assert sorted(ids(plan(pods, max_per_container=-1, max_containers=1))) == sorted(
            [*(f"a{at}" for at in range(100, 109)), "b1", "b2"]
        )
        assert len(ids(plan(pods, max_per_container=-1, max_containers=0))) == 12
        assert ids(plan(pods, max_per_container=-1, max_containers=12)) == []


class TestSandboxes:
    def test_plan_gc_existing_pod_newest_sandbox_stays(self) -> None:
        pods = pod_of("u", [], [box("new", 3), box("old", 2), box("oldest", 1)])
        assert plan(pods).sandboxes == ("oldest", "old")
        assert plan(pods, "u").sandboxes == ("oldest", "old", "new")

    def test_plan_gc_sandbox_in_use_stays(self) -> None:
        containers = [dead("a", 1, sandbox="old"), dead("a", 2, sandbox="new"), dead("b", 1, sandbox="other")]
        pods = pod_of("u", containers, [box("new", 3), box("old", 2), box("other", 1), box("ready", 0, True)])
        found = plan(pods)
        assert ids(found) == ["a@1"]
        assert found.sandboxes == ("old",), "its only container goes; another's stays"
        running = pod_of("u", [dead("a", 1, "running", "s")], [box("s", 1), box("ready", 2, True)])
        assert plan(running, "u").sandboxes == ()


PHASES: list[ContainerPhase] = ["created", "running", "exited", "unknown"]


@st.composite
def nodes(draw: st.DrawFn) -> dict[str, ObservedPod]:
    serial = itertools.count()
    pods: dict[str, ObservedPod] = {}
    for uid in draw(st.sets(st.sampled_from("uvw"))):
        boxes = [
            ObservedSandbox(
                id=f"s{next(serial)}", ready=draw(st.booleans()), created_at=draw(st.integers(0, 9)) * SECOND
            )
            for _ in range(draw(st.integers(0, 3)))
        ]
        containers = [
            dead(
                draw(st.sampled_from("abc")),
                draw(st.integers(0, 1100)),
                draw(st.sampled_from(PHASES)),
                draw(st.sampled_from([one.id for one in boxes] or ["none"])),
                key=f"c{next(serial)}",
            )
            for _ in range(draw(st.integers(0, 8)))
        ]
        pods |= pod_of(uid, containers, boxes)
    return pods


policies = st.builds(
    GcPolicy,
    min_age=st.sampled_from([Duration(0), Duration.from_seconds(500)]),
    max_per_container=st.integers(-1, 3),
    max_containers=st.integers(-1, 8),
)


class TestProperties:
    @given(nodes(), policies, st.sets(st.sampled_from("uvw")))
    def test_plan_gc_any_state_invariants_hold(
        self, pods: dict[str, ObservedPod], policy: GcPolicy, gone: set[str]
    ) -> None:
        found = plan_gc(pods, policy, now=NOW, is_collectable=gone.__contains__)
        doomed = set(ids(found))
        every = [container for pod in pods.values() for container in pod.containers]
        left = [container for container in every if container.id not in doomed]
        assert len(doomed) == len(found.containers), "nothing is removed twice"
        assert all(container.phase != "running" for container in found.containers)
        assert all(container.created_at <= NOW - policy.min_age for container in found.containers)
        used = {container.sandbox_id for container in left}
        ready = {box.id for pod in pods.values() for box in pod.sandboxes if box.ready}
        assert not set(found.sandboxes) & (used | ready)
        for uid, pod in pods.items():
            old = [c for c in pod.containers if c.created_at <= NOW - policy.min_age and c.phase != "running"]
            staying = [c for c in old if c.id not in doomed]
            if uid in gone:
                assert staying == []
            elif policy.max_per_container >= 0:
                for name in "abc":
                    # One that is about to start is not counted.
                    counted = [c for c in staying if c.name == name and c is not pod.latest(name)]
                    assert len(counted) <= policy.max_per_container

    @given(nodes(), policies, st.sets(st.sampled_from("uvw")))
    def test_plan_gc_applied_leaves_empty_plan(
        self, pods: dict[str, ObservedPod], policy: GcPolicy, gone: set[str]
    ) -> None:
        found = plan_gc(pods, policy, now=NOW, is_collectable=gone.__contains__)
        doomed, boxes = set(ids(found)), set(found.sandboxes)
        after = {
            uid: ObservedPod(
                uid=uid,
                containers=tuple(c for c in pod.containers if c.id not in doomed),
                sandboxes=tuple(box for box in pod.sandboxes if box.id not in boxes),
            )
            for uid, pod in pods.items()
        }
        assert plan_gc(after, policy, now=NOW, is_collectable=gone.__contains__) == GcPlan()


def test_plan_log_dirs_selects_directories_of_deleted_pods() -> None:
    names = ["ns_gone_u1", "ns_here_u2", "lost+found", "u1", "_x_u1", "a_b_c_u1", "ns__u1"]
    assert plan_log_dirs(names, lambda uid: uid == "u1") == ["ns_gone_u1"]


async def test_remove_container_logs_deleted_off_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Verify that files and directories that a pod put beside its log neither hold up pods nor stay."""
    folder = tmp_path / "ns_name_uid/main"
    (folder / "0.log.d/inner").mkdir(parents=True)
    for name in ("0.log", "0.log.1", "1.log"):
        (folder / name).touch()
    threads, glob = set(), Path.glob

    def recorded(path: Path, pattern: str) -> Any:
        threads.add(threading.current_thread())
        return glob(path, pattern)

    monkeypatch.setattr(Path, "glob", recorded)
    status = pb.ContainerStatusResponse(status=pb.ContainerStatus(log_path=str(folder / "0.log")))
    runtime = AsyncMock(container_status=AsyncMock(return_value=status))
    await GarbageCollector(
        cast(RuntimeConnection, SimpleNamespace(runtime=runtime)), tmp_path, None
    ).remove_container("c")
    assert [path.name for path in folder.iterdir()] == ["1.log"]
    assert threads
    assert threading.current_thread() not in threads
    runtime.remove_container.assert_awaited_once_with("c")


@pytest.fixture
async def cri(private_runtime: RunningRuntime) -> AsyncIterator[RuntimeConnection]:
    async with connected(private_runtime.endpoint) as connection:
        yield connection


class Node:
    """Pods made by hand in a real runtime, as an agent makes them."""

    def __init__(self, cri: RuntimeConnection, runtime: RunningRuntime, folder: Path) -> None:
        self.cri = cri
        self.runtime = runtime
        self.logs = folder / "pods"
        self.links = folder / "containers"
        self.links.mkdir()
        self.uids: list[str] = []

    def collector(self, **policy: Any) -> GarbageCollector:
        return GarbageCollector(self.cri, str(self.logs), self.links, GcPolicy(**policy))

    async def collect(self, deleted: Callable[[str], bool] = lambda uid: False, **options: Any) -> None:
        """Collect, and never touch what other tests have in the same runtime."""
        options = {"all_sources_ready": True} | options
        await self.collector().collect(is_deleted=lambda uid: uid in self.uids and deleted(uid), **options)

    def identity(self, uid: str) -> dict[str, str]:
        return {POD_NAME: f"p-{uid[:8]}", POD_NAMESPACE: "gc", POD_UID: uid}

    def log_dir(self, uid: str) -> Path:
        return Path(pod_log_dir(str(self.logs), "gc", f"p-{uid[:8]}", uid))

    async def sandbox(self, uid: str = "", attempt: int = 0) -> tuple[str, pb.PodSandboxConfig]:
        uid = uid or str(uuid.uuid4())
        self.uids.append(uid)
        namespaces = pb.NamespaceOption(network=pb.NODE, pid=pb.CONTAINER, ipc=pb.POD)
        config = pb.PodSandboxConfig(
            metadata=pb.PodSandboxMetadata(name=f"p-{uid[:8]}", uid=uid, namespace="gc", attempt=attempt),
            labels=self.identity(uid),
            log_directory=str(self.log_dir(uid)),
            linux=pb.LinuxPodSandboxConfig(
                cgroup_parent=f"{self.runtime.instance.cgroup_root}/gc{uid}",
                security_context=pb.LinuxSandboxSecurityContext(namespace_options=namespaces),
            ),
        )
        return await self.cri.runtime.run_pod_sandbox(config), config

    async def container(
        self, sandbox: tuple[str, pb.PodSandboxConfig], attempt: int, *command: str, start: bool = True
    ) -> str:
        sandbox_id, sandbox_config = sandbox
        uid = sandbox_config.metadata.uid
        config = pb.ContainerConfig(
            metadata=pb.ContainerMetadata(name="main", attempt=attempt),
            image=pb.ImageSpec(image=self.runtime.busybox_image),
            command=command or ("true",),
            labels=self.identity(uid) | {CONTAINER_NAME: "main"},
            log_path=f"main/{attempt}.log",
            linux=pb.LinuxContainerConfig(),
        )
        container = await self.cri.runtime.create_container(sandbox_id, config, sandbox_config)
        if start:
            await self.cri.runtime.start_container(container)
            if not command:
                # It ends by itself; to stop it at that very moment can fail.
                while (
                    await self.cri.runtime.container_status(container)
                ).status.state != pb.CONTAINER_EXITED:
                    await asyncio.sleep(0.02)
            link = self.links / legacy_log_link(f"p-{uid[:8]}", "gc", "main", container)
            link.symlink_to(self.log_dir(uid) / config.log_path)
        return container

    async def containers(self) -> set[str]:
        found = await self.cri.runtime.list_containers()
        return {one.id for one in found if one.labels.get(POD_UID) in self.uids}

    async def sandboxes(self) -> set[str]:
        found = await self.cri.runtime.list_pod_sandbox()
        return {one.id for one in found if one.labels.get(POD_UID) in self.uids}

    def linked(self) -> set[str]:
        return {link.name.rpartition("-")[2].removesuffix(".log") for link in self.links.iterdir()}


@pytest.fixture
async def node(
    cri: RuntimeConnection, private_runtime: RunningRuntime, tmp_path: Path
) -> AsyncIterator[Node]:
    node = Node(cri, private_runtime, tmp_path)
    try:
        yield node
    finally:
        for sandbox in await node.sandboxes():
            await cri.runtime.stop_pod_sandbox(sandbox)
            await cri.runtime.remove_pod_sandbox(sandbox)


@pytest.mark.machine
class TestCollecting:
    async def test_collect_dead_containers_removes_logs_and_links(self, node: Node) -> None:
        sandbox = await node.sandbox()
        folder = node.log_dir(sandbox[1].metadata.uid) / "main"
        made = [await node.container(sandbox, attempt) for attempt in range(3)]
        running = await node.container(sandbox, 3, "sleep", "600")
        (folder / "0.log.20260101-000000.gz").touch()
        assert node.linked() == {*made, running}
        await node.collect()
        assert await node.containers() == {made[2], running}
        assert sorted(path.name for path in folder.iterdir()) == ["2.log", "3.log"]
        assert node.linked() == {made[2], running}
        await node.collect()
        assert await node.containers() == {made[2], running}

    async def test_collect_deleted_pod_removes_containers_sandbox_and_logs(self, node: Node) -> None:
        sandbox, other = await node.sandbox(), await node.sandbox()
        uid = sandbox[1].metadata.uid
        await node.container(sandbox, 0)
        made = await node.container(sandbox, 1, start=False)
        kept = await node.container(other, 0)
        await node.cri.runtime.stop_pod_sandbox(sandbox[0])
        await node.collect(lambda one: one == uid, all_sources_ready=False)
        assert made in await node.containers(), "a slow source deletes nothing"
        assert node.log_dir(uid).is_dir()
        await node.collect(lambda one: one == uid)
        assert await node.containers() == {kept}
        assert await node.sandboxes() == {other[0]}
        assert not node.log_dir(uid).exists()
        assert node.log_dir(other[1].metadata.uid).is_dir()
        assert node.linked() == {kept}

    async def test_collect_evict_all_removes_containers_of_removable_pod(self, node: Node) -> None:
        sandbox = await node.sandbox()
        uid = sandbox[1].metadata.uid
        container = await node.container(sandbox, 0)
        await node.cri.runtime.stop_pod_sandbox(sandbox[0])
        await node.collect(is_removable=lambda one: one == uid)
        assert await node.containers() == {container}
        await node.collect(is_removable=lambda one: one == uid, evict_all=True)
        assert await node.containers() == set()
        assert await node.sandboxes() == set()
        assert node.log_dir(uid).is_dir(), "its pod still exists"

    async def test_collect_old_sandboxes_newest_stays(self, node: Node) -> None:
        first = await node.sandbox()
        uid = first[1].metadata.uid
        await node.cri.runtime.stop_pod_sandbox(first[0])
        second = await node.sandbox(uid, attempt=1)
        await node.cri.runtime.stop_pod_sandbox(second[0])
        await node.collect()
        assert await node.sandboxes() == {second[0]}

    async def test_collect_container_removal_fails_sandbox_stays(
        self, node: Node, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        sandbox = await node.sandbox()
        container = await node.container(sandbox, 0)
        await node.cri.runtime.stop_pod_sandbox(sandbox[0])

        async def refuse(container_id: str) -> None:
            raise CriError("RemoveContainer", "Internal", "the disk is broken")

        with monkeypatch.context() as patch:
            patch.setattr(node.cri.runtime, "remove_container", refuse)
            await node.collect(lambda uid: True)
        assert await node.containers() == {container}
        assert await node.sandboxes() == {sandbox[0]}
        await node.collect(lambda uid: True)
        assert await node.containers() == await node.sandboxes() == set()

    async def test_collect_dangling_log_links_removed_except_running_and_foreign(
        self, node: Node, tmp_path: Path
    ) -> None:
        sandbox = await node.sandbox()
        uid = sandbox[1].metadata.uid
        running = await node.container(sandbox, 0, "sleep", "600")
        ended = await node.container(sandbox, 1)
        for attempt in (0, 1):
            (node.log_dir(uid) / f"main/{attempt}.log").rename(tmp_path / f"rotated{attempt}")
        gone = node.links / f"p_ns_main-{'0' * 64}.log"
        gone.symlink_to(node.log_dir(uid) / "main/9.log")
        foreign = node.links / f"other-{'1' * 64}.log"
        foreign.symlink_to("/nowhere/else.log")
        (node.links / "plain.log").touch()
        await node.collect()
        left = {path.name for path in node.links.iterdir()}
        assert not os.path.lexists(gone)
        assert {foreign.name, "plain.log"} <= left
        assert {name for name in (running, ended) if any(name in link for link in left)} == {running}

    async def test_remove_container_twice_succeeds(self, node: Node) -> None:
        sandbox = await node.sandbox()
        container = await node.container(sandbox, 0)
        await node.collector().remove_container(container)
        await node.collector().remove_container(container)
        assert await node.containers() == set()

    async def test_remove_container_logs_path_outside_log_dir_not_deleted(
        self, node: Node, tmp_path: Path
    ) -> None:
        precious = tmp_path / "0.log"
        precious.touch()
        logs = node.collector()._logs
        node.logs.mkdir()
        for path in (str(precious), f"{node.logs}/../0.log", "", "0.log"):
            logs.remove_container_logs(path)
        assert precious.exists()

    async def test_collect_missing_directories_succeeds(self, node: Node, tmp_path: Path) -> None:
        collector = GarbageCollector(node.cri, tmp_path / "none", None)
        await collector.collect(is_deleted=lambda uid: False, all_sources_ready=True)

    async def test_collect_runtime_unavailable_raises_cri_error(
        self, node: Node, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async def nobody(*_: object) -> None:
            raise NotFound("ListContainers", "Unavailable", "gone")

        monkeypatch.setattr(node.cri.runtime, "list_containers", nobody)
        with pytest.raises(CriError):
            await node.collect()
