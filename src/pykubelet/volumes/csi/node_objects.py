"""What the cluster is told of a node's drivers, decided without asking anybody: pure.

Of a driver the scheduler and the controllers need to know what it calls this node, where the node is in
the driver's eyes and how many volumes fit. It stands in three places: the CSINode of the node's name, an
annotation of the node (all drivers' names for it), and labels of the node (where it is).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from pykubelet.api.meta import ObjectMeta, OwnerReference
from pykubelet.api.storage import CsiNode, CsiNodeDriver, VolumeNodeResources
from pykubelet.volumes.csi.volume_use import NodeFacts

NODE_IDS = "csi.volume.kubernetes.io/nodeid"
MIGRATED = "storage.alpha.kubernetes.io/migrated-plugins"
MIGRATED_PLUGINS = ",".join(
    f"kubernetes.io/{name}"
    for name in (
        "aws-ebs",
        "azure-disk",
        "azure-file",
        "cinder",
        "gce-pd",
        "portworx-volume",
        "vsphere-volume",
    )
)
"""The kinds that are CSI drivers' business in every Kubernetes of today: controllers look here."""
MOST_COUNT = 2**31 - 1

Patch = dict[str, Any]


class TopologyCollision(Exception):
    """A driver places the node elsewhere than its labels do; the text says which label."""


def blank_csi_node(name: str, node_uid: str) -> CsiNode:
    """Give the CSINode of a node without drivers; it goes with the node."""
    owner = OwnerReference(api_version="v1", kind="Node", name=name, uid=node_uid)
    return CsiNode(
        metadata=ObjectMeta(name=name, owner_references=[owner], annotations={MIGRATED: MIGRATED_PLUGINS})
    )


def belongs_to(found: CsiNode, node_name: str, node_uid: str) -> bool:
    """Whether a CSINode is this very node's, and not that of one before it of the same name."""
    return any(
        (owner.kind, owner.name, owner.uid) == ("Node", node_name, node_uid)
        for owner in found.metadata.owner_references
    )


def announced(found: CsiNode) -> Patch:
    """Give the patch by which a CSINode says which kinds are drivers' business; empty when it does."""
    kinds = found.metadata.annotations.get(MIGRATED, "")
    if set(kinds.split(",")) == set(MIGRATED_PLUGINS.split(",")):
        return {}
    return {"metadata": {"annotations": {MIGRATED: MIGRATED_PLUGINS}}}


def installed(found: CsiNode, driver: str, facts: NodeFacts) -> Patch:
    """Give the strategic patch by which a CSINode has a driver; empty when it has it so already."""
    patch = announced(found)
    count = min(facts.most_volumes, MOST_COUNT) if facts.most_volumes > 0 else None
    wanted = CsiNodeDriver(
        name=driver,
        node_id=facts.node_id,
        topology_keys=sorted(facts.topology),
        allocatable=VolumeNodeResources(count=count) if count is not None else None,
    )
    kept = next((known for known in found.spec.drivers if known.name == driver), None)
    if kept is None or msgspec.structs.replace(kept, topology_keys=sorted(kept.topology_keys)) != wanted:
        entry: Patch = {"name": driver, "nodeID": facts.node_id, "topologyKeys": wanted.topology_keys or None}
        entry["allocatable"] = {"count": count} if count is not None else None
        patch["spec"] = {"drivers": [entry]}
    return patch


def uninstalled(found: CsiNode, driver: str) -> Patch:
    """Give the strategic patch by which a CSINode does not have a driver; empty when it has not."""
    if all(known.name != driver for known in found.spec.drivers):
        return {}
    return {"spec": {"drivers": [{"$patch": "delete", "name": driver}]}}


def node_installed(meta: ObjectMeta, driver: str, facts: NodeFacts) -> Patch:
    """Give the patch by which a node has a driver's name for it, and its place; may be empty.

    Raises TopologyCollision, and ValueError when the annotation is not what it should be.
    """
    for key, value in facts.topology.items():
        if (label := meta.labels.get(key, value)) != value:
            raise TopologyCollision(
                f'detected topology value collision: driver reported "{key}":"{value}" '
                f'but existing label is "{key}":"{label}"'
            )
    ids, patch = _node_ids(meta), Patch()
    if ids.get(driver) != facts.node_id:
        patch["annotations"] = {NODE_IDS: _written(ids | {driver: facts.node_id})}
    if labels := {key: value for key, value in facts.topology.items() if key not in meta.labels}:
        patch["labels"] = labels
    return {"metadata": patch} if patch else {}


def node_uninstalled(meta: ObjectMeta, driver: str) -> Patch:
    """Give the patch by which a node has not a driver's name for it; its place stays."""
    ids = _node_ids(meta)
    if driver not in ids:
        return {}
    left = {name: value for name, value in ids.items() if name != driver}
    return {"metadata": {"annotations": {NODE_IDS: _written(left) if left else None}}}


def _node_ids(meta: ObjectMeta) -> dict[str, str]:
    text = meta.annotations.get(NODE_IDS, "")
    if not text:
        return {}
    try:
        return msgspec.json.decode(text, type=dict[str, str] | None) or {}
    except msgspec.MsgspecError as err:
        raise ValueError(
            f'failed to parse node\'s "{NODE_IDS}" annotation value ("{text}") err={err}'
        ) from err


def _written(ids: Mapping[str, str]) -> str:
    return msgspec.json.encode(dict(sorted(ids.items()))).decode()
