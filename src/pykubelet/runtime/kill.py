"""Stopping containers and pods: hooks, grace, and the order of sidecars.

A container gets its preStop hook inside its grace period, then the runtime's stop with what is
left of it, and never less than two seconds. Sidecars go last, in reverse order: each waits until
all ordinary containers and the sidecars after it have ended, as long as the grace lasts. A pod
whose spec nobody has any more (an orphan) is stopped by what its containers' labels say.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence

from pykubelet.api.pod import Container, Pod, is_sidecar
from pykubelet.cri.connect import Cri
from pykubelet.cri.errors import CriError, NotFound
from pykubelet.logs import get_logger
from pykubelet.pods.journal import Journal, field_of
from pykubelet.runtime.actions import KillReason
from pykubelet.runtime.hooks import HookError, HookRunner
from pykubelet.runtime.observed import ObservedContainer, ObservedPod
from pykubelet.runtime.orphans import restored_pod

log = get_logger(__name__)

MINIMUM_GRACE = 2
"""Seconds that every container gets to end by itself."""


class KillError(Exception):
    """Some container or sandbox could not be stopped; it will be tried again. People look for its words."""


def grace_of(pod: Pod, container: Container | None, reason: KillReason = "") -> int:
    """Seconds that a container may take to end."""
    if pod.metadata.deletion_grace_period_seconds is not None:
        return pod.metadata.deletion_grace_period_seconds
    probe = None
    if container is not None and reason == "StartupProbe":
        probe = container.startup_probe
    elif container is not None and reason == "LivenessProbe":
        probe = container.liveness_probe
    if probe is not None and probe.termination_grace_period_seconds is not None:
        return probe.termination_grace_period_seconds
    grace = pod.spec.termination_grace_period_seconds
    return MINIMUM_GRACE if grace is None else grace


def goes_after(pod: Pod, running: Sequence[str]) -> dict[str, list[str]]:
    """For each running sidecar, the running containers that must end before it."""
    ordinary = [c.name for c in pod.spec.containers if c.name in running]
    order: dict[str, list[str]] = {}
    later: str | None = None
    for container in reversed(pod.spec.init_containers):
        if is_sidecar(container) and container.name in running:
            order[container.name] = [*ordinary, *([later] if later else [])]
            later = container.name
    return order


def _failure(action: str, target: str, err: CriError) -> str:
    why = json.dumps(err.rpc_text, ensure_ascii=False)
    return f'failed to "{action}" for "{target}" with {action}Error: {why}'


class Killer:
    """Stops what runs."""

    def __init__(self, cri: Cri, hooks: HookRunner, journal: Journal) -> None:
        self._cri = cri
        self._hooks = hooks
        self._journal = journal

    async def pod(self, pod: Pod | None, observed: ObservedPod, grace: int | None = None) -> None:
        """Stop all running containers of a pod, then its sandboxes.

        Raises KillError after having tried everything.
        """
        owner = pod or restored_pod(observed)
        alive = [c for c in observed.containers if c.phase in ("running", "unknown")]
        order = goes_after(owner, [container.name for container in alive])
        ended = {container.name: asyncio.Event() for container in alive}

        async def stop(container: ObservedContainer) -> str | None:
            try:
                first = [ended[name] for name in order.get(container.name, ())]
                await self.container(owner, container, grace=grace, after=first)
            except CriError as err:
                return _failure("KillContainer", container.name, err)
            finally:
                ended[container.name].set()
            return None

        problems = [problem for problem in await asyncio.gather(*map(stop, alive)) if problem]
        for sandbox in observed.sandboxes:
            try:
                await self._cri.runtime.stop_pod_sandbox(sandbox.id)
            except NotFound:
                continue
            except CriError as err:
                problems.append(_failure("KillPodSandbox", observed.uid, err))
        if problems:
            raise KillError(problems[0] if len(problems) == 1 else f"[{', '.join(problems)}]")

    async def container(
        self,
        pod: Pod,
        target: ObservedContainer,
        message: str = "",
        reason: KillReason = "",
        grace: int | None = None,
        after: Sequence[asyncio.Event] = (),
    ) -> None:
        """Stop one container within its grace, once the `after` events are set or the grace is over."""
        spec = _spec_of(pod, target.name)
        clock = asyncio.get_running_loop().time
        allowed = grace_of(pod, spec, reason) if grace is None else grace
        where = field_of(pod, target.name)
        self._journal.event(pod, "Normal", "Killing", message or f"Stopping container {target.name}", where)
        self._journal.note(pod.uid, "kill", f"{target.name}: {message or 'stopping'} (grace {allowed} s)")
        deadline = clock() + allowed
        if (
            allowed > 0
            and spec is not None
            and spec.lifecycle is not None
            and spec.lifecycle.pre_stop is not None
        ):
            await self._pre_stop(pod, spec, target.id, allowed)
        for event in after:
            if (left := deadline - clock()) > 0:
                await _wait(event, left)
        # Whole seconds on the wire: what is begun counts as left, so that a hook of 50 ms costs no second.
        remaining = max(MINIMUM_GRACE, round(deadline - clock()))
        log.v(2).info(
            "Killing container with a grace period",
            pod=pod.full_name,
            podUID=pod.uid,
            containerName=target.name,
            containerID=target.id,
            gracePeriod=remaining,
        )
        try:
            await self._cri.runtime.stop_container(target.id, remaining)
        except NotFound:
            log.v(3).info("Container was gone already", containerID=target.id)

    async def _pre_stop(self, pod: Pod, spec: Container, container_id: str, seconds: int) -> None:
        assert spec.lifecycle is not None
        assert spec.lifecycle.pre_stop is not None
        try:
            async with asyncio.timeout(seconds):
                await self._hooks.run(pod, spec, container_id, spec.lifecycle.pre_stop)
        except TimeoutError:
            log.v(2).info(
                "PreStop hook not completed in grace period", pod=pod.full_name, containerName=spec.name
            )
        except HookError as err:
            log.error(err, "PreStop hook failed", pod=pod.full_name, podUID=pod.uid, containerName=spec.name)
            # The hook's output stays out of the event: it may carry secrets.
            self._journal.event(
                pod, "Warning", "FailedPreStopHook", "PreStopHook failed", field_of(pod, spec.name)
            )


async def _wait(event: asyncio.Event, seconds: float) -> None:
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return


def _spec_of(pod: Pod, name: str) -> Container | None:
    return containers_by_name(pod).get(name)


def containers_by_name(pod: Pod) -> Mapping[str, Container]:
    """All containers of a pod, of every kind."""
    spec = pod.spec
    return {c.name: c for c in (*spec.init_containers, *spec.containers, *spec.ephemeral_containers)}
