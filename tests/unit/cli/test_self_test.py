"""`pykubelet self-test` on a node whose pod does not run; the real one is in tests/machine/cli."""

import asyncio
import json
import os
import re
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from aiohttp import web

from pykubelet.api.meta import from_document, to_json
from pykubelet.api.pod import Pod
from pykubelet.api.pod_status import PodStatus
from pykubelet.cli.node import self_test
from pykubelet.cli.node.self_test import CHECKS, Check, manifest, remove_leftovers
from pykubelet.podconfig.static_pods import static_pods
from pykubelet.server.manifests import ManifestDirectory
from pykubelet.server.node_info import NodeInfo
from pykubelet.standalone.instance import Instance
from tests.support.cli_node import Terminal, answering, command, pykubelet
from tests.support.pod_view import ScriptedView

NEVER_PULLED = {
    "phase": "Pending",
    "containerStatuses": [
        {"name": "main", "state": {"waiting": {"reason": "ErrImageNeverPull", "message": "none \x1b[2J"}}}
    ],
}


class DirectoryView(ScriptedView):
    """A node that has the pods of its manifests, all with one status."""

    def __init__(self, directory: Path, status: dict[str, Any]) -> None:
        super().__init__()
        self.directory = directory
        self.status = from_document(PodStatus, status)

    def pods(self) -> list[Pod]:
        found: list[Pod] = []
        for path in self.directory.glob("[!.]*"):
            data = path.read_bytes()
            found += static_pods(data, source="file", origin=str(path), node_name="node1", now=time.time_ns())
        for pod in found:
            pod.status = self.status
        return found


@pytest.fixture
def instance(data_dir: Path) -> Instance:
    found = Instance.at(data_dir)
    found.manifests.mkdir(parents=True)
    return found


@asynccontextmanager
async def node(
    instance: Instance, status: dict[str, Any], static_pod_path: str | None = None
) -> AsyncIterator[None]:
    """Run a scripted node that accepts manifests."""
    info = NodeInfo(
        node_name="node1",
        root_dir=str(instance.kubelet_root),
        cert_dir="",
        static_pod_path=str(instance.manifests) if static_pod_path is None else static_pod_path,
        pod_logs_dir=str(instance.pod_logs),
        container_runtime_endpoint=instance.endpoint,
    )

    async def respond(_: web.Request) -> web.Response:
        return web.Response(body=to_json(info))

    directory = ManifestDirectory(instance.manifests, "node1", clock=time.time_ns)
    view = DirectoryView(instance.manifests, status)
    async with answering(instance, view, [web.get("/node", respond), *directory.routes()]):
        yield


def test_manifest_is_a_valid_static_pod_that_ends_by_itself() -> None:
    document = manifest("pykubelet-self-test-1", "i", "mark")
    (pod,) = static_pods(
        json.dumps(document).encode(), source="file", origin="x", node_name="n", now=time.time_ns()
    )
    assert pod.spec.restart_policy == "Never"
    assert pod.spec.containers[0].command[-1].endswith(f"sleep {self_test.LEFTOVER_SECONDS}")
    assert pod.spec.containers[0].image_pull_policy == "IfNotPresent"


def test_check_line_failure_has_remedy_and_no_control_characters() -> None:
    line = Check("logs", "failed", 1.5, "x\x1b[2J\ny").line()
    assert line.split("\n")[0] == "failed  logs        1.50s  x\\x1b[2J\\ny"
    assert self_test.REMEDIES["logs"] in line
    assert set(self_test.REMEDIES) == set(self_test.CHECKS)
    assert Check("exec", "skipped").line() == "skipped exec"


def test_remove_leftovers_only_old_manifests_of_self_tests(tmp_path: Path) -> None:
    for name in ("pykubelet-self-test-1.json", "pykubelet-self-test-2.json", "web.json"):
        (tmp_path / name).write_text("{}")
    now = time.time()
    for name in ("pykubelet-self-test-1.json", "web.json"):
        os.utime(tmp_path / name, (now, now - self_test.LEFTOVER_SECONDS - 1))
    remove_leftovers(tmp_path, now)
    assert {path.name for path in tmp_path.iterdir()} == {"pykubelet-self-test-2.json", "web.json"}


async def test_self_test_image_missing_reports_cause_and_remedy_and_removes_pod(instance: Instance) -> None:
    async with node(instance, NEVER_PULLED):
        ran = await pykubelet(instance, "self-test")
    assert (ran.code, ran.err) == (1, "")
    lines = ran.out.splitlines()
    assert re.match(
        r"failed +start +[0-9.]+s  ErrImageNeverPull; container main: Waiting: .*none \\x1b", lines[0]
    )
    assert "--image" in lines[1]
    assert [line.split()[:2] for line in lines[2:-1]] == [
        ["skipped", name] for name in ("network", "exec", "volume", "logs", "readiness")
    ]
    assert lines[-1].startswith("ok      removal")
    assert list(instance.manifests.iterdir()) == []


async def test_self_test_pod_never_starts_json_after_timeout(instance: Instance) -> None:
    async with node(instance, {"phase": "Pending"}):
        ran = await pykubelet(instance, "self-test", "--timeout", "500ms", "-o", "json")
    found = json.loads(ran.out)
    assert (ran.code, found["passed"], found["node"]) == (1, False, "node1")
    first = found["checks"][0]
    assert (first["name"], first["status"]) == ("start", "failed")
    assert first["message"].startswith("not running after 0.5s: Pending")
    assert [check["status"] for check in found["checks"][1:]] == ["skipped"] * 5 + ["ok"]
    assert list(instance.manifests.iterdir()) == []


async def test_self_test_yaml_and_names_are_those_of_json(instance: Instance) -> None:
    async with node(instance, NEVER_PULLED):
        as_yaml = await pykubelet(instance, "self-test", "-o", "yaml")
        names = await pykubelet(instance, "self-test", "-o", "name")
    found = yaml.safe_load(as_yaml.out)
    assert (as_yaml.code, as_yaml.err, found["passed"]) == (1, "", False)
    assert [check["name"] for check in found["checks"]] == list(CHECKS)
    assert (names.code, names.out.split()) == (1, list(CHECKS))


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
async def test_self_test_interrupted_removes_manifest(instance: Instance, number: int, code: int) -> None:
    if signal.getsignal(number) is signal.SIG_IGN:
        pytest.skip("the signal is ignored here (nohup), and so by the commands that are started")
    async with node(instance, {"phase": "Pending"}):
        terminal = Terminal(command(instance, "self-test"))
        async with asyncio.timeout(60):
            while not any(instance.manifests.glob("pykubelet-self-test-*")):
                await asyncio.sleep(0.02)
        terminal.signal(number)
        assert await terminal.end() == code
        assert list(instance.manifests.iterdir()) == []


async def test_self_test_node_without_manifests_or_stopped_is_one_line(instance: Instance) -> None:
    async with node(instance, {}, static_pod_path=""):
        ran = await pykubelet(instance, "self-test")
    assert ran.code == 1
    assert ran.err.count("\n") == 1
    assert "takes no manifests: set staticPodPath" in ran.err
    ran = await pykubelet(instance, "self-test")
    assert ran.code == 1
    assert "start it with `pykubelet up" in ran.err
    assert ran.err.count("\n") == 1
