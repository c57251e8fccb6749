"""Where pods come in: who counts as there, and what a refusal leaves behind."""

from typing import Any

import msgspec
import pytest

from pykubelet.admission.handler import AdmitRejection, AdmitResult, PodAdmitAttributes, PodAdmitHandler
from pykubelet.api.pod import Pod
from pykubelet.api.pod_status import NodeAllocatableResourceClaimStatus, PodStatus
from pykubelet.api.quantity import Quantity
from pykubelet.config.feature_gates import FeatureGates
from pykubelet.podworkers.pod_admission import present_node
from pykubelet.status.compute import preempted_status, was_rejected
from tests.support.admission import asking, node, pod
from tests.support.pods import NOW, condition
from tests.unit.podworkers.desk import here, settle


async def test_pod_admission_rejected_pod_failed_and_never_started() -> None:
    async with here() as node:
        refused = asking(cpu="3")
        assert not node.come(refused)
        await settle()
        message = "Node didn't have enough resource: cpu, requested: 3000, used: 0, capacity: 2000"
        status = node.statuses.get(refused.uid)
        assert status is not None
        assert status.start_time is not None
        assert status == PodStatus(
            phase="Failed",
            reason="OutOfcpu",
            message=f"Pod was rejected: {message}",
            qos_class="Burstable",
            start_time=status.start_time,
        )
        assert was_rejected(status)
        assert node.events(refused.uid) == [("Warning", "OutOfcpu", message)]
        assert [note.text for note in node.journal.timeline(refused.uid)] == ["rejected: OutOfcpu"]
        assert node.counted("kubelet_admission_rejections_total", reason="OutOfcpu") == 1
        assert node.workers.get(refused.uid) is None
        # Others' wishes for it change nothing.
        labelled = msgspec.structs.replace(
            refused, metadata=msgspec.structs.replace(refused.metadata, labels={"a": "b"})
        )
        assert not node.come(labelled, "UPDATE")
        assert node.life.started == []
        assert node.counted("kubelet_admission_rejections_total", reason="OutOfcpu") == 1


async def test_pod_admission_admitted_pod_checked_once_and_holds_resources() -> None:
    async with here() as node:
        first = asking("first", cpu="1500m")
        assert node.come(first)
        assert node.come(first, "UPDATE")
        assert not node.come(asking("second", cpu="1"))
        assert node.come(asking("third", cpu="500m"))
        # What is on its way out still holds it; what has ended does not.
        node.workers.terminate("first")
        assert not node.come(asking("fourth", cpu="1"))
        node.life.may_end.set()
        worker = node.workers.get("first")
        assert worker is not None
        await worker.gone.wait()
        await settle()
        assert node.come(asking("fifth", cpu="1"))


@pytest.mark.parametrize("gate", [True, False])
async def test_pod_admission_resources_of_claims_count_with_gate(gate: bool) -> None:
    names = ("DRANodeAllocatableResources",)
    gates = FeatureGates().with_overrides(dict.fromkeys(names, gate))
    claim = NodeAllocatableResourceClaimStatus(
        resource_claim_name="c", containers=["a"], resources={"cpu": Quantity.parse("1")}
    )
    async with here(gates=gates) as node:
        first = asking("first", cpu="500m")
        status = PodStatus(node_allocatable_resource_claim_statuses=[claim])
        assert node.come(msgspec.structs.replace(first, status=status))
        second = asking("second", cpu="1")
        assert node.come(second) != gate
        if gate:
            message = "Node didn't have enough resource: cpu, requested: 1000, used: 1500, capacity: 2000"
            assert node.events("second") == [("Warning", "OutOfcpu", message)]
            third = msgspec.structs.replace(asking("third", cpu="100m"), status=status)
            assert not node.come(third)


async def test_pod_admission_rejected_before_restart_stays_rejected() -> None:
    async with here() as node:
        status = PodStatus(phase="Failed", reason="OutOfcpu", message="Pod was rejected: too much")
        refused = msgspec.structs.replace(asking(cpu="1m"), status=status)
        assert not node.come(refused)
        assert node.statuses.get(refused.uid) == status
        assert node.events(refused.uid) == []
        # Any other end has to be cleaned up after, which is the worker's work.
        failed = msgspec.structs.replace(asking("failed", cpu="9"), status=PodStatus(phase="Failed"))
        assert node.come(failed)


async def test_pod_admission_running_pod_not_rechecked_and_counts_first() -> None:
    async with here() as node:
        old = asking("old", cpu="1500m")
        wrong = pod("wrong", nodeSelector={"zone": "elsewhere"})
        for one in (old, wrong):
            node.run_since_before(one)
        new = asking("new", cpu="1")
        node.mux.desired["new"] = new
        # Although it was handed on first.
        assert not node.come(new)
        assert node.phase("new") == ("Failed", "OutOfcpu")
        assert node.come(old)
        assert node.come(wrong)


async def test_pod_admission_running_pod_rejected_by_handler_is_stopped() -> None:
    class Never:
        for_running = True

        def admit(self, attempt: PodAdmitAttributes) -> AdmitResult:
            assert attempt.running
            return AdmitRejection("Never", "not this one")

    async with here(allocation=Never()) as node:
        one = pod()
        node.run_since_before(one)
        assert not node.come(one)
        assert node.phase(one.uid) == ("Failed", "Never")
        node.life.may_end.set()
        await settle()
        assert node.life.ended == [one.uid]
        assert node.life.started == []


async def test_pod_admission_each_handler_rejects_with_its_reason() -> None:
    class Place:
        for_running = False

        def __init__(self, reason: str) -> None:
            self.reason = reason

        def admit(self, attempt: PodAdmitAttributes) -> AdmitResult:
            wanted = attempt.pod.metadata.labels.get("refuse")
            return AdmitRejection(self.reason, "so it is") if wanted == self.reason else None

    places: dict[str, PodAdmitHandler] = {
        "pressure": Place("Evicted"),
        "allocation": Place("TopologyAffinityError"),
        "shutdown": Place("NodeShutdown"),
    }
    async with here(**places) as node:
        for reason in ("Evicted", "TopologyAffinityError", "NodeShutdown"):
            assert not node.come(pod(reason.lower(), meta={"labels": {"refuse": reason}}))
            assert node.phase(reason.lower()) == ("Failed", reason)
        assert node.come(pod())


WHOLE, INIT = "InPlacePodLevelResourcesVerticalScaling", "InPlacePodVerticalScalingInitContainers"
SMALL, LARGE = ({"requests": {"cpu": cpu}} for cpu in ("1m", "2m"))


def with_init(resources: dict[str, Any], **more: Any) -> Pod:
    first = {"name": "first", "image": "i", "resources": resources, **more}
    return pod(initContainers=[first])


@pytest.mark.parametrize(
    ("before", "after", "missing"),
    [
        (pod(resources=SMALL), pod(resources=LARGE), WHOLE),
        (with_init(SMALL), with_init(LARGE), INIT),
        (with_init(SMALL, restartPolicy="Always"), with_init(LARGE, restartPolicy="Always"), ""),
        (asking(cpu="1m"), asking(cpu="2m"), ""),
        (pod(), pod(meta={"labels": {"a": "b"}}), ""),
    ],
)
@pytest.mark.parametrize("declared", [True, False])
async def test_pod_admission_resize_missing_node_feature_records_event(
    before: Pod, after: Pod, missing: str, declared: bool
) -> None:
    own = node()
    own.status.declared_features = [WHOLE, INIT] if declared else []
    async with here(own=own) as desk:
        assert desk.come(before)
        assert desk.come(after, "UPDATE")
        text = f"Pod requires node features that are not available: {missing}"
        told = [("Warning", "FailedNodeDeclaredFeaturesCheck", text)]
        assert desk.events(after.uid) == (told if missing and not declared else [])


def test_present_node_merges_api_server_labels_and_extended_resources() -> None:
    own, known = node({"own": "1"}), node({"theirs": "1"}, cpu="9", dongle="2")
    assert present_node(own, None) is own
    judged = present_node(own, known)
    assert judged.metadata.labels == known.metadata.labels
    amounts = {name: str(amount) for name, amount in judged.status.allocatable.items()}
    assert (amounts["cpu"], amounts["example.com/dongle"]) == ("2", "2")


def test_preempted_status_failed_with_disruption_target() -> None:
    before = PodStatus(
        phase="Running", conditions=[condition("Ready"), condition("DisruptionTarget", "False")]
    )
    after = preempted_status(pod(meta={"generation": 3}), before, NOW)
    assert (after.phase, after.reason) == ("Failed", "Preempting")
    assert [(one.type, one.status, one.reason) for one in after.conditions[1:]] == [
        ("DisruptionTarget", "True", "TerminationByKubelet")
    ]
    assert after.conditions[1].observed_generation == 3
