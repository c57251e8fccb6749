"""The step that takes a pod's containers away so that all begin anew."""

import asyncio
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from pykubelet.api.pod import Container, ExitCodes, Pod, RestartRule, is_sidecar
from pykubelet.kuberuntime.decide import Waves, may_restart_all, restarts_after_exit
from pykubelet.kuberuntime.kill import ContainerKiller
from pykubelet.kuberuntime.labels import container_hash
from pykubelet.kuberuntime.observed import ContainerPhase, ObservedContainer, ObservedPod, ObservedSandbox
from pykubelet.kuberuntime.removal import ContainerRemover
from pykubelet.podconfig.pod_history import PodHistory
from pykubelet.podsync.contract import PodSyncState, SyncError
from pykubelet.podsync.restart_all import RestartAll
from pykubelet.podsync.syncer import NodePodSyncer
from pykubelet.probes.prober import Prober
from pykubelet.resize.allocation_manager import AllocationManager
from pykubelet.status.compute import StatusStore
from pykubelet.status.containers import StartFailure, has_restart_condition
from pykubelet.transport.errors import CriError, NotFound
from tests.support.pods import make_pod
from tests.unit.podsync.syncers import Sources, make_stages, make_syncer

BORN = 1_000.0
ALL_ON_3 = RestartRule(action="RestartAllContainers", exit_codes=ExitCodes(operator="In", values=[3]))
ONE_ON_3 = RestartRule(action="Restart", exit_codes=ExitCodes(operator="In", values=[3]))
BOX = ObservedSandbox(id="box", ready=True, created_at=1, ips=("10.0.0.2",))


def a_pod(policy: str = "Never") -> Pod:
    pod = make_pod(policy="Never", containers=("main", "other"), init=("side",))
    rules = [ALL_ON_3, ONE_ON_3]
    pod.spec.containers[0] = Container(name="main", restart_policy=policy, restart_policy_rules=rules)
    pod.spec.init_containers[0] = Container(name="side", restart_policy="Always")
    return pod


class Runtime:
    """A runtime that remembers what it was asked to do; some containers are stuck, some take their time."""

    def __init__(self, *, stuck: str = "", slow: str = "", lost: str = "") -> None:
        self.calls: list[str] = []
        self.graces: set[int] = set()
        self._stuck, self._slow, self._lost = stuck, slow, lost

    async def stop_container(self, id: str, grace: int) -> None:
        self.graces.add(grace)
        if id == self._slow:
            await asyncio.sleep(grace)
        self.calls.append(f"stop {id}")
        if id == self._lost:
            raise NotFound("StopContainer", "NotFound", "gone")

    async def remove_container(self, id: str) -> None:
        if id == self._stuck:
            raise CriError("RemoveContainer", "Unknown", f"{id} is stuck")
        self.calls.append(f"remove {id}")


def trace(name: str, phase: ContainerPhase, code: int = 0) -> ObservedContainer:
    (spec,) = [c for c in (*a_pod().spec.init_containers, *a_pod().spec.containers) if c.name == name]
    return ObservedContainer(
        id=name,
        name=name,
        phase=phase,
        exit_code=code,
        created_at=int(BORN * 1e9),
        hash=container_hash(spec),
        sandbox_id="box",
    )


OTHER, SIDE, MAIN = trace("other", "running"), trace("side", "running"), trace("main", "exited", 3)
WAVES: Waves = [[OTHER], [SIDE], [MAIN]]


def subject(runtime: Runtime, journal: PodHistory | None = None, *, now: float = BORN + 60) -> RestartAll:
    cri: Any = SimpleNamespace(runtime=runtime)
    hooks: Any = SimpleNamespace()
    journal = journal or PodHistory()
    return RestartAll(
        ContainerKiller(cri, hooks, journal), ContainerRemover(cri, None), journal, lambda: now, enabled=True
    )


@pytest.mark.looptime
async def test_restart_all_clear_removes_waves_in_order_with_minimum_grace() -> None:
    runtime, journal, memory = (
        Runtime(slow="other", lost="side"),
        PodHistory(),
        PodSyncState(order=1, current=True),
    )
    memory.failures["other"] = StartFailure("CrashLoopBackOff", "of its life before")
    assert await subject(runtime, journal).clear(a_pod(), WAVES, memory) == 0
    assert runtime.calls == ["stop other", "remove other", "stop side", "remove side", "remove main"]
    assert runtime.graces == {2}
    assert not memory.current
    assert not memory.failures
    told = [event for event in journal.events("u1") if event.reason == "Killing"]
    assert [event.message.split()[1] for event in told] == ["other", "side"]


@pytest.mark.looptime
async def test_restart_all_clear_containers_of_wave_stopped_concurrently() -> None:
    runtime = Runtime(slow="other")
    await subject(runtime).clear(a_pod(), [[OTHER, trace("main", "running")], [SIDE]], PodSyncState(order=1))
    assert runtime.calls[:4] == ["stop main", "remove main", "stop other", "remove other"]


async def test_restart_all_clear_removal_fails_later_waves_untouched() -> None:
    runtime, memory = Runtime(stuck="other"), PodSyncState(order=1)
    with pytest.raises(SyncError, match="other is stuck"):
        await subject(runtime).clear(a_pod(), [[OTHER, trace("other", "exited")], [SIDE], [MAIN]], memory)
    assert not any("side" in call or "main" in call for call in runtime.calls)


@pytest.mark.parametrize(("age", "wait"), [(0.0, 1.0), (0.75, 0.25), (1.0, 0.0), (60.0, 0.0), (-5.0, 0.0)])
async def test_restart_all_clear_young_container_waits_until_one_second_old(age: float, wait: float) -> None:
    runtime = Runtime()
    again = await subject(runtime, now=BORN + age).clear(a_pod(), [[MAIN]], PodSyncState(order=1))
    assert again == pytest.approx(wait)
    assert runtime.calls == ([] if wait else ["remove main"])


@pytest.mark.parametrize(("policy", "again"), [("Never", False), ("OnFailure", True)])
def test_restart_all_disabled_rule_matches_and_policy_decides(policy: str, again: bool) -> None:
    parts: Any = None
    pod = a_pod(policy)
    switched_off = RestartAll(parts, parts, PodHistory(), lambda: BORN, enabled=False)
    plain = switched_off.honoured(pod)
    # Not the rule after it: that one is for ends that none before it fits.
    assert restarts_after_exit(plain, plain.spec.containers[0], 3) == again
    assert restarts_after_exit(pod, pod.spec.containers[0], 3)
    assert plain.uid == pod.uid
    assert container_hash(plain.spec.containers[0]) == container_hash(pod.spec.containers[0])
    unruly = make_pod()
    assert switched_off.honoured(unruly) is unruly


@pytest.mark.parametrize("rules", [True, False])
def test_restart_all_container_rules_only_with_gate(rules: bool) -> None:
    parts: Any = None
    subject = RestartAll(parts, parts, PodHistory(), lambda: BORN, enabled=rules, container_rules=rules)
    pod = a_pod("Always")
    first = Container(name="first", restart_policy="OnFailure", restart_policy_rules=[ONE_ON_3])
    pod.spec.init_containers.append(first)
    pod.spec.init_containers[0].restart_policy_rules = [ALL_ON_3]
    seen = subject.honoured(pod)
    main, first = seen.spec.containers[0], seen.spec.init_containers[1]
    assert restarts_after_exit(seen, main, 3) == rules
    assert restarts_after_exit(seen, main, 0) == rules
    assert restarts_after_exit(seen, first, 1) == rules
    assert is_sidecar(seen.spec.init_containers[0]), "the policy that makes a sidecar stays"
    assert may_restart_all(seen.spec) == rules, "also of a sidecar"
    assert container_hash(main) == container_hash(pod.spec.containers[0])
    assert pod.spec.containers[0].restart_policy == "Always", "the argument is not changed"


def life(
    looks: Iterator[ObservedPod],
    runtime: Runtime,
    applied: list[str],
    *,
    statuses: StatusStore,
    restart_all: bool = True,
) -> NodePodSyncer:
    """A life whose looks at the runtime show this, one after the other; starts are only noted."""

    async def look(_: str) -> ObservedPod:
        return next(looks)

    async def apply(_: Pod, __: ObservedPod, actions: Any, *___: object) -> None:
        applied.extend([*actions.start_init, *actions.start])

    async def nothing(*_: object) -> Any:
        return None

    journal = PodHistory()
    parts: Any = SimpleNamespace(
        observe_pod=look,
        refresh=nothing,
        exists=lambda _: True,
        in_force=lambda *_: None,
        version=SimpleNamespace(runtime_name="cri-o"),
        runtime=runtime,
    )
    allocation, killer = AllocationManager(journal), ContainerKiller(parts, parts, journal)

    def clock() -> float:
        return BORN + 60

    return make_syncer(
        cri=parts,
        observer=parts,
        executor=SimpleNamespace(apply=apply, stop=killer.kill_pod),
        stages=make_stages(journal, allocation, cgroups=parts, dirs=parts, volumes=parts),
        prober=Prober(nothing, lambda *_: None, CollectorRegistry(), host_ip=lambda: ""),
        cgroups=parts,
        history=journal,
        allocation=allocation,
        sources=Sources(),
        statuses=statuses,
        restart_all=RestartAll(killer, ContainerRemover(parts, None), journal, clock, enabled=restart_all),
        host_ips=["10.0.0.1"],
        stays_initialized=restart_all,
        clock=clock,
    )


def picture(*containers: ObservedContainer) -> ObservedPod:
    return ObservedPod(uid="u1", name="web", namespace="default", sandboxes=(BOX,), containers=containers)


async def test_sync_restart_all_removes_containers_then_starts_first() -> None:
    runtime, applied, statuses = Runtime(), list[str](), StatusStore()
    looks = iter([picture(MAIN, OTHER, SIDE), picture(), picture()])
    one = life(looks, runtime, applied, statuses=statuses)
    assert await one.sync(a_pod()) == (False, 0)
    assert [call for call in runtime.calls if "remove" in call] == [
        "remove other", "remove side", "remove main"
    ]  # fmt: skip
    status = statuses.get("u1")
    assert status is not None
    assert has_restart_condition(status)
    assert not applied
    await one.sync(a_pod())
    assert applied == ["side"]
    status = statuses.get("u1")
    assert status is not None
    assert not has_restart_condition(status)


async def test_sync_restart_all_disabled_leaves_containers() -> None:
    runtime, applied, statuses = Runtime(), list[str](), StatusStore()
    looks = iter([picture(MAIN, OTHER, SIDE)] * 2)
    one = life(looks, runtime, applied, statuses=statuses, restart_all=False)
    assert await one.sync(a_pod()) == (False, None)
    assert (runtime.calls, applied) == ([], [])
    status = statuses.get("u1")
    assert status is not None
    assert all(condition.type != "AllContainersRestarting" for condition in status.conditions)
