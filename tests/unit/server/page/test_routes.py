"""The page over HTTP: its views, its protection against other sites, and what it never shows."""

import asyncio
import contextlib
import html
import re
import shlex
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from datetime import UTC, datetime

import aiohttp
import pytest
from typer.testing import CliRunner

from pykubelet.api.pod import Pod
from pykubelet.cli.pykubelet import app
from pykubelet.images.image_gc import ImageGCPolicy, ImageKey, ImageRecord
from pykubelet.images.pull_progress import PullProgress
from pykubelet.podconfig.pod_history import Event, TimelineEntry
from pykubelet.probes.types import ProbeHistory
from pykubelet.server.listeners import http_server
from pykubelet.server.page.events import MAX_CLIENTS
from pykubelet.server.page.facts import (
    AgentFacts,
    Calls,
    DiskFacts,
    HostFinding,
    ImagesFacts,
    LogTail,
    NodeFacts,
    PageSettings,
    PodDetails,
    PodFacts,
    VolumeFacts,
)
from pykubelet.server.page.history import History
from pykubelet.server.page.images_view import gc_plan
from pykubelet.server.page.routes import Page, error_responses
from pykubelet.server.page.security import HEADERS, same_origin_only
from pykubelet.server.readonly import own_hosts_only
from pykubelet.stats.samples import NetworkInterface, Psi, PsiLine, Usage
from pykubelet.status.diagnosis import diagnose
from pykubelet.util.tasks import TaskScope
from tests.support.pod_view import pod_of
from tests.support.ports import free_port

HOSTILE = "<script>alert(1)</script>"
SECRET = "s3cret-value"
DISK = DiskFacts(name="nodefs", path="/", capacity=100 << 30, available=10 << 30, inodes=10, inodes_free=4)


def hostile_pod() -> Pod:
    """Return a pod whose every text is markup, with values that must not be shown."""
    probe = {"httpGet": {"port": 80, "httpHeaders": [{"name": "Authorization", "value": SECRET}]}}
    return pod_of(
        f'web"{HOSTILE}',
        "u1",
        metadata={
            "labels": {"a": HOSTILE},
            "annotations": {
                "note": HOSTILE,
                "kubectl.kubernetes.io/last-applied-configuration": SECRET,
            },
        },
        spec={
            "containers": [
                {
                    "name": "main",
                    "image": HOSTILE,
                    "env": [{"name": "PASSWORD", "value": SECRET}],
                    "command": ["sh", "-c", SECRET],
                    "livenessProbe": probe,
                }
            ]
        },
        status={
            "containerStatuses": [
                {
                    "name": "main",
                    "image": "i",
                    "state": {"waiting": {"reason": "CrashLoopBackOff", "message": HOSTILE}},
                    "lastState": {"terminated": {"exitCode": 1, "message": HOSTILE}},
                }
            ]
        },
    )


class Source:
    """A `PageSource` with one hostile pod."""

    settings = PageSettings(node_name="n1", version="1", started=0.0, data_dir="/d")

    def __init__(self) -> None:
        self.history = History()
        self.listed = [hostile_pod()]
        self.diagnosed: list[str] = []
        """Names of the pods that were diagnosed."""
        self.images_problem = self.images_wait = ""
        self.is_defective = False
        self.failed_log: LogTail | None = None
        self.pulls = [PullProgress(image=HOSTILE, started=0.0, done_bytes=1, total_bytes=2)]

    def pods(self) -> list[PodFacts]:
        return [self.facts_of(pod) for pod in self.listed]

    def facts_of(self, pod: Pod) -> PodFacts:
        self.diagnosed.append(pod.metadata.name)
        return PodFacts(pod=pod, state="syncing", diagnosis=diagnose(pod, "syncing", [], datetime.now(UTC)))

    def find_pod(self, namespace: str, name: str) -> Pod | None:
        return next((pod for pod in self.listed if pod.metadata.name == name), None)

    async def node(self) -> NodeFacts:
        return NodeFacts(
            cores=2.0,
            memory=4 << 30,
            cpu=0.5,
            usage=None,
            reserved_cores=0.1,
            reserved_memory=0,
            max_pods=110,
            disks=[DISK],
            interfaces=(),
            pressure=None,
            checks={"ping": None, "log": HOSTILE},
            certificates={"serving": 3600.0},
            host_problems=[HostFinding("swap", HOSTILE, "swapoff -a")],
        )

    async def pod(self, namespace: str, name: str) -> PodDetails | None:
        pod = self.find_pod(namespace, name)
        if pod is None:
            return None
        return PodDetails(
            facts=self.facts_of(pod),
            events=[Event("Warning", "BackOff", HOSTILE, "spec.containers{main}", 1.0, 2.0, 3)],
            timeline=[TimelineEntry(1.0, "admission", HOSTILE)],
            logs=[LogTail(container="main", lines=[HOSTILE, "x" * 10_000])],
            failed_log=self.failed_log,
            probes=[
                ProbeHistory(
                    container="main",
                    kind="liveness",
                    passed=(True, False),
                    last_run=1.0,
                    seconds=0.1,
                    failure=HOSTILE,
                )
            ],
            pulls=self.pulls,
        )

    async def images(self) -> ImagesFacts:
        if self.is_defective:
            raise RuntimeError("defect")
        return ImagesFacts(
            images=[image(HOSTILE, 5), image("both", 6, in_use=True, pinned=True)],
            problem=self.images_problem,
            waits_for=self.images_wait,
            listed_at=1e6 - 42,
            policy=ImageGCPolicy(),
            disk=DISK,
            loop_time=1e6,
            pulls=self.pulls,
            logs=[VolumeFacts(pod=HOSTILE, name="main", used=9)],
            volumes=[],
            layers=[],
        )

    async def agent(self) -> AgentFacts:
        calls = [Calls(operation=HOSTILE, count=1, errors=0, seconds=0.5)]
        return AgentFacts(
            pid=1,
            rss=1,
            pss=1,
            cpu_seconds=1.0,
            open_files=1,
            threads=1,
            loop_lag=0.001,
            cri=calls,
            api_server=[],
            tasks={HOSTILE: 1},
            clients=0,
            runtime=HOSTILE,
        )

    async def sample(self) -> None:
        pass


def image(name: str, size: int, **fields: object) -> ImageRecord:
    found = ImageRecord(
        key=ImageKey(f"sha256:{name}", ""),
        names=frozenset({name}),
        size=size,
        pinned=False,
        in_use=False,
        first_detected=0.0,
        last_used=None,
    )
    return replace(found, **fields)  # type: ignore[arg-type]


@contextlib.asynccontextmanager
async def serving(source: Source | None = None) -> AsyncIterator[tuple[str, aiohttp.ClientSession]]:
    port = free_port()
    layers = [same_origin_only(), own_hosts_only(("n1",)), error_responses()]
    async with TaskScope() as tasks:
        page = Page(source or Source(), tasks)
        async with http_server("page", "127.0.0.1", port, page.routes(), layers):
            connector = aiohttp.TCPConnector(limit=0)
            async with aiohttp.ClientSession(connector=connector) as session:
                yield f"http://127.0.0.1:{port}", session
            page.close()


POD_PATH = "/pod/default/web%22%3Cscript%3Ealert(1)%3C%2Fscript%3E-node1"


@pytest.mark.parametrize(
    "path", ["/", "/pods", "/images", "/agent", POD_PATH, "/pods?q=%3Cscript%3E", "/pods?sort=cpu"]
)
async def test_view_shows_hostile_texts_escaped_and_no_values(path: str) -> None:
    async with serving() as (url, session), session.get(f"{url}{path}") as response:
        text = await response.text()
    assert response.status == 200
    assert response.content_type == "text/html"
    assert "<script>alert" not in text
    assert "&lt;script&gt;" in text
    assert SECRET not in text
    assert " style=" not in text
    assert "http://" not in text.replace(url, "")
    for name, value in HEADERS.items():
        assert response.headers[name] == value


async def test_every_path_has_security_headers_and_is_get_only() -> None:
    async with serving() as (url, session):
        for path in (
            "/",
            "/nothing",
            "/static/page.js",
            "/data/node",
            "/events?view=no",
            "/pod/default/none",
        ):
            async with session.get(f"{url}{path}") as response:
                for name, value in HEADERS.items():
                    assert response.headers[name] == value, path
                assert "unsafe-inline" not in response.headers["Content-Security-Policy"]
            for method in ("POST", "PUT", "DELETE", "PATCH"):
                async with session.request(method, f"{url}{path}") as response:
                    assert response.status in (404, 405)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"Host": "n1:4194"}, 200),
        ({"Host": "localhost"}, 200),
        ({"Host": "evil.example"}, 403),
        ({"Host": "127.0.0.1.nip.io"}, 403),
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": "http://[bad"}, 403),
        ({"Host": "n1", "Origin": "http://n1"}, 200),
        ({"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"}, 403),
        ({"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}, 200),
        ({"Sec-Fetch-Site": "same-origin", "Sec-Fetch-Mode": "cors"}, 200),
    ],
)
async def test_request_of_another_site_is_rejected(headers: Mapping[str, str], status: int) -> None:
    async with serving() as (url, session):
        for path in ("/", "/data/node", "/events?view=node"):
            async with session.get(f"{url}{path}", headers=headers) as response:
                assert response.status == status


async def test_events_beyond_the_maximum_get_503_and_a_place_becomes_free() -> None:
    async with serving() as (url, session), contextlib.AsyncExitStack() as stack:
        opened = []
        for _ in range(MAX_CLIENTS):
            response = await session.get(f"{url}/events?view=node")
            stack.callback(response.close)
            assert response.status == 200
            opened.append(response)
        async with session.get(f"{url}/events?view=node") as response:
            assert response.status == 503
            assert response.headers["Retry-After"]
        opened[0].close()
        async with asyncio.timeout(10):
            while True:
                async with session.get(f"{url}/events?view=node") as response:
                    if response.status == 200:
                        break
                await asyncio.sleep(0.05)


async def test_events_send_sections_and_sample() -> None:
    async with serving() as (url, session), session.get(f"{url}/events?view=pods") as response:
        assert response.content_type == "text/event-stream"
        text = ""
        async with asyncio.timeout(10):
            while "event: update" not in text or not text.endswith("\n\n"):
                text += (await response.content.readany()).decode()
    assert '"sections":{"pods":' in text
    assert "<script>alert" not in text


async def test_updates_and_charts_of_a_pod_diagnose_no_other_pod() -> None:
    source = Source()
    source.listed = [pod_of("web", "u1"), pod_of("other", "u2")]
    name = source.listed[0].metadata.name
    async with serving(source) as (url, session):
        async with session.get(f"{url}/data/pod/default/{name}") as response:
            assert (await response.json())["series"] == {}
        assert source.diagnosed == []
        async with session.get(f"{url}/data/pod/default/gone") as response:
            assert response.status == 404
        query = {"view": "pod", "namespace": "default", "name": name}
        async with session.get(f"{url}/events", params=query) as response, asyncio.timeout(10):
            while b"event: update" not in await response.content.readline():
                pass
    assert set(source.diagnosed) == {name}


async def test_updates_of_views_with_pods_diagnose_each_pod_once_per_round(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source, rounds = Source(), 0
    source.listed = [pod_of("web", "u1"), pod_of("other", "u2")]
    views = ("view=pods", "view=pods&q=web", "view=pods&q=o", "view=pods&sort=cpu", "view=node")

    async def sample() -> None:
        nonlocal rounds
        rounds += 1

    monkeypatch.setattr(source, "sample", sample)
    async with serving(source) as (url, session), contextlib.AsyncExitStack() as stack:
        for view in views:
            response = await session.get(f"{url}/events?{view}")
            stack.callback(response.close)
            async with asyncio.timeout(10):
                while b"event: update" not in await response.content.readline():
                    pass
        assert set(source.diagnosed) == {pod.metadata.name for pod in source.listed}
        assert len(source.diagnosed) == rounds * len(source.listed)


async def page_of(source: Source, path: str) -> str:
    async with serving(source) as (url, session), session.get(f"{url}{path}") as response:
        assert response.status == 200
        return await response.text()


async def test_images_view_without_runtime_shows_last_list_and_problem() -> None:
    source = Source()
    source.images_problem = f"the runtime is gone {HOSTILE}"
    text = await page_of(source, "/images")
    assert "could not be listed now: the runtime is gone &lt;script&gt;" in text
    assert "<td>both" in text


async def test_images_view_during_a_removal_shows_age_of_the_list() -> None:
    source = Source()
    source.images_wait = "unused images are being removed"
    text = await page_of(source, "/images")
    assert "Now unused images are being removed; this list is 42s old" in text
    assert "could not be listed" not in text
    source.images_wait, source.images_problem = "", "no response within 3 s"
    assert "no response within 3 s; this list is 42s old" in await page_of(source, "/images")


async def test_images_view_shows_both_uses_of_an_image_and_no_idle_time_of_a_pinned_one() -> None:
    text = await page_of(Source(), "/images")
    row = text.partition("<td>both")[2].partition("</tr>")[0]
    assert "in use" in row
    assert "pinned" in row
    assert row.endswith('<td class="number"></td>')


async def test_view_that_fails_is_500_with_security_headers() -> None:
    source = Source()
    source.is_defective = True
    async with serving(source) as (url, session), session.get(f"{url}/images") as response:
        assert response.status == 500
        assert HEADERS.items() <= dict(response.headers).items()


async def test_pod_view_has_last_results_of_probes() -> None:
    probes = (await page_of(Source(), POD_PATH)).partition('id="probes"')[2].partition("</section>")[0]
    assert "1 of the last 2 runs passed" in probes
    assert probes.count('class="fill bad"') == 1
    assert "&lt;script&gt;" in probes


async def test_pulls_in_progress_that_end_are_rendered_hidden() -> None:
    source = Source()
    assert "Pulls in progress" in await page_of(source, "/images")
    source.pulls = []
    text = await page_of(source, "/images")
    assert "Pulls in progress" not in text
    assert '<section id="pulls" data-live hidden>' in text


async def test_why_not_running_has_last_lines_of_the_failed_run_and_its_command() -> None:
    source = Source()
    lines = [f"line {number} {HOSTILE}" + "x" * 1000 for number in range(20)]
    source.failed_log = LogTail(container="main", lines=lines, previous=True)
    chain = (await page_of(source, POD_PATH)).partition('id="chain"')[2].partition("</section>")[0]
    assert "line 19 &lt;script&gt;" in chain
    assert "line 15" in chain
    assert "line 14" not in chain
    assert "x" * 301 not in chain
    assert " -c main -p --data-dir /d</code>" in chain


async def test_node_view_shows_five_failing_pods_and_links_to_the_others() -> None:
    source = Source()
    source.listed = [
        pod_of(
            f"p{number}",
            f"u{number}",
            status={"phase": "Failed", "reason": "Evicted", "message": "no memory"},
        )
        for number in range(7)
    ]
    text = await page_of(source, "/")
    assert text.partition('id="attention"')[2].partition("</table>")[0].count('class="pod"') == 5
    assert '<a href="/pods?state=bad">and 2 more</a>' in text
    assert text.index('id="resources"') < text.index('id="attention"')


async def test_commands_of_all_views_are_commands_of_pykubelet() -> None:
    source = Source()
    source.listed.append(pod_of("web", "u2"))
    source.failed_log = LogTail(container="main", lines=["x"], previous=True)
    shown: set[str] = set()
    for path in ("/", "/pods", "/pods?q=none", "/images", "/agent", "/pod/default/web-node1"):
        found = re.findall(r'<code class="command"[^>]*>([^<]*)</code>', await page_of(source, path))
        assert found, path
        shown.update(map(html.unescape, found))
    for line in shown:
        name, *words = shlex.split(line)
        assert name == "pykubelet"
        assert parses(words), line
    assert not parses(["config", "show"])
    assert not parses(["logs", "web", "--no-such-option"])


INTERFACE_COUNTERS = [
    f"{way}_{kind}" for way in ("rx", "tx") for kind in ("bytes", "packets", "errors", "dropped")
]


async def test_cards_of_charts_and_tables_have_the_equivalent_command() -> None:
    source = Source()
    source.listed.append(pod_of("web", "u2"))
    node = source.node
    stalled = Psi(some=PsiLine(avg10=1.0, total=5))
    usage = Usage(time=1.0, cpu=1, memory=1, working_set=1, cpu_psi=stalled)
    interface = NetworkInterface(name="eth0", **dict.fromkeys(INTERFACE_COUNTERS, 1))

    async def busy() -> NodeFacts:
        return replace(await node(), usage=usage, interfaces=[interface])

    source.node = busy  # type: ignore[method-assign]
    expected = {
        "/": {
            "Last 30 minutes": "top --node -w",
            "Tasks waiting (PSI)": "top --node -o wide",
            "Network interfaces": "top --node -o json",
        },
        "/agent": {"Last 30 minutes": "top --calls -w", "Container runtime": "top --calls"},
        "/pod/default/web-node1": {
            "Usage": "top default/web-node1 -w",
            "Timeline": "describe default/web-node1",
        },
    }
    for path, commands in expected.items():
        text = await page_of(source, path)
        found = {
            html.unescape(title): html.unescape(command)
            for title, command in re.findall(
                r'<header><h2>([^<]*)</h2><code class="command"[^>]*>([^<]*)</code>', text
            )
        }
        for title, command in commands.items():
            assert found[title] == f"pykubelet {command} --data-dir /d", path
        # Every table and every chart is in a card with a command.
        for card in re.findall(r'<section class="card.*?</section>', text, re.DOTALL):
            if "<table" in card or "<figure" in card:
                assert '<code class="command"' in card, card[:200]


def parses(words: list[str]) -> bool:
    """Return whether commands and options of a command line exist; it is not run."""
    return CliRunner().invoke(app, [*words, "--help"]).exit_code == 0


async def test_pod_that_left_is_404_with_a_link() -> None:
    async with serving() as (url, session), session.get(f"{url}/pod/default/none") as response:
        text = await response.text()
    assert response.status == 404
    assert 'href="/pods"' in text
    assert "data-events" not in text


def test_gc_plan_removes_least_recently_used_images_until_enough_is_free() -> None:
    records = [
        image("old", 6 << 30, last_used=1.0),
        image("new", 6 << 30, last_used=2.0),
        image("used", 1, in_use=True),
        image("pinned", 1, pinned=True),
    ]
    plan = gc_plan(records, ImageGCPolicy(), DISK, now=1e6)
    assert [item.key.id for item in plan.candidates] == ["sha256:old", "sha256:new"]
    assert plan.next == {"sha256:old", "sha256:new"}
    roomy = replace(DISK, available=50 << 30)
    assert gc_plan(records, ImageGCPolicy(), roomy, now=1e6).next == frozenset()
    assert gc_plan(records, ImageGCPolicy(), None, now=1e6).next == frozenset()
