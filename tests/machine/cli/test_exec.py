"""`pykubelet exec`, `attach` and `port-forward`: results as tables; commands in real containers."""

import asyncio
import hashlib
import os
import signal
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from pykubelet.cli.pods.exec import NotRunning, running_id
from pykubelet.cli.pods.port_forward import ForwardError, parse_port
from pykubelet.standalone.instance import Instance
from pykubelet.transport.remote_command import Result, StreamError, connect, read_result
from tests.support.cli_node import Terminal, answering, command, environment, pykubelet
from tests.support.cri_pods import connected, start_pod
from tests.support.pod_view import ScriptedView, pod_of
from tests.support.runtime import RunningRuntime


@pytest.mark.parametrize(
    ("document", "result"),
    [
        (b'{"metadata":{},"status":"Success"}', Result(0)),
        (
            b'{"status":"Failure","message":"command terminated","reason":"NonZeroExitCode",'
            b'"details":{"causes":[{"reason":"ExitCode","message":"42"}]}}',
            Result(42),
        ),
        (
            b'{"status":"Failure","message":"x: executable file not found in $PATH"}',
            Result(127, "x: executable file not found in $PATH"),
        ),
        (b'{"status":"Failure","message":"/x: permission denied"}', Result(126, "/x: permission denied")),
        (b'{"status":"Failure"}', Result(1, "the runtime does not say why")),
        (b"", Result(1, "the connection ended before the command did")),
        (b"plain text", Result(1, "plain text")),
    ],
)
def test_read_result_status_document_to_exit_code(document: bytes, result: Result) -> None:
    assert read_result(document) == result


@pytest.mark.parametrize(
    ("state", "says"),
    [
        ({"waiting": {"reason": "CrashLoopBackOff"}}, "it is waiting \\(CrashLoopBackOff\\)"),
        ({"terminated": {"exitCode": 1, "reason": "Error"}}, "it has ended \\(Error\\)"),
        ({}, "does not run"),
    ],
)
def test_running_id_container_not_running_raises_with_reason(state: dict[str, object], says: str) -> None:
    status = {"name": "main", "state": state, "containerID": "containerd://x"}
    with pytest.raises(NotRunning, match=says):
        running_id(pod_of("p", "u", status={"containerStatuses": [status]}), "main")


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (b"HTTP/1.1 404 Not Found\r\nContent-Length: 4\r\n\r\ngone", "refuses the streams: gone"),
        (b"HTTP/1.1 101 Switching Protocols\r\n\r\n", "does not implement v4.channel.k8s.io"),
        (b"SSH-2.0-OpenSSH\r\n", "did not answer"),
    ],
)
async def test_exec_connect_server_rejects_upgrade_raises_stream_error(answer: bytes, says: str) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(StreamError, match=says):
            async with connect(f"http://127.0.0.1:{port}/exec/x", ["stdout"]):
                pass


async def test_exec_connect_unreachable_or_invalid_raises_stream_error(unused_tcp_port: int) -> None:
    for url, says in (
        (f"http://127.0.0.1:{unused_tcp_port}/x", "cannot be reached"),
        ("ftp://127.0.0.1/x", "has an address that is none"),
    ):
        with pytest.raises(StreamError, match=says):
            async with connect(url, ["stdout"]):
                pass


# From here on with real containers.


@pytest.fixture
async def instance(private_runtime: RunningRuntime) -> AsyncIterator[Instance]:
    """A node with one pod `box`, whose container runs for real."""
    async with connected(private_runtime.endpoint) as cri:
        pod = await start_pod(
            cri, private_runtime.instance, private_runtime.busybox_image, "sh", "-c", "sleep 3600"
        )
        status = {
            "name": "main",
            "state": {"running": {}},
            "ready": True,
            "containerID": f"containerd://{pod.container}",
        }
        view = ScriptedView([pod_of("box", "u-box", status={"containerStatuses": [status]})])
        try:
            async with answering(private_runtime.instance, view):
                yield private_runtime.instance
        finally:
            await cri.runtime.stop_pod_sandbox(pod.sandbox)
            await cri.runtime.remove_pod_sandbox(pod.sandbox)


@pytest.mark.machine
async def test_pykubelet_exec_returns_stdout_stderr_and_exit_code(instance: Instance) -> None:
    ran = await pykubelet(instance, "exec", "box", "--", "sh", "-c", "echo out; echo err >&2; exit 42")
    assert (ran.code, ran.out, ran.err) == (42, "out\n", "err\n")
    ran = await pykubelet(instance, "exec", "default/box-node1", "-c", "main", "--", "true")
    assert (ran.code, ran.out, ran.err) == (0, "", "")


@pytest.mark.machine
async def test_pykubelet_exec_stdin_forwarded_until_eof(instance: Instance) -> None:
    ran = await pykubelet(instance, "exec", "-i", "box", "--", "cat", stdin=b"hello\nworld")
    assert (ran.code, ran.out) == (0, "hello\nworld")


@pytest.mark.machine
async def test_pykubelet_exec_without_stdin_flag_stdin_empty(instance: Instance) -> None:
    ran = await pykubelet(instance, "exec", "box", "--", "cat", stdin=b"secret")
    assert (ran.code, ran.out) == (0, "")


@pytest.mark.machine
async def test_pykubelet_exec_large_stdin_and_stdout_unchanged(instance: Instance) -> None:
    data = os.urandom(4 * 1024 * 1024).hex().encode()
    ran = await pykubelet(instance, "exec", "-i", "box", "--", "cat", stdin=data)
    assert ran.code == 0
    assert hashlib.sha256(ran.out.encode()).digest() == hashlib.sha256(data).digest()


@pytest.mark.machine
async def test_pykubelet_exec_command_exits_before_stdin_eof_succeeds(instance: Instance) -> None:
    # Of much more than a pipe holds, containerd 1.6 itself never finds out that nobody reads it.
    ran = await pykubelet(instance, "exec", "-i", "box", "--", "head", "-c", "3", stdin=b"x" * 50_000)
    assert (ran.code, ran.out) == (0, "xxx")


@pytest.mark.machine
@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (("box", "--", "no-such-program"), 127, "executable file not found"),
        (("box", "--", "/etc/passwd"), 126, "permission denied"),
        (("nope", "--", "true"), 1, "there is no pod 'nope'"),
        (("box", "-c", "nope", "--", "true"), 1, "no container 'nope'; it has: main"),
        (("-it", "box", "--", "true"), 0, "going on without a terminal: the input is not a terminal"),
        (("-t", "box", "--", "true"), 0, "a terminal needs -i, too"),
    ],
)
async def test_pykubelet_exec_failure_prints_error_without_traceback(
    instance: Instance, arguments: Iterable[str], code: int, says: str
) -> None:
    ran = await pykubelet(instance, "exec", *arguments)
    assert ran.code == code
    assert says in ran.err
    assert "Traceback" not in ran.err


@pytest.mark.machine
async def test_pykubelet_exec_stdout_closed_exits_141(instance: Instance) -> None:
    process = await asyncio.create_subprocess_exec(
        *command(instance, "exec", "box", "--", "yes"), stdout=PIPE, stderr=PIPE, env=environment()
    )
    assert process.stdout is not None
    assert await process.stdout.readexactly(4) == b"y\ny\n"
    process._transport.get_pipe_transport(1).close()  # type: ignore[attr-defined]
    async with asyncio.timeout(45):
        _, err = await process.communicate()
    assert process.returncode == 141
    assert err == b""


@pytest.mark.machine
async def test_pykubelet_exec_sigint_without_tty_exits_by_signal(instance: Instance) -> None:
    process = await asyncio.create_subprocess_exec(
        *command(instance, "exec", "box", "--", "sh", "-c", "echo on; sleep 3600"),
        stdout=PIPE,
        stderr=PIPE,
        env=environment(),
    )
    assert process.stdout is not None
    assert await process.stdout.readline() == b"on\n"
    process.send_signal(signal.SIGINT)
    async with asyncio.timeout(45):
        _, err = await process.communicate()
    assert (process.returncode, err) == (-signal.SIGINT, b"")


@pytest.mark.machine
async def test_pykubelet_exec_tty_resize_signals_and_exit_code(instance: Instance) -> None:
    terminal = Terminal(command(instance, "exec", "-it", "box", "--", "sh"), 33, 111)
    await terminal.until("# ")
    # A size takes a moment to arrive; what is typed comes back and must not look like the answer.
    terminal.type('tty; until [ "$(stty size)" = 33\\ 111 ]; do sleep 0.1; done; stty size\r')
    await terminal.until("/dev/pts/")
    await terminal.until("33 111")
    terminal.resize(44, 122)
    await asyncio.sleep(0.5)
    terminal.type('until [ "$(stty size)" = 44\\ 122 ]; do sleep 0.1; done; stty size\r')
    await terminal.until("44 122")
    # Before the shell runs something, a key is no signal.
    terminal.type('echo be""gun; sleep 1000\r')
    await terminal.until("begun")
    await asyncio.sleep(0.3)
    terminal.type("\x03")
    terminal.type("echo in$?terrupted\r")
    await terminal.until("in130terrupted")
    terminal.type("exit 7\r")
    assert await terminal.end() == 7


@pytest.mark.machine
async def test_pykubelet_exec_tty_sigterm_restores_terminal(instance: Instance) -> None:
    outer = (
        f"before=$(stty -g); {' '.join(command(instance, 'exec', '-it', 'box', '--', 'sh'))}; echo code=$?; "
    )
    outer += '[ "$(stty -g)" = "$before" ] && echo same'
    terminal = Terminal(["sh", "-c", f"{outer}; sleep 1"], 24, 80)
    await terminal.until("# ")
    children = (await asyncio.to_thread(_children, terminal.pid)).split()
    os.kill(int(children[0]), signal.SIGTERM)
    await terminal.until("code=143")
    await terminal.until("same")
    await terminal.end()


def _children(pid: int) -> str:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text()


@pytest.fixture
async def servers(private_runtime: RunningRuntime) -> AsyncIterator[Instance]:
    """A node with a pod `web` that serves a page on port 80 and writes `tick`."""
    script = (
        "mkdir /www; echo page > /www/index.html; httpd -p 80 -h /www; while :; do echo tick; sleep 0.2; done"
    )
    async with connected(private_runtime.endpoint) as cri:
        pod = await start_pod(
            cri, private_runtime.instance, private_runtime.busybox_image, "sh", "-c", script
        )
        status = {"name": "main", "state": {"running": {}}, "containerID": f"containerd://{pod.container}"}
        view = ScriptedView([pod_of("web", "u-web", status={"containerStatuses": [status]})])
        try:
            async with answering(private_runtime.instance, view):
                yield private_runtime.instance
        finally:
            await cri.runtime.stop_pod_sandbox(pod.sandbox)
            await cri.runtime.remove_pod_sandbox(pod.sandbox)


@asynccontextmanager
async def running(instance: Instance, *arguments: str) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        *command(instance, *arguments), stdout=PIPE, stderr=PIPE, env=environment()
    )
    try:
        async with asyncio.timeout(90):
            yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


@pytest.mark.machine
async def test_pykubelet_attach_shows_output_until_interrupted(servers: Instance) -> None:
    async with running(servers, "attach", "-it", "web") as process:
        assert process.stdout is not None
        assert await process.stdout.readline() == b"tick\n"
        process.send_signal(signal.SIGINT)
        _, err = await process.communicate()
    assert process.returncode == -signal.SIGINT
    assert b"container main has no `stdin: true`" in err
    assert b"container main has no `tty: true`" in err


@pytest.mark.machine
async def test_pykubelet_port_forward_several_connections_and_closed_port(servers: Instance) -> None:
    async with running(servers, "port-forward", "web", ":80", ":81") as process:
        assert process.stdout is not None
        assert process.stderr is not None
        lines = [(await process.stdout.readline()).decode() for _ in range(2)]
        assert [line.split(" -> ")[1] for line in lines] == ["80\n", "81\n"]
        port, closed = (int(line.split(":")[1].split()[0]) for line in lines)

        async def page() -> bytes:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET / HTTP/1.0\r\n\r\n")
            try:
                return await reader.read()
            finally:
                writer.close()

        pages = await asyncio.gather(*(page() for _ in range(5)))
        assert all(text.endswith(b"page\n") for text in pages)
        reader, writer = await asyncio.open_connection("127.0.0.1", closed)
        assert await reader.read() == b""
        writer.close()
        assert b"refused" in await process.stderr.readline()
        process.send_signal(signal.SIGINT)
        await process.wait()
    assert process.returncode == 128 + signal.SIGINT


@pytest.mark.machine
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("web", "x"), "cannot forward port 'x'"),
        (("web", "80:0"), "cannot forward port '80:0'"),
        (("web", "99999"), "cannot forward port '99999'"),
        (("nope", "80"), "there is no pod 'nope'"),
        (("web", ":80", "--address", "192.0.2.1"), "cannot listen on 192.0.2.1:0"),
    ],
)
async def test_pykubelet_port_forward_invalid_input_one_line(
    servers: Instance, arguments: Iterable[str], says: str
) -> None:
    ran = await pykubelet(servers, "port-forward", *arguments)
    assert ran.code == 1
    assert says in ran.err
    assert ran.err.count("\n") <= 2
    assert "Traceback" not in ran.err


@pytest.mark.parametrize(("text", "ports"), [("80", (80, 80)), ("8080:80", (8080, 80)), (":80", (0, 80))])
def test_parse_port_local_and_remote(text: str, ports: tuple[int, int]) -> None:
    assert parse_port(text) == ports


@pytest.mark.parametrize("text", ["", ":", "80:", "a:80", "1:2:3", "65536", "-1", "٣"])
def test_parse_port_invalid_raises(text: str) -> None:
    with pytest.raises(ForwardError, match="expected PORT"):
        parse_port(text)
