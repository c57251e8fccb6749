"""Removal of what a finished pod leaves: containers, sandboxes, logs and directory."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Set as AbstractSet

from pykubelet.api.pod import Pod
from pykubelet.cri.connect import RuntimeConnection
from pykubelet.kuberuntime.kill import restored_pod
from pykubelet.kuberuntime.observe import Observer
from pykubelet.kuberuntime.observed import ObservedPod
from pykubelet.kuberuntime.paths import PodDirs
from pykubelet.kuberuntime.removal import remove_container
from pykubelet.podsync.contract import Remnants, SyncError
from pykubelet.transport.errors import CriError, NotFound
from pykubelet.util.tasks import finish_in_thread


class RemnantRemover:
    """Removes the remnants of finished pods; nothing else waits for it."""

    def __init__(
        self,
        cri: RuntimeConnection,
        observer: Observer,
        dirs: PodDirs,
        remove_logs: Callable[[Pod], None],
        on_removed: Callable[[str], None],
    ) -> None:
        """Initialize; `remove_logs` removes a pod's logs and may block, `on_removed` gets its uid."""
        self._cri = cri
        self._observer = observer
        self._dirs = dirs
        self._remove_logs = remove_logs
        self._on_removed = on_removed

    async def remove(self, remnants: Remnants) -> None:
        """Remove everything. Raises SyncError after having tried all of it."""
        uid = remnants.uid
        # After a failed attempt, the runtime has to be queried for what is left.
        observed, remnants.observed = remnants.observed, None
        try:
            if observed is None:
                observed = await self._observer.observe_pod(uid)
        except CriError as err:
            raise SyncError(f"cannot remove pod: {err}") from err
        problems = await self._remove_from_runtime(observed, remnants.stopped)
        pod = remnants.pod or restored_pod(observed)
        try:
            # In a thread: containers may have created any number of files there.
            await finish_in_thread(lambda: self._remove_logs(pod))
            await finish_in_thread(lambda: self._dirs.remove(uid))
        except OSError as err:
            problems.append(str(err))
        if problems:
            raise SyncError(f"cannot remove pod: {'; '.join(problems)}")
        self._on_removed(uid)

    async def _remove_from_runtime(self, observed: ObservedPod, stopped: AbstractSet[str]) -> list[str]:
        """Remove containers and sandboxes; return the errors. `stopped` sandboxes are not stopped again."""
        problems: list[str] = []
        held = set()
        for container in observed.containers:
            try:
                await remove_container(self._cri, container.id)
            except CriError as err:
                problems.append(str(err))
                held.add(container.sandbox_id)
        for sandbox in observed.sandboxes:
            # Removing a sandbox would force the removal of its containers.
            if sandbox.id in held:
                continue
            try:
                # Stop once: tearing down a network again takes as long as the first time.
                if sandbox.id not in stopped:
                    await self._cri.runtime.stop_pod_sandbox(sandbox.id)
                await self._cri.runtime.remove_pod_sandbox(sandbox.id)
            except NotFound:
                continue
            except CriError as err:
                problems.append(str(err))
        return problems
