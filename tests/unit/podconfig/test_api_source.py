"""Pods from an API server that is played by a script."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from pykubelet.api.pod import Pod
from pykubelet.apiserver.errors import ServerError, Unreachable
from pykubelet.podconfig.api_source import ApiSource
from pykubelet.podconfig.mux import PodMux
from pykubelet.util.tasks import TaskScope
from tests.support.watch_events import ScriptedSource, event, page
from tests.support.watch_events import pod as document
from tests.unit.podconfig.making import Heard

pytestmark = pytest.mark.looptime


def pod(name: str, version: int = 1, uid: str | None = None, **spec: Any) -> dict[str, Any]:
    """A pod as the API server writes it; one container unless others are given."""
    made = document(name, version, **{"containers": [{"name": "main"}], **spec})
    if uid is not None:
        made["metadata"]["uid"] = uid
    return made


@asynccontextmanager
async def watching(api: ScriptedSource, heard: Heard) -> AsyncIterator[ApiSource]:
    source = ApiSource(api, "one", heard)
    async with TaskScope() as scope:
        scope.start(source.run(), name="source")
        yield source


async def test_api_source_each_event_emits_full_set() -> None:
    heard = Heard()
    api = ScriptedSource(
        page(pod("a"), pod("b")),
        [
            event("ADDED", pod("c", 2)),
            1,
            event("DELETED", pod("a", 3)),
            1,
            event("MODIFIED", pod("b", 4)),
            600,
        ],
    )
    async with watching(api, heard):
        await asyncio.sleep(0.1)
        assert heard.names == ["a", "b", "c"]
        await asyncio.sleep(1.1)
        assert heard.names == ["b", "c"]
        unchanged = heard.sets[-1][0][1]
        await asyncio.sleep(1.1)
        # What did not change is the very same object, so that the mux need not look at it.
        assert heard.sets[-1][0][1] is unchanged
    assert heard.source == "api"
    assert api.asked[0][1]["fieldSelector"] == "spec.nodeName=one"


async def test_api_source_before_first_list_emits_nothing() -> None:
    heard = Heard()
    api = ScriptedSource(Unreachable("https://api", "refused"), ServerError(500, "", "etcd"), page(), [3600])
    async with watching(api, heard):
        await asyncio.sleep(120)
        assert [pods for pods, _ in heard.sets] == [[]]


async def test_api_source_server_away_emits_nothing() -> None:
    heard = Heard()
    api = ScriptedSource(page(pod("a")), [5])
    api.default = lambda: Unreachable("https://api", "refused")
    async with watching(api, heard):
        await asyncio.sleep(3600)
        assert len(heard.sets) == 1


async def test_api_source_waits_for_ready_before_list() -> None:
    heard, api, known = Heard(), ScriptedSource(page(pod("a")), [3600]), asyncio.Event()

    async def ready() -> None:
        await known.wait()

    source = ApiSource(api, "one", heard, ready=ready)
    async with TaskScope() as scope:
        scope.start(source.run(), name="source")
        await asyncio.sleep(60)
        assert api.asked == []
        known.set()
        await asyncio.sleep(1)
        assert heard.names == ["a"]


async def test_api_source_unreadable_pod_keeps_last_readable() -> None:
    heard = Heard()
    bad = pod("a", 2, containers=[{"name": 7}])
    api = ScriptedSource(page(pod("a"), pod("x", 1, containers=7)), [1, event("MODIFIED", bad), 3600])
    async with watching(api, heard) as source:
        await asyncio.sleep(0.5)
        assert heard.names == ["a"]
        assert source.unreadable == {"default/x"}
        assert heard.problems == [
            "default/x: cannot be read: Expected `array`, got `int` - at `spec.containers`"
        ]
        await asyncio.sleep(2)
        assert heard.names == ["a"]
        assert source.unreadable == {"default/a", "default/x"}


async def test_api_source_pod_missing_required_fields_keeps_last_readable() -> None:
    heard = Heard()
    bare, nobody, climber = pod("bare", containers=[]), pod("nobody", uid=""), pod("climber", uid="../../etc")
    api = ScriptedSource(
        page(pod("a"), pod("b"), bare, nobody, climber),
        [1, event("MODIFIED", pod("a", 2, containers=[])), event("MODIFIED", pod("b", 3, uid="")), 3600],
    )
    async with watching(api, heard) as source:
        await asyncio.sleep(0.5)
        assert heard.names == ["a", "b"]
        assert source.unreadable == {"default/bare", "default/nobody", "default/climber"}
        assert heard.problems == [
            "default/bare: cannot be read: it has no containers",
            "default/nobody: cannot be read: it has no uid",
            "default/climber: cannot be read: its uid is not a plain name",
        ]
        await asyncio.sleep(2)
        # What ran before goes on as it was.
        assert heard.names == ["a", "b"]
        assert all(found.spec.containers and found.uid for found in heard.sets[-1][0])
        assert source.unreadable >= {"default/a", "default/b"}


@pytest.mark.looptime(False)
def test_mux_set_unchanged_pods_cost_little_cpu_time() -> None:
    """A node of 110 pods hears hundreds of events while they start; most pods are as they were."""
    mux, pods = PodMux(time.time_ns), [_pod(number) for number in range(110)]
    mux.set("api", pods)
    began = time.process_time()
    for number in range(440):
        pods[number % 110] = changed = _pod(number % 110)
        changed.status.pod_ip = str(number)
        (change,) = mux.set("api", pods)
        assert (change.op, change.pod.status.pod_ip) == ("RECONCILE", str(number))
    assert time.process_time() - began < 0.5


def _pod(number: int) -> Pod:
    made = Pod()
    made.metadata.name = made.metadata.uid = f"p{number}"
    made.metadata.annotations = {"note": "x"}
    return made
