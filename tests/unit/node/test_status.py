import dataclasses
import json
from collections.abc import Callable
from datetime import datetime
from ipaddress import ip_address
from typing import Any

import msgspec
import pytest

from pykubelet import KUBERNETES_VERSION
from pykubelet.api.meta import from_document, to_document
from pykubelet.api.node import ContainerImage, Node, NodeAddress, NodeCondition, NodeStatus
from pykubelet.apiserver.client import NODES, read_object
from pykubelet.config.feature_gates import FeatureGates
from pykubelet.cri import runtime_pb2 as pb
from pykubelet.node.conditions import NodePressure, Transition
from pykubelet.node.lease import renewed
from pykubelet.node.registration import blank_node
from pykubelet.node.status import (
    Facts,
    declared_features,
    has_changed,
    image_list,
    next_node,
    node_patch,
    runtime_features,
    runtime_handlers,
)
from tests.support.node_status import (
    API_KEYS,
    GOLDEN,
    IMAGES,
    LATER,
    MACHINE,
    NOW,
    amounts,
    apply_patch,
    facts,
    golden_node,
    settings,
)

TIME = NOW.strftime("%Y-%m-%dT%H:%M:%SZ")


def first_node(**changes: Any) -> Node:
    node, _ = next_node(blank_node(settings(), "amd64"), facts(**changes), settings(), NOW)
    return node


def reread(node: Node) -> Node:
    """As it comes back from the API server, which writes null for an image without names."""
    document = to_document(node)
    for image in document["status"].get("images", []):
        image.setdefault("names", None)
    return read_object(Node, json.dumps(document).encode())


class TestGolden:
    def test_next_node_equals_golden_node(self) -> None:
        """The node of the recordings, field by field."""
        expected = golden_node()
        # These are the cluster's and the API server's own.
        del expected["metadata"]["annotations"]["node.alpha.kubernetes.io/ttl"]
        del expected["metadata"]["creationTimestamp"], expected["metadata"]["uid"]
        for condition in expected["status"]["conditions"]:
            condition["lastHeartbeatTime"] = condition["lastTransitionTime"] = TIME
        expected["status"]["nodeInfo"]["kubeletVersion"] = KUBERNETES_VERSION
        document = {"apiVersion": "v1", "kind": "Node", "spec": {}, **to_document(first_node())}
        document["status"]["images"][1].setdefault("names", None)
        assert document == expected

    def test_renewed_lease_equals_golden_lease(self) -> None:
        expected = json.loads((GOLDEN / "lease.json").read_text())
        lease = to_document(renewed(None, "vm", "UUID", 40, NOW))
        lease["spec"]["renewTime"] = "TIME"
        lease["metadata"] |= {"uid": "UUID", "creationTimestamp": "TIME"}
        assert {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", **lease} == expected

    def test_next_node_written_by_upstream_kubelet_is_unchanged(self) -> None:
        """A node taken over from the reference, with what others added: only our version differs."""
        document = golden_node()
        for condition in document["status"]["conditions"]:
            condition["lastHeartbeatTime"] = condition["lastTransitionTime"] = TIME
        document["metadata"]["creationTimestamp"] = TIME
        document["status"]["nodeInfo"]["kubeletVersion"] = KUBERNETES_VERSION
        document["status"]["conditions"].insert(0, {"type": "NetworkUnavailable", "status": "False"})
        old = read_object(Node, json.dumps(document).encode())
        new, transitions = next_node(old, facts(), settings(), LATER)
        assert not has_changed(old, new)
        assert transitions == []

    def test_next_node_declared_features_of_another_kubelet_are_removed(self) -> None:
        document = golden_node()
        expected = document["status"]["declaredFeatures"]
        document["status"]["declaredFeatures"] = [*expected, "Unknown"]
        for moment in (*document["status"]["conditions"], document["metadata"]):
            moment |= {name: TIME for name in moment if name.endswith(("Time", "Timestamp"))}
        old = read_object(Node, json.dumps(document).encode())
        new, _ = next_node(old, facts(), settings(), LATER)
        assert has_changed(old, new)
        assert node_patch(old, new)["status"]["declaredFeatures"] == expected


class TestChanges:
    def test_node_patch_unchanged_status_has_only_heartbeats(self) -> None:
        old = reread(first_node())
        new, transitions = next_node(old, facts(), settings(), LATER)
        assert (has_changed(old, new), transitions) == (False, [])
        patch = node_patch(old, new)
        assert list(patch["status"]) == ["$setElementOrder/conditions", "conditions"]
        assert {tuple(item) for item in patch["status"]["conditions"]} == {("type", "lastHeartbeatTime")}

    @pytest.mark.parametrize(
        ("changes", "field"),
        [
            ({"images": [ContainerImage(names=["a"], size_bytes=1)]}, "images"),
            ({"volumes_in_use": ["kubernetes.io/csi/x"]}, "volumesInUse"),
            ({"runtime_version": "containerd://2.0.0"}, "nodeInfo"),
            ({"capacity": amounts(cpu="4")}, "capacity"),
            ({"pressures": NodePressure(disk=True)}, "conditions"),
            ({"problems": ["broken"]}, "conditions"),
            ({"warning": "slow"}, "conditions"),
            ({"machine": dataclasses.replace(MACHINE, swap_bytes=4096)}, "nodeInfo"),
        ],
    )
    def test_node_patch_changed_fact_contains_field(self, changes: dict[str, Any], field: str) -> None:
        old = reread(first_node())
        new, _ = next_node(old, facts(**changes), settings(), LATER)
        assert has_changed(old, new)
        patch = node_patch(old, new)
        assert field in patch["status"]
        assert apply_patch(to_document(old), patch, API_KEYS) == to_document(new)

    def test_next_node_unknown_facts_keep_old_status(self) -> None:
        old = reread(first_node())
        unknown = Facts(machine=MACHINE, capacity={}, addresses_valid=False)
        new, _ = next_node(old, unknown, settings(ips=(ip_address("192.0.2.9"),)), LATER)
        assert not has_changed(old, new)

    def test_next_node_foreign_fields_are_preserved(self) -> None:
        old = reread(first_node())
        old.status.conditions.append(NodeCondition(type="NetworkUnavailable", status="False"))
        old.status.capacity["example.com/dongle"] = amounts(x="3")["x"]
        old.metadata.labels["zone"] = "a"
        old.metadata.annotations["mine"] = "yes"
        new, _ = next_node(old, facts(), settings(), LATER)
        assert new.status.conditions[-1].type == "NetworkUnavailable"
        assert int(new.status.allocatable["example.com/dongle"]) == 3
        assert (new.metadata.labels["zone"], new.metadata.annotations["mine"]) == ("a", "yes")

    def test_next_node_lost_default_labels_are_restored(self) -> None:
        old = reread(first_node())
        del old.metadata.labels["kubernetes.io/arch"]
        old.metadata.labels["kubernetes.io/os"] = "plan9"
        new, _ = next_node(old, facts(), settings(), NOW)
        assert has_changed(old, new)
        assert node_patch(old, new) == {
            "metadata": {"labels": {"kubernetes.io/arch": "amd64", "kubernetes.io/os": "linux"}}
        }

    def test_node_patch_dual_stack_addresses_are_replaced(self) -> None:
        old = reread(first_node())
        pair = settings(ips=(ip_address("192.0.2.2"), ip_address("2001:db8::2")))
        new, _ = next_node(old, facts(), pair, NOW)
        patch = node_patch(old, new)
        assert patch["status"]["addresses"][-1] == {"$patch": "replace"}
        assert apply_patch(to_document(old), patch, API_KEYS) == to_document(new)

    def test_next_node_missing_capacity_is_not_ready(self) -> None:
        new, _ = next_node(Node(), facts(capacity=amounts(cpu="1")), settings(), NOW)
        ready = new.status.conditions[-1]
        assert (ready.status, ready.message) == (
            "False",
            "missing node capacity for resources: memory, pods, ephemeral-storage",
        )

    def test_next_node_external_cloud_keeps_addresses_and_sets_annotation(self) -> None:
        cloud = settings(external_cloud=True)
        node, _ = next_node(blank_node(cloud, "amd64"), facts(), cloud, NOW)
        assert node.metadata.annotations["alpha.kubernetes.io/provided-node-ip"] == "192.0.2.2"
        node.status.addresses = [NodeAddress(type="ExternalIP", address="203.0.113.1")]
        again, _ = next_node(node, facts(), cloud, LATER)
        assert again.status.addresses == node.status.addresses
        without, _ = next_node(node, facts(), settings(), LATER)
        assert "alpha.kubernetes.io/provided-node-ip" not in without.metadata.annotations
        assert node_patch(node, without)["metadata"]["annotations"] == {
            "alpha.kubernetes.io/provided-node-ip": None
        }


class TestConditions:
    def conditions(self, old: Node, when: datetime, **changes: Any) -> tuple[Node, list[str]]:
        new, transitions = next_node(old, facts(**changes), settings(), when)
        return reread(new), [transition.event for transition in transitions]

    def test_pressure_and_problems_change_status_and_emit_events(self) -> None:
        node, events = self.conditions(Node(), NOW)
        assert events == ["NodeHasSufficientMemory", "NodeHasNoDiskPressure", "NodeHasSufficientPID"]
        node, events = self.conditions(node, LATER, pressures=NodePressure(memory=True, pids=True))
        assert events == ["NodeHasInsufficientMemory", "NodeHasInsufficientPID"]
        memory, disk, pids, ready = node.status.conditions
        assert [c.status for c in node.status.conditions] == ["True", "False", "True", "True"]
        assert (memory.reason, memory.message) == (
            "KubeletHasInsufficientMemory",
            "kubelet has insufficient memory available",
        )
        assert (memory.last_transition_time, disk.last_transition_time) == (LATER, NOW)
        assert (disk.last_heartbeat_time, ready.last_transition_time) == (LATER, NOW)
        assert pids.reason == "KubeletHasInsufficientPID"
        node, events = self.conditions(node, LATER, problems=["one"], pressures=NodePressure(disk=True))
        assert events == [
            "NodeHasSufficientMemory",
            "NodeHasDiskPressure",
            "NodeHasSufficientPID",
            "NodeNotReady",
        ]
        ready = node.status.conditions[3]
        assert (ready.status, ready.reason, ready.message) == ("False", "KubeletNotReady", "one")
        assert node.status.conditions[1].message == "kubelet has disk pressure"
        node, events = self.conditions(node, LATER)
        assert events == ["NodeHasNoDiskPressure", "NodeReady"]

    def test_unknown_status_is_overwritten_and_emits_node_ready(self) -> None:
        node, _ = self.conditions(Node(), NOW)
        for condition in node.status.conditions:
            condition.status, condition.reason = "Unknown", "NodeStatusUnknown"
        node, events = self.conditions(node, LATER)
        assert events[-1] == "NodeReady"
        assert [c.reason for c in node.status.conditions] == [
            "KubeletHasSufficientMemory",
            "KubeletHasNoDiskPressure",
            "KubeletHasSufficientPID",
            "KubeletReady",
        ]

    @pytest.mark.parametrize(
        ("problems", "warning", "message"),
        [
            (["a"], "", "a"),
            (["a", "b"], "", "[a, b]"),
            (["a", "b", "a"], "", "[a, b]"),
            (["a", "a"], "", "a"),
            ([], "careful", "kubelet is posting ready status. WARNING: careful"),
            (["a"], "careful", "a. WARNING: careful"),
        ],
    )
    def test_ready_message_joins_problems_and_warning(
        self, problems: list[str], warning: str, message: str
    ) -> None:
        node, _ = self.conditions(Node(), NOW, problems=problems, warning=warning)
        assert node.status.conditions[-1].message == message

    def test_transition_has_time_of_previous_transition(self) -> None:
        node, _ = self.conditions(Node(), NOW, problems=["a"])
        _, first = next_node(node, facts(), settings(), LATER)
        assert first == [Transition("NodeReady", NOW)]


class TestFeatures:
    def test_image_list_sorted_by_size_and_bounded(self) -> None:
        many = [pb.Image(id=str(number), size=number % 3, repo_tags=[f"t{number}"]) for number in range(9)]
        listed = image_list(many, 4)
        assert [image.names for image in listed] == [["t8"], ["t5"], ["t2"], ["t7"]]
        assert len(image_list(many, -1)) == 9
        assert image_list(many, 0) == []
        names = [f"d{number}" for number in range(4)]
        (image,) = image_list([pb.Image(id="a", size=1, repo_digests=names, repo_tags=["t1", "t2"])], 1)
        assert image.names == [*names, "t1"]
        assert image_list(IMAGES, 50)[1].names is None

    def test_runtime_handlers_and_features_follow_cri_status(self) -> None:
        status = pb.StatusResponse(
            runtime_handlers=[
                pb.RuntimeHandler(name="runc", features=pb.RuntimeHandlerFeatures(user_namespaces=True)),
                pb.RuntimeHandler(name=""),
            ],
            features=pb.RuntimeFeatures(supplemental_groups_policy=True),
        )
        assert to_document(runtime_handlers(status, FeatureGates())) == [
            {"name": "", "features": {"recursiveReadOnlyMounts": False, "userNamespaces": False}},
            {"name": "runc", "features": {"recursiveReadOnlyMounts": False, "userNamespaces": True}},
        ]
        assert to_document(runtime_features(status, FeatureGates())) == {"supplementalGroupsPolicy": True}
        assert runtime_features(pb.StatusResponse(), FeatureGates()) is None
        assert runtime_handlers(None, FeatureGates()) == []

    def test_declared_features_require_gate_and_runtime_support(self) -> None:
        on = FeatureGates().with_overrides({"UserNamespacesHostNetworkSupport": True})
        able = pb.StatusResponse(features=pb.RuntimeFeatures(user_namespaces_host_network=True))
        name = "UserNamespacesHostNetworkSupport"
        assert name in declared_features(able, on)
        assert name not in declared_features(pb.StatusResponse(), on)
        assert name not in declared_features(able, FeatureGates())
        off = FeatureGates({"NodeDeclaredFeatures": False, name: True})
        assert declared_features(able, off) == []
        assert declared_features(None, on) == []

    @pytest.mark.parametrize("name", ["ExtendWebSocketsToKubelet", "RestartAllContainersOnContainerExits"])
    def test_declared_features_gate_off_omits_implemented_feature(self, name: str) -> None:
        assert name in declared_features(pb.StatusResponse(), FeatureGates())
        off = FeatureGates().with_overrides({name: False})
        assert name not in declared_features(pb.StatusResponse(), off)

    def test_declared_features_default_gates_same_as_upstream(self) -> None:
        declared = declared_features(pb.StatusResponse(), FeatureGates())
        assert declared == golden_node()["status"]["declaredFeatures"]


@pytest.mark.parametrize("spoil", [lambda d: d.pop("status"), lambda d: d["status"].clear()])
def test_next_node_old_status_missing_gets_all_status_fields(spoil: Callable[[dict[str, Any]], Any]) -> None:
    document = golden_node()
    document["metadata"].pop("creationTimestamp")
    spoil(document)
    old = from_document(NODES.struct, document)
    new, _ = next_node(old, facts(), settings(), NOW)
    assert msgspec.structs.asdict(new.status).keys() == msgspec.structs.asdict(NodeStatus()).keys()
    assert has_changed(old, new)
