"""`pykubelet exec`: frames and results as tables and properties; commands in real containers."""

import asyncio
import hashlib
import itertools
import os
import signal
import struct
import zlib
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator, Iterable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pykubelet.cli.exec import (
    MAX_DATA_BYTES,
    Data,
    Frame,
    FrameReader,
    FrameWriter,
    GoAway,
    NotRunning,
    Ping,
    Reset,
    Result,
    StreamError,
    connect,
    read_result,
    running_id,
)
from pykubelet.standalone.instance import Instance
from tests.support.cli_node import Terminal, answering, command, environment, pykubelet
from tests.support.cri_pods import connected, start_pod
from tests.support.pod_view import ScriptedView, pod_of
from tests.support.runtime import RunningRuntime


def control(kind: int, payload: bytes) -> bytes:
    return struct.pack(">HHI", 0x8003, kind, len(payload)) + payload


FRAMES: list[tuple[bytes, Frame | None]] = [
    (struct.pack(">II", 5, 3) + b"abc", Data(5, b"abc", False)),
    (struct.pack(">II", 5, 1 << 24 | 3) + b"abc", Data(5, b"abc", True)),
    (struct.pack(">II", 7, 0), Data(7, b"", False)),
    (control(2, struct.pack(">I", 1) + b"compressed headers"), None),
    (control(3, struct.pack(">II", 3, 5)), Reset(3)),
    (control(4, b"\0" * 12), None),
    (control(6, struct.pack(">I", 2)), Ping(2)),
    (control(7, struct.pack(">II", 9, 0)), GoAway()),
    (control(9, struct.pack(">II", 1, 65536)), None),
]


@pytest.mark.parametrize(("wire", "frame"), FRAMES)
def test_spdy_frame_reader_server_frames_decoded(wire: bytes, frame: Frame | None) -> None:
    assert list(FrameReader().feed(wire)) == ([frame] if frame else [])


@given(st.lists(st.sampled_from(FRAMES), max_size=10), st.lists(st.integers(0, 400), max_size=10))
def test_spdy_frame_reader_arbitrary_chunks_same_frames(
    chosen: list[tuple[bytes, Frame | None]], cuts: list[int]
) -> None:
    wire = b"".join(part for part, _ in chosen)
    edges = sorted({0, len(wire), *(cut % (len(wire) + 1) for cut in cuts)})
    reader = FrameReader()
    found = [frame for start, end in itertools.pairwise(edges) for frame in reader.feed(wire[start:end])]
    assert found == [frame for _, frame in chosen if frame]


@given(st.binary(max_size=3 * MAX_DATA_BYTES), st.booleans())
def test_spdy_frame_writer_data_split_only_last_frame_has_fin(data: bytes, last: bool) -> None:
    frames = list(FrameReader().feed(FrameWriter().data(3, data, last=last)))
    assert all(isinstance(frame, Data) and len(frame.data) <= MAX_DATA_BYTES for frame in frames)
    assert b"".join(frame.data for frame in frames if isinstance(frame, Data)) == data
    assert [frame.last for frame in frames if isinstance(frame, Data)] == [False] * (len(frames) - 1) + [last]


def test_spdy_frame_writer_streams_odd_ids_shared_header_compression() -> None:
    writer, inflate = FrameWriter(), zlib.decompressobj()
    for number, name in ((1, "error"), (3, "stdin"), (5, "stdout")):
        stream, frame = writer.open_stream({"streamType": name})
        assert stream == number
        head, body = frame[:8], frame[8:]
        assert struct.unpack(">HHI", head) == (0x8003, 1, len(body))
        assert struct.unpack(">IIH", body[:10]) == (number, 0, 0)
        pair = b"".join(struct.pack(">I", len(text)) + text for text in (b"streamtype", name.encode()))
        assert inflate.decompress(body[10:]) == struct.pack(">I", 1) + pair


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
        (b"HTTP/1.1 404 Not Found\r\nContent-Length: 4\r\n\r\ngone", "refuses the command's streams: gone"),
        (b"HTTP/1.1 101 Switching Protocols\r\n\r\n", "101 Switching"),
        (b"SSH-2.0-OpenSSH\r\n", "does not answer with HTTP"),
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


async def test_exec_connect_unreachable_or_https_raises_stream_error(unused_tcp_port: int) -> None:
    for url, says in (
        (f"http://127.0.0.1:{unused_tcp_port}/x", "cannot be reached"),
        ("https://127.0.0.1/x", "only plain HTTP"),
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
