"""Away from the API server: what runs goes on, and when it is back, it is told the truth at once.

The outage of the first test is short; set PYKUBELET_TEST_OUTAGE_SECONDS=120 for the two minutes after
which the cluster itself has given the node up.
"""

import base64
import contextlib
import json
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml

from pykubelet.devcluster.admin_client import ApiStatusError
from pykubelet.devcluster.layout import Component
from pykubelet.linux.mounts import read_mounts, unmount
from tests.cluster.conftest import fresh_namespace
from tests.support.cluster_node import END, UNTIL_TOLD, ClusterNode
from tests.support.manifests import container, pod
from tests.support.node import is_ready, status_of
from tests.support.plane import Document, Plane, unique

pytestmark = pytest.mark.machine

MakeNode = Callable[..., ClusterNode]
OUTAGE_SECONDS = float(os.environ.get("PYKUBELET_TEST_OUTAGE_SECONDS", "8"))
GIVEN_UP_SECONDS = 35
"""Of a shorter outage the cluster takes no notice."""
RECOVERY_SECONDS = 10
SLOW_RECOVERY_SECONDS = 30
"""On a busy machine; whoever does not notice that the API server is back takes a minute."""
STUBBORN = "trap '' TERM; while true; do sleep 1; done"
HASH = "kubernetes.io/config.hash"
TOKEN = "/var/run/secrets/kubernetes.io/serviceaccount/token"
CLOCK = Path(__file__).parents[1] / "support/clock"


@pytest.fixture(scope="module")
def namespace(plane: Plane) -> Iterator[str]:
    """The module's namespace: after an outage the cluster's controllers take their time to fill another.

    At the end they are started anew, so that other modules need not wait for them.
    """
    with fresh_namespace(plane) as name:
        yield name
    plane.restart_controllers()


def started(make_node: MakeNode, **arguments: Any) -> ClusterNode:
    """A new node that is Ready."""
    node = make_node(**arguments)
    node.start()
    node.wait_registered()
    return node


def name_of(pod: Document) -> str:
    return str(pod["metadata"]["name"])


def static_pod(name: str, namespace: str) -> Document:
    return pod(name, container(), meta={"namespace": namespace})


def probed_pod(node: ClusterNode, namespace: str) -> Document:
    """A pod whose probes all succeed."""
    document = node.pod_document(unique("p"), namespace)
    probe = {"exec": {"command": ["true"]}, "periodSeconds": 1}
    document["spec"]["containers"][0] |= {"readinessProbe": probe, "livenessProbe": probe}
    return node.wait_pod_ready(node.plane.create(document))


def kill_container(node: ClusterNode, name: str) -> None:
    """Have a pod's container crash."""
    (running,) = node.truth.running(name)
    os.kill(node.truth.container_pid(running.id), signal.SIGKILL)


def restarts(found: Document | None) -> int:
    """How often a pod's container was restarted."""
    return int(status_of(found, "main")["restartCount"]) if found else 0


def is_alive(node: ClusterNode, since: datetime) -> bool:
    """Whether the cluster counts the node as alive, by a lease that was renewed since then."""
    lease, found = node.plane.find("lease", node.name, "kube-node-lease"), node.node_object()
    if lease is None or found is None:
        return False
    return datetime.fromisoformat(lease["spec"]["renewTime"]) > since and is_ready(found)


def without_ready_time(found: Document | None) -> Document:
    """A pod's status without the time since which it is, or is not, ready."""
    assert found is not None
    status: Document = json.loads(json.dumps(found["status"]))
    for condition in status["conditions"]:
        if condition["type"] == "Ready":
            del condition["lastTransitionTime"]
    return status


def check_went_on(node: ClusterNode, pod: Document, since: float) -> None:
    """Check that a pod is as it was before an outage that began at this time (monotonic).

    After a long one the cluster may come late and take the node, which it had given up, for lost: the
    pods that it calls not ready then are so again at once.
    """
    found = node.wait_api_pod(pod, "to be told of", lambda _: True)
    if time.monotonic() - since < GIVEN_UP_SECONDS:
        assert found["status"] == pod["status"]
    before = without_ready_time(pod)
    node.wait_api_pod(pod, "to have gone on", lambda it: without_ready_time(it) == before)


def test_api_server_outage_pods_continue_and_status_reported_after(
    plane: Plane, make_node: MakeNode, namespace: str
) -> None:
    node = started(make_node)
    steady = probed_pod(node, namespace)
    crashing = node.create_pod(namespace)
    completing = node.create_pod(namespace, script=f"{UNTIL_TOLD}; exit 0", restartPolicy="Never")
    failing = node.create_pod(namespace, script=f"{UNTIL_TOLD}; exit 7", restartPolicy="Never")
    leaving = node.create_pod(namespace, script=STUBBORN, terminationGracePeriodSeconds=4)
    old = node.write(static_pod("old", namespace))
    for one in (crashing, completing, failing, leaving):
        node.wait_pod_ready(one)
    uid = plane.wait_for("pod", old, namespace, is_ready)["metadata"]["annotations"][HASH]
    assert node.left_of(uid)
    plane.delete("pod", name_of(leaving), namespace)

    def heard() -> bool:
        known = node.pod(name_of(leaving))
        return known is None or "deletionTimestamp" in known["metadata"]

    node.wait("the agent to hear of the deletion", heard)
    begin = time.monotonic()
    plane.kill_server()
    try:
        kill_container(node, name_of(crashing))
        for one in (completing, failing):
            node.shell(name_of(one), END)
        node.remove("old")
        new = node.write(static_pod("new", namespace))
        node.wait("the new pod to run", lambda: node.truth.running(new))
        node.wait("the old one to be gone", lambda: not node.left_of(uid))
        node.wait("the crash to be seen", lambda: restarts(node.pod(name_of(crashing))) == 1)
        for one in (completing, failing, leaving):
            node.wait("the end", lambda one=one: not node.truth.running(name_of(one)))  # type: ignore[misc]
        time.sleep(max(0.0, begin + OUTAGE_SECONDS - time.monotonic()))
        back = datetime.now(UTC)
    finally:
        plane.start_server()
    ready = time.monotonic()

    def told() -> bool:
        found = {name: plane.find("pod", name, namespace) for name in (old, new, name_of(leaving))}
        pods = [node.api_pod(one) or {"status": {}} for one in (completing, failing)]
        again = node.api_pod(crashing)
        return (
            is_alive(node, back)
            and found[old] is found[name_of(leaving)] is None
            and is_ready(found[new] or {"status": {}})
            and [one["status"].get("phase") for one in pods] == ["Succeeded", "Failed"]
            and restarts(again) == 1
            and is_ready(again or {"status": {}})
        )

    node.wait("the truth", told, 60)
    took = time.monotonic() - ready
    print(f"away for {ready - begin:.1f} s, all was told {took:.1f} s after the API server was ready")
    assert took < RECOVERY_SECONDS
    check_went_on(node, steady, begin)
    while time.monotonic() < ready + RECOVERY_SECONDS:
        check_went_on(node, steady, begin)
        time.sleep(0.5)
    node.wait("the truth to last", told)
    again = status_of(node.api_pod(crashing) or {}, "main")
    assert again["lastState"]["terminated"]["exitCode"] == 128 + signal.SIGKILL
    failed = status_of(node.api_pod(failing) or {}, "main")["state"]["terminated"]
    assert failed["exitCode"] == 7
    assert datetime.fromisoformat(failed["finishedAt"]) < back
    # What happened meanwhile is told in its order.
    plane.wait("the events", lambda: len(plane.events(namespace, new)) >= 3)
    events = sorted(
        plane.events(namespace, new), key=lambda event: (event["firstTimestamp"], event["metadata"]["name"])
    )
    assert [event["reason"] for event in events][:3] == ["Pulled", "Created", "Started"]
    own = [event for event in events if event["reason"] != "NodeNotReady"]  # that one is the cluster's
    assert all(datetime.fromisoformat(event["firstTimestamp"]) < back for event in own)


def test_kubelet_start_without_api_server_runs_static_pods_then_registers(
    plane: Plane, make_node: MakeNode, namespace: str
) -> None:
    node = make_node()
    name = node.write(static_pod("first", namespace))
    with plane.without_server():
        node.start()
        node.wait("the static pod to run", lambda: node.truth.running(name))
        (running,) = node.truth.running(name)
    node.wait_registered()
    mirror = plane.wait_for("pod", name, namespace, is_ready)
    assert [one.id for one in node.truth.running(name)] == [running.id]
    assert restarts(mirror) == 0
    node.wait_pod_ready(node.create_pod(namespace))


def answers(plane: Plane) -> bool:
    """Whether the API server answers anything at all."""
    with contextlib.suppress(ApiStatusError):
        plane.request("GET", "/livez", timeout=1)
    return True


def test_api_server_repeated_outages_kubelet_recovers(
    plane: Plane, make_node: MakeNode, namespace: str
) -> None:
    node = started(make_node)
    steady = probed_pod(node, namespace)
    ending = node.wait_pod_ready(node.create_pod(namespace, script=f"{UNTIL_TOLD}; exit 3"))
    begin = time.monotonic()
    with plane.without_server():
        node.shell(name_of(ending), END)
        node.wait("the crash to be seen", lambda: restarts(node.pod(name_of(ending))) > 0)
        for _ in range(2):
            plane.cluster.start_component(Component.APISERVER)
            plane.wait("it to answer", lambda: answers(plane), 90)
            plane.kill_server()
        mark = datetime.now(UTC)
    node.wait("the node to be alive", lambda: is_alive(node, mark), SLOW_RECOVERY_SECONDS)
    node.wait_api_pod(ending, "to be told of", lambda it: restarts(it) > 0)
    check_went_on(node, steady, begin)
    node.wait_pod_ready(node.create_pod(namespace))


def test_kubelet_killed_during_outage_pods_adopted_and_reconciled(
    plane: Plane, make_node: MakeNode, namespace: str
) -> None:
    node = started(make_node)
    steady = probed_pod(node, namespace)
    crashing, deleted = node.create_pod(namespace), node.create_pod(namespace)
    for one in (crashing, deleted):
        one |= node.wait_pod_ready(one)
    begin = time.monotonic()
    node.kill()
    plane.kubectl("delete", "pod", name_of(deleted), "-n", namespace, "--wait=false")
    with plane.without_server():
        node.start()
        kill_container(node, name_of(crashing))
        node.kill()
        node.start()
        static = node.write(static_pod("meanwhile", namespace))
        node.wait("the static pod to run", lambda: node.truth.running(static))
        # Nobody knows yet which others are wanted.
        assert node.truth.running(name_of(deleted))
        node.wait("the crash to last", lambda: not node.truth.running(name_of(crashing)))
    plane.wait_gone("pod", name_of(deleted), namespace)
    node.wait_gone(name_of(deleted), deleted["metadata"]["uid"])
    again = node.wait_api_pod(crashing, "to be restarted", lambda it: is_ready(it) and restarts(it) == 1)
    assert status_of(again, "main")["lastState"]["terminated"]["exitCode"] == 128 + signal.SIGKILL
    plane.wait_for("pod", static, namespace, is_ready)
    check_went_on(node, steady, begin)


def test_reboot_without_api_server_pods_restored_from_checkpoints(
    plane: Plane, make_node: MakeNode, namespace: str, tmp_path: Path
) -> None:
    folder = tmp_path / "checkpoints"
    node = started(make_node, flags=[f"--pod-checkpoint-dir={folder}"])
    meta = {"name": "words", "namespace": namespace}
    for kind, field in (("ConfigMap", "data"), ("Secret", "stringData")):
        plane.create({"apiVersion": "v1", "kind": kind, "metadata": meta, field: {"word": kind}})
    document = node.pod_document(unique("p"), namespace)
    document["spec"]["volumes"] = [
        {"name": "map", "configMap": {"name": "words"}},
        {"name": "secret", "secret": {"secretName": "words"}},
    ]
    document["spec"]["containers"][0] |= {
        "volumeMounts": [{"name": name, "mountPath": f"/{name}"} for name in ("map", "secret")],
        "env": [{"name": "WORD", "valueFrom": {"secretKeyRef": {"name": "words", "key": "word"}}}],
    }
    kept = node.wait_pod_ready(plane.create(document))
    deleted = node.wait_pod_ready(node.create_pod(namespace))
    done = node.wait_pod_phase(
        node.create_pod(namespace, script="exit 0", restartPolicy="Never"), "Succeeded"
    )
    uids = {one["metadata"]["uid"] for one in (kept, deleted, done)}
    node.wait("the checkpoints", lambda: {path.stem for path in folder.iterdir()} == uids | {"node"})
    node.wait(
        "the last one's end", lambda: "Succeeded" in (folder / f"{done['metadata']['uid']}.json").read_text()
    )
    node.kill()
    for box in node.truth.sandboxes():
        node.truth.remove_sandbox(box.id)
    for mounted in reversed(read_mounts((node.root / "pods").resolve())):
        unmount(mounted.point)
    plane.delete("pod", name_of(deleted), namespace, grace=0)
    with plane.without_server():
        node.start()
        for one in (kept, deleted):
            node.wait(f"{name_of(one)} to run", lambda one=one: node.truth.running(name_of(one)), 60)  # type: ignore[misc]
        script = f"cat /map/word /secret/word; echo -n $WORD; test -s {TOKEN}"
        assert node.shell(name_of(kept), script) == "ConfigMapSecretSecret"
        assert not node.truth.sandboxes(name_of(done))
        (running,) = node.truth.running(name_of(kept))
    # Its word wins.
    node.wait_gone(name_of(deleted), deleted["metadata"]["uid"])
    node.wait_api_pod(
        kept,
        "to be as it is",
        lambda it: is_ready(it) and status_of(it, "main").get("containerID", "").endswith(running.id),
    )
    assert [one.id for one in node.truth.running(name_of(kept))] == [running.id]
    ended = node.api_pod(done)
    assert ended is not None
    assert ended["status"]["phase"] == "Succeeded"


# Refused


def test_kubelet_missing_permission_logs_rbac_rule_until_granted(
    plane: Plane, make_node: MakeNode, namespace: str
) -> None:
    user = unique("stranger")
    node = make_node(kubeconfig=plane.user_kubeconfig(user))
    name = node.write(static_pod("alone", namespace))
    node.start()
    node.wait("the static pod to run", lambda: node.truth.running(name))
    rule = '{apiGroups: [""], resources: ["nodes"], verbs: ["create"]}'
    node.wait("the rule to be named", lambda: rule in node.log_text().replace("\\", ""))
    binding = unique("binding")
    plane.kubectl("create", "clusterrolebinding", binding, "--clusterrole=system:node", f"--user={user}")
    try:
        node.wait_registered()
        node.wait_pod_ready(node.create_pod(namespace))
        plane.wait_for("pod", name, namespace, is_ready)
        node.leave()
    finally:
        plane.delete("clusterrolebinding", binding)


def test_kubelet_kubeconfig_of_other_node_logged_as_cause(plane: Plane, make_node: MakeNode) -> None:
    node = make_node(kubeconfig=plane.node_kubeconfig(unique("other")))
    node.start()
    for what in ("renew the node's lease", "list or watch", "register the node"):
        said = f"Failed to {what}"

        def told(said: str = said) -> bool:
            lines = [line for line in node.log_text().splitlines() if said in line]
            return any("the kubeconfig is another node's" in line for line in lines)

        node.wait(said, told)
    assert "ClusterRole" not in node.log_text()


def write_identity(plane: Plane, node: str, path: Path, life: timedelta) -> None:
    """Have a certificate of a node and its key at this path."""
    user = yaml.safe_load(plane.node_kubeconfig(node, life).read_text())["users"][0]["user"]
    parts = (user["client-certificate-data"], user["client-key-data"])
    new = path.with_suffix(".new")
    new.write_bytes(b"".join(base64.b64decode(part) for part in parts))
    new.rename(path)


def test_kubelet_client_certificate_expired_logged_and_reloaded(
    plane: Plane, make_node: MakeNode, namespace: str, tmp_path: Path
) -> None:
    name, pem = unique("n"), tmp_path / "current.pem"
    document = yaml.safe_load(plane.node_kubeconfig(name).read_text())
    document["users"][0]["user"] = {"client-certificate": str(pem), "client-key": str(pem)}
    kubeconfig = tmp_path / "kubeconfig"
    kubeconfig.write_text(json.dumps(document))
    write_identity(plane, name, pem, timedelta(seconds=6))
    node = make_node(name=name, kubeconfig=kubeconfig, settings={"nodeLeaseDurationSeconds": 8})
    node.start()
    node.wait("its end to be said", lambda: "the client certificate expired at" in node.log_text())
    write_identity(plane, name, pem, timedelta(days=1))
    node.wait_registered()
    node.wait_pod_ready(node.create_pod(namespace))


# The wrong time


def test_kubelet_clock_two_hours_off_pods_and_tokens_work(
    plane: Plane, make_node: MakeNode, namespace: str, tmp_path: Path
) -> None:
    ahead = tmp_path / "ahead"
    env = {"PYTHONPATH": str(CLOCK), "PYKUBELET_TEST_CLOCK": str(ahead)}
    node = make_node(env=env, settings={"nodeLeaseDurationSeconds": 8})
    ahead.write_text("7200")
    node.start()
    node.wait_registered()
    mark = plane.audit_mark()
    steady = probed_pod(node, namespace)
    for seconds in (-7200, 7200, 0):
        ahead.write_text(str(seconds))
        new = node.wait_pod_ready(node.create_pod(namespace))
        node.shell(name_of(new), f"test -s {TOKEN}")
        node.delete_pod(new)
    now = node.api_pod(steady)
    assert now is not None
    assert is_ready(now)
    assert restarts(now) == 0
    since = datetime.now(UTC)
    node.wait("the node to be alive", lambda: is_alive(node, since))
    # An answer may be read long after it was written.
    assert re.search("(2:00|1:59):.. ahead of the API server's clock", node.log_text())
    tokens = [
        event for event in plane.writes(node.user, mark) if event["objectRef"].get("subresource") == "token"
    ]
    # Whatever the clock says of their life, they are not asked for again and again.
    assert len(tokens) < 20
