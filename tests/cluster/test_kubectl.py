"""kubectl against a real API server, which asks our node: logs, commands, copies, ports, debugging.

What goes over a stream is tried both ways that kubectl has, WebSocket and SPDY.
"""

import hashlib
import json
import os
import re
import socket
import time
import urllib.request
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from tests.cluster.conftest import fresh_namespace
from tests.cluster.kubectl_program import Kubectl, Terminal
from tests.support.cluster_node import END, UNTIL_TOLD, ClusterNode
from tests.support.manifests import forever
from tests.support.node import status_of
from tests.support.plane import Document, Plane, unique

pytestmark = pytest.mark.machine

MEGABYTES = int(os.environ.get("PYKUBELET_STREAM_MEGABYTES", "10"))
"""How much goes through copies and forwarded ports; `make test STREAM_MEGABYTES=100` sets it."""
TALK = "for i in 1 2 3 4 5; do echo line $i; done; sleep 6.1; echo late"


@pytest.fixture(scope="module")
def space(plane: Plane) -> Iterator[str]:
    """The module's namespace."""
    with fresh_namespace(plane) as name:
        yield name


@pytest.fixture(scope="module", autouse=True)
def no_failed_answer(cluster_member: ClusterNode) -> Iterator[None]:
    """However clients left, nothing went wrong that nobody had thought of."""
    yield
    assert "Failed to handle request" not in cluster_member.log_text()


@pytest.fixture(scope="module")
def worker(cluster_member: ClusterNode, space: str) -> Document:
    """A pod to run commands in."""
    return cluster_member.wait_pod_ready(cluster_member.create_pod(space, "worker"))


@pytest.fixture(scope="module")
def talker(cluster_member: ClusterNode, space: str) -> Document:
    """A pod that has said what it has to say."""
    node, image = cluster_member, cluster_member.image
    side = {"name": "side", "image": image, "command": forever("echo beside; echo to stderr >&2")}
    first = {"name": "first", "image": image, "command": ["echo", "prepared"]}
    main = {"name": "main", "image": image, "command": forever(TALK)}
    made = node.create_pod(space, "talker", containers=[main, side], initContainers=[first])
    node.wait_pod_ready(made)
    log = Kubectl(node.plane)
    node.wait(
        "the talker's last word", lambda: b"late" in log.run("logs", "-n", space, "talker", "-c", "main").out
    )
    node.wait(
        "its neighbour's words",
        lambda: len(log.run("logs", "-n", space, "talker", "-c", "side").out.splitlines()) == 2,
    )
    return made


@pytest.fixture(params=["websocket", "spdy"])
def kubectl(request: pytest.FixtureRequest, plane: Plane) -> Kubectl:
    return Kubectl(plane, websocket=request.param == "websocket")


@pytest.fixture
def admin(plane: Plane) -> Kubectl:
    return Kubectl(plane)


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


# Logs

LINES = [f"line {number}" for number in range(1, 6)]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ([], [*LINES, "late"]),
        (["--tail=2"], ["line 5", "late"]),
        (["--tail=0"], []),
        (["--tail=-1"], [*LINES, "late"]),
        (["--limit-bytes=13"], ["line 1", "line 2"]),
        (["--since=1h", "--tail=1"], ["late"]),
        (["-c", "side"], ["beside", "to stderr"]),
        (["-c", "first"], ["prepared"]),
        (["--all-containers"], ["prepared", *LINES, "late", "beside", "to stderr"]),
    ],
)
def test_kubectl_logs_options_select_lines(
    admin: Kubectl, talker: Document, space: str, options: list[str], expected: list[str]
) -> None:
    chosen = [] if "-c" in options or "--all-containers" in options else ["-c", "main"]
    said = admin.ok("logs", "-n", space, "talker", *chosen, *options).decode()
    # The two streams of a container are two pipes: which of two lines came first, nobody knows.
    assert sorted(said.splitlines()) == sorted(expected)
    if "to stderr" not in expected:
        assert said.splitlines() == expected


def test_kubectl_logs_timestamps_since_and_since_time(admin: Kubectl, talker: Document, space: str) -> None:
    ask = ("logs", "-n", space, "talker", "-c", "main")
    lines = admin.ok(*ask, "--timestamps").decode().splitlines()
    times = [datetime.fromisoformat(line.split(" ")[0][:26].rstrip("Z") + "+00:00") for line in lines]
    assert [line.split(" ", 1)[1] for line in lines if "line" in line] == LINES
    assert times[-1] - times[0] >= timedelta(seconds=2)
    last = times[-1].strftime("%Y-%m-%dT%H:%M:%SZ")
    assert admin.ok(*ask, f"--since-time={last}") == b"late\n"
    while time.time() < times[-1].timestamp() + 2:
        time.sleep(0.1)
    assert admin.ok(*ask, "--since=1s") == b""


def test_kubectl_logs_follow_until_container_exits(
    admin: Kubectl, cluster_member: ClusterNode, worker: Document, space: str
) -> None:
    script = f"echo one; {UNTIL_TOLD}; echo two"
    made = cluster_member.create_pod(space, unique("p"), script, restartPolicy="Never")
    name = made["metadata"]["name"]
    cluster_member.wait_pod_ready(made)
    with admin.running("logs", "-f", "-n", space, name) as following:
        assert following.wait_said("one\n") == "one\n"
        admin.ok("exec", "-n", space, name, "--", "sh", "-c", END)
        assert following.wait_said("two\n") == "one\ntwo\n"
        assert following.wait_end() == 0


def test_kubectl_logs_previous_prints_previous_container(
    admin: Kubectl, cluster_member: ClusterNode, space: str
) -> None:
    script = "if [ -e /d/x ]; then echo second; sleep 1000; fi; touch /d/x; echo first; exit 3"
    main = {
        "name": "main",
        "image": cluster_member.image,
        "command": ["sh", "-c", script],
        "volumeMounts": [{"name": "d", "mountPath": "/d"}],
    }
    made = cluster_member.create_pod(space, containers=[main], volumes=[{"name": "d", "emptyDir": {}}])
    name = made["metadata"]["name"]
    cluster_member.wait_api_pod(
        made,
        "to run again",
        lambda found: (
            status_of(found, "main")["restartCount"] == 1 and "running" in status_of(found, "main")["state"]
        ),
        60,
    )
    assert admin.ok("logs", "-n", space, name, "--previous") == b"first\n"
    # A container runs a moment before it says something.
    cluster_member.wait("its word", lambda: admin.run("logs", "-n", space, name).out == b"second\n")
    other = admin.run("logs", "-n", space, "worker", "--previous")
    assert other.code == 1
    assert 'previous terminated container "main" in pod "worker" not found' in other.err
    cluster_member.plane.delete("pod", name, space, grace=0)


# Commands


def test_kubectl_exec_streams_and_exit_code(kubectl: Kubectl, worker: Document, space: str) -> None:
    run = ("exec", "-n", space, "worker", "--", "sh", "-c")
    said = kubectl.run(*run, "echo out; echo err >&2; exit 7")
    assert (said.code, said.text) == (7, "out\n")
    assert said.err.splitlines() == ["err", "command terminated with exit code 7"]
    # Without -i nothing is to be read.
    assert kubectl.ok(*run, "wc -c", input=b"not sent") == b"0\n"


def test_kubectl_exec_stdin_read_until_eof(kubectl: Kubectl, worker: Document, space: str) -> None:
    data = os.urandom(3_000_000)
    echoed = kubectl.ok("exec", "-i", "-n", space, "worker", "--", "cat", input=data, timeout=180)
    assert sha256(echoed) == sha256(data)


def test_kubectl_exec_large_output_unchanged(kubectl: Kubectl, worker: Document, space: str) -> None:
    script = "head -c 20000000 /dev/urandom | tee /big | cat; sha256sum < /big >&2; rm /big"
    said = kubectl.run("exec", "-n", space, "worker", "--", "sh", "-c", script, timeout=180)
    assert said.code == 0
    assert len(said.out) == 20_000_000
    assert said.err.split()[0] == sha256(said.out)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["worker", "--", "no-such-program"], "no-such-program"),
        (["worker", "-c", "none", "--", "true"], "container none is not valid for pod worker"),
        (["nobody", "--", "true"], 'pods "nobody" not found'),
    ],
)
def test_kubectl_exec_invalid_command_or_target_fails_with_message(
    kubectl: Kubectl, worker: Document, space: str, arguments: list[str], message: str
) -> None:
    said = kubectl.run("exec", "-n", space, *arguments)
    assert said.code != 0
    assert message in said.err


def test_kubectl_exec_completed_pod_fails(kubectl: Kubectl, cluster_member: ClusterNode, space: str) -> None:
    made = cluster_member.create_pod(space, script="true", restartPolicy="Never")
    cluster_member.wait_pod_phase(made, "Succeeded")
    said = kubectl.run("exec", "-n", space, made["metadata"]["name"], "--", "true")
    assert said.code == 1
    assert "cannot exec into a container in a completed pod" in said.err
    cluster_member.delete_pod(made)


def test_kubectl_exec_tty_size_and_exit_code(kubectl: Kubectl, worker: Document, space: str) -> None:
    with kubectl.terminal("exec", "-it", "-n", space, "worker", "--", "sh", rows=33, columns=111) as terminal:
        terminal.wait_seen("# ")
        terminal.type("[ -t 0 ] && echo has-a-$((6*7))\n")
        terminal.wait_seen("has-a-42")
        _wait_size(terminal, "33 111")
        terminal.resize(44, 122)
        _wait_size(terminal, "44 122")
        terminal.type("exit 5\n")
        assert terminal.wait_end() == 5


def _wait_size(terminal: Terminal, size: str) -> None:
    # The new size takes its time; so does a shell, which must not be asked twice in one line.
    terminal.type(f"until [ \"$(stty size)\" = '{size}' ]; do sleep 0.1; done; echo is-$((1+1))\n")
    terminal.wait_seen("is-2")


def test_kubectl_exec_tty_ctrl_c_interrupts_command_only(
    kubectl: Kubectl, worker: Document, space: str
) -> None:
    with kubectl.terminal("exec", "-it", "-n", space, "worker", "--", "sh") as terminal:
        terminal.wait_seen("# ")
        # In a shell of its own: the interactive one may be between two commands when the signal comes.
        terminal.type("sh -c 'echo now-$((1+1)); exec sleep 1000'\n")
        terminal.wait_seen("now-2")
        terminal.type("\x03")
        terminal.wait_seen("# ")
        terminal.type("\x04")
        assert terminal.wait_end() == 130


# Attaching


def test_kubectl_attach_stdin_and_output(kubectl: Kubectl, cluster_member: ClusterNode, space: str) -> None:
    reader = {
        "name": "main",
        "image": cluster_member.image,
        "command": ["sh", "-c", "while read line; do echo got $line; done; echo over; sleep 1000"],
        "stdin": True,
        "stdinOnce": True,
    }
    made = cluster_member.create_pod(space, containers=[reader])
    cluster_member.wait_pod_ready(made)
    with kubectl.running("attach", "-i", "-n", space, made["metadata"]["name"]) as attached:
        attached.write(b"this\n")
        attached.wait_said("got this")
        attached.write(b"that\n", last=True)
        attached.wait_said("over")
    cluster_member.plane.delete("pod", made["metadata"]["name"], space, grace=0)


def test_kubectl_attach_tty_size_and_exit_code(
    kubectl: Kubectl, cluster_member: ClusterNode, space: str
) -> None:
    shell = {
        "name": "main",
        "image": cluster_member.image,
        "command": ["sh"],
        "stdin": True,
        "tty": True,
    }
    made = cluster_member.create_pod(space, containers=[shell], restartPolicy="Never")
    cluster_member.wait_pod_ready(made)
    with kubectl.terminal(
        "attach", "-it", "-n", space, made["metadata"]["name"], rows=21, columns=71
    ) as seat:
        seat.type("\n")
        seat.wait_seen("# ")
        _wait_size(seat, "21 71")
        seat.type("exit\n")
        assert seat.wait_end() == 0
    cluster_member.wait_pod_phase(made, "Succeeded")
    cluster_member.delete_pod(made)


# Copies and ports


def test_kubectl_cp_to_and_from_container_unchanged(
    kubectl: Kubectl, worker: Document, space: str, tmp_path: Path
) -> None:
    here, back = tmp_path / "here", tmp_path / "back"
    here.write_bytes(os.urandom(MEGABYTES * 1_000_000))
    wanted = sha256(here.read_bytes())
    began = time.monotonic()
    kubectl.ok("cp", str(here), f"{space}/worker:/copied", timeout=600)
    there = time.monotonic()
    assert (
        kubectl.ok("exec", "-n", space, "worker", "--", "sha256sum", "/copied").split()[0] == wanted.encode()
    )
    again = time.monotonic()
    kubectl.ok("cp", f"{space}/worker:/copied", str(back), timeout=600)
    print(f"cp of {MEGABYTES} MB: {there - began:.1f} s there, {time.monotonic() - again:.1f} s back")
    assert sha256(back.read_bytes()) == wanted


@pytest.fixture
def server_pod(cluster_member: ClusterNode, space: str) -> Iterator[Document]:
    """A pod that gives a file on port 8080 and takes one on port 9090."""
    script = (
        f"mkdir /www; head -c {MEGABYTES * 1_000_000} /dev/urandom > /www/file; httpd -p 8080 -h /www; "
        # The runtime ends a connection a second after its server has nothing more to say.
        "sleep 1000 | nc -l -p 9090 > /taken; sleep 1000"
    )
    made = cluster_member.create_pod(space, script=script)
    yield cluster_member.wait_pod_ready(made)
    cluster_member.plane.delete("pod", made["metadata"]["name"], space, grace=0)


def test_kubectl_port_forward_two_ports_data_unchanged(
    kubectl: Kubectl, cluster_member: ClusterNode, server_pod: Document, space: str
) -> None:
    name = server_pod["metadata"]["name"]

    def in_pod(script: str) -> str:
        return kubectl.run("exec", "-n", space, name, "--", "sh", "-c", script).text

    cluster_member.wait("the servers", lambda: in_pod("netstat -ltn | grep -c -e :8080 -e :9090") == "2\n")
    with kubectl.running("port-forward", "-n", space, name, ":8080", ":9090") as forwarding:
        said = forwarding.wait_said("-> 9090")
        ports = {there: int(here) for here, there in re.findall(r"127\.0\.0\.1:(\d+) -> (\d+)", said)}
        began = time.monotonic()
        with urllib.request.urlopen(f"http://127.0.0.1:{ports['8080']}/file", timeout=600) as answer:
            data = answer.read()
        down = time.monotonic() - began
        assert len(data) == MEGABYTES * 1_000_000
        assert in_pod("sha256sum /www/file").split()[0] == sha256(data)
        began = time.monotonic()
        with socket.create_connection(("127.0.0.1", ports["9090"]), timeout=600) as connection:
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            cluster_member.wait(
                "the file to be there", lambda: in_pod("sha256sum /taken").split()[:1] == [sha256(data)], 120
            )
        print(f"port-forward of {MEGABYTES} MB: {down:.1f} s down, {time.monotonic() - began:.1f} s up")


def test_kubectl_port_forward_no_listener_connection_refused(
    kubectl: Kubectl, worker: Document, space: str
) -> None:
    with kubectl.running("port-forward", "-n", space, "worker", ":8081") as forwarding:
        said = forwarding.wait_said("-> 8081")
        (port,) = set(re.findall(r":(\d+) -> ", said))
        with socket.create_connection(("127.0.0.1", int(port)), timeout=60) as connection:
            assert connection.recv(1) == b""
        forwarding.wait_said("refused")


def test_kubectl_websocket_streams_terminated_by_kubelet(
    plane: Plane, admin: Kubectl, cluster_member: ClusterNode, worker: Document, space: str
) -> None:
    """Verify that the API server passes WebSocket streams through because the node declares the feature."""
    metric = "kubelet_websocket_streaming_requests_total"

    def counted(subresource: str) -> float:
        path = f"/api/v1/nodes/{cluster_member.name}/proxy/metrics"
        found = re.findall(
            rf'^{metric}{{subresource="{subresource}"}} (\S+)$', admin.ok("get", "--raw", path).decode(), re.M
        )
        return float(found[0]) if found else 0

    node = json.loads(admin.ok("get", "node", cluster_member.name, "-o", "json"))
    assert "ExtendWebSocketsToKubelet" in node["status"]["declaredFeatures"]
    for websocket, more in ((True, 1), (False, 0)):
        kubectl = Kubectl(plane, websocket=websocket)
        before, ports_before = counted("exec"), counted("portforward")
        assert kubectl.ok("exec", "-n", space, "worker", "--", "echo", "hi") == b"hi\n"
        with kubectl.running("port-forward", "-n", space, "worker", ":8081") as forwarding:
            forwarding.wait_said("-> 8081")
        assert counted("exec") - before == more
        assert counted("portforward") - ports_before == more


# Debugging


def test_kubectl_debug_ephemeral_container_sees_target_processes(
    kubectl: Kubectl, cluster_member: ClusterNode, space: str
) -> None:
    made = cluster_member.wait_pod_ready(cluster_member.create_pod(space))
    name = made["metadata"]["name"]
    with kubectl.terminal(
        *("debug", "-it", "-n", space, name, "-c", "helper"),
        *(f"--image={cluster_member.image}", "--target=main", "--profile=general", "--", "sh"),
    ) as terminal:
        terminal.type("\n")
        terminal.wait_seen("# ")
        # With --target it sees the other container's processes.
        terminal.type("ps | grep -q '[s]leep 3600$' && echo seen-$((3*3))\n")
        terminal.wait_seen("seen-9")
        assert kubectl.ok("exec", "-n", space, name, "-c", "helper", "--", "echo", "in it") == b"in it\n"
        terminal.type("exit\n")
        assert terminal.wait_end() == 0
    cluster_member.wait(
        "its log", lambda: b"seen-9" in kubectl.run("logs", "-n", space, name, "-c", "helper").out
    )
    cluster_member.delete_pod(made)


# The node through the API server's proxy


def test_kubectl_get_raw_node_proxy_endpoints(
    admin: Kubectl, cluster_member: ClusterNode, worker: Document, space: str
) -> None:
    def page(path: str) -> str:
        return admin.ok("get", "--raw", f"/api/v1/nodes/{cluster_member.name}/proxy/{path}").decode()

    assert page("healthz") == "ok"
    assert page("healthz/ping") == "ok"
    pods = json.loads(page("pods"))
    assert "worker" in [pod["metadata"]["name"] for pod in pods["items"]]
    running = json.loads(page("runningpods/"))
    assert "worker" in [pod["metadata"]["name"] for pod in running["items"]]
    assert json.loads(page("configz"))["kubeletconfig"]["authorization"]["mode"] == "Webhook"
    assert 'kubelet_http_requests_total{long_running="false",method="GET"' in page("metrics")
    assert "kubelet_http_requests_total" not in page("metrics/probes")
    missing = admin.run("get", "--raw", f"/api/v1/nodes/{cluster_member.name}/proxy/none")
    assert missing.code == 1
    assert "NotFound" in missing.err
