"""Restarting all containers of a pod in place, because one of them ended in a way that asks for it.

The step removes what there is and nothing more; the next one finds a sandbox without containers and
starts the pod as if it were new. There is no pause after a crash, since what ended is gone. But a
container that keeps ending at once does not keep the node busy: it gets a second for each life.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec

from pykubelet.api.pod import Container, Pod
from pykubelet.kuberuntime.decide import RESTART_ALL, Waves, may_restart_all
from pykubelet.kuberuntime.kill import ContainerKiller
from pykubelet.kuberuntime.observed import ObservedContainer
from pykubelet.kuberuntime.removal import ContainerRemover
from pykubelet.podconfig.pod_history import PodHistory
from pykubelet.podsync.contract import SyncError
from pykubelet.podsync.executor import PodSyncState
from pykubelet.transport.errors import CriError

LIFE_SECONDS = 1.0
"""How long after its creation a container's end restarts all at the earliest."""


class RestartAll:
    """Takes a pod's containers away so that all begin anew; where it is switched off, no rule asks for it."""

    def __init__(
        self,
        killer: ContainerKiller,
        remover: ContainerRemover,
        journal: PodHistory,
        clock: Callable[[], float],
        *,
        enabled: bool,
    ) -> None:
        self._enabled = enabled
        self._killer = killer
        self._remover = remover
        self._journal = journal
        self._clock = clock

    def honoured(self, pod: Pod) -> Pod:
        """Give the pod with the rules that are honoured here; its own is not written to."""
        return pod if self._enabled or not may_restart_all(pod.spec) else _without_rule(pod)

    async def clear(self, pod: Pod, waves: Waves, memory: PodSyncState) -> float:
        """Stop and remove all of these containers; gives in how many seconds to look again.

        Raises StepError when some could not be removed; those before them are gone.
        """
        age = self._clock() - max(container.created_at for container in waves[-1]) / 1e9
        if 0 <= age < LIFE_SECONDS:
            return LIFE_SECONDS - age
        self._journal.note(pod.uid, "decide", "restart all containers in the same sandbox")
        memory.current = False
        for wave in waves:
            problems = [
                told for told in await asyncio.gather(*(self._remove(pod, one) for one in wave)) if told
            ]
            if problems:
                raise SyncError(f"restarting all containers: {'; '.join(problems)}")
        memory.failures.clear()
        return 0.0

    async def _remove(self, pod: Pod, container: ObservedContainer) -> str:
        """Remove a container; gives what went wrong, so that the others of its wave get their end."""
        message = f"Container {container.name} is stopped because all containers of the pod restart"
        try:
            if container.phase != "exited":
                # No grace, and so no hook: what it would save is of a life that is over.
                await self._killer.container(pod, container, message, grace=0)
            await self._remover.remove(pod, container)
        except CriError as err:
            return f"{container.name}: {err}"
        return ""


def _without_rule(pod: Pod) -> Pod:
    """Give a pod in which such a rule still fits an end, so that none after it does, but asks for nothing."""

    def plain(container: Container) -> Container:
        rules = [
            msgspec.structs.replace(rule, action="") if rule.action == RESTART_ALL else rule
            for rule in container.restart_policy_rules
        ]
        return msgspec.structs.replace(container, restart_policy_rules=rules)

    spec = msgspec.structs.replace(
        pod.spec,
        init_containers=[plain(container) for container in pod.spec.init_containers],
        containers=[plain(container) for container in pod.spec.containers],
    )
    return msgspec.structs.replace(pod, spec=spec)
