"""Reloads of real configuration files, with consumers that record what they apply."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from pykubelet.agent import live_config
from pykubelet.agent.live_config import (
    Apply,
    ConfigReloader,
    Consumer,
    ReloadError,
    ReloadMetrics,
    ReloadTrigger,
)
from pykubelet.cli.node.config import report_lines
from pykubelet.config.flags.kubelet_flags import KubeletFlags
from pykubelet.config.last_good import FILE_NAME
from pykubelet.config.live import RELOADABLE, ReloadReport
from pykubelet.config.load import LoadedConfig, load
from pykubelet.config.types import KubeletConfiguration
from pykubelet.logs.logger import ROOT
from pykubelet.util.tasks import TaskScope
from tests.support.loop_stalls import watched_loop

HEAD = "apiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\n"


@pytest.fixture
def log_lines(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], list[str]]]:
    """Return the messages with their keys."""
    logger = logging.getLogger(ROOT)
    before, logger.propagate = logger.propagate, True
    caplog.set_level(logging.INFO, ROOT)

    def lines() -> list[str]:
        return [f"{record.message} {getattr(record, 'klog_keys', {})}" for record in caplog.records]

    yield lines
    logger.propagate = before


@dataclass
class Node:
    """A configuration file, its reloader, and what its consumers have applied."""

    path: Path
    flags: list[str] = field(default_factory=list)
    text: str = "maxPods: 10\n"
    applied: list[tuple[str, int]] = field(default_factory=list)
    prepared: list[str] = field(default_factory=list)
    events: list[tuple[str, str, str]] = field(default_factory=list)
    failing: str = ""
    registry: CollectorRegistry = field(default_factory=CollectorRegistry)
    loads: int = 0
    on_load: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        self.write(self.text)
        loaded = load([f"--config={self.path}", f"--root-dir={self.path.parent}", *self.flags])

        def load_config(argv: Sequence[str]) -> LoadedConfig:
            self.loads += 1
            self.on_load()
            return load(argv)

        self.trigger = ReloadTrigger()
        self.reloader = ConfigReloader(
            loaded,
            load(loaded.argv).config,
            record=lambda kind, reason, message: self.events.append((kind, reason, message)),
            metrics=ReloadMetrics(self.registry),
            load_config=load_config,
        )
        for name in ("allocatable", "eviction", "dns"):
            self.reloader.register(Consumer(name, self._prepare(name)))

    def _prepare(self, name: str) -> live_config.Prepare:
        async def prepare(config: KubeletConfiguration) -> Apply:
            await asyncio.sleep(0)
            self.prepared.append(name)
            if name == self.failing:
                raise ReloadError(f"{name}: impossible on this node")
            return lambda: self.applied.append((name, config.max_pods))

        return prepare

    def write(self, text: str) -> None:
        """Replace the file by a rename."""
        hidden = self.path.with_name(".new")
        hidden.write_text(HEAD + text)
        hidden.rename(self.path)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with TaskScope() as scope:
            scope.start(self.reloader.run(self.trigger), name="live-config")
            yield

    async def reload(self) -> ReloadReport:
        return await self.reloader.reload("test")

    async def until(self, condition: Callable[[], bool], seconds: float = 20) -> None:
        async with asyncio.timeout(seconds):
            while not condition():
                await asyncio.sleep(0.01)

    def count(self, result: str) -> float:
        return self.registry.get_sample_value("kubelet_config_reload_total", {"result": result}) or 0.0


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path / "config.yaml")


async def test_reload_changed_fields_applied_in_one_turn_by_their_consumers(
    node: Node, log_lines: Callable[[], list[str]]
) -> None:
    node.write("maxPods: 20\nevictionHard: {memory.available: 1Gi}\n")
    turns = 0

    async def count_turns() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    turn_of: list[int] = []
    for name in ("allocatable", "eviction"):

        async def prepare(config: KubeletConfiguration, name: str = name) -> Apply:
            await asyncio.sleep(0)
            return lambda: turn_of.append(turns)

        node.reloader.register(Consumer(name, prepare))
    async with node.running(), TaskScope() as scope:
        scope.start(count_turns(), name="turns")
        report = await node.reload()
    assert report.outcome == "success"
    assert [change.path for change in report.applied] == ["evictionHard", "maxPods"]
    assert node.applied == [("allocatable", 20), ("eviction", 20)], "dns has no changed field"
    assert (len(turn_of), len(set(turn_of))) == (2, 1)
    assert node.reloader.config.max_pods == 20
    assert node.reloader.configz()["kubeletconfig"]["maxPods"] == 20
    assert node.events[-1] == (
        "Normal",
        "ConfigurationReloaded",
        "Configuration reloaded: applied evictionHard, maxPods",
    )
    assert any(
        "Configuration field changed {'field': 'maxPods', 'before': '10'" in line for line in log_lines()
    )
    assert node.count("success") == 1
    last = node.registry.get_sample_value("kubelet_config_last_reload_success_timestamp_seconds")
    assert (last or 0) > 1e9


@pytest.mark.parametrize(
    "text",
    [
        "maxPods: many\n",
        "maxPods: [\n",
        "noSuchField: 1\n",
        "maxPods: -1\n",
        "\x00",
        "port: 1\nmaxPods: 99999999999\n",
    ],
)
async def test_reload_invalid_file_changes_nothing(node: Node, text: str) -> None:
    node.write(text)
    async with node.running():
        report = await node.reload()
        assert (report.outcome, bool(report.problems)) == ("failed", True)
        again = await node.reload()
    assert again.problems == report.problems
    assert (node.applied, node.prepared, node.reloader.config.max_pods) == ([], [], 10)
    assert [reason for _, reason, _ in node.events] == ["ConfigurationReloadFailed"], "once per problem"
    assert node.count("failed") == 2


async def test_reload_many_problems_bounded(node: Node, log_lines: Callable[[], list[str]]) -> None:
    node.write("".join(f"unknown{number}: 1\n" for number in range(5000)))
    async with node.running():
        report = await node.reload()
    assert len(report.problems) == live_config.MAX_PROBLEMS + 1
    assert report.problems[-1] == f"and {5000 - live_config.MAX_PROBLEMS} more problems"
    assert len(node.events[0][2]) <= live_config.MAX_EVENT_CHARACTERS
    assert sum(map(len, log_lines())) < 10_000


async def test_reload_missing_file_changes_nothing_and_recovers(node: Node) -> None:
    node.path.unlink()
    async with node.running():
        assert (await node.reload()).outcome == "failed"
        node.write("maxPods: 30\n")
        assert (await node.reload()).outcome == "success"
    assert node.applied == [("allocatable", 30)]


async def test_reload_one_prepare_fails_nothing_applied(node: Node) -> None:
    node.failing = "eviction"
    node.write("maxPods: 20\nevictionHard: {memory.available: 1Gi}\nclusterDNS: [10.0.0.10]\n")
    async with node.running():
        report = await node.reload()
        assert report.problems == ["eviction: impossible on this node"]
        assert (node.applied, node.reloader.config.max_pods) == ([], 10)
        node.failing = ""
        assert (await node.reload()).outcome == "success"
    assert {name for name, _ in node.applied} == {"allocatable", "eviction", "dns"}


async def test_reload_prepare_raises_unexpectedly_nothing_applied_and_reloads_go_on(node: Node) -> None:
    async def broken(config: KubeletConfiguration) -> Apply:
        raise ZeroDivisionError

    node.reloader.register(Consumer("sysctls", broken))
    node.write("maxPods: 20\nallowedUnsafeSysctls: [net.core.somaxconn]\n")
    async with node.running():
        assert (await node.reload()).outcome == "failed"
        assert node.applied == []
        node.write("maxPods: 21\n")
        assert (await node.reload()).outcome == "success"


async def test_reload_prepare_hangs_fails_in_time(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    async def hang(config: KubeletConfiguration) -> Apply:
        await asyncio.Event().wait()
        raise AssertionError

    monkeypatch.setattr(live_config, "PREPARE_TIMEOUT_SECONDS", 0.05)
    node.reloader.register(Consumer("sysctls", hang))
    node.write("maxPods: 20\nallowedUnsafeSysctls: [net.core.somaxconn]\n")
    async with node.running():
        report = await node.reload()
    assert "sysctls cannot be prepared" in report.problems[0]
    assert node.applied == []


async def test_reload_restart_field_reported_until_reverted(
    node: Node, log_lines: Callable[[], list[str]]
) -> None:
    gauge = "kubelet_config_restart_required_fields"
    node.write("maxPods: 20\nport: 10251\n")
    async with node.running():
        report = await node.reload()
        assert [change.path for change in report.restart_required] == ["port"]
        assert report.restart_required[0].restart_reason
        assert node.reloader.config.port == 10250
        assert node.events[-1][2].endswith("applied maxPods; requires a restart: port")
        assert node.registry.get_sample_value(gauge) == 1
        again = await node.reload()
        assert (again.outcome, [change.path for change in again.restart_required]) == ("unchanged", ["port"])
        assert len([line for line in log_lines() if "requires a restart" in line]) == 1
        node.write("maxPods: 20\n")
        assert (await node.reload()).restart_required == []
        assert node.registry.get_sample_value(gauge) == 0


async def test_reload_field_without_consumer_reported_as_not_used(
    node: Node, log_lines: Callable[[], list[str]]
) -> None:
    async with node.running():
        node.write("maxPods: 11\neventBurst: 7\n")
        report = await node.reload()
        assert [change.path for change in report.applied] == ["maxPods"]
        assert [change.path for change in report.unused] == ["eventBurst"]
        assert node.reloader.config.event_burst == 7
        assert any("not used by this node" in line and "eventBurst" in line for line in log_lines())
        assert "not used by this node: eventBurst" in node.events[-1][2]
        assert report_lines(report)[-2:] == ["Not used by this node:", "  eventBurst: 100 -> 7"]
        assert (await node.reload()).outcome == "unchanged"
        node.write("maxPods: 11\n")
        report = await node.reload()
        assert (report.outcome, report.applied, len(report.unused)) == ("success", [], 1)
        assert report_lines(report)[0] == "Not used by this node:"


async def test_reload_new_values_invalid_with_running_ones_rejected(tmp_path: Path) -> None:
    """Verify that a valid file is rejected if the part that can change now is invalid without the rest."""
    node = Node(tmp_path / "config.yaml", text="logging: {format: json}\nmaxPods: 10\n")
    node.write("maxPods: 20\nlogging: {format: text, vmodule: [{filePattern: loop, verbosity: 5}]}\n")
    async with node.running():
        report = await node.reload()
        assert report.outcome == "failed"
        assert "logging.vmodule" in report.problems[0]
        assert "after a restart" in report.problems[0]
        assert (node.applied, node.reloader.config.logging.vmodule) == ([], [])
        node.write("maxPods: 20\nlogging: {format: text}\n")
        assert [change.path for change in (await node.reload()).restart_required] == ["logging.format"]
    assert node.applied == [("allocatable", 20)]


async def test_reload_secret_value_in_no_output(node: Node, log_lines: Callable[[], list[str]]) -> None:
    node.write("staticPodURL: http://u:hidden1@host/\nstaticPodURLHeader: {X-Key: [hidden2]}\nmaxPods: 20\n")
    async with node.running():
        report = await node.reload()
    shown = [*log_lines(), *(str(change) for change in report.restart_required), str(node.events)]
    assert len(report.restart_required) == 2
    assert "hidden" not in " ".join(shown)


async def test_reload_runtime_cgroup_driver_is_no_difference(tmp_path: Path) -> None:
    """Verify that what the start changed in the configuration is not compared with the file."""
    path = tmp_path / "config.yaml"
    path.write_text(HEAD)
    loaded = load([f"--config={path}"])
    as_loaded = load([f"--config={path}"]).config
    loaded.config.cgroup_driver = "systemd"
    reloader = ConfigReloader(loaded, as_loaded)
    async with TaskScope() as scope:
        scope.start(reloader.run(ReloadTrigger()), name="live-config")
        report = await reloader.reload("test")
        path.write_text(HEAD + "maxPods: 7\n")
        await reloader.reload("test")
    assert (report.outcome, report.restart_required) == ("unchanged", [])
    assert (reloader.config.cgroup_driver, reloader.config.max_pods) == ("systemd", 7)


async def test_reload_flag_overrides_file_as_at_start(tmp_path: Path) -> None:
    node = Node(tmp_path / "config.yaml", flags=["--max-pods=5"])
    node.write("maxPods: 20\nclusterDomain: a.local\n")
    async with node.running():
        report = await node.reload()
    assert [change.path for change in report.applied] == ["clusterDomain"]
    assert node.reloader.config.max_pods == 5


async def test_reload_extra_consumer_prepared_each_time_and_reported(node: Node) -> None:
    changes: list[Apply | None] = [None, lambda: node.applied.append(("providers", 0))]

    async def prepare(config: KubeletConfiguration) -> Apply | None:
        return changes.pop(0)

    node.reloader.register(Consumer("credentialProviders", prepare, extra="credential providers"))
    async with node.running():
        assert (await node.reload()).outcome == "unchanged"
        report = await node.reload()
    assert (report.outcome, report.other) == ("success", ["credential providers"])
    assert node.applied == [("providers", 0)]


async def test_reload_file_changes_while_read_is_read_again(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_config, "RETRY_SECONDS", 0.01)
    texts = iter(["maxPods: 21\n", "maxPods: 22\n"])
    node.on_load = lambda: node.write(next(texts, "maxPods: 22\n"))
    async with node.running():
        report = await node.reload()
        assert "change while they are read" in report.problems[0]
        assert node.loads == live_config.LOAD_TRIES
        node.on_load = lambda: None
        await node.reload()
    assert node.reloader.config.max_pods == 22


async def test_run_signal_requests_before_start_and_in_progress_joined(node: Node) -> None:
    node.write("maxPods: 20\n")
    for _ in range(1000):
        node.trigger.request()
    async with node.running():
        await node.until(lambda: node.applied == [("allocatable", 20)])
        for _ in range(1000):
            node.trigger.request()
        await node.until(lambda: node.count("unchanged") == 1)
    assert node.loads == 2


async def test_run_stores_last_good_after_start_and_successful_reload_only(tmp_path: Path) -> None:
    node = Node(tmp_path / "config.yaml", flags=["--use-last-good-config"])
    stored = tmp_path / FILE_NAME
    async with node.running():
        await node.until(lambda: stored.exists() and "maxPods: 10\n" in stored.read_text())
        node.write("maxPods: 20\n")
        await node.reload()
        assert "maxPods: 20\n" in stored.read_text()
        node.write("maxPods: many\n")
        await node.reload()
        assert "maxPods: 20\n" in stored.read_text()


async def test_run_started_from_last_good_records_event_and_keeps_stored(tmp_path: Path) -> None:
    node = Node(tmp_path / "config.yaml", flags=["--use-last-good-config"])
    loaded = replace(load(node.reloader._loaded.argv), fallback="the files are invalid", files=None)
    reloader = ConfigReloader(loaded, loaded.config, record=lambda *event: node.events.append(event))
    async with TaskScope() as scope:
        scope.start(reloader.run(ReloadTrigger()), name="live-config")
        await node.until(lambda: bool(node.events))
    assert node.events == [("Warning", "ConfigurationReloadFailed", "the files are invalid")]
    assert not (tmp_path / FILE_NAME).exists()


# Changes of the files


@pytest.fixture
def fast_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_config, "DEBOUNCE_SECONDS", 0.1)
    monkeypatch.setattr(live_config, "MIN_INTERVAL_SECONDS", 0.5)


@pytest.fixture
def watched(tmp_path: Path, fast_watch: None) -> Node:
    return Node(tmp_path / "config.yaml", flags=["--watch-config", f"--config-dir={tmp_path / 'drop'}"])


@pytest.fixture(autouse=True)
def drop_in_dir(tmp_path: Path) -> Path:
    path = tmp_path / "drop"
    path.mkdir()
    return path


async def test_watch_replaced_file_and_drop_in_applied(watched: Node, drop_in_dir: Path) -> None:
    async with watched.running():
        await watched.until(lambda: watched.loads == 1)
        watched.write("maxPods: 20\n")
        await watched.until(lambda: watched.applied == [("allocatable", 20)])
        (drop_in_dir / "10.conf").write_text(HEAD + "maxPods: 30\n")
        await watched.until(lambda: watched.applied[-1] == ("allocatable", 30))
        (drop_in_dir / "10.conf").unlink()
        await watched.until(lambda: watched.applied[-1] == ("allocatable", 20))


async def test_watch_config_map_style_symlink_applied(tmp_path: Path, watched: Node) -> None:
    """Verify that a swapped directory behind symbolic links is noticed, as a mounted ConfigMap is updated."""
    for version, pods in (("v1", 40), ("v2", 50)):
        (tmp_path / version).mkdir()
        (tmp_path / version / "config.yaml").write_text(HEAD + f"maxPods: {pods}\n")
    (tmp_path / "..data").symlink_to("v1")
    (tmp_path / "link").symlink_to("..data/config.yaml")
    (tmp_path / "link").rename(watched.path)
    async with watched.running():
        await watched.until(lambda: watched.applied == [("allocatable", 40)])
        (tmp_path / "..new").symlink_to("v2")
        (tmp_path / "..new").rename(tmp_path / "..data")
        await watched.until(lambda: watched.applied[-1] == ("allocatable", 50))


async def test_watch_ten_replacements_per_second_bounded_and_last_one_applied(watched: Node) -> None:
    loop = asyncio.get_running_loop()
    async with watched.running():
        await watched.until(lambda: watched.loads == 1)
        began = loop.time()
        async with watched_loop() as stalls:
            for number in range(30):
                watched.write(f"maxPods: {100 + number}\n" if number % 3 else "maxPods: many\n")
                await asyncio.sleep(0.1)
            watched.write("maxPods: 77\n")
            await watched.until(lambda: watched.reloader.config.max_pods == 77)
        elapsed = loop.time() - began
    assert watched.loads <= 2 + live_config.LOAD_TRIES * (elapsed / live_config.MIN_INTERVAL_SECONDS + 1)
    assert watched.count("success") + watched.count("failed") <= 2 + elapsed / 0.5
    assert stalls.longest_cpu < 0.05


@pytest.mark.parametrize("during_reload", [False, True])
async def test_watch_half_written_file_not_applied_until_closed(watched: Node, during_reload: bool) -> None:
    """Verify that a file whose beginning is valid is not applied while it is being written."""
    async with watched.running():
        await watched.until(lambda: watched.loads == 1 if during_reload else watched.count("unchanged") == 1)
        with watched.path.open("w") as file:
            for part in (HEAD, "maxPods: 1\n", "clusterDomain: half.local\n"):
                file.write(part)
                file.flush()
                # Longer than the debounce; each part alone is a valid configuration.
                await asyncio.sleep(0.4)
            assert watched.applied == []
            file.write("evictionHard: {memory.available: 1Gi}\n")
        await watched.until(lambda: watched.reloader.config.cluster_domain == "half.local")
    assert watched.applied == [("allocatable", 1), ("eviction", 1), ("dns", 1)], "in one reload"


async def test_watch_without_flag_changes_nothing(node: Node) -> None:
    async with node.running():
        node.write("maxPods: 20\n")
        with contextlib.suppress(TimeoutError):
            await node.until(lambda: node.loads > 0, seconds=1)
    assert (node.loads, node.applied) == (0, [])


async def test_watch_host_error_is_retried(watched: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    real, failures = live_config.fingerprint, 3

    def fail_first(flags: KubeletFlags) -> live_config.Fingerprint:
        nonlocal failures
        if failures:
            failures -= 1
            raise OSError(5, "Input/output error")
        return real(flags)

    monkeypatch.setattr(live_config, "POLL_SECONDS", 0.05)
    monkeypatch.setattr(live_config, "fingerprint", fail_first)
    async with watched.running():
        watched.write("maxPods: 20\n")
        await watched.until(lambda: watched.applied == [("allocatable", 20)])


async def test_watch_invalid_then_valid_file_recovers(watched: Node) -> None:
    async with watched.running():
        await watched.until(lambda: watched.loads == 1)
        watched.write("maxPods: [\n")
        await watched.until(lambda: watched.count("failed") == 1)
        watched.write("maxPods: 20\n")
        await watched.until(lambda: watched.applied == [("allocatable", 20)])
    assert [reason for _, reason, _ in watched.events] == [
        "ConfigurationReloadFailed",
        "ConfigurationReloaded",
    ]


def test_consumer_fields_are_those_of_the_table() -> None:
    async def prepare(config: KubeletConfiguration) -> Apply:
        raise AssertionError

    assert Consumer("tls", prepare).fields == {path for path in RELOADABLE if path.startswith("tls")}
    assert Consumer("credentialProviders", prepare).fields == frozenset()
