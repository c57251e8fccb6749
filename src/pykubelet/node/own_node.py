"""This node as its agent knows it without asking anybody: what pods are judged by before a cluster has it."""

from __future__ import annotations

import msgspec

from pykubelet.api.meta import Resources
from pykubelet.api.node import Node, NodeStatus
from pykubelet.cri import runtime_pb2 as pb
from pykubelet.node.features import declared_features, runtime_features
from pykubelet.node.registration import blank_node
from pykubelet.node.settings import NodeSettings


def own_node(
    settings: NodeSettings, architecture: str, allocatable: Resources, runtime: pb.StatusResponse
) -> Node:
    """Give the node as it registers, with what it has to give and what it can do."""
    status = NodeStatus(
        allocatable=allocatable,
        features=runtime_features(runtime, settings.gates),
        declared_features=declared_features(runtime, settings.gates),
    )
    return msgspec.structs.replace(blank_node(settings, architecture), status=status)
