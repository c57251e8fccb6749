"""One container ends in a way that restarts all: a pod begins anew where it is, whoever finishes that."""

from collections.abc import Iterator

import pytest

from tests.support.manifests import Document, container, forever, pod
from tests.support.node import Node, all_statuses, condition
from tests.support.runtime_view import CONTAINER_NAME

pytestmark = pytest.mark.machine

SHARED = [{"name": "shared", "mountPath": "/shared"}]
RULES = [{"action": "RestartAllContainers", "exitCodes": {"operator": "In", "values": [3]}}]
KIND = "AllContainersRestarting"
NAME = "anew-n1"
STATES = {
    "first": "terminated",
    "side": "running",
    "main": "running",
    "stubborn": "running",
    "once": "terminated",
}


@pytest.fixture(autouse=True)
def tidy(node: Node) -> Iterator[None]:
    yield
    for path in node.manifests.iterdir():
        path.unlink()


def document() -> Document:
    """A pod that restarts when it finds the file `go`; what it did before is in its volume."""
    told = "echo {} >> /shared/story"
    until_told = forever(
        f"{told.format('main')}; until rm /shared/go 2>/dev/null; do sleep 0.1; done; exit 3"
    )
    return pod(
        "anew",
        container(command=until_told, volumeMounts=SHARED, restartPolicy="Never", restartPolicyRules=RULES),
        # It does not listen, so the pod can be seen, and its agent killed, while it restarts.
        container("stubborn", ["sleep", "3600"]),
        container("once", ["sh", "-c", told.format("once")], volumeMounts=SHARED, restartPolicy="Never"),
        initContainers=[
            container("first", ["sh", "-c", told.format("first")], volumeMounts=SHARED),
            container("side", restartPolicy="Always", volumeMounts=SHARED),
        ],
        restartPolicy="Never",
        terminationGracePeriodSeconds=1,
        volumes=[{"name": "shared", "emptyDir": {}}],
    )


def wait_told(node: Node, lives: int) -> None:
    """Wait until the pod's containers have written what they write in so many lives, and no more."""
    expected = sorted(["first", "main", "once"] * lives)

    def told() -> list[str]:
        return sorted(node.shell(NAME, "cat /shared/story", "side").split())

    node.wait(f"what is told in {lives} lives", lambda: len(told()) >= len(expected))
    assert told() == expected


def incarnations(node: Node) -> dict[str, str]:
    """The pod's containers in the runtime, none of which is there twice."""
    found = node.truth.containers(NAME)
    by_name = {one.labels[CONTAINER_NAME]: one.id for one in found}
    assert len(by_name) == len(found)
    return by_name


def wait_life(node: Node, number: int) -> Document:
    """Wait until all of the pod's containers have begun again so many times, and those that stay run."""

    def fits(found: Document) -> bool:
        begun = {
            status["name"]: next(iter(status["state"]))
            for status in all_statuses(found)
            if status["restartCount"] == number
        }
        return begun == STATES and condition(found, KIND) == "False"

    return node.wait_pod(NAME, f"to have begun again {number} times", fits)


def since(found: Document) -> str:
    """When the pod last began or ended to restart: this stays to be seen, however quick that was."""
    return next((c["lastTransitionTime"] for c in found["status"]["conditions"] if c["type"] == KIND), "")


def begin_anew(node: Node, before: Document) -> None:
    """Have the pod restart; that takes a while, in which this returns unless the machine is very busy."""
    # From outside: a command goes with the container that it is in, and all of them go.
    volumes = node.root / "pods" / before["metadata"]["uid"] / "volumes"
    (volumes / "kubernetes.io~empty-dir/shared/go").touch()
    node.wait_pod(NAME, "to restart", lambda found: since(found) != since(before))


def test_restart_all_containers_rule_restarts_in_same_sandbox(node: Node) -> None:
    node.write(document())
    born = wait_life(node, 0)
    (sandbox,), before = node.truth.sandboxes(NAME), incarnations(node)
    assert before.keys() == STATES.keys()

    begin_anew(node, born)
    again = wait_life(node, 1)
    assert [box.id for box in node.truth.sandboxes(NAME)] == [sandbox.id]
    assert again["status"]["podIP"] == born["status"]["podIP"]
    now = incarnations(node)
    assert now.keys() == STATES.keys()
    assert not set(now.values()) & set(before.values())
    wait_told(node, 2)
    for status in all_statuses(again):
        assert status["lastState"]["terminated"]["reason"] == "RestartingAllContainers"
    stopped = [where for reason, _, where in node.events(NAME) if reason == "Killing"]
    assert sorted(stopped) == ["spec.containers{stubborn}", "spec.initContainers{side}"]

    # An agent dies in the middle: the next one finds out by itself, and does the rest once.
    begin_anew(node, again)
    node.kill()
    node.start()
    wait_life(node, 2)
    assert [box.id for box in node.truth.sandboxes(NAME)] == [sandbox.id]
    third = incarnations(node)
    assert third.keys() == STATES.keys()
    assert not set(third.values()) & set(now.values())
    assert not node.stale_links(NAME)
    wait_told(node, 3)
