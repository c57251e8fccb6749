"""What keeps a pod from being prepared is told in the words that people look for; pauses end.

Pauses after crashes are kept for as long as they count, and not for ever.
"""

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from pykubelet.api.duration import Duration
from pykubelet.api.pod import Pod
from pykubelet.config.feature_gates import FeatureGates
from pykubelet.config.types import KubeletConfiguration, complete
from pykubelet.kuberuntime.decide import Actions
from pykubelet.kuberuntime.errors import StartError
from pykubelet.kuberuntime.labels import container_hash
from pykubelet.kuberuntime.observed import ObservedContainer, ObservedPod
from pykubelet.podconfig.pod_history import PodHistory
from pykubelet.podsync.contract import PodSyncState, SyncError
from pykubelet.podsync.stages.containers import crash_loop_back_off
from pykubelet.podsync.syncer import ActionExecutor
from pykubelet.util.backoff import KeyedBackoff
from tests.support.pods import make_pod
from tests.unit.podsync.syncers import make_executor


def doer_with(
    fail: Callable[[str], None], journal: PodHistory, pauses: KeyedBackoff, starter: Any = None
) -> ActionExecutor:
    """Return an executor without a runtime; `fail` is called before each stage and may raise."""

    async def ensure(_: object) -> str:
        fail("ensure")
        return "/parent"

    parts: Any = SimpleNamespace(ensure=ensure, make=lambda _: fail("make"), mappings_for=lambda _: None)
    return make_executor(
        starter=starter or parts,
        parts=parts,
        history=journal,
        back_off=pauses,
        clock=asyncio.get_running_loop().time,
    )


@pytest.mark.parametrize(
    ("broken", "reason", "message"),
    [
        ("ensure", "FailedCreatePodContainer", "unable to ensure pod container exists: no"),
        ("make", "Failed", "error making pod data directories: no"),
    ],
)
async def test_apply_pod_preparation_fails_records_event(broken: str, reason: str, message: str) -> None:
    def fail(what: str) -> None:
        if what == broken:
            raise OSError("no")

    pod, journal = make_pod(), PodHistory()
    doer = doer_with(fail, journal, KeyedBackoff())
    nothing = ObservedPod(uid=pod.uid, name="web", namespace="default")
    with pytest.raises(SyncError, match=message):
        await doer.apply(pod, nothing, Actions(create_sandbox=True, start=["main"]), PodSyncState(order=1))
    assert [(event.kind, event.reason, event.message) for event in journal.events(pod.uid)] == [
        ("Warning", reason, message)
    ]


async def crash(doer: ActionExecutor, pod: Pod) -> None:
    """Have a container of the pod started after it has ended; the rest of the start fails."""
    last = ObservedContainer(id=f"{pod.uid}-main", name="main", phase="exited", exit_code=1)
    observed = ObservedPod(uid=pod.uid, name=pod.metadata.name, namespace="default", containers=(last,))
    with pytest.raises(SyncError):
        await doer.apply(pod, observed, Actions(sandbox_id="box", start=["main"]), PodSyncState(order=1))


@pytest.mark.looptime
async def test_apply_back_off_expired_entry_removed() -> None:
    def fail(_: str) -> None:
        raise OSError("no")

    pauses = KeyedBackoff()
    doer = doer_with(fail, PodHistory(), pauses)
    first, second = make_pod("u1", "first"), make_pod("u2", "second")
    key = f"u1/main/{container_hash(first.spec.containers[0])}"
    await crash(doer, first)
    assert pauses.delay(key) == pauses.first
    # As long as a container that ended may have to wait for it, it stays.
    await asyncio.sleep(2.9 * pauses.limit)
    await crash(doer, make_pod("u3", "third"))
    assert pauses.delay(key) == pauses.first
    await asyncio.sleep(0.2 * pauses.limit)
    await crash(doer, second)
    assert pauses.delay(key) == 0


def delays(back_off: KeyedBackoff, count: int, ran: float) -> list[float]:
    """The back-off delays of a container that runs for `ran` seconds and crashes, time and again."""
    now, found = 1000.0, list[float]()
    for _ in range(count):
        crashed = now + ran
        now = crashed + back_off.remaining("key", crashed, crashed)
        back_off.attempt("key", crashed, now)
        found.append(back_off.delay("key"))
    return found


@pytest.mark.parametrize(
    ("period", "gates", "expected"),
    [
        (None, {}, [10, 20, 40, 80, 160, 300, 300]),
        ("8s", {}, [8, 8, 8, 8, 8, 8, 8]),
        ("30s", {}, [10, 20, 30, 30, 30, 30, 30]),
        (None, {"KubeletCrashLoopBackOffMax": False}, [10, 20, 40, 80, 160, 300, 300]),
        (None, {"ReduceDefaultCrashLoopBackOffDecay": True}, [1, 2, 4, 8, 16, 32, 64]),
        ("5s", {"ReduceDefaultCrashLoopBackOffDecay": True}, [1, 2, 4, 5, 5, 5, 5]),
        (
            None,
            {"ReduceDefaultCrashLoopBackOffDecay": True, "KubeletCrashLoopBackOffMax": False},
            [1, 2, 4, 8, 16, 32, 60],
        ),
    ],
)
def test_crash_loop_back_off_configuration_and_gates_honoured(
    period: str | None, gates: dict[str, bool], expected: list[float]
) -> None:
    chosen, config = FeatureGates().with_overrides(gates), KubeletConfiguration()
    if period is not None:
        config.crash_loop_back_off.max_container_restart_period = Duration.parse(period)
    complete(config, frozenset(), chosen.enabled)
    assert delays(crash_loop_back_off(config, chosen), 7, ran=1) == expected


def test_crash_loop_back_off_small_maximum_reset_after_ten_minutes() -> None:
    config = KubeletConfiguration()
    config.crash_loop_back_off.max_container_restart_period = Duration.parse("40s")
    assert delays(crash_loop_back_off(config, FeatureGates()), 4, ran=590) == [10, 20, 40, 40]
    assert delays(crash_loop_back_off(config, FeatureGates()), 4, ran=601) == [10, 10, 10, 10]


@pytest.mark.parametrize(
    ("reason", "retry_after", "expected"),
    [
        # The status shows ImagePullBackOff soon after the failure, however long the back-off delay is.
        ("ErrImagePull", 300.0, 5.0),
        ("ErrImagePull", 2.0, 2.0),
        ("ImagePullBackOff", 295.0, 295.0),
        ("CreateContainerError", None, 10.0),
    ],
)
async def test_apply_failed_start_returns_retry_delay(
    reason: str, retry_after: float | None, expected: float
) -> None:
    async def image(*_: object) -> None:
        raise StartError(reason, "no", retry_after)

    starter = SimpleNamespace(ensure_image=image, sandbox_config=lambda *_: None)
    pod, memory = make_pod(), PodSyncState(order=1)
    doer = doer_with(lambda _: None, PodHistory(), KeyedBackoff(), starter)
    observed = ObservedPod(uid=pod.uid, name="web", namespace="default")
    wait = await doer.apply(pod, observed, Actions(sandbox_id="box", start=["main"]), memory)
    assert wait == expected
    assert memory.failures["main"].reason == reason
    assert memory.mounted
