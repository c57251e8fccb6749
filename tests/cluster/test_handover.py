"""A node goes from the reference kubelet to ours and back: its pods do not notice.

Both agents use one root directory, one runtime and one name. What the API server saw of the pods in
between is asked for afterwards, version by version, so that not even a short untruth goes unseen.
"""

import base64
import json
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from pykubelet.devcluster.reference_kubelet import undo_host_changes
from pykubelet.linux.mounts import read_mounts
from tests.support.cluster_node import ClusterNode
from tests.support.image_registry import PASSWORD, USER, running_registry
from tests.support.manifests import container as plain_container
from tests.support.manifests import forever, pod
from tests.support.node import all_statuses, condition, status_of
from tests.support.plane import Document, Plane

pytestmark = pytest.mark.machine

MakeNode = Callable[..., ClusterNode]
SLOW_END = "trap 'sleep 4; exit 0' TERM; while true; do sleep 3600 & wait $!; done"
GRACE = 15
TOKEN = "/var/run/secrets/kubernetes.io/serviceaccount/token"
SMALL = {"cpu": "20m", "memory": "32Mi"}


@pytest.fixture
def tidy_machine() -> Iterator[None]:
    """Take back what the reference does to the machine, once its pods are gone."""
    with undo_host_changes():
        yield


@pytest.fixture
def node(plane: Plane, tidy_machine: None, make_node: MakeNode) -> Iterator[ClusterNode]:
    """A node whose agent can be exchanged; at the end it is ours."""
    if plane.reference_kubelet is None:
        pytest.skip("there is no reference kubelet in $KUBEBUILDER_ASSETS")
    back_off = {"maxContainerRestartPeriod": "5s"}
    made = make_node(
        settings={
            "syncFrequency": "2s",
            "crashLoopBackOff": back_off,
            "featureGates": {"KubeletCrashLoopBackOffMax": True},
        }
    )
    yield made
    if made.reference:
        made.kill()
        made.hand_to(None)
        made.start()


# Its pods


class Pods:
    """Pods of all sorts in one namespace, as the first agent left them."""

    def __init__(self, node: ClusterNode, namespace: str) -> None:
        self.node, self.namespace = node, namespace
        self.write_objects("first")
        create = node.plane.create
        self.whole = create(self._whole())
        self.burst = create(self._burst())
        self.host = node.create_pod(namespace, "host", hostNetwork=True)
        self.crash = node.create_pod(namespace, "crash", script="exit 3")
        self.leaving = node.create_pod(
            namespace, "leaving", script=SLOW_END, terminationGracePeriodSeconds=GRACE
        )
        self.lost = node.create_pod(namespace, "lost")
        self.job = self._job()

    @property
    def steady(self) -> list[Document]:
        """Those that run and shall go on."""
        return [self.whole, self.burst, self.host]

    def settle(self) -> None:
        """Wait until all are what they shall be, and know them so."""
        node = self.node
        for one in (*self.steady, self.leaving, self.lost):
            one |= node.wait_pod_ready(one, 90)
        # Its end is told before that of its sandbox.
        self.job |= node.wait_api_pod(
            self.job,
            "to be over",
            lambda it: (
                it["status"].get("phase") == "Succeeded"
                and condition(it, "PodReadyToStartContainers") == "False"
            ),
            90,
        )
        self.crash |= node.wait_api_pod(
            self.crash, "to be in back-off", lambda it: status_of(it, "main")["restartCount"] >= 1, 90
        )
        if node.reference:
            # Some of what it tells of running pods comes with a later round.
            time.sleep(5)

    def write_objects(self, word: str) -> None:
        """Have the configMap and the secret say this."""
        meta = {"name": "words", "namespace": self.namespace}
        for kind, data in (("ConfigMap", "data"), ("Secret", "stringData")):
            self.node.plane.apply({"apiVersion": "v1", "kind": kind, "metadata": meta, data: {"word": word}})

    def _container(self, name: str, command: list[str], **fields: Any) -> Document:
        own = {"image": self.node.image, "imagePullPolicy": "Never"}
        return plain_container(name, command) | own | fields

    def _whole(self) -> Document:
        """Guaranteed, with an init container, a sidecar, probes, and volumes of every kind."""
        mounts = [
            {"name": name, "mountPath": f"/{name}"}
            for name in ("disk", "memory", "map", "secret", "projected")
        ]
        mounts.append({"name": "disk", "mountPath": "/part", "subPath": "inner"})
        common = {"resources": {"requests": SMALL, "limits": SMALL}, "volumeMounts": mounts}
        check = {"exec": {"command": ["test", "-e", "/disk/init"]}, "periodSeconds": 1}
        fill = "mkdir -p /disk/inner; for d in disk memory; do echo $d > /$d/init; done"
        document = self.node.pod_document("whole", self.namespace)
        document["spec"] |= {
            "initContainers": [
                self._container("init", ["sh", "-c", fill], **common),
                self._container("sidecar", forever(), restartPolicy="Always", startupProbe=check, **common),
            ],
            "containers": [
                self._container(
                    "main",
                    forever("echo begun >> /disk/begun"),
                    livenessProbe=check,
                    readinessProbe=check,
                    startupProbe=check,
                    **common,
                )
            ],
            "volumes": [
                {"name": "disk", "emptyDir": {}},
                {"name": "memory", "emptyDir": {"medium": "Memory", "sizeLimit": "1Mi"}},
                {"name": "map", "configMap": {"name": "words"}},
                {"name": "secret", "secret": {"secretName": "words"}},
                {
                    "name": "projected",
                    "projected": {
                        "sources": [
                            {
                                "serviceAccountToken": {
                                    "path": "token",
                                    "audience": "a",
                                    "expirationSeconds": 600,
                                }
                            },
                            {"configMap": {"name": "words"}},
                            {
                                "downwardAPI": {
                                    "items": [{"path": "name", "fieldRef": {"fieldPath": "metadata.name"}}]
                                }
                            },
                        ]
                    },
                },
            ],
        }
        return document

    def _burst(self) -> Document:
        document = self.node.pod_document("burst", self.namespace)
        alive = {"tcpSocket": {"port": 8080}, "periodSeconds": 1}
        serve = ["sh", "-c", "mkdir /www; echo hello > /www/index.html; exec httpd -f -p 8080 -h /www"]
        document["spec"]["containers"] = [
            self._container(
                "main",
                serve,
                resources={"requests": SMALL},
                livenessProbe=alive,
                readinessProbe={"httpGet": {"port": 8080, "path": "/"}, "periodSeconds": 1},
            )
        ]
        return document

    def _job(self) -> Document:
        template = self.node.pod_document("x", self.namespace, "exit 0", restartPolicy="Never")["spec"]
        plane = self.node.plane
        plane.create(
            {
                "apiVersion": "batch/v1",
                "kind": "Job",
                "metadata": {"name": "job", "namespace": self.namespace},
                "spec": {"template": {"spec": template}},
            }
        )

        def look() -> Document | None:
            found = plane.items("pod", self.namespace, "labelSelector=job-name%3Djob")
            return found[0] if found else None

        return plane.wait("the job's pod", look, 90)


def identity(found: Document) -> list[tuple[str, str, int]]:
    """Which containers a pod has, and how often they were restarted."""
    return [(one["name"], one.get("containerID", ""), one["restartCount"]) for one in all_statuses(found)]


def versions(plane: Plane, namespace: str, since: str) -> dict[str, list[Document]]:
    """All versions of the pods that the API server has had since, by name."""
    query = f"watch=1&resourceVersion={since}&timeoutSeconds=3"
    told = plane.kubectl("get", "--raw", f"{plane.place('pod', namespace)}?{query}")
    found: dict[str, list[Document]] = {}
    for line in told.splitlines():
        event = json.loads(line)
        assert event["type"] != "ERROR", event
        found.setdefault(event["object"]["metadata"]["name"], []).append(event["object"])
    return found


def mounts_of(node: ClusterNode, uid: str) -> list[str]:
    return [str(mount.point) for mount in read_mounts((node.root / "pods" / uid).resolve())]


def left_behind(node: ClusterNode, uid: str) -> list[str]:
    """What is left of a pod; the reference keeps what has ended in the runtime, and logs, for a while."""
    left = [f"mount {point}" for point in mounts_of(node, uid)]
    for what in node.left_of(uid):
        if not node.reference or what.startswith(("folder", "cgroup")):
            left.append(what)
    return left + [
        f"running {one.id}"
        for one in node.truth.running()
        if node.reference and one.labels["io.kubernetes.pod.uid"] == uid
    ]


# The hand-over


@pytest.mark.parametrize("first", ["reference", "ours"])
def test_handover_running_pods_unaffected(
    plane: Plane, node: ClusterNode, namespace: str, first: str
) -> None:
    agents: list[Path | None] = [plane.reference_kubelet, None]
    if first == "ours":
        agents.reverse()
    node.hand_to(agents[0])
    node.start()
    node.wait_registered()
    pods = Pods(node, namespace)
    static = node.write(pod("static", plain_container(), meta={"namespace": namespace}))
    pods.settle()
    mounted = mounts_of(node, pods.whole["metadata"]["uid"])
    # All of one moment: what the API server had until then is not asked for.
    listed = plane.request("GET", plane.place("pod", namespace))
    version = listed["metadata"]["resourceVersion"]
    lasting = {one["metadata"]["name"] for one in (*pods.steady, pods.job)}
    before = {name: one for one in listed["items"] if (name := one["metadata"]["name"]) in lasting}
    assert before.keys() == lasting

    plane.delete("pod", "leaving", namespace)
    node.wait_api_pod(pods.leaving, "to be leaving", lambda it: it["metadata"].get("deletionTimestamp"))
    time.sleep(0.5)
    if first == "reference":
        node.kill()
    else:
        node.stop()
    plane.delete("pod", "lost", namespace)
    node.hand_to(agents[1])
    node.start()

    # Pods that were on their way out are out.
    for gone in (pods.leaving, pods.lost):
        plane.wait_gone("pod", gone["metadata"]["name"], namespace, 60)
    # The new agent works: the node is its, and static pods are there, perhaps anew.
    node.wait_registered()
    node.wait("the static pod to run", lambda: node.truth.running(static), 60)
    crashed = status_of(pods.crash, "main")["restartCount"]
    node.wait_api_pod(
        pods.crash, "to be tried again", lambda it: status_of(it, "main")["restartCount"] > crashed, 60
    )
    # And it brings volumes up to date.
    pods.write_objects("second")
    whole = pods.whole["metadata"]["name"]
    words = ("/map/word", "/secret/word", "/projected/word")
    for path in words:
        node.wait(path, lambda path=path: node.shell(whole, f"cat {path}", "main") == "second", 60)  # type: ignore[misc]

    # No untruth, no restart, not for a moment.
    seen = versions(plane, namespace, version)
    for name, was in before.items():
        for now in (*seen.get(name, []), plane.get("pod", name, namespace)):
            assert identity(now) == identity(was), name
            assert now["status"]["phase"] == was["status"]["phase"]
            assert now["status"]["startTime"] == was["status"]["startTime"]
            # The reference forgets startup probes, and addresses of ended pods, whenever it starts.
            if not node.reference:
                assert now["status"] == was["status"], name
    for one in pods.steady:
        node.wait_pod_ready(one)
    counts = [status_of(now, "main")["restartCount"] for now in seen.get("crash", [])]
    assert counts == sorted(counts)
    assert counts[0] >= crashed
    assert mounts_of(node, pods.whole["metadata"]["uid"]) == mounted
    text = node.shell(whole, "cat /disk/init /memory/init /disk/begun /projected/name; ls /part", "main")
    assert text.split() == ["disk", "memory", "begun", "whole"]
    for path in (TOKEN, "/projected/token"):
        claims = node.shell(whole, f"cat {path}", "main").split(".")[1]
        bound = json.loads(base64.urlsafe_b64decode(claims + "=="))["kubernetes.io"]["pod"]["uid"]
        assert bound == pods.whole["metadata"]["uid"]

    # What one agent began, the other one ends without a trace.
    plane.delete("job", "job", namespace)
    uids = [one["metadata"]["uid"] for one in (pods.leaving, pods.lost)]
    ending = (*pods.steady, pods.crash, pods.job)
    for one in ending:
        plane.delete("pod", one["metadata"]["name"], namespace)
    for one in ending:
        plane.wait_gone("pod", one["metadata"]["name"], namespace, 90)
        uids.append(one["metadata"]["uid"])
    for uid in uids:
        node.wait(f"nothing to be left of {uid}", lambda uid=uid: not left_behind(node, uid), 90)  # type: ignore[misc]
    node.remove("static")


@pytest.mark.parametrize("first", ["reference", "ours"])
def test_handover_private_image_pull_records_used_by_next_kubelet(
    plane: Plane, node: ClusterNode, namespace: str, first: str, tmp_path: Path
) -> None:
    """Verify that each kubelet uses the other's records: access for the secret, and for nobody else."""
    agents: list[Path | None] = [plane.reference_kubelet, None]
    if first == "ours":
        agents.reverse()

    def user(name: str, secret: bool, policy: str) -> Document:
        document = node.pod_document(name, namespace)
        document["spec"]["containers"][0] |= {"image": image, "imagePullPolicy": policy}
        if secret:
            document["spec"]["imagePullSecrets"] = [{"name": "login"}]
        return plane.create(document)

    def refusal(reasons: set[str], found: Document) -> Document | None:
        states = [status["state"].get("waiting", {}) for status in all_statuses(found)]
        return next((state for state in states if state.get("reason") in reasons), None)

    with running_registry(tmp_path / "registry", protected=True) as registry:
        registry.push_busybox("team/app", first)
        image = f"{registry.host}/team/app:{first}"
        auth = base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
        plane.create(
            {
                "apiVersion": "v1",
                "kind": "Secret",
                "metadata": {"name": "login", "namespace": namespace},
                "type": "kubernetes.io/dockerconfigjson",
                "stringData": {".dockerconfigjson": json.dumps({"auths": {registry.host: {"auth": auth}}})},
            }
        )
        node.hand_to(agents[0])
        node.start()
        node.wait_registered()
        pods = [user("owner", True, "IfNotPresent")]
        node.wait_pod_ready(pods[0], 90)
        [path] = (node.root / "image_manager" / "pulled").iterdir()
        written = path.read_bytes()
        node.kill()
        node.hand_to(agents[1])
        node.start()
        node.wait_registered()
        pods.append(user("again", True, "Never"))
        node.wait_pod_ready(pods[-1], 90)
        assert path.read_bytes() == written, "the secret is in the record already"
        for name, policy, reasons in (
            ("thief", "IfNotPresent", {"ErrImagePull", "ImagePullBackOff"}),
            ("quiet", "Never", {"ErrImageNeverPull"}),
        ):
            pods.append(user(name, False, policy))
            node.wait_api_pod(pods[-1], "to be refused", partial(refusal, reasons), 90)
        for one in pods:
            plane.delete("pod", one["metadata"]["name"], namespace)
        for one in pods:
            plane.wait_gone("pod", one["metadata"]["name"], namespace, 90)
