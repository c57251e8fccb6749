"""The reference's recordings, replayed in a cluster: the same requests, statuses, events, objects, files.

The node and the namespaces bear the recorded names, and the recorded cluster gave no tokens to pods, so
that all is compared as it is; what is made equal is what `tests/support/golden.py` names, and what the test's
node has elsewhere than the recorded one: its logs, its cgroup root, its host folder, its port, and the
machine's own numbers.

Three differences are meant. A sandbox that was stopped in order is not stopped again before it is removed.
A probe may look before the server listens, which is then told: the recording's did not. And the state
files of managers that we do not have yet are not there.
"""

import csv
import os
import re
import stat
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from pykubelet.cm.capacity import allocatable, node_capacity, read_capacity
from pykubelet.config.types import KubeletConfiguration
from pykubelet.devcluster.reference_kubelet import undo_host_changes
from pykubelet.linux.cgroupfs import detect_cgroups
from pykubelet.linux.host_info import read_machine
from tests.cluster.conftest import fresh_namespace
from tests.support.cluster_node import ClusterNode, cluster_node, in_cluster
from tests.support.cri_recorder import Recording, recorded
from tests.support.golden import (
    GOLDEN,
    IMAGE,
    calls_about,
    given,
    given_pods,
    golden,
    plain,
    recording_of,
    requests_of,
    unordered_env,
)
from tests.support.node import Document, all_statuses, condition, is_ready, status_of
from tests.support.plane import Plane
from tests.support.runtime import RunningRuntime

pytestmark = pytest.mark.machine

NODE = "vm"
STEMS = ("basic", "env", "lifecycle", "volumes")
PODS = given_pods(*STEMS)
EVICTION = {"memory.available": "100Mi", "nodefs.available": "1%"}
"""What the recorded node kept free."""
REFERENCE = "GOLDEN_REFERENCE" in os.environ
"""Replay with the reference kubelet instead: what the recordings say is so on this machine, too."""
STATIC_WEB = {
    "apiVersion": "v1",
    "kind": "Pod",
    "metadata": {"name": "static-web", "namespace": "kube-system", "labels": {"app": "static"}},
    "spec": {
        "priorityClassName": "system-node-critical",
        "containers": [
            {
                "name": "web",
                "image": IMAGE,
                "command": ["sh", "-c", "sleep 3600"],
                "resources": {"requests": {"cpu": "10m"}},
            }
        ],
    },
}
SETTLED: dict[str, Any] = {
    "finishes": lambda pod: (
        pod["status"]["phase"] == "Succeeded" and condition(pod, "PodReadyToStartContainers") == "False"
    ),
    "crashes": lambda pod: status_of(pod, "main")["restartCount"] == 2 and _is_down(pod),
    "no-image": lambda pod: (
        status_of(pod, "main")["state"].get("waiting", {}).get("reason") == "ErrImageNeverPull"
    ),
}
Row = tuple[str, ...]


@dataclass(frozen=True)
class Replay:
    """The node on which all given pods ran, and what was seen of it."""

    node: ClusterNode
    recording: Recording
    elsewhere: list[tuple[str, str]]
    """Where things are here and were when recorded."""
    objects: dict[str, Document]
    cgroups: set[Row]
    files: set[Row]
    pods: dict[str, Document]
    events: dict[str, list[Row]]


@pytest.fixture(scope="module")
def replay(plane: Plane, runtime: RunningRuntime) -> Iterator[Replay]:
    """Run the pods that the recorded objects were of, then all others, until they are as recorded."""
    instance = runtime.instance
    ctr = ["ctr", "--address", str(instance.socket), "--namespace", "k8s.io", "images", "tag"]
    subprocess.run([*ctr, runtime.busybox_image, IMAGE], check=True, capture_output=True)
    with ExitStack() as stack:
        folder = stack.enter_context(_shared_folder(instance.data_dir / "hostdir"))
        socket = instance.data_dir / "proxy.sock"
        recording = stack.enter_context(recorded(runtime.endpoint, socket))
        if REFERENCE:
            stack.enter_context(undo_host_changes())
        made = cluster_node(
            plane,
            runtime,
            name=NODE,
            program=plane.reference_kubelet if REFERENCE else None,
            flags=[f"--cert-dir={instance.data_dir}/pki"],
            settings={
                "clusterDNS": ["10.96.0.10"],
                "containerRuntimeEndpoint": f"unix://{socket}",
                "evictionHard": EVICTION,
                "volumePluginDir": f"{instance.data_dir}/volume-plugins",
            },
        )
        node = stack.enter_context(in_cluster(made))
        for stem in STEMS:
            namespace = stack.enter_context(fresh_namespace(plane, f"scn-given-{stem}"))
            plane.patch("serviceaccount", "default", namespace, {"automountServiceAccountToken": False})
        node.write(STATIC_WEB)
        pods = [pod for pod in _create(node, "basic", folder) if node.wait_pod_ready(pod, 90)]
        objects = {
            # The cluster's part in it comes when its controllers come to it.
            "node": plane.wait_for("node", NODE, "", _completed, 90),
            "lease": plane.wait_for("lease", NODE, "kube-node-lease"),
            "mirror-pod": plane.wait_for("pod", f"static-web-{NODE}", "kube-system", is_ready, 90),
        }
        names = _names(objects["mirror-pod"], pods)
        # Those of ours are written some moments later, for many pods together.
        books = [node.root / name for name in ("allocated_pods_state", "actuated_pods_state")]
        node.wait("what pods have to be written", lambda: all(book.exists() for book in books), 60)
        # What tiers weigh is set a moment after their pods run; whatever else is wrong, the tests tell.
        with suppress(AssertionError):
            node.wait("cgroups as recorded", lambda: _cgroups(node, names) == _recorded_cgroups())
        cgroups = _cgroups(node, names)
        files = _settled_files(node, names)
        for stem in STEMS[1:]:
            pods += _create(node, stem, folder)
        # First of all what does not last: after its pause it crashes once more.
        crashes = next(pod for pod in pods if pod["metadata"]["name"] == "crashes")
        lasting = {"crashes": node.wait_api_pod(crashes, "as recorded", SETTLED["crashes"], 120)}
        others = [pod for pod in pods if pod is not crashes]
        node.wait("the second pause", lambda: _pauses(node, crashes) >= 2, 60)
        for pod in others:
            name = pod["metadata"]["name"]
            lasting[name] = node.wait_api_pod(pod, "as recorded", SETTLED.get(name, is_ready), 120)
        yield Replay(
            node,
            recording,
            [
                (str(instance.pod_logs), "/var/log/pods"),
                (f'"{instance.cgroup_root}/kubepods', '"/kubepods'),
                (str(folder), "/srv/hostdir"),
                (str(node.root), "ROOT"),
                (f'"{plane.cluster.settings.address}"', '"192.0.2.2"'),
            ],
            objects,
            cgroups,
            files,
            lasting,
            {pod["metadata"]["name"]: _events(node, pod) for pod in pods},
        )


@contextmanager
def _shared_folder(path: Path) -> Iterator[Path]:
    """A folder that is a shared mount, as the recorded pods' host folder was."""
    path.mkdir()
    subprocess.run(["mount", "--bind", path, path], check=True)
    try:
        subprocess.run(["mount", "--make-shared", path], check=True)
        yield path
    finally:
        subprocess.run(["umount", path], check=True)


def _create(node: ClusterNode, stem: str, folder: Path) -> list[Document]:
    made = []
    for document in given(stem, {"/srv/hostdir": str(folder)}):
        document["metadata"]["namespace"] = f"scn-given-{stem}"
        if document["kind"] == "Pod":
            document["spec"]["nodeName"] = NODE
        made.append(node.plane.create(document))
    return [document for document in made if document["kind"] == "Pod"]


def _is_down(pod: Document) -> bool:
    """Whether a container has crashed, which is told before it is said to wait, as the reference does it."""
    state = status_of(pod, "main")["state"]
    return "terminated" in state or state.get("waiting", {}).get("reason") == "CrashLoopBackOff"


def _pauses(node: ClusterNode, pod: Document) -> int:
    found = node.plane.events(pod["metadata"]["namespace"], pod["metadata"]["name"])
    return sum(event["count"] for event in found if event["reason"] == "BackOff")


def _completed(node: Document) -> bool:
    """Whether the cluster's controllers have done with a node what they do with a new one."""
    recorded = golden("node.json")["metadata"]["annotations"]
    return (
        is_ready(node)
        and node["spec"].keys() == {"podCIDR", "podCIDRs"}
        and node["metadata"]["annotations"].keys() == recorded.keys()
    )


def _events(node: ClusterNode, pod: Document) -> list[Row]:
    meta = pod["metadata"]
    stem = meta["namespace"].removeprefix("scn-given-")
    wanted = len(recording_of(stem)[meta["name"]]["events"])

    def look() -> list[Row] | None:
        found = {
            (event["type"], event["reason"], event["message"], event["involvedObject"].get("fieldPath", ""))
            for event in node.plane.events(meta["namespace"], meta["name"])
            if event["reason"] != "Unhealthy"
        }
        return sorted(found) if len(found) >= wanted else None

    return node.wait(f"{wanted} events of {meta['name']}", look, 60)


def _names(mirror: Document, pods: list[Document]) -> dict[str, str]:
    """The pods by their uids; a static pod's is not its mirror's."""
    names = {pod["metadata"]["uid"]: pod["metadata"]["name"] for pod in pods}
    return {**names, mirror["metadata"]["annotations"]["kubernetes.io/config.hash"]: "static-web"}


def _cgroups(node: ClusterNode, names: dict[str, str]) -> set[Row]:
    """What the pods' cgroups are set to, in the recorded files."""
    if detect_cgroups().unified:
        return set()
    rows: set[Row] = set()
    for controller, file in {(row["controller"], row["file"]) for row in _table("cgroups-v1.tsv")}:
        top = detect_cgroups().path(controller, node.instance.cgroup_root)
        for path in (top / "kubepods", *(top / "kubepods").rglob("*/")):
            name = re.sub(r"[0-9a-f]{64}", "<container or sandbox id>", str(path.relative_to(top)))
            for uid, pod in names.items():
                name = name.replace(f"pod{uid}", f"pod<uid of {pod}>")
            rows.add((controller, name, file, (path / file).read_text().strip()))
    return rows


def _recorded_cgroups() -> set[Row]:
    """What they were set to when recorded, with this machine's own numbers."""
    if detect_cgroups().unified:
        return set()
    machine = read_capacity()
    own = {
        ("kubepods", "cpu.shares"): str(1024 * int(machine["cpu"])),
        ("kubepods", "memory.limit_in_bytes"): str(int(machine["memory"])),
        ("kubepods", "pids.max"): str(int(machine["pid"])),
    }
    cpus = (detect_cgroups().path("cpuset", "/") / "cpuset.cpus").read_text().strip()
    theirs: set[Row] = set()
    for row in _table("cgroups-v1.tsv"):
        value = own.get((row["cgroup"], row["file"]), row["value"])
        value = cpus if row["controller"] == "cpuset" else value
        theirs.add((row["controller"], row["cgroup"], row["file"], value))
    return theirs


def _files(node: ClusterNode, names: dict[str, str]) -> set[Row]:
    """What is below the root directory: path, kind, mode."""
    rows: set[Row] = set()
    for path in node.root.rglob("*"):
        name = re.sub(r"(/containers/\w+/)[0-9a-f]{8}$", r"\1RAND", f"ROOT/{path.relative_to(node.root)}")
        for uid, pod in names.items():
            name = name.replace(uid, "STATIC_UID" if pod == "static-web" else f"UID_OF_{pod}")
        mode = path.lstat().st_mode
        kind = "dir" if stat.S_ISDIR(mode) else "socket" if stat.S_ISSOCK(mode) else "file"
        rows.add((name, kind, oct(stat.S_IMODE(mode))))
    return rows


def _settled_files(node: ClusterNode, names: dict[str, str]) -> set[Row]:
    """As they are when all are there; what is written just now has another name for a moment."""
    found: set[Row] = set()

    def look() -> bool:
        nonlocal found
        found = _files(node, names)
        return _other_files(found) == OTHER_FILES

    # Whatever is wrong, the tests tell.
    with suppress(AssertionError):
        node.wait("files as recorded", look)
    return found


def _table(name: str) -> list[dict[str, str]]:
    with (GOLDEN / name).open() as file:
        return list(csv.DictReader(file, delimiter="\t"))


def as_recorded(replay: Replay, name: str, document: Any) -> Any:
    """Something of a given pod in the recording's clothes."""
    pod = replay.pods[name]
    uid, ip = pod["metadata"]["uid"], pod["status"].get("podIP", "no address")
    return plain(document, [*replay.elsewhere, (uid, "POD_UID"), (f'"{ip}"', '"POD_IP"')])


@pytest.mark.parametrize(("stem", "name"), PODS)
def test_golden_cri_requests_match_recording(replay: Replay, stem: str, name: str) -> None:
    uid = replay.pods[name]["metadata"]["uid"]
    ours = as_recorded(replay, name, requests_of(replay.recording, uid))
    theirs = recording_of(stem)[name]["cri"]
    for calls in (ours, theirs):
        for call in calls:
            call["config"] = unordered_env(call["config"])
    assert ours == theirs


def test_golden_container_env_order_preserved(replay: Replay) -> None:
    """Those of services come last; only the reference's have no order."""
    _, main = requests_of(replay.recording, replay.pods["env"]["metadata"]["uid"])
    names = [variable["key"] for variable in main["config"]["envs"]]
    written = ["WHO", "GREETING", "NODE", "POD_IP", "TIER", "CPU_LIMIT", "MEM_REQ", "COLOR", "TOKEN"]
    assert REFERENCE or names[:13] == ["bad-name", "color", "size", "K_token", *written]


@pytest.mark.parametrize(("stem", "name"), PODS)
def test_golden_pod_status_matches_recording(replay: Replay, stem: str, name: str) -> None:
    ours = as_recorded(replay, name, replay.pods[name]["status"])
    theirs = recording_of(stem)[name]["status"]
    # The runtime has two names for the image and gives either.
    for container in [*all_statuses({"status": ours}), *all_statuses({"status": theirs})]:
        if "containerID" in container:
            container["image"] = "either"
    if REFERENCE and name == "finishes":
        # It reads the pod's cgroup when the API server has said Running before, which is a race.
        del ours["resources"], theirs["resources"]
    assert ours == theirs


@pytest.mark.parametrize(("stem", "name"), PODS)
def test_golden_pod_events_match_recording(replay: Replay, stem: str, name: str) -> None:
    assert as_recorded(replay, name, replay.events[name]) == recording_of(stem)[name]["events"]


def own_object(replay: Replay, name: str) -> Document:
    """A node's object in the recording's clothes."""
    node = replay.objects["node"]["metadata"]["uid"]
    found: Document = plain(replay.objects[name], [*replay.elsewhere, (node, "UUID")])
    for field in ("resourceVersion", "managedFields"):
        found["metadata"].pop(field, None)
    return found


def test_golden_node_object_matches_recording(replay: Replay) -> None:
    ours, theirs = own_object(replay, "node"), golden("node.json")
    # The machine's own, and what is on it; how they are found is compared with the recording in unit/node.
    machine, config = read_machine(), KubeletConfiguration(eviction_hard=EVICTION)
    capacity = node_capacity(config, replay.node.root)
    theirs["status"]["capacity"] = {name: str(amount) for name, amount in capacity.items()}
    theirs["status"]["allocatable"] = {
        name: str(amount) for name, amount in allocatable(capacity, config).items()
    }
    theirs["status"]["nodeInfo"] |= {
        "machineID": machine.machine_id,
        "systemUUID": machine.system_uuid,
        "bootID": machine.boot_id,
        "kernelVersion": machine.kernel,
        "osImage": machine.os_image,
    }
    for field in ("images", "daemonEndpoints"):
        assert ours["status"].pop(field).__class__ is theirs["status"].pop(field).__class__
    declared, expected = ours["status"].pop("declaredFeatures", []), theirs["status"].pop("declaredFeatures")
    assert declared == expected
    # The recorded cluster gave its nodes no addresses for pods.
    assert ours["spec"].keys() == {"podCIDR", "podCIDRs"}
    ours["spec"] = {}
    for document in (ours, theirs):
        assert re.fullmatch(r"v1\.36\.\d+", document["status"]["nodeInfo"].pop("kubeletVersion"))
    assert ours == theirs


def test_golden_lease_matches_recording(replay: Replay) -> None:
    ours = own_object(replay, "lease")
    ours["metadata"]["uid"] = "UUID"
    assert ours == golden("lease.json")


def test_golden_mirror_pod_matches_recording(replay: Replay) -> None:
    ours, theirs = own_object(replay, "mirror-pod"), golden("mirror-pod.json")
    ours["metadata"]["uid"] = "UID_OF_static-web-vm"
    hashes = [ours["metadata"]["annotations"][f"kubernetes.io/config.{what}"] for what in ("hash", "mirror")]
    assert hashes[0] == hashes[1]
    for what in ("hash", "mirror"):
        ours["metadata"]["annotations"][f"kubernetes.io/config.{what}"] = "STATIC_HASH"
    for document in (ours, theirs):
        (container,) = document["status"]["containerStatuses"]
        container["image"] = "either"
        document["status"]["podIP"] = "POD_IP"
        document["status"]["podIPs"] = [{"ip": "POD_IP"} for _ in document["status"]["podIPs"]]
    assert ours == theirs


def test_golden_cgroups_match_recording(replay: Replay) -> None:
    if detect_cgroups().unified:
        pytest.skip("the recording is of cgroup v1")
    assert replay.cgroups == _recorded_cgroups()


TO_COME = {"checkpoints"}
"""What is there for features that we do not have yet; whoever adds one takes its name away."""


OUR_FILES: set[Row] = {
    ("ROOT/pykubelet.sock", "socket", "0o600"),
    ("ROOT/pykubelet-node.json", "file", "0o600"),
}
"""Control socket and paths of the node, for the command line."""
OTHER_FILES: tuple[set[str], set[Row]] = (set(), set()) if REFERENCE else (TO_COME, OUR_FILES)


def _other_files(files: set[Row]) -> tuple[set[str], set[Row]]:
    """What was recorded and is not here, and what is here and was not recorded."""
    theirs = {(row["path"], row["kind"], row["mode"]) for row in _table("root-dir.tsv")}
    ours = files - theirs
    if not REFERENCE:
        # The reference has its device plugins in one place, wherever its root directory is.
        ours = {row for row in ours if not row[0].startswith("ROOT/device-plugins")}
    return {path.removeprefix("ROOT/") for path, _, _ in theirs - files}, ours


def test_golden_root_directory_files_match(replay: Replay) -> None:
    assert _other_files(replay.files) == OTHER_FILES


ASKING = ("List", "PodSandboxStatus", "ContainerStatus")


def test_golden_pod_lifecycle_cri_call_order_matches_recording(replay: Replay) -> None:
    """Last, because it ends a pod."""
    node, pod = replay.node, replay.pods["besteffort"]
    uid = pod["metadata"]["uid"]
    node.plane.delete("pod", "besteffort", pod["metadata"]["namespace"], grace=1)
    node.wait("the pod to be gone", lambda: node.api_pod(pod) is None, 60)
    node.wait("its sandbox to be gone", lambda: not node.truth.sandboxes("besteffort"), 120)
    lines = (GOLDEN / "cri-sequence.txt").read_text().splitlines()
    ours = calls_about(replay.recording, uid)
    theirs = [line.split()[-1] for line in lines if line.lstrip().startswith("+")]
    assert ours[:3] == theirs[:3] == ["RunPodSandbox", "PodSandboxStatus", "CreateContainer"]
    doing, done = ([method for method in calls if not method.startswith(ASKING)] for calls in (ours, theirs))
    if not REFERENCE:
        again = [index for index, method in enumerate(done) if method == "StopPodSandbox"][1]
        del done[again]
        assert len(ours) - ours.index("StopContainer") <= len(theirs) - theirs.index("StopContainer")
    assert doing == done
