"""`pykubelet ps`, `describe` and `restart`, and the client below them, with a node that a script plays."""

import asyncio
import json
import os
import socket
import sys
from asyncio.subprocess import PIPE
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pykubelet.cli.client import KubeletNotRunning, NodeClient, NodeError, NotFoundError
from pykubelet.cli.node_access import Node
from pykubelet.cli.pods.describe import describe_text
from pykubelet.cli.pods.ps import REMOVED_STATUS, changes
from pykubelet.cli.printers import Row, escape_unprintable, format_columns
from pykubelet.podconfig.pod_history import Event, TimelineEntry
from pykubelet.server.pods import SOCKET_NAME, PodJournal
from pykubelet.standalone.data_dir import hold_lock
from pykubelet.standalone.instance import Instance
from tests.support.cli_node import Terminal, answering, command, environment, pykubelet
from tests.support.pod_view import START, ScriptedView, pod_of

A = Row("a", "default", "1/1", "Running", "0", "10.0.0.1", "5s")
B = Row("b", "default", "0/1", "CrashLoopBackOff", "3 (5s ago)", "10.0.0.2", "5s")


@pytest.fixture
def instance(data_dir: Path) -> Instance:
    (data_dir / "kubelet").mkdir(parents=True)
    return Instance.at(data_dir)


@pytest.fixture
def view() -> ScriptedView:
    running = {
        "name": "main",
        "ready": True,
        "started": True,
        "restartCount": 1,
        "state": {"running": {"startedAt": "2026-01-02T03:04:06Z"}},
        "lastState": {
            "terminated": {
                "exitCode": 3,
                "reason": "Error",
                "message": "no \x1b[31mconfig\n",
                "startedAt": "2026-01-02T03:04:00Z",
                "finishedAt": "2026-01-02T03:04:05Z",
            }
        },
        "containerID": "containerd://abc",
    }
    main = {
        "name": "main",
        "image": "busybox",
        "command": ["httpd", "-f"],
        "ports": [{"containerPort": 80, "hostPort": 8080, "hostIP": "127.0.0.1"}],
        "env": [
            {"name": "A", "value": "b"},
            {"name": "IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        ],
        "readinessProbe": {"httpGet": {"port": "http", "path": "/ok"}, "periodSeconds": 2},
        "livenessProbe": {"exec": {"command": ["true"]}},
        "resources": {"limits": {"memory": "32Mi"}},
        "volumeMounts": [{"name": "data", "mountPath": "/data", "readOnly": True}],
    }
    web = pod_of(
        "web",
        "aaaa1111",
        spec={"containers": [main], "volumes": [{"name": "data", "hostPath": {"path": "/srv"}}]},
        status={
            "podIP": "10.1.0.2",
            "conditions": [{"type": "Ready", "status": "True", "lastTransitionTime": "2026-01-02T03:04:06Z"}],
            "containerStatuses": [running],
        },
    )
    other = pod_of("job", "bbbb2222", namespace="batch", status={"phase": "Pending"})
    return ScriptedView(
        [web, other],
        events={
            "aaaa1111": [
                Event(
                    "Warning",
                    "BackOff",
                    "back-off",
                    "spec.containers{main}",
                    START.timestamp(),
                    START.timestamp() + 60,
                    4,
                )
            ]
        },
        notes={
            "aaaa1111": [
                TimelineEntry(START.timestamp(), "source", "ADD from file"),
                TimelineEntry(START.timestamp() + 0.25, "decide", "new sandbox (no sandbox yet); start main"),
            ]
        },
        states={"bbbb2222": "terminating"},
    )


def test_format_columns_aligned_and_control_characters_escaped() -> None:
    assert format_columns([("A", "LONGER"), ("xyz", "1"), ("\x1b[2J", "")]) == [
        "A         LONGER",
        "xyz       1",
        "\\x1b[2J",
    ]


@given(st.text())
def test_escape_unprintable_any_text_has_no_control_characters(text: str) -> None:
    assert all(character.isprintable() or character in "\n\t" for character in escape_unprintable(text))
    assert escape_unprintable(text, lines=False).isprintable()


@pytest.mark.parametrize(
    ("before", "after", "news"),
    [
        ([], [A, B], [A, B]),
        ([A, B], [A, B], []),
        ([A], [replace(A, age="6s")], []),
        ([B], [replace(B, restarts="3 (6s ago)")], []),
        ([B], [replace(B, restarts="4 (0s ago)")], [replace(B, restarts="4 (0s ago)")]),
        ([A], [replace(A, status="Terminating")], [replace(A, status="Terminating")]),
        ([A, B], [B], [replace(A, status=REMOVED_STATUS, ready="-", ip="-")]),
        ([A], [], [replace(A, status=REMOVED_STATUS, ready="-", ip="-")]),
    ],
)
def test_ps_changes_returns_only_changed_rows(before: list[Row], after: list[Row], news: list[Row]) -> None:
    assert changes(before, after) == news


async def test_pykubelet_ps_prints_table(instance: Instance, view: ScriptedView) -> None:
    async with answering(instance, view):
        ran = await pykubelet(instance, "ps")
    heading, job, web = ran.out.splitlines()
    assert heading.split() == ["NAME", "NAMESPACE", "READY", "STATUS", "RESTARTS", "IP", "AGE"]
    assert job.split()[:4] == ["job-node1", "batch", "0/1", "Terminating"]
    assert web.split()[:5] == ["web-node1", "default", "1/1", "Running", "1"]
    assert (ran.code, ran.err) == (0, "")


async def test_pykubelet_ps_json_prints_pod_list(instance: Instance, view: ScriptedView) -> None:
    async with answering(instance, view):
        ran = await pykubelet(instance, "ps", "-o", "json")
        document = json.loads(ran.out)
        assert [item["metadata"]["uid"] for item in document["items"]] == ["aaaa1111", "bbbb2222"]
        assert (await pykubelet(instance, "ps", "-o", "json", "-w")).code == 2


async def test_pykubelet_ps_names_are_arguments_of_describe(instance: Instance, view: ScriptedView) -> None:
    async with answering(instance, view):
        names = (await pykubelet(instance, "ps", "-o", "name")).out.split()
        assert names
        for name in names:
            ran = await pykubelet(instance, "describe", name)
            assert ran.code == 0, ran


async def test_pykubelet_ps_no_pods_prints_hint(instance: Instance) -> None:
    async with answering(instance, ScriptedView()):
        ran = await pykubelet(instance, "ps")
    assert (ran.code, ran.out) == (0, "")
    assert "pykubelet run FILE" in ran.err


async def test_pykubelet_ps_watch_prints_changes_and_survives_kubelet_restart(
    instance: Instance, view: ScriptedView
) -> None:
    async with answering(instance, view):
        process = await asyncio.create_subprocess_exec(
            *command(instance, "ps", "-w"), stdout=PIPE, stderr=PIPE, env=environment()
        )
        assert process.stdout is not None
        assert process.stderr is not None
        async with asyncio.timeout(60):
            assert (await process.stdout.readline()).startswith(b"NAME ")
            assert (await process.stdout.readline()).startswith(b"job-node1")
            assert (await process.stdout.readline()).startswith(b"web-node1")
            view.listed.pop()
            gone = await process.stdout.readline()
            assert gone.startswith(b"job-node1")
            assert b" Gone " in gone
    async with asyncio.timeout(60):
        while b"no node runs on" not in (told := await process.stderr.readline()):
            # It asked just when the node left.
            assert b"is it being stopped?" in told
        view.listed.append(pod_of("late", "cccc"))
        async with answering(instance, view):
            assert (await process.stdout.readline()).startswith(b"late-node1")
            process.send_signal(2)
            assert (await process.communicate(), process.returncode) == ((b"", b""), 130)


async def test_pykubelet_ps_watch_terminal_redraws_and_restores_cursor(
    instance: Instance, view: ScriptedView
) -> None:
    async with answering(instance, view):
        terminal = Terminal(command(instance, "ps", "-w"))
        await terminal.until("web-node1")
        view.listed.append(pod_of("late", "cccc"))
        await terminal.until("late-node1")
    await terminal.until("no node runs on")
    terminal.type("\x03")
    await terminal.until("\x1b[?25h")
    assert await terminal.end() == 130


async def test_pykubelet_describe_running_pod_prints_all_sections(
    instance: Instance, view: ScriptedView
) -> None:
    async with answering(instance, view):
        ran = await pykubelet(instance, "describe", "web")
        assert ran.code == 0
        assert "\x1b" not in ran.out
    page = "\n".join(
        describe_text(
            view.listed[0],
            "syncing",
            PodJournal(events=view.events["aaaa1111"], timeline=view.notes["aaaa1111"]),
            START + timedelta(seconds=90),
        )
    )
    for line in (
        "Name:           web-node1",
        "Status:         Running, 1 of 1 containers ready",
        "Source:         file",
        "    State:         Running, for 89s",
        "    Last state:    Terminated: Error, exit code 3, after 5s, 90s ago: no \\x1b[31mconfig",
        "    Ports:         80/TCP at 127.0.0.1:8080",
        "    Readiness:     http-get http://:http/ok delay=0s timeout=0s period=2s #success=0 #failure=0",
        "    Liveness:      exec [true] delay=0s timeout=0s period=0s #success=0 #failure=0",
        "    Limits:        memory 32Mi",
        "    Environment:   A=b, IP from status.podIP",
        "    Mounts:        /data from data (read-only)",
        "  data: hostPath /srv",
        "  Ready   True     89s",
        "  30s (x4 over 90s)   Warning   BackOff   spec.containers{main}   back-off",
    ):
        assert line in page.splitlines(), page
    timeline = page.partition("Timeline:\n")[2].splitlines()
    assert [line.split()[1:] for line in timeline] == [
        ["AFTER", "STATION", "DECISION"],
        ["+0.000s", "source", "ADD", "from", "file"],
        ["+0.250s", "decide", "new", "sandbox", "(no", "sandbox", "yet);", "start", "main"],
    ]


def test_describe_text_pod_without_status_omits_empty_sections() -> None:
    page = describe_text(pod_of("new", "u", status={"phase": "Pending"}), "syncing", PodJournal(), START)
    assert "    State: not reported yet" in page
    assert not any(line in page for line in ("Events:", "Timeline:", "Volumes:", "Conditions:"))


async def test_pykubelet_restart_by_pod_and_container(instance: Instance, view: ScriptedView) -> None:
    async with answering(instance, view):
        ran = await pykubelet(instance, "restart", "web")
        assert (ran.code, ran.out) == (0, "Restarting main of web-node1 in place\n")
        assert (await pykubelet(instance, "restart", "web", "main")).code == 0
        ran = await pykubelet(instance, "restart", "web", "nope")
        assert (ran.code, ran.err) == (
            1,
            "pykubelet restart: pod web-node1 has no container 'nope'; it has: main\n",
        )
        ran = await pykubelet(instance, "restart", "nope")
        assert ran.code == 1
        assert "default/web-node1 (uid aaaa1111)" in ran.err
    assert view.restarts == [("aaaa1111", None), ("aaaa1111", "main")]


async def test_pykubelet_ps_closed_pipe_prints_no_error(instance: Instance, view: ScriptedView) -> None:
    view.listed += [pod_of(f"p{number}", f"u{number}") for number in range(3000)]
    async with answering(instance, view):
        process = await asyncio.create_subprocess_shell(
            f"{' '.join(command(instance, 'ps'))} | head -1", stdout=PIPE, stderr=PIPE, env=environment()
        )
        out, err = await process.communicate()
    assert out.startswith(b"NAME ")
    assert err == b""


def test_node_client_kubelet_not_running_error_has_remedy(instance: Instance) -> None:
    with pytest.raises(
        KubeletNotRunning, match=f"start it with `pykubelet up --data-dir {instance.data_dir}`"
    ):
        NodeClient(Node.of(instance)).pods()


def test_node_client_kubelet_starting_error_is_not_kubelet_not_running(instance: Instance) -> None:
    with (
        hold_lock(instance, "up"),
        pytest.raises(NodeError, match="still starting, or stopping") as caught,
    ):
        NodeClient(Node.of(instance)).pods()
    assert not isinstance(caught.value, KubeletNotRunning)


async def test_node_client_pods_journal_and_not_found_errors(instance: Instance, view: ScriptedView) -> None:
    client = NodeClient(Node.of(instance))
    async with answering(instance, view):
        assert (await asyncio.to_thread(client.pods)).pods == view.listed
        assert (await asyncio.to_thread(client.pod, "bbbb2222")).states == {"bbbb2222": "terminating"}
        assert (await asyncio.to_thread(client.journal, "aaaa1111")).timeline == view.notes["aaaa1111"]
        with pytest.raises(NotFoundError, match=r"no pod with uid \.\./x\?y"):
            await asyncio.to_thread(client.pod, "../x?y")
        with pytest.raises(NotFoundError, match="no running container 'a&b'"):
            await asyncio.to_thread(client.restart, "aaaa1111", "a&b")


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n[]", "of another version"),
        (b"HTTP/1.1 500 Oh\r\nContent-Length: 0\r\n\r\n", "status 500"),
        (b"", "the connection to the node broke"),
        (b"SSH-2.0-OpenSSH\r\n", "the connection to the node broke"),
    ],
)
async def test_node_client_invalid_response_raises_node_error(
    instance: Instance, answer: bytes, says: str
) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        writer.close()

    async with await asyncio.start_unix_server(serve, instance.kubelet_root / SOCKET_NAME):
        with pytest.raises(NodeError, match=says):
            await asyncio.to_thread(NodeClient(Node.of(instance)).pods)


def test_node_client_server_hangs_raises_timeout_error(
    instance: Instance, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pykubelet.cli.client.REQUEST_TIMEOUT_SECONDS", 0.1)
    with socket.socket(socket.AF_UNIX) as deaf:
        deaf.bind(str(instance.kubelet_root / SOCKET_NAME))
        deaf.listen()
        with pytest.raises(NodeError, match=r"does not answer within 0\.1s"):
            NodeClient(Node.of(instance)).pods()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
async def test_pykubelet_ps_without_root_exits_1_with_message(instance: Instance, view: ScriptedView) -> None:
    async with answering(instance, view):
        instance.data_dir.parent.chmod(0o755)
        program = (
            "import os, sys; from pathlib import Path; from pykubelet.cli.options import NodeSelection; "
        )
        program += "from pykubelet.cli.pods.ps import run_ps; os.setuid(65534); selection = "
        program += "NodeSelection(Path(sys.argv[1])); sys.exit(run_ps(selection, watch=False))"
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", program, str(instance.data_dir), stdout=PIPE, stderr=PIPE, env=environment()
        )
        _, err = await process.communicate()
    assert process.returncode == 1
    assert err == b"pykubelet ps: only root may ask the node: run it with sudo\n"
