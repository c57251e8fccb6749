"""Commands on a real drop-in kubelet, while it runs and while it is stopped."""

import json
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.cli_node import PYKUBELET, Ran, environment
from tests.support.node import NAME, Node, kubelet_node, running
from tests.support.runtime import RunningRuntime

pytestmark = pytest.mark.machine


@pytest.fixture
def node(private_runtime: RunningRuntime, short_root: Path) -> Iterator[Node]:
    with running(kubelet_node(private_runtime, root=short_root)) as started:
        yield started
        if started.process is None:
            started.start()
        started.clear()


@pytest.fixture
def short_root() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="pyk-", dir="/tmp") as path:
        yield Path(path)
        # A restarted kubelet keeps the mount of its root directory, which it found.
        subprocess.run(["umount", path], check=False, capture_output=True)


def command(node: Node, *arguments: str) -> Ran:
    name, *rest = arguments
    line = [PYKUBELET, name, "--root-dir", str(node.root), *rest]
    done = subprocess.run(
        line,
        capture_output=True,
        text=True,
        env=environment(),
        timeout=60,
        stdin=subprocess.DEVNULL,
        check=False,
    )
    return Ran(done.returncode, done.stdout, done.stderr)


def test_commands_on_drop_in_kubelet_running_and_stopped(
    node: Node, private_runtime: RunningRuntime, tmp_path: Path
) -> None:
    image, shell = private_runtime.busybox_image, ["sh", "-c", "echo hello; exec sleep 3600"]
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "box"},
        "spec": {
            "containers": [{"name": "main", "image": image, "command": shell}],
            "terminationGracePeriodSeconds": 0,
        },
    }
    manifest = tmp_path / "box.json"
    manifest.write_text(json.dumps(pod))
    ran = command(node, "run", str(manifest))
    assert (ran.code, ran.err) == (0, ""), ran
    assert f"pod/default/box-{NAME}" in command(node, "ps", "-o", "name").out
    events = json.loads(command(node, "events", "box", "-o", "json").out)["events"]
    reasons = [event["reason"] for event in events]
    assert reasons[-2:] == ["Created", "Started"]
    assert "Started" in command(node, "describe", "box").out
    assert json.loads(command(node, "pressure", "-o", "json").out)
    source = tmp_path / "file"
    source.write_text("text")
    assert command(node, "cp", str(source), "box:/root/").code == 0
    assert command(node, "exec", "box", "--", "cat", "/root/file").out == "text"

    assert node.stop() == 0
    ran = command(node, "ps")
    assert ran.code == 0, ran
    assert ran.err.count("\n") == 1
    assert "the kubelet does not run" in ran.err
    assert ran.out.splitlines()[1].split()[:4] == [f"box-{NAME}", "default", "1/1", "Running"]
    assert command(node, "exec", "box-n1", "--", "cat", "/root/file").out == "text"
    assert command(node, "cp", "box-n1:/root/file", str(tmp_path / "back")).code == 0
    assert (tmp_path / "back").read_text() == "text"
    assert "Name:" in command(node, "describe", "box-n1").out
    assert command(node, "logs", "box").out == "hello\n"
    ran = command(node, "events")
    assert (ran.code, ran.err.count("\n")) == (1, 1)

    node.start()
    (shown,) = json.loads(command(node, "ps", "-o", "json").out)["items"]
    assert shown["status"]["containerStatuses"][0]["restartCount"] == 0
