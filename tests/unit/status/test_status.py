"""The status document: against the reference's recordings, and situation by situation."""

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import yaml

from pykubelet.api.meta import from_document, to_document
from pykubelet.api.pod import Pod, VolumeMount
from pykubelet.api.pod_status import AddressStatus, PodStatus, ResourceHealth, ResourceStatus
from pykubelet.cri import runtime_pb2 as pb
from pykubelet.kuberuntime.observe import observed_container
from pykubelet.kuberuntime.observed import ObservedContainer, ObservedPod, ObservedSandbox
from pykubelet.podconfig.defaults import apply_defaults
from pykubelet.probes.types import Health
from pykubelet.status.compute import compute_status
from pykubelet.status.containers import StartFailure, StatusInputs

GOLDEN = Path(__file__).parents[2] / "data" / "golden"
NOW = datetime(2026, 1, 1, tzinfo=UTC)
SECOND = 1_000_000_000
IMAGE = "registry.k8s.io/e2e-test-images/busybox:1.29-2"


def given_pod(file: str, name: str) -> Pod:
    for document in yaml.safe_load_all((GOLDEN / f"given-{file}.yaml").read_text()):
        if document["metadata"]["name"] == name:
            pod = from_document(Pod, document)
            pod.metadata.uid, pod.metadata.namespace, pod.metadata.generation = "u", f"scn-given-{file}", 1
            apply_defaults(pod)
            return pod
    raise LookupError(name)


def container(
    name: str, phase: Any = "running", code: int = 0, attempt: int = 0, **facts: Any
) -> ObservedContainer:
    ended = phase == "exited"
    return ObservedContainer(
        id="ID",
        name=name,
        phase=phase,
        exit_code=code,
        reason=("Completed" if code == 0 else "Error") if ended else "",
        restart_count=attempt,
        attempt=attempt,
        created_at=attempt + 1,
        started_at=SECOND,
        finished_at=2 * SECOND if ended else 0,
        image=IMAGE,
        image_id="sha256:ID",
        **facts,
    )


def observed(*containers: ObservedContainer, ready: bool = True) -> ObservedPod:
    sandbox = ObservedSandbox(id="s", ready=ready, created_at=1, ips=("POD_IP",))
    return ObservedPod(uid="u", sandboxes=(sandbox,), containers=containers)


def plain(status: PodStatus) -> Any:
    """A status in the recording's clothes; pod-level resources are read from cgroups there, not computed."""
    document = to_document(status)
    document.pop("resources", None)
    if not document.get("allocatedResources"):
        document.pop("allocatedResources", None)
    return json.loads(json.dumps(_times(document)))


def _times(value: Any, key: str = "") -> Any:
    if isinstance(value, dict):
        return {name: _times(inner, name) for name, inner in value.items()}
    if isinstance(value, list):
        return [_times(inner) for inner in value]
    return (
        "TIME" if value is not None and (key.endswith(("Time", "At")) and key != "lastProbeTime") else value
    )


def recorded(file: str, name: str) -> Any:
    status = json.loads((GOLDEN / f"given-{file}.json").read_text())[name]["status"]
    status.pop("resources", None)
    return status


def view(pod: Pod, picture: ObservedPod, **facts: Any) -> StatusInputs:
    return StatusInputs(pod=pod, observed=picture, host_ips=["192.0.2.2"], **facts)


FINE = Health(started=True, ready=True)


@pytest.mark.parametrize("name", ["besteffort", "burstable", "guaranteed"])
def test_compute_status_running_pod_equals_recording(name: str) -> None:
    pod = given_pod("basic", name)
    status = compute_status(view(pod, observed(container("main")), health={"main": FINE}), NOW)
    assert plain(status) == recorded("basic", name)


def test_compute_status_init_containers_equals_recording() -> None:
    done = Health(started=False, ready=True)
    picture = observed(container("main"), container("second", "exited"), container("first", "exited"))
    health = {"main": FINE, "first": done, "second": done}
    status = compute_status(view(given_pod("lifecycle", "lifecycle"), picture, health=health), NOW)
    assert plain(status) == recorded("lifecycle", "lifecycle")


def test_compute_status_finished_pod_equals_recording() -> None:
    picture = observed(
        container("fails-once", "exited", attempt=1),
        container("ok", "exited", message="done\n"),
        container("fails-once", "exited", 3, message="oops\n"),
        ready=False,
    )
    pod = given_pod("lifecycle", "finishes")
    before = compute_status(view(pod, observed(container("ok"))), NOW)
    status = compute_status(view(pod, picture, previous=before, terminal=True), NOW)
    assert plain(status) == recorded("lifecycle", "finishes")


def test_compute_status_crashing_pod_equals_recording() -> None:
    picture = observed(container("main", "exited", 7, attempt=2), container("main", "exited", 7, attempt=1))
    status = compute_status(view(given_pod("lifecycle", "crashes"), picture), NOW)
    assert plain(status) == recorded("lifecycle", "crashes")


def test_compute_status_image_missing_equals_recording() -> None:
    message = 'Container image "registry.local/absent:1" is not present with pull policy of Never'
    failures = {"main": StartFailure("ErrImageNeverPull", message)}
    status = compute_status(view(given_pod("lifecycle", "no-image"), observed(), failures=failures), NOW)
    assert plain(status) == recorded("lifecycle", "no-image")


def test_compute_status_device_health_shown_until_container_exits() -> None:
    pod = given_pod("lifecycle", "lifecycle")
    lost = ResourceStatus(
        name="example.com/dongle", resources=[ResourceHealth(resource_id="d1", health="Unhealthy")]
    )
    # Init containers do not tell.
    has = {"main": [lost], "first": [lost]}
    status = compute_status(view(pod, observed(container("main")), device_health=has), NOW)
    assert plain(status)["containerStatuses"][0]["allocatedResourcesStatus"] == [
        {"name": "example.com/dongle", "resources": [{"resourceID": "d1", "health": "Unhealthy"}]}
    ]
    assert not any("allocatedResourcesStatus" in one for one in plain(status)["initContainerStatuses"])
    ended = observed(container("main", "exited"), ready=False)
    assert "allocated" not in str(plain(compute_status(view(pod, ended, previous=status), NOW)))


@pytest.mark.parametrize(
    ("mode", "handler", "runtime_class", "shown"),
    [
        ("Enabled", "", None, "Enabled"),
        ("IfPossible", "", None, "Enabled"),
        ("IfPossible", "kata", None, "Disabled"),
        ("Disabled", "", None, "Disabled"),
        (None, "", None, "Disabled"),
        ("Enabled", None, None, "Enabled"),
        ("IfPossible", None, "kata", "Disabled"),
    ],
)
def test_compute_status_volume_mount_reports_recursive_read_only(
    mode: str | None, handler: str | None, runtime_class: str | None, shown: str
) -> None:
    """`handler` is the sandbox's; None where there is no sandbox yet."""
    pod = given_pod("lifecycle", "crashes")
    pod.spec.runtime_class_name = runtime_class
    mount = VolumeMount(name="v", mount_path="/v", read_only=True, recursive_read_only=mode)
    pod.spec.containers[0].volume_mounts = [mount]
    picture = ObservedPod(uid="u")
    if handler is not None:
        sandbox = ObservedSandbox(
            id="s", ready=True, created_at=1, ips=("10.0.0.2",), runtime_handler=handler
        )
        picture = ObservedPod(uid="u", sandboxes=(sandbox,), containers=(container("main"),))
    status = compute_status(view(pod, picture, recursive_handlers=frozenset({""})), NOW)
    assert to_document(status.container_statuses[0].volume_mounts) == [
        {"name": "v", "mountPath": "/v", "readOnly": True, "recursiveReadOnly": shown}
    ]


def test_compute_status_crash_loop_shows_back_off_and_last_state() -> None:
    pod = given_pod("lifecycle", "crashes")
    failures = {"main": StartFailure("CrashLoopBackOff", "back-off 10s restarting")}
    status = compute_status(view(pod, observed(container("main", "exited", 7)), failures=failures), NOW)
    (main,) = status.container_statuses
    assert main.state.waiting is not None
    assert main.state.waiting.reason == "CrashLoopBackOff"
    assert main.last_state.terminated is not None
    assert main.last_state.terminated.exit_code == 7
    assert status.phase == "Running"


def test_compute_status_container_vanished_is_status_unknown() -> None:
    pod = given_pod("basic", "besteffort")
    before = compute_status(view(pod, observed(container("main")), health={"main": FINE}), NOW)
    status = compute_status(view(pod, observed(), previous=before), NOW)
    (main,) = status.container_statuses
    assert main.last_state.terminated is not None
    assert main.last_state.terminated.exit_code == 137
    assert main.last_state.terminated.reason == "ContainerStatusUnknown"
    assert main.restart_count == 1
    assert status.phase == "Running"


def test_compute_status_terminal_phase_is_not_left() -> None:
    pod = given_pod("lifecycle", "finishes")
    before = PodStatus(phase="Failed", reason="Evicted", message="too much")
    status = compute_status(view(pod, observed(container("ok")), previous=before), NOW)
    assert (status.phase, status.reason, status.message) == ("Failed", "Evicted", "too much")


def test_compute_status_transition_time_changes_only_with_condition() -> None:
    pod = given_pod("basic", "besteffort")
    first = compute_status(view(pod, observed(container("main"))), NOW)
    later = datetime(2026, 1, 2, tzinfo=UTC)
    second = compute_status(
        view(pod, observed(container("main")), previous=first, health={"main": FINE}), later
    )
    times = {c.type: c.last_transition_time for c in second.conditions}
    assert times["Ready"] == later
    assert times["Initialized"] == NOW
    assert second.start_time == NOW


def test_compute_status_readiness_gate_missing_pod_not_ready() -> None:
    pod = given_pod("basic", "besteffort")
    pod.spec.readiness_gates = from_document(
        Pod, {"spec": {"readinessGates": [{"conditionType": "x/y"}]}}
    ).spec.readiness_gates
    status = compute_status(view(pod, observed(container("main")), health={"main": FINE}), NOW)
    ready = next(c for c in status.conditions if c.type == "Ready")
    assert (ready.status, ready.reason) == ("False", "ReadinessGatesNotReady")
    assert ready.message == 'corresponding condition of pod readiness gate "x/y" does not exist.'


@pytest.mark.parametrize(
    ("policy", "codes", "terminal", "phase"),
    [
        ("Always", [0, 0], False, "Running"),
        ("OnFailure", [0, 0], False, "Succeeded"),
        ("OnFailure", [0, 1], False, "Running"),
        ("Never", [0, 1], False, "Failed"),
        ("Never", [0, 0], False, "Succeeded"),
        ("Always", [0, 1], True, "Failed"),
        ("Always", [0, 0], True, "Succeeded"),
    ],
)
def test_compute_status_containers_exited_phase_follows_restart_policy(
    policy: str, codes: list[int], terminal: bool, phase: str
) -> None:
    names = [f"c{index}" for index in range(len(codes))]
    document = {"spec": {"restartPolicy": policy, "containers": [{"name": name} for name in names]}}
    picture = observed(*(container(name, "exited", code) for name, code in zip(names, codes, strict=True)))
    status = compute_status(view(from_document(Pod, document), picture, terminal=terminal), NOW)
    assert status.phase == phase


@pytest.mark.parametrize(
    ("hosts", "ips", "host_network", "before", "told"),
    [
        (["192.0.2.2"], ("10.0.0.1",), False, [], (["192.0.2.2"], ["10.0.0.1"])),
        (["192.0.2.2"], ("fd00::1", "10.0.0.1"), False, [], (["192.0.2.2"], ["10.0.0.1", "fd00::1"])),
        (["fd01::2"], ("10.0.0.1", "fd00::1"), False, [], (["fd01::2"], ["fd00::1", "10.0.0.1"])),
        (["fd01::2"], ("10.0.0.1", "10.0.0.2"), False, [], (["fd01::2"], ["10.0.0.1"])),
        (["192.0.2.2", "fd01::2"], (), True, ["192.0.2.9"], (["192.0.2.2", "fd01::2"],) * 2),
        # The machine's network is not there yet.
        ([], (), True, ["192.0.2.9"], (["192.0.2.9"], ["192.0.2.9"])),
        ([], (), False, ["192.0.2.9"], (["192.0.2.9"], ["192.0.2.9"])),
        ([], (), True, [], ([], [])),
    ],
)
def test_compute_status_host_ips_and_pod_ips_ordered_by_family(
    hosts: list[str],
    ips: tuple[str, ...],
    host_network: bool,
    before: list[str],
    told: tuple[list[str], list[str]],
) -> None:
    previous = [AddressStatus(ip=ip) for ip in before]
    sandbox = ObservedSandbox(id="s", ready=True, created_at=1, ips=ips, host_network=host_network)
    status = compute_status(
        StatusInputs(
            pod=from_document(Pod, {"metadata": {"uid": "u"}, "spec": {"hostNetwork": host_network}}),
            observed=ObservedPod(uid="u", sandboxes=(sandbox,)),
            host_ips=hosts,
            previous=PodStatus(host_ips=previous, pod_ips=previous),
        ),
        NOW,
    )
    found = [one.ip for one in status.host_ips], [one.ip for one in status.pod_ips]
    assert found == told
    assert (status.host_ip, status.pod_ip) == tuple(next(iter(ips), "") for ips in told)


@pytest.mark.parametrize("gate", [True, False])
def test_compute_status_ready_to_start_containers_only_with_gate(gate: bool) -> None:
    pod = given_pod("basic", "besteffort")
    seen = view(pod, observed(container("main")), health={"main": FINE}, reports_ready_to_start=gate)
    conditions = {condition.type for condition in compute_status(seen, NOW).conditions}
    assert ("PodReadyToStartContainers" in conditions) == gate
    assert {"Ready", "Initialized", "ContainersReady", "PodScheduled"} <= conditions


@pytest.mark.parametrize("gate", [True, False])
def test_compute_status_image_volume_reference_only_with_gate(gate: bool) -> None:
    pod = given_pod("basic", "besteffort")
    main = pod.spec.containers[0]
    main.volume_mounts = [
        VolumeMount(name="model", mount_path="models/one"),
        VolumeMount(name="x", mount_path="/x"),
    ]
    mount = pb.Mount(container_path="/models/one", image=pb.ImageSpec(image="sha256:abc"))
    seen = pb.ContainerStatus(
        id="c1",
        state=pb.CONTAINER_RUNNING,
        started_at=1,
        metadata=pb.ContainerMetadata(name=main.name),
        mounts=[mount, pb.Mount(container_path="/x", host_path="/var/x")],
    )
    inputs = view(pod, observed(observed_container(seen)), health={"main": FINE}, reports_image_volumes=gate)
    mounts = plain(compute_status(inputs, NOW))["containerStatuses"][0]["volumeMounts"]
    expected = {"volumeStatus": {"image": {"imageRef": "sha256:abc"}}} if gate else {}
    assert mounts[0] == {"name": "model", "mountPath": "models/one"} | expected
    assert "volumeStatus" not in mounts[1]
