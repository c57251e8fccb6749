"""What the node has and can do beside running pods: its images, its runtime's handlers, its features.

A feature is declared only when this agent really has it, whatever its gate says, because others act on it:

- the scheduler sends pods that need a feature only to nodes that declare it (a rule that restarts all
  containers; a user namespace on the node's network), and leaves them pending where there is none;
- the API server refuses changes that a pod's node cannot make (resizing a whole pod, or its init
  containers, in place) instead of taking them for nothing to happen;
- the API server hands WebSocket streams on as they are to nodes that translate them, and translates
  them itself for all others: a node that declares that and cannot do it breaks `kubectl exec`.

`NOT_BUILT` are the ones that the reference declares by default and this agent does not have: whoever builds
one moves its name to `_DECLARED`, and `tests/cluster/test_golden.py` compares the rest with the reference.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping

from pykubelet.api.node import (
    ContainerImage,
    NodeFeatures,
    NodeRuntimeHandler,
    NodeRuntimeHandlerFeatures,
)
from pykubelet.config.gates import FeatureGates
from pykubelet.cri import runtime_pb2 as pb

NAMES_PER_IMAGE = 5

NOT_BUILT = frozenset({"ExtendWebSocketsToKubelet"})
_DECLARED: Mapping[str, Callable[[pb.RuntimeFeatures], bool]] = {
    "InPlacePodLevelResourcesVerticalScaling": lambda runtime: True,
    "InPlacePodVerticalScalingInitContainers": lambda runtime: True,
    "RestartAllContainersOnContainerExits": lambda runtime: True,
    # The agent asks for both; whether they go together is the runtime's matter.
    "UserNamespacesHostNetworkSupport": lambda runtime: runtime.user_namespaces_host_network,
}
"""What this agent has, each with what it needs of the runtime."""

_IDENTIFIERS = r"[0-9A-Za-z-]+(?:\.[0-9A-Za-z-]+)*"
_SEMANTIC = re.compile(rf"v?(\d+\.\d+\.\d+(?:-{_IDENTIFIERS})?(?:\+{_IDENTIFIERS})?)")
_NUMBERS = re.compile(r"v?(\d+(?:\.\d+)+)")


def plain_version(text: str) -> str:
    """Give a version as the cluster's tools can compare it: without what a distribution appended."""
    text = text.strip()
    found = _SEMANTIC.fullmatch(text) or _NUMBERS.match(text)
    return found[1] if found else text


def image_list(images: Iterable[pb.Image], most: int) -> list[ContainerImage]:
    """List images for the node's status, the largest first; `most` below zero: all of them."""
    # By id where the sizes are equal, so that the list does not change without a reason.
    ordered = sorted(images, key=lambda image: (image.size, image.id), reverse=True)
    return [
        ContainerImage(
            names=[*image.repo_digests, *image.repo_tags][:NAMES_PER_IMAGE] or None, size_bytes=image.size
        )
        for image in (ordered if most < 0 else ordered[:most])
    ]


def runtime_handlers(status: pb.StatusResponse | None, gates: FeatureGates) -> list[NodeRuntimeHandler]:
    """List the runtime's handlers by name, with what each can do."""
    if status is None or not (
        gates.enabled("RecursiveReadOnlyMounts") or gates.enabled("UserNamespacesSupport")
    ):
        return []
    return [
        NodeRuntimeHandler(
            name=handler.name,
            features=NodeRuntimeHandlerFeatures(
                recursive_read_only_mounts=handler.features.recursive_read_only_mounts,
                user_namespaces=handler.features.user_namespaces,
            ),
        )
        for handler in sorted(status.runtime_handlers, key=lambda handler: handler.name)
    ]


def runtime_features(status: pb.StatusResponse | None, gates: FeatureGates) -> NodeFeatures | None:
    """Give what the runtime can do whatever the handler; None when it does not say."""
    if status is None or not status.HasField("features") or not gates.enabled("SupplementalGroupsPolicy"):
        return None
    return NodeFeatures(supplemental_groups_policy=status.features.supplemental_groups_policy)


def declared_features(status: pb.StatusResponse | None, gates: FeatureGates) -> list[str]:
    """List the features that others must know of before they ask this node for them, by name."""
    if status is None or not gates.enabled("NodeDeclaredFeatures"):
        return []
    return sorted(
        name for name, supported in _DECLARED.items() if gates.enabled(name) and supported(status.features)
    )
