"""Mirror pods: which ones there shall be, what they look like, and that they come to be."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pykubelet.api.meta import from_document, to_document
from pykubelet.api.pod import Pod
from pykubelet.apiserver.client import Resource
from pykubelet.apiserver.errors import AlreadyExists, Conflict, Forbidden, KubeError, NotFound, Unreachable
from pykubelet.podconfig.mux import PodChange, PodStore
from pykubelet.podconfig.static_pods import HASH_ANNOTATION, MIRROR_ANNOTATION, complete_static_pod
from pykubelet.status.mirror_pods import DesiredMirrors, MirrorPods, Plan, mirror_of, plan
from pykubelet.util.tasks import TaskScope
from tests.support.pods import NOW, make_pod

GOLDEN = Path(__file__).parents[2] / "data" / "golden" / "mirror-pod.json"


def static(name: str = "a", hash: str = "h1") -> Pod:
    return make_pod(
        hash,
        name,
        annotations={HASH_ANNOTATION: hash, "kubernetes.io/config.source": "file"},
        resource_version="",
    )


def mirror(name: str = "a", hash: str = "h1", uid: str = "m1", *, deleting: bool = False) -> Pod:
    return make_pod(
        uid, name, annotations={MIRROR_ANNOTATION: hash}, deletion_timestamp=NOW if deleting else None
    )


def told(found: Plan) -> tuple[list[str], list[str]]:
    return [pod.metadata.name for pod in found.create], [pod.uid for pod in found.delete]


@pytest.mark.parametrize(
    ("wanted", "there", "keep", "create", "delete"),
    [
        ([], [], (), [], []),
        ([static()], [], (), ["a"], []),
        ([static()], [mirror()], (), [], []),
        ([static(hash="h2")], [mirror(hash="h1")], (), [], ["m1"]),
        ([static()], [mirror(deleting=True)], (), [], ["m1"]),
        ([], [mirror()], (), [], ["m1"]),
        ([], [mirror(deleting=True)], (), [], ["m1"]),
        # The manifest is gone, the pod not yet.
        ([], [mirror()], ("default/a",), [], []),
        ([static("b")], [mirror("a")], ("default/c",), ["b"], ["m1"]),
        # The manifest has changed, and the old pod has not ended yet.
        ([static(hash="h2")], [mirror(hash="h1")], ("default/a",), [], []),
        ([static(hash="h2")], [mirror(hash="h1", deleting=True)], ("default/a",), [], []),
    ],
)
def test_plan_creates_missing_and_deletes_outdated_mirror_pods(
    wanted: list[Pod], there: list[Pod], keep: tuple[str, ...], create: list[str], delete: list[str]
) -> None:
    assert told(plan(wanted, there, keep)) == (create, delete)


names = st.sampled_from("abc")
hashes = st.sampled_from(["h1", "h2"])


@given(
    st.lists(st.builds(static, names, hashes), unique_by=lambda pod: pod.full_name),
    st.lists(
        st.builds(mirror, names, hashes, st.uuids().map(str), deleting=st.booleans()),
        unique_by=lambda pod: pod.full_name,
    ),
)
def test_plan_any_state_converges_to_one_mirror_per_static_pod(wanted: list[Pod], there: list[Pod]) -> None:
    for _ in range(2):
        todo = plan(wanted, there)
        assert {pod.full_name for pod in todo.create}.isdisjoint(pod.full_name for pod in there)
        there = [pod for pod in there if pod not in todo.delete]
        there += [mirror_of(pod, "n", "node-uid") for pod in todo.create]
    assert plan(wanted, there) == Plan()
    shown = {pod.full_name: pod.metadata.annotations[MIRROR_ANNOTATION] for pod in there}
    assert shown == {pod.full_name: pod.uid for pod in wanted}


def test_mirror_of_static_pod_equals_upstream_recording() -> None:
    golden = json.loads(GOLDEN.read_text())
    metadata = {"name": "static-web", "namespace": "kube-system", "labels": {"app": "static"}}
    document = {"metadata": metadata}
    # What a manifest says; the API server adds the rest.
    document["spec"] = {
        key: value
        for key, value in golden["spec"].items()
        if key in ("containers", "priorityClassName", "priority", "preemptionPolicy")
    }
    pod = complete_static_pod(
        from_document(Pod, document), source="file", origin="/m/web.yaml", node_name="vm", now=0
    )
    made = to_document(mirror_of(pod, "vm", "UUID"))
    meta, wanted = made["metadata"], golden["metadata"]
    assert made["status"] == {}
    assert meta["annotations"][MIRROR_ANNOTATION] == meta["annotations"][HASH_ANNOTATION] == pod.uid
    assert meta["annotations"].keys() == wanted["annotations"].keys()
    assert meta["ownerReferences"] == wanted["ownerReferences"]
    assert {**meta, "annotations": 0} == {
        "annotations": 0,
        "name": wanted["name"],
        "namespace": wanted["namespace"],
        "labels": wanted["labels"],
        "ownerReferences": wanted["ownerReferences"],
    }
    assert made["spec"]["tolerations"] == golden["spec"]["tolerations"]
    assert made["spec"]["nodeName"] == "vm"


class Api:
    """Keeps pods by name, and fails as it is told."""

    def __init__(self) -> None:
        self.pods: dict[str, Pod] = {}
        self.failures: list[KubeError] = []
        self.down = False
        self.asked: list[str] = []
        self.made = 0

    async def _begin(self, what: str) -> None:
        self.asked.append(what)
        await asyncio.sleep(0.01)
        if self.down:
            raise Unreachable("https://api", "refused")
        if self.failures:
            raise self.failures.pop(0)

    async def create(self, resource: Resource[Pod], obj: Pod, namespace: str = "") -> Pod:
        await self._begin(f"create {obj.metadata.name}")
        if obj.full_name in self.pods:
            raise AlreadyExists(409, "AlreadyExists", "taken")
        self.made += 1
        metadata = msgspec.structs.replace(obj.metadata, uid=f"mirror-{self.made}")
        self.pods[obj.full_name] = msgspec.structs.replace(obj, metadata=metadata)
        return self.pods[obj.full_name]

    async def delete(
        self,
        resource: Resource[Pod],
        name: str,
        namespace: str = "",
        *,
        grace_period_seconds: int | None = None,
        uid: str = "",
    ) -> None:
        assert grace_period_seconds == 0
        await self._begin(f"delete {name}")
        found = self.pods.get(f"{namespace}/{name}")
        if found is None:
            raise NotFound(404, "NotFound", "gone")
        if found.uid != uid:
            raise Conflict(409, "Conflict", "Precondition failed: UID")
        del self.pods[found.full_name]

    async def pause(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


class Node:
    """The parts around the mirrors."""

    def __init__(self) -> None:
        self.api = Api()
        self.store = PodStore()
        self.leaving: set[str] = set()
        self.reported = True
        self.node_uid = "node-uid"
        self.mirrors = MirrorPods(
            self.api, self.store, "n", desired=self._wishes, node_uid=lambda: self.node_uid
        )

    def _wishes(self) -> DesiredMirrors | None:
        return DesiredMirrors(self.store.pods(), lambda: self.leaving) if self.reported else None

    def want(self, pod: Pod) -> None:
        self.store.apply(PodChange("ADD", pod, "file"))
        self.mirrors.wake()

    def unwant(self, pod: Pod) -> None:
        self.store.apply(PodChange("REMOVE", pod, "file"))
        self.mirrors.wake()

    def watch(self) -> None:
        """Have the watch catch up."""
        for pod in self.store.mirrors():
            if self.api.pods.get(pod.full_name) is not pod:
                self.store.apply(PodChange("REMOVE", pod, "api"))
                self.mirrors.handle_mirror_update(pod)
        for pod in self.api.pods.values():
            self.store.apply(PodChange("ADD", pod, "api"))
            self.mirrors.handle_mirror_update(pod)

    @property
    def shown(self) -> dict[str, str]:
        return {
            pod.metadata.name: pod.metadata.annotations.get(MIRROR_ANNOTATION, "?")
            for pod in self.api.pods.values()
        }


@asynccontextmanager
async def keeping() -> AsyncIterator[Node]:
    node = Node()
    async with TaskScope() as scope:
        scope.start(node.mirrors.run(), name="mirrors")
        yield node


pytestmark = pytest.mark.looptime


async def test_mirror_pods_static_pod_ended_deletes_mirror() -> None:
    async with keeping() as node:
        node.want(static())
        await asyncio.sleep(0.1)
        assert node.shown == {"a": "h1"}
        # Until the watch shows it, it is not made again.
        node.mirrors.wake()
        await asyncio.sleep(0.1)
        node.watch()
        await asyncio.sleep(60)
        assert node.api.asked == ["create a"]
        node.unwant(static())
        node.leaving = {"default/a"}
        await asyncio.sleep(60)
        assert node.shown == {"a": "h1"}
        node.leaving = set()
        node.mirrors.wake()
        await asyncio.sleep(0.1)
        node.watch()
        await asyncio.sleep(60)
        assert node.shown == {}
        assert node.api.asked == ["create a", "delete a"]


async def test_mirror_pods_manifest_changed_recreates_mirror() -> None:
    async with keeping() as node:
        node.want(static())
        await asyncio.sleep(0.1)
        node.watch()
        node.unwant(static())
        node.want(static(hash="h2"))
        await asyncio.sleep(0.1)
        node.watch()
        await asyncio.sleep(0.1)
        node.watch()
        assert node.shown == {"a": "h2"}
        assert node.api.asked == ["create a", "delete a", "create a"]


@pytest.mark.parametrize("seen", [True, False])
async def test_mirror_pods_mirror_deleted_is_recreated(seen: bool) -> None:
    async with keeping() as node:
        node.want(static())
        await asyncio.sleep(0.1)
        if seen:
            node.watch()
        node.api.pods.clear()
        node.watch()
        await asyncio.sleep(0.1 if seen else 25)
        assert node.shown == {"a": "h1"}
        # Deleted in grace: it is ended at once, and made anew.
        node.watch()
        leaving = node.api.pods["default/a"]
        gone = msgspec.structs.replace(leaving.metadata, deletion_timestamp=NOW)
        node.api.pods["default/a"] = msgspec.structs.replace(leaving, metadata=gone)
        node.watch()
        await asyncio.sleep(0.1)
        node.watch()
        await asyncio.sleep(0.1)
        assert node.shown == {"a": "h1"}
        assert node.api.pods["default/a"].metadata.deletion_timestamp is None


async def test_mirror_pods_sources_not_ready_sends_no_request() -> None:
    async with keeping() as node:
        node.reported = False
        node.api.pods["default/a"] = mirror()
        node.watch()
        await asyncio.sleep(60)
        assert node.api.asked == []
        node.reported = True
        node.mirrors.wake()
        await asyncio.sleep(1)
        node.watch()
        await asyncio.sleep(60)
        assert node.api.asked == ["delete a"]


async def test_mirror_pods_node_uid_unknown_creation_waits() -> None:
    async with keeping() as node:
        node.node_uid = ""
        node.want(static())
        await asyncio.sleep(60)
        assert node.api.asked == []
        node.node_uid = "late"
        await asyncio.sleep(2)
        (owner,) = node.api.pods["default/a"].metadata.owner_references
        assert owner.uid == "late"


async def test_mirror_pods_api_server_down_creates_after_recovery() -> None:
    async with keeping() as node:
        node.api.down = True
        node.want(static())
        node.want(static("b", "h2"))
        await asyncio.sleep(600)
        assert len(node.api.asked) < 100
        node.api.down = False
        await asyncio.sleep(65)
        assert node.shown == {"a": "h1", "b": "h2"}


async def test_mirror_pods_create_forbidden_other_mirrors_created() -> None:
    async with keeping() as node:
        node.api.failures = [Forbidden(403, "Forbidden", "quota")]
        node.want(static())
        node.want(static("b", "h2"))
        await asyncio.sleep(0.1)
        assert node.shown == {"b": "h2"}
        await asyncio.sleep(20)
        assert node.shown == {"a": "h1", "b": "h2"}


async def test_mirror_pods_create_always_forbidden_new_mirror_not_delayed() -> None:
    async with keeping() as node:
        node.api.failures = [Forbidden(403, "Forbidden", "quota")] * 100
        node.want(static())
        await asyncio.sleep(600)
        asked = 100 - len(node.api.failures)
        assert asked < 40
        node.api.failures = node.api.failures[:1]
        node.want(static("b", "h2"))
        await asyncio.sleep(0.1)
        assert node.shown == {"b": "h2"}


async def test_mirror_pods_name_taken_retries_and_logs_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with keeping() as node:
        node.api.pods["default/a"] = make_pod("somebody", "a")
        node.want(static())
        await asyncio.sleep(100)
        assert 5 <= len(node.api.asked) <= 15
        # It is said once.
        messages = [record.getMessage() for record in caplog.records]
        assert sum("another pod has its name" in message for message in messages) == 1
        assert len(messages) < 5
        del node.api.pods["default/a"]
        await asyncio.sleep(15)
        assert node.shown == {"a": "h1"}
