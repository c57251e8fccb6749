"""Traced pod syncer: names and attributes of the steps, and one trace for the start of a pod."""

import asyncio

import pytest

from pykubelet.api.meta import ObjectMeta
from pykubelet.api.pod import Pod
from pykubelet.podsync.contract import KillPodOptions, Outcome, Remnants, SyncError
from pykubelet.podsync.traced_syncer import START_SECONDS, TracedPodSyncer
from pykubelet.tracing.span import Span, Tracer, child_span


class Sink:
    def __init__(self) -> None:
        self.spans: list[Span] = []

    def record(self, span: Span) -> None:
        self.spans.append(span)

    def named(self, name: str) -> list[Span]:
        return [span for span in self.spans if span.name == name]


class Syncer:
    """Syncer whose steps have a child span each; `started` is what the pod is after a sync."""

    def __init__(self) -> None:
        self.failure: Exception | None = None
        self.outcome: Outcome = (False, None)

    async def sync(self, pod: Pod, *, resync: bool = False) -> Outcome:
        with child_span("step"):
            if self.failure is not None:
                raise self.failure
            return self.outcome

    async def terminate(self, uid: str, pod: Pod | None, options: KillPodOptions) -> None:
        pass

    async def clean_up(self, uid: str, pod: Pod | None) -> Remnants | None:
        return Remnants(uid, pod, None, set())

    async def remove(self, remnants: Remnants) -> None:
        pass


def new_pod(version: str = "1") -> Pod:
    return Pod(metadata=ObjectMeta(name="web", namespace="default", uid="u1", resource_version=version))


class Rig:
    def __init__(self) -> None:
        self.sink, self.syncer, self.started = Sink(), Syncer(), False
        self.traced = TracedPodSyncer(self.syncer, Tracer(self.sink, 1.0), lambda pod: self.started)


@pytest.fixture
def rig() -> Rig:
    return Rig()


async def test_traced_syncer_start_of_several_syncs_is_one_trace(rig: Rig) -> None:
    pod, changed = new_pod(), new_pod("2")
    await rig.traced.sync(pod)
    await rig.traced.sync(pod)
    rig.started = True
    await rig.traced.sync(changed)
    await rig.traced.sync(changed)
    first, second, third, later = rig.sink.named("syncPod")
    assert first.parent_id == b""
    assert second.parent_id == third.parent_id == first.context.span_id
    assert first.context.trace_id == second.context.trace_id == third.context.trace_id
    assert later.context.trace_id != first.context.trace_id
    types = [span.attributes["k8s.pod.update_type"] for span in (first, second, third, later)]
    assert types == ["create", "sync", "update", "sync"]
    assert first.attributes["k8s.pod"] == "default/web"
    assert first.attributes["k8s.pod.uid"] == "u1"
    assert next(iter(rig.sink.named("step"))).parent_id == first.context.span_id


async def test_traced_syncer_failed_sync_is_recorded_and_raised(rig: Rig) -> None:
    rig.syncer.failure = SyncError("no network")
    with pytest.raises(SyncError):
        await rig.traced.sync(new_pod())
    assert rig.sink.named("syncPod")[0].error == "no network"
    rig.syncer.failure = None
    await rig.traced.sync(new_pod())
    first, second = rig.sink.named("syncPod")
    assert second.context.trace_id == first.context.trace_id


@pytest.mark.looptime
async def test_traced_syncer_pod_that_never_starts_does_not_extend_its_trace(rig: Rig) -> None:
    await rig.traced.sync(new_pod())
    await asyncio.sleep(START_SECONDS + 1)
    await rig.traced.sync(new_pod())
    await rig.traced.sync(new_pod())
    traces = [span.context.trace_id for span in rig.sink.named("syncPod")]
    assert len(set(traces)) == 3


async def test_traced_syncer_end_of_a_pod_has_upstream_names_and_is_forgotten(rig: Rig) -> None:
    pod = new_pod()
    await rig.traced.sync(pod)
    await rig.traced.terminate("u1", pod, KillPodOptions(1, None))
    remnants = await rig.traced.clean_up("u1", pod)
    assert remnants is not None
    await rig.traced.remove(remnants)
    assert [span.name for span in rig.sink.spans] == [
        "step",
        "syncPod",
        "syncTerminatingPod",
        "syncTerminatedPod",
        "removePod",
    ]
    await rig.traced.sync(pod)
    assert rig.sink.spans[-1].attributes["k8s.pod.update_type"] == "create"
    assert not rig.traced._pods.keys() - {"u1"}


async def test_traced_syncer_orphan_has_only_its_uid(rig: Rig) -> None:
    await rig.traced.terminate("u9", None, KillPodOptions(1, None))
    assert rig.sink.spans[0].attributes == {"k8s.pod.uid": "u9"}
