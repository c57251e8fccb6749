"""The agent is killed at random, again and again, while pods come, change and go; then all is right.

The agent dies as by a power cut, at any point of a start or a stop; the runtime lives on. After every
kill the runtime is looked at: nothing runs twice, and what ran and was not touched is still the very
same container. At the end every wanted pod runs once, nothing else runs, and nothing is left behind.

The story of a run follows from its seed (`PYKUBELET_TEST_SEED`), as far as the machine's own timing
lets it; it is printed with every failure.
"""

import os
import random
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from tests.support.data_dir import short_dir
from tests.support.manifests import Document, container, forever, pod
from tests.support.node import Node, all_statuses, is_ready, kubelet_node, running, up_node
from tests.support.runtime import RunningRuntime
from tests.support.runtime_view import CONTAINER_NAME, POD_NAME

pytestmark = pytest.mark.machine

KILLS = 50
NAMES = ("plain", "pair", "init", "side", "hook", "disk", "once")
STEADY = "steady"
ITEMS = [{"path": "name", "fieldRef": {"fieldPath": "metadata.name"}}]
VOLUMES: tuple[Document, ...] = (
    {"name": "a", "emptyDir": {}},
    {"name": "b", "emptyDir": {"medium": "Memory"}},
    {"name": "info", "downwardAPI": {"items": ITEMS}},
    {"name": "both", "projected": {"sources": [{"downwardAPI": {"items": ITEMS}}]}},
    {"name": "host", "hostPath": {"path": "/tmp", "type": "Directory"}},
)


@pytest.fixture
def node(runtime: RunningRuntime) -> Iterator[Node]:
    with running(kubelet_node(runtime)) as started:
        yield started


@pytest.fixture
def own_node() -> Iterator[Node]:
    with short_dir() as path, running(up_node(path)) as started:
        yield started


def make(name: str, version: str) -> Document:
    """A pod of the kind that its name says; its version is a label, which its sandbox bears too."""
    meta = {"labels": {"version": version}}
    if name == "pair":
        return pod(name, container("one"), container("two"), meta=meta)
    if name == "init":
        first = container("first", ["sh", "-c", "sleep 0.2"])
        return pod(name, initContainers=[first, container("second", ["true"])], meta=meta)
    if name == "side":
        return pod(name, initContainers=[container("sidecar", restartPolicy="Always")], meta=meta)
    if name == "hook":
        hooks = {
            "postStart": {"exec": {"command": ["true"]}},
            "preStop": {"exec": {"command": ["sleep", "0.3"]}},
        }
        return pod(name, container(lifecycle=hooks), meta=meta)
    if name == "disk":
        mounts = [{"name": volume["name"], "mountPath": f"/{volume['name']}"} for volume in VOLUMES]
        part = {"name": "a", "mountPath": "/part", "subPath": "of/a"}
        script = "echo > /a/x > /b/x > /part/x; test -e /info/name -a -e /both/name -a -d /host"
        return pod(
            name,
            container(command=forever(script), volumeMounts=[*mounts, part]),
            volumes=list(VOLUMES),
            securityContext={"fsGroup": 2000},
            meta=meta,
        )
    if name == "once":
        # An agent that dies must not make it fail.
        return pod(name, restartPolicy="Never", meta=meta)
    return pod(name, meta=meta)


@dataclass
class World:
    """What is wanted, and what was seen to run of it."""

    node: Node
    dice: random.Random
    wanted: dict[str, str] = field(default_factory=dict)
    """Versions of pods by name."""
    seen: dict[tuple[str, str], str] = field(default_factory=dict)
    """Ids of running containers by the name of pod and container; only of pods that nobody touched since."""

    known: dict[str, set[str]] = field(default_factory=dict)
    """All versions that there ever were of a pod."""
    revived: set[tuple[str, str]] = field(default_factory=set)
    """Versions that were wanted again: whether their containers had ended meanwhile is a matter of luck."""
    back: set[str] = field(default_factory=set)
    """Pods of which a version came back since the last check: what still runs of it may just be ending."""

    def change(self) -> None:
        """Add, edit or remove one pod."""
        name = self.dice.choice(NAMES)
        if name in self.wanted and self.dice.random() < 0.4:
            del self.wanted[name]
            self.node.remove(name)
        else:
            # Mostly something new; at times what it was before, which may be about to end.
            known = sorted(self.known.setdefault(name, set()))
            back = bool(known) and name != "once" and self.dice.random() < 0.25
            self.wanted[name] = version = self.dice.choice(known) if back else f"v{len(known)}"
            self.known[name].add(version)
            if back:
                self.revived.add((f"{name}-n1", version))
                self.back.add(name)
            self.node.write(make(name, version))
        self.seen = {key: id for key, id in self.seen.items() if key[0] != name}

    def check(self) -> None:
        """Look at the runtime while no agent is there."""
        versions = {box.id: box.labels.get("version", "") for box in self.node.truth.sandboxes()}
        now = self.node.truth.running()
        names = Counter((one.labels[POD_NAME], one.labels[CONTAINER_NAME]) for one in now)
        assert not [key for key, count in names.items() if count > 1], f"something runs twice: {names}"
        found: dict[str, set[str]] = {}
        for one in now:
            found.setdefault(one.labels[POD_NAME], set()).add(versions.get(one.pod_sandbox_id, "?"))
        assert all(len(copies) == 1 for copies in found.values()), f"two versions run at once: {found}"
        ids = {(one.labels[POD_NAME].removesuffix("-n1"), one.labels[CONTAINER_NAME]): one.id for one in now}
        lost = {key: id for key, id in self.seen.items() if ids.get(key) != id}
        assert not lost, f"restarted without need: {lost}, now {ids}"
        self.seen = {
            key: id
            for key, id in ids.items()
            if self.wanted.get(key[0]) in found.get(f"{key[0]}-n1", ())
            and key[0] not in self.back
            and key[1] not in ("first", "second")
        }
        self.back.clear()


def test_kubelet_killed_at_random_converges_to_desired_pods(node: Node) -> None:
    play(node, KILLS, runtime_survives=True)


def test_kubelet_and_runtime_killed_at_random_converges_to_desired_pods(own_node: Node) -> None:
    play(own_node, 10, runtime_survives=False)


def play(node: Node, kills: int, *, runtime_survives: bool) -> None:
    seed = int(os.environ.get("PYKUBELET_TEST_SEED") or time.time_ns() % 100_000)
    print(f"\nPYKUBELET_TEST_SEED={seed}")
    dice = random.Random(seed)
    world = World(node, dice)
    world.wanted[STEADY] = "v0"
    node.start_pod(make(STEADY, "v0"))
    (steady,) = node.truth.running("steady-n1")
    for name in NAMES[:3]:
        world.wanted[name] = "v0"
        world.known[name] = {"v0"}
        node.write(make(name, "v0"))
    time.sleep(dice.uniform(0, 0.5))
    node.kill()
    for _ in range(kills - 1):
        if runtime_survives:
            world.check()
        for _ in range(dice.choice((0, 1, 2))):
            world.change()
        node.start(wait=not runtime_survives)
        # The agent needs about half a second to begin; the pods' starts and stops take about as long.
        for _ in range(dice.choice((0, 1, 2))):
            time.sleep(dice.uniform(0.2, 0.8))
            world.change()
        time.sleep(dice.uniform(0.3, 1.2))
        node.kill()
    if runtime_survives:
        world.check()
    node.start()
    check_the_end(world, seed, runtime_survives=runtime_survives)
    assert [one.id for one in node.truth.running("steady-n1")] == [steady.id]
    node.clear()


def check_the_end(world: World, seed: int, *, runtime_survives: bool) -> None:
    """Wait until every wanted pod runs, and look that it does so once and that there is nothing else.

    How a process ended while no runtime was there, nobody knows: an init container is run once more then.
    """
    node = world.node
    expected = {f"{name}-n1": version for name, version in world.wanted.items()}

    def settled() -> bool:
        pods = node.pods()
        versions = {it["metadata"]["name"]: it["metadata"]["labels"]["version"] for it in pods}
        return len(pods) == len(expected) and versions == expected and all(is_ready(it) for it in pods)

    node.wait(f"all pods to be right (seed {seed})", settled, 60)

    def ready() -> Counter[tuple[str, str]]:
        return Counter((box.labels[POD_NAME], box.labels["version"]) for box in node.truth.ready())

    # What nobody wants any more may still be ending.
    node.wait("nothing else to be ready", lambda: not ready() - Counter(expected.items()), 60)
    assert ready() == Counter(expected.items())
    wanted = Counter(
        (f"{name}-n1", one["name"])
        for name, version in world.wanted.items()
        for one in (*make(name, version)["spec"]["containers"], *sidecars(make(name, version)))
    )
    found = Counter((one.labels[POD_NAME], one.labels[CONTAINER_NAME]) for one in node.truth.running())
    assert found == wanted
    counts = {
        (it["metadata"]["name"], status["name"]): (status["restartCount"], status["lastState"])
        for it in node.pods()
        for status in all_statuses(it)
        if (it["metadata"]["name"], it["metadata"]["labels"]["version"]) not in world.revived
        if runtime_survives or status["name"] not in ("first", "second")
    }
    assert not any(count for count, _ in counts.values()), f"nothing ever crashed (seed {seed}): {counts}"
    uids = {it["metadata"]["uid"] for it in node.pods()}
    node.wait_none("the others to leave nothing", lambda: others(node, uids), 90)


def sidecars(document: Document) -> list[Document]:
    return [one for one in document["spec"].get("initContainers", ()) if one.get("restartPolicy") == "Always"]


def others(node: Node, uids: set[str]) -> list[str]:
    """What is left of pods that are not these."""
    mine = {box.id for box in node.truth.sandboxes() if box.metadata.uid in uids}
    mine |= {one.id for one in node.truth.containers() if one.pod_sandbox_id in mine}
    return [left for left in node.left_of() if not any(known in left for known in uids | mine)]
