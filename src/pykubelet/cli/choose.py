"""Which pod and which container a person means.

A pod is named as it was written (`web`), as the node calls it (`web-node1`), with its namespace in
front (`kube-system/dns`), or by the beginning of its uid. What fits several is refused with the list
of them: a command must never hit a pod that was not meant.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from pykubelet.api.pod import Container, Pod
from pykubelet.pods.static import is_static_pod

SHORTEST_UID = 4
_MOST_SHOWN = 10
_DEFAULT_CONTAINER = "kubectl.kubernetes.io/default-container"


class ChoiceError(Exception):
    """Nothing or too much fits; the text says what there is."""


def choose_pod(pods: Sequence[Pod], text: str, states: Mapping[str, str] | None = None) -> Pod:
    """Find the pod that `text` names; `states` are the workers' by uid.

    Raises ChoiceError with the candidates.
    """
    found = _matching(pods, text)
    if not found:
        if not pods:
            raise ChoiceError(f"there is no pod {text!r}: this node has no pods at all")
        raise ChoiceError(_listing(f"there is no pod {text!r}; there are:", pods))
    # A pod that is being replaced has its successor's name until it is gone.
    if len({pod.full_name for pod in found}) == 1 and len(found) > 1:
        staying = [pod for pod in found if (states or {}).get(pod.uid, "syncing") == "syncing"]
        found = staying[-1:] or found[-1:]
    if len(found) > 1:
        raise ChoiceError(_listing(f"{text!r} may be any of these, say which:", found))
    return found[0]


def choose_container(pod: Pod, name: str | None) -> tuple[Container, bool]:
    """Find a container of a pod, and say whether it was chosen among several that were not named.

    Without a name it is the one that the pod's author made the default, or the first.
    Raises ChoiceError with the containers that there are.
    """
    containers = all_containers(pod)
    if name is None:
        default = pod.metadata.annotations.get(_DEFAULT_CONTAINER)
        for container in pod.spec.containers:
            if container.name == default:
                return container, False
        if not pod.spec.containers:
            raise ChoiceError(f"pod {pod.metadata.name} has no containers")
        return pod.spec.containers[0], len(containers) > 1
    for container in containers:
        if container.name == name:
            return container, False
    names = ", ".join(container.name for container in containers)
    raise ChoiceError(f"pod {pod.metadata.name} has no container {name!r}; it has: {names}")


def all_containers(pod: Pod) -> list[Container]:
    """A pod's containers of every kind, ordinary ones first."""
    return [*pod.spec.containers, *pod.spec.init_containers, *pod.spec.ephemeral_containers]


def written_name(pod: Pod) -> str:
    """The pod's name as its author wrote it: static pods got the node's name behind it."""
    suffix = f"-{pod.spec.node_name.lower()}"
    if is_static_pod(pod) and pod.spec.node_name:
        return pod.metadata.name.removesuffix(suffix)
    return pod.metadata.name


def _matching(pods: Iterable[Pod], text: str) -> list[Pod]:
    """Give what fits best: a full name beats a written one, and both beat a uid."""
    namespace, slash, name = text.rpartition("/")
    inside = [pod for pod in pods if not slash or pod.metadata.namespace == namespace]
    ways = (
        [pod for pod in inside if pod.metadata.name == name],
        [pod for pod in inside if written_name(pod) == name],
        [pod for pod in inside if len(name) >= SHORTEST_UID and pod.uid.startswith(name)],
    )
    return next((found for found in ways if found), [])


def _listing(heading: str, pods: Sequence[Pod]) -> str:
    shown = [f"  {pod.full_name} (uid {pod.uid})" for pod in pods[:_MOST_SHOWN]]
    rest = len(pods) - len(shown)
    return "\n".join([heading, *shown, *([f"  and {rest} more"] if rest else [])])
