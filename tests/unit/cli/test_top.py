"""`pykubelet top`, and usage in `ps -o wide` and `describe`, with a node that reports recorded statistics."""

import asyncio
import io
import json
import os
import signal
import termios
from asyncio.subprocess import PIPE
from collections.abc import Awaitable, Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from aiohttp import web
from rich.console import Console
from typer.testing import CliRunner

from pykubelet.api.meta import from_document
from pykubelet.api.pod import Pod
from pykubelet.api.stats import Summary
from pykubelet.cli.client import NodeClient, draw_live
from pykubelet.cli.node_access import Node
from pykubelet.cli.options import NodeSelection
from pykubelet.cli.output import Output
from pykubelet.cli.pods.commands import TopSort
from pykubelet.cli.pods.describe import describe_text
from pykubelet.cli.pods.ps import run_ps
from pykubelet.cli.pods.top import Snapshot, TopOptions, fitting_columns, run_top, table_lines
from pykubelet.cli.pods.usage import NO_TRAFFIC, Traffic, memory_sparkline
from pykubelet.cli.pods.usage_table import (
    SORT_KEYS,
    UsageRow,
    columns,
    container_rows,
    node_line,
    node_rows,
    pod_rows,
    sort_key,
)
from pykubelet.cli.pykubelet import app
from pykubelet.server.pods import NodePods, PodJournal
from pykubelet.server.stats import memory_curve_routes
from pykubelet.standalone.instance import Instance
from pykubelet.stats.samples import ContainerMemoryCurve, MemoryCurves
from tests.support.cli_node import Ran, Terminal, answering, command, environment, pykubelet
from tests.support.pod_view import START, ScriptedView, pod_of
from tests.support.summary_documents import summary_document

Document = dict[str, Any]
GOLDEN = Path(__file__).parents[2] / "data" / "golden" / "stats"
MI = 1 << 20
HOSTILE = "x\x1b[2J\x9b31m\x07\r\n"


def recorded() -> Document:
    document: Document = json.loads((GOLDEN / "summary.json").read_bytes())
    return document


def recorded_pods() -> list[Pod]:
    """Give the pods of the recording, with the uids that they had."""
    uids = {stats["podRef"]["name"]: stats["podRef"]["uid"] for stats in recorded()["pods"]}
    text = (GOLDEN / "pods.yaml").read_text() + "\n---\n" + (GOLDEN / "static.yaml").read_text()
    pods = []
    for document in yaml.safe_load_all(text):
        name = document["metadata"]["name"]
        key = name if name in uids else f"{name}-vm"
        metadata = {"namespace": "default"} | document["metadata"] | {"name": key, "uid": uids[key]}
        statuses = [
            {"name": container["name"], "restartCount": 2 * (name == "crasher"), "state": {"running": {}}}
            for container in document["spec"]["containers"]
        ]
        status = {"phase": "Running", "containerStatuses": statuses}
        pods.append(from_document(Pod, document | {"metadata": metadata, "status": status}))
    return pods


class Statistics:
    """The statistics endpoint of a node: what it returns can be exchanged at any time."""

    def __init__(self, document: Document) -> None:
        self.document = document
        self.failure: web.Response | None = None
        self.queries: list[str] = []

    def routes(self) -> Sequence[web.RouteDef]:
        async def summary(request: web.Request) -> web.Response:
            self.queries.append(request.query_string)
            return self.failure or web.json_response(self.document)

        return [web.get("/stats/summary", summary)]


@pytest.fixture
def instance(data_dir: Path) -> Instance:
    (data_dir / "kubelet").mkdir(parents=True)
    return Instance.at(data_dir)


@pytest.fixture
def view() -> ScriptedView:
    return ScriptedView(recorded_pods())


@pytest.fixture
def statistics() -> Statistics:
    return Statistics(recorded())


Top = Callable[..., Awaitable[Ran]]


@pytest.fixture
def top(instance: Instance, capsys: pytest.CaptureFixture[str]) -> Top:
    """Run `top` with these options in this process, which is faster than a process of its own."""

    async def run(**options: Any) -> Ran:
        code = await asyncio.to_thread(run_top, NodeSelection(instance.data_dir), TopOptions(**options))
        return Ran(code, *capsys.readouterr())

    return run


def rows_of(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines()]


async def test_pykubelet_top_recorded_summary_prints_table_by_cpu(
    instance: Instance, view: ScriptedView, statistics: Statistics
) -> None:
    async with answering(instance, view, statistics.routes()):
        ran = await pykubelet(instance, "top")
    assert (ran.code, ran.err) == (0, "")
    heading, burner, writer, *others = rows_of(ran.out)
    assert heading == [
        "NAME",
        "NAMESPACE",
        "CPU(cores)",
        "CPU/LIMIT",
        "MEMORY(bytes)",
        "MEMORY/LIMIT",
        "RESTARTS",
        "RX",
        "TX",
        "EPHEMERAL",
    ]
    usage = {stats["podRef"]["name"]: stats for stats in recorded()["pods"]}["burner"]
    milli, memory = usage["cpu"]["usageNanoCores"] / 1e6, usage["memory"]["workingSetBytes"]
    assert burner[:2] == ["burner", "default"]
    assert int(burner[2].removesuffix("m")) == pytest.approx(milli, abs=1)
    assert burner[3:5] == [f"{int(milli)}%", f"{memory >> 20}Mi"]
    assert burner[5] == f"{100 * memory // (32 * MI)}%"
    assert burner[6:] == ["0", "-", "-", "24Ki"]
    assert writer[0] == "writer"
    assert writer[3] == "-"
    assert len(others) == 5
    # The rest uses less than the first two, in order.
    cpu = [int(row[2].removesuffix("m")) for row in rows_of(ran.out)[1:]]
    assert cpu == sorted(cpu, reverse=True)


async def test_run_top_pod_prints_its_containers(
    instance: Instance, view: ScriptedView, statistics: Statistics, top: Top
) -> None:
    async with answering(instance, view, statistics.routes()):
        holder = await top(pod="holder")
        crasher = await top(pod="default/crasher", sort="name")
        sidecar = await top(pod="sidecar", output="name", sort="name")
    assert holder.code == 0
    heading, main = rows_of(holder.out)
    assert heading[:2] == ["NAME", "CPU(cores)"]
    assert main == ["c", "0m", "-", "19Mi", "15%", "0", "24Ki"]
    # The container that crashed is not measured.
    assert [row[:2] + row[5:6] for row in rows_of(crasher.out)[1:]] == [["c", "-", "2"], ["good", "0m", "2"]]
    assert sidecar.out == "main\nside\n"


async def test_run_top_wide_has_more_columns_and_digits(
    instance: Instance, view: ScriptedView, statistics: Statistics, top: Top
) -> None:
    async with answering(instance, view, statistics.routes()):
        ran = await top(output="wide", sort="memory")
    heading, holder, *_ = rows_of(ran.out)
    cells = dict(zip(heading, holder, strict=True))
    assert cells | {"NAME": "holder", "MEMORY(bytes)": "19.6Mi", "MEMORY/LIMIT": "15.3%"} == cells
    assert cells | {"MEMORY/REQUEST": "61.2%", "RSS": "96.0Ki", "SWAP": "0", "PSI(cpu)": "0.0%"} == cells


async def test_run_top_node_prints_node_and_system_containers(
    instance: Instance, view: ScriptedView, statistics: Statistics, top: Top
) -> None:
    async with answering(instance, view, statistics.routes()):
        ran = await top(node=True)
        document = json.loads((await top(node=True, output="json")).out)
    heading, node, pods = rows_of(ran.out)
    assert heading == ["NAME", "CPU(cores)", "CPU(%)", "MEMORY(bytes)", "MEMORY(%)", "RX", "TX", "DISK"]
    assert node[:2] + node[3:] == ["vm", "195m", "1693Mi", "7%", "602Mi", "3.7Mi", "27Gi"]
    assert pods[:2] + pods[3:] == ["pods", "115m", "33Mi", "0%", "-", "-", "-"]
    assert document == {"node": recorded()["node"]}


async def test_run_top_json_and_yaml_are_the_sorted_summary(
    instance: Instance, view: ScriptedView, statistics: Statistics, top: Top
) -> None:
    async with answering(instance, view, statistics.routes()):
        document = json.loads((await top(output="json", sort="memory")).out)
        again = yaml.safe_load((await top(output="yaml", sort="memory")).out)
        one = json.loads((await top(pod="writer", output="json")).out)
        names = (await top(output="name", sort="name")).out.splitlines()
    assert again == document
    assert document["node"] == recorded()["node"]
    sizes = [stats["memory"]["workingSetBytes"] for stats in document["pods"]]
    assert sizes == sorted(sizes, reverse=True)
    assert len(sizes) == 7
    assert one["pods"] == [stats for stats in recorded()["pods"] if stats["podRef"]["name"] == "writer"]
    assert names == sorted(names)
    assert names[0] == "default/burner"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["-w", "-o", "json"], "--watch shows a table"),
        (["-w", "-o", "name"], "--watch shows a table"),
        (["--interval", "10"], "has no unit"),
        (["--interval", "1ms"], "is not between 1s and 1h"),
        (["--interval", "200h"], "is not between 1s and 1h"),
        (["--sort", "size"], "'size' is not one of"),
        (["--node", "web"], "leave out one of the two"),
    ],
)
def test_pykubelet_top_invalid_options_exit_2(instance: Instance, arguments: list[str], text: str) -> None:
    ran = CliRunner().invoke(app, ["top", "--data-dir", str(instance.data_dir), *arguments])
    assert (ran.exit_code, ran.stdout) == (2, "")
    assert text in " ".join(ran.stderr.replace("│", " ").split())


def test_top_sort_option_has_every_sort_key() -> None:
    assert [sort.value for sort in TopSort] == list(SORT_KEYS)


async def test_run_top_kubelet_not_running_exits_1(instance: Instance, top: Top) -> None:
    ran = await top()
    assert (ran.code, ran.out) == (1, "")
    data_dir = instance.data_dir
    assert ran.err == (
        f"pykubelet top: no node runs on {data_dir}: start it with `pykubelet up --data-dir {data_dir}`\n"
    )


async def test_run_top_unknown_pod_lists_pods(
    instance: Instance, view: ScriptedView, statistics: Statistics, top: Top
) -> None:
    async with answering(instance, view, statistics.routes()):
        ran = await top(pod="n\x1bo")
    assert (ran.code, ran.out) == (1, "")
    assert ran.err.startswith("pykubelet top: there is no pod 'n\\x1bo'; there are:\n  default/burner (uid ")


async def test_run_top_older_kubelet_without_statistics_exits_1(
    instance: Instance, view: ScriptedView, top: Top
) -> None:
    data_dir = instance.data_dir
    text = (
        f"pykubelet top: the node on {data_dir} does not serve statistics: it runs an older version; "
        f"stop it and start it with `pykubelet up --data-dir {data_dir}`\n"
    )
    async with answering(instance, view):
        assert await top() == Ran(1, "", text)
        assert await top(output="json") == Ran(1, "", text)
        assert await top(node=True) == Ran(1, "", text)
        assert await top(pod="holder", watch=True) == Ran(1, "", text)


async def test_pykubelet_ps_and_describe_older_kubelet_omit_usage(
    instance: Instance, view: ScriptedView
) -> None:
    async with answering(instance, view):
        wide = await pykubelet(instance, "ps", "-o", "wide")
        described = await pykubelet(instance, "describe", "holder")
    assert (wide.code, wide.err) == (0, "")
    assert all(row[-2:] == ["-", "-"] for row in rows_of(wide.out)[1:])
    assert described.code == 0
    assert "Usage:" not in described.out


@pytest.mark.parametrize(
    ("failure", "text"),
    [
        (
            lambda: web.json_response({"message": "no \x1b[2J"}, status=500),
            "(status 500: no \\x1b[2J): try again",
        ),
        (lambda: web.Response(status=503, text="starting\nup"), "(status 503: starting\\nup): try again"),
        (lambda: web.Response(status=500), "(status 500: no reason): try again"),
        (lambda: web.Response(text="{"), "of another version"),
        (lambda: web.Response(text='{"pods": 3}'), "of another version"),
        (lambda: web.Response(body=b" " * ((32 << 20) + 1)), "has more than 32 MiB"),
    ],
)
async def test_run_top_failing_statistics_prints_one_line_and_ps_continues(
    instance: Instance,
    view: ScriptedView,
    statistics: Statistics,
    failure: Callable[[], web.Response],
    text: str,
    top: Top,
    capsys: pytest.CaptureFixture[str],
) -> None:
    statistics.failure = failure()
    async with answering(instance, view, statistics.routes()):
        ran = await top()
        statistics.failure = failure()
        show = partial(run_ps, NodeSelection(instance.data_dir), output=Output.WIDE)
        assert await asyncio.to_thread(show) == 0
    assert (ran.code, ran.out, ran.err.count("\n")) == (1, "", 1)
    assert text in ran.err
    assert len(rows_of(capsys.readouterr().out)) == 8


async def test_run_top_no_samples_yet_exits_1(instance: Instance, statistics: Statistics, top: Top) -> None:
    done = pod_of("done", "d", node="", status={"phase": "Succeeded"})
    view = ScriptedView([pod_of("new", "u", node=""), done])
    statistics.document = summary_document(nodeName="vm")
    async with answering(instance, view, statistics.routes()):
        pods = await top()
        new = await top(pod="new")
        as_json = await top(pod="new", output="json")
        node = await top(node=True)
        finished = await top(pod="done")
        view.listed = [done]
        none = await top()
    retry = "try again in some seconds, or watch with -w\n"
    assert (pods.code, pods.err) == (1, f"pykubelet top: no pod has been measured yet: {retry}")
    assert (new.code, new.err) == (1, f"pykubelet top: pod new (Running) has not been measured yet: {retry}")
    assert (as_json.code, as_json.out, as_json.err) == (1, "", new.err)
    assert (node.code, node.err) == (1, f"pykubelet top: the node has not been measured yet: {retry}")
    assert (finished.code, finished.err) == (
        1,
        "pykubelet top: pod done is Succeeded: only pods that run use anything\n",
    )
    assert (none.code, none.out) == (0, "")
    assert none.err.startswith("No running pods.")


async def test_run_top_hostile_names_are_escaped(
    instance: Instance, statistics: Statistics, top: Top
) -> None:
    statistics.document = recorded()
    for stats in statistics.document["pods"]:
        stats["podRef"] |= {"name": HOSTILE, "namespace": HOSTILE}
        stats["containers"][0]["name"] = HOSTILE
    statistics.document["node"]["nodeName"] = HOSTILE
    view = ScriptedView(recorded_pods()[:1])
    name = view.listed[0].metadata.name
    outputs = ("table", "wide", "name", "json", "yaml")
    async with answering(instance, view, statistics.routes()):
        texts = [(await top(output=output)).out for output in outputs]
        texts += [(await top(node=True)).out, (await top(pod=name)).out]
        texts.append((await pykubelet(instance, "describe", name)).out)
        terminal = Terminal(command(instance, "top", "-w"))
        await terminal.until("Ctrl-C")
        terminal.type("\x03")
        await terminal.until("\x1b[?25h")
        assert await terminal.end() == 130
    for text in texts:
        assert text.isascii()
        assert not set(text) & set("\x1b\x07\r"), text
    assert b"\x1b[2J" not in terminal.said
    assert b"\x9b" not in terminal.said
    assert b"\x07" not in terminal.said
    assert b"x\\x1b[2J\\x9b31m\\x07\\r\\n" in terminal.said


async def test_run_top_many_pods_prints_all(instance: Instance, statistics: Statistics, top: Top) -> None:
    template = recorded()["pods"][0]
    view = ScriptedView([pod_of(f"p{number}", f"u{number}", node="") for number in range(500)])
    statistics.document["pods"] = [
        template
        | {
            "podRef": {"name": pod.metadata.name, "namespace": "default", "uid": pod.uid},
            "cpu": {"time": None, "usageNanoCores": number * 10**6},
        }
        for number, pod in enumerate(view.listed)
    ]
    async with answering(instance, view, statistics.routes()):
        ran = await top()
        terminal = Terminal(command(instance, "top", "-w"), rows=24)
        await terminal.until("480 more rows, sorted by cpu")
        terminal.type("\x03")
        await terminal.until("\x1b[?25h")
        assert await terminal.end() == 130
    rows = rows_of(ran.out)[1:]
    assert [row[0] for row in rows] == [f"p{number}" for number in reversed(range(500))]
    assert b"p499" in terminal.said
    assert b"p400 " not in terminal.said


async def test_pykubelet_top_watch_pipe_repeats_table_and_survives_kubelet_restart(
    instance: Instance, view: ScriptedView, statistics: Statistics
) -> None:
    arguments = ("top", "-w", "--interval", "1s")
    network = {"name": "eth0", "rxBytes": 1000, "txBytes": 5, "time": "2026-11-17T13:25:40Z"}
    statistics.document["pods"][0]["network"] = network
    async with answering(instance, view, statistics.routes()):
        process = await asyncio.create_subprocess_exec(
            *command(instance, *arguments), stdout=PIPE, stderr=PIPE, env=environment()
        )
        assert process.stdout is not None
        assert process.stderr is not None
        async with asyncio.timeout(60):
            assert b"Node vm: CPU 195m of " in await process.stdout.readline()
            assert b"RX/s" in await process.stdout.readline()
            burner, *_ = [await process.stdout.readline() for _ in range(7)]
            assert burner.startswith(b"burner ")
            statistics.document["pods"][0]["network"] = network | {
                "rxBytes": 11240,
                "time": "2026-11-17T13:25:50Z",
            }
            while b"1.0Ki/s" not in (line := await process.stdout.readline()):
                assert line
            assert line.startswith(b"holder ")
            assert line.split()[-3:-1] == [b"1.0Ki/s", b"0/s"]
    async with asyncio.timeout(60):
        while b"no node runs on" not in (line := await process.stderr.readline()):
            # The request was sent while the node stopped.
            assert b"is it being stopped?" in line
        view.listed.append(pod_of("late", "cccc"))
        async with answering(instance, view, statistics.routes()):
            while not (await process.stdout.readline()).startswith(b"late-node1 "):
                assert process.returncode is None
            process.send_signal(2)
            _, err = await process.communicate()
            assert (err, process.returncode) == (b"", 130)


async def test_pykubelet_top_watch_terminal_redraws_and_restores_terminal(
    instance: Instance, view: ScriptedView, statistics: Statistics
) -> None:
    async with answering(instance, view, statistics.routes()):
        terminal = Terminal(command(instance, "top", "-w", "--interval", "1s"), columns=150)
        before = termios.tcgetattr(terminal.fd)
        await terminal.until("Ctrl-C ends the watching")
        # The burner is at its limit.
        assert b"\x1b[31m99%" in terminal.said or b"\x1b[31m100%" in terminal.said
        view.listed.append(pod_of("late", "cccc"))
        await terminal.until("late-node1")
    await terminal.until("no node runs on")
    terminal.type("\x03")
    await terminal.until("\x1b[?25h")
    assert termios.tcgetattr(terminal.fd) == before
    assert await terminal.end() == 130
    # Lines are redrawn in place, not on another screen.
    assert b"\x1b[1A" in terminal.said
    assert b"\x1b[?1049h" not in terminal.said


async def test_pykubelet_top_watch_terminal_sigterm_restores_cursor(
    instance: Instance, view: ScriptedView, statistics: Statistics
) -> None:
    async with answering(instance, view, statistics.routes()):
        terminal = Terminal(command(instance, "top", "holder", "-w"))
        await terminal.until("Ctrl-C ends the watching")
        terminal.signal(15)
        await terminal.until("\x1b[?25h")
        assert await terminal.end() == 143


async def test_pykubelet_top_watch_pod_removed_shows_problem_and_successor(
    instance: Instance, view: ScriptedView, statistics: Statistics
) -> None:
    async with answering(instance, view, statistics.routes()):
        terminal = Terminal(command(instance, "top", "holder", "-w", "--interval", "1s"))
        await terminal.until("19Mi")
        listed, view.listed = view.listed, [pod_of("x", "xxxx")]
        await terminal.until("there is no pod 'holder'")
        view.listed = listed
        terminal.said = b""
        await terminal.until("Ctrl-C ends the watching")
        terminal.type("\x03")
        await terminal.until("\x1b[?25h")
        assert await terminal.end() == 130


async def test_pykubelet_top_terminal_once_prints_node_totals_without_colour(
    instance: Instance, view: ScriptedView, statistics: Statistics
) -> None:
    async with answering(instance, view, statistics.routes()):
        terminal = Terminal(command(instance, "top"))
        await terminal.until("EPHEMERAL")
        await terminal.until("hostnet")
        assert await terminal.end() == 0
    assert terminal.said.startswith(b"Node vm: CPU 195m of ")
    assert b"\x1b" not in terminal.said


async def test_pykubelet_ps_wide_prints_usage(
    instance: Instance, view: ScriptedView, statistics: Statistics
) -> None:
    view.listed.append(pod_of("new", "u"))
    async with answering(instance, view, statistics.routes()):
        wide = await pykubelet(instance, "ps", "-o", "wide")
        narrow = await pykubelet(instance, "ps")
        assert (await pykubelet(instance, "ps", "-o", "wide", "-w", "-o", "json")).code == 2
    heading, *rows = rows_of(wide.out)
    assert heading[-3:] == ["AGE", "CPU(cores)", "MEMORY(bytes)"]
    usage = {row[0]: row[-2:] for row in rows}
    assert usage["holder"] == ["0m", "19Mi"]
    assert usage["new-node1"] == ["-", "-"]
    assert "CPU" not in narrow.out
    assert statistics.queries == ["only_cpu_and_memory=true"]


async def test_pykubelet_ps_wide_watch_prints_no_row_for_changed_usage(
    instance: Instance, view: ScriptedView, statistics: Statistics
) -> None:
    async with answering(instance, view, statistics.routes()):
        process = await asyncio.create_subprocess_exec(
            *command(instance, "ps", "-w", "-o", "wide"), stdout=PIPE, env=environment()
        )
        assert process.stdout is not None
        async with asyncio.timeout(60):
            lines = [await process.stdout.readline() for _ in range(8)]
            assert lines[0].split()[-1] == b"MEMORY(bytes)"
            for stats in statistics.document["pods"]:
                stats["cpu"]["usageNanoCores"] = 10**9
            while len(statistics.queries) < 2:
                await asyncio.sleep(0.05)
            view.listed.append(pod_of("late", "cccc"))
            assert (await process.stdout.readline()).startswith(b"late-node1 ")
            process.send_signal(2)
            assert await process.wait() == 130


def test_describe_text_usage_against_requests_and_limits() -> None:
    summary = from_document(Summary, recorded())
    pods = {pod.metadata.name: pod for pod in recorded_pods()}
    stats = {found.pod_ref.name: found for found in summary.pods}
    now = START.replace(year=2026, month=11, day=17, hour=13, minute=25, second=50)
    page = describe_text(pods["holder"], "syncing", PodJournal(), now, stats["holder"])
    at = page.index("Usage:")
    assert page[at + 1 : at + 9] == [
        "  c:",
        "    CPU:               0m",
        "    Memory:            19Mi (60% of the request 32Mi, 15% of the limit 128Mi)",
        "    Ephemeral storage: 24Ki (writable layer 24Ki, logs 0)",
        "  Whole pod:",
        "    CPU:               0m",
        "    Memory:            20Mi",
        "    Ephemeral storage: 28Ki",
    ]
    assert page[at + 9] == "    Measured:          11s ago"
    burner = describe_text(pods["burner"], "syncing", PodJournal(), now, stats["burner"])
    assert any("% of the limit 100m)" in line for line in burner)


def test_describe_text_memory_curves_one_line_per_container() -> None:
    pods = {pod.metadata.name: pod for pod in recorded_pods()}
    curves = MemoryCurves(
        containers=[
            ContainerMemoryCurve("c", None, [16 << 20, 64 << 20, 0, 100 << 20, 127 << 20], [0, 0, 0, 2, 0]),
            ContainerMemoryCurve("old", None, [], []),
            ContainerMemoryCurve("a\x1b[2J", 0, [1 << 20] * 60, [0] * 60),
        ]
    )
    page = describe_text(pods["holder"], "syncing", PodJournal(), START, curves=curves)
    at = page.index("Memory of the last minutes:")
    assert page[at + 1].split(maxsplit=1) == [
        "c:",
        "▂▅ ✗█ 16Mi to 127Mi, limit 128Mi, 2 OOM kills (✗), last 50s",
    ]
    assert page[at + 2].endswith(f"{'█' * 60} 1.0Mi to 1.0Mi, last 10m")
    assert "\x1b" not in page[at + 2]
    assert not page[at + 3 :] or page[at + 3] == ""
    assert "Memory of the last minutes:" not in describe_text(
        pods["holder"], "syncing", PodJournal(), START, curves=MemoryCurves()
    )


async def test_memory_curves_reported_missing_and_invalid(instance: Instance, view: ScriptedView) -> None:
    """Verify that a description does not fail without curves: of an older kubelet, or of a damaged report."""
    curves = MemoryCurves(containers=[ContainerMemoryCurve("c", 7, [1, 2], [0, 1])])
    asked: list[str] = []

    def report(uid: str) -> MemoryCurves:
        asked.append(uid)
        return curves

    async def damaged(_: web.Request) -> web.Response:
        return web.Response(text='{"containers": 7}')

    client = NodeClient(Node.of(instance))
    async with answering(instance, view, memory_curve_routes(report)):
        assert await asyncio.to_thread(client.memory_curves, "a/b") == curves
    assert asked == ["a/b"]
    for routes in ([], [web.get("/pods/{uid}/memory", damaged)]):
        async with answering(instance, view, routes):
            assert await asyncio.to_thread(client.memory_curves, "u") == MemoryCurves()
    assert client.memory_curves("u") == MemoryCurves(), "no kubelet runs"


def test_memory_sparkline_kills_without_samples_are_shown() -> None:
    assert memory_sparkline(ContainerMemoryCurve("c", 1 << 20, [0], [1]), 10.0) == (
        "✗ limit 1.0Mi, 1 OOM kill (✗), last 10s"
    )


def test_describe_text_usage_missing_fields_omitted() -> None:
    waiting = {"total": 1, "avg10": 12.34, "avg60": 0.0, "avg300": 0.0}
    containers = [
        {"name": "other", "cpu": {"usageNanoCores": 1, "psi": {"some": waiting, "full": waiting}}},
        {"name": "c"},
    ]
    document = summary_document(
        [{"podRef": {"uid": "u"}, "containers": containers, "network": {"rxBytes": 2048}}]
    )
    (usage,) = from_document(Summary, document).pods
    page = describe_text(pod_of("p", "u"), "syncing", PodJournal(), START + timedelta(1), usage)
    at = page.index("Usage:")
    assert page[at + 1 :] == [
        "  other:",
        "    CPU:          1m",
        "    CPU pressure: 12.3% of the last 10s",
        "  Whole pod:",
        "    CPU:     1m",
        "    Network: 2.0Ki received, - sent",
    ]


ROWS = [
    UsageRow(name="a", cpu=5, memory=1, cpu_limit=10, network=Traffic(1, 1), restart_count=0),
    UsageRow(name="b", cpu=9, memory=3, cpu_limit=90, storage=1, restart_count=2),
    UsageRow(name="c"),
    UsageRow(name="A", namespace="z", cpu=5, memory=2, memory_limit=4, network=Traffic(None, 9)),
]


@pytest.mark.parametrize(
    ("sort", "order"),
    [
        ("cpu", "baAc"),
        ("memory", "bAac"),
        ("cpu-limit", "abcA"),
        ("memory-limit", "Aabc"),
        ("restarts", "bacA"),
        ("network", "Aabc"),
        ("ephemeral", "bacA"),
        ("name", "abcA"),
    ],
)
def test_sort_key_largest_first_and_unknown_last(sort: str, order: str) -> None:
    assert "".join(row.name for row in sorted(ROWS, key=lambda row: sort_key(row, sort))) == order


def test_pod_rows_pods_and_statistics_that_do_not_match() -> None:
    summary = from_document(
        Summary,
        summary_document(
            [{"podRef": {"name": "left", "namespace": "n", "uid": "l"}, "cpu": {"usageNanoCores": 1}}]
        ),
    )
    done = pod_of("done", "d", status={"phase": "Failed"})
    rows = pod_rows(NodePods(pods=[pod_of("new", "u"), done]), summary, {}, START)
    assert [(row.name, row.namespace, row.cpu, row.restarts) for row in rows] == [
        ("left", "n", 1, "-"),
        ("new-node1", "default", None, "0"),
    ]


def test_pod_rows_limit_only_if_every_container_has_one() -> None:
    limited = {"name": "a", "resources": {"limits": {"cpu": "1", "memory": "1Mi"}}}
    free = {"name": "b", "resources": {"limits": {"cpu": "500m"}}}
    (row,) = pod_rows(
        NodePods(pods=[pod_of("p", "u", spec={"containers": [limited, free]})]),
        from_document(Summary, summary_document()),
        {},
        START,
    )
    assert (row.cpu_limit, row.memory_limit) == (1_500_000_000, None)


def test_container_rows_init_containers_only_while_measured() -> None:
    pod = pod_of(
        "p",
        "u",
        spec={"initContainers": [{"name": "init"}, {"name": "side", "restartPolicy": "Always"}]},
    )
    assert [row.name for row in container_rows(pod, None, START)] == ["main", "side"]
    (stats,) = from_document(
        Summary, summary_document([{"containers": [{"name": "init"}, {"name": "?"}]}])
    ).pods
    assert [row.name for row in container_rows(pod, stats, START)] == ["main", "init", "side", "?"]


def test_node_line_nothing_measured_has_no_numbers() -> None:
    stats = from_document(Summary, summary_document()).node
    assert (
        node_line(stats, 0, None) == "Node : CPU - of ? cores (-), memory - of - (-), disk - of - (-), 0 pods"
    )
    (row,) = node_rows(stats, NO_TRAFFIC, None)
    assert not row.is_measured


@pytest.mark.parametrize(("width", "count"), [(200, 5), (34, 5), (33, 4), (27, 4), (26, 3), (20, 3), (1, 3)])
def test_fitting_columns_narrow_terminal_drops_last_columns(width: int, count: int) -> None:
    assert fitting_columns([4, 5, 5, 4, 4], width) == count


class _Interrupting:
    """A frame that interrupts the process while it is drawn."""

    def __rich_console__(self, *_: Any) -> Iterator[str]:
        yield "first "
        os.kill(os.getpid(), signal.SIGINT)
        yield "last"


@pytest.mark.parametrize("number", [1, 2])
def test_draw_live_interrupt_while_drawing_completes_frame_and_restores_cursor(number: int) -> None:
    """Verify that Ctrl-C neither leaves a frame incomplete nor the cursor hidden, also in the first frame."""
    handler = signal.getsignal(signal.SIGTERM)
    output = io.StringIO()
    frames: list[Any] = ["", _Interrupting(), "never"][2 - number :]
    try:
        with pytest.raises(KeyboardInterrupt):
            draw_live(frames, Console(file=output, force_terminal=True, width=80, _environ={"TERM": "xterm"}))
    finally:
        signal.signal(signal.SIGTERM, handler)
    text = output.getvalue()
    assert text.index("\x1b[?25l") < text.index("last") < text.rindex("\x1b[?25h")
    assert "never" not in text


def test_table_lines_shares_near_limit_are_coloured() -> None:
    rows = [
        UsageRow(name=str(percent), cpu=percent, cpu_limit=100, memory=1, memory_limit=100)
        for percent in (74, 75, 90, 300)
    ]
    snapshot = Snapshot(rows, columns("container", wide=False, rates=True), "", START, detail=False)
    heading, *lines = table_lines(snapshot, 200)
    assert heading.plain.split()[:3] == ["NAME", "CPU(cores)", "CPU/LIMIT"]
    assert [[str(span.style) for span in line.spans if span.style] for line in lines] == [
        [],
        ["yellow"],
        ["red"],
        ["red"],
    ]
