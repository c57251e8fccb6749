"""Resource claims in a real cluster: the real scheduler and claim controller, a real driver process.

What a driver would publish about its devices (ResourceSlices) the test does. The runtime here, containerd
1.6, knows nothing of CDI: what containers would get is read off the requests to it.
"""

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from pykubelet.cm.podresources import pod_resources_pb2
from pykubelet.cri import runtime_pb2 as cri
from pykubelet.devcluster.reference_kubelet import undo_host_changes
from tests.support.cluster_node import ClusterNode, cluster_node, in_cluster
from tests.support.cri_recorder import Recording, recorded
from tests.support.dra_plugin.process import DRIVER, PREPARE, UNPREPARE, DriverProcess, driver_process
from tests.support.metrics_page import Page
from tests.support.plane import Document, Plane, unique
from tests.support.runtime import RunningRuntime

pytestmark = pytest.mark.machine

SECONDS = 90
GPU = "example.com/gpu"


class DraNode:
    """A node, and what it asks its runtime."""

    def __init__(self, node: ClusterNode, recording: Recording) -> None:
        self.node = node
        self.recording = recording


@pytest.fixture(scope="module")
def dra_node(plane: Plane, runtime: RunningRuntime) -> Iterator[DraNode]:
    socket = runtime.instance.data_dir / "proxy.sock"
    with recorded(runtime.endpoint, socket) as recording:
        settings = {"containerRuntimeEndpoint": f"unix://{socket}", "syncFrequency": "10s"}
        with in_cluster(cluster_node(plane, runtime, settings=settings)) as node:
            wait_wiped(node)
            yield DraNode(node, recording)


def wait_wiped(node: ClusterNode, since: int = 0) -> None:
    """Wait until the agent has taken back what drivers offered before it started."""

    def wiped() -> bool:
        return any(
            event["verb"] == "deletecollection" and event["responseStatus"]["code"] == 200
            for event in node.plane.writes(node.user, since)
        )

    node.wait("slices to be taken back", wiped, SECONDS)


def start_again(node: ClusterNode) -> None:
    """Start a node's agent, and wait until it has taken back what was offered: it would take more later."""
    mark = node.plane.audit_mark()
    node.start()
    wait_wiped(node, mark)


class Rig:
    """A driver on a node, and its objects."""

    def __init__(self, found: DraNode, driver: DriverProcess, namespace: str) -> None:
        self.node = found.node
        self.recording = found.recording
        self.plane = found.node.plane
        self.driver = driver
        self.namespace = namespace
        self.kind = unique("class")
        self.slice = unique("slice")

    def publish(self, devices: int = 3) -> None:
        """Offer devices on this node, and a class of them."""
        self.plane.create(
            {
                "apiVersion": "resource.k8s.io/v1",
                "kind": "DeviceClass",
                "metadata": {"name": self.kind},
                "spec": {
                    "selectors": [{"cel": {"expression": f'device.driver == "{DRIVER}"'}}],
                    "extendedResourceName": GPU,
                },
            }
        )
        self.publish_slice(devices)

    def publish_slice(self, devices: int = 3) -> None:
        self.plane.create(
            {
                "apiVersion": "resource.k8s.io/v1",
                "kind": "ResourceSlice",
                "metadata": {"name": self.slice},
                "spec": {
                    "driver": DRIVER,
                    "nodeName": self.node.name,
                    "pool": {"name": self.node.name, "generation": 1, "resourceSliceCount": 1},
                    "devices": [{"name": f"dev-{number}"} for number in range(devices)],
                },
            }
        )

    def unpublish(self) -> None:
        self.plane.delete("resourceslice", self.slice)
        self.plane.delete("deviceclass", self.kind)

    @property
    def wish(self) -> Document:
        return {"devices": {"requests": [{"name": "req", "exactly": {"deviceClassName": self.kind}}]}}

    def claim(self) -> str:
        name = unique("claim")
        self.plane.create(
            {
                "apiVersion": "resource.k8s.io/v1",
                "kind": "ResourceClaim",
                "metadata": {"name": name, "namespace": self.namespace},
                "spec": self.wish,
            }
        )
        return name

    def template(self) -> str:
        name = unique("template")
        self.plane.create(
            {
                "apiVersion": "resource.k8s.io/v1",
                "kind": "ResourceClaimTemplate",
                "metadata": {"name": name, "namespace": self.namespace},
                "spec": {"spec": self.wish},
            }
        )
        return name

    def pod(self, source: Document, script: str = "", request: str = "req", **spec: Any) -> Document:
        """Create a pod with one claim, to be scheduled to this node."""
        claims = [{"name": "device", **source}] if source else []
        document = self.node.pod_document(unique("p"), self.namespace, script, resourceClaims=claims, **spec)
        del document["spec"]["nodeName"]
        document["spec"]["nodeSelector"] = {"kubernetes.io/hostname": self.node.name}
        if claims:
            document["spec"]["containers"][0]["resources"] = {
                "claims": [{"name": "device", "request": request}]
            }
        return self.plane.create(document)

    def claim_of(self, pod: Document) -> Document:
        """The claim that was made for a pod, or the one for its extended resources."""
        status = (self.node.api_pod(pod) or {})["status"]
        if "extendedResourceClaimStatus" in status:
            name = status["extendedResourceClaimStatus"]["resourceClaimName"]
        else:
            name = status["resourceClaimStatuses"][0]["resourceClaimName"]
        return self.plane.get("resourceclaim", name, self.namespace)

    def cdi(self, pod: Document) -> list[list[str]]:
        """The CDI names that the runtime was given for each container of a pod."""
        requests = [
            cri.CreateContainerRequest.FromString(request)
            for _, request in self.recording.requests("CreateContainer")
        ]
        uid = pod["metadata"]["uid"]
        return [
            [device.name for device in one.config.CDI_devices]
            for one in requests
            if one.sandbox_config.metadata.uid == uid
        ]

    def told(self, pod: Document) -> list[Any]:
        """What the pod-resources API says of the claims of a pod's container."""
        with grpc.insecure_channel(f"unix:{self.node.root}/pod-resources/kubelet.sock") as channel:
            ask = channel.unary_unary(
                "/v1.PodResourcesLister/Get",
                request_serializer=lambda message: message.SerializeToString(),
                response_deserializer=pod_resources_pb2.GetPodResourcesResponse.FromString,
            )
            meta = pod["metadata"]
            request = pod_resources_pb2.GetPodResourcesRequest(
                pod_name=meta["name"], pod_namespace=meta["namespace"]
            )
            (container,) = ask(request, timeout=SECONDS).pod_resources.containers
        return list(container.dynamic_resources)

    def kept(self) -> list[str]:
        """The claims that the agent's file names."""
        text = (self.node.root / "dra_manager_state").read_text()
        return [claim["ClaimName"] for claim in json.loads(json.loads(text)["Data"])["ClaimInfoStateList"]]

    def wait_event(self, pod: Document, words: str) -> None:
        def told() -> bool:
            return any(
                event["reason"] == "FailedPrepareDynamicResources" and words in event["message"]
                for event in self.plane.events(self.namespace, pod["metadata"]["name"])
            )

        self.node.wait(f"an event that says {words}", told, SECONDS)


@pytest.fixture
def rig(dra_node: DraNode, namespace: str) -> Iterator[Rig]:
    """A driver that has registered; at the end nothing of it is prepared."""
    node = dra_node.node
    with tempfile.TemporaryDirectory(prefix="pyk-", dir="/tmp") as folder:
        registry = node.root / "plugins_registry"
        with driver_process(Path(folder), registry, f"--pool={node.name}", "--health") as driver:
            made = Rig(dra_node, driver, namespace)
            try:
                node.wait("the driver to be asked", lambda: driver.calls("NotifyRegistrationStatus"), SECONDS)
                # Half a minute after the driver of the test before has left, what it offered is taken back.
                made.publish()
                yield made
                for pod in node.plane.items("pod", namespace):
                    node.delete_pod(pod, SECONDS)
                assert driver.prepared() == []
                assert made.kept() == []
            finally:
                driver.stop()
                made.unpublish()


def test_dra_claim_from_template_prepared_and_unprepared(rig: Rig) -> None:
    rig.driver.behave(health={f"{rig.node.name}/dev-0": ["UNHEALTHY", "on fire"]})
    pod = rig.pod({"resourceClaimTemplateName": rig.template()})
    rig.node.wait_pod_ready(pod, SECONDS)
    claim = rig.claim_of(pod)
    uid, name = claim["metadata"]["uid"], claim["metadata"]["name"]
    assert rig.driver.calls(PREPARE)[0]["request"] == {
        "claims": [{"namespace": rig.namespace, "uid": uid, "name": name}]
    }
    device = f"{DRIVER}/claim={uid}-dev-0"
    assert rig.cdi(pod) == [[device]]
    assert rig.kept() == [name]
    (said,) = rig.told(pod)
    assert (said.claim_name, said.claim_namespace) == (name, rig.namespace)
    (resource,) = said.claim_resources
    assert (resource.driver_name, resource.pool_name, resource.device_name) == (
        DRIVER,
        rig.node.name,
        "dev-0",
    )
    assert [one.name for one in resource.cdi_devices] == [device]

    def told(found: Document) -> bool:
        (status,) = found["status"]["containerStatuses"]
        health = {"resourceID": device, "health": "Unhealthy", "message": "on fire"}
        expected = [{"name": "claim:device/req", "resources": [health]}]
        return bool(status.get("allocatedResourcesStatus") == expected)

    found = rig.node.wait_api_pod(pod, "to tell how its device is", told, SECONDS)
    assert found["status"]["resourceClaimStatuses"] == [{"name": "device", "resourceClaimName": name}]
    page = Page(rig.node.page("/metrics"))
    assert page.value("dra_resource_claims_in_use", driver_name="<any>") == 1
    assert page.total("dra_grpc_operations_duration_seconds_count", driver_name=DRIVER) >= 1
    rig.node.delete_pod(pod, SECONDS)
    assert rig.driver.claims(UNPREPARE) == [[name]]
    rig.plane.wait_gone("resourceclaim", name, rig.namespace, SECONDS)


def test_dra_shared_claim_kubelet_killed_prepared_once(rig: Rig) -> None:
    source = {"resourceClaimName": rig.claim()}
    first, second = rig.pod(source), rig.pod(source)
    rig.node.wait_pod_ready(first, SECONDS)
    rig.node.wait_pod_ready(second, SECONDS)
    assert rig.driver.claims(PREPARE) == [[source["resourceClaimName"]]]
    rig.node.kill()
    start_again(rig.node)
    # Whoever offers devices must do so anew; the claims are not touched.
    rig.plane.wait_gone("resourceslice", rig.slice, seconds=SECONDS)
    rig.publish_slice()
    rig.node.delete_pod(first, SECONDS)
    assert rig.driver.calls(UNPREPARE) == []
    rig.node.wait_pod_ready(second, SECONDS)
    rig.node.delete_pod(second, SECONDS)
    assert len(rig.driver.calls(PREPARE)) == 1
    assert rig.driver.claims(UNPREPARE) == [[source["resourceClaimName"]]]


def test_dra_kubelet_killed_during_prepare_pod_starts_after_restart(rig: Rig) -> None:
    name = rig.claim()
    rig.driver.behave(hang=[PREPARE])
    pod = rig.pod({"resourceClaimName": name})
    rig.node.wait("the driver to be asked", lambda: rig.driver.calls(PREPARE), SECONDS)
    assert rig.kept() == [name], "before the driver hears of it"
    rig.node.kill()
    rig.driver.behave()
    start_again(rig.node)
    rig.node.wait_pod_ready(pod, SECONDS)
    assert len(rig.driver.prepared()) == 1
    assert len(rig.cdi(pod)[-1]) == 1


def test_dra_driver_not_registered_pod_waits_and_starts(rig: Rig) -> None:
    rig.driver.stop()
    pod, unlucky = (rig.pod({"resourceClaimName": rig.claim()}) for _ in range(2))
    for one in (pod, unlucky):
        rig.wait_event(one, f"resources: prepare dynamic resources: DRA driver {DRIVER} is not registered")
    rig.node.delete_pod(unlucky, SECONDS)
    rig.driver.start()
    rig.node.wait_pod_ready(pod, SECONDS)
    assert rig.driver.claims(PREPARE) == [[pod["spec"]["resourceClaims"][0]["resourceClaimName"]]]


def test_dra_unprepare_fails_terminal_phase_reported_after_retry(rig: Rig) -> None:
    name = rig.claim()
    rig.driver.behave(fail={UNPREPARE: ["INTERNAL", "still busy"]})
    pod = rig.pod({"resourceClaimName": name}, "sleep 1", restartPolicy="Never")
    rig.node.wait("it to be given back", lambda: len(rig.driver.calls(UNPREPARE)) > 1, SECONDS)
    found = rig.node.api_pod(pod)
    assert found is not None
    assert found["status"]["phase"] in ("Pending", "Running")
    rig.driver.behave()
    rig.node.wait_pod_phase(pod, "Succeeded", SECONDS)
    assert rig.driver.prepared() == []
    rig.plane.wait_for(
        "resourceclaim", name, rig.namespace, lambda found: not found["status"].get("reservedFor"), SECONDS
    )


def test_dra_unprepare_rejected_force_delete_removes_pod_and_retries(rig: Rig) -> None:
    name = rig.claim()
    pod = rig.pod({"resourceClaimName": name})
    rig.node.wait_pod_ready(pod, SECONDS)
    rig.driver.behave(refuse={name: "never"})
    meta = pod["metadata"]
    rig.plane.delete("pod", meta["name"], rig.namespace)
    rig.node.wait("it to be given back", lambda: len(rig.driver.calls(UNPREPARE)) > 1, SECONDS)
    assert rig.node.api_pod(pod) is not None
    rig.plane.delete("pod", meta["name"], rig.namespace, grace=0)
    rig.node.wait_gone(meta["name"], meta["uid"], SECONDS)
    assert rig.kept() == [name]
    # A driver that comes back is asked again at once; otherwise after a minute.
    rig.driver.behave()
    rig.driver.stop()
    rig.driver.start()
    rig.node.wait("the claim to be given back", lambda: not rig.kept(), SECONDS)


def test_dra_checkpoint_corrupted_kubelet_exits_1(rig: Rig) -> None:
    path = rig.node.root / "dra_manager_state"
    whole = path.read_bytes()
    rig.node.stop()
    try:
        path.write_bytes(whole[:-9])
        rig.node.start(wait=False)
        assert rig.node.process is not None
        assert rig.node.process.wait(timeout=SECONDS) == 1
        assert f"resource claims cannot go on from {path}" in rig.node.log_tail(40)
    finally:
        rig.node.kill()
        path.write_bytes(whole)
        start_again(rig.node)


@pytest.mark.parametrize("resource", [GPU, "deviceclass.resource.kubernetes.io/{}"])
def test_dra_extended_resource_backed_by_claim_prepared(rig: Rig, resource: str) -> None:
    spec = {"resources": {"limits": {resource.format(rig.kind): "1"}}}
    document = rig.node.pod_document(unique("p"), rig.namespace)
    document["spec"]["containers"][0] |= spec
    del document["spec"]["nodeName"]
    document["spec"]["nodeSelector"] = {"kubernetes.io/hostname": rig.node.name}
    pod = rig.plane.create(document)
    rig.node.wait_pod_ready(pod, SECONDS)
    claim = rig.claim_of(pod)
    assert rig.driver.claims(PREPARE) == [[claim["metadata"]["name"]]]
    assert rig.cdi(pod) == [[f"{DRIVER}/claim={claim['metadata']['uid']}-dev-0"]]


def test_dra_claims_handover_from_upstream_kubelet_and_back(rig: Rig) -> None:
    program = rig.plane.reference_kubelet
    if program is None:
        pytest.skip("there is no reference kubelet in $KUBEBUILDER_ASSETS")
    theirs, ours = ({"resourceClaimName": rig.claim()} for _ in range(2))

    def hand_to(agent: Path | None) -> None:
        rig.node.kill()
        rig.node.hand_to(agent)
        start_again(rig.node)
        rig.plane.wait_gone("resourceslice", rig.slice, seconds=SECONDS)
        rig.publish_slice()

    with undo_host_changes():
        try:
            hand_to(program)
            one = rig.pod(theirs)
            rig.node.wait_pod_ready(one, SECONDS)
            assert rig.kept() == [theirs["resourceClaimName"]]
            hand_to(None)
            other = rig.pod(ours)
            rig.node.wait_pod_ready(other, SECONDS)
            rig.node.delete_pod(one, SECONDS)
            assert rig.driver.claims(UNPREPARE) == [list(theirs.values())]
            hand_to(program)
            rig.node.wait_pod_ready(other, SECONDS)
            rig.node.delete_pod(other, SECONDS)
            assert rig.driver.claims(UNPREPARE) == [list(theirs.values()), list(ours.values())]
        finally:
            if rig.node.reference:
                rig.node.kill()
                rig.node.hand_to(None)
                start_again(rig.node)
    assert rig.driver.claims(PREPARE) == [list(theirs.values()), list(ours.values())]
