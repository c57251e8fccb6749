"""What happens to one pod in one step: look, decide, do, look again, report.

The stations are the same every time: the runtime's picture, the decision, volumes and cgroup, the
sandbox, the containers, the status. Each leaves a note in the pod's journal. A failure ends the
step; the next one starts from the runtime's picture again, so a step may be interrupted anywhere.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from pykubelet.api.backoff import BackOff
from pykubelet.api.meta import now as api_now
from pykubelet.api.pod import Container, Pod
from pykubelet.api.pod_status import PodStatus
from pykubelet.cri.connect import Cri
from pykubelet.cri.errors import CriError, NotFound
from pykubelet.logs import get_logger
from pykubelet.pods.journal import Journal, field_of
from pykubelet.probes.prober import Prober
from pykubelet.runtime.actions import Actions, Verdicts, decide
from pykubelet.runtime.hashing import container_hash
from pykubelet.runtime.kill import Killer, KillError, containers_by_name
from pykubelet.runtime.names import pod_log_dir
from pykubelet.runtime.observe import Observer
from pykubelet.runtime.observed import ObservedPod
from pykubelet.runtime.pod_dirs import PodDirs
from pykubelet.runtime.problems import ConfigProblem
from pykubelet.runtime.restart import is_sidecar
from pykubelet.runtime.start import PodSetting, Starter, StartError
from pykubelet.sync.pleg import Change
from pykubelet.sync.start_gate import StartGate
from pykubelet.sync.status import compute_status
from pykubelet.sync.status_containers import PodView, StartFailure
from pykubelet.sync.status_phase import TERMINAL
from pykubelet.sync.status_store import StatusStore
from pykubelet.sync.worker import Outcome, StepError
from pykubelet.volumes.errors import VolumeError
from pykubelet.volumes.mounted import MountedVolume

log = get_logger(__name__)

RETRY_SECONDS = 10.0
"""When to try again to start a container that could not be started."""


LAG_SECONDS = 0.05
"""When to look again for an exit that an event told of and that CRI does not show yet."""


class Volumes(Protocol):
    """Mounts a pod's volumes."""

    async def mount(self, pod: Pod) -> dict[str, MountedVolume]:
        """Have all of the pod's volumes ready; raises VolumeError."""
        ...

    async def sub_paths(
        self, pod: Pod, container: Container, mounted: Mapping[str, MountedVolume], paths: Mapping[int, str]
    ) -> dict[int, str]:
        """Have parts of volumes ready for a container, by the mount's index; raises VolumeError."""
        ...

    async def unmount(self, uid: str) -> None:
        """Take down whatever is mounted for a pod; raises VolumeError."""
        ...


class Cgroups(Protocol):
    """Makes and removes pods' cgroups."""

    async def ensure(self, pod: Pod) -> str:
        """Have the pod's cgroup with its limits; gives the name that the runtime takes. Raises OSError."""
        ...

    def uids(self) -> set[str]:
        """Pods that have a cgroup."""
        ...

    def update_qos(self, pods: Sequence[Pod]) -> None:
        """Share the machine among the classes of these pods."""
        ...

    async def remove(self, uid: str) -> None:
        """Remove the pod's cgroups, and kill what is still in them. Raises OSError."""
        ...


@dataclass(slots=True)
class _Memory:
    """What is remembered of a pod between steps."""

    order: int
    failures: dict[str, StartFailure] = field(default_factory=dict)
    restart_requested: set[str] = field(default_factory=set)
    observed: ObservedPod | None = None
    ended: set[str] = field(default_factory=set)
    """Containers that an event said have ended; CRI may not show it yet."""


class PodLifeOnNode:
    """The steps of a pod's life on this node; see `worker.PodLife` for their contract."""

    def __init__(
        self,
        *,
        cri: Cri,
        observer: Observer,
        starter: Starter,
        killer: Killer,
        prober: Prober,
        volumes: Volumes,
        cgroups: Cgroups,
        dirs: PodDirs,
        journal: Journal,
        statuses: StatusStore,
        gate: StartGate,
        crash_back_off: BackOff,
        host_ips: Sequence[str],
        pod_logs_dir: str,
        is_desired: Callable[[str], bool],
        on_gone: Callable[[str], None],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._cri = cri
        self._observer = observer
        self._starter = starter
        self._killer = killer
        self._prober = prober
        self._volumes = volumes
        self._cgroups = cgroups
        self._dirs = dirs
        self._journal = journal
        self._statuses = statuses
        self._gate = gate
        self._back_off = crash_back_off
        self._host_ips = host_ips
        self._pod_logs_dir = pod_logs_dir
        self._is_desired = is_desired
        self._on_gone = on_gone
        self._clock = clock
        self._memories: dict[str, _Memory] = {}
        self._arrivals = 0

    def observed(self, uid: str) -> ObservedPod | None:
        """The newest full picture of a pod."""
        memory = self._memories.get(uid)
        return memory.observed if memory else None

    def is_news(self, change: Change) -> bool:
        """Whether an event of the runtime says more than the picture of the pod shows."""
        memory = self._memories.get(change.uid)
        if memory is None or memory.observed is None or not change.container_id:
            return True
        known = next((c.phase for c in memory.observed.containers if c.id == change.container_id), "")
        if change.what == "ended" and known != "exited":
            memory.ended.add(change.container_id)
        return not (known == "exited" or (known == "running" and change.what == "started"))

    def request_restart(self, uid: str, container: str | None) -> list[str]:
        """Have running containers of a pod restarted in place at its next step; gives their names."""
        memory = self._memory(uid)
        running = memory.observed.running if memory.observed else ()
        chosen = [c for c in running if container in (None, c.name)]
        memory.restart_requested.update(c.id for c in chosen)
        return [c.name for c in chosen]

    async def sync(self, pod: Pod) -> Outcome:
        """Bring the pod nearer to its desired state."""
        memory = self._memory(pod.uid)
        observed = await self._look(pod.uid)
        status = self._report(pod, observed)
        if status.phase in TERMINAL:
            return True, None
        if (left := self._deadline_left(pod, status)) is not None and left <= 0:
            self._exceed_deadline(pod, status)
            return True, None
        actions = decide(pod, observed, self._verdicts(observed), frozenset(memory.restart_requested))
        if memory.ended:
            left = LAG_SECONDS
        if actions.idle:
            return False, left
        self._journal.note(pod.uid, "decide", _told(actions))
        again = await self._apply(pod, observed, actions)
        status = self._report(pod, await self._look(pod.uid))
        if status.phase in TERMINAL:
            return True, None
        if memory.ended:
            left = LAG_SECONDS
        return False, min((seconds for seconds in (again, left) if seconds is not None), default=None)

    async def terminate(self, uid: str, pod: Pod | None, grace: int | None) -> None:
        """Stop everything of the pod that runs."""
        observed = await self._look(uid)
        self._prober.stop_liveness_and_startup(uid)
        self._journal.note(uid, "terminate", f"stopping {len(observed.running)} running containers")
        try:
            await self._killer.pod(pod, observed, grace)
        except KillError as err:
            raise StepError(str(err)) from err
        observed = await self._look(uid)
        if observed.running:
            raise StepError(f"containers still run after being stopped: {[c.name for c in observed.running]}")
        if pod is not None:
            self._report(pod, observed, terminal=True)
        self._prober.remove_pod(uid)

    async def clean_up(self, uid: str, pod: Pod | None) -> None:
        """Remove what the pod leaves behind; a pod that is no longer wanted leaves nothing."""
        gone = not self._is_desired(uid)
        try:
            if gone:
                observed = await self._observer.pod(uid)
                self._remove_logs(uid, pod, observed)
                await self._remove_from_runtime(observed)
            await self._volumes.unmount(uid)
            await self._cgroups.remove(uid)
            if gone:
                self._dirs.remove(uid)
        except (OSError, VolumeError, CriError) as err:
            raise StepError(f"cleaning up: {err}") from err
        self._journal.note(
            uid, "clean-up", "everything is removed" if gone else "volumes and cgroup are removed"
        )
        memory = self._memories.pop(uid, None)
        if gone:
            self._statuses.forget(uid)
            self._journal.forget(uid)
            self._on_gone(uid)
        elif memory is not None and memory.observed is not None:
            self._memories[uid] = memory

    def _memory(self, uid: str) -> _Memory:
        memory = self._memories.get(uid)
        if memory is None:
            self._arrivals += 1
            memory = self._memories[uid] = _Memory(self._arrivals)
        return memory

    async def _look(self, uid: str) -> ObservedPod:
        memory = self._memory(uid)
        try:
            observed = await self._observer.pod(uid)
        except CriError as err:
            raise StepError(str(err)) from err
        memory.observed = observed
        running = {c.id for c in observed.running}
        memory.restart_requested &= running
        memory.ended &= running
        return observed

    def _report(self, pod: Pod, observed: ObservedPod, *, terminal: bool = False) -> PodStatus:
        self._prober.add_pod(pod)
        self._prober.observe(pod, observed)
        memory = self._memory(pod.uid)
        for container in observed.running:
            memory.failures.pop(container.name, None)
        view = PodView(
            pod=pod,
            observed=observed,
            previous=self._statuses.get(pod.uid) or pod.status,
            failures=memory.failures,
            health=self._prober.update_status(pod, observed),
            terminal=terminal,
            host_ips=self._host_ips,
        )
        status = compute_status(view, api_now())
        before = view.previous.phase
        if self._statuses.set(pod, status) and status.phase != before:
            self._journal.note(pod.uid, "status", f"{before or 'new'} → {status.phase}")
        return status

    def _verdicts(self, observed: ObservedPod) -> Verdicts:
        def known(kind: Literal["liveness", "startup"]) -> dict[str, bool]:
            found = {c.id: self._prober.results.verdict(kind, c.id) for c in observed.running}
            return {
                id: verdict == "success" for id, verdict in found.items() if verdict in ("success", "failure")
            }

        return Verdicts(liveness=known("liveness"), startup=known("startup"))

    def _deadline_left(self, pod: Pod, status: PodStatus) -> float | None:
        if pod.spec.active_deadline_seconds is None or status.start_time is None:
            return None
        return status.start_time.timestamp() + pod.spec.active_deadline_seconds - self._clock()

    def _exceed_deadline(self, pod: Pod, status: PodStatus) -> None:
        message = "Pod was active on the node longer than the specified deadline"
        self._journal.event(pod, "Normal", "DeadlineExceeded", message)
        status.phase, status.reason, status.message = "Failed", "DeadlineExceeded", message
        self._statuses.set(pod, status)

    async def _apply(self, pod: Pod, observed: ObservedPod, actions: Actions) -> float | None:
        """Do what was decided; gives in how many seconds to try again what failed."""
        memory = self._memory(pod.uid)
        if actions.create_sandbox and actions.sandbox_id:
            message = "Pod sandbox changed, it will be killed and re-created."
            self._journal.event(pod, "Normal", "SandboxChanged", message)
        try:
            await self._kill(pod, observed, actions)
        except (KillError, CriError) as err:
            raise StepError(str(err)) from err
        if actions.kill_pod and not actions.create_sandbox:
            return None
        setting = await self._prepare(pod)
        try:
            config = self._starter.sandbox_config(pod, actions.attempt, setting)
        except ConfigProblem as err:
            self._journal.event(
                pod, "Warning", "FailedCreatePodSandBox", f"Failed to create pod sandbox: {err}"
            )
            raise StepError(str(err)) from err
        sandbox_id, ips = actions.sandbox_id, observed.ips
        if actions.create_sandbox:
            try:
                async with self._gate.turn(memory.order):
                    sandbox_id, ips = await self._starter.sandbox(pod, config)
            except CriError as err:
                raise StepError(str(err)) from err
            self._journal.note(
                pod.uid, "sandbox", f"running as {sandbox_id[:13]} with {', '.join(ips) or 'host network'}"
            )
        again: list[float] = []
        containers = containers_by_name(pod)
        for name in (*actions.start_ephemeral, *actions.start_init, *actions.start):
            container = containers[name]
            if wait := self._crash_wait(pod, container, observed):
                again.append(wait)
            else:
                try:
                    image = await self._starter.image(pod, container, config)
                    async with self._gate.turn(memory.order):
                        await self._starter.container(
                            pod, container, image, sandbox_id, config, setting, ips, observed
                        )
                    memory.failures.pop(name, None)
                    self._journal.note(pod.uid, "start", f"{name} started")
                    continue
                except StartError as err:
                    memory.failures[name] = StartFailure(err.reason, err.message)
                    self._journal.note(pod.uid, "start", f"{name}: {err.reason}: {err.message}")
                    again.append(RETRY_SECONDS if err.retry_after is None else err.retry_after)
            if name in actions.start_init and not is_sidecar(container):
                break
        return min(again, default=None)

    async def _kill(self, pod: Pod, observed: ObservedPod, actions: Actions) -> None:
        if actions.kill_pod:
            if observed.sandboxes or observed.containers:
                await self._killer.pod(pod, observed)
            if actions.create_sandbox:
                # Traces of an earlier sandbox's initialization would pass for this one's.
                initial = {container.name for container in pod.spec.init_containers}
                for container in observed.containers:
                    if container.name in initial:
                        await self._remove_container(container.id)
            return
        for kill in actions.kill:
            await self._killer.container(pod, kill.container, kill.message, kill.reason)

    async def _prepare(self, pod: Pod) -> PodSetting:
        self._dirs.make(pod.uid)
        try:
            cgroup_parent = await self._cgroups.ensure(pod)
        except OSError as err:
            message = f"unable to ensure pod container exists: {err}"
            self._journal.event(pod, "Warning", "FailedToCreatePodContainer", message)
            raise StepError(message) from err
        try:
            volumes = await self._volumes.mount(pod)
        except VolumeError as err:
            self._journal.event(pod, "Warning", "FailedMount", str(err))
            self._journal.note(pod.uid, "volumes", str(err))
            raise StepError(str(err)) from err
        return PodSetting(cgroup_parent=cgroup_parent, volumes=volumes)

    def _crash_wait(self, pod: Pod, container: Container, observed: ObservedPod) -> float:
        """Seconds until a crashed container may start again; 0 starts its next pause."""
        memory = self._memory(pod.uid)
        last = next(
            (c for c in observed.containers if c.name == container.name and c.phase == "exited"), None
        )
        if last is None:
            return 0.0
        key, ended, now = (
            f"{pod.uid}/{container.name}/{container_hash(container)}",
            last.finished_at / 1e9,
            self._clock(),
        )
        wait = self._back_off.remaining(key, ended, now)
        if wait <= 0:
            self._back_off.attempt(key, ended, now)
            return 0.0
        who = f"{pod.metadata.name}_{pod.metadata.namespace}({pod.uid})"
        message = f"Back-off restarting failed container {container.name} in pod {who}"
        self._journal.event(pod, "Warning", "BackOff", message, field_of(pod, container.name))
        pause = self._back_off.pause(key)
        memory.failures[container.name] = StartFailure(
            "CrashLoopBackOff",
            f"back-off {_span(pause)} restarting failed container={container.name} pod={who}",
        )
        return wait

    async def _remove_from_runtime(self, observed: ObservedPod) -> None:
        for container in observed.containers:
            await self._remove_container(container.id)
        for sandbox in observed.sandboxes:
            try:
                await self._cri.runtime.stop_pod_sandbox(sandbox.id)
                await self._cri.runtime.remove_pod_sandbox(sandbox.id)
            except NotFound:
                continue

    async def _remove_container(self, container_id: str) -> None:
        try:
            await self._cri.runtime.remove_container(container_id)
        except NotFound:
            return

    def _remove_logs(self, uid: str, pod: Pod | None, observed: ObservedPod) -> None:
        """Delete the folder of the pod's logs; its name is made of facts that the runtime has too."""
        name = pod.metadata.name if pod else observed.name
        namespace = pod.metadata.namespace if pod else observed.namespace
        if name and namespace:
            shutil.rmtree(pod_log_dir(self._pod_logs_dir, namespace, name, uid), ignore_errors=True)


def _told(actions: Actions) -> str:
    parts = []
    if actions.create_sandbox:
        parts.append(f"new sandbox ({actions.why})")
    elif actions.kill_pod:
        parts.append("stop the pod: nothing of it shall run again")
    parts += [kill.message for kill in actions.kill]
    starts = [*actions.start_ephemeral, *actions.start_init, *actions.start]
    if starts:
        parts.append(f"start {', '.join(starts)}")
    return "; ".join(parts)


def _span(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes}m{rest}s" if minutes else f"{rest}s"
