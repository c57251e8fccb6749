"""Lifecycle hooks: what a container wants done after its start and before its end."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from pykubelet.api.downward import quote
from pykubelet.api.pod import Container, HTTPGetAction, LifecycleHandler, Pod
from pykubelet.cri.connect import Cri
from pykubelet.cri.errors import CriError
from pykubelet.runtime.metrics import StartMetrics

OUTPUT_BYTES = 1024
"""How much of a hook's output its failure shows; a container can print 16 MiB."""


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
            await self._exec(pod, container, container_id, hook.exec.command)
        elif hook.http_get is not None:
            address = self._pod_ip(pod.uid)
            problem: str | None = "failed to find networking container: the pod has no address"
            if address or hook.http_get.host:
                problem = await self._http_get(hook.http_get, container, address)
            if problem:
                who = _names(pod, container)
                raise HookError(
                    f"HTTP lifecycle hook ({hook.http_get.path}) for {who} failed - error: {problem}"
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
            stderr = _shown(result.stderr)
            problem = f"command '{' '.join(command)}' exited with {result.exit_code}: {stderr}"
            output = result.stdout + result.stderr
        except CriError as err:
            problem = err.rpc_text
        line = f"[{' '.join(command)}]"
        raise HookError(
            f"Exec lifecycle hook ({line}) for {_names(pod, container)} failed - "
            f"error: {problem}, message: {quote(_shown(output))}"
        )


def _names(pod: Pod, container: Container) -> str:
    meta = pod.metadata
    return f'Container "{container.name}" in Pod "{meta.name}_{meta.namespace}({meta.uid})"'


def _shown(output: bytes) -> str:
    """Return the beginning of a command's output, for a message that goes into the pod's status."""
    return output[:OUTPUT_BYTES].decode(errors="replace")
