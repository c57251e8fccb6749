"""A machine whose network comes late: the agent is there before it, and pods are told of it then."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from ipaddress import ip_address

import pytest

from tests.support.manifests import container, forever, pod
from tests.support.node import kubelet_node, running, status_of
from tests.support.ports import free_port
from tests.support.runtime import RunningRuntime

pytestmark = pytest.mark.machine

FIELDS = ("status.hostIP", "status.podIP", "status.podIPs")


@contextmanager
def own_address(address: str) -> Iterator[None]:
    """Give this machine an address, where it disturbs nobody."""
    subprocess.run(["ip", "address", "add", f"{address}/32", "dev", "lo"], check=True)
    try:
        yield
    finally:
        subprocess.run(["ip", "address", "del", f"{address}/32", "dev", "lo"], check=True)


def test_node_ip_added_late_is_set_in_pod_status(runtime: RunningRuntime) -> None:
    # Of a network for measurements; one by chance, since others may test on this machine, too.
    address = str(ip_address("198.18.0.0") + int.from_bytes(os.urandom(2)))
    node = kubelet_node(runtime, podCIDR="10.99.0.0/24")
    node.command = [*node.command, f"--node-ip={address}"]
    env = [{"name": f"F{n}", "valueFrom": {"fieldRef": {"fieldPath": path}}} for n, path in enumerate(FIELDS)]
    with running(node):
        for words in (
            f"node IP {address} is not on an interface of this machine",
            'newPodCIDR="10.99.0.0/24"',
        ):
            node.wait(f"the log to say {words}", lambda: words in node.log_text())  # noqa: B023
        node.start_pod(pod("plain"))
        port = free_port()
        probe = {"tcpSocket": {"port": port}, "periodSeconds": 1}
        serves = container(command=forever(f"mkdir /www; httpd -p {port} -h /www"), readinessProbe=probe)
        node.start_pod(pod("probed", serves, hostNetwork=True))
        node.write(pod("asks", container(env=env), hostNetwork=True))
        node.wait_pod(
            "asks-n1",
            "to wait for the address",
            lambda found: "host IP unknown" in str(status_of(found, "main")["state"]),
        )
        with own_address(address):
            asks = node.wait_ready("asks-n1")
            assert asks["status"]["hostIP"] == asks["status"]["podIP"] == address
            # In the host's network, the host's address is the pod's.
            told = node.shell("asks-n1", "echo $F0 $F1 $F2").split()
            assert told == [address] * 3
            node.wait_pod("plain-n1", "to have it", lambda found: found["status"].get("hostIP") == address)
            node.clear()
