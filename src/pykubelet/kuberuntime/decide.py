"""Computation of pod actions: what to kill, create, start, resize or restart for a pod.

`decide` is pure. Its result names the sandbox to create, the containers to kill with the reason, and those to
start: init containers one after the other, sidecars (init containers that keep running) in parallel to them,
ephemeral containers at any time, and ordinary containers once initialization is complete. Calling it
repeatedly with the new state converges to a pod that needs no action; applying the actions may be interrupted
at any point.

The restart rules of a container may restart all containers of its pod (`RestartAllContainers`). Then all
instances of the pod's init and ordinary containers are removed, so that the pod is initialized again; the
sandbox, its IP addresses and the volumes stay, and so do ephemeral containers, because they are debugging
sessions. The containers whose exit is the cause are removed last: a kubelet that is killed in between still
finds the cause, and the next process continues.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from pykubelet.api.pod import Container, Pod, PodSpec, RestartRule, is_sidecar
from pykubelet.cm.resize import NO_RESIZE, ContainerResize, ResizePlan
from pykubelet.kuberuntime.labels import container_hash
from pykubelet.kuberuntime.observed import ObservedContainer, ObservedPod

RESTART_ALL = "RestartAllContainers"
"""Rule action that restarts all containers of the pod in place."""


def restarts_after_failure(pod: Pod, container: Container) -> bool:
    """Return whether a container with a failed probe is restarted."""
    return (container.restart_policy or pod.spec.restart_policy) != "Never"


def should_restart(pod: Pod, container: Container, last: ObservedContainer | None) -> bool:
    """Return whether to start the container, given its newest instance."""
    if pod.metadata.deletion_timestamp is not None:
        return False
    if last is None or last.phase in ("created", "unknown"):
        return True
    return last.phase == "exited" and restarts_after_exit(pod, container, last.exit_code)


def restarts_after_exit(pod: Pod, container: Container, exit_code: int) -> bool:
    """Return whether the restart policy restarts a container that exited with this code."""
    if container.restart_policy_rules:
        rule = _rule_for(container, exit_code)
        if rule is not None and rule.action in ("Restart", RESTART_ALL):
            return True
    policy = container.restart_policy or pod.spec.restart_policy
    return policy == "Always" or (policy == "OnFailure" and exit_code != 0)


def always_restarts(pod: Pod) -> bool:
    """Return whether every ordinary container is restarted, whatever its exit code, even in a new sandbox."""
    # A pod of policy Never with exited containers gets no new sandbox, whatever the policies of containers.
    return pod.spec.restart_policy != "Never" and all(
        (container.restart_policy or pod.spec.restart_policy) == "Always" for container in pod.spec.containers
    )


def restarts_all(container: Container, exit_code: int) -> bool:
    """Return whether all containers of the pod are restarted after this one exited with this code."""
    rule = _rule_for(container, exit_code)
    return rule is not None and rule.action == RESTART_ALL


def may_restart_all(spec: PodSpec) -> bool:
    """Return whether the exit of any container can restart all of them."""
    return any(
        rule.action == RESTART_ALL
        for containers in (spec.init_containers, spec.containers)
        for container in containers
        for rule in container.restart_policy_rules
    )


def _rule_for(container: Container, exit_code: int) -> RestartRule | None:
    """Return the first restart rule that matches; later ones are ignored."""
    return next((rule for rule in container.restart_policy_rules if _fits(rule, exit_code)), None)


def _fits(rule: RestartRule, exit_code: int) -> bool:
    codes = rule.exit_codes
    return codes is not None and (exit_code in codes.values) == (codes.operator == "In")


Waves = Sequence[Sequence[ObservedContainer]]
"""Containers to stop and remove, wave by wave; those of a wave are handled concurrently."""


def reset_waves(pod: Pod, observed: ObservedPod) -> Waves:
    """Return the pod's containers in removal order; the last wave are the containers that are the cause."""
    init, ordinary = pod.spec.init_containers, pod.spec.containers
    reasons = [c for spec in (*ordinary, *init) for c in _instances(observed, spec) if _is_reason(spec, c)]
    cause_ids = {container.id for container in reasons}

    def other_instances(spec: Container) -> list[ObservedContainer]:
        return [container for container in _instances(observed, spec) if container.id not in cause_ids]

    # Sidecars serve the ordinary containers and the later init containers, as in pod termination.
    waves = [
        [c for spec in ordinary for c in other_instances(spec)],
        *(other_instances(spec) for spec in reversed(init)),
    ]
    return [wave for wave in (*waves, reasons) if wave]


def restart_all_causes(pod: Pod, observed: ObservedPod) -> list[ObservedContainer]:
    """Return the newest instances of containers whose exit restarts all containers."""
    found = []
    for spec in (*pod.spec.init_containers, *pod.spec.containers):
        if spec.restart_policy_rules:
            last = observed.latest(spec.name)
            if last is not None and _is_reason(spec, last):
                found.append(last)
    return found


def is_reset(pod: Pod, observed: ObservedPod) -> bool:
    """Return whether no instance of any init or ordinary container exists."""
    return not any(
        observed.latest(container.name) for container in (*pod.spec.init_containers, *pod.spec.containers)
    )


def _instances(observed: ObservedPod, spec: Container) -> list[ObservedContainer]:
    return [container for container in observed.containers if container.name == spec.name]


def _is_reason(spec: Container, container: ObservedContainer) -> bool:
    return container.phase == "exited" and restarts_all(spec, container.exit_code)


KillReason = Literal["", "Unknown", "StartupProbe", "LivenessProbe", "Requested", "Resize"]


class ProbeResults(msgspec.Struct, frozen=True):
    """Probe results by container ID: True succeeded, False failed, absent unknown."""

    liveness: Mapping[str, bool] = {}
    startup: Mapping[str, bool] = {}


class Kill(msgspec.Struct, frozen=True):
    """A container to stop, with the event message and the reason."""

    container: ObservedContainer
    message: str
    reason: KillReason = ""


class Resize(msgspec.Struct):
    """Resources to change without a restart."""

    containers: dict[str, ContainerResize] = {}
    """Resizes by container ID."""
    pod: bool = False
    """Whether the pod's cgroup must be checked even if no container changes."""
    pod_level: bool = False
    """Whether the pod-level resources have changed."""

    def __bool__(self) -> bool:
        return bool(self.containers) or self.pod or self.pod_level


class Actions(msgspec.Struct, kw_only=True):
    """Actions for a pod, in the order of the fields."""

    reset: Waves = ()
    """Containers to stop and remove, exclusively; the next decision starts over in the same sandbox."""
    kill_pod: bool = False
    """Whether to stop all containers and sandboxes first."""
    kill: list[Kill] = []
    resize: Resize = msgspec.field(default_factory=Resize)
    create_sandbox: bool = False
    attempt: int = 0
    """Attempt number of the sandbox to create."""
    sandbox_id: str = ""
    """Existing sandbox: to use, or (with `create_sandbox`) to replace."""
    start_ephemeral: list[str] = []
    start_init: list[str] = []
    start: list[str] = []
    reason: str = ""
    """Reason for a new sandbox, for the timeline."""

    @property
    def idle(self) -> bool:
        """Whether there are no actions."""
        return not (
            self.reset
            or self.kill_pod
            or self.kill
            or self.resize
            or self.create_sandbox
            or self.start_ephemeral
            or self.start_init
            or self.start
        )


def decide(
    pod: Pod,
    observed: ObservedPod,
    probe_results: ProbeResults | None = None,
    restart_requested: frozenset[str] = frozenset(),
    resizes: ResizePlan = NO_RESIZE,
    *,
    restart_all: bool = False,
) -> Actions:
    """Return the actions that move the pod towards its desired state.

    `restart_requested` holds the IDs of containers to restart in place on a user's request, `resizes` the
    running containers whose resources differ from the allocated ones; `restart_all`: restart all containers.
    """
    if restart_all:
        return Actions(reset=reset_waves(pod, observed))
    probe_results = probe_results or ProbeResults()
    actions = _sandbox(pod, observed)
    if actions.create_sandbox:
        _start_over(pod, observed, actions)
        actions.resize.pod = resizes.pod and actions.create_sandbox
        return actions
    actions.start_ephemeral = [
        c.name for c in pod.spec.ephemeral_containers if observed.latest(c.name) is None
    ]
    actions.resize.pod = resizes.pod
    initialized = _initialize(pod, observed, probe_results, restart_requested, resizes, actions)
    if not actions.kill_pod and initialized:
        _run(pod, observed, probe_results, restart_requested, resizes, actions)
        actions.resize.pod_level = resizes.pod_level
    if actions.kill_pod:
        actions.resize = Resize()
    return actions


def sandbox_is_stale(pod: Pod, observed: ObservedPod) -> bool:
    """Return whether the pod has no sandbox, or one that must be replaced."""
    return _sandbox(pod, observed).create_sandbox


def stale_sandbox_is_due(pod: Pod, observed: ObservedPod) -> bool:
    """Return whether the sandbox is stale and the next sync would stop something of it or replace it."""
    actions = _sandbox(pod, observed)
    if not actions.create_sandbox:
        return False
    _start_over(pod, observed, actions)
    is_active = bool(observed.running) or any(sandbox.ready for sandbox in observed.sandboxes)
    return actions.create_sandbox or is_active


def _sandbox(pod: Pod, observed: ObservedPod) -> Actions:
    """Compute the actions for the sandbox only; a new one requires that everything is killed first."""

    def replace(reason: str, old: str) -> Actions:
        return Actions(
            kill_pod=True, create_sandbox=True, attempt=newest.attempt + 1, sandbox_id=old, reason=reason
        )

    if not observed.sandboxes:
        return Actions(kill_pod=True, create_sandbox=True, reason="no sandbox yet")
    newest = observed.sandboxes[0]
    if sum(sandbox.ready for sandbox in observed.sandboxes) > 1:
        return replace("several sandboxes are ready", newest.id)
    if not newest.ready:
        return replace("the sandbox is not ready", newest.id)
    if newest.host_network != pod.spec.host_network:
        return replace("the pod's network has changed", "")
    if not pod.spec.host_network and not newest.ips:
        return replace("the sandbox has no address", newest.id)
    return Actions(attempt=newest.attempt, sandbox_id=newest.id)


def _start_over(pod: Pod, observed: ObservedPod, actions: Actions) -> None:
    """Add the containers to start in a new sandbox; a completed pod gets no sandbox."""
    if pod.spec.restart_policy == "Never" and actions.attempt != 0 and not is_reset(pod, observed):
        actions.create_sandbox = False
        return
    to_run = [c for c in pod.spec.containers if not _finished_for_good(pod, c, observed)]
    if not to_run and any(observed.latest(c.name) for c in pod.spec.containers):
        actions.create_sandbox = False
    elif pod.spec.init_containers:
        actions.start_init = [pod.spec.init_containers[0].name]
    else:
        actions.start = [c.name for c in to_run]


def _finished_for_good(pod: Pod, container: Container, observed: ObservedPod) -> bool:
    if (container.restart_policy or pod.spec.restart_policy) != "OnFailure":
        return False
    last = observed.latest(container.name)
    return last is not None and last.phase == "exited" and last.exit_code == 0


def _initialize(
    pod: Pod,
    observed: ObservedPod,
    probe_results: ProbeResults,
    requested: frozenset[str],
    resizes: ResizePlan,
    actions: Actions,
) -> bool:
    """Compute the actions for init containers; return whether ordinary containers may run.

    Iterates from the last init container to the first: the runtime may have lost the earlier ones, so the
    newest existing instance determines the progress of initialization.
    """
    init = pod.spec.init_containers
    if not init:
        return True
    # Existing ordinary containers prove initialization, whatever is left of the init containers. Exited ones
    # do not: they may belong to an earlier sandbox.
    latest = (observed.latest(container.name) for container in pod.spec.containers)
    done = any(last is not None and last.phase in ("created", "running") for last in latest)
    passed = done
    start: list[int] = []
    for index in reversed(range(len(init))):
        container = init[index]
        last = observed.latest(container.name)
        sidecar = is_sidecar(container)
        if last is None:
            if passed and sidecar:
                start.append(index)
            continue
        if passed and not sidecar:
            continue
        started_now: bool | None
        if sidecar:
            started_now = _sync_sidecar(
                index, container, last, probe_results, requested, resizes, actions, start
            )
        else:
            if last.phase == "running":
                _resize(resizes, last, actions)
            started_now = _advance_init(index, pod, container, last, actions, start)
            if started_now is None:
                return False
        if started_now:
            if index == len(init) - 1:
                done = True
            elif not passed:
                start.append(index + 1)
        passed = True
    if not passed:
        start.append(0)
    actions.start_init = [init[index].name for index in sorted(set(start))]
    return done


def _sync_sidecar(
    index: int,
    container: Container,
    last: ObservedContainer,
    probe_results: ProbeResults,
    requested: frozenset[str],
    resizes: ResizePlan,
    actions: Actions,
    start: list[int],
) -> bool:
    """Compute the actions for an existing sidecar; return whether the next init container may start."""

    def restart(message: str, reason: KillReason) -> None:
        actions.kill.append(Kill(last, message, reason))
        start.append(index)

    if last.phase == "unknown":
        restart('Init container is in "unknown" state, try killing it before restart', "Unknown")
        return False
    if last.phase != "running":
        start.append(index)
        return False
    if container.startup_probe is not None:
        started = probe_results.startup.get(last.id)
        if started is False:
            restart(f"Init container {container.name} failed startup probe", "StartupProbe")
        if not started:
            return False
    if last.id in requested:
        restart(f"Init container {container.name} is restarted on request", "Requested")
    elif last.hash != container_hash(container):
        restart(f"Init container {container.name} definition changed", "")
    elif container.liveness_probe is not None and probe_results.liveness.get(last.id) is False:
        restart(f"Init container {container.name} failed liveness probe", "LivenessProbe")
    elif _resize(resizes, last, actions):
        restart(_resized(container), "Resize")
    return True


def _advance_init(
    index: int, pod: Pod, container: Container, last: ObservedContainer, actions: Actions, start: list[int]
) -> bool | None:
    """Compute the actions for an existing init container: True done, False not yet, None pod failed."""
    if last.phase == "running":
        return False
    if last.phase == "created":
        # Create and start are one step: a container that is only created failed to start.
        start.append(index)
        return False
    if last.phase == "exited" and last.exit_code == 0:
        return True
    needs_restart = (
        should_restart(pod, container, last)
        if last.phase == "exited"
        else restarts_after_failure(pod, container)
    )
    if not needs_restart:
        actions.kill_pod = True
        return None
    if last.phase == "unknown":
        message = 'Init container is in "unknown" state, try killing it before restart'
        actions.kill.append(Kill(last, message, "Unknown"))
    start.append(index)
    return False


def _run(
    pod: Pod,
    observed: ObservedPod,
    probe_results: ProbeResults,
    requested: frozenset[str],
    resizes: ResizePlan,
    actions: Actions,
) -> None:
    """Compute the actions for ordinary containers; kill the pod if no container runs or will start."""
    remaining = 0
    for container in pod.spec.containers:
        last = observed.latest(container.name)
        if last is None or last.phase != "running":
            if should_restart(pod, container, last):
                actions.start.append(container.name)
                if last is not None and last.phase == "unknown":
                    message = 'Container is in "unknown" state, try killing it before restart'
                    actions.kill.append(Kill(last, message, "Unknown"))
            continue
        kill = _kill_for(container, last, probe_results, requested)
        if kill is None:
            if _resize(resizes, last, actions):
                actions.kill.append(Kill(last, _resized(container), "Resize"))
                actions.start.append(container.name)
            else:
                remaining += 1
            continue
        if kill.reason in ("", "Requested") or restarts_after_failure(pod, container):
            kill = Kill(last, f"{kill.message}, will be restarted", kill.reason)
            actions.start.append(container.name)
        actions.kill.append(kill)
    if remaining == 0 and not actions.start:
        actions.kill_pod = True
        actions.start_init = []


def _kill_for(
    container: Container, last: ObservedContainer, probe_results: ProbeResults, requested: frozenset[str]
) -> Kill | None:
    """Return the reason to kill a running container, or None."""
    if last.hash != container_hash(container):
        return Kill(last, f"Container {container.name} definition changed")
    if last.id in requested:
        return Kill(last, f"Container {container.name} is restarted on request", "Requested")
    if probe_results.liveness.get(last.id) is False:
        return Kill(last, f"Container {container.name} failed liveness probe", "LivenessProbe")
    if probe_results.startup.get(last.id) is False:
        return Kill(last, f"Container {container.name} failed startup probe", "StartupProbe")
    return None


def _resize(resizes: ResizePlan, last: ObservedContainer, actions: Actions) -> bool:
    """Add the resize of a running container, if any; return whether it requires a restart."""
    resize = resizes.containers.get(last.name)
    if resize is None:
        return False
    if resize.restart:
        actions.resize.pod = True
        return True
    actions.resize.containers[last.id] = resize
    return False


def _resized(container: Container) -> str:
    return f"Container {container.name} resize requires restart"
