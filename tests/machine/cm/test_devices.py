"""A real device plugin and real containers: what they get, what they keep, and what goes wrong."""

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.device_plugin.asking import Asking, dongles
from tests.support.device_plugin.process import RESOURCE, DevicePluginProcess
from tests.support.manifests import Document, container, pod
from tests.support.metrics_page import Page
from tests.support.node import Node, kubelet_node, running, status_of
from tests.support.runtime import RunningRuntime

pytestmark = pytest.mark.machine

NULL, ZERO = "1, 3", "1, 5"


@pytest.fixture(scope="module")
def node(runtime: RunningRuntime) -> Iterator[Node]:
    with running(kubelet_node(runtime)) as started:
        yield started
        started.clear()


@pytest.fixture
def asking(node: Node) -> Asking:
    return Asking(node.root)


@pytest.fixture
def plugin(node: Node, asking: Asking, tmp_path: Path) -> Iterator[DevicePluginProcess]:
    """A plugin whose two devices can be had; the node has no pods when it goes."""
    with dongles(tmp_path / "plugin", node.root, "--pre-start") as started:
        wait_offered(node, asking, "d1", "d2")
        yield started
        node.clear()


def wait_offered(node: Node, asking: Asking, *devices: str) -> None:
    node.wait(f"{devices} to be offered", lambda: asking.offered() == list(devices), 60)


def wait_given_back(node: Node, asking: Asking, name: str) -> None:
    """Wait until a pod has no device any more, and the agent has seen that nothing of it runs."""
    node.wait(
        "the device to be given back",
        lambda: f"{name}/main" not in asking.listed() and not node.truth.sandboxes(name),
        60,
    )


def wanting(name: str, count: int = 1, **spec: Any) -> Document:
    """A pod that wants devices."""
    return pod(name, container(**asking_for(count)), **spec)


def asking_for(count: int) -> dict[str, Any]:
    """What a container says that wants devices."""
    some = {RESOURCE: str(count)}
    return {"resources": {"limits": some, "requests": some}}


def seen(node: Node, name: str, device: str) -> str:
    """The device as a pod's container sees it: its numbers."""
    words = node.shell(name, f"test -c /dev/{device} && ls -l /dev/{device}").split()
    return f"{words[4]} {words[5]}"


def env(node: Node, name: str) -> dict[str, str]:
    """What the plugin had put into the environment of a pod's container."""
    lines = node.shell(name, "tr '\\0' '\\n' < /proc/1/environ").splitlines()
    return dict(line.split("=", 1) for line in lines if line.startswith("TEST_"))


def wait_refused(node: Node, name: str, *words: str) -> None:
    found = node.wait_pod(name, "to be refused", lambda pod: pod["status"]["phase"] == "Failed")
    assert found["status"]["reason"] == "UnexpectedAdmissionError"
    message = found["status"]["message"]
    assert message.startswith("Pod was rejected: Allocate failed due to "), message
    assert message.endswith(", which is unexpected"), message
    assert all(word in message for word in words), message
    assert not node.truth.containers(name)


def health(found: Document) -> list[Document]:
    told: list[Document] = status_of(found, "main").get("allocatedResourcesStatus", [])
    return told


def test_device_manager_restarts_keep_devices_of_container(
    node: Node, plugin: DevicePluginProcess, asking: Asking
) -> None:
    first = node.start_pod(wanting("first"))["metadata"]["name"]
    one = node.truth.running(first)[0]
    assert seen(node, first, "d1") == NULL
    assert node.shell(first, "echo gone > /dev/d1; cat /dev/d1; ls /dev").split().count("d2") == 0
    assert env(node, first) == {"TEST_DEVICES": "d1", "TEST_PLUGIN": "first"}
    assert node.shell(first, "cat /plugin/library; touch /plugin/x 2>&1 || true").splitlines() == [
        "for dongles",
        "touch: /plugin/x: Read-only file system",
    ]
    assert node.truth.container_status(one.id).annotations["example.com/devices"] == "d1"
    assert asking.listed() == asking.listed("v1alpha1") == {f"{first}/main": ["d1"]}
    assert plugin.calls("PreStartContainer") == [{"devices_ids": ["d1"]}]

    # The plugin goes, and comes back as another program.
    plugin.kill()
    wait_offered(node, asking)
    assert asking.listed() == {f"{first}/main": ["d1"]}
    plugin.start("--mark=second")
    wait_offered(node, asking, "d1", "d2")
    assert [c.id for c in node.truth.running(first)] == [one.id]
    node.control("POST", f"/pods/{one.labels['io.kubernetes.pod.uid']}/restart")
    node.wait("another container", lambda: [c.id for c in node.truth.running(first)] not in ([], [one.id]))
    assert seen(node, first, "d1") == NULL
    assert env(node, first) == {"TEST_DEVICES": "d1", "TEST_PLUGIN": "first"}
    assert [call["devices_ids"] for call in plugin.calls("PreStartContainer")] == [["d1"], ["d1"]]
    assert len(plugin.calls("Allocate")) == 1

    # The agent is killed, and what runs is not touched although the plugin is not there yet.
    two = node.truth.running(first)[0]
    node.kill()
    plugin.kill()
    node.start()
    node.wait_ready(first)
    assert asking.listed() == {f"{first}/main": ["d1"]}
    assert asking.offered() == []
    plugin.start("--mark=third")
    wait_offered(node, asking, "d1", "d2")
    assert [c.id for c in node.truth.running(first)] == [two.id]
    second = node.start_pod(wanting("second"))["metadata"]["name"]
    assert (seen(node, second, "d2"), env(node, second)["TEST_PLUGIN"]) == (ZERO, "third")
    assert asking.listed() == {f"{first}/main": ["d1"], f"{second}/main": ["d2"]}

    # There are no more; who ends gives back.
    third = node.write(wanting("third"))
    wait_refused(
        node, third, f"requested number of devices unavailable for {RESOURCE}. Requested: 1, Available: 0"
    )
    node.remove(third)
    node.remove(second)
    wait_given_back(node, asking, second)
    again = node.start_pod(wanting("again"))["metadata"]["name"]
    assert seen(node, again, "d2") == ZERO
    answer = asking.of("default", again)
    assert [(c.name, [list(d.device_ids) for d in c.devices]) for c in answer.containers] == [
        ("main", [["d2"]])
    ]
    page = Page(node.page("/metrics"))
    assert page.value("kubelet_device_plugin_registration_total", resource_name=RESOURCE) >= 1
    assert page.value("kubelet_device_plugin_alloc_duration_seconds_count", resource_name=RESOURCE) >= 2
    assert page.value("kubelet_pod_resources_endpoint_requests_get", server_api_version="v1") >= 1


def test_device_manager_unhealthy_device_shown_in_pod_status(
    node: Node, plugin: DevicePluginProcess, asking: Asking
) -> None:
    name = node.start_pod(wanting("unlucky"))["metadata"]["name"]
    found = node.wait_pod(name, "to show its device", health)
    assert health(found) == [{"name": RESOURCE, "resources": [{"resourceID": "d1", "health": "Healthy"}]}]
    plugin.behave(devices={"d1": "Unhealthy", "d2": "Healthy"})
    node.wait_pod(
        name, "to show its loss", lambda pod: health(pod)[0]["resources"][0]["health"] == "Unhealthy"
    )
    assert asking.offered() == ["d2"]
    assert asking.listed() == {f"{name}/main": ["d1"]}
    # It still runs, and nobody else gets what it has.
    other = node.start_pod(wanting("lucky"))["metadata"]["name"]
    assert env(node, other)["TEST_DEVICES"] == "d2"
    node.remove(other)
    wait_given_back(node, asking, other)
    wait_refused(node, node.write(wanting("too-much", 2)), "Requested: 2, Available: 1")
    plugin.behave()
    node.wait_pod(
        name, "to show its recovery", lambda pod: health(pod)[0]["resources"][0]["health"] == "Healthy"
    )
    # One that has vanished altogether cannot be had, either.
    plugin.behave(devices={"d2": "Healthy"})
    wait_offered(node, asking, "d2")
    wait_refused(node, node.write(wanting("still-too-much", 2)), "Requested: 2, Available: 1")
    assert [c.state for c in node.truth.containers(name)] == [1]


def test_device_manager_init_container_devices_reused_by_containers(
    node: Node, plugin: DevicePluginProcess, asking: Asking
) -> None:
    limits, one = asking_for(2), asking_for(1)
    init = [container("init", ["sh", "-c", "test -c /dev/d1 && test -c /dev/d2"], **limits)]
    name = node.start_pod(pod("staged", container(**one), container("side", **one), initContainers=init))[
        "metadata"
    ]["name"]
    assert asking.listed() == {f"{name}/main": ["d1"], f"{name}/side": ["d2"]}


@pytest.mark.parametrize(
    ("behaviour", "words"),
    [
        ({"answers": 0}, "no containers return in allocation response"),
        ({"fail": {"Allocate": ["INVALID_ARGUMENT", "not today"]}}, "not today"),
        ({"die": ["Allocate"]}, "code = Unavailable"),
    ],
    ids=["answers-nothing", "refuses", "dies"],
)
def test_device_manager_allocate_fails_rejects_only_that_pod(
    node: Node, plugin: DevicePluginProcess, behaviour: dict[str, Any], words: str
) -> None:
    plugin.behave(**behaviour)
    wait_refused(node, node.write(wanting("hapless")), words)
    node.start_pod(pod("bystander"))


def test_device_manager_invalid_preferred_allocation_is_ignored(
    node: Node, asking: Asking, tmp_path: Path
) -> None:
    with dongles(tmp_path / "plugin", node.root, "--prefers") as plugin:
        wait_offered(node, asking, "d1", "d2")
        plugin.behave(prefer=["nobody", "d2", "d2", "d1"])
        name = node.start_pod(wanting("first"))["metadata"]["name"]
        assert asking.listed() == {f"{name}/main": ["d2"]}
        plugin.behave(prefer=["d2", "nobody"])  # it is taken
        other = node.start_pod(wanting("second"))["metadata"]["name"]
        assert asking.listed()[f"{other}/main"] == ["d1"]
        node.clear()


def test_device_manager_kubelet_stopped_during_allocate_rejects_no_pod(
    node: Node, plugin: DevicePluginProcess, asking: Asking
) -> None:
    plugin.behave(hang=["Allocate"])
    name = node.write(wanting("patient"))
    node.wait("the plugin to be asked", lambda: plugin.calls("Allocate"))
    try:
        assert node.stop() == 0
        plugin.behave()
        assert f'"Pod admission denied" pod="default/{name}"' not in node.log_text()
    finally:
        node.start()
    wait_offered(node, asking, "d1", "d2")
    # The plugin came after the pod, which was judged by what was there: nothing.
    node.remove(name)
    node.wait("the pod to be gone", lambda: node.pod(name) is None, 60)
    node.start_pod(wanting("patient"))


def test_device_manager_allocate_hangs_other_pods_start(node: Node, plugin: DevicePluginProcess) -> None:
    plugin.behave(hang=["Allocate"])
    name = node.write(wanting("waiting"))
    node.wait("the plugin to be asked", lambda: plugin.calls("Allocate"))
    node.start_pod(pod("bystander"))
    assert not node.events(name)
    plugin.kill()
    wait_refused(node, name, "code = Unavailable")


def test_device_manager_pre_start_container_fails_is_retried(node: Node, plugin: DevicePluginProcess) -> None:
    plugin.behave(fail={"PreStartContainer": ["INTERNAL", "still warming up"]})
    name = node.write(wanting("cold"))
    found = node.wait_pod(
        name, "to wait", lambda pod: "waiting" in status_of(pod, "main")["state"] and node.events(name)
    )
    waits = status_of(found, "main")["state"]["waiting"]
    message = node.wait_event(name, "Failed")
    assert message.startswith("Error: device plugin PreStartContainer rpc failed with err: ")
    assert "still warming up" in message
    assert waits["reason"] in ("CreateContainerConfigError", "ContainerCreating")
    plugin.behave()
    node.wait_ready(name, 60)


def test_device_manager_plugins_registry_socket_is_registered(
    node: Node, asking: Asking, tmp_path: Path
) -> None:
    registry = node.root / "plugins_registry"
    with dongles(tmp_path / "plugin", node.root, f"--registry={registry}"):
        try:
            wait_offered(node, asking, "d1", "d2")
            name = node.start_pod(wanting("common"))["metadata"]["name"]
            assert env(node, name)["TEST_DEVICES"] == "d1"
            path = str(registry / "dongle.sock")

            def counted() -> bool:
                page = Page(node.page("/metrics"))
                return all(
                    page.total("plugin_manager_total_plugins", socket_path=path, state=state) == 1
                    for state in ("actual_state_of_world", "desired_state_of_world")
                )

            # It has devices as soon as it is asked, and is registered when it was told so.
            node.wait("the plugin to be counted as wanted and there", counted)
        finally:
            (registry / "dongle.sock").unlink()
        wait_offered(node, asking)
        node.clear()


def test_device_manager_second_registration_takes_over_resource(
    node: Node, plugin: DevicePluginProcess, asking: Asking, tmp_path: Path
) -> None:
    name = node.start_pod(wanting("early"))["metadata"]["name"]
    with dongles(tmp_path / "other", node.root, "--device=d3", "--socket=dongle2.sock", "--mark=other"):
        wait_offered(node, asking, "d1", "d2", "d3")
        plugin.kill()
        late = node.start_pod(wanting("late", 2))["metadata"]["name"]
        assert env(node, late) == {"TEST_DEVICES": "d2,d3", "TEST_PLUGIN": "other"}
        assert env(node, name)["TEST_PLUGIN"] == "first"
        node.clear()


def test_device_manager_stale_files_at_socket_paths_are_replaced(
    node: Node, asking: Asking, tmp_path: Path
) -> None:
    assert node.stop() == 0
    for folder in ("device-plugins", "pod-resources"):
        path = node.root / folder / "kubelet.sock"
        assert not path.exists()
        path.write_text("a stale file")
    stale = node.root / "device-plugins" / "old-plugin.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(stale))
    node.start()
    assert not stale.exists()
    assert "[+]device-plugin ok" in node.page("/healthz?verbose").splitlines()
    assert (node.root / "plugins").is_dir()
    with dongles(tmp_path / "plugin", node.root):
        wait_offered(node, asking, "d1", "d2")


def test_device_manager_corrupt_checkpoint_stops_start_with_path(node: Node, asking: Asking) -> None:
    assert node.stop() == 0
    path = node.root / "device-plugins" / "kubelet_internal_checkpoint"
    good = path.read_text()
    path.write_text(good.replace('"Checksum":', '"Checksum":1'))
    node.start(wait=False)
    process, node.process = node.process, None
    assert process is not None
    try:
        assert process.wait(timeout=60) == 1
    finally:
        process.kill()
    last = node.log_text().strip().splitlines()[-1]
    assert str(path) in last
    assert "Drain this node and delete that file" in last
    path.unlink()
    node.start()
    wait_offered(node, asking)
