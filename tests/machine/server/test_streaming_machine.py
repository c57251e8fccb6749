"""Commands, attachments and forwarded ports through the agent's API into real containers."""

import asyncio
import hashlib
import json
import os
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import aiohttp
import pytest
from prometheus_client import CollectorRegistry

from pykubelet.api.pod import Pod
from pykubelet.cri import runtime_pb2 as pb
from pykubelet.cri.connect import RuntimeConnection
from pykubelet.kuberuntime.log_rotation.readers import LogReaders
from pykubelet.server.api import https_server
from pykubelet.server.auth.request_auth import AlwaysAllow, Authenticator
from pykubelet.server.logs.container_logs import ContainerLogs
from pykubelet.server.lookup import PodLookup
from pykubelet.server.metrics.server_metrics import ServerMetrics
from pykubelet.server.streams.container_actions import ContainerActions
from pykubelet.server.streams.streaming import StreamingEndpoints, StreamLimits
from pykubelet.server.tls import ServingTls, TlsSettings
from pykubelet.transport.remote_command import PROTOCOL, RemoteCommand
from pykubelet.transport.spdy import Data, FrameReader, FrameWriter
from tests.support.certs import NAMES, Authority
from tests.support.cri_pods import connected
from tests.support.pod_view import START, ScriptedView, pod_of
from tests.support.runtime import RunningRuntime
from tests.support.server_clients import client_context
from tests.support.websocket_client import CLOSE, WebSocketClient

pytestmark = pytest.mark.machine

MEGABYTES = 100
SCRIPT = "httpd -p 80 -h /www; echo said; while read line; do echo got $line; done; sleep 1000"


@dataclass
class Node:
    """A server before a real runtime with one pod."""

    port: int
    authority: Authority
    cri: RuntimeConnection
    container: str
    sandbox: str

    @asynccontextmanager
    async def upgraded(self, path: str) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        reader, writer = await asyncio.open_connection(
            "localhost", self.port, ssl=client_context(self.authority), limit=2**20
        )
        try:
            writer.write(
                f"POST {path} HTTP/1.1\r\nHost: node\r\nConnection: Upgrade\r\nUpgrade: SPDY/3.1\r\n"
                f"X-Stream-Protocol-Version: {PROTOCOL}\r\nX-Stream-Protocol-Version: portforward.k8s.io\r\n"
                "Content-Length: 0\r\n\r\n".encode()
            )
            async with asyncio.timeout(120):
                head = await reader.readuntil(b"\r\n\r\n")
                assert head.startswith(b"HTTP/1.1 101"), head
                yield reader, writer
        finally:
            writer.close()

    @asynccontextmanager
    async def command(self, path: str, streams: Sequence[str]) -> AsyncIterator[RemoteCommand]:
        async with self.upgraded(path) as (reader, writer):
            command = RemoteCommand(reader, writer)
            await command.open(streams)
            yield command


@pytest.fixture
async def node(private_runtime: RunningRuntime, tmp_path: Path) -> AsyncIterator[Node]:
    async with AsyncExitStack() as stack:
        cri = await stack.enter_async_context(connected(private_runtime.endpoint))
        authority = Authority(tmp_path, "cluster")
        pair = authority.sign("/CN=node", NAMES)
        pod, sandbox, container = await _start_pod(cri, private_runtime)
        stack.push_async_callback(cri.runtime.remove_pod_sandbox, sandbox)
        stack.push_async_callback(cri.runtime.stop_pod_sandbox, sandbox)
        metrics, limits = ServerMetrics(CollectorRegistry()), StreamLimits()
        lookup = PodLookup(ScriptedView([pod]), cri.runtime, str)
        routes = [
            *StreamingEndpoints(lookup, limits, metrics, idle_seconds=60, translate_websockets=True).routes(),
            *ContainerLogs(lookup, limits, LogReaders(), split_streams=False, idle_seconds=60).routes(),
            *ContainerActions(lookup, tmp_path / "checkpoints", lambda: START).run_routes(),
        ]
        port = await stack.enter_async_context(
            https_server(
                "127.0.0.1",
                0,
                routes,
                tls=ServingTls(TlsSettings(), lambda: (pair.certificate, pair.key)),
                authenticator=Authenticator(None, None, anonymous=True),
                authorizer=AlwaysAllow(),
                metrics=metrics,
            )
        )
        yield Node(port, authority, cri, container, sandbox)


async def _start_pod(cri: RuntimeConnection, runtime: RunningRuntime) -> tuple[Pod, str, str]:
    uid = str(uuid.uuid4())
    labels = {
        "io.kubernetes.pod.uid": uid,
        "io.kubernetes.pod.name": "web",
        "io.kubernetes.pod.namespace": "default",
    }
    logs = runtime.instance.pod_logs / f"default_web_{uid}"
    namespaces = pb.NamespaceOption(network=pb.POD, pid=pb.CONTAINER, ipc=pb.POD)
    sandbox_config = pb.PodSandboxConfig(
        metadata=pb.PodSandboxMetadata(name="web", uid=uid, namespace="default"),
        labels=labels,
        log_directory=str(logs),
        linux=pb.LinuxPodSandboxConfig(
            cgroup_parent=f"{runtime.instance.cgroup_root}/pod{uid}",
            security_context=pb.LinuxSandboxSecurityContext(namespace_options=namespaces),
        ),
    )
    sandbox = await cri.runtime.run_pod_sandbox(sandbox_config)
    config = pb.ContainerConfig(
        metadata=pb.ContainerMetadata(name="main"),
        image=pb.ImageSpec(image=runtime.busybox_image),
        command=["sh", "-c", f"mkdir -p /www; echo page > /www/index.html; {SCRIPT}"],
        labels=labels | {"io.kubernetes.container.name": "main"},
        log_path="main/0.log",
        stdin=True,
        linux=pb.LinuxContainerConfig(
            security_context=pb.LinuxContainerSecurityContext(namespace_options=namespaces)
        ),
    )
    container = await cri.runtime.create_container(sandbox, config, sandbox_config)
    await cri.runtime.start_container(container)
    log = logs / "main" / "0.log"
    async with asyncio.timeout(60):
        # Its pages are served by then, and nobody who attaches hears this any more.
        while not log.exists() or b"said" not in log.read_bytes():
            await asyncio.sleep(0.05)
    status = {"name": "main", "containerID": f"containerd://{container}", "state": {"running": {}}}
    pod = pod_of("web", uid, node="", status={"containerStatuses": [status]})
    return pod, sandbox, container


async def test_exec_command_passes_input_output_and_exit_code(node: Node) -> None:
    data = os.urandom(20 * 2**20)
    path = "/exec/default/web/main?command=sh&command=-c&command=cat;echo%20bad%20>%262;exit%207"
    async with node.command(f"{path}&input=1&output=1&error=1", ["stdin", "stdout", "stderr"]) as command:
        seen = {"stdout": hashlib.sha256(), "stderr": hashlib.sha256()}

        async def send() -> None:
            await command.send("stdin", data, last=True)

        async with asyncio.TaskGroup() as group:
            group.create_task(send())
            async for stream, part in command.output():
                seen[stream].update(part)
        assert seen["stdout"].digest() == hashlib.sha256(data).digest()
        assert seen["stderr"].digest() == hashlib.sha256(b"bad\n").digest()
        assert command.result.exit_code == 7


async def test_exec_missing_executable_returns_error(node: Node) -> None:
    async with node.command("/exec/default/web/main?command=nonsense&output=1", ["stdout"]) as command:
        assert [part async for part in command.output()] == []
        assert "executable file not found" in command.result.message


async def test_exec_tty_resize_changes_terminal_size(node: Node) -> None:
    script = quote('until [ "$(stty size 2>/dev/null)" = "45 123" ]; do sleep 0.1; done; stty size')
    path = f"/exec/default/web/main?command=sh&command=-c&command={script}&tty=1&output=1&input=1"
    async with node.command(path, ["stdin", "stdout", "resize"]) as command:
        await command.send("resize", b'{"Width":123,"Height":45}')
        said = b"".join([part async for _, part in command.output()])
        assert said.strip() == b"45 123"
        assert command.result.exit_code == 0


async def test_exec_websocket_returns_output_and_status(node: Node) -> None:
    connector = aiohttp.TCPConnector(ssl=client_context(node.authority))
    async with aiohttp.ClientSession(connector=connector) as session, asyncio.timeout(60):
        url = f"https://localhost:{node.port}/exec/default/web/main?command=echo&command=hi&output=1"
        async with session.ws_connect(url, protocols=["v4.channel.k8s.io"]) as socket:
            assert socket.protocol == "v4.channel.k8s.io"
            said = [bytes(message.data) async for message in socket if message.data[1:]]
    assert said[0] == b"\x01hi\n"
    assert b'"status":"Success"' in said[-1]


@asynccontextmanager
async def websocket(node: Node, path: str, protocol: str) -> AsyncIterator[WebSocketClient]:
    """Open a WebSocket that the kubelet terminates."""
    reader, writer = await asyncio.open_connection(
        "localhost", node.port, ssl=client_context(node.authority), limit=2**20
    )
    try:
        writer.write(
            f"GET {path} HTTP/1.1\r\nHost: node\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
            "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
            f"Sec-WebSocket-Protocol: {protocol}\r\n\r\n".encode()
        )
        async with asyncio.timeout(240):
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 101"), head
            assert f"Sec-WebSocket-Protocol: {protocol}\r\n".encode() in head
            yield WebSocketClient(reader, writer)
    finally:
        writer.close()


V5 = "v5.channel.k8s.io"
SHELL = "/exec/default/web/main?command=sh&command=-c&command="


async def test_exec_websocket_v5_input_output_and_exit_code(node: Node) -> None:
    data = os.urandom(5 * 2**20)
    path = f"{SHELL}cat;echo%20bad%20>%262;exit%207&input=1&output=1&error=1"
    async with websocket(node, path, V5) as client:

        async def send() -> None:
            for start in range(0, len(data), 100_000):
                await client.send(b"\x00" + data[start : start + 100_000])
            await client.send(b"\xff\x00")

        async with asyncio.TaskGroup() as group:
            group.create_task(send())
            channels = await client.collect()
    assert hashlib.sha256(channels[1]).digest() == hashlib.sha256(data).digest()
    assert channels[2] == b"bad\n"
    status = json.loads(channels[3])
    assert status["reason"] == "NonZeroExitCode"
    assert status["details"]["causes"] == [{"reason": "ExitCode", "message": "7"}]


async def test_exec_websocket_v5_missing_executable_reported(node: Node) -> None:
    async with websocket(node, "/exec/default/web/main?command=nonsense&output=1", V5) as client:
        status = json.loads((await client.collect())[3])
    assert status["message"].startswith("Internal error occurred: ")
    assert "executable file not found" in status["message"]


async def test_exec_websocket_v5_tty_resize_and_ctrl_c(node: Node) -> None:
    script = quote('until [ "$(stty size 2>/dev/null)" = "45 123" ]; do sleep 0.1; done; stty size; cat')
    async with websocket(node, f"{SHELL}{script}&tty=1&output=1&input=1", V5) as client:
        for width in range(1, 124):
            await client.send(b'\x04{"Width":%d,"Height":45}' % width)
        seen = b""
        while b"45 123" not in seen:
            _, payload = await client.receive()
            seen += payload[1:]
        await client.send(b"\x00\x03")
        status = json.loads((await client.collect())[3])
    assert status["details"]["causes"] == [{"reason": "ExitCode", "message": "130"}]


async def test_exec_websocket_v5_container_ends_stream_ends(node: Node) -> None:
    async with websocket(node, f"{SHELL}{quote('echo on; sleep 1000')}&output=1", V5) as client:
        while (await client.receive())[1] != b"\x01on\n":
            pass
        await node.cri.runtime.stop_container(node.container, 0)
        status = json.loads((await client.collect())[3])
    assert status["status"] == "Failure"


async def test_exec_websocket_v5_command_ends_before_its_input(node: Node) -> None:
    # Of much more than a pipe holds, containerd 1.6 itself never finds out that nobody reads it.
    async with websocket(node, f"{SHELL}{quote('head -c 3; exit 3')}&input=1&output=1", V5) as client:
        await client.send(b"\x00" + b"x" * 50_000)
        channels = await client.collect()
    assert channels[1] == b"xxx"
    assert json.loads(channels[3])["details"]["causes"][0]["message"] == "3"


async def test_attach_websocket_v5_input_reaches_container(node: Node) -> None:
    async with websocket(node, "/attach/default/web/main?input=1&output=1", V5) as client:
        await client.send(b"\x00something\n")
        seen = b""
        while not seen.endswith(b"\n"):
            seen += (await client.receive())[1][1:]
    assert seen == b"got something\n"


async def test_port_forward_websocket_several_connections_and_closed_port(node: Node) -> None:
    async with websocket(node, "/portForward/default/web", "SPDY/3.1+portforward.k8s.io") as client:
        frames, received = FrameWriter(), FrameReader()
        pages: dict[int, bytes] = {}
        errors: dict[int, bytes] = {}
        for number, port in enumerate(["80", "80", "81"]):
            headers = {"port": port, "requestID": str(number)}
            error, opening = frames.open_stream({"streamType": "error", **headers})
            errors[error] = b""
            stream, second = frames.open_stream({"streamType": "data", **headers})
            pages[stream] = b""
            await client.send(opening + frames.data(error, b"", last=True) + second)
            await client.send(frames.data(stream, b"GET / HTTP/1.0\r\n\r\n"))
        first, other, _ = pages
        *_, refused = errors
        while not (pages[first].endswith(b"page\n") and pages[other].endswith(b"page\n") and errors[refused]):
            received.feed((await client.receive())[1])
            for frame in received.frames():
                if isinstance(frame, Data):
                    found = pages if frame.stream in pages else errors
                    found[frame.stream] += frame.data
    assert b"refused" in errors[refused]
    assert not any(text for stream, text in errors.items() if stream != refused)


@pytest.mark.parametrize("direction", ["output", "input"])
async def test_exec_100_megabytes_translated_as_fast_as_proxied(
    node: Node, direction: str, record_property: Callable[[str, object], None]
) -> None:
    """Verify that translation costs at most three times the CPU time of the tunnel; report the throughput."""
    total = MEGABYTES * 2**20
    script = f"head -c {total} /dev/zero" if direction == "output" else "wc -c"
    query = f"{SHELL}{quote(script)}&output=1" + ("&input=1" if direction == "input" else "")
    block = bytes(32 * 1024)

    async def proxied() -> int:
        streams = ["stdout"] if direction == "output" else ["stdin", "stdout"]
        async with node.command(query, streams) as command:
            return await _moved(
                lambda last: command.send("stdin", b"" if last else block, last=last),
                command.output(),
                total if direction == "input" else 0,
            )

    async def translated() -> int:
        async with websocket(node, query, V5) as client:

            async def output() -> AsyncIterator[tuple[str, bytes]]:
                while True:
                    opcode, payload = await client.receive()
                    if opcode == CLOSE:
                        return
                    if payload[0] == 1:
                        yield "stdout", payload[1:]

            return await _moved(
                lambda last: client.send(b"\xff\x00" if last else b"\x00" + block),
                output(),
                total if direction == "input" else 0,
            )

    cost = {}
    for name, move in (("proxied", proxied), ("translated", translated)):
        started, cpu = time.monotonic(), time.process_time()
        assert await move() == total
        seconds, cost[name] = time.monotonic() - started, time.process_time() - cpu
        record_property(name, f"{total / seconds / 1e6:.0f} MB/s, {cost[name]:.2f} s CPU")
        print(f"{direction} {name}: {total / seconds / 1e6:.0f} MB/s, {cost[name]:.2f} s CPU of both ends")
    # The client runs in this process, too; on a busy machine only the CPU time is comparable.
    assert cost["translated"] < 3 * cost["proxied"] + 1


async def _moved(
    send: Callable[[bool], Awaitable[None]], output: AsyncIterator[tuple[str, bytes]], total: int
) -> int:
    """Send `total` bytes and return how many the command counted, or sent if there is no input."""
    received = 0
    text = b""

    async def feed() -> None:
        for _ in range(total // (32 * 1024)):
            await send(False)
        await send(True)

    async with asyncio.TaskGroup() as group:
        if total:
            group.create_task(feed())
        async for _, data in output:
            received += len(data)
            text = data if total else b""
    return int(text) if total else received


async def test_attach_input_reaches_container(node: Node) -> None:
    async with node.command("/attach/default/web/main?input=1&output=1", ["stdin", "stdout"]) as command:
        await command.send("stdin", b"something\n")
        said = b""
        async for _, part in command.output():
            said += part
            if said.endswith(b"\n"):
                break
        assert said == b"got something\n"


async def test_port_forward_http_request_returns_page(node: Node) -> None:
    async with node.upgraded("/portForward/default/web") as (reader, writer):
        frames, received = FrameWriter(), FrameReader()
        headers = {"port": "80", "requestID": "0"}
        _, opening = frames.open_stream({"streamType": "error", **headers})
        writer.write(opening)
        stream, opening = frames.open_stream({"streamType": "data", **headers})
        writer.write(opening + frames.data(stream, b"GET / HTTP/1.0\r\n\r\n", last=True))
        page = b""
        while not page.endswith(b"page\n"):
            part = await reader.read(65536)
            assert part, page
            received.feed(part)
            page += b"".join(
                frame.data
                for frame in received.frames()
                if isinstance(frame, Data) and frame.stream == stream
            )
        assert page.startswith(b"HTTP/1.")


async def test_streaming_endpoints_stopped_container_returns_not_found(node: Node) -> None:
    connector = aiohttp.TCPConnector(ssl=client_context(node.authority))
    async with aiohttp.ClientSession(connector=connector) as session, asyncio.timeout(60):
        base = f"https://localhost:{node.port}"
        async with session.get(f"{base}/containerLogs/default/web/main") as answer:
            assert (answer.status, await answer.text()) == (200, "said\n")
        async with session.post(f"{base}/run/default/web/main?cmd=echo%20hi") as answer:
            assert (answer.status, await answer.text()) == (200, "hi\n")
        await node.cri.runtime.stop_container(node.container, 0)
        async with session.post(f"{base}/exec/default/web/main?command=ls&output=1") as answer:
            assert (answer.status, await answer.text()) == (500, 'container not found ("main")')
        await node.cri.runtime.stop_pod_sandbox(node.sandbox)
        async with session.post(f"{base}/portForward/default/web") as answer:
            assert (answer.status, await answer.text()) == (500, 'pod not found ("web_default")')
