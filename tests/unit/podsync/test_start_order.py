"""The executor of decisions: in which order containers start, and what a failure holds up."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from pykubelet.api.meta import from_document
from pykubelet.api.pod import Container, Pod
from pykubelet.kuberuntime.decide import Actions
from pykubelet.kuberuntime.errors import StartError
from pykubelet.kuberuntime.observed import ObservedContainer, ObservedPod
from pykubelet.podconfig.pod_history import PodHistory
from pykubelet.podsync.contract import PodSyncState
from pykubelet.podsync.syncer import ActionExecutor
from pykubelet.util.backoff import KeyedBackoff
from tests.unit.podsync.syncers import make_executor

POD = from_document(
    Pod,
    {
        "metadata": {"name": "web", "namespace": "default", "uid": "u1"},
        "spec": {
            "initContainers": [
                {"name": "side", "image": "i", "restartPolicy": "Always"},
                {"name": "init", "image": "i"},
            ],
            "containers": [{"name": "main", "image": "i"}, {"name": "other", "image": "i"}],
        },
    },
)


class Starting:
    """All that the executor needs; containers in `failing` cannot be started."""

    def __init__(self, *failing: str) -> None:
        self.failing = failing
        self.started: list[str] = []

    def doer(self) -> ActionExecutor:
        nothing: Any = SimpleNamespace(
            ensure=self._nothing, make=lambda _: None, mappings_for=lambda _: None, mount=self._nothing
        )
        starter: Any = SimpleNamespace(
            sandbox_config=lambda *_: None,
            ensure_image=self._nothing,
            prepare_devices=self._nothing,
            start_container=self._start,
        )
        return make_executor(
            starter=starter,
            parts=nothing,
            history=PodHistory(),
            back_off=KeyedBackoff(),
            clock=asyncio.get_running_loop().time,
        )

    async def _nothing(self, *_: object) -> Any:
        return ""

    async def _start(self, _: Pod, container: Container, *__: object) -> str:
        if container.name in self.failing:
            raise StartError("CreateContainerError", "no")
        self.started.append(container.name)
        return f"{container.name}-id"


NOTHING = ObservedPod(uid="u1", name="web", namespace="default")


@pytest.mark.parametrize(
    ("failing", "started"),
    [
        ((), ["side", "init", "main", "other"]),
        (("init",), ["side"]),
        # A sidecar, or one of the main containers, holds up no other.
        (("side",), ["init", "main", "other"]),
        (("main",), ["side", "init", "other"]),
    ],
)
async def test_executor_init_container_fails_later_containers_not_started(
    failing: tuple[str, ...], started: list[str]
) -> None:
    subject, memory = Starting(*failing), PodSyncState(order=1)
    actions = Actions(sandbox_id="box", start_init=["side", "init"], start=["main", "other"])
    again = await subject.doer().apply(POD, NOTHING, actions, memory)
    assert subject.started == started
    assert {name: one.reason for name, one in memory.failures.items()} == dict.fromkeys(
        failing, "CreateContainerError"
    )
    # A sidecar does not end: no event tells that the next one may start.
    assert again == (0.0 if "side" in started else 10.0)


@pytest.mark.looptime
@pytest.mark.parametrize(
    ("crashed", "started"),
    [("init", ["side"]), ("side", ["init", "main", "other"]), ("main", ["side", "init", "other"])],
)
async def test_executor_init_container_in_back_off_later_containers_not_started(
    crashed: str, started: list[str]
) -> None:
    subject, memory = Starting(), PodSyncState(order=1)
    doer, again = subject.doer(), None
    for number in range(2):
        subject.started.clear()
        ended = ObservedContainer(id=f"{crashed}-{number}", name=crashed, phase="exited", exit_code=1)
        observed = ObservedPod(uid="u1", name="web", namespace="default", containers=(ended,))
        actions = Actions(sandbox_id="box", start_init=["side", "init"], start=["main", "other"])
        again = await doer.apply(POD, observed, actions, memory)
    assert subject.started == started
    assert memory.failures[crashed].reason == "CrashLoopBackOff"
    assert again == (0.0 if "side" in started else 10.0)
