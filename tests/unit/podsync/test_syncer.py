"""One sync of a pod: what happens during it must not be lost, since no further event reports it."""

import threading
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace
from prometheus_client import CollectorRegistry

from pykubelet.admission.handler import AdmitRejection
from pykubelet.api.pod import Pod, ResourceRequirements
from pykubelet.api.quantity import Quantity
from pykubelet.api.volume import Volume
from pykubelet.cm.resize import PodResources
from pykubelet.kuberuntime.decide import Actions
from pykubelet.kuberuntime.labels import container_hash
from pykubelet.kuberuntime.observed import (
    ContainerPhase,
    ObservedContainer,
    ObservedPod,
    ObservedSandbox,
    PodStates,
)
from pykubelet.podconfig.pod_history import PodHistory
from pykubelet.podsync.contract import PodLifecycleEvent, PodRejected, PodSyncState
from pykubelet.podsync.syncer import SANDBOX_RETRY_SECONDS, Fate, NodePodSyncer, is_complete
from pykubelet.probes.prober import Prober
from pykubelet.resize.allocation_manager import AllocationManager
from pykubelet.status.compute import StatusStore
from tests.support.pods import make_pod
from tests.unit.podsync.syncers import Sources, make_stages, make_syncer

POD = make_pod(init=("init",))
BOX = ObservedSandbox(id="box", ready=True, created_at=1, attempt=0, ips=("10.0.0.2",))


def seen(*containers: tuple[str, ContainerPhase]) -> ObservedPod:
    """What the runtime has of the pod: a sandbox and containers, in their phases."""
    specs = {one.name: one for one in (*POD.spec.init_containers, *POD.spec.containers)}
    found = tuple(
        ObservedContainer(
            id=f"{name}-id",
            name=name,
            phase=phase,
            sandbox_id="box",
            attempt=0,
            hash=container_hash(specs[name]),
        )
        for name, phase in containers
    )
    return ObservedPod(uid=POD.uid, name="web", namespace="default", sandboxes=(BOX,), containers=found)


def life(
    *looks: ObservedPod,
    again: float | None = None,
    failure: Exception | None = None,
    refused: list[tuple[Pod, AdmitRejection]] | None = None,
    statuses: StatusStore | None = None,
    stopped: list[str] | None = None,
    resizing: AllocationManager | None = None,
    refreshed: list[str] | None = None,
    mounts: bool = False,
    listed: PodStates | None = None,
) -> NodePodSyncer:
    """A life whose looks at the runtime show this, one after the other; doing works, or fails.

    With `stopped` the pod has lost its cgroup, and that takes its sandboxes. `refreshed` gets the uids of
    pods whose volumes were refreshed; `mounts` says that doing mounts them.
    """
    script = list(looks)

    async def look(_: str) -> ObservedPod:
        return script.pop(0)

    async def stop(_: Pod, observed: ObservedPod, *__: object) -> None:
        assert stopped is not None
        stopped.extend(sandbox.id for sandbox in observed.sandboxes)

    async def apply(_: Pod, __: ObservedPod, ___: Actions, memory: PodSyncState) -> float | None:
        memory.mounted = mounts
        if failure is not None:
            raise failure
        return again

    def refuse(pod: Pod, refusal: AdmitRejection) -> None:
        assert refused is not None
        refused.append((pod, refusal))

    async def nothing(*_: object) -> Any:
        return None

    async def refresh(pod: Pod) -> None:
        if refreshed is not None:
            refreshed.append(pod.uid)

    parts: Any = SimpleNamespace(
        observe_pod=look,
        refresh=refresh,
        exists=lambda _: stopped is None,
        in_force=lambda *_: None,
        version=SimpleNamespace(runtime_name="cri-o"),
    )
    history = PodHistory()
    allocation = resizing or AllocationManager(history)
    return make_syncer(
        cri=parts,
        observer=parts,
        executor=SimpleNamespace(apply=apply, stop=stop),
        stages=make_stages(history, allocation, cgroups=parts, dirs=parts, volumes=parts),
        prober=Prober(nothing, lambda *_: None, CollectorRegistry(), host_ip=lambda: ""),
        cgroups=parts,
        history=history,
        allocation=allocation,
        sources=Sources(reject=refuse, listed_since=lambda uid, time: listed),
        statuses=statuses,
        host_ips=["10.0.0.1"],
    )


@pytest.mark.parametrize("again", [None, 10.0])
async def test_sync_container_exits_during_step_syncs_again_immediately(again: float | None) -> None:
    after = seen(("init", "exited"))
    subject = life(seen(), after, again=again)
    assert await subject.sync(POD) == (False, 0)
    # Its event comes late, and says nothing new.
    assert not subject.take(PodLifecycleEvent(POD.uid, "init-id", "ended"))
    # That its memory had run out does.
    assert subject.take(PodLifecycleEvent(POD.uid, "init-id", "oom"))


async def test_sync_running_container_removed_during_step_syncs_again_immediately() -> None:
    pod = make_pod(containers=("main", "side"))
    hashes = {one.name: container_hash(one) for one in pod.spec.containers}
    phases: tuple[ContainerPhase, ...] = ("running", "exited")
    main, side = (
        ObservedContainer(id=name, name=name, phase=phase, sandbox_id="box", attempt=0, hash=hashes[name])
        for name, phase in zip(hashes, phases, strict=True)
    )
    before = replace(seen(), uid=pod.uid, containers=(main, side))
    after = replace(before, containers=(side,))
    subject = life(before, after, again=40.0)
    assert await subject.sync(pod) == (False, 0)
    # The next relist finds what is observed already.
    assert not subject.take(PodLifecycleEvent(pod.uid, states=after.states))


async def test_sync_new_sandbox_ends_during_step_syncs_again_soon() -> None:
    dead = replace(seen(), sandboxes=(replace(BOX, ready=False),))
    subject = life(replace(seen(), sandboxes=()), dead)
    assert await subject.sync(POD) == (False, SANDBOX_RETRY_SECONDS)
    assert not subject.take(PodLifecycleEvent(POD.uid, states=dead.states))


async def test_take_relist_event_known_state_does_not_wake() -> None:
    running = seen(("init", "running"))
    subject = life(seen(), running)
    await subject.sync(POD)
    assert not subject.take(PodLifecycleEvent(POD.uid, states=running.states))
    assert subject.take(PodLifecycleEvent(POD.uid, states=seen(("init", "exited")).states))
    assert subject.take(PodLifecycleEvent(POD.uid))


def allocated(pod: Pod) -> AllocationManager:
    """Return the allocations of a node on which a pod has been started."""
    resizing = AllocationManager(PodHistory())
    resizing.update_pod(pod, None)
    resizing.on_cgroup_created(pod)
    resizing.starting(pod, pod.spec.containers[0])
    return resizing


RUNNING = seen(("main", "running"))


@pytest.mark.parametrize(
    ("observed", "listed", "resync", "looks"),
    [
        (RUNNING, RUNNING.states, True, 1),
        (RUNNING, RUNNING.states, False, 2),
        (RUNNING, None, True, 2),
        (RUNNING, seen(("main", "exited")).states, True, 2),
    ],
)
async def test_sync_resync_confirmed_by_relist_does_not_query_runtime(
    observed: ObservedPod, listed: PodStates | None, resync: bool, looks: int
) -> None:
    pod, refreshed = with_volume("main"), list[str]()
    subject = life(observed, observed, listed=listed, refreshed=refreshed, resizing=allocated(pod))
    await subject.sync(pod)
    before = subject.observations
    assert await subject.sync(pod, resync=resync) == (False, None)
    assert subject.observations - before == looks - 1
    assert refreshed == [pod.uid, pod.uid]


@pytest.mark.parametrize(
    ("observed", "expected"),
    [
        (RUNNING, True),
        (replace(RUNNING, sandboxes=(replace(BOX, ips=()),)), False),
        (replace(RUNNING, sandboxes=(replace(BOX, ips=(), host_network=True),)), True),
        (replace(RUNNING, sandboxes=(replace(BOX, ips=(), ready=False),)), True),
        (seen(("main", "created")), False),
        (seen(("main", "unknown")), False),
    ],
)
def test_is_complete_facts_may_still_appear_returns_false(observed: ObservedPod, expected: bool) -> None:
    assert is_complete(observed) == expected


async def test_sync_resync_after_reported_exit_queries_runtime() -> None:
    pod = make_pod()
    subject = life(RUNNING, RUNNING, listed=RUNNING.states, resizing=allocated(pod))
    await subject.sync(pod)
    assert subject.take(PodLifecycleEvent(POD.uid, "main-id", "ended"))
    await subject.sync(pod, resync=True)
    assert subject.observations == 2


async def test_sync_container_exited_before_step_waits_for_back_off() -> None:
    crashed = seen(("main", "exited"))
    subject = life(crashed, crashed, again=10.0)
    assert await subject.sync(make_pod()) == (False, 10.0)


@pytest.mark.parametrize("resized", [False, True])
async def test_sync_pod_cgroup_missing_during_resize_stops_sandbox(resized: bool) -> None:
    pod, stopped = make_pod(), list[str]()
    resizing = allocated(pod)
    if resized:
        promised = ResourceRequirements(requests={"cpu": Quantity.parse("1")})
        resizing.state.allocated.put(pod.uid, PodResources({"main": promised}))
    running = seen(("main", "running"))
    subject = life(running, stopped=stopped, resizing=resizing)
    assert bool(resizing.plan(pod, running)) == resized
    assert await subject.sync(pod) == (False, 0)
    assert stopped == ["box"]


async def test_sync_started_container_runs_needs_no_further_step() -> None:
    running = seen(("init", "running"))
    subject = life(seen(), running)
    assert await subject.sync(POD) == (False, None)
    assert subject.take(PodLifecycleEvent(POD.uid, "init-id", "ended"))


async def test_sync_container_id_has_runtime_name_prefix() -> None:
    statuses = StatusStore()
    await life(seen(), seen(("init", "running")), statuses=statuses).sync(POD)
    status = statuses.get(POD.uid)
    assert status is not None
    assert status.init_container_statuses[0].container_id == "cri-o://init-id"


async def test_sync_pod_rejected_during_step_is_rejected_and_terminated() -> None:
    refused: list[tuple[Pod, AdmitRejection]] = []
    subject = life(seen(), failure=PodRejected("NoRoom", "it does not fit"), refused=refused)
    assert await subject.sync(POD) == (True, None)
    assert refused == [(POD, AdmitRejection("NoRoom", "it does not fit"))]


@pytest.mark.parametrize("fate", ["restarted", "gone"])
async def test_clean_up_restarted_static_pod_keeps_exited_containers(fate: Fate) -> None:
    """Verify that the runtime keeps the exited containers of a pod that starts again, and no others'."""
    done = list[str]()
    subject = ending(fate, done)
    remnants = await subject.clean_up(POD.uid, POD)
    assert (remnants is None) == (fate == "restarted")
    if remnants is not None:
        await subject.remove(remnants)
    traces = ["logs", "container", "stop", "sandbox", "directory"] if fate == "gone" else []
    assert sorted(done) == sorted(["unmount", "cgroup", "gone", *traces])
    assert subject.observed(POD.uid) is None


def with_volume(*containers: str) -> Pod:
    pod = make_pod(containers=containers)
    pod.spec.volumes = [Volume(name="config")]
    return pod


@pytest.mark.parametrize(
    ("phases", "mounts", "expected"),
    [
        # One container is in back-off, and its healthy sibling needs fresh volumes.
        (("running", "exited"), False, ["u1"]),
        # Starting a container mounts the volumes anyway.
        (("running", "exited"), True, []),
        # No container runs that could see them.
        (("exited", "exited"), False, []),
    ],
)
async def test_sync_container_in_back_off_refreshes_volumes_of_running_siblings(
    phases: tuple[ContainerPhase, ContainerPhase], mounts: bool, expected: list[str]
) -> None:
    pod, refreshed = with_volume("main", "side"), list[str]()
    hashes = {one.name: container_hash(one) for one in pod.spec.containers}
    found = tuple(
        ObservedContainer(
            id=f"{name}-id",
            name=name,
            phase=phase,
            sandbox_id="box",
            attempt=0,
            hash=hashes[name],
            exit_code=1,
        )
        for name, phase in zip(hashes, phases, strict=True)
    )
    observed = ObservedPod(uid=pod.uid, name="web", namespace="default", sandboxes=(BOX,), containers=found)
    subject = life(observed, observed, again=40.0, refreshed=refreshed, mounts=mounts)
    assert await subject.sync(pod) == (False, 40.0)
    assert refreshed == expected


async def test_remove_deletes_directories_outside_event_loop() -> None:
    """Verify that the number of files that a pod leaves behind does not hold up other pods."""
    threads: dict[str, threading.Thread] = {}
    subject = ending("gone", [], threads)
    remnants = await subject.clean_up(POD.uid, None)
    assert remnants is not None
    await subject.remove(remnants)
    assert threads.keys() == {"logs", "directory"}
    assert threading.main_thread() not in threads.values()


def ending(fate: Fate, done: list[str], threads: dict[str, threading.Thread] | None = None) -> NodePodSyncer:
    """Return the syncer of a pod that has exited; `done` records what is released and removed."""

    async def observe(_: str) -> ObservedPod:
        return seen(("main", "exited"))

    async def note(what: str) -> None:
        done.append(what)

    def removed(what: str) -> None:
        done.append(what)
        if threads is not None:
            threads[what] = threading.current_thread()

    cri: Any = SimpleNamespace(
        observe_pod=observe,
        version=SimpleNamespace(runtime_name="cri-o"),
        runtime=SimpleNamespace(
            remove_container=lambda _: note("container"),
            stop_pod_sandbox=lambda _: note("stop"),
            remove_pod_sandbox=lambda _: note("sandbox"),
        ),
    )
    cgroups = SimpleNamespace(remove=lambda _: note("cgroup"), in_force=lambda *_: None)
    dirs = SimpleNamespace(remove=lambda _: removed("directory"))
    unused: Any = None
    history = PodHistory()
    allocation = AllocationManager(history)
    return make_syncer(
        cri=cri,
        observer=cri,
        executor=None,
        stages=make_stages(
            history,
            allocation,
            cgroups=cgroups,
            dirs=dirs,
            volumes=SimpleNamespace(unmount=lambda _: note("unmount")),
        ),
        prober=Prober(unused, lambda *_: None, CollectorRegistry(), host_ip=lambda: ""),
        cgroups=cgroups,
        history=history,
        allocation=allocation,
        sources=Sources(fate_of=lambda _: fate, on_removed=lambda _: done.append("gone")),
        dirs=dirs,
        remove_logs=lambda _: removed("logs"),
    )
