import asyncio
import json
from typing import Any

import pytest

from pykubelet.api.meta import from_document, to_document
from pykubelet.api.node import Node, Taint
from pykubelet.apiserver.errors import Forbidden, Unreachable
from pykubelet.config.feature_gates import FeatureGates
from pykubelet.config.flags.kubelet_flags import KubeletFlags
from pykubelet.config.types import KubeletConfiguration
from pykubelet.config.types import Taint as ConfiguredTaint
from pykubelet.node.registration import ATTACH_DETACH, blank_node, reconciled, register, try_register
from pykubelet.node.settings import node_settings
from pykubelet.node.status import next_node, node_patch
from tests.support.node_status import NOW, MemoryApi, amounts, facts, settings

UNINITIALIZED = "node.cloudprovider.kubernetes.io/uninitialized"


def ours(**changes: Any) -> Node:
    made = settings(**changes)
    node, _ = next_node(blank_node(made, "amd64"), facts(), made, NOW)
    return node


class TestBlank:
    def test_blank_node_labels_merge_defaults_and_flags(self) -> None:
        node = blank_node(
            settings(labels={"role": "web", "kubernetes.io/hostname": "other", "beta.kubernetes.io/os": "x"}),
            "arm64",
        )
        assert node.metadata.labels == {
            "kubernetes.io/hostname": "other",
            "kubernetes.io/os": "linux",
            "kubernetes.io/arch": "arm64",
            "beta.kubernetes.io/os": "x",
            "beta.kubernetes.io/arch": "arm64",
            "role": "web",
        }

    def test_blank_node_taints_include_unschedulable_and_uninitialized(self) -> None:
        given = Taint(key="dedicated", value="db", effect="NoExecute")
        node = blank_node(settings(taints=(given,), schedulable=False, external_cloud=True), "amd64")
        assert to_document(node.spec) == {
            "unschedulable": True,
            "taints": [
                {"key": "dedicated", "value": "db", "effect": "NoExecute"},
                {"key": "node.kubernetes.io/unschedulable", "effect": "NoSchedule"},
                {"key": UNINITIALIZED, "value": "true", "effect": "NoSchedule"},
            ],
        }
        same = Taint(key="node.kubernetes.io/unschedulable", effect="NoSchedule")
        assert len(blank_node(settings(taints=(same,), schedulable=False), "amd64").spec.taints) == 1

    def test_blank_node_sets_provider_id_and_attach_detach_annotation(self) -> None:
        node = blank_node(settings(provider_id="aws:///i-1", attach_detach=False), "amd64")
        assert (node.spec.provider_id, node.metadata.annotations) == ("aws:///i-1", {})
        assert to_document(blank_node(settings(), "amd64").metadata.annotations) == {ATTACH_DETACH: "true"}

    def test_node_settings_combine_flags_and_configuration(self) -> None:
        flags = KubeletFlags(
            node_ip="192.0.2.2",
            cloud_provider="external",
            node_labels={"a": "b"},
            register_schedulable=False,
            experimental_allocatable_ignore_eviction=True,
        )
        config = KubeletConfiguration(
            register_with_taints=[
                ConfiguredTaint(key="k", effect="NoSchedule", time_added="2026-07-24T08:30:00Z")
            ],
            provider_id="p",
            node_status_max_images=7,
        )
        made = node_settings(flags, config, FeatureGates(), "one")
        assert (made.name, made.hostname, str(made.ips[0])) == ("one", "one", "192.0.2.2")
        assert made.registration.taints == (Taint(key="k", effect="NoSchedule", time_added=NOW),)
        assert (made.external_cloud, made.registration.schedulable, made.ignore_eviction) == (
            True,
            False,
            True,
        )
        assert (made.update_seconds, made.report_seconds, made.lease_seconds) == (10.0, 300.0, 40)
        assert (made.max_images, made.registration.provider_id) == (7, "p")
        assert made.registration.labels == {"a": "b"}


class TestReconciling:
    def existing(self, **changes: Any) -> Node:
        node = from_document(Node, json.loads(json.dumps(to_document(ours()))))
        for name, value in changes.items():
            setattr(node.metadata, name, value)
        return node

    def test_reconciled_unchanged_node_patch_is_empty(self) -> None:
        existing = self.existing()
        assert node_patch(existing, reconciled(existing, ours())) == {}

    def test_reconciled_updates_default_labels_and_keeps_others(self) -> None:
        existing = self.existing(labels={"kubernetes.io/hostname": "old", "role": "db", "mine": "yes"})
        wanted = ours(labels={"role": "web", "topology.kubernetes.io/zone": "z", "extra": "1"})
        labels = reconciled(existing, wanted).metadata.labels
        assert labels["kubernetes.io/hostname"] == "vm"
        assert labels["topology.kubernetes.io/zone"] == "z"
        assert (labels["role"], labels["mine"]) == ("db", "yes"), "labels of others and of people stay"
        assert "extra" not in labels
        emptied = ours(labels={"topology.kubernetes.io/zone": ""})
        assert "topology.kubernetes.io/zone" not in reconciled(existing, emptied).metadata.labels

    def test_reconciled_sets_or_removes_attach_detach_annotation(self) -> None:
        existing = self.existing(annotations={"other": "1"})
        assert reconciled(existing, ours()).metadata.annotations == {"other": "1", ATTACH_DETACH: "true"}
        existing = self.existing()
        patch = node_patch(existing, reconciled(existing, ours(attach_detach=False)))
        assert patch == {"metadata": {"annotations": {ATTACH_DETACH: None}}}

    def test_reconciled_huge_pages_and_extended_resources_are_reset(self) -> None:
        existing = self.existing()
        dongle = amounts(x="4")["x"]
        for resources in (existing.status.capacity, existing.status.allocatable):
            resources |= {"example.com/dongle": dongle, "hugepages-64Ki": dongle, "hugepages-2Mi": dongle}
        corrected = reconciled(existing, ours())
        for found in (corrected.status.capacity, corrected.status.allocatable):
            assert str(found["example.com/dongle"]) == "4"
            assert str(found["hugepages-2Mi"]) == "0"
            assert "hugepages-64Ki" not in found
        zeroed = reconciled(existing, ours(), reset_extended=True)
        assert str(zeroed.status.capacity["example.com/dongle"]) == "0"
        assert str(zeroed.status.allocatable["example.com/dongle"]) == "0"

    def test_reconciled_node_without_status_gets_capacity(self) -> None:
        wanted = ours()
        corrected = reconciled(Node(), wanted)
        assert corrected.status.capacity == wanted.status.capacity
        assert corrected.status.allocatable == wanted.status.allocatable


@pytest.mark.looptime
class TestRegistering:
    async def make(self) -> Node:
        return ours()

    async def test_register_new_node_is_created(self) -> None:
        api = MemoryApi()
        node = await register(api, settings(), self.make)
        assert node.metadata.uid == api.node["metadata"]["uid"]
        assert api.asked == ["create nodes"]
        assert api.conditions()["Ready"] == "True"

    async def test_register_existing_node_is_patched(self) -> None:
        api = MemoryApi()
        api.put_node({"metadata": {"labels": {"mine": "yes"}}, "spec": {"unschedulable": True}})
        node = await register(api, settings(), self.make)
        assert api.asked == ["create nodes", "get nodes", "patch nodes"]
        assert (node.metadata.uid, node.metadata.labels["mine"]) == ("n1", "yes")
        assert api.node["spec"] == {"unschedulable": True}
        await register(api, settings(), self.make)
        assert api.asked[3:] == ["create nodes", "get nodes"]

    async def test_register_server_away_backoff_grows_to_seven_seconds(self) -> None:
        api = MemoryApi()
        api.away = Unreachable("https://api", "refused")
        loop = asyncio.get_running_loop()
        loop.call_later(30, lambda: setattr(api, "away", None))
        await register(api, settings(), self.make)
        gaps = [round(b - a, 3) for a, b in zip(api.times, api.times[1:], strict=False)]
        assert gaps == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 7, 7, 7]

    async def test_try_register_create_forbidden_uses_existing_node(self) -> None:
        api = MemoryApi()
        api.put_node({})
        api.fails = [Forbidden(403, "Forbidden", "no", hint="bind a ClusterRole")]
        node = await try_register(api, ours(), settings(), reset_extended=False)
        assert node.metadata.uid == "n1"
        api.fails = [Forbidden(403, "Forbidden", "no")]
        strict = settings(gates=FeatureGates({"KubeletRegistrationGetOnExistsOnly": True}))
        with pytest.raises(Forbidden):
            await try_register(api, ours(), strict, reset_extended=False)

    async def test_try_register_forbidden_names_missing_permission(self) -> None:
        api = MemoryApi()
        api.fails = [Forbidden(403, "Forbidden", "no", hint="the permission to create nodes is missing")]
        with pytest.raises(Forbidden, match="the permission to create nodes is missing"):
            await try_register(api, ours(), settings(), reset_extended=False)
