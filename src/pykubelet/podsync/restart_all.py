"""In-place restart of all containers of a pod, after an exit that matches a `RestartAllContainers` rule.

The sync only removes the containers; the next one finds a sandbox without containers and starts the pod from
the beginning. There is no crash-loop back-off, because the exited containers are gone; instead at least a
second passes between the creation of a container and the restart that its exit causes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec

from pykubelet.api.pod import Container, Pod, is_sidecar
from pykubelet.kuberuntime.decide import RESTART_ALL, Waves, may_restart_all
from pykubelet.kuberuntime.kill import ContainerKiller
from pykubelet.kuberuntime.observed import ObservedContainer
from pykubelet.kuberuntime.removal import ContainerRemover
from pykubelet.podconfig.pod_history import PodHistory
from pykubelet.podsync.contract import PodSyncState, SyncError
from pykubelet.transport.errors import CriError

LIFE_SECONDS = 1.0
"""Minimum seconds between a container's creation and the restart that its exit causes."""


class RestartAll:
    """Removal of all containers of a pod; `enabled` and `container_rules` are feature gates.

    Without `container_rules` containers have their pod's restart policy, except for sidecars.
    """

    def __init__(
        self,
        killer: ContainerKiller,
        remover: ContainerRemover,
        journal: PodHistory,
        clock: Callable[[], float],
        *,
        enabled: bool,
        container_rules: bool = True,
    ) -> None:
        self._enabled = enabled
        self._container_rules = container_rules
        self._killer = killer
        self._remover = remover
        self._journal = journal
        self._clock = clock

    def honoured(self, pod: Pod) -> Pod:
        """Return the pod with the restart rules that this node honours; the argument is not modified."""
        if not self._container_rules:
            return _with_pod_policy(pod)
        return pod if self._enabled or not may_restart_all(pod.spec) else _without_rule(pod)

    async def clear(self, pod: Pod, waves: Waves, state: PodSyncState) -> float:
        """Stop and remove these containers; return the seconds until the next sync.

        Raises SyncError when some could not be removed; those before them are gone.
        """
        age = self._clock() - max(container.created_at for container in waves[-1]) / 1e9
        if 0 <= age < LIFE_SECONDS:
            return LIFE_SECONDS - age
        self._journal.note(pod.uid, "decide", "restart all containers in the same sandbox")
        state.current = False
        for wave in waves:
            problems = [
                error
                for error in await asyncio.gather(*(self._remove(pod, container) for container in wave))
                if error
            ]
            if problems:
                raise SyncError(f"restarting all containers: {'; '.join(problems)}")
        state.failures.clear()
        return 0.0

    async def _remove(self, pod: Pod, container: ObservedContainer) -> str:
        """Remove a container; return the error, so that the others of its wave are removed too."""
        message = f"Container {container.name} is stopped because all containers of the pod restart"
        try:
            if container.phase != "exited":
                # Without grace period and so without preStop hook: the container is replaced anyway.
                await self._killer.kill_container(pod, container, message, grace=0)
            await self._remover.remove(pod, container)
        except CriError as err:
            return f"{container.name}: {err}"
        return ""


def _without_rule(pod: Pod) -> Pod:
    """Return a pod in which such rules still match, so that no later rule does, but have no action."""

    def plain(container: Container) -> Container:
        rules = [
            msgspec.structs.replace(rule, action="") if rule.action == RESTART_ALL else rule
            for rule in container.restart_policy_rules
        ]
        return msgspec.structs.replace(container, restart_policy_rules=rules)

    return _with_containers(pod, plain, plain)


def _with_pod_policy(pod: Pod) -> Pod:
    """Return a pod whose containers have no restart policy and rules of their own; sidecars have no rules."""

    def plain(container: Container) -> Container:
        return msgspec.structs.replace(container, restart_policy=None, restart_policy_rules=[])

    def sidecar_only(container: Container) -> Container:
        # The policy is what makes an init container a sidecar, but its rules could restart all containers.
        if is_sidecar(container):
            return msgspec.structs.replace(container, restart_policy_rules=[])
        return plain(container)

    spec = pod.spec
    if not any(c.restart_policy or c.restart_policy_rules for c in (*spec.init_containers, *spec.containers)):
        return pod
    return _with_containers(pod, sidecar_only, plain)


def _with_containers(
    pod: Pod, init: Callable[[Container], Container], ordinary: Callable[[Container], Container]
) -> Pod:
    spec = msgspec.structs.replace(
        pod.spec,
        init_containers=[init(container) for container in pod.spec.init_containers],
        containers=[ordinary(container) for container in pod.spec.containers],
    )
    return msgspec.structs.replace(pod, spec=spec)
