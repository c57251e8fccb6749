"""What keeps a pod from being prepared is told in the words that people look for; pauses end.

Pauses after crashes are kept for as long as they count, and not for ever.
"""

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from pykubelet.api.backoff import BackOff
from pykubelet.api.pod import Pod
from pykubelet.pods.journal import Journal
from pykubelet.runtime.actions import Actions
from pykubelet.runtime.hashing import container_hash
from pykubelet.runtime.observed import ObservedContainer, ObservedPod
from pykubelet.sync.apply import Doer, PodMemory
from pykubelet.sync.start_gate import StartGate
from pykubelet.sync.worker import StepError
from tests.sync.making import make_pod


def doer_with(fail: Callable[[str], None], journal: Journal, pauses: BackOff) -> Doer:
    """Give one who has nothing to do it with; `fail` is asked before each step whether it goes wrong."""

    async def ensure(_: object) -> str:
        fail("ensure")
        return "/parent"

    parts: Any = SimpleNamespace(ensure=ensure, make=lambda _: fail("make"))
    return Doer(
        cri=parts,
        starter=parts,
        killer=parts,
        volumes=parts,
        cgroups=parts,
        dirs=parts,
        journal=journal,
        gate=StartGate(),
        crash_back_off=pauses,
        user_namespaces=parts,
        handler_of=parts,
        clock=asyncio.get_running_loop().time,
    )


@pytest.mark.parametrize(
    ("broken", "reason", "message"),
    [
        ("ensure", "FailedCreatePodContainer", "unable to ensure pod container exists: no"),
        ("make", "Failed", "error making pod data directories: no"),
    ],
)
async def test_a_pod_that_cannot_be_prepared(broken: str, reason: str, message: str) -> None:
    def fail(what: str) -> None:
        if what == broken:
            raise OSError("no")

    pod, journal = make_pod(), Journal()
    doer = doer_with(fail, journal, BackOff())
    nothing = ObservedPod(uid=pod.uid, name="web", namespace="default")
    with pytest.raises(StepError, match=message):
        await doer.apply(pod, nothing, Actions(create_sandbox=True, start=["main"]), PodMemory(order=1))
    assert [(event.kind, event.reason, event.message) for event in journal.events(pod.uid)] == [
        ("Warning", reason, message)
    ]


async def crash(doer: Doer, pod: Pod) -> None:
    """Have a container of the pod started after it has ended; the rest of the start fails."""
    last = ObservedContainer(id=f"{pod.uid}-main", name="main", phase="exited", exit_code=1)
    observed = ObservedPod(uid=pod.uid, name=pod.metadata.name, namespace="default", containers=(last,))
    with pytest.raises(StepError):
        await doer.apply(pod, observed, Actions(sandbox_id="box", start=["main"]), PodMemory(order=1))


@pytest.mark.looptime
async def test_what_crashed_long_ago_is_forgotten() -> None:
    def fail(_: str) -> None:
        raise OSError("no")

    pauses = BackOff()
    doer = doer_with(fail, Journal(), pauses)
    first, second = make_pod("u1", "first"), make_pod("u2", "second")
    key = f"u1/main/{container_hash(first.spec.containers[0])}"
    await crash(doer, first)
    assert pauses.pause(key) == pauses.first
    # As long as a container that ended may have to wait for it, it stays.
    await asyncio.sleep(2.9 * pauses.limit)
    await crash(doer, make_pod("u3", "third"))
    assert pauses.pause(key) == pauses.first
    await asyncio.sleep(0.2 * pauses.limit)
    await crash(doer, second)
    assert pauses.pause(key) == 0
