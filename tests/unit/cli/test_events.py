"""`pykubelet events` with a real log of events behind a control socket."""

import json
import signal
from pathlib import Path

import pytest

from pykubelet.podconfig.event_log import EventLog
from pykubelet.podconfig.pod_history import Event
from pykubelet.server.node_routes import event_routes
from pykubelet.standalone.instance import Instance
from tests.support.cli_node import Terminal, answering, command, pykubelet
from tests.support.pod_view import ScriptedView, pod_of

WEB, DNS = pod_of("web", "uid-web"), pod_of("dns", "uid-dns", namespace="kube-system")


@pytest.fixture
def instance(data_dir: Path) -> Instance:
    (data_dir / "kubelet").mkdir(parents=True)
    return Instance.at(data_dir)


@pytest.fixture
def log() -> EventLog:
    found = EventLog(lambda: 1_700_000_000.0)
    found.node_event("Normal", "Starting", "node starts")
    now = 4_000_000_000.0
    found.pod_event(
        WEB, Event("Normal", "Pulled", "an\x1b[31mimage\n2", "spec.containers{main}", 1.0, now, 3)
    )
    found.pod_event(DNS, Event("Warning", "BackOff", "failed", "", now, now))
    return found


@pytest.mark.parametrize(
    ("arguments", "reasons"),
    [
        ((), ["Starting", "Pulled", "BackOff"]),
        (("web",), ["Pulled"]),
        (("kube-system/dns-node1",), ["BackOff"]),
        (("default/dns-node1",), None),
        (("--warnings",), ["BackOff"]),
        (("--node",), ["Starting"]),
        (("--since", "1h"), ["Pulled", "BackOff"]),
    ],
)
async def test_pykubelet_events_selects_events(
    instance: Instance, log: EventLog, arguments: tuple[str, ...], reasons: list[str] | None
) -> None:
    async with answering(instance, ScriptedView(listed=[WEB, DNS]), event_routes(log)):
        ran = await pykubelet(instance, "events", "-o", "json", *arguments)
    if reasons is None:
        assert (ran.code, ran.out) == (1, "")
        assert "there is no pod" in ran.err
    else:
        assert [event["reason"] for event in json.loads(ran.out)["events"]] == reasons


async def test_pykubelet_events_of_removed_pod_still_shown(instance: Instance, log: EventLog) -> None:
    async with answering(instance, ScriptedView(), event_routes(log)):
        ran = await pykubelet(instance, "events", "web-node1", "-o", "wide")
    heading, line = ran.out.splitlines()
    assert heading.split()[:3] == ["FIRST", "SEEN", "LAST"]
    assert "pod/default/web-node1" in line
    assert "\x1b" not in ran.out


async def test_pykubelet_events_wrong_options_exit_2(instance: Instance) -> None:
    for arguments in (("--node", "web"), ("-f", "-o", "yaml"), ("--since", "soon"), ("-o", "xml")):
        ran = await pykubelet(instance, "events", *arguments)
        assert (ran.code, ran.out) == (2, ""), arguments


async def test_pykubelet_events_without_kubelet_or_of_older_version_one_line(instance: Instance) -> None:
    ran = await pykubelet(instance, "events")
    assert (ran.code, ran.err.count("\n")) == (1, 1)
    async with answering(instance, ScriptedView()):
        ran = await pykubelet(instance, "events")
    assert (ran.code, ran.err.count("\n")) == (1, 1)
    assert "older version" in ran.err


async def test_pykubelet_events_follow_pod_continues_after_changed_manifest(
    instance: Instance, log: EventLog
) -> None:
    """Verify that the events of the new pod are shown, which has another uid."""
    async with answering(instance, ScriptedView(listed=[DNS]), event_routes(log)):
        for name in ("pod/kube-system/dns-node1", "dns"):
            terminal = Terminal(command(instance, "events", "-f", name))
            await terminal.until("BackOff")
            changed = pod_of("dns", f"uid-of-changed-{name}", namespace="kube-system")
            log.pod_event(WEB, Event("Normal", "Killing", "of another pod", "", 1.0, 2.0))
            log.pod_event(changed, Event("Normal", "Scheduled", f"changed {name}", "", 1.0, 2.0))
            await terminal.until(f"changed {name}")
            terminal.signal(signal.SIGINT)
            assert await terminal.end() == 130
            assert b"of another pod" not in terminal.said


async def test_pykubelet_events_follow_prints_new_events_until_ctrl_c(
    instance: Instance, log: EventLog
) -> None:
    async with answering(instance, ScriptedView(), event_routes(log)):
        terminal = Terminal(command(instance, "events", "-f"))
        await terminal.until("BackOff")
        log.pod_event(WEB, Event("Warning", "Unhealthy", "probe \x9b31m failed", "", 1.0, 2.0))
        await terminal.until("probe \\x9b31m failed")
        terminal.signal(signal.SIGINT)
        assert await terminal.end() == 130
    assert b"Traceback" not in terminal.said
