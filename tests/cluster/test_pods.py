"""Pods of a real API server on a real node: their lives, their deaths, and what the API server hears."""

import subprocess
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from tests.support.cluster_node import END, SERVER_ERROR, TOO_MANY, UNTIL_TOLD, ClusterNode
from tests.support.manifests import container, forever, pod
from tests.support.node import PATIENCE, condition, is_ready, status_of
from tests.support.plane import Document, unique

pytestmark = pytest.mark.machine

STUBBORN = "trap '' TERM; while true; do sleep 1; done"
MakeNode = Callable[..., ClusterNode]


@pytest.fixture
def member(cluster_member: ClusterNode) -> Iterator[ClusterNode]:
    """The module's node, with its agent running whatever the last test did to it."""
    if cluster_member.process is None:
        cluster_member.start()
    yield cluster_member
    if cluster_member.process is None:
        cluster_member.start()


def container_ids(pod: Document) -> list[str]:
    return [status.get("containerID", "") for status in pod["status"]["containerStatuses"]]


def delete(node: ClusterNode, pod: Document, grace: int | None = None) -> None:
    node.plane.delete("pod", pod["metadata"]["name"], pod["metadata"]["namespace"], grace=grace)


def delete_heard(node: ClusterNode, pod: Document) -> None:
    """Delete a pod, and wait until the agent has heard of it: the API server may go away now."""
    delete(node, pod)
    name = pod["metadata"]["name"]

    def heard() -> bool:
        known = node.pod(name)
        return known is None or "deletionTimestamp" in known["metadata"]

    node.wait(f"the agent to hear of the end of {name}", heard)


def wait_gone(node: ClusterNode, pod: Document, seconds: float = PATIENCE) -> None:
    """Wait until neither the API server nor the node has anything of a pod."""
    name = pod["metadata"]["name"]
    node.plane.wait_gone("pod", name, pod["metadata"]["namespace"], seconds)
    node.wait_gone(name, pod["metadata"]["uid"], seconds)


def pod_writes(node: ClusterNode, since: int, namespace: str) -> list[tuple[str, str]]:
    """What the node wrote to a namespace's pods: verb and name; others' may still be on their way out."""
    return [
        (event["verb"], event["objectRef"]["name"])
        for event in node.plane.writes(node.user, since)
        if event["objectRef"]["resource"] == "pods" and event["objectRef"].get("namespace") == namespace
    ]


# Coming


def test_pod_start_running_status_written_in_one_patch(member: ClusterNode, namespace: str) -> None:
    mark, began = member.plane.audit_mark(), time.monotonic()
    created = member.wait_pod_ready(member.create_pod(namespace))
    took = time.monotonic() - began
    status = created["status"]
    assert status["phase"] == "Running"
    assert status["observedGeneration"] == created["metadata"]["generation"]
    assert [c["type"] for c in status["conditions"]] == [
        "PodReadyToStartContainers",
        "Initialized",
        "Ready",
        "ContainersReady",
        "PodScheduled",
    ]
    # More when the machine is busy: a slow start shows what it waits for, once a second at most.
    # The audit comes after the answer.
    writes = member.wait("the audit", lambda: pod_writes(member, mark, namespace))
    assert 1 <= len(writes) <= max(2, 1 + int(took))


def test_pod_image_never_pull_missing_stays_pending_with_reason(member: ClusterNode, namespace: str) -> None:
    document = member.pod_document(unique("p"), namespace)
    document["spec"]["containers"][0]["image"] = "nowhere.invalid/none:1"
    created = member.plane.create(document)
    found = member.wait_api_pod(
        created, "to wait", lambda found: "ErrImageNeverPull" in str(found["status"].get("containerStatuses"))
    )
    assert found["status"]["phase"] == "Pending"


def test_pod_readiness_gate_false_not_ready_until_set(member: ClusterNode, namespace: str) -> None:
    gates = [{"conditionType": "example.com/ready"}]
    created = member.create_pod(namespace, readinessGates=gates)
    member.wait_api_pod(
        created, "to have ready containers", lambda found: condition(found, "ContainersReady") == "True"
    )
    member.wait_api_pod(
        created,
        "to wait for its gate",
        lambda found: any(c.get("reason") == "ReadinessGatesNotReady" for c in found["status"]["conditions"]),
    )
    gate = {"type": "example.com/ready", "status": "True"}
    name = created["metadata"]["name"]
    path = f"{member.plane.place('pod', namespace)}/{name}/status"
    member.plane.request(
        "PATCH",
        path,
        {"status": {"conditions": [gate]}},
        content_type="application/strategic-merge-patch+json",
    )
    found = member.wait_pod_ready(created)
    assert condition(found, "example.com/ready") == "True"


def test_pod_status_overwritten_by_other_client_is_corrected(member: ClusterNode, namespace: str) -> None:
    created = member.wait_pod_ready(member.create_pod(namespace))
    name = created["metadata"]["name"]
    for wrong in ({"phase": "Pending"}, {"reason": "Nonsense", "containerStatuses": None}):
        member.plane.patch("pod", name, namespace, {"status": wrong}, subresource="status")
        member.wait_api_pod(created, "to be corrected", lambda found: found["status"] == created["status"])


# Going


def test_pod_delete_removes_all_remnants_with_few_writes(member: ClusterNode, namespace: str) -> None:
    created = member.wait_pod_ready(member.create_pod(namespace))
    mark, began = member.plane.audit_mark(), datetime.now(UTC)
    member.delete_pod(created)
    took = (datetime.now(UTC) - began).total_seconds()

    def verbs() -> list[str]:
        """What the node did to it; what it was told of it before may be written down only now."""
        return [
            event["verb"]
            for event in member.plane.writes(member.user, mark)
            if event["objectRef"]["resource"] == "pods"
            and event["objectRef"]["name"] == created["metadata"]["name"]
            and datetime.fromisoformat(event["requestReceivedTimestamp"]) > began
            # What a busy API server puts off is asked for again.
            and event["responseStatus"]["code"] < SERVER_ERROR
            and event["responseStatus"]["code"] != TOO_MANY
        ]

    # One last status, then the end; and what is going on before that, once a second at most.
    member.wait("the audit", lambda: {"patch", "delete"} <= set(verbs()))
    *patches, last = verbs()
    assert (set(patches), last) == ({"patch"}, "delete")
    assert len(patches) <= 1 + int(took)


def test_pod_delete_shorter_grace_period_takes_effect(member: ClusterNode, namespace: str) -> None:
    created = member.create_pod(namespace, script=STUBBORN, terminationGracePeriodSeconds=600)
    member.wait_pod_ready(created)
    delete(member, created)
    time.sleep(1)
    assert member.truth.running(created["metadata"]["name"])
    delete(member, created, grace=1)
    wait_gone(member, created)


def noting_pod(node: ClusterNode, namespace: str, out: Path, hook: str, **spec: Any) -> Document:
    """Return a pod that ignores SIGTERM and notes it; its preStop hook notes itself and runs `hook`."""
    script = "trap 'echo term >> /out/log' TERM; touch /out/up; while :; do sleep 0.1; done"
    document = node.pod_document(unique("p"), namespace, script, **spec)
    main = document["spec"]["containers"][0]
    main["lifecycle"] = {"preStop": {"exec": {"command": ["sh", "-c", f"echo hook >> /out/log; {hook}"]}}}
    main["volumeMounts"] = [{"name": "out", "mountPath": "/out"}]
    out.mkdir()
    document["spec"]["volumes"] = [{"name": "out", "hostPath": {"path": str(out)}}]
    return document


def noted(out: Path) -> list[str]:
    return (out / "log").read_text().split() if (out / "log").exists() else []


@pytest.mark.parametrize(
    ("hook", "until"), [("while :; do sleep 0.1; done", ["hook"]), (":", ["hook", "term"])]
)
def test_delete_with_shorter_grace_period_repeats_neither_hook_nor_signal(
    member: ClusterNode, namespace: str, tmp_path: Path, hook: str, until: list[str]
) -> None:
    out = tmp_path / "out"
    document = noting_pod(member, namespace, out, hook, terminationGracePeriodSeconds=600)
    created = member.wait_pod_ready(member.plane.create(document))
    member.wait("the trap", (out / "up").exists)
    delete(member, created)
    member.wait(f"{until}", lambda: noted(out) == until)
    delete(member, created, grace=3)
    wait_gone(member, created)
    assert noted(out) == ["hook", "term"]


def test_delete_with_grace_period_zero_runs_hook(member: ClusterNode, namespace: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    document = noting_pod(member, namespace, out, ":", terminationGracePeriodSeconds=600)
    document["metadata"]["finalizers"] = ["example.com/hold"]
    created = member.wait_pod_ready(member.plane.create(document))
    name = created["metadata"]["name"]
    member.wait("the trap", (out / "up").exists)
    # The finalizer keeps the object, with deletionGracePeriodSeconds 0.
    delete(member, created, grace=0)
    try:
        member.wait("the pod to be stopped", lambda: not member.left_of(created["metadata"]["uid"]))
        assert noted(out) == ["hook", "term"]
    finally:
        member.plane.patch("pod", name, namespace, {"metadata": {"finalizers": None}})
    wait_gone(member, created)


@pytest.mark.parametrize("grace", [None, 0])
def test_delete_does_not_wait_for_removal_of_pod_directory(
    member: ClusterNode, namespace: str, grace: int | None
) -> None:
    """Verify that a remnant is removed as soon as that is possible, also by a new kubelet process."""
    name = unique("p")
    created = member.wait_pod_ready(member.create_pod(namespace, name))
    uid = created["metadata"]["uid"]
    stuck = member.root / "pods" / uid / "stuck"
    stuck.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "none", str(stuck)], check=True)
    try:
        delete(member, created, grace=grace)
        member.plane.wait_gone("pod", name, namespace)
        namesake = member.wait_pod_ready(member.create_pod(namespace, name))
        member.wait("all but the directory to go", lambda: member.left_of(uid) == [f"folder {stuck.parent}"])
        if grace == 0:
            member.restart()
    finally:
        subprocess.run(["umount", str(stuck)], check=True)
    member.wait("the directory to go", lambda: not member.left_of(uid))
    ids = container_ids(namesake)
    found = member.api_pod(namesake)
    assert found is not None
    assert (is_ready(found), container_ids(found)) == (True, ids)
    member.delete_pod(namesake)


def test_pod_force_deleted_containers_terminated(member: ClusterNode, namespace: str) -> None:
    created = member.wait_pod_ready(member.create_pod(namespace))
    delete(member, created, grace=0)
    wait_gone(member, created)


def test_pod_force_deleted_same_name_pod_starts_immediately(member: ClusterNode, namespace: str) -> None:
    """Verify that a pod does not wait for the end of its force-deleted predecessor.

    The predecessor has a grace period of one second, because the API server sets that of its deletion to 0
    before it removes it. A slow host may need that second to start a sandbox, hence several attempts.
    """
    if not any(_started_beside_force_deleted(member, namespace) for _ in range(5)):
        pytest.fail("each pod was started after the end of its force-deleted predecessor")


def _started_beside_force_deleted(node: ClusterNode, namespace: str) -> bool:
    name = unique("p")

    def sandbox_uids() -> set[str]:
        return {box.labels["io.kubernetes.pod.uid"] for box in node.truth.ready(name)}

    first = node.create_pod(namespace, name, script=STUBBORN)
    node.wait_pod_ready(first)
    delete(node, first, grace=0)
    second = node.create_pod(namespace, name)
    uid = second["metadata"]["uid"]
    node.wait("the second pod to start", lambda: uid in sandbox_uids())
    together = first["metadata"]["uid"] in sandbox_uids()
    node.wait_pod_ready(second)
    node.wait("the first pod to end", lambda: sandbox_uids() == {uid})
    node.delete_pod(second)
    return together


def test_active_deadline_with_exit_code_zero_stays_failed(member: ClusterNode, namespace: str) -> None:
    document = member.pod_document(unique("p"), namespace, activeDeadlineSeconds=3)
    document["spec"]["containers"][0]["command"] = forever()
    created = member.plane.create(document)
    failed = member.wait_pod_phase(created, "Failed")
    assert failed["status"]["reason"] == "DeadlineExceeded"
    assert status_of(failed, "main")["state"]["terminated"]["exitCode"] == 0
    member.delete_pod(created)


def test_pod_succeeded_not_restarted_and_removed_on_delete(member: ClusterNode, namespace: str) -> None:
    created = member.create_pod(namespace, script="exit 0", restartPolicy="Never")
    done = member.wait_pod_phase(created, "Succeeded")
    assert condition(done, "Ready") == "False"
    name = created["metadata"]["name"]
    # A new label does not bring it back.
    member.plane.patch("pod", name, namespace, {"metadata": {"labels": {"new": "label"}}})
    time.sleep(2)
    assert not member.truth.running(name)
    member.delete_pod(created)


def test_pod_deleted_with_finalizer_terminated_and_not_restarted(member: ClusterNode, namespace: str) -> None:
    document = member.pod_document(unique("p"), namespace)
    document["metadata"]["finalizers"] = ["example.com/hold"]
    document["spec"]["containers"][0]["command"] = forever("touch /tmp/begun")
    created = member.wait_pod_ready(member.plane.create(document))
    name, uid = created["metadata"]["name"], created["metadata"]["uid"]
    # A container runs a moment before its shell has set its trap: without that it would not end well.
    member.shell(name, "until [ -e /tmp/begun ]; do sleep 0.1; done")
    delete(member, created)
    member.wait("the node to be done", lambda: not member.left_of(uid))
    try:
        held = member.wait_pod_phase(created, "Succeeded")
        member.wait_api_pod(
            held, "to be let go", lambda found: found["metadata"]["deletionGracePeriodSeconds"] == 0
        )
        # An agent that finds it so leaves it so.
        member.restart()
        time.sleep(2)
        assert not member.truth.sandboxes(name)
    finally:
        member.plane.patch("pod", name, namespace, {"metadata": {"finalizers": None}})
    wait_gone(member, created)


# With the agent away


def test_pod_deleted_before_start_never_started(member: ClusterNode, namespace: str) -> None:
    member.stop()
    created = member.create_pod(namespace)
    delete(member, created)
    time.sleep(0.5)
    assert member.api_pod(created) is not None
    member.start()
    wait_gone(member, created)
    assert "Created" not in {
        event["reason"] for event in member.plane.events(namespace, created["metadata"]["name"])
    }


def test_pod_failed_by_other_client_never_started(member: ClusterNode, namespace: str) -> None:
    member.stop()
    created = member.create_pod(namespace)
    name = created["metadata"]["name"]
    member.plane.patch(
        "pod", name, namespace, {"status": {"phase": "Failed", "reason": "Lost"}}, subresource="status"
    )
    member.start()
    other = member.create_pod(namespace)
    member.wait_pod_ready(other)
    assert not member.truth.sandboxes(name)
    found = member.api_pod(created)
    assert found is not None
    assert (found["status"]["phase"], found["status"]["reason"]) == ("Failed", "Lost")


def test_pods_deleted_while_kubelet_down_removed_after_start(member: ClusterNode, namespace: str) -> None:
    graceful = member.create_pod(namespace)
    forced = member.create_pod(namespace)
    for created in (graceful, forced):
        member.wait_pod_ready(created)
    member.kill()
    delete(member, graceful)
    delete(member, forced, grace=0)
    member.start()
    wait_gone(member, graceful)
    wait_gone(member, forced)


PROBES: dict[str, Any] = {
    "readinessProbe": {"exec": {"command": ["true"]}, "periodSeconds": 1},
    "startupProbe": {"exec": {"command": ["true"]}, "periodSeconds": 1},
    "livenessProbe": {"exec": {"command": ["true"]}, "periodSeconds": 1},
}


@pytest.mark.parametrize("end", ["stop", "kill"])
def test_kubelet_restart_changes_no_pods_and_no_status(member: ClusterNode, namespace: str, end: str) -> None:
    document = member.pod_document(unique("p"), namespace)
    document["spec"]["containers"][0] |= PROBES
    plain = container("init", ["true"]) | {"imagePullPolicy": "Never", "image": member.image}
    document["spec"]["initContainers"] = [plain]
    probed = member.plane.create(document)
    finished = member.create_pod(namespace, script="exit 3", restartPolicy="Never")
    static = member.write(pod("lasting", container(), meta={"namespace": namespace}))
    mirror = member.wait("the mirror", lambda: member.plane.find("pod", static, namespace))
    before = [member.wait_pod_ready(one) for one in (probed, mirror)]
    # Whatever comes after its end has come, too.
    before.append(
        member.wait_api_pod(
            finished,
            "to be over",
            lambda found: (
                found["status"].get("phase") == "Failed"
                and condition(found, "PodReadyToStartContainers") == "False"
            ),
        )
    )
    time.sleep(2)
    mark = member.plane.audit_mark()
    getattr(member, end)()
    time.sleep(1)
    member.start()
    marker = member.wait_pod_ready(member.create_pod(namespace))
    time.sleep(5)
    after = [member.api_pod(one) for one in (probed, mirror, finished)]
    names = {name for _, name in pod_writes(member, mark, namespace)}
    assert names == {marker["metadata"]["name"]}
    assert [one["status"] for one in after if one] == [one["status"] for one in before]
    member.remove("lasting")
    wait_gone(member, mirror)


# With the API server away


def test_api_server_outage_pod_changes_reported_after(member: ClusterNode, namespace: str) -> None:
    plane = member.plane
    steady = member.wait_pod_ready(member.create_pod(namespace))
    ending = member.create_pod(namespace, script=f"{UNTIL_TOLD}; exit 7", restartPolicy="Never")
    crashing = member.create_pod(namespace, script=f"{UNTIL_TOLD}; exit 7")
    for created in (ending, crashing):
        member.wait_pod_ready(created)
    leaving = member.wait_pod_ready(
        member.create_pod(namespace, script=STUBBORN, terminationGracePeriodSeconds=4)
    )
    delete_heard(member, leaving)
    with plane.without_server():
        for created in (ending, crashing):
            member.shell(created["metadata"]["name"], END)
        member.wait(
            "the crash to be seen",
            lambda: status_of(member.pod(crashing["metadata"]["name"]) or {}, "main")["restartCount"] >= 1,
        )
        member.wait("the end to be seen", lambda: not member.truth.running(leaving["metadata"]["name"]))
    done = member.wait_pod_phase(ending, "Failed", 60)
    assert status_of(done, "main")["state"]["terminated"]["exitCode"] == 7
    member.wait_api_pod(
        crashing, "to have restarted", lambda found: status_of(found, "main")["restartCount"] >= 1, 60
    )
    wait_gone(member, leaving)
    now = member.api_pod(steady)
    assert now is not None
    assert now["status"] == steady["status"]


def test_pod_deletion_completes_after_kubelet_and_api_server_restart(
    member: ClusterNode, namespace: str
) -> None:
    plane = member.plane
    # Long enough for the API server to be gone before: else the end would be told.
    created = member.create_pod(namespace, script=STUBBORN, terminationGracePeriodSeconds=8)
    kept = member.create_pod(namespace)
    for one in (created, kept):
        one |= member.wait_pod_ready(one)
    delete_heard(member, created)
    with plane.without_server():
        member.wait("the pod to be stopped", lambda: not member.truth.running(created["metadata"]["name"]))
        member.kill()
        member.start()
        time.sleep(3)
        # Nobody knows yet which pods are wanted.
        assert member.truth.running(kept["metadata"]["name"])
        assert member.truth.sandboxes(created["metadata"]["name"])
    wait_gone(member, created, 60)
    now = member.api_pod(kept)
    assert now is not None
    assert container_ids(now) == container_ids(kept)


def test_pod_status_never_reported_adopted_after_restart(member: ClusterNode, namespace: str) -> None:
    plane = member.plane
    # Nothing of it may have to be asked for: the server can be gone before that.
    created = member.create_pod(namespace, automountServiceAccountToken=False)
    name = created["metadata"]["name"]
    member.wait("the pod to be known", lambda: member.pod(name))
    plane.kill_server()
    try:
        (box,) = member.wait("the container", lambda: member.truth.running(name))
        member.kill()
    finally:
        plane.start_server()
    member.start()
    found = member.wait_pod_ready(created)
    assert [one.rpartition("/")[2] for one in container_ids(found)] == [box.id]
    assert status_of(found, "main")["restartCount"] == 0


# Static pods


def test_static_pod_mirror_pod_created_recreated_replaced_and_removed(
    member: ClusterNode, namespace: str
) -> None:
    plane = member.plane
    name = member.write(pod("web", container(command=forever()), meta={"namespace": namespace}))
    mirror = member.wait("the mirror", lambda: plane.find("pod", name, namespace))
    ready = member.wait_pod_ready(mirror)
    node = plane.get("node", member.name)
    assert ready["metadata"]["ownerReferences"] == [
        {
            "apiVersion": "v1",
            "kind": "Node",
            "name": member.name,
            "uid": node["metadata"]["uid"],
            "controller": True,
        }
    ]
    annotations = ready["metadata"]["annotations"]
    assert annotations["kubernetes.io/config.mirror"] == annotations["kubernetes.io/config.hash"]
    (running,) = member.truth.running(name)
    for grace in (None, 0):
        delete(member, mirror, grace)
        mirror = member.wait(
            "a new mirror",
            lambda old=mirror: next(  # type: ignore[misc]
                (
                    found
                    for found in [plane.find("pod", name, namespace)]
                    if found and found["metadata"]["uid"] != old["metadata"]["uid"]
                ),
                None,
            ),
        )
        member.wait_api_pod(mirror, "to show the pod", is_ready)
    assert [one.id for one in member.truth.running(name)] == [running.id]
    # A changed manifest is another pod, and another mirror.
    member.write(pod("web", container(command=forever("true")), meta={"namespace": namespace}))
    member.wait(
        "the other mirror",
        lambda: (
            is_ready(found)
            and found["metadata"]["annotations"]["kubernetes.io/config.hash"]
            != annotations["kubernetes.io/config.hash"]
            if (found := plane.find("pod", name, namespace))
            else None
        ),
    )
    member.remove("web")
    plane.wait_gone("pod", name, namespace)


def test_mirror_pod_static_pod_updated_stays_running_until_old_pod_ended(
    member: ClusterNode, namespace: str
) -> None:
    deaf = ["sh", "-c", "trap '' TERM; while :; do sleep 9 & wait $!; done"]

    def version(label: str) -> dict[str, Any]:
        meta = {"namespace": namespace, "labels": {"version": label}}
        return pod("slow", container(command=deaf), meta=meta, terminationGracePeriodSeconds=6)

    name = member.write(version("one"))
    mirror = member.wait_pod_ready(
        member.wait("the mirror", lambda: member.plane.find("pod", name, namespace))
    )
    (old,) = member.truth.running(name)
    member.write(version("two"))
    seen = list[bool]()

    def replaced() -> bool:
        found = member.plane.find("pod", name, namespace)
        alive = any(one.id == old.id for one in member.truth.running(name))
        same = found is not None and found["metadata"]["uid"] == mirror["metadata"]["uid"]
        if alive:
            # Looked at after the mirror: while the old container runs, its mirror must have been there.
            assert found is not None
            assert same
            assert found["status"]["phase"] == "Running"
            seen.append(same)
        return found is not None and not same and is_ready(found)

    member.wait("the new mirror", replaced)
    assert len(seen) > 5
    member.remove("slow")
    member.plane.wait_gone("pod", name, namespace)


def test_mirror_pod_manifest_removed_while_kubelet_down_is_deleted(
    member: ClusterNode, namespace: str
) -> None:
    name = member.write(pod("brief", container(), meta={"namespace": namespace}))
    member.wait("the mirror", lambda: member.plane.find("pod", name, namespace))
    member.kill()
    member.remove("brief")
    member.start()
    member.plane.wait_gone("pod", name, namespace)
