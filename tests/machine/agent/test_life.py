"""`pykubelet up`, and a web server: it comes, answers, is replaced, survives the agent, and goes."""

import os
import re
import signal
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from pykubelet.linux.processes import Process
from pykubelet.standalone.daemon import find_daemons
from tests.support.data_dir import short_dir, take_down
from tests.support.manifests import IMAGE, Document
from tests.support.node import BIN, Node, is_ready, running, status_of, up_node
from tests.support.ports import free_port

pytestmark = pytest.mark.machine

EXAMPLE = Path(__file__).parents[3] / "examples" / "web.yaml"


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    with short_dir() as path:
        with running(up_node(path)) as started:
            yield started
        take_down(path)


def web(port: int, greeting: str = "hello") -> Document:
    text = EXAMPLE.read_text().replace("hello from", f"{greeting} from")
    document: Document = yaml.safe_load(re.sub(r"(image: ).*busybox.*", rf"\1{IMAGE}", text))
    document["spec"]["terminationGracePeriodSeconds"] = 1
    document["spec"]["containers"][0]["ports"][0]["hostPort"] = port
    return document


def answer(url: str) -> str:
    with urllib.request.urlopen(url, timeout=30) as response:
        text: str = response.read().decode()
        return text


def packet_rules() -> str:
    return subprocess.run(["iptables-save"], capture_output=True, text=True, check=True).stdout


def test_pykubelet_up_web_server_manifest_edited_and_removed_end_to_end(node: Node) -> None:
    port = free_port()
    began = time.monotonic()
    pod = node.start_pod(web(port))
    print(f"\nready after {time.monotonic() - began:.2f} s")
    uid, address = pod["metadata"]["uid"], pod["status"]["podIP"]
    assert pod["status"]["phase"] == "Running"
    assert answer(f"http://{address}/") == f"hello from web-n1 at {address}\n"
    assert answer(f"http://127.0.0.1:{port}/") == f"hello from web-n1 at {address}\n"
    assert f"--dport {port}" in packet_rules()
    shown = subprocess.run(
        [BIN / "pykubelet", "ps", "--data-dir", node.instance.data_dir],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert "web-n1" in shown.stdout, shown.stderr

    # Editing makes a new pod; the old one is gone before the new one begins.
    node.write(web(port, "welcome"))
    overlaps: list[set[str]] = []

    def replaced() -> Document | None:
        overlaps.append({box.metadata.uid for box in node.truth.ready("web-n1")})
        now = node.pod("web-n1")
        return now if now is not None and now["metadata"]["uid"] != uid and is_ready(now) else None

    new = node.wait("the edited pod to be ready", replaced)
    assert all(len(uids) <= 1 for uids in overlaps), overlaps
    assert answer(f"http://127.0.0.1:{port}/").startswith("welcome from web-n1 at ")
    node.wait_gone("web-n1 (the first)", uid)
    assert new["metadata"]["uid"] != uid

    node.remove("web")
    node.wait_gone("web-n1", new["metadata"]["uid"])
    node.wait_none("nothing to be left", node.left_of)
    leases = [path.name for path in node.instance.cni_leases.rglob("*") if path.name.startswith("10.")]
    assert leases == []
    assert f"--dport {port}" not in packet_rules()
    assert node.pods() == []


def test_kubelet_and_runtime_restart_keeps_containers(node: Node) -> None:
    port = free_port()
    before = node.start_pod(web(port))
    (container,) = node.truth.running("web-n1")
    assert not (node.root / "pods-api").exists()  # its feature gate is off
    node.kill()
    assert answer(f"http://127.0.0.1:{port}/").startswith("hello")
    node.start()
    after = node.wait_ready("web-n1")
    assert [one.id for one in node.truth.running("web-n1")] == [container.id]
    assert status_of(after, "httpd")["restartCount"] == 0
    assert after["metadata"]["uid"] == before["metadata"]["uid"]
    assert after["status"]["podIP"] == before["status"]["podIP"]

    # The same by a polite end; what was wished for meanwhile happens at the next start.
    began = time.monotonic()
    assert node.stop() == 0
    assert time.monotonic() - began < 30
    assert "containerd did not stop in time" not in node.log_text(), "it has ten seconds, and needs far less"
    node.remove("web")
    node.start()
    node.wait_gone("web-n1", before["metadata"]["uid"])
    node.wait_none("nothing to be left", node.left_of)


def test_runtime_killed_is_restarted_pods_stay_running(node: Node) -> None:
    pod = node.start_pod(web(free_port()))
    (container,) = node.truth.running("web-n1")

    def alone() -> list[Process]:
        # One that starts another program looks like two of its kind for a moment.
        return found if len(found := find_daemons(node.instance)) == 1 else []

    (daemon,) = node.wait("one containerd", alone)
    os.kill(daemon.pid, signal.SIGKILL)
    node.wait("another containerd", lambda: [p for p in find_daemons(node.instance) if p.pid != daemon.pid])
    again = node.start_pod({**web(free_port()), "metadata": {"name": "second"}})
    assert is_ready(again)
    assert [one.id for one in node.truth.running("web-n1")] == [container.id]
    now = node.wait_ready("web-n1")
    assert now["metadata"]["uid"] == pod["metadata"]["uid"]
    assert status_of(now, "httpd")["restartCount"] == 0
    node.clear()
