"""Stopping containers and pods: preStop hooks, grace periods, and the termination order of sidecars.

A container gets its preStop hook within its grace period, then StopContainer with the rest of it, at least
two seconds. Sidecars stop last, in reverse order: each waits until all ordinary containers and the sidecars
after it have exited, at most for the grace period. For a pod whose spec is unknown (an orphan), the spec is
restored from the labels and annotations of its containers, also those of a previous process or of the
upstream kubelet.

`ContainerKiller` owns one task per container that is being stopped. A caller that is cancelled leaves the
task running; a later request for the same container joins it and may shorten its grace period. So neither the
hook nor the stop signal is sent twice, and a hook is not interrupted: it may run until its container has
exited. The tasks are not persistent: a new kubelet process starts with the hook again.

`HookRunner` runs the lifecycle hooks, postStart and preStop.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from pykubelet.api.downward_api import quote
from pykubelet.api.meta import ObjectMeta
from pykubelet.api.pod import Container, HTTPGetAction, Lifecycle, LifecycleHandler, Pod, PodSpec, is_sidecar
from pykubelet.cri.connect import RuntimeConnection
from pykubelet.kuberuntime.decide import KillReason
from pykubelet.kuberuntime.labels import parse_container
from pykubelet.kuberuntime.metrics import StartMetrics
from pykubelet.kuberuntime.observed import ObservedContainer, ObservedPod
from pykubelet.logs import get_logger
from pykubelet.podconfig.pod_history import PodHistory, field_of
from pykubelet.transport.errors import CriError, NotFound
from pykubelet.util.tasks import TaskScope, wait_seconds

log = get_logger(__name__)


def restored_pod(observed: ObservedPod) -> Pod:
    """Return a minimal pod for termination, restored from the labels and annotations of its containers."""
    spec = PodSpec()
    meta = ObjectMeta(
        name=observed.name,
        namespace=observed.namespace,
        uid=observed.uid,
        deletion_timestamp=datetime.now(UTC),
    )
    for container in observed.containers:
        if any(known.name == container.name for known in spec.containers):
            continue
        info = parse_container(container.labels, container.annotations)
        lifecycle = Lifecycle(pre_stop=info.pre_stop) if info.pre_stop is not None else None
        spec.containers.append(Container(name=container.name, image=container.image, lifecycle=lifecycle))
        if info.pod_grace is not None:
            spec.termination_grace_period_seconds = info.pod_grace
        if info.deletion_grace is not None:
            meta.deletion_grace_period_seconds = info.deletion_grace
    return Pod(metadata=meta, spec=spec)


OUTPUT_BYTES = 1024
"""Bytes of a hook's output in its error; a container can print 16 MiB."""


class HookError(Exception):
    """A hook failed; the text is for log and status, never for an event."""


HTTPGet = Callable[[HTTPGetAction, Container, str], Awaitable[str | None]]
"""Sends the HTTP request of a hook to a pod IP and returns the reason of a failure, or None."""
PodIP = Callable[[str], str]
"""Returns a pod's IP address by its UID; empty when it has none."""


class HookRunner:
    """Runs lifecycle hooks; the caller bounds the time."""

    def __init__(
        self, cri: RuntimeConnection, http_get: HTTPGet, pod_ip: PodIP, metrics: StartMetrics | None = None
    ) -> None:
        self._metrics = metrics or StartMetrics()
        self._cri = cri
        self._http_get = http_get
        self._pod_ip = pod_ip

    async def run(self, pod: Pod, container: Container, container_id: str, hook: LifecycleHandler) -> None:
        """Run a hook. Raises HookError when it does not succeed."""
        if hook.exec is not None:
            await self._exec(pod, container, container_id, hook.exec.command)
        elif hook.http_get is not None:
            address = self._pod_ip(pod.uid)
            problem: str | None = "failed to find networking container: the pod has no address"
            if address or hook.http_get.host:
                problem = await self._http_get(hook.http_get, container, address)
            if problem:
                description = _names(pod, container)
                raise HookError(
                    f"HTTP lifecycle hook ({hook.http_get.path}) for {description} failed - error: {problem}"
                )
        elif hook.sleep is not None:
            try:
                await asyncio.sleep(hook.sleep.seconds)
            except asyncio.CancelledError:
                self._metrics.sleep_cut_short()
                raise
        else:
            raise HookError("the hook names no action that this agent knows (exec, httpGet, sleep)")

    async def _exec(self, pod: Pod, container: Container, container_id: str, command: list[str]) -> None:
        output = b""
        try:
            result = await self._cri.runtime.exec_sync(container_id, command, 0)
            if result.exit_code == 0:
                return
            stderr = _quoted_output(result.stderr)
            problem = f"command '{' '.join(command)}' exited with {result.exit_code}: {stderr}"
            output = result.stdout + result.stderr
        except CriError as err:
            problem = err.rpc_text
        line = f"[{' '.join(command)}]"
        raise HookError(
            f"Exec lifecycle hook ({line}) for {_names(pod, container)} failed - "
            f"error: {problem}, message: {quote(_quoted_output(output))}"
        )


def _names(pod: Pod, container: Container) -> str:
    meta = pod.metadata
    return f'Container "{container.name}" in Pod "{meta.name}_{meta.namespace}({meta.uid})"'


def _quoted_output(output: bytes) -> str:
    """Return the beginning of a command's output, for a message that goes into the pod's status."""
    return output[:OUTPUT_BYTES].decode(errors="replace")


MINIMUM_GRACE = 2
"""Minimum grace period in seconds."""
HOOK_EXIT_SECONDS = 1.0
"""Seconds for which an unfinished preStop hook may report its failure after its container has ended."""
_SLACK_SECONDS = 0.001
"""Seconds: an expired part of a grace period that is shorter counts as zero."""


class KillError(Exception):
    """A container or sandbox could not be stopped; it is retried. Users search for the text."""


def grace_period_for(pod: Pod, container: Container | None, reason: KillReason = "") -> int:
    """Return the grace period of a container in seconds."""
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


def stop_prerequisites(pod: Pod, running: Sequence[str]) -> dict[str, list[str]]:
    """Return, for each running sidecar, the running containers that must exit before it."""
    ordinary = [c.name for c in pod.spec.containers if c.name in running]
    order: dict[str, list[str]] = {}
    next_sidecar: str | None = None
    for container in reversed(pod.spec.init_containers):
        if is_sidecar(container) and container.name in running:
            order[container.name] = [*ordinary, *([next_sidecar] if next_sidecar else [])]
            next_sidecar = container.name
    return order


def _failure(action: str, target: str, err: CriError) -> str:
    text = json.dumps(err.rpc_text, ensure_ascii=False)
    return f'failed to "{action}" for "{target}" with {action}Error: {text}'


class _Stop:
    """The stop of one container, in progress."""

    def __init__(self, grace: float) -> None:
        loop = asyncio.get_running_loop()
        self.deadline = loop.time() + grace
        """End of the grace period, in loop time."""
        self.ended: asyncio.Future[None] = loop.create_future()
        """Done when StopContainer has returned; holds its CriError."""
        self.shortened: asyncio.Future[None] = loop.create_future()
        """Done when the deadline has changed; then replaced by a new future."""

    @property
    def remaining(self) -> int:
        """Rest of the grace period in seconds, rounded up."""
        left = self.deadline - asyncio.get_running_loop().time()
        return max(MINIMUM_GRACE, math.ceil(left - _SLACK_SECONDS))

    def shorten(self, grace: float) -> None:
        """End the grace period in `grace` seconds, unless it ends earlier."""
        loop = asyncio.get_running_loop()
        if (deadline := loop.time() + grace) >= self.deadline:
            return
        self.deadline = deadline
        self.shortened.set_result(None)
        self.shortened = loop.create_future()

    async def wait(self, other: asyncio.Future[Any]) -> bool:
        """Wait for a future until the grace period ends; return whether it is done."""
        clock = asyncio.get_running_loop().time
        while not other.done() and (left := self.deadline - clock()) > 0:
            futures = (other, self.shortened)
            await asyncio.wait(futures, timeout=wait_seconds(left), return_when=asyncio.FIRST_COMPLETED)
        return other.done()


class ContainerKiller:
    """Stops containers and pods."""

    def __init__(
        self, cri: RuntimeConnection, hooks: HookRunner, history: PodHistory, scope: TaskScope | None = None
    ) -> None:
        """Initialize with the scope that owns the tasks; without one they end with the event loop."""
        self._cri = cri
        self._hooks = hooks
        self._history = history
        self._scope = scope
        self._stops: dict[str, _Stop] = {}
        """Stops in progress, by container id."""
        self._tasks: set[asyncio.Task[None]] = set()

    async def kill_pod(self, pod: Pod | None, observed: ObservedPod, grace: int | None = None) -> None:
        """Stop all running containers of a pod, then its sandboxes.

        Raises KillError after all of them have been tried.
        """
        owner = pod or restored_pod(observed)
        alive = [c for c in observed.containers if c.phase in ("running", "unknown")]
        order = stop_prerequisites(owner, [container.name for container in alive])
        positions = {name: position for position, name in enumerate(order, 1)}
        by_name: dict[str, list[_Stop]] = {}
        for container in sorted(alive, key=lambda c: positions.get(c.name, 0)):
            after = [stop.ended for name in order.get(container.name, ()) for stop in by_name.get(name, ())]
            stop = self._ensure_stop(owner, container, grace=grace, after=after)
            by_name.setdefault(container.name, []).append(stop)
        problems = []
        for name, stops in by_name.items():
            for stop in stops:
                try:
                    await asyncio.shield(stop.ended)
                except CriError as err:
                    problems.append(_failure("KillContainer", name, err))
        for sandbox in observed.sandboxes:
            try:
                await self._cri.runtime.stop_pod_sandbox(sandbox.id)
            except NotFound:
                continue
            except CriError as err:
                problems.append(_failure("KillPodSandbox", observed.uid, err))
        if problems:
            raise KillError(problems[0] if len(problems) == 1 else f"[{', '.join(problems)}]")

    async def kill_container(
        self,
        pod: Pod,
        target: ObservedContainer,
        message: str = "",
        reason: KillReason = "",
        grace: int | None = None,
    ) -> None:
        """Stop one container within its grace period, or join its stop in progress.

        Raises CriError when StopContainer fails.
        """
        await asyncio.shield(self._ensure_stop(pod, target, message, reason, grace).ended)

    def _ensure_stop(
        self,
        pod: Pod,
        target: ObservedContainer,
        message: str = "",
        reason: KillReason = "",
        grace: int | None = None,
        after: Sequence[asyncio.Future[None]] = (),
    ) -> _Stop:
        """Start the stop of a container, or shorten the grace period of its stop in progress."""
        spec = _spec_of(pod, target.name)
        allowed = grace_period_for(pod, spec, reason) if grace is None else grace
        if (stop := self._stops.get(target.id)) is not None:
            stop.shorten(allowed)
            return stop
        where = field_of(pod, target.name)
        self._history.event(pod, "Normal", "Killing", message or f"Stopping container {target.name}", where)
        self._history.note(pod.uid, "kill", f"{target.name}: {message or 'stopping'} (grace {allowed} s)")
        stop = self._stops[target.id] = _Stop(allowed)
        has_hook = spec is not None and spec.lifecycle is not None and spec.lifecycle.pre_stop is not None
        self._start(self._run(stop, pod, target, spec if has_hook and allowed > 0 else None, after))
        return stop

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        if self._scope is not None:
            self._scope.start(work, name="stop-container")
            return
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(
        self,
        stop: _Stop,
        pod: Pod,
        target: ObservedContainer,
        hook_spec: Container | None,
        after: Sequence[asyncio.Future[None]],
    ) -> None:
        """Stop a container; `hook_spec` is its spec when its preStop hook has to run."""
        hook: asyncio.Task[None] | None = None
        failure: BaseException | None = None
        try:
            if hook_spec is not None:
                hook = asyncio.create_task(self._pre_stop(pod, hook_spec, target.id))
                if not await stop.wait(hook):
                    log.v(2).info(
                        "PreStop hook not completed in grace period",
                        pod=pod.full_name,
                        podUID=pod.uid,
                        containerName=target.name,
                        containerID=target.id,
                    )
            for ended in after:
                await stop.wait(ended)
            await self._stop_container(stop, pod, target)
            if hook is not None and hook_spec is not None:
                await _finish(hook, hook_spec)
        except asyncio.CancelledError:
            stop.ended.cancel()
            raise
        except Exception as err:  # passed on to all callers, which may all have been cancelled
            failure = err
        finally:
            if hook is not None:
                hook.cancel()
            del self._stops[target.id]
        if failure is None:
            stop.ended.set_result(None)
        else:
            stop.ended.set_exception(failure)
            stop.ended.exception()  # retrieved, so that the event loop does not log it

    async def _stop_container(self, stop: _Stop, pod: Pod, target: ObservedContainer) -> None:
        """Call StopContainer; call it again with less time when the grace period is shortened.

        Runtimes send the stop signal with the first call only.
        """
        clock = asyncio.get_running_loop().time
        while True:
            remaining, deadline = stop.remaining, stop.deadline
            end = clock() + remaining
            log.v(2).info(
                "Killing container with a grace period",
                pod=pod.full_name,
                podUID=pod.uid,
                containerName=target.name,
                containerID=target.id,
                gracePeriod=remaining,
            )
            call = asyncio.ensure_future(self._cri.runtime.stop_container(target.id, remaining))
            try:
                while not call.done() and (stop.deadline == deadline or clock() + stop.remaining >= end):
                    await asyncio.wait((call, stop.shortened), return_when=asyncio.FIRST_COMPLETED)
                if call.done():
                    call.result()
                    return
            except NotFound:
                log.v(3).info("Container not found, it was already removed", containerID=target.id)
                return
            finally:
                call.cancel()

    async def _pre_stop(self, pod: Pod, spec: Container, container_id: str) -> None:
        """Run the preStop hook; record an event if it fails."""
        assert spec.lifecycle is not None
        assert spec.lifecycle.pre_stop is not None
        try:
            await self._hooks.run(pod, spec, container_id, spec.lifecycle.pre_stop)
        except HookError as err:
            log.error(err, "PreStop hook failed", pod=pod.full_name, podUID=pod.uid, containerName=spec.name)
            # The hook's output stays out of the event: it may carry secrets.
            self._history.event(
                pod, "Warning", "FailedPreStopHook", "PreStopHook failed", field_of(pod, spec.name)
            )
        except Exception as err:  # a bug in a hook must not keep its container from being stopped
            log.exception(err, "Unexpected error in preStop hook", pod=pod.full_name, containerName=spec.name)


async def _finish(hook: asyncio.Task[None], spec: Container) -> None:
    """Wait up to HOOK_EXIT_SECONDS for the hook of an exited container: it fails without the container.

    A sleep hook is not waited for, because it does not end early.
    """
    assert spec.lifecycle is not None
    assert spec.lifecycle.pre_stop is not None
    if spec.lifecycle.pre_stop.sleep is None:
        await asyncio.wait((hook,), timeout=HOOK_EXIT_SECONDS)


def _spec_of(pod: Pod, name: str) -> Container | None:
    return containers_by_name(pod).get(name)


def containers_by_name(pod: Pod) -> Mapping[str, Container]:
    """Return all containers of a pod, of every type, by name."""
    spec = pod.spec
    return {c.name: c for c in (*spec.init_containers, *spec.containers, *spec.ephemeral_containers)}
