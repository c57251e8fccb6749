"""Packets from pods to the node's loopback (CVE-2020-8558), sent and received for real.

The runtime runs in a network namespace of its own: the packet filter of the test machine may hold the
rule of another kubelet (KUBE-FIREWALL), which would drop some of these packets as well.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import textwrap
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from pykubelet.cri.connect import RuntimeConnection
from pykubelet.linux.iptables import plan_removal, rules_of
from pykubelet.linux.processes import CommandError
from pykubelet.standalone import runtime as loopback_guard
from pykubelet.standalone.instance import EmbeddedError, Instance
from pykubelet.standalone.runtime import guard_rule
from tests.support.cri_pods import connected, container_pid, start_pod
from tests.support.runtime import runtime_process, why_no_machine

HOST_PORT, SERVICE_PORT = 11_080, 11_053
SERVER = ("sh", "-c", "mkdir -p /www; echo hello >/www/index.html; exec httpd -f -p 80 -h /www")

RECEIVE = """
    # Print what arrives at 127.0.0.1 before the last packet, which arrives at the bridge's address.
    import socket, sys
    port, bridge = int(sys.argv[1]), sys.argv[2]
    sockets = []
    for address in ("127.0.0.1", bridge):
        one = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        one.bind((address, port))
        one.settimeout(60)
        sockets.append(one)
    print("listening", flush=True)
    service, last = sockets
    assert last.recv(100) == b"last"
    service.setblocking(False)
    try:
        while True:
            print(service.recv(100).decode(), flush=True)
    except BlockingIOError:
        pass
"""

SEND = """
    # Send UDP packets as raw frames to the bridge: lines of source, destination and content.
    import os, socket, struct, sys
    mac, port = bytes.fromhex(sys.argv[1].replace(":", "")), int(sys.argv[2])
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # one queue: packets arrive in order
    sender = socket.socket(socket.AF_PACKET, socket.SOCK_RAW)
    sender.bind(("eth0", 0))

    def checksum(data):
        total = sum(struct.unpack(f">{len(data) // 2}H", data))
        total = (total >> 16) + (total & 0xFFFF)
        return ~(total + (total >> 16)) & 0xFFFF

    for line in sys.argv[3:]:
        source, destination, content = line.split()
        datagram = struct.pack(">HHHH", 40000, port, 8 + len(content), 0) + content.encode()
        ends = socket.inet_aton(source) + socket.inet_aton(destination)
        head = struct.pack(">BBHHHBBH", 0x45, 0, 20 + len(datagram), 1, 0, 64, 17, 0) + ends
        head = head[:10] + struct.pack(">H", checksum(head)) + head[12:]
        sender.send(mac + sender.getsockname()[4] + b"\\x08\\x00" + head + datagram)
"""


FETCH = """
    # Print a page as soon as it is served.
    import sys, time, urllib.error, urllib.request
    end = time.monotonic() + 30
    while True:
        try:
            print(urllib.request.urlopen(sys.argv[1], timeout=5).read().decode().strip())
            break
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.1)
"""


@dataclass
class Node:
    """A node in a network namespace of its own."""

    inside: tuple[str, ...]
    """Command prefix that enters the namespace."""
    instance: Instance
    cri: RuntimeConnection
    pod_ip: str
    pod_pid: int

    def run(self, *argv: str) -> str:
        return subprocess.run(
            [*self.inside, *argv], check=True, capture_output=True, text=True, timeout=60
        ).stdout

    def python(self, script: str, *argv: str) -> str:
        return self.run(sys.executable, "-c", textwrap.dedent(script), *argv)

    def fetch(self, address: str, port: int) -> str:
        return self.python(FETCH, f"http://{address}:{port}/index.html")

    async def received(self) -> list[str]:
        """Send packets from the pod to the node's loopback; return the contents that arrive there."""
        bridge = json.loads(self.run("ip", "-j", "addr", "show", self.instance.bridge))[0]
        address = next(one["local"] for one in bridge["addr_info"] if one["family"] == "inet")
        receiver = await asyncio.create_subprocess_exec(
            *(*self.inside, sys.executable, "-c", textwrap.dedent(RECEIVE), str(SERVICE_PORT), address),
            stdout=asyncio.subprocess.PIPE,
        )
        assert receiver.stdout is not None
        try:
            async with asyncio.timeout(60):
                assert await receiver.stdout.readline() == b"listening\n"
                subprocess.run(
                    [
                        *("nsenter", "-t", str(self.pod_pid), "-n", sys.executable, "-c"),
                        *(textwrap.dedent(SEND), bridge["address"], str(SERVICE_PORT)),
                        f"{self.pod_ip} 127.0.0.1 own-address",
                        "127.0.0.9 127.0.0.1 loopback-address",
                        "192.0.2.1 127.0.0.1 foreign-address",
                        f"{self.pod_ip} {address} last",
                    ],
                    check=True,
                    timeout=60,
                )
                return (await receiver.stdout.read()).decode().split()
        finally:
            if receiver.returncode is None:
                receiver.kill()
            await receiver.wait()


@contextmanager
def network_namespace() -> Iterator[tuple[str, ...]]:
    """Make a network namespace with a loopback; return the command prefix that enters it."""
    holder = subprocess.Popen(
        [
            *("setpriv", "--pdeathsig", "KILL", "unshare", "--net", "sh", "-c"),
            "ip link set lo up && echo up && exec sleep 3600",
        ],
        stdout=subprocess.PIPE,
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"up\n"
        yield ("nsenter", "-t", str(holder.pid), "-n")
    finally:
        holder.kill()
        holder.communicate()


@asynccontextmanager
async def node(data_dir: Path) -> AsyncIterator[Node]:
    """Run a node with a pod that has a host port; `pykubelet down` removes it at the end."""
    with network_namespace() as inside:
        try:
            with runtime_process(data_dir, inside=inside) as runtime:
                async with connected(runtime.endpoint) as cri:
                    pod = await start_pod(
                        cri, runtime.instance, runtime.busybox_image, *SERVER, host_port=HOST_PORT
                    )
                    status = await cri.runtime.pod_sandbox_status(pod.sandbox)
                    pid = await container_pid(cri, pod)
                    yield Node(inside, runtime.instance, cri, status.status.network.ip, pid)
        finally:
            command = [
                *inside,
                str(Path(sys.executable).with_name("pykubelet")),
                "down",
                "--data-dir",
                str(data_dir),
            ]
            subprocess.run(command, check=True, capture_output=True, timeout=120)
            rules = subprocess.run([*inside, "iptables-save"], check=True, capture_output=True, text=True)
            assert rules_of(rules.stdout, Instance.at(data_dir).name) == []


@pytest.mark.machine
@pytest.mark.skipif(bool(why_no_machine()), reason=why_no_machine())
async def test_node_packet_from_pod_to_loopback_dropped(data_dir: Path) -> None:
    """Verify that no packet of a pod reaches 127.0.0.1, that host ports do, and that a flush is repaired."""
    async with node(data_dir) as here:
        localnet = f"/proc/sys/net/ipv4/conf/{here.instance.bridge}/route_localnet"
        assert here.run("cat", localnet).strip() == "1", "without it the kernel drops these packets itself"
        assert await here.received() == []
        assert here.fetch("127.0.0.1", HOST_PORT) == "hello\n"

        arrived: list[str] = []
        for _ in range(5):
            here.run("iptables", "-t", "mangle", "-F")
            if arrived := await here.received():
                break  # otherwise the rule was restored in between
        assert arrived == ["own-address", "loopback-address", "foreign-address"]
        end = time.monotonic() + 60
        while await here.received():
            assert time.monotonic() < end, "the rule is not restored"
            await asyncio.sleep(0.2)
        assert here.fetch("127.0.0.1", HOST_PORT) == "hello\n"


def test_guard_rule_of_network_found_and_removed_by_label() -> None:
    instance = Instance.at(Path("/srv/pykubelet-one"))
    chain, *rest = guard_rule(instance)
    words = [f'"{word}"' if " " in word else word for word in (part.replace('"', r"\"") for part in rest)]
    text = f"*mangle\n:PREROUTING ACCEPT [0:0]\n-A {chain} {' '.join(words)}\nCOMMIT\n"
    assert len(rules_of(text, instance.name)) == 1
    assert rules_of(text, "pykubelet") == []
    assert plan_removal(text, instance.name) == f"*mangle\n-D {chain} {' '.join(words)}\nCOMMIT\n"


async def test_require_guard_without_packet_filter_stops_start(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(*argv: str) -> str:
        raise CommandError("iptables failed with status 3: no such table")

    monkeypatch.setattr(loopback_guard, "run", fail)
    with pytest.raises(EmbeddedError, match=r"cannot protect the node's loopback .* no such table; check"):
        await loopback_guard.require_guard(Instance.at(Path("/srv/pykubelet-one")))
