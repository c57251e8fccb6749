"""Disk pressure on a real node, by our kubelet and by the upstream one: both must act alike.

The kubelet's root directory and containerd's are on one small file system, or on one each. The kubelets have
fixed thresholds, and a filler outside of every pod sets what is available (`leave_available`). Pods write
before that, and their usage has been measured when the threshold is met, so that the ranking does not depend
on when a round of the eviction manager runs. What differs from upstream on purpose is in `docs/eviction.md`,
and is asserted with `node.reference`.
"""

import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from pykubelet.api.quantity import Quantity
from pykubelet.devcluster.reference_kubelet import undo_host_changes
from tests.support.cluster_node import cluster_node, in_cluster
from tests.support.plane import Plane
from tests.support.pressed_node import (
    CONSUMPTION,
    INODES_FREE,
    MINIMUM_RECLAIM,
    ROUND,
    STORAGE,
    THRESHOLD,
    TRANSITION_SECONDS,
    PressedNode,
    assert_evicted,
    evicted_at,
    names,
    priority_classes,
    seconds_of,
)
from tests.support.small_disk import (
    MIB,
    import_image,
    leave_available,
    leave_inodes,
    runtime_on_small_disk,
    small_disk,
)

pytestmark = [pytest.mark.machine, pytest.mark.pressure]

ONE_DISK, EACH_OF_TWO = 400 * MIB, 300 * MIB
INODES = 40_000
SHORT_BY = 10 * MIB
UNUSED = ("example.org/unused1:1", "example.org/unused2:1")
UNUSED_SIZE = 20 * MIB
"""Bytes of an unused image; it needs twice as many on the disk: packed and unpacked."""


@pytest.fixture(scope="module")
def pressed_node(
    request: pytest.FixtureRequest, plane: Plane, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[PressedNode]:
    """A node with our kubelet or the upstream one, on one small disk or on two, with two unused images."""
    kubelet, disks = request.param
    if kubelet == "upstream" and plane.reference_kubelet is None:
        pytest.skip("there is no reference kubelet in $KUBEBUILDER_ASSETS")
    with ExitStack() as stack:
        stack.enter_context(undo_host_changes())
        settings: dict[str, Any] = {
            "evictionPressureTransitionPeriod": f"{TRANSITION_SECONDS}s",
            "volumeStatsAggPeriod": "2s",
            "nodeStatusUpdateFrequency": "1s",
            "imageMinimumGCAge": "1s",
            "imageGCHighThresholdPercent": 100,
            "containerLogMaxSize": "500Mi",
            "enforceNodeAllocatable": [],
            # Without it upstream records so many events about the node that it drops those of evictions.
            "clusterDNS": ["192.0.2.53"],
        }
        if disks == 1:
            runtime = stack.enter_context(runtime_on_small_disk(ONE_DISK, inodes=INODES))
            imagefs = nodefs = runtime.instance.data_dir.parent
            root = None
            settings["evictionHard"] = {
                "nodefs.available": str(THRESHOLD),
                "nodefs.inodesFree": str(INODES_FREE),
            }
            settings["evictionMinimumReclaim"] = {"nodefs.available": str(MINIMUM_RECLAIM)}
        else:
            nodefs = stack.enter_context(small_disk(EACH_OF_TWO))
            runtime = stack.enter_context(runtime_on_small_disk(EACH_OF_TWO))
            imagefs = runtime.instance.data_dir.parent
            root = nodefs / "k"
            root.mkdir()
            settings["podLogsDir"] = str(nodefs / "logs")
            settings["evictionHard"] = {
                "nodefs.available": str(THRESHOLD),
                "imagefs.available": str(THRESHOLD),
            }
        for name in UNUSED:
            import_image(runtime.instance, name, UNUSED_SIZE)
        program = plane.reference_kubelet if kubelet == "upstream" else None
        made = cluster_node(plane, runtime, program=program, root=root, settings=settings)
        made.log = tmp_path_factory.mktemp("pressed") / "agent.log"
        prefix = stack.enter_context(priority_classes(plane))
        node = stack.enter_context(in_cluster(made))
        yield PressedNode(node, nodefs, imagefs, prefix)


@pytest.fixture
def pressed(pressed_node: PressedNode, namespace: str) -> Iterator[PressedNode]:
    """The node without pressure; its pods and the fillers are gone at the end."""
    pressed_node.wait_pressure("False")
    try:
        yield pressed_node
    finally:
        pressed_node.free()
        plane, node = pressed_node.node.plane, pressed_node.node
        for pod in plane.items("pod", namespace):
            plane.delete("pod", pod["metadata"]["name"], namespace, grace=0)
        node.wait_none("no container", lambda: [one.id for one in node.truth.running()])


def with_disks(count: int) -> pytest.MarkDecorator:
    """Run a test with both kubelets on nodes with this number of disks."""
    return pytest.mark.parametrize(
        "pressed_node",
        [("ours", count), ("upstream", count)],
        ids=["ours", "upstream"],
        indirect=True,
        scope="module",
    )


def write(size: int, path: str) -> str:
    """Return the command that writes a file of `size` bytes."""
    return f"head -c {size} /dev/zero > {path} && sync"


def write_log(size: int) -> str:
    """Return the command that writes `size` bytes in lines of 1,000 to the container's log."""
    return f"yes $(printf %0999d 0) | head -c {size} > /proc/1/fd/1"


@with_disks(1)
def test_disk_pressure_unused_images_removed_before_any_pod(pressed: PressedNode, namespace: str) -> None:
    node = pressed.node
    pod = pressed.create("kept", namespace)
    node.wait_pod_ready(pod)
    node.shell("kept", write(20 * MIB, "/v/used"))
    assert pressed.image_names() >= set(UNUSED)
    leave_available(pressed.nodefs, THRESHOLD - SHORT_BY)
    began = pressed.wait_pressure("True")
    node.wait("the images to be gone", lambda: not pressed.image_names() & set(UNUSED), ROUND)
    ended = pressed.wait_pressure("False")
    stayed = seconds_of(ended["lastTransitionTime"]) - seconds_of(began["lastTransitionTime"])
    assert stayed >= TRANSITION_SECONDS - 1
    assert pressed.attempts() == {"Attempting to reclaim ephemeral-storage"}
    pressed.assert_kept(pod)
    assert not [one for one in node.plane.items("event", namespace) if one["reason"] == "Evicted"]


@with_disks(1)
def test_disk_pressure_writers_evicted_in_order_until_minimum_reclaim(
    pressed: PressedNode, namespace: str
) -> None:
    node, plane = pressed.node, pressed.node.plane
    pressed.remove_images(UNUSED)
    sparse_volume = [{"name": "v", "emptyDir": {"sizeLimit": "5Mi"}}]
    pods = {
        "layer": pressed.create("layer", namespace, priority="lower"),
        "volume": pressed.create("volume", namespace),
        "logs": pressed.create("logs", namespace, priority="higher"),
        "within": pressed.create("within", namespace, request="100Mi"),
        "sparse": pressed.create(
            "sparse", namespace, request="1Mi", priority="highest", volumes=sparse_volume
        ),
        "critical": pressed.create("critical", namespace, priority="system-node-critical"),
    }
    for pod in pods.values():
        node.wait_pod_ready(pod)
    node.shell("layer", write(10 * MIB, "/used"))
    node.shell("volume", write(65 * MIB, "/v/used"))
    node.shell("logs", write_log(35 * MIB))
    node.shell("within", write(50 * MIB, "/v/used"))
    node.shell("sparse", "truncate -s 10G /v/used /used")
    node.shell("critical", write(20 * MIB, "/v/used"))
    pressed.wait_usage(pods["layer"], layer=10 * MIB)
    pressed.wait_usage(pods["volume"], volume=65 * MIB)
    pressed.wait_usage(pods["logs"], logs=35 * MIB)
    pressed.wait_usage(pods["within"], volume=50 * MIB)
    pressed.wait_usage(pods["critical"], volume=20 * MIB)
    sparse = pressed.wait_usage(pods["sparse"])
    assert max(sparse["volume"], sparse["layer"]) < MIB

    # With the minimum reclaim, 95 MiB are missing. Layer and volume are 75 MiB, and volume and logs suffice
    # even while the layer is not deleted.
    leave_available(pressed.nodefs, THRESHOLD - 45 * MIB)
    evicted = pressed.wait_evicted(list(pods.values()), 3)
    assert names(evicted) == ["layer", "volume", "logs"]
    pressed.wait_pressure("True")
    rejected = node.wait_pod_phase(pressed.create("late", namespace), "Failed")["status"]
    assert (rejected["reason"], rejected["message"]) == (
        "Evicted",
        "Pod was rejected: The node had condition: [DiskPressure]. ",
    )
    layer, volume, logs = (
        int(Quantity.parse(assert_evicted(plane, pod, STORAGE, CONSUMPTION)[3])) for pod in evicted
    )
    assert 10 * MIB <= layer < 11 * MIB
    # Only layer and logs of a container are in the message; the volume belongs to the pod.
    assert volume < MIB
    assert 35 * MIB <= logs < 38 * MIB
    ended = pressed.wait_pressure("False")
    assert seconds_of(ended["lastTransitionTime"]) - evicted_at(evicted[-1]) >= TRANSITION_SECONDS - 1
    pressed.assert_kept(pods["within"], pods["sparse"], pods["critical"])
    assert pressed.attempts() == {"Attempting to reclaim ephemeral-storage"}


@with_disks(1)
def test_disk_pressure_ten_thousand_small_files_their_pod_evicted(
    pressed: PressedNode, namespace: str
) -> None:
    node = pressed.node
    many, large = pressed.create("many", namespace), pressed.create("large", namespace)
    for pod in (many, large):
        node.wait_pod_ready(pod)
    node.shell("many", "cd /v && seq 10000 | xargs touch")
    node.shell("large", write(40 * MIB, "/v/used"))
    pressed.wait_usage(many, inodes=10_000)
    pressed.wait_usage(large, volume=40 * MIB)
    leave_inodes(pressed.nodefs, INODES_FREE - 1_000)
    (evicted,) = pressed.wait_evicted([many, large], 1)
    assert names([evicted]) == ["many"]
    pressed.wait_pressure("True")
    assert_evicted(node.plane, evicted, "inodes")
    assert "Attempting to reclaim inodes" in pressed.attempts()
    pressed.wait_pressure("False")
    pressed.assert_kept(large)


@with_disks(1)
def test_disk_pressure_writer_faster_than_monitor_node_recovers(pressed: PressedNode, namespace: str) -> None:
    node = pressed.node
    script = (
        "while [ ! -e /v/go ]; do sleep 0.1; done; while true; do cat /dev/zero >> /v/used; sleep 0.02; done"
    )
    writer = pressed.create("writer", namespace, script)
    beside = pressed.create("beside", namespace, request="10Mi")
    for pod in (writer, beside):
        node.wait_pod_ready(pod)
        pressed.wait_usage(pod)
    node.shell("writer", "touch /v/go")
    (evicted,) = pressed.wait_evicted([writer, beside], 1)
    assert names([evicted]) == ["writer"]
    assert evicted["status"]["reason"] == "Evicted"
    pressed.wait_pressure("True")
    pressed.wait_pressure("False")
    pressed.assert_kept(beside)
    node.wait_pod_ready(pressed.create("after", namespace))


@with_disks(2)
def test_disk_pressure_imagefs_unused_images_then_writer_of_layer(
    pressed: PressedNode, namespace: str
) -> None:
    node = pressed.node
    layer, volume = pressed.create("layer", namespace), pressed.create("volume", namespace)
    for pod in (layer, volume):
        node.wait_pod_ready(pod)
    node.shell("layer", write(40 * MIB, "/used"))
    node.shell("volume", write(60 * MIB, "/v/used"))
    pressed.wait_usage(layer, layer=40 * MIB)
    pressed.wait_usage(volume, volume=60 * MIB)
    assert pressed.image_names() >= set(UNUSED)
    leave_available(pressed.imagefs, THRESHOLD - SHORT_BY)
    pressed.wait_pressure("True")
    node.wait("the images to be gone", lambda: not pressed.image_names() & set(UNUSED), ROUND)
    pressed.wait_available(pressed.imagefs, THRESHOLD)
    pressed_at = time.time()
    leave_available(pressed.imagefs, THRESHOLD - SHORT_BY)
    evicted = pressed.wait_evicted([layer, volume], 1)[0]
    assert names([evicted]) == ["layer"]
    assert evicted_at(evicted) >= int(pressed_at)
    pressed.wait_pressure("True")
    assert_evicted(node.plane, evicted, STORAGE, CONSUMPTION)
    pressed.wait_pressure("False")
    if not node.reference:
        # Upstream measures the disk before containerd has deleted the layer, and may evict this pod as well.
        pressed.assert_kept(volume)


@with_disks(2)
def test_disk_pressure_nodefs_dead_containers_then_writer_of_volume(
    pressed: PressedNode, namespace: str
) -> None:
    """Verify that logs of dead containers are removed first; upstream evicts a pod immediately."""
    node = pressed.node
    done = pressed.create(
        "done", namespace, f"yes $(printf %0999d 0) | head -c {40 * MIB}", restartPolicy="Never"
    )
    layer, volume = pressed.create("layer", namespace), pressed.create("volume", namespace)
    for pod in (layer, volume):
        node.wait_pod_ready(pod)
    node.wait_pod_phase(done, "Succeeded")
    node.shell("layer", write(60 * MIB, "/used"))
    node.shell("volume", write(40 * MIB, "/v/used"))
    pressed.wait_usage(layer, layer=60 * MIB)
    pressed.wait_usage(volume, volume=40 * MIB)
    assert node.truth.containers("done")
    pressed_at = time.time()
    leave_available(pressed.nodefs, THRESHOLD - SHORT_BY)
    pressed.wait_pressure("True")
    if not node.reference:
        node.wait("the dead container to be gone", lambda: not node.truth.containers("done"), ROUND)
        pressed.wait_available(pressed.nodefs, THRESHOLD)
        pressed_at = time.time()
        leave_available(pressed.nodefs, THRESHOLD - SHORT_BY)
    (evicted,) = pressed.wait_evicted([layer, volume], 1)
    assert names([evicted]) == ["volume"]
    assert evicted_at(evicted) >= int(pressed_at)
    if node.reference:
        assert node.truth.containers("done")
    assert_evicted(node.plane, evicted, STORAGE, CONSUMPTION)
    pressed.wait_pressure("False")
    pressed.assert_kept(layer)
