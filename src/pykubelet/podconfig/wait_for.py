"""The annotation `pykubelet.dev/wait-for`: pods of a standalone node that a pod waits for before it starts.

Its value is a list such as `db, cache` or `kube-system/dns`: names of pods as in their manifests, or of the
Deployments, DaemonSets, StatefulSets and Jobs that own them. A pod is waited for until it is Ready or has
succeeded, a Job until it has completed. A pod that has started is not stopped when another one becomes
unready.

A missing pod, a failed Job and a cycle are reported and never resolve by themselves; everything is a pure
function of the present pods.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from pykubelet.api.names import dns_label_problem, dns_subdomain_problem
from pykubelet.api.pod import Pod
from pykubelet.util.text import quoted

WAIT_FOR_ANNOTATION = "pykubelet.dev/wait-for"
MAX_NAMES = 20
WAITING = "WaitingForPods"
FAILED = "WaitForFailedJob"
CYCLE = "WaitForCycle"
MISSING = "WaitForMissing"
Target = tuple[str, str]
"""Namespace and name of a pod or of its owner."""
JobOutcome = tuple[str, str]
"""Outcome of a Job, empty while it runs, and the reason of a failure."""


@dataclass(frozen=True, slots=True)
class Wait:
    """Reason why a pod does not start yet."""

    reason: str
    message: str


def wait_targets(pod: Pod) -> list[Target]:
    """Return what a pod waits for. Raises ValueError for an invalid annotation."""
    text = pod.metadata.annotations.get(WAIT_FOR_ANNOTATION, "")
    names = [name for name in (part.strip() for part in text.split(",")) if name]
    if len(names) > MAX_NAMES:
        raise ValueError(f"has {len(names)} names, but at most {MAX_NAMES} are allowed")
    targets = []
    for written in names:
        namespace, slash, name = written.rpartition("/")
        problem = dns_subdomain_problem(name) or (dns_label_problem(namespace) if slash else None)
        if problem:
            raise ValueError(f"{quoted(written)} {problem}")
        targets.append((namespace or pod.metadata.namespace or "default", name))
    return list(dict.fromkeys(targets))


def wait_for_problem(pod: Pod) -> str | None:
    """Return the problem with the annotation of a completed static pod, or None."""
    try:
        targets = wait_targets(pod)
    except ValueError as err:
        return str(err)
    if not _names(pod).isdisjoint(targets):
        return "names the pod itself: remove that name"
    return None


def find_wait(
    pod: Pod,
    pods: Sequence[Pod],
    is_ready: Callable[[Pod], bool],
    job_outcome: Callable[[str, str], JobOutcome | None],
) -> Wait | None:
    """Return why a pod cannot start yet, or None; `job_outcome` returns None for an unknown Job."""
    waiting, missing, failed = [], [], []
    index = _index(pods)
    for target in _valid_targets(pod):
        job, found = job_outcome(*target), index.get(target, [])
        outcome, reason = job or ("", "")
        if job is None and not found:
            missing.append(_text(target, pod))
        elif outcome == "Failed":
            failed.append(f"Job {_name(target, pod)}, which failed ({reason})")
        elif (job is not None and not outcome) or (job is None and not all(map(is_ready, found))):
            waiting.append(_text(target, pod))
    if not waiting and not missing and not failed:
        return None
    if cycle := _find_cycle(pod, index):
        chain = " → ".join(cycle)
        return Wait(
            CYCLE, f"pods wait for each other ({chain}): remove a name from one {WAIT_FOR_ANNOTATION}"
        )
    if missing:
        return Wait(
            MISSING,
            f"waits for {', '.join(missing)}, which this node does not have: apply the manifest, or remove "
            f"the name from {WAIT_FOR_ANNOTATION}",
        )
    if failed:
        return Wait(FAILED, f"waits for {', '.join(failed)}: correct and apply it")
    return Wait(WAITING, f"waits for {', '.join(waiting)} to be ready")


def _valid_targets(pod: Pod) -> list[Target]:
    try:
        return wait_targets(pod)
    except ValueError:
        return []  # rejected when the manifest was read


def _names(pod: Pod) -> set[Target]:
    """Return the names by which a pod is waited for: its own, that in the manifest, and its owner's."""
    meta = pod.metadata
    suffix = f"-{pod.spec.node_name.lower()}"
    names = {meta.name, meta.name.removesuffix(suffix) if pod.spec.node_name else meta.name}
    names |= {owner.name for owner in meta.owner_references if owner.controller}
    return {(meta.namespace, name) for name in names}


def _index(pods: Iterable[Pod]) -> dict[Target, list[Pod]]:
    index: dict[Target, list[Pod]] = {}
    for pod in pods:
        for name in _names(pod):
            index.setdefault(name, []).append(pod)
    return index


def _find_cycle(pod: Pod, index: dict[Target, list[Pod]]) -> list[str]:
    """Return the names on a way from a pod back to itself; empty if there is none."""
    visited: set[str] = set()
    stack: list[tuple[Pod, Iterator[Pod]]] = [(pod, _awaited(pod, index))]
    while stack:
        following = next(stack[-1][1], None)
        if following is None:
            stack.pop()
        elif following.uid == pod.uid:
            return [*(entry.metadata.name for entry, _ in stack), pod.metadata.name]
        elif following.uid not in visited:
            visited.add(following.uid)
            stack.append((following, _awaited(following, index)))
    return []


def _awaited(pod: Pod, index: dict[Target, list[Pod]]) -> Iterator[Pod]:
    for target in _valid_targets(pod):
        yield from index.get(target, [])


def _text(target: Target, pod: Pod) -> str:
    return f"pod {_name(target, pod)}"


def _name(target: Target, pod: Pod) -> str:
    namespace, name = target
    return name if namespace == pod.metadata.namespace else f"{namespace}/{name}"
