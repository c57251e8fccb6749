"""The reference's recordings, replayed: the same pods lead to the same requests, statuses and events.

They run here as static pods, so what a static pod changes by nature is made equal first: its name
ends with the node's, it has no namespace of its own, annotations tell its source, it has no
generation, and there are no services. A crashing container is told by the recording as ended, by us as
waiting for its next start, with the same end in its last state: what users look for.
"""

import json
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import pytest

from tests.support.cri_recorder import Recording, recorded
from tests.support.golden import IMAGE, given, given_pods, plain, recording_of, requests_of, unordered_env
from tests.support.node import NAME, Document, Node, is_ready, kubelet_node, running, status_of
from tests.support.runtime import RunningRuntime

pytestmark = pytest.mark.machine

STEMS = ("basic", "lifecycle")
PODS = given_pods(*STEMS)


@dataclass(frozen=True)
class Replay:
    """The node on which all given pods ran."""

    node: Node
    recording: Recording
    pods: dict[str, Document]
    events: dict[str, list[tuple[str, str, str]]]


@pytest.fixture(scope="module")
def replay(runtime: RunningRuntime) -> Iterator[Replay]:
    """Run all given pods at once, until each is as it was recorded."""
    ctr = ["ctr", "--address", str(runtime.instance.socket), "--namespace", "k8s.io", "images", "tag"]
    subprocess.run([*ctr, runtime.busybox_image, IMAGE], check=True, capture_output=True)
    with recorded(runtime.endpoint, runtime.instance.data_dir / "proxy.sock") as recording:
        endpoint = f"unix://{runtime.instance.data_dir / 'proxy.sock'}"
        node = kubelet_node(
            runtime, endpoint=endpoint, clusterDNS=["10.96.0.10"], clusterDomain="cluster.local"
        )
        with running(node):
            for stem in STEMS:
                for document in given(stem):
                    node.write(document)
            pods = settled_pods(node)
            # The given pods take half a minute to stop; the runtime's removal at the end is quicker.
            yield Replay(node, recording, pods, {name: node.events(f"{name}-{NAME}") for _, name in PODS})


def settled_pods(node: Node) -> dict[str, Document]:
    """Wait for all given pods at once: the one that crashes is as recorded for a while only."""
    found: dict[str, Document] = {}

    def look() -> bool:
        for pod in node.pods():
            name = pod["metadata"]["name"].removesuffix(f"-{NAME}")
            if name == "crashes" and name in found:
                continue
            with suppress(StopIteration):  # a container's status that the pod does not have yet
                if SETTLED[name](pod):
                    found[name] = pod
        return len(found) == len(PODS)

    node.wait("all pods to be as recorded", look, 120)
    return found


SETTLED: dict[str, Any] = {
    **dict.fromkeys(("besteffort", "burstable", "guaranteed", "lifecycle"), is_ready),
    "finishes": lambda pod: pod["status"]["phase"] == "Succeeded",
    "crashes": lambda pod: (
        status_of(pod, "main")["restartCount"] == 2 and "waiting" in status_of(pod, "main")["state"]
    ),
    "no-image": lambda pod: "ErrImageNeverPull" in json.dumps(pod["status"]),
}


def expected(stem: str, name: str, part: str) -> Any:
    """A part of the recording, with the namespace that static pods have."""
    return plain(recording_of(stem)[name][part], [(f"scn-given-{stem}", "default")])


def as_recorded(replay: Replay, name: str, document: Any) -> Any:
    """Ours in the recording's clothes."""
    pod, node = replay.pods[name], replay.node
    return plain(
        document,
        [
            (pod["metadata"]["uid"], "POD_UID"),
            (f"{name}-{NAME}", name),
            (str(node.instance.pod_logs), "/var/log/pods"),
            (str(node.root), "ROOT"),
            (f'"{node.instance.cgroup_root}/kubepods', '"/kubepods'),
            (pod["status"].get("podIP") or "no address", "POD_IP"),
        ],
    )


def without_nature(calls: list[Document]) -> list[Document]:
    """Drop what being a static pod, or of an API server, decides."""
    for call in calls:
        config = call["config"]
        for annotation in [
            key for key in config.get("annotations", {}) if key.startswith("kubernetes.io/config.")
        ]:
            del config["annotations"][annotation]
        if not config.get("annotations"):
            config.pop("annotations", None)
        envs = [env for env in config.pop("envs", []) if not env["key"].startswith("KUBERNETES_")]
        if envs:
            config["envs"] = envs
        call["config"] = unordered_env(config)
    return calls


@pytest.mark.parametrize(("stem", "name"), PODS)
def test_golden_cri_requests_match_recording(replay: Replay, stem: str, name: str) -> None:
    asked = requests_of(replay.recording, replay.pods[name]["metadata"]["uid"])
    ours = without_nature(as_recorded(replay, name, asked))
    assert ours == without_nature(expected(stem, name, "cri"))


@pytest.mark.parametrize(("stem", "name"), PODS)
def test_golden_pod_statuses_match_recording(replay: Replay, stem: str, name: str) -> None:
    ours = _settled(as_recorded(replay, name, replay.pods[name]["status"]))
    theirs = _settled(expected(stem, name, "status"))
    if name == "crashes":
        (main,) = ours["containerStatuses"]
        (waiting,) = main["state"].values()
        assert waiting["reason"] == "CrashLoopBackOff"
        main["state"] = main["lastState"]
    assert ours == theirs


def _settled(status: Document) -> Document:
    """Make equal what differs by node: names of one image, addresses, pod-level resources."""
    for key in ("observedGeneration", "resources", "hostIP", "hostIPs"):
        status.pop(key, None)
    for condition in status["conditions"]:
        condition.pop("observedGeneration", None)
    for container in [*status.get("containerStatuses", ()), *status.get("initContainerStatuses", ())]:
        if "containerID" in container:
            container["image"] = "SAME_ID"
    return status


@pytest.mark.parametrize(("stem", "name"), PODS)
def test_golden_events_match_recording(replay: Replay, stem: str, name: str) -> None:
    ours = {tuple(event) for event in as_recorded(replay, name, replay.events[name])}
    theirs = {(reason, message, where) for _, reason, message, where in expected(stem, name, "events")}
    # A probe may look before the server listens; the recording's did not.
    assert {event for event in ours if event[0] != "Unhealthy"} == theirs
