"""The decision: from a pod and what the runtime has of it to what shall be done.

`decide` is the heart of the agent and does nothing itself. Its answer names the sandbox to make,
the containers to kill with the reason, and those to start: init containers one after the other,
sidecars (init containers that stay) beside them, ephemeral ones at any time, ordinary ones once
initialization is over. Calling it again with the new facts leads step by step to a pod that needs
nothing more; whoever applies it may be interrupted at any point.

Whether a container that is not running should run again: the restart policies, purely.

What goes, and in which order, when all containers of a pod begin anew in the sandbox that they have.

One container's end may restart all (`RestartAllContainers`). Then every trace of the pod's init and
ordinary containers is removed, so that the pod is initialized again as on its first day; the sandbox,
its addresses and the volumes stay, and so do ephemeral containers, which somebody looks through.

The containers whose end is the reason go last. An agent that dies in between thus still finds why it
all began, and its successor goes on, without having to be told.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from pykubelet.api.pod import Container, Pod, PodSpec, RestartRule, is_sidecar
from pykubelet.cm.resize import NOTHING, ContainerResize, ResizePlan
from pykubelet.kuberuntime.labels import container_hash
from pykubelet.kuberuntime.observe import ObservedContainer, ObservedPod

RESTART_ALL = "RestartAllContainers"
"""The action of a rule by which one container's end restarts all of them in place."""


def restarts_after_failure(pod: Pod, container: Container) -> bool:
    """Whether a failure of a container that is still there (a probe) leads to a restart."""
    return (container.restart_policy or pod.spec.restart_policy) != "Never"


def should_restart(pod: Pod, container: Container, last: ObservedContainer | None) -> bool:
    """Whether the container shall be started, given its newest incarnation."""
    if pod.metadata.deletion_timestamp is not None:
        return False
    if last is None or last.phase in ("created", "unknown"):
        return True
    return last.phase == "exited" and restarts_after_exit(pod, container, last.exit_code)


def restarts_after_exit(pod: Pod, container: Container, exit_code: int) -> bool:
    """Whether the policies want a container that ended this way to run again."""
    if container.restart_policy_rules:
        rule = _rule_for(container, exit_code)
        if rule is not None and rule.action in ("Restart", RESTART_ALL):
            return True
    policy = container.restart_policy or pod.spec.restart_policy
    return policy == "Always" or (policy == "OnFailure" and exit_code != 0)


def always_restarts(pod: Pod) -> bool:
    """Return whether every ordinary container runs again however it ended."""
    return all(
        (container.restart_policy or pod.spec.restart_policy) == "Always" for container in pod.spec.containers
    )


def restarts_all(container: Container, exit_code: int) -> bool:
    """Whether all containers of the pod shall begin anew after this one ended this way."""
    rule = _rule_for(container, exit_code)
    return rule is not None and rule.action == RESTART_ALL


def may_restart_all(spec: PodSpec) -> bool:
    """Whether any container's end could restart all of them."""
    return any(
        rule.action == RESTART_ALL
        for containers in (spec.init_containers, spec.containers)
        for container in containers
        for rule in container.restart_policy_rules
    )


def _rule_for(container: Container, exit_code: int) -> RestartRule | None:
    """Give the rule that decides: the first one that fits, whatever the ones after it say."""
    return next((rule for rule in container.restart_policy_rules if _fits(rule, exit_code)), None)


def _fits(rule: RestartRule, exit_code: int) -> bool:
    codes = rule.exit_codes
    return codes is not None and (exit_code in codes.values) == (codes.operator == "In")


Waves = Sequence[Sequence[ObservedContainer]]
"""Containers to stop and remove, one wave after the other; those of a wave do not wait for each other."""


def reset_waves(pod: Pod, observed: ObservedPod) -> Waves:
    """Give all of the pod's containers in the order in which they go; the last wave are the reasons."""
    init, ordinary = pod.spec.init_containers, pod.spec.containers
    reasons = [c for spec in (*ordinary, *init) for c in _traces(observed, spec) if _is_reason(spec, c)]
    spared = {container.id for container in reasons}

    def others(spec: Container) -> list[ObservedContainer]:
        return [container for container in _traces(observed, spec) if container.id not in spared]

    # Sidecars serve the ordinary containers and those after them, as at the pod's end.
    waves = [[c for spec in ordinary for c in others(spec)], *(others(spec) for spec in reversed(init))]
    return [wave for wave in (*waves, reasons) if wave]


def reasons_of(pod: Pod, observed: ObservedPod) -> list[ObservedContainer]:
    """Give the containers whose end, as the newest of their name, asks for all to begin anew."""
    found = []
    for spec in (*pod.spec.init_containers, *pod.spec.containers):
        if spec.restart_policy_rules:
            last = observed.latest(spec.name)
            if last is not None and _is_reason(spec, last):
                found.append(last)
    return found


def is_reset(pod: Pod, observed: ObservedPod) -> bool:
    """Whether there is no trace of any init or ordinary container: nothing has begun, or nothing is left."""
    return not any(
        observed.latest(container.name) for container in (*pod.spec.init_containers, *pod.spec.containers)
    )


def _traces(observed: ObservedPod, spec: Container) -> list[ObservedContainer]:
    return [container for container in observed.containers if container.name == spec.name]


def _is_reason(spec: Container, container: ObservedContainer) -> bool:
    return container.phase == "exited" and restarts_all(spec, container.exit_code)


KillReason = Literal["", "Unknown", "StartupProbe", "LivenessProbe", "Requested", "Resize"]


class ProbeResults(msgspec.Struct, frozen=True):
    """What the probes say, by container id: True healthy, False failed, absent not known yet."""

    liveness: Mapping[str, bool] = {}
    startup: Mapping[str, bool] = {}


class Kill(msgspec.Struct, frozen=True):
    """A container to stop, and why."""

    container: ObservedContainer
    message: str
    reason: KillReason = ""


class Resize(msgspec.Struct):
    """What is done to a pod that shall have other resources, without a restart."""

    containers: dict[str, ContainerResize] = {}
    """By id."""
    pod: bool = False
    """Whether the pod's own cgroup is to be looked at whatever its containers need."""
    whole: bool = False
    """Whether what is written for the whole pod has changed."""

    def __bool__(self) -> bool:
        return bool(self.containers) or self.pod or self.whole


class Actions(msgspec.Struct, kw_only=True):
    """What shall be done, in the order of the fields."""

    reset: Waves = ()
    """Stop and remove all of these, and nothing else: the next decision begins anew in the same sandbox."""
    kill_pod: bool = False
    """Stop every container and sandbox first."""
    kill: list[Kill] = []
    resize: Resize = msgspec.field(default_factory=Resize)
    create_sandbox: bool = False
    attempt: int = 0
    """The attempt number of the sandbox to create."""
    sandbox_id: str = ""
    """The sandbox there is: to use, or (with `create_sandbox`) the one that is replaced."""
    start_ephemeral: list[str] = []
    start_init: list[str] = []
    start: list[str] = []
    why: str = ""
    """The sandbox's story in a few words, for the timeline."""

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do."""
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
    verdicts: ProbeResults | None = None,
    restart_requested: frozenset[str] = frozenset(),
    resizes: ResizePlan = NOTHING,
    *,
    restart_all: bool = False,
) -> Actions:
    """Say what brings the pod nearer to its desired state.

    `restart_requested` holds ids of containers that a person wants restarted in place, `resizes` says
    which running ones do not have the resources that they shall have, `restart_all` that all containers
    shall begin anew.
    """
    if restart_all:
        return Actions(reset=reset_waves(pod, observed))
    verdicts = verdicts or ProbeResults()
    actions = _sandbox(pod, observed)
    if actions.create_sandbox:
        _start_over(pod, observed, actions)
        actions.resize.pod = resizes.pod and actions.create_sandbox
        return actions
    actions.start_ephemeral = [
        c.name for c in pod.spec.ephemeral_containers if observed.latest(c.name) is None
    ]
    actions.resize.pod = resizes.pod
    initialized = _initialize(pod, observed, verdicts, restart_requested, resizes, actions)
    if not actions.kill_pod and initialized:
        _run(pod, observed, verdicts, restart_requested, resizes, actions)
        actions.resize.whole = resizes.whole
    if actions.kill_pod:
        actions.resize = Resize()
    return actions


def sandbox_is_stale(pod: Pod, observed: ObservedPod) -> bool:
    """Whether the pod has no sandbox, or one that must be replaced."""
    return _sandbox(pod, observed).create_sandbox


def _sandbox(pod: Pod, observed: ObservedPod) -> Actions:
    """Decide on the sandbox alone; a new one means that everything is killed first."""

    def replace(why: str, old: str) -> Actions:
        return Actions(
            kill_pod=True, create_sandbox=True, attempt=newest.attempt + 1, sandbox_id=old, why=why
        )

    if not observed.sandboxes:
        return Actions(kill_pod=True, create_sandbox=True, why="no sandbox yet")
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
    """Fill in what follows a new sandbox; a pod that is done gets none."""
    if pod.spec.restart_policy == "Never" and actions.attempt != 0 and not is_reset(pod, observed):
        actions.create_sandbox = False
        return
    wanted = [c for c in pod.spec.containers if not _finished_for_good(pod, c, observed)]
    if not wanted and any(observed.latest(c.name) for c in pod.spec.containers):
        actions.create_sandbox = False
    elif pod.spec.init_containers:
        actions.start_init = [pod.spec.init_containers[0].name]
    else:
        actions.start = [c.name for c in wanted]


def _finished_for_good(pod: Pod, container: Container, observed: ObservedPod) -> bool:
    if (container.restart_policy or pod.spec.restart_policy) != "OnFailure":
        return False
    last = observed.latest(container.name)
    return last is not None and last.phase == "exited" and last.exit_code == 0


def _initialize(
    pod: Pod,
    observed: ObservedPod,
    verdicts: ProbeResults,
    requested: frozenset[str],
    resizes: ResizePlan,
    actions: Actions,
) -> bool:
    """Decide on the init containers; True when ordinary containers may run.

    Walks from the last init container to the first: the runtime may have lost the earlier ones,
    so the newest trace decides how far initialization got.
    """
    init = pod.spec.init_containers
    if not init:
        return True
    # Ordinary containers in being prove initialization, whatever is left of the init containers. Exited ones
    # do not: they may be of an earlier sandbox.
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
        begun: bool | None
        if sidecar:
            begun = _keep_sidecar(index, container, last, verdicts, requested, resizes, actions, start)
        else:
            if last.phase == "running":
                _resize(resizes, last, actions)
            begun = _advance_init(index, pod, container, last, actions, start)
            if begun is None:
                return False
        if begun:
            if index == len(init) - 1:
                done = True
            elif not passed:
                start.append(index + 1)
        passed = True
    if not passed:
        start.append(0)
    actions.start_init = [init[index].name for index in sorted(set(start))]
    return done


def _keep_sidecar(
    index: int,
    container: Container,
    last: ObservedContainer,
    verdicts: ProbeResults,
    requested: frozenset[str],
    resizes: ResizePlan,
    actions: Actions,
    start: list[int],
) -> bool:
    """Decide on a sidecar that exists; True when the next init container need not wait for it."""

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
        started = verdicts.startup.get(last.id)
        if started is False:
            restart(f"Init container {container.name} failed startup probe", "StartupProbe")
        if not started:
            return False
    if last.id in requested:
        restart(f"Init container {container.name} is restarted on request", "Requested")
    elif last.hash != container_hash(container):
        restart(f"Init container {container.name} definition changed", "")
    elif container.liveness_probe is not None and verdicts.liveness.get(last.id) is False:
        restart(f"Init container {container.name} failed liveness probe", "LivenessProbe")
    elif _resize(resizes, last, actions):
        restart(_resized(container), "Resize")
    return True


def _advance_init(
    index: int, pod: Pod, container: Container, last: ObservedContainer, actions: Actions, start: list[int]
) -> bool | None:
    """Decide on an init container that exists: True done, False not yet, None the pod has failed."""
    if last.phase == "running":
        return False
    if last.phase == "created":
        # Creating and starting is one step here; one that is only created was refused by the runtime.
        start.append(index)
        return False
    if last.phase == "exited" and last.exit_code == 0:
        return True
    again = (
        should_restart(pod, container, last)
        if last.phase == "exited"
        else restarts_after_failure(pod, container)
    )
    if not again:
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
    verdicts: ProbeResults,
    requested: frozenset[str],
    resizes: ResizePlan,
    actions: Actions,
) -> None:
    """Decide on the ordinary containers; a pod of which nothing runs and nothing shall is killed."""
    keep = 0
    for container in pod.spec.containers:
        last = observed.latest(container.name)
        if last is None or last.phase != "running":
            if should_restart(pod, container, last):
                actions.start.append(container.name)
                if last is not None and last.phase == "unknown":
                    message = 'Container is in "unknown" state, try killing it before restart'
                    actions.kill.append(Kill(last, message, "Unknown"))
            continue
        kill = _fault_of(container, last, verdicts, requested)
        if kill is None:
            if _resize(resizes, last, actions):
                actions.kill.append(Kill(last, _resized(container), "Resize"))
                actions.start.append(container.name)
            else:
                keep += 1
            continue
        if kill.reason in ("", "Requested") or restarts_after_failure(pod, container):
            kill = Kill(last, f"{kill.message}, will be restarted", kill.reason)
            actions.start.append(container.name)
        actions.kill.append(kill)
    if keep == 0 and not actions.start:
        actions.kill_pod = True
        actions.start_init = []


def _fault_of(
    container: Container, last: ObservedContainer, verdicts: ProbeResults, requested: frozenset[str]
) -> Kill | None:
    """Why a running container must go, or None."""
    if last.hash != container_hash(container):
        return Kill(last, f"Container {container.name} definition changed")
    if last.id in requested:
        return Kill(last, f"Container {container.name} is restarted on request", "Requested")
    if verdicts.liveness.get(last.id) is False:
        return Kill(last, f"Container {container.name} failed liveness probe", "LivenessProbe")
    if verdicts.startup.get(last.id) is False:
        return Kill(last, f"Container {container.name} failed startup probe", "StartupProbe")
    return None


def _resize(resizes: ResizePlan, last: ObservedContainer, actions: Actions) -> bool:
    """Have a container that is kept resized, if it needs that; True when it has to be restarted for it."""
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
