"""Lifecycle hooks: what a container wants done after its start and before its end."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from pykubelet.api.pod import Container, HTTPGetAction, LifecycleHandler, Pod
from pykubelet.cri.connect import Cri
from pykubelet.cri.errors import CriError
from pykubelet.runtime.metrics import StartMetrics


class HookError(Exception):
    """A hook failed; the text is for the log and the status, never for an event."""


HTTPGet = Callable[[HTTPGetAction, Container, str], Awaitable[str | None]]
"""Makes a hook's request to a pod's address and gives the reason of a failure, or None."""

PodIP = Callable[[str], str]
"""Gives a pod's address by its uid; empty when it has none."""


class HookRunner:
    """Runs hooks; the caller bounds the time."""

    def __init__(
        self, cri: Cri, http_get: HTTPGet, pod_ip: PodIP, metrics: StartMetrics | None = None
    ) -> None:
        self._metrics = metrics or StartMetrics()
        self._cri = cri
        self._http_get = http_get
        self._pod_ip = pod_ip

    async def run(self, pod: Pod, container: Container, container_id: str, hook: LifecycleHandler) -> None:
        """Do what the hook says; raises HookError when it did not succeed."""
        if hook.exec is not None:
            await self._exec(container_id, hook.exec.command)
        elif hook.http_get is not None:
            address = self._pod_ip(pod.uid)
            if not address and not hook.http_get.host:
                raise HookError("the pod has no address for the hook's request")
            if problem := await self._http_get(hook.http_get, container, address):
                raise HookError(problem)
        elif hook.sleep is not None:
            try:
                await asyncio.sleep(hook.sleep.seconds)
            except asyncio.CancelledError:
                self._metrics.sleep_cut_short()
                raise
        else:
            raise HookError("the hook names no action that this agent knows (exec, httpGet, sleep)")

    async def _exec(self, container_id: str, command: list[str]) -> None:
        try:
            result = await self._cri.runtime.exec_sync(container_id, command, 0)
        except CriError as err:
            raise HookError(f"Exec lifecycle hook ({command}) failed: {err}") from err
        if result.exit_code != 0:
            output = (result.stdout + result.stderr)[:1024].decode(errors="replace")
            raise HookError(
                f"Exec lifecycle hook ({command}) exited with {result.exit_code}, message: {output!r}"
            )
