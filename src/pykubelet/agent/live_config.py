"""Live configuration: applies a changed configuration to the running kubelet.

A reload is requested by SIGHUP, by `pykubelet config reload` over the control socket, or, with
`--watch-config`, by a change of the configuration files. Reloads run one after the other:

1. The command line and its files are loaded and validated as a whole, in a thread, as at the start.
2. The difference to the running configuration is split into fields that can change now and fields that
   require a restart (`config/live.py`). The running configuration with the new values of the former is
   validated, too: it may be invalid although the new one as a whole is valid.
3. Each consumer of a changed field prepares: it checks what validation cannot (certificates, capacity,
   OpenSSL) and returns a function that applies the change. Nothing has changed so far, and a failure ends the
   reload.
4. All these functions are called in one turn of the event loop. They only assign, and do not fail.

The outcome is logged field by field with secrets masked, counted, and an event about the node. After a
failure the kubelet goes on with the last valid configuration; the same failure again is only counted. The
work is bounded: a change of the files is considered after `DEBOUNCE_SECONDS`, at most every
`MIN_INTERVAL_SECONDS`, and not while a file is being written; one that changes while it is
loaded is not used.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from prometheus_client import CollectorRegistry, Counter, Gauge

from pykubelet.cm.cgroups.node_cgroups import Record, no_record
from pykubelet.config.errors import ConfigError
from pykubelet.config.flags.kubelet_flags import KubeletFlags
from pykubelet.config.last_good import save_last_good
from pykubelet.config.live import (
    FieldChange,
    ReloadReport,
    consumer_fields,
    differences,
    with_fields,
)
from pykubelet.config.load import LoadedConfig, find_drop_ins, load
from pykubelet.config.types import KubeletConfiguration
from pykubelet.config.validation.validate import validate
from pykubelet.logs import get_logger
from pykubelet.podconfig.file_source import PathWatch, directories_to_watch, links
from pykubelet.server.debug import configz_document
from pykubelet.util.backoff import ErrorLogLimiter
from pykubelet.util.tasks import TaskScope, finish_in_thread, in_own_thread, wait_seconds

log = get_logger(__name__)
RELOADED, RELOAD_FAILED = "ConfigurationReloaded", "ConfigurationReloadFailed"
DEBOUNCE_SECONDS = 0.5
"""Seconds after a change of a file until it is considered, in which further changes are joined."""
MIN_INTERVAL_SECONDS = 2.0
"""Minimum seconds between the starts of two reloads that changes of files cause."""
POLL_SECONDS = 10.0
"""Seconds between two checks of the files for changes that inotify does not report, such as on a network."""
SETTLE_SECONDS = 10.0
"""Seconds after which a file that is still being written is loaded nevertheless."""
LOAD_TIMEOUT_SECONDS = 30.0
PREPARE_TIMEOUT_SECONDS = 30.0
LOAD_TRIES = 3
"""Maximum number of loads of files that change while they are loaded, on a request."""
RETRY_SECONDS = 0.5
"""Seconds between these loads."""
FILE = "file"
"""Trigger of a reload after a change of the files."""
MAX_DIRECTORIES = 100
"""Maximum number of directories that are watched; changes in others are found by polling."""
MAX_PROBLEMS = 20
"""Maximum number of problems of one reload that are logged and returned."""
MAX_EVENT_CHARACTERS = 900
Apply = Callable[[], None]
"""Applies a prepared change: only assigns, does not block and does not fail."""
Prepare = Callable[[KubeletConfiguration], Awaitable[Apply | None]]
"""Prepares a change to the configuration that will be in effect, without changing anything.

Returns None if nothing would change. Raises ReloadError.
"""
Fingerprint = tuple[tuple[Any, ...], ...]


class ReloadError(Exception):
    """Raised when a valid configuration cannot be applied; one line with field, cause and remedy."""


class FilesChangedError(ReloadError):
    """Raised when the configuration files change while they are read."""


@dataclass(frozen=True, slots=True)
class Consumer:
    """A part of the kubelet that applies reloadable fields, by its name in `config.live.RELOADABLE`."""

    name: str
    prepare: Prepare
    extra: str = ""
    """What it applies in addition to fields, such as a file named by a flag; then each reload prepares it."""

    @property
    def fields(self) -> frozenset[str]:
        """JSON paths of the fields that it applies."""
        return consumer_fields(self.name)


class ReloadMetrics:
    """Metrics of configuration reloads; without a registry they are not exposed."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self._reloads = Counter(
            "kubelet_config_reload_total", "Configuration reloads by result.", ["result"], registry=registry
        )
        for outcome in ("success", "unchanged", "failed"):
            self._reloads.labels(outcome)
        self._last_success = Gauge(
            "kubelet_config_last_reload_success_timestamp_seconds",
            "Time of the last successful load of the configuration, in seconds since the epoch.",
            registry=registry,
        )
        self._restart = Gauge(
            "kubelet_config_restart_required_fields",
            "Fields in which the configuration files differ from the kubelet until its next restart.",
            registry=registry,
        )

    def started(self) -> None:
        """Record a start with the configuration of the files."""
        self._last_success.set(time.time())

    def finished(self, report: ReloadReport) -> None:
        """Record the outcome of a reload."""
        self._reloads.labels(report.outcome).inc()
        if report.outcome != "failed":
            self._last_success.set(time.time())
            self._restart.set(len(report.restart_required))


class ReloadTrigger:
    """Requests for a reload from outside of the event loop's tasks, such as a signal; requests are joined."""

    def __init__(self) -> None:
        self._requested = asyncio.Event()

    def request(self) -> None:
        """Request a reload; one that is requested before the kubelet has started follows the start."""
        self._requested.set()

    async def wait(self) -> None:
        """Wait for a request, and consume it."""
        await self._requested.wait()
        self._requested.clear()


@dataclass(frozen=True, slots=True)
class _Plan:
    """A loaded configuration and what it would change."""

    loaded: LoadedConfig
    applied: list[FieldChange]
    restart: list[FieldChange]
    effective: KubeletConfiguration
    problems: list[str]


class ConfigReloader:
    """Owner of the configuration in effect."""

    def __init__(
        self,
        loaded: LoadedConfig,
        as_loaded: KubeletConfiguration,
        *,
        record: Record = no_record,
        metrics: ReloadMetrics | None = None,
        load_config: Callable[[Sequence[str]], LoadedConfig] = load,
    ) -> None:
        """Initialize; `loaded` is in effect, `as_loaded` is its configuration before the start changed it.

        `record` records events about the node.
        """
        self._loaded = loaded
        self._compared = as_loaded
        """The configuration as loaded, with the fields applied since: the next one is compared with it."""
        self._effective = loaded.config
        self._record = record
        self._metrics = metrics or ReloadMetrics()
        self._load_config = load_config
        self._consumers: list[Consumer] = []
        self._lock = asyncio.Lock()
        self._started = asyncio.Event()
        self._reported_restart: frozenset[tuple[str, str]] = frozenset()
        self._last_problems: list[str] = []

    @property
    def config(self) -> KubeletConfiguration:
        """The configuration in effect."""
        return self._effective

    def configz(self) -> Mapping[str, Any]:
        """Return the document of `/configz`."""
        return configz_document(self._effective)

    def register(self, *consumers: Consumer) -> None:
        """Add consumers; all are registered before `run`."""
        self._consumers += consumers

    async def run(self, trigger: ReloadTrigger) -> NoReturn:
        """Handle requests, and with `--watch-config` changes of the files, until cancelled."""
        if self._loaded.fallback:
            self._record("Warning", RELOAD_FAILED, self._loaded.fallback[:MAX_EVENT_CHARACTERS])
        else:
            self._metrics.started()
            await self._save(self._loaded)
        self._started.set()
        flags = self._loaded.flags
        async with TaskScope() as scope:
            if flags.watch_config and (flags.config or flags.config_dir):
                scope.start(self._watch(flags), name="config-watch")
            while True:
                await trigger.wait()
                await self.reload("SIGHUP")

    async def reload(self, trigger: str) -> ReloadReport:
        """Load the configuration and apply what can change now; `trigger` is for the log. Raises nothing."""
        await self._started.wait()
        async with self._lock:
            log.v(2).info("Reloading configuration", trigger=trigger)
            try:
                report = await self._reload(trigger)
            except ConfigError as err:
                report = self._failed(trigger, [str(problem) for problem in err.problems])
            except FilesChangedError as err:
                if trigger == FILE:
                    # The watch continues with the files as they are now.
                    log.v(2).info("Configuration files changed while they were read")
                    return ReloadReport("unchanged")
                report = self._failed(trigger, [str(err)])
            except ReloadError as err:
                report = self._failed(trigger, [str(err)])
            except Exception as err:  # a bug must not end the kubelet: nothing has been applied
                log.exception(err, "Unexpected error while reloading the configuration")
                report = self._failed(trigger, [f"unexpected error: {err!r}"])
            self._metrics.finished(report)
            return report

    async def _reload(self, trigger: str) -> ReloadReport:
        # A watched file may be in the middle of being written: the watch waits for its end.
        plan = await self._plan(tries=1 if trigger == FILE else LOAD_TRIES)
        if plan.problems:
            return self._failed(trigger, plan.problems)
        changed = {change.path for change in plan.applied}
        used = frozenset().union(*(consumer.fields for consumer in self._consumers))
        affected = [consumer for consumer in self._consumers if consumer.extra or consumer.fields & changed]
        prepared = await self._prepare(affected, plan.effective)
        # From here to the end of `_apply` there is no await: the change is one turn of the event loop.
        self._apply(plan, [apply for _, apply in prepared])
        other = [consumer.extra for consumer, _ in prepared if consumer.extra]
        report = self._succeeded(trigger, plan, used, other)
        await self._save(plan.loaded)
        return report

    async def _plan(self, tries: int) -> _Plan:
        work = partial(_make_plan, self._load_config, self._loaded, self._compared, self._effective, tries)
        try:
            async with asyncio.timeout(LOAD_TIMEOUT_SECONDS):
                return await in_own_thread(work, name="config-load", cancel_timeout=0.0)
        except TimeoutError:
            raise ReloadError(
                f"the configuration files cannot be read within {LOAD_TIMEOUT_SECONDS:g} s: "
                "check their file system"
            ) from None

    async def _prepare(
        self, consumers: Iterable[Consumer], config: KubeletConfiguration
    ) -> list[tuple[Consumer, Apply]]:
        prepared, current = [], ""
        try:
            async with asyncio.timeout(PREPARE_TIMEOUT_SECONDS):
                for consumer in consumers:
                    current = consumer.name
                    apply = await consumer.prepare(config)
                    if apply is not None:
                        prepared.append((consumer, apply))
        except TimeoutError:
            raise ReloadError(
                f"{current} cannot be prepared within {PREPARE_TIMEOUT_SECONDS:g} s: "
                "check the files that its fields name"
            ) from None
        return prepared

    def _apply(self, plan: _Plan, prepared: Iterable[Apply]) -> None:
        for apply in prepared:
            try:
                apply()
            except (
                Exception
            ) as err:  # a bug in one consumer must not leave the others with the previous values
                log.exception(err, "Unexpected error while applying the configuration")
        self._compared = with_fields(
            self._compared, plan.loaded.config, (change.path for change in plan.applied)
        )
        self._effective = plan.effective

    def _succeeded(self, trigger: str, plan: _Plan, used: frozenset[str], other: list[str]) -> ReloadReport:
        self._last_problems = []
        applied = [change for change in plan.applied if change.path in used]
        unused = [change for change in plan.applied if change.path not in used]
        pending = frozenset((change.path, change.after) for change in plan.restart)
        new = [change for change in plan.restart if (change.path, change.after) not in self._reported_restart]
        self._reported_restart = pending
        for change in plan.applied:
            log.info(
                "Configuration field changed"
                if change.path in used
                else "Configuration field changed, not used by this node",
                field=change.path,
                before=change.before,
                after=change.after,
            )
        for change in new:
            log.warning(
                "Configuration field changed, requires a restart",
                field=change.path,
                before=change.before,
                after=change.after,
                reason=change.restart_reason,
            )
        for name in other:
            log.info("Configuration changed", part=name)
        if not (plan.applied or new or other):
            quiet = log.v(2) if trigger == FILE else log
            quiet.info("Configuration has not changed", trigger=trigger, restartRequired=len(pending))
            return ReloadReport("unchanged", restart_required=plan.restart)
        log.info(
            "Configuration reloaded",
            trigger=trigger,
            applied=len(applied) + len(other),
            restartRequired=len(pending),
            unused=len(unused),
        )
        report = ReloadReport("success", applied, plan.restart, other, unused=unused)
        self._record("Normal", RELOADED, _event_text(report))
        return report

    def _failed(self, trigger: str, problems: list[str]) -> ReloadReport:
        if len(problems) > MAX_PROBLEMS:
            problems = [*problems[:MAX_PROBLEMS], f"and {len(problems) - MAX_PROBLEMS} more problems"]
        repeated = problems == self._last_problems
        self._last_problems = problems
        if not repeated or trigger != FILE:
            log.error(
                "; ".join(problems),
                "Failed to reload configuration, keeping the current one",
                trigger=trigger,
            )
        if not repeated:
            text = f"Failed to reload configuration, keeping the current one: {'; '.join(problems)}"
            self._record("Warning", RELOAD_FAILED, text[:MAX_EVENT_CHARACTERS])
        return ReloadReport("failed", problems=problems)

    async def _save(self, loaded: LoadedConfig) -> None:
        try:
            await finish_in_thread(partial(save_last_good, loaded))
        except OSError as err:
            log.error(err, "Failed to store the last valid configuration", path=loaded.flags.root_dir)

    # Changes of the files

    async def _watch(self, flags: KubeletFlags) -> NoReturn:
        clock = asyncio.get_running_loop().time
        error_log = ErrorLogLimiter(log, "Failed to watch the configuration files, retrying")
        while True:
            try:
                await self._watch_files(flags)
            except OSError as err:
                error_log.failed(err, clock())
                await asyncio.sleep(POLL_SECONDS)

    async def _watch_files(self, flags: KubeletFlags) -> NoReturn:
        """Reload after changes until cancelled. Raises OSError."""
        clock = asyncio.get_running_loop().time
        # Files that have changed between the load and now are found by the first comparison.
        known: Fingerprint | None = None
        reloaded_at = clock() - MIN_INTERVAL_SECONDS
        changed_at: float | None = None
        with PathWatch(SETTLE_SECONDS) as watch:
            while True:
                watch.arm(await finish_in_thread(partial(_directories, flags)))
                current = await finish_in_thread(partial(fingerprint, flags))
                if current == known:
                    changed_at = None
                    await watch.wait(POLL_SECONDS)
                    await asyncio.sleep(DEBOUNCE_SECONDS)
                    continue
                changed_at = clock() if changed_at is None else changed_at
                # Reads the queued events, from which it is known which files are being written.
                watch.take_removed()
                if clock() - changed_at < SETTLE_SECONDS and await finish_in_thread(
                    partial(_are_written, flags, watch.being_written())
                ):
                    await asyncio.sleep(DEBOUNCE_SECONDS)
                    continue
                if (early := reloaded_at + MIN_INTERVAL_SECONDS - clock()) > 0:
                    await asyncio.sleep(wait_seconds(early))
                    continue
                known, changed_at, reloaded_at = current, None, clock()
                await self.reload(FILE)


def fingerprint(flags: KubeletFlags) -> Fingerprint:
    """Return identity, size and times of the configuration files. Blocks."""
    return tuple((str(path), *_identity(path)) for path in config_files(flags))


def config_files(flags: KubeletFlags) -> list[Path]:
    """Return the configuration file and the drop-ins that exist. Blocks."""
    files = [Path(flags.config)] if flags.config else []
    if flags.config_dir:
        with contextlib.suppress(ConfigError, OSError):
            files += find_drop_ins(Path(flags.config_dir)).used
    return files


def _identity(path: Path) -> tuple[Any, ...]:
    try:
        found = path.stat()
    except OSError as err:
        return (err.errno,)
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def _directories(flags: KubeletFlags) -> dict[Path, frozenset[str]]:
    found = dict(directories_to_watch(Path(flags.config))) if flags.config else {}
    if flags.config_dir:
        for directory, _, _ in itertools.islice(os.walk(flags.config_dir), MAX_DIRECTORIES):
            for path, names in directories_to_watch(Path(directory)).items():
                # An empty set of names means all.
                known = found.get(path)
                found[path] = names if known is None else known | names if known and names else frozenset()
        if not Path(flags.config_dir).is_dir():
            found.update(directories_to_watch(Path(flags.config_dir)))
    return found


def _are_written(flags: KubeletFlags, being_written: frozenset[Path]) -> bool:
    """Return whether a configuration file is among the files that are being written. Blocks."""
    if not being_written:
        return False
    return any(not being_written.isdisjoint(links(file)) for file in config_files(flags))


def _make_plan(
    load_config: Callable[[Sequence[str]], LoadedConfig],
    running: LoadedConfig,
    compared: KubeletConfiguration,
    effective: KubeletConfiguration,
    tries: int,
) -> _Plan:
    """Load the configuration, and compare it with the running one.

    Blocks. Raises ConfigError and FilesChangedError.
    """
    loaded = _load_stable(load_config, running, tries)
    changes = differences(compared, loaded.config)
    applied = [change for change in changes if not change.restart_reason]
    restart = [change for change in changes if change.restart_reason]
    new = with_fields(effective, loaded.config, (change.path for change in applied))
    # Without a field that requires a restart, this is the configuration that has just been validated.
    found = validate(new, running.gates.enabled) if restart and applied else []
    problems = [f"{problem} (valid only after a restart, with the other changes)" for problem in found]
    return _Plan(loaded, applied, restart, new, problems)


def _load_stable(
    load_config: Callable[[Sequence[str]], LoadedConfig], running: LoadedConfig, tries: int
) -> LoadedConfig:
    """Load files that do not change while they are loaded. Raises ConfigError and FilesChangedError."""
    for number in range(tries):
        if number:
            time.sleep(RETRY_SECONDS)
        before = fingerprint(running.flags)
        try:
            loaded = load_config(running.argv)
        except ConfigError:
            if fingerprint(running.flags) == before:
                raise
            continue
        if fingerprint(running.flags) == before:
            return loaded
    raise FilesChangedError("the configuration files change while they are read: replace them by a rename")


def _event_text(report: ReloadReport) -> str:
    applied = [*(change.path for change in report.applied), *report.other]
    parts = [f"applied {', '.join(applied)}"] if applied else []
    if report.restart_required:
        parts.append(f"requires a restart: {', '.join(change.path for change in report.restart_required)}")
    if report.unused:
        parts.append(f"not used by this node: {', '.join(change.path for change in report.unused)}")
    return f"Configuration reloaded: {'; '.join(parts)}"[:MAX_EVENT_CHARACTERS]
