"""Events of pods for OOM kills: where they happened, what the events say, and how many there are."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from pykubelet.api.pod import Pod
from pykubelet.linux.oom_watcher import OomKill, read_oom_kills
from pykubelet.podconfig.pod_history import PodHistory
from pykubelet.podworkers import oom_events
from pykubelet.podworkers.oom_events import OomEvents, OomSite, locate, oom_message, site_in_pods
from pykubelet.stats.samples import Target
from pykubelet.transport.errors import Unavailable
from pykubelet.util.tasks import TaskScope
from tests.support.pods import make_pod

pytestmark = pytest.mark.looptime
ID = "0123456789abcdef" * 4
POD = "/kubepods/burstable/podu1"
SYSTEMD = "/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-podu1.slice"
MAIN = OomSite("u1", POD, f"{POD}/{ID}", "main", ID)


def kill(cgroup: str = MAIN.cgroup, limit: str = MAIN.cgroup, pid: int = 7, **facts: object) -> OomKill:
    known: dict[str, object] = {"anon_rss": 60 << 20, "limit_bytes": 64 << 20} | facts
    process = str(known.pop("process", "app"))
    return OomKill(pid, process, cgroup, limit, microseconds=1, sequence=1, **known)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("cgroup", "expected"),
    [
        (f"{POD}/{ID}", OomSite("u1", POD, f"{POD}/{ID}", container_id=ID)),
        (f"{POD}/{ID}/nested/podu2/{ID}", OomSite("u1", POD, f"{POD}/{ID}", container_id=ID)),
        (f"{POD}/crio-{ID}", OomSite("u1", POD, f"{POD}/crio-{ID}", container_id=ID)),
        (POD, OomSite("u1", POD, POD)),
        (f"{POD}/kata", OomSite("u1", POD, f"{POD}/kata")),
        (
            f"{SYSTEMD}/cri-containerd-{ID}.scope",
            OomSite("u3", SYSTEMD, f"{SYSTEMD}/cri-containerd-{ID}.scope", container_id=ID),
        ),
        (f"{POD}2/{ID}", None),
        ("/system.slice/ssh.service", None),
        ("/", None),
    ],
)
def test_site_in_pods_cgroup_of_pod_is_found(cgroup: str, expected: OomSite | None) -> None:
    assert site_in_pods(cgroup, [("none", ""), ("u1", POD), ("u3", SYSTEMD)]) == expected


def test_locate_sampled_container_young_container_and_unknown_pod() -> None:
    pod = Target(path=POD, kind="pod", pod_uid="u1")
    main = Target(path=f"{POD}/{ID}", kind="container", pod_uid="u1", container="main")
    assert locate(f"{POD}/{ID}/x", main, list) == OomSite("u1", POD, f"{POD}/{ID}", "main")
    assert locate(f"{POD}/{ID}", pod, list) == OomSite("u1", POD, f"{POD}/{ID}", container_id=ID)
    assert locate(f"{POD}/{ID}", None, lambda: [("u1", POD)]) == locate(f"{POD}/{ID}", pod, list)
    assert locate(f"{POD}/{ID}", None, list) is None


@pytest.mark.parametrize(
    ("killed", "expected"),
    [
        (
            kill(),
            'Memory limit 64Mi of container "main" reached: '
            'killed process 7 (app) of container "main", anon-rss 60Mi',
        ),
        (
            kill(limit=POD, anon_rss=123 << 10),
            "Memory limit 64Mi of the pod reached: "
            'killed process 7 (app) of container "main", anon-rss 0.1Mi',
        ),
        (
            kill(limit="/kubepods", limit_bytes=None),
            'Memory limit of cgroup "/kubepods" reached: '
            'killed process 7 (app) of container "main", anon-rss 60Mi',
        ),
        (
            kill(limit="", system_oom=True, limit_bytes=None, anon_rss=None),
            'Node out of memory: killed process 7 (app) of container "main"',
        ),
        (
            kill(process="a\x1b[2J\n\u202e", anon_rss=None, limit_bytes=None),
            'Memory limit of container "main" reached: '
            'killed process 7 (a\ufffd[2J\ufffd\ufffd) of container "main"',
        ),
    ],
)
def test_oom_message_cause_and_victim_are_named(killed: OomKill, expected: str) -> None:
    assert oom_message(killed, MAIN) == expected


def test_oom_message_several_kills_are_counted() -> None:
    text = oom_message(kill(), OomSite("u1", POD, MAIN.cgroup), 57, 20.4)
    assert text == (
        "Memory limit 64Mi of the pod reached: killed 57 processes in 20s, the last was process 7 (app) of "
        "the pod, anon-rss 60Mi"
    )


class Recorder:
    """Events of one node, with their loop times."""

    def __init__(self) -> None:
        self.events: list[tuple[float, str, str, str]] = []
        self.kills: list[tuple[str, str]] = []
        self.pods: dict[str, Pod] = {"u1": make_pod("u1")}
        self.sites = {MAIN.cgroup: MAIN}
        self.counters: dict[str, int] = {}
        self.names: dict[str, str] = {}
        self.name_calls = 0
        history = PodHistory()
        history.add_listener(
            lambda pod, event: self.events.append(
                (asyncio.get_running_loop().time(), event.reason, event.where, event.message)
            )
        )
        self.subject = OomEvents(
            self.sites.get,
            self._name,
            self.pods.get,
            history,
            count_kills=self.counters.get,
            on_kill=lambda *site: self.kills.append(site),
        )

    async def _name(self, container_id: str) -> str:
        self.name_calls += 1
        await asyncio.sleep(0.5)
        if container_id not in self.names:
            raise Unavailable("ContainerStatus", "Unavailable", "gone")
        return self.names[container_id]


@pytest.fixture
async def recorder() -> AsyncIterator[Recorder]:
    recorder = Recorder()
    async with TaskScope() as scope:
        scope.start(recorder.subject.run(), name="oom-events")
        yield recorder


async def test_oom_events_first_kill_is_an_event_immediately(recorder: Recorder) -> None:
    recorder.subject.handle(kill())
    await asyncio.sleep(0.1)
    ((_, reason, where, message),) = recorder.events
    assert (reason, where) == ("ProcessOOMKilled", "spec.containers{main}")
    assert "killed process 7 (app)" in message
    assert recorder.kills == [("u1", "main")]


async def test_oom_events_kills_outside_of_pods_are_ignored(recorder: Recorder) -> None:
    recorder.subject.handle(kill(cgroup=""))
    recorder.subject.handle(kill(cgroup="/system.slice"))
    recorder.pods.clear()
    recorder.subject.handle(kill())
    await asyncio.sleep(1000)
    assert recorder.events == []


async def test_oom_events_many_kills_are_combined_less_and_less_often(recorder: Recorder) -> None:
    began = asyncio.get_running_loop().time()
    for _ in range(3600):
        recorder.subject.handle(kill())
        await asyncio.sleep(1)
    times = [round(time - began) for time, *_ in recorder.events]
    assert times[:7] == [0, 10, 30, 70, 150, 310, 610]
    assert len(times) == 16
    assert "killed 300 processes in 300s" in recorder.events[-1][3]
    assert len(recorder.subject._tallies) == 1
    await asyncio.sleep(700)
    assert recorder.subject._tallies == {}
    recorder.subject.handle(kill())
    await asyncio.sleep(0.1)
    assert "killed process 7" in recorder.events[-1][3], "after some quiet minutes it is as at first"


async def test_oom_events_kernel_counter_has_kills_that_were_not_logged(recorder: Recorder) -> None:
    for counter in (1, 500):
        recorder.counters[MAIN.cgroup] = counter
        recorder.subject.handle(kill())
        await asyncio.sleep(10.5)
    assert "killed 499 processes in 10s" in recorder.events[-1][3]
    # The next container of this name counts from 0.
    other = OomSite("u1", POD, f"{POD}/other", "main")
    recorder.sites[other.cgroup] = other
    recorder.counters[other.cgroup] = 900
    recorder.subject.handle(kill(cgroup=other.cgroup))
    await asyncio.sleep(40)
    assert "killed process 7" in recorder.events[-1][3]


async def test_oom_events_young_container_is_named_by_the_runtime_once(recorder: Recorder) -> None:
    young = OomSite("u1", POD, MAIN.cgroup, container_id=ID)
    recorder.sites[MAIN.cgroup] = young
    recorder.names[ID] = "main"
    for _ in range(100):
        recorder.subject.handle(kill())
    await asyncio.sleep(1)
    assert recorder.name_calls == 1
    assert recorder.events[0][2] == "spec.containers{main}"
    assert "killed 100 processes" in recorder.events[0][3]


async def test_oom_events_runtime_down_event_names_the_pod(recorder: Recorder) -> None:
    recorder.sites[MAIN.cgroup] = OomSite("u1", POD, MAIN.cgroup, container_id=ID)
    recorder.subject.handle(kill())
    await asyncio.sleep(1)
    assert recorder.events[0][2] == ""
    assert "of the pod" in recorder.events[0][3]


async def test_oom_events_memory_is_bounded(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, bound in (("MAX_CONTAINERS", 5), ("MAX_NAMES", 3)):
        monkeypatch.setattr(oom_events, name, bound)
    for number in range(2000):
        path = f"{POD}/{number}"
        recorder.sites[path] = OomSite("u1", POD, path, container_id=str(number))
        recorder.names[str(number)] = f"c{number}"
        recorder.subject.handle(kill(cgroup=path))
    assert len(recorder.subject._queue) == oom_events.MAX_QUEUED
    await asyncio.sleep(1000)
    assert len(recorder.subject._names) <= 3
    assert len(recorder.kills) == oom_events.MAX_QUEUED
    assert len(recorder.events) <= 5


def test_read_oom_kills_v2_v1_and_missing(tmp_path: Path) -> None:
    assert read_oom_kills(tmp_path) is None
    (tmp_path / "memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 3\n")
    assert read_oom_kills(tmp_path) == 3
    (tmp_path / "memory.events").write_text("low 0\nhigh 0\nmax 9\noom 5\noom_kill 4\noom_group_kill 0\n")
    assert read_oom_kills(tmp_path) == 4
    (tmp_path / "memory.events").write_text("oom_kill none\n")
    assert read_oom_kills(tmp_path) == 3
