"""`pykubelet config reload` against a control socket."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from pykubelet.cli.node.config import reload, report_lines
from pykubelet.cli.options import NodeSelection
from pykubelet.config.live import FieldChange, ReloadReport
from pykubelet.server import manifests
from pykubelet.server.listeners import unix_server
from pykubelet.server.manifests import reload_routes
from pykubelet.server.pods import SOCKET_NAME
from pykubelet.standalone.instance import Instance
from tests.support.data_dir import short_dir

CHANGE = FieldChange("maxPods", "1", "2")
RESTART = FieldChange("port", "1", "2", "servers listen at the start")


def test_report_lines_applied_restart_and_other() -> None:
    assert report_lines(ReloadReport("success", [CHANGE], [RESTART], ["credential providers"])) == [
        "Applied:",
        "  maxPods: 1 -> 2",
        "  credential providers",
        "Requires a restart:",
        "  port: 1 -> 2 (servers listen at the start)",
    ]
    assert report_lines(ReloadReport("unchanged")) == ["Nothing has changed."]
    failed = report_lines(ReloadReport("failed", problems=["maxPods: bad"]))
    assert failed == ["The configuration is invalid, nothing has changed:", "  maxPods: bad"]


@asynccontextmanager
async def control_socket(data_dir: Path, handler: Callable[[str], ReloadReport]) -> AsyncIterator[None]:
    async def run(trigger: str) -> ReloadReport:
        return handler(trigger)

    root = Instance.at(data_dir).kubelet_root
    root.mkdir(parents=True)
    async with unix_server(root / SOCKET_NAME, reload_routes(run)):
        yield


@pytest.mark.parametrize(
    ("report", "code"),
    [
        (ReloadReport("success", [CHANGE], [RESTART]), 0),
        (ReloadReport("unchanged"), 0),
        (ReloadReport("failed", problems=["maxPods: \x1b[31mbad"]), 1),
    ],
)
async def test_reload_command_prints_report_of_node(
    capsys: pytest.CaptureFixture[str], report: ReloadReport, code: int
) -> None:
    triggers: list[str] = []

    def handler(trigger: str) -> ReloadReport:
        triggers.append(trigger)
        return report

    with short_dir() as path:
        async with control_socket(path, handler):
            assert await asyncio.to_thread(reload, NodeSelection(path)) == code
    shown = capsys.readouterr()
    assert triggers == ["control socket"]
    assert (shown.err if code else shown.out).splitlines()[0] == report_lines(report)[0]
    assert "\x1b" not in shown.err + shown.out


async def test_reload_command_no_node_and_slow_node_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manifests, "RELOAD_TIMEOUT_SECONDS", 0.05)

    async def hang(trigger: str) -> ReloadReport:
        await asyncio.Event().wait()
        raise AssertionError

    with short_dir() as path:
        assert await asyncio.to_thread(reload, NodeSelection(path)) == 1
        assert "no node runs" in capsys.readouterr().err
        root = Instance.at(path).kubelet_root
        root.mkdir(parents=True)
        async with unix_server(root / SOCKET_NAME, reload_routes(hang)):
            assert await asyncio.to_thread(reload, NodeSelection(path)) == 1
    assert "cannot be reloaded in time" in capsys.readouterr().err
