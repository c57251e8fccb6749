"""Streams through the agent against going to the runtime's streaming server, or to the log file, directly.

The same client reads as fast as it can in each case; through the agent with TLS and a client certificate,
as the API server would, directly without. The best of several tries counts, taken in turns, because these
machines are not equally quick all the time.

Directly means, for a command, the runtime's streaming server over plain TCP. For a log it is the file
through `cut`, which takes the runtime's columns away: a reader of the file needs the text as much as one of
the agent, and this is the quickest common program that gives it. The log is as runtimes and people write
logs: no two lines with the same time, whose trailing zeros are left out, and a text of words; and once more
with lines without a single space, which `cut` likes best. Told without a bound: `cat`, which leaves the
columns in.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import socket
import ssl
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

from bench.floor import connected
from bench.node import Node, data_dir, running_node
from bench.processes import cost_over, cpu_seconds
from bench.results import Result
from pykubelet.cri import runtime_pb2 as pb
from pykubelet.cri.connect import RuntimeConnection
from pykubelet.devcluster import identities as pki
from pykubelet.standalone.instance import Instance
from pykubelet.standalone.seed_images import BUSYBOX_IMAGE
from pykubelet.transport.spdy import FrameWriter

_MEGABYTES = 300
_LOG_LINES = 1_000_000
_TRIES = 7
_FOLLOWED = 100
_SETTLE = 5.0
_TEXTS = {"words": ("lorem " * 17)[:99], "no spaces": "x" * 99}
_MAKE = ("dd", "if=/dev/zero", "of=/big", "bs=1000000", f"count={_MEGABYTES}")
_COMMAND = ("cat", "/big")
_TEXT_ONLY = ("cut", "-d", " ", "-f", "4-")
"""What the agent does with a log's lines: the text, without the runtime's columns."""
_HEAD = "Connection: Upgrade\r\nUpgrade: SPDY/3.1\r\nX-Stream-Protocol-Version: v4.channel.k8s.io\r\n"
_HEALTH_PORT = 10448

Connect = Callable[[], socket.socket]


def streams(hold_seconds: float) -> list[Result]:
    """Measure commands, logs, and what following many logs costs."""
    with data_dir() as path:
        people = path.parent / "people"
        people.mkdir()
        authority = pki.ensure_authority(pki.Authority(people / "ca.crt", people / "ca.key"), "people")
        pki.issue(authority, pki.Subject("somebody"), people / "me.crt", people / "me.key")
        extra = (f"--client-ca-file={authority.certificate}",)
        with running_node(path, _HEALTH_PORT, _HEALTH_PORT + 10, extra) as node:
            return asyncio.run(_measure(node, _secure(people), hold_seconds))


async def _measure(node: Node, secure: Connect, hold_seconds: float) -> list[Result]:
    instance = Instance.at(node.data_dir)
    async with await connected(instance.endpoint) as cri:
        pod, container, log = await _start(instance, cri)
        assert (await cri.runtime.exec_sync(container, _MAKE)).exit_code == 0
        direct, agent, cpu = [], [], []
        for _ in range(_TRIES):
            url = urlsplit(await cri.runtime.exec(_wish(container)))
            place, port = url.hostname or "", url.port or 80
            target = url.path + (f"?{url.query}" if url.query else "")
            direct.append(await asyncio.to_thread(_exec, _plain(place, port), target))
            command = "&".join(f"command={word}" for word in _COMMAND)
            target = f"/exec/default/{pod}/main?{command}&output=1"
            used = cpu_seconds(node.pid)
            agent.append(await asyncio.to_thread(_exec, secure, target))
            cpu.append(cpu_seconds(node.pid) - used)
        _tell("a command's output", _MEGABYTES, direct, agent, cpu)
        results = [Result("a command's output: time", min(agent) / min(direct), "x direct", 1.25)]
        for kind, text in _TEXTS.items():
            size = _fill(log, text) / 1e6
            direct, agent, cpu, cat = [], [], [], []
            for _ in range(_TRIES):
                direct.append(await asyncio.to_thread(_read_with, _TEXT_ONLY, log))
                cat.append(await asyncio.to_thread(_read_with, ("cat",), log))
                used = cpu_seconds(node.pid)
                agent.append(await asyncio.to_thread(_log, secure, f"/containerLogs/default/{pod}/main"))
                cpu.append(cpu_seconds(node.pid) - used)
            _tell(f"a log, {kind}", size, direct, agent, cpu)
            print(
                f"     a log, {kind}: {min(agent) / min(direct):.2f} x cut, {min(agent) / min(cat):.1f} x cat"
            )
            results.append(Result(f"a log, {kind}: time", min(agent) / min(direct), "x cut", 1.25))
    follow = f"/containerLogs/default/{pod}/main?follow=true&tailLines=0"
    with contextlib.ExitStack() as stack:
        for _ in range(_FOLLOWED):
            connection = stack.enter_context(secure())
            connection.sendall(f"GET {follow} HTTP/1.1\r\nHost: n\r\n\r\n".encode())
            assert connection.recv(12).endswith(b"200")
        await asyncio.sleep(_SETTLE)
        cost = await asyncio.to_thread(cost_over, node.pid, hold_seconds)
    what = f"{_FOLLOWED} quiet logs followed over {cost.seconds:.0f} s: processor"
    return [*results, Result(what, cost.cpu_percent, "% of core", 5)]


async def _start(instance: Instance, cri: RuntimeConnection) -> tuple[str, str, Path]:
    """Start a pod that says nothing; gives its name, its container's id and its log."""
    main = {"name": "main", "image": BUSYBOX_IMAGE, "command": ["sleep", "100000"]}
    document = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "streams"},
        "spec": {"containers": [main], "terminationGracePeriodSeconds": 1},
    }
    (instance.manifests / "streams.json").write_text(json.dumps(document))
    async with asyncio.timeout(60):
        while True:
            running = pb.ContainerFilter(state=pb.ContainerStateValue(state=pb.CONTAINER_RUNNING))
            if found := await cri.runtime.list_containers(running):
                break
            await asyncio.sleep(0.1)
        await asyncio.sleep(1)  # the pod's status follows a moment later
    status = (await cri.runtime.container_status(found[0].id)).status
    return found[0].labels["io.kubernetes.pod.name"], found[0].id, Path(status.log_path)


def _wish(container: str) -> pb.ExecRequest:
    return pb.ExecRequest(container_id=container, cmd=_COMMAND, stdout=True)


def _plain(host: str, port: int) -> Connect:
    return lambda: _connected(host, port)


def _secure(people: Path) -> Connect:
    context = ssl._create_unverified_context()
    context.load_cert_chain(people / "me.crt", people / "me.key")

    def connect() -> socket.socket:
        return context.wrap_socket(_connected("127.0.0.1", _HEALTH_PORT + 1))

    return connect


def _connected(host: str, port: int) -> socket.socket:
    connection = socket.create_connection((host, port))
    # As every client in Go does: else the request waits for the acknowledgement of the handshake.
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def _exec(connect: Connect, target: str) -> float:
    """Run the command; gives the seconds until its last byte was here."""
    frames = FrameWriter()
    with connect() as connection:
        began = time.monotonic()
        connection.sendall(f"POST {target} HTTP/1.1\r\nHost: n\r\n{_HEAD}Content-Length: 0\r\n\r\n".encode())
        head = b""
        while b"\r\n\r\n" not in head:
            head += connection.recv(1)
        assert head.split()[1] == b"101", head
        for kind in ("error", "stdout"):
            connection.sendall(frames.open_stream({"streamType": kind})[1])
        _read(connection, _MEGABYTES * 1_000_000)
        return time.monotonic() - began


def _log(connect: Connect, target: str) -> float:
    with connect() as connection:
        began = time.monotonic()
        connection.sendall(f"GET {target} HTTP/1.1\r\nHost: n\r\nConnection: close\r\n\r\n".encode())
        _read(connection, _LOG_LINES * 100)
        return time.monotonic() - began


def _read(connection: socket.socket, wanted: int) -> None:
    buffer = bytearray(1024 * 1024)
    while wanted > 0:
        count = connection.recv_into(buffer)
        assert count, f"{wanted} bytes are missing"
        wanted -= count


def _read_with(command: tuple[str, ...], log: Path) -> float:
    began = time.monotonic()
    with subprocess.Popen(
        [*command, str(log)], stdout=subprocess.PIPE, env={"LC_ALL": "C", "PATH": "/usr/bin:/bin"}
    ) as process:
        assert process.stdout is not None
        while os.read(process.stdout.fileno(), 1024 * 1024):
            pass
    return time.monotonic() - began


def _fill(log: Path, text: str) -> int:
    """Give the container a long log."""
    chance = random.Random(1)
    with log.open("w") as file:
        for number in range(_LOG_LINES):
            moment = (
                f"{number // 60_000 % 60:02}:{number // 1000 % 60:02}.{chance.randrange(10**9):09}".rstrip(
                    "0"
                )
            )
            file.write(f"2026-01-02T03:{moment}Z {chance.choice(('stdout', 'stderr'))} F {text}\n")
    return log.stat().st_size


def _tell(what: str, megabytes: float, direct: list[float], agent: list[float], cpu: list[float]) -> None:
    print(
        f"     {what}, {megabytes:.0f} MB: directly {megabytes / min(direct):.0f} MB/s, "
        f"through the agent {megabytes / min(agent):.0f} MB/s "
        f"and {min(cpu) * 100 / megabytes:.2f} s of its processor time per 100 MB"
    )
