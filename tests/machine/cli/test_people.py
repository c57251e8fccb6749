"""The commands for people against a real node: every example is run, looked at and removed."""

import asyncio
import json
import re
import signal
import time
import urllib.request
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from pykubelet.podconfig.local_objects import LOCAL_KINDS
from pykubelet.podconfig.manifests import read_manifest
from pykubelet.podconfig.static_pods import static_pods
from tests.support.cli_node import Ran, command, environment, pykubelet
from tests.support.data_dir import short_dir
from tests.support.node import Node, running, up_node
from tests.support.ports import free_port

EXAMPLES = Path(__file__).parents[3] / "examples"


@pytest.mark.parametrize("file", sorted(EXAMPLES.glob("*.yaml")), ids=lambda file: file.stem)
def test_examples_each_manifest_is_one_valid_static_pod(file: Path) -> None:
    data = file.read_bytes()
    (written,) = read_manifest(data, str(file)).pods
    assert written.metadata.name == file.stem
    made = static_pods(data, source="file", origin="x", node_name="n", now=0, served=LOCAL_KINDS)
    assert len(made) == 1
    assert data.startswith(b"# ")
    assert b"pykubelet run examples/" in data


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    """`pykubelet up`, as a person starts it; but what ran before the last run is kept, too, for its log."""
    with short_dir() as path:
        made = up_node(path)
        made.command = [*made.command, "--maximum-dead-containers-per-container=2"]
        with running(made) as started:
            yield started
            started.clear()


@pytest.fixture
def unused_tcp_port() -> int:
    """A port for a pod, which the kernel gives to nobody else meanwhile."""
    return free_port()


@pytest.fixture
def examples(node: Node, tmp_path: Path, unused_tcp_port: int) -> Iterator[Path]:
    """The examples, with a port that is free."""
    for file in EXAMPLES.glob("*.yaml"):
        text = file.read_text()
        (tmp_path / file.name).write_text(text.replace("hostPort: 8080", f"hostPort: {unused_tcp_port}"))
    yield tmp_path
    node.clear()


async def ask(node: Node, name: str, *arguments: str, **more: Any) -> Ran:
    return await pykubelet(node.instance, name, *arguments, **more)


async def logged(node: Node, name: str, text: str) -> Ran:
    """Give a pod's log when this is in it: the runtime writes down what was said a moment later."""
    end = time.monotonic() + 45
    while text not in (ran := await ask(node, "logs", name)).out + ran.err and time.monotonic() < end:
        await asyncio.sleep(0.2)
    return ran


@pytest.mark.machine
async def test_pykubelet_run_web_example_ready_updated_and_removed(
    node: Node, examples: Path, unused_tcp_port: int
) -> None:
    ran = await ask(node, "run", str(examples / "web.yaml"))
    assert ran.code == 0, ran
    assert re.search(r"^web: ready, at [0-9.]+$", ran.out, re.MULTILINE)
    assert _page(unused_tcp_port).startswith("hello from web-n1 at ")
    shown = (await ask(node, "ps")).out.splitlines()[1].split()
    assert shown[:5] == ["web-n1", "default", "1/1", "Running", "0"]
    (item,) = json.loads((await ask(node, "ps", "-o", "json")).out)["items"]
    assert item["status"]["phase"] == "Running"
    assert item == node.pods()[0]
    ran = await logged(node, "web", "response:200")
    assert "response:200" in ran.out + ran.err

    (examples / "web.yaml").write_text((examples / "web.yaml").read_text().replace("hello", "goodbye"))
    ran = await ask(node, "run", str(examples / "web.yaml"))
    assert ran.code == 0, ran
    assert _page(unused_tcp_port).startswith("goodbye from web-n1 at ")
    # The old one's traces may go after the new one has begun.
    node.wait(
        "the new one alone",
        lambda: [pod["metadata"]["uid"] == item["metadata"]["uid"] for pod in node.pods()] == [False],
    )

    (node.manifests / "web.yaml").unlink()
    node.wait("web to be gone", lambda: not node.pods())
    assert "No pods" in (await ask(node, "ps")).err


@pytest.mark.machine
async def test_pykubelet_run_page_example_configmap_update_keeps_pod(
    node: Node, examples: Path, unused_tcp_port: int
) -> None:
    ran = await ask(node, "run", str(examples / "page.yaml"))
    assert ran.code == 0, ran
    assert "configMap default/page: handed to the node" in ran.out
    assert _page(unused_tcp_port) == "<h1>A page that can be edited while it is served</h1>\n"
    assert (await logged(node, "page", "good morning")).out.startswith("good morning\n")
    (before,) = node.pods()
    text = (examples / "page.yaml").read_text().replace("A page", "The same page")
    (examples / "page.yaml").write_text(text)
    assert (await ask(node, "run", str(examples / "page.yaml"))).code == 0
    node.wait("the page to change", lambda: "The same page" in _page(unused_tcp_port))
    assert [pod["metadata"]["uid"] for pod in node.pods()] == [before["metadata"]["uid"]]
    page = (await ask(node, "describe", "page")).out
    assert "configMap" in page or "ConfigMap" in page, page


@pytest.mark.machine
async def test_pykubelet_restart_in_place_keeps_pod_ip_and_logs_followed(node: Node, examples: Path) -> None:
    document = yaml.safe_load((examples / "init.yaml").read_text())
    document["spec"] |= {"initContainers": [], "restartPolicy": "Always"}
    main = document["spec"]["containers"][0]
    main["command"] = ["sh", "-c", "trap 'exit 9' TERM; echo started > /dev/stderr; sleep infinity & wait"]
    del main["readinessProbe"]
    (examples / "init.yaml").write_text(yaml.safe_dump(document))
    assert (await ask(node, "run", "-d", str(examples / "init.yaml"))).code == 0
    before = node.wait_ready("init-n1")
    async with started(node, "logs", "-f", "init") as following:
        assert following.stderr is not None
        assert await following.stderr.readline() == b"started\n"
        ran = await ask(node, "restart", "init", "main")
        assert (ran.code, ran.out) == (0, "Restarting main of init-n1 in place\n")
        assert await following.stderr.readline() == b"started\n"
    after = node.wait_pod("init-n1", "to be restarted", lambda pod: node_restarts(pod) == 1)
    assert after["status"]["podIP"] == before["status"]["podIP"]
    assert after["metadata"]["uid"] == before["metadata"]["uid"]
    page = (await ask(node, "describe", "init")).out
    assert re.search(r"Last state: +Terminated: Error, exit code 9", page)
    assert re.search(r"decide .*main", page)


def node_restarts(pod: dict[str, Any]) -> int:
    status = pod["status"]["containerStatuses"][0]
    return int(status["restartCount"]) if status["ready"] else 0


@asynccontextmanager
async def started(node: Node, name: str, *arguments: str) -> AsyncIterator[Process]:
    """Have a command run for the time of a block, which is not long."""
    process = await asyncio.create_subprocess_exec(
        *command(node.instance, name, *arguments), stdout=PIPE, stderr=PIPE, env=environment()
    )
    try:
        async with asyncio.timeout(60):
            yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


@pytest.mark.machine
async def test_pykubelet_run_crashloop_example_reports_reason_and_last_log_lines(
    node: Node, examples: Path
) -> None:
    ran = await ask(node, "run", str(examples / "crashloop.yaml"))
    assert ran.code == 1
    assert "crashloop: CrashLoopBackOff" in ran.err
    assert "exit code 3" in ran.err
    assert "    no configuration: /etc/app.conf is missing" in ran.err
    ran = await ask(node, "logs", "crashloop", "--previous")
    assert (ran.out, ran.err) == (
        "looking for /etc/app.conf\n",
        "no configuration: /etc/app.conf is missing\n",
    )
    page = (await ask(node, "describe", "crashloop")).out
    assert re.search(r"Warning +BackOff", page)
    for _ in range(20):
        ran = await ask(node, "exec", "crashloop", "--", "true")
        if "it is waiting" in ran.err:
            break
        # It was tried again just then, which takes a moment.
        await asyncio.sleep(1)
    assert (ran.code, "it is waiting (CrashLoopBackOff)" in ran.err) == (1, True)


@pytest.mark.machine
async def test_pykubelet_run_job_example_retried_until_success(node: Node, examples: Path) -> None:
    ran = await ask(node, "run", str(examples / "job.yaml"))
    assert ran.code == 0, ran
    assert "job: succeeded" in ran.out
    assert re.search(r"^job-n1 +default +0/1 +Completed +1 ", (await ask(node, "ps")).out, re.MULTILINE)
    assert (await ask(node, "logs", "job")).out == "attempt 2\ndone\n"
    assert (await ask(node, "logs", "-p", "job")).out == "attempt 1\n"
    assert (await ask(node, "logs", "-f", "job")).out == "attempt 2\ndone\n"
    assert "the weather is bad" in (await ask(node, "describe", "job")).out


@pytest.mark.machine
async def test_pykubelet_run_init_example_progress_shown_and_exec_reads_result(
    node: Node, examples: Path
) -> None:
    # Each state lasts long enough to be seen even on a busy machine.
    text = (examples / "init.yaml").read_text()
    assert text.count("sleep 1;") == 2
    (examples / "init.yaml").write_text(text.replace("sleep 1;", "sleep 5;"))
    ran = await ask(node, "run", str(examples / "init.yaml"))
    assert ran.code == 0, ran
    words = re.findall(r"init: (Init:\S+)", ran.out)
    assert words == ["Init:0/2", "Init:1/2"]
    ran = await ask(node, "exec", "init", "--", "cat", "/work/page")
    assert (ran.code, ran.out) == (0, "HELLO, WORLD\n")
    ran = await ask(node, "exec", "-i", "init", "--", "sh", "-c", "cat; exit 5", stdin=b"piped")
    assert (ran.code, ran.out) == (5, "piped")


@pytest.mark.machine
async def test_pykubelet_logs_follow_sidecar_until_pod_removed(node: Node, examples: Path) -> None:
    assert (await ask(node, "run", str(examples / "sidecar.yaml"))).code == 0
    assert re.search(r"^sidecar-n1 +default +2/2 +Running", (await ask(node, "ps")).out, re.MULTILINE)
    async with started(node, "logs", "-f", "sidecar", "-c", "shipper") as process:
        assert process.stdout is not None
        assert b"still here" in await process.stdout.readline()
        (node.manifests / "sidecar.yaml").unlink()
        out, err = await process.communicate()
    assert b"goodbye" in out, "the sidecar outlives the main container"
    assert (process.returncode, err) == (0, b"")


@pytest.mark.machine
async def test_pykubelet_run_duplicate_pod_rejected_unless_replace(node: Node, examples: Path) -> None:
    assert (await ask(node, "run", "-d", str(examples / "init.yaml"))).code == 0
    document = yaml.safe_load((examples / "init.yaml").read_text())
    twin = examples / "twin.yaml"
    twin.write_text(yaml.safe_dump(document))
    ran = await ask(node, "run", "-d", str(twin))
    assert (ran.code, "is already in" in ran.err) == (1, True)
    assert (await ask(node, "run", "-d", "--replace", str(twin))).code == 0
    assert [path.name for path in node.manifests.iterdir()] == ["twin.yaml"]


@pytest.mark.machine
async def test_pykubelet_run_interrupted_or_timed_out_pod_stays(node: Node, examples: Path) -> None:
    document = yaml.safe_load((examples / "web.yaml").read_text())
    document["spec"]["containers"][0]["readinessProbe"] = {"exec": {"command": ["false"]}}
    (examples / "web.yaml").write_text(yaml.safe_dump(document))
    async with started(node, "run", str(examples / "web.yaml")) as process:
        assert process.stdout is not None
        while b"web: Running" not in (line := await process.stdout.readline()):
            assert line, "it ended"
        process.send_signal(signal.SIGINT)
        _, err = await process.communicate()
    assert (process.returncode, b"The pod stays with the node" in err) == (130, True)
    ran = await ask(node, "run", "--timeout", "1s", str(examples / "web.yaml"))
    assert ran.code == 1
    # A busy machine takes a little longer to find out.
    assert re.search(r"web: not ready after [1-9][0-9]*s", ran.err), ran
    assert re.search(r"^web-n1 +default +0/1 +Running", (await ask(node, "ps")).out, re.MULTILINE)


def _page(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=30) as answer:
        text: str = answer.read().decode()
        return text
