"""Status of one container, from its spec, its instances in the runtime and the previous status.

The runtime loses state: dead containers are removed, nodes reboot, the kubelet restarts. A container once
reported as terminated stays so, and one that vanished is reported as terminated with an unknown result
rather than as never started, because users and controllers act on the difference.

While all containers restart in place (RestartAllContainers), the condition `AllContainersRestarting` is
true from the termination of the container that triggered it until no old container is left. The restart is
decided by this condition, so it continues under a kubelet that did not see its beginning. Pods that are
being deleted or are terminal do not restart.

The resources in the status are the runtime's values, else the actuated ones; without a resize in progress
they are the allocated ones as written in the spec. The kernel's CPU units are coarser than those of the
API: an amount at the kernel's minimum stands for any amount up to it. All functions are pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Literal

import msgspec

from pykubelet.api.meta import Resources
from pykubelet.api.pod import Container, Pod, ResourceRequirements, VolumeMount, is_sidecar
from pykubelet.api.pod_status import (
    ContainerState,
    ContainerStateRunning,
    ContainerStateTerminated,
    ContainerStateWaiting,
    ContainerStatus,
    ContainerUser,
    ImageVolumeStatus,
    LinuxUser,
    PodCondition,
    PodStatus,
    ResourceStatus,
    StatusResources,
    VolumeMountStatus,
    VolumeStatus,
)
from pykubelet.api.quantity import Quantity
from pykubelet.cm.qos import DEFAULT_PERIOD, MIN_QUOTA, MIN_SHARES
from pykubelet.kuberuntime.configuration.mounts import absolute_path
from pykubelet.kuberuntime.decide import is_reset, may_restart_all, restart_all_causes, should_restart
from pykubelet.kuberuntime.observed import ActualResources, ObservedContainer, ObservedPod
from pykubelet.probes.types import Health

RESTART_CONDITION = "AllContainersRestarting"
RESTART_REASON = "RestartingAllContainers"
"""Reason of the waiting state and of the last termination of a container removed for the restart."""
_MESSAGE = "The container is removed because RestartAllContainers in place"


def has_restart_condition(status: PodStatus) -> bool:
    """Return whether the condition AllContainersRestarting is true."""
    return any(
        condition.type == RESTART_CONDITION and condition.status == "True" for condition in status.conditions
    )


def is_restarting(pod: Pod, observed: ObservedPod, previous: PodStatus, *, terminal: bool) -> bool:
    """Return whether all containers restart: it was reported, or the exit of a container triggers it."""
    if terminal or pod.metadata.deletion_timestamp is not None or not may_restart_all(pod.spec):
        return False
    return has_restart_condition(previous) or bool(restart_all_causes(pod, observed))


def restart_condition(
    pod: Pod, observed: ObservedPod, previous: PodStatus, phase: str, *, terminal: bool, now: datetime
) -> list[PodCondition]:
    """Return the condition AllContainersRestarting, if the pod has such a restart rule."""
    if not may_restart_all(pod.spec):
        return []
    status, reason, message = "False", "", ""
    if phase in ("Succeeded", "Failed"):
        reason = "PodCompleted" if phase == "Succeeded" else "PodFailed"
    elif is_restarting(pod, observed, previous, terminal=terminal) and not is_reset(pod, observed):
        status, reason = "True", "RestartAllContainersStarted"
        message = "container exited with restart policy rule"
    before = next(
        (
            condition
            for condition in previous.conditions
            if condition.type == RESTART_CONDITION and condition.status == status
        ),
        None,
    )
    return [
        PodCondition(
            type=RESTART_CONDITION,
            status=status,
            last_transition_time=now if before is None else before.last_transition_time,
            reason=reason or msgspec.UNSET,
            message=message or msgspec.UNSET,
        )
    ]


def removed_for_restart(status: ContainerStatus, old: ContainerStatus) -> None:
    """Set the states of a container removed for the restart, to distinguish it from one that never ran."""
    ended = ContainerStateTerminated(exit_code=137, reason=RESTART_REASON, message=_MESSAGE)
    status.state = ContainerState(waiting=ContainerStateWaiting(reason=RESTART_REASON, message=_MESSAGE))
    status.last_state = ContainerState(terminated=ended)
    status.restart_count = old.restart_count + 1


def will_run_again(status: ContainerStatus) -> bool:
    """Return whether RestartAllContainers ended a container, which then restarts regardless of its policy."""
    ended = status.state.terminated or status.last_state.terminated
    return ended is not None and ended.reason == RESTART_REASON


_NANOS_PER_MILLI = 10**6
_MIN_LIMIT = MIN_QUOTA * 1000 // DEFAULT_PERIOD
"""Smallest CPU limit that the kernel supports, in millicores."""


def actual_resources(
    allocated: ResourceRequirements, seen: ObservedContainer, actuated: ResourceRequirements | None
) -> StatusResources:
    """Return the resources of a container for its status; `actuated` is None if unknown."""
    reported = seen.resources or ActualResources()
    is_actuated = actuated is None or actuated == allocated
    if seen.phase != "running" or (is_actuated and seen.resources is None):
        return StatusResources(limits=allocated.limits, requests=allocated.requests)
    known = actuated or allocated
    limits, requests = dict(allocated.limits), dict(allocated.requests)
    if limits:
        _set_actual(limits, "cpu", _cpu(reported.cpu_limit), known.limits, minimum=_MIN_LIMIT)
        _set_actual(limits, "memory", _bytes(reported.memory_limit), known.limits)
    if requests:
        _set_actual(requests, "cpu", _cpu(reported.cpu_request), known.requests, minimum=MIN_SHARES)
        _set_actual(requests, "memory", None, known.requests)
    return StatusResources(limits=limits, requests=requests)


def _set_actual(
    amounts: Resources, name: str, reported: Quantity | None, known: Resources, minimum: int = 0
) -> None:
    """Set one amount to the runtime's value, else to the known one, unless both are at most `minimum`."""
    requested = amounts.get(name)
    actual = reported if reported is not None else known.get(name)
    if actual is None:
        amounts.pop(name, None)
    elif actual != requested and max(actual.milli, requested.milli if requested is not None else 0) > minimum:
        amounts[name] = actual


def _cpu(milli: int) -> Quantity | None:
    return Quantity(milli * _NANOS_PER_MILLI) if milli else None


def _bytes(size: int) -> Quantity | None:
    return Quantity.from_units(size, "binary") if size else None


Kind = Literal["ordinary", "init", "ephemeral"]
LOST_EXIT_CODE = 137
"""Exit code reported for a container whose termination was not observed."""
UNKNOWN_REASON = "ContainerStatusUnknown"
"""Reason reported with this exit code."""


@dataclass(frozen=True, slots=True)
class StartFailure:
    """Last start failure of a container: a reason such as `ErrImagePull`, and the message."""

    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class StatusInputs:
    """Inputs of a pod's status."""

    pod: Pod
    observed: ObservedPod
    previous: PodStatus = field(default_factory=PodStatus)
    failures: Mapping[str, StartFailure] = field(default_factory=dict)
    health: Mapping[str, Health] = field(default_factory=dict)
    terminal: bool = False
    """Whether no container will run again (the pod worker has terminated the pod)."""
    host_ips: Sequence[str] = ()
    runtime_name: str = "containerd"
    recursive_handlers: frozenset[str] = frozenset()
    """Runtime handlers that support recursive read-only mounts."""
    reports_ready_to_start: bool = True
    """Whether the pod has the condition PodReadyToStartContainers, as with its feature gate."""
    reports_image_volumes: bool = False
    """Whether mounts of images have the image's reference, as with the feature gate ImageVolumeWithDigest."""
    stays_initialized: bool = True
    """Whether `Initialized` stays true when init containers run again, as with the feature gate
    RestartAllContainersOnContainerExits."""
    resizes: Sequence[PodCondition] = ()
    """Conditions of a resize."""
    actuated: Mapping[str, ResourceRequirements] = field(default_factory=dict)
    """Actuated resources by container name, where known."""
    in_force: StatusResources | None = None
    """Resources enforced by the pod's cgroup, if reported instead of the spec's."""
    device_health: Mapping[str, list[ResourceStatus]] = field(default_factory=dict)
    """Health of allocated devices by container name."""
    pull_messages: Mapping[str, str] = field(default_factory=dict)
    """Messages about long pulls by container name; upstream has none (kubernetes #19077)."""


def container_statuses(inputs: StatusInputs, kind: Kind) -> list[ContainerStatus]:
    """Return the statuses of all containers of one type: init containers in their order, others by name."""
    spec, previous = inputs.pod.spec, inputs.previous
    containers, before = {
        "ordinary": (spec.containers, previous.container_statuses),
        "init": (spec.init_containers, previous.init_container_statuses),
        "ephemeral": (spec.ephemeral_containers, previous.ephemeral_container_statuses),
    }[kind]
    old = {status.name: status for status in before}
    statuses = [_status(inputs, container, kind, old.get(container.name)) for container in containers]
    return statuses if kind == "init" else sorted(statuses, key=lambda status: status.name)


def api_time(nanoseconds: int) -> datetime | None:
    """Return a runtime's time in the API's resolution of seconds; None for 0."""
    return datetime.fromtimestamp(nanoseconds // 1_000_000_000, UTC) if nanoseconds else None


def _status(
    inputs: StatusInputs, container: Container, kind: Kind, old: ContainerStatus | None
) -> ContainerStatus:
    incarnations = [c for c in inputs.observed.containers if c.name == container.name][:2]
    if incarnations:
        status = _runtime_status(inputs, container, incarnations, old)
    else:
        status = _missing_status(inputs, container, kind, old)
    _explain_waiting(inputs, container, kind, status)
    if kind == "ephemeral":
        return status
    if kind == "ordinary":
        status.allocated_resources_status = inputs.device_health.get(container.name) or msgspec.UNSET
    health = inputs.health.get(container.name, Health(started=False, ready=False))
    status.started, status.ready = health.started, health.ready
    if kind == "init" and not is_sidecar(container):
        # The runtime may have removed it; its reported termination decides.
        status.ready = status.state.terminated is not None and status.state.terminated.exit_code == 0
    return status


def _runtime_status(
    inputs: StatusInputs,
    container: Container,
    incarnations: Sequence[ObservedContainer],
    old: ContainerStatus | None,
) -> ContainerStatus:
    newest = incarnations[0]
    status = ContainerStatus(
        name=container.name,
        state=_state(inputs, newest, old),
        restart_count=newest.restart_count,
        image=newest.image,
        image_id=newest.image_id,
        container_id=f"{inputs.runtime_name}://{newest.id}",
        resources=actual_resources(container.resources, newest, inputs.actuated.get(container.name)),
    )
    if newest.phase == "unknown" and status.state.terminated is not None and old is not None:
        status.restart_count = old.restart_count + 1
    if old is not None:
        status.restart_count = max(status.restart_count, old.restart_count)
        status.last_state = _last_state_after(old, status)
    if len(incarnations) > 1:
        status.last_state = _state(inputs, incarnations[1], old)
    if container.resources.requests:
        status.allocated_resources = container.resources.requests
    if container.volume_mounts:
        status.volume_mounts = _mounts(inputs, container.volume_mounts, dict(newest.image_mounts))
    if newest.user is not None:
        uid, gid, groups = newest.user
        status.user = ContainerUser(linux=LinuxUser(uid=uid, gid=gid, supplemental_groups=list(groups)))
    return status


def _last_state_after(old: ContainerStatus, new: ContainerStatus) -> ContainerState:
    if old.container_id != new.container_id and old.state.terminated is not None:
        return ContainerState(terminated=old.state.terminated)
    return old.last_state


def _state(inputs: StatusInputs, container: ObservedContainer, old: ContainerStatus | None) -> ContainerState:
    if container.phase == "running":
        return ContainerState(running=ContainerStateRunning(started_at=api_time(container.started_at)))
    if container.phase == "exited":
        return ContainerState(
            terminated=ContainerStateTerminated(
                exit_code=container.exit_code,
                reason=container.reason or msgspec.UNSET,
                message=container.message or msgspec.UNSET,
                started_at=api_time(container.started_at),
                finished_at=api_time(container.finished_at),
                container_id=f"{inputs.runtime_name}://{container.id}",
            )
        )
    if container.phase == "unknown" and old is not None and old.state.running is not None:
        return _lost(
            "The container could not be located when the pod was terminated",
            RESTART_REASON if _restarting(inputs) else UNKNOWN_REASON,
        )
    return ContainerState(waiting=ContainerStateWaiting())


def _lost(message: str, reason: str = UNKNOWN_REASON) -> ContainerState:
    ended = ContainerStateTerminated(exit_code=LOST_EXIT_CODE, reason=reason, message=message)
    return ContainerState(terminated=ended)


def _restarting(inputs: StatusInputs) -> bool:
    return is_restarting(inputs.pod, inputs.observed, inputs.previous, terminal=inputs.terminal)


def _missing_status(
    inputs: StatusInputs, container: Container, kind: Kind, old: ContainerStatus | None
) -> ContainerStatus:
    """Return the status of a container that is not in the runtime: not created yet, or removed."""
    restarting = kind != "ephemeral" and old is not None and _restarting(inputs)
    if old is not None and old.state.terminated is not None and not restarting:
        return msgspec.structs.replace(old)
    reason = "PodInitializing" if inputs.pod.spec.init_containers else "ContainerCreating"
    status = ContainerStatus(
        name=container.name,
        image=container.image,
        state=ContainerState(
            waiting=ContainerStateWaiting(reason=reason, message=inputs.pull_messages.get(container.name, ""))
        ),
    )
    if container.volume_mounts:
        status.volume_mounts = _mounts(inputs, container.volume_mounts)
    if old is None:
        return status
    status.restart_count, status.last_state = old.restart_count, old.last_state
    if restarting:
        if old.state.waiting is None:
            removed_for_restart(status, old)
        return status
    if old.state.running is not None and old.last_state.terminated is None:
        status.last_state = _lost(
            "The container could not be located when the pod was deleted.  The container used to be Running"
        )
        if inputs.pod.metadata.deletion_timestamp is None:
            status.restart_count += 1
    return status


def _explain_waiting(inputs: StatusInputs, container: Container, kind: Kind, status: ContainerStatus) -> None:
    """Set a container that will be restarted to waiting, with the reason of the last failure."""
    last = inputs.observed.latest(container.name)
    if kind == "init":
        if last is not None and last.phase == "exited" and last.exit_code == 0:
            return
        started = any(inputs.observed.latest(ordinary.name) for ordinary in inputs.pod.spec.containers)
        if (
            last is None
            and started
            and not is_sidecar(container)
            and status.state.waiting is not None
            and not _restarting(inputs)
        ):
            message = (
                "Unable to get init container status from container runtime and pod has been initialized, "
                "treat it as exited normally"
            )
            ended = ContainerStateTerminated(exit_code=0, reason="Completed", message=message)
            status.state = ContainerState(terminated=ended)
            return
    failure = inputs.failures.get(container.name)
    if failure is None or not should_restart(inputs.pod, container, last):
        return
    if status.state.terminated is not None:
        status.last_state = status.state
    waiting = ContainerStateWaiting(reason=failure.reason, message=failure.message)
    status.state = ContainerState(waiting=waiting)


def _mounts(
    inputs: StatusInputs, mounts: Sequence[VolumeMount], images: Mapping[str, str] = MappingProxyType({})
) -> list[VolumeMountStatus]:
    return [
        VolumeMountStatus(
            name=mount.name,
            mount_path=mount.mount_path,
            read_only=mount.read_only,
            recursive_read_only=_recursive(inputs, mount) if mount.read_only else None,
            volume_status=_image_status(images.get(absolute_path(mount.mount_path), ""))
            if inputs.reports_image_volumes
            else None,
        )
        for mount in mounts
    ]


def _image_status(image_ref: str) -> VolumeStatus | None:
    return VolumeStatus(image=ImageVolumeStatus(image_ref=image_ref)) if image_ref else None


def _recursive(inputs: StatusInputs, mount: VolumeMount) -> str:
    is_recursive = mount.recursive_read_only in ("Enabled", "IfPossible")
    return "Enabled" if is_recursive and _can_recurse(inputs) else "Disabled"


def _can_recurse(inputs: StatusInputs) -> bool:
    newest = next(iter(inputs.observed.sandboxes), None)
    if newest is None:
        # Without a sandbox the handler of the RuntimeClass is not resolved yet.
        return not inputs.pod.spec.runtime_class_name and "" in inputs.recursive_handlers
    return newest.runtime_handler in inputs.recursive_handlers
